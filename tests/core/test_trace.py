"""Traces: a timeline that says what happened, to the microsecond, on the virtual clock; read back by code of its own."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conduit
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import Task, VirtualClock
from conduit.core import trace as trace_room
from conduit.core.batch import SampleInfo
from conduit.core.ledger import Ledger
from conduit.core.recorder import OPERATOR, PORT, STAGE, Recorder
from conduit.core.timeline import written
from conduit.core.trace import Trace
from conduit.errors import SettingError, TraceError
from conduit.topology import preset

INGESTION_S, DELIVERY_S, ROLLOUT_S, UPDATE_S = 0.020, 0.025, 0.030, 0.040
BEHIND = conduit.Schedule(overlap_ing=True, overlap_del=True)


@dataclass
class Block:
    """A slice as a reader of the file sees it."""

    name: str
    category: str
    thread: str
    args: dict[str, Any]
    begin_us: float
    end_us: float = -1.0
    inside: Block | None = None

    @property
    def seconds(self) -> float:
        return round(1e-6 * (self.end_us - self.begin_us), 9)


@dataclass
class Timeline:
    """What a file says, checked against the format as it is read: what each phase must have, times that ascend, slices that nest and end,
    arrows that begin, go on and end, each inside a slice."""

    about: dict[str, Any]
    blocks: list[Block] = field(default_factory=list)
    arrows: dict[int, list[Block]] = field(default_factory=dict)
    counts: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    instants: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> Timeline:
        whole = json.loads(text)
        found = cls(whole["otherData"])
        names: dict[int, str] = {}
        opened: dict[int, list[Block]] = {}
        ended: set[int] = set()
        latest = 0.0
        for event in whole["traceEvents"]:
            assert event["pid"] == 1
            if event["ph"] == "M":
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
                if event["name"] == "thread_name":
                    names[event["tid"]] = event["args"]["name"]
                continue
            assert event["ts"] >= latest
            latest = event["ts"]
            if event["ph"] == "C":
                assert "tid" not in event
                (value,) = event["args"].values()
                found.counts.setdefault(event["name"], []).append((latest, value))
                continue
            assert names[event["tid"]]
            assert event["tid"] != event["pid"]
            stack = opened.setdefault(event["tid"], [])
            match event["ph"]:
                case "B":
                    inside = stack[-1] if stack else None
                    block = Block(
                        event["name"], event["cat"], names[event["tid"]], event["args"], latest, inside=inside
                    )
                    stack.append(block)
                    found.blocks.append(block)
                case "E":
                    stack.pop().end_us = latest
                case "s":
                    assert event["name"]
                    assert event["id"] not in found.arrows
                    found.arrows[event["id"]] = [stack[-1]]
                case "t" | "f":
                    assert event["id"] not in ended
                    found.arrows[event["id"]].append(stack[-1])
                    if event["ph"] == "f":
                        assert event["bp"] == "e"
                        ended.add(event["id"])
                case "i":
                    assert event["s"] == "g"
                    found.instants.append(event)
                case other:
                    raise AssertionError(other)
        assert not any(opened.values())
        assert ended == set(found.arrows)
        return found

    def all(self, name: str, thread: str | None = None) -> list[Block]:
        return [each for each in self.blocks if each.name == name and thread in (None, each.thread)]

    def seconds(self, name: str, thread: str | None = None) -> list[float]:
        return [each.seconds for each in self.all(name, thread)]


def hooks(clock: VirtualClock):
    @conduit.register_ingestion()
    def tidy(actor_in, exp_out):
        clock.sleep(INGESTION_S)
        exp_out.write(actor_in.read())

    @conduit.register_delivery()
    def prepare(exp_in, learn_out):
        clock.sleep(DELIVERY_S)
        learn_out.write(exp_in.read())

    return {"ingestion": [tidy], "delivery": [prepare]}


def rows(value: float, count: int = 2) -> dict[str, Any]:
    return {"x": np.full((count, 3), value, np.float32)}


@contextmanager
def opened(clock: VirtualClock, **settings: Any) -> Iterator[conduit.Store]:
    settings = {"backend": "reference", "capacity": 64, "batch_size": 4, "placement": "pageable", **settings}
    if settings.get("mode") == "on_policy":
        del settings["capacity"]
    with conduit.Store(clock=clock, **settings) as store:
        yield store


def traced(
    path: Path, scene: Callable[[VirtualClock, conduit.Store], object], seed: int = 0, **settings: Any
) -> Timeline:
    """What the file says after `scene` was played in the block."""
    clock = VirtualClock(seed)

    def main() -> None:
        hooked = {**hooks(clock), **settings}
        with opened(clock, **hooked) as store, store.trace(path):
            scene(clock, store)

    clock.run(main)
    return Timeline.of(path.read_text(encoding="utf-8"))


def spawned(clock: VirtualClock, call: Callable[[], object], name: str) -> Task:
    def target() -> None:
        call()

    return clock.spawn(target, name)


def one_thread(clock: VirtualClock, store: conduit.Store) -> None:
    actor, learner = store.actor(lanes=2), store.learner()
    for number in range(4):
        clock.sleep(ROLLOUT_S)
        actor.push(rows(number))
    for _ in range(2):
        learner.pull()
        clock.sleep(UPDATE_S)
    store.advance()


def two_threads(clock: VirtualClock, store: conduit.Store) -> None:
    actor, learner = store.actor(lanes=2), store.learner()

    def act() -> None:
        for number in range(8):
            clock.sleep(ROLLOUT_S)
            actor.push(rows(number))

    def learn() -> None:
        for _ in range(4):
            learner.pull()
            clock.sleep(UPDATE_S)

    tasks = [clock.spawn(act, "actor"), clock.spawn(learn, "learner")]
    assert all(task.join() for task in tasks)


# What is in it


def test_in_line_the_operators_are_inside_the_calls_and_every_slice_is_as_long_as_it_took(tmp_path):
    found = traced(tmp_path / "t.json", one_thread)
    # What comes before a thread's first call, or after its last, can't be told from calls.
    assert found.seconds("rollout") == [ROLLOUT_S] * 3
    assert found.seconds("push") == found.seconds("ingestion") == [INGESTION_S] * 4
    assert found.seconds("pull") == [DELIVERY_S] * 2
    assert [each.seconds for each in found.all("delivery") if each.args] == [DELIVERY_S] * 2
    assert found.seconds("update") == [UPDATE_S] * 2
    assert found.seconds("advance") == [0.0]
    assert {each.inside.name for each in found.all("ingestion") if each.inside} == {"push"}
    assert {each.inside.name for each in found.all("delivery") if each.inside} == {"pull"}
    assert all(each.args["inferred"] for each in found.all("rollout") + found.all("update"))
    assert {each.thread for each in found.blocks} == {threading.current_thread().name}
    # Nothing crossed to another thread on the way: from the push, which ingested it, straight to the pull, which prepared it.
    assert [[each.name for each in way] for way in found.arrows.values()] == [["push", "pull"]] * 2
    assert not found.counts.get("waiting for ingestion")
    assert (found.about["mode"], found.about["backend"], found.about["dropped_events"]) == (
        "off_policy",
        "reference",
        0,
    )


def test_behind_the_stages_each_operator_has_its_track_and_the_arrow_goes_by_way_of_both(tmp_path):
    found = traced(tmp_path / "t.json", two_threads, schedule=BEHIND)
    hook = [each.seconds for each in found.all("ingestion", "conduit-ingestion") if each.seconds]
    # The last push is ingested when the next comes; its hook ran before.
    assert hook == [INGESTION_S] * 8
    assert [each.seconds for each in found.all("delivery", "conduit-delivery-0") if each.args][:4] == [DELIVERY_S] * 4
    assert found.seconds("push", "actor") == [0.0] * 8
    assert found.seconds("rollout", "actor") == [ROLLOUT_S] * 7
    assert found.seconds("update", "learner") == [UPDATE_S] * 3
    ways = [[(each.name, each.thread) for each in way] for way in found.arrows.values()]
    way = [
        ("push", "actor"),
        ("publish", "conduit-ingestion"),
        ("delivery", "conduit-delivery-0"),
        ("pull", "learner"),
    ]
    assert ways == [way] * 4


def test_a_pull_says_what_it_waited_for(tmp_path):
    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        actor, learner = store.actor(lanes=2), store.learner()
        task = spawned(clock, learner.pull, "learner")
        for number in range(2):
            clock.sleep(ROLLOUT_S)
            actor.push(rows(number))
        assert task.join()

    found = traced(tmp_path / "t.json", scene, schedule=BEHIND)
    (first,) = found.all("pull")
    waits = [(each.name, each.seconds) for each in found.blocks if each.inside is first]
    # Four rows take two pushes, of which the second comes when the first one's hook is over; then its own runs, then delivery's.
    assert waits == [
        ("starved", 2 * ROLLOUT_S),
        ("ingesting", INGESTION_S),
        ("preparing", DELIVERY_S),
    ]
    assert first.seconds == pytest.approx(2 * ROLLOUT_S + INGESTION_S + DELIVERY_S)
    assert all(each.category == "wait" for each in found.blocks if each.inside is first)


def test_an_actor_that_waits_for_the_next_iteration_is_blocked(tmp_path):
    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        actor, learner = store.actor(lanes=2), store.learner()

        def act() -> None:
            for version in range(2):
                for _ in range(2):
                    clock.sleep(ROLLOUT_S)
                    actor.push(rows(version), version=version)

        task = clock.spawn(act, "actor")
        learner.pull()
        clock.sleep(UPDATE_S)
        store.advance()
        assert task.join()

    found = traced(tmp_path / "t.json", scene, mode="on_policy", rollout_unit=4)
    (blocked,) = found.all("blocked")
    assert blocked.inside is found.all("push", "actor")[2]
    # The learner got the iteration when its last push had ended, and took so long; meanwhile the actor acted.
    assert blocked.seconds == pytest.approx(DELIVERY_S + UPDATE_S - ROLLOUT_S)
    assert found.seconds("rollout", "actor") == [ROLLOUT_S] * 3
    assert found.all("advance")


def test_marked_stages_are_as_they_were_marked(tmp_path):
    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        actor, learner = store.actor(lanes=2), store.learner()
        with store.rollout():
            for number in range(3):
                clock.sleep(ROLLOUT_S)
                actor.push(rows(number))
        with store.update():
            learner.pull()
            clock.sleep(UPDATE_S)
        clock.sleep(5.0)
        actor.push(rows(3))

    found = traced(tmp_path / "t.json", scene)
    (rollout,), (update,) = found.all("rollout"), found.all("update")
    assert rollout.seconds == pytest.approx(3 * (ROLLOUT_S + INGESTION_S))
    assert update.seconds == pytest.approx(DELIVERY_S + UPDATE_S)
    assert [each.inside for each in found.all("push")] == [rollout] * 3 + [None]
    assert found.all("pull")[0].inside is update
    assert rollout.args == {}


def test_args_say_which_rows_and_batches(tmp_path):
    found = traced(tmp_path / "t.json", two_threads, schedule=BEHIND)
    assert [each.args for each in found.all("push")] == [{"rows": 2, "bytes": 24, "taken": True}] * 8
    told = [each.args for each in found.all("publish")]
    assert [(each["first key"], each["last key"], each["pushes"]) for each in told[:3]] == [
        (0, 1, 1),
        (2, 3, 1),
        (4, 5, 1),
    ]
    pulls = [each.args for each in found.all("pull")]
    assert [each["batch"] for each in pulls] == [0, 1, 2, 3]
    assert [each["priority_lag"] for each in pulls] == [0, 1, 1, 1]
    assert all(each["oldest key"] <= each["newest key"] <= each["frontier"] for each in pulls)
    assert {(each["rows"], each["bytes"]) for each in pulls} == {(4, 48)}
    assert [each.args["batches"] for each in found.all("delivery") if each.args][:4] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "schedule", [None, BEHIND, conduit.Schedule(True, 3, True, 2), conduit.Schedule(False, 2, True, 3)]
)
@pytest.mark.parametrize("seed", range(3))
def test_each_arrow_comes_from_the_push_that_brought_the_newest_row(tmp_path, schedule, seed):
    """Two actors, whose every push has another number of rows; rows tell which that was."""
    batches: list[conduit.Batch] = []

    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        def act(number: int) -> None:
            actor = store.actor()
            for step in range(6):
                clock.sleep(ROLLOUT_S)
                size = 1 + 2 * step + number
                actor.push_trajectory(rows(size, size))

        learner = store.learner()
        tasks = [clock.spawn(lambda n=n: act(n), f"actor-{n}") for n in range(2)]
        for _ in range(6):
            batches.append(learner.pull())
            clock.sleep(UPDATE_S)
        assert all(task.join() for task in tasks)

    found = traced(tmp_path / "t.json", scene, seed, schedule=schedule, capacity=512)
    pulls = {each.args["batch"]: each for each in found.all("pull")}
    ends = {id(way[-1]): way for way in found.arrows.values()}
    assert len(pulls) == len(ends) == 6
    for batch in batches:
        info: Any = batch.info
        data: Any = batch.data
        newest = int(np.argmax(info.keys))
        way = ends[id(pulls[info.number])]
        assert way[0].name == "push"
        assert way[0].args["rows"] == int(data["x"][newest, 0])
        assert [each.begin_us for each in way[:-1]] == sorted(each.begin_us for each in way[:-1])
        assert way[-1].end_us >= way[-2].begin_us
        for step in way[1:-1]:
            args = step.args
            brought = step.name in ("ingestion", "publish") and args["first key"] <= info.keys.max() <= args["last key"]
            assert brought or (step.name == "delivery" and info.number in args["batches"])


def test_where_hooks_hold_rows_the_arrow_comes_from_the_push_that_ended_their_trajectory(tmp_path):
    @conduit.register_ingestion(per="trajectory")
    def whole(actor_in, exp_out):
        exp_out.write(actor_in.read())

    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        actor = store.actor()
        for step in range(6):
            clock.sleep(ROLLOUT_S)
            actor.push({**rows(step, 1), "terminated": np.array([step == 4])})
        store.learner().pull()

    for schedule, told in ((None, "ingestion"), (BEHIND, "publish")):
        found = traced(tmp_path / "t.json", scene, ingestion=[whole], schedule=schedule)
        (way,) = found.arrows.values()
        assert way[0] is found.all("push")[4]
        assert [each.args["rows"] for each in found.all(told) if each.args][:5] == [0, 0, 0, 0, 5]
    # Rows that a hook holds don't wait for ingestion.
    assert max(count for _, count in found.counts["waiting for ingestion"]) <= 2


def test_rows_that_wait_and_batches_that_are_ready_are_counted(tmp_path):
    found = traced(tmp_path / "t.json", two_threads, schedule=conduit.Schedule(True, 1, True, 2))
    waiting = [count for _, count in found.counts["waiting for ingestion"]]
    assert set(waiting) >= {0, 2}
    assert min(waiting) == 0
    ready = [count for _, count in found.counts["outbox of learner 0 of main"]]
    assert max(ready) >= 2
    assert all(abs(after - before) == 1 for before, after in pairwise(ready))


def test_a_push_that_was_dropped_waits_for_nothing(tmp_path):
    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        actor = store.actor(lanes=2)
        for number in range(6):
            actor.push(rows(number))
        clock.sleep(1.0)
        actor.push(rows(9))
        clock.sleep(1.0)

    found = traced(tmp_path / "t.json", scene, schedule=conduit.Schedule(True, 1), inbox_units=2, when_full="drop")
    taken = [each.args["taken"] for each in found.all("push")]
    assert 0 < sum(taken) < 7
    # The last one is held back, and has no place so far.
    assert found.counts["waiting for ingestion"][-1][1] == 2


def test_a_migration_shows_its_phases_and_its_pause(tmp_path):
    path = tmp_path / "t.json"
    clock = VirtualClock()
    backend = EmulatedBackend(preset("a100x8"), clock=clock)
    moves: list[conduit.Migrated] = []

    def main() -> None:
        with opened(clock, backend=backend, capacity=4096, placement="device:0") as store:
            store.actor().push_trajectory({"x": np.zeros((4096, 2048), np.float32)})
            with store.trace(path):
                moves.append(store.migrate("pageable"))

    clock.run(main)
    found, moved = Timeline.of(path.read_text()), moves[0]
    (migration,), (pause,) = found.all("migration"), found.all("pause")
    assert migration.seconds == pytest.approx(moved.seconds, abs=2e-9)
    assert pause.seconds == pytest.approx(moved.pause_s, abs=2e-9)
    assert pause.inside is migration
    for name, seconds in moved.phases.items():
        (phase,) = found.all(name)
        assert phase.inside is (pause if name in ("drain", "delta", "rebind") else migration)
        assert phase.seconds == pytest.approx(seconds, abs=2e-9)
    assert found.all("precopy")[0].seconds > 0.0
    assert (migration.args["rows"], migration.args["bytes"]) == (4096, moved.moved_bytes)


def test_a_schedule_that_is_switched_shows_for_the_whole_store(tmp_path):
    chosen: list[dict[str, Any]] = []

    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        actor, learner = store.actor(lanes=2), store.learner()
        for number in range(150):
            for _ in range(2):
                clock.sleep(ROLLOUT_S)
                actor.push(rows(number))
            learner.pull()
            clock.sleep(UPDATE_S)
        chosen.append(asdict(store.schedule))

    switches = traced(tmp_path / "t.json", scene, schedule="auto").instants
    assert len(switches) > 3
    assert {each["name"] for each in switches} == {"schedule"}
    assert switches[-1]["args"] == chosen[0]


# When, and how much


@pytest.mark.parametrize("seed", range(3))
def test_two_runs_on_the_virtual_clock_give_the_same_bytes(tmp_path, seed):
    for name in ("one", "two"):
        traced(tmp_path / name, two_threads, seed, schedule=conduit.Schedule(True, 2, True, 2))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_threads_that_have_ended_keep_their_tracks_even_of_equal_names(tmp_path):
    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        actor = store.actor(lanes=2)
        for number in range(3):
            assert spawned(clock, lambda n=number: actor.push(rows(n)), "visitor").join()

    path = tmp_path / "t.json"
    found = traced(path, scene)
    assert found.seconds("push", "visitor") == [INGESTION_S] * 3
    names = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("name") == "thread_name"]
    assert [each["args"]["name"] for each in names].count("visitor") == 3


def test_only_the_block_is_recorded(tmp_path):
    path = tmp_path / "t.json"
    clock = VirtualClock()

    def main() -> None:
        with opened(clock) as store:
            actor, learner = store.actor(lanes=2), store.learner()
            actor.push(rows(0))
            clock.sleep(1.0)
            with store.trace(path):
                clock.sleep(0.5)
                actor.push(rows(1))
                learner.pull()
                clock.sleep(0.25)
                actor.push(rows(2))
            clock.sleep(2.0)
            actor.push(rows(3))

    clock.run(main)
    found = Timeline.of(path.read_text())
    # What began before it is there from its beginning on.
    assert (found.seconds("rollout"), found.seconds("update")) == ([0.5], [0.25])
    assert [each.args["rows"] for each in found.all("push")] == [2, 2]
    assert max(each.end_us for each in found.blocks) == 0.75e6


def test_a_pull_that_hangs_is_seen_to_hang(tmp_path):
    path = tmp_path / "t.json"
    clock = VirtualClock()

    def main() -> None:
        with opened(clock) as store:
            learner = store.learner()

            def hang() -> None:
                with pytest.raises(conduit.errors.CancelledError):
                    learner.pull()

            with store.trace(path):
                clock.sleep(0.5)
                hanging = clock.spawn(hang, "learner")
                clock.sleep(3.0)
            assert learner.cancel() == 1
            assert hanging.join()

    clock.run(main)
    (pull,) = Timeline.of(path.read_text()).all("pull", "learner")
    assert (pull.begin_us, pull.seconds, pull.args) == (0.5e6, 3.0, {"unfinished": True})


def test_a_call_that_fails_is_there_like_any_other(tmp_path):
    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        with pytest.raises(conduit.errors.WaitTimeout):
            store.learner().pull(timeout_s=0.75)

    found = traced(tmp_path / "t.json", scene)
    assert found.seconds("pull") == [0.75]
    assert found.seconds("starved") == [0.75]


def test_of_too_many_events_the_oldest_are_dropped_and_counted(tmp_path):
    path, few = tmp_path / "t.json", tmp_path / "few.json"
    whole = traced(path, two_threads, schedule=BEHIND)
    clock = VirtualClock()

    def main() -> None:
        with opened(clock, schedule=BEHIND, **hooks(clock)) as store, store.trace(few, events=20):
            two_threads(clock, store)

    clock.run(main)
    found = Timeline.of(few.read_text())
    assert found.about["events"] == 20
    assert found.about["dropped_events"] == whole.about["events"] - 20
    last = whole.all("pull")[-1]
    assert [(each.args, each.begin_us) for each in found.all("pull")][-1] == (last.args, last.begin_us)
    # Arrows whose pushes were dropped are left out, and what waited is counted as it was.
    assert len(found.arrows) < len(whole.arrows)
    waiting = [each.counts["waiting for ingestion"][-1] for each in (found, whole)]
    assert waiting[0] == waiting[1]


def test_without_a_trace_nothing_is_recorded(monkeypatch):
    clock = VirtualClock()
    monkeypatch.setattr(Recorder, "_track", lambda self: pytest.fail("somebody recorded"))

    def main() -> None:
        with opened(clock, schedule=BEHIND, **hooks(clock)) as store:
            assert store.ledger.recorder is None
            two_threads(clock, store)

    clock.run(main)


def test_on_the_real_clock_threads_that_race_give_a_timeline_that_holds(tmp_path):
    path = tmp_path / "t.json"
    with conduit.Store(
        backend="reference",
        capacity=512,
        batch_size=8,
        placement="pageable",
        schedule=conduit.Schedule(True, 2, True, 2),
    ) as store:
        learner = store.learner()

        def act() -> None:
            actor = store.actor(lanes=2)
            for number in range(200):
                actor.push(rows(number))

        threads = [threading.Thread(target=act, name=f"actor-{n}") for n in range(3)]
        with store.trace(path) as trace:
            for each in threads:
                each.start()
            for _ in range(60):
                learner.pull()
            for each in threads:
                each.join()
        assert trace.path == str(path)
        assert store.ledger.recorder is None
    found = Timeline.of(path.read_text())
    assert Counter(each.name for each in found.blocks)["push"] == 600
    assert len(found.all("pull")) == len(found.arrows) == 60
    assert {each.thread for each in found.all("push")} == {"actor-0", "actor-1", "actor-2"}


# The file


def test_the_file_is_written_when_the_block_raises_and_the_error_is_the_block_s(tmp_path):
    path = tmp_path / "t.json"

    def scene(clock: VirtualClock, store: conduit.Store) -> None:
        store.actor(lanes=2).push(rows(0))
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        traced(path, scene)
    assert len(Timeline.of(path.read_text()).all("push")) == 1
    assert os.listdir(tmp_path) == ["t.json"]


def store_of(clock: VirtualClock | None = None) -> conduit.Store:
    return conduit.Store(backend="reference", capacity=8, batch_size=2, placement="pageable", clock=clock)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (lambda tmp: tmp, "it is a folder; expected the path of a file"),
        (lambda tmp: tmp / "none" / "t.json", "No such file or directory"),
        (lambda tmp: tmp / "file" / "t.json", "Not a directory"),
        (lambda tmp: str(tmp / "a\0b"), "null byte"),
    ],
)
def test_a_path_that_can_t_be_written_is_refused_before_the_block(tmp_path, place, why):
    (tmp_path / "file").write_text("")
    path = place(tmp_path)
    with store_of() as store:
        with pytest.raises(TraceError, match=why) as raised, store.trace(path):
            pytest.fail("the block ran")
        assert repr(str(path)) in str(raised.value)
        # And the next may be taken.
        with store.trace(tmp_path / "t.json"):
            pass
    assert sorted(os.listdir(tmp_path)) == ["file", "t.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with store_of() as store, pytest.raises(TraceError, match="Permission denied"), store.trace(tmp_path / "t.json"):
        pytest.fail("the block ran")


def test_one_trace_at_a_time(tmp_path):
    with store_of() as store, store.trace(tmp_path / "one.json"):
        with (
            pytest.raises(TraceError, match=r"two\.json.*is being traced into .*one\.json"),
            store.trace(tmp_path / "two.json"),
        ):
            pytest.fail("the block ran")
        store.actor().push({"x": np.zeros(1)})
    assert len(Timeline.of((tmp_path / "one.json").read_text()).all("push")) == 1


def test_two_stores_don_t_write_into_one_file(tmp_path):
    there = pytest.raises(TraceError, match="another trace is being written there")
    with store_of() as one, store_of() as two, one.trace(tmp_path / "t.json"), there, two.trace(tmp_path / "t.json"):
        pytest.fail("the block ran")


@pytest.mark.parametrize(("path", "events"), [(5, 10), (None, 10), ("t.json", 0), ("t.json", 1.5)])
def test_what_is_no_path_or_no_number_is_refused(path, events):
    with store_of() as store, pytest.raises(SettingError, match="trace"):
        store.trace(path, events=events)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    def full(recorder: object, about: object) -> Iterator[str]:
        yield "{"
        raise OSError(28, "No space left on device")

    path = tmp_path / "t.json"
    path.write_text("before")
    monkeypatch.setattr(trace_room, "written", full)
    with store_of() as store:
        with pytest.raises(TraceError, match=r"t\.json.*No space left"), store.trace(path):
            pass
        with pytest.raises(LookupError) as raised, store.trace(path):
            raise LookupError("mine")
        assert "No space left" in raised.value.__notes__[0]
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["t.json"]


# The recorder, by itself


def text_of(recorder: Recorder) -> Timeline:
    return Timeline.of("".join(written(recorder, {})))


def test_a_clock_that_jumps_back_tears_no_slice_apart():
    times = iter([100.0, 104.0])
    recorder = Recorder(lambda: next(times), 100, "t.json")
    outer = recorder.begin("rollout", 101.0, STAGE)
    inner = recorder.begin("push", 102.0, PORT)
    recorder.passed("ingestion", 102.0, 101.5, OPERATOR)
    recorder.end(inner, "push", 102.0, 101.25, PORT)
    recorder.end(outer, "rollout", 101.0, 103.0, STAGE)
    recorder.stop()
    found = text_of(recorder)
    assert [(each.name, each.seconds) for each in found.blocks] == [("rollout", 2.0), ("push", 0.0), ("ingestion", 0.0)]


def test_slices_without_length_are_in_what_holds_them_and_in_nothing_else():
    times = iter([0.0, 9.0])
    recorder = Recorder(lambda: next(times), 100, "t.json")
    for _ in range(2):
        push = recorder.begin("push", 1.0, PORT)
        recorder.passed("ingestion", 1.0, 1.0, OPERATOR)
        recorder.end(push, "push", 1.0, 1.0, PORT)
    update = recorder.begin("update", 1.0, STAGE)
    recorder.end(update, "update", 1.0, 2.0, STAGE)
    recorder.stop()
    found = text_of(recorder)
    assert [each.name for each in found.blocks] == ["push", "ingestion", "push", "ingestion", "update"]
    assert [each.inside and each.inside.name for each in found.blocks] == [None, "push", None, "push", None]


@pytest.mark.parametrize(("key", "push"), [(9, None), (10, 1), (11, 2), (12, 2), (13, 3), (15, 3), (16, None)])
def test_of_a_group_each_key_is_the_push_s_that_brought_it(key, push):
    recorder = Recorder(lambda: 9.0, 100, "t.json")
    units = []
    for size in (1, 2, 3):
        begun = recorder.begin("push", 9.0 + size, PORT)
        units.append((recorder.pushed({"x": np.zeros((size, 2))}, size), size))
        recorder.end(begun, "push", 9.0 + size, 9.5 + size, PORT, took=1)
    recorder.ingested(units, 10, 16)
    recorder.passed("ingestion", 13.0, 14.0, OPERATOR)
    pull = recorder.begin("pull", 15.0, PORT)
    keys = np.array([key - 5, key])
    info = SampleInfo(
        number=0,
        keys=keys,
        frontier=20,
        table_size=9,
        priority_lag=0,
        probability=1,
        priority=1,
        policy_version=keys,
        store_version=0,
        weight=1,
    )
    recorder.pulled(conduit.Batch({"x": np.zeros(2)}, info), None)
    recorder.end(pull, "pull", 15.0, 16.0, PORT, took=1)
    recorder.stop()
    found = text_of(recorder)
    assert [way[0].args["rows"] for way in found.arrows.values()] == ([] if push is None else [push])


def test_what_ends_after_the_end_changes_nothing():
    times = iter([0.0, 2.0, 3.0])
    recorder = Recorder(lambda: next(times), 100, "t.json")
    push = recorder.begin("push", 1.0, PORT)
    recorder.stop()
    before = "".join(written(recorder, {}))
    recorder.end(push, "push", 1.0, 5.0, PORT)
    recorder.passed("ingestion", 3.0, 4.0, OPERATOR)
    recorder.count("outbox", 1)
    assert "".join(written(recorder, {})) == before
    assert [(each.name, each.seconds) for each in text_of(recorder).blocks] == [("push", 1.0)]


def test_what_an_interrupt_left_open_inside_ends_with_what_is_around_it():
    times = iter([0.0, 9.0])
    recorder = Recorder(lambda: next(times), 100, "t.json")
    outer = recorder.begin("rollout", 1.0, STAGE)
    recorder.begin("push", 2.0, PORT)
    recorder.end(outer, "rollout", 1.0, 3.0, STAGE)
    recorder.stop()
    assert [(each.name, each.seconds) for each in text_of(recorder).blocks] == [("rollout", 2.0)]


def test_a_trace_needs_no_store(tmp_path):
    class Something:
        recorder: Recorder | None = None

        def now(self) -> float:
            return 0.0

        def record(self, recorder: Recorder) -> bool:
            self.recorder = recorder
            return True

    with Trace(tmp_path / "t.json", Something(), about={"what": "nothing"}):
        pass
    found = Timeline.of((tmp_path / "t.json").read_text())
    assert (found.about["what"], found.blocks) == ("nothing", [])


def test_a_trace_may_end_while_others_are_telling_it():
    """Between any look at whether there is a recorder and the next one it may be gone."""

    class Fleeting(Ledger):
        looks = 0

        def __getattribute__(self, name: str) -> Any:
            if name != "recorder":
                return super().__getattribute__(name)
            self.looks += 1
            return told if self.looks % 2 else None

    ledger = Fleeting(VirtualClock())
    told = Recorder(ledger.now, 1000, "t.json")
    for _ in range(2):
        with ledger.operator("ingestion"), ledger.port("push"):
            ledger.waited(1.0)
            ledger.passed("rebind", 0.0, {})
        with ledger.mark("update"), ledger.port("pull"):
            pass
        # From an odd look on and from an even one.
        ledger.looks += 1
    assert told.events
    files = sorted(Path(conduit.__file__).parent.rglob("*.py"))
    twice = [path.name for path in files if re.search(r"\.recorder\.[a-z]+\(", path.read_text())]
    assert twice == [], "looked at twice"
