"""Which rows a batch gets. A draw is a pure function of the seed, the batch's number, the frontier and the priorities
known: nothing here looks at a clock, a thread or a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from conduit.core.priority_tree import PriorityTree
from conduit.core.ring import Window
from conduit.errors import PriorityError, SettingError

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows chosen for one batch; arrays of shape (batch,). `SampleInfo` says what each is."""

    keys: Keys
    probability: Floats
    weight: NDArray[np.float32]
    priority: Floats


class Sampler(Protocol):
    """A sampler at work on one store. Calls come one at a time, each in its turn."""

    @property
    def highest_priority(self) -> float:
        """The highest raw priority that `update` and `insert` take."""
        ...

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        """Rows [first_key, first_key + rows) became live, in the places of as many oldest ones where the ring is full.
        NaN or None: the sampler chooses the priority. At most as many rows as the capacity."""
        ...

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        """What is missing for a draw of `rows` rows as batch `number`; None when it can be served."""
        ...

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        """Batch `number`'s rows. `stream` tells apart draws that share numbers (1: `Store.sample`)."""
        ...

    def update(self, keys: Keys, priority: Floats) -> None:
        """Sets raw priorities of live keys; of a key that occurs twice, the last stays."""
        ...


@runtime_checkable
class Sampling(Protocol):
    """A sampler as the user asks for it: a value."""

    @property
    def prioritized(self) -> bool:
        """Whether rows have priorities that `update_priorities` and `push(priority=)` may set."""
        ...

    def start(self, capacity: int, seed: int) -> Sampler: ...


class DrawStream:
    """A random generator for each batch number, the same whenever it is asked for.

    One Philox, whose counter is set to (number, stream): a tenth of the cost of making a generator each time."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(np.random.SeedSequence(seed))
        self._state = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def at(self, number: int, stream: int = 0) -> np.random.Generator:
        """Valid until the next call."""
        state = self._state
        counter = state["state"]["counter"]
        counter[:] = (0, 0, number, stream)
        state["buffer_pos"], state["has_uint32"] = 4, 0
        self._bits.state = state
        return self._generator


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every live row with equal chance, with replacement."""

    @property
    def prioritized(self) -> bool:
        return False

    def start(self, capacity: int, seed: int) -> Sampler:
        return _UniformSampler(seed)


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

    def start(self, capacity: int, seed: int) -> Sampler:
        return _PrioritySampler(self, capacity, seed)

    def beta_at(self, number: int) -> float:
        beta = self.beta(number) if callable(self.beta) else self.beta
        if not isinstance(beta, Real) or not math.isfinite(beta):
            raise SettingError(f"Prioritized(beta=…) gave {beta!r} for batch {number}; expected a finite number")
        return min(max(float(beta), 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """On-policy: the rows of one iteration, each exactly once a pass, in a new order each pass.

    Batch `number` belongs to iteration `number // (epochs · minibatches)`; it can be drawn when that iteration's rows are whole."""

    rollout_unit: int
    batch_size: int
    epochs: int

    @property
    def prioritized(self) -> bool:
        return False

    def start(self, capacity: int, seed: int) -> Sampler:
        return _ShuffledSampler(self, seed)


class _UniformSampler:
    highest_priority = 0.0

    def __init__(self, seed: int) -> None:
        self._stream = DrawStream(seed)

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        pass

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return _too_few(window, rows)

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        keys = self._stream.at(number, stream).integers(window.first, window.stop, rows)
        return _evenly(keys, len(window))

    def update(self, keys: Keys, priority: Floats) -> None:
        raise PriorityError("the sampler is Uniform: rows have no priorities; use sampler=conduit.Prioritized()")


class _PrioritySampler:
    def __init__(self, settings: Prioritized, capacity: int, seed: int) -> None:
        self._settings = settings
        self._capacity = capacity
        self._stream = DrawStream(seed)
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

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        few = _too_few(window, rows)
        if few is None and self._tree.total <= 0.0:
            return f"all {len(window)} rows have priority 0, which disables them: push rows or update priorities"
        return few

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        random = self._stream.at(number, stream)
        total = self._tree.total
        stratum = random.permutation(rows) + random.random(rows)
        slots = self._tree.find(stratum * (total / rows))
        keys = window.frontier - (window.frontier - slots) % self._capacity
        probability = self._tree.get(slots) / total
        weight = (probability * len(window)) ** -self._settings.beta_at(number)
        return Draw(keys, probability, (weight / weight.max()).astype(np.float32), self._raw[slots])

    def update(self, keys: Keys, priority: Floats) -> None:
        if not len(keys):
            return
        raised = priority + self._settings.eps
        slots = keys % self._capacity
        self._raw[slots] = raised
        self._tree.set(slots, self._leaf(raised))
        self._highest = max(self._highest, float(raised.max()))

    def _fill(self, first_key: int, raw: Floats) -> None:
        start = first_key % self._capacity
        head = min(len(raw), self._capacity - start)
        for low, part in ((start, raw[:head]), (0, raw[head:])):
            if len(part):
                self._raw[low : low + len(part)] = part
                self._tree.set_range(low, self._leaf(part), low + len(part))

    def _leaf(self, raw: Floats) -> Floats:
        # Only an explicit 0 disables a row: neither does 0 ** 0 enable it, nor a large alpha disable one by underflow.
        return np.where(raw > 0.0, np.maximum(raw**self._settings.alpha, np.finfo(np.float64).tiny), 0.0)


class _ShuffledSampler:
    highest_priority = 0.0

    def __init__(self, settings: Shuffled, seed: int) -> None:
        self._settings = settings
        self._stream = DrawStream(seed)
        self._pass = -1
        self._order = np.zeros(0, np.int64)

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        pass

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        settings = self._settings
        unit = settings.rollout_unit
        current = window.first // unit
        wanted = number // (unit // settings.batch_size * settings.epochs)
        if wanted != current:
            return f"iteration {current} has given all its batches: call store.advance() and push iteration {wanted}"
        return (
            None if len(window) == unit else f"iteration {current} has {len(window)} of its {unit} rows in the buffer"
        )

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        minibatches = self._settings.rollout_unit // self._settings.batch_size
        passes, part = divmod(number, minibatches)
        if passes != self._pass:
            self._pass, self._order = passes, self._stream.at(passes).permutation(self._settings.rollout_unit)
        chosen = self._order[part * rows : (part + 1) * rows]
        return _evenly(window.first + chosen, len(window))

    def update(self, keys: Keys, priority: Floats) -> None:
        raise PriorityError("an on-policy store delivers every row: rows have no priorities")


def _evenly(keys: Keys, live: int) -> Draw:
    rows = len(keys)
    both = np.empty((2, rows))
    both[0], both[1] = 1.0 / live, 1.0
    return Draw(keys, both[0], np.ones(rows, np.float32), both[1])


def _too_few(window: Window, rows: int) -> str | None:
    return (
        None
        if len(window) >= rows
        else f"{len(window)} rows are visible and a batch needs {rows}: push {rows - len(window)} more"
    )


def _require(name: str, got: Any, fits: Callable[[float], bool], expected: str) -> None:
    if not isinstance(got, Real) or isinstance(got, bool) or not math.isfinite(got) or not fits(float(got)):
        raise SettingError(f"Prioritized({name}={got!r}): expected {expected}")
