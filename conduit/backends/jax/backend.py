"""Rows in jax.Arrays on JAX's devices; the pageable host tier and the disk are NumPy's.

Storage is made by JAX, on its device, and no view of it ever leaves: while one is alive, or when the memory was
imported, donation copies the whole buffer without a word. There is no pinned tier: XLA stages host rows through
page-locked memory of its own, and its `pinned_host` arrays can't be written from NumPy in place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conduit.backends import exchange
from conduit.backends.carving import Layout
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
from conduit.backends.host import HostTiers
from conduit.backends.jax import kernels
from conduit.backends.jax.dtypes import refusal, stored_dtype
from conduit.backends.jax.exchange import put
from conduit.core.backend import Columns, Move, RowIndex, Target
from conduit.core.experience import Schema
from conduit.errors import CapacityError, SchemaError
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

_PIECE_BYTES = 64 << 20
_MOST_ROWS = (1 << 31) - 1
"""Row numbers are int32 in JAX unless x64 is on."""


class JaxBackend:
    """Arrays are NumPy's on the host and jax.Arrays, which order themselves, on devices. `write` and `scatter` donate."""

    name = "jax"
    framework = "jax"
    immediate = True

    def __init__(self, disk: str | os.PathLike[str] | None = None) -> None:
        """`disk`: the folder of rows on disk."""
        self._devices = jax.local_devices()
        self._host = HostTiers(Disk(disk), recycle=False)
        self._endpoints = (
            *self._host.endpoints,
            *(Endpoint(Tier.DEVICE, index) for index in range(len(self._devices))),
        )

    def endpoints(self) -> Sequence[Endpoint]:
        """Pageable host, the disk and each local JAX device; no pinned host (see the module)."""
        return self._endpoints

    def free_bytes(self, at: Endpoint) -> int:
        check_endpoint(at, self._endpoints, self.name)
        if at.is_host:
            return self._host.free_bytes(at)
        statistics = self._at(at).memory_stats()
        if statistics is None:
            # CPU devices report nothing: they share the host's memory.
            return self._host.free_bytes(PAGEABLE)
        return statistics["bytes_limit"] - statistics["bytes_in_use"]

    def hardware(self, at: Endpoint) -> str:
        return "host" if at.is_host or self._at(at).platform == "cpu" else ""

    def padded(self, rows: int, at: Endpoint) -> int:
        """The next power of two on devices."""
        return rows if at.is_host or rows == 0 else 1 << (rows - 1).bit_length()

    def allocate(self, schema: Schema, rows: int, at: Endpoint) -> Columns[Any]:
        check_endpoint(at, self._endpoints, self.name)
        if at.is_host:
            return self._host.allocate(schema, rows, at)
        layout = {path: ((rows, *field.shape), field.dtype) for path, field in schema.fields.items()}
        try:
            return self._storage(layout, rows, at)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise no_room(schema, rows, at, self.free_bytes(at)) from error

    def release(self, columns: Columns[Any]) -> None:
        """Device memory is free now; the host's when the last reference is dropped."""
        if not columns.at.is_host:
            for array in columns.arrays.values():
                array.delete()

    def write(self, into: Columns[Any], start: int, rows: Columns[Any]) -> Columns[Any]:
        """Host rows go in by pieces of 2ⁿ rows, each donated on; device rows by one call."""
        check_span(into, start, rows.rows)
        if into.at.is_host:
            return self._host.write(into, start, rows)
        columns, sources = tuple(into.arrays.values()), _sources(into, rows, list(into.arrays))
        if not rows.at.is_host:
            columns = kernels.put(columns, sources, np.int32(start)) if rows.rows else columns
        else:
            for offset, size in kernels.pieces(rows.rows, _largest_piece(rows)):
                piece = tuple(source[offset : offset + size] for source in sources)
                columns = kernels.put(columns, piece, np.int32(start + offset))
        return replace(into, arrays=dict(zip(into.arrays, columns, strict=True)))

    def scatter(self, into: Columns[Any], index: RowIndex, rows: Columns[Any], fields: Sequence[str]) -> Columns[Any]:
        check_scatter(into, index, rows)
        if into.at.is_host:
            return self._host.scatter(into, index, rows, fields)
        if not len(index):
            return into
        columns = tuple(into.arrays[path] for path in fields)
        written = kernels.scatter(columns, index.astype(np.int32), _sources(into, rows, fields))
        return replace(into, arrays={**into.arrays, **dict(zip(fields, written, strict=True))})

    def read(self, columns: Columns[Any], index: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[Any]:
        """Gathered where the rows are. A read from a device to the host waits for them: NumPy can't promise rows."""
        check_index(index, columns.rows)
        check_endpoint(to, self._endpoints, self.name)
        if columns.at.is_host:
            # JAX lets go of memory that dropped batches aliased when it is called next: this makes it, and room for the batch.
            self._devices[0].memory_stats()
            batch = self._host.read(columns, index, fields, to if to.is_host else PAGEABLE)
            if to.is_host:
                return batch
            _check_dtypes({path: ((), array.dtype) for path, array in batch.arrays.items()}, to)
            return Columns(to, put(batch.arrays, self._at(to)), len(index))
        dtypes = _dtypes(columns)
        taken = kernels.take(
            tuple(columns.arrays[path] for path in fields),
            index.astype(np.int32),
            tuple(dtypes[path] for path in fields),
        )
        batch = dict(zip(fields, taken, strict=True))
        if to.is_host:
            # Copied, for JAX's arrays are read-only to NumPy, and the caller owns what it gets.
            return replace(self._host.copy(Columns(PAGEABLE, jax.device_get(batch), len(index)), PAGEABLE), at=to)
        return Columns(to, batch if to == columns.at else jax.device_put(batch, self._at(to)), len(index))

    def merge(self, parts: Sequence[Columns[Any]], places: Sequence[RowIndex], rows: int, to: Endpoint) -> Columns[Any]:
        """On a device one part after the other, each donated on: it compiles once for each length of a part, not of each combination."""
        check_merge(parts, places, rows, to)
        if to.is_host:
            return self._host.merge(parts, places, rows, to)
        dtypes = {path: array.dtype for path, array in parts[0].arrays.items()}
        layout = tuple(
            ((rows, *array.shape[1:]), stored_dtype(dtypes[path])) for path, array in parts[0].arrays.items()
        )
        merged = kernels.blank(layout, self._at(to))
        for part, place in zip(parts, places, strict=True):
            if len(place):
                merged = kernels.scatter(merged, place.astype(np.int32), tuple(part.arrays[path] for path in dtypes))
        return Columns(to, dict(zip(dtypes, kernels.seen(merged, tuple(dtypes.values())), strict=True)), rows)

    def widen(self, columns: Columns[Any], schema: Schema) -> Columns[Any]:
        wider = wider_shapes({path: array.shape for path, array in columns.arrays.items()}, schema)
        if columns.at.is_host:
            return self._host.widen(columns, wider)
        dtypes = tuple(stored_dtype(columns.arrays[path].dtype) for path in wider)
        wide = kernels.widen(tuple(columns.arrays[path] for path in wider), tuple(wider.values()), dtypes)
        return replace(columns, arrays={**columns.arrays, **dict(zip(wider, wide, strict=True))})

    def transfer(self, moves: Sequence[Move[Any]]) -> list[Columns[Any]]:
        """Moves to devices are issued first, because a move from a device to the host waits for its rows."""
        for move in moves:
            check_endpoint(move.to, self._endpoints, self.name)
        copies: dict[int, Columns[Any]] = {}
        for number in sorted(range(len(moves)), key=lambda number: moves[number].to.is_host):
            copies[number] = self._copy(moves[number].columns, moves[number].to)
        return [copies[number] for number in range(len(moves))]

    def adopt(self, rows: Mapping[str, Any], at: Endpoint) -> Columns[Any]:
        """JAX arrays are copied from device to device; others by way of the host."""
        check_endpoint(at, self._endpoints, self.name)
        if at.is_host:
            return self._host.adopt(rows, at)
        arrays = {path: leaf if isinstance(leaf, jax.Array) else exchange.to_numpy(leaf) for path, leaf in rows.items()}
        count = check_adopted({path: array.shape for path, array in arrays.items()})
        _check_dtypes({path: (array.shape, array.dtype) for path, array in arrays.items()}, at)
        # put aliases aligned NumPy memory, and arrays that are on the device already; the copy is our own.
        copies = {path: jnp.array(array, copy=True) for path, array in put(arrays, self._at(at)).items()}
        # JAX reads NumPy memory after the call returns, and the caller may change what it lent us.
        jax.block_until_ready([copies[path] for path, array in arrays.items() if isinstance(array, np.ndarray)])
        return Columns(at, copies, count)

    def landing(self, target: Target) -> Endpoint:
        """The target's own endpoint when it is an accelerator of ours; the host otherwise, which CPU devices alias."""
        wanted = exchange.place(target)
        for index, device in enumerate(self._devices):
            if device.platform == "gpu" and wanted == (exchange.CUDA, device.local_hardware_id or 0):
                return Endpoint(Tier.DEVICE, index)
        return PAGEABLE

    def hand_over(self, columns: Columns[Any], to: Target) -> Mapping[str, Any]:
        if columns.note is not None:
            columns = self.read(columns, np.arange(columns.rows), list(columns.arrays), columns.at)
        return exchange.accept(columns.arrays, to)

    def uncache(self, columns: Columns[Any]) -> None:
        if columns.at.is_host:
            self._host.uncache(columns)

    def order(self, columns: Columns[Any]) -> None:
        """Nothing to do: XLA runs what uses an array after what makes it."""

    def wait(self, columns: Columns[Any]) -> None:
        if not columns.at.is_host:
            jax.block_until_ready(list(columns.arrays.values()))

    def _at(self, at: Endpoint) -> Any:
        return self._devices[at.index]

    def _storage(self, layout: Layout, rows: int, at: Endpoint) -> Columns[Any]:
        """Zeroed columns that JAX made itself, so that donated writes happen in place. Their note has the fields' dtypes,
        which some are not stored under (`stored_dtype`)."""
        _check_dtypes(layout, at)
        if rows > _MOST_ROWS:
            raise CapacityError(f"{rows:,} rows at {at}: JAX's int32 numbers {_MOST_ROWS:,}. Use several devices")
        device = self._at(at)
        arrays = {path: jnp.zeros(shape, stored_dtype(dtype), device=device) for path, (shape, dtype) in layout.items()}
        # Waits, so that memory that isn't there is missed here and not at the first write.
        return Columns(at, jax.block_until_ready(arrays), rows, {path: dtype for path, (_, dtype) in layout.items()})

    def _copy(self, columns: Columns[Any], to: Endpoint) -> Columns[Any]:
        if columns.at.is_host and to.is_host:
            return self._host.copy(columns, to)
        dtypes = _dtypes(columns)
        layout: Layout = {path: (array.shape, dtypes[path]) for path, array in columns.arrays.items()}
        if columns.at.is_host:
            with self._host.in_order(columns):
                return self.write(self._storage(layout, columns.rows, to), 0, columns)
        copy = (
            Columns(to, self._host.storage(layout, to), columns.rows)
            if to.is_host
            else self._storage(layout, columns.rows, to)
        )
        # By pieces, so that a move needs little room beside the copy. Never by a view of the storage: see the module.
        for start, size in kernels.pieces(columns.rows, _largest_piece(columns)):
            cut: Any = kernels.cut(tuple(columns.arrays.values()), np.int32(start), size)
            if to.is_host:
                cut = [array.view(dtype) for array, dtype in zip(jax.device_get(cut), dtypes.values(), strict=True)]
            else:
                cut = jax.device_put(cut, self._at(to))
            copy = self.write(copy, start, Columns(to, dict(zip(columns.arrays, cut, strict=True)), size))
        return copy


def _dtypes(columns: Columns[Any]) -> Mapping[str, np.dtype[Any]]:
    """The fields' dtypes, in the order of the columns' arrays."""
    return {path: array.dtype for path, array in columns.arrays.items()} | (columns.note or {})


def _sources(into: Columns[Any], rows: Columns[Any], fields: Sequence[str]) -> tuple[Any, ...]:
    """The rows' arrays; NumPy's seen under the dtype that `into` stores, JAX's are by the kernels."""
    arrays = [rows.arrays[path] for path in fields]
    if rows.at.is_host:
        arrays = [array.view(into.arrays[path].dtype) for path, array in zip(fields, arrays, strict=True)]
    return tuple(arrays)


def _largest_piece(columns: Columns[Any]) -> int:
    """The largest power of two of rows that stays below _PIECE_BYTES (or one row)."""
    row_bytes = sum(array.nbytes for array in columns.arrays.values()) // max(columns.rows, 1)
    return 1 << max(_PIECE_BYTES // max(row_bytes, 1), 1).bit_length() - 1


def _check_dtypes(layout: Layout, at: Endpoint) -> None:
    """SchemaError unless JAX holds every dtype exactly."""
    for path, (_, dtype) in layout.items():
        reason = refusal(np.dtype(dtype))
        if reason is not None:
            raise SchemaError(f"{path!r} is {reason}, or place the rows on the host (asked for: {at})")
