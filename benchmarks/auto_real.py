"""The cells of `auto.py` on this machine's CPU, with nothing emulated: real rows, real copies, stages that compute.

Placements are four that exist without a GPU, through the torch backend: pageable host memory (NumPy columns), torch's own tensors ("device:0" is
the CPU there), half of the rows in each, and files that are mapped into memory (their pages stay in it: what a file costs beside memory, not
what a disk does). A row has obs and next_obs of d floats, reward and action; the ingestion hook scales both, a pass over every byte.

An iteration: a pull of 128 rows, an update, a rollout, a push of 128 rows; both stages multiply matrices. Predictions are made from profiles of
every placement and schedule at four other dimensions: what they took is interpolated by bytes, each figure by itself, and put into the same
model as the emulated cells'."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from auto_cells import Cell, Times, cells
from auto_model import iteration_s
from auto_runs import Automatic, Run, came_to, middle, profile, repeated, sweep, timed, with_blocking
from stages import Stage, stage

import conduit
from conduit.clock import REAL
from conduit.core.latency import OperatorTimes, StageTimes
from conduit.core.placement import Asked, Placement
from conduit.core.schedule import Mode, Schedule
from conduit.core.semantics import OffPolicy
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

BATCH, CAPACITY = 128, 1024
ROLLOUT_S, UPDATE_S = 2e-3, 3e-3
PROFILED = (100, 1400, 4000, 11_000)
"""Dimensions; none of them is measured, and all that are lie between."""
FILL, WARM = 8, 8
MOST_SETTLED = 1000
"""Iterations in which a store that is left to itself has chosen a schedule; it goes on with what it has otherwise."""
Result = TypeVar("Result")

_TORCH = Endpoint(Tier.DEVICE, 0)
PLACEMENTS: Mapping[str, Asked] = {
    "pageable": "pageable",
    "torch tensors": _TORCH,
    "half in each": Placement((PAGEABLE, _TORCH), (1.0, 1.0)),
    "mapped files": "disk",
}
POLICY = OffPolicy(CAPACITY, BATCH)


@conduit.register_ingestion(per="row")
def scaled(actor_in: Any, exp_out: Any) -> None:
    data = actor_in.read()
    exp_out.write({**data, "obs": data["obs"] * _SCALE, "next_obs": data["next_obs"] * _SCALE})


_SCALE = np.float32(0.5)


@dataclass(frozen=True, slots=True)
class Stages:
    rollout: Stage
    update: Stage

    @classmethod
    def made(cls) -> Stages:
        return cls(stage("matmul", ROLLOUT_S), stage("matmul", UPDATE_S))

    @property
    def alone_s(self) -> float:
        return self.rollout.alone_s + self.update.alone_s


def run(stages: Stages, cell: Cell, iterations: int, disk: str) -> Run:
    asked = {"placement": PLACEMENTS[cell.placement], "schedule": cell.schedule, "disk": disk}
    warm = max(WARM, 4 * cell.g)

    def measure(store: conduit.Store, iterate: Callable[[], None]) -> Run:
        for _ in range(warm):
            iterate()
        return Run(timed(store, REAL, iterate, iterations))

    return _played(stages, cell.dimension, asked, measure)


def automatic(stages: Stages, dimension: int) -> Automatic:
    """A store that is left to itself, from when it has chosen its schedule on: the median of a few measurements, as of a cell's runs. Where it
    measures anew meanwhile, that is part of what it takes."""

    def measure(store: conduit.Store, iterate: Callable[[], None]) -> Automatic:
        for _ in range(MOST_SETTLED):
            if store.info()["schedules_chosen"]:
                break
            iterate()
        for _ in range(4 * 8):
            iterate()
        return came_to(store, middle([Run(timed(store, REAL, iterate, 16)) for _ in range(4)]))

    return _played(stages, dimension, {"schedule": "auto"}, measure)


def _played(
    stages: Stages,
    dimension: int,
    asked: Mapping[str, Any],
    measure: Callable[[conduit.Store, Callable[[], None]], Result],
) -> Result:
    """`asked`: what this store is given beside what all are. `measure`: is given it, and what an iteration does."""
    wide, one = np.ones((BATCH, dimension), np.float32), np.ones(BATCH, np.float32)
    step = {"obs": wide, "next_obs": wide, "reward": one, "action": one}
    with conduit.Store(backend="torch", capacity=CAPACITY, batch_size=BATCH, ingestion=[scaled], **asked) as store:
        learner, actor = store.learner(), store.actor(BATCH)
        for _ in range(FILL):
            actor.push(step)

        def iterate() -> None:
            learner.pull()
            with store.update():
                stages.update()
            with store.rollout():
                stages.rollout()
            actor.push(step)

        return measure(store, iterate)


Profiles = Mapping[str, Mapping[int, StageTimes]]
"""By placement and dimension."""


def predicted_s(times: StageTimes, schedule: Schedule) -> float:
    return iteration_s(times, None, POLICY, schedule)


def profiled(
    run: Callable[[Cell], Run], dimensions: Sequence[int], gs: Sequence[int], rounds: int, most: int
) -> tuple[dict[str, dict[int, StageTimes]], float]:
    """Every placement and schedule at these dimensions, `rounds` times and up to `most`; and by which part rounds differ, in the median."""
    found = repeated(cells(dimensions, tuple(PLACEMENTS), gs), run, rounds, most)
    profiles: dict[str, dict[int, StageTimes]] = {where: {} for where in PLACEMENTS}
    for where, each in profiles.items():
        for d in dimensions:
            mine = {cell: middle(runs) for cell, runs in found.items() if cell[:2] == (d, where)}
            runs = {Mode(cell.overlap, cell.g): run for cell, run in mine.items()}
            each[d] = with_blocking(_within(profile(runs), runs), runs, predicted_s)
    return profiles, statistics.median(times.spread for times in sweep(found).values())


def _within(times: StageTimes, runs: Mapping[Mode, Run]) -> StageTimes:
    """`times` with no thread of an operator busier than an iteration is long: in runs as short as these, what is more is of a group that had
    begun before, and T_sync would be less by it."""

    def capped(modes: Mapping[Mode, OperatorTimes]) -> dict[Mode, OperatorTimes]:
        return {
            mode: replace(each, operator_s=min(each.operator_s, runs[mode].spent.wall_s))
            for mode, each in modes.items()
        }

    return replace(times, ingestion=capped(times.ingestion), delivery=capped(times.delivery))


def predicted(profiles: Profiles, among: Sequence[Cell]) -> dict[Cell, Times]:
    found = {}
    for cell in among:
        times = between(profiles[cell.placement], cell.dimension)
        takes_s = predicted_s(times, cell.schedule)
        found[cell] = Times(takes_s, takes_s - times.rollout_s - times.update_s)
    return found


def between(profiles: Mapping[int, StageTimes], dimension: int) -> StageTimes:
    """Every figure on the line between those of the profiled dimensions below and above: a row's bytes go with its dimension."""
    known = sorted(profiles)
    place = min(max(bisect_right(known, dimension), 1), len(known) - 1)
    low, high = known[place - 1], known[place]
    below, above, share = profiles[low], profiles[high], (dimension - low) / (high - low)

    def line(a: float, b: float) -> float:
        return a + share * (b - a)

    def modes(a: Mapping[Mode, OperatorTimes], b: Mapping[Mode, OperatorTimes]) -> dict[Mode, OperatorTimes]:
        return {
            mode: OperatorTimes(
                line(each.operator_s, b[mode].operator_s),
                line(each.slowdown_s, b[mode].slowdown_s),
                line(each.blocking_s, b[mode].blocking_s),
            )
            for mode, each in a.items()
        }

    return replace(
        below,
        rollout_s=line(below.rollout_s, above.rollout_s),
        update_s=line(below.update_s, above.update_s),
        ingestion=modes(below.ingestion, above.ingestion),
        delivery=modes(below.delivery, above.delivery),
    )
