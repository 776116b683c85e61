"""Machines that you may not have, by name. Each figure says whether it is from a data sheet (SPEC), was measured on such a machine
by somebody (MEASURED), or is assumed; nothing is fitted to what a placement should come out as.

All rates are of one direction, GB = 10⁹ bytes. Assumed throughout, where nothing else is said:

- every latency: a copy or a gather on a device has to be launched (5 µs), one between memories set up (10 µs, over a network 20)
- capacities are the data sheet's; a driver may count a few per cent more
- free: of a device, all but 1 GB for its context; of the host's memory, half for each kind, so that both can be full at once
- a host copy is one thread's, 12 GB/s. Pageable rows go through such a copy into a pinned buffer on their way to a device or a
  network, and so are less than half as fast as pinned ones. That is a leg's rate and no link's: several threads copy beside each other,
  and one thread to one memory after the other, as plans and the emulated backend have it
- a gather within a device reads and writes: half of its memory's rate
- a port gets what one pair gets: what a pair lacks of the data sheet's rate is protocol, and several pairs pay it alike"""

from __future__ import annotations

from collections.abc import Callable

from conduit.errors import TopologyError
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Link, Memory, Topology
from conduit.topology.nodes import Devices, Disk, Host, Network, Node, cluster

_GB = 10**9
_US = 1e-6
_SPEC, _MEASURED, _ASSUMED = Source.SPEC, Source.MEASURED, Source.ASSUMED


def _host(what: str, gb: int, source: Source, bus: Link) -> Host:
    return Host(Memory(gb * _GB, gb * _GB // 2, source, what), bus, Leg(12 * _GB, 2 * _US, _ASSUMED))


def _disk(gb: int, read: float, write: float) -> Disk:
    memory = Memory(gb * _GB, gb * _GB, _ASSUMED, "NVMe")
    return Disk(memory, Leg(read * _GB, 100 * _US, _ASSUMED), Leg(write * _GB, 100 * _US, _ASSUMED))


def _device(what: str, gb: int) -> Memory:
    return Memory(gb * _GB, (gb - 1) * _GB, _SPEC, what)


def _leg(gb_per_s: float, source: Source) -> Leg:
    """Between two memories of a node."""
    return Leg(gb_per_s * _GB, 10 * _US, source)


def _gather(memory_gb_per_s: float) -> Leg:
    return Leg(memory_gb_per_s / 2 * _GB, 5 * _US, _ASSUMED)


def _alike(gather: Leg, peer: Leg | None) -> Callable[[int, int], Leg | None]:
    """Every device is as far from every other."""
    return lambda i, j: gather if i == j else peer


_SERVER_DISK = _disk(4000, read=7, write=4)  # one drive, PCIe Gen4

_A100 = Node(
    # Two Xeon Platinum 8342 and 2 TB (paper §7.1); eight channels of DDR4-3200 each, which the paper doesn't say.
    host=_host("DDR4", 2000, _SPEC, Link(409.6 * _GB, _ASSUMED)),
    disk=_SERVER_DISK,
    devices=Devices(
        8,
        _device("NVIDIA A100 80 GB", 80),
        # 2039 and NVLink's 300 are the data sheet's; 276 was measured for a pair (ml-engineering book).
        between=_alike(_gather(2039), _leg(276, _MEASURED)),
        port=Link(276 * _GB, _ASSUMED),
        # nvbandwidth's README: 26 from the host; 18.4 to 19.6 each way when both are busy. To the host: as from it.
        to_device=_leg(26, _MEASURED),
        to_host=_leg(26, _ASSUMED),
        both_ways=Link(2 * 19 * _GB, _MEASURED),
    ),
    # HDR, 200 Gb/s: 24 in practice (nccl#412). The paper names no network.
    network=Network(Link(24 * _GB, _MEASURED), Leg(24 * _GB, 20 * _US, _MEASURED)),
)

MI250X_5GB_MS = (
    (2, 53, 145, 146, 141, 146, 80, 107),
    (52, 3, 144, 146, 146, 147, 105, 107),
    (145, 146, 2, 54, 81, 106, 144, 146),
    (142, 146, 51, 3, 106, 107, 146, 146),
    (142, 146, 74, 107, 3, 42, 146, 146),
    (142, 147, 105, 107, 40, 3, 144, 146),
    (77, 105, 144, 147, 146, 146, 2, 41),
    (102, 107, 146, 147, 144, 147, 40, 3),
)
"""Milliseconds for 5 GB from a die (row) to a die (column) of an MI250X node, measured (paper Fig. 4b). On the diagonal, a local copy, whole
milliseconds say little: 2 would be 2500 GB/s, and the memory's data sheet says 1638 for reading or writing."""


def _mi250x_leg(i: int, j: int) -> Leg:
    """Such that 5 GB take what the paper measured, latency included."""
    latency_s = (5 if i == j else 10) * _US
    return Leg(5 * _GB / (MI250X_5GB_MS[i][j] / 1000 - latency_s), latency_s, _MEASURED)


_MI250X = Node(
    host=_host("DDR4", 512, _SPEC, Link(205 * _GB, _SPEC)),  # Frontier user guide
    disk=_SERVER_DISK,
    devices=Devices(
        8,
        _device("AMD MI250X die, 64 GB", 64),
        between=_mi250x_leg,
        # A die's links to others (Frontier user guide): 200 within its package, 100 and 50 out of it. What transfers do to each other
        # on links between two other dies, which they are routed over, isn't known and not modelled.
        port=Link(350 * _GB, _ASSUMED),
        # Frontier user guide: 36 each way, at once.
        to_device=_leg(36, _SPEC),
        to_host=_leg(36, _SPEC),
    ),
    # Slingshot, four of 200 Gb/s.
    network=Network(Link(4 * 25 * _GB, _ASSUMED), Leg(25 * _GB, 20 * _US, _ASSUMED)),
)


def _hopper(memory: Memory, memory_gb_per_s: float, source: Source) -> Node:
    """`source`: of figures that were measured on an H200."""
    return Node(
        # A DGX: sixteen channels of DDR5-4800.
        host=_host("DDR5", 2000, _ASSUMED, Link(614.4 * _GB, _ASSUMED)),
        disk=_SERVER_DISK,
        devices=Devices(
            8,
            memory,
            # NVLink's 450 are the data sheet's; a pair got 396 one way and 784 both, so these don't disturb each other (ml-engineering
            # book).
            between=_alike(_gather(memory_gb_per_s), _leg(396, source)),
            port=Link(396 * _GB, _ASSUMED),
            # ml-engineering book. What the two directions get together isn't known.
            to_device=_leg(55.4, source),
            to_host=_leg(55.1, source),
        ),
        # 400 Gb/s for each device (MLPerf v4.1).
        network=Network(Link(8 * 50 * _GB, _SPEC), Leg(50 * _GB, 20 * _US, _SPEC)),
    )


_GB200 = Node(
    # A tray: two Grace with 480 GB at 512 GB/s each, and four GPUs (NVIDIA data sheet).
    host=_host("LPDDR5X", 960, _SPEC, Link(1024 * _GB, _SPEC)),
    disk=_SERVER_DISK,
    devices=Devices(
        4,
        _device("NVIDIA GB200 186 GB", 186),  # MLPerf v6.1
        between=_alike(_gather(8000), _leg(900, _SPEC)),
        port=Link(900 * _GB, _SPEC),
        # C2C, 450 nominal: 359 and 377 measured one way (ml-engineering book).
        to_device=_leg(359, _MEASURED),
        to_host=_leg(377, _MEASURED),
        # Both ways, 175 each were measured: 350 together, less than one way alone. A link can't say that; 377 comes closest.
        both_ways=Link(377 * _GB, _ASSUMED),
        # The device reads pageable memory itself: on a GH200, linked alike, 95 % of pinned (vortex-data/vortex#7815).
        pageable_to_device=_leg(0.95 * 359, _ASSUMED),
        pageable_to_host=_leg(0.95 * 377, _ASSUMED),
    ),
    # 400 Gb/s for each GPU (MLPerf v6.1).
    network=Network(Link(4 * 50 * _GB, _SPEC), Leg(50 * _GB, 20 * _US, _SPEC)),
    rack=True,
)


def _workstation(host: Host, device: Memory, memory_gb_per_s: float, pcie: Leg, both_ways: Link | None) -> Node:
    """Two cards in slots of sixteen lanes each. Neither reaches the other: rows go to the host, then from there."""
    between = _alike(_gather(memory_gb_per_s), None)
    return Node(host, _SERVER_DISK, Devices(2, device, between, to_device=pcie, to_host=pcie, both_ways=both_ways))


_PCIE_GEN4 = _workstation(
    _host("DDR4", 128, _ASSUMED, Link(204.8 * _GB, _ASSUMED)),  # eight channels of DDR4-3200
    _device("NVIDIA RTX 4090 24 GB", 24),
    1008,
    # 31 in the specification; 26, and 38 both ways, as of an A100, on the same PCIe.
    _leg(26, _ASSUMED),
    Link(2 * 19 * _GB, _ASSUMED),
)
# An RTX 4090 is made for PCIe Gen4, so Gen5 has its successor, to which the same applies.
_PCIE_GEN5 = _workstation(
    _host("DDR5", 128, _ASSUMED, Link(332.8 * _GB, _ASSUMED)),  # eight channels of DDR5-5200
    _device("NVIDIA RTX 5090 32 GB", 32),
    1792,
    _leg(55, _ASSUMED),  # 63 in the specification; 55, as of an H200, on the same PCIe
    None,
)
_LAPTOP = Node(
    host=_host("RAM", 16, _ASSUMED, Link(51.2 * _GB, _ASSUMED)),  # two channels of DDR4-3200
    disk=_disk(1000, read=3.5, write=2.5),
)

_MACHINES = {
    "a100x8": (_A100, 1, "8 × NVIDIA A100 80 GB on NVSwitch"),
    "a100x16": (_A100, 2, "2 nodes of 8 × NVIDIA A100 80 GB, HDR between them"),
    "mi250x": (_MI250X, 1, "4 × AMD MI250X: 8 dies of 64 GB, some nearer to each other than others"),
    "h100x8": (_hopper(_device("NVIDIA H100 80 GB", 80), 3350, _ASSUMED), 1, "8 × NVIDIA H100 80 GB on NVSwitch"),
    "h200x8": (_hopper(_device("NVIDIA H200 141 GB", 141), 4800, _MEASURED), 1, "8 × NVIDIA H200 141 GB on NVSwitch"),
    "gb200nvl72": (_GB200, 18, "a rack of 72 × NVIDIA GB200: 18 nodes on one NVLink"),
    "pcie_gen4": (_PCIE_GEN4, 1, "a workstation: 2 × RTX 4090 on PCIe Gen4, no peer-to-peer"),
    "pcie_gen5": (_PCIE_GEN5, 1, "a workstation: 2 × RTX 5090 on PCIe Gen5, no peer-to-peer"),
    "laptop": (_LAPTOP, 1, "16 GB, no device; all assumed: probe yours to know it"),
}

PRESETS = {name: what for name, (_, _, what) in _MACHINES.items()}
"""The names that `preset` knows, and what they stand for."""


def preset(name: str) -> Topology:
    """The machine of this name. TopologyError lists the names there are."""
    if not isinstance(name, str) or name not in PRESETS:
        raise TopologyError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    node, nodes, _ = _MACHINES[name]
    return cluster(name, node, nodes)
