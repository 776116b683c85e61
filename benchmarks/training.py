"""The loops of `exposed.py`: a thread that acts and trains in turn, through a store, between stages of known length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from stages import Kind, Stage

import conduit
from conduit.core.scheduling import Choice
from conduit.core.seconds import Seconds
from conduit.transforms import GAE, Normalize

Variant = Literal["uniform", "prioritized", "barrier", "row scope"]
OFF_POLICY: tuple[Variant, ...] = ("uniform", "prioritized")
REPLAY_RATIO = 32
STEPS, MINIBATCHES, EPOCHS = 8, 4, 3
LANES = {1: 8, 48: 4, 192: 1}
"""Off-policy, by KB of a row; on-policy four times as many."""
HOST_BYTES = 128 << 20
"""About so much an off-policy store holds."""
FILLERS = 256
"""Lanes that fill it."""
LONGEST_S = 120.0
"""A profile that takes longer is given up."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`share`: of a stage, how much its operator takes in line."""

    variant: Variant
    kind: Kind
    row_kb: int
    rollout_s: float
    update_s: float
    share: float

    @property
    def is_off_policy(self) -> bool:
        return self.variant in OFF_POLICY

    @property
    def lanes(self) -> int:
        return LANES[self.row_kb] * (1 if self.is_off_policy else 4)

    @property
    def batch(self) -> int:
        return REPLAY_RATIO * self.lanes if self.is_off_policy else STEPS * self.lanes // MINIBATCHES

    @property
    def steps(self) -> int:
        """Rollout stages an iteration."""
        return 1 if self.is_off_policy else STEPS

    @property
    def updates(self) -> int:
        return 1 if self.is_off_policy else MINIBATCHES * EPOCHS

    @property
    def before(self) -> int:
        """Iterations of a block before those that count: it begins with what was prepared at the end of the last."""
        return 2 if self.is_off_policy else 1

    @property
    def counted(self) -> int:
        """Iterations of a block that count: whole groups at every g."""
        return 8 if self.is_off_policy else 2

    @property
    def stages_s(self) -> float:
        """Of an iteration."""
        return self.steps * self.rollout_s + self.updates * self.update_s

    def __str__(self) -> str:
        loop = "DQN" if self.is_off_policy else "PPO"
        return f"{loop} {self.variant}, {self.kind} {self.rollout_s * 1e3:g} + {self.update_s * 1e3:g} ms, {self.row_kb} KB, operator {self.share:g}"


class Computing:
    """A hook's work on rows, so much for each, that lets the interpreter go while NumPy computes: the rows go on as they came."""

    def __init__(self, values: float) -> None:
        """`values`: how many a row are computed."""
        self.values = values
        self._result = np.empty(_SLAB, np.float32)

    def __call__(self, source: Any, sink: Any) -> None:
        rows = source.read()
        flat = rows["obs"].reshape(-1)
        left = round(self.values * len(rows["obs"]))
        while left > 0:
            count = min(left, _SLAB, len(flat))
            np.cos(flat[:count], out=self._result[:count])
            left -= count
        sink.write(rows)


_SLAB = 1 << 15
"""Values at a time."""


def value_s() -> float:
    """Of one value that a hook computes, on the machine at its quietest."""
    rows, result = np.ones(_SLAB, np.float32), np.empty(_SLAB, np.float32)
    return min(_timed_s(lambda: np.cos(rows, out=result)) for _ in range(200)) / _SLAB


def _timed_s(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


class Loop:
    """A store and what trains with it."""

    def __init__(self, cell: Cell, stages: tuple[Stage, Stage], values: tuple[float, float], schedule: Any) -> None:
        """`values`: computed for each row, by the hooks of ingestion and of delivery."""
        self._cell, (self._rollout, self._update) = cell, stages
        # Not of the rows that fill the store.
        computing = Computing(0.0)
        ingestion = conduit.register_ingestion()(computing)
        delivery = conduit.register_delivery()(Computing(values[1]))
        if cell.is_off_policy:
            capacity = HOST_BYTES // (cell.row_kb << 10)
            self.store = conduit.Store(
                backend="reference",
                capacity=capacity,
                batch_size=cell.batch,
                sampler=conduit.Prioritized() if cell.variant == "prioritized" else None,
                ingestion=[ingestion],
                delivery=[delivery],
                schedule=schedule,
            )
            filler = self.store.actor(FILLERS)
            for _ in range(-(-capacity // FILLERS)):
                filler.push(_rows(cell, FILLERS))
            filler.close()
        else:
            self.store = conduit.Store(
                backend="reference",
                mode="on_policy",
                rollout_unit=cell.lanes * STEPS,
                batch_size=cell.batch,
                epochs=EPOCHS,
                ingestion=[GAE(), Normalize("advantage")] if cell.variant == "barrier" else [ingestion],
                delivery=[delivery],
                schedule=schedule,
            )
        computing.values = values[0]
        self._actor, self._learner = self.store.actor(cell.lanes), self.store.learner()
        self._step = _rows(cell, cell.lanes)
        self._priorities = np.ones(cell.batch, np.float32)

    def iterate(self, times: int = 1) -> None:
        for _ in range(times):
            for _ in range(self._cell.steps):
                with self.store.rollout():
                    self._rollout()
                self._actor.push(self._step)
            if self._cell.variant == "barrier":
                self._actor.end_unit(bootstrap={"value": np.zeros(self._cell.lanes, np.float32)})
            for _ in range(self._cell.updates):
                batch = self._learner.pull()
                with self.store.update():
                    self._update()
                if self._cell.variant == "prioritized":
                    self.store.update_priorities(batch.info.keys, self._priorities)
                del batch
            if not self._cell.is_off_policy:
                self.store.advance()

    def block(self) -> Seconds:
        """What the iterations took that count."""
        self.iterate(self._cell.before)
        first = self.store.ledger.iteration_count
        self.iterate(self._cell.counted)
        spent = self.store.ledger.between(first, first + self._cell.counted)
        assert spent is not None
        return spent

    def choose(self) -> tuple[Choice | None, int]:
        """Runs until the store has chosen; how many iterations that took. None where it hasn't for long."""
        began_s, iterations, choice = time.perf_counter(), 0, None
        # Not often: to be asked takes a while, in which operators go on.
        at_a_time = 24 if self._cell.is_off_policy else 4
        while choice is None and time.perf_counter() - began_s < LONGEST_S:
            self.iterate(at_a_time)
            iterations += at_a_time
            choice = self.store.explain().choice
        return choice, iterations


def _rows(cell: Cell, lanes: int) -> dict[str, np.ndarray]:
    one = np.ones(lanes, np.float32)
    return {"obs": np.ones((lanes, cell.row_kb << 8), np.float32), "reward": one, "value": one}


def values_of(cell: Cell, each_s: float) -> tuple[float, float]:
    """How many values hooks compute for a row, so that with them each operator takes its share of its stage in line."""
    loop = Loop(cell, (_NOTHING, _NOTHING), (0.0, 0.0), None)
    loop.iterate(4)
    spent = [loop.block() for _ in range(5)]
    loop.store.close()

    def values(stages_s: float, exposed_s: list[float], rows: int) -> float:
        """All of an iteration."""
        bare_s = statistics.median(exposed_s) / cell.counted
        return max(0.0, cell.share * stages_s - bare_s) / each_s / rows

    return (
        values(cell.steps * cell.rollout_s, [each.ingestion.exposed_s for each in spent], cell.steps * cell.lanes),
        values(cell.updates * cell.update_s, [each.delivery.exposed_s for each in spent], cell.updates * cell.batch),
    )


_NOTHING = Stage("sleep", 0.0, 0.0, 1, lambda: None)
