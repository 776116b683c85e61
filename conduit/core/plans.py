"""A plan: every placement that was looked at, with its bytes and its times, as a value; and as a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from conduit.core.placement import KINDS, Placement, format_bytes
from conduit.core.transfer_time import SAME, missing_edges
from conduit.core.workload import Workload
from conduit.errors import CapacityError, SettingError
from conduit.topology.cluster import Edge, Topology
from conduit.topology.endpoint import Endpoint, Tier

NAMED_DEVICES = 8
"""Of more, a text says how many they are."""

IN_MEMORY = (Tier.PAGEABLE, Tier.PINNED, Tier.DEVICE)

_MOST_LINES = 12  # of a table: eight devices have 255 subsets


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement that was looked at. Times are predictions, in seconds an iteration.

    - `kind`: one of KINDS
    - `rows`, `need_bytes`: of the rows (and what lies beside them), by endpoint; `room_bytes`: what there is at most, less the reserve
      and what is staged
    - `shortfall_bytes`: what lacks, by endpoint; empty where it fits
    - `noise`: of the measurements that decide the times, as `Leg.noise`; 0 where none was measured"""

    kind: str
    placement: Placement
    rows: Mapping[Endpoint, int]
    need_bytes: Mapping[Endpoint, int]
    room_bytes: Mapping[Endpoint, int]
    shortfall_bytes: Mapping[Endpoint, int]
    ingestion_s: float
    delivery_s: float
    noise: float = 0.0

    @property
    def feasible(self) -> bool:
        return not self.shortfall_bytes

    @property
    def transfer_s(self) -> float:
        """What Eq. 1 minimises: both legs, an iteration."""
        return self.ingestion_s + self.delivery_s

    @property
    def name(self) -> str:
        """`"shared_gpu(0,2,4,6)"`; of other nodes with the node's number: `"shared_gpu(0,1/0)"`, `"cpu_pageable(1)"`."""
        devices = [at for at in self.placement.endpoints if not at.is_host]
        if devices:
            return f"{self.kind}({','.join(f'{at.node}/{at.index}' if at.node else f'{at.index}' for at in devices)})"
        nodes = [at.node for at in self.placement.endpoints]
        return f"{self.kind}({','.join(map(str, nodes))})" if any(nodes) else self.kind


@dataclass(frozen=True, slots=True)
class Plan:
    """`candidates`: the feasible ones first, the fastest first among them, then those that lack least; `choice`: the one to take, None
    where none fits."""

    topology: Topology
    workload: Workload
    candidates: tuple[Candidate, ...]
    choice: Candidate | None

    @property
    def placement(self) -> Placement:
        """The choice's. CapacityError with what each candidate lacks where there is none."""
        if self.choice is None:
            raise CapacityError(_nothing_fits(self))
        return self.choice.placement

    def for_kind(self, kind: str) -> Candidate | None:
        """The best of a kind: the fastest that fits, or what lacks least; None where it was no candidate."""
        if kind not in KINDS:
            raise SettingError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
        return next((each for each in self.candidates if each.kind == kind), None)

    @property
    def unreachable(self) -> dict[Endpoint, tuple[Edge, ...]]:
        """Endpoints that are in no candidate, and the edges from actors or to learners that have no bandwidth."""
        missing = {at: missing_edges(self.topology, self.workload, at) for at in self.topology.endpoints}
        return {at: edges for at, edges in missing.items() if edges and at.tier in IN_MEMORY}

    def __str__(self) -> str:
        return "\n".join(_text(self))


def order(each: Candidate) -> tuple[bool, int, float]:
    # Equal times differ in their last bits by how they were summed.
    return not each.feasible, sum(each.shortfall_bytes.values()), float(f"{each.transfer_s:.9e}")


def _nothing_fits(plan: Plan) -> str:
    disk = next((each for each in plan.candidates if each.feasible), None)
    lines = [
        f"{_asked(plan)} fit "
        + ("nowhere" if disk is None else "on the disk alone, which has to be asked for: placement='disk'")
    ]
    for kind in KINDS:
        alike = [each for each in plan.candidates if each.kind == kind]
        # Those that lack least come first. Of hundreds of subsets nobody reads more than the best.
        lines += [
            f"{_short(each)} needs {_sizes(each.need_bytes)}: {'fits' if each.feasible else _lacks(each)}"
            for each in alike[:_MOST_LINES]
        ]
        if len(alike) > _MOST_LINES:
            lines.append(f"… and {len(alike) - _MOST_LINES} more of {kind}, which lack as much or more")
    return "\n  ".join([*lines, *_out_of_reach(plan), _what_would_fit(plan)])


def _text(plan: Plan) -> Iterator[str]:
    work, choice = plan.workload, plan.choice
    of_size: dict[tuple[str, int], Candidate] = {}
    for each in plan.candidates:
        of_size.setdefault((each.kind, len(each.rows)), each)
    # The best of each kind, then of each number of endpoints: hundreds of subsets say no more.
    matter = [choice, *map(plan.for_kind, KINDS), *of_size.values()]
    shown = list({id(each): each for each in matter if each is not None}.values())[:_MOST_LINES]
    yield f"{_asked(plan)}; all times are predicted"
    yield (
        f"an iteration: {work.rows_ingested:,.6g} rows in from {_together(work.actors)}, "
        f"{work.rows_delivered:,} out to {_together(work.learners)}"
    )
    lines = [("  placement", "in, µs/row", "out, µs/row", "ms/iteration", "fits", "bytes")]
    for each in sorted(shown, key=order):
        figures = (each.ingestion_s / work.rows_ingested * 1e6, each.delivery_s / work.rows_delivered * 1e6)
        in_us, out_us, all_ms = (f"{figure:.3g}" for figure in (*figures, each.transfer_s * 1e3))
        name = f"{'→' if each is choice else ' '} {_short(each)}"
        lines.append((name, in_us, out_us, all_ms, "yes" if each.feasible else _lacks(each), _sizes(each.need_bytes)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *figures, fits, size in lines:
        right = (figure.rjust(width) for figure, width in zip(figures, widths[1:4], strict=True))
        yield "  ".join([name.ljust(widths[0]), *right, fits.ljust(widths[4]), size]).rstrip()
    if len(plan.candidates) > len(shown):
        yield f"  and {len(plan.candidates) - len(shown):,} more"
    yield from _out_of_reach(plan)
    yield _what_would_fit(plan) if choice is None else _by_how_much(plan.candidates, choice)


def _asked(plan: Plan) -> str:
    return f"{plan.workload.capacity:,} rows of {format_bytes(plan.workload.row_bytes)} on {plan.topology.name}"


def _lacks(each: Candidate) -> str:
    return f"lacks {_sizes(each.shortfall_bytes)}"


def _what_would_fit(plan: Plan) -> str:
    if not plan.candidates:
        there = ", ".join(map(str, plan.topology.endpoints))
        if plan.unreachable:
            return f"no candidate is within reach of all: measure what is missing (conduit topology --measure); there are {there}"
        return f"{plan.topology.name} has nothing of the kinds of candidates that were asked for; it has {there}"
    in_memory = [each for each in plan.candidates if each.kind != "disk"] or plan.candidates
    most = max(_most_rows(each, plan.workload) for each in in_memory)
    return f"room for about {most:,} such rows at most: a smaller capacity, larger budgets or other kinds of candidates would do"


def _most_rows(each: Candidate, workload: Workload) -> int:
    """Whole ones, in the room that its endpoints have."""
    first, *others = each.room_bytes.values()
    room = [max(0, first - workload.side_bytes), *others]
    return sum(size // workload.row_bytes for size in room)


def _by_how_much(candidates: Sequence[Candidate], choice: Candidate) -> str:
    """Against the best of each other kind, and the fastest of its own where it isn't that."""
    fits = [each for each in candidates if each.feasible]
    others = [next((each for each in fits if each.kind == kind), None) for kind in KINDS if kind != choice.kind]
    ratios = [
        f"{each.transfer_s / choice.transfer_s:.3g} × as fast as {_short(each)}" for each in others if each is not None
    ]
    if fits[0].transfer_s * (1 + SAME) < choice.transfer_s:
        ratios.append(
            f"{_short(fits[0])} would be {choice.transfer_s / fits[0].transfer_s:.3g} × as fast, too little to matter"
        )
    return f"choice: {'; '.join([_short(choice), *(ratios or ['nothing else fits'])])}"


def _out_of_reach(plan: Plan) -> list[str]:
    lines = []
    for at, edges in plan.unreachable.items():
        more = f" and {len(edges) - 3} more edges" if len(edges) > 3 else ""
        named = ", ".join(f"{source} → {to}" for source, to in edges[:3])
        lines.append(f"{at} is out of reach: no bandwidth of {named}{more}")
    return lines


def _short(each: Candidate) -> str:
    return each.name if len(each.rows) <= NAMED_DEVICES + 1 else f"{each.kind} of {len(each.rows)}"


def _sizes(size_bytes: Mapping[Endpoint, int]) -> str:
    """`"8 × 22.9 GiB"`, `"12 GiB pinned, 2 × 70 GiB"`; devices aren't named."""
    each = [f"{format_bytes(size)}{f' {at.tier.value}' if at.is_host else ''}" for at, size in size_bytes.items()]
    return ", ".join(f"{times} × {size}" if (times := each.count(size)) > 1 else size for size in dict.fromkeys(each))


def _together(endpoints: Sequence[Endpoint]) -> str:
    """`"pageable"`, `"device:0 … device:7"`."""
    there = list(dict.fromkeys(endpoints))
    return ", ".join(map(str, there)) if len(there) < 4 else f"{there[0]} … {there[-1]}"
