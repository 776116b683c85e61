"""Which placements there are to choose from, and which is taken (paper §5.2, Eq. 1, Alg. 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from os import PathLike

from conduit.core.placement import KINDS, Bytes, Placement, budgets_within, kinds_of, parse_bytes
from conduit.core.plans import IN_MEMORY, Candidate, Plan, order
from conduit.core.transfer_time import Survey, Timed
from conduit.core.workload import Workload, ports_at, room_bytes
from conduit.errors import SettingError
from conduit.topology.cluster import Topology
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier
from conduit.topology.files import named

BETTER = 1.05
"""A placement stays until another is by this factor faster: a move isn't free, and figures are not exact."""

ALIKE = 1.01
"""Placements within this factor are alike: no bandwidth is known better, and the simpler one has less that can go wrong."""

ALL_SUBSETS = 8
"""Up to so many devices every subset is a candidate (paper §5.2); of more, one of each size."""


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
        [at for at in survey.endpoints if at.tier is tier] for tier in (*IN_MEMORY, Tier.DISK)
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
    return tuple(sorted(distinct.values(), key=order))


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


def _simplicity(each: Candidate) -> tuple[object, ...]:
    rows = each.rows.values()
    return len(rows), max(rows) > min(rows) + 1, order(each)


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
