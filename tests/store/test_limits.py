"""Limits and the end: budgets, full inboxes, timeouts, close."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

import conduit
from conduit import Schedule
from conduit.errors import CapacityError, ClosedError, WaitTimeout
from tests.store.rows import assert_intact, each_backend, fill, ids, no_thread_left, step, store

SCHEDULES = [Schedule(), Schedule(True, 2, True, 2)]
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=["in line", "behind"])
BEHIND = Schedule(overlap_ing=True)


# Budgets


@each_backend
def test_a_budget_too_small_is_refused_with_the_figures(backend):
    with store(backend=backend, capacity=1000, budgets={"pageable": "4KiB"}) as s:
        with pytest.raises(MemoryError) as caught:
            s.actor().push(step(0))
        assert isinstance(caught.value, CapacityError)
        for part in ("1,000 rows of 14 bytes", "pageable needs 13.67 KiB", "budget is 4 KiB", "292 rows would fit"):
            assert part in str(caught.value)
    with store(backend=backend, capacity=292, budgets={"pageable": "4KiB"}) as s:
        s.actor().push(step(0))
        assert s.info()["bytes_by_endpoint"] == {"pageable": 292 * 14}


@pytest.mark.parametrize("topology", [None, "a100x8"])
@pytest.mark.parametrize("tier", ["pageable", "device"])
def test_a_budget_larger_than_the_memory_is_refused_before_any_row(tier, topology):
    with pytest.raises(
        CapacityError, match=rf"budgets\['{tier}'\] is 1000 TiB, more than the .* that {tier}.* has in all"
    ):
        store(budgets={tier: "1000TiB"}, topology=topology)


def test_a_budget_of_a_device_is_each_devices():
    settings = {"capacity": 96, "placement": ["device:0", "device:1"]}
    with store(**settings, budgets={"device": 48 * 14}) as s:
        s.actor().push(step(0))
        assert s.info()["bytes_by_endpoint"] == {"device:0": 672, "device:1": 672}
    few = {"device": 48 * 14 - 1}
    with (
        store(**settings, budgets=few) as s,
        pytest.raises(CapacityError, match="device:0 needs 672 B for 48 rows; its budget is 671 B"),
    ):
        s.actor().push(step(0))


def test_what_hooks_add_counts_towards_the_budget():
    @conduit.register_ingestion()
    def wide(source, sink):
        sink.write(source.read() | {"wide": np.zeros((len(source.read()["id"]), 1000))})

    with (
        store(capacity=10, budgets={"pageable": "10KiB"}, ingestion=[wide]) as s,
        pytest.raises(CapacityError, match="10 rows of 8,014 bytes"),
    ):
        s.actor().push(step(0))


# Full inboxes


class Gate:
    """An ingestion hook that waits until it is opened."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()

    def hook(self):
        def gated(source, sink):
            self.entered.set()
            assert self.opened.wait(10)
            sink.write(source.read())

        return conduit.register_ingestion()(gated)


def gated_store(gate: Gate, **settings):
    return store(ingestion=[gate.hook()], schedule=BEHIND, inbox_units=3, **settings)


def published(s: conduit.Store) -> set[int]:
    """The rows that draws see: behind rollout, those of all pushes but the last."""
    return {i for _ in range(40) for i in ids(s.sample(4))}


def eventually(holds) -> None:
    until = time.perf_counter() + 5
    while not holds():
        assert time.perf_counter() < until
        time.sleep(0.002)


def test_a_full_inbox_blocks_a_push_until_there_is_room():
    gate = Gate()
    with gated_store(gate) as s:
        actor = s.actor()
        fill(actor, 1)
        assert gate.entered.wait(5)
        fill(actor, 3, first=1)
        thread = threading.Thread(target=actor.push, args=(step(4),))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        gate.opened.set()
        thread.join(5)
        assert not thread.is_alive()
        fill(actor, 1, first=5)
        assert published(s) == set(range(5))


def test_a_full_inbox_raises_at_the_pushs_deadline_and_takes_nothing():
    gate = Gate()
    with gated_store(gate) as s:
        actor = s.actor()
        fill(actor, 1)
        assert gate.entered.wait(5)
        fill(actor, 3, first=1)
        began = time.perf_counter()
        with pytest.raises(WaitTimeout, match=r"inbox has been full.*3 units \(inbox_units\).*when_full='drop'"):
            actor.push(step(99), timeout_s=0.05)
        assert 0.04 < time.perf_counter() - began < 2.0
        gate.opened.set()
        fill(actor, 5, first=4)
        assert published(s) == set(range(8))


def test_a_full_inbox_drops_and_counts_when_declared():
    gate = Gate()
    with gated_store(gate, when_full="drop") as s:
        actor = s.actor(lanes=2)
        assert actor.push(step(0, 2)) == 2
        assert gate.entered.wait(5)
        assert [actor.push(step(number, 2)) for number in range(2, 12, 2)] == [2, 2, 2, 0, 0]
        assert s.info()["dropped_rows"] == 4
        gate.opened.set()
        eventually(lambda: actor.push(step(8, 2)) == 2)
        assert published(s) >= set(range(8))
        assert published(s) <= set(range(10))


def test_rows_less_than_a_group_are_made_visible_for_whoever_waits():
    for schedule in (Schedule(g_ing=10), Schedule(overlap_ing=True, g_ing=10)):
        with store(schedule=schedule) as s:
            fill(s.actor(), 4)
            assert set(ids(s.learner().pull())) <= set(range(4))


# Timeouts


@each_schedule
def test_a_pull_without_rows_says_what_is_missing(schedule):
    with store(schedule=schedule, timeout_s=0.03) as s:
        learner = s.learner()
        with pytest.raises(
            WaitTimeout, match=r"pull of batch 0 \(learner 0 of 1\).*0 rows are visible and a batch needs 4: push 4"
        ):
            learner.pull()
        with pytest.raises(TimeoutError, match=r"0 rows are visible and a batch needs 5"):
            s.sample(5)
        began = time.perf_counter()
        with pytest.raises(WaitTimeout):
            learner.pull(timeout_s=0.2)
        assert 0.18 < time.perf_counter() - began < 2.0
        fill(s.actor(), 8)
        assert learner.pull().info.number == 0


def test_a_sample_larger_than_the_store_can_ever_be_is_refused_at_once():
    with store(capacity=8) as s:
        fill(s.actor(), 8)
        began = time.perf_counter()
        with pytest.raises((CapacityError, ValueError), match=r"9.*8"):
            s.sample(9, timeout_s=3.0)
        assert time.perf_counter() - began < 1.0


# Close


@each_schedule
def test_close_is_idempotent_and_leaves_no_thread(schedule):
    with no_thread_left():
        s = store(schedule=schedule)
        fill(s.actor(), 8)
        s.learner().pull()
        began = time.perf_counter()
        s.close()
        assert time.perf_counter() - began < 1.0
        s.close()


@each_backend
@each_schedule
def test_everything_after_close_says_that_the_store_is_closed_and_batches_survive(backend, schedule):
    s = store(backend=backend, schedule=schedule, sampler=conduit.Prioritized())
    actor, learner = s.actor(), s.learner()
    fill(actor, 32)
    kept = [learner.pull() for _ in range(5)]
    s.close()
    gc.collect()
    for call in (
        lambda: actor.push(step(0)),
        lambda: actor.push_trajectory(step(0, 3)),
        learner.pull,
        lambda: s.sample(4),
        s.actor,
        lambda: s.learner(1, 2),
        lambda: s.update_priorities(np.array([1]), np.array([1.0])),
        s.advance,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    actor.close()
    for batch in kept:
        assert ids(batch) == batch.info.keys.tolist()
        assert_intact(batch)
    s.info()
    s.close()


@each_schedule
def test_close_wakes_whoever_waits(schedule):
    with store(schedule=schedule, timeout_s=30.0) as s:
        learner, heard = s.learner(), []

        def wait() -> None:
            try:
                learner.pull()
            except ClosedError as error:
                heard.append(str(error))

        threads = [threading.Thread(target=wait)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        s.close()
        for thread in threads:
            thread.join(1.0)
            assert not thread.is_alive()
    assert heard == ["the store is closed"]


def test_leaving_the_with_block_by_an_exception_closes_the_store():
    s = store(schedule=SCHEDULES[1])
    actor = s.actor()
    with no_thread_left(), pytest.raises(KeyError), s:
        raise KeyError
    with pytest.raises(ClosedError):
        actor.push(step(0))


def test_a_store_dropped_without_close_ends_its_threads():
    with no_thread_left():
        s = store(schedule=SCHEDULES[1])
        actor, learner = s.actor(), s.learner()
        fill(actor, 8)
        learner.pull()
        del s, actor, learner
        gc.collect()


def test_a_closed_actor_takes_no_more_and_its_rows_stay():
    with store() as s:
        actor, other = s.actor(), s.actor()
        fill(actor, 8)
        actor.close()
        actor.close()
        with pytest.raises(ClosedError, match=r"this actor is closed; open another with store.actor\(\)"):
            actor.push(step(8))
        fill(other, 1, first=8)
        assert len(s) == 9
        assert set(ids(s.sample(9))) <= set(range(9))


def test_a_push_that_times_out_in_line_stops_neither_the_store_nor_another_actor():
    entered, opened, taken = threading.Event(), threading.Event(), []

    @conduit.register_ingestion()
    def slow(source, sink):
        if source.read()["id"][0] == 0:
            entered.set()
            assert opened.wait(10)
        sink.write(source.read())

    def push() -> None:
        try:
            taken.append(first.push(step(0)))
        except Exception as error:
            taken.append(error)

    with store(ingestion=[slow]) as s:
        first, second = s.actor(), s.actor()
        thread = threading.Thread(target=push)
        thread.start()
        assert entered.wait(5)
        with pytest.raises(WaitTimeout, match="still being ingested, in line; this was not taken"):
            second.push(step(1), timeout_s=0.05)
        opened.set()
        thread.join(5)
        assert taken == [1]
        fill(second, 3, first=2)
        assert {i for _ in range(20) for i in ids(s.sample(3))} >= {0, 2, 3}


# What the store tells


def test_info_counts():
    with store(capacity=8, sampler=conduit.Prioritized()) as s:
        actor = s.actor(lanes=2)
        assert s.info()["schema"] is None
        assert len(s) == 0
        fill(actor, 12)
        info = s.info()
        assert len(s) == info["rows"] == info["capacity"] == 8
        assert (info["inserted"], info["dropped_rows"], info["row_bytes"]) == (12, 0, 14)
        assert (info["backend"], info["mode"], info["version"]) == ("reference", "off_policy", 0)
        assert s.advance() == s.version == 1
        fill(actor, 8, first=12)
        assert set(s.sample(8).info.policy_version) == {1}
