"""What a draw costs at 10⁸ rows of 8 bytes, over what it costs at 10⁶. Measured on this CPU.

    python benchmarks/scale.py [--rows 100000000] [--rounds 200] [--quick]

Both stores live in one process and take turns, in an order that changes every round; a turn is ten calls in a row. Beside
them `np.take` of as many rows, with indices drawn beforehand: what the memory alone makes of the larger size. One workload's
stores are gone before the next's are made; the largest takes about 3 GB. `--quick`: 10⁶ rows over 10⁵; nothing is saved."""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from measure import interleaved, save, summarise

import conduit

SMALL_ROWS, LARGE_ROWS, ROUNDS = 1_000_000, 100_000_000, 200
QUICK = (100_000, 1_000_000, 20)
EPISODE = 1_000
AT_ONCE = 1_000_000
"""Rows of a push where episodes don't matter."""
IN_A_TURN = 10
BEFOREHAND = 64
"""How many calls' indices or TD errors are drawn beforehand."""


@dataclass(frozen=True)
class Workload:
    """`target`: how many times the cost at the smaller size the larger may have."""

    name: str
    batch_size: int
    target: float
    item: conduit.Sequence | None = None
    sampler: conduit.Uniform | conduit.Prioritized = field(default_factory=conduit.Uniform)

    @property
    def drawn_rows(self) -> int:
        return self.batch_size * (1 if self.item is None else self.item.length)


WORKLOADS = (
    Workload("uniform: 256 rows", 256, 2.0),
    Workload("sequences: 32 × 32 rows", 32, 2.0, item=conduit.Sequence(32)),
    Workload("prioritized: draw 512 + update 512", 512, 2.5, sampler=conduit.Prioritized()),
)


def filled(work: Workload, rows: int) -> conduit.Store:
    """A full store of numbered rows; where episodes matter, each ends after 1,000."""
    store = conduit.Store(capacity=rows, batch_size=work.batch_size, item=work.item, sampler=work.sampler)
    actor = store.actor()
    at_once, end = (AT_ONCE, "open") if work.item is None else (EPISODE, "terminated")
    for first in range(0, rows, at_once):
        actor.push_trajectory({"number": np.arange(first, min(first + at_once, rows))}, end=end)
    return store


def drawing(work: Workload, store: conduit.Store) -> Callable[[], object]:
    """One call of the workload, after one that is checked: rows bear their keys."""
    learner = store.learner()
    batch = learner.pull()
    data: Any = batch.data
    expected = batch.info.keys
    if work.item is not None:
        expected = expected[:, None] + np.arange(work.item.length)
    np.testing.assert_array_equal(data["number"], expected)
    if not work.sampler.prioritized:
        return learner.pull
    random = np.random.default_rng(0)
    errors = itertools.cycle([np.abs(random.standard_normal(work.batch_size)) for _ in range(BEFOREHAND)])
    return lambda: store.update_priorities(learner.pull().info.keys, next(errors))


def taking(work: Workload, rows: int) -> Callable[[], object]:
    """Reads the drawn rows, whole sequences at a time, from a bare array."""
    column, out, random = np.arange(rows), np.zeros(work.drawn_rows, np.int64), np.random.default_rng(0)
    length = work.drawn_rows // work.batch_size
    starts = [random.integers(rows - length, size=(work.batch_size, 1)) for _ in range(BEFOREHAND)]
    index = itertools.cycle([(each + np.arange(length)).reshape(-1) for each in starts])
    return lambda: np.take(column, next(index), out=out, mode="clip")


def in_turn(call: Callable[[], object]) -> Callable[[], None]:
    def turn() -> None:
        for _ in range(IN_A_TURN):
            call()

    return turn


def measure(work: Workload, small: int, large: int, rounds: int) -> dict[str, Any]:
    stores = {rows: filled(work, rows) for rows in (small, large)}
    calls = {f"{rows}": in_turn(drawing(work, store)) for rows, store in stores.items()}
    calls |= {f"take {rows}": in_turn(taking(work, rows)) for rows in stores}
    seconds = {name: [each / IN_A_TURN for each in taken] for name, taken in interleaved(calls, rounds).items()}
    for store in stores.values():
        store.close()
    conduits, bare = summarise(seconds, f"{small}"), summarise(seconds, f"take {small}")
    return {
        "target": work.target,
        "ratio": conduits[f"{large}"]["ratio"],
        "ratio_of_quickest": round(min(seconds[f"{large}"]) / min(seconds[f"{small}"]), 2),
        "take_ratio": bare[f"take {large}"]["ratio"],
        "median_us": {rows: conduits[f"{rows}"]["median_us"] for rows in stores},
        "p99_us": {rows: conduits[f"{rows}"]["p99_us"] for rows in stores},
        "take_median_us": {rows: bare[f"take {rows}"]["median_us"] for rows in stores},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    small, large, rounds = QUICK if asked.quick else (SMALL_ROWS, LARGE_ROWS, ROUNDS)
    large, rounds = asked.rows or large, asked.rounds or rounds
    if large <= small:
        parser.error(f"--rows {large}: expected more than {small:,}")
    print(f"Cost of a draw at {large:,} rows over {small:,}, rows of 8 B; np.take's beside it. Measured on this CPU.")
    workloads = {}
    for work in WORKLOADS:
        workloads[work.name] = each = measure(work, small, large, rounds)
        gc.collect()
        cost = " → ".join(f"{each['median_us'][rows]:.1f}" for rows in (small, large))
        bare = " → ".join(f"{each['take_median_us'][rows]:.1f}" for rows in (small, large))
        verdict = f"× {each['ratio']:.2f}, quickest × {each['ratio_of_quickest']:.2f} (target ≤ {work.target})"
        print(
            f"  {work.name:36} {cost:>16} µs  {verdict}   np.take {bare:>13} µs  × {each['take_ratio']:.2f}", flush=True
        )
    if not asked.quick:
        told = "measured on this CPU; µs a call, ratios of calls in the same round"
        print(save("scale", {"figures": told, "rows": [small, large], "rounds": rounds, "workloads": workloads}))


if __name__ == "__main__":
    main()
