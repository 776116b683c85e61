"""Rows whose every byte follows from their number, and a plain record of how their lanes went on: what must come out again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import conduit
from conduit.backends import exchange

GAMMA = 0.5
"""Of n-step returns; rewards are whole numbers, so that sums are exact."""


def obs_of(numbers: Sequence[int]) -> dict[str, np.ndarray]:
    """Observations that no two numbers share."""
    number = np.asarray(numbers, np.int64)
    mixed = (number * 2654435761 % (1 << 32)).astype(np.uint32)
    return {
        "bits": np.ascontiguousarray(mixed).view(np.uint8).reshape(-1, 4),
        "state": np.stack([number / 7, -number], axis=1).astype(np.float32),
    }


def final_of(numbers: Sequence[int]) -> dict[str, Any]:
    """What came after rows that ended with these numbers."""
    return {"obs": obs_of([-number - 1 for number in numbers])}


def reward_of(number: int) -> int:
    return number * 5 % 7 - 3


def rows_of(numbers: Sequence[int], ends: Sequence[str]) -> dict[str, Any]:
    """Leaves (rows, …). `ends`: "open", "terminated" or "truncated", one a row."""
    return {
        "id": np.asarray(numbers, np.int32),
        "obs": obs_of(numbers),
        "reward": np.array([reward_of(number) for number in numbers], np.float32),
        "terminated": np.array([end == "terminated" for end in ends]),
        "truncated": np.array([end == "truncated" for end in ends]),
    }


def host(tree: Any) -> Any:
    """Leaves of any framework as NumPy's."""
    if isinstance(tree, Mapping):
        return {name: host(leaf) for name, leaf in tree.items()}
    return exchange.to_numpy(tree)


def ids(batch: conduit.Batch) -> list[int]:
    data: Any = batch.data
    return exchange.to_numpy(data["id"]).tolist()


def assert_same(got: Any, expected: Any, where: str) -> None:
    """Byte for byte, leaf by leaf."""
    if isinstance(expected, Mapping):
        assert set(got) == set(expected), where
        for name, leaf in expected.items():
            assert_same(got[name], leaf, f"{where}/{name}")
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
    assert got.tobytes() == expected.tobytes(), f"{where}: {got} is not {expected}"


@dataclass(frozen=True, slots=True)
class Push:
    """One push, to be made again. `finals`: those of its rows that ended with one. `lane`: whether they are successive rows of one
    lane, not one of each."""

    numbers: list[int]
    ends: list[str]
    finals: list[int]
    lane: bool

    def into(self, actor: conduit.Actor, **more: Any) -> int:
        """How many rows were taken."""
        rows = rows_of(self.numbers, self.ends)
        if self.lane:
            final = first_of(final_of(self.finals)) if self.finals else None
            return actor.push_trajectory(rows, final=final, **more)
        taken = actor.push(rows, final=final_of(self.finals) if self.finals else None, **more)
        for leaf in (rows["id"], rows["reward"], *rows["obs"].values()):
            leaf[:] = 77  # an environment uses its arrays again
        return taken


@dataclass
class Told:
    """All rows that were pushed, in the order in which the program pushed them, and what each is followed by."""

    chance: random.Random
    odds: float = 0.25
    """Of a row to end."""
    numbers: list[int] = field(default_factory=list)
    """By key, where one thread pushes."""
    pushes: list[Push] = field(default_factory=list)
    end: dict[int, str] = field(default_factory=dict)
    final: set[int] = field(default_factory=set)
    """Those that ended with a final."""
    after: dict[int, int] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    """By lane, the row that is open."""

    def push(self, actor: conduit.Actor, first: int | None = None, **more: Any) -> int:
        """One step of all lanes of an actor. Returns how many rows were taken."""
        return self._push(actor, actor.lanes, False, first, more)

    def push_trajectory(self, actor: conduit.Actor, length: int, **more: Any) -> int:
        """`length` rows of the actor's first lane, the last of which ends it, or doesn't."""
        return self._push(actor, length, True, None, more)

    def _push(self, actor: conduit.Actor, rows: int, lane: bool, first: int | None, more: dict[str, Any]) -> int:
        first = len(self.numbers) if first is None else first
        numbers = list(range(first, first + rows))
        ends = ["open" if lane and number < numbers[-1] else self._ends() for number in numbers]
        ended = [number for number, end in zip(numbers, ends, strict=True) if end != "open"]
        finals = ended if self.chance.random() < 0.7 else []
        self.final.update(finals)
        for place, (number, end) in enumerate(zip(numbers, ends, strict=True)):
            self._append(0 if lane else place, number, end)
        self.pushes.append(Push(numbers, ends, finals, lane))
        return self.pushes[-1].into(actor, **more)

    def _ends(self) -> str:
        return self.chance.choice(["terminated", "truncated"]) if self.chance.random() < self.odds else "open"

    def _append(self, lane: int, number: int, end: str) -> None:
        self.numbers.append(number)
        self.end[number] = end
        if lane in self._last:
            self.after[self._last.pop(lane)] = number
        if end == "open":
            self._last[lane] = number

    # What must come out

    def episodes(self, lanes: int) -> list[list[int]]:
        """By lane, up to each row that ended, and what is left: of rows that were all pushed a step of so many lanes at a time."""
        out: list[list[int]] = []
        for lane in range(lanes):
            run: list[int] = []
            for push in self.pushes:
                run.append(push.numbers[lane])
                if push.ends[lane] != "open":
                    out.append(run)
                    run = []
            out += [run] if run else []
        return out

    def rows(self, numbers: Sequence[int]) -> dict[str, Any]:
        return rows_of(numbers, [self.end[number] for number in numbers])

    def next_obs(self, numbers: Sequence[int]) -> dict[str, Any]:
        """The successor's observation, the final's, or after a last step without one its own. KeyError where nothing is known."""
        return {name: np.concatenate([self._next(number)[name] for number in numbers]) for name in ("bits", "state")}

    def n_step(self, numbers: Sequence[int], n: int) -> dict[str, Any]:
        """Of the entries that start there."""
        entries = [self._chain(number, n) for number in numbers]
        last = [chain[-1] for chain in entries]
        over = [self.end[number] == "terminated" for number in last]
        rows = self.rows(numbers)
        of_last = self.rows(last)
        return {
            **rows,
            "terminated": of_last["terminated"],
            "truncated": of_last["truncated"],
            "reward": np.array([sum(GAMMA**i * reward_of(k) for i, k in enumerate(c)) for c in entries], np.float32),
            "discount": np.array(
                [0 if end else GAMMA ** len(c) for c, end in zip(entries, over, strict=True)], np.float32
            ),
            "n_step": np.array([len(chain) for chain in entries], np.int32),
            "next_obs": self.next_obs(last),
        }

    def _next(self, number: int) -> dict[str, np.ndarray]:
        if self.end[number] == "open":
            return obs_of([self.after[number]])
        if number in self.final:
            return final_of([number])["obs"]
        assert not self._is_cut(number), f"row {number} was cut: it has no next"
        return obs_of([number])

    def _is_cut(self, number: int) -> bool:
        return self.end[number] == "truncated" and number not in self.final

    def _chain(self, number: int, n: int) -> list[int]:
        """`n` rows from there on; fewer where the episode ends, or goes on with a row that has no next."""
        chain = [number]
        while len(chain) < n and self.end[chain[-1]] == "open" and not self._is_cut(self.after[chain[-1]]):
            chain.append(self.after[chain[-1]])
        return chain


def first_of(tree: Any) -> Any:
    """Its first row."""
    return {name: first_of(leaf) for name, leaf in tree.items()} if isinstance(tree, Mapping) else tree[0]
