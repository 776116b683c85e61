"""Where rows live that don't leave in the order in which they came: which slot each has, and which slots are free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.journal import Copy, Journal, at_once
from conduit.core.ring import Window

Keys = NDArray[np.int64]


_MOST_NAMED = 1 << 11
"""Keys are looked up one by one: so many in a turn."""


class Places:
    """The slots of a store whose remover chooses who goes. Slots are taken in ascending order at first; later, a new row takes
    that of one that left. Changed in a turn of the store's Order.

    About 110 bytes a row, most of it a dict by key; 8 more while it is free."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._key_at = np.full(capacity, -1)
        self._version_at = np.zeros(capacity, np.int64)
        self._slots = Journal({"keys": self._key_at, "versions": self._version_at})
        self._slot_of: dict[int, int] = {}
        self._free = np.zeros(capacity, np.int64)
        """Slots below `occupied` whose rows have left, those that left last at the end: the first `_free_count`."""
        self._free_count = 0
        self._stack = Journal({"free": self._free})
        self.occupied = 0
        """Slots from here on have never been used."""

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._slot_of)

    @property
    def room(self) -> int:
        """How many slots no row has."""
        return self._capacity - len(self._slot_of)

    def keys_at(self, slots: Keys) -> Keys:
        return self._key_at.take(slots)

    def versions_at(self, slots: Keys) -> NDArray[np.int64]:
        return self._version_at.take(slots)

    def slots_of(self, keys: Keys) -> Keys:
        """The slot of each row; -1 for those that have left."""
        return np.array([self._slot_of.get(key, -1) for key in keys.tolist()], np.int64)

    def keys_from(self, first: int, most: int) -> Keys:
        """The keys of the next `most` live rows from `first` ≥ 0 on, in the order in which they came."""
        keys = self._key_at[: self.occupied]
        keys = keys[keys >= first]
        # Only those are sorted: there may be a thousand times as many.
        return np.sort(keys if len(keys) <= most else np.partition(keys, most - 1)[:most])

    def leave(self, slots: Keys) -> None:
        """The rows in these slots are gone."""
        for key in self._key_at.take(slots).tolist():
            del self._slot_of[key]
        count, self._free_count = self._free_count, self._free_count + len(slots)
        if self._slots.on:
            self._slots.before(slots)
        if self._stack.on:
            self._stack.before_range(count, self._free_count)
        self._key_at[slots] = -1
        self._free[count : self._free_count] = slots

    def take(self, keys: Keys, version: int | NDArray[np.int64]) -> Keys:
        """Slots for as many new rows, for which there is room."""
        reused = min(len(keys), self._free_count)
        kept = self._free_count - reused
        # In ascending order, neighbours are written together.
        slots = np.concatenate(
            [np.sort(self._free[kept : kept + reused]), np.arange(self.occupied, self.occupied + len(keys) - reused)]
        )
        self._free_count = kept
        if self._slots.on:
            self._slots.before(slots)
        self.occupied += len(keys) - reused
        self._key_at[slots] = keys
        self._version_at[slots] = version
        self._slot_of.update(zip(keys.tolist(), slots.tolist(), strict=True))
        return slots

    def keys(self, copy: Copy = at_once) -> Any:
        """The key in each slot that has ever been used, -1 where there is none."""
        return copy(self._slots, "keys", Window(0, self.occupied))

    def state(self, copy: Copy = at_once) -> dict[str, Any]:
        """For a checkpoint: slots are told in ascending order."""
        return {
            "keys": self.keys(copy),
            "versions": copy(self._slots, "versions", Window(0, self.occupied)),
            "free": copy(self._stack, "free", Window(0, self._free_count)),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        keys = state["keys"]
        self.occupied = len(keys)
        self._key_at[: self.occupied] = keys
        self._version_at[: self.occupied] = state["versions"]
        self._free_count = len(state["free"])
        self._free[: self._free_count] = state["free"]
        self._slot_of = {key: slot for slot, key in enumerate(keys.tolist()) if key >= 0}


class Roll:
    """Which rows there were at one moment: for somebody who comes by all rows, a few in each turn, and shouldn't have to look at every
    slot each time."""

    def __init__(self, places: Places, keys: Keys) -> None:
        """`keys`: by slot, as `places.keys` told them in a turn."""
        self._places = places
        self._keys = keys[keys >= 0]
        self._ordered = self._keys[:0]

    def count_between(self, first: int, stop: int) -> int:
        """How many rows with keys [first, stop) there were."""
        return int(np.count_nonzero((self._keys >= first) & (self._keys < stop)))

    def order(self, first: int) -> None:
        """Gets ready to tell keys from `first` on. This takes its time, and no turn."""
        self._ordered = np.sort(self._keys[self._keys >= first])

    def keys_from(self, first: int, most: int, stop: int) -> Keys:
        """In a turn: the keys of some of the live rows of [first, stop), the oldest, `most` at most; if there are any, at least one.
        `stop`: the key of the next row that comes. What is asked for first is what `order` was told."""
        most = min(most, _MOST_NAMED)
        while first < stop:
            at = int(self._ordered.searchsorted(first))
            # Those after the last came later.
            keys = (
                self._ordered[at : at + most] if at < len(self._ordered) else np.arange(first, min(first + most, stop))
            )
            live = keys[self._places.slots_of(keys) >= 0]
            if len(live):
                return live
            first = int(keys[-1]) + 1
        return np.zeros(0, np.int64)
