"""Draws and batches are the same wherever rows live, byte for byte."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import optree
import pytest

import conduit
from conduit.backends import load
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import Clock, RealClock, VirtualClock
from conduit.core.backend import Backend
from conduit.core.experience import Schema
from conduit.core.placement import Placement
from conduit.core.reader import Reader
from conduit.core.recipe import Gather, Selection
from conduit.core.ring import Layout
from conduit.core.shard import Shard
from conduit.testing import assert_rows, example_rows, on_host
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Memory, Topology
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier
from tests.store.rows import host, step

DEVICES = [Endpoint(Tier.DEVICE, index) for index in range(8)]
HERE = (PAGEABLE, PINNED, *DEVICES)
MACHINE = Topology(
    "eight devices",
    {at: Memory(1 << 28, 1 << 28, Source.ASSUMED) for at in HERE},
    {(source, to): Leg(1e9, 1e-5) for source in HERE for to in HERE},
)
BACKENDS: dict[str, Callable[[Clock], Backend[Any]]] = {
    "reference": lambda clock: load("reference"),
    "torch": lambda clock: load("torch"),
    "jax": lambda clock: load("jax"),
    "emulated(reference)": lambda clock: EmulatedBackend(MACHINE, "reference", clock),
    "emulated(torch)": lambda clock: EmulatedBackend(MACHINE, "torch", clock),
    "emulated(jax)": lambda clock: EmulatedBackend(MACHINE, "jax", clock),
}
PLACEMENTS = {
    "pinned": Placement((PINNED,)),
    "one device": Placement((DEVICES[0],)),
    "even": Placement((DEVICES[0], DEVICES[1], DEVICES[2]), (1.0, 1.0, 1.0)),
    "uneven": Placement((DEVICES[1], DEVICES[0], DEVICES[3]), (5.0, 1.0, 2.0)),
    "mixed": Placement((PAGEABLE, DEVICES[0]), (2.0, 3.0)),
    "mixed, uneven": Placement((DEVICES[2], PAGEABLE, DEVICES[0]), (1.0, 6.0, 2.0)),
}
LANES, STEPS, CAPACITY = 3, 37, 70


def in_sequences() -> dict[str, Any]:
    derive = {"next_obs": conduit.Next("obs")}
    return {"item": conduit.Sequence(4, pad="zero"), "derive": derive, "sampler": conduit.Prioritized()}


def in_steps() -> dict[str, Any]:
    return {"item": conduit.NStep(3, gamma=0.9), "derive": {"next_obs": conduit.Next("obs")}}


SCENES = {"sequences by priority": in_sequences, "n steps": in_steps}


def lines(batch: conduit.Batch) -> list[Any]:
    """All of a batch, byte for byte."""
    info = batch.info
    arrays = [*map(host, optree.tree_leaves(batch.data)), info.keys, info.probability, host(info.weight)]
    if info.mask is not None:
        arrays.append(host(info.mask))
    return [info.number, info.frontier, *((each.dtype.str, each.shape, each.tobytes()) for each in arrays)]


def played(backend: Callable[[Clock], Backend[Any]], scene: str, placement: Placement, clock: Clock) -> list[Any]:
    """Two learners, each on its own batches, while rows come, end and leave."""
    out: list[Any] = []
    with conduit.Store(
        backend=backend(clock),
        capacity=CAPACITY,
        batch_size=8,
        seed=11,
        placement=placement,
        clock=clock,
        **SCENES[scene](),
    ) as store:
        actor = store.actor(lanes=LANES)
        learners = [store.learner(rank, 2) for rank in range(2)]
        for number in range(STEPS):
            ended = np.array([number % 5 == 3, number % 7 == 6, number % 11 == 9])
            rows = step(
                LANES * number, LANES, terminated=ended & (number % 2 == 0), truncated=ended & (number % 2 == 1),
                reward=np.arange(LANES, dtype=np.float32) + number,
            )  # fmt: skip
            actor.push(rows, final={"obs": step(1000 + number, int(ended.sum()))["obs"]} if ended.any() else None)
            if number >= 12 and number % 4 == 0:
                for learner in learners:
                    batch = learner.pull()
                    out.append(lines(batch))
                    if scene == "sequences by priority":
                        store.update_priorities(batch.info.keys, batch.info.keys % 4 + 0.5)
        out.append(lines(store.sample(5)))
        stored = store.read()
        out.append([each.tobytes() for each in optree.tree_leaves(stored.data)])
    return out


@cache
def expected(scene: str) -> list[Any]:
    return played(BACKENDS["reference"], scene, Placement(), RealClock())


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_are_the_same_wherever_rows_live(backend: str, scene: str):
    pytest.importorskip(backend.removeprefix("emulated(").removesuffix(")").replace("reference", "numpy"))
    there = BACKENDS[backend](RealClock()).endpoints()
    tried = 0
    for name, placement in PLACEMENTS.items():
        if all(at in there for at in placement.endpoints):
            tried += 1
            clock = VirtualClock()
            got = clock.run(lambda p=placement, c=clock: played(BACKENDS[backend], scene, p, c))
            assert got == expected(scene), name
    assert tried == (2 if backend == "torch" else 5 if backend == "jax" else 6)


class Counted:
    """What a backend is asked to read and merge."""

    def __init__(self, inner: Backend[Any]) -> None:
        self._inner = inner
        self.read_rows: list[tuple[Endpoint, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, columns: Any, index: Any, fields: Any, to: Any) -> Any:
        self.read_rows.append((columns.at, len(index)))
        return self._inner.read(columns, index, fields, to)


def shards(backend: Any, placement: Placement, capacity: int) -> tuple[Reader, Schema, dict[str, Any]]:
    """A reader of a full ring, and its rows."""
    rows = example_rows(capacity, seed=3)
    schema, layout = Schema.infer(rows, "test"), Layout(capacity, placement.shares)
    made = [Shard(backend, schema, n, at) for at, n in zip(placement.endpoints, layout.shard_rows, strict=True)]
    columns = on_host(rows)
    for span in layout.spans(0, capacity):
        made[span.shard].write(span.slot, columns.slice(span.offset, span.offset + span.rows))
    return Reader(backend, layout, made, schema, None), schema, rows


def selected(schema: Schema, keys: np.ndarray) -> Selection:
    paths = tuple(schema.fields)
    return Selection((Gather(paths, paths, keys, keys.shape),))


def test_of_each_shard_only_its_own_rows_are_read():
    backend = Counted(load("reference"))
    reader, schema, rows = shards(backend, PLACEMENTS["uneven"], 512)
    for seed in range(4):
        keys = np.random.default_rng(seed).integers(0, 512, 64)
        backend.read_rows.clear()
        assert_rows(
            load("reference"),
            reader.read(selected(schema, keys), DEVICES[2]),
            {p: a[keys] for p, a in rows.items()},
            seed,
        )
        assert sum(count for _, count in backend.read_rows) == 64
        assert len({at for at, _ in backend.read_rows}) == len(backend.read_rows) == 3


def test_keys_that_one_shard_has_are_read_from_it_alone():
    backend = Counted(load("reference"))
    reader, schema, rows = shards(backend, PLACEMENTS["even"], 512)
    shard, _ = Layout(512, (1.0, 1.0, 1.0)).locate(np.arange(512))
    assert shard is not None
    keys = np.flatnonzero(shard == 1)[[5, 2, 9]]
    got = reader.read(selected(schema, keys), PAGEABLE)
    assert_rows(load("reference"), got, {path: array[keys] for path, array in rows.items()}, "one")
    assert backend.read_rows == [(DEVICES[1], 3)]


@pytest.mark.parametrize("to", [DEVICES[0], DEVICES[5], PAGEABLE], ids=str)
def test_jax_compiles_nothing_new_for_other_rows_of_the_same_number(to: Endpoint, caplog: pytest.LogCaptureFixture):
    jax = pytest.importorskip("jax")
    backend = load("jax")
    placement = Placement((DEVICES[0], DEVICES[3], DEVICES[4], PAGEABLE), (1.0, 2.0, 3.0, 4.0))
    reader, schema, rows = shards(backend, placement, 512)

    def read(seed: int) -> None:
        keys = np.random.default_rng(seed).integers(0, 512, 100)
        got = reader.read(selected(schema, keys), to)
        assert_rows(backend, got, {path: array[keys] for path, array in rows.items()}, seed)

    for seed in range(12):
        read(seed)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for seed in range(100, 140):
            read(seed)
    compiled = [each.getMessage() for each in caplog.records if "Compiling jit" in each.getMessage()]
    # A shard's part of a batch may still come to another power of two than before.
    assert len(compiled) <= 4, compiled
