"""What a topology can't be, and what changing one leaves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from conduit.errors import TopologyError
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Link, Memory, Topology
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier

DEVICE = Endpoint(Tier.DEVICE)
MEMORY = Memory(100, 60, Source.SPEC)
SMALL = Topology(
    "small",
    {PAGEABLE: MEMORY, DEVICE: MEMORY},
    {(PAGEABLE, DEVICE): Leg(26.0, 2.0), (DEVICE, PAGEABLE): Leg(13.0)},
    {"PCIe": Link(30.0)},
    {(PAGEABLE, DEVICE): ("PCIe",)},
)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf, 10**400, "1e9", None])
def test_a_bandwidth_has_to_be_above_nothing_and_finite(rate: Any):
    with pytest.raises(TopologyError, match=r"bytes_per_s=.*above 0; leave out an edge that isn't there"):
        Leg(rate)
    with pytest.raises(TopologyError, match="bytes_per_s="):
        Link(rate)


@pytest.mark.parametrize("name", ["latency_s", "noise"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "0", None])
def test_a_latency_and_a_noise_cannot_be_below_nothing(name: str, value: Any):
    with pytest.raises(TopologyError, match=f"{name}=.*≥ 0"):
        replace(Leg(1.0), **{name: value})


@pytest.mark.parametrize(
    ("capacity", "free"), [(-5, -5), (-5, 0), (10, 11), (10, -1), (1.5, 1), (10, math.nan), (10**400, 1), (None, 1)]
)
def test_a_memory_has_no_more_free_than_there_is_and_no_less_than_nothing(capacity: Any, free: Any):
    with pytest.raises(TopologyError, match=f"free_bytes={free}, capacity_bytes={capacity}"):
        Memory(capacity, free, Source.SPEC)


def test_an_edge_of_an_endpoint_that_is_not_there_is_refused():
    with pytest.raises(TopologyError, match="edge pageable → pinned: there is no endpoint pinned"):
        Topology("wrong", {PAGEABLE: MEMORY}, {(PAGEABLE, PINNED): Leg(1.0)})


def test_a_route_needs_a_leg_and_links_that_are_there():
    memories = {PAGEABLE: MEMORY, DEVICE: MEMORY}
    with pytest.raises(TopologyError, match="route pageable → device:0 has no bandwidth of its own"):
        Topology("wrong", memories, {}, {"PCIe": Link(1.0)}, {(PAGEABLE, DEVICE): ("PCIe",)})
    with pytest.raises(TopologyError, match="route pageable → device:0 uses unknown link 'NVLink'"):
        Topology("wrong", memories, {(PAGEABLE, DEVICE): Leg(1.0)}, {}, {(PAGEABLE, DEVICE): ("NVLink",)})


def test_a_missing_edge_is_told_from_an_unknown_endpoint():
    with pytest.raises(TopologyError, match="no bandwidth of device:0 → device:0; measure it"):
        SMALL.leg(DEVICE, DEVICE)
    with pytest.raises(TopologyError, match="'small' has no endpoint disk; it has pageable, device:0"):
        SMALL.leg(DISK, DEVICE)
    with pytest.raises(TopologyError, match="no endpoint disk"):
        SMALL.memory(DISK)
    assert not SMALL.reaches(DISK, DEVICE)


def test_a_leg_is_its_latency_and_its_bytes():
    assert SMALL.leg(PAGEABLE, DEVICE).seconds(52) == 4
    assert SMALL.leg(PAGEABLE, DEVICE).seconds(0) == 0


def test_changed_copies_and_leaves_the_rest():
    slow = SMALL.changed(name="slow", legs={(PAGEABLE, DEVICE): Leg(1.0)}, machine="here")
    assert slow.leg(PAGEABLE, DEVICE).bytes_per_s == 1
    assert slow.leg(DEVICE, PAGEABLE) == SMALL.leg(DEVICE, PAGEABLE)
    assert (slow.name, slow.machine, slow.routes) == ("slow", "here", SMALL.routes)
    assert SMALL.leg(PAGEABLE, DEVICE).bytes_per_s == 26
    assert SMALL.changed() == SMALL


def test_changed_can_route_an_edge_anew():
    shared = SMALL.changed(links={"bus": Link(9.0)}, routes={(DEVICE, PAGEABLE): ("bus",)})
    assert shared.route(DEVICE, PAGEABLE) == ("bus",)
    assert shared.route(PAGEABLE, DEVICE) == ("PCIe",)


def test_scaled_changes_memories_and_nothing_else():
    half = SMALL.scaled(0.5)
    assert half.memory(DEVICE) == Memory(50, 30, Source.SPEC)
    assert (half.legs, half.links) == (SMALL.legs, SMALL.links)
    assert half.name == "small with 0.5 × the memory"
    for wrong in (0, -1, math.nan, math.inf):
        with pytest.raises(TopologyError, match="memory="):
            SMALL.scaled(wrong)


@pytest.mark.parametrize("memory", [0, -1, math.nan, math.inf, "2", None, 1e308])
def test_a_scale_leaves_memories_finite(memory: Any):
    with pytest.raises(TopologyError, match=r"memory=.*: expected a finite number above 0"):
        SMALL.scaled(memory)


def test_only_leaves_what_is_between_the_endpoints_that_are_kept():
    left = SMALL.only([PAGEABLE])
    assert left.endpoints == (PAGEABLE,)
    assert not left.legs
    assert not left.routes
    with pytest.raises(TopologyError, match="no endpoint pinned"):
        SMALL.only([PINNED])
