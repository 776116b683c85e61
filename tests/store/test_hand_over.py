"""Batches reach any framework, without a copy where it is promised, and belong to whoever got them."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest
import torch

import conduit
from conduit.backends import exchange
from conduit.backends.jax.backend import JaxBackend
from conduit.core.backend import Target
from conduit.errors import HandOverError
from conduit.testing import address
from conduit.topology.endpoint import Endpoint, Tier
from tests.store.rows import EVERYWHERE, assert_intact, each_backend, fill, host, ids, step, store

each_target = pytest.mark.parametrize("to", ["numpy", "torch", "jax"])
KINDS = {"numpy": np.ndarray, "torch": torch.Tensor, "jax": jax.Array}


def leaves(batch: conduit.Batch) -> list:
    return [batch.data["id"], batch.data["obs"]["image"], batch.data["obs"]["state"], batch.info.weight]


@each_backend
def test_batches_come_in_the_backends_own_framework_by_default(backend):
    with store(backend=backend) as s:
        fill(s.actor(), 8)
        own = "numpy" if backend == "reference" else backend
        for batch in (s.learner().pull(), s.sample(3)):
            assert all(isinstance(leaf, KINDS[own]) for leaf in leaves(batch))


@each_target
@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_every_backend_and_placement_hands_over_to_every_framework(backend, placement, to):
    with store(backend=backend, placement=placement) as s:
        fill(s.actor(), 24)
        for batch in (s.learner(to=to).pull(), s.sample(4, to=to)):
            assert all(isinstance(leaf, KINDS[to]) for leaf in leaves(batch))
            assert isinstance(batch.info.keys, np.ndarray)
            assert host(batch.info.weight).dtype == np.float32
            assert ids(batch) == batch.info.keys.tolist()
            assert_intact(batch)


@each_target
@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_handing_over_copies_no_wide_leaf(monkeypatch, backend, placement, to):
    given = {}
    original = exchange.accept

    def accept(arrays, target):
        given.update({path: address(array) for path, array in arrays.items()})
        return original(arrays, target)

    monkeypatch.setattr(exchange, "accept", accept)
    with store(backend=backend, placement=placement, batch_size=8) as s:
        actor = s.actor()
        for number in range(24):
            actor.push(step(number, frame=np.full((1, 128, 128), number, np.uint8)))
        batch = s.learner(to=to).pull()
    assert address(batch.data["frame"]) == given["frame"]
    assert address(batch.data["frame"]) % 64 == 0
    assert host(batch.data["frame"])[:, 5, 7].tolist() == ids(batch)


@each_target
@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_kept_batches_stay_intact_after_a_hundred_further_pushes_and_close(backend, placement, to):
    with store(backend=backend, placement=placement, capacity=16, batch_size=8) as s:
        actor, learner = s.actor(lanes=2), s.learner(to=to)
        fill(actor, 16)
        kept = []
        for number in range(16, 216, 2):
            batch = learner.pull()
            kept.append((ids(batch), batch))
            actor.push(step(number, 2))
    gc.collect()
    for rows, batch in kept:
        assert ids(batch) == rows == batch.info.keys.tolist()
        assert_intact(batch)


@pytest.mark.parametrize("to", ["numpy", "torch"])
@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_a_batch_may_be_changed_and_changes_nothing_stored(backend, placement, to):
    with store(backend=backend, placement=placement, capacity=8, batch_size=8) as s:
        fill(s.actor(), 8)
        learner = s.learner(to=to)
        first = learner.pull()
        first.data["id"][...] = -1
        first.data["obs"]["image"][...] = 0
        second = learner.pull()
        assert ids(second) == second.info.keys.tolist()
        assert_intact(second)


@each_backend
def test_a_named_sharding_makes_one_global_array(backend):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("batch",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    with store(backend=backend, batch_size=8) as s:
        fill(s.actor(), 24)
        plain = s.sample(8)
        batch = s.learner(to="jax", sharding=sharding).pull()
        for leaf in leaves(batch):
            assert leaf.shape[0] == 8
            assert leaf.sharding == sharding
            assert [shard.data.shape[0] for shard in leaf.addressable_shards] == [2] * 4
            assert {shard.device for shard in leaf.addressable_shards} == set(jax.devices()[:4])
        assert ids(batch) == batch.info.keys.tolist()
        assert_intact(batch)
        assert_intact(plain)


@each_backend
def test_a_device_of_jax_is_named_or_given(backend):
    with store(backend=backend) as s:
        fill(s.actor(), 8)
        for device in ("cpu:3", jax.devices()[3]):
            batch = s.sample(4, to="jax", device=device)
            assert all(leaf.devices() == {jax.devices()[3]} for leaf in leaves(batch))
            assert_intact(batch)


MESH = jax.sharding.Mesh(np.array(jax.devices()[:3]), ("batch",))
THIRDS = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("batch"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"to": "tensorflow"}, "'tensorflow'.*numpy, torch, jax"),
        ({"to": "numpy", "device": "cuda"}, "NumPy arrays live on the host"),
        ({"to": "torch", "device": "cuda:77"}, "cuda:77"),
        ({"to": "torch", "sharding": THIRDS}, "sharding is JAX's"),
        ({"to": "jax", "device": "cpu:99"}, "cpu:99"),
        ({"to": "jax", "sharding": "rows"}, "'rows' is no jax.sharding.Sharding"),
        ({"to": "jax", "sharding": THIRDS, "device": "cpu:0"}, "a device or to a sharding"),
        ({"to": "jax", "sharding": THIRDS}, "'id'.*can't be split"),
    ],
)
def test_a_target_that_can_not_be_met_is_refused_and_the_store_goes_on(target, message):
    with store(batch_size=4) as s:
        fill(s.actor(), 8)
        with pytest.raises(HandOverError, match=message):
            s.sample(4, **target)
        assert len(s.sample(4)) == 4


@pytest.mark.parametrize("g_del", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["in line", "behind"])
def test_a_batch_that_can_not_be_handed_over_is_its_learners_trouble_only(overlap, g_del):
    schedule = conduit.Schedule(overlap_del=overlap, g_del=g_del)
    with store(backend="jax", schedule=schedule) as s:
        actor, wide, plain = s.actor(lanes=8), s.learner(0, 2, to="jax"), s.learner(1, 2, to="numpy")
        actor.push({"id": np.arange(8)})
        for _ in range(3):
            with pytest.raises(HandOverError, match=r"'id' is int64.*narrow"):
                wide.pull()
            assert plain.pull().info.number % 2 == 1
            assert len(s.sample(4, to="numpy")) == 4
            assert actor.push({"id": np.arange(8)}) == 8


class LandsOnItsDevice(JaxBackend):
    """As on a machine with accelerators: batches land on a device, not on the host."""

    def landing(self, target: Target) -> Endpoint:
        super().landing(target)
        return Endpoint(Tier.DEVICE, 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["in line", "behind"])
@pytest.mark.parametrize("hooks", [[], [conduit.register_delivery()(lambda source, sink: sink.write(source.read()))]])
@pytest.mark.parametrize("placement", ["auto", "device:0", ["device:0", "device:1", "pageable"]], ids=str)
def test_rows_on_several_shards_land_on_a_device(placement, hooks, overlap):
    settings = {"placement": placement, "delivery": hooks, "schedule": conduit.Schedule(overlap_del=overlap)}
    with store(backend=LandsOnItsDevice(), **settings) as s:
        fill(s.actor(lanes=2), 24)
        for batch in (s.learner().pull(), s.sample(4)):
            assert ids(batch) == batch.info.keys.tolist()
            assert host(batch.info.weight).dtype == np.float32
            assert_intact(batch)


def test_a_learner_for_a_target_that_is_not_there_is_refused_when_it_is_made():
    with store() as s:
        fill(s.actor(), 8)
        with pytest.raises(HandOverError, match="no framework 'tensorflow'"):
            s.learner(to="tensorflow")
        assert len(s.learner().pull()) == 4


def test_jax_does_not_narrow_a_batch():
    with store(backend="jax") as s:
        s.actor(lanes=8).push({"id": np.arange(8), "x": np.arange(8.0)})
        with pytest.raises(HandOverError, match=r"'(id|x)' is (int64|float64).*narrow.*(cast|x64).*to='numpy'"):
            s.sample(4)
        batch = s.sample(4, to="numpy")
        assert (batch.data["id"].dtype, batch.data["x"].dtype) == (np.int64, np.float64)
