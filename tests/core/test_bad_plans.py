"""What a plan can't be asked, and what it says where nothing fits or nothing is within reach."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from conduit.core.placement import Placement
from conduit.core.planning import plan
from conduit.core.plans import Plan
from conduit.errors import CapacityError, ConduitError, SettingError, TopologyError
from conduit.topology import preset, save
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Memory, Topology
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier

D = [Endpoint(Tier.DEVICE, index) for index in range(3)]
FAR = Placement((Endpoint(Tier.DEVICE, 99),), (1.0,))


def machine(*endpoints: Endpoint, bytes_each: int = 100) -> Topology:
    """All alike, each within reach of each."""
    memories = dict.fromkeys(endpoints, Memory(bytes_each, bytes_each, Source.ASSUMED))
    return Topology("made", memories, {(a, b): Leg(1e9, 1e-6) for a in endpoints for b in endpoints})


def ask(topology: Any = "laptop", **changes: Any) -> Plan:
    return plan(topology, **{"row_bytes": 60, "capacity": 5, "batch_size": 1, "staged_batches": 0, **changes})


@pytest.mark.parametrize("row_bytes", ["infGB", "1e400", "nan", "abc", 10**400, 1 << 63, 1.5, True, None, [1]])
def test_what_is_no_size_of_a_row_is_refused(row_bytes):
    with pytest.raises(SettingError, match=r"row_bytes=.*not a (whole )?number of bytes; expected .* such as '192KiB'"):
        ask(row_bytes=row_bytes)


@pytest.mark.parametrize("name", ["capacity", "batch_size", "staged_batches", "side_bytes"])
@pytest.mark.parametrize("value", [1 << 63, 10**400, -1, 2.5, math.nan, "3", True])
def test_a_count_that_no_machine_has_is_refused(name: str, value: object):
    with pytest.raises(SettingError, match=f"{name}=.*: expected a whole number of at least"):
        ask(**{name: value})


@pytest.mark.parametrize("ratio", ["4", None, math.nan, math.inf, -1.0, 5e-324, 10**400])
def test_a_replay_ratio_is_a_number_that_leaves_a_finite_number_of_rows(ratio: object):
    with pytest.raises(SettingError, match=r"replay_ratio=.*: expected a finite number > 0"):
        ask(replay_ratio=ratio, batch_size=5)


@pytest.mark.parametrize("reserve", ["a", None, math.nan, 10**400])
def test_a_reserve_is_a_number(reserve: object):
    with pytest.raises(SettingError, match=r"reserve=.*: expected a part of each memory to keep free"):
        ask(reserve=reserve)


@pytest.mark.parametrize("name", ["actors", "learners"])
def test_ports_are_as_many_as_a_machine_could_run(name: str):
    with pytest.raises(SettingError, match=f"{name}=1000000000: expected a whole number of at least 1, and at most"):
        ask(**{name: 10**9})
    with pytest.raises(SettingError, match=r"\['few'\]: endpoint 'few': expected .*or how many there are, such as 4"):
        ask(**{name: "few"})


def test_where_rows_are_now_is_a_placement_on_this_topology():
    with pytest.raises(SettingError, match=r"current='device:0': expected a conduit.Placement"):
        ask(current="device:0")
    with pytest.raises(TopologyError, match="'laptop' has no endpoint device:99; it has pageable, disk"):
        ask(current=FAR)


@pytest.mark.parametrize("topology", [None, 5, b"laptop", ["laptop"], {}])
def test_a_topology_is_a_value_a_name_or_a_path(topology):
    with pytest.raises(TopologyError, match=r"topology=.*: expected a conduit\.topology\.Topology, a preset's name"):
        ask(topology)


def test_a_topology_is_looked_for_among_presets_then_among_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    save(machine(PAGEABLE), tmp_path / "mine")
    save(machine(PAGEABLE), tmp_path / "laptop")
    assert ask("mine").topology == ask(Path("mine")).topology == machine(PAGEABLE)
    assert ask("laptop").topology == preset("laptop")
    assert ask("./laptop").topology == machine(PAGEABLE)
    with pytest.raises(TopologyError, match=r"topology='b200' is no preset \(a100x8, .*\), and b200: .*No such file"):
        ask("b200")


@pytest.mark.parametrize(
    ("row_bytes", "most"), [(60, 4), (50, 8), (101, 0)], ids=["one a memory", "two a memory", "none"]
)
def test_the_room_that_is_told_is_in_whole_rows_of_each_memory(row_bytes: int, most: int):
    made = ask(machine(PAGEABLE, *D), row_bytes=row_bytes, capacity=9)
    assert made.choice is None
    assert f"room for about {most} such rows at most" in str(made)
    if most:
        fits = ask(machine(PAGEABLE, *D), row_bytes=row_bytes, capacity=most)
        assert fits.choice is not None


def test_what_lies_beside_the_rows_is_taken_off_the_first_memory_alone():
    made = ask(machine(PAGEABLE, *D), row_bytes=60, capacity=9, side_bytes=50)
    assert "room for about 3 such rows at most" in str(made)
    assert ask(machine(PAGEABLE, *D), row_bytes=60, capacity=3, side_bytes=0).choice is not None


def test_where_no_bandwidth_leads_is_told_with_what_would_help():
    memories = dict.fromkeys((PAGEABLE, D[0]), Memory(100, 100, Source.ASSUMED))
    apart = Topology("apart", memories, {(PAGEABLE, PAGEABLE): Leg(1.0), (D[0], D[0]): Leg(1.0)})
    with pytest.raises(CapacityError) as caught:
        _ = ask(apart, capacity=1, actors="pageable", learners="device:0").placement
    for part in (
        "pageable is out of reach: no bandwidth of pageable → device:0",
        "measure what is missing (conduit topology --measure); there are pageable, device:0",
    ):
        assert part in str(caught.value)
    assert "larger budgets" not in str(caught.value)


def test_kinds_that_a_machine_does_not_have_are_told_from_kinds_that_do_not_fit():
    made = ask(candidates=["single_gpu", "cpu_pinned"])
    assert "laptop has nothing of the kinds of candidates that were asked for; it has pageable, disk" in str(made)


@pytest.mark.parametrize(
    "topology", [Topology("empty", {}, {}), machine(*D), machine(PINNED)], ids=lambda each: each.name
)
def test_a_machine_without_the_actors_memory_says_so(topology: Topology):
    with pytest.raises(ConduitError, match="has no endpoint pageable; it has"):
        ask(topology)


def test_a_machine_of_one_memory_has_one_candidate():
    made = ask(machine(PAGEABLE), row_bytes=100, capacity=1)
    assert [each.name for each in made.candidates] == ["cpu_pageable"]
    assert made.placement == Placement()
