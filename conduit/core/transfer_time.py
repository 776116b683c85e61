"""How long rows take to and from a placement, and which rows by endpoint are the fastest (paper §5.1, Eq. 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conduit.core.placement import capped_rows, even_rows
from conduit.core.workload import Workload
from conduit.topology.cluster import Edge, Topology
from conduit.topology.endpoint import Endpoint, Tier
from conduit.topology.fabric import bound

Floats = NDArray[np.float64]

_Line = tuple[float, float, float]
"""Of an edge: latency_s, seconds beyond it if all rows lay at one of its ends, noise."""

_CRUMB = 4096
"""A part of the rows this small is no use anywhere."""
SAME = 1e-9
"""Times that differ by less, relatively, are equal: they differ in how they were summed."""


def ingested_bytes(workload: Workload, at: Endpoint) -> dict[Edge, float]:
    """By edge, an iteration, if all rows lay at `at`: an equal part from every actor."""
    return _together(
        ((actor, at), workload.rows_ingested * workload.row_bytes / len(workload.actors)) for actor in workload.actors
    )


def delivered_bytes(workload: Workload, at: Endpoint) -> dict[Edge, float]:
    """By edge, an iteration, if all rows lay at `at`: a batch to every learner."""
    return _together(((at, learner), float(workload.batch_size * workload.row_bytes)) for learner in workload.learners)


def merged_bytes(topology: Topology, workload: Workload) -> dict[Edge, float]:
    """By edge, an iteration, where batches come from several endpoints: each is put together by a copy within its learner's memory. Without
    learners in whose memory no bandwidth is known."""
    sizes = _together(((at, at), float(workload.batch_size * workload.row_bytes)) for at in workload.learners)
    return {edge: size for edge, size in sizes.items() if topology.reaches(*edge)}


def ingestion_s(topology: Topology, workload: Workload, rows_by_endpoint: Mapping[Endpoint, int]) -> float:
    """Of an iteration's new rows, to every endpoint as many as its share of the rows says: all at once, but for those in pageable memory.
    These a thread of their node, which ingests there, copies to one endpoint after the other. Per row: over `workload.rows_ingested`.
    TopologyError for an endpoint that an actor doesn't reach."""
    parts = _parts({at: ingested_bytes(workload, at) for at in rows_by_endpoint}, rows_by_endpoint)
    copied_s: dict[Endpoint, float] = {}
    for edge, size in parts.items():
        if _is_copied(edge):
            copied_s[edge[0]] = copied_s.get(edge[0], 0.0) + topology.leg(*edge).seconds(size)
    return max(bound(topology, parts), max(copied_s.values(), default=0.0))


def delivery_s(topology: Topology, workload: Workload, rows_by_endpoint: Mapping[Endpoint, int]) -> float:
    """Of a batch to every learner, gathered from every endpoint as its share of the rows says, all at once (each learner's by a thread of its
    own); then, where that is from several, put together: a copy within the learner's memory, which counts as none where it isn't known. Per
    row: over `workload.rows_delivered`. TopologyError for an endpoint that doesn't reach a learner."""
    gathered = bound(topology, _parts({at: delivered_bytes(workload, at) for at in rows_by_endpoint}, rows_by_endpoint))
    several = sum(map(bool, rows_by_endpoint.values())) > 1
    return gathered + (bound(topology, merged_bytes(topology, workload)) if several else 0.0)


def missing_edges(topology: Topology, workload: Workload, at: Endpoint) -> tuple[Edge, ...]:
    """What keeps rows from lying at `at`; empty where every actor reaches it, and it every learner."""
    needed = [*ingested_bytes(workload, at), *delivered_bytes(workload, at)]
    return tuple(edge for edge in dict.fromkeys(needed) if not topology.reaches(*edge))


@dataclass(frozen=True, slots=True)
class TransferTime:
    """One half of an iteration as a function of the shares of E endpoints, for many placements at once.

    A stream is what goes along one edge; or along several, one after the other, where one thread copies it.

    - `latency_s`, `share_s`, `noise`, of n streams (n, E): seconds that an endpoint with any share adds, those beyond that if its share were 1,
      and the noise of these figures; without streams that another one is slower than anyway
    - `link_s` (links, E): seconds on each link if all rows lay at one endpoint"""

    latency_s: Floats
    share_s: Floats
    noise: Floats
    link_s: Floats

    @classmethod
    def of(cls, topology: Topology, traffic: Sequence[Mapping[Edge, float]], *, copied: bool = False) -> TransferTime:
        """`traffic`: bytes by edge if all rows lay at this endpoint, for each of the E. `copied`: what comes from one pageable memory is one
        stream, as in ingestion. TopologyError for a missing edge."""
        streams: list[dict[int, _Line]] = []
        threads: dict[Endpoint, dict[int, _Line]] = {}
        links = {name: number for number, name in enumerate(topology.links)}
        link_s = np.zeros((len(links), len(traffic)))
        for number, sizes in enumerate(traffic):
            alone = []
            for edge, size in sizes.items():
                leg = topology.leg(*edge)
                line = leg.latency_s, size / leg.bytes_per_s, leg.noise
                if copied and _is_copied(edge):
                    threads.setdefault(edge[0], {})[number] = line
                else:
                    alone.append(line)
                for name in dict.fromkeys(topology.route(*edge)):
                    link_s[links[name], number] += size / topology.links[name].bytes_per_s
            streams += [{number: line} for line in _slowest(alone)]
        figures = np.zeros((3, len(streams) + len(threads), len(traffic)))
        for place, stream in enumerate([*streams, *threads.values()]):
            for number, line in stream.items():
                figures[:, place, number] = line
        latency_s, share_s, noise = figures
        return cls(latency_s, share_s, noise, _largest(link_s))

    def seconds(self, shares: Floats) -> tuple[Floats, Floats]:
        """Of placements (C, E): how long (C,), and the noise (C,) of the figures that decide it; a link's is 0."""
        if not len(self.share_s):
            return np.zeros(len(shares)), np.zeros(len(shares))
        used = shares > 0
        streams_s = shares @ self.share_s.T + used @ self.latency_s.T
        slowest = streams_s.argmax(axis=1)
        stream_s = streams_s[np.arange(len(shares)), slowest]
        link_s = (shares @ self.link_s.T).max(axis=1, initial=0.0)
        parts_s = shares * self.share_s[slowest] + used * self.latency_s[slowest]
        noise = (parts_s * self.noise[slowest]).sum(axis=1) / stream_s
        return np.maximum(stream_s, link_s), np.where(stream_s >= link_s, noise, 0.0)

    def bounds(self, used: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """(slopes (m, len(used)), latencies (m,)): the time is the largest of slopes @ shares + latencies, where every endpoint in
        `used` has a share and no other has."""
        kept = self.share_s[:, used].any(axis=1)
        on_links = _largest(self.link_s[:, used])
        slopes = np.concatenate([self.share_s[kept][:, used], on_links])
        return slopes, np.concatenate([self.latency_s[kept][:, used].sum(axis=1), np.zeros(len(on_links))])


class Timed(NamedTuple):
    """Rows at each of some endpoints, and what an iteration then takes. `noise`: of the measurements that decide it."""

    rows: Mapping[Endpoint, int]
    ingestion_s: float
    delivery_s: float
    noise: float

    @property
    def transfer_s(self) -> float:
        return self.ingestion_s + self.delivery_s


class Survey:
    """What is known of the endpoints that every actor reaches and that reach every learner: their room, and how fast they are."""

    def __init__(self, topology: Topology, workload: Workload, room: Mapping[Endpoint, int]) -> None:
        """`room`: bytes that rows may take, by endpoint."""
        self.missing = {at: missing_edges(topology, workload, at) for at in topology.endpoints}
        self.endpoints = tuple(at for at, edges in self.missing.items() if not edges)
        self._workload = workload
        self._room = room
        self._number = {at: number for number, at in enumerate(self.endpoints)}
        self._halves = (
            TransferTime.of(topology, [ingested_bytes(workload, at) for at in self.endpoints], copied=True),
            TransferTime.of(topology, [delivered_bytes(workload, at) for at in self.endpoints]),
        )
        merge = TransferTime.of(topology, [merged_bytes(topology, workload)]).seconds(np.ones((1, 1)))
        self._merge_s, self._merge_noise = (float(each[0]) for each in merge)

    def placed(self, sets: Iterable[Sequence[Endpoint]]) -> list[Timed]:
        """The rows on each set of endpoints: evenly, as far as there is room, and, where all fit, as is fastest if that differs. At least
        one row at each endpoint; sets that are larger than that are left out."""
        capacity = self._workload.capacity
        used = [each for each in sets if len(each) <= capacity]
        most = [self._most_rows(each) for each in used]
        even = self.timed([even_rows(caps, capacity) for caps in most], used)
        free = [at for at, caps in enumerate(most) if len(caps) > 1 and sum(caps) >= capacity and min(caps) > 0]
        shares = fastest_shares(
            self._halves,
            [[self._number[each] for each in used[at]] for at in free],
            1 / capacity,
            [[rows / capacity for rows in most[at]] for at in free],
        )
        rows = [capped_rows(each.tolist(), capacity, most[at]) for each, at in zip(shares, free, strict=True)]
        fast = dict(zip(free, self.timed(rows, [used[at] for at in free]), strict=True))
        faster = {
            at: each
            for at, each in fast.items()
            # With hardly a row somewhere, it is another set's, better without it.
            if each.transfer_s < even[at].transfer_s * (1 - SAME) and min(each.rows.values()) * _CRUMB > capacity
        }
        return [one for at, each in enumerate(even) for one in (each, faster.get(at)) if one is not None]

    def timed(self, rows: Sequence[Sequence[int]], sets: Sequence[Sequence[Endpoint]]) -> list[Timed]:
        """Of so many rows at each endpoint of each set."""
        shares = np.zeros((len(sets), len(self.endpoints)))
        for number, used in enumerate(sets):
            shares[number, [self._number[at] for at in used]] = np.asarray(rows[number]) / self._workload.capacity
        (in_s, in_noise), (gather_s, gather_noise) = (half.seconds(shares) for half in self._halves)
        merge_s = np.where(np.count_nonzero(shares, axis=1) > 1, self._merge_s, 0.0)
        del_s = gather_s + merge_s
        noise = (in_s * in_noise + gather_s * gather_noise + merge_s * self._merge_noise) / (in_s + del_s)
        by_endpoint = (dict(zip(used, some, strict=True)) for used, some in zip(sets, rows, strict=True))
        return [Timed(*each) for each in zip(by_endpoint, in_s.tolist(), del_s.tolist(), noise.tolist(), strict=True)]

    def grown(self, endpoints: Sequence[Endpoint]) -> Iterator[tuple[Endpoint, ...]]:
        """Sets of growing size, of those with room: the fastest alone, then with the one that makes evenly spread rows fastest, and so on."""
        left = [self._number[at] for at in endpoints if self._room[at] >= self._workload.row_bytes]
        used: list[int] = []
        while left:
            shares = np.zeros((len(left), len(self.endpoints)))
            shares[:, used] = shares[np.arange(len(left)), left] = 1 / (len(used) + 1)
            # What putting batches together takes is the same for all.
            in_s, del_s = (half.seconds(shares)[0] for half in self._halves)
            fast = in_s + del_s <= (in_s + del_s).min() * (1 + SAME)
            used.append(left.pop(int(fast.argmax())))
            yield tuple(self.endpoints[number] for number in sorted(used))

    def _most_rows(self, used: Sequence[Endpoint]) -> list[int]:
        """That fit at each, beside what the first has to hold."""
        beside = [self._workload.side_bytes, *[0] * (len(used) - 1)]
        return [
            max(0, self._room[at] - more) // self._workload.row_bytes for at, more in zip(used, beside, strict=True)
        ]


def fastest_shares(
    halves: Sequence[TransferTime], sets: Sequence[Sequence[int]], least: float, most: Sequence[Sequence[float]]
) -> list[Floats]:
    """Of each set of endpoints, the shares with the least sum of times of `halves`: none below `least`, none above that endpoint's in
    `most`, in sum 1. Such shares are expected to be there.

    One linear program for all sets, of a block each: minimise t_in + t_del, where no stream and no link takes longer than its t."""
    if not sets:
        return []
    from scipy.optimize import linprog  # imported here: heavy, and few need it
    from scipy.sparse import csr_array

    blocks = [_block(halves, np.asarray(used)) for used in sets]
    widths = [len(used) + len(halves) for used in sets]
    first = np.cumsum([0, *widths])
    shares = [np.arange(start, start + len(used)) for start, used in zip(first, sets, strict=False)]
    shape = (len(sets), int(first[-1]))
    is_share = csr_array(
        (
            np.ones(sum(map(len, shares))),
            (np.repeat(np.arange(len(sets)), [len(each) for each in shares]), np.concatenate(shares)),
        ),
        shape,
    )
    heights = np.cumsum([0, *(len(limit) for _, limit in blocks)])
    at = [np.nonzero(slopes) for slopes, _ in blocks]
    row = np.concatenate([start + rows for start, (rows, _) in zip(heights, at, strict=False)])
    column = np.concatenate([start + columns for start, (_, columns) in zip(first, at, strict=False)])
    slope = np.concatenate([slopes[some] for (slopes, _), some in zip(blocks, at, strict=True)])
    limits = [np.array([*((least, each) for each in caps), *[(0.0, np.inf)] * len(halves)]) for caps in most]
    solved = linprog(
        1.0 - is_share.sum(axis=0),
        A_ub=csr_array((slope, (row, column)), (int(heights[-1]), shape[1])),
        b_ub=np.concatenate([limit for _, limit in blocks]),
        A_eq=is_share,
        b_eq=np.ones(len(sets)),
        bounds=np.concatenate(limits),
        method="highs",
    )
    assert solved.x is not None, solved.message
    return [solved.x[of] for of in shares]


def _block(halves: Sequence[TransferTime], used: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """(A, b) of A @ [shares of `used`, a time for each of `halves`] ≤ b, in units in which the times are about 1: the solver's
    tolerances are absolute."""
    bounds = [half.bounds(used) for half in halves]
    unit_s = max(float((slopes.max(axis=1) + latency_s).max(initial=0.0)) for slopes, latency_s in bounds) or 1.0
    rows = []
    for number, (slopes, _) in enumerate(bounds):
        time = np.zeros((len(slopes), len(halves)))
        time[:, number] = -1.0
        rows.append(np.hstack([slopes / unit_s, time]))
    return np.concatenate(rows), np.concatenate([-latency_s / unit_s for _, latency_s in bounds])


def _slowest(lines: Iterable[_Line]) -> list[_Line]:
    """Of edges with the same share, those that no other exceeds in both seconds."""
    kept: list[_Line] = []
    for line in sorted(lines, reverse=True):
        if not kept or line[1] > kept[-1][1]:
            kept.append(line)
    return kept


def _largest(slopes: Floats) -> Floats:
    """The rows, but for those that another exceeds everywhere."""
    some = slopes[slopes.any(axis=1)]
    exceeds = (some[None, :, :] >= some[:, None, :]).all(axis=2)
    # Of equal rows the first stays.
    return some[~(exceeds & (~exceeds.T | np.tri(len(some), k=-1, dtype=bool))).any(axis=1)]


def _together(sizes: Iterable[tuple[Edge, float]]) -> dict[Edge, float]:
    total: dict[Edge, float] = {}
    for edge, size in sizes:
        total[edge] = total.get(edge, 0.0) + size
    return total


def _parts(traffic: Mapping[Endpoint, Mapping[Edge, float]], rows: Mapping[Endpoint, int]) -> dict[Edge, float]:
    """`traffic`: by edge, if all rows lay at that endpoint; the endpoints share it as they do the rows."""
    capacity = sum(rows.values())
    return _together(
        (edge, size * rows[at] / capacity) for at, sizes in traffic.items() for edge, size in sizes.items()
    )


def _is_copied(edge: Edge) -> bool:
    """Whether it keeps the thread of the host that asked for it, until the last byte has left."""
    return edge[0].tier is Tier.PAGEABLE
