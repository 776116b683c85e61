"""The waiting rooms on the experience path: the Inbox before ingestion and the Outbox after delivery."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from conduit.core.backend import Columns
from conduit.core.batch import Batch
from conduit.core.episodes import Rows
from conduit.core.experience import Tree
from conduit.core.halt import Halt
from conduit.core.order import Order, Turn
from conduit.core.trace import Traced
from conduit.errors import HandOverError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cut:
    """An actor left, or a push was dropped: the open fragments of these lanes end here."""

    lanes: Sequence[int]


_NO_BOOTSTRAP: Mapping[int, Mapping[str, Tree]] = MappingProxyType({})


class Group:
    """What one invocation of ingestion takes: some units of rows, in the order they were pushed.

    `closes`: on-policy, the iteration's last group. `bootstrap`: for a closing group, lane → what the actor knows of the
    observation after its last row."""

    __slots__ = ("bootstrap", "closes", "turn", "units")

    def __init__(
        self,
        units: list[Rows | Cut],
        closes: bool = False,
        bootstrap: Mapping[int, Mapping[str, Tree]] = _NO_BOOTSTRAP,
    ) -> None:
        self.units = units
        self.closes = closes
        self.bootstrap = bootstrap
        self.turn: Turn | None = None


class _Ticket:
    """Somebody's place in the queue for an inbox that is in use in line. `take`: what puts the rows in, if another thread
    may do it; `done`: they have been ingested, or `error` says why not."""

    __slots__ = ("done", "error", "take", "taken")

    def __init__(self, take: Callable[[], None] | None) -> None:
        self.take = take
        self.taken = self.done = False
        self.error: BaseException | None = None


class Inbox:
    """Sealed groups, oldest first, each with its place in the store's order.

    Where ingestion runs behind rollout, a group gets its place when the next one is sealed, if the inbox `holds_back`: so a draw sees
    the groups before the last one, whatever the operator's speed, and never waits for rows that were pushed just now."""

    def __init__(self, halt: Halt, order: Order, behind: bool, holds_back: bool) -> None:
        self._halt = halt
        self._now = halt.clock.now
        self._order = order
        self.behind = self._wanted = behind
        """Whether what is sealed is left to the operator's thread."""
        self._holds_back = holds_back
        self.changed = order.changed
        """The order's own: so a group takes its place as it is sealed, and leaves it as its claim ends, in one held block."""
        self._groups: deque[Group] = deque()
        self._last: Group | None = None
        self.awaited_at_s: deque[float] = deque(maxlen=16)
        """When rows came last that a learner was waiting for, several times."""
        self.pending_units = 0
        """Units in groups that wait for the operator's thread."""
        self._claimant: int | None = None
        self._claimed: Group | None = None
        self._queue: deque[_Ticket] = deque()
        self._guest: _Ticket | None = None
        """Whose group the claimant ingests, if not its own."""
        self._to_serve = 0
        """How many more of the queue the claimant serves: those who came while it ingested its own group."""
        self.starving = 0
        """How many learners wait for rows that are not there: while any does, nothing is held back or gathered into groups."""

    def switch(self, behind: bool) -> None:
        """What is sealed from here on is left to the operator's thread, or to whoever seals it: as soon as nobody is ingesting in line.
        The caller holds `changed`."""
        self._wanted = behind
        self._adopt()

    def _adopt(self) -> None:
        if self._wanted is not self.behind and self._claimant is None:
            self.behind = self._wanted
            if not self.behind:
                self.release_last()
            self.changed.notify_all()

    def seal(self, group: Group) -> None:
        """Queues a group, or in line leaves it to the calling thread. The caller holds `changed`."""
        if self._last is not None:
            self.release_last()
        if self.starving:
            self.awaited_at_s.append(self._now())
        if not self.behind:
            self._claimant, self._claimed = threading.get_ident(), group
            group.turn = self._order.enter_held()
            return
        for unit in group.units:
            if isinstance(unit, Rows):
                unit.own()
        self._groups.append(group)
        self.pending_units += len(group.units)
        if self._holds_back and not self.starving:
            self._last = group
        else:
            group.turn = self._order.enter_held()
        self.changed.notify_all()

    @property
    def free(self) -> bool:
        """Whether nobody ingests in line, or is about to; for a caller who holds `changed`."""
        return self.behind or (self._claimant is None and not self._queue)

    def wait_unclaimed(self, deadline_s: float) -> None:
        """In line, whoever seals a group ingests it, and the others wait before they put anything in: so nothing that was
        taken is ever left behind by somebody's deadline. The caller holds `changed`."""
        if self.free:
            return
        self._wait_in_queue(_Ticket(None), deadline_s)

    def serves(self, take: Callable[[], None], deadline_s: float) -> bool:
        """Whether somebody else has put in what `take` puts in, and ingested it: in line, where others are at work, whoever is
        ingesting serves those who came meanwhile before going on, for waking each of them would take longer than their rows
        do. False: it is the caller's turn, who holds `changed`."""
        if self.free:
            return False
        ticket = _Ticket(take)
        try:
            self._wait_in_queue(ticket, deadline_s)
        except BaseException:
            # The rows are being ingested: they are the caller's own arrays until that is over.
            if ticket.taken and not ticket.done:
                self._wait_done(ticket)
            raise
        if ticket.error is not None:
            # What stopped the store, be it another thread's Ctrl-C, is said in the store's words; the rest is of these rows.
            self._halt.check()
            raise copy.copy(ticket.error)
        return ticket.done

    def _wait_in_queue(self, ticket: _Ticket, deadline_s: float) -> None:
        """Until it is the ticket's turn, or it has been served. First come, first served: or who pushes without a pause would
        shut the others out."""
        self._queue.append(ticket)
        try:
            self._halt.wait(
                self.changed,
                lambda: ticket.taken or (self._claimant is None and self._queue[0] is ticket),
                deadline_s,
                lambda: "what was pushed before is still being ingested, in line; this was not taken",
            )
        finally:
            if not ticket.taken:
                self._queue.remove(ticket)
                self.changed.notify_all()
        if ticket.taken:
            self._wait_done(ticket)

    def _wait_done(self, ticket: _Ticket) -> None:
        self._halt.wait(self.changed, lambda: ticket.done, None, lambda: "it is being ingested")

    def claimed(self) -> Group | None:
        """In line: the group that the calling thread has sealed and others wait for."""
        return self._claimed if self._claimant == threading.get_ident() else None

    def finish(self, group: Group, error: BaseException | None = None) -> None:
        """The claimed group is ingested, or given up because of `error`. If others came meanwhile, the calling thread has claimed
        the group of the first of them."""
        assert group.turn is not None
        with self.changed:
            others = self._order.leave_held(group.turn)
            self._claimed = None
            if self._guest is None:
                self._to_serve = len(self._queue)
            else:
                self._guest.error, self._guest.done = error, True
                self._guest = None
            if self._halt.reason is not None:
                self._to_serve = 0
            while self._claimed is None and self._to_serve and self._queue and self._queue[0].take is not None:
                self._serve(self._queue.popleft())
            if self._claimed is None:
                self._claimant = None
                self._adopt()
            self.changed.notify_all()
        if others:
            # Or they would wait on until this thread waits itself, or until Python makes it pause, which is after 5 ms.
            self._halt.clock.sleep(0.0)

    def is_guests(self, group: Group) -> bool:
        """Whether the claimed group is another thread's, which waits for it."""
        return self._guest is not None and self._claimed is group

    def _serve(self, ticket: _Ticket) -> None:
        assert ticket.take is not None
        self._to_serve -= 1
        ticket.taken = True
        ticket.take()
        if self._claimed is None:
            # Not enough for a group.
            ticket.done = True
        else:
            self._guest = ticket

    @property
    def last(self) -> Group | None:
        """The last sealed group, while it is held back and has no place in the order. The caller holds `changed`."""
        return self._last

    def release_last(self) -> None:
        """Gives the last sealed group its place in the order, if it has been held back. The caller holds `changed`."""
        if self._last is not None:
            self._last.turn = self._order.enter_held()
            self._last = None
            self.changed.notify_all()

    def wait_take(self) -> Group:
        """The oldest group, once there is one. Raises the reason to halt."""
        with self.changed:
            self._halt.wait(self.changed, lambda: bool(self._groups), None, lambda: "no rows")
            group = self._groups.popleft()
            self.pending_units -= len(group.units)
            self.changed.notify_all()
            return group

    def wait_turn(self, group: Group) -> Turn:
        """The group's place in the order, once it has one."""
        with self.changed:
            self._halt.wait(self.changed, lambda: group.turn is not None, None, lambda: "no further rows")
            assert group.turn is not None
            return group.turn


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch on its way to its learner, or why it can't be handed over to it. `columns`: what of it is on a device, to be
    ordered in the learner's thread."""

    batch: Batch | HandOverError
    columns: tuple[Columns[Any], ...] = ()
    prepared: Any = None
    """The slice in which it was prepared, where a trace is taken."""


class Copies(Generic[T]):
    """Copies of batches, some of which have yet to be staged. Guarded by their outbox."""

    def __init__(self, awaited: set[int], make: Callable[[Staged], T]) -> None:
        self.awaited = awaited
        self.made: dict[int, T] = {}
        self._make = make

    def add(self, number: int, staged: Staged) -> None:
        if number in self.awaited:
            self.awaited.discard(number)
            self.made[number] = self._make(staged)


class Outbox:
    """Staged batches of one learner, by number."""

    def __init__(self, halt: Halt, name: str, traced: Traced) -> None:
        self._halt = halt
        self._name = name
        self._traced = traced
        self._changed = halt.condition(name)
        self._staged: dict[int, Staged] = {}
        self._first = 0
        self._taken = -1
        """The last number that was taken; a learner takes them in order."""
        self._awaited: list[Copies[Any]] = []

    def __len__(self) -> int:
        return len(self._staged)

    def put(self, number: int, staged: Staged) -> None:
        """Stages a batch, unless it has been discarded already."""
        with self._changed:
            for copies in self._awaited:
                copies.add(number, staged)
            self._awaited = [copies for copies in self._awaited if copies.awaited]
            if number >= self._first:
                self._staged[number] = staged
            self._count()
            self._changed.notify_all()

    def take(self, number: int) -> Staged | None:
        """Batch `number` if it is staged."""
        with self._changed:
            return self._pop(number)

    def copy(self, numbers: Sequence[int], make: Callable[[Staged], T]) -> Copies[T]:
        """What `make` makes of those of these batches that nobody has taken: of those that are staged at once, and of the others when
        they are put, before anybody takes them."""
        with self._changed:
            copies = Copies({number for number in numbers if number > self._taken}, make)
            for number in numbers:
                if number in self._staged:
                    copies.add(number, self._staged[number])
            if copies.awaited:
                self._awaited.append(copies)
            return copies

    def wait_copies(self, copies: Copies[T], deadline_s: float, why: Callable[[], str]) -> dict[int, T]:
        """All of them, by number."""
        with self._changed:
            self._halt.wait(self._changed, lambda: not copies.awaited, deadline_s, why)
            return copies.made

    def wait_take(self, number: int, deadline_s: float) -> Staged | None:
        """Batch `number`, once it is staged; None if it has been discarded."""
        with self._changed:
            self._halt.wait(
                self._changed,
                lambda: number in self._staged or number < self._first,
                deadline_s,
                lambda: f"batch {number} is not staged",
            )
            return self._pop(number)

    def forgo(self, numbers: Sequence[int]) -> None:
        """These batches, drawn or not, won't be put: nobody waits for copies of them any longer."""
        with self._changed:
            for copies in self._awaited:
                copies.awaited.difference_update(numbers)
            self._changed.notify_all()

    def discard_before(self, number: int) -> None:
        """No batch below `number` is wanted any more."""
        with self._changed:
            self._first = number
            self._staged = {n: staged for n, staged in self._staged.items() if n >= number}
            self._count()
            self._changed.notify_all()

    def _pop(self, number: int) -> Staged | None:
        staged = self._staged.pop(number, None)
        if staged is not None:
            self._taken = number
            self._count()
        return staged

    def _count(self) -> None:
        if (recorder := self._traced.recorder) is not None:
            recorder.count(self._name, len(self._staged))
