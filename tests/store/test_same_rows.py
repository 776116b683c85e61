"""From one seed, the same rows: on every backend, placement and schedule, byte for byte."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import conduit
from conduit import Schedule
from tests.store.rows import EVERYWHERE, fill, fingerprint, host, step, store

CAPACITY = 40


def uniform(backend: str, placement: Any) -> list[tuple]:
    with store(backend=backend, placement=placement, capacity=CAPACITY, batch_size=16, seed=5) as s:
        actor, learner = s.actor(lanes=3), s.learner()
        batches = []
        for number in range(0, 90, 3):
            actor.push(step(number, 3))
            if number > 15:
                batches.append(fingerprint(learner.pull()))
        return [*batches, fingerprint(s.sample(7))]


def prioritized(backend: str, placement: Any) -> list[tuple]:
    with store(
        backend=backend, placement=placement, capacity=CAPACITY, batch_size=16, seed=6, sampler=conduit.Prioritized()
    ) as s:
        actor, learner = s.actor(lanes=3), s.learner()
        batches = []
        for number in range(0, 90, 3):
            actor.push(step(number, 3), priority=np.array([1.0, 2.0, 0.0]) if number % 2 else None)
            if number > 30:
                batch = learner.pull()
                batches.append(fingerprint(batch))
                s.update_priorities(batch.info.keys, host(batch.data["obs"]["state"]) % 3)
        return batches


def on_policy(backend: str, placement: Any) -> list[tuple]:
    with store(backend=backend, placement=placement, rollout_unit=12, batch_size=4, epochs=2, seed=7) as s:
        actor, learner = s.actor(lanes=3), s.learner()
        batches = []
        for iteration in range(3):
            fill(actor, 12, 12 * iteration)
            batches += [fingerprint(batch) for batch in learner]
            s.advance()
        return batches


MODES = {"uniform": uniform, "prioritized": prioritized, "on_policy": on_policy}


@cache
def expected(mode: str) -> list[tuple]:
    return MODES[mode]("reference", "auto")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_one_seed_gives_the_same_bytes_on_every_backend_and_placement(mode, backend, placement):
    assert MODES[mode](backend, placement) == expected(mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_rerun_repeats(mode):
    assert MODES[mode]("reference", "auto") == expected(mode)


SCHEDULES = [
    Schedule(),
    Schedule(g_ing=3),
    Schedule(overlap_ing=True),
    Schedule(overlap_ing=True, g_ing=4),
    Schedule(overlap_del=True),
    Schedule(g_del=3),
    Schedule(overlap_ing=True, g_ing=2, overlap_del=True, g_del=3),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_equal_numbers_and_frontiers_give_equal_rows_under_every_schedule(schedule):
    pulled = {}
    with store(capacity=CAPACITY, batch_size=8, seed=3, schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()
        for number in range(60):
            actor.push(step(number))
            if number >= 12:
                batch = learner.pull()
                pulled[batch.info.number, batch.info.frontier] = fingerprint(batch)
    assert [number for number, _ in pulled] == list(range(48))
    # The same (number, frontier), reached by another way: rows pushed up to the frontier, then the number asked for.
    for (number, frontier), batch in list(pulled.items())[::7]:
        with store(capacity=CAPACITY, batch_size=8, seed=3) as s:
            s.actor().push_trajectory(step(0, frontier + 1))
            learner = s.learner(rank=number, world=number + 1)
            assert fingerprint(learner.pull()) == batch


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_rerun_repeats_rows_and_lags_under_every_schedule(schedule):
    def run() -> list[tuple]:
        with store(capacity=CAPACITY, batch_size=8, seed=3, schedule=schedule, sampler=conduit.Prioritized()) as s:
            actor, learner = s.actor(lanes=2), s.learner()
            out = []
            for number in range(0, 60, 2):
                actor.push(step(number, 2))
                if number >= 16:
                    batch = learner.pull()
                    out.append((batch.info.priority_lag, fingerprint(batch)))
                    s.update_priorities(batch.info.keys, batch.info.keys % 5 + 0.5)
            return out

    first = run()
    assert first == run() == run()
    g_del = int(schedule.g_del or 1)
    lags = [lag for lag, _ in first]
    assert max(lags) == (2 * g_del - 1 if schedule.overlap_del else g_del - 1)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_on_policy_rows_are_the_same_under_every_schedule(k, overlap):
    schedule = Schedule(overlap, k / 3, overlap, k / 3)
    with store(rollout_unit=12, batch_size=4, epochs=2, seed=7, schedule=schedule) as s:
        actor, learner, batches = s.actor(lanes=3), s.learner(), []
        for iteration in range(3):
            fill(actor, 12, 12 * iteration)
            batches += [fingerprint(batch) for batch in learner]
            s.advance()
    assert batches == expected("on_policy")


def test_another_seed_gives_other_rows():
    def drawn(seed: int) -> list[int]:
        with store(seed=seed, batch_size=16) as s:
            fill(s.actor(), 32)
            return s.learner().pull().info.keys.tolist()

    assert drawn(0) == drawn(0) != drawn(1)


def test_on_demand_samples_disturb_no_learner():
    def pulled(samples: int) -> list[tuple]:
        with store(sampler=conduit.Prioritized(), batch_size=8) as s:
            fill(s.actor(), 32)
            learner, out = s.learner(), []
            for _ in range(4):
                for _ in range(samples):
                    s.sample(5)
                out.append(fingerprint(learner.pull()))
            return out

    assert pulled(0) == pulled(3)


def test_samples_on_demand_differ_from_one_another_and_from_the_learners_batches():
    with store(batch_size=16) as s:
        fill(s.actor(), 32)
        learner = s.learner()
        drawn = {batch.info.keys.tobytes() for _ in range(5) for batch in (s.sample(16), learner.pull())}
        assert len(drawn) == 10


def test_the_info_of_a_batch_follows_from_its_rows():
    with store(batch_size=16, capacity=20) as s:
        actor = s.actor()
        for number in range(30):
            actor.push(step(number), version=number // 4)
        info = s.learner().pull().info
        assert (info.number, info.frontier, info.priority_lag) == (0, 29, 0)
        assert (info.age == 29 - info.keys).all()
        assert (info.policy_version == info.keys // 4).all()
        assert set(info.probability) == {1 / 20}
        assert [s.sample(3).info.number for _ in range(3)] == [0, 1, 2], "on-demand batches have numbers of their own"
