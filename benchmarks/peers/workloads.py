"""The workloads, their rows, and the two yardsticks that every worker holds: the limit and a naive ring."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

Kind = Literal["uniform", "prioritized", "sequence", "n_step", "push", "push_prioritized", "push_linked"]
Rows = dict[str, np.ndarray]

EPISODE = 200
"""Rows an episode; all end by `terminated`."""
N_STEP, GAMMA, ALPHA, BETA = 5, 0.99, 0.6, 0.4
CHUNK_BYTES = 16 << 20
"""Stores are filled with copies of one chunk: whole episodes, of at most this size."""
LIMIT, RING = "limit", "naive ring"


@dataclass(frozen=True)
class Workload:
    """`count`: rows drawn or pushed a call; for sequences, how many of `length` rows."""

    name: str
    kind: Kind
    rows: str
    capacity: int
    count: int
    length: int = 1

    @property
    def drawn(self) -> int:
        return self.count * self.length


WORKLOADS = [
    Workload("uniform 41 B × 256", "uniform", "41 B", 1_000_000, 256),
    Workload("uniform 41 B × 2048", "uniform", "41 B", 1_000_000, 2048),
    Workload("uniform 4 KB × 512", "uniform", "4 KB", 50_000, 512),
    Workload("uniform 48 KB images × 256", "uniform", "48 KB", 4_000, 256),
    Workload("uniform 192 KB images × 64", "uniform", "192 KB", 1_200, 64),
    Workload("prioritized 41 B: draw 512 + update 512", "prioritized", "41 B", 1_000_000, 512),
    Workload("sequences 32 × 32, 41 B", "sequence", "41 B", 1_000_000, 32, 32),
    Workload("sequences 16 × 32, 7 KB images", "sequence", "7 KB", 20_000, 16, 32),
    Workload("n-step 5, 41 B × 256", "n_step", "41 B", 1_000_000, 256),
    Workload("push 1 × 41 B", "push", "41 B", 1_000_000, 1),
    Workload("push 64 × 41 B", "push", "41 B", 1_000_000, 64),
    Workload("push 512 × 41 B", "push", "41 B", 1_000_000, 512),
    Workload("push 64 × 41 B, prioritized", "push_prioritized", "41 B", 1_000_000, 64),
    Workload("push 64 × 41 B, linked", "push_linked", "41 B", 1_000_000, 64),
]
_SHAPES = {
    "41 B": ((4,), np.float32),
    "4 KB": ((1024,), np.float32),
    "7 KB": ((84, 84), np.uint8),
    "48 KB": ((128, 128, 3), np.uint8),
    "192 KB": ((256, 256, 3), np.uint8),
}


def rows_of(kind: str, count: int) -> Rows:
    """`count` consecutive rows of one lane, in episodes. 41 B: 5 fields; 7 KB: an image, action, reward, end; wider
    ones are one field."""
    shape, dtype = _SHAPES[kind]
    random = np.random.default_rng(0)
    if dtype == np.uint8:
        obs = random.integers(256, size=(count + 1, *shape), dtype=np.uint8)
    else:
        obs = random.random((count + 1, *shape), np.float32)
    if kind not in ("41 B", "7 KB"):
        return {"obs": obs[:count]}
    rows: Rows = {
        "obs": obs[:count],
        "action": random.integers(2, size=count, dtype=np.int32),
        "reward": random.random(count, np.float32),
    }
    if kind == "41 B":
        rows["next_obs"] = obs[1:]
    rows["terminated"] = np.arange(1, count + 1) % EPISODE == 0
    return rows


def transitions_of(kind: str, count: int) -> Rows:
    """The same for stores that only know transitions: what a row lacks is added, and counts against them as bytes."""
    rows = rows_of(kind, count)
    lacking = {
        "action": np.zeros(count, np.int32),
        "reward": np.zeros(count, np.float32),
        "next_obs": np.roll(rows["obs"], -1, axis=0),
        "terminated": np.arange(1, count + 1) % EPISODE == 0,
    }
    return lacking | rows


def chunk_rows(work: Workload, capacity: int | None = None) -> int:
    shape, dtype = _SHAPES[work.rows]
    most = CHUNK_BYTES // (int(np.prod(shape)) * np.dtype(dtype).itemsize)
    rows = min(capacity or work.capacity, most, 10_000)
    return max(rows // EPISODE * EPISODE, EPISODE)


def fill(work: Workload, push: Callable[[Rows], object], capacity: int | None = None, rows: Rows | None = None) -> None:
    """Pushes one chunk until `capacity` rows are in."""
    capacity = capacity or work.capacity
    size = chunk_rows(work, capacity)
    chunk = rows_of(work.rows, size) if rows is None else rows
    for start in range(0, capacity, size):
        rest = min(size, capacity - start)
        push(chunk if rest == size else {name: leaf[:rest] for name, leaf in chunk.items()})


def episodes(rows: Rows) -> list[Rows]:
    """`rows` cut where episodes end."""
    starts = range(0, len(rows["obs"]), EPISODE)
    return [{name: leaf[start : start + EPISODE] for name, leaf in rows.items()} for start in starts]


def columns_of(work: Workload, rows: Rows) -> Rows:
    """`rows`, repeated to the workload's capacity."""
    repeats = -(-work.capacity // len(rows["obs"]))
    return {name: np.concatenate([leaf] * repeats)[: work.capacity] for name, leaf in rows.items()}


@dataclass
class Contender:
    """`before` makes a call's inputs and isn't timed; `call` returns when its result is there."""

    name: str
    call: Callable[[], Any]
    before: Callable[[], object] | None = None
    note: str = ""
    capacity: int | None = None
    """Where it isn't the workload's."""
    close: Callable[[], object] | None = None
    calls: int = 1
    """How many calls in a row are timed, for their mean: more where threads of its own work between the calls."""


Builder = Callable[[Workload], list[Contender]]


@dataclass(frozen=True)
class Peer:
    """`needs`: the modules that must be installed. `builders`: what it can do; a workload without one isn't offered."""

    name: str
    needs: tuple[str, ...]
    distributions: tuple[str, ...]
    builders: Mapping[str, Builder]


class Errors:
    """TD errors for one update, drawn before it."""

    def __init__(self, count: int) -> None:
        self._random = np.random.default_rng(1)
        self._count = count
        self.now = self.draw()

    def draw(self) -> np.ndarray:
        self.now = np.abs(self._random.standard_normal(self._count)).astype(np.float32)
        return self.now


class Ring:
    """A naive ring: a dict of NumPy columns, fancy indexing, no locks or checks. It isn't right at its write cursor."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.columns = columns_of(work, rows_of(work.rows, chunk_rows(work)))
        self.at = 0
        self.random = np.random.default_rng(0)
        self.starts = np.zeros(0, np.int64)
        if work.kind == "sequence":
            place = np.arange(work.capacity - work.length)
            self.starts = place[place % EPISODE <= EPISODE - work.length]

    def push(self, rows: Rows) -> None:
        count = len(rows["obs"])
        head = min(count, self.work.capacity - self.at)
        for name, leaf in rows.items():
            self.columns[name][self.at : self.at + head] = leaf[:head]
            if head < count:
                self.columns[name][: count - head] = leaf[head:]
        self.at = (self.at + count) % self.work.capacity

    def sample(self) -> Rows:
        index = self.random.integers(self.work.capacity, size=self.work.count)
        return {name: column[index] for name, column in self.columns.items()}

    def sequences(self) -> Rows:
        starts = self.starts[self.random.integers(len(self.starts), size=self.work.count)]
        index = starts[:, None] + np.arange(self.work.length)
        return {name: np.take(column, index, axis=0) for name, column in self.columns.items()}

    def n_step(self) -> Rows:
        index = self.random.integers(self.work.capacity, size=self.work.count)
        steps = (index[:, None] + np.arange(N_STEP)) % self.work.capacity
        ends = self.columns["terminated"][steps]
        alive = np.cumprod(~ends, axis=1)
        alive = np.concatenate([np.ones_like(alive[:, :1]), alive[:, :-1]], axis=1)
        powers = np.float32(GAMMA) ** np.arange(N_STEP, dtype=np.float32)
        last = steps[np.arange(len(index)), alive.sum(axis=1) - 1]
        return {
            "obs": self.columns["obs"][index],
            "action": self.columns["action"][index],
            "reward": (self.columns["reward"][steps] * alive * powers).sum(axis=1),
            "next_obs": self.columns["next_obs"][last],
            "terminated": self.columns["terminated"][last],
        }


class Limit:
    """`np.take` of each field into preallocated memory with indices drawn beforehand; for pushes, slice assignment."""

    def __init__(self, ring: Ring) -> None:
        work = ring.work
        self._ring, self._work = ring, work
        self._out = {
            name: np.zeros((work.drawn, *column.shape[1:]), column.dtype) for name, column in ring.columns.items()
        }
        self._rows = rows_of(work.rows, work.count)
        self._index = np.zeros(0, np.int64)
        self._starts: Iterator[int] = itertools.cycle(range(0, work.capacity - work.count, work.count))
        self._start = 0

    def draw(self) -> None:
        work, ring = self._work, self._ring
        if work.kind == "sequence":
            starts = ring.starts[ring.random.integers(len(ring.starts), size=work.count)]
            self._index = (starts[:, None] + np.arange(work.length)).reshape(-1)
        else:
            self._index = ring.random.integers(work.capacity, size=work.count)

    def take(self) -> Rows:
        for name, column in self._ring.columns.items():
            np.take(column, self._index, axis=0, out=self._out[name], mode="clip")
        return self._out

    def move(self) -> None:
        self._start = next(self._starts)

    def assign(self) -> Rows:
        start, stop = self._start, self._start + self._work.count
        for name, column in self._ring.columns.items():
            column[start:stop] = self._rows[name]
        return self._rows


def yardsticks(work: Workload) -> list[Contender]:
    """The limit, and the naive ring where it has an answer."""
    ring = Ring(work)
    limit = Limit(ring)
    if work.kind.startswith("push"):
        both = [Contender(LIMIT, limit.assign, limit.move, "slice assignment of each field")]
        return [*both, Contender(RING, partial(ring.push, rows_of(work.rows, work.count)))]
    found = [Contender(LIMIT, limit.take, limit.draw, "np.take(out=, mode='clip') of each field")]
    naive = {"uniform": ring.sample, "sequence": ring.sequences, "n_step": ring.n_step}.get(work.kind)
    return found if naive is None else [*found, Contender(RING, naive, note="no checks; wrong at its write cursor")]


def bytes_of(result: Any) -> int:
    """Bytes of all arrays in nested containers; 0 for objects that aren't arrays."""
    if isinstance(result, Mapping):
        return sum(bytes_of(each) for each in result.values())
    if isinstance(result, (list, tuple)):
        return sum(bytes_of(each) for each in result)
    size = getattr(result, "nbytes", 0)
    return size if isinstance(size, int) else 0
