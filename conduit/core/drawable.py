"""Which live rows may be drawn, and the arithmetic that samplers share: keys and slots, distinct choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.journal import Copy, at_once
from conduit.core.ring import Window
from conduit.core.starts import Starts
from conduit.errors import SettingError

Keys = NDArray[np.int64]


class Drawable:
    """Which live rows a sampler may draw: those that its `Starts` name; where it has none, all but those that it was told to
    exclude, because a remover took them."""

    def __init__(self, capacity: int, starts: Starts | None) -> None:
        self._capacity = capacity
        self._given = starts
        self._own: Starts | None = None
        """A byte a slot, from the first row on that is excluded."""
        self._first = self._stop = 0
        """Rows [first, stop) are live. Numbers, not a Window: they change with every push."""
        self.starts = starts
        """None: all live rows can be drawn."""

    def insert(self, first_key: int, rows: int) -> None:
        if self._given is not None:
            return
        after = first_key + rows
        if first_key > self._stop:
            self._first = first_key
        if after > self._stop:
            self._stop = after
            self._first = max(self._first, after - self._capacity)
        if self._own is not None:
            self._own.evict(first_key, rows)
            self._own.admit(np.arange(first_key, after))
            self._know(self._own)

    def exclude(self, keys: Keys) -> None:
        if self._given is not None:
            return
        if self._own is None:
            self._own = Starts(self._capacity)
            self._own.admit(np.arange(self._first, self._stop))
        self._own.exclude(keys)
        self._know(self._own)

    def _know(self, own: Starts) -> None:
        # Nothing but which rows can be drawn decides how they are: not whether others ever couldn't be.
        self.starts = own if own.count < self._stop - self._first else None

    def missing(self, window: Window, rows: int) -> str | None:
        """What is missing for a draw of `rows` rows; None if there are enough."""
        starts = self.starts
        if (window.stop - window.first if starts is None else starts.count) >= rows:
            return None
        if self._given is None and starts is not None:
            return short_of(rows, starts.count, starts.count)
        return too_few(window, starts, rows)

    def excluded(self, window: Window, copy: Copy = at_once) -> Any:
        """Live rows that were excluded, as keys; none where `Starts` were given, which know."""
        if self._given is not None or self.starts is None:
            return np.zeros(0, np.int64)
        return copy(self.starts.journal, "drawable", window, lambda drawable: window.first + np.flatnonzero(~drawable))

    def load(self, excluded: Keys, window: Window) -> None:
        """`window`'s rows are live; those of `excluded` were excluded."""
        self._first, self._stop = window.first, window.stop
        if len(excluded):
            self.exclude(excluded[(excluded >= window.first) & (excluded < window.stop)])


def too_few(window: Window, starts: Starts | None, rows: int) -> str | None:
    """What is missing for a draw of `rows` rows; None if there are enough."""
    return short_of(rows, len(window) if starts is None else starts.count, len(window))


def short_of(rows: int, drawable: int, live: int) -> str | None:
    """What is missing for a draw of `rows` rows, where `drawable` of `live` rows can be drawn; None if they are enough."""
    if drawable >= rows:
        return None
    if drawable == live:
        return f"{live} rows are visible and a batch needs {rows}: push {rows - live} more"
    return f"{drawable} of {live} visible rows can start an entry of a batch by now, and a batch needs {rows}"


def why_not_drawable(live: int, *, waiting: int, unfinished_groups: int | None, spent: int, stale: int) -> str:
    """Why some of `live` rows can't be drawn; empty where nothing is known. `unfinished_groups`: None where rows are no groups; where
    they are, `waiting` says nothing, for only first rows can be drawn at all."""
    if unfinished_groups is not None:
        one = unfinished_groups == 1
        waits = f"{unfinished_groups} {'group is' if one else 'groups are'} unfinished" if unfinished_groups else ""
    else:
        waits = f"{_of(waiting, live)} wait for the rows that come after them, or lack them for good" if waiting else ""
    reasons = [
        waits,
        f"{_of(spent, live)} were drawn as often as they may" if spent else "",
        f"{_of(stale, live)} are too stale" if stale else "",
    ]
    told = "; ".join(filter(None, reasons))
    return f": {told}. More rows would do" if told else ""


def _of(rows: int, live: int) -> str:
    return f"all {rows}" if rows == live else f"{rows}"


def distinct(random: np.random.Generator, rows: int, count: int) -> Keys:
    """`rows` distinct numbers of [0, count), in an order: any with equal chance."""
    if 2 * rows > count:
        return random.permutation(count)[:rows]
    return first_distinct(lambda tries: random.integers(0, count, tries), rows, count)


def first_distinct(choose: Callable[[int], Keys], rows: int, count: int) -> Keys:
    """The first `rows` distinct ones of what `choose(tries)` gives: keys, each of `count` with equal chance, with replacement."""
    found = np.zeros(0, np.int64)
    while True:
        # How many it takes to see that many new ones, on average, and some more.
        tries = count * math.log((count - len(found) + 0.5) / (count - rows + 0.5))
        found = np.concatenate([found, choose(int(1.1 * tries) + 8)])
        _, places = np.unique(found, return_index=True)
        places.sort()
        found = found[places[:rows]]
        if len(found) == rows:
            return found


def slot_ranges(first_key: int, rows: int, capacity: int) -> list[tuple[int, int, slice]]:
    """Where keys [first_key, first_key + rows) lie: ranges of slots [start, stop), and which of these rows each holds."""
    start = first_key % capacity
    head = min(rows, capacity - start)
    ranges = [(start, start + head, slice(0, head))]
    if head < rows:
        ranges.append((0, rows - head, slice(head, rows)))
    return ranges


def live_keys(slots: Keys, window: Window, capacity: int) -> Keys:
    """The live rows in these slots."""
    if window.stop <= capacity:
        return slots
    keys = slots + (window.stop - window.stop % capacity)
    keys -= capacity * (keys >= window.stop)
    return keys


def still_live(told: NDArray[Any], first_key: int, window: Window) -> NDArray[Any]:
    """What was told of `window`'s rows, of which there may be fewer by now: `told` begins with that of row `first_key`."""
    return told[window.first - first_key : window.stop - first_key]


def require(sampler: str, name: str, got: Any, fits: Callable[[float], bool], expected: str) -> None:
    """SettingError unless `got` is a finite number that fits."""
    if not isinstance(got, Real) or isinstance(got, bool) or not math.isfinite(got) or not fits(float(got)):
        raise SettingError(f"{sampler}({name}={got!r}): expected {expected}")
