"""Transfers under way on a topology's links, at a clock's time."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from conduit.clock import Clock
from conduit.topology.cluster import Edge, Topology
from conduit.topology.fabric import Flow, Fluid

Span = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went along an edge so far. `busy_s`: emulated seconds in which at least one transfer was on its way, of those that have
    ended."""

    size_bytes: int
    transfers: int
    busy_s: float


class Links:
    """One lock around a Fluid. It is a plain one and never held across a call that waits; `start` waits for nothing, so it may be called
    under other locks. All instants are the clock's, and what happens does so at its modelled instant, however late a thread wakes."""

    def __init__(self, topology: Topology, clock: Clock) -> None:
        self._clock = clock
        self._fluid = Fluid(topology)
        self._lock = threading.Lock()
        self._meters: dict[Edge, _Meter] = {}
        self._changed = clock.condition("emulated links")
        self._version = 0
        self._waiters = 0

    def start(self, edge: Edge, size_bytes: int, after: Iterable[Flow]) -> Flow:
        """A transfer that begins now, or as soon as all of `after` have ended. TopologyError where there is no such edge."""
        with self._lock:
            now_s = self._clock.now()
            self._fluid.advance(now_s)
            behind = tuple(flow for flow in after if flow.end_s is None)
            flow = self._fluid.add(now_s, edge, size_bytes, behind)
            if size_bytes:
                self._version += 1
                self._meters.setdefault(edge, _Meter()).add(flow, now_s, behind)
        if size_bytes and self._waiters:
            # Another transfer beside theirs: what they wait for may end later than it looked, or even sooner.
            self._changed.rouse()
        return flow

    def wait(self, flows: Iterable[Flow]) -> None:
        """Returns when all have ended. It always does: each has a finite time, and until then that is the deadline."""
        flows = tuple(flows)
        if self._due(flows) is None:
            return
        with self._changed:
            self._waiters += 1
            try:
                while (due := self._due(flows)) is not None:
                    version, end_s = due
                    self._changed.wait_for(lambda seen=version: self._version != seen, end_s)
            finally:
                self._waiters -= 1

    def drain(self) -> None:
        """Returns when all that was started before has ended."""
        with self._lock:
            flows = [flow for meter in self._meters.values() for flow in meter.unfinished()]
        self.wait(flows)

    def traffic(self) -> Mapping[Edge, Traffic]:
        """Along every edge that something went along."""
        with self._lock:
            self._fluid.advance(self._clock.now())
            return {edge: meter.read() for edge, meter in self._meters.items()}

    def _due(self, flows: tuple[Flow, ...]) -> tuple[int, float] | None:
        """When the last of these ends, as things stand in this version; None: all have."""
        with self._lock:
            self._fluid.advance(self._clock.now())
            ends_s = [self._fluid.finish_s(flow) for flow in flows if flow.end_s is None]
            return (self._version, max(ends_s)) if ends_s else None


class _Meter:
    """What goes along one edge."""

    def __init__(self) -> None:
        self._size_bytes = 0
        self._transfers = 0
        self._busy_s = 0.0
        self._spans: list[Span] = []  # apart and ascending, those that what is under way may still add to
        self._flows: list[tuple[Flow, float, tuple[Flow, ...]]] = []  # when each was asked for, and behind what
        self._most = 32

    def add(self, flow: Flow, now_s: float, behind: tuple[Flow, ...]) -> None:
        self._size_bytes += int(flow.size_bytes)
        self._transfers += 1
        self._flows.append((flow, now_s, behind))
        if len(self._flows) >= self._most:
            self._fold()
            self._most = max(32, 2 * len(self._flows))

    def unfinished(self) -> list[Flow]:
        return [flow for flow, _, _ in self._flows if flow.end_s is None]

    def read(self) -> Traffic:
        self._fold()
        return Traffic(self._size_bytes, self._transfers, self._busy_s + sum(end - begin for begin, end in self._spans))

    def _fold(self) -> None:
        """Keeps of the transfers that have ended only when they were on their way, and of that only how long where it can't change."""
        ended = [
            (max([asked_s, *(each.end_s for each in behind if each.end_s is not None)]), flow.end_s)
            for flow, asked_s, behind in self._flows
            if flow.end_s is not None
        ]
        self._flows = [each for each in self._flows if each[0].end_s is None]
        spans = _united([*self._spans, *ended])
        # What is under way began when it was asked for at the earliest, and what is to come begins later still.
        begin_s = min((asked_s for _, asked_s, _ in self._flows), default=math.inf)
        self._busy_s += sum(end - begin for begin, end in spans if end <= begin_s)
        self._spans = [span for span in spans if span[1] > begin_s]


def _united(spans: Iterable[Span]) -> list[Span]:
    """The same instants, as spans that are apart and ascending."""
    united: list[Span] = []
    for begin, end in sorted(spans):
        if united and begin <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((begin, end))
    return united
