"""A topology of nodes that are alike, from one node's figures: which memories, legs and links there are, and who goes over what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Edge, Link, Memory, Topology
from conduit.topology.endpoint import Endpoint, Tier


@dataclass(frozen=True, slots=True)
class Host:
    """`bus`: its memory's, reading and writing together. `copy`: one thread's, from one place of it to another."""

    memory: Memory
    bus: Link
    copy: Leg


@dataclass(frozen=True, slots=True)
class Disk:
    """`read`, `write`: by one process, from and to host memory."""

    memory: Memory
    read: Leg
    write: Leg


@dataclass(frozen=True, slots=True)
class Network:
    """`nic`: of a node, one way; `leg`: from a memory of one node to one of another."""

    nic: Link
    leg: Leg


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one node.

    - `between(i, j)`: from one to another, and within one where i = j; None where rows go over the host
    - `port`: a device's share of the fabric between them, one way
    - `to_device`, `to_host`: from and to pinned memory; `both_ways`: what these two get together at most
    - `pageable_to_device`, `pageable_to_host`: None where pageable rows go through one thread's copy into a pinned buffer"""

    count: int
    memory: Memory
    between: Callable[[int, int], Leg | None]
    to_device: Leg
    to_host: Leg
    pageable_to_device: Leg | None = None
    pageable_to_host: Leg | None = None
    port: Link | None = None
    both_ways: Link | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """`rack`: the fabric between the devices spans all nodes."""

    host: Host
    disk: Disk
    devices: Devices | None = None
    network: Network | None = None
    rack: bool = False


def one_after_the_other(first: Leg, then: Leg) -> Leg:
    """Rows go along one leg whole, then along the other."""
    return Leg(
        1 / (1 / first.bytes_per_s + 1 / then.bytes_per_s), first.latency_s + then.latency_s, source=Source.ASSUMED
    )


def _memories(node: Node, number: int) -> dict[Endpoint, Memory]:
    memories = {Endpoint(Tier.PAGEABLE, node=number): node.host.memory}
    if node.devices is not None:  # whose driver it is that locks pages
        memories[Endpoint(Tier.PINNED, node=number)] = node.host.memory
        for index in range(node.devices.count):
            memories[Endpoint(Tier.DEVICE, index, number)] = node.devices.memory
    memories[Endpoint(Tier.DISK, node=number)] = node.disk.memory
    return memories


def _links(node: Node, number: int) -> dict[str, Link]:
    links = {
        _of(number, "host memory"): node.host.bus,
        _of(number, "disk read"): _as_fast_as(node.disk.read),
        _of(number, "disk write"): _as_fast_as(node.disk.write),
    }
    if node.network is not None:
        links |= {_of(number, "nic out"): node.network.nic, _of(number, "nic in"): node.network.nic}
    if node.devices is not None:
        each = {"to host": _as_fast_as(node.devices.to_host), "from host": _as_fast_as(node.devices.to_device)}
        if node.devices.both_ways is not None:
            each["host both ways"] = node.devices.both_ways
        if node.devices.port is not None:
            each |= {"out": node.devices.port, "in": node.devices.port}
        for index in range(node.devices.count):
            at = Endpoint(Tier.DEVICE, index, number)
            links |= {f"{at} {name}": link for name, link in each.items()}
    return links


def _as_fast_as(leg: Leg) -> Link:
    return Link(leg.bytes_per_s, leg.source)


def _of(number: int, name: str) -> str:
    return f"node{number}/{name}" if number else name


class _Ways(NamedTuple):
    """The links that rows go over when they leave a memory or come to it: by the host, and by the devices' fabric."""

    out: tuple[str, ...]
    in_: tuple[str, ...]
    port_out: tuple[str, ...] = ()
    port_in: tuple[str, ...] = ()


def _ways(at: Endpoint, node: Node) -> _Ways:
    if at.tier is Tier.DISK:
        return _Ways((_of(at.node, "disk read"),), (_of(at.node, "disk write"),))
    if at.is_host or node.devices is None:
        memory = (_of(at.node, "host memory"),)
        return _Ways(memory, memory)
    both = (f"{at} host both ways",) if node.devices.both_ways is not None else ()
    out, in_ = (f"{at} to host", *both), (f"{at} from host", *both)
    return _Ways(out, in_) if node.devices.port is None else _Ways(out, in_, (f"{at} out",), (f"{at} in",))


def _legs_by_host(node: Node) -> dict[tuple[Tier, Tier], Leg]:
    """Within a node, by kinds of memory, where the devices' own fabric isn't used."""
    copy, read, write = node.host.copy, node.disk.read, node.disk.write
    legs = {
        **dict.fromkeys(product((Tier.PAGEABLE, Tier.PINNED), repeat=2), copy),
        **{(Tier.DISK, to): read for to in Tier},
        **{(source, Tier.DISK): write for source in Tier},
        (Tier.DISK, Tier.DISK): one_after_the_other(read, write),
    }
    if node.devices is not None:
        legs |= {
            (Tier.PINNED, Tier.DEVICE): node.devices.to_device,
            (Tier.DEVICE, Tier.PINNED): node.devices.to_host,
            (Tier.PAGEABLE, Tier.DEVICE): node.devices.pageable_to_device or copy,
            (Tier.DEVICE, Tier.PAGEABLE): node.devices.pageable_to_host or copy,
            (Tier.DEVICE, Tier.DEVICE): one_after_the_other(node.devices.to_host, node.devices.to_device),
        }
    return legs


def cluster(name: str, node: Node, nodes: int = 1) -> Topology:
    """`nodes` like this one. Every memory reaches every other, but a disk those of its own node alone."""
    memories: dict[Endpoint, Memory] = {}
    links: dict[str, Link] = {}
    for number in range(nodes):
        memories |= _memories(node, number)
        links |= _links(node, number)
    ways = {at: _ways(at, node) for at in memories}
    by_host = _legs_by_host(node)
    legs: dict[Edge, Leg] = {}
    routes: dict[Edge, tuple[str, ...]] = {}
    for source, to in product(memories, repeat=2):
        out, in_ = ways[source], ways[to]
        if (leg := _between_devices(node, source, to)) is not None:
            route = () if source == to else (*out.port_out, *in_.port_in)
        elif source.node == to.node:
            leg = by_host[source.tier, to.tier]
            route = (*out.out, _of(source.node, "host memory"), *in_.in_)
        elif node.network is not None and Tier.DISK not in (source.tier, to.tier):
            leg = node.host.copy if Tier.PAGEABLE in (source.tier, to.tier) else node.network.leg
            route = (*out.out, _of(source.node, "nic out"), _of(to.node, "nic in"), *in_.in_)
        else:
            continue
        legs[source, to] = leg
        if route:
            routes[source, to] = tuple(dict.fromkeys(route))
    return Topology(name, memories, legs, links, routes)


def _between_devices(node: Node, source: Endpoint, to: Endpoint) -> Leg | None:
    """Over the devices' own fabric; None where they have none."""
    if node.devices is None or not (source.tier is to.tier is Tier.DEVICE):
        return None
    if source.node == to.node:
        return node.devices.between(source.index, to.index)
    if node.rack:  # where any device of another node is like a neighbour
        return node.devices.between(0, 1)
    return None
