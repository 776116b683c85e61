"""Schedules as values: when the operators run and how much one invocation takes (paper §4, §6, Fig. 10)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import NamedTuple

from conduit.core.whole import check_whole
from conduit.errors import ScheduleError

MOST_UNITS = 8
"""g_max of an automatic schedule off-policy, unless it is capped: what more would save is little, and it would be drawn further ahead."""

MOST_CAP = 256
"""To what a cap may raise it."""


class Mode(NamedTuple):
    """An operator's execution mode (Fig. 10). `overlap`: behind the stage, on a thread of its own. `g`: its granularity."""

    overlap: bool
    g: float

    @property
    def granularity(self) -> str:
        """As a whole number or a fraction."""
        return f"g={Fraction(self.g).limit_denominator(1 << 20)}"

    def __str__(self) -> str:
        return f"{'behind' if self.overlap else 'in line'}, {self.granularity}"


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

    @property
    def ingestion(self) -> Mode:
        """Of a schedule whose granularities are filled in."""
        assert self.g_ing is not None
        return Mode(self.overlap_ing, self.g_ing)

    @property
    def delivery(self) -> Mode:
        """Of a schedule whose granularities are filled in."""
        assert self.g_del is not None
        return Mode(self.overlap_del, self.g_del)

    @classmethod
    def of(cls, ingestion: Mode, delivery: Mode) -> Schedule:
        return cls(ingestion.overlap, ingestion.g, delivery.overlap, delivery.g)


@dataclass(frozen=True, slots=True)
class Auto:
    """The store profiles its first iterations, chooses the schedule that predicts the shortest iteration, and does so anew when what it
    measured no longer holds (paper §6.3). Nothing has to be set; what is caps the choice.

    - `overlap_ing`, `overlap_del`: False keeps an operator in line
    - `g_ing`, `g_del`: granularities at most; off-policy 8 rollout units and 8 batches by default
    - `batches_ahead`: how many batches at most are drawn before the one that they come after was pulled: the `priority_lag` that any batch
      may have
    - `concurrent`: whether actors and learners work at the same time, so that the slower side decides; None: as the threads tell that call
      push and pull"""

    overlap_ing: bool = True
    overlap_del: bool = True
    g_ing: float | None = None
    g_del: float | None = None
    batches_ahead: int | None = None
    concurrent: bool | None = None

    def __post_init__(self) -> None:
        for name in ("overlap_ing", "overlap_del", "concurrent"):
            given = getattr(self, name)
            if not isinstance(given, bool) and not (name == "concurrent" and given is None):
                raise ScheduleError(f"Auto({name}={given!r}): expected True or False")
        for name in ("g_ing", "g_del"):
            g = getattr(self, name)
            if g is not None and not (is_number(g) and 0 < g <= MOST_CAP):
                raise ScheduleError(f"Auto({name}={g!r}): expected a granularity > 0, of at most {MOST_CAP}, or None")
        if self.batches_ahead is not None:
            check_whole("Auto(batches_ahead)", self.batches_ahead, 0)


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


def asked_schedule(schedule: object) -> Schedule | Auto:
    """What `Store(schedule=)` means: None, everything in line. ScheduleError for what it can't be."""
    if schedule is None:
        return Schedule()
    if isinstance(schedule, str) and schedule == "auto":
        return Auto()
    if not isinstance(schedule, Schedule | Auto):
        raise ScheduleError(
            f"schedule={schedule!r}: expected a conduit.Schedule, 'auto', conduit.Auto(…), or None for everything in line"
        )
    return schedule


def filled(g: float | None, default: float) -> float:
    """A granularity, or the default where it is None. ScheduleError where it is no number."""
    if g is not None and not is_number(g):
        raise ScheduleError(f"a granularity of {g!r}: expected a number, or None for the default")
    return default if g is None else g


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
