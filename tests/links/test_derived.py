"""Leaves that are made when a batch is read: what comes next, and the frames before."""

from __future__ import annotations

import numpy as np
import pytest

import conduit
from conduit import Next, Stack
from conduit.errors import HookError
from tests.links.rows import NEXT, column, drawable, entries, linked, lived
from tests.store.rows import EVERYWHERE, host


def test_the_next_observation_is_the_successors_and_the_newest_row_waits_for_its_own():
    with linked(derive=NEXT) as s:
        actor = s.actor(lanes=2)
        lived(actor, 0, 3, lane=0)
        lived(actor, 3, 2, lane=1)
        lived(actor, 5, 1, lane=0)
        assert column(entries(s), "next_obs") == {0: 10, 1: 20, 2: 50, 3: 40}


@pytest.mark.parametrize(
    ("end", "final", "expected"),
    [
        ("terminated", None, 10),
        ("terminated", 99, 99),
        ("truncated", 99, 99),
        ("truncated", None, None),
        ("cut", None, None),
    ],
)
def test_the_next_observation_where_an_episode_ended(end, final, expected):
    with linked(derive=NEXT) as s:
        actor = s.actor()
        lived(actor, 0, 2, end, final)
        lived(actor, 2, 1)
        assert column(entries(s), "next_obs") == {0: 10} | ({} if expected is None else {1: expected})


def test_closing_an_actor_leaves_its_newest_row_without_a_next_for_good():
    with linked(derive=NEXT) as s:
        actor = s.actor()
        lived(actor, 0, 2)
        actor.close()
        lived(s.actor(), 2, 2)
        assert column(entries(s), "next_obs") == {0: 10, 2: 30}


def test_the_next_of_any_leaf_or_subtree():
    rows = {
        "obs": {"image": np.arange(6, dtype=np.uint8).reshape(3, 2), "state": np.arange(3, dtype=np.float64)},
        "action": np.array([5, 6, 7]),
    }
    derive = {"then": Next("obs"), "next_action": Next("action")}
    with linked(derive=derive) as s:
        s.actor().push_trajectory(rows)
        batch = s.sample(2, to="numpy")
        after = batch.info.keys + 1
        np.testing.assert_array_equal(batch.data["then"]["image"], rows["obs"]["image"][after])
        np.testing.assert_array_equal(batch.data["then"]["state"], rows["obs"]["state"][after])
        np.testing.assert_array_equal(batch.data["next_action"], rows["action"][after])
        assert batch.data["then"]["image"].dtype == np.uint8


def test_a_source_may_be_any_tree():
    rows = {"obs": (np.arange(4, dtype=np.float32), [np.arange(8, dtype=np.int8).reshape(4, 2)])}
    with linked(derive={"frames": Stack("obs", 2), "then": Next("frames"), "next_obs": Next("obs")}) as s:
        s.actor().push_trajectory(rows)
        batch = s.sample(3, to="numpy")
        assert batch.data.keys() == {"obs", "frames", "then", "next_obs"}
        for name, ahead in (("obs", 0), ("next_obs", 1)):
            vector, [image] = batch.data[name]
            np.testing.assert_array_equal(vector, rows["obs"][0][batch.info.keys + ahead])
            np.testing.assert_array_equal(image, rows["obs"][1][0][batch.info.keys + ahead])
        for name, ahead in (("frames", 0), ("then", 1)):
            vector, [image] = batch.data[name]
            at = np.stack([np.maximum(batch.info.keys + ahead - 1, 0), batch.info.keys + ahead], axis=1)
            np.testing.assert_array_equal(vector, rows["obs"][0][at])
            np.testing.assert_array_equal(image, rows["obs"][1][0][at])


def test_stacks_repeat_the_first_row_of_the_episode_or_are_filled_with_zeros():
    derive = {"frames": Stack("obs", 3), "padded": Stack("obs", 3, pad="zero"), "one": Stack("obs", 1)}
    with linked(derive=derive) as s:
        actor = s.actor()
        lived(actor, 1, 2, "terminated")
        lived(actor, 3, 4)
        drawn = entries(s)
        assert column(drawn, "frames") == {
            0: [10, 10, 10], 1: [10, 10, 20], 2: [30, 30, 30], 3: [30, 30, 40], 4: [30, 40, 50], 5: [40, 50, 60]
        }  # fmt: skip
        assert column(drawn, "padded") == {
            0: [0, 0, 10], 1: [0, 10, 20], 2: [0, 0, 30], 3: [0, 30, 40], 4: [30, 40, 50], 5: [40, 50, 60]
        }  # fmt: skip
        assert column(drawn, "one") == {key: [10 * (key + 1)] for key in range(6)}
        assert column(drawn, "obs") == {key: 10 * (key + 1) for key in range(6)}, "the stored leaf stays"


def test_a_row_whose_stack_reaches_evicted_rows_is_not_drawn():
    with linked(capacity=5, derive={"frames": Stack("obs", 3)}) as s:
        actor = s.actor()
        lived(actor, 0, 7)
        # Rows 2 … 6 are live. The stack of 2 would reach rows 0 and 1, that of 3 row 1.
        assert column(entries(s), "frames") == {4: [20, 30, 40], 5: [30, 40, 50], 6: [40, 50, 60]}
        lived(actor, 7, 1, "terminated")
        lived(actor, 8, 2)
        # Rows 5 … 9 are live, and 8 begins an episode: nothing of it was evicted.
        assert column(entries(s), "frames") == {7: [50, 60, 70], 8: [80, 80, 80], 9: [80, 80, 90]}


def test_dqn_on_single_frames():
    derive = {"obs": Stack("obs", 3), "next_obs": Next("obs")}
    with linked(derive=derive) as s:
        actor = s.actor()
        lived(actor, 1, 3, "truncated", final=99)
        lived(actor, 4, 1, "terminated")
        lived(actor, 5, 2)
        drawn = entries(s)
        assert column(drawn, "obs") == {
            0: [10, 10, 10], 1: [10, 10, 20], 2: [10, 20, 30], 3: [40, 40, 40], 4: [50, 50, 50]
        }  # fmt: skip
        assert column(drawn, "next_obs") == {
            0: [10, 10, 20], 1: [10, 20, 30], 2: [20, 30, 99], 3: [40, 40, 40], 4: [50, 50, 60]
        }  # fmt: skip


def test_the_next_of_a_zero_padded_stack_is_padded_with_zeros():
    derive = {"frames": Stack("obs", 4, pad="zero"), "after": Next("frames")}
    with linked(derive=derive) as s:
        lived(s.actor(), 1, 2, "terminated", final=99)
        assert column(entries(s), "after") == {0: [0, 0, 10, 20], 1: [0, 10, 20, 99]}


def test_a_stack_of_one_and_its_next():
    derive = {"frames": Stack("obs", 1), "after": Next("frames")}
    with linked(derive=derive) as s:
        lived(s.actor(), 1, 2, "truncated", final=99)
        assert column(entries(s), "after") == {0: [20], 1: [99]}


def test_n_steps_on_stacks_stack_the_start_and_look_at_the_stack_after_the_last_row():
    derive = {"obs": Stack("obs", 2), "next_obs": Next("obs")}
    with linked(item=conduit.NStep(2, gamma=0.5), derive=derive) as s:
        lived(s.actor(), 1, 4, "truncated", final=99)
        drawn = entries(s)
        assert column(drawn, "obs") == {0: [10, 10], 1: [10, 20], 2: [20, 30], 3: [30, 40]}
        assert column(drawn, "next_obs") == {0: [20, 30], 1: [30, 40], 2: [40, 99], 3: [40, 99]}
        assert column(drawn, "n_step") == {0: 2, 1: 2, 2: 2, 3: 1}


def test_sequences_of_stacks():
    derive = {"obs": Stack("obs", 2), "next_obs": Next("obs")}
    with linked(capacity=6, item=conduit.Sequence(2, burn_in=1), derive=derive) as s:
        lived(s.actor(), 0, 8)
        # Rows 2 … 7. Row 2's stack is broken, so it is neither a start nor burn-in.
        drawn = entries(s)
        assert sorted(drawn) == [3, 4, 5]
        assert drawn[3]["obs"] == [[0, 0], [20, 30], [30, 40]]
        assert drawn[3]["mask"] == [False, True, True]
        assert drawn[4]["obs"] == [[20, 30], [30, 40], [40, 50]]
        assert drawn[5]["next_obs"] == [[40, 50], [50, 60], [60, 70]]


def test_a_derived_name_may_hide_the_leaf_that_it_is_made_of():
    with linked(derive={"obs": Next("obs")}) as s:
        lived(s.actor(), 0, 3)
        assert column(entries(s), "obs") == {0: 10, 1: 20}


def test_one_copy_of_an_observation_is_stored():
    image = np.zeros((8, 10, 10), np.uint8)
    with linked(derive={"obs": Stack("obs", 4), "next_obs": Next("obs")}) as s:
        s.actor().push_trajectory({"obs": image})
        batch = s.sample(2)
        assert host(batch.data["obs"]).shape == host(batch.data["next_obs"]).shape == (2, 4, 10, 10)
        assert host(batch.data["obs"]).dtype == np.uint8
        assert s.info()["row_bytes"] == 100
        assert s.info()["schema"] == "obs: uint8[10, 10]"


def test_rows_that_lost_their_lane_are_episodes_of_their_own():
    @conduit.register_ingestion(rows="any")
    def shuffled(source, sink):
        rows = source.read()
        sink.write({name: leaf[::-1] for name, leaf in rows.items()})

    with linked(ingestion=[shuffled], derive=NEXT) as s:
        lived(s.actor(), 0, 4)
        assert drawable(s) == 0
    with linked(ingestion=[shuffled], item=conduit.Trajectory()) as s:
        lived(s.actor(), 1, 4)
        assert column(entries(s), "id") == {0: [4], 1: [3], 2: [2], 3: [1]}
    with linked(ingestion=[shuffled], derive={"frames": Stack("obs", 2)}) as s:
        lived(s.actor(), 1, 4)
        assert column(entries(s), "frames") == {0: [40, 40], 1: [30, 30], 2: [20, 20], 3: [10, 10]}


# Hooks


@conduit.register_ingestion()
def scale(source, sink):
    rows = source.read()
    sink.write(rows | {"obs": rows["obs"] / 10 + 0.5})


@conduit.register_ingestion()
def square(source, sink):
    rows = source.read()
    sink.write(rows | {"square": rows["obs"] ** 2})


def test_hooks_on_rows_make_of_a_final_what_they_make_of_rows():
    with linked(ingestion=[scale], derive=NEXT) as s:
        actor = s.actor()
        lived(actor, 0, 2, "truncated", final=990)
        lived(actor, 2, 2)
        assert column(entries(s), "next_obs") == {0: 1.5, 1: 99.5, 2: 3.5}


def test_leaves_that_a_hook_adds_have_a_next_too():
    with linked(ingestion=[scale, square], derive={"next_square": Next("square")}) as s:
        actor = s.actor(lanes=2)
        lived(actor, 0, 2, "terminated", final=30, lane=1)
        lived(actor, 2, 1, "truncated", final=20, lane=0)
        lived(actor, 3, 1, "terminated", lane=0)
        assert column(entries(s), "next_square") == {0: 1.5**2, 1: 3.5**2, 2: 2.5**2, 3: 3.5**2}


def test_the_finals_of_a_step_of_several_lanes_go_through_the_hooks_with_it():
    rows = {
        "obs": np.array([10, 20, 30, 40], np.float32),
        "terminated": np.array([False, True, False, False]),
        "truncated": np.array([True, False, False, True]),
    }
    with linked(ingestion=[scale], derive=NEXT) as s:
        s.actor(lanes=4).push(rows, final={"obs": np.array([70, 80, 90], np.float32)})
        assert column(entries(s), "next_obs") == {0: 7.5, 1: 8.5, 3: 9.5}
        assert column(entries(s), "obs") == {0: 1.5, 1: 2.5, 3: 4.5}


def test_a_hook_on_trajectories_sees_finals_in_its_fragments_and_links_follow_what_it_writes():
    @conduit.register_ingestion(per="trajectory")
    def longer(source, sink):
        sink.write([f.with_rows(f.rows | {"of": np.full(len(f), len(f), np.int32)}) for f in source.read()])

    with linked(ingestion=[longer], derive=NEXT) as s:
        actor = s.actor(lanes=2)
        for number, (terminated, truncated) in enumerate([((0, 0), (0, 0)), ((0, 1), (0, 0)), ((0, 0), (1, 0))]):
            rows = {
                "id": np.array([2 * number, 2 * number + 1], np.int32),
                "obs": np.array([20 * number, 20 * number + 10], np.float32),
                "terminated": np.array(terminated, bool),
                "truncated": np.array(truncated, bool),
            }
            final = {"obs": np.array([99 + number], np.float32)} if any(terminated) or any(truncated) else None
            actor.push(rows, final=final)
        drawn = {entry["id"]: (entry["next_obs"], entry["of"]) for entry in entries(s).values()}
        assert drawn == {1: (30, 2), 3: (100, 2), 0: (20, 3), 2: (40, 3), 4: (101, 3)}


@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_delivery_hooks_see_the_derived_batch(backend, placement):
    @conduit.register_delivery()
    def difference(source, sink):
        d = source.read()
        sink.write({"moved": d["next_obs"] - d["obs"], "target": d["reward"] + d["discount"] * d["next_obs"]})

    item = conduit.NStep(2, gamma=0.5)
    with linked(backend=backend, placement=placement, item=item, derive=NEXT, delivery=[difference]) as s:
        lived(s.actor(), 0, 6)
        batch = s.sample(4)
        key = batch.info.keys
        assert host(batch.data["moved"]).tolist() == [20.0] * 4
        assert host(batch.data["target"]).tolist() == (key + (key + 1) / 2 + (10 * key + 20) / 4).tolist()


def test_delivery_hooks_see_sequences_with_their_axis_of_time():
    seen = []

    @conduit.register_delivery()
    def look(source, sink):
        seen.append({name: leaf.shape for name, leaf in source.read().items()})
        sink.write({"sum": source.read()["id"].sum(axis=1)})

    with linked(item=conduit.Sequence(3), derive=NEXT, delivery=[look]) as s:
        lived(s.actor(), 0, 6)
        batch = s.sample(2, to="numpy")
        assert batch.data["sum"].tolist() == (3 * batch.info.keys + 3).tolist()
        assert batch.info.mask.shape == (2, 3)
    assert seen[0]["next_obs"] == (2, 3)


def test_a_delivery_hook_keeps_the_entries_of_a_batch():
    @conduit.register_delivery()
    def flatten(source, sink):
        sink.write({"id": source.read()["id"].reshape(-1)})

    with linked(item=conduit.Sequence(3), delivery=[flatten]) as s:
        lived(s.actor(), 0, 6)
        with pytest.raises(HookError, match="'flatten' got 2 rows and wrote 6"):
            s.sample(2)
