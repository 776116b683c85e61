"""A naive model of a store's rows and tables, written from what they promise: plain dicts, every row looked at each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import conduit
from tests.store.rows import host

DRAWN_IN_ORDER = (conduit.Fifo, conduit.Lifo, conduit.MaxHeap, conduit.MinHeap)
"""Of these the model knows what is drawn; of the others, whether what was drawn may be."""


def content(keys: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
    """Rows all of whose leaves follow from their keys."""
    key = np.asarray(keys, np.int64)
    return {"id": key.astype(np.int32), "wide": (key[:, None] * 7 + np.arange(5)).astype(np.float32)}


def assert_rows(data: Any, keys: Sequence[int] | np.ndarray) -> None:
    for leaf, expected in content(keys).items():
        got = host(data[leaf])
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes(), leaf


def lowest(keys: Iterable[int], sampler: Any, priority: dict[int, float]) -> list[int]:
    """`keys`, in the order in which this sampler takes them."""
    if isinstance(sampler, conduit.Fifo):
        return sorted(keys)
    if isinstance(sampler, conduit.Lifo):
        return sorted(keys, reverse=True)
    sign = -1 if isinstance(sampler, conduit.MaxHeap) else 1
    return sorted(keys, key=lambda key: (sign * priority[key], key))


@dataclass
class Heard:
    """What one sampler knows of priorities."""

    sampler: Any
    priority: dict[int, float] = field(default_factory=dict)
    highest: float = 1.0

    def came(self, keys: Sequence[int], given: Sequence[float] | None) -> None:
        default = self.highest if isinstance(self.sampler, conduit.Prioritized) else 1.0
        for key, value in zip(keys, [default] * len(keys) if given is None else given, strict=True):
            self.priority[key] = value
            self.highest = max(self.highest, value)

    def updated(self, key: int, value: float) -> None:
        raw = value + (self.sampler.eps if isinstance(self.sampler, conduit.Prioritized) else 0.0)
        self.priority[key] = raw
        self.highest = max(self.highest, raw)


@dataclass
class View:
    """A table as a draw sees it, and the keys drawn where the model knows them."""

    frontier: int
    drawable: list[int]
    live: list[int]
    priority: dict[int, float]
    times: dict[int, int]
    left: set[int]
    keys: list[int] | None
    size: int
    """How many rows could be drawn when the first batch of several that are drawn together was."""


class TableModel:
    def __init__(self, settings: conduit.Table) -> None:
        self.sampler, self.most = settings.sampler, settings.max_times_sampled
        self.heard = Heard(self.sampler)
        self.times: dict[int, int] = {}
        self.drawable: set[int] = set()
        self.left: set[int] = set()
        """Of this pass, for `WithoutReplacement`."""
        self.inserted = self.sampled = 0

    def came(self, keys: Sequence[int], given: Sequence[float] | None) -> None:
        self.heard.came(keys, given)
        self.times.update(dict.fromkeys(keys, 0))
        self.drawable.update(keys)
        self.left.update(keys)
        self.inserted += len(keys)

    def went(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.drawable.discard(key)
            self.left.discard(key)
            del self.times[key], self.heard.priority[key]

    def can_give(self, rows: int) -> bool:
        if len(self.drawable) < rows:
            return False
        if not isinstance(self.sampler, conduit.Prioritized):
            return True
        enabled = sum(self.heard.priority[key] > 0 for key in self.drawable)
        return enabled >= (1 if self.most is None else rows)

    def view(self, frontier: int, live: Iterable[int], rows: int) -> View:
        keys = None
        if isinstance(self.sampler, DRAWN_IN_ORDER):
            keys = lowest(self.drawable, self.sampler, self.heard.priority)[:rows]
        return View(
            frontier,
            sorted(self.drawable),
            sorted(live),
            dict(self.heard.priority),
            dict(self.times),
            set(self.left),
            keys,
            len(self.drawable),
        )

    def drew(self, keys: Sequence[int]) -> list[int]:
        """Counts what was drawn; returns rows that can be drawn no more."""
        self.sampled += len(keys)
        ended = []
        for key in keys:
            assert key in self.drawable, f"{key} was drawn more often than it may be, or at all"
            self.times[key] += 1
            if self.times[key] == self.most:
                self.drawable.discard(key)
                ended.append(key)
        if isinstance(self.sampler, conduit.WithoutReplacement):
            rest = set(keys) - self.left
            self.left -= set(keys)
            if rest:
                assert not self.left, "a pass ended before all its rows were drawn"
                # Those of the last pass are in the next one still: only the rest of the batch is of it.
                self.left = self.drawable - rest
        self.left &= self.drawable
        return ended


class Model:
    def __init__(self, capacity: int, tables: dict[str, conduit.Table], remover: Any = None) -> None:
        self.capacity = capacity
        self.tables = {name: TableModel(table) for name, table in tables.items()}
        self.remover = None if remover is None or isinstance(remover, conduit.Fifo) else Heard(remover)
        self.live: list[int] = []
        self.versions: dict[int, int] = {}
        self.inserted = self.version = self.applied = self.stale = 0

    def push(self, rows: int, given: Sequence[float] | None, survivors: Iterable[int] | None = None) -> None:
        """`survivors`: of a remover that goes by chance, the rows that were seen to stay."""
        keys = list(range(self.inserted, self.inserted + rows))
        self.inserted += rows
        # Of more rows than the store has room for, tables hear only how many the first are.
        kept = keys[max(0, rows - self.capacity) :]
        if given is not None:
            given = given[rows - len(kept) :]
        over = max(0, len(self.live) + len(kept) - self.capacity)
        if self.remover is None:
            gone = self.live[:over]
        elif survivors is not None:
            gone = [key for key in self.live if key not in set(survivors)]
            assert len(gone) == over, "as many leave as there is no room for"
        else:
            gone = lowest(self.live, self.remover.sampler, self.remover.priority)[:over]
        self._leave(gone)
        self.live += kept
        self.versions.update(dict.fromkeys(kept, self.version))
        for table in self.tables.values():
            table.inserted += rows - len(kept)
            table.came(kept, given)
        if self.remover is not None:
            self.remover.came(kept, given)

    def view(self, name: str, rows: int) -> View:
        return self.tables[name].view(self.inserted - 1, self.live, rows)

    def drew(self, name: str, keys: Sequence[int]) -> None:
        ended = self.tables[name].drew(keys)
        if self.remover is not None:
            self._leave([key for key in ended if not any(key in table.drawable for table in self.tables.values())])

    def update(self, name: str, keys: Sequence[int], values: Sequence[float]) -> tuple[int, int]:
        told = [self.tables[name].heard, *([] if self.remover is None else [self.remover])]
        told = [heard for heard in told if heard.sampler.prioritized]
        live = [(key, value) for key, value in zip(keys, values, strict=True) if key in self.versions]
        # A row has the last of its priorities, but the highest of all that were given counts.
        for heard in told:
            for key, value in live:
                heard.updated(key, value)
        self.applied += len(live)
        self.stale += len(keys) - len(live)
        return len(live), len(keys) - len(live)

    def takes_priorities(self, name: str) -> bool:
        return self.tables[name].sampler.prioritized or (self.remover is not None and self.remover.sampler.prioritized)

    def _leave(self, keys: Sequence[int]) -> None:
        gone = set(keys)
        self.live = [key for key in self.live if key not in gone]
        for table in self.tables.values():
            table.went(gone)
        for key in gone:
            del self.versions[key]
            if self.remover is not None:
                del self.remover.priority[key]


def assert_batch(batch: conduit.Batch, view: View, table: conduit.Table, versions: dict[int, int], rows: int) -> None:
    """A batch that a table gave to a draw that saw `view`."""
    info, sampler, most = batch.info, table.sampler, table.max_times_sampled
    keys = info.keys.tolist()
    assert len(keys) == rows
    assert_rows(batch.data, keys)
    assert set(keys) <= set(view.drawable)
    if view.keys is not None:
        assert keys == view.keys
    if isinstance(sampler, conduit.WithoutReplacement) or sampler == conduit.Uniform(replacement=False):
        assert len(set(keys)) == rows
    if isinstance(sampler, conduit.WithoutReplacement):
        assert view.left <= set(keys) or set(keys) <= view.left, "the rest of a pass comes before the next one"
    assert info.frontier == view.frontier
    assert info.table_size == view.size
    assert info.age.tolist() == [view.frontier - key for key in keys]
    assert info.policy_version.tolist() == [versions[key] for key in keys]
    assert info.version_lag.tolist() == [info.store_version - versions[key] for key in keys]
    if most is None:
        assert info.times_sampled is None
    else:
        assert info.times_sampled is not None
        times = dict(view.times)
        for key, nth in zip(keys, info.times_sampled.tolist(), strict=True):
            times[key] += 1
            assert nth == times[key] <= most
    raw = np.array([view.priority[key] if sampler.prioritized else 1.0 for key in keys])
    np.testing.assert_array_equal(info.priority, raw)
    weight = host(info.weight)
    assert weight.dtype == np.float32
    assert (info.probability > 0).all()
    assert (info.probability <= 1).all()
    if not isinstance(sampler, conduit.Prioritized):
        assert (weight == 1).all()
    else:
        assert (raw > 0).all()
        leaf = raw**sampler.alpha
        np.testing.assert_allclose(weight, (leaf / leaf.min()) ** -sampler.beta_at(info.number), rtol=1e-5)
    if most is None:
        np.testing.assert_allclose(info.probability, _probability(keys, view, sampler), rtol=1e-9)


def _probability(keys: Sequence[int], view: View, sampler: Any) -> Any:
    if isinstance(sampler, DRAWN_IN_ORDER):
        return np.ones(len(keys))
    if isinstance(sampler, conduit.Prioritized):
        leaf = {key: view.priority[key] ** sampler.alpha if view.priority[key] > 0 else 0.0 for key in view.drawable}
        return np.array([leaf[key] for key in keys]) / sum(leaf.values())
    if isinstance(sampler, conduit.Recency):
        chance = {key: 0.5 ** ((view.frontier - key) / sampler.half_life) for key in view.live}
        return np.array([chance[key] for key in keys]) / sum(chance.values())
    if isinstance(sampler, conduit.WithoutReplacement):
        left = len(view.left)
        if left >= len(keys):
            return np.full(len(keys), 1 / left)
        others = len(view.drawable) - left
        return np.array([1 / left if key in view.left else 1 / others for key in keys])
    return np.full(len(keys), 1 / len(view.drawable))
