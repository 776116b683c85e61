"""The contract in its plainest form: NumPy, with pretend devices that are only separate arrays.

Slow on purpose: every method copies, and none shares code with the other backends' fast paths, so that they can be
checked against it.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.backends import exchange
from conduit.backends.carving import zeroed
from conduit.backends.checks import (
    check_adopted,
    check_endpoint,
    check_index,
    check_merge,
    check_scatter,
    check_span,
    no_room,
    wider_shapes,
)
from conduit.backends.disk import Disk
from conduit.core.backend import Columns, Move, RowIndex, Target
from conduit.core.experience import Schema
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier
from conduit.topology.host_memory import free_host_bytes

Array = NDArray[Any]


class ReferenceBackend:
    """Holds rows as NumPy arrays, wherever they pretend to be. Each pretend device has `device_bytes` of memory."""

    name = "reference"
    framework = "numpy"
    immediate = True

    def __init__(
        self, devices: int = 4, device_bytes: int = 1 << 30, disk: str | os.PathLike[str] | None = None
    ) -> None:
        """`disk`: the folder of rows on disk."""
        self._device_bytes = device_bytes
        self._disk = Disk(disk)
        self._endpoints = (PAGEABLE, PINNED, DISK, *(Endpoint(Tier.DEVICE, index) for index in range(devices)))
        self._held: list[tuple[Endpoint, weakref.ref[Array]]] = []
        self._lock = threading.Lock()

    def endpoints(self) -> Sequence[Endpoint]:
        return self._endpoints

    def free_bytes(self, at: Endpoint) -> int:
        """What the host or the disk has free; for a pretend device, its size less the columns on it that are still referred to."""
        check_endpoint(at, self._endpoints, self.name)
        if at.is_host:
            return self._disk.free_bytes() if at == DISK else free_host_bytes()
        with self._lock:
            return self._device_bytes - sum(
                array.nbytes for where, held in self._held if where == at and (array := held()) is not None
            )

    def hardware(self, at: Endpoint) -> str:
        return "host" if at.is_host else ""

    def padded(self, rows: int, at: Endpoint) -> int:
        return rows

    def allocate(self, schema: Schema, rows: int, at: Endpoint) -> Columns[Array]:
        check_endpoint(at, self._endpoints, self.name)
        if schema.row_bytes * rows > (free := self.free_bytes(at)):
            raise no_room(schema, rows, f"{at} ({self._disk.folder})" if at == DISK else at, free)
        return self._keep(
            at,
            {path: self._zeros((rows, *field.shape), field.dtype, at) for path, field in schema.fields.items()},
            rows,
        )

    def release(self, columns: Columns[Array]) -> None:
        mine = {id(array) for array in columns.arrays.values()}
        with self._lock:
            self._held = [
                (at, held) for at, held in self._held if (array := held()) is not None and id(array) not in mine
            ]

    def write(self, into: Columns[Array], start: int, rows: Columns[Array]) -> Columns[Array]:
        check_span(into, start, rows.rows)
        for path, column in into.arrays.items():
            column[start : start + rows.rows] = rows.arrays[path]
        return into

    def scatter(
        self, into: Columns[Array], index: RowIndex, rows: Columns[Array], fields: Sequence[str]
    ) -> Columns[Array]:
        check_scatter(into, index, rows)
        for path in fields:
            for position, row in enumerate(index):
                into.arrays[path][row] = rows.arrays[path][position]
        return into

    def read(self, columns: Columns[Array], index: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[Array]:
        check_index(index, columns.rows)
        check_endpoint(to, self._endpoints, self.name)
        # A batch at the disk lies in memory, for it is soon given back.
        return Columns(to, {path: self._copy(columns.arrays[path][index], PAGEABLE) for path in fields}, len(index))

    def merge(
        self, parts: Sequence[Columns[Array]], places: Sequence[RowIndex], rows: int, to: Endpoint
    ) -> Columns[Array]:
        check_merge(parts, places, rows, to)
        merged = {}
        for path, first in parts[0].arrays.items():
            merged[path] = self._zeros((rows, *first.shape[1:]), first.dtype, PAGEABLE)
            for part, place in zip(parts, places, strict=True):
                for position, row in enumerate(place):
                    merged[path][row] = part.arrays[path][position]
        return Columns(to, merged, rows)

    def widen(self, columns: Columns[Array], schema: Schema) -> Columns[Array]:
        wider = wider_shapes({path: array.shape for path, array in columns.arrays.items()}, schema)
        arrays = dict(columns.arrays)
        for path, shape in wider.items():
            arrays[path] = self._zeros(shape, columns.arrays[path].dtype, PAGEABLE)
            arrays[path][tuple(map(slice, columns.arrays[path].shape))] = columns.arrays[path]
        return Columns(columns.at, arrays, columns.rows)

    def transfer(self, moves: Sequence[Move[Array]]) -> list[Columns[Array]]:
        for move in moves:
            check_endpoint(move.to, self._endpoints, self.name)
        return [
            self._keep(
                move.to,
                {path: self._copy(array, move.to) for path, array in move.columns.arrays.items()},
                move.columns.rows,
            )
            for move in moves
        ]

    def adopt(self, rows: Mapping[str, Any], at: Endpoint) -> Columns[Array]:
        check_endpoint(at, self._endpoints, self.name)
        arrays = {path: np.array(exchange.to_numpy(leaf), order="C") for path, leaf in rows.items()}
        return Columns(at, arrays, check_adopted({path: array.shape for path, array in arrays.items()}))

    def landing(self, target: Target) -> Endpoint:
        exchange.place(target)
        return PAGEABLE

    def hand_over(self, columns: Columns[Array], to: Target) -> Mapping[str, Any]:
        return exchange.accept(columns.arrays, to)

    def uncache(self, columns: Columns[Array]) -> None:
        if columns.at == DISK:
            self._disk.uncache(columns.arrays.values())

    def order(self, columns: Columns[Array]) -> None:
        """Nothing to do: NumPy has finished when it returns."""

    def wait(self, columns: Columns[Array]) -> None:
        """Nothing to do: NumPy has finished when it returns."""

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], at: Endpoint) -> Array:
        """Zeros that start at a multiple of 64 bytes: JAX takes nothing else without copying it."""
        size = math.prod(shape) * dtype.itemsize
        memory = (self._disk.bytes if at == DISK else zeroed)(size + 64)
        offset = -memory.ctypes.data % 64
        return memory[offset : offset + size].view(dtype).reshape(shape)

    def _copy(self, array: Array, at: Endpoint) -> Array:
        copy = self._zeros(array.shape, array.dtype, at)
        copy[...] = array
        return copy

    def _keep(self, at: Endpoint, arrays: dict[str, Array], rows: int) -> Columns[Array]:
        """The arrays as columns that count towards the endpoint's memory until they are released or forgotten."""
        with self._lock:
            self._held += [(at, weakref.ref(array)) for array in arrays.values()]
        return Columns(at, arrays, rows)
