"""Ingestion: rollout → buffer. The operator that runs the hooks' chain at a granularity (paper §4.1)."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.admission import Admission
from conduit.core.buffer import ExperienceBuffer, Written
from conduit.core.chain import IngestionChain
from conduit.core.episodes import Rows
from conduit.core.growth import Growth
from conduit.core.halt import Halt
from conduit.core.ledger import Ledger
from conduit.core.order import Order
from conduit.core.rollout import Rollout
from conduit.core.staging import Cut, Group, Inbox
from conduit.core.table import LiveTable
from conduit.errors import CapacityError, SchemaError


class Ingestion:
    """The operator. In line, it runs in the pushing thread, all of it in the group's turn; behind rollout on a thread of its own, hooks
    before the group's turn and only the write in it. The inbox says which; it may do so anew between two groups."""

    def __init__(
        self,
        *,
        chain: IngestionChain,
        inbox: Inbox,
        rollout: Rollout,
        buffer: ExperienceBuffer,
        tables: Sequence[LiveTable],
        admission: Admission,
        order: Order,
        halt: Halt,
        ledger: Ledger,
        growth: Growth | None = None,
    ) -> None:
        """`growth`: what fits rows to those that are there; None where nothing was declared."""
        self._chain = chain
        self._growth = growth
        self._inbox = inbox
        self._rollout = rollout
        self._buffer = buffer
        self._tables = tables
        self._admission = admission
        self._order = order
        self._halt = halt
        self._ledger = ledger
        self._before: dict[str, Any] | None = None
        """What the chain held before the group that it works on, while that isn't in the buffer."""
        self._processing = threading.Lock()

    def run(self) -> None:
        """The thread's life: a step for every group, until the store halts."""
        try:
            while True:
                self.step(self._inbox.wait_take(), behind=True)
        # Whatever ends the operator must reach the callers of push and pull, which would wait for it otherwise.
        except BaseException as error:
            self._halt.now_because(error)
            if not isinstance(error, Exception):
                raise

    def catch_up(self) -> None:
        """In line: ingests what the calling thread has sealed, and then what others have left to it meanwhile."""
        raised: BaseException | None = None
        while (group := self._inbox.claimed()) is not None:
            failed: BaseException | None = None
            is_mine = not self._inbox.is_guests(group)
            try:
                self.step(group)
            except BaseException as error:
                failed = error
                # Rows that are lost to the buffer, be it by Ctrl-C: the store must not go on as if nothing had happened.
                if not self._is_refused(group, error):
                    self._halt.now_because(error)
                if is_mine or not isinstance(error, Exception):
                    raised = error
            finally:
                self._inbox.finish(group, failed)
        if raised is not None:
            raise raised

    def interrupted(self, error: BaseException) -> None:
        """Ctrl-C may come between the sealing of a group and its ingestion: then the rows are lost, and others would wait."""
        if self._inbox.claimed() is not None:
            self._halt.now_because(error)

    def _is_refused(self, group: Group, error: BaseException) -> bool:
        """Whether all that is lost is one push, of which nothing is stored and whose caller hears of it: a first one whose rows can't be
        stored at all, or one that hooks made wider than there is room for."""
        if len(group.units) > 1 or self._chain.on_policy or self._chain.needs_edges:
            return False
        if self._growth is not None and error is self._growth.refused:
            return True
        unsuited = isinstance(error, SchemaError | CapacityError) and self._buffer.schema is None
        return unsuited and not self._chain.has_hooks

    def rows_came_s(self, by_s: float) -> float:
        """When the last rows by then came that a learner was waiting for; long ago, if it didn't have to wait for any."""
        known = list(self._inbox.awaited_at_s)
        forgotten = len(known) == self._inbox.awaited_at_s.maxlen
        return max((at_s for at_s in known if at_s <= by_s), default=by_s if forgotten else -math.inf)

    @contextmanager
    def hurried(self, deadline_s: float) -> Iterator[None]:
        """For the block, a learner waits for rows: what has been pushed, and what will be, becomes visible though it is
        less than a group."""
        with self._inbox.changed:
            self._inbox.starving += 1
        try:
            self._rollout.flush(deadline_s)
            self.catch_up()
            yield
        finally:
            with self._inbox.changed:
                self._inbox.starving -= 1

    def step(self, group: Group, *, behind: bool = False) -> None:
        """Ingests one group: hooks, write, priorities."""
        if behind:
            self._step_behind(group)
            return
        assert group.turn is not None
        # No deadline: the rows are taken, and all that is ahead ends by itself. `Inbox.finish` leaves the turn.
        self._order.begin(group.turn, None, _why_waiting)
        began_s = self._ledger.now()
        try:
            self._publish(group, self._chain.process(group, self._writes_apart))
        finally:
            self._ledger.operated("ingestion", began_s)
            self._settle(group)

    def _step_behind(self, group: Group) -> None:
        """Of one group after the other, as they were sealed."""
        if self._chain.has_barrier:
            with self._processing:
                self._before = self._chain.state()
        with self._ledger.operator("ingestion"):
            stored = self._chain.process(group, self._writes_apart)
        turn = self._inbox.wait_turn(group)
        with self._order.serve(turn, None, _why_waiting), self._ledger.operator("ingestion"):
            self._publish(group, stored)
            self._before = None
        self._settle(group)

    def held(self) -> dict[str, Any]:
        """What the hooks' chain holds of the rows that are before a turn, for a checkpoint; in that turn."""
        with self._processing:
            return self._before or self._chain.state()

    def load(self, held: Mapping[str, Any]) -> None:
        self._chain.load(held)
        if self._admission.limits and self._held_rows:
            with self._inbox.changed:
                self._admission.settled(0, self._held_rows)

    def _settle(self, group: Group) -> None:
        if self._admission.limits:
            with self._inbox.changed:
                taken = sum(len(unit) for unit in group.units if isinstance(unit, Rows))
                self._admission.settled(taken, self._held_rows)

    @property
    def _held_rows(self) -> int:
        """How many rows that came are held until others do."""
        by_hooks = self._chain.held_rows if self._chain.has_barrier else 0
        return by_hooks if self._growth is None else by_hooks + self._growth.held_rows

    @property
    def _writes_apart(self) -> bool:
        """Whether a write costs little beside its bytes, and it makes no difference to which rows leave how many there are: a remover chooses
        once for each, and mustn't choose otherwise elsewhere."""
        storage = self._buffer.storage
        return storage is not None and storage.is_near and self._buffer.places is None

    def _publish(self, group: Group, stored: Sequence[Rows | Cut]) -> None:
        """Makes visible what was made of a group."""
        first = self._buffer.inserted
        for rows in stored if self._growth is None else self._growth.fitted(stored):
            if isinstance(rows, Cut):
                admitted = self._buffer.cut(rows.lanes)
                for table in self._tables if len(admitted) else ():
                    table.admit(admitted)
                self._leave_out_stale(admitted)
            elif len(rows):
                self._tell(rows, self._buffer.write(rows))
        if (recorder := self._ledger.recorder) is not None:
            units = [(unit.push, len(unit)) for unit in group.units if isinstance(unit, Rows)]
            recorder.ingested(units, first, self._buffer.inserted)

    def _tell(self, rows: Rows, written: Sequence[Written]) -> None:
        priority = rows.priority
        # Of more rows than the store has room for, the first are gone.
        done = len(rows) - sum(run.rows for run in written)
        for table in self._tables if done else ():
            table.lose(done)
        for run in written:
            told = None if priority is None else priority[done : done + run.rows]
            for table in self._tables:
                table.publish(run.first, run.rows, told, run.admitted, run.excluded)
            done += run.rows
            if self._rollout.oldest_version is not None:
                linked = self._buffer.starts is not None
                self._leave_out_stale(run.admitted if linked else np.arange(run.first, run.first + run.rows))

    def _leave_out_stale(self, admitted: NDArray[np.int64]) -> None:
        """Rows that became drawable only after they had become too stale: those that waited for others, here or with hooks."""
        oldest = self._rollout.oldest_version
        if oldest is not None and len(admitted):
            stale = admitted[self._buffer.version_of(admitted) < oldest]
            self._rollout.stale_rows += sum(table.exclude(stale) for table in self._tables)


def _why_waiting() -> str:
    return "rows that were pushed before are still being ingested"
