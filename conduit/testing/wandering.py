"""Random plays."""

from __future__ import annotations

import numpy as np

from conduit.testing.model import NONE, Floats, Keys
from conduit.testing.plays import Play

_STREAMS = (0, 0, 0, 1, 1, 16, 17)
"""A learner's; `Store.sample`'s; and those that take the places of rows that were drawn too often."""


class Wanderer:
    """Does anything that a store may do."""

    def __init__(self, play: Play, dice: np.random.Generator, prioritized: bool) -> None:
        self._play = play
        self._dice = dice
        self._highest = play.highest_priority if prioritized else None
        self._staged = NONE
        self._number = 0

    def wander(self, steps: int) -> None:
        does = [self._insert, self._admit, self._exclude, self._update, self._draw, self._restore, self._move]
        for step in self._dice.choice(len(does), steps, p=[0.28, 0.1, 0.1, 0.15, 0.27, 0.07, 0.03]):
            does[step]()

    def _insert(self) -> None:
        if self._play.rows.in_slots:
            self._insert_in_slots()
            return
        rows = self._play.rows
        count = (
            int(self._dice.integers(1, rows.capacity + 3)) if self._dice.random() < 0.3 else self._few(rows.capacity)
        )
        stop = rows.window.stop + count
        oldest = max(rows.window.first, stop - rows.capacity)
        came = np.arange(max(oldest, rows.window.stop), stop)
        waiting = rows.waiting
        admit = (
            came if self._dice.random() < 0.5 else self._some(np.concatenate([waiting[waiting >= oldest], came]), 0.7)
        )
        drawable = rows.drawable
        exclude = self._some(drawable[drawable >= oldest], 0.3) if self._dice.random() < 0.2 else NONE
        self._play.insert(count, self._priorities(count, new=True), admit=admit, exclude=exclude)

    def _insert_in_slots(self) -> None:
        rows = self._play.rows
        used = rows.window.stop
        at = used if used < rows.capacity and self._dice.random() < 0.7 else int(self._dice.integers(0, max(used, 1)))
        count = min(self._few(rows.capacity), rows.capacity - at)
        taken = np.intersect1d(np.arange(at, at + count), rows.drawable)
        exclude = taken if self._dice.random() < 0.5 else NONE
        self._play.insert(count, self._priorities(count, new=True), at=at, exclude=exclude)

    def _admit(self) -> None:
        waiting = self._some(self._play.rows.waiting, 0.6)
        if len(waiting):
            self._play.admit(self._dice.permutation(waiting))

    def _exclude(self) -> None:
        rows = self._play.rows.drawable
        if self._dice.random() < 0.6:
            rows = np.intersect1d(rows, self._staged)
        elif self._dice.random() < 0.8:
            rows = self._some(rows, 0.5)
        if len(rows):
            self._play.exclude(self._dice.permutation(rows))

    def _update(self) -> None:
        if self._highest is None:
            return
        live = self._play.rows.live
        keys = np.concatenate([np.intersect1d(self._staged, live), self._dice.choice(live, min(len(live), 4))])
        priority = self._priorities(len(keys), new=False)
        if priority is not None:
            self._play.update(keys, priority)

    def _draw(self) -> None:
        drawable = self._play.rows.count
        rows = min(drawable, self._few(70)) if self._dice.random() < 0.8 else min(drawable, 300) + 1
        self._number += 1
        number = self._number if self._dice.random() < 0.8 else int(self._dice.choice([0, self._number // 2, 10**9]))
        if drawn := self._play.draw(max(rows, 1), number, int(self._dice.choice(_STREAMS))):
            self._staged = drawn.keys

    def _restore(self) -> None:
        self._play.restore()

    def _move(self) -> None:
        rows = self._play.rows
        if rows.in_slots:
            self._play.move(rows.capacity + self._few(rows.capacity), len(rows.window))
            return
        capacity = int(self._dice.integers(1, 2 * rows.capacity + 1))
        most = min(capacity, len(rows.window))
        self._play.move(capacity, most if self._dice.random() < 0.5 else int(self._dice.integers(0, most + 1)))

    def _few(self, most: int) -> int:
        return int(self._dice.integers(1, min(most, 6 if self._dice.random() < 0.8 else most) + 1))

    def _some(self, keys: Keys, share: float) -> Keys:
        return keys[self._dice.random(len(keys)) < share]

    def _priorities(self, count: int, new: bool) -> Floats | None:
        if self._highest is None or (new and self._dice.random() < 0.4):
            return None
        values = [0.0, 5e-324, 1e-3, 1.0, 7.0, 1000.0, self._highest]
        return self._dice.choice(np.array([*values, np.nan] if new else values), count)
