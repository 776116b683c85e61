"""The policy version of every live row, and how wide it came where rows grow: one number for each run of rows that share it, not one
a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.ring import Window

Keys = NDArray[np.int64]

_NEVER = 1 << 62


class Versions:
    """Runs of equal versions, oldest first: usually one or a few, for rows come in the order in which policies were made; as
    many as pushes at worst, where actors are behind by turns."""

    def __init__(self) -> None:
        self._runs = np.zeros((2, 16), np.int64)
        """The first key of each run, and its version; live ones in columns [start, stop)."""
        self._start = self._stop = 0
        self._newest: int | None = None
        self._second = _NEVER
        """The first key of the second oldest run."""

    def append(self, first: int, version: int | NDArray[np.int64]) -> None:
        """Rows from `first` on, newer than all so far, have this version; or these, one each."""
        if isinstance(version, int):
            if version != self._newest:
                self._begin(first, version)
            return
        changes = np.flatnonzero(version[1:] != version[:-1]) + 1
        for at in (0, *changes.tolist()) if len(version) else ():
            if version[at] != self._newest:
                self._begin(first + at, int(version[at]))

    def evict(self, oldest: int) -> None:
        """Rows before `oldest` are gone."""
        if self._second <= oldest:
            firsts = self._runs[0, self._start : self._stop]
            self._start += int(np.searchsorted(firsts, oldest, side="right")) - 1
            self._note_second()

    def of(self, keys: Keys) -> NDArray[np.int64]:
        """Each row's version."""
        if self._second == _NEVER:
            return np.full(len(keys), self._newest)
        first, version = self._runs[:, self._start : self._stop]
        return version[np.searchsorted(first, keys, side="right") - 1]

    def below(self, version: int, window: Window) -> Keys:
        """The rows of `window`, all live, of versions below this one."""
        if self._newest is None or not len(window):
            return np.zeros(0, np.int64)
        first, versions = self._runs[:, self._start : self._stop]
        edges = np.concatenate([first, [window.stop]])
        runs = [np.arange(max(edges[i], window.first), edges[i + 1]) for i in np.flatnonzero(versions < version)]
        return np.concatenate(runs) if runs else np.zeros(0, np.int64)

    def state(self) -> dict[str, NDArray[np.int64]]:
        """For a checkpoint."""
        return {"runs": self._runs[:, self._start : self._stop].copy()}

    def load(self, state: Mapping[str, Any], oldest: int) -> None:
        """Goes on from what was saved, of which rows from `oldest` on are there."""
        for first, version in state["runs"].T.tolist():
            self._begin(first, version)
        if self._stop:
            self.evict(oldest)

    def _begin(self, first: int, version: int) -> None:
        if self._stop == self._runs.shape[1]:
            live = self._runs[:, self._start : self._stop]
            more = np.zeros((2, max(16, 2 * live.shape[1])), np.int64)
            more[:, : live.shape[1]] = live
            self._runs, self._start, self._stop = more, 0, live.shape[1]
        self._runs[:, self._stop] = first, version
        self._stop += 1
        self._newest = version
        self._note_second()

    def _note_second(self) -> None:
        self._second = int(self._runs[0, self._start + 1]) if self._stop - self._start > 1 else _NEVER


class Extents:
    """How long the growing axis of each leaf was in every row, before it was filled up: runs of equal ones by path, as few as there were
    widths, and where actors that grow at once pass each other some more."""

    def __init__(self) -> None:
        self._runs: dict[str, Versions] = {}

    def append(self, first: int, widths: Mapping[str, int]) -> None:
        """Rows from `first` on, newer than all so far, are so wide."""
        for path, width in widths.items():
            self._runs.setdefault(path, Versions()).append(first, width)

    def evict(self, oldest: int) -> None:
        """Rows before `oldest` are gone."""
        for runs in self._runs.values():
            runs.evict(oldest)

    def of(self, path: str, keys: Keys) -> NDArray[np.int64]:
        """Of each row; whatever it is for one that is gone."""
        return self._runs[path].of(keys)

    def __contains__(self, path: str) -> bool:
        return path in self._runs

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {path: runs.state() for path, runs in self._runs.items()}

    def load(self, state: Mapping[str, Any], oldest: int) -> None:
        for path, runs in state.items():
            self._runs[path] = Versions()
            self._runs[path].load(runs, oldest)
