"""Where the seconds of an iteration went: rollout, update, ingestion and delivery, each busy, hidden and exposed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

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

    def add(self, stage: Stage, seconds: float) -> None:
        match stage:
            case "rollout":
                self.rollout_s += seconds
            case "update":
                self.update_s += seconds
            case "ingestion":
                self.ingestion.busy_s += seconds
            case "delivery":
                self.delivery.busy_s += seconds

    def expose(self, port: Port, own_s: float, exposed_s: float) -> None:
        """Adds a call of a port: its own work, and what it exposed in all. Priorities and advance count for delivery."""
        operator = self.ingestion if port == "push" else self.delivery
        operator.busy_s += own_s
        operator.exposed_s += exposed_s


class _Thread(threading.local):
    """What is remembered of each thread that calls the store."""

    in_port_s = 0.0
    operating_s = 0.0
    marked: Stage | None = None
    last: tuple[Port, float] | None = None


class Ledger:
    """Counts seconds by stage, iteration and thread. An iteration ends where the store says so: off-policy at each pull,
    on-policy at `advance()`. Rollout and update are marked by `store.rollout()` and `store.update()`; without marks they are
    inferred from what a thread called before and after (between a pull and the next push is update, so a loop that acts
    after updating without `update_priorities` in between should mark its stages)."""

    def __init__(self, clock: Clock, waited_s: Callable[[], float], keep: int = 4096) -> None:
        """`waited_s`: how long the calling thread has been in the store's waits; `keep`: how many iterations to remember."""
        self._clock = clock
        self._waited_s = waited_s
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._began_s = self._iteration_began_s = clock.now()
        self._current = Seconds()
        self._total = Seconds()
        self._by_thread: dict[str, Seconds] = {}
        self._iterations: deque[Seconds] = deque(maxlen=keep)
        self.iteration_count = 0

    @property
    def iterations(self) -> tuple[Seconds, ...]:
        """The last iterations, oldest first; not the one that is running."""
        with self._lock:
            return tuple(self._iterations)

    @property
    def total(self) -> Seconds:
        """All iterations and the running one."""
        self._total.wall_s = self._clock.now() - self._began_s
        return self._total

    @property
    def by_thread(self) -> dict[str, Seconds]:
        """The same total, by the name of the thread that spent the seconds."""
        with self._lock:
            return dict(self._by_thread)

    @contextmanager
    def mark(self, stage: Stage) -> Iterator[None]:
        """The block is `stage`, less the time it spends in push and pull."""
        thread = self._thread
        outer, thread.marked = thread.marked, stage
        began_s, in_port_s = self._clock.now(), thread.in_port_s
        try:
            yield
        finally:
            busy_s = self._clock.now() - began_s - (thread.in_port_s - in_port_s)
            thread.marked = outer
            if outer is not None:
                # A stage inside another counts once, for the inner one.
                thread.in_port_s += busy_s
            if thread.last is not None:
                thread.last = (thread.last[0], self._clock.now())
            self._count(stage, busy_s)

    @contextmanager
    def operator(self, stage: Stage) -> Iterator[None]:
        """The block is an operator at work."""
        began_s = self._clock.now()
        try:
            yield
        finally:
            took_s = self._clock.now() - began_s
            self._thread.operating_s += took_s
            self._count(stage, took_s)

    @contextmanager
    def port(self, port: Port) -> Iterator[Wait]:
        """The block is a caller in `port`: exposed, but for what the block says it waited for others."""
        thread, began_s = self._thread, self._clock.now()
        if thread.marked is None and thread.last is not None:
            self._infer(thread.last, port, began_s)
        wait, waited_s, operating_s = Wait(), self._waited_s(), thread.operating_s
        try:
            yield wait
        finally:
            ended_s = self._clock.now()
            thread.last = (port, ended_s)
            thread.in_port_s += ended_s - began_s
            exposed_s = max(0.0, ended_s - began_s - wait.starved_s - wait.blocked_s)
            idle_s = self._waited_s() - waited_s
            own_s = max(0.0, ended_s - began_s - idle_s - (thread.operating_s - operating_s))
            with self._lock:
                for seconds in self._accounts():
                    seconds.expose(port, own_s, exposed_s)
                    seconds.starved_s += wait.starved_s
                    seconds.blocked_s += wait.blocked_s

    def end_iteration(self) -> None:
        now_s = self._clock.now()
        with self._lock:
            self._current.wall_s = now_s - self._iteration_began_s
            self._iterations.append(self._current)
            self._current, self._iteration_began_s = Seconds(), now_s
            self.iteration_count += 1

    def _infer(self, last: tuple[Port, float], port: Port, now_s: float) -> None:
        before, since_s = last
        self._count(_BETWEEN.get((before, port), "rollout"), now_s - since_s)

    def _count(self, stage: Stage, seconds: float) -> None:
        with self._lock:
            for account in self._accounts():
                account.add(stage, seconds)

    def _accounts(self) -> tuple[Seconds, Seconds, Seconds]:
        name = threading.current_thread().name
        return self._current, self._total, self._by_thread.setdefault(name, Seconds())


@dataclass(slots=True)
class Wait:
    """What a call in a port waited for that is not the experience path's own work."""

    starved_s: float = 0.0
    blocked_s: float = 0.0
