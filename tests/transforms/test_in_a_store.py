"""GAE and Normalize as an on-policy store runs them, against a recursion over the raw stream of each lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import conduit
from conduit.errors import SchemaError
from conduit.transforms import GAE, Normalize, ToFloat

STEPS, LANES, GAMMA, LAM = 24, 4, 0.9, 0.8
SCHEDULES = {
    "in line": conduit.Schedule(),
    "overlapped": conduit.Schedule(overlap_ing=True, g_ing=0.25, overlap_del=True, g_del=0.5),
}


def rollout(rng: np.random.Generator) -> dict[str, Any]:
    """A rollout of random rows: leaves (steps, lanes), with the value of what follows the last in `bootstrap`."""
    ends = rng.random((STEPS, LANES))
    return {
        "id": np.arange(STEPS * LANES, dtype=np.int32).reshape(STEPS, LANES),
        "pixel": rng.integers(0, 256, (STEPS, LANES), dtype=np.uint8),
        "reward": rng.normal(size=(STEPS, LANES)).astype(np.float32),
        "value": rng.normal(size=(STEPS, LANES)).astype(np.float32),
        "terminated": ends < 0.1,
        "truncated": (ends > 0.8) & (ends < 0.9),
        "final": rng.normal(size=(STEPS, LANES)).astype(np.float32),
        "bootstrap": rng.normal(size=LANES).astype(np.float32),
    }


def push(actor: conduit.Actor, made: dict[str, Any]) -> None:
    for t in range(STEPS):
        rows = {name: made[name][t] for name in ("id", "pixel", "reward", "value", "terminated", "truncated")}
        ended = rows["terminated"] | rows["truncated"]
        actor.push(rows, final={"value": made["final"][t][ended]} if ended.any() else None)


def oracle(made: dict[str, Any]) -> np.ndarray:
    advantage = np.zeros((STEPS, LANES))
    for lane in range(LANES):
        following, carried = made["bootstrap"][lane], 0.0
        for t in reversed(range(STEPS)):
            if made["terminated"][t, lane]:
                following, carried = 0.0, 0.0
            elif made["truncated"][t, lane]:
                following, carried = made["final"][t, lane], 0.0
            delta = made["reward"][t, lane] + GAMMA * following - made["value"][t, lane]
            carried = delta + GAMMA * LAM * carried
            advantage[t, lane] = carried
            following = made["value"][t, lane]
    return advantage.ravel()


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("backend", ["reference", "torch", "jax"])
def test_every_row_gets_the_advantage_of_its_own_stream(backend: str, schedule: conduit.Schedule) -> None:
    rng = np.random.default_rng(7)
    with conduit.Store(
        backend=backend,
        mode="on_policy",
        rollout_unit=STEPS * LANES,
        batch_size=STEPS * LANES // 4,
        ingestion=[GAE(GAMMA, LAM), Normalize("advantage")],
        delivery=[ToFloat("pixel")],
        schedule=schedule,
    ) as store:
        actor, learner = store.actor(lanes=LANES), store.learner(to="numpy")
        for _ in range(3):
            made = rollout(rng)
            push(actor, made)
            actor.end_unit(bootstrap={"value": made["bootstrap"]})
            batches = [batch.data for batch in learner]
            got = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
            store.advance()

            advantage = oracle(made)
            assert sorted(got["id"]) == list(range(STEPS * LANES))
            assert_allclose(got["value_target"], (advantage + made["value"].ravel())[got["id"]], rtol=1e-5, atol=1e-5)
            normal = (advantage - advantage.mean()) / advantage.std()
            assert_allclose(got["advantage"], normal[got["id"]], rtol=1e-4, atol=1e-5)
            assert_allclose(got["pixel"], made["pixel"].ravel()[got["id"]] / 255, rtol=1e-6)


def test_off_policy_normalize_sees_one_push_and_refuses_one_row() -> None:
    with conduit.Store(backend="reference", capacity=8, batch_size=2, ingestion=[Normalize("reward")]) as store:
        store.actor(lanes=2).push({"reward": np.array([1, 3], np.float32)})
        assert set(store.learner().pull().data["reward"].tolist()) <= {-1.0, 1.0}
        with pytest.raises(SchemaError, match="the unit has 1 row"):
            store.actor().push({"reward": np.array([5], np.float32)})


def test_without_a_bootstrap_the_edge_of_the_unit_is_refused_with_a_remedy() -> None:
    with conduit.Store(
        backend="reference", mode="on_policy", rollout_unit=LANES, batch_size=LANES, ingestion=[GAE()]
    ) as store:
        actor = store.actor(lanes=LANES)
        zeros = np.zeros(LANES, np.float32)
        actor.push({"reward": zeros, "value": zeros})
        with pytest.raises(SchemaError) as caught:
            actor.end_unit()
    assert 'end_unit(bootstrap={"value"' in str(caught.value)
