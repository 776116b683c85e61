"""Rows that can't start an item yet, and when they can: counted by lane, as rows come and episodes end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conduit.core.items import Needs

Keys = NDArray[np.int64]
NONE: Keys = np.zeros(0, np.int64)


class Candidates:
    """For each lane, its last possible starts: every `period`-th row of the episode, as far back as one may still wait.

    A row counts towards an item when it is usable: at once, or, where a next is needed (`lag` 1), once its successor has come."""

    def __init__(self, needs: Needs, lag: int, capacity: int) -> None:
        self._needs = needs
        self._lag = lag
        # A start that is further back than the ring is long has been evicted.
        self._width = min(-(-(needs.ahead + lag) // needs.period) + 1, capacity // needs.period + 2)
        self._starts = np.zeros((0, self._width), np.int64)

    def grow(self, lanes: int) -> None:
        """There are `lanes` lanes by now."""
        more = np.zeros((lanes - len(self._starts), self._width), np.int64)
        self._starts = np.concatenate([self._starts, more])

    def arrive(self, lanes: NDArray[np.int64], places: NDArray[np.int64], keys: Keys) -> Keys:
        """One row came in each of `lanes`, as the `places`-th of its episode. Returns the rows that became drawable."""
        needs, width = self._needs, self._width
        ago = self._lag + needs.ahead - 1
        if ago >= width * needs.period:
            self._note(lanes, places, keys)
            return NONE
        ready = places - ago
        if needs.period == 1:
            self._starts[lanes, places % width] = keys
            if np.minimum.reduce(ready) >= 0:
                return self._starts[lanes, ready % width]
            can = ready >= 0
        else:
            self._note(lanes, places, keys)
            can = (ready >= 0) & (ready % needs.period == 0)
        found = np.count_nonzero(can)
        if not found:
            return NONE
        if found < len(keys):
            lanes, ready = lanes[can], ready[can]
        return self._starts[lanes, ready // needs.period % width]

    def arrive_run(self, lane: int, place: int, keys: Keys) -> Keys:
        """Consecutive rows came in one lane, the first as the `place`-th of its episode."""
        ready = place - (self._lag + self._needs.ahead - 1)
        starts = self._starts_between(lane, max(0, ready), ready + len(keys), place, keys)
        places = np.arange(place, place + len(keys))
        # Of more than the lane's width only the last stay.
        keep = slice(max(0, len(keys) - self._width * self._needs.period), None)
        self._note(np.full(len(keys), lane)[keep], places[keep], keys[keep])
        return starts

    def close(self, lane: int, place: int, usable: bool) -> Keys:
        """The episode ended with its `place`-th row, which can be used or not. Returns the rows that became drawable by it."""
        needs = self._needs
        through = place if usable else place - 1
        waiting = max(0, place - self._lag - needs.ahead + 2)
        stop = through + 1 if needs.partial else through - needs.ahead + 2
        return self._starts_between(lane, waiting, stop, place + 1, NONE)

    def state(self, places: NDArray[np.int64]) -> Keys:
        """Each lane's last possible starts, the newest first, -1 where there are fewer: (lanes, width). `places`: (lanes,) the place
        of each lane's next row."""
        indices = self._newest(places)[:, None] - np.arange(self._width)
        return np.where(indices >= 0, np.take_along_axis(self._starts, indices % self._width, axis=1), -1)

    def load(self, starts: Keys, places: NDArray[np.int64]) -> None:
        """Goes on from such a state, perhaps of another width; in what was just made, once it has grown."""
        kept = starts[:, : self._width]
        kept = np.pad(kept, ((0, 0), (0, self._width - kept.shape[1])), constant_values=-1)
        # Of a smaller ring: what it doesn't know of is evicted, as -1 is.
        indices = self._newest(places)[:, None] - np.arange(self._width)
        at = self._starts[: len(kept)]
        np.put_along_axis(at, indices % self._width, kept, axis=1)

    def _newest(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of its episode's possible starts each lane's last one is; -1: it has none."""
        return (places - 1) // self._needs.period

    def oldest_waiting(self, places: NDArray[np.int64], live_from: int) -> int | None:
        """The oldest live start that may yet become drawable; None if there is none. `places`: by lane, the place that its next row
        has in the episode."""
        period = self._needs.period
        first = np.maximum(0, places + 1 - self._lag - self._needs.ahead)
        start = -(-first // period)
        (lanes,) = np.nonzero(start * period < places)
        keys = self._starts[lanes, start[lanes] % self._width]
        keys = keys[keys >= live_from]
        return int(keys.min()) if len(keys) else None

    def _note(self, lanes: NDArray[np.int64], places: NDArray[np.int64], keys: Keys) -> None:
        period = self._needs.period
        if period > 1:
            possible = places % period == 0
            lanes, places, keys = lanes[possible], places[possible] // period, keys[possible]
        self._starts[lanes, places % self._width] = keys

    def _starts_between(self, lane: int, first: int, stop: int, place: int, keys: Keys) -> Keys:
        """The possible starts at places [first, stop) of a lane's episode, whose places from `place` on are `keys`."""
        period = self._needs.period
        first = max(first, place - self._width * period)
        places = np.arange(-(-first // period) * period, stop, period)
        known = np.count_nonzero(places < place)
        old = self._starts[lane, places[:known] // period % self._width]
        return np.concatenate([old, keys[places[known:] - place]])
