"""What all benchmarks share: interleaved rounds, honest summaries, one JSON file each."""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

# After what is installed: `python benchmarks/….py` runs from a checkout without installing it.
sys.path.append(str(Path(__file__).parents[1]))


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 3, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds of each call, all contenders once a round, in an order that changes every round: what slows the machine down
    for a while slows all of them."""
    shuffle = random.Random(seed)
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for number in range(warm_up + rounds):
            shuffle.shuffle(names)
            for name in names:
                began_s = time.perf_counter()
                contenders[name]()
                took_s = time.perf_counter() - began_s
                if number >= warm_up:
                    seconds[name].append(took_s)
    finally:
        gc.enable()
    return seconds


def summarise(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Median and p99 in µs, and the median ratio to the baseline's call of the same round."""
    summary = {}
    for name, taken in seconds.items():
        ratios = [mine / other for mine, other in zip(taken, seconds[baseline], strict=True)]
        summary[name] = {
            "median_us": round(1e6 * statistics.median(taken), 2),
            "p99_us": round(1e6 * statistics.quantiles(taken, n=100)[98], 2),
            "ratio": round(statistics.median(ratios), 2),
        }
    return summary


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def _cpu() -> str:
    """The model's name where Linux tells it: the platform module knows only the architecture there."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def save(name: str, figures: Mapping[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n")
    return path
