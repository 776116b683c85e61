"""Rows at one endpoint: the only holder of their columns."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from conduit.core.backend import Backend, Columns, RowIndex
from conduit.core.experience import Schema
from conduit.errors import ClosedError
from conduit.topology.endpoint import Endpoint


class Shard:
    """One lock serialises the calls that touch the columns: a backend may consume them in a write (JAX donates), and a
    read must not be dispatched on consumed ones. The lock is never held across a wait."""

    def __init__(self, backend: Backend[Any], schema: Schema, rows: int, at: Endpoint) -> None:
        self.at = at
        self.rows = rows
        self._backend = backend
        self._lock = threading.Lock()
        self._columns: Columns[Any] | None = backend.allocate(schema, rows, at)

    def write(self, slot: int, rows: Columns[Any]) -> None:
        """Rows [slot, slot + rows.rows) become `rows`, which are at a host tier or at this shard's endpoint."""
        with self._lock:
            if (columns := self._columns) is None:
                raise _closed()
            self._columns = self._backend.write(columns, slot, rows)

    def read(self, slots: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[Any]:
        """The rows at `slots`, in memory of their own at `to`."""
        with self._lock:
            if (columns := self._columns) is None:
                raise _closed()
            return self._backend.read(columns, slots, fields, to)

    def close(self) -> None:
        """Gives the memory back. Whoever still writes or reads hears that the store is closed."""
        with self._lock:
            if self._columns is not None:
                self._backend.release(self._columns)
                self._columns = None


def _closed() -> ClosedError:
    return ClosedError("the store is closed")
