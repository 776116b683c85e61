"""What a learner gets: rows, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.experience import Tree


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """What is known of a batch of B rows. Arrays are NumPy's, of shape (B,), but for `weight`."""

    number: int
    """Which global batch this is; `Store.sample` counts its own."""
    keys: NDArray[np.int64]
    """Insertion numbers: what `update_priorities` takes."""
    probability: NDArray[np.float64]
    """The chance of each draw to give this row, at the time of the draw."""
    weight: Any
    """Importance-sampling weight, float32, at most 1: an array of the batch's own framework, where the batch is."""
    priority: NDArray[np.float64]
    """Raw priority at the time of the draw (1 where the sampler has none)."""
    age: NDArray[np.int64]
    """How many rows were inserted after this one and visible to the draw."""
    policy_version: NDArray[np.int64]
    """The policy version that made the row."""
    frontier: int
    """The last insertion number visible to the draw. Equal seed, number and frontier give equal rows (with priorities: after equal updates)."""
    priority_lag: int
    """How many batches this learner had been handed, or was about to be, whose priority updates the draw could not know; 0 when drawn at the pull."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`data` has the stored rows' structure, each leaf (B, *field.shape), in memory that belongs to the receiver."""

    data: Tree
    info: SampleInfo

    def __len__(self) -> int:
        return len(self.info.keys)
