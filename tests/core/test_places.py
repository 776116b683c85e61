"""Places: which slot each row has, where rows leave in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core import places as module
from conduit.core.places import Places, Roll


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**32)), max_size=12)
)
def test_a_row_keeps_its_slot_until_it_leaves_and_no_two_share_one(capacity, moves):
    places, slot_of, version_of, inserted, ever = Places(capacity), {}, {}, 0, set()
    for leaving, coming, seed in moves:
        gone = np.random.default_rng(seed).permutation(list(slot_of))[:leaving].astype(np.int64)
        places.leave(np.array([slot_of[key] for key in gone.tolist()], np.int64))
        for key in gone.tolist():
            del slot_of[key], version_of[key]
        coming = min(coming, capacity - len(slot_of))
        keys = np.arange(inserted, inserted + coming)
        inserted += coming
        slots = places.take(keys, keys * 3 if seed % 2 else int(seed % 7))
        slot_of.update(zip(keys.tolist(), slots.tolist(), strict=True))
        version_of.update(
            dict.fromkeys(keys.tolist(), seed % 7) if seed % 2 == 0 else {k: 3 * k for k in keys.tolist()}
        )
        ever.update(slots.tolist())

        live = np.array(sorted(slot_of), np.int64)
        there = np.array([slot_of[key] for key in live.tolist()], np.int64)
        assert len(set(slot_of.values())) == len(slot_of) == len(places) == capacity - places.room
        assert places.keys_from(0, capacity).tolist() == live.tolist()
        first, most = seed % (inserted + 2), 1 + seed % 5
        assert places.keys_from(first, most).tolist() == live[live >= first][:most].tolist()
        roll = Roll(places, places.keys())
        assert roll.count_between(first, first + most) == np.count_nonzero((live >= first) & (live < first + most))
        assert places.slots_of(live).tolist() == there.tolist()
        assert places.keys_at(there).tolist() == live.tolist()
        assert places.versions_at(there).tolist() == [version_of[key] for key in live.tolist()]
        assert (places.slots_of(gone) == -1).all()
        assert ever == set(range(places.occupied)), "slots are used from the first on"

        other = Places(capacity + 3)
        other.load(places.state())
        assert other.keys_from(0, len(live) + 1).tolist() == live.tolist()
        assert other.slots_of(live).tolist() == there.tolist()
        assert other.versions_at(there).tolist() == places.versions_at(there).tolist()
        assert (other.occupied, other.room) == (places.occupied, places.room + 3)


def test_a_state_goes_on_as_the_places_that_it_was_taken_of():
    places, other = Places(6), Places(6)
    places.take(np.arange(6), 0)
    places.leave(np.array([4, 1, 2]))
    other.load(places.state())
    places.take(np.array([6]), 1)
    assert other.take(np.array([6]), 1).tolist() == places.slots_of(np.array([6])).tolist()
    assert other.take(np.array([7, 8]), 1).tolist() == places.take(np.array([7, 8]), 1).tolist()


def test_slots_that_were_given_up_are_taken_in_ascending_order_so_that_neighbours_are_written_together():
    places = Places(100)
    places.take(np.arange(100), 0)
    places.leave(np.arange(70, 30, -1))
    assert places.take(np.arange(100, 140), 1).tolist() == list(range(31, 71))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32))
def test_a_roll_gives_what_is_live_of_old_and_new_rows_once_and_in_order(capacity, first, most, named, seed):
    chance, places, inserted, removed = np.random.default_rng(seed), Places(capacity), 0, set()

    def go_on() -> None:
        nonlocal inserted
        slots = np.flatnonzero(places.keys() >= 0)
        out = chance.permutation(slots)[: chance.integers(0, len(slots) + 1)]
        removed.update(places.keys_at(out).tolist())
        places.leave(out)
        new = int(chance.integers(0, places.room + 1))
        places.take(np.arange(inserted, inserted + new), 0)
        inserted += new

    for _ in range(4):
        go_on()
    roll = Roll(places, places.keys())
    roll.order(first)
    go_on()
    expected = [key for key in range(first, inserted) if key not in removed]
    assert [key for key in range(inserted) if key not in removed] == places.keys_from(0, capacity).tolist()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_NAMED", named)
        while len(keys := roll.keys_from(first, most, inserted)):
            assert len(keys) <= min(most, named)
            found += keys.tolist()
            first = found[-1] + 1
    assert found == expected
