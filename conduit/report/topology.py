"""A topology as tables: which memories there are, how fast each reaches each, and where every figure comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Memory, Topology
from conduit.topology.endpoint import Endpoint, Tier

MARKS = {Source.SPEC: "s", Source.MEASURED: "m", Source.ASSUMED: "a"}
STYLES = {Source.SPEC: "", Source.MEASURED: "green", Source.ASSUMED: "yellow"}
NOISY = 0.1
"""From here on a measurement is said to be noisy: its interquartile range is a tenth of its median."""


def topology_table(topology: Topology) -> Group:
    """Memories, the matrix of bandwidths with α, and the links that edges share, each figure marked spec (s), measured (m) or assumed (a).
    Endpoints that could change places without a figure changing are one row; of nodes that could, two are shown. Eighty columns hold
    eight devices."""
    shown, alike_nodes = typical(topology)
    used = {leg.source for leg in topology.legs.values()} | {memory.source for memory in topology.memories.values()}
    noise = max((leg.noise for leg in topology.legs.values()), default=0.0)
    elsewhere = " (elsewhere)" if topology.machine == "preset" else ""
    words = {Source.SPEC: "spec", Source.MEASURED: f"measured{elsewhere}", Source.ASSUMED: "assumed"}
    marks = ", ".join(f"{MARKS[source]} {words[source]}" for source in Source if source in used)
    notes = [
        f"Figures of {origin(topology)}: {marks}.",
        "Each edge alone, one way; below it α, what a transfer costs before its first byte. – no way there.",
    ]
    if alike_nodes:
        notes.append(f"{alike_nodes} more nodes are like those that are shown.")
    if noise:
        notes.append(
            f"Measurements are noisy by up to ±{noise / 2:.0%}, half the interquartile range; {NOISY / 2:.0%} and more stand in the cell."
        )
    parts = [
        _title(f"{topology.name}: memories, GB"),
        _memories(shown),
        Text(),
        _title(f"{topology.name}: bandwidth from (rows) to (columns), GB/s"),
        _matrix(shown),
    ]
    if topology.links:
        parts += [
            Text(),
            _title(f"{topology.name}: links that edges share; flows over one divide it"),
            _links(topology),
        ]
    return Group(*parts, Text(), *(Text(note, "dim") for note in notes))


def origin(topology: Topology) -> str:
    """Whose figures those are."""
    return "a preset" if topology.machine == "preset" else topology.machine


def sources(topology: Topology) -> str:
    """`"spec, measured and assumed"`, what of it there is among the bandwidths."""
    used = {leg.source for leg in topology.legs.values()}
    found = [source.value for source in Source if source in used]
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def alike(topology: Topology) -> list[tuple[Endpoint, ...]]:
    """The endpoints, those together that could change places without any memory or leg changing."""
    classes: list[list[Endpoint]] = []
    for at in topology.endpoints:
        found = next((each for each in classes if _interchangeable(topology, each[0], at)), None)
        classes.append([at]) if found is None else found.append(at)
    return [tuple(each) for each in classes]


def typical(topology: Topology) -> tuple[Topology, int]:
    """The topology with two nodes of each kind, where there are more that could change places without a figure changing; and how many
    were left out."""
    kinds: list[list[int]] = []
    for node in sorted({at.node for at in topology.endpoints}):
        found = next((kind for kind in kinds if _nodes_alike(topology, kind[0], node)), None)
        kinds.append([node]) if found is None else found.append(node)
    left = {node for kind in kinds for node in kind[2:]}
    return (
        (topology.only([at for at in topology.endpoints if at.node not in left]), len(left)) if left else (topology, 0)
    )


def name_endpoints(endpoints: Iterable[Endpoint]) -> str:
    """`"device:0–7"`, `"pageable, device:0,2"`, `"node1/device:0–3"`, `"node0–17/device:0–3"`."""
    parts: list[tuple[list[int], str]] = []
    for (node, tier), group in groupby(endpoints, key=lambda at: (at.node, at.tier)):
        indices = ",".join(ranges([at.index for at in group]))
        what = (
            f"device:{indices}" if tier is Tier.DEVICE else tier.value if indices == "0" else f"{tier.value}:{indices}"
        )
        if parts and parts[-1][1] == what:
            parts[-1][0].append(node)
        else:
            parts.append(([node], what))
    return ", ".join(what if nodes == [0] else f"node{','.join(ranges(nodes))}/{what}" for nodes, what in parts)


def gigabytes(size_bytes: float) -> str:
    """Of 10⁹ bytes, three figures at least, without the unit."""
    return f"{size_bytes / 1e9:,.0f}" if size_bytes >= 1e11 else f"{size_bytes / 1e9:.3g}"


def speed(bytes_per_s: float) -> str:
    """In GB/s, three figures, without the unit."""
    return f"{bytes_per_s / 1e9:.0f}" if bytes_per_s >= 1e11 else f"{bytes_per_s / 1e9:.3g}"


def duration(seconds: float) -> str:
    """Three figures in the unit that suits, without a space: `"12.5µs"`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g}{unit}"
    return f"{seconds * 1e9:.3g}ns"


def _interchangeable(topology: Topology, one: Endpoint, other: Endpoint) -> bool:
    if (one.tier, one.node) != (other.tier, other.node) or topology.memories[one] != topology.memories[other]:
        return False
    swapped = {one: other, other: one}
    return all(
        topology.legs.get((source, to)) == topology.legs.get((swapped.get(source, source), swapped.get(to, to)))
        for each in (one, other)
        for at in topology.endpoints
        for source, to in ((each, at), (at, each))
    )


def _nodes_alike(topology: Topology, one: int, other: int) -> bool:
    nodes = {one: other, other: one}
    swapped = {at: replace(at, node=nodes.get(at.node, at.node)) for at in topology.endpoints}
    return all(topology.memories.get(swapped[at]) == memory for at, memory in topology.memories.items()) and all(
        topology.legs.get((swapped[source], swapped[to])) == leg
        for (source, to), leg in topology.legs.items()
        if source.node in nodes or to.node in nodes
    )


def ranges(indices: Sequence[int]) -> Iterator[str]:
    """`0 1 2 5` → "0–2", "5"."""
    for _, run in groupby(enumerate(sorted(indices)), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def _memories(topology: Topology) -> Table:
    """Those that are the same together, a figure for each."""
    table = _table("", "all", "free")
    table.add_column()
    kinds: dict[tuple[int, Tier, Memory], list[Endpoint]] = {}
    for at, memory in topology.memories.items():
        kinds.setdefault((at.node, at.tier, memory), []).append(at)
    for (_, _, memory), members in kinds.items():
        capacity = Text(f"{gigabytes(memory.capacity_bytes)} {MARKS[memory.source]}", STYLES[memory.source])
        what = f"{f'{len(members)} × ' if len(members) > 1 else ''}{memory.what}"
        table.add_row(name_endpoints(members), capacity, gigabytes(memory.free_bytes), Text(f"  {what}"))
    return table


def _matrix(topology: Topology) -> Table:
    """The diagonal is a gather within one memory."""
    classes = alike(topology)
    table = _table("", *map(_short, classes))
    for members in classes:
        table.add_row(_short(members), *(_cell(topology, members, others) for others in classes))
    return table


def _cell(topology: Topology, members: Sequence[Endpoint], others: Sequence[Endpoint]) -> Text:
    """Within a class: to itself, and to another of its kind where there are several."""
    at = members[0]
    if members != others:
        return _leg(topology.legs.get((at, others[0])))
    own = _leg(topology.legs.get((at, at)))
    if len(members) == 1:
        return own
    return Text("\n").join([own, Text("to another:", "dim"), _leg(topology.legs.get((at, members[1])))])


def _leg(leg: Leg | None) -> Text:
    if leg is None:
        return Text("–")
    cell = Text(f"{speed(leg.bytes_per_s)} {MARKS[leg.source]}", STYLES[leg.source])
    if leg.latency_s:
        cell.append(f"\n{duration(leg.latency_s)}", "dim")
    return cell.append(f"\n±{leg.noise / 2:.0%}", "red") if leg.noise >= NOISY else cell


def _short(members: Sequence[Endpoint]) -> str:
    """Narrow, so that a matrix of eight devices fits a terminal."""
    return name_endpoints(members).replace("device:", "dev ").replace("/", "/\n")


def _links(topology: Topology) -> Table:
    """Links of one bandwidth together."""
    table = _table("", "GB/s", "edges over each")
    used = Counter(name for route in topology.routes.values() for name in route)
    kinds: dict[tuple[float, Source, int], list[str]] = {}
    for name, link in topology.links.items():
        kinds.setdefault((link.bytes_per_s, link.source, used[name]), []).append(name)
    for (bytes_per_s, source, edges), names in kinds.items():
        shown = ", ".join(names) if len(names) <= 3 else f"{names[0]}, …, {names[-1]} ({len(names)})"
        table.add_row(Text(shown), Text(f"{speed(bytes_per_s)} {MARKS[source]}", STYLES[source]), str(edges))
    return table


def _table(first: str, *headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _title(text: str) -> Text:
    return Text(text, "bold")
