"""Stores with limiters under a thousand interleavings: producers and consumers come, go and die, and what is alive goes on."""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conduit
from conduit.clock import VirtualClock
from conduit.core import limiter as limiters
from conduit.core.admission import Admission
from conduit.core.delivery import Delivery
from conduit.core.rollout import OffPolicyRollout
from conduit.core.table import LiveTable
from conduit.errors import CancelledError, ClosedError, DeadlockError, HookError, OperatorError, WaitTimeout

SEEDS = 1000
BLOCKS = 8
MOST_PUSHED, MOST_SAMPLED = 3, 5
"""Rows of the largest push, entries of the largest `sample`."""
KINDS = ("queue", "ratio", "min size", "two tables", "late rows", "late queue", "stack", "bounded")
ONCE = ("queue", "stack", "bounded", "late queue")
"""Kinds whose main table gives each row once."""


class PlannedError(Exception):
    """What a hook raises where the plan says so."""


@dataclass(frozen=True)
class Plan:
    """What happens in one simulation, all of it drawn from the seed."""

    kind: str
    settings: dict[str, Any]
    actors: int
    world: int
    dying: float
    """How likely an actor, or a learner, is one that leaves early."""
    samples: bool
    drops: bool
    troubles: int
    """How often something is cancelled, asked or preloaded from outside."""
    preloads: bool
    saves: bool
    fails_at: int | None
    timeouts: tuple[float, ...]
    think_s: float

    @classmethod
    def of(cls, seed: int) -> Plan:
        r = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        batch = r.choice([1, 2, 4])
        drops = r.random() < 0.15
        overlaps = kind != "bounded" and r.random() < 0.5
        schedule = conduit.Schedule(
            r.random() < 0.5, r.choice([1, 1, 2, 3]), overlaps, r.choice([1, 2]) if kind != "bounded" else 1
        )
        preloads = kind in ("ratio", "min size", "late rows") and r.random() < 0.3
        return cls(
            kind=kind,
            settings={
                "batch_size": batch,
                "schedule": schedule,
                "inbox_units": r.choice([3, 64]),
                "when_full": "drop" if drops else "block",
                "seed": seed,
                **_settings_of(kind, r, batch * int(schedule.g_del or 1)),
            },
            actors=r.choice([1, 2, 3]),
            world=r.choice([1, 2]),
            dying=r.choice([0.0, 0.5, 1.0]),
            samples=r.random() < 0.4,
            drops=drops,
            troubles=r.choice([0, 4, 12]),
            preloads=preloads,
            saves=r.random() < 0.05,
            fails_at=r.randrange(1, 12) if r.random() < 0.08 else None,
            timeouts=r.choice([(math.inf,), (math.inf, 0.004), (0.0, 0.004, 1.0)]),
            think_s=r.choice([0.0, 0.002, 0.02]),
        )

    @property
    def late(self) -> bool:
        return self.kind.startswith("late")


def _settings_of(kind: str, r: random.Random, drawn: int) -> dict[str, Any]:
    """`drawn`: entries that are drawn together."""
    most = max(drawn, MOST_SAMPLED)
    queue = conduit.Queue(r.randrange(MOST_PUSHED + most - 1, 13))
    if kind == "queue":
        return {"capacity": 12, "sampler": conduit.Fifo(), "max_times_sampled": 1, "limiter": queue}
    if kind == "stack":
        settings = {"capacity": 12, "sampler": conduit.Lifo(), "max_times_sampled": 1, "limiter": queue}
        return settings | {"remover": r.choice([conduit.Lifo(), conduit.Uniform(), conduit.MinHeap()])}
    if kind == "min size":
        return {"capacity": 16, "limiter": conduit.MinSize(r.choice([1, 6, 16]))}
    if kind == "bounded":
        return {"mode": "bounded", "capacity": r.choice([8, 16]), "max_staleness": r.choice([0, 1, 2])}
    late = {"item": conduit.NStep(3, 0.9), "derive": {"next_obs": conduit.Next("obs")}}
    if kind == "late queue":
        return {"capacity": 32, "sampler": conduit.Fifo(), "max_times_sampled": 1, "limiter": queue, **late}
    ratio = r.choice([0.5, 1, 2, 3])
    wide = (MOST_PUSHED * ratio + most) / 2 + r.choice([0, 5])
    settings = {
        "capacity": r.choice([16, 32]),
        "limiter": conduit.SampleToInsertRatio(ratio, r.choice([1, drawn, 6]), wide),
        "sampler": r.choice([conduit.Uniform(), conduit.Prioritized(), conduit.WithoutReplacement()]),
        "max_times_sampled": r.choice([None, 6]),
    }
    if kind == "two tables":
        return {**settings, "tables": {"once": conduit.Table(conduit.Fifo(), 1, queue)}}
    return {**settings, **(late if kind == "late rows" else {})}


@dataclass
class Account:
    """What one table was seen to do."""

    published: int = 0
    drawn: int = 0
    keys: list[int] = field(default_factory=list)
    """In the order in which they were drawn."""
    delivered: list[conduit.Batch] = field(default_factory=list)


class Simulation:
    def __init__(self, seed: int, folder: Path) -> None:
        self.plan = Plan.of(seed)
        self.clock = VirtualClock(seed, max_events=100_000)
        self.random = random.Random(seed + 1)
        self.folder = folder / str(seed)
        self.hook_runs = 0
        self.hook_failed = self.over = False
        self.accepted: list[tuple[int, int]] = []
        """(lane, row) of what the store took."""
        self.left_out = 0
        """Rows of pushes that it didn't: those that it dropped, or that went stale while they waited."""
        self.attempted = 0
        self.pending = 0
        self.order_version = 0
        """As of the order: counted where `advance` has its place in it."""
        self.errors: list[BaseException] = []
        self.pushes: dict[int, int] = {}
        self.pulls: dict[tuple[str, int], int] = {}
        self.waits: list[object] = []
        self.accounts: dict[str, Account] = {}
        self.actors: list[conduit.Actor] = []
        self.learners: list[tuple[str, conduit.Learner]] = []
        self.cancelled = 0

    def run(self) -> Simulation:
        baton = self.clock._baton
        jump = baton._jump

        def jump_when_nobody_sleeps_on() -> None:
            forgotten = self._forgotten()
            if forgotten:
                baton._error = AssertionError(forgotten)
            else:
                jump()

        baton._jump = jump_when_nobody_sleeps_on
        self.clock.run(self._main)
        return self

    def _forgotten(self) -> str:
        """Who could go on, now that all wait; empty if nobody could."""
        if not self.accounts:
            return ""
        parts, order = self.store._wiring, self.store._order
        if order._serving is None and any(turn.ready is not None and turn.ready() for turn in order._turns):
            return "a draw could go on"
        rollout, waiting = parts.rollout, parts.admission._queue
        assert isinstance(rollout, OffPolicyRollout)
        if not waiting or not rollout._inbox.free or not rollout._has_room():
            return ""
        if parts.admission.may_insert(waiting[0].rows):
            return "a push could go on"
        # Between an `advance` and its place in the order, stale rows lie behind others that are about to be so, and take their places.
        advances = self.plan.kind == "bounded" and self.order_version != self.store.version
        if self.plan.kind in ("queue", "stack", "bounded") and not advances:
            main = self.tables["main"]
            assert isinstance(main.limiter, limiters.Queue)
            if main.size(parts.buffer.window) + self.pending + waiting[0].rows <= main.limiter.max_size:
                return "a push waits, and there is room in the queue"
        return ""

    def _main(self) -> None:
        plan = self.plan
        self.changed = self.clock.condition("simulation")
        hooks = [self._hook()] if plan.fails_at is not None or self.random.random() < 0.2 else []
        with conduit.Store(
            backend="reference", clock=self.clock, timeout_s=math.inf, ingestion=hooks, **plan.settings
        ) as self.store:
            self.tables = self.store._wiring.tables
            self.accounts = {name: Account() for name in self.tables}
            self._watch()
            works: list[Callable[[], None]] = [lambda i=i: self._act(i) for i in range(plan.actors)]
            for table in self.tables:
                works += [lambda t=table, r=rank: self._learn(t, r) for rank in range(plan.world)]
            works += [self._sample] * plan.samples + [self._trouble] * bool(plan.troubles)
            works += [self._advance] * (plan.kind == "bounded")
            tasks = [self.clock.spawn(self._guarded(work), f"work-{i}") for i, work in enumerate(works)]
            with self.changed:
                self.changed.wait_for(lambda: bool(self.errors) or self._has_gone_on())
            self.over = True
            while any(task.alive() for task in tasks):
                for port in [*self.actors, *(learner for _, learner in self.learners), *self._samplers()]:
                    self.cancelled += port.cancel()
                self.clock.sleep(0.001)
            # One that fails at the very end may be heard of by nobody.
            if not self.errors and not self.hook_failed:
                self._drain()
                self._check_batches()

    def _has_gone_on(self) -> bool:
        """The first actor and each table's first learner, which never leave, have got somewhere."""
        return self.pushes.get(0, 0) >= 10 and all(self.pulls.get((table, 0), 0) >= 6 for table in self.tables)

    # What they do

    def _act(self, place: int) -> None:
        lanes = self.random.choice([1, MOST_PUSHED])
        leaves_after = self._leaves(place)
        actor = self._new_actor(lanes)
        row = done = 0
        while not self.over:
            if done == leaves_after:
                if self.random.random() < 0.5:
                    return  # It vanishes: nobody closes it.
                actor.close()
                actor, leaves_after = self._new_actor(lanes), math.inf
            rows = self._rows(actor, row)
            self.attempted += 1
            taken = self._patiently(lambda t, a=actor, rows=rows: a.push(rows, timeout_s=t))
            if taken:
                self.accepted += [(lane, row) for lane in rows["lane"].tolist()]
                row += 1
                done += 1
                self._count(self.pushes, place)
            elif taken == 0:
                self.left_out += lanes
                self.clock.sleep(0.001)
            self._think()

    def _learn(self, table: str, rank: int) -> None:
        learner = self.store.learner(rank, self.plan.world, table=table)
        self.learners.append((table, learner))
        leaves_after, done = self._leaves(rank), 0
        while not self.over and done != leaves_after:
            batch = self._patiently(lambda t: learner.pull(timeout_s=t))
            if batch is None:
                continue
            self.accounts[table].delivered.append(batch)
            done += 1
            self._count(self.pulls, (table, rank))
            if self.store._wiring.priorities[table] is not None:
                self.store.update_priorities(batch.info.keys, np.ones(len(batch)), table=table)
            self._think()

    def _sample(self) -> None:
        for _ in range(self.random.choice([2, 20])):
            if self.over:
                return
            table, rows = self.random.choice(list(self.tables)), self.random.randrange(1, MOST_SAMPLED + 1)
            batch = self._patiently(lambda t, n=rows, name=table: self.store.sample(n, table=name, timeout_s=t))
            if batch is not None:
                self.accounts[table].delivered.append(batch)
            self._think()

    def _trouble(self) -> None:
        for _ in range(self.plan.troubles):
            self.clock.sleep(self.random.random() * 0.02)
            if self.over or self.errors:
                return
            kind = self.random.choice(["cancel", "cancel", "ask", "preload" if self.plan.preloads else "cancel"])
            if kind == "cancel":
                ports: list[Any] = [*self.actors, *(each for _, each in self.learners), *self._samplers()]
                if ports:
                    self.cancelled += self.random.choice(ports).cancel()
            elif kind == "ask":
                self.store.why_blocked()
                self.store.info()
                self.store.can_insert(2)
                self.store.can_sample(table=self.random.choice(list(self.tables)))
            else:
                with self.store.preloading():
                    self.clock.sleep(self.random.random() * 0.01)
            if self.plan.saves and self.random.random() < 0.5:
                self.store.save(self.folder)

    def _advance(self) -> None:
        while not self.over:
            self.clock.sleep(self.random.random() * self.random.choice([0.01, 0.1]))
            if not self.over:
                self.store.advance()

    def _samplers(self) -> list[conduit.Learner]:
        return sorted(self.store._asking, key=lambda each: each._index)

    def _new_actor(self, lanes: int) -> conduit.Actor:
        actor = self.store.actor(lanes)
        self.actors.append(actor)
        return actor

    def _leaves(self, place: int) -> float:
        """After how many calls it does; the first one of each kind never leaves."""
        return self.random.randrange(1, 6) if place and self.random.random() < self.plan.dying else math.inf

    def _patiently(self, call: Callable[[float], Any]) -> Any:
        """What the call gives, which is made again when it was in vain; None when the simulation is over."""
        while not self.over:
            try:
                return call(self.random.choice(self.plan.timeouts))
            except (WaitTimeout, CancelledError):
                self.clock.sleep(0.003)
        return None

    def _rows(self, actor: conduit.Actor, row: int) -> dict[str, np.ndarray]:
        # Not the store's numbers, which others get when an actor has left.
        lanes = 10 * self.actors.index(actor) + np.arange(actor.lanes)
        rows = {"lane": lanes, "row": np.full(len(lanes), row), "payload": lanes * 1000 + row}
        if self.plan.late:
            ended = np.full(len(lanes), self.random.random() < 0.2)
            # Half of them without a final: of the rows at a cut, nothing is ever drawn.
            which = ended & (self.random.random() < 0.5)
            rows |= {"obs": rows["payload"].astype(np.float32), "reward": np.ones(len(lanes), np.float32)}
            rows |= {"terminated": which, "truncated": ended & ~which}
        return rows

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                work()
            except (HookError, ClosedError) as error:
                with self.changed:
                    self.errors.append(error)
                    self.changed.notify_all()

        return guarded

    def _count(self, counts: dict[Any, int], who: Any) -> None:
        with self.changed:
            counts[who] = counts.get(who, 0) + 1
            self.changed.notify_all()

    def _think(self) -> None:
        # Some, or who is never held would never let time pass.
        if self.random.random() < 0.1:
            self.clock.sleep(0.0005)
        if self.plan.think_s and self.random.random() < 0.5:
            self.clock.sleep(self.random.random() * self.plan.think_s)

    def _hook(self):
        @conduit.register_ingestion()
        def work(source, sink):
            self._think()
            self.hook_runs += 1
            if self.hook_runs == self.plan.fails_at and not self.over:
                self.hook_failed = True
                raise PlannedError
            sink.write(source.read())

        return work

    # What is watched, independently of the store's own counters

    def _watch(self) -> None:
        admission = self.store._wiring.admission
        came, settled, wait = admission.came, admission.settled, admission.wait

        def watched_came(rows: int) -> None:
            for name, table in self.tables.items():
                self._check_let_in(rows, table, self.accounts[name])
            self.pending += rows
            came(rows)

        def watched_settled(rows: int, held: int) -> None:
            self.pending -= rows
            settled(rows, held)

        def watched_wait(rows: int, *others: Any, **named: Any) -> None:
            mine = object()
            self.waits.append(mine)
            try:
                wait(rows, *others, **named)
                assert self.waits[0] is mine or self.plan.kind == "bounded", "a push went before others"
            finally:
                self.waits.remove(mine)

        buffer = self.store._buffer
        older_than = buffer.older_than

        def watched_older_than(version: int) -> Any:
            self.order_version = version + self.plan.settings["max_staleness"]
            return older_than(version)

        admission.came, admission.settled, admission.wait = watched_came, watched_settled, watched_wait
        buffer.older_than = watched_older_than
        for name, table in self.tables.items():
            self._watch_table(table, self.accounts[name])

    def _watch_table(self, table: LiveTable, account: Account) -> None:
        publish, draw = table.publish, table.draw

        def watched_publish(first: int, rows: int, *others: Any, **named: Any) -> None:
            publish(first, rows, *others, **named)
            account.published += rows

        def watched_draw(number: int, rows: int, window: Any, stream: int = 0) -> Any:
            self._check_drawn(rows, table, account)
            drawn = draw(number, rows, window, stream)
            keys = self.store._buffer.keys_of(drawn[0].keys)
            if self.plan.kind == "bounded":
                behind = self.order_version - self.store._buffer.version_of(keys)
                assert behind.max() <= self.plan.settings["max_staleness"], "a stale row was drawn"
            account.drawn += rows
            account.keys += keys.tolist()
            return drawn

        table.publish, table.draw = watched_publish, watched_draw

    def _check_let_in(self, rows: int, table: LiveTable, account: Account) -> None:
        limiter, pushed = table.limiter, account.published + self.pending + rows
        if isinstance(limiter, limiters.Queue) and self.plan.kind in ("queue", "stack", "two tables"):
            assert pushed - account.drawn <= limiter.max_size, "too long a queue"
        if isinstance(limiter, limiters.SampleToInsertRatio) and not self.plan.preloads:
            ratio, offset = (
                Fraction(limiter.samples_per_insert),
                limiter.samples_per_insert * limiter.min_size_to_sample,
            )
            assert isinstance(limiter.error_buffer, float | int)
            size = table.size(self.store._buffer.window)
            few = size + self.pending < limiter.min_size_to_sample
            # While draws lack rows, there is no other way.
            lacks = not self.pending and size < table._largest_draw
            high = offset + limiter.error_buffer
            assert ratio * pushed - account.drawn <= high or few or lacks, "too many rows for what was drawn"

    def _check_drawn(self, rows: int, table: LiveTable, account: Account) -> None:
        limiter, size = table.limiter, table.size(self.store._buffer.window)
        if isinstance(limiter, limiters.MinSize):
            assert size >= limiter.min_size_to_sample or self.plan.preloads, "below the smallest size"
        if isinstance(limiter, limiters.Queue):
            assert account.drawn + rows <= account.published, "more than there was"
        if isinstance(limiter, limiters.SampleToInsertRatio) and not self.plan.preloads:
            # Of batches that are drawn together, the first may have been the last draw of some rows.
            assert size + rows * (table._together - 1) >= limiter.min_size_to_sample
            assert isinstance(limiter.error_buffer, float | int)
            low = limiter.samples_per_insert * limiter.min_size_to_sample - limiter.error_buffer
            cursor = Fraction(limiter.samples_per_insert) * account.published - account.drawn - rows
            assert cursor >= low, "too many draws for what was pushed"

    # The end

    def _drain(self) -> None:
        """Takes what is left: of what comes once, the rows, and batches that were drawn for those who vanished."""
        for name, table in self.tables.items():
            while table.settings.max_times_sampled == 1:
                try:
                    self.accounts[name].delivered.append(self.store.sample(1, table=name, timeout_s=0.5))
                except WaitTimeout:
                    break
        for table, learner in self.learners:
            path = learner._path
            for index, request in learner._requests.items():
                if request.turn.begun:
                    staged = path.outbox.wait_take(learner._numbering.number(index), math.inf)
                    assert staged is not None
                    assert isinstance(staged.batch, conduit.Batch)
                    self.accounts[table].delivered.append(staged.batch)

    def _check_batches(self) -> None:
        rows_of: dict[int, tuple[int, int]] = {}
        for name, account in self.accounts.items():
            got: list[int] = []
            for batch in account.delivered:
                data = {path: np.asarray(leaf) for path, leaf in batch.data.items()}
                np.testing.assert_array_equal(data["payload"], data["lane"] * 1000 + data["row"])
                keys, places = batch.info.keys.tolist(), zip(data["lane"].tolist(), data["row"].tolist(), strict=True)
                for key, place in zip(keys, places, strict=True):
                    assert rows_of.setdefault(key, place) == place
                got += keys
            assert sorted(got) == sorted(account.keys), "drawn and not delivered"
            if self.tables[name].settings.max_times_sampled == 1:
                self._check_once(account)
        assert len(set(rows_of.values())) == len(rows_of)
        assert set(rows_of.values()) <= set(self.accepted)

    def _check_once(self, account: Account) -> None:
        """Nothing that was taken is lost or doubled, and where the oldest comes first it does so."""
        plan, keys, count = self.plan, account.keys, len(self.accepted)
        assert len(set(keys)) == len(keys), "a row came twice"
        if plan.kind in ("queue", "two tables"):
            assert keys == list(range(count)), "each row that was taken, once and in order"
        elif plan.kind == "stack":
            assert sorted(keys) == list(range(count))
        elif plan.kind == "bounded":
            assert keys == sorted(keys)
            info = self.store.info()
            counted = info["stale_rows"] + info["dropped_rows"]
            assert len(keys) + counted == count + self.left_out, "dropped without being counted"


def simulate(seed: int, folder: Path) -> Simulation:
    return Simulation(seed, folder).run()


@pytest.mark.parametrize("block", range(BLOCKS))
def test_what_is_alive_goes_on_and_no_limiter_breaks_its_promise(block: int, tmp_path: Path) -> None:
    for seed in range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS):
        try:
            simulate(seed, tmp_path)
        except BaseException as error:
            error.add_note(f"seed {seed}: {Plan.of(seed)}")
            raise


def test_the_seeds_cover_every_kind_of_trouble() -> None:
    plans = [Plan.of(seed) for seed in range(SEEDS)]
    for kind in (
        *(lambda p, kind=kind: p.kind == kind and p.dying == 1.0 and p.troubles for kind in KINDS),
        lambda p: p.preloads and p.troubles,
        lambda p: p.saves and p.troubles,
        lambda p: p.drops,
        lambda p: p.samples and p.settings["schedule"].overlap_del,
        lambda p: p.fails_at is not None,
        lambda p: p.settings["schedule"].overlap_ing and p.settings["schedule"].g_ing > 1,
        lambda p: p.settings["schedule"].g_del > 1 and p.settings.get("max_times_sampled") is not None,
    ):
        assert sum(map(bool, map(kind, plans))) > 15


def test_a_seed_repeats_its_interleaving(tmp_path: Path) -> None:
    for seed in (11, 55):
        first, second = simulate(seed, tmp_path), simulate(seed, tmp_path)
        assert first.clock.trace == second.clock.trace
        assert first.accounts["main"].keys == second.accounts["main"].keys != []


# Proof that the simulation would notice


def _silent_in(name: str) -> Callable[[Admission], None]:
    """`Admission.changed` that tells waiting pushes nothing when `name` calls it."""
    original = Admission.changed

    def changed(self: Admission) -> None:
        if sys._getframe(1).f_code.co_name != name:
            original(self)

    return changed


class _Backwards(deque):
    """A queue of waiting pushes, the last of which goes first."""

    append = deque.appendleft


def _backwards(self: Admission, *args: Any) -> None:
    _INIT(self, *args)
    self._queue = _Backwards()


def _only_the_limiter(self: LiveTable, rows: int, window: Any) -> bool:
    return self.limiter is None or bool(self._preloading) or self.limiter.may_insert(rows, self.counted(window))


def _counts_twice(self: LiveTable, rows: int) -> None:
    self.counters.pending += 2 * rows


def _blind_to_pending(self: Any, rows: int, at: Any) -> bool:
    return (at.inserted + rows) * self.up - at.sampled * self.down <= self.high or at.size < self.free_size


def _loses_what_was_drawn_at_the_last_moment(self: Any, request: Any, deadline_s: float, number: int) -> Any:
    if self._path.order.settle(request.turn, deadline_s):
        return self._await(request, deadline_s, number)
    with self._path.ingestion.hurried(deadline_s):
        return self._await(request, deadline_s, number)


_INIT, _MISSING = Admission.__init__, Delivery._missing

FAULTS = {
    "forgotten notify of pushes that preloading lets in": (Admission, "changed", _silent_in("_behind_all")),
    "forgotten notify after a draw": (Admission, "changed", _silent_in("_draw")),
    "forgotten notify after a group settled": (Admission, "changed", _silent_in("settled")),
    "forgotten notify of the next push": (Admission, "changed", _silent_in("wait")),
    "forgotten notify after stale rows left": (Admission, "changed", _silent_in("advance")),
    "last come, first served": (Admission, "__init__", _backwards),
    "pending rows counted twice": (LiveTable, "came", _counts_twice),
    "pending rows not counted": (limiters._Bounds, "may_insert", _blind_to_pending),
    "no way in while rows are all that draws lack": (LiveTable, "may_insert", _only_the_limiter),
    "a group of batches checked as one": (
        Delivery,
        "_missing",
        lambda self, rows, number, _: _MISSING(self, rows, number, 1),
    ),
    "rows lost that were drawn at a deadline": (conduit.Learner, "_wait_for", _loses_what_was_drawn_at_the_last_moment),
    "stale rows that keep their places": (conduit.Table, "is_queue", False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    for seed in range(SEEDS):
        if "stale" in fault and Plan.of(seed).kind != "bounded":
            continue
        try:
            simulate(seed, tmp_path)
        except (DeadlockError, AssertionError, OperatorError):
            return
    pytest.fail("no seed found it")
