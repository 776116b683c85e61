"""The Store: what actors, learners and trainers have to do with."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self

from conduit.backends import exchange
from conduit.clock import Clock, Task
from conduit.core.archive import Archive, Reading
from conduit.core.backend import Backend, Target
from conduit.core.batch import Batch
from conduit.core.checkpoint import Loader, Saved, Saver
from conduit.core.derived import Derived
from conduit.core.experience import Field, Tree
from conduit.core.halt import Halt, Waiters, check_timeout
from conduit.core.hook import Hook
from conduit.core.items import Item
from conduit.core.iteration import OnPolicyRollout
from conduit.core.ledger import Ledger
from conduit.core.limiter import Limiter
from conduit.core.moves import Migrated, is_same
from conduit.core.placement import Asked, Bytes, Placement, asked_kinds
from conduit.core.placer import Explanation
from conduit.core.priorities import PriorityUpdate
from conduit.core.rollout import ActorLanes, OffPolicyRollout, WhenFull
from conduit.core.sampling import Sampling
from conduit.core.schedule import Auto, Numbering, Schedule, asked_schedule
from conduit.core.semantics import Bounded, OnPolicy
from conduit.core.snapshot import Snapshot, StoredRows
from conduit.core.table import MAIN, LiveTable, Table
from conduit.core.trace import MOST_EVENTS, Trace
from conduit.core.whole import check_whole
from conduit.errors import (
    CancelledError,
    CapacityError,
    CheckpointWarning,
    ClosedError,
    MigrationError,
    PriorityError,
    SettingError,
    WaitTimeout,
)
from conduit.ports import Actor, Learner, PathIn, PathOut
from conduit.roster import ActorRoster, Roster
from conduit.settings import Settings
from conduit.topology.cluster import Topology
from conduit.wiring import Wiring, wire

CLOSING_S = 1.0
"""How long `close()` waits for the operators' threads."""

MOST_LANES = 1 << 24
"""Of an actor: more, and what is kept of each would be too much before it is noticed."""

_ON_DEMAND = 1
"""The stream of draws that `sample` uses, apart from the learners' batches."""


class Store:
    """Holds experience between actors and learners.

    - `backend`: "torch", "jax", "reference", or a Backend of your own.
    - `mode`: "off_policy" needs `capacity`, in rows; "on_policy" needs `rollout_unit`, the rows of an iteration (steps × lanes,
      over all actors), and takes `epochs` (1); "bounded" needs `capacity` and `max_staleness`, in policy versions: every row once,
      the oldest first. `batch_size`: rows of a batch, for each learner. `seed`: of all draws.
    - `sampler`: which rows a batch gets (`Uniform()` by default); `max_times_sampled`: how often a row can be drawn; `limiter`: keeps
      pushes and draws in step. `tables`: more such views of the same rows, by name. `remover`: which rows leave when the store is
      full: `Fifo()`, the oldest, by default; others only where rows stand alone. Off-policy.
    - `item`: what one entry of a batch is: `Row()`, `NStep`, `Sequence`, `Trajectory` or `Group`, started at a drawn row. `derive`: leaves
      made as batches are read, {"next_obs": Next("obs")}. Off-policy.
    - `fields`: what leaves must be like from the first push on, by the stored leaf's path ("obs", "obs/image"): {"obs": Field((84, 84),
      np.uint8)}; and which may grow, along an axis that has a name: Field(("h",), np.float32, grow="pad"), or "replace". Rows may then be
      as wide as the widest before, or wider: from the moment there is room for a wider push, be it taken in the end or not (with
      ingestion hooks, once it is taken), the store is of the wider form. A batch's leaf is as wide as the store's; `info.extents` and
      `info.padding_mask(path)` say what of each row is real. On-policy, rows grow with the first of an iteration. CapacityError where
      there is no room for the wider form: the push was not taken then, and the store goes on as it was. But what hooks make wider once
      the push has returned, or of several pushes, comes too late for that, and stops the store.
    - `ingestion`, `delivery`: hooks, in the order in which they run (paper Fig. 8).
    - `placement`: "auto", the fastest that fits; kinds to choose from, of "cpu_pageable", "cpu_pinned", "single_gpu", "shared_gpu" and
      "mixed"; an endpoint or several with equal shares, by name ("pageable", "device:3"), or a `Placement` with shares. What is to be
      chosen is so with the first row, for the learners that there are by then: pageable host where all take their batches on the host. When
      others come, rows move if that pays.
      `topology`: what to choose by, with its bandwidths: a `conduit.topology.Topology`, the path of a saved one that was measured on this
      machine, or a preset's name; by default it is measured when it is needed, which takes some seconds.
      `budgets`: bytes by tier, {"pageable": "24GiB"}, a device's for each device. `disk`: the folder of
      rows that are placed on "disk", made if need be (by default $CONDUIT_DISK, or the folder for temporary files).
    - `schedule`: None runs everything in line, a `Schedule` as it says: both are the same in every run. "auto", or `Auto` with caps, profiles
      the first iterations and chooses what makes them shortest, and again when that no longer holds; which rows a batch's draw sees then depends
      on what was measured. `exact`: every batch is drawn at its pull, after the latest priorities.
    - `inbox_units`: how many pushes may wait for an overlapped ingestion (64, or 4 · g_ing if that is more); `when_full`:
      whether one more blocks or is dropped and counted.
    - `timeout_s`: of every wait that isn't given its own; `math.inf` waits for ever. `clock`: the real one by default.

    SettingError, ScheduleError, UnitError or CapacityError name a setting that can't be, UnknownBackendError or
    MissingExtraError a backend that isn't there. Memory is taken with the first rows that are stored: CapacityError then. Only
    the finals that a `Next` needs take more as there are more of them, one for each live row that ended with one. Memory of
    large batches that is used again, up to 1 GiB, is in no budget.

    All methods may be called from several threads. What a hook or an operator fails with stops the store for good: it is
    raised by the next call of each port. Use the store as a context manager, or close it."""

    def __init__(
        self,
        *,
        backend: str | Backend[Any] = "torch",
        mode: Literal["off_policy", "on_policy", "bounded"] = "off_policy",
        batch_size: int,
        capacity: int | None = None,
        rollout_unit: int | None = None,
        epochs: int | None = None,
        max_staleness: int | None = None,
        sampler: Sampling | None = None,
        max_times_sampled: int | None = None,
        limiter: Limiter | None = None,
        tables: Mapping[str, Table] | None = None,
        remover: Sampling | None = None,
        item: Item | None = None,
        derive: Mapping[str, Derived] | None = None,
        fields: Mapping[str, Field] | None = None,
        seed: int = 0,
        ingestion: Sequence[Hook] = (),
        delivery: Sequence[Hook] = (),
        placement: Asked = "auto",
        budgets: Mapping[str, Bytes] | None = None,
        disk: str | PathLike[str] | None = None,
        topology: Topology | str | PathLike[str] | None = None,
        schedule: Schedule | Auto | Literal["auto"] | None = None,
        exact: bool = False,
        inbox_units: int | None = None,
        when_full: WhenFull = "block",
        timeout_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        settings = Settings(
            backend=backend if isinstance(backend, str) else None,
            mode=mode,
            batch_size=batch_size,
            capacity=capacity,
            rollout_unit=rollout_unit,
            epochs=epochs,
            max_staleness=max_staleness,
            sampler=sampler,
            max_times_sampled=max_times_sampled,
            limiter=limiter,
            tables=tables,
            remover=remover,
            item=item,
            derive=derive,
            seed=seed,
            schedule=asked_schedule(schedule),
            exact=exact,
            inbox_units=inbox_units,
            when_full=when_full,
            timeout_s=timeout_s,
            budgets=budgets,
            fields=fields,
        )
        self._open(settings, wire(settings, backend, ingestion, delivery, placement, disk, clock, topology))

    def _open(self, settings: Settings, wiring: Wiring) -> None:
        self._settings, self._wiring = settings, wiring
        self._clock, self._halt, self._ledger, self._order = wiring.clock, wiring.halt, wiring.ledger, wiring.order
        self._backend, self._buffer, self._rollout = wiring.backend, wiring.buffer, wiring.rollout
        self._semantics, self._switchboard = wiring.semantics, wiring.switchboard
        self._ports = self._halt.condition("ports")
        self._on_demand = 0
        self._actors = ActorRoster()
        self._pushers: weakref.WeakSet[Waiters] = weakref.WeakSet()
        """Of the actors that are there."""
        self._learners = Roster()
        self._on_demand_paths: dict[tuple[str, Target], PathOut] = {}
        self._asking: set[Learner] = set()
        """Those that `sample` made, while they wait."""
        self._saver = Saver(wiring.kept)
        self._saving = self._halt.condition("saves")
        self._is_saving = False
        self._restored: dict[str, Any] | None = None
        self._tasks: list[Task] = []
        # Operators' threads hold the parts, not the store: a store that nobody refers to any more is closed.
        self._finalizer = weakref.finalize(self, _halt_quietly, self._halt)
        self._finalizer.atexit = False
        if any(mode.overlap for mode in wiring.feasible.ingestion):
            self._tasks.append(self._clock.spawn(wiring.ingestion.run, "conduit-ingestion"))
        if wiring.scheduler is not None:
            self._tasks.append(self._clock.spawn(wiring.scheduler.run, "conduit-scheduler"))

    # Ports

    def actor(self, lanes: int = 1) -> Actor:
        """A new producer with `lanes` lanes."""
        check_whole("lanes", lanes, most=MOST_LANES, of="actor")
        self._halt.check()
        with self._ports:
            who = ActorLanes(*self._actors.claim(lanes), Waiters(self._halt))
            self._pushers.add(who.waiters)
            self._rollout.join(who)
        parts = self._wiring
        path = PathIn(
            self._halt, self._ledger, parts.signature, self._rollout, parts.ingestion, parts.timeout_s, self, self._free
        )
        return Actor(path, who)

    def learner(
        self,
        rank: int = 0,
        world: int = 1,
        *,
        table: str = MAIN,
        to: str | None = None,
        device: Any = None,
        sharding: Any = None,
    ) -> Learner:
        """Learner `rank` of `world` of a table, each made once. Batches come `to` "numpy", "torch" or "jax" (by default as the backend's
        own), on `device`, or for JAX split by `sharding` into one global array: a leaf with fewer axes by the sharding's first ones."""
        self._halt.check()
        live = self._table(table)
        target = Target(to or self._backend.framework, device, sharding)
        landing = self._backend.landing(target)
        with self._ports:
            self._learners.check(table, rank, world)
            schedule = self.schedule
            numbering = self._semantics.numbering(rank, world, schedule)
            self._wiring.placer.join(landing)
            path = self._wiring.path_out(live, target, f"outbox of learner {rank} of {table}", self)
            saved, first = self._learners.claim(table, rank, world, numbering, self.version)
            learner = Learner(path, numbering, schedule.overlap_del, rank, world, target, first)
            self._learners.add(table, learner)
            if saved is not None:
                learner.load(saved, None if self._buffer.schema is None else self._buffer.batch_schema)
            self._switchboard.join(learner)
            if any(mode.overlap for mode in self._wiring.feasible.delivery):
                self._tasks.append(self._clock.spawn(path.delivery.run, f"conduit-delivery-{rank}"))
            if self._wiring.mover.wants_thread():
                self._tasks.append(self._clock.spawn(self._wiring.mover.run, "conduit-placement"))
        return learner

    def sample(
        self,
        rows: int,
        *,
        table: str = MAIN,
        to: str | None = None,
        device: Any = None,
        sharding: Any = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """A batch of `rows` rows on demand, drawn now. It disturbs no learner's batches; but rows that a table gives only so many
        times, and what a limiter counts, are the same for both. Not on-policy."""
        if isinstance(self._semantics, OnPolicy):
            raise SettingError(
                "sample() draws off-policy; an on-policy store delivers each row exactly `epochs` times through learner.pull()"
            )
        check_whole("sample(rows)", rows)
        if rows > self._buffer.capacity:
            raise CapacityError(f"sample({rows}): the store holds {self._buffer.capacity} rows at most")
        live = self._table(table)
        live.check_sample(rows)
        target = Target(to or self._backend.framework, device, sharding)
        landing = self._backend.landing(target)
        with self._ports:
            number, self._on_demand = self._on_demand, self._on_demand + 1
            path = self._on_demand_paths.get((table, target))
            if path is None:
                self._wiring.placer.join(landing, on_demand=True)
                path = self._wiring.path_out(live, target, f"outbox on demand of {table}", self)
                self._on_demand_paths[table, target] = path
        path = replace(path, batch_size=rows, stream=_ON_DEMAND)
        asker = Learner(path, Numbering(0, 1, 1, None), False, 0, 1, target, number)
        self._asking.add(asker)
        try:
            with live.asked(rows, self._order.changed):
                return asker.pull(timeout_s=timeout_s)
        except (WaitTimeout, CancelledError):
            # Asked again, the same batch: unless somebody has asked for the next meanwhile.
            with self._ports:
                if self._on_demand == number + 1:
                    self._on_demand = number
            raise
        finally:
            self._asking.discard(asker)

    def cancel(self) -> int:
        """Ends every push, pull and `sample` that waits, with CancelledError: nothing of them was taken, and the store goes on. Returns
        how many. (`Actor.cancel` and `Learner.cancel` end their own.)"""
        return sum(each.cancel() for each in (*list(self._pushers), *self._learners, *list(self._asking)))

    # What the trainer tells the store

    def update_priorities(self, keys: Any, priorities: Any, *, table: str = MAIN) -> PriorityUpdate:
        """Sets the raw priorities of rows `keys` (insertion numbers from `batch.info.keys`); eps is added. Arrays of any
        framework, on any device; what is on a device is copied while the caller goes on. It is known to every draw that is
        asked for later, and to none before. `table`: the one whose sampler is told; a remover that goes by priorities is always.

        Keys of evicted rows are stale and change nothing. PriorityError for NaN, infinite or negative priorities, naming the
        key; UnknownKeyError for keys that were never issued; neither changes anything."""
        with self._ledger.port("priorities"):
            self._halt.check()
            self._table(table)
            told = self._wiring.priorities[table]
            if told is None:
                raise PriorityError(
                    f"update_priorities: the sampler of table {table!r} has no priorities; use sampler=conduit.Prioritized()"
                )
            return told.update(keys, priorities)

    def advance(self) -> int:
        """Counts the policy version of rows pushed from here on, and returns it.

        On-policy: ends the iteration, and drops its rows and what is staged of it; UnitError unless its rows were all pushed.
        Bounded: drops the rows that are too stale by it (`info()["stale_rows"]`)."""
        with self._ledger.port("advance"):
            self._halt.check()
            if isinstance(self._semantics, OnPolicy) and isinstance(self._rollout, OnPolicyRollout):
                with self._turn(), self._ports:
                    # In the turn, so that of two threads that advance at once one is refused.
                    self._rollout.check_whole()
                    for learner in self._learners:
                        learner.skip_to_iteration(self._rollout.version + 1)
                    self._buffer.drop()
                    version = self._rollout.advance()
                self._ledger.end_iteration()
                return version
            if not isinstance(self._semantics, Bounded):
                version = self._rollout.advance()
                # Draws that were asked for before are of the version before, whenever they are made.
                self._order.act(self._rollout.tell_draws)
                return version
            assert isinstance(self._rollout, OffPolicyRollout)
            with self._order.changed:
                version = self._rollout.advance_held(self._deadline(None))
                turn = self._order.enter_held()
            try:
                self._wiring.ingestion.catch_up()
            except BaseException:
                self._order.leave(turn)
                raise
            # No deadline: the version is counted, and what is ahead ends by itself.
            with self._order.serve(turn, None, _why_ingesting), self._order.changed:
                self._rollout.tell_draws()
                stale = self._buffer.older_than(version - self._semantics.max_staleness)
                self._rollout.stale_rows += self._wiring.tables[MAIN].exclude(stale)
                self._wiring.admission.changed()
            return version

    def migrate(
        self, placement: Asked | None = None, *, iterations: int = 1000, timeout_s: float | None = None
    ) -> Migrated:
        """Moves all rows to another placement while pushes and pulls go on (paper Appendix D); at the end these wait until what came meanwhile has
        been copied (`Migrated.pause_s`). Keys, draws, batches and checkpoints are the same as without it. Before the first row, it decides where
        rows will go. May be called from any thread; `timeout_s`: of each wait, for another move or a turn.

        `placement`: endpoints or a `Placement`, where the rows stay from then on. None: what the store would choose by now, as it does
        by itself when rows grow, when a learner comes for whom they lie badly, and, with an automatic schedule, now and then; rows are
        moved where that takes less time than it saves in `iterations` iterations.

        While it is under way, the rows have memory in both places: CapacityError names the endpoints where both don't fit, before
        anything is moved. MigrationError where it fails on the way: the rows are whole where they were, and the store goes on.
        ClosedError where the store is closed meanwhile."""
        self._halt.check()
        check_whole("iterations", iterations, of="migrate")
        timeout_s = check_timeout(self._wiring.timeout_s if timeout_s is None else timeout_s)
        parts = self._wiring
        if placement is not None:
            if asked_kinds(placement) is not None:
                raise SettingError(
                    f"migrate({placement!r}): expected endpoints or a conduit.Placement; migrate() goes to the best of what placement= allowed"
                )
            asked = Placement.of(placement, self._backend.endpoints())
            try:
                moved = parts.migrator.migrate(asked, timeout_s)
            except MigrationError:
                # Where only the old memory couldn't be given back, they are there all the same.
                if (storage := self._buffer.storage) is not None and is_same(storage.placement, asked):
                    parts.placer.fix(asked)
                raise
            parts.placer.fix(asked)
            return moved
        return parts.mover.weigh(iterations, timeout_s)

    @property
    def migrations(self) -> tuple[Migrated, ...]:
        """What the last moves of rows did, 64 at most, the latest last: those that were asked for, and those that rows made which grew."""
        return tuple(self._wiring.migrator.done)

    def explain(self, *, measure: bool = False) -> Explanation:
        """Where rows are, when the operators run, and why, with the predicted times of what else could be (paper §5.2, §6.3). Print it.
        Where the store was given no `topology` and has measured none, the bandwidths are assumed, and marked so; `measure` takes some seconds
        to measure them.

        Before the first row nothing is said of where rows are, which depends on its size: `conduit.plan` answers for any size."""
        self._halt.check()
        storage, scheduler, now = self._buffer.storage, self._wiring.scheduler, self.schedule
        if storage is None:
            unknown = "where they go depends on the size of a row, and there is none yet; conduit.plan(…) answers for any size"
            explained = Explanation(None, unknown, None)
        else:
            explained = self._wiring.placer.explain(
                storage.row_bytes, storage.placement, storage.bytes_by_endpoint(), measure
            )
        if scheduler is None:
            given = f"schedule: ingestion {now.ingestion}; delivery {now.delivery}; as it was given"
            return replace(explained, schedule=given)
        return replace(explained, schedule=scheduler.explain(), choice=scheduler.choice, history=scheduler.history)

    @contextmanager
    def preloading(self) -> Iterator[None]:
        """For the block, limiters hold nothing back: to fill the store beforehand. Of what is pushed they count only as much as the
        first batch needs, and nothing of what is drawn. A `Queue` counts what can be drawn; of rows beyond the store's capacity the
        oldest are lost, drawn or not. SettingError in mode "bounded", which loses none."""
        if isinstance(self._semantics, Bounded):
            raise SettingError(
                "preloading() lifts limiters, and mode='bounded' has none to lift: while capacity rows wait to be drawn, pushes wait"
            )
        with self._behind_all(self._deadline(None)):
            for table in self._wiring.tables.values():
                table.begin_preloading()
        try:
            yield
        finally:
            # No deadline: what is ahead ends by itself, and limiters must not stay lifted. A store that has stopped has none.
            if self._halt.reason is None:
                with self._behind_all(None):
                    for table in self._wiring.tables.values():
                        table.end_preloading(self._buffer.window)

    def rollout(self) -> AbstractContextManager[object]:
        """Marks the block as rollout in the ledger."""
        return self._ledger.mark("rollout")

    def update(self) -> AbstractContextManager[object]:
        """Marks the block as learner update in the ledger."""
        return self._ledger.mark("update")

    def trace(self, path: str | PathLike[str], *, events: int = MOST_EVENTS) -> Trace:
        """For the block, records what happens; at its end, also when it raises, `path` is a timeline (Chrome's trace-event JSON) that
        ui.perfetto.dev opens. Times are the store's clock's. `events`: the newest that are kept; how many older ones were dropped is in the
        file. TraceError where `path` can't be written, at once, or where a trace is being taken already."""
        self._halt.check()
        about = {"backend": self._backend.name, "mode": self._semantics.name, "schedule": asdict(self.schedule)}
        return Trace(path, self._ledger, events, about)

    def read(self, first: int = 0, most: int | None = None) -> StoredRows:
        """The next `most` live rows (by default all) from key `first` on, as they are stored, in host memory of their own. SchemaError
        before the first row."""
        check_whole("first", first, 0, of="read")
        count = self._buffer.capacity if most is None else most
        check_whole("most", count, of="read")
        self._halt.check()
        with self._turn():
            snapshot = Snapshot(self._buffer, self._backend, self._wiring.growth, first, count)
        return snapshot.rows()

    # What outlives it

    def save(self, path: str | PathLike[str], *, overwrite: bool = False, timeout_s: float | None = None) -> Saved:
        """Writes a checkpoint into the folder `path`: rows, priorities, links, counters, open lanes, and batches that are staged, as
        they are after all that was pushed, drawn and updated before this call. Again into the same folder, it writes only
        the rows that came since, beside what is kept of each row (some 10 to 40 bytes).

        Pushes and pulls go on meanwhile; at the end they wait while rows that came since the last pass over them are copied in memory
        (`Saved.paused_s`). What is kept of each row is copied afterwards, as it was then. The folder has the last whole checkpoint at any
        time, whatever happens to this process.

        CheckpointError where the folder can't be written, is being written by another store, or holds something else, be it
        another store's checkpoint, which `overwrite` replaces: nothing is changed then."""
        deadline_s = self._deadline(timeout_s)
        self._halt.check()
        with self._saving:
            self._halt.wait(self._saving, lambda: not self._is_saving, deadline_s, lambda: "another save is under way")
            self._is_saving = True
        try:
            content = {"settings": self._settings.pack(), "hooks": list(self._wiring.hook_names)}
            return self._saver.save(Archive(path), content, self._ports_state, overwrite, deadline_s)
        finally:
            with self._saving:
                self._is_saving = False
                self._saving.notify_all()

    @classmethod
    def restore(
        cls,
        path: str | PathLike[str],
        *,
        backend: str | Backend[Any] | None = None,
        capacity: int | None = None,
        sampler: Sampling | None = None,
        limiter: Limiter | None = None,
        tables: Mapping[str, Table] | None = None,
        fields: Mapping[str, Field] | None = None,
        ingestion: Sequence[Hook] = (),
        delivery: Sequence[Hook] = (),
        placement: Asked = "auto",
        budgets: Mapping[str, Bytes] | None = None,
        disk: str | PathLike[str] | None = None,
        topology: Topology | str | PathLike[str] | None = None,
        schedule: Schedule | Auto | Literal["auto"] | None = None,
        lanes: Literal["cut", "continue"] = "cut",
        example: Tree = None,
        timeout_s: float | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """A store that goes on from a checkpoint: with the same rows and keys, and the same stream of draws.

        What is None is as it was saved; where that store had hooks, or a sampler that is a function's or a class of your own,
        they must be given again. `backend` and `placement` may be others. `capacity`: in a smaller one the oldest rows are left out, of which
        a CheckpointWarning and `info()["restored"]` tell; draws go on exactly only with an equal one.
        `lanes`: "cut", since environments usually begin anew, ends every open lane; "continue" is for those that go on where they were: make
        the actors that weren't closed again then, in the same order. Learners of the same rank and world go on with the next batch, staged ones first.
        `example`: rows of the form that was pushed, leaves (n, *shape), needed only where they nest in nodes other than dicts, lists and
        tuples; SchemaError names the leaf that isn't as it was. `tables`: of the same names and `max_times_sampled`. `fields`: declares
        leaves anew, be it that one may grow from now on: SchemaError names the leaf that isn't so, SettingError one that could grow before and couldn't now.

        CheckpointError for what is no whole checkpoint, or one of a newer Conduit; SettingError for what must be given again."""
        if lanes not in ("cut", "continue"):
            raise SettingError(f"restore(lanes={lanes!r}): expected 'cut' or 'continue'")

        def made_from(reading: Reading) -> Self:
            loader = Loader(reading)
            settings = Settings.unpack(
                loader.content["settings"],
                str(path),
                sampler=sampler,
                limiter=limiter,
                tables=tables,
                backend=backend,
                declared=fields,
            )
            chosen = settings.backend if backend is None else backend
            assert chosen is not None
            settings = replace(
                settings,
                backend=chosen if isinstance(chosen, str) else None,
                capacity=settings.capacity if capacity is None else capacity,
                budgets=settings.budgets if budgets is None else budgets,
                schedule=settings.schedule if schedule is None else asked_schedule(schedule),
                timeout_s=settings.timeout_s if timeout_s is None else timeout_s,
            )
            store = cls.__new__(cls)
            store._open(settings, wire(settings, chosen, ingestion, delivery, placement, disk, clock, topology))
            try:
                store._take_up(loader, archive, lanes == "continue", example)
            except BaseException:
                store.close()
                raise
            return store

        # From the start again if another checkpoint takes its place meanwhile.
        archive = Archive(path)
        return archive.read(made_from)

    # What the store tells

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def version(self) -> int:
        """The policy version whose rows are being taken; 0 at first."""
        return self._rollout.version

    @property
    def schedule(self) -> Schedule:
        """The one that the store follows, or, where that is chosen, is about to."""
        return self._switchboard.schedule

    def __len__(self) -> int:
        """How many rows are live: ingested and not evicted."""
        return len(self._buffer)

    def can_insert(self, rows: int = 1) -> bool:
        """Whether a push of `rows` rows, all of the running version, would be taken now, without a wait."""
        check_whole("can_insert(rows)", rows)
        admission = self._wiring.admission
        with self._order.changed:
            return (
                self._rollout.has_room(rows)
                and admission.is_idle
                and admission.may_insert(rows)
                and _is_allowed(lambda: admission.check(rows))
            )

    def can_sample(self, rows: int | None = None, *, table: str = MAIN) -> bool:
        """Whether a batch of `rows` rows could be drawn now; by default a learner's next, together with those that are prepared with it
        (g_del). Rows that are still being ingested, or gathered for it (g_ing), don't count, though a pull would have them ingested."""
        live = self._table(table)
        wanted = self._semantics.batch_size if rows is None else rows
        check_whole("can_sample(rows)", wanted)
        number = min((learner.number for learner in self._learners.of(table).values()), default=0)
        together = int(self.schedule.g_del or 1) if rows is None and not isinstance(self._semantics, OnPolicy) else 1
        return _is_allowed(lambda: live.check_sample(wanted)) and self._order.between_turns(
            lambda: live.missing(self._buffer.window, wanted, number, together) is None, False
        )

    def why_blocked(self) -> str:
        """Who waits for the store right now (the thread's name), how long, what for, and what would end it; a line each. Empty if
        nobody does."""
        now_s = self._clock.now()
        with self._order.changed:
            pushes = sorted(
                (each for actor in list(self._pushers) for each in actor.now()), key=lambda each: each.since_s
            )
            lines = [f"{each.who} has waited {now_s - each.since_s:.1f} s to push: {each.why()}" for each in pushes]
        for learner in [*self._learners, *self._asking]:
            lines += learner.why_waiting(now_s)
        return "\n".join(lines)

    def info(self) -> dict[str, Any]:
        """Counters and settings, as plain values. `held_rows`: those that wait until they are enough to replace narrower ones. A
        table's `inserted` and `sampled` are what its limiter goes by: without what was pushed and drawn while preloading. `schedule_status`:
        "given", or what an automatic schedule is doing; `schedules_chosen`: how often one was chosen so far."""
        schema, tables, scheduler = self._buffer.schema, self._wiring.tables, self._wiring.scheduler
        told = [each for each in self._wiring.priorities.values() if each is not None]
        with self._order.changed:
            self._order.run_due()
        return {
            "backend": self._backend.name,
            "mode": self._semantics.name,
            "rows": len(self),
            "capacity": self._buffer.capacity,
            "drawable_rows": tables[MAIN].size(self._buffer.window),
            "inserted": self._buffer.inserted,
            "held_rows": 0 if self._wiring.growth is None else self._wiring.growth.held_rows,
            "dropped_rows": self._rollout.dropped_rows,
            "stale_rows": self._rollout.stale_rows,
            "unfinished_groups": None if self._buffer.lineage is None else self._buffer.lineage.unfinished_groups,
            "version": self.version,
            "row_bytes": schema.row_bytes if schema else None,
            "schema": str(schema) if schema else None,
            "bytes_by_endpoint": self._buffer.bytes_by_endpoint(),
            "priorities": {"applied": sum(each.applied for each in told), "stale": sum(each.stale for each in told)},
            "staged_batches": {rank: each.staged for rank, each in self._learners.of(MAIN).items()},
            "tables": {name: self._table_info(live) for name, live in tables.items()},
            "restored": self._restored and {**self._restored, "dropped_batches": self._learners.dropped_batches},
            "schedule": asdict(self.schedule),
            "schedule_status": "given" if scheduler is None else scheduler.status,
            "schedules_chosen": 0 if scheduler is None else scheduler.profiles,
        }

    # Life

    def close(self) -> None:
        """Ends every thread and wait, and releases the rows. Batches that were handed over stay. May be called twice."""
        self._halt.now_because(ClosedError("the store is closed"))
        self._ledger.stop()
        deadline_s = self._clock.now() + CLOSING_S
        ended = [task.join(deadline_s) for task in self._tasks]
        self._tasks = []
        self._finalizer.detach()
        if all(ended):
            self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ports_state(self) -> tuple[dict[str, Any], Callable[[float], None]]:
        """In a turn: what a checkpoint keeps of the ports, and what makes it whole when the turn is over."""
        told = {name: [each.applied, each.stale] for name, each in self._wiring.priorities.items() if each is not None}
        learners, finish = self._learners.state(exchange.to_numpy)
        state = {
            "actors": self._actors.state(),
            "on_demand": self._on_demand,
            "priorities": told,
            "learners": learners,
        }
        return state, finish

    def _take_up(self, loader: Loader, archive: Archive, goes_on: bool, example: Tree) -> None:
        """Goes on from a checkpoint, in a store that was just made."""
        hooks, saved_hooks = self._wiring.hook_names, loader.content["hooks"]
        if hooks != saved_hooks:
            raise SettingError(
                f"restore({archive.path!r}): the store that was saved had the hooks {saved_hooks}; got {hooks}. Give the same, in "
                "ingestion= and delivery="
            )
        ports = loader.state["ports"]
        self._saver.owner = loader.owner
        left = None if goes_on else range(ports["actors"]["lanes"])
        dropped = loader.load(self._wiring.kept, left, example)
        self._saver.knows(archive, loader.known)
        if goes_on:
            self._actors.load(ports["actors"])
        self._on_demand = ports["on_demand"]
        for name, (applied, stale) in ports["priorities"].items():
            told = self._wiring.priorities.get(name)
            if told is not None:
                told.applied, told.stale = applied, stale
        self._learners.load(ports["learners"])
        self._restored = {"path": archive.path, "rows": len(self), "dropped_rows": dropped}
        if dropped:
            warnings.warn(
                f"{archive.path}: capacity={self._buffer.capacity} has no room for the {dropped} oldest rows of the checkpoint; they were left out",
                CheckpointWarning,
                stacklevel=5,
            )

    def _table_info(self, live: LiveTable) -> dict[str, Any]:
        with self._order.changed:
            at = replace(live.counted(self._buffer.window))
        return {
            "sampler": str(live.settings.sampler),
            "limiter": None if live.limiter is None else str(live.limiter),
            "max_times_sampled": live.settings.max_times_sampled,
            "prioritized": self._wiring.priorities[live.name] is not None,
            "drawable_rows": at.size,
            "inserted": at.inserted,
            "sampled": at.sampled,
            "lost_rows": live.lost_rows,
        }

    def _table(self, name: str) -> LiveTable:
        tables = self._wiring.tables
        if name not in tables:
            raise SettingError(f"table={name!r}: the store's tables are {', '.join(map(repr, tables))}")
        return tables[name]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A turn, in which nothing else of the store changes."""
        turn = self._order.enter()
        with self._order.serve(turn, self._deadline(None), _why_ingesting):
            yield

    @contextmanager
    def _behind_all(self, deadline_s: float | None) -> Iterator[None]:
        """A turn behind all that was pushed, what is gathered for a group included. Nobody asks the tables meanwhile."""
        self._rollout.flush(math.inf if deadline_s is None else deadline_s)
        self._wiring.ingestion.catch_up()
        with self._order.serve(self._order.enter(), deadline_s, _why_ingesting), self._order.changed:
            yield
            # Limiters may say something else than before.
            self._wiring.admission.changed()

    def _free(self, lanes: range) -> None:
        """An actor is closed: its lanes are cut before whatever is pushed from now on, so another may have them."""
        with self._ports:
            self._actors.free(lanes)

    def _deadline(self, timeout_s: float | None) -> float:
        return self._halt.deadline_s(self._wiring.timeout_s if timeout_s is None else timeout_s)


def _is_allowed(check: Callable[[], None]) -> bool:
    """Whether `check` raises no SettingError."""
    try:
        check()
    except SettingError:
        return False
    return True


def _why_ingesting() -> str:
    return "rows that were pushed before are still being ingested"


def _halt_quietly(halt: Halt) -> None:
    # On a thread of its own: the garbage collector may be running on one that holds a condition right now.
    reason = ClosedError("the store was dropped without close()")
    threading.Thread(target=halt.now_because, args=(reason,), name="conduit-closing", daemon=True).start()
