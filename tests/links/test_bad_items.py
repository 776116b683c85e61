"""Bad items, derived leaves and finals: each has an error that names what came and what would work."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

import conduit
from conduit import Next, NStep, Sequence, Stack, Trajectory
from conduit.errors import SchemaError, SettingError
from tests.links.rows import NEXT, column, drawable, entries, linked, lived
from tests.store.rows import store


def bad(value: object) -> Any:
    return value


SETTINGS = {
    "no steps": (lambda: NStep(0, gamma=0.9), "0", "whole number"),
    "negative steps": (lambda: NStep(-2, gamma=0.9), "-2", "whole number"),
    "half a step": (lambda: NStep(bad(1.5), gamma=0.9), "1.5", "whole number"),
    "steps as text": (lambda: NStep(bad("3"), gamma=0.9), "'3'", "whole number"),
    "a truth as steps": (lambda: NStep(bad(True), gamma=0.9), "True", "whole number"),
    "an empty range": (lambda: NStep(range(5, 2), gamma=0.9), "range(5, 2)", "range"),
    "a range from 0": (lambda: NStep(range(3), gamma=0.9), "range(0, 3)", "range"),
    "a range downwards": (lambda: NStep(range(3, 0, -1), gamma=0.9), "range(3, 0, -1)", "range"),
    "gamma above 1": (lambda: NStep(3, gamma=1.1), "1.1", "[0, 1]"),
    "gamma below 0": (lambda: NStep(3, gamma=-0.1), "-0.1", "[0, 1]"),
    "gamma not a number": (lambda: NStep(3, gamma=math.nan), "nan", "[0, 1]"),
    "gamma as text": (lambda: NStep(3, gamma=bad("0.9")), "'0.9'", "[0, 1]"),
    "no length": (lambda: Sequence(0), "0", "whole number"),
    "half a length": (lambda: Sequence(bad(2.5)), "2.5", "whole number"),
    "no period": (lambda: Sequence(2, period=0), "period", "whole number"),
    "negative burn-in": (lambda: Sequence(2, burn_in=-1), "burn_in", "whole number"),
    "no stride": (lambda: Sequence(2, stride=0), "stride", "whole number"),
    "other padding": (lambda: Sequence(2, pad=bad("edge")), "'edge'", "'repeat'"),
    "no multiple": (lambda: Trajectory(multiple=0), "0", "whole number"),
    "no depth": (lambda: Stack("obs", 0), "0", "whole number"),
    "half a depth": (lambda: Stack("obs", bad(1.5)), "1.5", "whole number"),
    "a stack's other padding": (lambda: Stack("obs", 2, pad=bad("edge")), "'edge'", "'zero'"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_numbers_that_can_not_be_are_refused_when_they_are_written(case):
    made, came, works = SETTINGS[case]
    with pytest.raises(SettingError) as caught:
        made()
    assert came in str(caught.value)
    assert works in str(caught.value)


STORES = {
    "a name as item": ({"item": "nstep"}, "item='nstep'", "conduit.NStep"),
    "a class as item": ({"item": conduit.Trajectory}, "Trajectory", "item"),
    "a list of leaves": ({"derive": [Next("obs")]}, "derive=", "conduit.Next"),
    "a name as leaf": ({"derive": {"next_obs": "obs"}}, "'next_obs'", "conduit.Next"),
    "a leaf without name": ({"derive": {1: Next("obs")}}, "1", "name"),
}


@pytest.mark.parametrize("case", STORES)
def test_what_is_no_item_and_no_derived_leaf_is_refused_when_the_store_is_made(case):
    settings, came, works = STORES[case]
    with pytest.raises(SettingError) as caught:
        store(**settings)
    assert came in str(caught.value)
    assert works in str(caught.value)


@pytest.mark.parametrize("settings", [{"item": NStep(3, gamma=0.9)}, {"derive": NEXT}, {"item": Trajectory()}], ids=str)
def test_items_and_derived_leaves_are_off_policy(settings):
    with pytest.raises(SettingError, match=r"(item|derive).*off.policy"):
        store(rollout_unit=8, **settings)


OBS = np.zeros((2, 3), np.float32)
REWARD = np.zeros(2, np.float32)
STEPS = NStep(2, gamma=0.9)

SCHEMAS: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "an unknown source": ({"derive": {"then": Next("obz")}}, {"obs": OBS}, ["'obz'", "obs"]),
    "an unknown source of a stack": ({"derive": {"f": Stack("frame", 2)}}, {"obs": OBS}, ["'frame'", "obs"]),
    "a stack of a stack": (
        {"derive": {"a": Stack("obs", 2), "b": Stack("a", 2)}},
        {"obs": OBS},
        ["'a'", "obs"],
    ),
    "no reward": ({"item": STEPS, "derive": NEXT}, {"obs": OBS}, ["'reward'", "obs"]),
    "another reward": (
        {"item": NStep(2, gamma=0.9, reward="gain"), "derive": NEXT},
        {"obs": OBS, "reward": REWARD},
        ["'gain'", "obs"],
    ),
    "a reward that is no number": (
        {"item": STEPS, "derive": NEXT},
        {"obs": OBS, "reward": REWARD.astype(np.complex64)},
        ["'reward'", "complex64", "real"],
    ),
    "a reward that is a subtree": (
        {"item": STEPS, "derive": NEXT},
        {"obs": OBS, "reward": {"a": REWARD}},
        ["'reward'"],
    ),
    "no observation after the steps": (
        {"item": STEPS},
        {"obs": OBS, "reward": REWARD, "terminated": np.zeros(2, bool)},
        ["NStep", "Next", "next_obs"],
    ),
    "a stored discount": (
        {"item": STEPS, "derive": NEXT},
        {"obs": OBS, "reward": REWARD, "discount": REWARD},
        ["'discount'", "NStep"],
    ),
    "a stored n_step": (
        {"item": STEPS, "derive": NEXT},
        {"obs": OBS, "reward": REWARD, "n_step": REWARD},
        ["'n_step'", "NStep"],
    ),
    "a row that is a leaf": ({"derive": NEXT}, OBS, ["dict"]),
    "a row that is a list": ({"item": Sequence(2)}, [OBS], ["dict"]),
    "a row that is a tuple": ({"item": STEPS, "derive": NEXT}, (OBS, REWARD), ["dict"]),
}


@pytest.mark.parametrize("case", SCHEMAS)
def test_rows_that_an_item_can_not_be_made_of_are_refused_at_the_first_push(case):
    settings, rows, named = SCHEMAS[case]
    with store(**settings) as s:
        with pytest.raises(SchemaError) as caught:
            s.actor(lanes=2).push(rows)
        assert [name for name in named if name not in str(caught.value)] == [], str(caught.value)
        assert len(s) == 0


def test_after_a_first_push_that_was_refused_the_store_takes_rows_that_fit():
    with linked(derive=NEXT) as s:
        actor = s.actor()
        with pytest.raises(SchemaError, match="'obs'"):
            actor.push({"observation": np.zeros(1)})
        lived(actor, 0, 3)
        assert column(entries(s), "next_obs") == {0: 10, 1: 20}


def test_a_derived_discount_clashes_with_the_items():
    with pytest.raises((SettingError, SchemaError), match="'discount'"), store(item=STEPS, derive={"discount": Next("obs")}) as s:  # fmt: skip
        s.actor(lanes=2).push({"obs": OBS, "reward": REWARD})


def ended() -> dict[str, Any]:
    return {
        "obs": {"image": np.zeros((2, 4), np.uint8), "state": np.zeros(2, np.float32)},
        "action": np.zeros(2, np.int32),
        "truncated": np.array([False, True]),
    }


FINALS = {
    "an empty part": ({"next_obs": Next("obs")}, {"action": np.zeros(1, np.int32)}, "obs/image"),
    "half of a part": ({"next_obs": Next("obs")}, {"obs": {"image": np.zeros((1, 4), np.uint8)}}, "obs/state"),
    "another leaf": (
        {"next_obs": Next("obs"), "next_action": Next("action")},
        {"obs": {"image": np.zeros((1, 4), np.uint8), "state": np.zeros(1, np.float32)}},
        "action",
    ),
    "the next of a stack": (
        {"obs": Stack("obs", 2), "next_obs": Next("obs")},
        {"obs": {"image": np.zeros((1, 4), np.uint8)}},
        "obs/state",
    ),
}


@pytest.mark.parametrize("case", FINALS)
def test_a_final_without_what_a_next_needs_is_refused_and_the_store_goes_on(case):
    derive, final, lacks = FINALS[case]
    with linked(derive=derive) as s:
        actor = s.actor(lanes=2)
        rows = ended()
        for _ in range(2):
            with pytest.raises(SchemaError, match=rf"final.*{re.escape(lacks)}"):
                actor.push(rows, final=final)
        single = {
            "obs": {"image": rows["obs"]["image"][:1], "state": rows["obs"]["state"][:1]},
            "action": rows["action"][:1],
            "truncated": np.array([True]),
        }
        with pytest.raises(SchemaError, match=rf"final.*{re.escape(lacks)}"):
            actor.push_trajectory(single, final=_row(final))
        assert len(s) == 0
        actor.push(rows | {"truncated": np.zeros(2, bool)})
        actor.push(rows)
        assert (len(s), drawable(s)) == (4, 2)


def _row(final: dict[str, Any]) -> dict[str, Any]:
    return {name: _row(leaf) if isinstance(leaf, dict) else leaf[0] for name, leaf in final.items()}


def test_a_final_needs_only_what_a_next_is_made_of():
    with linked(derive={"next_state": Next("state")}) as s:
        rows = {"state": np.zeros(2), "action": np.zeros(2), "terminated": np.array([True, True])}
        s.actor(lanes=2).push(rows, final={"state": np.array([5.0, 6.0])})
        assert column(entries(s), "next_state") == {0: 5, 1: 6}


def test_without_a_next_finals_may_have_any_of_the_leaves():
    with linked(derive={"frames": Stack("obs", 2)}) as s:
        rows = {"obs": np.zeros(1), "value": np.zeros(1), "truncated": np.array([True])}
        s.actor().push(rows, final={"value": np.zeros(1)})
        assert drawable(s) == 1
