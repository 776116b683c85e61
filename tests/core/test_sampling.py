"""Draws: pure functions with the right frequencies."""

from __future__ import annotations

import tracemalloc
from itertools import permutations
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core.prioritized import Prioritized
from conduit.core.ring import Window
from conduit.core.sampling import Draw, DrawStream, Sampling, Shuffled, Uniform
from conduit.core.starts import Starts
from conduit.errors import PriorityError, SettingError
from tests.core.frequencies import assert_fits
from tests.core.sampler_machine import SamplerMachine, play

CAPACITY = 64


def assert_same(one, other) -> None:
    for name in ("keys", "probability", "weight", "priority"):
        assert np.asarray(getattr(one, name)).tobytes() == np.asarray(getattr(other, name)).tobytes(), name


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
    assert (draw.probability, draw.priority, draw.weight) == (1 / 40, 1.0, None), "the same for all"


@pytest.mark.parametrize("sampling", [Uniform(), Prioritized()])
def test_a_draw_misses_the_rows_it_needs(sampling):
    sampler = sampling.start(8, 0)
    sampler.insert(0, 3, None)
    assert sampler.missing(Window(0, 3), 3, 0) is None
    assert "3 rows are visible and a batch needs 5: push 2 more" in str(sampler.missing(Window(0, 3), 5, 0))


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


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 3, 4, 256, 5000]), st.integers(0, 2)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_fractions_do_not_depend_on_what_was_asked_before(asked):
    stream = DrawStream(5)
    for number, rows, kind in asked:
        if kind == 2:
            stream.at(number).random(3)
            continue
        for following in range(number, number + 3):
            got = stream.fractions(following, rows, kind)
            np.testing.assert_array_equal(got, DrawStream(5).fractions(following, rows, kind))
            assert got.min() >= 0.0
            assert got.max() < 1.0


def test_fractions_of_different_batches_sizes_and_streams_share_no_number():
    stream, seen = DrawStream(0), set()
    asked = [(number, rows, kind) for number in range(20) for rows in (4, 5, 8, 256) for kind in (0, 1)]
    for number, rows, kind in asked:
        seen |= set(stream.fractions(number, rows, kind).tolist())
    assert len(seen) == sum(rows for _, rows, _ in asked)


class UniformMachine(SamplerMachine):
    samplings: ClassVar = (Uniform(), Uniform(replacement=False))

    def drawn(self, draw: Draw, rows: int, sampling: Sampling) -> None:
        assert draw.probability == 1 / len(self.drawable)
        assert sampling == Uniform() or len(set(draw.keys.tolist())) == rows


def test_uniform_holds_against_a_naive_model():
    play(UniformMachine)


def some_of(rows: int, excluded: list[int], with_starts: bool, sampling: Uniform) -> tuple:
    """A sampler over a ring that went round, some of whose rows can't be drawn."""
    starts, window = Starts(rows) if with_starts else None, Window(5, 5 + rows)
    sampler = sampling.start(rows, 0, starts)
    sampler.insert(0, rows, None)
    sampler.insert(rows, 5, None)
    if starts is None:
        sampler.exclude(np.array(excluded, np.int64))
    else:
        starts.admit(np.setdiff1d(np.arange(5, 5 + rows), excluded))
    return sampler, window


@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("sampling", [Uniform(), Uniform(replacement=False)])
def test_uniform_gives_rows_that_can_be_drawn_equal_chance_after_wraps_and_exclusions(sampling, with_starts):
    excluded = [5, 6, 20, 33, 44]
    sampler, window = some_of(40, excluded, with_starts, sampling)
    keys = np.concatenate([sampler.draw(number, 10, window).keys for number in range(3000)])
    values, counts = np.unique(keys, return_counts=True)
    assert values.tolist() == np.setdiff1d(np.arange(5, 45), excluded).tolist()
    assert_fits(counts, np.full(35, 1 / 35))
    words = (
        "35 of 40 visible rows can start" if with_starts else "35 rows are visible and a batch needs 36: push 1 more"
    )
    assert words in str(sampler.missing(window, 36, 0))


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("with_starts", [None, False, True], ids=["all", "excluded", "starts"])
def test_without_replacement_every_choice_in_every_order_is_equally_likely(rows, with_starts):
    sampler, window = some_of(6, [] if with_starts is None else [5, 9], bool(with_starts), Uniform(replacement=False))
    allowed = [5, 6, 7, 8, 9, 10] if with_starts is None else [6, 7, 8, 10]
    every = {order: place for place, order in enumerate(permutations(allowed, rows))}
    draws = 40 * len(every) if len(every) > 100 else 6000
    counts = np.zeros(len(every), np.int64)
    for number in range(draws):
        counts[every[tuple(sampler.draw(number, rows, window).keys.tolist())]] += 1
    assert_fits(counts, np.full(len(every), 1 / len(every)))


@pytest.mark.parametrize("with_starts", [False, True])
def test_without_replacement_a_batch_may_be_all_rows(with_starts):
    sampler, window = some_of(3000, [7, 8], with_starts, Uniform(replacement=False))
    for rows in (100, 1499, 1500, 2998):
        keys = sampler.draw(0, rows, window).keys
        assert len(np.unique(keys)) == len(keys) == rows
    assert np.setdiff1d(np.arange(5, 3005), keys).tolist() == [7, 8]


def test_without_replacement_a_draw_takes_no_memory_that_grows_with_the_rows():
    sampler, window = Uniform(replacement=False).start(10**8, 0), Window(0, 10**8)
    sampler.draw(0, 256, window)
    tracemalloc.start()
    try:
        for number in range(20):
            assert len(np.unique(sampler.draw(number, 256, window).keys)) == 256
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sampling", [Uniform(replacement=False)])
def test_distinct_draws_do_not_depend_on_the_draws_before(sampling):
    one, other, window = sampling.start(64, 3), sampling.start(64, 3), Window(0, 64)
    for number in (5, 0, 2):
        one.draw(number, 60, window)
    for number in range(6):
        assert_same(one.draw(number, 20, window), other.draw(number, 20, window))


@pytest.mark.parametrize("replacement", [None, 1, "no"])
def test_replacement_is_true_or_false(replacement):
    with pytest.raises(SettingError, match=r"Uniform\(replacement=.*expected True or False"):
        Uniform(replacement=replacement)


def test_shuffled_goes_on_from_a_checkpoint():
    window, one = Window(0, 12), Shuffled(12, 3, 2).start(12, 4)
    one.draw(0, 3, window)
    other = Shuffled(12, 3, 2).start(12, 4)
    other.load(one.state(window), window)
    for number in range(1, 8):
        assert_same(one.draw(number, 3, window), other.draw(number, 3, window))


@pytest.mark.parametrize("sampling", [Uniform(), Uniform(replacement=False)])
def test_that_rows_once_left_is_forgotten_when_others_have_their_slots(sampling):
    """Or a restored sampler, which never heard of it, would draw others."""
    one, other, window = sampling.start(8, 3), sampling.start(8, 3), Window(0, 8)
    one.insert(0, 8, None)
    one.exclude(np.array([2, 5]))
    one.insert(5, 1, None)
    one.insert(2, 1, None)
    other.load(one.state(window), window)
    for number in range(5):
        assert_same(one.draw(number, 3, window), other.draw(number, 3, window))
