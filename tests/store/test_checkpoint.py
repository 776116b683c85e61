"""What of a store comes back from a checkpoint, and what a checkpoint costs on disk."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import ml_dtypes
import numpy as np
import optree
import pytest

import conduit
from conduit.clock import VirtualClock
from conduit.core.archive import Archive
from conduit.core.hook import Hook
from conduit.errors import CheckpointWarning, SchemaError, SettingError, WaitTimeout
from tests.store.plays import obs_of, places, printed
from tests.store.rows import (
    BACKENDS,
    EVERYWHERE,
    assert_intact,
    each_backend,
    ends,
    fill,
    fingerprint,
    host,
    ids,
    no_thread_left,
    played,
    step,
    store,
    together,
)

ROOT = Path(__file__).parent.parent.parent
restore = conduit.Store.restore


def saved_size(path: Path) -> int:
    return sum(entry.stat().st_size for entry in path.iterdir())


def live_ids(s: conduit.Store) -> list[int]:
    return s.read().data["id"].tolist()


# Batches


@pytest.mark.parametrize("g_del", [1, 3])
def test_batches_that_were_staged_are_pulled_first(tmp_path, g_del):
    # pytorch/rl#4089: a restore skipped them.
    def scene(clock):
        with store(clock=clock, schedule=conduit.Schedule(overlap_del=True, g_del=g_del)) as one:
            fill(one.actor(), 20)
            learner = one.learner()
            learner.pull()
            while learner.staged < g_del:
                clock.sleep(0.01)
            one.save(tmp_path / "c")
            with restore(tmp_path / "c", clock=clock) as other:
                again = other.learner()
                staged = again.staged
                assert other.info()["staged_batches"] == {0: staged}
                for _ in range(2 * g_del + 2):
                    assert printed(again.pull()) == printed(learner.pull())
                return staged

    assert played(1, scene) >= g_del


def test_a_batch_that_was_asked_for_and_lacked_rows_is_asked_for_again(tmp_path):
    def scene(clock):
        with store(clock=clock, schedule=conduit.Schedule(overlap_del=True)) as one:
            actor, learner = one.actor(), one.learner()
            fill(actor, 2)
            with pytest.raises(WaitTimeout):
                learner.pull(timeout_s=0.1)
            one.save(tmp_path / "c")
            with restore(tmp_path / "c", clock=clock, lanes="continue") as other:
                actor_again, again = other.actor(), other.learner()
                for each in (actor, actor_again):
                    fill(each, 6, first=2)
                # Drawn as soon as there were rows, not at the pull.
                assert learner.pull().info.frontier == again.pull().info.frontier == 3

    played(2, scene)


def test_samples_go_on_being_numbered(tmp_path):
    with store() as one:
        fill(one.actor(), 20)
        for _ in range(3):
            one.sample(4)
        one.save(tmp_path / "c")
        with restore(tmp_path / "c") as other:
            again, there = other.sample(5), one.sample(5)
            assert there.info.number == 3
            assert fingerprint(again) == fingerprint(there)


@each_backend
def test_priorities_told_just_before_the_save_are_in_it(tmp_path, backend):
    with store(backend=backend, sampler=conduit.Prioritized()) as one:
        fill(one.actor(), 20)
        told: Any = np.linspace(0.1, 9, 20, dtype=np.float32)
        if backend == "torch":
            import torch

            told = torch.from_numpy(told)
        elif backend == "jax":
            import jax.numpy as jnp

            told = jnp.asarray(told)
        one.update_priorities(np.arange(20), told)
        one.save(tmp_path / "c")
        with restore(tmp_path / "c") as other:
            assert other.info()["priorities"] == {"applied": 20, "stale": 0}
            again, there = other.learner(), one.learner()
            for _ in range(5):
                assert fingerprint(again.pull()) == fingerprint(there.pull())


def test_learners_that_were_not_made_again_are_in_the_next_save(tmp_path):
    with store() as one:
        fill(one.actor(), 20)
        learners = [one.learner(rank, 2) for rank in range(2)]
        for learner in (learners[0], learners[0], learners[1]):
            learner.pull()
        one.save(tmp_path / "a")
        with restore(tmp_path / "a") as two:
            first = two.learner(0, 2)
            assert first.number == 4
            two.save(tmp_path / "b")
            with restore(tmp_path / "b") as three:
                assert [three.learner(rank, 2).number for rank in (1, 0)] == [3, 4]


@pytest.mark.parametrize(
    ("then", "pulls", "now", "numbers"),
    [
        (1, [5], 2, [6, 5]),
        (2, [3, 2], 1, [5]),
        (2, [0, 0], 3, [0, 1, 2]),
        (2, [2, 3], 3, [6, 7, 8]),
        (3, [1, 0, 0], 2, [2, 1]),
    ],
)
def test_other_learners_begin_after_the_last_batch_that_was_handed_over(tmp_path, then, pulls, now, numbers):
    with store() as one:
        fill(one.actor(), 20)
        for rank, count in enumerate(pulls):
            learner = one.learner(rank, then)
            for _ in range(count):
                learner.pull()
        one.save(tmp_path / "c")
        with restore(tmp_path / "c") as other:
            learners = [other.learner(rank, now) for rank in range(now)]
            assert [learner.number for learner in learners] == numbers
            for learner in learners:
                assert learner.pull().info.number == learner.number - now


def test_staged_batches_of_learners_that_do_not_come_again_are_counted(tmp_path):
    with store(schedule=conduit.Schedule(g_del=3)) as one:
        fill(one.actor(), 20)
        one.learner().pull()
        one.save(tmp_path / "c")
        with restore(tmp_path / "c") as other:
            assert other.info()["restored"] == {
                "path": str(tmp_path / "c"),
                "rows": 20,
                "dropped_rows": 0,
                "dropped_batches": 0,
            }
            assert [other.learner(rank, 2).number for rank in range(2)] == [2, 1]
            assert other.info()["restored"]["dropped_batches"] == 2


# On-policy


def on_policy(**settings: Any) -> conduit.Store:
    return store(**{"rollout_unit": 8, "batch_size": 2, "epochs": 1, **settings})


def whole_iteration(actor: conduit.Actor, first: int = 0) -> None:
    fill(actor, 8, first)


@pytest.mark.parametrize(("then", "pulls", "now"), [(2, [2, 2], 1), (1, [4], 2), (2, [0, 0], 4), (4, [1] * 4, 2)])
def test_whole_iterations_may_go_to_another_number_of_learners(tmp_path, then, pulls, now):
    with on_policy() as one:
        whole_iteration(one.actor(lanes=2))
        learners = [one.learner(rank, then) for rank in range(then)]
        for learner, count in zip(learners, pulls, strict=True):
            for _ in range(count):
                learner.pull()
        one.save(tmp_path / "c")
        with restore(tmp_path / "c") as other:
            again = [other.learner(rank, now) for rank in range(now)]
            if any(pulls):
                assert [learner.number for learner in again] == list(range(4, 4 + now))
                other.advance()
                whole_iteration(other.actor(lanes=2), first=8)
            got = [number for learner in again for _ in range(4 // now) for number in ids(learner.pull())]
            assert sorted(got) == list(range(8, 16) if any(pulls) else range(8))


@pytest.mark.parametrize(("pulls", "now"), [([2, 1], 1), ([1, 2], 4), ([0, 2], 1), ([2, None], 1)])
def test_half_an_iteration_goes_to_as_many_learners_as_before(tmp_path, pulls, now):
    with on_policy() as one:
        whole_iteration(one.actor(lanes=2))
        for rank, count in enumerate(pulls):
            if count is not None:
                learner = one.learner(rank, 2)
                for _ in range(count):
                    learner.pull()
        one.save(tmp_path / "c")
        with restore(tmp_path / "c") as other:
            with pytest.raises(SettingError, match="half delivered, to 2 learners; expected world=2"):
                other.learner(0, now)
            left = [ids(batch) for rank in range(2) for batch in other.learner(rank, 2)]
            assert len(left) == 4 - sum(count or 0 for count in pulls)


@conduit.register_ingestion(per="trajectory")
def lengths(actor_in: Any, exp_out: Any) -> None:
    exp_out.write(
        [each.with_rows({**each.rows, "length": np.full(len(each), len(each), np.int32)}) for each in actor_in.read()]
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_cut_lanes_close_an_iteration_whose_rows_are_all_there(tmp_path, overlap):
    schedule = conduit.Schedule(overlap_ing=overlap)
    with on_policy(ingestion=[lengths], schedule=schedule, batch_size=8) as one:
        actor = one.actor(lanes=2)
        whole_iteration(actor)
        one.save(tmp_path / "c")
    with restore(tmp_path / "c", ingestion=[lengths]) as other:
        learner = other.learner()
        batch = learner.pull(timeout_s=5)
        assert sorted(ids(batch)) == list(range(8))
        assert host(batch.data["length"]).tolist() == [4] * 8
        other.advance()
        actor = other.actor(lanes=1)
        fill(actor, 8, first=8)
        actor.end_unit()
        assert sorted(ids(learner.pull())) == list(range(8, 16))


def test_cut_lanes_let_new_actors_push_the_rest_of_an_iteration(tmp_path):
    with on_policy(ingestion=[lengths], batch_size=8) as one:
        fill(one.actor(lanes=2), 6)
        one.save(tmp_path / "c")
    with restore(tmp_path / "c", ingestion=[lengths]) as other:
        actor, learner = other.actor(), other.learner()
        fill(actor, 2, first=6)
        actor.end_unit()
        batch = learner.pull(timeout_s=5)
        assert dict(zip(ids(batch), host(batch.data["length"]).tolist(), strict=True)) == {
            **dict.fromkeys(range(6), 3),
            **dict.fromkeys((6, 7), 2),
        }


def test_actors_that_ended_their_unit_have_ended_it_afterwards(tmp_path):
    with on_policy(ingestion=[lengths], batch_size=8) as one:
        actors = [one.actor(lanes=2), one.actor(lanes=2)]
        for place, actor in enumerate(actors):
            for number in (4 * place, 4 * place + 2):
                actor.push(step(number, 2, value=np.zeros(2, np.float32)))
        actors[1].end_unit(bootstrap={"value": np.array([1, 2], np.float32)})
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", ingestion=[lengths], lanes="continue") as other:
            again = [other.actor(lanes=2), other.actor(lanes=2)]
            with pytest.raises(conduit.errors.UnitError, match="ended its unit"):
                again[1].end_unit()
            again[0].end_unit()
            assert sorted(ids(other.learner().pull())) == list(range(8))


# Lanes


def nexts(s: conduit.Store, rows: int) -> dict[int, int]:
    """Each drawable row's id, and the first number of its next image."""
    found: dict[int, int] = {}
    for _ in range(40):
        batch = s.sample(rows, to="numpy")
        data: Any = batch.data
        found.update(zip(data["id"].tolist(), data["next_obs"]["image"][:, 0, 0].tolist(), strict=True))
    return found


NEXT = {"next_obs": conduit.Next("obs")}


def test_nothing_is_bootstrapped_across_a_cut(tmp_path):
    with store(capacity=64, derive=NEXT) as one:
        fill(one.actor(lanes=2), 20)
        one.save(tmp_path / "c")
    with restore(tmp_path / "c") as other:
        # The same lanes' numbers, other episodes.
        fill(other.actor(lanes=2), 20, first=100)
        found = nexts(other, 8)
        assert found == {number: number + 2 for number in (*range(18), *range(100, 118))}


def test_nothing_is_cut_where_lanes_go_on(tmp_path):
    with store(capacity=64, derive=NEXT) as one:
        fill(one.actor(lanes=2), 20)
        one.save(tmp_path / "c")
    with restore(tmp_path / "c", lanes="continue") as other:
        fill(other.actor(lanes=2), 20, first=20)
        assert nexts(other, 8) == {number: number + 2 for number in range(38)}


@pytest.mark.parametrize("schedule", [conduit.Schedule(g_ing=3), conduit.Schedule(overlap_ing=True)])
def test_rows_that_were_not_ingested_yet_are_cut_behind(tmp_path, schedule):
    with store(capacity=64, derive=NEXT, schedule=schedule) as one:
        fill(one.actor(), 8)
        one.save(tmp_path / "c")
    with restore(tmp_path / "c") as other:
        fill(other.actor(), 12, first=100)
        learner = other.learner()
        learner.pull()
        found = nexts(other, 4)
        assert found.items() <= {n: n + 1 for n in (*range(7), *range(100, 111))}.items()
        assert set(range(7)) <= set(found)


def test_lanes_of_closed_actors_are_not_waited_for(tmp_path):
    with store(capacity=64, derive=NEXT) as one:
        gone, stays = one.actor(), one.actor()
        for number in range(5):
            gone.push(step(number))
            stays.push(step(100 + number))
        gone.close()
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", lanes="continue") as other:
            for each in (stays, other.actor()):
                for number in range(5, 9):
                    each.push(step(100 + number))
            expected = {n: n + 1 for n in (*range(4), *range(100, 108))}
            assert nexts(one, 8) == nexts(other, 8) == expected
            # The next one has the lane of the one that was closed, here and there.
            for s in (one, other):
                late = s.actor()
                for number in range(200, 204):
                    late.push(step(number))
            assert nexts(one, 8) == nexts(other, 8) == {**expected, **{n: n + 1 for n in range(200, 203)}}


def test_actors_that_go_on_must_be_made_in_their_order(tmp_path):
    with store() as one:
        for lanes in (2, 3):
            one.actor(lanes)
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", lanes="continue") as other:
            with pytest.raises(SettingError, match=r"actor\(lanes=3\).*the next of its actors had 2"):
                other.actor(lanes=3)
            other.actor(lanes=2)
            # One that hasn't been made again is in the next save.
            other.save(tmp_path / "c")
            with restore(tmp_path / "c", lanes="continue") as third:
                assert [third.actor(lanes=2).lanes, third.actor(lanes=3).lanes, third.actor().lanes] == [2, 3, 1]
        with restore(tmp_path / "c") as other:
            assert other.actor(lanes=7).lanes == 7


# Limiters


def test_rows_on_their_way_are_counted_by_the_limiter(tmp_path):
    limiter = conduit.SampleToInsertRatio(1.0, 4, 8.0)
    with store(limiter=limiter, schedule=conduit.Schedule(g_ing=3), batch_size=2, capacity=64) as one:
        actor = one.actor()
        fill(actor, 5)
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", lanes="continue") as other:
            again = other.actor()
            taken = []
            for each in (actor, again):
                count = 5
                while True:
                    try:
                        each.push(step(count), timeout_s=0)
                    except WaitTimeout:
                        break
                    count += 1
                taken.append(count)
            assert taken[0] == taken[1]
            assert one.info()["tables"] == other.info()["tables"]


def test_a_save_while_preloading_counts_as_if_it_ended_then(tmp_path):
    limiter = conduit.SampleToInsertRatio(4.0, 10, 8.0)
    with store(limiter=limiter, batch_size=2, capacity=64) as one:
        with one.preloading():
            fill(one.actor(), 40)
            one.save(tmp_path / "c")
        assert one.info()["tables"]["main"]["inserted"] == 9
        with restore(tmp_path / "c") as other:
            assert other.info()["tables"] == one.info()["tables"]
            other.learner().pull(timeout_s=1)


def test_what_follows_dropped_rows_is_cut_off_afterwards_too(tmp_path):
    with store(
        limiter=conduit.Queue(8),
        sampler=conduit.Fifo(),
        max_times_sampled=1,
        when_full="drop",
        derive=NEXT,
        batch_size=2,
    ) as one:
        actor = one.actor()
        fill(actor, 12)
        assert one.info()["dropped_rows"] == 4
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", lanes="continue") as other:
            again = other.actor()
            assert other.info()["dropped_rows"] == 4
            for s, pusher in ((one, actor), (other, again)):
                learner = s.learner(to="numpy")
                found = []
                for turn in range(6):
                    batch = learner.pull()
                    data: Any = batch.data
                    found += zip(data["id"].tolist(), data["next_obs"]["image"][:, 0, 0].tolist(), strict=True)
                    fill(pusher, 2, first=12 + 2 * turn)
                # Row 7 was followed by the ones that were dropped.
                assert found == [(n, n + 1) for n in (*range(7), *range(12, 17))]


# Other schedules

SCHEDULES = [
    conduit.Schedule(),
    conduit.Schedule(overlap_ing=True),
    conduit.Schedule(overlap_del=True),
    conduit.Schedule(overlap_ing=True, overlap_del=True, g_ing=2, g_del=3),
    conduit.Schedule(g_ing=3, g_del=2),
]


@pytest.mark.parametrize("then", SCHEDULES, ids=str)
@pytest.mark.parametrize("now", SCHEDULES, ids=str)
def test_a_store_goes_on_under_another_schedule(tmp_path, then, now):
    def scene(clock):
        with store(clock=clock, schedule=then, capacity=64) as one:
            fill(one.actor(), 25)
            learner = one.learner()
            numbers = [learner.pull().info.number for _ in range(3)]
            one.save(tmp_path / "a")
        with restore(tmp_path / "a", clock=clock, schedule=now, lanes="continue") as other:
            actor, learner = other.actor(), other.learner()
            for turn in range(6):
                batch = learner.pull()
                assert_intact(batch)
                numbers.append(batch.info.number)
                fill(actor, 4, first=25 + 4 * turn)
                other.save(tmp_path / "b", timeout_s=1.0)
            assert numbers == list(range(9))
            other.sample(49)
            assert live_ids(other) == list(range(49))

    played(0, scene)


def test_what_was_asked_for_ahead_waits_for_a_pull_where_all_is_in_line(tmp_path):
    def scene(clock):
        with store(clock=clock, schedule=conduit.Schedule(overlap_del=True)) as one:
            fill(one.actor(), 1)
            with pytest.raises(WaitTimeout):
                one.learner().pull(timeout_s=0.1)
            one.save(tmp_path / "a")
        with restore(tmp_path / "a", clock=clock, schedule=conduit.Schedule()) as other:
            learner = other.learner()
            fill(other.actor(), 20, first=1)
            other.save(tmp_path / "a", timeout_s=1.0)
            assert learner.pull().info.frontier == 20

    played(0, scene)


# Rows of every kind


@pytest.mark.parametrize("then", BACKENDS)
@pytest.mark.parametrize("now", BACKENDS)
def test_staged_batches_go_from_one_framework_to_another(tmp_path, then, now):
    settings: dict[str, Any] = {"sampler": conduit.Prioritized(), "item": conduit.Sequence(2, pad="zero")}
    with store(backend=then, schedule=conduit.Schedule(g_del=3), **settings) as one:
        actor = one.actor()
        for number in range(12):
            rows = {"id": np.array([number], np.int32), "even": np.array([number % 2 == 0])}
            actor.push({**rows, "half": np.full((1, 3), number, ml_dtypes.bfloat16)})
        learner = one.learner()
        learner.pull()
        assert learner.staged == 2
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", backend=now) as other:
            again = other.learner()
            for _ in range(4):
                assert printed(again.pull()) == printed(learner.pull())


def test_staged_batches_go_to_the_devices_that_their_learner_asks_for(tmp_path):
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    asked: list[dict[str, Any]] = [
        {"sharding": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))},
        {"device": jax.devices()[3]},
    ]
    for place, to in enumerate(asked):
        with store(backend="jax", schedule=conduit.Schedule(g_del=3)) as one:
            fill(one.actor(), 20)
            learner = one.learner(**to)
            learner.pull()
            one.save(tmp_path / str(place))
            with restore(tmp_path / str(place)) as other:
                again = other.learner(**to)
                for _ in range(4):
                    mine, theirs = learner.pull(), again.pull()
                    assert fingerprint(mine) == fingerprint(theirs)
                    leaves: list[Any] = [batch.data["id"] for batch in (mine, theirs)]
                    assert leaves[0].sharding == leaves[1].sharding


def test_rows_on_disk_come_back(tmp_path):
    on_disk: dict[str, Any] = {"placement": "disk", "disk": tmp_path}
    with store(derive=NEXT, **on_disk) as one:
        fill(one.actor(), 50)
        one.save(tmp_path / "c")
    with restore(tmp_path / "c", **on_disk) as other:
        assert live_ids(other) == list(range(18, 50))
        assert_intact(other.sample(8))


def test_settings_of_other_kinds_of_numbers_and_mappings_come_back(tmp_path):
    settings: dict[str, Any] = {
        "capacity": np.int64(32),
        "batch_size": np.int32(4),
        "timeout_s": math.inf,
        "seed": np.int64(3),
        "max_times_sampled": np.int64(3),
        "derive": MappingProxyType({"next_obs": conduit.Next("obs")}),
        "budgets": OrderedDict(pageable="1GiB"),
        "tables": MappingProxyType({"é/x": conduit.Table(conduit.Recency(3))}),
    }
    with store(**settings) as one:
        fill(one.actor(), 20)
        one.save(tmp_path / "c")
        with restore(tmp_path / "c") as other:
            assert printed(one.sample(4, table="é/x")) == printed(other.sample(4, table="é/x"))


def test_leaves_of_any_name_come_back(tmp_path):
    names = ("a/b", "array", "", "ünï", "keys", "(keys)", "leaf/x", "state", "kind")
    with store(schedule=conduit.Schedule(g_ing=3)) as one:
        actor = one.actor()
        for number in range(10):
            actor.push({"deep": {"er/": np.array([number])}, **{name: np.array([number]) for name in names}})
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", lanes="continue") as other:
            other.learner()
            mine, theirs = one.read().data, other.read().data
            assert list(mine) == list(theirs)
            assert all(mine[name].tolist() == theirs[name].tolist() for name in names)


@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_rows_come_back_wherever_they_are_put(tmp_path, backend, placement):
    with store(backend="reference", sampler=conduit.Prioritized(), capacity=24) as one:
        fill(one.actor(lanes=2), 40)
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", backend=backend, placement=placement, lanes="continue") as other:
            other.save(tmp_path / "again")
            with restore(tmp_path / "again", backend="reference") as third:
                stores = (one, other, third)
                assert [live_ids(s) for s in stores] == [list(range(16, 40))] * 3
                learners = [s.learner() for s in stores]
                prints = [[fingerprint(learner.pull()) for learner in learners] for _ in range(4)]
                assert all(a == b == c for a, b, c in prints)
                assert_intact(other.sample(24))


Point = namedtuple("Point", ["x", "y"])


class Pair:
    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


cast(Any, optree.register_pytree_node)(
    Pair,
    lambda pair: ((pair.left, pair.right), None),
    lambda _, children: Pair(*children),
    namespace=optree.registry.__GLOBAL_NAMESPACE,  # pyright: ignore[reportAttributeAccessIssue]
)


def nested(number: int) -> dict[str, Any]:
    whole = np.array([number], np.int32)
    return {
        "id": whole,
        "point": Point(whole.astype(np.float32), {"in": [whole, (whole + 1,)]}),
        "pair": Pair(whole + 2, whole.astype(ml_dtypes.bfloat16)),
        "truncated": whole % 3 == 2,
    }


@pytest.mark.parametrize("hold", [False, True])
def test_rows_of_any_tree_come_back_with_an_example(tmp_path, hold):
    settings: dict[str, Any] = (
        {"schedule": conduit.Schedule(g_ing=4)} if hold else {"derive": {"next": conduit.Next("point")}}
    )
    with store(**settings, capacity=16) as one:
        actor = one.actor()
        for number in range(13 if not hold else 14):
            rows = nested(number)
            final = {"point": Point(np.array([0.5], np.float32), rows["point"].y)} if number % 3 == 2 else None
            actor.push(rows, final=final)
        one.save(tmp_path / "c")
        with no_thread_left(), pytest.raises(SchemaError, match=r"nest in nodes of your own.*restore\(example=\)"):
            restore(tmp_path / "c")
        with pytest.raises(SchemaError, match=r"restore\(example=…\) has the leaves id"):
            restore(tmp_path / "c", example={"id": np.zeros(1, np.int32)})
        with restore(tmp_path / "c", lanes="continue", example=nested(0)) as other:
            for each in (actor, other.actor()):
                for number in range(14, 30):
                    each.push(nested(number))
            a, b = one.learner(), other.learner()
            for _ in range(8):
                assert printed(a.pull()) == printed(b.pull())
            data = other.read().data
            assert type(data["point"]) is Point
            assert type(data["pair"]) is Pair
            assert data["pair"].right.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("form", ["tuple", "list", "leaf", "whole-number names"])
def test_plain_trees_need_no_example(tmp_path, form):
    def rows(number: int) -> Any:
        leaf = np.array([number], np.float32)
        return {
            "tuple": (leaf, leaf + 1),
            "list": [leaf, {"a": leaf}],
            "leaf": leaf,
            "whole-number names": {3: leaf, 1: leaf + 1},
        }[form]

    with store(schedule=conduit.Schedule(g_ing=2)) as one:
        actor = one.actor()
        for number in range(11):
            actor.push(rows(number))
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", lanes="continue") as other:
            again = other.actor()
            for each in (actor, again):
                each.push(rows(11))
            a, b = one.learner(), other.learner()
            for _ in range(4):
                assert printed(a.pull()) == printed(b.pull())


def test_bfloat16_is_known_in_a_process_that_never_named_it(tmp_path):
    with store() as one:
        one.actor().push({"id": np.arange(1, dtype=np.int32), "half": np.ones((1, 3), ml_dtypes.bfloat16)})
        one.save(tmp_path / "c")
    code = f"""
import conduit
with conduit.Store.restore({str(tmp_path / "c")!r}) as s:
    print(s.read().data["half"].dtype)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "bfloat16"), done.stderr


# How many rows there are


@each_backend
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17])
def test_rings_of_any_fill_come_back(tmp_path, backend, rows):
    # flashbax#66: nothing was written when the ring was exactly full.
    with store(backend=backend, capacity=8, batch_size=1) as one:
        fill(one.actor(), rows)
        saved = one.save(tmp_path / "c")
        assert saved.rows == saved.written_rows == min(rows, 8)
        with restore(tmp_path / "c") as other:
            assert live_ids(other) == list(range(max(0, rows - 8), rows))
            assert len(other) == min(rows, 8)


def test_a_store_that_never_saw_a_row_comes_back(tmp_path):
    with store(sampler=conduit.Prioritized(), limiter=conduit.MinSize(3)) as one:
        one.learner()
        saved = one.save(tmp_path / "c")
        assert (saved.rows, saved.written_rows, saved.generation) == (0, 0, 1)
        with restore(tmp_path / "c") as other:
            fill(other.actor(), 10)
            assert len(other.learner().pull()) == 4
            other.save(tmp_path / "c")
        with restore(tmp_path / "c") as third:
            assert live_ids(third) == list(range(10))


def test_a_store_whose_only_push_was_not_ingested_comes_back(tmp_path):
    with store(schedule=conduit.Schedule(g_ing=4)) as one:
        one.actor().push(step(0))
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", lanes="continue") as other:
            actor = other.actor()
            with pytest.raises(SchemaError, match="state"):
                actor.push({**step(1), "obs": {"image": step(1)["obs"]["image"]}})
            fill(actor, 3, first=1)
            assert live_ids(other) == list(range(4))


@each_backend
@pytest.mark.parametrize("capacity", [8, 11, 15])
@pytest.mark.parametrize(
    "sampler", [conduit.Uniform(), conduit.Prioritized(), conduit.Fifo(), conduit.WithoutReplacement()], ids=str
)
def test_a_smaller_store_leaves_out_the_oldest_rows_and_says_so(tmp_path, backend, capacity, sampler):
    with store(capacity=16, sampler=sampler, derive=NEXT, max_times_sampled=3) as one:
        actor = one.actor()
        for number in range(23):
            ended = number % 5 == 4
            final = {"obs": obs_of(np.array([900 + number]))} if ended else None
            actor.push(step(number, truncated=np.array([ended])), final=final)
        one.sample(6)
        one.save(tmp_path / "c")
    with pytest.warns(CheckpointWarning, match=f"no room for the {16 - capacity} oldest rows"):
        other = restore(tmp_path / "c", backend=backend, capacity=capacity, lanes="continue")
    with other:
        assert other.info()["restored"]["dropped_rows"] == 16 - capacity
        assert other.info()["restored"]["rows"] == len(other) == capacity
        again = other.actor()
        for number in range(23, 23 + capacity // 2):
            assert_nexts(other)
            ended = number % 5 == 4
            final = {"obs": obs_of(np.array([900 + number]))} if ended else None
            again.push(step(number, truncated=np.array([ended])), final=final)
        assert_nexts(other)
        assert live_ids(other) == list(range(23 + capacity // 2 - capacity, 23 + capacity // 2))


def assert_nexts(s: conduit.Store) -> None:
    try:
        batch = s.sample(4, to="numpy", timeout_s=0)
    except WaitTimeout:
        return
    assert_intact(batch)
    data: Any = batch.data
    oldest = s.read().keys[0]
    for number, following, key in zip(data["id"], data["next_obs"]["image"][:, 0, 0], batch.info.keys, strict=True):
        assert number == key >= oldest
        assert following == ((900 + number) % 256 if number % 5 == 4 else number + 1)


@each_backend
def test_a_larger_store_takes_more(tmp_path, backend):
    with store(capacity=8, sampler=conduit.Prioritized(), derive=NEXT) as one:
        fill(one.actor(), 13)
        one.save(tmp_path / "c")
    with restore(tmp_path / "c", backend=backend, capacity=50, lanes="continue") as other:
        assert other.info()["capacity"] == 50
        fill(other.actor(), 30, first=13)
        assert live_ids(other) == list(range(5, 43))
        assert nexts(other, 8) == {number: number + 1 for number in range(5, 42)}


def test_rows_without_an_order_can_not_be_left_out(tmp_path):
    with store(capacity=8, remover=conduit.Lifo()) as one:
        fill(one.actor(), 13)
        one.save(tmp_path / "c")
    with no_thread_left(), pytest.raises(conduit.errors.CapacityError, match="expected at least as many"):
        restore(tmp_path / "c", capacity=7)
    with restore(tmp_path / "c", capacity=9) as other:
        assert live_ids(other) == [*range(7), 12]
        fill(other.actor(), 1, first=13)
        assert live_ids(other) == [*range(7), 12, 13]
        other.save(tmp_path / "c")


# Again and again


def test_only_rows_that_came_since_are_written(tmp_path):
    with store(capacity=64) as one:
        actor, came = one.actor(), 0
        for more in (10, 0, 3, 30, 1, 40):
            fill(actor, more, first=came)
            came += more
            saved = one.save(tmp_path / "c")
            assert (saved.rows, saved.written_rows) == (min(came, 64), min(more, 64))
        with restore(tmp_path / "c") as other:
            assert live_ids(other) == list(range(came - 64, came))


@pytest.mark.parametrize("remover", [None, conduit.Lifo(), conduit.Uniform(), conduit.MinHeap()], ids=str)
def test_a_hundred_saves_take_no_more_room_than_a_few(tmp_path, remover):
    chance = random.Random(0)
    blob = np.arange(4096, dtype=np.uint8)[None]
    with store(capacity=64, remover=remover, max_times_sampled=2 if remover else None) as one:
        actor, came, sizes, written = one.actor(), 0, [], 0
        for _ in range(100):
            more = chance.choice((0, 1, 5, 17))
            for number in range(came, came + more):
                actor.push({"id": np.array([number], np.int32), "blob": blob + np.uint8(number % 251)})
            came += more
            if came > 8 and chance.random() < 0.5:
                one.sample(4)
            written += one.save(tmp_path / "c").written_rows
            sizes.append(saved_size(tmp_path / "c"))
            files = len(list((tmp_path / "c").iterdir()))
            assert files < 30
        assert max(sizes) < 3 * 64 * 4096
        assert written < 5 * came
        Archive(tmp_path / "c").verify()
        with restore(tmp_path / "c") as other:
            mine, theirs = one.read(), other.read()
            assert mine.keys.tolist() == theirs.keys.tolist()
            assert mine.data["blob"].tobytes() == theirs.data["blob"].tobytes()


def test_a_restored_store_saves_to_its_folder_only_what_came_since(tmp_path):
    with store(capacity=64) as one:
        fill(one.actor(), 30)
        one.save(tmp_path / "c")
    for turn in range(3):
        with restore(tmp_path / "c") as other:
            fill(other.actor(), 5, first=30 + 5 * turn)
            saved = other.save(tmp_path / "c")
            assert (saved.generation, saved.rows, saved.written_rows) == (2 + turn, 35 + 5 * turn, 5)
    with restore(tmp_path / "c") as last:
        assert live_ids(last) == list(range(45))


def test_two_folders_by_turns_are_both_whole_and_both_incremental(tmp_path):
    with store(capacity=64) as one:
        actor = one.actor()
        for turn in range(8):
            fill(actor, 4, first=4 * turn)
            saved = one.save(tmp_path / ("a", "b")[turn % 2])
            assert saved.written_rows == (4 if turn == 0 else 8)
        for name, rows in (("a", 28), ("b", 32)):
            with restore(tmp_path / name) as other:
                assert live_ids(other) == list(range(rows))


def test_finals_come_back_over_many_saves(tmp_path):
    with store(capacity=32, derive=NEXT, batch_size=8) as one:
        actor = one.actor(lanes=2)
        for turn in range(30):
            for number in range(6 * turn, 6 * turn + 6, 2):
                actor.push(
                    ends(number, 2, truncated=[0, 1]), final={"obs": obs_of(100 + np.arange(number, number + 2))}
                )
            one.save(tmp_path / "c")
            if turn % 7 == 0:
                with restore(tmp_path / "c") as other:
                    batch = other.sample(6, to="numpy")
                    data: Any = batch.data
                    expected = obs_of(100 + data["id"])["image"]
                    assert data["next_obs"]["image"].tobytes() == expected.tobytes()


# While the store is at work


def load(
    s: conduit.Store, stop: threading.Event, actors: int, learners: int, table: Any = None
) -> list[threading.Thread]:
    """Threads that push rows which say who pushed them as the how-manieth, and that pull and tell priorities."""

    def push(place: int) -> None:
        actor = s.actor()
        count = 0
        while not stop.is_set():
            number = np.array([place * 1_000_000 + count], np.int32)
            actor.push({**step(int(number[0])), "id": number})
            count += 1

    def pull(rank: int) -> None:
        learner = s.learner(rank, learners)
        while not stop.is_set():
            batch = learner.pull()
            assert_intact(batch)
            s.update_priorities(batch.info.keys, np.full(len(batch), rank + 1.0))

    works = [(push, i) for i in range(actors)] + [(pull, i) for i in range(learners)]
    threads = [threading.Thread(target=work, args=(place,)) for work, place in works]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "schedule", [None, conduit.Schedule(overlap_ing=True, overlap_del=True)], ids=["in line", "behind"]
)
def test_a_save_under_load_is_one_cut(tmp_path, backend, schedule):
    stop = threading.Event()
    with store(
        backend=backend, capacity=4096, sampler=conduit.Prioritized(), max_times_sampled=50, schedule=schedule
    ) as one:
        threads = load(one, stop, 2, 2)
        try:
            for turn in range(4):
                while one.info()["inserted"] < 300 * (turn + 1):
                    pass
                saved = one.save(tmp_path / "c")
                assert_one_cut(tmp_path / "c", saved)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("kind", ["ring", "places", "hooks"])
def test_saves_at_any_moment_of_a_store_at_work_are_one_cut(tmp_path, kind):
    """The same on the virtual clock, which tries other interleavings with each seed."""
    settings: dict[str, Any] = {
        "ring": {"sampler": conduit.Prioritized(), "schedule": conduit.Schedule(overlap_ing=True, overlap_del=True)},
        "places": {"remover": conduit.Lifo(), "schedule": conduit.Schedule(g_ing=2, overlap_del=True)},
        "hooks": {"ingestion": [places], "schedule": conduit.Schedule(overlap_ing=True, g_ing=2)},
    }[kind]

    def scene(clock: VirtualClock) -> int:
        made: list[tuple[Path, conduit.Saved]] = []
        with store(clock=clock, capacity=4096, max_times_sampled=50, **settings) as one:

            def push(place: int) -> None:
                actor = one.actor()
                for count in range(30):
                    number = 1_000_000 * place + count
                    actor.push({**step(number), "terminated": np.array([count % 4 == 3])})
                    clock.sleep(0.001)

            def pull(rank: int) -> None:
                learner = one.learner(rank, 2)
                for _ in range(10):
                    learner.pull()
                    clock.sleep(0.002)

            def saves() -> None:
                for _ in range(3):
                    clock.sleep(0.007)
                    path = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
                    made.append((path, one.save(path)))

            together(
                clock, *(partial(push, place) for place in range(2)), *(partial(pull, rank) for rank in range(2)), saves
            )
        for path, saved in made:
            assert_one_cut(path, saved, settings.get("ingestion", ()))
        return len(made)

    assert sum(played(seed, scene) for seed in range(12)) == 36


def assert_one_cut(path: Path, saved: conduit.Saved, hooks: Sequence[Hook] = ()) -> None:
    """Every actor's rows up to some push, none torn; and what is counted agrees with what the state says of each row."""
    Archive(path).verify()
    with restore(path, backend="reference", ingestion=hooks) as other:
        rows, info = other.read(), other.info()
        assert len(rows.keys) == saved.rows
        assert rows.keys.tolist() == list(range(info["inserted"] - saved.rows, info["inserted"]))
        number = rows.data["id"]
        for place in range(2):
            mine = number[number // 1_000_000 == place] % 1_000_000
            first = mine[0] if len(mine) else 0
            assert mine.tolist() == list(range(first, first + len(mine)))
        for key, expected in (("image", "image"), ("state", "state")):
            made = [step(int(each))["obs"][expected] for each in number]
            assert rows.data["obs"][key].tobytes() == np.concatenate(made).tobytes()
        table = other._wiring.tables["main"]
        counters = info["tables"]["main"]
        assert counters["inserted"] == info["inserted"]
        if info["inserted"] <= 4096:
            # No row has left: each draw is in some row's count.
            assert table._times is not None
            assert int(table._times.at(np.arange(4096)).sum()) == counters["sampled"]
            learners = other._learners._saved["main"]
            drawn = {rank: state["index"] + len(state["staged"]) for rank, state in learners.items()}
            assert counters["sampled"] == 4 * sum(drawn.values())


def test_restores_while_another_saves_see_one_checkpoint_whole(tmp_path):
    stop = threading.Event()
    with store(capacity=256) as one:
        actor = one.actor()
        fill(actor, 50)
        one.save(tmp_path / "c")

        def work() -> None:
            came = 50
            while not stop.is_set():
                fill(actor, 20, first=came)
                came += 20
                one.save(tmp_path / "c")

        thread = threading.Thread(target=work)
        thread.start()
        try:
            seen = []
            for _ in range(25):
                with restore(tmp_path / "c") as other:
                    found = live_ids(other)
                    assert found == list(range(found[0], found[0] + len(found)))
                    assert len(found) == min(256, found[-1] + 1)
                    seen.append(found[-1])
        finally:
            stop.set()
            thread.join()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def test_saves_of_several_threads_are_made_one_after_the_other(tmp_path):
    with store(capacity=256) as one:
        fill(one.actor(), 50)
        threads = [threading.Thread(target=lambda: made.append(one.save(tmp_path / "c").generation)) for _ in range(6)]
        made: list[int] = []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(made) == [1, 2, 3, 4, 5, 6]
