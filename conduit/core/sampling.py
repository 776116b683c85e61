"""Which rows a batch gets. A draw is a pure function of the seed, the batch's number, the frontier and the priorities
known: nothing here looks at a clock, a thread or a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

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
        """What is missing for a draw of `rows` rows as batch `number`; None when it can be served."""
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
        order of `window`, or names the key; so that it can be loaded where rows have other slots."""
        ...

    def load(self, state: State, window: Window) -> None:
        """Goes on from `state`, in a sampler that was just started: what it draws from here on is what the other would have
        drawn, if the capacities are equal. Of the rows that it was told by, only those of `window` are there still; where there
        are `Starts`, they say already which of these are drawable."""
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

    def state(self, window: Window) -> State:
        return {"excluded": self._drawable.excluded(window)}

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

    def state(self, window: Window) -> State:
        return {}

    def load(self, state: State, window: Window) -> None:
        pass


class Drawable:
    """Which live rows a sampler may draw: those that its `Starts` name; where it has none, all but those that it was told to
    exclude, because a remover took them."""

    def __init__(self, capacity: int, starts: Starts | None) -> None:
        self._capacity = capacity
        self._given = starts
        self._own: Starts | None = None
        """A byte a slot, from the first row on that is excluded."""
        self._live = Window(0, 0)
        self.starts = starts
        """None: all live rows can be drawn."""

    def insert(self, first_key: int, rows: int) -> None:
        if self._given is not None:
            return
        live, after = self._live, first_key + rows
        stop = max(live.stop, after)
        first = live.first if first_key <= live.stop else first_key
        self._live = Window(max(first, stop - self._capacity), stop)
        if self._own is not None:
            self._own.evict(first_key, rows)
            self._own.admit(np.arange(first_key, after))
            self._know(self._own)

    def exclude(self, keys: Keys) -> None:
        if self._given is not None:
            return
        if self._own is None:
            self._own = Starts(self._capacity)
            self._own.admit(np.arange(self._live.first, self._live.stop))
        self._own.exclude(keys)
        self._know(self._own)

    def _know(self, own: Starts) -> None:
        # Nothing but which rows can be drawn decides how they are: not whether others ever couldn't be.
        self.starts = own if own.count < len(self._live) else None

    def missing(self, window: Window, rows: int) -> str | None:
        """What is missing for a draw of `rows` rows; None if there are enough."""
        if self._given is None and self.starts is not None:
            return short_of(rows, self.starts.count, self.starts.count)
        return too_few(window, self.starts, rows)

    def excluded(self, window: Window) -> Keys:
        """Live rows that were excluded; none where `Starts` were given, which know."""
        if self._given is not None or self.starts is None:
            return np.zeros(0, np.int64)
        keys = np.arange(window.first, window.stop)
        return keys[~self.starts.at(keys % self._capacity)]

    def load(self, excluded: Keys, window: Window) -> None:
        """`window`'s rows are live; those of `excluded` were excluded."""
        self._live = window
        if len(excluded):
            self.exclude(excluded[(excluded >= window.first) & (excluded < window.stop)])


def too_few(window: Window, starts: Starts | None, rows: int) -> str | None:
    """What is missing for a draw of `rows` rows; None if there are enough."""
    return short_of(rows, len(window) if starts is None else starts.count, len(window))


def short_of(rows: int, drawable: int, live: int) -> str | None:
    """What is missing for a draw of `rows` rows, where `drawable` of `live` rows can be drawn; None if they are enough."""
    if drawable >= rows:
        return None
    if drawable == live:
        return f"{live} rows are visible and a batch needs {rows}: push {rows - live} more"
    return (
        f"{drawable} of {live} visible rows can start an entry of a batch by now, and a batch needs {rows}: the others wait for "
        "the rows that come after them, lack them for good, or have been drawn as often as they may. More rows would do"
    )


def distinct(random: np.random.Generator, rows: int, count: int) -> Keys:
    """`rows` distinct numbers of [0, count), in an order: any with equal chance."""
    if 2 * rows > count:
        return random.permutation(count)[:rows]
    return first_distinct(lambda tries: random.integers(0, count, tries), rows, count)


def first_distinct(choose: Callable[[int], Keys], rows: int, count: int) -> Keys:
    """The first `rows` distinct ones of what `choose(tries)` gives: keys, each of `count` with equal chance, with replacement."""
    found = np.zeros(0, np.int64)
    while True:
        # How many it takes to see that many new ones, on average, and some more.
        tries = count * math.log((count - len(found) + 0.5) / (count - rows + 0.5))
        found = np.concatenate([found, choose(int(1.1 * tries) + 8)])
        _, places = np.unique(found, return_index=True)
        places.sort()
        found = found[places[:rows]]
        if len(found) == rows:
            return found


def slot_ranges(first_key: int, rows: int, capacity: int) -> list[tuple[int, int, slice]]:
    """Where keys [first_key, first_key + rows) lie: ranges of slots [start, stop), and which of these rows each holds."""
    start = first_key % capacity
    head = min(rows, capacity - start)
    ranges = [(start, start + head, slice(0, head))]
    if head < rows:
        ranges.append((0, rows - head, slice(head, rows)))
    return ranges


def live_keys(slots: Keys, window: Window, capacity: int) -> Keys:
    """The live rows in these slots."""
    if window.stop <= capacity:
        return slots
    keys = slots + (window.stop - window.stop % capacity)
    keys -= capacity * (keys >= window.stop)
    return keys


def still_live(told: NDArray[Any], first_key: int, window: Window) -> NDArray[Any]:
    """What was told of `window`'s rows, of which there may be fewer by now: `told` begins with that of row `first_key`."""
    return told[window.first - first_key : window.stop - first_key]


def require(sampler: str, name: str, got: Any, fits: Callable[[float], bool], expected: str) -> None:
    """SettingError unless `got` is a finite number that fits."""
    if not isinstance(got, Real) or isinstance(got, bool) or not math.isfinite(got) or not fits(float(got)):
        raise SettingError(f"{sampler}({name}={got!r}): expected {expected}")
