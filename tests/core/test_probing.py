"""Transfers through real backends, and through an emulated one whose figures are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conduit.backends import load
from conduit.backends.emulated import EmulatedBackend
from conduit.backends.reference import ReferenceBackend
from conduit.clock import REAL, VirtualClock
from conduit.core.probing import BackendTimings, measure, timings_of
from conduit.errors import CapacityError, SettingError, TopologyError
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Link, Memory, Topology
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier

KIB = 1 << 10
D0, D1, D2 = (Endpoint(Tier.DEVICE, index) for index in range(3))
SMALL = (16 * KIB, 64 * KIB, 256 * KIB)


def over(kind, *arguments) -> Any:
    """As a backend, or a clock: what it lacks it asks another for, which types can't tell."""
    return kind(*arguments)


class Watched:
    """A backend that notes what is asked of it: (call, from, to, rows)."""

    def __init__(self, inner):
        self.inner, self.calls, self.lent = inner, [], []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def allocate(self, schema, rows, at):
        self.lent.append((at, rows))
        return self.inner.allocate(schema, rows, at)

    def release(self, columns):
        self.lent.remove((columns.at, columns.rows))
        self.inner.release(columns)

    def read(self, columns, index, fields, to):
        self.calls.append(("read", columns.at, to, len(index)))
        return self.inner.read(columns, index, fields, to)

    def write(self, into, start, rows):
        self.calls.append(("write", rows.at, into.at, rows.rows))
        return self.inner.write(into, start, rows)

    def transfer(self, moves):
        self.calls += [("transfer", move.columns.at, move.to, move.columns.rows) for move in moves]
        return self.inner.transfer(moves)


def pretend(links=None, routes=None, rates=None):
    """Three devices and a host's memory. Its figures are called assumed."""
    endpoints = [PAGEABLE, D0, D1, D2]

    def leg(a, b):
        if a == b:
            return Leg(12e9, 30e-6) if a == PAGEABLE else Leg(700e9, 8e-6)
        return Leg(
            (rates or {}).get((a, b), 26e9 if PAGEABLE in (a, b) else 276e9), 15e-6 if PAGEABLE in (a, b) else 9e-6
        )

    memory = Memory(64 << 30, 64 << 30, Source.SPEC)
    legs = {(a, b): leg(a, b) for a in endpoints for b in endpoints}
    return Topology("pretend", dict.fromkeys(endpoints, memory), legs, links or {}, routes or {})


def on_a_virtual_clock(topology, **settings):
    clock = VirtualClock()
    backend = EmulatedBackend(topology, clock=clock)
    return clock.run(lambda: measure(backend, clock, **settings))


def test_an_emulated_machine_s_figures_are_found_again():
    truth = pretend()
    found = on_a_virtual_clock(truth)
    assert set(found.legs) == set(truth.legs)
    for edge, leg in truth.legs.items():
        assert found.legs[edge].bytes_per_s == pytest.approx(leg.bytes_per_s, rel=0.02), edge
        assert found.legs[edge].latency_s == pytest.approx(leg.latency_s, rel=0.02), edge
        assert found.legs[edge].source is Source.MEASURED
    assert found.links == {}
    assert {at: memory.free_bytes for at, memory in found.memories.items()} == {
        at: memory.free_bytes for at, memory in truth.memories.items()
    }


def test_an_emulated_machine_s_ports_are_found_again():
    out = [(D0, D1), (D0, D2)]
    up = [(D1, PAGEABLE), (D2, PAGEABLE)]
    truth = pretend(
        {"port": Link(300e9), "root": Link(30e9)}, dict.fromkeys(out, ("port",)) | dict.fromkeys(up, ("root",))
    )
    found = on_a_virtual_clock(truth)
    assert {name: link.bytes_per_s for name, link in found.links.items()} == {
        "device:0 to devices": pytest.approx(300e9, rel=0.02),
        # The third device, which in truth has a way of its own, seems to share it: it has the 26 GB/s that the others' 30 leave it.
        "pageable in": pytest.approx(45e9, rel=0.06),
    }


def test_what_was_measured_says_which_backend_moved_it():
    found = on_a_virtual_clock(pretend(), sizes=SMALL)
    assert found.name.endswith("emulated(reference)")


def test_emulated_probes_are_equal():
    assert on_a_virtual_clock(pretend(), sizes=SMALL) == on_a_virtual_clock(pretend(), sizes=SMALL)


def test_each_edge_is_measured_the_way_it_is_used():
    backend = over(Watched, ReferenceBackend(2))
    ways = {
        (PAGEABLE, PAGEABLE): ["read"],
        (DISK, DISK): ["read"],
        (D0, D0): ["read"],
        (D0, D1): ["read"],
        (D0, PINNED): ["read"],
        (PAGEABLE, D0): ["read", "write"],
        (PINNED, D0): ["read", "write"],
        (PAGEABLE, PINNED): ["read", "write"],
        (DISK, PAGEABLE): ["read", "write"],
        (PAGEABLE, DISK): ["write"],
        (D0, DISK): ["transfer"],
    }
    with timings_of(backend, REAL) as timings:
        for (source, to), calls in ways.items():
            timings.one(source, to, 64 * KIB)
            backend.calls.clear()
            timings.one(source, to, 64 * KIB)
            assert backend.calls == [(call, source, to, 16) for call in calls]


def test_the_slower_way_counts():
    """By a clock that each call of the backend turns on."""
    now = [0.0]
    clock: Any = SimpleNamespace(spawn=REAL.spawn)
    clock.now = lambda: now[0]

    class Slow(Watched):
        def read(self, columns, index, fields, to):
            now[0] += 1.0
            return super().read(columns, index, fields, to)

        def write(self, into, start, rows):
            now[0] += 5.0
            return super().write(into, start, rows)

    with timings_of(over(Slow, ReferenceBackend(2)), clock) as timings:
        assert timings.one(PAGEABLE, D0, 64 * KIB) == 5.0
        assert timings.one(D0, PAGEABLE, 64 * KIB) == 1.0
        assert timings.together([(PAGEABLE, D0, 64 * KIB), (D0, D1, 64 * KIB)]) == 6.0
        before = now[0]
        assert timings.now() == before


def test_the_first_transfer_of_a_kind_is_not_the_one_that_counts():
    backend = over(Watched, ReferenceBackend(2))
    with timings_of(backend, REAL) as timings:
        timings.one(D0, D1, 64 * KIB)
        assert backend.calls.count(("read", D0, D1, 16)) == 2
        timings.one(D0, D1, 64 * KIB)
        assert backend.calls.count(("read", D0, D1, 16)) == 3


def test_rows_are_drawn_at_random_from_more_than_a_cache_holds():
    backend = ReferenceBackend(1)
    with BackendTimings(backend, REAL, 4096) as timings:
        timings.one(D0, D0, 1 << 20)
        source = timings._scratch[D0, D0]
        assert source.rows * 4096 == 64 << 20
        # Every page was written: untouched ones would all be the same zeros.
        assert np.all(source.arrays["row"] == 1)
        (index,) = timings._indices.values()
        assert len(set(index)) == len(index) == 256
        assert np.ptp(index) > source.rows / 2


def test_all_memory_is_given_back_and_it_is_bounded():
    backend = over(Watched, ReferenceBackend(2, device_bytes=100 << 20))
    found = measure(backend, REAL, sizes=SMALL, seconds=0.2)
    assert len(found.legs) == 25
    assert backend.lent == []
    with timings_of(backend, REAL) as timings:
        timings.one(PAGEABLE, D0, 64 * KIB)
        timings.one(D0, D1, 64 * KIB)
        # Rows to read at two endpoints, and what one edge writes.
        written, device, host = sorted(rows * 4096 for _, rows in backend.lent)
        assert (written, host) == (64 * KIB, 64 << 20)
        assert device <= (100 << 20) // 8
    assert backend.lent == []


def test_a_device_without_room_is_measured_with_what_fits_or_not_at_all():
    found = measure(ReferenceBackend(1, device_bytes=1 << 20), REAL, sizes=SMALL, seconds=0.2)
    assert found.reaches(D0, D0)
    tiny = measure(ReferenceBackend(1, device_bytes=1 << 16), REAL, sizes=SMALL, seconds=0.2)
    assert tiny.devices == (D0,)
    assert not tiny.reaches(D0, D0)
    with (
        timings_of(ReferenceBackend(1, device_bytes=1 << 16), REAL) as timings,
        pytest.raises(CapacityError, match=r"16 rows of 4,096 bytes .* device:0 .* an eighth of its 65,536 free"),
    ):
        timings.one(D0, D0, 64 * KIB)


@pytest.mark.parametrize("name", ["reference", "torch", "jax"])
def test_every_edge_of_a_real_backend_is_measured(name):
    if name != "reference":
        pytest.importorskip(name)
    backend = ReferenceBackend(1) if name == "reference" else load(name)
    kept = backend.endpoints()[:4]

    class Few(Watched):
        """JAX has eight devices here; two will do."""

        def endpoints(self):
            return kept

    watched = over(Few, backend)
    found = measure(watched, REAL, sizes=SMALL, seconds=0.3)
    assert set(found.legs) == {(a, b) for a in kept for b in kept}
    assert {leg.source for leg in found.legs.values()} == {Source.MEASURED}
    # Neither a memory of today nor a clock is off by a thousand.
    assert all(10e6 < leg.bytes_per_s < 10e12 for leg in found.legs.values())
    for edge, route in found.routes.items():
        assert all(found.links[name].bytes_per_s >= 0.999 * found.legs[edge].bytes_per_s for name in route)
    assert watched.lent == []


def test_an_edge_that_the_backend_refuses_is_left_out():
    class NoPeers(Watched):
        def read(self, columns, index, fields, to):
            if {columns.at, to} == {D0, D1}:
                raise ValueError("peer access is off")
            return super().read(columns, index, fields, to)

    found = measure(over(NoPeers, ReferenceBackend(2)), REAL, sizes=SMALL, seconds=0.2)
    assert not found.reaches(D0, D1)
    assert not found.reaches(D1, D0)
    assert found.reaches(D0, PAGEABLE)
    with timings_of(over(NoPeers, ReferenceBackend(2)), REAL) as timings:
        with pytest.raises(
            TopologyError, match=r"reference backend made no transfer device:0 → device:1: peer access is off"
        ):
            timings.one(D0, D1, 64 * KIB)
        assert timings.one(D0, PAGEABLE, 64 * KIB) > 0


def test_a_device_lost_meanwhile_is_an_error_and_the_rest_is_given_back():
    truth = pretend()
    clock = VirtualClock()
    backend = EmulatedBackend(truth, clock=clock)

    def lose(done, of, what):
        if what.startswith("round 2"):
            backend.lose(D1)

    def run():
        with pytest.raises(TopologyError, match=r"device:1.* was lost while it was measured"):
            measure(backend, clock, sizes=SMALL, progress=lose)
        return backend.free_bytes(D0), backend.free_bytes(PAGEABLE)

    assert clock.run(run) == (64 << 30, 64 << 30)


def test_a_clock_that_stands_still_is_refused():
    clock = VirtualClock()
    with pytest.raises(TopologyError, match="On a virtual clock, probe an emulated backend"):
        clock.run(lambda: measure(ReferenceBackend(1), clock, sizes=SMALL))


@pytest.mark.parametrize("row_bytes", [0, -1, 1.5])
def test_rows_of_no_size_are_refused(row_bytes):
    with pytest.raises(SettingError, match=r"row_bytes=.*expected a whole number ≥ 1"):
        timings_of(ReferenceBackend(1), REAL, row_bytes=row_bytes)


def test_transfers_of_less_than_a_row_are_refused():
    with pytest.raises(SettingError, match=r"a transfer of 1024 bytes: expected one row at least, of 4096 bytes"):
        measure(ReferenceBackend(1), REAL, sizes=(1024, 8192))
