"""Stores whose schedule is chosen while they run: what they choose, that they follow, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import conduit
from conduit.clock import VirtualClock
from conduit.core.schedule import Mode
from conduit.core.scheduler import Scheduler
from conduit.errors import ScheduleError

WIDTH = 4


class Loop:
    """A trainer in virtual time: stages and hooks take as long as they say."""

    def __init__(self, clock: VirtualClock, ing_s: float = 0.003, del_s: float = 0.004, **settings: Any) -> None:
        self.clock = clock
        self.rollout_s, self.update_s = 0.010, 0.008
        self.ing_s, self.del_s = ing_s, del_s
        self.pushed = 0
        self.seen: list[tuple[int, int, list[int]]] = []

        @conduit.register_ingestion()
        def ingest(actor_in: Any, exp_out: Any) -> None:
            rows = actor_in.read()
            clock.sleep(self.ing_s * len(rows["id"]) / 2)
            exp_out.write(rows)

        @conduit.register_delivery()
        def deliver(exp_in: Any, learner_out: Any) -> None:
            clock.sleep(self.del_s)
            learner_out.write(exp_in.read())

        self.hooks: dict[str, Any] = {"ingestion": [ingest], "delivery": [deliver]}
        usual: dict[str, Any] = {"backend": "reference", "capacity": 64, "batch_size": 4, "seed": 5, "schedule": "auto"}
        self.store = conduit.Store(**{**usual, **settings}, **self.hooks, clock=clock)
        self.actor = self.store.actor(lanes=2)
        self.learner = self.store.learner(to="numpy")

    def push(self) -> None:
        self.clock.sleep(self.rollout_s)
        number = np.arange(self.pushed, self.pushed + 2)
        self.actor.push({"id": number, "obs": np.repeat(number[:, None], WIDTH, 1).astype(np.float32)})
        self.pushed += 2

    def pull(self) -> None:
        batch = self.learner.pull()
        data: Any = batch.data
        assert (data["obs"] == data["id"][:, None]).all()
        assert (data["id"] == batch.info.keys).all()
        self.seen.append((batch.info.number, batch.info.frontier, batch.info.keys.tolist()))
        self.clock.sleep(self.update_s)

    def turn(self, times: int = 1) -> float:
        """Seconds an iteration."""
        began_s = self.clock.now()
        for _ in range(times):
            self.push()
            self.pull()
        return (self.clock.now() - began_s) / times


def virtually(scene: Callable[[VirtualClock], None], seed: int = 0) -> None:
    clock = VirtualClock(seed)
    clock.run(lambda: scene(clock))


def filled(clock: VirtualClock, **settings: Any) -> Loop:
    loop = Loop(clock, **settings)
    for _ in range(4):
        loop.push()
    return loop


def test_operators_that_fit_behind_the_stages_end_up_there():
    def scene(clock: VirtualClock) -> None:
        loop = filled(clock)
        with loop.store:
            plain_s = loop.turn(2)
            assert plain_s == pytest.approx(0.025)
            loop.turn(400)
            assert (loop.store.schedule.overlap_ing, loop.store.schedule.overlap_del) == (True, True)
            assert loop.turn(32) == pytest.approx(0.018)
            told = loop.store.explain()
            assert told.choice is not None
            assert told.choice.schedule == loop.store.schedule
            assert told.choice.candidate.iteration_s == pytest.approx(0.018, rel=0.01)
            assert "Why" in str(told)

    virtually(scene)


def test_what_was_chosen_when_and_why_is_told_as_values():
    def scene(clock: VirtualClock) -> None:
        loop = filled(clock)
        with loop.store:
            assert loop.store.info()["schedules_chosen"] == 0
            loop.turn(300)
            told, info = loop.store.explain(), loop.store.info()
            assert info["schedules_chosen"] == 1
            assert info["schedule_status"].startswith("watching; next look at iteration")
            (event,) = told.history
            assert 0 < event.iteration < 300
            assert (event.event, event.schedule) == ("chosen", loop.store.schedule)
            assert str(event) in told.schedule

    virtually(scene)


def test_before_the_first_row_the_schedule_is_explained_all_the_same():
    with conduit.Store(backend="reference", capacity=64, batch_size=4, schedule="auto") as store:
        told = store.explain()
        assert (told.placement, told.plan, told.choice, told.history) == (None, None, None, ())
        assert "conduit.plan(…) answers for any size" in str(told)
        assert "Automatic schedule: waiting for the first iteration" in str(told)
    with conduit.Store(backend="reference", capacity=64, batch_size=4) as store:
        assert "schedule: ingestion in line, g=1; delivery in line, g=1; as it was given" in str(store.explain())
        assert (store.info()["schedule_status"], store.info()["schedules_chosen"]) == ("given", 0)


def test_where_there_is_nothing_to_hide_all_stays_in_line():
    def scene(clock: VirtualClock) -> None:
        loop = filled(clock, ing_s=0.0, del_s=0.0)
        with loop.store:
            loop.turn(100)
            assert loop.store.schedule == conduit.Schedule(False, 1, False, 1)
            assert loop.learner.staged == 0

    virtually(scene)


def test_a_run_whose_optimum_changes_half_way_is_followed():
    def scene(clock: VirtualClock) -> None:
        loop = filled(clock, del_s=0.0)
        with loop.store:
            loop.turn(400)
            first = loop.store.schedule
            assert (first.overlap_ing, first.delivery) == (True, Mode(False, 1))
            loop.ing_s, loop.del_s = 0.0, 0.006
            loop.turn(700)
            # Ingestion may stay where it is: there is nothing to gain any more, nor to lose.
            assert loop.store.schedule.overlap_del
            assert loop.turn(32) == pytest.approx(0.018)

    virtually(scene)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_drawn_follows_from_the_frontier_whatever_was_in_force(seed):
    """The same batches as from a store in line that saw the same rows."""
    played: list[Loop] = []

    def scene(clock: VirtualClock) -> None:
        loop = filled(clock)
        played.append(loop)
        with loop.store:
            loop.turn(300)

    virtually(scene, seed)
    (loop,) = played
    numbers = [number for number, _, _ in loop.seen]
    assert numbers == list(range(300))
    with conduit.Store(backend="reference", capacity=64, batch_size=4, seed=5) as other:
        actor, learner, pushed = other.actor(lanes=2), other.learner(to="numpy"), 0
        for number, frontier, keys in loop.seen:
            while pushed <= frontier:
                ids = np.arange(pushed, pushed + 2)
                actor.push({"id": ids, "obs": np.zeros((2, WIDTH), np.float32)})
                pushed += 2
            # Rows come two at a time, and a draw may have seen fewer than are there by now.
            if pushed == frontier + 1:
                batch = learner.pull()
                assert (batch.info.number, batch.info.keys.tolist()) == (number, keys)
            else:
                learner.pull()


def test_an_on_policy_loop_hides_what_its_scopes_allow_and_delivers_each_row_e_times():
    epochs, unit = 3, 8

    def scene(clock: VirtualClock) -> None:
        loop = Loop(clock, capacity=None, mode="on_policy", rollout_unit=unit, epochs=epochs)
        took_s = 0.0
        with loop.store:
            for iteration in range(80):
                began_s = clock.now()
                for _ in range(unit // 2):
                    loop.push()
                for _ in range(epochs * 2):
                    loop.pull()
                keys = [key for *_, keys in loop.seen for key in keys]
                assert sorted(keys) == sorted([*range(unit * iteration, unit * (iteration + 1))] * epochs)
                loop.seen.clear()
                loop.store.advance()
                took_s = clock.now() - began_s
            assert loop.store.schedule.overlap_del
            assert loop.store.schedule.overlap_ing
            # In line: 4 · 10 + 12 + 6 · (8 + 4) ms; half a unit's ingestion and the first delivery have nothing to hide behind.
            assert took_s == pytest.approx(0.040 + 0.006 + 0.004 + 6 * 0.008)

    virtually(scene)


@pytest.mark.parametrize("settings", [{"exact": True}, {"schedule": conduit.Auto(overlap_del=False, g_del=1)}])
def test_what_may_not_be_drawn_ahead_never_is(settings):
    def scene(clock: VirtualClock) -> None:
        loop = filled(clock, **settings)
        with loop.store:
            for _ in range(300):
                loop.turn()
                assert loop.store.schedule.delivery == Mode(False, 1)
                assert loop.learner.staged == 0
            assert loop.store.schedule.overlap_ing

    virtually(scene)


def test_no_batch_is_drawn_further_ahead_than_allowed():
    def scene(clock: VirtualClock) -> None:
        loop = filled(clock, schedule=conduit.Auto(batches_ahead=1))
        with loop.store:
            for _ in range(300):
                loop.push()
                batch = loop.learner.pull()
                assert batch.info.priority_lag <= 1
                clock.sleep(loop.update_s)
            assert loop.store.schedule.delivery == Mode(True, 1)

    virtually(scene)


def test_a_checkpoint_of_a_store_that_runs_ahead_goes_on_in_line_with_all_that_was_staged(tmp_path):
    def scene(clock: VirtualClock) -> None:
        loop = filled(clock)
        with loop.store:
            loop.turn(400)
            assert loop.store.schedule.overlap_del
            loop.store.save(tmp_path / "saved")
            staged = loop.learner.staged
            after = [loop.learner.pull() for _ in range(4)]
        with conduit.Store.restore(tmp_path / "saved", clock=clock, **loop.hooks) as again:
            assert not again.schedule.overlap_del
            learner = again.learner(to="numpy")
            assert learner.staged == staged >= 1
            for batch in after[:staged]:
                other = learner.pull()
                assert (other.info.number, other.info.keys.tolist()) == (batch.info.number, batch.info.keys.tolist())
            # What was asked for and not drawn is drawn at its pull.
            assert learner.pull().info.number == after[staged].info.number

    virtually(scene)


def test_a_restored_store_profiles_anew(tmp_path):
    with conduit.Store(backend="reference", capacity=64, batch_size=4, seed=5, schedule=conduit.Auto(g_ing=2)) as store:
        actor, learner = store.actor(lanes=2), store.learner(to="numpy")
        for number in range(0, 40, 2):
            actor.push({"id": np.arange(number, number + 2)})
        store._switchboard.apply(conduit.Schedule(True, 2, True, 1))
        taken = [learner.pull().info.keys.tolist() for _ in range(3)]
        store.save(tmp_path / "saved")
        after = [learner.pull().info.keys.tolist() for _ in range(2)]
    with conduit.Store.restore(tmp_path / "saved") as again:
        assert again.schedule == conduit.Schedule(False, 1, False, 1)
        learner = again.learner(to="numpy")
        first = learner.pull()
        assert (first.info.number, first.info.keys.tolist()) == (len(taken), after[0])
        assert again._settings.schedule == conduit.Auto(g_ing=2)


def test_a_cap_that_leaves_nothing_says_what_would_do():
    with pytest.raises(ScheduleError, match=r"Auto\(g_ing=0\.01\).*the least that would do is g_ing=0\.25"):
        conduit.Store(
            backend="reference",
            mode="on_policy",
            rollout_unit=8,
            batch_size=2,
            schedule=conduit.Auto(g_ing=0.01),
        )


def test_staged_batches_count_against_the_budget_of_the_memory_they_wait_in():
    def settings(rows: int, **more: Any) -> dict[str, Any]:
        size = (rows * 4) * WIDTH
        return {"backend": "reference", "capacity": 64, "batch_size": 4, "budgets": {"pageable": size}, **more}

    row = {"obs": np.zeros((2, WIDTH), np.float32)}
    with conduit.Store(**settings(64)) as store:
        store.learner()
        assert store.actor(lanes=2).push(row) == 2
    ahead = conduit.Schedule(overlap_del=True, g_del=2)
    with conduit.Store(**settings(64 + 11, schedule=ahead)) as store:
        store.learner()
        with pytest.raises(conduit.errors.CapacityError, match=r"3 batches of .* wait for each of 1 learners"):
            store.actor(lanes=2).push(row)
    with conduit.Store(**settings(64 + 12, schedule=ahead)) as store:
        store.learner()
        assert store.actor(lanes=2).push(row) == 2
    with conduit.Store(**settings(64 + 12, schedule="auto")) as store:
        store.learner()
        assert store.actor(lanes=2).push(row) == 2
        assert store._wiring.placer.staged_batches == 4


def test_a_learner_that_pulls_no_more_is_not_waited_for():
    """One that evaluates, say, in the midst of a group: it would follow with its next pull."""

    def scene(clock: VirtualClock) -> None:
        with conduit.Store(
            clock=clock,
            backend="reference",
            capacity=64,
            batch_size=4,
            schedule="auto",
            tables={"eval": conduit.Table()},
        ) as store:
            actor, learner, evaluates = store.actor(2), store.learner(), store.learner(table="eval")
            for number in range(900):
                clock.sleep(0.01)
                actor.push({"obs": np.full((2, 2), number, np.float32)})
                if number < 4:
                    continue
                learner.pull()
                clock.sleep(0.01)
                if number in (5, 6, 7):
                    evaluates.pull()
                if number == 20:
                    store._switchboard.apply(conduit.Schedule(False, 1, False, 8))
                if number in (40, 120):
                    assert (store._switchboard.in_force_since() is not None) is (number == 120)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "run", lambda self: None)
        clock = VirtualClock()
        clock.run(lambda: scene(clock))


@pytest.mark.parametrize(
    "table",
    [
        conduit.Table.queue(16),
        conduit.Table(conduit.Fifo(), max_times_sampled=1),
        conduit.Table(limiter=conduit.SampleToInsertRatio(1.0, 8, 8.0)),
    ],
    ids=lambda table: str(table.limiter),
)
def test_where_any_table_counts_draws_no_group_of_batches_is_drawn_at_once(table):
    with conduit.Store(backend="reference", capacity=64, batch_size=4, schedule="auto", tables={"x": table}) as store:
        assert {mode.g for mode in store._wiring.feasible.delivery} == {1}
        assert {mode.g for mode in store._wiring.feasible.ingestion} > {1}


def test_that_actors_and_learners_work_at_the_same_time_is_seen_by_their_threads():
    """An iteration takes as long as the slower side does, which delivery in line would lengthen."""

    def scene(clock: VirtualClock) -> None:
        loop = filled(clock, ing_s=0.001, del_s=0.004)
        with loop.store:
            loop.rollout_s, loop.update_s = 0.005, 0.010
            over: list[bool] = []

            def act() -> None:
                while not over:
                    loop.push()

            actors = clock.spawn(act, "actor")
            for _ in range(500):
                loop.pull()
            began_s = clock.now()
            for _ in range(32):
                loop.pull()
            took_s = (clock.now() - began_s) / 32
            over.append(True)
            assert actors.join()
            choice = loop.store.explain().choice
            assert choice is not None
            assert choice.times.concurrent
            assert "the slower path: they run concurrently" in str(choice)
            assert choice.plain is not None
            assert choice.plain.iteration_s == pytest.approx(0.014, rel=0.02)
            assert loop.store.schedule.overlap_del
            assert took_s == pytest.approx(0.010, rel=0.02)

    virtually(scene)
