"""A clock that jumps over waits, finds deadlocks, and repeats any interleaving from its seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self, TypeVar

from conduit.clock.baton import Baton, VirtualTask
from conduit.clock.protocol import Condition, Task

T = TypeVar("T")


class VirtualClock:
    """Runs threads one at a time and repeats: equal seeds and equal code give equal interleavings, seen in `trace`.

    `run(main)` makes the calling thread the first task. A task gives way only where it enters or leaves a condition,
    waits, sleeps, spawns or joins, and the seed decides who goes on. When all wait, time jumps to the earliest deadline;
    when there is none, each of them gets a DeadlockError that says who waits for what. A run of more than `max_events`
    such points ends the same way. In between, code takes no time and is never pre-empted: neither the GIL nor a race
    inside plain Python code shows here.
    """

    def __init__(self, seed: int = 0, max_events: int = 1_000_000) -> None:
        self._baton = Baton(seed, max_events)

    @property
    def trace(self) -> list[tuple[float, str, str]]:
        """What happened so far: (instant, task, event)."""
        return self._baton.trace

    def run(self, main: Callable[[], T]) -> T:
        """What `main()` returned, after every task has ended. Raises the first exception that escaped a task (the others
        are then unwound where they wait), or DeadlockError. No thread outlives the call."""
        return self._baton.run(main)

    def now(self) -> float:
        return self._baton.now_s

    def sleep(self, seconds: float) -> None:
        self.sleep_until(self._baton.now_s + seconds)

    def sleep_until(self, instant_s: float) -> None:
        if instant_s > self._baton.now_s:
            self._baton.block(self._baton.me(), "sleeps", None, instant_s)
        else:
            self._baton.reach("sleeps")

    def condition(self, name: str) -> Condition:
        return _VirtualCondition(self._baton, name)

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        return self._baton.spawn(target, name)


class _VirtualCondition:
    def __init__(self, baton: Baton, name: str) -> None:
        self._baton = baton
        self.name = name
        self._owner: VirtualTask | None = None

    @property
    def holder(self) -> str | None:
        return None if self._owner is None else self._owner.name

    def __enter__(self) -> Self:
        self._acquire(self._baton.reach(f"enters {self.name}"))
        return self

    def __exit__(self, *error: object) -> None:
        if self._baton.failed:
            # A task that is being unwound may not hold it any more, and must not meet a second error here.
            self._owner = None
            return
        self._mine("leave")
        self._release()
        self._baton.reach(f"leaves {self.name}")

    def wait_for(self, predicate: Callable[[], bool], deadline_s: float | None = None) -> bool:
        me = self._mine("wait on")
        until_s = math.inf if deadline_s is None else deadline_s
        self._baton.reach(f"checks {self.name}")
        while not (holds := predicate()) and self._baton.now_s < until_s:
            self._release()
            self._baton.block(me, "waits on", self, until_s)
            self._acquire(me)
        return bool(holds)

    def notify_all(self) -> None:
        self._mine("notify")
        self._baton.wake("waits on", self)

    def rouse(self) -> None:
        self._baton.me()
        self._baton.wake("waits on", self)

    def _acquire(self, me: VirtualTask) -> None:
        if self._owner is me:
            raise RuntimeError(f"task {me.name!r} already holds condition {self.name!r}, which is not re-entrant")
        while self._owner is not None:
            self._baton.block(me, "waits to enter", self, math.inf)
        self._owner = me

    def _release(self) -> None:
        self._owner = None
        self._baton.wake("waits to enter", self)

    def _mine(self, verb: str) -> VirtualTask:
        me = self._baton.me()
        if self._owner is not me:
            raise RuntimeError(f"task {me.name!r} can't {verb} condition {self.name!r}: held by {self.holder!r}")
        return me
