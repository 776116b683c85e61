"""A sampler at play beside a naive model of the rows: what `check_sampler` is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from conduit.core.sampling import Draw, Sampler, Sampling
from conduit.core.starts import Starts
from conduit.testing.draws import copied, difference, malformed, scribble_on, shown
from conduit.testing.model import NONE, Floats, Keys, Rows, Told
from conduit.testing.watch import Watch

PROMISES = {
    "answers": "every call returns, in time, and raises nothing",
    "form": "a draw has as many int64 keys as asked; a probability in (0, 1] and a finite priority, each one number or one a row; "
    "a weight of None, or a finite one > 0 a row",
    "live": "a drawn key is a live row's: in the window, and not of a row whose slot has another by now",
    "admitted": "where there are Starts, no row is drawn before it was admitted",
    "excluded": "a row that was excluded is never drawn again, whatever becomes of its priority",
    "disabled": "where priority 0 disables rows, none is drawn that was pushed with it, and when all are missing() says so",
    "missing": "missing() gives a text that isn't empty while fewer rows are drawable than asked, and None when there are enough "
    "that have no priority of 0",
    "priority": "a draw shows the raw priority that a row was pushed with, or that an update gave it: of several, the last; "
    "highest_priority is a finite number > 0",
    "repeatable": "two samplers with the same seed and history draw the same, bit for bit, and use no generator that others share",
    "own arrays": "arrays of a draw or a state belong to who asked: no later call changes them, and changing them changes no draw",
    "plain state": "a state is NumPy arrays of numbers, finite numbers and strings by name",
    "state": "a state loads, into other capacities and with fewer rows as well; in one of the same capacity, the sampler draws what the "
    "other goes on to draw, bit for bit",
}
"""What `check_sampler` checks, by name."""

_MOST_LINES = 12
"""Of a play, in a message."""
_MOST_KEPT = 12
"""Arrays that are watched at a time."""


_NAMES = {"": "sampler", "repeatable": "twin", "own arrays": "scribbled_on", "state": "restored"}
"""By promise: the player that is there for it."""


@dataclass(slots=True)
class Referee:
    """What all plays of one check share."""

    sampling: Sampling
    watch: Watch
    refused: dict[str, str] = field(default_factory=dict)
    """What the sampler doesn't take, and what it says to that."""
    zero_disables: bool | None = None
    """Whether rows that are pushed with priority 0 are disabled; None while that isn't known."""
    draws: int = 0
    plays: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(PROMISES, 0)))
    play: Play | None = None
    """The latest."""


@dataclass(slots=True)
class _Call:
    who: str
    name: str
    args: tuple[Any, ...]
    gave: Any = None

    def __str__(self) -> str:
        call = f"{self.name}({', '.join(map(shown, self.args))})"
        call = f"{self.who} = sampling.{call}" if self.name == "start" else f"{self.who}.{call}"
        return call if self.gave is None else f"{call}  # {shown(self.gave)}"


@dataclass(slots=True)
class _Player:
    sampler: Sampler
    starts: Starts | None
    promise: str
    """The one that is broken if it doesn't draw what the first player does; empty for the first."""

    @property
    def name(self) -> str:
        return _NAMES[self.promise]


class Play:
    """One or several samplers that are told the same, and must draw the same, beside the model. AssertionError for the first
    promise that is broken."""

    def __init__(
        self,
        referee: Referee,
        scenario: str,
        capacity: int,
        seed: int,
        told: Told = "all",
        *,
        in_slots: bool = False,
        twin: bool = False,
        scribble: bool = False,
    ) -> None:
        """`in_slots`: keys are slots, which rows leave in any order, as in a store with a remover. `twin`: a second sampler plays
        along, and arrays are watched. `scribble`: what the second one gives is overwritten."""
        self.rows = Rows(capacity, told, in_slots)
        self._referee = referee
        self._scenario = scenario
        self._seed = seed
        self._told: Told = told
        self._twin = twin or scribble
        self._scribble = scribble
        self._log: list[_Call] = []
        self._kept: list[tuple[str, NDArray[Any], NDArray[Any]]] = []
        """Arrays that were given, and copies of them."""
        referee.plays[scenario] += 1
        referee.play = self
        self._promises = ("", "own arrays" if scribble else "repeatable") if self._twin else ("",)
        """One a player that is in the play from its beginning."""
        self._players = [self._start(promise) for promise in self._promises]

    @property
    def highest_priority(self) -> float:
        highest = self._players[0].sampler.highest_priority
        if not np.isfinite(highest) or highest <= 0:
            self.fail("priority", f"highest_priority is {highest!r}", "the highest that update() and insert() take")
        return float(highest)

    def insert(
        self,
        rows: int,
        priority: Floats | None = None,
        *,
        at: int | None = None,
        admit: Keys | None = None,
        exclude: Keys = NONE,
    ) -> None:
        """Rows come; the first of more than the capacity are gone already. `at`: the first slot, where keys are slots. `admit`:
        which can be drawn since; None: the new ones. `exclude`: others that can't any more."""
        lost = max(0, rows - self.rows.capacity)
        first, rows = self.rows.window.stop + lost if at is None else at, rows - lost
        priority = None if priority is None else priority[lost:]
        self.rows.exclude(exclude)
        self.rows.insert(first, rows, priority)
        if self._told == "all":
            admit = NONE
        elif admit is None:
            admit = np.arange(first, first + rows)
        self.rows.admit(admit)
        if self._told == "first":
            for player in self._players:
                assert player.starts is not None
                player.starts.exclude(exclude)
                player.starts.evict(first, rows)
                player.starts.admit(admit)
        self._exclude(exclude, known=self._told == "first")
        if self._told == "step by step":
            for player in self._players:
                assert player.starts is not None
                player.starts.evict(first, rows)
        for player in self._players:
            self._call(player, "insert", first, rows, None if priority is None else priority.copy())
        self._admit(admit, known=self._told == "first")
        self._check_kept()

    def admit(self, keys: Keys) -> None:
        self.rows.admit(keys)
        self._admit(keys)

    def exclude(self, keys: Keys) -> None:
        """`keys`, distinct, were drawable."""
        self.rows.exclude(keys)
        self._exclude(keys)
        self._check_kept()

    def update(self, keys: Keys, priority: Floats) -> None:
        self.rows.update(keys, priority)
        for player in self._players:
            self._call(player, "update", keys.copy(), priority.copy())
        self._check_kept()

    def ask(self, rows: int, number: int = 0) -> bool:
        """Whether `missing` lets a draw of `rows` rows go ahead; checked against the model."""
        window, model = self.rows.window, self.rows
        said = self._call(self._players[0], "missing", window, rows, number)
        self._referee.checks["missing"] += 1
        if said is not None and not (isinstance(said, str) and said.strip()):
            self.fail("missing", f"gave {said!r}", "a text that isn't empty, or None")
        if (rows > model.count and said is None) or (rows <= model.enabled and said is not None):
            allowed = "a text" if said is None else "None"
            self.fail(
                "missing", f"gave {said!r}", f"{allowed}: {model.count} rows are drawable and {rows} were asked for"
            )
        if self._referee.zero_disables:
            self._referee.checks["disabled"] += 1
            if said is None and self._all_disabled:
                self.fail("disabled", "missing() gave None", "a text: all drawable rows have priority 0")
        for player in self._players:
            if player.promise == "state" and (self._call(player, "missing", window, rows, number) is None) != (
                said is None
            ):
                self.fail("state", f"missing() of sampler gave {said!r}", "the same from restored")
        return said is None

    def draw(self, rows: int, number: int = 0, stream: int = 0) -> Draw | None:
        """What was drawn, checked; None where `missing` says that it can't be served."""
        if not self.ask(rows, number):
            return None
        first, *others = self._players
        draw = self._drawn(first, number, rows, stream)
        for player in others:
            other = self._call(player, "draw", number, rows, self.rows.window, stream)
            self._referee.checks[player.promise] += 1
            if different := difference(draw, other):
                self.fail(player.promise, different, f"the same from sampler and {player.name}")
            if player.promise == "own arrays":
                scribble_on(other.keys, other.probability, other.weight, other.priority)
        self._check_kept()
        kept = Draw(draw.keys.copy(), copied(draw.probability), copied(draw.weight), copied(draw.priority))
        arrays = {name: getattr(draw, name) for name in ("keys", "probability", "weight", "priority")}
        if self._twin and not self._scribble:
            self._keep(f"batch {number}", **arrays)
        return kept

    def restore(self) -> None:
        """From here on a sampler that loaded this one's state plays along."""
        state = self._state()
        self._players = [player for player in self._players if player.promise != "state"]
        self._players.append(self._loaded(state, "state"))

    def move(self, capacity: int, kept: int) -> None:
        """The play goes on with the state loaded where the capacity is another, and only the newest `kept` rows are left."""
        state = self._state()
        self.rows = self.rows.moved(capacity, kept)
        self._players = [self._loaded(state, promise) for promise in self._promises]

    def fail(self, promise: str, got: str, allowed: str, error: BaseException | None = None) -> NoReturn:
        """Raises the AssertionError that says all that is known."""
        *before, last = self._log
        if last.name == "draw" and promise in ("answers", "form") and self._all_disabled:
            promise, got = "disabled", f"missing() gave None, and then: {got}"
        calls = [*(str(call) for call in before if call.name != "missing"), str(last)]
        if len(calls) > _MOST_LINES + 1:
            calls[1:-_MOST_LINES] = [f"… {len(calls) - _MOST_LINES - 1} calls more"]
        lines = [
            f"{self._referee.sampling!r} breaks {promise!r}: {PROMISES[promise]}",
            f"the play, of {self._scenario!r}:",
            *(f"    {call}" for call in calls),
            f"got: {got}",
            f"allowed: {allowed}",
        ]
        raise AssertionError("\n".join(lines)) from error

    def _start(self, promise: str) -> _Player:
        capacity, starts = self.rows.capacity, self.rows.starts()
        args = (capacity, self._seed) if starts is None else (capacity, self._seed, starts)
        self._log.append(_Call(_NAMES[promise], "start", args))
        try:
            sampler = self._referee.sampling.start(capacity, self._seed, starts)
        except Exception as error:
            self.fail("answers", f"start() raised {error!r}", "a sampler", error)
        if promise not in ("", "state"):
            self._log.pop()
        return _Player(sampler, starts, promise)

    def _loaded(self, state: Mapping[str, Any], promise: str) -> _Player:
        """A fresh sampler that loaded the state, of which it gets a copy, for the rows that there are."""
        player = self._start(promise)
        self._call(player, "load", {name: copied(value) for name, value in state.items()}, self.rows.window)
        return player

    def _state(self) -> dict[str, Any]:
        """The first player's state, as it comes back from a file."""
        given = self._call(self._players[0], "state", self.rows.window)
        self._referee.checks["plain state"] += 1
        expected = "arrays of booleans and numbers, finite numbers and strings, by name"
        if not isinstance(given, Mapping):
            self.fail("plain state", f"a {type(given).__name__}", expected)
        state: dict[str, Any] = {}
        for name, value in given.items():
            if not isinstance(name, str):
                self.fail("plain state", f"the name {name!r}", expected)
            if isinstance(value, np.ndarray):
                plain = value.dtype.kind in "biuf"
                state[name] = value.copy()
            else:
                state[name] = value.item() if isinstance(value, np.generic) else value
                plain = isinstance(state[name], str | int) or (
                    isinstance(state[name], float) and np.isfinite(state[name])
                )
            if not plain:
                self.fail("plain state", f"{name!r}: {value!r}, a {type(value).__name__}", expected)
        arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
        if self._scribble:
            scribble_on(*self._call(self._players[1], "state", self.rows.window).values())
        elif self._twin:
            self._keep("a state", **arrays)
        return state

    def _exclude(self, keys: Keys, known: bool = False) -> None:
        if len(keys):
            for player in self._players:
                if player.starts is not None and not known:
                    player.starts.exclude(keys)
                self._call(player, "exclude", keys.copy())

    def _admit(self, keys: Keys, known: bool = False) -> None:
        if len(keys):
            for player in self._players:
                if player.starts is not None and not known:
                    player.starts.admit(keys)
                self._call(player, "admit", keys.copy())

    def _call(self, player: _Player, name: str, *args: Any) -> Any:
        self._log.append(_Call(player.name, name, args))
        watch = self._referee.watch
        watch.begin()
        try:
            gave = getattr(player.sampler, name)(*args)
        except Exception as error:
            # That the first player did the same without one is another promise.
            promise = "state" if name == "load" else player.promise or "answers"
            self.fail(promise, f"{player.name}.{name}() raised {error!r}", "no exception", error)
        finally:
            watch.end()
        self._referee.checks["answers"] += 1
        # One line for what all players are told.
        if player.promise and not (name == "load" and player.promise == "state"):
            self._log.pop()
        return gave

    @property
    def _all_disabled(self) -> bool:
        """Whether all drawable rows were pushed with priority 0."""
        return 0 < self.rows.count == len(self.rows.disabled)

    def _drawn(self, player: _Player, number: int, rows: int, stream: int) -> Draw:
        """What the player draws, checked against the model."""
        model, checks = self.rows, self._referee.checks
        draw = self._call(player, "draw", number, rows, model.window, stream)
        self._referee.draws += 1
        checks["form"] += 1
        if wrong := malformed(draw, rows):
            self.fail("form", wrong, f"{rows} keys and what goes with them")
        self._log[-1].gave = draw.keys.copy()
        checks.update(("live", "admitted", "excluded"))
        zero_disables = bool(self._referee.zero_disables)
        checks["disabled"] += zero_disables
        if broken := model.fault(draw.keys, zero_disables):
            drawable = np.setdiff1d(model.drawable, model.disabled) if zero_disables else model.drawable
            self.fail(broken, f"keys {shown(draw.keys)}", f"keys of {shown(drawable)}")
        if self._referee.sampling.prioritized:
            checks["priority"] += 1
            if wrong := model.wrong_priority(draw.keys, draw.priority):
                self.fail("priority", wrong, "that, or a little more")
        return draw

    def _keep(self, whose: str, **arrays: Any) -> None:
        """Arrays that nothing may change from here on."""
        for name, array in arrays.items():
            if isinstance(array, np.ndarray):
                self._kept.append((f"{name!r} of {whose}", array, array.copy()))
        del self._kept[:-_MOST_KEPT]

    def _check_kept(self) -> None:
        for name, array, copy in self._kept:
            self._referee.checks["own arrays"] += 1
            if array.tobytes() != copy.tobytes():
                self.fail("own arrays", f"{name} is {shown(array)} now", f"what it was: {shown(copy)}")
