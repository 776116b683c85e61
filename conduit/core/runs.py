"""What was measured under which schedule, and the stage times that it comes to (paper §6.2, §6.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev

from conduit.core.feasible import Feasible
from conduit.core.figures import Crew, Figures, Side, error_of_median, middle, spread, typical
from conduit.core.latency import Operator, OperatorTimes, StageTimes, gamma, path_s, waited_s
from conduit.core.schedule import Mode, Schedule
from conduit.core.semantics import OnPolicy, Semantics

CROWDED = 1.1
"""Threads that push and threads that pull work at the same time if their seconds are so many times those that passed."""

_SURE = 1.645
"""The same of many values."""


@dataclass(frozen=True, slots=True)
class Run:
    """Some iterations under one schedule, in blocks, and who worked in them."""

    schedule: Schedule
    blocks: Sequence[Figures]
    crew: Crew

    @property
    def overlaps(self) -> bool:
        return self.schedule.overlap_ing or self.schedule.overlap_del


class Runs:
    """All that a profile has measured so far. `concurrent`: whether actors and learners work at the same time; None: as their threads
    tell."""

    def __init__(self, semantics: Semantics, simplest: Schedule, concurrent: bool | None) -> None:
        self._semantics = semantics
        self._simplest = simplest
        self._declared = concurrent
        self._runs: list[Run] = []

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, schedule: Schedule, blocks: Sequence[Figures], crew: Crew) -> None:
        self._runs.append(Run(schedule, blocks, crew))

    def knows(self, schedule: Schedule) -> bool:
        return any(run.schedule == schedule for run in self._runs)

    @property
    def first(self) -> Sequence[Figures]:
        """The blocks of the first run."""
        return self._runs[0].blocks

    def seen(self, schedule: Schedule) -> list[Figures]:
        """A schedule's figures, run by run."""
        return [typical(run.blocks) for run in self._runs if run.schedule == schedule]

    @property
    def units(self) -> float:
        """Per iteration; 0 as long as there are no runs."""
        blocks = [block for run in self._runs for block in run.blocks]
        return fmean(block.ingestion.units for block in blocks) if blocks else 0.0

    @property
    def wall_s(self) -> float:
        """Of an iteration, under any schedule; NaN as long as there are no runs."""
        return middle([block.wall_s for run in self._runs for block in run.blocks])

    @property
    def concurrent(self) -> bool:
        if self._declared is not None:
            return self._declared
        apart = sum(run.crew.apart for run in self._runs) > len(self._runs) / 2
        return apart and middle([block.crowding for block in self._alone()]) > CROWDED

    def share_of_simplest(self, schedule: Schedule, since: int) -> tuple[float, float]:
        """The time of a schedule's iterations over that of the simplest schedule's, in the runs from number `since` on; and by how much that may be
        off, with 95 % certainty. Runs take turns, and each is compared with its neighbour: a machine has its hours. How turns differ says
        how certain that is, and how blocks do, where that says more."""
        mine, plain = (
            [run.blocks for run in self._runs[since:] if run.schedule == each] for each in (schedule, self._simplest)
        )
        turns = [self._share(*both) for both in zip(mine, plain, strict=False)]
        share = fmean(turns)
        usual = typical([*chain(*plain)])
        noise = spread([block.would_take_s(usual) for block in blocks] for blocks in (*mine, *plain))
        errors = [error_of_median([1.0] * sum(map(len, blocks)), noise) for blocks in (mine, plain)]
        apart = stdev(turns) / math.sqrt(len(turns)) if len(turns) > 1 else 0.0
        return share, max(_SURE * share * math.hypot(*errors), _student(len(turns)) * apart)

    def _share(self, mine: Sequence[Figures], plain: Sequence[Figures]) -> float:
        """Of iterations that have equally many units. Where actors go on by themselves, the time of a unit counts as much as that of an
        iteration."""
        one, other = typical(mine), typical(plain)
        units = other.ingestion.units
        if not self.concurrent or not one.ingestion.units or not units:
            return _ratio(one.iteration_s(units, other.delivery.units), other.wall_s)
        ratio = _ratio(one.wall_s, other.wall_s)
        return (ratio + _ratio(one.wall_s / one.ingestion.units, other.wall_s / units)) / 2

    def times(self, feasible: Feasible) -> StageTimes:
        """What the runs say of these modes, as far as they were measured."""
        alone = typical(self._alone())
        return StageTimes(
            rollout_s=_known(alone.ingestion.stage_s),
            update_s=_known(alone.delivery.stage_s),
            units=alone.ingestion.units,
            batches=alone.delivery.units,
            ingestion=dict(self._operator_times("ingestion", feasible.ingestion, alone)),
            delivery=dict(self._operator_times("delivery", feasible.delivery, alone)),
            concurrent=self.concurrent,
        )

    def paths(self, times: StageTimes, operator: Operator) -> Mapping[Mode, tuple[float, float]]:
        """By mode: the seconds of the operator's path per unit, and by how much they may be off."""
        stage_s = times.rollout_s if operator == "ingestion" else times.update_s
        measured = times.ingestion if operator == "ingestion" else times.delivery
        return {
            mode: (path_s(stage_s, each, self._gamma(operator, mode, times.batches)), each.noise_s)
            for mode, each in measured.items()
        }

    def _operator_times(
        self, operator: Operator, modes: Sequence[Mode], alone: Figures
    ) -> Iterator[tuple[Mode, OperatorTimes]]:
        stages = [block.of(operator).stage_s for block in self._alone()]
        stage_s = _known(middle(stages))
        stage_error_s = error_of_median(stages, spread([stages]))
        known = {mode: self._sides(operator, mode) for mode in modes}
        in_line = spread([side.exposed_s for side in sides] for mode, sides in known.items() if not mode.overlap)
        behind = spread([side.path_s for side in sides] for mode, sides in known.items() if mode.overlap)
        for mode, sides in known.items():
            exposed_s = middle([side.exposed_s for side in sides])
            if math.isnan(exposed_s):
                # Where nothing is known of the simplest either, nobody pushed, say: it costs nothing.
                if mode == mode_of(self._simplest, operator):
                    yield mode, OperatorTimes(0.0)
            elif not mode.overlap:
                error_s = error_of_median([side.exposed_s for side in sides], in_line)
                yield mode, OperatorTimes(exposed_s, noise_s=error_s)
            else:
                busy_s = middle([side.busy_s for side in sides])
                slowdown_s = middle([side.stage_s for side in sides]) - stage_s
                share = self._gamma(operator, mode, alone.delivery.units)
                blocking_s = exposed_s - waited_s(stage_s, OperatorTimes(busy_s, slowdown_s), share)
                error_s = error_of_median([side.path_s for side in sides], behind)
                yield mode, OperatorTimes(busy_s, slowdown_s, blocking_s, math.hypot(error_s, stage_error_s))

    def _alone(self) -> list[Figures]:
        """Blocks in which nothing ran beside a stage."""
        return [block for run in self._runs if not run.overlaps for block in run.blocks]

    def _sides(self, operator: Operator, mode: Mode) -> list[Side]:
        """What is known of a mode; of one in line, where nothing ran beside it."""
        return [
            block.of(operator)
            for run in self._runs
            if mode_of(run.schedule, operator) == mode and (mode.overlap or not run.overlaps)
            for block in run.blocks
        ]

    def _gamma(self, operator: Operator, mode: Mode, passes: float) -> float:
        return gamma(self._semantics, operator, mode, passes if isinstance(self._semantics, OnPolicy) else None)


def _student(count: int) -> float:
    """So many standard errors of a mean of `count` values are exceeded in one direction with a chance of 5 %: from two values little is known
    of how far they scatter."""
    return {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015}.get(count, _SURE)


def mode_of(schedule: Schedule, operator: Operator) -> Mode:
    return schedule.ingestion if operator == "ingestion" else schedule.delivery


def _ratio(mine_s: float, others_s: float) -> float:
    return mine_s / others_s if others_s > 0 else 1.0


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value
