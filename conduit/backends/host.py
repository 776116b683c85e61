"""The pageable and pinned host tiers: NumPy columns, the same for every backend.

NumPy allocates them, because its large arrays get huge pages and torch's don't, and every array starts at a multiple
of 64 bytes, because JAX aliases only such memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.backends.checks import (
    check_adopted,
    check_index,
    check_scatter,
    check_span,
    no_room,
)
from conduit.backends.exchange import to_numpy
from conduit.backends.memory import free_host_bytes
from conduit.core.backend import Columns, RowIndex
from conduit.core.experience import Schema
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint

Array = NDArray[Any]
Bytes = Callable[[int], NDArray[np.uint8]]
"""Makes that many bytes; the array it returns keeps them alive."""
Layout = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of each array."""

ALIGNMENT = 64
_NARROW = 1 << 16
"""Arrays below this many bytes share one allocation; wider ones have their own, so that keeping a batch's rewards does
not keep its images."""


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """Where a framework gets page-locked bytes."""

    columns: Bytes
    """Zeroed, exactly as many as asked for, kept for long: storage."""
    batch: Bytes
    """Uninitialised, from a pool, soon given back."""


class HostTiers:
    """Rows in host memory, as NumPy arrays. A method has done all when it returns: nothing to order or to wait for."""

    def __init__(self, pinned: PinnedMemory | None = None) -> None:
        self._pinned = pinned
        self.endpoints: tuple[Endpoint, ...] = (PAGEABLE,) if pinned is None else (PAGEABLE, PINNED)

    def free_bytes(self) -> int:
        return free_host_bytes()

    def allocate(self, schema: Schema, rows: int, at: Endpoint) -> Columns[Array]:
        """Zeroed columns. Pageable ones are zero pages that the kernel brings in on first touch."""
        layout = {path: ((rows, *field.shape), field.dtype) for path, field in schema.fields.items()}
        try:
            return Columns(at, carve(layout, self._pinned_at(at).columns if at == PINNED else zeroed), rows)
        except MemoryError as error:
            raise no_room(schema, rows, at, self.free_bytes()) from error

    def write(self, into: Columns[Array], start: int, rows: Columns[Array]) -> Columns[Array]:
        check_span(into, start, rows.rows)
        stop, source = start + rows.rows, rows.arrays
        for path, column in into.arrays.items():
            column[start:stop] = source[path]
        return into

    def scatter(
        self, into: Columns[Array], index: RowIndex, rows: Columns[Array], fields: Sequence[str]
    ) -> Columns[Array]:
        check_scatter(into, index, rows)
        for path in fields:
            into.arrays[path][index] = rows.arrays[path]
        return into

    def read(self, columns: Columns[Array], index: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[Array]:
        """Rows `index`, gathered into fresh aligned memory at the host tier `to`."""
        check_index(index, columns.rows)
        rows = len(index)
        sources = {path: columns.arrays[path] for path in fields}
        batch = self.empty({path: ((rows, *source.shape[1:]), source.dtype) for path, source in sources.items()}, to)
        for path, source in sources.items():
            # The index was checked above; `clip` is the mode that gathers without a buffer.
            source.take(index, axis=0, out=batch[path], mode="clip")
        return Columns(to, batch, rows)

    def copy(self, columns: Columns[Array], to: Endpoint) -> Columns[Array]:
        """The same rows in memory of their own at the host tier `to`."""
        copies = self.storage({path: (array.shape, array.dtype) for path, array in columns.arrays.items()}, to)
        for path, array in columns.arrays.items():
            copies[path][...] = array
        return Columns(to, copies, columns.rows)

    def adopt(self, rows: Mapping[str, Any], at: Endpoint) -> Columns[Array]:
        arrays = {path: to_numpy(leaf) for path, leaf in rows.items()}
        count = check_adopted({path: array.shape for path, array in arrays.items()})
        return self.copy(Columns(PAGEABLE, arrays, count), at)

    def empty(self, layout: Layout, at: Endpoint) -> dict[str, Array]:
        """Uninitialised arrays for a batch at the host tier `at`."""
        return carve(layout, self._pinned_at(at).batch if at == PINNED else uninitialised)

    def storage(self, layout: Layout, at: Endpoint) -> dict[str, Array]:
        """Arrays that will be written in full and kept for long."""
        return carve(layout, self._pinned_at(at).columns if at == PINNED else uninitialised)

    def _pinned_at(self, at: Endpoint) -> PinnedMemory:
        assert self._pinned is not None, f"{at} is not one of this backend's endpoints"
        return self._pinned


def carve(layout: Layout, source: Bytes) -> dict[str, Array]:
    """One array for each entry of `layout`, each starting at a multiple of 64 bytes, in memory from `source`."""
    narrow, places = _plan(tuple(layout.items()))
    shared = source(narrow + ALIGNMENT)
    start = _first_aligned(shared)
    arrays = {}
    for path, shape, dtype, size, offset in places:
        if offset is None:
            own = source(size + ALIGNMENT)
            arrays[path] = np.ndarray(shape, dtype, own, _first_aligned(own))
        else:
            arrays[path] = np.ndarray(shape, dtype, shared, start + offset)
    return arrays


_Place = tuple[str, tuple[int, ...], np.dtype[Any], int, int | None]


@functools.lru_cache(maxsize=256)
def _plan(layout: tuple[tuple[str, tuple[tuple[int, ...], np.dtype[Any]]], ...]) -> tuple[int, tuple[_Place, ...]]:
    """The bytes that the narrow arrays share, and for each array its bytes and its offset there (None: memory of its own).
    Batches have few layouts, and this is made for every one."""
    offset, places = 0, []
    for path, (shape, dtype) in layout:
        size = math.prod(shape) * dtype.itemsize
        if size < _NARROW:
            places.append((path, shape, dtype, size, offset))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        else:
            places.append((path, shape, dtype, size, None))
    return offset, tuple(places)


def _first_aligned(memory: NDArray[np.uint8]) -> int:
    return -memory.__array_interface__["data"][0] % ALIGNMENT


def zeroed(size: int) -> NDArray[np.uint8]:
    return np.zeros(size, np.uint8)


def uninitialised(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)
