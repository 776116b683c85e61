"""What a store measured of itself, per unit of work: the figures that a schedule is chosen from, and when they no longer hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from conduit.core.seconds import Seconds
from conduit.core.semantics import OnPolicy, Semantics

DRIFTED = 0.25
"""A figure has drifted when it is this share of itself off, …"""
MATTERS = 0.05
"""… and that is this share of the iteration."""

_MOST = 0.75
_TOLD = 2
"""Of what has drifted, so much is said."""


@dataclass(frozen=True, slots=True)
class Crew:
    """Who worked. `actors`, `learners`: how many threads' seconds pass at a time on each side. `apart`: no thread both pushed and pulled."""

    actors: float = 1.0
    learners: float = 1.0
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """A stage and its operator. `units`: per iteration. The others in seconds per unit, NaN where there was none: the stage, the operator
    at work, and what push or pull waited for it."""

    units: float
    stage_s: float
    busy_s: float
    exposed_s: float

    @property
    def path_s(self) -> float:
        """The stage and what the operator adds to it, per unit."""
        return self.stage_s + self.exposed_s

    @property
    def iteration_s(self) -> float:
        """The same per iteration."""
        return self.units * self.path_s if self.units else 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of some iterations: rollout with ingestion by rollout units, update with delivery by batches (on-policy: passes of one learner)."""

    ingestion: Side
    delivery: Side
    wall_s: float
    """Per iteration."""

    def of(self, operator: Literal["ingestion", "delivery"]) -> Side:
        return self.ingestion if operator == "ingestion" else self.delivery

    @property
    def exposed_share(self) -> float:
        """Of the time, how much push and pull take."""
        sides = (self.ingestion, self.delivery)
        exposed_s = sum(side.units * side.exposed_s for side in sides if side.units)
        return exposed_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def rest_s(self) -> float:
        """Of an iteration, what neither side took."""
        return self.wall_s - self.ingestion.iteration_s - self.delivery.iteration_s

    def iteration_s(self, units: float, batches: float) -> float:
        """An iteration, if it had so many of either."""
        sides = ((units, self.ingestion), (batches, self.delivery))
        return self.rest_s + sum(count * side.path_s for count, side in sides if side.units)

    def would_take_s(self, usual: Figures) -> float:
        """An iteration, if it had as many units as usual; NaN where nothing tells what a unit takes."""
        if usual.ingestion.units and not self.ingestion.units:
            return math.nan
        return self.iteration_s(usual.ingestion.units, usual.delivery.units)

    @property
    def crowding(self) -> float:
        """Both sides' seconds over those that passed: above 1 where they work at the same time."""
        both_s = self.ingestion.iteration_s + self.delivery.iteration_s
        return both_s / self.wall_s if self.wall_s > 0 else 0.0


def figures_of(spent: Seconds, iterations: int, semantics: Semantics, crew: Crew) -> Figures:
    """What was spent in so many iterations, per unit. Threads that work beside each other share the time."""
    on_policy = isinstance(semantics, OnPolicy)
    # One iteration's rows are one unit, however many pushes they come in.
    units = iterations * (1.0 if spent.units else 0.0) if on_policy else float(spent.units)
    batches = spent.batches / semantics.minibatches if on_policy else float(spent.batches)
    # Actors feed one operator; each learner has its own, and its share of the batches.
    return Figures(
        Side(
            units / iterations,
            _per(units, spent.rollout_s / crew.actors),
            _per(units, spent.ingestion.busy_s),
            _per(units, spent.ingestion.exposed_s / crew.actors),
        ),
        Side(
            batches / crew.learners / iterations,
            _per(batches, spent.update_s),
            _per(batches, spent.delivery.busy_s),
            _per(batches, spent.delivery.exposed_s),
        ),
        spent.wall_s / iterations,
    )


def crew_of(before: Mapping[object, Seconds], after: Mapping[object, Seconds]) -> Crew:
    """Who worked between two looks at what each thread has spent so far."""
    pushed: dict[object, float] = {}
    pulled: dict[object, float] = {}
    for thread, now in after.items():
        was = before.get(thread) or Seconds()
        if now.units > was.units:
            pushed[thread] = now.rollout_s + now.ingestion.exposed_s - was.rollout_s - was.ingestion.exposed_s
        if now.batches > was.batches:
            pulled[thread] = now.update_s + now.delivery.exposed_s - was.update_s - was.delivery.exposed_s
    apart = bool(pushed and pulled) and not pushed.keys() & pulled.keys()
    return Crew(_abreast(pushed), _abreast(pulled), apart)


def typical(blocks: Sequence[Figures]) -> Figures:
    """The median of each figure: an iteration of hours, where a machine slept, changes little. Of counts the mean, for pushes may come in
    bursts. A wall time belongs to that: the rest besides both sides is the median's."""

    def side(of: Callable[[Figures], Side]) -> Side:
        sides = [of(each) for each in blocks]
        return Side(
            fmean(each.units for each in sides),
            middle([each.stage_s for each in sides]),
            middle([each.busy_s for each in sides]),
            middle([each.exposed_s for each in sides]),
        )

    ingestion, delivery = side(lambda each: each.ingestion), side(lambda each: each.delivery)
    rest_s = middle([each.rest_s for each in blocks])
    return Figures(ingestion, delivery, ingestion.iteration_s + delivery.iteration_s + rest_s)


def middle(values: Sequence[float]) -> float:
    """The median of those that are numbers; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def spread(groups: Iterable[Sequence[float]]) -> float:
    """The standard deviation of values from their neighbours in the same group, over their size; 0 where nothing tells. From the median,
    which outliers don't change, and over all groups, for one alone has few values."""
    steps: list[float] = []
    for values in groups:
        size = middle(values)
        if size > 0:
            steps += [abs(b - a) / size for a, b in pairwise(values) if not math.isnan(a + b)]
    return 1.4826 / math.sqrt(2) * median(steps) if steps else 0.0


def error_of_median(values: Sequence[float], spread: float) -> float:
    """The standard error of their median, if they have this spread."""
    known = [value for value in values if not math.isnan(value)]
    return 1.2533 * spread * median(known) / math.sqrt(len(known)) if known else 0.0


class Drift:
    """Says when what was measured no longer holds. How long an operator works that nobody waits for is no matter."""

    def __init__(self, known: Sequence[Figures], row_bytes: float) -> None:
        """`known`: all that was seen of the schedule, of which it is the best: what is between these figures, or near, is no news."""
        self._known, self._row_bytes = known, row_bytes
        self._wall_s = max(each.wall_s for each in known)
        self._last: frozenset[str] = frozenset()

    def look(self, blocks: Sequence[Figures], row_bytes: float) -> str | None:
        """What has drifted in most of these blocks, now and when it was looked at before, the most first; None if nothing has, or only once."""
        seen = Counter(name for block in blocks for name in self._changes(block, row_bytes))
        now = self._changes(typical(blocks), row_bytes)
        changes = {name: change for name, change in now.items() if seen[name] >= _MOST * len(blocks)}
        lasting = sorted((changes[name] for name in self._last & changes.keys()), reverse=True)
        self._last = frozenset(changes)
        texts = [text for _, text in lasting[:_TOLD]]
        if len(lasting) > _TOLD:
            texts.append(f"and {len(lasting) - _TOLD} more")
        return "; ".join(texts) or None

    def _changes(self, now: Figures, row_bytes: float) -> dict[str, tuple[float, str]]:
        """By name: how much of the iteration it is, and what to say of it."""
        changes: dict[str, tuple[float, str]] = {}
        for stage, operator, unit, side, sides in (
            ("rollout", "ingestion", "unit", now.ingestion, [each.ingestion for each in self._known]),
            ("update", "delivery", "batch", now.delivery, [each.delivery for each in self._known]),
        ):
            # An actor that pauses says nothing about what a push costs.
            if not side.units:
                continue
            for name, now_s, known_s in (
                (stage, side.stage_s, [each.stage_s for each in sides]),
                (f"waiting for {operator}", side.exposed_s, [each.exposed_s for each in sides]),
            ):
                was_s = _nearest(now_s, known_s)
                share = abs(now_s - was_s) * side.units / self._wall_s if self._wall_s else math.inf
                if _differs(was_s, now_s) and share > MATTERS:
                    text = f"{name} takes {now_s * 1e3:.4g} ms a {unit}, {was_s * 1e3:.4g} before"
                    changes[name] = share, text
            was = _nearest(side.units, [each.units for each in sides])
            share = abs(side.units - was) * side.path_s / self._wall_s if self._wall_s and was else math.inf
            if _differs(was, side.units) and share > MATTERS:
                changes[f"{operator}'s units"] = share, f"an iteration has {side.units:.4g} {unit}s, {was:.4g} before"
        if _differs(self._row_bytes, row_bytes):
            changes["rows"] = math.inf, f"a row has {row_bytes:,.0f} bytes, {self._row_bytes:,.0f} before"
        return changes


def _nearest(now: float, known: Iterable[float]) -> float:
    """What was known that is the nearest: `now` itself between the least and the most; NaN where nothing was."""
    sure = [value for value in known if not math.isnan(value)]
    return min(max(now, min(sure)), max(sure)) if sure else math.nan


def _differs(before: float, after: float) -> bool:
    """NaN differs from nothing."""
    return abs(after - before) > DRIFTED * before


def _per(units: float, seconds: float) -> float:
    # A difference of sums of floats may be a hair below zero.
    return max(0.0, seconds / units) if units else math.nan


def _abreast(seconds: Mapping[object, float]) -> float:
    """How many threads' seconds pass at a time: as many as there are, where they work equally long."""
    longest = max(seconds.values(), default=0.0)
    return sum(seconds.values()) / longest if longest > 0 else max(1.0, float(len(seconds)))
