"""Priorities on their way from learners to the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from conduit.core.buffer import ExperienceBuffer
from conduit.core.order import Order
from conduit.core.sampling import Sampler
from conduit.core.signature import check_priorities
from conduit.errors import PriorityError, SchemaError, UnknownKeyError

T = TypeVar("T")
Array = NDArray[Any]
Keys = NDArray[np.int64]
Floats = NDArray[np.float64]
_WHERE = "update_priorities"


@dataclass(frozen=True, slots=True)
class PriorityUpdate:
    """What became of an `update_priorities`: how many keys were live when it was called, and how many had been evicted."""

    applied: int
    stale: int


class Arrays(Protocol):
    """How arrays of any framework become NumPy's."""

    def to_numpy(self, leaf: Any, /) -> Array: ...

    def fetch(self, leaf: Any, /) -> Callable[[], Array]:
        """Starts a copy to the host; the function returned waits for it."""
        ...

    def on_host(self, leaf: Any, /) -> bool: ...


class Priorities:
    """Checks updates when they are asked for, and applies them in their turn: to the keys that are still live then."""

    def __init__(self, arrays: Arrays, order: Order, buffer: ExperienceBuffer, samplers: Sequence[Sampler]) -> None:
        """`samplers`: those that are told; of a store's several tables one may be."""
        self._arrays = arrays
        self._order = order
        self._buffer = buffer
        self._samplers = samplers
        self._highest = min(sampler.highest_priority for sampler in samplers)
        self.applied = 0
        self.stale = 0

    def update(self, keys: Any, priorities: Any) -> PriorityUpdate:
        """See `Store.update_priorities`."""
        numbers, oldest = self._issued(keys)
        if isinstance(priorities, np.ndarray):
            apply = partial(self._apply, numbers, oldest, self._checked(priorities, numbers))
        elif self._arrays.on_host(priorities):
            values = _named("priorities", self._arrays.to_numpy, priorities)
            apply = partial(self._apply, numbers, oldest, self._checked(values, numbers))
        else:
            fetch = _named("priorities", self._arrays.fetch, priorities)
            apply = partial(self._apply_fetched, numbers, oldest, fetch)
        live = len(self._buffer.find(numbers, oldest)[0])
        self._order.act(apply)
        return PriorityUpdate(live, len(numbers) - live)

    def _issued(self, keys: Any) -> tuple[Keys, int]:
        """A copy of the keys, and the oldest of them."""
        numbers = keys if isinstance(keys, np.ndarray) else _named("keys", self._arrays.to_numpy, keys)
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
            raise UnknownKeyError(
                f"{_WHERE}: keys are {numbers.dtype}{list(numbers.shape)}; expected whole numbers of shape (n,)"
            )
        if not len(numbers):
            return np.zeros(0, np.int64), 0
        stop = self._buffer.inserted
        oldest = int(np.minimum.reduce(numbers))
        if oldest < 0 or int(np.maximum.reduce(numbers)) >= stop:
            unknown = numbers[(numbers < 0) | (numbers >= stop)]
            so_far = f"keys go from 0 to {stop - 1} so far" if stop else "no row has been inserted yet"
            raise UnknownKeyError(f"{_WHERE}: key {unknown[0]} was never issued; {so_far}")
        return numbers.astype(np.int64), oldest

    def _apply_fetched(self, keys: Keys, oldest: int, fetch: Callable[[], Array]) -> None:
        self._apply(keys, oldest, self._checked(fetch(), keys))

    def _apply(self, keys: Keys, oldest: int, priorities: Floats) -> None:
        rows, live = self._buffer.find(keys, oldest)
        if live is not None:
            priorities = priorities[live]
        for sampler in self._samplers:
            sampler.update(rows, priorities)
        self.applied += len(rows)
        self.stale += len(keys) - len(rows)

    def _checked(self, values: Array, keys: Keys) -> Floats:
        """A copy of the values, as float64."""
        if values.dtype.kind in "cOSUMm":
            raise PriorityError(f"{_WHERE}: priorities are {values.dtype}; expected real numbers")
        priorities = values.astype(np.float64)
        if priorities.shape != keys.shape:
            raise PriorityError(
                f"{_WHERE}: {list(priorities.shape)} priorities for {list(keys.shape)} keys; expected one a key"
            )
        highest = self._highest
        # NaN goes through both, and fits between nothing.
        if len(keys) and not 0.0 <= np.minimum.reduce(priorities) <= np.maximum.reduce(priorities) <= highest:
            check_priorities(priorities, highest, lambda i: f"{_WHERE}: key {keys[i]}")
        return priorities


def _named(name: str, convert: Callable[[Any], T], array: Any) -> T:
    """`convert(array)`; SchemaError names the argument."""
    try:
        return convert(array)
    except SchemaError as error:
        raise SchemaError(f"{_WHERE}: {name}: {error}") from None
