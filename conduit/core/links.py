"""Who follows whom: for every live row its successor and its predecessor in the episode, wherever in the ring they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.episodes import End
from conduit.core.journal import Copy, Journal, at_once
from conduit.core.machine_code import load
from conduit.core.ring import Window

Keys = NDArray[np.int64]

# Looking a member up in its enum takes as long as a NumPy call.
_TERMINATED, _CUT = int(End.TERMINATED), int(End.CUT)

_FARTHEST = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Linked:
    """What is known of some rows, each (n,). `begins`: whether it is its episode's first; `after`: its successor, -1 where there is
    none by now; `end`: an `End`; `final`: the number of its final, -1 where it has none."""

    begins: NDArray[np.bool_]
    after: Keys
    end: NDArray[np.uint8]
    final: NDArray[np.int64]


class Links:
    """Nine bytes a slot: how far on the successor is, how far back the predecessor, and how the row ended.

    Rows leave in the order in which they came, so a live row's successor is live; a predecessor may be gone. Links hold
    distances between insertion numbers. Nothing here assumes that successors are neighbours; that they mostly lie at
    equal distances only makes following them quick."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        dtype = np.int32 if capacity < _FARTHEST else np.int64
        self._onward = np.zeros(capacity, dtype)
        """> 0: distance to the successor. 0: none, or not known yet. < 0: the row has a final; ~ of its number, mod _FARTHEST."""
        self._back = np.zeros(capacity, dtype)
        """Distance to the predecessor, live or not; 0 at an episode's first row."""
        self._end = np.zeros(capacity, np.uint8)
        self._journal = Journal({"onward": self._onward, "back": self._back, "end": self._end})
        self.oldest = 0
        """The first live key."""
        # Compiled for int32 links.
        self._kernels = load("compiled_links") if dtype == np.int32 else None

    def put(self, first: int, ends: NDArray[np.uint8]) -> None:
        """Rows [first, first + len(ends)) are there; nothing is known of what is before and after them. At most as many as slots."""
        low, rows = first % self._capacity, len(ends)
        if low + rows > self._capacity:
            head = self._capacity - low
            self.put(first, ends[:head])
            self.put(first + head, ends[head:])
            return
        if self._journal.on:
            self._journal.before_range(low, low + rows)
        self._onward[low : low + rows] = 0
        self._back[low : low + rows] = 0
        self._end[low : low + rows] = ends

    def connect(self, keys: Keys, before: Keys) -> None:
        """Row `keys[i]` is the successor of row `before[i]`, which may be evicted; -1: it has no predecessor."""
        distance = keys - before
        if self._journal.on:
            self._journal.before(np.concatenate([before, keys]) % self._capacity)
        if np.minimum.reduce(before) >= self.oldest:
            self._onward[before % self._capacity] = distance
            self._back[keys % self._capacity] = distance
            return
        live = before >= self.oldest
        self._onward[before[live] % self._capacity] = distance[live]
        self._back[keys % self._capacity] = np.where(before >= 0, np.minimum(distance, _FARTHEST), 0)

    def chain(self, first: int, rows: int) -> None:
        """Rows [first, first + rows) follow each other. At most as many as slots."""
        low = first % self._capacity
        if low + rows > self._capacity:
            head = self._capacity - low
            self.chain(first, head)
            self.chain(first + head, rows - head)
            self.connect(np.array([first + head]), np.array([first + head - 1]))
            return
        if self._journal.on:
            self._journal.before_range(low, low + rows)
        self._onward[low : low + rows - 1] = 1
        self._back[low + 1 : low + rows] = 1

    def conclude(self, keys: Keys, numbers: NDArray[np.int64]) -> None:
        """Row `keys[i]` ended with final `numbers[i]`."""
        if self._journal.on:
            self._journal.before(keys % self._capacity)
        self._onward[keys % self._capacity] = ~(numbers % _FARTHEST)

    def cut(self, key: int) -> None:
        """Nothing will follow this row."""
        slot = key % self._capacity
        if self._journal.on:
            self._journal.before_range(slot, slot + 1)
        self._end[slot] = _CUT

    def finals_among(self, first: int, rows: int) -> int:
        """How many of rows [first, first + rows), at most as many as slots, have finals."""
        low = first % self._capacity
        head = min(rows, self._capacity - low)
        parts = (self._onward[low : low + head], self._onward[: rows - head])
        return sum(int(np.count_nonzero(part < 0)) for part in parts)

    def onward(self, keys: Keys) -> NDArray[np.int64]:
        """Distance to each row's successor; 0 where there is none; < 0 where there is a final (see `final_numbers`)."""
        return self._onward.take(keys % self._capacity).astype(np.int64)

    @staticmethod
    def final_numbers(onward: NDArray[np.int64], stop: int) -> NDArray[np.int64]:
        """The final's number for each negative `onward`; `stop`: the number that the next final will get."""
        return stop - 1 - (stop - 1 - ~onward) % _FARTHEST

    def has_next(self, keys: Keys) -> NDArray[np.bool_]:
        """Whether something is known of what came after each row: a successor, a final, or that it terminated."""
        slots = keys % self._capacity
        return (self._onward.take(slots) != 0) | (self._end.take(slots) == _TERMINATED)

    def terminated(self, keys: Keys) -> NDArray[np.bool_]:
        return self._end.take(keys % self._capacity) == _TERMINATED

    def walk(self, keys: Keys, rows: int) -> tuple[Keys, NDArray[np.int64]]:
        """Each key and its successors, up to `rows` of them: keys (B, rows), and how many there are (B,). Columns past those
        repeat the last."""
        return self._follow(self._onward, 1, keys, rows)

    def walk_back(self, keys: Keys, rows: int) -> tuple[Keys, NDArray[np.int64]]:
        """The same for live predecessors: column j is j rows before the key."""
        return self._follow(self._back, -1, keys, rows)

    def begins(self, keys: Keys) -> NDArray[np.bool_]:
        """Whether each row is its episode's first."""
        return self._back.take(keys % self._capacity) == 0

    def successors(self, first: int, rows: int, hops: int) -> Keys:
        """The rows up to `hops` after rows [first, first + rows) in their episodes: distinct, and none of those rows."""
        here = np.arange(first, first + rows)
        found: list[Keys] = []
        for _ in range(hops):
            onward = self._onward.take(here % self._capacity)
            here = (here + onward)[onward > 0]
            found.append(here[here >= first + rows])
        return np.unique(np.concatenate(found)) if found else here[:0]

    def of(self, keys: Keys, finals_stop: int) -> Linked:
        """What is known of live rows. `finals_stop`: the number that the next final will get."""
        onward = self.onward(keys)
        final = np.full(len(keys), -1)
        ended = onward < 0
        final[ended] = self.final_numbers(onward[ended], finals_stop)
        after = np.where(onward > 0, keys + onward, -1)
        return Linked(self.begins(keys), after, self._end.take(keys % self._capacity), final)

    def state(self, window: Window, copy: Copy = at_once) -> dict[str, Any]:
        """What is known of each row of `window`, by age."""
        return {name: copy(self._journal, name, window) for name in self._journal.arrays}

    def load(self, state: Mapping[str, NDArray[Any]], window: Window) -> None:
        """Goes on from `state`, of which only the last rows may be there still, in links that were just made."""
        self.oldest = window.first
        slots = np.arange(window.first, window.stop) % self._capacity
        gone = len(state["end"]) - len(slots)
        self._onward[slots] = state["onward"][gone:]
        # Of a larger ring: so far back there is no row here.
        self._back[slots] = np.minimum(state["back"][gone:], _FARTHEST)
        self._end[slots] = state["end"][gone:]

    def _follow(
        self, links: NDArray[np.signedinteger], sign: int, keys: Keys, rows: int
    ) -> tuple[Keys, NDArray[np.int64]]:
        if rows == 1:
            return keys[:, None], np.ones(len(keys), np.int64)
        if self._kernels is not None:
            path, count = np.empty((rows, len(keys)), np.int64), np.empty(len(keys), np.int64)
            path[0] = keys
            self._kernels.follow(links, sign, self.oldest, path, count)
            return path.T, count
        # Lanes that are pushed in lockstep have all their rows at one distance: guessed, and then each link is checked. Laid out
        # by step, then by entry: NumPy is quick along the longer axis.
        slots = keys % self._capacity
        stride = links.take(slots).astype(np.int64)
        np.maximum(stride, 0, out=stride)
        hops = np.multiply.outer(np.arange(rows), stride if sign > 0 else -stride)
        path = hops + keys
        onward = links.take(self._wrapped(hops[:-1] + slots))
        linked = onward == stride
        linked[0] = stride > 0
        if sign < 0:
            linked &= path[1:] >= self.oldest
        count = np.full(len(keys), rows)
        broken = np.flatnonzero(~linked)
        if len(broken):
            step, entry = np.divmod(broken, len(keys))
            # Of several assignments the last stays: of an entry's broken links the first.
            count[entry[::-1]] = step[::-1] + 1
            short = np.flatnonzero(count < rows)
            # Beyond a broken link an episode goes on where other actors pushed in between.
            on = short[onward[count[short] - 1, short] > 0]
            if len(on):
                self._row_by_row(links, sign, path, count, on)
                last = path[count[short] - 1, short]
                path[:, short] = np.where(np.arange(rows)[:, None] < count[short], path[:, short], last)
            else:
                # What was guessed beyond the last row is farther off.
                nearer = np.minimum if sign > 0 else np.maximum
                path[:, short] = nearer(path[:, short], keys[short] + sign * stride[short] * (count[short] - 1))
        return path.T, count

    def _row_by_row(
        self, links: NDArray[np.signedinteger], sign: int, path: Keys, count: NDArray[np.int64], entry: Keys
    ) -> None:
        """Goes on with some entries of `path` (rows, B) where they have `count` rows, as far as their links lead."""
        here = path[count[entry] - 1, entry]
        while len(entry):
            onward = links.take(here % self._capacity)
            there = here + sign * np.maximum(onward, 0).astype(np.int64)
            goes = (onward > 0) & (there >= self.oldest) & (count[entry] < len(path))
            entry, here = entry[goes], there[goes]
            path[count[entry], entry] = here
            count[entry] += 1

    def _wrapped(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """`slots` (steps, B), each column going one way, within the ring. A division of each would cost more than the rest."""
        # The last step is the farthest off.
        low, high = int(np.minimum.reduce(slots[-1])), int(np.maximum.reduce(slots[-1]))
        if low >= 0 and high < self._capacity:
            return slots
        if low < -self._capacity or high >= 2 * self._capacity:
            return slots % self._capacity
        if high >= self._capacity:
            slots[slots >= self._capacity] -= self._capacity
        if low < 0:
            slots[slots < 0] += self._capacity
        return slots
