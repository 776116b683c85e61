"""The clock on the wall."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from conduit.clock.protocol import Condition, Task

_A_MOMENT_S = 1e-6
"""A thread that sleeps for nothing at all lets nobody in."""


class RealClock:
    """`time.perf_counter` and `threading`. What escapes a task goes to `threading.excepthook`."""

    now = staticmethod(time.perf_counter)

    def sleep(self, seconds: float) -> None:
        """For 0 s: as briefly as lets another thread in."""
        time.sleep(_bounded(seconds) or _A_MOMENT_S)

    def sleep_until(self, instant_s: float) -> None:
        self.sleep(instant_s - self.now())

    def condition(self, name: str) -> Condition:
        return _RealCondition()

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return _RealTask(thread)


_RLock: Any = type(threading.RLock())


class _RealCondition(_RLock):
    """The lock itself, so that it is taken and given back in C: where Python code did that, Ctrl-C could come between the
    lock and the block, and nobody would release it."""

    def __init__(self) -> None:
        self._condition = threading.Condition(self)
        self._waiting = 0

    def wait_for(self, predicate: Callable[[], bool], deadline_s: float | None = None) -> bool:
        self._waiting += 1
        try:
            return bool(self._condition.wait_for(predicate, _timeout(deadline_s)))
        finally:
            self._waiting -= 1

    def notify_all(self) -> None:
        # Mostly nobody waits: then all that is left to do is to refuse a caller who doesn't hold the condition.
        if self._waiting or not self._is_owned():
            self._condition.notify_all()

    def rouse(self) -> None:
        with self:
            self.notify_all()


class _RealTask:
    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    @property
    def name(self) -> str:
        return self._thread.name

    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, deadline_s: float | None = None) -> bool:
        if self._thread is not threading.current_thread():
            self._thread.join(_timeout(deadline_s))
        return not self._thread.is_alive()


def _timeout(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else _bounded(deadline_s - time.perf_counter())


def _bounded(seconds: float) -> float:
    """`seconds` within what the operating system takes: infinity overflows it, a negative time is an error there."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX / 2)


REAL = RealClock()
