"""Prioritized draws: the right frequencies, weights and priorities; in NumPy, and compiled."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core.prioritized import Prioritized
from conduit.core.ring import Window
from conduit.core.sampling import Draw, Sampler
from conduit.core.starts import Starts
from conduit.errors import SettingError
from tests.core.frequencies import assert_fits
from tests.core.sampler_machine import SamplerMachine, play

CAPACITY = 64
has_numba = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not has_numba, reason="numba isn't installed")


@pytest.fixture(scope="module", autouse=True, params=["numpy", pytest.param("numba", marks=needs_numba)])
def _path(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONDUIT_NUMBA", "1" if request.param == "numba" else "0")
        yield


def prioritized(raw: np.ndarray | None = None, seed: int = 0, capacity: int = CAPACITY, **settings) -> Sampler:
    sampler = Prioritized(**settings).start(capacity, seed)
    sampler.insert(0, capacity, raw)
    return sampler


def drawn(sampler: Sampler, number: int, rows: int, window: Window) -> Any:
    """A draw, of which all is arrays."""
    return sampler.draw(number, rows, window)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_prioritized_draws_in_proportion_to_priority_to_the_alpha_once(alpha):
    raw = np.linspace(0.5, 20.0, CAPACITY)
    sampler = prioritized(raw, alpha=alpha)
    # One row a draw: no strata, so counts are multinomial.
    keys = np.concatenate([drawn(sampler, number, 1, Window(0, CAPACITY)).keys for number in range(30_000)])
    expected = raw**alpha / (raw**alpha).sum()
    assert_fits(np.bincount(keys, minlength=CAPACITY), expected)


def test_strata_spread_a_batch_evenly_over_the_priorities_in_random_order():
    raw = np.linspace(1.0, 5.0, CAPACITY)
    draw = drawn(prioritized(raw, alpha=1.0), 3, 1000, Window(0, CAPACITY))
    expected = 1000 * raw / raw.sum()
    assert np.abs(np.bincount(draw.keys, minlength=CAPACITY) - expected).max() <= 2.0
    steps = np.diff(draw.keys)
    assert 0.3 < (steps < 0).mean() < 0.7


def test_probability_weight_and_priority_follow_their_formulas():
    raw = np.random.default_rng(1).uniform(0.1, 9.0, CAPACITY)
    draw = drawn(prioritized(raw, alpha=0.7, beta=0.3), 0, 200, Window(0, CAPACITY))
    p = raw**0.7 / sum(float(r) ** 0.7 for r in raw)
    weight = np.array([(1.0 / (CAPACITY * p[key])) ** 0.3 for key in draw.keys])
    np.testing.assert_allclose(draw.probability, p[draw.keys], rtol=1e-12)
    np.testing.assert_allclose(draw.weight / draw.weight.max(), weight / weight.max(), rtol=1e-12)
    np.testing.assert_array_equal(draw.priority, raw[draw.keys])


@pytest.mark.parametrize(("beta", "expected"), [(lambda n: -3.0, 0.0), (lambda n: 7.5, 1.0), (lambda n: n / 10, 0.5)])
def test_a_beta_schedule_is_clamped_and_gets_the_batch_number(beta, expected):
    assert Prioritized(beta=beta).beta_at(5) == expected


def test_a_beta_schedule_that_gives_nan_is_refused_with_the_batch_number():
    sampler = prioritized(beta=lambda number: float("nan"))
    with pytest.raises(SettingError, match=r"gave nan for batch 12, which stops a store"):
        drawn(sampler, 12, 4, Window(0, CAPACITY))


def test_an_update_adds_eps_once_and_a_push_does_not():
    sampler = prioritized(np.full(CAPACITY, 2.0), alpha=1.0, eps=0.25)
    sampler.update(np.array([3]), np.array([10.0]))
    draw = drawn(sampler, 0, 2000, Window(0, CAPACITY))
    assert set(draw.priority[draw.keys == 3]) == {10.25}
    assert set(draw.priority[draw.keys != 3]) == {2.0}


def priority_of(sampler: Sampler, key: int, window: Window) -> float:
    draw = drawn(sampler, 0, 4000, window)
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


def test_pushes_that_are_ingested_together_get_the_priorities_that_they_get_one_by_one():
    given = [np.nan, 4.0, np.nan, 2.0, np.nan, 9.0, np.nan]
    together, alone = (Prioritized(alpha=0.2).start(8, 0) for _ in range(2))
    together.insert(0, len(given), np.array(given))
    for key, raw in enumerate(given):
        alone.insert(key, 1, None if np.isnan(raw) else np.array([raw]))
    for sampler in (together, alone):
        sampler.insert(7, 1, None)
        priorities = [priority_of(sampler, key, Window(0, 8)) for key in range(8)]
        assert priorities == [1.0, 4.0, 4.0, 2.0, 4.0, 9.0, 9.0, 9.0]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_only_an_explicit_zero_disables_a_row(alpha):
    raw = np.full(CAPACITY, 1e-9)
    raw[::2] = 0.0
    sampler = prioritized(raw, alpha=alpha)
    keys = drawn(sampler, 0, 5000, Window(0, CAPACITY)).keys
    assert set(keys) == set(range(1, CAPACITY, 2))
    sampler.update(np.arange(1, CAPACITY, 2), np.zeros(CAPACITY // 2))
    assert set(drawn(sampler, 1, 5000, Window(0, CAPACITY)).keys) == set(range(1, CAPACITY, 2)), (
        "eps keeps them drawable"
    )


def test_rows_that_are_all_disabled_are_named_as_what_is_missing():
    sampler = prioritized(np.zeros(CAPACITY))
    assert "priority 0" in str(sampler.missing(Window(0, CAPACITY), 4, 0))


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
        draw = drawn(sampler, stop, 50, window)
        assert ((draw.keys >= window.first) & (draw.keys < window.stop)).all()
        live = sum(plain[key] for key in range(window.first, window.stop))
        np.testing.assert_allclose(draw.probability, [plain[int(key)] / live for key in draw.keys])
        assert draw.priority.tolist() == [plain[int(key)] for key in draw.keys]


def test_extreme_priorities_give_finite_probabilities_and_weights():
    raw = np.geomspace(1e-300, 1e300, CAPACITY)
    for alpha in (0.3, 1.0):
        for number in range(50):
            draw = drawn(prioritized(raw, alpha=alpha, beta=1.0), number, 64, Window(0, CAPACITY))
            assert (draw.probability > 0).all()
            assert np.isfinite(draw.weight).all()
            assert (draw.weight > 0).all()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("alpha", -0.1), ("alpha", np.nan), ("alpha", np.inf), ("beta", 1.5), ("beta", -0.1), ("eps", -1.0),
     ("eps", np.inf), ("new", 0.0), ("new", -1.0), ("new", np.nan), ("new", "mean"), ("alpha", "1"), ("beta", None)],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused_by_name_and_value(setting, value):
    with pytest.raises(SettingError, match=rf"{setting}=.*{value}.*expected"):
        Prioritized(**{setting: value})


def chances(leaves: np.ndarray) -> np.ndarray:
    return leaves / leaves.sum()


def admit(starts: Starts, sampler: Sampler, keys: np.ndarray) -> None:
    starts.admit(keys)
    sampler.admit(keys)


def assert_in_proportion(sampler: Sampler, chance: np.ndarray) -> None:
    """Over 10^6 draws in batches of 10^4, rows come as often as `chance` says, and scatter as little as strata let them."""
    batch, batches, rows = 10_000, 100, len(chance)
    keys = np.concatenate([drawn(sampler, number, batch, Window(0, rows)).keys for number in range(batches)])
    counts = np.bincount(keys, minlength=rows)
    assert len(counts) == rows
    assert not counts[chance == 0.0].any()
    some = chance > 0.0
    assert_fits(counts[some], chance[some])
    # What varies are the strata that a row shares with others: each gives it the share that it has of it.
    stop = np.cumsum(chance) * batch
    start = stop - chance * batch
    first, last = np.floor(start), np.floor(stop)
    shared = np.where(first == last, [stop - start, 0 * stop], [first + 1 - start, stop - last])
    variance = (shared * (1 - shared)).sum(axis=0)
    error = (counts - batches * batch * chance)[some] / np.sqrt(batches * variance[some])
    assert 0.9 < (error**2).mean() < 1.1


@pytest.mark.parametrize("rows", [6000, 140_000])
def test_over_a_million_draws_rows_come_as_often_as_their_priorities_say(rows):
    raw = np.exp(np.random.default_rng(4).normal(0.0, 1.0, rows))
    assert_in_proportion(prioritized(raw, capacity=rows, alpha=0.6), chances(raw**0.6))


def test_over_a_million_draws_disabled_rows_never_come_and_others_as_often_as_they_should():
    random = np.random.default_rng(5)
    raw = np.exp(random.normal(0.0, 1.0, 6000)) * (random.random(6000) < 0.4)
    raw[-100:] = 0.0
    assert_in_proportion(prioritized(raw, capacity=6000, alpha=0.7), chances(raw**0.7 * (raw > 0.0)))


def test_over_a_million_draws_only_rows_that_may_start_an_entry_come():
    random = np.random.default_rng(6)
    starts = Starts(6000)
    sampler = Prioritized(alpha=0.5, eps=0.0).start(6000, 0, starts)
    raw = random.uniform(0.1, 9.0, 6000)
    sampler.insert(0, 6000, raw)
    some = random.random(6000) < 0.5
    admit(starts, sampler, np.flatnonzero(some))
    sampler.update(np.arange(0, 6000, 3), raw[::3])
    assert_in_proportion(sampler, chances(raw**0.5 * some))


def test_every_place_in_a_batch_gives_each_row_with_its_chance():
    raw = np.linspace(0.5, 20.0, CAPACITY)
    sampler = prioritized(raw, alpha=1.0)
    keys = np.stack([drawn(sampler, number, 8, Window(0, CAPACITY)).keys for number in range(20_000)])
    for place in (0, 3, 7):
        assert_fits(np.bincount(keys[:, place], minlength=CAPACITY), chances(raw))


def everything(sampler: Sampler, window: Window, draws: int = 20) -> list[Any]:
    return [drawn(sampler, number, 512, window) for number in range(draws)]


def test_rows_that_may_not_start_an_entry_keep_their_priorities_until_they_may():
    starts, window = Starts(4), Window(0, 4)
    sampler = Prioritized(alpha=1.0, eps=0.0).start(4, 0, starts)
    sampler.insert(0, 4, np.array([1.0, 2.0, 3.0, 4.0]))
    admit(starts, sampler, np.array([0, 1]))
    sampler.update(np.array([1, 2]), np.array([5.0, 7.0]))
    assert set(drawn(sampler, 0, 500, window).keys) == {0, 1}
    sampler.exclude(starts.exclude(np.array([0])))
    admit(starts, sampler, np.array([2]))
    draw = drawn(sampler, 1, 500, window)
    assert dict(zip(draw.keys.tolist(), draw.priority.tolist(), strict=True)) == {1: 5.0, 2: 7.0}
    np.testing.assert_allclose(draw.probability, draw.priority / 12.0)


def test_a_row_that_takes_an_evicted_ones_slot_has_to_be_admitted_anew():
    starts = Starts(4)
    sampler = Prioritized().start(4, 0, starts)
    sampler.insert(0, 4, None)
    admit(starts, sampler, np.arange(4))
    starts.evict(0, 2)
    sampler.insert(4, 2, None)
    assert set(drawn(sampler, 0, 500, Window(2, 6)).keys) == {2, 3}
    sampler.update(np.array([4]), np.array([100.0]))
    assert set(drawn(sampler, 1, 500, Window(2, 6)).keys) == {2, 3}


@pytest.mark.parametrize("capacity", [3, 5000, 200_000])
def test_no_draw_gives_a_row_that_has_not_come(capacity):
    """flashbax#52 and pytorch/rl#2230: rows of zeros, and an index past the last row."""
    sampler = Prioritized().start(capacity, 0)
    random = np.random.default_rng(0)
    rows = capacity // 2 + 1
    sampler.insert(0, rows, None)
    for number in range(100):
        draw = drawn(sampler, number, 512, Window(0, rows))
        assert ((draw.keys >= 0) & (draw.keys < rows)).all()
        assert (draw.probability > 0.0).all()
        sampler.update(draw.keys, 10.0 ** random.uniform(-12, 12, 512))


@pytest.mark.parametrize("new", ["max", 4.0])
def test_alpha_is_applied_once_to_rows_that_come_without_a_priority(new):
    """pytorch/rl#3925: new rows got the highest leaf as their priority, and alpha a second time."""
    sampler = Prioritized(alpha=0.5, eps=0.0, new=new).start(8, 0)
    sampler.insert(0, 2, np.array([16.0, 4.0]))
    for first in (2, 4, 6):
        sampler.insert(first, 2, None)
    raw = np.array([16.0, 4.0] + 6 * [16.0 if new == "max" else 4.0])
    draw = drawn(sampler, 0, 500, Window(0, 8))
    np.testing.assert_array_equal(draw.priority, raw[draw.keys])
    np.testing.assert_allclose(draw.probability, chances(raw**0.5)[draw.keys])


def test_an_update_of_a_row_leaves_all_others_as_they_are():
    """pytorch/rl#4041: it reached the row that had taken an evicted one's slot. Stale keys don't come to a sampler; live
    ones find their own slots, wherever the ring is."""
    sampler = Prioritized(alpha=1.0, eps=0.0).start(8, 0)
    for first in range(0, 21, 3):
        sampler.insert(first, 3, np.full(3, 2.0))
    sampler.update(np.array([20, 13]), np.array([5.0, 7.0]))
    draw = drawn(sampler, 0, 500, Window(13, 21))
    priority = dict(zip(draw.keys.tolist(), draw.priority.tolist(), strict=True))
    assert priority == dict.fromkeys(range(13, 21), 2.0) | {20: 5.0, 13: 7.0}


def test_numpys_global_generator_has_no_part_in_draws():
    """tianshou draws from it, and so whatever else does changes its batches."""
    told = []
    for seed in (0, 1):
        np.random.seed(seed)
        before = repr(np.random.get_state())
        told.append([draw.keys.tobytes() for draw in everything(prioritized(seed=3), Window(0, CAPACITY))])
        assert repr(np.random.get_state()) == before
    assert told[0] == told[1]


@pytest.mark.parametrize("shape", ["at once", "in pieces", "twice round"])
def test_priorities_are_the_same_however_rows_came(shape):
    random = np.random.default_rng(2)
    capacity = 5000
    raw = random.uniform(0.0, 5.0, 2 * capacity)
    whole, other = (Prioritized().start(capacity, 0) for _ in range(2))
    whole.insert(0, capacity, raw[:capacity])
    whole.insert(capacity, capacity, raw[capacity:])
    first = 0 if shape == "twice round" else capacity
    pieces = 1 if shape == "at once" else 77
    cuts = np.sort(random.integers(first, 2 * capacity, pieces - 1))
    for start, stop in zip([first, *cuts], [*cuts, 2 * capacity], strict=True):
        if start < stop:
            other.insert(int(start), int(stop - start), raw[start:stop])
    for one, two in zip(*(everything(s, Window(capacity, 2 * capacity), 5) for s in (whole, other)), strict=True):
        for name in ("keys", "probability", "weight", "priority"):
            assert getattr(one, name).tobytes() == getattr(two, name).tobytes()


@needs_numba
@pytest.mark.parametrize("_path", ["numpy"], indirect=True)
@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("capacity", [100, 150_000])
def test_compiled_draws_are_numpys_to_the_last_bit(capacity, with_starts, monkeypatch):
    told = []
    for numba in ("0", "1"):
        monkeypatch.setenv("CONDUIT_NUMBA", numba)
        starts, random = Starts(capacity) if with_starts else None, np.random.default_rng(0)
        sampler = Prioritized(beta=0.7).start(capacity, 9, starts)
        sampler.insert(0, capacity, np.exp(random.normal(0, 3, capacity)))
        stop = capacity
        if starts is not None:
            admit(starts, sampler, np.arange(0, capacity, 3))
        for number in range(30):
            rows = int(random.integers(1, 90))
            if starts is not None:
                starts.evict(stop - capacity, rows)
            sampler.insert(stop, rows, None)
            if starts is not None:
                admit(starts, sampler, np.arange(stop, stop + rows, 2))
            stop += rows
            draw = drawn(sampler, number, 256, Window(stop - capacity, stop))
            told.append([getattr(draw, name).tobytes() for name in ("keys", "probability", "weight", "priority")])
            sampler.update(draw.keys, random.exponential(1.0, 256))
    assert told[:30] == told[30:]


class PriorityMachine(SamplerMachine):
    samplings: ClassVar = (Prioritized(alpha=0.5, eps=0.0, new=1.0, beta=1.0),)

    def enough(self, rows: int) -> bool:
        return super().enough(rows) and any(self.rows[key].priority for key in self.drawable)

    def drawn(self, draw: Draw, rows: int, sampling: object) -> None:
        leaf = {key: self.rows[key].priority ** 0.5 for key in self.drawable}
        own = np.array([leaf[key] for key in draw.keys.tolist()])
        np.testing.assert_allclose(draw.probability, own / sum(leaf.values()))
        assert draw.weight is not None
        np.testing.assert_allclose(draw.weight, 1.0 / own)


def test_prioritized_holds_against_a_naive_model():
    play(PriorityMachine)


def test_an_update_of_a_row_that_was_excluded_does_not_bring_it_back():
    """Without Starts, as where a remover took it: the sampler has to know itself."""
    sampler = Prioritized(alpha=1.0, eps=0.0).start(4, 0)
    sampler.insert(0, 4, np.array([1.0, 2.0, 3.0, 4.0]))
    sampler.exclude(np.array([1, 3]))
    sampler.update(np.array([0, 1, 3]), np.array([5.0, 50.0, 70.0]))
    draw = drawn(sampler, 0, 500, Window(0, 4))
    assert dict(zip(draw.keys.tolist(), draw.priority.tolist(), strict=True)) == {0: 5.0, 2: 3.0}
    assert "2 rows are visible and a batch needs 3: push 1 more" in str(sampler.missing(Window(0, 4), 3, 0))
    sampler.insert(3, 1, np.array([8.0]))
    draw = drawn(sampler, 1, 500, Window(0, 4))
    assert dict(zip(draw.keys.tolist(), draw.priority.tolist(), strict=True)) == {0: 5.0, 2: 3.0, 3: 8.0}


@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("capacity", [50, 9000, 150_000])
def test_restored_sums_are_those_that_went_on_to_the_last_bit(capacity, with_starts):
    """Whatever became of rows before, and wherever they lie: draws that follow are the same for ever."""
    random = np.random.default_rng(capacity)
    starts = Starts(capacity) if with_starts else None
    sampler = Prioritized(beta=0.7).start(capacity, 9, starts)
    sampler.insert(0, capacity, np.exp(random.normal(0, 3, capacity)))
    stop = capacity + capacity // 3
    if starts is not None:
        starts.evict(0, capacity // 3)
    sampler.insert(capacity, capacity // 3, None)
    window = Window(stop - capacity, stop)
    if starts is not None:
        admit(starts, sampler, np.arange(window.first, stop, 2))
    keys = random.integers(window.first, stop, 500)
    sampler.update(keys, random.exponential(100.0, 500))
    loaded = Prioritized(beta=0.7).start(capacity, 9, starts)
    loaded.load(sampler.state(window), window)
    for number in range(10):
        draws = [drawn(one, number, 256, window) for one in (sampler, loaded)]
        for name in ("keys", "probability", "weight", "priority"):
            assert getattr(draws[0], name).tobytes() == getattr(draws[1], name).tobytes()
        update = random.exponential(200.0, 256)
        for one in (sampler, loaded):
            one.update(draws[0].keys, update)
        if starts is not None:
            starts.evict(window.first, 7)
        for one in (sampler, loaded):
            one.insert(window.stop, 7, None)
        if starts is not None:
            keys = np.arange(window.stop, window.stop + 5)
            starts.admit(keys)
            for one in (sampler, loaded):
                one.admit(keys)
        window = Window(window.first + 7, window.stop + 7)


@pytest.mark.parametrize(("capacity", "dropped"), [(3000, 0), (7000, 0), (2000, 1000), (5000, 700)])
def test_rows_restored_into_another_ring_are_drawn_as_if_they_had_come_there(capacity, dropped):
    random = np.random.default_rng(1)
    raw = random.uniform(0.0, 5.0, 8000)
    sampler = Prioritized(alpha=0.7, new=2.0).start(3000, 9)
    for first in range(0, 8000, 1000):
        sampler.insert(first, 1000, raw[first : first + 1000])
    window = Window(5000 + dropped, 8000)
    loaded, fresh = (Prioritized(alpha=0.7, new=2.0).start(capacity, 9) for _ in range(2))
    loaded.load(sampler.state(Window(5000, 8000)), window)
    fresh.insert(window.first, len(window), raw[window.first :])
    for one, two in zip(*(everything(s, window, 5) for s in (loaded, fresh)), strict=True):
        for name in ("keys", "probability", "weight", "priority"):
            assert getattr(one, name).tobytes() == getattr(two, name).tobytes()


def test_a_restored_sampler_knows_the_highest_priority_so_far():
    sampler = Prioritized(alpha=0.2).start(4, 0)
    sampler.insert(0, 1, np.array([50.0]))
    sampler.insert(1, 4, np.full(4, 3.0))
    loaded = Prioritized(alpha=0.2).start(4, 0)
    loaded.load(sampler.state(Window(1, 5)), Window(1, 5))
    loaded.insert(5, 1, None)
    assert priority_of(loaded, 5, Window(2, 6)) == 50.0


def test_nothing_saved_is_loaded_as_nothing():
    loaded = Prioritized().start(4, 0)
    loaded.load(Prioritized().start(4, 0).state(Window(0, 0)), Window(0, 0))
    assert "0 rows are visible" in str(loaded.missing(Window(0, 0), 1, 0))
