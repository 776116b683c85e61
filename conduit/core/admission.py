"""Which pushes are let in, and when: the limiters' side of ingestion."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conduit.core.halt import Halt, Waiters
from conduit.core.order import Order
from conduit.core.ring import Window
from conduit.core.table import LiveTable


@dataclass(frozen=True, slots=True)
class Held:
    """A push that waits."""

    who: str
    rows: int


class Admission:
    """First come, first served: or small pushes would keep a large one out for ever.

    All calls but `limits` and `check` are made holding the order's `changed`."""

    def __init__(self, halt: Halt, order: Order, tables: Sequence[LiveTable], window: Callable[[], Window]) -> None:
        self._halt = halt
        self._order = order
        self._window = window
        self._tables = [table for table in tables if table.limiter is not None]
        self._queue: deque[Held] = deque()
        self.limits = bool(self._tables)
        """Whether any push is ever held by a limiter."""

    @property
    def is_idle(self) -> bool:
        """Whether no push waits."""
        return not self._queue

    def check(self, rows: int) -> None:
        """SettingError for a push of so many rows that could never be let in."""
        for table in self._tables:
            table.check_insert(rows)

    def may_insert(self, rows: int) -> bool:
        """Whether a push of `rows` rows would be let in now, if nobody waited before it.

        It may be asked while a group is being published: then its rows are pending still, beside what is known of them by then, and
        the answer errs on the side of no."""
        self._order.run_due()
        return self._lets_in(rows)

    def _lets_in(self, rows: int) -> bool:
        window = self._window()
        return all(table.may_insert(rows, window) for table in self._tables)

    def wait(
        self,
        rows: int,
        deadline_s: float,
        waiters: Waiters,
        has_room: Callable[[], bool],
        why_full: Callable[[], str],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits until a push of `rows` rows is let in, or `is_over()`."""
        self._order.run_due()
        if not self._queue and has_room() and self._lets_in(rows):
            return
        mine = Held(threading.current_thread().name, rows)
        self._queue.append(mine)
        try:
            with waiters:
                self._halt.wait(
                    self._order.changed,
                    lambda: is_over() or (self._queue[0] is mine and has_room() and self._lets_in(rows)),
                    deadline_s,
                    lambda: self._why(mine, has_room, why_full),
                )
        finally:
            self._queue.remove(mine)
            # The next one's turn.
            self.changed()

    def came(self, rows: int) -> None:
        """A push of `rows` rows was taken."""
        for table in self._tables:
            table.came(rows)

    def settled(self, rows: int, held: int) -> None:
        """So many rows of those that were taken are in the buffer or lost, but for those that hooks hold by now, `held` in all."""
        for table in self._tables:
            table.settled(rows, held)
        self.changed()

    def changed(self) -> None:
        """The tables may say something else than before."""
        if self._queue:
            self._order.changed.notify_all()

    def _why(self, mine: Held, has_room: Callable[[], bool], why_full: Callable[[], str]) -> str:
        """What holds a push."""
        window = self._window()
        held = [table for table in self._tables if not table.may_insert(mine.rows, window)]
        if held:
            return "; ".join(f"table {table.name!r}: {table.why_no_insert(mine.rows, window)}" for table in held)
        if not has_room():
            return why_full()
        first = self._queue[0] if self._queue else mine
        return f"it comes after the push of {first.rows} rows that {first.who!r} waits with; this was not taken"
