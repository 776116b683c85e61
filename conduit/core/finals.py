"""The side slots: what was observed after an episode's last row, for the leaves that a next is derived from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import optree
from numpy.typing import NDArray

from conduit.core.backend import Backend, Columns
from conduit.core.experience import Field, Schema, Tree, leaf_paths
from conduit.core.shard import Meter, Shard
from conduit.errors import CapacityError, SchemaError
from conduit.topology.endpoint import PAGEABLE, Endpoint

Numbers = NDArray[np.int64]

FIRST_ROWS = 64
"""For how many there is memory at first."""


class Finals:
    """A ring of its own, for few rows end an episode: finals are numbered as they come, and leave with their rows. Its memory
    doubles when the live ones need it. A number, like a key, names the final while slots change.

    `append` and `evict` are called in a turn of the store's Order, `read` by anybody who holds a lease on the finals' rows."""

    def __init__(
        self,
        backend: Backend[Any],
        fields: Mapping[str, Field],
        at: Endpoint,
        most: int,
        check_room: Callable[[int], None],
        meter: Meter | None = None,
    ) -> None:
        """`most`: there are never more live ones. `check_room(bytes)` raises CapacityError where memory for them isn't to be had."""
        self.schema = Schema(fields, optree.tree_structure(cast(Any, dict.fromkeys(fields, 0))))
        self._backend, self.at, self._most, self._check_room = backend, at, most, check_room
        self._meter = meter
        self._lock = threading.Lock()
        self._shard: Shard | None = None
        self._first = self.stop = 0

    @property
    def bytes(self) -> int:
        """What they occupy."""
        return 0 if self._shard is None else self._shard.rows * self.schema.row_bytes

    def append(self, finals: Sequence[Mapping[str, Tree]]) -> Numbers:
        """Takes finals, each with leaves (*shape), and returns their numbers. SchemaError where they don't fit the stored rows."""
        columns = self._stacked([_leaves(final) for final in finals])
        self._make_room(len(finals))
        assert self._shard is not None
        _write(self._shard, self.stop, Columns(PAGEABLE, columns, len(finals)))
        self.stop += len(finals)
        return np.arange(self.stop - len(finals), self.stop)

    def evict(self, count: int) -> None:
        """The rows of the oldest `count` finals are gone."""
        self._first += count

    @property
    def first(self) -> int:
        """The number of the oldest live one."""
        return self._first

    @property
    def row_bytes(self) -> int:
        return self.schema.row_bytes

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(self.schema.fields)

    def load(self, first: int, stop: int) -> None:
        """Makes room for finals [first, stop), which `put` brings; there are none so far."""
        self._first = self.stop = first
        if stop > first:
            self._make_room(stop - first)
        self.stop = stop

    def hold(self, first: int, stop: int) -> None:
        """The live ones are [first, stop) from here on, of which `bring` brings those that are new. Neither number is lower than it was."""
        self._first = first
        self.stop = max(self.stop, first)
        if stop > self.stop:
            self._make_room(stop - self.stop)
        self.stop = stop

    def bring(self, numbers: Numbers, rows: Columns[Any]) -> None:
        """Live finals `numbers`, as they were read from other ones."""
        assert self._shard is not None
        self._shard.put(numbers % self._shard.rows, rows)

    def wait(self) -> None:
        """Returns when all that was brought is there."""
        if self._shard is not None:
            self._shard.wait()

    def put(self, first: int, columns: Mapping[str, NDArray[Any]]) -> None:
        """Finals from number `first` on, as they were read from other ones."""
        assert self._shard is not None
        self.schema.check(columns, "a checkpoint's finals")
        _write(self._shard, first, Columns(PAGEABLE, columns, len(next(iter(columns.values())))))

    def read(self, numbers: Numbers, fields: Sequence[str], to: Endpoint) -> Columns[Any]:
        """Finals `numbers`, in memory of their own at `to`."""
        with self._lock:
            assert self._shard is not None
            return self._shard.read(numbers % self._shard.rows, fields, to)

    def close(self) -> None:
        with self._lock:
            if self._shard is not None:
                self._shard.close()

    def _stacked(self, finals: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
        columns = {}
        for path, field in self.schema.fields.items():
            leaves: list[Any] = [final.get(path) for final in finals]
            for leaf in leaves:
                if leaf is None or leaf.shape != field.shape or leaf.dtype != field.dtype:
                    got = "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
                    raise SchemaError(
                        f"final[{path!r}] is {got}, and the stored leaf is {field}: what a next is derived from must have the same form "
                        "in finals. A trajectory-scope hook that changes the leaf must change `Fragment.final` as well"
                    )
            columns[path] = np.stack(leaves)
        return columns

    def _make_room(self, more: int) -> None:
        live, old = self.stop - self._first, self._shard
        if old is not None and live + more <= old.rows:
            return
        rows = FIRST_ROWS if old is None else 2 * old.rows
        while rows < live + more:
            rows *= 2
        rows = max(min(rows, self._most), live + more)
        # While they are copied, the old ones and the new ones are there.
        try:
            self._check_room(rows * self.schema.row_bytes + self.bytes)
        except CapacityError:
            rows = live + more
            self._check_room(rows * self.schema.row_bytes + self.bytes)
        new = Shard(self._backend, self.schema, rows, self.at, self._meter)
        if old is not None and live:
            kept = np.arange(self._first, self.stop) % old.rows
            _write(new, self._first, old.read(kept, tuple(self.schema.fields), self.at))
        with self._lock:
            self._shard = new
        if old is not None:
            old.close()


def _leaves(final: Mapping[str, Tree]) -> Mapping[str, Any]:
    """A final's leaves by path."""
    leaves, structure = optree.tree_flatten(cast(Any, final))
    return dict(zip(leaf_paths(structure), leaves, strict=True))


def _write(shard: Shard, first: int, rows: Columns[Any]) -> None:
    """Writes rows that are numbered from `first` on, around the end of the ring."""
    at = first % shard.rows
    head = min(rows.rows, shard.rows - at)
    for slot, low, stop in ((at, 0, head), (0, head, rows.rows)):
        if low < stop:
            shard.write(slot, rows.slice(low, stop))
