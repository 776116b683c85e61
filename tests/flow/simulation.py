"""A whole store on the virtual clock: actors, operators and learners in an order that a seed decides.

Every row carries the number of its lane and its place in it, so that whatever comes out can be traced to what went in.
`simulate(seed)` raises when a row is lost, doubled, torn or out of order, when something waits for ever, or when an
error doesn't arrive where it should."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

import conduit
from conduit.clock import VirtualClock
from conduit.core.episodes import Fragment
from conduit.core.iteration import OnPolicyRollout
from conduit.errors import ClosedError, HookError, WaitTimeout

T = TypeVar("T")
LANES = 2
PAYLOAD = 5


class PlannedError(Exception):
    """What a hook raises where the plan says so."""


@dataclass(frozen=True)
class Plan:
    """What happens in one simulation, all of it drawn from the seed."""

    on_policy: bool
    schedule: conduit.Schedule
    actors: int
    learners: int
    steps: int
    iterations: int
    pulls: int
    capacity: int
    inbox_units: int
    ingestion_scope: Literal["none", "row", "unit", "trajectory"]
    failing_hook: str | None
    stopping_learner: bool
    impatient_trainer: bool
    closes_at_s: float | None
    timeout_s: float
    drops: bool
    samples: bool
    exact: bool

    @classmethod
    def of(cls, seed: int) -> Plan:
        r = random.Random(seed)
        on_policy = r.random() < 0.5
        trouble = r.choice([None, None, None, "hook", "stop", "impatient", "close"])
        exact = not on_policy and r.random() < 0.15
        actors = r.choice([1, 2, 3])
        fractions = [0.25, 0.5, 1]
        return cls(
            on_policy=on_policy,
            schedule=conduit.Schedule(
                overlap_ing=r.random() < 0.6,
                g_ing=r.choice(fractions if on_policy else [1, 2, 3]),
                overlap_del=not exact and r.random() < 0.6,
                g_del=r.choice(fractions if on_policy else [1] if exact else [1, 2, 3]),
            ),
            actors=actors,
            learners=r.choice([1, 2]),
            steps=4 * r.choice([1, 2]),
            iterations=r.choice([1, 2, 3]),
            pulls=r.randrange(3, 12),
            capacity=r.choice([16, 1024]),
            inbox_units=r.choice([3, 64]),
            ingestion_scope=r.choice(["none", "row", "unit", "trajectory"]),
            failing_hook=r.choice(["ingestion", "delivery"]) if trouble == "hook" else None,
            stopping_learner=trouble == "stop",
            impatient_trainer=trouble == "impatient" and on_policy,
            closes_at_s=r.random() * 0.3 if trouble == "close" else None,
            timeout_s=r.choice([math.inf, math.inf, 0.005]),
            drops=not on_policy and r.random() < 0.2,
            samples=not on_policy and r.random() < 0.3,
            exact=exact,
        )

    @property
    def unit(self) -> int:
        return self.actors * LANES * self.steps


@dataclass
class Seen:
    """What the simulation's threads saw."""

    batches: list[conduit.Batch] = field(default_factory=list)
    samples: list[conduit.Batch] = field(default_factory=list)
    pushed: int = 0
    errors: list[BaseException] = field(default_factory=list)
    finished: int = 0
    closed: bool = False


class Simulation:
    def __init__(self, seed: int) -> None:
        self.plan = Plan.of(seed)
        self.clock = VirtualClock(seed)
        self.seen = Seen()
        self.random = random.Random(seed + 1)
        self.hook_runs = {"ingestion": 0, "delivery": 0}
        self.hook_failed = False
        self.fails_at = self.random.randrange(1, 5)

    def run(self) -> Seen:
        self.clock.run(self._main)
        return self.seen

    def _main(self) -> None:
        plan = self.plan
        self.changed = self.clock.condition("simulation")
        settings: dict = {"mode": "on_policy", "rollout_unit": plan.unit, "epochs": 2, "batch_size": plan.unit // 4}
        if not plan.on_policy:
            sampler = conduit.Prioritized() if plan.steps == 4 else conduit.Uniform()
            settings = {"capacity": plan.capacity, "batch_size": 4, "sampler": sampler, "inbox_units": plan.inbox_units}
            settings |= {"when_full": "drop" if plan.drops else "block", "exact": plan.exact}
        with conduit.Store(
            backend="reference",
            seed=7,
            clock=self.clock,
            schedule=plan.schedule,
            timeout_s=math.inf,
            ingestion=self._ingestion_hooks(),
            delivery=[self._delivery_hook()],
            **settings,
        ) as self.store:
            # On-policy, all actors are made before the first can end its unit; learners come and go as they like.
            actors = [self.store.actor(lanes=LANES) for _ in range(plan.actors)] if plan.on_policy else []
            loops = [
                lambda i=i: self._act(actors[i] if actors else self.store.actor(lanes=LANES))
                for i in range(plan.actors)
            ]
            loops += [lambda r=r: self._learn(self.store.learner(r, plan.learners)) for r in range(plan.learners)]
            tasks = [self.clock.spawn(self._guard(loop), f"loop-{i}") for i, loop in enumerate(loops)]
            if plan.closes_at_s is not None:
                self.clock.sleep(plan.closes_at_s)
            elif plan.on_policy:
                self._guard(self._train)()
            if plan.closes_at_s is None:
                for task in tasks:
                    task.join()
                self._check_contents()
        with self.changed:
            self.seen.closed = True
            self.changed.notify_all()
        for task in tasks:
            task.join()
        self._check_batches()
        self._check_errors()

    # Loops

    def _act(self, actor: conduit.Actor) -> None:
        plan = self.plan
        row = 0
        for iteration in range(plan.iterations):
            for step in range(plan.steps):
                self._think()
                ended = np.array([step == plan.steps - 1, self.random.random() < 0.2])
                lanes = np.arange(actor._lanes.lanes.start, actor._lanes.lanes.stop)
                rows = {
                    "lane": lanes,
                    "row": np.full(LANES, row),
                    "payload": (lanes[:, None] * 1000 + row + np.zeros(PAYLOAD)).astype(np.float32),
                    "terminated": ended,
                }
                version = iteration if plan.on_policy else None
                taken = self._patiently(lambda t, rows=rows, v=version: actor.push(rows, version=v, timeout_s=t))
                self.seen.pushed += taken
                rows["payload"][:] = -1  # an environment reuses its arrays
                row += 1
            if plan.on_policy:
                actor.end_unit()
        if not plan.on_policy and plan.ingestion_scope == "trajectory":
            actor.close()

    def _learn(self, learner: conduit.Learner) -> None:
        plan = self.plan
        if plan.impatient_trainer:
            self._learn_while_iterations_pass(learner)
            return
        for iteration in range(plan.iterations if plan.on_policy else 1):
            stops = self.random.randrange(8) if plan.stopping_learner and learner.rank == 0 else None
            for pulled in range(8 // plan.learners if plan.on_policy else plan.pulls):
                if pulled == stops:
                    break
                if plan.samples and self.random.random() < 0.3:
                    self.seen.samples.append(self._patiently(lambda t: self.store.sample(3, timeout_s=t)))
                batch = self._patiently(lambda t: learner.pull(timeout_s=t))
                self.seen.batches.append(batch)
                self._think()
                if not plan.on_policy and plan.steps == 4:
                    self.store.update_priorities(batch.info.keys, np.ones(len(batch)))
            with self.changed:
                self.seen.finished += 1
                self.changed.notify_all()
                if plan.on_policy:
                    self.changed.wait_for(lambda k=iteration: self.store.version > k or self._over())

    def _learn_while_iterations_pass(self, learner: conduit.Learner) -> None:
        while self.store.version < self.plan.iterations and not self._over():
            try:
                self.seen.batches.append(learner.pull(timeout_s=0.02))
            except WaitTimeout:
                continue
            self._think()

    def _train(self) -> None:
        for iteration in range(self.plan.iterations):
            everybody = 0 if self.plan.impatient_trainer else (iteration + 1) * self.plan.learners
            with self.changed:
                self.changed.wait_for(lambda e=everybody: self.seen.finished >= e or self._over())
            self._wait_until_whole()
            self.store.advance()
            with self.changed:
                self.changed.notify_all()

    def _wait_until_whole(self) -> None:
        # A learner that stops early leaves the trainer to advance while actors may still be pushing.
        rollout = self.store._rollout
        assert isinstance(rollout, OnPolicyRollout)
        while not rollout._closed and not self._over():
            self.clock.sleep(0.01)

    def _guard(self, loop):
        def guarded() -> None:
            try:
                loop()
            except (HookError, ClosedError) as error:
                self.seen.errors.append(error)
                with self.changed:
                    self.changed.notify_all()

        return guarded

    def _over(self) -> bool:
        return self.seen.closed or bool(self.seen.errors)

    def _patiently(self, call: Callable[[float], T]) -> T:
        """A call that may time out leaves all as it was: it is made again until it succeeds."""
        while True:
            try:
                return call(self.plan.timeout_s)
            except WaitTimeout:
                self.clock.sleep(0.003)

    def _think(self) -> None:
        if self.random.random() < 0.5:
            self.clock.sleep(self.random.random() * 0.02)

    # Hooks

    def _ingestion_hooks(self) -> list:
        scope = self.plan.ingestion_scope
        if scope == "none":
            return []

        @conduit.register_ingestion(per=scope)
        def work(actor_in, exp_out):
            self._run_hook("ingestion")
            data = actor_in.read()
            if scope == "trajectory":
                for fragment in data:
                    _check_fragment(fragment)
            exp_out.write(data)

        return [work]

    def _delivery_hook(self):
        @conduit.register_delivery()
        def work(exp_in, learn_out):
            self._run_hook("delivery")
            learn_out.write(exp_in.read())

        return work

    def _run_hook(self, stage: str) -> None:
        self._think()
        self.hook_runs[stage] += 1
        if self.plan.failing_hook == stage and self.hook_runs[stage] == self.fails_at:
            self.hook_failed = True
            raise PlannedError(stage)

    # Checks

    def _check_contents(self) -> None:
        """Every pushed row is in the buffer exactly once, in the order of its lane."""
        plan, store = self.plan, self.store
        if self.seen.errors or plan.on_policy:
            return
        with store._wiring.ingestion.hurried(math.inf):
            while store._buffer.window.stop < self.seen.pushed:
                self.clock.sleep(0.01)
        window = store._buffer.window
        assert window.stop == self.seen.pushed
        keys = np.arange(window.first, window.stop)
        columns = store._buffer.read(
            [store._buffer.select(keys, np.random.default_rng)], conduit.Endpoint.parse("pageable")
        )[0].arrays
        _check_rows(columns)
        place = list(zip(columns["lane"].tolist(), columns["row"].tolist(), strict=True))
        assert len(set(place)) == len(place)
        for lane in range(plan.actors * LANES):
            rows = [row for at, row in place if at == lane]
            if plan.capacity > self.seen.pushed and not plan.drops:
                assert rows == list(range(plan.iterations * plan.steps)), (lane, rows)
            assert rows == sorted(rows)

    def _check_batches(self) -> None:
        where: dict[int, tuple[int, int]] = {}
        for batch in self.seen.batches + self.seen.samples:
            data = {path: np.asarray(leaf) for path, leaf in batch.data.items()}
            _check_rows(data)
            for key, lane, row in zip(
                batch.info.keys.tolist(), data["lane"].tolist(), data["row"].tolist(), strict=True
            ):
                assert where.setdefault(key, (lane, row)) == (lane, row), "one key, two rows"
        assert len(set(where.values())) == len(where), "one row, two keys"
        if self.plan.on_policy:
            self._check_iterations()

    def _check_iterations(self) -> None:
        plan = self.plan
        counts: dict[int, int] = {}
        for batch in self.seen.batches:
            assert len(set(batch.info.policy_version.tolist())) == 1, "rows of two iterations in one batch"
            assert set((batch.info.keys // plan.unit).tolist()) == set(batch.info.policy_version.tolist())
            for key in batch.info.keys.tolist():
                counts[key] = counts.get(key, 0) + 1
        assert all(count <= 2 for count in counts.values())
        if not (plan.failing_hook or plan.stopping_learner or plan.impatient_trainer or plan.closes_at_s is not None):
            assert counts == dict.fromkeys(range(plan.unit * plan.iterations), 2), "every row exactly E times"

    def _check_errors(self) -> None:
        plan, errors = self.plan, self.seen.errors
        if plan.failing_hook is None and plan.closes_at_s is None:
            assert not errors, errors
        if self.hook_failed:
            assert errors, "a hook failed and nobody heard of it"
        for error in errors:
            if plan.failing_hook:
                assert isinstance(error, ClosedError) or isinstance(error.__cause__, PlannedError), error
            else:
                assert isinstance(error, ClosedError), error


def _check_rows(columns) -> None:
    expected = columns["lane"][:, None] * 1000 + columns["row"][:, None] + np.zeros(PAYLOAD)
    np.testing.assert_array_equal(columns["payload"], expected, err_msg="a torn row")


def _check_fragment(fragment: Fragment) -> None:
    rows = fragment.rows
    assert len(set(rows["lane"].tolist())) == 1
    assert np.all(np.diff(rows["row"]) == 1), "a fragment with a gap"
    assert not rows["terminated"][:-1].any(), "a fragment that crosses an end"


def simulate(seed: int) -> Seen:
    return Simulation(seed).run()
