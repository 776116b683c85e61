"""Limiters: what they let through, what they say, and a search of all that can happen for a state in which both sides wait."""

from __future__ import annotations

import copy
import math
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

from conduit.core.limiter import Counters, Limiter, MinSize, Queue, SampleToInsertRatio
from conduit.errors import SettingError


def at(size: int = 0, pending: int = 0, inserted: int = 0, sampled: int = 0) -> Counters:
    return Counters(size, pending, inserted, sampled)


def test_rows_that_hooks_hold_until_others_come_are_none_that_draws_could_wait_for():
    ratio = SampleToInsertRatio(1.0, min_size_to_sample=8, error_buffer=32)
    on_their_way, held = Counters(6, 8, 128, 96), Counters(6, 8, 128, 96, held=8)
    assert not ratio.may_sample(4, held)
    assert not ratio.may_insert(2, on_their_way)
    assert ratio.may_insert(2, held)


# What they let through


def test_min_size_holds_draws_until_enough_rows_can_be_drawn_and_never_a_push():
    limiter = MinSize(10)
    assert not limiter.may_sample(1, at(size=9, inserted=1000))
    assert limiter.may_sample(10**9, at(size=10))
    assert limiter.may_insert(10**9, at(size=10**9, pending=10**9))


def test_a_ratio_holds_whole_pushes_and_whole_batches_at_its_bounds_exactly():
    limiter = SampleToInsertRatio(
        samples_per_insert=4, min_size_to_sample=10, error_buffer=20
    )  # the cursor in [20, 60]
    assert limiter.may_insert(5, at(size=10, inserted=10))
    assert not limiter.may_insert(6, at(size=10, inserted=10))
    assert not limiter.may_insert(1, at(size=10, inserted=10, pending=5))
    assert limiter.may_insert(6, at(size=10, inserted=10, sampled=4))
    assert limiter.may_sample(20, at(size=10, inserted=10))
    assert not limiter.may_sample(21, at(size=10, inserted=10))
    # Pending rows can't be drawn yet.
    assert not limiter.may_sample(21, at(size=10, inserted=10, pending=5))


def test_below_the_smallest_size_there_is_no_draw_and_every_push_is_free():
    limiter = SampleToInsertRatio(samples_per_insert=1, min_size_to_sample=10, error_buffer=4)
    assert limiter.may_insert(1000, at(size=9, inserted=10**6))
    assert not limiter.may_insert(1000, at(size=9, pending=1, inserted=10**6))
    assert not limiter.may_sample(1, at(size=9, inserted=10**6))
    assert limiter.may_sample(1, at(size=10, inserted=10**6))


def test_an_error_buffer_of_two_numbers_is_the_bounds_themselves():
    one, two = SampleToInsertRatio(4, 10, 20), SampleToInsertRatio(4, 10, (20.0, 60.0))
    for inserted, sampled, rows in product(range(10, 20), range(0, 60, 3), (1, 2, 7)):
        now = at(size=10, inserted=inserted, sampled=sampled)
        assert one.may_insert(rows, now) == two.may_insert(rows, now)
        assert one.may_sample(rows, now) == two.may_sample(rows, now)


def test_a_queue_is_never_longer_than_its_size_and_gives_nothing_twice():
    limiter = Queue(8)
    assert limiter.may_insert(8, at())
    assert not limiter.may_insert(9, at())
    assert not limiter.may_insert(3, at(size=4, pending=2, inserted=104, sampled=100))
    assert limiter.may_sample(4, at(size=4, inserted=104, sampled=100))
    assert not limiter.may_sample(5, at(size=8, inserted=104, sampled=100))


@pytest.mark.parametrize(
    "ratio", [0.1, 0.3, 1.1, 2.7, 1 / 3, 1e-6, np.float64(0.7), np.float32(0.1), np.int64(3), 123456.789]
)
def test_nothing_drifts_however_far_the_counters_are(ratio):
    limiter = SampleToInsertRatio(ratio, 1, (0, 1000))
    exact = fraction(ratio)
    far = 10**12 // exact.denominator * exact.denominator or exact.denominator * 10**4
    for rows, near in product((1, 3, 10), (0, 1, 7, 500)):
        here = at(size=1, inserted=near, sampled=int(near * exact))
        there = at(size=1, inserted=near + far, sampled=int(near * exact) + int(far * exact))
        assert limiter.may_insert(rows, here) == limiter.may_insert(rows, there)
        assert limiter.may_sample(rows, here) == limiter.may_sample(rows, there)
    # At the bound itself, where a float would be off by one now and then.
    edge = SampleToInsertRatio(ratio, 1, (0, 0))
    assert edge.may_insert(exact.denominator, at(size=1, inserted=far, sampled=int((far + exact.denominator) * exact)))
    assert not edge.may_insert(
        exact.denominator, at(size=1, inserted=far, sampled=int((far + exact.denominator) * exact) - 1)
    )


# What they say

LIMITERS = [
    MinSize(7),
    Queue(9),
    SampleToInsertRatio(4, 3, 12),
    SampleToInsertRatio(0.3, 3, (-2.5, 7)),
    SampleToInsertRatio(np.float64(2.4), 1, 9.5),
]


@pytest.mark.parametrize("limiter", LIMITERS, ids=str)
def test_what_it_asks_for_is_just_enough(limiter):
    seen = set()
    for size, inserted, sampled, rows in product((0, 2, 8), (0, 3, 8, 40), (0, 5, 50), (1, 4)):
        now = at(size=size, inserted=inserted, sampled=sampled)
        entries = _asked(limiter.why_no_insert(rows, now), "draw ")
        assert (entries == 0) == limiter.may_insert(rows, now)
        if entries:
            seen.add("draw")
            assert limiter.may_insert(rows, replace(now, sampled=sampled + entries))
            assert not limiter.may_insert(rows, replace(now, sampled=sampled + entries - 1))
        more = _asked(limiter.why_no_sample(rows, now), "push ")
        assert (more == 0) == limiter.may_sample(rows, now)
        if more:
            seen.add("push")
            assert limiter.may_sample(rows, replace(now, size=size + more, inserted=inserted + more))
            assert not limiter.may_sample(rows, replace(now, size=size + more - 1, inserted=inserted + more - 1))
    assert seen == ({"push"} if isinstance(limiter, MinSize) else {"draw", "push"})


def _asked(why: str, verb: str) -> int:
    return int(why.partition(f": {verb}")[2].split()[0]) if why else 0


def test_it_names_itself_the_counters_and_the_way_out():
    limiter = SampleToInsertRatio(samples_per_insert=4, min_size_to_sample=100, error_buffer=512)
    now = at(size=150, pending=24, inserted=1000, sampled=2000)
    assert limiter.why_no_insert(8, now, batch_size=256) == (
        "SampleToInsertRatio(samples_per_insert=4, min_size_to_sample=100, error_buffer=512) holds a push of 8 rows; 150 rows can "
        "be drawn, 1000 inserted, 24 pending, 2000 entries drawn: draw 1216 more entries, 5 batches of 256"
    )
    assert MinSize(100).why_no_sample(256, at(size=80, pending=3, inserted=80)) == (
        "MinSize(min_size_to_sample=100) holds a draw of 256 entries; 80 rows can be drawn, 80 inserted, 3 pending, 0 entries drawn: "
        "push 17 more rows"
    )
    assert "once the pending ones are ingested" in MinSize(100).why_no_sample(1, at(size=80, pending=20))


# What can't be


def odd(value: object) -> Any:
    """A value that the types rule out."""
    return value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MinSize(0), "min_size_to_sample=0: expected a whole number"),
        (lambda: MinSize(True), "min_size_to_sample=True: expected a whole number"),
        (lambda: Queue(odd(2.5)), r"max_size=2.5: expected a whole number"),
        (lambda: SampleToInsertRatio(0, 1, 8), "samples_per_insert=0: expected a finite number > 0"),
        (lambda: SampleToInsertRatio(math.nan, 1, 8), "samples_per_insert=nan"),
        (lambda: SampleToInsertRatio(math.inf, 1, 8), "samples_per_insert=inf"),
        (lambda: SampleToInsertRatio(odd("4"), 1, 8), "samples_per_insert='4'"),
        (lambda: SampleToInsertRatio(4, 0, 8), "min_size_to_sample=0"),
        (lambda: SampleToInsertRatio(4, 1, -1), "error_buffer=-1: expected a finite number ≥ 0"),
        (lambda: SampleToInsertRatio(4, 1, math.inf), "error_buffer=inf: expected a finite number"),
        (lambda: SampleToInsertRatio(4, 1, (8, 0)), r"error_buffer=\(8, 0\): expected \(min_diff, max_diff\)"),
        (lambda: SampleToInsertRatio(4, 1, (0, math.nan)), "two finite numbers in this order"),
        (lambda: SampleToInsertRatio(4, 1, (0, math.inf)), "two finite numbers in this order"),
        (lambda: SampleToInsertRatio(4, 1, odd((1, 2, 3))), "two finite numbers in this order"),
    ],
)
def test_a_setting_that_means_nothing_is_refused_when_it_is_made(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def checked(limiter: Limiter, *, capacity: int = 100, batch_size: int = 4, most: int | None = None) -> None:
    limiter.check(capacity=capacity, batch_size=batch_size, max_times_sampled=most)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            lambda: checked(MinSize(101)),
            "never 101 rows in a store of capacity=100; expected a min_size_to_sample of at most 100",
        ),
        (lambda: checked(SampleToInsertRatio(1, 101, 50)), "expected a min_size_to_sample of at most 100"),
        (lambda: checked(SampleToInsertRatio(2.5, 1, 50), most=2), "no row gives 2.5 entries; expected .* at most 2"),
        (lambda: checked(SampleToInsertRatio(2, 1, 2)), "a batch of 4 entries .* an error_buffer of at least 3"),
        (lambda: checked(SampleToInsertRatio(0.1, 1, 1.9)), "expected an error_buffer of at least 2"),
        (lambda: checked(SampleToInsertRatio(0.1, 1, (5, 8))), "expected max_diff at least 1 higher"),
        (lambda: checked(Queue(101)), "longer than capacity=100"),
        (lambda: checked(Queue(3)), "batch of 4 entries .* a max_size of at least 4"),
        (
            lambda: SampleToInsertRatio(2, 1, 6).check_insert(8, 4),
            "push of 8 rows and a batch of 4 .* an error_buffer of at least 10, or pushes of at most 4",
        ),
        (lambda: Queue(8).check_insert(6, 4), "a max_size of at least 9"),
        (lambda: SampleToInsertRatio(2, 1, 6).check_sample(12), "batch of 12 entries .* at least 7"),
        (lambda: Queue(8).check_sample(4, push=6), "a max_size of at least 9"),
    ],
)
def test_a_limiter_that_can_not_be_met_says_what_would_do(check, message):
    with pytest.raises(SettingError, match=message):
        check()


def test_what_a_limiter_asks_for_is_the_least_that_would_do():
    for ratio, batch, push in product((0.1, 0.5, 1, 1.5, 3, 2.4), (1, 4, 9), (1, 2, 5)):
        with pytest.raises(SettingError, match="at least") as refused:
            SampleToInsertRatio(ratio, 2, 0).check_insert(push, batch)
        least = float(str(refused.value).partition("error_buffer of at least ")[2].split(",")[0])
        SampleToInsertRatio(ratio, 2, least).check_insert(push, batch)
        with pytest.raises(SettingError):
            SampleToInsertRatio(ratio, 2, math.nextafter(least, 0)).check_insert(push, batch)


def test_limiters_are_values():
    for limiter in LIMITERS:
        assert isinstance(limiter, Limiter)
        assert copy.deepcopy(limiter) == pickle.loads(pickle.dumps(limiter)) == limiter
        assert len({limiter, copy.copy(limiter)}) == 1
    assert SampleToInsertRatio(4, 1, 8) != SampleToInsertRatio(4, 1, 9)


# The search: a store in small, in which whatever can happen happens

Rows = tuple[int, ...]
"""Live rows by age: how many more times each may be drawn."""


class State(NamedTuple):
    cursor: int
    """samples_per_insert · inserted − sampled, in the smallest steps that there are."""
    pending: int
    rows: Rows


Found = tuple[State, int, int]
"""A state, and a push and a batch that wait in it for each other."""


class World:
    """A table of `capacity` rows. Producers make pushes of `pushes` rows, consumers draw batches of `batches` entries; each
    comes, goes and dies as it likes. `most`: max_times_sampled."""

    def __init__(
        self, limiter: Any, capacity: int, pushes: Sequence[int], batches: Sequence[int], most: int | None = None
    ) -> None:
        self.limiter, self.capacity, self.pushes, self.batches, self.most = limiter, capacity, pushes, batches, most
        self.largest_push, self.largest_batch = max(pushes), max(batches)
        ratio = fraction(getattr(limiter, "samples_per_insert", 1))
        self.up, self.down = ratio.numerator, ratio.denominator
        self.smallest = getattr(limiter, "min_size_to_sample", 0)
        # Where the cursor is kept, in steps, from the limiter's description alone.
        self.low, self.high = -math.inf, math.inf
        if isinstance(limiter, Queue):
            self.low, self.high = 0, limiter.max_size
        if isinstance(limiter, SampleToInsertRatio):
            middle, buffer = ratio * self.smallest, fraction(limiter.error_buffer)
            self.low, self.high = float((middle - buffer) * self.down), float((middle + buffer) * self.down)
        # This cursor stands for all higher ones: no push is let in for its sake there, and no batch is held.
        self.top = 0
        if self.high < math.inf:
            self.top = math.ceil(self.high) + self.up * self.largest_push + self.down * self.largest_batch
        self._inverse = pow(self.up, -1, self.down) if self.down > 1 else 0

    def __repr__(self) -> str:
        return (
            f"{self.limiter}, capacity {self.capacity}, pushes {self.pushes}, batches {self.batches}, most {self.most}"
        )

    def counters(self, state: State) -> Counters:
        """Some counters with this cursor."""
        inserted = state.cursor * self._inverse % self.down
        drawable = len(state.rows) - state.rows.count(0)
        return Counters(drawable, state.pending, inserted, (inserted * self.up - state.cursor) // self.down)

    def may_insert(self, push: int, batch: int, now: Counters) -> bool:
        """With the table's rule: a push is let in while a batch lacks rows and none are pending."""
        return self.limiter.may_insert(push, now) or (now.pending == 0 and now.size < batch)

    def may_sample(self, batch: int, now: Counters) -> bool:
        return now.size >= batch and self.limiter.may_sample(batch, now)

    def blocked(self, state: State) -> Found | None:
        """A producer and a consumer who would wait for ever if they were the only ones left. Pending rows always get in."""
        if not state.pending:
            now = self.counters(state)
            for push, batch in product(self.pushes, self.batches):
                if not self.may_sample(batch, now) and not self.may_insert(push, batch, now):
                    return state, push, batch
        return None

    def followers(self, state: State) -> Iterator[State]:
        now = self.counters(state)
        cursor, pending, rows = state
        for push in self.pushes:
            # The inbox has room for two of the largest; a full one empties by itself.
            if pending + push <= 2 * self.largest_push and self.may_insert(push, self.largest_batch, now):
                after = cursor + self.up * (pending + push)
                # Only these two let it go beyond its bounds: too few rows for any draw, or for a batch.
                if cursor < self.top and after > self.high:
                    assert now.size + pending < self.smallest or (not pending and now.size < self.largest_batch)
                yield State(cursor, pending + push, rows)
        for came in range(1, pending + 1):
            # A hook may drop rows, and some rows can't be drawn: they lack what follows them.
            yield State(cursor, pending - came, rows)
            after = self.bounded(cursor + self.up * came)
            for times in (0, self.most or 1):
                yield State(after, pending - came, (rows + (times,) * came)[-self.capacity :])
        for batch in self.batches:
            if self.may_sample(batch, now):
                assert cursor - self.down * batch >= self.low
                for after, kept in product(self.after_draw(cursor, batch), drawn(rows, batch, self.most is not None)):
                    yield State(after, pending, kept)

    def after_draw(self, cursor: int, batch: int) -> Iterable[int]:
        """From the top, which stands for what is above it too, to any below it that a draw leads to."""
        after = cursor - self.down * batch
        return range(after, self.top + 1) if cursor == self.top > 0 else (self.bounded(after),)

    def bounded(self, cursor: int) -> int:
        return min(cursor, self.top) if self.top else 0


@cache
def drawn(rows: Rows, entries: int, counted: bool) -> frozenset[Rows]:
    """What can be left of the rows after a draw of so many entries, whichever they are; no row is drawn too often."""
    if not counted:
        return frozenset([rows])
    left = {rows}
    for _ in range(entries):
        left = {
            (*row[:i], row[i] - 1, *row[i + 1 :]) for row in left for i, times in enumerate(row) if times > 0
        } or left
    return frozenset(left)


def explore(world: World) -> tuple[int, Found | None]:
    """All states that can be reached, breadth first: how many, and the first in which both sides wait."""
    begin = State(0, 0, ())
    seen, queue = {begin}, deque([begin])
    while queue:
        state = queue.popleft()
        if found := world.blocked(state):
            return len(seen), found
        for other in world.followers(state):
            if other not in seen:
                seen.add(other)
                queue.append(other)
    return len(seen), None


def fraction(number: Any) -> Fraction:
    return Fraction(str(float(number)))


def tight(ratio: float, smallest: int, push: int, batch: int, less: int = 0) -> SampleToInsertRatio:
    """The narrowest that is allowed, or narrower by `less` steps."""
    exact = fraction(ratio)
    steps = -(-(push * exact.numerator + batch * exact.denominator - 1) // 2) - less
    return SampleToInsertRatio(ratio, smallest, steps / exact.denominator)


def worlds() -> Iterator[World]:
    """Every limiter as narrow as it may be, beside all sizes of pushes and batches in small."""
    for capacity, most, push, batch in product((2, 3, 4), (None, 1, 2), (1, 2, 3), (1, 2, 3)):
        if batch > capacity or (capacity == 4 and most == 2):
            continue
        pushes, batches = range(1, push + 1), range(1, batch + 1)
        for smallest in (1, capacity):
            yield World(MinSize(smallest), capacity, pushes, batches, most)
            for ratio in (0.4, 0.5, 1, 1.5, 2, 3):
                if most is None or ratio <= min(most, 1.5):
                    yield World(tight(ratio, smallest, push, batch), capacity, pushes, batches, most)
        if push + batch - 1 <= capacity:
            yield World(Queue(push + batch - 1), capacity, pushes, batches, most)


def test_in_no_state_that_can_be_reached_do_both_sides_wait():
    several, states = 0, 0
    for world in worlds():
        world.limiter.check(capacity=world.capacity, batch_size=world.largest_batch, max_times_sampled=world.most)
        world.limiter.check_insert(world.largest_push, world.largest_batch)
        count, found = explore(world)
        assert found is None, f"{world}: {found}"
        several, states = several + 1, states + count
    print(f"{states:,} states of {several} stores in small")
    assert (several, states) > (400, 100_000)


def test_whatever_counters_a_checkpoint_brings_back_one_side_goes_on():
    for world in worlds():
        lowest = 0 if world.low == -math.inf else math.floor(world.low)
        for cursor, size in product(range(lowest - world.top - 9, world.top + 9), range(world.capacity + 1)):
            assert world.blocked(State(cursor, 0, (1,) * size)) is None, f"{world}: cursor {cursor}, {size} rows"


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1, 1.5, 2.4, 3, 8])
def test_one_step_less_of_error_buffer_and_both_sides_wait_somewhere(ratio):
    for smallest, push, batch in product((1, 3), (1, 2, 5), (1, 3, 4)):
        for less in (0, 1):
            limiter = tight(ratio, smallest, push, batch, less)
            world = World(limiter, 4, sorted({1, push}), sorted({1, batch}))
            _, found = explore(world)
            assert (found is not None) == bool(less), f"{world}: {found}"
            if less:
                with pytest.raises(SettingError):
                    limiter.check_insert(push, batch)


def test_a_queue_shorter_by_one_and_both_sides_wait_somewhere():
    for push, batch in product((1, 2, 3), (1, 2, 3)):
        for size in (push + batch - 1, push + batch - 2):
            if size >= 1:
                world = World(Queue(size), 4, sorted({1, push}), sorted({1, batch}))
                assert (explore(world)[1] is not None) == (size < push + batch - 1), world


class HoldsEarly(SampleToInsertRatio):
    """Pushes are free only if the table is no larger than min_size_to_sample after them, as Reverb has it for single items."""

    def may_insert(self, rows: int, at: Counters) -> bool:
        return self._bounds.may_insert(rows, replace(at, size=10**9)) or at.size + at.pending + rows <= 3


class WithoutTheRule(World):
    """A table that doesn't let a push in when rows are all that a batch lacks."""

    def may_insert(self, push: int, batch: int, now: Counters) -> bool:
        return self.limiter.may_insert(push, now)


def test_the_search_finds_what_the_rules_are_there_for():
    assert explore(World(SampleToInsertRatio(2, 3, 3), 4, (2, 3), (1,)))[1] is None
    assert explore(World(HoldsEarly(2, 3, 3), 4, (2, 3), (1,)))[1] == (State(4, 0, (1, 1)), 3, 1)
    # Rows that can't be drawn fill the queue.
    assert explore(World(Queue(2), 3, (1,), (2,), most=1))[1] is None
    assert explore(WithoutTheRule(Queue(2), 3, (1,), (2,), most=1))[1] == (State(2, 0, (0, 0)), 1, 2)


def test_tables_over_the_same_rows_do_not_block_each_other_while_each_is_drawn_from():
    pushes, capacity = (1, 2), 4
    kinds: list[Any] = [Queue(3), MinSize(4), tight(0.5, 1, 2, 2), tight(2, 4, 2, 2), tight(1.5, 2, 2, 2)]
    states = 0
    for first, second in product(kinds, kinds):
        tables = [World(first, capacity, pushes, (1, 2)), World(second, capacity, pushes, (2,))]
        begin: tuple[int, ...] = (0, 0, 0, 0)
        seen, queue = {begin}, deque([begin])
        while queue:
            *cursors, pending, size = queue.popleft()
            now = [world.counters(State(c, pending, (1,) * size)) for world, c in zip(tables, cursors, strict=True)]
            pairs = list(zip(tables, now, strict=True))
            others = []
            for push in pushes:
                goes_in = all(world.may_insert(push, 2, at) for world, at in pairs)
                drawn_from = [all(world.may_sample(batch, at) for batch in world.batches) for world, at in pairs]
                assert goes_in or pending or any(drawn_from), (tables, cursors, size)
                if goes_in and pending + push <= 4:
                    others.append((*cursors, pending + push, size))
            if pending:
                came = [world.bounded(c + world.up) for world, c in zip(tables, cursors, strict=True)]
                others.append((*came, pending - 1, min(size + 1, capacity)))
            for place, (world, at) in enumerate(pairs):
                for batch in world.batches:
                    if world.may_sample(batch, at):
                        for cursor in world.after_draw(cursors[place], batch):
                            others.append((*cursors[:place], cursor, *cursors[place + 1 :], pending, size))
            fresh = set(others) - seen
            seen |= fresh
            queue.extend(sorted(fresh))
        states += len(seen)
    print(f"{states:,} states of {len(kinds) ** 2} pairs of tables")
    assert states > 1_000
