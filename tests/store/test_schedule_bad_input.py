"""Schedules that can't be, and programs, hooks and clocks that don't behave under those that can: nothing hangs, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import conduit
from conduit import Auto, Schedule
from conduit.backends.reference import ReferenceBackend
from conduit.clock import Condition, Task, VirtualClock
from conduit.core.hook import Scope
from conduit.errors import HookError, OperatorError, ScheduleError, SettingError, WaitTimeout
from tests.store.rows import assert_intact, fill, ids, no_thread_left, played, step, store, together

BEHIND = Schedule(overlap_ing=True, g_ing=2, overlap_del=True, g_del=2)
SCHEDULES: dict[str, Any] = {
    "in line": Schedule(),
    "in groups": Schedule(g_ing=2, g_del=2),
    "behind": Schedule(overlap_ing=True, overlap_del=True),
    "behind in groups": BEHIND,
    "chosen": "auto",
}
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
each_way_behind = pytest.mark.parametrize(
    "schedule", [s for name, s in SCHEDULES.items() if name.startswith("behind")], ids=lambda s: f"g={s.g_del or 1}"
)


def stored_ids(s: conduit.Store) -> list[int]:
    rows: Any = s.read().data
    return rows["id"].tolist()


def hook(stage: str, work: Callable[[], None], per: Scope = "row") -> Any:
    """Does `work` before it hands its rows on."""

    def function(source: Any, sink: Any) -> None:
        work()
        sink.write(source.read())

    if stage == "delivery":
        return conduit.register_delivery()(function)
    return conduit.register_ingestion(per=per)(function)


def patiently(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the call returns at last, and what each time said that ended with a timeout."""
    said: list[str] = []
    while True:
        try:
            return call(), said
        except WaitTimeout as error:
            said.append(str(error))


# Settings


@pytest.mark.parametrize("side", ["g_ing", "g_del"])
@pytest.mark.parametrize("g", [0, -1, 2.5, 1 + 1e-9, float("nan"), float("inf"), True, "2", [2], 2 + 0j], ids=repr)
def test_off_policy_a_granularity_that_is_no_whole_number_is_refused(side, g):
    with pytest.raises(ScheduleError, match=r"granularit(y|ies)") as caught:
        store(schedule=Schedule(**{side: g}))
    assert repr(g) in str(caught.value)


@pytest.mark.parametrize("side", ["g_ing", "g_del"])
@pytest.mark.parametrize("g", [0, -0.25, 0.3, 1.25, 2, float("nan"), float("inf"), True, "1/4"], ids=repr)
def test_on_policy_a_granularity_that_is_no_fraction_of_m_is_refused(side, g):
    with pytest.raises(ScheduleError, match=r"granularit(y|ies)") as caught:
        store(rollout_unit=16, batch_size=4, schedule=Schedule(**{side: g}))
    assert repr(g) in str(caught.value)


@pytest.mark.parametrize("g", [2, 2.0, np.int64(2), np.float32(2)])
def test_a_granularity_may_be_any_kind_of_whole_number(g):
    with store(schedule=Schedule(g_ing=g, g_del=g)) as s:
        assert (s.schedule.g_ing, s.schedule.g_del) == (2, 2)
        fill(s.actor(), 8)
        s.learner().pull()


@pytest.mark.parametrize(
    "schedule", ["fast", "AUTO", "", 3, True, Auto, Schedule, {"g_ing": 2}, [Schedule()]], ids=repr
)
def test_what_is_no_schedule_is_refused_and_told_what_would_be_one(schedule):
    with pytest.raises(ScheduleError, match=r"schedule=.*expected a conduit\.Schedule, 'auto', conduit\.Auto"):
        store(schedule=schedule)


def test_what_is_no_schedule_is_refused_by_restore_and_the_checkpoint_stays(tmp_path):
    with store() as s:
        fill(s.actor(), 8)
        s.save(tmp_path / "saved")
    with pytest.raises(ScheduleError, match="schedule='fast'"):
        conduit.Store.restore(tmp_path / "saved", schedule=cast(Any, "fast"))
    with conduit.Store.restore(tmp_path / "saved", schedule="auto") as s:
        assert len(s) == 8


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"overlap_ing": 1}, r"Auto\(overlap_ing=1\): expected True or False"),
        ({"overlap_del": None}, r"Auto\(overlap_del=None\)"),
        ({"concurrent": "yes"}, r"Auto\(concurrent='yes'\)"),
        ({"g_ing": 0}, r"Auto\(g_ing=0\): expected a granularity > 0"),
        ({"g_ing": True}, r"Auto\(g_ing=True\)"),
        ({"g_del": -2}, r"Auto\(g_del=-2\)"),
        ({"g_del": float("nan")}, r"Auto\(g_del=nan\)"),
        ({"g_del": float("inf")}, r"Auto\(g_del=inf\)"),
        ({"g_del": "8"}, r"Auto\(g_del='8'\)"),
        ({"batches_ahead": -1}, r"batches_ahead.*-1"),
        ({"batches_ahead": 1.0}, r"batches_ahead.*1\.0"),
        ({"batches_ahead": True}, r"batches_ahead.*True"),
    ],
    ids=str,
)
def test_caps_that_are_none_are_refused_by_name(wrong, said):
    with pytest.raises((ScheduleError, SettingError), match=said):
        Auto(**wrong)


@pytest.mark.parametrize(
    ("settings", "caps", "said"),
    [
        ({}, {"g_ing": 0.5}, r"Auto\(g_ing=0\.5\).*nothing.*least that would do is g_ing=1"),
        ({}, {"g_del": 0.999}, r"Auto\(g_del=0\.999\).*least that would do is g_del=1"),
        ({"rollout_unit": 16}, {"g_ing": 0.2}, r"Auto\(g_ing=0\.2\).*least that would do is g_ing=0\.25"),
        ({"rollout_unit": 16}, {"g_del": 1e-9}, r"Auto\(g_del=1e-09\).*least that would do is g_del=0\.25"),
    ],
    ids=str,
)
def test_caps_that_leave_nothing_are_refused_and_told_the_least_that_would_do(settings, caps, said):
    with pytest.raises(ScheduleError, match=said):
        store(schedule=Auto(**caps), **settings)


def test_a_unit_hook_leaves_no_part_of_a_unit_to_a_cap():
    whole = hook("ingestion", lambda: None, per="unit")
    with pytest.raises(ScheduleError, match=r"Auto\(g_ing=0\.5\).*least that would do is g_ing=1"):
        store(rollout_unit=16, ingestion=[whole], schedule=Auto(g_ing=0.5))


@pytest.mark.parametrize("settings", [{"exact": True}, {"mode": "bounded", "max_staleness": 2}], ids=str)
def test_where_every_batch_is_drawn_at_its_pull_caps_on_delivery_change_nothing(settings):
    with store(capacity=16, schedule=Auto(g_del=8, overlap_del=True), **settings) as s:
        assert {(each.overlap_del, each.g_del) for each in s._wiring.feasible.schedules} == {(False, 1)}


# Hooks that are slower than what they hide behind


@each_way_behind
def test_an_ingestion_hook_that_is_slower_than_rollout_holds_pushes_back_and_loses_none(schedule):
    def scene(clock: VirtualClock) -> None:
        slow = hook("ingestion", lambda: clock.sleep(1.0))
        made = {"capacity": 200, "inbox_units": 4, "timeout_s": 30.0, "clock": clock, "schedule": schedule}
        with store(ingestion=[slow], **made) as s:
            actor, waited = s.actor(), []
            for number in range(40):
                began_s = clock.now()
                actor.push(step(number))
                waited.append(clock.now() - began_s)
                clock.sleep(0.01)
            assert max(waited[:4]) == 0.0
            assert max(waited) > 0.5, "nothing held it back"
            with s.preloading():
                pass
            assert stored_ids(s) == list(range(40))
            # A hook's run takes a group, as many as there are of a group.
            assert clock.now() == pytest.approx(40 / int(schedule.g_ing or 1), abs=2.0)
            assert s.ledger.total.ingestion.exposed_s > 0.8 * s.ledger.total.ingestion.busy_s

    for seed in range(3):
        played(seed, scene)


@each_way_behind
def test_a_push_that_a_slow_hook_keeps_out_for_too_long_says_so_and_may_be_made_again(schedule):
    def scene(clock: VirtualClock) -> None:
        slow = hook("ingestion", lambda: clock.sleep(10.0))
        with store(ingestion=[slow], inbox_units=4, clock=clock, schedule=schedule, capacity=200, timeout_s=100.0) as s:
            actor, said = s.actor(), []
            for number in range(20):
                said += patiently(lambda number=number: actor.push(step(number), timeout_s=0.5))[1]
            assert len(said) > 10
            assert all("inbox has been full for the whole wait: 4 units" in each for each in said), said
            assert all("slower than the actors" in each for each in said)
            with s.preloading():
                pass
            assert stored_ids(s) == list(range(20))

    played(0, scene)


@each_way_behind
def test_where_pushes_are_dropped_a_slow_hook_costs_rows_and_each_is_counted(schedule):
    def scene(clock: VirtualClock) -> None:
        slow = hook("ingestion", lambda: clock.sleep(1.0))
        made = {"when_full": "drop", "inbox_units": 4, "clock": clock, "schedule": schedule, "capacity": 200}
        with store(ingestion=[slow], **made) as s:
            actor, taken = s.actor(), []
            for number in range(60):
                if actor.push(step(number)):
                    taken.append(number)
                clock.sleep(0.1)
            with s.preloading():
                pass
            assert stored_ids(s) == taken
            assert s.info()["dropped_rows"] == 60 - len(taken) > 10

    played(0, scene)


@each_way_behind
@pytest.mark.parametrize("learners", [1, 2])
def test_a_delivery_hook_that_is_slower_than_the_update_is_waited_for_and_leaves_out_no_batch(schedule, learners):
    def scene(clock: VirtualClock) -> None:
        slow = hook("delivery", lambda: clock.sleep(1.0))
        with store(delivery=[slow], clock=clock, schedule=schedule, timeout_s=30.0) as s:
            fill(s.actor(), 32)

            def learn(rank: int) -> list[int]:
                learner, numbers = s.learner(rank, learners), []
                for _ in range(12):
                    numbers.append(learner.pull().info.number)
                    assert learner.staged <= 2 * int(schedule.g_del or 1)
                    clock.sleep(0.1)
                return numbers

            results = together(clock, *(lambda rank=rank: learn(rank) for rank in range(learners)))
            for rank, (numbers, at_s) in enumerate(results):
                assert numbers == list(range(rank, 12 * learners, learners))
                assert 12.0 <= at_s <= 12.0 + 1.2 * 2 * int(schedule.g_del or 1)

    played(1, scene)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_on_policy_slow_hooks_are_waited_for_and_iterations_stay_whole(k):
    def scene(clock: VirtualClock) -> None:
        hooks = {
            "ingestion": [hook("ingestion", lambda: clock.sleep(3.0))],
            "delivery": [hook("delivery", lambda: clock.sleep(2.0))],
        }
        schedule = Schedule(True, k / 4, True, k / 4)
        with store(rollout_unit=16, epochs=2, schedule=schedule, clock=clock, timeout_s=60.0, **hooks) as s:
            actor, learner = s.actor(2), s.learner()
            for iteration in range(3):
                fill(actor, 16, 16 * iteration)
                got = [number for batch in learner for number in ids(batch)]
                assert sorted(got) == sorted(2 * list(range(16 * iteration, 16 * iteration + 16)))
                s.advance()

    played(k, scene)


# Operators that fail


class Broken(ReferenceBackend):
    """Fails where it reads or writes for the nth time."""

    def __init__(self, at: str, calls: int) -> None:
        super().__init__()
        self._at, self._left = at, calls
        self.error = OSError("the device is gone")

    def _count(self, at: str) -> None:
        if at == self._at:
            self._left -= 1
            if self._left < 0:
                raise self.error

    def write(self, *args: Any, **more: Any) -> Any:
        self._count("write")
        return super().write(*args, **more)

    def read(self, *args: Any, **more: Any) -> Any:
        self._count("read")
        return super().read(*args, **more)


@each_schedule
@pytest.mark.parametrize("at", ["write", "read"])
def test_a_backend_that_fails_under_an_operator_is_told_to_every_port_and_the_store_closes(schedule, at):
    def scene(clock: VirtualClock) -> None:
        backend = Broken(at, 12)

        def heard(call: Callable[[], Any]) -> BaseException:
            try:
                while True:
                    call()
                    clock.sleep(0.1)
            except Exception as error:
                return error

        with store(backend=backend, schedule=schedule, clock=clock) as s:
            actor, learner = s.actor(), s.learner()
            fill(actor, 8)
            both = together(clock, lambda: heard(lambda: actor.push(step(0))), lambda: heard(learner.pull))
            for error, _ in both:
                # In line, whoever was at work gets the backend's own.
                assert error is backend.error or error.__cause__ is backend.error
            for call in (lambda: actor.push(step(0)), learner.pull, lambda: s.sample(4), lambda: s.learner(1, 2)):
                with pytest.raises(OperatorError, match="OSError was raised inside it: the device is gone") as caught:
                    call()
                assert caught.value.__cause__ is backend.error
            s.close()
            s.close()

    for seed in range(3):
        played(seed, scene)


@pytest.mark.parametrize("stage", ["ingestion", "delivery"])
@pytest.mark.parametrize("on_policy", [False, True])
@each_schedule
def test_a_hook_that_raises_on_an_operators_thread_reaches_who_waits_and_who_comes_later(stage, on_policy, schedule):
    if on_policy and isinstance(schedule, Schedule):
        k = None if schedule.g_ing is None else 0.5
        schedule = Schedule(schedule.overlap_ing, k, schedule.overlap_del, k)
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("planted")

    def scene(clock: VirtualClock) -> None:
        calls.clear()
        settings: dict[str, Any] = {"rollout_unit": 8} if on_policy else {}
        hooks = {stage: [hook(stage, work)]}
        with store(schedule=schedule, clock=clock, timeout_s=50.0, **settings, **hooks) as s:
            actor, learner = s.actor(), s.learner()

            def act() -> None:
                for number in range(100):
                    actor.push(step(number), version=number // 8 if on_policy else None)
                    clock.sleep(0.1)

            def learn() -> None:
                for _ in range(100):
                    learner.pull()

            def train() -> None:
                while on_policy:
                    if learner.number >= 2 * (s.version + 1):
                        s.advance()
                    clock.sleep(0.1)
                    s._halt.check()

            heard = [error for error, _ in together(clock, act, learn, train) if error is not None]
            assert len(heard) >= 2
            for call in (lambda: actor.push(step(0)), learner.pull):
                with pytest.raises(
                    HookError, match=f"{stage} hook 'function' raised ZeroDivisionError: planted"
                ) as got:
                    call()
                heard.append(got.value)
            for error in heard:
                assert isinstance(error.__cause__, ZeroDivisionError), error

    with no_thread_left():
        for seed in range(3):
            played(seed, scene)


# Learners that stop pulling, actors that stop pushing


@each_schedule
def test_a_learner_that_stops_pulling_leaves_a_bounded_number_of_batches_and_actors_go_on(schedule):
    def scene(clock: VirtualClock) -> None:
        with store(schedule=schedule, clock=clock) as s:
            actor, learner = s.actor(), s.learner()
            fill(actor, 16)
            for _ in range(5):
                learner.pull()
            most = 2 * 8 if schedule == "auto" else 2 * int(schedule.g_del or 1)
            for number in range(16, 300):
                actor.push(step(number))
                clock.sleep(1.0)
                assert s.info()["staged_batches"][0] == learner.staged <= most
            assert s.why_blocked() == ""
            with s.preloading():
                pass
            assert s.info()["inserted"] == 300
            # It may come back: the next batch is the next one.
            assert learner.pull().info.number == 5

    played(2, scene)


def test_bounded_a_learner_that_stops_pulling_blocks_the_actors_which_say_so():
    def scene(clock: VirtualClock) -> None:
        made = {"mode": "bounded", "max_staleness": 1, "capacity": 8, "clock": clock, "timeout_s": 100.0}
        with store(schedule=Schedule(overlap_ing=True, g_ing=2), **made) as s:
            actor, learner = s.actor(), s.learner()

            def act() -> None:
                for number in range(20):
                    actor.push(step(number))

            def look() -> str:
                clock.sleep(30.0)
                said = s.why_blocked()
                for _ in range(4):
                    assert_intact(learner.pull())
                return said

            (acted, _), (said, _) = together(clock, act, look)
            assert acted is None
            assert "work-0 has waited 30.0 s to push" in said
            assert "draw 1 more entries" in said or "draw" in said

    played(3, scene)


@pytest.mark.parametrize("k", [None, 0.5])
@pytest.mark.parametrize("overlap", [False, True])
def test_on_policy_a_learner_that_stops_pulling_keeps_the_next_iteration_out_which_says_so(overlap, k):
    def scene(clock: VirtualClock) -> None:
        with store(rollout_unit=8, schedule=Schedule(overlap, k, overlap, k), clock=clock, timeout_s=100.0) as s:
            actor, learner = s.actor(), s.learner()

            def act() -> None:
                for number in range(16):
                    actor.push(step(number), version=number // 8)

            def look() -> tuple[str, int]:
                learner.pull()
                clock.sleep(30.0)
                said, staged = s.why_blocked(), learner.staged
                s.advance()
                return said, staged

            (acted, _), ((said, staged), _) = together(clock, act, look)
            assert acted is None
            assert "work-0 has waited 30.0 s to push: rows of version 1 wait for iteration 0 to end" in said
            assert staged <= 1
            assert sorted(number for batch in learner for number in ids(batch)) == list(range(8, 16))

    played(4, scene)


@each_schedule
def test_an_actor_that_stops_pushing_leaves_a_learner_that_says_what_it_waits_for(schedule):
    def scene(clock: VirtualClock) -> None:
        with store(schedule=schedule, clock=clock, batch_size=4, timeout_s=60.0) as s:
            actor, learner = s.actor(), s.learner()
            fill(actor, 3)

            def look() -> str:
                clock.sleep(20.0)
                said = s.why_blocked()
                clock.sleep(50.0)
                assert s.why_blocked() == ""
                return said

            (error, at_s), (said, _) = together(clock, learner.pull, look)
            assert isinstance(error, WaitTimeout)
            assert at_s == 60.0
            assert "work-0 has waited 20.0 s for pull of batch 0 (learner 0 of 1): " in said
            assert "3" in said.split("pull of batch 0", 1)[1]
            # The same batch is served as soon as there are rows, those included that were gathered for a group.
            fill(actor, 5, 3)
            batch = learner.pull()
            assert batch.info.number == 0
            assert_intact(batch)

    for seed in range(3):
        played(seed, scene)


@pytest.mark.parametrize(
    "schedule", [None, Schedule(True, 0.5, True, 0.5), "auto"], ids=["in line", "behind", "chosen"]
)
def test_on_policy_an_actor_that_stops_pushing_leaves_a_learner_that_says_what_it_waits_for(schedule):
    def scene(clock: VirtualClock) -> None:
        with store(rollout_unit=8, schedule=schedule, clock=clock, timeout_s=60.0) as s:
            actor, learner = s.actor(), s.learner()
            fill(actor, 3)

            def look() -> str:
                clock.sleep(20.0)
                return s.why_blocked()

            (error, at_s), (said, _) = together(clock, learner.pull, look)
            assert isinstance(error, WaitTimeout)
            assert at_s == 60.0
            for text in (said, str(error)):
                assert "pull of batch 0 (learner 0 of 1)" in text
                assert "iteration 0 has 3 of 8 rows (rollout_unit): push 5 more" in text
            fill(actor, 5, 3)
            assert sorted(number for batch in learner for number in ids(batch)) == list(range(8))

    played(5, scene)


# Stages that are marked wrongly


def test_a_stage_within_itself_counts_once():
    def scene(clock: VirtualClock) -> None:
        with store(clock=clock) as s:
            with s.rollout():
                clock.sleep(1.0)
                with s.rollout(), s.rollout():
                    clock.sleep(2.0)
                clock.sleep(4.0)
            with s.update():
                clock.sleep(8.0)
                with s.rollout():
                    clock.sleep(16.0)
            assert (s.ledger.total.rollout_s, s.ledger.total.update_s) == (1.0 + 2.0 + 4.0 + 16.0, 8.0)

    played(0, scene)


def test_a_block_that_is_entered_twice_counts_once_and_is_over_at_its_end():
    def scene(clock: VirtualClock) -> None:
        with store(clock=clock) as s:
            block = s.rollout()
            with block:
                clock.sleep(1.0)
                with block:
                    clock.sleep(2.0)
                clock.sleep(4.0)
            clock.sleep(8.0)
            with block:
                clock.sleep(16.0)
            with s.update():
                clock.sleep(32.0)
            assert (s.ledger.total.rollout_s, s.ledger.total.update_s) == (1.0 + 2.0 + 4.0 + 16.0, 32.0)

    played(0, scene)


def test_a_block_that_is_left_on_another_thread_is_the_stage_of_the_one_that_entered_it():
    def scene(clock: VirtualClock) -> None:
        with store(clock=clock) as s:
            fill(s.actor(), 8)
            block = s.update()
            block.__enter__()
            s.learner().pull()
            clock.sleep(1.0)

            def leave() -> None:
                with s.rollout():
                    clock.sleep(2.0)
                block.__exit__(None, None, None)

            together(clock, leave)
            with s.update():
                clock.sleep(4.0)
            assert s.ledger.total.rollout_s == 2.0
            assert s.ledger.total.update_s == pytest.approx(3.0 + 4.0)

    played(0, scene)


@each_schedule
def test_stages_that_are_never_left_hang_nothing_and_lose_nothing(schedule):
    def scene(clock: VirtualClock) -> None:
        with store(schedule=schedule, clock=clock, capacity=400) as s:
            actor, learner, open_ones = s.actor(), s.learner(), []
            for number in range(100):
                open_ones.append(s.rollout() if number % 2 else s.update())
                open_ones[-1].__enter__()
                clock.sleep(0.1)
                actor.push(step(number))
                if number >= 8:
                    assert_intact(learner.pull())
            with s.preloading():
                pass
            assert s.info()["inserted"] == 100
            total = s.ledger.total
            assert 0.0 <= total.rollout_s + total.update_s <= clock.now()
        # Left when the store has been closed, and in another order: nobody hears of it.
        for each in open_ones:
            each.__exit__(None, None, None)

    played(1, scene)


def test_a_thread_that_ends_within_a_stage_hangs_nothing():
    def scene(clock: VirtualClock) -> None:
        with store(schedule="auto", clock=clock) as s:
            actor, learner = s.actor(), s.learner()

            def act() -> None:
                s.rollout().__enter__()
                fill(actor, 16)

            together(clock, act)
            for _ in range(60):
                actor.push(step(0))
                learner.pull()

    played(2, scene)


# Figures that leave nothing to compare


@pytest.mark.parametrize("seconds", [0.0, 0.125], ids=["no time", "equal times"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_stages_without_any_variance_are_profiled_and_chosen_from(seconds, on_policy):
    def scene(clock: VirtualClock) -> None:
        works = {stage: [hook(stage, lambda: clock.sleep(seconds))] for stage in ("ingestion", "delivery")}
        settings: dict[str, Any] = {"rollout_unit": 8, "epochs": 3} if on_policy else {"capacity": 400}
        with store(schedule="auto", clock=clock, **settings, **works) as s:
            actor, learner = s.actor(4), s.learner()
            for iteration in range(250):
                for _ in range(2):
                    clock.sleep(seconds)
                    actor.push(step(0, 4))
                for _ in range(6 if on_policy else 1):
                    learner.pull()
                    clock.sleep(seconds)
                if on_policy:
                    assert s.advance() == iteration + 1
            if seconds:
                assert s.schedule.overlap_del, "half of it could be hidden"
            else:
                assert s.schedule == s._wiring.feasible.simplest, "there is nothing to gain"
            assert "Automatic schedule" in str(s.explain())

    played(0, scene)


# Clocks that jump


class Jumping:
    """A clock over another, whose time is put forward or back: waits that are under way take as long as they would have taken, as
    those of a machine that slept do; whoever looks at the time sees it."""

    def __init__(self, inner: VirtualClock) -> None:
        self._inner = inner
        self.offset_s = 0.0

    def now(self) -> float:
        return self._inner.now() + self.offset_s

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)

    def sleep_until(self, instant_s: float) -> None:
        self._inner.sleep_until(instant_s - self.offset_s)

    def condition(self, name: str) -> Condition:
        return _JumpingCondition(self._inner.condition(name), self)

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        return _JumpingTask(self._inner.spawn(target, name), self)


class _JumpingCondition:
    def __init__(self, inner: Condition, clock: Jumping) -> None:
        self._inner, self._clock = inner, clock

    def __enter__(self) -> _JumpingCondition:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)

    def wait_for(self, predicate: Callable[[], bool], deadline_s: float | None = None) -> bool:
        return self._inner.wait_for(predicate, None if deadline_s is None else deadline_s - self._clock.offset_s)

    def notify_all(self) -> None:
        self._inner.notify_all()

    def rouse(self) -> None:
        self._inner.rouse()


class _JumpingTask:
    def __init__(self, inner: Task, clock: Jumping) -> None:
        self._inner, self._clock = inner, clock

    @property
    def name(self) -> str:
        return self._inner.name

    def alive(self) -> bool:
        return self._inner.alive()

    def join(self, deadline_s: float | None = None) -> bool:
        return self._inner.join(None if deadline_s is None else deadline_s - self._clock.offset_s)


HOURS_S = 5 * 3600.0


@each_schedule
@pytest.mark.parametrize("jump_s", [HOURS_S, -HOURS_S], ids=["forward", "back"])
@pytest.mark.parametrize("seed", range(3))
def test_a_clock_that_jumps_costs_at_most_a_timeout_and_loses_nothing(schedule, jump_s, seed):
    """Each call that is under way may time out, which is what a deadline that has passed means; made again, it goes on."""

    def scene(inner: VirtualClock) -> None:
        clock = Jumping(inner)
        works = {stage: [hook(stage, lambda: clock.sleep(0.05))] for stage in ("ingestion", "delivery")}
        timeouts: list[str] = []

        with store(schedule=schedule, clock=clock, capacity=400, inbox_units=8, timeout_s=60.0, **works) as s:
            actor, learner, jumps, over = s.actor(), s.learner(), [0], threading.Event()

            def act() -> None:
                for number in range(200):
                    taken, said = patiently(lambda number=number: actor.push(step(number)))
                    assert taken == 1
                    timeouts.extend(said)
                    clock.sleep(0.02)

            def learn() -> None:
                for number in range(60):
                    batch, said = patiently(learner.pull)
                    timeouts.extend(said)
                    assert batch.info.number == number
                    assert_intact(batch)
                    clock.sleep(0.03)
                over.set()

            def jump() -> None:
                while not over.is_set():
                    clock.sleep(0.7)
                    clock.offset_s += jump_s
                    jumps[0] += 1

            outcomes = together(inner, act, learn, jump)
            assert [outcome for outcome, _ in outcomes] == [None] * 3
            assert jumps[0] >= 3
            assert len(timeouts) <= 2 * jumps[0], "more calls timed out than were under way when it jumped"
            patiently(lambda: s.preloading().__enter__())
            assert stored_ids(s) == list(range(200))
            assert inner.now() < 60.0, "somebody waited for hours"

    played(seed, scene)


@pytest.mark.parametrize(
    "schedule", [None, Schedule(True, 0.5, True, 0.5), "auto"], ids=["in line", "behind", "chosen"]
)
@pytest.mark.parametrize("jump_s", [HOURS_S, -HOURS_S], ids=["forward", "back"])
def test_on_policy_a_clock_that_jumps_leaves_iterations_whole(schedule, jump_s):
    def scene(inner: VirtualClock) -> None:
        clock = Jumping(inner)
        with store(rollout_unit=8, epochs=2, schedule=schedule, clock=clock, timeout_s=60.0) as s:
            actor, learner = s.actor(2), s.learner()
            for iteration in range(30):
                fill(actor, 8, 8 * iteration)
                clock.offset_s += jump_s if iteration % 5 == 0 else 0.0
                got = [number for batch in learner for number in ids(batch)]
                assert sorted(got) == sorted(2 * list(range(8 * iteration, 8 * iteration + 8)))
                clock.sleep(0.1)
                clock.offset_s += jump_s if iteration % 5 == 1 else 0.0
                s.advance()

    played(0, scene)
