"""Everything that only a GPU can show, in one run of under ten minutes: the GPU tests, the contract suite on the
devices, how fast rows go in, are gathered and are handed over, against plain copies of the same bytes, what a probe
finds of the card, how fast a store's rows move to it and back, and what an automatic schedule makes of a loop whose
update runs there.

    python benchmarks/gpu_check.py > gpu.json

Prints one JSON object. Without a GPU it says so and succeeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import conduit
from conduit.backends import load
from conduit.clock import REAL
from conduit.core.backend import Columns, Target
from conduit.core.experience import Schema
from conduit.core.probing import known, measure
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

ROOT = Path(__file__).parent.parent
ROW_BYTES = (1 << 10, 48 << 10, 192 << 10)
BATCH_BYTES = 64 << 20
STORE_BYTES = 1 << 30
TEST_LIMIT_S = 240
PROBE_S = 5.0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--no-tests", action="store_true", help="only the benchmarks")
    arguments = options.parse_args()
    if find_spec("torch") is None:
        print("no GPU here: torch is not installed")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("no GPU here")
        return 0
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(0),
        "cards": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if not arguments.no_tests:
        report["tests"] = run_tests()
    report["gigabytes_per_s"] = [rates(row_bytes) for row_bytes in ROW_BYTES]
    report["probe"] = probed()
    report["migration"] = [migrated(row_bytes) for row_bytes in ROW_BYTES]
    report["schedule"] = [
        scheduled(row_bytes, at, "cuda:0") for row_bytes in ROW_BYTES for at in ("device:0", "pinned")
    ]
    print(json.dumps(report, indent=2))
    return int(not arguments.no_tests and report["tests"]["exit"] != 0)


def run_tests() -> dict[str, Any]:
    """The GPU tests and the contract suite, in a process of their own (JAX would take most of the card's memory)."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "tests/gpu",
        "tests/contract",
        "-p",
        "no:cacheprovider",
    ]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_LIMIT_S)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = 124, str(late.stdout or "")
    return {"exit": code, "seconds": round(time.perf_counter() - started, 1), "output": output.splitlines()[-60:]}


def rates(row_bytes: int) -> dict[str, Any]:
    """GB/s of each operation on batches of BATCH_BYTES, and of plain copies of as many bytes."""
    import torch

    backend, device = load("torch"), Endpoint(Tier.DEVICE)
    store_rows, batch_rows = STORE_BYTES // row_bytes, BATCH_BYTES // row_bytes
    rows = Columns(PAGEABLE, {"row": np.ones((batch_rows, row_bytes), np.uint8)}, batch_rows)
    schema, fields = Schema.infer(dict(rows.arrays), "benchmark"), ["row"]
    index = np.random.default_rng(0).integers(0, store_rows, batch_rows)
    result: dict[str, Any] = {"row_bytes": row_bytes, "rows": batch_rows, **plain_copies()}
    for at in backend.endpoints():
        if at.index:
            continue
        columns = backend.allocate(schema, store_rows, at)
        result[f"insert into {at}"] = rate(lambda columns=columns: backend.write(columns, 0, rows))
        for to in (at, device):
            result[f"gather {at} to {to}"] = rate(
                lambda columns=columns, to=to: backend.read(columns, index, fields, to)
            )
        batch = backend.read(columns, index, fields, device)
        result[f"hand over {at} to numpy"] = rate(
            lambda columns=columns: backend.hand_over(backend.read(columns, index, fields, PAGEABLE), Target("numpy"))
        )
        backend.wait(batch)
        backend.release(columns)
    torch.cuda.empty_cache()
    return result


def probed(seconds: float = PROBE_S) -> dict[str, Any]:
    """What a probe measures of the first device's edges, in how many seconds, beside what is assumed of them without."""
    backend, device = load("torch"), Endpoint(Tier.DEVICE)
    began_s = time.perf_counter()
    found = measure(backend, REAL, seconds=seconds)
    took_s = time.perf_counter() - began_s
    assumed, edges = known(backend), {}
    for at in backend.endpoints():
        for edge in dict.fromkeys([(device, at), (at, device)]):
            leg, before = found.leg(*edge), assumed.leg(*edge)
            edges[f"{edge[0]} to {edge[1]}"] = {
                "gigabytes_per_s": round(leg.bytes_per_s / 1e9, 2),
                "latency_us": round(leg.latency_s * 1e6, 1),
                "noise": round(leg.noise, 3),
                before.source.value: round(before.bytes_per_s / 1e9, 2),
            }
    links = {name: round(link.bytes_per_s / 1e9, 2) for name, link in found.links.items()}
    return {"seconds": round(took_s, 1), "edges": edges, "links_gigabytes_per_s": links}


def migrated(row_bytes: int, store_bytes: int = STORE_BYTES) -> dict[str, Any]:
    """A full store's rows from place to place, nobody pushing: GB/s of the whole move, and how long pushes had to wait."""
    backend, capacity, lanes = load("torch"), store_bytes // row_bytes, 64
    result: dict[str, Any] = {"row_bytes": row_bytes, "rows": capacity}
    pinned = ["pinned"] if any(at.tier is Tier.PINNED for at in backend.endpoints()) else []
    with conduit.Store(
        backend=backend, capacity=capacity, batch_size=64, placement="pageable", timeout_s=120.0
    ) as store:
        actor = store.actor(lanes=lanes)
        for number in range(-(-capacity // lanes)):
            actor.push({"row": np.full((lanes, row_bytes), number % 251, np.uint8)})
        before = "pageable"
        for place in ("device:0", *pinned, "device:0", "pageable", "device:0"):
            if place == before:
                continue
            moved = store.migrate(place)
            result[f"{before} to {place}"] = {
                "gigabytes_per_s": round(moved.moved_bytes / moved.seconds / 1e9, 2),
                "seconds": round(moved.seconds, 3),
                "pause_ms": round(1e3 * moved.pause_s, 2),
            }
            before = place
    return result


def scheduled(
    row_bytes: int, placement: str, device: str, store_bytes: int = STORE_BYTES, iterations: int = 500
) -> dict[str, Any]:
    """An off-policy loop whose update is matrix products on the device, in line and with schedule="auto": ms an iteration, what of it push and
    pull took, what was chosen, and µs of a pull of a batch that was staged. Medians of the last fifth, the device having finished each update."""
    import torch

    lanes, batch_rows = 16, 256
    weights = torch.rand(2048, 2048, device=device)
    row = {"row": np.ones((lanes, row_bytes), np.uint8)}
    result: dict[str, Any] = {"row_bytes": row_bytes, "placement": placement}
    for name in ("in line", "auto"):
        with conduit.Store(
            backend="torch",
            capacity=max(4 * batch_rows, store_bytes // row_bytes),
            batch_size=batch_rows,
            placement=placement,
            schedule=None if name == "in line" else "auto",
            timeout_s=120.0,
        ) as store:
            actor, learner = store.actor(lanes=lanes), store.learner(device=device)
            for _ in range(2 * batch_rows // lanes):
                actor.push(row)
            pulls, whole = [], []
            for _ in range(iterations):
                began_s = time.perf_counter()
                actor.push(row)
                staged, asked_s = learner.staged > 0, time.perf_counter()
                batch = learner.pull()
                pulls.append((staged, time.perf_counter() - asked_s))
                with store.update():
                    made = weights
                    for _ in range(8):
                        made = made @ weights
                    float(made[0, 0] + batch.data["row"][0, 0])
                whole.append(time.perf_counter() - began_s)
            last = iterations // 5
            waits = [took_s for staged, took_s in pulls[-last:] if staged]
            exposed = [each.exposed_s for each in store.ledger.iterations[-last:]]
            result[name] = {
                "ms_an_iteration": round(1e3 * median(whole[-last:]), 3),
                "exposed_ms": round(1e3 * median(exposed), 3),
                "staged_pull_us": round(1e6 * median(waits), 1) if waits else None,
                "schedule": asdict(store.schedule),
            }
    return result


def plain_copies() -> dict[str, float]:
    """What the machine does with BATCH_BYTES when nobody gathers."""
    import torch

    pageable = torch.ones(BATCH_BYTES, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    device = pageable.cuda()
    other = torch.empty_like(device)
    return {
        "memcpy host to host": rate(lambda: pageable.clone()),
        "memcpy pageable to device": rate(lambda: device.copy_(pageable)),
        "memcpy pinned to device": rate(lambda: device.copy_(pinned, non_blocking=True)),
        "memcpy device to pinned": rate(lambda: pinned.copy_(device, non_blocking=True)),
        "memcpy device to device": rate(lambda: other.copy_(device)),
    }


def rate(call: Callable[[], object], repeats: int = 9) -> float:
    """GB/s of `call`, which handles BATCH_BYTES: the median, the device having finished."""
    import torch

    seconds = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return round(BATCH_BYTES / median(seconds[2:]) / 1e9, 2)


if __name__ == "__main__":
    sys.exit(main())
