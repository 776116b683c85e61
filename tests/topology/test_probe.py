"""Legs and links are found again by timing transfers: of a pretend machine whose figures are known."""

from __future__ import annotations

import math
import random

import pytest

from conduit.errors import CapacityError, SettingError, TopologyError
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Link, Memory, Topology
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier
from conduit.topology.fitting import fit
from conduit.topology.probe import SIZES, probe

GIVEN = Memory(1 << 40, 1 << 40, Source.SPEC)


def device(index):
    return Endpoint(Tier.DEVICE, index)


def machine(devices=2, links=None, routes=None, rates=None, latency_s=20e-6):
    """Devices that reach each other at 200 GB/s, and the host at 25; gathers at 800 and 10. Its figures are called assumed."""
    endpoints = [PAGEABLE, *map(device, range(devices))]

    def rate(source, to):
        if source == to:
            return 10e9 if source == PAGEABLE else 800e9
        return 25e9 if PAGEABLE in (source, to) else 200e9

    legs = {(a, b): Leg((rates or {}).get((a, b), rate(a, b)), latency_s) for a in endpoints for b in endpoints}
    return Topology("pretend", dict.fromkeys(endpoints, GIVEN), legs, links or {}, routes or {})


def fair_s(topology, transfers):
    """When the last of these is over: each flow at its max-min fair rate from the end of its latency on. Written to be plain."""
    left = {number: size for number, (_, _, size) in enumerate(transfers)}
    starts = {number: topology.leg(a, b).latency_s for number, (a, b, _) in enumerate(transfers)}
    now = 0.0
    while left:
        moving = [number for number in left if starts[number] <= now]
        rates: dict[int, float] = {}
        room = {name: link.bytes_per_s for name, link in topology.links.items()}
        room |= {("leg", number): topology.leg(*transfers[number][:2]).bytes_per_s for number in moving}
        over = {n: [*topology.route(*transfers[n][:2]), ("leg", n)] for n in moving}
        while len(rates) < len(moving):
            slow = [n for n in moving if n not in rates]
            shares = {each: room[each] / k for each in room if (k := sum(each in over[n] for n in slow))}
            tightest = min(shares, key=lambda each: shares[each])
            for number in [n for n in slow if tightest in over[n]]:
                rates[number] = shares[tightest]
                for each in over[number]:
                    room[each] -= rates[number]
        ahead = [left[n] / rates[n] for n in moving] + [at - now for n, at in starts.items() if n in left and at > now]
        step = min(ahead)
        now += step
        for number in moving:
            left[number] -= rates[number] * step
            if left[number] <= 1e-6 * transfers[number][2]:
                del left[number]
    return now


class Pretend:
    """Timings of a topology. `blur(seconds)` is what a clock shows; `refused` edges aren't made; endpoints are lost after so many transfers."""

    def __init__(self, topology, blur=lambda seconds: seconds, refused=(), lost=None, room=math.inf, overhead_s=0.0):
        self.topology, self.blur, self.refused, self.lost, self.room = topology, blur, set(refused), lost or {}, room
        self.overhead_s = overhead_s
        self.made = 0
        self.seconds = 0.0

    def one(self, source, to, size_bytes):
        return self.together([(source, to, size_bytes)])

    def together(self, transfers):
        self.made += 1
        for source, to, size in transfers:
            if (source, to) in self.refused or any(self.made > self.lost.get(at, math.inf) for at in (source, to)):
                raise TopologyError(f"no way from {source} to {to}")
            if size > self.room:
                raise CapacityError("no room")
        took_s = self.blur(fair_s(self.topology, transfers) + self.overhead_s * len(transfers))
        self.seconds += took_s
        return took_s

    def now(self):
        return self.seconds


def assert_near(found, truth, within=0.02):
    for edge, leg in truth.legs.items():
        got = found.legs[edge]
        assert got.bytes_per_s == pytest.approx(leg.bytes_per_s, rel=within), edge
        assert got.latency_s == pytest.approx(leg.latency_s, rel=within), edge


def test_without_noise_every_leg_is_found_and_no_link():
    truth = machine()
    found = probe(truth, Pretend(truth))
    assert_near(found, truth, 1e-6)
    assert set(found.legs) == set(truth.legs)
    assert found.links == {}
    assert found.routes == {}
    assert found.memories == truth.memories


def test_everything_found_is_marked_measured():
    truth = machine(
        links={"out": Link(30e9)}, routes={(PAGEABLE, device(0)): ("out",), (PAGEABLE, device(1)): ("out",)}
    )
    found = probe(truth, Pretend(truth))
    assert {leg.source for leg in found.legs.values()} == {Source.MEASURED}
    assert {link.source for link in found.links.values()} == {Source.MEASURED}


def test_what_was_assumed_before_does_not_matter():
    truth = machine()
    assumed = truth.changed(legs={edge: Leg(1e9, 1.0) for edge in truth.legs}, links={"made up": Link(1e9)})
    assert probe(assumed, Pretend(truth)).legs == probe(truth, Pretend(truth)).legs
    assert probe(assumed, Pretend(truth)).links == {}


@pytest.mark.parametrize("seed", range(5))
def test_with_noise_legs_are_within_it_and_the_noise_is_told(seed):
    rng = random.Random(seed)
    truth = machine()
    found = probe(truth, Pretend(truth, lambda seconds: seconds * rng.lognormvariate(0, 0.1)), repeats=15, seconds=1e9)
    # The quartiles of a normal distribution are 1.35 deviations apart.
    noises = [leg.noise for leg in found.legs.values()]
    assert sum(noises) / len(noises) == pytest.approx(0.135, rel=0.15)
    for edge, leg in found.legs.items():
        for size in SIZES:
            assert leg.seconds(size) == pytest.approx(truth.legs[edge].seconds(size), rel=0.135), (edge, size)


def test_one_sample_a_hundred_times_too_long_moves_nothing():
    truth = machine()
    calls = iter(range(1 << 30))
    # Every 29th transfer: with 7 samples of a size, never more than one of the same.
    timings = Pretend(truth, lambda seconds: seconds * (100 if next(calls) % 29 == 28 else 1))
    found = probe(truth, timings, repeats=7, seconds=1e9)
    assert_near(found, truth)
    assert found.links == {}


def test_a_port_that_all_edges_out_of_a_device_share_is_found():
    edges = [(device(0), device(to)) for to in (1, 2, 3)]
    truth = machine(4, {"port": Link(300e9)}, dict.fromkeys(edges, ("port",)))
    found = probe(truth, Pretend(truth))
    assert found.links["port"].bytes_per_s == pytest.approx(300e9, rel=0.02)
    assert found.routes == dict.fromkeys(edges, ("port",))
    unaware = probe(machine(4), Pretend(truth))
    assert list(unaware.links) == ["device:0 to devices"]
    assert unaware.links["device:0 to devices"].bytes_per_s == pytest.approx(300e9, rel=0.02)
    assert set(unaware.routes) == set(edges)


def test_a_port_into_a_device_is_told_from_the_one_out_of_it():
    edges = [(device(source), device(0)) for source in (1, 2, 3)] + [(PAGEABLE, device(0))]
    truth = machine(4, {"port": Link(300e9)}, dict.fromkeys(edges, ("port",)), {(PAGEABLE, device(0)): 100e9})
    found = probe(machine(4), Pretend(truth))
    assert list(found.links) == ["device:0 in"]
    assert found.links["device:0 in"].bytes_per_s == pytest.approx(300e9, rel=0.02)


def test_opposing_traffic_is_found():
    both = [(PAGEABLE, device(0)), (device(0), PAGEABLE)]
    truth = machine(2, {"half duplex": Link(38e9)}, dict.fromkeys(both, ("half duplex",)))
    found = probe(machine(2), Pretend(truth))
    assert list(found.links) == ["pageable ↔ device:0"]
    assert found.links["pageable ↔ device:0"].bytes_per_s == pytest.approx(38e9, rel=0.02)
    assert set(found.routes) == set(both)


def test_the_way_from_the_host_that_two_of_its_tiers_share_is_found():
    pinned = Endpoint(Tier.PINNED)
    down, up = [(PAGEABLE, device(0)), (pinned, device(0))], [(device(0), PAGEABLE), (device(0), pinned)]
    legs = {edge: Leg(26e9, 10e-6) for edge in [*down, *up]} | {
        (at, at): Leg(50e9) for at in (PAGEABLE, pinned, device(0))
    }
    memories = dict.fromkeys([PAGEABLE, pinned, device(0), device(1)], GIVEN)
    legs |= {(device(0), device(1)): Leg(276e9), (device(1), device(0)): Leg(276e9)}
    truth = Topology("way", memories, legs, {"way": Link(26e9)}, dict.fromkeys(down, ("way",)))
    refused = [(a, b) for a in memories for b in memories if (a, b) not in legs]
    found = probe(Topology("way", memories, {}), Pretend(truth, refused=refused))
    assert list(found.links) == ["device:0 from host"]
    assert found.links["device:0 from host"].bytes_per_s == pytest.approx(26e9, rel=0.02)
    assert found.routes == dict.fromkeys(down, ("device:0 from host",))


def test_a_root_that_two_devices_share_is_checked_where_the_topology_knows_it():
    down = [(PAGEABLE, device(0)), (PAGEABLE, device(1))]
    shared = {"root in": Link(1e9)}
    truth = machine(4, {"root in": Link(26e9)}, dict.fromkeys(down, ("root in",)))
    found = probe(machine(4, shared, dict.fromkeys(down, ("root in",))), Pretend(truth))
    assert list(found.links) == ["root in"]
    assert found.links["root in"].bytes_per_s == pytest.approx(26e9, rel=0.02)


def test_a_root_that_nothing_is_lost_by_is_dropped():
    down = [(PAGEABLE, device(0)), (PAGEABLE, device(1))]
    found = probe(machine(2, {"root in": Link(1e9)}, dict.fromkeys(down, ("root in",))), Pretend(machine(2)))
    assert found.links == {}
    assert found.routes == {}


def test_ports_within_a_port_are_both_found():
    """Two devices below one root, each with a port of its own that is smaller."""
    pinned = Endpoint(Tier.PINNED)
    hosts, devices = (PAGEABLE, pinned), [device(n) for n in range(4)]
    edges = [(h, d) for h in hosts for d in devices]
    legs = {edge: Leg(25e9, 10e-6) for edge in edges} | {(at, at): Leg(50e9, 10e-6) for at in (*hosts, *devices)}
    links = {f"{d} in": Link(25e9) for d in devices} | {"root": Link(40e9)}
    routes = {(h, d): (f"{d} in", *(["root"] if d in devices[:2] else [])) for h, d in edges}
    truth = Topology("root", dict.fromkeys([*hosts, *devices], GIVEN), legs, links, routes)
    refused = [(a, b) for a in truth.endpoints for b in truth.endpoints if (a, b) not in legs]
    found = probe(truth, Pretend(truth, refused=refused))
    assert {name: link.bytes_per_s for name, link in found.links.items()} == pytest.approx(
        {name: link.bytes_per_s for name, link in links.items()}, rel=0.02
    )
    assert {edge: set(route) for edge, route in found.routes.items()} == {e: set(r) for e, r in routes.items()}


def test_a_backend_that_does_one_after_the_other_never_slows_an_edge_alone():
    truth = machine()

    class OneByOne(Pretend):
        def together(self, transfers):
            return sum(super(OneByOne, self).together([each]) for each in transfers)

    found = probe(truth, OneByOne(truth))
    assert_near(found, truth)
    assert found.links
    for edge, route in found.routes.items():
        for name in route:
            assert found.links[name].bytes_per_s >= 0.999 * found.legs[edge].bytes_per_s


def test_what_it_costs_to_ask_for_each_transfer_is_not_taken_for_a_link():
    truth = machine(4)
    assert probe(truth, Pretend(truth, overhead_s=30e-6)).links == {}


def test_noise_makes_no_links():
    for seed in range(3):
        rng = random.Random(seed)
        truth = machine(3)
        timings = Pretend(truth, lambda seconds, rng=rng: seconds * rng.lognormvariate(0, 0.03))
        assert probe(truth, timings, seconds=1e9).links == {}


def test_refused_edges_are_left_out_and_those_that_are_there_are_not():
    truth = machine(3)
    refused = [(device(0), device(1)), (device(2), PAGEABLE)]
    found = probe(truth, Pretend(truth, refused=refused))
    assert set(found.legs) == set(truth.legs) - set(refused)
    assert not found.reaches(*refused[0])


def test_an_endpoint_that_answers_nothing_keeps_its_memory_and_has_no_leg():
    truth = machine(2)
    found = probe(truth, Pretend(truth, lost={device(1): 0}))
    assert set(found.legs) == {(a, b) for a, b in truth.legs if device(1) not in (a, b)}
    assert device(1) in found.memories


@pytest.mark.parametrize("after", [4, 12, 13, 30, 50, 110, 120])
def test_an_endpoint_lost_meanwhile_is_an_error_that_names_it(after):
    """Between its edges, between sizes, between rounds, among links."""
    truth = machine(2)
    timings = Pretend(truth, lost={PAGEABLE: after})
    with pytest.raises(
        TopologyError, match=r"pageable.* was lost while it was measured: .*no way from .*Topology\.only"
    ):
        probe(truth, timings)


def test_no_room_for_large_transfers_leaves_the_small_ones():
    truth = machine(2)
    assert_near(probe(truth, Pretend(truth, room=SIZES[1])), truth, 1e-6)


def test_slow_edges_are_measured_with_fewer_sizes_and_the_time_is_kept():
    slow = {(PAGEABLE, device(0)): 5e6}
    truth = machine(2, rates=slow)
    timings = Pretend(truth)
    found = probe(truth, timings, seconds=2.0)
    assert_near(found, truth, 1e-6)
    # The slow edge's two smallest sizes take 0.12 s, and three samples of each are always taken.
    assert timings.seconds < 2.0 + 3 * 0.12 * 2
    quick = Pretend(machine(2))
    probe(quick.topology, quick, seconds=0.05)
    long = Pretend(machine(2))
    probe(long.topology, long, seconds=5.0, repeats=50)
    assert quick.made < long.made


def test_two_probes_of_the_same_machine_are_equal():
    truth = machine(3)
    assert probe(truth, Pretend(truth)) == probe(truth, Pretend(truth))


def test_progress_counts_up_to_the_end():
    truth = machine(2)
    steps = []
    probe(truth, Pretend(truth), progress=lambda done, of, what: steps.append((done, of, what)))
    dones, totals, words = zip(*steps, strict=True)
    assert list(dones) == sorted(dones)
    assert len(set(totals)) == 1
    assert dones[-1] == totals[0]
    assert "pageable → device:0" in words
    assert "device:0 out" in words


def test_a_line_through_a_hundred_noisy_samples_is_never_steeper_than_infinity():
    """Latency alone: no bandwidth can be seen, so a bound on it is told, and neither figure is negative."""
    for seed in range(50):
        rng = random.Random(seed)
        leg = fit({size: [1e-3 * rng.lognormvariate(0, 0.2) for _ in range(7)] for size in SIZES})
        assert leg.latency_s >= 0
        assert 0 < leg.bytes_per_s <= SIZES[-1] / (0.01 * 1e-3) * 2


def test_bandwidth_alone_has_no_latency():
    for seed in range(50):
        rng = random.Random(seed)
        leg = fit({size: [size / 1e9 * rng.lognormvariate(0, 0.05) for _ in range(7)] for size in SIZES})
        assert 0 <= leg.latency_s < 0.1 * SIZES[0] / 1e9
        assert leg.bytes_per_s == pytest.approx(1e9, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seconds": 0}, "seconds=0: expected a finite number > 0"),
        ({"seconds": -1.0}, "seconds=-1.0"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"sizes": ()}, "sizes=.*two or more different"),
        ({"sizes": [4096, 4096]}, "sizes=.*can't tell latency from bandwidth"),
        ({"sizes": [0, 4096]}, "sizes=.*above 0"),
        ({"sizes": [4096.5, 8192]}, "sizes="),
        ({"repeats": 0}, "repeats=0: expected a whole number ≥ 1"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, message):
    truth = machine()
    with pytest.raises(SettingError, match=message):
        probe(truth, Pretend(truth), **wrong)


def test_transfers_that_take_no_time_are_refused():
    truth = machine()
    with pytest.raises(TopologyError, match=r"pageable → pageable took 0.* virtual clock"):
        probe(truth, Pretend(truth, lambda seconds: 0.0))


def test_a_topology_without_endpoints_is_refused():
    with pytest.raises(TopologyError, match="no endpoint to measure"):
        probe(Topology("none", {}, {}), Pretend(machine()))
