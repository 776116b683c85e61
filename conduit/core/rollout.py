"""Rollout units: how pushes become the groups that ingestion takes, and who may push what when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from conduit.core.admission import Admission
from conduit.core.episodes import Rows
from conduit.core.experience import Tree
from conduit.core.halt import Halt, Waiters
from conduit.core.ledger import PortCall
from conduit.core.staging import Cut, Group, Inbox
from conduit.errors import FreshnessError, SettingError, UnitError

WhenFull = Literal["block", "drop"]

_FURTHEST = 1 << 62


@dataclass(frozen=True, slots=True)
class ActorLanes:
    """An actor, and the store-wide numbers of its lanes."""

    actor: int
    lanes: range
    waiters: Waiters


class Rollout(Protocol):
    @property
    def version(self) -> int:
        """The policy version whose rows are being taken."""
        ...

    @property
    def version_of_draws(self) -> int:
        """The same as draws are to know it, which are made in turns."""
        ...

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version whose rows are delivered; None: any are."""
        ...

    stale_rows: int
    """Rows that were left out since they were older."""

    def join(self, actor: ActorLanes) -> None:
        """The actor may push from now on."""
        ...

    def put(self, actor: ActorLanes, rows: Rows, version: int | None, deadline_s: float, wait: PortCall) -> bool:
        """Takes one push. False if it was dropped, or went stale while it waited. What the actor waits with can be cancelled."""
        ...

    def widening(
        self, actor: ActorLanes, version: int | None, deadline_s: float, wait: PortCall
    ) -> AbstractContextManager[None]:
        """Around the `put` of rows that are wider than any before, and what makes room for them. What can be refused by its version
        is so before. On-policy, their iteration has begun in it, and takes nobody else's rows."""
        ...

    def end_unit(self, actor: ActorLanes, bootstrap: Mapping[str, Tree] | None, deadline_s: float) -> None: ...

    def leave(self, actor: ActorLanes, deadline_s: float) -> None:
        """The actor is gone; its open lanes are cut."""
        ...

    def flush(self, deadline_s: float) -> None:
        """Seals what has been pushed, though it is less than a group: a learner waits for it."""
        ...

    def advance(self) -> int:
        """Counts the version up and returns it. Where nothing is dropped by it, this may be called outside a turn, if in one `tell_draws` is."""
        ...

    def tell_draws(self) -> None:
        """In a turn: those that are made from here on are of one version more."""
        ...

    def switch(self, behind: bool, units: int) -> None:
        """Ingestion runs behind rollout or in line from here on, and takes so many units at once (on-policy, rows), from the next iteration on
        where there are such."""
        ...

    def follows(self, behind: bool, units: int) -> bool:
        """Whether that is so by now."""
        ...

    def has_room(self, rows: int) -> bool:
        """Whether a push of `rows` rows would be taken at once, as far as room goes."""
        ...

    def state(self) -> dict[str, Any]:
        """For a checkpoint: all but the groups that have their places in the order. The inbox's `changed` is held."""
        ...

    def load(self, state: Mapping[str, Any], left: Sequence[int] | None) -> None:
        """Goes on from what was saved; what that makes whole is sealed. `left`: lanes whose actors have left since; None: the actors
        of then go on."""
        ...


class OffPolicyRollout:
    """Every push is a unit, taken when `admission` lets it in; `units_per_group` of them make a group. When `limit` units wait
    for the operator, or a limiter says no, a push blocks and at its deadline raises, or is dropped and counted.

    `max_staleness`: rows of policy versions further back are refused, and those that went that far back while they waited are left
    out and counted; None: any are taken."""

    def __init__(
        self,
        *,
        halt: Halt,
        inbox: Inbox,
        admission: Admission,
        units_per_group: int,
        limit: int,
        when_full: WhenFull,
        cuts_matter: bool,
        max_staleness: int | None = None,
    ) -> None:
        if limit < units_per_group:
            raise SettingError(f"inbox_units={limit} is below g_ing={units_per_group}: a group could never fill")
        self._halt = halt
        self._inbox = inbox
        self._admission = admission
        self._max_staleness = max_staleness
        self._units_per_group = units_per_group
        self._limit = limit
        self._when_full = when_full
        self._cuts_matter = cuts_matter
        self._units: list[Rows | Cut] = []
        self._torn: set[int] = set()
        self.version = self.version_of_draws = 0
        self.dropped_rows = self.stale_rows = 0

    def join(self, actor: ActorLanes) -> None:
        pass

    def widening(
        self, actor: ActorLanes, version: int | None, deadline_s: float, wait: PortCall
    ) -> AbstractContextManager[None]:
        if version is not None:
            self._check_fresh(check_version(version))
        return nullcontext()

    def put(self, actor: ActorLanes, rows: Rows, version: int | None, deadline_s: float, wait: PortCall) -> bool:
        if version is not None:
            self._check_fresh(check_version(version))
        rows.version = self.version if version is None else int(version)
        inbox = self._inbox
        with inbox.changed:
            if self._admission.limits:
                return self._put_limited(actor, rows, deadline_s)
            if not inbox.free:
                with actor.waiters:
                    if inbox.serves(lambda: self._take(rows), deadline_s):
                        return True
            if not self._has_room():
                if self._when_full == "drop":
                    return self._drop(rows)
                self._admission.wait(len(rows), deadline_s, actor.waiters, self._has_room, self._why_full)
            self._take(rows)
        return True

    def _put_limited(self, actor: ActorLanes, rows: Rows, deadline_s: float) -> bool:
        """`put` where a limiter may hold the rows. `changed` is held."""
        self._admission.check(len(rows))
        if self._when_full == "drop":
            # What is being ingested is waited for, but not a limiter, nor an inbox that is full.
            with actor.waiters:
                self._inbox.wait_unclaimed(deadline_s)
            if not (self._has_room() and self._admission.may_insert(len(rows))):
                return self._drop(rows)
        else:
            self._admission.wait(
                len(rows),
                deadline_s,
                actor.waiters,
                lambda: self._inbox.free and self._has_room(),
                lambda: self._why_being_ingested() if self._has_room() else self._why_full(),
                lambda: not self._is_fresh(rows.version),
            )
        if not self._is_fresh(rows.version):
            # The version was counted up while they waited.
            self.stale_rows += len(rows)
            return self._leave_out(rows)
        self._admission.came(len(rows))
        self._take(rows)
        return True

    def _is_fresh(self, version: int | NDArray[np.int64]) -> bool:
        assert isinstance(version, int)
        return self._max_staleness is None or 0 <= self.version - version <= self._max_staleness

    def _check_fresh(self, version: int) -> None:
        most = self._max_staleness
        if most is not None and not self._is_fresh(version):
            raise FreshnessError(
                f"rows of policy version {version} were pushed while the version is {self.version} and max_staleness is "
                f"{most}; expected versions {max(0, self.version - most)} to {self.version}"
            )

    def _drop(self, rows: Rows) -> bool:
        self.dropped_rows += len(rows)
        return self._leave_out(rows)

    def _leave_out(self, rows: Rows) -> bool:
        self._torn.update(rows.lane.tolist())
        return False

    def _take(self, rows: Rows) -> None:
        """There is room: in line there always is."""
        if self._cuts_matter and self._torn:
            # What follows a row that was left out isn't its predecessor's successor.
            self._units.append(Cut(sorted(self._torn)))
            self._torn.clear()
        self._append(rows)

    def end_unit(self, actor: ActorLanes, bootstrap: Mapping[str, Tree] | None, deadline_s: float) -> None:
        raise UnitError(
            "end_unit() closes an on-policy iteration's rows; this store is off-policy: every push is a unit"
        )

    def leave(self, actor: ActorLanes, deadline_s: float) -> None:
        if self._cuts_matter:
            with self._inbox.changed:
                self._inbox.wait_unclaimed(deadline_s)
                self._append(Cut(actor.lanes))

    def flush(self, deadline_s: float) -> None:
        with self._inbox.changed:
            self._seal_all(deadline_s)

    @property
    def oldest_version(self) -> int | None:
        return None if self._max_staleness is None else self.version - self._max_staleness

    def advance(self) -> int:
        self.version += 1
        return self.version

    def tell_draws(self) -> None:
        self.version_of_draws += 1

    def advance_held(self, deadline_s: float) -> int:
        """`advance` for a caller who holds `changed`, enters a turn at once, and has what it sealed ingested before: all that was
        pushed in the versions before comes before that turn."""
        self._seal_all(deadline_s)
        version = self.advance()
        # Pushes that are too old by now end.
        self._admission.changed()
        return version

    def switch(self, behind: bool, units: int) -> None:
        with self._inbox.changed:
            self._units_per_group = units
            self._inbox.switch(behind)

    def follows(self, behind: bool, units: int) -> bool:
        return self._units_per_group == units and self._inbox.behind is behind

    def _append(self, unit: Rows | Cut) -> None:
        units = self._units
        units.append(unit)
        if len(units) >= self._units_per_group or self._inbox.starving:
            self._units = []
            self._inbox.seal(Group(units))
        elif isinstance(unit, Rows):
            unit.own()

    def has_room(self, rows: int) -> bool:
        return self._has_room()

    def state(self) -> dict[str, Any]:
        # Where ingestion is behind, the last group has no place so far: who asks disturbs nothing, and is before it.
        last = self._inbox.last
        return {
            "version": self.version,
            "dropped_rows": self.dropped_rows,
            "stale_rows": self.stale_rows,
            "last": [] if last is None else list(last.units),
            "units": list(self._units),
            "torn": sorted(self._torn),
        }

    def load(self, state: Mapping[str, Any], left: Sequence[int] | None) -> None:
        self.version = self.version_of_draws = state["version"]
        self.dropped_rows, self.stale_rows = state["dropped_rows"], state["stale_rows"]
        last, self._units = list(state["last"]), list(state["units"])
        with self._inbox.changed:
            self._admission.came(sum(len(unit) for unit in (*last, *self._units) if isinstance(unit, Rows)))
            if last:
                self._inbox.seal(Group(last))
        if left is None:
            self._torn = set(state["torn"])
        elif left and self._cuts_matter:
            # Comes into its own with the next rows, or when a learner waits for some.
            self._units.append(Cut(left))

    def _has_room(self) -> bool:
        # Units that are a group already, which a checkpoint may have brought, are sealed with the next.
        gathered = len(self._units) if len(self._units) < self._units_per_group else 0
        return self._inbox.pending_units + gathered < self._limit

    def _seal_all(self, deadline_s: float) -> None:
        """`flush` for a caller who holds `changed`."""
        self._inbox.wait_unclaimed(deadline_s)
        if self._units:
            units, self._units = self._units, []
            self._inbox.seal(Group(units))
        self._inbox.release_last()

    def _why_being_ingested(self) -> str:
        return "what was pushed before is still being ingested, in line; this was not taken"

    def _why_full(self) -> str:
        return (
            f"the inbox has been full for the whole wait: {self._limit} units (inbox_units) wait for the ingestion operator, "
            "which is slower than the actors. A longer timeout_s, a larger inbox, cheaper ingestion hooks or when_full='drop' would help"
        )


def check_version(version: object) -> int:
    """FreshnessError unless `version` is a whole number, whose distance to any other such fits into 64 bits."""
    if not isinstance(version, Integral) or isinstance(version, bool) or abs(int(version)) >= _FURTHEST:
        raise FreshnessError(f"push(version={version!r}): expected a whole number, less than 2**62 from 0")
    return int(version)
