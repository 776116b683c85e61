"""Anything that may happen to a store, in any order, beside the reference: pushes, ends, cuts, evictions, draws, priorities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import conduit
from conduit.errors import WaitTimeout
from tests.links.reference import CUT, OPEN, TERMINATED, TRUNCATED, NStep
from tests.links.test_exhaustive import DERIVES, ITEMS
from tests.links.twin import Twin

ALPHA, BETA, EPS = 0.7, 0.4, 0.25
UNHURRIED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
ENDS = st.sampled_from([OPEN, OPEN, OPEN, TERMINATED, TRUNCATED, None])


class Priorities:
    """Raw priorities by key, as `Prioritized(new="max")` gives them."""

    def __init__(self) -> None:
        self.raw: dict[int, float] = {}
        self.highest = 1.0

    def pushed(self, first: int, chosen: list[float | None]) -> None:
        default = self.highest
        for place, priority in enumerate(chosen):
            self.raw[first + place] = default if priority is None else priority
            self.highest = max(self.highest, self.raw[first + place])

    def updated(self, key: int, priority: float) -> None:
        self.raw[key] = priority + EPS
        self.highest = max(self.highest, self.raw[key])


class StoreBesideReference(RuleBasedStateMachine):
    twin: Twin
    priorities: Priorities | None
    MOST_ROWS = 250
    """Ids are bytes in the images."""

    @initialize(
        item=st.sampled_from(list(ITEMS)),
        derive=st.sampled_from(list(DERIVES)),
        capacity=st.integers(3, 12),
        lanes=st.integers(1, 3),
        prioritized=st.booleans(),
        seed=st.integers(0, 3),
    )
    def begin(self, item, derive, capacity, lanes, prioritized, seed):
        chosen = ITEMS[item]
        if isinstance(chosen, NStep) and derive in ("nothing", "stack"):
            chosen = NStep(chosen.n, from_last=("after", "terminated", "truncated"))
        sampler = conduit.Prioritized(alpha=ALPHA, beta=BETA, eps=EPS) if prioritized else conduit.Uniform()
        self.twin = Twin(chosen, DERIVES[derive], capacity, sampler=sampler, seed=seed)
        self.priorities = Priorities() if prioritized else None
        self.actors = [self.twin.open(lanes)]

    def room(self) -> bool:
        return self.twin.pushed < self.MOST_ROWS

    @precondition(room)
    @rule(data=st.data(), with_final=st.booleans(), known=st.booleans())
    def push(self, data, with_final, known):
        actor = data.draw(st.sampled_from(self.actors))
        lanes = self.twin.actors[actor].lanes
        ends = data.draw(st.lists(ENDS, min_size=lanes, max_size=lanes))
        chosen = self.chosen_priorities(data, lanes, known)
        self.twin.push(actor, ends, with_final, **chosen)
        priority = list(chosen.get("priority", [None] * lanes))
        self.insert([priority[lane] for lane, end in enumerate(ends) if end is not None])

    @precondition(room)
    @rule(
        data=st.data(),
        length=st.integers(1, 14),
        end=st.sampled_from([OPEN, TERMINATED, TRUNCATED, CUT]),
        with_final=st.booleans(),
        known=st.booleans(),
    )
    def push_trajectory(self, data, length, end, with_final, known):
        # Of more rows than the ring has, the first have no priorities; here they would be no test of links.
        length = min(length, self.twin.model.capacity)
        actor = data.draw(st.sampled_from(self.actors))
        lane = data.draw(st.integers(0, self.twin.actors[actor].lanes - 1))
        chosen = self.chosen_priorities(data, length, known)
        self.twin.push_trajectory(actor, lane, length, end, with_final, **chosen)
        self.insert(list(chosen.get("priority", [None] * length)))

    @rule(data=st.data(), lanes=st.integers(1, 3))
    def another_actor(self, data, lanes):
        if len(self.actors) == 3:
            place = data.draw(st.integers(0, 2))
            self.twin.close(self.actors.pop(place))
        self.actors.append(self.twin.open(lanes))

    @rule(data=st.data())
    def close(self, data):
        place = data.draw(st.integers(0, len(self.actors) - 1))
        lanes = self.twin.actors[self.actors[place]].lanes
        self.twin.close(self.actors[place])
        self.actors[place] = self.twin.open(lanes)

    @precondition(lambda self: self.priorities is not None and self.twin.model.rows)
    @rule(data=st.data())
    def update_priorities(self, data):
        assert self.priorities is not None
        model = self.twin.model
        keys = data.draw(st.lists(st.integers(0, len(model.rows) - 1), max_size=8))
        values = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=len(keys), max_size=len(keys)))
        live = [model.is_live(model.rows[key]) for key in keys]
        told = self.twin.store.update_priorities(np.array(keys, np.int64), np.array(values))
        assert (told.applied, told.stale) == (sum(live), len(live) - sum(live))
        for key, value, alive in zip(keys, values, live, strict=True):
            if alive:
                self.priorities.updated(key, value)

    @rule(rows=st.integers(1, 9))
    def draw(self, rows):
        starts = self.twin.starts
        total = self.total()
        if len(starts) < rows or total == 0.0:
            if rows <= self.twin.model.capacity:
                with pytest.raises(WaitTimeout):
                    self.twin.store.sample(rows, timeout_s=0.0)
            return
        batch = self.twin.store.sample(rows, to="numpy")
        self.twin.check_batch(batch, even=self.priorities is None)
        if self.priorities is not None:
            self.check_priorities(batch.info, total)

    @precondition(lambda self: self.priorities is None)
    @rule()
    def draw_all(self):
        self.twin.check()

    @invariant()
    def as_many_starts_as_there_must_be(self):
        if hasattr(self, "twin"):
            self.twin.check_count()

    def teardown(self):
        if hasattr(self, "twin"):
            self.twin.store.close()

    def chosen_priorities(self, data, rows: int, known: bool) -> dict[str, Any]:
        if self.priorities is None or not known:
            return {}
        values = st.sampled_from([0.0, 0.5, 1.0, 2.0, 8.0])
        return {"priority": np.array(data.draw(st.lists(values, min_size=rows, max_size=rows)))}

    def insert(self, chosen: list[float | None]) -> None:
        if self.priorities is not None:
            self.priorities.pushed(len(self.twin.model.rows) - len(chosen), chosen)

    def total(self) -> float:
        if self.priorities is None:
            return 1.0
        return math.fsum(self.weight_of(key) for key in self.twin.starts)

    def weight_of(self, key: int) -> float:
        assert self.priorities is not None
        return self.priorities.raw[key] ** ALPHA if self.priorities.raw[key] > 0 else 0.0

    def check_priorities(self, info: conduit.SampleInfo, total: float) -> None:
        assert self.priorities is not None
        keys = info.keys.tolist()
        assert info.priority.tolist() == [self.priorities.raw[key] for key in keys]
        chances = [self.weight_of(key) / total for key in keys]
        assert all(chances), "a disabled row was drawn"
        np.testing.assert_allclose(info.probability, chances, rtol=1e-9)
        weights = [(len(self.twin.starts) * chance) ** -BETA for chance in chances]
        np.testing.assert_allclose(info.weight, np.array(weights) / max(weights), rtol=1e-5)


TestStoreBesideReference = StoreBesideReference.TestCase
TestStoreBesideReference.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=UNHURRIED
)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestStoreBesideReferenceAtLength(StoreBesideReference.TestCase):
    settings = settings(
        max_examples=400,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=UNHURRIED,
    )
