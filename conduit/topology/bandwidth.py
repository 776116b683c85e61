"""How long a transfer takes: α + β·bytes along an edge between two endpoints (paper §5.1, `BW(·)`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from conduit.errors import TopologyError


class Source(Enum):
    """Where a figure comes from. Never blur them: a plan tells them apart."""

    SPEC = "spec"
    MEASURED = "measured"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Leg:
    """One edge, when nothing else uses what it uses: `latency_s` (α) and `bytes_per_s` (1 / β) of one direction.

    `noise`: of a measurement, the interquartile range over the median; 0 for what wasn't measured."""

    bytes_per_s: float
    latency_s: float = 0.0
    source: Source = Source.ASSUMED
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise TopologyError(
                f"bytes_per_s={self.bytes_per_s!r}: expected a finite number above 0; leave out an edge that isn't there"
            )
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise TopologyError(f"latency_s={self.latency_s!r}: expected a finite number ≥ 0")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise TopologyError(f"noise={self.noise!r}: expected a finite number ≥ 0")

    def seconds(self, size_bytes: float) -> float:
        """Of a transfer of `size_bytes`; 0 where there is nothing to transfer."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes > 0 else 0.0

    def effective(self, size_bytes: float) -> float:
        """Bytes per second that a transfer of `size_bytes` > 0 gets, its latency included."""
        return size_bytes / self.seconds(size_bytes)


def serial_bytes_per_s(parts: Iterable[tuple[float, float]]) -> float:
    """Of reads one after the other, `(share, bytes_per_s)` each, the shares summing to 1: seconds per byte are averaged, so
    ⅛ at 2000 and ⅞ at 34 GB/s is 39 GB/s."""
    return 1.0 / sum(share / speed for share, speed in parts)
