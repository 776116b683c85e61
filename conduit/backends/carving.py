"""Arrays in host memory, each beginning at a multiple of 64 bytes: JAX aliases no other."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = Callable[[int], NDArray[np.uint8]]
"""Makes at least that many bytes; the array it returns keeps them alive."""
Layout = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of each array."""

ALIGNMENT = 64
NARROW_BYTES = 1 << 16
"""Arrays below this many bytes share one allocation; wider ones have their own, so that keeping a batch's rewards does
not keep its images."""


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
        if size < NARROW_BYTES:
            places.append((path, shape, dtype, size, offset))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        else:
            places.append((path, shape, dtype, size, None))
    return offset, tuple(places)


def _first_aligned(memory: NDArray[np.uint8]) -> int:
    """How many bytes before the first at a multiple of 64. `memory` is writable and not empty."""
    # A quarter of the time that NumPy's own ways to an address take.
    return -ctypes.addressof(ctypes.c_char.from_buffer(cast(Any, memory))) % ALIGNMENT


def zeroed(size: int) -> NDArray[np.uint8]:
    return np.zeros(size, np.uint8)


def uninitialised(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)
