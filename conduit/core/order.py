"""The order in which a store visibly changes.

Publishing rows, drawing batches and applying priorities take turns, one at a time, in the order in which the program
asked for them: not in the order in which threads get to them. So a draw's frontier, and the priorities it knows, are
counted in what was pushed and pulled before it, and a rerun repeats whatever the threads do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from conduit.core.halt import Halt

T = TypeVar("T")


class Turn:
    """A place in the order: either somebody's, who serves it in a `serve` block, or an action's, which whoever ends the turn
    before runs. An action that isn't `ready` is passed over until it is: a draw that lacks rows must let the rows pass."""

    # Defaults of the class: a turn is made for every push.
    action: Callable[[], None] | None = None
    ready: Callable[[], bool] | None = None
    begun = False
    """Whether it is or was its turn; an action is done then."""
    began_at_s = math.inf
    """When an action's turn came."""
    withdrawn = False
    passed_over = False
    ready_at_s: float | None = None
    """When a turn that had been passed over became ready."""
    place = math.inf
    """Of a turn that a checkpoint brought back: it is before those of higher places, whoever asks first for it again."""


class Serving:
    """A block in a turn."""

    __slots__ = ("_deadline_s", "_order", "_turn", "_why")

    def __init__(self, order: Order, turn: Turn, deadline_s: float | None, why: Callable[[], str]) -> None:
        self._order, self._turn, self._deadline_s, self._why = order, turn, deadline_s, why

    def __enter__(self) -> None:
        self._order.begin(self._turn, self._deadline_s, self._why)

    def __exit__(self, *error: object) -> None:
        self._order.leave(self._turn)


class Order:
    def __init__(self, halt: Halt) -> None:
        self._halt = halt
        self._now = halt.clock.now
        self.changed = halt.condition("order")
        """Guards the order, and what takes its place in it as it changes itself: see `enter_held`."""
        self._turns: list[Turn] = []
        self._serving: Turn | None = None

    def enter(self) -> Turn:
        """A turn behind all that were entered before, for the caller to serve. Those behind wait for it."""
        with self.changed:
            return self.enter_held()

    def enter_held(self) -> Turn:
        """`enter` for a caller who holds `changed`."""
        turn = Turn()
        if self._serving is None and not self._turns:
            self._serving = turn
            turn.begun = True
        else:
            self._turns.append(turn)
            self._serve_next()
        return turn

    def act(
        self,
        action: Callable[[], None],
        ready: Callable[[], bool] | None = None,
        place: float = math.inf,
        later: bool = False,
    ) -> Turn:
        """Has `action`, which must be short and not wait, run in its turn: before this returns, or on the thread that ends
        the turn before. What it raises halts the store. `place`: what `place_of` said when a checkpoint was made. `later`: this only takes
        the place; the action runs on the thread that waits for it, or on whichever comes to a place behind it first."""
        turn = Turn()
        turn.action, turn.ready = action, ready
        with self.changed:
            if place != math.inf:
                turn.place = place
                behind = (i for i, other in enumerate(self._turns) if other.place > place)
                self._turns.insert(next(behind, len(self._turns)), turn)
            elif later or self._serving is not None or self._turns:
                self._turns.append(turn)
            elif ready is None or self._eligible(turn):
                self._begin(turn)
                return turn
            else:
                self._turns.append(turn)
            if not later:
                self._serve_next()
        return turn

    def run_due(self) -> None:
        """For a caller who holds `changed`, and is about to look at what actions change: those whose turn has come have run. It doesn't
        depend on how far the threads are, then, that were to run them."""
        if self._turns and self._halt.reason is None:
            self._serve_next()

    def place_of(self, turn: Turn) -> int:
        """How many turns come before one that hasn't begun; in a turn."""
        with self.changed:
            return self._turns.index(turn)

    def serve(self, turn: Turn, deadline_s: float | None, why: Callable[[], str]) -> Serving:
        """Waits for `turn`, and is in it for the block. A turn that isn't reached by the deadline is given up, so that nobody
        waits behind it."""
        return Serving(self, turn, deadline_s, why)

    def begin(self, turn: Turn, deadline_s: float | None, why: Callable[[], str]) -> None:
        """What entering a `serve` block does."""
        if turn.begun and self._halt.reason is None:
            return
        try:
            with self.changed:
                self._halt.wait(self.changed, lambda: turn.begun, deadline_s, why)
        except BaseException:
            self.leave(turn)
            raise

    def settle(self, turn: Turn, deadline_s: float | None) -> bool:
        """Waits until an action has run or been withdrawn (True), or was passed over because it isn't ready (False), be it after all
        that has been entered by now."""
        why = "rows that were pushed before are still being ingested"
        # One that was passed over before may be ready once those are through, whenever that is.
        last = self.act(lambda: None) if turn.passed_over else turn
        self._await(turn, lambda: turn.begun or turn.withdrawn or last.begun or last.passed_over, deadline_s, why)
        return turn.begun or turn.withdrawn

    def wait(self, turn: Turn, deadline_s: float | None) -> bool:
        """Waits until an action has run; False if it was withdrawn instead."""
        self._await(turn, lambda: turn.begun or turn.withdrawn, deadline_s, "its turn has not come")
        return turn.begun

    def _await(self, turn: Turn, until: Callable[[], bool], deadline_s: float | None, why: str) -> None:
        if turn.begun:
            self._halt.check()
            return
        with self.changed:
            self.run_due()
            self._halt.wait(self.changed, until, deadline_s, lambda: why)

    def withdraw(self, turn: Turn) -> bool:
        """Gives up an action that has not run yet; whether that was in time."""
        with self.changed:
            if turn.begun:
                return False
            turn.withdrawn = True
            if turn in self._turns:
                self._turns.remove(turn)
            self.changed.notify_all()
        return True

    def between_turns(self, look: Callable[[], T], otherwise: T) -> T:
        """What `look` sees while nobody is in a turn; `otherwise` if somebody is."""
        with self.changed:
            self.run_due()
            return look() if self._serving is None else otherwise

    def leave(self, turn: Turn) -> None:
        """What leaving a `serve` block does."""
        with self.changed:
            self.leave_held(turn)

    def leave_held(self, turn: Turn) -> bool:
        """`leave` for a caller who holds `changed`; whether another turn came with it. A turn that was left already, or withdrawn,
        is left alone."""
        if self._serving is turn:
            self._serving = None
        elif turn in self._turns:
            self._turns.remove(turn)
        return self._serve_next() if self._turns else False

    def _serve_next(self) -> bool:
        """Whether a turn came."""
        came = False
        while self._serving is None:
            turn = next((turn for turn in self._turns if self._eligible(turn)), None)
            if turn is None:
                break
            self._turns.remove(turn)
            self._begin(turn)
            self.changed.notify_all()
            came = True
        return came

    def _begin(self, turn: Turn) -> None:
        if turn.action is None:
            self._serving = turn
        else:
            turn.began_at_s = self._now()
            self._run(turn.action)
        turn.begun = True

    def _eligible(self, turn: Turn) -> bool:
        if turn.ready is None:
            return True
        if not turn.ready():
            if not turn.passed_over:
                turn.passed_over = True
                self.changed.notify_all()
            return False
        if turn.passed_over and turn.ready_at_s is None:
            turn.ready_at_s = self._now()
        return True

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        # The action is another thread's: its failure must reach the callers of the store, not whoever ran it.
        except BaseException as error:
            self._halt.soon_because(error)
            if not isinstance(error, Exception):
                raise
