"""What an algorithm's semantics allow: the modes, and the schedules that keep them (paper §4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real

from conduit.core.sampling import Sampling, Shuffled, Uniform
from conduit.errors import CapacityError, ScheduleError, SettingError, UnitError


@dataclass(frozen=True, slots=True)
class Schedule:
    """When ingestion and delivery run, and how much one invocation takes (paper §6, Eq. 2).

    `overlap_ing`: ingestion runs on its own thread behind rollout; `overlap_del`: delivery prepares batches behind the update.
    `g_ing`, `g_del`: granularities. Off-policy, whole numbers of rollout units (pushes) and batches. On-policy, fractions k/M
    of the iteration's rows and of a pass of M mini-batches. None: a whole unit, and one batch."""

    overlap_ing: bool = False
    g_ing: float | None = None
    overlap_del: bool = False
    g_del: float | None = None


@dataclass(frozen=True, slots=True)
class Numbering:
    """Which global batches a learner gets (rank, rank + world, … within an iteration), and which are prepared together.

    A learner counts its own batches by `index` from 0. `per_iteration`: how many of them an iteration has; None where
    iterations don't bound what may be prepared."""

    rank: int
    world: int
    per_group: int
    per_iteration: int | None

    def number(self, index: int) -> int:
        """The global number of batch `index`."""
        return self.rank + index * self.world

    def group(self, index: int) -> range:
        """The indices that one invocation of delivery prepares together with `index`."""
        base = 0 if self.per_iteration is None else index - index % self.per_iteration
        start = index - (index - base) % self.per_group
        end = self.next_iteration(index)
        return range(start, start + self.per_group if end is None else min(start + self.per_group, end))

    def next_iteration(self, index: int) -> int | None:
        """The first index of the iteration after that of `index`."""
        return None if self.per_iteration is None else index - index % self.per_iteration + self.per_iteration


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """Rows are reused until newer ones take their place. One push is one rollout unit."""

    capacity: int
    batch_size: int
    sampling: Sampling
    exact: bool = False

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size)
        check_whole("capacity", self.capacity)
        if self.capacity < self.batch_size:
            raise CapacityError(
                f"capacity={self.capacity} is below batch_size={self.batch_size}: a batch could never be served; "
                f"expected a capacity of at least {self.batch_size} rows"
            )

    def resolve(self, schedule: Schedule | None) -> Schedule:
        """The schedule with its granularities filled in; everything in line for None. ScheduleError if the mode forbids it."""
        schedule = _as_schedule(schedule)
        g_ing, g_del = _filled(schedule.g_ing, 1), _filled(schedule.g_del, 1)
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
        return int(_filled(schedule.g_ing, 1))

    def numbering(self, rank: int, world: int, schedule: Schedule) -> Numbering:
        return Numbering(rank, world, int(_filled(schedule.g_del, 1)), None)


@dataclass(frozen=True, slots=True)
class OnPolicy:
    """Iteration k takes exactly `rollout_unit` rows of policy version k and delivers each `epochs` times, in
    M = rollout_unit / batch_size mini-batches a pass."""

    rollout_unit: int
    batch_size: int
    epochs: int = 1

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
    def sampling(self) -> Sampling:
        return Shuffled(self.rollout_unit, self.batch_size, self.epochs)

    def resolve(self, schedule: Schedule | None) -> Schedule:
        """The schedule with its granularities filled in; everything in line for None. ScheduleError if the mode forbids it."""
        schedule = _as_schedule(schedule)
        g_ing, g_del = _filled(schedule.g_ing, 1), _filled(schedule.g_del, 1 / self.minibatches)
        for name, g in (("g_ing", g_ing), ("g_del", g_del)):
            k = g * self.minibatches
            if not 0 < g <= 1 or not math.isclose(k, round(k), abs_tol=1e-6):
                raise ScheduleError(
                    f"{name}={g}: on-policy granularities are k/M with M = {self.minibatches} mini-batches: "
                    f"1/{self.minibatches}, …, 1"
                )
        return replace(schedule, g_ing=g_ing, g_del=g_del)

    def rows_per_ingestion(self, schedule: Schedule) -> int:
        return round(_filled(schedule.g_ing, 1) * self.minibatches) * self.batch_size

    def numbering(self, rank: int, world: int, schedule: Schedule) -> Numbering:
        """Every row goes to exactly one learner a pass, and all learners get equally many batches."""
        if self.batches % world:
            raise ScheduleError(
                f"an iteration has {self.batches} batches ({self.epochs} passes of {self.minibatches}), which {world} learners "
                "can't share equally; expected a world that divides them"
            )
        return Numbering(rank, world, self._batches_per_delivery(schedule), self.batches // world)

    def _batches_per_delivery(self, schedule: Schedule) -> int:
        return round(_filled(schedule.g_del, 1 / self.minibatches) * self.minibatches)


Semantics = OffPolicy | OnPolicy


def semantics_of(
    mode: str,
    capacity: int | None,
    batch_size: int,
    rollout_unit: int | None,
    epochs: int | None,
    sampler: Sampling | None,
    exact: bool,
) -> Semantics:
    """What `Store`'s settings mean. SettingError names one that is missing, or not of the mode."""
    if mode == "off_policy":
        if rollout_unit is not None or epochs is not None:
            raise SettingError(
                "rollout_unit and epochs are on-policy settings; off-policy takes capacity, batch_size and a sampler"
            )
        if capacity is None:
            raise SettingError("mode='off_policy' needs capacity=, in rows")
        return OffPolicy(capacity, batch_size, sampler or Uniform(), exact)
    if mode == "on_policy":
        if capacity is not None or sampler is not None or exact:
            raise SettingError(
                "capacity, sampler and exact are off-policy settings; on-policy takes rollout_unit, batch_size and epochs"
            )
        if rollout_unit is None:
            raise SettingError(
                "mode='on_policy' needs rollout_unit=: the rows of one iteration, steps × lanes over all actors"
            )
        return OnPolicy(rollout_unit, batch_size, 1 if epochs is None else epochs)
    raise SettingError(f"mode={mode!r}: expected 'off_policy' or 'on_policy'")


def _as_schedule(schedule: object) -> Schedule:
    if schedule is not None and not isinstance(schedule, Schedule):
        raise ScheduleError(f"schedule={schedule!r}: expected a conduit.Schedule, or None for everything in line")
    return schedule or Schedule()


def _filled(g: float | None, default: float) -> float:
    if g is not None and (not isinstance(g, Real) or isinstance(g, bool)):
        raise ScheduleError(f"a granularity of {g!r}: expected a number, or None for the default")
    return default if g is None else g


def check_whole(name: str, got: object) -> None:
    """SettingError unless `got` is a whole number of at least 1."""
    if not isinstance(got, Integral) or isinstance(got, bool) or int(got) < 1:
        raise SettingError(f"{name}={got!r}: expected a whole number of at least 1")
