"""On-policy: each iteration takes exactly its rows, of its version, and delivers each exactly `epochs` times."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import conduit
from conduit import Schedule
from conduit.errors import FreshnessError, HookError, ScheduleError, SettingError, UnitError, WaitTimeout
from tests.store.rows import assert_intact, each_backend, ends, fill, ids, step, store

SCHEDULES = [None, Schedule(g_ing=1 / 3, g_del=1 / 3), Schedule(True, 1 / 3, True, 1 / 3), Schedule(True, 1, True, 1)]
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def on_policy(**settings) -> conduit.Store:
    return store(**({"rollout_unit": 12, "batch_size": 4} | settings))


def eventually(holds) -> None:
    done = threading.Event()
    for _ in range(2000):
        if holds():
            return
        done.wait(0.002)
    pytest.fail("it never happened")


def behind(work) -> tuple[threading.Thread, list]:
    out: list = []

    def target() -> None:
        try:
            out.append(work())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    return thread, out


@each_schedule
@pytest.mark.parametrize("epochs", [1, 3])
@each_backend
def test_each_row_is_delivered_exactly_epochs_times_a_pass_at_a_time(backend, epochs, schedule):
    with on_policy(backend=backend, epochs=epochs, schedule=schedule) as s:
        actor, learner = s.actor(lanes=2), s.learner()
        for iteration in range(3):
            assert s.version == iteration
            fill(actor, 12, 12 * iteration)
            batches = list(learner)
            assert len(batches) == 3 * epochs
            unit = list(range(12 * iteration, 12 * iteration + 12))
            for one_pass in range(epochs):
                mine = batches[3 * one_pass : 3 * one_pass + 3]
                assert sorted(i for batch in mine for i in ids(batch)) == unit
            for batch in batches:
                assert_intact(batch)
                assert set(batch.info.policy_version) == {iteration}
                assert set(batch.info.weight.tolist()) == {1.0}
            assert s.advance() == iteration + 1
            assert len(s) == 0


def test_a_remainder_is_an_error_when_the_store_is_made():
    with pytest.raises(UnitError, match=r"batch_size=5 doesn't divide rollout_unit=12"):
        on_policy(batch_size=5)


@pytest.mark.parametrize("version", [-1, 1, 4])
def test_rows_of_a_wrong_version_are_refused_with_both(version):
    with on_policy() as s:
        actor = s.actor()
        fill(actor, 12)
        s.advance()
        fill(actor, 12, 12)
        s.advance()
        with pytest.raises(FreshnessError, match=rf"version {version} .*iteration 2 is running; expected 2, or 3"):
            actor.push(step(0), version=version)
        assert actor.push(step(0), version=2) == 1


def test_rows_of_the_next_version_wait_for_advance():
    with on_policy() as s:
        actor, learner = s.actor(), s.learner()
        fill(actor, 12)
        thread, out = behind(lambda: actor.push(step(100), version=1))
        list(learner)
        thread.join(0.05)
        assert thread.is_alive()
        s.advance()
        thread.join(5)
        assert out == [1]
        fill(actor, 11, 101)
        assert sorted(i for batch in learner for i in ids(batch)) == list(range(100, 112))
        assert s.ledger.total.blocked_s > 0.0


def test_rows_that_wait_for_the_next_version_say_what_for():
    with on_policy() as s:
        actor = s.actor()
        fill(actor, 3)
        with pytest.raises(
            WaitTimeout, match=r"version 1 wait for iteration 0 to end: .*3 of 12 rows.*push 9 more.*advance"
        ):
            actor.push(step(3), version=1, timeout_s=0.02)
        fill(actor, 9, 3)
        assert sorted(i for batch in s.learner() for i in ids(batch)) == list(range(12))


@each_schedule
def test_an_early_stop_drops_what_is_left_and_the_next_iteration_is_whole(schedule):
    with on_policy(epochs=4, schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()
        for iteration, pulled in enumerate((5, 0, 1, 12, 3)):
            fill(actor, 12, 12 * iteration)
            for _ in range(pulled):
                batch = learner.pull()
                assert set(batch.info.policy_version) == {iteration}
                assert set(ids(batch)) <= set(range(12 * iteration, 12 * iteration + 12))
            s.advance()
            assert learner.staged == 0
        fill(actor, 12, 60)
        assert sorted(i for batch in learner for i in ids(batch)) == sorted(4 * list(range(60, 72)))


@each_schedule
def test_a_pull_that_waits_while_the_iteration_ends_gets_the_next_iterations_first(schedule):
    with on_policy(schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()
        fill(actor, 12)
        list(learner)
        thread, out = behind(learner.pull)
        s.advance()
        fill(actor, 12, 12)
        thread.join(5)
        assert out[0].info.number == 3
        assert set(ids(out[0])) <= set(range(12, 24))


def test_advance_before_the_iteration_is_whole_is_refused_and_drops_nothing():
    with on_policy() as s:
        actor, learner = s.actor(), s.learner()
        fill(actor, 7)
        with pytest.raises(UnitError, match=r"iteration 0 has 7 of 12 rows \(rollout_unit\): push 5 more"):
            s.advance()
        fill(actor, 5, 7)
        assert sorted(i for batch in learner for i in ids(batch)) == list(range(12))


def test_a_push_too_many_is_refused_and_changes_nothing():
    with on_policy() as s:
        actor, learner = s.actor(lanes=5), s.learner()
        fill(actor, 10)
        with pytest.raises(
            UnitError, match=r"10 of 12 rows \(rollout_unit\), and this push brings 5 more.*advance.*version=1"
        ):
            actor.push(step(10, 5))
        actor.push_trajectory(step(10, 2))
        with pytest.raises(UnitError, match="12 of 12 rows"):
            actor.push(step(12, 5))
        assert sorted(i for batch in learner for i in ids(batch)) == list(range(12))


def test_a_short_unit_is_refused_at_its_end():
    with on_policy() as s:
        actor = s.actor(lanes=2)
        with pytest.raises(UnitError, match="iteration 0 is short: 0 of 12"):
            actor.end_unit()
        fill(actor, 10)
        with pytest.raises(
            UnitError,
            match=r"is short: 10 of 12 rows \(rollout_unit\) when the last of 1 actors.*make all actors before.*NEXT_STEP",
        ):
            actor.end_unit()
        fill(actor, 2, 10)
        actor.end_unit()
        with pytest.raises(UnitError, match="has ended its unit for iteration 0 already"):
            actor.end_unit()


def test_end_unit_is_on_policy():
    with store() as s, pytest.raises(UnitError, match="off-policy"):
        s.actor().end_unit()


def test_an_iteration_of_two_actors_ends_with_the_second():
    seen = []
    with on_policy(ingestion=[fragments_into(seen)]) as s:
        first, second, learner = s.actor(lanes=2), s.actor(), s.learner()
        fill(first, 8)
        first.end_unit(bootstrap={"id": np.array([50, 51], np.int32)})
        with pytest.raises(UnitError, match=r"after its actor called end_unit\(\)"):
            first.push(step(99, 2))
        fill(second, 4, 100)
        with pytest.raises(WaitTimeout, match=r"12 rows, but lanes \[2\] are open: call actor.end_unit"):
            learner.pull(timeout_s=0.02)
        second.end_unit(bootstrap={"id": np.array([52], np.int32)})
        assert sorted(i for batch in learner for i in ids(batch)) == [*range(8), *range(100, 104)]
    assert seen == [
        (0, [0, 2, 4, 6], "OPEN", 50), (1, [1, 3, 5, 7], "OPEN", 51), (2, [100, 101, 102, 103], "OPEN", 52)
    ]  # fmt: skip


def fragments_into(seen: list):
    @conduit.register_ingestion(per="trajectory")
    def note(source, sink):
        for f in source.read():
            seen.append((f.lane, f.rows["id"].tolist(), f.end.name, None if f.final is None else int(f.final["id"])))
        sink.write(source.read())

    return note


def test_trajectories_end_by_leaves_finals_cuts_and_the_units_edge():
    seen = []
    with on_policy(ingestion=[fragments_into(seen)]) as s:
        actor, gone = s.actor(lanes=2), s.actor(lanes=1)
        actor.push(ends(0, 2, terminated=[0]))
        actor.push(ends(2, 2, truncated=[1]), final={"id": np.array([77], np.int32)})
        actor.push(ends(4, 2, truncated=[0]))
        gone.push(ends(50, 1))
        gone.push(ends(51, 1))
        gone.close()
        fill_ends(actor, 6, 10)
        actor.end_unit(bootstrap={"id": np.array([60, 61], np.int32)})
        assert sorted(i for batch in s.learner() for i in ids(batch)) == [*range(10), 50, 51]
    assert sorted(seen) == sorted([
        (0, [0], "TERMINATED", None),
        (1, [1, 3], "TRUNCATED", 77),
        (0, [2, 4], "CUT", None),
        (2, [50, 51], "CUT", None),
        (0, [6, 8], "OPEN", 60),
        (1, [5, 7, 9], "OPEN", 61),
    ])  # fmt: skip


def fill_ends(actor, first: int, stop: int) -> None:
    for number in range(first, stop, actor.lanes):
        actor.push(ends(number, actor.lanes))


def test_lanes_that_all_ended_need_no_end_unit():
    seen = []
    with on_policy(ingestion=[fragments_into(seen)]) as s:
        actor, learner = s.actor(lanes=6), s.learner()
        actor.push(ends(0, 6))
        actor.push(ends(6, 6, terminated=range(6)))
        assert len(list(learner)) == 3
    assert [f[1] for f in seen] == [[i, 6 + i] for i in range(6)]


def test_batches_kept_over_advance_stay_intact_though_their_slots_are_reused():
    with on_policy() as s:
        actor, learner = s.actor(), s.learner()
        fill(actor, 12)
        kept = list(learner)
        s.advance()
        fill(actor, 12, 12)
        list(learner)
        for batch in kept:
            assert set(ids(batch)) <= set(range(12))
            assert_intact(batch)


@each_schedule
def test_a_pull_beyond_the_iteration_says_that_it_has_given_all_and_no_more(schedule):
    with on_policy(schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()
        fill(actor, 12)
        list(learner)
        with pytest.raises(WaitTimeout) as caught:
            learner.pull(timeout_s=0.02)
        said = "iteration 0 has given all its batches: call store.advance() and push iteration 1"
        assert str(caught.value) == f"pull of batch 3 (learner 0 of 1) timed out: {said}"


@each_schedule
def test_a_loop_over_a_learner_gives_what_is_left_of_the_iteration_and_a_second_one_nothing(schedule):
    with on_policy(schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()
        for iteration in range(2):
            fill(actor, 12, 12 * iteration)
            learner.pull()
            assert len(list(learner)) == 2
            assert list(learner) == []
            s.advance()


FIRST = {
    "of another version": ({"version": 7}, FreshnessError),
    "of the next version": ({"version": 1, "timeout_s": 0.01}, WaitTimeout),
    "too many": ({}, UnitError),
}


@pytest.mark.parametrize("case", FIRST)
def test_a_first_push_that_is_refused_fixes_no_schema(case):
    settings, error = FIRST[case]
    with on_policy() as s:
        lanes = 13 if case == "too many" else 4
        with pytest.raises(error):
            s.actor(lanes=lanes).push({"id": np.zeros(lanes)}, **settings)
        actor = s.actor(lanes=4)
        assert actor.push({"id": np.zeros(4)}, valid=np.zeros(4, np.bool_)) == 0
        fill(actor, 12)
        assert sorted(i for batch in s.learner() for i in ids(batch)) == list(range(12))


def test_rows_that_no_actor_is_left_to_push_are_asked_of_a_new_one():
    with on_policy() as s:
        gone, ended = s.actor(lanes=2), s.actor(lanes=2)
        fill(gone, 2)
        fill(ended, 4, 2)
        ended.end_unit()
        gone.close()
        for call in (s.advance, lambda: ended.push(step(6, 2)), lambda: s.learner().pull(timeout_s=0.02)):
            with pytest.raises((UnitError, WaitTimeout), match=r"6 of 12 rows.*store.actor\(\)") as caught:
                call()
            assert "advance() first" not in str(caught.value)
        fill(s.actor(), 6, 6)
        s.advance()


def test_a_pull_of_a_short_iteration_says_what_is_missing():
    with on_policy() as s:
        fill(s.actor(), 7)
        with pytest.raises(WaitTimeout, match=r"iteration 0 has 7 of 12 rows \(rollout_unit\): push 5 more"):
            s.learner().pull(timeout_s=0.02)


def test_a_learner_made_later_starts_at_the_running_iteration():
    with on_policy() as s:
        actor = s.actor()
        fill(actor, 12)
        s.advance()
        fill(actor, 12, 12)
        learner = s.learner()
        assert sorted(i for batch in learner for i in ids(batch)) == list(range(12, 24))


def test_a_hook_that_may_change_the_number_of_rows_is_refused_by_name():
    @conduit.register_ingestion(per="unit", rows="any")
    def halve(source, sink):
        sink.write({name: leaf[::2] for name, leaf in source.read().items()})

    with pytest.raises(HookError, match=r"'halve' declares rows='any'.*exactly its rollout_unit rows"):
        on_policy(ingestion=[halve])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 9}, "capacity: off-policy settings"),
        ({"sampler": conduit.Uniform()}, "off-policy settings"),
        ({"exact": True}, "off-policy settings"),
        ({"inbox_units": 3}, "inbox_units and when_full are off-policy"),
        ({"when_full": "drop"}, "inbox_units and when_full are off-policy"),
        ({"rollout_unit": None}, "needs rollout_unit="),
    ],
)
def test_settings_of_the_other_mode_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        on_policy(**settings)


def test_granularities_are_parts_of_the_iteration():
    with pytest.raises(ScheduleError, match=r"g_ing=2: on-policy granularities are k/M with M = 3"):
        on_policy(schedule=Schedule(g_ing=2))


def test_samples_on_demand_are_off_policy():
    with on_policy() as s, pytest.raises(SettingError, match="off-policy"):
        s.sample(4)
