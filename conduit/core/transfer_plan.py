"""Who sends how many rows to whom when rows move to another placement (paper Eq. 3, with the ports that streams share)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.placement import whole_rows
from conduit.errors import MigrationError
from conduit.topology.cluster import Edge, Topology
from conduit.topology.endpoint import Endpoint, Tier
from conduit.topology.fabric import bound

Floats = NDArray[np.float64]
Rows = Mapping[Endpoint, int]

_SLACK = 1e-9
"""Of the least time: what moving the least bytes may cost."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """`moves`: rows along each edge; along (e, e) what stays at e, copied there into the new storage. `before`, `after`: rows by endpoint,
    exactly the sums of `moves`."""

    topology: Topology
    row_bytes: int
    before: Rows
    after: Rows
    moves: Mapping[Edge, int]

    @property
    def rows(self) -> int:
        return sum(self.moves.values())

    @property
    def predicted_s(self) -> float:
        """Of all streams at once; the copies of what stays are among them."""
        streams = {edge: float(rows * self.row_bytes) for edge, rows in self.moves.items()}
        return bound(self.topology, {edge: size for edge, size in streams.items() if self.topology.reaches(*edge)})

    def move_s(self, stored_bytes: int) -> float:
        """The time of the whole move, of rows that take `stored_bytes` each where they go: beside the streams, every memory reads the rows
        that leave it, and writes those that come; and makes them wider before, where they become so. Rows in pageable memory are copied
        by one thread. It leaves out latencies."""
        work: Counter[Edge] = Counter()
        copied_s = 0.0
        for (source, to), rows in self.moves.items():
            if source != to:
                work[source, to] += rows * self.row_bytes
            work[source, source] += rows * self.row_bytes
            work[to, to] += rows * stored_bytes * (1 if stored_bytes == self.row_bytes else 2)
        known = {edge: float(size) for edge, size in work.items() if self.topology.reaches(*edge)}
        for edge, size in known.items():
            if edge[0].tier is Tier.PAGEABLE:
                copied_s += size / self.topology.leg(*edge).bytes_per_s
        return max(self.predicted_s, bound(self.topology, known), copied_s)

    @property
    def moved_bytes(self) -> int:
        """Between endpoints."""
        return self.row_bytes * sum(rows for (source, to), rows in self.moves.items() if source != to)

    @property
    def least_bytes(self) -> int:
        """That any plan moves between endpoints: what each has too much."""
        return self.row_bytes * sum(max(0, rows - self.after.get(at, 0)) for at, rows in self.before.items())

    def bytes_per_s(self, edge: Edge) -> float:
        """To pace a stream at, so that all end together and none takes what another needs; 0 for an edge without rows."""
        size_bytes = self.moves.get(edge, 0) * self.row_bytes
        return size_bytes / self.predicted_s if size_bytes else 0.0

    def scaled(self, rows: int) -> TransferPlan:
        """The same for `rows` in all: a plan is solved once for two placements, and used for what is there when rows move. Each edge
        gets its part to within a row; `before` and `after` are the sums of that."""
        if not self.moves:
            raise MigrationError("a transfer plan of no rows says nothing about others; solve one for the capacity")
        parts = whole_rows(list(self.moves.values()), rows)
        moves = {edge: part for edge, part in zip(self.moves, parts, strict=True) if part}
        before, after = Counter[Endpoint](), Counter[Endpoint]()
        for (source, to), part in moves.items():
            before[source] += part
            after[to] += part
        return TransferPlan(self.topology, self.row_bytes, dict(before), dict(after), moves)


def solve(topology: Topology, before: Rows, after: Rows, row_bytes: int) -> TransferPlan:
    """The plan with the least time and, of those, the least bytes moved. `before`: the rows that are to move, by endpoint; `after`: where
    they are wanted, in proportion, if these are not as many.

    The time is that of the slowest edge or link; it leaves out latencies, which are small beside a migration's streams, and what stays.
    MigrationError where the edges that there are can't bring the rows there."""
    there = {at: rows for at, rows in before.items() if rows}
    if there and not any(after.values()):
        raise MigrationError(
            f"{sum(there.values()):,} rows are to move, and `after` has rows at no endpoint: {dict(after)}"
        )
    wanted = _apportioned(after, sum(there.values())) if there else {}
    edges = [(source, to) for source in there for to in wanted if source == to or topology.reaches(source, to)]
    if there and not edges:
        raise MigrationError(_no_way(there, wanted, edges))
    moves = _whole(there, wanted, edges, _fastest(topology, there, wanted, edges)) if there else {}
    return TransferPlan(topology, row_bytes, there, wanted, moves)


def _fastest(topology: Topology, before: Rows, after: Rows, edges: Sequence[Edge]) -> Floats:
    """Rows along each edge, not whole yet, from two linear programs."""
    program = _Program(topology, before, after, edges)
    # The solver's tolerances are absolute: the least time is looked for again in a unit of what was found.
    unit_s = program.least_time(program.slowest_s)
    unit_s = program.least_time(unit_s)
    return program.least_moved(unit_s) * sum(before.values())


class _Program:
    """Over the parts of all rows that go along each edge. Seconds are those of all rows, were each a byte."""

    def __init__(self, topology: Topology, before: Rows, after: Rows, edges: Sequence[Edge]) -> None:
        from scipy.sparse import csr_array

        self._before, self._after, self._edges = before, after, edges
        self._far = np.array([source != to for source, to in edges], np.float64)
        self._sums, self._totals = _marginals(before, after, edges)
        self._totals = self._totals / sum(before.values())
        slowness = _slowness(topology, edges)
        self.slowest_s = float(slowness.max(initial=0.0))
        self._slow: Any = csr_array(slowness)

    def least_time(self, unit_s: float) -> float:
        """Minimises t, where slow @ parts ≤ t."""
        from scipy.sparse import csr_array, hstack

        if not unit_s:
            return 0.0
        count = self._slow.shape[0]
        slow = hstack([self._slow / unit_s, csr_array(np.full((count, 1), -1.0))])
        sums = hstack([self._sums, csr_array((len(self._totals), 1))])
        time = np.append(np.zeros(len(self._edges)), 1.0)
        return unit_s * float(self._solved(time, slow, np.zeros(count), sums)[-1])

    def least_moved(self, time_s: float) -> Floats:
        """Minimises what leaves its endpoint, where slow @ parts ≤ time_s."""
        unit_s = time_s or self.slowest_s or 1.0
        limit = np.full(self._slow.shape[0], time_s / unit_s * (1 + _SLACK))
        return self._solved(self._far, self._slow / unit_s, limit, self._sums)

    def _solved(self, cost: Floats, slow: Any, limit: Floats, sums: Any) -> Floats:
        from scipy.optimize import linprog

        solved = linprog(cost, A_ub=slow, b_ub=limit, A_eq=sums, b_eq=self._totals, method="highs")
        if solved.x is None:
            raise MigrationError(_no_way(self._before, self._after, self._edges))
        return solved.x


def _slowness(topology: Topology, edges: Sequence[Edge]) -> Floats:
    """(edges and links, edges): seconds per byte that goes along each edge; 0 for what stays."""
    own = [1 / topology.leg(*edge).bytes_per_s if edge[0] != edge[1] else 0.0 for edge in edges]
    links = {name: number for number, name in enumerate(topology.links)}
    shared = np.zeros((len(links), len(edges)))
    for number, (source, to) in enumerate(edges):
        for name in topology.route(source, to) if source != to else ():
            shared[links[name], number] = 1 / topology.links[name].bytes_per_s
    slow = np.concatenate([np.diag(own), shared])
    return slow[slow.any(axis=1)]


def _marginals(before: Rows, after: Rows, edges: Sequence[Edge]) -> tuple[Any, Floats]:
    """(A, b) of A @ moves = b: as many from each endpoint as it has, as many to each as it wants."""
    from scipy.sparse import csr_array

    number = {("from", at): row for row, at in enumerate(before)}
    number |= {("to", at): row for row, at in enumerate(after, len(before))}
    rows = np.array([[number["from", source], number["to", to]] for source, to in edges]).reshape(-1, 2)
    columns = np.repeat(np.arange(len(edges)), 2)
    sums = csr_array((np.ones(len(columns)), (rows.ravel(), columns)), (len(number), len(edges)))
    return sums, np.array([*before.values(), *after.values()], np.float64)


def _whole(before: Rows, after: Rows, edges: Sequence[Edge], ideal: Floats) -> dict[Edge, int]:
    """Whole rows with exactly these sums, each of `ideal` rounded down or up. With sums and bounds whole, so is every vertex of the
    program. More than by one only where `ideal` is not exact enough for that."""
    from scipy.optimize import linprog

    sums, totals = _marginals(before, after, edges)
    down = np.floor(ideal)
    for more in (0, 1, int(totals.sum())):
        bounds = np.column_stack([np.maximum(down - more, 0), np.ceil(ideal) + more])
        solved = linprog(down - ideal, A_eq=sums, b_eq=totals, bounds=bounds, method="highs-ds")
        if solved.x is not None:
            rows = np.rint(solved.x).astype(np.int64).tolist()
            return {edge: each for edge, each in zip(edges, rows, strict=True) if each}
    raise MigrationError(_no_way(before, after, edges))


def _apportioned(rows: Rows, total: int) -> dict[Endpoint, int]:
    """As many in all as `total`, in proportion; without those that get none."""
    shares = whole_rows(list(rows.values()), total)
    return {at: each for at, each in zip(rows, shares, strict=True) if each}


def _no_way(before: Rows, after: Rows, edges: Sequence[Edge]) -> str:
    lost = [f"{at} sends to none of them" for at in before if all(source != at for source, _ in edges)]
    lost += [f"none sends to {at}" for at in after if all(to != at for _, to in edges)]
    return (
        f"no edges for {sum(before.values()):,} rows from {', '.join(map(str, before))} to {', '.join(map(str, after))}"
        f"{': ' if lost else ''}{'; '.join(lost)}; measure them (conduit topology --measure)"
    )
