"""Prioritized draws: the sampler whose rows have priorities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.priority_tree import PriorityTree
from conduit.core.ring import Window
from conduit.core.sampling import Draw, DrawStream, Sampler, too_few
from conduit.core.starts import Starts
from conduit.errors import SettingError

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Rows in proportion to priority**alpha (Schaul et al. 2016, proportional variant), drawn by strata, in random order.

    `alpha` (the field's `priority_exponent`), `beta` (`importance_sampling_exponent`; a constant in [0, 1], or a function of
    the batch number, clamped to [0, 1]), `eps`: added to every updated priority, `new`: priority of rows pushed without
    one, "max" for the highest that any row has had so far (1.0 at first).
    Weights are (N·P)^-beta over their maximum in the batch. Only `push(priority=0)`, or an update with 0 while eps is 0,
    disables a row."""

    alpha: float = 0.6
    beta: float | Callable[[int], float] = 0.4
    eps: float = 1e-6
    new: str | float = "max"

    def __post_init__(self) -> None:
        _require("alpha", self.alpha, lambda x: x >= 0, "a finite number ≥ 0")
        _require("eps", self.eps, lambda x: x >= 0, "a finite number ≥ 0")
        if not callable(self.beta):
            _require("beta", self.beta, lambda x: 0 <= x <= 1, "a number in [0, 1], or a function of the batch number")
        if isinstance(self.new, str):
            if self.new != "max":
                raise SettingError(f"Prioritized(new={self.new!r}): expected 'max' or a finite number > 0")
        else:
            _require("new", self.new, lambda x: x > 0, "'max' or a finite number > 0")

    @property
    def prioritized(self) -> bool:
        return True

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _PrioritySampler(self, capacity, seed, starts)

    def beta_at(self, number: int) -> float:
        beta = self.beta(number) if callable(self.beta) else self.beta
        if not isinstance(beta, Real) or not math.isfinite(beta):
            raise SettingError(f"Prioritized(beta=…) gave {beta!r} for batch {number}; expected a finite number")
        return min(max(float(beta), 0.0), 1.0)


class _PrioritySampler:
    def __init__(self, settings: Prioritized, capacity: int, seed: int, starts: Starts | None) -> None:
        self._settings = settings
        self._capacity = capacity
        self._stream = DrawStream(seed)
        self._starts = starts
        self._tree = PriorityTree(capacity)
        self._raw = np.zeros(capacity)
        self._highest = 1.0
        # So that the sum over all rows stays finite.
        most = 1e307 / capacity
        self.highest_priority = most ** (1 / settings.alpha) if settings.alpha > 1 else most

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        default = self._highest if self._settings.new == "max" else float(self._settings.new)
        if priority is None:
            self._fill(first_key, np.full(rows, default))
            return
        chosen = np.where(np.isnan(priority), default, priority)
        self._highest = max(self._highest, float(chosen.max(initial=0.0)))
        self._fill(first_key, chosen)

    def admit(self, keys: Keys) -> None:
        slots = keys % self._capacity
        self._tree.set(slots, self._leaf(self._raw[slots]))

    def exclude(self, keys: Keys) -> None:
        self._tree.set(keys % self._capacity, np.zeros(len(keys)))

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        few = too_few(window, self._starts, rows)
        if few is None and self._tree.total <= 0.0:
            return (
                f"all {self._count(window)} rows have priority 0, which disables them: push rows or update priorities"
            )
        return few

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        random = self._stream.at(number, stream)
        total = self._tree.total
        stratum = random.permutation(rows) + random.random(rows)
        slots = self._tree.find(stratum * (total / rows))
        keys = window.frontier - (window.frontier - slots) % self._capacity
        probability = self._tree.get(slots) / total
        weight = (probability * self._count(window)) ** -self._settings.beta_at(number)
        return Draw(keys, probability, (weight / weight.max()).astype(np.float32), self._raw[slots])

    def update(self, keys: Keys, priority: Floats) -> None:
        if not len(keys):
            return
        raised = priority + self._settings.eps
        slots = keys % self._capacity
        self._raw[slots] = raised
        leaf = self._leaf(raised)
        self._tree.set(slots, leaf if self._starts is None else np.where(self._starts.at(slots), leaf, 0.0))
        self._highest = max(self._highest, float(raised.max()))

    def _fill(self, first_key: int, raw: Floats) -> None:
        start = first_key % self._capacity
        head = min(len(raw), self._capacity - start)
        for low, part in ((start, raw[:head]), (0, raw[head:])):
            if len(part):
                self._raw[low : low + len(part)] = part
                leaf = self._leaf(part) if self._starts is None else np.zeros(len(part))
                self._tree.set_range(low, leaf, low + len(part))

    def _count(self, window: Window) -> int:
        """N, how many rows there are to draw from."""
        return len(window) if self._starts is None else self._starts.count

    def _leaf(self, raw: Floats) -> Floats:
        # Only an explicit 0 disables a row: neither does 0 ** 0 enable it, nor a large alpha disable one by underflow.
        return np.where(raw > 0.0, np.maximum(raw**self._settings.alpha, np.finfo(np.float64).tiny), 0.0)


def _require(name: str, got: Any, fits: Callable[[float], bool], expected: str) -> None:
    if not isinstance(got, Real) or isinstance(got, bool) or not math.isfinite(got) or not fits(float(got)):
        raise SettingError(f"Prioritized({name}={got!r}): expected {expected}")
