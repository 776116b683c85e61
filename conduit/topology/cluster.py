"""A topology: which memories there are, how large, how fast each reaches each, and what their paths share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral

from conduit.errors import TopologyError
from conduit.topology.bandwidth import Leg, Source, is_finite
from conduit.topology.endpoint import Endpoint, Tier

Edge = tuple[Endpoint, Endpoint]
"""From, to."""


@dataclass(frozen=True, slots=True)
class Memory:
    """One endpoint's: `capacity_bytes` in all, of which `free_bytes` can be taken now."""

    capacity_bytes: int
    free_bytes: int
    source: Source
    what: str = ""
    """"NVIDIA A100 80 GB": for people."""

    def __post_init__(self) -> None:
        sizes = (self.free_bytes, self.capacity_bytes)
        whole = all(isinstance(size, Integral) and is_finite(size) for size in sizes)
        if not (whole and 0 <= self.free_bytes <= self.capacity_bytes):
            raise TopologyError(
                f"free_bytes={self.free_bytes!r}, capacity_bytes={self.capacity_bytes!r}: expected whole numbers, 0 ≤ free_bytes ≤ capacity_bytes"
            )


@dataclass(frozen=True, slots=True)
class Link:
    """What several edges share, in one direction: a device's port, a PCIe root, a NIC. Flows over it share `bytes_per_s` max-min fairly."""

    bytes_per_s: float
    source: Source = Source.ASSUMED

    def __post_init__(self) -> None:
        Leg(self.bytes_per_s)  # the same bounds, in the same words


@dataclass(frozen=True, slots=True)
class Topology:
    """A value; `changed` copies. `legs` has every edge that rows may go along, from an endpoint to itself included: a gather within
    one memory. `routes`: the links, by name, that an edge goes over beside its own leg; an edge without any isn't in it.

    `machine`: of which machine it was measured, or "preset". What a preset says is never called measured here: `source` of each
    figure does."""

    name: str
    memories: Mapping[Endpoint, Memory]
    legs: Mapping[Edge, Leg]
    links: Mapping[str, Link] = field(default_factory=dict)
    routes: Mapping[Edge, tuple[str, ...]] = field(default_factory=dict)
    machine: str = "preset"

    def __post_init__(self) -> None:
        for source, to in self.legs:
            for at in (source, to):
                if at not in self.memories:
                    raise TopologyError(f"topology {self.name!r}: edge {source} → {to}: there is no endpoint {at}")
        for (source, to), route in self.routes.items():
            if (source, to) not in self.legs:
                raise TopologyError(f"topology {self.name!r}: route {source} → {to} has no bandwidth of its own")
            unknown = [name for name in route if name not in self.links]
            if unknown:
                raise TopologyError(f"topology {self.name!r}: route {source} → {to} uses unknown link {unknown[0]!r}")

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(self.memories)

    @property
    def devices(self) -> tuple[Endpoint, ...]:
        return tuple(at for at in self.memories if at.tier is Tier.DEVICE)

    def memory(self, at: Endpoint) -> Memory:
        """TopologyError lists the endpoints there are where it isn't one."""
        if at not in self.memories:
            raise TopologyError(
                f"topology {self.name!r} has no endpoint {at}; it has {', '.join(map(str, self.memories)) or 'none'}"
            )
        return self.memories[at]

    def leg(self, source: Endpoint, to: Endpoint) -> Leg:
        """TopologyError where the edge is missing."""
        leg = self.legs.get((source, to))
        if leg is None:
            for at in (source, to):
                self.memory(at)
            raise TopologyError(
                f"topology {self.name!r} has no bandwidth of {source} → {to}; measure it (conduit topology --measure) or add it to legs"
            )
        return leg

    def route(self, source: Endpoint, to: Endpoint) -> tuple[str, ...]:
        """Names of the links that the edge shares with others."""
        return self.routes.get((source, to), ())

    def reaches(self, source: Endpoint, to: Endpoint) -> bool:
        """Whether a bandwidth is known of that edge."""
        return (source, to) in self.legs

    def changed(
        self,
        *,
        name: str | None = None,
        memories: Mapping[Endpoint, Memory] | None = None,
        legs: Mapping[Edge, Leg] | None = None,
        links: Mapping[str, Link] | None = None,
        routes: Mapping[Edge, tuple[str, ...]] | None = None,
        machine: str | None = None,
    ) -> Topology:
        """A copy, with these in place of its own where they are named."""
        return replace(
            self,
            name=self.name if name is None else name,
            memories={**self.memories, **(memories or {})},
            legs={**self.legs, **(legs or {})},
            links={**self.links, **(links or {})},
            routes={**self.routes, **(routes or {})},
            machine=self.machine if machine is None else machine,
        )

    def scaled(self, memory: float) -> Topology:
        """The same with every memory `memory` times as large: to try a large machine in a small one."""
        most = max((each.capacity_bytes for each in self.memories.values()), default=0)
        if not (is_finite(memory) and memory > 0 and is_finite(most * memory)):
            raise TopologyError(
                f"memory={memory!r}: expected a finite number above 0, and memories that are finite with it"
            )
        memories = {
            at: replace(
                each, capacity_bytes=int(each.capacity_bytes * memory), free_bytes=int(each.free_bytes * memory)
            )
            for at, each in self.memories.items()
        }
        return replace(self, name=f"{self.name} with {memory:g} × the memory", memories=memories)

    def only(self, endpoints: Iterable[Endpoint]) -> Topology:
        """What is left with these endpoints alone."""
        kept = set(endpoints)
        for at in kept:
            self.memory(at)
        return replace(
            self,
            memories={at: each for at, each in self.memories.items() if at in kept},
            legs={edge: each for edge, each in self.legs.items() if kept.issuperset(edge)},
            routes={edge: each for edge, each in self.routes.items() if kept.issuperset(edge)},
        )
