"""What becomes of rows as they come, end and leave: they are linked, and become drawable or cease to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.candidates import NONE, Candidates
from conduit.core.episodes import End
from conduit.core.groups import Groups
from conduit.core.items import Needs
from conduit.core.journal import Copy, at_once
from conduit.core.links import Links
from conduit.core.ring import Window
from conduit.core.starts import Starts

Keys = NDArray[np.int64]

# Looking a member up in its enum takes as long as a NumPy call.
_OPEN, _CUT = int(End.OPEN), int(End.CUT)

_BLOCK = 1 << 16
"""How many rows are looked at together where all are."""


@dataclass(frozen=True, slots=True)
class Following:
    """What a store's item and derived leaves ask of links. `needs_next`: a row can be used once something is known of what
    came after it. `depth`: how many rows of an episode a row's stack takes. `by`: the leaf whose value makes `needs.ahead` rows
    a group; None where rows follow each other in lanes."""

    needs: Needs
    needs_next: bool
    depth: int
    by: str | None = None


class Lineage:
    """Links, and the starts among the rows, kept as rows come. All calls are in a turn of the store's Order."""

    def __init__(self, capacity: int, following: Following) -> None:
        self._capacity = capacity
        self.links = Links(capacity)
        self.starts = Starts(capacity)
        self._following = following
        self._groups = None if following.by is None else Groups(capacity, following.needs.ahead)
        """Instead of all that follows."""
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

    @property
    def by(self) -> str | None:
        """The leaf whose values `append` needs."""
        return self._following.by

    @property
    def unfinished_groups(self) -> int | None:
        """How many groups lack rows that are still to come; None where rows are no groups."""
        return None if self._groups is None else self._groups.unfinished

    def append(
        self, first: int, lane: NDArray[np.int64], end: NDArray[np.uint8], lost: int, by: NDArray[Any] | None = None
    ) -> Keys:
        """Rows [first, first + len(lane)) came, the first `lost` of which the ring has no room for any more. Returns the
        rows that became drawable. `by`: each row's value of the leaf of that name, if there is one."""
        if lost:
            self.links.oldest = first + lost
        self.links.put(first + lost, end[lost:])
        if self._groups is not None:
            assert by is not None
            before, whole = self._groups.arrive(first, by)
            self._connect(np.arange(first, first + len(before)), before)
            return self._admit(whole)
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
        """What these lanes' rows are followed by will never be known. Returns rows that became drawable. Groups go on."""
        if self._groups is not None:
            return NONE
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

    def oldest_waiting(self) -> int | None:
        """The oldest live row that may become drawable when others come; None if there is none."""
        if self._groups is not None:
            return self._groups.oldest_waiting(self.links.oldest)
        return self._candidates.oldest_waiting(self._place, self.links.oldest)

    def state(self, window: Window, copy: Copy = at_once) -> dict[str, Any]:
        """All of it, for a checkpoint, in arrays of its own. What is known of a row is told by age, or names the row by its key."""
        state = {**self.links.state(window, copy), "drawable": self.starts.state(window, copy)}
        if self._groups is not None:
            return state | self._groups.state()
        lanes = {"newest": self._newest.copy(), "place": self._place.copy()}
        return state | lanes | {"candidates": self._candidates.state(self._place)}

    def load(self, state: Mapping[str, Any], window: Window, keep_lanes: bool = True) -> Keys:
        """Goes on from `state`, in a lineage that was just made, perhaps for another capacity. `window`: the rows that are there; where
        they begin later than those of the state, the older ones count as evicted. Without `keep_lanes` all lanes are cut:
        returns the rows that became drawable by that."""
        self.links.load(state, window)
        self.starts.load(state["drawable"], window)
        if self._following.depth > 1 and len(state["drawable"]) > len(window):
            self._exclude_where_stacks_are_gone(window)
        if self._groups is not None:
            self._groups.load(state)
            return NONE
        self._know(len(state["newest"]))
        self._newest[: len(state["newest"])] = state["newest"]
        self._place[: len(state["place"])] = state["place"]
        self._candidates.load(state["candidates"], state["place"])
        return NONE if keep_lanes else self.cut(range(len(self._newest)))

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
            keys = keys[self._have_stacks(keys)]
        self.starts.admit(keys)
        return keys

    def _have_stacks(self, keys: Keys) -> NDArray[np.bool_]:
        """Whether each row's stack is there, as far back as its episode reaches."""
        path, count = self.links.walk_back(keys, self._following.depth)
        return (count == self._following.depth) | self.links.begins(path[:, -1])

    def _exclude_where_stacks_are_gone(self, window: Window) -> None:
        for first in range(window.first, window.stop, _BLOCK):
            keys = np.arange(first, min(first + _BLOCK, window.stop))
            self.starts.exclude(keys[~self._have_stacks(keys)])

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
