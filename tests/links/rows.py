"""Stores with links, and rows that are easy to follow by hand: row k observes 10k, earns k and is called k."""

from __future__ import annotations

from typing import Any

import numpy as np

import conduit
from tests.links.reference import flat
from tests.store.rows import host, store

NEXT = {"next_obs": conduit.Next("obs")}


def linked(**settings: Any) -> conduit.Store:
    """A store on the reference backend whose batches are small."""
    return store(**({"capacity": 32, "batch_size": 1} | settings))


def lived(actor: conduit.Actor, first: int, length: int, end: str = "open", final: float | None = None, lane: int = 0):
    """Pushes rows first … first + length - 1 of one lane, the last of which ends as `end`."""
    number = np.arange(first, first + length)
    last = number == first + length - 1
    rows = {
        "id": number.astype(np.int32),
        "obs": (10 * number).astype(np.float32),
        "reward": number.astype(np.float32),
        "terminated": last & (end == "terminated"),
        "truncated": last & (end in ("truncated", "cut")),
    }
    known = None if final is None else {"obs": np.float32(final)}
    actor.push_trajectory(rows, end=end, final=known, lane=lane)


def entries(s: conduit.Store, batches: int = 60) -> dict[int, dict[str, Any]]:
    """Every drawable start, and what it is drawn as: leaf path → value (lists where it has axes), with its mask."""
    out: dict[int, dict[str, Any]] = {}
    count = drawable(s)
    for _ in range(batches if count else 0):
        batch = s.sample(count, to="numpy")
        leaves = {path: host(leaf) for path, leaf in flat(batch.data).items()}
        for place, key in enumerate(batch.info.keys.tolist()):
            entry = {path: leaf[place].tolist() for path, leaf in leaves.items()}
            if batch.info.mask is not None:
                entry["mask"] = host(batch.info.mask)[place].tolist()
            assert out.setdefault(key, entry) == entry
    return out


def drawable(s: conduit.Store) -> int:
    return s.info()["drawable_rows"]


def column(drawn: dict[int, dict[str, Any]], leaf: str) -> dict[int, Any]:
    """One leaf of every entry."""
    return {key: entry[leaf] for key, entry in sorted(drawn.items())}
