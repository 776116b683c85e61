"""The ring: which shard and slot each insertion number has, tried exhaustively on small ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core.ring import MOST_BLOCKS, Layout, Window, block_rows

SHARES = [(1.0,), (1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 4.0), (1e-9, 1.0), (0.1, 0.2, 0.3, 0.4)]
SMALL = [(capacity, shares) for capacity in range(1, 13) for shares in SHARES]
LARGE = [(1000, (1.0, 1.0, 1.0)), (4097, (5.0, 1.0)), (123_457, (1.0, 2.0, 3.0, 4.0)), (1_000_003, (1.0, 1.0))]


def places(layout: Layout, keys: np.ndarray) -> list[tuple[int, int]]:
    shard, slot = layout.locate(keys)
    shards = np.zeros(len(keys), int) if shard is None else shard
    return list(zip(shards.tolist(), slot.tolist(), strict=True))


def spanned(layout: Layout, first: int, rows: int) -> list[tuple[int, int]]:
    """The places that spans name, in the order of the offsets, which must be gapless."""
    found = []
    for span in layout.spans(first, rows):
        assert span.offset == len(found)
        assert span.rows > 0
        found += [(span.shard, span.slot + i) for i in range(span.rows)]
    return found


@pytest.mark.parametrize(("capacity", "shares"), SMALL)
def test_spans_name_the_places_that_locate_names_for_every_start_and_length(capacity, shares):
    layout = Layout(capacity, shares)
    for first in [*range(2 * capacity + 1), 10**12 + 7]:
        for rows in range(capacity + 1):
            assert spanned(layout, first, rows) == places(layout, np.arange(first, first + rows))


@pytest.mark.parametrize(("capacity", "shares"), [*SMALL, *LARGE])
def test_each_live_key_has_a_slot_of_its_own_within_its_shard(capacity, shares):
    layout = Layout(capacity, shares)
    taken = set(places(layout, np.arange(5, 5 + capacity)))
    assert len(taken) == capacity
    assert sum(layout.shard_rows) == capacity
    assert taken == {(shard, slot) for shard, rows in enumerate(layout.shard_rows) for slot in range(rows)}


@pytest.mark.parametrize(("capacity", "shares"), [*SMALL, *LARGE])
def test_every_prefix_is_spread_as_the_shares_say_within_a_block_a_shard(capacity, shares):
    layout = Layout(capacity, shares)
    shard, _ = layout.locate(np.arange(capacity))
    shard = np.zeros(capacity, int) if shard is None else shard
    prefix = np.arange(1, capacity + 1)
    for number, share in enumerate(shares):
        held = np.cumsum(shard == number)
        assert np.abs(held - prefix * share / sum(shares)).max() <= layout.block_rows


def test_a_key_and_its_successor_a_ring_later_share_a_slot():
    layout = Layout(12, (2.0, 1.0))
    keys = np.arange(12)
    assert places(layout, keys) == places(layout, keys + 12) == places(layout, keys + 12_000_000)


def test_spans_are_as_few_as_possible():
    for before, after in pairwise(Layout(1024, (3.0, 1.0)).spans(0, 1024)):
        assert (before.shard, before.slot + before.rows) != (after.shard, after.slot), "could be one span"


def test_a_huge_ring_keeps_small_tables():
    layout = Layout(10**9, (1.0, 3.0))
    assert len(layout.spans(0, 10**9)) <= MOST_BLOCKS + 1
    assert sum(layout.shard_rows) == 10**9


def test_a_window_counts_its_rows_and_names_the_last():
    assert (len(Window(3, 7)), Window(3, 7).frontier) == (4, 6)
    assert (len(Window(0, 0)), Window(0, 0).frontier) == (0, -1)


def held(layout: Layout) -> np.ndarray:
    """By shard, how many of each prefix of the ring it holds: (shards, capacity)."""
    shard, _ = layout.locate(np.arange(layout.capacity))
    shard = np.zeros(layout.capacity, int) if shard is None else shard
    return np.stack([np.cumsum(shard == number) for number in range(len(layout.shard_rows))])


@pytest.mark.parametrize("capacity", [1, 7, 100, 1000, 8191, 8192, 300_000, 10**6 + 1])
def test_all_layouts_of_a_capacity_have_the_same_blocks_each_whole_in_one_shard(capacity):
    layouts = [Layout(capacity, shares) for shares in SHARES]
    layouts.append(layouts[2].relaid(np.array([[5.0, 1.0, 0.0], [0.0, 2.0, 3.0]])))
    assert {layout.block_rows for layout in layouts} == {block_rows(capacity)}
    starts = np.arange(0, capacity, block_rows(capacity))[:200]
    for layout in layouts:
        for start in starts.tolist():
            assert len(layout.spans(start, min(block_rows(capacity), capacity - start))) == 1


@pytest.mark.parametrize("capacity", [1, 9, 200, 5000])
def test_a_layout_is_dealt_as_it_is_told(capacity):
    blocks = -(-capacity // block_rows(capacity))
    deal = np.random.default_rng(capacity).integers(0, 3, blocks)
    layout = Layout.of(capacity, deal, 4)
    shard, slot = layout.locate(np.arange(capacity))
    assert shard is not None
    assert (shard == deal[np.arange(capacity) // layout.block_rows]).all()
    assert layout.shard_rows[3] == 0
    for number, rows in enumerate(layout.shard_rows):
        assert slot[shard == number].tolist() == list(range(rows)), "in the order of the ring"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_ring_that_is_dealt_anew_sends_as_a_plan_says_and_stays_balanced(data):
    """Through several plans, one after the other, be they full or sparse."""
    capacity = data.draw(st.sampled_from([130, 1000, 8192, 20_000]))
    layout = Layout(capacity, data.draw(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8)))
    for _ in range(data.draw(st.integers(1, 3))):
        rows = plan_of(layout.shard_rows, data)
        if rows.sum(axis=0).min() < 1:
            continue
        after = layout.relaid(rows)
        before_at, after_at = places_of(layout), places_of(after)
        sent = np.zeros_like(rows)
        np.add.at(sent, (before_at, after_at), 1)
        assert np.abs(sent - rows).max() <= 2 * layout.block_rows
        assert (sent[rows == 0] == 0).all(), "nobody sends where the plan sends nothing"
        share = rows.sum(axis=0, keepdims=True).T / capacity
        assert np.abs(held(after) - share * np.arange(1, capacity + 1)).max() <= 4 * layout.block_rows
        assert np.abs(np.array(after.shard_rows) - rows.sum(axis=0)).max() <= 3 * layout.block_rows
        layout = after


def plan_of(shard_rows, data) -> np.ndarray:
    """Rows by edge, with the sums that there are, to one to eight new shards."""
    targets = np.array(data.draw(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8)))
    have, want = np.array(shard_rows, float), targets / targets.sum() * sum(shard_rows)
    if data.draw(st.booleans()):
        return np.outer(have, want) / have.sum()
    rows, edges = np.zeros((len(have), len(want))), len(have) * len(want)
    for edge in data.draw(st.permutations(range(edges))):
        i, j = divmod(edge, len(want))
        rows[i, j] = min(have[i], want[j])
        have[i] -= rows[i, j]
        want[j] -= rows[i, j]
    return rows


def places_of(layout: Layout) -> np.ndarray:
    shard, _ = layout.locate(np.arange(layout.capacity))
    return np.zeros(layout.capacity, int) if shard is None else shard


def test_what_stays_where_it_is_stays_to_a_block():
    before = Layout(10_000, (1.0, 1.0))
    after = before.relaid(np.array([[4000.0, 0.0, 1000.0], [0.0, 4000.0, 1000.0]]))
    stayed = np.count_nonzero(places_of(before) == places_of(after))
    assert abs(stayed - 8000) <= 2 * after.block_rows
