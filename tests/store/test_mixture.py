"""Batches of several stores: whose rows, how many of each, and where they come."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import jax
import numpy as np
import pytest
import torch

import conduit
from conduit.backends import exchange
from conduit.backends.jax import exchange as jax_exchange
from conduit.backends.jax.dtypes import refusal
from conduit.clock import VirtualClock
from conduit.core.ordered import Lifo
from conduit.core.table import Table
from conduit.errors import (
    CapacityError,
    ClosedError,
    HandOverError,
    PriorityError,
    SchemaError,
    SettingError,
    UnknownKeyError,
    WaitTimeout,
)
from conduit.mixture import _ROW, Mixture, MixtureBatch, _parts_of, split
from conduit.testing import DTYPES, FRAMEWORKS, assert_same, example_rows
from tests.store.rows import each_backend, fill, host, played, step, store

KINDS = {"numpy": np.ndarray, "torch": torch.Tensor, "jax": jax.Array}
HALVES = {"offline": 0.5, "online": 0.5}
OFFLINE = 1000
"""Ids from here on are the offline store's: 1000 + key."""


@pytest.fixture
def stores() -> Iterator[Any]:
    """Makes two filled stores, and closes them."""
    made: list[conduit.Store] = []

    def make(offline: int = 24, online: int = 16, **settings: Any) -> dict[str, conduit.Store]:
        both = {"offline": store(seed=1, **settings), "online": store(seed=2, **settings)}
        made.extend(both.values())
        if offline:
            fill(both["offline"].actor(), offline, OFFLINE)
        if online:
            fill(both["online"].actor(), online)
        return both

    yield make
    for each in made:
        each.close()


def counts(batch: MixtureBatch) -> tuple[int, int]:
    return int(np.sum(batch.info.source == 0)), int(np.sum(batch.info.source == 1))


def assert_whole(batch: MixtureBatch) -> None:
    """Each entry is the row that its store has under its key, and all its leaves are."""
    expected = batch.info.keys + np.where(batch.info.source == 0, OFFLINE, 0)
    assert host(batch.data["id"]).tolist() == expected.tolist()
    assert sorted(batch.info.source) == list(batch.info.source)
    for place, number in enumerate(expected):
        row = step(int(number))
        assert host(batch.data["obs"]["image"])[place].tobytes() == row["obs"]["image"][0].tobytes()
        assert host(batch.data["obs"]["state"])[place].tobytes() == row["obs"]["state"][0].tobytes()


# Whose rows, and where they come


@pytest.mark.parametrize("to", [None, "numpy", "torch", "jax"])
@each_backend
def test_a_batch_has_each_stores_rows_together_in_the_framework_that_is_asked_for(stores, backend, to):
    mixture = Mixture(stores(backend=backend), HALVES, 8, to=to)
    kind = KINDS[to or ("numpy" if backend == "reference" else backend)]
    for number, batch in enumerate(islice(mixture, 3)):
        assert len(batch) == 8
        assert batch.info.number == number
        assert counts(batch) == (4, 4)
        for leaf in (batch.data["id"], batch.data["obs"]["image"], batch.data["obs"]["state"], batch.info.weight):
            assert isinstance(leaf, kind)
            assert leaf.shape[0] == 8
        assert_whole(batch)


def test_every_backend_gives_the_same_rows(stores):
    drawn = []
    for backend in ("reference", "torch", "jax"):
        mixture = Mixture(stores(backend=backend), {"offline": 1, "online": 2}, 4)
        drawn.append([(b.info.keys.tolist(), b.info.source.tolist()) for b in islice(mixture, 20)])
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({str(keys) for keys, _ in drawn[0]}) > 15


def test_stores_of_different_backends_mix_where_a_framework_is_named():
    with store(backend="torch") as offline, store(backend="jax") as online:
        fill(offline.actor(), 8, OFFLINE)
        fill(online.actor(), 8)
        both = {"offline": offline, "online": online}
        assert_whole(Mixture(both, HALVES, 8, to="torch").pull())
        with pytest.raises(SchemaError, match=r"leaf 'id' is torch's int32\[\] in one and jax's int32\[\].*with to="):
            Mixture(both, HALVES, 8).pull()


def test_a_batch_comes_on_the_device_or_the_sharding_that_is_asked_for(stores):
    both, device = stores(backend="jax"), jax.devices()[3]
    batch = Mixture(both, HALVES, 8, device=device).pull()
    assert batch.data["id"].devices() == batch.info.weight.devices() == {device}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("batch",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    # 3 and 5 rows: no store's rows alone could be split in four.
    batch = Mixture(both, {"offline": 3, "online": 5}, 8, sharding=sharding).pull()
    assert batch.data["obs"]["image"].sharding.is_equivalent_to(sharding, 3)
    assert batch.info.weight.sharding == sharding
    assert counts(batch) == (3, 5)
    assert_whole(batch)


def test_what_samples_are_told_of_is_told_of_each_entry(stores):
    both = stores(sampler=conduit.Prioritized(), max_times_sampled=50)
    actor = both["online"].actor()
    for number, priority in ((16, 5.0), (17, 9.0)):
        actor.push(step(number), priority=np.array([priority]))
    both["online"].advance()
    batch = Mixture(both, {"offline": 3, "online": 5}, 8).pull()
    info = batch.info
    assert info.stores == ("offline", "online")
    assert info.rows == {"offline": slice(0, 3), "online": slice(3, 8)}
    for name, part in info.parts.items():
        for told in (
            "keys",
            "probability",
            "priority",
            "age",
            "policy_version",
            "version_lag",
            "weight",
            "times_sampled",
        ):
            assert getattr(info, told)[info.rows[name]].tolist() == getattr(part, told).tolist(), told
        assert set(info.frontier[info.rows[name]]) == {part.frontier}
        assert set(info.table_size[info.rows[name]]) == {part.table_size}
        assert part.weight.max() == 1
    assert info.frontier.tolist() == [23] * 3 + [17] * 5
    assert info.mask is None
    assert set(info.priority) > {9.0}


def test_a_mask_is_joined_too():
    both = {name: store(item=conduit.Sequence(length=3, period=1), capacity=64) for name in HALVES}
    for each in both.values():
        fill(each.actor(), 24)
    batch = Mixture(both, HALVES, 6).pull()
    assert batch.data["id"].shape == batch.info.mask.shape == (6, 3)
    assert batch.info.mask.dtype == bool
    for each in both.values():
        each.close()


def test_a_batch_can_be_pickled_wherever_it_lies(stores):
    batch = Mixture(stores(backend="jax"), HALVES, 8, device=jax.devices()[2]).pull()
    for other in (pickle.loads(pickle.dumps(batch.info)), copy.copy(batch.info)):
        assert other.keys.tolist() == batch.info.keys.tolist()
        assert other.weight.tolist() == [1.0] * 8
        assert other.rows == batch.info.rows


def test_a_kept_batch_outlives_its_stores(stores):
    both = stores(backend="torch")
    batch = Mixture(both, HALVES, 8).pull()
    fill(both["online"].actor(), 64, 16)
    for each in both.values():
        each.close()
    assert_whole(batch)
    assert batch.info.weight.tolist() == [1.0] * 8


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arrays_of_every_dtype_are_joined_bit_by_bit(framework):
    dtypes = {str(dtype): dtype for dtype in DTYPES if framework != "jax" or refusal(dtype) is None}
    rows = [example_rows(count, seed=count, dtypes=dtypes) for count in (3, 1, 4)]
    parts = [exchange.accept(part, exchange.Target(framework)) for part in rows]
    for path, joined in exchange.concatenate(parts).items():
        assert_same(host(joined), np.concatenate([part[path] for part in rows]), path)
        assert not any(np.may_share_memory(host(joined), host(part[path])) for part in parts)


# How many of each


@pytest.mark.parametrize(
    ("shares", "batch_size"),
    [
        ((0.5, 0.5), 7),
        ((0.1, 0.9), 4),
        ((1, 2), 4),
        ((1 / 3, 2 / 3), 5),
        ((0.25, 0.25, 0.5), 3),
        ((1, 1, 1), 4),
        ((0.001, 0.0137, 3), 2),
        ((5, 0, 7, 11), 6),
        ((1, 1, 1, 1, 1, 1, 1), 3),
        ((1e-9, 1), 1),
    ],
)
def test_with_fixed_shares_two_stores_are_never_half_a_row_off_altogether_and_more_hardly_a_row(shares, batch_size):
    names = [str(place) for place in range(len(shares))]
    parts = _parts_of(dict(zip(names, shares, strict=True)), names, "")
    owed, given, splits = [0] * len(shares), np.zeros(len(shares), np.int64), set()
    exact = np.array(shares) / sum(shares)
    for number in range(1, 3001):
        got, owed = split(parts, owed, batch_size)
        assert sum(got) == batch_size
        assert min(got) >= 0
        assert sum(owed) == 0
        assert all(count == 0 for count, share in zip(got, shares, strict=True) if not share)
        given += got
        assert np.abs(given - number * batch_size * exact).max() < (0.5001 if len(shares) == 2 else 1.1), (
            number,
            given,
        )
        splits.add(tuple(got))
    if len(shares) == 2:
        assert len(splits) <= 2


def test_shares_that_are_whole_rows_are_exact_in_every_batch(stores):
    mixture = Mixture(stores(), {"offline": 0.1, "online": 0.9}, 10)
    assert {counts(batch) for batch in islice(mixture, 20)} == {(1, 9)}


def test_a_store_without_a_share_is_never_asked(stores):
    both = stores(offline=0)
    mixture = Mixture(both, {"offline": 0.0, "online": 1.0}, 8, timeout_s=0)
    for batch in islice(mixture, 3):
        assert counts(batch) == (0, 8)
        assert list(batch.info.rows) == ["online"]
    both["offline"].close()
    assert counts(mixture.pull()) == (0, 8)


def test_a_schedule_says_the_shares_of_each_batch_by_its_number(stores):
    def less_and_less(number: int) -> dict[str, float]:
        share = max(0.0, 1 - number / 10)
        return {"offline": share, "online": 1 - share}

    mixture = Mixture(stores(), less_and_less, 4)
    got = [counts(batch)[0] for batch in islice(mixture, 14)]
    asked = [4 * less_and_less(number)["offline"] for number in range(14)]
    assert got[0] == 4
    assert got[10:] == [0] * 4
    assert np.abs(np.cumsum(got) - np.cumsum(asked)).max() < 1


def test_on_any_schedule_what_is_owed_stays_a_few_rows():
    random, names = np.random.default_rng(0), ["a", "b", "c", "d"]
    owed = [0] * 4
    for _ in range(5000):
        shares = random.random(4) ** 4 * (random.random(4) < 0.6)
        shares[random.integers(4)] += 0.01
        parts = _parts_of(dict(zip(names, shares, strict=True)), names, "")
        assert sum(parts) == _ROW
        got, owed = split(parts, owed, int(random.integers(1, 6)))
        assert all(count == 0 for count, share in zip(got, shares, strict=True) if not share)
        assert max(map(abs, owed)) < 4 * _ROW


def test_with_jax_fixed_shares_compile_no_more_than_two_splits(stores):
    mixture = Mixture(stores(backend="jax"), {"offline": 0.3, "online": 0.7}, 4)
    kernel: Any = jax_exchange._concatenated
    before = kernel._cache_size()
    splits = {counts(batch) for batch in islice(mixture, 40)}
    assert splits == {(1, 3), (2, 2)}
    assert kernel._cache_size() - before <= 2


# What becomes of priorities


@pytest.mark.parametrize("to", ["numpy", "torch", "jax"])
def test_priorities_reach_the_store_that_each_row_is_of(stores, to):
    both = stores(sampler=conduit.Prioritized(alpha=1.0, eps=0.0))
    mixture = Mixture(both, HALVES, 8, to=to)
    batch = mixture.pull()
    fresh = np.arange(8, dtype=np.float32) + 2
    own = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jax.numpy.asarray}[to]
    told = mixture.update_priorities(batch.info.keys, batch.info.source, own(fresh))
    assert {name: (each.applied, each.stale) for name, each in told.items()} == {"offline": (4, 0), "online": (4, 0)}
    # Of a key that occurs twice, the last stays.
    known = {(int(s), int(k)): p for s, k, p in zip(batch.info.source, batch.info.keys, fresh, strict=True)}
    for later in islice(mixture, 20):
        for source, key, priority in zip(later.info.source, later.info.keys, later.info.priority, strict=True):
            assert priority == known.get((int(source), int(key)), priority)
    # Some of them, in any order.
    some = [5, 0, 6]
    told = mixture.update_priorities(batch.info.keys[some], batch.info.source[some], own(fresh[some]))
    assert (told["offline"].applied, told["online"].applied) == (1, 2)


def test_a_store_without_priorities_is_left_out(stores):
    with store(sampler=conduit.Prioritized()) as online:
        fill(online.actor(), 16)
        both = {"offline": stores()["offline"], "online": online}
        mixture = Mixture(both, HALVES, 8)
        info = mixture.pull().info
        assert list(mixture.update_priorities(info.keys, info.source, np.ones(8))) == ["online"]
        assert online.info()["priorities"]["applied"] == 4
    with pytest.raises(PriorityError, match="no sampler of offline, online has priorities"):
        Mixture(stores(), HALVES, 8).update_priorities(info.keys, info.source, np.ones(8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda keys, source, fresh: (keys, source, fresh * np.nan), PriorityError, r"key \d+ of store 'offline'"),
        (lambda keys, source, fresh: (keys, source, fresh[1:]), PriorityError, r"\[7\] priorities for \[8\] keys"),
        (
            lambda keys, source, fresh: (keys, source - 1, fresh),
            UnknownKeyError,
            "no store -1; offline, online are 0 to 1",
        ),
        (lambda keys, source, fresh: (keys, source[1:], fresh), UnknownKeyError, "the number of its store"),
        (lambda keys, source, fresh: (keys, source, list(fresh)), SchemaError, "priorities: got list"),
        (lambda keys, source, fresh: (keys, source, None), SchemaError, "update_priorities: priorities: got NoneType"),
        (lambda keys, source, fresh: (None, source, fresh), SchemaError, "update_priorities: keys: got NoneType"),
        (lambda keys, source, fresh: (keys, 3, fresh), SchemaError, "update_priorities: source: got int"),
    ],
)
def test_an_update_that_means_nothing_changes_no_store(stores, change, error, message):
    both = stores(sampler=conduit.Prioritized())
    mixture = Mixture(both, HALVES, 8)
    info = mixture.pull().info
    with pytest.raises(error, match=message):
        mixture.update_priorities(*change(info.keys, info.source, np.ones(8)))
    assert [each.info()["priorities"]["applied"] for each in both.values()] == [0, 0]


# Waiting, and going on


def test_a_store_that_lacks_rows_is_named_and_the_next_pull_goes_on_with_the_same_batch(stores):
    both, other = stores(online=2), stores()
    fill(other["online"].actor(), 1, 16)
    mixture = Mixture(both, HALVES, 8, timeout_s=0.01)
    for _ in range(3):
        with pytest.raises(WaitTimeout, match=r"batch 0 of a mixture: 4 rows of store 'online'.*push 2 more"):
            mixture.pull()
    assert mixture.state()["number"] == 0
    fill(both["online"].actor(), 14, 2)
    straight = Mixture(stores(), HALVES, 8)
    for batch in islice(mixture, 3):
        expected = straight.pull().info
        assert batch.info.number == expected.number
        assert batch.info.keys.tolist() == expected.keys.tolist()


def test_a_pull_waits_no_longer_than_its_timeout_over_all_stores():
    def scene(clock: VirtualClock) -> float:
        both = {name: store(clock=clock, timeout_s=100.0) for name in HALVES}
        mixture = Mixture(both, HALVES, 8, clock=clock)
        actor = both["offline"].actor()

        def late() -> None:
            clock.sleep(2.0)
            fill(actor, 8)

        clock.spawn(late, "late")
        began_s = clock.now()
        with pytest.raises(WaitTimeout, match="'online'"):
            mixture.pull(timeout_s=3.0)
        took_s = clock.now() - began_s
        for each in both.values():
            each.close()
        return took_s

    assert played(0, scene) == pytest.approx(3.0)


def test_threads_that_pull_at_once_get_different_batches():
    def scene(clock: VirtualClock) -> list[int]:
        both = {name: store(clock=clock) for name in HALVES}
        mixture, numbers = Mixture(both, HALVES, 8, clock=clock), []
        tasks = [clock.spawn(lambda: numbers.append(mixture.pull().info.number), f"pull {i}") for i in range(5)]
        clock.sleep(1.0)
        for each in both.values():
            fill(each.actor(), 8)
        for task in tasks:
            task.join()
        for each in both.values():
            each.close()
        return numbers

    for seed in range(5):
        assert sorted(played(seed, scene)) == [0, 1, 2, 3, 4]


def test_a_mixture_goes_on_from_its_state(stores):
    first, second = stores(), stores()
    one, other = Mixture(first, {"offline": 1, "online": 2}, 4), Mixture(second, {"offline": 1, "online": 2}, 4)
    splits = [counts(batch) for batch in islice(one, 10)]
    begun = [counts(batch) for batch in islice(other, 4)]
    resumed = Mixture(second, {"offline": 1, "online": 2}, 4)
    resumed.load(other.state())
    assert begun + [counts(batch) for batch in islice(resumed, 6)] == splits
    assert len(set(splits)) == 2
    with pytest.raises(SettingError, match="a mixture of offline, online; this one is of offline"):
        Mixture({"offline": first["offline"]}, {"offline": 1}, 4).load(other.state())


@pytest.mark.parametrize(
    "state",
    [
        *({}, None, 3, {"number": 1}, {"owed": {"offline": 0, "online": 0}}, {"number": 1, "owed": 3}),
        *({"number": None, "owed": {}}, {"number": "x", "owed": {"offline": 0, "online": 0}}),
        {"number": 1, "owed": {"offline": 0.5, "online": None}},
    ],
    ids=repr,
)
def test_what_is_no_mixtures_state_is_refused_and_changes_nothing(stores, state):
    mixture = Mixture(stores(), HALVES, 8)
    mixture.pull()
    before = mixture.state()
    with pytest.raises(SettingError, match=r"Mixture\.load\(state=.*expected what Mixture\.state\(\) returned"):
        mixture.load(state)
    assert mixture.state() == before


def test_a_table_may_be_named(stores):
    both = stores(tables={"last": Table(Lifo())})
    batch = Mixture(both, HALVES, 4, tables={"online": "last"}).pull()
    assert set(batch.info.keys[2:]) == {15, 14}


# What can't be


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"offline": 1}, "'online' differs; expected one for each of offline, online"),
        ({"offline": 1, "online": 1, "other": 1}, "'other' differs"),
        ({"offline": -0.5, "online": 1}, "'offline' has -0.5"),
        ({"offline": 1, "online": math.nan}, "'online' has nan"),
        ({"offline": 1, "online": math.inf}, "'online' has inf"),
        ({"offline": 1, "online": "1"}, "'online' has '1'"),
        ({"offline": 0, "online": 0.0}, "are all 0"),
        ([0.5, 0.5], "expected a mapping from offline, online"),
    ],
)
def test_shares_that_mean_nothing_are_refused_of_a_schedule_with_the_batchs_number(stores, shares, message):
    both = stores()
    with pytest.raises(SettingError, match=rf"Mixture\(shares=…\).*{message}"):
        Mixture(both, shares, 8)
    mixture = Mixture(both, lambda number: shares if number == 2 else HALVES, 8)
    assert [len(mixture.pull()) for _ in range(2)] == [8, 8]
    for _ in range(2):
        with pytest.raises(SettingError, match=rf"the shares of batch 2.*{message}"):
            mixture.pull()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda both: Mixture({}, {}, 8), "has no stores"),
        (lambda both: Mixture(cast(Any, 3), HALVES, 8), r"Mixture\(stores=3\): expected a dict by the stores' names"),
        (lambda both: Mixture(cast(Any, None), HALVES, 8), r"Mixture\(stores=None\)"),
        (lambda both: Mixture(cast(Any, list(both.values())), HALVES, 8), r"Mixture\(stores=\["),
        (lambda both: Mixture(cast(Any, {3: both["online"]}), HALVES, 8), r"Mixture\(stores=\{3: "),
        (lambda both: Mixture(both, HALVES, 8, tables=cast(Any, 3)), r"Mixture\(tables=3\): expected a dict"),
        (lambda both: Mixture(both, HALVES, 8, tables=cast(Any, 0)), r"Mixture\(tables=0\): expected a dict"),
        (
            lambda both: Mixture(both, HALVES, 8, tables={"online": "old"}),
            "store 'online' has no table 'old'; it has main",
        ),
        (lambda both: Mixture(both, HALVES, 8, tables=cast(Any, {"online": 3})), "'online' has no table 3"),
        (lambda both: Mixture(both | {"online": "the other"}, HALVES, 8), "store 'online' is a str"),
        (lambda both: Mixture(both | {"online": store(rollout_unit=8)}, HALVES, 8), "store 'online' is on-policy"),
        (lambda both: Mixture(both, HALVES, 0), "batch_size=0"),
        (lambda both: Mixture(both, HALVES, 8, timeout_s=-1), "timeout_s=-1"),
        (lambda both: Mixture(both, HALVES, 8, tables={"onlin": "main"}), "names 'onlin', which is no store"),
    ],
)
def test_a_mixture_that_can_not_be_is_refused_when_it_is_made(stores, make, message):
    with pytest.raises(SettingError, match=message):
        make(stores())


X = np.zeros((8, 3), np.float32)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": X.astype(np.float64)}, r"leaf 'x' is numpy's float32\[3\] in one and numpy's float64\[3\] in the other"),
        ({"x": X[:, :2]}, r"float32\[3\] in one and numpy's float32\[2\]"),
        ({"x": X, "y": X}, "only one of them has leaf 'y'"),
        ({"x": {}, "y": [X]}, "only one of them has leaf 'x', 'y/0'"),
    ],
)
def test_rows_that_differ_are_refused_by_leaf_and_stores(other, message):
    with store() as offline, store() as online:
        offline.actor(lanes=8).push({"x": X})
        online.actor(lanes=8).push(other)
        mixture = Mixture({"offline": offline, "online": online}, HALVES, 4)
        for _ in range(2):
            with pytest.raises(SchemaError, match=f"'offline' and 'online' can't be mixed: .*{message}"):
                mixture.pull()


def test_what_a_store_refuses_names_the_store(stores):
    both = stores()
    for error, mixture in (
        (CapacityError, Mixture(both, {"offline": 1, "online": 9}, 100)),
        (HandOverError, Mixture(both, HALVES, 8, to="torch", device="cuda:77")),
    ):
        with pytest.raises(error) as refused:
            mixture.pull()
        assert "of a mixture" in refused.value.__notes__[0]
    both["online"].close()
    mixture = Mixture(both, HALVES, 8)
    with pytest.raises(ClosedError) as refused:
        mixture.pull()
    assert "store 'online'" in refused.value.__notes__[0]
