"""On-policy rollout: how pushes fill an iteration, and when it is whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from conduit.core.episodes import End, Rows
from conduit.core.experience import Tree, map_leaves
from conduit.core.halt import Halt
from conduit.core.ledger import PortCall
from conduit.core.rollout import ActorLanes, check_version
from conduit.core.staging import Cut, Group, Inbox
from conduit.errors import FreshnessError, UnitError


@dataclass(frozen=True, slots=True, eq=False)
class _Widening:
    """A push of rows that are wider than any before: the thread's, and the iteration that they are for."""

    thread: int
    version: int


class OnPolicyRollout:
    """Iteration k takes exactly `unit` rows of version k, in groups of `rows_per_group`. It is whole when its rows are in
    and, where hooks look at trajectories (`needs_edges`), each lane is closed: by its last row or by `end_unit()`."""

    def __init__(self, halt: Halt, inbox: Inbox, unit: int, rows_per_group: int, needs_edges: bool) -> None:
        self._halt = halt
        self._inbox = inbox
        self._unit = unit
        self._rows_per_group = rows_per_group
        self._next_mode: tuple[bool, int] | None = None
        self._needs_edges = needs_edges
        self.version = 0
        self.dropped_rows = self.stale_rows = 0
        self._actors: set[int] = set()
        self._widening: list[_Widening] = []
        self._pushed: dict[int, int] = {}
        """The iteration of each actor's last rows."""
        self._begin()

    @property
    def version_of_draws(self) -> int:
        return self.version

    def tell_draws(self) -> None:
        """Nothing: the version is counted in a turn."""

    @property
    def oldest_version(self) -> int | None:
        return None

    def join(self, actor: ActorLanes) -> None:
        with self._inbox.changed:
            self._actors.add(actor.actor)

    @contextmanager
    def widening(self, actor: ActorLanes, version: int | None, deadline_s: float, wait: PortCall) -> Iterator[None]:
        """Rows that were waiting for the same iteration come afterwards, so that those that make it wider are its first."""
        if version is not None:
            check_version(version)
        changed = self._inbox.changed
        with changed:
            mine = _Widening(threading.get_ident(), self.version if version is None else int(version))
            self._widening.append(mine)
        try:
            with changed:
                self._wait_begun(actor, version, deadline_s, wait)
                self._wait_unwidened(actor, deadline_s)
                self._check_version(version)
            yield
        finally:
            with changed:
                self._widening.remove(mine)
                changed.notify_all()

    def put(self, actor: ActorLanes, rows: Rows, version: int | None, deadline_s: float, wait: PortCall) -> bool:
        if version is not None:
            check_version(version)
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

    def switch(self, behind: bool, units: int) -> None:
        """In the next iteration; at once in one that has no rows so far."""
        with self._inbox.changed:
            self._next_mode = behind, units
            if not self._taken:
                self._adopt()

    def follows(self, behind: bool, units: int) -> bool:
        return self._rows_per_group == units and self._inbox.behind is behind

    def _adopt(self) -> None:
        """For a caller who holds `changed`."""
        if self._next_mode is not None:
            behind, self._rows_per_group = self._next_mode
            self._next_mode = None
            self._inbox.switch(behind)

    def flush(self, deadline_s: float) -> None:
        """Nothing: a fraction of an iteration is never delivered."""

    def has_room(self, rows: int) -> bool:
        return self._taken + rows <= self._unit

    def state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "pushed": dict(self._pushed),
            "units": list(self._units),
            "group_rows": self._group_rows,
            "taken": self._taken,
            "closed": self._closed,
            "open": sorted(self._open),
            "ended": sorted(self._ended),
            "bootstrap": dict(self._bootstrap),
        }

    def load(self, state: Mapping[str, Any], left: Sequence[int] | None) -> None:
        self.version = state["version"]
        self._units, self._group_rows = list(state["units"]), state["group_rows"]
        self._taken, self._closed = state["taken"], state["closed"]
        self._bootstrap = dict(state["bootstrap"])
        self._open = set(state["open"])
        if left is None:
            self._pushed, self._ended = dict(state["pushed"]), set(state["ended"])
        elif self._open:
            with self._inbox.changed:
                self._units.append(Cut(sorted(self._open)))
                self._open = set()
                self._close_if_whole()

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
            self._adopt()
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
        self._wait_begun(actor, version, deadline_s, wait)
        self._inbox.wait_unclaimed(deadline_s)
        while not self._is_free():
            self._wait_unwidened(actor, deadline_s)
            self._inbox.wait_unclaimed(deadline_s)
        self._check_version(version)
        if self._taken < self._unit and self._actors and self._actors <= self._ended:
            raise UnitError(self.why_open())
        if actor.actor in self._ended or self._taken + rows > self._unit:
            raise UnitError(
                f"iteration {self.version} has {self._taken} of {self._unit} rows (rollout_unit), and this push brings {rows} more"
                f"{' after its actor called end_unit()' if actor.actor in self._ended else ''}. "
                f"Call store.advance() first, or push with version={self.version + 1}, which waits for it"
            )

    def _wait_begun(self, actor: ActorLanes, version: int | None, deadline_s: float, wait: PortCall) -> None:
        if version is not None and version == self.version + 1:
            began_s = self._halt.clock.now()
            try:
                with actor.waiters:
                    self._halt.wait(
                        self._inbox.changed, lambda: self.version >= version, deadline_s, self._why_not_advanced
                    )
            finally:
                wait.blocked_s += self._halt.clock.now() - began_s

    def _check_version(self, version: int | None) -> None:
        if version is not None and version != self.version:
            raise FreshnessError(
                f"rows of policy version {version} were pushed while iteration {self.version} is running; expected {self.version}, "
                f"or {self.version + 1}, which would wait for store.advance()"
            )

    def _is_free(self) -> bool:
        """Whether no other thread's rows are making this iteration wider, or about to."""
        if not self._widening:
            return True
        first = next((each for each in self._widening if each.version <= self.version), None)
        return first is None or first.thread == threading.get_ident()

    def _wait_unwidened(self, actor: ActorLanes, deadline_s: float) -> None:
        with actor.waiters:
            self._halt.wait(self._inbox.changed, self._is_free, deadline_s, lambda: "rows that grew are being pushed")

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


def _row(tree: Mapping[str, Tree], place: int) -> Mapping[str, Tree]:
    return map_leaves(lambda leaf: leaf[place], tree)
