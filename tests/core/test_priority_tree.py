"""The sums behind prioritized sampling, against plain sums in the order of the leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core.priority_tree import MOST_ROOTS, PriorityTree

SIZES = [1, 2, 3, MOST_ROOTS - 1, MOST_ROOTS, MOST_ROOTS + 1, 3 * MOST_ROOTS + 5]
few = settings(max_examples=60, deadline=None)
leaf = st.one_of(st.just(0.0), st.floats(0.0, 10.0), st.floats(1e-300, 1e300))


def filled(values: np.ndarray) -> PriorityTree:
    tree = PriorityTree(len(values))
    tree.set(np.arange(len(values)), values)
    return tree


def masses(total: float, seed: int, count: int = 500) -> np.ndarray:
    inside = np.random.default_rng(seed).random(count) * total
    return np.concatenate([inside, [0.0, total, np.nextafter(total, 0.0)]])


@pytest.mark.parametrize("size", SIZES)
def test_whole_numbers_are_found_exactly_where_a_cumulative_sum_finds_them(size):
    values = np.random.default_rng(size).integers(0, 4, size).astype(float)
    values[size // 2] = 3.0
    tree, sums = filled(values), np.cumsum(values)
    assert tree.total == sums[-1]
    mass = np.arange(sums[-1])
    np.testing.assert_array_equal(tree.find(mass), np.searchsorted(sums, mass, side="right"))


@few
@given(st.data(), st.sampled_from([1, 2, 7, 100, MOST_ROOTS + 3]), st.integers(0, 99))
def test_no_mass_finds_a_leaf_of_value_zero_whatever_the_magnitudes(data, size, seed):
    values = np.zeros(size)
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=40))
    values[index] = data.draw(st.lists(leaf, min_size=len(index), max_size=len(index)))
    values[data.draw(st.integers(0, size - 1))] = data.draw(st.floats(1e-300, 1e300))
    tree = filled(values)
    found = tree.find(masses(tree.total, seed))
    assert ((found >= 0) & (found < size)).all()
    assert (tree.get(found) > 0).all()
    assert math.isclose(tree.total, math.fsum(values), rel_tol=1e-12)


@few
@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=300), st.integers(0, 99))
def test_a_mass_is_found_within_rounding_of_where_a_cumulative_sum_has_it(values, seed):
    values = np.array([*values, 1.0])
    tree = filled(values)
    mass = masses(tree.total, seed)
    found = tree.find(mass)
    upper = np.cumsum(values)
    slack = 1e-12 * tree.total
    assert (upper[found] + slack >= mass).all()
    assert (upper[found] - values[found] - slack <= mass).all()


@pytest.mark.parametrize("size", SIZES)
def test_mass_zero_finds_the_first_positive_leaf_and_the_total_the_last(size):
    for first, last in {(0, size - 1), (size // 3, size // 2)}:
        values = np.zeros(size)
        values[[first, last]] = 1.0, 2.0 if first != last else 1.0
        tree = filled(values)
        assert tree.find(np.array([0.0, tree.total])).tolist() == [first, last]


def test_a_mass_at_the_edge_of_two_roots_finds_no_empty_leaf_by_rounding():
    values = np.zeros(2 * MOST_ROOTS)
    values[1::2] = np.random.default_rng(0).random(MOST_ROOTS)
    tree = filled(values)
    assert (tree.get(tree.find(np.cumsum(values[1::2]))) > 0).all()


def test_of_an_index_set_twice_the_last_value_stays():
    tree = PriorityTree(MOST_ROOTS * 2)
    tree.set(np.array([5, 4, 5, 5]), np.array([1.0, 7.0, 2.0, 3.0]))
    assert tree.get(np.array([4, 5])).tolist() == [7.0, 3.0]
    assert tree.total == 10.0


@few
@given(st.sampled_from([1, 5, MOST_ROOTS + 7]), st.data())
def test_a_range_is_set_as_if_leaf_by_leaf(size, data):
    tree, plain = PriorityTree(size), np.zeros(size)
    for _ in range(5):
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        value = float(data.draw(st.integers(0, 9)))
        tree.set_range(start, value if stop % 2 else np.full(stop - start, value), stop)
        plain[start:stop] = value
        assert tree.total == plain.sum()
    np.testing.assert_array_equal(tree.get(np.arange(size)), plain)


def test_sums_do_not_drift_over_a_hundred_thousand_updates():
    size = 2 * MOST_ROOTS + 1
    tree, random = PriorityTree(size), np.random.default_rng(0)
    for _ in range(1000):
        index = random.integers(0, size, 100)
        tree.set(index, 10.0 ** random.uniform(-12, 12, 100))
        start = int(random.integers(0, size - 10))
        tree.set_range(start, random.random(10), start + 10)
    fresh = filled(tree.get(np.arange(size)))
    assert tree.total == fresh.total
    tree.set_range(0, 0.0, size)
    assert tree.total == 0.0


def test_a_huge_leaf_that_shrinks_leaves_no_trace():
    tree = filled(np.full(MOST_ROOTS * 4, 1e-3))
    before = tree.total
    tree.set(np.array([77]), np.array([1e300]))
    tree.set(np.array([77]), np.array([1e-3]))
    assert tree.total == before


def test_frequencies_follow_the_leaves_over_thirty_orders_of_magnitude():
    values = 10.0 ** np.arange(-15.0, 16.0)
    found = filled(values).find(np.linspace(0.0, values.sum(), 1_000_001)[:-1])
    share = np.bincount(found, minlength=31) / 1_000_000
    np.testing.assert_allclose(share, values / values.sum(), atol=2e-6)
