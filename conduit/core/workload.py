"""What is asked of a placement: how large rows are, how many, and who produces and consumes how many of them an iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from conduit.core.whole import MOST, check_whole
from conduit.errors import SettingError
from conduit.topology.bandwidth import is_finite
from conduit.topology.cluster import Topology
from conduit.topology.endpoint import Endpoint, Tier

MOST_PORTS = 1 << 20
"""Actors, or learners."""


@dataclass(frozen=True, slots=True)
class Workload:
    """An iteration delivers a batch to every learner, and ingests rows_delivered / replay_ratio rows, an equal part from each of `actors`.

    - `row_bytes`, `capacity` (rows), `batch_size` (rows, for each learner)
    - `actors`: where rows are born; `learners`: where batches are wanted
    - `replay_ratio`: rows delivered, over all learners, for each row ingested
    - `staged_batches`: batches that each learner's memory holds beside the rows
    - `side_bytes`: bytes beside the rows, at the first endpoint of a placement: finals"""

    row_bytes: int
    capacity: int
    batch_size: int
    actors: tuple[Endpoint, ...]
    learners: tuple[Endpoint, ...]
    replay_ratio: float = 1.0
    staged_batches: int = 1
    side_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("row_bytes", "capacity", "batch_size"):
            check_whole(name, getattr(self, name), most=MOST)
        for name in ("staged_batches", "side_bytes"):
            check_whole(name, getattr(self, name), 0, MOST)
        if not self.actors or not self.learners:
            raise SettingError("a workload needs at least one actor and one learner")
        ratio = self.replay_ratio
        if not (is_finite(ratio) and ratio > 0 and math.isfinite(float(self.rows_delivered) * self.row_bytes / ratio)):
            raise SettingError(
                f"replay_ratio={ratio!r}: expected a finite number > 0, such as 1.0 or 4, and a finite number of rows ingested with it"
            )

    @property
    def rows_delivered(self) -> int:
        """An iteration, over all learners."""
        return self.batch_size * len(self.learners)

    @property
    def rows_ingested(self) -> float:
        """An iteration, over all actors."""
        return self.rows_delivered / self.replay_ratio

    def staged_rows(self, at: Endpoint) -> int:
        """That a memory holds beside those that are placed there, for the learners at it."""
        return self.learners.count(at) * self.staged_batches * self.batch_size

    def with_row_bytes(self, row_bytes: int) -> Workload:
        return replace(self, row_bytes=row_bytes)


def ports_at(
    name: str, asked: int | Endpoint | str | Sequence[Endpoint | str], usual: Sequence[Endpoint], topology: Topology
) -> tuple[Endpoint, ...]:
    """Where the ports called `name` are: `asked`, by value or name, or that many over `usual` in turn."""
    if isinstance(asked, str | Endpoint):
        asked = [asked]
    if not isinstance(asked, Sequence):
        check_whole(name, asked, most=MOST_PORTS)
        asked = [usual[number % len(usual)] for number in range(int(asked))]
    try:
        ports = tuple(Endpoint.parse(each) if isinstance(each, str) else each for each in asked)
    except ValueError as error:
        raise SettingError(f"{name}={asked!r}: {error}, or how many there are, such as 4") from None
    for at in dict.fromkeys(ports):
        topology.memory(at)
    return ports


def room_bytes(
    topology: Topology, workload: Workload, budgets: Mapping[Tier, int], reserve: float = 0.0
) -> dict[Endpoint, int]:
    """At each endpoint, what rows may take: what is free less the part `reserve` of the whole memory, at most the tier's budget, less
    the batches that are staged for learners there."""
    if not (is_finite(reserve) and 0 <= reserve < 1):
        raise SettingError(f"reserve={reserve!r}: expected a part of each memory to keep free, 0 ≤ reserve < 1")
    room = {}
    for at, memory in topology.memories.items():
        free = memory.free_bytes - math.ceil(reserve * memory.capacity_bytes)
        limit = min(free, budgets.get(at.tier, free))
        room[at] = max(0, limit - workload.staged_rows(at) * workload.row_bytes)
    return room
