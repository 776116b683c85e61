"""The Experience Buffer: a ring of rows over one or several shards, the cursor that says which are live, and how they are linked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.backend import Backend, Columns
from conduit.core.episodes import End, Rows
from conduit.core.experience import Schema
from conduit.core.finals import FIRST_ROWS, Finals
from conduit.core.halt import Halt
from conduit.core.items import Chance
from conduit.core.lineage import Lineage
from conduit.core.placement import Placement, format_bytes
from conduit.core.reader import Reader
from conduit.core.recipe import Composition, Recipe, Selection
from conduit.core.ring import Layout, Window
from conduit.core.shard import Shard
from conduit.core.starts import Starts
from conduit.core.versions import Versions
from conduit.errors import CapacityError
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

Keys = NDArray[np.int64]


_QUICK_BYTES = 1 << 17
"""Batches of rows up to this size are gathered in the turn of their draw: writers wait some 30 µs, less than leases cost."""
_NONE: Keys = np.zeros(0, np.int64)


@dataclass(slots=True)
class Written:
    """Rows `window` came; `admitted` rows can be drawn since, and `excluded` ones, though live, can't any more."""

    window: Window
    admitted: Keys
    excluded: Keys


class Lease:
    """Rows from `oldest` on stay as they are until `read` has run. Whoever comes first runs it: the one who wants the rows,
    or a writer that would overwrite them. So a writer never waits for what else a reader has to do before."""

    __slots__ = ("oldest", "read", "taken")

    def __init__(self, oldest: int, read: Callable[[], None]) -> None:
        self.oldest = oldest
        self.read = read
        self.taken = False


class ExperienceBuffer:
    """`write`, `cut`, `drop` and `select` are called in a turn of the store's Order; `read` by anybody who holds a lease on what
    was selected.

    A lease protects drawn rows from being overwritten before they are read: so a gather neither blocks the cursor nor sees
    a torn row, and a writer has to do with readers of the very rows only that it is about to replace."""

    def __init__(
        self,
        backend: Backend[Any],
        capacity: int,
        placement: Placement,
        budgets: Mapping[Tier, int],
        halt: Halt,
        recipe: Recipe | None = None,
    ) -> None:
        self._backend = backend
        self._placement = placement
        self._on_host = all(endpoint.is_host for endpoint in placement.endpoints)
        self._row_bytes = 0
        self._budgets = budgets
        self._halt = halt
        self._recipe = recipe or Recipe()
        self._layout = Layout(capacity, placement.shares)
        self._shards: list[Shard] = []
        self._schema: Schema | None = None
        self._composition: Composition | None = None
        self._lineage = None if self._recipe.trivial else Lineage(capacity, self._recipe.following)
        self._finals: Finals | None = None
        self._reader: Reader | None = None
        self._versions = Versions()
        self._window = Window(0, 0)
        self._leases: set[Lease] = set()
        self._unleased = halt.condition("buffer")

    @property
    def capacity(self) -> int:
        return self._layout.capacity

    @property
    def window(self) -> Window:
        """The live rows."""
        return self._window

    @property
    def starts(self) -> Starts | None:
        """Which live rows can be drawn; None: all."""
        return None if self._lineage is None else self._lineage.starts

    @property
    def schema(self) -> Schema | None:
        """Of the stored rows; None before the first."""
        return self._schema

    @property
    def batch_schema(self) -> Schema:
        """The leaves of a batch, without its leading axes. There must be rows."""
        assert self._composition is not None
        return self._composition.schema

    def write(self, rows: Rows) -> Written:
        """Appends rows, evicting as many of the oldest as the ring has no room for. Their arrays, which nobody changes any more,
        fix the stored schema if they are the first."""
        columns = self._columns(rows)
        count, first, stop = columns.rows, self._window.first, self._window.stop
        lost, excluded = 0, _NONE
        oldest = stop + count - self._layout.capacity
        if oldest > first:
            # Of more rows than the ring has, the first are gone as soon as they are counted: they aren't written at all.
            first, lost = oldest, max(0, oldest - stop)
            excluded = self._evict(min(first, stop))
        for span in self._layout.spans(stop + lost, count - lost):
            if span.rows == count:
                part = columns
            else:
                part = columns.slice(lost + span.offset, lost + span.offset + span.rows)
            self._shards[span.shard].write(span.slot, part)
        self._versions.append(stop, rows.version)
        admitted = _NONE if self._lineage is None else self._link(self._lineage, rows, stop, lost)
        self._window = Window(first, stop + count)
        return Written(Window(stop + lost, stop + count), admitted, excluded)

    def cut(self, lanes: Sequence[int]) -> Keys:
        """What comes in these lanes doesn't follow what came. Returns rows that can be drawn since."""
        return _NONE if self._lineage is None else self._lineage.cut(lanes)

    def select(self, keys: Keys, chance: Chance) -> Selection:
        """What the entries of a batch that start at `keys` are made of. `chance`: for what an item leaves to it."""
        assert self._composition is not None
        if self._lineage is None:
            return self._composition.select_rows(keys)
        finals_stop = 0 if self._finals is None else self._finals.stop
        return self._composition.select(keys, self._lineage.links, finals_stop, chance)

    def drop(self) -> None:
        """No row is live any more; numbers go on counting."""
        self._evict(self._window.stop)

    def lease(self, oldest: int, read: Callable[[], None]) -> Lease:
        """A lease on rows from `oldest` on, taken in the turn that drew them, or they may be gone already. `read` must not raise."""
        lease = Lease(oldest, read)
        with self._unleased:
            self._leases.add(lease)
        return lease

    def redeem(self, lease: Lease) -> None:
        """Returns when the lease's `read` has run, here or elsewhere, or the lease was given up."""
        with self._unleased:
            if lease.taken:
                self._halt.wait(self._unleased, lambda: lease not in self._leases, None, lambda: "rows are being read")
                return
            lease.taken = True
        try:
            lease.read()
        finally:
            self._end(lease)

    def give_up(self, lease: Lease) -> None:
        """Nobody wants the rows any more."""
        with self._unleased:
            if lease.taken:
                return
            lease.taken = True
        self._end(lease)

    def read(self, selection: Selection, to: Endpoint) -> Columns[Any]:
        """What was selected, as leaves of a batch in memory of their own at `to`. The caller holds a lease from
        `selection.oldest()` on."""
        assert self._reader is not None
        return self._reader.read(selection, to)

    def is_quick(self, to: Endpoint, selections: Sequence[Selection]) -> bool:
        """Whether what was selected is read to `to` in less time than a lease on it takes."""
        if not self._on_host or not to.is_host:
            return False
        return self._row_bytes * sum(selection.rows() for selection in selections) <= _QUICK_BYTES

    def version_of(self, keys: Keys) -> NDArray[np.int64]:
        """The policy version of live rows; in a turn."""
        return self._versions.of(keys)

    def bytes_by_endpoint(self) -> dict[str, int]:
        """Bytes that the shards occupy; empty before the first row."""
        if self._schema is None:
            return {}
        occupied = {str(shard.at): shard.rows * self._schema.row_bytes for shard in self._shards}
        if self._finals is not None and self._finals.bytes:
            occupied[str(self._shards[0].at)] += self._finals.bytes
        return occupied

    def close(self) -> None:
        for shard in self._shards:
            shard.close()
        if self._finals is not None:
            self._finals.close()

    def _link(self, lineage: Lineage, rows: Rows, first: int, lost: int) -> Keys:
        """Links rows that came as `first` and following, the first `lost` of which are gone already."""
        admitted = lineage.append(first, rows.lane, rows.end, lost)
        if self._finals is not None and rows.finals:
            places = [place for place in sorted(rows.finals) if place >= lost and rows.end[place] != End.OPEN]
            if places:
                numbers = self._finals.append([rows.finals[place] for place in places])
                lineage.links.conclude(first + np.array(places), numbers)
        return admitted

    def _columns(self, rows: Rows) -> Columns[Any]:
        schema, count = self._schema, len(rows)
        if schema is None:
            schema = rows.schema or Schema.infer(rows.data, "stored rows")
            schema.check(schema.flatten(rows.data, "stored rows"), "stored rows", count)
            composition = Composition(self._recipe, schema)
            finals = sum(field.row_bytes for field in composition.final_fields.values())
            self._allocate(schema, min(FIRST_ROWS, self.capacity) * finals)
            if composition.final_fields:
                self._finals = Finals(
                    self._backend, composition.final_fields, self._shards[0].at, self.capacity, self._check_finals
                )
            self._reader = Reader(self._backend, self._layout, self._shards, schema, self._finals)
            self._schema, self._composition = schema, composition
            self._row_bytes = schema.row_bytes
        if rows.schema is schema and schema.flat:
            leaves = rows.data
        else:
            leaves = schema.flatten(rows.data, "stored rows")
            if rows.schema is not schema:
                schema.check(leaves, "stored rows", count)
        return Columns(PAGEABLE, leaves, count)

    def _check_finals(self, needed: int) -> None:
        """CapacityError unless the finals' memory may grow to `needed` bytes."""
        assert self._schema is not None
        shard = self._shards[0]
        budget, free = self._budgets.get(shard.at.tier), self._backend.free_bytes(shard.at)
        left = free if budget is None else min(free, budget - shard.rows * self._schema.row_bytes)
        if needed > left:
            raise CapacityError(
                f"the finals of ended episodes need {format_bytes(needed)} at {shard.at}; {format_bytes(max(left, 0))} are left there. "
                "A larger budget or a smaller capacity would do"
            )

    def _allocate(self, schema: Schema, finals_bytes: int) -> None:
        """Takes the memory of the rows, where there is room for the first finals beside them."""
        asked = list(zip(self._placement.endpoints, self._layout.shard_rows, strict=True))
        beside = [finals_bytes, *[0] * (len(asked) - 1)]
        lines = (
            self._shortfall(at, rows, schema.row_bytes, more) for (at, rows), more in zip(asked, beside, strict=True)
        )
        short = [line for line in lines if line]
        if short:
            raise CapacityError(
                f"{self.capacity:,} rows of {schema.row_bytes:,} bytes don't fit. {'; '.join(short)}. "
                "A smaller capacity, a larger budget or a placement over more endpoints would"
            )
        self._shards = [Shard(self._backend, schema, rows, at) for at, rows in asked]

    def _shortfall(self, at: Endpoint, rows: int, row_bytes: int, finals_bytes: int) -> str | None:
        need = rows * row_bytes + finals_bytes
        free, budget = self._backend.free_bytes(at), self._budgets.get(at.tier)
        most, whose = free, f"{format_bytes(free)} are free"
        if budget is not None and budget < free:
            most, whose = budget, f"its budget is {format_bytes(budget)}"
        if need <= most:
            return None
        beside = f" and {format_bytes(finals_bytes)} of finals" if finals_bytes else ""
        fits = max(0, most - finals_bytes) // max(row_bytes, 1)
        return f"{at} needs {format_bytes(need)} for {rows:,} rows{beside}; {whose} ({fits:,} rows would fit)"

    def _evict(self, first: int) -> Keys:
        """Rows before `first` are live no more; returns others that can't be drawn any more, when nobody has to read one of the
        evicted. No deadline: what it waits for, or does itself, are gathers, in which nothing of the user's runs; so rows that
        were taken can't be lost to one."""
        before = self._window.first
        if first <= before:
            return _NONE
        self._window = Window(first, self._window.stop)
        # No lease can be taken meanwhile: that needs a turn, and the caller is in one.
        while self._leases:
            blocking = next((lease for lease in list(self._leases) if lease.oldest < first), None)
            if blocking is None:
                break
            self.redeem(blocking)
        self._versions.evict(first)
        if self._lineage is None:
            return _NONE
        if self._finals is not None:
            self._finals.evict(self._lineage.links.finals_among(before, first - before))
        return self._lineage.evict(before, first - before)

    def _end(self, lease: Lease) -> None:
        with self._unleased:
            self._leases.discard(lease)
            self._unleased.notify_all()
