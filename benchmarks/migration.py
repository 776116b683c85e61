"""Rows that grow while training goes on, and what moving them costs (paper Fig. 13). Emulated, on the virtual clock.

    python benchmarks/migration.py [--quick]

The machine, the rows, and what is measured are those of `placement.py`: the a100x8 preset, 10^6 rows, batches of 512 to one learner on the first
device, replay ratio 8, every half of the experience path exposed. The store is full at d = 128; then 40 iterations, and every eighth pushes wider
rows than before: 1000, 5000, 10,000, 20,000. The fields are declared to grow, and the old rows are filled up (`Field(grow="pad")`), so each growth
copies all 10^6 rows, be it only into wider ones in the same memory. An iteration is a modelled rollout (40 ms), a push, a pull and a modelled
update (10 ms).

- Conduit: placement="auto", by what was measured on the emulated machine
- Greedy: the first device, which is the fastest while it lasts
- Conservative: all eight, evenly, from the start

The push that first brings wider rows returns when all rows have moved: so long that actor waits (`seconds`), and here nothing hides it. Everybody else
waits for the pause at the end alone: a learner in a thread of its own trains on meanwhile, and how long its pulls take is told as well.

The unit of bytes is 100: a row's every byte stands for 100, and memories, bandwidths and a migration's chunks are as many times smaller. So all times
are those of the full size, 160 GB at the end. Moves copy real rows; that takes most of the minute that this runs.
`--quick`: a tenth of the rows, on a machine with a tenth of the memory, and nothing is saved."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from measure import RESULTS, save
from placement import BATCH, CAPACITY, FILL, TOLD, contenders, fill, in_units, measured

import conduit
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import VirtualClock
from conduit.core.migration import CHUNK_BYTES
from conduit.core.moves import Migrated
from conduit.core.placement import Asked
from conduit.errors import CapacityError, SchemaError
from conduit.topology import Topology, preset

DIMENSIONS, EACH = (128, 1000, 5000, 10_000, 20_000), 8
"""Iterations of each dimension: 40 in all."""
REPLAY_RATIO = 8.0
ROLLOUT_S, UPDATE_S = 40e-3, 10e-3
PUSHES_EVERY_S = 5e-3
"""Of the other actor, while rows move: so that there is something left to copy when they have."""
UNIT = 100
WITHIN_GREEDY, WITHIN_CONSERVATIVE, NOISE_S = 0.05, 0.02, 10e-6
"""Parts of the other's time, or one launch's latency, whichever is more."""
PAPER = 1.9
"""How many times less Conduit accumulates than Conservative (paper §7.3)."""
WHY = (
    "Of an iteration, most is ingestion: one thread copies new rows out of pageable memory at 12 GB/s, wherever they go, and that is the same for all. "
    "What differs is the gather, which from the learner's own memory is a few times as fast as over its port. The paper's iterations take 52 to 403 ms, of "
    "which such bytes over such bandwidths explain about one: the rest, and so presumably most of its 1.9 ×, is what its system spends on several devices, "
    "which isn't modelled here. Its replacements take 30 ms, in which no link of such a machine moves 40 GB; here all rows are kept, so every growth copies "
    "all of them, and eight iterations of each size are too few for a faster place to pay for that"
)
NAMES = {"Conduit": "Conduit", "single GPU": "Greedy", "shared GPU": "Conservative"}


@dataclass(frozen=True, slots=True)
class Iteration:
    """`pushed_s`, `pulled_s`: emulated seconds that the loop waited; a move is part of the push that it is for."""

    dimension: int
    pushed_s: float
    pulled_s: float
    grew: bool

    @property
    def exposed_s(self) -> float:
        return self.pushed_s + self.pulled_s


@dataclass(frozen=True, slots=True)
class Growth:
    """`waited_s`: the actor whose rows grew; `pulls_s`, `pushes_s`: what the calls took of a learner and another actor meanwhile."""

    iteration: int
    dimension: int
    migrated: Migrated
    waited_s: float
    pulls_s: Sequence[float]
    pushes_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Run:
    """`out_of_memory`: where the run ended, what the error said."""

    iterations: Sequence[Iteration]
    growths: Sequence[Growth]
    out_of_memory: str

    def exposed_s(self, moves: bool = True) -> float:
        """All iterations'; or each that grew like the mean of its dimension's others."""
        return sum(
            each.exposed_s if moves or not each.grew else self.usual_s(each.dimension) for each in self.iterations
        )

    def usual_s(self, dimension: int) -> float:
        """Exposed seconds of an iteration that doesn't grow, a mean."""
        return statistics.fmean(
            each.exposed_s for each in self.iterations if each.dimension == dimension and not each.grew
        )


def row_bytes(dimension: int) -> int:
    """That are really stored: obs and next_obs of 4 d / UNIT bytes each, reward and action."""
    return 2 * (4 * dimension // UNIT) + 2


def rows_of(count: int, dimension: int) -> dict[str, np.ndarray]:
    wide, one = np.zeros((count, 4 * dimension // UNIT), np.uint8), np.zeros(count, np.uint8)
    return {"obs": wide, "next_obs": wide, "reward": one, "action": one}


def run(
    topology: Topology,
    found: Topology,
    placement: Asked,
    dimensions: Sequence[int] = DIMENSIONS,
    each: int = EACH,
    capacity: int = CAPACITY,
    chunk_bytes: int = CHUNK_BYTES // UNIT,
) -> Run:
    """One contender's. With fewer rows than `CAPACITY`, the memories are as much smaller."""
    clock = VirtualClock(max_events=10**8)
    backend = EmulatedBackend(in_units(topology, UNIT, capacity), clock=clock)
    iterations: list[Iteration] = []
    growths: list[Growth] = []

    def main() -> str:
        with conduit.Store(
            backend=backend,
            clock=clock,
            topology=in_units(found, UNIT, capacity),
            placement=placement,
            capacity=capacity,
            batch_size=BATCH,
            limiter=conduit.SampleToInsertRatio(REPLAY_RATIO, BATCH, 4 * REPLAY_RATIO * capacity),
            fields={name: conduit.Field(("h",), np.uint8, grow="pad") for name in ("obs", "next_obs")},
        ) as store:
            # Chunks as much smaller as all bytes are. Only this benchmark looks so deep into a store.
            store._wiring.migrator.chunk_bytes = chunk_bytes
            learner = store.learner(to="torch", device=topology.devices[0])
            fill(store, rows_of(min(FILL, capacity), dimensions[0]), capacity)
            backend.drain()
            actor, other = (store.actor(round(BATCH / REPLAY_RATIO)) for _ in range(2))
            before = dimensions[0]
            for number, dimension in enumerate(np.repeat(dimensions, each).tolist()):
                step = rows_of(actor.lanes, dimension)
                clock.sleep(ROLLOUT_S)
                began_s = clock.now()
                if dimension == before:
                    actor.push(step)
                    pushed_s = clock.now() - began_s
                else:
                    beside = _Beside(clock, learner, other, before)
                    try:
                        actor.push(step)
                        pushed_s = clock.now() - began_s
                    except CapacityError as error:
                        return str(error)
                    finally:
                        beside.end()
                    growths.append(
                        Growth(number, dimension, store.migrations[-1], pushed_s, beside.pulls_s, beside.pushes_s)
                    )
                began_s = clock.now()
                backend.drain()
                ingested_s = clock.now()
                learner.pull()
                backend.drain()
                iterations.append(
                    Iteration(dimension, pushed_s + ingested_s - began_s, clock.now() - ingested_s, dimension != before)
                )
                before = dimension
                clock.sleep(UPDATE_S)
        return ""

    return Run(iterations, growths, clock.run(main))


class _Beside:
    """What goes on while a push has all rows moved: a learner that trains, and an actor whose own rows haven't grown yet, each in a thread of
    its own."""

    def __init__(self, clock: VirtualClock, learner: conduit.Learner, actor: conduit.Actor, dimension: int) -> None:
        self.pulls_s: list[float] = []
        self.pushes_s: list[float] = []
        self._clock, self._learner, self._actor = clock, learner, actor
        self._step = rows_of(actor.lanes, dimension)
        self._ended = False
        self._tasks = [clock.spawn(self._train, "learner"), clock.spawn(self._act, "another actor")]

    def end(self) -> None:
        self._ended = True
        for task in self._tasks:
            task.join()

    def _train(self) -> None:
        while not self._ended:
            self.pulls_s.append(self._timed(self._learner.pull))
            self._clock.sleep(UPDATE_S)

    def _act(self) -> None:
        try:
            while not self._ended:
                self.pushes_s.append(self._timed(lambda: self._actor.push(self._step)))
                self._clock.sleep(PUSHES_EVERY_S)
        except SchemaError:
            """The store is of the wider form by now, and takes no others."""

    def _timed(self, call: Callable[[], object]) -> float:
        began_s = self._clock.now()
        call()
        return self._clock.now() - began_s


def complaints(topology: Topology, runs: Mapping[str, Run], dimensions: Sequence[int] = DIMENSIONS) -> list[str]:
    """What isn't as it should be."""
    mine, greedy, safe = (runs[name] for name in ("Conduit", "Greedy", "Conservative"))
    found = [
        f"{name} ran out of memory: {runs[name].out_of_memory}"
        for name in ("Conduit", "Conservative")
        if runs[name].out_of_memory
    ]
    for other, within in ((greedy, WITHIN_GREEDY), (safe, WITHIN_CONSERVATIVE)):
        for dimension in dict.fromkeys(each.dimension for each in other.iterations):
            if not any(each.dimension == dimension for each in mine.iterations):
                continue
            mine_s, other_s = mine.usual_s(dimension), other.usual_s(dimension)
            if mine_s > other_s * (1 + within) and mine_s > other_s + NOISE_S:
                whose = "Greedy" if other is greedy else "Conservative"
                found.append(f"d = {dimension:,}: {mine_s * 1e6:.1f} µs an iteration, {whose} {other_s * 1e6:.1f}")
    room = topology.memory(topology.devices[0]).free_bytes
    too_large = next((d for d in dimensions if CAPACITY * row_bytes(d) * UNIT > room), None)
    ended = next((d for d in dimensions if all(each.dimension != d for each in greedy.iterations)), None)
    if too_large != ended:
        found.append(f"Greedy ended at d = {ended}; by the bytes, one device is too small from d = {too_large} on")
    return found


def figures(runs: Mapping[str, Run]) -> dict[str, Any]:
    mine, safe = runs["Conduit"], runs["Conservative"]
    stages_s = len(mine.iterations) * (ROLLOUT_S + UPDATE_S)
    return {
        "cumulative_ratio_to_conservative": {
            "exposed, moves included": round(safe.exposed_s() / mine.exposed_s(), 3),
            "exposed, moves left out of both": round(safe.exposed_s(moves=False) / mine.exposed_s(moves=False), 3),
            "pulls alone, moves left out of both": round(_pulled_s(safe) / _pulled_s(mine), 3),
            "end to end, rollouts and updates included": round(
                (stages_s + safe.exposed_s()) / (stages_s + mine.exposed_s()), 3
            ),
            "paper": PAPER,
        },
        "moves_pay_after_iterations_of_each_dimension": _pays_after(mine, safe),
        "ingestion_share_of_conduits_iterations": round(_pushed_share(mine), 3),
        "why": WHY,
        "contenders": {name: _told(each) for name, each in runs.items()},
    }


def _pays_after(mine: Run, other: Run) -> int:
    """How many iterations of each dimension it takes until what Conduit saves is more than what its moves took longer."""
    longer_s = sum(each.waited_s for each in mine.growths) - sum(each.waited_s for each in other.growths)
    saved_s = sum(other.usual_s(d) - mine.usual_s(d) for d in dict.fromkeys(each.dimension for each in mine.iterations))
    return math.ceil(longer_s / saved_s)


def _pushed_share(run: Run) -> float:
    usual = [each for each in run.iterations if not each.grew]
    return sum(each.pushed_s for each in usual) / sum(each.exposed_s for each in usual)


def _pulled_s(run: Run) -> float:
    return sum(each.pulled_s for each in run.iterations if not each.grew)


def _told(run: Run) -> dict[str, Any]:
    whole_s = run.exposed_s() + len(run.iterations) * (ROLLOUT_S + UPDATE_S)
    return {
        "iterations": len(run.iterations),
        "out_of_memory": run.out_of_memory or None,
        "exposed_s": round(run.exposed_s(), 6),
        "usual_us_by_dimension": {
            str(d): round(run.usual_s(d) * 1e6, 2) for d in dict.fromkeys(each.dimension for each in run.iterations)
        },
        "growths": [_growth(each, whole_s) for each in run.growths],
        "moves_share_of_run": round(sum(each.waited_s for each in run.growths) / whole_s, 4),
        "pauses_share_of_run": round(sum(each.migrated.pause_s for each in run.growths) / whole_s, 6),
        "exposed_us": [round(each.exposed_s * 1e6, 2) for each in run.iterations],
    }


def _growth(each: Growth, whole_s: float) -> dict[str, Any]:
    moved = each.migrated
    return {
        "iteration": each.iteration,
        "to_dimension": each.dimension,
        "before": list(map(str, moved.before.endpoints if moved.before else ())),
        "after": list(map(str, moved.after.endpoints)),
        "moved_gb": round(moved.moved_bytes * UNIT / 1e9, 3),
        "least_gb": round(moved.least_bytes * UNIT / 1e9, 3),
        "copied_gb": round((moved.precopied_bytes + moved.delta_bytes) * UNIT / 1e9, 3),
        "seconds": round(moved.seconds, 6),
        "predicted_s": None if moved.predicted_s is None else round(moved.predicted_s, 6),
        "pause_us": round(moved.pause_s * 1e6, 2),
        "delta_rows": round(moved.delta_bytes / row_bytes(DIMENSIONS[DIMENSIONS.index(each.dimension) - 1])),
        "pause_share_of_run": round(moved.pause_s / whole_s, 8),
        "actor_waited_s": round(each.waited_s, 6),
        "meanwhile": {
            "pulls": len(each.pulls_s),
            "longest_pull_us": round(max(each.pulls_s, default=0.0) * 1e6, 2),
            "pushes": len(each.pushes_s),
            "longest_push_us": round(max(each.pushes_s, default=0.0) * 1e6, 2),
        },
    }


STYLES = {
    "Greedy": ("#56B4E9", "^", "Greedy: one GPU"),
    "Conservative": ("#0072B2", "o", "Conservative: all 8 GPUs, evenly"),
    "Conduit": ("#000000", "s", 'Conduit: placement="auto"'),
}
"""Okabe and Ito's colours, which colour-blind people tell apart; markers say the same once more."""


def draw(runs: Mapping[str, Run]) -> str:
    """Writes the figure; where to."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(12, 8.4), layout="constrained")
    panels = figure.subplot_mosaic([["each", "each"], ["with moves", "without"]], height_ratios=(1.5, 1))
    top = panels["each"]
    for name, (colour, marker, label) in STYLES.items():
        each = runs[name]
        exposed_ms = [one.exposed_s * 1e3 for one in each.iterations]
        usual_ms = [each.usual_s(one.dimension) * 1e3 for one in each.iterations]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.3, "label": label}
        if name == "Greedy":  # under Conduit, which is the same as long as it lasts
            look |= {"markersize": 9, "markerfacecolor": "none", "linewidth": 3, "alpha": 0.9}
        shown = {"each": exposed_ms, "with moves": np.cumsum(exposed_ms), "without": np.cumsum(usual_ms)}
        for panel, values in shown.items():
            panels[panel].plot(values, **look)
            if each.out_of_memory:
                at = (len(values), values[-1])
                panels[panel].plot(*at, "X", color=colour, markersize=12, markeredgecolor="#333333")
                panels[panel].annotate("out of memory", at, (9, -3), textcoords="offset points", fontsize=8)
    for growth in runs["Conduit"].growths:
        moved = growth.migrated
        told = (
            f"{growth.waited_s * 1e3:,.0f} ms, {moved.moved_bytes * UNIT / 1e9:,.0f} GB crossed,\nto {len(moved.after.endpoints)} GPU(s);\n"
            f"pause {moved.pause_s * 1e3:.2f} ms,\nlongest pull {max(growth.pulls_s) * 1e3:.2f} ms"
        )
        top.annotate(told, (growth.iteration, growth.waited_s * 1e3), (5, 6), textcoords="offset points", fontsize=8)
    for axes in panels.values():
        for number in range(1, len(DIMENSIONS)):
            axes.axvline(number * EACH - 0.5, color="#666666", linewidth=1, linestyle=":")
        axes.grid(alpha=0.3)
        axes.set_xlabel("iteration")
    for number, dimension in enumerate(DIMENSIONS):
        middle = (number + 0.5) * EACH - 0.5
        top.text(middle, 1.01, f"d = {dimension:,}", transform=top.get_xaxis_transform(), ha="center", fontsize=10)
    top.set_yscale("log")
    top.set_ylim(top=top.get_ylim()[1] * 8)
    top.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    top.set_ylabel("exposed ms of an iteration, emulated")
    top.legend(fontsize=9, loc="lower right")
    panels["with moves"].set_ylabel("exposed ms until then, emulated")
    panels["with moves"].set_title("moves included: the actor that pushes wider rows waits for them", fontsize=10)
    panels["without"].set_title("moves left out", fontsize=10)
    figure.suptitle(
        "Rows that grow: 8 × A100 emulated on the virtual clock, 10⁶ rows; no hardware was measured", fontsize=11
    )
    path = RESULTS / "migration.png"
    figure.savefig(path, dpi=130)
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    capacity = CAPACITY // 10 if asked.quick else CAPACITY
    topology = preset("a100x8")
    found = measured(topology)
    print(TOLD)
    runs = {
        NAMES[name]: run(topology, found, placement, capacity=capacity)
        for name, placement in contenders(topology).items()
        if name in NAMES
    }
    told = figures(runs)
    for name, each in told["contenders"].items():
        usual = ", ".join(f"{us:,.1f} at d = {int(d):,}" for d, us in each["usual_us_by_dimension"].items())
        print(
            f"{name}: exposed {each['exposed_s'] * 1e3:,.1f} ms in {each['iterations']} iterations; µs of one that doesn't grow: {usual}"
        )
        for growth in each["growths"]:
            predicted = "" if growth["predicted_s"] is None else f" (predicted {growth['predicted_s'] * 1e3:,.1f})"
            print(
                f"  d = {growth['to_dimension']:,} on {len(growth['after'])} GPU(s): {growth['seconds'] * 1e3:,.1f} ms{predicted}, "
                f"pause {growth['pause_us']} µs, {growth['moved_gb']} GB crossed ({growth['least_gb']} at least); meanwhile {growth['meanwhile']}"
            )
        if each["out_of_memory"]:
            print(f"  out of memory: {each['out_of_memory']}")
        print(f"  moves are {each['moves_share_of_run']:.1%} of the run, pauses {each['pauses_share_of_run']:.4%}")
    print(f"Conservative's cumulative latency over Conduit's: {told['cumulative_ratio_to_conservative']}")
    print(
        f"Conduit's moves pay after {told['moves_pay_after_iterations_of_each_dimension']:,} iterations of each dimension; "
        f"{told['ingestion_share_of_conduits_iterations']:.0%} of its others are ingestion"
    )
    print(f"Why it differs from the paper's: {WHY}")
    wrong = complaints(topology, runs)
    if not asked.quick:
        coarse = run(topology, found, "auto", capacity=capacity, chunk_bytes=CHUNK_BYTES)
        moves_s = {
            name: sum(each.waited_s for each in one.growths)
            for name, one in (("as they are", runs["Conduit"]), ("100 times as large", coarse))
        }
        print(
            f"Conduit's moves with chunks {', '.join(f'{name}: {each_s * 1e3:,.1f} ms' for name, each_s in moves_s.items())}"
        )
        print(
            save(
                "migration",
                {
                    "figures": TOLD,
                    "capacity": CAPACITY,
                    "batch": BATCH,
                    "replay_ratio": REPLAY_RATIO,
                    "unit_bytes": UNIT,
                    "rollout_s": ROLLOUT_S,
                    "update_s": UPDATE_S,
                    "dimensions": DIMENSIONS,
                    "moves_s_by_chunk": moves_s,
                    **told,
                },
            )
        )
        print(draw(runs))
    for each in wrong:
        print(each)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
