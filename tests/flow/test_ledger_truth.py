"""The ledger against stages and hooks of known length, on the real clock: one thread and two, in line and overlapped.

Every cell within 10 % of the truth. The machine may be noisy: medians over iterations are compared, and each case may be
measured up to three times, since a busy machine can only make it worse."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

import conduit
from conduit.core.ledger import Seconds

ROLLOUT_S, UPDATE_S, INGESTION_S, DELIVERY_S = 0.030, 0.040, 0.020, 0.025
SLACK_S = 0.002
"""The store's own work in an iteration: what a cell of length zero may show."""


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def work_of(work: Callable[[float], None]):
    @conduit.register_ingestion()
    def ingestion(actor_in, exp_out):
        work(INGESTION_S)
        exp_out.write(actor_in.read())

    @conduit.register_delivery()
    def delivery(exp_in, learn_out):
        work(DELIVERY_S)
        learn_out.write(exp_in.read())

    return ingestion, delivery


@dataclass(frozen=True)
class Truth:
    """Seconds an iteration."""

    ingestion_exposed_s: float
    delivery_exposed_s: float
    starved_s: float = 0.0


def cells(seconds: list[Seconds], skip: int = 3) -> dict[str, float]:
    """The median iteration, without the first few, which fill the pipeline."""
    kept = seconds[skip:]
    pick = {
        "rollout": lambda s: s.rollout_s,
        "update": lambda s: s.update_s,
        "ingestion busy": lambda s: s.ingestion.busy_s,
        "ingestion exposed": lambda s: s.ingestion.exposed_s,
        "ingestion hidden": lambda s: s.ingestion.hidden_s,
        "delivery busy": lambda s: s.delivery.busy_s,
        "delivery exposed": lambda s: s.delivery.exposed_s,
        "delivery hidden": lambda s: s.delivery.hidden_s,
        "starved": lambda s: s.starved_s,
    }
    return {name: statistics.median(map(cell, kept)) for name, cell in pick.items()}


def expected(truth: Truth) -> dict[str, float]:
    return {
        "rollout": ROLLOUT_S,
        "update": UPDATE_S,
        "ingestion busy": INGESTION_S,
        "ingestion exposed": truth.ingestion_exposed_s,
        "ingestion hidden": INGESTION_S - truth.ingestion_exposed_s,
        "delivery busy": DELIVERY_S,
        "delivery exposed": truth.delivery_exposed_s,
        "delivery hidden": DELIVERY_S - truth.delivery_exposed_s,
        "starved": truth.starved_s,
    }


def assert_true(measure: Callable[[], dict[str, float]], truth: Truth) -> None:
    wrong: dict[str, tuple[float, float]] = {}
    for _ in range(3):
        measured = measure()
        wrong = {
            name: (measured[name], true_s)
            for name, true_s in expected(truth).items()
            if abs(measured[name] - true_s) > max(0.1 * true_s, SLACK_S)
        }
        if not wrong:
            return
    pytest.fail(f"cells off (measured, true): {wrong}")


def one_thread(schedule: conduit.Schedule, work: Callable[[float], None], marked: bool) -> dict[str, float]:
    ingestion, delivery = work_of(work)
    rows = {"obs": np.zeros((4, 3), np.float32)}
    with conduit.Store(
        backend="reference",
        capacity=64,
        batch_size=4,
        sampler=conduit.Prioritized(),
        schedule=schedule,
        ingestion=[ingestion],
        delivery=[delivery],
    ) as store:
        actor, learner = store.actor(lanes=4), store.learner()
        for _ in range(14):
            if marked:
                with store.rollout():
                    work(ROLLOUT_S)
                    actor.push(rows)
                with store.update():
                    batch = learner.pull()
                    work(UPDATE_S)
            else:
                work(ROLLOUT_S)
                actor.push(rows)
                batch = learner.pull()
                work(UPDATE_S)
            store.update_priorities(batch.info.keys, np.ones(4))
        return cells(list(store.ledger.iterations))


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "inferred"])
@pytest.mark.parametrize("work", [time.sleep, spin], ids=["sleep", "spin"])
def test_one_thread_in_line_exposes_all(work, marked: bool) -> None:
    truth = Truth(INGESTION_S, DELIVERY_S)
    assert_true(lambda: one_thread(conduit.Schedule(), work, marked), truth)


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "inferred"])
def test_one_thread_overlapped_hides_all_that_sleeps(marked: bool) -> None:
    truth = Truth(0.0, 0.0)
    schedule = conduit.Schedule(overlap_ing=True, overlap_del=True)
    assert_true(lambda: one_thread(schedule, time.sleep, marked), truth)


def test_delivery_longer_than_what_it_hides_behind_is_exposed_by_the_difference() -> None:
    """In line ingestion, overlapped delivery: a batch is asked for at the pull before it."""

    def measure() -> dict[str, float]:
        with monkeypatched("DELIVERY_S", 0.120):
            return one_thread(conduit.Schedule(overlap_del=True), time.sleep, True)

    with monkeypatched("DELIVERY_S", 0.120):
        around_s = ROLLOUT_S + UPDATE_S + INGESTION_S
        assert_true(measure, Truth(INGESTION_S, 0.120 - around_s))


def two_threads(work: Callable[[float], None]) -> dict[str, float]:
    """An actor thread and a learner thread at their own pace; the learner is the slower one and never starves."""
    ingestion, delivery = work_of(work)
    rows = {"obs": np.zeros((4, 3), np.float32)}
    iterations = 12
    with conduit.Store(
        backend="reference", capacity=64, batch_size=4, ingestion=[ingestion], delivery=[delivery]
    ) as store:
        actor, learner = store.actor(lanes=4), store.learner()
        actor.push(rows)
        ready = threading.Barrier(2)

        def act() -> None:
            for _ in range(iterations):
                ready.wait()
                with store.rollout():
                    work(ROLLOUT_S)
                actor.push(rows)

        thread = threading.Thread(target=act, name="actor")
        thread.start()
        for _ in range(iterations):
            ready.wait()
            learner.pull()
            with store.update():
                work(UPDATE_S)
        thread.join()
        by_thread = store.ledger.by_thread
        assert by_thread["actor"].rollout_s == pytest.approx(store.ledger.total.rollout_s, rel=0.1)
        assert by_thread["MainThread"].update_s == pytest.approx(store.ledger.total.update_s, rel=0.1)
        return cells(list(store.ledger.iterations))


def test_two_threads_each_count_for_their_own_stage() -> None:
    assert_true(lambda: two_threads(time.sleep), Truth(INGESTION_S, DELIVERY_S))


def test_a_learner_that_waits_for_actors_is_starved_not_exposed() -> None:
    def measure() -> dict[str, float]:
        starved, exposed = [], []
        for _ in range(5):
            with conduit.Store(backend="reference", capacity=64, batch_size=4) as store:
                actor, learner = store.actor(lanes=4), store.learner()
                thread = threading.Thread(
                    target=lambda actor=actor: (time.sleep(0.1), actor.push({"obs": np.zeros((4, 1), np.float32)}))
                )
                thread.start()
                learner.pull()
                thread.join()
                starved.append(store.ledger.total.starved_s)
                exposed.append(store.ledger.total.delivery.exposed_s)
        return {"starved": statistics.median(starved), "exposed": statistics.median(exposed)}

    measured: dict[str, float] = {}
    for _ in range(3):
        measured = measure()
        if measured["starved"] == pytest.approx(0.1, rel=0.1) and measured["exposed"] < 0.005:
            return
    pytest.fail(f"{measured}")


class monkeypatched:  # noqa: N801
    """A module constant with another value, for a block."""

    def __init__(self, name: str, value: float) -> None:
        self.name, self.value, self.old = name, value, globals()[name]

    def __enter__(self) -> None:
        globals()[self.name] = self.value

    def __exit__(self, *error: object) -> None:
        globals()[self.name] = self.old
