"""Bounded mode: every row once, the oldest first, none too stale, and nothing goes unseen."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import conduit
from conduit import Fifo, Schedule, Table
from conduit.clock import VirtualClock
from conduit.errors import CapacityError, FreshnessError, ScheduleError, SettingError, WaitTimeout
from tests.store.rows import each_backend, fill, ids, no_thread_left, played, step, store, together

each_schedule = pytest.mark.parametrize(
    "schedule",
    [Schedule(), Schedule(g_ing=3), Schedule(overlap_ing=True), Schedule(overlap_ing=True, g_ing=2)],
    ids=["in line", "in groups", "behind", "behind in groups"],
)


def bounded(max_staleness: int = 1, capacity: int = 16, **more: Any) -> conduit.Store:
    return store(mode="bounded", capacity=capacity, max_staleness=max_staleness, **more)


def everything(s: conduit.Store) -> list[int]:
    """What is left, one by one; where nothing runs behind, nothing is waited for."""
    got: list[int] = []
    while True:
        try:
            got += ids(s.sample(1, timeout_s=0.3 if s.schedule.overlap_ing else 0.0))
        except WaitTimeout:
            return got


# Every row once, the oldest first


@each_backend
@each_schedule
def test_every_row_comes_once_and_the_oldest_first(backend, schedule):
    with no_thread_left(), bounded(backend=backend, schedule=schedule) as s:
        got: list[int] = []
        actor, learner = s.actor(2), s.learner()
        for first in range(0, 80, 8):
            fill(actor, 8, first)
            for _ in range(2):
                batch = learner.pull()
                assert batch.info.times_sampled is not None
                assert batch.info.times_sampled.tolist() == [1] * 4
                got += ids(batch)
        assert got == list(range(80))


def test_several_learners_and_samples_share_the_rows():
    with bounded() as s:
        actor, learners = s.actor(4), [s.learner(rank, 2) for rank in range(2)]
        fill(actor, 16)
        got = [*ids(learners[1].pull()), *ids(s.sample(3)), *ids(learners[0].pull()), *ids(learners[1].pull())]
        assert got == list(range(15))
        with pytest.raises(WaitTimeout):
            learners[0].pull(timeout_s=0.0)
        assert everything(s) == [15]


def test_a_push_waits_while_capacity_rows_do_and_overwrites_none():
    with bounded(capacity=8) as s:
        actor, learner = s.actor(2), s.learner()
        fill(actor, 8)
        assert not s.can_insert()
        with pytest.raises(
            WaitTimeout,
            match=r"mode='bounded' with capacity=8 holds a push of 2 rows; .*draw 2 more entries, 1 batch of 4",
        ):
            actor.push(step(8, 2), timeout_s=0.0)
        assert ids(learner.pull()) == [0, 1, 2, 3]
        fill(actor, 4, 8)
        assert everything(s) == list(range(4, 12))


def test_real_threads_share_every_row_exactly_once():
    many, out, lock = 400, [], threading.Lock()
    with no_thread_left(), bounded(10**6, 32, timeout_s=20.0, schedule=Schedule(overlap_ing=True)) as s:

        def act(place: int) -> None:
            actor = s.actor()
            for number in range(many):
                actor.push(step(place * many + number))

        def learn(rank: int) -> None:
            learner = s.learner(rank, 2)
            for _ in range(many // 4):
                batch = learner.pull()
                with lock:
                    out.append(batch)

        works = [(act, 0), (act, 1), (learn, 0), (learn, 1)]
        threads = [threading.Thread(target=work, args=(place,)) for work, place in works]
        for thread in threads:
            thread.start()
        for _ in range(20):
            s.advance()
        for thread in threads:
            thread.join(20)
        assert sorted(number for batch in out for number in ids(batch)) == list(range(2 * many))
        keys = sorted(out, key=lambda batch: batch.info.keys[0])
        assert np.concatenate([batch.info.keys for batch in keys]).tolist() == list(range(2 * many))


# Staleness


def test_rows_of_the_wrong_version_are_refused_and_change_nothing():
    with bounded(max_staleness=1) as s:
        actor = s.actor(2)
        with pytest.raises(FreshnessError, match="rows of policy version 1 were pushed while the version is 0"):
            actor.push(step(0, 2), version=1)
        for _ in range(3):
            s.advance()
        for version in (-1, 0, 1, 4, 100):
            with pytest.raises(
                FreshnessError, match=rf"rows of policy version {version} .* is 3 .* expected versions 2 to 3"
            ):
                actor.push(step(0, 2), version=version)
        for odd in (1.0, True, "2"):
            with pytest.raises(FreshnessError, match="expected a whole number"):
                actor.push(step(0, 2), version=odd)  # type: ignore[arg-type]
        for version in (2, 3, None, np.int64(3)):
            actor.push(step(0, 2), version=version)  # type: ignore[arg-type]
        assert s.learner().pull().info.policy_version.tolist() == [2, 2, 3, 3]
        assert s.sample(4).info.policy_version.tolist() == [3] * 4


@each_schedule
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_what_is_too_stale_when_the_version_is_counted_is_counted_and_never_delivered(schedule, max_staleness):
    """Also what is gathered for a group, or still being ingested."""
    with no_thread_left(), bounded(max_staleness, 64, schedule=schedule) as s:
        actor, got = s.actor(), []
        for version in range(6):
            fill(actor, 5, 5 * version)
            if version < 5:
                assert s.advance() == version + 1
        got = everything(s)
        assert got == list(range(5 * (5 - max_staleness), 30))
        assert s.info()["stale_rows"] == 30 - len(got)
        assert len(s) == 30


def test_with_no_staleness_a_batch_is_of_the_running_version_only():
    with bounded(max_staleness=0) as s:
        actor, learner = s.actor(3), s.learner()
        for version in range(5):
            fill(actor, 6, 10 * version)
            batch = learner.pull()
            assert ids(batch) == [10 * version + place for place in range(4)]
            assert batch.info.policy_version.tolist() == [version] * 4
            s.advance()
            with pytest.raises(WaitTimeout):
                learner.pull(timeout_s=0.0)
        assert s.info()["stale_rows"] == 10


@each_schedule
def test_stale_rows_leave_their_places_to_others_at_once(schedule):
    with no_thread_left(), bounded(max_staleness=0, capacity=8, schedule=schedule) as s:
        actor, learner = s.actor(4), s.learner()
        for version in range(4):
            fill(actor, 8, 100 * version)
            assert not s.can_insert()
            s.advance()
            assert s.info()["drawable_rows"] == 0
            assert s.can_insert(5)
        for number in range(4):
            fill(actor, 8, 1000 + 8 * number)
            assert ids(learner.pull()) + ids(learner.pull()) == list(range(1000 + 8 * number, 1008 + 8 * number))
        assert s.info()["stale_rows"] == 32
        assert s.info()["tables"]["main"]["inserted"] == s.info()["tables"]["main"]["sampled"] == 32


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("version", [None, 0])
def test_a_push_that_becomes_too_old_while_it_waits_ends_then_and_is_counted_as_stale(seed, version):
    def scene(clock: VirtualClock):
        with bounded(max_staleness=1, capacity=8, clock=clock, timeout_s=100.0) as s:
            actor = s.actor(4)
            fill(actor, 8)

            late = s.actor()

            def push():
                return late.push(step(8), version=version)

            def advance():
                for _ in range(2):
                    clock.sleep(1.0)
                    s.advance()
                    # So that it has no place by the stale rows' leaving.
                    fill(actor, 8, 100 * s.version) if s.can_insert(8) else None

            (taken, at), (failed, _) = together(clock, push, advance)
            assert (taken, at, failed) == (0, 2.0, None)
            assert s.info()["stale_rows"] == 8 + 1
            assert s.info()["dropped_rows"] == 0
            assert 8 not in everything(s)
            # It was right at the call, so its actor goes on; what isn't is refused.
            assert late.push(step(9)) == 1
            with pytest.raises(FreshnessError, match="rows of policy version 0 were pushed while the version is 2"):
                late.push(step(10), version=0)
            assert everything(s) == [9]

    played(seed, scene)


@each_schedule
@pytest.mark.parametrize("seed", range(3))
def test_the_plain_loop_of_actors_that_are_faster_than_the_learner_goes_on(seed, schedule):
    def scene(clock: VirtualClock):
        with bounded(max_staleness=2, capacity=64, schedule=schedule, clock=clock, timeout_s=100.0) as s:
            learner, over = s.learner(), threading.Event()
            taken, left_out, got = [], [], []

            def act(first: int):
                actor = s.actor(16)
                for number in range(first, first + 10_000, 16):
                    if over.is_set():
                        return
                    (taken if actor.push(step(number, 16)) else left_out).extend(range(number, number + 16))

            def learn():
                for number in range(40):
                    clock.sleep(1.0)
                    batch = learner.pull()
                    assert batch.info.version_lag.max() <= 2
                    got.extend(ids(batch))
                    if number % 2:
                        s.advance()
                over.set()
                # Whoever waits by now goes stale.
                for _ in range(3):
                    s.advance()

            outcomes = together(clock, lambda: act(0), lambda: act(10_000), learn)
            assert [outcome for outcome, _ in outcomes] == [None] * 3
            assert left_out, "none waited until it was stale: this shows nothing"
            assert len(set(got)) == len(got) == 160
            assert not set(got) & set(left_out)
            assert s.info()["stale_rows"] == len(left_out) + len(taken) - len(got) - len(everything(s))

    played(seed, scene)


@pytest.mark.parametrize("seed", range(5))
def test_what_follows_a_row_that_went_stale_while_it_waited_is_not_its_predecessors_next(seed):
    def scene(clock: VirtualClock):
        derive = {"next_obs": conduit.Next("obs")}
        with bounded(max_staleness=1, capacity=8, derive=derive, batch_size=1, clock=clock, timeout_s=100.0) as s:
            actor = s.actor()
            fill(s.actor(), 6)
            s.advance()
            fill(actor, 2, 100)

            def advance():
                clock.sleep(1.0)
                s.advance()

            (taken, _), _ = together(clock, lambda: actor.push(step(102), version=0), advance)
            assert taken == 0
            fill(actor, 2, 103)
            got = everything(s)
            assert got == [100, 103]

    played(seed, scene)


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(g_ing=3)], ids=["in line", "in groups"])
def test_a_batch_says_how_far_its_rows_were_behind_when_it_was_drawn(schedule):
    with bounded(max_staleness=3, capacity=32, schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()
        for version in range(4):
            fill(actor, 2, 2 * version)
            if version < 3:
                s.advance()
        first, second = learner.pull().info, s.sample(4).info
        s.advance()
        assert first.version_lag.tolist() == [3, 3, 2, 2]
        assert second.version_lag.tolist() == [1, 1, 0, 0]
        assert (first.store_version, first.policy_version.tolist()) == (3, [0, 0, 1, 1])


@pytest.mark.parametrize("seed", range(10))
def test_what_is_let_in_after_a_wait_has_the_version_of_its_call(seed):
    """The policy that acted is no newer than when the rows were pushed."""

    def scene(clock: VirtualClock):
        with bounded(max_staleness=2, capacity=4, clock=clock, timeout_s=100.0) as s:
            fill(s.actor(), 4)

            def learn():
                learner = s.learner()
                clock.sleep(1.0)
                s.advance()
                return learner.pull()

            (taken, _), (_, _) = together(clock, lambda: s.actor().push(step(4)), learn)
            assert taken == 1
            assert s.sample(1).info.policy_version.tolist() == [0]

    played(seed, scene)


# All that can happen in one thread, beside a model


@dataclass
class Model:
    """A queue of (number, version) in a ring, with None in the place of what was drawn or has become stale behind others."""

    capacity: int
    most: int
    g_ing: int
    version: int = 0
    stale: int = 0
    lost: int = 0
    rows: list[tuple[int, int] | None] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    """Rows of each push that waits for others of its group: the last ones."""

    def push(self, numbers: list[int], version: int) -> str:
        if not 0 <= self.version - version <= self.most:
            return "FreshnessError"
        # While draws lack rows and none is on its way, there is no other way.
        if len(self.rows) + len(numbers) > self.capacity and (self.gathered or len(self.fresh()) >= 4):
            return "WaitTimeout"
        self.rows += [(number, version) for number in numbers]
        self.gathered.append(len(numbers))
        if len(self.gathered) == self.g_ing:
            self.publish()
        return ""

    def fresh(self) -> list[tuple[int, int]]:
        return [row for row in self.rows[: len(self.rows) - sum(self.gathered)] if row is not None]

    def publish(self) -> None:
        self.gathered = []
        while len(self.rows) > self.capacity:
            self.lost += self.rows.pop(0) is not None
        self._close_up()

    def draw(self, count: int) -> list[tuple[int, int]] | None:
        if len(self.fresh()) < count:
            self.publish()
        found = self.fresh()[:count]
        if len(found) < count:
            return None
        for row in found:
            self.rows[self.rows.index(row)] = None
        self._close_up()
        return found

    def advance(self) -> None:
        self.publish()
        self.version += 1
        for place, row in enumerate(self.rows):
            if row is not None and self.version - row[1] > self.most:
                self.rows[place] = None
                self.stale += 1
        self._close_up()

    def _close_up(self) -> None:
        while self.rows and self.rows[0] is None:
            del self.rows[0]


@pytest.mark.parametrize("g_ing", [1, 3])
@pytest.mark.parametrize("seed", range(25))
def test_it_does_what_a_plain_queue_does(seed, g_ing):
    r = random.Random(seed)
    model = Model(r.choice([8, 12]), r.choice([0, 1, 2]), g_ing)
    got: list[int] = []
    with bounded(model.most, model.capacity, schedule=Schedule(g_ing=g_ing), timeout_s=0.0) as s:
        actors, learner, number = {lanes: s.actor(lanes) for lanes in (1, 2, 5)}, s.learner(), 0
        for _ in range(200):
            act = r.choice(["push", "push", "push", "pull", "sample", "advance" if r.random() < 0.3 else "pull"])
            if act == "push":
                lanes, version = r.choice([1, 2, 5]), model.version - r.choice([0, 0, 1, 2, 3, -1])
                expected = model.push(list(range(number, number + lanes)), version)
                try:
                    assert actors[lanes].push(step(number, lanes), version=version) == lanes
                    assert not expected
                    number += lanes
                except (FreshnessError, WaitTimeout) as error:
                    assert type(error).__name__ == expected  # noqa: PT017
            elif act == "advance":
                model.advance()
                assert s.advance() == model.version
            else:
                rows = 4 if act == "pull" else r.choice([1, 3])
                expected_rows = model.draw(rows)
                try:
                    batch = learner.pull() if act == "pull" else s.sample(rows)
                except WaitTimeout:
                    assert expected_rows is None
                    continue
                versions = batch.info.policy_version.tolist()
                assert list(zip(ids(batch), versions, strict=True)) == expected_rows
                got += ids(batch)
            assert s.info()["stale_rows"] == model.stale
        left = everything(s)
        model.publish()
        assert left == [row[0] for row in model.rows if row]
        # AReaL#1481: nothing is dropped silently.
        assert s.info()["tables"]["main"]["lost_rows"] == model.lost
        assert number == len(got) + len(left) + model.stale + model.lost
        assert s.info()["dropped_rows"] == 0


def test_whole_groups_come_once_and_take_no_place_for_good():
    """All answers to one prompt together, of which only the first row starts an entry of a batch."""
    item = conduit.Group(size=4, by="prompt")
    with bounded(max_staleness=5, capacity=16, item=item, batch_size=1, timeout_s=1.0) as s:
        actor, learner = s.actor(), s.learner()
        for prompt in range(20):
            for answer in range(4):
                actor.push({"prompt": np.array([prompt]), "answer": np.array([answer])})
            batch = learner.pull()
            assert np.asarray(batch.data["prompt"]).reshape(-1).tolist() == [prompt] * 4
            assert np.asarray(batch.data["answer"]).reshape(-1).tolist() == [0, 1, 2, 3]
        assert s.info()["stale_rows"] == 0


# Checkpoints


@pytest.mark.parametrize("lanes", ["cut", "continue"])
@each_schedule
def test_after_a_restore_the_bound_is_the_same(tmp_path, schedule, lanes):
    """AReaL#1388: there it inflated."""
    with bounded(max_staleness=1, capacity=16, schedule=schedule) as s:
        actor = s.actor(2)
        for version in range(4):
            fill(actor, 4, 4 * version)
            if version < 3:
                s.advance()
        s.save(tmp_path / "checkpoint")
        stale = s.info()["stale_rows"]
    with conduit.Store.restore(tmp_path / "checkpoint", lanes=lanes, timeout_s=1.0) as s:
        assert s.version == 3
        assert s.info()["stale_rows"] == stale == 8
        actor = s.actor(2)
        for version in (1, 4):
            with pytest.raises(FreshnessError, match="is 3 and max_staleness is 1; expected versions 2 to 3"):
                actor.push(step(16, 2), version=version)
        fill(actor, 8, 16)
        # As many as there were places before it.
        assert not s.can_insert()
        s.advance()
        assert s.info()["stale_rows"] == 12
        assert s.can_insert(4)
        assert everything(s) == list(range(12, 24))


# What can't be


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"max_staleness": None}, SettingError, r"mode='bounded' needs capacity=.* and max_staleness="),
        ({"capacity": None}, SettingError, r"mode='bounded' needs capacity="),
        ({"max_staleness": -1}, SettingError, "max_staleness=-1: expected a whole number of at least 0"),
        ({"max_staleness": 1.5}, SettingError, "max_staleness=1.5: expected a whole number"),
        ({"max_staleness": True}, SettingError, "max_staleness=True: expected a whole number"),
        ({"capacity": 3}, CapacityError, "capacity=3 is below batch_size=4"),
        ({"sampler": Fifo()}, SettingError, "sampler: off-policy settings; mode='bounded' takes"),
        ({"remover": Fifo()}, SettingError, "remover: off-policy settings"),
        ({"max_times_sampled": 1}, SettingError, "max_times_sampled: off-policy settings"),
        ({"tables": {"more": Table()}}, SettingError, "tables: off-policy settings"),
        ({"exact": True}, SettingError, "exact: off-policy settings"),
        ({"epochs": 2}, SettingError, "epochs: on-policy settings"),
        ({"rollout_unit": 8}, SettingError, "rollout_unit: on-policy settings"),
        ({"schedule": Schedule(overlap_del=True)}, ScheduleError, "draws every batch at its pull"),
        ({"schedule": Schedule(g_del=2)}, ScheduleError, "allows overlap_del=False and g_del=1"),
        ({"schedule": Schedule(g_ing=0.5)}, ScheduleError, "g_ing=0.5"),
    ],
)
def test_what_bounded_mode_has_no_use_for_is_refused(settings, error, said):
    with no_thread_left(), pytest.raises(error, match=said):
        store(**{"mode": "bounded", "capacity": 16, "max_staleness": 1, **settings})


@pytest.mark.parametrize("mode", ["off_policy", "on_policy"])
def test_max_staleness_is_of_bounded_mode(mode):
    settings: dict[str, Any] = {"rollout_unit": 8} if mode == "on_policy" else {"capacity": 8}
    with pytest.raises(SettingError, match="max_staleness: settings of mode='bounded'"):
        store(mode=mode, max_staleness=1, **settings)


def test_a_push_larger_than_there_is_ever_room_for_beside_a_batch_is_refused():
    with bounded(capacity=8) as s:
        with pytest.raises(
            SettingError, match=r"capacity=8: a push of 6 rows and a batch of 4 entries .* a capacity of at least 9"
        ):
            s.actor(6).push(step(0, 6))
        assert s.actor(5).push(step(0, 5)) == 5


def test_preloading_is_refused_since_it_would_lose_rows():
    with (
        bounded() as s,
        pytest.raises(SettingError, match="mode='bounded' has none to lift"),
        s.preloading(),
    ):
        pytest.fail("it was not refused")
