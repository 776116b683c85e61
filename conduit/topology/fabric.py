"""How transfers share what they go over: fluid flows at max-min fair rates. A model of a machine: no clock, no thread, no bytes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from conduit.topology.cluster import Edge, Topology

_TOGETHER_S = 1e-9
"""Flows that end within this of each other end together: what rounding leaves of one would otherwise be an event of its own, for ever."""

_REMEMBERED = 1 << 12
"""Sets of active edges whose rates are kept; a store at work comes back to a few."""

Active = tuple[tuple[int, int], ...]
"""(edge's number, flows on it), ascending: what rates depend on."""


class Fabric:
    """The max-min fair rates of a topology's edges: no flow can get more without one that has no more than it getting less.

    An edge's own leg is shared by the flows along that edge, a link by all that go over it; so flows along one edge have one rate."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._capacities = [link.bytes_per_s for link in topology.links.values()]
        self._link_numbers = {name: number for number, name in enumerate(topology.links)}
        self._edge_numbers: dict[Edge, int] = {}
        # Of each numbered edge: its leg and its links, by their places in _capacities.
        self._uses: list[tuple[int, ...]] = []
        self._known: dict[Active, dict[int, float]] = {}

    def number(self, edge: Edge) -> int:
        """The edge's number from here on. TopologyError where the topology doesn't have it."""
        number = self._edge_numbers.get(edge)
        if number is None:
            leg = self.topology.leg(*edge)
            links = {self._link_numbers[name]: None for name in self.topology.route(*edge)}
            number = self._edge_numbers[edge] = len(self._uses)
            self._uses.append((len(self._capacities), *links))
            self._capacities.append(leg.bytes_per_s)
        return number

    def rates(self, flows: Mapping[Edge, int]) -> dict[Edge, float]:
        """Bytes per second of each flow along each edge, with so many flows along each."""
        numbers = {self.number(edge): edge for edge, count in flows.items() if count}
        active = tuple(sorted((number, flows[edge]) for number, edge in numbers.items()))
        return {numbers[number]: rate for number, rate in self.rates_of(active).items()}

    def rates_of(self, active: Active) -> dict[int, float]:
        """Bytes per second of each flow along each numbered edge."""
        known = self._known.get(active)
        if known is None:
            if len(self._known) == _REMEMBERED:
                self._known.clear()
            known = self._known[active] = self._fill(active)
        return known

    def _fill(self, active: Active) -> dict[int, float]:
        """Progressive filling: all rates rise together; what is full first settles the flows that go over it.

        The level at which something is full never falls while others settle, so a heap with what was true when it was put there will do."""
        over: dict[int, list[tuple[int, int]]] = {}  # what is shared → the edges over it, with their flows
        for entry in active:
            for shared in self._uses[entry[0]]:
                over.setdefault(shared, []).append(entry)
        left = {shared: self._capacities[shared] for shared in over}
        open_ = {shared: sum(count for _, count in entries) for shared, entries in over.items()}
        heap = [(left[shared] / open_[shared], shared) for shared in over]
        heapq.heapify(heap)
        settled: dict[int, float] = {}
        reached = 0.0
        while len(settled) < len(active):
            level, shared = heapq.heappop(heap)
            if not open_[shared]:
                continue
            now = left[shared] / open_[shared]
            if now > level:
                heapq.heappush(heap, (now, shared))
                continue
            reached = max(reached, now)  # rounding may bring the next level a hair below the last
            for number, count in over[shared]:
                if number not in settled:
                    settled[number] = reached
                    for each in self._uses[number]:
                        left[each] -= reached * count
                        open_[each] -= count
        return settled


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer, as `Fluid.add` returned it. `end_s`: the modelled instant at which it was over, once it is."""

    edge: Edge
    size_bytes: float
    place: int = field(repr=False)
    end_s: float | None = None


class _Moving(NamedTuple):
    """A flow that takes bandwidth: `left` bytes at `since_s`, and its rate ever since, with which it ends at `end_s`."""

    left: float
    since_s: float
    rate: float
    end_s: float


class _Flows:
    """All flows that aren't over, from one event to the next. Cheap to copy: values in dicts, by Flow, in the order of their arrival."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.waiting: dict[Flow, int] = {}  # how many flows have to end before it starts
        self.behind: dict[Flow, tuple[Flow, ...]] = {}  # which flows wait for it
        self.starting: dict[Flow, float] = {}  # when its latency is over
        self.moving: dict[Flow, _Moving] = {}
        self.counts: dict[int, int] = {}  # flows that move along each edge
        self.next_s = math.inf

    def copy(self) -> _Flows:
        other = _Flows.__new__(_Flows)
        other.fabric, other.next_s = self.fabric, self.next_s
        other.waiting, other.behind = dict(self.waiting), dict(self.behind)
        other.starting, other.moving, other.counts = dict(self.starting), dict(self.moving), dict(self.counts)
        return other

    def add(self, flow: Flow, now_s: float, after: Iterable[Flow]) -> list[Flow]:
        """What is over at once: the flow itself, where it has nothing to move and nothing to wait for."""
        awaited = {each: None for each in after if each.end_s is None}
        for each in awaited:
            self.behind[each] = (*self.behind.get(each, ()), flow)
        if awaited:
            self.waiting[flow] = len(awaited)
            return []
        return self._start(flow, now_s)

    def settle(self) -> list[Flow]:
        """Lets everything happen that is due next, all of it at `next_s`; returns what is over then."""
        now_s = self.next_s
        over = [flow for flow, each in self.moving.items() if each.end_s <= now_s + _TOGETHER_S]
        for flow in over:
            del self.moving[flow]
            self._count(flow.place, -1)
        for flow in over:  # which grows, as flows without bytes are over the moment they start
            for behind in self.behind.pop(flow, ()):
                self.waiting[behind] -= 1
                if not self.waiting[behind]:
                    del self.waiting[behind]
                    over += self._start(behind, now_s)
        for flow in [flow for flow, at_s in self.starting.items() if at_s <= now_s]:
            del self.starting[flow]
            self.moving[flow] = _Moving(flow.size_bytes, now_s, 0.0, math.inf)
            self._count(flow.place, 1)
        self._rate(now_s)
        return over

    def _start(self, flow: Flow, now_s: float) -> list[Flow]:
        if not flow.size_bytes:
            return [flow]
        self.starting[flow] = now_s + self.fabric.topology.legs[flow.edge].latency_s
        self.next_s = min(self.next_s, self.starting[flow])
        return []

    def _count(self, place: int, by: int) -> None:
        count = self.counts.get(place, 0) + by
        if count:
            self.counts[place] = count
        else:
            del self.counts[place]

    def _rate(self, now_s: float) -> None:
        """Gives every flow that moves the rate that it has with these beside it. One whose rate stays as it was isn't touched, so
        that its end is rounded once."""
        rates = self.fabric.rates_of(tuple(sorted(self.counts.items())))
        next_s = min(self.starting.values(), default=math.inf)
        for flow, (left, since_s, was, end_s) in self.moving.items():
            rate = rates[flow.place]
            if rate != was:
                left = max(0.0, left - was * (now_s - since_s))
                end_s = now_s + left / rate
                self.moving[flow] = _Moving(left, now_s, rate, end_s)
            next_s = min(next_s, end_s)
        self.next_s = next_s


class Fluid:
    """Flows over a fabric, from event to event; who drives it says what time it is. Not thread-safe.

    What happens does so at its modelled instant, however late the caller looks: a flow that ended between two calls has left its
    bandwidth to the others from then on. `now_s` never goes back: an earlier instant than one that was given already counts as that."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.now_s = -math.inf
        self._flows = _Flows(Fabric(topology))
        self._ends: dict[Flow, float] | None = None  # when each will be over if none is added; None: to be found out

    def add(self, now_s: float, edge: Edge, size_bytes: float, after: Iterable[Flow] = ()) -> Flow:
        """A transfer that is asked for now: once all of `after` are over it waits for the edge's latency, then takes bandwidth.
        Without bytes it is over when they are. TopologyError where the edge is missing."""
        if not 0 <= size_bytes < math.inf:
            raise ValueError(f"size_bytes={size_bytes!r}: expected a finite number ≥ 0")
        self.advance(now_s)
        flow = Flow(edge, float(size_bytes), self._flows.fabric.number(edge))
        for over in self._flows.add(flow, self.now_s, after):
            over.end_s = self.now_s
        self._ends = None
        return flow

    def advance(self, now_s: float) -> None:
        """Lets everything happen until now."""
        if not math.isfinite(now_s):
            raise ValueError(f"now_s={now_s!r}: expected a finite number")
        while self._flows.next_s <= now_s:
            at_s = self._flows.next_s
            for flow in self._flows.settle():
                flow.end_s = at_s
        self.now_s = max(self.now_s, now_s)

    def done(self, flow: Flow) -> bool:
        """Whether it was over when `advance` or `add` was called last."""
        return flow.end_s is not None

    def finish_s(self, flow: Flow) -> float:
        """When it is over: for certain if it is already, else if nothing else is added. A later `add` can move this, either way."""
        if flow.end_s is not None:
            return flow.end_s
        if self._ends is None:
            self._ends = _run(self._flows.copy())
        return self._ends[flow]

    def next_event(self, now_s: float) -> float | None:
        """When something happens next (a flow starts to move, or is over), after everything until now has; None: nothing will."""
        self.advance(now_s)
        return None if math.isinf(self._flows.next_s) else self._flows.next_s


def _run(flows: _Flows) -> dict[Flow, float]:
    """When each is over, if none is added; `flows` is used up."""
    ends: dict[Flow, float] = {}
    while not math.isinf(flows.next_s):
        at_s = flows.next_s
        for flow in flows.settle():
            ends[flow] = at_s
    return ends


def makespan(topology: Topology, transfers: Mapping[Edge, float]) -> float:
    """Seconds until the last of these transfers, all asked for at once, is over."""
    fluid = Fluid(topology)
    flows = [fluid.add(0.0, edge, size_bytes) for edge, size_bytes in transfers.items()]
    return max(map(fluid.finish_s, flows), default=0.0)


def bound(topology: Topology, transfers: Mapping[Edge, float]) -> float:
    """Seconds that these transfers take at least: those of the edge, or of the link, that takes longest for what goes over it."""
    over: dict[str, float] = {}
    for edge, size_bytes in transfers.items():
        for link in dict.fromkeys(topology.route(*edge)):
            over[link] = over.get(link, 0.0) + size_bytes
    edges_s = (topology.leg(*edge).seconds(size_bytes) for edge, size_bytes in transfers.items())
    links_s = (size_bytes / topology.links[link].bytes_per_s for link, size_bytes in over.items())
    return max((*edges_s, *links_s), default=0.0)
