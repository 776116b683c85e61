"""The iteration-latency model against two workers simulated event by event: exact where App. E, as mended, claims to be."""

from __future__ import annotations

import math
import re
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.core.latency import (
    OperatorTimes,
    StageTimes,
    delivery_path_s,
    gamma,
    hidden_s,
    ingestion_path_s,
    iteration_s,
    path_s,
    waited_s,
)
from conduit.core.schedule import Mode
from conduit.core.semantics import Bounded, OffPolicy, OnPolicy, Semantics
from conduit.errors import SettingError
from tests.core.pipeline_oracle import off_policy_s, on_policy_s

REPLAY = OffPolicy(1_000, 10)
SECONDS = st.floats(0.001, 1.0)
SMALL = st.floats(0.0, 0.1)
PIPELINES = st.sampled_from([(m, k) for m in range(1, 13) for k in range(1, m + 1) if m % k == 0])


def ingestion_s(semantics: Semantics, rollout_s: float, mode: Mode, of: OperatorTimes, units: float = 1.0) -> float:
    times = StageTimes(rollout_s, 0.0, units, 1.0, {mode: of}, {})
    return ingestion_path_s(times, semantics, mode)


def delivery_s(semantics: Semantics, update_s: float, mode: Mode, of: OperatorTimes, batches: float = 1.0) -> float:
    times = StageTimes(0.0, update_s, 1.0, batches, {}, {mode: of})
    return delivery_path_s(times, semantics, mode)


def exactly(seconds: float):
    return pytest.approx(seconds, rel=1e-9)


@given(SECONDS, SECONDS, st.integers(1, 8), SMALL, SMALL)
def test_off_policy_ingestion_behind_rollout_is_exact(rollout_s, operator_s, g, hand_over_s, slowdown_s):
    simulated_s = off_policy_s([rollout_s + slowdown_s] * g, [g * operator_s], 12, hand_over_s) / g
    of = OperatorTimes(operator_s, slowdown_s, hand_over_s / g)
    assert ingestion_s(REPLAY, rollout_s, Mode(True, g), of) == exactly(simulated_s)


@given(SECONDS, SECONDS, st.integers(1, 8), SMALL, SMALL)
def test_off_policy_delivery_behind_the_update_is_exact(update_s, operator_s, g, hand_over_s, slowdown_s):
    simulated_s = off_policy_s([g * operator_s], [update_s + slowdown_s] * g, 12, hand_over_s) / g
    of = OperatorTimes(operator_s, slowdown_s, hand_over_s / g)
    assert delivery_s(REPLAY, update_s, Mode(True, g), of) == exactly(simulated_s)


@given(SECONDS, SECONDS, st.integers(1, 8), SMALL, st.integers(1, 3))
def test_a_hand_off_that_keeps_only_the_stage_is_a_slower_stage(rollout_s, operator_s, g, hand_over_s, room):
    simulated_s = off_policy_s([rollout_s] * g, [g * operator_s], 60, hand_over_s, room) / g
    of = OperatorTimes(operator_s, slowdown_s=hand_over_s / g)
    assert ingestion_s(REPLAY, rollout_s, Mode(True, g), of) == pytest.approx(simulated_s, rel=1e-6)


@given(SECONDS, SECONDS, PIPELINES, SMALL, SMALL)
def test_on_policy_ingestion_pipelined_is_exact(rollout_s, operator_s, pipeline, hand_over_s, slowdown_s):
    m, k = pipeline
    g = k / m
    parts = m // k
    simulated_s = on_policy_s([g * (rollout_s + slowdown_s)] * parts, [g * operator_s] * parts, hand_over_s)
    of = OperatorTimes(operator_s, slowdown_s, hand_over_s / g)
    assert ingestion_s(OnPolicy(m, 1), rollout_s, Mode(True, g), of) == exactly(simulated_s)


@given(SECONDS, SECONDS, PIPELINES, st.integers(1, 5), SMALL, SMALL)
def test_on_policy_delivery_over_epochs_is_exact(update_s, operator_s, pipeline, epochs, hand_over_s, slowdown_s):
    m, k = pipeline
    g = k / m
    parts = epochs * m // k
    simulated_s = on_policy_s([g * operator_s] * parts, [g * (update_s + slowdown_s)] * parts, hand_over_s)
    of = OperatorTimes(operator_s, slowdown_s, hand_over_s / g)
    predicted_s = delivery_s(OnPolicy(m, 1, epochs), update_s, Mode(True, g), of, batches=epochs)
    assert predicted_s == exactly(simulated_s)


def test_an_iteration_that_ends_early_has_as_many_passes_as_were_made():
    semantics, mode, of = OnPolicy(8, 1, 4), Mode(True, 1 / 2), OperatorTimes(0.02)
    three_groups_s = on_policy_s([0.01] * 3, [0.03] * 3)
    assert delivery_s(semantics, 0.06, mode, of, batches=1.5) == exactly(three_groups_s)
    assert gamma(semantics, "delivery", mode, passes=0.25) == gamma(semantics, "delivery", mode, passes=0) == 0


@given(SECONDS, SECONDS, st.sampled_from([REPLAY, Bounded(100, 10, 2), OnPolicy(8, 1, 2)]))
def test_in_line_both_times_add_up(stage_s, operator_s, semantics):
    mode = Mode(False, 1)
    assert ingestion_s(semantics, stage_s, mode, OperatorTimes(operator_s), 3.5) == exactly(
        3.5 * (stage_s + operator_s)
    )
    assert delivery_s(semantics, stage_s, mode, OperatorTimes(operator_s), 2.0) == exactly(2 * (stage_s + operator_s))


def test_gamma_is_what_the_semantics_leave_to_be_hidden():
    ppo = OnPolicy(8, 1, 4)
    assert gamma(REPLAY, "ingestion", Mode(True, 8)) == gamma(REPLAY, "delivery", Mode(True, 1)) == 1
    assert gamma(Bounded(100, 10, 2), "ingestion", Mode(True, 2)) == 1
    assert gamma(ppo, "ingestion", Mode(True, 1)) == 0, "nothing overlaps with itself; the paper has 1"
    assert gamma(ppo, "ingestion", Mode(True, 1 / 4)) == 3 / 4
    assert gamma(ppo, "delivery", Mode(True, 1 / 4)) == 15 / 16, "the first of 16 groups has nothing before it"
    assert gamma(ppo, "delivery", Mode(True, 1)) == 3 / 4
    assert gamma(OnPolicy(8, 1), "delivery", Mode(True, 1)) == 0
    for semantics in (REPLAY, ppo):
        assert gamma(semantics, "ingestion", Mode(False, 1)) == gamma(semantics, "delivery", Mode(False, 1)) == 0


def papers_path_s(stage_s: float, operator_s: float, sync_s: float, g: float) -> float:
    """App. E to the letter: γ(g ≥ 1) = 1, and one T_sync, outside of the minimum."""
    share = 1.0 if g >= 1 else 1 - g
    return stage_s + operator_s + sync_s - share * min(stage_s, operator_s)


@pytest.mark.parametrize(("rollout_s", "operator_s"), [(0.07, 0.03), (0.05, 0.05), (0.1, 0.03)])
def test_the_papers_gamma_of_1_on_policy_hides_what_nothing_can(rollout_s, operator_s):
    true_s = on_policy_s([rollout_s], [operator_s])
    assert ingestion_s(OnPolicy(8, 1), rollout_s, Mode(True, 1), OperatorTimes(operator_s)) == exactly(true_s)
    assert papers_path_s(rollout_s, operator_s, 0, 1) < 0.8 * true_s


def test_a_hand_off_counted_once_is_too_short_and_split_is_exact():
    """2 ms a hand-off keep both sides, and 1 ms an invocation is the operator's own."""
    rollout_s, work_s, own_s, hand_over_s, g = 0.1, 0.03, 0.001, 0.002, 1 / 16
    true_s = on_policy_s([g * rollout_s] * 16, [g * work_s + own_s] * 16, hand_over_s)
    split = OperatorTimes(work_s + own_s / g, blocking_s=hand_over_s / g)
    assert ingestion_s(OnPolicy(16, 1), rollout_s, Mode(True, g), split) == exactly(true_s)
    assert papers_path_s(rollout_s, work_s, own_s + hand_over_s, g) < 0.82 * true_s


def test_a_stage_slowed_by_its_operator_is_slowed_before_the_minimum():
    """Rollout takes 4 instead of 3 ms beside an operator of 8 ms: nothing of that is exposed; outside of the minimum it would be."""
    of = OperatorTimes(0.008, slowdown_s=0.001)
    true_s = off_policy_s([0.004], [0.008], 12, 0.0)
    assert ingestion_s(REPLAY, 0.003, Mode(True, 1), of) == exactly(true_s) == exactly(0.008)
    assert papers_path_s(0.003, 0.008, 0.001, 1) == exactly(0.009)


def test_fractions_that_dont_divide_an_iteration_are_why_only_divisors_are_tried():
    errors = []
    for m in range(2, 17):
        for k in range(1, m):
            for rollout_s, operator_s in ((1.0, 0.3), (0.3, 1.0), (1.0, 1.0)):
                takes = [k / m] * (m // k) + ([m % k / m] if m % k else [])
                true_s = on_policy_s([g * rollout_s for g in takes], [g * operator_s for g in takes])
                predicted_s = ingestion_s(OnPolicy(m, 1), rollout_s, Mode(True, k / m), OperatorTimes(operator_s))
                error = predicted_s / true_s - 1
                if m % k:
                    errors.append(error)
                else:
                    assert abs(error) < 1e-12, (m, k)
    assert max(map(abs, errors)) > 0.05
    assert max(map(abs, errors)) < 0.35


@given(SECONDS, SECONDS)
def test_stages_that_alternate_add_up_and_of_concurrent_ones_the_slower_decides(ingestion_path, delivery_path):
    alternating_s = iteration_s(ingestion_path, delivery_path, concurrent=False)
    concurrent_s = iteration_s(ingestion_path, delivery_path, concurrent=True)
    # Actors make what learners take, an iteration's worth at a time: by turns, or at once.
    assert alternating_s == exactly(on_policy_s([ingestion_path], [delivery_path]))
    assert concurrent_s == exactly(off_policy_s([ingestion_path], [delivery_path], 60, 0.0, room=1))


@given(SECONDS, SECONDS, st.floats(0, 1), st.floats(-0.2, 0.2), st.floats(-0.2, 0.2))
def test_a_path_is_its_stage_beside_the_operator_and_what_is_waited_for(stage_s, operator_s, share, slow_s, block_s):
    of = OperatorTimes(operator_s, slow_s, block_s)
    beside_s = max(0.0, stage_s + slow_s)
    assert path_s(stage_s, of, share) == exactly(beside_s + waited_s(stage_s, of, share))
    assert 0 <= hidden_s(stage_s, of, share) <= min(beside_s, operator_s)
    assert waited_s(stage_s, of, share) >= 0, "nobody waits less than not at all"
    assert of.sync_s == slow_s + block_s
    # What a profile takes for blocking is what makes the prediction what was measured.
    waited = 0.07
    blocking_s = waited - waited_s(stage_s, OperatorTimes(operator_s, slow_s), share)
    assert waited_s(stage_s, OperatorTimes(operator_s, slow_s, blocking_s), share) == pytest.approx(waited)


@given(SECONDS, SECONDS, st.floats(0, 1), st.floats(0, 0.5))
def test_a_path_never_gets_shorter_as_its_parts_get_longer(stage_s, operator_s, share, more_s):
    of = OperatorTimes(operator_s)
    assert path_s(stage_s + more_s, of, share) >= path_s(stage_s, of, share) * (1 - 1e-12)
    assert path_s(stage_s, OperatorTimes(operator_s + more_s), share) >= path_s(stage_s, of, share) * (1 - 1e-12)
    assert path_s(stage_s, of, share) >= max(stage_s, operator_s) * (1 - 1e-12)


def test_no_time_at_all_is_an_iteration_of_no_time():
    for mode in (Mode(False, 1), Mode(True, 1)):
        assert ingestion_s(REPLAY, 0, mode, OperatorTimes(0)) == delivery_s(REPLAY, 0, mode, OperatorTimes(0)) == 0
        assert ingestion_s(REPLAY, 1, mode, OperatorTimes(1), units=0) == 0
        assert delivery_s(OnPolicy(8, 1), 1, mode, OperatorTimes(1), batches=0) == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, "1", None, True])
@pytest.mark.parametrize("name", ["operator_s", "slowdown_s", "blocking_s", "noise_s"])
def test_an_operators_times_are_finite(name, wrong):
    with pytest.raises(SettingError, match=re.escape(f"OperatorTimes({name}={wrong!r}): expected finite seconds")):
        OperatorTimes(**{"operator_s": 1.0, name: wrong})


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -0.001, "1"])
@pytest.mark.parametrize("name", ["rollout_s", "update_s", "units", "batches"])
def test_an_iterations_times_and_counts_are_finite_and_at_least_0(name, wrong):
    given_ = {"rollout_s": 1.0, "update_s": 1.0, "units": 1.0, "batches": 1.0, "ingestion": {}, "delivery": {}}
    with pytest.raises(
        SettingError, match=re.escape(f"StageTimes({name}={wrong!r}): expected") + ".*finite.* of at least 0"
    ):
        StageTimes(**{**given_, name: wrong})


def test_only_overlap_can_be_ahead_of_time():
    OperatorTimes(0.001, -0.1, -0.1)
    with pytest.raises(SettingError, match=r"operator_s=-0.1.*at least 0"):
        OperatorTimes(-0.1)
    with pytest.raises(SettingError, match=r"noise_s=-0.1.*at least 0"):
        OperatorTimes(0.1, noise_s=-0.1)
    measured = {Mode(False, 1): OperatorTimes(0.01, blocking_s=0.002)}
    with pytest.raises(SettingError, match=r"delivery\[in line, g=1\].*T_sync of 0.002 s .*in line.*expected 0"):
        StageTimes(1, 1, 1, 1, {}, measured)


def test_numpys_numbers_and_read_only_mappings_will_do():
    modes = MappingProxyType({Mode(True, 1): OperatorTimes(np.float32(0.5))})  # pyright: ignore[reportArgumentType]
    times = StageTimes(np.float64(1.0), 0, 2, 1, modes, {})
    assert ingestion_path_s(times, REPLAY, Mode(True, 1)) == 2.0
