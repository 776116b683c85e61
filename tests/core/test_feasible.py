"""What the algorithms' semantics leave to an automatic schedule."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest

from conduit.core.feasible import MOST_FRACTIONS, Feasible, feasible, staged_batches
from conduit.core.limiter import SampleToInsertRatio
from conduit.core.prioritized import Prioritized
from conduit.core.sampling import Uniform
from conduit.core.schedule import Auto, Mode, Schedule
from conduit.core.semantics import Bounded, OffPolicy, OnPolicy, Semantics
from conduit.core.table import MAIN, Table
from conduit.errors import ScheduleError

DQN = OffPolicy(100_000, 32)
PRIORITIZED_DQN = OffPolicy(100_000, 32, {MAIN: Table(Prioritized())})
SAC = OffPolicy(1_000_000, 256, {MAIN: Table(Uniform(), limiter=SampleToInsertRatio(256, 1000, 1))})
IMPALA = Bounded(4_096, 512, 4)
PPO = OnPolicy(2_048, 256, 4)
GRPO = OnPolicy(512, 128, 1)
EXACT = OffPolicy(100_000, 32, {MAIN: Table(Prioritized())}, exact=True)
ALL = {
    "DQN": (DQN, True, False),
    "prioritized DQN": (PRIORITIZED_DQN, True, False),
    "SAC": (SAC, True, True),
    "exact": (EXACT, True, False),
    "IMPALA": (IMPALA, True, False),
    "PPO": (PPO, True, False),
    "PPO with GAE first": (PPO, False, False),
    "GRPO": (GRPO, False, False),
    "a unit as a whole": (OnPolicy(64, 64), True, False),
}


def modes(semantics: Semantics, auto: Auto | None = None, *, pipelines: bool = True, counted: bool = False) -> Feasible:
    return feasible(semantics, auto or Auto(), pipelines=pipelines, counted=counted)


def in_line(*gs: float) -> tuple[Mode, ...]:
    return tuple(Mode(False, g) for g in gs)


def behind(*gs: float) -> tuple[Mode, ...]:
    return tuple(Mode(True, g) for g in gs)


@pytest.mark.parametrize("semantics", [DQN, PRIORITIZED_DQN], ids=["uniform", "prioritized"])
def test_dqn_batches_both_operators_in_powers_of_two_in_line_and_behind(semantics):
    found = modes(semantics)
    assert found.ingestion == found.delivery == in_line(1, 2, 4, 8) + behind(1, 2, 4, 8)
    assert len(found.schedules) == 4 * 4 * 4, "4·|G_ing|·|G_del| candidates"


def test_sac_whose_draws_a_limiter_counts_draws_one_batch_at_a_time():
    found = modes(SAC, counted=True)
    assert found.ingestion == in_line(1, 2, 4, 8) + behind(1, 2, 4, 8)
    assert found.delivery == in_line(1) + behind(1)


@pytest.mark.parametrize("semantics", [EXACT, IMPALA], ids=["exact", "bounded"])
def test_what_is_drawn_at_its_pull_is_delivered_in_line_a_batch_at_a_time(semantics):
    found = modes(semantics)
    assert found.ingestion == in_line(1, 2, 4, 8) + behind(1, 2, 4, 8)
    assert found.delivery == in_line(1)


def test_ppo_pipelines_fractions_that_divide_its_minibatches():
    found = modes(PPO)
    eighths = (1 / 8, 1 / 4, 1 / 2, 1)
    assert found.ingestion == in_line(1, 1 / 2, 1 / 4, 1 / 8) + behind(1 / 2, 1 / 4, 1 / 8)
    assert found.delivery == in_line(*eighths) + behind(*eighths), "a whole pass can be prepared behind the pass before"
    assert modes(OnPolicy(12, 1)).delivery == in_line(*(k / 12 for k in (1, 2, 3, 4, 6, 12))) + behind(
        *(k / 12 for k in (1, 2, 3, 4, 6))
    )


def test_grpo_whose_hooks_need_whole_groups_ingests_its_unit_at_once():
    found = modes(GRPO, pipelines=False)
    assert found.ingestion == in_line(1)
    assert found.delivery == in_line(1 / 4, 1 / 2, 1) + behind(1 / 4, 1 / 2), "one pass: nothing precedes a whole one"


def test_a_barrier_off_policy_sees_one_unit_at_a_time_but_may_work_behind_rollout():
    assert modes(DQN, pipelines=False).ingestion == in_line(1) + behind(1)


def test_nothing_overlaps_with_itself_so_a_unit_of_one_batch_and_one_pass_stays_in_line():
    found = modes(OnPolicy(64, 64))
    assert found.schedules == (Schedule(False, 1, False, 1),)
    assert modes(OnPolicy(64, 64, 2)).delivery == in_line(1) + behind(1)


@pytest.mark.parametrize(("semantics", "pipelines", "counted"), ALL.values(), ids=ALL)
def test_every_feasible_schedule_is_one_that_its_mode_takes(semantics, pipelines, counted):
    found = modes(semantics, pipelines=pipelines, counted=counted)
    assert len(set(found.schedules)) == len(found.schedules)
    for schedule in found.schedules:
        assert semantics.resolve(schedule) == schedule
    assert semantics.resolve(Schedule()) == found.simplest == found.schedules[0], "the plain loop comes first"


@pytest.mark.parametrize("m", [24, 60, 64, 97, 720, 5040])
def test_of_many_divisors_those_that_double_are_tried_and_both_ends(m):
    gs = [mode.g for mode in modes(OnPolicy(m, 1)).delivery if not mode.overlap]
    ks = [round(g * m) for g in gs]
    assert all(m % k == 0 for k in ks)
    assert (ks[0], ks[-1]) == (1, m)
    divisors = sum(m % k == 0 for k in range(1, m + 1))
    if divisors <= MOST_FRACTIONS:
        assert len(ks) == divisors
    else:
        assert all(b >= 2 * a for a, b in pairwise(ks))
        assert 4 <= len(ks) <= math.log2(m) + 1


def test_caps_bound_what_is_tried():
    found = modes(DQN, Auto(overlap_ing=False, g_ing=3, g_del=16))
    assert found.ingestion == in_line(1, 2, 3)
    assert found.delivery == in_line(1, 2, 4, 8, 16) + behind(1, 2, 4, 8, 16)
    assert modes(DQN, Auto(g_ing=2.5, overlap_del=False)).ingestion == in_line(1, 2) + behind(1, 2)
    assert modes(DQN, Auto(overlap_del=False)).delivery == in_line(1, 2, 4, 8)
    found = modes(PPO, Auto(g_ing=0.25, g_del=0.3))
    assert found.ingestion == in_line(1 / 4, 1 / 8) + behind(1 / 4, 1 / 8)
    assert found.delivery == in_line(1 / 8, 1 / 4) + behind(1 / 8, 1 / 4)
    assert modes(OnPolicy(3, 1), Auto(g_ing=0.33333333)).ingestion == in_line(1 / 3) + behind(1 / 3)


def test_batches_ahead_bounds_the_lag_of_the_last_batch_of_a_group():
    assert modes(DQN, Auto(batches_ahead=0)).delivery == in_line(1)
    assert modes(DQN, Auto(batches_ahead=1)).delivery == in_line(1, 2) + behind(1)
    assert modes(DQN, Auto(batches_ahead=7)).delivery == in_line(1, 2, 4, 8) + behind(1, 2, 4)
    assert modes(DQN, Auto(batches_ahead=7)).ingestion == modes(DQN).ingestion
    assert modes(PPO, Auto(batches_ahead=3)).delivery == in_line(1 / 8, 1 / 4, 1 / 2) + behind(1 / 8, 1 / 4)
    assert modes(EXACT, Auto(batches_ahead=0)).delivery == in_line(1)


@pytest.mark.parametrize(
    ("semantics", "auto", "pipelines", "said"),
    [
        (DQN, Auto(g_ing=0.5), True, "Auto(g_ing=0.5): leaves nothing feasible; here granularities are 1: the least that would do is g_ing=1"),
        (EXACT, Auto(g_del=0.9), True, "Auto(g_del=0.9): leaves nothing feasible; here granularities are 1: the least that would do is g_del=1"),
        (
            PPO,
            Auto(g_del=0.1),
            True,
            "Auto(g_del=0.1): leaves nothing feasible; here granularities are 0.125, 0.25, 0.5, 1: the least that would do is g_del=0.125",
        ),
        (GRPO, Auto(g_ing=0.5), False, "Auto(g_ing=0.5): leaves nothing feasible; here granularities are 1: the least that would do is g_ing=1"),
    ],
)  # fmt: skip
def test_caps_that_leave_nothing_are_named_with_the_least_that_would_do(semantics, auto, pipelines, said):
    with pytest.raises(ScheduleError, match=f"^{re.escape(said)}$"):
        modes(semantics, auto, pipelines=pipelines)


def test_a_mode_stages_the_group_that_is_handed_out_and_behind_the_update_the_next_one():
    assert [staged_batches(Mode(False, g)) for g in (1, 2, 8)] == [1, 2, 8]
    assert [staged_batches(Mode(True, g)) for g in (1, 2, 8)] == [2, 4, 16]
    assert [staged_batches(Mode(True, k / 12), 12) for k in (1, 3, 12)] == [2, 6, 24]
    assert [staged_batches(Mode(False, k / 12), 12) for k in (1, 3, 12)] == [1, 3, 12]


def test_what_memory_has_no_room_for_is_not_staged():
    found = modes(DQN)
    assert found.staging(16) == found
    assert found.staging(15).delivery == in_line(1, 2, 4, 8) + behind(1, 2, 4)
    assert found.staging(3).delivery == in_line(1, 2) + behind(1)
    assert found.staging(3).ingestion == found.ingestion
    assert modes(PPO).staging(4).delivery == in_line(1 / 8, 1 / 4, 1 / 2) + behind(1 / 8, 1 / 4)
    with pytest.raises(ScheduleError, match=r"room for 0 staged batches.*the least that would do is 1"):
        found.staging(0)
