"""Several learners share one stream of batches by number, never by arrival."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np
import pytest

import conduit
from conduit import Schedule
from conduit.errors import ScheduleError, SettingError, WaitTimeout
from tests.store.rows import fill, fingerprint, step, store

PREFETCH = [Schedule(), Schedule(g_del=2), Schedule(overlap_del=True), Schedule(overlap_del=True, g_del=3)]


def alone(rows: int, batches: int) -> list[tuple]:
    with store(batch_size=8, seed=2) as s:
        fill(s.actor(), rows)
        learner = s.learner()
        return [fingerprint(learner.pull()) for _ in range(batches)]


@pytest.mark.parametrize("schedule", PREFETCH, ids=str)
@pytest.mark.parametrize("turns", ["010101010101", "000000111111", "110010101001"])
def test_two_learners_together_get_what_one_would_whatever_the_order_of_their_pulls(schedule, turns):
    with store(batch_size=8, seed=2, schedule=schedule) as s:
        fill(s.actor(), 32)
        learners = [s.learner(rank, 2) for rank in (0, 1)]
        got = {}
        for rank in map(int, turns):
            batch = learners[rank].pull()
            assert batch.info.number % 2 == rank
            got[batch.info.number] = fingerprint(batch)
    assert [got[number] for number in range(12)] == alone(32, 12)


def test_learners_on_threads_get_the_same():
    with store(batch_size=8, seed=2, schedule=Schedule(overlap_del=True)) as s:
        fill(s.actor(), 32)
        got: dict[int, tuple] = {}

        def work(learner: conduit.Learner) -> None:
            for _ in range(10):
                batch = learner.pull()
                got[batch.info.number] = fingerprint(batch)

        threads = [threading.Thread(target=work, args=(s.learner(rank, 3),)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert [got[number] for number in range(30)] == alone(32, 30)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("schedule", [Schedule(g_del=1 / 3), Schedule(True, 1 / 3, True, 2 / 3)], ids=str)
def test_on_policy_learners_share_each_row_exactly_epochs_times(world, schedule):
    with store(rollout_unit=12, batch_size=4, epochs=2, schedule=schedule) as s:
        actor, learners = s.actor(lanes=2), [s.learner(rank, world) for rank in range(world)]
        for iteration in range(2):
            fill(actor, 12, 12 * iteration)
            batches = [batch for learner in reversed(learners) for batch in learner]
            assert sorted(batch.info.number for batch in batches) == list(range(6 * iteration, 6 * iteration + 6))
            keys = np.concatenate([batch.info.keys for batch in batches])
            assert sorted(keys.tolist()) == sorted(2 * list(range(12 * iteration, 12 * iteration + 12)))
            s.advance()


def test_a_pull_that_timed_out_is_asked_for_again():
    for schedule in PREFETCH:
        with store(batch_size=8, seed=2, schedule=schedule) as s:
            learner, actor = s.learner(), s.actor()
            fill(actor, 5)
            with pytest.raises(WaitTimeout, match="5 rows are visible and a batch needs 8: push 3 more"):
                learner.pull(timeout_s=0.02)
            fill(actor, 27, first=5)
            numbers = [learner.pull().info.number for _ in range(4)]
            assert numbers == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rank", "world", "message"),
    [(2, 2, "expected 0 ≤ rank < world"), (-1, 2, "expected 0 ≤ rank < world"), (0, 0, "world.*=0: expected a whole"),
     (0, 2, "rank 0 exists already"), (1, 3, "rank 0 was made with world=2")],
)  # fmt: skip
def test_a_learners_place_is_its_own(rank, world, message):
    with store() as s:
        s.learner(0, 2)
        with pytest.raises(SettingError, match=message):
            s.learner(rank, world)


def test_a_world_that_can_not_share_an_iteration_is_refused():
    with (
        store(rollout_unit=12, batch_size=4) as s,
        pytest.raises(ScheduleError, match=r"3 batches .* which 2 learners"),
    ):
        s.learner(0, 2)


@pytest.mark.parametrize("g_del", [1, 3])
def test_prefetch_is_bounded_and_exact(g_del):
    with store(batch_size=4, schedule=Schedule(overlap_del=True, g_del=g_del)) as s:
        fill(s.actor(), 32)
        learner = s.learner()
        deepest = 0
        for index in range(1, 13):
            batch = learner.pull()
            assert batch.info.number == index - 1
            deepest = max(deepest, learner.staged)
        wait_until(lambda: learner.staged == g_del)
        assert deepest <= 2 * g_del - 1 + (g_del == 1)
        assert s.info()["staged_batches"] == {0: g_del}


def wait_until(holds) -> None:
    import time

    until = time.perf_counter() + 5
    while not holds():
        assert time.perf_counter() < until
        time.sleep(0.002)


def test_a_batch_that_was_prepared_ahead_tells_the_lag_of_its_draw_be_it_from_a_checkpoint(tmp_path):
    with store(schedule=Schedule(overlap_del=True), sampler=conduit.Fifo(), max_times_sampled=1) as s:
        actor, learner = s.actor(4), s.learner()
        actor.push(step(0, 4))
        assert s.advance() == 1
        actor.push(step(4, 4))
        assert learner.pull().info.version_lag.tolist() == [1] * 4
        deadline = time.monotonic() + 5.0
        while not learner.staged:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for _ in range(3):
            s.advance()
        s.save(tmp_path / "saved")
        with conduit.Store.restore(tmp_path / "saved", timeout_s=5.0) as other:
            assert other.version == 4
            for info in (learner.pull().info, other.learner().pull().info):
                assert info.store_version == 1
                assert info.version_lag.tolist() == [0] * 4
                assert info.version_lag.dtype == np.int64
                assert pickle.loads(pickle.dumps(info)).version_lag.tolist() == [0] * 4
