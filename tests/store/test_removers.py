"""Removers: who leaves when the store is full, and that a new row never inherits anything of the one whose slot it gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import conduit
from conduit.errors import SettingError, UnknownKeyError
from tests.core.frequencies import assert_fits
from tests.store.rows import each_backend, store
from tests.store.tables import assert_rows, content

REMOVERS = [conduit.Lifo(), conduit.MaxHeap(), conduit.MinHeap(), conduit.Uniform()]
each_remover = pytest.mark.parametrize("remover", REMOVERS, ids=repr)


def push(actor: conduit.Actor, first: int, rows: int, priority: Any = None) -> None:
    told = None if priority is None else np.array(priority, float)
    actor.push_trajectory(content(range(first, first + rows)), priority=told)


def live(s: conduit.Store) -> list[int]:
    stored = s.read()
    assert_rows(stored.data, stored.keys)
    assert len(s) == len(stored.keys)
    return stored.keys.tolist()


PUSHED = [5.0, 1.0, 4.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("remover", "left"),
    [
        (conduit.Fifo(), [2, 3, 4, 5, 6]),
        (conduit.Lifo(), [0, 1, 2, 5, 6]),
        (conduit.MaxHeap(), [1, 3, 4, 5, 6]),
        (conduit.MinHeap(), [0, 2, 4, 5, 6]),
    ],
    ids=repr,
)
@each_backend
def test_who_leaves_is_who_the_remover_says_and_never_the_newcomer(backend, remover, left):
    with store(backend=backend, capacity=5, remover=remover, sampler=conduit.Prioritized()) as s:
        actor = s.actor()
        push(actor, 0, 5, PUSHED)
        push(actor, 5, 2, [9.0, 0.5])
        assert live(s) == left


def test_of_equal_priorities_the_oldest_leaves():
    for remover in (conduit.MaxHeap(), conduit.MinHeap()):
        with store(capacity=5, remover=remover) as s:
            actor = s.actor()
            push(actor, 0, 5)
            push(actor, 5, 2)
            assert live(s) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("remover", [conduit.Fifo(), *REMOVERS], ids=repr)
@pytest.mark.parametrize("rows", [5, 6, 13])
def test_a_push_of_as_many_rows_as_there_are_slots_or_more_leaves_its_last_ones(remover, rows):
    with store(capacity=5, remover=remover, sampler=conduit.MinHeap()) as s:
        actor = s.actor()
        push(actor, 0, 4)
        push(actor, 4, rows, np.arange(4, 4 + rows))
        there = list(range(4 + rows - 5, 4 + rows))
        assert live(s) == there
        assert s.info()["inserted"] == 4 + rows
        info = s.sample(5).info
        assert info.keys.tolist() == info.priority.tolist() == there


def test_a_uniform_remover_takes_every_row_with_equal_chance():
    gone = np.zeros(6)
    for seed in range(600):
        with store(capacity=6, remover=conduit.Uniform(), seed=seed) as s:
            actor = s.actor()
            push(actor, 0, 6)
            push(actor, 6, 2)
            stay = live(s)
            assert stay[-2:] == [6, 7]
            gone[[key for key in range(6) if key not in stay]] += 1
    assert gone.sum() == 1200
    # Two of six without replacement: the variance is that of a multinomial times (6 - 2) / (6 - 1).
    assert_fits(200 + (gone - 200) * np.sqrt(5 / 4), np.full(6, 1 / 6))


@each_remover
def test_the_same_rows_leave_on_every_backend_however_the_pushes_are_cut(remover):
    def played(backend: str, placement: Any = "auto") -> tuple[list[int], list[int]]:
        with store(backend=backend, placement=placement, capacity=9, remover=remover, seed=3) as s:
            actor, key = s.actor(), 0
            for rows in (4, 4, 4, 1, 9, 2, 3, 4):
                push(actor, key, rows, [key % 5] * rows if remover.prioritized else None)
                key += rows
            return live(s), s.sample(40 % 9).info.keys.tolist()

    expected = played("reference")
    assert played("reference", ["device:0", "device:1", "device:2"]) == expected
    assert played("torch") == expected
    assert played("jax", "device:0") == expected


@pytest.mark.parametrize("width", [2, 40_000])
def test_of_pushes_that_are_ingested_together_the_same_rows_leave_wherever_they_lie(width):
    def left(**where: Any) -> list[int]:
        schedule = conduit.Schedule(g_ing=4)
        with store(capacity=12, remover=conduit.Lifo(), schedule=schedule, **where) as s:
            actor = s.actor(3)
            for number in range(8):
                actor.push({"obs": np.full((3, width), number, np.float32)})
            return s.read().keys.tolist()

    expected = left(placement="pageable")
    assert left(placement="device:0") == expected
    assert left(backend="torch") == expected


def test_a_remover_hears_of_priorities_pushed_and_of_updates_through_any_table():
    tables = {"recent": conduit.Table(conduit.Lifo()), "hot": conduit.Table(conduit.MaxHeap())}
    with store(capacity=4, remover=conduit.MinHeap(), tables=tables, batch_size=2) as s:
        actor = s.actor()
        push(actor, 0, 4, [3.0, 4.0, 5.0, 6.0])
        assert s.update_priorities(np.array([3]), np.array([1.0]), table="recent").applied == 1
        push(actor, 4, 1, [7.0])
        assert live(s) == [0, 1, 2, 4]
        assert s.sample(2, table="hot").info.priority.tolist() == [7.0, 5.0]
        s.update_priorities(np.array([4]), np.array([0.5]), table="hot")
        push(actor, 5, 1, [8.0])
        assert live(s) == [0, 1, 2, 5]
        assert s.sample(4, table="hot").info.keys.tolist() == [5, 2, 1, 0]


@each_remover
def test_a_late_priority_never_hits_the_row_that_has_the_slot_by_now(remover):
    """pytorch/rl#4041."""
    with store(capacity=4, remover=remover, sampler=conduit.Prioritized(alpha=1.0, eps=0.0)) as s:
        actor = s.actor()
        push(actor, 0, 4, [1.0] * 4)
        push(actor, 4, 2, [2.0, 2.0])
        there = live(s)
        gone = [key for key in range(6) if key not in there]
        update = s.update_priorities(np.array([*gone, 4, gone[0], 4]), np.array([50.0, 50.0, 9.0, 60.0, 8.0]))
        assert (update.applied, update.stale) == (2, 3)
        assert s.info()["priorities"] == {"applied": 2, "stale": 3}
        seen: dict[int, float] = {}
        for _ in range(20):
            info = s.sample(4).info
            seen |= dict(zip(info.keys.tolist(), info.priority.tolist(), strict=True))
        assert len(seen) == 4
        assert seen.items() <= {**dict.fromkeys(there, 1.0), 4: 8.0, 5: 2.0}.items()
        with pytest.raises(UnknownKeyError, match="key 6 was never issued; keys go from 0 to 5"):
            s.update_priorities(np.array([0, 6]), np.ones(2))


@each_remover
def test_rows_that_no_table_gives_any_more_leave_and_their_slots_are_taken_before_anybody_has_to_go(remover):
    tables = {"more": conduit.Table(conduit.Lifo(), max_times_sampled=1)}
    with store(
        capacity=6, remover=remover, sampler=conduit.Fifo(), max_times_sampled=1, tables=tables, batch_size=2
    ) as s:
        actor = s.actor()
        push(actor, 0, 6)
        assert s.sample(4).info.keys.tolist() == [0, 1, 2, 3]
        assert live(s) == [0, 1, 2, 3, 4, 5]
        assert s.sample(3, table="more").info.keys.tolist() == [5, 4, 3]
        assert live(s) == [0, 1, 2, 4, 5]
        assert s.sample(2).info.keys.tolist() == [4, 5]
        assert live(s) == [0, 1, 2]
        push(actor, 6, 3)
        assert live(s) == [0, 1, 2, 6, 7, 8]
        assert s.sample(3).info.keys.tolist() == [6, 7, 8]
        assert s.sample(6, table="more").info.keys.tolist() == [8, 7, 6, 2, 1, 0]
        assert live(s) == []
        push(actor, 9, 6)
        assert s.sample(6).info.keys.tolist() == list(range(9, 15))


def test_a_staged_batch_is_intact_though_its_rows_have_left_and_others_have_their_slots():
    with store(
        capacity=4,
        batch_size=4,
        remover=conduit.Lifo(),
        sampler=conduit.Fifo(),
        max_times_sampled=1,
        schedule=conduit.Schedule(overlap_del=True),
    ) as s:
        actor, learner = s.actor(), s.learner()
        push(actor, 0, 4)
        for first in range(0, 40, 4):
            batch = learner.pull()
            # The next batch is drawn as soon as its rows are there, and its rows leave at once.
            push(actor, first + 4, 4)
            assert batch.info.keys.tolist() == list(range(first, first + 4))
            assert_rows(batch.data, batch.info.keys)


@pytest.mark.parametrize(
    "remover",
    [
        conduit.Prioritized(),
        conduit.Stratified(),
        conduit.Recency(3),
        conduit.WithoutReplacement(),
        "fifo",
        conduit.Lifo,
    ],
    ids=repr,
)
def test_what_can_not_say_who_leaves_is_refused(remover):
    with pytest.raises(
        SettingError, match=r"remover=.*expected conduit.Fifo\(\), Lifo\(\), Uniform\(\), MaxHeap\(\) or MinHeap"
    ):
        store(remover=remover)


@each_remover
@pytest.mark.parametrize("sampler", [conduit.Recency(3), conduit.Stratified()], ids=repr)
def test_samplers_that_go_by_age_are_refused_where_rows_leave_in_another_order(remover, sampler):
    with pytest.raises(SettingError, match=r"table 'main': .*goes by age"):
        store(remover=remover, sampler=sampler)
    with pytest.raises(SettingError, match=r"table 'aged': .*goes by age"):
        store(remover=remover, tables={"aged": conduit.Table(sampler)})


@each_remover
@pytest.mark.parametrize(
    "linked",
    [{"item": conduit.NStep(3, 0.9)}, {"item": conduit.Trajectory()}, {"derive": {"next_obs": conduit.Next("obs")}}],
    ids=str,
)
def test_linked_rows_need_the_oldest_to_leave_first(remover, linked):
    with pytest.raises(SettingError, match="remover="):
        store(remover=remover, **linked)


def test_no_table_may_be_called_as_the_remover_is():
    """Their states would be one in a checkpoint."""
    with pytest.raises(SettingError, match=r"'\(remover\)'"):
        store(remover=conduit.Lifo(), tables={"(remover)": conduit.Table()})


def test_rows_of_several_versions_that_a_hook_puts_together_keep_their_own():
    """A fragment that is longer than the store."""

    @conduit.register_ingestion(per="trajectory")
    def whole(actor_in: Any, exp_out: Any) -> None:
        exp_out.write(actor_in.read())

    with store(capacity=5, remover=conduit.Lifo(), ingestion=[whole], batch_size=1) as s:
        actor = s.actor()
        for version in range(3):
            rows = content(range(3 * version, 3 * version + 3))
            actor.push_trajectory(rows, end="terminated" if version == 2 else "open")
            s.advance()
        assert live(s) == [4, 5, 6, 7, 8]
        assert s.read().versions.tolist() == [1, 1, 2, 2, 2]
