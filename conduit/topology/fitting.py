"""A leg from timed transfers: α + β·bytes, and how noisy the times were."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from conduit.topology.bandwidth import Leg, Source

_UNSEEN = (0.01, 0.1)
"""The least part of the longest transfer that is put down to bandwidth: the noise, within these bounds. A smaller part couldn't be seen."""


def fit(samples: Mapping[int, Sequence[float]]) -> Leg:
    """The leg that explains seconds by bytes, of two sizes or more: the line through the medians whose relative errors are least in square.

    The latency is never below 0, and the bandwidth never above what the noise leaves to be seen of it."""
    medians = {size: statistics.median(each) for size, each in samples.items()}
    noise = noise_of(samples)
    # y = α + β·x, each equation divided by y: 1 = α/y + β·x/y.
    ones = [1 / y for y in medians.values()]
    slopes = [x / y for x, y in medians.items()]
    aa, ab, bb = (
        math.fsum(p * q for p, q in zip(*pair, strict=True))
        for pair in ((ones, ones), (ones, slopes), (slopes, slopes))
    )
    a, b = math.fsum(ones), math.fsum(slopes)
    largest = max(medians)
    least = min(max(noise, _UNSEEN[0]), _UNSEEN[1]) * medians[largest] / largest
    latency_s, per_byte = (a * bb - b * ab) / (aa * bb - ab * ab), (b * aa - a * ab) / (aa * bb - ab * ab)
    if latency_s < 0:
        latency_s, per_byte = 0.0, b / bb
    elif per_byte < least:
        latency_s, per_byte = max(0.0, (a - least * ab) / aa), least
    return Leg(1 / per_byte, latency_s, Source.MEASURED, noise)


def noise_of(samples: Mapping[int, Sequence[float]]) -> float:
    """The interquartile range of all samples, each over the median of its size."""
    return spread([second / statistics.median(each) for each in samples.values() for second in each])


def spread(samples: Sequence[float]) -> float:
    """The interquartile range, 0 of fewer than two."""
    if len(samples) < 2:
        return 0.0
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first
