"""Draws taken apart and put together, and how often each row was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.drawable import slot_ranges
from conduit.core.journal import Copy, Journal, at_once
from conduit.core.ring import Window
from conduit.core.sampling import Draw
from conduit.core.starts import Starts

Keys = NDArray[np.int64]

_BLOCK = 1 << 16
"""How many rows are looked at together where all are."""


class Times:
    """How often each row has been drawn: four bytes a slot. Changed in a turn of the store's Order."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._times = np.zeros(capacity, np.uint32)
        self._journal = Journal({"times": self._times})

    def renew(self, first: int, rows: int) -> None:
        """Rows [first, first + rows) came, drawn never. At most as many as the capacity."""
        for start, stop, _ in slot_ranges(first, rows, self._capacity):
            if self._journal.on:
                self._journal.before_range(start, stop)
            self._times[start:stop] = 0

    def at(self, slots: Keys) -> Keys:
        return self._times.take(slots).astype(np.int64)

    def put(self, slots: Keys, times: Keys) -> None:
        """Of a row that comes twice, the last stays."""
        if self._journal.on:
            self._journal.before(slots)
        self._times[slots] = times

    def count_spent(self, most: int, window: Window, starts: Starts | None) -> int:
        """How many of `window`'s rows, of those that `starts` names if there are any, were drawn `most` times."""
        spent = 0
        for first in range(window.first, window.stop, _BLOCK):
            slots = np.arange(first, min(first + _BLOCK, window.stop)) % self._capacity
            drawn = self._times.take(slots) >= most
            spent += int(np.count_nonzero(drawn if starts is None else drawn & starts.at(slots)))
        return spent

    def state(self, window: Window, copy: Copy = at_once) -> Any:
        """Those of `window`'s rows, by age."""
        return copy(self._journal, "times", window)


def occurrence(slots: Keys) -> Keys:
    """For each of `slots`, the how-manieth of its kind it is, from 1."""
    ordered = np.sort(slots)
    differ = ordered[1:] != ordered[:-1]
    if np.count_nonzero(differ) == len(differ):
        return np.ones(len(slots), np.int64)
    order = np.argsort(slots, kind="stable")
    begins = np.concatenate([[True], differ])
    places = np.arange(len(slots))
    nth = np.empty(len(slots), np.int64)
    nth[order] = places - np.maximum.accumulate(np.where(begins, places, 0)) + 1
    return nth


def part_of(draw: Draw, good: NDArray[np.bool_]) -> Draw:
    """Its entries that are `good`."""
    return Draw(
        draw.keys[good],
        draw.probability[good] if isinstance(draw.probability, np.ndarray) else draw.probability,
        None if draw.weight is None else draw.weight[good],
        draw.priority[good] if isinstance(draw.priority, np.ndarray) else draw.priority,
    )


def joined(parts: Sequence[Draw]) -> Draw:
    """The entries of all of them, in order."""
    if len(parts) == 1:
        return parts[0]
    weight = None
    if any(part.weight is not None for part in parts):
        weight = np.concatenate([np.ones(len(part.keys)) if part.weight is None else part.weight for part in parts])
    return Draw(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([np.broadcast_to(part.probability, len(part.keys)) for part in parts]),
        weight,
        np.concatenate([np.broadcast_to(part.priority, len(part.keys)) for part in parts]),
    )
