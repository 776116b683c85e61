"""A store that migrates at random moments gives the batches of a twin that never does, byte for byte."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest

import conduit
from conduit.backends import load
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import VirtualClock
from conduit.core.moves import Migrated
from conduit.core.placement import Placement
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Memory, Topology
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier
from tests.store.rows import host, step

HERE = (PAGEABLE, PINNED, DISK, *(Endpoint(Tier.DEVICE, index) for index in range(4)))
MACHINE = Topology(
    "slow links",
    {at: Memory(1 << 20, 1 << 20, Source.ASSUMED) for at in HERE},
    {(source, to): Leg(2e6 if source != to else 2e7, 1e-4) for source in HERE for to in HERE},
)
LANES, CAPACITY, CHUNK_BYTES = 3, 48, 150

SCENES: dict[str, Callable[[], dict[str, Any]]] = {
    "rows": dict,
    "by priority": lambda: {"sampler": conduit.Prioritized()},
    "sequences": lambda: {"item": conduit.Sequence(3, burn_in=1, pad="zero"), "derive": {"next": conduit.Next("obs")}},
    "n steps": lambda: {"item": conduit.NStep(2, gamma=0.9), "derive": {"next": conduit.Next("obs")}},
    "stacks": lambda: {"derive": {"stack": conduit.Stack("obs", 3), "next": conduit.Next("obs")}},
    "leaving by chance": lambda: {"remover": conduit.Uniform()},
    "leaving by priority": lambda: {"sampler": conduit.Prioritized(), "remover": conduit.Lifo()},
    "each row twice": lambda: {"remover": conduit.Lifo(), "max_times_sampled": 2},
}
SCHEDULES = [
    conduit.Schedule(),
    conduit.Schedule(),
    conduit.Schedule(overlap_ing=True, g_ing=2),
    conduit.Schedule(overlap_del=True, g_del=2),
    conduit.Schedule(overlap_ing=True, overlap_del=True),
]


def random_placement(r: random.Random) -> Placement:
    endpoints = r.sample(HERE, r.choice([1, 1, 2, 3, 4]))
    return Placement(tuple(endpoints), tuple(r.choice([1.0, 1.0, 2.0, 5.0]) for _ in endpoints))


def lines(batch: conduit.Batch) -> list[Any]:
    info = batch.info
    arrays = [*map(host, optree.tree_leaves(batch.data)), info.keys, info.probability, host(info.weight)]
    return [info.number, info.frontier, *((each.dtype.str, each.shape, each.tobytes()) for each in arrays)]


def contents(store: conduit.Store) -> list[Any]:
    rows = store.read()
    finals = (
        [] if rows.finals is None else [each for final in rows.finals.values() for each in optree.tree_leaves(final)]
    )
    return [rows.keys.tolist(), *(each.tobytes() for each in (rows.versions, *optree.tree_leaves(rows.data), *finals))]


def program(store: conduit.Store, r: random.Random, pause: Callable[[float], None], folder: Path) -> list[Any]:
    """What one thread asks of a store, the same for the same numbers; and what it got."""
    out: list[Any] = []
    actors, learners = [store.actor(lanes=LANES) for _ in range(2)], [store.learner(rank, 2) for rank in range(2)]
    priorities = store.info()["tables"]["main"]["prioritized"]
    number = saves = 0
    for _ in range(70):
        pause(r.choice([0.0, 0.0, 1e-4, 2e-3]))
        kind = r.random()
        if kind < 0.62 or number < 8:
            _push(actors[r.randrange(2)], number, r)
            number += 1
        elif kind < 0.9:
            batch = learners[number % 2].pull()
            out.append(lines(batch))
            if priorities:
                store.update_priorities(batch.info.keys, batch.info.keys % 3 + 0.25)
        elif kind < 0.94:
            out.append(contents(store))
        elif kind < 0.96:
            out.append(lines(store.sample(4)))
        elif kind < 0.98 and saves < 2:
            saves += 1
            store.save(folder)
            with conduit.Store.restore(folder, backend="reference", clock=store._clock) as again:
                out.append(contents(again))
        else:
            actors[0].close()
            actors[0] = store.actor(lanes=LANES)
    return [*out, contents(store)]


def _push(actor: conduit.Actor, number: int, r: random.Random) -> None:
    ended = np.array([r.random() < 0.25 for _ in range(LANES)])
    rows = step(
        LANES * number,
        LANES,
        terminated=ended & (number % 2 == 0),
        truncated=ended & (number % 2 == 1),
        reward=np.arange(LANES, dtype=np.float32) + number,
    )
    final = step(1000 + LANES * number, int(ended.sum()))["obs"]
    actor.push(rows, final={"obs": final} if ended.any() else None)


def played(seed: int, scene: str, folder: Path, migrates: bool) -> tuple[list[Any], list[Migrated]]:
    """What the program got, and what the migrations did meanwhile."""
    clock = VirtualClock(seed)
    backend = EmulatedBackend(MACHINE, "reference", clock)
    moves: list[Any] = []
    r, other = random.Random(seed), random.Random(-seed - 1)

    def main() -> list[Any]:
        first = random_placement(random.Random(seed + 7)) if migrates else Placement()
        with conduit.Store(
            backend=backend,
            capacity=CAPACITY,
            batch_size=6,
            seed=seed,
            placement=first,
            clock=clock,
            schedule=random.Random(seed).choice(SCHEDULES),
            **SCENES[scene](),
        ) as store:
            store._wiring.migrator.chunk_bytes = CHUNK_BYTES
            ended: list[bool] = []

            def move() -> None:
                while not ended:
                    moves.append(store.migrate(random_placement(other)))
                    clock.sleep(other.random() * 2e-3)

            movers = [clock.spawn(move, f"mover {i}") for i in range(2)] if migrates else []
            try:
                return program(store, r, clock.sleep, folder)
            finally:
                ended.append(True)
                assert all(task.join() for task in movers)
                free = {str(at): backend.free_bytes(at) for at in HERE}
                held = store.info()["bytes_by_endpoint"]
                assert free == {str(at): (1 << 20) - held.get(str(at), 0) for at in HERE}, "memory that nobody holds"

    return clock.run(main), moves


@pytest.mark.parametrize("scene", SCENES)
def test_a_store_that_migrates_gives_what_its_twin_gives(scene: str, tmp_path: Path):
    done = crossed = delta = 0
    for seed in range(9):
        expected, _ = played(seed, scene, tmp_path / f"{seed}", migrates=False)
        got, moves = played(seed, scene, tmp_path / f"{seed} moved", migrates=True)
        assert len(got) == len(expected)
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert one == other, f"seed {seed}, answer {number}"
        done += len(moves)
        crossed += sum(each.moved_bytes > 0 for each in moves)
        delta += sum(each.delta_bytes > 0 for each in moves)
    assert done > 60
    assert crossed > 30
    assert delta > 5


def test_an_on_policy_store_that_migrates_gives_what_its_twin_gives():
    def on_policy(seed: int, migrates: bool) -> list[Any]:
        clock = VirtualClock(seed)
        other = random.Random(seed)

        def main() -> list[Any]:
            backend, out = EmulatedBackend(MACHINE, "reference", clock), list[Any]()
            with conduit.Store(
                backend=backend, mode="on_policy", rollout_unit=24, batch_size=6, epochs=2, seed=seed, clock=clock
            ) as store:
                store._wiring.migrator.chunk_bytes = CHUNK_BYTES
                ended: list[bool] = []

                def move() -> None:
                    while not ended:
                        store.migrate(random_placement(other))
                        clock.sleep(other.random() * 1e-2)

                mover = clock.spawn(move, "mover") if migrates else None
                actor, learner = store.actor(lanes=LANES), store.learner()
                for iteration in range(5):
                    for number in range(8):
                        actor.push(step(24 * iteration + LANES * number, LANES))
                        clock.sleep(3e-4)
                    actor.end_unit()
                    out += [lines(batch) for batch in learner]
                    store.advance()
                ended.append(True)
                assert mover is None or mover.join()
            return out

        return clock.run(main)

    for seed in range(6):
        assert on_policy(seed, True) == on_policy(seed, False), seed


@pytest.mark.parametrize("scene", ["sequences", "leaving by priority"])
@pytest.mark.parametrize("name", ["torch", "jax", "emulated(torch)", "emulated(jax)"])
def test_on_the_real_clock_other_backends_give_what_the_twin_gives(name: str, scene: str, tmp_path: Path):
    """Threads as they come: two move rows while the program runs, and what it got is the same."""
    inner = name.removeprefix("emulated(").removesuffix(")")
    pytest.importorskip(inner)
    emulated = inner != name
    seed, moves, failed = 4, list[Migrated](), list[BaseException]()
    backend = EmulatedBackend(MACHINE, inner) if emulated else load(inner, tmp_path / "disk")
    there = [at for at in HERE if at in backend.endpoints()]
    # A few, since JAX compiles for each number of rows that an endpoint holds.
    places = [Placement((there[-1],)), Placement((there[-1], PAGEABLE), (2.0, 1.0)), Placement(), Placement((DISK,))]
    expected, _ = played(seed, scene, tmp_path / "stays", migrates=False)
    with conduit.Store(
        backend=backend,
        capacity=CAPACITY,
        batch_size=6,
        seed=seed,
        placement=places[0],
        schedule=random.Random(seed).choice(SCHEDULES),
        **SCENES[scene](),
    ) as store:
        store._wiring.migrator.chunk_bytes = CHUNK_BYTES
        ended = threading.Event()

        def move(r: random.Random) -> None:
            try:
                while not ended.is_set() or sum(each.moved_bytes > 0 for each in moves) < 2:
                    moves.append(store.migrate(r.choice(places)))
                    ended.wait(r.random() * 2e-3)
            except BaseException as error:  # it is raised again below, in the test's own thread
                failed.append(error)

        movers = [threading.Thread(target=move, args=(random.Random(number),)) for number in range(2)]
        for mover in movers:
            mover.start()
        try:
            got = program(store, random.Random(seed), time.sleep, tmp_path / "moves")
        finally:
            ended.set()
            for mover in movers:
                mover.join(30)
        assert failed == []
        assert got == expected


def test_the_same_seed_migrates_in_the_same_way(tmp_path: Path):
    (first, moves), (second, again) = (
        played(3, "sequences", tmp_path / f"{number}", migrates=True) for number in range(2)
    )
    assert first == second
    assert moves == again
