"""What every backend refuses, in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from conduit.core.backend import Columns, RowIndex
from conduit.core.experience import Schema
from conduit.errors import CapacityError, SchemaError
from conduit.topology.endpoint import Endpoint

_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)


def check_span(into: Columns[Any], start: int, rows: int) -> None:
    """IndexError unless [start, start + rows) lies inside `into`."""
    if start < 0 or start + rows > into.rows:
        raise IndexError(f"rows [{start}, {start + rows}) are outside the columns' [0, {into.rows}) at {into.at}")


def check_index(index: RowIndex, rows: int) -> None:
    """IndexError unless `index` is one-dimensional int64 and each entry is in [0, rows)."""
    if index.dtype != _INT64 or index.ndim != 1:
        raise IndexError(f"a row index is one-dimensional int64; got {index.dtype} of shape {index.shape}")
    # One pass for both ends: seen as unsigned, a negative entry is larger than any row number. On the few hundred entries
    # of a batch `argmax` takes half the time of `max`.
    unsigned = index.view(_UINT64)
    if unsigned.size and unsigned.item(unsigned.argmax()) >= rows:
        wrong = index[(index < 0) | (index >= rows)]
        raise IndexError(f"{wrong.size} of {index.size} row numbers are outside [0, {rows}); the first is {wrong[0]}")


def check_scatter(into: Columns[Any], index: RowIndex, rows: Columns[Any]) -> None:
    """IndexError unless `index` lies inside `into` and there is one row for each entry."""
    check_index(index, into.rows)
    if index.size != rows.rows:
        raise IndexError(f"scatter got {index.size} row numbers for {rows.rows} rows")


def check_merge(parts: Sequence[Columns[Any]], places: Sequence[RowIndex], rows: int, to: Endpoint) -> None:
    """IndexError unless each part has a place in [0, rows) for each of its rows; ValueError unless all parts are at `to`."""
    for part, place in zip(parts, places, strict=True):
        check_index(place, rows)
        if place.size != part.rows:
            raise IndexError(f"merge got {place.size} places for {part.rows} rows")
        if part.at != to:
            raise ValueError(f"merge got rows at {part.at}; expected all of them at {to}")


def wider_shapes(shapes: Mapping[str, tuple[int, ...]], schema: Schema) -> dict[str, tuple[int, ...]]:
    """Of arrays of these shapes, with their row axis, those that are to change, and to what. SchemaError unless they fit in there."""
    wider = {}
    for path, (rows, *shape) in shapes.items():
        wide = schema.fields[path].shape
        if len(wide) != len(shape) or any(old > new for old, new in zip(shape, wide, strict=True)):
            raise SchemaError(f"{path!r} has rows of shape {shape}, which don't fit into {schema.fields[path]}")
        if tuple(shape) != wide:
            wider[path] = (rows, *wide)
    return wider


def check_endpoint(at: Endpoint, known: Sequence[Endpoint], backend: str) -> None:
    """ValueError unless the backend has this endpoint."""
    if at not in known:
        raise ValueError(f"the {backend} backend has no endpoint {at} here; it has {', '.join(map(str, known))}")


def check_adopted(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many rows arrays of these shapes hold. SchemaError when one has no row axis, or they disagree."""
    if not shapes:
        raise SchemaError("adopt needs at least one array")
    for path, shape in shapes.items():
        if not shape:
            raise SchemaError(f"adopt: {path!r} has no axes; expected a leading row axis")
    counts = {path: shape[0] for path, shape in shapes.items()}
    if len(set(counts.values())) > 1:
        raise SchemaError(f"adopt: the arrays hold different numbers of rows: {counts}")
    return next(iter(counts.values()))


def no_room(schema: Schema, rows: int, at: Endpoint | str, free: int) -> CapacityError:
    """The error for columns that don't fit at `at`."""
    return no_room_for(schema.row_bytes, rows, at, free)


def no_room_for(row_bytes: int, rows: int, at: Endpoint | str, free: int) -> CapacityError:
    return CapacityError(
        f"{rows:,} rows of {row_bytes:,} bytes need {rows * row_bytes / 1e9:.3f} GB at {at}; "
        f"{free / 1e9:.3f} GB free. Fewer rows, or another endpoint"
    )
