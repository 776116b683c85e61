"""Lanes and how they end: pushed rows become the fragments of trajectories that hooks work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.experience import Schema, Tree, map_leaves


class End(IntEnum):
    """How a lane goes on after a row. Every row has exactly one."""

    OPEN = 0
    """The lane goes on: its next row is the successor."""
    TERMINATED = 1
    """The episode is over; there is nothing to bootstrap from."""
    TRUNCATED = 2
    """The episode was stopped; the final carries the last observation (and value)."""
    CUT = 3
    """Nothing is known of what came next: an actor left, or truncated without a final. Never bootstrapped across."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all lanes of an actor, as a vector environment gives it: what `Actor.push` takes whole.

    `rows`: leaves (lanes, *shape); `final`: leaves (ended lanes, *shape), in lane order; `valid`: (lanes,) bool."""

    rows: Tree
    final: Mapping[str, Tree] | None = None
    valid: NDArray[np.bool_] | None = None


@dataclass(slots=True)
class Rows:
    """Rows on their way from actors to the buffer, in the order they were pushed, with what is known of each."""

    data: Tree
    """Leaves (n, *shape)."""
    lane: NDArray[np.int64]
    """(n,) the store-wide number of the row's lane."""
    end: NDArray[np.uint8]
    """(n,) an `End` each."""
    version: int | NDArray[np.int64]
    """The policy version that made the rows, one for all or (n,); set when the rollout takes them."""
    priority: NDArray[np.float64] | None = None
    """(n,) raw priorities, NaN where the sampler shall choose; None where it shall for all."""
    finals: Mapping[int, Mapping[str, Tree]] | None = None
    """Row position → that row's final, each leaf of shape (*shape)."""
    schema: Schema | None = None
    """What `data` has been checked against; None once a hook has made it."""
    lent: bool = False
    """Whether the leaves are still the arrays of whoever pushed them, who fills them again when the push has returned."""
    push: Any = field(default=None, init=False, repr=False, compare=False)
    """The slice of the push that brought them, where a trace is taken; lost where a hook makes others of them."""

    def __len__(self) -> int:
        return len(self.lane)

    def own(self) -> None:
        """From here on the leaves are nobody else's."""
        if self.lent:
            self.data, self.lent = map_leaves(np.array, self.data), False

    @property
    def versions(self) -> NDArray[np.int64]:
        """(n,)"""
        return np.full(len(self), self.version) if isinstance(self.version, int) else self.version


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive rows of one lane, up to an end or the edge of the unit: what trajectory-scope hooks see.

    `rows`: leaves (length, *shape). `final`: the last observation (and value) where `end` is TRUNCATED or TERMINATED
    and the actor gave one; where `end` is OPEN, the bootstrap given to `Actor.end_unit`, if any. Leaves (*shape)."""

    rows: Tree
    end: End
    final: Mapping[str, Tree] | None
    lane: int
    version: NDArray[np.int64]
    priority: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.version)

    def with_rows(self, rows: Tree) -> Fragment:
        """This fragment with other leaves for the same rows."""
        return replace(self, rows=rows)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """All rows of `parts`, in order."""
    if len(parts) == 1:
        return parts[0]
    finals: dict[int, Mapping[str, Tree]] = {}
    offset = 0
    for part in parts:
        finals.update({offset + row: final for row, final in (part.finals or {}).items()})
        offset += len(part)
    return Rows(
        data=concatenate_trees([part.data for part in parts]),
        lane=np.concatenate([part.lane for part in parts]),
        end=np.concatenate([part.end for part in parts]),
        version=parts[0].version
        if all(isinstance(part.version, int) and part.version == parts[0].version for part in parts)
        else np.concatenate([part.versions for part in parts]),
        priority=_concatenate_priorities([(part.priority, len(part)) for part in parts]),
        finals=finals or None,
        schema=parts[0].schema,
    )


def concatenate_trees(trees: Sequence[Tree]) -> Tree:
    """Trees of equal structure, joined along the row axis."""
    if len(trees) == 1:
        return trees[0]
    return map_leaves(lambda *leaves: np.concatenate(leaves), *trees)


def join_fragments(fragments: Sequence[Fragment]) -> Rows:
    """The fragments' rows, one fragment after the other; of at least one fragment."""
    fragments = [fragment for fragment in fragments if len(fragment)] or fragments[:1]
    length = [len(fragment) for fragment in fragments]
    end = np.zeros(sum(length), np.uint8)
    last = np.cumsum(length) - 1
    if len(end):
        end[last] = [fragment.end for fragment in fragments]
    return Rows(
        data=concatenate_trees([fragment.rows for fragment in fragments]),
        lane=np.repeat(np.array([fragment.lane for fragment in fragments], np.int64), length),
        end=end,
        version=np.concatenate([fragment.version for fragment in fragments]),
        priority=_concatenate_priorities([(fragment.priority, len(fragment)) for fragment in fragments]),
        finals={int(row): f.final for row, f in zip(last, fragments, strict=True) if f.final is not None} or None,
    )


class Lanes:
    """The open fragments of every lane. Rows go in as they come; fragments come out whole."""

    def __init__(self) -> None:
        self._open: dict[int, list[Rows]] = {}

    def state(self) -> dict[int, list[Rows]]:
        """The open fragments' rows, by lane."""
        return {lane: list(pieces) for lane, pieces in self._open.items()}

    def load(self, state: Mapping[int, list[Rows]]) -> None:
        self._open = {lane: list(pieces) for lane, pieces in state.items()}

    def __len__(self) -> int:
        """How many rows wait in open fragments."""
        return sum(len(piece) for pieces in self._open.values() for piece in pieces)

    def add(self, rows: Rows) -> list[Fragment]:
        """Takes `rows` in and returns the fragments that they end, ordered by the position of their last row."""
        ended: list[tuple[int, Fragment]] = []
        for last, piece in split_lanes(rows):
            lane = int(piece.lane[0])
            pieces = self._open.setdefault(lane, [])
            pieces.append(piece)
            if piece.end[-1] != End.OPEN:
                ended.append((last, as_fragment(concatenate(self._open.pop(lane)))))
        return [fragment for _, fragment in sorted(ended, key=lambda item: item[0])]

    def take_open(self, bootstrap: Mapping[int, Mapping[str, Tree]]) -> list[Fragment]:
        """Every open fragment, by lane, with the bootstrap of its lane as its final. Its lane starts a new one with its next row."""
        opened, self._open = self._open, {}
        return [replace(as_fragment(concatenate(opened[lane])), final=bootstrap.get(lane)) for lane in sorted(opened)]

    def cut(self, lanes: Sequence[int]) -> list[Fragment]:
        """The open fragments of lanes whose actor left, ended as CUT."""
        return [
            replace(as_fragment(concatenate(self._open.pop(lane))), end=End.CUT) for lane in lanes if lane in self._open
        ]


def split_lanes(rows: Rows) -> list[tuple[int, Rows]]:
    """`rows` as runs of one lane each, split after every end: (position of the run's last row, the run)."""
    order = np.argsort(rows.lane, kind="stable")
    lane, end = rows.lane[order], rows.end[order]
    data = map_leaves(lambda leaf: leaf[order], rows.data)
    version = rows.versions[order]
    priority = None if rows.priority is None else rows.priority[order]
    finals = rows.finals or {}
    edges = np.flatnonzero((lane[1:] != lane[:-1]) | (end[:-1] != End.OPEN)) + 1
    bounds = [0, *edges.tolist(), len(lane)]
    runs = []
    for start, stop in pairwise(bounds):
        last = int(order[stop - 1])
        run = Rows(
            data=_slice(data, start, stop),
            lane=lane[start:stop],
            end=end[start:stop],
            version=version[start:stop],
            priority=None if priority is None else priority[start:stop],
            finals={stop - start - 1: finals[last]} if last in finals else None,
        )
        runs.append((last, run))
    return runs


def _slice(tree: Tree, start: int, stop: int) -> Tree:
    return map_leaves(lambda leaf: leaf[start:stop], tree)


def as_fragment(rows: Rows) -> Fragment:
    """Consecutive rows of one lane as a fragment, which ends as its last row does."""
    final = (rows.finals or {}).get(len(rows) - 1)
    return Fragment(rows.data, End(int(rows.end[-1])), final, int(rows.lane[0]), rows.versions, rows.priority)


def _concatenate_priorities(parts: Sequence[tuple[Any, int]]) -> NDArray[np.float64] | None:
    if all(priority is None for priority, _ in parts):
        return None
    return np.concatenate([np.full(rows, np.nan) if priority is None else priority for priority, rows in parts])
