"""Cancelling: a call that waits ends at once, and it is as if it had never been made."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import conduit
from conduit import Fifo, MinSize, Queue, Schedule
from conduit.clock import VirtualClock
from conduit.core.halt import Waiters
from conduit.errors import CancelledError, ClosedError, WaitTimeout
from tests.store.rows import fill, fingerprint, ids, no_thread_left, played, step, store, together

BEHIND = Schedule(overlap_ing=True, overlap_del=True)
QUEUE: dict[str, Any] = {"capacity": 8, "sampler": Fifo(), "max_times_sampled": 1, "limiter": Queue(8)}


@dataclass
class Scene:
    """A store in which `call` waits, until somebody calls `cancel` on `port()`."""

    store: conduit.Store
    call: Callable[[], Any]
    port: Callable[[], Any]
    frees: Callable[[], Any]
    """What lets a call like it go on."""


def push_held_by_a_limiter(clock: VirtualClock) -> Scene:
    s = store(**QUEUE, clock=clock, timeout_s=100.0)
    fill(s.actor(), 8)
    actor, learner = s.actor(), s.learner()
    return Scene(s, lambda: actor.push(step(8)), lambda: actor, learner.pull)


def push_into_a_full_inbox(clock: VirtualClock) -> Scene:
    gate = [5.0]

    @conduit.register_ingestion()
    def slow(source, sink):
        clock.sleep(gate[0])
        sink.write(source.read())

    s = store(schedule=Schedule(overlap_ing=True), inbox_units=1, ingestion=[slow], clock=clock, timeout_s=100.0)
    fill(s.actor(), 2)
    actor = s.actor()
    return Scene(s, lambda: actor.push(step(2)), lambda: actor, lambda: clock.sleep(10.0))


def push_behind_another_that_is_ingested(clock: VirtualClock) -> Scene:
    @conduit.register_ingestion()
    def slow(source, sink):
        clock.sleep(5.0)
        sink.write(source.read())

    s = store(ingestion=[slow], clock=clock, timeout_s=100.0)
    first, actor = s.actor(), s.actor()
    task = clock.spawn(lambda: check_pushed(first.push(step(0))), "first")
    clock.sleep(0.5)
    return Scene(s, lambda: actor.push(step(1)), lambda: actor, task.join)


def push_of_the_next_version(clock: VirtualClock) -> Scene:
    s = store(rollout_unit=4, clock=clock, timeout_s=100.0)
    actor = s.actor()
    fill(actor, 4)
    return Scene(s, lambda: actor.push(step(4), version=1), lambda: actor, s.advance)


def pull_without_rows(clock: VirtualClock, **settings: Any) -> Scene:
    s = store(clock=clock, timeout_s=100.0, **settings)
    actor, learner = s.actor(), s.learner()
    return Scene(s, learner.pull, lambda: learner, lambda: fill(actor, 8))


def pull_held_by_a_limiter(clock: VirtualClock, **settings: Any) -> Scene:
    scene = pull_without_rows(clock, limiter=MinSize(6), **settings)
    fill(scene.store.actor(), 5, 100)
    return scene


def pull_of_a_batch_that_is_prepared_behind(clock: VirtualClock) -> Scene:
    @conduit.register_delivery()
    def slow(source, sink):
        clock.sleep(5.0)
        sink.write(source.read())

    s = store(clock=clock, timeout_s=100.0, schedule=Schedule(overlap_del=True), delivery=[slow])
    fill(s.actor(), 8)
    learner = s.learner()
    with pytest.raises(WaitTimeout):
        learner.pull(timeout_s=0.1)
    return Scene(s, learner.pull, lambda: learner, lambda: clock.sleep(5.0))


def sample_without_rows(clock: VirtualClock) -> Scene:
    s = store(clock=clock, timeout_s=100.0)
    actor = s.actor()
    return Scene(s, lambda: s.sample(3), lambda: s, lambda: fill(actor, 8))


def sample_held_by_a_limiter(clock: VirtualClock) -> Scene:
    s = store(clock=clock, timeout_s=100.0, limiter=MinSize(6))
    actor = s.actor()
    fill(actor, 5)
    return Scene(s, lambda: s.sample(3), lambda: s, lambda: fill(actor, 8))


def check_pushed(count: int) -> None:
    assert count


WAITS: dict[str, Callable[[VirtualClock], Scene]] = {
    "push, limiter": push_held_by_a_limiter,
    "push, full inbox": push_into_a_full_inbox,
    "push, another is ingested": push_behind_another_that_is_ingested,
    "push, next version": push_of_the_next_version,
    "pull, rows": pull_without_rows,
    "pull, rows, behind": lambda clock: pull_without_rows(clock, schedule=BEHIND),
    "pull, rows, groups": lambda clock: pull_without_rows(clock, schedule=Schedule(g_ing=3, g_del=2)),
    "pull, limiter": pull_held_by_a_limiter,
    "pull, limiter, behind": lambda clock: pull_held_by_a_limiter(clock, schedule=BEHIND),
    "pull, prepared behind": pull_of_a_batch_that_is_prepared_behind,
    "sample, rows": sample_without_rows,
    "sample, limiter": sample_held_by_a_limiter,
}


def outcome(result: Any) -> Any:
    return fingerprint(result) if isinstance(result, conduit.Batch) else result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wait", WAITS)
def test_a_cancelled_call_ends_at_once_and_called_again_it_gives_what_it_would_have_given(wait, seed):
    """google-deepmind/reverb#165."""

    def cancelled(clock: VirtualClock) -> Any:
        scene = WAITS[wait](clock)
        with scene.store:
            began = clock.now()

            def cancel() -> int:
                clock.sleep(1.0)
                assert scene.store.why_blocked() != ""
                return scene.port().cancel()

            (error, at), (count, _) = together(clock, scene.call, cancel)
            assert isinstance(error, CancelledError), error
            assert count == 1
            assert at == began + 1.0
            assert scene.store.why_blocked() == ""
            assert "cancelled" in str(error)
            scene.frees()
            result = outcome(scene.call())
            return result, len(scene.store)

    def undisturbed(clock: VirtualClock) -> Any:
        scene = WAITS[wait](clock)
        with scene.store:
            scene.frees()
            return outcome(scene.call()), len(scene.store)

    if "behind" in wait:
        # What was asked for stays asked for, and is drawn as soon as it can be: perhaps before other rows come.
        (got, *_), _ = played(seed, cancelled)
        assert got == 0
        return
    assert played(seed, cancelled) == played(seed, undisturbed)


@pytest.mark.parametrize("seed", range(10))
def test_of_two_pulls_from_one_learner_both_end_the_one_behind_the_other_too(seed):
    def scene(clock: VirtualClock):
        with store(clock=clock, timeout_s=100.0) as s:
            learner = s.learner()

            def cancel() -> int:
                clock.sleep(1.0)
                return learner.cancel()

            (one, at), (two, then), (count, _) = together(clock, learner.pull, learner.pull, cancel)
            assert isinstance(one, CancelledError)
            assert isinstance(two, CancelledError)
            assert (count, at, then) == (2, 1.0, 1.0)
            fill(s.actor(), 4)
            assert learner.pull().info.number == 0

    played(seed, scene)


def test_a_cancel_of_nobody_is_none_and_hits_no_call_that_comes():
    with store(**QUEUE) as s:
        actor, learner = s.actor(), s.learner()
        assert actor.cancel() == learner.cancel() == 0
        fill(actor, 8)
        assert ids(learner.pull()) == [0, 1, 2, 3]
        assert actor.cancel() == learner.cancel() == 0
        with pytest.raises(WaitTimeout):
            actor.push_trajectory(step(8, 5), timeout_s=0.0)
        assert ids(learner.pull()) == [4, 5, 6, 7]


def _hits_the_next_call(seed: int) -> bool:
    """Whether a call that began after a cancel had returned was cancelled by it."""
    late: list[str] = []

    def scene(clock: VirtualClock):
        with store(**QUEUE, clock=clock, timeout_s=100.0) as s:
            learner, returned = s.learner(), [False]

            def pull() -> None:
                for _ in range(3):
                    before = returned[0]
                    try:
                        learner.pull()
                    except CancelledError:
                        late.extend(["hit"] * before)

            def cancel() -> None:
                clock.sleep(0.001 * (seed % 3))
                learner.cancel()
                returned[0] = True

            def push() -> None:
                actor = s.actor()
                for number in range(0, 100, 4):
                    clock.sleep(0.001)
                    try:
                        actor.push_trajectory(step(number, 4), timeout_s=0.1)
                    except WaitTimeout:
                        break

            together(clock, pull, pull, cancel, push)

    played(seed, scene)
    return bool(late)


def test_a_cancel_ends_what_is_in_progress_and_nothing_that_begins_after_it():
    assert not any(_hits_the_next_call(seed) for seed in range(200))


def test_a_planted_cancel_that_outlives_its_call_is_found(monkeypatch: pytest.MonkeyPatch):
    leave = Waiters.__exit__

    def leaves_it_behind(self: Waiters, *error: object) -> None:
        mine = self._halt.callers[threading.get_ident()]
        leave(self, *error)
        self._waiting[threading.get_ident()] = self._halt.callers[threading.get_ident()] = mine

    def enters_as_before(self: Waiters) -> Any:
        me = threading.get_ident()
        return self._waiting[me] if me in self._waiting else enter(self)

    enter = Waiters.__enter__
    monkeypatch.setattr(Waiters, "__exit__", leaves_it_behind)
    monkeypatch.setattr(Waiters, "__enter__", enters_as_before)
    assert any(_hits_the_next_call(seed) for seed in range(200))


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(g_ing=2), Schedule(overlap_ing=True)], ids=str)
def test_real_threads_that_are_cancelled_all_the_time_lose_and_double_nothing(schedule):
    many, got = 600, []
    with no_thread_left(), store(**QUEUE, schedule=schedule, timeout_s=20.0) as s:
        actor, learner, over = s.actor(), s.learner(), threading.Event()

        def patiently(call: Callable[[], Any]) -> Any:
            while True:
                try:
                    return call()
                except CancelledError:
                    continue

        def act() -> None:
            for number in range(many):
                patiently(lambda number=number: actor.push(step(number)))

        def cancel() -> None:
            while not over.wait(0.0005):
                actor.cancel()
                learner.cancel()

        threads = [threading.Thread(target=work) for work in (act, cancel)]
        for thread in threads:
            thread.start()
        while len(got) < many:
            got += ids(patiently(learner.pull))
        over.set()
        for thread in threads:
            thread.join(10)
        assert got == list(range(many))


def test_a_cancel_of_what_the_end_of_the_store_ends_too_says_that_it_ended():
    def scene(clock: VirtualClock):
        s = store(clock=clock, timeout_s=math.inf)
        learner = s.learner()

        def end() -> None:
            clock.sleep(1.0)
            s.close()
            learner.cancel()

        (error, _), _ = together(clock, learner.pull, end)
        assert isinstance(error, ClosedError)

    for seed in range(5):
        played(seed, scene)
