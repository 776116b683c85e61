"""Draws taken apart and put together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from conduit.core.sampling import Draw

Keys = NDArray[np.int64]


def occurrence(slots: Keys) -> Keys:
    """For each of `slots`, the how-manieth of its kind it is, from 1."""
    ordered = np.sort(slots)
    differ = ordered[1:] != ordered[:-1]
    if np.count_nonzero(differ) == len(differ):
        return np.ones(len(slots), np.int64)
    order = np.argsort(slots, kind="stable")
    begins = np.concatenate([[True], differ])
    places = np.arange(len(slots))
    nth = np.empty(len(slots), np.int64)
    nth[order] = places - np.maximum.accumulate(np.where(begins, places, 0)) + 1
    return nth


def part_of(draw: Draw, good: NDArray[np.bool_]) -> Draw:
    """Its entries that are `good`."""
    return Draw(
        draw.keys[good],
        draw.probability[good] if isinstance(draw.probability, np.ndarray) else draw.probability,
        None if draw.weight is None else draw.weight[good],
        draw.priority[good] if isinstance(draw.priority, np.ndarray) else draw.priority,
    )


def joined(parts: Sequence[Draw]) -> Draw:
    """The entries of all of them, in order."""
    if len(parts) == 1:
        return parts[0]
    weight = None
    if any(part.weight is not None for part in parts):
        weight = np.concatenate([np.ones(len(part.keys)) if part.weight is None else part.weight for part in parts])
    return Draw(
        np.concatenate([part.keys for part in parts]),
        np.concatenate([np.broadcast_to(part.probability, len(part.keys)) for part in parts]),
        weight,
        np.concatenate([np.broadcast_to(part.priority, len(part.keys)) for part in parts]),
    )
