"""What becomes of rows as they come, end and leave: they are linked, and become drawable or cease to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conduit.core.candidates import NONE, Candidates
from conduit.core.episodes import End
from conduit.core.items import Needs
from conduit.core.links import Links
from conduit.core.starts import Starts

Keys = NDArray[np.int64]

# Looking a member up in its enum takes as long as a NumPy call.
_OPEN, _CUT = int(End.OPEN), int(End.CUT)


@dataclass(frozen=True, slots=True)
class Following:
    """What a store's item and derived leaves ask of links. `needs_next`: a row can be used once something is known of what
    came after it. `depth`: how many rows of an episode a row's stack takes."""

    needs: Needs
    needs_next: bool
    depth: int


class Lineage:
    """Links, and the starts among the rows, kept as rows come. All calls are in a turn of the store's Order."""

    def __init__(self, capacity: int, following: Following) -> None:
        self.links = Links(capacity)
        self.starts = Starts(capacity)
        self._following = following
        self._candidates = Candidates(following.needs, int(following.needs_next), capacity)
        self._newest = np.zeros(0, np.int64)
        """By lane: its last row if that is open; else -1."""
        self._place = np.zeros(0, np.int64)
        """By lane: the place that its next row has in the episode."""
        self._step_lanes: NDArray[np.int64] | None = None
        """The lanes of the last step, known to be ascending: most steps come with the very same array."""

    def evict(self, first: int, rows: int) -> Keys:
        """Rows [first, first + rows), the oldest, are live no more; their slots still say what they were. Returns others that
        are drawable no more."""
        self.links.oldest = first + rows
        self.starts.evict(first, rows)
        if self._following.depth == 1:
            return NONE
        return self.starts.exclude(self.links.successors(first, rows, self._following.depth - 1))

    def append(self, first: int, lane: NDArray[np.int64], end: NDArray[np.uint8], lost: int) -> Keys:
        """Rows [first, first + len(lane)) came, the first `lost` of which the ring has no room for any more. Returns the
        rows that became drawable."""
        if lost:
            self.links.oldest = first + lost
        self.links.put(first + lost, end[lost:])
        if lane is self._step_lanes:
            return self._admit(self._step(first, lane, end))
        self._know(int(np.maximum.reduce(lane)) + 1)
        if _ascends(lane):
            self._step_lanes = lane
            return self._admit(self._step(first, lane, end))
        found = [
            self._isolated(first, start, stop, end)
            if lane[start] < 0
            else self._run(first + start, int(lane[start]), end[start:stop])
            if in_one_lane
            else self._step(first + start, lane[start:stop], end[start:stop])
            for start, stop, in_one_lane in _pieces(lane, end)
        ]
        return self._admit(found[0] if len(found) == 1 else np.concatenate(found))

    def cut(self, lanes: Sequence[int]) -> Keys:
        """What these lanes' rows are followed by will never be known."""
        found = [NONE]
        self._know(max(lanes, default=-1) + 1)
        for lane in lanes:
            newest = int(self._newest[lane])
            if newest >= 0:
                if newest >= self.links.oldest:
                    self.links.cut(newest)
                found.append(self._close(lane, int(self._place[lane]) - 1, _CUT))
                self._newest[lane], self._place[lane] = -1, 0
        return self._admit(np.concatenate(found))

    def _step(self, first: int, lanes: NDArray[np.int64], end: NDArray[np.uint8]) -> Keys:
        """Consecutive rows, each of another lane, in ascending order."""
        rows = len(lanes)
        keys = np.arange(first, first + rows)
        low, high = int(lanes[0]), int(lanes[-1]) + 1
        at = slice(low, high) if high - low == rows else lanes
        self._connect(keys, self._newest[at])
        places = self._place[at]
        found = self._candidates.arrive(lanes, places, keys)
        if not np.count_nonzero(end):
            self._newest[at] = keys
            self._place[at] = places + 1
            return found
        (ended,) = np.nonzero(end)
        closed = [self._close(int(lanes[i]), int(places[i]), int(end[i])) for i in ended]
        self._newest[at] = np.where(end == _OPEN, keys, -1)
        self._place[at] = np.where(end == _OPEN, places + 1, 0)
        return np.concatenate([found, *closed])

    def _run(self, first: int, lane: int, end: NDArray[np.uint8]) -> Keys:
        """Consecutive rows of one lane, of which only the last may end."""
        keys = np.arange(first, first + len(end))
        # More rows than the ring has: the first are gone already.
        gone = max(0, self.links.oldest - first)
        if gone < len(keys):
            self.links.chain(first + gone, len(keys) - gone)
            before = self._newest[lane : lane + 1] if gone == 0 else keys[gone - 1 : gone]
            self.links.connect(keys[gone : gone + 1], before)
        place = int(self._place[lane])
        found = self._candidates.arrive_run(lane, place, keys)
        self._newest[lane], self._place[lane] = keys[-1], place + len(keys)
        if end[-1] == _OPEN:
            return found
        closed = self._close(lane, place + len(keys) - 1, int(end[-1]))
        self._newest[lane], self._place[lane] = -1, 0
        return np.concatenate([found, closed])

    def _isolated(self, first: int, start: int, stop: int, end: NDArray[np.uint8]) -> Keys:
        """Rows that a hook made of others: nobody knows what came before or after them."""
        for key in range(max(first + start, self.links.oldest), first + stop):
            self.links.cut(key)
        needs = self._following.needs
        alone = not self._following.needs_next and (needs.partial or needs.ahead == 1)
        return np.arange(first + start, first + stop) if alone else NONE

    def _connect(self, keys: Keys, before: Keys) -> None:
        if keys[0] >= self.links.oldest:
            self.links.connect(keys, before)
            return
        # More rows than the ring has: the first are gone already.
        live = keys >= self.links.oldest
        if np.count_nonzero(live):
            self.links.connect(keys[live], before[live])

    def _close(self, lane: int, place: int, end: int) -> Keys:
        return self._candidates.close(lane, place, end != _CUT or not self._following.needs_next)

    def _admit(self, keys: Keys) -> Keys:
        """Those of `keys`, all settled by now, that are live and whose stacks are."""
        if len(keys) and np.minimum.reduce(keys) < self.links.oldest:
            keys = keys[keys >= self.links.oldest]
        if not len(keys):
            return keys
        if self._following.depth > 1 and self.links.oldest:
            path, count = self.links.walk_back(keys, self._following.depth)
            keys = keys[(count == self._following.depth) | self.links.begins(path[:, -1])]
        self.starts.admit(keys)
        return keys

    def _know(self, lanes: int) -> None:
        known = len(self._newest)
        if lanes <= known:
            return
        lanes = max(lanes, 2 * known)
        self._newest = np.concatenate([self._newest, np.full(lanes - known, -1)])
        self._place = np.concatenate([self._place, np.zeros(lanes - known, np.int64)])
        self._candidates.grow(lanes)


def _ascends(lane: NDArray[np.int64]) -> bool:
    """Whether the rows are each of another lane, in ascending order."""
    return lane[0] >= 0 and np.count_nonzero(lane[1:] > lane[:-1]) == len(lane) - 1


def _pieces(lane: NDArray[np.int64], end: NDArray[np.uint8]) -> Iterator[tuple[int, int, bool]]:
    """Rows split into (start, stop, whether all are of one lane): else each is of another lane, in ascending order. Rows of
    one lane are split after each end."""
    rows = len(lane)
    apart = lane[1:] - lane[:-1]
    start = 0
    while start < rows:
        if start + 1 < rows and apart[start] == 0:
            goes_on = (apart[start:] == 0) & ((end[start:-1] == _OPEN) | (lane[start] < 0))
        else:
            goes_on = (apart[start:] > 0) & (lane[start] >= 0)
        stops = np.flatnonzero(~goes_on)
        stop = rows if not len(stops) else start + int(stops[0]) + 1
        yield start, stop, stop - start > 1 and apart[start] == 0
        start = stop
