"""Rows in and out as plain arrays."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import conduit
from conduit import End, Next, NStep, Stack, Trajectory, datasets
from conduit.core.ordered import Lifo
from conduit.datasets import Arrays, push_arrays, to_arrays
from conduit.errors import PriorityError, SchemaError, SettingError
from tests.links.reference import Next as ReferenceNext
from tests.links.reference import Row, Stored, flat
from tests.links.test_exhaustive import random_play
from tests.links.twin import Twin
from tests.store.rows import BACKENDS, EVERYWHERE, host, store

NEXT = {"next_obs": Next("obs")}


def offline(lengths: list[int], kinds: str, **more: Any) -> dict[str, Any]:
    """Episodes of so many rows, which end as "t"erminated, t"r"uncated or not at all ("-"). Row i observes 10 i, and 10 i + 10 after."""
    count = sum(lengths)
    last = np.cumsum(lengths) - 1
    obs = 10 * np.arange(count, dtype=np.float32)
    rows = {
        "obs": obs,
        "next_obs": obs + 10,
        "id": np.arange(count, dtype=np.int32),
        "terminated": np.zeros(count, np.bool_),
        "truncated": np.zeros(count, np.bool_),
    }
    rows["terminated"][[row for row, kind in zip(last, kinds, strict=True) if kind == "t"]] = True
    rows["truncated"][[row for row, kind in zip(last, kinds, strict=True) if kind == "r"]] = True
    return rows | more


def without(rows: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: leaf for name, leaf in rows.items() if name not in names}


def loaded(rows: Any, capacity: int = 64, settings: dict[str, Any] | None = None, **how: Any) -> Arrays:
    with store(capacity=capacity, batch_size=1, **(settings or {"derive": NEXT})) as s:
        push_arrays(s.actor(), rows, **how)
        return to_arrays(s)


def spans(arrays: Arrays) -> list[tuple[int, int, str]]:
    """(first id, rows, how it ends) of each episode."""
    bounds = [0, *(np.flatnonzero(arrays.ends) + 1).tolist()]
    assert bounds[-1] == len(arrays)
    ids = arrays.data["id"]
    return [(int(ids[a]), b - a, End(arrays.ends[b - 1]).name.lower()) for a, b in pairwise(bounds)]


def assert_same(one: Arrays, other: Arrays, keys: bool = True) -> None:
    """Byte for byte."""

    def leaves(arrays: Arrays) -> dict[str, Any]:
        final = {} if arrays.final is None else {f"final/{path}": leaf for path, leaf in flat(arrays.final).items()}
        named = {**flat(arrays.data), **final, "(ends)": arrays.ends, "(final rows)": arrays.final_rows}
        return named | ({"(keys)": arrays.keys} if keys else {})

    a, b = leaves(one), leaves(other)
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name


# --- in -------------------------------------------------------------------------------------------------------------


def test_rows_become_the_episodes_that_they_are():
    rows = offline([3, 2, 4, 1], "trt-")
    got = loaded(rows, after={"obs": "next_obs"})
    assert spans(got) == [(0, 3, "terminated"), (3, 2, "truncated"), (5, 4, "terminated"), (9, 1, "cut")]
    assert got.begins.nonzero()[0].tolist() == [0, 3, 5, 9]
    assert got.final is not None
    assert got.final["obs"].tolist() == [30, 50, 90]
    assert got.final_rows.tolist() == [2, 4, 8]
    assert set(got.data) == {"obs", "id", "terminated", "truncated"}


def test_what_comes_after_each_row_is_stored_once_and_drawn_as_it_was():
    rows = offline([3, 2, 4, 3], "trt-")
    with store(capacity=64, batch_size=1, derive=NEXT) as s:
        push_arrays(s.actor(), rows, after={"obs": "next_obs"})
        drawn = [s.sample(11, to="numpy").data for _ in range(30)]
    ids = np.concatenate([data["id"] for data in drawn])
    # Of the last row nothing says that the episode was stopped there.
    assert set(ids.tolist()) == set(range(11))
    assert (np.concatenate([data["next_obs"] for data in drawn]) == rows["next_obs"][ids]).all()


def test_finals_may_be_given_instead_or_left_out():
    rows = without(offline([2, 3, 1], "tr-"), "next_obs")
    told = loaded(rows, final={"obs": np.array([7.0, 8.0], np.float32)})
    assert told.final is not None
    assert told.final["obs"].tolist() == [7, 8]
    assert spans(told) == [(0, 2, "terminated"), (2, 3, "truncated"), (5, 1, "cut")]
    silent = loaded(rows)
    assert silent.final is None
    # A truncated row without a final is never bootstrapped from.
    assert spans(silent) == [(0, 2, "terminated"), (2, 3, "cut"), (5, 1, "cut")]


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 5])
def test_long_episodes_are_pushed_in_pieces_which_changes_nothing(rows_at_once, monkeypatch):
    rows = offline([7, 1, 12, 5], "rtt-")
    whole = loaded(rows, after={"obs": "next_obs"})
    monkeypatch.setattr(datasets, "PIECE_ROWS", rows_at_once)
    assert_same(loaded(rows, after={"obs": "next_obs"}), whole)


def test_an_episode_may_come_in_several_pushes():
    rows = without(offline([3, 7], "t-"), "next_obs")
    with store(capacity=64, batch_size=1, derive=NEXT) as s:
        actor = s.actor()
        for start, stop in ((0, 5), (5, 6), (6, 10)):
            push_arrays(actor, {name: leaf[start:stop] for name, leaf in rows.items()}, end="open")
        assert spans(to_arrays(s)) == [(0, 3, "terminated"), (3, 7, "cut")]
        actor.push_trajectory({name: leaf[:1] for name, leaf in rows.items()})
        assert to_arrays(s).begins.sum() == 2
        push_arrays(actor, {name: leaf[:1] for name, leaf in rows.items()})
        push_arrays(actor, {name: leaf[:1] for name, leaf in rows.items()})
        assert to_arrays(s).begins.sum() == 3


def test_lanes_priorities_and_versions_go_along():
    rows = without(offline([4], "-"), "next_obs")
    with store(capacity=16, batch_size=1, sampler=conduit.Prioritized(alpha=1.0, eps=0.0)) as s:
        actor = s.actor(lanes=2)
        assert push_arrays(actor, rows, lane=1, priority=np.array([0.0, 1.0, 0.0, 3.0]), version=5) == 4
        drawn = [s.sample(4).info for _ in range(30)]
    assert {(key, p) for info in drawn for key, p in zip(info.keys, info.priority, strict=True)} == {(1, 1.0), (3, 3.0)}
    assert {version for info in drawn for version in info.policy_version} == {5}


def test_no_rows_are_no_rows():
    rows = {name: leaf[:0] for name, leaf in offline([1], "-").items()}
    with store() as s:
        assert push_arrays(s.actor(), rows) == 0


@pytest.mark.parametrize("kind", ["memmap", "hdf5", "torch", "jax"])
def test_arrays_of_others_are_read_piece_by_piece(kind, tmp_path, monkeypatch):
    rows = offline([5, 4, 2], "tr-")
    monkeypatch.setattr(datasets, "PIECE_ROWS", 2)
    plain = loaded(rows, after={"obs": "next_obs"})
    if kind == "memmap":
        for name, leaf in rows.items():
            np.save(tmp_path / f"{name}.npy", leaf)
        others = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in rows}
    elif kind == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / "rows.h5", "w") as file:
            for name, leaf in rows.items():
                file[name] = leaf
        file = h5py.File(tmp_path / "rows.h5")
        others = {name: file[name] for name in rows}
    elif kind == "torch":
        torch = pytest.importorskip("torch")
        others = {name: torch.as_tensor(leaf) for name, leaf in rows.items()}
    else:
        others = {name: pytest.importorskip("jax").numpy.asarray(leaf) for name, leaf in rows.items()}
    assert_same(loaded(others, after={"obs": "next_obs"}), plain)


# --- out ------------------------------------------------------------------------------------------------------------


def assert_is(arrays: Arrays, twin: Twin, final_of: str | None) -> None:
    """The arrays are the reference's live rows."""
    live = {row.key: row for row in twin.model.live}
    assert sorted(arrays.keys.tolist()) == sorted(live)
    expected: list[Stored] = []
    for row in live.values():
        if row.place == 0 or row.episode[row.place - 1].key not in live:
            expected += row.episode[row.place :]
    assert arrays.keys.tolist() == [row.key for row in expected]
    for path, leaf in flat(arrays.data).items():
        told = np.stack([row.leaves[path] for row in expected])
        assert (leaf.dtype, leaf.shape, leaf.tobytes()) == (told.dtype, told.shape, told.tobytes()), path
    assert arrays.begins.tolist() == [row.place == 0 for row in expected]
    ends = ["cut" if row.end == "open" and row.successor is None else row.end for row in expected]
    assert [End(end).name.lower() for end in arrays.ends] == ends
    finals = [(i, row.final) for i, row in enumerate(expected) if row.final is not None and final_of is not None]
    assert arrays.final_rows.tolist() == [i for i, _ in finals]
    assert (arrays.final is None) == (not finals)
    if arrays.final is not None:
        for path, leaf in flat(arrays.final).items():
            assert leaf.tolist() == np.stack([final[path] for _, final in finals if final is not None]).tolist()


@pytest.mark.parametrize("number", range(12))
def test_what_comes_out_is_what_the_reference_has(number, monkeypatch):
    chunk_rows = random.Random(number).choice((1, 2, 5, 1000))
    capacity = (3, 7, 12, 40)[number % 4]
    derive = {"after": ReferenceNext("obs")}
    with Twin(Row(), derive, capacity) as twin:
        twin.check = lambda: None  # type: ignore[method-assign]
        random_play(twin, number, pushes=30)
        row_bytes = twin.store.info()["row_bytes"]
        monkeypatch.setattr(datasets, "_CHUNK_BYTES", chunk_rows * row_bytes)
        assert_is(to_arrays(twin.store), twin, "obs")


def lived(s: conduit.Store, steps: int = 40) -> None:
    """Three lanes that end now and then, with finals, and nested leaves."""
    actor = s.actor(lanes=3)
    for number in range(steps):
        row = np.arange(3 * number, 3 * number + 3)
        lane = np.arange(3)
        rows = {
            "id": row.astype(np.int32),
            "obs": {"image": (row[:, None] + np.arange(4)).astype(np.uint8), "state": row.astype(np.float32) / 7},
            "reward": row.astype(np.float32),
            "terminated": (number + 2 * lane) % 7 == 6,
            "truncated": (number + lane) % 9 == 8,
        }
        ended = np.flatnonzero(rows["terminated"] | rows["truncated"])
        final = {"obs": {"image": rows["obs"]["image"][ended] + 100, "state": -rows["obs"]["state"][ended]}}
        actor.push(rows, final=final if len(ended) else None)


RECIPES: dict[str, dict[str, Any]] = {
    "next": {"derive": NEXT},
    "next of stack": {"derive": {"frames": Stack("obs", 3), "after": Next("frames")}},
    "n-step": {"derive": NEXT, "item": NStep(3, gamma=0.9)},
    "trajectory": {"item": Trajectory()},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("capacity", [200, 50])
def test_what_comes_out_goes_in_again_and_comes_out_the_same(recipe, capacity):
    with store(capacity=capacity, batch_size=1, **RECIPES[recipe]) as s:
        lived(s)
        before = to_arrays(s)
        drawable = s.info()["drawable_rows"]
    assert len(before) == min(120, capacity)
    with store(capacity=200, batch_size=1, **RECIPES[recipe]) as s:
        assert push_arrays(s.actor(), before) == len(before)
        if recipe == "trajectory":
            # Where no next is derived no finals are kept; and what was truncated without one is cut.
            before.ends[before.ends == End.TRUNCATED] = End.CUT
        assert_same(to_arrays(s), before, keys=False)
        if capacity == 200 and "item" not in RECIPES[recipe]:
            assert s.info()["drawable_rows"] == drawable


@pytest.mark.parametrize(("backend", "placement"), EVERYWHERE)
def test_every_backend_and_placement_gives_the_same_arrays(backend, placement):
    with store(capacity=50, derive=NEXT) as s:
        lived(s, 30)
        plain = to_arrays(s)
    with store(capacity=50, derive=NEXT, backend=backend, placement=placement) as s:
        lived(s, 30)
        assert_same(to_arrays(s), plain)


def test_rows_that_are_not_linked_come_by_age_and_apart():
    rows = offline([2, 3, 1], "tr-")
    got = loaded(rows, capacity=4, settings={"sampler": conduit.Uniform()})
    assert got.keys.tolist() == got.data["id"].tolist() == [2, 3, 4, 5]
    assert set(got.data) == set(rows)
    assert got.ends.tolist() == [End.CUT] * 4
    ended = loaded(offline([2, 1], "tt"), settings={"sampler": conduit.Uniform()})
    assert ended.ends.tolist() == [End.CUT, End.TERMINATED, End.TERMINATED]
    again = loaded(got, settings={"item": Trajectory()})
    assert again.begins.all()
    assert_same(again, loaded(got, settings={"sampler": conduit.Uniform()}))


def test_rows_of_groups_are_not_taken_for_episodes():
    with store(capacity=8, batch_size=1, item=conduit.Group(2, by="prompt")) as s:
        s.actor(lanes=4).push({"prompt": np.array([1, 2, 1, 2])})
        got = to_arrays(s)
    assert got.data["prompt"].tolist() == [1, 2, 1, 2]
    assert got.ends.tolist() == [End.CUT] * 4


def test_where_a_remover_chooses_who_leaves_the_rows_that_are_there_come_by_age():
    with store(capacity=4, batch_size=1, remover=Lifo()) as s:
        push_arrays(s.actor(), without(offline([2, 3, 1], "tr-"), "next_obs"))
        got = to_arrays(s)
    assert len(got) == 4
    assert got.keys.tolist() == got.data["id"].tolist() == sorted(got.keys.tolist())


def test_rows_that_come_meanwhile_are_not_among_them_and_rows_that_leave_meanwhile_break_no_episode_open(monkeypatch):
    rows = without(offline([20], "-"), "next_obs")
    monkeypatch.setattr(datasets, "_CHUNK_BYTES", 1)
    with store(capacity=10, batch_size=1, derive=NEXT) as s:
        actor = s.actor()
        push_arrays(actor, {name: leaf[:10] for name, leaf in rows.items()}, end="open")
        read, reads = s.read, 0

        def reading(first: int, at_once: int | None) -> Any:
            nonlocal reads
            part = read(first, at_once)
            reads += 1
            if reads == 2:
                push_arrays(actor, {name: leaf[10:16] for name, leaf in rows.items()}, end="open")
            return part

        monkeypatch.setattr(s, "read", reading)
        got = to_arrays(s)
    assert got.keys.tolist() == [0, 1, 6, 7, 8, 9]
    assert spans(got) == [(0, 2, "cut"), (6, 4, "cut")]
    assert got.begins.tolist() == [True] + [False] * 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_read_is_the_callers_and_counts_as_no_draw(backend):
    with (
        store(backend=backend, capacity=8, batch_size=2, derive=NEXT, seed=3) as s,
        store(backend=backend, capacity=8, batch_size=2, derive=NEXT, seed=3) as other,
    ):
        for each in (s, other):
            push_arrays(each.actor(), offline([3, 5], "t-"), after={"obs": "next_obs"})
        got = to_arrays(s)
        before = got.data["obs"].copy()
        got.data["obs"][:] += 0
        push_arrays(s.actor(), without(offline([8], "-", obs=np.zeros(8, np.float32)), "next_obs"))
        assert (got.data["obs"] == before).all()
        assert host(other.sample(4).data["id"]).shape == (4,)
        for _ in range(3):
            to_arrays(other)
        drawn = [other.sample(2).info.number for _ in range(2)]
        assert drawn == [1, 2]


# --- bad input ------------------------------------------------------------------------------------------------------

ROWS = offline([2, 3], "tr")
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "different lengths": (ROWS | {"id": np.arange(4)}, {}, SchemaError, ["'id': 4", "'obs': 5"]),
    "lists": (ROWS | {"id": [1, 2, 3, 4, 5]}, {}, SchemaError, ["'id/0'", "int", "array"]),
    "no rows' axis": (ROWS | {"id": np.array(3)}, {}, SchemaError, ["'id'", "leading row axis"]),
    "nothing": ({}, {}, SchemaError, ["no leaves"]),
    "ends that are numbers": (ROWS | {"terminated": np.zeros(5)}, {}, SchemaError, ["'terminated'", "float64", "bool"]),
    "ends for each of two": (
        ROWS | {"truncated": np.zeros((5, 2), np.bool_)},
        {},
        SchemaError,
        ["'truncated'", "bool[2]"],
    ),
    "two sorts of finals": (ROWS, {"after": {"obs": "next_obs"}, "final": {}}, SettingError, ["final=", "after="]),
    "no such leaf": (ROWS, {"after": {"obs": "next_observation"}}, SchemaError, ["'next_observation'", "next_obs"]),
    "no such source": (ROWS, {"after": {"observation": "next_obs"}}, SchemaError, ["'observation'", "'obs'"]),
    "after of a list": ([ROWS["obs"]], {"after": {"obs": "next_obs"}}, SchemaError, ["list", "dict"]),
    "another tree after": (
        ROWS | {"next_obs": {"a": ROWS["obs"]}},
        {"after": {"obs": "next_obs"}},
        SchemaError,
        ["'obs'", "nest differently"],
    ),
    "too few finals": (
        without(ROWS, "next_obs"),
        {"final": {"obs": np.zeros(1)}},
        SchemaError,
        ["'obs'", "1 rows", "expected 2 rows"],
    ),
    "another dtype after": (
        ROWS | {"next_obs": ROWS["next_obs"].astype(np.float64)},
        {"after": {"obs": "next_obs"}},
        SchemaError,
        ["obs", "float64", "float32"],
    ),
    "final of a number": (ROWS, {"final": 3}, SchemaError, ["final is a int", "dict of leaves"]),
    "finals of numbers": (ROWS, {"final": {"obs": 3}}, SchemaError, ["final['obs'] is a int", "expected 2 rows"]),
    "after a name": (ROWS, {"after": "next_obs"}, SettingError, ["after='next_obs'", "{'obs': 'next_obs'}"]),
    "a priority": (ROWS, {"priority": 3.0}, PriorityError, ["priority is a float", "5 numbers"]),
    "too few priorities": (ROWS, {"priority": np.ones(4)}, PriorityError, ["ndarray with 4 rows", "5 numbers"]),
    "another end": (ROWS, {"end": "terminated"}, SettingError, ["'terminated'", "'cut' or 'open'"]),
    "a lane that isn't": (ROWS, {"lane": 1}, SchemaError, ["lane 1"]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_can_not_be_pushed_is_named(case):
    rows, how, kind, named = BAD[case]
    with store(derive=NEXT) as s:
        with pytest.raises(kind) as caught:
            push_arrays(s.actor(), rows, **how)
        assert [word for word in named if word not in str(caught.value)] == [], str(caught.value)
        assert len(s) <= 2


@pytest.mark.parametrize("rows_compared", [1, 3, 1000])
def test_an_end_that_is_missing_is_found_where_observations_do_not_follow(rows_compared, monkeypatch):
    monkeypatch.setattr(datasets, "_COMPARED_ROWS", rows_compared)
    rows = offline([2, 3], "t-")
    rows["next_obs"][3] += 1
    with store(derive=NEXT) as s, pytest.raises(SchemaError, match=r"row 3 goes on, but .*row 4's 'obs'.*truncated"):
        push_arrays(s.actor(), rows, after={"obs": "next_obs"})
    rows["truncated"][3] = True
    got = loaded(rows, after={"obs": "next_obs"})
    assert got.final is not None
    assert got.final["obs"].tolist() == [20, 41]


def test_what_is_not_a_number_follows_what_is_not_a_number():
    rows = offline([3], "t")
    rows["obs"][1] = rows["next_obs"][0] = np.nan
    assert len(loaded(rows, after={"obs": "next_obs"})) == 3


def test_what_a_store_gave_brings_its_own_finals():
    got = loaded(offline([2], "t"), after={"obs": "next_obs"})
    with store(derive=NEXT) as s, pytest.raises(SettingError, match="neither"):
        push_arrays(s.actor(), got, after={"obs": "next_obs"})


@pytest.mark.parametrize("wrong", [3, None, "store"])
def test_what_is_no_actor_or_no_store_is_refused(wrong):
    with pytest.raises(SettingError, match=r"push_arrays\(actor=.*such as store\.actor\(\)"):
        push_arrays(wrong, ROWS)
    with pytest.raises(SettingError, match=r"to_arrays\(store=.*expected a conduit\.Store"):
        to_arrays(wrong)
    with store() as s:
        with pytest.raises(SettingError, match=r"push_arrays\(actor=.*such as store\.actor\(\)"):
            push_arrays(s, ROWS)  # pyright: ignore[reportArgumentType]
        with pytest.raises(SettingError, match=r"to_arrays\(store="):
            to_arrays(s.actor())  # pyright: ignore[reportArgumentType]


def test_of_a_store_that_never_had_rows_there_are_no_arrays():
    with store() as s, pytest.raises(SchemaError, match="no row has been stored yet"):
        to_arrays(s)
