"""Which placement at which row size: the planner run over a range of sizes once, looked up by bisection (paper §5.3, App. D)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from conduit.core.placement import KINDS, Placement
from conduit.core.planning import BETTER, plan_for
from conduit.core.plans import Candidate
from conduit.core.transfer_time import delivery_s, ingestion_s, missing_edges
from conduit.core.workload import Workload, room_bytes
from conduit.errors import CapacityError, SettingError
from conduit.topology.cluster import Topology
from conduit.topology.endpoint import Endpoint, Tier

PER_OCTAVE = 4
"""Sizes that a sweep plans for between one and its double, where only a range is given."""


@dataclass(frozen=True, slots=True)
class Region:
    """Row sizes, in bytes, first … last, that one placement is for; None: nothing fits. `kind`: the placement's, "" for None."""

    first: int
    last: int
    placement: Placement | None
    kind: str


@dataclass(frozen=True, slots=True)
class PlacementMap:
    """The regions, which follow on each other. Two neighbours differ: a region ends where its placement ends to fit, or to be within
    `BETTER` of the next one's."""

    topology: Topology
    workload: Workload
    regions: tuple[Region, ...]
    budgets: Mapping[Tier, int]
    reserve: float

    @classmethod
    def sweep(
        cls,
        topology: Topology,
        workload: Workload,
        sizes: Sequence[int],
        *,
        kinds: Sequence[str] = KINDS,
        budgets: Mapping[Tier, int] | None = None,
        reserve: float = 0.0,
    ) -> PlacementMap:
        """`sizes`: row sizes, ascending; of two only, those between are chosen, `PER_OCTAVE`. Between two sizes, the placement is the
        larger one's, from where the smaller one's no longer does, to the byte. `workload.row_bytes` doesn't matter."""
        if len(sizes) < 2 or any(a >= b for a, b in pairwise(sizes)) or sizes[0] < 1:
            raise SettingError(f"sizes={sizes!r}: expected two or more row sizes in bytes, ascending")
        bare = cls(topology, workload, (), budgets or {}, reserve)
        grid = bare._grid(*sizes) if len(sizes) == 2 else list(sizes)
        now, first, regions = bare._planned(grid[0], kinds, None), grid[0], []
        for below, size in pairwise(grid):
            current = None if now is None else now.placement
            then = bare._planned(size, kinds, current)
            after = None if then is None else then.placement
            if after != current:
                kept = below
                if current is not None:
                    kept = _last(
                        below, size, lambda row_bytes, was=current, then=after: bare._keeps(was, then, row_bytes)
                    )
                regions.append(_region(first, kept, now))
                now, first = then, kept + 1
        return replace(bare, regions=(*regions, _region(first, grid[-1], now)))

    def at(self, row_bytes: int, current: Placement | None = None) -> Placement:
        """Where rows of so many bytes go: where they are, `current`, while they fit there and the region's placement isn't faster by more
        than `BETTER`. Rows smaller than any that was swept go where the smallest do.

        CapacityError where none fits, SettingError beyond the sweep."""
        if row_bytes > self.regions[-1].last:
            raise SettingError(
                f"row_bytes={row_bytes:,}: the placement map ends at {self.regions[-1].last:,}; sweep to larger sizes"
            )
        placement = self.region(row_bytes).placement
        if current is not None and self._keeps(current, placement, row_bytes):
            return current
        if placement is None:
            raise CapacityError(
                f"{self.workload.capacity:,} rows of {row_bytes:,} bytes fit nowhere on {self.topology.name}; "
                f"the largest that do have {max((each.last for each in self.regions if each.placement), default=0):,}"
            )
        return placement

    def region(self, row_bytes: int) -> Region:
        """The one that a size is in, in O(log R); the first for smaller ones, the last for larger ones."""
        return self.regions[
            min(bisect_left(self.regions, row_bytes, key=lambda each: each.last), len(self.regions) - 1)
        ]

    @property
    def transitions(self) -> tuple[tuple[Placement, Placement], ...]:
        """(from, to) of neighbours, for which a transfer plan can be made beforehand."""
        places = [each.placement for each in self.regions]
        return tuple((a, b) for a, b in pairwise(places) if a is not None and b is not None)

    def fits_up_to(self, placement: Placement) -> int:
        """The largest rows, in bytes, that fit on a placement; 0 where none do. Move before they are larger."""
        limits = self._limits(placement.endpoints)
        rows = placement.rows(self.workload.capacity)
        most = [limits[at] // (rows[at] + self.workload.staged_rows(at)) for at in rows if rows[at]]
        return max(0, min(most))

    def _planned(self, row_bytes: int, kinds: Sequence[str], current: Placement | None) -> Candidate | None:
        work = self.workload.with_row_bytes(row_bytes)
        return plan_for(self.topology, work, kinds, self.budgets, self.reserve, current).choice

    def _grid(self, low: int, high: int) -> list[int]:
        """Sizes to plan for: evenly spread by ratio, and the largest that memories hold alone, or those of a kind together."""
        steps = max(1, round(PER_OCTAVE * math.log2(high / low)))
        sizes = {round(low * (high / low) ** (step / steps)) for step in range(steps + 1)}
        tiers = {tier: tuple(at for at in self.topology.endpoints if at.tier is tier) for tier in Tier}
        devices = tiers[Tier.DEVICE]
        together = [*tiers.values(), *((*tiers[host], *devices) for host in (Tier.PAGEABLE, Tier.PINNED))]
        ends = (self._held_up_to(some) for some in [*((at,) for at in self.topology.endpoints), *together] if some)
        return sorted(sizes | {end for end in ends if low < end < high})

    def _held_up_to(self, endpoints: Sequence[Endpoint]) -> int:
        """The largest rows that all fit on these, however they are spread."""
        limits, work = self._limits(endpoints), self.workload

        def fit(row_bytes: int) -> bool:
            most = (max(0, limits[at] // row_bytes - work.staged_rows(at)) for at in endpoints)
            return sum(most) >= work.capacity

        return _last(0, 1 + sum(limits.values()) // work.capacity, fit)

    def _limits(self, endpoints: Sequence[Endpoint]) -> dict[Endpoint, int]:
        """Bytes for rows and what is staged."""
        room = room_bytes(self.topology, replace(self.workload, staged_batches=0), self.budgets, self.reserve)
        beside = [self.workload.side_bytes, *[0] * (len(endpoints) - 1)]
        return {at: max(0, room[at] - more) for at, more in zip(endpoints, beside, strict=True)}

    def _keeps(self, current: Placement, other: Placement | None, row_bytes: int) -> bool:
        """Whether rows stay: they fit, and would not be faster by more than `BETTER` at `other`."""
        if row_bytes > self.fits_up_to(current):
            return False
        return other is None or self._transfer_s(current, row_bytes) <= BETTER * self._transfer_s(other, row_bytes)

    def _transfer_s(self, placement: Placement, row_bytes: int) -> float:
        """Infinite where an edge is missing."""
        work = self.workload.with_row_bytes(row_bytes)
        if any(missing_edges(self.topology, work, at) for at in placement.endpoints):
            return math.inf
        rows = placement.rows(work.capacity)
        return ingestion_s(self.topology, work, rows) + delivery_s(self.topology, work, rows)


def _region(first: int, last: int, choice: Candidate | None) -> Region:
    return Region(first, last, *((None, "") if choice is None else (choice.placement, choice.kind)))


def _last(true: int, false: int, holds: Callable[[int], bool]) -> int:
    """The last number for which `holds` is true, between one where it is and one where it isn't."""
    while false - true > 1:
        middle = (true + false) // 2
        true, false = (middle, false) if holds(middle) else (true, middle)
    return true
