"""Where rows live: the value that placement decides (paper §5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from conduit.core.whole import MOST
from conduit.errors import CapacityError, SettingError
from conduit.topology.cluster import Topology
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

Bytes = int | float | str

KINDS = ("cpu_pageable", "cpu_pinned", "single_gpu", "shared_gpu", "mixed", "disk")
"""Of placement (paper §5.1): host memory, one device, several, devices with what doesn't fit there on the host, and the disk, which is
never chosen but where it was asked for."""

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
    def of(cls, asked: Asked, known: Sequence[Endpoint]) -> Placement:
        """What `Store(placement=…)` means on a machine with the endpoints `known`: a Placement, an endpoint or several
        with equal shares, by value or name ("pageable", "device:3"). "auto" is pageable host memory, where nothing is planned; what
        `asked_kinds` knows is for a plan to decide."""
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
                kinds = ", ".join(KINDS)
                raise CapacityError(f"placement={asked!r}: {error}, or kinds of placement alone: {kinds}") from None
            placement = cls(endpoints, (1.0,) * len(endpoints))
        for endpoint in placement.endpoints:
            if endpoint not in known:
                there = ", ".join(map(str, known))
                raise CapacityError(
                    f"placement={asked!r}: this machine has no endpoint {endpoint} for the backend; it has {there}"
                )
        return placement

    def rows(self, capacity: int) -> dict[Endpoint, int]:
        """Whole rows by endpoint that sum to `capacity`, each within one of its share."""
        return dict(zip(self.endpoints, whole_rows(self.shares, capacity), strict=True))


def whole_rows(shares: Sequence[float], rows: int) -> list[int]:
    """`rows` in proportion to `shares`, each rounded down or up, by the largest remainder; the first of equal ones up."""
    total = math.fsum(shares)
    exact = [rows * share / total for share in shares]
    whole = [math.floor(each) for each in exact]
    largest_first = sorted(range(len(exact)), key=lambda at: whole[at] - exact[at])
    for at in largest_first[: rows - sum(whole)]:
        whole[at] += 1
    return whole


def even_rows(most: Sequence[int], capacity: int) -> list[int]:
    """Rows that sum to `capacity`, as even as `most` allows, at least one each. What fits nowhere lies over all evenly."""
    most = [max(1, each) for each in most]
    rows = [0] * len(most)
    left = capacity
    for taken, at in enumerate(sorted(range(len(most)), key=lambda at: (most[at], -at))):
        rows[at] = min(most[at], left // (len(most) - taken))
        left -= rows[at]
    return [each + more for each, more in zip(rows, whole_rows([1.0] * len(most), left), strict=True)]


def capped_rows(shares: Sequence[float], capacity: int, most: Sequence[int]) -> list[int]:
    """Rows in proportion to `shares`, at least one each, at most `most`; the first that may take what that leaves."""
    rows = [min(max(1, each), cap) for each, cap in zip(whole_rows(shares, capacity), most, strict=True)]
    left = capacity - sum(rows)
    for at, cap in enumerate(most):
        more = min(max(left, 1 - rows[at]), cap - rows[at])
        rows[at] += more
        left -= more
    return rows


Asked = str | Endpoint | Placement | Sequence[str | Endpoint]
"""What a user may say of where rows should live: "auto", kinds, endpoints, or a Placement."""


def asked_kinds(asked: Asked) -> tuple[str, ...] | None:
    """Of which kinds a store's placement is to be chosen, in the order of KINDS, all for "auto"; None where `asked` names endpoints.
    SettingError for kinds and endpoints together."""
    several = asked if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    named = any(isinstance(each, str) and each in ("auto", *KINDS[:-1]) for each in several)
    return kinds_of("placement", asked) if named else None


def kinds_of(name: str, asked: object) -> tuple[str, ...]:
    """The kinds that `asked` allows, in the order of KINDS; all for "auto". SettingError for anything else."""
    several = [asked] if isinstance(asked, str) else asked if isinstance(asked, Sequence) else []
    if list(several) == ["auto"]:
        return KINDS
    unknown = [each for each in several if each not in KINDS]
    if unknown or not several:
        what = f"; {unknown[0]!r} is none of them" if unknown else ""
        raise SettingError(f"{name}={asked!r}: expected 'auto' or one or more of {', '.join(KINDS)}{what}")
    return tuple(kind for kind in KINDS if kind in several)


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


def budgets_within(topology: Topology, budgets: Mapping[str, Bytes] | None) -> dict[Tier, int]:
    """Budgets in bytes by tier. CapacityError for one above what some endpoint of its tier has in all."""
    parsed = parse_budgets(budgets)
    for at, memory in topology.memories.items():
        if parsed.get(at.tier, 0) > memory.capacity_bytes:
            raise CapacityError(
                f"budgets[{at.tier.value!r}] is {format_bytes(parsed[at.tier])}, more than the {format_bytes(memory.capacity_bytes)} that "
                f"{at} has in all; give at most that, or leave the budget out: what is free bounds it anyway"
            )
    return parsed


def parse_bytes(size: Bytes) -> int:
    """What is beyond a whole number of bytes is left out. ValueError for what no memory has."""
    if isinstance(size, str):
        number = size.rstrip("KMGTiB ")
        try:
            size = float(number) * _UNITS[size[len(number) :].strip()]
        except (ValueError, KeyError):
            size = -1
    if isinstance(size, bool) or not isinstance(size, Real) or not 0 <= size <= MOST:
        raise ValueError("not a number of bytes")
    return int(size)


def format_bytes(size: float) -> str:
    """`"22.89 GiB"`: four figures."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
