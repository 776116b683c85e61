"""Migration: rows move to another placement while training goes on (paper Appendix D, Alg. 2).

New memory is taken beside the old, and what there is is copied into it, a chunk at a time, while rows come, leave and are drawn. Then, in
one turn of the store's order, the reads that are under way are let finish, what came meanwhile is copied, and the new memory takes the
place of the old, which is given back. Until then the old one is whole, and whatever fails leaves the store as it was.

Rows never change and are known by their keys, which are copied in ascending order: so the last that is written to a slot is the one
that is live there, whoever was there when it was read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from conduit.core.backend import Backend, Columns, Move
from conduit.core.buffer import ExperienceBuffer
from conduit.core.experience import Schema
from conduit.core.halt import Halt
from conduit.core.moves import FinalSeries, Migrated, Part, RowSeries, Series, is_same, joint, least_moves, least_rows
from conduit.core.order import Order
from conduit.core.placement import Placement
from conduit.core.ring import Layout
from conduit.core.storage import Storage
from conduit.core.transfer_plan import TransferPlan
from conduit.errors import ClosedError, ConduitError, MigrationError
from conduit.topology.cluster import Edge

CHUNK_BYTES = 4 << 20
"""So much of each shard is read at once: who pushes or pulls may have to wait for as long as that takes."""
_FASTER = 16
"""Devices among themselves move so much more in that time; less, and what a transfer costs before its first byte would count most."""
_CHUNKS = 32
"""Of few rows no chunk is more than this part: two are under way at a time, in memory that nobody has set aside."""
_SMALL_BYTES = 1 << 16
"""This much is nowhere too much."""
_MOST_PASSES = 64
MOST_KEPT = 64
"""Moves that are remembered."""


class Migrator:
    """Moves the rows of one buffer. One move is under way at a time."""

    def __init__(
        self,
        backend: Backend[Any],
        buffer: ExperienceBuffer,
        order: Order,
        halt: Halt,
        chunk_bytes: int = CHUNK_BYTES,
        began: Callable[[str], None] = lambda phase: None,
        plan_of: Callable[[Placement, Placement, int], TransferPlan | None] = lambda before, after, row_bytes: None,
        passed: Callable[[str, float, Mapping[str, Any]], None] = lambda name, began_s, told: None,
    ) -> None:
        """`began`: is told of each phase as it begins; what it raises ends the move. `plan_of`: makes the plan of a move that comes without,
        where it can. `passed`: is told of each phase, of the pause and of the whole as it ends: its name, when it began, and what is to be
        said of it."""
        self.backend, self.buffer, self.order, self.halt = backend, buffer, order, halt
        self.chunk_bytes, self.began, self.passed, self._plan_of = chunk_bytes, began, passed, plan_of
        self.changed = halt.condition("migration")
        self.done: deque[Migrated] = deque(maxlen=MOST_KEPT)
        """The last moves, those included that growth has made."""
        self._busy = False

    def migrate(
        self, placement: Placement, timeout_s: float, plan: TransferPlan | None = None, schema: Schema | None = None
    ) -> Migrated:
        """All rows are at `placement` when this returns, and nothing else has changed: no key, no draw, no byte of a batch. Before the first
        row it says where rows will go. May be called from any thread; not in a turn.

        `plan`: who sends how many rows to whom, and how fast; without one, as little as possible is moved, as fast as it goes. `schema`: of
        the same leaves, each axis as long or longer; rows are of this form from then on, zero in what they didn't have.

        CapacityError where there is no room for both, before anything is moved; WaitTimeout where another move, or what is ahead of a turn,
        takes longer than `timeout_s`; MigrationError where it failed on the way, be it a device that is lost; ClosedError when the
        store is closed. The rows are whole where they were then."""
        with self._alone(timeout_s):
            while True:
                with self.order.serve(self.order.enter(), self.halt.deadline_s(timeout_s), why_ingesting):
                    storage = self.buffer.storage
                    if storage is None:
                        self.buffer.place = lambda schema, instead: placement
                if storage is None:
                    return Migrated(None, placement)
                form = storage.schema if schema is None else joint(storage.schema, schema)
                if form is storage.schema and is_same(storage.placement, placement):
                    return Migrated(storage.placement, placement, len(self.buffer))
                way = plan or self._plan_of(storage.placement, placement, storage.row_bytes)
                try:
                    return _Move(self, storage, placement, way, form).run(timeout_s)
                except _SupersededError:
                    """Rows grew in a turn meanwhile: from there again."""

    def migrate_in_turn(self, placement: Placement, schema: Schema) -> Migrated:
        """The same at once, for a caller who is in a turn: it takes as long as all rows take."""
        storage = self.buffer.storage
        assert storage is not None
        return _Move(self, storage, placement, None, joint(storage.schema, schema)).run_in_turn()

    def remake(self, placement: Placement, schema: Schema) -> None:
        """In a turn, while no row is live: those to come are of this schema, and go there. CapacityError where there is no room: nothing
        has changed then."""
        buffer = self.buffer
        old, layout = buffer.storage, Layout(buffer.capacity, placement.shares)
        assert old is not None
        buffer.leases.settle(None)
        buffer.check_room(schema, placement)
        old.close()
        try:
            new = buffer.other_storage(schema, placement, layout, beside=False)
        except BaseException:
            same = buffer.other_storage(old.schema, old.placement, old.layout, beside=False)
            buffer.rebind(same.numbered_on(old))
            raise
        buffer.rebind(new.numbered_on(old))

    @contextmanager
    def _alone(self, timeout_s: float) -> Iterator[None]:
        deadline_s, mine = self.halt.deadline_s(timeout_s), False
        # A Ctrl-C may come anywhere.
        try:
            with self.changed:
                self.halt.wait(
                    self.changed, lambda: not self._busy, deadline_s, lambda: "another migration is under way"
                )
                self._busy = mine = True
            yield
        finally:
            if mine:
                with self.changed:
                    self._busy = False
                    self.changed.notify_all()


class _SupersededError(Exception):
    """Rows were moved in somebody's turn, so that there is nothing to move any more where they were."""


class _Move:
    """One migration."""

    def __init__(
        self, migrator: Migrator, old: Storage, placement: Placement, plan: TransferPlan | None, schema: Schema
    ) -> None:
        self._migrator, self._buffer, self._backend = migrator, migrator.buffer, migrator.backend
        self._halt, self._now = migrator.halt, migrator.halt.clock.now
        self._old, self._placement, self._plan, self._schema = old, placement, plan, schema
        moves = least_moves(old, placement) if plan is None else plan.moves
        self._rates = {} if plan is None else {edge: plan.bytes_per_s(edge) for edge, rows in moves.items() if rows}
        self._layout = old.layout.relaid(
            np.array([[moves.get((i, j), 0) for j in placement.endpoints] for i in old.placement.endpoints], np.float64)
        )
        self._new: Storage | None = None
        self._series: list[Series] = []
        self._began_s = self._now()
        self._phases: dict[str, float] = {}
        self._sent: dict[Edge, int] = {}
        """Bytes along each edge, so far."""
        self._copied = self._delta = self._rows = 0
        self._finals_bytes = 0
        """Of those that had to go to another memory."""
        self._pause_s = 0.0
        self._under_way: deque[tuple[list[Columns[Any]], list[Columns[Any]]]] = deque()
        """Chunks, at most two: what was read of each, as it goes to its place, and what of that has memory set aside on its way."""

    def run(self, timeout_s: float) -> Migrated:
        order = self._migrator.order
        with self._or_as_it_was():
            self._take_memory()
            with self._phase("precopy"):
                for series in self._series:
                    self._catch_up(series, timeout_s)
                self._wait()
            turn = None
            try:
                with self._phase("gate"):
                    turn = order.enter()
                    order.begin(turn, self._halt.deadline_s(timeout_s), why_ingesting)
                self._switch()
            finally:
                if turn is not None:
                    order.leave(turn)
        return self._released()

    def run_in_turn(self) -> Migrated:
        with self._or_as_it_was():
            self._take_memory()
            self._switch()
        return self._released()

    def _take_memory(self) -> None:
        with self._phase("memory"):
            self._new = new = self._buffer.other_storage(self._schema, self._placement, self._layout)
        old = self._old
        self._series.append(RowSeries(self._backend, self._buffer, old, new))
        if old.finals is not None and new.finals is not None:
            self._series.append(FinalSeries(self._backend, old.finals, new.finals))

    def _catch_up(self, series: Series, timeout_s: float) -> None:
        """Copies what there is while the store goes on, until a pass has little to do, or leaves more than half of what it had."""
        left = series.left()
        for _ in range(_MOST_PASSES):
            stop = series.stop
            while series.next < stop and self._chunk(series, timeout_s):
                pass
            before, left = left, series.left()
            if before * series.row_bytes <= _SMALL_BYTES or left > before // 2:
                return

    def _most(self, series: Series) -> int:
        """Rows of a chunk."""
        part = max(_SMALL_BYTES, len(self._buffer) * series.row_bytes // _CHUNKS)
        on_devices = not any(at.is_host for at in (*self._old.placement.endpoints, *self._placement.endpoints))
        each = self._migrator.chunk_bytes * (_FASTER if on_devices else 1)
        size = min(each * len(self._old.shards), part)
        return max(1, size // max(1, series.row_bytes))

    def _chunk(self, series: Series, timeout_s: float) -> bool:
        """Copies the next ones; whether there were any."""
        self._keep_pace()
        order = self._migrator.order
        with order.serve(order.enter(), self._halt.deadline_s(timeout_s), why_ingesting):
            self._check_superseded()
            parts = series.take(self._most(series))
        if not parts:
            return False
        try:
            # Without a lease: who comes into a slot meanwhile is still to be copied, after what is copied here.
            columns = [part.read() for part in parts]
        except ClosedError:
            self._check_superseded()
            raise
        self._copied += self._bring(parts, columns)
        return True

    def _keep_pace(self) -> None:
        """Waits until what has been sent may have arrived, by the rates that the plan gives each stream."""
        if not self._rates:
            return
        due_s = self._began_s + max((self._sent.get(edge, 0) / rate for edge, rate in self._rates.items()), default=0.0)
        with self._migrator.changed:
            self._migrator.changed.wait_for(lambda: self._halt.reason is not None, due_s)
        self._halt.check()

    def _bring(self, parts: Sequence[Part], columns: list[Columns[Any]]) -> int:
        """What was read of each part is put where it goes, all of it travelling at once; how many bytes."""
        # Between host tiers the write is the copy.
        far = [i for i, part in enumerate(parts) if part.crosses and not all(at.is_host for at in part.edge)]
        copies = self._backend.transfer([Move(columns[i], parts[i].edge[1]) for i in far])
        self._under_way.append((columns, copies))
        for i, copy in zip(far, copies, strict=True):
            columns[i] = copy
        if len(self._under_way) > 1:
            self._end_oldest()
        for i, part in enumerate(parts):
            if part.widened is not None:
                columns[i] = self._backend.widen(columns[i], part.widened)
            part.put(columns[i])
            self._sent[part.edge] = self._sent.get(part.edge, 0) + part.size_bytes
        return sum(part.size_bytes for part in parts)

    def _end_oldest(self) -> None:
        """Returns when the oldest chunk that is under way has come, and gives its memory back."""
        for each in self._under_way[0][0]:
            self._backend.wait(each)
        for copy in self._under_way.popleft()[1]:
            self._backend.release(copy)

    def _switch(self) -> None:
        """In a turn: copies what is left, and all is in the new memory from here on."""
        closed_s = self._now()
        self._check_superseded()
        with self._phase("drain"):
            self._buffer.leases.settle(None)
        with self._phase("delta"):
            for series in self._series:
                while parts := series.take(self._most(series)):
                    self._delta += self._bring(parts, [part.read() for part in parts])
            self._wait()
        with self._phase("rebind"):
            assert self._new is not None
            self._rows = len(self._buffer)
            if (finals := self._buffer.finals) is not None and finals.at != self._placement.endpoints[0]:
                self._finals_bytes = (finals.stop - finals.first) * finals.row_bytes
            self._buffer.rebind(self._new)
        self._pause_s = self._now() - closed_s
        self._migrator.passed("pause", closed_s, {"rows": self._rows, "bytes": self._delta})

    def _wait(self) -> None:
        """Returns when all that was copied is there; else a device that is lost would be missed."""
        assert self._new is not None
        while self._under_way:
            self._end_oldest()
        self._new.wait()

    def _check_superseded(self) -> None:
        if self._buffer.storage is not self._old:
            raise _SupersededError

    @contextmanager
    def _or_as_it_was(self) -> Iterator[None]:
        """What the block fails with leaves the rows where they were, and takes no memory."""
        try:
            yield
        except BaseException as error:
            # A Ctrl-C may have come when the rows had moved already.
            unused = self._old if self._new is not None and self._buffer.storage is self._new else self._new
            copies = [partial(self._backend.release, copy) for _, each in self._under_way for copy in each]
            _give_back([*copies, *([] if unused is None else [unused.close])], error)
            if isinstance(error, ConduitError | _SupersededError) or not isinstance(error, Exception):
                raise
            raise MigrationError(
                f"rows can't be moved to {_named(self._placement)}: {type(error).__name__} was raised on the way: {error}. Nothing was changed: "
                f"they are where they were, at {_named(self._old.placement)}"
            ) from error

    def _released(self) -> Migrated:
        """Gives the old memory back, and tells of it all."""
        old, share = self._old, self._rows / self._layout.capacity
        try:
            with self._phase("release"):
                old.close()
        except Exception as error:
            raise MigrationError(
                f"rows were moved to {_named(self._placement)}, and are whole there; but the memory that they had, at {_named(old.placement)}, "
                f"may not have been given back: {type(error).__name__}: {error}"
            ) from error
        migrated = Migrated(
            before=old.placement,
            after=self._placement,
            rows=self._rows,
            moved_bytes=sum(size for (source, to), size in self._sent.items() if source != to),
            least_bytes=round(share * old.row_bytes * least_rows(old, self._placement, self._layout))
            + self._finals_bytes,
            precopied_bytes=self._copied,
            delta_bytes=self._delta,
            pause_s=self._pause_s,
            seconds=self._now() - self._began_s,
            predicted_s=self._predicted_s(),
            phases=self._phases,
        )
        self._migrator.done.append(migrated)
        told = {"rows": migrated.rows, "bytes": migrated.moved_bytes, "to": _named(self._placement)}
        self._migrator.passed("migration", self._began_s, told)
        return migrated

    def _predicted_s(self) -> float | None:
        plan, new = self._plan, self._new
        return None if plan is None or new is None else plan.move_s(new.row_bytes) * self._rows / plan.rows

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._migrator.began(name)
        began_s = self._now()
        yield
        self._phases[name] = self._now() - began_s
        self._migrator.passed(name, began_s, {})


def why_ingesting() -> str:
    return "rows that were pushed before are still being ingested"


def _give_back(releases: Sequence[Callable[[], None]], because: BaseException) -> None:
    try:
        with ExitStack() as each:
            for release in releases:
                each.callback(release)
    except Exception as error:
        because.add_note(f"Some memory may not have been given back: {error!r}")


def _named(placement: Placement) -> str:
    return ", ".join(map(str, placement.endpoints))
