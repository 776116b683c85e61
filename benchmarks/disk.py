"""What rows on disk cost beside rows in memory, at four times a RAM budget. Measured on this machine; Linux only.

    python benchmarks/disk.py [--budget 256MiB] [--rounds 60] [--folder FOLDER] [--quick]

1 GiB of rows, 41 B and 48 KB each, in stores of three kinds that live in one process and take turns: pageable; on disk, with
all pages in memory; on disk, with none, for they are put out before every turn. A turn is one pull, or 64 pushes in a row. Then,
in a process of its own: a store on disk whose process may take 256 MiB more than before, pages of files included, by a cgroup;
where none can be made, its figures are missing. It goes round its ring once before. Every batch is checked. `--quick`: a quarter of
all sizes; nothing is saved."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import save

import conduit
from conduit.backends import load
from conduit.backends.disk import Disk
from conduit.core.placement import format_bytes, parse_bytes

BUDGET, TIMES, ROUNDS = "256MiB", 4, 60
LANES, PUSHES = 8, 64
AT_ONCE_BYTES = 1 << 20
"""Rows of a push while a store is filled."""


@dataclass(frozen=True)
class Work:
    name: str
    shape: tuple[int, ...]
    batch_size: int

    @property
    def row_bytes(self) -> int:
        return 8 + int(np.prod(self.shape))

    def rows(self, first: int, count: int) -> dict[str, np.ndarray]:
        """Numbered rows, each full of its number's last byte."""
        numbers = np.arange(first, first + count)
        return {
            "number": numbers,
            "bytes": np.repeat(numbers.astype(np.uint8), self.row_bytes - 8).reshape(count, *self.shape),
        }


WORKS = (Work("41 B × 256", (33,), 256), Work("48 KB × 32", (128, 128, 3), 32))


class Filled:
    """A full store, and one turn of each kind."""

    def __init__(self, work: Work, rows: int, placement: str, folder: Path) -> None:
        self.work, self.rows, self.pushed = work, rows, 0
        budgets = None if placement == "pageable" else {"disk": rows * work.row_bytes}
        self.store = conduit.Store(
            backend=load("torch", folder),
            capacity=rows,
            batch_size=work.batch_size,
            placement=placement,
            budgets=budgets,
        )
        self.actor, self.learner = self.store.actor(LANES), self.store.learner(to="numpy")
        self.filler = self.store.actor()

    def fill(self) -> None:
        step = max(1, AT_ONCE_BYTES // self.work.row_bytes)
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            self.filler.push_trajectory(self.work.rows(self.pushed, count))
            self.pushed += count

    def push(self) -> float:
        """Seconds of a push, the mean of a turn."""
        steps = [self.work.rows(self.pushed + LANES * number, LANES) for number in range(PUSHES)]
        began_s = time.perf_counter()
        for step in steps:
            self.actor.push(step)
        took_s = time.perf_counter() - began_s
        self.pushed += PUSHES * LANES
        return took_s / PUSHES

    def pull(self) -> float:
        began_s = time.perf_counter()
        batch = self.learner.pull()
        took_s = time.perf_counter() - began_s
        data: Any = batch.data
        np.testing.assert_array_equal(data["number"], batch.info.keys)
        expected = np.broadcast_to(
            batch.info.keys.astype(np.uint8)[:, None], (len(batch.info.keys), self.work.row_bytes - 8)
        )
        np.testing.assert_array_equal(data["bytes"].reshape(expected.shape), expected)
        return took_s


def put_out(folder: Path) -> None:
    """No page of this process's files in the folder is in memory."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(folder)):
                os.fsync(int(number))
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            first, last = (int(each, 16) for each in line.split()[0].split("-"))
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(folder)):
                os.posix_fadvise(int(number), 0, 0, os.POSIX_FADV_DONTNEED)


def beside(work: Work, rows: int, rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds of pushes and pulls of the three kinds of stores, in turns."""
    folders = {"pageable": folder, "disk, in memory": folder / "warm", "disk, out of memory": folder / "cold"}
    stores: dict[str, Filled] = {}
    for name, at in folders.items():
        at.mkdir(exist_ok=True)
        stores[name] = Filled(work, rows, name.partition(",")[0], at)
        stores[name].fill()
    seconds: dict[str, dict[str, list[float]]] = {name: {"push": [], "pull": []} for name in stores}
    for number in range(rounds + 3):
        for name, each in stores.items():
            turns: tuple[tuple[str, Callable[[], float]], ...] = (("push", each.push), ("pull", each.pull))
            for kind, turn in turns:
                if name == "disk, out of memory":
                    put_out(folders[name])
                took_s = turn()
                if number >= 3:
                    seconds[name][kind].append(took_s)
    for each in stores.values():
        each.store.close()
    return seconds


def group_of(process: int) -> tuple[Path, str]:
    """The cgroup that the process gets for itself, and the name of its limit."""
    first = Path("/sys/fs/cgroup/memory")
    place, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    return place / f"conduit-disk-{process}", limit


def hold_within(budget: int) -> bool:
    """From here on this process may take so many bytes more, the pages of files included: what it has taken stays in the
    group that it comes from. False where no cgroup can be made for that."""
    group, limit = group_of(os.getpid())
    try:
        group.mkdir()
        (group / limit).write_text(str(budget))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return False
    return True


def held(work: Work, rows: int, rounds: int, folder: Path, budget: int) -> dict[str, Any] | None:
    """The same of one store on disk in a process that is held within the budget."""
    warm = Filled(work, 1000, "disk", folder)
    warm.fill()
    warm.push()
    warm.pull()
    warm.store.close()
    if not hold_within(budget):
        return None
    filled = Filled(work, rows, "disk", folder)
    filled.fill()
    filled.fill()
    pushes = [filled.push() for _ in range(rounds)]
    pulls = [filled.pull() for _ in range(rounds)]
    with filled.store as store:
        traffic = {name: asdict(each) for name, each in store.ledger.traffic.items()}
    return {"seconds": {"push": pushes, "pull": pulls}, "traffic": traffic}


def apart(work: Work, rows: int, rounds: int, folder: Path, budget: int) -> dict[str, Any] | None:
    """`held` in a process of its own."""
    command = [sys.executable, __file__, "--held", work.name, str(rows), str(rounds), str(folder), str(budget)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        answer, _ = process.communicate()
    with contextlib.suppress(OSError):
        group_of(process.pid)[0].rmdir()
    if process.returncode:
        raise SystemExit(
            f"the held process ended with {process.returncode}: of {budget:,} bytes it needed more than it can give back"
        )
    return json.loads(answer)


def figures(seconds: dict[str, list[float]], pageable: dict[str, list[float]]) -> dict[str, float]:
    """Medians and p90 in µs, and the medians' ratio to those of rows in memory."""
    found = {}
    for kind, taken in seconds.items():
        median = statistics.median(taken)
        found[f"{kind}_median_us"] = round(1e6 * median, 1)
        found[f"{kind}_p90_us"] = round(1e6 * statistics.quantiles(taken, n=10)[8], 1)
        found[f"{kind}_ratio"] = round(median / statistics.median(pageable[kind]), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default=BUDGET)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--held", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.held:
        (work,) = (each for each in WORKS if each.name == asked.held[0])
        rows, rounds, budget = (int(asked.held[place]) for place in (1, 2, 4))
        print(json.dumps(held(work, rows, rounds, Path(asked.held[3]), budget)))
        return
    budget, rounds = parse_bytes(asked.budget) // (4 if asked.quick else 1), 8 if asked.quick else asked.rounds
    print(
        f"{format_bytes(TIMES * budget)} of rows, {TIMES} × a RAM budget of {format_bytes(budget)}. Measured on this machine."
    )
    works = {}
    for work in WORKS:
        rows = TIMES * budget // work.row_bytes
        with tempfile.TemporaryDirectory(dir=Disk(asked.folder).folder) as made:
            seconds = beside(work, rows, rounds, Path(made))
            alone = apart(work, rows, rounds, Path(made), budget)
        if alone is not None:
            seconds["disk, held within the budget"] = alone["seconds"]
        kinds = {name: figures(each, seconds["pageable"]) for name, each in seconds.items()}
        works[work.name] = {"rows": rows, "kinds": kinds, "traffic_when_held": alone and alone["traffic"]}
        print(f"  {work.name}: {rows:,} rows")
        for name, each in kinds.items():
            costs = (
                f"{kind} {each[f'{kind}_median_us']:9.1f} µs × {each[f'{kind}_ratio']:<6}" for kind in ("push", "pull")
            )
            print(f"    {name:30} {'   '.join(costs)}", flush=True)
    if not asked.quick:
        told = "measured on this machine; medians, µs a push of 8 rows and µs a pull, ratios to rows in memory"
        print(save("disk", {"figures": told, "budget_bytes": budget, "times": TIMES, "rounds": rounds, "works": works}))


if __name__ == "__main__":
    main()
