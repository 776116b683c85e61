"""Rows that grow, beside plain lists of rows that are filled up by hand."""

from __future__ import annotations

import doctest
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conduit
from conduit.backends.emulated import EmulatedBackend
from conduit.backends.reference import ReferenceBackend
from conduit.clock import VirtualClock
from conduit.datasets import push_arrays, to_arrays
from conduit.errors import (
    CancelledError,
    CapacityError,
    FreshnessError,
    OperatorError,
    SchemaError,
    SettingError,
    UnitError,
    WaitTimeout,
)
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Memory, Topology
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier
from tests.store import rows as made_of
from tests.store.rows import each_backend, host, in_order, played, together

Rows = dict[str, np.ndarray]

PAD = {"obs": conduit.Field(("h",), np.float32, grow="pad")}
REPLACE = {"obs": conduit.Field(("h",), np.float32, grow="replace")}


def store(**settings: Any) -> conduit.Store:
    """With room for batches of many rows."""
    unit = {} if "rollout_unit" in settings else {"capacity": 512}
    return made_of.store(**(unit | settings))


def step(first: int, width: int, lanes: int = 1, **leaves: Any) -> Rows:
    """Rows first, first + 1, …, one a lane, of this width; none of their numbers is 0."""
    number = np.arange(first, first + lanes)
    return {"id": number.astype(np.int32), "obs": obs(number, width), **leaves}


def obs(number: np.ndarray, width: int) -> np.ndarray:
    return (1 + number[:, None] + np.arange(width) / 64).astype(np.float32)


def filled(rows: list[np.ndarray], width: int) -> np.ndarray:
    """Rows of any widths as one array, zero where they are shorter."""
    made = np.zeros((len(rows), width), np.float32)
    for place, row in enumerate(rows):
        made[place, : len(row)] = row
    return made


def assert_batch(batch: conduit.Batch, rows: list[np.ndarray], width: int, path: str = "obs") -> None:
    """Leaf `path` is these rows, filled up to `width`, and the batch says so. `rows`: every row's, by key."""
    drawn = [rows[key] for key in batch.info.keys]
    assert host(batch.data[path]).tobytes() == filled(drawn, width).tobytes()
    assert host(batch.data[path]).shape == (len(drawn), width)
    assert batch.info.extents[path].tolist() == [len(row) for row in drawn]
    assert np.array_equal(host(batch.info.padding_mask(path)), filled([row * 0 + 1 for row in drawn], width) == 1)


def several(made: conduit.Store, rows: int = 4, batches: int = 16, **asked: Any) -> Iterator[conduit.Batch]:
    for _ in range(batches):
        yield made.sample(rows, **asked)


def assert_batches(made: conduit.Store, rows: list[Any], width: int, *paths: str, size: int = 4) -> set[int]:
    """Batches of a store are these rows. Returns the keys that were drawn."""
    keys: set[int] = set()
    for batch in several(made, size):
        for path in paths or ("obs",):
            assert_batch(batch, rows, width, path)
        keys |= set(batch.info.keys.tolist())
    return keys


# Filled up


@pytest.mark.parametrize(("backend", "placement"), made_of.EVERYWHERE)
def test_batches_are_rows_filled_up_by_hand_whatever_was_drawn_when_and_wherever_they_are(backend, placement):
    random = np.random.default_rng(seed := 3)
    rows: list[np.ndarray] = []
    width = 2
    with store(backend=backend, placement=placement, capacity=24, batch_size=4, fields=PAD, seed=seed) as made:
        actor, learner = made.actor(lanes=2), made.learner()
        for number in range(0, 80, 2):
            width += int(random.integers(1, 3)) * int(number % 22 == 20)
            actor.push(step(number, width, 2))
            rows += list(obs(np.arange(number, number + 2), width))
            if number >= 4:
                batch = learner.pull()
                assert_batch(batch, rows, width)
                assert host(batch.data["id"]).tolist() == batch.info.keys.tolist()
        assert width > 4


@pytest.mark.parametrize(
    ("declared", "shape"), [(("h", 3), (4, 3)), ((2, "w"), (2, 5)), ((2, "w", 3), (2, 4, 3)), (("n",), (3,))]
)
def test_any_axis_of_a_nested_leaf_may_be_the_one_that_grows(declared, shape):
    axis = next(i for i, size in enumerate(declared) if isinstance(size, str))
    wide = tuple(size + 2 * (i == axis) for i, size in enumerate(shape))

    def rows(*size: int) -> dict[str, Any]:
        return {"obs": {"image": np.full((4, *size), 7, np.uint8), "mean": np.zeros(4, np.float32)}}

    with store(fields={"obs/image": conduit.Field(declared, np.uint8, grow="pad")}, capacity=8) as made:
        actor = made.actor(lanes=4)
        actor.push(rows(*shape))
        actor.push(rows(*wide))
        batch = made.sample(8)
        mask = batch.info.padding_mask("obs/image")
        assert mask.ndim == 1 + len(shape)
        assert mask.shape[1 + axis] == wide[axis]
        assert np.array_equal(batch.data["obs"]["image"], np.broadcast_to(mask, (8, *wide)) * np.uint8(7))
        assert batch.info.extents["obs/image"].tolist() == [
            shape[axis] if key < 4 else wide[axis] for key in batch.info.keys
        ]
        assert batch.info.padding_mask("obs/mean") is None


def test_where_nothing_grew_nothing_is_padding_and_where_nothing_is_declared_nothing_is_said():
    with store(fields=PAD) as made, store() as plain:
        for each in (made, plain):
            each.actor(lanes=4).push(step(0, 3, 4))
        assert made.sample(4).info.padding_mask("obs").all()
        assert plain.sample(4).info.extents == {}
        assert plain.sample(4).info.padding_mask("obs") is None


@each_backend
def test_a_next_and_the_finals_of_rows_that_were_narrower_are_filled_up_as_their_rows_are(backend):
    rows: list[np.ndarray] = []
    after: dict[int, np.ndarray] = {}
    with store(
        backend=backend, capacity=64, fields=PAD, derive={"next_obs": conduit.Next("obs")}, batch_size=16
    ) as made:
        actor = made.actor(lanes=2)
        for time in range(20):
            width = 3 + time // 6
            key = 2 * time
            ends = np.array([time % 5 == 4, False])
            final = {"obs": obs(np.array([1000 + time]), width)} if ends[0] else None
            actor.push(step(key, width, 2, truncated=ends), final=final)
            rows += list(obs(np.arange(key, key + 2), width))
            if final is not None:
                after[key] = final["obs"][0]
        nexts = [after.get(key, rows[key + 2] if key + 2 < len(rows) else rows[key]) for key in range(len(rows))]
        drawn: set[tuple[int, int]] = set()
        for batch in several(made, 32):
            assert_batch(batch, rows, 6)
            assert_batch(batch, nexts, 6, "next_obs")
            drawn |= set(zip(batch.info.extents["obs"].tolist(), batch.info.extents["next_obs"].tolist(), strict=True))
        assert drawn == {(3, 3), (3, 4), (4, 4), (4, 5), (5, 5), (5, 6), (6, 6)}


def test_n_step_returns_sequences_and_stacks_reach_over_a_growth():
    widths = [2, 2, 2, 4, 4, 5]
    rows = [obs(np.array([time]), width)[0] for time, width in enumerate(widths)]

    def pushed(**settings: Any) -> conduit.Store:
        made = store(fields=PAD, **settings)
        actor = made.actor()
        for time, width in enumerate(widths):
            actor.push(step(time, width, reward=np.ones(1, np.float32), terminated=np.zeros(1, np.bool_)))
        return made

    with pushed(item=conduit.NStep(2, gamma=0.5), derive={"next_obs": conduit.Next("obs")}) as made:
        for batch in several(made, 3):
            assert_batch(batch, rows, 5)
            assert_batch(batch, rows[2:], 5, "next_obs")
            assert set(host(batch.data["reward"]).tolist()) == {1.5}
    with pushed(item=conduit.Sequence(4)) as made:
        for batch in several(made, 3):
            for place, key in enumerate(batch.info.keys):
                assert batch.data["obs"][place].tobytes() == filled(rows[key : key + 4], 5).tobytes()
                assert batch.info.extents["obs"][place].tolist() == widths[key : key + 4]
            assert batch.info.padding_mask("obs").shape == (3, 4, 5)
    with pushed(item=conduit.Sequence(8, pad="zero")) as made:
        made.actor().push(step(9, 5, reward=np.ones(1, np.float32), terminated=np.ones(1, np.bool_)))
        for batch in several(made, 1):
            for place, key in enumerate(batch.info.keys):
                real = widths[key:] if key < 6 else [5]
                assert batch.info.extents["obs"][place].tolist() == real + [0] * (8 - len(real))
    with pushed(derive={"frames": conduit.Stack("obs", 3, pad="zero")}) as made:
        for batch in several(made):
            for place, key in enumerate(batch.info.keys):
                frames = [np.zeros(0)] * max(0, 2 - key) + rows[max(0, key - 2) : key + 1]
                assert batch.data["frames"][place].tobytes() == filled(frames, 5).tobytes()
                assert batch.info.extents["frames"][place].tolist() == [len(frame) for frame in frames]


@pytest.mark.parametrize("gamma", [0.5, 0.0])
def test_of_rewards_that_grow_a_sum_is_as_wide_as_the_widest_that_counts(gamma):
    widths = [1, 1, 2, 2, 3, 3]
    fields = {"reward": conduit.Field(("goals",), np.float32, grow="pad")}
    item = conduit.NStep(3, gamma=gamma, from_last=())
    with store(fields=fields, item=item, derive={"next_obs": conduit.Next("obs")}) as made:
        actor = made.actor()
        for time, width in enumerate(widths):
            leaves: dict[str, Any] = {"truncated": np.array([time == 5]), "terminated": np.array([False])}
            final = {"obs": obs(np.array([9]), 2)} if time == 5 else None
            actor.push(step(time, 2, reward=np.full((1, width), 8.0, np.float32), **leaves), final=final)
        for batch in several(made, 6):
            counted = 3 if gamma else 1
            for place, key in enumerate(batch.info.keys):
                rewards = [np.full(width, 8.0, np.float32) for width in widths[key : key + counted]]
                weights = np.array([gamma**i for i in range(len(rewards))], np.float32)
                assert batch.data["reward"][place].tolist() == (weights @ filled(rewards, 3)).tolist()
                assert batch.info.extents["reward"][place] == len(rewards[-1])
            assert batch.info.padding_mask("reward").shape == (6, 3)


def test_priorities_and_what_is_drawn_are_those_of_a_store_whose_rows_were_wide_from_the_start():
    def drawn(grows: bool) -> list[tuple[Any, ...]]:
        with store(capacity=16, fields=PAD, sampler=conduit.Prioritized(), seed=3) as made:
            actor, learner, seen = made.actor(lanes=2), made.learner(), []
            for number in range(0, 60, 2):
                width = 2 + number // 12 if grows else 7
                actor.push(step(number, width, 2), priority=np.array([1.0, 2.0 + number]))
                if number >= 4:
                    batch = learner.pull()
                    seen.append(
                        (batch.info.keys.tolist(), batch.info.priority.tolist(), host(batch.info.weight).tobytes())
                    )
                    made.update_priorities(batch.info.keys, batch.info.keys + 0.5)
            return seen

    assert drawn(True) == drawn(False)


def test_where_a_remover_chooses_the_slots_the_width_goes_by_the_row():
    rows: list[np.ndarray] = []
    with store(capacity=12, fields=PAD, remover=conduit.Lifo(), batch_size=8) as made:
        actor = made.actor()
        for number in range(40):
            width = 2 + number // 8
            actor.push(step(number, width))
            rows += list(obs(np.array([number]), width))
        keys = assert_batches(made, rows, 6)
        assert {len(rows[key]) for key in keys} >= {2, 6}


def test_delivery_hooks_see_the_filled_up_rows_and_the_info_what_was_drawn():
    @conduit.register_delivery()
    def doubled(source, sink):
        data = source.read()
        sink.write({"twice": data["obs"] * 2})

    with store(fields=PAD, delivery=[doubled]) as made:
        actor = made.actor(lanes=4)
        actor.push(step(0, 2, 4))
        actor.push(step(4, 3, 4))
        batch = made.sample(8)
        assert batch.data["twice"].shape == (8, 3)
        assert batch.info.extents["obs"].tolist() == [2 if key < 4 else 3 for key in batch.info.keys]


def test_masks_are_arrays_of_the_learners_own_framework_and_outlive_pickling():
    torch = pytest.importorskip("torch")
    with store(backend="torch", fields=PAD) as made:
        actor = made.actor(lanes=4)
        actor.push(step(0, 2, 4))
        actor.push(step(4, 3, 4))
        batch = made.sample(8)
        mask = batch.info.padding_mask("obs")
        assert isinstance(mask, torch.Tensor)
        assert mask is batch.info.padding_mask("obs")
        again = pickle.loads(pickle.dumps(made.sample(8, to="numpy").info))
        assert again.padding_mask("obs").shape == (8, 3)
        assert again.padding_mask("other") is None


def test_where_every_row_is_given_once_each_comes_with_its_own_width():
    with store(mode="bounded", capacity=16, max_staleness=8, batch_size=4, fields=PAD) as made:
        actor, learner = made.actor(lanes=4), made.learner()
        rows: list[np.ndarray] = []
        for number in range(0, 32, 4):
            width = 2 + number // 8
            actor.push(step(number, width, 4))
            rows += list(obs(np.arange(number, number + 4), width))
            batch = learner.pull()
            assert_batch(batch, rows, width)
            assert batch.info.keys.tolist() == list(range(number, number + 4))


# What can't be


def test_rows_that_grow_undeclared_are_refused_and_told_how_to_declare_it():
    with store() as made:
        actor = made.actor(lanes=2)
        actor.push({"obs": np.zeros((2, 3, 4), np.uint8)})
        with pytest.raises(
            SchemaError, match=r"push: leaf 'obs'.*\(2, 3, 6\).*Field\(\(3, 'h'\), 'uint8', grow='pad'\)"
        ):
            actor.push({"obs": np.zeros((2, 3, 6), np.uint8)})
        with pytest.raises(SchemaError) as narrower:
            actor.push({"obs": np.zeros((2, 3, 2), np.uint8)})
        assert "grow" not in str(narrower.value)
        assert len(made) == 2


def test_narrower_rows_are_refused_with_the_width_that_there_is_by_now():
    with store(fields=PAD) as made:
        actor = made.actor(lanes=2)
        actor.push(step(0, 3, 2))
        actor.push(step(2, 5, 2))
        for push in (actor.push, actor.push_trajectory):
            with pytest.raises(SchemaError, match=r"'obs' has shape \(2, 4\); its axis 'h' was 4 long here and is 5"):
                push(step(4, 4, 2))
        actor.push(step(4, 5, 2))
        # Nor are those of an actor that knows of nothing wider.
        other = made.actor(lanes=2)
        other.push(step(6, 5, 2))
        actor.push(step(8, 6, 2))
        with pytest.raises(SchemaError, match="is 6 by now"):
            other.push(step(10, 5, 2))
        assert made.sample(6).data["obs"].shape == (6, 6)


def test_only_the_axis_that_has_a_name_may_change_and_no_dtype():
    with store(fields={"obs": conduit.Field(("h", 3), np.float32, grow="pad")}) as made:
        actor = made.actor()
        actor.push({"obs": np.zeros((1, 2, 3), np.float32)})
        for wrong in ((1, 2, 4), (1, 3, 4), (1, 2), (1, 4, 3, 1)):
            with pytest.raises(SchemaError, match="leaf 'obs' has shape"):
                actor.push({"obs": np.zeros(wrong, np.float32)})
        with pytest.raises(SchemaError, match="float64; expected float32"):
            actor.push({"obs": np.zeros((1, 4, 3))})
        actor.push({"obs": np.zeros((1, 4, 3), np.float32)})
        assert len(made) == 2


def test_a_declaration_is_checked_at_the_first_push_be_it_only_numbers():
    declared = {"obs": conduit.Field((3,), np.float32), "goal": conduit.Field(("n",), np.float32, grow="pad")}
    with store(fields=declared) as made:
        actor = made.actor()
        goal = np.zeros((1, 2), np.float32)
        for wrong, told in (
            ({"obs": np.zeros((1, 4), np.float32), "goal": goal}, r"'obs' is float32\[4\]; .* declares float32\[3\]"),
            ({"obs": np.zeros((1, 3)), "goal": goal}, r"'obs' is float64\[3\]"),
            ({"obs": np.zeros((1, 3), np.float32)}, "no leaf 'goal'.*there are 'obs'"),
            ({"obs": np.zeros((1, 3), np.float32), "goal": goal[..., None]}, r"'goal' is .* declares float32\['n'\]"),
        ):
            with pytest.raises(SchemaError, match=told):
                actor.push(wrong)
        actor.push({"obs": np.zeros((1, 3), np.float32), "goal": goal})
        with pytest.raises(SchemaError, match="'obs' has shape"):
            actor.push({"obs": np.zeros((1, 4), np.float32), "goal": goal})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ([], "expected a dict"),
        ({"obs": np.float32}, "expected a conduit.Field"),
        ({"": conduit.Field((3,), np.dtype(np.float32))}, "path as a key"),
        ({"obs": conduit.Field(("h",), np.float32)}, "grow=None"),
        ({"obs": conduit.Field(("h",), np.float32, grow="stretch")}, "grow='stretch'"),  # type: ignore[arg-type]
        ({"obs": conduit.Field((3,), np.float32, grow="pad")}, "names no axis"),
        ({"obs": conduit.Field(("h", "w"), np.float32, grow="pad")}, "names 2 axes"),
        ({"obs": conduit.Field((-1, "w"), np.float32, grow="pad")}, "has -1"),
        ({"obs": conduit.Field((1.5,), np.float32)}, "has 1.5"),  # type: ignore[arg-type]
        ({"obs": conduit.Field("h", np.float32, grow="pad")}, "shape='h'"),
        ({"obs": conduit.Field(("h",), "floaty", grow="pad")}, "dtype='floaty'"),
    ],
)
def test_declarations_that_cant_be_name_what_is_wrong(fields, told):
    with pytest.raises(SettingError, match=told):
        store(fields=fields)


def test_finals_are_as_wide_as_the_rows_that_they_end():
    with store(fields=PAD, derive={"next_obs": conduit.Next("obs")}) as made:
        actor = made.actor()
        actor.push(step(0, 3, terminated=np.array([False])))
        with pytest.raises(SchemaError, match=r"final\['obs'\] is float32\[1, 3\]; expected float32\[5\]"):
            actor.push(step(1, 5, terminated=np.array([True])), final={"obs": obs(np.array([9]), 3)})
        # Nothing of it was taken, the wider form included.
        actor.push(step(1, 3, terminated=np.array([True])), final={"obs": obs(np.array([9]), 3)})
        assert made.sample(2).data["next_obs"].shape == (2, 3)


def test_where_there_is_no_room_the_pusher_hears_of_it_and_the_store_goes_on_as_it_was():
    rows = list(obs(np.arange(40), 4))
    with store(capacity=32, fields=PAD, budgets={"pageable": 32 * (4 + 16) + 256}) as made:
        actor = made.actor(lanes=2)
        for number in range(0, 8, 2):
            actor.push(step(number, 4, 2))
        with pytest.raises(CapacityError, match=r"pageable needs .* its budget is"):
            actor.push(step(8, 400, 2))
        for number in range(8, 40, 2):
            actor.push(step(number, 4, 2))
        assert made.info()["inserted"] == 40
        assert_batches(made, rows, 4)


def test_where_there_is_no_room_for_what_would_replace_rows_they_stay_and_go_on_being_drawn():
    with store(capacity=32, batch_size=4, fields=REPLACE, budgets={"pageable": 32 * (4 + 32) + 256}) as made:
        actor = made.actor(lanes=2)
        for number in range(0, 8, 2):
            actor.push(step(number, 4, 2))
        with pytest.raises(CapacityError, match=r"pageable needs .* its budget is"):
            actor.push(step(8, 400, 2))
        for number in range(8, 12, 2):
            actor.push(step(number, 4, 2))
        assert_batches(made, list(obs(np.arange(12), 4)), 4)
        # Both forms at once wouldn't have room.
        for number in range(12, 16, 2):
            actor.push(step(number, 8, 2))
        rows = [*obs(np.arange(12), 4), *obs(np.arange(12, 16), 8)]
        assert assert_batches(made, rows, 8) == {12, 13, 14, 15}


# Replaced


def test_old_rows_are_drawn_until_there_are_enough_new_ones_and_never_after():
    with store(capacity=32, batch_size=4, fields=REPLACE, limiter=conduit.MinSize(6), timeout_s=2.0) as made:
        actor, learner = made.actor(lanes=2), made.learner()
        for number in range(0, 8, 2):
            actor.push(step(number, 3, 2))
        for number in range(8, 12, 2):
            mine = step(number, 5, 2)
            actor.push(mine)
            # As environments do, which fill their arrays again.
            mine["obs"][:] = -1
            batch = learner.pull()
            assert batch.data["obs"].shape == (4, 3)
            assert max(batch.info.keys) < 8
            assert len(made) == 8
        actor.push(step(12, 5, 2))
        assert len(made) == 6
        rows = [*obs(np.arange(8), 3), *obs(np.arange(8, 14), 5)]
        for _ in range(4):
            batch = learner.pull()
            assert_batch(batch, rows, 5)
            assert min(batch.info.keys) >= 8


def test_without_a_limiter_a_batch_of_new_rows_is_enough_and_never_more_than_the_store_holds():
    with store(capacity=32, batch_size=4, fields=REPLACE) as made:
        actor = made.actor()
        for number in range(10):
            actor.push(step(number, 3))
        for number in range(10, 13):
            actor.push(step(number, 4))
        assert len(made) == 10
        actor.push(step(13, 4))
        assert len(made) == 4
    two = conduit.Schedule(overlap_del=True, g_del=2)
    with store(capacity=8, batch_size=8, fields=REPLACE, schedule=two) as made:
        actor = made.actor()
        for number in range(8):
            actor.push(step(number, 3))
        for number in range(8, 16):
            assert made.sample(8).data["obs"].shape == (8, 3)
            actor.push(step(number, 4))
        assert made.sample(8).data["obs"].shape == (8, 4)


def test_priorities_ends_and_links_of_rows_that_were_held_back_are_right():
    with store(
        capacity=32,
        batch_size=6,
        fields=REPLACE,
        sampler=conduit.Prioritized(alpha=1.0, eps=0.0),
        derive={"next_obs": conduit.Next("obs")},
    ) as made:
        actor = made.actor()
        none = np.array([False])
        for number in range(6):
            actor.push(step(number, 3, truncated=none), priority=np.array([50.0]))
        for number in range(6, 14):
            ends = np.array([number == 9])
            final = {"obs": obs(np.array([500]), 5)} if ends[0] else None
            actor.push(step(number, 5, truncated=ends), final=final, priority=np.array([float(number)]))
        drawn: set[int] = set()
        for batch in several(made, 6):
            assert batch.info.priority.tolist() == batch.info.keys.tolist()
            nexts = [500 if key == 9 else key + 1 for key in batch.info.keys]
            assert host(batch.data["next_obs"]).tobytes() == obs(np.array(nexts), 5).tobytes()
            drawn |= set(batch.info.keys.tolist())
        assert drawn == set(range(6, 13))
        assert made.update_priorities(np.arange(14), np.ones(14)).stale == 6
        assert {key for batch in several(made, 6) for key in batch.info.keys.tolist()} == set(range(6, 13))


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": conduit.Fifo()},
        {"sampler": conduit.WithoutReplacement()},
        {"sampler": conduit.Recency(half_life=8)},
        {"sampler": conduit.Stratified()},
        {"sampler": conduit.Uniform(replacement=False)},
        {"sampler": conduit.MaxHeap()},
        {"max_times_sampled": 3},
        {"remover": conduit.Lifo()},
        {"remover": conduit.MinHeap(), "sampler": conduit.Prioritized()},
        {"tables": {"latest": conduit.Table(conduit.Lifo())}},
        {"derive": {"next_obs": conduit.Next("obs")}, "sampler": conduit.Fifo()},
        {"item": conduit.Sequence(2), "sampler": conduit.Prioritized()},
    ],
    ids=str,
)
def test_nobody_draws_a_row_that_was_replaced_whatever_chooses(settings):
    table = "latest" if "tables" in settings else "main"
    with store(capacity=16, batch_size=2, fields=REPLACE, **settings) as made:
        actor = made.actor()
        seen: set[int] = set()
        for number in range(60):
            actor.push(step(number, 3 + number // 20))
            # Two rows are a batch: so few replace those that are there.
            first = max([each for each in range(20, 60, 20) if number > each], default=0)
            if number % 20 >= 4:
                batch = made.sample(2, table=table)
                assert min(batch.info.keys) >= first
                assert batch.data["obs"].shape[-1] == 3 + first // 20
                seen |= set(batch.info.keys.tolist())
        assert len(made) <= 16
        assert max(seen) > 40


@pytest.mark.parametrize("linked", [False, True])
def test_a_replacement_waits_for_neither_side_for_ever(linked):
    @conduit.register_ingestion(per="trajectory")
    def whole(source, sink):
        sink.write(source.read())

    limiter = conduit.SampleToInsertRatio(1.0, min_size_to_sample=8, error_buffer=16)
    settings: dict[str, Any] = {}
    if linked:
        settings = {"ingestion": [whole], "derive": {"next_obs": conduit.Next("obs")}}
    with store(capacity=32, batch_size=4, fields=REPLACE, limiter=limiter, timeout_s=1.0, **settings) as made:
        actor, learner = made.actor(lanes=2), made.learner()
        pushed, wide = 0, 0
        for _ in range(200):
            if made.can_insert(2):
                ends = np.full(2, pushed % 10 == 8)
                actor.push(step(pushed, 3 + (pushed >= 40), 2, truncated=ends))
                pushed += 2
            if made.can_sample():
                wide += learner.pull().data["obs"].shape[1] == 4
        assert pushed > 80
        assert wide > 10


def test_rows_that_are_held_back_count_as_pushed_before_and_after_a_restore(tmp_path: Path):
    limiter = conduit.SampleToInsertRatio(1.0, min_size_to_sample=8, error_buffer=16)
    with store(capacity=64, batch_size=4, fields=REPLACE, limiter=limiter) as made:
        actor = made.actor(lanes=4)
        for number in range(0, 24, 4):
            assert made.can_insert(4)
            actor.push(step(number, 3 + (number >= 20), 4))
        assert len(made) == 20
        assert made.info()["held_rows"] == 4
        assert not made.can_insert(4)
        made.save(tmp_path / "saved")
        for each in (made, conduit.Store.restore(tmp_path / "saved")):
            assert not each.can_insert(4)
            assert each.learner().pull().data["obs"].shape == (4, 3)
            each.actor(lanes=4).push(step(24, 4, 4))
            assert each.read().keys.tolist() == list(range(20, 28))
            each.close()


def test_where_the_room_is_gone_when_there_are_enough_the_last_push_is_not_taken_and_the_others_are_held_on():
    backend = ReferenceBackend(device_bytes=4096)
    at: dict[str, Any] = {"backend": backend, "placement": "device:0", "capacity": 32}
    with store(batch_size=4, fields=REPLACE, **at) as made:
        actor = made.actor()
        for number in range(6):
            actor.push(step(number, 4))
        for number in range(6, 9):
            actor.push(step(number, 24))
        with store(**at) as other:
            other.actor().push({"much": np.zeros((1, 60), np.uint8)})
            with pytest.raises(CapacityError, match="device:0 needs"):
                actor.push(step(9, 24))
            assert made.read().keys.tolist() == list(range(6))
        actor.push(step(9, 24))
        read = made.read()
        assert read.data["obs"].tobytes() == obs(np.arange(6, 10), 24).tobytes()
        assert read.keys.tolist() == list(range(6, 10))


@pytest.mark.parametrize(("fields", "stays"), [(PAD, False), (REPLACE, True)], ids=["pad", "replace"])
def test_rows_that_take_the_place_of_others_go_where_there_is_room_once_these_are_gone(fields, stays):
    near, pinned = Endpoint(Tier.DEVICE, 0), Endpoint(Tier.PINNED)
    here = (PAGEABLE, pinned, near)
    quick = {near: 1e9, PAGEABLE: 1e9, pinned: 1e7}
    topology = Topology(
        "one device",
        {at: Memory(size, size, Source.ASSUMED) for at, size in zip(here, (1 << 20, 1 << 20, 16_000), strict=True)},
        {(one, to): Leg(min(quick[one], quick[to]), 0.0) for one in here for to in here},
    )

    def scene(clock: VirtualClock) -> None:
        backend = EmulatedBackend(topology, "reference", clock)
        asked: dict[str, Any] = {"placement": ["single_gpu", "cpu_pinned"], "topology": topology, "clock": clock}
        with store(backend=backend, capacity=64, fields=fields, **asked) as made:
            actor = made.actor()
            for number in range(6):
                actor.push(step(number, 30))
            assert made.info()["bytes_by_endpoint"] == {"device:0": 64 * 124}
            for number in range(6, 12):
                actor.push(step(number, 40))
            assert made.info()["bytes_by_endpoint"] == {"device:0" if stays else "pinned": 64 * 164}
            assert backend.free_bytes(near) == 16_000 - stays * 64 * 164
            assert made.read().keys.tolist() == list(range(6 if stays else 0, 12))

    played(0, scene)


def test_an_actor_that_leaves_while_its_rows_are_held_back_is_followed_by_nobody():
    with store(capacity=32, batch_size=4, fields=REPLACE, derive={"next_obs": conduit.Next("obs")}) as made:
        actor = made.actor()
        for number in range(6):
            actor.push(step(number, 3))
        for number in range(6, 8):
            actor.push(step(number, 4))
        actor.close()
        actor = made.actor()
        for number in range(8, 13):
            actor.push(step(number, 4))
        rows, nexts = (list(obs(np.arange(first, first + 13), 4)) for first in (0, 1))
        assert assert_batches(made, rows, 4) == {6, 8, 9, 10, 11}
        assert_batches(made, nexts, 4, "next_obs")


def test_a_queue_loses_no_row_so_nothing_may_replace_its_rows():
    for settings in ({"mode": "bounded", "max_staleness": 4}, {"tables": {"q": conduit.Table.queue(8)}}):
        with pytest.raises(SettingError, match=r"grow='replace'.*expected grow='pad'"):
            store(fields=REPLACE, **settings)
        store(fields=PAD, **settings).close()


# Mixed, taken out, explained


@pytest.mark.parametrize("to", ["numpy", "torch", "jax"])
def test_a_mixture_fills_up_rows_of_a_store_in_which_they_are_shorter(to):
    pytest.importorskip(to)
    # The first has grown and the second not, the third can't, and is wider than both at first.
    with store(fields=PAD) as grown, store(fields=PAD) as not_yet, store() as fixed:
        stores = {"grown": grown, "not_yet": not_yet, "fixed": fixed}
        actors = {name: each.actor(lanes=4) for name, each in stores.items()}
        came = {"grown": [2, 3], "not_yet": [2, 2], "fixed": [4, 4]}
        for name, widths in came.items():
            for number, width in enumerate(widths):
                actors[name].push(step(4 * number, width, 4))
        mixture = conduit.Mixture(stores, dict.fromkeys(stores, 1 / 3), 12, to=to)

        def check(batch: Any) -> None:
            number, source = host(batch.data["id"]), batch.info.source
            widths = [came[mixture.stores[s]][n // 4] for s, n in zip(source, number, strict=True)]
            rows = [obs(number[i : i + 1], width)[0] for i, width in enumerate(widths)]
            widest = max(max(each) for each in came.values())
            assert host(batch.data["obs"]).tobytes() == filled(rows, widest).tobytes()
            assert batch.info.extents["obs"].tolist() == widths
            mask = batch.info.padding_mask("obs")
            assert type(mask) is type(batch.data["obs"])
            assert np.array_equal(host(mask), filled([row * 0 + 1 for row in rows], widest) == 1)
            assert batch.info.padding_mask("obs") is mask
            assert batch.info.padding_mask("id") is None
            again = pickle.loads(pickle.dumps(batch.info))
            assert again.extents["obs"].tolist() == widths
            assert np.array_equal(host(again.padding_mask("obs")), host(mask))

        for _ in range(4):
            check(mixture.pull())
        actors["grown"].push(step(8, 6, 4))
        came["grown"].append(6)
        for _ in range(4):
            check(mixture.pull())


def test_a_mixture_goes_on_with_a_batch_of_which_a_part_was_drawn_before_rows_grew():
    with store(fields=PAD) as one, store(fields=PAD, timeout_s=0.01) as other:
        one.actor(lanes=4).push(step(0, 2, 4))
        mixture = conduit.Mixture({"one": one, "other": other}, {"one": 0.5, "other": 0.5}, 4)
        with pytest.raises(WaitTimeout):
            mixture.pull(timeout_s=0.01)
        other.actor(lanes=4).push(step(0, 5, 4))
        batch = mixture.pull()
        assert batch.data["obs"].shape == (4, 5)
        assert batch.info.extents["obs"].tolist() == [2, 2, 5, 5]


def test_what_a_mixture_can_not_fill_up_it_refuses_by_name():
    widths = {"plain": 2, "other": 3}
    with store() as plain, store() as other:
        for name, made in (("plain", plain), ("other", other)):
            made.actor(lanes=4).push(step(0, widths[name], 4))
        shares = {"plain": 0.5, "other": 0.5}
        with pytest.raises(SchemaError, match=r"'plain' and 'other' can't be mixed: leaf 'obs' is .*\[2\] in one"):
            conduit.Mixture({"plain": plain, "other": other}, shares, 4).pull()
    one, two = ({"obs": conduit.Field(shape, np.float32, grow="pad")} for shape in (("h", 2), (2, "w")))
    with store(fields=one) as plain, store(fields=two) as other:
        for made in (plain, other):
            made.actor().push({"obs": np.zeros((1, 2, 2), np.float32)})
        with pytest.raises(SchemaError, match="'obs' grows along different axes"):
            conduit.Mixture({"plain": plain, "other": other}, shares, 2).pull()
    # Entries of other lengths are told as such.
    sequences = [
        store(fields=PAD, item=conduit.Sequence(length), derive={"next_obs": conduit.Next("obs")}) for length in (2, 3)
    ]
    for made in sequences:
        for number in range(6):
            made.actor().push_trajectory({k: np.repeat(v, 6, 0) for k, v in step(number, 2).items()})
    with sequences[0] as plain, sequences[1] as other, pytest.raises(SchemaError, match=r"can't be mixed: leaf"):
        conduit.Mixture({"plain": plain, "other": other}, shares, 2).pull()


@pytest.mark.parametrize("linked", [False, True])
def test_rows_are_taken_out_whole_though_they_grow_between_two_chunks(linked, monkeypatch):
    rows = [obs(np.array([n]), 2 + n // 10)[0] for n in range(40)]
    finals = {n: obs(np.array([100 + n]), len(rows[n]))[0] for n in range(40) if n % 5 == 4}
    settings: dict[str, Any] = {"derive": {"next_obs": conduit.Next("obs")}} if linked else {}
    with store(capacity=64, fields=PAD, **settings) as made:
        actor = made.actor()

        def push(stop: int) -> None:
            for number in range(len(made), stop):
                final = {"obs": finals[number][None]} if number in finals else None
                actor.push(step(number, len(rows[number]), truncated=np.array([number in finals])), final=final)

        push(25)
        read = made.read

        def read_then_grow(first: int = 0, most: int | None = None) -> Any:
            part = read(first, 10)
            push(min(len(made) + 8, 40))
            return part

        monkeypatch.setattr(made, "read", read_then_grow)
        monkeypatch.setattr("conduit.datasets._CHUNK_BYTES", 10 * 13)
        arrays = to_arrays(made)
        widest = len(rows[30])
        assert arrays.keys.tolist() == list(range(25))
        assert arrays.data["obs"].tobytes() == filled(rows[:25], widest).tobytes()
        assert arrays.extents["obs"].tolist() == [len(row) for row in rows[:25]]
        if linked:
            assert arrays.final is not None
            assert arrays.final_rows.tolist() == [n for n in finals if n < 25]
            last = filled([finals[n] for n in arrays.final_rows.tolist()], widest)
            assert arrays.final["obs"].tobytes() == last.tobytes()
        # They go into another store as they came out.
        with store(capacity=64, fields=PAD, **settings) as other:
            assert push_arrays(other.actor(), arrays) == 25
            assert other.read().data["obs"].tobytes() == arrays.data["obs"].tobytes()


def test_of_rows_that_are_replaced_between_two_chunks_those_that_were_read_stay(monkeypatch):
    with store(capacity=64, batch_size=4, fields=REPLACE) as made:
        actor = made.actor()
        for number in range(20):
            actor.push(step(number, 2))
        read = made.read

        def read_then_replace(first: int = 0, most: int | None = None) -> Any:
            part = read(first, 10)
            for number in range(20, 24):
                actor.push(step(number, 5))
            return part

        monkeypatch.setattr(made, "read", read_then_replace)
        monkeypatch.setattr("conduit.datasets._CHUNK_BYTES", 10 * 12)
        arrays = to_arrays(made)
        assert arrays.keys.tolist() == list(range(10))
        assert arrays.data["obs"].tobytes() == obs(np.arange(10), 2).tobytes()


def test_what_a_field_says_of_growing_rows_is_so():
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    (example,) = finder.find(conduit.Field, "conduit.Field", globs={})
    assert runner.run(example).attempted > 8
    assert runner.failures == 0


# Groups, hooks, threads


@conduit.register_ingestion()
def counted(source, sink):
    data = source.read()
    SEEN.append(data["obs"].shape)
    sink.write({**data, "sum": data["obs"].sum(axis=1)})


SEEN: list[tuple[int, ...]] = []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fields", [PAD, REPLACE], ids=["pad", "replace"])
def test_a_group_is_split_where_rows_grow_and_its_order_is_kept(overlap, fields):
    SEEN.clear()
    schedule = conduit.Schedule(overlap_ing=overlap, g_ing=4)
    with store(capacity=64, fields=fields, ingestion=[counted], schedule=schedule, batch_size=2) as made:
        actor = made.actor()
        for number in range(22):
            actor.push(step(number, 3 + number // 6))
        rows = [obs(np.array([number]), 3 + number // 6)[0] for number in range(22)]
        with made.preloading():
            pass
        for batch in several(made, 4):
            assert_batch(batch, rows, 6)
            assert host(batch.data["sum"]).tobytes() == np.array([rows[key].sum() for key in batch.info.keys]).tobytes()
            assert host(batch.data["id"]).tolist() == batch.info.keys.tolist()
    assert in_order(SEEN, [(4, 3), (2, 3), (2, 4), (4, 4), (4, 5), (2, 5), (2, 6)])
    assert sum(rows for rows, _ in SEEN) == 22


@pytest.mark.parametrize("overlap", [False, True])
def test_without_hooks_as_well_and_with_finals_that_wait(overlap):
    schedule = conduit.Schedule(overlap_ing=overlap, g_ing=4)
    rows = [obs(np.array([n]), 3 + n // 6)[0] for n in range(18)]
    nexts = [obs(np.array([100 + n if n % 6 == 5 else n + 1]), 3 + n // 6)[0] for n in range(18)]
    with store(capacity=64, fields=PAD, schedule=schedule, derive={"next_obs": conduit.Next("obs")}) as made:
        actor = made.actor()
        for number in range(18):
            ends = np.array([number % 6 == 5])
            width = 3 + number // 6
            final = {"obs": obs(np.array([100 + number]), width)} if ends[0] else None
            actor.push(step(number, width, truncated=ends), final=final)
        assert assert_batches(made, rows, 5, "obs", size=18) == set(range(18))
        assert_batches(made, nexts, 5, "next_obs", size=18)


def test_what_a_hook_makes_wider_counts_as_growth():
    @conduit.register_ingestion()
    def widened(source, sink):
        data = source.read()
        sink.write({**data, "obs": obs(data["id"], 2 + int(data["id"][-1]) // 5)})

    rows = [obs(np.array([number]), 2 + number // 5)[0] for number in range(14)]
    with store(fields=PAD, ingestion=[widened]) as made:
        actor = made.actor()
        for number in range(14):
            actor.push({"id": np.array([number], np.int32)})
        assert_batches(made, rows, 4)


def test_a_hook_that_makes_rows_wider_than_there_is_room_for_costs_one_push():
    @conduit.register_ingestion()
    def widened(source, sink):
        data = source.read()
        sink.write({**data, "obs": obs(data["id"], 500 if data["id"][0] == 6 else 4)})

    with store(capacity=32, fields=PAD, ingestion=[widened], budgets={"pageable": 32 * 20 + 256}) as made:
        actor = made.actor()
        for number in [*range(6), 7, 8]:
            actor.push({"id": np.array([number], np.int32)})
            if number == 5:
                with pytest.raises(CapacityError, match="its budget is"):
                    actor.push({"id": np.array([6], np.int32)})
        assert made.read().data["id"].tolist() == [0, 1, 2, 3, 4, 5, 7, 8]
        assert made.sample(8).data["obs"].shape == (8, 4)


@pytest.mark.parametrize("scope", ["row", "unit"])
@pytest.mark.parametrize("fields", [PAD, REPLACE], ids=["pad", "replace"])
def test_where_hooks_hand_on_rows_that_there_is_no_room_for_the_next_may_be_as_narrow_as_before(scope, fields):
    @conduit.register_ingestion(per=scope)
    def doubled(source, sink):
        data = source.read()
        sink.write({**data, "twice": data["id"] * 2})

    settings: dict[str, Any] = {"ingestion": [doubled], "budgets": {"pageable": 32 * 28 + 256}}
    with store(capacity=32, fields=fields, **settings) as made:
        actor, other = made.actor(), made.actor()
        for number in range(4):
            actor.push(step(number, 3))
        for _ in range(2):
            with pytest.raises(CapacityError, match="its budget is"):
                actor.push(step(4, 300))
        for number in range(4, 8):
            other.push(step(number, 3))
        assert made.read().data["obs"].tobytes() == obs(np.arange(8), 3).tobytes()


def test_a_hook_that_makes_rows_narrower_stops_the_store_as_any_other_form_does():
    @conduit.register_ingestion()
    def undeclared(source, sink):
        data = source.read()
        sink.write({**data, "sum": np.zeros((1, int(data["id"][0])), np.float32)})

    with store(fields=PAD, ingestion=[undeclared]) as made:
        actor = made.actor()
        actor.push(step(2, 3))
        with pytest.raises(SchemaError, match="'sum' has shape"):
            actor.push(step(3, 3))
        with pytest.raises((SchemaError, OperatorError)):
            actor.push(step(4, 3))


def test_a_trajectory_that_goes_on_while_rows_grow_comes_whole_as_wide_as_its_widest_row():
    shapes = []

    @conduit.register_ingestion(per="trajectory")
    def seen(source, sink):
        fragments = source.read()
        shapes.extend(fragment.rows["obs"].shape for fragment in fragments)
        sink.write(fragments)

    with store(fields=PAD, ingestion=[seen], derive={"next_obs": conduit.Next("obs")}) as made:
        actor = made.actor(lanes=2)
        for time, width in enumerate([2, 2, 3, 3, 3, 4]):
            ends = np.array([time == 3, time in (1, 5)])
            final = {"obs": obs(np.full(ends.sum(), 100 + time), width)} if ends.any() else None
            actor.push(step(2 * time, width, 2, truncated=ends), final=final)
        assert shapes == [(2, 2), (4, 3), (4, 4)]
        for batch in several(made, 8):
            number = host(batch.data["id"])
            pushed = [2 + (n // 2 >= 2) + (n // 2 >= 5) for n in number]
            rows = [obs(number, 4)[i, :width] for i, width in enumerate(pushed)]
            assert host(batch.data["obs"]).tobytes() == filled(rows, 4).tobytes()
            assert (batch.info.extents["obs"] >= pushed).all()


@pytest.mark.parametrize("seed", range(12))
def test_actors_that_grow_at_once_lose_nothing_and_no_row_is_torn(seed):
    def scene(clock: VirtualClock) -> None:
        schedule = [None, conduit.Schedule(overlap_ing=True, g_ing=2), conduit.Schedule(overlap_del=True)][seed % 3]
        with store(
            capacity=256, fields=PAD, clock=clock, schedule=schedule, derive={"next_obs": conduit.Next("obs")}
        ) as made:
            taken: dict[int, int] = {}

            def act(first: int) -> Callable[[], None]:
                def run() -> None:
                    actor = made.actor()
                    width = 2
                    for number in range(first, first + 12):
                        width += number % 4 == 3
                        while True:
                            try:
                                actor.push(step(number, width))
                            except SchemaError:
                                # Another was quicker.
                                width += 1
                                continue
                            taken[number] = width
                            break
                        clock.sleep(0.001 * (1 + number % 3))

                return run

            def learn() -> None:
                learner = made.learner()
                for _ in range(10):
                    check(learner.pull())
                    clock.sleep(0.002)

            def check(batch: conduit.Batch) -> None:
                number, extent = host(batch.data["id"]), batch.info.extents["obs"]
                expected = filled(
                    [obs(number[i : i + 1], each)[0] for i, each in enumerate(extent)], batch.data["obs"].shape[1]
                )
                assert host(batch.data["obs"]).tobytes() == expected.tobytes()
                nexts = batch.info.extents["next_obs"]
                expected = filled(
                    [obs(number[i : i + 1] + 1, each)[0] for i, each in enumerate(nexts)], batch.data["obs"].shape[1]
                )
                assert host(batch.data["next_obs"]).tobytes() == expected.tobytes()
                for n, each in zip(number.tolist(), extent.tolist(), strict=True):
                    assert taken.get(n, each) == each

            for result, _ in together(clock, act(0), act(100), learn):
                assert result is None, result
            with made.preloading():
                pass
            data = made.read()
            assert sorted(data.data["id"].tolist()) == [*range(12), *range(100, 112)]
            assert dict(zip(data.data["id"].tolist(), data.extents["obs"].tolist(), strict=True)) == taken

    played(seed, scene)


@pytest.mark.parametrize("seed", range(8))
def test_saves_and_migrations_meanwhile_are_whole_as_well(seed, tmp_path):
    rows = [obs(np.array([n]), 2 + n // 10)[0] for n in range(60)]
    fields = (
        PAD if seed % 2 else {"obs": conduit.Field(("h",), np.float32, grow="pad"), "id": conduit.Field((), np.int32)}
    )

    def scene(clock: VirtualClock) -> None:
        with store(capacity=48, fields=fields, clock=clock) as made:

            def act() -> None:
                actor = made.actor()
                for number in range(60):
                    actor.push(step(number, 2 + number // 10))
                    clock.sleep(0.001)

            def save() -> None:
                for _ in range(6):
                    clock.sleep(0.007)
                    made.save(tmp_path / "saved")

            def move() -> None:
                for number in range(5):
                    clock.sleep(0.009)
                    made.migrate(["device:0", "device:1"] if number % 2 else "pageable")

            def learn() -> None:
                learner = made.learner()
                for _ in range(20):
                    batch = learner.pull()
                    assert_batch(batch, rows, batch.data["obs"].shape[1])
                    clock.sleep(0.002)

            for result, _ in together(clock, act, save, move, learn):
                assert result is None, result
            assert_batches(made, rows, 7)

    played(seed, scene)
    with conduit.Store.restore(tmp_path / "saved") as again:
        read = again.read()
        assert read.keys[-1] > 30
        width = read.data["obs"].shape[1]
        assert read.data["obs"].tobytes() == filled([rows[key] for key in read.keys], width).tobytes()
        assert read.extents["obs"].tolist() == [len(rows[key]) for key in read.keys]


@pytest.mark.parametrize("schedule", [None, conduit.Schedule(overlap_ing=True, overlap_del=True, g_ing=3, g_del=2)])
def test_a_rerun_gives_the_same_batches_byte_for_byte(schedule):
    def drawn() -> list[Any]:
        with store(capacity=32, fields=PAD, schedule=schedule, seed=7) as made:
            actor, learner, seen = made.actor(lanes=2), made.learner(), []
            for number in range(0, 80, 2):
                actor.push(step(number, 2 + number // 16, 2))
                if number >= 16:
                    batch = learner.pull()
                    seen.append(
                        (
                            batch.info.keys.tolist(),
                            host(batch.data["obs"]).tobytes(),
                            batch.info.extents["obs"].tolist(),
                        )
                    )
            return seen

    assert drawn() == drawn()


# On-policy


@pytest.mark.parametrize("fields", [PAD, REPLACE], ids=["pad", "replace"])
@pytest.mark.parametrize("g_ing", [1, 0.5])
def test_on_policy_rows_grow_with_the_first_of_an_iteration(fields, g_ing):
    schedule = conduit.Schedule(g_ing=g_ing) if g_ing == 1 else conduit.Schedule(overlap_ing=True, g_ing=g_ing)
    with store(rollout_unit=8, fields=fields, schedule=schedule) as made:
        actor, learner = made.actor(lanes=2), made.learner()
        for iteration in range(4):
            width = 3 + iteration
            for number in range(8 * iteration, 8 * iteration + 8, 2):
                actor.push(step(number, width, 2))
            seen = []
            for batch in learner:
                assert host(batch.data["obs"]).tobytes() == obs(host(batch.data["id"]), width).tobytes()
                assert set(batch.info.extents["obs"]) == {width}
                seen += batch.info.keys.tolist()
            assert sorted(seen) == list(range(8 * iteration, 8 * iteration + 8))
            made.advance()


def test_on_policy_an_iteration_is_of_one_form():
    with store(rollout_unit=4, fields=PAD) as made:
        actor, learner = made.actor(lanes=2), made.learner()
        actor.push(step(0, 3, 2))
        for _ in range(2):
            with pytest.raises(UnitError, match=r"rows grew, and iteration 0 has rows already.*advance"):
                actor.push(step(2, 4, 2))
        actor.push(step(2, 3, 2))
        assert learner.pull().data["obs"].shape == (4, 3)
        with pytest.raises(WaitTimeout, match="rows of version 1 wait for iteration 0 to end"):
            actor.push(step(4, 4, 2), version=1, timeout_s=0.01)
        with pytest.raises(FreshnessError, match="version 5"):
            actor.push(step(4, 4, 2), version=5)
        # Nothing of these was taken, the wider form included.
        assert made.info()["schema"].startswith("id: int32[], obs: float32[3]")
        made.advance()
        actor.push(step(4, 4, 2))
        with pytest.raises(SchemaError, match="is 4 by now"):
            actor.push(step(6, 3, 2))
        actor.push(step(6, 4, 2))
        assert learner.pull().data["obs"].shape == (4, 4)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("hooks", [False, True])
def test_on_policy_wider_rows_wait_for_their_iteration_and_are_its_first(seed, hooks):
    @conduit.register_ingestion()
    def doubled(source, sink):
        data = source.read()
        sink.write({**data, "twice": data["id"] * 2})

    def scene(clock: VirtualClock) -> None:
        schedule = conduit.Schedule(overlap_ing=True, g_ing=0.5) if seed % 2 else None
        asked: dict[str, Any] = {"fields": PAD, "schedule": schedule, "ingestion": [doubled] if hooks else []}
        with store(rollout_unit=8, clock=clock, **asked) as made:
            actors, learner = [made.actor(lanes=2) for _ in range(4)], made.learner()
            for place, actor in enumerate(actors):
                actor.push(step(2 * place, 3, 2))
            # Of those that wait, three are as wide as before, and one is wider.
            waiting = [
                lambda place=place, actor=actor: actor.push(step(8 + 2 * place, 3 + (place == 2), 2), version=1)
                for place, actor in enumerate(actors)
            ]

            def advanced() -> int:
                clock.sleep(1.0)
                assert "rows of version 1 wait for iteration 0 to end" in made.why_blocked()
                assert {batch.data["obs"].shape for batch in learner} == {(4, 3)}
                return made.advance()

            results = together(clock, *waiting, advanced)
            assert [result for result, _ in results] == [2, 2, 2, 2, 1]
            assert {at_s for _, at_s in results} == {1.0}
            first: dict[int, int] = {}
            for batch in learner:
                number = host(batch.data["id"])
                rows = [obs(number[i : i + 1], 4 if n in (12, 13) else 3)[0] for i, n in enumerate(number)]
                assert host(batch.data["obs"]).tobytes() == filled(rows, 4).tobytes()
                assert batch.info.extents["obs"].tolist() == [len(row) for row in rows]
                first |= dict(zip(batch.info.keys.tolist(), number.tolist(), strict=True))
            assert sorted(first.values()) == list(range(8, 16))
            assert first[8] == 12

    played(seed, scene)


@pytest.mark.parametrize("scope", ["unit", "trajectory"])
@pytest.mark.parametrize("g_ing", [1, 0.5])
def test_on_policy_a_hook_sees_all_rows_of_an_iteration_that_is_wider_than_the_one_before(scope, g_ing):
    seen = []

    @conduit.register_ingestion(per=scope)
    def counted(source, sink):
        data = source.read()
        parts = [fragment.rows for fragment in data] if scope == "trajectory" else [data]
        seen.append((sum(len(part["id"]) for part in parts), *{part["obs"].shape[1] for part in parts}))
        sink.write(data)

    schedule = conduit.Schedule(g_ing=g_ing, overlap_ing=g_ing < 1)
    with store(rollout_unit=8, fields=PAD, ingestion=[counted], schedule=schedule) as made:
        actor, learner = made.actor(lanes=2), made.learner()
        for iteration in range(3):
            for number in range(8 * iteration, 8 * iteration + 8, 2):
                actor.push(step(number, 3 + iteration, 2))
            actor.end_unit()
            drawn = [number for batch in learner for number in host(batch.data["id"]).tolist()]
            assert sorted(drawn) == list(range(8 * iteration, 8 * iteration + 8))
            made.advance()
    assert seen == [(8, 3), (8, 4), (8, 5)]


def test_on_policy_who_gives_up_while_wider_rows_wait_holds_nobody_back():
    def scene(clock: VirtualClock) -> None:
        with store(rollout_unit=4, fields=PAD, clock=clock) as made:
            wide, narrow = made.actor(lanes=2), made.actor(lanes=2)
            for number in (0, 2):
                narrow.push(step(number, 3, 2))

            def cancelled() -> int:
                clock.sleep(0.5)
                return wide.cancel()

            def advanced() -> int:
                clock.sleep(1.0)
                return made.advance()

            results = together(
                clock,
                lambda: wide.push(step(4, 5, 2), version=1),
                lambda: narrow.push(step(4, 3, 2), version=1),
                cancelled,
                advanced,
            )
            assert [result if isinstance(result, int) else type(result) for result, _ in results] == [
                CancelledError,
                2,
                1,
                1,
            ]
            narrow.push(step(6, 3, 2))
            assert made.learner().pull().data["obs"].shape == (4, 3)

    played(0, scene)


# What outlives the store


def pushed(made: conduit.Store, numbers: range, width: int, actor: conduit.Actor) -> None:
    for number in numbers:
        actor.push(step(number, width))


def test_a_checkpoint_keeps_widths_and_segments_that_were_written_before_rows_grew(tmp_path: Path):
    rows = [obs(np.array([n]), 3 + n // 10)[0] for n in range(40)]
    folder = tmp_path / "saved"
    with store(capacity=64, fields=PAD, seed=5) as made:
        actor, learner = made.actor(), made.learner()
        for first in range(0, 30, 10):
            pushed(made, range(first, first + 10), 3 + first // 10, actor)
            learner.pull()
            saved = made.save(folder)
            assert saved.written_rows == 10
        with conduit.Store.restore(folder) as again:
            ours, theirs = learner.pull(), again.learner().pull()
            assert ours.info.keys.tolist() == theirs.info.keys.tolist()
            assert host(ours.data["obs"]).tobytes() == host(theirs.data["obs"]).tobytes()
            assert ours.info.extents["obs"].tolist() == theirs.info.extents["obs"].tolist()
            with pytest.raises(SchemaError, match="is 5 by now"):
                again.actor().push(step(30, 4))
            pushed(again, range(30, 40), 6, again.actor())
            assert_batches(again, rows, 6, size=32)
            assert again.save(folder).written_rows == 10
    with conduit.Store.restore(folder) as last:
        assert_batches(last, rows, 6, size=32)
        read = last.read()
        assert read.data["obs"].tobytes() == filled(rows, 6).tobytes()
        assert read.extents["obs"].tolist() == [len(row) for row in rows]


def test_a_smaller_store_takes_up_the_newest_rows_and_their_widths(tmp_path: Path):
    with store(capacity=64, fields=PAD) as made:
        actor = made.actor()
        for number in range(20):
            actor.push(step(number, 3 + number // 5))
        made.save(tmp_path / "saved")
    with pytest.warns(conduit.errors.CheckpointWarning):
        again = conduit.Store.restore(tmp_path / "saved", capacity=8)
    with again:
        rows = [obs(np.array([n]), 3 + n // 5)[0] for n in range(20)]
        assert assert_batches(again, rows, 6) == set(range(12, 20))


def test_finals_and_open_trajectories_are_taken_up_in_the_wider_form(tmp_path: Path):
    @conduit.register_ingestion(per="trajectory")
    def seen(source, sink):
        sink.write(source.read())

    settings: dict[str, Any] = {"fields": PAD, "derive": {"next_obs": conduit.Next("obs")}, "capacity": 64}
    with store(ingestion=[seen], **settings) as made:
        actor = made.actor()
        for number in range(9):
            ends = np.array([number % 4 == 3])
            final = {"obs": obs(np.array([100 + number]), 2 + number // 3)} if ends[0] else None
            actor.push(step(number, 2 + number // 3, truncated=ends), final=final)
        made.save(tmp_path / "saved")
    with conduit.Store.restore(tmp_path / "saved", ingestion=[seen], lanes="continue") as again:
        actor = again.actor()
        ends = np.array([True])
        actor.push(step(9, 5, truncated=ends), final={"obs": obs(np.array([109]), 5)})
        drawn: set[int] = set()
        for batch in several(again, 10):
            number = host(batch.data["id"])
            after = np.array([100 + n if n in (3, 7, 9) else n + 1 for n in number])
            got = host(batch.data["next_obs"])
            assert np.array_equal(got, np.where(got == 0, 0, obs(after, 5)))
            assert (got[:, :2] != 0).all()
            assert (got[number == 9] != 0).all()
            drawn |= set(number.tolist())
        assert drawn == set(range(10))


def test_a_leaf_that_was_fixed_may_grow_from_a_restore_on(tmp_path: Path):
    rows = [*obs(np.arange(12), 3), *obs(np.arange(12, 16), 5)]
    with store(capacity=32, derive={"next_obs": conduit.Next("obs")}) as made:
        pushed(made, range(12), 3, made.actor())
        made.save(tmp_path / "saved")
    with conduit.Store.restore(tmp_path / "saved", fields=PAD, lanes="continue") as again:
        assert again.sample(4).info.padding_mask("obs").all()
        pushed(again, range(12, 16), 5, again.actor())
        assert assert_batches(again, rows, 5) == set(range(15))
        nexts = [*rows[1:], rows[-1]]
        assert_batches(again, nexts, 5, "next_obs")
        again.save(tmp_path / "saved")
    with conduit.Store.restore(tmp_path / "saved") as last:
        assert_batches(last, rows, 5)
        with pytest.raises(SchemaError, match="is 5 by now"):
            last.actor().push(step(16, 4))


def test_how_a_leaf_grows_may_be_another_from_a_restore_on(tmp_path: Path):
    with store(capacity=32, batch_size=4, fields=PAD) as made:
        pushed(made, range(4), 3, actor := made.actor())
        pushed(made, range(4, 8), 4, actor)
        made.save(tmp_path / "saved")
    with conduit.Store.restore(tmp_path / "saved", fields=REPLACE) as again:
        pushed(again, range(8, 12), 6, again.actor())
        assert again.read().extents["obs"].tolist() == [6] * 4


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"obs": conduit.Field((4, "h"), np.float32, grow="pad")}, SettingError, "'obs' could grow along axis 0"),
        ({"obs": conduit.Field((4, 2), np.float32)}, SettingError, r"'obs' could grow .*got float32\[4, 2\]"),
        ({}, SettingError, r"'obs' could grow along axis 0 .*float32\['h', 2\].* got nothing of it"),
        (
            {"obs": conduit.Field(("h", 3), np.float32, grow="pad")},
            SchemaError,
            r"'obs' is float32\[4, 2\]; .*\['h', 3\]",
        ),
        ({"obs": conduit.Field(("h", 2), np.float64, grow="pad")}, SchemaError, r"'obs' is float32.* float64"),
        (
            {"obs": conduit.Field(("h", 2), np.float32, grow="pad"), "goal": conduit.Field((2,), np.int8)},
            SchemaError,
            "no leaf 'goal'",
        ),
        ({"obs": conduit.Field(("h", "w"), np.float32, grow="pad")}, SettingError, "names 2 axes"),
    ],
)
def test_what_contradicts_the_rows_of_a_checkpoint_is_refused_by_its_leaf(fields, error, told, tmp_path: Path):
    with store(fields={"obs": conduit.Field(("h", 2), np.float32, grow="pad")}, capacity=8) as made:
        actor = made.actor(lanes=4)
        for width in (3, 4):
            actor.push({"obs": np.ones((4, width, 2), np.float32)})
        made.save(tmp_path / "saved")
    with pytest.raises(error, match=told):
        conduit.Store.restore(tmp_path / "saved", fields=fields)
    with conduit.Store.restore(tmp_path / "saved") as again:
        assert sorted(again.read().extents["obs"].tolist()) == [3] * 4 + [4] * 4


def test_rows_that_are_held_back_are_in_the_checkpoint(tmp_path: Path):
    with store(capacity=32, batch_size=4, fields=REPLACE, limiter=conduit.MinSize(6)) as made:
        actor = made.actor()
        pushed(made, range(8), 3, actor)
        pushed(made, range(8, 12), 5, actor)
        made.save(tmp_path / "saved")
        for each in (made, conduit.Store.restore(tmp_path / "saved")):
            actor = each.actor()
            assert {key for batch in several(each) for key in batch.info.keys.tolist()} == set(range(8))
            pushed(each, range(12, 14), 5, actor)
            rows = [*obs(np.arange(8), 3), *obs(np.arange(8, 14), 5)]
            assert assert_batches(each, rows, 5) == set(range(8, 14))
            each.close()


def test_staged_batches_keep_what_is_real_of_them(tmp_path: Path):
    schedule = conduit.Schedule(overlap_del=True, g_del=2)
    with store(capacity=32, fields=PAD, schedule=schedule) as made:
        actor, learner = made.actor(), made.learner()
        pushed(made, range(6), 3, actor)
        pushed(made, range(6, 12), 4, actor)
        learner.pull()
        made.save(tmp_path / "saved")
        ours = [learner.pull() for _ in range(3)]
        pushed(made, range(12, 20), 6, actor)
    with conduit.Store.restore(tmp_path / "saved") as again:
        theirs = [again.learner().pull() for _ in range(1)]
        for mine, its in zip(ours, theirs, strict=False):
            assert mine.info.extents["obs"].tolist() == its.info.extents["obs"].tolist()
            assert np.array_equal(mine.info.padding_mask("obs"), its.info.padding_mask("obs"))
            assert host(mine.data["obs"]).tobytes() == host(its.data["obs"]).tobytes()
