"""Any sampler beside a naive model of its rows, on tiny rings and in slots that rows leave in any order; saved and loaded in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from conduit.core.ring import Window
from conduit.core.sampling import Draw, Sampler, Sampling
from conduit.core.starts import Starts

EXAMPLES = settings(max_examples=80, stateful_step_count=25, deadline=None)
seeds = st.integers(0, 2**32)


@dataclass
class Row:
    came: int
    """How many rows came before."""
    priority: float
    drawable: bool


def same(one: Draw, other: Draw) -> bool:
    return all(
        np.asarray(getattr(one, name)).tobytes() == np.asarray(getattr(other, name)).tobytes()
        for name in ("keys", "probability", "weight", "priority")
    )


class SamplerMachine(RuleBasedStateMachine):
    """Subclasses say which samplers, and what draws must hold."""

    samplings: ClassVar[Sequence[Sampling]] = ()
    slots_too: ClassVar[bool] = True

    def drawn(self, draw: Draw, rows: int, sampling: Sampling) -> None:
        """Called after a draw of `rows` rows that were there; asserts what is true of this sampler's only."""

    def came(self, key: int) -> None:
        """A row is drawable from now on."""

    def left(self, key: int) -> None:
        """A row is drawable no more."""

    def restored(self, gone: set[int]) -> None:
        """The rows are those of a restored store, where some can't be drawn any more."""

    @initialize(
        which=st.integers(0, 9), capacity=st.integers(1, 7), starts=st.booleans(), slots=st.booleans(), seed=seeds
    )
    def begin(self, which: int, capacity: int, starts: bool, slots: bool, seed: int) -> None:
        self.sampling = self.samplings[which % len(self.samplings)]
        self.capacity, self.seed = capacity, seed
        self.slots = slots and self.slots_too
        """Whether keys are slots, as in a store whose remover isn't Fifo."""
        self.starts = Starts(capacity) if starts else None
        self.samplers: list[Sampler] = [self.sampling.start(capacity, seed, self.starts)]
        """Those that were loaded on the way go on beside the first, and must draw the same."""
        self.rows: dict[int, Row] = {}
        self.count = 0
        self.first = self.stop = 0
        self.number = 0

    @property
    def window(self) -> Window:
        return Window(self.first, self.stop)

    @property
    def drawable(self) -> list[int]:
        """In the order in which they came."""
        keys = [key for key, row in self.rows.items() if row.drawable]
        return sorted(keys, key=lambda key: self.rows[key].came)

    def pick(self, keys: Sequence[int], seed: int, share: float = 0.5) -> np.ndarray:
        random = np.random.default_rng(seed)
        return np.array([key for key in keys if random.random() < share], np.int64)

    @precondition(lambda self: not self.slots)
    @rule(count=st.integers(1, 9), seed=seeds, told=st.booleans())
    def push(self, count: int, seed: int, told: bool) -> None:
        # Of more rows than the ring has, the sampler hears of those that stay.
        lost = max(0, count - self.capacity)
        first, stop = self.stop + lost, self.stop + count
        oldest = max(self.first, stop - self.capacity)
        for key in [key for key in self.rows if key < oldest]:
            self.lose(key)
        if self.starts is not None:
            self.starts.evict(self.first, min(oldest, self.stop) - self.first)
        self.first, self.stop = oldest, stop
        self.insert(first, stop - first, seed, told)

    @precondition(lambda self: self.slots)
    @rule(count=st.integers(1, 9), seed=seeds, told=st.booleans())
    def fill(self, count: int, seed: int, told: bool) -> None:
        free = [slot for slot in range(self.capacity) if slot not in self.rows]
        for slot in free[:count]:
            if self.starts is not None:
                self.starts.evict(slot, 1)
            self.stop = max(self.stop, slot + 1)
            self.insert(slot, 1, seed + slot, told)

    def insert(self, first: int, count: int, seed: int, told: bool) -> None:
        raw = np.random.default_rng(seed).choice([np.nan, 0.0, 0.5, 1.0, 2.0, 2.0, 7.5], count)
        told = told and self.sampling.prioritized
        for sampler in self.samplers:
            sampler.insert(first, count, raw if told else None)
        for place in range(count):
            priority = raw[place] if told and not np.isnan(raw[place]) else 1.0
            self.rows[first + place] = Row(self.count, float(priority), self.starts is None)
            self.count += 1
            if self.starts is None:
                self.came(first + place)

    def lose(self, key: int) -> None:
        if self.rows.pop(key).drawable:
            self.left(key)

    @precondition(lambda self: self.starts is not None)
    @rule(seed=seeds)
    def admit(self, seed: int) -> None:
        keys = self.pick([key for key, row in self.rows.items() if not row.drawable and row.came >= 0], seed, 0.7)
        assert self.starts is not None
        self.starts.admit(keys)
        for sampler in self.samplers:
            sampler.admit(keys)
        for key in keys.tolist():
            self.rows[key].drawable = True
            self.came(key)

    @rule(seed=seeds, remove=st.booleans())
    def exclude(self, seed: int, remove: bool) -> None:
        self.exclude_all(self.pick(self.drawable, seed), remove)

    def exclude_all(self, keys: np.ndarray, remove: bool) -> None:
        """`remove`: where rows leave in any order, these do."""
        if not len(keys):
            return
        if self.starts is not None:
            assert set(self.starts.exclude(keys)) == set(keys)
        for sampler in self.samplers:
            sampler.exclude(keys)
        for key in keys.tolist():
            self.rows[key].drawable = False
            # Never admitted again.
            self.rows[key].came -= 10**6
            self.left(key)
            if self.slots and remove:
                del self.rows[key]

    @precondition(lambda self: self.sampling.prioritized and self.rows)
    @rule(seed=seeds, count=st.integers(0, 5))
    def update(self, seed: int, count: int) -> None:
        random = np.random.default_rng(seed)
        keys = random.choice(list(self.rows), count)
        raw = random.choice([0.0, 0.25, 1.0, 3.0, 9.0], count)
        for sampler in self.samplers:
            sampler.update(keys.copy(), raw.copy())
        for key, priority in zip(keys.tolist(), raw.tolist(), strict=True):
            self.rows[key].priority = priority

    def enough(self, rows: int) -> bool:
        return len(self.drawable) >= rows

    @rule(rows=st.integers(1, 8), stream=st.integers(0, 1), exhaust=st.booleans())
    def draw(self, rows: int, stream: int, exhaust: bool) -> None:
        missing = [sampler.missing(self.window, rows, self.number) for sampler in self.samplers]
        if not self.enough(rows):
            assert all(missing)
            return
        assert not any(missing), missing
        draws = [sampler.draw(self.number, rows, self.window, stream) for sampler in self.samplers]
        self.number += 1
        draw = draws[0]
        assert all(same(draw, other) for other in draws[1:])
        assert draw.keys.dtype == np.int64
        assert draw.keys.shape == (rows,)
        assert set(draw.keys.tolist()) <= set(self.drawable)
        probability = np.asarray(draw.probability)
        assert probability.shape in ((), (rows,))
        assert ((probability > 0.0) & (probability <= 1.0)).all()
        if draw.weight is not None:
            assert draw.weight.dtype == np.float64
            assert (np.isfinite(draw.weight) & (draw.weight > 0.0)).all()
        raw = [self.rows[key].priority if self.sampling.prioritized else 1.0 for key in draw.keys.tolist()]
        assert np.broadcast_to(draw.priority, rows).tolist() == raw
        self.drawn(draw, rows, self.sampling)
        if exhaust:
            self.exclude_all(np.unique(draw.keys), remove=True)

    @rule()
    def save_and_load(self) -> None:
        state = self.saved()
        loaded = self.sampling.start(self.capacity, self.seed, self.starts)
        loaded.load(state, self.window)
        again = loaded.state(self.window)
        assert state.keys() == again.keys()
        assert all(np.array_equal(state[name], again[name]) for name in state)
        self.samplers = [*self.samplers[-2:], loaded]

    def saved(self) -> dict[str, Any]:
        """The state of the first sampler, copied, so that nobody can say that it shared something."""
        state = dict(self.samplers[0].state(self.window))
        for name, value in state.items():
            assert isinstance(value, np.ndarray | int | float | str)
            if isinstance(value, np.ndarray):
                assert value.dtype.kind in "bif"
                state[name] = value.copy()
                value[...] = 0
        return state

    @precondition(lambda self: not self.slots)
    @rule(capacity=st.integers(1, 9), dropped=st.integers(0, 4), seed=seeds)
    def go_on_in_another_ring(self, capacity: int, dropped: int, seed: int) -> None:
        state = self.saved()
        first = min(max(self.first + dropped, self.stop - capacity), self.stop)
        gone = {key for key in self.rows if key < first}
        for key in gone:
            del self.rows[key]
        self.capacity, self.first = capacity, first
        if self.starts is not None:
            # Some live rows needed one of those that are gone.
            for key in self.pick(self.drawable, seed, 0.2 if gone else 0.0).tolist():
                self.rows[key].drawable = False
                self.rows[key].came -= 10**6
                gone.add(key)
            self.starts = Starts(capacity)
            self.starts.admit(np.array(self.drawable, np.int64))
        self.samplers = [self.sampling.start(capacity, self.seed, self.starts)]
        self.samplers[0].load(state, self.window)
        self.restored(gone)


def play(machine: type[SamplerMachine]) -> None:
    run_state_machine_as_test(machine, settings=EXAMPLES)
