"""Whether draws have the frequencies that they promise: chi-square against exact probabilities. Counted, not timed.

    python benchmarks/draws.py [--draws 1000000] [--quick]

A ring of 1,000 rows that has wrapped: rows of three lanes in random order, in episodes of random lengths, ended in every way.
Which of them can start a sequence of four is counted out here from the episodes, row by row; in prioritized stores a tenth of
the rows has priority 0, half from the push on and half by an update. The p-value is the chance of a statistic at least as
large if the frequencies are right (Wilson and Hilferty 1931). Prioritized draws are stratified, so the counts of a batch are
evener than chance makes them, and the statistic is smaller than its degrees of freedom; drawn one by one they are plain
draws. `--quick`: fewer draws; nothing is saved."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from measure import save

import conduit

DRAWS, QUICK = 1_000_000, 50_000
CAPACITY, PUSHED, LANES, LENGTH, BATCH = 1_000, 2_300, 3, 4, 500
ALPHA = 0.6
SUSPICIOUS = 0.001
ENDS = ("terminated", "truncated", "cut")
CASES = {
    "uniform, rows": (False, False, BATCH),
    "uniform, starts of sequences": (False, True, BATCH),
    "prioritized, rows": (True, False, BATCH),
    "prioritized, starts of sequences": (True, True, BATCH),
    "prioritized, rows, one by one": (True, False, 1),
}
"""Whether prioritized, whether of sequences, rows a batch."""


@dataclass
class Rows:
    """All that were pushed, by key. `episodes`: each with its rows' keys; a lane's last one may be open."""

    priority: np.ndarray = field(default_factory=lambda: np.zeros(PUSHED))
    episodes: list[list[int]] = field(default_factory=list)

    def chances(self, prioritized: bool, linked: bool) -> np.ndarray:
        """Exact probability of each live row to be drawn."""
        can = np.zeros(PUSHED)
        for episode in self.episodes:
            for place, key in enumerate(episode):
                can[key] = not linked or place + LENGTH <= len(episode)
        mass = can * self.priority**ALPHA if prioritized else can
        live = mass[-CAPACITY:]
        return live / live.sum()


def filled(prioritized: bool, linked: bool, batch: int) -> tuple[conduit.Store, Rows]:
    random, rows = np.random.default_rng(0), Rows()
    store = conduit.Store(
        capacity=CAPACITY,
        batch_size=batch,
        sampler=conduit.Prioritized(alpha=ALPHA, eps=0.0) if prioritized else conduit.Uniform(),
        item=conduit.Sequence(LENGTH) if linked else None,
    )
    actor, running = store.actor(LANES), [[] for _ in range(LANES)]
    for key in range(PUSHED):
        lane = int(random.integers(LANES))
        if not running[lane]:
            rows.episodes.append(running[lane])
        running[lane].append(key)
        end = "open" if random.random() < 0.9 else str(random.choice(ENDS))
        if end != "open":
            running[lane] = []
        rows.priority[key] = 0.0 if key % 20 == 7 else random.lognormal()
        final = {"obs": np.float32(0.0)} if end == "truncated" else None
        priority = rows.priority[key : key + 1] if prioritized else None
        obs = np.full(1, key, np.float32)
        actor.push_trajectory({"obs": obs}, end=end, final=final, lane=lane, priority=priority)
    if prioritized:
        keys = np.arange(PUSHED - CAPACITY, PUSHED, 2)
        rows.priority[keys] = np.where(keys % 20 == 8, 0.0, random.lognormal(size=len(keys)))
        store.update_priorities(keys, rows.priority[keys])
    return store, rows


def measure(prioritized: bool, linked: bool, batch: int, draws: int) -> dict[str, Any]:
    store, rows = filled(prioritized, linked, batch)
    chance = rows.chances(prioritized, linked)
    counts, error = np.zeros(CAPACITY, np.int64), 0.0
    with store:
        learner = store.learner()
        for _ in range(draws // batch):
            info = learner.pull().info
            place = info.keys - (PUSHED - CAPACITY)
            np.add.at(counts, place, 1)
            error = max(error, float(np.abs(info.probability / np.maximum(chance[place], 1e-300) - 1).max()))
    can = chance > 0
    expected = chance[can] * counts.sum()
    statistic = float(((counts[can] - expected) ** 2 / expected).sum())
    free = int(can.sum()) - 1
    return {
        "draws": int(counts.sum()),
        "batch": batch,
        "can_be_drawn": int(can.sum()),
        "drawn_that_cannot": int(counts[~can].sum()),
        "chi_square": round(statistic, 1),
        "degrees_of_freedom": free,
        "p": round(p_value(statistic, free), 4),
        "least_expected": round(float(expected.min()), 1),
        "largest_error_of_stated_probability": error,
    }


def p_value(statistic: float, free: int) -> float:
    spread = 2 / (9 * free)
    return 0.5 * math.erfc(((statistic / free) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    draws = asked.draws or (QUICK if asked.quick else DRAWS)
    print(f"{draws:,} draws each; {CAPACITY:,} live rows. Counted on this CPU.")
    print(f"  {'':34} can be drawn   others drawn   chi-square   degrees        p   stated p off by")
    cases = {}
    for name, (prioritized, linked, batch) in CASES.items():
        cases[name] = each = measure(prioritized, linked, batch, draws)
        numbers = f"{each['chi_square']:12.1f} {each['degrees_of_freedom']:9}   {each['p']:.4f}"
        off = each["largest_error_of_stated_probability"]
        print(
            f"  {name:34} {each['can_be_drawn']:12} {each['drawn_that_cannot']:14} {numbers}   {off:15.1e}", flush=True
        )
    wrong = [name for name, each in cases.items() if each["p"] < SUSPICIOUS or each["drawn_that_cannot"]]
    if not asked.quick:
        told = "counted on this CPU; chi-square of draws against exact probabilities"
        print(save("draws", {"figures": told, "capacity": CAPACITY, "cases": cases}))
    for name in wrong:
        print(f"{name}: the draws don't fit")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
