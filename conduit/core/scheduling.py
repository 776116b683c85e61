"""Which schedule an iteration is shortest under: every candidate scored, and the choice explained (paper §6.3, Eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conduit.core.feasible import Feasible
from conduit.core.latency import OperatorTimes, StageTimes, delivery_path_s, ingestion_path_s, iteration_s
from conduit.core.schedule import Mode, Schedule
from conduit.core.semantics import OnPolicy, Semantics
from conduit.errors import ScheduleError

BETTER = 1.01
"""Iterations that differ by less than this factor are alike: the simpler schedule is as good, and the one in force stays."""

_RESIDUE = 1e-9
"""Sums of floats that differ by less are equal; and less than a nanosecond is nothing."""
_ROWS = 4
"""Candidates that a table shows, and those that were tried; a choice has them all."""
_LESS = "*"
"""Marks what is less than the model has it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule, and the seconds per iteration that are predicted of it. `noise_s`: by how much its iteration may be off."""

    schedule: Schedule
    ingestion_path_s: float
    delivery_path_s: float
    iteration_s: float
    noise_s: float = 0.0


class Trial(NamedTuple):
    """How a schedule did in practice, turn about with plain in line: the time of its iterations over that of plain ones, and by how much that
    may be off for noise."""

    schedule: Schedule
    share: float
    noise: float

    def __str__(self) -> str:
        return f"{self.share:.1%} ± {self.noise:.1%} of plain in line's time"


class ScheduleEvent(NamedTuple):
    """What an automatic schedule came to: from `iteration` on, counted from 0, `schedule` is followed."""

    iteration: int
    schedule: Schedule
    event: str
    """"chosen"; "kept": another might have been, after it was measured anew; "measures anew"."""
    why: str

    def __str__(self) -> str:
        return f"iteration {self.iteration:,}: {self.event}{self._what}: {self.why}"

    @property
    def label(self) -> str:
        """The same in few words."""
        return f"{self.event}{self._what}"

    @property
    def _what(self) -> str:
        return "" if self.event == "measures anew" else f" {_named(self.schedule)}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen schedule, all candidates (the shortest iteration first) and what they were predicted from.

    - `plain`: the simplest schedule, everything in line, if it was measured
    - `unmeasured`: feasible modes of (ingestion, delivery) that nothing is known of and that are in no candidate
    - `kept`: the schedule was in force before, and the fastest isn't better enough
    - `trials`: what was tried in practice, first what the figures speak for; empty before, and where it was plain in line
    - `units`: what a unit of ingestion and one of delivery is called"""

    schedule: Schedule
    candidates: tuple[Candidate, ...]
    times: StageTimes
    plain: Candidate | None
    unmeasured: tuple[tuple[Mode, ...], tuple[Mode, ...]] = ((), ())
    kept: bool = False
    trials: tuple[Trial, ...] = ()
    units: tuple[str, str] = ("push", "batch")

    @property
    def candidate(self) -> Candidate:
        """Of the chosen schedule."""
        return next(each for each in self.candidates if each.schedule == self.schedule)

    def __str__(self) -> str:
        """A table: the inputs, the candidates that matter, and why the winner won."""
        return "\n".join(_text(self))


def choose_schedule(
    feasible: Feasible, times: StageTimes, semantics: Semantics, current: Schedule | None = None
) -> Choice:
    """The schedule with the shortest predicted iteration, or one that is as good: of modes that together cost no more than `BETTER`, or each
    no more than the noise of its figures, the current one, or else the simplest: the first in `feasible`. `current`, if it is a candidate,
    stays unless the iteration gets shorter by more than `BETTER`.

    Both operators' modes are scored once each: the objective separates, and candidates are their sums (or maxima). ScheduleError if not
    one feasible mode of an operator was measured."""
    sides = (
        _Side("ingestion", feasible.ingestion, times.ingestion, times.units, lambda mode: ingestion_path_s(times, semantics, mode)),
        _Side("delivery", feasible.delivery, times.delivery, times.batches, lambda mode: delivery_path_s(times, semantics, mode)),
    )  # fmt: skip
    ingestion, delivery = sides
    scored = [
        _scored(one, ingestion, other, delivery, times.concurrent) for one in ingestion.path_s for other in delivery.path_s
    ]  # fmt: skip
    by_schedule = {each.schedule: each for each in scored}
    picked = _picked(ingestion, delivery, times.concurrent, None)
    now = current if current in by_schedule else None
    chosen = picked if now is None else _picked(ingestion, delivery, times.concurrent, now)
    if now is not None and by_schedule[now].iteration_s <= by_schedule[chosen].iteration_s * (BETTER + _RESIDUE):
        chosen = now
    return Choice(
        chosen,
        # Sorting keeps the order of equals: the simpler first.
        tuple(sorted(scored, key=lambda each: each.iteration_s)),
        times,
        by_schedule.get(feasible.simplest),
        (ingestion.unmeasured, delivery.unmeasured),
        chosen == now != picked,
        units=("unit", "pass") if isinstance(semantics, OnPolicy) else ("push", "batch"),
    )


def exposed_s(candidate: Candidate, times: StageTimes) -> tuple[float, float]:
    """Seconds per iteration that (ingestion, delivery) adds to its stage: what push or pull waits for, and what the stage is slowed by."""
    return (
        candidate.ingestion_path_s - times.units * times.rollout_s,
        candidate.delivery_path_s - times.batches * times.update_s,
    )


class _Side:
    """One operator's measured modes, in the order of `feasible`, and what each costs an iteration."""

    def __init__(
        self,
        name: str,
        modes: Sequence[Mode],
        measured: Mapping[Mode, OperatorTimes],
        per_iteration: float,
        path_s: Callable[[Mode], float],
    ) -> None:
        self.path_s = {mode: path_s(mode) for mode in modes if mode in measured}
        self.noise_s = {mode: per_iteration * measured[mode].noise_s for mode in self.path_s}
        self.unmeasured = tuple(mode for mode in modes if mode not in measured)
        if not self.path_s:
            raise ScheduleError(
                f"no feasible mode of {name} was measured: expected figures of at least one of {'; '.join(map(str, modes))}; "
                f"got {'; '.join(map(str, measured)) or 'none'}"
            )
        self.fastest = min(self.path_s, key=lambda mode: self.path_s[mode])
        self.fastest_s = self.path_s[self.fastest]

    def pick(self, floor_s: float, spare_s: float, current: Mode | None) -> Mode:
        """The mode to run in. Up to `floor_s` a path costs nothing, for the other side takes as long; `spare_s` more don't matter."""
        alike = [mode for mode in self.path_s if self._is_alike(mode, floor_s, spare_s)]
        return next((mode for mode in alike if mode == current), alike[0])

    def _is_alike(self, mode: Mode, floor_s: float, spare_s: float) -> bool:
        noise_s = 0.0 if mode == self.fastest else math.hypot(self.noise_s[mode], self.noise_s[self.fastest])
        most_s = max(floor_s + spare_s, self.fastest_s + max(noise_s, spare_s))
        return self.path_s[mode] <= most_s * (1 + _RESIDUE)


def _picked(ingestion: _Side, delivery: _Side, concurrent: bool, current: Schedule | None) -> Schedule:
    floor_s = max(ingestion.fastest_s, delivery.fastest_s) if concurrent else 0.0
    spare_s = (BETTER - 1) * iteration_s(ingestion.fastest_s, delivery.fastest_s, concurrent)
    # Delivery first: batches that are drawn ahead for next to nothing are the worse bargain.
    other = delivery.pick(floor_s, spare_s, current and current.delivery)
    if not concurrent:
        spare_s = max(0.0, spare_s - delivery.path_s[other] + delivery.fastest_s)
    return Schedule.of(ingestion.pick(floor_s, spare_s, current and current.ingestion), other)


def _scored(one: Mode, ingestion: _Side, other: Mode, delivery: _Side, concurrent: bool) -> Candidate:
    paths = ingestion.path_s[one], delivery.path_s[other]
    noise_s = math.hypot(ingestion.noise_s[one], delivery.noise_s[other])
    return Candidate(Schedule.of(one, other), *paths, iteration_s(*paths, concurrent), noise_s)


def _text(choice: Choice) -> Iterator[str]:
    times, (unit, batch) = choice.times, choice.units
    how = "the slower path: they run concurrently" if times.concurrent else "the sum of both paths: they alternate"
    yield f"Schedule: {_named(choice.schedule)}"
    yield (
        f"  T_rollout {_ms(times.rollout_s)} ms/{unit} × {times.units:.4g}, T_update {_ms(times.update_s)} ms/{batch} × "
        f"{times.batches:.4g} an iteration; T_iter is {how}"
    )
    yield (
        f"  T(g)/g: what the operator works for one {unit} ({batch}) at granularity g; behind its stage, + T_sync: what the stage is slowed + "
        "what callers are blocked"
    )
    lines = [
        *_measured("T_ing", unit, times.ingestion),
        *_measured("T_del", batch, times.delivery),
        f"  predicted ms/iteration of {len(choice.candidates)} candidates: the iteration; ingestion path (exposed); delivery path (exposed)",
        *_table(choice),
    ]
    yield from lines
    if any(_LESS in line for line in lines):
        yield f"  {_LESS} less than alone, or less than the model has it"
    for name, modes in zip(("ingestion", "delivery"), choice.unmeasured, strict=True):
        if modes:
            yield f"  not measured, so no candidates: {name} {'; '.join(map(str, modes))}"
    yield f"  Why: {_why(choice)}"


def _measured(name: str, unit: str, measured: Mapping[Mode, OperatorTimes]) -> Iterator[str]:
    """A line for what is measured in line, and one for what is behind the stage."""
    for overlap in (False, True):
        modes = sorted(mode for mode in measured if mode.overlap is overlap)
        figures = [f"{mode.granularity} {_figures(measured[mode], overlap)}" for mode in modes]
        if figures:
            where = "behind (+ slowed + blocked)" if overlap else "in line"
            yield f"  {name}(g)/g, ms/{unit}, {where}: {', '.join(figures)}"


def _figures(of: OperatorTimes, overlap: bool) -> str:
    taken = _ms(of.operator_s)
    if not overlap:
        return taken
    return f"{taken} + {_signed(of.slowdown_s, of.noise_s)} + {_signed(of.blocking_s, of.noise_s)}"


def _table(choice: Choice) -> Iterator[str]:
    """The fastest, the chosen one, plain in line and what was tried, in their order."""
    tried = {trial.schedule: trial for trial in choice.trials}
    must = {choice.schedule, *tried, *(() if choice.plain is None else (choice.plain.schedule,))}
    others = [each.schedule for each in choice.candidates if each.schedule not in must]
    shown = must.union(others[: max(0, _ROWS - len(must))])
    for each in choice.candidates:
        schedule = each.schedule
        if schedule in shown:
            exposed = [_signed(seconds, each.noise_s) for seconds in exposed_s(each, choice.times)]
            yield (
                f"{'→' if schedule == choice.schedule else ' ':>3}{_ms(each.iteration_s):>9}; "
                f"{schedule.ingestion!s:<17}{_ms(each.ingestion_path_s):>9} ({exposed[0]}); "
                f"{schedule.delivery!s:<17}{_ms(each.delivery_path_s):>9} ({exposed[1]})"
                f"{f'; in practice {tried[schedule]}' if schedule in tried else ''}"
            )


def _why(choice: Choice) -> str:
    if choice.trials:
        return _why_in_practice(choice)
    chosen, plain, fastest = choice.candidate, choice.plain, choice.candidates[0]
    if len(choice.candidates) == 1:
        return "there is no other candidate"
    if choice.kept:
        return (
            f"it is in force; the fastest, {_named(fastest.schedule)}, would be {_less(fastest, chosen)} shorter, and a change takes more than "
            f"{BETTER - 1:.0%}"
        )
    if plain is None:
        return "it is the fastest" if chosen is fastest else "nothing is faster by more than the noise"
    if chosen is not plain:
        return _gain(chosen, plain, choice.times)
    behind = next((each for each in choice.candidates if _overlaps(each.schedule)), None)
    if behind is None or (fastest is not plain and not _overlaps(fastest.schedule)):
        more = "" if chosen is fastest else f" by more than {BETTER - 1:.0%} and the noise of the figures"
        return f"nothing is shorter than plain in line{more}"
    differs = behind.iteration_s - plain.iteration_s
    if differs < 0:
        gain = f"the gain of {_less(behind, plain)} by the best with it, {_named(behind.schedule)}, is within {BETTER - 1:.0%} or the noise"
        return f"overlap doesn't pay: {gain}"
    longer = (
        f"{_share(differs, plain.iteration_s)} longer than plain in line" if differs else "as long as plain in line"
    )
    return f"overlap doesn't pay: the best with it, {_named(behind.schedule)}, would take {longer}"


def _why_in_practice(choice: Choice) -> str:
    predicted, won = choice.trials[0], next((each for each in choice.trials if each.schedule == choice.schedule), None)
    by_schedule = {each.schedule: each for each in choice.candidates}
    if won is None:
        least = min(choice.trials, key=lambda trial: trial.share)
        others = (
            ""
            if least is predicted
            else f"; of those tried the fastest, {_named(least.schedule)}, took {least.share:.1%}"
        )
        return (
            f"nothing beat plain in line in practice by more than {BETTER - 1:.0%} and the noise: {_named(predicted.schedule)}, predicted "
            f"to be the best, took {predicted}, turn about{others}"
        )
    expected = (
        "" if choice.plain is None else f"; predicted: {_gain(by_schedule[won.schedule], choice.plain, choice.times)}"
    )
    others = (
        ""
        if won is predicted
        else f"; {_named(predicted.schedule)}, predicted to be the best, took {predicted.share:.1%}"
    )
    return f"it takes {won} in practice, turn about{others}{expected}"


def _gain(chosen: Candidate, plain: Candidate, times: StageTimes) -> str:
    """Over plain in line."""
    if chosen.iteration_s >= plain.iteration_s:
        return f"not less than plain in line ({_ms(plain.iteration_s)} ms)"
    before, after = (max(0.0, sum(exposed_s(each, times))) for each in (plain, chosen))
    return f"{_less(chosen, plain)} less than plain in line ({_ms(plain.iteration_s)} ms), exposing {_ms(after)} ms instead of {_ms(before)}"


def _overlaps(schedule: Schedule) -> bool:
    return schedule.overlap_ing or schedule.overlap_del


def _less(shorter: Candidate, longer: Candidate) -> str:
    return _share(longer.iteration_s - shorter.iteration_s, longer.iteration_s)


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s if whole_s else 0.0:.1%}"


def _named(schedule: Schedule) -> str:
    return f"ingestion {schedule.ingestion} and delivery {schedule.delivery}"


def _ms(seconds: float) -> str:
    return f"{0.0 if abs(seconds) < _RESIDUE else seconds * 1e3:.4g}"


def _signed(seconds: float, noise_s: float) -> str:
    """What should be 0 at least, and is 0 if it is no further below than noise explains."""
    return _ms(max(0.0, seconds)) if seconds >= -max(noise_s, _RESIDUE) else f"{_ms(seconds)}{_LESS}"
