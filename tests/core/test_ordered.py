"""Draws in an order: beside sorted lists of the rows."""

from __future__ import annotations

import time
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from conduit.core import ordered
from conduit.core.ordered import Fifo, Lifo, MaxHeap, MinHeap, RankTree
from conduit.core.ring import Window
from conduit.core.sampling import Draw
from conduit.core.starts import Starts
from conduit.errors import PriorityError
from tests.core.sampler_machine import SamplerMachine, play

EVERY = [Fifo(), Lifo(), MaxHeap(), MinHeap()]


class OrderedMachine(SamplerMachine):
    samplings: ClassVar = EVERY

    def drawn(self, draw: Draw, rows: int, sampling: object) -> None:
        oldest_first = self.drawable
        match sampling:
            case Fifo():
                expected = oldest_first
            case Lifo():
                expected = oldest_first[::-1]
            case MaxHeap():
                expected = sorted(oldest_first, key=lambda key: -self.rows[key].priority)
            case _:
                expected = sorted(oldest_first, key=lambda key: self.rows[key].priority)
        assert draw.keys.tolist() == expected[:rows]
        assert draw.probability == 1.0
        assert draw.weight is None


def test_orders_are_those_of_a_naive_model():
    play(OrderedMachine)


@pytest.mark.parametrize("sampling", EVERY)
@pytest.mark.parametrize("capacity", [300, 5000, 70_000])
def test_rings_of_several_levels_are_drawn_from_as_sorted_lists_are(sampling, capacity):
    random = np.random.default_rng(capacity)
    sampler, priority, stop = sampling.start(capacity, 0), {}, 0
    excluded: set[int] = set()
    for _ in range(12):
        rows = int(random.integers(1, capacity))
        raw = random.integers(0, 50, rows).astype(np.float64)
        sampler.insert(stop, rows, raw if sampling.prioritized else None)
        priority |= dict(zip(range(stop, stop + rows), raw.tolist(), strict=True))
        stop += rows
        window = Window(max(0, stop - capacity), stop)
        keys = np.unique(random.integers(window.first, window.stop, capacity // 3))
        keys = keys[~np.isin(keys, list(excluded))]
        sampler.exclude(keys)
        excluded |= set(keys.tolist())
        if sampling.prioritized:
            keys = random.integers(window.first, window.stop, 100)
            raw = random.integers(0, 50, 100).astype(np.float64)
            sampler.update(keys, raw)
            priority |= dict(zip(keys.tolist(), raw.tolist(), strict=True))
        live = [key for key in range(window.first, window.stop) if key not in excluded]
        count = min(200, len(live))
        assert sampler.missing(window, count, 0) is None
        sign = {"Fifo": 0, "Lifo": 0, "MaxHeap": -1, "MinHeap": 1}[type(sampling).__name__]
        if sampling == Lifo():
            live = live[::-1]
        live.sort(key=lambda key: sign * priority[key])
        assert sampler.draw(0, count, window).keys.tolist() == live[:count]


@pytest.mark.parametrize(("sampling", "order"), [(Fifo(), 1), (Lifo(), -1)])
def test_rows_that_are_drawn_once_make_a_queue_and_a_stack(sampling, order):
    """Each draw finds its rows past all that were drawn before, be it most of a million."""
    capacity, rows = 1 << 20, 64
    starts = Starts(capacity)
    sampler = sampling.start(capacity, 0, starts)
    left, head, stop, number = [], 0, 0, 0
    began_s = time.perf_counter()
    for burst in [1 << 19, *[rows] * 500]:
        keys = np.arange(stop, stop + burst)
        sampler.insert(stop, burst, None)
        starts.admit(keys)
        sampler.admit(keys)
        left += keys.tolist()
        stop += burst
        for _ in range(500 if burst > rows else 1):
            drawn = sampler.draw(number, rows, Window(0, stop)).keys
            number += 1
            if order > 0:
                expected, head = left[head : head + rows], head + rows
            else:
                expected = left[: -rows - 1 : -1]
                del left[-rows:]
            assert drawn.tolist() == expected
            sampler.exclude(starts.exclude(drawn))
    assert time.perf_counter() - began_s < 30, "whatever the machine: a walk over the rows would take minutes"


@pytest.mark.parametrize("sampling", EVERY)
def test_a_new_row_in_a_slot_is_the_youngest_whatever_its_slot(sampling):
    """As in a store whose remover isn't Fifo: keys are slots."""
    sampler = sampling.start(3, 0)
    sampler.insert(0, 3, None)
    sampler.exclude(np.array([0]))
    assert sampler.missing(Window(0, 3), 2, 0) is None
    assert "2 rows are visible and a batch needs 3: push 1 more" in str(sampler.missing(Window(0, 3), 3, 0))
    sampler.insert(0, 1, None)
    sampler.exclude(np.array([2]))
    sampler.insert(2, 1, None)
    expected = [2, 0, 1] if sampling == Lifo() else [1, 0, 2]
    assert sampler.draw(0, 3, Window(0, 3)).keys.tolist() == expected


@pytest.mark.parametrize("sampling", [Fifo(), Lifo()])
def test_rows_in_order_of_age_have_no_priorities(sampling):
    sampler = sampling.start(3, 0)
    sampler.insert(0, 3, None)
    assert not sampling.prioritized
    with pytest.raises(PriorityError, match=f"sampler is {type(sampling).__name__}: rows have no priorities"):
        sampler.update(np.array([0]), np.array([1.0]))


def test_priorities_are_taken_as_they_are_up_to_the_largest_float():
    sampler = MaxHeap().start(4, 0)
    raw = np.array([0.0, 5e-324, sampler.highest_priority, np.nan])
    sampler.insert(0, 4, raw)
    draw = sampler.draw(0, 4, Window(0, 4))
    assert draw.keys.tolist() == [2, 3, 1, 0]
    assert np.asarray(draw.priority).tolist() == [sampler.highest_priority, 1.0, 5e-324, 0.0]
    assert MinHeap().start(4, 0).highest_priority == np.finfo(np.float64).max


def test_a_draw_lacks_what_starts_keep_from_it():
    starts = Starts(4)
    sampler = Fifo().start(4, 0, starts)
    sampler.insert(0, 4, None)
    starts.admit(np.array([2]))
    sampler.admit(np.array([2]))
    assert "1 of 4 visible rows can start an entry of a batch by now" in str(sampler.missing(Window(0, 4), 2, 0))


@pytest.mark.parametrize(("sampling", "most"), [(Fifo(), 9.7), (MaxHeap(), 18.2)])
def test_a_row_costs_what_the_docstring_says(sampling, most):
    sampler = sampling.start(10**6, 0)
    tree = sampler._tree
    total = sum(array.nbytes for array in (tree._ranks, tree._shown, *tree._lowest))
    assert total / 10**6 < most


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@examples(max_examples=60, deadline=None)
@given(places=st.integers(1, 400), seed=st.integers(0, 999))
def test_the_lowest_of_a_tree_are_those_of_a_list(dtype, places, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "_MOST_ROOTS", 3)
        patch.setattr(ordered, "_MOST_PENDING", 50)
        tree = RankTree(places, np.dtype(dtype))
    random, plain = np.random.default_rng(seed), {}
    ranks = iter(random.permutation(100_000))

    def some(count: int) -> np.ndarray:
        values = np.array([next(ranks) for _ in range(count)], np.float64)
        return values % 7 + 1j * values if dtype is np.complex128 else values

    known = some(places)
    tree.put(0, places, known, np.zeros(places, np.bool_))
    for _ in range(30):
        start = int(random.integers(0, places))
        stop = int(random.integers(start, places)) + 1
        index = np.unique(random.integers(0, places, 5))
        match int(random.integers(0, 5)):
            case 0:
                known[start:stop], shown = some(stop - start), random.random(stop - start) < 0.7
                tree.put(start, stop, known[start:stop], shown)
                plain = {place: None for place in plain if not start <= place < stop}
                plain |= dict.fromkeys((start + np.flatnonzero(shown)).tolist())
            case 1:
                known[index] = some(len(index))
                tree.move(index, known[index])
            case 2:
                tree.show(index)
                plain |= dict.fromkeys(index.tolist())
            case 3:
                tree.hide(index)
                plain = {place: None for place in plain if place not in index}
            case _:
                assert tree.count == len(plain)
                count = int(random.integers(0, len(plain) + 1))
                found, lowest = tree.first(count) if count else (np.zeros(0, np.int64), np.zeros(0))
                expected = sorted(plain, key=lambda place: (complex(known[place]).real, complex(known[place]).imag))[
                    :count
                ]
                assert found.tolist() == expected
                assert lowest.tolist() == known[expected].tolist()
