"""Rollout units: how pushes become the groups that ingestion takes, and who may push what when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, Protocol

from conduit.core.episodes import End, Rows
from conduit.core.experience import Tree, map_leaves
from conduit.core.halt import Halt
from conduit.core.ledger import PortCall
from conduit.core.staging import Cut, Group, Inbox
from conduit.errors import FreshnessError, SettingError, UnitError

WhenFull = Literal["block", "drop"]


@dataclass(frozen=True, slots=True)
class ActorLanes:
    """An actor, and the store-wide numbers of its lanes."""

    actor: int
    lanes: range


class Rollout(Protocol):
    @property
    def version(self) -> int:
        """The policy version whose rows are being taken."""
        ...

    def join(self, actor: ActorLanes) -> None:
        """The actor may push from now on."""
        ...

    def put(self, actor: ActorLanes, rows: Rows, version: int | None, deadline_s: float, wait: PortCall) -> bool:
        """Takes one push. False if it was dropped."""
        ...

    def end_unit(self, actor: ActorLanes, bootstrap: Mapping[str, Tree] | None, deadline_s: float) -> None: ...

    def leave(self, actor: ActorLanes, deadline_s: float) -> None:
        """The actor is gone; its open lanes are cut."""
        ...

    def flush(self, deadline_s: float) -> None:
        """Seals what has been pushed, though it is less than a group: a learner waits for it."""
        ...

    def advance(self) -> int:
        """Counts the version up and returns it. Called in a turn."""
        ...


class OffPolicyRollout:
    """Every push is a unit, taken at any time; `units_per_group` of them make a group. When `limit` units wait for the
    operator, a push blocks and at its deadline raises, or is dropped and counted."""

    def __init__(
        self, halt: Halt, inbox: Inbox, units_per_group: int, limit: int, when_full: WhenFull, cuts_matter: bool
    ) -> None:
        if limit < units_per_group:
            raise SettingError(f"inbox_units={limit} is below g_ing={units_per_group}: a group could never fill")
        self._halt = halt
        self._inbox = inbox
        self._units_per_group = units_per_group
        self._limit = limit
        self._when_full = when_full
        self._cuts_matter = cuts_matter
        self._units: list[Rows | Cut] = []
        self._torn: set[int] = set()
        self.version = 0
        self.dropped_rows = 0

    def join(self, actor: ActorLanes) -> None:
        pass

    def put(self, actor: ActorLanes, rows: Rows, version: int | None, deadline_s: float, wait: PortCall) -> bool:
        if version is not None:
            _check_version(version)
        rows.version = self.version if version is None else int(version)
        inbox = self._inbox
        with inbox.changed:
            if inbox.serves(lambda: self._take(rows), deadline_s):
                return True
            if not self._has_room():
                if self._when_full == "drop":
                    self.dropped_rows += len(rows)
                    self._torn.update(rows.lane.tolist())
                    return False
                self._halt.wait(inbox.changed, self._has_room, deadline_s, self._why_full)
            self._take(rows)
        return True

    def _take(self, rows: Rows) -> None:
        """There is room: in line there always is."""
        if self._cuts_matter and self._torn:
            # What follows a dropped row isn't its predecessor's successor.
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
            self._inbox.wait_unclaimed(deadline_s)
            if self._units:
                units, self._units = self._units, []
                self._inbox.seal(Group(units))
            self._inbox.release_last()

    def advance(self) -> int:
        self.version += 1
        return self.version

    def _append(self, unit: Rows | Cut) -> None:
        units = self._units
        units.append(unit)
        if len(units) >= self._units_per_group or self._inbox.starving:
            self._units = []
            self._inbox.seal(Group(units))

    def _has_room(self) -> bool:
        return self._inbox.pending_units + len(self._units) < self._limit

    def _why_full(self) -> str:
        return (
            f"the inbox has been full for the whole wait: {self._limit} units (inbox_units) wait for the ingestion operator, "
            "which is slower than the actors. A longer timeout_s, a larger inbox, cheaper ingestion hooks or when_full='drop' would help"
        )


class OnPolicyRollout:
    """Iteration k takes exactly `unit` rows of version k, in groups of `rows_per_group`. It is whole when its rows are in
    and, where hooks look at trajectories (`needs_edges`), each lane is closed: by its last row or by `end_unit()`."""

    def __init__(self, halt: Halt, inbox: Inbox, unit: int, rows_per_group: int, needs_edges: bool) -> None:
        self._halt = halt
        self._inbox = inbox
        self._unit = unit
        self._rows_per_group = rows_per_group
        self._needs_edges = needs_edges
        self.version = 0
        self.dropped_rows = 0
        self._actors: set[int] = set()
        self._pushed: dict[int, int] = {}
        """The iteration of each actor's last rows."""
        self._begin()

    def join(self, actor: ActorLanes) -> None:
        with self._inbox.changed:
            self._actors.add(actor.actor)

    def put(self, actor: ActorLanes, rows: Rows, version: int | None, deadline_s: float, wait: PortCall) -> bool:
        if version is not None:
            _check_version(version)
        with self._inbox.changed:
            self._admit(actor, len(rows), version, deadline_s, wait)
            rows.version = self.version
            self._pushed[actor.actor] = self.version
            self._taken += len(rows)
            last_of_lane = dict(zip(rows.lane.tolist(), rows.end.tolist(), strict=True))
            self._open -= last_of_lane.keys()
            self._open |= {lane for lane, end in last_of_lane.items() if end == End.OPEN}
            self._units.append(rows)
            self._group_rows += len(rows)
            if not self._close_if_whole() and self._group_rows >= self._rows_per_group:
                self._seal(closes=False)
        return True

    def end_unit(self, actor: ActorLanes, bootstrap: Mapping[str, Tree] | None, deadline_s: float) -> None:
        with self._inbox.changed:
            self._inbox.wait_unclaimed(deadline_s)
            if self._pushed.get(actor.actor, self.version) < self.version:
                # Its iteration, whole without this, has ended already.
                return
            if actor.actor in self._ended:
                raise UnitError(f"actor {actor.actor} has ended its unit for iteration {self.version} already")
            if self._taken < self._unit and self._actors <= self._ended | {actor.actor}:
                raise UnitError(
                    f"iteration {self.version} is short: {self._taken} of {self._unit} rows (rollout_unit) when the last of "
                    f"{len(self._actors)} actors calls end_unit(). Push the rest first, and make all actors before the first "
                    "ends; where an environment resets in a step of its own (Gymnasium's NEXT_STEP autoreset), such steps are "
                    "no rows: use SAME_STEP"
                )
            self._ended.add(actor.actor)
            for place, lane in enumerate(actor.lanes):
                if bootstrap is not None:
                    self._bootstrap[lane] = _row(bootstrap, place)
                self._open.discard(lane)
            self._close_if_whole()

    def leave(self, actor: ActorLanes, deadline_s: float) -> None:
        with self._inbox.changed:
            self._inbox.wait_unclaimed(deadline_s)
            self._actors.discard(actor.actor)
            if self._open & set(actor.lanes):
                self._open -= set(actor.lanes)
                self._units.append(Cut(actor.lanes))
                self._close_if_whole()

    def flush(self, deadline_s: float) -> None:
        """Nothing: a fraction of an iteration is never delivered."""

    def check_whole(self) -> None:
        """Raises UnitError unless the iteration has all its rows."""
        if not self._closed:
            raise UnitError(
                f"advance() before iteration {self.version} is whole: {self.why_open()}. Rows are never dropped unseen"
            )

    def advance(self) -> int:
        with self._inbox.changed:
            self.version += 1
            self._begin()
            self._inbox.changed.notify_all()
            return self.version

    def why_open(self) -> str:
        """What is missing for the iteration to be whole; empty when nothing is."""
        if self._taken < self._unit:
            short = f"iteration {self.version} has {self._taken} of {self._unit} rows (rollout_unit)"
            if self._actors <= self._ended:
                return f"{short}, and no actor is left to push the rest: open one with store.actor()"
            return f"{short}: push {self._unit - self._taken} more"
        if not self._closed:
            return (
                f"iteration {self.version} has its {self._unit} rows, but lanes {sorted(self._open)} are open: "
                "call actor.end_unit(bootstrap=…), since ingestion hooks look at whole trajectories"
            )
        return ""

    def _begin(self) -> None:
        self._units: list[Rows | Cut] = []
        self._group_rows = 0
        self._taken = 0
        self._closed = False
        self._open: set[int] = set()
        self._ended: set[int] = set()
        self._bootstrap: dict[int, Mapping[str, Tree]] = {}

    def _admit(self, actor: ActorLanes, rows: int, version: int | None, deadline_s: float, wait: PortCall) -> None:
        if version is not None and version == self.version + 1:
            began_s = self._halt.clock.now()
            try:
                self._halt.wait(
                    self._inbox.changed, lambda: self.version >= version, deadline_s, self._why_not_advanced
                )
            finally:
                wait.blocked_s += self._halt.clock.now() - began_s
        self._inbox.wait_unclaimed(deadline_s)
        if version is not None and version != self.version:
            raise FreshnessError(
                f"rows of policy version {version} were pushed while iteration {self.version} is running; expected {self.version}, "
                f"or {self.version + 1}, which would wait for store.advance()"
            )
        if self._taken < self._unit and self._actors and self._actors <= self._ended:
            raise UnitError(self.why_open())
        if actor.actor in self._ended or self._taken + rows > self._unit:
            raise UnitError(
                f"iteration {self.version} has {self._taken} of {self._unit} rows (rollout_unit), and this push brings {rows} more"
                f"{' after its actor called end_unit()' if actor.actor in self._ended else ''}. "
                f"Call store.advance() first, or push with version={self.version + 1}, which waits for it"
            )

    def _close_if_whole(self) -> bool:
        if self._closed or self._taken < self._unit or (self._needs_edges and self._open):
            return False
        self._closed = True
        self._seal(closes=True)
        return True

    def _seal(self, closes: bool) -> None:
        units, self._units, self._group_rows = self._units, [], 0
        self._inbox.seal(Group(units, closes, self._bootstrap) if closes else Group(units))

    def _why_not_advanced(self) -> str:
        return f"rows of version {self.version + 1} wait for iteration {self.version} to end: {self.why_open() or 'it is whole'}; then store.advance()"


def _check_version(version: object) -> None:
    if not isinstance(version, Integral) or isinstance(version, bool):
        raise FreshnessError(f"push(version={version!r}): expected a whole number")


def _row(tree: Mapping[str, Tree], place: int) -> Mapping[str, Tree]:
    return map_leaves(lambda leaf: leaf[place], tree)
