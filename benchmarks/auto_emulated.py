"""The cells of `auto.py` on an emulated a100x8: whole public Stores, on the virtual clock or on the real one.

Rows of d floats, twice, reward and action, 8 (d + 1) bytes, as in `placement.py`: a row here is 168 bytes that stand for them, and memories and
bandwidths are as many times smaller. An iteration: a pull of 512 rows to the first device, an update, a rollout, a push of 512 rows; both stages
are waits. An ingestion hook waits as well, for so long an invocation and so long a row: what batching saves. Delivery has its transfers alone.

Pushes and pulls are as many, and groups of both begin together; else what the last push of a group writes would be on its way while a batch
is pulled that was staged before, and in line would cost less than all of it.

What is predicted comes from the probe's topology and from a profile of eight schedules at one placement and one dimension, neither of which is
measured later at that dimension; never from the preset."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from auto_cells import Cell, Times, cells
from auto_model import Site, beside, iteration_s, stage_times
from auto_runs import Automatic, Run, came_to, middle, profile, repeated, timed, with_blocking
from fabric import slowed
from placement import BATCH, in_units, row_bytes, rows_of, unit_of

import conduit
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import REAL, Clock, VirtualClock
from conduit.core import latency
from conduit.core.latency import StageTimes
from conduit.core.placement import Asked, Placement
from conduit.core.probing import known, timings_of
from conduit.core.schedule import Mode, Schedule
from conduit.core.semantics import OffPolicy
from conduit.core.workload import Workload
from conduit.topology import Tier, Topology, probe
from conduit.topology.endpoint import PAGEABLE

CAPACITY = 100_000
"""Rows. More than are pushed, so that none is overwritten."""
POLICY = OffPolicy(CAPACITY, BATCH)
ROLLOUT_S, UPDATE_S = 1e-3, 1.5e-3
INVOCATION_S, ROW_S = 4e-3, 1e-6
"""Of the ingestion hook."""
FILL = 8
"""Pushes before the first pull: whole groups of every size."""
WARM = 4
"""Groups of every cell before those that count, and 8 iterations at least: until what can wait is full."""
SETTLED = 512
"""Iterations after which a store has found its schedule: whole groups of every size."""
PROFILED = "pinned", 700
"""Placement and dimension."""
PROBED_SIZES = (1 << 13, 1 << 17)
"""On a machine whose bandwidths are as many times smaller as those for the largest rows: else what copies take here would be more than what they
are said to take there."""
PROBED_UNIT = unit_of(10_000)


@dataclass(frozen=True, slots=True)
class Emulation:
    """`slower`: by how many times everything is, machine, stages and hook; all times told are divided by it. `iterations`: that count."""

    topology: Topology
    iterations: int
    slower: float = 1.0
    real: bool = False

    @property
    def machine(self) -> Topology:
        there = slowed(self.topology, self.slower)
        legs = {edge: replace(leg, latency_s=leg.latency_s * self.slower) for edge, leg in there.legs.items()}
        return there.changed(legs=legs)

    def clock(self) -> VirtualClock | None:
        """None: the real one."""
        return None if self.real else VirtualClock(max_events=10**8)


@dataclass(slots=True)
class Stage:
    """A device at work, by waiting. On the real clock to within microseconds: it sleeps until shortly before and then looks at the clock, and a
    stage that follows another begins when that was due. `late_s`: of every stage, how late it ended."""

    clock: Clock
    late_s: list[float] = field(default_factory=list)
    _due_s: float = -np.inf

    def __call__(self, seconds: float, follows: bool) -> None:
        clock = self.clock
        if isinstance(clock, VirtualClock):
            clock.sleep(seconds)
            return
        now_s = clock.now()
        began_s = self._due_s if follows and now_s - self._due_s < _LATE_S else now_s
        self._due_s = due_s = began_s + seconds
        clock.sleep_until(due_s - _SPUN_S)
        while clock.now() < due_s:
            pass
        self.late_s.append(clock.now() - due_s)


_LATE_S, _SPUN_S = 2e-3, 100e-6


def placements(topology: Topology) -> dict[str, Asked]:
    return {
        "pageable": "pageable",
        "pinned": "pinned",
        "single GPU": topology.devices[0],
        "shared GPU": topology.devices,
    }


def run(emulation: Emulation, cell: Cell, schedule: Schedule | None = None) -> Run:
    """`schedule`: another than the cell's."""
    asked = {"placement": placements(emulation.topology)[cell.placement], "schedule": schedule or cell.schedule}
    warm = max(8, WARM * cell.g)
    return _played(emulation, cell.dimension, asked, warm, emulation.iterations, lambda store, ran: ran)


def automatic(emulation: Emulation, found: Topology, dimension: int) -> Automatic:
    """`found`: all that the store knows of the machine. What counts are as many iterations again as it had to find its schedule: where it still
    measures then, or does so anew, that is part of what it takes."""
    asked = {"placement": "auto", "schedule": "auto", "topology": in_units(found, unit_of(dimension))}

    return _played(emulation, dimension, asked, SETTLED, SETTLED, came_to)


Result = TypeVar("Result")


def _played(
    emulation: Emulation,
    dimension: int,
    asked: Mapping[str, Any],
    warm: int,
    iterations: int,
    told: Callable[[conduit.Store, Run], Result],
) -> Result:
    """`asked`: what this store is given beside what all are."""
    times = emulation.slower
    virtual = emulation.clock()
    clock: Clock = virtual or REAL
    backend = EmulatedBackend(in_units(emulation.machine, unit_of(dimension)), "torch", clock)
    stage = Stage(clock)

    @conduit.register_ingestion(per="row")
    def work(actor_in: Any, exp_out: Any) -> None:
        data = actor_in.read()
        clock.sleep((INVOCATION_S + ROW_S * len(data["reward"])) * times)
        exp_out.write(data)

    def main() -> Result:
        with conduit.Store(
            backend=backend, clock=clock, capacity=CAPACITY, batch_size=BATCH, ingestion=[work], **asked
        ) as store:
            learner = store.learner(device=emulation.topology.devices[0])
            actor, step = store.actor(BATCH), rows_of(BATCH)
            for _ in range(FILL):
                actor.push(step)

            def iterate() -> None:
                learner.pull()
                with store.update():
                    stage(UPDATE_S * times, follows=False)
                with store.rollout():
                    stage(ROLLOUT_S * times, follows=True)
                actor.push(step)

            for _ in range(warm):
                iterate()
            stage.late_s.clear()
            return told(store, Run(timed(store, clock, iterate, iterations, times), stage.late_s))

    return main() if virtual is None else virtual.run(main)


def probed(emulation: Emulation) -> Topology:
    """What the probe finds out about the machine, at its real speed again."""
    virtual = emulation.clock()
    backend = EmulatedBackend(in_units(emulation.machine, PROBED_UNIT), clock=virtual or REAL)

    def main() -> Topology:
        there = known(backend)
        in_memory = there.only(at for at in there.endpoints if at.tier is not Tier.DISK)
        with timings_of(backend, backend.clock, row_bytes=1024) as timings:
            return probe(in_memory, timings, sizes=PROBED_SIZES, repeats=3)

    found = main() if virtual is None else virtual.run(main)
    faster = in_units(found, 1 / PROBED_UNIT / emulation.slower).scaled(1 / emulation.slower)
    return faster.changed(
        legs={edge: replace(leg, latency_s=leg.latency_s / emulation.slower) for edge, leg in faster.legs.items()}
    )


def site(found: Topology, placement: str, dimension: int) -> Site:
    work = Workload(row_bytes(dimension), CAPACITY, BATCH, (PAGEABLE,), found.devices[:1])
    asked = Placement.of(placements(found)[placement], found.endpoints)
    return Site(found, work, asked.rows(CAPACITY))


Model = Callable[[StageTimes, Site, OffPolicy, Schedule], float]
"""Seconds of an iteration; the times have no transfers in them."""


def eq_2(others: StageTimes, there: Site, semantics: OffPolicy, schedule: Schedule) -> float:
    """As the paper has it: each operator hides behind its own stage, and nothing else bounds an iteration."""
    times = stage_times(others, there)
    paths = (
        latency.ingestion_path_s(times, semantics, schedule.ingestion),
        latency.delivery_path_s(times, semantics, schedule.delivery),
    )
    return latency.iteration_s(*paths, times.concurrent)


@dataclass(frozen=True, slots=True)
class Known:
    """All that predictions are made of: what the probe found, and a profile without its transfers."""

    topology: Topology
    others: StageTimes
    model: Model

    def predicted(self, among: Sequence[Cell]) -> dict[Cell, Times]:
        stages_s = self.others.rollout_s + self.others.update_s
        found = {}
        for cell in among:
            there = site(self.topology, cell.placement, cell.dimension)
            takes_s = self.model(self.others, there, POLICY, cell.schedule)
            found[cell] = Times(takes_s, takes_s - stages_s)
        return found


@dataclass(frozen=True, slots=True)
class Profiled:
    """Runs of every schedule at the profiled placement and dimension."""

    topology: Topology
    runs: Mapping[Mode, Run]

    @classmethod
    def of(cls, emulation: Emulation, found: Topology, gs: Sequence[int], rounds: int = 1) -> Profiled:
        placement, dimension = PROFILED
        ran = repeated(cells([dimension], [placement], gs), lambda cell: run(emulation, cell), rounds)
        return cls(found, {Mode(cell.overlap, cell.g): middle(runs) for cell, runs in ran.items()})

    def known(self, model: Model = iteration_s) -> Known:
        """What it is without its transfers, and with T_sync for this model."""
        there = site(self.topology, *PROFILED)
        others = beside(profile(self.runs), there)
        others = with_blocking(others, self.runs, lambda times, schedule: model(times, there, POLICY, schedule))
        return Known(self.topology, others, model)


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether the machine was quiet enough for the real clock. `median_late`: of a stage, how late it ended, as a part of the shorter one;
    `p99_late_s`; `overruns`: the share of stages that ended too late to be made up for; `apart`: by how much one configuration that was run
    before and after everything differs."""

    median_late: float
    p99_late_s: float
    overruns: float
    apart: float

    @classmethod
    def of(cls, emulation: Emulation, late_s: Sequence[float], apart: float) -> Gate:
        return cls(
            statistics.median(late_s) / (ROLLOUT_S * emulation.slower),
            statistics.quantiles(late_s, n=100)[98],
            statistics.fmean(each > _LATE_S for each in late_s),
            abs(apart),
        )

    @property
    def noisy(self) -> str:
        """Why it wasn't; "" if it was."""
        limits = {"median_late": 0.01, "p99_late_s": 0.5e-3, "overruns": 0.02, "apart": 0.03}
        beyond = [
            f"{name} {getattr(self, name):.3g} (at most {most:g})"
            for name, most in limits.items()
            if getattr(self, name) > most
        ]
        return ", ".join(beyond)
