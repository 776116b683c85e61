"""What a store's `placement=` becomes: decided once, by what there is and what was asked, and again where that pays."""

from __future__ import annotations

import math
from typing import Any

import pytest

from conduit.backends.emulated import EmulatedBackend
from conduit.core import placer as module
from conduit.core.placement import KINDS, Asked, Placement
from conduit.core.placement_map import PlacementMap
from conduit.core.placer import Demand, Explanation, Placer
from conduit.core.planning import plan_for
from conduit.core.plans import Plan
from conduit.errors import CapacityError, SettingError, TopologyError
from conduit.topology.cluster import Memory, Topology
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier
from tests.core.placement_oracle import GB, D, machine

ROWS = 1_000_000
HOST, ALONE = Placement((PAGEABLE,)), Placement((D[0],))
FOUR = machine(4)


class Here:
    """What this machine is, and how often it was asked for: (whether measured, …)."""

    def __init__(self, topology: Topology | None) -> None:
        self.topology = topology
        self.asked: list[bool] = []

    def __call__(self, measured: bool) -> Topology:
        self.asked.append(measured)
        if self.topology is None:
            pytest.fail("this machine was looked at")
        return self.topology


def plan_of(explained: Explanation) -> Plan:
    assert explained.plan is not None
    return explained.plan


def made(
    here: Topology | None = FOUR,
    asked: Asked = "auto",
    *,
    topology: Topology | None = None,
    learners: tuple[Endpoint, ...] = (D[0],),
    budgets: dict[Tier, int] | None = None,
    grows: bool = False,
    **demand: Any,
) -> tuple[Placer, Here]:
    """On a backend that has four devices; `here` None: which nobody may look at."""
    there = Here(here)
    wanted = Demand(
        **{"capacity": ROWS, "batch_size": 512, "replay_ratio": 4.0, "staging": (1,), **demand}, grows=grows
    )
    placer = Placer(EmulatedBackend(FOUR), asked, budgets or {}, wanted, topology, there)
    for landing in learners:
        placer.join(landing)
    return placer, there


# As it was asked for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "placement"),
    [
        ("pageable", HOST),
        (PINNED, Placement((PINNED,))),
        (["device:1", "device:3"], Placement((D[1], D[3]), (1.0, 1.0))),
        (Placement((D[0], PINNED), (3.0, 1.0)), Placement((D[0], PINNED), (3.0, 1.0))),
    ],
)
def test_an_explicit_placement_stays_whatever_would_be_faster(asked, placement):
    placer, here = made(None, asked, grows=True)
    assert placer.place(40_000) == placement
    assert placer.place(1 << 40, ALONE, {D[0]: 1 << 40}) == placement
    assert placer.worth_moving(40_000, HOST, {PAGEABLE: 1}, 10**9) == placement
    assert here.asked == []


def test_what_the_user_moved_stays_where_it_was_moved():
    placer, _ = made()
    assert placer.place(40_000) == ALONE
    placer.fix(Placement((PINNED,)))
    assert placer.place(40_000, ALONE) == Placement((PINNED,))
    assert placer.worth_moving(40_000, Placement((PINNED,)), {}, 10**9) == Placement((PINNED,))
    assert placer.explain(40_000, Placement((PINNED,)), {}, False).why == "as it was asked for"


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ("device:9", CapacityError, "this machine has no endpoint device:9"),
        (["cpu_pinned", "device:0"], SettingError, "'device:0' is none of them"),
        ("cpu", CapacityError, "kinds of placement alone: cpu_pageable"),
    ],
)
def test_what_can_not_be_had_is_refused_at_once(asked, error, told):
    with pytest.raises(error, match=told):
        made(None, asked)


# Chosen ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learners", [(), (PAGEABLE,), (PAGEABLE, PINNED)])
def test_for_learners_on_the_host_it_is_pageable_memory_and_nothing_is_measured(learners):
    placer, _ = made(None, learners=learners, grows=True)
    assert placer.place(40_000) == HOST
    assert placer.place(80_000, HOST, {PAGEABLE: ROWS * 40_000}) == HOST
    assert placer.worth_moving(80_000, HOST, {PAGEABLE: ROWS * 80_000}, 10**9) == HOST
    assert placer.transfer_plan(HOST, ALONE, 40_000) is None


def test_for_a_learner_on_a_device_it_is_planned_by_what_was_measured_once():
    placer, here = made()
    assert placer.place(40_000) == ALONE
    assert placer.place(40_000, ALONE) == ALONE
    assert here.asked == [True]
    # Not by what the backend says that it has.
    small, _ = made(machine(3, 30 * GB))
    shared = small.place(40_000)
    assert set(shared.endpoints) < {*D[:3]}
    assert len(shared.endpoints) == 2


def test_a_topology_that_was_given_is_what_counts_and_of_it_what_the_backend_has():
    given = machine(8, 30 * GB)
    placer, _ = made(None, topology=given, learners=(PAGEABLE,))
    workload = placer._workload(40_000)
    assert placer.place(40_000) == plan_for(given.only([PAGEABLE, PINNED, *D[:4]]), workload).placement
    for_devices, _ = made(None, topology=given, learners=D[:4], replay_ratio=100.0)
    assert set(for_devices.place(40_000).endpoints) == {*D[:4]}
    # Eight would have room for all, and the backend has four of them.
    tight, _ = made(None, topology=machine(8, 6 * GB), learners=D[:4], replay_ratio=100.0)
    assert set(tight.place(40_000).endpoints) == {PINNED, *D[:4]}


def test_learners_that_come_later_count_from_then_on():
    placer, here = made(learners=(PAGEABLE,))
    assert placer.place(40_000) == HOST
    assert here.asked == []
    placer.join(D[1])
    assert placer.place(40_000) != HOST
    assert here.asked == [True]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "disk"])
@pytest.mark.parametrize("learner", [PAGEABLE, D[0]])
def test_kinds_restrict_the_choice(kind, learner):
    placer, here = made(asked=[kind], learners=(learner,))
    explained = placer.explain(40_000, placer.place(40_000), {}, False)
    assert {each.kind for each in plan_of(explained).candidates} == {kind}
    assert plan_of(explained).placement == explained.placement
    assert here.asked == [True]


@pytest.mark.parametrize(("replay_ratio", "stays"), [(1.0, True), (4.0, False)])
def test_rows_stay_until_another_place_is_clearly_faster(replay_ratio, stays):
    """On the neighbour of the learner's device: 1/12 + 1/276 against 1/12 + 1/1000 where every row is drawn once."""
    beside = Placement((D[1],))
    for grows in (False, True):
        placer, _ = made(replay_ratio=replay_ratio, grows=grows)
        assert placer.place(40_000, beside) == (beside if stays else ALONE)


def test_where_nothing_fits_every_candidate_s_shortfall_is_told():
    for grows in (False, True):
        placer, _ = made(machine(2, 10 * GB, 10 * GB), grows=grows)
        for row_bytes in (40_000, 10**9):
            with pytest.raises(CapacityError, match=r"(?s)fit nowhere.*cpu_pinned needs.*lacks.*single_gpu\(0\) needs"):
                placer.place(row_bytes)
        assert placer.place(5000) == ALONE
        with pytest.raises(CapacityError, match=r"(?s)fit nowhere.*mixed\(0,1\) needs"):
            placer.place(40_000, ALONE, {D[0]: 5 * GB})


def test_a_device_is_not_filled_to_the_last_byte_for_rows_are_dealt_in_blocks():
    placer, _ = made(machine(4, 40 * GB), staging=(0,))
    assert placer.place(39_000) == ALONE
    assert len(placer.place(40_000).endpoints) > 1


# Rows that grow --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("limit", ["memory", "budget"])
def test_rows_that_grow_go_elsewhere_where_there_is_no_room_for_both_copies(grows, limit):
    if limit == "memory":
        placer, _ = made(machine(3, 10 * GB), grows=grows)
    else:
        placer, _ = made(machine(3, 80 * GB), budgets={Tier.DEVICE: 10 * GB}, grows=grows)
    held = {D[0]: 4 * GB}
    assert placer.place(4000) == ALONE
    assert placer.place(5800, ALONE, held) == ALONE
    moved = placer.place(6100, ALONE, held)
    assert D[1] in moved.endpoints
    assert moved.rows(ROWS).get(D[0], 0) * 6100 + 4 * GB <= 10 * GB
    # Were they gone first, they would stay.
    assert placer.place(6100, ALONE) == ALONE
    assert placer.place(6100, ALONE, {}) == ALONE


@pytest.mark.parametrize("grows", [True, False])
def test_where_both_copies_fit_nowhere_it_is_where_one_does(grows):
    placer, _ = made(machine(1, 10 * GB, GB // 2), grows=grows)
    assert placer.place(7000, ALONE, {D[0]: 4 * GB}) == ALONE


def test_sizes_are_planned_for_once_and_moves_between_them_too(monkeypatch):
    swept, solved = [], []

    def sweep(*arguments: Any, **more: Any) -> PlacementMap:
        swept.append(arguments)
        return sweeps(*arguments, **more)

    def solve(topology: Topology, before: Any, after: Any, row_bytes: int) -> Any:
        solved.append((*before.items(), *after.items()))
        return solves(topology, before, after, row_bytes)

    sweeps, solves = PlacementMap.sweep, module.solve
    monkeypatch.setattr(PlacementMap, "sweep", sweep)
    monkeypatch.setattr(module, "solve", solve)
    placer, here = made(machine(3, 10 * GB, 100 * GB), grows=True)
    assert placer.place(4000) == ALONE
    assert len(swept) == 1
    assert len(solved) == len(set(solved)) >= 2
    monkeypatch.setattr(module, "plan_for", lambda *_: pytest.fail("the map knows"))
    monkeypatch.setattr(module, "solve", lambda *_: pytest.fail("it was solved"))
    placements = [ALONE]
    for row_bytes in (1000, 5000, 9900, 12_000, 20_000, 29_000, 35_000, 60_000):
        placements.append(placer.place(row_bytes, placements[-1]))
    different = [one for one, other in zip(placements, [None, *placements], strict=False) if one != other]
    assert [len(each.endpoints) for each in different] == sorted(len(each.endpoints) for each in different)
    assert len(different) > 2
    for before, after in placer._map.transitions if placer._map else ():
        plan = placer.transfer_plan(before, after, 12_345)
        assert plan is not None
        assert plan.row_bytes == 12_345
        assert plan.rows == ROWS
        twice = placer.transfer_plan(before, after, 24_690)
        assert twice is not None
        assert twice.predicted_s == pytest.approx(2 * plan.predicted_s)
    assert here.asked == [True]


def test_where_another_learner_has_come_since_sizes_are_planned_for_again():
    placer, here = made(machine(4, 80 * GB), grows=True, replay_ratio=1000.0)
    assert placer.place(4000) == ALONE
    for landing in D[1:4]:
        placer.join(landing)
    assert set(placer.place(4000, ALONE).endpoints) == {*D[:4]}
    assert here.asked == [True]


# Moves -----------------------------------------------------------------------------------------------------------------


def test_nothing_is_said_of_a_move_between_memories_of_which_nothing_is_known():
    placer, here = made()
    assert placer.transfer_plan(HOST, ALONE, 40_000) is None
    assert here.asked == []
    placer.place(40_000)
    plan = placer.transfer_plan(HOST, ALONE, 40_000)
    assert plan is not None
    assert plan.predicted_s == pytest.approx(ROWS * 40_000 / (12 * GB))
    assert placer.transfer_plan(HOST, Placement((DISK,)), 40_000) is None
    parted = machine(2)
    legs = {edge: leg for edge, leg in parted.legs.items() if edge != (D[1], D[0])}
    routes = {edge: route for edge, route in parted.routes.items() if edge in legs}
    one_way, _ = made(None, topology=Topology("one way", parted.memories, legs, parted.links, routes))
    assert one_way.transfer_plan(Placement((D[1],)), ALONE, 40_000) is None
    assert one_way.transfer_plan(ALONE, Placement((D[1],)), 40_000) is not None


def test_rows_move_where_so_many_iterations_save_more_than_the_move_takes():
    beside, held = Placement((D[1],)), {D[1]: ROWS * 40_000}
    placer, here = made()
    batch = 512 * 40_000
    saved_s, move_s = batch / (276 * GB) - batch / (1000 * GB), ROWS * 40_000 / (276 * GB)
    enough = math.ceil(move_s / saved_s)
    assert placer.worth_moving(40_000, beside, held, enough - 2) == beside
    assert placer.worth_moving(40_000, beside, held, enough + 2) == ALONE
    assert here.asked == [True]
    assert placer.worth_moving(40_000, ALONE, {D[0]: ROWS * 40_000}, 10**9) == ALONE


def test_rows_never_move_for_what_is_no_clear_gain_or_where_there_is_no_room_for_both():
    beside, held = Placement((D[1],)), {D[1]: ROWS * 40_000}
    alike, _ = made(replay_ratio=1.0)
    assert alike.worth_moving(40_000, beside, held, 10**12) == beside
    # All but the device that they are on is full.
    memories = {at: Memory(80 * GB, 80 * GB if at == D[1] else GB, each.source) for at, each in FOUR.memories.items()}
    full, _ = made(FOUR.changed(memories=memories))
    assert full.worth_moving(40_000, beside, held, 10**12) == beside


def test_rows_move_at_once_where_nothing_is_known_of_the_way():
    parted = machine(2)
    legs = {edge: leg for edge, leg in parted.legs.items() if edge != (PINNED, D[0])}
    ways = {edge: route for edge, route in parted.routes.items() if edge in legs}
    placer, _ = made(
        Topology("parted", parted.memories, legs, parted.links, ways), learners=(D[1],), replay_ratio=100.0
    )
    there = Placement((PINNED,))
    assert placer.worth_moving(40_000, there, {PINNED: ROWS * 40_000}, 1) == there
    parted_all = {edge: leg for edge, leg in legs.items() if edge != (D[0], D[1])}
    ways = {edge: route for edge, route in ways.items() if edge in parted_all}
    lost, _ = made(Topology("parted", parted.memories, parted_all, parted.links, ways), learners=(D[0],))
    # Nothing is known of how rows come from there to the learner, so neither of what is gained.
    assert lost.worth_moving(40_000, there, {PINNED: ROWS * 40_000}, 10**9) == there


def test_what_the_rows_take_counts_as_free_where_memory_is_looked_up_when_they_are_there():
    """Rows were put on the host for learners there; then one came on a device."""
    held = {PAGEABLE: 40 * GB}
    memories = {at: Memory(50 * GB, 9 * GB if at == PAGEABLE else 0, each.source) for at, each in FOUR.memories.items()}
    placer, here = made(FOUR.changed(memories=memories), learners=(PAGEABLE,))
    assert placer.place(40_000) == HOST
    placer.join(D[0])
    assert placer.worth_moving(40_000, HOST, held, 10**9) == HOST
    grown, looked = made(here.topology, grows=True)
    assert grown.place(41_000, HOST, held) == HOST
    assert looked.asked == [True]
    (now,) = (each for each in plan_of(placer.explain(40_000, HOST, held, False)).candidates if each.placement == HOST)
    assert now.feasible
    assert here.asked == [True]


# Explained -------------------------------------------------------------------------------------------------------------


def test_an_explanation_says_where_why_and_what_else_could_be():
    placer, _ = made()
    text = str(placer.explain(40_000, placer.place(40_000), {D[0]: ROWS * 40_000}, False))
    first, *plan = text.splitlines()
    assert first == "rows are at device:0: the fastest that fits"
    assert plan[0] == "1,000,000 rows of 39.06 KiB on a machine; all times are predicted"
    assert any(line.startswith("→ single_gpu(0)") for line in plan)
    assert any("cpu_pageable" in line for line in plan)


def test_an_explanation_names_shares_and_does_not_call_the_fastest_what_is_so_no_more():
    placer, _ = made()
    uneven = Placement((D[1], PINNED), (3.0, 1.0))
    first = str(placer.explain(40_000, uneven, {}, True)).splitlines()[0]
    assert first == (
        "rows are at device:1 75%, pinned 25%: the fastest that fitted when they came there; by now single_gpu(0) would be faster, "
        "if a move pays: see migrate()"
    )


def test_on_the_host_it_is_explained_without_measuring_and_measuring_for_it_changes_nothing():
    placer, here = made(learners=(PAGEABLE,), grows=True)
    explained = placer.explain(40_000, HOST, {PAGEABLE: ROWS * 40_000}, False)
    assert explained.why == "they are made on the host and wanted there"
    assert plan_of(explained).workload.learners == (PAGEABLE,)
    assert here.asked == [False]
    assert placer.transfer_plan(HOST, ALONE, 40_000) is None
    # A faster host memory than the one that is used.
    here.topology = machine(4, host_copy=12 * GB).changed(
        legs={(PAGEABLE, PAGEABLE): FOUR.leg(PAGEABLE, PAGEABLE).__class__(1 * GB)}
    )
    assert plan_of(placer.explain(40_000, HOST, {}, True)).placement != HOST
    assert placer.place(40_000, HOST) == HOST
    assert placer.worth_moving(40_000, HOST, {PAGEABLE: ROWS * 40_000}, 10**9) == HOST
    assert placer.explain(40_000, HOST, {}, True).why == "they are made on the host and wanted there"
    assert here.asked == [False, True]


def test_what_was_only_assumed_to_explain_is_measured_before_it_decides():
    placer, here = made()
    placer.explain(40_000, HOST, {PAGEABLE: ROWS * 40_000}, False)
    placer.explain(40_000, HOST, {PAGEABLE: ROWS * 40_000}, False)
    assert here.asked == [False, False]
    placer.place(40_000)
    placer.explain(40_000, ALONE, {D[0]: ROWS * 40_000}, True)
    assert here.asked == [False, False, True]


def test_rows_on_disk_are_explained_beside_what_else_could_be_and_called_nothing_that_they_are_not():
    with_disk = FOUR.changed(
        memories={DISK: FOUR.memory(PAGEABLE)},
        legs={edge: FOUR.leg(PAGEABLE, PAGEABLE) for at in FOUR.endpoints for edge in ((DISK, at), (at, DISK))},
    )
    placer = Placer(EmulatedBackend(with_disk), "disk", {}, Demand(ROWS, 512, 4.0, (1,), False), with_disk, Here(None))
    explained = placer.explain(40_000, Placement((DISK,)), {}, False)
    assert str(explained).startswith("rows are at disk: as it was asked for\n")
    assert [each.kind for each in plan_of(explained).candidates if DISK in each.rows] == ["disk"]


# Topologies that don't go with the backend -----------------------------------------------------------------------------


def test_a_topology_without_the_host_s_memory_is_refused():
    with pytest.raises(
        TopologyError,
        match=r"'a machine' has device:0, device:1; the emulated\(reference\) backend has pageable, .*with pageable",
    ):
        made(None, topology=machine(2).only(D[:2]))
    bare, _ = made(machine(2).only(D[:2]))
    with pytest.raises(TopologyError, match="expected a topology with pageable"):
        bare.place(40_000)


def test_a_learner_on_a_device_that_the_topology_lacks_is_refused_where_that_would_decide():
    placer, _ = made(None, topology=machine(2), learners=())
    with pytest.raises(
        TopologyError, match=r"a learner takes its batches at device:3, .*topology=.* no endpoint device:3"
    ):
        placer.join(D[3])
    assert placer.place(40_000) == HOST
    fixed, _ = made(None, "pinned", topology=machine(2), learners=())
    fixed.join(D[3])
    assert fixed.place(40_000) == Placement((PINNED,))
