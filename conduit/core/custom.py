"""Samplers and limiters of the user's own at work: what they give is checked, and what they raise says whose it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from conduit.core.journal import Copy, at_once
from conduit.core.limiter import Counters, Limiter
from conduit.core.ring import Window
from conduit.core.sampling import Draw, Sampler, Sampling, State
from conduit.core.starts import Starts
from conduit.errors import SamplerError, SettingError

P = ParamSpec("P")
T = TypeVar("T")
Keys = NDArray[np.int64]
Floats = NDArray[np.float64]

_PROMISED = tuple(name for name in vars(Sampler) if not name.startswith("_"))
"""What a sampler at work has."""


def is_custom(asked: Sampling | Limiter) -> bool:
    """Whether it isn't one of Conduit's, which are tested already."""
    return type(asked).__module__.partition(".")[0] != "conduit"


class CustomSampler:
    """Passes everything on to another sampler. SamplerError for what that raises, and for a draw that isn't what it should be."""

    def __init__(self, sampling: Sampling, sampler: Sampler, table: str, starts: Starts | None, capacity: int) -> None:
        lacks = [name for name in _PROMISED if not hasattr(sampler, name)]
        if lacks:
            raise SamplerError(
                f"{sampling!r} of table {table!r}: its start() gave {sampler!r}, which has no {', '.join(lacks)}; expected a sampler with all "
                "that conduit.Sampler has"
            )
        self._sampling = sampling
        self._sampler = sampler
        self._table = table
        self._starts = starts
        self._capacity = capacity

    @property
    def highest_priority(self) -> float:
        return self._sampler.highest_priority

    def insert(self, first_key: int, rows: int, priority: Floats | None) -> None:
        self._ask("insert rows", lambda: self._sampler.insert(first_key, rows, priority))

    def admit(self, keys: Keys) -> None:
        self._ask("admit rows", lambda: self._sampler.admit(keys))

    def exclude(self, keys: Keys) -> None:
        self._ask("exclude rows", lambda: self._sampler.exclude(keys))

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        to = f"say what is missing for batch {number}"
        lacks = self._ask(to, lambda: self._sampler.missing(window, rows, number))
        if lacks is not None and not (isinstance(lacks, str) and lacks):
            raise self._failed(to, f"it gave {lacks!r}; expected a text that isn't empty, or None")
        return lacks

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        to = f"draw batch {number}"
        draw = self._ask(to, lambda: self._sampler.draw(number, rows, window, stream))
        wrong = _what_is_wrong(draw, rows, window, self._starts, self._capacity)
        if wrong:
            raise self._failed(to, wrong)
        return draw

    def update(self, keys: Keys, priority: Floats) -> None:
        self._ask("update priorities", lambda: self._sampler.update(keys, priority))

    def state(self, window: Window, copy: Copy = at_once) -> State:
        # It has no journals: what it tells is in memory of its own when the turn ends.
        return self._ask("tell its state", lambda: self._sampler.state(window))

    def load(self, state: State, window: Window) -> None:
        self._ask("load its state", lambda: self._sampler.load(state, window))

    def _ask(self, to: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise self._failed(to, f"{type(error).__name__}: {error}") from error

    def _failed(self, to: str, how: str) -> SamplerError:
        return SamplerError(
            f"{self._sampling!r} of table {self._table!r} failed to {to}: {how}. conduit.testing.check_sampler tries a sampler on such cases"
        )


def limiter_of(asked: Limiter | None, table: str) -> Limiter | None:
    """A table's limiter at work."""
    return asked if asked is None or not is_custom(asked) else CustomLimiter(asked, table)


class CustomLimiter:
    """Passes everything on to another limiter. SettingError for what that raises."""

    def __init__(self, limiter: Limiter, table: str) -> None:
        self._limiter = limiter
        self._table = table

    def may_insert(self, rows: int, at: Counters) -> bool:
        return self._ask("say whether a push may come", self._limiter.may_insert, rows, at)

    def may_sample(self, rows: int, at: Counters) -> bool:
        return self._ask("say whether a batch may be drawn", self._limiter.may_sample, rows, at)

    def why_no_insert(self, rows: int, at: Counters, batch_size: int = 1) -> str:
        return self._ask("say why a push is held", self._limiter.why_no_insert, rows, at, batch_size)

    def why_no_sample(self, rows: int, at: Counters) -> str:
        return self._ask("say why a draw is held", self._limiter.why_no_sample, rows, at)

    def check(self, *, capacity: int, batch_size: int, max_times_sampled: int | None) -> None:
        self._limiter.check(capacity=capacity, batch_size=batch_size, max_times_sampled=max_times_sampled)

    def check_insert(self, rows: int, batch_size: int) -> None:
        self._ask(f"check a push of {rows} rows", self._limiter.check_insert, rows, batch_size)

    def check_sample(self, rows: int, push: int = 1) -> None:
        self._ask(f"check a draw of {rows} rows", self._limiter.check_sample, rows, push)

    def __str__(self) -> str:
        return str(self._limiter)

    def _ask(self, to: str, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        try:
            return call(*args, **named)
        except SettingError:
            # What a limiter says of settings is its answer.
            raise
        except Exception as error:
            raise SettingError(
                f"{self._limiter!r}, the limiter of table {self._table!r}, failed to {to}: {type(error).__name__}: {error}"
            ) from error


def _what_is_wrong(draw: object, rows: int, window: Window, starts: Starts | None, capacity: int) -> str:
    """How a draw of `rows` rows isn't what it should be; empty if it is."""
    if not isinstance(draw, Draw):
        return f"it gave a {type(draw).__name__}; expected a Draw"
    keys, weight = draw.keys, draw.weight
    if not isinstance(keys, np.ndarray) or keys.dtype != np.int64 or keys.shape != (rows,):
        form = f"{keys.dtype}{list(keys.shape)}" if isinstance(keys, np.ndarray) else f"a {type(keys).__name__}"
        return f"its keys are {form}; expected int64[{rows}]"
    dead = keys[(keys < window.first) | (keys >= window.stop)]
    if len(dead):
        return f"row {dead[0]} isn't live; live rows are {window.first} to {window.stop - 1}"
    if starts is not None:
        closed = keys[~starts.at(keys % capacity)]
        if len(closed):
            return f"row {closed[0]} can't be drawn: it is excluded, or not admitted yet"
    if weight is not None and not (_are_numbers(weight, rows) and (weight > 0).all()):
        return "its weights aren't finite numbers above 0, one a row"
    for name, value in (("probability", draw.probability), ("priority", draw.priority)):
        if not _is_number(value) and not _are_numbers(value, rows):
            return f"its {name} is neither a finite number nor an array of them, one a row"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and bool(np.isfinite(value))


def _are_numbers(values: Any, rows: int) -> bool:
    """Whether these are finite numbers, one a row."""
    return (
        isinstance(values, np.ndarray)
        and values.dtype.kind in "fiu"
        and values.shape == (rows,)
        and bool(np.isfinite(values).all())
    )
