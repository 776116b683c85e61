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

LEAST_BLOCKS = 128
"""And at least this many, if it has as many rows: so that few rows can be spread, and shares are met to a hundredth."""

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


def block_rows(capacity: int) -> int:
    """Rows in a block of any layout of this capacity: so two of them have the same blocks, whoever holds these."""
    small = min(SMALL_BLOCK, max(1, capacity // LEAST_BLOCKS))
    return max(small, -(-capacity // MOST_BLOCKS))


class Layout:
    """Which shard and slot each insertion number has: position `key % capacity` of a ring whose blocks are dealt to the shards.
    In each shard, blocks lie in the order of the ring: so what is consecutive in the ring is so in each shard."""

    def __init__(self, capacity: int, shares: Sequence[float]) -> None:
        """Dealt by smooth weighted round robin, so that every prefix of the ring is spread as the shares say. `shares`: relative weights, one
        a shard; all positive."""
        blocks = -(-capacity // block_rows(capacity))
        self._place(capacity, _dealt(np.zeros(blocks, np.int64), np.asarray([shares], np.float64)), len(shares))

    @classmethod
    def of(cls, capacity: int, shard_of_block: NDArray[np.int64], shards: int) -> Layout:
        """Dealt to so many shards as `shard_of_block` says, one of [0, shards) for each of the capacity's blocks."""
        layout = cls.__new__(cls)
        layout._place(capacity, shard_of_block, shards)
        return layout

    def relaid(self, rows: NDArray[np.float64]) -> Layout:
        """The same ring over other shards, of which each block goes where a transfer plan says: `rows[i, j]` of shard i to the new shard j, in any
        unit. Each new shard gets as much of each old one to a block or two; it has as much of every prefix of the ring as of all of it to
        about three, which is little beside the least number of blocks."""
        return Layout.of(self.capacity, _dealt(self._shard, np.asarray(rows, np.float64)), rows.shape[1])

    def _place(self, capacity: int, shard_of_block: NDArray[np.int64], shards: int) -> None:
        self.capacity = capacity
        self.block_rows = block_rows(capacity)
        self._shard = shard_of_block
        blocks = len(shard_of_block)
        sizes = np.full(blocks, self.block_rows, np.int64)
        sizes[-1] = capacity - (blocks - 1) * self.block_rows
        self._start = np.zeros(blocks, np.int64)
        rows = []
        for shard in range(shards):
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
        at, many = first_key % self.capacity, len(self.shard_rows) > 1
        if not many and at + rows <= self.capacity:
            return [Span(0, at, 0, rows)] if rows else []
        # A single shard's blocks are its slots, in order.
        size = self.block_rows if many else self.capacity
        spans: list[Span] = []
        offset = 0
        while offset < rows:
            block, within = divmod((first_key + offset) % self.capacity, size)
            take = min(size - within, self.capacity - block * size - within, rows - offset)
            _extend(spans, Span(int(self._shard[block]), int(self._start[block]) + within, offset, take))
            offset += take
        return spans


def _extend(spans: list[Span], more: Span) -> None:
    """Appends `more`, as part of the last span where it goes on from there."""
    if spans and (last := spans[-1]).shard == more.shard and last.slot + last.rows == more.slot:
        spans[-1] = Span(last.shard, last.slot, last.offset, last.rows + more.rows)
    else:
        spans.append(more)


def _dealt(holder: NDArray[np.int64], rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """To whom each block goes, which is `holder`'s now: of i's blocks as many to each j as `rows[i, j]` says, taken in turns."""
    total = rows.sum(axis=0)
    if rows.shape[1] == 1:
        return np.zeros(len(holder), np.int64)
    overall = total / total.sum()
    # Who holds blocks and gives none as the plan says holds too few for it to know of: these go as all do.
    of_each = np.where(rows.sum(axis=1, keepdims=True) > 0, rows, total)
    of_each = of_each / of_each.sum(axis=1, keepdims=True)
    # What each is due: of this holder's blocks, and of all. Where there is one holder, both are the same.
    due, due_overall = np.zeros_like(of_each), np.zeros_like(overall)
    chosen = np.zeros(len(holder), np.int64)
    for block, i in enumerate(holder.tolist()):
        due[i] += of_each[i]
        due_overall += overall
        chosen[block] = j = int(np.where(of_each[i] > 0, due[i] + due_overall, -np.inf).argmax())
        due[i, j] -= 1.0
        due_overall[j] -= 1.0
    return chosen
