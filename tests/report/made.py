"""Plans made by hand, whose every figure is known."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, RenderableType

from conduit.core.placement import Placement
from conduit.core.plans import Candidate, Plan
from conduit.core.workload import Workload
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Link, Memory, Topology
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier

GB = 10**9
D = [Endpoint(Tier.DEVICE, index) for index in range(8)]


def text(renderable: RenderableType, width: int = 80) -> str:
    """As a terminal without colours shows it."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def topology(devices: int = 2, machine: str = "preset") -> Topology:
    """Devices that are all alike: 200 GB/s to another after 9 µs, measured; 20 GB/s to and from pinned memory, spec."""
    at = D[:devices]
    memories = {each: Memory(500 * GB, 400 * GB, Source.ASSUMED, "host memory") for each in (PAGEABLE, PINNED)}
    memories |= {each: Memory(80 * GB, 75 * GB, Source.SPEC, "A100") for each in at}
    legs = {(each, each): Leg(10e9) for each in (PAGEABLE, PINNED)} | {(each, each): Leg(1000e9) for each in at}
    legs |= {(PAGEABLE, PINNED): Leg(8e9), (PINNED, PAGEABLE): Leg(8e9)}
    for each in at:
        legs |= {(PINNED, each): Leg(20e9, 0.0, Source.SPEC), (each, PINNED): Leg(20e9, 0.0, Source.SPEC)}
        legs |= {(PAGEABLE, each): Leg(5e9), (each, PAGEABLE): Leg(5e9)}
        legs |= {(each, other): Leg(200e9, 9e-6, Source.MEASURED, 0.04) for other in at if other != each}
    links = {f"{each} {way}": Link(300e9, Source.SPEC) for each in at for way in ("out", "in")}
    routes = {(one, other): (f"{one} out", f"{other} in") for one in at for other in at if one != other}
    return Topology(f"made{devices}", memories, legs, links, routes, machine)


def candidate(
    kind: str, need: Mapping[Endpoint, int], ingestion_s: float, delivery_s: float, room: int = 70 * GB
) -> Candidate:
    """Of rows of 1 kB; each endpoint has `room`."""
    return Candidate(
        kind,
        Placement(tuple(need), tuple(float(size) for size in need.values())),
        {at: size // 1000 for at, size in need.items()},
        need,
        dict.fromkeys(need, room),
        {at: size - room for at, size in need.items() if size > room},
        ingestion_s,
        delivery_s,
    )


def plan(
    candidates: list[Candidate], choice: Candidate | None = None, *, devices: int = 8, row_bytes: int = 1000
) -> Plan:
    work = Workload(row_bytes, 160_000_000, 500, (PAGEABLE,), (D[0], D[1]), replay_ratio=2.0)
    return Plan(topology(devices), work, tuple(candidates), choice)
