"""Limiters at work in a store: what holds whom, what it says, what ends it; and what can't be, said beforehand."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import conduit
from conduit import Fifo, MinSize, Queue, SampleToInsertRatio, Schedule, Table, Uniform
from conduit.clock import VirtualClock
from conduit.errors import CancelledError, CapacityError, SettingError, WaitTimeout
from tests.store.rows import each_backend, fill, ids, no_thread_left, played, step, store, together

QUEUE: dict[str, Any] = {"sampler": Fifo(), "max_times_sampled": 1}
BEHIND = Schedule(overlap_ing=True, overlap_del=True)
each_schedule = pytest.mark.parametrize(
    "schedule", [Schedule(), Schedule(overlap_ing=True, g_ing=2), BEHIND], ids=["in line", "ingestion behind", "behind"]
)


def refused(call: Callable[[], Any]) -> str:
    """What a call raised; empty if it did what it should."""
    try:
        call()
    except (WaitTimeout, SettingError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def calls_until_refused(call: Callable[[], Any], most: int) -> tuple[int, str]:
    """How often it did what it should, and what ended that."""
    for count in range(most):
        if why := refused(call):
            return count, why
    return most, ""


def check_taken(batch: conduit.Batch) -> None:
    assert ids(batch)


# One thread: whatever it does, can_insert and can_sample say what comes of it

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ratio": {"limiter": SampleToInsertRatio(1.5, 6, 9)},
    "ratio, few times": {"limiter": SampleToInsertRatio(2, 4, (0, 24)), "max_times_sampled": 2},
    "min size": {"limiter": MinSize(9), "sampler": conduit.WithoutReplacement()},
    "queue": {"limiter": Queue(12), **QUEUE},
    "balance": {"limiter": SampleToInsertRatio(1, 1, (0, 12))},
    "stack": {"limiter": Queue(12), "sampler": conduit.Lifo(), "max_times_sampled": 1, "remover": conduit.Lifo()},
    "none": {"max_times_sampled": 3},
    "two": {
        "limiter": SampleToInsertRatio(1, 4, 20),
        "tables": {"queue": Table(Fifo(), 1, Queue(10)), "free": Table(Uniform())},
    },
    "two batches together": {"limiter": SampleToInsertRatio(1, 4, 14), "schedule": Schedule(g_del=2)},
}
STEPS: dict[tuple[str, bool], int] = {}
"""How often each call was made, and whether it was said to succeed."""


class OneThread(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(CONFIGURATIONS)))
    def open(self, name: str) -> None:
        self.configuration = CONFIGURATIONS[name]
        self.store = store(capacity=16, timeout_s=0.0, **self.configuration)
        self.actor = self.store.actor()
        self.learners = {table: self.store.learner(table=table) for table in self.store._wiring.tables}
        self.inserted, self.preloaded = 0, False
        self.drawn = dict.fromkeys(self.learners, 0)
        self.preloading: Any = None
        self.row = 0

    def teardown(self) -> None:
        self.store.close()
        if self.preloading is not None:
            self.preloading.__exit__(None, None, None)

    @rule(rows=st.integers(1, 8))
    def push(self, rows: int) -> None:
        said = self.store.can_insert(rows)
        STEPS["push", said] = STEPS.get(("push", said), 0) + 1
        why = refused(lambda: self.actor.push_trajectory(step(self.row, rows)))
        assert said == (not why)
        if said:
            self.row += rows
            self.inserted += rows
        # What comes of waiting isn't the same as what can never be.
        elif why.startswith("WaitTimeout"):
            assert re.search(r"holds a push of .*: draw \d+ more", why)
        else:
            assert "for good" in why

    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(sorted(self.learners)))
        learner = self.learners[table]
        ready = bool(learner.staged) or self.store.can_sample(table=table)
        STEPS["pull", ready] = STEPS.get(("pull", ready), 0) + 1
        why = refused(lambda: self._take(table, lambda: learner.pull(timeout_s=0.0)))
        assert ready == (not why)
        assert ready or "push" in why or "More rows would do" in why

    @rule(data=st.data(), rows=st.integers(1, 12))
    def sample(self, data: st.DataObject, rows: int) -> None:
        table = data.draw(st.sampled_from(sorted(self.learners)))
        said = self.store.can_sample(rows, table=table)
        STEPS["sample", said] = STEPS.get(("sample", said), 0) + 1
        why = refused(lambda: self._take(table, lambda: self.store.sample(rows, table=table, timeout_s=0.0)))
        assert said == (not why)

    @precondition(lambda self: self.preloading is None)
    @rule()
    def begin_preloading(self) -> None:
        self.preloading, self.preloaded = self.store.preloading(), True
        self.preloading.__enter__()

    @precondition(lambda self: self.preloading is not None)
    @rule()
    def end_preloading(self) -> None:
        self.preloading.__exit__(None, None, None)
        self.preloading = None

    @invariant()
    def nobody_waits(self) -> None:
        assert self.store.why_blocked() == ""

    @invariant()
    def somebody_can_go_on(self) -> None:
        assert self.store.can_insert(1) or any(
            learner.staged or self.store.can_sample(table=table) for table, learner in self.learners.items()
        )

    @invariant()
    def limiters_keep_their_promises(self) -> None:
        for name, table in self.store._wiring.tables.items():
            told = self.store.info()["tables"][name]
            staged = 4 * self.learners[name].staged
            if not self.preloaded:
                assert (told["inserted"], told["sampled"]) == (self.inserted, self.drawn[name] + staged)
            if self.preloaded:
                continue
            cursor = self.inserted - self.drawn[name] - staged
            if isinstance(table.limiter, Queue):
                assert 0 <= cursor <= table.limiter.max_size
            if isinstance(table.limiter, SampleToInsertRatio):
                self._check_ratio(table.limiter, self.drawn[name] + staged, told["drawable_rows"])

    def _check_ratio(self, limiter: SampleToInsertRatio, drawn: int, drawable: int) -> None:
        ratio = Fraction(limiter.samples_per_insert)
        offset, buffer = ratio * limiter.min_size_to_sample, limiter.error_buffer
        low, high = buffer if isinstance(buffer, tuple) else (offset - Fraction(buffer), offset + Fraction(buffer))
        cursor = ratio * self.inserted - drawn
        assert cursor >= low or not drawn
        # Pushes are free while draws lack rows.
        assert cursor <= high or drawable < 24 or self.configuration.get("max_times_sampled")

    def _take(self, table: str, call: Callable[[], conduit.Batch]) -> None:
        batch = call()
        assert ids(batch) == batch.info.keys.tolist()
        self.drawn[table] += len(batch)


def test_can_insert_and_can_sample_say_what_a_call_without_a_wait_would_do() -> None:
    STEPS.clear()
    run_state_machine_as_test(
        OneThread, settings=settings(max_examples=250, stateful_step_count=40, deadline=None, derandomize=True)
    )
    assert set(STEPS) == {(call, said) for call in ("push", "pull", "sample") for said in (False, True)}
    assert min(STEPS.values()) > 50, STEPS


# Who waits, how long, and what would end it


def held_push(rows: int = 4, **more: Any):
    """A store whose queue is full, with an actor."""
    s = store(capacity=8, limiter=Queue(8), **QUEUE, **more)
    actor = s.actor(rows)
    fill(actor, 8)
    return s, actor


def test_a_push_that_a_limiter_holds_says_which_the_counters_and_the_way_out():
    s, actor = held_push()
    with s:
        with pytest.raises(WaitTimeout) as caught:
            actor.push(step(8, 4), timeout_s=0.0)
        assert str(caught.value) == (
            "table 'main': Queue(max_size=8) holds a push of 4 rows; 8 rows can be drawn, 8 inserted, 0 entries drawn: "
            "draw 4 more entries, 1 batch of 4"
        )
        assert not s.can_insert(1)
        assert len(s) == 8
        # Nothing of it was taken, and the way out is one.
        assert ids(s.learner().pull(timeout_s=0.0)) == [0, 1, 2, 3]
        assert s.can_insert(4)
        assert not s.can_insert(5)
        assert actor.push(step(8, 4), timeout_s=0.0) == 4
        assert ids(s.sample(5)) == [4, 5, 6, 7, 8]


def test_a_pull_that_a_limiter_holds_says_which_the_counters_and_the_way_out():
    with store(limiter=MinSize(6)) as s:
        actor, learner = s.actor(), s.learner()
        fill(actor, 4)
        for call in (learner.pull, lambda timeout_s: s.sample(4, timeout_s=timeout_s)):
            with pytest.raises(WaitTimeout) as caught:
                call(timeout_s=0.0)
            assert "MinSize(min_size_to_sample=6) holds a draw of 4 entries; 4 rows can be drawn, 4 inserted" in str(
                caught.value
            )
            assert str(caught.value).endswith("push 2 more rows")
        fill(actor, 2, 4)
        assert learner.pull(timeout_s=0.0).info.number == 0


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_of_wait_is_told_by_name_and_how_long_it_has_been(seed):
    def scene(clock: VirtualClock):
        with store(capacity=8, limiter=Queue(8), **QUEUE, clock=clock, timeout_s=100.0) as s:
            first, second, learner = s.actor(4), s.actor(1), s.learner()
            fill(first, 8)

            def drains() -> None:
                clock.sleep(3.0)
                lines = s.why_blocked().splitlines()
                assert len(lines) == 2, lines
                assert lines[0].startswith("work-0 has waited 3.0 s to push: table 'main': Queue(max_size=8) holds")
                assert "draw 4 more entries, 1 batch of 4" in lines[0]
                assert lines[1].startswith("work-1 has waited 2.0 s to push: table 'main': Queue(max_size=8) holds")
                for _ in range(3):
                    learner.pull()
                clock.sleep(3.0)
                assert s.why_blocked() == ""
                pulls = [clock.spawn(lambda: check_taken(learner.pull()), name) for name in ("one", "two")]
                clock.sleep(1.0)
                asks = clock.spawn(lambda: check_taken(s.sample(2)), "asks")
                clock.sleep(1.0)
                lines = sorted(s.why_blocked().splitlines())
                assert len(lines) == 3, lines
                assert lines[0].startswith("asks has waited 1.0 s for sample(): 1 of 8 visible rows can start"), lines
                assert lines[1].startswith(("one has waited 2.0 s", "two has waited 2.0 s"))
                assert any("another thread is pulling from this learner" in line for line in lines[1:])
                assert any("learner 0 of 1" in line and "More rows would do" in line for line in lines[1:])
                fill(s.actor(3), 9, 20)
                for task in (*pulls, asks):
                    task.join()
                assert s.why_blocked() == ""

            def late() -> None:
                clock.sleep(1.0)
                second.push(step(100))

            results = together(clock, lambda: first.push(step(8, 4)), late, drains)
            for result, _ in results:
                assert not isinstance(result, Exception), result

    played(seed, scene)


def test_who_comes_after_another_push_and_who_finds_the_inbox_full_is_told():
    @conduit.register_ingestion()
    def slow(source, sink):
        clock_of[0].sleep(10.0)
        sink.write(source.read())

    clock_of: list[VirtualClock] = []

    def scene(clock: VirtualClock):
        clock_of.append(clock)
        settings: dict[str, Any] = {"schedule": Schedule(overlap_ing=True), "inbox_units": 1, "ingestion": [slow]}
        with store(clock=clock, **settings) as s:
            actor = s.actor()
            # One is being ingested, one waits.
            fill(actor, 2)
            for limit_s in (0.0, 1.0):
                with pytest.raises(WaitTimeout, match="inbox has been full for the whole wait: 1 units"):
                    actor.push(step(2), timeout_s=limit_s)

            def tell() -> str:
                clock.sleep(0.5)
                return s.why_blocked()

            (_, _), (_, _), (told, _) = together(
                clock,
                lambda: s.actor().push(step(3), timeout_s=2.0),
                lambda: s.actor().push(step(4), timeout_s=2.0),
                tell,
            )
            lines = told.splitlines()
            assert len(lines) == 2
            assert all("has waited 0.5 s to push: the inbox has been full" in line for line in lines)

    played(1, scene)


def test_counters_need_not_be_printed_by_hand():
    """google-deepmind/acme#233."""
    tables = {"recent": Table(Fifo(), 1, Queue(8))}
    with store(capacity=8, limiter=SampleToInsertRatio(2, 4, 20), tables=tables) as s:
        fill(s.actor(), 6)
        s.learner().pull()
        s.sample(3, table="recent")
        told = s.info()["tables"]
        assert told["main"] == {
            "sampler": "Uniform(replacement=True)",
            "limiter": "SampleToInsertRatio(samples_per_insert=2, min_size_to_sample=4, error_buffer=20)",
            "max_times_sampled": None,
            "prioritized": False,
            "drawable_rows": 6,
            "inserted": 6,
            "sampled": 4,
            "lost_rows": 0,
        }
        assert {key: told["recent"][key] for key in ("drawable_rows", "inserted", "sampled")} == {
            "drawable_rows": 3,
            "inserted": 6,
            "sampled": 3,
        }


# Who goes on, and when


@pytest.mark.parametrize("seed", range(10))
@each_schedule
def test_pushes_are_let_in_in_the_order_in_which_they_came_at_once_and_none_is_passed_by_smaller_ones(seed, schedule):
    def scene(clock: VirtualClock):
        with store(
            capacity=16, limiter=Queue(9), **QUEUE, clock=clock, schedule=schedule, batch_size=1, timeout_s=math.inf
        ) as s:
            fill(s.actor(), 8)
            order = []

            def push(rows: int, after_s: float) -> None:
                actor = s.actor(rows)
                clock.sleep(after_s)
                actor.push(step(100 * rows, rows))
                order.append(rows)

            def drain() -> None:
                learner = s.learner()
                clock.sleep(1.0)
                for _ in range(10):
                    learner.pull()
                    clock.sleep(1.0)

            results = together(
                clock, lambda: push(3, 0.1), lambda: push(1, 0.2), lambda: push(2, 0.3), lambda: push(1, 0.4), drain
            )
            assert [result for result, _ in results] == [None] * 5
            assert order == [3, 1, 2, 1]

    played(seed, scene)


@pytest.mark.parametrize("seed", range(10))
def test_when_the_first_of_those_who_wait_gives_up_the_next_goes_on_at_once(seed):
    def scene(clock: VirtualClock):
        with store(capacity=8, limiter=Queue(8), **QUEUE, clock=clock, batch_size=1, timeout_s=math.inf) as s:
            fill(s.actor(), 7)
            large, small = s.actor(4), s.actor(1)

            def push_small() -> int:
                clock.sleep(0.5)
                return small.push(step(50))

            (gave_up, at), (pushed, then) = together(clock, lambda: large.push(step(8, 4), timeout_s=2.0), push_small)
            assert isinstance(gave_up, WaitTimeout)
            assert pushed == 1
            assert at == then == 2.0

    played(seed, scene)


@pytest.mark.parametrize("limiter", [SampleToInsertRatio(1, 1, 10), Queue(12)], ids=str)
@each_schedule
def test_rows_that_can_be_drawn_only_later_block_nobody(limiter, schedule):
    """n-step items: what was pushed last waits for what comes after it."""
    settings: dict[str, Any] = {"item": conduit.NStep(4, 0.9), "derive": {"next_obs": conduit.Next("obs")}}
    if isinstance(limiter, Queue):
        settings |= QUEUE

    def scene(clock: VirtualClock):
        with store(limiter=limiter, clock=clock, schedule=schedule, timeout_s=math.inf, **settings) as s:
            actor, learner, acted = s.actor(2), s.learner(), []

            def act() -> None:
                with contextlib.suppress(CancelledError):
                    for number in range(200):
                        ended = np.full(2, number % 7 == 6)
                        rows = {"obs": np.ones(2, np.float32), "reward": np.ones(2, np.float32)}
                        actor.push({**rows, "terminated": ended & False, "truncated": ended})
                acted.append(True)

            def learn() -> None:
                for _ in range(10):
                    learner.pull()
                while not acted:
                    actor.cancel()
                    clock.sleep(0.1)

            assert [result for result, _ in together(clock, learn, act)] == [None, None]

    for seed in range(5):
        played(seed, scene)


def test_pushes_that_are_dropped_are_counted_and_never_wait():
    s, actor = held_push(when_full="drop")
    with s:
        assert actor.push(step(8, 4)) == 0
        assert s.info()["dropped_rows"] == 4
        s.learner().pull()
        assert actor.push(step(8, 4)) == 4


@pytest.mark.parametrize("schedule", [Schedule(), BEHIND], ids=["in line", "behind"])
@pytest.mark.parametrize(
    "settings", [{"limiter": SampleToInsertRatio(1, 8, 12)}, {"limiter": Queue(16), **QUEUE}], ids=["ratio", "queue"]
)
def test_real_threads_stay_in_step(schedule, settings):
    many = 240
    with no_thread_left(), store(capacity=16, schedule=schedule, timeout_s=20.0, **settings) as s:
        outcomes = []

        def run(work: Callable[[], None]) -> None:
            try:
                work()
            except Exception as error:
                outcomes.append(error)

        def act(actor: conduit.Actor) -> None:
            for number in range(many):
                actor.push(step(number))
                limited = s._wiring.tables["main"].counters
                assert limited.inserted + limited.pending - limited.sampled <= 20

        def learn(learner: conduit.Learner) -> None:
            # What was prepared ahead, or waits for its group, is somebody's still.
            for _ in range(many // 4 - 8):
                learner.pull()

        works: list[Callable[[], None]] = [lambda rank=rank: learn(s.learner(rank, 2)) for rank in range(2)]
        works += [lambda: act(s.actor())] * 2
        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads[:2]:
            thread.join(20)
        while any(thread.is_alive() for thread in threads):
            with contextlib.suppress(WaitTimeout):
                s.sample(1, timeout_s=0.05)
        assert not outcomes


class Never:
    """A limiter of somebody's own, which lets nothing through."""

    def may_insert(self, rows: int, at: Any) -> bool:
        return False

    def may_sample(self, rows: int, at: Any) -> bool:
        return False

    def why_no_insert(self, rows: int, at: Any, batch_size: int = 1) -> str:
        return f"never {rows} rows beside {at.size}"

    def why_no_sample(self, rows: int, at: Any) -> str:
        return f"never {rows} entries of {at.inserted}"

    def check(self, **settings: Any) -> None:
        assert set(settings) == {"capacity", "batch_size", "max_times_sampled"}

    def check_insert(self, rows: int, batch_size: int) -> None:
        pass

    def check_sample(self, rows: int, push: int = 1) -> None:
        pass


def test_a_limiter_of_ones_own_is_asked_and_pushes_are_let_in_while_rows_are_all_that_draws_lack():
    with store(limiter=Never()) as s:
        fill(s.actor(), 4)
        assert not s.can_insert()
        with pytest.raises(WaitTimeout, match="never 1 rows beside 4"):
            s.actor().push(step(4), timeout_s=0.0)
        assert not s.can_sample()
        with pytest.raises(WaitTimeout, match="never 4 entries of 4"):
            s.learner().pull(timeout_s=0.0)


# Preloading


@each_schedule
def test_preloading_lets_everything_in_and_afterwards_both_sides_go_on_without_a_burst(schedule):
    """google-deepmind/reverb#134."""
    limiter = SampleToInsertRatio(samples_per_insert=1, min_size_to_sample=100, error_buffer=64)
    many = 100_000
    with (
        no_thread_left(),
        store(capacity=many, batch_size=32, limiter=limiter, schedule=schedule, timeout_s=5.0) as s,
    ):
        learner = None if schedule.overlap_del else s.learner()
        actor = s.actor(1000)
        began = time.perf_counter()
        with s.preloading():
            for first in range(0, many, 1000):
                actor.push({"id": np.arange(first, first + 1000)})
        assert time.perf_counter() - began < 5
        assert len(s) == many
        learner = learner or s.learner()
        small = s.actor(16)
        # A burst would be as many batches as rows were preloaded allow.
        pulled, why = calls_until_refused(lambda: learner.pull(timeout_s=0.2), 100)
        assert "SampleToInsertRatio" in why
        assert 1 <= pulled <= 1 + 2 * 64 // 32
        for number in range(40):
            small.push({"id": np.arange(16) + number})
            if number % 2:
                learner.pull()
        assert s.why_blocked() == ""


def test_preloading_a_queue_counts_what_can_be_drawn_so_that_nothing_more_is_lost():
    with store(capacity=12, limiter=Queue(6), **QUEUE) as s:
        actor, learner = s.actor(), s.learner()
        with s.preloading():
            fill(actor, 10)
            assert s.can_insert(12)
        assert s.info()["tables"]["main"]["inserted"] == 10
        with pytest.raises(WaitTimeout, match="draw 5 more entries"):
            actor.push(step(10), timeout_s=0.0)
        got = ids(learner.pull()) + ids(learner.pull())
        fill(actor, 4, 10)
        assert got + ids(s.sample(6)) == list(range(14))


@pytest.mark.parametrize("seed", range(10))
def test_preloading_lets_those_in_who_wait_already(seed):
    def scene(clock: VirtualClock):
        with store(capacity=8, limiter=Queue(8), **QUEUE, batch_size=1, clock=clock, timeout_s=math.inf) as s:
            fill(s.actor(), 8)

            def preload() -> None:
                clock.sleep(1.0)
                with s.preloading():
                    clock.sleep(1.0)

            (pushed, at), _ = together(clock, lambda: s.actor(4).push(step(8, 4)), preload)
            assert (pushed, at) == (4, 1.0)

    played(seed, scene)


def test_preloading_twice_at_once_lasts_until_the_last_ends_and_a_failure_ends_it_too():
    with store(capacity=16, limiter=SampleToInsertRatio(1, 4, 8)) as s:
        actor = s.actor(8)
        with s.preloading():
            with s.preloading():
                fill(actor, 16)
            fill(actor, 16)
        assert calls_until_refused(lambda: actor.push(step(0, 8), timeout_s=0.0), 3)[1]
        with contextlib.suppress(KeyError), s.preloading():
            fill(actor, 8)
            raise KeyError
        s.learner().pull()
        assert calls_until_refused(lambda: actor.push(step(0, 8), timeout_s=0.0), 3)[1]


def test_what_is_gathered_for_a_group_before_the_end_of_preloading_is_part_of_it():
    limiter = SampleToInsertRatio(1, 4, 8)
    with store(capacity=64, limiter=limiter, schedule=Schedule(g_ing=3)) as s:
        actor = s.actor(8)
        with s.preloading():
            for first in range(0, 40, 8):
                actor.push(step(first, 8))
        assert len(s) == 40
        assert s.info()["tables"]["main"]["inserted"] <= 4
        assert s.can_insert(8)


def test_a_store_that_is_closed_while_it_preloads_says_nothing_more():
    with store(limiter=MinSize(4)) as s, s.preloading():
        s.close()


# A checkpoint brings back a limiter that blocks


@each_backend
def test_a_restored_limiter_that_blocks_has_a_finite_timeout_says_why_and_can_be_lifted(tmp_path, backend):
    """google-deepmind/reverb#103."""
    limiter = SampleToInsertRatio(samples_per_insert=1, min_size_to_sample=4, error_buffer=8)
    with store(backend=backend, capacity=64, limiter=limiter) as s:
        fill(s.actor(), 12)
        s.save(tmp_path / "checkpoint")
    with conduit.Store.restore(tmp_path / "checkpoint", timeout_s=0.05) as s:
        actor = s.actor()
        assert not s.can_insert()
        began = time.perf_counter()
        with pytest.raises(WaitTimeout) as caught:
            actor.push(step(12))
        assert 0.04 < time.perf_counter() - began < 5
        for part in (
            str(limiter),
            "12 rows can be drawn, 12 inserted, 0 entries drawn",
            "draw 1 more entry, 1 batch of 4",
        ):
            assert part in str(caught.value)
        s.learner().pull()
        actor.push(step(12))
    with conduit.Store.restore(tmp_path / "checkpoint", limiter=MinSize(1), timeout_s=0.05) as s:
        fill(s.actor(), 50)
        assert s.info()["tables"]["main"]["limiter"] == "MinSize(min_size_to_sample=1)"
        s.learner().pull()
    with conduit.Store.restore(tmp_path / "checkpoint", timeout_s=0.05) as s:
        with s.preloading():
            fill(s.actor(), 50)
        s.learner().pull()


@pytest.mark.parametrize(
    "settings", [{"limiter": Queue(8), **QUEUE}, {"limiter": SampleToInsertRatio(2, 4, 11)}], ids=str
)
def test_counters_go_on_where_they_were(tmp_path, settings):
    with store(capacity=8, **settings) as s, store(capacity=8, **settings) as twin:
        for each in (s, twin):
            fill(each.actor(), 7)
            each.learner().pull()
        s.save(tmp_path / "checkpoint")
        with conduit.Store.restore(tmp_path / "checkpoint") as back:
            for rows in range(1, 9):
                assert back.can_insert(rows) == twin.can_insert(rows)
                assert back.can_sample(rows) == twin.can_sample(rows)
            assert back.info()["tables"] == twin.info()["tables"]


# What can't be

CANT: dict[str, tuple[dict[str, Any], str]] = {
    "more rows than there ever are": ({"limiter": MinSize(9)}, "there are never 9 rows in a store of capacity=8"),
    "a ratio over rows that there never are": ({"limiter": SampleToInsertRatio(1, 9, 100)}, "there are never 9 rows"),
    "an error buffer that is too small": (
        {"limiter": SampleToInsertRatio(4, 4, 2)},
        "error_buffer of at least 4",
    ),
    "one too small for batches that are drawn together": (
        {"limiter": SampleToInsertRatio(1, 4, 2.5), "schedule": Schedule(g_del=2)},
        "a batch of 8 entries could block each other for good; expected an error_buffer of at least 4",
    ),
    "a queue shorter than a batch": ({"limiter": Queue(3), **QUEUE}, "expected a max_size of at least 4"),
    "a queue longer than the store": ({"limiter": Queue(9), **QUEUE}, "is longer than capacity=8"),
    "more draws than rows give": (
        {"limiter": SampleToInsertRatio(3, 1, 100), "max_times_sampled": 2},
        "with max_times_sampled=2 no row gives 3 entries",
    ),
    "a queue that doesn't draw the oldest first": (
        {"limiter": Queue(8), "sampler": conduit.Lifo(), "max_times_sampled": 1},
        r"loses rows; expected sampler=conduit.Fifo\(\), or a remover such as conduit.Lifo\(\)",
    ),
    "a queue of random rows": (
        {"limiter": Queue(8), "max_times_sampled": 1},
        r"sampler=Uniform\(replacement=True\): where the oldest rows leave first",
    ),
    "a queue that gives rows twice": (
        {"limiter": Queue(8), "sampler": Fifo(), "max_times_sampled": 2},
        r"expected max_times_sampled=1 and sampler=Fifo\(\), such as conduit.Table.queue.*, or SampleToInsertRatio\(1",
    ),
    "a queue that gives rows again and again": (
        {"limiter": Queue(8)},
        "a queue gives each row once; expected max_times_sampled=1 and",
    ),
    "a table that is a queue for ever": (
        {"tables": {"more": Table(Fifo(), limiter=Queue(8))}},
        r"table 'more': Queue\(max_size=8\) with max_times_sampled=None: a queue gives each row once",
    ),
    "a queue beside another table, where a remover chooses": (
        {"limiter": Queue(8), **QUEUE, "remover": conduit.Lifo(), "tables": {"more": Table()}},
        "rows that other tables keep would push out some",
    ),
    "a table's limiter": ({"tables": {"more": Table(limiter=MinSize(9))}}, "there are never 9 rows"),
    "a class": ({"limiter": MinSize}, "expected conduit.MinSize"),
    "a number": ({"limiter": 4}, "limiter=4: expected conduit.MinSize"),
    "in bounded mode": ({"mode": "bounded", "max_staleness": 1, "limiter": MinSize(1)}, "limiter: off-policy settings"),
}


@pytest.mark.parametrize("name", CANT)
def test_a_limiter_that_can_not_be_met_or_kept_is_refused_at_construction(name):
    settings, said = CANT[name]
    with no_thread_left(), pytest.raises(SettingError, match=said):
        store(**{"capacity": 8, **settings})


class Own:
    """A limiter of the user's own, one method of which fails."""

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def _said(self, method: str, otherwise: Any) -> Any:
        if method == self.fails:
            raise ZeroDivisionError("a bug of mine")
        return otherwise

    def may_insert(self, rows: int, at: Any) -> bool:
        return self._said("may_insert", at.inserted + at.pending + rows - at.sampled <= 8)

    def may_sample(self, rows: int, at: Any) -> bool:
        return self._said("may_sample", at.inserted >= at.sampled + rows)

    def why_no_insert(self, rows: int, at: Any, batch_size: int = 1) -> str:
        return self._said("why_no_insert", "Own() holds a push")

    def why_no_sample(self, rows: int, at: Any) -> str:
        return self._said("why_no_sample", "Own() holds a draw")

    def check(self, *, capacity: int, batch_size: int, max_times_sampled: int | None) -> None: ...

    def check_insert(self, rows: int, batch_size: int) -> None:
        self._said("check_insert", None)

    def check_sample(self, rows: int, push: int = 1) -> None:
        self._said("check_sample", None)

    def __repr__(self) -> str:
        return "Own()"


def push_and_draw(s: conduit.Store) -> None:
    actor, learner = s.actor(4), s.learner()
    for first in (0, 4):
        actor.push(step(first, 4))
    with pytest.raises(WaitTimeout, match=r"table 'main': Own\(\) holds a push"):
        actor.push(step(8, 4), timeout_s=0.0)
    for _ in range(2):
        learner.pull()
    with pytest.raises(WaitTimeout, match=r"Own\(\) holds a draw"):
        s.sample(4, timeout_s=0.0)


def test_a_limiter_of_ones_own_does_what_others_do():
    with store(limiter=Own("nothing")) as s:
        push_and_draw(s)
        assert s.info()["tables"]["main"]["limiter"] == "Own()"


@pytest.mark.parametrize(
    "fails", ["may_insert", "may_sample", "why_no_insert", "why_no_sample", "check_insert", "check_sample"]
)
def test_what_a_limiter_of_ones_own_fails_with_names_it_and_its_table(fails):
    with (
        no_thread_left(),
        store(limiter=Own(fails)) as s,
        pytest.raises(
            SettingError, match=r"Own\(\), the limiter of table 'main', failed to .*: ZeroDivisionError: a bug of mine"
        ) as caught,
    ):
        push_and_draw(s)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_limiter_on_policy_is_refused():
    with pytest.raises(SettingError, match="limiter: off-policy settings"):
        store(rollout_unit=8, limiter=MinSize(1))


@pytest.mark.parametrize("when_full", ["block", "drop"])
def test_a_push_too_large_for_the_limiter_is_refused_with_a_size_that_would_do(when_full):
    with store(capacity=64, limiter=SampleToInsertRatio(1, 4, 8), when_full=when_full) as s:
        actor = s.actor(14)
        assert not s.can_insert(14)
        for _ in range(2):
            with pytest.raises(
                SettingError, match=r"a push of 14 rows .* an error_buffer of at least 9, or pushes of at most 13"
            ):
                actor.push(step(0, 14), timeout_s=0.0)
        assert len(s) == s.info()["dropped_rows"] == 0
        s.actor(13).push(step(0, 13))


def test_a_sample_too_large_for_the_limiter_and_the_pushes_so_far_is_refused():
    with store(capacity=32, limiter=Queue(16), **QUEUE) as s:
        fill(s.actor(8), 8)
        assert not s.can_sample(10)
        with pytest.raises(SettingError, match="a push of 8 rows and a batch of 10 entries could block each other"):
            s.sample(10, timeout_s=0.0)
        assert s.sample(8).info.keys.tolist() == list(range(8))
        with pytest.raises(CapacityError):
            s.sample(33)
        assert not s.can_sample(33)


def test_a_larger_sample_has_more_rows_let_in_than_the_learners_batches_need():
    limiter = SampleToInsertRatio(1, 1, 12)

    def scene(clock: VirtualClock):
        with store(capacity=32, limiter=limiter, clock=clock, timeout_s=math.inf) as s:

            def act() -> None:
                fill(s.actor(), 20)

            (batch, _), _ = together(clock, lambda: s.sample(16), act)
            assert len(batch) == 16

    for seed in range(10):
        played(seed, scene)


@pytest.mark.parametrize("what", [0, -1, 1.5, True, None, "two"])
def test_counts_that_are_none_are_refused(what):
    with store(limiter=MinSize(1)) as s:
        with pytest.raises(SettingError, match="can_insert"):
            s.can_insert(what)
        if what is not None:
            with pytest.raises(SettingError, match="can_sample"):
                s.can_sample(what)
        with pytest.raises(SettingError, match="the store's tables are 'main'"):
            s.can_sample(table="others")
