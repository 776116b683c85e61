"""What a stored row costs in memory, beyond the bytes that were handed in. Measured on this CPU; Linux only.

    python benchmarks/memory.py [--rows 10000000] [--frames 20000] [--quick]

Each case has a process of its own: anonymous resident memory once a store was filled past its capacity, less what it was
before the store was made. A small store is used up beforehand, so that what first calls bring in doesn't count. Rows of 41 B
come in episodes of 200, `next_obs` pushed. Frames are 84 × 84 bytes with action, reward and ends, in episodes of 200, every other
one truncated, with a final. `--quick`: fewer rows, whose noise counts for more; nothing is saved."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measure import save
from peers.workloads import EPISODE, GAMMA, N_STEP, Rows, rows_of

import conduit

ROWS, FRAMES, QUICK = 10_000_000, 20_000, (1_000_000, 4_000)
WARM_UP_ROWS = 2_000
DEPTH = 4
SHARE, A_ROW, PRIORITIZED = 0.03, 24.0, 16.0
"""May be taken beyond the bytes handed in: a share of them, so much a row, and so much more a prioritized one."""
SAVED = 0.45
"""Should be saved where frames are stored once."""
NEXT = {"next_obs": conduit.Next("obs")}
STACKS = {"obs": conduit.Stack("obs", DEPTH), **NEXT}
STEPS = conduit.NStep(N_STEP, GAMMA)


def small() -> Rows:
    return rows_of("41 B", EPISODE)


def frames(depth: int = 0, next_obs: bool = False) -> Rows:
    """An episode of frames, or of stacks of them."""
    rows = {name: leaf for name, leaf in rows_of("7 KB", EPISODE).items() if name != "terminated"}
    if depth:
        rows["obs"] = np.repeat(rows["obs"][:, None], depth, axis=1)
    return rows | ({"next_obs": rows["obs"].copy()} if next_obs else {})


@dataclass(frozen=True)
class Case:
    """`episode`: its rows. `instead_of`: the case that it shall save memory over."""

    episode: Callable[[], Rows]
    settings: dict[str, Any] = field(default_factory=dict)
    instead_of: str | None = None


CASES = {
    "41 B": Case(small),
    "41 B, linked": Case(small, {"item": STEPS}),
    "41 B, prioritized": Case(small, {"sampler": conduit.Prioritized()}),
    "41 B, linked, prioritized": Case(small, {"item": STEPS, "sampler": conduit.Prioritized()}),
    "frames, next_obs pushed": Case(lambda: frames(next_obs=True)),
    "frames, next_obs derived": Case(frames, {"derive": NEXT}, "frames, next_obs pushed"),
    "4-stacks, both pushed": Case(lambda: frames(DEPTH, next_obs=True)),
    "4-stacks, both derived": Case(frames, {"derive": STACKS}, "4-stacks, both pushed"),
}


def fill(case: Case, episode: Rows, capacity: int) -> conduit.Store:
    """A store that has evicted a tenth of its rows."""
    store = conduit.Store(capacity=capacity, batch_size=32, **case.settings)
    actor, final = store.actor(), {"obs": episode["obs"][0]} if case.settings.get("derive") else None
    framed = "terminated" not in episode
    for number in range(-(-capacity * 11 // 10 // EPISODE)):
        if framed and number % 2:
            actor.push_trajectory(episode, end="truncated", final=final)
        else:
            actor.push_trajectory(episode, end="terminated")
    return store


def measure(case: Case, capacity: int) -> float:
    """Bytes a row, in this process."""
    episode = case.episode()
    with fill(case, episode, WARM_UP_ROWS) as warm:
        warm.learner().pull()
    before = _resident_bytes()
    with fill(case, episode, capacity) as store:
        after = _resident_bytes()
        store.learner().pull()
    return (after - before) / capacity


def _resident_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def apart(name: str, capacity: int) -> float:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--case", name, str(capacity)]
    # glibc gives freed arrays back at once: what is resident is what is held.
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environ).stdout)


def compare(name: str, case: Case, capacity: int, known: dict[str, Any]) -> dict[str, Any]:
    """A case's figures; `known` has those of the cases before it."""
    handed_in = sum(leaf.nbytes for leaf in case.episode().values()) / EPISODE
    a_row = apart(name, capacity)
    figures = {"rows": capacity, "handed_in": handed_in, "bytes_a_row": round(a_row, 2)}
    if case.instead_of is not None:
        saved = 1 - a_row / known[case.instead_of]["bytes_a_row"]
        return figures | {"instead_of": case.instead_of, "saved": round(saved, 4), "target": SAVED}
    target = SHARE * handed_in + A_ROW + (PRIORITIZED if "sampler" in case.settings else 0.0)
    return figures | {"beyond": round(a_row - handed_in, 2), "target": round(target, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(measure(CASES[asked.case[0]], int(asked.case[1]))))
        return
    rows, images = QUICK if asked.quick else (ROWS, FRAMES)
    rows, images = asked.rows or rows, asked.frames or images
    print("Bytes a row, as handed in and as resident when stored. Measured on this CPU.")
    known: dict[str, Any] = {}
    for name, case in CASES.items():
        known[name] = each = compare(name, case, rows if case.episode is small else images, known)
        if "saved" in each:
            verdict = f"−{each['saved']:.1%} of {each['instead_of']!r} (target −{each['target']:.0%})"
        else:
            verdict = f"{each['beyond']:+.2f} B (target ≤ {each['target']:.2f})"
        print(f"  {name:26} {each['handed_in']:10.1f} {each['bytes_a_row']:12.2f}   {verdict}", flush=True)
    if not asked.quick:
        told = "measured on this CPU; anonymous resident bytes a row of a full store, beyond those handed in"
        print(save("memory", {"figures": told, "cases": known}))


if __name__ == "__main__":
    main()
