"""One transition, followed from the actor to the learner through the five stops of the experience path."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import conduit
from conduit import backends
from conduit.core.buffer import ExperienceBuffer
from conduit.core.delivery import Delivery
from conduit.core.ingestion import Ingestion
from conduit.core.shard import Shard
from conduit.core.staging import Inbox, Outbox
from conduit.ports import Actor, Learner
from tests.store.rows import EVERYWHERE, assert_intact, ends, ids, step, store

MARK = 4711

INTO = ["Actor.push", "Inbox.seal", "Ingestion.step", "ExperienceBuffer.write", "Shard.write", "Backend.write"]
OUT = ["ExperienceBuffer.read", "Shard.read", "Backend.read", "Outbox.put"]


@pytest.fixture
def events(monkeypatch):
    """Names of the calls on the path, as they begin (and for the outermost, "… returns" as they end)."""
    seen: list[str] = []

    def spy(kind: type, method: str, name: str) -> None:
        original = getattr(kind, method)

        def spied(self, *args, **kwargs):
            seen.append(f"{name}.{method}")
            try:
                return original(self, *args, **kwargs)
            finally:
                seen.append(f"{name}.{method} returns")

        monkeypatch.setattr(kind, method, spied)

    for kind, methods in {
        Actor: ["push"],
        Inbox: ["seal"],
        Ingestion: ["step"],
        ExperienceBuffer: ["write", "read"],
        Shard: ["write", "read"],
        Delivery: ["step"],
        Outbox: ["put", "take", "wait_take"],
        Learner: ["pull"],
    }.items():
        for method in methods:
            spy(kind, method, kind.__name__)
    seen_backend = backends.load

    def load(backend, disk=None):
        made = seen_backend(backend, disk)
        for method in ("write", "read", "hand_over"):
            if method in vars(type(made)):
                spy(type(made), method, "Backend")
        return made

    monkeypatch.setattr(backends, "load", load)
    return seen


def calls(events: list[str], names: list[str]) -> list[str]:
    """The first begin of each name, in the order they happened."""
    return sorted(names, key=lambda name: events.index(name))


@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_a_transition_passes_the_five_stops_in_line(events, backend, placement):
    with store(backend=backend, placement=placement, capacity=8, batch_size=1) as s:
        assert s.actor().push(step(MARK)) == 1
        into = [event for event in events if "returns" not in event]
        assert into == INTO
        assert events[-1] == "Actor.push returns"
        assert len(s) == 1
        events.clear()
        batch = s.learner().pull()
    assert events[0] == "Learner.pull"
    assert events[-1] == "Learner.pull returns"
    # The rows of a small batch are read as soon as they are drawn.
    for stops in (["Learner.pull", *OUT], ["Learner.pull", "Delivery.step", "Outbox.put"]):
        assert calls(events, stops) == stops
    assert events.index("Backend.hand_over") < events.index("Outbox.put")
    assert [e for e in events if e.startswith("Outbox")][-2:] == ["Outbox.take", "Outbox.take returns"]
    assert ids(batch) == [MARK]
    assert batch.info.keys.tolist() == [0]
    assert_intact(batch)


@pytest.mark.parametrize("backend", ["reference", "torch", "jax"])
def test_a_transition_passes_the_same_stops_behind_rollout_and_update(events, backend):
    schedule = conduit.Schedule(overlap_ing=True, overlap_del=True)
    with store(backend=backend, capacity=8, batch_size=1, schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()
        actor.push(step(MARK))
        batch = learner.pull()
        names = [event for event in events if "returns" not in event]
    assert calls(names, INTO) == INTO
    assert calls(names, ["ExperienceBuffer.write", *OUT]) == ["ExperienceBuffer.write", *OUT]
    assert calls(names, ["Learner.pull", "Delivery.step", *OUT]) == ["Learner.pull", "Delivery.step", *OUT]
    assert ids(batch) == [MARK]
    assert_intact(batch)


def test_the_operators_work_on_threads_of_their_own(monkeypatch):
    where = {}
    for kind, method in ((ExperienceBuffer, "write"), (ExperienceBuffer, "read"), (Outbox, "put")):
        original = getattr(kind, method)

        def spied(self, *args, original=original, method=method):
            where[method] = threading.current_thread().name
            return original(self, *args)

        monkeypatch.setattr(kind, method, spied)
    with store(schedule=conduit.Schedule(overlap_ing=True, overlap_del=True), batch_size=1) as s:
        s.actor().push(step(0))
        s.learner().pull()
    assert where == {"write": "conduit-ingestion", "read": "conduit-delivery-0", "put": "conduit-delivery-0"}


@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_every_row_comes_back_as_it_was_pushed_after_the_ring_has_turned(backend, placement):
    with store(backend=backend, placement=placement, capacity=11, batch_size=8) as s:
        actor, learner = s.actor(lanes=3), s.learner()
        for number in range(0, 36, 3):
            actor.push(step(number, 3))
            if number >= 9:
                batch = learner.pull()
                assert ids(batch) == batch.info.keys.tolist()
                assert_intact(batch)
        assert len(s) == 11
        seen = {i for _ in range(40) for i in ids(learner.pull())}
    assert seen == set(range(25, 36))


def test_a_push_larger_than_the_ring_keeps_the_last_rows():
    with store(capacity=5, batch_size=5) as s:
        s.actor().push_trajectory(step(0, 13))
        batches = [s.learner().pull(), *(s.sample(5) for _ in range(20))]
        assert {i for batch in batches for i in ids(batch)} == set(range(8, 13))
        assert all(ids(batch) == batch.info.keys.tolist() for batch in batches)
        assert len(s) == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_arrays_may_be_reused_as_soon_as_push_returns(overlap):
    with store(capacity=64, batch_size=32, schedule=conduit.Schedule(overlap_ing=overlap, g_ing=4)) as s:
        actor = s.actor(lanes=2)
        reused = ends(0, 2)
        for number in range(0, 64, 2):
            for leaf, fresh in zip(leaves(reused), leaves(ends(number, 2)), strict=True):
                leaf[...] = fresh
            actor.push(reused)
            for leaf in leaves(reused):
                leaf[...] = 99 if leaf.dtype != np.bool_ else False
        batch = s.learner().pull()
    assert ids(batch) == batch.info.keys.tolist()
    assert_intact(batch)


def leaves(tree: dict) -> list[np.ndarray]:
    return [tree["id"], tree["obs"]["image"], tree["obs"]["state"], tree["terminated"], tree["truncated"]]


@pytest.mark.parametrize("make", ["torch", "jax"])
def test_tensors_of_other_frameworks_are_pushed_as_they_are(make):
    import jax.numpy as jnp
    import torch

    array = {"torch": torch.as_tensor, "jax": jnp.asarray}[make]
    rows = step(3, 4)
    rows["obs"] = {name: array(leaf) for name, leaf in rows["obs"].items()}
    if make == "torch":
        rows["obs"]["state"].requires_grad_(True)
    with store(capacity=4, batch_size=4) as s:
        s.actor(lanes=4).push(rows)
        assert_intact(s.learner().pull())
