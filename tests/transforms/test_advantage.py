"""GAE and returns against plain recursions written apart from them, over fragments that end in every way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from conduit.core.episodes import End, Fragment
from conduit.core.hook import check_chain, run_hook
from conduit.errors import HookError, SchemaError
from conduit.transforms import GAE, Returns

T, V, W = 0.5, 0.25, 4.0  # gamma, lam and a bootstrap that make short sums exact


def fragment(
    reward: Any, value: Any, end: End, final: dict[str, Any] | None = None, lane: int = 0, dtype: Any = np.float32
) -> Fragment:
    rows = {"reward": np.array(reward, np.float32), "value": np.array(value, dtype)}
    return Fragment(rows, end, final, lane, np.zeros(len(reward), np.int64))


def gae_of(*fragments: Fragment, **knobs: Any) -> list[dict[str, Any]]:
    return [f.rows for f in run_hook(GAE(**{"gamma": T, "lam": V, **knobs}), list(fragments))]


def value_of(end: float) -> dict[str, Any]:
    return {"value": np.float32(end)}


# --- by hand -------------------------------------------------------------------------------------------------------


def test_a_terminated_fragment_bootstraps_nothing() -> None:
    (rows,) = gae_of(fragment([1, 2], [10, 20], End.TERMINATED, value_of(999)))
    # δ₁ = 2 − 20 = −18; δ₀ = 1 + ½·20 − 10 = 1; A₀ = 1 + ⅛·(−18)
    assert_array_equal(rows["advantage"], np.array([-1.25, -18], np.float32))
    assert_array_equal(rows["value_target"], np.array([8.75, 2], np.float32))


@pytest.mark.parametrize("end", [End.TRUNCATED, End.OPEN])
def test_truncation_and_the_units_edge_bootstrap_from_the_final_value(end: End) -> None:
    (rows,) = gae_of(fragment([1, 2], [10, 20], end, value_of(W)))
    # δ₁ = 2 + ½·4 − 20 = −16; A₀ = 1 + ⅛·(−16)
    assert_array_equal(rows["advantage"], np.array([-1, -16], np.float32))
    assert_array_equal(rows["value_target"], np.array([9, 4], np.float32))


def test_a_cut_fragments_last_row_only_serves_as_the_bootstrap_of_the_row_before() -> None:
    (rows,) = gae_of(fragment([1, 2], [10, 20], End.CUT))
    assert_array_equal(rows["advantage"], np.array([1, 0], np.float32))
    assert_array_equal(rows["value_target"], np.array([11, 20], np.float32))


def test_a_cut_fragment_ignores_a_final_value() -> None:
    (with_final,) = gae_of(fragment([1, 2], [10, 20], End.CUT, value_of(W)))
    (without,) = gae_of(fragment([1, 2], [10, 20], End.CUT))
    assert_array_equal(with_final["advantage"], without["advantage"])


def test_a_final_observation_is_valued_in_one_call_for_the_whole_unit() -> None:
    calls: list[Any] = []

    def value_fn(obs: Any) -> Any:
        calls.append(obs["x"].shape)
        return obs["x"][:, 0] * 2

    finals = [{"obs": {"x": np.full(3, w, np.float32)}} for w in (1.0, 2.0, 3.0)]
    ends = (End.TRUNCATED, End.OPEN, End.TRUNCATED)
    fragments = [
        fragment([0], [0], end, final, lane) for lane, (end, final) in enumerate(zip(ends, finals, strict=True))
    ]
    terminated = fragment([0], [0], End.TERMINATED, finals[0])
    rows = gae_of(*fragments, terminated, value_fn=value_fn)
    assert [row["advantage"].item() for row in rows] == [1.0, 2.0, 3.0, 0.0]
    assert calls == [(4, 3)]  # three rows, padded to a power of two; none for the terminated one


def test_a_given_final_value_goes_before_value_fn() -> None:
    final = {"obs": np.zeros(2, np.float32), "value": np.float32(W)}

    def value_fn(obs: Any) -> Any:
        raise AssertionError(f"asked for {obs}")

    (rows,) = gae_of(fragment([0], [0], End.TRUNCATED, final), value_fn=value_fn)
    assert rows["advantage"].item() == T * W


def test_values_may_have_axes_of_their_own() -> None:
    final = {"value": np.array([4, 8], np.float32)}
    (rows,) = gae_of(fragment([[1, 1], [2, 2]], [[10, 10], [20, 20]], End.TRUNCATED, final))
    assert_array_equal(rows["advantage"], np.array([[-1, -0.75], [-16, -14]], np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_added_leaves_have_the_values_dtype(dtype: Any) -> None:
    (rows,) = gae_of(fragment([1, 2], [10, 20], End.TERMINATED, dtype=dtype))
    assert rows["advantage"].dtype == rows["value_target"].dtype == dtype


def test_the_pushed_leaves_are_kept_as_they_were() -> None:
    given_rows = fragment([1, 2], [10, 20], End.TERMINATED)
    (rows,) = gae_of(given_rows)
    assert set(rows) == {"reward", "value", "advantage", "value_target"}
    assert rows["reward"] is given_rows.rows["reward"]
    assert set(given_rows.rows) == {"reward", "value"}


def test_no_fragments_stay_none() -> None:
    assert run_hook(GAE(), []) == []
    assert run_hook(Returns(), []) == []


# --- against an oracle ---------------------------------------------------------------------------------------------


def oracle_gae(f: Fragment, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Each advantage as the sum of its own discounted δs, from the definition; no recursion shared with the hook."""
    reward, value = f.rows["reward"].tolist(), f.rows["value"].tolist()
    n = len(reward)
    after = f.final["value"].item() if f.final is not None and f.end in (End.TRUNCATED, End.OPEN) else 0.0
    delta = [reward[t] + gamma * (value[t + 1] if t + 1 < n else after) - value[t] for t in range(n)]
    if f.end is End.CUT:
        delta[-1] = 0.0
    advantage: list[float] = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    return advantage, [a + v for a, v in zip(advantage, value, strict=True)]


def oracle_return(f: Fragment, gamma: float) -> list[float]:
    reward = f.rows["reward"].tolist()
    after = f.final["value"].item() if f.final is not None and f.end in (End.TRUNCATED, End.OPEN) else 0.0
    n = len(reward)
    return [sum(gamma ** (k - t) * reward[k] for k in range(t, n)) + gamma ** (n - t) * after for t in range(n)]


numbers = st.floats(-8, 8, width=32)


@st.composite
def fragments_of_a_unit(draw: Any) -> list[Fragment]:
    made = []
    for lane in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 9))
        pairs = draw(st.lists(st.tuples(numbers, numbers), min_size=length, max_size=length))
        end = draw(st.sampled_from(list(End)))
        needs = end in (End.TRUNCATED, End.OPEN)
        final = value_of(draw(numbers)) if needs or draw(st.booleans()) else None
        made.append(fragment([r for r, _ in pairs], [v for _, v in pairs], end, final, lane, np.float64))
    return made


rates = st.floats(0, 1)


@given(fragments_of_a_unit(), rates, rates)
def test_gae_equals_the_definition_for_every_mix_of_ends(unit: list[Fragment], gamma: float, lam: float) -> None:
    done = run_hook(GAE(gamma, lam), unit)
    for given_fragment, got in zip(unit, done, strict=True):
        advantage, target = oracle_gae(given_fragment, gamma, lam)
        assert_allclose(got.rows["advantage"], advantage, rtol=1e-9, atol=1e-9)
        assert_allclose(got.rows["value_target"], target, rtol=1e-9, atol=1e-9)
        assert (got.end, got.lane, got.final) == (given_fragment.end, given_fragment.lane, given_fragment.final)


@given(fragments_of_a_unit(), rates)
def test_returns_equal_the_definition_for_every_mix_of_ends(unit: list[Fragment], gamma: float) -> None:
    for given_fragment, got in zip(unit, run_hook(Returns(gamma), unit), strict=True):
        assert_allclose(got.rows["return"], oracle_return(given_fragment, gamma), rtol=1e-5, atol=1e-5)


@given(fragments_of_a_unit())
def test_a_fragments_advantage_doesnt_depend_on_the_others(unit: list[Fragment]) -> None:
    together = run_hook(GAE(), unit)
    for alone, among in zip(unit, together, strict=True):
        (by_itself,) = run_hook(GAE(), [alone])
        assert_array_equal(by_itself.rows["advantage"], among.rows["advantage"])


def test_with_lam_one_the_target_is_the_return() -> None:
    unit = [fragment([1, 2, 3], [7, 8, 9], End.TERMINATED), fragment([4, 5], [1, 2], End.OPEN, value_of(W), 1)]
    both = run_hook(Returns(gamma=T), run_hook(GAE(gamma=T, lam=1.0), unit))
    for f in both:
        assert_allclose(f.rows["value_target"], f.rows["return"], rtol=1e-6)


# --- returns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [End.TRUNCATED, End.OPEN, End.CUT])
def test_a_return_without_a_value_of_what_follows_is_the_rewards_seen(end: End) -> None:
    (f,) = run_hook(Returns(gamma=T), [fragment([1, 2], [0, 0], end)])
    assert_array_equal(f.rows["return"], np.array([2, 2], np.float32))


def test_a_return_needs_no_value_leaf() -> None:
    rows = {"reward": np.array([1, 2], np.float32)}
    (f,) = run_hook(Returns(gamma=T), [Fragment(rows, End.TERMINATED, None, 0, np.zeros(2, np.int64))])
    assert_array_equal(f.rows["return"], np.array([2, 2], np.float32))


# --- bad input -----------------------------------------------------------------------------------------------------


def refused(*fragments: Fragment, **knobs: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        gae_of(*fragments, **knobs)
    return str(caught.value)


def test_an_open_edge_without_a_bootstrap_says_what_would_work() -> None:
    message = refused(fragment([1, 2], [0, 0], End.OPEN, lane=3))
    assert "lane 3" in message
    assert 'end_unit(bootstrap={"value"' in message
    assert "value_fn" in message


def test_a_truncation_without_a_value_names_what_its_final_has() -> None:
    message = refused(fragment([1], [0], End.TRUNCATED, {"obs": np.zeros(2)}))
    assert "its final has 'obs'" in message
    assert "final={" in message


@pytest.mark.parametrize(
    ("rows", "knobs", "says"),
    [
        ({"reward": np.ones(2, np.float32)}, {}, "no leaf 'value'; the rows have 'reward'"),
        ({"value": np.ones(2, np.float32)}, {}, "no leaf 'reward'"),
        ({"reward": np.ones(2, np.float32), "value": np.ones((2, 1), np.float32)}, {}, "drop the critic's last axis"),
        ({"reward": np.ones(2, np.float32), "value": np.ones(2, np.int32)}, {}, "int32; expected a floating one"),
        ({"reward": np.ones(2, np.float32), "v": np.ones(2, np.float32)}, {"value": "w"}, "no leaf 'w'"),
        (
            {"reward": np.ones(2, np.float32), "value": np.ones(2, np.float32), "advantage": np.ones(2)},
            {},
            "'advantage', which the rows already have",
        ),
    ],
)
def test_rows_it_cannot_use_are_refused_by_name(rows: Any, knobs: Any, says: str) -> None:
    assert says in refused(Fragment(rows, End.TERMINATED, None, 0, np.zeros(2, np.int64)), **knobs)


def test_a_final_value_of_another_shape_is_refused() -> None:
    assert "shape (1,); expected ()" in refused(fragment([1], [0], End.OPEN, {"value": np.zeros(1, np.float32)}))


def test_value_fn_must_give_a_value_a_row() -> None:
    final = {"obs": np.zeros(3, np.float32)}
    assert "expected (1,)" in refused(fragment([1], [0], End.OPEN, final), value_fn=lambda obs: obs)


def test_the_value_leaf_may_be_nested() -> None:
    rows = {"reward": np.ones(1, np.float32), "critic": {"v": np.ones(1, np.float32)}}
    f = Fragment(rows, End.TERMINATED, None, 0, np.zeros(1, np.int64))
    (done,) = run_hook(GAE(value="critic/v"), [f])
    assert_array_equal(done.rows["advantage"], np.zeros(1, np.float32))


def test_they_declare_themselves_as_ingestion_hooks_over_trajectories() -> None:
    for hook in check_chain([GAE(), Returns()], "ingestion"):
        assert (hook.per, hook.rows) == ("trajectory", "same")
    with pytest.raises(HookError):
        check_chain([GAE()], "delivery")
