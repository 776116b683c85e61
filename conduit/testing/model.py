"""The naive model that a sampler is played against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from conduit.core.ring import Window
from conduit.core.starts import Starts

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]
Told = Literal["all", "first", "step by step"]
"""How rows become drawable. "all": all are, from `insert` on. Else there are `Starts`, which are told of a change, as a whole
"first", before the sampler is, as a store's; or "step by step" with it, as those of a table with `max_times_sampled`."""

NONE = np.zeros(0, np.int64)


class Rows:
    """The model. Which rows are live and drawable, told as plainly as can be: one entry a slot."""

    def __init__(self, capacity: int, told: Told, in_slots: bool) -> None:
        self.capacity = capacity
        self.window = Window(0, 0)
        self.in_slots = in_slots
        self._told: Told = told
        self._key = np.full(capacity, -1)
        self._admitted = np.zeros(capacity, np.bool_)
        self._excluded = np.zeros(capacity, np.bool_)
        self._priority = np.full(capacity, np.nan)
        """What the user gave last; NaN: nothing."""
        self._updated = np.zeros(capacity, np.bool_)
        self._known: _Masks | None = None
        """What follows from the others, if it was asked since they changed."""

    def insert(self, first: int, rows: int, priority: Floats | None) -> None:
        self._known = None
        keys = np.arange(first, first + rows)
        slots = keys % self.capacity
        self._key[slots] = keys
        self._admitted[slots] = self._told == "all"
        self._excluded[slots] = self._updated[slots] = False
        self._priority[slots] = np.nan if priority is None else priority
        if self.in_slots:
            self.window = Window(0, max(self.window.stop, first + rows))
        else:
            self.window = Window(max(self.window.first, first + rows - self.capacity), first + rows)

    def admit(self, keys: Keys) -> None:
        self._known = None
        self._admitted[keys % self.capacity] = True

    def exclude(self, keys: Keys) -> None:
        self._known = None
        self._excluded[keys % self.capacity] = True

    def update(self, keys: Keys, priority: Floats) -> None:
        self._known = None
        for key, value in zip(keys.tolist(), priority.tolist(), strict=True):
            self._priority[key % self.capacity] = value
        self._updated[keys % self.capacity] = True

    @property
    def live(self) -> Keys:
        return np.arange(self.window.first, self.window.stop)

    @property
    def drawable(self) -> Keys:
        return np.sort(self._key[self._masks.drawable])

    @property
    def waiting(self) -> Keys:
        """Live rows that may still be admitted."""
        return np.sort(self._key[(self._key >= 0) & ~self._admitted & ~self._excluded])

    @property
    def count(self) -> int:
        """How many rows are drawable."""
        return self._masks.count

    @property
    def enabled(self) -> int:
        """How many of them have, for certain, no priority of 0."""
        return self._masks.enabled

    @property
    def disabled(self) -> Keys:
        """Those that were pushed with priority 0."""
        return np.sort(self._key[self._masks.disabled])

    def fault(self, keys: Keys, zero_disables: bool) -> str | None:
        """The promise that drawing these keys breaks."""
        slots, masks = keys % self.capacity, self._masks
        if np.count_nonzero((self._key[slots] != keys) | (keys < 0)):
            return "live"
        if np.count_nonzero(masks.drawable[slots]) < len(slots):
            return "excluded" if np.count_nonzero(self._excluded[slots]) else "admitted"
        return "disabled" if zero_disables and np.count_nonzero(masks.disabled[slots]) else None

    def wrong_priority(self, keys: Keys, priority: Any) -> str | None:
        """What is wrong with drawn priorities. A sampler may add a little to what it is given."""
        given = self._priority[keys % self.capacity]
        wrong = abs(given - priority) > 1e-2 + 1e-3 * given
        if not np.count_nonzero(wrong):
            return None
        at = int(np.flatnonzero(wrong)[0])
        shown = np.broadcast_to(priority, given.shape)
        return f"key {keys[at]} with priority {shown[at]:g}; it was given {given[at]:g} last"

    def moved(self, capacity: int, kept: int) -> Rows:
        """The newest `kept` rows in a ring of another capacity."""
        other = Rows(capacity, self._told, self.in_slots)
        other.window = Window(self.window.stop - kept, self.window.stop)
        here, there = other.live % self.capacity, other.live % capacity
        for name in ("_key", "_admitted", "_excluded", "_priority", "_updated"):
            getattr(other, name)[there] = getattr(self, name)[here]
        return other

    def starts(self) -> Starts | None:
        """As a store would have them."""
        if self._told == "all":
            return None
        starts = Starts(self.capacity)
        starts.admit(self.drawable)
        return starts

    @property
    def _masks(self) -> _Masks:
        if self._known is None:
            drawable = (self._key >= 0) & self._admitted & ~self._excluded
            zero = self._priority == 0.0
            disabled = drawable & zero & ~self._updated
            counts = (int(np.count_nonzero(mask)) for mask in (drawable, drawable & ~zero))
            self._known = _Masks(drawable, disabled, *counts)
        return self._known


@dataclass(slots=True)
class _Masks:
    """Of slots; and how many rows are drawable, and how many of these have surely no priority of 0."""

    drawable: NDArray[np.bool_]
    disabled: NDArray[np.bool_]
    count: int
    enabled: int
