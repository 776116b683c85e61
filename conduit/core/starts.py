"""Which live rows a batch's entries may start at, where not every live row can: an item needs rows after its first one,
a derived leaf needs a successor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.journal import Copy, Journal, at_once
from conduit.core.ring import Window

Keys = NDArray[np.int64]

MOST_TRIES = 1 << 16
"""A draw tries at most about this many rows, or an eighth of the window, before it counts through the window instead."""

_BLOCK = 1 << 16


class Starts:
    """The set of drawable rows: one byte a slot. Changed in a turn of the store's Order; a draw is in a turn as well."""

    def __init__(self, capacity: int, used_up: bool = False) -> None:
        """`used_up`: rows are excluded as they are drawn, be it within a batch; so a batch needs that many different ones."""
        self._capacity = capacity
        self.used_up = used_up
        self._drawable = np.zeros(capacity, np.bool_)
        self.journal = Journal({"drawable": self._drawable})
        self.count = 0

    def __contains__(self, key: int) -> bool:
        return bool(self._drawable[key % self._capacity])

    def at(self, slots: Keys) -> NDArray[np.bool_]:
        """Whether each slot's row is drawable."""
        return self._drawable.take(slots)

    def admit(self, keys: Keys) -> None:
        """These live rows, which weren't drawable, are so now."""
        slots = keys % self._capacity
        if self.journal.on:
            self.journal.before(slots)
        self._drawable[slots] = True
        self.count += len(keys)

    def exclude(self, keys: Keys) -> Keys:
        """These live rows are drawable no more. Returns those that were."""
        slots = keys % self._capacity
        were = self._drawable.take(slots)
        if self.journal.on:
            self.journal.before(slots)
        self._drawable[slots] = False
        self.count -= int(np.count_nonzero(were))
        return keys[were]

    def renew(self, first: int, rows: int) -> None:
        """Rows [first, first + rows) came, drawable, in the slots of others. At most as many as the capacity."""
        low = first % self._capacity
        if low + rows > self._capacity:
            head = self._capacity - low
            self.renew(first, head)
            self.renew(first + head, rows - head)
            return
        if self.journal.on:
            self.journal.before_range(low, low + rows)
        here = self._drawable[low : low + rows]
        self.count += rows - int(np.count_nonzero(here))
        here[:] = True

    def evict(self, first: int, rows: int) -> None:
        """Rows [first, first + rows) are live no more. At most as many as the capacity."""
        low = first % self._capacity
        if low + rows > self._capacity:
            head = self._capacity - low
            self.evict(first, head)
            self.evict(first + head, rows - head)
            return
        if self.journal.on:
            self.journal.before_range(low, low + rows)
        evicted = self._drawable[low : low + rows]
        self.count -= int(np.count_nonzero(evicted))
        evicted[:] = False

    def state(self, window: Window, copy: Copy = at_once) -> Any:
        """Whether each row of `window` is drawable, by age."""
        return copy(self.journal, "drawable", window)

    def load(self, drawable: NDArray[np.bool_], window: Window) -> None:
        """The rows of `window` are drawable as the last ones of `drawable`; in a set that was just made."""
        slots = np.arange(window.first, window.stop) % self._capacity
        self._drawable[slots] = drawable[len(drawable) - len(slots) :]
        self.count = int(np.count_nonzero(self._drawable))

    def choose(self, random: np.random.Generator, rows: int, window: Window) -> Keys:
        """`rows` drawable keys of `window`, each with equal chance, with replacement. There must be one.

        Rows are tried at random: what is drawable among them is drawable with equal chance. Where so few are that this
        takes too long, the n-th drawable one is counted out instead: as fair, and it always ends."""
        found: list[Keys] = []
        need = rows
        most = max(MOST_TRIES, len(window) >> 3)
        while need and need * len(window) <= most * self.count:
            tries = int(1.1 * need * len(window) / self.count) + 8
            keys = window.first + (random.random(tries) * len(window)).astype(np.int64)
            good = self._drawable.take(keys % self._capacity)
            keys = (keys if np.count_nonzero(good) == tries else keys[good])[:need]
            found.append(keys)
            need -= len(keys)
        if need:
            found.append(self._counted_out(random.integers(0, self.count, need), window))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _counted_out(self, ranks: NDArray[np.int64], window: Window) -> Keys:
        """The drawable key of each rank, by age, counted from the oldest."""
        keys = np.empty(len(ranks), np.int64)
        passed, key = 0, window.first
        while key < window.stop:
            slot = key % self._capacity
            rows = min(_BLOCK, window.stop - key, self._capacity - slot)
            here = np.flatnonzero(self._drawable[slot : slot + rows])
            wanted = (ranks >= passed) & (ranks < passed + len(here))
            keys[wanted] = key + here[ranks[wanted] - passed]
            passed, key = passed + len(here), key + rows
        return keys
