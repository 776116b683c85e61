"""Why waits end early: a store that was closed, or an operator that failed. One reason for all of a store's waits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from numbers import Real
from typing import TypeGuard

from conduit.clock import Clock, Condition
from conduit.errors import CancelledError, ConduitError, OperatorError, SettingError, WaitTimeout


class Halt:
    """Makes the conditions that a store's parts wait on, and ends every wait once there is a reason to.

    The first reason stays. A wait that ends because of it raises a copy of it, so that tracebacks of different
    threads don't pile up on one exception. What isn't an error of Conduit's becomes an OperatorError, with it as the cause."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.reason: ConduitError | None = None
        self._conditions: list[Condition] = []
        self.callers: dict[int, Waiting] = {}
        """By thread: the call it is in, if that may be cancelled."""
        self.tell_waited: Callable[[float], None] = lambda seconds: None
        """Is told, after every wait, how long the calling thread was in it."""

    def condition(self, name: str) -> Condition:
        condition = self.clock.condition(name)
        self._conditions.append(condition)
        return condition

    def now_because(self, reason: BaseException) -> None:
        """Ends all waits, now and later, with `reason`. Must not be called while holding one of the conditions."""
        self._set(reason)
        self.wake()

    def soon_because(self, reason: BaseException) -> None:
        """The same for a caller that may hold conditions: whoever asks from now on hears of it, and a thread of its own wakes
        those who wait."""
        self._set(reason)
        self.clock.spawn(self.wake, "conduit-halt")

    def _set(self, reason: BaseException) -> None:
        if self.reason is None:
            self.reason = reason if _is_ours(reason) else _operator_error(reason)

    def wake(self) -> None:
        """All who wait look again. Must not be called while holding one of the conditions."""
        for condition in list(self._conditions):
            with condition:
                condition.notify_all()

    def check(self) -> None:
        """Raises the reason, if there is one."""
        if self.reason is not None:
            raise copy.copy(self.reason) from (self.reason.__cause__ or self.reason)

    def deadline_s(self, timeout_s: float) -> float:
        """The instant `timeout_s` from now. SettingError unless it is a number of seconds ≥ 0."""
        return self.clock.now() + check_timeout(timeout_s)

    def wait(
        self, condition: Condition, until: Callable[[], bool], deadline_s: float | None, why: Callable[[], str]
    ) -> None:
        """Waits, holding `condition`, until `until()`. Raises the reason to halt, or WaitTimeout with `why()`, which must take no
        condition, at the deadline."""
        done = until()
        if not done and self.reason is None:
            began_s = self.clock.now()
            # What has no deadline ends by itself, and must not be left before.
            mine = None if deadline_s is None else self.callers.get(threading.get_ident())
            if mine is not None:
                mine.why = why
            done = condition.wait_for(
                lambda: self.reason is not None or until() or (mine is not None and mine.cancelled), deadline_s
            )
            self.tell_waited(self.clock.now() - began_s)
            if mine is not None and mine.cancelled and not until():
                self.check()
                raise CancelledError(f"the wait was cancelled: {why()}")
        self.check()
        if not done:
            raise WaitTimeout(why())


class Waiting:
    """A thread in a call that may be cancelled, and what the wait that it is in, or was in last, is for."""

    __slots__ = ("cancelled", "since_s", "who", "why")

    def __init__(self, who: str, since_s: float) -> None:
        self.who = who
        self.since_s = since_s
        self.why: Callable[[], str] = _why_nothing
        self.cancelled = False
        """Its wait, or the one that it comes to before it leaves the block, ends with CancelledError: one that has a deadline."""


class Waiters:
    """The threads that are in calls of one port, which may be cancelled."""

    def __init__(self, halt: Halt) -> None:
        self._halt = halt
        self._waiting: dict[int, Waiting] = {}

    def __enter__(self) -> Waiting:
        me = threading.get_ident()
        mine = Waiting(threading.current_thread().name, self._halt.clock.now())
        self._waiting[me] = self._halt.callers[me] = mine
        return mine

    def __exit__(self, *error: object) -> None:
        me = threading.get_ident()
        self._waiting.pop(me, None)
        self._halt.callers.pop(me, None)

    def now(self) -> list[Waiting]:
        """Those that are in their blocks."""
        return list(self._waiting.values())

    def cancel(self) -> int:
        """Cancels the calls that are in progress, and returns how many. Must not be called while holding a condition."""
        waiting = self.now()
        for each in waiting:
            each.cancelled = True
        if waiting:
            self._halt.wake()
        return len(waiting)


def _why_nothing() -> str:
    return "it is about to go on"


def check_timeout(timeout_s: object) -> float:
    """`timeout_s`. SettingError unless it is a number of seconds ≥ 0."""
    if not isinstance(timeout_s, Real) or isinstance(timeout_s, bool) or not float(timeout_s) >= 0:
        raise SettingError(f"timeout_s={timeout_s!r}: expected seconds ≥ 0; math.inf waits for ever")
    return float(timeout_s)


def _is_ours(reason: BaseException) -> TypeGuard[ConduitError]:
    """Whether it is one of Conduit's own classes, which can be copied; a user's subclass may be made otherwise."""
    return isinstance(reason, ConduitError) and type(reason).__module__ == ConduitError.__module__


def _operator_error(reason: BaseException) -> OperatorError:
    error = OperatorError(f"the store stopped, since {type(reason).__name__} was raised inside it: {reason}")
    error.__cause__ = reason
    return error
