"""Rows for the core's tests: each row's `id` says where it came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conduit.core.episodes import End, Rows

OPEN, TERM, TRUNC, CUT = End.OPEN, End.TERMINATED, End.TRUNCATED, End.CUT


def rows(
    lanes: Sequence[int],
    ends: Sequence[int] | None = None,
    first: int = 0,
    priority: Sequence[float] | None = None,
    finals: dict[int, dict] | None = None,
) -> Rows:
    """Rows with ids from `first` on; a truncated row has its id's negative as its final unless `finals` says otherwise."""
    count = len(lanes)
    end = np.array([OPEN] * count if ends is None else ends, np.uint8)
    ids = np.arange(first, first + count)
    if finals is None:
        finals = {i: {"obs": np.float32(-ids[i])} for i in range(count) if end[i] == TRUNC}
    return Rows(
        data={"id": ids, "obs": ids.astype(np.float32)},
        lane=np.array(lanes, np.int64),
        end=end,
        version=ids // 10,
        priority=None if priority is None else np.array(priority, float),
        finals=finals or None,
    )


def ids(data) -> list[int]:
    return data["id"].tolist()


def priorities(rows: Rows) -> list[float]:
    assert rows.priority is not None
    return rows.priority.tolist()
