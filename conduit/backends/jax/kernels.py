"""The compiled pieces: each handles all fields of the rows in one call, and is compiled once per shape.

Callers check ranges first: `dynamic_update_slice` clamps a start past the end and would overwrite other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Arrays = tuple[Any, ...]


@partial(jax.jit, donate_argnums=0)
def put(columns: Arrays, rows: Arrays, start: Any) -> Arrays:
    """`rows` at `start` of each column, in place: `columns` are consumed."""
    return tuple(
        lax.dynamic_update_slice_in_dim(column, as_dtype(row, column.dtype), start, 0)
        for column, row in zip(columns, rows, strict=True)
    )


@partial(jax.jit, donate_argnums=0)
def scatter(columns: Arrays, index: Any, rows: Arrays) -> Arrays:
    """Row `index[i]` of each column set to row i of `rows`, in place: `columns` are consumed."""
    return tuple(
        column.at[index].set(as_dtype(row, column.dtype), mode="promise_in_bounds")
        for column, row in zip(columns, rows, strict=True)
    )


@partial(jax.jit, static_argnums=2)
def take(columns: Arrays, index: Any, dtypes: tuple[Any, ...]) -> Arrays:
    """Rows `index` of each column, as `dtypes`."""
    return tuple(
        as_dtype(jnp.take(column, index, axis=0, mode="clip"), dtype)
        for column, dtype in zip(columns, dtypes, strict=True)
    )


@partial(jax.jit, static_argnums=2)
def cut(columns: Arrays, start: Any, rows: int) -> Arrays:
    """Rows [start, start + rows) of each column, copied."""
    return tuple(lax.dynamic_slice_in_dim(column, start, rows, 0) for column in columns)


@partial(jax.jit, static_argnums=(1, 2))
def widen(columns: Arrays, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> Arrays:
    """The columns in arrays of these larger shapes, zero beyond what they had. `dtypes`: as what their bits are moved."""
    return tuple(
        as_dtype(
            jnp.pad(as_dtype(column, dtype), [(0, new - old) for old, new in zip(column.shape, shape, strict=True)]),
            column.dtype,
        )
        for column, shape, dtype in zip(columns, shapes, dtypes, strict=True)
    )


def blank(layout: tuple[tuple[tuple[int, ...], Any], ...], device: Any) -> Arrays:
    """Zeros of these shapes and dtypes on `device`, all by one call."""
    return _blank(layout, device)()


@cache
def _blank(layout: tuple[tuple[tuple[int, ...], Any], ...], device: Any) -> Callable[[], Arrays]:
    def zeros() -> Arrays:
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in layout)

    return jax.jit(zeros, out_shardings=jax.sharding.SingleDeviceSharding(device))


def seen(columns: Arrays, dtypes: tuple[Any, ...]) -> Arrays:
    """The same bits as `dtypes`; the columns themselves where these are theirs. They are consumed."""
    return columns if all(c.dtype == d for c, d in zip(columns, dtypes, strict=True)) else _seen(columns, dtypes)


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def _seen(columns: Arrays, dtypes: tuple[Any, ...]) -> Arrays:
    return tuple(as_dtype(column, dtype) for column, dtype in zip(columns, dtypes, strict=True))


@cache
def copier(device: Any) -> Callable[..., Arrays]:
    """A function whose results are copies on `device` of the NumPy arrays that it is called with. They are read after it
    has returned. It costs less than one device_put."""

    def copies(*arrays: Any) -> Arrays:
        return arrays

    return jax.jit(copies, out_shardings=jax.sharding.SingleDeviceSharding(device))


def as_dtype(array: Any, dtype: Any) -> Any:
    """The same bits, seen as another dtype of the same width."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def pieces(rows: int, largest: int) -> Iterator[tuple[int, int]]:
    """[0, rows) as (start, size), sizes being powers of two up to `largest`, itself one: few shapes to compile."""
    start = 0
    while start < rows:
        size = min(largest, 1 << (rows - start).bit_length() - 1)
        yield start, size
        start += size
