"""Appendix C, whatever the schedule: no row comes fresher or staler than the algorithm allows, and draws are the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import conduit
from conduit import Schedule
from conduit.clock import REAL, VirtualClock
from tests.flow.lanes import Told
from tests.flow.programs import (
    CONTENTS,
    PUSHED,
    SCOPES,
    Bounded,
    OffPolicy,
    OnPolicy,
    most_lag,
    off_policy,
    off_policy_schedules,
    off_policy_settings,
    on_policy_schedules,
)
from tests.store.rows import no_thread_left, played, together

M = 4

schedules = st.builds(Schedule, st.booleans(), st.integers(1, 5), st.booleans(), st.integers(1, 5))
seeds = st.integers(0, 1000)


# Invariant 2: on-policy


@pytest.mark.parametrize("scope", SCOPES)
def test_no_schedule_mixes_iterations_and_each_row_comes_exactly_e_times(scope):
    """For every pair of modes. What hooks see is checked with it: a unit hook whole units, a trajectory hook whole fragments."""
    for number, schedule in enumerate(on_policy_schedules(M)):
        actors, learners = 1 + number % 2, 1 + number // 2 % 2
        played(
            number,
            lambda clock, s=schedule, a=actors, n=learners, i=number: OnPolicy(clock, s, scope, a, n, seed=i).run(),
        )


@pytest.mark.parametrize("stops", [0, 1, 3])
def test_an_iteration_that_is_stopped_early_leaves_nothing_to_the_next(stops):
    for number, schedule in enumerate(on_policy_schedules(M)):
        actors, learners = 1 + number % 2, 1 + number // 2 % 2

        def scene(clock: VirtualClock, s=schedule, a=actors, n=learners, i=number) -> OnPolicy:
            return OnPolicy(clock, s, SCOPES[i % 4], a, n, seed=i, stops=stops, iterations=3).run()

        assert len(played(number, scene).batches) == 3 * stops * learners


# Invariant 2: off-policy and bounded


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(schedules, st.sampled_from(list(CONTENTS)), st.booleans(), seeds, seeds)
@example(Schedule(False, 5, True, 5), "rows", False, 1, 1)
def test_no_batch_is_staler_than_its_schedule_allows(schedule, content, prioritized, seed, interleaving):
    """Its lag at most 2g − 1 batches, g − 1 in line; its frontier no older than when it was asked for."""
    program = played(
        interleaving,
        lambda clock: off_policy(clock, schedule, seed, 40, content=content, prioritized=prioritized, late=True),
    )
    lags = [batch.info.priority_lag for batch in program.batches]
    if len(lags) > 2 * schedule.g_del:
        assert max(lags) == most_lag(schedule), "the bound is never reached: this shows nothing"


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.booleans(), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(1, 2), seeds, seeds)
def test_no_learner_gets_a_row_that_is_staler_than_max_staleness(
    overlap, g, most, actors, learners, seed, interleaving
):
    played(
        interleaving,
        lambda clock: Bounded(clock, Schedule(overlap, g), most, actors, learners, seed=seed).run(),
    )


# Equal frontiers, equal rows


@pytest.mark.parametrize("content", CONTENTS)
def test_equal_numbers_and_frontiers_give_equal_rows_under_every_schedule(content):
    known: dict[tuple[int, int], list[int]] = {}
    reached: Counter[tuple[int, int]] = Counter()
    for number, schedule in enumerate(off_policy_schedules((1, 2, 4), (1, 2, 4))):
        program = played(number, lambda clock, s=schedule: off_policy(clock, s, 5, 40, content=content))
        for at, keys in program.drawn().items():
            assert known.setdefault(at, keys) == keys, f"batch {at[0]} at frontier {at[1]} under {schedule}"
            reached[at] += 1
    assert sum(times >= 4 for times in reached.values()) > 20, "hardly any was reached twice: this shows nothing"


def test_on_policy_batches_are_the_same_under_every_schedule():
    @cache
    def expected() -> list[list[int]]:
        return keys_under(Schedule(), 0)

    def keys_under(schedule: Schedule, seed: int) -> list[list[int]]:
        program = played(seed, lambda clock: OnPolicy(clock, schedule, seed=3).run())
        return [batch.info.keys.tolist() for batch in program.batches]

    for number, schedule in enumerate(on_policy_schedules(M)):
        assert keys_under(schedule, number) == expected(), schedule


# Priorities


def replayed(program: OffPolicy, **more: Any) -> None:
    with conduit.Store(**more) as store:
        program.check_replayed(store)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(schedules, st.sampled_from(list(CONTENTS)), seeds, seeds)
def test_a_prioritized_draw_is_that_of_a_store_in_line_which_knows_what_its_lag_says(
    schedule, content, seed, interleaving
):
    """So each batch states its lag truly: with one update more or less known, other rows would be drawn with other weights."""
    program = played(
        interleaving,
        lambda clock: off_policy(clock, schedule, seed, 30, content=content, prioritized=True, late=True),
    )
    replayed(program, **off_policy_settings(content, prioritized=True))


@pytest.mark.parametrize("schedule", off_policy_schedules((1, 2, 4), (1,)), ids=repr)
def test_exact_draws_know_every_update_and_are_the_same_in_all_interleavings(schedule):
    if schedule.overlap_del:
        with pytest.raises(conduit.errors.ScheduleError, match="exact=True"):
            conduit.Store(schedule=schedule, **off_policy_settings(prioritized=True, exact=True))
        return
    drawn: set[tuple[Any, ...]] = set()
    for interleaving in range(12):
        program = played(
            interleaving, lambda clock: off_policy(clock, schedule, 4, 40, prioritized=True, late=True, exact=True)
        )
        infos = [batch.info for batch in program.batches]
        assert {info.priority_lag for info in infos} == {0}
        drawn.add(tuple((info.frontier, *info.keys.tolist(), *info.probability.tolist()) for info in infos))
    assert len(drawn) == 1


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(schedules, st.booleans(), seeds)
def test_a_lag_is_the_truth_where_another_thread_updates(schedule, exact, interleaving):
    """A batch knows every update that had returned when the pull was called that it was asked for at, and none that was called after
    that pull."""
    if exact:
        schedule = Schedule(schedule.overlap_ing, schedule.g_ing)
    updates: list[tuple[list[int], float]] = []
    told = [0]
    """How many of them have returned."""
    span: list[tuple[int, int]] = []
    """By pull: how many updates had returned when it was called, and how many had been called when it returned."""

    def scene(clock: VirtualClock) -> list[conduit.Batch]:
        chance = random.Random(interleaving)
        with conduit.Store(
            clock=clock, schedule=schedule, **off_policy_settings(prioritized=True, exact=exact)
        ) as store:
            actor, learner, batches, over = store.actor(2), store.learner(), [], []

            def act() -> None:
                rows = Told(random.Random(0))
                while not over:
                    rows.push(actor)
                    clock.sleep(chance.random())

            def learn() -> None:
                for _ in range(25):
                    returned = told[0]
                    batches.append(learner.pull())
                    span.append((returned, len(updates)))
                    clock.sleep(0.5 * chance.random())
                over.append(True)

            def update() -> None:
                while not over:
                    if batches:
                        keys, value = batches[-1].info.keys, 1.0 + len(updates) / 64
                        updates.append((keys.tolist(), value))
                        store.update_priorities(keys, np.full(len(keys), value))
                        told[0] += 1
                    clock.sleep(0.2 * chance.random())

            assert [outcome for outcome, _ in together(clock, act, learn, update)] == [None] * 3
            return batches

    for batch in played(interleaving, scene):
        info = batch.info
        assert info.priority_lag <= most_lag(schedule)
        before, by = span[info.number - info.priority_lag]
        for key, priority in zip(info.keys.tolist(), info.priority.tolist(), strict=True):
            known = [PUSHED, *(value for keys, value in updates[:before] if key in keys)]
            meanwhile = [value for keys, value in updates[before:by] if key in keys]
            assert priority in (known[-1], *meanwhile), f"batch {info.number}, key {key}"


def test_exact_draws_are_the_same_under_every_schedule_that_is_allowed():
    """Where all rows are visible to each: what ingestion behind rollout holds back is another frontier, and each batch says so."""

    def drawn(schedule: Schedule, interleaving: int) -> list[Any]:
        def scene(clock: VirtualClock) -> list[Any]:
            made = off_policy_settings(prioritized=True, exact=True)
            with conduit.Store(clock=clock, schedule=schedule, **made) as store:
                program = OffPolicy(store, 1, prioritized=True, late=True, sleep=clock.sleep)
                program.run(0)  # which ends behind all that was pushed
                for _ in range(20):
                    program.pull()
                return [(*b.info.keys.tolist(), *b.info.priority.tolist()) for b in program.batches]

        return played(interleaving, scene)

    allowed = [schedule for schedule in off_policy_schedules((1, 2, 3, 4), (1,)) if not schedule.overlap_del]
    expected = drawn(Schedule(), 0)
    assert len(set(expected)) == 20
    for number, schedule in enumerate(allowed):
        assert drawn(schedule, number) == expected, schedule


# Hooks, off-policy (on-policy they are checked above)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.booleans(), st.integers(1, 5), st.sampled_from(["row", "unit", "trajectory"]), seeds, seeds)
def test_off_policy_a_unit_hook_gets_one_push_and_a_trajectory_hook_whole_episodes(
    overlap, g, scope, seed, interleaving
):
    seen: list[list[int]] = []

    @conduit.register_ingestion(per=scope)
    def note(source: Any, sink: Any) -> None:
        data = source.read()
        seen.extend(rows["id"].tolist() for rows in ([f.rows for f in data] if scope == "trajectory" else [data]))
        sink.write(data)

    def scene(clock: VirtualClock) -> OffPolicy:
        made = off_policy_settings(ingestion=[note], capacity=200, batch_size=1)
        with conduit.Store(clock=clock, schedule=Schedule(overlap, g), **made) as store:
            program = OffPolicy(store, seed, sleep=clock.sleep)
            actor, chance = store.actor(2), random.Random(seed)
            for _ in range(20):
                program.told.push(actor)
                clock.sleep(chance.random())
            actor.close()
            with store.preloading():
                pass
            return program

    told = played(interleaving, scene).told
    assert sorted(number for call in seen for number in call) == list(range(40)), "each row once"
    if scope == "unit":
        assert seen == [push.numbers for push in told.pushes], "a fraction of a push, or more than one"
    if scope == "trajectory":
        assert sorted(seen) == sorted(told.episodes(2))


# Real threads


def in_real_time(run: Callable[[], Any]) -> None:
    with no_thread_left():
        run()


@pytest.mark.parametrize(
    "schedule", [Schedule(), Schedule(True, 0.25, True, 0.25), Schedule(True, 1, True, 0.5)], ids=repr
)
def test_iterations_do_not_mix_in_real_time(schedule):
    in_real_time(lambda: OnPolicy(REAL, schedule, "trajectory", 2, 2, iterations=3).run())


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(True, 2)], ids=repr)
def test_staleness_is_bounded_in_real_time(schedule):
    in_real_time(lambda: Bounded(REAL, schedule, 1).run())
