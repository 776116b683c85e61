"""Which NumPy dtypes torch holds exactly, and seeing one kind of array as the other without a copy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(kind): dtype
    for kind, dtype in (
        (np.bool_, torch.bool),
        (np.uint8, torch.uint8),
        (np.uint16, torch.uint16),
        (np.uint32, torch.uint32),
        (np.uint64, torch.uint64),
        (np.int8, torch.int8),
        (np.int16, torch.int16),
        (np.int32, torch.int32),
        (np.int64, torch.int64),
        (np.float16, torch.float16),
        (np.float32, torch.float32),
        (np.float64, torch.float64),
        (np.complex64, torch.complex64),
        (np.complex128, torch.complex128),
        (ml_dtypes.bfloat16, torch.bfloat16),
        (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
        (ml_dtypes.float8_e5m2, torch.float8_e5m2),
    )
}
NUMPY_DTYPES = {dtype: kind for kind, dtype in TORCH_DTYPES.items()}

_ML_DTYPES = {dtype for dtype in TORCH_DTYPES if dtype.type.__module__ == "ml_dtypes"}
_SHARED = TORCH_DTYPES.keys() - _ML_DTYPES
"""What NumPy and torch both have."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes an item: dtypes that NumPy and every torch kernel know, for those that they don't share (bfloat16)."""


def from_host(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over `array`'s memory, its dtype one of TORCH_DTYPES. An array that is not in C order is copied first."""
    if array.dtype in _SHARED and array.flags.carray:
        return torch.from_numpy(array)
    dtype = TORCH_DTYPES[array.dtype]
    # torch takes no negative strides (its from_dlpack aborts the process), so these never reach it.
    raw = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype in _ML_DTYPES:
        raw = raw.view(f"u{array.itemsize}")
    # from_numpy warns of read-only memory and from_dlpack doesn't; nobody writes to a batch that was given away.
    tensor = torch.from_numpy(raw) if raw.flags.writeable else torch.from_dlpack(raw)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def to_host(tensor: torch.Tensor) -> NDArray[Any]:
    """A NumPy array over a CPU tensor's memory, bfloat16 and float8 as ml_dtypes'."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    if dtype in _ML_DTYPES:
        return tensor.view(_INTEGERS[dtype.itemsize]).numpy().view(dtype)
    return tensor.numpy()


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous (rows, …) tensor as (rows, words) of the widest integers that divide a row.

    Gathers and scatters of such words are several times faster than of bytes, and need no kernel for each dtype.
    """
    rows = tensor.shape[0]
    row_bytes = tensor.element_size() * (tensor.numel() // rows)
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    return tensor.reshape(rows, -1).view(_INTEGERS[size])
