"""A lineage that is saved and loaded goes on as if nothing had happened: at every point of random plays, in rings of any size."""

from __future__ import annotations

import random
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import pytest

import conduit
from conduit.core.episodes import End
from conduit.core.lineage import Lineage
from conduit.core.recipe import Recipe
from conduit.core.ring import Window
from tests.links.reference import CUT, OPEN, TERMINATED, TRUNCATED, Derive, Group, Item, Model, Rules, Stored
from tests.links.rings import Ring
from tests.links.test_exhaustive import CONFIGURATIONS, DERIVES, ITEMS, hash_of

ENDS = {OPEN: End.OPEN, TERMINATED: End.TERMINATED, TRUNCATED: End.TRUNCATED, CUT: End.CUT}
NOT_CUT = (OPEN, OPEN, OPEN, OPEN, TERMINATED, TRUNCATED)
LANES = 4
FINAL: dict[str, Any] = {}


class View(Model):
    """A model's rows from `oldest` on."""

    def __init__(self, model: Model, oldest: int) -> None:
        super().__init__(len(model.rows) + 1)
        self.rows, self._oldest = model.rows, oldest

    @property
    def live(self) -> list[Stored]:
        return self.rows[self._oldest :]

    def is_live(self, row: Stored) -> bool:
        return row.key >= self._oldest


def assert_is(ring: Ring, model: Model, item: Item, derive: Derive) -> None:
    """The ring's drawable rows and its links are the model's."""
    view = View(model, ring.window.first)
    rules = Rules(view, item, derive)
    assert sorted(ring.drawable) == rules.drawable_starts()
    if not view.live:
        return
    keys = np.array([row.key for row in view.live])
    links = ring.lineage.links
    if isinstance(item, Group):
        for key, group in rules.groups().items():
            if key in ring.drawable:
                assert links.walk(np.array([key]), item.size)[0].tolist() == [[row.key for row in group]]
        return
    for following, path, count in ((True, *links.walk(keys, 3)), (False, *links.walk_back(keys, 3))):
        for row, there in zip(view.live, (p[:c].tolist() for p, c in zip(path, count, strict=True)), strict=True):
            places = range(row.place, row.place + 3) if following else range(row.place, row.place - 3, -1)
            expected = [row.episode[place] for place in places if 0 <= place < len(row.episode)]
            assert there == [each.key for each in expected if view.is_live(each)]
    assert links.begins(keys).tolist() == [row.place == 0 for row in view.live]
    has_next = [row.successor is not None or row.final is not None or row.end == TERMINATED for row in view.live]
    assert links.has_next(keys).tolist() == has_next


Event = tuple[list[int], Several[str], list[int], list[int]]
"""Lanes, ends, groups, and the places of rows with finals."""


def event_of(chance: random.Random, capacity: int) -> Event | list[int]:
    """Rows, or lanes that are cut."""
    what = chance.random()
    if what < 0.12:
        return chance.sample(range(LANES), 2)
    if what < 0.4:
        count = chance.choice((1, 2, 3, capacity, capacity + 2))
        lanes = [chance.randrange(LANES)] * count
        ends = [OPEN] * (count - 1) + [chance.choice((*NOT_CUT, CUT))]
    else:
        lanes = sorted(chance.sample(range(LANES), chance.randrange(1, LANES + 1)))
        ends = chance.choices(NOT_CUT, k=len(lanes))
    finals = [i for i, end in enumerate(ends) if end == TRUNCATED or (end == TERMINATED and chance.random() < 0.5)]
    return lanes, ends, chance.choices(range(5), k=len(lanes)), finals


def happens(event: Event | list[int], rings: Several[Ring], model: Model) -> None:
    if isinstance(event, list):
        model.cut(event)
        for ring in rings:
            ring.cut(event)
        return
    lanes, ends, groups, finals = event
    for i, (lane, end, group) in enumerate(zip(lanes, ends, groups, strict=True)):
        model.push(lane, {"prompt": group}, end, FINAL if i in finals else None)
    for ring in rings:
        by = groups if ring.lineage.by is not None else None
        ring.push(lanes, [ENDS[end] for end in ends], by, finals)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


KINDS: dict[str, tuple[Item, Derive]] = {f"{i} / {d}": (ITEMS[i], DERIVES[d]) for i, d in CONFIGURATIONS}
KINDS |= {f"group {size}": (Group(size), {}) for size in (1, 2, 3)}


def ring_of(kind: str, capacity: int) -> Ring:
    item, derive = KINDS[kind]
    return Ring(capacity, Recipe(item.made(), {name: made.made() for name, made in derive.items()}).following)


@pytest.mark.parametrize("kind", KINDS)
def test_a_play_goes_on_from_every_point_as_it_went_on(kind):
    item, derive = KINDS[kind]
    for number in range(2):
        chance = random.Random(hash_of(kind, number))
        capacity = chance.choice((4, 5, 7, 9))
        model, ring = Model(capacity), ring_of(kind, capacity)
        again: list[Ring] = []
        for _ in range(14):
            # From the play itself, or from one that was loaded before.
            again.append(chance.choice([ring, *again]).restored(capacity))
            happens(event_of(chance, capacity), [ring, *again], model)
            assert all(other.drawable == ring.drawable for other in again)
        assert_is(ring, model, item, derive)
        assert all(equal(other.saved(), ring.saved()) for other in again)


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_smaller_or_larger_ring_it_goes_on_without_the_rows_that_are_gone(kind):
    item, derive = KINDS[kind]
    chance = random.Random(hash_of(kind, "other sizes"))
    model, rings = Model(6), [ring_of(kind, 6)]
    for _ in range(16):
        if len(rings) < 9:
            capacity, lost = chance.choice((3, 4, 5, 6, 8, 13, 40)), chance.choice((0, 0, 1, 3))
            rings.append(chance.choice(rings).restored(capacity, lost=lost))
        happens(event_of(chance, 6), rings, model)
        for ring in rings:
            assert_is(ring, model, item, derive)


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_that_are_not_kept_are_cut(kind):
    chance = random.Random(hash_of(kind, "cut"))
    model, ring = Model(7), ring_of(kind, 7)
    for _ in range(12):
        happens(event_of(chance, 7), [ring], model)
        for capacity in (4, 7, 11):
            kept = ring.restored(capacity)
            kept.cut(range(len(kept.saved().get("newest", []))))
            cut = ring.restored(capacity, keep_lanes=False)
            assert cut.drawable == kept.drawable
            assert equal(cut.saved(), kept.saved())


def test_groups_stay_open_where_lanes_are_cut():
    ring = ring_of("group 2", 8)
    ring.push([0, 1], by=[3, 4])
    again = ring.restored(8, keep_lanes=False)
    again.push([2], by=[3])
    assert again.drawable == {0}


def test_a_lineage_that_nothing_happened_to_can_be_saved_and_loaded():
    for kind in KINDS:
        again = ring_of(kind, 5).restored(5)
        assert equal(again.saved(), ring_of(kind, 5).saved())


def test_what_is_saved_stays_as_it_is():
    ring = ring_of("sequence 2 / next of stack", 6)
    ring.push([0] * 4)
    saved = ring.saved()
    before = {name: part.copy() for name, part in saved.items()}
    ring.push([0] * 4, [End.OPEN] * 3 + [End.TERMINATED])
    assert equal(saved, before)


def test_finals_keep_their_numbers():
    ring = ring_of("row / next", 6)
    ring.finals = 1000
    ring.push([0, 1, 2], [End.TRUNCATED] * 3, finals=[0, 1, 2])
    again = ring.restored(9)
    onward = again.lineage.links.onward(np.arange(3))
    assert again.lineage.links.final_numbers(onward, 1003).tolist() == [1000, 1001, 1002]


def test_links_of_a_ring_too_large_for_narrow_ones_are_loaded_into_narrow_ones():
    following = Recipe(conduit.Row(), {"s": conduit.Stack("obs", 2)}).following
    small = Lineage(4, following)
    far = np.iinfo(np.int32).max + 10
    state = {
        "onward": np.array([1, 0], np.int64),
        "back": np.array([far, 1], np.int64),
        "end": np.zeros(2, np.uint8),
        "drawable": np.ones(2, np.bool_),
        "newest": np.array([far + 1]),
        "place": np.array([5]),
        "candidates": np.full((1, 2), -1),
    }
    small.load(state, Window(far, far + 2))
    keys = np.array([far, far + 1])
    assert small.links.walk(keys, 2)[0].tolist() == [[far, far + 1], [far + 1, far + 1]]
    assert small.links.begins(keys).tolist() == [False, False]
