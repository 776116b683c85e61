"""Minari datasets in and out. Everything is made here, in a folder of the test's own; nothing is downloaded."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import optree
import pytest
from gymnasium import spaces

import conduit
from conduit import Next, Trajectory
from conduit.datasets import to_arrays
from conduit.errors import SchemaError, SettingError
from tests.store.rows import store

minari = pytest.importorskip("minari", reason="the minari extra isn't installed")
pytest.importorskip("h5py")

from minari.data_collector import EpisodeBuffer  # noqa: E402

from conduit.integrations.minari import export, push  # noqa: E402

NEXT = {"next_obs": Next("obs")}
ABOUT: dict[str, Any] = dict.fromkeys(
    ("author", "author_email", "code_permalink", "algorithm_name", "description"), "a test"
)
SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "box": (spaces.Box(-1e9, 1e9, (3,), np.float64), spaces.Discrete(5)),
    "discrete": (spaces.Discrete(1000), spaces.Box(-1, 1, (2,), np.float32)),
    "image": (spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.MultiDiscrete([3, 4])),
    "dict": (
        spaces.Dict({"who": spaces.Box(-1e9, 1e9, (2,), np.float32), "when": spaces.Dict({"t": spaces.Discrete(99)})}),
        spaces.Dict({"move": spaces.Discrete(4), "force": spaces.Box(-1, 1, (1,), np.float64)}),
    ),
    "tuple": (
        spaces.Tuple((spaces.Box(-1e9, 1e9, (2,), np.float64), spaces.MultiBinary(3))),
        spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))),
    ),
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minari's folder is the test's, and the network isn't there."""

    def refused(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", refused)


def sampled(space: spaces.Space[Any], rows: int) -> Any:
    """Leaves (rows, *shape) of a space."""
    if isinstance(space, spaces.Dict):
        return {name: sampled(below, rows) for name, below in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sampled(below, rows) for below in space.spaces)
    return np.stack([space.sample() for _ in range(rows)])


@contextmanager
def unadvised() -> Iterator[None]:
    """Without what Minari says of metadata, and of its own temporary folders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def episode(number: int, observations: Any, actions: Any, rewards: Any, terminations: Any, truncations: Any) -> Any:
    return EpisodeBuffer(
        id=number,
        observations=observations,
        actions=actions,
        rewards=rewards,
        terminations=terminations,
        truncations=truncations,
    )


def made(kind: str, lengths: list[int], ends: str, name: str = "made/it-v0") -> Any:
    """A dataset of random episodes of so many rows, which end as "t"erminated, t"r"uncated or not at all ("-")."""
    obs, action = SPACES[kind]
    obs.seed(1)
    action.seed(2)
    chance = np.random.default_rng(3)
    episodes = [
        episode(
            number,
            sampled(obs, length + 1),
            sampled(action, length),
            chance.normal(size=length),
            (np.arange(length) == length - 1) & (end == "t"),
            (np.arange(length) == length - 1) & (end == "r"),
        )
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    with unadvised():
        return minari.create_dataset_from_buffers(
            name, episodes, observation_space=obs, action_space=action, jpeg_encoding=False, **ABOUT
        )


def assert_same_bytes(one: Any, other: Any) -> None:
    a, b = optree.tree_leaves(one), optree.tree_leaves(other)
    assert optree.tree_structure(one) == optree.tree_structure(other)
    for mine, theirs in zip(a, b, strict=True):
        assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def assert_same_episodes(one: Any, other: Any) -> None:
    first, second = list(one.iterate_episodes()), list(other.iterate_episodes())
    assert len(first) == len(second)
    for mine, theirs in zip(first, second, strict=True):
        for part in ("observations", "actions", "rewards", "terminations", "truncations"):
            assert_same_bytes(getattr(mine, part), getattr(theirs, part))


EXACT: dict[str, Any] = {"reward_dtype": None}


def exported(s: conduit.Store, kind: str, name: str = "back/again-v0") -> Any:
    obs, action = SPACES[kind]
    return export(s, name, observation_space=obs, action_space=action, metadata=ABOUT)


# --- in -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPACES)
def test_episodes_become_rows_with_what_was_observed_after_each(kind):
    dataset = made(kind, [3, 1, 4], "trt")
    with store(capacity=64, batch_size=1, item=Trajectory()) as s:
        assert push(dataset, s.actor(), **EXACT) == 8
        arrays = to_arrays(s)
    at = 0
    for episode in dataset.iterate_episodes():
        rows = slice(at, at + len(episode))
        assert_same_bytes(cut(arrays.data["obs"], rows), cut(episode.observations, slice(0, -1)))
        assert_same_bytes(cut(arrays.data["next_obs"], rows), cut(episode.observations, slice(1, None)))
        assert_same_bytes(cut(arrays.data["action"], rows), episode.actions)
        assert_same_bytes(arrays.data["reward"][rows], episode.rewards)
        at = rows.stop
    assert arrays.data["terminated"].nonzero()[0].tolist() == [2, 7]
    assert arrays.data["truncated"].nonzero()[0].tolist() == [3]
    assert arrays.begins.nonzero()[0].tolist() == [0, 3, 4]


def cut(tree: Any, rows: slice) -> Any:
    return optree.tree_map(lambda leaf: leaf[rows], tree)


def test_observations_are_stored_once_where_the_next_is_derived():
    dataset = made("box", [3, 2, 2], "tr-")
    with store(capacity=64, batch_size=1, derive=NEXT) as s:
        push(dataset, s.actor(), next_obs=False)
        data = [s.sample(6, to="numpy").data for _ in range(30)]
        assert "next_obs" not in to_arrays(s).data
        # Nothing says why the last episode ended, so its last row leads nowhere.
        assert s.info()["drawable_rows"] == 6
    follows = {
        tuple(obs.tolist()): after.tolist()
        for episode in dataset.iterate_episodes()
        for obs, after in zip(episode.observations[:-1], episode.observations[1:], strict=True)
    }
    seen = {tuple(o.tolist()): n.tolist() for each in data for o, n in zip(each["obs"], each["next_obs"], strict=True)}
    assert len(seen) == 6
    assert seen.items() <= follows.items()


def test_dtypes_are_those_asked_for():
    dataset = made("dict", [3], "t")
    with (
        store(capacity=8, batch_size=1) as s,
        pytest.raises(SchemaError, match=r"action_dtype=int32: there are leaves of float64"),
    ):
        push(dataset, s.actor(), action_dtype=np.int32)
    with store(capacity=8, batch_size=1) as s:
        push(made("box", [3], "t", "made/other-v0"), s.actor(), obs_dtype=np.float32, action_dtype=np.int32)
        data = to_arrays(s).data
    kinds = {name: leaf.dtype for name, leaf in data.items()}
    assert (kinds["obs"], kinds["next_obs"], kinds["action"]) == (np.float32, np.float32, np.int32)
    assert kinds["reward"] == np.float32
    with store(capacity=8, batch_size=1) as s:
        push(dataset, s.actor(), obs_dtype=np.float64, **EXACT)
        data = to_arrays(s).data
    # Whole numbers stay what they are.
    assert (data["obs"]["who"].dtype, data["obs"]["when"]["t"].dtype) == (np.float64, np.int64)
    assert data["reward"].dtype == np.float64


def test_what_a_data_collector_recorded_goes_in():
    env = minari.DataCollector(gym.make("CartPole-v1", max_episode_steps=12))
    for seed in range(3):
        env.reset(seed=seed)
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            done = terminated or truncated
    with unadvised():
        dataset = env.create_dataset("cartpole/random-v0", **ABOUT)
        env.close()
        del env
    with store(capacity=64, batch_size=1, derive=NEXT) as s:
        assert push(dataset, s.actor(), next_obs=False) == dataset.total_steps
        arrays = to_arrays(s)
        assert arrays.begins.sum() == 3
        assert s.info()["drawable_rows"] == dataset.total_steps
        out = export(s, "cartpole/again-v0", env="CartPole-v1", metadata=ABOUT)
    assert out.episodes == 3
    for mine, theirs in zip(dataset.iterate_episodes(), out.dataset.iterate_episodes(), strict=True):
        assert_same_bytes(mine.observations, theirs.observations)
        assert (mine.rewards == theirs.rewards).all()
    assert out.dataset.env_spec is not None
    assert out.dataset.env_spec.id == "CartPole-v1"


def test_text_can_not_be_stored():
    words = {"observation_space": spaces.Text(5), "action_space": spaces.Box(-1, 1, (1,))}
    one = episode(0, ["a", "b"], np.zeros((1, 1)), [0.0], [True], [False])
    with unadvised():
        dataset = minari.create_dataset_from_buffers("made/words-v0", [one], **words, **ABOUT)
    with store() as s, pytest.raises(SchemaError, match=r"episode 0 of made/words-v0: '0' is a str.*Text"):
        push(dataset, s.actor())


# --- out ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("derived", [True, False], ids=["next derived", "next stored"])
@pytest.mark.parametrize("kind", SPACES)
def test_what_went_in_comes_out_byte_for_byte(kind, derived):
    dataset = made(kind, [3, 1, 4, 2], "trtr")
    settings: dict[str, Any] = {"derive": NEXT} if derived else {"item": Trajectory()}
    with store(capacity=64, batch_size=1, **settings) as s:
        push(dataset, s.actor(), next_obs=not derived, **EXACT)
        out = exported(s, kind)
    assert (out.episodes, out.rows, out.without_start, out.without_end) == (4, 10, 0, 0)
    assert_same_episodes(out.dataset, dataset)
    assert_same_episodes(minari.load_dataset("back/again-v0"), dataset)


def test_what_is_not_whole_is_left_out_and_counted():
    dataset = made("box", [4, 3, 2, 3], "trt-")
    with store(capacity=10, batch_size=1, derive=NEXT) as s:
        actor = s.actor(lanes=2)
        push(dataset, actor, next_obs=False, **EXACT)
        # An episode that goes on, in another lane.
        rows = {name: leaf[-1:] for name, leaf in to_arrays(s).data.items()}
        actor.push_trajectory(rows, lane=1)
        out = exported(s, "box")
    # Of 13 rows the first 3 are gone.
    assert (out.episodes, out.rows, out.without_start, out.without_end) == (2, 5, 1, 2)
    expected = list(dataset.iterate_episodes())[1:3]
    for mine, theirs in zip(out.dataset.iterate_episodes(), expected, strict=True):
        assert_same_bytes(mine.observations, theirs.observations)


def test_ends_that_only_the_store_knows_are_told():
    rows = {"obs": np.arange(3.0), "action": np.zeros(3, np.int64), "reward": np.ones(3)}
    with store(capacity=16, batch_size=1, derive=NEXT) as s:
        actor = s.actor()
        for end in ("terminated", "truncated", "cut"):
            actor.push_trajectory(rows, end=end, final=None if end == "cut" else {"obs": np.float64(7)})
        out = export(
            s,
            "back/ends-v0",
            observation_space=spaces.Box(-9, 9, (), np.float64),
            action_space=spaces.Discrete(3),
            metadata=ABOUT,
        )
    first, second = out.dataset.iterate_episodes()
    assert (first.terminations.tolist(), first.truncations.tolist()) == ([False, False, True], [False] * 3)
    assert (second.terminations.tolist(), second.truncations.tolist()) == ([False] * 3, [False, False, True])
    assert first.observations.tolist() == [0, 1, 2, 7]
    assert out.without_end == 1


@pytest.mark.parametrize("derived", [True, False], ids=["next derived", "next stored"])
def test_where_observations_grew_all_come_as_wide_as_the_widest_and_those_that_were_shorter_are_counted(derived):
    grows = conduit.Field(("seen",), np.float32, grow="pad")
    fields = {"obs": grows} if derived else {"obs": grows, "next_obs": grows}
    settings: dict[str, Any] = {"derive": NEXT} if derived else {"item": Trajectory()}
    with store(capacity=16, batch_size=1, fields=fields, **settings) as s:
        actor = s.actor()
        for width in (2, 3):
            rows = {
                "obs": np.full((2, width), width, np.float32),
                "action": np.zeros(2, np.int64),
                "reward": np.ones(2),
            }
            final = {"obs": np.full(width, 9, np.float32)}
            if not derived:
                rows["next_obs"] = np.stack([rows["obs"][1], final["obs"]])
            actor.push_trajectory(rows, end="terminated", final=final if derived else {"reward": np.float64(0)})
        asked: dict[str, Any] = {"action_space": spaces.Discrete(3), "metadata": ABOUT}
        with pytest.raises(
            SchemaError, match=r"'obs' is \(4, 3\); .*It may grow: expected a space as wide as the widest"
        ):
            export(s, "back/grown-v0", observation_space=spaces.Box(-9, 9, (2,), np.float32), **asked)
        out = export(s, "back/grown-v0", observation_space=spaces.Box(-9, 9, (3,), np.float32), **asked)
    assert (out.episodes, out.rows, out.filled_rows) == (2, 4, 2)
    first, second = out.dataset.iterate_episodes()
    assert first.observations.tolist() == [[2, 2, 0], [2, 2, 0], [9, 9, 0]]
    assert second.observations.tolist() == [[3, 3, 3], [3, 3, 3], [9, 9, 9]]


def test_an_export_needs_no_metadata():
    dataset = made("box", [2], "t")
    with store(capacity=8, batch_size=1, derive=NEXT) as s:
        push(dataset, s.actor(), next_obs=False)
        obs, action = SPACES["box"]
        assert export(s, "back/plain-v0", observation_space=obs, action_space=action).episodes == 1


# --- bad input ------------------------------------------------------------------------------------------------------


def filled(**settings: Any) -> conduit.Store:
    s = store(**({"capacity": 16, "batch_size": 1, "derive": NEXT} | settings))
    push(made("box", [3, 2], "tr"), s.actor(), next_obs=False)
    return s


BOX = {"observation_space": SPACES["box"][0], "action_space": SPACES["box"][1]}
BAD: dict[str, tuple[str, dict[str, Any], type[Exception], list[str]]] = {
    "metadata that aren't Minari's": (
        "back/it-v0",
        BOX | {"metadata": {"nope": 1}},
        SettingError,
        ["'nope'", "author"],
    ),
    "metadata that are set here": ("back/it-v0", BOX | {"metadata": {"env": 1}}, SettingError, ["'env'", "author"]),
    "metadata that are no dict": ("back/it-v0", BOX | {"metadata": 3}, SettingError, ["metadata=3", "dict"]),
    "an id without a version": ("back/it", BOX, SettingError, ["'back/it'", "-v0"]),
    "no id": ("a b c", BOX, SettingError, ["'a b c'", "-v0"]),
    "an id that is taken": ("made/it-v0", BOX, SettingError, ["'made/it-v0'", "already"]),
    "no spaces": ("back/it-v0", {}, SettingError, ["env=", "observation_space="]),
    "one space": ("back/it-v0", {"action_space": BOX["action_space"]}, SettingError, ["observation_space="]),
    "another shape": (
        "back/it-v0",
        BOX | {"observation_space": spaces.Box(-1, 1, (4,))},
        SchemaError,
        ["'obs'", "3", "Box", "(4,)"],
    ),
    "another tree": (
        "back/it-v0",
        BOX | {"action_space": SPACES["dict"][1]},
        SchemaError,
        ["'action'", "Dict", "move"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_can_not_be_exported_is_named_and_nothing_is_written(case, tmp_path):
    name, how, kind, named = BAD[case]
    given: dict[str, Any] = {"metadata": ABOUT, **how}
    with filled() as s:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(kind) as caught:
            export(s, name, **given)
        assert [word for word in named if word not in str(caught.value)] == [], str(caught.value)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["obs_dtype", "action_dtype", "reward_dtype"])
@pytest.mark.parametrize("wrong", ["foo", 3, ()], ids=repr)
def test_what_is_no_dtype_is_refused_by_its_argument(name, wrong):
    with store(capacity=8, batch_size=1) as s, pytest.raises(SettingError, match=rf"{name}=.*expected a NumPy dtype"):
        push(made("box", [2], "t"), s.actor(), **{name: wrong})


@pytest.mark.parametrize("wrong", [None, 3, "made/it-v0"])
def test_what_is_no_dataset_is_refused(wrong):
    with store() as s, pytest.raises(SettingError, match=r"push\(dataset=.*such as minari\.load_dataset"):
        push(wrong, s.actor())


def test_a_store_that_links_no_rows_has_no_episodes():
    with filled(derive={}) as s, pytest.raises(SettingError, match=r"which row follows which.*derive="):
        exported(s, "box")


def test_a_store_without_a_whole_episode_is_not_exported():
    with filled(capacity=1) as s, pytest.raises(SettingError, match="no whole episode; 1 lack their first rows"):
        exported(s, "box")


def test_rows_without_the_leaves_of_a_dataset_are_not_exported():
    with store(capacity=8, batch_size=1, derive=NEXT) as s:
        s.actor().push({"obs": np.zeros((1, 3)), "act": np.zeros(1)})
        with pytest.raises(SchemaError, match=r"no leaf 'action'; there are \['act', 'obs'\]"):
            exported(s, "box")


def test_importing_it_asks_no_network_and_conduit_does_not_import_it():
    code = (
        "import socket, sys\n"
        "def refused(*_): raise AssertionError('the network was asked')\n"
        "socket.socket.connect = refused\n"
        "import conduit\n"
        "assert 'minari' not in sys.modules and 'h5py' not in sys.modules\n"
        "import conduit.integrations.minari\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
