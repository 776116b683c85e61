"""Following Links as machine code: the same rows as by NumPy's calls.

Importing this module compiles it, or loads what an earlier import left in numba's cache. ImportError without numba, and where
it is switched off. Nothing here checks an index: keys are live."""

from __future__ import annotations

from typing import Any

import numpy as np

from conduit.core.machine_code import compiled


@compiled("void(int32[::1], int64, int64, int64[:, ::1], int64[::1])")
def follow(links: Any, sign: int, oldest: int, path: Any, count: Any) -> None:
    """`path` (rows, B), the first row of which is live keys, gets in each next row what theirs are linked to, `sign` times the
    link away and not before `oldest`; where there is no such row the same key again. `count` (B,): how many are distinct.

    An entry that stopped stops at each later step, for it is asked about the same key: nothing has to remember it, and no
    branch is guessed wrong."""
    capacity = len(links)
    # Live keys are at most one turn of the ring from the oldest: no division for each.
    shift = oldest % capacity - oldest
    count[:] = 1
    for step in range(1, len(path)):
        here, there = path[step - 1], path[step]
        for i in range(len(count)):
            key = here[i]
            slot = key + shift
            slot -= capacity if slot >= capacity else 0
            link = links[np.uint64(slot)]
            after = key + sign * link
            goes = (link > 0) & (after >= oldest)
            there[i] = after if goes else key
            count[i] += goes
