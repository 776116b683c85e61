"""How much of the experience path schedule="auto" hides behind real stages, and what it costs where nothing can be hidden. Measured on this CPU.

    python benchmarks/exposed.py [--quick] [--only TEXT]

Real rows and real threads, nothing emulated. Two loops, each a thread that acts and trains in turn:

- DQN-like, off-policy: a rollout, a push of N lanes, a pull of 32 N rows, an update; uniform, or prioritized and told priorities
- PPO-like, on-policy: 8 rollouts and pushes, then 3 epochs of 4 mini-batches; with ingestion hooks that need the whole unit (GAE,
  normalized advantages), or with one of row scope

Stages are of known length (`stages.py`): sleep, a device at work; matmul, which holds one core; python, which holds a core and the interpreter.
Hooks compute on their rows until an operator takes the part of its stage that a cell says, in line: so there is something to hide.

Each cell is run by a store in line and by one that has chosen its schedule (its profile has ended), block by block of some iterations in turns.
Seconds are the ledger's, medians over the blocks; the ratio of iterations, auto over in line, is the median of the pairs' with the interval that
holds it at 95 % whatever the noise is like (order statistics). A cell is too noisy to judge where the stages of the store in line take much
longer than alone, or where the interval is wide.

Goals: off-policy, exposed down by 95 % behind sleep and 70 % behind matmul; on-policy, hidden are 80 % of what the scopes allow: delivery of all
epochs but the first, and of row-scope ingestion all parts but the last; beside python stages nothing overlaps unless it pays; and nowhere is
auto slower than in line: the interval's upper end is below 1.05.

T_sync, what overlap costs (Eq. 2): by how much a stage is slower beside its operator, and what the callers wait beyond the model, the hand-off. From
the profiles, per unit (a push, a batch; on-policy the iteration's rows, a pass), of each operator behind its stage.

`--quick`: a few short cells, and nothing is saved. `--only`: cells whose name has this text."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from measure import RESULTS, save
from stages import KINDS, Kind, Stage, stage
from training import EPOCHS, LONGEST_S, MINIBATCHES, Cell, Loop, value_s, values_of

import conduit
from conduit.core.latency import OperatorTimes
from conduit.core.schedule import Mode
from conduit.core.seconds import Seconds

PAIRS, LONG_PAIRS = 12, 6
"""Of blocks; of an iteration of more than 50 ms fewer, which is enough, for it varies less."""
LONG_S = 50e-3
GOAL_RATIO, GOALS, GOAL_ON_POLICY = 1.05, {"sleep": 0.95, "matmul": 0.70}, 0.80
CROWDED, WIDE = 1.15, 0.10
"""Too noisy: stages in line are so many times as long as alone, or the interval of the ratio is so wide."""


def cells() -> list[Cell]:
    found = []
    for kind in KINDS:
        found += [
            Cell("uniform", kind, 1, 5e-3, 5e-3, 0.4),
            Cell("prioritized", kind, 48, 5e-3, 5e-3, 0.8),
            Cell("uniform", kind, 192, 5e-3, 5e-3, 0.4),
            Cell("barrier", kind, 48, 5e-3, 5e-3, 0.4),
            Cell("row scope", kind, 1, 5e-3, 5e-3, 0.8),
        ]
    return [
        *found,
        Cell("uniform", "matmul", 48, 20e-3, 20e-3, 0.8),
        Cell("prioritized", "sleep", 192, 5e-3, 100e-3, 0.2),
        Cell("row scope", "sleep", 192, 10e-3, 10e-3, 0.4),
    ]


def quick_cells() -> list[Cell]:
    return [Cell(variant, kind, 48, 5e-3, 5e-3, 0.4) for variant in ("uniform", "row scope") for kind in KINDS]


@dataclass(frozen=True, slots=True)
class Sync:
    """T_sync of an operator behind its stage, and what it takes there and in line; seconds per unit, at the least granularity. `blocking_s` is
    negative where the operator goes on while the loop is elsewhere, so that less is waited for than its stage is too short to hide."""

    slowdown_s: float
    blocking_s: float
    behind_s: float
    in_line_s: float


@dataclass(frozen=True, slots=True)
class Exposed:
    """Seconds an iteration, medians over the blocks, (in line, auto)."""

    ingestion_s: tuple[float, float]
    delivery_s: tuple[float, float]
    iteration_s: tuple[float, float]
    ratio: tuple[float, float, float]
    """Of iterations, auto over in line: the interval's lower end, the median, the upper end."""
    stages: float
    """In line, how many times as long the stages were as alone."""
    schedule: conduit.Schedule
    profile: tuple[int, float]
    """Iterations and seconds until the store had chosen."""
    anew: tuple[str, ...]
    """Why the store profiled again while it was measured, if it did."""
    sync: Mapping[str, Sync | None]

    @property
    def exposed_s(self) -> tuple[float, float]:
        return self.ingestion_s[0] + self.delivery_s[0], self.ingestion_s[1] + self.delivery_s[1]

    @property
    def reduction(self) -> float:
        in_line_s, auto_s = self.exposed_s
        return 1 - auto_s / in_line_s

    def hidden(self, cell: Cell) -> float:
        """On-policy: what is hidden, over what the scopes allow."""
        allowed_s = self.delivery_s[0] * (EPOCHS - 1) / EPOCHS
        if cell.variant == "row scope":
            allowed_s += self.ingestion_s[0] * (MINIBATCHES - 1) / MINIBATCHES
        return (self.exposed_s[0] - self.exposed_s[1]) / allowed_s

    @property
    def overlaps(self) -> bool:
        return self.schedule.overlap_ing or self.schedule.overlap_del

    @property
    def is_noisy(self) -> bool:
        return self.stages > CROWDED or self.ratio[2] - self.ratio[0] > WIDE

    def complaints(self, cell: Cell) -> Iterator[str]:
        """Which goals it misses."""
        if self.ratio[2] >= GOAL_RATIO:
            yield f"the ratio's interval ends at {self.ratio[2]:.3f}, not below {GOAL_RATIO}"
        if cell.kind == "python":
            if self.overlaps and self.ratio[2] >= 1:
                yield "overlaps, and it isn't sure that this pays"
        elif cell.is_off_policy and self.reduction < GOALS[cell.kind]:
            yield f"exposed is down by {self.reduction:.1%}, not {GOALS[cell.kind]:.0%}"
        elif not cell.is_off_policy and self.hidden(cell) < GOAL_ON_POLICY:
            yield f"hidden is {self.hidden(cell):.0%} of what the scopes allow, not {GOAL_ON_POLICY:.0%}"


def measured(cell: Cell, stages: tuple[Stage, Stage], each_s: float, pairs: int | None = None) -> Exposed | None:
    """None where the store didn't come to a choice."""
    values = values_of(cell, each_s)
    in_line, auto = Loop(cell, stages, values, None), Loop(cell, stages, values, "auto")
    try:
        began_s = time.perf_counter()
        choice, iterations = auto.choose()
        if choice is None:
            return None
        profile = iterations, time.perf_counter() - began_s
        both = []
        for turn in range(1 + (pairs or pairs_of(cell))):
            mine, other = (loop.block() for loop in ((in_line, auto) if turn % 2 else (auto, in_line)))
            both.append((mine, other) if turn % 2 else (other, mine))
        # The first found caches and memory as the profile had left them.
        both = both[1:]
        stages_s, _ = _medians(cell, both, lambda each: each.rollout_s + each.update_s)
        return Exposed(
            ingestion_s=_medians(cell, both, lambda each: each.ingestion.exposed_s),
            delivery_s=_medians(cell, both, lambda each: each.delivery.exposed_s),
            iteration_s=_medians(cell, both, lambda each: each.wall_s),
            ratio=interval([other.wall_s / mine.wall_s for mine, other in both]),
            stages=stages_s / (cell.steps * stages[0].alone_s + cell.updates * stages[1].alone_s),
            schedule=choice.schedule,
            profile=profile,
            anew=tuple(line.strip() for line in str(auto.store.explain()).splitlines() if "measures anew" in line),
            sync={"ingestion": _sync(choice.times.ingestion), "delivery": _sync(choice.times.delivery)},
        )
    finally:
        in_line.store.close()
        auto.store.close()


def pairs_of(cell: Cell) -> int:
    return PAIRS if cell.stages_s * (1 + cell.share) < LONG_S else LONG_PAIRS


def _medians(
    cell: Cell, both: Sequence[tuple[Seconds, Seconds]], of: Callable[[Seconds], float]
) -> tuple[float, float]:
    """Per iteration."""
    mine, other = (statistics.median(map(of, side)) / cell.counted for side in zip(*both, strict=True))
    return mine, other


def _sync(measured: Mapping[Mode, OperatorTimes]) -> Sync | None:
    """None where no mode behind was measured."""
    behind, in_line = (
        {mode: measured[mode] for mode in measured if mode.overlap is overlap} for overlap in (True, False)
    )
    if not behind or not in_line:
        return None
    times = behind[min(behind)]
    return Sync(times.slowdown_s, times.blocking_s, times.operator_s, in_line[min(in_line)].operator_s)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """The median, between the ends of an interval that holds it at this confidence or a little more: the narrowest of two of the sorted values
    as far from either end. Of too few values, the least and the largest."""
    ordered, n = sorted(values), len(values)
    rank, below = 0, 0.5**n
    # The chance that at most so many of n values are below the median.
    while 1 - 2 * (more := below + math.comb(n, rank + 1) * 0.5**n) >= confidence:
        rank, below = rank + 1, more
    return ordered[rank], statistics.median(ordered), ordered[n - 1 - rank]


COLOURS: Mapping[Kind, str] = {"sleep": "#0072B2", "matmul": "#E69F00", "python": "#009E73"}
"""Okabe and Ito's, which colour-blind people tell apart."""
Results = Mapping[Cell, Exposed]


def sync_by_kind(results: Results) -> dict[str, dict[str, Any]]:
    """By kind of stage, loop and operator: medians over the cells, in ms a unit."""
    known: dict[str, list[Sync]] = {}
    for cell, each in results.items():
        for operator, sync in each.sync.items():
            if sync is not None:
                known.setdefault(f"{cell.kind}, {'DQN' if cell.is_off_policy else 'PPO'} {operator}", []).append(sync)
    return {
        name: {
            part: round(statistics.median(getattr(sync, f"{part}_s") for sync in each) * 1e3, 3)
            for part in ("slowdown", "blocking", "behind", "in_line")
        }
        | {"cells": len(each)}
        for name, each in known.items()
    }


def draw(results: Results) -> str:
    """Writes the figure; where to."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 0.36 * len(results) + 2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    ordered = sorted(results, key=lambda cell: KINDS.index(cell.kind), reverse=True)
    for place, cell in enumerate(ordered):
        each, colour = results[cell], COLOURS[cell.kind]
        in_line_ms, auto_ms = (seconds * 1e3 for seconds in each.exposed_s)
        left.plot([in_line_ms, auto_ms], [place, place], color=colour, linewidth=1.5, alpha=0.5)
        left.plot(in_line_ms, place, "o", color=colour, markerfacecolor="white")
        left.plot(auto_ms, place, "o" if each.overlaps else "s", color=colour)
        low, middle, high = each.ratio
        right.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", color=colour, capsize=3)
        if each.is_noisy:
            right.text(high, place, " noisy", fontsize=7, va="center")
    left.set_yticks(range(len(ordered)), [str(cell) for cell in ordered], fontsize=7)
    left.set_xscale("log")
    left.set_xlabel("exposed ms an iteration: in line (open), auto (filled; a square: nothing overlaps)")
    right.axvline(1.0, color="black", linewidth=0.8)
    right.axvline(GOAL_RATIO, color="black", linewidth=0.8, linestyle=":")
    right.set_xlabel("iteration, auto ÷ in line: median of pairs and its 95 % interval")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(
        'The exposed experience path under schedule="auto", by kind of stage; measured on this CPU', fontsize=11
    )
    path = RESULTS / "exposed.png"
    figure.savefig(path, dpi=130)
    return str(path)


def told(cell: Cell, each: Exposed) -> dict[str, Any]:
    """Milliseconds an iteration."""
    pairs = {
        "exposed": each.exposed_s, "ingestion": each.ingestion_s, "delivery": each.delivery_s, "iteration": each.iteration_s
    }  # fmt: skip
    return {
        "cell": asdict(cell),
        "ms": {
            name: {who: round(seconds * 1e3, 4) for who, seconds in zip(("in line", "auto"), both, strict=True)}
            for name, both in pairs.items()
        },
        "exposed_down_by": round(each.reduction, 4),
        "hidden_of_allowed": None if cell.is_off_policy else round(each.hidden(cell), 3),
        "ratio": [round(end, 4) for end in each.ratio],
        "schedule": str(each.schedule),
        "profile": {"iterations": each.profile[0], "seconds": round(each.profile[1], 2)},
        "anew": list(each.anew),
        "stages_over_alone": round(each.stages, 3),
        "is_noisy": each.is_noisy,
        "complaints": list(each.complaints(cell)),
        "sync_s": {operator: sync and asdict(sync) for operator, sync in each.sync.items()},
    }


def _print(cell: Cell, each: Exposed) -> None:
    in_line_ms, auto_ms = (seconds * 1e3 for seconds in each.exposed_s)
    low, middle, high = each.ratio
    hidden = "" if cell.is_off_policy else f", {each.hidden(cell):.0%} of what the scopes allow"
    schedule = each.schedule
    print(
        f"{cell!s:62} exposed {in_line_ms:8.3f} → {auto_ms:8.3f} ms (−{each.reduction:.1%}{hidden}); "
        f"ratio {middle:.3f} [{low:.3f}, {high:.3f}]; ingestion {schedule.ingestion}; delivery {schedule.delivery}"
        f"{'; profiled anew' if each.anew else ''}{'; TOO NOISY' if each.is_noisy else ''}",
        flush=True,
    )
    for complaint in each.complaints(cell):
        print(f"    {complaint}{', but the machine was too noisy to say' if each.is_noisy else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    wanted = [cell for cell in (quick_cells() if asked.quick else cells()) if asked.only in str(cell)]
    lengths: set[tuple[Kind, float]] = {
        (cell.kind, seconds) for cell in wanted for seconds in (cell.rollout_s, cell.update_s)
    }
    stages = {each: stage(*each) for each in sorted(lengths)}
    each_s = value_s()
    results: dict[Cell, Exposed] = {}
    for cell in wanted:
        mine = stages[cell.kind, cell.rollout_s], stages[cell.kind, cell.update_s]
        each = measured(cell, mine, each_s)
        if each is None:
            print(f"{cell!s:62} no schedule was chosen in {LONGEST_S:.0f} s")
        else:
            results[cell] = each
            _print(cell, each)
    sync = sync_by_kind(results)
    for name, figures in sync.items():
        print(f"T_sync, ms a unit, behind {name}: {figures}")
    noisy = sum(each.is_noisy for each in results.values())
    reached = sum(not each.is_noisy and not list(each.complaints(cell)) for cell, each in results.items())
    print(f"{reached} of {len(wanted) - noisy} cells reach their goals; the machine was too noisy to judge {noisy}")
    if not asked.quick and not asked.only:
        print(
            save(
                "exposed",
                {
                    "figures": "measured on this CPU",
                    "goals": _TOLD,
                    "sync_ms": sync,
                    "cells": [told(*each) for each in results.items()],
                },
            )
        )
        print(draw(results))


_TOLD = {
    "off-policy": GOALS,
    "on-policy, of what the scopes allow": GOAL_ON_POLICY,
    "ratio's upper end below": GOAL_RATIO,
}


if __name__ == "__main__":
    main()
