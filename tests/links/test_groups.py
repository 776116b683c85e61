"""Groups: all rows of one prompt together, from wherever they come."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import conduit
from conduit.core import groups
from conduit.core.groups import Groups
from conduit.core.lineage import Following
from conduit.core.recipe import Recipe
from conduit.errors import SchemaError, SettingError, WaitTimeout
from tests.links.reference import CUT, OPEN, TERMINATED, TRUNCATED, Group, Model, Rules
from tests.links.rings import Ring
from tests.links.twin import Twin, leaves_of
from tests.store.rows import BACKENDS, host, store


def following(size: int) -> Following:
    return Recipe(conduit.Group(size, by="prompt")).following


def interleavings(length: int, prompts: int) -> Iterator[list[int]]:
    """Every order in which rows of up to so many prompts can come, whatever the prompts are called."""

    def more(order: list[int]) -> Iterator[list[int]]:
        if len(order) == length:
            yield order
            return
        for prompt in range(min(prompts, max(order, default=-1) + 2)):
            yield from more([*order, prompt])

    return more([])


def model_of(capacity: int, order: list[int]) -> Model:
    model = Model(capacity)
    for prompt in order:
        model.push(0, {"prompt": prompt})
    return model


def assert_is(ring: Ring, model: Model, size: int) -> None:
    """The ring's groups are the model's."""
    rules = Rules(model, Group(size), {})
    expected = rules.drawable_starts()
    assert sorted(ring.drawable) == expected, [row.leaves["prompt"] for row in model.rows]
    if expected:
        rows, count = ring.lineage.links.walk(np.array(expected), size)
        assert count.tolist() == [size] * len(expected)
        whole = rules.groups()
        assert rows.tolist() == [[row.key for row in whole[key]] for key in expected]


# --- which rows make a group ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "size"), [(c, s) for c in range(1, 6) for s in range(1, 4) if s <= c])
def test_every_interleaving_on_tiny_rings_row_by_row(capacity, size):
    orders = 0
    for order in interleavings(7, 3):
        ring, model = Ring(capacity, following(size)), Model(capacity)
        for prompt in order:
            ring.push([0], by=[prompt])
            model.push(0, {"prompt": prompt})
            assert_is(ring, model, size)
        orders += 1
    assert orders == 365


@pytest.mark.parametrize("size", [1, 2, 3])
def test_how_many_rows_come_at_once_changes_nothing(size):
    for capacity, order in itertools.product((3, 4), interleavings(8, 3)):
        model = model_of(capacity, order)
        states = []
        for chunk in (1, 2, 3, 8):
            ring = Ring(capacity, following(size))
            for first in range(0, 8, chunk):
                ring.push([0] * len(order[first : first + chunk]), by=order[first : first + chunk])
            assert_is(ring, model, size)
            states.append({name: part.tolist() for name, part in ring.saved().items() if name.startswith("g")})
        assert all(state == states[0] for state in states), order


def test_a_group_that_lost_its_first_row_gives_none_of_its_rows_to_the_next_of_that_value():
    ring, model = Ring(4, following(3)), Model(4)
    order = [7, 1, 1, 2, 2, 7, 7, 7, 7, 7]
    for prompt in order:
        ring.push([0], by=[prompt])
        model.push(0, {"prompt": prompt})
        assert_is(ring, model, 3)
    # The first three 7s are row 0, evicted, and rows 5 and 6.
    assert sorted(ring.drawable) == [7]


def test_of_too_many_unfinished_groups_those_are_forgotten_that_can_not_be_drawn_any_more(monkeypatch):
    monkeypatch.setattr(groups, "MOST_UNFINISHED", 4)
    known = Groups(capacity=3, size=2)

    def unfinished() -> dict[int, list[int]]:
        state = known.state()
        return dict(zip(state["group_ids"].tolist(), state["group_rows"].tolist(), strict=True))

    known.arrive(0, np.arange(6))
    assert list(unfinished()) == [2, 3, 4, 5]
    # Row 2 is evicted, but remembered: row 6 is of its group, and row 7 begins another, as row 8 does, for 0 is forgotten.
    before, whole = known.arrive(6, np.array([2, 2, 0, 0]))
    assert before.tolist() == [2, -1, -1, 8]
    assert whole.tolist() == [2, 8]
    assert unfinished() == {4: [4, 4, 1], 5: [5, 5, 1], 2: [7, 7, 1]}


def test_unfinished_groups_that_can_still_be_drawn_are_never_forgotten(monkeypatch):
    monkeypatch.setattr(groups, "MOST_UNFINISHED", 1)
    ring = Ring(6, following(2))
    for prompt in (0, 1, 2, 2, 1, 0):
        ring.push([0], by=[prompt])
    assert ring.drawable == {0, 1, 2}


def test_values_of_every_whole_dtype_are_told_apart():
    for dtype in (np.int8, np.uint8, np.int32, np.int64, np.uint64):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        ring = Ring(8, following(2))
        ring.push([0, 1, 2, 3], by=np.array([low, high, high, low], dtype))  # type: ignore[arg-type]
        assert sorted(ring.drawable) == [0, 1]
        rows, _ = ring.lineage.links.walk(np.array([0, 1]), 2)
        assert rows.tolist() == [[0, 3], [1, 2]]


# --- through a store ------------------------------------------------------------------------------------------------


def prompted(number: int, end: str) -> dict[str, Any]:
    """Row `number` with a prompt of its own, one of four that often come again."""
    return leaves_of(number, end) | {"prompt": np.int32(random.Random(number).randrange(4))}


@pytest.mark.parametrize("capacity", [3, 4, 7, 12])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_steps_trajectories_ends_and_actors_that_come_and_go_mix(capacity, size):
    for seed in range(4):
        with Twin(Group(size), {}, capacity, leaves=prompted) as twin:
            play(twin, random.Random(f"{capacity}/{size}/{seed}"))


def play(twin: Twin, chance: random.Random, pushes: int = 20) -> None:
    actors = [twin.open(lanes) for lanes in (1, 3)]
    for _ in range(pushes):
        actor = chance.choice(actors)
        lanes = twin.actors[actor].lanes
        what = chance.random()
        if what < 0.12:
            twin.close(actor)
            actors[actors.index(actor)] = twin.open(chance.choice((1, 2, 3)))
        elif what < 0.4:
            length = chance.choice((1, 2, 3, 4, twin.model.capacity + 2))
            end = chance.choice((OPEN, TERMINATED, TRUNCATED, CUT))
            twin.push_trajectory(actor, chance.randrange(lanes), length, end)
        else:
            twin.push(actor, chance.choices((OPEN, TERMINATED, TRUNCATED, None), (10, 2, 3, 3), k=lanes))
        twin.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sampler", [conduit.Uniform(), conduit.Prioritized()], ids=["uniform", "prioritized"])
def test_a_prompts_responses_come_as_one_entry_on_every_backend(backend, sampler):
    with store(backend=backend, capacity=64, item=conduit.Group(4, by="meta/prompt"), sampler=sampler) as s:
        first, second, learner = s.actor(lanes=6), s.actor(lanes=2), s.learner()
        for number in range(0, 48, 8):
            prompts = (np.arange(8, dtype=np.int32) * 5 + number // 4) % 6
            for actor, lanes in ((first, slice(0, 6)), (second, slice(6, 8))):
                rows = {
                    "meta": {"prompt": prompts[lanes]},
                    "reward": np.arange(number, number + 8, dtype=np.float32)[lanes],
                }
                actor.push(rows)
        batch = learner.pull()
        prompt, reward = host(batch.data["meta"]["prompt"]), host(batch.data["reward"])
        assert prompt.shape == reward.shape == host(batch.info.mask).shape == (4, 4)
        assert (prompt == prompt[:, :1]).all()
        assert (np.diff(reward, axis=1) > 0).all()
        assert (batch.info.keys == reward[:, 0]).all()
        assert host(batch.info.mask).all()
        if sampler.prioritized:
            told = s.update_priorities(batch.info.keys, np.zeros(4))
            assert told.applied == 4
            gone = set(batch.info.keys.tolist())
            assert not gone & {key for _ in range(20) for key in s.sample(4).info.keys.tolist()}


def test_a_prioritized_group_is_drawn_by_its_first_rows_priority_and_no_other_row_ever():
    order = [0, 1, 0, 2, 1, 2, 3, 0]
    with store(capacity=16, item=conduit.Group(2, by="prompt"), sampler=conduit.Prioritized(alpha=1.0, eps=0.0)) as s:
        actor = s.actor()
        for prompt in order:
            actor.push({"prompt": np.array([prompt])}, priority=np.array([1.0 + prompt]))
        draws = [s.sample(2, to="numpy") for _ in range(60)]
    chances = {int(k): p for d in draws for k, p in zip(d.info.keys, d.info.probability, strict=True)}
    assert chances == pytest.approx({0: 1 / 6, 1: 2 / 6, 3: 3 / 6})


def test_the_same_groups_come_from_one_seed_everywhere():
    def run(**settings: Any) -> list[Any]:
        with store(capacity=48, item=conduit.Group(3, by="prompt"), seed=4, **settings) as s:
            actor, learner = s.actor(lanes=2), s.learner()
            seen = []
            for number in range(0, 80, 2):
                actor.push({"prompt": (np.array([number, number + 1]) * 7 // 2 % 5).astype(np.int32)})
                if number >= 40:
                    batch = learner.pull()
                    seen.append((batch.info.keys.tolist(), host(batch.data["prompt"]).tolist()))
            return seen

    plain = run()
    for backend in BACKENDS:
        assert run(backend=backend) == plain
    assert run(placement=["device:0", "device:1"]) == plain


def test_a_hook_may_make_the_leaf():
    @conduit.register_ingestion()
    def name_prompts(source, sink):
        rows = source.read()
        sink.write({**rows, "prompt": rows["text"].astype(np.int64).sum(axis=1)})

    with store(capacity=8, batch_size=1, item=conduit.Group(2, by="prompt"), ingestion=[name_prompts]) as s:
        actor = s.actor()
        for text in ([1, 2], [5, 5], [3, 0], [4, 4]):
            actor.push({"text": np.array([text], np.uint8)})
        batch = s.sample(1, to="numpy")
        assert batch.data["text"].tolist() == [[[1, 2], [3, 0]]]


def test_a_draw_says_what_it_waits_for_while_no_group_is_whole():
    with store(capacity=8, batch_size=1, item=conduit.Group(2, by="prompt")) as s:
        s.actor(lanes=3).push({"prompt": np.arange(3)})
        with pytest.raises(
            WaitTimeout,
            match=r"0 of 3 visible rows can start an entry .*a batch needs 1: 3 groups are unfinished\. More rows would do",
        ):
            s.sample(1, timeout_s=0.0)


def test_groups_that_lack_rows_are_counted_until_they_have_them():
    with store(capacity=16, batch_size=1, item=conduit.Group(2, by="prompt")) as s:
        actor, lineage = s.actor(lanes=3), s._buffer.lineage
        assert lineage is not None
        counted = []
        for prompts in ([0, 1, 2], [1, 3, 3], [0, 2, 4]):
            actor.push({"prompt": np.array(prompts)})
            counted.append(lineage.unfinished_groups)
        assert counted == [3, 2, 1]
    with store(derive={"next_obs": conduit.Next("obs")}) as s:
        assert s._buffer.lineage is not None
        assert s._buffer.lineage.unfinished_groups is None


# --- bad input ------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, str, str]] = {
    "no size": (lambda: conduit.Group(0, by="prompt"), "size=0", "whole number"),
    "half a size": (lambda: conduit.Group(1.5, by="prompt"), "size=1.5", "whole number"),  # type: ignore[arg-type]
    "no leaf": (lambda: conduit.Group(2, by=""), "by=''", "name of a leaf"),
    "a leaf's number": (lambda: conduit.Group(2, by=3), "by=3", "name of a leaf"),  # type: ignore[arg-type]
    "too many": (
        lambda: store(capacity=3, batch_size=1, item=conduit.Group(4, by="prompt")),
        "capacity=3",
        "4 or more",
    ),
    "derived leaves": (
        lambda: store(item=conduit.Group(2, by="prompt"), derive={"next_obs": conduit.Next("obs")}),
        "'next_obs'",
        "linked to each other",
    ),
    "on-policy": (lambda: store(rollout_unit=8, item=conduit.Group(2, by="prompt")), "item", "off-policy"),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_that_can_not_be_are_refused(case):
    made, came, works = BAD[case]
    with pytest.raises(SettingError) as caught:
        made()
    assert came in str(caught.value)
    assert works in str(caught.value)


LEAVES = {
    "missing": ({"promt": np.zeros(2, np.int32)}, "none of the stored leaves (promt)"),
    "a float": ({"prompt": np.zeros(2, np.float32)}, "float32[]"),
    "a truth": ({"prompt": np.zeros(2, np.bool_)}, "bool[]"),
    "a vector": ({"prompt": np.zeros((2, 3), np.int32)}, "int32[3]"),
    "a subtree": ({"prompt": {"id": np.zeros(2, np.int32)}}, "none of the stored leaves (prompt/id)"),
}


@pytest.mark.parametrize("case", LEAVES)
def test_rows_that_do_not_say_which_group_they_are_of_are_refused_at_the_first_push(case):
    rows, got = LEAVES[case]
    with store(item=conduit.Group(2, by="prompt")) as s:
        with pytest.raises(SchemaError) as caught:
            s.actor(lanes=2).push(rows)
        assert f"Group(by='prompt'): it is {got}; expected a leaf of whole numbers" in str(caught.value)
        assert len(s) == 0
