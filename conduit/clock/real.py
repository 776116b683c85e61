"""The clock on the wall."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

from conduit.clock.protocol import Condition, Task


class RealClock:
    """`time.perf_counter` and `threading`. What escapes a task goes to `threading.excepthook`."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(_bounded(seconds))

    def sleep_until(self, instant_s: float) -> None:
        self.sleep(instant_s - self.now())

    def condition(self, name: str) -> Condition:
        return _RealCondition()

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return _RealTask(thread)


class _RealCondition:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)

    def __enter__(self) -> Self:
        try:
            self._lock.acquire()
        # Ctrl-C may come when the lock is held already and the block isn't entered yet: nobody would release it.
        except BaseException:
            if self._lock._is_owned():  # pyright: ignore[reportAttributeAccessIssue]
                self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait_for(self, predicate: Callable[[], bool], deadline_s: float | None = None) -> bool:
        return bool(self._condition.wait_for(predicate, _timeout(deadline_s)))

    def notify_all(self) -> None:
        self._condition.notify_all()


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
