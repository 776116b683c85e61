"""Hooks through the store: scopes, row rules, and what becomes of their failures."""

from __future__ import annotations

import numpy as np
import pytest

import conduit
from conduit import Schedule
from conduit.errors import ClosedError, HookError
from tests.store.rows import EVERYWHERE, each_backend, ends, fill, host, ids, no_thread_left, step, store


@conduit.register_ingestion(input="Actor", output="ExperienceBuffer")
def add_sum(actor_in, exp_out):
    d = actor_in.read()
    exp_out.write(d | {"sum": d["obs"]["image"].sum(axis=(1, 2)).astype(np.int32)})


@conduit.register_delivery(input="ExperienceBuffer", output="Learner")
def negate(exp_in, learn_out):
    d = exp_in.read()
    learn_out.write(d | {"id": -d["id"], "extra": np.ones((len(d["id"]), 2), np.float32)})


def failing(stage: str, when: int, error=ZeroDivisionError):
    calls = []

    def broken(source, sink):
        calls.append(1)
        if len(calls) > when:
            raise error("planted")
        sink.write(source.read())

    return (conduit.register_ingestion() if stage == "ingestion" else conduit.register_delivery())(broken)


@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_ingestion_adds_leaves_to_what_is_stored_and_delivery_to_what_is_delivered(backend, placement):
    with store(backend=backend, placement=placement, ingestion=[add_sum], delivery=[negate]) as s:
        fill(s.actor(lanes=2), 12)
        learner = s.learner()
        for batch in (learner.pull(), s.sample(4)):
            assert (-host(batch.data["id"])).tolist() == batch.info.keys.tolist()
            assert host(batch.data["sum"]).tolist() == [(6 * key + 15) for key in batch.info.keys]
            assert host(batch.data["extra"]).shape == (4, 2)
            assert type(batch.data["id"]) is type(batch.info.weight)
        assert "sum: int32[]" in s.info()["schema"]
        assert "extra" not in s.info()["schema"]


@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_a_delivery_hook_may_work_in_place_and_changes_nothing_stored(backend, placement):
    @conduit.register_delivery()
    def in_place(source, sink):
        d = source.read()
        d["id"] += 1000
        sink.write(d)

    with store(backend=backend, placement=placement, delivery=[in_place]) as s:
        fill(s.actor(lanes=2), 12)
        for _ in range(3):
            batch = s.sample(4)
            assert ids(batch) == (batch.info.keys + 1000).tolist()


def test_an_ingestion_hook_may_work_in_place_and_leaves_the_actors_arrays_alone():
    @conduit.register_ingestion()
    def in_place(source, sink):
        d = source.read()
        d["id"] += 1000
        sink.write(d)

    with store(ingestion=[in_place], batch_size=2) as s:
        rows = step(0, 2)
        s.actor(lanes=2).push(rows)
        s.actor().push_trajectory(rows)
        assert rows["id"].tolist() == [0, 1]
        assert set(ids(s.sample(4))) <= {1000, 1001}


def test_hooks_run_in_the_order_given():
    def plus(amount: int):
        return conduit.register_ingestion()(
            lambda source, sink: sink.write({"id": source.read()["id"] * 10 + np.int32(amount)})
        )

    with store(ingestion=[plus(1), plus(2)], batch_size=1) as s:
        s.actor().push({"id": np.array([7], np.int32)})
        assert ids(s.sample(1)) == [712]


@pytest.mark.parametrize("schedule", [None, Schedule(g_ing=3), Schedule(overlap_ing=True, g_ing=2)], ids=str)
def test_off_policy_trajectory_hooks_see_whole_episodes_and_store_them_as_they_end(schedule):
    @conduit.register_ingestion(per="trajectory")
    def number(source, sink):
        sink.write([
            f.with_rows(f.rows | {"at": np.arange(len(f), dtype=np.int32), "of": np.full(len(f), len(f), np.int32)})
            for f in source.read()
        ])  # fmt: skip

    with store(ingestion=[number], batch_size=7, schedule=schedule) as s:
        actor, learner = s.actor(lanes=2), s.learner()
        actor.push(ends(0, 2))
        actor.push(ends(2, 2, terminated=[1]))
        actor.push(ends(4, 2, truncated=[0]))
        actor.push(ends(6, 2))
        actor.close()
        seen = {}
        for _ in range(40):
            batch = learner.pull()
            seen |= dict(
                zip(ids(batch), zip(batch.data["at"].tolist(), batch.data["of"].tolist(), strict=True), strict=True)
            )
    assert seen == {
        1: (0, 2), 3: (1, 2), 0: (0, 3), 2: (1, 3), 4: (2, 3), 6: (0, 1), 5: (0, 2), 7: (1, 2)
    }  # fmt: skip


@pytest.mark.parametrize("on_policy", [False, True])
def test_a_unit_is_a_push_off_policy_and_the_iteration_on_policy(on_policy):
    seen = []

    @conduit.register_ingestion(per="unit")
    def note(source, sink):
        seen.append(source.read()["id"].tolist())
        sink.write(source.read())

    settings = (
        {"rollout_unit": 8, "schedule": Schedule(g_ing=0.5, g_del=0.5)}
        if on_policy
        else {"schedule": Schedule(g_ing=2)}
    )
    with store(ingestion=[note], **settings) as s:
        fill(s.actor(lanes=2), 8)
        assert len(s) == 8
    assert seen == ([list(range(8))] if on_policy else [[0, 1], [2, 3], [4, 5], [6, 7]])


def test_a_hook_with_any_rows_filters_what_is_stored():
    @conduit.register_ingestion(rows="any")
    def even(source, sink):
        d = source.read()
        sink.write({"id": d["id"][d["id"] % 2 == 0]})

    with store(ingestion=[even], sampler=conduit.Prioritized()) as s:
        fill(s.actor(lanes=4), 16)
        fill(s.actor(lanes=1), 1, first=101)
        assert len(s) == 8
        batch = s.sample(8)
        assert ids(batch) == (2 * batch.info.keys).tolist()


FAILURES = [
    pytest.param(stage, schedule, id=f"{stage}-{schedule}")
    for stage in ("ingestion", "delivery")
    for schedule in (Schedule(), Schedule(overlap_ing=True, overlap_del=True))
]


@pytest.mark.parametrize(("stage", "schedule"), FAILURES)
def test_a_hooks_exception_reaches_the_next_push_and_pull_and_the_store_stays_closable(stage, schedule):
    hooks = {stage: [failing(stage, 6 if stage == "ingestion" else 1)]}
    with no_thread_left(), store(schedule=schedule, **hooks) as s:
        actor, learner = s.actor(), s.learner()

        def work() -> None:
            for number in range(200):
                actor.push(step(number))
                if number >= 5:
                    learner.pull()

        for call in (work, lambda: actor.push(step(0)), learner.pull, lambda: s.sample(4)):
            with pytest.raises(HookError, match=rf"{stage} hook 'broken' raised ZeroDivisionError: planted") as caught:
                call()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        s.close()
        s.close()
        with pytest.raises((ClosedError, HookError)):
            actor.push(step(0))


def test_threads_that_wait_hear_of_a_hooks_exception():
    import threading

    heard = []
    with store(ingestion=[failing("ingestion", 0)], timeout_s=20.0) as s:
        learner = s.learner()

        def wait() -> None:
            try:
                learner.pull()
            except HookError as error:
                heard.append(type(error.__cause__))

        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(HookError):
            s.actor().push(step(0))
        thread.join(2)
        assert not thread.is_alive()
    assert heard == [ZeroDivisionError]


@each_backend
def test_a_hook_that_writes_another_number_of_rows_is_refused_with_both(backend):
    @conduit.register_ingestion()
    def halve(source, sink):
        sink.write({name: leaf[::2] for name, leaf in source.read().items()})

    @conduit.register_delivery()
    def first(source, sink):
        sink.write({name: leaf[:1] for name, leaf in source.read().items()})

    rows = {"id": np.arange(4, dtype=np.int32)}
    with (
        store(backend=backend, ingestion=[halve]) as s,
        pytest.raises(HookError, match=r"ingestion hook 'halve' got 4 rows and wrote 2; it declares rows='same'"),
    ):
        s.actor(lanes=4).push(rows)
    with store(backend=backend, delivery=[first]) as s:
        s.actor(lanes=4).push(rows)
        with pytest.raises(HookError, match=r"delivery hook 'first' got 4 rows and wrote 1; .*keeps the batch's rows"):
            s.learner().pull()


def test_hooks_of_the_wrong_kind_are_refused_when_the_store_is_made():
    with pytest.raises(HookError, match="hook for delivery"):
        store(ingestion=[negate])
    with pytest.raises(HookError, match="register_delivery"):
        store(delivery=[lambda source, sink: None])


def test_a_hook_whose_leaves_change_later_is_refused_by_leaf():
    calls = []

    @conduit.register_ingestion()
    def fickle(source, sink):
        calls.append(1)
        d = source.read()
        sink.write({"id": d["id"]} if len(calls) > 1 else {"id": d["id"], "more": d["id"]})

    with store(ingestion=[fickle]) as s:
        s.actor().push(step(0))
        with pytest.raises(ValueError, match=r"stored rows: missing 'more'"):
            s.actor().push(step(1))
