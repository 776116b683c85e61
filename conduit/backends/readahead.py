"""Rows in mapped files, asked for before they are touched: the disk then fetches all at once, not one after the other."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from conduit.backends.carving import Array
from conduit.core.backend import RowIndex

_PROCESS_MADVISE = 440
"""The same number on every architecture; Linux 5.10 has it, glibc since 2.36."""
_AT_ONCE = 1024
"""Ranges that the kernel takes in a call."""

Ranges = NDArray[np.uint64]
"""Of memory, each an `iovec`: (ranges, 2)."""


def will_need(columns: Sequence[Array], index: RowIndex) -> bool:
    """Begins to fetch rows `index` of all columns, and returns at once. False where the kernel has no such call, or doesn't let us
    make it."""
    if not columns or not index.size:
        return True
    if not hasattr(os, "pidfd_open"):
        return False
    ranges = np.concatenate([_pages(column, index) for column in columns])
    try:
        process = os.pidfd_open(os.getpid())
    except OSError:
        return False
    try:
        return all(_advised(process, ranges[first : first + _AT_ONCE]) for first in range(0, len(ranges), _AT_ONCE))
    finally:
        os.close(process)


def _advised(process: int, ranges: Ranges) -> bool:
    return _call()(_PROCESS_MADVISE, process, ranges.ctypes.data, len(ranges), mmap.MADV_WILLNEED, 0) >= 0


def _pages(column: Array, index: RowIndex) -> Ranges:
    """Where each row's pages begin, and their bytes. A row in the same pages as the one before is left out."""
    row_bytes = column.strides[0]
    starts = column.__array_interface__["data"][0] + index * row_bytes
    first = starts & -mmap.PAGESIZE
    size = (starts + row_bytes + mmap.PAGESIZE - 1 & -mmap.PAGESIZE) - first
    fresh = np.ones(len(index), np.bool_)
    np.logical_or(first[1:] != first[:-1], size[1:] != size[:-1], out=fresh[1:])
    return np.stack([first[fresh], size[fresh]], axis=1).astype(np.uint64)


@functools.cache
def _call() -> Callable[..., int]:
    call = ctypes.CDLL(None).syscall
    number, pointer, size = ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t
    call.restype, call.argtypes = number, [number, ctypes.c_int, pointer, size, ctypes.c_int, ctypes.c_uint]
    return call
