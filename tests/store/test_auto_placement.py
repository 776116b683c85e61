"""Where a store's rows go when nobody says: planned by what a machine is measured to be, or by a topology that is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conduit
from conduit import mover
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import VirtualClock
from conduit.core.experience import Schema
from conduit.core.placement import Placement
from conduit.errors import MigrationError, OperatorError, TopologyError
from conduit.topology import Leg, Topology, preset, save, this_machine
from conduit.topology.endpoint import DISK, PAGEABLE
from tests.core.placement_oracle import GB, D, machine

CAPACITY, WIDTH = 4096, 250
MB = GB // 1000
SMALL = machine(1, latency_s=1e-6).only([PAGEABLE, D[0]])
"""Few edges: these are quickly measured."""


def placed(there: Topology, device: str | None, **settings) -> tuple[Placement, str, float]:
    """Of a full store on an emulated machine: where its rows are, what it says of that, and how long the first push took."""
    clock = VirtualClock()
    backend = EmulatedBackend(there, "torch", clock)

    def main() -> tuple[Placement, str, float]:
        with conduit.Store(backend=backend, capacity=CAPACITY, batch_size=512, **settings) as store:
            learner = store.learner(to="numpy") if device is None else store.learner(device=device)
            store.actor().push_trajectory({"obs": np.ones((CAPACITY, WIDTH), np.float32)})
            pushed_s = clock.now()
            assert learner.pull().data["obs"].shape == (512, WIDTH)
            explained = store.explain()
            assert explained.placement is not None
            return explained.placement, str(explained), pushed_s

    return clock.run(main)


def test_for_a_learner_on_a_device_rows_go_where_the_measured_machine_is_fastest():
    pytest.importorskip("torch")
    placement, text, pushed_s = placed(SMALL, "device:0")
    assert placement == Placement((D[0],))
    assert text.startswith("rows are at device:0: the fastest that fits\n4,096 rows of 1000 B on ")
    assert pushed_s > 0
    # Nothing of that is taken for granted: where the device turns out to be slow, they stay on the host.
    slow_device = {(D[0], D[0]): Leg(GB), (PAGEABLE, D[0]): Leg(GB)}
    assert placed(SMALL.changed(legs=slow_device), "device:0")[0] == Placement()


def test_on_the_host_nothing_is_measured_and_a_topology_that_is_given_isn_t_either():
    pytest.importorskip("torch")
    placement, text, pushed_s = placed(machine(2), None)
    assert (placement, pushed_s) == (Placement(), 0.0)
    assert text.startswith("rows are at pageable: they are made on the host and wanted there\n")
    given, text, pushed_s = placed(preset("a100x8").only([PAGEABLE, *D[:3]]), "device:2", topology="a100x8")
    assert (given, pushed_s) == (Placement((D[2],)), 0.0)
    assert "on a100x8" in text


def test_rows_that_grow_go_where_there_is_room_for_both_copies():
    pytest.importorskip("torch")
    clock = VirtualClock()
    # A row is of 1 KB, then of 1.6: 4.1 and 6.6 MB of a device's 10.
    topology = machine(3, 10 * MB)
    backend = EmulatedBackend(topology, "torch", clock)

    def main() -> None:
        with conduit.Store(
            backend=backend,
            capacity=CAPACITY,
            batch_size=64,
            topology=topology,
            fields={"obs": conduit.Field(("h",), np.float32, grow="pad")},
        ) as store:
            learner, actor = store.learner(device="device:0"), store.actor()
            actor.push_trajectory({"obs": np.ones((CAPACITY, 250), np.float32)})
            assert store.explain().placement == Placement((D[0],))
            actor.push_trajectory({"obs": np.ones((8, 400), np.float32)})
            there = store.explain().placement
            assert there is not None
            assert D[0] in there.endpoints
            assert D[1] in there.endpoints
            assert learner.pull().data["obs"].shape == (64, 400)

    clock.run(main)


def test_a_learner_that_rows_lie_badly_for_has_them_moved():
    pytest.importorskip("torch")
    clock = VirtualClock()
    backend = EmulatedBackend(SMALL, "torch", clock)
    batches: list[bytes] = []

    def main() -> None:
        with conduit.Store(backend=backend, capacity=CAPACITY, batch_size=512, seed=1) as store:
            store.actor().push_trajectory({"obs": np.arange(CAPACITY * WIDTH, dtype=np.float32).reshape(CAPACITY, -1)})
            learner = store.learner(device="device:0")
            while not store.migrations:
                batches.append(np.asarray(learner.pull().data["obs"]).tobytes())
            (moved,) = store.migrations
            assert (moved.before, moved.after) == (Placement(), Placement((D[0],)))
            assert store.explain().why == "the fastest that fits"
            for _ in range(3):
                batches.append(np.asarray(learner.pull().data["obs"]).tobytes())

    clock.run(main)
    with conduit.Store(backend="reference", capacity=CAPACITY, batch_size=512, seed=1) as store:
        store.actor().push_trajectory({"obs": np.arange(CAPACITY * WIDTH, dtype=np.float32).reshape(CAPACITY, -1)})
        learner = store.learner(to="numpy")
        assert batches == [learner.pull().data["obs"].tobytes() for _ in batches]


def test_a_move_that_fails_by_itself_is_told_and_nothing_else_happens(monkeypatch):
    pytest.importorskip("torch")
    clock = VirtualClock()
    backend = EmulatedBackend(SMALL, "torch", clock)

    def fail(*told: object) -> None:
        raise MigrationError("the device is gone")

    def main() -> None:
        with conduit.Store(backend=backend, capacity=CAPACITY, batch_size=512) as store:
            store.actor().push_trajectory({"obs": np.ones((CAPACITY, WIDTH), np.float32)})
            monkeypatch.setattr(store._wiring.migrator, "migrate", fail)
            learner = store.learner(device="device:0")
            clock.sleep(1.0)
            assert "it was tried: the device is gone" in store.explain().why
            assert len(learner.pull()) == 512

    clock.run(main)


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_goes_wrong_in_a_move_by_itself_ends_the_store_unless_that_has_ended(monkeypatch, is_closed):
    pytest.importorskip("torch")
    clock = VirtualClock()
    backend = EmulatedBackend(SMALL, "torch", clock)

    def main() -> None:
        with conduit.Store(backend=backend, capacity=CAPACITY, batch_size=512) as store:

            def fail(*told: object) -> None:
                if is_closed:
                    store._halt.now_because(ValueError("a hook failed"))
                    store._halt.check()
                raise ValueError("a mistake")

            store.actor().push_trajectory({"obs": np.ones((CAPACITY, WIDTH), np.float32)})
            monkeypatch.setattr(store._wiring.migrator, "migrate", fail)
            learner = store.learner(device="device:0")
            clock.sleep(1.0)
            with pytest.raises(OperatorError, match="a hook failed" if is_closed else "a mistake"):
                learner.pull()

    clock.run(main)


def test_rows_that_were_put_before_the_learner_came_move_where_that_pays(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(mover, "ITERATIONS", 1)
    clock = VirtualClock()
    backend = EmulatedBackend(SMALL, "torch", clock)

    def main() -> None:
        with conduit.Store(backend=backend, capacity=CAPACITY, batch_size=512) as store:
            store.actor().push_trajectory({"obs": np.ones((CAPACITY, WIDTH), np.float32)})
            assert store.migrate(iterations=10**9).after == Placement()
            store.learner(device="device:0")
            assert store.migrate(iterations=1).after == Placement()
            assert "see migrate()" in store.explain().why
            moved = store.migrate(iterations=1000)
            assert (moved.before, moved.after) == (Placement(), Placement((D[0],)))
            assert moved.predicted_s is not None
            assert store.explain().why == "the fastest that fits"

    clock.run(main)


def test_a_topology_is_a_value_a_preset_s_name_or_a_file_of_this_machine(tmp_path: Path):
    mine = preset("laptop").changed(name="mine", machine=this_machine())
    save(mine, tmp_path / "mine.json")
    for given in (mine, "laptop", str(tmp_path / "mine.json"), tmp_path / "mine.json"):
        with conduit.Store(backend="reference", capacity=8, batch_size=2, topology=given) as store:
            store.actor().push_trajectory({"obs": np.ones((8, 2), np.float32)})
            plan = store.explain().plan
            assert plan is not None
            assert plan.topology.name == ("laptop" if given == "laptop" else "mine")


@pytest.mark.parametrize(
    ("file", "given", "told"),
    [
        ("laptop", None, r"topology='.*it\.json': topology 'laptop' is a preset, .*conduit\.topology\.load\('.*it\.json'\)"),
        ("box", None, r"topology='.*it\.json': topology 'laptop' was measured on another machine, 'box'; this is .*load\('"),
        ("{", None, r"it\.json' is no preset \(a100x8, .*\), and .*it\.json is no topology: it isn't JSON"),
        (None, "a100x9", r"topology='a100x9' is no preset \(a100x8, .*laptop\), and a100x9: can't read the topology: No such file"),
        (None, Path("nowhere/laptop"), r"nowhere/laptop: can't read the topology: No such file"),
        (None, 8, r"topology=8: expected a conduit\.topology\.Topology, a preset's name, or a path"),
        (None, {"pageable": 1}, r"topology=\{'pageable': 1\}: expected"),
        (None, preset("laptop").only([DISK]), r"'laptop' has disk; .*expected a topology with pageable"),
    ],
)  # fmt: skip
def test_a_topology_that_can_not_be_used_is_refused_with_what_would_do(
    tmp_path: Path, file: str | None, given: Any, told
):
    path = tmp_path / "it.json"
    if file == "{":
        path.write_text(file)
    elif file is not None:
        save(preset("laptop").changed(machine="preset" if file == "laptop" else file), path)
    with pytest.raises(TopologyError, match=told):
        conduit.Store(
            backend="reference",
            capacity=8,
            batch_size=2,
            topology=str(path) if given is None else given,
        )


def test_a_learner_where_the_given_topology_has_nothing_is_refused():
    pytest.importorskip("torch")
    clock = VirtualClock()
    backend = EmulatedBackend(machine(2), "torch", clock)

    def main() -> None:
        with conduit.Store(backend=backend, capacity=8, batch_size=2, topology="laptop") as store:
            with pytest.raises(
                TopologyError, match=r"a learner takes its batches at device:1, .*'laptop' has no endpoint device:1"
            ):
                store.learner(device="device:1")
            learner = store.learner(to="numpy")
            store.actor().push_trajectory({"obs": np.ones((8, 2), np.float32)})
            assert learner.pull().data["obs"].shape == (2, 2)

    clock.run(main)


def test_rows_move_when_memory_has_become_free_and_nobody_asked():
    """With an automatic schedule the store looks again now and then."""
    pytest.importorskip("torch")
    clock = VirtualClock()
    capacity = 60_000
    there = machine(1, device_bytes=GB, latency_s=1e-6).only([PAGEABLE, D[0]])
    backend = EmulatedBackend(there, "torch", clock)
    # What is left is enough for a probe, and not for the rows.
    taken = GB - capacity * 4 * WIDTH * 3 // 4
    others = backend.allocate(Schema.infer({"x": np.zeros((1, 1000), np.uint8)}, "test"), taken // 1000, D[0])

    def main() -> None:
        with conduit.Store(backend=backend, capacity=capacity, batch_size=512, schedule="auto") as store:
            learner, actor = store.learner(device="device:0"), store.actor(lanes=64)
            step = {"obs": np.ones((64, WIDTH), np.float32)}

            def turn() -> None:
                actor.push(step)
                learner.pull()
                clock.sleep(0.05)

            for _ in range(8):
                actor.push(step)
            for _ in range(1200):
                turn()
            assert not store.migrations
            before = store.explain().placement
            assert before is not None
            assert before.endpoints == (PAGEABLE, D[0])
            backend.release(others)
            for _ in range(1200):
                turn()
            (moved,) = store.migrations
            assert (moved.before, moved.after) == (before, Placement((D[0],)))
            assert store.explain().why == "the fastest that fits"

    clock.run(main)
