"""The sums behind prioritized sampling."""

from __future__ import annotations

import math
from itertools import pairwise
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from conduit.core.journal import Journal
from conduit.core.machine_code import load

MOST_ROOTS = 4096
"""The tree is cut here: a cumulative sum over this many nodes is as cheap as the levels it replaces."""

_BITS = 4
"""16 nodes sum up to one: all that is above costs half a byte a leaf, and the binary levels between are made anew from two
cache lines when they are needed. (32 leaves to a node would cost a quarter of a byte, and 8 % more time.)"""

_MOST_PENDING = 1 << 16
"""Leaves: a longer range isn't left for later, so that no draw has to wait for it, or needs memory for it."""

_BLOCK = 1 << 12
"""Leaves that are looked at together where few will do."""

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


def compiled() -> ModuleType | None:
    """`conduit.core.compiled_sums`, or None for NumPy. Results are the same either way."""
    return load("compiled_sums")


class PriorityTree:
    """Non-negative float64 leaves, with sums of sums up to at most MOST_ROOTS roots: 8.6 B a leaf.

    All sums are of pairs, then of pairs of pairs, and always recomputed, never adjusted by differences: they don't drift, and
    depend on the leaves alone. `kernels`: what `compiled()` gives, or None for NumPy."""

    def __init__(self, leaves: int, kernels: ModuleType | None = None) -> None:
        self._kernels = kernels
        depth, roots = 0, leaves
        while roots > MOST_ROOTS:
            depth, roots = depth + 1, -(-roots >> _BITS)
        sizes = [roots << _BITS * (depth - level) for level in range(depth + 1)]
        self._starts = np.cumsum([0, *sizes[:-1]])
        self._nodes = _aligned_zeros(sum(sizes))
        levels = np.split(self._nodes, self._starts[1:])
        # From the leaves up: a level's nodes, 16 siblings a row, and their sums.
        self._climbs = [(below.reshape(-1, 1 << _BITS), above) for below, above in pairwise(levels)]
        self._leaves, self._roots = levels[0], levels[-1]
        self.journal = Journal({"leaves": self._leaves[:leaves]})
        self._sums = np.zeros(roots + 1)
        self._sums_known = True
        self._pending = self._pending_stop = 0

    @property
    def total(self) -> float:
        self._settle()
        return float(self._sums[-1])

    def get(self, index: Index) -> Floats:
        return self._leaves.take(index)

    def count_positive(self, most: int) -> int:
        """How many leaves aren't 0; `most` if there are more."""
        found = 0
        for start in range(0, len(self._leaves), _BLOCK):
            found += int(np.count_nonzero(self._leaves[start : start + _BLOCK]))
            if found >= most:
                return most
        return found

    def set(self, index: Index, values: Floats) -> None:
        """Sets leaves; of an index that occurs twice, the last value stays."""
        if self.journal.on:
            self.journal.before(index)
        self._leaves[index] = values
        self._sums_known = False
        if self._kernels is not None:
            self._kernels.climb(self._nodes, self._starts, index)
            return
        for siblings, above in self._climbs:
            index = index >> _BITS
            above[index] = _halved(siblings.take(index, axis=0).reshape(-1), len(index))[-1]

    def set_range(self, start: int, values: Floats | NDArray[np.bool_] | float, stop: int) -> None:
        """Sets leaves [start, stop). What is above them waits: for more leaves after them, or for the first who asks."""
        if self.journal.on:
            self.journal.before_range(start, stop)
        self._leaves[start:stop] = values
        self._sums_known = False
        if start != self._pending_stop or stop - self._pending > _MOST_PENDING:
            self._climb_pending()
            self._pending = start
        self._pending_stop = stop

    def before(self, index: int) -> float:
        """The sum of the leaves before `index`."""
        self._settle()
        total = 0.0
        for siblings, _ in self._climbs:
            node = index >> _BITS
            total += float(np.add.reduce(siblings[node, : index - (node << _BITS)]))
            index = node
        return total + float(self._sums[index])

    def find(self, mass: Floats) -> tuple[Index, Floats]:
        """For each mass in [0, total], a leaf i with a positive value such that the leaves before i sum to at most the mass,
        and its value. Rounding can move a mass to a neighbour, never to a leaf of value zero. The total must be positive.
        Quickest for ascending masses."""
        most = math.nextafter(self.total, 0.0)
        if self._kernels is None:
            index = self._descend(np.minimum(mass, most))
            values = self._leaves.take(index)
            lost = np.count_nonzero(values) < len(values)
        else:
            index, values = np.empty(len(mass), np.int64), np.empty(len(mass))
            lost = self._kernels.descend(self._nodes, self._starts, self._sums, mass, most, index, values)
        if lost:
            # A rest that rounding had left no smaller than its node's sum went past the last leaf there.
            places = np.flatnonzero(values == 0.0)
            index[places] = self._descend(np.minimum(mass[places], most), careful=True)
            values = self._leaves.take(index)
        return index, values

    def _descend(self, mass: Floats, careful: bool = False) -> Index:
        """`careful`: a rest stays below the sum of the node that it is in, whatever the rounding."""
        index = self._sums[1:].searchsorted(mass, side="right")
        rest = mass - self._sums.take(index)
        place = np.arange(len(mass))
        for siblings, above in reversed(self._climbs):
            whole = above.take(index) if careful else rest
            halves = _halved(siblings.take(index, axis=0).reshape(-1), 2 * len(mass))
            node = place
            for level in reversed(halves):
                if careful:
                    np.minimum(rest, np.nextafter(whole, 0.0), out=rest)
                node = node + node
                left = level.take(node)
                right = rest >= left
                if careful:
                    whole = np.where(right, level.take(node + 1), left)
                left *= right
                rest -= left
                node += right
            # From a place among the siblings taken to one among all.
            index -= place
            index <<= _BITS
            index += node
        return index

    def _settle(self) -> None:
        """Makes all sums those of the leaves as they are."""
        if self._sums_known:
            return
        self._climb_pending()
        if self._kernels is None:
            np.add.accumulate(self._roots, out=self._sums[1:])
        else:
            self._kernels.accumulate(self._roots, self._sums)
        self._sums_known = True

    def _climb_pending(self) -> None:
        start, stop = self._pending, self._pending_stop
        if start == stop:
            return
        self._pending = stop
        if self._kernels is not None:
            self._kernels.climb_range(self._nodes, self._starts, start, stop)
            return
        for siblings, above in self._climbs:
            start, stop = start >> _BITS, ((stop - 1) >> _BITS) + 1
            above[start:stop] = _halved(siblings[start:stop].reshape(-1), stop - start)[-1]


def _aligned_zeros(count: int) -> Floats:
    """On the edge of a cache line, so that 16 siblings are in two lines, not three."""
    more = np.zeros(count + 8)
    first = -more.ctypes.data % 64 // 8
    return more[first : first + count]


def _halved(nodes: Floats, count: int) -> list[Floats]:
    """`nodes`, the sums of their pairs, and so on, up to `count` of them."""
    halves = [nodes]
    while len(nodes) > count:
        nodes = nodes[0::2] + nodes[1::2]
        halves.append(nodes)
    return halves
