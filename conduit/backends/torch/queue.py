"""The order of work on one torch device: CUDA's own stream per device, or a CPU that does everything at once.

All that touches a device's columns is issued on that device's queue, so writes and reads follow each other in the order
in which the Shard's lock let them through, and no host waits for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from conduit.backends.torch.dtypes import from_host, to_host


class Queue(Protocol):
    """Work on one device, in order of issue."""

    device: torch.device

    def use(self) -> AbstractContextManager[Any]:
        """Within it, torch's calls are issued on this queue."""
        ...

    def stage(self, array: NDArray[Any]) -> torch.Tensor:
        """`array` as a host tensor that this queue can copy from while the host goes on; a pinned `array` itself."""
        ...

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        """`array` on the device, later in this queue."""
        ...

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        """Host memory that holds `tensor` later in this queue. `tensor` is given away."""
        ...

    def mark(self) -> Any:
        """What `order` and `wait` need to know that all issued so far is done; None when it is."""
        ...

    def branch(self) -> Queue:
        """A queue of its own on the same device, which begins when all issued here so far is done."""
        ...

    def follow_caller(self) -> None:
        """Later work here follows what the calling thread has issued on its current stream."""
        ...

    def join(self, mark: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Later work here follows `mark`, and may use `tensors` whichever queue made them."""
        ...


class CpuQueue:
    """A CPU does each thing before the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def use(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stage(self, array: NDArray[Any]) -> torch.Tensor:
        return from_host(array)

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        return from_host(array)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        return to_host(tensor)

    def mark(self) -> None:
        return None

    def branch(self) -> CpuQueue:
        return self

    def follow_caller(self) -> None:
        """Nothing to follow."""

    def join(self, mark: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to follow."""


class CudaQueue:
    """A side stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def use(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def stage(self, array: NDArray[Any]) -> torch.Tensor:
        source = from_host(array)
        if source.is_pinned():
            return source
        # torch's pool lends a pinned block again only when the copies out of it are done (it records their events), so
        # a slot is never overwritten under a copy.
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        with self.use():
            return self.stage(array).to(self.device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> NDArray[Any]:
        landed = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self.use():
            return to_host(landed.copy_(tensor, non_blocking=True))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def branch(self) -> CudaQueue:
        branch = CudaQueue(self.device)
        branch.stream.wait_stream(self.stream)
        return branch

    def follow_caller(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self, mark: Any, tensors: Iterable[torch.Tensor]) -> None:
        if mark is not None:
            self.stream.wait_event(mark)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.stream)
