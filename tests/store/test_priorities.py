"""Priorities, as the store takes them: what is applied, what is stale, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import conduit
from conduit.core.priorities import Priorities
from conduit.core.ring import Window
from conduit.errors import ConduitError, PriorityError, UnknownKeyError
from tests.store.rows import each_backend, fill, step, store

PLAIN = {"alpha": 1.0, "eps": 0.0}


def prioritized(**settings):
    sampler = conduit.Prioritized(**(PLAIN | settings.pop("sampling", {})))
    return store(**({"sampler": sampler, "capacity": 8, "batch_size": 8} | settings))


def drawn(s: conduit.Store, samples: int = 40) -> tuple[np.ndarray, ...]:
    """Keys, priorities, probabilities and weights of many draws of the eight rows."""
    infos = [s.sample(8).info for _ in range(samples)]
    return tuple(
        np.concatenate([getattr(i, name) for i in infos]) for name in ("keys", "priority", "probability", "weight")
    )


def priorities(s: conduit.Store, samples: int = 40) -> dict[int, float]:
    keys, priority, _, _ = drawn(s, samples)
    return dict(zip(keys.tolist(), priority.tolist(), strict=True))


def floats(array) -> torch.Tensor:
    tensor = torch.as_tensor(array)
    return tensor.float().requires_grad_() if tensor.is_floating_point() else tensor


def narrow(array) -> jnp.ndarray:
    return jnp.asarray(array.astype(np.float32 if array.dtype.kind == "f" else np.int32))


FRAMEWORKS = {"numpy": np.asarray, "torch": torch.as_tensor, "grad": floats, "jax": narrow}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@each_backend
def test_arrays_of_any_framework_set_priorities(backend, framework):
    array = FRAMEWORKS[framework]
    with prioritized(backend=backend) as s:
        fill(s.actor(lanes=8), 8)
        update = s.update_priorities(array(np.array([1, 5])), array(np.array([4.0, 2.5])))
        assert update == conduit.PriorityUpdate(applied=2, stale=0)
        assert priorities(s) == dict.fromkeys(range(8), 1.0) | {1: 4.0, 5: 2.5}
        assert s.info()["priorities"] == {"applied": 2, "stale": 0}


def test_what_is_given_may_be_changed_at_once():
    with prioritized() as s:
        fill(s.actor(lanes=8), 8)
        keys, values = np.array([3]), torch.tensor([6.0])
        s.update_priorities(keys, values)
        keys[:], values[:] = 4, 9.0
        assert priorities(s)[3] == 6.0
        assert priorities(s)[4] == 1.0


def test_a_late_update_for_an_evicted_row_leaves_the_row_in_its_slot_alone():
    """pytorch/rl#4041: keys that were slots hit whatever row was there by then."""
    with prioritized() as s:
        actor = s.actor()
        fill(actor, 8)
        fill(actor, 3, first=8)
        update = s.update_priorities(np.array([0, 2, 3, 7]), np.array([50.0, 60.0, 5.0, 7.0]))
        assert (update.applied, update.stale) == (2, 2)
        assert priorities(s) == {3: 5.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 7.0, 8: 1.0, 9: 1.0, 10: 1.0}
        fill(actor, 1, first=11)
        assert priorities(s)[11] == 7.0, "stale priorities are no maximum either"
        assert s.info()["priorities"] == {"applied": 2, "stale": 2}


def test_of_a_key_given_twice_the_last_stays():
    with prioritized() as s:
        fill(s.actor(), 8)
        s.update_priorities(np.array([4, 4, 4]), np.array([9.0, 2.0, 3.0]))
        assert priorities(s)[4] == 3.0


def test_alpha_is_applied_once_however_often_a_priority_is_set():
    """pytorch/rl#3925."""
    with prioritized(sampling={"alpha": 0.5}) as s:
        fill(s.actor(), 8)
        for _ in range(3):
            s.update_priorities(np.arange(8), (np.arange(8) + 1.0) ** 2)
        keys, priority, probability, _ = drawn(s)
        np.testing.assert_allclose(probability, (keys + 1) / 36)
        np.testing.assert_allclose(priority, (keys + 1.0) ** 2)


def test_a_pushed_zero_disables_a_row_until_it_is_updated():
    with prioritized(sampling={"eps": 0.25}) as s:
        s.actor(lanes=8).push({"id": np.arange(8)}, priority=np.array([0.0, 1, 1, 1, 1, 1, 1, 0]))
        assert set(priorities(s)) == set(range(1, 7))
        s.update_priorities(np.array([0, 1]), np.zeros(2))
        assert priorities(s)[0] == priorities(s)[1] == 0.25
        assert 7 not in priorities(s, 200)


def test_no_priority_is_too_small_to_be_drawn():
    with prioritized(sampling={"alpha": 2.0}) as s:
        s.actor(lanes=8).push({"id": np.arange(8)}, priority=np.full(8, 1e-200))
        assert set(priorities(s)) == set(range(8))
        assert set(priorities(s).values()) == {1e-200}


def test_rows_all_disabled_are_what_a_pull_says_it_misses():
    with prioritized(timeout_s=0.05) as s:
        s.actor(lanes=8).push({"id": np.arange(8)}, priority=np.zeros(8))
        with pytest.raises(TimeoutError, match="all 8 rows have priority 0"):
            s.learner().pull()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_priority_that_is_none_is_refused_by_key_and_nothing_changes(bad, framework):
    with prioritized() as s:
        fill(s.actor(), 8)
        with pytest.raises(PriorityError, match=rf"key 6 has priority {bad}; expected a finite number ≥ 0"):
            s.update_priorities(np.array([5, 6]), FRAMEWORKS[framework](np.array([9.0, bad])))
        assert set(priorities(s).values()) == {1.0}
        assert s.info()["priorities"] == {"applied": 0, "stale": 0}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (np.array([3, 8]), "key 8 was never issued; keys go from 0 to 7"),
        (np.array([-1]), "key -1 was never issued"),
        (np.array([1 << 62]), "was never issued"),
        (np.array([0.0, 1.0]), r"keys are float64\[2\]; expected whole numbers of shape \(n,\)"),
        (np.array([[0, 1]]), r"keys are int64\[1, 2\]"),
        (np.array([True]), r"keys are bool\[1\]"),
    ],
)
def test_a_key_never_issued_is_refused_and_nothing_changes(keys, message):
    with prioritized() as s:
        fill(s.actor(), 8)
        with pytest.raises(UnknownKeyError, match=message):
            s.update_priorities(keys, np.full(keys.shape, 9.0))
        assert set(priorities(s).values()) == {1.0}


def test_before_any_row_no_key_has_been_issued_and_the_message_says_so():
    with prioritized() as s, pytest.raises(UnknownKeyError, match=r"key 0 was never issued; no .*(row|key)"):
        s.update_priorities(np.array([0]), np.array([1.0]))


@pytest.mark.parametrize("count", [1, 3])
def test_priorities_are_one_a_key(count):
    with prioritized() as s:
        fill(s.actor(), 8)
        with pytest.raises(PriorityError, match=rf"\[{count}\] priorities for \[2\] keys"):
            s.update_priorities(np.array([0, 1]), np.ones(count))
        with pytest.raises(PriorityError, match=r"\[2, 1\] priorities"):
            s.update_priorities(np.array([0, 1]), np.ones((2, 1)))


@pytest.mark.parametrize(
    ("keys", "values", "named"), [("abc", np.ones(1), "keys"), (np.array([0]), object(), "priorities")]
)
def test_keys_and_priorities_that_are_no_arrays_are_named(keys, values, named):
    with prioritized() as s:
        fill(s.actor(), 8)
        with pytest.raises(ConduitError, match=named):
            s.update_priorities(keys, values)


@pytest.mark.parametrize(
    "wrong",
    [np.array(["a", "b"]), np.array([1 + 1j, 2.0]), np.array([1.0, 2.0], object)],
    ids=["text", "complex", "objects"],
)
def test_priorities_that_are_no_real_numbers_are_refused_and_nothing_changes(wrong):
    with prioritized() as s:
        fill(s.actor(), 8)
        with pytest.raises(PriorityError, match=r"update_priorities: priorities are .*expected real numbers"):
            s.update_priorities(np.array([0, 1]), wrong)
        assert set(priorities(s).values()) == {1.0}


def test_no_keys_are_no_update():
    with prioritized() as s:
        fill(s.actor(), 8)
        assert s.update_priorities(np.zeros(0, np.int64), np.zeros(0)) == conduit.PriorityUpdate(0, 0)


def test_a_store_without_priorities_refuses_them():
    with store() as s:
        fill(s.actor(), 8)
        with pytest.raises(PriorityError, match=r"use sampler=conduit.Prioritized\(\)"):
            s.update_priorities(np.array([0]), np.array([1.0]))
        with pytest.raises(PriorityError, match=r"use sampler=conduit.Prioritized\(\)"):
            s.actor().push(step(8), priority=np.ones(1))


def test_an_update_is_known_to_the_next_pull_and_a_prefetched_batch_states_its_lag():
    prefetch = conduit.Schedule(overlap_del=True)
    for settings, lag in (({}, 0), ({"exact": True}, 0), ({"schedule": prefetch}, 1)):
        with prioritized(**settings) as s:
            fill(s.actor(), 8)
            learner = s.learner()
            learner.pull()
            s.update_priorities(np.arange(1, 8), np.full(7, 1e-12))
            late, known = learner.pull(), learner.pull()
            assert late.info.priority_lag == lag
            assert (set(late.info.keys) == {0}) == (lag == 0)
            assert set(known.info.keys) == {0}


def test_extreme_priorities_are_taken():
    with prioritized(sampling={"beta": 1.0}) as s:
        fill(s.actor(), 8)
        s.update_priorities(np.arange(8), np.array([1e-300, 1e-100, 1, 1e100, 1e300, 1e300, 0, 1e-12]))
        keys, _, _, weight = drawn(s)
        assert set(keys) == {4, 5}
        assert np.isfinite(weight).all()


def test_priorities_whose_sum_would_overflow_are_refused_or_served():
    with prioritized() as s:
        fill(s.actor(), 8)
        try:
            s.update_priorities(np.arange(8), np.full(8, 1.5e308))
        except PriorityError:
            return
        _, _, probability, _ = drawn(s)
        np.testing.assert_allclose(probability, 1 / 8)


class Waiting:
    """Priorities of eight rows, whose turns come when the test says; arrays are on a device, or on the host."""

    def __init__(self, on_device: bool) -> None:
        self.window = Window(0, 8)
        self.actions: list[Any] = []
        self.fetched = 0
        self.sampler = conduit.Prioritized(**PLAIN).start(8, 0)
        self.sampler.insert(0, 8, None)
        arrays: Any = SimpleNamespace(to_numpy=np.asarray, fetch=self._fetch, on_host=lambda leaf: not on_device)
        order: Any = SimpleNamespace(act=self.actions.append)
        self.priorities = Priorities(arrays, order, cast(Any, self), [self.sampler])

    @property
    def inserted(self) -> int:
        return self.window.stop

    def find(self, keys: np.ndarray, oldest: int) -> tuple[np.ndarray, np.ndarray]:
        live = keys >= self.window.first
        return keys[live], live

    def _fetch(self, leaf: Any) -> Any:
        copy = np.array(leaf)

        def wait() -> np.ndarray:
            self.fetched += 1
            return copy

        return wait

    def push(self, rows: int) -> None:
        self.sampler.insert(self.window.stop, rows, None)
        self.window = Window(self.window.first + rows, self.window.stop + rows)

    def known(self) -> dict[int, float]:
        draw: Any = self.sampler.draw(0, 500, self.window)
        return dict(zip(draw.keys.tolist(), draw.priority.tolist(), strict=True))


@pytest.mark.parametrize("on_device", [False, True])
def test_rows_that_go_before_an_updates_turn_are_stale_in_it(on_device):
    waiting = Waiting(on_device)
    asked = waiting.priorities.update(np.arange(4), [2.0, 3.0, 4.0, 5.0])
    assert asked == conduit.PriorityUpdate(applied=4, stale=0)
    waiting.push(2)
    assert waiting.fetched == 0
    waiting.actions[0]()
    assert (waiting.priorities.applied, waiting.priorities.stale) == (2, 2)
    assert waiting.known() == dict.fromkeys(range(4, 10), 1.0) | {2: 4.0, 3: 5.0}


def test_what_is_on_a_device_is_waited_for_and_checked_in_its_turn():
    waiting = Waiting(on_device=True)
    waiting.priorities.update(np.arange(2), [1.0, np.nan])
    assert waiting.fetched == 0
    with pytest.raises(PriorityError, match="key 1 has priority nan"):
        waiting.actions[0]()
    assert waiting.fetched == 1
    assert set(waiting.known().values()) == {1.0}


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.uint64, np.float16, np.float32, np.bool_])
def test_priorities_of_any_real_dtype_are_taken(dtype):
    with prioritized() as s:
        fill(s.actor(), 8)
        s.update_priorities(np.array([2, 6], np.uint64), np.array([1, 3]).astype(dtype))
        assert priorities(s)[6] == float(np.array(3).astype(dtype))


def test_keys_beyond_int64_are_refused_as_never_issued():
    with prioritized() as s:
        fill(s.actor(), 8)
        with pytest.raises(UnknownKeyError, match="key 18446744073709551615 was never issued"):
            s.update_priorities(np.array([1, 2**64 - 1], np.uint64), np.ones(2))


def test_keys_and_priorities_may_be_views_with_strides():
    with prioritized() as s:
        fill(s.actor(), 8)
        s.update_priorities(np.arange(8)[::-2], np.arange(16.0).reshape(4, 4)[:, 1])
        assert priorities(s) == dict.fromkeys(range(8), 1.0) | {7: 1.0, 5: 5.0, 3: 9.0, 1: 13.0}
