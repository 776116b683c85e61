"""What of the experience path shows in an iteration, by granularity and timing (paper Fig. 14). Emulated on the virtual clock, and apart from that
measured on this CPU.

    python benchmarks/scheduling.py [--quick]

An iteration: a rollout, a push of an eighth of a batch, a pull, an update; both stages are sleeps of 10 ms, a device at work. Rows of obs and
next_obs, d floats each, reward and action. Exposed is what the loop waits for the store: an iteration's seconds less its stages'.

- left: batches of 32 to 1,024 at d = 1,000, in line, g = g_ing = g_del of 1, 2, 4, 8
- middle: d = 128 to 10,000 at batches of 512, the same
- right: g = 1 in line and behind the stages; and behind stages of 0.1 ms, which at large d are shorter than what they hide

Emulated: a100x8 with placement="auto" (the fastest that fits), 10^6 rows, one learner on the first device; rows, machine and units of bytes are those of
`placement.py`. "In line" waits after each push until its rows have arrived, as its thread would; else the emulated machine copies on its own.

The baselines are not Reverb and not Gear. Each is this very store where these keep their rows and as they are asked: in line, one batch for each
request (g = 1), rows in pageable host memory ("Reverb-like") or in pinned ("Gear-like"). A server's processes, serialization and threads aren't in it,
so it says what timing, granularity and place alone are worth.

Measured: host memory, real rows of the same d. There is only one place, so the request-driven baseline is the store itself in line at g = 1.
Stores take turns, medians over blocks of eight iterations. And how long the pull of a batch takes that is staged already.

`--quick`: two sizes a panel, few iterations; nothing is saved."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from measure import RESULTS, save
from peers.workloads import rows_of as rows_of_kind
from placement import CAPACITY, FILL, contenders, fill, in_units, measured, rows_of, unit_of
from stages import stage

import conduit
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import REAL, Clock, VirtualClock
from conduit.core.placement import Asked
from conduit.topology import Topology, preset

BATCHES, AT_DIMENSION = (32, 64, 128, 256, 512, 1024), 1000
DIMENSIONS, AT_BATCH = (128, 500, 1000, 2000, 5000, 10_000), 512
GRANULARITIES = (1, 2, 4, 8)
REPLAY_RATIO = 8
STAGE_S, SHORT_S = 10e-3, 0.1e-3
BLOCK, BLOCKS, WARM_UP = 8, 6, 1
"""Iterations of a block, a whole number of groups at every g; blocks; and blocks before."""
HOST_BYTES = 256 << 20
"""About so much a measured store holds."""
PULLS, PULL_STAGE_S, TARGET_US = 2000, 2e-3, 50.0
BASELINES = {"Reverb-like": "pageable", "Gear-like": "pinned"}
IN_LINE = conduit.Schedule(g_ing=1, g_del=1)
BEHIND = conduit.Schedule(True, 1, True, 1)
PAPER = {
    "left": "1.87 ms at g = 2 to 0.57 ms at g = 8 at batch 1,024",
    "middle": "at d = 10,000 the best is g = 4 (2.33 ms); g = 8 takes 3.67 ms",
    "right": "g = 1 in line from 3.12 ms at d = 128 to 7.83 ms at d = 10,000; most of it hidden with overlap",
}
TOLD = {
    "emulated": "emulated: the a100x8 preset on the virtual clock; no hardware was measured",
    "measured": "measured on this CPU, host memory; stages are sleeps",
}
WHY = {
    "emulated": (
        "g saves latencies of 2 to 10 µs, and nothing else costs anything on a virtual clock: most of a small batch's cost, and next to nothing where bytes "
        "take longer. The paper's milliseconds a request (launches, processes, ranks) aren't modelled, nor what made its g = 8 slower at d = 10,000"
    ),
    "measured": (
        "a call that follows a stage finds code and data gone from the caches, which is most of a small batch's cost; with g = 8, seven of eight calls find "
        "their batch made, or leave their rows to the eighth. Of wide rows bytes are all the cost, and more g costs more: rows that wait for their group are "
        "copied to do so, and batches of a group are more than caches hold. There as in the paper, less g is better, if for other reasons"
    ),
}


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds an iteration. `pushed_s`, `pulled_s`: what the calls took, and where it is emulated in line, what then was still on its way.
    `exposed_s`: all that wasn't a stage. Medians over blocks; `spread_s`: from their first quartile to the third."""

    pushed_s: float
    pulled_s: float
    exposed_s: float
    spread_s: float


class Loop:
    """A store and what trains with it, block by block of iterations."""

    def __init__(
        self,
        store: conduit.Store,
        clock: Clock,
        learner: conduit.Learner,
        step: Mapping[str, np.ndarray],
        stage_s: float = STAGE_S,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        """`drain`: what an iteration in line waits for as well."""
        self.store = store
        self._now, self._learner, self._drain = clock.now, learner, drain
        self._step, self._actor = dict(step), store.actor(len(step["obs"]))
        self._rollout, self._update = (stage("sleep", stage_s, clock) for _ in range(2))
        self._blocks: list[tuple[float, float, float]] = []

    def block(self, iterations: int = BLOCK) -> None:
        now, drain = self._now, self._drain
        began_s, stages_s, pushed_s, pulled_s = now(), 0.0, 0.0, 0.0
        for _ in range(iterations):
            rollout_s = now()
            with self.store.rollout():
                self._rollout()
            push_s = now()
            self._actor.push(self._step)
            drain()
            pull_s = now()
            batch = self._learner.pull()
            drain()
            update_s = now()
            with self.store.update():
                self._update()
            del batch
            stages_s += push_s - rollout_s + now() - update_s
            pushed_s += pull_s - push_s
            pulled_s += update_s - pull_s
        exposed_s = now() - began_s - stages_s
        self._blocks.append((pushed_s / iterations, pulled_s / iterations, exposed_s / iterations))

    def point(self, warm_up: int = WARM_UP) -> Point:
        pushed, pulled, exposed = zip(*self._blocks[warm_up:], strict=True)
        low, _, high = statistics.quantiles(exposed, n=4) if len(exposed) > 1 else (0.0, 0.0, 0.0)
        return Point(statistics.median(pushed), statistics.median(pulled), statistics.median(exposed), high - low)


def emulated(
    topology: Topology,
    found: Topology,
    dimension: int,
    batch: int,
    placement: Asked,
    schedule: conduit.Schedule,
    stage_s: float = STAGE_S,
    blocks: int = 1,
    capacity: int = CAPACITY,
) -> Point:
    """`topology`: the machine; `found`: what is known of it."""
    unit = unit_of(dimension)
    clock = VirtualClock(max_events=10**8)
    backend = EmulatedBackend(in_units(topology, unit, capacity), clock=clock)
    in_line = not (schedule.overlap_ing or schedule.overlap_del)

    def main() -> Point:
        with conduit.Store(
            backend=backend,
            clock=clock,
            topology=in_units(found, unit, capacity),
            placement=placement,
            capacity=capacity,
            batch_size=batch,
            schedule=schedule,
            # The loop keeps to the ratio; from this the store knows it.
            limiter=conduit.SampleToInsertRatio(REPLAY_RATIO, batch, 4 * REPLAY_RATIO * capacity),
        ) as store:
            learner = store.learner(to="torch", device=topology.devices[0])
            fill(store, rows_of(min(FILL, capacity)), capacity)
            backend.drain()
            drain = backend.drain if in_line else lambda: None
            loop = Loop(store, clock, learner, rows_of(batch // REPLAY_RATIO), stage_s, drain)
            for _ in range(WARM_UP + blocks):
                loop.block()
        return loop.point()

    return clock.run(main)


def host_rows(dimension: int, count: int) -> dict[str, np.ndarray]:
    wide, one = np.ones((count, dimension), np.float32), np.ones(count, np.float32)
    return {"obs": wide, "next_obs": wide, "reward": one, "action": one}


def on_host(
    cases: Mapping[str, tuple[int, int, conduit.Schedule, float]], blocks: int = BLOCKS, seed: int = 0
) -> dict[str, Point]:
    """Of each case (dimension, batch, schedule, seconds of a stage), in turns."""
    loops: dict[str, Loop] = {}
    for name, (dimension, batch, schedule, stage_s) in cases.items():
        capacity = max(2 * batch, min(100_000, HOST_BYTES // (8 * dimension + 8)))
        store = conduit.Store(placement="pageable", capacity=capacity, batch_size=batch, schedule=schedule)
        block = host_rows(dimension, min(capacity, 512))
        fill(store, block, capacity)
        loops[name] = Loop(store, REAL, store.learner(), host_rows(dimension, batch // REPLAY_RATIO), stage_s)
    shuffle, names = random.Random(seed), list(loops)
    try:
        for _ in range(WARM_UP + blocks):
            shuffle.shuffle(names)
            for name in names:
                loops[name].block()
        return {name: loops[name].point() for name in cases}
    finally:
        for loop in loops.values():
            loop.store.close()


Panel = dict[str, dict[int, Point]]
"""By contender and size."""


def granular(g: int) -> conduit.Schedule:
    return replace(IN_LINE, g_ing=g, g_del=g)


RIGHT = {
    "g = 1, in line": (IN_LINE, STAGE_S),
    "g = 1, behind": (BEHIND, STAGE_S),
    "g = 1, behind 0.1 ms": (BEHIND, SHORT_S),
}


def emulated_panels(
    topology: Topology,
    found: Topology,
    batches: Sequence[int] = BATCHES,
    dimensions: Sequence[int] = DIMENSIONS,
    granularities: Sequence[int] = GRANULARITIES,
    blocks: int = 1,
    capacity: int = CAPACITY,
) -> dict[str, Panel]:
    def point(d: int, batch: int, placement: Asked, schedule: conduit.Schedule, stage_s: float = STAGE_S) -> Point:
        return emulated(topology, found, d, batch, placement, schedule, stage_s, blocks, capacity)

    where = contenders(topology)
    sizes = {"left": [(AT_DIMENSION, b) for b in batches], "middle": [(d, AT_BATCH) for d in dimensions]}
    panels: dict[str, Panel] = {"left": {}, "middle": {}, "right": {}}
    for name, cases in sizes.items():
        for at, (d, batch) in zip(batches if name == "left" else dimensions, cases, strict=True):
            for label, kind in BASELINES.items():
                panels[name].setdefault(label, {})[at] = point(d, batch, where[kind], IN_LINE)
            for g in granularities:
                panels[name].setdefault(f"g = {g}", {})[at] = point(d, batch, "auto", granular(g))
    panels["right"] = {label: panels["middle"][label] for label in BASELINES}
    panels["right"] |= {
        label: {d: point(d, AT_BATCH, "auto", schedule, stage_s) for d in dimensions}
        for label, (schedule, stage_s) in RIGHT.items()
    }
    return panels


def measured_panels(
    batches: Sequence[int] = BATCHES, dimensions: Sequence[int] = DIMENSIONS, blocks: int = BLOCKS
) -> dict[str, Panel]:
    by_g = {f"g = {g}": (granular(g), STAGE_S) for g in GRANULARITIES}
    # In line at g = 1, the right panel's is the middle's.
    behind = {label: each for label, each in RIGHT.items() if each[0] is BEHIND}
    panels: dict[str, Panel] = {"left": {}, "middle": {}, "right": {}}
    for batch in batches:
        for label, point in on_host({at: (AT_DIMENSION, batch, *each) for at, each in by_g.items()}, blocks).items():
            panels["left"].setdefault(label, {})[batch] = point
    for d in dimensions:
        cases = {label: (d, AT_BATCH, *each) for label, each in (by_g | behind).items()}
        for label, point in on_host(cases, blocks).items():
            panels["right" if label in behind else "middle"].setdefault(label, {})[d] = point
    panels["right"] = {"g = 1, in line": panels["middle"]["g = 1"], **panels["right"]}
    return panels


def staged_pulls(kind: str, batch: int, schedule: conduit.Schedule, pulls: int = PULLS) -> dict[str, float]:
    """µs of a pull whose batch was staged before it, behind a stage that sleeps; and of one that wasn't: in line all of them."""
    rows = rows_of_kind(kind, 2000)
    with conduit.Store(capacity=50_000, batch_size=batch, schedule=schedule) as store:
        filler = store.actor(2000)
        for _ in range(25):
            filler.push(rows)
        learner, update = store.learner(), stage("sleep", PULL_STAGE_S)
        taken: dict[bool, list[float]] = {True: [], False: []}
        for number in range(50 + pulls):
            with store.update():
                update()
            is_staged = learner.staged > 0
            began_s = time.perf_counter()
            learner.pull()
            took_s = time.perf_counter() - began_s
            if number >= 50:
                taken[is_staged].append(took_s)
    some = taken[True] if schedule.overlap_del else taken[False]
    return {
        "p50_us": round(statistics.median(some) * 1e6, 1),
        "p99_us": round(statistics.quantiles(some, n=100)[98] * 1e6, 1),
        "pulls": len(some),
        "others": pulls - len(some),
    }


def all_staged_pulls(pulls: int = PULLS) -> dict[str, dict[str, dict[str, float]]]:
    schedules = {"in line": IN_LINE, "staged": conduit.Schedule(overlap_del=True, g_del=1)}
    return {
        f"{kind} × {batch}": {name: staged_pulls(kind, batch, schedule, pulls) for name, schedule in schedules.items()}
        for kind, batch in (("41 B", 256), ("4 KB", 512))
    }


COLOURS = {
    "Reverb-like": ("#D55E00", "s"),
    "Gear-like": ("#E69F00", "D"),
    "g = 1": ("#000000", "o"),
    "g = 2": ("#56B4E9", "^"),
    "g = 4": ("#0072B2", "v"),
    "g = 8": ("#009E73", "P"),
    "g = 1, in line": ("#000000", "o"),
    "g = 1, behind": ("#CC79A7", "X"),
    "g = 1, behind 0.1 ms": ("#CC79A7", "x"),
}
"""Okabe and Ito's, which colour-blind people tell apart."""
TITLES = {
    "left": f"in line, d = {AT_DIMENSION:,}",
    "middle": f"in line, batches of {AT_BATCH}",
    "right": f"timing, batches of {AT_BATCH}, g = 1",
}


def draw(shown: Mapping[str, Mapping[str, Panel]]) -> str:
    """Writes the figure, a row for each of "emulated" and "measured"; where to."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(14, 8.6), layout="constrained")
    rows = figure.subplots(len(shown), 3, sharey="row")
    for row, (how, panels) in zip(rows, shown.items(), strict=True):
        above_0 = [p.exposed_s for each in panels.values() for by in each.values() for p in by.values() if p.exposed_s]
        floor_ms = min(above_0) * 1e3 / 2
        for axes, (name, panel) in zip(row, panels.items(), strict=True):
            sizes = list(next(iter(panel.values())))
            for label, points in panel.items():
                colour, marker = COLOURS[label]
                ms = [max(point.exposed_s * 1e3, floor_ms) for point in points.values()]
                dashed = "--" if label in BASELINES else ":" if label.endswith("0.1 ms") else "-"
                axes.plot(sizes, ms, dashed, color=colour, marker=marker, markersize=5, linewidth=1.4, label=label)
                if not any(point.exposed_s for point in points.values()):
                    told = "at the bottom: 0 ms, all of it hidden"
                    axes.text(sizes[0], floor_ms * 1.1, told, fontsize=8, color=colour, va="bottom")
            axes.set_title(f"{how}: {TITLES[name]}", fontsize=10)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.xaxis.set_major_locator(FixedLocator(sizes))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda ms, _: f"{ms:g}" if f"{ms:e}"[0] in "25" else ""))
            axes.tick_params(axis="x", labelsize=8)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
            axes.set_xlabel("batch size" if name == "left" else "transition dimension d: a row has 8 (d + 1) bytes")
        row[0].set_ylabel(f"exposed ms an iteration, {how}")
    figure.suptitle(
        "Exposed experience path by granularity and timing. Above: emulated a100x8 on the virtual clock, no hardware measured; below: this CPU, host memory",
        fontsize=11,
    )
    path = RESULTS / "scheduling.png"
    figure.savefig(path, dpi=130)
    return str(path)


def figures(panels: Mapping[str, Panel]) -> dict[str, Any]:
    """In milliseconds an iteration."""
    return {
        name: {
            label: {
                str(size): {
                    key: round(getattr(point, f"{key}_s") * 1e3, 5) for key in ("exposed", "pushed", "pulled", "spread")
                }
                for size, point in points.items()
            }
            for label, points in panel.items()
        }
        for name, panel in panels.items()
    }


def summary(panels: Mapping[str, Panel]) -> dict[str, dict[str, float]]:
    """How many times as much shows at g = 1 as at g = 8, and which part of it overlap hides; by size."""
    told = {
        f"g = 1 over g = 8, {TITLES[name]}": {
            str(size): round(panels[name]["g = 1"][size].exposed_s / point.exposed_s, 2)
            for size, point in panels[name]["g = 8"].items()
        }
        for name in ("left", "middle")
    }
    right = panels["right"]
    told["hidden behind stages of 10 ms, by d"] = {
        str(d): round(1 - point.exposed_s / right["g = 1, in line"][d].exposed_s, 4)
        for d, point in right["g = 1, behind"].items()
    }
    return told


def _print(how: str, panels: Mapping[str, Panel]) -> None:
    print(f"Exposed ms an iteration; {TOLD[how]}")
    for name, panel in panels.items():
        sizes = list(next(iter(panel.values())))
        print(
            f"  {TITLES[name]:34} {'batch' if name == 'left' else 'd':>5} {''.join(f'{size:>10,}' for size in sizes)}"
        )
        for label, points in panel.items():
            print(f"  {label:40} {''.join(f'{point.exposed_s * 1e3:10.4f}' for point in points.values())}")
    for what, by_size in summary(panels).items():
        print(f"  {what}: {by_size}")
    print(f"  Beside the paper's: {WHY[how]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    topology = preset("a100x8")
    batches, dimensions = (BATCHES[::5], DIMENSIONS[::5]) if asked.quick else (BATCHES, DIMENSIONS)
    panels = emulated_panels(topology, measured(topology), batches, dimensions)
    _print("emulated", panels)
    here = measured_panels(batches, dimensions, 2 if asked.quick else BLOCKS)
    _print("measured", here)
    pulls = all_staged_pulls(200 if asked.quick else PULLS)
    for name, each in pulls.items():
        print(f"A pull of {name}, measured on this CPU: {each} (target: staged in under {TARGET_US:g} µs, median)")
    if not asked.quick:
        told = {
            "figures": TOLD,
            "capacity": {"emulated": CAPACITY, "measured_bytes": HOST_BYTES},
            "replay_ratio": REPLAY_RATIO,
            "stages_ms": {"rollout": STAGE_S * 1e3, "update": STAGE_S * 1e3, "short": SHORT_S * 1e3},
            "baselines": "this store in line at g = 1 with its rows in pageable or pinned memory; no server, no serialization",
            "paper": PAPER,
            "why_they_differ": WHY,
            "summary": {"emulated": summary(panels), "measured": summary(here)},
            "emulated_ms": figures(panels),
            "measured_ms": figures(here),
            "pulls_measured": {"target_us": TARGET_US, "stage_ms": PULL_STAGE_S * 1e3, **pulls},
        }
        print(save("scheduling", told))
        print(draw({"emulated": panels, "measured": here}))


if __name__ == "__main__":
    main()
