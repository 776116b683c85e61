"""Limiters: how far pushes and draws may get out of step. Values and pure functions over counters; who waits is a table's business.

What each compares is a cursor, samples_per_insert · (rows inserted) − (entries drawn). A whole push or a whole batch is let through
if it leaves the cursor within its bounds. With bounds far enough apart, where one side is held the other isn't: for
samples_per_insert = p / q in lowest terms the cursor goes in steps of 1 / q, a push of n rows is held above high − n · p / q and a
batch of B entries below low + B, so there is no place for both if high − low ≥ B + n · p / q − 1 / q. It is so wherever the cursor
is, be it from a checkpoint; which is all that `check`, `check_insert` and `check_sample` ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np

from conduit.core.whole import check_whole
from conduit.errors import SettingError


@dataclass(slots=True)
class Counters:
    """Where a table is: `size`, rows that can be drawn now; `pending`, rows pushed and not published so far, and `held`, those of
    them that aren't until others come; `inserted`, rows published and counted; `sampled`, entries drawn."""

    size: int
    pending: int
    inserted: int
    sampled: int
    held: int = 0


@runtime_checkable
class Limiter(Protocol):
    """Says which pushes and draws are let through, whole or not at all. It need not think of a table that has too few rows for
    any batch and none pending: there, a push is let in whatever it says."""

    def may_insert(self, rows: int, at: Counters) -> bool: ...

    def may_sample(self, rows: int, at: Counters) -> bool:
        """`rows`: the entries of the batch."""
        ...

    def why_no_insert(self, rows: int, at: Counters, batch_size: int = 1) -> str:
        """Which limiter holds a push back, the counters, and what would let it in; empty if nothing holds it. `batch_size`: of
        the batches that the answer counts in."""
        ...

    def why_no_sample(self, rows: int, at: Counters) -> str: ...

    def check(self, *, capacity: int, batch_size: int, max_times_sampled: int | None) -> None:
        """SettingError where it can never be met, or would block both sides for good even with pushes of one row."""
        ...

    def check_insert(self, rows: int, batch_size: int) -> None:
        """SettingError where pushes of so many rows, once one is held, and draws of `batch_size` could block each other for good."""
        ...

    def check_sample(self, rows: int, push: int = 1) -> None:
        """SettingError where draws of so many entries and pushes of `push` rows could block each other for good."""
        ...


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The arithmetic, in whole numbers, so that nothing drifts: a row inserted moves the cursor up by `up`, an entry drawn moves it
    down by `down`, and it is kept within [low, high], whole numbers or both infinite. There is no draw below `min_size` rows, and
    below `free_size` every push is free."""

    up: int
    down: int
    low: float
    high: float
    min_size: int
    free_size: int

    def may_insert(self, rows: int, at: Counters) -> bool:
        pushed = at.inserted + at.pending + rows
        coming = at.size + at.pending - at.held
        return pushed * self.up - at.sampled * self.down <= self.high or coming < self.free_size

    def may_sample(self, rows: int, at: Counters) -> bool:
        return at.size >= self.min_size and at.inserted * self.up - (at.sampled + rows) * self.down >= self.low

    def to_draw(self, rows: int, at: Counters) -> int:
        """How many entries have to be drawn before a push of `rows` rows is let in; 0 if it is."""
        if self.may_insert(rows, at):
            return 0
        over = (at.inserted + at.pending + rows) * self.up - at.sampled * self.down - int(self.high)
        return -(-over // self.down)

    def to_push(self, rows: int, at: Counters) -> int:
        """How many rows have to be published before a draw of `rows` entries is let through; 0 if it is."""
        if self.may_sample(rows, at):
            return 0
        after = at.inserted * self.up - (at.sampled + rows) * self.down
        under = int(self.low) - after if after < self.low else 0
        return max(self.min_size - at.size, -(-under // self.up))

    def lacks(self, push: int, batch: int) -> int:
        """By how much too close the bounds are for pushes of `push` rows beside draws of `batch` entries; 0 if they aren't."""
        return max(0, push * self.up + batch * self.down - 1 - (int(self.high) - int(self.low)))

    def most_rows(self, batch: int) -> int:
        """The largest push that they have room for, beside draws of `batch` entries."""
        return (int(self.high) - int(self.low) - batch * self.down + 1) // self.up


@dataclass(frozen=True, slots=True)
class _Limited:
    """What all limiters here do with their bounds."""

    _bounds: _Bounds = field(init=False, repr=False, compare=False)

    def may_insert(self, rows: int, at: Counters) -> bool:
        return self._bounds.may_insert(rows, at)

    def may_sample(self, rows: int, at: Counters) -> bool:
        return self._bounds.may_sample(rows, at)

    def why_no_insert(self, rows: int, at: Counters, batch_size: int = 1) -> str:
        entries = self._bounds.to_draw(rows, at)
        if not entries:
            return ""
        batches = f", {_many(-(-entries // batch_size), 'batch', 'batches')} of {batch_size}" if batch_size > 1 else ""
        return f"{self} holds a push of {_many(rows, 'row')}; {_told(at)}: draw {_many(entries, 'more entry', 'more entries')}{batches}"

    def why_no_sample(self, rows: int, at: Counters) -> str:
        lacking = self._bounds.to_push(rows, at)
        if not lacking:
            return ""
        more = lacking - at.pending
        do = f"push {_many(more, 'more row')}" if more > 0 else "it is let through once the pending ones are ingested"
        return f"{self} holds a draw of {_many(rows, 'entry', 'entries')}; {_told(at)}: {do}"


@dataclass(frozen=True, slots=True)
class MinSize(_Limited):
    """No draw before `min_size_to_sample` rows can be drawn; pushes are free."""

    min_size_to_sample: int

    def __post_init__(self) -> None:
        check_whole("min_size_to_sample", self.min_size_to_sample)
        _bind(self, _Bounds(1, 1, -math.inf, math.inf, int(self.min_size_to_sample), 0))

    def check(self, *, capacity: int, batch_size: int, max_times_sampled: int | None) -> None:
        _check_fits("min_size_to_sample", self.min_size_to_sample, capacity, self)

    def check_insert(self, rows: int, batch_size: int) -> None:
        pass

    def check_sample(self, rows: int, push: int = 1) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SampleToInsertRatio(_Limited):
    """Draws and pushes in step: `samples_per_insert` entries drawn for each row, give or take.

    Before `min_size_to_sample` rows can be drawn there are no draws, and pushes are free. From then on, samples_per_insert · (rows
    inserted) − (entries drawn) stays between `error_buffer` below and above samples_per_insert · min_size_to_sample, or, for an
    `error_buffer` of (min_diff, max_diff), between these. Unlike Reverb's, which lets items through one by one, it lets through
    whole pushes and whole batches, so its error_buffer has to be wider: about (samples_per_insert · rows of a push + batch_size) / 2,
    where an error says the least that would do.

    `samples_per_insert`: a number > 0, taken as it is written: 0.1 is a tenth."""

    samples_per_insert: float
    min_size_to_sample: int
    error_buffer: float | tuple[float, float]

    def __post_init__(self) -> None:
        if not _is_number(self.samples_per_insert) or self.samples_per_insert <= 0:
            raise SettingError(f"samples_per_insert={self.samples_per_insert!r}: expected a finite number > 0")
        check_whole("min_size_to_sample", self.min_size_to_sample)
        ratio = exact(self.samples_per_insert)
        low, high = _diffs(self.error_buffer, ratio * int(self.min_size_to_sample))
        up, down = ratio.numerator, ratio.denominator
        # The cursor takes whole numbers only, so the bounds may as well.
        smallest = int(self.min_size_to_sample)
        _bind(self, _Bounds(up, down, math.ceil(low * down), math.floor(high * down), smallest, smallest))

    def check(self, *, capacity: int, batch_size: int, max_times_sampled: int | None) -> None:
        _check_fits("min_size_to_sample", self.min_size_to_sample, capacity, self)
        if max_times_sampled is not None and exact(self.samples_per_insert) > max_times_sampled:
            raise SettingError(
                f"{self}: with max_times_sampled={max_times_sampled} no row gives {_plain(exact(self.samples_per_insert))} "
                f"entries; expected samples_per_insert of at most {max_times_sampled}, or a higher max_times_sampled"
            )
        self._check_room(1, batch_size, "")

    def check_insert(self, rows: int, batch_size: int) -> None:
        most = self._bounds.most_rows(batch_size) if self._bounds.lacks(rows, batch_size) else rows
        self._check_room(rows, batch_size, f", or pushes of at most {most}" if most >= 1 else "")

    def check_sample(self, rows: int, push: int = 1) -> None:
        self._check_room(push, rows, "")

    def _check_room(self, push: int, batch: int, instead: str) -> None:
        lacks, down = self._bounds.lacks(push, batch), self._bounds.down
        if not lacks:
            return
        if isinstance(self.error_buffer, tuple):
            wider = f"max_diff at least {_plain(Fraction(lacks, down))} higher"
        else:
            # Both bounds move by the same whole number of steps.
            least = -(-(push * self._bounds.up + batch * down - 1) // 2)
            wider = f"an error_buffer of at least {_plain(Fraction(least, down))}"
        raise SettingError(
            f"{self}: a push of {_many(push, 'row')} and a batch of {_many(batch, 'entry', 'entries')} could block each other "
            f"for good; expected {wider}{instead}"
        )


@dataclass(frozen=True, slots=True)
class Queue(_Limited):
    """At most `max_size` rows more are inserted than entries drawn, and never fewer: a queue that loses no row, and so of tables with
    max_times_sampled=1 and sampler=Fifo() only, such as `Table.queue(max_size)`. To keep pushes and draws in step where rows are drawn
    again, use `SampleToInsertRatio`."""

    max_size: int
    _setting: str = field(default="max_size", init=False, repr=False, compare=False)
    """What the user has set it by."""

    def __post_init__(self) -> None:
        check_whole("max_size", self.max_size)
        _bind(self, _Bounds(1, 1, 0, int(self.max_size), 0, 0))

    def check(self, *, capacity: int, batch_size: int, max_times_sampled: int | None) -> None:
        if self.max_size > capacity:
            raise SettingError(
                f"{self} is longer than capacity={capacity}: rows would be replaced before they were drawn; "
                f"expected a max_size of at most {capacity}"
            )
        self._check_room(1, batch_size)

    def check_insert(self, rows: int, batch_size: int) -> None:
        self._check_room(rows, batch_size)

    def check_sample(self, rows: int, push: int = 1) -> None:
        self._check_room(push, rows)

    def _check_room(self, push: int, batch: int) -> None:
        if self._bounds.lacks(push, batch):
            raise SettingError(
                f"{self}: a push of {_many(push, 'row')} and a batch of {_many(batch, 'entry', 'entries')} could block each other "
                f"for good; expected a {self._setting} of at least {push + batch - 1}"
            )

    def __str__(self) -> str:
        return repr(self) if self._setting == "max_size" else f"mode='bounded' with {self._setting}={self.max_size}"


def queue_of_capacity(capacity: int) -> Queue:
    """The queue that a store in mode "bounded" is. What it says names the store's capacity, which the user has set."""
    queue = Queue(capacity)
    object.__setattr__(queue, "_setting", "capacity")
    return queue


def _bind(limiter: _Limited, bounds: _Bounds) -> None:
    object.__setattr__(limiter, "_bounds", bounds)


def _diffs(error_buffer: float | tuple[float, ...], offset: Fraction) -> tuple[Fraction, Fraction]:
    """The lowest and the highest cursor."""
    if isinstance(error_buffer, tuple):
        if len(error_buffer) != 2 or not all(map(_is_number, error_buffer)) or error_buffer[0] > error_buffer[1]:
            raise SettingError(
                f"error_buffer={error_buffer!r}: expected (min_diff, max_diff), two finite numbers in this order"
            )
        return exact(error_buffer[0]), exact(error_buffer[1])
    if not _is_number(error_buffer) or error_buffer < 0:
        raise SettingError(
            f"error_buffer={error_buffer!r}: expected a finite number ≥ 0 of entries, or (min_diff, max_diff)"
        )
    return offset - exact(error_buffer), offset + exact(error_buffer)


def _is_number(value: object) -> TypeGuard[float]:
    return (
        isinstance(value, int | float | np.integer | np.floating)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def exact(number: float) -> Fraction:
    """`number` as it is written: 0.1 is a tenth, not the nearest binary fraction."""
    return Fraction(int(number)) if isinstance(number, Integral) else Fraction(repr(float(number)))


def _check_fits(name: str, value: int, capacity: int, limiter: object) -> None:
    if value > capacity:
        raise SettingError(
            f"{limiter}: there are never {value} rows in a store of capacity={capacity}; expected a {name} of at most {capacity}"
        )


def _told(at: Counters) -> str:
    pending = f", {at.pending} pending" if at.pending else ""
    return f"{at.size} rows can be drawn, {at.inserted} inserted{pending}, {at.sampled} entries drawn"


def _many(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _plain(number: Fraction) -> str:
    """As one would write it, rounded up."""
    if number.denominator == 1:
        return str(number.numerator)
    near = float(number)
    return repr(near if exact(near) >= number else math.nextafter(near, math.inf))
