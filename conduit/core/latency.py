"""How long an iteration takes under a schedule, predicted from measured times (paper §6.2, App. E, Eq. 2 and 4-6).

Three things differ from the paper, whose own version mispredicts a two-stage pipeline:
- on-policy γ is 0 where one invocation takes all there is, and 1 - g/E for delivery: only the first group of an iteration can't be
  prepared behind anything
- T_sync is what was measured beside the stage, in two parts: what the stage is slowed by belongs to the stage, before the minimum of Eq. 4
  and 5; what blocks its thread is added. The operator's own part is in T(g)
- where stages run concurrently the slower path decides, not the sum"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from conduit.core.schedule import Mode, is_number
from conduit.core.semantics import OnPolicy, Semantics
from conduit.errors import SettingError

Operator = Literal["ingestion", "delivery"]


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """One operator in one mode, in seconds per unit: of ingestion, a rollout unit; of delivery, a batch off-policy and a pass of M
    mini-batches on-policy.

    - `operator_s`: T̄(g) = T(g)/g, what an invocation takes in this mode, over what it handles
    - `slowdown_s`: by how much longer the stage takes beside it than alone; 0 in line
    - `blocking_s`: what the callers wait beyond what the model says (the hand-off); less than 0 where they wait less. 0 in line
    - `noise_s`: by how much the three together may be off"""

    operator_s: float
    slowdown_s: float = 0.0
    blocking_s: float = 0.0
    noise_s: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds("OperatorTimes", operator_s=self.operator_s, noise_s=self.noise_s)
        _check_seconds("OperatorTimes", -math.inf, slowdown_s=self.slowdown_s, blocking_s=self.blocking_s)

    @property
    def sync_s(self) -> float:
        """T_sync of Eq. 2: what overlap costs. Signed."""
        return self.slowdown_s + self.blocking_s


@dataclass(frozen=True, slots=True)
class StageTimes:
    """All that a prediction is made of; what a profile measures.

    - `rollout_s`: of the actors, alone, per rollout unit; `update_s`: of the learner, alone, per batch (on-policy: per pass)
    - `units`, `batches`: rollout units, and batches (on-policy: passes of one learner), per iteration; need not be whole
    - `ingestion`, `delivery`: the modes that were measured
    - `concurrent`: actors and learners work at the same time"""

    rollout_s: float
    update_s: float
    units: float
    batches: float
    ingestion: Mapping[Mode, OperatorTimes]
    delivery: Mapping[Mode, OperatorTimes]
    concurrent: bool = False

    def __post_init__(self) -> None:
        _check_seconds("StageTimes", rollout_s=self.rollout_s, update_s=self.update_s)
        _check_seconds("StageTimes", expected="a finite number", units=self.units, batches=self.batches)
        for operator, modes in (("ingestion", self.ingestion), ("delivery", self.delivery)):
            for mode, times in modes.items():
                if not mode.overlap and (times.slowdown_s or times.blocking_s):
                    raise SettingError(
                        f"StageTimes({operator}[{mode}]): T_sync of {times.sync_s:.3g} s (slowdown_s={times.slowdown_s:.3g}, "
                        f"blocking_s={times.blocking_s:.3g}) in line, where nothing runs beside the stage; expected 0, and all of it in operator_s"
                    )


def gamma(semantics: Semantics, operator: Operator, mode: Mode, passes: float | None = None) -> float:
    """How much of min(stage, operator) overlap can hide (Eq. 6). `passes`: on-policy, those of one learner an iteration; None: all
    E epochs. 0 where nothing can be prepared behind anything."""
    if not mode.overlap:
        return 0.0
    if not isinstance(semantics, OnPolicy):
        return 1.0
    together = 1.0 if operator == "ingestion" else float(semantics.epochs if passes is None else passes)
    return max(0.0, 1 - mode.g / together) if together else 0.0


def hidden_s(stage_s: float, times: OperatorTimes, gamma: float) -> float:
    """Seconds per unit that the operator works behind the stage, as slow as that is beside it (Eq. 4, 5)."""
    return gamma * min(max(0.0, stage_s + times.slowdown_s), times.operator_s)


def waited_s(stage_s: float, times: OperatorTimes, gamma: float) -> float:
    """Seconds per unit that push or pull waits: what isn't hidden, and what blocks."""
    return max(0.0, times.operator_s - hidden_s(stage_s, times, gamma) + times.blocking_s)


def path_s(stage_s: float, times: OperatorTimes, gamma: float) -> float:
    """Seconds per unit of a stage and its operator together: T_stage + T̄(g) + T_sync - hide (Eq. 2)."""
    return max(0.0, stage_s + times.slowdown_s) + waited_s(stage_s, times, gamma)


def ingestion_path_s(times: StageTimes, semantics: Semantics, mode: Mode) -> float:
    """T_ing-path of an iteration: rollout and ingestion, in this mode."""
    share = gamma(semantics, "ingestion", mode)
    return times.units * path_s(times.rollout_s, times.ingestion[mode], share)


def delivery_path_s(times: StageTimes, semantics: Semantics, mode: Mode) -> float:
    """T_del-path of an iteration: delivery and update, in this mode."""
    passes = times.batches if isinstance(semantics, OnPolicy) else None
    share = gamma(semantics, "delivery", mode, passes)
    return times.batches * path_s(times.update_s, times.delivery[mode], share)


def iteration_s(ingestion_path_s: float, delivery_path_s: float, concurrent: bool) -> float:
    """T_iter: the sum where rollout and update alternate, the slower path where they run at the same time."""
    return max(ingestion_path_s, delivery_path_s) if concurrent else ingestion_path_s + delivery_path_s


def _check_seconds(whose: str, least: float = 0.0, expected: str = "finite seconds", **given: float) -> None:
    bound = "" if least == -math.inf else f" of at least {least:.0f}"
    for name, value in given.items():
        if not (is_number(value) and math.isfinite(value) and value >= least):
            raise SettingError(f"{whose}({name}={value!r}): expected {expected}{bound}")
