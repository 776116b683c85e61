"""What an emulated machine adds to the backend that holds its rows: room, time, links that are shared, devices that fail."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest

from conduit.backends import clock_of, load
from conduit.backends.emulated import EmulatedBackend
from conduit.backends.emulation.links import Traffic
from conduit.backends.reference import ReferenceBackend
from conduit.clock import REAL, RealClock, VirtualClock
from conduit.core.backend import Columns, Move, Target
from conduit.core.experience import Schema
from conduit.errors import CapacityError, HandOverError, SettingError, TopologyError
from conduit.testing import assert_rows, index_of, on_host
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Edge, Link, Memory, Topology
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier

D = tuple(Endpoint(Tier.DEVICE, index) for index in range(4))
FAR = Endpoint(Tier.DEVICE, 0, node=1)
HERE = (PAGEABLE, PINNED, *D)
EDGES: tuple[Edge, ...] = tuple(itertools.product(HERE, HERE))
ROW_BYTES = 1000
SPEED = 1e6
"""Bytes per second of every edge: a row takes a millisecond."""


def machine(
    room: int = 1 << 30,
    legs: dict[Edge, Leg] | None = None,
    links: dict[str, tuple[float, list[Edge]]] | None = None,
    latency_s: float = 0.0,
) -> Topology:
    """Four devices and a host, all edges alike but for `legs`. `links`: speed and edges of each."""
    links = links or {}
    routes: dict[Edge, tuple[str, ...]] = {}
    for name, (_, edges) in links.items():
        for edge in edges:
            routes[edge] = (*routes.get(edge, ()), name)
    return Topology(
        name="four devices",
        # Listed last on purpose: a backend's endpoints begin with it.
        memories={at: Memory(2 * room, room, Source.ASSUMED) for at in (*D, FAR, PINNED, PAGEABLE)},
        legs={edge: Leg(SPEED, latency_s) for edge in EDGES} | (legs or {}),
        links={name: Link(speed) for name, (speed, _) in links.items()},
        routes=routes,
    )


def rows_of(count: int, first: int = 0) -> Columns[Any]:
    """Rows of ROW_BYTES bytes, each with its number all over it."""
    numbers = np.arange(first, first + count, dtype=np.uint16)[:, None]
    return on_host({"a": np.repeat(numbers, ROW_BYTES // 2, axis=1)})


SCHEMA = Schema.infer({"a": np.zeros((1, ROW_BYTES // 2), np.uint16)}, "test")


def filled(backend: EmulatedBackend, at: Endpoint, count: int = 100) -> Columns[Any]:
    """Columns that are there."""
    columns = backend.write(backend.allocate(SCHEMA, count, at), 0, rows_of(count))
    backend.wait(columns)
    return columns


def read(backend: EmulatedBackend, columns: Columns[Any], count: int, to: Endpoint) -> Columns[Any]:
    return backend.read(columns, np.arange(count), ["a"], to)


class Lab:
    """An emulated machine on a virtual clock, and what happens on it."""

    def __init__(self, topology: Topology | None = None, seed: int = 0) -> None:
        self.clock = VirtualClock(seed)
        self.backend = EmulatedBackend(topology or machine(), clock=self.clock)
        self.ends: dict[str, float] = {}

    def reads(self, name: str, columns: Columns[Any], count: int, to: Endpoint, at_s: float = 0.0) -> Any:
        """A task that asks for so many rows then, and notes when they are there."""

        def main() -> None:
            self.clock.sleep_until(at_s)
            self.backend.wait(read(self.backend, columns, count, to))
            self.ends[name] = self.clock.now()

        return self.clock.spawn(main, name)


# What there is --------------------------------------------------------------------------------------------------------


def test_its_endpoints_are_the_topology_s_on_this_node_with_the_host_first():
    backend = EmulatedBackend(machine())
    assert backend.endpoints()[0] == PAGEABLE
    assert set(backend.endpoints()) == set(HERE)
    assert (backend.name, backend.framework, backend.immediate) == ("emulated(reference)", "numpy", False)
    assert load(backend) is backend


def test_a_topology_without_host_memory_is_refused():
    with pytest.raises(TopologyError, match=r"'four devices' has no pageable memory.*it has device:0, device:1"):
        EmulatedBackend(machine().only(D))


@pytest.mark.parametrize("inner", ["reference", "torch", "jax"])
def test_rows_take_room_until_they_are_released_or_forgotten(inner):
    if inner != "reference":
        pytest.importorskip(inner)
    backend = EmulatedBackend(machine(room=100 * ROW_BYTES), inner)
    columns = backend.allocate(SCHEMA, 40, D[1])
    assert backend.free_bytes(D[1]) == 60 * ROW_BYTES
    for start in range(3):
        # JAX gives new arrays for what it was lent.
        columns = backend.write(columns, start, rows_of(10))
        columns = backend.scatter(columns, np.arange(10), rows_of(10), ["a"])
    gc.collect()
    assert backend.free_bytes(D[1]) == 60 * ROW_BYTES
    part = columns.slice(3, 7)
    (copy,) = backend.transfer([Move(part, D[1])])
    assert backend.free_bytes(D[1]) == 56 * ROW_BYTES
    with pytest.raises(CapacityError, match=r"57 rows of 1,000 bytes need 0\.000 GB at device:1; 0\.000 GB free"):
        backend.allocate(SCHEMA, 57, D[1])
    del copy
    assert backend.free_bytes(D[1]) == 60 * ROW_BYTES
    backend.release(columns)
    assert backend.free_bytes(D[1]) == 100 * ROW_BYTES
    assert [backend.free_bytes(at) for at in (D[0], PAGEABLE)] == [100 * ROW_BYTES] * 2
    assert part.rows == 4


def test_a_batch_takes_no_room_that_rows_could_have():
    backend = EmulatedBackend(machine(room=100 * ROW_BYTES))
    batch = read(backend, filled(backend, PAGEABLE), 50, D[0])
    copy = backend.adopt(batch.arrays, D[0])
    assert backend.free_bytes(D[0]) == 100 * ROW_BYTES
    assert copy.rows == 50


def test_a_transfer_that_has_no_room_is_refused_before_anything_moves():
    backend = EmulatedBackend(machine(room=100 * ROW_BYTES))
    columns = filled(backend, PAGEABLE, 60)
    before = backend.traffic()
    with pytest.raises(CapacityError, match=r"60 rows of 1,000 bytes.*at device:2"):
        backend.transfer([Move(columns, D[1]), Move(columns, D[2]), Move(columns, D[2])])
    assert backend.traffic() == before
    assert backend.free_bytes(D[1]) == backend.free_bytes(D[2]) == 100 * ROW_BYTES


def test_where_this_machine_has_no_room_it_is_named():
    backend = EmulatedBackend(machine(room=1 << 50), ReferenceBackend(devices=1, device_bytes=10 * ROW_BYTES))
    with pytest.raises(
        CapacityError, match=r"emulated device:0 are held in memory of this machine.*11 rows.*Topology\.scaled"
    ):
        backend.allocate(SCHEMA, 11, D[0])
    assert backend.free_bytes(D[0]) == 1 << 50


def test_an_edge_that_is_missing_is_named_and_nothing_is_written():
    topology = machine()
    lacking = Topology(
        name="one way",
        memories=topology.memories,
        legs={edge: leg for edge, leg in topology.legs.items() if edge != (PAGEABLE, D[2])},
    )
    backend = EmulatedBackend(lacking)
    columns = backend.allocate(SCHEMA, 4, D[2])
    with pytest.raises(TopologyError, match="'one way' has no bandwidth of pageable → device:2"):
        backend.write(columns, 0, rows_of(4, first=1))
    assert_rows(backend, read(backend, columns, 4, D[2]), {"a": np.zeros((4, 500), np.uint16)}, "unwritten")


# Time -----------------------------------------------------------------------------------------------------------------


def test_a_transfer_takes_its_latency_and_its_bytes():
    lab = Lab(machine(latency_s=0.5))

    def main() -> None:
        columns = lab.backend.write(lab.backend.allocate(SCHEMA, 100, D[0]), 0, rows_of(100))
        assert lab.clock.now() == 0.0
        lab.backend.wait(columns)
        assert lab.clock.now() == pytest.approx(0.5 + 0.1)
        lab.backend.wait(columns)
        assert lab.clock.now() == pytest.approx(0.6)

    lab.clock.run(main)


def test_what_is_done_with_rows_starts_when_they_are_there():
    """write → scatter → read → merge with another → write elsewhere: each after the last, in emulated time."""
    lab = Lab()
    backend, clock = lab.backend, lab.clock

    def main() -> None:
        columns = backend.write(backend.allocate(SCHEMA, 100, D[0]), 0, rows_of(100))  # 0.1
        columns = backend.scatter(columns, index_of(3, 1), rows_of(2), ["a"])  # 0.102
        batch = read(backend, columns, 50, D[1])  # 0.152
        other = backend.adopt({"a": np.zeros((10, 500), np.uint16)}, D[1])  # 0.112: copied after what this thread wrote
        merged = backend.merge([batch, other], [np.arange(50), np.arange(50, 60)], 60, D[1])  # 0.212
        elsewhere = backend.write(backend.allocate(SCHEMA, 60, D[1]), 0, merged)  # 0.272
        copies = backend.transfer([Move(elsewhere, at) for at in (D[2], D[3])])  # 0.332, both
        assert clock.now() == 0.0
        for what, due_s in (
            (columns, 0.102),
            (other, 0.112),
            (batch, 0.152),
            (merged, 0.212),
            (elsewhere, 0.272),
            (copies[0], 0.332),
            (copies[1], 0.332),
        ):
            backend.wait(what)
            assert clock.now() == pytest.approx(due_s)

    clock.run(main)


def test_a_thread_copies_out_of_pageable_memory_one_transfer_after_the_other_wherever_to():
    lab = Lab(machine(latency_s=0.01, legs={(PAGEABLE, D[1]): Leg(SPEED / 2, 0.03)}))
    backend, clock = lab.backend, lab.clock
    stored = {at: backend.allocate(SCHEMA, 100, at) for at in (PAGEABLE, PINNED, *D[:2])}

    def main() -> None:
        backend.wait(pinned := backend.write(stored[PINNED], 0, rows_of(100)))  # 0.11
        began_s = clock.now()
        for at in (D[0], D[1], PAGEABLE):
            stored[at] = backend.write(stored[at], 0, rows_of(50))  # 0.06, 0.13, 0.06
        batch = read(backend, stored[PAGEABLE], 20, D[3])  # 0.03
        adopted = backend.adopt(rows_of(10).arrays, D[2])  # 0.02
        # Nothing else waits for the thread: an engine fetches what is pinned.
        beside = read(backend, pinned, 100, D[1])
        assert clock.now() == began_s
        for what, due in (
            (stored[D[0]], 0.06),
            (beside, 0.11),
            (stored[D[1]], 0.19),
            (stored[PAGEABLE], 0.25),
            (batch, 0.28),
            (adopted, 0.30),
        ):
            backend.wait(what)
            assert clock.now() - began_s == pytest.approx(due)

    clock.run(main)


@pytest.mark.parametrize("seed", range(5))
def test_threads_copy_out_of_pageable_memory_beside_each_other(seed):
    lab = Lab(seed=seed)

    def main() -> None:
        columns = filled(lab.backend, PAGEABLE)
        tasks = [lab.reads(str(to), columns, 100, to, at_s=1.0) for to in D]
        assert all(task.join() for task in tasks)

    lab.clock.run(main)
    assert lab.ends == pytest.approx(dict.fromkeys(map(str, D), 1.1))


def test_transfers_of_one_thread_along_an_edge_come_one_after_the_other():
    lab = Lab()

    def main() -> None:
        columns = filled(lab.backend, D[0])
        began_s = lab.clock.now()
        batches = [read(lab.backend, columns, 100, D[1]) for _ in range(3)]
        for number, batch in enumerate(batches):
            lab.backend.wait(batch)
            assert lab.clock.now() - began_s == pytest.approx(0.1 * (number + 1))

    lab.clock.run(main)


def test_what_a_thread_asked_for_last_is_there_when_all_that_it_asked_for_at_that_place_is():
    """A batch of several parts is known by its last: `conduit.core.reader`."""
    lab = Lab()

    def main() -> None:
        near, far = filled(lab.backend, D[1]), filled(lab.backend, D[0])
        began_s = lab.clock.now()
        read(lab.backend, far, 100, D[1])
        elsewhere = read(lab.backend, far, 1, D[2])
        last = read(lab.backend, near, 1, D[1])
        lab.backend.wait(elsewhere)
        assert lab.clock.now() - began_s == pytest.approx(0.001)
        lab.backend.wait(last)
        assert lab.clock.now() - began_s == pytest.approx(0.1)

    lab.clock.run(main)


@pytest.mark.parametrize("seed", range(5))
def test_two_reads_over_one_link_take_twice_as_long_and_over_two_links_do_not(seed):
    shared = machine(links={"out of 0": (SPEED, [(D[0], D[1]), (D[0], D[2])])})
    for topology, factor in ((shared, 2), (machine(), 1)):
        lab = Lab(topology, seed)

        def main(lab: Lab = lab) -> None:
            columns = filled(lab.backend, D[0])
            tasks = [lab.reads(str(to), columns, 100, to, at_s=1.0) for to in (D[1], D[2])]
            assert all(task.join() for task in tasks)

        lab.clock.run(main)
        assert lab.ends == pytest.approx({"device:1": 1.0 + 0.1 * factor, "device:2": 1.0 + 0.1 * factor})


@pytest.mark.parametrize("seed", range(5))
def test_two_threads_share_an_edge(seed):
    lab = Lab(seed=seed)

    def main() -> None:
        columns = filled(lab.backend, D[0])
        tasks = [lab.reads("long", columns, 100, D[1], 1.0), lab.reads("short", columns, 50, D[1], 1.0)]
        assert all(task.join() for task in tasks)

    lab.clock.run(main)
    assert lab.ends == pytest.approx({"short": 1.1, "long": 1.15})


@pytest.mark.parametrize("seed", range(10))
def test_who_waits_is_woken_sooner_when_a_third_transfer_makes_room(seed):
    """0 → 1 shares link x with 0 → 2, which shares the slower y with 3 → 2: when the last comes, the second gets less and the first more."""
    links = {"x": (SPEED, [(D[0], D[1]), (D[0], D[2])]), "y": (SPEED * 0.4, [(D[0], D[2]), (D[3], D[2])])}
    lab = Lab(machine(links=links), seed)

    def main() -> None:
        near, far = filled(lab.backend, D[0], 200), filled(lab.backend, D[3], 200)
        tasks = [
            lab.reads("first", near, 140, D[1], 1.0),  # 0.6 for 0.1 s, then 0.8 for 0.1 s
            lab.reads("second", near, 200, D[2], 1.0),  # 0.4, then 0.2
            lab.reads("third", far, 100, D[2], 1.1),
        ]
        assert all(task.join() for task in tasks)

    lab.clock.run(main)
    assert lab.ends["first"] == pytest.approx(1.2)
    assert lab.ends["third"] == pytest.approx(1.6)
    assert lab.ends["second"] == pytest.approx(1.75)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_but_wait_order_and_hand_over_gives_way(seed):
    """Their callers hold plain locks, which on a virtual clock may not be held where another task could go on."""
    lab = Lab(seed=seed)
    backend, clock, lock = lab.backend, lab.clock, threading.Lock()

    def work() -> None:
        columns = backend.allocate(SCHEMA, 100, D[0])
        for _ in range(5):
            clock.sleep(0.01)
            with lock:
                events = len(clock.trace)
                columns = backend.write(columns, 0, rows_of(100))
                columns = backend.scatter(columns, index_of(0), rows_of(1), ["a"])
                parts = [read(backend, columns, 10, D[1]), backend.adopt(rows_of(5).arrays, D[1])]
                batch = backend.merge(parts, [np.arange(10), np.arange(10, 15)], 15, D[1])
                (copy,) = backend.transfer([Move(batch, PAGEABLE)])
                backend.release(copy)
                backend.free_bytes(D[0])
                backend.landing(Target("numpy"))
                backend.traffic()
                assert len(clock.trace) == events
            backend.order(batch)
            backend.hand_over(read(backend, columns, 10, PAGEABLE), Target("numpy"))

    def main() -> None:
        tasks = [clock.spawn(work, f"worker {number}") for number in range(4)]
        assert all(task.join() for task in tasks)

    clock.run(main)


@pytest.mark.parametrize("seed", range(10))
def test_many_at_once_end_and_two_runs_are_equal(seed):
    links = {f"port {k}": (SPEED, [edge for edge in EDGES if edge[0] == D[k] and edge[1] != D[k]]) for k in range(4)}

    def play() -> tuple[Any, ...]:
        lab = Lab(machine(links=links, latency_s=0.003), seed)
        backend, log = lab.backend, []

        def work(number: int) -> None:
            choose = np.random.default_rng((seed, number))
            columns = filled(backend, D[number], 64)
            for _ in range(12):
                lab.clock.sleep(float(choose.random()) * 0.02)
                columns = backend.write(columns, int(choose.integers(32)), rows_of(int(choose.integers(1, 32))))
                batch = backend.read(columns, choose.integers(64, size=20), ["a"], D[int(choose.integers(4))])
                backend.wait(batch)
                log.append((lab.clock.now(), number, batch.arrays["a"].tobytes()))

        def main() -> None:
            tasks = [lab.clock.spawn(lambda n=n: work(n), f"worker {n}") for n in range(4)]
            assert all(task.join() for task in tasks)

        lab.clock.run(main)
        return log, lab.clock.trace, lab.clock.now(), backend.traffic()

    first = play()
    assert first == play()
    assert first[2] > 0.1


def test_drain_ends_when_all_that_was_started_has():
    lab = Lab()

    def main() -> None:
        columns = lab.backend.write(lab.backend.allocate(SCHEMA, 100, D[0]), 0, rows_of(100))
        lab.backend.transfer([Move(columns, D[1])])
        lab.backend.drain()
        assert lab.clock.now() == pytest.approx(0.2)
        lab.backend.drain()
        assert lab.clock.now() == pytest.approx(0.2)

    lab.clock.run(main)


def test_traffic_tells_bytes_and_busy_seconds_of_every_edge():
    lab = Lab()

    def main() -> None:
        columns = filled(lab.backend, D[0])  # 0 to 0.1
        tasks = [
            lab.reads("long", columns, 90, D[1], 1.0),  # 1 to 1.1, sharing
            lab.reads("short", columns, 10, D[1], 1.04),
            lab.reads("later", columns, 50, D[1], 2.0),  # 2 to 2.05
        ]
        assert all(task.join() for task in tasks)
        read(lab.backend, columns, 20, D[1])

    lab.clock.run(main)
    assert list(lab.backend.traffic()) == [(PAGEABLE, D[0]), (D[0], D[1])]
    first, second = lab.backend.traffic().values()
    assert (first.size_bytes, first.transfers, first.busy_s) == (100 * ROW_BYTES, 1, pytest.approx(0.1))
    # The last is still on its way.
    assert (second.size_bytes, second.transfers, second.busy_s) == (170 * ROW_BYTES, 4, pytest.approx(0.15))


def test_a_busy_edge_s_seconds_do_not_depend_on_when_they_are_looked_at():
    def play(looks: bool) -> Traffic:
        lab = Lab()

        def main() -> None:
            columns = filled(lab.backend, D[0])
            tasks = [lab.reads(f"{n}", columns, 1 + n % 7, D[1], 1.0 + 0.0011 * n) for n in range(100)]
            while looks and len(lab.ends) < 100:
                lab.clock.sleep(0.0007)
                lab.backend.traffic()
            assert all(task.join() for task in tasks)

        lab.clock.run(main)
        return lab.backend.traffic()[D[0], D[1]]

    once, often = play(False), play(True)
    assert (once.size_bytes, once.transfers) == (often.size_bytes, often.transfers)
    assert once.busy_s == pytest.approx(often.busy_s)
    assert once.busy_s == pytest.approx(once.size_bytes / SPEED), "it was never idle"


def test_what_is_kept_of_traffic_does_not_grow_with_it():
    lab = Lab()

    def main() -> None:
        columns = filled(lab.backend, D[0])
        for number in range(400):
            lab.clock.sleep(0.01)
            read(
                lab.backend, columns, 1 + number % 12, D[1]
            )  # one in six is still on its way when the next is asked for
        lab.backend.drain()

    lab.clock.run(main)
    meter = lab.backend._links._meters[D[0], D[1]]
    assert len(meter._spans) < 10
    traffic = lab.backend.traffic()[D[0], D[1]]
    assert (traffic.transfers, traffic.busy_s) == (400, pytest.approx(traffic.size_bytes / SPEED))


def test_on_the_real_clock_a_transfer_counts_from_its_call_and_is_never_early():
    backend = EmulatedBackend(machine(legs={(PAGEABLE, D[0]): Leg(2e6), (D[0], D[1]): Leg(1e6)}))
    columns = backend.allocate(SCHEMA, 100, D[0])
    began_s = REAL.now()
    columns = backend.write(columns, 0, rows_of(100))
    batch = read(backend, columns, 30, D[1])
    backend.wait(columns)
    assert REAL.now() - began_s >= 0.05
    backend.wait(batch)
    assert REAL.now() - began_s >= 0.08
    assert backend.traffic()[D[0], D[1]].busy_s == pytest.approx(0.03)


def test_what_is_over_is_not_waited_for_whenever_one_comes_to_look_on_the_real_clock():
    backend = EmulatedBackend(machine())
    columns = filled(backend, D[0], 30)
    waited_s = []
    for _ in range(3):
        batch = read(backend, columns, 30, D[1])
        REAL.sleep(0.035)
        began_s = REAL.now()
        backend.wait(batch)
        waited_s.append(REAL.now() - began_s)
    assert min(waited_s) < 0.015, "one of three, for the machine may be busy"
    assert backend.traffic()[D[0], D[1]].busy_s == pytest.approx(0.09)


def test_a_late_waiter_does_not_delay_what_comes_after_on_the_real_clock():
    backend = EmulatedBackend(machine())
    columns = backend.write(backend.allocate(SCHEMA, 20, D[0]), 0, rows_of(20))  # 20 ms
    batch = read(backend, columns, 20, D[1])  # from then on, 20 ms
    copy = backend.write(backend.allocate(SCHEMA, 20, D[2]), 0, batch)  # and 20 more
    REAL.sleep(0.065)
    backend.wait(copy)
    assert backend.traffic()[D[1], D[2]].busy_s == pytest.approx(0.02)


# Handing over ---------------------------------------------------------------------------------------------------------


def test_a_batch_lands_on_the_device_that_was_asked_for_or_on_the_first():
    backend = EmulatedBackend(machine())
    pytest.importorskip("torch")
    assert backend.landing(Target("numpy")) == PAGEABLE
    assert backend.landing(Target("torch")) == D[0]
    assert backend.landing(Target("torch", device="device:3")) == D[3]
    assert backend.landing(Target("torch", device=D[2])) == D[2]
    assert backend.landing(Target("torch", device="pinned")) == PINNED
    assert EmulatedBackend(machine().only([PAGEABLE])).landing(Target("torch")) == PAGEABLE


@pytest.mark.parametrize("device", ["device:4", "cuda:0", "cpu", FAR, 3, None.__class__])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device):
    pytest.importorskip("torch")
    with pytest.raises(HandOverError, match=r"machine 'four devices' has pageable, device:0, .*device:3, pinned"):
        EmulatedBackend(machine()).landing(Target("torch", device=device))


def test_what_lies_elsewhere_is_brought_to_its_landing_first_and_within_the_host_it_is_not():
    pytest.importorskip("torch")
    lab = Lab()
    backend = lab.backend

    def main() -> None:
        columns = filled(backend, D[1])
        for at, target, takes_s in (
            (D[0], Target("torch", device="device:3"), 0.02),
            (D[3], Target("torch", device="device:3"), 0.0),
            (PINNED, Target("torch"), 0.02),
            (D[0], Target("numpy"), 0.02),
            (PINNED, Target("numpy"), 0.0),
        ):
            batch = read(backend, columns, 20, at)
            backend.wait(batch)
            began_s = lab.clock.now()
            arrays = backend.hand_over(batch, target)
            assert lab.clock.now() - began_s == pytest.approx(takes_s), (at, target)
            assert (np.asarray(arrays["a"]) == rows_of(20).arrays["a"]).all()

    lab.clock.run(main)


def test_a_batch_is_handed_over_when_it_is_there_and_so_is_what_was_adopted_for_it():
    """Who adds adopted arrays to a batch doesn't tell us which transfers these wait for (`conduit.core.delivery`)."""
    lab = Lab()
    backend = lab.backend

    def main() -> None:
        columns = filled(backend, D[1])
        began_s = lab.clock.now()
        batch = read(backend, columns, 20, D[0])
        later = [read(backend, columns, 20, D[0]) for _ in range(5)]
        backend.hand_over(batch, Target("numpy", None))
        assert lab.clock.now() - began_s == pytest.approx(0.04), "it waited for itself and its way to the host alone"
        for each in later:
            backend.wait(each)
        began_s = lab.clock.now()
        extra = backend.adopt(rows_of(30).arrays, PAGEABLE)
        both = Columns(PAGEABLE, {"b": extra.arrays["a"]}, 30)
        backend.hand_over(both, Target("numpy"))
        assert lab.clock.now() - began_s == pytest.approx(0.03)

    lab.clock.run(main)


def test_on_jax_s_devices_a_batch_stays_on_the_one_that_holds_it():
    jax = pytest.importorskip("jax")
    backend = EmulatedBackend(machine(legs={edge: Leg(1e10) for edge in EDGES}), "jax")
    columns = filled(backend, D[1])
    for device in range(4):
        target = Target("jax", device=f"device:{device}")
        batch = read(backend, columns, 16, backend.landing(target))
        array = backend.hand_over(batch, target)["a"]
        assert array.devices() == {jax.local_devices()[device]}
        assert (np.asarray(array) == rows_of(16).arrays["a"]).all()


def test_a_batch_is_split_over_jax_s_devices_from_the_host():
    jax = pytest.importorskip("jax")
    backend = EmulatedBackend(machine(legs={edge: Leg(1e10) for edge in EDGES}), "jax")
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec("data"))
    target = Target("jax", sharding=sharding)
    assert backend.landing(target) == PAGEABLE
    batch = read(backend, filled(backend, D[1]), 16, PAGEABLE)
    assert [shard.data.shape[0] for shard in backend.hand_over(batch, target)["a"].addressable_shards] == [2] * 8


# Devices that fail ----------------------------------------------------------------------------------------------------


def test_after_a_device_was_lost_every_call_that_touches_it_says_so_and_the_others_go_on():
    backend = EmulatedBackend(machine(legs={edge: Leg(1e10) for edge in EDGES}))
    here, there = filled(backend, D[0]), filled(backend, D[1])
    batch = read(backend, there, 4, D[1])
    backend.lose(D[1])
    for attempt in (
        lambda: backend.free_bytes(D[1]),
        lambda: backend.allocate(SCHEMA, 1, D[1]),
        lambda: backend.write(there, 0, rows_of(1)),
        lambda: backend.write(here, 0, batch),
        lambda: backend.scatter(there, index_of(0), rows_of(1), ["a"]),
        lambda: read(backend, there, 4, PAGEABLE),
        lambda: read(backend, here, 4, D[1]),
        lambda: backend.merge([batch], [np.arange(4)], 4, D[1]),
        lambda: backend.widen(batch, SCHEMA),
        lambda: backend.transfer([Move(here, D[2]), Move(here, D[1])]),
        lambda: backend.transfer([Move(there, D[2])]),
        lambda: backend.adopt(rows_of(1).arrays, D[1]),
        lambda: backend.wait(batch),
        lambda: backend.order(batch),
        lambda: backend.hand_over(batch, Target("numpy")),
    ):
        with pytest.raises(RuntimeError, match=r"^device:1 is lost$"):
            attempt()
    backend.release(there)
    assert D[1] in backend.endpoints()
    assert_rows(backend, read(backend, here, 4, D[2]), rows_of(4).arrays, "the others")
    with pytest.raises(ValueError, match=r"emulated\(reference\) backend has no endpoint device:9"):
        backend.lose(Endpoint(Tier.DEVICE, 9))


# The clock ------------------------------------------------------------------------------------------------------------


def test_a_store_lives_by_the_clock_of_its_backend():
    clock = VirtualClock()
    emulated = EmulatedBackend(machine(), clock=clock)
    assert clock_of(emulated, None) is clock
    assert clock_of(emulated, clock) is clock
    assert clock_of(load("reference"), clock) is clock
    assert isinstance(clock_of(load("reference"), None), RealClock)
    assert isinstance(clock_of(EmulatedBackend(machine()), RealClock()), RealClock)


@pytest.mark.parametrize("clock", [VirtualClock(), RealClock()])
def test_two_clocks_are_refused(clock):
    with pytest.raises(SettingError, match=r"clock=.*emulated\(reference\).*VirtualClock.*clock=backend\.clock"):
        clock_of(EmulatedBackend(machine(), clock=VirtualClock()), clock)
