"""Which placement, and why: every candidate with its bytes and its times, as a value (paper §5.2, Eq. 1, Alg. 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from os import PathLike

from conduit.core.placement import KINDS, Bytes, Placement, budgets_within, format_bytes, kinds_of, parse_bytes
from conduit.core.transfer_time import SAME, Survey, Timed, missing_edges
from conduit.core.workload import Workload, ports_at, room_bytes
from conduit.errors import CapacityError, SettingError
from conduit.topology.cluster import Edge, Topology
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier
from conduit.topology.files import named

BETTER = 1.05
"""A placement stays until another is by this factor faster: a move isn't free, and figures are not exact."""

ALIKE = 1.01
"""Placements within this factor are alike: no bandwidth is known better, and the simpler one has less that can go wrong."""

ALL_SUBSETS = 8
"""Up to so many devices every subset is a candidate (paper §5.2); of more, one of each size."""

_MOST_LINES = 12  # of a table: eight devices have 255 subsets
_TIERS = (Tier.PAGEABLE, Tier.PINNED, Tier.DEVICE)


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
        return {at: edges for at, edges in missing.items() if edges and at.tier in _TIERS}

    def __str__(self) -> str:
        return "\n".join(_text(self))


def plan(
    topology: Topology | str | PathLike[str],
    *,
    row_bytes: Bytes,
    capacity: int,
    batch_size: int,
    actors: int | Endpoint | str | Sequence[Endpoint | str] = 1,
    learners: int | Endpoint | str | Sequence[Endpoint | str] = 1,
    replay_ratio: float = 1.0,
    candidates: str | Sequence[str] = "auto",
    budgets: Mapping[str, Bytes] | None = None,
    reserve: float = 0.0,
    staged_batches: int = 1,
    side_bytes: int = 0,
    current: Placement | None = None,
) -> Plan:
    """Where `capacity` rows should live, without a store: all that was looked at, and the choice. All times are predictions.

    - `topology`: or a preset's name ("a100x8"), or the path of a saved one
    - `row_bytes`: or "192KiB"
    - `actors`, `learners`: where they are ("device:3"), or how many: actors are then on the host, learners on the devices in turn (on
      the host where there are none)
    - `replay_ratio`: rows delivered for each row ingested
    - `candidates`: "auto", or the kinds to choose from, of KINDS
    - `budgets`: `{"pageable": "24GiB", "device": 8_000_000_000}`, each endpoint's at most; `reserve`: part of each memory to keep free
    - `staged_batches`, `side_bytes`: as in Workload
    - `current`: where the rows are now, or None; they stay unless another placement is clearly faster

    SettingError, CapacityError (budgets) or TopologyError names what can't be; that nothing fits is `choice` None."""
    where = topology if isinstance(topology, Topology) else named(topology)
    if current is not None:
        if not isinstance(current, Placement):
            raise SettingError(f"current={current!r}: expected a conduit.Placement, where the rows are now, or None")
        for at in current.endpoints:
            where.memory(at)
    size = _size_of(row_bytes)
    workload = Workload(
        row_bytes=size,
        capacity=capacity,
        batch_size=batch_size,
        actors=ports_at("actors", actors, [PAGEABLE], where),
        learners=ports_at("learners", learners, where.devices or [PAGEABLE], where),
        replay_ratio=replay_ratio,
        staged_batches=staged_batches,
        side_bytes=side_bytes,
    )
    return plan_for(
        where, workload, kinds_of("candidates", candidates), budgets_within(where, budgets), reserve, current
    )


def plan_for(
    topology: Topology,
    workload: Workload,
    kinds: Sequence[str] = KINDS,
    budgets: Mapping[Tier, int] | None = None,
    reserve: float = 0.0,
    current: Placement | None = None,
) -> Plan:
    """The same, of values: `plan` after its arguments were read."""
    looked_at = candidates(topology, workload, room_bytes(topology, workload, budgets or {}, reserve), kinds, current)
    # Who asks for nothing in particular wants no disk filled; and sees what it would cost.
    allowed = [each for each in looked_at if each.kind != "disk" or kinds != KINDS or each.placement == current]
    return Plan(topology, workload, looked_at, choose(allowed, current))


def candidates(
    topology: Topology,
    workload: Workload,
    room: Mapping[Endpoint, int],
    kinds: Sequence[str] = KINDS,
    current: Placement | None = None,
) -> tuple[Candidate, ...]:
    """All of `kinds`, in a plan's order: host memories, every device, every subset of devices, each with even shares (as far as they fit)
    and with the fastest ones; "mixed" where none of the other device kinds asked for fits. `current` is among them, whatever its shares.

    What an actor doesn't reach, or doesn't reach a learner, is in none."""
    survey = Survey(topology, workload, room)
    found: list[Candidate] = []
    if current is not None and _kind(current.endpoints) in kinds and set(current.endpoints) <= {*survey.endpoints}:
        rows = list(current.rows(workload.capacity).values())
        now = survey.timed([rows], [current.endpoints])
        found = [_candidate(each, current, workload, room) for each in now]

    def add(sets: Iterable[Sequence[Endpoint]]) -> bool:
        """Whether any fits."""
        more = [_candidate(each, _of_rows(each.rows), workload, room) for each in survey.placed(sets)]
        found.extend(more)
        return any(each.feasible for each in more)

    pageable, pinned, devices, disks = (
        [at for at in survey.endpoints if at.tier is tier] for tier in (*_TIERS, Tier.DISK)
    )
    if "disk" in kinds:
        add((at,) for at in disks)
    for kind, hosts in (("cpu_pageable", pageable), ("cpu_pinned", pinned)):
        if kind in kinds:
            add([*((at,) for at in hosts), *([hosts] if len(hosts) > 1 else [])])
    subsets = list(_subsets(devices) if len(devices) <= ALL_SUBSETS else survey.grown(devices))
    fits = False
    if "single_gpu" in kinds:
        fits |= add((at,) for at in devices)
    if "shared_gpu" in kinds:
        fits |= add(used for used in subsets if len(used) > 1)
    if "mixed" in kinds and not fits:
        add((*hosts, *used) for used in subsets for hosts in (pageable, pinned) if hosts)
    distinct: dict[frozenset[tuple[Endpoint, int]], Candidate] = {}
    for each in found:
        distinct.setdefault(frozenset(each.rows.items()), each)
    return tuple(sorted(distinct.values(), key=_order))


def choose(candidates: Sequence[Candidate], current: Placement | None = None) -> Candidate | None:
    """The fastest that fits (Alg. 1); None where none does. Of those within `ALIKE` of it, or within the noise of the figures, the one
    over the fewest endpoints, rather even than uneven, and then the fastest. `current`, where it fits, unless the fastest is faster by
    more than `BETTER` and more than the noise."""
    feasible = [each for each in candidates if each.feasible]
    if not feasible:
        return None
    fastest = min(feasible, key=lambda each: each.transfer_s)

    def close(each: Candidate, factor: float) -> bool:
        return each.transfer_s <= fastest.transfer_s * max(factor, 1 + each.noise, 1 + fastest.noise)

    now = next((each for each in feasible if each.placement == current), None)
    if now is not None and close(now, BETTER):
        return now
    return min((each for each in feasible if close(each, ALIKE)), key=_simplicity)


def _order(each: Candidate) -> tuple[bool, int, float]:
    # Equal times differ in their last bits by how they were summed.
    return not each.feasible, sum(each.shortfall_bytes.values()), float(f"{each.transfer_s:.9e}")


def _simplicity(each: Candidate) -> tuple[object, ...]:
    rows = each.rows.values()
    return len(rows), max(rows) > min(rows) + 1, _order(each)


def _of_rows(rows: Mapping[Endpoint, int]) -> Placement:
    capacity = sum(rows.values())
    return Placement(tuple(rows), tuple(each / capacity for each in rows.values()))


def _candidate(each: Timed, placement: Placement, workload: Workload, room: Mapping[Endpoint, int]) -> Candidate:
    need = {at: rows * workload.row_bytes for at, rows in each.rows.items()}
    need[placement.endpoints[0]] += workload.side_bytes
    return Candidate(
        _kind(placement.endpoints),
        placement,
        each.rows,
        need,
        {at: room[at] for at in need},
        {at: size - room[at] for at, size in need.items() if size > room[at]},
        each.ingestion_s,
        each.delivery_s,
        each.noise,
    )


def _subsets(devices: Sequence[Endpoint]) -> Iterator[tuple[Endpoint, ...]]:
    """All but the empty one, the smaller first."""
    for size in range(1, len(devices) + 1):
        yield from combinations(devices, size)


def _kind(endpoints: Sequence[Endpoint]) -> str:
    hosts = [at for at in endpoints if at.is_host]
    if any(at.tier is Tier.DISK for at in hosts):
        return "disk"
    if not hosts:
        return "single_gpu" if len(endpoints) == 1 else "shared_gpu"
    if len(hosts) < len(endpoints):
        return "mixed"
    return "cpu_pinned" if all(at.tier is Tier.PINNED for at in hosts) else "cpu_pageable"


def _size_of(row_bytes: Bytes) -> int:
    try:
        size = parse_bytes(row_bytes)
        if not isinstance(row_bytes, str) and size != row_bytes:
            raise ValueError("not a whole number of bytes")
    except ValueError as error:
        raise SettingError(
            f"row_bytes={row_bytes!r}: {error}; expected a whole number or a size such as '192KiB'"
        ) from None
    return size


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
    for each in sorted(shown, key=_order):
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
    return each.name if len(each.rows) <= ALL_SUBSETS + 1 else f"{each.kind} of {len(each.rows)}"


def _sizes(size_bytes: Mapping[Endpoint, int]) -> str:
    """`"8 × 22.9 GiB"`, `"12 GiB pinned, 2 × 70 GiB"`; devices aren't named."""
    each = [f"{format_bytes(size)}{f' {at.tier.value}' if at.is_host else ''}" for at, size in size_bytes.items()]
    return ", ".join(f"{times} × {size}" if (times := each.count(size)) > 1 else size for size in dict.fromkeys(each))


def _together(endpoints: Sequence[Endpoint]) -> str:
    """`"pageable"`, `"device:0 … device:7"`."""
    there = list(dict.fromkeys(endpoints))
    return ", ".join(map(str, there)) if len(there) < 4 else f"{there[0]} … {there[-1]}"
