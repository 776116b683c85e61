"""Which NumPy dtypes JAX holds exactly."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np

_ALWAYS = {
    np.dtype(kind)
    for kind in (
        *(np.bool_, np.uint8, np.uint16, np.uint32, np.int8, np.int16, np.int32),
        *(np.float16, np.float32, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    )
}
_WITH_X64 = {np.dtype(kind): np.dtype(half) for kind, half in (
    (np.uint64, np.uint32), (np.int64, np.int32), (np.float64, np.float32), (np.complex128, np.complex64),
)}  # fmt: skip


def refusal(dtype: np.dtype[Any]) -> str | None:
    """Why JAX would change values of this dtype, and what would work; None when it holds it exactly."""
    if dtype in _ALWAYS or (dtype in _WITH_X64 and jax.dtypes.canonicalize_dtype(dtype) == dtype):
        return None
    if dtype not in _WITH_X64:
        return f"{dtype}, which JAX doesn't have: cast it"
    narrow = _WITH_X64[dtype]
    return (
        f"{dtype}, which JAX narrows to {narrow} as configured: cast it, or jax.config.update('jax_enable_x64', True)"
    )


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype under which columns are stored: integers for bfloat16 and float8.

    XLA's CPU has no such floats: it widens them, so that a donated write of a few rows would pass over the whole buffer
    (measured: 245 ms for 512 MB, 0.3 ms as integers), and a scatter would change the bits of signalling NaNs.
    """
    return np.dtype(f"u{dtype.itemsize}") if dtype.type.__module__ == "ml_dtypes" else dtype
