"""Programs that act and learn, and what must hold of all that they are given, whatever the schedule (paper Appendix C).

Nothing here looks inside a store: programs keep a record of what they asked for, in the order in which they did, and
compare what they got with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import numpy as np

import conduit
from conduit import Schedule
from conduit.clock import REAL, Clock
from conduit.errors import UnitError, WaitTimeout
from tests.flow.lanes import GAMMA, Told, assert_same, final_of, first_of, host, ids

Content = Literal["rows", "nexts", "3 steps"]
CONTENTS: dict[Content, dict[str, Any]] = {
    "rows": {},
    "nexts": {"derive": {"next_obs": conduit.Next("obs")}},
    "3 steps": {"item": conduit.NStep(3, GAMMA), "derive": {"next_obs": conduit.Next("obs")}},
}
MOST_UNITS = 16
"""As many pushes as may be hidden from a draw, or more."""
MOST_STAGED = 16
"""As many batches as may be staged, or more."""
PUSHED = 0.5
"""Priority of rows whose batch was never updated; updates give 1 and more."""


def off_policy_schedules(units: Iterable[int] = (1, 2, 3, 4), batches: Iterable[int] = (1, 2, 3, 4)) -> list[Schedule]:
    sides = product((False, True), units, (False, True), batches)
    return [Schedule(*side) for side in sides]


def on_policy_schedules(minibatches: int) -> list[Schedule]:
    g = [k / minibatches for k in range(1, minibatches + 1)]
    return [Schedule(*side) for side in product((False, True), g, (False, True), g)]


def most_lag(schedule: Schedule) -> int:
    """How many batches of a learner may have been handed out between a draw and the pull that gets it."""
    g = int(schedule.g_del or 1)
    return 2 * g - 1 if schedule.overlap_del else g - 1


def most_staged(schedule: Schedule) -> int:
    g = int(schedule.g_del or 1)
    return 2 * g if schedule.overlap_del else g


def most_hidden(schedules: Sequence[Schedule]) -> int:
    """How many of the last pushes a draw may not see: those that are gathered, and where ingestion is behind the group before them."""
    g = max(int(schedule.g_ing or 1) for schedule in schedules)
    return 2 * g - 1 if any(schedule.overlap_ing for schedule in schedules) else g - 1


# Off-policy


@dataclass(frozen=True, slots=True)
class Pull:
    """What a program had asked for when it called this pull. `schedules`: any of which may be in force; `hidden`: how many of the
    last pushes a draw may not see."""

    schedules: Sequence[Schedule]
    hidden: int
    inserted: int
    units: int
    updates: int


Fingerprint = tuple[int, int, bytes]


@dataclass
class OffPolicy:
    """One thread that pushes, pulls and updates priorities by turns, in an order that its seed decides. `run` raises
    AssertionError where a row isn't what was pushed, where a draw is staler than it may be, or doesn't say how stale."""

    store: conduit.Store
    seed: int
    lanes: int = 2
    content: Content = "rows"
    prioritized: bool = False
    late: bool = False
    """Whether some updates are made a few batches later."""
    sleep: Callable[[float], None] | None = None
    between: Callable[[random.Random], None] = lambda chance: None
    """Is called between the program's calls."""
    in_force: Callable[[], Sequence[Schedule]] | None = None
    """The schedules any of which may be in force, where that changes; None: the store's."""
    batches: list[conduit.Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.told = Told(random.Random(self.seed + 1))
        self.units: list[int] = []
        """Rows of each push."""
        self.updates: list[tuple[list[int], float]] = []
        self.pulls: list[Pull] = []
        self._late: list[conduit.Batch] = []
        self._were: list[tuple[int, Sequence[Schedule]]] = []
        """By call: how many pushes there were, and which schedules may have been in force."""

    def run(self, steps: int, first: int = 24) -> OffPolicy:
        """`first`: rows that are pushed before the first pull."""
        self.actor, self.learner = self.store.actor(self.lanes), self.store.learner()
        while len(self.told.numbers) < first:
            self.push()
        for _ in range(steps):
            kind = self.chance.random()
            self.between(self.chance)
            if kind < 0.45:
                self.push()
            elif kind < 0.95:
                self.pull()
            else:
                self.check_rows(self.store.sample(4))
            if self.sleep is not None and self.chance.random() < 0.5:
                self.sleep(self.chance.random())
        self.check_stored()
        return self

    def push(self) -> None:
        self._note()
        if self.chance.random() < 0.2:
            self.units.append(self.told.push_trajectory(self.actor, self.chance.randrange(1, 4)))
        else:
            self.units.append(self.told.push(self.actor))

    def _note(self) -> Sequence[Schedule]:
        schedules = [self.store.schedule] if self.in_force is None else list(self.in_force())
        self._were.append((len(self.units), schedules))
        return schedules

    def pull(self) -> None:
        store, schedules = self.store, self._note()
        # What was pushed under an earlier schedule is gathered as that said.
        lately = [each for units, then in self._were if units >= len(self.units) - MOST_UNITS for each in then]
        hidden = most_hidden(lately)
        self.pulls.append(Pull(schedules, hidden, store.info()["inserted"], len(self.units), len(self.updates)))
        batch = self.learner.pull()
        self.batches.append(batch)
        assert batch.info.number == len(self.pulls) - 1, "a batch was left out, or came twice"
        self._check_stale(batch)
        # What was asked for under an earlier schedule stays staged.
        lately = {schedule for pull in self.pulls[-MOST_STAGED:] for schedule in pull.schedules}
        assert self.learner.staged < max(map(most_staged, lately))
        self.check_rows(batch)
        if self.prioritized:
            self._check_priorities(batch)
            self._update(batch)

    def _update(self, batch: conduit.Batch) -> None:
        self._late.append(batch)
        while self._late and not (self.late and self.chance.random() < 0.5):
            keys = self._late.pop(0).info.keys
            value = 1.0 + len(self.updates) / 64
            self.updates.append((keys.tolist(), value))
            self.store.update_priorities(keys, np.full(len(keys), value))

    # What must hold

    def check_rows(self, batch: conduit.Batch) -> None:
        """Every leaf is the pushed one, by its key, and what is derived follows from what was pushed after."""
        keys = batch.info.keys.tolist()
        numbers = [self.told.numbers[key] for key in keys]
        if self.content == "3 steps":
            expected = self.told.n_step(numbers, 3)
        else:
            expected = self.told.rows(numbers)
            if self.content == "nexts":
                expected["next_obs"] = self.told.next_obs(numbers)
        assert_same(host(batch.data), expected, f"batch {batch.info.number}")

    def _check_stale(self, batch: conduit.Batch) -> None:
        info = batch.info
        assert 0 <= info.priority_lag <= info.number
        asked = self.pulls[info.number - info.priority_lag]
        assert info.priority_lag <= max(map(most_lag, asked.schedules)), f"asked for under {asked.schedules}"
        assert info.frontier >= asked.inserted - 1, "it doesn't see rows that were there when it was asked for"
        assert info.frontier < self.store.info()["inserted"]
        seen = sum(self.units[: max(0, asked.units - asked.hidden)])
        assert info.frontier >= seen - 1, f"more than {asked.hidden} pushes are hidden from it"
        if len(self.batches) > 1:
            assert info.frontier >= self.batches[-2].info.frontier

    def _check_priorities(self, batch: conduit.Batch) -> None:
        """The lag is the truth: the draw knew all that had been told before the pull so many batches before, and no more."""
        info = batch.info
        known: dict[int, float] = {}
        for keys, value in self.updates[: self.pulls[info.number - info.priority_lag].updates]:
            known.update(dict.fromkeys(keys, value))
        expected = [known.get(key, PUSHED) for key in info.keys.tolist()]
        assert info.priority.tolist() == expected, f"batch {info.number}, lag {info.priority_lag}"

    def check_stored(self) -> None:
        """Bytes in, bytes out: the store has the newest rows, as many as it holds, each once and as it was pushed."""
        with self.store.preloading():  # behind all that was pushed
            pass
        stored = self.store.read()
        pushed = len(self.told.numbers)
        keys = list(range(max(0, pushed - self.store.info()["capacity"]), pushed))
        assert stored.keys.tolist() == keys
        assert_same(host(stored.data), self.told.rows([self.told.numbers[key] for key in keys]), "what is stored")

    def check_replayed(self, store: conduit.Store) -> None:
        """`store`, in line and new, gives the same batches where each is drawn with the same frontier and the same updates known."""
        actor, learner, pushes, updates = store.actor(self.lanes), store.learner(), iter(self.told.pushes), 0
        for batch in self.batches:
            info, inserted = batch.info, store.info()["inserted"]
            while inserted <= info.frontier:
                inserted += next(pushes).into(actor)
            assert inserted == info.frontier + 1, "the frontier is within a push"
            known = self.pulls[info.number - info.priority_lag].updates
            for keys, value in self.updates[updates:known]:
                store.update_priorities(np.array(keys), np.full(len(keys), value))
            updates = max(updates, known)
            again = learner.pull()
            assert (again.info.number, again.info.frontier) == (info.number, info.frontier)
            assert again.info.keys.tolist() == info.keys.tolist(), f"batch {info.number}"
            assert again.info.probability.tobytes() == info.probability.tobytes()
            assert host(again.info.weight).tobytes() == host(info.weight).tobytes()

    def drawn(self) -> dict[tuple[int, int], list[int]]:
        """The keys of each batch, by its number and frontier."""
        return {(batch.info.number, batch.info.frontier): batch.info.keys.tolist() for batch in self.batches}


def off_policy_settings(content: Content = "rows", prioritized: bool = False, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"backend": "reference", "capacity": 20, "batch_size": 4, "seed": 9, "timeout_s": 20.0}
    if prioritized:
        settings["sampler"] = conduit.Prioritized(alpha=0.8, eps=0.0, new=PUSHED)
    return {**settings, **CONTENTS[content], **more}


def off_policy(
    clock: Clock,
    schedule: Schedule | None,
    seed: int,
    steps: int,
    *,
    content: Content = "rows",
    prioritized: bool = False,
    late: bool = False,
    **more: Any,
) -> OffPolicy:
    """A whole run of the program, all of it checked. `more`: settings of its store."""
    with conduit.Store(clock=clock, schedule=schedule, **off_policy_settings(content, prioritized, **more)) as store:
        sleep = None if clock is REAL else clock.sleep
        program = OffPolicy(store, seed, content=content, prioritized=prioritized, late=late, sleep=sleep)
        return program.run(steps)


# On-policy

Scope = Literal["none", "row", "unit", "trajectory"]
SCOPES: tuple[Scope, ...] = ("none", "row", "unit", "trajectory")


@dataclass
class OnPolicy:
    """Actors, learners and a trainer on threads of one clock. `stops`: learners pull so many batches of an iteration and no more;
    None: all. `run` raises AssertionError where iterations mix, or a row doesn't come exactly as often as it must."""

    clock: Clock
    schedule: Schedule | conduit.Auto | None
    scope: Scope = "none"
    actors: int = 1
    learners: int = 1
    steps: int = 4
    """Of each actor's lanes, an iteration."""
    lanes: int = 2
    minibatches: int = 4
    epochs: int = 2
    iterations: int = 2
    stops: int | None = None
    seed: int = 0
    works_s: float = 0.0
    """How long the hook takes."""
    switch: Callable[[conduit.Store, random.Random], None] | None = None
    """Is called by the trainer, now and then."""
    settings: dict[str, Any] = field(default_factory=dict)
    batches: list[conduit.Batch] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)
    """What each call of the hook saw, by rows' numbers; of a trajectory hook, each fragment."""
    finals: list[Any] = field(default_factory=list)
    """Of each fragment."""

    @property
    def unit(self) -> int:
        return self.actors * self.lanes * self.steps

    def run(self) -> OnPolicy:
        self.told = [Told(random.Random(self.seed + 10 * place), odds=0.2) for place in range(self.actors)]
        hooks = [] if self.scope == "none" else [self._hook()]
        defaults: dict[str, Any] = {"backend": "reference", "timeout_s": 100.0, "seed": 9}
        with conduit.Store(
            mode="on_policy",
            rollout_unit=self.unit,
            batch_size=self.unit // self.minibatches,
            epochs=self.epochs,
            schedule=self.schedule,
            clock=self.clock,
            ingestion=hooks,
            **(defaults | self.settings),
        ) as self.store:
            self.changed = self.clock.condition("program")
            self._finished = 0
            actors = [self.store.actor(self.lanes) for _ in range(self.actors)]
            learners = [self.store.learner(rank, self.learners) for rank in range(self.learners)]
            self._all_learners = learners
            tasks = [self.clock.spawn(lambda i=i: self._act(i, actors[i]), f"actor {i}") for i in range(self.actors)]
            tasks += [
                self.clock.spawn(lambda each=each: self._learn(each), f"learner {each.rank}") for each in learners
            ]
            self._train()
            assert all(task.join() for task in tasks)
        self.check()
        return self

    def _act(self, place: int, actor: conduit.Actor) -> None:
        chance, told = random.Random(self.seed + place + 100), self.told[place]
        for iteration in range(self.iterations):
            for _ in range(self.steps):
                self._think(chance)
                first = 1000 * place + len(told.numbers)
                assert told.push(actor, first, version=iteration) == self.lanes
            if self.scope == "trajectory":
                actor.end_unit()

    def _learn(self, learner: conduit.Learner) -> None:
        chance = random.Random(self.seed + learner.rank + 200)
        for iteration in range(self.iterations):
            many = self.minibatches * self.epochs // self.learners
            for _ in range(many if self.stops is None else min(many, self.stops)):
                batch = learner.pull()
                self.batches.append(batch)
                assert self.store.version == iteration
                self._think(chance)
            with self.changed:
                self._finished += 1
                self.changed.notify_all()
                assert self.changed.wait_for(lambda k=iteration: self.store.version > k, self.clock.now() + 100.0)

    def _train(self) -> None:
        chance = random.Random(self.seed + 300)
        for iteration in range(self.iterations):
            if self.switch is not None:
                for _ in range(3):
                    self.clock.sleep(0.01 * chance.random())
                    self.switch(self.store, chance)
            with self.changed:
                many = (iteration + 1) * self.learners
                assert self.changed.wait_for(lambda many=many: self._finished >= many, self.clock.now() + 100.0)
            while True:
                try:
                    self.store.advance()
                    break
                except UnitError:
                    # Who stops early doesn't wait until all rows are there.
                    assert self.stops is not None
                    self.clock.sleep(0.01)
            # No learner has asked for more so far.
            assert [learner.staged for learner in self._all_learners] == [0] * self.learners
            with self.changed:
                self.changed.notify_all()

    def _think(self, chance: random.Random) -> None:
        if chance.random() < 0.5:
            self.clock.sleep(0.01 * chance.random())

    def _hook(self) -> Any:
        assert self.scope != "none"

        @conduit.register_ingestion(per=self.scope)
        def note(source: Any, sink: Any) -> None:
            data = source.read()
            self.clock.sleep(self.works_s)
            for rows in [fragment.rows for fragment in data] if self.scope == "trajectory" else [data]:
                self.seen.append(rows["id"].tolist())
            self.finals += [fragment.final for fragment in data] if self.scope == "trajectory" else []
            sink.write(data)

        return note

    # What must hold

    def check(self) -> None:
        for batch in self.batches:
            numbers = ids(batch)
            for place in range(self.actors):
                self._check_rows(batch, [i for i, number in enumerate(numbers) if number // 1000 == place], place)
            versions = {self._iteration(number) for number in numbers}
            assert versions == set(batch.info.policy_version.tolist()), "rows of another iteration"
            assert len(versions) == 1, f"batch {batch.info.number} mixes iterations {versions}"
            assert batch.info.number // (self.minibatches * self.epochs) in versions
        self._check_passes()
        self._check_hook()

    def _check_rows(self, batch: conduit.Batch, places: list[int], actor: int) -> None:
        numbers = [ids(batch)[i] for i in places]
        got = _at(host(batch.data), np.array(places, np.int64))
        if numbers:
            assert_same(got, self.told[actor].rows(numbers), f"batch {batch.info.number}")

    def _iteration(self, number: int) -> int:
        return number % 1000 // (self.steps * self.lanes)

    def _check_passes(self) -> None:
        by_number = {batch.info.number: ids(batch) for batch in self.batches}
        assert len(by_number) == len(self.batches), "two batches of one number"
        rows = [
            {
                1000 * a + k * self.steps * self.lanes + i
                for a in range(self.actors)
                for i in range(self.steps * self.lanes)
            }
            for k in range(self.iterations)
        ]
        for iteration in range(self.iterations):
            for one_pass in range(self.epochs):
                first = self.minibatches * (iteration * self.epochs + one_pass)
                there = [by_number.get(number) for number in range(first, first + self.minibatches)]
                delivered = [number for batch in there if batch is not None for number in batch]
                assert len(set(delivered)) == len(delivered), "a row twice in one pass"
                if self.stops is None:
                    assert set(delivered) == rows[iteration], "a pass gives every row once"

    def _check_hook(self) -> None:
        pushed = sorted(number for told in self.told for number in told.numbers)
        if self.scope != "none":
            assert sorted(number for call in self.seen for number in call) == pushed, "each row once"
        if self.scope == "unit":
            assert len(self.seen) == self.iterations
            for iteration, call in enumerate(self.seen):
                assert len(call) == self.unit, "a fraction of a unit"
                assert {self._iteration(number) for number in call} == {iteration}
        if self.scope == "trajectory":
            assert sorted(self.seen) == sorted(self._fragments())
            for fragment, final in zip(self.seen, self.finals, strict=True):
                last = fragment[-1]
                if last in self.told[last // 1000].final:
                    assert_same(final, first_of(final_of([last])), f"the final of row {last}")
                else:
                    assert final is None

    def _fragments(self) -> list[list[int]]:
        """The rows of each lane in each iteration, up to where they end."""
        out: list[list[int]] = []
        for told, iteration, lane in product(self.told, range(self.iterations), range(self.lanes)):
            mine = [n for n in told.numbers if n % self.lanes == lane and self._iteration(n) == iteration]
            run: list[int] = []
            for number in mine:
                run.append(number)
                if told.end[number] != "open":
                    out.append(run)
                    run = []
            out += [run] if run else []
        return out


def _at(tree: Any, places: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _at(leaf, places) for name, leaf in tree.items()}
    return tree[places]


# Bounded


@dataclass
class Bounded:
    """Actors, learners and a trainer that counts versions, on threads of one clock. `run` raises AssertionError where a row comes
    twice or out of order, or to a learner that is further ahead of it than `max_staleness` versions."""

    clock: Clock
    schedule: Schedule | conduit.Auto | None
    max_staleness: int = 1
    actors: int = 2
    learners: int = 2
    pushes: int = 12
    lanes: int = 2
    seed: int = 0
    switch: Callable[[conduit.Store, random.Random], None] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    batches: list[tuple[int, conduit.Batch]] = field(default_factory=list)
    """Each with the version as of its pull's call."""

    def run(self) -> Bounded:
        self.told = [Told(random.Random(self.seed + 10 * place)) for place in range(self.actors)]
        self.version: dict[int, range] = {}
        """The versions that were running while the row was pushed."""
        defaults: dict[str, Any] = {"backend": "reference", "timeout_s": 100.0, "capacity": 16, "batch_size": 2}
        with conduit.Store(
            mode="bounded",
            max_staleness=self.max_staleness,
            schedule=self.schedule,
            clock=self.clock,
            **(defaults | self.settings),
        ) as self.store:
            tasks = [self.clock.spawn(lambda i=i: self._act(i), f"actor {i}") for i in range(self.actors)]
            self._over = False
            learners = [self.store.learner(rank, self.learners) for rank in range(self.learners)]
            tasks += [
                self.clock.spawn(lambda each=each: self._learn(each), f"learner {each.rank}") for each in learners
            ]
            chance = random.Random(self.seed + 300)
            while any(task.alive() for task in tasks[: self.actors]):
                self.clock.sleep(0.02 * chance.random())
                self.store.advance()
                if self.switch is not None:
                    self.switch(self.store, chance)
            self._over = True
            assert all(task.join() for task in tasks)
            left = self._rest()
            stale = self.store.info()["stale_rows"]
        self.check(left, stale)
        return self

    def _act(self, place: int) -> None:
        chance, told, actor = random.Random(self.seed + place + 100), self.told[place], self.store.actor(self.lanes)
        for _ in range(self.pushes):
            first = 1000 * place + len(told.numbers)
            before = self.store.version
            told.push(actor, first)
            acted = range(before, self.store.version + 1)
            self.version.update(dict.fromkeys(range(first, first + self.lanes), acted))
            self.clock.sleep(0.01 * chance.random())

    def _learn(self, learner: conduit.Learner) -> None:
        chance = random.Random(self.seed + learner.rank + 200)
        while not self._over:
            version = self.store.version
            try:
                self.batches.append((version, learner.pull(timeout_s=0.02)))
            except WaitTimeout:
                continue
            self.clock.sleep(0.01 * chance.random())

    def _rest(self) -> list[int]:
        rest: list[int] = []
        while True:
            try:
                rest += ids(self.store.sample(1, timeout_s=0.2))
            except WaitTimeout:
                return rest

    def check(self, left: list[int], stale: int) -> None:
        delivered = [number for _, batch in self.batches for number in ids(batch)] + left
        assert len(set(delivered)) == len(delivered), "a row came twice"
        assert len(delivered) + stale == sum(len(told.numbers) for told in self.told), "rows went unseen"
        for version, batch in self.batches:
            numbers = ids(batch)
            assert (batch.info.version_lag <= self.max_staleness).all()
            # The draw came after the call, and counts from the version of then, or a later one.
            made_by = batch.info.policy_version
            assert all(k in self.version[number] for k, number in zip(made_by.tolist(), numbers, strict=True))
            assert (version - made_by <= self.max_staleness).all()
        by_number = sorted((batch.info.keys.tolist(), ids(batch)) for _, batch in self.batches)
        keys = [key for batch, _ in by_number for key in batch]
        assert keys == sorted(keys), "a batch isn't of the oldest rows"
        for place in range(self.actors):
            mine = [number for _, numbers in by_number for number in numbers if number // 1000 == place]
            assert mine == sorted(mine), "rows of an actor out of order"
