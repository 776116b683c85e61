"""What a plan is compared with: small machines, and a search over all that rows could be spread like, by code of its own.

Nothing here uses conduit's times, room or choice; only its values describe the machine and what is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from conduit.core.workload import Workload
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Edge, Link, Memory, Topology
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier

GB = 10**9
D = tuple(Endpoint(Tier.DEVICE, index) for index in range(72))
FAR = Endpoint(Tier.PAGEABLE, node=1)


def machine(
    devices: int,
    device_bytes: int = 80 * GB,
    host_bytes: int = 1000 * GB,
    *,
    peer: float = 276 * GB,
    local: float = 1000 * GB,
    pinned_to_device: float = 26 * GB,
    pageable_to_device: float = 12 * GB,
    host_copy: float = 12 * GB,
    latency_s: float = 0.0,
) -> Topology:
    """Devices with a port each on a switch. One thread of the host copies pageable memory, wherever to; what comes to a device, from
    itself or from others, has to be written to its memory."""
    there = D[:devices]
    memories = {at: Memory(host_bytes, host_bytes, Source.ASSUMED) for at in (PAGEABLE, PINNED)}
    memories |= {at: Memory(device_bytes, device_bytes, Source.ASSUMED) for at in there}
    legs = {(a, b): Leg(host_copy, latency_s) for a in (PAGEABLE, PINNED) for b in (PAGEABLE, PINNED)}
    legs |= {(a, b): Leg(local if a == b else peer, latency_s) for a in there for b in there}
    for at in there:
        legs |= {(PAGEABLE, at): Leg(pageable_to_device, latency_s), (at, PAGEABLE): Leg(pageable_to_device, latency_s)}
        legs |= {(PINNED, at): Leg(pinned_to_device, latency_s), (at, PINNED): Leg(pinned_to_device, latency_s)}
    links = {f"{at} {way}": Link(peer) for at in there for way in ("out", "in")} | {"thread": Link(host_copy)}
    links |= {f"{at} memory": Link(local) for at in there}
    routes = {(a, b): (f"{a} out", f"{b} in", f"{b} memory") for a in there for b in there if a != b}
    routes |= {(at, at): (f"{at} memory",) for at in there} | {(PAGEABLE, at): ("thread",) for at in memories}
    return Topology("a machine", memories, legs, links, routes)


@dataclass(frozen=True)
class Case:
    """`budgets`, `reserve`: as a plan takes them."""

    topology: Topology
    workload: Workload
    budgets: Mapping[Tier, int] = field(default_factory=dict)
    reserve: float = 0.0


def random_case(seed: int) -> Case:
    """At most six devices; uneven memories, legs that differ by direction, some of them missing, ports and links that some edges share;
    and another node's host, where rows may come from and none can lie."""
    draw = random.Random(seed)
    devices = D[: draw.randint(1, 6)]
    hosts = (PAGEABLE, PINNED) if draw.random() < 0.8 else (PAGEABLE,)
    there = (*hosts, *devices)
    capacity = 1_600_000
    row_bytes = draw.randint(500, 50_000)
    size = capacity * row_bytes

    def memory(least: float, most: float) -> Memory:
        all_of_it = int(size * draw.uniform(least, most))
        return Memory(all_of_it, int(all_of_it * draw.choice([1.0, 0.9, 0.5])), Source.ASSUMED)

    roomy = draw.choice([0.3, 1.0, 3.0])
    memories = {at: memory(0.2, 2.0) if at.is_host else memory(0.1 * roomy, 0.8 * roomy) for at in there}
    missing = draw.choice([0.0, 0.0, 0.03])
    latency = draw.choice([0.0, 1e-5, 1e-3])
    legs: dict[Edge, Leg] = {}
    for a in there:
        for b in there:
            if a == b or draw.random() >= missing:
                legs[a, b] = Leg(2.0 ** draw.uniform(0, 9) * GB, latency * draw.random())
    memories[FAR] = memory(1.0, 2.0)
    legs |= {(FAR, to): Leg(2.0 ** draw.uniform(0, 9) * GB, latency * draw.random()) for to in there}
    links = {f"link {number}": Link(2.0 ** draw.uniform(1, 8) * GB) for number in range(draw.randint(0, 6))}
    routes = {edge: tuple(draw.sample(sorted(links), draw.randint(0, min(3, len(links))))) for edge in legs}
    ports = [PAGEABLE, PAGEABLE, FAR, *devices]
    workload = Workload(
        row_bytes=row_bytes,
        capacity=capacity,
        batch_size=draw.choice([32, 512, 4096]),
        actors=tuple(draw.choices(ports, k=draw.randint(1, 3))),
        learners=tuple(draw.choices([PAGEABLE, *devices, *devices], k=draw.randint(1, 6))),
        replay_ratio=draw.choice([0.25, 1.0, 4.0, 32.0]),
        staged_batches=draw.randint(0, 3),
    )
    budgets = {Tier.DEVICE: int(size * draw.uniform(0.1, 0.9))} if draw.random() < 0.3 else {}
    return Case(Topology(f"case {seed}", memories, legs, links, routes), workload, budgets, draw.choice([0.0, 0.05]))


class Oracle:
    """Looks at every set of endpoints that a plan may use, and at every spread of the rows over it in steps of a sixteenth (an eighth
    over more than three)."""

    def __init__(self, case: Case, kinds: Sequence[str] | None = None) -> None:
        self.case = case
        self._kinds = kinds
        work, topology = case.workload, case.topology
        self.usable = [
            at
            for at in topology.endpoints
            if all((actor, at) in topology.legs for actor in work.actors)
            and all((at, learner) in topology.legs for learner in work.learners)
        ]
        self.most_rows = {at: self._room(at) // work.row_bytes for at in topology.endpoints}

    def fits(self) -> bool:
        """Whether any set has room for all rows, however they are spread."""
        return any(self._has_room(used) for used in self.sets())

    def best_s(self) -> float:
        """Of all spreads that fit; infinite where none does."""
        best = np.inf
        for used in self.sets():
            rows = _spreads(len(used), 16 if len(used) <= 3 else 8) * (self.case.workload.capacity // 16)
            rows *= 1 if len(used) <= 3 else 2
            rows = rows[(rows <= [self.most_rows[at] for at in used]).all(axis=1)]
            if len(rows):
                best = min(best, float(self.seconds(used, rows).min()))
        return best

    def sets(self) -> Iterator[tuple[Endpoint, ...]]:
        hosts = [at for at in self.usable if at.is_host]
        devices = [at for at in self.usable if not at.is_host]
        yield from ((at,) for at in hosts)
        subsets = [some for size in range(1, len(devices) + 1) for some in combinations(devices, size)]
        yield from subsets
        if not any(self._has_room(used) for used in subsets):
            yield from ((at, *used) for at in hosts for used in subsets)

    def seconds(self, used: Sequence[Endpoint], rows: np.ndarray) -> np.ndarray:
        """An iteration's, of each spread (n, len(used)): new rows, then batches."""
        work = self.case.workload
        new = work.batch_size * len(work.learners) / work.replay_ratio / len(work.actors)
        parts = rows / work.capacity
        flows_in = [((actor, at), new * parts[:, k]) for actor in work.actors for k, at in enumerate(used)]
        flows_out = [((at, to), work.batch_size * parts[:, k]) for to in work.learners for k, at in enumerate(used)]
        in_s = self._together(flows_in)
        # Each node has one thread that copies its new rows out of pageable memory, one place after the other.
        for source in {actor for actor in work.actors if actor.tier is Tier.PAGEABLE}:
            copied = work.actors.count(source) * new
            copies = [self._leg_s((source, at), copied * parts[:, k]) for k, at in enumerate(used)]
            in_s = np.maximum(in_s, np.sum(copies, axis=0))
        out_s = self._together(flows_out)
        if len(used) > 1:
            whole = [((to, to), np.full(len(rows), float(work.batch_size))) for to in work.learners]
            known = [flow for flow in whole if flow[0] in self.case.topology.legs]
            out_s = out_s + (self._together(known) if known else 0.0)
        return in_s + out_s

    def _together(self, flows: Sequence[tuple[Edge, np.ndarray]]) -> np.ndarray:
        topology, row_bytes = self.case.topology, self.case.workload.row_bytes
        along: dict[Edge, np.ndarray] = {}
        over: dict[str, np.ndarray] = {}
        for edge, rows in flows:
            along[edge] = along.get(edge, 0.0) + rows
            for link in topology.routes.get(edge, ()):
                over[link] = over.get(link, 0.0) + rows
        legs = [self._leg_s(edge, rows) for edge, rows in along.items()]
        links = [rows * row_bytes / topology.links[link].bytes_per_s for link, rows in over.items()]
        return np.max([*legs, *links], axis=0)

    def _leg_s(self, edge: Edge, rows: np.ndarray) -> np.ndarray:
        leg = self.case.topology.legs[edge]
        return leg.latency_s + rows * self.case.workload.row_bytes / leg.bytes_per_s

    def _room(self, at: Endpoint) -> int:
        case, work, memory = self.case, self.case.workload, self.case.topology.memories[at]
        most = memory.free_bytes - case.reserve * memory.capacity_bytes
        if at.tier in case.budgets:
            most = min(most, case.budgets[at.tier])
        for learner in work.learners:
            if learner == at:
                most -= work.staged_batches * work.batch_size * work.row_bytes
        return max(0, int(most))

    def _has_room(self, used: Sequence[Endpoint]) -> bool:
        most = [self.most_rows[at] for at in used]
        return min(most) > 0 and sum(most) >= self.case.workload.capacity


def _spreads(places: int, steps: int) -> np.ndarray:
    """All ways to deal `steps` to so many places, at least one each."""
    cuts = combinations(range(1, steps), places - 1)
    return np.array([np.diff([0, *cut, steps]) for cut in cuts])
