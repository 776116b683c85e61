"""Which rows a batch gets. A draw is a pure function of the seed, the batch's number, the frontier and the priorities
known: nothing here looks at a clock, a thread or a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from conduit.core.drawable import Drawable, distinct, first_distinct
from conduit.core.journal import Copy, at_once
from conduit.core.ring import Window
from conduit.core.starts import Starts
from conduit.errors import PriorityError, SettingError

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]


State = Mapping[str, Any]
"""What a sampler remembers, for a checkpoint: NumPy arrays, numbers and strings by name."""


@dataclass(slots=True)
class Draw:
    """Rows chosen for one batch, each in (batch,), or one number where it is the same for all. `SampleInfo` says what each is.
    `weight`: finite importance weights > 0 up to a common factor, which the store sets so that the batch's highest is 1; None:
    all are 1."""

    keys: Keys
    probability: float | Floats
    weight: Floats | None = None
    priority: float | Floats = 1.0


class Sampler(Protocol):
    """A sampler at work on one store. Calls come one at a time, each in its turn.

    A key is a row's insertion number, and `key % capacity` its slot, in which it stays until another row is inserted there or
    `exclude` names it: nothing else ends a row. (In a store whose remover isn't Fifo, keys are slots, and not in order of age.)"""

    @property
    def highest_priority(self) -> float:
        """The highest raw priority that `update` and `insert` take."""
        ...

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        """Rows [first_key, first_key + rows) became live, in the places of as many oldest ones where the ring is full.
        NaN or None: the sampler chooses the priority. At most as many rows as the capacity. Where there are `Starts`, none of
        them is drawable yet."""
        ...

    def admit(self, keys: Keys) -> None:
        """These live rows are drawable from now on."""
        ...

    def exclude(self, keys: Keys) -> None:
        """These rows, distinct, are drawable no more, and never again: their slots may get other rows."""
        ...

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        """What is missing for a draw of `rows` rows as batch `number`; None when it can be served. Where `starts.used_up`, rows are
        excluded as they are drawn: so many different rows it takes."""
        ...

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        """Batch `number`'s rows. `stream` tells apart draws that share numbers (1: `Store.sample`)."""
        ...

    def update(self, keys: Keys, priority: Floats) -> None:
        """Sets raw priorities of live keys; of a key that occurs twice, the last stays. One that is excluded, or not yet
        admitted, doesn't become drawable by it."""
        ...

    def state(self, window: Window) -> State:
        """All that later draws depend on, but for the seed, in arrays of its own. What is known of each row is told by key, in the
        order of `window`, or names the key; so that it can be loaded where rows have other slots. Pushes and draws wait for it."""
        ...

    def load(self, state: State, window: Window) -> None:
        """Goes on from `state`, in a sampler that was just started: what it draws from here on is what the other would have
        drawn, if the capacities are equal. Of the rows that it was told by, only those of `window` are there still; where there
        are `Starts`, they say already which of these are drawable."""
        ...


class LiveSampler(Sampler, Protocol):
    """One of Conduit's own, or what stands before a user's."""

    def state(self, window: Window, copy: Copy = at_once) -> State:
        """The same; `copy` says how it gets the arrays that are kept by slot: where that is later, nobody waits for them."""
        ...


@runtime_checkable
class Sampling(Protocol):
    """A sampler as the user asks for it: a value."""

    @property
    def prioritized(self) -> bool:
        """Whether rows have priorities that `update_priorities` and `push(priority=)` may set."""
        ...

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        """`starts`: which live rows may be drawn; None for all of them."""
        ...


class DrawStream:
    """Random numbers for each batch number, the same whenever they are asked for.

    One Philox, whose counter is set to what is asked for: a tenth of the cost of making a generator each time."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(np.random.SeedSequence(seed))
        self._state = self._bits.state
        self._generator = np.random.Generator(self._bits)
        self._ahead: dict[tuple[int, int], _Ahead] = {}

    def at(self, number: int, stream: int = 0) -> np.random.Generator:
        """A generator for batch `number`. Valid until the next call of either method."""
        return self._set(0, 0, number, stream)

    def fractions(self, number: int, rows: int, stream: int = 0) -> Floats:
        """`rows` numbers in [0, 1) for batch `number`, not to be changed. They don't depend on what was asked before; who asks
        for one batch after the other gets them from blocks that are made together, larger ones as it goes on."""
        ahead = self._ahead.get((rows, stream), _NOTHING)
        place = number - ahead.first
        if not 0 <= place < len(ahead.numbers):
            # A counter gives four numbers. Batches of one size follow each other along the first counter word, from 0 on.
            counters = -(-rows // 4)
            follows = 0 <= place - len(ahead.numbers) < _FOLLOWS
            most = max(1, _AHEAD // (4 * counters))
            batches = min(max(1, 2 * len(ahead.numbers)), most) if follows else 1
            random = self._set(number * counters, rows, 0, stream)
            numbers = random.random(batches * 4 * counters).reshape(batches, 4 * counters)
            if len(self._ahead) >= _KINDS:
                del self._ahead[next(iter(self._ahead))]
            self._ahead[rows, stream] = ahead = _Ahead(number, numbers)
            place = 0
        return ahead.numbers[place, :rows]

    def _set(self, *counter: int) -> np.random.Generator:
        state = self._state
        state["state"]["counter"][:] = counter
        state["buffer_pos"], state["has_uint32"] = 4, 0
        self._bits.state = state
        return self._generator


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Fractions of batches `first`, first + 1, … of one size and stream."""

    first: int
    numbers: Floats


_NOTHING = _Ahead(0, np.zeros((0, 0)))
_KINDS = 8
"""For how many sizes and streams blocks are kept."""
_AHEAD = 1 << 12
"""How many fractions are made together at most, by and large."""
_FOLLOWS = 64
"""A batch that is at most so many behind the block goes on with it: a learner among others takes every so-manieth."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every drawable row with equal chance. `replacement=False`: the rows of one batch are distinct."""

    replacement: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.replacement, bool):
            raise SettingError(f"Uniform(replacement={self.replacement!r}): expected True or False")

    @property
    def prioritized(self) -> bool:
        return False

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _UniformSampler(self, capacity, seed, starts)


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

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        return _ShuffledSampler(self, seed)


class _UniformSampler:
    highest_priority = 0.0

    def __init__(self, settings: Uniform, capacity: int, seed: int, starts: Starts | None) -> None:
        self._replacement = settings.replacement
        self._stream = DrawStream(seed)
        self._drawable = Drawable(capacity, starts)

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        self._drawable.insert(first_key, rows)

    def admit(self, keys: Keys) -> None:
        pass

    def exclude(self, keys: Keys) -> None:
        self._drawable.exclude(keys)

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return self._drawable.missing(window, rows)

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        starts = self._drawable.starts
        if not self._replacement:
            return self._distinct(self._stream.at(number, stream), rows, window)
        if starts is not None:
            return Draw(starts.choose(self._stream.at(number, stream), rows, window), 1.0 / starts.count)
        live = len(window)
        # A float64 has 53 bits: with up to 2**40 rows, no row's chance is off by more than 1 in 8,000.
        keys = (self._stream.fractions(number, rows, stream) * live).astype(np.int64)
        keys += window.first
        return Draw(keys, 1.0 / live)

    def update(self, keys: Keys, priority: Floats) -> None:
        raise PriorityError("the sampler is Uniform: rows have no priorities; use sampler=conduit.Prioritized()")

    def state(self, window: Window, copy: Copy = at_once) -> State:
        return {"excluded": self._drawable.excluded(window, copy)}

    def load(self, state: State, window: Window) -> None:
        self._drawable.load(state["excluded"], window)

    def _distinct(self, random: np.random.Generator, rows: int, window: Window) -> Draw:
        starts = self._drawable.starts
        if starts is None or starts.count == len(window):
            return Draw(window.first + distinct(random, rows, len(window)), 1.0 / len(window))
        keys = first_distinct(lambda tries: starts.choose(random, tries, window), rows, starts.count)
        return Draw(keys, 1.0 / starts.count)


class _ShuffledSampler:
    highest_priority = 0.0

    def __init__(self, settings: Shuffled, seed: int) -> None:
        self._settings = settings
        self._stream = DrawStream(seed)
        self._pass = -1
        self._order = np.zeros(0, np.int64)

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        pass

    def admit(self, keys: Keys) -> None:
        pass

    def exclude(self, keys: Keys) -> None:
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
        return Draw(window.first + chosen, 1.0 / len(window))

    def update(self, keys: Keys, priority: Floats) -> None:
        raise PriorityError("an on-policy store delivers every row: rows have no priorities")

    def state(self, window: Window, copy: Copy = at_once) -> State:
        return {}

    def load(self, state: State, window: Window) -> None:
        pass
