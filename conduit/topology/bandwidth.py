"""How long a transfer takes: α + β·bytes along an edge between two endpoints (paper §5.1, `BW(·)`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from numbers import Real

from conduit.errors import TopologyError


def is_finite(value: object) -> bool:
    """Whether it is a number, as large as a float can be at most."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


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
        if not (is_finite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise TopologyError(
                f"bytes_per_s={self.bytes_per_s!r}: expected a finite number above 0; leave out an edge that isn't there"
            )
        for name in ("latency_s", "noise"):
            value = getattr(self, name)
            if not (is_finite(value) and value >= 0):
                raise TopologyError(f"{name}={value!r}: expected a finite number ≥ 0")

    def seconds(self, size_bytes: float) -> float:
        """Of a transfer of `size_bytes`; 0 where there is nothing to transfer."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes > 0 else 0.0
