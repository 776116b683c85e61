"""Which schedule an iteration is shortest under: every candidate scored, and the choice explained (paper §6.3, Eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from conduit.core.feasible import Feasible
from conduit.core.latency import OperatorTimes, StageTimes, delivery_path_s, ingestion_path_s, iteration_s
from conduit.core.schedule import Mode, Schedule
from conduit.core.semantics import OnPolicy, Semantics
from conduit.errors import ScheduleError

BETTER = 1.01
"""A schedule stays in force until another's iteration is shorter by this factor, and by more than the noise of the figures."""

_RESIDUE = 1e-9
"""Sums of floats that differ by less are equal."""
_ROWS = 4
"""Candidates that a table shows; a choice has them all."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule, and the seconds per iteration that are predicted of it. `noise_s`: by how much its iteration may be off."""

    schedule: Schedule
    ingestion_path_s: float
    delivery_path_s: float
    iteration_s: float
    noise_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen schedule, all candidates (the shortest iteration first) and what they were predicted from.

    `plain`: the simplest schedule, everything in line, if it was measured. `unmeasured`: feasible modes of (ingestion, delivery)
    that nothing is known of and that are in no candidate. `kept`: the schedule was in force before, and the fastest isn't better enough."""

    schedule: Schedule
    candidates: tuple[Candidate, ...]
    times: StageTimes
    plain: Candidate | None
    unmeasured: tuple[tuple[Mode, ...], tuple[Mode, ...]] = ((), ())
    kept: bool = False
    batch_unit: str = "batch"

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
    """The schedule with the shortest predicted iteration. Of modes that are as fast as the fastest, or as near to it as the noise of their
    figures, the current one, or else the simplest: the first in `feasible`. `current`, if it is a candidate, stays unless the iteration
    gets shorter by more than `BETTER`.

    Both operators' modes are scored once each: the objective separates, and candidates are their sums (or maxima). ScheduleError if not
    one feasible mode of an operator was measured."""
    sides = (
        _Side("ingestion", feasible.ingestion, times.ingestion, times.units, lambda mode: ingestion_path_s(times, semantics, mode)),
        _Side("delivery", feasible.delivery, times.delivery, times.batches, lambda mode: delivery_path_s(times, semantics, mode)),
    )  # fmt: skip
    ingestion, delivery = sides
    floor_s = max(side.fastest_s for side in sides) if times.concurrent else 0.0
    now = None if current is None or current.g_ing is None or current.g_del is None else current
    picked = Schedule.of(ingestion.pick(floor_s, now and now.ingestion), delivery.pick(floor_s, now and now.delivery))
    scored = [
        _scored(one, ingestion, other, delivery, times.concurrent) for one in ingestion.path_s for other in delivery.path_s
    ]  # fmt: skip
    by_schedule = {each.schedule: each for each in scored}
    keeps = (
        now in by_schedule
        and now != picked
        and by_schedule[now].iteration_s <= by_schedule[picked].iteration_s * (BETTER + _RESIDUE)
    )
    return Choice(
        now if keeps and now is not None else picked,
        # Sorting keeps the order of equals: the simpler first.
        tuple(sorted(scored, key=lambda each: each.iteration_s)),
        times,
        by_schedule.get(feasible.simplest),
        (ingestion.unmeasured, delivery.unmeasured),
        keeps,
        "pass" if isinstance(semantics, OnPolicy) else "batch",
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

    def pick(self, floor_s: float, current: Mode | None) -> Mode:
        """The mode to run in. Up to `floor_s` a path costs nothing, for the other side takes as long."""
        alike = [mode for mode in self.path_s if self._is_alike(mode, floor_s)]
        return next((mode for mode in alike if mode == current), alike[0])

    def _is_alike(self, mode: Mode, floor_s: float) -> bool:
        noise_s = 0.0 if mode == self.fastest else math.hypot(self.noise_s[mode], self.noise_s[self.fastest])
        return self.path_s[mode] <= max(floor_s, self.fastest_s + noise_s) * (1 + _RESIDUE)


def _scored(one: Mode, ingestion: _Side, other: Mode, delivery: _Side, concurrent: bool) -> Candidate:
    paths = ingestion.path_s[one], delivery.path_s[other]
    noise_s = math.hypot(ingestion.noise_s[one], delivery.noise_s[other])
    return Candidate(Schedule.of(one, other), *paths, iteration_s(*paths, concurrent), noise_s)


def _text(choice: Choice) -> Iterator[str]:
    times, chosen = choice.times, choice.candidate
    how = "the slower path: they run concurrently" if times.concurrent else "the sum of both paths: they alternate"
    yield f"Schedule: ingestion {_mode(chosen.schedule.ingestion)}; delivery {_mode(chosen.schedule.delivery)}"
    yield (
        f"  T_rollout {_ms(times.rollout_s)} ms/unit × {times.units:.4g}, T_update {_ms(times.update_s)} ms/{choice.batch_unit} × "
        f"{times.batches:.4g} an iteration; T_iter is {how}"
    )
    yield from _measured("T_ing", "unit", times.ingestion)
    yield from _measured("T_del", choice.batch_unit, times.delivery)
    yield f"  predicted ms/iteration of {len(choice.candidates)} candidates: the iteration; ingestion path (exposed); delivery path (exposed)"
    for each in _shown(choice):
        ingestion, delivery = each.schedule.ingestion, each.schedule.delivery
        exposed = exposed_s(each, times)
        yield (
            f"{'→' if each is chosen else ' ':>3}{_ms(each.iteration_s):>9}; {_mode(ingestion):<17}{_ms(each.ingestion_path_s):>9} "
            f"({_ms(exposed[0])}); {_mode(delivery):<17}{_ms(each.delivery_path_s):>9} ({_ms(exposed[1])})"
        )
    for name, modes in zip(("ingestion", "delivery"), choice.unmeasured, strict=True):
        if modes:
            yield f"  not measured, so no candidates: {name} {', '.join(map(_mode, modes))}"
    yield f"  Why: {_why(choice)}"


def _measured(name: str, unit: str, measured: Mapping[Mode, OperatorTimes]) -> Iterator[str]:
    """A line for what is measured in line, and one for what is behind the stage."""
    for overlap in (False, True):
        modes = sorted(mode for mode in measured if mode.overlap is overlap)
        figures = [f"g={_g(mode.g)} {_figures(measured[mode], overlap)}" for mode in modes]
        if figures:
            what = "behind + T_sync (slows + blocks)" if overlap else "in line"
            yield f"  {name}(g)/g, ms/{unit}, {what}: {', '.join(figures)}"


def _figures(of: OperatorTimes, overlap: bool) -> str:
    taken = _ms(of.operator_s)
    if not overlap:
        return taken
    return f"{taken} + {_ms(of.sync_s)} ({_ms(of.slowdown_s)} + {_ms(of.blocking_s)})"


def _shown(choice: Choice) -> list[Candidate]:
    """The fastest, the chosen one and plain in line, in their order."""
    must = {choice.candidate.schedule, *(() if choice.plain is None else (choice.plain.schedule,))}
    others = [each.schedule for each in choice.candidates if each.schedule not in must]
    shown = must.union(others[: _ROWS - len(must)])
    return [each for each in choice.candidates if each.schedule in shown]


def _why(choice: Choice) -> str:
    chosen, plain, fastest = choice.candidate, choice.plain, choice.candidates[0]
    if len(choice.candidates) == 1:
        return "there is no other candidate"
    if choice.kept:
        return (
            f"it is in force; the fastest, {_named(fastest)}, would be {_less(fastest, chosen)} shorter, and a change takes more than "
            f"{BETTER - 1:.0%}"
        )
    reasons = []
    if plain is not None and chosen is not plain:
        before, after = (sum(exposed_s(each, choice.times)) for each in (plain, chosen))
        reasons.append(
            f"{_less(chosen, plain)} less than plain in line ({_ms(plain.iteration_s)} ms): it exposes {_ms(after)} ms instead of {_ms(before)}"
        )
    elif plain is not None:
        noise = "" if chosen is fastest else " by more than the noise of the figures"
        reasons.append(f"nothing is shorter than plain in line{noise}")
    behind = next((each for each in choice.candidates if _overlaps(each)), None)
    if behind is not None and not _overlaps(chosen):
        differs = behind.iteration_s - chosen.iteration_s
        longer = (
            f"{_share(abs(differs), chosen.iteration_s)} {'longer' if differs > 0 else 'shorter, less than the noise'}"
        )
        reasons.insert(
            0, f"overlap doesn't pay: the best with it, {_named(behind)}, would be {longer if differs else 'as long'}"
        )
    return "; ".join(reasons) or "it is the fastest"


def _overlaps(candidate: Candidate) -> bool:
    return candidate.schedule.overlap_ing or candidate.schedule.overlap_del


def _less(shorter: Candidate, longer: Candidate) -> str:
    return _share(longer.iteration_s - shorter.iteration_s, longer.iteration_s)


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s if whole_s else 0.0:.1%}"


def _named(candidate: Candidate) -> str:
    return f"ingestion {_mode(candidate.schedule.ingestion)} and delivery {_mode(candidate.schedule.delivery)}"


def _mode(mode: Mode) -> str:
    return f"{'behind' if mode.overlap else 'in line'}, g={_g(mode.g)}"


def _g(g: float) -> str:
    return str(Fraction(g).limit_denominator(1 << 20))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}"
