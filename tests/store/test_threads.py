"""Threads at one store, on the virtual clock: whoever comes first, what each gets is what was promised."""

from __future__ import annotations

import numpy as np
import pytest

import conduit
from conduit import Schedule
from conduit.errors import ClosedError, UnitError, WaitTimeout
from tests.store.rows import fill, fingerprint, ids, played, step, store, together

each_seed = pytest.mark.parametrize("seed", range(25))
IN_LINE, BEHIND = Schedule(), Schedule(overlap_ing=True, overlap_del=True)
each_schedule = pytest.mark.parametrize("schedule", [IN_LINE, BEHIND], ids=["in line", "behind"])


def slow(clock, stage: str, seconds: float):
    """A hook that takes so long."""

    def hook(source, sink):
        clock.sleep(seconds)
        sink.write(source.read())

    return (conduit.register_ingestion() if stage == "ingestion" else conduit.register_delivery())(hook)


def patiently(call, timeout_s: float):
    """The result of the first `call` that doesn't time out."""
    while True:
        try:
            return call(timeout_s)
        except WaitTimeout:
            continue


# Pushes


@pytest.mark.parametrize(
    ("overlap", "capacity"), [(False, 4), (True, 64), (True, 4)], ids=["in line", "behind", "behind, a full ring"]
)
def test_no_push_and_no_priority_waits_for_a_delivery_hook(overlap, capacity):
    def scene(clock):
        with store(capacity=capacity, delivery=[slow(clock, "delivery", 1.0)], schedule=Schedule(overlap_del=overlap),
                   clock=clock, sampler=conduit.Prioritized()) as s:  # fmt: skip
            actor, learner = s.actor(lanes=2), s.learner()
            fill(actor, 4)

            def act() -> list[float]:
                took = []
                for number in range(4, 24, 2):
                    clock.sleep(0.25)
                    began = clock.now()
                    assert actor.push(step(number, 2), timeout_s=0.1) == 2
                    s.update_priorities(np.array([number]), np.ones(1))
                    took.append(clock.now() - began)
                return took

            (took, _), (batches, _) = together(clock, act, lambda: [learner.pull() for _ in range(3)])
            assert took == [0.0] * 10
            assert all(ids(batch) == batch.info.keys.tolist() for batch in batches)

    for seed in range(5):
        played(seed, scene)


@each_seed
@each_schedule
def test_a_push_that_times_out_was_not_taken_and_every_push_is_taken_once(schedule, seed):
    def scene(clock):
        settings = {"inbox_units": 2} if schedule.overlap_ing else {}
        with store(
            capacity=64, ingestion=[slow(clock, "ingestion", 0.1)], schedule=schedule, clock=clock, **settings
        ) as s:
            timeouts = []

            def act(first: int) -> None:
                actor = s.actor()
                for number in range(first, first + 4):

                    def push(timeout_s: float, number=number) -> int:
                        try:
                            return actor.push(step(number), timeout_s=timeout_s)
                        except WaitTimeout as error:
                            timeouts.append(str(error))
                            raise

                    assert patiently(push, 0.05) == 1

            results = together(clock, *(lambda first=first: act(first) for first in (0, 10, 20)))
            assert [result for result, _ in results] == [None] * 3
            assert max(at for _, at in results) <= 1.3, "nobody waits for what is over"
            for message in timeouts:
                assert "not taken" in message or "inbox has been full" in message
            if schedule.overlap_ing:
                fill(s.actor(), 1, first=99)
            s.learner().pull()
            every = s._buffer.select(np.arange(s._buffer.window.stop), np.random.default_rng)
            rows = s._buffer.read([every], conduit.Endpoint(conduit.Tier.PAGEABLE))[0].arrays["id"]
            return sorted(rows.tolist()), len(timeouts)

    rows, timeouts = played(seed, scene)
    assert [row for row in rows if row != 99] == [*range(4), *range(10, 14), *range(20, 24)]
    assert timeouts > 0


@each_seed
def test_whoever_waits_behind_a_push_that_timed_out_in_line_goes_on(seed):
    def scene(clock):
        with store(ingestion=[slow(clock, "ingestion", 0.1)], batch_size=1, clock=clock) as s:
            actors, learner = [s.actor() for _ in range(3)], s.learner()
            fill(s.actor(), 1)

            def late(call):
                clock.sleep(0.05)
                return call()

            results = together(
                clock,
                lambda: actors[0].push(step(1)),
                lambda: actors[1].push(step(2), timeout_s=0.1),
                lambda: late(lambda: actors[2].push(step(3))),
                lambda: late(learner.pull),
            )
            assert max(at for _, at in results) < 1.0
            taken = [1 for result, _ in results[:3] if result == 1]
            assert all(result == 1 or isinstance(result, WaitTimeout) for result, _ in results[:3])
            assert len(s) == 1 + len(taken)

    played(seed, scene)


@each_seed
def test_an_iteration_is_advanced_after_a_push_that_timed_out_in_line(seed):
    def scene(clock):
        with store(rollout_unit=4, batch_size=2, ingestion=[slow(clock, "ingestion", 0.1)], clock=clock,
                   schedule=Schedule(g_ing=0.5)) as s:  # fmt: skip
            first, second = s.actor(lanes=2), s.actor(lanes=2)
            results = together(
                clock,
                lambda: first.push(step(0, 2)),
                lambda: patiently(lambda t: second.push(step(2, 2), timeout_s=t), 0.1),
            )
            assert [result for result, _ in results] == [2, 2]
            assert s.advance() == 1
            return clock.now()

    assert played(seed, scene) < 1.0


def test_an_actor_whose_close_timed_out_can_be_closed_again():
    def scene(clock):
        seen = []

        @conduit.register_ingestion(per="trajectory")
        def note(source, sink):
            clock.sleep(1.0)
            seen.extend(f.rows["id"].tolist() for f in source.read())
            sink.write(source.read())

        with store(ingestion=[note], clock=clock, timeout_s=0.1) as s:
            gone, other = s.actor(), s.actor()
            gone.push(step(0) | {"terminated": np.zeros(1, np.bool_)})

            def close() -> str:
                clock.sleep(0.5)
                with pytest.raises(WaitTimeout):
                    gone.close()
                clock.sleep(1.0)
                gone.close()
                with pytest.raises(ClosedError):
                    gone.push(step(1))
                return "closed"

            other_row = step(9) | {"terminated": np.ones(1, np.bool_)}
            results = together(clock, lambda: other.push(other_row), close)
            assert [result for result, _ in results] == [1, "closed"]
        return seen

    assert played(0, scene) == [[9], [0]]


# Pulls


@each_seed
@each_schedule
def test_threads_that_pull_from_one_learner_share_its_batches(schedule, seed):
    def batches(clock, threads: int, pulls: int) -> list:
        got: list[conduit.Batch] = []
        with store(batch_size=4, capacity=64, seed=3, clock=clock, schedule=schedule,
                   delivery=[slow(clock, "delivery", 0.01)]) as s:  # fmt: skip
            fill(s.actor(), 20)
            learner = s.learner()
            together(clock, *[lambda: [got.append(learner.pull()) for _ in range(pulls)]] * threads)
        assert sorted(batch.info.number for batch in got) == list(range(threads * pulls))
        return [fingerprint(batch) for batch in sorted(got, key=lambda batch: batch.info.number)]

    shared = played(seed, lambda clock: batches(clock, 3, 4))
    alone = played(seed, lambda clock: batches(clock, 1, 12))
    assert shared == alone


def test_a_thread_that_waits_for_anothers_pull_says_so():
    def scene(clock):
        with store(clock=clock) as s:
            learner = s.learner()

            def late() -> str:
                clock.sleep(1.0)
                with pytest.raises(WaitTimeout, match="another thread is pulling from this learner"):
                    learner.pull(timeout_s=1.0)
                fill(s.actor(), 4)
                return "said"

            (first, _), (second, at) = together(clock, lambda: learner.pull().info.number, late)
            assert (first, second, at) == (0, "said", 2.0)

    played(0, scene)


# Iterations


@each_seed
@each_schedule
def test_a_learner_that_pulls_while_iterations_pass_gets_all_of_the_one_that_stays(schedule, seed):
    def scene(clock):
        with store(rollout_unit=4, batch_size=2, clock=clock, timeout_s=5.0, schedule=schedule) as s:
            actor, learner, got = s.actor(lanes=2), s.learner(), []

            def learn() -> None:
                while True:
                    got.append(learner.pull(timeout_s=20.0))

            def act() -> float:
                for version in range(5):
                    for number in (4 * version, 4 * version + 2):
                        actor.push(step(number, 2), version=version)
                    if version < 4:
                        s.advance()
                clock.sleep(1.0)
                s.close()
                return clock.now()

            (learned, _), _ = together(clock, learn, act)
            assert isinstance(learned, ClosedError)
            for batch in got:
                assert len(set(batch.info.policy_version)) == 1
            last = [i for batch in got for i in ids(batch) if batch.info.policy_version[0] == 4]
            assert sorted(last) == [16, 17, 18, 19]

    played(seed, scene)


@each_seed
def test_of_two_threads_that_advance_one_does_and_the_other_is_refused(seed):
    def scene(clock):
        with store(rollout_unit=4, batch_size=2, clock=clock) as s:
            actor, learner = s.actor(lanes=2), s.learner()
            for iteration in range(3):
                fill(actor, 4, 4 * iteration)
                results = [result for result, _ in together(clock, s.advance, s.advance)]
                refused = [result for result in results if isinstance(result, UnitError)]
                assert len(refused) == 1
                assert s.version == iteration + 1
                assert s.version in results
                assert f"advance() before iteration {s.version} is whole" in str(refused[0])
            fill(actor, 4, 12)
            assert sorted(i for batch in learner for i in ids(batch)) == [12, 13, 14, 15]

    played(seed, scene)


@each_seed
@each_schedule
def test_a_learner_made_while_an_iteration_ends_begins_with_a_whole_one(schedule, seed):
    def scene(clock):
        with store(rollout_unit=4, batch_size=2, clock=clock, schedule=schedule) as s:
            actor = s.actor(lanes=2)
            fill(actor, 4)
            (learner, _), (version, _) = together(clock, s.learner, s.advance)
            assert version == 1
            fill(actor, 4, 4)
            assert sorted(i for batch in learner for i in ids(batch)) == [4, 5, 6, 7]

    played(seed, scene)


@pytest.mark.parametrize("settings", [{"rollout_unit": 8, "batch_size": 2}, {"capacity": 64}], ids=["on", "off"])
@each_seed
def test_ports_may_be_made_at_once(settings, seed):
    def scene(clock):
        with store(clock=clock, schedule=Schedule(overlap_del=True), **settings) as s:
            made = together(clock, *[lambda r=r: s.learner(r, 4) for r in range(4)], *[lambda: s.actor(lanes=2)] * 4)
            lanes = [lane for actor, _ in made[4:] for lane in actor._lanes.lanes]
            assert sorted(lanes) == list(range(8))
            for number, (actor, _) in enumerate(made[4:]):
                actor.push(step(2 * number, 2))
            assert sorted(learner.pull().info.number for learner, _ in made[:4]) == [0, 1, 2, 3]

    played(seed, scene)


# The first push


@each_seed
def test_of_two_first_pushes_that_differ_one_is_taken_and_the_other_refused(seed):
    def scene(clock):
        with store(clock=clock, ingestion=[slow(clock, "ingestion", 0.1)]) as s:
            rows = [step(0), {"other": np.zeros(1)}]
            results = together(clock, *(lambda r=r: s.actor().push(r) for r in rows))
            taken = [i for i, (result, _) in enumerate(results) if result == 1]
            assert len(taken) == 1
            assert isinstance(results[1 - taken[0]][0], conduit.errors.SchemaError)
            assert s.actor().push(rows[taken[0]]) == 1

    played(seed, scene)


# The ledger


def test_what_a_pull_ingests_or_waits_for_is_ingestions_and_not_deliverys():
    def scene(clock, schedule):
        with store(clock=clock, schedule=schedule, ingestion=[slow(clock, "ingestion", 0.125)], batch_size=1) as s:
            actor, learner = s.actor(), s.learner()
            actor.push(step(0))
            learner.pull()
            return s.ledger.total

    for schedule in (Schedule(g_ing=2), Schedule(overlap_ing=True)):
        total = played(0, lambda clock, schedule=schedule: scene(clock, schedule))
        assert total.ingestion.busy_s == pytest.approx(0.125)
        assert total.ingestion.exposed_s == pytest.approx(0.125), schedule
        assert total.delivery.exposed_s == total.starved_s == 0.0


@each_schedule
def test_waits_that_time_out_are_what_they_waited_for(schedule):
    def scene(clock):
        with store(rollout_unit=4, clock=clock, schedule=schedule) as s:
            actor = s.actor()
            with pytest.raises(WaitTimeout):
                s.learner().pull(timeout_s=0.25)
            with pytest.raises(WaitTimeout):
                actor.push(step(0), version=1, timeout_s=0.5)
            return s.ledger.total

    total = played(0, scene)
    assert (total.starved_s, total.blocked_s) == pytest.approx((0.25, 0.5))
    assert total.exposed_s == 0.0


def test_the_ledgers_wall_time_ends_with_the_store():
    def scene(clock):
        with store(clock=clock) as s:
            clock.sleep(1.0)
        clock.sleep(5.0)
        return s.ledger.total.wall_s

    assert played(0, scene) == pytest.approx(1.0)


# First come, first served


@each_seed
def test_an_actor_that_pushes_without_a_pause_does_not_shut_the_others_out(seed):
    def scene(clock):
        with store(capacity=64, ingestion=[slow(clock, "ingestion", 1.0)], clock=clock, timeout_s=60.0) as s:
            busy, other = s.actor(), s.actor()

            def push_on() -> None:
                for number in range(20):
                    busy.push(step(number))

            def push_once() -> int:
                clock.sleep(0.5)
                return other.push(step(100))

            _, (taken, done_s) = together(clock, push_on, push_once)
        assert taken == 1
        assert done_s <= 2.0, "after the push under way, and its own"

    played(seed, scene)


def test_a_sample_that_timed_out_and_is_asked_again_is_the_sample_it_would_have_been():
    def sampled(timeouts: int) -> list[int]:
        with store(capacity=64, seed=3) as s:
            actor = s.actor()
            fill(actor, 2)
            for _ in range(timeouts):
                with pytest.raises(WaitTimeout):
                    s.sample(4, timeout_s=0.0)
            fill(actor, 8, first=2)
            return ids(s.sample(4))

    assert sampled(0) == sampled(3)


def test_an_actor_that_ends_its_unit_after_the_iteration_was_ended_does_not_end_the_next():
    with store(rollout_unit=4, batch_size=2) as s:
        first, second = s.actor(lanes=2), s.actor(lanes=2)
        for actor in (first, second):
            actor.push(step(0, 2))
        s.advance()
        first.end_unit()  # late: its thread was overtaken by the trainer's
        for actor in (first, second):
            actor.push(step(4, 2))
            actor.end_unit()
        assert s.advance() == 2
