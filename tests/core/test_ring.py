"""The ring: which shard and slot each insertion number has, tried exhaustively on small ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from conduit.core.ring import MOST_BLOCKS, Layout, Window

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
