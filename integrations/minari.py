"""Minari datasets in and out: offline episodes into a store, and a store's whole episodes out of it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
from numpy.typing import DTypeLike, NDArray

from conduit.core.episodes import End
from conduit.core.experience import Tree, leaf_paths
from conduit.core.signature import TERMINATED, TRUNCATED
from conduit.datasets import Arrays, push_arrays, to_arrays
from conduit.errors import MissingExtraError, SchemaError, SettingError
from conduit.ports import Actor
from conduit.store import Store

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.envs.registration import EnvSpec
    from minari import MinariDataset, create_dataset_from_buffers
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage.datasets_root_dir import get_dataset_path
except ImportError as error:
    raise MissingExtraError(
        "conduit.integrations.minari needs minari; install it with: pip install 'conduit-rl[minari]'"
    ) from error

Space = spaces.Space[Any]
Env = gymnasium.Env[Any, Any]
_SET_HERE = ("dataset_id", "buffer", "env", "observation_space", "action_space", "jpeg_encoding")
"""Arguments of Minari's that `export` sets."""


def push(
    dataset: MinariDataset,
    actor: Actor,
    *,
    next_obs: bool = True,
    lane: int = 0,
    obs_dtype: DTypeLike | None = None,
    action_dtype: DTypeLike | None = None,
    reward_dtype: DTypeLike | None = np.float32,
    timeout_s: float | None = None,
) -> int:
    """Pushes every episode of `dataset` as rows of one lane, and returns how many it took. Nothing is downloaded: make or load the
    dataset with Minari.

    A row has the leaves `obs` (before the action), `action`, `reward`, `terminated`, `truncated`, and `next_obs` unless it's turned
    off; observations and actions are trees for Dict and Tuple spaces. Each end comes with its final observation. An episode that
    was neither terminated nor truncated is cut at its end; infos are left out.

    `obs_dtype`: of floating observations, `action_dtype`: of actions, `reward_dtype`: of rewards; None keeps what the dataset has,
    mostly float64 and int64, which JAX can't hold. Casts within a kind only, so no fraction is lost: SchemaError otherwise, and for
    Text spaces."""
    if not isinstance(dataset, MinariDataset):
        raise SettingError(f"push(dataset={dataset!r}): expected a Minari dataset, such as minari.load_dataset(…)")
    taken = 0
    for episode in dataset.iterate_episodes():
        where = f"episode {episode.id} of {dataset.spec.dataset_id}"
        obs = _cast(_arrays(episode.observations, where), obs_dtype, f"{where}: obs_dtype", floats_only=True)
        rows = {
            "obs": _sliced(obs, 0, -1),
            "action": _cast(_arrays(episode.actions, where), action_dtype, f"{where}: action_dtype"),
            "reward": _cast(np.asarray(episode.rewards), reward_dtype, f"{where}: reward_dtype"),
            TERMINATED: np.asarray(episode.terminations, np.bool_),
            TRUNCATED: np.asarray(episode.truncations, np.bool_),
        }
        after = _sliced(obs, 1, None)
        if next_obs:
            rows["next_obs"] = after
        ended = np.flatnonzero(rows[TERMINATED] | rows[TRUNCATED])
        final = {"obs": optree.tree_map(lambda leaf, at=ended: leaf[at], after)}
        taken += push_arrays(actor, rows, final=final, lane=lane, timeout_s=timeout_s)
    return taken


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` made. `episodes`, `rows`: how many are in `dataset`. Left out were `without_start` episodes whose first rows
    were evicted, and `without_end`, which go on, were cut, or ended with no observation after them. `filled_rows`: how
    many came with a shorter observation, action or reward than the longest that is there, and have zeros after it."""

    dataset: MinariDataset
    episodes: int
    rows: int
    without_start: int
    without_end: int
    filled_rows: int = 0


def export(
    store: Store,
    dataset_id: str,
    *,
    env: str | Env | EnvSpec | None = None,
    observation_space: Space | None = None,
    action_space: Space | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Exported:
    """A new Minari dataset of the store's whole episodes, in the order in which they began: their leaves `obs`, `action` and `reward`
    as they are stored, byte for byte (images too), and how they ended. The observation after the last row is the final one where
    a `Next("obs")` is derived, else the row's leaf `next_obs`. Other leaves are left out. Where rows grew, all are as wide as the widest
    that the store took, filled up with zeros, and so must the spaces be: a dataset of Minari's has one form.

    `env`: what played, by name, spec or itself; without one, both spaces are needed. `metadata`: further arguments of Minari's
    `create_dataset_from_buffers`, such as {"author": …, "description": …}. The dataset is written where Minari keeps its own
    (MINARI_DATASETS_PATH). All episodes are in memory at once.

    SettingError where the store doesn't link rows, for a dataset that exists already or an id that isn't one; SchemaError for
    leaves that are missing or don't fit the spaces; nothing is written then."""
    _check_id(dataset_id)
    _check_metadata({} if metadata is None else metadata)
    observation_space, action_space = _spaces(env, observation_space, action_space)
    arrays = to_arrays(store)
    if not arrays.linked:
        raise SettingError(
            "export: this store doesn't know which row follows which, so it has no episodes. Give it an item or a derived leaf, such as "
            "derive={'next_obs': conduit.Next('obs')}"
        )
    for name, space in (("obs", observation_space), ("action", action_space), ("reward", spaces.Box(-1, 1, ()))):
        _check_leaf(arrays, name, space)
    if "next_obs" in arrays.data and "obs" not in (arrays.final or {}):
        _check_leaf(arrays, "next_obs", observation_space)
    episodes = _Episodes(arrays)
    buffers = [episodes.buffer(number, *span) for number, span in enumerate(episodes.whole)]
    if not buffers:
        raise SettingError(
            f"export: the store holds no whole episode; {episodes.without_start} lack their first rows, and {episodes.without_end} their ends"
        )
    with warnings.catch_warnings():
        # Of Minari, about metadata that aren't given.
        warnings.simplefilter("ignore", UserWarning)
        dataset = create_dataset_from_buffers(
            dataset_id,
            buffers,
            env=env,
            observation_space=observation_space,
            action_space=action_space,
            # Else it makes JPEGs of images.
            jpeg_encoding=False,
            **(metadata or {}),
        )
    rows = sum(len(buffer) for buffer in buffers)
    filled = _filled(arrays)
    filled_rows = sum(int(np.count_nonzero(filled[start:stop])) for start, stop in episodes.whole)
    return Exported(dataset, len(buffers), rows, episodes.without_start, episodes.without_end, filled_rows)


class _Episodes:
    """Which of a store's episodes are whole, (start, stop) each, and how many aren't."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays, self._data = arrays, arrays.data
        self._finals = {}
        if arrays.final is not None and "obs" in arrays.final:
            self._finals = {int(row): place for place, row in enumerate(arrays.final_rows)}
        self.whole: list[tuple[int, int]] = []
        self.without_start = self.without_end = 0
        start = 0
        for last in np.flatnonzero(arrays.ends).tolist():
            if not arrays.begins[start]:
                self.without_start += 1
            elif not self._has_ended(last):
                self.without_end += 1
            else:
                self.whole.append((start, last + 1))
            start = last + 1

    def buffer(self, number: int, start: int, stop: int) -> EpisodeBuffer:
        """An episode as Minari takes it."""
        arrays, last = self._arrays, stop - 1
        after = self._after(last)
        terminations, truncations = self._flags(TERMINATED, start, stop), self._flags(TRUNCATED, start, stop)
        terminations[-1] |= arrays.ends[last] == End.TERMINATED
        truncations[-1] |= arrays.ends[last] == End.TRUNCATED
        obs, action = (_sliced(self._data[name], start, stop) for name in ("obs", "action"))
        observations: Any = optree.tree_map(lambda leaf, final: np.concatenate([leaf, final[None]]), obs, after)
        return EpisodeBuffer(
            id=number,
            observations=observations,
            actions=action,
            rewards=self._data["reward"][start:stop],
            terminations=terminations,  # type: ignore[arg-type]
            truncations=truncations,  # type: ignore[arg-type]
        )

    def _has_ended(self, last: int) -> bool:
        """Whether the episode ended with row `last`, and what was observed after that is known."""
        if last not in self._finals and "next_obs" not in self._data:
            return False
        # A truncated row without a final counts as cut, be its next observation a leaf.
        return self._arrays.ends[last] != End.CUT or bool(self._flags(TRUNCATED, last, last + 1)[0])

    def _after(self, last: int) -> Tree:
        final, place = self._arrays.final, self._finals.get(last)
        if final is not None and place is not None:
            return optree.tree_map(lambda leaf: leaf[place], final["obs"])
        return optree.tree_map(lambda leaf: leaf[last], self._data["next_obs"])

    def _flags(self, name: str, start: int, stop: int) -> NDArray[np.bool_]:
        return self._data[name][start:stop].copy() if name in self._data else np.zeros(stop - start, np.bool_)


def _sliced(tree: Tree, start: int, stop: int | None) -> Tree:
    return optree.tree_map(lambda leaf: leaf[start:stop], tree)


def _arrays(tree: Tree, where: str) -> Tree:
    """`tree`, which must have numeric arrays as leaves."""
    leaves, structure = optree.tree_flatten(tree)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
            got = leaf.dtype if isinstance(leaf, np.ndarray) else f"a {type(leaf).__name__}"
            raise SchemaError(
                f"{where}: {path!r} is {got}; expected numeric arrays: Text and Graph spaces can't be stored"
            )
    return tree


def _cast(tree: Tree, wanted: DTypeLike | None, where: str, floats_only: bool = False) -> Tree:
    if wanted is None:
        return tree
    try:
        dtype = np.dtype(wanted)
    except (TypeError, ValueError):
        raise SettingError(f"{where}={wanted!r}: expected a NumPy dtype, or None for what the dataset has") from None

    def cast(leaf: NDArray[Any]) -> NDArray[Any]:
        if floats_only and leaf.dtype.kind != "f":
            return leaf
        if not np.can_cast(leaf.dtype, dtype, "same_kind"):
            raise SchemaError(
                f"{where}={dtype}: there are leaves of {leaf.dtype}, whose values it can't hold; expected a dtype of the same kind, or None"
            )
        return leaf.astype(dtype, copy=False)

    return optree.tree_map(cast, tree)


def _check_id(dataset_id: str) -> None:
    try:
        parse_dataset_id(dataset_id)
    # An id without a version is none either, of which Minari says so by this.
    except (ValueError, TypeError):
        raise SettingError(
            f"export(dataset_id={dataset_id!r}): expected an id of Minari's, such as 'cartpole/replay-v0'"
        ) from None
    if get_dataset_path(dataset_id).exists():
        raise SettingError(
            f"export(dataset_id={dataset_id!r}): there is such a dataset already; expected another name or version"
        )


def _check_metadata(metadata: Any) -> None:
    known = [name for name in inspect.signature(create_dataset_from_buffers).parameters if name not in _SET_HERE]
    if not isinstance(metadata, Mapping) or not set(metadata) <= set(known):
        raise SettingError(
            f"export(metadata={metadata!r}): expected a dict of some of Minari's arguments {', '.join(known)}"
        )


def _spaces(env: Any, observation: Space | None, action: Space | None) -> tuple[Space, Space]:
    """What the dataset's spaces will be."""
    if env is not None and (observation is None or action is None):
        made = env if isinstance(env, gymnasium.Env) else gymnasium.make(env)
        observation, action = observation or made.observation_space, action or made.action_space
        if made is not env:
            made.close()
    if observation is None or action is None:
        raise SettingError("export: expected env=…, or both observation_space=… and action_space=…")
    return observation, action


def _filled(arrays: Arrays) -> NDArray[np.bool_]:
    """Which rows came narrower than the widest, in what is exported of them."""
    filled = np.zeros(len(arrays), np.bool_)
    for path, extent in arrays.extents.items():
        if path.partition("/")[0] in ("obs", "action", "reward"):
            filled |= extent < extent.max(initial=0)
    return filled


def _check_leaf(arrays: Arrays, name: str, space: Space) -> None:
    """SchemaError unless rows have the leaf, of the form that `space` says."""
    data = arrays.data
    if not isinstance(data, dict) or name not in data:
        there = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise SchemaError(f"export: rows have no leaf {name!r}; there are {there}")
    for path, leaf, expected in _beside(data[name], space, name):
        if not isinstance(leaf, np.ndarray) or expected is None or leaf.shape[1:] != expected:
            got = leaf.shape if isinstance(leaf, np.ndarray) else type(leaf).__name__
            grows = ". It may grow: expected a space as wide as the widest row" if path in arrays.extents else ""
            raise SchemaError(f"export: leaf {path!r} is {got}; the space there is {space}{grows}")


def _beside(tree: Tree, space: Space, path: str) -> Iterator[tuple[str, Any, tuple[int, ...] | None]]:
    """(path, leaf, the shape that the space says) of each leaf, or of the first node that differs."""
    if isinstance(space, spaces.Dict) and isinstance(tree, dict) and tree.keys() == space.spaces.keys():
        for name, below in space.spaces.items():
            yield from _beside(tree[name], below, f"{path}/{name}")
    elif isinstance(space, spaces.Tuple) and isinstance(tree, tuple) and len(tree) == len(space.spaces):
        for place, below in enumerate(space.spaces):
            yield from _beside(tree[place], below, f"{path}/{place}")
    else:
        yield path, tree, None if isinstance(space, spaces.Dict | spaces.Tuple) else space.shape
