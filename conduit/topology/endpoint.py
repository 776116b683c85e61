"""Endpoints: the places where rows can live."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """A kind of memory (paper §5). Host tiers hold NumPy columns whatever the backend; a device tier is the backend's."""

    PAGEABLE = "pageable"
    PINNED = "pinned"
    DISK = "disk"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One memory: a tier of a node, and which one of its kind. Devices are counted from 0 as the backend lists them."""

    tier: Tier
    index: int = 0
    node: int = 0

    @property
    def is_host(self) -> bool:
        return self.tier is not Tier.DEVICE

    def __str__(self) -> str:
        name = f"device:{self.index}" if self.tier is Tier.DEVICE else self.tier.value
        return f"node{self.node}/{name}" if self.node else name

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """`"pageable"`, `"pinned"`, `"device:3"`, `"node1/device:0"`. ValueError names what would do."""
        head, _, rest = text.rpartition("/")
        kind, _, index = rest.partition(":")
        try:
            node = int(head.removeprefix("node")) if head else 0
            return cls(Tier(kind), int(index) if index else 0, node)
        except ValueError:
            tiers = ", ".join(tier.value for tier in Tier)
            raise ValueError(f"endpoint {text!r}: expected [nodeN/]TIER[:INDEX] with a tier of {tiers}") from None


PAGEABLE = Endpoint(Tier.PAGEABLE)
PINNED = Endpoint(Tier.PINNED)
DISK = Endpoint(Tier.DISK)
