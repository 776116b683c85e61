"""Whole stores on emulated machines, in virtual time: what they deliver, and when, is the same in every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import conduit
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import VirtualClock
from conduit.core.placement import Placement
from conduit.errors import SettingError
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Link, Memory, Topology
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier

DEVICES = tuple(Endpoint(Tier.DEVICE, index) for index in range(3))
HERE = (PAGEABLE, PINNED, *DEVICES)

MACHINE = Topology(
    name="three devices",
    memories={at: Memory(1 << 28, 1 << 28, Source.ASSUMED) for at in HERE},
    legs={(source, to): Leg(5e7 if source.is_host or to.is_host else 4e8, 1e-4) for source in HERE for to in HERE},
    links={f"{way} {at}": Link(3e8) for at in DEVICES for way in ("in", "out")},
    routes={
        (source, to): (f"out {source}",) * (source in DEVICES) + (f"in {to}",) * (to in DEVICES)
        for source in HERE
        for to in HERE
        if source != to and {source, to} & set(DEVICES)
    },
)
UNEVEN = Placement((DEVICES[0], DEVICES[2], PINNED), (5.0, 2.0, 1.0))
SCHEDULES = {
    "in line": conduit.Schedule(),
    "behind": conduit.Schedule(overlap_ing=True, g_ing=2, overlap_del=True, g_del=2),
}
CAPACITY, WIDTH = 256, 1000


def play(inner: str, schedule: str, seed: int, placement: Any = UNEVEN) -> dict[str, Any]:
    """Two actors and two learners, one on the first device and one on the second, which holds no rows."""
    clock = VirtualClock(seed)
    backend = EmulatedBackend(MACHINE, inner, clock)
    batches: list[tuple[float, int, bytes, bytes]] = []
    frameworks = {"reference": ("numpy", None, None)}.get(inner, (inner, "device:0", "device:1"))

    def main() -> None:
        with conduit.Store(
            backend=backend,
            clock=clock,
            capacity=CAPACITY,
            batch_size=32,
            derive={"next_obs": conduit.Next("obs")},
            schedule=SCHEDULES[schedule],
            placement=placement,
            seed=3,
        ) as store:

            def act(number: int) -> None:
                actor = store.actor(lanes=2)
                for step in range(120):
                    clock.sleep(2e-4)
                    actor.push({"obs": np.full((2, WIDTH), 1000 * number + step, np.float32)})

            def learn(rank: int) -> None:
                to, *devices = frameworks
                learner = store.learner(rank=rank, world=2, to=to, device=devices[rank])
                for _ in range(12):
                    batch = learner.pull()
                    data: Any = batch.data
                    now, after = np.asarray(data["obs"]), np.asarray(data["next_obs"])
                    assert (after == now + 1).all()
                    assert (now == now[:, :1]).all()
                    batches.append((clock.now(), rank, batch.info.keys.tobytes(), now.tobytes()))
                    clock.sleep(3e-4)

            tasks = [clock.spawn(lambda n=n: act(n), f"actor {n}") for n in range(2)]
            tasks += [clock.spawn(lambda r=r: learn(r), f"learner {r}") for r in range(2)]
            assert all(task.join() for task in tasks)

    clock.run(main)
    return {"batches": batches, "trace": clock.trace, "seconds": clock.now(), "traffic": backend.traffic()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("inner", ["reference", "torch", "jax"])
def test_two_runs_are_equal_byte_for_byte_and_second_for_second(inner, schedule):
    pytest.importorskip("numpy" if inner == "reference" else inner)
    first, second = play(inner, schedule, 1), play(inner, schedule, 1)
    assert first == second
    assert len(first["batches"]) == 24
    assert first["seconds"] > 0.01
    to_learner = (DEVICES[0], PAGEABLE) if inner == "reference" else (DEVICES[0], DEVICES[1])
    assert first["traffic"][to_learner].transfers > 0
    assert first["traffic"][PAGEABLE, DEVICES[2]].size_bytes > 0


@pytest.mark.parametrize("seed", range(2, 6))
def test_no_interleaving_hangs_or_tears_a_row(seed):
    assert len(play("reference", "behind", seed)["batches"]) == 24


def test_a_faster_placement_is_faster():
    """The device that the learner is on, and the far side of a slow link; nothing else differs."""

    def seconds(at: Endpoint) -> float:
        clock = VirtualClock()
        backend = EmulatedBackend(MACHINE, "torch", clock)
        taken: list[float] = []

        def main() -> None:
            with conduit.Store(
                backend=backend, clock=clock, capacity=CAPACITY, batch_size=64, placement=at, seed=3
            ) as store:
                store.actor().push_trajectory({"obs": np.zeros((CAPACITY, WIDTH), np.float32)})
                learner = store.learner(device="device:0")
                learner.pull()
                began_s = clock.now()
                for _ in range(5):
                    learner.pull()
                taken.append(clock.now() - began_s)

        clock.run(main)
        return taken[0]

    pytest.importorskip("torch")
    assert seconds(DEVICES[0]) < seconds(DEVICES[1]) < seconds(PINNED)
    # Nothing is shared here: each pull is one transfer.
    assert seconds(PINNED) == pytest.approx(5 * MACHINE.leg(PINNED, DEVICES[0]).seconds(64 * 4 * WIDTH))


def test_a_store_on_another_clock_than_its_backend_s_is_refused():
    clock = VirtualClock()
    backend = EmulatedBackend(MACHINE, clock=clock)
    with pytest.raises(SettingError, match=r"a store has one clock; expected clock=backend\.clock"):
        conduit.Store(backend=backend, clock=VirtualClock(), capacity=8, batch_size=2)

    def main() -> float:
        with conduit.Store(backend=backend, capacity=8, batch_size=2, placement="pinned") as store:
            store.actor().push_trajectory({"obs": np.zeros((8, WIDTH), np.float32)})
            store.learner().pull()
            return clock.now()

    assert clock.run(main) > 0.0
