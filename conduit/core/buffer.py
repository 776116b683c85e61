"""The Experience Buffer: a ring of rows over one or several shards, and the cursor that says which are live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.backend import Backend, Columns
from conduit.core.experience import Schema, Tree
from conduit.core.halt import Halt
from conduit.core.placement import Placement, format_bytes
from conduit.core.ring import Layout, Window
from conduit.core.shard import Shard
from conduit.errors import CapacityError
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

Keys = NDArray[np.int64]


class Lease:
    """Rows from `oldest` on stay as they are until `read` has run. Whoever comes first runs it: the one who wants the rows,
    or a writer that would overwrite them. So a writer never waits for what else a reader has to do before."""

    __slots__ = ("oldest", "read", "taken")

    def __init__(self, oldest: int, read: Callable[[], None]) -> None:
        self.oldest = oldest
        self.read = read
        self.taken = False


class ExperienceBuffer:
    """`write` and `drop` are called in a turn of the store's Order; `read` by anybody who holds a lease on its keys.

    A lease protects drawn rows from being overwritten before they are read: so a gather neither blocks the cursor nor sees
    a torn row, and a writer has to do with readers of the very rows only that it is about to replace."""

    def __init__(
        self, backend: Backend[Any], capacity: int, placement: Placement, budgets: Mapping[Tier, int], halt: Halt
    ) -> None:
        self._backend = backend
        self._placement = placement
        self._budgets = budgets
        self._halt = halt
        self._layout = Layout(capacity, placement.shares)
        self._shards: list[Shard] = []
        self._schema: Schema | None = None
        self._version = np.zeros(capacity, np.int64)
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
    def schema(self) -> Schema | None:
        """Of the stored rows; None before the first."""
        return self._schema

    def write(self, data: Tree, version: NDArray[np.int64], checked: Schema | None = None) -> Window:
        """Appends rows, evicting as many of the oldest as the ring has no room for, and returns their insertion numbers.

        `data`: a tree of NumPy arrays (n, *field.shape) that nobody changes any more; the first fixes the stored schema.
        `checked`: what it has been checked against already."""
        rows = self._columns(data, len(version), checked)
        count, stop = rows.rows, self._window.stop
        # Of more rows than the ring has, the first are gone as soon as they are counted: they aren't written at all.
        stays = max(0, count - self.capacity)
        first = max(self._window.first, stop + count - self.capacity)
        self._evict(min(first, stop))
        for span in self._layout.spans(stop + stays, count - stays):
            part = _slice(rows, stays + span.offset, span.rows)
            self._shards[span.shard].write(span.slot, part)
        at = (stop + stays) % self.capacity
        head = min(count - stays, self.capacity - at)
        self._version[at : at + head] = version[stays : stays + head]
        self._version[: count - stays - head] = version[stays + head :]
        self._window = Window(first, stop + count)
        return Window(stop + stays, stop + count)

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

    def read(self, keys: Keys, to: Endpoint) -> Columns[Any]:
        """Rows `keys`, in that order, in memory of their own at `to`. The caller holds a lease on them."""
        assert self._schema is not None
        fields = tuple(self._schema.fields)
        shard, slots = self._layout.locate(keys)
        if shard is None:
            return self._shards[0].read(slots, fields, to)
        batch = self._backend.allocate(self._schema, len(keys), to)
        for number, source in enumerate(self._shards):
            (place,) = np.nonzero(shard == number)
            if len(place):
                place = self._padded(place, source.at)
                part = source.read(slots[place], fields, to)
                batch = self._backend.scatter(batch, place, part, fields)
        return batch

    def version_of(self, keys: Keys) -> NDArray[np.int64]:
        return self._version[keys % self.capacity]

    def bytes_by_endpoint(self) -> dict[str, int]:
        """Bytes that the shards occupy; empty before the first row."""
        if self._schema is None:
            return {}
        return {str(shard.at): shard.rows * self._schema.row_bytes for shard in self._shards}

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def _columns(self, data: Tree, count: int, checked: Schema | None) -> Columns[Any]:
        schema = self._schema
        if schema is None:
            schema = checked or Schema.infer(data, "stored rows")
            schema.check(schema.flatten(data, "stored rows"), "stored rows", count)
            self._allocate(schema)
            self._schema = schema
        leaves = schema.flatten(data, "stored rows")
        if checked is not schema:
            schema.check(leaves, "stored rows", count)
        return Columns(PAGEABLE, leaves, count)

    def _allocate(self, schema: Schema) -> None:
        asked = list(zip(self._placement.endpoints, self._layout.shard_rows, strict=True))
        short = [line for endpoint, rows in asked if (line := self._shortfall(endpoint, rows, schema.row_bytes))]
        if short:
            raise CapacityError(
                f"{self.capacity:,} rows of {schema.row_bytes:,} bytes don't fit. {'; '.join(short)}. "
                "A smaller capacity, a larger budget or a placement over more endpoints would"
            )
        self._shards = [Shard(self._backend, schema, rows, at) for at, rows in asked]

    def _shortfall(self, at: Endpoint, rows: int, row_bytes: int) -> str | None:
        need = rows * row_bytes
        free, budget = self._backend.free_bytes(at), self._budgets.get(at.tier)
        if budget is not None and need > budget:
            fits = f"{budget // max(row_bytes, 1):,} rows would fit"
            return f"{at} needs {format_bytes(need)} for {rows:,} rows; its budget is {format_bytes(budget)} ({fits})"
        if need > free:
            fits = f"{free // max(row_bytes, 1):,} rows would fit"
            return f"{at} needs {format_bytes(need)} for {rows:,} rows; {format_bytes(free)} are free ({fits})"
        return None

    def _evict(self, first: int) -> None:
        """Rows before `first` are live no more; returns when nobody has to read one of them. No deadline: what it waits for, or
        does itself, are gathers, in which nothing of the user's runs; so rows that were taken can't be lost to one."""
        self._window = Window(first, self._window.stop)
        # No lease can be taken meanwhile: that needs a turn, and the caller is in one.
        while blocking := next((lease for lease in list(self._leases) if lease.oldest < first), None):
            self.redeem(blocking)

    def _end(self, lease: Lease) -> None:
        with self._unleased:
            self._leases.discard(lease)
            self._unleased.notify_all()

    def _padded(self, place: NDArray[np.int64], at: Endpoint) -> NDArray[np.int64]:
        """`place` with its last entry repeated, to a length that a backend that compiles per shape has met before."""
        return np.pad(place, (0, self._backend.padded(len(place), at) - len(place)), mode="edge")


def _slice(rows: Columns[Any], offset: int, count: int) -> Columns[Any]:
    if offset == 0 and count == rows.rows:
        return rows
    return Columns(rows.at, {path: column[offset : offset + count] for path, column in rows.arrays.items()}, count)
