"""One generation of a buffer's memory: rows of one form, where one placement says, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from conduit.core.backend import Columns
from conduit.core.experience import Schema
from conduit.core.finals import FIRST_ROWS, Finals
from conduit.core.placement import Placement
from conduit.core.reader import Reader
from conduit.core.recipe import Composition, Recipe, Selection, together
from conduit.core.ring import Layout
from conduit.core.room import Room
from conduit.topology.endpoint import Endpoint, Tier

_QUICK_BYTES = 1 << 17
"""Batches of rows up to this size are gathered in the turn of their draw: writers wait some 30 µs, less than leases cost."""
_TOGETHER_BYTES = 32 << 20
"""Batches up to this size in all are read at once. Whoever keeps one of them keeps all in memory."""


class Storage:
    """Shards, and the finals beside the first of them. It knows where the rows are that are known by a key, or a slot of the ring, and
    nothing of who is live."""

    def __init__(
        self,
        room: Room,
        recipe: Recipe,
        schema: Schema,
        placement: Placement,
        layout: Layout,
    ) -> None:
        """Takes the memory, where `layout` has a shard for each endpoint of `placement`: all of it, or none."""
        self.schema, self.placement, self.layout = schema, placement, layout
        self.composition = composition = Composition(recipe, schema)
        self.row_bytes = schema.row_bytes
        self.on_host = all(at.is_host for at in placement.endpoints)
        """Whether a row that was written is there when the call returns."""
        # Rows on disk may have to be waited for: never in the turn of a draw.
        in_memory = self.on_host and all(at.tier is not Tier.DISK for at in placement.endpoints)
        self.is_near = in_memory and room.backend.immediate
        """Whether a read or write costs little beside its bytes."""
        fields, capacity = composition.final_fields, layout.capacity
        self.shards = room.shards(placement, layout, schema)
        self._only = self.shards[0] if len(self.shards) == 1 else None
        self.finals: Finals | None = None
        if fields:
            at, beside = self.shards[0].at, self.shards[0].rows * schema.row_bytes
            self.finals = Finals(
                room.backend,
                fields,
                at,
                capacity,
                lambda needed: room.check_finals(needed, at, beside),
                room.meter(at),
            )
        # The reader's own method, since this is called for every batch.
        self.read = Reader(room.backend, layout, self.shards, schema, self.finals).read
        """What was selected, as leaves of a batch in memory of their own at an endpoint."""

    def read_all(self, selections: Sequence[Selection], to: Endpoint) -> list[Columns[Any]]:
        """What was selected for each of some batches. Where these are of one form and not large, they are parts of one that is read at once:
        most of what a small batch costs is the call."""
        if len(selections) == 1:
            return [self.read(selections[0], to)]
        joint = None
        if sum(selection.rows() for selection in selections) * self.row_bytes <= _TOGETHER_BYTES:
            joint = together(selections)
        if joint is None:
            return [self.read(selection, to) for selection in selections]
        columns = self.read(joint, to)
        each = columns.rows // len(selections)
        return [columns.slice(at, at + each) for at in range(0, columns.rows, each)]

    def write(self, first: int, rows: Columns[Any]) -> None:
        """Rows that are known by the numbers from `first` on, of which there are at most as many as the ring has places."""
        layout = self.layout
        at = first % layout.capacity
        if self._only is not None and at + rows.rows <= layout.capacity:
            self._only.write(at, rows)
            return
        for span in layout.spans(first, rows.rows):
            part = rows if span.rows == rows.rows else rows.slice(span.offset, span.offset + span.rows)
            self.shards[span.shard].write(span.slot, part)

    def is_quick(self, to: Endpoint, selections: Sequence[Selection]) -> bool:
        """Whether what was selected is read to `to` in less time than a lease on it takes."""
        if not self.is_near or not to.is_host:
            return False
        return self.row_bytes * sum(selection.rows() for selection in selections) <= _QUICK_BYTES

    def bytes_by_endpoint(self) -> dict[Endpoint, int]:
        """What is occupied."""
        occupied = {shard.at: shard.rows * self.row_bytes for shard in self.shards}
        if self.finals is not None:
            occupied[self.finals.at] += self.finals.bytes
        return occupied

    def numbered_on(self, old: Storage) -> Storage:
        """Itself, empty, whose finals go on from the numbers of the old one's, of which none is live: what was saved of those is known by these."""
        if self.finals is not None and old.finals is not None:
            self.finals.hold(old.finals.stop, old.finals.stop)
        return self

    def wait(self) -> None:
        """Returns when all that was put into its shards is there. Nobody may write meanwhile."""
        for held in (*self.shards, self.finals):
            if held is not None:
                held.wait()

    def close(self) -> None:
        """Gives the memory back. Whoever still writes or reads hears that the store is closed."""
        with ExitStack() as each:
            # Each of them, whatever another raises.
            for held in (*self.shards, self.finals):
                if held is not None:
                    each.callback(held.close)


def take_memory(
    room: Room, recipe: Recipe, schema: Schema, placement: Placement, layout: Layout, beside: Storage | None
) -> Storage:
    """An empty storage, where there is room for it and for another that stays. CapacityError where there is none: nothing is taken then."""
    held = {} if beside is None else beside.bytes_by_endpoint()
    live = 0 if beside is None or beside.finals is None else beside.finals.stop - beside.finals.first
    room.check(placement, layout, schema, _first_finals(recipe, schema, layout, live), held, {})
    return Storage(room, recipe, schema, placement, layout)


def check_instead(
    room: Room, recipe: Recipe, schema: Schema, placement: Placement, layout: Layout, other: Storage | None
) -> None:
    """CapacityError unless there were room for such a storage if the other were gone."""
    freed = {} if other is None else other.bytes_by_endpoint()
    room.check(placement, layout, schema, _first_finals(recipe, schema, layout, 0), {}, freed)


def _first_finals(recipe: Recipe, schema: Schema, layout: Layout, live: int) -> int:
    """How many bytes finals take at first, where so many are live already."""
    row_bytes = sum(field.row_bytes for field in Composition(recipe, schema).final_fields.values())
    return row_bytes * min(max(FIRST_ROWS, live), layout.capacity)
