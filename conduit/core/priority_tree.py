"""The sums behind prioritized sampling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_ROOTS = 4096
"""The tree is cut here: a cumulative sum over this many nodes is as cheap as the levels it replaces."""

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


class PriorityTree:
    """Non-negative float64 leaves, with pairwise sums up to at most MOST_ROOTS roots. Parents are always recomputed from
    their children, never adjusted by differences, so sums don't drift."""

    def __init__(self, leaves: int) -> None:
        depth = 0
        while -(-leaves >> depth) > MOST_ROOTS:
            depth += 1
        roots = -(-leaves >> depth)
        self._levels = [np.zeros(roots << (depth - level)) for level in range(depth + 1)]
        self._cumulative: Floats | None = None

    @property
    def total(self) -> float:
        return float(self._sums()[-1])

    def get(self, index: Index) -> Floats:
        return self._levels[0][index]

    def set(self, index: Index, values: Floats) -> None:
        """Sets leaves; of an index that occurs twice, the last value stays."""
        self._levels[0][index] = values
        for below, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            index = index >> 1
            left = index << 1
            level[index] = below[left] + below[left + 1]
        self._cumulative = None

    def set_range(self, start: int, values: Floats | float, stop: int) -> None:
        """Sets leaves [start, stop)."""
        self._levels[0][start:stop] = values
        for below, level in zip(self._levels[:-1], self._levels[1:], strict=True):
            start, stop = start >> 1, ((stop - 1) >> 1) + 1
            children = below[2 * start : 2 * stop]
            np.add(children[0::2], children[1::2], out=level[start:stop])
        self._cumulative = None

    def find(self, mass: Floats) -> Index:
        """For each mass in [0, total], a leaf i with a positive value such that the leaves before i sum to at most the
        mass. Rounding can move a mass to a neighbour, never to a leaf of value zero. The total must be positive."""
        sums = self._sums()
        roots = self._levels[-1]
        last = int(np.flatnonzero(roots)[-1]) if roots[-1] == 0.0 else len(roots) - 1
        index = np.minimum(np.searchsorted(sums, mass, side="right"), last)
        # Rounding may leave a rest just below zero, which would lead into empty left branches.
        rest = np.maximum(mass - (sums[index] - roots[index]), 0.0)
        for level in reversed(self._levels[:-1]):
            index = index << 1
            left = level[index]
            right = (rest >= left) & (level[index + 1] > 0.0)
            rest -= np.where(right, left, 0.0)
            index += right
        return index

    def _sums(self) -> Floats:
        if self._cumulative is None:
            self._cumulative = np.cumsum(self._levels[-1])
        return self._cumulative
