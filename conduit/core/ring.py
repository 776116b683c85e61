"""Insertion numbers and where they lie: the ring over one or several shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

MOST_BLOCKS = 4096
"""A layout has at most about this many blocks, so that its tables stay small whatever the capacity."""

SMALL_BLOCK = 64
"""Rows in a block of a layout with room for enough of them: consecutive rows lie together, for cheap copies."""


# Not frozen, since one or two of each are made for every push, and freezing takes most of the time of making one.
@dataclass(slots=True)
class Window:
    """The live rows: insertion numbers [first, stop). A value: nobody changes it."""

    first: int
    stop: int

    @property
    def frontier(self) -> int:
        """The last insertion number visible; first - 1 when there is none."""
        return self.stop - 1

    def __len__(self) -> int:
        return self.stop - self.first


@dataclass(slots=True)
class Span:
    """Consecutive slots of one shard that take rows [offset, offset + rows) of what is being inserted. A value."""

    shard: int
    slot: int
    offset: int
    rows: int


def by_age(values: NDArray[Scalar], window: Window) -> NDArray[Scalar]:
    """What an array by slot says of the rows of `window`, the oldest first; in memory of its own."""
    low, rows = window.first % len(values), len(window)
    return np.concatenate((values[low : low + rows], values[: max(0, low + rows - len(values))]))


class Layout:
    """Which shard and slot each insertion number has: position `key % capacity` of a ring that is dealt to the shards
    in blocks by smooth weighted round robin, so that every prefix of the ring is spread as the shares say.

    `shares`: relative weights, one a shard; all positive."""

    def __init__(self, capacity: int, shares: Sequence[float]) -> None:
        self.capacity = capacity
        many = len(shares) > 1
        small = min(SMALL_BLOCK, max(1, capacity // (8 * len(shares))))
        self.block_rows = max(small, -(-capacity // MOST_BLOCKS)) if many else capacity
        blocks = -(-capacity // self.block_rows)
        self._shard = _deal(blocks, shares)
        sizes = np.full(blocks, self.block_rows, np.int64)
        sizes[-1] = capacity - (blocks - 1) * self.block_rows
        self._start = np.zeros(blocks, np.int64)
        rows = []
        for shard in range(len(shares)):
            own = np.flatnonzero(self._shard == shard)
            filled = np.cumsum(sizes[own])
            self._start[own] = filled - sizes[own]
            rows.append(int(filled[-1]) if len(own) else 0)
        self.shard_rows = tuple(rows)
        """How many rows each shard holds; they sum to the capacity."""

    def locate(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
        """(shard of each key, slot of each key); None instead of the shards when there is one only."""
        position = keys % self.capacity
        if len(self.shard_rows) == 1:
            return None, position
        block, within = np.divmod(position, self.block_rows)
        return self._shard[block], self._start[block] + within

    def spans(self, first_key: int, rows: int) -> list[Span]:
        """The slots of keys [first_key, first_key + rows), rows ≤ capacity, as few spans as possible."""
        at = first_key % self.capacity
        if len(self.shard_rows) == 1 and at + rows <= self.capacity:
            return [Span(0, at, 0, rows)] if rows else []
        spans: list[Span] = []
        offset = 0
        while offset < rows:
            block, within = divmod((first_key + offset) % self.capacity, self.block_rows)
            take = min(self.block_rows - within, self.capacity - block * self.block_rows - within, rows - offset)
            _extend(spans, Span(int(self._shard[block]), int(self._start[block]) + within, offset, take))
            offset += take
        return spans


def _extend(spans: list[Span], more: Span) -> None:
    """Appends `more`, as part of the last span where it goes on from there."""
    if spans and (last := spans[-1]).shard == more.shard and last.slot + last.rows == more.slot:
        spans[-1] = Span(last.shard, last.slot, last.offset, last.rows + more.rows)
    else:
        spans.append(more)


def _deal(blocks: int, shares: Sequence[float]) -> NDArray[np.int64]:
    weight = np.asarray(shares, np.float64) / np.sum(shares)
    credit = np.zeros(len(weight))
    shard = np.zeros(blocks, np.int64)
    if len(weight) == 1:
        return shard
    for block in range(blocks):
        credit += weight
        shard[block] = chosen = int(credit.argmax())
        credit[chosen] -= 1.0
    return shard
