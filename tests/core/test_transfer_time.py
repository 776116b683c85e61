"""How long rows take to and from where they are: closed forms, and the shares that a linear program finds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from conduit.core.placement import Placement
from conduit.core.transfer_time import (
    Survey,
    TransferTime,
    delivered_bytes,
    delivery_s,
    fastest_shares,
    ingested_bytes,
    ingestion_s,
    missing_edges,
)
from conduit.core.workload import Workload, room_bytes
from conduit.errors import TopologyError
from conduit.topology.bandwidth import Leg
from conduit.topology.cluster import Link
from conduit.topology.endpoint import PAGEABLE, PINNED
from tests.core.placement_oracle import FAR, GB, D, machine, random_case

WORK = Workload(row_bytes=1000, capacity=1_000_000, batch_size=500, actors=(PAGEABLE,), learners=(D[0],))
BATCH = 500 * 1000


def bare(devices: int = 4, **figures):
    """Without anything that edges share."""
    there = machine(devices, **figures)
    return there.changed(links={name: Link(1e6 * GB) for name in there.links})


def test_one_device_costs_one_edge_each_way():
    there = bare(latency_s=1e-4)
    rows = {D[1]: WORK.capacity}
    assert ingestion_s(there, WORK, rows) == pytest.approx(1e-4 + BATCH / (12 * GB))
    assert delivery_s(there, WORK, rows) == pytest.approx(1e-4 + BATCH / (276 * GB))
    assert delivery_s(there, WORK, {D[0]: WORK.capacity}) == pytest.approx(1e-4 + BATCH / (1000 * GB))


def test_several_owners_cost_the_slowest_not_the_sum():
    there, rows = bare(), {D[0]: 250_000, D[1]: 500_000, PINNED: 250_000}
    from_pinned = replace(WORK, actors=(PINNED,))
    assert ingestion_s(there, from_pinned, rows) == pytest.approx(0.25 * BATCH / (12 * GB))
    assert ingestion_s(there, from_pinned, {**rows, D[1]: 1_000_000}) == pytest.approx(2 / 3 * BATCH / (26 * GB))
    merged = BATCH / (1000 * GB)
    assert delivery_s(there, WORK, rows) == pytest.approx(0.25 * BATCH / (26 * GB) + merged)


def test_out_of_pageable_memory_one_thread_copies_to_one_endpoint_after_the_other():
    there = bare(latency_s=1e-4).changed(legs={(PAGEABLE, D[1]): Leg(6 * GB, 3e-4)})
    rows = {D[0]: 250_000, D[1]: 500_000, PINNED: 250_000, D[2]: 0}
    copied = (1e-4 + 0.25 * BATCH / (12 * GB)) + (3e-4 + 0.5 * BATCH / (6 * GB)) + (1e-4 + 0.25 * BATCH / (12 * GB))
    assert ingestion_s(there, WORK, rows) == pytest.approx(copied)
    # Two actors of a node have one ingesting thread, and it copies for both at once.
    assert ingestion_s(there, replace(WORK, actors=(PAGEABLE, PAGEABLE)), rows) == pytest.approx(copied)
    # A link that all of it goes over may be slower still.
    slow = there.changed(links={"thread": Link(GB / 10)})
    assert ingestion_s(slow, WORK, rows) == pytest.approx(BATCH / (GB / 10))


def test_each_node_has_a_thread_of_its_own_that_copies_there():
    legs = {(FAR, D[0]): Leg(3 * GB, 1e-4), (FAR, D[1]): Leg(2 * GB), (PINNED, D[0]): Leg(GB / 4)}
    there = bare()
    there = there.changed(memories={FAR: there.memory(PAGEABLE)}, legs=legs)
    rows = {D[0]: 500_000, D[1]: 500_000}
    near, far = BATCH / (12 * GB), 1e-4 + 0.5 * BATCH / (3 * GB) + 0.5 * BATCH / (2 * GB)
    assert ingestion_s(there, replace(WORK, actors=(FAR,)), rows) == pytest.approx(far)
    both = replace(WORK, actors=(PAGEABLE, FAR, PAGEABLE), replay_ratio=1 / 3)
    assert ingestion_s(there, both, rows) == pytest.approx(max(2 * near, far))
    many = replace(both, actors=(*(PAGEABLE,) * 9, FAR), replay_ratio=1 / 10)
    assert ingestion_s(there, many, rows) == pytest.approx(max(9 * near, far))
    assert 2 * near < far < 9 * near
    # What isn't copied by a thread goes on beside it.
    three = replace(WORK, actors=(PAGEABLE, FAR, PINNED), replay_ratio=1 / 3)
    assert ingestion_s(there, three, rows) == pytest.approx(0.5 * BATCH / (GB / 4))


def test_what_comes_from_several_endpoints_is_put_together_where_it_is_wanted():
    there = bare(latency_s=1e-4).changed(legs={(D[1], D[1]): Leg(500 * GB, 2e-4)})
    rows = {D[0]: 500_000, D[2]: 500_000}
    work = replace(WORK, learners=(D[0], D[1], D[1]))
    # Two learners on one device put theirs together at once, in the same memory.
    merged = 2e-4 + 2 * BATCH / (500 * GB)
    # Of these, the second device's take longest on their way.
    assert delivery_s(there, work, rows) == pytest.approx(1e-4 + 2 * 0.5 * BATCH / (276 * GB) + merged)
    alone = 1e-4 + 2 * BATCH / (276 * GB)
    assert delivery_s(there, work, {D[0]: WORK.capacity}) == pytest.approx(alone)
    assert delivery_s(there, work, {D[0]: WORK.capacity, D[2]: 0}) == pytest.approx(alone)
    assert delivery_s(there, replace(WORK, learners=(PAGEABLE,)), rows) == pytest.approx(
        1e-4 + 0.5 * BATCH / (12 * GB) + 1e-4 + BATCH / (12 * GB)
    )


def test_where_nothing_is_known_of_a_learner_s_memory_putting_together_counts_as_nothing():
    there = bare()
    legs = {edge: leg for edge, leg in there.legs.items() if edge != (D[0], D[0])}
    routes = {edge: route for edge, route in there.routes.items() if edge in legs}
    rows = {D[1]: 500_000, D[2]: 500_000}
    unknown = replace(there, legs=legs, routes=routes)
    assert delivery_s(unknown, WORK, rows) == pytest.approx(0.5 * BATCH / (276 * GB))
    (timed,) = Survey(unknown, WORK, dict.fromkeys(there.endpoints, 0)).timed([list(rows.values())], [list(rows)])
    assert timed.delivery_s == pytest.approx(0.5 * BATCH / (276 * GB))


def test_what_shares_a_link_adds_up():
    there = machine(4).changed(links={"thread": Link(3 * GB)})
    rows = {D[at]: 250_000 for at in range(4)}
    assert ingestion_s(there, WORK, rows) == pytest.approx(BATCH / (3 * GB))
    # All but its own quarter comes in by the learner's port; then all is copied once more, within its memory.
    assert delivery_s(there, WORK, rows) == pytest.approx(0.75 * BATCH / (276 * GB) + BATCH / (1000 * GB))
    # Two of a PCIe root's devices share it.
    pinned = replace(WORK, actors=(PINNED,))
    root = {(PINNED, D[at]): ("root",) for at in range(2)}
    rooted = there.changed(links={"root": Link(30 * GB)}, routes=root)
    assert ingestion_s(rooted, pinned, rows) == pytest.approx(0.5 * BATCH / (30 * GB))


def test_one_owner_serves_all_learners_through_its_port():
    there = machine(4)
    four = Workload(1000, 1_000_000, 500, (PAGEABLE,), D[:4])
    assert delivery_s(there, four, {D[0]: four.capacity}) == pytest.approx(3 * BATCH / (276 * GB))
    even = {D[at]: 250_000 for at in range(4)}
    assert delivery_s(there, four, even) == pytest.approx(0.75 * BATCH / (276 * GB) + BATCH / (1000 * GB))


def test_actors_bring_equal_parts_and_those_at_one_place_add_up():
    there = bare()
    work = Workload(1000, 1_000_000, 500, (PAGEABLE, PAGEABLE, PINNED), (D[0],), replay_ratio=0.5)
    assert ingestion_s(there, work, {D[0]: work.capacity}) == pytest.approx(2 / 3 * 2 * BATCH / (12 * GB))
    assert sum(ingested_bytes(work, D[0]).values()) == pytest.approx(work.rows_ingested * 1000)
    assert sum(delivered_bytes(work, D[0]).values()) == work.rows_delivered * 1000


def test_no_row_costs_nothing_not_even_latency():
    slow = bare(latency_s=1e-4).changed(legs={(D[1], D[0]): Leg(GB, 1.0), (PAGEABLE, D[1]): Leg(GB, 1.0)})
    assert delivery_s(slow, WORK, {D[0]: WORK.capacity, D[1]: 0}) == delivery_s(slow, WORK, {D[0]: WORK.capacity})
    assert delivery_s(slow, WORK, {D[0]: WORK.capacity - 1, D[1]: 1}) > 1.0
    shares = np.array([[1.0, 0.0], [1 - 1e-6, 1e-6]])
    seconds, _ = TransferTime.of(slow, [delivered_bytes(WORK, at) for at in D[:2]]).seconds(shares)
    assert seconds[0] < 0.01
    assert seconds[1] > 1.0


def test_an_edge_that_is_not_there_is_an_error_never_a_time():
    there = machine(2)
    rows = {D[1]: WORK.capacity}
    cut = there.only([PAGEABLE, D[0], D[1]])
    legs = {edge: leg for edge, leg in cut.legs.items() if edge != (D[1], D[0])}
    routes = {edge: route for edge, route in cut.routes.items() if edge in legs}
    broken = type(cut)(cut.name, cut.memories, legs, cut.links, routes)
    assert missing_edges(broken, WORK, D[1]) == ((D[1], D[0]),)
    assert missing_edges(broken, WORK, D[0]) == ()
    assert ingestion_s(broken, WORK, rows) > 0
    with pytest.raises(TopologyError, match="no bandwidth of device:1 → device:0"):
        delivery_s(broken, WORK, rows)


def test_many_placements_at_once_are_timed_as_one_by_one():
    for seed in range(20):
        case = random_case(seed)
        work, there = case.workload, case.topology
        room = room_bytes(there, work, case.budgets, case.reserve)
        survey = Survey(there, work, room)
        draw = random.Random(seed)
        sets = [
            draw.sample(survey.endpoints, draw.randint(1, len(survey.endpoints))) for _ in range(8) if survey.endpoints
        ]
        rows = [Placement(tuple(used), tuple(draw.random() + 0.01 for _ in used)).rows(work.capacity) for used in sets]
        for used, timed in zip(sets, survey.timed([list(each.values()) for each in rows], sets), strict=True):
            assert timed.ingestion_s == pytest.approx(ingestion_s(there, work, timed.rows), rel=1e-9)
            assert timed.delivery_s == pytest.approx(delivery_s(there, work, timed.rows), rel=1e-9)
            assert list(timed.rows) == list(used)


def test_the_fastest_shares_beat_every_spread_of_a_fine_grid():
    work = Workload(10_000, 1_000_000, 512, (PAGEABLE,), (D[0], D[2]), replay_ratio=4.0)
    draw = random.Random(5)
    there = machine(3)
    legs = {
        edge: Leg(leg.bytes_per_s * draw.uniform(0.2, 1), draw.uniform(0, 1e-5)) for edge, leg in there.legs.items()
    }
    halves = [
        TransferTime.of(there.changed(legs=legs), [half(work, at) for at in D[:3]], copied=half is ingested_bytes)
        for half in (ingested_bytes, delivered_bytes)
    ]
    most = [0.6, 0.5, 1.0]
    (best,) = fastest_shares(halves, [(0, 1, 2)], 1e-6, [most])
    assert best.sum() == pytest.approx(1.0)
    assert (best <= np.array(most) + 1e-9).all()
    steps = [(a / 60, b / 60, (60 - a - b) / 60) for a, b in product(range(1, 37), range(1, 31)) if a + b < 60]
    grid, found = (
        np.sum([half.seconds(shares)[0] for half in halves], axis=0) for shares in (np.array(steps), best[None])
    )
    assert found[0] <= grid.min() * (1 + 1e-9)
    assert found[0] > grid.min() * 0.97


def test_sets_solved_together_come_out_as_alone():
    case = random_case(7)
    work, there = case.workload, case.topology
    survey = Survey(there, work, room_bytes(there, work, case.budgets, case.reserve))
    sets = [survey.endpoints[:count] for count in range(1, len(survey.endpoints) + 1)]
    together = survey.placed(sets)
    alone = [each for used in sets for each in survey.placed([used])]
    assert [each.transfer_s for each in together] == pytest.approx([each.transfer_s for each in alone], rel=1e-6)


def test_an_edge_that_another_exceeds_is_left_out_of_the_program_not_of_the_time():
    many = Workload(1000, 1_000_000, 500, (PAGEABLE,), D[:8])
    half = TransferTime.of(machine(8), [delivered_bytes(many, at) for at in D[:8]])
    assert half.share_s.shape == (8, 8)
    merged = BATCH / (1000 * GB)
    assert half.seconds(np.full((1, 8), 1 / 8))[0][0] + merged == pytest.approx(
        delivery_s(machine(8), many, dict.fromkeys(D[:8], 125_000))
    )


def test_each_stream_s_noise_counts_by_its_part_of_the_time():
    there = bare().changed(
        legs={
            (PAGEABLE, D[0]): Leg(12 * GB, noise=0.3),
            (PAGEABLE, D[1]): Leg(4 * GB, noise=0.1),
            (D[0], D[0]): Leg(1000 * GB, noise=0.5),
            (D[1], D[0]): Leg(50 * GB, noise=0.2),
        }
    )
    survey = Survey(there, WORK, dict.fromkeys(there.endpoints, 0))
    (timed,) = survey.timed([[500_000, 500_000]], [D[:2]])
    in_s = 0.5 / 12, 0.5 / 4
    gathered_s, merged_s = 0.5 / 50, 1 / 1000
    noisy = in_s[0] * 0.3 + in_s[1] * 0.1 + gathered_s * 0.2 + merged_s * 0.5
    assert timed.noise == pytest.approx(noisy / (sum(in_s) + gathered_s + merged_s))
    # A link's bandwidth has none.
    slow = there.changed(links={"thread": Link(GB), "device:0 in": Link(GB)})
    (timed,) = Survey(slow, WORK, dict.fromkeys(there.endpoints, 0)).timed([[500_000, 500_000]], [D[:2]])
    assert timed.noise == pytest.approx(merged_s * 0.5 / (1 + 0.5 + merged_s))


def test_where_no_memory_is_within_reach_there_is_nothing_to_time():
    there = machine(1)
    survey = Survey(replace(there, legs={}, routes={}), WORK, dict.fromkeys(there.endpoints, 0))
    assert survey.endpoints == ()
    assert survey.placed([]) == []
