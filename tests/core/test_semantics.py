"""The modes' arithmetic: which schedules they allow, and which global batches a learner gets."""

from __future__ import annotations

import re

import pytest

from conduit.core.semantics import OffPolicy, OnPolicy, Schedule
from conduit.errors import CapacityError, ScheduleError, SettingError, UnitError


@pytest.mark.parametrize("name", ["capacity", "batch_size"])
@pytest.mark.parametrize("wrong", [0, -3, 2.5, True, "8"])
def test_sizes_are_whole_numbers_of_at_least_one(name, wrong):
    sizes = {"capacity": 8, "batch_size": 2, name: wrong}
    with pytest.raises(SettingError, match=re.escape(f"{name}={wrong!r}: expected a whole number of at least 1")):
        OffPolicy(**sizes)


@pytest.mark.parametrize("name", ["rollout_unit", "batch_size", "epochs"])
@pytest.mark.parametrize("wrong", [0, -3, 2.5, False])
def test_on_policy_sizes_are_whole_numbers_of_at_least_one(name, wrong):
    with pytest.raises(SettingError, match=re.escape(f"{name}={wrong!r}")):
        OnPolicy(**{"rollout_unit": 8, "batch_size": 2, "epochs": 1, name: wrong})


def test_a_capacity_below_a_batch_is_refused_with_both_figures():
    with pytest.raises(CapacityError, match=r"capacity=3 is below batch_size=4.*at least 4"):
        OffPolicy(3, 4)


def test_a_remainder_is_an_error_that_names_sizes_that_divide():
    with pytest.raises(UnitError, match=r"batch_size=5 doesn't divide rollout_unit=12.*3, 4, 6"):
        OnPolicy(12, 5)


@pytest.mark.parametrize(
    ("schedule", "named"),
    [(Schedule(g_ing=0), "g_ing=0"), (Schedule(g_ing=1.5), "g_ing=1.5"), (Schedule(g_del=-1), "g_del=-1"),
     (Schedule(g_del=0.5), "g_del=0.5"), (Schedule(g_ing=float("inf")), "g_ing=inf"), (Schedule(g_del=float("nan")), "g_del=nan")],
)  # fmt: skip
def test_off_policy_granularities_are_whole_numbers(schedule, named):
    with pytest.raises(ScheduleError, match=rf"{named}: .*whole numbers"):
        OffPolicy(8, 2).resolve(schedule)


def test_off_policy_granularities_are_one_unit_and_one_batch_unless_given():
    semantics = OffPolicy(8, 2)
    assert semantics.resolve(Schedule()) == Schedule(g_ing=1, g_del=1)
    assert semantics.resolve(Schedule(True, 3, True, 2)) == Schedule(True, 3, True, 2)


@pytest.mark.parametrize("schedule", [Schedule(overlap_del=True), Schedule(g_del=2)])
def test_exact_draws_allow_no_prefetch(schedule):
    OffPolicy(8, 2).resolve(schedule)
    OffPolicy(8, 2, exact=True).resolve(Schedule(overlap_ing=True, g_ing=4))
    with pytest.raises(ScheduleError, match="exact=True"):
        OffPolicy(8, 2, exact=True).resolve(schedule)


def test_on_policy_granularities_are_exactly_the_fractions_of_m():
    semantics = OnPolicy(12, 4)
    for k in (1, 2, 3):
        semantics.resolve(Schedule(g_ing=k / 3, g_del=k / 3))
        assert semantics.units_per_ingestion(Schedule(g_ing=k / 3)) == 4 * k
    assert semantics.resolve(Schedule()) == Schedule(g_ing=1, g_del=1 / 3)
    for wrong in (0, -1 / 3, 0.5, 4 / 3, 2, 1 / 6):
        with pytest.raises(ScheduleError, match=r"k/M with M = 3"):
            semantics.resolve(Schedule(g_ing=wrong))
        with pytest.raises(ScheduleError, match=r"g_del"):
            semantics.resolve(Schedule(g_del=wrong))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("per_group", [1, 2, 3])
def test_off_policy_learners_share_all_numbers_and_groups_partition_them(world, per_group):
    numbers = []
    for rank in range(world):
        numbering = OffPolicy(8, 2).numbering(rank, world, Schedule(g_del=per_group))
        numbers += [numbering.number(index) for index in range(12)]
        for index in range(12):
            group = numbering.group(index)
            assert index in group
            assert len(group) == per_group
            assert all(numbering.group(i) == group for i in group)
        assert numbering.next_iteration(5) is None
    assert sorted(numbers) == list(range(12 * world))


@pytest.mark.parametrize(
    ("unit", "batch", "epochs", "world"), [(12, 4, 1, 1), (12, 2, 2, 3), (8, 1, 3, 4), (6, 3, 5, 2)]
)
def test_on_policy_groups_never_cross_an_iteration(unit, batch, epochs, world):
    semantics = OnPolicy(unit, batch, epochs)
    each = semantics.batches // world
    for k in range(1, semantics.minibatches + 1):
        numbers = set()
        for rank in range(world):
            numbering = semantics.numbering(rank, world, Schedule(g_del=k / semantics.minibatches))
            for index in range(3 * each):
                group = numbering.group(index)
                assert index in group
                assert {i // each for i in group} == {index // each}
                assert all(numbering.group(i) == group for i in group)
                assert numbering.next_iteration(index) == (index // each + 1) * each
                assert numbering.number(index) // semantics.batches == index // each
                numbers.add(numbering.number(index))
        assert numbers == set(range(3 * semantics.batches))


def test_learners_that_can_not_share_the_batches_equally_are_refused():
    with pytest.raises(ScheduleError, match=r"6 batches \(2 passes of 3\), which 4 learners"):
        OnPolicy(12, 4, 2).numbering(0, 4, Schedule())
