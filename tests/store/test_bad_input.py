"""Bad input: each has an error that names the field, what came, what was expected and what would work."""

from __future__ import annotations

import builtins
import math
import re
import sys
from typing import Any, cast

import numpy as np
import pytest

import conduit
from conduit import transforms
from conduit.errors import (
    CapacityError,
    ConduitError,
    FreshnessError,
    HandOverError,
    HookError,
    MissingExtraError,
    ScheduleError,
    SchemaError,
    SettingError,
    UnknownBackendError,
)
from tests.store.rows import each_backend, ends, fill, ids, step, store

ROW = conduit.register_ingestion()(lambda source, sink: sink.write(source.read()))


def changed(**leaves) -> dict:
    return {name: leaf for name, leaf in (step(0, 2) | leaves).items() if leaf is not None}


IMAGE = np.zeros((2, 2, 3), np.uint8)
STATE = np.zeros(2, np.float32)

PUSHES = {
    "dtype": (changed(id=np.zeros(2)), "leaf 'id' has dtype float64; expected int32. Cast it"),
    "nested dtype": (
        changed(obs={"image": IMAGE.astype(np.float32), "state": STATE}),
        "leaf 'obs/image' has dtype float32; expected uint8",
    ),
    "shape": (
        changed(obs={"image": IMAGE[:, :, :2], "state": STATE}),
        "leaf 'obs/image' has shape (2, 2, 2); expected (rows, 2, 3)",
    ),
    "missing": (changed(id=None), "missing 'id'; expected leaves 'id', 'obs/image', 'obs/state'"),
    "nested missing": (changed(obs={"image": IMAGE}), "missing 'obs/state'"),
    "extra": (changed(reward=STATE), "unexpected 'reward'; expected leaves"),
    "ragged": (changed(id=np.zeros(3, np.int32)), "leaf 'id' has a leading axis of 3; expected 2, one a lane"),
    "no axes": (changed(id=np.int32(3)), "leaf 'id' has shape (); expected (rows, )"),
    "a number": (
        changed(id=3),
        "leaf 'id': got int, which is no array: expected a NumPy, torch or JAX array (np.asarray makes one)",
    ),
    "a list": (changed(id=[1, 2]), "leaf 'id/0': got int, which is no array"),
    "strings": (changed(id=np.array(["a", "b"])), "leaf 'id' has dtype <U1; expected int32"),
    "big endian": (changed(id=np.zeros(2, ">i4")), "leaf 'id' has dtype >i4; expected int32"),
    "other nesting": ([np.zeros(2)], "missing 'id', 'obs/image', 'obs/state' and unexpected '0'"),
}


@pytest.mark.parametrize("case", PUSHES)
@each_backend
def test_rows_that_do_not_fit_are_refused_by_leaf_and_the_store_goes_on(backend, case):
    wrong, message = PUSHES[case]
    with store(backend=backend) as s:
        actor = s.actor(lanes=2)
        actor.push(step(0, 2))
        with pytest.raises(SchemaError, match=re.escape(f"push: {message}")):
            actor.push(wrong)
        fill(actor, 6, first=2)
        batch = s.sample(4)
        assert ids(batch) == batch.info.keys.tolist()


@pytest.mark.parametrize("version", [2**63, -(2**63), 2**62, 10**30, 1.5, "1", True, [1]], ids=repr)
@pytest.mark.parametrize(
    "settings",
    [{}, {"mode": "bounded", "capacity": 8, "max_staleness": 2**62}, {"rollout_unit": 4}],
    ids=["off", "bounded", "on"],
)
def test_a_version_that_is_none_is_refused_at_the_call_and_the_store_goes_on(settings, version):
    with store(**settings) as s:
        actor = s.actor()
        for call in (actor.push, actor.push_trajectory):
            with pytest.raises(FreshnessError, match=re.escape(f"push(version={version!r}): expected a whole number")):
                call(step(0), version=version)
        fill(actor, 4)
        assert s.learner().pull().info.version_lag.tolist() == [0] * 4


@pytest.mark.parametrize("version", [2**62 - 1, -(2**62) + 1, np.int32(3)])
def test_versions_as_far_apart_as_they_may_be_are_told_apart(version):
    with store() as s:
        s.actor(4).push(step(0, 4), version=version)
        info = s.sample(4).info
        assert info.policy_version.tolist() == [version] * 4
        assert info.version_lag.tolist() == [-int(version)] * 4


@pytest.mark.parametrize("lane", [-1, 2, 10**30, "x", 1.5, True, None], ids=repr)
def test_a_trajectory_of_a_lane_that_there_is_not_is_refused(lane):
    with store() as s:
        actor = s.actor(lanes=2)
        message = f"push_trajectory: lane {lane!r}; this actor has lanes 0 to 1"
        with pytest.raises(SchemaError, match=re.escape(message)):
            actor.push_trajectory(step(0), lane=lane)
        assert actor.push_trajectory(step(0), lane=np.int8(1)) == 1  # type: ignore[arg-type]


def test_a_final_for_a_lane_that_did_not_end_is_refused_with_those_that_did():
    with store() as s:
        actor = s.actor(lanes=2)
        with pytest.raises(
            SchemaError, match=r"final\['id'\] has 1 rows; expected 0 \(lanes that ended in this step: \[\]\)"
        ):
            actor.push(ends(0, 2), final={"id": np.zeros(1, np.int32)})
        with pytest.raises(SchemaError, match=r"has 2 rows; expected 1 .*: \[1\]"):
            actor.push(ends(0, 2, truncated=[1]), final={"id": np.zeros(2, np.int32)})
        assert actor.push(ends(0, 2, truncated=[1]), final={"id": np.zeros(1, np.int32)}) == 2


@each_backend
def test_negative_strides_and_other_layouts_are_stored_as_they_read(backend):
    rows = np.arange(8, dtype=np.int32)
    wide = np.arange(48, dtype=np.float32).reshape(8, 6)
    pushes = [
        {"id": rows[::-1], "x": np.asfortranarray(wide)},
        {"id": np.repeat(rows, 2)[::2], "x": wide[::-1, ::-1]},
        {"id": np.broadcast_to(rows[:1], 8), "x": wide.T.copy().T},
    ]
    with store(backend=backend, capacity=24, batch_size=24) as s:
        actor = s.actor(lanes=8)
        for push in pushes:
            actor.push(push)
        batch = s.sample(24, to="numpy")
    for name in ("id", "x"):
        everything = np.concatenate([push[name] for push in pushes])
        np.testing.assert_array_equal(batch.data[name], everything[batch.info.keys])


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.uint64])
def test_jax_devices_refuse_what_they_would_narrow(dtype):
    with (
        store(backend="jax", placement="device:0") as s,
        pytest.raises(SchemaError, match=rf"'id' is {np.dtype(dtype)}.*narrows.*cast it.*x64.*host"),
    ):
        s.actor().push({"id": np.zeros(1, dtype)})


def test_a_first_push_that_can_not_be_stored_stores_nothing_and_the_store_goes_on():
    with store(backend="jax", placement="device:0", batch_size=2) as s:
        actor = s.actor(lanes=4)
        with pytest.raises(SchemaError, match="'id' is int64"):
            actor.push({"id": np.zeros(4, np.int64)})
        fill(actor, 8)
        batch = s.learner().pull()
        assert ids(batch) == batch.info.keys.tolist()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"capacity": 0}, SettingError, "capacity=0: expected a whole number of at least 1"),
        ({"capacity": -5}, SettingError, "capacity=-5"),
        ({"capacity": 3}, CapacityError, "capacity=3 is below batch_size=4"),
        ({"batch_size": 0}, SettingError, "batch_size=0"),
        ({"batch_size": 2.0}, SettingError, "batch_size=2.0"),
        ({"capacity": None}, SettingError, "needs capacity="),
        ({"mode": "offpolicy"}, SettingError, "mode='offpolicy': expected 'off_policy', 'on_policy' or 'bounded'"),
        ({"rollout_unit": 8, "mode": "off_policy", "capacity": 8}, SettingError, "on-policy settings"),
        ({"epochs": 2}, SettingError, "on-policy settings"),
        ({"when_full": "wait"}, SettingError, "when_full='wait': expected 'block' or 'drop'"),
        ({"inbox_units": 1, "schedule": conduit.Schedule(g_ing=2)}, SettingError, "inbox_units=1 is below g_ing=2"),
        ({"schedule": conduit.Schedule(g_ing=0)}, ScheduleError, "g_ing=0"),
        (
            {"schedule": conduit.Schedule(g_ing=cast(Any, "two"))},
            ScheduleError,
            "a granularity of 'two': expected a number",
        ),
        ({"schedule": "fast"}, ScheduleError, "schedule='fast': expected a conduit.Schedule"),
        (
            {"sampler": "prioritized"},
            SettingError,
            r"sampler='prioritized': expected a sampler such as conduit.Uniform\(\)",
        ),
        ({"sampler": conduit.Prioritized}, SettingError, r"sampler=<class .*expected a sampler"),
        ({"seed": -1}, SettingError, "seed=-1: expected a whole number ≥ 0"),
        ({"seed": "one"}, SettingError, "seed='one'"),
        ({"timeout_s": "5"}, SettingError, "timeout_s='5': expected seconds ≥ 0; math.inf waits for ever"),
        ({"timeout_s": -1}, SettingError, "timeout_s=-1"),
        ({"timeout_s": math.nan}, SettingError, "timeout_s=nan"),
        ({"ingestion": ROW}, HookError, "ingestion= got RegisteredHook; expected a list of hooks"),
        ({"ingestion": [transforms.Normalize]}, HookError, "got the class Normalize; expected a hook made with it"),
        ({"backend": None}, UnknownBackendError, "backend=None: expected one of reference, torch, jax"),
        ({"exact": True, "schedule": conduit.Schedule(overlap_del=True)}, ScheduleError, "exact=True"),
        ({"backend": "numpy"}, UnknownBackendError, "no backend 'numpy'; there are reference, torch, jax"),
        ({"placement": "device:99"}, CapacityError, "no endpoint device:99"),
        ({"budgets": {"pageable": "much"}}, CapacityError, r"budgets\['pageable'\]='much'"),
    ],
)
def test_a_store_that_can_not_be_is_refused_when_it_is_made(settings, error, message):
    with pytest.raises(error, match=message):
        store(**settings)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_backend_that_is_not_installed_names_its_extra(monkeypatch, name):
    for module in [module for module in sys.modules if module.startswith(f"conduit.backends.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    real = builtins.__import__

    def without(module, *args, **kwargs):
        if module.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=rf"backend '{name}' needs {name}.*pip install 'conduit-rl\[{name}\]'"):
        store(backend=name)


@pytest.mark.parametrize("lanes", [0, -1, 1.5, "2", True, 2**24 + 1, 10**30])
def test_an_actor_has_lanes_which_are_none_of_the_next_ones_if_it_can_not_be(lanes):
    with store() as s:
        with pytest.raises(
            SettingError, match=rf"actor\(lanes={lanes!r}\): expected a whole number of at least 1, and at most"
        ):
            s.actor(lanes=lanes)
        assert s.actor(lanes=2).lanes == 2
        assert s._actors.state()["lanes"] == 2


def test_a_capacity_that_no_number_of_numpys_holds_is_refused():
    with pytest.raises(SettingError, match=rf"capacity={10**30}: expected a whole number of at least 1, and at most"):
        store(capacity=10**30)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        *(
            ((first,), rf"read\(first={first!r}\): expected a whole number of at least 0")
            for first in ("x", None, -1, 1.5)
        ),
        *(((0, most), rf"read\(most={most!r}\): expected a whole number of at least 1") for most in ("x", 0, 1.5)),
    ],
)
def test_what_can_not_be_read_is_named_and_what_is_past_the_end_is_nothing(given, says):
    with store() as s:
        fill(s.actor(), 3)
        with pytest.raises(SettingError, match=says):
            s.read(*given)
        assert len(s.read(0, 10**30).keys) == 3
        assert len(s.read(10**30).keys) == 0


CALLS = {
    "no rows": (lambda s, a: s.sample(0), SettingError, r"sample\(rows\)=0: expected a whole number of at least 1"),
    "rows below none": (lambda s, a: s.sample(-1), SettingError, r"sample\(rows\)=-1"),
    "half a row": (lambda s, a: s.sample(2.5), SettingError, r"sample\(rows\)=2.5"),
    "rows as text": (lambda s, a: s.sample("3"), SettingError, r"sample\(rows\)='3'"),
    "no framework": (lambda s, a: s.sample(2, to="foo"), HandOverError, "'foo'"),
    "devices": (lambda s, a: s.sample(2, device=[1]), HandOverError, r"\[1\]"),
    "version as text": (lambda s, a: a.push(step(8), version="a"), ValueError, "version='a'"),
    "half a version": (lambda s, a: a.push(step(8), version=1.5), ValueError, "version=1.5"),
    "a truth as version": (lambda s, a: a.push(step(8), version=True), ValueError, "version=True"),
    "half a rank": (lambda s, a: s.learner(0.5, 1), SettingError, "rank=0.5"),
    "half a world": (lambda s, a: s.learner(0, 1.5), SettingError, "world.*1.5"),
    "a step's final twice": (
        lambda s, a: a.push(conduit.Step(step(8)), final={"id": np.zeros(0, np.int32)}),
        SchemaError,
        "a Step brings its own final and valid",
    ),
    "a step's valid twice": (
        lambda s, a: a.push(conduit.Step(step(8)), valid=np.array([True])),
        SchemaError,
        "a Step brings its own final and valid",
    ),
    "timeout as text": (lambda s, a: a.push(step(8), timeout_s="5"), SettingError, "timeout_s='5'"),
    "no timeout": (lambda s, a: s.sample(2, timeout_s=math.nan), SettingError, "timeout_s=nan"),
}


@pytest.mark.parametrize("case", CALLS)
def test_arguments_that_mean_nothing_are_refused_by_name_and_the_store_goes_on(case):
    call, error, message = CALLS[case]
    with store() as s:
        actor = s.actor()
        fill(actor, 8)
        with pytest.raises(error, match=message) as caught:
            call(s, actor)
        assert isinstance(caught.value, ConduitError)
        fill(actor, 1, first=8)
        assert len(s) == 9
        assert len(s.learner().pull()) == 4


@pytest.mark.parametrize("lane", [-1, 2])
def test_a_trajectory_goes_to_a_lane_of_its_actor(lane):
    with store() as s, pytest.raises(SchemaError, match=rf"lane {lane}; this actor has lanes 0 to 1"):
        s.actor(lanes=2).push_trajectory(step(0, 3), lane=lane)


def test_a_step_has_a_row_for_every_lane():
    with store() as s:
        with pytest.raises(SchemaError, match="has a leading axis of 3; expected 2, one a lane"):
            s.actor(lanes=2).push(step(0, 3))
        assert s.actor(lanes=3).push(step(0, 3)) == 3


def test_lanes_that_are_not_valid_write_nothing():
    with store(batch_size=1) as s:
        actor = s.actor(lanes=3)
        assert actor.push(step(0, 3), valid=np.array([True, False, True])) == 2
        assert actor.push(step(3, 3), valid=np.zeros(3, np.bool_)) == 0
        assert actor.push(conduit.Step(step(6, 3), valid=np.array([False, True, False]))) == 1
        assert len(s) == 3
        assert {i for _ in range(30) for i in ids(s.sample(1))} == {0, 2, 7}


def test_errors_are_the_builtins_that_code_outside_expects():
    for error, builtin in {
        conduit.errors.SchemaError: ValueError,
        conduit.errors.CapacityError: MemoryError,
        conduit.errors.WaitTimeout: TimeoutError,
        conduit.errors.UnknownKeyError: LookupError,
        conduit.errors.MissingExtraError: ImportError,
        conduit.errors.ClosedError: RuntimeError,
        conduit.errors.OperatorError: RuntimeError,
        conduit.errors.SettingError: ValueError,
    }.items():
        assert issubclass(error, builtin)
        assert issubclass(error, conduit.errors.ConduitError)
