"""What moves when rows get another place: rows and finals as parts, each from one memory to one other, how many go where, and what
is told of it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from conduit.core.backend import Backend, Columns
from conduit.core.buffer import ExperienceBuffer
from conduit.core.experience import Field, Schema
from conduit.core.finals import Finals
from conduit.core.placement import Placement
from conduit.core.places import Places, Roll
from conduit.core.ring import Layout
from conduit.core.storage import Storage
from conduit.errors import SchemaError
from conduit.topology.cluster import Edge
from conduit.topology.endpoint import Endpoint

Keys = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a migration did.

    - `before`: None where there was no row yet, so that only the place of the first was decided
    - `rows`: live ones that were there at the end; `moved_bytes`: of what crossed from one memory to another, once or again, finals included;
      `least_bytes`: what had to cross, whatever way it is done
    - `precopied_bytes`, `delta_bytes`: what was copied while the store went on, and while it stood still, within one memory included
    - `pause_s`: how long pushes, draws and updates had to wait; `seconds`: all of it; `predicted_s`: how long a move of as many
      rows takes by the bandwidths that are known, latencies aside, None where none are; `phases`: seconds of each"""

    before: Placement | None
    after: Placement
    rows: int = 0
    moved_bytes: int = 0
    least_bytes: int = 0
    precopied_bytes: int = 0
    delta_bytes: int = 0
    pause_s: float = 0.0
    seconds: float = 0.0
    predicted_s: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Part:
    """Rows of one shard on their way to one other, or finals. `read` gives them where they are; `put` takes them where they go, or at a
    host tier."""

    edge: Edge
    size_bytes: int
    read: Callable[[], Columns[Any]]
    put: Callable[[Columns[Any]], None]
    widened: Schema | None
    """What its rows grow into before that; None where they stay as they are."""

    @property
    def crosses(self) -> bool:
        return self.edge[0] != self.edge[1]


class Series(Protocol):
    """What comes with ascending numbers, never changes, and leaves: rows, or finals."""

    row_bytes: int
    """As they are."""
    next: int
    """All before this number have been taken, or have left."""

    @property
    def stop(self) -> int:
        """The number of the next that comes."""
        ...

    def left(self) -> int:
        """How many there are to take, at most."""
        ...

    def take(self, most: int) -> list[Part]:
        """In a turn: the next ones, so many at most."""
        ...


class RowSeries:
    def __init__(self, backend: Backend[Any], buffer: ExperienceBuffer, old: Storage, new: Storage) -> None:
        self._buffer, self._old, self._new, self._lengths = buffer, old, new, _Lengths(backend)
        self._widened = None if new.schema is old.schema else new.schema
        self.row_bytes = old.row_bytes
        self.next = 0
        self._roll = None if buffer.places is None else _called(buffer.places, buffer.inserted)

    @property
    def stop(self) -> int:
        return self._buffer.inserted

    def left(self) -> int:
        return min(self.stop - self.next, len(self._buffer))

    def take(self, most: int) -> list[Part]:
        if self._roll is None:
            keys = self._buffer.keys_from(self.next, most)
        else:
            keys = self._roll.keys_from(self.next, most, self.stop)
        if not len(keys):
            self.next = self.stop
            return []
        self.next = int(keys[-1]) + 1
        old, new, (places, _) = self._old, self._new, self._buffer.find(keys, int(keys[0]))
        holder, slots = _located(old.layout, places)
        taker, new_slots = _located(new.layout, places)
        pair = holder * len(new.shards) + taker
        parts, fields = [], tuple(old.schema.fields)
        for each in np.unique(pair).tolist():
            source, target = old.shards[each // len(new.shards)], new.shards[each % len(new.shards)]
            (mine,) = np.nonzero(pair == each)
            at = self._lengths.padded(mine, (source.at, target.at))
            parts.append(
                Part(
                    (source.at, target.at),
                    len(mine) * self.row_bytes,
                    partial(source.read, slots[at], fields, source.at),
                    partial(target.put, new_slots[at]),
                    self._widened,
                )
            )
        return parts


class FinalSeries:
    def __init__(self, backend: Backend[Any], old: Finals, new: Finals) -> None:
        self._old, self._new, self._lengths = old, new, _Lengths(backend)
        self._widened = None if new.schema == old.schema else new.schema
        self.row_bytes = old.row_bytes
        self.next = 0

    @property
    def stop(self) -> int:
        return self._old.stop

    def left(self) -> int:
        return self._old.stop - max(self.next, self._old.first)

    def take(self, most: int) -> list[Part]:
        old, new = self._old, self._new
        first = max(self.next, old.first)
        self.next = min(first + most, old.stop)
        new.hold(old.first, self.next)
        if self.next == first:
            return []
        numbers = self._lengths.padded(np.arange(first, self.next), (old.at, new.at))
        return [
            Part(
                (old.at, new.at),
                (self.next - first) * self.row_bytes,
                partial(old.read, numbers, old.fields, old.at),
                partial(new.bring, numbers),
                self._widened,
            )
        ]


def is_same(one: Placement, other: Placement) -> bool:
    return _shares(one) == _shares(other)


def _shares(placement: Placement) -> dict[Endpoint, float]:
    total = sum(placement.shares)
    return {at: share / total for at, share in zip(placement.endpoints, placement.shares, strict=True)}


def least_moves(old: Storage, placement: Placement) -> dict[Edge, float]:
    """Rows by edge where as many as can be stay in their memory: who has too many gives to all that lack some, in proportion."""
    capacity = old.layout.capacity
    have = dict(zip(old.placement.endpoints, old.layout.shard_rows, strict=True))
    want = {at: share * capacity for at, share in _shares(placement).items()}
    moves = {(at, at): min(have[at], want[at]) for at in have.keys() & want.keys()}
    over = {at: rows - moves.get((at, at), 0.0) for at, rows in have.items()}
    lack = {at: rows - moves.get((at, at), 0.0) for at, rows in want.items()}
    total = sum(lack.values())
    for i, rows in over.items():
        for j, lacking in lack.items():
            if rows > 0 and lacking > 0:
                moves[i, j] = moves.get((i, j), 0.0) + rows * lacking / total
    return moves


def least_rows(old: Storage, placement: Placement, layout: Layout) -> int:
    """Of a full ring, how many rows its endpoints have to get from others to hold what `layout` says."""
    have = dict(zip(old.placement.endpoints, old.layout.shard_rows, strict=True))
    return sum(max(0, rows - have.get(at, 0)) for at, rows in zip(placement.endpoints, layout.shard_rows, strict=True))


def joint(old: Schema, new: Schema) -> Schema:
    """Of the leaves of both, each axis as long as the longer one; `old` itself where that is all of its. SchemaError where they differ in
    anything else."""
    if new.structure != old.structure:
        raise SchemaError(
            f"stored rows can't grow into others: got leaves {', '.join(new.fields)}, expected {', '.join(old.fields)}"
        )
    fields = {}
    for path, was in old.fields.items():
        grown = new.fields[path]
        if grown.dtype != was.dtype or len(grown.shape) != len(was.shape):
            raise SchemaError(f"stored rows can't grow from {path}: {was} to {grown}: expected the same axes, longer")
        fields[path] = Field(tuple(map(max, was.shape, grown.shape)), was.dtype)
    return old if fields == dict(old.fields) else Schema(fields, old.structure)


def _called(places: Places, stop: int) -> Roll:
    """The rows that there are, of keys below `stop`, which is the next key. Not in a turn: whatever changes meanwhile is a key that has left, or
    one from `stop` on."""
    keys = places.keys()
    roll = Roll(places, keys[keys < stop])
    roll.order(0)
    return roll


def _located(layout: Layout, places: Keys) -> tuple[Keys, Keys]:
    """Shard and slot of each."""
    shards, slots = layout.locate(places)
    return (np.zeros(len(places), np.int64) if shards is None else shards), slots


class _Lengths:
    """Of the parts that go along each edge, where a framework compiles for each: as long as the longest before. So it doesn't in the turn in which
    the last and few ones are copied, and everybody waits."""

    def __init__(self, backend: Backend[Any]) -> None:
        self._backend = backend
        self._longest: dict[Edge, int] = {}

    def padded(self, rows: Keys, edge: Edge) -> Keys:
        """`rows` with the last one repeated."""
        padded, (at, to) = self._backend.padded, edge
        # Where lengths don't matter, this one is as good as the next.
        if padded(3, at) == padded(3, to) == 3:
            return rows
        length = max(padded(padded(len(rows), at), to), self._longest.get(edge, 0))
        self._longest[edge] = length
        return np.pad(rows, (0, length - len(rows)), mode="edge")
