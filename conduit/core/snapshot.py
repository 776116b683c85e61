"""Live rows read as they are stored, while the store goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.backend import Backend, Columns
from conduit.core.buffer import ExperienceBuffer
from conduit.core.experience import Tree, map_leaves, top_level
from conduit.core.growth import Growth
from conduit.core.links import Linked
from conduit.errors import SchemaError
from conduit.topology.endpoint import PAGEABLE

Keys = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Live rows by age, in host memory of their own: `keys` and `versions` (n,), `data` leaves (n, *shape). `linked`: how they
    follow each other; None where rows stand alone or make groups. `finals`: leaves (f, *shape) of those that `linked.final` names,
    in their order, by the names at the top of what a next is derived from; None where there are none. `extents`: where rows grow, how
    long the growing axis of each such leaf was when each row came, (n,), by the leaf's path; what is beyond are zeros."""

    keys: Keys
    versions: NDArray[np.int64]
    data: Tree
    linked: Linked | None
    finals: Mapping[str, Tree] | None
    extents: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


class Snapshot:
    """The next `most` live rows from key `first` on. Made in a turn of the store's Order; `rows` reads them afterwards, once."""

    def __init__(
        self, buffer: ExperienceBuffer, backend: Backend[Any], growth: Growth | None, first: int, most: int
    ) -> None:
        """SchemaError before the first row."""
        if buffer.schema is None:
            raise SchemaError("no row has been stored yet, so the leaves of rows aren't known")
        self._buffer, self._backend, self._schema = buffer, backend, buffer.schema
        self._finals = finals = buffer.finals
        self._keys = keys = buffer.keys_from(first, most)
        known_by = buffer.find(keys, int(keys[0]))[0] if len(keys) else keys
        self._versions = buffer.version_of(known_by)
        self._extents = {} if growth is None else growth.extents_of(keys)
        self._selection = buffer.stored(keys) if len(keys) else None
        self._linked = None
        if buffer.lineage is not None and buffer.lineage.by is None:
            self._linked = buffer.lineage.links.of(keys, 0 if finals is None else finals.stop)
        self._numbers = keys[:0] if self._linked is None else self._linked.final[self._linked.final >= 0]
        self._read: list[Columns[Any]] = []
        self._failed: Exception | None = None
        # On all live rows: their finals leave with them.
        self._lease = buffer.leases.take(buffer.window.first, self._gather)

    def rows(self) -> StoredRows:
        self._buffer.leases.redeem(self._lease)
        if self._failed is not None:
            raise self._failed
        for columns in self._read:
            self._backend.wait(columns)
        schema = self._schema
        if self._selection is None:
            leaves = {path: np.zeros((0, *field.shape), field.dtype) for path, field in schema.fields.items()}
        else:
            leaves = self._read[0].arrays
        data, finals = schema.unflatten(leaves), self._finals_read()
        return StoredRows(self._keys, self._versions, data, self._linked, finals, self._extents)

    def _finals_read(self) -> Mapping[str, Tree] | None:
        if not len(self._numbers):
            return None
        arrays, schema = self._read[1].arrays, self._schema
        tree = schema.unflatten({path: path for path in schema.fields})
        names = [name for name, paths in top_level(schema).items() if all(path in arrays for path in paths)]
        return {name: map_leaves(lambda path: arrays[path], tree[name]) for name in names}

    def _gather(self) -> None:
        """It may be a writer who runs this: what goes wrong is the reader's."""
        try:
            if self._selection is not None:
                self._read += self._buffer.read([self._selection], PAGEABLE)
            if self._finals is not None and len(self._numbers):
                self._read.append(self._finals.read(self._numbers, self._finals.fields, PAGEABLE))
        except Exception as error:
            self._failed = error
