"""What one entry of a batch is, by hand: rows, n steps, sequences, whole trajectories."""

from __future__ import annotations

import math
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

import conduit
from conduit.errors import WaitTimeout
from tests.links.rows import NEXT, column, drawable, entries, linked, lived
from tests.store.rows import each_backend, host


def test_a_row_is_drawn_as_it_was_stored_where_nothing_is_asked_for():
    with linked(item=conduit.Row()) as s:
        lived(s.actor(), 0, 4)
        assert drawable(s) == len(s) == 4
        assert column(entries(s), "obs") == {0: 0, 1: 10, 2: 20, 3: 30}
        assert s.sample(2).info.mask is None


def test_without_settings_every_live_row_is_drawable():
    with linked(capacity=4) as s:
        lived(s.actor(), 0, 6)
        assert drawable(s) == 4


# NStep


def steps(n, **settings) -> conduit.NStep:
    return conduit.NStep(n, gamma=0.5, **settings)


def test_n_steps_sum_discounted_rewards_and_look_at_the_last_row():
    with linked(item=steps(3), derive=NEXT) as s:
        lived(s.actor(), 1, 6)
        drawn = entries(s)
        # Row 6 (key 5) has no successor yet, so a chain of three usable rows may start at keys 0, 1, 2.
        assert sorted(drawn) == [0, 1, 2]
        assert drawn[0] == {
            "id": 1,
            "obs": 10.0,
            "reward": 1 + 2 / 2 + 3 / 4,
            "next_obs": 40.0,
            "terminated": False,
            "truncated": False,
            "discount": 0.125,
            "n_step": 3,
        }


@pytest.mark.parametrize(
    ("end", "final", "discounts", "nexts"),
    [
        ("terminated", None, {0: 0.0, 1: 0.0, 2: 0.0}, {0: 20, 1: 20, 2: 20}),
        ("terminated", 99, {0: 0.0, 1: 0.0, 2: 0.0}, {0: 99, 1: 99, 2: 99}),
        ("truncated", 99, {0: 0.125, 1: 0.25, 2: 0.5}, {0: 99, 1: 99, 2: 99}),
        # The cut row has no next, so nothing may bootstrap from it: chains end before it.
        ("cut", None, {0: 0.25, 1: 0.5}, {0: 20, 1: 20}),
        ("open", None, {}, {}),
    ],
)
def test_n_steps_are_cut_short_by_an_end_and_discounted_by_the_steps_taken(end, final, discounts, nexts):
    with linked(item=steps(5), derive=NEXT) as s:
        lived(s.actor(), 0, 3, end, final)
        drawn = entries(s)
        assert column(drawn, "discount") == discounts
        assert column(drawn, "next_obs") == nexts
        taken = {0: 2, 1: 1} if end == "cut" else {0: 3, 1: 2, 2: 1}
        assert column(drawn, "n_step") == {key: taken[key] for key in discounts}
        rewards = {0: 0 + 1 / 2, 1: 1.0} if end == "cut" else {0: 0 + 1 / 2 + 2 / 4, 1: 1 + 2 / 2, 2: 2.0}
        assert column(drawn, "reward") == {key: rewards[key] for key in discounts}


def test_an_open_chain_waits_for_its_rows_and_a_closed_actor_ends_the_wait():
    with linked(item=steps(3), derive=NEXT) as s:
        actor = s.actor()
        lived(actor, 0, 3)
        assert drawable(s) == 0
        with pytest.raises(WaitTimeout, match="0 of 3 visible rows can start"):
            s.sample(1, timeout_s=0.0)
        lived(actor, 3, 1)
        assert sorted(entries(s)) == [0]
        actor.close()
        assert column(entries(s), "n_step") == {0: 3, 1: 2, 2: 1}


def test_stored_leaves_of_the_last_row_need_no_next():
    with linked(item=steps(2, from_last=("after", "terminated"))) as s:
        rows = {
            "obs": np.arange(3, dtype=np.float32),
            "after": np.arange(3, dtype=np.float32) + 1,
            "reward": np.array([1, 2, 4], np.float32),
        }
        s.actor().push_trajectory(rows)
        drawn = entries(s)
        assert column(drawn, "after") == {0: 2, 1: 3}
        assert column(drawn, "reward") == {0: 2, 1: 4}
        assert column(drawn, "obs") == {0: 0, 1: 1}


def test_leaves_not_named_in_from_last_are_of_the_start_row():
    with linked(item=steps(2, from_last=("next_obs", "id")), derive=NEXT) as s:
        lived(s.actor(), 0, 2, "terminated")
        assert entries(s)[0] | {} == {
            "id": 1,
            "obs": 0.0,
            "reward": 0.5,
            "next_obs": 10.0,
            "terminated": False,
            "truncated": False,
            "discount": 0.0,
            "n_step": 2,
        }


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, "float32"),
        (np.float64, "float64"),
        (np.float16, "float16"),
        (np.int32, "float32"),
        (bool, "float32"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
)
def test_returns_have_the_rewards_float_dtype_and_float32_where_it_is_none(dtype, expected):
    with linked(item=steps(2), derive=NEXT) as s:
        s.actor().push_trajectory({"obs": np.zeros(4), "reward": np.array([1, 1, 0, 1]).astype(dtype)})
        batch = s.sample(2, to="numpy")
        assert str(batch.data["reward"].dtype) == expected
        assert str(batch.data["discount"].dtype) == "float32"
        assert str(batch.data["n_step"].dtype) == "int32"
        assert column(entries(s), "reward") == {0: 1.5, 1: 1.0}


def test_rewards_may_have_axes_and_be_called_otherwise():
    with linked(item=conduit.NStep(2, gamma=0.5, reward="gains"), derive=NEXT) as s:
        s.actor().push_trajectory({"obs": np.zeros(3), "gains": np.arange(6, dtype=np.float64).reshape(3, 2)})
        assert column(entries(s), "gains") == {0: [0 + 2 / 2, 1 + 3 / 2]}


def test_long_returns_are_summed_in_float64():
    gamma, length = 0.999, 400
    rewards = np.linspace(0, 1, length, dtype=np.float32) + np.float32(1000)
    with linked(capacity=512, item=conduit.NStep(length, gamma=gamma), derive=NEXT) as s:
        s.actor().push_trajectory({"obs": np.zeros(length), "reward": rewards}, end="terminated")
        got = s.sample(length, to="numpy")
        for key, value in zip(got.info.keys.tolist(), got.data["reward"].tolist(), strict=True):
            exact = math.fsum(gamma**i * float(reward) for i, reward in enumerate(rewards[key:]))
            assert value == pytest.approx(exact, rel=6.1e-8), "half a float32 step, and no more"


def test_gamma_may_be_one_and_zero():
    for gamma, reward, discount in ((1.0, 0 + 1 + 2, 1.0), (0.0, 0.0, 0.0)):
        with linked(item=conduit.NStep(3, gamma=gamma), derive=NEXT) as s:
            lived(s.actor(), 0, 4)
            assert (entries(s)[0]["reward"], entries(s)[0]["discount"]) == (reward, discount)


def test_a_range_of_steps_gives_each_of_its_values_with_equal_chance():
    with linked(item=steps(range(1, 6, 2)), derive=NEXT, seed=3) as s:
        lived(s.actor(), 0, 8)
        assert drawable(s) == 3
        taken = Counter()
        for _ in range(200):
            batch = s.sample(3, to="numpy")
            for key, m, discount, reward in zip(
                batch.info.keys, batch.data["n_step"], batch.data["discount"], batch.data["reward"], strict=True
            ):
                taken[int(m)] += 1
                assert discount == 0.5**m
                assert reward == sum(0.5**i * (key + i) for i in range(m))
            assert batch.data["next_obs"].tolist() == (10 * (batch.info.keys + batch.data["n_step"])).tolist()
        assert set(taken) == {1, 3, 5}
        assert sum((count - 200) ** 2 / 200 for count in taken.values()) < 13.8, "chi-square, two degrees, p = 0.001"


def test_the_steps_drawn_do_not_depend_on_the_row_drawn():
    """In one batch, equal rows have different numbers of steps."""
    with linked(item=steps(range(1, 3)), derive=NEXT, seed=1) as s:
        lived(s.actor(), 0, 3, "terminated")
        seen = set()
        for _ in range(60):
            batch = s.sample(3, to="numpy")
            seen |= set(zip(batch.info.keys.tolist(), batch.data["n_step"].tolist(), strict=True))
        assert seen == {(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)}


def test_a_range_waits_for_its_largest_value():
    with linked(item=steps(range(1, 4)), derive=NEXT) as s:
        actor = s.actor()
        lived(actor, 0, 3)
        assert drawable(s) == 0
        lived(actor, 3, 1)
        assert drawable(s) == 1


# Sequence


def test_sequences_are_rows_of_one_lane_in_order():
    with linked(item=conduit.Sequence(3)) as s:
        actor = s.actor(lanes=2)
        for number in range(0, 10, 2):
            actor.push({"id": np.array([number, number + 1], np.int32)})
        assert column(entries(s), "id") == {key: [key, key + 2, key + 4] for key in range(6)}
        assert column(entries(s), "mask") == dict.fromkeys(range(6), [True] * 3)


def test_sequences_start_at_every_periodth_row_of_the_episode_however_long_ago_it_began():
    with linked(capacity=8, item=conduit.Sequence(2, period=3)) as s:
        actor = s.actor()
        lived(actor, 0, 4, "terminated")
        lived(actor, 4, 9)
        # Rows 5 … 12 are live; the episode that began with row 4 (evicted) has its places 3 and 6 at rows 7 and 10.
        assert column(entries(s), "id") == {7: [7, 8], 10: [10, 11]}


def test_burn_in_comes_before_and_is_padding_where_there_is_none():
    with linked(item=conduit.Sequence(2, burn_in=2)) as s:
        lived(s.actor(), 1, 4)
        drawn = entries(s)
        assert column(drawn, "id") == {0: [0, 0, 1, 2], 1: [0, 1, 2, 3], 2: [1, 2, 3, 4]}
        assert column(drawn, "mask") == {
            0: [False, False, True, True],
            1: [False, True, True, True],
            2: [True, True, True, True],
        }


def test_burn_in_stops_at_the_oldest_live_row():
    with linked(capacity=4, item=conduit.Sequence(1, burn_in=3, pad="repeat")) as s:
        lived(s.actor(), 0, 6)
        assert column(entries(s), "id") == {2: [2, 2, 2, 2], 3: [2, 2, 2, 3], 4: [2, 2, 3, 4], 5: [2, 3, 4, 5]}
        assert column(entries(s), "mask")[3] == [False, False, True, True]


@pytest.mark.parametrize(
    ("pad", "expected"),
    [
        (None, {0: [1, 2, 3]}),
        ("zero", {0: [1, 2, 3], 1: [2, 3, 0], 2: [3, 0, 0]}),
        ("repeat", {0: [1, 2, 3], 1: [2, 3, 3], 2: [3, 3, 3]}),
    ],
)
def test_what_an_end_cuts_short_is_drawn_only_with_padding(pad, expected):
    with linked(item=conduit.Sequence(3, pad=pad)) as s:
        lived(s.actor(), 1, 3, "terminated")
        assert column(entries(s), "id") == expected
        mask = {key: [i + key < 3 for i in range(3)] for key in expected}
        assert column(entries(s), "mask") == mask


def test_what_may_still_grow_is_not_padded():
    with linked(item=conduit.Sequence(3, pad="zero")) as s:
        actor = s.actor()
        lived(actor, 1, 3)
        assert sorted(entries(s)) == [0]
        actor.close()
        assert sorted(entries(s)) == [0, 1, 2]


def test_strides_skip_rows_of_the_episode():
    with linked(item=conduit.Sequence(2, stride=3, burn_in=1)) as s:
        lived(s.actor(), 1, 7)
        assert column(entries(s), "id") == {0: [0, 1, 4], 1: [0, 2, 5], 2: [0, 3, 6], 3: [1, 4, 7]}


def test_sequences_whose_rows_need_a_next_stop_before_the_row_that_has_none():
    with linked(item=conduit.Sequence(2), derive=NEXT) as s:
        lived(s.actor(), 1, 4)
        assert column(entries(s), "next_obs") == {0: [20, 30], 1: [30, 40]}
    with linked(item=conduit.Sequence(2, pad="zero"), derive=NEXT) as s:
        lived(s.actor(), 1, 3, "cut")
        assert column(entries(s), "next_obs") == {0: [20, 30], 1: [30, 0]}
        assert column(entries(s), "id") == {0: [1, 2], 1: [2, 0]}


def test_a_sequences_last_row_may_have_a_final():
    with linked(item=conduit.Sequence(2), derive=NEXT) as s:
        lived(s.actor(), 1, 2, "truncated", final=99)
        assert column(entries(s), "next_obs") == {0: [20, 99]}


# Trajectory


def test_trajectories_are_whole_episodes_as_long_as_the_longest_of_the_batch():
    with linked(item=conduit.Trajectory()) as s:
        actor = s.actor()
        lived(actor, 1, 2, "terminated")
        lived(actor, 3, 3, "truncated", final=99)
        lived(actor, 6, 4)
        assert drawable(s) == 2
        shapes = set()
        for _ in range(20):
            batch = s.sample(2, to="numpy")
            longest = max({0: 2, 2: 3}[key] for key in batch.info.keys.tolist())
            shapes.add(batch.data["id"].shape)
            assert batch.data["id"].shape == batch.info.mask.shape == (2, longest)
            for key, row, mask in zip(batch.info.keys.tolist(), batch.data["id"], batch.info.mask, strict=True):
                whole = {0: [1, 2], 2: [3, 4, 5]}[key]
                assert row.tolist() == [*whole, 0][:longest]
                assert mask.tolist() == ([True] * len(whole) + [False])[:longest]
        assert shapes == {(2, 2), (2, 3)}


def test_a_trajectory_whose_first_row_is_evicted_is_gone():
    with linked(capacity=4, item=conduit.Trajectory()) as s:
        actor = s.actor()
        lived(actor, 0, 2, "terminated")
        lived(actor, 2, 2, "terminated")
        assert sorted(entries(s)) == [0, 2]
        lived(actor, 4, 1)
        assert sorted(entries(s)) == [2]


def test_trajectories_are_padded_to_a_multiple():
    with linked(item=conduit.Trajectory(multiple=4)) as s:
        lived(s.actor(), 1, 5, "terminated")
        batch = s.sample(1, to="numpy")
        assert batch.data["id"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
        assert batch.info.mask.tolist() == [[True] * 5 + [False] * 3]


def test_a_trajectory_longer_than_the_ring_is_never_whole():
    with linked(capacity=4, item=conduit.Trajectory()) as s:
        lived(s.actor(), 0, 6, "terminated")
        assert drawable(s) == 0


@pytest.mark.parametrize("end", ["terminated", "cut"])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 62, 63, 64, 65, 66, 127, 128, 129, 130, 500])
def test_trajectories_of_any_length_are_whole(length, end):
    with linked(capacity=600, item=conduit.Trajectory(), derive=NEXT) as s:
        actor = s.actor()
        lived(actor, 5, 30, "terminated")
        lived(actor, 100, length, end)
        usable = length - (end == "cut")
        assert drawable(s) == 1 + (usable > 0)
        for _ in range(12):
            batch = s.sample(drawable(s), to="numpy")
            lengths = [{0: 30, 30: usable}[key] for key in batch.info.keys.tolist()]
            assert batch.info.mask.shape == (len(batch), max(lengths))
            assert batch.info.mask.sum(axis=1).tolist() == lengths
            for first, row, real in zip(batch.info.keys, batch.data["id"], lengths, strict=True):
                number = {0: 5, 30: 100}[first]
                assert row[:real].tolist() == list(range(number, number + real))
                assert not row[real:].any()


def test_a_cut_trajectory_leaves_out_the_row_without_a_next():
    with linked(item=conduit.Trajectory(), derive=NEXT) as s:
        actor = s.actor(lanes=2)
        lived(actor, 1, 3, lane=0)
        lived(actor, 4, 1, lane=1)
        assert drawable(s) == 0
        actor.close()
        drawn = entries(s)
        assert column(drawn, "next_obs") == {0: [20, 30]}


# All


@each_backend
def test_masks_and_weights_are_arrays_of_the_batches_framework(backend):
    with linked(backend=backend, item=conduit.Sequence(2, burn_in=1)) as s:
        s.actor().push_trajectory({"id": np.arange(6, dtype=np.int32)})
        batch = s.sample(4)
        assert type(batch.info.mask) is type(batch.data["id"]) is type(batch.info.weight)
        assert host(batch.info.mask).dtype == np.bool_
        assert host(batch.info.mask).shape == (4, 3)
        assert len(batch) == 4


@pytest.mark.parametrize(
    ("item", "key"),
    [(conduit.NStep(2, gamma=0.5), 1), (conduit.Sequence(1, burn_in=1), 1), (conduit.Row(), 1)],
    ids=str,
)
def test_the_info_is_of_the_start_row(item, key):
    with linked(item=item, derive=NEXT, capacity=8, sampler=conduit.Prioritized(alpha=1.0, eps=0.0, beta=1.0)) as s:
        actor = s.actor()
        for number in range(6):
            actor.push(
                {"obs": np.array([number]), "reward": np.array([1.0])},
                version=number,
                priority=np.array([1.0 if number == key else 0.0]),
            )
        batch = s.sample(3)
        assert batch.info.keys.tolist() == [key] * 3
        assert batch.info.policy_version.tolist() == [key] * 3
        assert batch.info.age.tolist() == [5 - key] * 3
        assert batch.info.priority.tolist() == batch.info.probability.tolist() == [1.0] * 3


def test_a_row_keeps_its_priority_until_it_can_be_drawn():
    sampler = conduit.Prioritized(alpha=1.0, eps=0.0, beta=1.0)
    with linked(item=conduit.Row(), derive=NEXT, sampler=sampler) as s:
        actor = s.actor()
        row = {"obs": np.zeros(1)}
        actor.push(row, priority=np.array([1.0]))
        actor.push(row, priority=np.array([3.0]))
        assert s.sample(1).info.probability.tolist() == [1.0], "of what is drawable"
        actor.push(row)
        batch = s.sample(2)
        assert dict(zip(batch.info.keys, batch.info.probability, strict=True)).items() <= {0: 0.25, 1: 0.75}.items()
        update = s.update_priorities(np.array([2, 0]), np.array([4.0, 1.0]))
        assert update == conduit.PriorityUpdate(applied=2, stale=0)
        assert {p for _ in range(9) for p in s.sample(2).info.probability} == {0.25, 0.75}
        actor.push(row)
        seen = {}
        for _ in range(40):
            info = s.sample(3).info
            seen |= dict(zip(info.keys.tolist(), info.probability.tolist(), strict=True))
        assert seen == {0: 1 / 8, 1: 3 / 8, 2: 4 / 8}


def test_weights_count_the_drawable_starts():
    """N is how many starts there are, not how many rows: seen in a batch with one start of low and one of high priority."""
    sampler = conduit.Prioritized(alpha=1.0, eps=0.0, beta=0.5)
    with linked(item=conduit.Row(), derive=NEXT, sampler=sampler) as s:
        actor = s.actor()
        for priority in (1.0, 3.0, 9.0):
            actor.push({"obs": np.zeros(1)}, priority=np.array([priority]))
        for _ in range(20):
            info = s.sample(2, to="numpy").info
            exact = (2 * info.probability) ** -0.5
            np.testing.assert_allclose(info.weight, exact / exact.max(), rtol=1e-6)


def test_a_batch_needs_as_many_drawable_starts_as_it_has_entries():
    with linked(batch_size=3, derive=NEXT, timeout_s=0.05) as s:
        actor, learner = s.actor(), s.learner()
        lived(actor, 0, 3)
        with pytest.raises(WaitTimeout, match=r"2 of 3 visible rows can start .* a batch needs 3"):
            learner.pull()
        lived(actor, 3, 1)
        assert len(learner.pull()) == 3


def test_what_a_learner_pulls_is_what_is_sampled():
    with linked(batch_size=4, item=steps(2), derive=NEXT) as s:
        actor, learner = s.actor(), s.learner()
        lived(actor, 0, 20)
        for _ in range(10):
            batch = learner.pull()
            assert host(batch.data["next_obs"]).tolist() == (10.0 * (batch.info.keys + 2)).tolist()
