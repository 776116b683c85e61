"""What a draw must look like, whether two are the same, and how to show one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.sampling import Draw
from conduit.core.starts import Starts

_MOST = 16
"""Elements of an array, in a message."""


def malformed(draw: Any, rows: int) -> str | None:
    """What of a draw isn't as it should be."""
    if not isinstance(draw, Draw):
        return f"a {type(draw).__name__} in place of a Draw"
    keys = draw.keys
    if not isinstance(keys, np.ndarray) or keys.dtype != np.int64 or keys.shape != (rows,):
        return f"keys: {_described(keys)}"
    probability, priority, weight = (
        value if isinstance(value, np.ndarray) else np.asarray(value)
        for value in (draw.probability, draw.priority, 1.0 if draw.weight is None else draw.weight)
    )
    # Sums of shares may round to a little above 1.
    if not _fits(probability, rows) or not 0.0 < probability.min() <= probability.max() <= 1.0 + 1e-9:
        return f"probability: {_described(draw.probability)}"
    if not _fits(priority, rows) or not np.isfinite(priority).all():
        return f"priority: {_described(draw.priority)}"
    if draw.weight is None:
        return None
    shaped = weight.shape == (rows,) and weight.dtype.kind == "f"
    if not shaped or not 0.0 < weight.min() <= weight.max() < np.inf:
        return f"weight: {_described(draw.weight)}"
    return None


def _fits(array: NDArray[Any], rows: int) -> bool:
    return array.dtype.kind in "fiu" and array.shape in ((), (rows,))


def difference(one: Draw, other: Any) -> str | None:
    """How two draws differ, if in a bit."""
    if not isinstance(other, Draw):
        return f"a Draw and a {type(other).__name__}"
    for name in ("keys", "probability", "weight", "priority"):
        here, there = np.asarray(getattr(one, name)), np.asarray(getattr(other, name))
        if here.dtype != there.dtype or here.tobytes() != there.tobytes():
            return f"{name} {shown(here)} and {shown(there)}"
    return None


def copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def scribble_on(*arrays: Any) -> None:
    for array in arrays:
        if isinstance(array, np.ndarray) and array.flags.writeable:
            array[...] = True if array.dtype == np.bool_ else 77


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)} {shown(value)}"
    return f"{value!r}, a {type(value).__name__}"


def shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {shown(part)}' for name, part in value.items())}}}"
    if not isinstance(value, np.ndarray):
        return "starts" if isinstance(value, Starts) else repr(value)
    if value.ndim != 1 or len(value) <= _MOST:
        return str(value.tolist())
    if value.dtype == np.int64 and value[-1] - value[0] == len(value) - 1 and not np.count_nonzero(np.diff(value) != 1):
        return f"arange({value[0]}, {value[-1] + 1})"
    return f"[{', '.join(map(str, value[:_MOST].tolist()))}, … {len(value) - _MOST} more]"
