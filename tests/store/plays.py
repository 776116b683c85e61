"""Plays: what may happen to a store, told beforehand, so that two stores can be told the same and compared byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

import conduit
from conduit.clock import VirtualClock
from conduit.errors import ConduitError, SchemaError
from tests.store.rows import host

LANES = 2
"""Of each of two actors."""
WAIT_S = 0.25
"""On the virtual clock: what isn't there by then doesn't come."""

Event = tuple[Any, ...]


@conduit.register_ingestion()
def doubles(actor_in: Any, exp_out: Any) -> None:
    rows = actor_in.read()
    exp_out.write({**rows, "double": 2 * rows["id"]})


@conduit.register_ingestion(per="unit")
def counts(actor_in: Any, exp_out: Any) -> None:
    rows = actor_in.read()
    exp_out.write({**rows, "unit": np.full(len(rows["id"]), len(rows["id"]), np.int32)})


@conduit.register_ingestion(per="trajectory")
def places(actor_in: Any, exp_out: Any) -> None:
    made = []
    for each in actor_in.read():
        place = np.arange(len(each), dtype=np.int32)
        made.append(each.with_rows({**each.rows, "place": place, "length": np.full(len(each), len(each), np.int32)}))
    exp_out.write(made)


@conduit.register_delivery()
def halves(exp_in: Any, learn_out: Any) -> None:
    data = exp_in.read()
    learn_out.write({**data, "half": data["obs"]["state"] / 2})


HOOKS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "row": {"ingestion": [doubles]},
    "unit": {"ingestion": [doubles, counts]},
    "trajectory": {"ingestion": [doubles, places]},
    "delivery": {"delivery": [halves]},
}


def step_of(chance: random.Random, first: int, lanes: int = LANES) -> tuple[dict[str, Any], list[int]]:
    """One row a lane, all of whose leaves follow from its number but for the ends, and the lanes that ended."""
    number = np.arange(first, first + lanes, dtype=np.int32)
    ends = [chance.choice(("", "", "", "terminated", "truncated")) for _ in range(lanes)]
    rows = {
        "id": number,
        "obs": obs_of(number),
        "reward": number.astype(np.float32) / 3,
        "prompt": number // 3 % 5,
        "terminated": np.array([end == "terminated" for end in ends]),
        "truncated": np.array([end == "truncated" for end in ends]),
    }
    return rows, [lane for lane, end in enumerate(ends) if end]


def obs_of(number: Any) -> dict[str, Any]:
    image = (number[:, None, None] + np.arange(6).reshape(2, 3)).astype(np.uint8)
    return {"image": image, "state": number.astype(np.float32) / 7}


def off_policy_events(chance: random.Random, count: int, tables: Sequence[str]) -> list[Event]:
    events: list[Event] = []
    number = 0
    for _ in range(count):
        what = chance.random()
        if what < 0.5:
            rows, ended = step_of(chance, number)
            number += LANES
            final = {"obs": obs_of(900 + rows["id"][ended])} if ended and chance.random() < 0.8 else None
            valid = np.array([True, chance.random() < 0.8]) if not ended else None
            priority = np.array([chance.choice((0.0, 0.5, 2.0)) for _ in range(LANES)])
            events.append(("push", chance.randrange(2), rows, final, valid, priority if what < 0.1 else None))
        elif what < 0.72:
            events.append(("pull", chance.choice(tables), chance.randrange(2)))
        elif what < 0.78:
            events.append(("sample", chance.choice(tables), chance.choice((1, 3))))
        elif what < 0.94:
            events.append(("update", chance.choice(tables), [chance.choice((0.25, 1.0, 3.0)) for _ in range(8)]))
        else:
            events.append(("advance",))
    return events


def on_policy_events(chance: random.Random, iterations: int, unit: int, batches: int, needs_edges: bool) -> list[Event]:
    """Iterations of `unit` rows, and of `batches` batches for each of two learners."""
    events: list[Event] = []
    number = 0
    for _ in range(iterations):
        for _ in range(unit // (2 * LANES)):
            for actor in range(2):
                rows, ended = step_of(chance, number)
                number += LANES
                final = {"obs": obs_of(900 + rows["id"][ended])} if ended else None
                events.append(("push", actor, rows, final, None, None))
        if needs_edges:
            events += [("end_unit", 0), ("end_unit", 1)]
        pulls = [("pull", "main", rank) for rank in range(2) for _ in range(batches)]
        chance.shuffle(pulls)
        # Sometimes it ends early.
        events += [*pulls[: chance.choice((len(pulls), len(pulls), len(pulls) // 2))], ("advance",)]
    return events


def printed(batch: conduit.Batch) -> tuple[Any, ...]:
    """All of a batch, byte for byte, whatever framework holds it."""
    info, (leaves, tree) = batch.info, optree.tree_flatten(batch.data)
    told = [
        info.keys,
        info.weight,
        info.probability,
        info.priority,
        info.policy_version,
        info.version_lag,
        info.mask,
        info.times_sampled,
    ]
    arrays = [None if array is None else host(array) for array in (*leaves, *told)]
    plain = (info.number, info.frontier, info.table_size, info.priority_lag, str(tree))
    return (*plain, *(array if array is None else (array.dtype.str, array.shape, array.tobytes()) for array in arrays))


class Player:
    """Plays events to one store, through two actors and two learners of each table."""

    def __init__(self, store: conduit.Store, tables: Sequence[str]) -> None:
        self.store = store
        self.actors = [store.actor(LANES), store.actor(LANES)]
        self.learners = {(name, rank): store.learner(rank, 2, table=name) for name in tables for rank in range(2)}
        self.drawn = dict.fromkeys(tables, np.zeros(0, np.int64))

    def happens(self, event: Event) -> Any:
        """What came of it: comparable."""
        what, *told = event
        try:
            return getattr(self, what)(*told)
        except ConduitError as error:
            return type(error).__name__

    def push(self, actor: int, rows: Any, final: Any, valid: Any, priority: Any) -> Any:
        if priority is not None and not any(self.has_priorities(name) for name in self.drawn):
            priority = None
        if self.store._wiring.admission.limits and self.store.schedule.overlap_ing:
            # What a limiter says depends on what has been ingested by now, where hooks hold rows back.
            self.store._clock.sleep(0.001)
        return self.actors[actor].push(rows, final=final, valid=valid, priority=priority, timeout_s=WAIT_S)

    def end_unit(self, actor: int) -> Any:
        return self.actors[actor].end_unit()

    def pull(self, table: str, rank: int) -> Any:
        batch = self.learners[table, rank].pull(timeout_s=WAIT_S)
        self.drawn[table] = batch.info.keys
        return printed(batch)

    def sample(self, table: str, rows: int) -> Any:
        batch = self.store.sample(rows, table=table, timeout_s=WAIT_S)
        self.drawn[table] = batch.info.keys
        return printed(batch)

    def update(self, table: str, values: Sequence[float]) -> Any:
        keys = self.drawn[table][: len(values)]
        if not self.has_priorities(table) or not len(keys):
            return None
        # What it says is of the moment of the call; the sums are compared at the end.
        self.store.update_priorities(keys, np.array(values[: len(keys)]), table=table)
        return None

    def advance(self) -> Any:
        return self.store.advance()

    def has_priorities(self, table: str) -> bool:
        return self.store._wiring.priorities[table] is not None

    def told(self) -> Any:
        """What the store says of itself, and all its rows."""
        try:
            rows = self.store.read()
        except SchemaError:
            rows = None
        # Rows whose turn came before are there by now.
        info = self.store.info()
        kept = ("rows", "inserted", "drawable_rows", "version", "stale_rows", "dropped_rows", "priorities", "tables")
        if rows is None:
            return {name: info[name] for name in kept}
        leaves = [(path, leaf.dtype.str, leaf.tobytes()) for path, leaf in zip(*named(rows.data), strict=True)]
        linked = rows.linked
        links = None if linked is None else [getattr(linked, name).tobytes() for name in type(linked).__slots__]
        return {name: info[name] for name in kept}, rows.keys.tolist(), rows.versions.tolist(), leaves, links


def named(tree: Any) -> tuple[list[str], list[Any]]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    return [str(path) for path in paths], leaves


@dataclass(frozen=True)
class Found:
    """What a comparison saw of interest: batches, refused calls, batches that were staged when it was saved."""

    batches: int
    refused: int
    staged: int


def goes_on_alike(
    path: str,
    make: Callable[[VirtualClock], conduit.Store],
    again: Callable[[VirtualClock, str], conduit.Store],
    events: Sequence[Event],
    saves: Sequence[int],
    tables: Sequence[str],
) -> Callable[[VirtualClock], Found]:
    """A scene: a store, and after each of the `saves` events one more that was restored from a save of the first or, by turns, of
    the last, all told the same from then on. AssertionError where one of them answers anything else than the first."""

    def scene(clock: VirtualClock) -> Found:
        batches = refused = staged = 0
        players = [Player(make(clock), tables)]
        try:
            for number, event in enumerate(events):
                for _ in range(saves.count(number)):
                    saved = players[0] if len(players) % 2 else players[-1]
                    saved.store.save(f"{path}-{number}-{len(players)}")
                    staged += sum(learner.staged for learner in saved.learners.values())
                    players.append(Player(again(clock, f"{path}-{number}-{len(players)}"), tables))
                    players[-1].drawn = dict(saved.drawn)
                answers = [player.happens(event) for player in players]
                for place, answer in enumerate(answers[1:], 1):
                    assert answer == answers[0], f"event {number} of store {place}: {event}"
                batches += event[0] in ("pull", "sample") and not isinstance(answers[0], str)
                refused += isinstance(answers[0], str)
            told = [player.told() for player in players]
            for place, each in enumerate(told[1:], 1):
                assert each == told[0], f"at the end, of store {place}"
        finally:
            for player in players:
                player.store.close()
        return Found(batches, refused, staged)

    return scene
