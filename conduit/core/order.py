"""The order in which a store visibly changes.

Publishing rows, drawing batches and applying priorities take turns, one at a time, in the order in which the program
asked for them: not in the order in which threads get to them. So a draw's frontier, and the priorities it knows, are
counted in what was pushed and pulled before it, and a rerun repeats whatever the threads do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from conduit.core.halt import Halt


class Turn:
    """A place in the order. `ready` is None for one that those behind must wait for; otherwise it is passed over until
    `ready()` is true (a draw that lacks rows must let the rows pass)."""

    __slots__ = ("action", "began_at_s", "begun", "passed_over", "ready", "ready_at_s", "withdrawn")

    def __init__(self, ready: Callable[[], bool] | None, action: Callable[[], None] | None = None) -> None:
        self.ready = ready
        self.action = action
        self.begun = False
        self.began_at_s = math.inf
        self.withdrawn = False
        self.passed_over = False
        self.ready_at_s: float | None = None
        """When a turn that had been passed over became ready."""


class Order:
    def __init__(self, halt: Halt) -> None:
        self._halt = halt
        self._changed = halt.condition("order")
        self._turns: list[Turn] = []
        self._serving: Turn | None = None
        self._failure: Exception | None = None

    def enter(self, ready: Callable[[], bool] | None = None) -> Turn:
        """A turn behind all that were entered before."""
        return self._add(Turn(ready))

    def run_in_turn(self, action: Callable[[], None]) -> bool:
        """Runs `action`, which must be short and not wait, in its turn: now, or on the thread that ends the turn before.
        True if it ran before this returned. What it raises halts the store."""
        return self._add(Turn(None, action)).begun

    @contextmanager
    def serve(self, turn: Turn, deadline_s: float | None, why: Callable[[], str]) -> Iterator[bool]:
        """Waits for `turn`, and is in it for the block; False, and not in it, if it was withdrawn. A turn that isn't
        reached by the deadline is given up, so that nobody waits behind it."""
        try:
            with self._changed:
                self._halt.wait(self._changed, lambda: turn.begun or turn.withdrawn, deadline_s, why)
            yield turn.begun
        finally:
            self.leave(turn)

    def settle(self, turn: Turn, deadline_s: float | None) -> bool:
        """Waits until `turn` has begun or been withdrawn (True), or was passed over because it isn't ready (False)."""
        with self._changed:
            self._halt.wait(
                self._changed,
                lambda: turn.begun or turn.withdrawn or turn.passed_over,
                deadline_s,
                lambda: "rows or priorities that were pushed before are still being ingested",
            )
            return turn.begun or turn.withdrawn

    def leave(self, turn: Turn) -> None:
        """Ends or gives up `turn`; nothing if it is over already."""
        with self._changed:
            if turn in self._turns:
                self._turns.remove(turn)
            if self._serving is turn:
                self._serving = None
            self._serve_next()
        self._report_failure()

    def withdraw(self, turn: Turn) -> None:
        """Gives up `turn` on behalf of whoever waits for it, unless it has begun."""
        with self._changed:
            if not turn.begun:
                turn.withdrawn = True
                if turn in self._turns:
                    self._turns.remove(turn)
                self._changed.notify_all()
                self._serve_next()
        self._report_failure()

    def _add(self, turn: Turn) -> Turn:
        with self._changed:
            self._turns.append(turn)
            self._serve_next()
        self._report_failure()
        return turn

    def _report_failure(self) -> None:
        # Not where it was caught: to halt is to take every condition, and this order's was held there.
        if self._failure is not None:
            self._halt.now_because(self._failure)

    def _serve_next(self) -> None:
        while self._serving is None:
            turn = next((turn for turn in self._turns if self._eligible(turn)), None)
            if turn is None:
                return
            if turn.action is None:
                self._serving = turn
                turn.begun, turn.began_at_s = True, self._halt.clock.now()
                self._changed.notify_all()
                return
            self._turns.remove(turn)
            turn.begun = True
            try:
                turn.action()
            # The action is another thread's: its failure must reach the callers of the store, not whoever ran it.
            except Exception as error:
                self._failure = error

    def _eligible(self, turn: Turn) -> bool:
        if turn.ready is None:
            return True
        if not turn.ready():
            if not turn.passed_over:
                turn.passed_over = True
                self._changed.notify_all()
            return False
        if turn.passed_over and turn.ready_at_s is None:
            turn.ready_at_s = self._halt.clock.now()
        return True
