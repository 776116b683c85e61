"""A machine that isn't there: another backend's rows, and a topology's memories and transfer times (`conduit.topology`).

The rows are real, and so is every copy of them; only the time that a copy takes is the topology's, and where its rows lie. A call
starts its transfers at the clock's now and returns; the columns that it made know which transfers they are waiting for. What is done
with them starts when those have ended, as on a device's stream, and `wait`, `order` and `hand_over` let the clock go on until then.
Flows share links as `conduit.topology.fabric` says. On a virtual clock copies take no time; on the real one a transfer's time counts
from before its copy, so that the copy lies inside it wherever the model is the slower of the two.

Rows in pageable memory are copied by the thread that asks for them, one transfer after the other; what several threads ask for goes on at
once. What this is silent about: the work that others do on a device, and that such a thread can't do anything else meanwhile. A writer goes
on at once whatever it writes to; so of several actors that ingest in line, each in its turn, one's copies go on while the next one's begin.
Seconds that come from here are emulated: never report them as measured.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from conduit import backends
from conduit.backends import exchange
from conduit.backends.checks import check_endpoint, check_index, check_merge, check_scatter, check_span
from conduit.backends.emulation.links import Links, Traffic
from conduit.backends.emulation.memories import Held, Memories
from conduit.backends.reference import ReferenceBackend
from conduit.clock import REAL, Clock
from conduit.core.backend import Backend, Columns, Move, RowIndex, Target
from conduit.core.experience import Schema
from conduit.errors import CapacityError, HandOverError, TopologyError
from conduit.topology.cluster import Edge, Topology
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier
from conduit.topology.fabric import Flow


@dataclass(frozen=True, slots=True)
class Mark:
    """The note of emulated columns. `inner`: their note in the backend that holds them. `flows`: they are there when these have ended.
    `held`: the room that stored columns take; None for a batch."""

    inner: Any
    flows: tuple[Flow, ...]
    held: Held | None = None


_UNMARKED = Mark(None, ())


class _Issued(threading.local):
    """What one thread has under way, as a CUDA thread has its streams."""

    def __init__(self) -> None:
        self.batches: dict[Endpoint, dict[Endpoint, Flow]] = {}
        """By destination and source, the last transfer of a batch: the next along the same edge starts after it, and what comes to a
        destination is there when all that was started for it before is."""
        self.copied: tuple[Flow, ...] = ()
        """The last transfer out of pageable memory: this thread touches every byte of it, and so can't begin another before."""
        self.adopted: dict[Endpoint, list[Flow]] = {}
        """By destination, copies of others' arrays: the next batch that this thread hands over from there comes after them."""


class EmulatedBackend:
    """Endpoints, capacities and times of `topology`; rows, arrays and dtypes of the inner backend. Device k's rows are held on the
    inner backend's device k where it has one, in its pageable memory else."""

    immediate = False

    def __init__(
        self,
        topology: Topology,
        inner: str | Backend[Any] = "reference",
        clock: Clock = REAL,
        disk: str | os.PathLike[str] | None = None,
    ) -> None:
        """`inner`: a backend or its name. `clock`: the one that a store over this lives by as well. `disk`: the folder of rows on disk,
        for an `inner` by name. TopologyError where node 0 of the topology has no pageable host memory."""
        if PAGEABLE not in topology.memories:
            raise TopologyError(
                f"topology {topology.name!r} has no {PAGEABLE} memory, from which rows come; it has {', '.join(map(str, topology.memories))}"
            )
        self.topology = topology
        self.clock = clock
        # By its name the reference is all host memory: its own pretend devices would be a second limit beside the topology's.
        self._inner = ReferenceBackend(0, disk=disk) if inner == "reference" else backends.load(inner, disk)
        here = (at for at in topology.endpoints if at.node == 0 and at != PAGEABLE)
        self._endpoints = (PAGEABLE, *here)
        self._homes = {at: _home(at, self._inner.endpoints()) for at in self._endpoints}
        self._memories = Memories(topology)
        self._links = Links(topology, clock)
        self._issued = _Issued()
        self._lost: set[Endpoint] = set()

    @property
    def name(self) -> str:
        return f"emulated({self._inner.name})"

    @property
    def framework(self) -> str:
        return self._inner.framework

    # Beside the protocol

    def traffic(self) -> Mapping[Edge, Traffic]:
        """What went along each edge until now, in emulated seconds."""
        return self._links.traffic()

    def drain(self) -> None:
        """The host waits until all that anybody started before is there."""
        self._links.drain()

    def lose(self, at: Endpoint) -> None:
        """As if the device had failed: every later call that touches it raises RuntimeError, except `release`."""
        check_endpoint(at, self._endpoints, self.name)
        self._lost.add(at)

    # The protocol

    def endpoints(self) -> Sequence[Endpoint]:
        """The topology's on node 0, pageable host first."""
        return self._endpoints

    def free_bytes(self, at: Endpoint) -> int:
        """What the topology says is free, less what columns take that were allocated or transferred here."""
        self._check(at)
        return self._memories.free_bytes(at)

    def hardware(self, at: Endpoint) -> str:
        """Nothing that is in this machine."""
        return ""

    def padded(self, rows: int, at: Endpoint) -> int:
        return self._inner.padded(rows, self._homes[at])

    def allocate(self, schema: Schema, rows: int, at: Endpoint) -> Columns[Any]:
        self._check(at)
        held = self._memories.hold(schema.row_bytes, rows, at)
        with self._really_held(at):
            return _marked(self._inner.allocate(schema, rows, self._homes[at]), at, (), held)

    def release(self, columns: Columns[Any]) -> None:
        if (held := _mark(columns).held) is not None:
            self._memories.release(held)
        self._inner.release(self._inside(columns))

    def write(self, into: Columns[Any], start: int, rows: Columns[Any]) -> Columns[Any]:
        self._check(into.at, rows.at)
        check_span(into, start, rows.rows)
        flows = self._put(into, rows, _size(rows, into.arrays))
        return self._marked_as(into, self._inner.write(self._inside(into), start, self._inside(rows)), flows)

    def scatter(self, into: Columns[Any], index: RowIndex, rows: Columns[Any], fields: Sequence[str]) -> Columns[Any]:
        self._check(into.at, rows.at)
        check_scatter(into, index, rows)
        flows = self._put(into, rows, _size(rows, fields))
        return self._marked_as(into, self._inner.scatter(self._inside(into), index, self._inside(rows), fields), flows)

    def read(self, columns: Columns[Any], index: RowIndex, fields: Sequence[str], to: Endpoint) -> Columns[Any]:
        """One transfer, from where the rows are; the gather is part of it."""
        self._check(columns.at, to)
        check_index(index, columns.rows)
        flows = self._bring((columns.at, to), len(index) * _row_size(columns, fields), _mark(columns).flows)
        return _marked(self._inner.read(self._inside(columns), index, fields, self._homes[to]), to, flows)

    def merge(self, parts: Sequence[Columns[Any]], places: Sequence[RowIndex], rows: int, to: Endpoint) -> Columns[Any]:
        """A copy of all parts within their memory, when all have come."""
        self._check(to)
        check_merge(parts, places, rows, to)
        size = sum(_size(part, part.arrays) for part in parts)
        flows = self._bring((to, to), size, [flow for part in parts for flow in _mark(part).flows])
        return _marked(
            self._inner.merge([self._inside(part) for part in parts], places, rows, self._homes[to]), to, flows
        )

    def widen(self, columns: Columns[Any], schema: Schema) -> Columns[Any]:
        """A copy of them within their memory."""
        self._check(columns.at)
        flows = self._bring((columns.at, columns.at), columns.rows * schema.row_bytes, _mark(columns).flows)
        return _marked(self._inner.widen(self._inside(columns), schema), columns.at, flows)

    def transfer(self, moves: Sequence[Move[Any]]) -> list[Columns[Any]]:
        """CapacityError before anything is copied where one of them doesn't fit."""
        sizes = [_row_size(move.columns, move.columns.arrays) for move in moves]
        for move in moves:
            self._check(move.columns.at, move.to)
        held = [self._memories.hold(size, move.columns.rows, move.to) for move, size in zip(moves, sizes, strict=True)]
        flows = [
            self._start((move.columns.at, move.to), size * move.columns.rows, _mark(move.columns).flows)
            for move, size in zip(moves, sizes, strict=True)
        ]
        copies = self._inner.transfer([Move(self._inside(move.columns), self._homes[move.to]) for move in moves])
        return [
            _marked(copy, move.to, (flow,), room)
            for copy, move, flow, room in zip(copies, moves, flows, held, strict=True)
        ]

    def adopt(self, rows: Mapping[str, Any], at: Endpoint) -> Columns[Any]:
        """From pageable memory, wherever the arrays say that they are: what a learner was handed only pretends to be on a device."""
        self._check(at)
        own = {
            path: leaf if exchange.framework_of(leaf) is not None else exchange.to_numpy(leaf)
            for path, leaf in rows.items()
        }
        flow = self._start((PAGEABLE, at), sum(leaf.nbytes for leaf in own.values()), ())
        copy = self._inner.adopt(own, self._homes[at])
        adopted = self._issued.adopted
        adopted[at] = [*_unfinished(adopted.get(at, ())), flow]
        return _marked(copy, at, (flow,))

    def landing(self, target: Target) -> Endpoint:
        """`target.device`: an endpoint or its name ("device:3", "pinned"); None: the first device where there is one, for NumPy the host.
        A sharding splits a batch over the inner backend's devices, from the host."""
        if target.framework == "numpy" or target.sharding is not None:
            exchange.place(target)
            return PAGEABLE
        exchange.place(Target(target.framework))
        if target.device is None:
            return next((at for at in self._endpoints if at.tier is Tier.DEVICE), PAGEABLE)
        named = next((at for at in self._endpoints if target.device in (at, str(at))), None)
        if named is None:
            raise HandOverError(
                f"device={target.device!r}: the emulated machine {self.topology.name!r} has {', '.join(map(str, self._endpoints))}"
            )
        return named

    def hand_over(self, columns: Columns[Any], to: Target) -> Mapping[str, Any]:
        """Returns when the rows are there, in emulated time. The arrays are the inner backend's, on the inner machine."""
        at = self.landing(to)
        self._check(columns.at, at)
        if columns.at != at and not (columns.at.is_host and at.is_host):
            columns = self.read(columns, np.arange(columns.rows), list(columns.arrays), at)
        self._links.wait((*_mark(columns).flows, *self._issued.adopted.pop(columns.at, ())))
        return self._inner.hand_over(self._inside(columns), _where_they_are(columns, to))

    def uncache(self, columns: Columns[Any]) -> None:
        self._check(columns.at)
        self._inner.uncache(self._inside(columns))

    def order(self, columns: Columns[Any]) -> None:
        """The host waits in emulated time: what it does next on a device isn't emulated, so nothing else could come later."""
        self._check(columns.at)
        self._links.wait(_mark(columns).flows)
        self._inner.order(self._inside(columns))

    def wait(self, columns: Columns[Any]) -> None:
        self._check(columns.at)
        self._links.wait(_mark(columns).flows)
        self._inner.wait(self._inside(columns))

    def _check(self, *endpoints: Endpoint) -> None:
        """ValueError for an endpoint that the topology doesn't have, RuntimeError for one that was lost."""
        for at in endpoints:
            check_endpoint(at, self._endpoints, self.name)
            if at in self._lost:
                raise RuntimeError(f"{at} is lost")

    def _inside(self, columns: Columns[Any]) -> Columns[Any]:
        """The columns as the inner backend knows them."""
        return Columns(self._homes[columns.at], columns.arrays, columns.rows, _mark(columns).inner)

    def _start(self, edge: Edge, size_bytes: int, after: Iterable[Flow]) -> Flow:
        """Starts a transfer; out of pageable memory, behind this thread's one before."""
        if edge[0].tier is not Tier.PAGEABLE:
            return self._links.start(edge, size_bytes, after)
        issued = self._issued
        flow = self._links.start(edge, size_bytes, (*after, *_unfinished(issued.copied)))
        issued.copied = (flow,)
        return flow

    def _put(self, into: Columns[Any], rows: Columns[Any], size_bytes: int) -> tuple[Flow, ...]:
        """Starts the transfer of `rows` to columns that are there already, after whatever is under way to both."""
        after = (*_mark(into).flows, *_mark(rows).flows)
        if _mark(into).held is None:
            return self._bring((rows.at, into.at), size_bytes, after)
        return (self._start((rows.at, into.at), size_bytes, after),)

    def _bring(self, edge: Edge, size_bytes: int, after: Iterable[Flow]) -> tuple[Flow, ...]:
        """Starts the transfer of a batch, in this thread's order; returns what has to end until it is there."""
        source, to = edge
        mine = self._issued.batches.setdefault(to, {})
        last = mine.get(source)
        mine[source] = self._start(edge, size_bytes, after if last is None else (*after, last))
        return _unfinished(mine.values())

    def _marked_as(self, into: Columns[Any], written: Columns[Any], flows: tuple[Flow, ...]) -> Columns[Any]:
        """What the inner backend made of `into`."""
        return _marked(written, into.at, flows, _mark(into).held)

    @contextmanager
    def _really_held(self, at: Endpoint) -> Iterator[None]:
        """Says whose memory it is that has no room."""
        try:
            yield
        except CapacityError as error:
            raise CapacityError(
                f"rows at the emulated {at} are held in memory of this machine, which has too little: {error}. Emulate fewer rows, and "
                "memories as much smaller (Topology.scaled)"
            ) from error


def _mark(columns: Columns[Any]) -> Mark:
    return _UNMARKED if columns.note is None else columns.note


def _marked(inner: Columns[Any], at: Endpoint, flows: tuple[Flow, ...], held: Held | None = None) -> Columns[Any]:
    """What the inner backend made, as columns at the endpoint that they pretend to be at."""
    return Columns(at, inner.arrays, inner.rows, Mark(inner.note, flows, held))


def _unfinished(flows: Iterable[Flow]) -> tuple[Flow, ...]:
    return tuple(flow for flow in flows if flow.end_s is None)


def _size(columns: Columns[Any], fields: Iterable[str]) -> int:
    return sum(columns.arrays[path].nbytes for path in fields)


def _row_size(columns: Columns[Any], fields: Iterable[str]) -> int:
    return _size(columns, fields) // max(columns.rows, 1)


def _home(at: Endpoint, inner: Sequence[Endpoint]) -> Endpoint:
    """Where the inner backend holds rows that pretend to be at `at`."""
    if at in inner:
        return at
    same = Endpoint(at.tier)
    return same if at.is_host and same in inner else PAGEABLE


def _where_they_are(columns: Columns[Any], to: Target) -> Target:
    """The same target, where on the inner machine the arrays are already: its device names are the emulated machine's."""
    leaf = next(iter(columns.arrays.values()), None)
    own = to.sharding is None and to.framework != "numpy" and exchange.framework_of(leaf) == to.framework
    return Target(to.framework, getattr(leaf, "device", None) if own else None, to.sharding)
