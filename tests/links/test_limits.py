"""Items and derived leaves at the edges: memory, sharding, kept batches, hooks, names."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import jax
import numpy as np
import pytest

import conduit
from conduit import Next, NStep, Prioritized, Sequence, Stack
from conduit.errors import CapacityError, HookError, SchemaError, SettingError
from tests.store.rows import host, store


def row(number: float, truncated: bool = False, **more: Any) -> dict[str, np.ndarray]:
    obs = np.full(1, number, np.float32)
    return {"obs": obs, "reward": obs.copy(), "truncated": np.array([truncated]), **more}


def final(number: float) -> dict[str, np.ndarray]:
    return {"obs": np.full(1, number, np.float32)}


def drawn(s: conduit.Store, times: int) -> dict[str, np.ndarray]:
    """The leaves of so many entries, and their keys."""
    batches = [s.sample(1) for _ in range(times)]
    data = {name: np.concatenate([batch.data[name] for batch in batches]) for name in batches[0].data}
    return {**data, "key": np.concatenate([batch.info.keys for batch in batches])}


@pytest.mark.parametrize("sampler", [conduit.Uniform(), Prioritized()])
def test_a_batch_is_split_by_entries_and_by_time_and_what_has_no_time_by_entries(sampler):
    mesh = jax.make_mesh((4, 2), ("entry", "time"))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("entry", "time"))
    with store(backend="jax", capacity=64, batch_size=8, item=Sequence(4), sampler=sampler) as s:
        actor, learner = s.actor(), s.learner(to="jax", sharding=sharding)
        for number in range(20):
            actor.push(row(number))
        batch = learner.pull()
        assert batch.data["obs"].sharding.shard_shape((8, 4)) == (2, 2)
        assert batch.info.mask.sharding.shard_shape((8, 4)) == (2, 2)
        assert batch.info.weight.sharding.shard_shape((8,)) == (2,)


def test_what_can_not_be_split_is_named_and_the_store_goes_on():
    mesh = jax.make_mesh((8,), ("entry",))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "entry"))
    with store(backend="jax", capacity=64, batch_size=8, item=Sequence(4)) as s:
        actor = s.actor()
        for number in range(20):
            actor.push(row(number))
        with pytest.raises(conduit.errors.HandOverError, match="obs"):
            s.learner(to="jax", sharding=sharding).pull()
        assert len(s.sample(2)) == 2


def test_a_batch_is_pickled_with_its_weights():
    with store(capacity=8) as s:
        s.actor(lanes=4).push({"obs": np.arange(4)})
        again = pickle.loads(pickle.dumps(s.sample(3)))
    assert again.info.weight.tolist() == [1.0] * 3
    assert again.info.keys.tolist() == again.data["obs"].tolist()


def test_a_kept_batch_keeps_no_buffer():
    s = store(capacity=8)
    s.actor(lanes=4).push({"obs": np.arange(4)})
    batch, buffer = s.sample(3), weakref.ref(s._buffer)
    s.close()
    del s
    gc.collect()
    assert buffer() is None
    assert host(batch.info.weight).tolist() == [1.0] * 3


def test_rewards_that_do_not_count_leave_no_trace_be_they_infinite():
    with store(capacity=16, batch_size=1, item=NStep(range(1, 4), gamma=0.5), derive={"n": Next("obs")}) as s:
        actor = s.actor()
        for number in range(8):
            actor.push(row(number) | {"reward": np.array([np.nan if number == 4 else 1.0], np.float32)})
        rows = drawn(s, 300)
    start, steps = rows["obs"].astype(int), rows["n_step"]
    holds = (start <= 4) & (start + steps > 4)
    assert np.array_equal(np.isnan(rows["reward"]), holds)
    assert np.allclose(rows["reward"][~holds], (2 - 0.5 ** (steps - 1.0))[~holds])


def test_n_as_long_as_an_episode_takes_memory_for_the_chain_only():
    with store(capacity=64, batch_size=1, item=NStep(100_000, gamma=0.5), derive={"n": Next("obs")}) as s:
        actor = s.actor()
        for number in range(10):
            actor.push(row(number, truncated=number == 9), final=final(10) if number == 9 else None)
        batch = s.sample(4)
    assert (batch.data["n_step"] == 10 - batch.data["obs"]).all()


@pytest.mark.parametrize(
    ("item", "derive"), [(Sequence(9), {}), (Sequence(3, stride=4), {}), (Sequence(9), {"n": Next("obs")})]
)
def test_an_item_that_no_ring_of_this_size_can_hold_is_refused(item, derive):
    with pytest.raises(SettingError, match=r"capacity=8 .*could never be drawn"):
        store(capacity=8, item=item, derive=derive)
    store(capacity=9, item=item, derive=derive).close()


def test_starts_are_found_where_a_lane_is_longer_than_the_ring():
    with store(capacity=12, batch_size=1, item=Sequence(100, period=5, pad="zero")) as s:
        actor = s.actor()
        for number in range(41):
            actor.push(row(number))
        assert s.info()["drawable_rows"] == 0
        actor.push(row(41, truncated=True))
        assert sorted(set(drawn(s, 60)["key"].tolist())) == [30, 35, 40]


def test_room_for_finals_is_asked_for_with_the_first_rows():
    settings = {"capacity": 8, "batch_size": 1, "derive": {"n": Next("obs")}}
    with store(**settings, budgets={"pageable": 8 * 9}) as s:
        with pytest.raises(CapacityError, match="finals"):
            s.actor().push(row(0))
        assert len(s) == 0
    with store(**settings, budgets={"pageable": 8 * 9 + 8 * 4}) as s:
        actor = s.actor()
        for number in range(30):
            actor.push(row(number, truncated=True), final=final(-number))
        rows = drawn(s, 20)
    assert (rows["n"] == -rows["obs"]).all()


def test_lanes_of_closed_actors_are_used_again_and_their_episodes_stay_apart():
    with store(capacity=64, batch_size=1, item=NStep(2, gamma=1.0), derive={"n": Next("obs")}) as s:
        for number in range(200):
            actor = s.actor()
            for step in range(3):
                actor.push(row(10 * number + step))
            actor.close()
        rows = drawn(s, 300)
        assert s._actors.state()["lanes"] == 1
    assert set((rows["n"] - rows["obs"]).tolist()) == {1.0, 2.0}
    assert set((rows["obs"] % 10).tolist()) == {0.0, 1.0}


def test_a_trajectory_hook_that_forgets_the_final_is_told():
    @conduit.register_ingestion(per="trajectory")
    def hundredfold(source, sink):
        sink.write([f.with_rows({**f.rows, "obs": 100 * f.rows["obs"]}) for f in source.read()])

    told = pytest.raises(HookError, match=r"'hundredfold' rewrites 'obs'.*Fragment.final")
    with store(capacity=8, ingestion=[hundredfold], derive={"n": Next("obs")}) as s, told:
        s.actor().push(row(1, truncated=True), final=final(3))


def test_names_with_a_slash_are_names():
    leaves = {"a/b": np.zeros(1, np.float32), "a": np.zeros(1, np.float32)}
    item = NStep(2, gamma=0.5, from_last=("a/b",))
    with store(capacity=8, batch_size=1, item=item, derive={"n": Next("a")}) as s:
        actor = s.actor()
        for number in range(4):
            actor.push(row(number) | {name: leaf + number for name, leaf in leaves.items()})
        with pytest.raises(SchemaError, match="lacks 'a'"):
            actor.push(row(4, truncated=True) | leaves, final=final(5))
        actor.push(row(4, truncated=True) | leaves, final={"a": np.full(1, 5, np.float32)})
        rows = drawn(s, 50)
    whole = rows["obs"] < 3
    assert (rows["a/b"] == rows["obs"] + 1)[whole].all()
    assert (rows["a"] == rows["obs"])[whole].all()


def test_settings_are_the_stores_own():
    derive: dict[str, Any] = {"n": Next("obs")}
    with store(capacity=4, batch_size=1, derive=derive) as s:
        derive["s"] = Stack("obs", 3)
        actor = s.actor()
        for number in range(3):
            actor.push(row(number))
        assert set(s.sample(1).data) == {"obs", "reward", "truncated", "n"}
