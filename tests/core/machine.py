"""A pretend machine for tests of scheduling: what stages and operators take under each schedule is a formula, so the best one is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from conduit.core.feasible import Feasible, feasible
from conduit.core.figures import Crew
from conduit.core.latency import gamma
from conduit.core.profile import Profile, Window
from conduit.core.schedule import Auto, Mode, Schedule
from conduit.core.seconds import OperatorSeconds, Seconds
from conduit.core.semantics import OffPolicy, OnPolicy, Semantics

OFF = OffPolicy(1000, 10)
ON = OnPolicy(80, 10, epochs=4)


@dataclass
class Path:
    """A stage and its operator, in seconds. An invocation takes `fixed_s` and `unit_s` for each unit. Behind the stage, that takes
    `slows` times as long in addition, and each unit blocks its thread for `hand_off_s`."""

    stage_s: float
    fixed_s: float = 0.0
    unit_s: float = 0.0
    slows: float = 0.0
    hand_off_s: float = 0.0

    def operator_s(self, mode: Mode) -> float:
        return self.fixed_s / mode.g + self.unit_s

    def spent(self, mode: Mode, share: float) -> tuple[float, float, float]:
        """Per unit: the stage, the operator at work, and what is waited for it."""
        operator_s = self.operator_s(mode)
        if not mode.overlap:
            return self.stage_s, operator_s, operator_s
        stage_s = self.stage_s * (1 + self.slows)
        return stage_s, operator_s, operator_s - share * min(stage_s, operator_s) + self.hand_off_s


@dataclass
class Machine:
    """`units`: pushes per iteration, off-policy; on-policy they come in `units` pushes that are one unit. `noise`: relative, of each
    second that is spent. `jumps`: iterations that take an hour longer."""

    ingestion: Path
    delivery: Path
    units: float = 1.0
    semantics: Semantics = OFF
    noise: float = 0.0
    seed: int = 0
    jumps: frozenset[int] = frozenset()
    iterations: int = 0
    pushed: float = 0.0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def feasible(self) -> Feasible:
        return feasible(self.semantics, Auto(), pipelines=True, counted=False)

    @property
    def passes(self) -> float:
        return float(self.semantics.epochs) if isinstance(self.semantics, OnPolicy) else 1.0

    def expected_s(self, schedule: Schedule) -> float:
        """Of an iteration."""
        units = 1.0 if isinstance(self.semantics, OnPolicy) else self.units
        (roll_s, _, push_s), (update_s, _, pull_s) = self._paths(schedule)
        return units * (roll_s + push_s) + self.passes * (update_s + pull_s)

    def best_s(self, among: Feasible | None = None) -> float:
        return min(self.expected_s(schedule) for schedule in (among or self.feasible).schedules)

    def iteration(self, schedule: Schedule) -> Seconds:
        """The next one."""
        on_policy = isinstance(self.semantics, OnPolicy)
        assert not on_policy or self.units >= 1
        before = int(self.pushed)
        self.pushed += self.units
        pushes = int(self.pushed) - before
        (roll_s, ing_s, push_s), (update_s, del_s, pull_s) = self._paths(schedule)
        units = 1 if on_policy else pushes
        waited_push_s = units * push_s
        waited_pull_s = self.passes * pull_s
        if not on_policy and not schedule.overlap_ing:
            # A whole group at a time.
            g = schedule.ingestion.g
            waited_push_s = push_s * g * (int(self.pushed) // g - before // g)
        if not on_policy and not schedule.overlap_del:
            g = int(schedule.delivery.g)
            waited_pull_s = pull_s * g if self.iterations % g == 0 else 0.0
        spent = Seconds(
            self._noisy(units * roll_s),
            self._noisy(self.passes * update_s),
            OperatorSeconds(units * ing_s, self._noisy(waited_push_s)),
            OperatorSeconds(self.passes * del_s, self._noisy(waited_pull_s)),
            units=pushes,
            batches=self.semantics.batches if isinstance(self.semantics, OnPolicy) else 1,
        )
        if self.iterations in self.jumps:
            spent.update_s += 3600.0
        spent.wall_s = spent.rollout_s + spent.update_s + spent.exposed_s
        self.iterations += 1
        return spent

    def play(self, window: Window) -> list[Seconds]:
        for _ in range(window.warm_up):
            self.iteration(window.schedule)
        return [added(self.iteration(window.schedule) for _ in range(window.per_block)) for _ in range(window.blocks)]

    def profiled(self, profile: Profile) -> Profile:
        """Played to its end."""
        while (window := profile.next()) is not None:
            profile.learn(self.play(window), Crew())
        return profile

    def _paths(self, schedule: Schedule) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        ingestion, delivery = schedule.ingestion, schedule.delivery
        passes = self.passes if isinstance(self.semantics, OnPolicy) else None
        return (
            self.ingestion.spent(ingestion, gamma(self.semantics, "ingestion", ingestion)),
            self.delivery.spent(delivery, gamma(self.semantics, "delivery", delivery, passes)),
        )

    def _noisy(self, seconds: float) -> float:
        return seconds * self._random.lognormvariate(0.0, self.noise) if self.noise else seconds


def added(each: Iterator[Seconds]) -> Seconds:
    total = Seconds()
    for spent in each:
        total.rollout_s += spent.rollout_s
        total.update_s += spent.update_s
        for operator, more in ((total.ingestion, spent.ingestion), (total.delivery, spent.delivery)):
            operator.busy_s += more.busy_s
            operator.exposed_s += more.exposed_s
        total.wall_s += spent.wall_s
        total.units += spent.units
        total.batches += spent.batches
    return total
