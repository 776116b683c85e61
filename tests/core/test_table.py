"""A table at work: how often it gives a row, and when it has enough of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core.limiter import Queue, SampleToInsertRatio
from conduit.core.ordered import Fifo
from conduit.core.passes import WithoutReplacement
from conduit.core.prioritized import Prioritized
from conduit.core.ring import Window
from conduit.core.sampling import Draw, Uniform
from conduit.core.starts import Starts
from conduit.core.table import LiveTable, Table
from conduit.errors import SamplerError, SettingError
from tests.contract.planted_samplers import Planted, Right
from tests.core.frequencies import assert_fits

NONE = np.zeros(0, np.int64)


def table(
    sampler: Any = None, most: int | None = None, capacity: int = 8, limiter: Any = None, **more: Any
) -> LiveTable:
    settings = Table(sampler or Uniform(), most, limiter)
    return LiveTable(
        **(
            {"name": "main", "settings": settings, "capacity": capacity, "batch_size": 2}
            | {"seed": 0, "starts": None}
            | more
        )
    )


def filled(*args: Any, priority: Any = None, **settings: Any) -> tuple[LiveTable, Window]:
    made = table(*args, **settings)
    rows = settings.get("capacity", 8)
    made.publish(0, rows, None if priority is None else np.array(priority, float), NONE, NONE)
    return made, Window(0, rows)


@pytest.mark.parametrize(
    "sampler",
    [Uniform(), Uniform(replacement=False), Prioritized(), WithoutReplacement(), Fifo(), Planted(Right)],
    ids=repr,
)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_every_row_is_given_as_often_as_it_may_be_and_no_oftener(sampler, most):
    made, window = filled(sampler, most)
    times, number, left = np.zeros(8, int), 0, set(range(8))
    while made.missing(window, 3, number) is None:
        draw, counted = made.draw(number, 3, window)
        for key, nth in zip(draw.keys.tolist(), counted.tolist(), strict=True):
            times[key] += 1
            assert times[key] == nth <= most
        left = set(np.flatnonzero(times < most).tolist())
        assert made.size(window) == len(left)
        ended = [] if made.freed is None else made.freed.tolist()
        assert sorted(ended) == sorted(set(draw.keys.tolist()) - left)
        number += 1
    assert len(left) < 3
    assert made.counters.sampled == times.sum() == 3 * number


def test_a_batch_of_all_rows_gives_each_once_where_each_may_be_given_once():
    for number in range(40):
        made, window = filled(Uniform(), 1)
        draw, counted = made.draw(number, 8, window)
        assert sorted(draw.keys.tolist()) == list(range(8))
        assert counted.tolist() == [1] * 8
        assert made.missing(window, 1, 1) is not None


def test_places_that_a_row_had_too_often_go_to_others_as_if_drawn_one_by_one():
    """Batches of two rows that may come once each: the second is any of the others, with equal chance."""
    pairs = np.zeros((4, 4))
    for number in range(6000):
        made, window = filled(Uniform(), 1, capacity=4)
        first, second = made.draw(number, 2, window)[0].keys.tolist()
        pairs[first, second] += 1
    assert (np.diag(pairs) == 0).all()
    assert_fits(pairs[~np.eye(4, dtype=bool)], np.full(12, 1 / 12))


def test_what_is_said_of_entries_that_came_later_is_of_their_own_draw():
    made, window = filled(Prioritized(alpha=1.0, beta=1.0), 1, capacity=4, priority=[1.0, 2.0, 3.0, 10.0])
    for number in range(30):
        draw, _ = made.draw(number, 3, window)
        np.testing.assert_array_equal(draw.priority, np.array([1.0, 2.0, 3.0, 10.0])[draw.keys])
        assert [np.size(each) for each in (draw.probability, draw.priority)] == [3, 3]
        assert draw.weight is not None
        assert len(draw.weight) == 3
        made, window = filled(Prioritized(alpha=1.0, beta=1.0), 1, capacity=4, priority=[1.0, 2.0, 3.0, 10.0])


def test_rows_of_priority_0_are_none_that_a_batch_can_be_filled_up_with():
    made, window = filled(Prioritized(), 1, capacity=4, priority=[1.0, 0.0, 0.0, 0.0])
    assert made.missing(window, 1, 0) is None
    said = made.missing(window, 2, 0)
    assert said is not None
    assert "1 of 4 drawable rows have a priority above 0" in said
    made.sampler.update(np.array([2, 2]), np.array([0.5, 3.0]))
    assert made.missing(window, 2, 0) is None
    assert sorted(made.draw(0, 2, window)[0].keys.tolist()) == [0, 2]
    assert made.missing(window, 1, 1) is not None


def test_without_a_limit_one_row_fills_a_batch_where_the_others_have_priority_0():
    made, window = filled(Prioritized(), None, capacity=4, priority=[1.0, 0.0, 0.0, 0.0])
    assert made.missing(window, 4, 0) is None
    assert made.draw(0, 4, window)[0].keys.tolist() == [0] * 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1.0, 4.0]), min_size=1, max_size=12), st.integers(1, 3), st.integers(0, 2**32)
)
def test_whatever_the_priorities_a_batch_that_is_ready_can_be_drawn(priority, most, seed):
    capacity, random = len(priority), np.random.default_rng(seed)
    made, window = filled(Prioritized(eps=0.0), most, capacity=capacity, priority=priority, seed=seed, batch_size=1)
    for number in range(20):
        rows = int(random.integers(1, capacity + 1))
        if made.missing(window, rows, number) is None:
            draw, counted = made.draw(number, rows, window)
            assert len(draw.keys) == rows
            assert (counted <= most).all()
            assert (np.array(priority)[draw.keys] > 0).all()
        else:
            keys = random.integers(0, capacity, 3)
            values = random.choice([0.0, 2.0], 3)
            made.sampler.update(keys, values)
            for key, value in zip(keys.tolist(), values.tolist(), strict=True):
                priority[key] = value


@pytest.mark.parametrize("sampler", [Uniform(), Fifo(), WithoutReplacement(), Prioritized()], ids=repr)
def test_batches_that_are_drawn_together_are_ready_together(sampler):
    made, window = filled(sampler, 1)
    assert made.missing(window, 4, 0, batches=2) is None
    assert "2 batches are drawn together" in (made.missing(window, 5, 0, batches=2) or "")
    unlimited, _ = filled(sampler, None)
    assert unlimited.missing(window, 5, 0, batches=2) is None


def test_a_queue_is_a_table_that_gives_each_row_once_in_order():
    assert Table.queue(8) == Table(Fifo(), max_times_sampled=1, limiter=Queue(8))
    with pytest.raises(SettingError, match="max_size=0: expected a whole number of at least 1"):
        Table.queue(0)


@pytest.mark.parametrize("shared", [False, True], ids=["all rows", "those with links"])
def test_what_is_missing_where_rows_are_there_is_told_by_cause(shared):
    starts = Starts(8) if shared else None
    made = table(Fifo(), 1, starts=starts)
    admitted = np.arange(6 if shared else 8)
    if starts is not None:
        starts.admit(admitted)
    made.publish(0, 8, None, admitted if shared else NONE, NONE)
    window = Window(0, 8)
    assert made.why_few(window, 2, 1, None) == ""
    made.draw(0, 3, window)
    made.exclude(np.arange(3, 5))
    left = 1 if shared else 3
    assert made.size(window) == left
    waits = "2 wait for the rows that come after them, or lack them for good; " if shared else ""
    told = "3 were drawn as often as they may; 2 are too stale. More rows would do"
    assert made.why_few(window, 4, 1, None) == f": {waits}{told}"
    assert made.why_few(window, 1, 4, None) == f": {waits}{told}"
    assert made.why_few(window, left, 1, None) == ""


def test_where_every_row_was_drawn_it_says_so():
    made, window = filled(Uniform(), 1)
    made.draw(0, 8, window)
    assert made.why_few(window, 2, 1, None) == ": all 8 were drawn as often as they may. More rows would do"


def test_a_limiter_is_asked_for_all_batches_that_are_drawn_together():
    made, window = filled(Uniform(), limiter=SampleToInsertRatio(1, 1, (0, 8)))
    assert made.missing(window, 4, 0, batches=2) is None
    assert "SampleToInsertRatio" in (made.missing(window, 5, 0, batches=2) or "")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("most", [None, 2])
def test_a_ring_s_rows_begin_anew_in_the_slots_of_others(shared, most):
    """With links that say which rows can be drawn, and without."""
    starts = Starts(8) if shared else None
    made = table(Fifo(), most, starts=starts)
    key = 0
    for rows in (3, 5, 8, 1, 4, 7, 2, 8, 6):
        admitted = np.arange(key, key + rows)
        if starts is not None:
            starts.evict(key, rows)
            starts.admit(admitted)
        made.publish(key, rows, None, admitted if shared else NONE, NONE)
        key += rows
        window = Window(max(0, key - 8), key)
        while most is not None and made.missing(window, 2, 0) is None:
            _, counted = made.draw(0, 2, window)
            assert (counted <= most).all()
        assert made.size(window) == (len(window) if most is None else made.size(window)) <= len(window)
        if most is None:
            draw, _ = made.draw(0, len(window), window)
            assert draw.keys.tolist() == list(range(window.first, window.stop))


def test_rows_that_can_not_be_drawn_any_more_are_excluded_once():
    made, window = filled(Uniform(), 1)
    assert made.exclude(np.array([2, 5])) == 2
    assert made.exclude(np.array([5, 6])) == 1
    assert made.exclude(NONE) == 0
    assert made.size(window) == 5
    assert set(made.draw(0, 5, window)[0].keys.tolist()) == {0, 1, 3, 4, 7}


def test_tables_draw_apart_and_the_main_one_as_the_store_s_seed_says():
    alone = Uniform().start(8, 5)
    alone.insert(0, 8, None)
    draws = {
        name: filled(name=name, seed=5)[0].draw(3, 50, Window(0, 8))[0].keys.tolist() for name in ("main", "a", "b")
    }
    assert draws["main"] == alone.draw(3, 50, Window(0, 8)).keys.tolist()
    assert len({tuple(keys) for keys in draws.values()}) == 3


def test_a_sampler_of_the_user_s_own_is_checked_and_named():
    class Beyond(Right):
        def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
            draw = super().draw(number, rows, window, stream)
            draw.keys[-1] = window.stop
            return draw

    made, window = filled(Planted(Beyond))
    with pytest.raises(SamplerError, match=r"Beyond\(\) of table 'main' failed to draw batch 7: row 8 isn't live"):
        made.draw(7, 2, window)


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "2", 2**32])
def test_a_number_of_times_that_can_not_be_is_refused(most):
    with pytest.raises(SettingError, match="max_times_sampled"):
        Table(max_times_sampled=most)


@pytest.mark.parametrize("sampler", [Uniform, Fifo, "uniform", None])
def test_what_is_no_sampler_is_refused(sampler):
    with pytest.raises(SettingError, match="sampler"):
        Table(sampler)


def test_rows_that_are_drawn_together_must_fit_where_they_are_used_up():
    """g_del batches at once."""
    with pytest.raises(SettingError, match=r"12 rows are drawn together.*got capacity=8"):
        table(most=3, batch_size=12)
    table(batch_size=12)
