"""What predictions are compared with: a stage and its operator as two workers, simulated event by event.

Nothing here uses conduit's formulas. A worker is a generator: it yields seconds to work for, or a condition to wait for."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

Worker = Iterator[float | Callable[[], bool]]


@dataclass
class Simulation:
    now_s: float = 0.0
    _waiting: list[tuple[Worker, Callable[[], bool]]] = field(default_factory=list)
    _working: list[tuple[float, int, Worker]] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=count)

    def run(self, *workers: Worker) -> float:
        """When the last worker is done."""
        for worker in workers:
            self._step(worker)
        while True:
            self._wake()
            if not self._working:
                assert not self._waiting, "all workers wait"
                return self.now_s
            self.now_s, _, worker = heapq.heappop(self._working)
            self._step(worker)

    def _step(self, worker: Worker) -> None:
        does = next(worker, None)
        if callable(does):
            self._waiting.append((worker, does))
        elif does is not None:
            heapq.heappush(self._working, (self.now_s + does, next(self._ids), worker))

    def _wake(self) -> None:
        """Everyone whose condition holds goes on, until nobody's does."""
        while ready := [each for each in self._waiting if each[1]()]:
            self._waiting.remove(ready[0])
            self._step(ready[0][0])


@dataclass
class Door:
    """Where one worker hands things to the next, at most one at a time: for `hand_over_s` neither does anything else."""

    simulation: Simulation
    hand_over_s: float = 0.0
    room: int | None = None
    """How many may lie beside it; None: what is handed over is taken by hand."""
    lies: int = 0
    here: bool = False
    given: int = 0

    def give(self) -> Worker:
        if self.room is not None:
            yield lambda: self.lies < (self.room or 0)
            yield self.hand_over_s
            self.lies += 1
            return
        yield lambda: self.here
        yield self.hand_over_s
        self.here = False
        self.given += 1

    def take(self) -> Worker:
        if self.room is not None:
            yield lambda: self.lies > 0
            self.lies -= 1
            return
        before = self.given
        self.here = True
        yield lambda: self.given > before


def off_policy_s(
    first: Sequence[float], second: Sequence[float], groups: int, hand_over_s: float, room: int | None = None
) -> float:
    """Seconds per group, in the long run, of two workers of whom the first makes a group out of `first` (seconds each) and the second
    takes `second` for it. Ingestion: rollout and operator. Delivery: operator and update."""  # fmt: skip
    ends: list[float] = []
    simulation = Simulation()
    door = Door(simulation, hand_over_s, room)

    def maker() -> Worker:
        for _ in range(groups):
            yield from first
            yield from door.give()

    def taker() -> Worker:
        for _ in range(groups):
            yield from door.take()
            yield from second
            ends.append(simulation.now_s)

    simulation.run(maker(), taker())
    half = groups // 2
    return (ends[-1] - ends[half]) / (groups - 1 - half)


def on_policy_s(first: Sequence[float], second: Sequence[float], hand_over_s: float = 0.0) -> float:
    """Seconds of one iteration of two workers: the first makes parts that take `first`, one after the other, the second takes `second`
    for each of them, and nothing was there before."""
    simulation = Simulation()
    door = Door(simulation, hand_over_s)

    def maker() -> Worker:
        for part_s in first:
            yield part_s
            yield from door.give()

    def taker() -> Worker:
        for part_s in second:
            yield from door.take()
            yield part_s

    return simulation.run(maker(), taker())
