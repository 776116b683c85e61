"""Which modes an algorithm's semantics leave to an automatic schedule (paper §4, §6.1): nobody tunes, users may cap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from conduit.core.schedule import MOST_UNITS, Auto, Mode, Schedule
from conduit.core.semantics import OnPolicy, Semantics
from conduit.errors import ScheduleError

MOST_FRACTIONS = 8
"""On-policy, so many granularities are tried at most: each takes some iterations to measure."""

_SLACK = 1e-6
"""A cap of 0.333333 allows 1/3, as a Schedule does."""


@dataclass(frozen=True, slots=True)
class Feasible:
    """The modes of each operator that the semantics and the caps allow, the simplest first: in line before behind the stage, and then
    what is closest to a plain loop: one unit, one batch. `minibatches`: M on-policy, of which g_del = 1 takes as many; 1 off-policy."""

    ingestion: tuple[Mode, ...]
    delivery: tuple[Mode, ...]
    minibatches: int = 1

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """All of them: any mode of ingestion with any of delivery."""
        return tuple(Schedule.of(ingestion, delivery) for ingestion in self.ingestion for delivery in self.delivery)

    @property
    def simplest(self) -> Schedule:
        """What is in force before anything was measured: in line and, unless caps forbid it, one unit and one batch at a time."""
        return Schedule.of(self.ingestion[0], self.delivery[0])

    def staging(self, most_batches: int) -> Feasible:
        """Those that stage at most so many batches, where there is memory for no more. ScheduleError if none does."""
        fitting = self._staging(most_batches)
        if not fitting:
            least = min(staged_batches(mode, self.minibatches) for mode in self.delivery)
            raise ScheduleError(
                f"room for {most_batches} staged batches: no feasible mode of delivery stages so few; the least that would do is {least}"
            )
        return replace(self, delivery=fitting)

    def _staging(self, most_batches: int) -> tuple[Mode, ...]:
        return tuple(mode for mode in self.delivery if staged_batches(mode, self.minibatches) <= most_batches)


def staged_batches(mode: Mode, minibatches: int = 1) -> int:
    """How many batches of one learner a mode of delivery holds at most: the group that is being handed out and, behind the update,
    the one that is prepared meanwhile. `minibatches`: M on-policy."""
    group = round(mode.g * minibatches)
    return 2 * group if mode.overlap else group


def feasible(semantics: Semantics, auto: Auto, *, pipelines: bool, counted: bool) -> Feasible:
    """What `auto` may choose from, under these semantics.

    - off-policy: g in whole units and batches, powers of two up to 8 or to the cap, and the cap itself
    - on-policy: g = k/M with k a divisor of M, so that no invocation is smaller than the others. Behind a stage only where something is
      left to be hidden: nothing overlaps with itself, be it a unit that is ingested as a whole or the only group of an iteration
    - exact draws, and bounded staleness: each batch is drawn at its pull, so delivery stays in line, a batch at a time

    `pipelines`: the ingestion hooks start with one of row scope, or there are none. If False nothing can run on a part of a unit, and
    several units are worked on one by one. `counted`: draws are counted, by a limiter or max_times_sampled: then no group is drawn at once.
    ScheduleError names the cap that leaves nothing, and the least that would do."""
    m = semantics.minibatches if isinstance(semantics, OnPolicy) else 1
    units = _steps(semantics, auto.g_ing) if pipelines else (m,)
    batches = (1,) if semantics.exact or counted else _steps(semantics, auto.g_del)
    ingestion: Sequence[float] = units
    delivery: Sequence[float] = batches
    if isinstance(semantics, OnPolicy):
        # A whole unit first: as few invocations as a plain loop has.
        ingestion, delivery = [k / m for k in reversed(units)], [k / m for k in batches]
        behind_ing, behind_del = [g for g in ingestion if g < 1], [g for g in delivery if g < semantics.epochs]
    else:
        behind_ing, behind_del = ingestion, () if semantics.exact else delivery
    found = Feasible(
        _capped("g_ing", auto.g_ing, [*_modes(ingestion, behind_ing if auto.overlap_ing else ())]),
        _capped("g_del", auto.g_del, [*_modes(delivery, behind_del if auto.overlap_del else ())]),
        m,
    )
    # A single batch in line is never ahead of anything: one mode always remains.
    return found if auto.batches_ahead is None else found.staging(auto.batches_ahead + 1)


def _steps(semantics: Semantics, cap: float | None) -> tuple[int, ...]:
    """The units or batches that one invocation may take."""
    if isinstance(semantics, OnPolicy):
        return _divisors(semantics.minibatches)
    most = MOST_UNITS if cap is None else int(cap + _SLACK)
    return tuple(sorted({1, *(1 << power for power in range(most.bit_length()) if 1 << power <= most), most} - {0}))


def _divisors(m: int) -> tuple[int, ...]:
    """Divisors of M, 1 and M among them; of many those that at least double."""
    divisors = [k for k in range(1, m + 1) if m % k == 0]
    if len(divisors) <= MOST_FRACTIONS:
        return tuple(divisors)
    doubling = [1]
    for k in divisors:
        if 2 * doubling[-1] <= k < m:
            doubling.append(k)
    return (*doubling, m)


def _modes(in_line: Sequence[float], behind: Sequence[float]) -> Iterator[Mode]:
    yield from (Mode(False, g) for g in in_line)
    yield from (Mode(True, g) for g in behind)


def _capped(name: str, cap: float | None, modes: Sequence[Mode]) -> tuple[Mode, ...]:
    fitting = tuple(mode for mode in modes if cap is None or mode.g <= cap + _SLACK)
    if not fitting:
        least = min(mode.g for mode in modes)
        raise ScheduleError(
            f"Auto({name}={cap!r}): leaves nothing feasible; here granularities are {_listed(modes)}: the least that would do is "
            f"{name}={least:.6g}"
        )
    return fitting


def _listed(modes: Sequence[Mode]) -> str:
    return ", ".join(f"{g:.6g}" for g in sorted({mode.g for mode in modes}))
