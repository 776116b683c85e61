"""How pushes and pulls from several threads at once add up: calls a second of all threads together. Measured on this CPU.

    python benchmarks/threads.py [--seconds 1] [--repeats 3] [--backend torch] [--quick]

1, 2 and 4 threads that push 64 rows of 41 B, each with an actor of its own; as many that pull batches of 256, each with a
learner of its own (rank of world); and both at once. Every case gets a fresh store; all cases take turns, and figures are
medians over the repeats. × says what all threads do together, in threads' worth: a kind's calls a second over those of one
thread alone, added up over both kinds. torch has one thread. `--quick`: a tenth of a second each, once; nothing is saved."""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# Before torch loads: OpenMP reads it once.
os.environ["OMP_NUM_THREADS"] = "1"

from measure import save
from peers.workloads import GAMMA, N_STEP, episodes, rows_of

import conduit

CAPACITY, LANES, BATCH = 200_000, 64, 256
SECONDS, REPEATS, QUICK = 1.0, 3, (0.1, 1)
WARM_UP = 20
CASES = [(1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (0, 4), (1, 1), (2, 2), (4, 4)]
"""How many threads push, and how many pull."""
STORES: dict[str, dict[str, Any]] = {
    "uniform rows": {},
    "prioritized, 5 steps": {"sampler": conduit.Prioritized(), "item": conduit.NStep(N_STEP, GAMMA)},
}
Call = Callable[[], object]
Taken = list[list[float]]
"""By thread: seconds of each call."""


def measure(kind: str, pushers: int, pullers: int, backend: str, seconds: float) -> tuple[Taken, Taken]:
    """The pushers' calls and the pullers', of about `seconds`."""
    with conduit.Store(backend=backend, capacity=CAPACITY, batch_size=BATCH, **STORES[kind]) as store:
        filler, chunk = store.actor(), episodes(rows_of("41 B", 10_000))
        for _ in range(CAPACITY // 10_000):
            for rows in chunk:
                filler.push_trajectory(rows)
        step = rows_of("41 B", LANES)
        calls: list[Call] = [partial(store.actor(lanes=LANES).push, step) for _ in range(pushers)]
        calls += [store.learner(rank, pullers).pull for rank in range(pullers)]
        taken = together(calls, seconds)
    return taken[:pushers], taken[pushers:]


def together(calls: list[Call], seconds: float) -> Taken:
    """Each call again and again in a thread of its own, all from one moment on."""
    taken: Taken = [[] for _ in calls]
    start = threading.Barrier(len(calls))

    def repeat(call: Call, mine: list[float]) -> None:
        try:
            for _ in range(WARM_UP):
                call()
        except BaseException:
            start.abort()
            raise
        start.wait()
        now_s = time.perf_counter()
        until_s = now_s + seconds
        while now_s < until_s:
            call()
            before_s, now_s = now_s, time.perf_counter()
            mine.append(now_s - before_s)

    threads = [threading.Thread(target=repeat, args=each) for each in zip(calls, taken, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(taken):
        raise SystemExit("a thread failed, or made no call in time")
    return taken


def rate(taken: Taken) -> float:
    """Calls a second of all threads together."""
    return sum(len(mine) / sum(mine) for mine in taken)


def p99_us(taken: Taken) -> float:
    every = [each for mine in taken for each in mine]
    return round(1e6 * statistics.quantiles(every, n=100, method="inclusive")[98], 1) if len(every) > 1 else 0.0


def summarise(measured: dict[tuple[int, int], list[tuple[Taken, Taken]]]) -> list[dict[str, Any]]:
    """A line for each case."""
    rates = {
        case: [statistics.median(rate(each[which]) for each in runs) for which in (0, 1)]
        for case, runs in measured.items()
    }
    alone = (rates[1, 0][0], rates[0, 1][1])
    return [
        {
            "pushers": pushers,
            "pullers": pullers,
            "pushes_per_s": round(rates[pushers, pullers][0]),
            "pulls_per_s": round(rates[pushers, pullers][1]),
            "threads_worth": round(
                sum(mine / one for mine, one in zip(rates[pushers, pullers], alone, strict=True)), 2
            ),
            "push_p99_us": statistics.median(p99_us(pushed) for pushed, _ in runs),
            "pull_p99_us": statistics.median(p99_us(pulled) for _, pulled in runs),
        }
        for (pushers, pullers), runs in measured.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    seconds, repeats = QUICK if asked.quick else (SECONDS, REPEATS)
    seconds, repeats = asked.seconds or seconds, asked.repeats or repeats
    print(f"{os.cpu_count()} cores, {asked.backend}; pushes of {LANES} × 41 B, pulls of {BATCH}. Measured on this CPU.")
    stores = {}
    for kind in STORES:
        measured: dict[tuple[int, int], list[tuple[Taken, Taken]]] = {case: [] for case in CASES}
        for _ in range(repeats):
            for case, runs in measured.items():
                runs.append(measure(kind, *case, asked.backend, seconds))
        stores[kind] = lines = summarise(measured)
        print(f"\n{kind}\n  threads that push, pull   pushes/s     p99 µs    pulls/s     p99 µs   threads' worth")
        for each in lines:
            pushed = f"{each['pushes_per_s']:10,} {each['push_p99_us']:10,.0f}" if each["pushers"] else " " * 21
            pulled = f"{each['pulls_per_s']:10,} {each['pull_p99_us']:10,.0f}" if each["pullers"] else " " * 21
            print(f"  {each['pushers']:17},{each['pullers']:5} {pushed} {pulled}   × {each['threads_worth']:.2f}")
    if not asked.quick:
        told = "measured on this CPU; calls a second of all threads of a kind, medians over the repeats"
        print(
            save(
                "threads",
                {"figures": told, "seconds": seconds, "repeats": repeats, "backend": asked.backend, "stores": stores},
            )
        )


if __name__ == "__main__":
    main()
