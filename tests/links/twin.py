"""A store and the model of what it must be, fed the same rows and compared."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import pytest

import conduit
from conduit.backends import exchange
from conduit.errors import WaitTimeout
from tests.links.reference import (
    CUT,
    OPEN,
    TERMINATED,
    TRUNCATED,
    Derive,
    Entry,
    Group,
    Item,
    Leaves,
    Model,
    NStep,
    Row,
    Rules,
    Sequence,
    Trajectory,
    flat,
    nested,
)

FINAL = "+final"
"""An end with this after it brings a final along."""
ENOUGH = 80
"""Batches after which a drawable start that hasn't been drawn never will be: one in e^80 times the starts by chance."""


def leaves_of(number: int, end: str = OPEN) -> dict[str, Any]:
    """Row `number`'s leaves, all of which follow from it."""
    return {
        "id": np.int32(number),
        "obs/image": np.array([number % 256, number % 256 // 2], np.uint8),
        "obs/state": np.float32(number),
        "reward": np.float32(number % 7 - 2),
        "after": np.float32(number + 0.5),
        "terminated": np.bool_(end == TERMINATED),
        "truncated": np.bool_(end == TRUNCATED),
    }


def final_of(number: int) -> dict[str, Any]:
    """What comes after row `number` where it ended."""
    return {
        "obs/image": np.array([255 - number % 256, 7], np.uint8),
        "obs/state": np.float32(-number - 1),
    }


def together(rows: Several[Leaves]) -> Any:
    """Leaves (rows, *shape) in a tree."""
    return nested({path: np.stack([row[path] for row in rows]) for path in rows[0]})


class Twin:
    """`leaves`: those of row number so-and-so, which ends so. `ends`: by lane, "open", "terminated", "truncated", or None
    where the lane's row isn't valid."""

    def __init__(
        self,
        item: Item,
        derive: Derive,
        capacity: int,
        *,
        model: Model | None = None,
        leaves: Callable[[int, str], dict[str, Any]] = leaves_of,
        **settings: Any,
    ) -> None:
        self._leaves = leaves
        made: dict[str, Any] = {} if item == Row() else {"item": item.made()}
        if derive:
            made["derive"] = {name: each.made() for name, each in derive.items()}
        defaults = {"backend": "reference", "batch_size": 1, "timeout_s": 10.0}
        self.store = conduit.Store(capacity=capacity, **(defaults | made | settings))
        self.model = model or Model(capacity)
        self.rules = Rules(self.model, item, derive)
        self.actors: list[conduit.Actor] = []
        self.pushed = 0
        self._known: dict[Any, Entry] = {}
        self._starts: list[int] | None = None

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    # What happens to both

    def open(self, lanes: int = 1) -> int:
        self.actors.append(self.store.actor(lanes=lanes))
        return len(self.actors) - 1

    def close(self, actor: int) -> None:
        self.actors[actor].close()
        self._cut([(actor, lane) for lane in range(self.actors[actor].lanes)])
        self._changed()

    def push(self, actor: int, ends: Several[str | None], with_final: bool = False, **settings: Any) -> None:
        first = self.pushed
        places = np.cumsum([end is not None for end in ends]) - 1
        rows = [self._leaves(first + int(place), end or OPEN) for place, end in zip(places, ends, strict=True)]
        ended = [first + int(place) for place, end in zip(places, ends, strict=True) if end not in (None, OPEN)]
        if with_final and ended:
            settings["final"] = together([final_of(number) for number in ended])
        if None in ends:
            settings["valid"] = np.array([end is not None for end in ends])
        valid = sum(end is not None for end in ends)
        assert self.actors[actor].push(together(rows), **settings) == valid
        self.pushed += valid
        for lane, (row, end) in enumerate(zip(rows, ends, strict=True)):
            if end is not None:
                self._append((actor, lane), row, end, with_final, settings)
        self._changed()

    def push_trajectory(
        self, actor: int, lane: int, length: int, end: str, with_final: bool = False, **settings: Any
    ) -> None:
        """`end` may be "cut", too."""
        first = self.pushed
        said = TRUNCATED if end == CUT else end
        rows = [self._leaves(first + i, said if i == length - 1 else OPEN) for i in range(length)]
        if with_final and end in (TERMINATED, TRUNCATED):
            settings["final"] = nested(final_of(first + length - 1))
        if end == CUT:
            settings["end"] = "cut"
        assert self.actors[actor].push_trajectory(together(rows), lane=lane, **settings) == length
        self.pushed += length
        for i, row in enumerate(rows):
            self._append((actor, lane), row, end if i == length - 1 else OPEN, with_final, settings)
        self._changed()

    def _append(self, lane: Any, row: Leaves, end: str, with_final: bool, settings: dict[str, Any]) -> None:
        final = final_of(int(row["id"])) if with_final and end in (TERMINATED, TRUNCATED) else None
        self.model.push(lane, row, end, final, settings.get("version") or 0)

    def _cut(self, lanes: list[Any]) -> None:
        self.model.cut(lanes)

    def _changed(self) -> None:
        self._known.clear()
        self._starts = None

    # Comparisons

    @property
    def starts(self) -> list[int]:
        if self._starts is None:
            self._starts = self.rules.drawable_starts()
        return self._starts

    def entry(self, key: int, n: int | None = None, width: int | None = None) -> Entry:
        entry = self._known.get((key, n, width))
        if entry is None:
            entry = self._known[key, n, width] = self.rules.entry(key, n, width)
        return entry

    def check(self) -> None:
        """The drawable starts are as many as they must be, are all drawn, and are drawn as what they are."""
        self.check_count()
        if not self.starts:
            with pytest.raises(WaitTimeout, match=r"\b0 of \d+ visible rows|\b0 rows are visible"):
                self.store.sample(1, timeout_s=0.0)
            return
        missing = set(self.starts)
        for _ in range(ENOUGH):
            batch = self.store.sample(len(self.starts), to="numpy")
            self.check_batch(batch)
            missing -= set(batch.info.keys.tolist())
            if not missing:
                return
        raise AssertionError(f"never drawn: {sorted(missing)} of {self.starts}; {self.told()}")

    def check_count(self) -> None:
        told = self.store.info()["drawable_rows"]
        assert told == len(self.starts), f"{told} drawable rows; expected {self.starts}; {self.told()}"

    def check_batch(self, batch: conduit.Batch, even: bool = True) -> None:
        """`even`: each start must have had the same chance."""
        keys = batch.info.keys.tolist()
        strangers = set(keys) - set(self.starts)
        assert not strangers, f"drawn, but not drawable: {sorted(strangers)}; {self.told()}"
        got = {path: exchange.to_numpy(leaf) for path, leaf in flat(batch.data).items()}
        entries = self._entries(keys, got)
        assert got.keys() == entries[0].leaves.keys(), self.told()
        for path, leaf in got.items():
            expected = np.stack([entry.leaves[path] for entry in entries])
            assert leaf.dtype == expected.dtype, f"{path}: {leaf.dtype}, expected {expected.dtype}"
            assert leaf.shape == expected.shape, (
                f"{path}: {leaf.shape}, expected {expected.shape}; keys {keys}; {self.told()}"
            )
            if leaf.tobytes() != expected.tobytes():
                self._report(path, keys, leaf, expected)
        self._check_info(batch.info, keys, entries)
        if even:
            assert set(batch.info.probability.tolist()) == {1 / len(self.starts)}, self.told()

    def _entries(self, keys: list[int], got: dict[str, np.ndarray]) -> list[Entry]:
        item = self.rules.item
        if isinstance(item, NStep) and len(item.values) > 1:
            return [self._with_steps(key, int(m), item) for key, m in zip(keys, got["n_step"], strict=True)]
        width = self.rules.width(keys) if isinstance(item, Trajectory) else None
        return [self.entry(key, None, width) for key in keys]

    def _with_steps(self, key: int, m: int, item: NStep) -> Entry:
        """The entry of the number of steps that was drawn, which must be one of the range's."""
        possible = {int(self.entry(key, n).leaves["n_step"]): n for n in item.values}
        assert m in possible, f"key {key}: n_step {m}; expected one of {sorted(possible)}; {self.told()}"
        return self.entry(key, possible[m])

    def _check_info(self, info: conduit.SampleInfo, keys: list[int], entries: list[Entry]) -> None:
        if isinstance(self.rules.item, Sequence | Trajectory | Group):
            mask = exchange.to_numpy(info.mask)
            assert mask.dtype == np.bool_
            assert mask.tolist() == [entry.real for entry in entries], f"keys {keys}; {self.told()}"
        else:
            assert info.mask is None
        assert info.frontier == len(self.model.rows) - 1
        assert info.age.tolist() == [info.frontier - key for key in keys]
        assert info.policy_version.tolist() == [self.model.rows[key].version for key in keys]

    def _report(self, path: str, keys: list[int], leaf: np.ndarray, expected: np.ndarray) -> None:
        for place, key in enumerate(keys):
            assert leaf[place].tolist() == expected[place].tolist(), f"key {key}, leaf {path!r}; {self.told()}"
        raise AssertionError(f"leaf {path!r}: the same numbers in other bytes; {self.told()}")

    def told(self) -> str:
        """What has happened, for whoever must find out why."""
        rows = " ".join(
            f"{row.key}:{id(row.episode) % 9973}/{row.place}{'' if row.end == OPEN else '-' + row.end}"
            f"{FINAL if row.final is not None else ''}"
            for row in self.model.rows
        )
        return f"{self.rules.item}, {dict(self.rules.derive)}, capacity {self.model.capacity}; key:episode/place {rows}"
