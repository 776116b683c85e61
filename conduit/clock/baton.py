"""Real threads, run one at a time in an order that a seed decides."""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol, TypeVar

from conduit.errors import DeadlockError

T = TypeVar("T")

INTERRUPT_GRACE_S = 5.0
"""How long an interrupted `run` waits, in real time, for the task that is running to notice."""


class Awaited(Protocol):
    """What a task may wait for."""

    @property
    def name(self) -> str: ...

    @property
    def holder(self) -> str | None:
        """The task that stands in the way, where there is one."""
        ...


@dataclass(frozen=True, slots=True)
class Wait:
    verb: str
    on: Awaited | None
    since_s: float
    until_s: float

    def __str__(self) -> str:
        on = "" if self.on is None else f" {self.on.name!r}"
        held = "" if self.on is None or self.on.holder is None else f", held by {self.on.holder!r},"
        return f"{self.verb}{on}{held} since {self.since_s:g} s"


class VirtualTask:
    """A thread that runs only while it has the baton."""

    def __init__(self, baton: Baton, name: str) -> None:
        self._baton = baton
        self._name = name
        self.turn = threading.Lock()  # released when the baton comes
        self.turn.acquire()
        self.thread_id = 0
        self.wait: Wait | None = None
        self.ended = False
        self.told = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def holder(self) -> None:
        return None

    def alive(self) -> bool:
        return not self.ended

    def join(self, deadline_s: float | None = None) -> bool:
        if self.ended:
            return True
        me = self._baton.reach(f"joins {self._name}")
        if me is self:
            return False
        until_s = math.inf if deadline_s is None else deadline_s
        while not self.ended and self._baton.now_s < until_s:
            self._baton.block(me, "waits for the end of", self, until_s)
        return self.ended


class Baton:
    """Who runs, who waits for what, and what time it is. All of it belongs to the running task, so it needs no lock."""

    def __init__(self, seed: int, max_events: int) -> None:
        self.now_s = 0.0
        self.trace: list[tuple[float, str, str]] = []
        self._seed = seed
        self._max_events = max_events
        self._random = random.Random(seed)
        # Some seeds switch at every chance, others let a task run on: queues fill and starve only in long runs.
        self._switch_odds = self._random.choice((0.1, 0.5, 1.0))
        self._main = VirtualTask(self, "main")
        self._running: VirtualTask | None = None
        self._alive: list[VirtualTask] = []
        self._runnable: list[VirtualTask] = []
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    def run(self, main: Callable[[], T]) -> T:
        if self._running is not None:
            raise RuntimeError("this virtual clock is already running")
        task = self._main = self._running = VirtualTask(self, "main")
        task.thread_id = threading.get_ident()
        self._alive, self._runnable, self._threads, self._error = [task], [], [], None
        results: list[T] = []
        self._live(task, lambda: results.append(main()))
        if self._running is task:
            for thread in self._threads:
                thread.join()
        self._running = None
        if self._error is not None:
            raise self._error
        return results[0]

    def spawn(self, target: Callable[[], None], name: str) -> VirtualTask:
        self.me()
        task = VirtualTask(self, name)
        thread = threading.Thread(target=self._begin, args=(task, target), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._alive.append(task)
        self._runnable.append(task)
        self.reach(f"spawns {name}")
        return task

    def me(self) -> VirtualTask:
        """The running task, which the caller must be."""
        me = self._running
        if me is None or me.thread_id != threading.get_ident():
            caller = threading.current_thread().name
            raise RuntimeError(f"thread {caller!r} isn't a task of this virtual clock; expected run(main) or its tasks")
        if self._error is not None:
            self._unwind(me)
        return me

    def reach(self, event: str) -> VirtualTask:
        """The running task comes to a point where another may go on instead; it stays runnable."""
        me = self.me()
        self._note(me, event)
        if self._runnable and self._random.random() < self._switch_odds:
            self._runnable.append(me)
            self._switch(me)
        return me

    def block(self, me: VirtualTask, verb: str, on: Awaited | None, until_s: float) -> None:
        """`me`, the running task, gives way until it is woken or time reaches `until_s`."""
        self._note(me, verb if on is None else f"{verb} {on.name}")
        me.wait = Wait(verb, on, self.now_s, until_s)
        self._switch(me)

    def wake(self, verb: str, on: Awaited) -> None:
        """Everyone who waits like this becomes runnable."""
        for task in self._alive:
            if task.wait is not None and task.wait.on is on and task.wait.verb == verb:
                self._make_runnable(task)

    @property
    def failed(self) -> bool:
        """The run is over: something escaped a task, or all wait for ever. Tasks are being unwound."""
        return self._error is not None

    def _begin(self, task: VirtualTask, target: Callable[[], None]) -> None:
        task.turn.acquire()
        task.thread_id = threading.get_ident()
        self._live(task, target if self._error is None else lambda: None)

    def _live(self, task: VirtualTask, target: Callable[[], None]) -> None:
        """A task's life from its first turn. The first task's last turn comes when all have ended."""
        try:
            target()
        except _Unwind:
            pass
        except BaseException as error:
            self._error = self._error or error
        if self._running is not task:
            return  # interrupted while another task wouldn't give way
        self.trace.append((self.now_s, task.name, "ends"))
        self._alive.remove(task)
        task.ended = True
        self.wake("waits for the end of", task)
        chosen = self._next()
        if task is not self._main:
            self._give(chosen)
        elif chosen is not task:
            self._give_and_wait(chosen, task)

    def _switch(self, me: VirtualTask) -> None:
        """Someone is chosen to run; returns when it is `me`."""
        chosen = self._next()
        if chosen is not me:
            self._give_and_wait(chosen, me)
        if self._error is not None:
            self._unwind(me)

    def _give(self, chosen: VirtualTask) -> None:
        self._running = chosen
        chosen.turn.release()

    def _give_and_wait(self, chosen: VirtualTask, me: VirtualTask) -> None:
        try:
            self._give(chosen)
            me.turn.acquire()
        except BaseException as interrupt:  # Ctrl-C or a test's time limit; a lock raises nothing else
            self._error = self._error or interrupt
            if not me.turn.acquire(timeout=INTERRUPT_GRACE_S):
                raise

    def _next(self) -> VirtualTask:
        """Who runs next, no longer among the runnable; the first task when none is alive."""
        if not self._alive:
            return self._main
        if not self._runnable and self._error is None:
            self._jump()
        if self._error is not None:
            for task in self._alive:
                if task.wait is not None:
                    self._make_runnable(task)
        index = int(self._random.random() * len(self._runnable))
        self._runnable[index], self._runnable[-1] = self._runnable[-1], self._runnable[index]
        return self._runnable.pop()

    def _jump(self) -> None:
        """All wait: time moves to the earliest deadline."""
        waits = [(task, task.wait.until_s) for task in self._alive if task.wait is not None]
        earliest_s = min(until_s for _, until_s in waits)
        if earliest_s == math.inf:
            self._error = DeadlockError(f"everyone waits, and for no deadline{self._report()}")
            return
        self.now_s = earliest_s
        for task, until_s in waits:
            if until_s == earliest_s:
                self._make_runnable(task)

    def _make_runnable(self, task: VirtualTask) -> None:
        task.wait = None
        self._runnable.append(task)

    def _note(self, me: VirtualTask, event: str) -> None:
        self.trace.append((self.now_s, me.name, event))
        if len(self.trace) > self._max_events:
            self._error = DeadlockError(f"no end after {self._max_events:,} events{self._report()}")
            self._unwind(me)

    def _unwind(self, me: VirtualTask) -> NoReturn:
        """A deadlock is told to each task once, since that may be what a test expects. Code that carries on after it,
        and all code after another error, is ended by what `except Exception` doesn't stop."""
        if isinstance(self._error, DeadlockError) and not me.told:
            me.told = True
            raise DeadlockError(str(self._error))
        raise _Unwind

    def _report(self) -> str:
        frames = sys._current_frames()
        lines = [f" (at {self.now_s:g} s, seed {self._seed}):"]
        for task in self._alive:
            lines.append(f"  {task.name!r} {task.wait or 'runs'} at {_place(frames.get(task.thread_id))}")
        return "\n".join(lines)


class _Unwind(BaseException):
    """Ends a task of a run that has failed."""


def _place(frame: FrameType | None) -> str:
    """The line that called the clock."""
    here = Path(__file__).parent
    while frame is not None and Path(frame.f_code.co_filename).parent == here:
        frame = frame.f_back
    return "its start" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
