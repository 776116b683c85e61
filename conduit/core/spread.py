"""Draws by age: the younger, the likelier; or spread evenly over all ages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conduit.core.drawable import Drawable, live_keys, require, slot_ranges
from conduit.core.journal import Copy, at_once
from conduit.core.priority_tree import PriorityTree, compiled
from conduit.core.ring import Window
from conduit.core.sampling import Draw, DrawStream, Sampler, State
from conduit.core.starts import Starts
from conduit.errors import PriorityError, SettingError

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]

_TRIES = (2, 8, 32)
"""A draw tries so many rows for each that it still needs, and then counts out those that can be drawn instead."""
_BLOCK = 1 << 14
_NEGLIGIBLE = 65.0
"""Half-lives after which the chances of all older rows add up to less than a float64 can tell."""
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True, slots=True)
class Recency:
    """The chance of a row falls by half with every `half_life` rows that came after it; with replacement.

    `probability`: its chance among all live rows. Where not all of them can be drawn, the chance among those that can is that,
    times the same factor for all. Not for stores whose rows leave in another order than they came in: there, nothing says how old
    a row is."""

    half_life: float

    def __post_init__(self) -> None:
        require("Recency", "half_life", self.half_life, lambda x: x > 0, "a finite number > 0, in rows")

    @property
    def prioritized(self) -> bool:
        return False

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _RecencySampler(float(self.half_life), capacity, seed, starts)


@dataclass(frozen=True, slots=True)
class Stratified:
    """Drawable rows in order of age, in as many equal strata as a batch has rows: one of each, in random order.

    A row between two strata belongs to each in part: every row has the same chance in every place of a batch, and where the rows
    aren't a multiple of the batch's, it may come twice. Not for stores whose rows leave in another order than they came in. Where not
    every live row can be drawn, it costs 8.6 B a row."""

    @property
    def prioritized(self) -> bool:
        return False

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _StratifiedSampler(capacity, seed, starts)


class _RecencySampler:
    highest_priority = 0.0

    def __init__(self, half_life: float, capacity: int, seed: int, starts: Starts | None) -> None:
        # With less, rows but the newest have chances that no float64 holds.
        self._half_life = max(half_life, 1e-3)
        self._slope = -math.log(2.0) / self._half_life
        self._capacity = capacity
        self._stream = DrawStream(seed)
        self._ages = _Ages("Recency")
        self._drawable = Drawable(capacity, starts)

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        self._ages.insert(first_key, rows)
        self._drawable.insert(first_key, rows)

    def admit(self, keys: Keys) -> None:
        pass

    def exclude(self, keys: Keys) -> None:
        self._drawable.exclude(keys)

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return self._drawable.missing(window, rows)

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        starts, live = self._drawable.starts, len(window)
        if starts is None or starts.count == live:
            ages = self._of(self._stream.fractions(number, rows, stream), live)
        else:
            ages = self._drawable_ages(self._stream.at(number, stream), rows, window, starts)
        newest = math.expm1(self._slope) / math.expm1(live * self._slope)
        chance = np.exp2(ages / -self._half_life)
        chance *= newest
        return Draw(window.frontier - ages, np.maximum(chance, _TINY, out=chance))

    def update(self, keys: Keys, priority: Floats) -> None:
        raise PriorityError("the sampler is Recency: rows have no priorities; use sampler=conduit.Prioritized()")

    def state(self, window: Window, copy: Copy = at_once) -> State:
        return {"excluded": self._drawable.excluded(window, copy)}

    def load(self, state: State, window: Window) -> None:
        self._ages.insert(window.first, len(window))
        self._drawable.load(state["excluded"], window)

    def _of(self, fractions: Floats, live: int) -> Keys:
        """The ages at these fractions of the chances of `live` rows, summed up from the newest: a geometric law's, cut off."""
        ages = np.log1p(fractions * math.expm1(live * self._slope)) / self._slope
        return np.minimum(ages.astype(np.int64), live - 1)

    def _drawable_ages(self, random: np.random.Generator, rows: int, window: Window, starts: Starts) -> Keys:
        """Rows are tried with their chances; those that can be drawn among them have the chances that they should have. Where
        they come too seldom, the rest is counted out."""
        found: list[Keys] = []
        need, live = rows, len(window)
        for tries in _TRIES:
            ages = self._of(random.random(tries * need), live)
            ages = ages[starts.at((window.frontier - ages) % self._capacity)][:need]
            found.append(ages)
            need -= len(ages)
            if not need:
                break
        else:
            found.append(self._counted_out(random.random(need), window, starts))
        return np.concatenate(found)

    def _counted_out(self, fractions: Floats, window: Window, starts: Starts) -> Keys:
        """The drawable ages at these fractions of their chances, summed up from the newest; but for rows so old that their
        chances are nothing beside that of the newest one."""
        found: list[Keys] = []
        start, stop = 0, len(window)
        while start < stop:
            ages = np.arange(start, min(start + _BLOCK, stop))
            start += _BLOCK
            ages = ages[starts.at((window.frontier - ages) % self._capacity)]
            if not len(ages):
                continue
            if not found:
                span = self._half_life * (_NEGLIGIBLE + math.log2(max(1.0, self._half_life)))
                stop = int(min(stop, ages[0] + span + 1))
            found.append(ages)
        ages = np.concatenate(found)
        sums = np.add.accumulate(np.exp2((ages - ages[0]) / -self._half_life))
        return ages.take(np.minimum(sums.searchsorted(fractions * sums[-1], side="right"), len(ages) - 1))


class _StratifiedSampler:
    highest_priority = 0.0

    def __init__(self, capacity: int, seed: int, starts: Starts | None) -> None:
        self._capacity = capacity
        self._stream = DrawStream(seed)
        self._given = starts
        self._ages = _Ages("Stratified")
        self._drawable = Drawable(capacity, starts)
        self._tree: PriorityTree | None = None
        """Leaves of 1 for drawable rows, whose sums say which is the n-th oldest. Made when it is needed for the first time."""

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        self._ages.insert(first_key, rows)
        self._drawable.insert(first_key, rows)
        if self._tree is not None:
            for start, stop, _ in slot_ranges(first_key, rows, self._capacity):
                self._tree.set_range(start, float(self._given is None), stop)

    def admit(self, keys: Keys) -> None:
        if self._tree is not None:
            self._tree.set(keys % self._capacity, np.ones(len(keys)))

    def exclude(self, keys: Keys) -> None:
        self._drawable.exclude(keys)
        if self._tree is not None:
            self._tree.set(keys % self._capacity, np.zeros(len(keys)))

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return self._drawable.missing(window, rows)

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        starts = self._drawable.starts
        count = len(window) if starts is None else starts.count
        fractions = self._stream.fractions(number, 2 * rows, stream)
        ranks = fractions[:rows] + np.arange(rows)
        ranks *= count / rows
        # Rounding may put the last one past the end.
        ranks = np.minimum(ranks.astype(np.int64), count - 1)
        keys = window.first + ranks if starts is None or count == len(window) else self._nth(ranks, window, starts)
        return Draw(keys.take(fractions[rows:].argsort()), 1.0 / count)

    def update(self, keys: Keys, priority: Floats) -> None:
        raise PriorityError("the sampler is Stratified: rows have no priorities; use sampler=conduit.Prioritized()")

    def state(self, window: Window, copy: Copy = at_once) -> State:
        return {"excluded": self._drawable.excluded(window, copy)}

    def load(self, state: State, window: Window) -> None:
        self._ages.insert(window.first, len(window))
        self._drawable.load(state["excluded"], window)

    def _nth(self, ranks: Keys, window: Window, starts: Starts) -> Keys:
        """The drawable rows that come after so many older ones."""
        if self._tree is None:
            self._tree = PriorityTree(self._capacity, compiled())
            slots = np.arange(window.first, window.stop) % self._capacity
            self._tree.set(slots, starts.at(slots).astype(np.float64))
        # Counted from the oldest row: slot 0 may have a younger one.
        places = (ranks + int(self._tree.before(window.first % self._capacity))) % starts.count
        slots, _ = self._tree.find(places.astype(np.float64))
        return live_keys(slots, window, self._capacity)


class _Ages:
    """Sees that keys tell ages: later rows have higher ones."""

    def __init__(self, sampler: str) -> None:
        self._sampler = sampler
        self._stop = 0

    def insert(self, first_key: int, rows: int) -> None:
        if first_key < self._stop:
            raise SettingError(
                f"{self._sampler} goes by age, and this store's rows leave in another order than they came in: use remover=conduit.Fifo(), "
                "or a sampler that doesn't"
            )
        self._stop = first_key + rows
