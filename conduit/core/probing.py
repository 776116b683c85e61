"""Real transfers through a backend, timed: what `conduit.topology.probe` measures a machine by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from conduit.clock import Clock
from conduit.core.backend import Backend, Columns, Move, RowIndex
from conduit.core.experience import Schema
from conduit.errors import CapacityError, DeadlockError, SettingError, TopologyError
from conduit.topology.cluster import Edge, Topology
from conduit.topology.discover import discover
from conduit.topology.endpoint import DISK, PAGEABLE, Endpoint
from conduit.topology.probe import SIZES, Progress, Transfer, probe

ROW_BYTES = 4096
"""Of the rows that are moved, unless the caller says otherwise."""

_FIELD = "row"
_SPREAD_BYTES = 64 << 20
"""Rows are drawn from so many bytes where there is room: fewer would stay in a CPU's caches, as a buffer's never do."""
_SHARE = 8
"""At most one in so many of an endpoint's free bytes is taken."""
_BLOCK_BYTES = 4 << 20

_Way = Callable[[Endpoint, Endpoint, int], Columns[Any]]


def known(backend: Backend[Any]) -> Topology:
    """The topology of the backend's endpoints on this machine, as far as it is known without measuring."""
    hardware = {at: what for at in backend.endpoints() if not at.is_host and (what := backend.hardware(at))}
    return discover(backend.endpoints(), backend.free_bytes, hardware=hardware)


def measure(
    backend: Backend[Any],
    clock: Clock,
    *,
    seconds: float = 5.0,
    sizes: Iterable[int] = SIZES,
    row_bytes: int = ROW_BYTES,
    progress: Progress | None = None,
) -> Topology:
    """The topology of the backend's endpoints on this machine, every bandwidth measured. See `probe`."""
    found = known(backend)
    found = found.changed(name=f"{found.name}, {backend.name}")
    with timings_of(backend, clock, row_bytes=row_bytes) as timings:
        return probe(found, timings, sizes=sizes, seconds=seconds, progress=progress)


def timings_of(backend: Backend[Any], clock: Clock, *, row_bytes: int = ROW_BYTES) -> BackendTimings:
    """Timings of the backend's transfers, of rows of `row_bytes`, by this clock; to be closed."""
    return BackendTimings(backend, clock, row_bytes)


class BackendTimings:
    """Moves rows as a store does; which way depends on the edge:

    - within one endpoint, and from a device: `read`, as delivery does, of rows drawn at random: a gather, then the move
    - from a host tier to another endpoint: `read`, and `write`, as ingestion does; the slower of the two counts, since the edge stands for both
    - from the disk: of rows that no page in memory has, as where there are more than memory holds
    - to the disk: `write`, for a batch that is read "to the disk" lies in memory; from a device, `transfer`, as migration does

    Transfers at once are asked for one after the other by one thread, and waited for when all have been, as a store's operators do; but what
    comes out of pageable memory, which whoever asks for it has to copy, by a thread for each edge, as every learner has one. The first
    transfer of a kind and size goes untimed before the one that counts: frameworks compile then, and memory is touched for the first time.

    Takes scratch columns at each endpoint that is used, of 64 MiB or an eighth of what is free there, and no more than a few transfers' bytes
    beside; `close` gives them back."""

    def __init__(self, backend: Backend[Any], clock: Clock, row_bytes: int) -> None:
        if not isinstance(row_bytes, int) or row_bytes < 1:
            raise SettingError(f"row_bytes={row_bytes!r}: expected a whole number ≥ 1")
        self._backend = backend
        self._clock = clock
        self._row_bytes = row_bytes
        self._schema = Schema.infer({_FIELD: np.zeros((1, row_bytes), np.uint8)}, "probe")
        # What is read lies at (at, at); what is written into, by edge, since writes into the same columns would wait for each other.
        self._scratch: dict[Edge, Columns[Any]] = {}
        self._parcels: dict[Endpoint, Columns[Any]] = {}
        self._indices: dict[tuple[int, int], RowIndex] = {}
        self._block: Columns[Any] | None = None
        self._tried: set[Transfer] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def now(self) -> float:
        return self._clock.now()

    def one(self, source: Endpoint, to: Endpoint, size_bytes: int) -> float:
        return self.together([(source, to, size_bytes)])

    def together(self, transfers: Sequence[Transfer]) -> float:
        """In whole rows. TopologyError where the backend refuses, with its reason."""
        try:
            made = [(self._ways(source, to), source, to, self._rows(size)) for source, to, size in transfers]
            for _, source, to, rows in made:
                self._prepare(source, to, rows)
            rounds = range(max(len(ways) for ways, *_ in made))
            if not self._tried.issuperset(transfers):
                for number in rounds:
                    self._timed(made, number)
                self._tried.update(transfers)
            return max(self._timed(made, number) for number in rounds)
        except (CapacityError, SettingError, DeadlockError):
            raise
        except (ValueError, RuntimeError, OSError) as error:
            # What state the columns are in nobody knows, a lost device's least of all: they aren't touched again.
            lost = {at for source, to, _ in transfers for at in (source, to)}
            self._scratch = {edge: columns for edge, columns in self._scratch.items() if lost.isdisjoint(edge)}
            self._parcels = {at: columns for at, columns in self._parcels.items() if at not in lost}
            edges = ", ".join(f"{source} → {to}" for source, to, _ in transfers)
            raise TopologyError(f"the {self._backend.name} backend made no transfer {edges}: {error}") from error

    def close(self) -> None:
        self._parcels.clear()
        while self._scratch:
            self._backend.release(self._scratch.popitem()[1])

    def _timed(self, made: Sequence[tuple[tuple[_Way, ...], Endpoint, Endpoint, int]], number: int) -> float:
        copied: dict[Edge, list[tuple[_Way, int]]] = {}
        others: list[tuple[Edge, tuple[_Way, int]]] = []
        for ways, source, to, rows in made:
            asked = ways[min(number, len(ways) - 1)], rows
            if source == PAGEABLE:
                copied.setdefault((source, to), []).append(asked)
            else:
                others.append(((source, to), asked))
        mine = (
            others
            if others or not copied
            else [(edge, asked) for edge in [next(iter(copied))] for asked in copied.pop(edge)]
        )
        failed: list[BaseException] = []

        def run(edge: Edge, each: Sequence[tuple[_Way, int]]) -> None:
            try:
                self._run([(edge, asked) for asked in each])
            except BaseException as error:
                failed.append(error)

        for source in {edge[0] for edge in (*copied, *(edge for edge, _ in others))}:
            if source == DISK:
                # What has just been written would come from memory.
                self._backend.uncache(self._scratch[source, source])
        began_s = self._clock.now()
        tasks = [
            self._clock.spawn(partial(run, edge, each), f"probe of {edge[0]} → {edge[1]}")
            for edge, each in copied.items()
        ]
        self._run(mine)
        for task in tasks:
            task.join()
        if failed:
            raise failed[0]
        return self._clock.now() - began_s

    def _run(self, asked: Sequence[tuple[Edge, tuple[_Way, int]]]) -> None:
        """Asks for all, then waits for all."""
        results: dict[object, Columns[Any]] = {}
        for place, (edge, (way, rows)) in enumerate(asked):
            # Of several writes along an edge only the last result is whole: it has consumed the others.
            results[edge if way == self._write else place] = way(*edge, rows)
        for columns in results.values():
            self._backend.wait(columns)

    def _ways(self, source: Endpoint, to: Endpoint) -> tuple[_Way, ...]:
        if source == to:
            return (self._read,)
        if to == DISK:
            return (self._write,) if source.is_host else (self._transfer,)
        return (self._read, self._write) if source.is_host else (self._read,)

    def _read(self, source: Endpoint, to: Endpoint, rows: int) -> Columns[Any]:
        columns = self._scratch[source, source]
        return self._backend.read(columns, self._index(rows, columns.rows), (_FIELD,), to)

    def _write(self, source: Endpoint, to: Endpoint, rows: int) -> Columns[Any]:
        written = self._backend.write(self._scratch[source, to], 0, self._scratch[source, source].slice(0, rows))
        self._scratch[source, to] = written
        return written

    def _transfer(self, source: Endpoint, to: Endpoint, rows: int) -> Columns[Any]:
        return self._backend.transfer([Move(self._parcels[source], to)])[0]

    def _rows(self, size_bytes: int) -> int:
        if size_bytes < self._row_bytes:
            raise SettingError(
                f"a transfer of {size_bytes} bytes: expected one row at least, of {self._row_bytes} bytes"
            )
        return round(size_bytes / self._row_bytes)

    def _index(self, rows: int, of: int) -> RowIndex:
        index = self._indices.get((rows, of))
        if index is None:
            index = self._indices[rows, of] = np.random.default_rng(rows).permutation(of)[:rows].astype(np.int64)
        return index

    def _prepare(self, source: Endpoint, to: Endpoint, rows: int) -> None:
        self._make((source, source), rows, max(rows, _SPREAD_BYTES // self._row_bytes))
        ways = self._ways(source, to)
        if self._write in ways:
            self._make((source, to), rows, rows)
        if self._transfer in ways and ((parcel := self._parcels.get(source)) is None or parcel.rows != rows):
            self._parcels[source] = parcel = self._read(source, source, rows)
            self._backend.wait(parcel)

    def _make(self, edge: Edge, needed: int, wanted: int) -> None:
        """Columns of `wanted` rows at the edge's end, or as many as there is room for but `needed` at least, every page of them written."""
        there, at = self._scratch.get(edge), edge[1]
        if there is not None and there.rows >= needed:
            return
        if there is not None:
            self._backend.release(self._scratch.pop(edge))
        free = self._backend.free_bytes(at)
        rows = min(wanted, free // _SHARE // self._row_bytes)
        if rows < needed:
            raise CapacityError(
                f"{needed:,} rows of {self._row_bytes:,} bytes to measure {at} with: expected at most an eighth of its {free:,} free bytes"
            )
        columns, block = self._backend.allocate(self._schema, rows, at), self._filled()
        for start in range(0, rows, block.rows):
            columns = self._backend.write(columns, start, block.slice(0, min(block.rows, rows - start)))
        self._backend.wait(columns)
        self._scratch[edge] = columns

    def _filled(self) -> Columns[Any]:
        if self._block is None:
            rows = max(_BLOCK_BYTES // self._row_bytes, 1)
            self._block = Columns(PAGEABLE, {_FIELD: np.ones((rows, self._row_bytes), np.uint8)}, rows)
        return self._block
