"""Stages of known length, to run an operator behind: what rollout and update stand for in benchmarks.

- "sleep": a device at work. The thread waits and holds nothing, so whatever runs beside it has the machine to itself
- "matmul": NumPy at work. It holds one core, and lets the interpreter go while it multiplies
- "python": the interpreter at work. It holds a core and the interpreter, so that nothing else in Python runs beside it for free

The last two do a fixed amount of work, found by timing it alone: where something beside them slows them down they take longer, as
stages do. None is a deadline to be waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np

from conduit.clock import REAL, Clock

Kind = Literal["sleep", "matmul", "python"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_STACK, _SIDE = 16, 96
"""Of the matrices: libraries leave a product of two so small ones to the calling thread, and NumPy lets the interpreter go for the whole
stack, about 0.3 ms."""
_TRIED_S, _TRIES = 20e-3, 5


@dataclass(frozen=True, slots=True)
class Stage:
    """`asked_s`: how long it was to take. `alone_s`: how long it took with nothing beside it, a median; of sleep, what was asked.
    `times`: how often it does its piece of work."""

    kind: Kind
    asked_s: float
    alone_s: float
    times: int
    run: Callable[[], None]

    def __call__(self) -> None:
        self.run()


def stage(kind: Kind, seconds: float, clock: Clock = REAL) -> Stage:
    """A stage of about `seconds`, as exactly as its pieces of work allow. Calibrated on the machine as it is now: make it while nothing else
    runs. `clock`: the one that sleep is of; the others are real work, which takes no time on a virtual clock."""
    if kind == "sleep":
        return Stage(kind, seconds, seconds, 1, partial(clock.sleep, seconds))
    if kind not in KINDS:
        raise ValueError(f"a stage of kind {kind!r}: expected one of {', '.join(KINDS)}")
    work = _multiplying() if kind == "matmul" else _counting
    times = max(1, round(seconds / _once_s(work)))
    run = partial(work, times)
    return Stage(kind, seconds, statistics.median(_timed_s(run) for _ in range(_TRIES)), times, run)


def _multiplying() -> Callable[[int], None]:
    left = np.random.default_rng(0).random((_STACK, _SIDE, _SIDE), np.float32)
    right, product = left[0].T.copy(), np.empty_like(left)

    def multiply(times: int) -> None:
        for _ in range(times):
            np.matmul(left, right, out=product)

    return multiply


def _counting(times: int) -> None:
    state = 1
    for _ in range(100 * times):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF


def _once_s(work: Callable[[int], None]) -> float:
    """Seconds of one piece of work, on the machine at its quietest."""
    times = 1
    while (took_s := _timed_s(partial(work, times))) < _TRIED_S:
        times = 2 * times if took_s < _TRIED_S / 10 else round(times * 1.5 * _TRIED_S / took_s)
    return min(took_s, *(_timed_s(partial(work, times)) for _ in range(_TRIES - 1))) / times


def _timed_s(run: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s
