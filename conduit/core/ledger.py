"""Where the seconds of an iteration went: rollout, update, ingestion and delivery, each busy, hidden and exposed."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Self

from conduit.clock import Clock

Stage = Literal["rollout", "update", "ingestion", "delivery"]
Port = Literal["push", "pull", "priorities", "advance"]

_BETWEEN: dict[tuple[Port, Port], Stage] = {
    ("push", "push"): "rollout",
    ("priorities", "push"): "rollout",
    ("advance", "push"): "rollout",
    ("push", "pull"): "rollout",
    ("push", "advance"): "rollout",
    ("pull", "pull"): "update",
    ("pull", "priorities"): "update",
    ("pull", "advance"): "update",
    ("pull", "push"): "update",
    ("priorities", "pull"): "update",
    ("priorities", "priorities"): "update",
    ("priorities", "advance"): "update",
    ("advance", "pull"): "rollout",
}
"""What a thread did between two calls, where it didn't mark it."""


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


_CELLS = 8
_BUSY: dict[Stage, int] = {"rollout": 0, "update": 1, "ingestion": 2, "delivery": 4}
_EXPOSED: dict[Port, int] = {"push": 3, "pull": 5, "priorities": 5, "advance": 5}
"""Priorities and advance count for delivery."""
_OWN: dict[Port, int] = {port: cell - 1 for port, cell in _EXPOSED.items()}
_STARVED, _BLOCKED = 6, 7

Cells = list[float]
"""The seconds of an account, flat: a push is a matter of microseconds, and it is counted, too."""

_MANY = 64


class _Account:
    """What one thread spent. Only that thread writes it."""

    __slots__ = ("cells", "in_port_s", "last", "marked", "marks", "operating_s", "thread")

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.cells: Cells = [0.0] * _CELLS
        self.in_port_s = 0.0
        self.operating_s = 0.0
        self.marks = False
        """Whether the thread marks its stages: then only what it marks counts."""
        self.marked: Stage | None = None
        self.last: tuple[Port, float] | None = None

    def infer(self, port: Port, now_s: float) -> None:
        """Counts what the thread did, unmarked, between its last call and one of `port`."""
        assert self.last is not None
        before, since_s = self.last
        self.cells[_BUSY[_BETWEEN.get((before, port), "rollout")]] += now_s - since_s


class Ledger:
    """Counts seconds by stage, iteration and thread. An iteration ends where the store says so: off-policy at each pull,
    on-policy at `advance()`. Rollout and update are marked by `store.rollout()` and `store.update()`, and of a thread that marks
    only what it marks counts. Without marks they are inferred from what a thread called before and after (between a pull and
    the next push is update, so a loop that acts after updating without `update_priorities` in between should mark)."""

    def __init__(self, clock: Clock, waited_s: Callable[[], float], keep: int = 4096) -> None:
        """`waited_s`: how long the calling thread has been in the store's waits; `keep`: how many iterations to remember."""
        self.now = clock.now
        self.waited_s = waited_s
        self._lock = threading.Lock()
        self._local = threading.local()
        self._accounts: list[_Account] = []
        self._retired: dict[str, Cells] = {}
        self._began_s = self._iteration_began_s = clock.now()
        self._ended_s = math.inf
        self._before: Cells = [0.0] * _CELLS
        self._iterations: deque[tuple[Cells, float]] = deque(maxlen=keep)
        self.iteration_count = 0

    @property
    def iterations(self) -> tuple[Seconds, ...]:
        """The last iterations, oldest first; not the one that is running."""
        with self._lock:
            return tuple(_seconds(cells, wall_s) for cells, wall_s in self._iterations)

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
                spent[name] = _add((spent.get(name, [0.0] * _CELLS), account.cells))
            return {name: _seconds(cells, 0.0) for name, cells in spent.items()}

    def mark(self, stage: Stage) -> Mark:
        """The block is `stage`, less the time it spends in push and pull."""
        return Mark(self, stage)

    def operator(self, stage: Stage) -> Operating:
        """The block is an operator at work."""
        return Operating(self, _BUSY[stage])

    def port(self, port: Port) -> PortCall:
        """The block is a caller in `port`: exposed, but for what the block says it waited for others."""
        return PortCall(self, port)

    def stop(self) -> None:
        """Time goes on, but no longer for this ledger."""
        self._ended_s = self.now()

    def end_iteration(self) -> None:
        now_s = self.now()
        with self._lock:
            spent = self._sum()
            self._iterations.append(
                ([a - b for a, b in zip(spent, self._before, strict=True)], now_s - self._iteration_began_s)
            )
            self._before, self._iteration_began_s = spent, now_s
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
            self._retired[name] = _add((self._retired.get(name, [0.0] * _CELLS), account.cells))
            self._accounts.remove(account)

    def _sum(self) -> Cells:
        return _add([*self._retired.values(), *(account.cells for account in self._accounts)])


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

    __slots__ = ("_began_s", "_cell", "_ledger")

    def __init__(self, ledger: Ledger, cell: int) -> None:
        self._ledger, self._cell = ledger, cell

    def __enter__(self) -> Self:
        self._began_s = self._ledger.now()
        return self

    def __exit__(self, *error: object) -> None:
        took_s = self._ledger.now() - self._began_s
        account = self._ledger.account()
        account.operating_s += took_s
        account.cells[self._cell] += took_s


class PortCall:
    """A call of push, pull, update_priorities or advance."""

    __slots__ = ("_began_s", "_ledger", "_operating_s", "_port", "_waited_s", "blocked_s", "ingesting_s", "starved_s")

    def __init__(self, ledger: Ledger, port: Port) -> None:
        self._ledger = ledger
        self._port: Port = port
        self.starved_s = 0.0
        """How long the call waited for rows that nobody had pushed."""
        self.blocked_s = 0.0
        """How long it waited for learners to end the iteration."""
        self.ingesting_s = 0.0
        """How long a pull waited for rows that were pushed and not ingested yet, or ingested them itself."""

    def __enter__(self) -> Self:
        ledger = self._ledger
        account = ledger.account()
        self._began_s = began_s = ledger.now()
        if not account.marks and account.last is not None:
            account.infer(self._port, began_s)
        self._waited_s, self._operating_s = ledger.waited_s(), account.operating_s
        return self

    def __exit__(self, *error: object) -> None:
        ledger = self._ledger
        account, ended_s = ledger.account(), ledger.now()
        took_s = ended_s - self._began_s
        account.last = (self._port, ended_s)
        account.in_port_s += took_s
        own_s = took_s - (ledger.waited_s() - self._waited_s) - (account.operating_s - self._operating_s)
        cells = account.cells
        cells[_OWN[self._port]] += max(0.0, own_s)
        cells[_EXPOSED[self._port]] += max(0.0, took_s - self.starved_s - self.blocked_s - self.ingesting_s)
        cells[_EXPOSED["push"]] += self.ingesting_s
        cells[_STARVED] += self.starved_s
        cells[_BLOCKED] += self.blocked_s


def _add(accounts: Iterable[Cells]) -> Cells:
    total = [0.0] * _CELLS
    for cells in accounts:
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
