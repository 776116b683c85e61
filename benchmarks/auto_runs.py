"""One run of a store for `auto.py`: what an iteration took, and what a profile says of some such runs."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from auto_cells import Cell, Times

import conduit
from conduit.clock import Clock
from conduit.core.latency import OperatorTimes, StageTimes
from conduit.core.ledger import Seconds
from conduit.core.schedule import Mode, Schedule

STEADY = 0.05


class Spent(NamedTuple):
    """Seconds of an iteration, by the ledger but for `wall_s`. Operators' as `OperatorSeconds` has them."""

    wall_s: float
    rollout_s: float
    update_s: float
    ingestion_busy_s: float
    ingestion_exposed_s: float
    delivery_busy_s: float
    delivery_exposed_s: float

    @property
    def exposed_s(self) -> float:
        return self.ingestion_exposed_s + self.delivery_exposed_s


@dataclass(frozen=True, slots=True)
class Run:
    """`late_s`: of stages that are waits on the real clock, how late each ended."""

    spent: Spent
    late_s: Sequence[float] = field(default=())


@dataclass(frozen=True, slots=True)
class Automatic:
    """What a store with placement="auto" and schedule="auto" came to, and took then."""

    run: Run
    placement: str
    schedule: Schedule


def came_to(store: conduit.Store, run: Run) -> Automatic:
    """What a store is like by now that ran so."""
    there = store.explain().placement
    assert there is not None
    return Automatic(run, ", ".join(map(str, there.endpoints)), store.schedule)


def timed(
    store: conduit.Store, clock: Clock, iterate: Callable[[], None], iterations: int, unit_s: float = 1.0
) -> Spent:
    """Means, over whole groups of every granularity: of single iterations some wait for a group and others for nothing. `unit_s`: of the clock,
    in a second of what is told."""
    before = _now(store, clock)
    for _ in range(iterations):
        iterate()
    after = _now(store, clock)
    return Spent(*((end - begin) / iterations / unit_s for begin, end in zip(before, after, strict=True)))


def _now(store: conduit.Store, clock: Clock) -> Spent:
    spent: Seconds = store.ledger.total
    return Spent(
        clock.now(),
        spent.rollout_s,
        spent.update_s,
        spent.ingestion.busy_s,
        spent.ingestion.exposed_s,
        spent.delivery.busy_s,
        spent.delivery.exposed_s,
    )


def repeated(cells: Iterable[Cell], run: Callable[[Cell], Run], rounds: int, most: int = 0) -> dict[Cell, list[Run]]:
    """All cells once a round, each round in another order: what slows the machine for a while slows all placements and schedules. Up to `most`
    rounds, those of cells whose two fastest runs aren't yet within STEADY of each other."""
    found: dict[Cell, list[Run]] = {cell: [] for cell in cells}
    shuffle = random.Random(0)
    for number in range(max(rounds, most)):
        order = [cell for cell, runs in found.items() if number < rounds or _spread(runs) > STEADY]
        if number:
            shuffle.shuffle(order)
        for cell in order:
            found[cell].append(run(cell))
    return found


def _spread(runs: Sequence[Run]) -> float:
    """How much longer the second fastest took; 0 of one."""
    walls_s = sorted(run.spent.wall_s for run in runs)
    return walls_s[1] / walls_s[0] - 1 if len(walls_s) > 1 else 0.0


def middle(runs: Sequence[Run]) -> Run:
    """The median run, the faster of two. Not the fastest: of many cells it would be one that was run often and lucky once that is chosen."""
    return sorted(runs, key=lambda run: run.spent.wall_s)[(len(runs) - 1) // 2]


def sweep(found: Mapping[Cell, Sequence[Run]]) -> dict[Cell, Times]:
    """By the median of each cell's runs; the spread is between the two fastest."""
    return {
        cell: Times(middle(runs).spent.wall_s, middle(runs).spent.exposed_s, _spread(runs))
        for cell, runs in found.items()
    }


def profile(runs: Mapping[Mode, Run]) -> StageTimes:
    """What runs in all of these modes, of both operators at once, say: all but T_sync's blocking part. A push and a pull an iteration."""
    alone = [run.spent for mode, run in runs.items() if not mode.overlap]
    rollout_s = statistics.median(spent.rollout_s for spent in alone)
    update_s = statistics.median(spent.update_s for spent in alone)
    ingestion, delivery = {}, {}
    for mode, run in runs.items():
        spent = run.spent
        if mode.overlap:
            ingestion[mode] = OperatorTimes(spent.ingestion_busy_s, spent.rollout_s - rollout_s)
            delivery[mode] = OperatorTimes(spent.delivery_busy_s, spent.update_s - update_s)
        else:
            # What else an iteration in line takes is the calls' own, which is ingestion's and delivery's alike.
            ingestion[mode] = OperatorTimes(spent.ingestion_exposed_s)
            delivery[mode] = OperatorTimes(
                max(0.0, spent.wall_s - spent.rollout_s - spent.update_s - spent.ingestion_exposed_s)
            )
    return StageTimes(rollout_s, update_s, 1.0, 1.0, ingestion, delivery)


def with_blocking(
    times: StageTimes, runs: Mapping[Mode, Run], predict: Callable[[StageTimes, Schedule], float]
) -> StageTimes:
    """`times` with the other part of T_sync: what an iteration of these runs took beyond what the model says without it."""
    delivery = dict(times.delivery)
    for mode, run in runs.items():
        if mode.overlap:
            beyond_s = run.spent.wall_s - predict(times, Schedule.of(mode, mode))
            delivery[mode] = replace(delivery[mode], blocking_s=beyond_s)
    return replace(times, delivery=delivery)
