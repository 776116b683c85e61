"""Where rows live: the value that placement decides (paper §5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from conduit.errors import CapacityError
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

Bytes = int | str
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")} | {
    f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows spread over `endpoints` in proportion to `shares`."""

    endpoints: tuple[Endpoint, ...] = (PAGEABLE,)
    shares: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.endpoints or len(self.endpoints) != len(self.shares):
            raise CapacityError(f"{self}: expected at least one endpoint and one share each")
        if len(set(self.endpoints)) != len(self.endpoints):
            raise CapacityError(f"{self}: an endpoint occurs twice; give it one share")
        if not all(math.isfinite(share) and share > 0 for share in self.shares):
            raise CapacityError(f"{self}: every share must be a finite number above 0; leave an unused endpoint out")

    @classmethod
    def of(cls, asked: str | Endpoint | Placement | Sequence[str | Endpoint], known: Sequence[Endpoint]) -> Placement:
        """What `Store(placement=…)` means on a machine with the endpoints `known`: a Placement, an endpoint or several
        with equal shares, by value or name ("pageable", "device:3"). "auto" is pageable host memory until measured
        bandwidths choose."""
        if isinstance(asked, Placement):
            placement = asked
        elif asked == "auto":
            placement = cls()
        else:
            several = [asked] if isinstance(asked, str | Endpoint) else asked
            if not isinstance(several, Sequence) or not all(isinstance(each, str | Endpoint) for each in several):
                raise CapacityError(
                    f"placement={asked!r}: expected 'auto', a conduit.Placement, or an endpoint or several, by value or name"
                )
            try:
                endpoints = tuple(Endpoint.parse(each) if isinstance(each, str) else each for each in several)
            except ValueError as error:
                raise CapacityError(f"placement={asked!r}: {error}") from None
            placement = cls(endpoints, (1.0,) * len(endpoints))
        for endpoint in placement.endpoints:
            if endpoint not in known:
                there = ", ".join(map(str, known))
                raise CapacityError(
                    f"placement={asked!r}: this machine has no endpoint {endpoint} for the backend; it has {there}"
                )
        return placement


def parse_budgets(budgets: Mapping[str, Bytes] | None) -> dict[Tier, int]:
    """Budgets in bytes by tier, from `{"pageable": "24GiB", "device": 8_000_000_000}`; a device budget is for each device."""
    parsed = {}
    if budgets is not None and not isinstance(budgets, Mapping):
        raise CapacityError(f"budgets={budgets!r}: expected a dict of tiers to sizes, such as {{'pageable': '24GiB'}}")
    for name, size in ({} if budgets is None else budgets).items():
        try:
            parsed[Tier(name)] = parse_bytes(size)
        except (ValueError, OverflowError) as error:
            tiers = ", ".join(tier.value for tier in Tier)
            raise CapacityError(
                f"budgets[{name!r}]={size!r}: {error}; expected a tier of {tiers} and a size such as '24GiB'"
            ) from None
    return parsed


def parse_bytes(size: Bytes) -> int:
    if isinstance(size, str):
        number = size.rstrip("KMGTiB ")
        size = int(float(number) * _UNITS[size[len(number) :].strip()]) if size[len(number) :].strip() in _UNITS else -1
    if isinstance(size, bool) or not isinstance(size, Real) or not 0 <= size < math.inf:
        raise ValueError("not a number of bytes")
    return int(size)


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
