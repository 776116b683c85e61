"""Tables: views of a store's rows, each with a sampler, a limiter, and how often it gives a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from conduit.clock import Condition
from conduit.core.custom import CustomSampler, is_custom, limiter_of
from conduit.core.drawable import why_not_drawable
from conduit.core.draws import Times, joined, occurrence, part_of
from conduit.core.journal import Copy, at_once
from conduit.core.limiter import Counters, Limiter, Queue
from conduit.core.ordered import Fifo
from conduit.core.ring import Window
from conduit.core.sampling import Draw, LiveSampler, Sampling, Uniform
from conduit.core.starts import Starts
from conduit.core.whole import check_whole
from conduit.errors import SettingError

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]

MAIN = "main"
"""The table that `Store(sampler=…)` describes."""
REMOVER = "(remover)"
"""What a remover's table is called, which gives no batches."""

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
        if self.max_times_sampled is not None:
            check_whole("max_times_sampled", self.max_times_sampled, most=_MOST_TIMES)
        if self.limiter is not None and (isinstance(self.limiter, type) or not isinstance(self.limiter, Limiter)):
            raise SettingError(
                f"limiter={self.limiter!r}: expected conduit.MinSize(…), conduit.SampleToInsertRatio(…) or conduit.Queue(…)"
            )

    @classmethod
    def queue(cls, max_size: int) -> Self:
        """A queue of at most `max_size` rows: each once, the oldest first, and none lost."""
        return cls(Fifo(), 1, Queue(max_size))

    def check(self, capacity: int, batch_size: int) -> None:
        """SettingError for a table that could never give `batch_size` rows at once, or a limiter that can never be met."""
        if self.max_times_sampled is not None and batch_size > capacity:
            raise SettingError(
                f"max_times_sampled={self.max_times_sampled}: {batch_size} rows are drawn together, batch_size · g_del, which have to be there "
                f"at once; expected a capacity of at least as many, or a lower g_del; got capacity={capacity}"
            )
        if self.limiter is not None:
            self.limiter.check(capacity=capacity, batch_size=batch_size, max_times_sampled=self.max_times_sampled)

    @property
    def is_queue(self) -> bool:
        """Whether no row may leave before it has been drawn, once."""
        return isinstance(self.limiter, Queue)


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
        together: int = 1,
        oldest_waiting: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`starts`: which live rows can be drawn at all; None: all. `in_order`: the oldest row leaves first, and only when another
        gets its slot. `together`: batches of `batch_size` rows that are drawn at once. `oldest_waiting`: the oldest row that may
        become drawable when others come."""
        settings.check(capacity, batch_size * together)
        self.name = name
        self.settings = settings
        self.limiter = limiter_of(settings.limiter, name)
        self._capacity = capacity
        self._batch_size = batch_size
        self._shared = starts
        self._most = settings.max_times_sampled
        self._own = Starts(capacity, used_up=self._most is not None) if self._most is not None or not in_order else None
        """Which of the rows that can be drawn at all can be so here."""
        self._times = None if self._most is None else Times(capacity)
        self.starts = starts if self._own is None else self._own
        sampler = settings.sampler.start(capacity, _seed_of(seed, name), self.starts)
        if is_custom(settings.sampler):
            sampler = CustomSampler(settings.sampler, sampler, name, self.starts, capacity)
        self.sampler = cast(LiveSampler, sampler)
        self.counters = Counters(size=0, pending=0, inserted=0, sampled=0)
        self._in_order = in_order
        self._oldest_waiting = oldest_waiting
        self._oldest = 0
        """In a queue in order, no row before it can be drawn."""
        self._together = together
        self._largest_push = 1
        self._preloading = self._preloaded = 0
        """While the first is above 0, nothing is held back; the second: how many rows came meanwhile that aren't counted."""
        self._asked: list[int] = []
        """The sizes of the batches that are asked for beside the learners'."""
        self.lost_rows = 0
        """Rows of a queue that left undrawn: draws lacked rows and there was no place for more, or limiters were lifted."""
        self.freed: Keys | None = None
        """Rows that the last draw was the last of, if there were any."""

    @property
    def prioritized(self) -> bool:
        return self.settings.sampler.prioritized

    def publish(self, first: int, rows: int, priority: Floats | None, admitted: Keys, excluded: Keys) -> None:
        """Rows [first, first + rows) came, in the slots of as many others if those were in use; `admitted` rows can be drawn since,
        and `excluded` ones can't any more."""
        sampler, own, came = self.sampler, self._own, len(admitted)
        had = 0 if own is None else own.count
        if self._preloading and self.limiter is not None:
            self._preloaded += rows
        else:
            self.counters.inserted += rows
        if len(excluded):
            # Those that gave their places to others are told apart from those that had them when these came.
            self.exclude(excluded)
        sampler.insert(first, rows, priority)
        if self._times is not None:
            self._times.renew(first, rows)
        if own is not None and self._shared is None:
            came = rows
            own.renew(first, rows)
            sampler.admit(np.arange(first, first + rows))
        elif own is not None:
            own.evict(first, rows)
        if len(admitted):
            self.admit(admitted)
        if own is not None and self.settings.is_queue:
            self.lost_rows += had + came - own.count

    def admit(self, keys: Keys) -> None:
        """These live rows can be drawn since, for all that the store knows."""
        if self._own is not None:
            self._own.admit(keys)
            # Not in the order in which they came, where rows wait for others.
            self._oldest = min(self._oldest, int(keys.min()))
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

    def missing(self, window: Window, rows: int, number: int, batches: int = 1) -> str | None:
        """What is missing for a draw of `rows` rows as batch `number`, and of `batches` in all together; None when they can be
        served."""
        lacks = self.sampler.missing(window, self._needed(rows, batches), number)
        if lacks is None and self.limiter is not None and not self._preloading:
            at = self.counted(window)
            if not self.limiter.may_sample(rows * batches, at):
                lacks = self.limiter.why_no_sample(rows * batches, at)
        if lacks and batches > 1 and (self._times is not None or self.limiter is not None):
            lacks += f" ({batches} batches are drawn together: g_del)"
        return lacks

    def why_few(self, window: Window, rows: int, batches: int, unfinished_groups: int | None) -> str:
        """Where rows are what is missing for such draws, why others that are there can't be drawn; or empty. This looks at every row."""
        if self.size(window) >= self._needed(rows, batches):
            return ""
        live, shared = len(window), self._shared
        waiting = 0 if shared is None else live - shared.count
        spent = 0
        if self._times is not None and self._most is not None:
            spent = self._times.count_spent(self._most, window, shared)
        # Nothing but their age in versions excludes others here that the store would give.
        stale = live - waiting - spent - self._own.count if self._own is not None and self._in_order else 0
        return why_not_drawable(live, waiting=waiting, unfinished_groups=unfinished_groups, spent=spent, stale=stale)

    def _needed(self, rows: int, batches: int) -> int:
        """How many rows so many batches together need: those that one takes may be lacking to the next."""
        return rows if self._times is None else rows * batches

    def may_insert(self, rows: int, window: Window) -> bool:
        """Whether a push of `rows` rows is let in. It always is while rows are all that draws lack: or both sides would wait."""
        if self.limiter is None or self._preloading or self.limiter.may_insert(rows, self.counted(window)):
            return True
        if self.counters.pending > self.counters.held:
            return False
        return self.sampler.missing(window, self._largest_draw, 0) is not None

    def why_no_insert(self, rows: int, window: Window) -> str:
        assert self.limiter is not None
        return self.limiter.why_no_insert(rows, self.counted(window), self._batch_size)

    def check_insert(self, rows: int) -> None:
        """SettingError for a push that could never be let in, beside the batches that are asked for."""
        if self.limiter is not None and not self._preloading:
            self.limiter.check_insert(rows, self._largest_draw)

    def check_sample(self, rows: int) -> None:
        """SettingError for a draw that could never be served, beside pushes such as those so far."""
        if self.limiter is not None:
            self.limiter.check_sample(rows, self._largest_push)

    def came(self, rows: int) -> None:
        """A push of `rows` rows was taken."""
        self.counters.pending += rows
        if not self._preloading:
            self._largest_push = max(self._largest_push, rows)

    def settled(self, rows: int, held: int) -> None:
        """So many rows of those that were taken are no more on their way; hooks hold `held` until others come."""
        self.counters.pending += held - self.counters.held - rows
        self.counters.held = held

    def lose(self, rows: int) -> None:
        """So many rows came that there was no room for."""
        if self._preloading and self.limiter is not None:
            self._preloaded += rows
        else:
            self.counters.inserted += rows
        if self.settings.is_queue:
            self.lost_rows += rows

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
        if not self._preloading:
            self.counters.inserted, self._preloaded = self._inserted(window), 0

    def _inserted(self, window: Window) -> int:
        """How many rows count as inserted if preloading ends now."""
        if self.limiter is None:
            return self.counters.inserted
        at = replace(self.counted(window))
        low, high = at.inserted, at.inserted + self._preloaded
        while low < high:
            at.inserted = middle = (low + high) // 2
            low, high = (
                (low, middle) if self.limiter.may_sample(self._batch_size * self._together, at) else (middle + 1, high)
            )
        return low

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> tuple[Draw, Any]:
        """Batch `number`'s rows, and how often each has been drawn by now, if that is counted."""
        draw = self.sampler.draw(number, rows, window, stream)
        if not self._preloading or self.limiter is None:
            self.counters.sampled += rows
        if self._times is None:
            return draw, None
        return self._count(draw, number, rows, window, stream)

    def state(self, window: Window, copy: Copy = at_once) -> dict[str, Any]:
        """What a checkpoint keeps. Arrays are told in the order of `window`'s keys."""
        state: dict[str, Any] = {
            "sampler": dict(self.sampler.state(window, copy)),
            "limiter": str(self.settings.limiter),
            "counts": [self._inserted(window), self.counters.sampled, self.lost_rows, self._largest_push],
        }
        if self._own is not None:
            state["drawable"] = self._own.state(window, copy)
        if self._times is not None:
            state["times"] = self._times.state(window, copy)
        return state

    def load(self, state: Mapping[str, Any], saved: Window, window: Window) -> None:
        """Goes on from what was saved of rows `saved`, of which `window`'s are there still."""
        self.counters.inserted, self.counters.sampled, self.lost_rows, self._largest_push = state["counts"]
        keys = np.arange(window.first, window.stop)
        kept = slice(window.first - saved.first, window.stop - saved.first)
        if self._times is not None:
            self._times.put(keys % self._capacity, state["times"][kept])
        if self._own is not None:
            drawable = keys[state["drawable"][kept]]
            self._own.admit(drawable if self._shared is None else drawable[self._shared.at(drawable % self._capacity)])
        self.sampler.load(state["sampler"], window)
        if state["limiter"] != str(self.settings.limiter):
            # What another limiter let through is nothing to go by: as after preloading, the first batch can be drawn.
            self.counters.inserted = self.counters.sampled = 0
            self._preloaded = self.size(window)
            self.counters.inserted, self._preloaded = self._inserted(window), 0

    @property
    def _largest_draw(self) -> int:
        """Entries that somebody draws, or waits for, at once."""
        return max(self._batch_size * self._together, *self._asked, 0)

    def counted(self, window: Window) -> Counters:
        """Where the table is. In a queue the rows themselves say how many there are: those that became stale, or that never could be
        drawn, take no place for good."""
        at = self.counters
        at.size = self.size(window)
        if self.settings.is_queue:
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
        waiting = self._oldest_waiting()
        return window.stop - (oldest if waiting is None else min(oldest, waiting))

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
            nth = times.at(slots) + occurrence(slots)
            part, good = draw, nth <= most
            if np.count_nonzero(good) < len(nth):
                part, nth, slots = part_of(draw, good), nth[good], slots[good]
            assert len(nth), "what was drawn as often as it may be is excluded"
            times.put(slots, nth)
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
            draw = self.sampler.draw(number, rows, window, stream)
        self.freed = np.concatenate(gone) if gone else None
        return joined(parts), counted[0] if len(counted) == 1 else np.concatenate(counted)


def _seed_of(seed: int, name: str) -> int:
    """The main table draws from the store's seed itself; another from one that its name is mixed into."""
    return seed if name == MAIN else int.from_bytes(name.encode(), "big") << 64 | seed
