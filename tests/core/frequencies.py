"""Whether rows were drawn as often as they should be."""

from __future__ import annotations

import numpy as np


def assert_fits(counts: np.ndarray, probability: np.ndarray) -> None:
    """Chi-square at 0.1 %, its quantile by Wilson and Hilferty."""
    assert len(counts) == len(probability)
    expected = counts.sum() * probability
    free = len(counts) - 1
    most = free * (1 - 2 / (9 * free) + 3.09 * np.sqrt(2 / (9 * free))) ** 3
    assert ((counts - expected) ** 2 / expected).sum() < most
