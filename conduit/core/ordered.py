"""Draws in an order: the oldest or newest rows, those of highest or lowest priority. As a remover, each says who goes first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conduit.core.drawable import live_keys, short_of, slot_ranges, still_live
from conduit.core.journal import Copy, Journal, at_once
from conduit.core.ring import Window
from conduit.core.sampling import Draw, Sampler, State
from conduit.core.starts import Starts
from conduit.errors import PriorityError

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Ranks = NDArray[np.float64] | NDArray[np.complex128]
"""Lowest first. A pair is a complex number: NumPy orders them by their real parts, and by the imaginary ones where those are equal."""

_BITS = 4
_GROUP = 1 << _BITS
_MOST_ROOTS = 256
_MOST_PENDING = 1 << 16
_LAST = float("inf")


@dataclass(frozen=True, slots=True)
class Fifo:
    """The oldest drawable rows, the oldest first; distinct ones. With `max_times_sampled=1` a queue. It costs 9.5 B a row."""

    @property
    def prioritized(self) -> bool:
        return False

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _OrderedSampler("Fifo", capacity, starts, by_age=1.0)


@dataclass(frozen=True, slots=True)
class Lifo:
    """The newest drawable rows, the newest first; distinct ones. With `max_times_sampled=1` a stack. It costs 9.5 B a row."""

    @property
    def prioritized(self) -> bool:
        return False

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _OrderedSampler("Lifo", capacity, starts, by_age=-1.0)


@dataclass(frozen=True, slots=True)
class MaxHeap:
    """The drawable rows of highest priority, the highest first, of equal ones the oldest; distinct ones. Priorities are taken as
    they are, 0 like any other; a row that comes without one has 1. It costs 18 B a row."""

    @property
    def prioritized(self) -> bool:
        return True

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _OrderedSampler("MaxHeap", capacity, starts, by_priority=-1.0)


@dataclass(frozen=True, slots=True)
class MinHeap:
    """The drawable rows of lowest priority, the lowest first, of equal ones the oldest; distinct ones. Priorities are taken as
    they are, 0 like any other; a row that comes without one has 1. It costs 18 B a row."""

    @property
    def prioritized(self) -> bool:
        return True

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _OrderedSampler("MinHeap", capacity, starts, by_priority=1.0)


class _OrderedSampler:
    """Rows of the lowest rank: `by_priority` times the priority, then `by_age` times how many rows came before. That isn't the
    key, for keys may be slots."""

    def __init__(
        self, name: str, capacity: int, starts: Starts | None, by_age: float = 1.0, by_priority: float = 0.0
    ) -> None:
        self._name = name
        self._capacity = capacity
        self._starts = starts
        self._by_age = by_age
        self._by_priority = by_priority
        self._came = 0
        self._tree = RankTree(capacity, np.dtype(np.complex128 if by_priority else np.float64))
        self.highest_priority = float(np.finfo(np.float64).max) if by_priority else 0.0

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        order = np.arange(self._came, self._came + rows)
        self._came += rows
        raw = np.ones(rows) if priority is None else np.where(np.isnan(priority), 1.0, priority)
        self._put(first_key, self._ranks(order, raw), np.full(rows, self._starts is None))

    def admit(self, keys: Keys) -> None:
        self._tree.show(keys % self._capacity)

    def exclude(self, keys: Keys) -> None:
        self._tree.hide(keys % self._capacity)

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        drawable = self._tree.count
        return short_of(rows, drawable, drawable if self._starts is None else len(window))

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        slots, ranks = self._tree.first(rows)
        keys = live_keys(slots, window, self._capacity)
        return Draw(keys, 1.0, None, self._by_priority * ranks.real if self._by_priority else 1.0)

    def update(self, keys: Keys, priority: Floats) -> None:
        if not self._by_priority:
            raise PriorityError(
                f"the sampler is {self._name}: rows have no priorities; use a sampler such as conduit.MaxHeap()"
            )
        slots = keys % self._capacity
        self._tree.move(slots, self._pairs(priority, self._tree.ranks(slots).imag))

    def state(self, window: Window, copy: Copy = at_once) -> State:
        journal, by_age, by_priority = self._tree.journal, self._by_age, self._by_priority

        def order(ranks: Ranks) -> Keys:
            return (ranks.imag if by_priority else by_age * ranks).astype(np.int64)

        state = {"first": window.first, "came": self._came, "order": copy(journal, "ranks", window, order)}
        if by_priority:
            state["priority"] = copy(journal, "ranks", window, lambda ranks: by_priority * np.real(ranks))
        if self._starts is None:
            state["drawable"] = copy(journal, "shown", window)
        return state

    def load(self, state: State, window: Window) -> None:
        self._came, first, starts = int(state["came"]), state["first"], self._starts
        slots = np.arange(window.first, window.stop) % self._capacity
        raw = still_live(state["priority"], first, window) if self._by_priority else np.ones(len(window))
        shown = starts.at(slots) if starts is not None else still_live(state["drawable"], first, window)
        self._put(window.first, self._ranks(still_live(state["order"], first, window), raw), shown)

    def _put(self, first_key: int, ranks: Ranks, shown: Flags) -> None:
        for start, stop, those in slot_ranges(first_key, len(ranks), self._capacity):
            self._tree.put(start, stop, ranks[those], shown[those])

    def _ranks(self, order: Keys, raw: Floats) -> Ranks:
        return self._pairs(raw, order) if self._by_priority else np.multiply(order, self._by_age, dtype=np.float64)

    def _pairs(self, raw: Floats, order: Keys | Floats) -> Ranks:
        ranks = np.empty(len(raw), np.complex128)
        ranks.real, ranks.imag = self._by_priority * raw, order
        return ranks


class RankTree:
    """Finite ranks of places, the lowest of which are found quickly: the lowest of every 16 places is known, that of 16 such, and
    so on, up to at most 256. A place is shown or hidden; hidden ones aren't found. At first, all are hidden."""

    def __init__(self, places: int, dtype: np.dtype) -> None:
        depth, roots = 0, places
        while roots > _MOST_ROOTS:
            depth, roots = depth + 1, -(-roots >> _BITS)
        self._last = dtype.type(complex(_LAST, _LAST) if dtype.kind == "c" else _LAST)
        self._ranks = np.zeros(roots << _BITS * depth, dtype)
        self._shown = np.zeros(len(self._ranks), np.bool_)
        self.journal = Journal({"ranks": self._ranks[:places], "shown": self._shown[:places]})
        self._lowest = [np.full(roots << _BITS * level, self._last) for level in reversed(range(depth))]
        """From the groups of places up."""
        self._roots = roots
        self._pending = self._pending_stop = 0
        self.count = 0
        """How many places are shown."""

    def ranks(self, places: Keys) -> Ranks:
        return self._ranks.take(places)

    def shown(self, places: Keys) -> Flags:
        return self._shown.take(places)

    def put(self, start: int, stop: int, ranks: Ranks, shown: Flags) -> None:
        """Sets places [start, stop). What is above them waits: for more places after them, or for the first who asks."""
        self.count += int(np.count_nonzero(shown)) - int(np.count_nonzero(self._shown[start:stop]))
        if self.journal.on:
            self.journal.before_range(start, stop)
        self._ranks[start:stop], self._shown[start:stop] = ranks, shown
        if start != self._pending_stop or stop - self._pending > _MOST_PENDING:
            self._settle()
            self._pending = start
        self._pending_stop = stop

    def move(self, places: Keys, ranks: Ranks) -> None:
        """Sets the ranks of places, shown or hidden; of one that occurs twice, the last stays."""
        if self.journal.on:
            self.journal.before(places)
        self._ranks[places] = ranks
        self._climb(places)

    def show(self, places: Keys) -> None:
        """Distinct places are shown from now on."""
        self.count += len(places) - int(np.count_nonzero(self._shown.take(places)))
        if self.journal.on:
            self.journal.before(places)
        self._shown[places] = True
        self._climb(places)

    def hide(self, places: Keys) -> None:
        """Distinct places are hidden from now on."""
        self.count -= int(np.count_nonzero(self._shown.take(places)))
        if self.journal.on:
            self.journal.before(places)
        self._shown[places] = False
        self._climb(places)

    def first(self, count: int) -> tuple[Keys, Ranks]:
        """The `count` shown places of the lowest ranks, the lowest first, and their ranks. There must be as many.

        They are in as many groups at most: those whose lowest are the lowest."""
        self._settle()
        places = np.arange(self._roots)
        for lowest in reversed(self._lowest):
            groups = places.take(self._least(lowest.take(places), count))
            places = ((groups << _BITS)[:, None] + np.arange(_GROUP)).reshape(-1)
        ranks = self._effective(places)
        found = self._least(ranks, count)
        found = found[ranks.take(found).argsort()]
        return places.take(found), ranks.take(found)

    def _least(self, ranks: Ranks, count: int) -> Keys:
        """Where the `count` lowest are, in any order; where fewer places are shown, those."""
        (shown,) = np.nonzero(ranks < self._last)
        if len(shown) <= count:
            return shown
        ranks = ranks.take(shown)
        # Where rows left in order, ages are a run or two, for which a stable sort takes a quarter of the time.
        order = ranks.argpartition(count - 1) if ranks.dtype.kind == "c" else ranks.argsort(kind="stable")
        return shown.take(order[:count])

    def _effective(self, places: Keys) -> Ranks:
        return np.where(self._shown.take(places), self._ranks.take(places), self._last)

    def _climb(self, places: Keys) -> None:
        below = None
        for lowest in self._lowest:
            places = places >> _BITS
            members = ((places << _BITS)[:, None] + np.arange(_GROUP)).reshape(-1)
            lowest[places] = _halved(self._effective(members) if below is None else below.take(members), len(places))
            below = lowest

    def _settle(self) -> None:
        """Makes all that is known of groups true."""
        start, stop = self._pending, self._pending_stop
        self._pending = stop
        below = None
        for lowest in self._lowest:
            if start == stop:
                return
            start, stop = start >> _BITS, ((stop - 1) >> _BITS) + 1
            members = slice(start << _BITS, stop << _BITS)
            if below is None:
                ranks = np.where(self._shown[members], self._ranks[members], self._last)
            else:
                ranks = below[members]
            lowest[start:stop] = _halved(ranks, stop - start)
            below = lowest


def _halved(ranks: Ranks, count: int) -> Ranks:
    """The lowest of each of `count` groups."""
    while len(ranks) > count:
        ranks = np.minimum(ranks[0::2], ranks[1::2])
    return ranks
