"""Whether rows fit where they should live, within what is free and within budgets; and the shards that then hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conduit.core.backend import Backend
from conduit.core.experience import Schema
from conduit.core.placement import Placement, format_bytes
from conduit.core.ring import Layout
from conduit.core.shard import Meter, Shard
from conduit.errors import CapacityError
from conduit.topology.endpoint import Endpoint, Tier


class Room:
    """The memory that one buffer may take. `meter`: what is told of the traffic at an endpoint, None for nobody."""

    def __init__(
        self, backend: Backend[Any], budgets: Mapping[Tier, int], meter: Callable[[Endpoint], Meter | None]
    ) -> None:
        self.backend = backend
        self.meter = meter
        self._budgets = budgets

    def check(
        self,
        placement: Placement,
        layout: Layout,
        schema: Schema,
        finals_bytes: int,
        held: Mapping[Endpoint, int],
        freed: Mapping[Endpoint, int],
    ) -> None:
        """CapacityError, which says where how much is lacking, unless there is memory for the rows, and for the first finals beside those of the
        first shard. By endpoint, `held`: what the buffer has already, and keeps; `freed`: what it has, and gives back before."""
        asked = list(zip(placement.endpoints, layout.shard_rows, strict=True))
        lines = (
            self._shortfall(
                at, rows, schema.row_bytes, 0 if number else finals_bytes, held.get(at, 0), freed.get(at, 0)
            )
            for number, (at, rows) in enumerate(asked)
        )
        short = [line for line in lines if line]
        if short:
            raise CapacityError(
                f"{layout.capacity:,} rows of {schema.row_bytes:,} bytes don't fit. {'; '.join(short)}. "
                "A smaller capacity, a larger budget or a placement over more endpoints would"
            )

    def shards(self, placement: Placement, layout: Layout, schema: Schema) -> list[Shard]:
        """Takes the memory of the rows: all of it, or none."""
        shards: list[Shard] = []
        try:
            for at, rows in zip(placement.endpoints, layout.shard_rows, strict=True):
                shards.append(Shard(self.backend, schema, rows, at, self.meter(at)))
        except BaseException:
            for shard in shards:
                shard.close()
            raise
        return shards

    def check_finals(self, needed: int, at: Endpoint, beside: int) -> None:
        """CapacityError unless the finals' memory at an endpoint may grow to `needed` bytes, `beside` as many of rows."""
        budget, free = self._budgets.get(at.tier), self.backend.free_bytes(at)
        left = free if budget is None else min(free, budget - beside)
        if needed > left:
            raise CapacityError(
                f"the finals of ended episodes need {format_bytes(needed)} at {at}; {format_bytes(max(left, 0))} are left there. "
                "A larger budget or a smaller capacity would do"
            )

    def _shortfall(
        self, at: Endpoint, rows: int, row_bytes: int, finals_bytes: int, held: int, freed: int
    ) -> str | None:
        need = rows * row_bytes + finals_bytes
        free, budget = self.backend.free_bytes(at) + freed, self._budgets.get(at.tier)
        most, whose = free, f"{format_bytes(free)} are free"
        if budget is not None and budget - held < free:
            most, whose = budget - held, f"its budget is {format_bytes(budget)}"
        if need <= most:
            return None
        beside = f" and {format_bytes(finals_bytes)} of finals" if finals_bytes else ""
        staying = f" beside the {format_bytes(held)} that are there until these have moved" if held else ""
        fits = max(0, most - finals_bytes) // max(row_bytes, 1)
        return f"{at} needs {format_bytes(need)} for {rows:,} rows{beside}{staying}; {whose} ({fits:,} rows would fit)"
