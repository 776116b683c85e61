"""Draws without replacement: in passes, in each of which every row comes once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conduit.core.drawable import distinct, live_keys, short_of, slot_ranges, still_live
from conduit.core.journal import Copy, Journal, at_once
from conduit.core.priority_tree import PriorityTree, compiled
from conduit.core.ring import Window
from conduit.core.sampling import Draw, DrawStream, Sampler, State
from conduit.core.starts import Starts
from conduit.errors import PriorityError

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WithoutReplacement:
    """Every drawable row once, in random order, before any is drawn again; then the next pass.

    A row that comes during a pass joins it, one that leaves is skipped. A batch that the rest of a pass can't fill takes that rest
    and goes on with the next pass; it never holds a row twice. All draws, `Store.sample`'s too, go on with the same pass.
    `probability`: one over the rows that the pass had left when the batch was drawn, or, of rows of the pass that a batch goes on
    with, over those of it that weren't in the batch yet. It costs 9.6 B a row."""

    @property
    def prioritized(self) -> bool:
        return False

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _PassSampler(capacity, seed, starts)


class _PassSampler:
    """What is left of a pass is a set of slots: leaves of 1 in a tree, whose sums say which is the n-th oldest. So draws depend on
    which rows are left, and not on how these came."""

    highest_priority = 0.0

    def __init__(self, capacity: int, seed: int, starts: Starts | None) -> None:
        self._capacity = capacity
        self._stream = DrawStream(seed)
        self._starts = starts
        self._left = PriorityTree(capacity, compiled())
        self._drawable = np.zeros(capacity, np.bool_)
        self._journal = Journal({"drawable": self._drawable})
        self._count = 0

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        drawable = np.full(rows, self._starts is None)
        self._put(first_key, drawable, drawable)

    def admit(self, keys: Keys) -> None:
        slots = keys % self._capacity
        self._count += len(slots) - int(np.count_nonzero(self._drawable.take(slots)))
        if self._journal.on:
            self._journal.before(slots)
        self._drawable[slots] = True
        self._left.set(slots, np.ones(len(slots)))

    def exclude(self, keys: Keys) -> None:
        slots = keys % self._capacity
        self._count -= int(np.count_nonzero(self._drawable.take(slots)))
        if self._journal.on:
            self._journal.before(slots)
        self._drawable[slots] = False
        self._left.set(slots, np.zeros(len(slots)))

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return short_of(rows, self._count, self._count if self._starts is None else len(window))

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        random = self._stream.at(number, stream)
        left = int(self._left.total)
        if rows <= left:
            return Draw(live_keys(self._take(random, rows, left, window), window, self._capacity), 1.0 / left)
        rest = self._take(random, left, left, window)
        self._left.set_range(0, self._drawable, self._capacity)
        # They are in the batch already: the next pass gives them later.
        self._left.set(rest, np.zeros(left))
        others = self._count - left
        more = self._take(random, rows - left, others, window)
        self._left.set(rest, np.ones(left))
        keys = live_keys(np.concatenate([rest, more]), window, self._capacity)
        if not left:
            return Draw(keys, 1.0 / others)
        return Draw(keys, np.repeat([1.0 / left, 1.0 / others], [left, rows - left]))

    def update(self, keys: Keys, priority: Floats) -> None:
        raise PriorityError(
            "the sampler is WithoutReplacement: rows have no priorities; use sampler=conduit.Prioritized()"
        )

    def state(self, window: Window, copy: Copy = at_once) -> State:
        state = {"first": window.first, "left": copy(self._left.journal, "leaves", window, lambda leaf: leaf > 0.0)}
        if self._starts is None:
            state["drawable"] = copy(self._journal, "drawable", window)
        return state

    def load(self, state: State, window: Window) -> None:
        first, slots = state["first"], np.arange(window.first, window.stop) % self._capacity
        given = self._starts
        drawable = still_live(state["drawable"], first, window) if given is None else given.at(slots)
        self._put(window.first, drawable, still_live(state["left"], first, window) & drawable)

    def _put(self, first_key: int, drawable: NDArray[np.bool_], left: NDArray[np.bool_]) -> None:
        """Rows from `first_key` on are drawable, and left to this pass, or not."""
        for start, stop, those in slot_ranges(first_key, len(drawable), self._capacity):
            had = np.count_nonzero(self._drawable[start:stop])
            self._count += int(np.count_nonzero(drawable[those])) - int(had)
            if self._journal.on:
                self._journal.before_range(start, stop)
            self._drawable[start:stop] = drawable[those]
            self._left.set_range(start, left[those], stop)

    def _take(self, random: np.random.Generator, rows: int, left: int, window: Window) -> Keys:
        """Slots of `rows` of the `left` rows that are left, which they are no more; in random order."""
        if not rows:
            return np.zeros(0, np.int64)
        # Counted from the oldest row: slot 0 may have a younger one.
        ranks = distinct(random, rows, left) + int(self._left.before(window.first % self._capacity))
        slots, _ = self._left.find((ranks % left).astype(np.float64))
        self._left.set(slots, np.zeros(rows))
        return slots
