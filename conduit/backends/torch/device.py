"""Rows on one torch device: plain torch calls, issued on the device's queue. A CPU runs the same code as CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from conduit.backends.carving import Array, Bytes, Layout, carve, uninitialised, zeroed
from conduit.backends.torch.dtypes import NUMPY_DTYPES, TORCH_DTYPES, as_words, from_host
from conduit.backends.torch.queue import Queue
from conduit.core.backend import RowIndex

Tensors = dict[str, torch.Tensor]
Sources = Mapping[str, torch.Tensor | Array]


class Device:
    """What one device does with tensors of rows. Arguments were checked; results are there later in `queue`."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def zeros(self, layout: Layout) -> Tensors:
        return self._make(layout, zeroed, torch.zeros)

    def empty(self, layout: Layout) -> Tensors:
        return self._make(layout, uninitialised, torch.empty)

    def put(self, into: Mapping[str, torch.Tensor], start: int, rows: Sources) -> None:
        """Rows from `start` on overwritten with `rows`, which are on this device or on the host."""
        for path, column in into.items():
            source = rows[path]
            source = source if isinstance(source, torch.Tensor) else self.queue.stage(source)
            with self.queue.use():
                column.narrow(0, start, len(source)).copy_(source, non_blocking=True)

    def scatter(self, into: Mapping[str, torch.Tensor], index: RowIndex, rows: Sources, fields: Sequence[str]) -> None:
        """Row `index[i]` of each field overwritten with row i of `rows`, which are on this device or on the host."""
        positions = self.queue.upload(index)
        for path in fields:
            source = rows[path]
            source = source if isinstance(source, torch.Tensor) else self.queue.upload(source)
            if source.numel():
                with self.queue.use():
                    as_words(into[path]).index_copy_(0, positions, as_words(source))

    def gather(self, columns: Mapping[str, torch.Tensor], index: RowIndex, fields: Sequence[str]) -> Tensors:
        """Rows `index` of each field, in tensors of their own."""
        positions = self.queue.upload(index)
        shapes = {path: (len(index), *columns[path].shape[1:]) for path in fields}
        batch = self.empty({path: (shape, NUMPY_DTYPES[columns[path].dtype]) for path, shape in shapes.items()})
        with self.queue.use():
            for path, rows in batch.items():
                if rows.numel():
                    torch.index_select(as_words(columns[path]), 0, positions, out=as_words(rows))
        return batch

    def widened(self, rows: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """The rows, in tensors of these larger shapes: zero beyond what they had."""
        wide = self.zeros({path: (shapes[path], NUMPY_DTYPES[narrow.dtype]) for path, narrow in rows.items()})
        with self.queue.use():
            for path, narrow in rows.items():
                wide[path][tuple(map(slice, narrow.shape))] = narrow
        return wide

    def _make(self, layout: Layout, on_host: Bytes, on_device: Callable[..., torch.Tensor]) -> Tensors:
        device = self.queue.device
        if device.type == "cpu":
            # NumPy's memory has huge pages and is 64-byte aligned; torch's has neither promise.
            return {path: from_host(array) for path, array in carve(layout, on_host).items()}
        with self.queue.use():
            return {
                path: on_device(shape, dtype=TORCH_DTYPES[dtype], device=device)
                for path, (shape, dtype) in layout.items()
            }
