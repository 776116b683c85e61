"""Where the seconds of an iteration went: rollout, update, ingestion and delivery, each busy, hidden and exposed."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, Self

from conduit.clock import Clock
from conduit.topology.endpoint import Endpoint, Tier

Stage = Literal["rollout", "update", "ingestion", "delivery"]
Port = Literal["push", "pull", "priorities", "advance"]


@dataclass(slots=True)
class OperatorSeconds:
    """`busy_s`: the operator was at work, on any thread, or push and pull themselves were (checks, the copy of what is
    pushed). `exposed_s`: the callers of push (ingestion) or pull (delivery) waited for any of it."""

    busy_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Busy seconds that nobody waited for."""
        return max(0.0, self.busy_s - self.exposed_s)


@dataclass(slots=True)
class Seconds:
    """The seconds of one iteration, or of a whole run."""

    rollout_s: float = 0.0
    update_s: float = 0.0
    ingestion: OperatorSeconds = field(default_factory=OperatorSeconds)
    delivery: OperatorSeconds = field(default_factory=OperatorSeconds)
    starved_s: float = 0.0
    """Learners waited for rows that no actor had pushed yet."""
    blocked_s: float = 0.0
    """Actors waited for learners: on-policy, for the next iteration."""
    wall_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Experience-path seconds on the critical path (the paper's exposed experience-path latency)."""
        return self.ingestion.exposed_s + self.delivery.exposed_s


@dataclass(slots=True)
class Traffic:
    """What was read from the rows at an endpoint, and written to them. The seconds are part of the operators' busy ones."""

    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    writes: int = 0
    write_bytes: int = 0
    write_s: float = 0.0


_CELLS = 8
_BUSY: dict[Stage, int] = {"rollout": 0, "update": 1, "ingestion": 2, "delivery": 4}
_EXPOSED: dict[Port, int] = {"push": 3, "pull": 5, "priorities": 5, "advance": 5}
"""Priorities and advance count for delivery."""
_STARVED, _BLOCKED = 6, 7

Cells = list[float]
"""The seconds of an account, flat: a push is a matter of microseconds, and it is counted, too."""

_MANY = 64


def _between(before: Port, port: Port) -> Stage:
    """What a thread did between two calls, where it didn't mark it."""
    return "update" if before == "pull" or (before == "priorities" and port != "push") else "rollout"


_CELLS_OF: dict[Port, tuple[int, int, dict[Port, int]]] = {
    port: (exposed - 1, exposed, {following: _BUSY[_between(port, following)] for following in _EXPOSED})
    for port, exposed in _EXPOSED.items()
}
"""The cells of a call: of its own work, of what it exposes, and, by the call that follows, of the time until that."""


class _Account:
    """What one thread spent. Only that thread writes it."""

    __slots__ = ("after", "apart_s", "cells", "in_port_s", "left_s", "marked", "marks", "thread")

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.cells: Cells = [0.0] * _CELLS
        self.in_port_s = 0.0
        self.apart_s = 0.0
        """How long it waited in the store, or was an operator."""
        self.marks = False
        """Whether the thread marks its stages: then only what it marks counts."""
        self.marked: Stage | None = None
        self.after: dict[Port, int] | None = None
        """The cell of the time since the last call, by the call that comes next, and when the last one ended."""
        self.left_s = 0.0


class Ledger:
    """Counts seconds by stage, iteration and thread. An iteration ends where the store says so: off-policy at each pull,
    on-policy at `advance()`. Rollout and update are marked by `store.rollout()` and `store.update()`, and of a thread that marks
    only what it marks counts. Without marks they are inferred from what a thread called before and after (between a pull and
    the next push is update, so a loop that acts after updating without `update_priorities` in between should mark)."""

    def __init__(self, clock: Clock, keep: int = 4096) -> None:
        """`keep`: how many iterations to remember."""
        self.now = clock.now
        self._lock = threading.Lock()
        self._local = threading.local()
        self._accounts: list[_Account] = []
        self._retired: dict[str, Cells] = {}
        self._began_s = clock.now()
        self._ended_s = math.inf
        self._meters: dict[Endpoint, TrafficMeter] = {}
        self._ends: deque[tuple[Cells, float]] = deque([(_nothing(), self._began_s)], maxlen=keep + 1)
        """What had been spent when each of the last iterations ended, and when that was; before them, of the one before."""
        self.iteration_count = 0

    @property
    def iterations(self) -> tuple[Seconds, ...]:
        """The last iterations, oldest first; not the one that is running."""
        with self._lock:
            ends = list(self._ends)
        return tuple(
            _seconds([spent - before for spent, before in zip(at_end, at_begin, strict=True)], ended_s - began_s)
            for (at_begin, began_s), (at_end, ended_s) in pairwise(ends)
        )

    @property
    def total(self) -> Seconds:
        """All iterations and the running one."""
        with self._lock:
            return _seconds(self._sum(), min(self.now(), self._ended_s) - self._began_s)

    @property
    def by_thread(self) -> dict[str, Seconds]:
        """The same total, by the name of the thread that spent the seconds."""
        with self._lock:
            spent = {name: list(cells) for name, cells in self._retired.items()}
            for account in self._accounts:
                name = account.thread.name
                spent[name] = _add([spent.get(name, _nothing()), account.cells])
            return {name: _seconds(cells, 0.0) for name, cells in spent.items()}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What the rows on disk cost, by endpoint; nothing is counted for those in memory."""
        with self._lock:
            return {str(at): replace(meter.traffic) for at, meter in self._meters.items()}

    def meter(self, at: Endpoint) -> TrafficMeter | None:
        """Whom to tell what rows at `at` cost; None where that isn't counted."""
        if at.tier is not Tier.DISK:
            return None
        with self._lock:
            return self._meters.setdefault(at, TrafficMeter(self.now, self._lock))

    def mark(self, stage: Stage) -> Mark:
        """The block is `stage`, less the time it spends in push and pull."""
        return Mark(self, stage)

    def operator(self, stage: Stage) -> Operating:
        """The block is an operator at work."""
        return Operating(self, stage)

    def waited(self, seconds: float) -> None:
        """The calling thread has been in one of the store's waits."""
        self.account().apart_s += seconds

    def operated(self, stage: Stage, began_s: float) -> None:
        """The calling thread has been an operator at work since `began_s`."""
        took_s = self.now() - began_s
        account = self.account()
        account.apart_s += took_s
        account.cells[_BUSY[stage]] += took_s

    def port(self, port: Port) -> PortCall:
        """A caller is in `port` from here on, until the call's `end()` or the end of its block: exposed, but for what it says it
        waited for others."""
        account = self.account()
        call = PortCall()
        call.ledger, call.port, call.account = self, port, account
        call.starved_s = call.blocked_s = call.ingesting_s = 0.0
        call.began_s = began_s = self.now()
        if account.after is not None and not account.marks:
            account.cells[account.after[port]] += began_s - account.left_s
        call.apart_s = account.apart_s
        return call

    def stop(self) -> None:
        """Time goes on, but no longer for this ledger."""
        self._ended_s = self.now()

    def end_iteration(self) -> None:
        now_s = self.now()
        with self._lock:
            self._ends.append((self._sum(), now_s))
            self.iteration_count += 1

    def account(self) -> _Account:
        """The calling thread's account."""
        try:
            return self._local.account
        except AttributeError:
            account = self._local.account = _Account()
            with self._lock:
                self._accounts.append(account)
                if len(self._accounts) > _MANY:
                    self._retire()
            return account

    def _retire(self) -> None:
        """Accounts of threads that have ended are kept by name only."""
        for account in [each for each in self._accounts if not each.thread.is_alive()]:
            name = account.thread.name
            self._retired[name] = _add([self._retired.get(name, _nothing()), account.cells])
            self._accounts.remove(account)

    def _sum(self) -> Cells:
        return _add([account.cells for account in self._accounts] + list(self._retired.values()))


class TrafficMeter:
    """Counts the traffic of one endpoint, for all shards there."""

    def __init__(self, now: Callable[[], float], lock: threading.Lock) -> None:
        self.now = now
        self.traffic = Traffic()
        self._lock = lock

    def read(self, size: int, began_s: float) -> None:
        """A call that began then has read so many bytes."""
        took_s, traffic = self.now() - began_s, self.traffic
        with self._lock:
            traffic.reads += 1
            traffic.read_bytes += size
            traffic.read_s += took_s

    def wrote(self, size: int, began_s: float) -> None:
        took_s, traffic = self.now() - began_s, self.traffic
        with self._lock:
            traffic.writes += 1
            traffic.write_bytes += size
            traffic.write_s += took_s


class Mark:
    """A block of rollout or update. A stage inside another counts once, for the inner one."""

    __slots__ = ("_began_s", "_in_port_s", "_ledger", "_outer", "_stage")

    def __init__(self, ledger: Ledger, stage: Stage) -> None:
        self._ledger = ledger
        self._stage: Stage = stage
        self._outer: Stage | None = None

    def __enter__(self) -> Self:
        account = self._ledger.account()
        self._began_s, self._in_port_s = self._ledger.now(), account.in_port_s
        account.marks = True
        self._outer, account.marked = account.marked, self._stage
        return self

    def __exit__(self, *error: object) -> None:
        account, now_s = self._ledger.account(), self._ledger.now()
        busy_s = now_s - self._began_s - (account.in_port_s - self._in_port_s)
        account.marked = self._outer
        if self._outer is not None:
            account.in_port_s += busy_s
        account.cells[_BUSY[self._stage]] += busy_s


class Operating:
    """A block of an operator's work."""

    __slots__ = ("_began_s", "_ledger", "_stage")

    def __init__(self, ledger: Ledger, stage: Stage) -> None:
        self._ledger = ledger
        self._stage: Stage = stage

    def __enter__(self) -> Self:
        self._began_s = self._ledger.now()
        return self

    def __exit__(self, *error: object) -> None:
        self._ledger.operated(self._stage, self._began_s)


class PortCall:
    """A call of push, pull, update_priorities or advance, which `Ledger.port` begins."""

    __slots__ = ("account", "apart_s", "began_s", "blocked_s", "ingesting_s", "ledger", "port", "starved_s")
    ledger: Ledger
    port: Port
    account: _Account
    began_s: float
    apart_s: float
    """The account's by then."""
    starved_s: float
    """How long the call waited for rows that nobody had pushed."""
    blocked_s: float
    """How long it waited for learners to end the iteration."""
    ingesting_s: float
    """How long a pull waited for rows that were pushed and not ingested yet, or ingested them itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        account = self.account
        own, exposed, account.after = _CELLS_OF[self.port]
        account.left_s = ended_s = self.ledger.now()
        took_s = ended_s - self.began_s
        account.in_port_s += took_s
        cells = account.cells
        own_s = took_s - (account.apart_s - self.apart_s)
        if own_s > 0.0:
            cells[own] += own_s
        others_s = self.starved_s + self.blocked_s + self.ingesting_s
        if others_s:
            cells[_STARVED] += self.starved_s
            cells[_BLOCKED] += self.blocked_s
            cells[_EXPOSED["push"]] += self.ingesting_s
        if took_s > others_s:
            cells[exposed] += took_s - others_s


def _nothing() -> Cells:
    return [0.0] * _CELLS


def _add(accounts: Sequence[Cells]) -> Cells:
    """Their sum, cell by cell, in a list of its own; of at least one unless nothing was spent."""
    if not accounts:
        return _nothing()
    total = accounts[0].copy()
    for cells in accounts[1:]:
        total = [a + b for a, b in zip(total, cells, strict=True)]
    return total


def _seconds(cells: Cells, wall_s: float) -> Seconds:
    rollout_s, update_s, ing_busy_s, ing_exposed_s, del_busy_s, del_exposed_s, starved_s, blocked_s = cells
    return Seconds(
        rollout_s,
        update_s,
        OperatorSeconds(ing_busy_s, ing_exposed_s),
        OperatorSeconds(del_busy_s, del_exposed_s),
        starved_s,
        blocked_s,
        wall_s,
    )
