"""Draws: pure functions with the right frequencies, weights and priorities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core.prioritized import Prioritized
from conduit.core.ring import Window
from conduit.core.sampling import DrawStream, Sampler, Shuffled, Uniform
from conduit.errors import PriorityError, SettingError

CAPACITY = 64


def prioritized(raw: np.ndarray | None = None, seed: int = 0, capacity: int = CAPACITY, **settings) -> Sampler:
    sampler = Prioritized(**settings).start(capacity, seed)
    sampler.insert(0, capacity, raw)
    return sampler


def assert_same(one, other) -> None:
    for name in ("keys", "probability", "weight", "priority"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name


def assert_fits(counts: np.ndarray, probability: np.ndarray) -> None:
    """Chi-square at 0.1 %, its quantile by Wilson and Hilferty."""
    assert len(counts) == len(probability)
    expected = counts.sum() * probability
    free = len(counts) - 1
    most = free * (1 - 2 / (9 * free) + 3.09 * np.sqrt(2 / (9 * free))) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < most


@pytest.mark.parametrize("sampling", [Uniform(), Prioritized(), Prioritized(alpha=0.0)])
def test_a_draw_does_not_depend_on_the_draws_before_it(sampling):
    window = Window(100, 100 + CAPACITY)
    fresh = []
    for number in range(5):
        sampler = sampling.start(CAPACITY, 7)
        sampler.insert(100, CAPACITY, None)
        fresh.append(sampler.draw(number, 16, window))
    sampler = sampling.start(CAPACITY, 7)
    sampler.insert(100, CAPACITY, None)
    for number in (4, 0, 3, 3, 1, 2, 0, 4):
        sampler.draw(number, 5, Window(110, 120), stream=1)
        assert_same(sampler.draw(number, 16, window), fresh[number])


@pytest.mark.parametrize("sampling", [Uniform(), Prioritized()])
def test_seeds_numbers_and_streams_give_different_rows(sampling):
    drawn = set()
    for seed in range(3):
        sampler = sampling.start(CAPACITY, seed)
        sampler.insert(0, CAPACITY, None)
        for number in (0, 1, 2, 10**9):
            drawn |= {sampler.draw(number, 32, Window(0, CAPACITY), stream).keys.tobytes() for stream in (0, 1)}
    assert len(drawn) == 3 * 4 * 2


def test_neighbouring_numbers_and_streams_are_independent():
    stream = DrawStream(3)
    drawn = np.stack([stream.at(number, which).random(4000) for which in (0, 1) for number in range(6)])
    off_diagonal = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(4000)
    assert len(np.unique(drawn)) == drawn.size


def test_a_stream_is_the_same_after_any_use_of_it():
    stream, other = DrawStream(5), DrawStream(5)
    other.at(9, 1).integers(0, 100, 7)
    other.at(9).standard_normal(3)
    np.testing.assert_array_equal(stream.at(2).integers(0, 100, 9), other.at(2).integers(0, 100, 9))


def test_uniform_gives_every_live_row_equal_chance():
    sampler, window = Uniform().start(CAPACITY, 0), Window(1000, 1040)
    keys = np.concatenate([sampler.draw(number, 100, window).keys for number in range(1000)])
    assert_fits(np.bincount(keys - window.first, minlength=40), np.full(40, 1 / 40))
    draw = sampler.draw(0, 100, window)
    assert set(draw.probability) == {1 / 40}
    assert set(draw.weight) == {1.0}
    assert draw.weight.dtype == np.float32


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_prioritized_draws_in_proportion_to_priority_to_the_alpha_once(alpha):
    raw = np.linspace(0.5, 20.0, CAPACITY)
    sampler = prioritized(raw, alpha=alpha)
    # One row a draw: no strata, so counts are multinomial.
    keys = np.concatenate([sampler.draw(number, 1, Window(0, CAPACITY)).keys for number in range(30_000)])
    expected = raw**alpha / (raw**alpha).sum()
    assert_fits(np.bincount(keys, minlength=CAPACITY), expected)


def test_strata_spread_a_batch_evenly_over_the_priorities_in_random_order():
    raw = np.linspace(1.0, 5.0, CAPACITY)
    draw = prioritized(raw, alpha=1.0).draw(3, 1000, Window(0, CAPACITY))
    expected = 1000 * raw / raw.sum()
    assert np.abs(np.bincount(draw.keys, minlength=CAPACITY) - expected).max() <= 2.0
    steps = np.diff(draw.keys)
    assert 0.3 < (steps < 0).mean() < 0.7


def test_probability_weight_and_priority_follow_their_formulas():
    raw = np.random.default_rng(1).uniform(0.1, 9.0, CAPACITY)
    draw = prioritized(raw, alpha=0.7, beta=0.3).draw(0, 200, Window(0, CAPACITY))
    p = raw**0.7 / sum(float(r) ** 0.7 for r in raw)
    weight = np.array([(1.0 / (CAPACITY * p[key])) ** 0.3 for key in draw.keys])
    np.testing.assert_allclose(draw.probability, p[draw.keys], rtol=1e-12)
    np.testing.assert_allclose(draw.weight, weight / weight.max(), rtol=1e-6)
    np.testing.assert_array_equal(draw.priority, raw[draw.keys])
    assert draw.weight.max() == 1.0


@pytest.mark.parametrize(("beta", "expected"), [(lambda n: -3.0, 0.0), (lambda n: 7.5, 1.0), (lambda n: n / 10, 0.5)])
def test_a_beta_schedule_is_clamped_and_gets_the_batch_number(beta, expected):
    assert Prioritized(beta=beta).beta_at(5) == expected


def test_a_beta_schedule_that_gives_nan_is_refused_with_the_batch_number():
    sampler = prioritized(beta=lambda number: float("nan"))
    with pytest.raises(SettingError, match=r"gave nan for batch 12"):
        sampler.draw(12, 4, Window(0, CAPACITY))


def test_an_update_adds_eps_once_and_a_push_does_not():
    sampler = prioritized(np.full(CAPACITY, 2.0), alpha=1.0, eps=0.25)
    sampler.update(np.array([3]), np.array([10.0]))
    draw = sampler.draw(0, 2000, Window(0, CAPACITY))
    assert set(draw.priority[draw.keys == 3]) == {10.25}
    assert set(draw.priority[draw.keys != 3]) == {2.0}


def priority_of(sampler: Sampler, key: int, window: Window) -> float:
    draw = sampler.draw(0, 4000, window)
    return float(draw.priority[draw.keys == key][0])


@pytest.mark.parametrize(("new", "expected"), [("max", [1.0, 8.0, 8.0]), (2.5, [2.5, 2.5, 2.5])])
def test_a_new_row_gets_the_highest_priority_so_far_or_the_one_declared(new, expected):
    sampler = Prioritized(new=new, eps=0.0, alpha=0.1).start(4, 0)
    sampler.insert(0, 2, None)
    assert priority_of(sampler, 1, Window(0, 2)) == expected[0]
    sampler.update(np.array([0, 0]), np.array([8.0, 3.0]))
    sampler.insert(2, 1, None)
    assert priority_of(sampler, 2, Window(0, 3)) == expected[1]
    sampler.update(np.array([0, 1, 2]), np.full(3, 0.5))
    sampler.insert(3, 1, None)
    assert priority_of(sampler, 3, Window(0, 4)) == expected[2]


def test_a_pushed_priority_overrides_the_default_and_nan_leaves_it():
    sampler = Prioritized(new=3.0, alpha=0.2).start(4, 0)
    sampler.insert(0, 4, np.array([7.0, np.nan, 0.5, np.nan]))
    assert [priority_of(sampler, key, Window(0, 4)) for key in range(4)] == [7.0, 3.0, 0.5, 3.0]


def test_a_pushed_priority_raises_what_max_means():
    sampler = Prioritized(alpha=0.2).start(4, 0)
    sampler.insert(0, 1, np.array([50.0]))
    sampler.insert(1, 1, None)
    assert priority_of(sampler, 1, Window(0, 2)) == 50.0


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_only_an_explicit_zero_disables_a_row(alpha):
    raw = np.full(CAPACITY, 1e-9)
    raw[::2] = 0.0
    sampler = prioritized(raw, alpha=alpha)
    keys = sampler.draw(0, 5000, Window(0, CAPACITY)).keys
    assert set(keys) == set(range(1, CAPACITY, 2))
    sampler.update(np.arange(1, CAPACITY, 2), np.zeros(CAPACITY // 2))
    assert set(sampler.draw(1, 5000, Window(0, CAPACITY)).keys) == set(range(1, CAPACITY, 2)), "eps keeps them drawable"


def test_rows_that_are_all_disabled_are_named_as_what_is_missing():
    sampler = prioritized(np.zeros(CAPACITY))
    assert "priority 0" in str(sampler.missing(Window(0, CAPACITY), 4, 0))


@pytest.mark.parametrize("sampling", [Uniform(), Prioritized()])
def test_a_draw_misses_the_rows_it_needs(sampling):
    sampler = sampling.start(8, 0)
    sampler.insert(0, 3, None)
    assert sampler.missing(Window(0, 3), 3, 0) is None
    assert "3 rows are visible and a batch needs 5: push 2 more" in str(sampler.missing(Window(0, 3), 5, 0))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12))
def test_priorities_follow_their_rows_round_the_ring(capacity, pushes):
    """Against a plain dict from key to priority."""
    sampler, plain, stop = Prioritized(alpha=1.0, eps=0.0).start(capacity, 0), {}, 0
    random = np.random.default_rng(capacity)
    for rows, update in pushes:
        rows = min(rows, capacity)
        raw = random.integers(1, 9, rows).astype(float)
        sampler.insert(stop, rows, raw)
        plain |= dict(zip(range(stop, stop + rows), raw.tolist(), strict=True))
        stop += rows
        window = Window(max(0, stop - capacity), stop)
        if update:
            keys = random.integers(window.first, window.stop, 3)
            sampler.update(keys, (keys + 1).astype(np.float64))
            plain |= {int(key): key + 1.0 for key in keys}
        draw = sampler.draw(stop, 50, window)
        assert ((draw.keys >= window.first) & (draw.keys < window.stop)).all()
        live = sum(plain[key] for key in range(window.first, window.stop))
        np.testing.assert_allclose(draw.probability, [plain[int(key)] / live for key in draw.keys])
        assert draw.priority.tolist() == [plain[int(key)] for key in draw.keys]


def test_extreme_priorities_give_finite_probabilities_and_weights():
    raw = np.geomspace(1e-300, 1e300, CAPACITY)
    for alpha in (0.3, 1.0):
        for number in range(50):
            draw = prioritized(raw, alpha=alpha, beta=1.0).draw(number, 64, Window(0, CAPACITY))
            assert (draw.probability > 0).all()
            assert np.isfinite(draw.weight).all()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("alpha", -0.1), ("alpha", np.nan), ("alpha", np.inf), ("beta", 1.5), ("beta", -0.1), ("eps", -1.0),
     ("eps", np.inf), ("new", 0.0), ("new", -1.0), ("new", np.nan), ("new", "mean"), ("alpha", "1"), ("beta", None)],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_by_name_and_value(setting, value):
    with pytest.raises(SettingError, match=rf"{setting}=.*{value}.*expected"):
        Prioritized(**{setting: value})


@pytest.mark.parametrize(("unit", "batch", "epochs"), [(1, 1, 1), (6, 2, 3), (8, 8, 2), (12, 3, 1)])
def test_shuffled_gives_each_row_exactly_epochs_times_in_a_new_order_each_pass(unit, batch, epochs):
    sampler = Shuffled(unit, batch, epochs).start(unit, 0)
    orders = set()
    for iteration in range(3):
        window = Window(iteration * unit, (iteration + 1) * unit)
        per_iteration = unit // batch * epochs
        numbers = range(iteration * per_iteration, (iteration + 1) * per_iteration)
        assert all(sampler.missing(window, batch, number) is None for number in numbers)
        keys = np.concatenate([sampler.draw(number, batch, window).keys for number in numbers])
        assert np.bincount(keys - window.first, minlength=unit).tolist() == [epochs] * unit
        for one_pass in keys.reshape(epochs, unit) - window.first:
            assert sorted(one_pass) == list(range(unit))
            orders.add(one_pass.tobytes())
    assert unit < 6 or len(orders) == 3 * epochs


def test_shuffled_draws_any_number_in_any_order_alike():
    window = Window(0, 12)
    expected = [Shuffled(12, 3, 2).start(12, 4).draw(number, 3, window).keys.tolist() for number in range(8)]
    sampler = Shuffled(12, 3, 2).start(12, 4)
    for number in (7, 0, 3, 7, 1, 2, 6, 5, 4):
        assert sampler.draw(number, 3, window).keys.tolist() == expected[number]


def test_shuffled_says_which_iteration_is_missing():
    sampler = Shuffled(4, 2, 1).start(4, 0)
    assert "iteration 0 has 3 of its 4 rows" in str(sampler.missing(Window(0, 3), 2, 0))
    assert "advance() and push iteration 1" in str(sampler.missing(Window(0, 4), 2, 2))


@pytest.mark.parametrize("sampling", [Uniform(), Shuffled(4, 2, 1)])
def test_a_sampler_without_priorities_refuses_updates(sampling):
    with pytest.raises(PriorityError, match="priorities"):
        sampling.start(4, 0).update(np.array([0]), np.array([1.0]))
