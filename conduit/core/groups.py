"""Rows that belong together because they say the same: which came before which, and when a group is whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]

MOST_UNFINISHED = 1 << 16
"""While more groups than this are unfinished, those are forgotten whose first rows are evicted."""


class Groups:
    """The groups of which some rows are still to come, by their ids.

    One that loses its first row meanwhile can't be drawn any more, but goes on as if nothing had happened: its last rows are its
    own, and the next group of this id begins where it begins. Rows are looked at one by one, with the ring as it is when each
    comes: so nothing depends on how many came at once."""

    def __init__(self, capacity: int, size: int) -> None:
        self._capacity = capacity
        self._size = size
        self._unfinished: OrderedDict[int, list[int]] = OrderedDict()
        """By id, in the order of their first rows: first row, newest row, how many."""

    def arrive(self, first: int, ids: NDArray[Any]) -> tuple[Keys, Keys]:
        """Rows [first, first + len(ids)) came, of groups `ids`. Returns the row of the same group before each, -1 where there is
        none; and the first rows of the groups that are whole now. Both may be evicted."""
        unfinished, size = self._unfinished, self._size
        before, whole = [], []
        for key, group in enumerate(ids.astype(np.int64).tolist(), first):
            here = unfinished.get(group)
            if here is None:
                before.append(-1)
                here = unfinished[group] = [key, key, 1]
                if len(unfinished) > MOST_UNFINISHED:
                    self._forget(key - self._capacity)
            else:
                before.append(here[1])
                here[1] = key
                here[2] += 1
            if here[2] == size:
                whole.append(here[0])
                del unfinished[group]
        return np.array(before, np.int64), np.array(whole, np.int64)

    @property
    def unfinished(self) -> int:
        """How many there are."""
        return len(self._unfinished)

    def oldest_waiting(self, live_from: int) -> int | None:
        """The oldest live first row of one of them; None if there is none."""
        return next((first for first, _, _ in self._unfinished.values() if first >= live_from), None)

    def state(self) -> dict[str, Any]:
        """All of it, in arrays of its own."""
        return {
            "group_ids": np.array(list(self._unfinished), np.int64),
            "group_rows": np.array(list(self._unfinished.values()), np.int64).reshape(-1, 3),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`."""
        self._unfinished = OrderedDict(zip(state["group_ids"].tolist(), state["group_rows"].tolist(), strict=True))

    def _forget(self, evicted: int) -> None:
        """Of too many groups, those that began with rows up to `evicted`."""
        while len(self._unfinished) > MOST_UNFINISHED and next(iter(self._unfinished.values()))[0] <= evicted:
            self._unfinished.popitem(last=False)
