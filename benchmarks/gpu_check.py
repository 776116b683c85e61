"""Everything that only a GPU can show, in one run of under ten minutes: the GPU tests, the contract suite on the
devices, and how fast rows go in, are gathered and are handed over, against plain copies of the same bytes.

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
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from conduit.backends import load
from conduit.core.backend import Columns, Target
from conduit.core.experience import Schema
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

ROOT = Path(__file__).parent.parent
ROW_BYTES = (1 << 10, 48 << 10, 192 << 10)
BATCH_BYTES = 64 << 20
STORE_BYTES = 1 << 30
TEST_LIMIT_S = 240


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
    report["gigabytes_per_s"] = [measure(row_bytes) for row_bytes in ROW_BYTES]
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


def measure(row_bytes: int) -> dict[str, Any]:
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
