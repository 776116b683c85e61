"""Where rows live against what an iteration's experience path costs, by the size of a row (paper Fig. 12). Emulated, on the virtual clock.

    python benchmarks/placement.py [--quick]

A machine of eight A100 that isn't here: the a100x8 preset behind `EmulatedBackend`. 10^6 rows of obs and next_obs, d floats each, reward and
action: 8 (d + 1) bytes, so that of d = 10,000 they are 80.0 GB, and an 80 GB device has 79 free. Batches of 512 rows, to one learner on the
first device, or to eight, one on each, in threads of their own. An iteration: a push of as many rows as the replay ratio says, then a
batch to every learner. Nothing else runs, and each half ends before the next begins (the paper's timing without overlap), so all of it is exposed.

All contenders are the same public Store, and differ in `placement=` alone: pageable host memory, which is where Reverb keeps rows; pinned, where
Gear does; the first device; all eight, evenly; and "auto", which chooses by what `conduit.topology.probe` measured on the emulated machine,
never by the preset. Where there is no room, a real CapacityError says so.

Such rows don't fit here, so the unit of bytes is another: a row is 168 bytes that stand for 8 (d + 1), and every memory, bandwidth and measured
bandwidth is as many times smaller. Rows, batches, blocks, latencies, and with them all times, are those of the full size.

Reported apart: the same where nobody waits between a push and a pull (`flowing`); then the copies of one run beside those of the other.
`--quick`: few dimensions, one replay ratio, and nothing is saved."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from fabric import slowed
from measure import RESULTS, save

import conduit
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import VirtualClock
from conduit.core.placement import Asked, Placement
from conduit.core.placement_map import PlacementMap
from conduit.core.probing import known, timings_of
from conduit.core.transfer_time import delivery_s, ingestion_s
from conduit.core.workload import Workload
from conduit.errors import CapacityError
from conduit.topology import Tier, Topology, preset, probe
from conduit.topology.endpoint import PAGEABLE

DIMENSIONS = (128, 1000, 2000, 5000, 10_000, 20_000)
CAPACITY, BATCH = 10**6, 512
LEARNERS, RATIOS = (1, 8), (8.0, 1.0)
FLOATS = 20
"""Of an observation, really; they stand for d."""
ITERATIONS, FILL = 16, 10_000
PROBED_SIZES = (1 << 16, 1 << 20)
WITHIN, NOISE_S = 0.02, 10e-6
"""Of the fastest other contender, whichever is more. To a plan, placements within 1 % are alike, and it takes the one over fewer devices. And it counts
one latency for each edge, where a store has one for each run of rows that lie together, and none where flows share a link: at small d some
microseconds, less than one latency of 10 µs."""
KEPT_BACK = 0.025
"""At most, of a device, for a staged batch and for rows that are dealt in blocks."""
PAPER = {"pageable": 127.0, "pinned": 4.1}
"""How many times as fast Conduit is at d = 20,000 (paper §7.3)."""
CONDUIT = "Conduit"
TOLD = "emulated: the a100x8 preset on the virtual clock; no hardware was measured"
WHY = (
    "the paper's are whole systems: its Reverb is 31 times as slow as its Gear, and pageable memory here half as fast as pinned. Here all are one "
    "store, over bytes and bandwidths, and nothing is fitted. Every contender's rows are made in pageable memory, from where one thread copies them at "
    "12 GB/s wherever they go: no placement saves that"
)


@dataclass(frozen=True, slots=True)
class Point:
    """One placement at one dimension: emulated seconds an iteration, means. `predicted_…`: by the plan's model from what was measured.
    `flowing_s`: where nobody waits between push and pull. `rows`: by endpoint."""

    ingestion_s: float
    delivery_s: float
    flowing_s: float
    predicted_ingestion_s: float
    predicted_delivery_s: float
    rows: Mapping[str, int]

    @property
    def exposed_s(self) -> float:
        return self.ingestion_s + self.delivery_s

    @property
    def predicted_s(self) -> float:
        return self.predicted_ingestion_s + self.predicted_delivery_s


@dataclass(frozen=True, slots=True)
class Case:
    dimension: int
    learners: int
    replay_ratio: float


Points = Mapping[str, Point | str]
"""By contender; of one that has no room, what the error said."""


def contenders(topology: Topology) -> dict[str, Asked]:
    return {
        "pageable": "pageable",
        "pinned": "pinned",
        "single GPU": topology.devices[0],
        "shared GPU": topology.devices,
        CONDUIT: "auto",
    }


def measured(topology: Topology) -> Topology:
    """What the probe finds out about the emulated machine."""
    clock = VirtualClock()
    backend = EmulatedBackend(topology, clock=clock)

    def main() -> Topology:
        there = known(backend)
        in_memory = there.only(at for at in there.endpoints if at.tier is not Tier.DISK)
        with timings_of(backend, clock) as timings:
            return probe(in_memory, timings, sizes=PROBED_SIZES, repeats=3)

    return clock.run(main)


def row_bytes(dimension: int) -> int:
    return 4 * (2 * dimension + 2)


def in_units(topology: Topology, unit: float, capacity: int = CAPACITY) -> Topology:
    """The same where a byte stands for `unit` of them; for fewer rows than `CAPACITY`, with as much less memory."""
    return slowed(topology, unit).scaled(capacity / CAPACITY / unit)


def unit_of(dimension: int) -> float:
    """Bytes that one byte of a row stands for."""
    return row_bytes(dimension) / row_bytes(FLOATS)


def rows_of(count: int) -> dict[str, np.ndarray]:
    wide, one = np.zeros((count, FLOATS), np.float32), np.zeros(count, np.float32)
    return {"obs": wide, "next_obs": wide, "reward": one, "action": one}


def predicted(found: Topology, case: Case, placement: Placement, capacity: int) -> tuple[float, float]:
    """Ingestion and delivery, in seconds an iteration, at full size."""
    learners = found.devices[: case.learners]
    work = Workload(row_bytes(case.dimension), capacity, BATCH, (PAGEABLE,), learners, case.replay_ratio)
    rows = placement.rows(capacity)
    return ingestion_s(found, work, rows), delivery_s(found, work, rows)


def run(
    topology: Topology, found: Topology, case: Case, placement: Asked, iterations: int, capacity: int = CAPACITY
) -> Point | str:
    """One contender. `topology`: the machine; `found`: what is known of it."""
    unit = unit_of(case.dimension)
    clock = VirtualClock(max_events=10**8)
    backend = EmulatedBackend(in_units(topology, unit, capacity), clock=clock)
    pushed = round(BATCH * case.learners / case.replay_ratio)

    def main() -> Point:
        with conduit.Store(
            backend=backend,
            clock=clock,
            topology=in_units(found, unit, capacity),
            placement=placement,
            capacity=capacity,
            batch_size=BATCH,
            # The loop below keeps to the ratio; from this the store knows it.
            limiter=conduit.SampleToInsertRatio(case.replay_ratio, BATCH, 4 * case.replay_ratio * capacity),
        ) as store:
            learners = [
                store.learner(number, case.learners, to="torch", device=at)
                for number, at in enumerate(topology.devices[: case.learners])
            ]
            fill(store, rows_of(min(FILL, capacity)), capacity)
            actor, step = store.actor(pushed), rows_of(pushed)

            def iteration(flowing: bool) -> tuple[float, float]:
                began_s = clock.now()
                actor.push(step)
                if not flowing:
                    backend.drain()
                ingested_s = clock.now()
                together(clock, [learner.pull for learner in learners])
                backend.drain()
                return ingested_s - began_s, clock.now() - ingested_s

            backend.drain()
            taken_s = [iteration(flowing=False) for _ in range(iterations)]
            flowing_s = [sum(iteration(flowing=True)) for _ in range(iterations)]
            there = store.explain().placement if placement == "auto" else Placement.of(placement, backend.endpoints())
            assert there is not None
        ingestion, delivery = predicted(found, case, there, capacity)
        return Point(
            ingestion_s=statistics.fmean(ingested_s for ingested_s, _ in taken_s),
            delivery_s=statistics.fmean(delivered_s for _, delivered_s in taken_s),
            flowing_s=statistics.fmean(flowing_s),
            predicted_ingestion_s=ingestion,
            predicted_delivery_s=delivery,
            rows={str(at): rows for at, rows in there.rows(capacity).items()},
        )

    try:
        return clock.run(main)
    except CapacityError as error:
        return str(error)


def fill(store: conduit.Store, block: Mapping[str, np.ndarray], rows: int) -> None:
    lanes = len(block["obs"])
    actor = store.actor(lanes)
    for _ in range(-(-rows // lanes)):
        actor.push(block)
    actor.close()


def together(clock: VirtualClock, calls: Sequence[Callable[[], object]]) -> None:
    """Each in a thread of its own, where there are several."""
    if len(calls) == 1:
        calls[0]()
        return

    def made(call: Callable[[], object]) -> Callable[[], None]:
        def alone() -> None:
            call()

        return alone

    for task in [clock.spawn(made(call), f"learner {number}") for number, call in enumerate(calls)]:
        task.join()


def sweep(
    topology: Topology, found: Topology, cases: Sequence[Case], iterations: int, capacity: int = CAPACITY
) -> dict[Case, Points]:
    points: dict[Case, Points] = {}
    for case in cases:
        points[case] = {
            name: run(topology, found, case, placement, iterations, capacity)
            for name, placement in contenders(topology).items()
        }
        print(_line(case, points[case]), flush=True)
    return points


def over_envelope(points: Points, seconds: Callable[[Point], float]) -> tuple[float, float]:
    """How many seconds Conduit takes more than the fastest of the others, and which part of it that is; negative where it is the fastest."""
    mine = points[CONDUIT]
    if not isinstance(mine, Point):
        return float("inf"), float("inf")
    best_s = min(seconds(each) for name, each in points.items() if isinstance(each, Point) and name != CONDUIT)
    return seconds(mine) - best_s, seconds(mine) / best_s - 1


def ratios(points: Points) -> dict[str, dict[str, float]]:
    """How many times as fast as each other contender Conduit is: of all, and of delivery alone."""
    mine = points[CONDUIT]
    assert isinstance(mine, Point)
    return {
        name: {
            "exposed": round(each.exposed_s / mine.exposed_s, 2),
            "delivery": round(each.delivery_s / mine.delivery_s, 2),
        }
        for name, each in points.items()
        if isinstance(each, Point) and name != CONDUIT
    }


def chosen(topology: Topology, found: Topology, dimension: int, capacity: int = CAPACITY) -> int:
    """On how many endpoints a store with placement="auto" puts its rows, for one learner."""
    unit = unit_of(dimension)
    clock = VirtualClock()
    backend = EmulatedBackend(in_units(topology, unit, capacity), clock=clock)

    def main() -> int:
        with conduit.Store(
            backend=backend, clock=clock, topology=in_units(found, unit, capacity), capacity=capacity, batch_size=BATCH
        ) as store:
            store.learner(to="torch", device=topology.devices[0])
            store.actor(BATCH).push(rows_of(BATCH))
            there = store.explain().placement
            assert there is not None
            return len(there.endpoints)

    return clock.run(main)


def switch(topology: Topology, found: Topology, capacity: int = CAPACITY) -> dict[str, int]:
    """The largest d of which rows, and a batch, fit on one device; and up to which Conduit puts them there, found with stores, to a
    thousandth."""
    room = found.memory(found.devices[0]).free_bytes * capacity // CAPACITY
    last = room // (capacity + BATCH) // 8 - 1
    low, high = round(last * (1 - KEPT_BACK)), round(last * 1.002)
    if chosen(topology, found, low, capacity) != 1 or chosen(topology, found, high, capacity) == 1:
        return {"bytes_say_up_to_d": last, "conduit_up_to_d": -1}
    while high - low > last / 1000:
        middle = (low + high) // 2
        low, high = (middle, high) if chosen(topology, found, middle, capacity) == 1 else (low, middle)
    return {"bytes_say_up_to_d": last, "conduit_up_to_d": low}


def regimes(found: Topology, learners: int, ratio: float) -> list[dict[str, Any]]:
    """Which placements the plan has for all dimensions in between, at full size. A model's: no store is asked."""
    sizes = row_bytes(DIMENSIONS[0]), row_bytes(DIMENSIONS[-1])
    work = Workload(sizes[0], CAPACITY, BATCH, (PAGEABLE,), found.devices[:learners], ratio)
    return [
        {
            "d_up_to": each.last // 8 - 1,
            "kind": each.kind,
            "rows": {} if each.placement is None else {str(at): n for at, n in each.placement.rows(CAPACITY).items()},
        }
        for each in PlacementMap.sweep(found, work, sizes).regions
    ]


def complaints(points: Mapping[Case, Points], switched: Mapping[str, int]) -> list[str]:
    """What isn't as it should be."""
    found = []
    for case, each in points.items():
        over_s, part = over_envelope(each, lambda point: point.exposed_s)
        if part > WITHIN and over_s > NOISE_S:
            found.append(
                f"{case}: Conduit is {100 * part:.1f} % ({over_s * 1e6:.1f} µs) above the fastest of the others"
            )
    if switched["conduit_up_to_d"] < 0:
        found.append(
            f"one device holds d up to {switched['bytes_say_up_to_d']:,}, and Conduit doesn't leave it within {KEPT_BACK:.1%} below"
        )
    return found


def mispredicted(points: Mapping[Case, Points]) -> tuple[float, float]:
    """How far plans are off what stores then took: the most seconds at the smallest d, and the largest part at all others."""
    smallest = min(case.dimension for case in points)
    known = [(case, each) for case, some in points.items() for each in some.values() if isinstance(each, Point)]
    return (
        max(abs(each.predicted_s - each.exposed_s) for case, each in known if case.dimension == smallest),
        max(abs(each.predicted_s / each.exposed_s - 1) for case, each in known if case.dimension > smallest),
    )


STYLES = {
    "pageable": ("#D55E00", "s", "pageable host (Reverb's)"),
    "pinned": ("#E69F00", "D", "pinned host (Gear's)"),
    "single GPU": ("#56B4E9", "^", "single GPU"),
    "shared GPU": ("#0072B2", "o", "shared GPU (all 8, evenly)"),
    CONDUIT: ("#000000", "o", 'Conduit: placement="auto"'),
}
"""Okabe and Ito's colours, which colour-blind people tell apart; markers say the same once more."""


def draw(points: Mapping[Case, Points], boundary: int) -> str:
    """Writes the figure; where to."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(12, 8.4), layout="constrained")
    panels = figure.subplots(2, 2, height_ratios=(2, 1), sharex=True)
    for row, ratio in zip(panels, RATIOS, strict=True):
        for axes, count in zip(row, LEARNERS, strict=True):
            here = {
                case.dimension: each
                for case, each in points.items()
                if (case.learners, case.replay_ratio) == (count, ratio)
            }
            main = ratio == RATIOS[0]
            _draw_panel(axes, here, relative=not main)
            axes.axvline(boundary, color="#666666", linewidth=1, linestyle=":")
            learners = "1 learner, on device 0" if count == 1 else f"{count} learners, one on each device"
            axes.set_title(f"{learners}; replay ratio {ratio:g}", fontsize=10)
            axes.grid(alpha=0.3)
            axes.set_xscale("log")
            axes.set_xlim(100, 75_000)
            axes.xaxis.set_major_locator(FixedLocator(DIMENSIONS))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda d, _: f"{d:,.0f}"))
            axes.xaxis.set_minor_locator(NullLocator())
            if main:
                at_bottom = {"transform": axes.get_xaxis_transform(), "va": "bottom", "fontsize": 8}
                axes.text(
                    boundary * 0.95, 0.02, f"one 80 GB device\nis full: d = {boundary:,} →", ha="right", **at_bottom
                )
                axes.set_yscale("log")
                axes.set_ylim(top=axes.get_ylim()[1] * 4)
                axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
                _note_ratios(axes, here)
            else:
                low, high = axes.get_ylim()
                axes.set_ylim(low, high + 0.15 * (high - low))
    panels[0, 0].set_ylabel("exposed ms an iteration, emulated")
    panels[1, 0].set_ylabel("times the fastest contender's")
    for axes in panels[-1]:
        axes.set_xlabel("transition dimension d: a row has 8 (d + 1) bytes")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    figure.suptitle(
        "Experience path by placement: 8 × A100 emulated on the virtual clock, 10⁶ rows, batches of 512; no hardware was measured",
        fontsize=11,
    )
    path = RESULTS / "placement.png"
    figure.savefig(path, dpi=130)
    return str(path)


def _draw_panel(axes: Any, here: Mapping[int, Points], relative: bool) -> None:
    """In milliseconds, or by how many times the fastest takes."""
    known = {d: {name: at.exposed_s for name, at in each.items() if isinstance(at, Point)} for d, each in here.items()}
    for name, (colour, marker, label) in STYLES.items():
        there = {
            d: each[name] / min(each.values()) if relative else each[name] * 1e3
            for d, each in known.items()
            if name in each
        }
        look: dict[str, Any] = {"color": colour, "marker": marker, "label": label, "linewidth": 1.5, "markersize": 5}
        if name == CONDUIT:  # a ring around the contender that it is
            look |= {
                "markerfacecolor": "none",
                "markersize": 11,
                "markeredgewidth": 1.6,
                "linestyle": "--",
                "linewidth": 1.1,
            }
        axes.plot(list(there), list(there.values()), **look)
        for dimension in sorted(here.keys() - there.keys()):
            above = {"transform": axes.get_xaxis_transform(), "color": colour}
            axes.plot(dimension, 0.95, "x", markersize=8, markeredgewidth=2, **above)
            if not relative:
                axes.text(dimension, 0.92, "out of\nmemory", ha="center", va="top", fontsize=7, **above)


def _note_ratios(axes: Any, here: Mapping[int, Points]) -> None:
    """Beside the last points, how many times as long they take as Conduit does; and the paper's."""
    last = max(here)
    for (name, times), va in zip(ratios(here[last]).items(), ("bottom", "top", "top"), strict=False):
        each = here[last][name]
        if name in PAPER and isinstance(each, Point):
            told = f"{times['exposed']:.1f} × Conduit's\n(paper: {PAPER[name]:g} ×)"
            axes.text(last * 1.15, each.exposed_s * 1e3, told, color=STYLES[name][0], va=va, fontsize=8)


def _line(case: Case, points: Points) -> str:
    told = (
        f"{name} {each.exposed_s * 1e6:,.1f} ({each.predicted_s * 1e6:,.1f})"
        if isinstance(each, Point)
        else f"{name} out of memory"
        for name, each in points.items()
    )
    learners = f"{case.learners} learner{'s' * (case.learners > 1)}"
    return f"{learners}, replay ratio {case.replay_ratio:g}, d = {case.dimension:6,}: {', '.join(told)}"


def _figures(points: Points) -> dict[str, Any]:
    """Of one case, in microseconds."""
    told: dict[str, Any] = {}
    for name, each in points.items():
        if isinstance(each, str):
            told[name] = {"out_of_memory": each}
            continue
        seconds = {key: value for key, value in asdict(each).items() if key.endswith("_s")}
        seconds |= {"exposed_s": each.exposed_s, "predicted_s": each.predicted_s}
        told[name] = {key.removesuffix("_s") + "_us": round(value * 1e6, 2) for key, value in seconds.items()}
        told[name]["rows"] = dict(each.rows)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    dimensions, replay, iterations = (
        (DIMENSIONS[::4], RATIOS[:1], 2) if asked.quick else (DIMENSIONS, RATIOS, ITERATIONS)
    )
    topology = preset("a100x8")
    found = measured(topology)
    print(f"Exposed µs an iteration (and as the plan predicts it); {TOLD}")
    cases = [Case(each, count, ratio) for ratio in replay for count in LEARNERS for each in dimensions]
    points = sweep(topology, found, cases, iterations)
    switched = switch(topology, found)
    print(
        f"One device holds the rows, and a batch, up to d = {switched['bytes_say_up_to_d']:,}; "
        f"Conduit puts them there up to d = {switched['conduit_up_to_d']:,}"
    )
    told = []
    for case, each in points.items():
        over_s, part = over_envelope(each, lambda point: point.exposed_s)
        _, flowing = over_envelope(each, lambda point: point.flowing_s)
        told.append(
            {
                **asdict(case),
                "over_envelope": round(part, 4),
                "over_envelope_us": round(over_s * 1e6, 2),
                "over_envelope_flowing": round(flowing, 4),
                "contenders": _figures(each),
            }
        )
    worst = max(told, key=lambda each: each["over_envelope"])
    print(
        f"Conduit is at most {100 * worst['over_envelope']:.2f} % ({worst['over_envelope_us']:.1f} µs) above the fastest of the others; where nobody "
        f"waits between push and pull, {100 * max(each['over_envelope_flowing'] for each in told):.1f} %"
    )
    off_s, off = mispredicted(points)
    print(
        f"Plans are off what stores took by at most {off_s * 1e6:.1f} µs at d = {min(dimensions)} and {100 * off:.2f} % from there on"
    )
    largest = [case for case in cases if case.dimension == max(dimensions)]
    for case in largest:
        for name, times in ratios(points[case]).items():
            paper = f"; the paper: {PAPER[name]:g} ×" if name in PAPER and case.dimension == DIMENSIONS[-1] else ""
            print(
                f"d = {case.dimension:,}, {case.learners} learner(s), replay ratio {case.replay_ratio:g}: {times['exposed']:g} × as fast as {name}, "
                f"delivery alone {times['delivery']:g} ×{paper}"
            )
    print(f"Why they differ from the paper's: {WHY}")
    wrong = complaints(points, switched)
    if not asked.quick:
        figures = {
            "figures": TOLD,
            "capacity": CAPACITY,
            "batch": BATCH,
            "bytes_of_a_row_here": row_bytes(FLOATS),
            "iterations": iterations,
            "within": WITHIN,
            "or_within_us": NOISE_S * 1e6,
            "regime_switch": switched,
            "planned_for": {
                f"{n} learners, replay ratio {ratio:g}": regimes(found, n, ratio) for n in LEARNERS for ratio in replay
            },
            "mispredicted": {"at_smallest_d_us": round(off_s * 1e6, 2), "beyond": round(off, 4)},
            "times_as_fast_at_d_20000": {
                f"{case.learners} learners, replay ratio {case.replay_ratio:g}": ratios(points[case])
                for case in largest
            },
            "paper": PAPER,
            "why_they_differ": WHY,
            "points": told,
        }
        print(save("placement", figures))
        print(draw(points, switched["bytes_say_up_to_d"]))
    for each in wrong:
        print(each)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
