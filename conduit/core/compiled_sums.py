"""PriorityTree's loops as machine code: the same sums in the same order, and so the same results to the last bit.

Importing this module compiles them, or loads what an earlier import left in numba's cache. ImportError without numba (the
extra `fast`), and where numba is switched off: as plain Python these loops are slow beyond use.

`nodes` holds the levels of the tree one after the other, level k from `starts[k]` on; 16 siblings of a level sum up to one
node of the next. Nothing here checks an index. It is made unsigned where it is used, so that nothing asks whether it counts
from the end either; and loops have no branches that the processor would guess wrong half of the time."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from conduit.core.machine_code import compiled

_TREE = "float64[::1], int64[::1]"
_BITS = 4


# Pairs, then pairs of pairs, as NumPy's path has it: floating-point sums depend on their order.


@numba.njit
def _sum_2(nodes: Any, at: int) -> Any:
    return nodes[np.uint64(at)] + nodes[np.uint64(at + 1)]


@numba.njit
def _sum_4(nodes: Any, at: int) -> Any:
    return _sum_2(nodes, at) + _sum_2(nodes, at + 2)


@numba.njit
def _sum_8(nodes: Any, at: int) -> Any:
    return _sum_4(nodes, at) + _sum_4(nodes, at + 4)


@numba.njit
def _sum_16(nodes: Any, at: int) -> Any:
    return _sum_8(nodes, at) + _sum_8(nodes, at + 8)


@numba.njit
def _touch(nodes: Any, at: int) -> Any:
    """A sum over the two cache lines of siblings. Asked for in a loop of its own, the lines of many come at once."""
    return nodes[np.uint64(at)] + nodes[np.uint64(at + 8)]


@numba.njit
def _step(rest: Any, left: Any) -> Any:
    """Whether `rest` goes right, as a mask of ones or none, and what is left of it then."""
    after = np.float64(rest - left).view(np.int64)
    right = ~(after >> 63)
    return right, np.int64((after & right) | (np.float64(rest).view(np.int64) & ~right)).view(np.float64)


@compiled(f"float64({_TREE}, int64[::1])")
def climb(nodes: Any, starts: Any, index: Any) -> Any:
    """Recomputes all that is above leaves `index`. Returns nothing of use."""
    touched = 0.0
    for level in range(len(starts) - 1):
        below, above, shift = starts[level], starts[level + 1], _BITS * (level + 1)
        for i in range(len(index)):
            touched += _touch(nodes, below + ((index[i] >> shift) << _BITS))
        for i in range(len(index)):
            node = index[i] >> shift
            nodes[np.uint64(above + node)] = _sum_16(nodes, below + (node << _BITS))
    # As part of the result, or the compiler would leave it out.
    return touched


@compiled(f"void({_TREE}, int64, int64)")
def climb_range(nodes: Any, starts: Any, start: int, stop: int) -> None:
    """Recomputes all that is above leaves [start, stop)."""
    for level in range(len(starts) - 1):
        below, above = starts[level], starts[level + 1]
        start, stop = start >> _BITS, ((stop - 1) >> _BITS) + 1
        for node in range(start, stop):
            nodes[np.uint64(above + node)] = _sum_16(nodes, below + (node << _BITS))


@compiled("void(float64[::1], float64[::1])")
def accumulate(roots: Any, sums: Any) -> None:
    """`sums[i]`: of the roots before i."""
    total = 0.0
    for i in range(len(roots)):
        total += roots[i]
        sums[i + 1] = total


@compiled(f"float64({_TREE}, float64[::1], float64[::1], float64, int64[::1], float64[::1])")
def descend(nodes: Any, starts: Any, sums: Any, masses: Any, most: float, index: Any, values: Any) -> Any:
    """Puts the leaf of each mass, or of `most` if that is less, and its value into `index` and `values`. Returns how many
    values are 0."""
    rest = np.empty(len(masses))
    for i in range(len(rest)):
        rest[i] = min(masses[i], most)
        index[i] = 0
    width = len(sums) - 1
    while width > 1:
        half = width >> 1
        for i in range(len(rest)):
            index[i] += half & _step(rest[i], sums[np.uint64(index[i] + half)])[0]
        width -= half
    for i in range(len(rest)):
        rest[i] -= sums[np.uint64(index[i])]
    touched = 0.0
    for level in range(len(starts) - 2, -1, -1):
        below = starts[level]
        for i in range(len(rest)):
            touched += _touch(nodes, below + (index[i] << _BITS))
        for i in range(len(rest)):
            at, left = below + (index[i] << _BITS), rest[i]
            right, left = _step(left, _sum_8(nodes, at))
            at += 8 & right
            right, left = _step(left, _sum_4(nodes, at))
            at += 4 & right
            right, left = _step(left, _sum_2(nodes, at))
            at += 2 & right
            right, left = _step(left, nodes[np.uint64(at)])
            rest[i], index[i] = left, at + (1 & right) - below
    zeros = 0
    for i in range(len(rest)):
        values[i] = nodes[np.uint64(index[i])]
        zeros += values[i] == 0.0
    return zeros + 0.0 * touched
