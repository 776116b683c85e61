"""How long an iteration takes where nothing has run so far: on another placement, with other rows, or on another machine (paper §5.1 and §6.2
together, §7.5).

A profile measures one placement. What it measured less that placement's transfers is what the operators take wherever rows lie; with those of
another placement, from a topology's bandwidths, it is the times there.

`iteration_s` is Eq. 2 but for operators behind the stages, off-policy. Those have threads of their own and go on behind rollout and update
alike, so what bounds an iteration isn't each operator's own stage, but whatever has most to do for it: the program's thread, an operator's, an
edge or link that both legs go over. And at most two groups of batches are under way, the one that is handed out and the one after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from conduit.core import latency
from conduit.core.latency import StageTimes
from conduit.core.schedule import Schedule
from conduit.core.semantics import OnPolicy, Semantics
from conduit.core.transfer_time import delivered_bytes, delivery_s, ingested_bytes, ingestion_s, merged_bytes
from conduit.core.workload import Workload
from conduit.topology.cluster import Edge, Topology
from conduit.topology.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Site:
    """Where rows lie: so many at each endpoint of a machine, of which an iteration moves what the workload says."""

    topology: Topology
    workload: Workload
    rows: Mapping[Endpoint, int]

    def write_s(self, times: StageTimes, g: float) -> float:
        """Of a rollout unit's rows, where those of `g` units are written at once."""
        return ingestion_s(self.topology, self._of(g / times.units), self.rows) / g if times.units else 0.0

    def read_s(self, times: StageTimes, g: float) -> float:
        """Of a batch to every learner, where `g` of them are read at once."""
        return delivery_s(self.topology, self._of(g / times.batches), self.rows) / g if times.batches else 0.0

    def busiest_s(self) -> float:
        """An iteration's bytes over the bandwidth of the edge or link that takes longest for all that goes over it, in both legs."""
        busy_s: dict[Edge | str, float] = {}
        for edge, size in self._moved():
            leg = self.topology.leg(*edge)
            busy_s[edge] = busy_s.get(edge, 0.0) + size / leg.bytes_per_s
            for name in dict.fromkeys(self.topology.route(*edge)):
                busy_s[name] = busy_s.get(name, 0.0) + size / self.topology.links[name].bytes_per_s
        return max(busy_s.values(), default=0.0)

    def _moved(self) -> list[tuple[Edge, float]]:
        work, rows = self.workload, sum(self.rows.values())
        placed = [(at, count / rows) for at, count in self.rows.items() if count]
        moved = [
            (edge, size * share)
            for at, share in placed
            for sizes in (ingested_bytes(work, at), delivered_bytes(work, at))
            for edge, size in sizes.items()
        ]
        return moved + [*merged_bytes(self.topology, work).items()] * (len(placed) > 1)

    def _of(self, iterations: float) -> Workload:
        """That of so many iterations at once. A batch is whole rows, and a part of one at least one row."""
        return replace(self.workload, batch_size=max(1, round(self.workload.batch_size * iterations)))


def beside(times: StageTimes, profiled: Site) -> StageTimes:
    """What is left of times measured at `profiled` without its transfers. There nobody waits for a write but the read after it: both are part of
    what delivery took, and ingestion took none."""
    delivery = {
        mode: replace(
            each,
            operator_s=max(0.0, each.operator_s - profiled.read_s(times, mode.g) - _writes_s(times, profiled, mode.g)),
        )
        for mode, each in times.delivery.items()
    }
    return replace(times, delivery=delivery)


def stage_times(others: StageTimes, site: Site) -> StageTimes:
    """What Eq. 2 takes: `others`, in which there are no transfers, with those at `site`."""
    ingestion = {
        mode: replace(each, operator_s=each.operator_s + site.write_s(others, mode.g))
        for mode, each in others.ingestion.items()
    }
    delivery = {
        mode: replace(each, operator_s=each.operator_s + site.read_s(others, mode.g))
        for mode, each in others.delivery.items()
    }
    return replace(others, ingestion=ingestion, delivery=delivery)


def iteration_s(others: StageTimes, site: Site | None, semantics: Semantics, schedule: Schedule) -> float:
    """T_iter of a schedule at `site`. `others`: times without transfers; with them where `site` is None.

    On-policy, and where actors and learners run concurrently: Eq. 2, or what the busiest edge or link needs if that is more."""
    there = others if site is None else stage_times(others, site)
    busiest_s = 0.0 if site is None else site.busiest_s()
    behind, ahead = schedule.ingestion, schedule.delivery
    if isinstance(semantics, OnPolicy) or others.concurrent:
        paths = (
            latency.ingestion_path_s(there, semantics, behind),
            latency.delivery_path_s(there, semantics, ahead),
        )
        return max(latency.iteration_s(*paths, others.concurrent), busiest_s)
    hooks, reads = others.ingestion[behind], there.delivery[ahead]
    hooks_s, read_s = others.units * hooks.operator_s, others.batches * reads.operator_s
    write_s = 0.0 if site is None else others.units * site.write_s(others, behind.g)
    program_s = others.units * max(0.0, others.rollout_s + hooks.slowdown_s + hooks.blocking_s)
    program_s += others.batches * max(0.0, others.update_s + reads.slowdown_s + reads.blocking_s)
    if not behind.overlap:
        program_s += hooks_s
    if not ahead.overlap:
        # A pull waits for its read, and that for the rows that were written just before.
        program_s += write_s + read_s
    # Each operator has a thread; the rows of a memory are written one after the other.
    bounds_s = [program_s, hooks_s, write_s, read_s, busiest_s]
    if ahead.overlap:
        # A group is asked for as the one before begins to be pulled, and has to be there by the end of the pull that is a period later:
        # a period and a pull's wait, which is two periods less the program's own time.
        bounds_s.append((program_s + write_s + read_s) / 2)
    return max(bounds_s)


def _writes_s(times: StageTimes, site: Site, g: float) -> float:
    """Of an iteration, by batch."""
    return times.units * site.write_s(times, g) / times.batches if times.batches else 0.0
