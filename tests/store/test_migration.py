"""Moving the rows of a store that goes on: what it says, what it costs, and what becomes of the rows when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest

import conduit
from conduit.backends import load
from conduit.backends.emulated import EmulatedBackend
from conduit.backends.reference import ReferenceBackend
from conduit.clock import VirtualClock
from conduit.core.backend import Backend
from conduit.core.experience import Field, Schema
from conduit.core.moves import Migrated
from conduit.core.placement import Placement
from conduit.core.transfer_plan import TransferPlan, solve
from conduit.errors import CapacityError, ClosedError, MigrationError, SchemaError, SettingError, WaitTimeout
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Memory, Topology
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier
from tests.store.rows import assert_intact, fill, fingerprint, host, ids, step, store, together

DEVICES = [Endpoint(Tier.DEVICE, index) for index in range(4)]
HERE = (PAGEABLE, PINNED, *DEVICES)
UNEVEN = Placement((DEVICES[0], DEVICES[1], PAGEABLE), (3.0, 1.0, 2.0))
EVEN = Placement((DEVICES[1], DEVICES[2]), (1.0, 1.0))


def machine(gather: float = 1e9, link: float = 1e7, free: int = 1 << 24) -> Topology:
    return Topology(
        "four devices",
        {at: Memory(free, free, Source.ASSUMED) for at in HERE},
        {(source, to): Leg(gather if source == to else link) for source in HERE for to in HERE},
    )


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree)


def rows_of(from_: conduit.Store) -> list[Any]:
    rows = from_.read()
    return [rows.keys.tolist(), *(leaf.tobytes() for leaf in leaves(rows.data))]


# What it says


def test_a_migration_tells_what_it_did():
    with store(capacity=600, placement="device:0") as s:
        fill(s.actor(lanes=4), 600)
        row_bytes = s.info()["row_bytes"]
        moved = s.migrate(["device:0", "device:1"])
        assert (moved.before, moved.after) == (
            Placement((DEVICES[0],)),
            Placement((DEVICES[0], DEVICES[1]), (1.0, 1.0)),
        )
        assert moved.rows == 600
        assert moved.moved_bytes == moved.least_bytes == 300 * row_bytes
        assert moved.precopied_bytes + moved.delta_bytes == 600 * row_bytes
        assert list(moved.phases) == ["memory", "precopy", "gate", "drain", "delta", "rebind", "release"]
        assert 0 < moved.pause_s < moved.seconds
        assert moved.predicted_s is None
        assert s.info()["bytes_by_endpoint"] == {"device:0": 300 * row_bytes, "device:1": 300 * row_bytes}


@pytest.mark.parametrize("same", ["device:1", Placement((DEVICES[1],), (7.0,))], ids=str)
def test_to_where_the_rows_are_nothing_moves(same: Any):
    with store(placement="device:1") as s:
        fill(s.actor(), 8)
        before = s._buffer.storage
        assert s.migrate(same) == Migrated(Placement((DEVICES[1],)), Placement.of(same, DEVICES), rows=8)
        assert s._buffer.storage is before


def test_before_the_first_row_it_says_where_rows_will_go():
    with store(placement="pageable") as s:
        assert s.migrate("device:2") == Migrated(None, Placement((DEVICES[2],)))
        assert s.info()["bytes_by_endpoint"] == {}
        fill(s.actor(), 8)
        assert list(s.info()["bytes_by_endpoint"]) == ["device:2"]


def test_a_place_that_is_not_there_is_refused_by_name():
    with store() as s:
        fill(s.actor(), 8)
        with pytest.raises(CapacityError, match=r"no endpoint device:9.*device:3"):
            s.migrate("device:9")
        with pytest.raises(SettingError, match="timeout_s=-1"):
            s.migrate("device:1", timeout_s=-1)


def test_what_both_placements_use_needs_room_for_both():
    with store(capacity=1000, budgets={"device": 15_000}, placement=["device:0", "device:1"]) as s:
        fill(s.actor(lanes=10), 400)
        held = s.info()["bytes_by_endpoint"]
        with pytest.raises(CapacityError) as caught:
            s.migrate(Placement((DEVICES[0], DEVICES[2], PINNED), (9.0, 2.0, 1.0)))
        for part in (
            "1,000 rows of",
            "device:0 needs",
            "beside the",
            "until these have moved",
            "its budget is 14.65 KiB",
        ):
            assert part in str(caught.value)
        assert "device:2 needs" not in str(caught.value)
        assert s.info()["bytes_by_endpoint"] == held
        assert s.migrate(["device:2", "device:3"]).rows == 400, "where they don't meet"


# While the store goes on


def test_pushes_and_pulls_go_on_while_rows_move_at_their_pace():
    """Two megabytes over a link of ten a second."""
    clock, topology = VirtualClock(1), machine()
    backend = EmulatedBackend(topology, "reference", clock)
    rows, row_bytes = 1000, 2004

    def scene() -> tuple[Migrated, list[float]]:
        with conduit.Store(backend=backend, capacity=rows, batch_size=8, placement="device:0", clock=clock) as s:
            actor, learner = s.actor(lanes=10), s.learner(to="numpy")
            first = {"id": np.zeros(10, np.int32), "wide": np.zeros((10, 500), np.float32)}
            for number in range(100):
                actor.push({**first, "id": np.arange(10 * number, 10 * number + 10, dtype=np.int32)})
            backend.drain()
            plan = solve(topology, {DEVICES[0]: rows}, {DEVICES[1]: rows // 2, DEVICES[2]: rows // 2}, row_bytes)
            assert plan.predicted_s == pytest.approx(0.1002)
            done: list[Migrated] = []
            mover = clock.spawn(lambda: done.append(s._wiring.migrator.migrate(EVEN, 60.0, plan)), "mover")
            pushed: list[float] = []
            number = 100
            while not done:
                began_s = clock.now()
                actor.push({**first, "id": np.arange(10 * number, 10 * number + 10, dtype=np.int32)})
                pushed.append(clock.now() - began_s)
                batch = learner.pull()
                assert (batch.data["id"] == batch.info.keys).all()
                number += 1
                clock.sleep(2e-3)
            assert mover.join()
            assert rows_of(s)[0] == list(range(10 * number - rows, 10 * number))
            return done[0], pushed

    moved, pushed = clock.run(scene)
    assert len(pushed) > 20
    # What came meanwhile is moved as well: ten rows every two milliseconds, and what a pull takes.
    assert moved.seconds > 0.1
    assert moved.predicted_s == pytest.approx(0.1002)
    assert moved.seconds < 0.2
    assert moved.pause_s < 0.02
    assert max(pushed) <= moved.pause_s + 1e-9, "nobody waited for the move but in the pause"
    assert moved.delta_bytes < moved.precopied_bytes / 5


def test_a_gather_that_takes_long_is_let_finish_before_the_rows_change_their_place():
    def scene(clock: VirtualClock) -> tuple[Migrated, float, list[Any]]:
        with store(capacity=64, clock=clock, placement="device:0") as s:
            fill(s.actor(lanes=4), 64)
            buffer, got = s._buffer, []
            keys = np.arange(5, 25)
            selection = buffer.select(keys, np.random.default_rng)

            def read() -> None:
                clock.sleep(2.0)
                assert list(s.info()["bytes_by_endpoint"]) == ["device:0"], "the old one is there"
                got.append(buffer.read([selection], PAGEABLE)[0].arrays["id"].tolist())

            lease = buffer.leases.take(5, read)
            reader = clock.spawn(lambda: buffer.leases.redeem(lease), "reader")
            clock.sleep(0.5)
            moved = s.migrate("device:3")
            assert reader.join()
            return moved, clock.now(), got

    clock = VirtualClock(0)
    moved, ended_s, got = clock.run(lambda: scene(clock))
    assert got == [list(range(5, 25))]
    assert moved.phases["drain"] == moved.pause_s == 1.5
    assert ended_s == 2.0


def test_a_gather_that_nobody_has_begun_is_done_by_the_move():
    with store(capacity=64, placement="device:0") as s:
        fill(s.actor(lanes=4), 64)
        buffer, got = s._buffer, []
        selection = buffer.select(np.arange(5, 25), np.random.default_rng)
        lease = buffer.leases.take(5, lambda: got.append(buffer.read([selection], PAGEABLE)[0].arrays["id"].tolist()))
        s.migrate("device:3")
        assert got == [list(range(5, 25))]
        buffer.leases.redeem(lease)
        assert len(got) == 1


def test_two_moves_at_once_come_one_after_the_other():
    clock = VirtualClock(2)
    backend = EmulatedBackend(machine(link=1e4), "reference", clock)

    def scene() -> list[Any]:
        with store(backend=backend, capacity=64, clock=clock, placement="device:0") as s:
            fill(s.actor(lanes=4), 64)
            backend.drain()
            impatient = pytest.raises(WaitTimeout, match="another migration is under way")

            def give_up() -> None:
                clock.sleep(1e-3)
                with impatient:
                    s.migrate("device:3", timeout_s=1e-3)

            ended = together(clock, lambda: s.migrate("device:1"), lambda: s.migrate(["device:2", "pageable"]), give_up)
            fill(s.actor(), 3, first=64)
            assert [int(each) for each in s.read().data["id"]] == list(range(3, 67))
            return [each for each, _ in ended]

    first, second, _ = clock.run(scene)
    assert {first.before, second.before} >= {Placement((DEVICES[0],))}
    assert {first.after, second.after} - {first.before, second.before} in ({first.after}, {second.after})


@pytest.mark.parametrize("seed", range(12))
def test_a_store_that_is_closed_meanwhile_ends_the_move_and_keeps_no_memory(seed: int):
    clock, topology = VirtualClock(seed), machine(link=1e4)
    backend = EmulatedBackend(topology, "reference", clock)

    def scene() -> type:
        s = store(backend=backend, capacity=64, clock=clock, placement="device:0")
        fill(s.actor(lanes=4), 64)
        s._wiring.migrator.chunk_bytes = 128
        backend.drain()

        def close() -> None:
            clock.sleep(0.004 * seed + 1e-3)
            s.close()

        closing = clock.spawn(close, "closing")
        ((ended, _),) = together(clock, lambda: s.migrate(["device:1", "pinned"]))
        assert closing.join()
        return type(ended)

    assert clock.run(scene) is (ClosedError if seed < 11 else Migrated)
    assert all(backend.free_bytes(at) == 1 << 24 for at in HERE)


def test_of_arrays_that_are_used_again_the_rows_are_copied_once_they_go_to_a_device():
    pytest.importorskip("jax")
    with store(backend="jax", capacity=4096, batch_size=512) as s:
        actor, learner = s.actor(lanes=256), s.learner(to="numpy")
        actor.push(step(0, 256))
        s.migrate("device:1")
        rows = step(0, 256)
        for number in range(1, 16):
            rows["id"][:] = np.arange(256 * number, 256 * number + 256)
            made = step(256 * number, 256)
            for name, leaf in rows["obs"].items():
                leaf[...] = made["obs"][name]
            actor.push(rows)
            for leaf in (rows["id"], *rows["obs"].values()):
                leaf.view(np.uint8)[...] = 0x55
        for _ in range(8):
            batch = learner.pull()
            assert ids(batch) == batch.info.keys.tolist()
            assert_intact(batch)


# Failure


class PlannedError(Exception):
    """What a backend raises where a test says so."""


class Failing:
    """A backend one of whose calls fails; it knows what is allocated."""

    def __init__(self, inner: Backend[Any]) -> None:
        self._inner = inner
        self.left: int | None = None
        """How many calls until one fails; None for none."""
        self.calls: list[str] = []
        self.held = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _call(self, name: str, *args: Any) -> Any:
        if self.left is not None:
            if self.left == 0:
                self.left = None
                raise PlannedError(name)
            self.left -= 1
            self.calls.append(name)
        return getattr(self._inner, name)(*args)

    def allocate(self, *args: Any) -> Any:
        columns = self._call("allocate", *args)
        self.held += 1
        return columns

    def transfer(self, *args: Any) -> Any:
        copies = self._call("transfer", *args)
        self.held += len(copies)
        return copies

    def release(self, *args: Any) -> Any:
        self.held -= 1
        return self._inner.release(*args)


for _name in ("read", "write", "scatter", "merge", "widen", "wait", "free_bytes", "padded"):
    setattr(Failing, _name, lambda self, *args, _name=_name: self._call(_name, *args))

SCENES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "sequences": lambda: {"item": conduit.Sequence(3, pad="zero"), "derive": {"next": conduit.Next("obs")}},
    "leaving by chance": lambda: {"remover": conduit.Uniform(), "sampler": conduit.Prioritized()},
}


class Beside:
    """A store, and another that is told the same and never moved."""

    def __init__(self, backend: Any, scene: str, placement: Placement) -> None:
        settings = {"capacity": 60, "batch_size": 5, "seed": 3, **SCENES[scene]()}
        self.store = store(backend=backend, placement=placement, **settings)
        self.twin = store(backend="reference", **settings)
        self._actors = [each.actor(lanes=3) for each in (self.store, self.twin)]
        self._learners = [each.learner(to="numpy") for each in (self.store, self.twin)]
        self.number = 0

    def push(self, steps: int) -> None:
        for _ in range(steps):
            ended = np.array([self.number % 3 == 0, self.number % 4 == 0, False])
            rows = step(3 * self.number, 3, terminated=ended)
            final = {"obs": step(1000 + self.number, int(ended.sum()))["obs"]} if ended.any() else None
            for actor in self._actors:
                actor.push(rows, final=final)
            self.number += 1

    def check(self) -> None:
        """Both have the same rows, and give the same batches."""
        one, other = (learner.pull() for learner in self._learners)
        assert fingerprint(one) == fingerprint(other)
        for a, b in zip(leaves(one.data), leaves(other.data), strict=True):
            assert host(a).tobytes() == host(b).tobytes()
        assert rows_of(self.store) == rows_of(self.twin)
        assert self.store.info()["rows"] == self.twin.info()["rows"]


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize(
    ("before", "after"), [(UNEVEN, EVEN), (Placement(), UNEVEN), (EVEN, Placement((PINNED,)))], ids=str
)
def test_whatever_fails_the_rows_are_whole_where_they_were_and_the_next_move_succeeds(scene, before, after):
    inner = ReferenceBackend(devices=4)
    backend = Failing(inner)
    both = Beside(backend, scene, before)
    both.push(17)
    migrator = both.store._wiring.migrator
    migrator.chunk_bytes = 180

    def began(phase: str) -> None:
        if phase == "gate":
            left, backend.left = backend.left, None
            both.push(3)
            backend.left = left

    migrator.began = began
    failed: list[str] = []
    for number in range(1000):
        held, shards = both.store.info()["bytes_by_endpoint"], backend.held
        backend.left = number
        try:
            moved = both.store.migrate(after)
            break
        except MigrationError as error:
            said, because = str(error), error.__cause__
        assert isinstance(because, PlannedError)
        assert "Nothing was changed: they are where they were" in said
        failed.append(str(because))
        backend.left = None
        assert both.store.info()["bytes_by_endpoint"].keys() == held.keys()
        assert backend.held == shards, "memory that nobody holds"
        if number % 5 == 0:
            both.check()
    else:
        pytest.fail("it never succeeds")
    backend.left = None
    assert moved.after == after
    assert moved.delta_bytes > 0
    assert set(both.store.info()["bytes_by_endpoint"]) == {str(at) for at in after.endpoints}
    both.check()
    both.push(10)
    both.check()
    assert {"allocate", "read", "wait", "padded", "free_bytes"} <= set(failed)
    assert {"scatter", "write"} & set(failed)
    assert len(failed) > 20
    both.store.close()
    assert backend.held == 0
    both.twin.close()


@pytest.mark.parametrize("phase", ["memory", "precopy", "gate", "drain", "delta", "rebind"])
def test_a_move_that_ends_in_any_phase_leaves_all_as_it_was(phase: str):
    backend = Failing(ReferenceBackend(devices=4))
    both = Beside(backend, "sequences", UNEVEN)
    both.push(15)
    held = backend.held

    def end(began: str) -> None:
        if began == phase:
            raise PlannedError(phase)

    both.store._wiring.migrator.began = end
    with pytest.raises(MigrationError, match=f"device:1, device:2: PlannedError was raised on the way: {phase}"):
        both.store.migrate(EVEN)
    assert backend.held == held
    assert both.store._buffer.storage is not None
    assert both.store._buffer.storage.placement == UNEVEN
    both.push(2)
    both.check()
    both.store._wiring.migrator.began = lambda phase: None
    both.store.migrate(EVEN)
    both.check()


def test_where_only_the_old_memory_can_not_be_given_back_the_rows_have_moved():
    backend = Failing(ReferenceBackend(devices=4))
    both = Beside(backend, "sequences", UNEVEN)
    both.push(15)

    def end(began: str) -> None:
        if began == "release":
            raise PlannedError(began)

    both.store._wiring.migrator.began = end
    with pytest.raises(MigrationError, match="were moved to device:1, device:2, and are whole there"):
        both.store.migrate(EVEN)
    assert set(both.store.info()["bytes_by_endpoint"]) == {"device:1", "device:2"}
    both.check()


def test_a_ctrl_c_that_strikes_as_the_gate_closes_opens_it_again(monkeypatch: pytest.MonkeyPatch):
    with store(capacity=64, placement="device:0", timeout_s=1.0) as s:
        fill(s.actor(lanes=4), 64)
        begin, migrator = s._order.begin, s._wiring.migrator

        def interrupted(*args: Any) -> None:
            begin(*args)
            raise KeyboardInterrupt

        migrator.began = lambda phase: phase == "gate" and monkeypatch.setattr(s._order, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            s.migrate("device:1")
        monkeypatch.undo()
        migrator.began = lambda phase: None
        fill(s.actor(lanes=4), 4, first=64)
        assert s.migrate("device:2").before == Placement((DEVICES[0],))


def test_a_ctrl_c_that_strikes_as_a_move_begins_lets_the_next_begin(monkeypatch: pytest.MonkeyPatch):
    with store(capacity=64, placement="device:0", timeout_s=1.0) as s:
        fill(s.actor(lanes=4), 64)
        wait = s._halt.wait

        class Interrupted:
            """The condition that guards who moves rows, left with a KeyboardInterrupt."""

            def __init__(self, condition: Any) -> None:
                self.condition = condition

            def __enter__(self) -> Any:
                return self.condition.__enter__()

            def __exit__(self, *error: object) -> None:
                self.condition.__exit__(*error)
                monkeypatch.undo()
                raise KeyboardInterrupt

        changed = s._wiring.migrator.changed
        monkeypatch.setattr(s._wiring.migrator, "changed", Interrupted(changed))
        monkeypatch.setattr(s._halt, "wait", lambda condition, *rest: wait(changed, *rest))
        with pytest.raises(KeyboardInterrupt):
            s.migrate("device:1")
        assert s.migrate("device:1").rows == 64


def test_a_device_that_is_lost_on_the_way_costs_no_row():
    clock = VirtualClock(0)
    backend = EmulatedBackend(machine(), "reference", clock)

    def scene() -> None:
        with store(backend=backend, capacity=64, clock=clock, placement=["device:0", "pageable"]) as s:
            fill(s.actor(lanes=4), 64)
            before = rows_of(s)
            s._wiring.migrator.chunk_bytes = 128
            s._wiring.migrator.began = lambda phase: backend.lose(DEVICES[2]) if phase == "gate" else None
            fill(s.actor(), 4, first=64)
            with pytest.raises(MigrationError, match=r"device:2 is lost.*at device:0, pageable"):
                s.migrate(["device:2", "device:1"])
            s._wiring.migrator.began = lambda phase: None
            assert rows_of(s)[0] == list(range(4, 68))
            assert before[0] == list(range(64))
            assert s.migrate(["device:1", "device:3"]).rows == 64
            assert rows_of(s)[0] == list(range(4, 68))
            held = s.info()["bytes_by_endpoint"]
            assert {at: backend.free_bytes(at) for at in HERE if at != DEVICES[2]} == {
                at: (1 << 24) - held.get(str(at), 0) for at in HERE if at != DEVICES[2]
            }

    clock.run(scene)


# Rows that grow


def wider(schema: Schema, width: int) -> Schema:
    fields = {path: Field((width,), each.dtype) if path == "h" else each for path, each in schema.fields.items()}
    return Schema(fields, schema.structure)


def grown(backend: str, how: Callable[[conduit.Store, Schema], None]) -> tuple[conduit.Store, Any]:
    s = store(backend=backend, capacity=40, placement=["device:0", "pageable"], derive={"next": conduit.Next("h")})
    actor = s.actor(lanes=2)
    for number in range(25):
        ended = np.array([number % 4 == 0, False])
        rows = {
            "h": np.full((2, 3), number, np.float32) + np.arange(2, dtype=np.float32)[:, None],
            "id": np.arange(2, dtype=np.int8),
            "terminated": ended,
        }
        actor.push(rows, final={"h": np.full((1, 3), -number, np.float32)} if ended.any() else None)
    assert s._buffer.schema is not None
    how(s, wider(s._buffer.schema, 5))
    return s, s._buffer


def in_the_open(s: conduit.Store, schema: Schema) -> None:
    target = Placement((PAGEABLE, DEVICES[0]), (1.0, 2.0))
    moved = s._wiring.migrator.migrate(target, 10.0, schema=schema)
    assert moved.after == target


def in_a_turn(s: conduit.Store, schema: Schema) -> None:
    with s._turn():
        s._wiring.migrator.migrate_in_turn(Placement((DEVICES[0],)), schema)


@pytest.mark.parametrize("how", [in_the_open, in_a_turn])
@pytest.mark.parametrize("backend", ["reference", "torch", "jax"])
def test_rows_and_finals_are_filled_up_with_zeros_where_they_grow(backend: str, how):
    pytest.importorskip("numpy" if backend == "reference" else backend)
    s, buffer = grown(backend, how)
    with s:
        rows = s.read()
        assert rows.data["h"].shape == (40, 5)
        number = 5 + np.arange(40) // 2
        assert (rows.data["h"][:, :3] == (number + np.arange(40) % 2)[:, None]).all()
        assert not rows.data["h"][:, 3:].any()
        assert rows.finals is not None
        assert (rows.finals["h"][:, :3] == -np.arange(8, 25, 4)[:, None]).all()
        assert not rows.finals["h"][:, 3:].any()
        batch = s.sample(20)
        assert host(batch.data["next"]).shape == (20, 5)
        assert buffer.schema is not None
        assert buffer.schema.fields["h"].shape == (5,)


def test_rows_that_can_not_grow_into_others_are_refused():
    with store() as s:
        fill(s.actor(), 4)
        schema = s._buffer.schema
        assert schema is not None
        for fields, says in (
            ({"obs/state": Field((2,), np.dtype(np.float32))}, "grow from obs/state: float32"),
            ({"id": Field((), np.dtype(np.int64))}, r"grow from id: int32\[\] to int64"),
        ):
            with pytest.raises(SchemaError, match=says):
                s._wiring.migrator.migrate(
                    Placement(), 1.0, schema=Schema({**schema.fields, **fields}, schema.structure)
                )
        assert s.info()["rows"] == 4


def test_a_move_that_growth_overtakes_begins_again_from_there():
    clock = VirtualClock(0)

    def scene() -> list[Any]:
        s = store(capacity=40, clock=clock, placement="device:0")
        with s:
            s.actor(lanes=40).push({"h": np.arange(120, dtype=np.float32).reshape(40, 3)})
            migrator, phases = s._wiring.migrator, []
            migrator.chunk_bytes = 100

            def began(phase: str) -> None:
                phases.append(phase)
                if phases.count("precopy") == 1 and phase == "gate":
                    migrator.began = phases.append
                    assert s._buffer.schema is not None
                    with s._turn():
                        migrator.migrate_in_turn(Placement((DEVICES[1],)), wider(s._buffer.schema, 4))

            migrator.began = began
            moved = s.migrate("device:2")
            assert phases.count("precopy") == 2
            assert (moved.before, moved.after) == (Placement((DEVICES[1],)), Placement((DEVICES[2],)))
            return s.read().data["h"][:, :3].ravel().tolist()

    assert clock.run(scene) == list(range(120))


def test_new_memory_in_place_of_the_old_needs_no_room_for_both():
    with store(capacity=1000, budgets={"device": 20_000}, placement="device:0") as s:
        s.actor(lanes=4).push({"h": np.zeros((4, 4), np.float32)})
        schema, migrator, buffer = s._buffer.schema, s._wiring.migrator, s._buffer
        assert schema is not None
        with s._turn():
            buffer.drop()
            migrator.remake(Placement((DEVICES[0],)), wider(schema, 5))
            assert s.info()["bytes_by_endpoint"] == {"device:0": 20_000}
            with pytest.raises(CapacityError, match="device:0 needs"):
                migrator.remake(Placement((DEVICES[0],)), wider(schema, 6))
        assert buffer.schema is not None
        assert buffer.schema.fields["h"].shape == (5,)
        assert s.info()["bytes_by_endpoint"] == {"device:0": 20_000}


def test_where_new_memory_can_not_be_had_after_all_finals_are_numbered_on_and_saved_right(tmp_path: Path):
    backend = Failing(ReferenceBackend(devices=4))

    def push(actor: conduit.Actor, number: int) -> None:
        actor.push(step(number, 1, terminated=np.array([True])), final={"obs": step(500 + number, 1)["obs"]})

    with store(backend=backend, capacity=20, placement="device:0", derive={"next": conduit.Next("obs")}) as s:
        actor = s.actor()
        for number in range(6):
            push(actor, number)
        s.save(tmp_path)
        schema = s._buffer.schema
        assert schema is not None
        with s._turn():
            s._buffer.drop()
            backend.left = 4
            with pytest.raises(PlannedError):
                s._wiring.migrator.remake(Placement((DEVICES[1], DEVICES[2]), (1.0, 1.0)), schema)
        backend.left = None
        for number in range(6, 10):
            push(actor, number)
        s.save(tmp_path)
        with conduit.Store.restore(tmp_path, backend="reference") as again:
            assert rows_of(again) == rows_of(s)
            for one in (s, again):
                finals = one.read().finals
                assert finals is not None
                assert [float(each) for each in finals["obs"]["state"]] == [
                    float(np.float32(506 + n) / 7) for n in range(4)
                ]


def test_a_plan_s_streams_are_not_sent_faster_than_it_says():
    clock, topology = VirtualClock(0), machine(link=1e9)

    class Slow(TransferPlan):
        @property
        def predicted_s(self) -> float:
            return 2.0

    def scene() -> Migrated:
        with store(backend=EmulatedBackend(topology, "reference", clock), capacity=64, clock=clock) as s:
            fill(s.actor(lanes=4), 64)
            row_bytes = s.info()["row_bytes"]
            plan = solve(topology, {PAGEABLE: 64}, {DEVICES[0]: 64}, row_bytes)
            slow = Slow(plan.topology, plan.row_bytes, plan.before, plan.after, plan.moves)
            s._wiring.migrator.chunk_bytes = 4 * row_bytes
            return s._wiring.migrator.migrate(Placement((DEVICES[0],)), 60.0, slow)

    moved = clock.run(scene)
    assert 1.75 < moved.seconds < 2.01
    assert moved.predicted_s == 2.0
    assert moved.pause_s < 1e-3


def test_the_memory_is_given_back_on_every_backend():
    for name in ("reference", "torch", "jax"):
        backend = load(name)
        with store(backend=backend, capacity=64, placement="device:0") as s:
            fill(s.actor(lanes=4), 64)
            old = s._buffer.storage
            s.migrate("pageable")
            assert old is not None
            with pytest.raises(ClosedError):
                old.shards[0].read(np.arange(3), ["id"], PAGEABLE)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_threads_that_push_and_pull_meet_no_torn_or_wrong_row_while_rows_move(backend: str):
    pytest.importorskip("numpy" if backend == "reference" else backend)
    stop, failed = threading.Event(), list[BaseException]()
    with store(backend=backend, capacity=3000, batch_size=64, placement="pageable") as s:
        s._wiring.migrator.chunk_bytes = 1 << 16

        def guarded(body: Callable[[int], None]) -> Callable[[], None]:
            def run() -> None:
                try:
                    number = 0
                    while not stop.is_set():
                        body(number)
                        number += 1
                except BaseException as error:  # it is raised again below, in the test's own thread
                    failed.append(error)

            return run

        actor, learner = s.actor(lanes=4), s.learner(to="numpy")

        def push(number: int) -> None:
            key = np.arange(4 * number, 4 * number + 4, dtype=np.int32)
            actor.push({"id": key, "wide": np.repeat(key[:, None].astype(np.float32), 50, 1)})

        def pull(number: int) -> None:
            batch = learner.pull()
            assert (batch.data["id"] == batch.info.keys).all()
            assert (batch.data["wide"] == batch.data["id"][:, None]).all()

        threads = [threading.Thread(target=guarded(body)) for body in (push, pull)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(4):
                for place in (["device:0", "pageable"], "device:0", "pageable"):
                    s.migrate(place)
        finally:
            stop.set()
            for thread in threads:
                thread.join(timeout=20)
        assert failed == []
        rows = s.read()
        assert rows.data["id"].tolist() == rows.keys.tolist()


@pytest.mark.parametrize(("before", "after"), [("device:0", "device:6"), ("pageable", "device:5")])
def test_jax_compiles_nothing_while_everybody_waits(before: str, after: str, caplog: pytest.LogCaptureFixture):
    """Rows that fill whole chunks, each of neighbours; what is left for the pause is less than one."""
    jax = pytest.importorskip("jax")
    lanes, capacity = 32, 2048
    with store(backend="jax", capacity=capacity, placement=before) as s, jax.log_compiles():
        actor, seen = s.actor(lanes=lanes), dict[str, int]()
        rows = {"wide": np.zeros((lanes, 253), np.float32)}

        def began(phase: str) -> None:
            if phase == "gate":
                actor.push(rows)
            seen[phase] = len(caplog.records)

        for _ in range(capacity // lanes):
            actor.push(rows)
        s._wiring.migrator.began = began
        with caplog.at_level(logging.WARNING):
            assert s.migrate(after).delta_bytes == 1012 * lanes
    compiled = [each.getMessage() for each in caplog.records[seen["gate"] : seen["release"]]]
    assert not [each for each in compiled if "Compiling" in each]
    assert [each for each in caplog.records[: seen["gate"]] if "Compiling" in each.getMessage()]
