"""What an algorithm's semantics allow: the modes, and the schedules that keep them (paper §4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from conduit.core.limiter import Limiter, queue_of_capacity
from conduit.core.ordered import Fifo, Lifo, MaxHeap, MinHeap
from conduit.core.sampling import Sampling, Shuffled, Uniform
from conduit.core.schedule import Numbering, Schedule, filled
from conduit.core.spread import Recency, Stratified
from conduit.core.table import MAIN, REMOVER, Table
from conduit.core.whole import check_whole
from conduit.errors import CapacityError, ScheduleError, SettingError, UnitError


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """Rows are reused until they leave: the oldest for newer ones, or those that a `remover` chooses. One push is one rollout unit.

    `tables`: by name, "main" among them. `remover` None: the oldest leave."""

    capacity: int
    batch_size: int
    tables: Mapping[str, Table] = field(default_factory=lambda: {MAIN: Table()})
    remover: Sampling | None = None
    exact: bool = False

    name = "off_policy"
    max_staleness = None

    def __post_init__(self) -> None:
        _check_sizes(self.capacity, self.batch_size)
        for name, table in self.tables.items():
            if table.is_queue:
                self._check_queue(name, table)
            if self.remover is not None and isinstance(table.sampler, Recency | Stratified):
                raise SettingError(
                    f"table {name!r}: {table.sampler} goes by age, which needs rows that leave in the order in which they came: "
                    f"use remover=conduit.Fifo() instead of {self.remover}"
                )

    def _check_queue(self, name: str, table: Table) -> None:
        """SettingError for a queue that would lose rows."""
        what = f"table {name!r}: {table.limiter} with max_times_sampled={table.max_times_sampled}"
        if table.max_times_sampled != 1:
            raise SettingError(
                f"{what}: a queue gives each row once; expected max_times_sampled=1 and sampler=Fifo(), such as conduit.Table.queue(…), or "
                "SampleToInsertRatio(1, …), which keeps pushes and draws in step where rows are drawn again"
            )
        if self.remover is None and not isinstance(table.sampler, Fifo):
            raise SettingError(
                f"{what} and sampler={table.sampler}: where the oldest rows leave first, a queue that draws others first loses rows; expected "
                "sampler=conduit.Fifo(), or a remover such as conduit.Lifo(), which leaves those alone that weren't drawn"
            )
        if self.remover is not None and len(self.tables) > 1:
            raise SettingError(
                f"{what} and remover={self.remover}: rows that other tables keep would push out some that weren't drawn through this one; "
                "expected a single table, or remover=conduit.Fifo()"
            )

    def resolve(self, schedule: Schedule) -> Schedule:
        """The schedule with its granularities filled in. ScheduleError if the mode forbids it."""
        g_ing, g_del = filled(schedule.g_ing, 1), filled(schedule.g_del, 1)
        for name, g in (("g_ing", g_ing), ("g_del", g_del)):
            if not (math.isfinite(g) and g >= 1 and g == int(g)):
                raise ScheduleError(f"{name}={g}: off-policy granularities are whole numbers ≥ 1")
        if self.exact and (schedule.overlap_del or g_del > 1):
            raise ScheduleError(
                "exact=True draws every batch at its pull, after the latest priorities: it allows overlap_del=0 and g_del=1 "
                f"only; got {schedule}"
            )
        return replace(schedule, g_ing=int(g_ing), g_del=int(g_del))

    def units_per_ingestion(self, schedule: Schedule) -> int:
        return int(filled(schedule.g_ing, 1))

    def numbering(self, rank: int, world: int, schedule: Schedule) -> Numbering:
        return Numbering(rank, world, int(filled(schedule.g_del, 1)), None)


@dataclass(frozen=True, slots=True)
class Bounded:
    """Every row is delivered once, the oldest first, and never by a learner that is more than `max_staleness` policy versions
    ahead of it. Pushes wait while `capacity` rows do; what has become too stale is dropped and counted, also while it waits to be let
    in. As a rule of thumb, capacity ≲ (max_staleness + 1) × rows per version: more rows would be too stale when their turn came."""

    capacity: int
    batch_size: int
    max_staleness: int

    name = "bounded"
    remover = None
    exact = True

    def __post_init__(self) -> None:
        _check_sizes(self.capacity, self.batch_size)
        check_whole("max_staleness", self.max_staleness, 0)

    @property
    def tables(self) -> Mapping[str, Table]:
        return {MAIN: Table(Fifo(), max_times_sampled=1, limiter=queue_of_capacity(self.capacity))}

    def resolve(self, schedule: Schedule) -> Schedule:
        """The schedule with its granularities filled in. ScheduleError if the mode forbids it."""
        if schedule.overlap_del or filled(schedule.g_del, 1) != 1:
            raise ScheduleError(
                "mode='bounded' draws every batch at its pull, so that its bound holds then: it allows overlap_del=False and g_del=1 "
                f"only; got {schedule}"
            )
        return OffPolicy(self.capacity, self.batch_size).resolve(schedule)

    def units_per_ingestion(self, schedule: Schedule) -> int:
        return int(filled(schedule.g_ing, 1))

    def numbering(self, rank: int, world: int, schedule: Schedule) -> Numbering:
        return Numbering(rank, world, 1, None)


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Iteration k takes exactly `rollout_unit` rows of policy version k and delivers each `epochs` times, in
    M = rollout_unit / batch_size mini-batches a pass."""

    rollout_unit: int
    batch_size: int
    epochs: int = 1

    name = "on_policy"
    remover = None
    exact = False

    def __post_init__(self) -> None:
        for name in ("rollout_unit", "batch_size", "epochs"):
            check_whole(name, getattr(self, name))
        if self.rollout_unit % self.batch_size:
            divisors = [d for d in range(1, self.rollout_unit + 1) if self.rollout_unit % d == 0]
            near = sorted(divisors, key=lambda d: abs(d - self.batch_size))[:3]
            raise UnitError(
                f"batch_size={self.batch_size} doesn't divide rollout_unit={self.rollout_unit}: every row is delivered exactly "
                f"{self.epochs} times. Near sizes that do: {', '.join(map(str, sorted(near)))}"
            )

    @property
    def minibatches(self) -> int:
        """M, mini-batches a pass."""
        return self.rollout_unit // self.batch_size

    @property
    def batches(self) -> int:
        """Mini-batches an iteration, over all learners."""
        return self.minibatches * self.epochs

    @property
    def capacity(self) -> int:
        return self.rollout_unit

    @property
    def tables(self) -> Mapping[str, Table]:
        return {MAIN: Table(Shuffled(self.rollout_unit, self.batch_size, self.epochs))}

    def resolve(self, schedule: Schedule) -> Schedule:
        """The schedule with its granularities filled in. ScheduleError if the mode forbids it."""
        g_ing, g_del = filled(schedule.g_ing, 1), filled(schedule.g_del, 1 / self.minibatches)
        for name, g in (("g_ing", g_ing), ("g_del", g_del)):
            k = g * self.minibatches
            if not 0 < g <= 1 or not math.isclose(k, round(k), abs_tol=1e-6):
                raise ScheduleError(
                    f"{name}={g}: on-policy granularities are k/M with M = {self.minibatches} mini-batches: "
                    f"1/{self.minibatches}, …, 1"
                )
        return replace(schedule, g_ing=g_ing, g_del=g_del)

    def units_per_ingestion(self, schedule: Schedule) -> int:
        """Of one row each."""
        return round(filled(schedule.g_ing, 1) * self.minibatches) * self.batch_size

    def numbering(self, rank: int, world: int, schedule: Schedule) -> Numbering:
        """Every row goes to exactly one learner a pass, and all learners get equally many batches."""
        if self.batches % world:
            raise ScheduleError(
                f"an iteration has {self.batches} batches ({self.epochs} passes of {self.minibatches}), which {world} learners "
                "can't share equally; expected a world that divides them"
            )
        return Numbering(rank, world, self._batches_per_delivery(schedule), self.batches // world)

    def _batches_per_delivery(self, schedule: Schedule) -> int:
        return round(filled(schedule.g_del, 1 / self.minibatches) * self.minibatches)


Semantics = OffPolicy | Bounded | OnPolicy


@dataclass(frozen=True, slots=True)
class Drawing:
    """What `Store` was told of how rows are drawn and leave; None where it was told nothing."""

    sampler: Sampling | None = None
    max_times_sampled: int | None = None
    limiter: Limiter | None = None
    tables: Mapping[str, Table] | None = None
    remover: Sampling | None = None

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(name for name in self.__slots__ if getattr(self, name) is not None)


def semantics_of(
    mode: str,
    *,
    capacity: int | None,
    batch_size: int,
    rollout_unit: int | None,
    epochs: int | None,
    max_staleness: int | None,
    drawing: Drawing,
    exact: bool,
) -> Semantics:
    """What `Store`'s settings mean. SettingError names one that is missing, or not of the mode."""
    off_policy = (*drawing.given, *(("exact",) if exact else ()))
    if mode == "off_policy":
        _refuse(mode, "on-policy settings", rollout_unit=rollout_unit, epochs=epochs)
        _refuse(mode, "settings of mode='bounded'", max_staleness=max_staleness)
        if capacity is None:
            raise SettingError("mode='off_policy' needs capacity=, in rows")
        return OffPolicy(capacity, batch_size, _tables(drawing), _remover(drawing.remover), exact)
    if mode == "bounded":
        _refuse(mode, "on-policy settings", rollout_unit=rollout_unit, epochs=epochs)
        _refuse(mode, "off-policy settings", **dict.fromkeys(off_policy, True))
        if capacity is None or max_staleness is None:
            raise SettingError("mode='bounded' needs capacity=, in rows, and max_staleness=, in policy versions")
        return Bounded(capacity, batch_size, max_staleness)
    if mode == "on_policy":
        _refuse(mode, "off-policy settings", capacity=capacity, **dict.fromkeys(off_policy, True))
        _refuse(mode, "settings of mode='bounded'", max_staleness=max_staleness)
        if rollout_unit is None:
            raise SettingError(
                "mode='on_policy' needs rollout_unit=: the rows of one iteration, steps × lanes over all actors"
            )
        return OnPolicy(rollout_unit, batch_size, 1 if epochs is None else epochs)
    raise SettingError(f"mode={mode!r}: expected 'off_policy', 'on_policy' or 'bounded'")


_MOST_ROWS = 1 << 48
"""Of a store: what is counted of them fits NumPy's numbers, with room to spare."""

_TAKES = {
    "off_policy": "capacity, batch_size, a sampler, and tables, limiter and remover if wanted",
    "on_policy": "rollout_unit, batch_size and epochs",
    "bounded": "capacity, batch_size and max_staleness",
}


def _refuse(mode: str, whose: str, **settings: object) -> None:
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise SettingError(f"{', '.join(given)}: {whose}; mode={mode!r} takes {_TAKES[mode]}")


def _tables(drawing: Drawing) -> Mapping[str, Table]:
    more = {} if drawing.tables is None else drawing.tables
    if not isinstance(more, Mapping) or not all(isinstance(name, str) and name for name in more):
        raise SettingError(f"tables={more!r}: expected a dict of names to conduit.Table(…)")
    for name, table in more.items():
        if not isinstance(table, Table):
            raise SettingError(f"tables[{name!r}] is {table!r}: expected a conduit.Table(…)")
        if name == REMOVER:
            raise SettingError(f"tables[{name!r}]: this is what remover= is called; expected another name")
        if name == MAIN:
            raise SettingError(
                f"tables[{MAIN!r}]: this is what sampler=, max_times_sampled= and limiter= describe; expected another name"
            )
    sampler = Uniform() if drawing.sampler is None else drawing.sampler
    return {MAIN: Table(sampler, drawing.max_times_sampled, drawing.limiter), **more}


def _remover(asked: Sampling | None) -> Sampling | None:
    """What chooses the rows that leave; None for the oldest."""
    if asked is None or isinstance(asked, Fifo):
        return None
    if isinstance(asked, Uniform):
        return Uniform(replacement=False)
    if isinstance(asked, Lifo | MaxHeap | MinHeap):
        return asked
    raise SettingError(
        f"remover={asked!r}: expected conduit.Fifo(), Lifo(), Uniform(), MaxHeap() or MinHeap(), which say who leaves when the store "
        "is full"
    )


def _check_sizes(capacity: int, batch_size: int) -> None:
    check_whole("batch_size", batch_size)
    check_whole("capacity", capacity, most=_MOST_ROWS)
    if capacity < batch_size:
        raise CapacityError(
            f"capacity={capacity} is below batch_size={batch_size}: a batch could never be served; "
            f"expected a capacity of at least {batch_size} rows"
        )
