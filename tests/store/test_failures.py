"""What goes wrong inside the store: it reaches every caller, with its cause, and nothing goes on as if it hadn't."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

import conduit
from conduit import Schedule
from conduit.clock import VirtualClock
from conduit.errors import (
    CapacityError,
    ClosedError,
    ConduitError,
    HookError,
    OperatorError,
    SchemaError,
    SettingError,
)
from tests.interrupt import until_interrupted
from tests.store.rows import each_backend, fill, ids, no_thread_left, played, step, store, together

IN_LINE, BEHIND = Schedule(), Schedule(overlap_ing=True, overlap_del=True)
each_schedule = pytest.mark.parametrize("schedule", [IN_LINE, BEHIND], ids=["in line", "behind"])
each_stage = pytest.mark.parametrize("stage", ["ingestion", "delivery"])


class TwoArgumentsError(Exception):
    """Can be made only with both."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} since {why}")


def hook(stage: str, work):
    """A hook that does `work` before it hands its rows on."""

    def function(source, sink):
        work()
        sink.write(source.read())

    return (conduit.register_ingestion() if stage == "ingestion" else conduit.register_delivery())(function)


def raising(error: BaseException, at: int = 1):
    """Raises `error` when it is called for the `at`th time."""
    calls = []

    def work() -> None:
        calls.append(1)
        if len(calls) == at:
            raise error

    return work


def calls(s: conduit.Store, actor: conduit.Actor, learner: conduit.Learner):
    return [lambda: actor.push(step(0)), learner.pull, s.actor, lambda: s.learner(1, 2)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@each_stage
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["SystemExit", "KeyboardInterrupt"])
def test_whatever_ends_an_operators_thread_reaches_every_caller(stage, error):
    with no_thread_left(), store(schedule=BEHIND, **{stage: [hook(stage, raising(error))]}) as s:
        actor, learner = s.actor(), s.learner()
        for call in [lambda: (fill(actor, 6), learner.pull()), *calls(s, actor, learner)]:
            with pytest.raises(OperatorError, match=f"{type(error).__name__} was raised inside it") as caught:
                call()
            assert caught.value.__cause__ is error


@each_stage
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["SystemExit", "KeyboardInterrupt"])
def test_an_interrupt_in_line_reaches_who_was_interrupted_and_the_store_stops(stage, error):
    hooks = {stage: [hook(stage, raising(error, at=2))]}
    with no_thread_left(), store(rollout_unit=8, batch_size=4, schedule=Schedule(g_ing=0.5), **hooks) as s:
        actor, learner = s.actor(lanes=4), s.learner()

        def iterate() -> None:
            fill(actor, 8)
            list(learner)

        with pytest.raises(type(error)):
            iterate()
        for call in [s.advance, *calls(s, actor, learner)]:
            with pytest.raises(OperatorError) as caught:
                call()
            assert caught.value.__cause__ is error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("port", ["push", "pull"])
def test_after_ctrl_c_in_line_others_go_on_or_hear_of_it(port):
    """Wherever it strikes, it leaves nothing that others would wait for in vain."""

    heard: list[Exception | None] = []
    for _ in range(50):
        with store(timeout_s=5.0) as s:
            actor, learner, rows = s.actor(lanes=8), s.learner(), step(0, 8)
            fill(actor, 8)

            def other(s=s) -> None:
                try:
                    s.actor().push(step(8, 1))
                    s.sample(2)
                    heard.append(None)
                except ConduitError as error:
                    heard.append(error)

            until_interrupted({"push": lambda a=actor, r=rows: a.push(r), "pull": learner.pull}[port])
            thread = threading.Thread(target=other)
            heard.clear()
            thread.start()
            thread.join()
        (told,) = heard
        assert told is None or isinstance(told.__cause__, KeyboardInterrupt), told


@pytest.mark.timeout(10)
@each_schedule
def test_a_foreign_exception_that_can_not_be_copied_is_every_later_errors_cause(schedule):
    error = TwoArgumentsError("it stopped", "it could")

    def beta(number: int) -> float:
        raise error

    with store(schedule=Schedule(overlap_del=schedule.overlap_del), sampler=conduit.Prioritized(beta=beta)) as s:
        actor, learner = s.actor(), s.learner()
        fill(actor, 8)
        for call in [learner.pull, *calls(s, actor, learner), lambda: s.sample(2)]:
            with pytest.raises(
                SettingError,
                match=r"Prioritized\(beta=…\) failed for batch 0, which stops a store .*: TwoArgumentsError: it stopped since it could",
            ) as caught:
                call()
            assert caught.value.__cause__ is error


@pytest.mark.timeout(10)
@each_schedule
def test_a_beta_that_is_no_number_is_said_to_every_caller(schedule):
    sampler = conduit.Prioritized(beta=lambda number: float("nan"))
    with store(schedule=schedule, sampler=sampler) as s:
        actor, learner = s.actor(), s.learner()
        for call in [lambda: (fill(actor, 8), learner.pull()), *calls(s, actor, learner)]:
            with pytest.raises(SettingError, match=r"Prioritized\(beta=…\) gave nan for batch 0"):
                call()


@pytest.mark.timeout(10)
@each_schedule
def test_a_draw_that_fails_while_rows_are_pushed_stops_the_store_and_its_learner(schedule):
    def scene(clock):
        def beta(number: int) -> float:
            raise TwoArgumentsError("it stopped", "it could")

        with store(schedule=schedule, sampler=conduit.Prioritized(beta=beta), clock=clock) as s:
            actor, learner = s.actor(), s.learner()

            def act() -> None:
                clock.sleep(1.0)
                for number in range(20):
                    actor.push(step(number))
                    clock.sleep(0.1)

            results = together(clock, act, learner.pull)
            for error, at in results:
                assert isinstance(error, SettingError)
                assert isinstance(error.__cause__, TwoArgumentsError)
                assert at < 3.0

    for seed in range(10):
        played(seed, scene)


@each_schedule
def test_an_error_of_conduits_that_a_hook_raises_travels_as_it_is(schedule):
    work = raising(SchemaError("no leaf 'value'"))
    with store(schedule=schedule, ingestion=[hook("ingestion", work)]) as s:
        actor, learner = s.actor(), s.learner()

        def act() -> None:
            fill(actor, 4)
            learner.pull()

        for call in (act, *calls(s, actor, learner)):
            with pytest.raises(SchemaError, match="no leaf 'value'"):
                call()


@each_schedule
@each_stage
def test_a_hook_may_close_the_store(stage, schedule):
    with no_thread_left():
        stores: list[conduit.Store] = []
        stores.append(store(schedule=schedule, **{stage: [hook(stage, lambda: stores[0].close())]}))
        actor, learner = stores[0].actor(), stores[0].learner()
        began = time.perf_counter()
        # A batch that was on its way may still arrive.
        with contextlib.suppress(ClosedError):
            fill(actor, 6)
            learner.pull()
        for call in calls(stores[0], actor, learner):
            with pytest.raises(ClosedError):
                call()
        stores[0].close()
        assert time.perf_counter() - began < 1.0


# What a hook writes


@each_backend
@each_schedule
def test_a_delivery_hook_may_fill_one_array_again_and_again(schedule, backend):
    scratch = {"id": np.empty(4, np.int32), "wide": np.empty((4, 16), np.float32)}

    @conduit.register_delivery()
    def reuse(source, sink):
        number = source.read()["id"]
        scratch["id"][:], scratch["wide"][:] = number, number[:, None]
        sink.write(scratch)

    with store(backend=backend, delivery=[reuse], schedule=schedule, capacity=64) as s:
        fill(s.actor(), 64)
        learner = s.learner(to="numpy")
        kept = [learner.pull() for _ in range(20)]
    for batch in kept:
        assert ids(batch) == batch.info.keys.tolist()
        assert (batch.data["wide"] == batch.info.keys[:, None]).all()


@pytest.mark.parametrize("schedule", [Schedule(g_ing=0.5), Schedule(overlap_ing=True, g_ing=0.5)], ids=str)
@pytest.mark.parametrize("barrier", ["unit", "trajectory"])
@each_backend
def test_what_waits_for_a_barrier_stays_as_the_hook_wrote_it(backend, barrier, schedule):
    scratch = np.empty(4, np.int32)

    @conduit.register_ingestion()
    def reuse(source, sink):
        scratch[:] = source.read()["id"]
        sink.write({"id": scratch})

    @conduit.register_ingestion(per=barrier)
    def whole(source, sink):
        sink.write(source.read())

    with store(backend=backend, rollout_unit=8, batch_size=4, ingestion=[reuse, whole], schedule=schedule) as s:
        actor = s.actor(lanes=4)
        for number in (0, 4):
            actor.push(step(number, 4))
        actor.end_unit()
        assert sorted(i for batch in s.learner() for i in ids(batch)) == list(range(8))


@pytest.mark.parametrize("placement", ["device:0", ["device:0", "device:3"]], ids=str)
def test_rows_are_on_a_jax_device_as_the_hook_wrote_them(placement):
    rows, wide, pushes = 2048, 512, 4
    scratch = np.empty((rows, wide), np.float32)

    @conduit.register_ingestion()
    def reuse(source, sink):
        scratch[:] = source.read()["x"]
        sink.write({"x": scratch})

    with store(backend="jax", capacity=rows * pushes, batch_size=rows, ingestion=[reuse], placement=placement) as s:
        actor, learner = s.actor(), s.learner(to="numpy")
        for number in range(pushes):
            actor.push_trajectory({"x": np.full((rows, wide), number, np.float32)})
        batch = learner.pull()
    assert (batch.data["x"] == (batch.info.keys // rows)[:, None]).all()


@pytest.mark.parametrize("make", ["jax", "torch"])
@each_stage
def test_a_hook_that_writes_what_is_no_numpy_array_is_told_what_it_wrote(stage, make):
    import jax.numpy as jnp
    import torch

    array, kind = {"jax": (jnp.asarray, "ArrayImpl"), "torch": (torch.as_tensor, "Tensor")}[make]

    def wrong(source, sink):
        sink.write({"id": array(source.read()["id"])})

    register = conduit.register_ingestion if stage == "ingestion" else conduit.register_delivery
    message = rf"{stage} hook 'wrong' wrote leaves {kind}\[4\]; expected NumPy arrays"
    with store(**{stage: [register()(wrong)]}) as s:
        actor, learner = s.actor(lanes=4), s.learner()

        def work() -> None:
            fill(actor, 4)
            learner.pull()

        with pytest.raises(HookError, match=message):
            work()


@pytest.mark.parametrize("seed", range(30))
def test_first_pushes_that_can_not_be_stored_are_refused_and_those_who_waited_are_served(seed):
    """One thread ingests for the others: a first push that fails is its own caller's, whoever ran it."""

    def scene(clock: VirtualClock) -> list[object]:
        budget = {"pageable": 2_000}
        with store(capacity=64, batch_size=1, clock=clock, budgets=budget, timeout_s=5.0) as s:

            def push(rows: dict[str, np.ndarray]) -> object:
                clock.sleep(0.01 * (seed % 3))
                return s.actor(lanes=1).push(rows)

            small, large = {"x": np.zeros((1, 2), np.float32)}, {"x": np.zeros((1, 200), np.float32)}
            heard = together(clock, *(lambda rows=rows: push(rows) for rows in (large, small, large, small)))
            rows = len(s)
            return [*(outcome for outcome, _ in heard), s.actor(lanes=1).push(small), rows]

    *heard, last, rows = played(seed, scene)
    kinds = [type(each) for each in heard]
    assert all(kind in (int, CapacityError, SchemaError) for kind in kinds), heard
    assert kinds.count(int) == rows <= 2, (
        "the large rows don't fit; the small ones may be refused while those are tried"
    )
    assert last == 1
