"""Draws without replacement: every row once a pass."""

from __future__ import annotations

from itertools import permutations
from typing import ClassVar

import numpy as np
import pytest

from conduit.core.passes import WithoutReplacement
from conduit.core.ring import Window
from conduit.core.sampling import Draw, Sampler
from conduit.core.starts import Starts
from conduit.errors import PriorityError
from tests.core.frequencies import assert_fits
from tests.core.sampler_machine import SamplerMachine, play


class PassMachine(SamplerMachine):
    samplings: ClassVar = (WithoutReplacement(),)

    def __init__(self) -> None:
        super().__init__()
        self.undrawn: set[int] = set()

    def came(self, key: int) -> None:
        self.undrawn.add(key)

    def left(self, key: int) -> None:
        self.undrawn.discard(key)

    def restored(self, gone: set[int]) -> None:
        self.undrawn -= gone

    def drawn(self, draw: Draw, rows: int, sampling: object) -> None:
        keys, left, count = draw.keys.tolist(), len(self.undrawn), len(self.drawable)
        assert len(set(keys)) == rows
        rest = keys[: min(rows, left)]
        assert set(rest) <= self.undrawn
        assert np.broadcast_to(draw.probability, rows).tolist() == [1 / (left or 1)] * len(rest) + [
            1 / (count - left or 1)
        ] * (rows - len(rest))
        self.undrawn = (set(self.drawable) if rows > left else self.undrawn) - set(keys[left:] if rows > left else keys)


def test_passes_are_those_of_a_naive_model():
    play(PassMachine)


def filled(rows: int, seed: int = 0, starts: Starts | None = None) -> Sampler:
    sampler = WithoutReplacement().start(rows, seed, starts)
    sampler.insert(0, rows, None)
    return sampler


def drawn(sampler: Sampler, batches: int, rows: int, window: Window) -> list[int]:
    return [key for number in range(batches) for key in sampler.draw(number, rows, window).keys.tolist()]


def counted(orders: list[tuple[int, ...]], rows: int) -> np.ndarray:
    every = list(permutations(range(rows)))
    return np.array([orders.count(order) for order in every])


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_all_orders_of_a_pass_are_equally_likely(batch):
    keys = drawn(filled(4), 12_000 // batch, batch, Window(0, 4))
    counts = counted([tuple(keys[i : i + 4]) for i in range(0, len(keys), 4)], 4)
    assert_fits(counts, np.full(24, 1 / 24))


def test_passes_follow_each_other_through_batches_that_do_not_divide_them():
    keys = np.array(drawn(filled(10), 1000, 7, Window(0, 10)))
    for one_pass in keys.reshape(-1, 10):
        assert sorted(one_pass) == list(range(10))
    for batch in keys.reshape(-1, 7):
        assert len(set(batch)) == 7
    assert_fits(np.bincount(keys[3::7], minlength=10), np.full(10, 1 / 10))


def test_a_batch_of_all_rows_holds_each_once_wherever_the_pass_was():
    sampler = filled(9)
    sampler.draw(0, 4, Window(0, 9))
    assert sorted(sampler.draw(1, 9, Window(0, 9)).keys) == list(range(9))


def test_a_row_that_comes_during_a_pass_joins_it_with_the_same_chance_as_what_is_left():
    counts = np.zeros(6, np.int64)
    for seed in range(3000):
        sampler = WithoutReplacement().start(10, seed)
        sampler.insert(0, 8, None)
        gone = sampler.draw(0, 4, Window(0, 8)).keys
        sampler.insert(8, 2, None)
        left = sorted(set(range(10)) - set(gone))
        keys = sampler.draw(1, 2, Window(0, 10)).keys
        counts[[left.index(key) for key in keys]] += 1
    assert_fits(counts, np.full(6, 1 / 6))


def test_after_wraps_and_exclusions_every_row_has_equal_chance():
    starts = Starts(16)
    sampler = WithoutReplacement().start(16, 0, starts)
    sampler.insert(0, 16, None)
    starts.evict(0, 6)
    sampler.insert(16, 6, None)
    window = Window(6, 22)
    keys = np.array([6, 7, 9, 12, 15, 16, 17, 21])
    starts.admit(keys)
    sampler.admit(keys)
    sampler.exclude(starts.exclude(np.array([12, 17])))
    allowed = np.array([6, 7, 9, 15, 16, 21])
    # The first batch of each pass: one that a pass has begun with depends on those before.
    firsts = []
    for number in range(6000):
        firsts += sampler.draw(2 * number, 3, window).keys.tolist()
        sampler.draw(2 * number + 1, 3, window)
    values, counts = np.unique(firsts, return_counts=True)
    assert values.tolist() == allowed.tolist()
    # Three of six, distinct: the counts scatter less than independent ones would.
    assert_fits(counts, np.full(6, 1 / 6))


def test_draws_depend_on_which_rows_are_left_and_not_on_how_they_came():
    """Schedules differ in how many rows one insertion has; batches may not."""
    whole, pieces = (WithoutReplacement().start(50, 3) for _ in range(2))
    stop = 0
    for number in range(60):
        rows = 1 + number * 7 % 11
        whole.insert(stop, rows, None)
        for key in range(stop, stop + rows):
            pieces.insert(key, 1, None)
        stop += rows
        window = Window(max(0, stop - 50), stop)
        count = min(len(window), 1 + number % 9)
        assert whole.draw(number, count, window).keys.tolist() == pieces.draw(number, count, window).keys.tolist()


@pytest.mark.parametrize(
    ("rows", "more", "capacity"), [(40, 13, 64), (40, 13, 40), (6000, 2007, 9000), (6000, 2007, 6000)]
)
def test_a_restored_pass_goes_on_in_a_larger_ring_with_the_same_draws(rows, more, capacity):
    sampler = WithoutReplacement().start(rows, 3)
    sampler.insert(0, rows, None)
    sampler.insert(rows, more, None)
    window = Window(more, rows + more)
    sampler.draw(0, 25, window)
    other = WithoutReplacement().start(capacity, 3)
    other.load(sampler.state(window), window)
    for number in range(1, 20):
        assert sampler.draw(number, 9, window).keys.tolist() == other.draw(number, 9, window).keys.tolist()


def test_many_rows_are_each_drawn_once():
    rows = 20_000
    keys = drawn(filled(rows), 80, 500, Window(0, rows))
    assert sorted(keys[:rows]) == sorted(keys[rows:]) == list(range(rows))
    assert keys[:rows] != keys[rows:]


def test_rows_have_no_priorities():
    assert not WithoutReplacement().prioritized
    with pytest.raises(PriorityError, match="sampler is WithoutReplacement: rows have no priorities"):
        filled(3).update(np.array([0]), np.array([1.0]))


def test_a_draw_lacks_rows():
    sampler = filled(3)
    assert "3 rows are visible and a batch needs 5: push 2 more" in str(sampler.missing(Window(0, 3), 5, 0))
    sampler.exclude(np.array([0, 1, 2]))
    assert "0 rows are visible and a batch needs 1: push 1 more" in str(sampler.missing(Window(0, 3), 1, 0))


def test_what_a_restored_store_can_no_longer_draw_is_left_out_of_the_pass():
    starts, window = Starts(6), Window(0, 6)
    sampler = WithoutReplacement().start(6, 0, starts)
    sampler.insert(0, 6, None)
    starts.admit(np.arange(6))
    sampler.admit(np.arange(6))
    state = sampler.state(window)
    fewer = Starts(6)
    fewer.admit(np.array([3, 5]))
    other = WithoutReplacement().start(6, 0, fewer)
    other.load(state, Window(2, 6))
    for number in range(5):
        assert sorted(other.draw(number, 2, Window(2, 6)).keys) == [3, 5]
