"""What this machine has, as far as it can be told without measuring: a topology to plan with until it is probed, and to probe by."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from conduit.errors import ConduitError, TopologyError
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Link, Memory, Topology
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier
from conduit.topology.files import this_machine
from conduit.topology.host_memory import free_host_bytes, host_bytes
from conduit.topology.nvidia import SWITCH, Gpu, Gpus, gpus

HOST = "host"
"""The hardware of a device whose memory is the host's: a CPU that a framework calls a device."""

FreeBytes = Callable[[Endpoint], int]

_COPY_BYTES_PER_S, _COPY_LATENCY_S = 5e9, 20e-6
"""Assumed of one thread that gathers rows in host memory, and of any device that nothing is known of. Low: what was measured must not look
worse than what was assumed."""
_HOST_BYTES_PER_S = 10e9
"""Assumed of all copies within host memory together."""
_DISK_BYTES_PER_S, _DISK_LATENCY_S = 0.5e9, 100e-6
_DEVICE_LATENCY_S = 10e-6
"""Assumed of a transfer that a device makes: a launch."""


def discover(
    endpoints: Sequence[Endpoint] | None = None,
    free_bytes: FreeBytes | None = None,
    *,
    hardware: Mapping[Endpoint, str] | None = None,
    disk: str | os.PathLike[str] | None = None,
    root: Path = Path("/"),
) -> Topology:
    """The topology of `endpoints` on this machine, every memory measured, every bandwidth the maker's (spec) or assumed.

    - `endpoints`, `free_bytes`: a backend's; by default the host's, a folder's, and those of the GPUs that CUDA_VISIBLE_DEVICES leaves. An
      endpoint whose memory nobody can tell isn't in the topology
    - `hardware`: what a device is, by its endpoint: a GPU's UUID or PCI id, or HOST. Of a device that isn't in it, or is none of NVML's,
      everything is assumed: a number isn't enough, for CUDA's order isn't NVML's
    - `disk`: the folder whose free space counts without `free_bytes`
    - `root`: stands in for / in tests

    Whatever is missing (nvidia-ml-py, a driver, psutil, /proc, /sys) only makes for fewer figures. TopologyError for `hardware` of an endpoint
    that isn't there."""
    there = gpus()
    if endpoints is None:
        visible = there.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
        devices: dict[Endpoint, Gpu | None] = {Endpoint(Tier.DEVICE, index): gpu for index, gpu in enumerate(visible)}
        endpoints = (PAGEABLE, *([PINNED] if devices else []), DISK, *devices)
        hosted: set[Endpoint] = set()
    else:
        hardware = hardware or {}
        for at in hardware:
            if at not in endpoints or at.is_host:
                expected = ", ".join(str(each) for each in endpoints if not each.is_host) or "none, for there are none"
                raise TopologyError(f"hardware of {at}: there is no such device; expected of {expected}")
        devices = {at: there.named(hardware.get(at, "")) for at in endpoints if not at.is_host}
        hosted = {at for at, what in hardware.items() if what == HOST}
    memories = {
        at: memory
        for at in endpoints
        if (memory := _memory(at, devices.get(at), hosted, free_bytes, disk, root)) is not None
    }
    wires = _Wires(there, {at: devices.get(at) for at in memories}, hosted)
    edges = [(source, to) for source in memories for to in memories]
    shared = {edge: tuple(wires.shared(*edge)) for edge in edges}
    links = {name: link for links in shared.values() for name, link in links}
    # A link that one edge alone goes over says no more than its leg.
    uses = [name for links in shared.values() for name, _ in links]
    links = {name: link for name, link in links.items() if uses.count(name) > 1}
    routes = {edge: tuple(name for name, _ in each if name in links) for edge, each in shared.items()}

    return Topology(
        name=socket.gethostname(),
        memories=memories,
        legs={edge: wires.leg(*edge) for edge in edges},
        links=links,
        routes={edge: route for edge, route in routes.items() if route},
        machine=this_machine(),
    )


class _Wires:
    """What connects endpoints: the maker's figures where the GPUs are known, low guesses elsewhere."""

    def __init__(self, there: Gpus, devices: Mapping[Endpoint, Gpu | None], hosted: set[Endpoint]) -> None:
        self._there, self._devices, self._hosted = there, devices, hosted
        self._roots = _roots(there, [gpu for gpu in devices.values() if gpu is not None])

    def leg(self, source: Endpoint, to: Endpoint) -> Leg:
        if DISK in (source, to):
            return Leg(_DISK_BYTES_PER_S, _DISK_LATENCY_S)
        gpu, other = self._devices[source], self._devices[to]
        guess = Leg(_COPY_BYTES_PER_S, _COPY_LATENCY_S)
        if source == to:
            # A gather reads each row and writes it.
            return _spec(gpu.memory_bytes_per_s / 2) if gpu is not None and gpu.memory_bytes_per_s else guess
        if gpu is not None and other is not None:
            return self._between(gpu, other) or guess
        pcie = self._pcie(source) or self._pcie(to)
        if pcie is None or not self._in_host(to if gpu is not None else source):
            return guess
        if PAGEABLE not in (source, to) and not self._hosted & {source, to}:
            return _spec(pcie)
        # Copied within the host first, or afterwards.
        return Leg(_serial(pcie, _COPY_BYTES_PER_S), _COPY_LATENCY_S)

    def shared(self, source: Endpoint, to: Endpoint) -> list[tuple[str, Link]]:
        """The links that an edge goes over, by name; each way has its own, but for the host's memory."""
        if DISK in (source, to):
            return []
        if self._in_host(source) and self._in_host(to):
            return [("host memory", Link(_HOST_BYTES_PER_S))]
        if source == to:
            return []
        gpu, other = self._devices[source], self._devices[to]
        if gpu is not None and other is not None:
            if SWITCH in gpu.nvlinks and SWITCH in other.nvlinks:
                return [
                    (f"{source} out", Link(gpu.nvlinks[SWITCH], Source.SPEC)),
                    (f"{to} in", Link(other.nvlinks[SWITCH], Source.SPEC)),
                ]
            if other.bus_id in gpu.nvlinks:
                return []
        links: list[tuple[str, Link]] = []
        roots = [self._roots.get(each.bus_id) if each is not None else None for each in (gpu, other)]
        for at, root, way in ((source, roots[0], "out"), (to, roots[1], "in")):
            pcie = self._pcie(at)
            if pcie is None:
                continue
            links.append((f"{at} PCIe {way}", Link(pcie, Source.SPEC)))
            if root is not None and roots[0] != roots[1]:
                # As wide as what hangs below it: nobody says how wide it is.
                links.append((f"PCIe root {root} {way}", Link(pcie)))
        return links

    def _between(self, gpu: Gpu, other: Gpu) -> Leg | None:
        if SWITCH in gpu.nvlinks and SWITCH in other.nvlinks:
            return _spec(min(gpu.nvlinks[SWITCH], other.nvlinks[SWITCH]))
        if other.bus_id in gpu.nvlinks:
            return _spec(gpu.nvlinks[other.bus_id])
        if gpu.pcie_bytes_per_s is None or other.pcie_bytes_per_s is None:
            return None
        if frozenset((gpu.bus_id, other.bus_id)) in self._there.peers:
            return _spec(min(gpu.pcie_bytes_per_s, other.pcie_bytes_per_s))
        # By way of the host, one leg after the other.
        return Leg(_serial(gpu.pcie_bytes_per_s, other.pcie_bytes_per_s), _COPY_LATENCY_S)

    def _pcie(self, at: Endpoint) -> float | None:
        gpu = self._devices[at]
        return None if gpu is None else gpu.pcie_bytes_per_s

    def _in_host(self, at: Endpoint) -> bool:
        """Whether its memory is the host's."""
        return at in (PAGEABLE, PINNED) or at in self._hosted


def _spec(bytes_per_s: float) -> Leg:
    return Leg(bytes_per_s, _DEVICE_LATENCY_S, Source.SPEC)


def _serial(first: float, then: float) -> float:
    """Bytes per second of one copy after the other, each of all the bytes."""
    return 1 / (1 / first + 1 / then)


def _roots(there: Gpus, used: Sequence[Gpu]) -> dict[str, int]:
    """By PCI id, a number for each set of GPUs that share the way up to the host; a GPU that has it to itself isn't in it."""
    roots: dict[str, int] = {}
    number = 0
    for gpu in used:
        together = [other.bus_id for other in used if frozenset((gpu.bus_id, other.bus_id)) in there.below_one_bridge]
        if together and gpu.bus_id not in roots:
            roots |= dict.fromkeys([gpu.bus_id, *together], number)
            number += 1
    return roots


def _memory(
    at: Endpoint,
    gpu: Gpu | None,
    hosted: set[Endpoint],
    free_bytes: FreeBytes | None,
    disk: str | os.PathLike[str] | None,
    root: Path,
) -> Memory | None:
    """None where nobody can tell."""
    in_host = at in (PAGEABLE, PINNED) or at in hosted
    if in_host:
        found, what = (host_bytes(root), free_host_bytes(root)), _what_host(at, root)
    elif at == DISK:
        folder = _folder(disk)
        found, what = _disk_bytes(folder), str(folder) if free_bytes is None else ""
    elif gpu is not None:
        found = (gpu.total_bytes, gpu.free_bytes)
        what = gpu.name + ("" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}")
    else:
        found, what = None, ""
    if free_bytes is not None:
        try:
            free = max(0, free_bytes(at))
        except ConduitError:
            # The backend can't use it here: a disk tier without a folder, for one.
            return None
        found = (free if found is None or at == DISK else found[0], free)
    if found is None:
        return None
    capacity, free = found
    if at in hosted:
        # They all have the same memory, and each would be promised all of it.
        free //= len(hosted)
    return Memory(max(capacity, free), free, Source.MEASURED, what)


def _what_host(at: Endpoint, root: Path) -> str:
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    what = f"host memory, {nodes} NUMA nodes" if nodes > 1 else "host memory"
    if at == PINNED:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return f"{what}; may lock {'all of it' if limit == resource.RLIM_INFINITY else f'{limit:,} bytes'}"
    return what if at == PAGEABLE else f"{what}, that of all such devices"


def _folder(disk: str | os.PathLike[str] | None) -> Path:
    if disk is not None:
        return Path(disk)
    named = os.environ.get("CONDUIT_DISK")
    lasting = Path("/var/tmp")  # where /tmp may lie in memory
    return Path(named) if named else lasting if lasting.is_dir() else Path(tempfile.gettempdir())


def _disk_bytes(folder: Path) -> tuple[int, int] | None:
    try:
        system = os.statvfs(folder)
    except OSError:
        return None
    return system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
