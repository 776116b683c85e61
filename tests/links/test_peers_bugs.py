"""Silent wrong data that other buffers gave their users, each as a case that this one gets right."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import conduit
from conduit import Next, NStep, Schedule, Sequence, Stack, Trajectory
from tests.links.reference import OPEN, TERMINATED, TRUNCATED
from tests.links.reference import Next as NextRule
from tests.links.reference import NStep as NStepRule
from tests.links.reference import Sequence as SequenceRule
from tests.links.rows import NEXT, column, drawable, entries, linked, lived
from tests.links.twin import Twin
from tests.store.rows import each_backend, host


@pytest.mark.parametrize("filled", [5, 16, 17, 23, 31, 32, 33, 48])
def test_torchrl_1969_2208_slices_neither_break_at_capacity_nor_cross_trajectories(filled):
    with linked(capacity=16, item=Sequence(4)) as s:
        actor = s.actor()
        episode = {}
        for number in range(filled):
            episode[number] = number // 7
            lived(actor, number, 1, "terminated" if number % 7 == 6 else "open")
        live = range(max(0, filled - 16), filled)
        whole = {k for k in live if k + 3 < filled and episode[k] == episode[k + 3]}
        assert column(entries(s), "id") == {k: [k, k + 1, k + 2, k + 3] for k in whole}


def test_flashbax_50_rows_of_a_lane_are_contiguous_however_pushes_interleave():
    with Twin(SequenceRule(3), {"next_obs": NextRule("obs")}, 20) as twin:
        wide, narrow = twin.open(3), twin.open(1)
        for number in range(30):
            twin.push(wide, [OPEN, None if number % 3 == 0 else OPEN, TERMINATED if number % 5 == 4 else OPEN])
            if number % 2:
                twin.push_trajectory(narrow, 0, 1 + number % 4, OPEN)
            if number % 9 == 8:
                twin.close(narrow)
                narrow = twin.open(1)
            twin.check()


@pytest.mark.parametrize("known", [True, False])
def test_stable_baselines3_934_cleanrl_460_a_time_limit_never_bootstraps_from_the_next_episode(known):
    with linked(derive={"obs": Stack("obs", 2), "next_obs": Next("obs")}) as s:
        actor = s.actor()
        for episode in range(4):
            lived(actor, 3 * episode, 3, "truncated", 1000 + episode if known else None)
        drawn = column(entries(s), "next_obs")
        for key, (_, after) in drawn.items():
            assert after == (1000 + key // 3 if key % 3 == 2 else 10 * (key + 1))
        assert len(drawn) == (12 if known else 8)


@pytest.mark.parametrize("pushed", [9, 10, 11, 14, 19, 20, 27])
def test_fast_td3_6_n_steps_stop_at_the_cursor_and_gamma_has_the_power_of_the_steps_taken(pushed):
    gamma = 0.9
    with linked(capacity=10, item=NStep(4, gamma=gamma), derive=NEXT) as s:
        actor = s.actor()
        for number in range(pushed):
            lived(actor, number, 1, "truncated" if number % 6 == 5 else "open", 7 if number % 6 == 5 else None)
        drawn = entries(s)
        for key, entry in drawn.items():
            m = min(4, 6 - key % 6)
            assert entry["n_step"] == m
            assert entry["discount"] == float(np.float32(gamma**m))
            assert entry["reward"] == float(np.float32(sum(gamma**i * (key + i) for i in range(m))))
            assert entry["next_obs"] == (7 if (key + m) % 6 == 0 else 10 * (key + m))
        # The newest row has no successor yet, nor have chains that would need it.
        whole = {
            k for k in range(max(0, pushed - 10), pushed) if min(k + 4, k - k % 6 + 6) <= pushed - (pushed % 6 != 0)
        }
        assert set(drawn) == whole


def test_ray_18358_n_steps_are_not_shifted_by_an_environment_that_reuses_its_arrays():
    with linked(item=NStep(2, gamma=1.0)) as s:
        actor = s.actor()
        memory = np.zeros((2, 1), np.float32)
        reward = np.zeros(1, np.float32)
        for number in range(8):
            memory[0], memory[1], reward[:] = number, number + 1, number
            actor.push({"obs": memory[0], "next_obs": memory[1], "reward": reward})
        memory[:], reward[:] = -1, -1
        drawn = entries(s)
        assert column(drawn, "obs") == {k: k for k in range(7)}
        assert column(drawn, "next_obs") == {k: k + 2 for k in range(7)}
        assert column(drawn, "reward") == {k: 2 * k + 1 for k in range(7)}


@pytest.mark.parametrize("schedule", [None, Schedule(overlap_ing=True, overlap_del=True, g_del=2)], ids=str)
def test_torchrl_3463_lerobot_2309_draws_during_pushes_are_whole(schedule):
    """Three actors push lanes whose rows tell what they are, through a small ring; two threads draw all the while."""
    item, derive = NStep(3, gamma=1.0, from_last=("last", "truncated")), {"next_obs": Next("obs")}
    failures: list[BaseException] = []
    done = threading.Event()
    with linked(capacity=64, batch_size=8, item=item, derive=derive, schedule=schedule, timeout_s=20.0) as s:

        def push(lane: int) -> None:
            actor, number = s.actor(), 0
            for episode in range(120):
                length = 1 + (episode + lane) % 7
                for place in range(length):
                    ends = place == length - 1
                    rows = {
                        "obs": np.array([[lane, number]], np.int64),
                        "reward": np.ones(1, np.float32),
                        "last": np.array([length - place], np.int64),
                        "truncated": np.array([ends]),
                    }
                    final = {"obs": np.array([[lane, -number]], np.int64)} if ends else None
                    actor.push(rows, final=final)
                    number += 1

        def check(batch: conduit.Batch) -> None:
            data = {name: host(leaf) for name, leaf in batch.data.items()}
            for i in range(len(batch)):
                lane, number = data["obs"][i]
                m, left = int(data["n_step"][i]), int(data["last"][i])
                ended = left == 1
                assert data["reward"][i] == m
                assert data["truncated"][i] == ended
                assert ended or m == 3
                assert data["next_obs"][i].tolist() == [lane, 1 - number - m if ended else number + m]

        def draw(learner: conduit.Learner | None) -> None:
            while not done.is_set():
                check(learner.pull() if learner else s.sample(8))

        def guarded(work, *args) -> threading.Thread:
            def run() -> None:
                try:
                    work(*args)
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        pushers = [guarded(push, lane) for lane in range(3)]
        time.sleep(0.01)
        drawers = [guarded(draw, learner) for learner in (s.learner(), None)]
        for thread in pushers:
            thread.join(30)
        done.set()
        for thread in drawers:
            thread.join(30)
        assert not any(thread.is_alive() for thread in pushers + drawers)
    assert not failures, failures[0]


@pytest.mark.parametrize("length", [1000, 4])
@each_backend
def test_transfer_queue_137_what_a_staged_batch_needs_is_read_before_it_is_overwritten(backend, length):
    """Rows, and the finals of episodes of `length` rows, whose places are taken by others while batches are staged."""
    derive = {"frames": Stack("obs", 3), "after": Next("frames")}
    item, schedule = NStep(2, gamma=1.0), Schedule(overlap_del=True, g_del=3)
    with linked(backend=backend, capacity=12, batch_size=6, item=item, derive=derive, schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()
        pushed, batches = 0, []

        def live(rows: int) -> None:
            nonlocal pushed
            for number in range(pushed, pushed + rows):
                last = number % length == length - 1
                lived(actor, number, 1, "truncated" if last else "open", -number if last else None)
            pushed += rows

        live(12)
        for _ in range(12):
            batches.append(learner.pull())
            live(7)
        for batch in batches:
            for key, frames, after in zip(
                batch.info.keys.tolist(), host(batch.data["frames"]), host(batch.data["after"]), strict=True
            ):
                start, stop = key - key % length, key - key % length + length
                seen = [10 * max(start, number) for number in range(key - 2, min(key + 2, stop))]
                assert frames.tolist() == seen[:3]
                assert after.tolist() == ([*seen, 10 * (key + 2)] if key + 2 < stop else [*seen, 1 - stop])[-3:]
                assert key > batch.info.frontier - 12


@pytest.mark.parametrize("item", [conduit.Row(), NStep(3, gamma=1.0), Sequence(3, burn_in=2), Trajectory()], ids=str)
def test_ray_54284_60773_an_episode_goes_on_while_its_first_rows_are_evicted(item):
    with linked(capacity=6, item=item, derive=NEXT) as s:
        actor = s.actor()
        for chunk in range(10):
            lived(actor, 4 * chunk, 4)
            if not isinstance(item, Trajectory):
                assert drawable(s) > 0
        lived(actor, 40, 2, "terminated")
        drawn = entries(s)
        assert (
            set(drawn)
            == {
                conduit.Row: set(range(36, 42)),
                NStep: set(range(36, 42)),
                Sequence: set(range(36, 40)),
                Trajectory: set(),
            }[type(item)]
        )
        lived(actor, 42, 3, "terminated")
        assert {42, 43, 44} & set(entries(s))


@each_backend
def test_lerobot_images_stay_in_the_dtype_they_came_in(backend):
    image = np.arange(256, dtype=np.uint8).reshape(16, 4, 4)
    derive = {"image": Stack("image", 2), "next_image": Next("image")}
    with linked(backend=backend, batch_size=4, derive=derive) as s:
        s.actor().push_trajectory({"image": image}, end="terminated")
        assert s.info()["row_bytes"] == 16
        batch = s.learner().pull()
        for name, ahead in (("image", 0), ("next_image", 1)):
            got = host(batch.data[name])
            assert got.dtype == np.uint8
            for key, frames in zip(batch.info.keys.tolist(), got, strict=True):
                # The last row terminated: its next is its own.
                at = min(key + ahead, 15)
                np.testing.assert_array_equal(frames, image[[max(at - 1, 0), at]])


def test_torchrl_2669_a_draw_of_slices_looks_at_no_more_than_it_draws():
    """Structure, not seconds: rows that end nowhere near the draw could be a million or none."""
    counts = {}
    for rows in (1_000, 100_000):
        with linked(capacity=rows, batch_size=32, item=Sequence(8, burn_in=4)) as s:
            number = np.arange(rows, dtype=np.int32)
            actor = s.actor()
            for start in range(0, rows, 50):
                actor.push_trajectory({"id": number[start : start + 50]}, end="terminated")
            s.sample(32)
            counts[rows] = calls_of(lambda s=s: s.sample(32))
    assert counts[100_000] == pytest.approx(counts[1_000], rel=0.1), "calls of functions"


def calls_of(work) -> int:
    """How many functions `work` calls."""
    import sys

    calls = [0]

    def count(frame, event, arg) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls[0]


@pytest.mark.parametrize("item", [conduit.Row(), NStep(2, gamma=1.0), Sequence(2), Trajectory()], ids=str)
def test_torchrl_3870_prefetch_prefetches(item):
    with linked(batch_size=2, item=item, derive=NEXT, schedule=Schedule(overlap_del=True)) as s:
        lived(s.actor(), 0, 8, "terminated")
        lived(s.actor(), 8, 8, "terminated")
        learner = s.learner()
        learner.pull()
        until = time.perf_counter() + 5
        while learner.staged < 1:
            assert time.perf_counter() < until, "nothing is staged ahead"
            time.sleep(0.001)


def test_the_rows_of_peers_bugs_agree_with_the_reference_too():
    """The time-limit and n-step cases once more, on lanes of different lengths at once."""
    with Twin(NStepRule(3), {"next_obs": NextRule("obs")}, 11) as twin:
        actor = twin.open(3)
        for number in range(25):
            ends = [TRUNCATED if number % (3 + lane) == 2 else OPEN for lane in range(3)]
            twin.push(actor, ends, with_final=number % 2 == 0)
            twin.check()
