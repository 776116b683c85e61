"""The push signature: ends read, finals matched, and every mismatch named."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import optree
import pytest
import torch

from conduit.backends.exchange import to_numpy
from conduit.core.episodes import End, Rows
from conduit.core.signature import Signature
from conduit.errors import PriorityError, SchemaError
from tests.core.rows import CUT, OPEN, TERM, TRUNC, priorities

LANES = range(4, 7)


def signature(prioritized: bool = True) -> Signature:
    return Signature(to_numpy, prioritized)


def tree(count: int = 3, term=(), trunc=(), **change) -> dict:
    leaves = {
        "obs": np.arange(2 * count, dtype=np.float32).reshape(count, 2),
        "terminated": np.isin(np.arange(count), term),
        "truncated": np.isin(np.arange(count), trunc),
    }
    return {name: leaf for name, leaf in (leaves | change).items() if leaf is not None}


def leaves_of(step: Any) -> list:
    return optree.tree_leaves(step)


def final(*numbers: float) -> dict:
    return {"obs": np.array([[number, number] for number in numbers], np.float32).reshape(-1, 2)}


def pushed(step: dict, last=None, valid=None, priority=None) -> Rows:
    given = signature()
    return given.step(step, last, valid, priority, given.steps(LANES))


def whole(rows: dict, end=None, last=None, priority=None) -> Rows:
    return signature().trajectory(rows, end, last, priority, 5)


def stepped(by: Signature, step: dict) -> Rows:
    return by.step(step, None, None, None, by.steps(LANES))


def taken(by: Signature, step: dict) -> Rows:
    """A push that the store takes."""
    rows = stepped(by, step)
    with by.fixed_by(rows, 0.0):
        return rows


def known_finals(rows: Rows) -> dict[int, float]:
    return {row: float(known["obs"][0]) for row, known in (rows.finals or {}).items()}


def test_lanes_end_as_their_leaves_say_and_finals_go_to_those_that_ended():
    rows = pushed(tree(term=[0], trunc=[2]), final(10, 12))
    assert rows.lane.tolist() == [4, 5, 6]
    assert rows.end.tolist() == [TERM, OPEN, TRUNC]
    assert known_finals(rows) == {0: 10.0, 2: 12.0}


def test_terminated_goes_before_truncated():
    assert pushed(tree(term=[1], trunc=[1]), final(1)).end.tolist() == [OPEN, TERM, OPEN]


def test_truncated_without_a_final_is_cut_and_terminated_is_not():
    assert pushed(tree(term=[0], trunc=[2])).end.tolist() == [TERM, OPEN, CUT]
    assert whole(tree(trunc=[2])).end.tolist() == [OPEN, OPEN, CUT]


def test_a_final_without_leaves_is_no_final():
    assert pushed(tree(trunc=[2]), {}).end.tolist() == [OPEN, OPEN, CUT]


def test_lanes_that_are_not_valid_leave_no_row_no_end_and_no_final():
    valid = np.array([False, True, True])
    rows = pushed(tree(term=[0], trunc=[2]), final(12), valid, priority=np.array([9.0, 5.0, 6.0]))
    assert rows.lane.tolist() == [5, 6]
    assert rows.end.tolist() == [OPEN, TRUNC]
    assert rows.data["obs"].tolist() == [[2, 3], [4, 5]]
    assert priorities(rows) == [5.0, 6.0]
    assert known_finals(rows) == {1: 12.0}
    assert len(pushed(tree(), valid=np.zeros(3, np.bool_))) == 0


def test_without_end_leaves_lanes_stay_open():
    assert pushed({"obs": np.zeros((3, 2), np.float32)}).end.tolist() == [OPEN, OPEN, OPEN]


def test_everything_kept_is_a_copy():
    step, last, priority = tree(trunc=[1]), final(7), np.array([1.0, 2.0, 3.0])
    rows = pushed(step, last, None, priority)
    boot = signature()
    taken(boot, tree())
    bootstrap = final(1, 2, 3)
    kept = boot.bootstrap(bootstrap, 3)
    one = tree(trunc=[2])
    one_final = {"obs": np.full(2, 7, np.float32)}
    trajectory = whole(one, None, one_final)
    for array in (*step.values(), *last.values(), priority, *bootstrap.values(), *one.values(), *one_final.values()):
        array[...] = 1
    assert rows.data["obs"].tolist() == trajectory.data["obs"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert known_finals(rows) == {1: 7.0}
    assert known_finals(trajectory) == {2: 7.0}
    assert priorities(rows) == [1.0, 2.0, 3.0]
    assert kept["obs"].tolist() == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize(
    "make",
    [
        lambda a: np.asfortranarray(a),
        lambda a: a[::-1].copy()[::-1],
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: np.flip(np.flip(a, 1).copy(), 1),
    ],
)
def test_arrays_of_any_strides_are_taken_as_they_read(make):
    array = make(np.arange(6, dtype=np.float32).reshape(3, 2))
    assert pushed({"obs": array}).data["obs"].tolist() == array.tolist()
    assert whole({"obs": array}).data["obs"].tolist() == array.tolist()


BAD_STEPS = [
    (tree(obs=np.zeros((3, 2))), {}, "push: leaf 'obs' has dtype float64; expected float32"),
    (tree(obs=np.zeros((3, 3), np.float32)), {}, "push: leaf 'obs' has shape (3, 3); expected (rows, 2)"),
    (tree(obs=np.zeros((2, 2), np.float32)), {}, "push: leaf 'obs' has a leading axis of 2; expected 3, one a lane"),
    (tree(obs=None), {}, "push: missing 'obs'"),
    (tree(act=np.zeros(3)), {}, "push: unexpected 'act'; expected leaves 'obs', 'terminated', 'truncated'"),
    (tree(obs=[1.0, 2.0, 3.0]), {}, "push: leaf 'obs/0': got float, which is no array"),
    (tree(obs="abc"), {}, "push: leaf 'obs': got str, which is no array: expected a NumPy, torch or JAX array"),
    (tree(), {"valid": [True, False]}, "push: valid is bool[2]; expected bool[3]"),
    (tree(), {"valid": [1, 0, 1]}, "push: valid is int64[3]; expected bool[3]"),
    (tree(), {"final": final(1)}, "push: final['obs'] has 1 rows; expected 0 (lanes that ended in this step: [])"),
    (
        tree(term=[1]),
        {"final": final(1, 2)},
        "final['obs'] has 2 rows; expected 1 (lanes that ended in this step: [1])",
    ),
    (
        tree(term=[1]),
        {"final": {"value": np.zeros(1)}},
        "final['value'] is none of the pushed leaves; expected some of obs",
    ),
    (
        tree(term=[1]),
        {"final": {"obs": np.zeros((1, 2))}},
        "final['obs'] is float64[1, 2]; expected float32[2] with a leading",
    ),
    (
        tree(term=[1]),
        {"final": {"obs": np.zeros(2, np.float32)}},
        "final['obs'] is float32[2]; expected float32[2] with",
    ),
    (tree(term=[1]), {"final": {"obs": 3.0}}, "push: final: leaf 'obs': got float, which is no array"),
]


@pytest.mark.parametrize(("step", "extra", "message"), BAD_STEPS, ids=[message for _, _, message in BAD_STEPS])
def test_a_step_that_does_not_fit_is_refused_by_leaf(step, extra, message):
    given = signature()
    taken(given, tree())
    steps = given.steps(LANES)
    for _ in range(2):
        with pytest.raises(SchemaError, match=re.escape(message)):
            given.step(step, extra.get("final"), extra.get("valid"), None, steps)
        # What a step is compared with first is known from one that fitted.
        assert given.step(tree(term=[0]), None, None, None, steps).end.tolist() == [TERM, OPEN, OPEN]


BAD_TRAJECTORIES = [
    (tree(term=[1]), {}, "row 1 of 3 ended already; push one trajectory at a time"),
    (tree(), {"end": "done"}, "end='done'; expected one of open, terminated, truncated, cut"),
    (tree(term=[2]), {"end": "open"}, "end='open', but the last row's leaves say 'terminated'"),
    (tree(), {"end": "terminated"}, "end='terminated', but the last row's leaves say 'open'"),
    (tree(term=[2]), {"end": "truncated"}, "end='truncated', but the last row's leaves say 'terminated'"),
    (tree(), {"final": {"obs": np.zeros(2, np.float32)}}, "final['obs'] has 1 rows; expected 0"),
    (
        tree(trunc=[2]),
        {"final": {"obs": np.zeros((1, 2), np.float32)}},
        "final['obs'] is float32[1, 1, 2]; expected float32[2]",
    ),
    (tree(0), {}, "push_trajectory: no rows; expected at least one"),
]


@pytest.mark.parametrize(
    ("rows", "extra", "message"), BAD_TRAJECTORIES, ids=[message for _, _, message in BAD_TRAJECTORIES]
)
def test_a_trajectory_that_does_not_fit_is_refused(rows, extra, message):
    with pytest.raises(SchemaError, match=re.escape(message)):
        whole(rows, extra.get("end"), extra.get("final"))


@pytest.mark.parametrize(
    ("rows", "end", "last", "got"),
    [
        (tree(), None, False, OPEN),
        (tree(term=[2]), None, False, TERM),
        (tree(trunc=[2]), None, True, TRUNC),
        (tree(trunc=[2]), "cut", False, CUT),
        (tree(), "cut", False, CUT),
        ({"obs": np.zeros((2, 2), np.float32)}, None, False, OPEN),
        ({"obs": np.zeros((2, 2), np.float32)}, "terminated", True, TERM),
        ({"obs": np.zeros((2, 2), np.float32)}, End.TRUNCATED, True, TRUNC),
        ({"obs": np.zeros((2, 2), np.float32)}, "truncated", False, CUT),
    ],
)
def test_a_trajectory_ends_as_asked_or_as_its_leaves_say(rows, end, last, got):
    taken = whole(rows, end, {"obs": np.full(2, 3, np.float32)} if last else None)
    assert taken.end.tolist() == [OPEN] * (len(taken) - 1) + [got]
    assert known_finals(taken) == ({len(taken) - 1: 3.0} if last else {})
    assert set(taken.lane) == {5}


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize("leaf", [np.zeros(3, np.float32), np.zeros((3, 1), np.bool_)])
def test_end_leaves_are_one_bool_a_row(name, leaf):
    with pytest.raises(SchemaError, match=rf"leaf '{name}' is .*expected bool\[\]"):
        pushed({"obs": np.zeros((3, 2), np.float32), name: leaf})


class Kept(np.ndarray):
    """An array of a class of its own."""


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda step: step,
        lambda step: dict(reversed(step.items())),
        lambda step: step | {"obs": step["obs"].view(Kept)},
        lambda step: step | {"obs": torch.as_tensor(step["obs"])},
        lambda step: step | {"obs": step["obs"].astype(np.dtype(np.float32, metadata={"of": "another"}))},
        lambda step: step | {"obs": np.asfortranarray(step["obs"])},
    ],
    ids=["the same", "another order", "a subclass", "a tensor", "an equal dtype", "other strides"],
)
def test_a_step_is_taken_alike_whatever_it_looks_like_at_first_sight(change, nested):
    step = tree(term=[1])
    made = {"all": change(step), "id": np.arange(3)} if nested else change(step)
    plain = {"all": step, "id": np.arange(3)} if nested else step
    given = signature()
    steps = given.steps(LANES)
    with given.fixed_by(given.step(plain, None, None, None, steps), 0.0):
        pass
    for _ in range(2):
        rows = given.step(made, None, None, None, steps)
        assert rows.lane.tolist() == [4, 5, 6]
        assert rows.end.tolist() == ([OPEN] * 3 if nested else [OPEN, TERM, OPEN])
        leaves = rows.data["all"] if nested else rows.data
        assert {name: leaf.tolist() for name, leaf in leaves.items()} == {n: leaf.tolist() for n, leaf in step.items()}
        given.step(plain, None, None, None, steps)


def test_what_is_written_at_once_is_not_copied():
    for step in (tree(), tree(term=[1]), {"obs": [np.zeros(3)]}):
        given = Signature(to_numpy, True)
        given.copies = False
        steps = given.steps(LANES)
        for _ in range(2):
            rows = given.step(step, None, None, None, steps)
            with given.fixed_by(rows, 0.0):
                pass
            assert rows.lent
            assert all(leaf is kept for leaf, kept in zip(leaves_of(step), leaves_of(rows.data), strict=True))


def test_a_schema_that_was_given_up_is_forgotten_by_the_steps_that_fitted_it():
    given = signature()
    steps = given.steps(LANES)
    first = given.step({"a": np.zeros(3)}, None, None, None, steps)
    given.step({"a": np.zeros(3)}, None, None, None, steps)
    with pytest.raises(KeyError), given.fixed_by(first, 0.0):
        raise KeyError
    assert taken(given, tree()).data.keys() == tree().keys()
    with pytest.raises(SchemaError, match="missing 'obs'"):
        given.step({"a": np.zeros(3)}, None, None, None, steps)
    given.step(tree(), None, None, None, steps)


def test_the_first_push_that_is_taken_fixes_the_schema():
    given = signature()
    stepped(given, {"a": np.zeros(3)})
    assert not given.fixed
    assert len(taken(given, tree())) == 3
    assert given.fixed
    with pytest.raises(SchemaError, match=r"missing 'obs'.* and unexpected 'a'"):
        stepped(given, {"a": np.zeros(3)})


REFUSED = [
    pytest.param({"a": np.zeros(3), "b": np.zeros(2)}, None, "leading axis of 2; expected 3, one a lane", id="ragged"),
    pytest.param({"a": np.zeros(3)}, {"b": np.zeros(0)}, "final", id="final"),
]


@pytest.mark.parametrize(("step", "last", "message"), REFUSED)
def test_a_first_push_that_is_refused_fixes_nothing(step, last, message):
    given = signature()
    with pytest.raises(SchemaError, match=message):
        given.step(step, last, None, None, given.steps(LANES))
    assert len(taken(given, tree())) == 3


@pytest.mark.parametrize("error", [SchemaError, KeyboardInterrupt])
def test_a_first_push_that_is_not_taken_fixes_nothing(error):
    given = signature()
    with pytest.raises(error), given.fixed_by(stepped(given, {"a": np.zeros(3)}), 0.0):
        raise error
    assert not given.fixed
    assert len(taken(given, tree())) == 3


def test_of_two_first_pushes_at_once_the_later_must_fit_the_earlier():
    given = signature()
    first, second = stepped(given, tree()), stepped(given, {"a": np.zeros(3)})
    with given.fixed_by(first, 0.0):
        with pytest.raises(SchemaError, match="missing 'obs'"), given.fixed_by(second, 0.0):
            pytest.fail("it doesn't fit")
        with given.fixed_by(stepped(given, tree()), 0.0):
            pass
    with pytest.raises(SchemaError, match="missing 'obs'"):
        stepped(given, {"a": np.zeros(3)})


def test_of_two_first_pushes_at_once_the_one_that_is_taken_fixes_the_schema_though_the_earlier_is_not():
    given = signature()
    first, second = stepped(given, tree()), stepped(given, tree())
    earlier, later = given.fixed_by(first, 0.0), given.fixed_by(second, 0.0)
    earlier.__enter__()
    later.__enter__()
    assert not earlier.__exit__(KeyError, KeyError(), None)
    later.__exit__(None, None, None)
    assert given.fixed
    with pytest.raises(SchemaError, match="missing 'obs'"):
        stepped(given, {"a": np.zeros(3)})


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (np.array([1.0, np.nan, 2.0]), ": row 1 has priority nan; expected a finite number ≥ 0"),
        (np.array([1.0, 2.0, np.inf]), "row 2 has priority inf"),
        (np.array([-1.0, 2.0, 2.0]), "row 0 has priority -1.0"),
        (np.array([1.0, 2.0]), ": priority is float64[2]; expected numbers of shape (3,), one a row"),
        (np.ones((3, 1)), ": priority is float64[3, 1]; expected"),
    ],
)
def test_a_priority_that_is_none_is_refused_by_row(priority, message):
    with pytest.raises(PriorityError, match=re.escape(message)):
        pushed(tree(), priority=priority)
    with pytest.raises(PriorityError, match=re.escape(message)):
        whole(tree(), priority=priority)


def test_a_priority_that_is_no_array_is_refused_by_name():
    with pytest.raises((PriorityError, SchemaError), match="priority"):
        pushed(tree(), priority="high")


def test_priorities_need_a_sampler_that_has_some():
    given = signature(prioritized=False)
    with pytest.raises(PriorityError, match=r"use sampler=conduit.Prioritized\(\)"):
        given.step(tree(), None, None, np.ones(3), given.steps(LANES))


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({"value": np.zeros(3)}, "end_unit: bootstrap['value'] is none of the pushed leaves"),
        (final(1, 2), "end_unit: bootstrap['obs'] has 2 rows; expected 3 (one a lane)"),
        ({"obs": np.zeros((3, 2))}, "end_unit: bootstrap['obs'] is float64[3, 2]; expected float32[2]"),
        ({"obs": [1, 2, 3]}, "end_unit: bootstrap: leaf 'obs/0': got int, which is no array"),
    ],
)
def test_a_bootstrap_is_pushed_leaves_of_one_row_a_lane(known, message):
    given = signature()
    with pytest.raises(SchemaError, match="nothing has been pushed yet"):
        given.bootstrap(known, 3)
    taken(given, tree())
    with pytest.raises(SchemaError, match=re.escape(message)):
        given.bootstrap(known, 3)
    assert given.bootstrap(None, 3) is None
