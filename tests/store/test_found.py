"""What a review of samplers, limiters and checkpoints found, each as it was found."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conduit
from conduit import Next, Queue, SampleToInsertRatio, Schedule, Table
from conduit.errors import SchemaError, WaitTimeout
from tests.store.rows import fill, step, store

NEXT = {"next_x": Next("x")}


def rows(first: int, count: int = 1, **more: Any) -> dict[str, np.ndarray]:
    return {"x": np.arange(first, first + count, dtype=np.int32), **more}


def bounded(**settings) -> conduit.Store:
    settings = {"capacity": 16, "batch_size": 1, "max_staleness": 0, **settings}
    return conduit.Store(backend="reference", mode="bounded", timeout_s=5.0, **settings)


def test_a_row_that_waited_for_its_successor_is_not_delivered_once_it_is_too_stale():
    with bounded(derive=NEXT) as s:
        actor, learner = s.actor(), s.learner()
        for number in range(3):
            actor.push(rows(number))
        for _ in range(5):
            s.advance()
        for number in range(3, 6):
            actor.push(rows(number))
        batches = [learner.pull() for _ in range(2)]
        assert [int(batch.data["x"][0]) for batch in batches] == [3, 4]
        assert all(batch.info.policy_version[0] == 5 for batch in batches)
        assert s.info()["stale_rows"] == 3


def test_rows_that_a_hook_held_are_not_delivered_once_they_are_too_stale():
    @conduit.register_ingestion(per="trajectory")
    def whole(source, sink):
        sink.write(source.read())

    with bounded(ingestion=[whole], max_staleness=1) as s:
        actor = s.actor()
        actor.push(rows(0, terminated=np.array([False])))
        for _ in range(3):
            s.advance()
        actor.push(rows(1, terminated=np.array([True])))
        assert int(s.learner().pull().data["x"][0]) == 1
        assert s.info()["stale_rows"] == 1


@pytest.mark.parametrize("settings", [{"tables": {"q": Table.queue(8)}}, {"mode": "bounded", "max_staleness": 9}])
def test_rows_that_wait_for_a_successor_keep_their_places_in_a_queue(settings):
    capacity = 8 if "mode" in settings else 16
    schedule = Schedule(g_ing=4)
    with store(batch_size=1, capacity=capacity, derive=NEXT, schedule=schedule, **settings) as s:
        table = "q" if "tables" in settings else "main"
        actor, learner, got = s.actor(), s.learner(table=table), []
        for number in range(60):
            while not s.can_insert():
                got.append(int(learner.pull().data["x"][0]))
            actor.push(rows(number))
        assert got == list(range(len(got)))
        assert len(got) > 50 - 2 * capacity
        assert s.info()["tables"][table]["lost_rows"] == 0


def test_rows_that_hooks_hold_take_places_in_a_queue_and_those_that_never_fitted_are_counted():
    @conduit.register_ingestion(per="trajectory")
    def whole(source, sink):
        sink.write(source.read())

    queue = {"sampler": conduit.Fifo(), "max_times_sampled": 1, "limiter": Queue(8)}
    with store(batch_size=2, capacity=16, ingestion=[whole], **queue) as s:
        actor = s.actor()
        for number in range(40):
            # While draws lack rows, more are let in, held or not: or an episode longer than the queue could never end.
            actor.push(rows(number, terminated=np.array([number == 39])), timeout_s=1.0)
        info = s.info()["tables"]["main"]
        assert (info["drawable_rows"], info["lost_rows"]) == (16, 24)
        with pytest.raises(WaitTimeout, match="Queue"):
            actor.push(rows(40, terminated=np.array([False])), timeout_s=0.0)


def test_a_push_that_is_larger_than_the_store_is_counted_whole():
    limiter = SampleToInsertRatio(1, 4, 100)
    with store(capacity=16, limiter=limiter) as s:
        s.actor().push_trajectory(rows(0, 40))
        assert s.info()["tables"]["main"]["inserted"] == 40


def test_a_learner_that_goes_on_with_larger_groups_asks_for_the_rest_of_one_before_the_next(tmp_path: Path):
    with store(batch_size=2, schedule=Schedule(overlap_del=True)) as s:
        actor, learner = s.actor(), s.learner()
        fill(actor, 4)
        learner.pull()
        learner.pull()
        s.save(tmp_path / "saved")
    with conduit.Store.restore(
        tmp_path / "saved", schedule=Schedule(overlap_del=True, g_del=2), timeout_s=5.0
    ) as again:
        learner = again.learner()
        assert [learner.pull().info.number for _ in range(4)] == [2, 3, 4, 5]
        again.save(tmp_path / "saved")


def test_a_save_does_not_hold_pushes_while_delivery_hooks_work(tmp_path: Path):
    @conduit.register_delivery()
    def slow(source, sink):
        time.sleep(0.3)
        sink.write(source.read())

    with store(batch_size=2, schedule=Schedule(overlap_del=True, g_del=2), delivery=[slow]) as s:
        actor = s.actor()
        fill(actor, 8)
        learner = s.learner()
        learner.pull()
        saved = s.save(tmp_path / "saved")
        assert saved.paused_s < 0.25
        rest = [learner.pull() for _ in range(3)]
    with conduit.Store.restore(tmp_path / "saved", delivery=[slow]) as again:
        other = again.learner()
        assert [other.pull().info.keys.tolist() for _ in range(3)] == [batch.info.keys.tolist() for batch in rest]


def test_a_save_does_not_wait_for_batches_that_advance_has_dropped(tmp_path: Path):
    entered, opened = threading.Event(), threading.Event()

    @conduit.register_delivery()
    def slow(source, sink):
        entered.set()
        opened.wait(5.0)
        sink.write(source.read())

    with store(rollout_unit=8, batch_size=4, schedule=Schedule(overlap_del=True), delivery=[slow]) as s:
        learner, saved = s.learner(), []
        fill(s.actor(), 8)
        threads = [
            threading.Thread(target=lambda: _quietly(learner.pull)),
            threading.Thread(target=lambda: saved.append(s.save(tmp_path / "saved"))),
        ]
        threads[0].start()
        assert entered.wait(5.0)
        threads[1].start()
        time.sleep(0.2)
        s.advance()
        opened.set()
        threads[1].join(5.0)
        assert len(saved) == 1
        s.cancel()
        threads[0].join(5.0)
    with conduit.Store.restore(tmp_path / "saved", delivery=[slow]) as again:
        other = again.learner()
        keys = np.concatenate([other.pull().info.keys for _ in range(2)])
        assert sorted(keys.tolist()) == list(range(8))


def _quietly(call) -> None:
    with contextlib.suppress(conduit.errors.ConduitError):
        call()


def test_bytes_in_another_order_are_refused_when_they_are_pushed():
    with store() as s, pytest.raises(SchemaError, match=r"leaf 'x' has dtype >i4.*expected int32"):
        s.actor().push({"x": np.arange(1).astype(">i4")})


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(overlap_ing=True)])
def test_units_that_were_gathered_for_larger_groups_do_not_fill_the_inbox(schedule, tmp_path: Path):
    with store(capacity=512, schedule=Schedule(g_ing=200)) as s:
        fill(s.actor(), 150)
        s.save(tmp_path / "saved")
    with conduit.Store.restore(tmp_path / "saved", schedule=schedule, timeout_s=5.0) as again:
        actor = again.actor()
        fill(actor, 8, 150)
        assert again.sample(4).info.keys.max() < 158


def test_ctrl_c_while_a_pull_waits_for_rows_leaves_the_store_open():
    with store() as s:
        actor, learner = s.actor(), s.learner()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            learner.pull()
        fill(actor, 8)
        assert learner.pull().info.number == 0


def test_another_limiter_does_not_judge_what_the_one_before_let_through(tmp_path: Path):
    with store(capacity=64, limiter=conduit.MinSize(4)) as s:
        fill(s.actor(), 300)
        for _ in range(10):
            s.sample(4)
        s.save(tmp_path / "saved")
    for ratio in (0.5, 8.0):
        limiter = SampleToInsertRatio(ratio, 4, 40)
        with conduit.Store.restore(tmp_path / "saved", limiter=limiter) as again:
            assert again.can_sample()
            assert again.can_insert()


def test_one_cancel_ends_every_wait():
    with store(limiter=conduit.Queue(4), sampler=conduit.Fifo(), max_times_sampled=1) as s:
        actor = s.actor()
        fill(actor, 4)
        ended: list[BaseException] = []

        def push() -> None:
            try:
                s.actor().push(step(4))
            except conduit.errors.CancelledError as error:
                ended.append(error)

        threads = [threading.Thread(target=push) for _ in range(3)]
        for thread in threads:
            thread.start()
        until = time.perf_counter() + 5.0
        while s.why_blocked().count("has waited") < 3:
            assert time.perf_counter() < until
            time.sleep(0.01)
        assert s.cancel() == 3
        for thread in threads:
            thread.join(5.0)
        assert len(ended) == 3
