"""Schedules that change while a store runs: all that holds under each of them holds on the way from one to another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit
from conduit import Auto, Schedule
from conduit.clock import REAL, Clock, VirtualClock
from conduit.core.scheduler import Scheduler
from conduit.errors import HandOverError
from tests.flow.lanes import Told
from tests.flow.programs import (
    CONTENTS,
    SCOPES,
    Bounded,
    OffPolicy,
    OnPolicy,
    most_lag,
    off_policy_settings,
)
from tests.store.rows import PLACEMENTS, no_thread_left, played, together

seeds = st.integers(0, 1000)
CAPPED = Auto(g_ing=5, g_del=5)
BACKENDS = ["reference", "torch", "jax"]


def switch(store: conduit.Store, schedule: Schedule) -> None:
    """All parts follow `schedule` as soon as they may."""
    store._switchboard.apply(schedule)


def is_in_force(store: conduit.Store) -> bool:
    """Whether they do."""
    return store._switchboard.in_force_since() is not None


def feasible(store: conduit.Store) -> Sequence[Schedule]:
    return store._wiring.feasible.schedules


@contextmanager
def nobody_chooses() -> Iterator[None]:
    """Stores whose schedule is chosen keep the first, until somebody else switches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "run", lambda self: None)
        yield


class Walk:
    """A random walk over a store's schedules, and over its placements where it may be moved."""

    def __init__(self, store: conduit.Store, odds: float, places: Sequence[Any] = ()) -> None:
        self.store, self.odds, self.places = store, odds, places
        self.visited: list[Schedule] = []
        self._pending = [store.schedule]

    def __call__(self, chance: random.Random) -> None:
        if chance.random() < self.odds:
            self.go(chance.choice(feasible(self.store)))
        if self.places and len(self.store) and chance.random() < 0.05:
            self.store.migrate(chance.choice(self.places))

    def go(self, schedule: Schedule) -> None:
        switch(self.store, schedule)
        self.visited.append(schedule)
        self._pending.append(schedule)

    def in_force(self) -> Sequence[Schedule]:
        """Those that some part of the store may still follow."""
        if is_in_force(self.store):
            self._pending = self._pending[-1:]
        return list(self._pending)


def walked(
    clock: Clock,
    seed: int,
    steps: int,
    odds: float,
    *,
    content: Any,
    prioritized: bool,
    places: Sequence[Any] = (),
    **more,
) -> tuple[OffPolicy, Walk]:
    """A run of the program, all of it checked, on a store whose schedule changes all the time."""
    more = off_policy_settings(content, prioritized, **more)
    with nobody_chooses(), conduit.Store(clock=clock, schedule=CAPPED, **more) as store:
        walk = Walk(store, odds, places)
        sleep = None if clock is REAL else clock.sleep
        program = OffPolicy(
            store,
            seed,
            content=content,
            prioritized=prioritized,
            late=True,
            sleep=sleep,
            between=walk,
            in_force=walk.in_force,
        )
        return program.run(steps), walk


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(list(CONTENTS)), st.booleans(), st.sampled_from([0.05, 0.3, 1.0]), seeds, seeds)
def test_off_policy_rows_bounds_and_lags_hold_on_the_way_from_schedule_to_schedule(
    content, prioritized, odds, seed, interleaving
):
    program, _ = played(
        interleaving, lambda clock: walked(clock, seed, 50, odds, content=content, prioritized=prioritized)
    )
    # Each draw is one of a store in line that has the same frontier, and knows the same updates.
    with conduit.Store(**off_policy_settings(content, prioritized)) as store:
        program.check_replayed(store)


@pytest.mark.parametrize(("backend", "seed"), [*(("reference", seed) for seed in range(4)), ("torch", 1), ("jax", 2)])
def test_rows_come_out_as_they_went_in_while_schedules_and_placements_change(backend, seed):
    places = [place for place in PLACEMENTS[backend] if place != "auto"]

    def scene(clock: VirtualClock) -> Walk:
        content = list(CONTENTS)[seed % 3]
        return walked(clock, seed, 60, 0.3, content=content, prioritized=True, places=places, backend=backend)[1]

    assert len(set(played(seed, scene).visited)) > 5


MODES = list(product((False, True), (1, 2, 4, 5)))


@pytest.mark.parametrize("first", MODES, ids=lambda mode: f"{'behind' if mode[0] else 'in-line'}-{mode[1]}")
def test_every_mode_follows_upon_every_other_within_a_few_calls(first):
    """Ingestion's at the next push that begins a group, delivery's where one of its groups begins that nobody has asked for."""
    for number, second in enumerate(MODES):

        def scene(clock: VirtualClock, number=number, second=second) -> None:
            one, other = Schedule(*first, *first), Schedule(*second, *second)
            with conduit.Store(clock=clock, schedule=CAPPED, **off_policy_settings("nexts", True)) as store:
                walk = Walk(store, 0.0)
                program = OffPolicy(
                    store, number, content="nexts", prioritized=True, sleep=clock.sleep, in_force=walk.in_force
                )
                program.run(0)
                for schedule in (one, other):
                    walk.go(schedule)
                    for call in range(30):
                        program.push()
                        program.pull()
                        if is_in_force(store) and call >= number:
                            break
                    assert is_in_force(store)
                    assert walk.in_force() == [schedule]
                for _ in range(1):  # more than were asked for before
                    program.pull()
                assert 0 <= program.batches[-1].info.priority_lag <= most_lag(other)
                program.check_stored()

        with nobody_chooses():
            played(number, scene)


def test_rows_are_as_they_were_pushed_where_ingestion_switches_while_a_push_is_under_way():
    """An actor's arrays, which are used again at once, may have been checked for a write in line."""

    def scene(clock: VirtualClock) -> None:
        with conduit.Store(clock=clock, schedule=CAPPED, **off_policy_settings(capacity=200)) as store:
            program, over = OffPolicy(store, 0), []

            def act() -> None:
                actor = store.actor(2)
                for _ in range(40):
                    program.told.push(actor)
                over.append(True)

            def switches() -> None:
                while not over:
                    for behind, g in ((True, 1), (False, 2), (False, 1)):
                        switch(store, Schedule(behind, g, False, 1))
                        clock.sleep(0.0)

            together(clock, act, switches)
            program.check_stored()

    with nobody_chooses():
        for seed in range(40):
            played(seed, scene)


def test_what_ingestion_held_back_behind_rollout_is_seen_once_it_is_in_line():
    def scene(clock: VirtualClock) -> None:
        with conduit.Store(clock=clock, schedule=CAPPED, **off_policy_settings()) as store:
            actor, learner, told = store.actor(2), store.learner(), Told(random.Random(0))
            switch(store, Schedule(True, 1, False, 1))
            for _ in range(5):
                told.push(actor)
            assert learner.pull().info.frontier == 7
            switch(store, Schedule(False, 1, False, 1))
            assert learner.pull().info.frontier == 9

    with nobody_chooses():
        for seed in range(10):
            played(seed, scene)


def test_batches_that_were_asked_for_are_not_asked_for_again_where_one_before_them_is():
    """A batch that couldn't be handed over is asked for anew, as the schedule says by then: up to those that are staged."""

    def scene(clock: VirtualClock) -> None:
        with conduit.Store(clock=clock, schedule=CAPPED, **off_policy_settings()) as store:
            program, backend = OffPolicy(store, 0), store._backend
            program.run(0)
            hand_over, failing = backend.hand_over, [True]

            def fails_once(*given: Any) -> Any:
                if failing:
                    raise HandOverError(failing.pop())
                return hand_over(*given)

            switch(store, Schedule(False, 1, True, 2))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(backend, "hand_over", fails_once)
                with pytest.raises(HandOverError):
                    program.learner.pull()
                clock.sleep(1.0)
                before = store.info()["inserted"]
                switch(store, Schedule(False, 1, False, 4))
                program.push()
                told = [program.learner.pull().info for _ in range(4)]
            assert [info.number for info in told] == [0, 1, 2, 3]
            assert [info.frontier < before for info in told] == [False, False, True, True]

    with nobody_chooses():
        played(0, scene)


def test_on_policy_a_learner_that_was_stopped_in_the_midst_of_a_group_follows_in_the_next_iteration():
    with (
        nobody_chooses(),
        conduit.Store(
            backend="reference", mode="on_policy", rollout_unit=16, batch_size=2, epochs=1, schedule="auto"
        ) as store,
    ):
        actor, learner = store.actor(16), store.learner()
        actor.push({"obs": np.zeros((16, 2), np.float32)})
        learner.pull()
        switch(store, Schedule(False, 1, False, 0.5))
        assert not is_in_force(store)
        store.advance()
        assert is_in_force(store)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(SCOPES), st.integers(1, 2), st.integers(1, 2), st.sampled_from([None, 1, 3]), seeds, seeds)
def test_on_policy_iterations_stay_whole_and_apart_on_the_way_from_schedule_to_schedule(
    scope, actors, learners, stops, seed, interleaving
):
    def scene(clock: VirtualClock) -> OnPolicy:
        return OnPolicy(
            clock,
            Auto(),
            scope,
            actors,
            learners,
            iterations=4,
            stops=stops,
            seed=seed,
            switch=lambda store, chance: switch(store, chance.choice(feasible(store))),
        ).run()

    with nobody_chooses():
        played(interleaving, scene)


def test_on_policy_batches_are_those_of_a_store_in_line_whatever_the_schedules_were():
    def keys(seed: int, schedule: Any, walks: bool) -> list[list[int]]:
        def scene(clock: VirtualClock) -> OnPolicy:
            walk = (lambda store, chance: switch(store, chance.choice(feasible(store)))) if walks else None
            return OnPolicy(clock, schedule, seed=3, iterations=4, switch=walk).run()

        return [batch.info.keys.tolist() for batch in played(seed, scene).batches]

    expected = keys(0, None, walks=False)
    with nobody_chooses():
        for seed in range(20):
            assert keys(seed, Auto(), walks=True) == expected


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 2), seeds, seeds)
def test_bounded_staleness_holds_on_the_way_from_schedule_to_schedule(most, actors, learners, seed, interleaving):
    def scene(clock: VirtualClock) -> Bounded:
        return Bounded(
            clock,
            Auto(g_ing=4),
            most,
            actors,
            learners,
            seed=seed,
            switch=lambda store, chance: switch(store, chance.choice(feasible(store))),
        ).run()

    with nobody_chooses():
        played(interleaving, scene)


# Schedules that are chosen


def working(clock: Clock, seconds: float) -> dict[str, Any]:
    """Hooks that hand on what they get after so long."""

    @conduit.register_ingestion()
    def ingest(source: Any, sink: Any) -> None:
        clock.sleep(seconds)
        sink.write(source.read())

    @conduit.register_delivery()
    def deliver(source: Any, sink: Any) -> None:
        clock.sleep(seconds)
        sink.write(source.read())

    return {"ingestion": [ingest], "delivery": [deliver]}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("seed", range(3))
def test_off_policy_all_of_it_holds_while_a_store_profiles_and_chooses(content, seed):
    visited: set[Schedule] = set()

    def scene(clock: VirtualClock) -> OffPolicy:
        made = off_policy_settings(content, True, **working(clock, 0.2))
        with conduit.Store(clock=clock, schedule=Auto(g_ing=4, g_del=4), **made) as store:

            def in_force() -> Sequence[Schedule]:
                visited.add(store.schedule)
                return feasible(store)

            return OffPolicy(
                store, seed, content=content, prioritized=True, late=True, sleep=clock.sleep, in_force=in_force
            ).run(400)

    program = played(seed, scene)
    assert len(visited) > 5, f"it has tried {visited} only: this shows nothing"
    with conduit.Store(**off_policy_settings(content, True)) as store:
        program.check_replayed(store)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_off_policy_no_batch_is_further_ahead_than_is_allowed_to_a_store_that_chooses(ahead):
    def scene(clock: VirtualClock) -> OffPolicy:
        made = off_policy_settings(**working(clock, 0.2))
        with conduit.Store(clock=clock, schedule=Auto(batches_ahead=ahead), **made) as store:
            program = OffPolicy(store, ahead, sleep=clock.sleep, in_force=lambda: feasible(store))
            return program.run(300)

    lags = {batch.info.priority_lag for batch in played(ahead, scene).batches}
    assert max(lags) == ahead


def test_exact_draws_know_every_update_while_a_store_profiles_and_chooses():
    def scene(clock: VirtualClock) -> OffPolicy:
        made = off_policy_settings("rows", True, exact=True, **working(clock, 0.2))
        with conduit.Store(clock=clock, schedule="auto", **made) as store:
            program = OffPolicy(
                store, 3, prioritized=True, late=True, sleep=clock.sleep, in_force=lambda: feasible(store)
            )
            return program.run(300)

    program = played(0, scene)
    assert {batch.info.priority_lag for batch in program.batches} == {0}
    with conduit.Store(**off_policy_settings("rows", True, exact=True)) as store:
        program.check_replayed(store)


@pytest.mark.parametrize("scope", SCOPES)
def test_on_policy_iterations_stay_whole_and_apart_while_a_store_profiles_and_chooses(scope):
    visited: set[Schedule] = set()

    def scene(clock: VirtualClock) -> OnPolicy:
        return OnPolicy(
            clock,
            Auto(),
            scope,
            2,
            2,
            iterations=40,
            works_s=0.01,
            switch=lambda store, chance: visited.add(store.schedule),
        ).run()

    played(1, scene)
    assert len(visited) > 3 or scope == "none", f"it has tried {visited} only: this shows nothing"


@pytest.mark.parametrize("most", [0, 2])
def test_bounded_staleness_holds_while_a_store_profiles_and_chooses(most):
    visited: set[Schedule] = set()

    def scene(clock: VirtualClock) -> Bounded:
        return Bounded(
            clock,
            Auto(g_ing=4),
            most,
            pushes=150,
            switch=lambda store, chance: visited.add(store.schedule),
            settings={**working(clock, 0.005), "delivery": []},
        ).run()

    played(2, scene)
    assert len(visited) > 3, f"it has tried {visited} only: this shows nothing"


# Real threads


@pytest.mark.parametrize("backend", BACKENDS)
def test_off_policy_all_of_it_holds_in_real_time(backend):
    with no_thread_left():
        program, _ = walked(REAL, 1, 100, 0.3, content="3 steps", prioritized=True, backend=backend)
    with conduit.Store(**off_policy_settings("3 steps", True)) as store:
        program.check_replayed(store)


def test_on_policy_all_of_it_holds_in_real_time():
    with nobody_chooses(), no_thread_left():
        OnPolicy(
            REAL,
            Auto(),
            "trajectory",
            2,
            2,
            iterations=6,
            switch=lambda store, chance: switch(store, chance.choice(feasible(store))),
        ).run()
