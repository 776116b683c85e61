"""Measures a topology's edges, and what they share: α + β·bytes from timed transfers. What makes the transfers is injected."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from conduit.errors import CapacityError, SettingError, TopologyError
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Edge, Link, Topology
from conduit.topology.endpoint import Endpoint
from conduit.topology.fabric import makespan
from conduit.topology.fitting import fit, noise_of, spread

SIZES = tuple(1 << power for power in (16, 19, 22, 24))
"""Of batches: 64 KiB … 16 MiB."""

Transfer: TypeAlias = tuple[Endpoint, Endpoint, int]
"""From, to, bytes."""
Progress: TypeAlias = Callable[[int, int, str], None]
"""Called after every step: how many are done, of how many, and what was measured last. Time may run out before the last."""

_ALONE = 0.6
"""The share of the time for edges by themselves; the others' is for what they share."""
_ROUNDS = 4
"""So many samples of every edge and size should fit that time, the untimed first one included."""
_FEWEST = 3
"""Samples that are taken even where time is up: the median of fewer forgives no outlier."""
_QUIET = 0.01
"""With noise below this, as an emulated machine has, more samples would say the same."""
_BUSY = 4
"""The larger volume of transfers at once, in terms of the smaller: their difference has no latency in it."""
_BEYOND = 0.05
"""What edges lose beside each other is put down to something shared from here on, and from where it exceeds the noise."""
_STEPS = 24
"""Bisections of a link's bandwidth: to six digits."""
_LEAST = 4
"""No transfer beside others is smaller than this part of the smallest size: it would be a few rows, and their number no longer in proportion."""


class Timings(Protocol):
    """Makes transfers and times them. TopologyError where one can't be made, CapacityError where there is no room for so many bytes."""

    def one(self, source: Endpoint, to: Endpoint, size_bytes: int) -> float:
        """Seconds of one transfer, with nothing beside it."""
        ...

    def together(self, transfers: Sequence[Transfer]) -> float:
        """Seconds from the first of these transfers, all asked for at once, to the end of the last."""
        ...

    def now(self) -> float:
        """Seconds, by the clock that measures."""
        ...


def probe(
    topology: Topology,
    timings: Timings,
    *,
    sizes: Iterable[int] = SIZES,
    repeats: int = 11,
    seconds: float = 5.0,
    progress: Progress | None = None,
) -> Topology:
    """`topology` with the legs that were measured between its endpoints, and the links that were found; all other figures are gone, and so
    are edges that `timings` refuses.

    - `sizes`: bytes of the transfers; a slow edge is measured with the smallest of them, two at least
    - `repeats`: samples of each size, as far as time allows, three even where it doesn't; medians count
    - `seconds`: about what it should take by `timings.now()`; what frameworks take to compile comes on top

    Links: those that `topology` has already, for each endpoint "device:0 out", "device:0 to devices", "device:0 to host" and their like
    inwards, and for two endpoints "pageable ↔ device:0"; wherever transfers take longer together than the legs and smaller links
    explain. No link is slower than the fastest edge over it alone.

    SettingError for settings out of range; TopologyError where an endpoint is lost meanwhile, or transfers take no time."""
    probing = _Probe(
        topology, timings, _checked_sizes(sizes), _checked_repeats(repeats), _checked_seconds(seconds), progress
    )
    return probing.run()


class _Probe:
    def __init__(
        self,
        topology: Topology,
        timings: Timings,
        sizes: tuple[int, ...],
        repeats: int,
        seconds: float,
        progress: Progress | None,
    ) -> None:
        self._topology = topology
        self._timings = timings
        self._sizes = sizes
        self._repeats = repeats
        self._seconds = seconds
        self._progress = progress
        self._began_s = timings.now()
        self._samples: dict[Edge, dict[int, list[float]]] = {}
        self._done = self._steps = 0

    def run(self) -> Topology:
        endpoints = self._topology.endpoints
        if not endpoints:
            raise TopologyError(f"topology {self._topology.name!r} has no endpoint to measure")
        # Those within one memory come first: an endpoint that does that is there.
        edges = [(at, at) for at in endpoints] + [(a, b) for a in endpoints for b in endpoints if a != b]
        groups = _groups(self._topology, edges)
        self._steps = len(edges) * self._repeats + len(groups)
        self._measure_alone(edges)
        legs = {edge: fit(samples) for edge, samples in self._samples.items()}
        order = [edge for edge in ((a, b) for a in endpoints for b in endpoints) if edge in legs]
        found = replace(self._topology, legs={edge: legs[edge] for edge in order}, links={}, routes={})
        found = self._measure_together(found, _groups(self._topology, order))
        self._step("links", to=self._steps)
        return found

    def _measure_alone(self, edges: Sequence[Edge]) -> None:
        """In rounds over all edges, so that a moment in which the machine is busy is a few samples of many edges, not all of one."""
        limit_s = _ALONE * self._seconds / _ROUNDS / len(edges)
        for edge in edges:
            self._first(edge, limit_s)
            self._step(f"{edge[0]} → {edge[1]}")
        for number in range(1, self._repeats):
            if number >= _FEWEST and self._left_s(_ALONE) <= 0:
                break
            for edge, samples in self._samples.items():
                if number >= _FEWEST and noise_of(samples) < _QUIET:
                    continue
                for size in samples:
                    samples[size].append(self._again(edge, size))
            self._step(f"round {number + 1} of {self._repeats}", to=(number + 1) * len(edges))
        self._step("edges", to=len(edges) * self._repeats)

    def _first(self, edge: Edge, limit_s: float) -> None:
        """A sample of each size, from the smallest to as many as `limit_s` allows."""
        samples: dict[int, list[float]] = {}
        spent_s = 0.0
        for size in self._sizes:
            if len(samples) > 1:
                before, (last_s,) = list(samples.items())[-1]
                if spent_s + last_s * size / before > limit_s:
                    break
            try:
                took_s = self._timings.one(*edge, size)
            except CapacityError:
                break
            except TopologyError as error:
                if samples:
                    raise _lost(edge, error) from error
                # No such edge; or its end is lost, and what that did before will show it.
                break
            spent_s += took_s
            samples[size] = [_checked(took_s, edge)]
        if len(samples) > 1:
            self._samples[edge] = samples

    def _again(self, edge: Edge, size: int) -> float:
        try:
            took_s = self._timings.one(*edge, size)
        except (TopologyError, CapacityError) as error:
            raise _lost(edge, error) from error
        return _checked(took_s, edge)

    def _measure_together(self, found: Topology, groups: Mapping[str, Sequence[Edge]]) -> Topology:
        """From the smallest group to the largest: each is a link if those before don't explain what it takes."""
        tests: dict[str, tuple[Sequence[Mapping[Edge, int]], float]] = {}
        for number, (name, edges) in enumerate(groups.items()):
            share_s = self._left_s(1.0) / (len(groups) - number)
            volumes, took_s, noise = self._measure_group(edges, found, share_s)
            allowed_s = took_s / (1 + max(_BEYOND, noise))
            if _predicted(found, volumes) < allowed_s:
                found = _with_link(found, name, edges, volumes, took_s)
                tests[name] = volumes, allowed_s
            self._step(name)
        for name, (volumes, allowed_s) in tests.items():
            without = _without(found, name)
            if _predicted(without, volumes) >= allowed_s:
                found = without
        return found

    def _measure_group(
        self, edges: Sequence[Edge], found: Topology, share_s: float
    ) -> tuple[Sequence[Mapping[Edge, int]], float, float]:
        """Two volumes, by edge; by how many seconds the larger takes longer; and that figure's noise."""
        legs = [found.legs[edge] for edge in edges]
        volumes = self._volumes(edges, legs, share_s)
        began_s, took_s = self._timings.now(), ([], [])
        for number in range(self._repeats):
            quiet = all(spread(samples) < _QUIET * statistics.median(samples) for samples in took_s if samples)
            if number >= _FEWEST and (quiet or self._timings.now() - began_s > share_s):
                break
            for samples, volume in zip(took_s, volumes, strict=True):
                samples.append(self._all_at_once(volume))
        small_s, large_s = (statistics.median(samples) for samples in took_s)
        spread_s = math.hypot(*(spread(samples) for samples in took_s))
        longer_s = max(large_s - small_s, 0.0)
        alone = statistics.median(leg.noise for leg in legs)
        return volumes, longer_s, math.inf if longer_s == 0 else spread_s / longer_s + alone

    def _volumes(self, edges: Sequence[Edge], legs: Sequence[Leg], share_s: float) -> list[dict[Edge, int]]:
        """A small and a large one. An edge's bytes are in proportion to its bandwidth, so that alone each would be ready with the others;
        never more than it moved alone, for which there was room."""
        rates = [leg.bytes_per_s for leg in legs]
        room = {edge: max(self._samples[edge]) for edge in edges}
        wanted_s = max(self._sizes[-1] / max(rates), _BUSY * max(leg.latency_s for leg in legs))
        # In the worst case one goes after the other; and each volume is tried once beforehand.
        affordable_s = share_s / len(edges) / (1 + 1 / _BUSY) / _ROUNDS
        longest_s = min(size / rate for size, rate in zip(room.values(), rates, strict=True))
        data_s = min(wanted_s, longest_s, max(affordable_s, _BUSY * self._sizes[0] / min(rates)))
        least = max(self._sizes[0] // _LEAST, 1)
        return [
            {
                edge: min(max(_rounded(rate * each_s), least), room[edge])
                for edge, rate in zip(edges, rates, strict=True)
            }
            for each_s in (data_s / _BUSY, data_s)
        ]

    def _all_at_once(self, volume: Mapping[Edge, int]) -> float:
        transfers = [(*edge, size) for edge, size in volume.items()]
        try:
            took_s = self._timings.together(transfers)
        except (TopologyError, CapacityError) as error:
            raise _lost(next(iter(volume)), error) from error
        return _checked(took_s, next(iter(volume)))

    def _left_s(self, share: float) -> float:
        return self._began_s + share * self._seconds - self._timings.now()

    def _step(self, what: str, to: int | None = None) -> None:
        self._done = self._done + 1 if to is None else to
        if self._progress is not None:
            self._progress(self._done, self._steps, what)


def _groups(topology: Topology, edges: Sequence[Edge]) -> dict[str, tuple[Edge, ...]]:
    """The sets of edges that may share something, by the link's name, the smallest first; each set once."""
    known: dict[str, list[Edge]] = {}
    for edge in edges:
        for name in topology.route(*edge):
            known.setdefault(name, []).append(edge)
    place = {edge: number for number, edge in enumerate(edges)}
    for source, to in edges:
        if place[source, to] < place.get((to, source), -1):
            known[f"{source} ↔ {to}"] = [(source, to), (to, source)]
    ports: dict[str, list[Edge]] = {}
    for source, to in edges:
        if source != to:
            names = (f"{source} out", f"{to} in", f"{source} to {_kind(to)}", f"{to} from {_kind(source)}")
            for name in names:
                ports.setdefault(name, []).append((source, to))
    sets: dict[frozenset[Edge], tuple[str, list[Edge]]] = {}
    # What the topology says of a port is more exact than that all edges use it.
    for name, members in (known | {name: members for name, members in ports.items() if name not in known}).items():
        if len(members) > 1:
            sets.setdefault(frozenset(members), (name, members))
    return {name: tuple(members) for name, members in sorted(sets.values(), key=lambda group: len(group[1]))}


def _kind(at: Endpoint) -> str:
    """The host and other devices are often reached by different ways."""
    return "host" if at.is_host else "devices"


def _predicted(topology: Topology, volumes: Sequence[Mapping[Edge, int]]) -> float:
    """By how many seconds the second volume takes longer."""
    small_s, large_s = (makespan(topology, volume) for volume in volumes)
    return large_s - small_s


def _with_link(
    found: Topology, name: str, edges: Sequence[Edge], volumes: Sequence[Mapping[Edge, int]], took_s: float
) -> Topology:
    """`found` with the link that makes these volumes take so long, or as long as one can that slows no edge alone."""
    rates = [found.legs[edge].bytes_per_s for edge in edges]

    def at(bytes_per_s: float) -> Topology:
        routes = {edge: (*found.route(*edge), name) for edge in edges}
        return replace(
            found, links={**found.links, name: Link(bytes_per_s, Source.MEASURED)}, routes={**found.routes, **routes}
        )

    slow, fast = max(rates), math.fsum(rates)
    for _ in range(_STEPS):
        middle = math.sqrt(slow * fast)
        slow, fast = (slow, middle) if _predicted(at(middle), volumes) < took_s else (middle, fast)
    return at(slow)


def _without(found: Topology, name: str) -> Topology:
    routes = {edge: tuple(each for each in route if each != name) for edge, route in found.routes.items()}
    return replace(
        found,
        links={each: link for each, link in found.links.items() if each != name},
        routes={edge: route for edge, route in routes.items() if route},
    )


def _rounded(size: float) -> int:
    """To a power of two, so that a framework that compiles for every size meets few."""
    return 1 << max(round(math.log2(size)), 0)


def _checked(took_s: float, edge: Edge) -> float:
    if not (math.isfinite(took_s) and took_s > 0):
        raise TopologyError(
            f"a transfer {edge[0]} → {edge[1]} took {took_s!r} s by this clock: expected a finite time above 0. "
            "On a virtual clock, probe an emulated backend; on a real one, larger sizes"
        )
    return took_s


def _lost(edge: Edge, error: Exception) -> TopologyError:
    return TopologyError(
        f"{edge[0]} → {edge[1]} was lost while it was measured: it worked before, and now: {error}. "
        "Probe again, or without the endpoint (Topology.only)"
    )


def _checked_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    kept = tuple(sorted(set(sizes)))
    if len(kept) < 2 or not all(isinstance(size, int) and size > 0 for size in kept):
        raise SettingError(
            f"sizes={sizes!r}: expected two or more different numbers of bytes above 0, such as {SIZES}: one alone can't tell latency from bandwidth"
        )
    return kept


def _checked_repeats(repeats: int) -> int:
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
        raise SettingError(f"repeats={repeats!r}: expected a whole number ≥ 1")
    return repeats


def _checked_seconds(seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        raise SettingError(f"seconds={seconds!r}: expected a finite number > 0, such as 5.0")
    return seconds
