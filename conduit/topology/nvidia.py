"""What NVIDIA's management library (NVML) says of this machine's GPUs: how large, and how they hang together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

SWITCH = "switch"
"""What NVLinks lead to that don't lead to another GPU."""

_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.98462e9, 4: 1.96923e9, 5: 3.93846e9, 6: 7.5625e9}
"""By PCIe generation: one lane, one way, what the line code takes already off."""


def _nvlink_bytes_per_s(version: int) -> float:
    """One link, one way. The numbers are NVML_NVLINK_VERSION_*, of which 7 is NVLink 5."""
    return 20e9 if version == 1 else 25e9 if version < 7 else 50e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. What NVML wouldn't say is None, or not in the mapping. Rates are one way, and what the maker says.

    - `pcie_bytes_per_s`: of the link as it can be; an idle GPU lowers it
    - `memory_bytes_per_s`: of its memory
    - `nvlinks`: all its NVLinks to another GPU, by that one's `bus_id`, or to a switch, by SWITCH; together, in bytes per second"""

    uuid: str
    bus_id: str
    name: str
    total_bytes: int
    free_bytes: int
    pcie_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    numa_node: int | None = None
    nvlinks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gpus:
    """Those of this machine that programs can use whole, in NVML's order, and what holds between two of them, in that order.

    - `below_one_bridge`: they reach each other over PCIe switches without the host's bridge, so they share the way up to it
    - `peers`: each may read the other's memory"""

    found: tuple[Gpu, ...] = ()
    below_one_bridge: frozenset[frozenset[str]] = frozenset()
    peers: frozenset[frozenset[str]] = frozenset()

    def named(self, name: str) -> Gpu | None:
        """By UUID, with or without "GPU-" before it, or by PCI id, however many digits its domain is written with."""
        wanted = {name, f"GPU-{name}", bus_id(name)}
        return next((gpu for gpu in self.found if gpu.uuid in wanted or gpu.bus_id in wanted), None)

    def visible(self, asked: str | None) -> tuple[Gpu, ...]:
        """Those that CUDA_VISIBLE_DEVICES=`asked` leaves, in its order: numbers count by PCI id, as CUDA_DEVICE_ORDER=PCI_BUS_ID does; a UUID's
        beginning will do; what names none of them ends the list, as it does for CUDA."""
        if asked is None:
            return self.found
        kept: list[Gpu] = []
        for name in map(str.strip, asked.split(",")):
            if name.isdigit():
                matches = self.found[int(name) : int(name) + 1]
            else:
                matches = [gpu for gpu in self.found if name and gpu.uuid.startswith(name)]
            if len(matches) != 1:
                break
            kept.append(matches[0])
        return tuple(kept)


def bus_id(text: str) -> str:
    """A PCI id in one form, "0000:17:00.0": NVML writes the domain with eight digits, others with four."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}"


def gpus() -> Gpus:
    """What there is. Nothing without nvidia-ml-py, a driver or a GPU; a GPU that NVML can't name or measure isn't there."""
    try:
        import pynvml
    except ImportError:
        return Gpus()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Gpus()
    try:
        return _read(_Nvml(pynvml))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class _Nvml:
    """NVML, which may refuse any single question: then the answer is None."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self.module.NVMLError:
            return None


def _read(nvml: _Nvml) -> Gpus:
    n = nvml.module
    handles: dict[str, Any] = {}
    found: list[Gpu] = []
    for index in range(nvml.ask(n.nvmlDeviceGetCount) or 0):
        handle = nvml.ask(n.nvmlDeviceGetHandleByIndex, index)
        gpu = None if handle is None else _gpu(nvml, handle)
        if gpu is not None:
            handles[gpu.bus_id] = handle
            found.append(gpu)
    below, peers = set(), set()
    for a, b in combinations(handles, 2):
        level = nvml.ask(n.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b])
        if level is not None and level <= n.NVML_TOPOLOGY_MULTIPLE:
            below.add(frozenset((a, b)))
        # Not NVML_P2P_CAPS_INDEX_READ, which is the tuple (0,) by mistake.
        ways = [nvml.ask(n.nvmlDeviceGetP2PStatus, handles[x], handles[y], 0) for x, y in ((a, b), (b, a))]
        if all(way == n.NVML_P2P_STATUS_OK for way in ways):
            peers.add(frozenset((a, b)))
    return Gpus(tuple(found), frozenset(below), frozenset(peers))


def _gpu(nvml: _Nvml, handle: Any) -> Gpu | None:
    n = nvml.module
    # A GPU that MIG splits: how large a program's slice is only its framework knows.
    mig = nvml.ask(n.nvmlDeviceGetMigMode, handle)
    uuid, pci = nvml.ask(n.nvmlDeviceGetUUID, handle), nvml.ask(n.nvmlDeviceGetPciInfo, handle)
    memory = nvml.ask(lambda: n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2))
    if uuid is None or pci is None or memory is None or (mig is not None and mig[0] == n.NVML_DEVICE_MIG_ENABLE):
        return None
    generation = nvml.ask(n.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    width = nvml.ask(n.nvmlDeviceGetMaxPcieLinkWidth, handle)
    lane = _LANE_BYTES_PER_S.get(generation)
    bits = nvml.ask(n.nvmlDeviceGetMemoryBusWidth, handle)
    megahertz = nvml.ask(n.nvmlDeviceGetMaxClockInfo, handle, n.NVML_CLOCK_MEM)
    return Gpu(
        uuid=uuid,
        bus_id=_bus_id_of(pci),
        name=nvml.ask(n.nvmlDeviceGetName, handle) or "NVIDIA GPU",
        total_bytes=memory.total,
        free_bytes=min(memory.free, memory.total),
        pcie_bytes_per_s=lane * width if lane and width else None,
        # Twice a clock: double data rate.
        memory_bytes_per_s=2e6 * megahertz * bits / 8 if megahertz and bits else None,
        numa_node=nvml.ask(n.nvmlDeviceGetNumaNodeId, handle),
        nvlinks=_nvlinks(nvml, handle),
    )


def _nvlinks(nvml: _Nvml, handle: Any) -> dict[str, float]:
    n = nvml.module
    links: dict[str, float] = {}
    for link in range(n.NVML_NVLINK_MAX_LINKS):
        if nvml.ask(n.nvmlDeviceGetNvLinkState, handle, link) != n.NVML_FEATURE_ENABLED:
            continue
        version = nvml.ask(n.nvmlDeviceGetNvLinkVersion, handle, link)
        kind = nvml.ask(n.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == n.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            remote = SWITCH
        else:
            pci = nvml.ask(n.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            remote = None if pci is None else _bus_id_of(pci)
        if version is not None and remote is not None:
            links[remote] = links.get(remote, 0.0) + _nvlink_bytes_per_s(version)
    return links


def _bus_id_of(pci: Any) -> str:
    text = pci.busId
    return bus_id(text.decode() if isinstance(text, bytes) else text)
