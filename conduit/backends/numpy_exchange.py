"""NumPy's side of `conduit.backends.exchange`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.backends import exchange
from conduit.core.backend import Target
from conduit.errors import HandOverError

Array = NDArray[Any]


def to_numpy(leaf: Any) -> Array:
    """`leaf` itself; a NumPy scalar as an array without axes."""
    return np.asarray(leaf)


def fetch(leaf: Any) -> Callable[[], Array]:
    copy = np.array(leaf)
    return lambda: copy


def place(target: Target) -> exchange.DLPackDevice:
    """The host. HandOverError for any other device."""
    if target.device not in (None, "cpu"):
        raise HandOverError(
            f"NumPy arrays live on the host; got device={target.device!r}. Leave it out, or to='torch' or 'jax'"
        )
    return exchange.CPU


def accept(arrays: Mapping[str, Any], target: Target) -> dict[str, Array]:
    """The arrays on the host, sharing memory with those that are there already (read-only when JAX made them)."""
    place(target)
    return {path: exchange.to_numpy(array) for path, array in arrays.items()}


def concatenate(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {path: np.concatenate([part[path] for part in parts]) for path in parts[0]}


def widen(leaf: Array, shape: tuple[int, ...]) -> Array:
    wide = np.zeros(shape, leaf.dtype)
    wide[tuple(map(slice, leaf.shape))] = leaf
    return wide
