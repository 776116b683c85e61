"""What `auto.py` compares: cells of placement × schedule × dimension, measured and predicted, and how well the two agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any, NamedTuple

from measure import RESULTS

import conduit

TOP = 8
"""Cells whose order counts (paper Tab. 4)."""
ALIKE = 1e-3
"""Predictions that differ by less are alike, where a profile has no noise."""


class Cell(NamedTuple):
    """One point of Fig. 15: g_ing = g_del = `g`, and both operators in line or both behind the stages."""

    dimension: int
    placement: str
    overlap: bool
    g: int

    @property
    def schedule(self) -> conduit.Schedule:
        return conduit.Schedule(self.overlap, self.g, self.overlap, self.g)

    def __str__(self) -> str:
        return f"{self.placement}, {'behind' if self.overlap else 'in line'}, g = {self.g}"


def cells(dimensions: Collection[int], placements: Collection[str], gs: Collection[int]) -> list[Cell]:
    return [Cell(*each) for each in product(dimensions, placements, (False, True), gs)]


@dataclass(frozen=True, slots=True)
class Times:
    """Of an iteration: from end to end, and what of it the experience path exposes. `spread`: of repeats of a measurement, the largest over
    the smallest, less 1."""

    iteration_s: float
    exposed_s: float
    spread: float = 0.0


Sweep = Mapping[Cell, Times]


@dataclass(frozen=True, slots=True)
class Inversion:
    """Two cells that were measured in another order than they were predicted in: `sooner` was predicted to be the faster one, and takes
    `by` more, as a part of the other. `band`: what of it may be noise."""

    sooner: Cell
    later: Cell
    by: float
    band: float


@dataclass(frozen=True, slots=True)
class Line:
    """A dimension's line of Tab. 4: the fastest cell that was measured, and the one that the predictions choose. `regret`: how much longer that
    takes, as a part of the fastest; `band`: what of it may be noise. `inversion`: the worst among the top 8, by measurement or prediction."""

    dimension: int
    best: Cell
    best_s: float
    predicted_s: float
    chosen: Cell
    chosen_s: float
    regret: float
    band: float
    inversion: Inversion | None

    @property
    def is_beyond(self) -> bool:
        """Whether an inversion is more than noise."""
        return self.inversion is not None and self.inversion.by > self.inversion.band


@dataclass(frozen=True, slots=True)
class Agreement:
    """`r`: Pearson's. `mape`: the mean absolute error as a part of what was measured; `worst`: the largest, signed, and of which cell.
    `exposed_r`: of the exposed seconds alone; `exposed_error_s`: their mean absolute error."""

    r: float
    mape: float
    worst: float
    worst_cell: Cell
    exposed_r: float
    exposed_error_s: float
    lines: tuple[Line, ...]


def agreement(measured: Sweep, predicted: Sweep, least_band: float, alike: float = ALIKE) -> Agreement:
    """`least_band`: what two measurements of the same may differ by, where their repeats don't show more. `alike`: see `chosen`."""
    assert measured.keys() == predicted.keys()
    errors = {cell: predicted[cell].iteration_s / at.iteration_s - 1 for cell, at in measured.items()}
    worst = max(errors, key=lambda cell: abs(errors[cell]))
    return Agreement(
        r=_correlation(measured, predicted, lambda at: at.iteration_s),
        mape=statistics.fmean(map(abs, errors.values())),
        worst=errors[worst],
        worst_cell=worst,
        exposed_r=_correlation(measured, predicted, lambda at: at.exposed_s),
        exposed_error_s=statistics.fmean(
            abs(predicted[cell].exposed_s - at.exposed_s) for cell, at in measured.items()
        ),
        lines=tuple(
            _line([cell for cell in measured if cell.dimension == dimension], measured, predicted, least_band, alike)
            for dimension in dict.fromkeys(cell.dimension for cell in measured)
        ),
    )


def chosen(among: Collection[Cell], predicted: Sweep, alike: float = ALIKE) -> Cell:
    """The cell that is predicted to be the fastest; of those that differ by no more than the part `alike`, the simplest: in line, then the least
    that is staged."""
    least_s = min(predicted[cell].iteration_s for cell in among)
    some = [cell for cell in among if predicted[cell].iteration_s <= least_s * (1 + alike)]
    return min(some, key=lambda cell: (cell.overlap, cell.g, predicted[cell].iteration_s))


def _line(among: Sequence[Cell], measured: Sweep, predicted: Sweep, least_band: float, alike: float) -> Line:
    best, mine = min(among, key=lambda cell: measured[cell].iteration_s), chosen(among, predicted, alike)
    best_s, mine_s = measured[best].iteration_s, measured[mine].iteration_s
    return Line(
        dimension=best.dimension,
        best=best,
        best_s=best_s,
        predicted_s=min(predicted[cell].iteration_s for cell in among),
        chosen=mine,
        chosen_s=mine_s,
        regret=mine_s / best_s - 1,
        band=_band(measured[best], measured[mine], 0.0),
        inversion=max(
            _inversions(among, measured, predicted, least_band), key=lambda each: each.by - each.band, default=None
        ),
    )


def _inversions(among: Sequence[Cell], measured: Sweep, predicted: Sweep, least_band: float) -> Iterator[Inversion]:
    top = {
        cell: None
        for sweep in (measured, predicted)
        for cell in sorted(among, key=lambda cell: sweep[cell].iteration_s)[:TOP]
    }
    for pair in combinations(top, 2):
        sooner, later = sorted(pair, key=lambda cell: predicted[cell].iteration_s)
        if math.isclose(predicted[sooner].iteration_s, predicted[later].iteration_s, rel_tol=1e-9):
            continue
        by = measured[sooner].iteration_s / measured[later].iteration_s - 1
        if by > 0:
            yield Inversion(sooner, later, by, _band(measured[sooner], measured[later], least_band))


def _band(one: Times, other: Times, least: float) -> float:
    """Twice the spread of the repeats, or `least` where that is more."""
    return max(least, 2 * one.spread, 2 * other.spread)


def _correlation(measured: Sweep, predicted: Sweep, of: Callable[[Times], float]) -> float:
    return statistics.correlation([of(at) for at in measured.values()], [of(predicted[cell]) for cell in measured])


def told(found: Agreement) -> dict[str, Any]:
    """For a JSON file."""
    return {
        "r": round(found.r, 5),
        "mape": round(found.mape, 5),
        "worst": {"error": round(found.worst, 4), "d": found.worst_cell.dimension, "cell": str(found.worst_cell)},
        "exposed": {"r": round(found.exposed_r, 5), "mean_error_us": round(found.exposed_error_s * 1e6, 1)},
        "table": [
            {
                "d": each.dimension,
                "best_measured_ms": round(each.best_s * 1e3, 4),
                "best": str(each.best),
                "predicted_ms": round(each.predicted_s * 1e3, 4),
                "chosen": str(each.chosen),
                "regret": round(each.regret, 5),
                "regret_band": round(each.band, 5),
                "top_8_as_predicted": not each.is_beyond,
                "worst_inversion": None
                if each.inversion is None
                else {
                    key: str(each) if isinstance(each, tuple) else round(each, 5)
                    for key, each in asdict(each.inversion).items()
                },
            }
            for each in found.lines
        ],
    }


def points(measured: Sweep, predicted: Sweep) -> list[dict[str, Any]]:
    """For a JSON file."""
    return [
        {
            "d": cell.dimension,
            "placement": cell.placement,
            "overlap": cell.overlap,
            "g": cell.g,
            "iteration_ms": round(at.iteration_s * 1e3, 4),
            "predicted_ms": round(predicted[cell].iteration_s * 1e3, 4),
            "exposed_ms": round(at.exposed_s * 1e3, 4),
            "predicted_exposed_ms": round(predicted[cell].exposed_s * 1e3, 4),
            "spread": round(at.spread, 4),
        }
        for cell, at in measured.items()
    ]


def show(found: Agreement) -> None:
    """Tab. 4, on the screen."""
    print(
        f"  r = {found.r:.4f}, MAPE {found.mape:.2%}; worst {found.worst:+.1%}: d = {found.worst_cell.dimension}, {found.worst_cell}"
    )
    print(f"  exposed: r = {found.exposed_r:.4f}, mean error {found.exposed_error_s * 1e6:.0f} µs")
    print(f"  {'d':>6}  {'measured':>9}  {'predicted':>9}  {'regret':>7}  top 8  chosen")
    for each in found.lines:
        order = "no" if each.is_beyond else "yes"
        print(
            f"  {each.dimension:6,}  {each.best_s * 1e3:6.3f} ms  {each.predicted_s * 1e3:6.3f} ms  {each.regret:7.2%}  {order:>5}  {each.chosen}"
        )


COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")
"""Okabe and Ito's, which colour-blind people tell apart."""


def draw(
    name: str, title: str, measured: Sweep, predicted: Sweep, found: Agreement, itself_s: Mapping[int, float]
) -> str:
    """Writes Fig. 15 (exposed seconds of every cell, and of the one chosen) and App. F (predicted against measured); where to. `itself_s`: exposed
    seconds of a store left to itself, by dimension, where it was tried."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    dimensions = [each.dimension for each in found.lines]
    placements = list(dict.fromkeys(cell.placement for cell in measured))
    figure = Figure(figsize=(12.5, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, placement in enumerate(placements):
        mine = [cell for cell in measured if cell.placement == placement]
        for overlap in (False, True):
            some = [cell for cell in mine if cell.overlap == overlap]
            look: dict[str, Any] = {
                "color": COLOURS[number],
                "marker": "o" if overlap else "s",
                "facecolors": "none" if overlap else COLOURS[number],
                "s": 20,
                "alpha": 0.75,
            }
            # Side by side, or they would hide each other.
            shift = 0.94 + 0.04 * number
            left.scatter(
                [cell.dimension * shift for cell in some], [measured[cell].exposed_s * 1e3 for cell in some], **look
            )
            right.scatter(
                [measured[cell].iteration_s * 1e3 for cell in some],
                [predicted[cell].iteration_s * 1e3 for cell in some],
                label=f"{placement}, {'behind' if overlap else 'in line'}",
                **look,
            )
    left.plot(
        dimensions,
        [measured[each.chosen].exposed_s * 1e3 for each in found.lines],
        "k*--",
        markersize=11,
        linewidth=1,
        label="what the predictions choose",
    )
    if itself_s:
        left.plot(
            list(itself_s),
            [each * 1e3 for each in itself_s.values()],
            "kx",
            markersize=9,
            markeredgewidth=1.5,
            label="a store left to itself",
        )
    left.set_xscale("log")
    # From 0 on: an iteration may expose nothing.
    left.set_yscale("symlog", linthresh=0.1, linscale=0.3)
    left.set_ylim(bottom=-0.02)
    left.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    left.set_xlabel("transition dimension")
    left.set_ylabel("exposed ms an iteration")
    left.xaxis.set_major_locator(FixedLocator(dimensions))
    left.xaxis.set_minor_locator(NullLocator())
    left.xaxis.set_major_formatter(FuncFormatter(lambda d, _: f"{d:,.0f}"))
    left.set_title(f"{len(measured) // len(dimensions)} cells a dimension, and the choice (Fig. 15)", fontsize=10)
    left.legend(fontsize=8)
    most = max(max(at.iteration_s, predicted[cell].iteration_s) for cell, at in measured.items()) * 1e3
    fewest = min(min(at.iteration_s, predicted[cell].iteration_s) for cell, at in measured.items()) * 1e3
    right.plot([fewest, most], [fewest, most], color="#666666", linewidth=1)
    right.set_xscale("log")
    right.set_yscale("log")
    for axis in (right.xaxis, right.yaxis):
        axis.set_minor_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    right.set_xlabel("measured ms an iteration")
    right.set_ylabel("predicted ms an iteration")
    right.set_title(f"r = {found.r:.4f}, MAPE {found.mape:.2%} (App. F)", fontsize=10)
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=130)
    return str(path)
