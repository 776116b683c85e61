"""Placements by row size: every size of a sweep has the plan's placement, to the byte where it ends to fit."""

from __future__ import annotations

from itertools import pairwise

import pytest

from conduit.core.placement import Placement
from conduit.core.placement_map import PlacementMap
from conduit.core.planning import BETTER, plan_for
from conduit.core.transfer_time import delivery_s, ingestion_s
from conduit.core.workload import Workload
from conduit.errors import CapacityError, SettingError
from conduit.topology.endpoint import PAGEABLE, PINNED, Tier
from tests.core.placement_oracle import GB, D, machine

WORK = Workload(1, 1_000_000, 512, (PAGEABLE,), (D[0],), replay_ratio=4.0)
THERE = machine(3, 10 * GB, 100 * GB)
SWEPT = PlacementMap.sweep(THERE, WORK, (1000, 200_000))


def test_regions_follow_on_each_other_and_cover_the_sweep():
    assert SWEPT.regions[0].first == 1000
    assert SWEPT.regions[-1].last == 200_000
    for before, after in pairwise(SWEPT.regions):
        assert before.last + 1 == after.first
        assert before.placement != after.placement
    assert list(dict.fromkeys(each.kind for each in SWEPT.regions)) == ["single_gpu", "shared_gpu", "mixed", ""]


def test_a_region_ends_with_the_last_byte_that_fits():
    alone = SWEPT.regions[0]
    # 10 GB for a million rows, and the learner's batch beside them.
    assert alone.last == 10 * GB // (1_000_000 + 512)
    assert SWEPT.fits_up_to(Placement((D[0],))) == alone.last
    shared = max(each.last for each in SWEPT.regions if each.kind == "shared_gpu")
    assert 3 * shared * (1_000_000 / 3 + 512 / 3) <= 30 * GB < 3 * (shared + 1) * (1_000_000 / 3 + 512 / 3 + 1)


def test_every_size_goes_where_it_fits_and_nothing_clearly_faster_is_left():
    for size in (1000, 1234, 9994, 9995, 9996, 15_000, 29_000, 29_980, 29_990, 40_000, 77_777, 100_000):
        work = WORK.with_row_bytes(size)
        best = plan_for(THERE, work).choice
        assert best is not None
        placement = SWEPT.at(size)
        rows = placement.rows(work.capacity)
        assert size <= SWEPT.fits_up_to(placement)
        seconds = ingestion_s(THERE, work, rows) + delivery_s(THERE, work, rows)
        # Between two sizes of the sweep the larger one's placement is used: a little more lies where it is slower.
        assert seconds <= best.transfer_s * BETTER * 1.1, size


def test_what_fits_up_to_a_size_fits_there_and_not_beyond():
    for placement in (
        Placement((D[0], D[2]), (3.0, 1.0)),
        Placement((PINNED, D[1]), (1.0, 1.0)),
        Placement((PAGEABLE,)),
    ):
        most = SWEPT.fits_up_to(placement)
        for size, fits in ((most, True), (most + 1, False)):
            made = plan_for(THERE, WORK.with_row_bytes(size), current=placement)
            (now,) = (each for each in made.candidates if each.placement == placement)
            assert now.feasible is fits


def test_rows_stay_where_they_are_while_they_fit_and_are_not_much_slower():
    near = Placement(D[:2], (3.0, 1.0))
    assert SWEPT.at(5000, Placement((PAGEABLE,))) == Placement((D[0],))
    assert SWEPT.at(9000, near) == near
    largest = SWEPT.fits_up_to(near)
    assert largest == 10 * GB // (750_000 + 512)
    assert SWEPT.at(largest, near) == near
    assert SWEPT.at(largest + 1, near) != near


def test_a_size_where_nothing_fits_is_an_error_that_says_what_would():
    assert SWEPT.regions[-1].placement is None
    most = SWEPT.regions[-2].last
    with pytest.raises(
        CapacityError, match=f"150,000 bytes fit nowhere on a machine; the largest that do have {most:,}"
    ):
        SWEPT.at(150_000)


def test_sizes_beyond_the_sweep_are_refused_and_smaller_ones_go_with_the_smallest():
    assert SWEPT.at(10) == SWEPT.at(1000)
    with pytest.raises(SettingError, match="row_bytes=200,001: the placement map ends at 200,000"):
        SWEPT.at(200_001)


def test_transitions_are_the_neighbours_for_which_plans_can_be_made():
    assert SWEPT.transitions == tuple(
        (a.placement, b.placement) for a, b in pairwise(SWEPT.regions) if b.placement is not None
    )


def test_sizes_can_be_named_and_kinds_budgets_and_reserve_hold():
    given = PlacementMap.sweep(
        THERE,
        WORK,
        [2000, 4000, 50_000],
        kinds=["single_gpu", "cpu_pinned"],
        budgets={Tier.DEVICE: 3 * GB},
        reserve=0.1,
    )
    assert [each.kind for each in given.regions] == ["single_gpu", "cpu_pinned"]
    assert given.regions[0].last == 3 * GB // 1_000_512
    assert given.fits_up_to(Placement((PINNED,))) == 90_000


@pytest.mark.parametrize("sizes", [(), (5,), (5, 5), (9, 5), (0, 5), (1, 3, 2)])
def test_sizes_of_a_sweep_ascend(sizes):
    with pytest.raises(SettingError, match="two or more row sizes in bytes, ascending"):
        PlacementMap.sweep(THERE, WORK, sizes)


def test_a_sweep_is_the_same_every_time():
    assert (
        PlacementMap.sweep(THERE, WORK, (5000, 40_000)).regions
        == PlacementMap.sweep(THERE, WORK, (5000, 40_000)).regions
    )
