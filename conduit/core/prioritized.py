"""Prioritized draws: the sampler whose rows have priorities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from conduit.core.drawable import Drawable, live_keys, require, slot_ranges, still_live
from conduit.core.journal import Copy, Journal, at_once
from conduit.core.priority_tree import PriorityTree, compiled
from conduit.core.ring import Window
from conduit.core.sampling import Draw, DrawStream, Sampler, State
from conduit.core.starts import Starts
from conduit.errors import SettingError

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]
_TINY = np.finfo(np.float64).tiny
_STOPS = "which stops a store that draws it"


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Rows in proportion to priority**alpha (Schaul et al. 2016, proportional variant), drawn by strata, in random order.

    `alpha` (the field's `priority_exponent`), `beta` (`importance_sampling_exponent`; a constant in [0, 1], or a function of
    the batch number, clamped to [0, 1]), `eps`: added to every updated priority, `new`: priority of rows pushed without
    one, "max" for the highest that any row has had so far (1.0 at first).
    Weights are (N·P)^-beta, in a batch over their maximum there. Only `push(priority=0)`, or an update with 0 while eps is 0,
    disables a row.

    It costs 16.6 B a row: the raw priority, that to the alpha, and half a byte of sums. Where numba is installed (the extra `fast`)
    draws and updates run in machine code, and give the same; CONDUIT_NUMBA=0 in the environment leaves it out."""

    alpha: float = 0.6
    beta: float | Callable[[int], float] = 0.4
    eps: float = 1e-6
    new: str | float = "max"

    def __post_init__(self) -> None:
        require("Prioritized", "alpha", self.alpha, lambda x: x >= 0, "a finite number ≥ 0")
        require("Prioritized", "eps", self.eps, lambda x: x >= 0, "a finite number ≥ 0")
        if not callable(self.beta):
            require(
                "Prioritized",
                "beta",
                self.beta,
                lambda x: 0 <= x <= 1,
                "a number in [0, 1], or a function of the batch number",
            )
        if isinstance(self.new, str):
            if self.new != "max":
                raise SettingError(f"Prioritized(new={self.new!r}): expected 'max' or a finite number > 0")
        else:
            require("Prioritized", "new", self.new, lambda x: x > 0, "'max' or a finite number > 0")

    @property
    def prioritized(self) -> bool:
        return True

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _PrioritySampler(self, capacity, seed, starts)

    def beta_at(self, number: int) -> float:
        if not callable(self.beta):
            return float(self.beta)
        try:
            beta = self.beta(number)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise SettingError(f"Prioritized(beta=…) failed for batch {number}, {_STOPS}: {what}") from error
        if not isinstance(beta, Real) or not math.isfinite(beta):
            raise SettingError(
                f"Prioritized(beta=…) gave {beta!r} for batch {number}, {_STOPS}; expected a finite number"
            )
        return min(max(float(beta), 0.0), 1.0)


class _PrioritySampler:
    def __init__(self, settings: Prioritized, capacity: int, seed: int, starts: Starts | None) -> None:
        self._settings = settings
        self._capacity = capacity
        self._stream = DrawStream(seed)
        self._given = starts
        self._drawable = Drawable(capacity, starts)
        self._tree = PriorityTree(capacity, compiled())
        self._raw = np.zeros(capacity)
        self._journal = Journal({"priority": self._raw})
        """Leaves follow from the priorities, and sums from the leaves."""
        self._highest = 1.0
        self._default = (0.0, 0.0)
        self._had_zeros = False
        """Whether any row ever had priority 0."""
        # So that the sum over all rows stays finite.
        most = 1e307 / capacity
        self.highest_priority = most ** (1 / settings.alpha) if settings.alpha > 1 else most

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        raw, leaf = self._new_row() if priority is None else self._new_rows(priority)
        if self._given is not None:
            leaf = 0.0
        self._drawable.insert(first_key, rows)
        start = first_key % self._capacity
        head = self._capacity - start
        if rows <= head:
            self._fill(start, start + rows, raw, leaf)
            return
        raw, leaf = np.broadcast_to(raw, rows), np.broadcast_to(leaf, rows)
        self._fill(start, self._capacity, raw[:head], leaf[:head])
        self._fill(0, rows - head, raw[head:], leaf[head:])

    def admit(self, keys: Keys) -> None:
        slots = keys % self._capacity
        self._tree.set(slots, self._leaf(self._raw.take(slots)))

    def exclude(self, keys: Keys) -> None:
        self._tree.set(keys % self._capacity, np.zeros(len(keys)))
        self._drawable.exclude(keys)

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        few = self._drawable.missing(window, rows)
        if few is None and self._tree.total <= 0.0:
            starts = self._drawable.starts
            count = len(window) if starts is None else starts.count
            return f"all {count} rows have priority 0, which disables them: push rows or update priorities"
        if few is None and self._had_zeros and self._given is not None and self._given.used_up:
            enabled = self._tree.count_positive(rows)
            if enabled < rows:
                return (
                    f"{enabled} of {self._given.count} drawable rows have a priority above 0, and a batch of {rows} needs as many, for each is "
                    "drawn only so often: push rows or update priorities"
                )
        return few

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        fractions = self._stream.fractions(number, 2 * rows, stream)
        mass = fractions[:rows] + np.arange(rows, dtype=np.float64)
        total = self._tree.total
        mass *= total / rows
        # Looked up as they lie, which is quicker, and mixed afterwards.
        slots, leaf = self._tree.find(mass)
        order = fractions[rows:].argsort()
        slots, leaf = slots.take(order), leaf.take(order)
        # Up to a factor, N and the total cancel out of (N·P)^-beta. It is finite: leaves are 0, or no less than _TINY.
        weight = leaf ** -self._settings.beta_at(number)
        return Draw(live_keys(slots, window, self._capacity), leaf / total, weight, self._raw.take(slots))

    def update(self, keys: Keys, priority: Floats) -> None:
        if not len(keys):
            return
        raised = priority + self._settings.eps
        slots = keys % self._capacity
        if self._journal.on:
            self._journal.before(slots)
        self._raw[slots] = raised
        leaf, starts = self._leaf(raised), self._drawable.starts
        self._tree.set(slots, leaf if starts is None else leaf * starts.at(slots))
        self._highest = max(self._highest, float(np.maximum.reduce(raised)))

    def state(self, window: Window, copy: Copy = at_once) -> State:
        return {
            "first": window.first,
            "priority": copy(self._journal, "priority", window),
            "highest": self._highest,
            "excluded": self._drawable.excluded(window, copy),
        }

    def load(self, state: State, window: Window) -> None:
        self._highest = float(state["highest"])
        self._drawable.load(state["excluded"], window)
        raw = np.ascontiguousarray(still_live(state["priority"], state["first"], window))
        leaf, starts = self._leaf(raw), self._drawable.starts
        if starts is not None:
            leaf *= starts.at(np.arange(window.first, window.stop) % self._capacity)
        for start, stop, those in slot_ranges(window.first, len(window), self._capacity):
            self._fill(start, stop, raw[those], leaf[those])

    def _new_row(self) -> tuple[float, float]:
        """Raw priority and leaf of a row that comes without a priority."""
        raw = self._highest if self._settings.new == "max" else float(self._settings.new)
        if raw != self._default[0]:
            self._default = (raw, float(self._leaf(np.array([raw]))[0]))
        return self._default

    def _new_rows(self, priority: Floats) -> tuple[Floats, Floats]:
        """The same of rows some of which come with one. They may be several pushes': each goes by those before it, as if they came alone."""
        lacking, fixed = np.isnan(priority), self._new_row()[0]
        highest = np.maximum.accumulate(np.maximum(np.where(lacking, 0.0, priority), self._highest))
        raw = np.where(lacking, highest if self._settings.new == "max" else fixed, priority)
        if len(raw):
            self._highest = float(highest[-1])
        return raw, self._leaf(raw)

    def _fill(self, start: int, stop: int, raw: Floats | float, leaf: Floats | float) -> None:
        if self._journal.on:
            self._journal.before_range(start, stop)
        self._raw[start:stop] = raw
        self._tree.set_range(start, leaf, stop)

    def _leaf(self, raw: Floats) -> Floats:
        # Only an explicit 0 disables a row: neither does 0 ** 0 enable it, nor a large alpha disable one by underflow.
        leaf = raw**self._settings.alpha
        np.maximum(leaf, _TINY, out=leaf)
        if np.count_nonzero(raw) < len(raw):
            self._had_zeros = True
            leaf[raw == 0.0] = 0.0
        return leaf
