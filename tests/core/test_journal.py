"""Journals: arrays by slot are copied as they were at one moment, whatever is done to them while that takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit
from conduit.core import journal as module
from conduit.core.episodes import End
from conduit.core.items import Needs
from conduit.core.journal import Copying, Journal, Later, at_once
from conduit.core.lineage import Following, Lineage
from conduit.core.links import Links
from conduit.core.ordered import RankTree
from conduit.core.places import Places
from conduit.core.priority_tree import PriorityTree
from conduit.core.ring import Window, by_age
from conduit.core.starts import Starts
from conduit.core.table import LiveTable, Table

NONE = np.zeros(0, np.int64)
changes = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=4)), max_size=6)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return one == other


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 40), st.integers(0, 10), st.tuples(changes, changes, changes, changes))
def test_a_copy_is_of_the_moment_whenever_slots_change(first, rows, phases):
    """Before the moment, before the copy, amid it, and after it."""
    ints, floats = np.arange(10), np.arange(10) / 4
    journal, window, value = Journal({"ints": ints, "floats": floats}), Window(first, first + rows), 100

    def change(phase: list[tuple[bool, list[int]]]) -> None:
        nonlocal value
        for is_range, slots in phase:
            low, stop = min(slots), max(slots) + 1
            if journal.on and is_range:
                journal.before_range(low, stop)
            elif journal.on:
                journal.before(np.array(slots))
            at: Any = slice(low, stop) if is_range else slots
            value += 1
            ints[at], floats[at] = value, value

    def amid(values: Any, window: Window) -> Any:
        before = by_age(values, window)
        change(phases[2])
        # Where it changed, the copy is torn.
        return np.where(before == by_age(values, window), before, 77).astype(values.dtype)

    change(phases[0])
    expected = {name: by_age(each, window) for name, each in journal.arrays.items()}
    with Copying() as copying, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "by_age", amid)
        state = {name: copying.later(journal, name, window) for name in journal.arrays}
        change(phases[1])
        ints_then = copying.settled(state["ints"])
        change(phases[3])
        floats_then = copying.settled(state["floats"])
        assert same({"ints": ints_then, "floats": floats_then}, expected)
    assert not journal.on
    change(phases[1])
    assert journal.aside_bytes == 0
    assert not np.shares_memory(ints_then, ints)


def test_what_is_put_aside_is_what_changed_whatever_the_capacity():
    noted = []
    for capacity in (1_000, 1_000_000):
        starts = Starts(capacity)
        with Copying() as copying:
            starts.state(Window(0, capacity), copying.later)
            starts.admit(np.arange(30))
            starts.evict(capacity, 10)
            noted.append(starts.journal.aside_bytes)
        assert starts.journal.aside_bytes == 0
    # A slot and its byte each.
    assert noted == [40 * 9, 40 * 9]


def test_a_note_that_comes_after_the_end_is_dropped():
    journal = Journal({"ints": np.arange(5)})
    with Copying() as copying:
        copying.later(journal, "ints", Window(0, 5))
        assert journal.on
    # Its owner had asked just before.
    journal.before(np.array([3]))
    assert journal.aside_bytes == 0
    with Copying() as copying:
        later = copying.later(journal, "ints", Window(0, 5))
        assert journal.aside_bytes == 0
        assert copying.settled(later).tolist() == [0, 1, 2, 3, 4]


def test_journals_are_off_after_a_failure_and_two_copyings_at_once_are_a_mistake():
    journal = Journal({"ints": np.arange(5)})

    def fails() -> None:
        with Copying() as copying:
            copying.later(journal, "ints", Window(0, 5))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert not journal.on
    with Copying() as one, Copying() as other:
        one.later(journal, "ints", Window(0, 5))
        with pytest.raises(AssertionError, match="another copy"):
            other.later(journal, "ints", Window(0, 5))
    assert not journal.on


def test_slots_that_are_told_may_be_changed_afterwards():
    journal, slots = Journal({"ints": np.arange(5)}), np.array([1, 2])
    with Copying() as copying:
        later = copying.later(journal, "ints", Window(0, 5))
        journal.before(slots)
        journal.arrays["ints"][slots] = 9
        slots[:] = 4
        assert copying.settled(later).tolist() == [0, 1, 2, 3, 4]


def test_only_plain_dicts_are_gone_into():
    journal = Journal({"ints": np.arange(3)})
    with Copying() as copying:
        later = copying.later(journal, "ints", Window(1, 3), lambda ints: 2 * ints)
        settled = copying.settled({"deep": {"er": later}, "list": [1], "none": None})
    assert settled["deep"]["er"].tolist() == [2, 4]
    assert (settled["list"], settled["none"]) == ([1], None)
    assert at_once(journal, "ints", Window(1, 3), lambda ints: 2 * ints).tolist() == [2, 4]


# Whoever has a journal: a copy that is made only after much else was done says what was true before it.

Owner = tuple[Callable[[], None], Callable[[Any], Any]]
"""What does something to it, anything; and what tells its state by a `Copy`."""

SAMPLERS = [
    conduit.Uniform(),
    conduit.Uniform(replacement=False),
    conduit.Prioritized(),
    conduit.Fifo(),
    conduit.Lifo(),
    conduit.MaxHeap(),
    conduit.MinHeap(),
    conduit.WithoutReplacement(),
    conduit.Recency(5.0),
    conduit.Stratified(),
]


def table(chance: random.Random, sampler: Any, most: int | None, linked: bool) -> Owner:
    capacity, first, stop, number = 17, 0, 0, 0
    shared = Starts(capacity) if linked else None
    live = LiveTable("main", Table(sampler, most), capacity, 2, 0, shared)

    def go_on() -> None:
        nonlocal first, stop, number
        what = chance.random()
        window = Window(first, stop)
        if what < 0.4:
            rows = chance.randint(1, 5)
            oldest = max(first, stop + rows - capacity)
            if shared is not None:
                shared.evict(first, oldest - first)
            admitted = NONE
            if shared is not None:
                admitted = np.array([key for key in range(stop, stop + rows) if chance.random() < 0.7], np.int64)
            first, stop = oldest, stop + rows
            if shared is not None:
                shared.admit(admitted)
            live.publish(
                stop - rows, rows, np.arange(rows, dtype=np.float64) if sampler.prioritized else None, admitted, NONE
            )
        elif what < 0.8:
            if live.missing(window, 2, number) is None:
                live.draw(number, 2, window)
                number += 1
        elif what < 0.9 and stop > first and sampler.prioritized:
            keys = np.array([chance.randrange(first, stop) for _ in range(3)])
            live.sampler.update(keys, np.array([chance.random() for _ in keys]))
        elif shared is None:
            live.exclude(np.array([key for key in range(first, stop) if chance.random() < 0.2], np.int64))

    excluded: set[int] = set()
    if most is None:
        # By what excludes rows of its own: each once.
        real = live.exclude

        def once(keys: Any) -> int:
            nonlocal excluded
            keys = np.array([key for key in keys.tolist() if key not in excluded], np.int64)
            excluded |= set(keys.tolist())
            return real(keys) if len(keys) else 0

        live.exclude = once
    return go_on, lambda copy: live.state(Window(first, stop), copy)


def lineage(chance: random.Random, needs: Needs, by: str | None) -> Owner:
    capacity, first, stop = 17, 0, 0
    made = Lineage(capacity, Following(needs, by is None, 2 if by is None else 1, by))

    def go_on() -> None:
        nonlocal first, stop
        if chance.random() < 0.1:
            made.cut([chance.randrange(3)])
            return
        if chance.random() < 0.5:
            lane = np.arange(3)
            end = np.array([chance.choice((End.OPEN, End.OPEN, End.TERMINATED, End.TRUNCATED)) for _ in lane], np.uint8)
        else:
            lane = np.full(chance.randint(1, 6), chance.choice((-1, 0, 1, 2)))
            end = np.zeros(len(lane), np.uint8)
        oldest = max(first, stop + len(lane) - capacity)
        made.evict(first, oldest - first)
        made.append(stop, lane, end, 0, np.array([chance.randrange(4) for _ in lane]) if by else None)
        ended = stop + np.flatnonzero(end == End.TRUNCATED)
        made.links.conclude(ended, ended)
        first, stop = oldest, stop + len(lane)

    return go_on, lambda copy: made.state(Window(first, stop), copy)


def links(chance: random.Random) -> Owner:
    made, first = Links(17), 40
    made.put(first, np.zeros(17, np.uint8))

    def go_on() -> None:
        keys = np.array([chance.randrange(first, first + 17)])
        low = chance.randrange(first, first + 12)
        chance.choice(
            [
                lambda: made.chain(low, 5),
                lambda: made.connect(keys, np.array([low])),
                lambda: made.connect(keys, np.array([-1])),
                lambda: made.conclude(keys, np.array([chance.randrange(100)])),
                lambda: made.cut(low),
            ]
        )()

    return go_on, lambda copy: made.state(Window(first, first + 17), copy)


def ranks(chance: random.Random) -> Owner:
    made = RankTree(17, np.dtype(np.float64))

    def go_on() -> None:
        some = np.array(chance.sample(range(17), 4))
        chance.choice(
            [
                lambda: made.put(3, 7, np.array([chance.random()] * 4), np.array([True, False, True, False])),
                lambda: made.move(some, np.array([chance.random()] * 4)),
                lambda: made.show(some),
                lambda: made.hide(some),
            ]
        )()

    return go_on, lambda copy: {name: copy(made.journal, name, Window(0, 17)) for name in made.journal.arrays}


def places(chance: random.Random) -> Owner:
    made, inserted = Places(17), 0

    def go_on() -> None:
        nonlocal inserted
        taken = np.flatnonzero(made.keys() >= 0)
        made.leave(np.array(chance.sample(taken.tolist(), chance.randint(0, len(taken))), np.int64))
        rows = chance.randint(0, made.room)
        made.take(np.arange(inserted, inserted + rows), np.arange(rows))
        inserted += rows

    return go_on, made.state


def owners(chance: random.Random) -> Iterator[tuple[str, Owner]]:
    for sampler in SAMPLERS:
        for most in (None, 2):
            for linked in (False, True):
                yield f"{sampler} {most} {linked}", table(chance, sampler, most, linked)
    for needs in (Needs(), Needs(3), Needs(2, partial=True), Needs(2, period=2)):
        yield str(needs), lineage(chance, needs, None)
    yield "groups", lineage(chance, Needs(3), "prompt")
    yield "links", links(chance)
    yield "ranks", ranks(chance)
    yield "places", places(chance)


@pytest.mark.parametrize("seed", range(6))
def test_every_owner_tells_of_every_change(seed):
    for name, (go_on, state) in owners(random.Random(seed)):
        for _ in range(10):
            for _ in range(6):
                go_on()
            before = state(at_once)
            with Copying() as copying:
                then = state(copying.later)
                for _ in range(8):
                    go_on()
                assert same(copying.settled(then), before), name


def test_a_tree_s_sums_are_no_part_of_what_is_kept():
    tree = PriorityTree(5000)
    assert {name: len(each) for name, each in tree.journal.arrays.items()} == {"leaves": 5000}


def test_nothing_is_copied_before_it_is_settled(monkeypatch):
    def none(values: Any, window: Window) -> Any:
        raise AssertionError("copied in the turn")

    asked = list(owners(random.Random(0)))
    for _, (go_on, _) in asked:
        go_on()
    monkeypatch.setattr(module, "by_age", none)
    found = 0
    for _, (_, state) in asked:
        with Copying() as copying:
            told, stack = state(copying.later), []
            stack.append(told)
            while stack:
                each = stack.pop()
                found += isinstance(each, Later)
                stack += each.values() if isinstance(each, dict) else []
    assert found > 60
