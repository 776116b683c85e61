"""Returns and advantages of whole fragments: what on-policy trainers compute once, when a rollout unit is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from conduit.core.episodes import End, Fragment
from conduit.core.experience import Tree
from conduit.core.hook import HookInput, HookOutput, RowRule, Scope, Stage
from conduit.errors import SchemaError
from conduit.transforms.leaves import add_leaves, get_leaf

ValueFunction = Callable[[Tree], Any]
"""Observations (n, *shape) → values (n,) or (n, *value_shape), row by row."""


@dataclass(frozen=True, slots=True)
class GAE:
    """Generalised advantage estimation (Schulman et al. 2016, Eq. 16) over fragments of trajectories.

    Adds `advantage` and `value_target` (= advantage + value) to the rows, in the dtype of the `value` leaf; computed in
    float64. `value` is the path of the pushed value of each row's own observation; rewards are the leaf `reward`, of the
    same shape. After a fragment's last row follows, by how it ends:

    - TERMINATED: nothing, value 0;
    - TRUNCATED: `final["value"]`, or else `value_fn` of `final["obs"]`;
    - OPEN, where the unit's edge cuts a lane that goes on: the same, from the bootstrap given to `Actor.end_unit`;
    - CUT: nothing is known, so nothing is bootstrapped across: the last row gets advantage 0 and its own value as its
      target, and serves as the bootstrap of the row before it.

    `value_fn` is called at most once a unit, where the unit is ingested (which may be another thread), with all
    observations that need a value. They are padded with copies of the last to a power of two, so that a compiled
    function meets few shapes. SchemaError where a needed value can't be had, or a leaf is missing or of a wrong shape."""

    gamma: float = 0.99
    lam: float = 0.95
    value: str = "value"
    value_fn: ValueFunction | None = None

    stage: Stage = field(default="ingestion", init=False, repr=False)
    per: Scope = field(default="trajectory", init=False, repr=False)
    rows: RowRule = field(default="same", init=False, repr=False)
    name: str = field(default="GAE", init=False, repr=False)

    def __call__(self, source: HookInput, sink: HookOutput, /) -> None:
        fragments: list[Fragment] = source.read()
        sink.write(self._add(fragments) if fragments else fragments)

    def _add(self, fragments: list[Fragment]) -> list[Fragment]:
        value, reward = _value_and_reward(fragments, self.value, self.name)
        last = np.cumsum([len(fragment) for fragment in fragments]) - 1
        successor = _final_values(fragments, self.value_fn, value.shape[1:], self.name)
        missing = [f for f, known in zip(fragments, successor.known, strict=True) if _bootstraps(f) and not known]
        if missing:
            raise SchemaError(_no_value(missing[0], len(missing), self.name))

        v = value.astype(np.float64)
        next_value = np.concatenate([v[1:], v[:1]])
        next_value[last] = successor.value
        delta = reward + self.gamma * next_value - v
        delta[last[[fragment.end is End.CUT for fragment in fragments]]] = 0.0
        advantage = _discounted_sums(delta, self.gamma * self.lam, fragments)
        added = {"advantage": advantage.astype(value.dtype), "value_target": (advantage + v).astype(value.dtype)}
        return _with_leaves(fragments, added, self.name)


@dataclass(frozen=True, slots=True)
class Returns:
    """Adds `return`, each row's discounted return-to-go within its fragment, in the dtype of the `reward` leaf.

    What follows a fragment's last row counts as in `GAE` where its value is known (`final["value"]`, the bootstrap of
    `Actor.end_unit`, or `value_fn` of the final observation). Where it isn't, and after CUT, the return is the sum of
    the rewards that were seen: push values, or use it only on episodes that terminate, if that is too little."""

    gamma: float = 0.99
    value_fn: ValueFunction | None = None

    stage: Stage = field(default="ingestion", init=False, repr=False)
    per: Scope = field(default="trajectory", init=False, repr=False)
    rows: RowRule = field(default="same", init=False, repr=False)
    name: str = field(default="Returns", init=False, repr=False)

    def __call__(self, source: HookInput, sink: HookOutput, /) -> None:
        fragments: list[Fragment] = source.read()
        sink.write(self._add(fragments) if fragments else fragments)

    def _add(self, fragments: list[Fragment]) -> list[Fragment]:
        reward = _joined(fragments, "reward", self.name)
        last = np.cumsum([len(fragment) for fragment in fragments]) - 1
        seen = reward.astype(np.float64)
        seen[last] += self.gamma * _final_values(fragments, self.value_fn, reward.shape[1:], self.name).value
        total = _discounted_sums(seen, self.gamma, fragments)
        return _with_leaves(fragments, {"return": total.astype(reward.dtype)}, self.name)


@dataclass(frozen=True, slots=True)
class _FinalValues:
    value: NDArray[np.float64]
    """(fragments, *value_shape); 0 where there is none."""
    known: NDArray[np.bool_]
    """(fragments,)"""


def _bootstraps(fragment: Fragment) -> bool:
    return fragment.end in (End.TRUNCATED, End.OPEN)


def _final_values(
    fragments: Sequence[Fragment], value_fn: ValueFunction | None, shape: tuple[int, ...], where: str
) -> _FinalValues:
    """The values of what follows each fragment, where something follows and its value can be had."""
    found = _FinalValues(np.zeros((len(fragments), *shape)), np.zeros(len(fragments), np.bool_))
    asked = []
    for index, fragment in enumerate(fragments):
        final = fragment.final if _bootstraps(fragment) else None
        if final is None:
            continue
        if "value" in final:
            given = np.asarray(final["value"])
            if given.shape != shape:
                raise SchemaError(
                    f"{where}: lane {fragment.lane}'s final value has shape {given.shape}; expected {shape}, a row's"
                )
            found.value[index], found.known[index] = given, True
        elif value_fn is not None and "obs" in final:
            asked.append(index)
    if asked and value_fn is not None:
        observations = [_final_obs(fragments[index]) for index in asked]
        found.value[asked], found.known[asked] = _evaluate(value_fn, observations, shape, where), True
    return found


def _final_obs(fragment: Fragment) -> Tree:
    assert fragment.final is not None
    return fragment.final["obs"]


def _evaluate(value_fn: ValueFunction, observations: list[Tree], shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """`value_fn` of all `observations`, in one call."""
    n = len(observations)
    padded = observations + observations[-1:] * ((1 << (n - 1).bit_length()) - n)
    values = np.asarray(value_fn(optree.tree_map(lambda *leaves: np.stack(leaves), *padded)))
    if values.shape != (len(padded), *shape):
        expected = (len(padded), *shape)
        raise SchemaError(
            f"{where}: value_fn returned shape {values.shape} for {len(padded)} rows; expected {expected}"
        )
    return values[:n]


def _discounted_sums(x: NDArray[np.float64], factor: float, fragments: Sequence[Fragment]) -> NDArray[np.float64]:
    """s[t] = x[t] + factor · s[t + 1] within each fragment; `x` holds their rows one after the other."""
    length = np.array([len(fragment) for fragment in fragments])
    last = np.cumsum(length) - 1
    # Backwards in time over all fragments at once: longest first, those still running are a prefix. Nothing is padded.
    longest_first = np.argsort(-length, kind="stable")
    last, length = last[longest_first], length[longest_first]
    running = np.searchsorted(-length, -np.arange(1, length[0] + 1), side="right")
    total = x.copy()
    for back, count in enumerate(running[1:].tolist(), start=1):
        row = last[:count] - back
        total[row] += factor * total[row + 1]
    return total


def _value_and_reward(fragments: Sequence[Fragment], path: str, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    value, reward = _joined(fragments, path, where), _joined(fragments, "reward", where)
    if value.dtype.kind in "biuc":
        raise SchemaError(f"{where}: leaf {path!r} has dtype {value.dtype}; expected a floating one")
    if value.shape != reward.shape:
        raise SchemaError(
            f"{where}: leaf {path!r} has rows of shape {value.shape[1:]} and 'reward' of {reward.shape[1:]}; "
            "expected the same: drop the critic's last axis (value[..., 0]) before you push"
        )
    return value, reward


def _joined(fragments: Sequence[Fragment], path: str, where: str) -> NDArray[Any]:
    return np.concatenate([get_leaf(fragment.rows, path, where) for fragment in fragments])


def _with_leaves(fragments: Sequence[Fragment], added: dict[str, NDArray[Any]], where: str) -> list[Fragment]:
    """`fragments` with `added`, whose leaves hold all their rows one after the other, dealt out among them."""
    bounds = [0, *np.cumsum([len(fragment) for fragment in fragments]).tolist()]
    return [
        fragment.with_rows(add_leaves(fragment.rows, {name: leaf[i:j] for name, leaf in added.items()}, where))
        for fragment, (i, j) in zip(fragments, pairwise(bounds), strict=True)
    ]


def _no_value(fragment: Fragment, count: int, where: str) -> str:
    if fragment.end is End.OPEN:
        lacks, remedy = "the unit's edge leaves it open", 'actor.end_unit(bootstrap={"value": critic(obs)})'
    else:
        lacks, remedy = "it was truncated", 'push(..., final={"obs": …, "value": critic(final_obs)})'
    came = "nothing" if fragment.final is None else ", ".join(map(repr, fragment.final))
    return (
        f"{where}: lane {fragment.lane}'s fragment of {len(fragment)} rows needs the value of what follows, as {lacks}; "
        f"its final has {came} ({count} such). Either give it: {remedy}; or pass {where}(value_fn=critic) and give 'obs' there"
    )
