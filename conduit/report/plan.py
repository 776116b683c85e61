"""A plan as a table and as a record: every candidate with its bytes and its times, and why the choice is what it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from conduit.core.placement import format_bytes
from conduit.core.plans import Candidate, Plan
from conduit.report.topology import gigabytes, name_endpoints, origin, ranges, sources
from conduit.topology.endpoint import Endpoint

MOST = 12
"""Rows that a table has: eight devices alone have 255 subsets."""


def plan_table(plan: Plan) -> Table:
    """One row a candidate, in the plan's order: bytes on each endpoint, predicted times a row and an iteration, how much slower it is
    than the fastest that fits, and what lacks where it doesn't fit. Those of a kind that are equally fast are one row. Of more than
    `MOST` rows, the choice, the first of each kind, and then the first."""
    work, groups = plan.workload, alike_candidates(plan)
    shown = _shown(plan, groups)
    table = Table(
        title=Text(f"{work.capacity:,} rows of {format_bytes(work.row_bytes)} on {plan.topology.name}", "italic"),
        caption=Text(_caption(plan, len(plan.candidates) - sum(len(groups[number]) for number in shown)), "dim italic"),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("placement", overflow="fold")
    table.add_column("alike", justify="right", no_wrap=True)
    table.add_column("GB", justify="right", overflow="fold")
    for heading in ("ingest\nµs/row", "deliver\nµs/row", "ms per\niter.", "× the\nbest"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fits, or\nlacks GB", justify="right", overflow="fold")
    best_s = min((each.transfer_s for each in plan.candidates if each.feasible), default=None)
    for number in shown:
        each, *others = groups[number]
        chosen = each == plan.choice
        table.add_row(
            f"{'→ ' if chosen else '  '}{short_name(each)}",
            f"+{len(others)}" if others else "",
            sizes(each, each.need_bytes),
            f"{1e6 * each.ingestion_s / work.rows_ingested:.3g}",
            f"{1e6 * each.delivery_s / work.rows_delivered:.3g}",
            f"{1e3 * each.transfer_s:.3g}",
            f"{each.transfer_s / best_s:.2f}" if best_s else "",
            Text("yes") if each.feasible else Text(sizes(each, each.shortfall_bytes), "red"),
            style="bold green" if chosen else "" if each.feasible else "dim",
        )
    return table


def plan_record(plan: Plan) -> dict[str, Any]:
    """The same, of every candidate, in plain values for JSON; seconds and bytes. `"kind": "model"`: all times are predictions."""
    work, topology = plan.workload, plan.topology
    return {
        "kind": "model",
        "topology": {"name": topology.name, "machine": topology.machine, "figures": sources(topology)},
        "workload": {
            "row_bytes": work.row_bytes,
            "capacity": work.capacity,
            "batch_size": work.batch_size,
            "actors": [str(at) for at in work.actors],
            "learners": [str(at) for at in work.learners],
            "replay_ratio": work.replay_ratio,
            "rows_ingested": work.rows_ingested,
            "rows_delivered": work.rows_delivered,
        },
        "choice": None if plan.choice is None else plan.choice.name,
        "candidates": [_record(each, each == plan.choice) for each in plan.candidates],
    }


def alike_candidates(plan: Plan) -> list[list[Candidate]]:
    """The candidates, those of one kind that are equally fast and lack the same together; the choice is the first of its group."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for each in plan.candidates:
        figures = f"{each.ingestion_s:.3g} {each.delivery_s:.3g} {sizes(each, each.shortfall_bytes)}"
        groups.setdefault((each.kind, figures), []).append(each)
    return [sorted(group, key=lambda each: each != plan.choice) for group in groups.values()]


def short_name(each: Candidate) -> str:
    """`"shared_gpu(0–7)"`; `"shared_gpu(23 devices)"` where that would be long; of host memory its kind, and its nodes where it isn't
    that of node 0 alone."""
    devices = [at for at in each.placement.endpoints if not at.is_host]
    which = name_endpoints(devices).replace("device:", "")
    if not devices:
        nodes = [at.node for at in each.placement.endpoints]
        return f"{each.kind}({','.join(ranges(nodes))})" if any(nodes) else each.kind
    return f"{each.kind}({which if len(which) < 30 else f'{len(devices)} devices'})"


def sizes(each: Candidate, size_bytes: Mapping[Endpoint, int]) -> str:
    """GB by endpoint, in short: `"8 × 24.6"`, `"8 × 74 + 553 pinned"`; where it has but one, its kind says which."""
    together: dict[tuple[str, str], int] = {}
    for at, size in sorted(size_bytes.items(), key=lambda each: each[0].is_host):
        key = (gigabytes(size), f" {at}" if at.is_host and len(each.need_bytes) > 1 else "")
        together[key] = together.get(key, 0) + 1
    return " + ".join(f"{f'{times} × ' if times > 1 else ''}{size}{where}" for (size, where), times in together.items())


def _shown(plan: Plan, groups: list[list[Candidate]]) -> list[int]:
    """Which groups, in order."""
    first: dict[str, int] = {}
    for number, group in enumerate(groups):
        first.setdefault(group[0].kind, number)
    chosen = [number for number, group in enumerate(groups) if group[0] == plan.choice]
    return sorted(list(dict.fromkeys([*chosen, *first.values(), *range(len(groups))]))[:MOST])


def _caption(plan: Plan, left: int) -> str:
    work = plan.workload
    lines = [f"{left:,} more candidates are left out."] if left else []
    if plan.choice is None:
        lines.append("Nothing fits.")
    if plan.unreachable:
        lines.append(f"No candidate, for a bandwidth is missing: {name_endpoints(plan.unreachable)}.")
    lines.append(f"Model: times are predicted from {sources(plan.topology)} bandwidths of {origin(plan.topology)}.")
    each = "each of " if len(work.learners) > 1 else ""
    ingested = f"{work.rows_ingested:,.4g} rows from {_ports('actor', work.actors)}"
    delivered = f"{work.batch_size:,} to {each}{_ports('learner', work.learners)}"
    return "\n".join([*lines, f"An iteration ingests {ingested} and delivers {delivered}."])


def _ports(noun: str, at: tuple[Endpoint, ...]) -> str:
    return f"{len(at)} {noun}{'s' if len(at) > 1 else ''} at {name_endpoints(dict.fromkeys(at))}"


def _record(each: Candidate, chosen: bool) -> dict[str, Any]:
    def by_name(values: Mapping[Endpoint, int]) -> dict[str, int]:
        return {str(at): value for at, value in values.items()}

    return {
        "name": each.name,
        "kind": each.kind,
        "chosen": chosen,
        "feasible": each.feasible,
        "rows": by_name(each.rows),
        "need_bytes": by_name(each.need_bytes),
        "room_bytes": by_name(each.room_bytes),
        "shortfall_bytes": by_name(each.shortfall_bytes),
        "ingestion_s": each.ingestion_s,
        "delivery_s": each.delivery_s,
        "transfer_s": each.transfer_s,
    }
