"""What a store's `placement=` becomes: as it was asked for, or what is planned once the rows' form is known (paper §5.2, §5.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from conduit.core.backend import Backend
from conduit.core.placement import KINDS, Asked, Placement, asked_kinds, format_bytes
from conduit.core.placement_map import PlacementMap
from conduit.core.planning import choose, plan_for
from conduit.core.plans import Plan
from conduit.core.ring import block_rows
from conduit.core.scheduling import Choice, ScheduleEvent
from conduit.core.transfer_plan import TransferPlan, solve
from conduit.core.workload import Workload, room_bytes
from conduit.errors import CapacityError, MigrationError, TopologyError
from conduit.topology.cluster import Memory, Topology
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

_MOST_RESERVE = 0.02
"""Of each memory."""

Held = Mapping[Endpoint, int]
"""Bytes that rows take now, by endpoint."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a store asks of any placement: see `Workload`. `staging`: how many batches may wait for each learner, the most first; fewer are
    made do with where there is no room for more. `grows`: whether its rows may become larger."""

    capacity: int
    batch_size: int
    replay_ratio: float
    staging: tuple[int, ...]
    grows: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a store's rows are, or will go, when the operators run, and why. Times that aren't said to be measured are predictions.

    - `placement`, `why`; `plan`: all that could have been. Before the first row, whose size they depend on, `placement` and `plan` are None
    - `schedule`: what is followed, or is about to be, and why, as a text; `choice`: what an automatic schedule was chosen from, None before
      that, and where it was given; `history`: what an automatic schedule came to so far, by iteration"""

    placement: Placement | None
    why: str
    plan: Plan | None
    schedule: str = ""
    choice: Choice | None = None
    history: tuple[ScheduleEvent, ...] = ()

    def __str__(self) -> str:
        placed = "rows: " if self.placement is None else f"rows are at {_named(self.placement)}: "
        planned = "" if self.plan is None else f"\n{self.plan}"
        return f"{placed}{self.why}{planned}" + (f"\n\n{self.schedule}" if self.schedule else "")


class Placer:
    """Knows what was asked, which machine there is, and where learners are."""

    def __init__(
        self,
        backend: Backend[Any],
        asked: Asked,
        budgets: Mapping[Tier, int],
        demand: Demand,
        topology: Topology | None,
        here: Callable[[bool], Topology],
    ) -> None:
        """`topology`: None is what `here(True)` measures, once it is needed; `here(False)` is what is known without. CapacityError
        for a placement that isn't to be had here, TopologyError for a topology without the backend's host memory."""
        self._backend, self._budgets, self._demand, self._here = backend, budgets, demand, here
        self._given = None if topology is None else _shared_with(backend, topology)
        self._topology = self._given
        kinds = asked_kinds(asked)
        self._fixed = Placement.of(asked, backend.endpoints()) if kinds is None else None
        self._kinds = KINDS if kinds is None else kinds
        # Rows are dealt to endpoints in blocks: some get a block or two more than their share.
        spare = 2 * len(backend.endpoints()) * block_rows(demand.capacity) / demand.capacity
        self._reserve = min(spare, _MOST_RESERVE)
        self.staged_batches = demand.staging[0]
        """How many may wait for each learner."""
        self.failed = ""
        """Why rows couldn't be moved when they were to be; empty once they could."""
        self._learners: list[Endpoint] = []
        self._map: PlacementMap | None = None
        self._plans: dict[tuple[Placement, Placement], TransferPlan] = {}

    def join(self, landing: Endpoint, on_demand: bool = False) -> None:
        """A learner takes its batches there; or somebody does now and then, which counts where no learner does.
        TopologyError where that is to be planned for and the topology that was given doesn't have it."""
        if self._given is not None and self._fixed is None:
            try:
                self._given.memory(landing)
            except TopologyError as error:
                raise TopologyError(
                    f"a learner takes its batches at {landing}, and rows are placed by what topology= says: {error}"
                ) from None
        if on_demand and landing in self._learners:
            return
        self._learners.append(landing)
        # What was swept was for the others alone.
        self._map = None

    @property
    def chooses(self) -> bool:
        """Whether it is left to this where rows go, and depends on bandwidths."""
        return self._fixed is None and self._is_planned

    def refresh(self, own: Held) -> None:
        """Looks up again what memory is free, where the machine's own figures are gone by. `own`: what the store's rows take."""
        if self._given is not None or self._topology is None:
            return
        memories = {}
        for at, each in self._topology.memories.items():
            free = self._backend.free_bytes(at)
            # Of some devices all that is known of their size is what was free when they were looked at.
            capacity = max(each.capacity_bytes, free)
            memories[at] = replace(each, capacity_bytes=capacity, free_bytes=min(capacity, free + own.get(at, 0)))
        self._topology, self._map = self._topology.changed(memories=memories), None

    def fix(self, placement: Placement) -> None:
        """From here on rows are where the user wants them."""
        self._fixed = placement

    def place(self, row_bytes: int, current: Placement | None = None, held: Held | None = None) -> Placement:
        """Where rows of so many bytes go, which are at `current` as long as they are smaller. Where it can be, beside what those hold.
        CapacityError with every candidate's shortfall where none fits."""
        *more, least = self._demand.staging
        for staged in more:
            with suppress(CapacityError):
                return self._placed(staged, row_bytes, current, held)
        return self._placed(least, row_bytes, current, held)

    def _placed(self, staged: int, row_bytes: int, current: Placement | None, held: Held | None) -> Placement:
        """`place`, where so many batches may wait for each learner."""
        if staged != self.staged_batches:
            self.staged_batches, self._map = staged, None
        if self._fixed is not None or not self._is_planned:
            # Rows are made on the host and wanted there: nothing is faster, whatever the bandwidths.
            placement = self._fixed or Placement()
            self._check_staged(placement, row_bytes)
            return placement
        self._known(True, held)
        if self._demand.grows and self._map is None:
            self._sweep(row_bytes)
        swept = self._swept(row_bytes, current)
        # Rows that grow are copied, be it to where they are: until then there are both.
        if swept is not None and (not held or self._fit_beside(swept, row_bytes, held)):
            return swept
        beside = self._plan(row_bytes, current, True, held)
        return beside.placement if beside.choice is not None else self._plan(row_bytes, current, True).placement

    def worth_moving(self, row_bytes: int, current: Placement, held: Held, iterations: int) -> Placement:
        """Where rows at `current` should be by now: somewhere else if so many iterations there save more than the move takes."""
        if self._fixed is not None or not self._is_planned:
            return self._fixed or Placement()
        self._known(True, held)
        better = self._plan(row_bytes, current, True, held).choice
        now = next(
            (each for each in self._plan(row_bytes, current, True).candidates if each.placement == current), None
        )
        if better is None or now is None or choose([now, better], current) is now:
            return current
        move = self.transfer_plan(current, better.placement, row_bytes)
        saved_s = (now.transfer_s - better.transfer_s) * iterations
        return better.placement if move is None or saved_s > move.move_s(row_bytes) else current

    def explain(self, row_bytes: int, current: Placement, held: Held, measure: bool) -> Explanation:
        """Of rows that are at `current`. `measure` False: nothing is measured that hasn't been."""
        plan = self._plan(row_bytes, current, measure, own=held)
        return Explanation(current, self._why(current, plan), plan)

    def transfer_plan(self, before: Placement, after: Placement, row_bytes: int) -> TransferPlan | None:
        """Who sends how many of all rows to whom; None where nothing is known of the bandwidths, or of one of the endpoints."""
        topology, capacity = self._topology, self._demand.capacity
        if topology is None or not topology.memories.keys() >= {*before.endpoints, *after.endpoints}:
            return None
        plan = self._plans.get((before, after))
        if plan is None:
            try:
                plan = solve(topology, before.rows(capacity), after.rows(capacity), row_bytes)
            except MigrationError:
                # No bandwidth is known of a way: that doesn't say that there is none.
                return None
            self._plans[before, after] = plan
        # Solved once: the rates are those of the sizes that it is for.
        return replace(plan, row_bytes=row_bytes)

    def _check_staged(self, placement: Placement, row_bytes: int) -> None:
        """CapacityError where a budget has no room for the batches that wait, beside the rows. The one that is handed over is the learner's."""
        demand, rows = self._demand, placement.rows(self._demand.capacity)
        waiting = (self.staged_batches - 1) * demand.batch_size * row_bytes
        for at in dict.fromkeys(self._learners) if waiting else ():
            budget, beside = self._budgets.get(at.tier), rows.get(at, 0) * row_bytes
            need = beside + waiting * self._learners.count(at)
            if budget is not None and need > budget:
                raise CapacityError(
                    f"{at}: {format_bytes(beside)} of rows, and {self.staged_batches - 1} batches of {format_bytes(demand.batch_size * row_bytes)} that "
                    f"wait for each of {self._learners.count(at)} learners, need {format_bytes(need)}; the budget is {format_bytes(budget)}. A lower "
                    "g_del, no overlap_del or a larger budget would do"
                )

    @property
    def _is_planned(self) -> bool:
        """Whether it depends on bandwidths where rows go. That they were measured to explain it changes nothing."""
        return self._given is not None or self._kinds != KINDS or any(not at.is_host for at in self._learners)

    def _why(self, current: Placement, plan: Plan) -> str:
        if self._fixed is not None:
            return "as it was asked for"
        if not self._is_planned:
            return "they are made on the host and wanted there"
        if plan.choice is None or plan.choice.placement == current:
            return "the fastest that fits"
        failed = f"; it was tried: {self.failed}" if self.failed else ""
        return f"the fastest that fitted when they came there; by now {plan.choice.name} would be faster, if a move pays: see migrate(){failed}"

    def _swept(self, row_bytes: int, current: Placement | None) -> Placement | None:
        """What the map says; None where there is none, or it ends before, or knows nothing that fits."""
        swept = self._map
        if swept is None or row_bytes > swept.regions[-1].last or swept.region(row_bytes).placement is None:
            return None
        return swept.at(row_bytes, current)

    def _fit_beside(self, placement: Placement, row_bytes: int, held: Held) -> bool:
        """Whether there is room for rows of so many bytes beside those that hold `held`."""
        work = self._workload(row_bytes)
        room = room_bytes(self._known(True), work, self._budgets, self._reserve)
        need = placement.rows(work.capacity)
        return all(rows * row_bytes + held.get(at, 0) <= room[at] for at, rows in need.items())

    def _plan(
        self,
        row_bytes: int,
        current: Placement | None,
        measure: bool,
        held: Held | None = None,
        own: Held | None = None,
    ) -> Plan:
        """`held`: what isn't to be counted on, beside what is taken; `own`: what the store's rows take, should free memory be looked up now."""
        topology = self._known(measure, own)
        if held:
            topology = topology.changed(
                memories={at: self._without(at, each, held) for at, each in topology.memories.items()}
            )
        return plan_for(topology, self._workload(row_bytes), self._kinds, self._budgets, self._reserve, current)

    def _without(self, at: Endpoint, memory: Memory, held: Held) -> Memory:
        """What is left of a memory for a plan, beside what is held there: of its budget as well."""
        budget, kept = self._budgets.get(at.tier), math.ceil(self._reserve * memory.capacity_bytes)
        most = memory.free_bytes if budget is None else min(memory.free_bytes, budget + kept)
        return replace(memory, free_bytes=max(0, most - held.get(at, 0)))

    def _workload(self, row_bytes: int) -> Workload:
        demand = self._demand
        return Workload(
            row_bytes=max(1, row_bytes),
            capacity=demand.capacity,
            batch_size=demand.batch_size,
            actors=(PAGEABLE,),
            learners=tuple(self._learners) or (PAGEABLE,),
            replay_ratio=demand.replay_ratio,
            staged_batches=self.staged_batches,
        )

    def _known(self, measure: bool, own: Held | None = None) -> Topology:
        """The topology that was given, or this machine's, with the memory that rows of one's own take by now counted as free."""
        if self._topology is not None:
            return self._topology
        found = _shared_with(self._backend, self._here(measure))
        free = {
            at: replace(each, free_bytes=min(each.capacity_bytes, each.free_bytes + (own or {}).get(at, 0)))
            for at, each in found.memories.items()
        }
        found = found.changed(memories=free)
        if measure:
            self._topology = found
        return found

    def _sweep(self, row_bytes: int) -> None:
        """Plans for all sizes that rows may come to, and for the moves from each to the next."""
        topology = self._known(True)
        largest = sum(each.free_bytes for each in topology.memories.values()) // self._demand.capacity
        if largest <= row_bytes:
            return
        self._map = PlacementMap.sweep(
            topology,
            self._workload(row_bytes),
            (max(1, row_bytes), largest),
            kinds=self._kinds,
            budgets=self._budgets,
            reserve=self._reserve,
        )
        for before, after in self._map.transitions:
            self.transfer_plan(before, after, row_bytes)


def _shared_with(backend: Backend[Any], topology: Topology) -> Topology:
    """What a topology says of the backend's endpoints."""
    there = backend.endpoints()
    shared = [at for at in topology.endpoints if at in there]
    if PAGEABLE not in shared:
        raise TopologyError(
            f"topology {topology.name!r} has {', '.join(map(str, topology.endpoints))}; the {backend.name} backend has "
            f"{', '.join(map(str, there))}: expected a topology with {PAGEABLE}, where actors make rows"
        )
    return topology.only(shared)


def _named(placement: Placement) -> str:
    total = sum(placement.shares)
    if len(placement.endpoints) == 1:
        return str(placement.endpoints[0])
    return ", ".join(
        f"{at} {share / total:.0%}" for at, share in zip(placement.endpoints, placement.shares, strict=True)
    )
