"""Where a lane stops for good: actors that leave, pushes that were dropped, whatever the schedule."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

import conduit
from conduit import NStep, Schedule, Sequence
from conduit.clock import VirtualClock
from conduit.errors import WaitTimeout
from tests.links.reference import CUT, OPEN, TERMINATED, TRUNCATED, Leaves, Stack
from tests.links.reference import Next as NextRule
from tests.links.reference import NStep as NStepRule
from tests.links.reference import Sequence as SequenceRule
from tests.links.reference import Trajectory as TrajectoryRule
from tests.links.rows import NEXT, column, entries, linked, lived
from tests.links.twin import Twin
from tests.store.rows import host, played
from tests.store.test_same_rows import SCHEDULES


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "derive", [{"next_obs": NextRule("obs")}, {"obs": Stack("obs", 2), "n": NextRule("obs")}], ids=str
)
def test_actors_that_come_and_go_cut_the_same_lanes_under_every_schedule(schedule, derive):
    def scene(clock: VirtualClock) -> None:
        with Twin(NStepRule(2), derive, 24, schedule=schedule, clock=clock) as twin:
            stays, leaves = twin.open(2), twin.open(1)
            for number in range(45):
                twin.push(stays, [TRUNCATED if number % 5 == 4 else OPEN, OPEN], with_final=True)
                twin.push(leaves, [OPEN])
                if number % 7 == 6:
                    twin.close(leaves)
                    leaves = twin.open(1)
            twin.close(stays)
            twin.close(leaves)
            make_visible(twin.store)
            assert len(twin.starts) < 24
            twin.check()

    played(1, scene)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_episodes_that_end_within_a_group_of_pushes_are_told_apart_under_every_schedule(schedule):
    """The store's only lane, and then a second one, in steps and in trajectories: several ends in one group."""

    def scene(clock: VirtualClock) -> None:
        with Twin(NStepRule(2), {"next_obs": NextRule("obs")}, 30, schedule=schedule, clock=clock) as twin:
            one = twin.open(1)
            for number in range(50):
                twin.push(one, [TERMINATED if number % 2 or number % 5 == 0 else OPEN])
            other = twin.open(1)
            for number in range(12):
                twin.push_trajectory(
                    one, 0, 1 + number % 3, TRUNCATED if number % 4 else OPEN, with_final=number % 3 > 0
                )
                twin.push(other, [TERMINATED if number % 3 else OPEN])
            twin.close(one)
            make_visible(twin.store)
            twin.check()

    played(1, scene)


def at_random(twin: Twin, seed: int) -> None:
    """Pushes of all sorts; whatever the schedule groups, the last thing that happens is a lane that is cut."""
    chance = random.Random(seed)
    actors = [twin.open(lanes) for lanes in (1, 3)]
    for _ in range(60):
        place = chance.randrange(2)
        actor = actors[place]
        lanes = twin.actors[actor].lanes
        what = chance.random()
        if what < 0.1:
            twin.close(actor)
            actors[place] = twin.open(chance.choice((1, 2, 3)))
        elif what < 0.5:
            end = chance.choice((OPEN, TERMINATED, TRUNCATED, CUT))
            length = chance.choice((1, 1, 2, 4))
            twin.push_trajectory(actor, chance.randrange(lanes), length, end, with_final=chance.random() < 0.5)
        else:
            ends = chance.choices((OPEN, TERMINATED, TRUNCATED, None), (6, 2, 3, 2), k=lanes)
            twin.push(actor, ends, with_final=chance.random() < 0.5)
    for actor in [*actors, twin.open(1)]:
        twin.push(actor, [OPEN] * twin.actors[actor].lanes)
        twin.close(actor)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("g_ing", [1, 2, 3, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_pushes_of_all_sorts_may_make_one_group(g_ing, overlap, seed):
    schedule = Schedule(overlap_ing=overlap, g_ing=g_ing)
    derive = {"next_obs": NextRule("obs")} if seed % 2 else {"obs": Stack("obs", 3), "next_obs": NextRule("obs")}
    item = (NStepRule(2), SequenceRule(2, burn_in=1, pad="zero"), TrajectoryRule())[seed % 3]

    def scene(clock: VirtualClock) -> None:
        with Twin(item, derive, 17 + seed, schedule=schedule, clock=clock) as twin:
            at_random(twin, seed)
            make_visible(twin.store)
            twin.check()

    played(seed, scene)


@conduit.register_ingestion(per="trajectory")
def untouched(source, sink):
    sink.write(source.read())


class FragmentTwin(Twin):
    """A store whose ingestion works on whole episodes: it has their rows when they have ended, one episode after the other."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, ingestion=[untouched], **settings)
        self._waiting: dict[Any, list[tuple]] = {}

    def _append(self, lane: Any, row: Leaves, end: str, with_final: bool, settings: dict[str, Any]) -> None:
        self._waiting.setdefault(lane, []).append((row, end, with_final, settings))
        if end != OPEN:
            for waited in self._waiting.pop(lane):
                super()._append(lane, *waited)

    def _cut(self, lanes: list[Any]) -> None:
        for lane in lanes:
            for waited in self._waiting.pop(lane, []):
                super()._append(lane, *waited)
        super()._cut(lanes)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("g_ing", [1, 4])
def test_episodes_that_a_hook_worked_on_are_linked_as_they_are_stored(g_ing, seed):
    item = (NStepRule(2), SequenceRule(2, burn_in=1, pad="zero"), TrajectoryRule())[seed % 3]
    derive = {"obs": Stack("obs", 3), "next_obs": NextRule("obs")}

    def scene(clock: VirtualClock) -> None:
        with FragmentTwin(item, derive, 17 + seed, schedule=Schedule(g_ing=g_ing), clock=clock) as twin:
            at_random(twin, seed)
            make_visible(twin.store)
            twin.check()

    played(seed, scene)


def make_visible(s: conduit.Store) -> None:
    """All that was pushed, and each cut: it becomes visible for whoever waits for more than there is."""
    with pytest.raises(WaitTimeout):
        s.sample(s.info()["capacity"], timeout_s=0.3)


class Held:
    """An ingestion hook that waits for leave to go on."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def hook(self):
        @conduit.register_ingestion()
        def held(source, sink):
            self.entered.set()
            assert self.opened.wait(10)
            sink.write(source.read())

        return held


def test_a_dropped_push_cuts_its_lanes():
    held, behind = Held(), Schedule(overlap_ing=True)
    settings = {"ingestion": [held.hook()], "schedule": behind, "inbox_units": 2, "when_full": "drop"}
    with linked(derive=NEXT, item=Sequence(1), **settings) as s:
        actor, other = s.actor(), s.actor()
        lived(actor, 0, 1)
        assert held.entered.wait(5)
        lived(other, 10, 1)
        lived(actor, 1, 1)
        dropped = s.info()["dropped_rows"]
        lived(actor, 2, 1)
        assert s.info()["dropped_rows"] == dropped + 1
        held.opened.set()
        make_visible(s)
        for pusher, number in ((actor, 3), (other, 11), (actor, 4)):
            lived(pusher, number, 1)
            make_visible(s)
        assert s.info()["dropped_rows"] == dropped + 1
        drawn = {entry["id"][0]: entry["next_obs"][0] for entry in entries(s).values()}
        # Before row 3 there was a row that was dropped: the one before that has no next, for good.
        assert drawn == {3: 40, 10: 110} | ({} if dropped else {0: 10})


def test_an_actor_closed_twice_or_with_ended_lanes_cuts_nothing_more():
    with linked(derive=NEXT) as s:
        actor, other = s.actor(lanes=2), s.actor()
        lived(actor, 0, 2, "terminated", lane=0)
        lived(actor, 2, 2, lane=1)
        lived(other, 4, 1)
        actor.close()
        actor.close()
        lived(other, 5, 1)
        assert column(entries(s), "next_obs") == {0: 10, 1: 10, 2: 30, 4: 50}


def test_hundreds_of_actors_come_and_go():
    with Twin(NStepRule(2), {"next_obs": NextRule("obs")}, 60) as twin:
        for number in range(300):
            actor = twin.open(1 + number % 3)
            lanes = range(twin.actors[actor].lanes)
            for step in range(1 + number % 4):
                twin.push(actor, [TERMINATED if step == 2 and lane == number % 2 else OPEN for lane in lanes])
            if number % 5:
                twin.close(actor)
            twin.check_count()
            if number % 20 == 0:
                twin.check()
        for actor in range(0, 300, 10):
            twin.push(actor, [OPEN] * twin.actors[actor].lanes)
        twin.check()


def test_an_actor_that_never_pushed_may_leave():
    with linked(derive=NEXT, item=NStep(2, gamma=1.0)) as s:
        s.actor(lanes=3).close()
        actor = s.actor()
        lived(actor, 0, 4)
        assert sorted(entries(s)) == [0, 1]


def test_a_lane_whose_newest_row_is_evicted_goes_on_or_is_cut():
    with Twin(NStepRule(2), {"next_obs": NextRule("obs")}, 6) as twin:
        rare, busy, other = twin.open(1), twin.open(2), twin.open(1)
        twin.push(rare, [OPEN])
        twin.push(other, [OPEN])
        for _ in range(5):
            twin.push(busy, [OPEN, TERMINATED])
            twin.check()
        twin.close(other)
        twin.check()
        # Its episode began with a row that is gone: what comes is at place 1.
        twin.push(rare, [OPEN])
        twin.push(rare, [TERMINATED])
        twin.check()


@pytest.mark.parametrize("item", [NStepRule(3), NStepRule(range(1, 3))], ids=str)
def test_finals_are_kept_as_long_as_their_rows(item):
    """Many more finals than rows of the ring come by, some rows of which stay for long."""
    with Twin(item, {"next_obs": NextRule("obs")}, 9) as twin:
        actor = twin.open(3)
        for number in range(120):
            ends = [TRUNCATED if (number * (lane + 2)) % 3 else OPEN for lane in range(3)]
            twin.push(actor, ends, with_final=number % 4 != 0)
            twin.check()


@pytest.mark.parametrize(
    ("backend", "placement"),
    [("reference", "auto"), ("reference", "device:1"), ("torch", "device:0"), ("jax", "device:0"), ("jax", "auto")],
)
def test_finals_survive_as_more_and_more_of_them_are_kept(backend, placement):
    """Few episodes end, then nearly every row ends one, then few again: hundreds of finals are live at once."""
    with Twin(NStepRule(3), {"next_obs": NextRule("obs")}, 400, backend=backend, placement=placement) as twin:
        actor = twin.open(4)
        for number in range(400):
            often = 2 if 100 < number < 300 else 13
            ends = [TERMINATED if (number + lane) % often == 0 else OPEN for lane in range(4)]
            twin.push(actor, ends, with_final=number % 17 > 0)
            if number % 40 == 39:
                twin.check()


@pytest.mark.parametrize("backend", ["reference", "torch", "jax"])
def test_staged_batches_keep_their_finals_while_the_memory_of_finals_grows(backend):
    schedule = Schedule(overlap_del=True, g_del=2)
    with linked(
        backend=backend, placement="device:0", capacity=300, batch_size=32, derive=NEXT, schedule=schedule
    ) as s:
        actor, learner = s.actor(), s.learner()
        batches = []
        for number in range(600):
            lived(actor, number, 1, "truncated", -number)
            if number > 40 and number % 8 == 0:
                batches.append(learner.pull())
        for batch in batches:
            assert host(batch.data["next_obs"]).tolist() == (-batch.info.keys.astype(float)).tolist()


def test_finals_need_no_more_memory_than_the_rows_they_belong_to():
    with linked(capacity=300, derive=NEXT) as s:
        actor = s.actor(lanes=4)
        sizes = []
        for number in range(400):
            rows = {"obs": np.full((4, 100), number, np.float32), "truncated": np.ones(4, bool)}
            actor.push(rows, final={"obs": np.full((4, 100), -number, np.float32)})
            sizes.append(sum(s.info()["bytes_by_endpoint"].values()))
        assert sizes[-1] == sizes[100] <= 2 * 300 * (400 + 1 + 400)
        batch = s.sample(300, to="numpy")
        assert (batch.data["next_obs"] == -batch.data["obs"]).all()
