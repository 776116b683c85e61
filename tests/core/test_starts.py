"""The set of drawable rows, beside a plain set, and draws from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core import starts as module
from conduit.core.ring import Window
from conduit.core.starts import Starts
from tests.core.frequencies import assert_fits


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 12), st.randoms(use_true_random=False)), max_size=30))
def test_the_set_and_its_count_follow_rows_that_come_and_go(capacity, rounds):
    starts, plain, first, stop = Starts(capacity), set(), 0, 0
    for rows, random in rounds:
        gone = max(first, min(stop, stop + rows - capacity)) - first
        starts.evict(first, gone)
        plain -= set(range(first, first + gone))
        stop += rows
        first = max(first, stop - capacity)
        live = range(first, stop)
        new = [key for key in live if key not in plain and random.random() < 0.5]
        starts.admit(np.array(new, np.int64))
        plain |= set(new)
        out = [key for key in live if random.random() < 0.2]
        assert set(starts.exclude(np.array(out, np.int64)).tolist()) == plain & set(out)
        plain -= set(out)
        assert starts.count == len(plain)
        assert {key for key in live if key in starts} == plain


@pytest.mark.parametrize("tries", [module.MOST_TRIES, 0], ids=["tried", "counted out"])
def test_every_drawable_row_has_equal_chance(tries, monkeypatch):
    monkeypatch.setattr(module, "MOST_TRIES", tries)
    monkeypatch.setattr(module, "_BLOCK", 16)
    starts, window = Starts(100), Window(950, 1050)
    drawable = sorted(np.random.default_rng(1).choice(np.arange(950, 1050), 37, replace=False).tolist())
    starts.admit(np.array(drawable))
    random = np.random.default_rng(0)
    keys = np.concatenate([starts.choose(random, 1000, window) for _ in range(100)])
    values, counts = np.unique(keys, return_counts=True)
    assert values.tolist() == drawable
    assert_fits(counts, np.full(37, 1 / 37))


def test_one_drawable_row_among_a_million_is_found():
    starts = Starts(1_000_000)
    starts.admit(np.array([1_234_567]))
    keys = starts.choose(np.random.default_rng(0), 512, Window(500_000, 1_500_000))
    assert keys.tolist() == [1_234_567] * 512
