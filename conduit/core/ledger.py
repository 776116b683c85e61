"""Where the seconds of an iteration went: rollout, update, ingestion and delivery, each busy, hidden and exposed."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

from conduit.clock import Clock
from conduit.core.recorder import OPERATOR, PORT, STAGE, Recorder, Slice
from conduit.core.seconds import (
    BLOCKED,
    BUSY,
    CELLS_OF,
    EXPOSED,
    STARVED,
    TOOK,
    Cells,
    OperatorSeconds,
    Port,
    Seconds,
    Stage,
    added,
    less,
    nothing,
    seconds_of,
)
from conduit.topology.endpoint import Endpoint, Tier

__all__ = ["Ledger", "OperatorSeconds", "PortCall", "Seconds", "Traffic"]


@dataclass(slots=True)
class Traffic:
    """What was read from the rows at an endpoint, and written to them. The seconds are part of the operators' busy ones."""

    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    writes: int = 0
    write_bytes: int = 0
    write_s: float = 0.0


_FEW, _MANY = 8, 64


class _Account:
    """What one thread spent. Only that thread writes it."""

    __slots__ = ("after", "apart_s", "cells", "in_port_s", "left_s", "marked", "marks", "thread")

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.cells: Cells = nothing()
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
        self._ends: deque[tuple[list[Cells], float]] = deque([([], self._began_s)], maxlen=keep + 1)
        """What had been spent when each of the last iterations ended, and when that was; before them, of the one before."""
        self.iteration_count = 0
        self._alarm_at: float = math.inf
        self._wake: Callable[[], None] = lambda: None
        self.recorder: Recorder | None = None
        """Is told what happens, while a trace is taken. A trace may end at any moment: whoever tells it looks once."""

    @property
    def iterations(self) -> tuple[Seconds, ...]:
        """The last iterations, oldest first; not the one that is running."""
        with self._lock:
            ends = list(self._ends)
        return tuple(
            seconds_of(less(added(at_end), added(at_begin)), ended_s - began_s)
            for (at_begin, began_s), (at_end, ended_s) in pairwise(ends)
        )

    @property
    def total(self) -> Seconds:
        """All iterations and the running one."""
        with self._lock:
            return seconds_of(self._sum(), min(self.now(), self._ended_s) - self._began_s)

    @property
    def by_thread(self) -> dict[str, Seconds]:
        """The same total, by the name of the thread that spent the seconds."""
        with self._lock:
            spent = {name: list(cells) for name, cells in self._retired.items()}
            for account in self._accounts:
                name = account.thread.name
                spent[name] = added([spent.get(name, nothing()), account.cells])
            return {name: seconds_of(cells, 0.0) for name, cells in spent.items()}

    def between(self, first: int, stop: int) -> Seconds | None:
        """What iterations `first`, …, `stop` - 1 took together, counted from 0; None unless all have ended, and are remembered."""
        with self._lock:
            oldest = self.iteration_count + 1 - len(self._ends)
            if not oldest <= first <= stop <= self.iteration_count:
                return None
            (at_begin, began_s), (at_end, ended_s) = self._ends[first - oldest], self._ends[stop - oldest]
        return seconds_of(less(added(at_end), added(at_begin)), ended_s - began_s)

    def threads(self) -> dict[object, Seconds]:
        """What each thread that lives has spent so far, by a key of its own."""
        with self._lock:
            return {account: seconds_of(account.cells, 0.0) for account in self._accounts}

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
        if (recorder := self.recorder) is not None:
            recorder.waited(self.now(), seconds)

    def operated(self, stage: Stage, began_s: float, begun: Slice | None = None) -> None:
        """The calling thread has been an operator at work since `began_s`. `begun`: of a trace that was told so then."""
        took_s = self.now() - began_s
        account = self.account()
        account.apart_s += took_s
        account.cells[BUSY[stage]] += took_s
        if (recorder := self.recorder) is not None:
            recorder.end(begun, stage, began_s, began_s + took_s, OPERATOR)

    def passed(self, name: str, began_s: float, told: Mapping[str, Any]) -> None:
        """The calling thread has been at work on something else since `began_s`: not counted, only traced."""
        if (recorder := self.recorder) is not None:
            recorder.passed(name, began_s, self.now(), told=told)

    def record(self, recorder: Recorder) -> bool:
        """Tells `recorder` what happens from here on; whether no other is being told."""
        with self._lock:
            if self.recorder is None:
                self.recorder = recorder
            return self.recorder is recorder

    def port(self, port: Port) -> PortCall:
        """A caller is in `port` from here on, until the call's `end()` or the end of its block: exposed, but for what it says it
        waited for others."""
        account = self.account()
        call = PortCall()
        call.ledger, call.port, call.account = self, port, account
        call.starved_s = call.blocked_s = call.ingesting_s = 0.0
        call.took = 0
        call.began_s = began_s = self.now()
        recorder = self.recorder
        if account.after is not None and not account.marks:
            cell = account.after[port]
            account.cells[cell] += began_s - account.left_s
            if recorder is not None:
                recorder.inferred("update" if cell == BUSY["update"] else "rollout", account.left_s, began_s)
        call.slice = None if recorder is None else recorder.begin(port, began_s, PORT)
        call.apart_s = account.apart_s
        return call

    def stop(self) -> None:
        """Time goes on, but no longer for this ledger."""
        self._ended_s = self.now()

    def end_iteration(self) -> None:
        now_s = self.now()
        with self._lock:
            self._ends.append((self._spent(), now_s))
            self.iteration_count += 1
        if self.iteration_count >= self._alarm_at:
            self._alarm_at = math.inf
            self._wake()

    def alarm(self, count: int, wake: Callable[[], None]) -> None:
        """Calls `wake` once, at the end of the first iteration by whose end `count` have ended; `wake` neither waits nor raises. Only
        the last alarm that was set rings."""
        self._wake, self._alarm_at = wake, count

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
            self._retired[name] = added([self._retired.get(name, nothing()), account.cells])
            self._accounts.remove(account)

    def _sum(self) -> Cells:
        return added([account.cells for account in self._accounts] + list(self._retired.values()))

    def _spent(self) -> list[Cells]:
        """What `_sum` is the sum of, as of now: whoever asks for an iteration adds it up, not the one who ends it."""
        if len(self._accounts) > _FEW:
            return [self._sum()]
        return [*(account.cells.copy() for account in self._accounts), *self._retired.values()]


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
    """A block of rollout or update. A stage inside another counts once, for the inner one. It may be entered again, also within itself, and be
    left on another thread: it is the stage of the one that entered it."""

    __slots__ = ("_entered", "_ledger", "_stage")

    def __init__(self, ledger: Ledger, stage: Stage) -> None:
        self._ledger = ledger
        self._stage: Stage = stage
        self._entered: list[tuple[_Account, float, float, Stage | None, Slice | None]] = []
        """What was so on entering: the thread's account, the time, its seconds in ports, the stage around, and the slice that began."""

    def __enter__(self) -> Self:
        account, now_s = self._ledger.account(), self._ledger.now()
        recorder = self._ledger.recorder
        begun = None if recorder is None else recorder.begin(self._stage, now_s, STAGE)
        self._entered.append((account, now_s, account.in_port_s, account.marked, begun))
        account.marks, account.marked = True, self._stage
        return self

    def __exit__(self, *error: object) -> None:
        account, began_s, in_port_s, outer, begun = self._entered.pop()
        now_s = self._ledger.now()
        busy_s = now_s - began_s - (account.in_port_s - in_port_s)
        account.marked = outer
        if outer is not None:
            account.in_port_s += busy_s
        account.cells[BUSY[self._stage]] += busy_s
        if (recorder := self._ledger.recorder) is not None:
            recorder.end(begun, self._stage, began_s, now_s, STAGE)


class Operating:
    """A block of an operator's work."""

    __slots__ = ("_began_s", "_ledger", "_slice", "_stage")

    def __init__(self, ledger: Ledger, stage: Stage) -> None:
        self._ledger = ledger
        self._stage: Stage = stage

    def __enter__(self) -> Self:
        self._began_s = self._ledger.now()
        recorder = self._ledger.recorder
        self._slice = None if recorder is None else recorder.begin(self._stage, self._began_s, OPERATOR)
        return self

    def __exit__(self, *error: object) -> None:
        self._ledger.operated(self._stage, self._began_s, self._slice)


class PortCall:
    """A call of push, pull, update_priorities or advance, which `Ledger.port` begins."""

    __slots__ = (
        "account",
        "apart_s",
        "began_s",
        "blocked_s",
        "ingesting_s",
        "ledger",
        "port",
        "slice",
        "starved_s",
        "took",
    )
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
    took: int
    """How many units a push took, or batches a pull gave."""
    slice: Slice | None
    """Of a trace, if one is taken."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        account = self.account
        own, exposed, account.after = CELLS_OF[self.port]
        account.left_s = ended_s = self.ledger.now()
        took_s = ended_s - self.began_s
        account.in_port_s += took_s
        cells = account.cells
        own_s = took_s - (account.apart_s - self.apart_s)
        if own_s > 0.0:
            cells[own] += own_s
        others_s = self.starved_s + self.blocked_s + self.ingesting_s
        if others_s:
            cells[STARVED] += self.starved_s
            cells[BLOCKED] += self.blocked_s
            cells[EXPOSED["push"]] += self.ingesting_s
        if took_s > others_s:
            cells[exposed] += took_s - others_s
        if self.took:
            cells[TOOK[self.port]] += self.took
        if (recorder := self.ledger.recorder) is not None:
            waited = (self.starved_s, self.ingesting_s, self.blocked_s)
            recorder.end(self.slice, self.port, self.began_s, ended_s, PORT, waited, self.took)
