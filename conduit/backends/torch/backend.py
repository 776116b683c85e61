"""Rows in torch tensors, on the CUDA devices or on the one CPU device; host tiers are NumPy's."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

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
from conduit.backends.torch.device import Device
from conduit.backends.torch.dtypes import NUMPY_DTYPES, TORCH_DTYPES, from_host
from conduit.backends.torch.exchange import CPU, plain
from conduit.backends.torch.pinned import pinned_memory
from conduit.backends.torch.queue import CpuQueue, CudaQueue
from conduit.core.backend import Columns, Move, RowIndex, Target
from conduit.core.experience import Schema
from conduit.errors import SchemaError
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

_CHUNK_BYTES = 64 << 20
_CHUNKS_IN_FLIGHT = 4


class TorchBackend:
    """Arrays are NumPy's at host tiers and torch's on devices. On CUDA every result is ordered by its `note`, an event."""

    name = "torch"
    framework = "torch"
    immediate = True

    def __init__(self, disk: str | os.PathLike[str] | None = None) -> None:
        """`disk`: the folder of rows on disk."""
        cuda = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        self._devices = [Device(CudaQueue(device)) for device in cuda] or [Device(CpuQueue(CPU))]
        self._host = HostTiers(Disk(disk), pinned_memory())
        self._endpoints = (
            *self._host.endpoints,
            *(Endpoint(Tier.DEVICE, index) for index in range(len(self._devices))),
        )

    def endpoints(self) -> Sequence[Endpoint]:
        """Pageable host, pinned host where there is CUDA, the disk, and each CUDA device or else the CPU as the one device."""
        return self._endpoints

    def free_bytes(self, at: Endpoint) -> int:
        check_endpoint(at, self._endpoints, self.name)
        if at.is_host:
            return self._host.free_bytes(at)
        if (device := self._at(at).queue.device) == CPU:
            return self._host.free_bytes(PAGEABLE)
        # What torch's allocator holds but lends to nobody is free to us as well.
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )

    def hardware(self, at: Endpoint) -> str:
        if at.is_host or self._at(at).queue.device == CPU:
            return "host"
        return str(torch.cuda.get_device_properties(self._at(at).queue.device).uuid)

    def padded(self, rows: int, at: Endpoint) -> int:
        return rows

    def allocate(self, schema: Schema, rows: int, at: Endpoint) -> Columns[Any]:
        check_endpoint(at, self._endpoints, self.name)
        if at.is_host:
            return self._host.allocate(schema, rows, at)
        layout = {path: ((rows, *field.shape), field.dtype) for path, field in schema.fields.items()}
        _check_dtypes(layout, at)
        device = self._at(at)
        try:
            return Columns(at, device.zeros(layout), rows, device.queue.mark())
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise no_room(schema, rows, at, self.free_bytes(at)) from error

    def release(self, columns: Columns[Any]) -> None:
        """CUDA memory goes back to torch's allocator now; the host's when the last reference is dropped."""
        if columns.at.is_host:
            self._host.release()
        for array in columns.arrays.values():
            if isinstance(array, torch.Tensor) and array.is_cuda:
                array.untyped_storage().resize_(0)

    def write(self, into: Columns[Any], start: int, rows: Columns[Any]) -> Columns[Any]:
        check_span(into, start, rows.rows)
        self._settle(rows)
        if into.at.is_host:
            return self._host.write(into, start, rows)
        device = self._joined(into, rows)
        device.put(into.arrays, start, rows.arrays)
        return _marked(into, device)

    def scatter(self, into: Columns[Any], index: RowIndex, rows: Columns[Any], fields: Sequence[str]) -> Columns[Any]:
        check_scatter(into, index, rows)
        self._settle(rows)
        if into.at.is_host:
            return self._host.scatter(into, index, rows, fields)
        device = self._joined(into, rows)
        device.scatter(into.arrays, index, rows.arrays, fields)
        return _marked(into, device)

    def read(self, columns: Columns[Any], index: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[Any]:
        """Gathered where the rows are. From the host to CUDA by way of pinned memory, and back likewise."""
        check_index(index, columns.rows)
        check_endpoint(to, self._endpoints, self.name)
        if columns.at.is_host:
            self._settle(columns)
            if to.is_host:
                return self._host.read(columns, index, fields, to)
            _check_dtypes({path: ((), columns.arrays[path].dtype) for path in fields}, to)
            device = self._at(to)
            batch = self._host.read(columns, index, fields, self._host.staging).arrays
            return Columns(
                to, {path: device.queue.upload(rows) for path, rows in batch.items()}, len(index), device.queue.mark()
            )
        device = self._joined(columns)
        batch = device.gather(columns.arrays, index, fields)
        if to.is_host:
            landed = {path: device.queue.download(rows) for path, rows in batch.items()}
            return Columns(to, landed, len(index), device.queue.mark())
        if to != columns.at:
            # torch copies between devices in the current streams of both, each waiting for the other.
            source, device = device, self._at(to)
            with source.queue.use(), device.queue.use():
                batch = {path: rows.to(device.queue.device, non_blocking=True) for path, rows in batch.items()}
        return Columns(to, batch, len(index), device.queue.mark())

    def merge(self, parts: Sequence[Columns[Any]], places: Sequence[RowIndex], rows: int, to: Endpoint) -> Columns[Any]:
        check_merge(parts, places, rows, to)
        for part in parts:
            self._settle(part)
        if to.is_host:
            return self._host.merge(parts, places, rows, to)
        device = self._at(to)
        shapes = {path: ((rows, *array.shape[1:]), _dtype(array)) for path, array in parts[0].arrays.items()}
        merged = device.empty(shapes)
        for part, place in zip(parts, places, strict=True):
            device.queue.join(part.note, part.arrays.values())
            device.scatter(merged, place, part.arrays, list(merged))
        return Columns(to, merged, rows, device.queue.mark())

    def widen(self, columns: Columns[Any], schema: Schema) -> Columns[Any]:
        self._settle(columns)
        wider = wider_shapes({path: tuple(array.shape) for path, array in columns.arrays.items()}, schema)
        if columns.at.is_host:
            return self._host.widen(columns, wider)
        device = self._joined(columns)
        wide = device.widened({path: columns.arrays[path] for path in wider}, wider)
        return Columns(columns.at, {**columns.arrays, **wide}, columns.rows, device.queue.mark())

    def transfer(self, moves: Sequence[Move[Any]]) -> list[Columns[Any]]:
        """Each move has streams of its own; the devices' queues wait for them when all are issued. A move from CUDA into
        pageable memory keeps the host: CUDA copies there through pinned memory of its own."""
        for move in moves:
            check_endpoint(move.to, self._endpoints, self.name)
            self._settle(move.columns)
        copies = [self._copy(move.columns, move.to) for move in moves]
        for move, copy in zip(moves, copies, strict=True):
            if not move.columns.at.is_host:
                self._at(move.columns.at).queue.join(copy.note, ())
            if not copy.at.is_host:
                self._at(copy.at).queue.join(copy.note, copy.arrays.values())
        return copies

    def adopt(self, rows: Mapping[str, Any], at: Endpoint) -> Columns[Any]:
        """A copy in order after the caller's current stream, which in turn goes on after it."""
        check_endpoint(at, self._endpoints, self.name)
        if at.is_host:
            return self._host.adopt(rows, at)
        arrays = {
            path: plain(leaf) if isinstance(leaf, torch.Tensor) else exchange.to_numpy(leaf)
            for path, leaf in rows.items()
        }
        count = check_adopted({path: tuple(array.shape) for path, array in arrays.items()})
        layout = {path: (tuple(array.shape), _dtype(array)) for path, array in arrays.items()}
        _check_dtypes(layout, at)
        device = self._at(at)
        device.queue.follow_caller()
        mine = device.empty(layout)
        device.put(mine, 0, arrays)
        copy = Columns(at, mine, count, device.queue.mark())
        self.order(copy)
        return copy

    def landing(self, target: Target) -> Endpoint:
        kind, index = exchange.place(target)
        return (
            Endpoint(Tier.DEVICE, index) if kind == exchange.CUDA and index < len(self._devices) else self._endpoints[0]
        )

    def hand_over(self, columns: Columns[Any], to: Target) -> Mapping[str, Any]:
        """Device batches are in order for the calling thread's current stream; `order` makes them so for another's."""
        self._settle(columns)
        self.order(columns)
        if to.framework not in ("numpy", "torch"):
            self._host.exported(columns.arrays)
        return exchange.accept(columns.arrays, to)

    def uncache(self, columns: Columns[Any]) -> None:
        if columns.at.is_host:
            self._host.uncache(columns)

    def order(self, columns: Columns[Any]) -> None:
        if columns.note is None:
            return
        for array in columns.arrays.values():
            if isinstance(array, torch.Tensor):
                # Its memory is the queue's; the allocator must not lend it again before our stream is done with it.
                array.record_stream(torch.cuda.current_stream(array.device))
                torch.cuda.current_stream(array.device).wait_event(columns.note)

    def wait(self, columns: Columns[Any]) -> None:
        if columns.note is not None:
            columns.note.synchronize()

    def _at(self, at: Endpoint) -> Device:
        return self._devices[at.index]

    def _settle(self, columns: Columns[Any]) -> None:
        """NumPy knows no streams: rows still on their way to the host are waited for before it touches them."""
        if columns.note is not None and columns.at.is_host:
            columns.note.synchronize()

    def _joined(self, columns: Columns[Any], rows: Columns[Any] | None = None) -> Device:
        """The columns' device, its queue following whatever made the columns and `rows`."""
        device = self._at(columns.at)
        for made in (columns, rows):
            if made is not None and not made.at.is_host and made.note is not None:
                device.queue.join(made.note, made.arrays.values())
        return device

    def _copy(self, columns: Columns[Any], to: Endpoint) -> Columns[Any]:
        """Issues one move on queues of its own."""
        if columns.at.is_host and to.is_host:
            return self._host.copy(columns, to)
        layout = {path: (tuple(array.shape), _dtype(array)) for path, array in columns.arrays.items()}
        if columns.at.is_host:
            _check_dtypes(layout, to)
            branch = Device(self._at(to).queue.branch())
            mine = branch.empty(layout)
            with self._host.in_order(columns):
                _put_in_chunks(branch, mine, columns)
            return Columns(to, mine, columns.rows, branch.queue.mark())
        source = self._joined(columns).queue.branch()
        if to.is_host:
            landed = self._host.storage(layout, to)
            with source.use():
                for path, array in columns.arrays.items():
                    from_host(landed[path]).copy_(array, non_blocking=True)
            return Columns(to, landed, columns.rows, source.mark())
        branch = Device(self._at(to).queue.branch())
        mine = branch.empty(layout)
        with source.use():
            branch.put(mine, 0, columns.arrays)
        return Columns(to, mine, columns.rows, branch.queue.mark())


def _put_in_chunks(device: Device, into: Mapping[str, torch.Tensor], rows: Columns[Any]) -> None:
    """Host rows copied to a device a chunk at a time, so that only a few pinned chunks are ever under way."""
    row_bytes = sum(array.nbytes for array in rows.arrays.values()) // max(rows.rows, 1)
    step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
    under_way: deque[Any] = deque()
    for start in range(0, rows.rows, step):
        device.put(into, start, {path: array[start : start + step] for path, array in rows.arrays.items()})
        under_way.append(device.queue.mark())
        if len(under_way) > _CHUNKS_IN_FLIGHT and (oldest := under_way.popleft()) is not None:
            oldest.synchronize()


def _marked(columns: Columns[Any], device: Device) -> Columns[Any]:
    mark = device.queue.mark()
    return columns if mark is None else replace(columns, note=mark)


def _dtype(array: Any) -> np.dtype[Any]:
    return NUMPY_DTYPES[array.dtype] if isinstance(array, torch.Tensor) else array.dtype


def _check_dtypes(layout: Layout, at: Endpoint) -> None:
    """SchemaError unless torch holds every dtype exactly."""
    for path, (_, dtype) in layout.items():
        if dtype not in TORCH_DTYPES:
            raise SchemaError(
                f"{path!r} is {dtype}, which torch can't hold at {at}: cast it, or place the rows on the host"
            )
