"""A sampler that keeps every promise, and samplers that break one each, as people have broken them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from conduit.core.ring import Window
from conduit.core.sampling import Draw, Sampler
from conduit.core.starts import Starts

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]


class Right:
    """In proportion to priority, in time proportional to the capacity. A priority of 0 disables a row."""

    promise: ClassVar[str] = ""
    """The one that it breaks."""
    prioritized: ClassVar[bool] = True
    highest_priority = 1e100

    def __init__(self, capacity: int, seed: int, starts: Starts | None) -> None:
        self.capacity = capacity
        self.seed = seed
        self.starts = starts
        self.key = np.full(capacity, -1)
        self.drawable = np.zeros(capacity, np.bool_)
        self.priority = np.zeros(capacity)
        self.mass = np.zeros(capacity)
        """The priority of drawable rows; 0 for others."""

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        keys = np.arange(first_key, first_key + rows)
        slots = keys % self.capacity
        self.key[slots] = keys
        self.drawable[slots] = self.starts is None
        self.set(slots, np.ones(rows) if priority is None else np.where(np.isnan(priority), 1.0, priority))

    def admit(self, keys: Keys) -> None:
        slots = keys % self.capacity
        self.drawable[slots] = True
        self.set(slots, self.priority[slots])

    def exclude(self, keys: Keys) -> None:
        slots = keys % self.capacity
        self.drawable[slots] = False
        self.set(slots, self.priority[slots])

    def update(self, keys: Keys, priority: Floats) -> None:
        self.set(keys % self.capacity, priority)

    def set(self, slots: Keys, priority: Floats) -> None:
        self.priority[slots] = priority
        self.mass[slots] = priority * self.drawable[slots]

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        count = np.count_nonzero(self.drawable)
        if count < rows:
            return f"{count} rows can be drawn and a batch needs {rows}"
        return None if self.mass.any() else "all rows have priority 0"

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        slots = self.choose(self.random(number, stream).random(rows))
        return Draw(self.key[slots], self.mass[slots] / self.mass.sum(), None, self.priority[slots])

    def random(self, number: int, stream: int) -> Any:
        return np.random.default_rng([self.seed, number, stream])

    def choose(self, fractions: Floats) -> Keys:
        slots = np.flatnonzero(self.mass)
        sums = self.mass[slots].cumsum()
        return slots[np.minimum(sums.searchsorted(fractions * sums[-1], side="right"), len(slots) - 1)]

    def state(self, window: Window) -> dict[str, Any]:
        slots = np.arange(window.first, window.stop) % self.capacity
        return {"first": window.first, "drawable": self.drawable[slots], "priority": self.priority[slots]}

    def load(self, state: Mapping[str, Any], window: Window) -> None:
        keys = np.arange(window.first, window.stop)
        slots, places = keys % self.capacity, keys - state["first"]
        self.key[slots], self.drawable[slots] = keys, state["drawable"][places]
        self.set(slots, state["priority"][places])


@dataclass(frozen=True)
class Planted:
    """The value of one of the samplers here."""

    sampler: type[Right]

    @property
    def prioritized(self) -> bool:
        return self.sampler.prioritized

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return self.sampler(capacity, seed, starts)

    def __repr__(self) -> str:
        return f"{self.sampler.__name__}()"


class PastTheFrontier(Right):
    """The number of rows counts as the index of one."""

    promise = "live"
    prioritized = False

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        fractions = self.random(number, stream).random(rows)
        return Draw(window.first + (fractions * (len(window) + 1)).astype(np.int64), 1.0 / len(window))


class OneOffAfterTheWrap(Right):
    """The slot at the cursor counts as written in this round."""

    promise = "live"

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        draw = super().draw(number, rows, window, stream)
        keys = draw.keys % self.capacity + (window.stop - window.stop % self.capacity)
        draw.keys = keys - self.capacity * (keys > window.stop)
        return draw


class OldKey(Right):
    """A slot that is used again keeps the key of its first row."""

    promise = "live"

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        before = self.key.copy()
        super().insert(first_key, rows, priority)
        self.key[before >= 0] = before[before >= 0]


class LostRowsComeBack(Right):
    """It loads all rows that the state knows, also those that aren't there any more."""

    promise = "missing"

    def load(self, state: Mapping[str, Any], window: Window) -> None:
        super().load(state, Window(max(state["first"], window.stop - self.capacity), window.stop))


class ForgetsExclude(Right):
    """Excluded rows count no more, but have their shares still."""

    promise = "excluded"

    def exclude(self, keys: Keys) -> None:
        self.drawable[keys % self.capacity] = False


class RevivedByUpdate(Right):
    """A late priority gives a row its share again."""

    promise = "excluded"

    def update(self, keys: Keys, priority: Floats) -> None:
        super().update(keys, priority)
        self.mass[keys % self.capacity] = self.priority[keys % self.capacity]


class TooEarly(Right):
    """Draws rows as soon as they are inserted."""

    promise = "admitted"

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        super().insert(first_key, rows, priority)
        slots = np.arange(first_key, first_key + rows) % self.capacity
        self.mass[slots] = self.priority[slots]


class OldPriority(Right):
    """A slot that is used again shows that of the row before."""

    promise = "priority"

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        before, used = self.priority.copy(), self.key >= 0
        super().insert(first_key, rows, priority)
        self.priority[used] = before[used]


class StaysDisabled(Right):
    """A slot whose row was disabled is so for the next one, if that comes without a priority."""

    promise = "missing"

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        slots = np.arange(first_key, first_key + rows) % self.capacity
        before = np.where(self.key[slots] < 0, 1.0, self.priority[slots])
        super().insert(first_key, rows, before if priority is None else priority)


class FirstUpdateStays(Right):
    """Not the last, of a key that occurs twice."""

    promise = "priority"

    def update(self, keys: Keys, priority: Floats) -> None:
        super().update(keys[::-1], priority[::-1])


class SmallChanceForAll(Right):
    """Adds something to every priority, so that 0 isn't 0 any more."""

    promise = "disabled"

    def set(self, slots: Keys, priority: Floats) -> None:
        super().set(slots, priority)
        self.mass[slots] += 0.1 * self.drawable[slots]

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return super().missing(window, rows, number) or (None if self.priority[self.drawable].any() else "all are 0")


class DividesByZero(Right):
    """Draws though all rows have priority 0."""

    promise = "disabled"

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return None if np.count_nonzero(self.drawable) >= rows else "more rows"


class CountsTheWindow(Right):
    """Takes every live row for a drawable one."""

    promise = "missing"

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return None if len(window) >= rows and self.mass.any() else "more rows"


class WantsOneMore(Right):
    """A batch of all rows waits for ever."""

    promise = "missing"

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return super().missing(window, rows + 1, number)


class SaysNothing(Right):
    promise = "missing"

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return None if super().missing(window, rows, number) is None else ""


class TriesForEver(Right):
    """Looks for distinct rows where too few aren't disabled."""

    promise = "answers"

    def choose(self, fractions: Floats) -> Keys:
        found, random = np.zeros(0, np.int64), np.random.default_rng(len(fractions))
        while len(found) < len(fractions):
            found = np.unique(np.append(found, super().choose(random.random(1))))
        return found


class SmallKeys(Right):
    promise = "form"

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        draw = super().draw(number, rows, window, stream)
        return replace(draw, keys=draw.keys.astype(np.int32))


class EndlessWeights(Right):
    """The weight of a row with a tiny priority isn't finite."""

    promise = "form"

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        draw = super().draw(number, rows, window, stream)
        with np.errstate(over="ignore"):
            return replace(draw, weight=1.0 / np.asarray(draw.priority))


class SharedGenerator(Right):
    promise = "repeatable"

    def random(self, number: int, stream: int) -> Any:
        return np.random.mtrand._rand


class SeedsTheSharedGenerator(Right):
    """So that what it draws repeats, and what all others draw does, too."""

    promise = "repeatable"

    def random(self, number: int, stream: int) -> Any:
        np.random.seed([self.seed % 2**32, number, stream])
        return np.random.mtrand._rand


class OneBuffer(Right):
    """Each batch is a view of the same memory."""

    promise = "own arrays"

    def __init__(self, capacity: int, seed: int, starts: Starts | None) -> None:
        super().__init__(capacity, seed, starts)
        self.buffer = np.zeros(capacity, np.int64)

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        draw = super().draw(number, rows, window, stream)
        self.buffer[:rows] = draw.keys
        return replace(draw, keys=self.buffer[:rows])


class GivesItsOrderAway(Right):
    """Who changes a batch's keys changes what later batches are made of."""

    promise = "own arrays"

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        if rows < self.capacity or not self.mass.all():
            return super().draw(number, rows, window, stream)
        return Draw(self.key, 1.0, None, self.priority.copy())


class LendsItsTable(Right):
    """Keeps the probability of each row of a batch for the next batch of that size."""

    promise = "own arrays"
    prioritized = False

    def __init__(self, capacity: int, seed: int, starts: Starts | None) -> None:
        super().__init__(capacity, seed, starts)
        self.even: dict[tuple[int, int], Floats] = {}

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        keys = super().draw(number, rows, window, stream).keys
        count = int(np.count_nonzero(self.drawable))
        return Draw(keys, self.even.setdefault((rows, count), np.full(rows, 1.0 / count)))


class StateIsAView(Right):
    """A state goes on changing."""

    promise = "own arrays"

    def state(self, window: Window) -> dict[str, Any]:
        state = super().state(window)
        if not window.first and len(window) == self.capacity:
            state["priority"] = self.priority
        return state


class ForgetsPriorities(Right):
    """Those of updates aren't in it."""

    promise = "state"

    def state(self, window: Window) -> dict[str, Any]:
        state = super().state(window)
        return state | {"priority": np.ones_like(state["priority"])}


class ForgetsWhatWasExcluded(Right):
    """A restored sampler takes every row for drawable, unless it has Starts."""

    promise = "state"

    def load(self, state: Mapping[str, Any], window: Window) -> None:
        super().load(state, window)
        live = np.arange(window.first, window.stop) % self.capacity
        self.drawable[live] = True if self.starts is None else self.starts.at(live)


class GoesOnFromItsOwnGenerator(Right):
    """How far the generator is isn't in it."""

    promise = "state"

    def __init__(self, capacity: int, seed: int, starts: Starts | None) -> None:
        super().__init__(capacity, seed, starts)
        self.generator = np.random.default_rng(seed)

    def random(self, number: int, stream: int) -> np.random.Generator:
        return self.generator


class StateBySlot(Right):
    """Can't be loaded where the capacity is another."""

    promise = "state"

    def state(self, window: Window) -> dict[str, Any]:
        return {"key": self.key.copy(), "drawable": self.drawable.copy(), "priority": self.priority.copy()}

    def load(self, state: Mapping[str, Any], window: Window) -> None:
        self.key[:], self.drawable[:], self.priority[:] = state["key"], state["drawable"], state["priority"]


class StateOfObjects(Right):
    """A set."""

    promise = "plain state"

    def state(self, window: Window) -> dict[str, Any]:
        return {**super().state(window), "excluded": {1, 2}}
