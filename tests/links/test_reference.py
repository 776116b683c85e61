"""The reference itself, against cases that were worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.links.reference import (
    CUT,
    OPEN,
    TERMINATED,
    TRUNCATED,
    Model,
    Next,
    NStep,
    Row,
    Rules,
    Sequence,
    Stack,
    Trajectory,
    below,
    flat,
    nested,
)

NEXT = {"next_obs": Next("obs")}
STACK = {"obs": Stack("obs", 3)}
NEXT_STACK = {"obs": Stack("obs", 3), "next_obs": Next("obs")}


def lived(capacity: int, *pushed: tuple) -> Model:
    """(lane, end) or (lane, end, observation of the final); "close" cuts a lane. Row k observes 10k and earns k."""
    model = Model(capacity)
    for lane, end, *final in pushed:
        if end == "close":
            model.cut([lane])
            continue
        key = len(model.rows)
        known = {"obs": np.float32(final[0])} if final else None
        ended = {"terminated": np.bool_(end == TERMINATED), "truncated": np.bool_(end == TRUNCATED)}
        model.push(lane, {"obs": np.float32(10 * key), "reward": np.float32(key), **ended}, end, known)
    return model


# Keys 0 1 2 3 4 5 6 7 8: lane 0 is 0 2 3 | 5 8, lane 1 is 1 4 (cut) | 6 | 7.
BOTH = (
    (0, OPEN),
    (1, OPEN),
    (0, OPEN),
    (0, TRUNCATED, 999.0),
    (1, OPEN),
    (1, "close"),
    (0, OPEN),
    (1, TERMINATED),
    (1, TRUNCATED),
    (0, OPEN),
)


def drawable(model: Model, item, derive=None) -> list[int]:
    return Rules(model, item, derive or {}).drawable_starts()


@pytest.mark.parametrize(
    ("item", "derive", "expected"),
    [
        (Row(), {}, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (Row(), NEXT, [0, 1, 2, 3, 5, 6]),
        (Row(), STACK, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (NStep(1), {}, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (NStep(2), {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (NStep(2), NEXT, [0, 1, 2, 3, 6]),
        (NStep(3), NEXT, [0, 1, 2, 3, 6]),
        (Sequence(2), {}, [0, 1, 2, 5]),
        (Sequence(2), NEXT, [0, 2]),
        (Sequence(2, pad="zero"), {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Sequence(2, pad="zero"), NEXT, [0, 1, 2, 3, 6]),
        (Sequence(2, period=2), {}, [0, 1, 5]),
        (Sequence(2, stride=2), {}, [0]),
        (Sequence(3, stride=2, pad="repeat"), {}, [0, 1, 2, 3, 4, 6, 7]),
        (Trajectory(), {}, [0, 1, 6, 7]),
        (Trajectory(), NEXT, [0, 1, 6]),
    ],
)
def test_drawable_starts(item, derive, expected):
    assert drawable(lived(20, *BOTH), item, derive) == expected


@pytest.mark.parametrize(
    ("item", "derive", "expected"),
    [
        (Row(), NEXT, [3, 5, 6]),
        (Row(), STACK, [5, 6, 7, 8]),
        (Row(), NEXT_STACK, [5, 6]),
        (Sequence(1, period=2), {}, [3, 5, 6, 7]),
        (Trajectory(), {}, [6, 7]),
    ],
)
def test_what_is_evicted_is_no_start_and_its_places_still_count(item, derive, expected):
    assert drawable(lived(6, *BOTH), item, derive) == expected


def entry(model: Model, key: int, item, derive=None, **more) -> dict[str, Any]:
    made = Rules(model, item, derive or {}).entry(key, **more)
    return {path: leaf.tolist() for path, leaf in made.leaves.items()} | {"real": made.real}


def test_the_next_of_a_row():
    model = lived(20, *BOTH)
    after = {key: entry(model, key, Row(), NEXT)["next_obs"] for key in (0, 1, 2, 3, 5, 6)}
    assert after == {0: 20, 1: 40, 2: 30, 3: 999, 5: 80, 6: 60}


def test_stacks_and_their_nexts():
    model = lived(20, *BOTH)
    assert entry(model, 0, Row(), STACK)["obs"] == [0, 0, 0]
    assert entry(model, 2, Row(), STACK)["obs"] == [0, 0, 20]
    assert entry(model, 3, Row(), STACK)["obs"] == [0, 20, 30]
    assert entry(model, 5, Row(), {"obs": Stack("obs", 2, "zero")})["obs"] == [0, 50]
    assert entry(model, 2, Row(), NEXT_STACK)["next_obs"] == [0, 20, 30]
    assert entry(model, 3, Row(), NEXT_STACK)["next_obs"] == [20, 30, 999]
    assert entry(model, 6, Row(), NEXT_STACK)["next_obs"] == [60, 60, 60]


def test_steps():
    model = lived(20, *BOTH)
    two = entry(model, 0, NStep(2), NEXT)
    assert (two["obs"], two["reward"], two["next_obs"]) == (0, 1.0, 30)
    assert (two["discount"], two["n_step"], two["truncated"]) == (0.25, 2, False)
    three = entry(model, 0, NStep(3), NEXT)
    assert (three["reward"], three["next_obs"], three["discount"], three["truncated"]) == (1.75, 999, 0.125, True)
    short = entry(model, 2, NStep(3), NEXT)
    assert (short["reward"], short["n_step"], short["discount"]) == (3.5, 2, 0.25)
    cut = entry(model, 1, NStep(3), NEXT)
    assert (cut["reward"], cut["next_obs"], cut["n_step"]) == (1, 40, 1)
    over = entry(model, 6, NStep(3), NEXT)
    assert (over["reward"], over["next_obs"], over["discount"], over["terminated"]) == (6, 60, 0, True)
    drawn = entry(model, 0, NStep(range(1, 4)), NEXT, n=2)
    assert (drawn["reward"], drawn["n_step"]) == (1.0, 2)


def test_sequences():
    model = lived(20, *BOTH)
    assert entry(model, 0, Sequence(2))["reward"] == [0, 2]
    late = entry(model, 2, Sequence(2, burn_in=2))
    assert (late["reward"], late["real"]) == ([0, 0, 2, 3], [False, True, True, True])
    late = entry(model, 2, Sequence(3, burn_in=2, pad="repeat"))
    assert (late["obs"], late["real"]) == ([0, 0, 20, 30, 30], [False, True, True, True, False])
    late = entry(model, 2, Sequence(3, pad="zero"))
    assert (late["obs"], late["real"]) == ([20, 30, 0], [True, True, False])
    wide = entry(model, 3, Sequence(2, stride=2, burn_in=1, pad="repeat"))
    assert (wide["obs"], wide["real"]) == ([0, 30, 30], [True, True, False])


def test_burn_in_that_is_evicted_or_whose_stack_is_broken_is_padding():
    chain = [(0, OPEN)] * 8
    assert entry(lived(5, *chain), 4, Sequence(1, burn_in=3))["obs"] == [0, 0, 30, 40]
    broken = entry(lived(5, *chain), 6, Sequence(1, burn_in=3), {"obs": Stack("obs", 2)})
    assert broken["obs"] == [[0, 0], [30, 40], [40, 50], [50, 60]]
    assert broken["real"] == [False, True, True, True]


def test_trajectories():
    model = lived(20, *BOTH)
    whole = entry(model, 1, Trajectory(), width=3)
    assert (whole["reward"], whole["real"]) == ([1, 4, 0], [True, True, False])
    short = entry(model, 1, Trajectory(), NEXT, width=3)
    assert (short["reward"], short["next_obs"], short["real"]) == ([1, 0, 0], [40, 0, 0], [True, False, False])
    assert Rules(model, Trajectory(4), {}).width([0, 6]) == 4


def test_a_lane_goes_on_anew_after_a_cut_and_after_an_end():
    model = lived(20, *BOTH)
    assert [(row.place, row.end) for row in model.rows] == [
        (0, OPEN), (0, OPEN), (1, OPEN), (2, TRUNCATED), (1, CUT), (0, OPEN), (0, TERMINATED), (0, CUT), (1, OPEN)
    ]  # fmt: skip


def test_paths():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert nested(flat(tree)) == tree
    assert below(flat(tree), "a") == {"/b": 1, "/c/d": 2}
    assert below(flat(tree), "e") == {"": 3}
