"""Page-locked host memory for the pinned tier, where CUDA is there to use it."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray

from conduit.backends.host import PinnedMemory


def pinned_memory() -> PinnedMemory | None:
    """Storage registered with CUDA, batches from torch's pool; None without CUDA, where pinning raises."""
    return PinnedMemory(_registered, _pooled) if torch.cuda.is_available() else None


def _registered(size: int) -> NDArray[np.uint8]:
    """NumPy memory (huge pages) locked in place. torch's pinned pool would round it up to a power of two."""
    memory = np.zeros(size, np.uint8)
    address = memory.__array_interface__["data"][0]
    runtime = torch.cuda.cudart()
    assert runtime is not None
    failed = int(runtime.cudaHostRegister(address, size, 0))
    if failed:
        raise MemoryError(f"CUDA could not lock {size:,} bytes of host memory (error {failed})")
    # Runs before the array's memory is freed. Copies from it may be under way on any device.
    weakref.finalize(memory, _unregister, address).atexit = False
    return memory


def _unregister(address: int) -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    runtime = torch.cuda.cudart()
    assert runtime is not None
    runtime.cudaHostUnregister(address)


def _pooled(size: int) -> NDArray[np.uint8]:
    """From torch's pool, which lends a block again only when the copies recorded on it are done."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
