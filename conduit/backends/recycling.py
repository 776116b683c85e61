"""Memory of large batches, lent again as soon as nobody refers to it.

malloc takes large blocks from the kernel each time, and a fresh page costs more than the rows gathered into it: batches
of 50 MB took 2.3 times as long. What it keeps itself is as quick as anything here, but how much that is depends on what was freed
before, and where: groups of batches of 8 MB took 2.5 times as long.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from conduit.backends.carving import uninitialised

Bytes = NDArray[np.uint8]

_LEAST_BYTES = 1 << 20
"""From this size on memory is recycled."""
_MOST_BYTES = 1 << 30
"""All that is remembered, lent or not: what is lent beyond it goes when its holder drops it. Two batches must fit."""


@dataclass(slots=True, eq=False)
class _Block:
    memory: memoryview
    lent: weakref.ref[Bytes] | None = None

    def borrower(self) -> Bytes | None:
        return None if self.lent is None else self.lent()


class Recycler:
    """Uninitialised bytes. Safe for several threads.

    A block is free when the array it was lent as has died: views, tensors over it and DLPack capsules all keep that array.
    It stays a plain block of memory for whoever holds it."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        """Latest first."""
        self._lock = threading.Lock()

    def bytes(self, size: int) -> Bytes:
        """At least `size` bytes that are nobody else's."""
        if size < _LEAST_BYTES or size > _MOST_BYTES // 2:
            return uninitialised(size)
        with self._lock:
            block = next((block for block in self._blocks if _fits(block, size)), None)
            if block is None:
                block = _Block(memoryview(cast(Any, uninitialised(size))))
            else:
                self._blocks.remove(block)
            # The memory's own array stays out of sight, for views would have it for their base and not this one.
            lent = np.frombuffer(block.memory, np.uint8)
            block.lent = weakref.ref(lent)
            self._blocks.insert(0, block)
            while sum(block.memory.nbytes for block in self._blocks) > _MOST_BYTES:
                self._blocks.pop()
            return lent

    def forget(self, arrays: Mapping[str, Any]) -> None:
        """What these arrays lie in is never lent again: another framework may read it after it let go of them."""
        bases = {id(array.base) for array in arrays.values() if isinstance(array, np.ndarray)} - {id(None)}
        with self._lock:
            self._blocks = [block for block in self._blocks if id(block.borrower()) not in bases]

    def clear(self) -> None:
        """Gives back what nobody uses."""
        with self._lock:
            self._blocks = [block for block in self._blocks if block.borrower() is not None]


def _fits(block: _Block, size: int) -> bool:
    return size <= block.memory.nbytes <= size + size // 4 and block.borrower() is None
