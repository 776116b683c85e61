"""Rows at one endpoint: the only holder of their columns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from conduit.core.backend import Backend, Columns, RowIndex
from conduit.core.experience import Schema
from conduit.errors import ClosedError
from conduit.topology.endpoint import Endpoint

Read = Callable[[Columns[Any], RowIndex, Sequence[str], Endpoint], Columns[Any]]
Write = Callable[[Columns[Any], int, Columns[Any]], Columns[Any]]


class Meter(Protocol):
    """Is told what the rows at an endpoint cost; by several threads."""

    def now(self) -> float: ...

    def read(self, size: int, began_s: float) -> None:
        """A call that began then has read so many bytes."""
        ...

    def wrote(self, size: int, began_s: float) -> None: ...


class Shard:
    """One lock serialises the calls that touch the columns: a backend may consume them in a write (JAX donates), and a
    read must not be dispatched on consumed ones. The lock is never held across a wait."""

    def __init__(
        self, backend: Backend[Any], schema: Schema, rows: int, at: Endpoint, meter: Meter | None = None
    ) -> None:
        """`meter`: is told of every write and read."""
        self.at = at
        self.rows = rows
        self._fields = tuple(schema.fields)
        self._backend = backend
        self._read: Read = backend.read if meter is None else _metered_read(backend.read, schema, meter)
        self._write: Write = backend.write if meter is None else _metered_write(backend.write, schema, meter)
        self._lock = threading.Lock()
        # Where lengths matter, a framework compiles: not once more, in whoever's turn that is, for slots that happen to be neighbours.
        self._copies_spans = backend.padded(3, at) == 3
        self._columns: Columns[Any] | None = backend.allocate(schema, rows, at)

    def write(self, slot: int, rows: Columns[Any]) -> None:
        """Rows [slot, slot + rows.rows) become `rows`, which are at a host tier or at this shard's endpoint."""
        with self._lock:
            if (columns := self._columns) is None:
                raise _closed()
            self._columns = self._write(columns, slot, rows)

    def put(self, slots: RowIndex, rows: Columns[Any]) -> None:
        """Row i of `rows`, which are at a host tier or at this shard's endpoint, goes to `slots[i]`. A slot that occurs twice must
        be brought the same row both times."""
        with self._lock:
            if (columns := self._columns) is None:
                raise _closed()
            if self._copies_spans and len(slots) and np.array_equal(slots, np.arange(slots[0], slots[0] + len(slots))):
                self._columns = self._write(columns, int(slots[0]), rows)
            else:
                self._columns = self._backend.scatter(columns, slots, rows, self._fields)

    def read(self, slots: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[Any]:
        """The rows at `slots`, in memory of their own at `to`."""
        with self._lock:
            if (columns := self._columns) is None:
                raise _closed()
            return self._read(columns, slots, fields, to)

    def wait(self) -> None:
        """Returns when all that was written is there. Nobody may write meanwhile."""
        with self._lock:
            if (columns := self._columns) is None:
                raise _closed()
        self._backend.wait(columns)

    def close(self) -> None:
        """Gives the memory back. Whoever still writes or reads hears that the store is closed."""
        with self._lock:
            columns, self._columns = self._columns, None
            if columns is not None:
                self._backend.release(columns)


def _metered_read(read: Read, schema: Schema, meter: Meter) -> Read:
    sizes = {path: field.row_bytes for path, field in schema.fields.items()}

    def metered(columns: Columns[Any], index: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[Any]:
        began_s = meter.now()
        batch = read(columns, index, fields, to)
        meter.read(len(index) * sum(sizes[path] for path in fields), began_s)
        return batch

    return metered


def _metered_write(write: Write, schema: Schema, meter: Meter) -> Write:
    def metered(into: Columns[Any], start: int, rows: Columns[Any]) -> Columns[Any]:
        began_s = meter.now()
        written = write(into, start, rows)
        meter.wrote(rows.rows * schema.row_bytes, began_s)
        return written

    return metered


def _closed() -> ClosedError:
    return ClosedError("the store is closed")
