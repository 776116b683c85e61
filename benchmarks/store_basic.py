"""Push and pull of the three backends, as ratios to a plain NumPy ring in the same run. Measured on this CPU.

    python benchmarks/store_basic.py [--rounds 200]

The plain ring is a dict of NumPy columns: slices to insert, fancy indexing to draw; no lock, checks, keys or priorities.
Conduit's pull, in line, and sample draw, gather, hand over to the backend's framework and bring SampleInfo along."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from measure import interleaved, save, summarise

import conduit

SMALL_CAPACITY, LARGE_CAPACITY = 200_000, 8_000
BATCH = 256
Calls = dict[str, Callable[[], object]]
STORES = {
    "reference": ("reference", "auto"),
    "torch": ("torch", "auto"),
    "torch device": ("torch", "device:0"),
    "jax": ("jax", "auto"),
    "jax device": ("jax", "device:0"),
}


def small_rows(count: int) -> dict[str, np.ndarray]:
    """41 bytes a row in 5 fields."""
    obs = np.random.default_rng(0).random((count, 4), np.float32)
    return {
        "obs": obs,
        "action": np.zeros(count, np.int32),
        "reward": np.ones(count, np.float32),
        "next_obs": obs.copy(),
        "terminated": np.zeros(count, np.bool_),
    }


def large_rows(count: int) -> dict[str, np.ndarray]:
    """48 KB a row: one image of 128 × 128 RGB."""
    return {"obs": np.random.default_rng(0).integers(256, size=(count, 128, 128, 3), dtype=np.uint8)}


class PlainRing:
    def __init__(self, capacity: int, rows: dict[str, np.ndarray]) -> None:
        self.columns = {name: np.zeros((capacity, *leaf.shape[1:]), leaf.dtype) for name, leaf in rows.items()}
        self.capacity, self.at = capacity, 0
        self.random = np.random.default_rng(0)

    def push(self, rows: dict[str, np.ndarray]) -> None:
        count = len(next(iter(rows.values())))
        head = min(count, self.capacity - self.at)
        for name, leaf in rows.items():
            self.columns[name][self.at : self.at + head] = leaf[:head]
            self.columns[name][: count - head] = leaf[head:]
        self.at = (self.at + count) % self.capacity

    def sample(self, count: int) -> dict[str, np.ndarray]:
        index = self.random.integers(self.capacity, size=count)
        return {name: column[index] for name, column in self.columns.items()}


def measure(kind: str, rows_of: Callable[[int], dict[str, np.ndarray]], capacity: int, rounds: int) -> dict:
    figures = {}
    fill = rows_of(min(capacity, 2000))
    count = len(next(iter(fill.values())))
    ring = PlainRing(capacity, fill)
    stores = {
        name: conduit.Store(backend=backend, placement=at, capacity=capacity, batch_size=BATCH)
        for name, (backend, at) in STORES.items()
    }
    for pusher in (ring.push, *(store.actor(lanes=count).push for store in stores.values())):
        for _ in range(-(-capacity // count)):
            pusher(fill)
    for size in (1, 64, 512):
        rows = rows_of(size)
        calls: Calls = {"plain ring": partial(ring.push, rows)}
        for name, store in stores.items():
            calls[name] = partial(store.actor(lanes=size).push, rows)
        figures[f"push {size} × {kind}"] = summarise(interleaved(calls, rounds), "plain ring")
    learners = {name: store.learner() for name, store in stores.items()}
    calls = {"plain ring": partial(ring.sample, BATCH)}
    for name, learner in learners.items():
        calls[name] = there(name, learner.pull)
    figures[f"pull {BATCH} × {kind}"] = summarise(interleaved(calls, rounds), "plain ring")
    for size in (BATCH, 512):
        calls = {"plain ring": partial(ring.sample, size)}
        for name, store in stores.items():
            calls[name] = there(name, partial(store.sample, size))
        figures[f"sample {size} × {kind}"] = summarise(interleaved(calls, rounds), "plain ring")
    for store in stores.values():
        store.close()
    return figures


def there(name: str, draw: Callable[[], conduit.Batch]) -> Callable[[], object]:
    """`draw` until its batch is there: JAX gathers asynchronously."""
    return partial(_until_ready, draw) if STORES[name][0] == "jax" else draw


def _until_ready(draw: Callable[[], conduit.Batch]) -> None:
    leaf: Any
    for leaf in draw().data.values():
        leaf.block_until_ready()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    figures = measure("41 B", small_rows, SMALL_CAPACITY, rounds)
    figures |= measure("48 KB", large_rows, LARGE_CAPACITY, max(rounds // 4, 20))
    for workload, contenders in figures.items():
        print(workload)
        for name, each in contenders.items():
            print(f"  {name:14} {each['median_us']:10.1f} µs  p99 {each['p99_us']:10.1f}  × {each['ratio']:.2f}")
    print(save("store_basic", {"figures": "measured on this CPU", "workloads": figures}))


if __name__ == "__main__":
    main()
