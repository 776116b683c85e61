"""The Backend protocol: all that a framework has to implement to hold rows (DESIGN: "the Backend").

Placement, sampling and scheduling are written once, above it. An implementation keeps these promises, which
`conduit.testing.BackendContract` checks for every one:

- `write` and `scatter` consume `into` (torch mutates it, JAX donates it): callers keep only the result.
- A range or index outside the columns is refused with IndexError; nothing is clamped.
- `read`, `merge`, `widen`, `transfer` and `adopt` return storage that the caller owns; a batch is never a view of the stored columns.
- `allocate` refuses a dtype it can't hold exactly with SchemaError, naming the field.
- Rows given to `write`, `scatter` and `transfer` must not be changed afterwards: a device may still be reading them.
- Nothing blocks the host except `wait`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from conduit.core.experience import Schema
from conduit.topology.endpoint import Endpoint

A = TypeVar("A")

RowIndex = NDArray[np.int64]
"""Row numbers in columns, one-dimensional, each in [0, rows)."""


@dataclass(slots=True)
class Columns(Generic[A]):
    """Rows at one endpoint, one array a field: `arrays[path]` has shape (rows, *field.shape). What `read` and `adopt`
    return has the field's dtype; what `allocate` and `transfer` return is for the backend's own methods only."""

    at: Endpoint
    arrays: Mapping[str, A]
    rows: int
    note: Any = field(default=None, compare=False)
    """The backend's own, and opaque to all others: when these rows are there (torch: a CUDA event), or how stored rows
    are encoded (JAX). It belongs to these arrays: whoever makes other columns of them hands it on."""

    def slice(self, start: int, stop: int) -> Columns[A]:
        """Rows [start, stop)."""
        arrays: Any = {path: array[start:stop] for path, array in cast(Mapping[str, Any], self.arrays).items()}
        return replace(self, arrays=arrays, rows=stop - start)


@dataclass(frozen=True, slots=True)
class Move(Generic[A]):
    """Copy `columns` to another endpoint."""

    columns: Columns[A]
    to: Endpoint


@dataclass(frozen=True, slots=True)
class Target:
    """Whom a batch is for: "numpy", "torch" or "jax", and which device (None: the host for NumPy and torch, the
    default device for JAX). `sharding` is a `jax.sharding.Sharding` that splits the row axis; JAX only, instead of a device."""

    framework: str
    device: Any = None
    sharding: Any = None


class Backend(Protocol[A]):
    """Holds rows. All methods may be called from several threads; calls that touch the same columns are serialised by their Shard."""

    @property
    def name(self) -> str: ...

    @property
    def framework(self) -> str:
        """Where batches go unless a learner asks otherwise: "numpy", "torch" or "jax"."""
        ...

    @property
    def immediate(self) -> bool:
        """Whether rows that are read from one host tier in memory to another are there when `read` returns."""
        ...

    def endpoints(self) -> Sequence[Endpoint]:
        """Every endpoint of this machine that `allocate` accepts, pageable host first."""
        ...

    def free_bytes(self, at: Endpoint) -> int: ...

    def hardware(self, at: Endpoint) -> str:
        """What an endpoint is: "host" where its memory is the host's, a GPU's UUID or PCI id, "" where nobody knows."""
        ...

    def padded(self, rows: int, at: Endpoint) -> int:
        """To how many rows an index of `rows` should be padded before `read` or `scatter` at `at`, so that a framework
        that compiles once per shape meets few of them. `rows` itself where that doesn't matter."""
        ...

    def allocate(self, schema: Schema, rows: int, at: Endpoint) -> Columns[A]:
        """Zeroed columns for `rows` rows."""
        ...

    def release(self, columns: Columns[A]) -> None:
        """Gives the memory back now where the framework can; the columns are never used again."""
        ...

    def write(self, into: Columns[A], start: int, rows: Columns[A]) -> Columns[A]:
        """`into` with `rows` at [start, start + rows.rows). `rows` is at `into`'s endpoint or at a host tier."""
        ...

    def scatter(self, into: Columns[A], index: RowIndex, rows: Columns[A], fields: Sequence[str]) -> Columns[A]:
        """`into` with row `index[i]` of each named field set to row i of `rows`. `rows` is at `into`'s endpoint or at a
        host tier. An index that occurs twice must bring the same row both times."""
        ...

    def read(self, columns: Columns[A], index: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[A]:
        """Rows `index` of the named fields, at `to`: row i of the result is row `index[i]`."""
        ...

    def merge(self, parts: Sequence[Columns[A]], places: Sequence[RowIndex], rows: int, to: Endpoint) -> Columns[A]:
        """Batches put together as one of `rows` rows: row `places[k][i]` is row i of `parts[k]`. All parts are at `to` and of the same
        fields; they are given away. Every place is named; one that is named twice must be brought the same row both times."""
        ...

    def widen(self, columns: Columns[A], schema: Schema) -> Columns[A]:
        """A batch's rows with the fields' shapes of `schema`, each axis as long as it was or longer: zero where there was nothing. They
        stay where they are; `columns` are given away."""
        ...

    def transfer(self, moves: Sequence[Move[A]]) -> list[Columns[A]]:
        """A copy of each move's columns at its destination, always in memory of its own. All moves are issued before any is joined."""
        ...

    def adopt(self, rows: Mapping[str, Any], at: Endpoint) -> Columns[A]:
        """A copy at `at` of arrays that another framework made: NumPy, torch or JAX arrays, or anything with DLPack."""
        ...

    def landing(self, target: Target) -> Endpoint:
        """Where to read rows to, so that `hand_over` to `target` needs no further copy."""
        ...

    def hand_over(self, columns: Columns[A], to: Target) -> Mapping[str, Any]:
        """The columns' arrays as `to`'s framework's own, by DLPack or an equal that copies no wide array (64 KB or more) when they lie at
        `landing(to)`. The columns are given away. HandOverError where a dtype would change."""
        ...

    def uncache(self, columns: Columns[A]) -> None:
        """Stored columns on the disk are in its files alone, and no page of them in memory: so that the next read costs what it does where
        memory has no room for them. Nothing happens to others."""
        ...

    def order(self, columns: Columns[A]) -> None:
        """The caller's current stream waits for these columns; the host doesn't."""
        ...

    def wait(self, columns: Columns[A]) -> None:
        """The host waits until these columns are there."""
        ...
