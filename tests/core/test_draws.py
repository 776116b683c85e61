"""Draws taken apart and put together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conduit.core.draws import joined, occurrence, part_of
from conduit.core.sampling import Draw


@given(st.lists(st.integers(0, 6), max_size=20))
def test_the_how_manieth_of_its_kind_each_is(slots):
    expected = [slots[: place + 1].count(slot) for place, slot in enumerate(slots)]
    assert occurrence(np.array(slots, np.int64)).tolist() == expected


def test_what_is_taken_apart_is_the_same_when_it_is_put_together():
    keys = np.arange(6)
    floats = np.arange(6, dtype=np.float64)
    draw = Draw(keys, floats / 10, floats + 1, floats * 2)
    good = keys < 4
    again = joined([part_of(draw, good), part_of(draw, ~good)])
    for name in ("keys", "probability", "weight", "priority"):
        np.testing.assert_array_equal(getattr(again, name), getattr(draw, name))


def test_numbers_that_are_the_same_for_all_of_a_part_are_so_for_that_part():
    again = joined([Draw(np.arange(2), 0.5), Draw(np.arange(2, 5), 0.25, None, 3.0)])
    assert np.asarray(again.probability).tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]
    assert np.asarray(again.priority).tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]
    assert again.weight is None


def test_a_part_without_weights_has_ones():
    again = joined([Draw(np.arange(2), 0.5), Draw(np.arange(2, 4), 0.5, np.array([2.0, 3.0]))])
    assert again.weight is not None
    assert again.weight.tolist() == [1.0, 1.0, 2.0, 3.0]
