"""Tables over one store's rows, beside a naive model of them: which rows can be drawn, how often, and what is said of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import conduit
from conduit.errors import PriorityError, UnknownKeyError, WaitTimeout
from tests.store.tables import DRAWN_IN_ORDER, Model, View, assert_batch, assert_rows, content

RANDOM = [
    conduit.Uniform(),
    conduit.Uniform(replacement=False),
    conduit.Prioritized(),
    conduit.Prioritized(alpha=1.0, beta=1.0, eps=0.0),
    conduit.WithoutReplacement(),
]
BY_AGE = [conduit.Recency(half_life=2.5), conduit.Stratified()]
IN_ORDER = [sampler() for sampler in DRAWN_IN_ORDER]
REMOVERS = [conduit.Fifo(), conduit.Lifo(), conduit.MaxHeap(), conduit.MinHeap(), conduit.Uniform()]
PRIORITY = st.sampled_from([0.0, 0.5, 1.0, 2.0, 8.0])
MORE = "more"


class Tables(RuleBasedStateMachine):
    """One actor, a learner on each of two tables, batches on demand and priorities; all in line."""

    where: ClassVar[dict[str, Any]] = {"backend": "reference"}
    schedule: conduit.Schedule | None = None
    random: ClassVar[list[Any]] = RANDOM
    removers: ClassVar[list[Any]] = REMOVERS
    lengths: ClassVar[st.SearchStrategy[int]] = st.integers(1, 9)
    capacities: ClassVar[st.SearchStrategy[int]] = st.integers(1, 9)
    counts: ClassVar[dict[str, int]] = {}
    g_del: ClassVar[int] = 1

    @initialize(data=st.data(), seed=st.integers(0, 2**32))
    def begin(self, data: Any, seed: int) -> None:
        self.capacity = data.draw(self.capacities)
        remover = data.draw(st.sampled_from(self.removers))
        samplers = IN_ORDER + self.random + (BY_AGE if isinstance(remover, conduit.Fifo) else [])
        # Rows leave before others replace them where both tables give them only so often.
        mosts = data.draw(st.sampled_from([[None, 1, 3], [1, 2]]))
        self.batch = data.draw(st.integers(1, min(4, self.capacity // self.g_del)))
        self.settings = {
            name: self.table(data.draw(st.sampled_from(samplers)), data.draw(st.sampled_from(mosts)))
            for name in ("main", MORE)
        }
        main = self.settings["main"]
        self.store = conduit.Store(
            **self.where,
            capacity=self.capacity,
            batch_size=self.batch,
            sampler=main.sampler,
            max_times_sampled=main.max_times_sampled,
            tables={MORE: self.settings[MORE]},
            remover=remover,
            schedule=self.schedule,
            seed=seed,
            timeout_s=10.0,
        )
        self.model = Model(self.capacity, self.settings, remover)
        self.by_chance = isinstance(remover, conduit.Uniform)
        self.actor = self.store.actor()
        self.learners = {name: self.store.learner(table=name) for name in self.settings}
        self.numbers = dict.fromkeys([*self.settings, "on demand"], 0)
        self.versions: dict[int, int] = {}

    def table(self, sampler: Any, most: int | None) -> conduit.Table:
        return conduit.Table(sampler, most)

    @property
    def takes_priorities(self) -> bool:
        return any(map(self.model.takes_priorities, self.settings))

    @rule(data=st.data(), whole=st.booleans(), told=st.booleans())
    def push(self, data: Any, whole: bool, told: bool) -> None:
        rows = self.capacity if whole else data.draw(self.lengths)
        given = None
        if told and self.takes_priorities:
            given = data.draw(st.lists(PRIORITY, min_size=rows, max_size=rows))
        first = self.model.inserted
        self.versions.update(dict.fromkeys(range(first, first + rows), self.model.version))
        self.actor.push_trajectory(
            content(range(first, first + rows)), priority=None if given is None else np.array(given)
        )
        survivors = self.store.read().keys.tolist() if self.by_chance else None
        self.model.push(rows, given, survivors)
        self.happened("rows", rows)
        self.settled()

    @rule()
    def advance(self) -> None:
        self.model.version = self.store.advance()

    @rule(name=st.sampled_from(["main", MORE]))
    def pull_all(self, name: str) -> None:
        while self.settings[name].max_times_sampled is not None and self.model.tables[name].can_give(self.batch):
            self.pull(name)

    @rule(name=st.sampled_from(["main", MORE]))
    def pull_one(self, name: str) -> None:
        self.pull(name)

    def pull(self, name: str) -> None:
        learner, can = self.learners[name], self.model.tables[name].can_give(self.batch)
        assert self.store.can_sample(table=name) == can
        if not can:
            with pytest.raises(WaitTimeout, match=f"pull of batch {self.numbers[name]}"):
                learner.pull(timeout_s=0.0)
            return
        view = self.model.view(name, self.batch)
        batch = learner.pull()
        self.drawn(name, batch, view, self.batch)
        assert batch.info.number == self.numbers[name]
        assert batch.info.priority_lag == 0
        self.numbers[name] += 1

    @rule(name=st.sampled_from(["main", MORE]), data=st.data())
    def sample(self, name: str, data: Any) -> None:
        rows = data.draw(st.integers(1, self.capacity))
        if not self.model.tables[name].can_give(rows):
            with pytest.raises(WaitTimeout):
                self.store.sample(rows, table=name, timeout_s=0.0)
            return
        view = self.model.view(name, rows)
        batch = self.store.sample(rows, table=name)
        self.drawn(name, batch, view, rows)
        assert batch.info.number == self.numbers["on demand"]
        self.numbers["on demand"] += 1

    @rule(name=st.sampled_from(["main", MORE]), data=st.data())
    def update(self, name: str, data: Any) -> None:
        model = self.model
        # Live ones, those that left, and some that were never issued.
        keys = data.draw(st.lists(st.integers(max(-1, model.inserted - 3 * self.capacity), model.inserted), max_size=6))
        values = data.draw(st.lists(PRIORITY, min_size=len(keys), max_size=len(keys)))
        told = np.array(keys, np.int64), np.array(values)
        if not model.takes_priorities(name):
            with pytest.raises(PriorityError, match="has no priorities"):
                self.store.update_priorities(*told, table=name)
        elif any(not 0 <= key < model.inserted for key in keys):
            with pytest.raises(UnknownKeyError):
                self.store.update_priorities(*told, table=name)
        else:
            update = self.store.update_priorities(*told, table=name)
            assert (update.applied, update.stale) == model.update(name, keys, values)
            self.happened("stale keys", update.stale)
            self.happened("updated keys", update.applied)
            self.settled()

    def settled(self) -> None:
        """What was asked for may have been drawn by now."""

    def drawn(self, name: str, batch: conduit.Batch, view: View, rows: int) -> None:
        table = self.settings[name]
        before = len(self.model.live)
        assert_batch(batch, view, table, self.versions, rows)
        self.model.drew(name, batch.info.keys.tolist())
        self.happened("batches", 1)
        self.happened("rows freed by their last draw", before - len(self.model.live))

    @invariant()
    def tells_what_is_there(self) -> None:
        if not hasattr(self, "store"):
            return
        model, info = self.model, self.store.info()
        assert len(self.store) == info["rows"] == len(model.live)
        assert info["inserted"] == model.inserted
        assert info["priorities"] == {"applied": model.applied, "stale": model.stale}
        assert info["drawable_rows"] == len(model.tables["main"].drawable)
        for name, table in model.tables.items():
            told = info["tables"][name]
            assert told["drawable_rows"] == len(table.drawable), name
            assert (told["inserted"], told["sampled"]) == (table.inserted, table.sampled), name
            assert told["max_times_sampled"] == table.most
        if model.inserted:
            stored = self.store.read()
            assert stored.keys.tolist() == model.live
            assert stored.versions.tolist() == [model.versions[key] for key in model.live]
            assert_rows(stored.data, model.live)

    def happened(self, what: str, times: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + times

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


def play(machine: type[Tables], examples: int, steps: int = 30) -> dict[str, int]:
    machine.counts = {}
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True)
    )
    return machine.counts


def test_a_store_s_tables_are_what_the_model_says():
    counts = play(Tables, 200)
    for what in ("rows", "batches", "rows freed by their last draw", "stale keys", "updated keys"):
        assert counts[what] > 50, counts


class FewShapes(Tables):
    """JAX compiles once for each number of rows."""

    capacities = st.just(6)
    lengths = st.sampled_from([1, 4, 9])


@pytest.mark.parametrize(
    "where",
    [
        {"backend": "torch"},
        {"backend": "reference", "placement": ["device:0", "device:1", "device:2"]},
        {"backend": "jax", "placement": ["device:0", "device:3"]},
    ],
    ids=str,
)
def test_wherever_the_rows_are(where, monkeypatch):
    monkeypatch.setattr(FewShapes, "where", where)
    assert play(FewShapes, 12)["batches"] > 20


@dataclass
class Ask:
    """Batches that a learner has asked for together: `views` once they are drawn."""

    table: str
    numbers: range
    lags: range
    views: list[View] | None = None


class Ahead(Tables):
    """Batches are drawn and staged before they are pulled; meanwhile their rows may leave, and get other priorities."""

    random: ClassVar[list[Any]] = [
        conduit.Uniform(),
        conduit.Uniform(replacement=False),
        conduit.Prioritized(),
        conduit.Prioritized(alpha=1.0, beta=1.0, eps=0.0),
    ]
    # Who stays, and who is drawn often enough to leave, must be known before a batch is seen.
    removers: ClassVar[list[Any]] = REMOVERS[:-1]
    capacities: ClassVar[st.SearchStrategy[int]] = st.integers(4, 12)

    def table(self, sampler: Any, most: int | None) -> conduit.Table:
        return conduit.Table(sampler, most if isinstance(sampler, DRAWN_IN_ORDER) else None)

    def begin(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    @initialize(data=st.data(), seed=st.integers(0, 2**32))
    def begin_ahead(self, data: Any, seed: int) -> None:
        self.schedule = conduit.Schedule(overlap_del=True, g_del=self.g_del)
        Tables.begin(self, data, seed)
        self.asks: dict[str, dict[int, Ask]] = {name: {} for name in self.settings}
        self.waiting: list[Ask] = []

    def ask(self, name: str, number: int) -> Ask:
        made = self.asks[name].get(number)
        if made is None:
            stop = number - number % self.g_del + self.g_del
            made = Ask(name, range(number, stop), range(number - self.numbers[name], stop - self.numbers[name]))
            self.asks[name].update(dict.fromkeys(made.numbers, made))
            self.waiting.append(made)
            self.settled()
        return made

    def settled(self) -> None:
        def ready(ask: Ask) -> bool:
            table = self.model.tables[ask.table]
            return table.can_give(self.batch * (len(ask.numbers) if table.most is not None else 1))

        while (ask := next(filter(ready, self.waiting), None)) is not None:
            self.waiting.remove(ask)
            ask.views = []
            for _ in ask.numbers:
                view = self.model.view(ask.table, self.batch)
                if ask.views:
                    view.size = ask.views[0].size
                ask.views.append(view)
                before = len(self.model.live)
                if view.keys is None:
                    self.model.tables[ask.table].sampled += self.batch
                else:
                    self.model.drew(ask.table, view.keys)
                self.happened("rows freed by their last draw", before - len(self.model.live))

    def pull(self, name: str) -> None:
        learner, number = self.learners[name], self.numbers[name]
        ask = self.ask(name, number)
        if number % self.g_del == 0:
            self.ask(name, number + self.g_del)
        if ask.views is None:
            with pytest.raises(WaitTimeout, match=f"pull of batch {number}"):
                learner.pull(timeout_s=0.0)
            return
        batch, place = learner.pull(), ask.numbers.index(number)
        del self.asks[name][number]
        self.numbers[name] += 1
        assert_batch(batch, ask.views[place], self.settings[name], self.versions, self.batch)
        assert batch.info.number == number
        assert batch.info.priority_lag == ask.lags[place]
        self.happened("batches", 1)
        self.happened("rows that had left", len(set(batch.info.keys.tolist()) - set(self.model.live)))

    def pull_all(self, name: str) -> None:
        raise NotImplementedError

    @rule(name=st.sampled_from(["main", MORE]), pulls=st.integers(1, 4))
    def pull_some(self, name: str, pulls: int) -> None:
        for _ in range(pulls):
            self.pull(name)


@pytest.mark.parametrize("g_del", [1, 2, 3])
def test_batches_that_are_prepared_ahead_are_what_they_were_when_they_were_drawn(g_del, monkeypatch):
    monkeypatch.setattr(Ahead, "g_del", g_del)
    counts = play(Ahead, 150)
    for what in ("batches", "rows that had left", "rows freed by their last draw", "updated keys"):
        assert counts[what] > 5, counts
