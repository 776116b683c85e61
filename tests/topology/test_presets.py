"""The presets say what facts say, mark where each figure is from, and hang together."""

from __future__ import annotations

import pytest

import conduit.topology
from conduit.errors import TopologyError
from conduit.topology import PRESETS, Source, Topology, preset
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier
from conduit.topology.fabric import Fabric, bound, makespan
from conduit.topology.presets import MI250X_5GB_MS

GB = 1e9
DEVICE = [Endpoint(Tier.DEVICE, index) for index in range(8)]


@pytest.fixture(params=PRESETS)
def topology(request: pytest.FixtureRequest) -> Topology:
    return preset(request.param)


def test_an_unknown_preset_lists_those_there_are():
    with pytest.raises(TopologyError, match=r"no preset 'b200x8'; there are a100x8, a100x16, mi250x, .*, laptop"):
        preset("b200x8")
    with pytest.raises(TopologyError, match=r"no preset \['a100x8'\]"):
        preset(["a100x8"])  # type: ignore[arg-type]


def test_the_public_namespace_has_them():
    assert conduit.topology.preset("a100x8") == preset("a100x8")


def test_a_preset_is_called_by_its_name_and_is_no_machine(topology: Topology):
    assert topology.name in PRESETS
    assert topology.machine == "preset"


def test_every_memory_of_a_node_reaches_every_other_and_itself(topology: Topology):
    missing = [
        f"{a} → {b}"
        for a in topology.endpoints
        for b in topology.endpoints
        if a.node == b.node and not topology.reaches(a, b)
    ]
    assert not missing


def test_no_leg_promises_more_than_its_links_hold(topology: Topology):
    for edge, leg in topology.legs.items():
        for name in topology.route(*edge):
            assert leg.bytes_per_s <= topology.links[name].bytes_per_s, (edge, name)


def test_all_that_is_promised_free_is_there_at_once(topology: Topology):
    """Pageable and pinned rows are in one memory of the machine."""
    for at, memory in topology.memories.items():
        assert 0 < memory.free_bytes <= memory.capacity_bytes
        if at.tier is Tier.PINNED:
            pageable = topology.memory(Endpoint(Tier.PAGEABLE, node=at.node))
            assert pageable.capacity_bytes == memory.capacity_bytes
            assert pageable.free_bytes + memory.free_bytes <= memory.capacity_bytes


def test_pageable_rows_are_slower_than_pinned_ones(topology: Topology):
    for at in topology.devices:
        pageable, pinned = (Endpoint(tier, node=at.node) for tier in (Tier.PAGEABLE, Tier.PINNED))
        assert topology.leg(pageable, at).bytes_per_s < topology.leg(pinned, at).bytes_per_s
        assert topology.leg(at, pageable).bytes_per_s < topology.leg(at, pinned).bytes_per_s


def test_nothing_that_a_preset_says_has_noise(topology: Topology):
    """Nobody here measured it."""
    assert all(leg.noise == 0 for leg in topology.legs.values())


@pytest.mark.parametrize(
    ("name", "devices", "device_gb", "peer", "to_device", "to_host"),
    [
        ("a100x8", 8, 80, (276, Source.MEASURED), (26, Source.MEASURED), (26, Source.ASSUMED)),
        ("h100x8", 8, 80, (396, Source.ASSUMED), (55.4, Source.ASSUMED), (55.1, Source.ASSUMED)),
        ("h200x8", 8, 141, (396, Source.MEASURED), (55.4, Source.MEASURED), (55.1, Source.MEASURED)),
        ("gb200nvl72", 72, 186, (900, Source.SPEC), (359, Source.MEASURED), (377, Source.MEASURED)),
        ("pcie_gen4", 2, 24, (13, Source.ASSUMED), (26, Source.ASSUMED), (26, Source.ASSUMED)),
        ("pcie_gen5", 2, 32, (27.5, Source.ASSUMED), (55, Source.ASSUMED), (55, Source.ASSUMED)),
    ],
)
def test_figures_and_where_they_are_from(
    name: str,
    devices: int,
    device_gb: int,
    peer: tuple[float, Source],
    to_device: tuple[float, Source],
    to_host: tuple[float, Source],
):
    topology = preset(name)
    assert len(topology.devices) == devices
    assert topology.memory(DEVICE[0]).capacity_bytes == device_gb * GB
    assert topology.memory(DEVICE[0]).source is Source.SPEC
    edges = [(DEVICE[0], DEVICE[1]), (PINNED, DEVICE[0]), (DEVICE[0], PINNED)]
    for edge, (gb_per_s, source) in zip(edges, (peer, to_device, to_host), strict=True):
        assert topology.leg(*edge).bytes_per_s == pytest.approx(gb_per_s * GB)
        assert topology.leg(*edge).source is source


def test_mi250x_takes_what_the_paper_measured():
    topology = preset("mi250x")
    assert [len(row) for row in MI250X_5GB_MS] == [8] * 8
    for i, row in enumerate(MI250X_5GB_MS):
        for j, milliseconds in enumerate(row):
            edge = DEVICE[i], DEVICE[j]
            assert topology.leg(*edge).source is Source.MEASURED
            assert makespan(topology, {edge: 5 * GB}) * 1000 == pytest.approx(milliseconds)


def test_an_a100s_pcie_is_slower_when_both_directions_are_busy():
    topology = preset("a100x8")
    down, up = (PINNED, DEVICE[3]), (DEVICE[3], PINNED)
    assert Fabric(topology).rates({down: 1})[down] == 26 * GB
    assert Fabric(topology).rates({down: 1, up: 1}) == {down: 19 * GB, up: 19 * GB}


def test_nvlinks_opposing_directions_do_not_disturb_each_other():
    topology = preset("h200x8")
    ring = {(DEVICE[n], DEVICE[(n + 1) % 8]): 1 for n in range(8)}
    back = {(to, source): 1 for source, to in ring}
    assert set(Fabric(topology).rates({**ring}).values()) == {396 * GB}
    assert Fabric(topology).rates({(DEVICE[0], DEVICE[1]): 1, (DEVICE[1], DEVICE[0]): 1}) == {
        (DEVICE[0], DEVICE[1]): 396 * GB,
        (DEVICE[1], DEVICE[0]): 396 * GB,
    }
    assert set(Fabric(topology).rates({**ring, **back}).values()) == {198 * GB}  # two over each port


def test_a_gather_from_all_devices_is_bound_by_the_learners_port():
    topology = preset("a100x8")
    gather = {(at, DEVICE[0]): 1 * GB for at in DEVICE}
    assert bound(topology, gather) == pytest.approx(7 / 276, rel=1e-3)
    assert makespan(topology, gather) == pytest.approx(7 / 276, rel=1e-3)


@pytest.mark.parametrize("name", ["pcie_gen4", "pcie_gen5"])
def test_cards_without_peer_to_peer_go_over_the_host_one_leg_after_the_other(name: str):
    topology = preset(name)
    there, back = topology.leg(DEVICE[0], PINNED), topology.leg(PINNED, DEVICE[1])
    both = topology.leg(DEVICE[0], DEVICE[1])
    assert both.seconds(GB) == pytest.approx(there.seconds(GB) + back.seconds(GB))
    used = set(topology.route(DEVICE[0], DEVICE[1]))
    assert used == {*topology.route(DEVICE[0], PINNED), *topology.route(PINNED, DEVICE[1])}


def test_two_nodes_share_one_nic_each():
    topology = preset("a100x16")
    there = [Endpoint(Tier.DEVICE, index, node=1) for index in range(8)]
    assert len(topology.devices) == 16
    assert str(topology.devices[8]) == "node1/device:0"
    across = dict.fromkeys(zip(DEVICE, there, strict=True), 1)
    back = {(b, a): 1 for a, b in across}
    rates = Fabric(topology).rates({**across, **back})
    assert set(rates.values()) == {3 * GB}
    assert topology.leg(DEVICE[0], DEVICE[1]).bytes_per_s == 276 * GB


def test_a_rack_is_one_fabric_of_18_nodes():
    topology = preset("gb200nvl72")
    far = Endpoint(Tier.DEVICE, 2, node=17)
    assert topology.leg(DEVICE[0], far).bytes_per_s == 900 * GB
    assert topology.route(DEVICE[0], far) == ("device:0 out", "node17/device:2 in")
    assert topology.leg(PINNED, far).bytes_per_s == 50 * GB
    assert topology.route(PINNED, far)[:3] == ("host memory", "nic out", "node17/nic in")


def test_a_disk_is_its_own_nodes():
    topology = preset("a100x16")
    assert topology.reaches(DISK, DEVICE[0])
    assert not any(topology.reaches(DISK, at) for at in topology.endpoints if at.node == 1)


def test_a_laptop_has_no_device_and_no_pinned_memory():
    topology = preset("laptop")
    assert topology.endpoints == (PAGEABLE, DISK)
    assert {each.source for each in (*topology.legs.values(), *topology.memories.values())} == {Source.ASSUMED}
