"""Segments: how rows and finals, which never change, get from a buffer that goes on into files that are written once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.archive import Reading, Writer
from conduit.core.backend import Backend, Columns
from conduit.core.buffer import ExperienceBuffer
from conduit.core.journal import Copying
from conduit.core.order import Order
from conduit.core.places import Places, Roll
from conduit.topology.endpoint import PAGEABLE

Keys = NDArray[np.int64]

SEGMENT_BYTES = 64 << 20
"""A segment is at most about this large."""
CHUNK_BYTES = 4 << 20
"""So much is read at once, and so many rows at most: who pushes may have to wait for as long as that takes."""
_CHUNK_ROWS = 1 << 16
SMALL_SEGMENTS = 8
"""So many small segments at the end are written together as one."""
_MOST_PASSES = 64
_NEVER = 1 << 62
_KEYS, _LEAF = "keys", "leaf/"
"""In a file: the rows' numbers, and what comes before each leaf's path."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows, or finals, in one file: those of keys [first, stop) that were live when it was written."""

    file: str
    first: int
    stop: int
    rows: int
    size_bytes: int


class RowSource:
    """The rows, as a series."""

    stem = "rows"

    def __init__(self, buffer: ExperienceBuffer, order: Order, deadline_s: float) -> None:
        """Takes a turn where rows leave in any order."""
        self._buffer = buffer
        self._roll = None if buffer.places is None else _called(buffer.places, order, deadline_s)

    @property
    def row_bytes(self) -> int:
        schema = self._buffer.schema
        return 1 if schema is None else schema.row_bytes

    @property
    def stop(self) -> int:
        return self._buffer.inserted

    @property
    def any_may_leave(self) -> bool:
        """Whether not only the oldest leave."""
        return self._roll is not None

    def begin(self, first: int) -> None:
        """From here on, numbers are asked for in order."""
        if self._roll is not None:
            self._roll.order(first)

    def keys_from(self, first: int, most: int) -> Keys:
        """In a turn: the numbers of the next live ones, `most` at most; none only if there are none."""
        if self._roll is not None:
            return self._roll.keys_from(first, most, self.stop)
        return self._buffer.keys_from(first, most)

    def live_between(self, first: int, stop: int) -> int:
        """How many of these are live, or were at first."""
        if self._roll is not None:
            return self._roll.count_between(first, stop)
        return self._buffer.live_between(first, stop)

    def reader(self, keys: Keys) -> Callable[[], Columns[Any]]:
        """In a turn: what reads these rows, later."""
        selection = self._buffer.stored(keys)
        return lambda: self._buffer.read([selection], PAGEABLE)[0]


class FinalSource:
    """The finals, as a series."""

    stem = "finals"
    any_may_leave = False

    def __init__(self, buffer: ExperienceBuffer) -> None:
        self._buffer = buffer

    @property
    def row_bytes(self) -> int:
        finals = self._buffer.finals
        return 1 if finals is None else finals.row_bytes

    @property
    def stop(self) -> int:
        finals = self._buffer.finals
        return 0 if finals is None else finals.stop

    def begin(self, first: int) -> None:
        """They are in order."""

    def keys_from(self, first: int, most: int) -> Keys:
        finals = self._buffer.finals
        low = first if finals is None else max(first, finals.first)
        return np.arange(low, min(low + most, self.stop))

    def live_between(self, first: int, stop: int) -> int:
        finals = self._buffer.finals
        return 0 if finals is None else max(0, min(stop, finals.stop) - max(first, finals.first))

    def reader(self, keys: Keys) -> Callable[[], Columns[Any]]:
        finals = self._buffer.finals
        assert finals is not None
        return lambda: finals.read(keys, finals.fields, PAGEABLE)


class Series:
    """What comes with ascending numbers, never changes, and leaves: on its way into segments."""

    def __init__(
        self,
        order: Order,
        backend: Backend[Any],
        buffer: ExperienceBuffer,
        writer: Writer,
        source: RowSource | FinalSource,
        known: Sequence[Segment],
    ) -> None:
        """`known`: the segments that are there. Those whose rows have mostly left are written anew, and so are many small ones."""
        self._order = order
        self._backend = backend
        self._buffer = buffer
        self._writer = writer
        self._source = source
        self._kept, self._ranges = _parted(known, source)
        """`_ranges`: numbers that are to be written, [first, stop) each, ascending."""
        source.begin(self._ranges[0][0])
        self._held: list[tuple[Keys, Mapping[str, NDArray[Any]]]] = []
        """Chunks of one range that wait to be written."""
        self._full: list[list[tuple[Keys, Mapping[str, NDArray[Any]]]]] = []
        """The same, whose segments are whole."""
        self._held_bytes = 0
        self._new: list[Segment] = []
        self._oldest = 0
        """Whatever is before it has left meanwhile."""
        self.written_rows = self.written_bytes = 0

    def catch_up(self, deadline_s: float) -> None:
        """Writes what there is while the store goes on, until little is left, or half as much as before."""
        left = self._left()
        for _ in range(_MOST_PASSES):
            stop = self._source.stop
            while self._ranges[0][0] < stop and self._take_chunk(deadline_s):
                self._write()
            before, left = left, self._left()
            if left * self._source.row_bytes <= CHUNK_BYTES or left > before // 2:
                return

    def rest(self) -> None:
        """In a turn: copies of all that isn't in a segment."""
        while (taken := self._chunk()) is not None:
            keys, read = taken
            self._hold(keys, read())
        if not self._source.any_may_leave:
            oldest = self._source.keys_from(0, 1)
            self._oldest = int(oldest[0]) if len(oldest) else self._source.stop

    def finish(self) -> list[Segment]:
        """Writes what is held, and returns the segments that had something live at the end."""
        self._close_segment()
        self._write()
        segments = [segment for segment in self._kept if segment.stop > self._oldest]
        for segment in segments:
            self._writer.keep(segment.file)
        return sorted([*segments, *self._new], key=lambda segment: segment.first)

    def _left(self) -> int:
        return self._source.stop - self._ranges[-1][0]

    def _chunk(self) -> tuple[Keys, Callable[[], Columns[Any]]] | None:
        """In a turn: the next numbers, and what reads them; None if there are none."""
        while True:
            first, stop = self._ranges[0]
            most = max(1, min(_CHUNK_ROWS, CHUNK_BYTES // max(1, self._source.row_bytes)))
            keys = self._source.keys_from(first, most)
            keys = keys[keys < stop]
            if len(keys):
                self._ranges[0] = (int(keys[-1]) + 1, stop)
                return keys, self._source.reader(keys)
            if stop == _NEVER:
                self._ranges[0] = (max(first, self._source.stop), stop)
                return None
            self._ranges.popleft()
            self._close_segment()

    def _take_chunk(self, deadline_s: float) -> bool:
        """Reads the next chunk under a lease; whether there was one."""
        read: list[Columns[Any] | BaseException] = []
        turn = self._order.enter()
        with self._order.serve(turn, deadline_s, _why_waiting):
            taken = self._chunk()
            if taken is None:
                return False
            keys, reader = taken
            # On all live rows: their finals leave with them.
            lease = self._buffer.leases.take(self._buffer.window.first, lambda: read.append(_tried(reader)))
        self._buffer.leases.redeem(lease)
        columns = read[0]
        if isinstance(columns, BaseException):
            raise columns
        self._hold(keys, columns)
        return True

    def _hold(self, keys: Keys, columns: Columns[Any]) -> None:
        self._backend.wait(columns)
        # Rows may have grown since the last chunk.
        if self._held and any(
            leaf.shape[1:] != columns.arrays[path].shape[1:] for path, leaf in self._held[0][1].items()
        ):
            self._close_segment()
        self._held.append((keys, columns.arrays))
        self._held_bytes += len(keys) * self._source.row_bytes
        if self._held_bytes + CHUNK_BYTES > SEGMENT_BYTES:
            self._close_segment()

    def _close_segment(self) -> None:
        if self._held:
            self._full.append(self._held)
            self._held, self._held_bytes = [], 0

    def _write(self) -> None:
        """Writes the segments that are whole."""
        for chunks in self._full:
            keys = np.concatenate([each for each, _ in chunks])
            arrays = {f"{_LEAF}{path}": np.concatenate([each[path] for _, each in chunks]) for path in chunks[0][1]}
            entry = self._writer.add(self._source.stem, {_KEYS: keys, **arrays})
            self._new.append(Segment(entry.name, int(keys[0]), int(keys[-1]) + 1, len(keys), entry.size_bytes))
            self.written_rows += len(keys)
            self.written_bytes += entry.size_bytes
        self._full = []


def _called(places: Places, order: Order, deadline_s: float) -> Roll:
    """All rows that there are, in order."""
    with Copying() as copying:
        with order.serve(order.enter(), deadline_s, _why_waiting):
            keys = places.keys(copying.later)
        return Roll(places, copying.settled(keys))


def _why_waiting() -> str:
    return "rows that were pushed before are still being ingested"


def _parted(known: Sequence[Segment], source: RowSource | FinalSource) -> tuple[list[Segment], deque[tuple[int, int]]]:
    """Which segments are kept, and what else is to be written: what is between two of those, and what comes after the last."""
    kept: list[Segment] = []
    ranges: deque[tuple[int, int]] = deque()
    first: int | None = None
    """Of what is written anew behind the last that is kept."""
    stop = 0
    for segment, is_kept in _worth_keeping(known, source):
        if not is_kept:
            first = segment.first if first is None else first
        else:
            if first is not None:
                ranges.append((first, stop))
            kept.append(segment)
            first = None
        stop = segment.stop
    ranges.append((stop if first is None else first, _NEVER))
    return kept, ranges


def _worth_keeping(known: Sequence[Segment], source: RowSource | FinalSource) -> list[tuple[Segment, bool]]:
    """Whether each segment is kept as it is; those of which nothing is live are left out."""
    small = 0
    for segment in reversed(known):
        if segment.size_bytes >= SEGMENT_BYTES // 2:
            break
        small += 1
    merged = len(known) - (small if small >= SMALL_SEGMENTS else 0)
    live = [(segment, source.live_between(segment.first, segment.stop)) for segment in known]
    # Where the oldest leave first, one segment at most is on its way out, and soon gone.
    least = 0.5 if source.any_may_leave else 0.0
    return [(each, rows >= least * each.rows and i < merged) for i, (each, rows) in enumerate(live) if rows]


def read_segments(reading: Reading, segments: Sequence[Segment]) -> Iterator[tuple[Keys, dict[str, NDArray[Any]]]]:
    """The numbers and the arrays of each segment."""
    for segment in segments:
        arrays = dict(reading.arrays(segment.file))
        keys = arrays.pop(_KEYS)
        yield keys, {name.removeprefix(_LEAF): array for name, array in arrays.items()}


def _tried(read: Callable[[], Columns[Any]]) -> Columns[Any] | BaseException:
    """What a lease's `read` made, or why it couldn't: it may be a writer who runs it."""
    try:
        return read()
    except Exception as error:
        return error
