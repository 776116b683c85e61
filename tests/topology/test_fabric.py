"""How flows share links: closed forms, a slow reference in fractions, and SimGrid where it is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import pytest

from conduit.errors import TopologyError
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Edge, Link, Memory, Topology
from conduit.topology.endpoint import Endpoint, Tier
from conduit.topology.fabric import Fabric, Flow, Fluid, bound, makespan

AT = [Endpoint(Tier.DEVICE, index) for index in range(8)]

Asked = tuple[float, Edge, int, Sequence[int]]
"""When, from where to where, bytes, and the numbers of the earlier flows that it comes after."""


def made(
    legs: Mapping[tuple[int, int], float | Leg],
    links: Mapping[str, float] | None = None,
    routes: Mapping[tuple[int, int], Sequence[str]] | None = None,
) -> Topology:
    """Devices 0 … 7; legs in bytes per second."""
    memory = Memory(1, 1, Source.ASSUMED)
    return Topology(
        "made",
        dict.fromkeys(AT, memory),
        {edge(*pair): leg if isinstance(leg, Leg) else Leg(leg) for pair, leg in legs.items()},
        {name: Link(rate) for name, rate in (links or {}).items()},
        {edge(*pair): tuple(names) for pair, names in (routes or {}).items()},
    )


def edge(source: int, to: int) -> Edge:
    return AT[source], AT[to]


def random_topology(rng: random.Random, devices: int = 5, links: int = 6) -> Topology:
    """Whole figures, so that a reference can be exact; few different ones, so that there are ties."""
    names = [f"link {number}" for number in range(rng.randint(1, links))]
    pairs = [(a, b) for a in range(devices) for b in range(devices) if rng.random() < 0.6] or [(0, 1)]
    return made(
        {pair: Leg(rng.choice([1, 2, 3, 5, 8, 13, 40]), rng.choice([0, 0, 1, 3])) for pair in pairs},
        {name: rng.choice([2, 3, 4, 6, 7, 20]) for name in names},
        {pair: rng.sample(names, rng.randint(0, min(3, len(names)))) for pair in pairs},
    )


def exact_rates(topology: Topology, flows: Sequence[Edge]) -> list[Fraction]:
    """The reference: every rate rises by the largest step that fits, flow by flow, and those that something full holds stay."""
    uses: dict[Edge | str, list[int]] = {}
    for number, each in enumerate(flows):
        for shared in (each, *topology.route(*each)):
            uses.setdefault(shared, []).append(number)
    capacity = {
        shared: Fraction(
            topology.links[shared].bytes_per_s if isinstance(shared, str) else topology.leg(*shared).bytes_per_s
        )
        for shared in uses
    }
    rates = [Fraction(0)] * len(flows)
    rising = set(range(len(flows)))
    while rising:
        steps = {
            shared: (capacity[shared] - sum(rates[number] for number in over)) / len(rising.intersection(over))
            for shared, over in uses.items()
            if rising.intersection(over)
        }
        step = min(steps.values())
        for number in rising:
            rates[number] += step
        for shared, over in uses.items():
            if steps.get(shared) == step:
                rising.difference_update(over)
    return rates


def exact_ends(topology: Topology, asked: Sequence[Asked]) -> list[Fraction | None]:
    """The reference for a run: everything from event to event, as it is written down."""
    ends: list[Fraction | None] = [None] * len(asked)
    left = [Fraction(size) for _, _, size, _ in asked]
    ready: list[Fraction | None] = [None] * len(asked)
    now = Fraction(0)
    while any(end is None for end in ends):
        for number, (when, each, size, after) in enumerate(asked):
            before = [ends[other] for other in after]
            if ready[number] is None and all(end is not None for end in before):
                start = max([Fraction(when), *(end for end in before if end is not None)])
                if size:
                    ready[number] = start + Fraction(topology.legs[each].latency_s)
                elif start <= now:
                    ready[number] = ends[number] = start
        pending = [n for n in range(len(asked)) if ends[n] is None]
        moving = [n for n in pending if (at := ready[n]) is not None and at <= now and left[n]]
        rates = exact_rates(topology, [asked[n][1] for n in moving])
        coming = [at for n in pending if (at := ready[n]) is not None and at > now]
        coming += [Fraction(when) for n in pending if (when := asked[n][0]) > now]
        coming += [now + left[n] / rate for n, rate in zip(moving, rates, strict=True)]
        if not coming:
            continue
        then = min(coming)
        for n, rate in zip(moving, rates, strict=True):
            left[n] -= rate * (then - now)
            if not left[n]:
                ends[n] = then
        now = then
    return ends


def run(topology: Topology, asked: Iterable[Asked]) -> list[Flow]:
    fluid = Fluid(topology)
    flows: list[Flow] = []
    for when, each, size, after in asked:
        flows.append(fluid.add(when, each, size, [flows[number] for number in after]))
    fluid.advance(1e9)
    return flows


# Closed forms.


def test_a_flow_alone_takes_what_its_leg_says():
    topology = made({(0, 1): Leg(100, 2.0)}, {"port": 1000}, {(0, 1): ["port"]})
    assert makespan(topology, {edge(0, 1): 500}) == topology.legs[edge(0, 1)].seconds(500) == 7.0


def test_two_flows_share_a_link_equally():
    rates = Fabric(made({(0, 1): 100, (0, 2): 100}, {"out": 60}, {(0, 1): ["out"], (0, 2): ["out"]})).rates(
        {edge(0, 1): 1, edge(0, 2): 1}
    )
    assert rates == {edge(0, 1): 30, edge(0, 2): 30}


def test_what_one_flow_cannot_use_the_others_get():
    fabric = Fabric(made({(0, 1): 10, (0, 2): 100}, {"out": 60}, {(0, 1): ["out"], (0, 2): ["out"]}))
    assert fabric.rates({edge(0, 1): 1, edge(0, 2): 1}) == {edge(0, 1): 10, edge(0, 2): 50}


def test_flows_along_one_edge_share_its_leg():
    assert Fabric(made({(0, 1): 90})).rates({edge(0, 1): 3}) == {edge(0, 1): 30}


def test_opposing_directions_do_not_share():
    links = {f"{device} {way}": 100 for device in (0, 1) for way in ("out", "in")}
    topology = made({(0, 1): 100, (1, 0): 100}, links, {(0, 1): ["0 out", "1 in"], (1, 0): ["1 out", "0 in"]})
    assert Fabric(topology).rates({edge(0, 1): 1, edge(1, 0): 1}) == {edge(0, 1): 100, edge(1, 0): 100}


def test_a_link_both_ways_is_shared_by_opposing_directions():
    topology = made({(0, 1): 26, (1, 0): 26}, {"both": 38}, {(0, 1): ["both"], (1, 0): ["both"]})
    assert Fabric(topology).rates({edge(0, 1): 1, edge(1, 0): 1}) == {edge(0, 1): 19, edge(1, 0): 19}


def test_the_parking_lot():
    """One flow over all of n links, and one over each: the long one gets no less for it."""
    names = [f"link {number}" for number in range(4)]
    topology = made(
        {(0, 7): 1000, **{(number, number + 1): 1000 for number in range(4)}},
        {name: 100 * (number + 1) for number, name in enumerate(names)},
        {(0, 7): names, **{(number, number + 1): [name] for number, name in enumerate(names)}},
    )
    rates = Fabric(topology).rates(dict.fromkeys(topology.legs, 1))
    assert rates == {edge(0, 7): 50, edge(0, 1): 50, edge(1, 2): 150, edge(2, 3): 250, edge(3, 4): 350}


LINE = made(
    {(0, 1): 1000, (0, 2): 1000, (1, 2): 1000},
    {"first": 100, "second": 60},
    {(0, 1): ["first"], (0, 2): ["first", "second"], (1, 2): ["second"]},
)
"""Three flows: one over the first link, one over both, one over the second."""


def test_three_flows_in_a_line():
    rates = Fabric(LINE).rates(dict.fromkeys(LINE.legs, 1))
    assert rates == {edge(0, 1): 70, edge(0, 2): 30, edge(1, 2): 30}


def test_a_flow_that_joins_can_raise_the_rate_of_a_third():
    fluid = Fluid(LINE)
    short, long = fluid.add(0, edge(0, 1), 500), fluid.add(0, edge(0, 2), 500)
    assert fluid.finish_s(short) == fluid.finish_s(long) == 10
    fluid.add(2, edge(1, 2), 10_000)
    assert fluid.finish_s(short) == pytest.approx(2 + 400 / 70)
    assert fluid.finish_s(long) > 10


def test_what_a_flow_leaves_goes_to_the_others():
    topology = made({(0, 1): 100, (0, 2): 100}, {"out": 100}, {(0, 1): ["out"], (0, 2): ["out"]})
    first, second = run(topology, [(0, edge(0, 1), 100, ()), (0, edge(0, 2), 300, ())])
    assert (first.end_s, second.end_s) == (2, 4)


def test_a_flow_takes_no_bandwidth_while_its_latency_runs():
    topology = made({(0, 1): Leg(100, 5.0), (0, 2): 100}, {"out": 100}, {(0, 1): ["out"], (0, 2): ["out"]})
    slow, quick = run(topology, [(0, edge(0, 1), 100, ()), (0, edge(0, 2), 500, ())])
    assert (slow.end_s, quick.end_s) == (6, 5)


def test_a_flow_starts_when_all_that_it_comes_after_are_over():
    topology = made({(0, 1): Leg(100, 1.0), (1, 2): Leg(50, 0.5), (2, 3): Leg(10, 2.0)})
    first, second, third = run(
        topology, [(0, edge(0, 1), 100, ()), (0, edge(1, 2), 100, ()), (1, edge(2, 3), 10, (0, 1))]
    )
    assert (first.end_s, second.end_s, third.end_s) == (2, 2.5, 5.5)


def test_a_flow_without_bytes_is_over_when_what_it_comes_after_is():
    topology = made({(0, 1): Leg(100, 1.0)})
    first, behind, alone = run(topology, [(0, edge(0, 1), 100, ()), (0, edge(0, 1), 0, (0,)), (1, edge(0, 1), 0, ())])
    assert (first.end_s, behind.end_s, alone.end_s) == (2, 2, 1)


# What a driver may rely on.


def test_a_late_caller_distorts_nobody():
    """The first flow is over at 2; who looks at 3 finds that the second has had all the bandwidth since."""
    topology = made({(0, 1): 100, (0, 2): 100}, {"out": 100}, {(0, 1): ["out"], (0, 2): ["out"]})
    fluid = Fluid(topology)
    first, second = fluid.add(0, edge(0, 1), 100), fluid.add(0, edge(0, 2), 300)
    fluid.add(3, edge(0, 1), 1000)
    assert first.end_s == 2
    assert fluid.finish_s(second) == 5  # 100 bytes at 50 a second, 100 at 100, and 100 at 50 again


def test_time_does_not_go_back():
    fluid = Fluid(made({(0, 1): 100}))
    fluid.advance(10)
    flow = fluid.add(7, edge(0, 1), 100)
    assert fluid.finish_s(flow) == 11


def test_the_next_event_is_when_something_starts_or_ends():
    fluid = Fluid(made({(0, 1): Leg(100, 2.0)}))
    assert fluid.next_event(0) is None
    flow = fluid.add(1, edge(0, 1), 100)
    assert fluid.next_event(1) == 3
    assert fluid.next_event(3) == 4
    assert not fluid.done(flow)
    assert fluid.next_event(4) is None
    assert fluid.done(flow)


def test_a_finish_that_was_predicted_comes_true_if_nothing_is_added():
    rng = random.Random(3)
    for _ in range(50):
        topology = random_topology(rng)
        fluid = Fluid(topology)
        flows = [fluid.add(0.5 * n, rng.choice(list(topology.legs)), rng.randint(1, 99)) for n in range(8)]
        predicted = [fluid.finish_s(flow) for flow in flows]
        fluid.advance(1e6)
        assert [flow.end_s for flow in flows] == predicted


def test_how_often_one_looks_changes_nothing():
    rng = random.Random(4)
    for _ in range(30):
        topology = random_topology(rng)
        asked = random_flows(rng, topology, 8)
        once = [flow.end_s for flow in run(topology, asked)]
        fluid, often = Fluid(topology), []
        for when, each, size, after in asked:
            for step in range(7):
                fluid.advance(when * step / 7)
            often.append(fluid.add(when, each, size, [often[number] for number in after]))
            fluid.finish_s(often[-1])
        while (at := fluid.next_event(fluid.now_s)) is not None:
            fluid.advance(at)
        assert [flow.end_s for flow in often] == once


@pytest.mark.parametrize("start_s", [0.0, 1e5, 1.7e9])
def test_rounding_leaves_no_residue_to_settle_for_ever(start_s: float):
    """Each flow is at most two events, even at an instant that floats divide more coarsely than a flow's last bytes take."""
    rng = random.Random(5)
    links = {f"link {number}": rng.uniform(1e9, 3e11) for number in range(8)}
    pairs = [(a, b) for a in range(8) for b in range(8)]
    topology = made(
        {pair: Leg(rng.uniform(1e9, 3e12), 1e-5) for pair in pairs},
        links,
        {pair: rng.sample(list(links), 3) for pair in pairs},
    )
    fluid = Fluid(topology)
    flows = [fluid.add(start_s + 1e-7 * n, edge(*pair), rng.uniform(1, 1e9)) for n, pair in enumerate(2 * pairs)]
    events, now_s = 0, start_s
    while (at := fluid.next_event(now_s)) is not None:
        assert at > now_s
        events, now_s = events + 1, at
    assert all(fluid.done(flow) for flow in flows)
    assert events <= 2 * len(flows)


@pytest.mark.parametrize("size", [-1, math.nan, math.inf])
def test_a_size_that_cannot_be_is_refused(size: float):
    with pytest.raises(ValueError, match="size_bytes"):
        Fluid(made({(0, 1): 1})).add(0, edge(0, 1), size)


def test_an_instant_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="now_s"):
        Fluid(made({(0, 1): 1})).advance(math.nan)


def test_an_edge_that_is_not_there_is_refused():
    fluid = Fluid(made({(0, 1): 1}))
    with pytest.raises(TopologyError, match="no bandwidth of device:1 → device:0"):
        fluid.add(0, edge(1, 0), 1)
    with pytest.raises(TopologyError, match="no bandwidth of device:1 → device:0"):
        bound(fluid.topology, {edge(1, 0): 1})


# Against references.


def random_flows(rng: random.Random, topology: Topology, most: int) -> list[Asked]:
    edges = list(topology.legs)
    whens = sorted(rng.randint(0, 12) / 2 for _ in range(rng.randint(1, most)))
    return [
        (when, rng.choice(edges), rng.choice([0, 1, 5, 30, 77]), rng.sample(range(n), min(n, rng.choice([0, 0, 1, 2]))))
        for n, when in enumerate(whens)
    ]


@pytest.mark.parametrize("seed", range(10))
def test_rates_are_those_of_a_slow_exact_reference(seed: int):
    rng = random.Random(seed)
    for _ in range(40):
        topology = random_topology(rng)
        flows = rng.choices(list(topology.legs), k=rng.randint(1, 12))
        rates = Fabric(topology).rates({each: flows.count(each) for each in flows})
        exact = exact_rates(topology, flows)
        assert [rates[each] for each in flows] == pytest.approx([float(rate) for rate in exact], rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_every_flow_has_a_bottleneck(seed: int):
    """Which makes rates max-min fair, and only those: something it goes over is full, and nobody over that gets more."""
    rng = random.Random(100 + seed)
    for _ in range(40):
        topology = random_topology(rng, devices=8, links=20)
        flows = {each: rng.randint(1, 3) for each in rng.choices(list(topology.legs), k=20)}
        rates = Fabric(topology).rates(flows)
        used = dict.fromkeys(topology.links, 0.0)
        fastest = dict(used)
        for each, rate in rates.items():
            for name in topology.route(*each):
                used[name] += rate * flows[each]
                fastest[name] = max(fastest[name], rate)
        assert all(used[name] <= link.bytes_per_s * (1 + 1e-12) for name, link in topology.links.items())
        for each, rate in rates.items():
            own = rate * flows[each]
            assert own <= topology.legs[each].bytes_per_s * (1 + 1e-12)
            assert own == pytest.approx(topology.legs[each].bytes_per_s, rel=1e-12) or any(
                used[name] == pytest.approx(topology.links[name].bytes_per_s, rel=1e-12)
                and rate == pytest.approx(fastest[name], rel=1e-12)
                for name in topology.route(*each)
            )


@pytest.mark.parametrize("seed", range(10))
def test_ends_are_those_of_a_slow_exact_reference(seed: int):
    rng = random.Random(200 + seed)
    for _ in range(20):
        topology = random_topology(rng)
        asked = random_flows(rng, topology, 7)
        ends = [flow.end_s for flow in run(topology, asked)]
        exact = [None if end is None else float(end) for end in exact_ends(topology, asked)]
        assert ends == pytest.approx(exact, rel=1e-9, abs=2e-9)


def test_a_busy_link_passes_its_bandwidth_and_no_more():
    """Whatever the sizes and however they come: while there is something to send, the link is full."""
    rng = random.Random(6)
    pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
    topology = made(dict.fromkeys(pairs, 1000), {"root": 70}, {pair: ["root"] for pair in pairs})
    for _ in range(30):
        sizes = {edge(*pair): rng.randint(1, 10_000) for pair in rng.sample(pairs, rng.randint(1, 56))}
        assert makespan(topology, sizes) == pytest.approx(sum(sizes.values()) / 70)


def test_no_schedule_beats_the_bound_and_a_balanced_one_meets_it():
    rng = random.Random(7)
    for _ in range(50):
        topology = random_topology(rng)
        sizes = {each: rng.randint(0, 99) for each in topology.legs}
        assert makespan(topology, sizes) >= bound(topology, sizes) * (1 - 1e-12)
    pairs = [(a, b) for a in range(8) for b in range(8)]
    ports = {f"{device} {way}": 10.0 for device in range(8) for way in ("out", "in")}
    switched = made(dict.fromkeys(pairs, 9), ports, {(a, b): [f"{a} out", f"{b} in"] for a, b in pairs})
    even = {edge(*pair): 5 for pair in pairs}
    assert makespan(switched, even) == pytest.approx(bound(switched, even)) == pytest.approx(4)


def test_nothing_to_transfer_takes_no_time():
    topology = made({(0, 1): Leg(1, 5.0)})
    assert makespan(topology, {}) == bound(topology, {}) == 0
    assert makespan(topology, {edge(0, 1): 0}) == bound(topology, {edge(0, 1): 0}) == 0


SIMGRID = """
import json, sys
import simgrid

cases = json.load(sys.stdin)
flags = ["--log=root.thresh:critical", "--cfg=network/model:CM02", "--cfg=network/TCP-gamma:0", "--cfg=network/crosstraffic:0"]
engine = simgrid.Engine(["fabric", *flags])
zone = simgrid.NetZone.create_full_zone("all")
hosts, ends = {}, {}
for number, case in enumerate(cases):
    links = [zone.create_link(f"{number} {n}", rate).set_latency(0).seal() for n, rate in enumerate(case["capacities"])]
    for n, (size, delay_s, path) in enumerate(case["flows"]):
        a, b = (zone.create_host(f"{number} {n} {end}", 1).seal() for end in "ab")
        # SimGrid shares a link in inverse proportion to latencies, so all have one, which is next to nothing.
        equal = zone.create_link(f"{number} {n} latency", 1e15).set_latency(1e-6).seal()
        hosts[number, n] = a, b
        route = [simgrid.LinkInRoute(each) for each in (equal, *(links[p] for p in path))]
        zone.add_route(a.netpoint, b.netpoint, None, None, route, False)
zone.seal()

def send(number, n, size, delay_s):
    simgrid.this_actor.sleep_for(delay_s)
    simgrid.Comm.sendto(*hosts[number, n], size)
    ends[number, n] = engine.clock

for number, case in enumerate(cases):
    for n, (size, delay_s, _) in enumerate(case["flows"]):
        simgrid.Actor.create("send", hosts[number, n][0], send, number, n, size, delay_s)
engine.run()
json.dump([[ends[number, n] for n in range(len(case["flows"]))] for number, case in enumerate(cases)], sys.stdout)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("simgrid") is None, reason="SimGrid (Debian: python3-simgrid) isn't installed"
)
def test_ends_are_simgrids():
    """In another process, as its engine is one for a process."""
    rng = random.Random(8)
    cases, ours = [], []
    for _ in range(60):
        topology = random_topology(rng, devices=8)
        legs, links = list(topology.legs), list(topology.links)
        capacities = [leg.bytes_per_s for leg in topology.legs.values()]
        capacities += [link.bytes_per_s for link in topology.links.values()]
        chosen = [(rng.choice(legs), rng.randint(100, 999)) for _ in range(rng.randint(1, 12))]
        paths = [
            [legs.index(each), *(len(legs) + links.index(name) for name in topology.route(*each))] for each, _ in chosen
        ]
        flows = [(size, topology.leg(*each).latency_s, path) for (each, size), path in zip(chosen, paths, strict=True)]
        cases.append({"capacities": capacities, "flows": flows})
        ours.append([flow.end_s for flow in run(topology, [(0, each, size, ()) for each, size in chosen])])
    said = subprocess.run(
        [sys.executable, "-c", SIMGRID], input=json.dumps(cases), capture_output=True, text=True, check=True, timeout=60
    )
    for case, (mine, theirs) in enumerate(zip(ours, json.loads(said.stdout), strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-4), f"case {case}: {cases[case]}"
