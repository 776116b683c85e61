"""Stores that are killed while they save: what is in their folder afterwards. Measured on this machine.

    python benchmarks/faults.py [--kills 50] [--seed 0] [--folder FOLDER] [--quick]

A process makes a store, or takes up the one in the folder, and saves it again and again while a thread pushes and another pulls
and tells priorities. At a random moment of a save it is killed (SIGKILL), and the next one goes on from what is there. After each kill the
checkpoint must be the one before that save or the one it made, every byte of it as it was written; it must open on another
backend; its rows must be a gapless run of keys whose contents are what their keys say; and drawing must go on.
Two kinds of stores by turns: a ring whose rows have links and finals, and one whose rows leave by priority or when they have been drawn
often enough. `--quick`: nothing is saved."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import save

import conduit
from conduit.core.archive import Archive

KILLS = 50
LANES, CAPACITY, BATCH = 8, 20_000, 64
BACKENDS = ("reference", "torch", "jax")


@dataclass(frozen=True)
class Kind:
    name: str
    settings: dict[str, Any]
    in_order: bool


KINDS = (
    Kind("ring", {"sampler": conduit.Prioritized(), "derive": {"next_obs": conduit.Next("obs")}}, in_order=True),
    Kind(
        "places", {"sampler": conduit.MaxHeap(), "remover": conduit.MinHeap(), "max_times_sampled": 2}, in_order=False
    ),
)


def rows_of(number: np.ndarray) -> dict[str, np.ndarray]:
    """What rows of these keys hold."""
    number = number.astype(np.int32)
    return {
        "number": number,
        "obs": number[:, None].astype(np.float32) * np.arange(1, 9, dtype=np.float32),
        "bytes": (number[:, None] * 7 + np.arange(48)).astype(np.uint8),
        "truncated": number % (5 * LANES) < LANES,
    }


def work(kind: Kind, path: Path) -> None:
    """The life of a process that will be killed: says when a save begins, and which checkpoint it made."""
    if (path / "manifest.json").exists():
        store = conduit.Store.restore(path)
    else:
        store = conduit.Store(backend="reference", capacity=CAPACITY, batch_size=BATCH, seed=1, **kind.settings)
    came = store.info()["inserted"]

    actor = store.actor(LANES)

    def push_one() -> None:
        nonlocal came
        rows = rows_of(np.arange(came, came + LANES))
        ended = bool(rows["truncated"][0])
        actor.push(rows, final={"obs": -rows["obs"]} if ended else None)
        came += LANES

    def push() -> None:
        while True:
            push_one()
            time.sleep(0.0002)

    def pull() -> None:
        learner = store.learner()
        while True:
            batch = learner.pull(timeout_s=60)
            store.update_priorities(batch.info.keys, (batch.info.keys % 100).astype(np.float64))
            time.sleep(0.002)

    # Soon full: from then on rows leave as well.
    while came < CAPACITY * 0.9:
        push_one()
    for target in (push, pull):
        threading.Thread(target=target, daemon=True).start()
    while True:
        print("saving", flush=True)
        saved = store.save(path)
        print(saved.generation, saved.rows, saved.written_rows, f"{saved.paused_s:.6f}", flush=True)


@dataclass(frozen=True)
class Found:
    """What was there after a kill."""

    generation: int
    rows: int
    left_files: int
    """That no manifest names."""


def check(kind: Kind, path: Path, backend: str) -> Found:
    """What is in the folder, which must be whole and right. AssertionError or CheckpointError says what isn't."""
    archive = Archive(path)
    verified = archive.verify()
    named = archive.open().files.keys()
    left = [entry.name for entry in path.iterdir() if entry.name not in (*named, "lock", "manifest.json")]
    with conduit.Store.restore(path, backend=backend) as store:
        stored = store.read()
        keys, data = stored.keys, stored.data
        inserted = store.info()["inserted"]
        assert len(keys) == len(store) > 0
        assert keys[-1] < inserted
        if kind.in_order:
            assert keys.tolist() == list(range(inserted - len(keys), inserted)), "its keys have gaps"
        for name, expected in rows_of(keys).items():
            assert data[name].tobytes() == expected.tobytes(), f"its leaf {name!r} isn't what the keys say"
        if kind.in_order and store.can_sample():
            batch = store.sample(BATCH, to="numpy")
            drawn: Any = batch.data
            ended = drawn["truncated"]
            following = rows_of(batch.info.keys + LANES)["obs"]
            expected = np.where(ended[:, None], -drawn["obs"], following)
            assert drawn["next_obs"].tobytes() == expected.tobytes(), "its links or finals are wrong"
        actor = store.actor(LANES)
        for first in range(inserted, inserted + 10 * LANES, LANES):
            actor.push(rows_of(np.arange(first, first + LANES)))
        store.learner().pull(timeout_s=10)
    return Found(verified.generation, len(keys), len(left))


def killed(kind: Kind, path: Path, moment: random.Random) -> int:
    """Lets a process save, and kills it within a save. Which checkpoint it said it had made last; 0 if none."""
    command = [sys.executable, __file__, "--work", kind.name, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        made, took_s = 0, 0.05
        for _ in range(moment.randrange(1, 4)):
            assert process.stdout.readline().startswith("saving"), "the store failed"
            began_s = time.perf_counter()
            made = int(process.stdout.readline().split()[0])
            took_s = time.perf_counter() - began_s
        assert process.stdout.readline().startswith("saving"), "the store failed"
        time.sleep(moment.uniform(0, took_s))
        process.kill()
        # It may have made others before the kill struck.
        rest = [line.split() for line in process.stdout.read().splitlines()]
        return max([made, *(int(words[0]) for words in rest if len(words) == 4)])


def kill_often(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Kills, and what was found after them. AssertionError at the first that isn't as it must be."""
    moment, outcome = random.Random(seed), Counter[str]()
    last = {kind.name: 0 for kind in KINDS}
    rows, left_files = [], 0
    for number in range(kills):
        kind, backend = KINDS[number % len(KINDS)], BACKENDS[number % len(BACKENDS)]
        path = folder / kind.name
        made = killed(kind, path, moment)
        found = check(kind, path, backend)
        assert made > last[kind.name], "it didn't go on from the checkpoint before"
        assert found.generation in (made, made + 1), f"generation {found.generation} after {made}"
        outcome["the one before" if found.generation == made else "the new one"] += 1
        left_files += found.left_files > 0
        rows.append(found.rows)
        last[kind.name] = found.generation
    return {
        "kills": kills,
        "whole": kills,
        "found": dict(outcome),
        "with_files_of_the_killed_left": left_files,
        "generations": last,
        "rows": [min(rows), max(rows)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        (kind,) = (each for each in KINDS if each.name == asked.work[0])
        work(kind, Path(asked.work[1]))
        return
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        figures = kill_often(asked.kills, asked.seed, Path(folder))
    figures["took_s"] = round(time.perf_counter() - began_s, 1)
    print(json.dumps(figures))
    if not asked.quick:
        told = "processes killed within a save under load; found: which checkpoint was whole afterwards; rows: the fewest and the most in one"
        print(save("faults", {"figures": told, **figures}))


if __name__ == "__main__":
    main()
