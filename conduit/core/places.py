"""Where rows live that don't leave in the order in which they came: which slot each has, and which slots are free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]


class Places:
    """The slots of a store whose remover chooses who goes. Slots are taken in ascending order at first; later, a new row takes
    that of one that left. Changed in a turn of the store's Order.

    About 110 bytes a row, most of it a dict by key."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._key_at = np.full(capacity, -1)
        self._version_at = np.zeros(capacity, np.int64)
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        """Slots below `occupied` whose rows have left."""
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

    def count_between(self, first: int, stop: int) -> int:
        """How many rows with keys [first, stop) there are; `first` ≥ 0."""
        keys = self._key_at[: self.occupied]
        return int(np.count_nonzero((keys >= first) & (keys < stop)))

    def leave(self, slots: Keys) -> None:
        """The rows in these slots are gone."""
        for key in self._key_at.take(slots).tolist():
            del self._slot_of[key]
        self._key_at[slots] = -1
        self._free += slots.tolist()

    def take(self, keys: Keys, version: int | NDArray[np.int64]) -> Keys:
        """Slots for as many new rows, for which there is room."""
        reused = min(len(keys), len(self._free))
        # Those that left last are at the end. In ascending order, neighbours are written together.
        slots = np.concatenate(
            [
                np.sort(np.array(self._free[len(self._free) - reused :], np.int64)),
                np.arange(self.occupied, self.occupied + len(keys) - reused),
            ]
        )
        del self._free[len(self._free) - reused :]
        self.occupied += len(keys) - reused
        self._key_at[slots] = keys
        self._version_at[slots] = version
        self._slot_of.update(zip(keys.tolist(), slots.tolist(), strict=True))
        return slots

    def state(self) -> dict[str, Any]:
        """For a checkpoint: slots are told in ascending order."""
        return {
            "keys": self._key_at[: self.occupied].copy(),
            "versions": self._version_at[: self.occupied].copy(),
            "free": np.array(self._free, np.int64),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        keys = state["keys"]
        self.occupied = len(keys)
        self._key_at[: self.occupied] = keys
        self._version_at[: self.occupied] = state["versions"]
        self._free = state["free"].tolist()
        self._slot_of = {key: slot for slot, key in enumerate(keys.tolist()) if key >= 0}
