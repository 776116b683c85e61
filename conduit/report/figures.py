"""Figures of topologies and plans. Made with matplotlib's objects alone: no window, no state shared with a caller's own figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from conduit.core.placement import KINDS, format_bytes
from conduit.core.plans import Candidate, Plan
from conduit.errors import MissingExtraError, SettingError
from conduit.report.plan import short_name
from conduit.report.topology import gigabytes, name_endpoints, origin, sources, speed, typical
from conduit.topology.cluster import Edge, Topology
from conduit.topology.endpoint import Endpoint

try:
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import FancyBboxPatch
    from matplotlib.ticker import FuncFormatter, NullLocator
except ImportError as error:
    raise MissingExtraError("figures need matplotlib; install it with: pip install 'conduit-rl[cli]'") from error

# Okabe and Ito's colours, which colour-blind people tell apart; markers say the same once more.
COLOURS: dict[str, str] = dict(
    zip(KINDS, ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#666666"), strict=True)
)
MARKERS: dict[str, str] = dict(zip(KINDS, "sD^ovP", strict=True))
OTHER = "#666666"
INK = "#333333"
FEW = 16
"""Devices of a node that are drawn one by one; more are one box."""
APART = 3.8
"""From node to node, in the figure's own units."""
CLASSES = 6
"""Of bandwidth, at most."""
ALIKE = 1.15
"""Bandwidths whose ratio is smaller are told apart by no eye."""
OCTAVES, FINE = 6, 1.05
"""Of a sweep over row sizes: so many times twice as small as asked; and how far apart the two sizes around a boundary are."""
BARS, LONG = 10, 36
"""Bars of bytes at most, and characters beside one."""
COMPARED = 4
"""Candidates whose bytes are drawn."""


def topology_figure(topology: Topology) -> Figure:
    """Endpoints as boxes, and between them the bandwidth of the slower way, as width and colour."""
    shown, alike_nodes = typical(topology)
    nodes = len({at.node for at in shown.endpoints})
    figure = Figure(figsize=(min(3.5 + 3.5 * nodes, 16), 2.6 + 2.7 * _half(shown)), layout="constrained")
    axes = figure.subplots()
    _draw_topology(axes, shown, alike_nodes)
    figure.suptitle(_plain(_topology_title(topology)), fontsize=11)
    return figure


def plan_figure(plan: Plan, sweep: Sequence[Plan]) -> Figure:
    """A plan in three panels: the topology with its bandwidths, bytes by endpoint against the room, and predicted time by row size.

    `sweep`: plans of the same for several row sizes, as `conduit.report.figures.sweep_rows` makes."""
    shown, alike_nodes = typical(plan.topology)
    nodes = len({at.node for at in shown.endpoints})
    figure = Figure(figsize=(11 + 5 * nodes, 5.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(nodes, 1.0, 1.25))
    _draw_topology(left, shown, alike_nodes)
    left.set_title(f"Bandwidths: {sources(plan.topology)}", fontsize=10)
    _draw_bytes(middle, plan)
    _draw_times(right, sweep, plan.workload.row_bytes)
    work = plan.workload
    choice = "nothing fits" if plan.choice is None else short_name(plan.choice)
    of = f"(model: predicted from figures of {origin(plan.topology)})"
    figure.suptitle(_plain(f"{_subject(plan)}, {format_bytes(work.row_bytes)} each: {choice}   {of}"), fontsize=11)
    return figure


def sweep_figure(sweep: Sequence[Plan]) -> Figure:
    """Predicted time an iteration by row size, a line a kind of placement, up to where it runs out of memory."""
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    _draw_times(axes, sweep)
    of = f"(model: predicted from figures of {origin(sweep[0].topology)})"
    figure.suptitle(_plain(f"{_subject(sweep[0])}   {of}"), fontsize=11)
    return figure


def sweep_rows(planned: Callable[[int], Plan], row_bytes: int) -> list[Plan]:
    """Plans of `planned(row_bytes)` for rows from a 64th of `row_bytes` up to where nothing fits, twice as large each time; between two
    that differ in what fits or in the regime, half-way again and again, to within 5 %."""
    plans = {size: planned(size) for size in (max(row_bytes >> power, 1) for power in range(OCTAVES, -1, -1))}
    while len(plans) < 2 or (plans[max(plans)].choice is not None and max(plans) < row_bytes << 2 * OCTAVES):
        plans[2 * max(plans)] = planned(2 * max(plans))
    for low, high in pairwise(sorted(plans)):
        _refine(planned, plans, low, high)
    return [plans[size] for size in sorted(plans)]


def _refine(planned: Callable[[int], Plan], plans: dict[int, Plan], low: int, high: int) -> None:
    middle = round(math.sqrt(low * high))
    if _features(plans[low]) == _features(plans[high]) or high / low < FINE or middle in (low, high):
        return
    plans[middle] = planned(middle)
    _refine(planned, plans, low, middle)
    _refine(planned, plans, middle, high)


def _features(plan: Plan) -> tuple[str | None, frozenset[str]]:
    return _kind(plan), frozenset(each.kind for each in plan.candidates if each.feasible)


def _subject(plan: Plan) -> str:
    return f"{plan.workload.capacity:,} rows on {plan.topology.name}"


def _plain(text: str) -> str:
    """Names of machines aren't formulas."""
    return text.replace("$", r"\$")


def _topology_title(topology: Topology) -> str:
    return f"{topology.name}\n{sources(topology)} bandwidths of {origin(topology)}"


Point = tuple[float, float]

# The topology: a frame a node, devices in a circle within, its host tiers below. Where all devices reach a host tier alike,
# one line from the frame stands for all.


@dataclass(frozen=True, slots=True)
class Line:
    """Between two points, for `pairs` pairs of endpoints of bandwidth `bytes_per_s`, the slower way."""

    start: Point
    stop: Point
    bytes_per_s: float
    pairs: int
    one_way: bool


def _draw_topology(axes: Axes, topology: Topology, alike_nodes: int) -> None:
    """`alike_nodes`: how many more there are, like those in `topology`."""
    axes.set_axis_off()
    axes.set_aspect("equal")
    nodes = sorted({at.node for at in topology.endpoints})
    half = _half(topology)
    where: dict[Endpoint, Point] = {}
    frames: dict[int, Point] = {}
    for number, node in enumerate(nodes):
        x = APART * number
        devices = [at for at in topology.devices if at.node == node]
        hosts = [at for at in topology.endpoints if at.node == node and at.is_host]
        where |= _around(devices, (x, 0.0)) if len(devices) <= FEW else dict.fromkeys(devices, (x, 0.0))
        bottom = -half - 0.8 if half else 0.0
        where |= {at: (x + 1.5 * (place - (len(hosts) - 1) / 2), bottom) for place, at in enumerate(hosts)}
        if devices:
            frames[node] = (x, -half)
            _frame(axes, x, half)
            axes.text(x - 1.45, half - 0.1, f"node {node}", fontsize=9, color=OTHER, va="top")
    _draw_lines(axes, [*_lines(topology, where, frames)])
    for point in dict.fromkeys(where.values()):
        _box(axes, point, [at for at in where if where[at] == point], topology)
    right = APART * (len(nodes) - 1) + 1.9
    if alike_nodes:
        axes.text(right, 0.0, f"and {alike_nodes}\nmore nodes\nlike these", fontsize=9, color=OTHER, va="center")
    axes.set_xlim(-1.9, max(right, 0.0))
    axes.set_ylim(-half - 1.2 if half else -0.5, half + 0.1 if half else 0.5)


def _half(topology: Topology) -> float:
    """Of the height of a node's frame: none without devices, and less where a circle isn't needed."""
    most = max([0, *Counter(at.node for at in topology.devices).values()])
    return 1.5 if 2 < most <= FEW else 0.7 if most else 0.0


def _around(devices: Sequence[Endpoint], centre: Point) -> dict[Endpoint, Point]:
    """On a circle, the first on top, clockwise; two side by side, one alone in the middle."""
    radius = 1.15 if len(devices) > 1 else 0.0
    angles = [
        math.pi * (1.0 if len(devices) == 2 else 0.5) - 2 * math.pi * place / len(devices)
        for place in range(len(devices))
    ]
    return {
        at: (centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle))
        for at, angle in zip(devices, angles, strict=True)
    }


def _frame(axes: Axes, x: float, half: float) -> None:
    style = "round,pad=0,rounding_size=0.15"
    axes.add_patch(
        FancyBboxPatch((x - 1.55, -half), 3.1, 2 * half, boxstyle=style, fc="#F7F7F7", ec="#BBBBBB", zorder=0)
    )


def _lines(topology: Topology, where: Mapping[Endpoint, Point], frames: Mapping[int, Point]) -> Iterator[Line]:
    """A line a pair; one for all pairs of a host tier and its node's devices, or of two nodes' devices, where these are alike."""
    groups: dict[tuple[object, ...], list[Edge]] = {}
    for one, other in _pairs(topology):
        if one.node != other.node:
            key: tuple[object, ...] = ("nodes", one.node, other.node)
            if one.is_host or other.is_host:
                continue
        elif one.is_host != other.is_host:
            key = ("host", one if one.is_host else other)
        else:
            key = (one, other)
        groups.setdefault(key, []).append((one, other))
    for key, pairs in groups.items():
        speeds = [_slower(topology, pair) for pair in pairs]
        one_way = any(not (topology.reaches(*pair) and topology.reaches(*pair[::-1])) for pair in pairs)
        ends = [(where[one], where[other]) for one, other in pairs]
        if key[0] in ("nodes", "host") and max(speeds) / min(speeds) < ALIKE:
            yield Line(*_joint_ends(pairs[0], where, frames), min(speeds), len(pairs), one_way)
        else:
            for (start, stop), bytes_per_s in zip(ends, speeds, strict=True):
                yield Line(start, stop, bytes_per_s, 1, one_way)


def _joint_ends(pair: Edge, where: Mapping[Endpoint, Point], frames: Mapping[int, Point]) -> tuple[Point, Point]:
    """From frame to frame, or from a host tier straight up to its node's frame."""
    one, other = pair
    if one.node != other.node:
        return (frames[one.node][0] + 1.55, 0.0), (frames[other.node][0] - 1.55, 0.0)
    x, y = where[one if one.is_host else other]
    middle, bottom = frames[one.node]
    return (x, y), (min(max(x, middle - 1.4), middle + 1.4), bottom)


def _pairs(topology: Topology) -> Iterator[Edge]:
    for number, one in enumerate(topology.endpoints):
        for other in topology.endpoints[number + 1 :]:
            if topology.reaches(one, other) or topology.reaches(other, one):
                yield one, other


def _slower(topology: Topology, pair: Edge) -> float:
    return min(topology.legs[edge].bytes_per_s for edge in (pair, (pair[1], pair[0])) if edge in topology.legs)


def _draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    classes = _classes([line.bytes_per_s for line in lines])
    handles = []
    for rank, (low, high) in enumerate(classes):
        share = rank / (len(classes) - 1) if len(classes) > 1 else 1.0
        colour, width = colormaps["viridis_r"](0.2 + 0.75 * share), 1.0 + 2.4 * share
        members = [line for line in lines if low <= line.bytes_per_s <= high]
        for line in members:
            (x, y), (x_stop, y_stop) = line.start, line.stop
            style = ":" if line.one_way else "-"
            axes.plot(
                [x, x_stop], [y, y_stop], color=colour, lw=width, ls=style, zorder=1 + share, solid_capstyle="round"
            )
        span = speed(low) if speed(low) == speed(high) else f"{speed(low)}–{speed(high)}"
        pairs = sum(line.pairs for line in members)
        handles.append(
            Line2D([], [], color=colour, lw=width, label=f"{span} GB/s ({pairs} pair{'s' if pairs > 1 else ''})")
        )
    if handles:
        axes.legend(
            handles=handles[::-1], loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=2, frameon=False, fontsize=8.5
        )


def _classes(speeds: Sequence[float]) -> list[tuple[float, float]]:
    """Slowest first: bandwidths that no eye tells apart together, at most `CLASSES`, cut at the widest gaps."""
    ordered = sorted(speeds)
    gaps = sorted(((high / low, number) for number, (low, high) in enumerate(pairwise(ordered), 1)), reverse=True)
    cuts = sorted(number for ratio, number in gaps[: CLASSES - 1] if ratio > ALIKE)
    bounds = [0, *cuts, len(ordered)]
    return [(ordered[start], ordered[stop - 1]) for start, stop in pairwise(bounds) if start < stop]


def _box(axes: Axes, point: Point, members: Sequence[Endpoint], topology: Topology) -> None:
    memory = topology.memories[members[0]]
    each = " each" if len(members) > 1 else ""
    axes.text(
        *point,
        f"{name_endpoints(members).rpartition('/')[2]}\n{gigabytes(memory.capacity_bytes)} GB{each}",
        ha="center",
        va="center",
        fontsize=8,
        color=INK,
        zorder=5,
        bbox={
            "boxstyle": "round,pad=0.35",
            "fc": "#EAF3FA" if not members[0].is_host else "#FBEFD9",
            "ec": INK,
            "lw": 0.8,
        },
    )


# Bytes: a bar for each endpoint of the choice and of the next, as a part of its room; endpoints with the same bytes are one bar.


def _draw_bytes(axes: Axes, plan: Plan) -> None:
    rows: list[tuple[Candidate, list[Endpoint]]] = [
        (each, endpoints) for each in _compared(plan) for endpoints in _same_bytes(each)
    ]
    labels = []
    if len(rows) > BARS:
        axes.text(1.5, BARS - 0.3, f"and {len(rows) - BARS} more", fontsize=8, ha="right", color=INK)
    for place, (each, endpoints) in enumerate(rows[:BARS]):
        need, room = each.need_bytes[endpoints[0]], each.room_bytes[endpoints[0]]
        part = need / room if room else math.inf
        fits = need <= room
        colour = COLOURS[each.kind]
        axes.barh(
            place + 0.12,
            min(part, 1.5),
            height=0.5,
            color=colour if fits else "white",
            edgecolor=colour,
            hatch=None if fits else "////",
            alpha=1.0 if each == plan.choice or not fits else 0.55,
        )
        times = f"{len(endpoints)} × " if len(endpoints) > 1 else ""
        verdict = "" if fits else ", out of memory"
        axes.text(
            0.02,
            place - 0.17,
            f"{times}{gigabytes(need)} of {gigabytes(room)} GB{verdict}",
            fontsize=8,
            va="bottom",
            color=INK,
        )
        where = name_endpoints(endpoints)
        where = where if len(where) < LONG else f"{len(endpoints)} endpoints"
        labels.append(f"{'→ ' if each == plan.choice else ''}{short_name(each)}\n{where}")
    axes.axvline(1.0, color=INK, lw=1.2)
    axes.set_xlim(0, 1.55)
    axes.set_yticks([place + 0.12 for place in range(len(labels))], labels, fontsize=8)
    axes.set_ylim(max(len(labels), 3) - 0.2, -0.5)
    axes.set_xticks([0, 0.5, 1.0, 1.5], ["0", "50 %", "room", "150 %\nand more"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Bytes by endpoint, as a part of its room", fontsize=10)


def _compared(plan: Plan) -> list[Candidate]:
    """The choice, then the first of each other kind, then the next best."""
    chosen = [] if plan.choice is None else [plan.choice]
    firsts: dict[str, Candidate] = {}
    for each in plan.candidates:
        firsts.setdefault(each.kind, each)
    others = [each for kind, each in firsts.items() if plan.choice is None or kind != plan.choice.kind]
    rest = [each for each in plan.candidates if each not in chosen and each not in others]
    return [*chosen, *others, *rest][:COMPARED] if len(others) < COMPARED else [*chosen, *others]


def _same_bytes(each: Candidate) -> list[list[Endpoint]]:
    together: dict[tuple[str, str], list[Endpoint]] = {}
    for at, need in each.need_bytes.items():
        together.setdefault((gigabytes(need), f"{each.room_bytes[at]:.2g}"), []).append(at)
    return list(together.values())


# Time by row size: the fastest of each kind, and which of them is chosen where.


def _draw_times(axes: Axes, sweep: Sequence[Plan], mark_bytes: int | None = None) -> None:
    sweep = sorted(sweep, key=lambda plan: plan.workload.row_bytes)
    sizes = [plan.workload.row_bytes for plan in sweep]
    if len(set(sizes)) < 2:
        raise SettingError(f"sweep has plans for rows of {sizes} bytes; expected at least two different sizes")
    kinds = [kind for kind in KINDS if any(plan.for_kind(kind) for plan in sweep)]
    for kind in kinds:
        times = [
            min((each.transfer_s for each in plan.candidates if each.feasible and each.kind == kind), default=None)
            for plan in sweep
        ]
        points = [(size, 1e3 * time) for size, time in zip(sizes, times, strict=True) if time is not None]
        colour = COLOURS[kind]
        if points:
            # Where a boundary was looked for, points lie too close for a marker each.
            spaced = [at for at, (size, _) in enumerate(points) if not at or size / points[at - 1][0] > 1.3]
            style = {"color": colour, "marker": MARKERS[kind], "markevery": spaced}
            axes.plot(*zip(*points, strict=True), **style, ms=4, lw=1.6, label=kind)
        if points and points[-1][0] < sizes[-1]:
            axes.plot(*points[-1], marker="X", ms=11, color=colour, mec="white", mew=0.8, ls="none", zorder=4)
    tilted = _shade_regimes(axes, sweep)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=30, labelsize=8)
    axes.set_xlim(sizes[0], sizes[-1])
    if mark_bytes is not None:
        axes.axvline(mark_bytes, color=INK, lw=1, ls=":")
    axes.set_xlabel("bytes of a row")
    axes.set_ylabel("predicted ms an iteration, ingestion + delivery")
    handles, labels = axes.get_legend_handles_labels()
    handles.append(Line2D([], [], marker="X", ms=9, color=OTHER, mec="white", ls="none"))
    axes.legend(handles, [*labels, "out of memory beyond"], fontsize=8.5, frameon=False, loc="upper left")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    pad = 26 + 3.2 * tilted  # points: the names stand between
    axes.set_title("Time by row size; the strip: what is chosen", fontsize=10, pad=pad, loc="left")


@dataclass(frozen=True, slots=True)
class Regime:
    """Row sizes over which the choice is of one kind; None where nothing fits."""

    kind: str | None
    name: str
    start_bytes: float
    stop_bytes: float


def regimes(sweep: Sequence[Plan]) -> list[Regime]:
    """In order of row size; a boundary lies half-way, on a logarithmic scale, between the two row sizes that it was found between."""
    ordered = sorted(sweep, key=lambda plan: plan.workload.row_bytes)
    runs = [list(run) for _, run in groupby(ordered, key=_kind)]
    edges = [math.sqrt(low[-1].workload.row_bytes * high[0].workload.row_bytes) for low, high in pairwise(runs)]
    edges = [ordered[0].workload.row_bytes, *edges, ordered[-1].workload.row_bytes]
    return [Regime(_kind(run[0]), _regime_name(run), *span) for run, span in zip(runs, pairwise(edges), strict=True)]


def _kind(plan: Plan) -> str | None:
    return None if plan.choice is None else plan.choice.kind


def _regime_name(run: Sequence[Plan]) -> str:
    """`"pinned"`, `"2–8 GPUs"`, `"8 GPUs + host"`."""
    choices = [plan.choice for plan in run if plan.choice is not None]
    if not choices:
        return "nothing fits"
    counts = [sum(not at.is_host for at in each.placement.endpoints) for each in choices]
    if not max(counts):
        return choices[0].kind.removeprefix("cpu_")
    few, many = min(counts), max(counts)
    gpus = f"{few if few == many else f'{few}–{many}'} GPU{'s' if many > 1 else ''}"
    return f"{gpus} + host" if choices[0].kind == "mixed" else gpus


def _shade_regimes(axes: Axes, sweep: Sequence[Plan]) -> int:
    """A strip on top in the colour of what is chosen, and a line down where that changes. How long the longest name is of those that
    have no room to lie level."""
    found, tilted = regimes(sweep), 0
    whole = math.log(found[-1].stop_bytes / found[0].start_bytes)
    for number, regime in enumerate(found):
        colour = "white" if regime.kind is None else COLOURS[regime.kind]
        axes.axvspan(regime.start_bytes, regime.stop_bytes, 1.0, 1.03, color=colour, clip_on=False, lw=0)
        if number:
            axes.axvline(regime.start_bytes, color=OTHER, lw=0.8, ls="--", zorder=0)
        wide = math.log(regime.stop_bytes / regime.start_bytes) / whole > 0.016 * len(regime.name)
        tilted = tilted if wide else max(tilted, len(regime.name))
        axes.annotate(
            regime.name,
            (math.sqrt(regime.start_bytes * regime.stop_bytes), 1.04),
            xycoords=axes.get_xaxis_transform(),
            rotation=0 if wide else 40,
            ha="center" if wide else "left",
            va="bottom",
            fontsize=8,
            color=INK,
            annotation_clip=False,
        )
    return tilted
