"""What a save costs those who push and pull meanwhile. Measured on this machine.

    python benchmarks/checkpoint.py [--gigabytes 4] [--saves 5] [--folder FOLDER] [--quick]

A full store of 4 KB rows with priorities and links, into which a thread pushes 8 rows at a time and out of which another pulls batches of 256
and tells their priorities, each with a pause of a millisecond between its calls. How long their calls take: while nothing is saved, during
a full save, during saves of what came in the second before, and during what one would do without: stop all, copy all
rows, go on, and write the copy. MB/s: of what was written, until it was on the disk. Then, of stores of 10^6 and 10^7 rows of 8
bytes: how long a save of nothing new takes, how many bytes it writes of what is kept beside the rows, and for how long it pauses, which
should have nothing to do with that.
`--quick`: a small store; nothing is saved in results."""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from measure import save

import conduit

LANES, BATCH, ROW_BYTES = 8, 256, 4096
IDLE_S, QUIET_S, BETWEEN_S = 0.001, 5.0, 1.0
KEPT: Mapping[str, dict[str, Any]] = {
    "uniform": {},
    "prioritized": {"sampler": conduit.Prioritized()},
    "prioritized, links, counts": {
        "sampler": conduit.Prioritized(),
        "derive": {"after": conduit.Next("number")},
        "max_times_sampled": 1000,
    },
    "remover": {"remover": conduit.Uniform()},
}


def rows_of(first: int, count: int) -> dict[str, np.ndarray]:
    number = np.arange(first, first + count)
    return {"number": number, "obs": np.repeat(number.astype(np.uint8), ROW_BYTES - 8).reshape(count, -1)}


class Load:
    """A thread that pushes and one that pulls, and how long each of their calls took."""

    def __init__(self, store: conduit.Store) -> None:
        self.store = store
        self.gate = threading.Lock()
        """What the naive way stops both with."""
        self.gated = False
        self.seconds: dict[str, list[float]] = {"push": [], "pull": []}
        self._stop = False
        self._actor, self._learner = store.actor(LANES), store.learner(to="numpy")
        self._came = 0
        self._threads = [
            threading.Thread(target=self._repeat, args=each) for each in (("push", self._push), ("pull", self._pull))
        ]

    def fill(self, rows: int) -> None:
        while self._came < rows:
            self._push()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()

    def during(self, work: Callable[[], Any]) -> tuple[Any, dict[str, list[float]]]:
        """What `work` returned, and the calls that began meanwhile."""
        self.seconds = seconds = {"push": [], "pull": []}
        made = work()
        self.seconds = {"push": [], "pull": []}
        # A call that began meanwhile notes its time when it ends.
        time.sleep(10 * IDLE_S)
        return made, seconds

    def _repeat(self, name: str, call: Callable[[], None]) -> None:
        while not self._stop:
            into = self.seconds[name]
            began_s = time.perf_counter()
            with self.gate if self.gated else nullcontext():
                call()
            into.append(time.perf_counter() - began_s)
            time.sleep(IDLE_S)

    def _push(self) -> None:
        self._actor.push(rows_of(self._came, LANES))
        self._came += LANES

    def _pull(self) -> None:
        batch = self._learner.pull()
        self.store.update_priorities(batch.info.keys, np.ones(len(batch)))


def figures(seconds: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Microseconds."""
    told = {}
    for name, taken in seconds.items():
        p50, p99 = np.quantile(taken, (0.5, 0.99))
        told[name] = {
            "calls": len(taken),
            "p50_us": round(1e6 * float(p50), 1),
            "p99_us": round(1e6 * float(p99), 1),
            "max_us": round(1e6 * max(taken), 1),
        }
    return told


def together(parts: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: [each for part in parts for each in part[name]] for name in ("push", "pull")}


def told(saved: list[conduit.Saved], took_s: list[float], seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    return {
        "written_rows": statistics.median(each.written_rows for each in saved),
        "written_mb": round(statistics.median(each.written_bytes for each in saved) / 1e6, 1),
        "took_s": round(statistics.median(took_s), 3),
        "mb_per_s": round(
            statistics.median(each.written_bytes / 1e6 / took for each, took in zip(saved, took_s, strict=True))
        ),
        "paused_ms": [round(1e3 * each.paused_s, 2) for each in saved],
        **figures(seconds),
    }


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began_s = time.perf_counter()
    made = work()
    return made, time.perf_counter() - began_s


def naive(load: Load, folder: Path) -> float:
    """Stops all while it copies all rows, and writes them then. How long all was stopped."""
    with load.gate:
        began_s = time.perf_counter()
        rows = load.store.read()
        stopped_s = time.perf_counter() - began_s
    data: Any = rows.data
    np.savez(folder / "naive.npz", **data)
    (folder / "naive.npz").unlink()
    return stopped_s


def under_load(gigabytes: float, saves: int, quiet_s: float, folder: Path) -> dict[str, Any]:
    capacity = int(gigabytes * 1e9) // ROW_BYTES
    settings: dict[str, Any] = {"sampler": conduit.Prioritized(), "derive": {"after": conduit.Next("number")}}
    found: dict[str, Any] = {"rows": capacity, "row_bytes": ROW_BYTES}
    with conduit.Store(backend="reference", capacity=capacity, batch_size=BATCH, **settings) as store:
        load = Load(store)
        load.fill(capacity + LANES)
        gc.collect()
        with load:
            time.sleep(0.2)
            _, seconds = load.during(lambda: time.sleep(quiet_s))
            found["no save"] = figures(seconds)
            (saved, took_s), seconds = load.during(lambda: timed(lambda: store.save(folder / "c")))
            found["full save"] = told([saved], [took_s], seconds)
            made, took, parts = [], [], []
            for _ in range(saves):
                time.sleep(BETWEEN_S)
                (saved, took_s), seconds = load.during(lambda: timed(lambda: store.save(folder / "c")))
                made.append(saved)
                took.append(took_s)
                parts.append(seconds)
            found["incremental save"] = told(made, took, together(parts))
            load.gated = True
            time.sleep(0.2)
            (stopped_s, took_s), seconds = load.during(lambda: timed(lambda: naive(load, folder)))
            found["stop and copy"] = {
                "took_s": round(took_s, 3),
                "paused_ms": [round(1e3 * stopped_s, 2)],
                **figures(seconds),
            }
    return found


def beside_the_rows(rows: int, settings: dict[str, Any], folder: Path) -> dict[str, float]:
    """How long a save of nothing new takes and pauses, and what it writes."""
    with conduit.Store(backend="reference", capacity=rows, batch_size=BATCH, **settings) as store:
        actor = store.actor()
        for first in range(0, rows, 100_000):
            actor.push_trajectory({"number": np.arange(first, min(first + 100_000, rows))})
        store.sample(BATCH, to="numpy")
        store.save(folder / "c")
        saved, took_s = zip(*(timed(lambda: store.save(folder / "c")) for _ in range(5)), strict=True)
    (told,) = {each.written_bytes for each in saved}
    return {
        "paused_ms": round(1e3 * min(each.paused_s for each in saved), 2),
        "took_ms": round(1e3 * min(took_s), 1),
        "bytes_a_row": round(told / rows, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    gigabytes, quiet_s = (0.2, 1.0) if asked.quick else (asked.gigabytes, QUIET_S)
    with tempfile.TemporaryDirectory(dir=asked.folder) as made:
        found = under_load(gigabytes, asked.saves, quiet_s, Path(made))
    for name in ("no save", "full save", "incremental save", "stop and copy"):
        each = found[name]
        calls = (
            f"{kind} p50 {each[kind]['p50_us']:8.0f} p99 {each[kind]['p99_us']:9.0f} max {each[kind]['max_us']:9.0f} µs"
            for kind in ("push", "pull")
        )
        print(
            f"  {name:18} {'   '.join(calls)}   { ({k: v for k, v in each.items() if k not in ('push', 'pull')}) }",
            flush=True,
        )
    kept: dict[str, Any] = {}
    for rows in (10**5,) if asked.quick else (10**6, 10**7):
        for name, settings in KEPT.items():
            with tempfile.TemporaryDirectory(dir=asked.folder) as made:
                kept[f"{rows:,} rows, {name}"] = beside_the_rows(rows, settings, Path(made))
            print(f"  {rows:,} rows, {name}: {kept[f'{rows:,} rows, {name}']}", flush=True)
    if not asked.quick:
        says = "measured on this machine; µs a push of 8 rows and a pull of 256 that began during each; paused_ms: Saved.paused_s, of each save"
        print(save("checkpoint", {"figures": says, "under_load": found, "beside_the_rows": kept}))


if __name__ == "__main__":
    main()
