"""Arrays by slot, copied as they were at one moment while their owner goes on: so that nobody waits for a copy, however large.

The moment is a turn of the store's Order, in which a save only says what it will copy. From then on, until it has, whoever is
about to change slots puts aside what they hold. The copy is made meanwhile, and may catch a slot before, after or amid a change;
then what was put aside goes over it. A slot's change comes after its note, so no change that the copy saw lacks one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from conduit.core.ring import Window, by_age

Keys = NDArray[np.int64]
Made = Callable[[NDArray[Any]], NDArray[Any]]


class Journal:
    """What some arrays held before slots of theirs were changed: noted only while it is `on`, which is for a moment of each save.

    The owner asks before every change, in its turn: `if journal.on: journal.before(slots)`."""

    __slots__ = ("_aside", "arrays", "on")

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """`arrays`: all of one length, by the names that the owner knows them by."""
        self.arrays = arrays
        self.on = False
        self._aside: list[tuple[Keys, dict[str, NDArray[Any]]]] | None = None

    def before(self, slots: Keys) -> None:
        """These slots are about to change."""
        aside = self._aside
        # It may have been switched off since the owner asked.
        if aside is not None:
            aside.append((slots.copy(), {name: array.take(slots) for name, array in self.arrays.items()}))

    def before_range(self, start: int, stop: int) -> None:
        """Slots [start, stop) are about to change."""
        self.before(np.arange(start, stop))

    def begin(self) -> None:
        """In a turn: what the slots hold now is what will be copied."""
        assert self._aside is None, "another copy is being made"
        self._aside = []
        self.on = True

    def end(self) -> None:
        """Nothing is noted any more, and nothing kept. At any time, by whoever began."""
        self.on = False
        self._aside = None

    @property
    def aside_bytes(self) -> int:
        """What is put aside."""
        noted = list(self._aside or ())
        return sum(slots.nbytes + sum(each.nbytes for each in held.values()) for slots, held in noted)

    def copied(self, name: str, window: Window) -> NDArray[Any]:
        """What the array held when it began, of `window`'s rows, the oldest first; in memory of its own."""
        array = self.arrays[name]
        copy = by_age(array, window)
        # In this order: whatever was changed before it was copied is noted by now.
        noted = list(self._aside or ())
        if noted:
            # Of several assignments the last stays: a slot's first note.
            ages = (np.concatenate([slots for slots, _ in reversed(noted)]) - window.first) % len(array)
            held = np.concatenate([held[name] for _, held in reversed(noted)])
            there = ages < len(window)
            copy[ages[there]] = held[there]
        return copy


class Copy(Protocol):
    """How a `state` gets its arrays: at once, or as what will be one."""

    def __call__(self, journal: Journal, name: str, window: Window, made: Made | None = None) -> Any:
        """What `made` makes, in memory of its own, of the array of this name: of `window`'s rows, the oldest first. None: just that."""
        ...


def at_once(journal: Journal, name: str, window: Window, made: Made | None = None) -> NDArray[Any]:
    copy = by_age(journal.arrays[name], window)
    return copy if made is None else made(copy)


@dataclass(frozen=True, slots=True)
class Later:
    """Stands in a state for an array that isn't copied yet."""

    journal: Journal
    name: str
    window: Window
    made: Made | None


class Copying:
    """A save's copies. In its turn, `later` stands for each; when that is over, `settled` makes them. Once the block is left, whatever
    happened, no journal notes anything for it."""

    def __init__(self) -> None:
        self._begun: list[Journal] = []

    def __enter__(self) -> Copying:
        return self

    def __exit__(self, *error: object) -> None:
        for journal in self._begun:
            journal.end()

    def later(self, journal: Journal, name: str, window: Window, made: Made | None = None) -> Later:
        """Is a `Copy`."""
        if journal not in self._begun:
            self._begun.append(journal)
            journal.begin()
        return Later(journal, name, window, made)

    def settled(self, state: Any) -> Any:
        """`state`, in which dicts may nest, with arrays for what was to come later."""
        if isinstance(state, Later):
            copy = state.journal.copied(state.name, state.window)
            return copy if state.made is None else state.made(copy)
        return {name: self.settled(each) for name, each in state.items()} if type(state) is dict else state
