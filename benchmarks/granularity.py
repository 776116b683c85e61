"""What the path costs per transition, by how many transitions an operator takes at once (paper Fig. 6). Measured on this CPU, and apart from that
emulated.

    python benchmarks/granularity.py [--rounds 60] [--quick]

Rollout units and batches of 32 rows; g = g_ing = g_del of 1, 2, 4, 8, 16, so operator batches of 32 to 512; rows of 41 B in 5 fields, the same
behind two NumPy hooks on either side, 1 KB and 48 KB in one field. Ingestion and delivery are told apart by what they are timed in:

- in line: all that a push costs its caller, and all that a pull does
- behind a stage of sleep: the operator's busy seconds on its own thread (`Ledger.by_thread`), and beside them what the caller still spends

The limit is NumPy's own copies of as many rows as the operator takes: a slice for each field, and `np.take` into memory that is there already.
A push copies what it is given whatever g is, which is part of what its caller spends.

Emulated, on the virtual clock: a100x8, one learner on the first device, rows in pageable or pinned memory, or on that device. There a call of Python
takes no time at all: what g saves is each transfer's latency. The figure is the seconds in which the edge was busy, per row: of ingestion out of
pageable memory, where rows come from, and of delivery to the learner. `--quick`: fewer rounds; nothing is saved."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from measure import RESULTS, interleaved, save

import conduit
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import VirtualClock
from conduit.core.hook import Hook
from conduit.topology import Topology, preset
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint

UNIT = 32
"""Rows of a push, and of a batch."""
GRANULARITIES = (1, 2, 4, 8, 16)
MOST = max(GRANULARITIES)
ROUNDS, WARM_UP = 60, 5
STAGE_S, BYTES_PER_S = 300e-6, 1e9
"""A stage is at least so long, and long enough for the rows of a group at this rate: the operator is done when it ends."""
Operator = Literal["ingestion", "delivery"]
OPERATORS: tuple[Operator, ...] = ("ingestion", "delivery")
PAPER = {"ingestion": {"32": 200.0, "512": 85.0, "ratio": 2.4}, "delivery": {"32": 380.0, "512": 210.0, "ratio": 1.8}}
"""µs per transition on RLlib (paper §2.3), where a transition is a Python object on its way. Machine and rows aren't said."""
WHY = (
    "The paper's operator is RLlib's, which works on each transition in Python: 85 µs of it are left at 512, and g takes away what comes on top. "
    "Conduit's works on arrays, so a transition costs about 1/100 of that, and g shares out the calls' fixed cost alone. In line, a single unit is "
    "written out of the caller's own arrays, the cheapest way there is; units that wait for their group are copied to do so, which for small rows is "
    "won back by g = 4 to 16 and for wide ones never. Behind a stage that copy is there at g = 1: of rows up to 1 KB g gains as much there as the "
    "paper's. Of a delivered batch the draw, the hand-over, SampleInfo and hooks stay for each, whatever g is. Emulated, only transfers count: of small "
    "rows they are latency, which g divides"
)
TOLD = {
    "measured": "measured on this CPU, host memory",
    "emulated": "emulated: the a100x8 preset on the virtual clock; no hardware was measured",
}
Rows = dict[str, np.ndarray]


@conduit.register_ingestion()
def scale_rows(actor_in: Any, exp_out: Any) -> None:
    rows = actor_in.read()
    exp_out.write(
        {**rows, "obs": np.clip(rows["obs"] * 2 - 1, -1, 1), "next_obs": np.clip(rows["next_obs"] * 2 - 1, -1, 1)}
    )


@conduit.register_ingestion()
def clip_rewards(actor_in: Any, exp_out: Any) -> None:
    rows = actor_in.read()
    exp_out.write({**rows, "reward": np.sign(rows["reward"])})


@conduit.register_delivery()
def center_batch(exp_in: Any, learn_out: Any) -> None:
    rows = exp_in.read()
    learn_out.write({**rows, "obs": rows["obs"] - rows["obs"].mean(axis=0)})


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows of one kind. `hooks`: of ingestion and delivery."""

    name: str
    row_bytes: int
    capacity: int
    hooks: tuple[tuple[Hook, ...], tuple[Hook, ...]] = ((), ())

    def rows(self, count: int) -> Rows:
        if self.row_bytes > 41:
            return {"obs": np.ones((count, self.row_bytes // 4), np.float32)}
        obs, one = np.ones((count, 4), np.float32), np.ones(count, np.float32)
        action, terminated = np.zeros(count, np.int32), np.zeros(count, np.bool_)
        return {"obs": obs, "action": action, "reward": one, "next_obs": obs, "terminated": terminated}


KINDS = (
    Kind("41 B", 41, 512 * 400),
    Kind("41 B, hooks", 41, 512 * 400, ((scale_rows, clip_rewards), (center_batch,))),
    Kind("1 KB", 1024, 512 * 80),
    Kind("48 KB", 48 * 1024, 512 * 4),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """µs per transition, medians over the rounds. `caller_us`: what push or pull took whoever called; `operator_us`: busy on its own thread;
    None in line, where it is part of the caller's."""

    caller_us: float
    operator_us: float | None = None

    @property
    def total_us(self) -> float:
        return self.caller_us + (self.operator_us or 0.0)


Costs = Mapping[Operator, Mapping[str, Mapping[int, Cost]]]
"""By "in line" and "behind", and by g."""


class Contender:
    """A store at one g. A call is 512 rows through one operator: as many pushes, or pulls, of 32."""

    def __init__(self, kind: Kind, operator: Operator, behind: bool, g: int) -> None:
        ingesting = operator == "ingestion"
        schedule = conduit.Schedule(behind and ingesting, g, behind and not ingesting, g)
        ingestion, delivery = kind.hooks
        self.store = conduit.Store(
            capacity=kind.capacity, batch_size=UNIT, schedule=schedule, ingestion=ingestion, delivery=delivery
        )
        self.operator_s: list[float] = []
        self.caller_s: list[float] = []
        self._operator: Operator = operator
        self._behind, self._g = behind, g
        self._stage_s = max(STAGE_S, g * UNIT * kind.row_bytes / BYTES_PER_S)
        block = kind.rows(512)
        filler = self.store.actor(512)
        for _ in range(kind.capacity // 512):
            filler.push(block)
        actor, learner = self.store.actor(UNIT), self.store.learner()
        self._thread = "conduit-ingestion" if ingesting else "conduit-delivery-0"
        self._once: Callable[[], object] = partial(actor.push, kind.rows(UNIT)) if ingesting else learner.pull
        if not ingesting:
            # What waits for a group to be full is let in now, and not in what is timed.
            learner.pull()

    def __call__(self) -> None:
        busy_s, caller_s, once = self._busy_s(), 0.0, self._once
        for _ in range(MOST // self._g):
            began_s = time.perf_counter()
            for _ in range(self._g):
                once()
            caller_s += time.perf_counter() - began_s
            if self._behind:
                time.sleep(self._stage_s)
        self.caller_s.append(caller_s)
        self.operator_s.append(self._busy_s() - busy_s)

    def cost(self, rounds: int) -> Cost:
        """Of the last rounds."""
        caller_us, operator_us = (
            statistics.median(each[-rounds:]) / (MOST * UNIT) * 1e6 for each in (self.caller_s, self.operator_s)
        )
        return Cost(caller_us, operator_us if self._behind else None)

    def _busy_s(self) -> float:
        told = self.store.ledger.by_thread.get(self._thread)
        return 0.0 if told is None else getattr(told, self._operator).busy_s


def measured(kind: Kind, granularities: Sequence[int] = GRANULARITIES, rounds: int = ROUNDS) -> Costs:
    """What the operators cost on this CPU."""
    costs: dict[Operator, dict[str, dict[int, Cost]]] = {}
    for operator in OPERATORS:
        there = {
            (timing, g): Contender(kind, operator, timing == "behind", g)
            for timing in ("in line", "behind")
            for g in granularities
        }
        interleaved({f"{timing} {g}": each for (timing, g), each in there.items()}, rounds, WARM_UP)
        costs[operator] = {"in line": {}, "behind": {}}
        for (timing, g), each in there.items():
            costs[operator][timing][g] = each.cost(rounds)
            each.store.close()
    return costs


def limits(kind: Kind, rounds: int = ROUNDS) -> dict[Operator, dict[int, float]]:
    """µs per transition of NumPy's own copies, by g."""
    columns = kind.rows(kind.capacity)
    random = np.random.default_rng(0)
    calls: dict[str, Callable[[], object]] = {}
    for g in GRANULARITIES:
        rows = kind.rows(UNIT * g)
        index = random.integers(kind.capacity, size=(MOST // g, UNIT * g))
        batch = {name: np.empty_like(leaf) for name, leaf in rows.items()}
        calls[f"ingestion {g}"] = partial(_write, columns, rows, MOST // g)
        calls[f"delivery {g}"] = partial(_gather, columns, batch, index)
    taken = interleaved(calls, rounds, WARM_UP)
    return {
        operator: {g: statistics.median(taken[f"{operator} {g}"]) / (MOST * UNIT) * 1e6 for g in GRANULARITIES}
        for operator in OPERATORS
    }


def _write(columns: Rows, rows: Rows, times: int) -> None:
    count = len(next(iter(rows.values())))
    for number in range(times):
        for name, column in columns.items():
            column[number * count : (number + 1) * count] = rows[name]


def _gather(columns: Rows, batch: Rows, index: np.ndarray) -> None:
    for each in index:
        for name, column in columns.items():
            np.take(column, each, axis=0, out=batch[name], mode="clip")


def emulated(
    topology: Topology, kind: Kind, at: Endpoint, behind: bool, g: int, blocks: int = 2
) -> dict[Operator, Cost]:
    """What the operators' transfers take where rows are at `at`, one learner on the first device."""
    clock = VirtualClock(max_events=10**7)
    backend = EmulatedBackend(topology, clock=clock)
    learner_at = topology.devices[0]
    edges: dict[Operator, tuple[Endpoint, Endpoint]] = {"ingestion": (PAGEABLE, at), "delivery": (at, learner_at)}
    ingestion, delivery = kind.hooks

    def main() -> dict[Operator, Cost]:
        with conduit.Store(
            backend=backend,
            clock=clock,
            placement=at,
            capacity=4 * 512,
            batch_size=UNIT,
            schedule=conduit.Schedule(behind, g, behind, g),
            ingestion=ingestion,
            delivery=delivery,
        ) as store:
            actor, learner = store.actor(UNIT), store.learner(to="torch", device=learner_at)
            step = kind.rows(UNIT)

            def block() -> None:
                for _ in range(MOST):
                    clock.sleep(1e-3)
                    actor.push(step)
                    learner.pull()

            def busy_s() -> dict[Operator, float]:
                # Until whatever runs behind is done.
                clock.sleep(1.0)
                backend.drain()
                traffic = backend.traffic()
                return {operator: traffic[edge].busy_s for operator, edge in edges.items()}

            # Whole groups from here on, so that none is cut in two by the ring's end: who waits for a batch has the first push let in.
            store.actor(512).push(kind.rows(512))
            learner.pull()
            for _ in range(2):
                block()
            before_s = busy_s()
            for _ in range(blocks):
                block()
            taken_s = busy_s()
        rows = blocks * MOST * UNIT
        return {operator: Cost((taken_s[operator] - before_s[operator]) / rows * 1e6) for operator in OPERATORS}

    return clock.run(main)


def emulated_costs(topology: Topology, kind: Kind, at: Endpoint, granularities: Sequence[int] = GRANULARITIES) -> Costs:
    costs: dict[Operator, dict[str, dict[int, Cost]]] = {each: {"in line": {}, "behind": {}} for each in OPERATORS}
    for timing in ("in line", "behind"):
        for g in granularities:
            for operator, cost in emulated(topology, kind, at, timing == "behind", g).items():
                costs[operator][timing][g] = cost
    return costs


def ratio(us: Mapping[int, float]) -> float:
    """How many times as much a transition costs in the smallest operator batch as in the largest."""
    return us[min(us)] / us[max(us)]


def told_of(costs: Costs, limit: Mapping[Operator, Mapping[int, float]] | None = None) -> dict[str, Any]:
    """Of one kind of rows, by operator and timing: each figure by operator batch, and its ratio."""
    told: dict[str, Any] = {}
    for operator, by_timing in costs.items():
        told[operator] = {}
        for timing, by_g in by_timing.items():
            told[operator][timing] = {"total_us": _by_batch({g: cost.total_us for g, cost in by_g.items()})}
            apart = {g: cost.operator_us for g, cost in by_g.items() if cost.operator_us is not None}
            if apart:
                told[operator][timing]["caller_us"] = _by_batch({g: cost.caller_us for g, cost in by_g.items()})
                told[operator][timing]["operator_us"] = _by_batch(apart)
        if limit is not None:
            told[operator]["copies alone"] = {"total_us": _by_batch(limit[operator])}
    return told


def _by_batch(us: Mapping[int, float]) -> dict[str, float]:
    return {**{str(g * UNIT): round(each, 4) for g, each in us.items()}, "ratio": round(ratio(us), 2)}


LOOKS = {"in line": "-", "behind": "--", "copies alone": ":"}
COLOURS = {"41 B": "#D55E00", "41 B, hooks": "#CC79A7", "1 KB": "#0072B2", "48 KB": "#009E73"}
"""Okabe and Ito's, which colour-blind people tell apart."""


def draw(measured_here: Mapping[str, Any], emulated_there: Mapping[str, Any]) -> str:
    """Writes the figure; where to."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(14, 8.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    first = next(iter(emulated_there))
    for row, shown, what in (
        (panels[0], measured_here, "measured on this CPU"),
        (panels[1], emulated_there[first], f"emulated a100x8, rows on {first}"),
    ):
        for axes, operator in zip(row, OPERATORS, strict=True):
            for kind, told in shown.items():
                for timing, figures in told[operator].items():
                    us = dict(figures["total_us"])
                    times = us.pop("ratio")
                    label = f"{kind}: {times:g} ×" if timing == "in line" else None
                    axes.plot(
                        [int(batch) for batch in us],
                        list(us.values()),
                        LOOKS[timing],
                        color=COLOURS[kind],
                        label=label,
                        linewidth=1.0 if timing == "copies alone" else 1.6,
                        marker=None if timing == "copies alone" else "o",
                        markersize=4,
                    )
            axes.set_title(f"{operator}, {what}", fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_locator(FixedLocator([UNIT * g for g in GRANULARITIES]))
            axes.xaxis.set_minor_locator(NullLocator())
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.grid(alpha=0.3)
            title = f"in line, 32 over 512 (paper: {PAPER[operator]['ratio']:g} ×)"
            axes.legend(fontsize=8, title=title, title_fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
            axes.set_ylabel("µs per transition")
    for axes in panels[1]:
        axes.set_xlabel("transitions that the operator takes at once")
    figure.suptitle(
        "Cost per transition by operator batch. Solid: in line; dashed: behind a stage, caller and operator together; dotted: NumPy's copies alone",
        fontsize=11,
    )
    path = RESULTS / "granularity.png"
    figure.savefig(path, dpi=130)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    rounds = 5 if asked.quick else asked.rounds
    print(f"µs per transition by operator batch, and how many times as much at 32 as at 512; {TOLD['measured']}")
    here = {kind.name: told_of(measured(kind, rounds=rounds), limits(kind, rounds)) for kind in KINDS}
    for name, told in here.items():
        _print(name, told)
    print(TOLD["emulated"])
    topology = preset("a100x8")
    plain = [kind for kind in KINDS if kind.hooks == ((), ())]
    there = {
        str(at): {kind.name: told_of(emulated_costs(topology, kind, at)) for kind in plain}
        for at in (topology.devices[0], PINNED, PAGEABLE)
    }
    for at, by_kind in there.items():
        for name, told in by_kind.items():
            _print(f"{name} on {at}", told)
    print(f"The paper: {PAPER['ingestion']['ratio']:g} × and {PAPER['delivery']['ratio']:g} ×. {WHY}")
    if not asked.quick:
        figures = {
            "figures": TOLD,
            "unit_rows": UNIT,
            "rounds": rounds,
            "paper_us": PAPER,
            "why_they_differ": WHY,
            "kinds": {kind.name: {**asdict(kind), "hooks": len(kind.hooks[0])} for kind in KINDS},
            "measured": here,
            "emulated": there,
        }
        print(save("granularity", figures))
        print(draw(here, there))


def _print(name: str, told: Mapping[str, Any]) -> None:
    for operator, by_timing in told.items():
        for timing, figures in by_timing.items():
            for what, us in figures.items():
                shown = "  ".join(f"{each:9.3f}" for batch, each in us.items() if batch != "ratio")
                print(f"  {name:20} {operator:9} {timing:12} {what:11} {shown}   {us['ratio']:5.2f} ×")


if __name__ == "__main__":
    main()
