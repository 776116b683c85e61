"""`steps` on environments that count, so that every row's right values are known: each autoreset mode, each end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import optree
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from numpy.testing import assert_array_equal

import conduit
from conduit.core.episodes import Step
from conduit.errors import SchemaError
from conduit.integrations.gymnasium import Steps, steps

MODES = list(AutoresetMode)
LENGTHS = [(3, 1, 2), (2, 4), (1,), (5, 3)]
"""Lane i's episodes have these lengths, in turn: lanes end apart, together, and twice in a row."""
NUMBERS = Box(0, 1000, (3,), np.float32)


class Counting(gym.Env[Any, Any]):
    """Observes (lane, episode, t). Episodes of the given lengths in turn; a lane's odd episodes end the other way."""

    action_space = Discrete(1000)

    def __init__(self, lane: int, lengths: Sequence[int], first: str, form: str = "array") -> None:
        self.lane, self.lengths, self.first, self.form = lane, lengths, first, form
        self.episode = -1
        self.array = np.zeros(3, np.float32)
        half = Box(0, 1000, (1,), np.float32)
        spaces: dict[str, gym.Space[Any]] = {
            "dict": Dict({"who": half, "when": Tuple((Discrete(1000), Discrete(1000)))}),
            "scalar": Discrete(10_000),
        }
        self.observation_space = spaces.get(form, NUMBERS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == self.lengths[self.episode % len(self.lengths)]
        truncates = (self.first == "truncated") == (self.episode % 2 == 0)
        return (
            self.observe(),
            reward_of(self.lane, self.episode, int(action)),
            over and not truncates,
            over and truncates,
            {},
        )

    def observe(self) -> Any:
        numbers = (self.lane, self.episode, self.t)
        match self.form:
            case "dict":
                return {"when": (self.episode, self.t), "who": np.array([self.lane], np.float32)}
            case "scalar":
                return 1000 * self.lane + 100 * self.episode + self.t
            case "one array":
                self.array[:] = numbers
                return self.array
        return np.array(numbers, np.float32)


def reward_of(lane: int, episode: int, action: int) -> float:
    return 100 * lane + 10 * episode + action


def policy(obs: Any) -> Any:
    """Acts by how far the episode has come, and stores one more leaf."""
    t = obs[:, 2]
    return {"action": t.astype(np.int32) + 1, "value": t * 2}


class ReusesEverything(VectorWrapper):
    """Hands out the same arrays every time, and soils them before the next step."""

    buffers: Any = None

    def _own(self, made: Any) -> Any:
        if self.buffers is None:
            self.buffers = {}
        mine = self.buffers.setdefault(len(made), made)
        for kept, new in zip(optree.tree_leaves(mine[:-1]), optree.tree_leaves(made[:-1]), strict=True):
            kept[:] = new
        return (*mine[:-1], made[-1])

    def reset(self, **knobs: Any) -> Any:
        return self._own(self.env.reset(**knobs))

    def step(self, actions: Any) -> Any:
        for leaf in optree.tree_leaves(self.buffers):
            leaf.fill(77)
        return self._own(self.env.step(actions))


def counting(mode: AutoresetMode, first: str = "terminated", form: str = "array", copy: bool = True) -> SyncVectorEnv:
    makers = [lambda i=i, n=n: Counting(i, n, first, form) for i, n in enumerate(LENGTHS)]
    return SyncVectorEnv(makers, copy=copy, autoreset_mode=mode)


Row = dict[str, Any]


def expected(lane: int, first: str, rows: int) -> list[Row]:
    """A lane's rows, said without an environment."""
    made: list[Row] = []
    episode = 0
    while len(made) < rows:
        length = LENGTHS[lane][episode % len(LENGTHS[lane])]
        truncates = (first == "truncated") == (episode % 2 == 0)
        for t in range(length):
            over = t + 1 == length
            made.append(
                {
                    "obs": (lane, episode, t),
                    "action": t + 1,
                    "value": 2 * t,
                    "reward": reward_of(lane, episode, t + 1),
                    "terminated": over and not truncates,
                    "truncated": over and truncates,
                    "next_obs": (lane, episode, t + 1),
                    "final": (lane, episode, length) if over else None,
                }
            )
        episode += 1
    return made[:rows]


def streams(some: Sequence[Step], lanes: int = len(LENGTHS)) -> list[list[Row]]:
    """The valid rows of each lane, each with its final, as plain numbers."""
    got: list[list[Row]] = [[] for _ in range(lanes)]
    for step in some:
        valid = np.ones(lanes, bool) if step.valid is None else step.valid
        ended = np.flatnonzero(ends(step))
        finals = dict(zip(ended, step.final["obs"], strict=True)) if step.final is not None else {}
        assert set(finals) == set(ended)
        for lane in np.flatnonzero(valid):
            row = {name: plain(leaf[lane]) for name, leaf in step.rows.items()}
            row["final"] = plain(finals[lane]) if lane in finals else None
            got[lane].append(row)
    return got


def ends(step: Step) -> Any:
    return np.logical_or(step.rows["terminated"], step.rows["truncated"])


def plain(x: Any) -> Any:
    return tuple(x.tolist()) if x.ndim else x.item()


# --- the rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["terminated", "truncated"])
@pytest.mark.parametrize("mode", MODES)
def test_every_row_of_every_lane_is_right(mode: AutoresetMode, first: str) -> None:
    got = streams(list(islice(steps(counting(mode, first), policy), 40)))
    for lane, rows in enumerate(got):
        assert len(rows) >= 20
        assert rows == expected(lane, first, len(rows))


@pytest.mark.parametrize("first", ["terminated", "truncated"])
def test_the_modes_give_the_same_rows(first: str) -> None:
    one, *others = [streams(list(islice(steps(counting(mode, first), policy), 40))) for mode in MODES]
    for other in others:
        for mine, theirs in zip(one, other, strict=True):
            shared = min(len(mine), len(theirs))
            assert mine[:shared] == theirs[:shared]


@pytest.mark.parametrize("mode", MODES)
def test_a_real_environment_gives_the_same_rows_in_every_mode(mode: AutoresetMode) -> None:
    def cartpole(autoreset: AutoresetMode) -> list[list[Row]]:
        makers = [lambda: gym.make("CartPole-v1", max_episode_steps=12)] * 3
        envs = SyncVectorEnv(makers, autoreset_mode=autoreset)
        toward = steps(envs, lambda obs: (obs[:, 2] > 0).astype(np.int64), seed=5)
        return streams(list(islice(toward, 120)), lanes=3)

    for mine, reference in zip(cartpole(mode), cartpole(AutoresetMode.SAME_STEP), strict=True):
        assert {row["terminated"] for row in mine} | {row["truncated"] for row in mine} == {True, False}
        assert mine == reference[: len(mine)]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_outside_next_step_every_step_writes_a_row_in_every_lane(mode: AutoresetMode) -> None:
    assert all(step.valid is None for step in islice(steps(counting(mode), policy), 30))


def test_under_next_step_the_step_after_an_end_is_invalid_in_that_lane_alone() -> None:
    some = list(islice(steps(counting(AutoresetMode.NEXT_STEP), policy), 30))
    for before, after in pairwise(some):
        ended = ends(before)
        valid = np.ones(len(LENGTHS), bool) if after.valid is None else after.valid
        assert_array_equal(valid, ~ended)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_store_holds_after_pushes_are_the_real_rows_alone(mode: AutoresetMode) -> None:
    pushed = list(islice(steps(ReusesEverything(counting(mode, copy=False)), policy), 40))
    with conduit.Store(backend="reference", capacity=1000, batch_size=1) as store:
        actor = store.actor(lanes=len(LENGTHS))
        taken = sum(actor.push(step) for step in pushed)
        draws = [store.sample(64).data for _ in range(30)]
    rows = {name: np.concatenate([draw[name] for draw in draws]) for name in draws[0]}
    assert taken == sum(map(len, streams(pushed)))
    expects = {(lane, *row["obs"]): row for lane in range(4) for row in expected(lane, "terminated", 60)}
    drawn = set()
    for i, (lane, episode, t) in enumerate(rows["obs"].tolist()):
        row = expects[lane, lane, episode, t]
        drawn.add((lane, episode, t))
        assert {name: plain(leaf[i]) for name, leaf in rows.items()} == {k: v for k, v in row.items() if k != "final"}
    assert len(drawn) > 0.9 * taken


# --- arrays that are used again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_are_kept_survive_a_vector_environment_that_reuses_its_arrays(mode: AutoresetMode) -> None:
    kept = list(islice(steps(ReusesEverything(counting(mode, copy=False)), policy), 40))
    for lane, rows in enumerate(streams(kept)):
        assert rows == expected(lane, "terminated", len(rows))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
def test_environments_that_write_into_one_array_are_right_where_gymnasium_lets_them(mode: AutoresetMode) -> None:
    kept = list(islice(steps(counting(mode, form="one array", copy=False), policy), 40))
    for lane, rows in enumerate(streams(kept)):
        assert rows == expected(lane, "terminated", len(rows))


def test_under_same_step_an_environment_that_overwrites_its_last_observation_is_found_out() -> None:
    with pytest.raises(SchemaError, match="lane 2's environment writes every observation into the same array"):
        list(islice(steps(counting(AutoresetMode.SAME_STEP, form="one array"), policy), 3))


def test_under_same_step_a_last_observation_that_equals_the_first_is_no_fault() -> None:
    class Still(Counting):
        def observe(self) -> Any:
            return np.zeros(3, np.float32)

    envs = SyncVectorEnv([lambda: Still(0, (2,), "terminated")], autoreset_mode=AutoresetMode.SAME_STEP)
    assert len(list(islice(steps(envs, policy), 10))) == 10


def test_a_policy_that_reuses_its_arrays_is_stored_right() -> None:
    buffer = np.zeros(len(LENGTHS), np.int32)

    def reusing(obs: Any) -> Any:
        buffer[:] = obs[:, 2] + 1
        return {"action": buffer, "value": obs[:, 2] * 2}

    kept = list(islice(steps(counting(AutoresetMode.DISABLED), reusing), 20))
    for lane, rows in enumerate(streams(kept)):
        assert rows == expected(lane, "terminated", len(rows))


# --- what is asked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_dict_and_tuple_observations_stay_trees(mode: AutoresetMode) -> None:
    def act(obs: Any) -> Any:
        return obs["when"][1] + 1

    for step in islice(steps(counting(mode, form="dict"), act), 30):
        obs, after = step.rows["obs"], step.rows["next_obs"]
        valid = slice(None) if step.valid is None else step.valid
        assert (obs["who"].dtype, obs["when"][0].dtype) == (np.float32, np.int64)
        assert_array_equal(after["when"][1][valid], obs["when"][1][valid] + 1)
        assert_array_equal(after["when"][0][valid], obs["when"][0][valid])
        ended = ends(step)
        if step.final is not None:
            assert_array_equal(step.final["obs"]["who"][:, 0], np.flatnonzero(ended))
            assert_array_equal(step.final["obs"]["when"][1], after["when"][1][ended])


@pytest.mark.parametrize("mode", MODES)
def test_scalar_observations_work(mode: AutoresetMode) -> None:
    for step in islice(steps(counting(mode, form="scalar"), lambda obs: obs % 100), 20):
        valid = slice(None) if step.valid is None else step.valid
        assert_array_equal(step.rows["next_obs"][valid], step.rows["obs"][valid] + 1)


def test_a_plain_array_from_the_policy_is_the_action() -> None:
    step = next(steps(counting(AutoresetMode.DISABLED), lambda obs: np.full(4, 7)))
    assert set(step.rows) == {"obs", "action", "reward", "terminated", "truncated", "next_obs"}
    assert_array_equal(step.rows["action"], [7] * 4)


def test_next_obs_can_be_left_out_and_the_final_stays() -> None:
    step = next(steps(counting(AutoresetMode.SAME_STEP), policy, next_obs=False))
    assert "next_obs" not in step.rows
    assert step.final is not None
    assert_array_equal(step.final["obs"], [[2, 0, 1]])


@pytest.mark.parametrize("mode", MODES)
def test_the_value_of_a_last_observation_comes_with_it_and_is_asked_for_with_all_lanes(mode: AutoresetMode) -> None:
    shapes = set()

    def value(obs: Any) -> Any:
        shapes.add(obs.shape)
        return obs[:, 0] * 100 + obs[:, 2]

    finals = [s.final for s in islice(steps(counting(mode), policy, value=value), 30) if s.final is not None]
    assert len(finals) > 10
    for final in finals:
        assert_array_equal(final["value"], final["obs"][:, 0] * 100 + final["obs"][:, 2])
    assert shapes == {(4, 3)}


@pytest.mark.parametrize("mode", MODES)
def test_obs_is_what_the_next_step_acts_on(mode: AutoresetMode) -> None:
    stream = steps(counting(mode), policy)
    for _ in range(20):
        ahead = stream.obs
        assert_array_equal(next(stream).rows["obs"], ahead)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_outside_next_step_obs_after_an_end_is_the_new_episodes_first(mode: AutoresetMode) -> None:
    stream = steps(counting(mode), policy)
    next(stream)
    assert_array_equal(stream.obs[2], [2, 1, 0])


def test_rewards_have_the_dtype_asked_for() -> None:
    envs = counting(AutoresetMode.DISABLED)
    assert next(steps(envs, policy)).rows["reward"].dtype == np.float32
    assert next(steps(envs, policy, reward_dtype=np.float64)).rows["reward"].dtype == np.float64


def test_actions_keep_the_policys_dtype_unless_one_is_asked_for() -> None:
    envs = counting(AutoresetMode.DISABLED)
    for decide in (lambda obs: np.full(4, 7), lambda obs: {"action": np.full(4, 7), "value": np.zeros(4)}):
        assert next(steps(envs, decide)).rows["action"].dtype == np.int64
        step = next(steps(envs, decide, action_dtype=np.int32))
        assert step.rows["action"].dtype == np.int32
        assert_array_equal(step.rows["action"], [7] * 4)
        assert step.rows.get("value", np.zeros(1)).dtype == np.float64


def test_an_action_whose_values_the_dtype_cant_hold_is_refused() -> None:
    stream = steps(counting(AutoresetMode.DISABLED), lambda obs: np.full(4, 0.5), action_dtype=np.int32)
    with pytest.raises(SchemaError, match="action_dtype=int32: the policy's action is float64"):
        next(stream)


def test_default_actions_reach_a_jax_learner_with_action_dtype() -> None:
    stream = steps(counting(AutoresetMode.DISABLED), lambda obs: np.full(4, 7), action_dtype=np.int32)
    with conduit.Store(backend="jax", capacity=64, batch_size=4) as store:
        actor, learner = store.actor(lanes=4), store.learner()
        for step in islice(stream, 3):
            actor.push(step)
        assert learner.pull().data["action"].tolist() == [7] * 4


@pytest.mark.parametrize("mode", MODES)
def test_finished_episodes_are_counted_once_each(mode: AutoresetMode) -> None:
    stream = steps(counting(mode), policy, history=1000)
    some = list(islice(stream, 40))
    done = [row for lane in streams(some) for row in lane if row["final"] is not None]
    assert stream.episodes == len(stream.returns) == len(stream.lengths) == len(done)
    assert sorted(stream.lengths) == sorted(int(row["final"][2]) for row in done)
    episodes = [tuple(map(int, row["final"])) for row in done]
    returns = [sum(reward_of(lane, episode, t + 1) for t in range(length)) for lane, episode, length in episodes]
    assert sorted(stream.returns) == sorted(returns)


def test_the_seed_makes_it_repeat() -> None:
    def cartpole(seed: int) -> Any:
        return steps(
            gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"), lambda obs: np.zeros(2, int), seed=seed
        ).obs

    assert_array_equal(cartpole(3), cartpole(3))
    assert (cartpole(3) != cartpole(4)).all()


def test_the_environment_stays_open() -> None:
    envs = counting(AutoresetMode.DISABLED)
    list(islice(steps(envs, policy), 3))
    assert not envs.closed


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envs", ["CartPole-v1", Counting(0, (2,), "terminated")], ids=["a name", "a single one"])
def test_what_is_no_vector_environment_is_refused_with_how_to_make_one(envs: Any) -> None:
    with pytest.raises(SchemaError, match=r"expected a gymnasium.vector.VectorEnv.*make_vec"):
        steps(envs, policy)


def test_an_environment_that_doesnt_say_how_it_resets_is_refused() -> None:
    envs = counting(AutoresetMode.DISABLED)
    del envs.metadata["autoreset_mode"]
    with pytest.raises(SchemaError, match="autoreset_mode"):
        steps(envs, policy)


def test_a_policy_may_not_take_the_environments_names() -> None:
    stream = steps(counting(AutoresetMode.DISABLED), lambda obs: {"action": np.zeros(4, int), "reward": np.zeros(4)})
    with pytest.raises(SchemaError, match="reward"):
        next(stream)


def test_a_value_of_the_wrong_length_is_refused() -> None:
    stream = steps(counting(AutoresetMode.DISABLED), policy, value=lambda obs: np.zeros(2))
    with pytest.raises(SchemaError, match=r"shape \(2,\) for 4 lanes"):
        next(stream)


def test_steps_is_endless_and_its_own_iterator() -> None:
    stream = steps(counting(AutoresetMode.NEXT_STEP), policy)
    assert isinstance(stream, Steps)
    assert iter(stream) is stream
