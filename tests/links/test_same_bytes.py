"""From one seed, the same entries: on every backend, placement and schedule, byte for byte."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import conduit
from conduit import Next, NStep, Schedule, Sequence, Stack, Trajectory
from tests.links.reference import flat
from tests.store.rows import EVERYWHERE, host, store
from tests.store.test_same_rows import SCHEDULES

CAPACITY = 40
DQN = {"obs": Stack("obs", 3), "next_obs": Next("obs")}

SCENARIOS: dict[str, dict[str, Any]] = {
    "next": {"derive": {"next_obs": Next("obs")}},
    "dqn": {"derive": DQN},
    "n-step": {"item": NStep(3, gamma=0.99), "derive": {"next_obs": Next("obs")}, "sampler": conduit.Prioritized()},
    "n-step of a range, on stacks": {"item": NStep(range(1, 5), gamma=0.97), "derive": DQN},
    "n-step of stored leaves": {"item": NStep(2, gamma=0.5, from_last=("reward_after", "terminated"))},
    "sequence": {"item": Sequence(4, burn_in=2, period=2), "derive": {"next_obs": Next("obs")}},
    "sequence with all": {
        "item": Sequence(3, burn_in=2, stride=2, pad="repeat"),
        "derive": DQN,
        "sampler": conduit.Prioritized(alpha=0.9, beta=0.7),
    },
    "trajectory": {"item": Trajectory(multiple=4), "derive": {"next_obs": Next("obs")}},
}


def rows_of(number: int, lanes: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A step of lanes that end now and then, with its final."""
    row = np.arange(number, number + lanes, dtype=np.int32)
    lane = np.arange(lanes)
    terminated = (number // lanes + 2 * lane) % 9 == 8
    truncated = (number // lanes + lane) % 11 == 10
    ended = row[terminated | truncated]
    rows = {
        "id": row,
        "obs": observed(row),
        "reward": (row % 11).astype(np.float32) / 3,
        "reward_after": (row % 13).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
    }
    # Now and then a truncated lane has no final.
    return rows, {"obs": observed(ended + 1000)} if len(ended) and number % 2 == 0 else None


def observed(number: np.ndarray) -> dict[str, np.ndarray]:
    image = (number[:, None, None] * 3 + np.arange(6).reshape(2, 3)).astype(np.uint8)
    return {"image": image, "state": number.astype(np.float32) / 7}


def printed(batch: conduit.Batch) -> tuple[Any, ...]:
    """All of a batch, byte for byte, whatever framework holds it."""
    info = batch.info
    named: dict[str, Any] = {**flat(batch.data), "weight": info.weight, "keys": info.keys}
    named |= {name: getattr(info, name) for name in ("probability", "priority", "age", "policy_version")}
    if info.mask is not None:
        named["mask"] = info.mask
    arrays = {name: host(leaf) for name, leaf in named.items()}
    return (
        info.number,
        info.frontier,
        *((name, a.dtype.str, a.shape, a.tobytes()) for name, a in sorted(arrays.items())),
    )


def run(scenario: str, **settings: Any) -> list[tuple]:
    batches = []
    defaults = {"capacity": CAPACITY, "batch_size": 4, "seed": 5}
    with store(**(defaults | SCENARIOS[scenario] | settings)) as s:
        actor, learner = s.actor(lanes=3), s.learner()
        for number in range(0, 120, 3):
            rows, final = rows_of(number, 3)
            actor.push(rows, final=final)
            if number == 60:
                actor.close()
                actor = s.actor(lanes=3)
            if number > 45:
                batch = learner.pull()
                batches.append(printed(batch))
                if "sampler" in SCENARIOS[scenario]:
                    s.update_priorities(batch.info.keys, batch.info.keys % 5 + 0.5)
        return [*batches, printed(s.sample(3))]


@cache
def expected(scenario: str) -> list[tuple]:
    return run(scenario, backend="reference")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_one_seed_gives_the_same_bytes_on_every_backend_and_placement(scenario, backend, placement):
    assert run(scenario, backend=backend, placement=placement) == expected(scenario)


@pytest.mark.parametrize("to", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("scenario", ["n-step", "sequence with all", "trajectory"])
def test_batches_are_the_same_in_every_framework(scenario, to):
    with store(capacity=CAPACITY, batch_size=4, seed=5, **SCENARIOS[scenario]) as s:
        actor = s.actor(lanes=3)
        for number in range(0, 60, 3):
            rows, final = rows_of(number, 3)
            actor.push(rows, final=final)
        here, there = s.learner(world=2).pull(), None
        assert here.info.number == 0
    with store(capacity=CAPACITY, batch_size=4, seed=5, **SCENARIOS[scenario]) as s:
        actor = s.actor(lanes=3)
        for number in range(0, 60, 3):
            rows, final = rows_of(number, 3)
            actor.push(rows, final=final)
        there = s.learner(world=2, to=to).pull()
    assert printed(there) == printed(here)


@pytest.mark.parametrize("scenario", ["n-step", "sequence with all"])
def test_batches_split_over_devices_are_the_same(scenario):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("batch",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))

    def pulled(**where: Any) -> conduit.Batch:
        settings = {"backend": "jax", "capacity": CAPACITY, "batch_size": 8, "seed": 5} | SCENARIOS[scenario]
        with store(**settings) as s:
            actor = s.actor(lanes=3)
            for number in range(0, 60, 3):
                rows, final = rows_of(number, 3)
                actor.push(rows, final=final)
            return s.learner(**where).pull()

    split = pulled(sharding=sharding)
    assert printed(split) == printed(pulled())
    leaves = [*flat(split.data).values(), split.info.weight]
    leaves += [] if split.info.mask is None else [split.info.mask]
    assert all(leaf.sharding.is_equivalent_to(sharding, leaf.ndim) for leaf in leaves)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_rerun_repeats_and_another_seed_does_not(scenario):
    assert run(scenario, backend="reference") == expected(scenario)
    assert run(scenario, backend="reference", seed=6) != expected(scenario)


@pytest.mark.parametrize("scenario", [name for name, each in SCENARIOS.items() if "sampler" not in each])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_equal_numbers_and_frontiers_give_equal_entries_under_every_schedule(scenario, schedule):
    settings = {"capacity": CAPACITY, "batch_size": 4, "seed": 3} | SCENARIOS[scenario]
    pulled = {}
    with store(schedule=schedule, **settings) as s:
        actor, learner = s.actor(lanes=2), s.learner()
        for number in range(0, 110, 2):
            rows, final = rows_of(number, 2)
            actor.push(rows, final=final)
            if number >= 40:
                batch = learner.pull()
                pulled[batch.info.number, batch.info.frontier] = printed(batch)
    assert [number for number, _ in pulled] == list(range(35))
    # The same (number, frontier), reached by another way.
    for (number, frontier), batch in list(pulled.items())[::6]:
        with store(**settings) as s:
            actor = s.actor(lanes=2)
            for first in range(0, frontier + 1, 2):
                rows, final = rows_of(first, 2)
                actor.push(rows, final=final)
            assert printed(s.learner(rank=number, world=number + 1).pull()) == batch


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("scenario", [name for name, each in SCENARIOS.items() if "sampler" in each])
def test_a_rerun_repeats_with_priorities_under_every_schedule(scenario, schedule: Schedule):
    assert run(scenario, schedule=schedule) == run(scenario, schedule=schedule)


def test_draws_of_starts_do_not_depend_on_how_rows_were_grouped_into_pushes():
    def keys(by: int) -> list[list[int]]:
        with store(capacity=30, batch_size=8, seed=4, item=Sequence(3), derive={"next_obs": Next("obs")}) as s:
            actor = s.actor()
            for first in range(0, 48, by):
                number = np.arange(first, first + by)
                actor.push_trajectory({"obs": number.astype(np.float32)}, end="cut" if first + by == 24 else "open")
            learner = s.learner()
            return [learner.pull().info.keys.tolist() for _ in range(5)]

    assert keys(1) == keys(2) == keys(8) == keys(24)
