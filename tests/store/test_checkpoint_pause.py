"""For how long a save holds others up: for what came meanwhile, never for how large the store is. And what it copies while they go
on is of one moment all the same."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

import conduit
from conduit.clock import VirtualClock
from conduit.core import checkpoint, journal, order, places
from conduit.core.archive import Archive
from conduit.core.journal import Copying, Journal, Later
from conduit.core.ring import Window, by_age
from conduit.errors import CheckpointError, ClosedError, SamplerError, WaitTimeout
from tests.store.plays import Player, off_policy_events
from tests.store.rows import fill, played, step, store

restore = conduit.Store.restore
NEXT = {"next_obs": conduit.Next("obs")}
SETTINGS: Mapping[str, dict[str, Any]] = {
    "uniform": {},
    "uniform, twice": {"max_times_sampled": 2},
    "prioritized": {"sampler": conduit.Prioritized(alpha=0.7, beta=0.5)},
    "prioritized, twice": {"sampler": conduit.Prioritized(), "max_times_sampled": 2},
    "queue": {"limiter": conduit.MinSize(2), "tables": {"more": conduit.Table.queue(10)}},
    "fifo": {"sampler": conduit.Fifo()},
    "lifo, twice": {"sampler": conduit.Lifo(), "max_times_sampled": 2},
    "max heap": {"sampler": conduit.MaxHeap()},
    "min heap, twice": {"sampler": conduit.MinHeap(), "max_times_sampled": 2},
    "without replacement": {"sampler": conduit.WithoutReplacement()},
    "without replacement, thrice": {"sampler": conduit.WithoutReplacement(), "max_times_sampled": 3},
    "recency": {"sampler": conduit.Recency(half_life=5.0)},
    "stratified, twice": {"sampler": conduit.Stratified(), "max_times_sampled": 2},
    "two tables": {"tables": {"more": conduit.Table(conduit.Prioritized(), max_times_sampled=3)}},
    "nexts": {"derive": NEXT, "sampler": conduit.Prioritized(), "max_times_sampled": 9},
    "n steps": {"derive": NEXT, "item": conduit.NStep(2, 0.9), "sampler": conduit.MaxHeap()},
    "stacks": {"derive": {"stack": conduit.Stack("obs", 3)}, "sampler": conduit.WithoutReplacement()},
    "sequences": {"item": conduit.Sequence(3, burn_in=1, pad="zero")},
    "groups": {"item": conduit.Group(2, by="prompt"), "sampler": conduit.Prioritized()},
    "lifo leaves": {"remover": conduit.Lifo(), "sampler": conduit.Prioritized()},
    "any leaves": {"remover": conduit.Uniform(), "max_times_sampled": 2},
    "the lowest leaves": {"remover": conduit.MinHeap(), "sampler": conduit.Prioritized()},
    "bounded": {"mode": "bounded", "max_staleness": 1},
    "bounded nexts": {"mode": "bounded", "max_staleness": 1, "derive": NEXT},
    "behind": {
        "schedule": conduit.Schedule(overlap_ing=True, overlap_del=True),
        "derive": NEXT,
        "sampler": conduit.Prioritized(),
    },
}


class Meddled:
    """A save in whose copies others meddle: between any two looks at an array, and from one array to the next, events happen. Where a slot
    changed amid its copy, the copy is no state that it ever had."""

    def __init__(self, patch: pytest.MonkeyPatch, player: Player, events: list[Any], most: int) -> None:
        self.player, self.events, self.most = player, events, most
        self.answers: list[Any] = []
        self.cut = 0
        """How many events came before the moment that is saved."""
        self.drawn: dict[str, Any] = {}
        self.torn = 0
        patch.setattr(journal, "by_age", self.by_age)
        meddled = self

        class Marked(Copying):
            def __enter__(self) -> Copying:
                meddled.cut, meddled.drawn = len(meddled.answers), dict(player.drawn)
                return super().__enter__()

        patch.setattr(checkpoint, "Copying", Marked)

    def happen(self, count: int) -> None:
        for event in self.events[len(self.answers) : min(len(self.answers) + count, self.most)]:
            self.answers.append(self.player.happens(event))

    def by_age(self, values: Any, window: Window) -> Any:
        before = by_age(values, window)
        self.happen(3)
        copy = by_age(values, window)
        size = copy.dtype.itemsize
        changed = (before.view(np.uint8).reshape(-1, size) != copy.view(np.uint8).reshape(-1, size)).any(axis=1)
        copy[changed] = ~copy[changed] if copy.dtype == np.bool_ else np.array(0x55, copy.dtype)
        self.torn += int(np.count_nonzero(changed))
        return copy


@pytest.mark.parametrize("kind", SETTINGS)
def test_what_is_saved_amid_changes_goes_on_as_the_store_did(tmp_path, kind):
    asked = {"mode": "off_policy", "capacity": 14, "batch_size": 2, "timeout_s": 5.0, "seed": 3, **SETTINGS[kind]}
    tables = ["main", *asked.get("tables", ())]
    torn = meddled_events = 0

    def scene(clock: VirtualClock) -> None:
        nonlocal torn, meddled_events
        chance = random.Random(number)
        events = off_policy_events(chance, 70, tables)
        player = Player(conduit.Store(backend="reference", clock=clock, **asked), tables)
        path = tmp_path / f"{number}"
        with player.store, pytest.MonkeyPatch.context() as patch:
            meddled = Meddled(patch, player, events, 50)
            for folder in range(2):
                # The second is incremental.
                meddled.happen(chance.randint(10, 20))
                player.store.save(path)
                with restore(path, backend="reference", lanes="continue", clock=clock) as other:
                    again = Player(other, tables)
                    again.drawn = dict(meddled.drawn)
                    meddled_events += len(meddled.answers) - meddled.cut
                    answers = [again.happens(event) for event in events[meddled.cut : len(meddled.answers)]]
                    assert answers == meddled.answers[meddled.cut :], f"the {folder}. save"
                    if folder:
                        rest = events[len(meddled.answers) :]
                        assert [again.happens(each) for each in rest] == [player.happens(each) for each in rest]
                    assert again.told() == player.told()
            torn += meddled.torn

    for number in range(4):
        played(number, scene)
    # Where arrays are kept by slot, something was caught amid its change.
    assert (meddled_events > 10 and torn > 0) or kind in ("uniform", "recency")


# With threads


class Program:
    """Pushes, pulls, updates and samples, by turns."""

    def __init__(self, s: conduit.Store) -> None:
        self.store, self.actor, self.learner = s, s.actor(2), s.learner()
        self.done = 0

    def go_on(self) -> None:
        number, what = divmod(self.done, 4)
        if what == 0:
            self.actor.push({**step(2 * number, 2), "terminated": np.arange(2) == number % 7})
        elif what == 1:
            self.keys = self.learner.pull(timeout_s=5).info.keys
        elif what == 2:
            self.store.update_priorities(self.keys, (self.keys + number) % 13 / 4 + 0.25)
        else:
            self.store.sample(3)
        self.done += 1

    @property
    def came(self) -> tuple[int, int, int]:
        info = self.store.info()
        return info["inserted"], info["tables"]["main"]["sampled"], sum(info["priorities"].values())


def assert_same(one: Any, other: Any, where: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name], f"{where}/{name}")
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), where
    else:
        assert one == other, where


@pytest.mark.parametrize("kind", ["links", "places"])
def test_what_is_saved_while_threads_are_at_work_is_what_a_twin_is_at_rest(tmp_path, kind):
    settings: dict[str, Any] = {"sampler": conduit.Prioritized(), "max_times_sampled": 10_000, "capacity": 30_000}
    settings |= {"derive": NEXT} if kind == "links" else {"remover": conduit.MinHeap()}
    saves, stop = 6, threading.Event()

    def filled(s: conduit.Store) -> Program:
        s.actor().push_trajectory({**step(0, 30_000), "terminated": np.zeros(30_000, np.bool_)})
        return Program(s)

    def work(program: Program) -> None:
        while not stop.is_set():
            program.go_on()

    with store(**settings) as one:
        program = filled(one)
        thread = threading.Thread(target=work, args=(program,))
        thread.start()
        try:
            for number in range(saves):
                wanted = program.done + 30
                while program.done < wanted and thread.is_alive():
                    pass
                one.save(tmp_path / f"{number}")
        finally:
            stop.set()
            thread.join()
    with store(**settings) as twin:
        program = filled(twin)
        for number in range(saves):
            saved = checkpoint.Loader(Archive(tmp_path / f"{number}").open()).state
            tables, buffer, priorities = saved["tables"], saved["buffer"], saved["ports"]["priorities"]["main"]
            came = (buffer["inserted"], tables["main"]["counts"][1], sum(priorities))
            while program.came < came:
                program.go_on()
            assert program.came == came
            twin.save(tmp_path / f"twin {number}")
            again = checkpoint.Loader(Archive(tmp_path / f"twin {number}").open()).state
            assert_same(
                {name: again[name] for name in ("tables", "buffer")}, {"tables": tables, "buffer": buffer}, f"{number}"
            )
            with restore(tmp_path / f"{number}") as other:
                assert_same(rows_of(other), rows_of(twin), "rows")
        assert program.done >= 30 * saves


def rows_of(s: conduit.Store) -> dict[str, Any]:
    rows = s.read()
    data: Any = rows.data
    return {"keys": rows.keys, "versions": rows.versions, "id": data["id"]}


# What a turn does


BIG: Mapping[str, dict[str, Any]] = {
    "uniform, often": {"max_times_sampled": 50},
    "prioritized": {"sampler": conduit.Prioritized()},
    "links": {"sampler": conduit.Prioritized(), "derive": NEXT, "max_times_sampled": 50},
    "max heap": {"sampler": conduit.MaxHeap(), "max_times_sampled": 50},
    "without replacement": {"sampler": conduit.WithoutReplacement()},
    "stratified": {"sampler": conduit.Stratified(), "max_times_sampled": 50},
    "places": {"sampler": conduit.Prioritized(), "remover": conduit.MinHeap()},
}


@contextmanager
def measured(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """For each turn of this thread, how many bytes of memory it took on top of what there was."""
    taken: list[int] = []
    began, left, me, at = order.Order.begin, order.Order.leave, threading.get_ident(), [0]

    def begin(self: Any, *args: Any) -> None:
        began(self, *args)
        tracemalloc.reset_peak()
        at[0] = tracemalloc.get_traced_memory()[0]

    def leave(self: Any, *args: Any) -> None:
        assert threading.get_ident() == me
        taken.append(tracemalloc.get_traced_memory()[1] - at[0])
        left(self, *args)

    with patch.context() as both:
        both.setattr(order.Order, "begin", begin)
        both.setattr(order.Order, "leave", leave)
        tracemalloc.start()
        try:
            yield taken
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("kind", BIG)
def test_what_a_save_does_in_its_turns_follows_from_what_came_not_from_the_capacity(tmp_path, monkeypatch, kind):
    last, most, aside, kept = [], [], [], []
    real = Copying.settled
    for capacity in (4_000, 200_000):
        with store(**BIG[kind], capacity=capacity, batch_size=64) as one:
            actor, others, noted = one.actor(), one.actor(2), [0]
            actor.push_trajectory({"id": np.arange(capacity + 10), "obs": np.arange(capacity + 10)})
            one.sample(64)
            one.save(tmp_path / f"{capacity}")

            def settled(self: Copying, state: Any, one: Any = one, others: Any = others, noted: Any = noted) -> Any:
                if isinstance(state, dict) and "tables" in state:
                    others.push({"id": np.arange(2), "obs": np.arange(2)})
                    keys = one.sample(64).info.keys
                    if one.info()["tables"]["main"]["prioritized"]:
                        one.update_priorities(keys, np.ones(64))
                    noted[0] = sum(each.aside_bytes for each in self._begun)
                    kept.append(sum(array.nbytes for each in self._begun for array in each.arrays.values()))
                return real(self, state)

            others.push({"id": np.arange(2), "obs": np.arange(2)})
            with measured(monkeypatch) as taken:
                one.save(tmp_path / f"{capacity}")
            last.append(taken[-1])
            most.append(max(taken))
            with monkeypatch.context() as patch:
                patch.setattr(Copying, "settled", settled)
                one.save(tmp_path / f"{capacity}")
            aside.append(noted[0])
    assert kept[1] > 49 * kept[0] > 100_000
    # The second has 50 times as many rows.
    assert max(last) < 20_000
    assert max(most) < 20_000
    assert 0 < aside[1] <= 1.2 * aside[0] < 20_000


def test_the_first_save_of_a_store_whose_rows_leave_in_any_order_looks_at_few_in_a_turn(tmp_path, monkeypatch):
    named: list[int] = []
    real = places.Places.slots_of

    def slots_of(self: places.Places, keys: Any) -> Any:
        named.append(len(keys))
        return real(self, keys)

    def no_scan(self: Any, first: int, most: int) -> Any:
        raise AssertionError("all slots were looked at in a turn")

    monkeypatch.setattr(places.Places, "slots_of", slots_of)
    for name in ("first", "again"):
        with store(capacity=20_000, remover=conduit.Uniform()) as one:
            actor = one.actor()
            actor.push_trajectory({"id": np.arange(30_000)})
            with monkeypatch.context() as patch:
                patch.setattr(places.Places, "keys_from", no_scan)
                named.clear()
                saved = one.save(tmp_path / name)
            assert (saved.rows, saved.written_rows) == (20_000, 20_000)
            assert 20_000 <= sum(named) <= 3 * 20_000
            assert max(named) <= places._MOST_NAMED
            actor.push_trajectory({"id": np.arange(500)})
            with monkeypatch.context() as patch:
                patch.setattr(places.Places, "keys_from", no_scan)
                named.clear()
                saved = one.save(tmp_path / name)
            assert saved.written_rows == 500
            assert sum(named) <= 3 * 500
            with restore(tmp_path / name) as other:
                assert_same(rows_of(other), rows_of(one), "rows")


# Afterwards


def full_disk(one: conduit.Store, patch: pytest.MonkeyPatch, path: Any) -> None:
    real = os.replace

    def replace(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "replace", replace)
    with pytest.raises(CheckpointError, match="No space left"):
        one.save(path)
    patch.setattr(os, "replace", real)


def amid_the_copies(error: type[BaseException]) -> Any:
    def fails(one: conduit.Store, patch: pytest.MonkeyPatch, path: Any) -> None:
        def by_age(values: Any, window: Window) -> Any:
            raise error

        patch.setattr(journal, "by_age", by_age)
        with pytest.raises(error):
            one.save(path)

    return fails


def in_the_last_turn(one: conduit.Store, patch: pytest.MonkeyPatch, path: Any) -> None:
    def state(*args: Any) -> Any:
        raise SamplerError("it can't tell")

    # The tables have told theirs.
    patch.setattr(one._buffer, "state", state)
    with pytest.raises(SamplerError):
        one.save(path)


def closed_meanwhile(one: conduit.Store, patch: pytest.MonkeyPatch, path: Any) -> None:
    def settled(self: Copying, state: Any) -> Any:
        one.close()
        return real(self, state)

    real = Copying.settled
    patch.setattr(Copying, "settled", settled)
    # Before its last turn it ends; after that, all is there to be written.
    with suppress(ClosedError):
        one.save(path)
    with pytest.raises(ClosedError):
        one.sample(1)


def timed_out(one: conduit.Store, patch: pytest.MonkeyPatch, path: Any) -> None:
    turn = one._order.enter()
    with pytest.raises(WaitTimeout):
        one.save(path, timeout_s=0.05)
    one._order.leave(turn)


def well(one: conduit.Store, patch: pytest.MonkeyPatch, path: Any) -> None:
    one.save(path)


ENDS = {
    "well": well,
    "full disk": full_disk,
    "error": amid_the_copies(RuntimeError),
    "interrupt": amid_the_copies(KeyboardInterrupt),
    "in the last turn": in_the_last_turn,
    "closed": closed_meanwhile,
    "timed out": timed_out,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["links", "places", "without replacement"])
def test_journals_are_off_and_empty_however_a_save_ends(tmp_path, monkeypatch, kind, end):
    begun: list[Journal] = []
    begin = Journal.begin

    def noted(self: Journal) -> None:
        begun.append(self)
        begin(self)

    monkeypatch.setattr(Journal, "begin", noted)
    with store(**BIG[kind]) as one:
        fill(one.actor(), 40)
        with monkeypatch.context() as patch:
            ENDS[end](one, patch, tmp_path / "c")
        mine = [each for each in gc.get_objects() if type(each) is Journal]
        assert {id(each) for each in begun} <= {id(each) for each in mine}
        assert not any(each.on or each._aside is not None for each in mine)
        assert begun or end == "timed out"
        if end != "closed":
            began = len(begun)
            fill(one.actor(), 4, first=40)
            assert one.save(tmp_path / "c").rows == 32
            assert len(begun) > began
            assert not any(each.on or each._aside is not None for each in begun)


class Own:
    """A sampler of the user's, which tells its state at once."""

    prioritized = False

    def start(self, capacity: int, seed: int, starts: Any = None) -> Any:
        sampler = conduit.WithoutReplacement().start(capacity, seed, starts)

        class Inner:
            def __getattr__(self, name: str) -> Any:
                return getattr(sampler, name)

            def state(self, window: Window) -> Any:
                return sampler.state(window)

        return Inner()


def test_a_sampler_of_the_users_own_tells_its_state_in_the_turn(tmp_path):
    with store(sampler=Own()) as one:
        fill(one.actor(), 20)
        one.sample(4)
        with Copying() as copying:
            told = one._wiring.tables["main"].state(one._buffer.window, copying.later)["sampler"]
        assert not any(isinstance(each, Later) for each in told.values())
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", sampler=Own()) as other:
            assert other.learner().pull().info.keys.tolist() == one.learner().pull().info.keys.tolist()
