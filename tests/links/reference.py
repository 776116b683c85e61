"""What links between rows mean, said as plainly as Python can: lists of rows, one row at a time. Slow, and nothing of it is
shared with what it judges.

A row's leaves are a flat dict by path ("obs/image"), each an array of the row's own shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

import conduit

Leaves = Mapping[str, Any]
OPEN, TERMINATED, TRUNCATED, CUT = "open", "terminated", "truncated", "cut"


@dataclass(frozen=True)
class Row:
    """One row."""

    def made(self) -> Any:
        return conduit.Row()


@dataclass(frozen=True)
class NStep:
    n: int | range
    gamma: float = 0.5
    reward: str = "reward"
    from_last: tuple[str, ...] = ("next_obs", "terminated", "truncated")

    def made(self) -> Any:
        return conduit.NStep(self.n, gamma=self.gamma, reward=self.reward, from_last=self.from_last)

    @property
    def values(self) -> list[int]:
        return [self.n] if isinstance(self.n, int) else list(self.n)


@dataclass(frozen=True)
class Sequence:
    length: int
    period: int = 1
    burn_in: int = 0
    stride: int = 1
    pad: Literal["zero", "repeat"] | None = None

    def made(self) -> Any:
        return conduit.Sequence(self.length, period=self.period, burn_in=self.burn_in, stride=self.stride, pad=self.pad)


@dataclass(frozen=True)
class Trajectory:
    multiple: int = 1

    def made(self) -> Any:
        return conduit.Trajectory(self.multiple)


@dataclass(frozen=True)
class Group:
    size: int
    by: str = "prompt"

    def made(self) -> Any:
        return conduit.Group(self.size, by=self.by)


Item = Row | NStep | Sequence | Trajectory | Group


@dataclass(frozen=True)
class Next:
    source: str

    def made(self) -> Any:
        return conduit.Next(self.source)


@dataclass(frozen=True)
class Stack:
    source: str
    depth: int
    pad: Literal["repeat", "zero"] = "repeat"

    def made(self) -> Any:
        return conduit.Stack(self.source, self.depth, pad=self.pad)


Derive = Mapping[str, Next | Stack]


@dataclass(eq=False)
class Stored:
    """A row that was pushed, evicted or not."""

    key: int
    leaves: Leaves
    end: str
    final: Leaves | None
    version: int
    episode: list[Stored] = field(repr=False)
    place: int

    @property
    def successor(self) -> Stored | None:
        return self.episode[self.place + 1] if self.place + 1 < len(self.episode) else None


class Model:
    """All rows ever pushed, the last `capacity` of which are live."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: list[Stored] = []
        self._goes_on: dict[Any, Stored] = {}

    def push(self, lane: Any, leaves: Leaves, end: str = OPEN, final: Leaves | None = None, version: int = 0) -> Stored:
        before = self._goes_on.pop(lane, None)
        episode = [] if before is None else before.episode
        row = Stored(len(self.rows), leaves, end, final, version, episode, len(episode))
        if end == TRUNCATED and final is None:
            row.end = CUT
        episode.append(row)
        self.rows.append(row)
        if row.end == OPEN:
            self._goes_on[lane] = row
        return row

    def cut(self, lanes: Iterable[Any]) -> None:
        for lane in lanes:
            row = self._goes_on.pop(lane, None)
            if row is not None:
                row.end = CUT

    @property
    def live(self) -> list[Stored]:
        return self.rows[max(0, len(self.rows) - self.capacity) :]

    def is_live(self, row: Stored) -> bool:
        return row.key >= len(self.rows) - self.capacity


@dataclass
class Entry:
    """What one entry of a batch must be. `real`: which of its rows are no padding; None for items without a time axis."""

    leaves: dict[str, np.ndarray]
    real: list[bool] | None = None


class Rules:
    """The meaning of one item and its derived leaves on one model."""

    def __init__(self, model: Model, item: Item, derive: Derive) -> None:
        self.model = model
        self.item = item
        self.derive = derive
        self.needs_next = any(isinstance(made, Next) for made in derive.values())

    # Which rows can be drawn

    def drawable_starts(self) -> list[int]:
        return [row.key for row in self.model.live if self.is_drawable(row)]

    def is_drawable(self, row: Stored) -> bool:
        if not self._stacks_are_whole(row):
            return False
        item = self.item
        if isinstance(item, Row):
            return self._is_usable(row)
        if isinstance(item, Group):
            return row.key in self.groups()
        if isinstance(item, NStep):
            most = max(item.values)
            chain = self._chain(row, most)
            return len(chain) == most or (len(chain) > 0 and self._ended_after(chain[-1]))
        if isinstance(item, Sequence):
            if row.place % item.period:
                return False
            trained = self._trained(row)
            return len(trained) == item.length or (item.pad is not None and len(trained) > 0 and self._has_ended(row))
        return row.place == 0 and self._has_ended(row) and self._is_usable(row)

    def groups(self) -> dict[int, list[Stored]]:
        """All whole groups by their first rows: of the rows with one value, each `size` that came after each other."""
        assert isinstance(self.item, Group)
        unfinished: dict[int, list[Stored]] = {}
        whole: dict[int, list[Stored]] = {}
        for row in self.model.rows:
            value = int(row.leaves[self.item.by])
            group = unfinished.setdefault(value, [])
            group.append(row)
            if len(group) == self.item.size:
                whole[group[0].key] = unfinished.pop(value)
        return whole

    def _has_next(self, row: Stored) -> bool:
        return row.successor is not None or row.final is not None or row.end == TERMINATED

    def _is_usable(self, row: Stored) -> bool:
        return self._has_next(row) or not self.needs_next

    def _has_ended(self, row: Stored) -> bool:
        return row.episode[-1].end != OPEN

    def _ended_after(self, last: Stored) -> bool:
        """Whether a chain up to `last` can never grow."""
        after = last.successor
        if after is None:
            return last.end != OPEN
        return not self._is_usable(after) and after.end == CUT

    def _stacks_are_whole(self, row: Stored) -> bool:
        return all(
            self.model.is_live(row.episode[place])
            for made in self.derive.values()
            if isinstance(made, Stack)
            for place in range(row.place - made.depth + 1, row.place + 1)
            if place >= 0
        )

    def _chain(self, row: Stored, most: int) -> list[Stored]:
        chain: list[Stored] = []
        following: Stored | None = row
        while following is not None and len(chain) < most and self._is_usable(following):
            chain.append(following)
            following = following.successor
        return chain

    def _trained(self, row: Stored) -> list[Stored]:
        assert isinstance(self.item, Sequence)
        places = [row.place + i * self.item.stride for i in range(self.item.length)]
        there = [row.episode[place] for place in places if place < len(row.episode)]
        return [each for each in there if self._is_usable(each)]

    # What a row is drawn as

    def entry(self, key: int, n: int | None = None, width: int | None = None) -> Entry:
        """The entry started at row `key`. `n`: the number drawn of NStep's range; `width`: T of a trajectory's batch."""
        row, item = self.model.rows[key], self.item
        if isinstance(item, Row):
            return Entry(self._of_row(row))
        if isinstance(item, NStep):
            return self._of_steps(row, item, item.values[0] if n is None else n)
        if isinstance(item, Sequence):
            trained: list[Stored | None] = [*self._trained(row)]
            trained += [None] * (item.length - len(trained))
            burn_in = [self._burned_in(row, row.place - item.stride * i) for i in range(item.burn_in, 0, -1)]
            return self._over_time(burn_in + trained, item.pad == "repeat")
        if isinstance(item, Group):
            return self._over_time([*self.groups()[key]], False)
        rows = self.trajectory(row)
        return self._over_time(rows + [None] * ((width or len(rows)) - len(rows)), False)

    def trajectory(self, row: Stored) -> list[Stored | None]:
        return [each for each in row.episode if self._is_usable(each)]

    def width(self, keys: Iterable[int]) -> int:
        """T of a batch of trajectories: that of the longest, rounded up."""
        assert isinstance(self.item, Trajectory)
        longest = max(len(self.trajectory(self.model.rows[key])) for key in keys)
        return -(-longest // self.item.multiple) * self.item.multiple

    def _burned_in(self, row: Stored, place: int) -> Stored | None:
        if place < 0:
            return None
        before = row.episode[place]
        return before if self.model.is_live(before) and self._stacks_are_whole(before) else None

    def _of_steps(self, row: Stored, item: NStep, n: int) -> Entry:
        chain = self._chain(row, n)
        last = chain[-1]
        leaves = {
            path: last.leaves[path] if _top(path) in item.from_last else leaf for path, leaf in row.leaves.items()
        }
        first = np.asarray(row.leaves[item.reward])
        kind = first.dtype if first.dtype.kind not in "biu" else np.dtype(np.float32)
        total = np.zeros(first.shape, np.float64)
        for i, each in enumerate(chain):
            total = total + item.gamma**i * np.asarray(each.leaves[item.reward]).astype(np.float64)
        leaves[item.reward] = total.astype(kind)
        leaves = self._with_derived(leaves, stacks_of=row, nexts_of=last)
        discount = 0.0 if last.end == TERMINATED else item.gamma ** len(chain)
        return Entry(leaves | {"discount": np.float32(discount), "n_step": np.int32(len(chain))})

    def _over_time(self, rows: list[Stored | None], repeat: bool) -> Entry:
        real = [row is not None for row in rows]
        first = next(row for row in rows if row is not None)
        last = [row for row in rows if row is not None][-1]
        seen = False
        filled = []
        for row in rows:
            seen = seen or row is not None
            if row is not None:
                filled.append(self._of_row(row))
            elif repeat:
                filled.append(self._of_row(last if seen else first))
            else:
                filled.append({path: np.zeros_like(leaf) for path, leaf in self._of_row(first).items()})
        return Entry({path: np.stack([each[path] for each in filled]) for path in filled[0]}, real)

    def _of_row(self, row: Stored) -> dict[str, np.ndarray]:
        return self._with_derived(row.leaves, stacks_of=row, nexts_of=row)

    def _with_derived(self, leaves: Leaves, stacks_of: Stored, nexts_of: Stored) -> dict[str, np.ndarray]:
        out = {path: np.asarray(leaf) for path, leaf in leaves.items() if _top(path) not in self.derive}
        for name, made in self.derive.items():
            if isinstance(made, Stack):
                parts = self._stack(stacks_of, made)
            elif isinstance(stack := self.derive.get(made.source), Stack):
                parts = self._stack_after(nexts_of, stack)
            else:
                parts = self._after(nexts_of, made.source)
            out |= {name + below: np.asarray(leaf) for below, leaf in parts.items()}
        return out

    def _after(self, row: Stored, source: str) -> Leaves:
        if row.successor is not None:
            return below(row.successor.leaves, source)
        if row.final is not None:
            return below(row.final, source)
        assert row.end == TERMINATED
        return below(row.leaves, source)

    def _stack(self, row: Stored, stack: Stack) -> Leaves:
        frames = []
        for place in range(row.place - stack.depth + 1, row.place + 1):
            frame = below(row.episode[max(place, 0)].leaves, stack.source)
            if place < 0 and stack.pad == "zero":
                frame = {path: np.zeros_like(leaf) for path, leaf in frame.items()}
            frames.append(frame)
        return _stacked(frames)

    def _stack_after(self, row: Stored, stack: Stack) -> Leaves:
        if row.successor is not None:
            return self._stack(row.successor, stack)
        now = self._stack(row, stack)
        if row.final is None:
            assert row.end == TERMINATED
            return now
        final = below(row.final, stack.source)
        return {path: np.stack([*now[path][1:], final[path]]) for path in now}


def below(leaves: Leaves, source: str) -> dict[str, Any]:
    """The leaves of subtree `source`, by what is left of their paths: {"": leaf} where it is a leaf itself."""
    return {
        path[len(source) :]: leaf for path, leaf in leaves.items() if path == source or path.startswith(f"{source}/")
    }


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by path."""
    if not isinstance(tree, Mapping):
        return {path: tree}
    out: dict[str, Any] = {}
    for name, branch in tree.items():
        out |= flat(branch, f"{path}/{name}" if path else str(name))
    return out


def nested(leaves: Leaves, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> dict[str, Any]:
    """The other way round."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *branches, name = path.split("/")
        at = tree
        for branch in branches:
            at = at.setdefault(branch, {})
        at[name] = leaf(value)
    return tree


def _top(path: str) -> str:
    return path.partition("/")[0]


def _stacked(frames: list[dict[str, Any]]) -> Leaves:
    return {path: np.stack([frame[path] for frame in frames]) for path in frames[0]}
