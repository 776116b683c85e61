"""Endpoints: the places where rows can live."""

from __future__ import annotations

import re
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
        # A node has one host memory of a kind, as a rule.
        name = f"{self.tier.value}:{self.index}" if self.tier is Tier.DEVICE or self.index else self.tier.value
        return f"node{self.node}/{name}" if self.node else name

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """`"pageable"`, `"pinned"`, `"device:3"`, `"node1/device:0"`. ValueError names what would do."""
        match = _NAME.fullmatch(text)
        if match is None:
            tiers = ", ".join(tier.value for tier in Tier)
            raise ValueError(f"endpoint {text!r}: expected [nodeN/]TIER[:INDEX] with a tier of {tiers}")
        node, tier, index = match.groups(default="0")
        return cls(Tier(tier), int(index), int(node))


_NAME = re.compile(rf"(?:node([0-9]{{1,9}})/)?({'|'.join(tier.value for tier in Tier)})(?::([0-9]{{1,9}}))?")


PAGEABLE = Endpoint(Tier.PAGEABLE)
PINNED = Endpoint(Tier.PINNED)
DISK = Endpoint(Tier.DISK)
