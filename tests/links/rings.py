"""A lineage and what a buffer does to it, without the rows: for tests that want to see inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from conduit.core.episodes import End
from conduit.core.lineage import Following, Lineage
from conduit.core.ring import Window


class Ring:
    """`drawable`: as whoever is told of rows that come and go must believe, which is checked against what the lineage has."""

    def __init__(self, capacity: int, following: Following, window: Window | None = None) -> None:
        self.capacity, self.following = capacity, following
        self.lineage = Lineage(capacity, following)
        self.window = Window(0, 0) if window is None else window
        self.drawable: set[int] = set()
        self.finals = 0

    def push(
        self,
        lanes: Sequence[int],
        ends: Sequence[End] | None = None,
        by: Sequence[int] | None = None,
        finals: Sequence[int] = (),
    ) -> None:
        """`finals`: the places of rows that end with one."""
        count, first, stop = len(lanes), self.window.first, self.window.stop
        lost, oldest = 0, stop + count - self.capacity
        if oldest > first:
            lost = max(0, oldest - stop)
            gone = min(oldest, stop) - first
            excluded = self.lineage.evict(first, gone).tolist() if gone else []
            assert set(excluded) <= self.drawable
            self.drawable -= {*range(first, first + gone), *excluded}
            first = oldest
        end = np.zeros(count, np.uint8) if ends is None else np.array(ends, np.uint8)
        values = None if by is None else np.array(by)
        self._admit(self.lineage.append(stop, np.array(lanes, np.int64), end, lost, values).tolist())
        kept = [place for place in finals if place >= lost]
        if kept:
            numbers = self.finals + np.arange(len(kept))
            self.lineage.links.conclude(stop + np.array(kept), numbers)
        self.finals += len(kept)
        self.window = Window(first, stop + count)
        self.check()

    def cut(self, lanes: Sequence[int]) -> None:
        self._admit(self.lineage.cut(lanes).tolist())
        self.check()

    def saved(self) -> dict[str, Any]:
        return self.lineage.state(self.window)

    def restored(self, capacity: int, keep_lanes: bool = True, lost: int = 0) -> Ring:
        """Another ring that goes on from here with the last `capacity` rows, but for the `lost` oldest."""
        first = min(max(self.window.first + lost, self.window.stop - capacity), self.window.stop)
        ring = Ring(capacity, self.following, Window(first, self.window.stop))
        state = {name: array.copy() for name, array in self.saved().items()}
        admitted = ring.lineage.load(state, ring.window, keep_lanes)
        for array in state.values():
            array.fill(0)
        ring.finals = self.finals
        ring.drawable = ring.seen()
        assert set(admitted.tolist()) <= ring.drawable
        ring.check()
        return ring

    def seen(self) -> set[int]:
        return {key for key in range(self.window.first, self.window.stop) if key in self.lineage.starts}

    def check(self) -> None:
        assert self.seen() == self.drawable
        assert self.lineage.starts.count == len(self.drawable)

    def _admit(self, keys: list[int]) -> None:
        assert len(set(keys)) == len(keys)
        assert not set(keys) & self.drawable
        self.drawable |= set(keys)
