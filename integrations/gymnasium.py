"""Gymnasium vector environments as streams of `Step`s, right in every autoreset mode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import optree
from numpy.typing import DTypeLike, NDArray

from conduit.core.episodes import Step
from conduit.core.experience import Tree, leaf_paths
from conduit.errors import MissingExtraError, SchemaError

try:
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import concatenate, create_empty_array
except ImportError as error:
    raise MissingExtraError(
        "conduit.integrations.gymnasium needs gymnasium; install it with: pip install 'conduit-rl[demo]'"
    ) from error

Policy = Callable[[Tree], Any]
"""Observations (lanes, *shape) → actions (lanes, *shape), or a dict with "action" and further leaves to store."""
Value = Callable[[Tree], Any]
"""Observations (lanes, *shape) → values (lanes, *value_shape)."""

OWN_LEAVES = ("obs", "reward", "terminated", "truncated", "next_obs")


def steps(
    envs: VectorEnv[Any, Any, Any],
    policy: Policy,
    *,
    seed: int | None = None,
    next_obs: bool = True,
    value: Value | None = None,
    reward_dtype: DTypeLike = np.float32,
    action_dtype: DTypeLike | None = None,
    history: int = 100,
) -> Steps:
    """Resets `envs` with `seed` and returns an endless iterator over its steps, each ready for `Actor.push`.

    A step's rows are the leaves `obs` (before the action), `action`, `reward`, `terminated`, `truncated`, what else
    `policy` returned (value, log_prob …), and `next_obs` unless it's turned off. Observations are trees for Dict and
    Tuple spaces and keep their dtypes. Rewards are cast to `reward_dtype`: Gymnasium makes float64, which JAX can't hold.
    Actions keep the policy's dtype unless `action_dtype` is given: NumPy and torch choose int64 by default, which JAX
    can't hold either, so give np.int32 where the backend or the learner is JAX. What is stored is what the environment
    plays. Casts within a kind only, so no fraction is lost: SchemaError otherwise. Further leaves keep their dtypes.

    Where a lane ends, `next_obs` and `final["obs"]` are its true last observation, whatever the autoreset mode. With
    `value`, `final["value"]` is `value` of it; `value` is always called with all lanes, so a compiled one sees one shape.

    - SAME_STEP and DISABLED (lanes are reset here, by `reset_mask`): every step writes a row in every lane. On-policy
      training wants one of these, as its unit is steps × lanes rows.
    - NEXT_STEP: the step after a lane's end only resets it. That row has `valid=False`, isn't stored, and the policy's
      action for it is ignored; a rollout of T steps has fewer than T × lanes rows.

    `envs` may reuse its arrays: what is yielded is copied, belongs to the receiver, and stays as it is. One thing can't
    be mended here: under SAME_STEP a *single* environment that writes each observation into the same array overwrites
    its last one before the vector environment returns it. SchemaError at the next step where that can be seen (not
    through AsyncVectorEnv's processes): use NEXT_STEP or DISABLED, or return a copy there.

    `envs` is neither closed nor copied; stepping or resetting it elsewhere meanwhile makes the rows wrong."""
    return Steps(envs, policy, seed, next_obs, value, np.dtype(reward_dtype), _dtype(action_dtype), history)


class Steps(Iterator[Step]):
    """What `steps` returns."""

    returns: deque[float]
    """Undiscounted returns of the latest finished episodes, at most `history` of them."""
    lengths: deque[int]
    """Their lengths in rows."""
    episodes: int
    """How many have finished."""

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        policy: Policy,
        seed: int | None,
        next_obs: bool,
        value: Value | None,
        reward_dtype: np.dtype[Any],
        action_dtype: np.dtype[Any] | None,
        history: int,
    ) -> None:
        if not isinstance(envs, VectorEnv):
            raise SchemaError(
                f"steps: got {envs!r}; expected a gymnasium.vector.VectorEnv, such as gymnasium.make_vec('CartPole-v1', 8) makes"
            )
        self._envs, self._policy, self._value = envs, policy, value
        self._lanes = envs.num_envs
        self._mode = _autoreset_mode(envs)
        self._next_obs, self._reward_dtype, self._action_dtype = next_obs, reward_dtype, action_dtype
        self._resetting = np.zeros(self._lanes, np.bool_)
        self._suspects: list[_Suspect] = []
        self.returns, self.lengths, self.episodes = deque(maxlen=history), deque(maxlen=history), 0
        self._return, self._length = np.zeros(self._lanes), np.zeros(self._lanes, np.int64)
        obs, _ = envs.reset(seed=seed)
        self._obs = _copy(obs)
        _check_lanes(self._obs, self._lanes)

    @property
    def obs(self) -> Tree:
        """The observations to act on next, leaves (lanes, *shape): what `Actor.end_unit`'s bootstrap is the value of.

        Under NEXT_STEP, a lane that has just ended shows its last observation until its reset row has passed. No
        fragment of that lane is open then, so a bootstrap given for it isn't used."""
        return self._obs

    def __next__(self) -> Step:
        obs = self._obs
        action, more = self._act(obs)
        returned, reward, terminated, truncated, infos = self._envs.step(action)
        valid = ~self._resetting
        terminated, truncated = terminated & valid, truncated & valid
        ended = terminated | truncated
        # Everything the environment handed out is copied here, before a reset or the next step can write into it.
        after, self._obs = self._observe(_copy(returned), ended, infos)
        self._count(reward, valid, ended)

        rows = {"obs": obs, "action": action, **more}
        rows |= {"reward": np.array(reward, self._reward_dtype), "terminated": terminated, "truncated": truncated}
        if self._next_obs:
            rows["next_obs"] = after
        all_valid = bool(valid.all())
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resetting = ended
        return Step(rows, self._final(after, ended), None if all_valid else valid)

    def _act(self, obs: Tree) -> tuple[Tree, dict[str, Tree]]:
        decided = self._policy(obs)
        if not (isinstance(decided, Mapping) and "action" in decided):
            return self._cast(_copy(decided)), {}
        more = {name: _copy(leaf) for name, leaf in decided.items() if name != "action"}
        if taken := [name for name in more if name in OWN_LEAVES]:
            raise SchemaError(f"the policy returned leaves {taken}, which the environment's own are named; rename them")
        return self._cast(_copy(decided["action"])), more

    def _cast(self, action: Tree) -> Tree:
        wanted = self._action_dtype
        if wanted is None:
            return action
        for leaf in optree.tree_leaves(action):
            if not np.can_cast(leaf.dtype, wanted, "same_kind"):
                raise SchemaError(
                    f"action_dtype={wanted}: the policy's action is {leaf.dtype}, whose values it can't hold; "
                    "expected a dtype of the same kind, or none, and the cast in the policy"
                )
        return optree.tree_map(lambda leaf: leaf.astype(wanted, copy=False), action)

    def _observe(self, returned: Tree, ended: NDArray[np.bool_], infos: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """(what this step's actions led to, what to act on next). `returned` is a copy that becomes one or both."""
        self._check_suspects(returned)
        if self._mode is AutoresetMode.NEXT_STEP or not ended.any():
            return returned, returned
        if self._mode is AutoresetMode.DISABLED:
            reset, _ = self._envs.reset(options={"reset_mask": ended.copy()})
            return returned, _replace(returned, ended, _take(reset, ended))
        finals = self._finals_of(infos, ended)
        self._suspect(infos, ended, finals, returned)
        return _replace(returned, ended, finals), returned

    def _finals_of(self, infos: Mapping[str, Any], ended: NDArray[np.bool_]) -> Tree:
        """The last observations of the ended lanes that SAME_STEP puts into `infos`, leaves (ended lanes, *shape)."""
        if "final_obs" not in infos:
            raise SchemaError(
                f"{self._envs} says it autoresets in SAME_STEP, but the infos of a step that ended a lane have no "
                f"'final_obs': {sorted(infos)}"
            )
        finals = infos["final_obs"]
        if not _one_object_a_lane(finals):
            return _copy(_take(finals, ended))
        lanes = np.flatnonzero(ended)
        space = self._envs.single_observation_space
        return concatenate(space, [finals[lane] for lane in lanes], create_empty_array(space, n=len(lanes)))

    def _final(self, after: Tree, ended: NDArray[np.bool_]) -> dict[str, Tree] | None:
        if not ended.any():
            return None
        final = {"obs": _take(after, ended)}
        if self._value is not None:
            values = np.asarray(self._value(after))
            if values.shape[:1] != (self._lanes,):
                raise SchemaError(
                    f"value returned shape {values.shape} for {self._lanes} lanes; expected ({self._lanes}, …)"
                )
            final["value"] = values[ended]
        return final

    def _count(self, reward: Any, valid: NDArray[np.bool_], ended: NDArray[np.bool_]) -> None:
        self._return += np.where(valid, reward, 0.0)
        self._length += valid
        if not ended.any():
            return
        self.returns.extend(self._return[ended].tolist())
        self.lengths.extend(self._length[ended].tolist())
        self.episodes += int(ended.sum())
        self._return[ended], self._length[ended] = 0.0, 0

    def _suspect(self, infos: Mapping[str, Any], ended: NDArray[np.bool_], finals: Tree, reset: Tree) -> None:
        """Remembers last observations that equal the reset's: they may be one array, overwritten before we saw it."""
        if not _one_object_a_lane(infos["final_obs"]):
            return
        for position, lane in enumerate(np.flatnonzero(ended).tolist()):
            final = _take(finals, position)
            if _equal(final, _take(reset, lane)):
                self._suspects.append((lane, infos["final_obs"][lane], final))

    def _check_suspects(self, returned: Tree) -> None:
        suspects, self._suspects = self._suspects, []
        for lane, held, copied in suspects:
            if not _equal(held, copied) and _equal(held, _take(returned, lane)):
                raise SchemaError(
                    f"lane {lane}'s environment writes every observation into the same array, so SAME_STEP's reset "
                    "overwrote its last one before it could be read. Use autoreset mode NEXT_STEP or DISABLED, or let "
                    "the environment return a copy"
                )


_Suspect = tuple[int, Tree, Tree]


def _autoreset_mode(envs: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = envs.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise SchemaError(
            f"{envs}: metadata['autoreset_mode'] is {mode!r}; expected a gymnasium.vector.AutoresetMode, as how lanes "
            "reset decides which rows are real"
        )
    return mode


def _check_lanes(obs: Tree, lanes: int) -> None:
    leaves, structure = optree.tree_flatten(obs)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        if leaf.dtype.kind in "OSU" or leaf.shape[:1] != (lanes,):
            raise SchemaError(
                f"observation leaf {path!r} is {leaf.dtype}{list(leaf.shape)}; expected a numeric array ({lanes}, …), as "
                "Box, Discrete, MultiBinary, MultiDiscrete, Dict and Tuple spaces give"
            )


def _dtype(asked: DTypeLike | None) -> np.dtype[Any] | None:
    return None if asked is None else np.dtype(asked)


def _one_object_a_lane(finals: Any) -> bool:
    return isinstance(finals, np.ndarray) and finals.dtype == object


def _copy(tree: Tree) -> Tree:
    return optree.tree_map(np.array, tree)


def _take(tree: Tree, lanes: Any) -> Tree:
    return optree.tree_map(lambda leaf: leaf[lanes], tree)


def _replace(tree: Tree, lanes: NDArray[np.bool_], rows: Tree) -> Tree:
    """A copy of `tree` with the rows at `lanes` replaced."""

    def replaced(leaf: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        copied = leaf.copy()
        copied[lanes] = new
        return copied

    return optree.tree_map(replaced, tree, rows)


def _equal(a: Tree, b: Tree) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))
