"""What the store may ask of time and threads: everything that waits, times out or spawns goes through a Clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self


class Condition(Protocol):
    """A lock that can be waited on. Not re-entrant."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """Waits until `predicate()` holds or the clock reaches `deadline_s` (None or infinity: for ever); the
        predicate's last value. The condition is held on entry, on return and whenever `predicate` is called."""
        ...

    def notify_all(self) -> None:
        """Everyone in `wait_for` looks at its predicate again. The condition is held."""
        ...

    def rouse(self) -> None:
        """As `notify_all`, for a caller who doesn't hold the condition. It never gives way to another task, so it may be called
        under a plain lock, which on a virtual clock mustn't be held across any other call of the clock."""
        ...


class Task(Protocol):
    """A thread of the clock's."""

    @property
    def name(self) -> str: ...

    def alive(self) -> bool: ...

    def join(self, deadline_s: float | None = None) -> bool:
        """Waits until the task has ended or the clock reaches `deadline_s`; whether it has ended. At once False for the
        calling task itself."""
        ...


class Clock(Protocol):
    """Time in seconds from an arbitrary start, and the threads that live by it. Instants are absolute."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def sleep_until(self, instant_s: float) -> None:
        """Returns at `instant_s`, at once if that is past."""
        ...

    def condition(self, name: str) -> Condition:
        """A new condition; the name is for reports."""
        ...

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        """Runs `target` on a daemon thread of its own."""
        ...
