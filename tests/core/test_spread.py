"""Draws by age: their laws, exactly."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from conduit.core import spread
from conduit.core.ring import Window
from conduit.core.sampling import Draw, Sampler, Sampling
from conduit.core.spread import Recency, Stratified
from conduit.core.starts import Starts
from conduit.errors import PriorityError, SettingError
from tests.core.frequencies import assert_fits
from tests.core.sampler_machine import SamplerMachine, play


def law(window: Window, half_life: float) -> np.ndarray:
    """By key of the window, the oldest first, from the words of the docstring alone."""
    chance = np.array([0.5 ** ((window.stop - 1 - key) / half_life) for key in range(window.first, window.stop)])
    return chance / chance.sum()


class RecencyMachine(SamplerMachine):
    samplings: ClassVar = (Recency(1e-9), Recency(0.7), Recency(3.0), Recency(1e6))
    slots_too = False

    def drawn(self, draw: Draw, rows: int, sampling: Sampling) -> None:
        assert isinstance(sampling, Recency)
        expected = law(self.window, max(0.01, sampling.half_life))[draw.keys - self.first]
        np.testing.assert_allclose(draw.probability, np.maximum(expected, 1e-300), atol=1e-29)
        assert draw.weight is None


def test_recency_holds_against_a_naive_model():
    play(RecencyMachine)


class StratifiedMachine(SamplerMachine):
    samplings: ClassVar = (Stratified(),)
    slots_too = False

    def drawn(self, draw: Draw, rows: int, sampling: object) -> None:
        count, drawable = len(self.drawable), sorted(self.drawable)
        assert draw.probability == 1 / count
        for stratum, key in enumerate(sorted(draw.keys.tolist())):
            rank = drawable.index(key)
            # Row `rank` has [rank, rank + 1) of the ages, and the stratum so many rows from its own start on.
            assert rank * rows < (stratum + 1) * count
            assert (rank + 1) * rows > stratum * count


def test_strata_are_those_of_a_naive_model():
    play(StratifiedMachine)


def some_of(sampling: Sampling, rows: int, excluded: list[int], with_starts: bool) -> tuple[Sampler, Window]:
    """A sampler over a ring that went round, some of whose rows can't be drawn."""
    starts, window = Starts(rows) if with_starts else None, Window(5, 5 + rows)
    sampler = sampling.start(rows, 0, starts)
    sampler.insert(0, rows, None)
    sampler.insert(rows, 5, None)
    if starts is None:
        if excluded:
            sampler.exclude(np.array(excluded))
    else:
        keys = np.setdiff1d(np.arange(5, 5 + rows), excluded)
        starts.admit(keys)
        sampler.admit(keys)
    return sampler, window


def counted(sampler: Sampler, window: Window, rows: int, batches: int) -> np.ndarray:
    keys = np.concatenate([sampler.draw(number, rows, window).keys for number in range(batches)])
    return np.bincount(keys - window.first, minlength=len(window))


def assert_follows(counts: np.ndarray, chance: np.ndarray) -> None:
    """Chi-square, which needs some rows of each kind: the rare ones count together."""
    rare = chance * counts.sum() < 50
    counts, chances = (np.append(told[~rare], told[rare].sum()) for told in (counts, chance))
    assert_fits(counts[chances > 0.0], chances[chances > 0.0])


@pytest.mark.parametrize("half_life", [0.5, 3.0, 10.0, 40.0, 1e9])
def test_the_chance_of_a_row_falls_by_half_with_every_half_life(half_life):
    sampler, window = some_of(Recency(half_life), 20, [], False)
    counts, chance = counted(sampler, window, 100, 2000), law(window, half_life)
    assert_follows(counts, chance)
    draw = sampler.draw(0, 50, window)
    np.testing.assert_allclose(draw.probability, chance[draw.keys - window.first], rtol=1e-9)


@pytest.mark.parametrize("tries", [spread._TRIES, (1,), ()], ids=["tried", "some counted out", "counted out"])
@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("half_life", [0.7, 6.0])
def test_rows_that_can_be_drawn_keep_their_proportions(tries, with_starts, half_life, monkeypatch):
    monkeypatch.setattr(spread, "_TRIES", tries)
    monkeypatch.setattr(spread, "_BLOCK", 7)
    excluded = [5, 7, 8, 15, 21, 22, 23, 24]
    sampler, window = some_of(Recency(half_life), 20, excluded, with_starts)
    chance = law(window, half_life)
    chance[np.array(excluded) - window.first] = 0.0
    counts = counted(sampler, window, 100, 500)
    assert not counts[chance == 0.0].any()
    assert_follows(counts, chance / chance.sum())


def test_the_newest_rows_that_can_be_drawn_are_found_however_far_back_they_are():
    starts, rows = Starts(100_000), 100_000
    sampler = Recency(2.0).start(rows, 0, starts)
    sampler.insert(0, rows, None)
    keys = np.array([10, 29_998, 29_999, 30_000])
    starts.admit(keys)
    sampler.admit(keys)
    draws = [sampler.draw(number, 256, Window(0, rows)) for number in range(40)]
    values, counts = np.unique(np.concatenate([draw.keys for draw in draws]), return_counts=True)
    assert values.tolist() == [29_998, 29_999, 30_000]
    ratio = 0.5 ** (np.array([2, 1, 0]) / 2)
    assert_fits(counts, ratio / ratio.sum())
    assert all((np.asarray(draw.probability) > 0.0).all() for draw in draws)


@pytest.mark.parametrize("half_life", [5e-324, 1e-3, 1e308])
@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_no_half_life_is_too_short_or_too_long(half_life, rows):
    for with_starts in (False, True):
        sampler, window = some_of(Recency(half_life), rows + 5, [5 + rows + 4], with_starts)
        draw = sampler.draw(0, 500, window)
        assert ((draw.keys >= window.first) & (draw.keys < window.stop - 1)).all()
        assert (np.asarray(draw.probability) > 0.0).all()


@pytest.mark.parametrize("half_life", [0, -1.0, float("nan"), float("inf"), "5", None, True])
def test_a_half_life_is_a_positive_number_of_rows(half_life):
    with pytest.raises(SettingError, match=r"Recency\(half_life=.*\): expected a finite number > 0, in rows"):
        Recency(half_life)


@pytest.mark.parametrize("rows", [1, 3, 7, 20])
@pytest.mark.parametrize("with_starts", [None, False, True], ids=["all", "excluded", "starts"])
def test_every_row_has_the_same_chance_in_every_place_of_a_batch(rows, with_starts):
    excluded = [] if with_starts is None else [5, 7, 8, 15, 24]
    sampler, window = some_of(Stratified(), 25, excluded, bool(with_starts))
    keys = np.stack([sampler.draw(number, rows, window).keys for number in range(6000)])
    allowed = np.setdiff1d(np.arange(5, 30), excluded)
    for place in {0, rows // 2, rows - 1}:
        values, counts = np.unique(keys[:, place], return_counts=True)
        assert values.tolist() == allowed.tolist()
        assert_fits(counts, np.full(len(allowed), 1 / len(allowed)))


def test_each_stratum_of_ages_gives_one_row_and_the_batch_is_mixed():
    sampler, window = some_of(Stratified(), 40, [], False)
    steps_down = 0
    for number in range(200):
        keys = sampler.draw(number, 8, window).keys
        assert sorted((keys - window.first) // 5) == list(range(8))
        steps_down += int((np.diff(keys) < 0).sum())
    assert 0.4 < steps_down / (200 * 7) < 0.6


def test_strata_of_all_rows_are_the_same_whether_starts_say_so_or_not():
    plain, window = some_of(Stratified(), 25, [], False)
    starts, _ = some_of(Stratified(), 25, [24], True)
    some, _ = some_of(Stratified(), 25, [24], False)
    for number in range(5):
        assert starts.draw(number, 6, window).keys.tolist() == some.draw(number, 6, window).keys.tolist()
    assert plain.draw(0, 25, window).keys.tolist() != sorted(plain.draw(0, 25, window).keys.tolist())


@pytest.mark.parametrize("capacity", [10, 10_000])
def test_strata_follow_rows_that_come_can_be_drawn_and_go(capacity):
    starts, random = Starts(capacity), np.random.default_rng(0)
    sampler, stop = Stratified().start(capacity, 0, starts), 0
    drawable = np.zeros(0, np.int64)
    for number in range(60):
        rows = int(random.integers(1, capacity // 3 + 1))
        first = max(0, stop + rows - capacity)
        if first:
            starts.evict(max(0, stop - capacity), first - max(0, stop - capacity))
        keys = np.arange(stop, stop + rows)
        sampler.insert(stop, rows, None)
        late = keys[random.random(rows) < 0.6]
        stop += rows
        window = Window(first, stop)
        drawable = drawable[drawable >= first]
        for _ in range(2):
            if sampler.missing(window, 2, number) is None:
                ranks = np.searchsorted(drawable, drawn := np.sort(sampler.draw(number, 2, window).keys))
                assert drawable[ranks].tolist() == drawn.tolist()
                assert 2 * ranks[0] < len(drawable) < 2 * (ranks[1] + 1)
            starts.admit(late)
            sampler.admit(late)
            drawable, late = np.append(drawable, late), late[:0]
        out = starts.exclude(drawable[random.random(len(drawable)) < 0.1])
        sampler.exclude(out)
        drawable = np.setdiff1d(drawable, out)


@pytest.mark.parametrize("sampling", [Recency(3.0), Stratified()])
def test_a_draw_lacks_rows(sampling):
    sampler = sampling.start(8, 0)
    sampler.insert(0, 3, None)
    assert "3 rows are visible and a batch needs 5: push 2 more" in str(sampler.missing(Window(0, 3), 5, 0))


@pytest.mark.parametrize("sampling", [Recency(3.0), Stratified()])
def test_keys_that_are_no_ages_are_refused(sampling):
    sampler = sampling.start(8, 0)
    sampler.insert(0, 8, None)
    sampler.exclude(np.array([3]))
    with pytest.raises(SettingError, match=r"goes by age.*remover=conduit.Fifo\(\)"):
        sampler.insert(3, 1, None)


@pytest.mark.parametrize("sampling", [Recency(3.0), Stratified()])
def test_rows_have_no_priorities(sampling):
    assert not sampling.prioritized
    with pytest.raises(PriorityError, match="rows have no priorities"):
        sampling.start(4, 0).update(np.array([0]), np.array([1.0]))
