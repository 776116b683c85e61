"""The pageable, pinned and disk tiers: NumPy columns, the same for every backend.

NumPy allocates the pageable ones, because its large arrays get huge pages and torch's don't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from conduit.backends.carving import NARROW_BYTES, Array, Bytes, Layout, carve, uninitialised, zeroed
from conduit.backends.checks import check_adopted, no_room
from conduit.backends.disk import Disk
from conduit.backends.exchange import to_numpy
from conduit.backends.gather import Gather
from conduit.backends.recycling import Recycler
from conduit.core.backend import Columns, RowIndex
from conduit.core.experience import Schema
from conduit.errors import CapacityError
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier
from conduit.topology.host_memory import free_host_bytes

# A member of an Enum is found more slowly than a name of ours.
_PINNED, _DISK = Tier.PINNED, Tier.DISK


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """Where a framework gets page-locked bytes."""

    columns: Bytes
    """Zeroed, exactly as many as asked for, kept for long: storage."""
    batch: Bytes
    """Uninitialised, from a pool, soon given back."""


class HostTiers:
    """Rows in host memory or in files on disk, as NumPy arrays. Arguments were checked. A method has done all when it returns: nothing to order
    or to wait for."""

    def __init__(self, disk: Disk, pinned: PinnedMemory | None = None, recycle: bool = True) -> None:
        """`recycle`: large batches are read into memory of earlier ones that nobody refers to any more."""
        self._disk = disk
        self._pinned = pinned
        self._recycler = Recycler() if recycle else None
        self._batch: Bytes = uninitialised if self._recycler is None else self._recycler.bytes
        self._gather = Gather()
        self.staging = PAGEABLE if pinned is None else PINNED
        """Where batches for a device are read to."""
        self.endpoints: tuple[Endpoint, ...] = (PAGEABLE, DISK) if pinned is None else (PAGEABLE, PINNED, DISK)

    def free_bytes(self, at: Endpoint) -> int:
        return self._disk.free_bytes() if at == DISK else free_host_bytes()

    def allocate(self, schema: Schema, rows: int, at: Endpoint) -> Columns[Array]:
        """Zeroed columns. Pageable ones are zero pages that the kernel brings in on first touch."""
        if at == DISK and schema.row_bytes * rows > (free := self._disk.free_bytes()):
            raise no_room(schema, rows, f"disk ({self._disk.folder})", free)
        layout = {path: ((rows, *field.shape), field.dtype) for path, field in schema.fields.items()}
        try:
            return Columns(at, carve(layout, self._source(at, zeroed)), rows)
        except CapacityError:
            raise
        except MemoryError as error:
            raise no_room(schema, rows, at, self.free_bytes(at)) from error

    def release(self) -> None:
        """Gives back what was kept for batches to come. Columns go when the last reference is dropped."""
        if self._recycler is not None:
            self._recycler.clear()

    def write(self, into: Columns[Array], start: int, rows: Columns[Array]) -> Columns[Array]:
        stop, source = start + rows.rows, rows.arrays
        if into.at.tier is _DISK:
            for path, column in into.arrays.items():
                self._disk.write(column[start:stop], source[path])
            return into
        for path, column in into.arrays.items():
            column[start:stop] = source[path]
        return into

    def scatter(
        self, into: Columns[Array], index: RowIndex, rows: Columns[Array], fields: Sequence[str]
    ) -> Columns[Array]:
        for path in fields:
            into.arrays[path][index] = rows.arrays[path]
        return into

    def read(self, columns: Columns[Array], index: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[Array]:
        """Rows `index`, gathered into memory of their own at the host tier `to`; into plain memory where that is the disk, for
        a batch is soon given back."""
        pinned, count = to.tier is _PINNED, len(index)
        asked = None
        if columns.at.tier is _DISK:
            asked = self._disk.ask([columns.arrays[path] for path in fields], index)
        batch: dict[str, Array] = {}
        layout: dict[str, Any] = {}
        for path in fields:
            column = columns.arrays[path]
            if count * column.strides[0] < NARROW_BYTES and not pinned:
                # `clip` is the mode that gathers without a buffer. Narrow arrays are copied sooner than aligned.
                batch[path] = column.take(index, 0, None, "clip")
            else:
                layout[path] = ((count, *column.shape[1:]), column.dtype)
        if layout:
            wide = carve(layout, self._pinned_at(to).batch if pinned else self._batch)
            self._gather.take([(columns.arrays[path], rows) for path, rows in wide.items()], index)
            batch |= wide
        if asked is not None:
            self._disk.learn(asked, count * len(fields))
        return Columns(to, batch, count)

    def merge(
        self, parts: Sequence[Columns[Array]], places: Sequence[RowIndex], rows: int, to: Endpoint
    ) -> Columns[Array]:
        """One batch of several, in memory as that of a batch that was read."""
        layout = {path: ((rows, *array.shape[1:]), array.dtype) for path, array in parts[0].arrays.items()}
        merged = carve(layout, self._pinned_at(to).batch if to.tier is _PINNED else self._batch)
        for part, place in zip(parts, places, strict=True):
            for path, array in merged.items():
                array[place] = part.arrays[path]
        return Columns(to, merged, rows)

    def widen(self, columns: Columns[Array], wider: Mapping[str, tuple[int, ...]]) -> Columns[Array]:
        """The columns, of which these arrays have grown to these shapes."""
        layout = {path: (shape, columns.arrays[path].dtype) for path, shape in wider.items()}
        wide = carve(layout, zeroed) if layout else {}
        for path, array in wide.items():
            array[tuple(map(slice, columns.arrays[path].shape))] = columns.arrays[path]
        return Columns(columns.at, {**columns.arrays, **wide}, columns.rows)

    def uncache(self, columns: Columns[Array]) -> None:
        if columns.at == DISK:
            self._disk.uncache(columns.arrays.values())

    def exported(self, arrays: Mapping[str, Any]) -> None:
        """Another framework may use the memory of these arrays, parts of a batch, when nobody refers to them any more."""
        if self._recycler is not None:
            self._recycler.forget(arrays)

    def copy(self, columns: Columns[Array], to: Endpoint) -> Columns[Array]:
        """The same rows in memory of their own at the host tier `to`."""
        copies = self.storage({path: (array.shape, array.dtype) for path, array in columns.arrays.items()}, to)
        with self.in_order(columns):
            return self.write(Columns(to, copies, columns.rows), 0, columns)

    def in_order(self, columns: Columns[Array]) -> AbstractContextManager[None]:
        """Within it the columns are read from the first row to the last."""
        return self._disk.in_order(columns.arrays.values()) if columns.at == DISK else nullcontext()

    def adopt(self, rows: Mapping[str, Any], at: Endpoint) -> Columns[Array]:
        arrays = {path: to_numpy(leaf) for path, leaf in rows.items()}
        count = check_adopted({path: array.shape for path, array in arrays.items()})
        return self.copy(Columns(PAGEABLE, arrays, count), at)

    def storage(self, layout: Layout, at: Endpoint) -> dict[str, Array]:
        """Arrays that will be written in full and kept for long."""
        return carve(layout, self._source(at, uninitialised))

    def _source(self, at: Endpoint, pageable: Bytes) -> Bytes:
        """Where storage at `at` gets its bytes."""
        if at == DISK:
            return self._disk.bytes
        return self._pinned_at(at).columns if at == PINNED else pageable

    def _pinned_at(self, at: Endpoint) -> PinnedMemory:
        assert self._pinned is not None, f"{at} is not one of this backend's endpoints"
        return self._pinned
