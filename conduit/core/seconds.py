"""What was spent, as values: seconds of rollout, update, ingestion and delivery, and of how many units and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["rollout", "update", "ingestion", "delivery"]
Port = Literal["push", "pull", "priorities", "advance"]


@dataclass(slots=True)
class OperatorSeconds:
    """`busy_s`: the operator was at work, on any thread, or push and pull themselves were (checks, the copy of what is
    pushed). `exposed_s`: the callers of push (ingestion) or pull (delivery) waited for any of it."""

    busy_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Busy seconds that nobody waited for."""
        return max(0.0, self.busy_s - self.exposed_s)


@dataclass(slots=True)
class Seconds:
    """The seconds of one iteration, or of a whole run."""

    rollout_s: float = 0.0
    update_s: float = 0.0
    ingestion: OperatorSeconds = field(default_factory=OperatorSeconds)
    delivery: OperatorSeconds = field(default_factory=OperatorSeconds)
    starved_s: float = 0.0
    """Learners waited for rows that no actor had pushed yet."""
    blocked_s: float = 0.0
    """Actors waited for learners: on-policy, for the next iteration."""
    wall_s: float = 0.0
    units: int = 0
    """Pushes that took rows."""
    batches: int = 0
    """What learners pulled."""

    @property
    def exposed_s(self) -> float:
        """Experience-path seconds on the critical path (the paper's exposed experience-path latency)."""
        return self.ingestion.exposed_s + self.delivery.exposed_s


CELLS = 10
BUSY: dict[Stage, int] = {"rollout": 0, "update": 1, "ingestion": 2, "delivery": 4}
EXPOSED: dict[Port, int] = {"push": 3, "pull": 5, "priorities": 5, "advance": 5}
"""Priorities and advance count for delivery."""
STARVED, BLOCKED = 6, 7
TOOK: dict[Port, int] = {"push": 8, "pull": 9}

Cells = list[float]
"""The seconds and counts of an account, flat: a push is a matter of microseconds, and it is counted, too."""


def _between(before: Port, port: Port) -> Stage:
    """What a thread did between two calls, where it didn't mark it."""
    return "update" if before == "pull" or (before == "priorities" and port != "push") else "rollout"


CELLS_OF: dict[Port, tuple[int, int, dict[Port, int]]] = {
    port: (exposed - 1, exposed, {following: BUSY[_between(port, following)] for following in EXPOSED})
    for port, exposed in EXPOSED.items()
}
"""The cells of a call: of its own work, of what it exposes, and, by the call that follows, of the time until that."""


def nothing() -> Cells:
    return [0.0] * CELLS


def added(accounts: Sequence[Cells]) -> Cells:
    """Their sum, cell by cell, in a list of its own; of at least one unless nothing was spent."""
    if not accounts:
        return nothing()
    total = accounts[0].copy()
    for cells in accounts[1:]:
        total = [a + b for a, b in zip(total, cells, strict=True)]
    return total


def less(later: Cells, earlier: Cells) -> Cells:
    """What was spent in between."""
    return [a - b for a, b in zip(later, earlier, strict=True)]


def seconds_of(cells: Cells, wall_s: float) -> Seconds:
    rollout_s, update_s, ing_busy_s, ing_exposed_s, del_busy_s, del_exposed_s, starved_s, blocked_s, units, batches = (
        cells
    )
    return Seconds(
        rollout_s,
        update_s,
        OperatorSeconds(ing_busy_s, ing_exposed_s),
        OperatorSeconds(del_busy_s, del_exposed_s),
        starved_s,
        blocked_s,
        wall_s,
        int(units),
        int(batches),
    )
