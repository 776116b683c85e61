"""Hooks: the framework's own ingestion and delivery logic, which Conduit runs but never rewrites (paper Fig. 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import optree

from conduit.errors import ConduitError, HookError

Stage = Literal["ingestion", "delivery"]
Scope = Literal["row", "trajectory", "unit"]
RowRule = Literal["same", "any"]

SCOPES: tuple[Scope, ...] = ("row", "trajectory", "unit")
ROW_RULES: tuple[RowRule, ...] = ("same", "any")


class HookInput(Protocol):
    def read(self) -> Any:
        """The rows to work on: a tree of arrays (rows, *shape); for trajectory scope a list of `Fragment`."""
        ...


class HookOutput(Protocol):
    def write(self, d: Any) -> None:
        """Hands the result on, in the form that `read` gave. Exactly one call a run. The arrays may be filled again in the
        next run: what the hook made itself is copied."""
        ...


class Hook(Protocol):
    """What a hook declares. `per` says what one call must see together: "row" anything (it may be called on any split of
    the rows, and once more on ended rows with what their finals say in its place, where a next is derived from those),
    "trajectory" a list of whole fragments, "unit" a whole rollout unit. `rows` says whether it keeps the number of rows.

    How rows end is what was pushed: what a hook makes of leaves `terminated` and `truncated` changes nothing of that."""

    @property
    def stage(self) -> Stage: ...
    @property
    def per(self) -> Scope: ...
    @property
    def rows(self) -> RowRule: ...
    @property
    def name(self) -> str: ...
    def __call__(self, source: HookInput, sink: HookOutput, /) -> None: ...


Function = Callable[[Any, Any], None]


@dataclass(frozen=True, slots=True)
class RegisteredHook:
    """A user's function with its declaration; what the decorators below return."""

    function: Function
    stage: Stage
    per: Scope
    rows: RowRule

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))

    def __call__(self, source: HookInput, sink: HookOutput, /) -> None:
        self.function(source, sink)


def register_ingestion(
    *without_parentheses: Function,
    input: str = "Actor",
    output: str = "ExperienceBuffer",
    per: Scope = "row",
    rows: RowRule = "same",
) -> Callable[[Function], RegisteredHook]:
    """Declares `def ingestion(actor_in, exp_out)` as an ingestion hook, to be passed as `Store(ingestion=[…])`. Nothing
    is registered globally: the decorator returns the value."""
    _check_parentheses("ingestion", without_parentheses)
    _check_ends("ingestion", (input, output), ("Actor", "ExperienceBuffer"))
    return _declare("ingestion", per, rows)


def register_delivery(
    *without_parentheses: Function, input: str = "ExperienceBuffer", output: str = "Learner"
) -> Callable[[Function], RegisteredHook]:
    """Declares `def delivery(exp_in, learn_out)` as a delivery hook, to be passed as `Store(delivery=[…])`. It sees one
    whole batch at a time, whatever the granularity, and keeps its rows."""
    _check_parentheses("delivery", without_parentheses)
    _check_ends("delivery", (input, output), ("ExperienceBuffer", "Learner"))
    return _declare("delivery", "row", "same")


def run_hook(hook: Hook, data: Any) -> Any:
    """What `hook` wrote for `data`. HookError, with the hook's exception as its cause, when it raised or didn't write once."""
    port = _Port(hook.name, data)
    try:
        hook(port, port)
    except ConduitError:
        raise
    # A hook is the user's code: whatever it raises must travel to the next push or pull.
    except Exception as error:
        raise HookError(f"{hook.stage} hook {hook.name!r} raised {type(error).__name__}: {error}") from error
    return port.result()


def count_rows(data: Any, hook: Hook) -> int:
    """The rows of what `hook` wrote. HookError unless all leaves are NumPy arrays with as many."""
    leaves: list[Any] = optree.tree_leaves(data)
    counts = {leaf.shape[0] if isinstance(leaf, np.ndarray) and leaf.ndim else None for leaf in leaves}
    if len(counts) != 1 or None in counts:
        wrote = [f"{type(leaf).__name__}{list(getattr(leaf, 'shape', ()))}" for leaf in leaves]
        raise HookError(
            f"{hook.stage} hook {hook.name!r} wrote leaves {', '.join(wrote) or 'none'}; expected NumPy arrays that all have as many rows"
        )
    (count,) = counts
    assert count is not None
    return count


def check_chain(hooks: Sequence[Any], stage: Stage) -> tuple[Hook, ...]:
    """`hooks` as a tuple, after checking that each was declared for `stage`."""
    if not isinstance(hooks, list | tuple):
        raise HookError(f"{stage}= got {type(hooks).__name__}; expected a list of hooks")
    for hook in hooks:
        if isinstance(hook, type):
            raise HookError(f"{stage}= got the class {hook.__name__}; expected a hook made with it: {hook.__name__}(…)")
        if getattr(hook, "stage", None) is None:
            raise HookError(
                f"{stage}= got {hook!r}; expected hooks made by @conduit.register_{stage}(…) or from conduit.transforms"
            )
        if hook.stage != stage:
            raise HookError(f"{stage}= got {hook.name!r}, which is a hook for {hook.stage}")
    return tuple(hooks)


class _Port:
    """Both ends of one run of a hook."""

    def __init__(self, name: str, data: Any) -> None:
        self._name, self._data, self._written = name, data, []

    def read(self) -> Any:
        return self._data

    def write(self, d: Any) -> None:
        if self._written:
            raise HookError(f"hook {self._name!r} wrote twice in one run; expected one write(d)")
        self._written.append(d)

    def result(self) -> Any:
        if not self._written:
            raise HookError(f"hook {self._name!r} returned without a write(d); expected exactly one")
        return self._written[0]


def _check_parentheses(stage: Stage, functions: tuple[Function, ...]) -> None:
    if functions:
        raise HookError(f"@conduit.register_{stage} takes its function after parentheses: @conduit.register_{stage}()")


def _check_ends(stage: Stage, got: tuple[str, str], expected: tuple[str, str]) -> None:
    if got != expected:
        raise HookError(
            f"register_{stage}: got input={got[0]!r}, output={got[1]!r}; expected input={expected[0]!r}, output={expected[1]!r}"
        )


def _declare(stage: Stage, per: Scope, rows: RowRule) -> Callable[[Function], RegisteredHook]:
    if per not in SCOPES:
        raise HookError(f"register_{stage}: per={per!r}; expected one of {', '.join(SCOPES)}")
    if rows not in ROW_RULES:
        raise HookError(f"register_{stage}: rows={rows!r}; expected one of {', '.join(ROW_RULES)}")
    return lambda function: RegisteredHook(function, stage, per, rows)
