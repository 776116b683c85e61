"""Tables: views of a store's rows, each with a sampler, a limiter, and how often it gives a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.clock import Condition
from conduit.core.limiter import Counters, Limiter, Queue
from conduit.core.ordered import Fifo
from conduit.core.ring import Window
from conduit.core.sampling import Draw, Sampling, Uniform
from conduit.core.starts import Starts
from conduit.errors import SamplerError, SettingError

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]

MAIN = "main"
"""The table that `Store(sampler=…)` describes."""

_MOST_TIMES = np.iinfo(np.uint32).max
_BLOCK = 1 << 10
_AGAIN = 16
"""Streams of draws that take the place of some of a batch are so far apart."""


@dataclass(frozen=True, slots=True)
class Table:
    """How rows are drawn through one of several tables over the same rows.

    `sampler`: which of them; `max_times_sampled`: after so many draws a row is drawn through this table no more; `limiter`:
    holds pushes and draws back until they are in step (`MinSize`, `SampleToInsertRatio`, `Queue`)."""

    sampler: Sampling = field(default_factory=Uniform)
    max_times_sampled: int | None = None
    limiter: Limiter | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sampler, type) or not isinstance(self.sampler, Sampling):
            raise SettingError(
                f"sampler={self.sampler!r}: expected a sampler such as conduit.Uniform() or conduit.Prioritized()"
            )
        times = self.max_times_sampled
        if times is not None and (
            not isinstance(times, Integral) or isinstance(times, bool) or not 1 <= times <= _MOST_TIMES
        ):
            raise SettingError(
                f"max_times_sampled={times!r}: expected a whole number of at least 1, or None for no limit"
            )
        if self.limiter is not None and (isinstance(self.limiter, type) or not isinstance(self.limiter, Limiter)):
            raise SettingError(
                f"limiter={self.limiter!r}: expected conduit.MinSize(…), conduit.SampleToInsertRatio(…) or conduit.Queue(…)"
            )

    def check(self, capacity: int, batch_size: int, in_order: bool = True) -> None:
        """SettingError for a limiter that can never be met, or whose promise can't be kept. `in_order`: the oldest row leaves first,
        and only when another gets its slot."""
        if self.limiter is None:
            return
        self.limiter.check(capacity=capacity, batch_size=batch_size, max_times_sampled=self.max_times_sampled)
        times = self.max_times_sampled
        if not isinstance(self.limiter, Queue) or times is None:
            return
        if times != 1:
            raise SettingError(
                f"max_times_sampled={times} with {self.limiter}: it lets one entry be drawn for each row, so rows would leave before they "
                "had been drawn as often; expected max_times_sampled=1, or SampleToInsertRatio"
            )
        if in_order and not isinstance(self.sampler, Fifo):
            raise SettingError(
                f"{self.limiter} with max_times_sampled=1 and sampler={self.sampler}: the oldest rows leave first, so others than the "
                "oldest can't be drawn first without losing some. Expected sampler=conduit.Fifo(), or a remover such as conduit.Lifo(), with "
                "which only rows that were drawn leave"
            )


class LiveTable:
    """A table at work. All calls are in a turn of the store's Order, but for `may_insert` and what only tells.

    What a sampler knows a row by is its key, or, in a store whose remover isn't Fifo, its slot: so are all keys here."""

    def __init__(
        self,
        name: str,
        settings: Table,
        capacity: int,
        batch_size: int,
        seed: int,
        starts: Starts | None,
        in_order: bool = True,
    ) -> None:
        """`starts`: which live rows can be drawn at all; None: all. `in_order`: the oldest row leaves first, and only when another
        gets its slot."""
        settings.check(capacity, batch_size, in_order)
        self.name = name
        self.settings = settings
        self.limiter = settings.limiter
        self._capacity = capacity
        self._batch_size = batch_size
        self._shared = starts
        self._most = settings.max_times_sampled
        self._own = Starts(capacity) if self._most is not None or not in_order else None
        """Which of the rows that can be drawn at all can be so here."""
        self._times = None if self._most is None else np.zeros(capacity, np.uint32)
        """By slot: how often its row has been drawn."""
        self.starts = starts if self._own is None else self._own
        self._is_ours = type(settings.sampler).__module__.partition(".")[0] == "conduit"
        """Whether it is tested already; what else draws is checked each time."""
        self.sampler = settings.sampler.start(capacity, _seed_of(seed, name), self.starts)
        self.counters = Counters(size=0, pending=0, inserted=0, sampled=0)
        self._is_queue = self._most == 1 and isinstance(self.limiter, Queue)
        """Whether each row counts until it has been drawn, or never will be."""
        self._in_order = in_order
        self._oldest = 0
        """No row before it can be drawn; in a queue in order."""
        self._largest_push = 1
        self._preloading = 0
        """While above 0, nothing is held back."""
        self._preloaded = 0
        """How many rows came meanwhile that aren't counted."""
        self._asked: list[int] = []
        """The sizes of the batches that are asked for beside the learners'."""
        self.freed: Keys | None = None
        """Rows that the last draw was the last of, if there were any."""

    @property
    def prioritized(self) -> bool:
        return self.settings.sampler.prioritized

    def publish(self, first: int, rows: int, priority: Floats | None, admitted: Keys, excluded: Keys) -> None:
        """Rows [first, first + rows) came, in the slots of as many others if those were in use; `admitted` rows can be drawn since,
        and `excluded` ones can't any more."""
        sampler, own = self.sampler, self._own
        if self._preloading and self.limiter is not None:
            self._preloaded += rows
        else:
            self.counters.inserted += rows
        if own is not None:
            # Those that gave their places to others are told apart from those that had them when these came.
            excluded = own.exclude(excluded)
            own.evict(first, rows)
        if len(excluded):
            sampler.exclude(excluded)
        sampler.insert(first, rows, priority)
        if self._times is not None:
            _fill(self._times, first % self._capacity, rows)
        if own is not None:
            if self._shared is None:
                admitted = np.arange(first, first + rows)
            own.admit(admitted)
        if len(admitted):
            self._note_oldest(admitted)
            sampler.admit(admitted)

    def admit(self, keys: Keys) -> None:
        """These live rows can be drawn since, for all that the store knows."""
        if self._own is not None:
            self._own.admit(keys)
        self._note_oldest(keys)
        self.sampler.admit(keys)

    def exclude(self, keys: Keys) -> int:
        """These live rows can be drawn no more. Returns how many of them could."""
        if self._own is not None:
            keys = self._own.exclude(keys)
        if len(keys):
            self.sampler.exclude(keys)
        return len(keys)

    def size(self, window: Window) -> int:
        """How many rows can be drawn."""
        return len(window) if self.starts is None else self.starts.count

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        """What is missing for a draw of `rows` rows as batch `number`; None when it can be served."""
        lacks = self.sampler.missing(window, rows, number)
        if lacks is None and self.limiter is not None and not self._preloading:
            at = self.counted(window)
            if not self.limiter.may_sample(rows, at):
                return self.limiter.why_no_sample(rows, at)
        return lacks

    def may_insert(self, rows: int, window: Window) -> bool:
        """Whether a push of `rows` rows is let in. It always is while rows are all that draws lack: or both sides would wait."""
        if self.limiter is None or self._preloading or self.limiter.may_insert(rows, self.counted(window)):
            return True
        if self.counters.pending:
            return False
        return self.sampler.missing(window, max(self._batch_size, *self._asked, 0), 0) is not None

    def why_no_insert(self, rows: int, window: Window) -> str:
        assert self.limiter is not None
        return self.limiter.why_no_insert(rows, self.counted(window), self._batch_size)

    def check_insert(self, rows: int) -> None:
        """SettingError for a push that could never be let in, beside the batches that are asked for."""
        if self.limiter is not None:
            self.limiter.check_insert(rows, max(self._batch_size, *self._asked, 0))

    def check_sample(self, rows: int) -> None:
        """SettingError for a draw that could never be served, beside pushes such as those so far."""
        if self.limiter is not None:
            self.limiter.check_sample(rows, self._largest_push)

    def came(self, rows: int) -> None:
        """A push of `rows` rows was taken."""
        self.counters.pending += rows
        self._largest_push = max(self._largest_push, rows)

    @contextmanager
    def asked(self, rows: int, changed: Condition) -> Iterator[None]:
        """For the block, somebody asks for a batch of `rows` rows; whoever waits on `changed` looks again."""
        if self.limiter is None or rows <= self._batch_size:
            yield
            return
        with changed:
            self._asked.append(rows)
            changed.notify_all()
        try:
            yield
        finally:
            with changed:
                self._asked.remove(rows)

    def begin_preloading(self) -> None:
        self._preloading += 1

    def end_preloading(self, window: Window) -> None:
        """Of the rows that came meanwhile, so many are counted as the first batch needs; by a queue all that can be drawn."""
        self._preloading -= 1
        if self._preloading or self.limiter is None:
            return
        at = self.counted(window)
        before, low, high = at.inserted, 0, self._preloaded
        while low < high:
            middle = (low + high) // 2
            at.inserted = before + middle
            low, high = (low, middle) if self.limiter.may_sample(self._batch_size, at) else (middle + 1, high)
        at.inserted, self._preloaded = before + low, 0

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> tuple[Draw, Any]:
        """Batch `number`'s rows, and how often each has been drawn by now, if that is counted."""
        draw = self._drawn(number, rows, window, stream)
        if not self._preloading or self.limiter is None:
            self.counters.sampled += rows
        if self._times is None:
            return draw, None
        return self._count(draw, number, rows, window, stream)

    def state(self, window: Window) -> dict[str, Any]:
        """What a checkpoint keeps. Arrays are told in the order of `window`'s keys."""
        state: dict[str, Any] = {
            "sampler": dict(self.sampler.state(window)),
            "inserted": self.counters.inserted,
            "sampled": self.counters.sampled,
        }
        slots = np.arange(window.first, window.stop) % self._capacity
        if self._own is not None:
            state["drawable"] = self._own.at(slots)
        if self._times is not None:
            state["times"] = self._times.take(slots)
        return state

    def load(self, state: Mapping[str, Any], saved: Window, window: Window) -> None:
        """Goes on from what was saved of rows `saved`, of which `window`'s are there still."""
        self.counters.inserted, self.counters.sampled = state["inserted"], state["sampled"]
        keys = np.arange(window.first, window.stop)
        kept = slice(window.first - saved.first, window.stop - saved.first)
        if self._times is not None:
            self._times[keys % self._capacity] = state["times"][kept]
        if self._own is not None:
            drawable = keys[state["drawable"][kept]]
            self._own.admit(drawable if self._shared is None else drawable[self._shared.at(drawable % self._capacity)])
        self.sampler.load(state["sampler"], window)

    def counted(self, window: Window) -> Counters:
        """Where the table is. In a queue the rows themselves say how many there are: those that became stale, or that never could be
        drawn, take no place for good."""
        at = self.counters
        at.size = self.size(window)
        if self._is_queue:
            at.inserted = at.sampled + self._undrawn(window)
        return at

    def _undrawn(self, window: Window) -> int:
        """How many rows a queue has: in order, from the oldest that can be drawn on."""
        own = self._own
        assert own is not None
        if not self._in_order:
            return own.count
        oldest = max(self._oldest, window.first)
        while oldest < window.stop and oldest not in own:
            keys = np.arange(oldest, min(oldest + _BLOCK, window.stop))
            drawable = own.at(keys % self._capacity)
            oldest += int(drawable.argmax()) if drawable.any() else len(keys)
        self._oldest = oldest
        return window.stop - oldest

    def _note_oldest(self, admitted: Keys) -> None:
        """Rows become drawable in another order than that in which they came where they wait for others."""
        if self._is_queue and len(admitted):
            self._oldest = min(self._oldest, int(admitted.min()))

    def _drawn(self, number: int, rows: int, window: Window, stream: int) -> Draw:
        draw = self.sampler.draw(number, rows, window, stream)
        if not self._is_ours:
            wrong = _what_is_wrong(draw, rows, window, self.starts)
            if wrong:
                raise SamplerError(
                    f"{self.settings.sampler!r} drew batch {number} of table {self.name!r}: {wrong}. conduit.testing.check_sampler tries "
                    "a sampler on such cases"
                )
        return draw

    def _count(self, draw: Draw, number: int, rows: int, window: Window, stream: int) -> tuple[Draw, Any]:
        """Counts what was drawn. A row that a batch has more often than it may be drawn gives those places to others, as if the
        batch had been drawn one by one."""
        times, own, most = self._times, self._own, self._most
        assert times is not None
        assert own is not None
        assert most is not None
        parts, counted, gone = [], [], []
        while True:
            slots = draw.keys % self._capacity
            nth = times.take(slots).astype(np.int64) + _occurrence(slots)
            good = nth <= most
            fits = np.count_nonzero(good) == len(nth)
            part, nth = (draw, nth) if fits else (_part(draw, good), nth[good])
            slots = part.keys % self._capacity
            np.maximum.at(times, slots, nth.astype(np.uint32))
            last = part.keys[nth == most]
            if len(last):
                own.exclude(last)
                self.sampler.exclude(last)
                gone.append(last)
            parts.append(part)
            counted.append(nth)
            rows -= len(nth)
            if not rows:
                break
            stream += _AGAIN
            draw = self._drawn(number, rows, window, stream)
        self.freed = np.concatenate(gone) if gone else None
        return _joined(parts), np.concatenate(counted)


def _what_is_wrong(draw: object, rows: int, window: Window, starts: Starts | None) -> str:
    """How a draw of `rows` rows isn't what it should be; empty if it is."""
    if not isinstance(draw, Draw):
        return f"it gave a {type(draw).__name__}; expected a Draw"
    keys, weight = draw.keys, draw.weight
    if not isinstance(keys, np.ndarray) or keys.dtype != np.int64 or keys.shape != (rows,):
        form = f"{keys.dtype}{list(keys.shape)}" if isinstance(keys, np.ndarray) else f"a {type(keys).__name__}"
        return f"its keys are {form}; expected int64[{rows}]"
    dead = keys[(keys < window.first) | (keys >= window.stop)]
    if len(dead):
        return f"row {dead[0]} isn't live; live rows are {window.first} to {window.stop - 1}"
    if starts is not None:
        closed = keys[[key not in starts for key in keys.tolist()]]
        if len(closed):
            return f"row {closed[0]} can't be drawn: it is excluded, or not admitted yet"
    if weight is not None and not (weight.shape == (rows,) and np.isfinite(weight).all() and (weight > 0).all()):
        return "its weights aren't finite numbers above 0, one a row"
    for name, value in (("probability", draw.probability), ("priority", draw.priority)):
        if np.shape(value) not in ((), (rows,)):
            return f"its {name} has shape {list(np.shape(value))}; expected one number, or one a row"
    return ""


def _seed_of(seed: int, name: str) -> int:
    """The main table draws from the store's seed itself; another from one that its name is mixed into."""
    return seed if name == MAIN else int.from_bytes(name.encode(), "big") << 64 | seed


def _fill(times: NDArray[np.uint32], slot: int, rows: int) -> None:
    head = min(rows, len(times) - slot)
    times[slot : slot + head] = 0
    times[: rows - head] = 0


def _occurrence(slots: Keys) -> Keys:
    """For each of `slots`, the how-manieth of its kind it is, from 1."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    places = np.arange(len(slots))
    nth = np.empty(len(slots), np.int64)
    nth[order] = places - np.maximum.accumulate(np.where(begins, places, 0)) + 1
    return nth


def _part(draw: Draw, good: NDArray[np.bool_]) -> Draw:
    return Draw(
        draw.keys[good],
        draw.probability[good] if isinstance(draw.probability, np.ndarray) else draw.probability,
        None if draw.weight is None else draw.weight[good],
        draw.priority[good] if isinstance(draw.priority, np.ndarray) else draw.priority,
    )


def _joined(parts: list[Draw]) -> Draw:
    if len(parts) == 1:
        return parts[0]
    weights = [part.weight for part in parts]
    return Draw(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([np.broadcast_to(part.probability, len(part.keys)) for part in parts]),
        None if weights[0] is None else np.concatenate([weight for weight in weights if weight is not None]),
        np.concatenate([np.broadcast_to(part.priority, len(part.keys)) for part in parts]),
    )
