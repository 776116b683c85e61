"""Which actors and learners a store has, and which a checkpoint says it had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any

from numpy.typing import NDArray

from conduit.core.schedule import Numbering
from conduit.core.whole import check_whole
from conduit.errors import SettingError
from conduit.ports import Learner


class ActorRoster:
    """The actors' numbers and lanes. Whoever calls guards it."""

    def __init__(self) -> None:
        self._count = self._lanes = 0
        self._free: dict[int, list[range]] = {}
        """Lanes of actors that were closed, by how many."""
        self._open: dict[int, range] = {}
        """The lanes of those that weren't, by number."""
        self._awaited: dict[int, range] = {}
        """The same of actors that a checkpoint had, and that haven't been made again."""

    def claim(self, lanes: int) -> tuple[int, range]:
        """A new actor's number, and its lanes' numbers. After a restore these are first, one after the other, those of the actors of
        then; SettingError where the next had another number of lanes."""
        for number, numbers in self._awaited.items():
            if len(numbers) != lanes:
                raise SettingError(
                    f"actor(lanes={lanes}): the store goes on from a checkpoint with lanes='continue', and the next of its actors had "
                    f"{len(numbers)}; expected the same actors in the same order"
                )
            del self._awaited[number]
            break
        else:
            free = self._free.get(lanes)
            number, numbers = self._count, free.pop() if free else range(self._lanes, self._lanes + lanes)
            self._count, self._lanes = number + 1, max(self._lanes, numbers.stop)
        self._open[number] = numbers
        return number, numbers

    def free(self, lanes: range) -> None:
        """The actor that had these is closed: another may have them."""
        self._free.setdefault(len(lanes), []).append(lanes)
        self._open = {number: numbers for number, numbers in self._open.items() if numbers != lanes}

    def state(self) -> dict[str, Any]:
        """For a checkpoint. `lanes`: how many there have been."""
        free = {count: list(lanes) for count, lanes in self._free.items()}
        return {"count": self._count, "lanes": self._lanes, "free": free, "open": {**self._open, **self._awaited}}

    def load(self, state: Mapping[str, Any]) -> None:
        self._count, self._lanes, self._free = state["count"], state["lanes"], state["free"]
        self._awaited = dict(sorted(state["open"].items()))


class Roster:
    """The learners, by table and rank. Whoever calls guards it, but for what only tells."""

    def __init__(self) -> None:
        self._learners: dict[tuple[str, int], Learner] = {}
        self._saved: dict[str, dict[int, Any]] = {}
        """By table and rank: the states of learners that haven't been made again."""
        self._begin_at: dict[str, int] = {}
        """By table: the first batch of learners that are more or fewer than those that were saved."""
        self.dropped_batches = 0
        """Batches that had been staged for learners who don't come again."""

    def __iter__(self) -> Iterator[Learner]:
        return iter(list(self._learners.values()))

    def of(self, table: str) -> dict[int, Learner]:
        """A table's learners, by rank."""
        return {rank: learner for (name, rank), learner in list(self._learners.items()) if name == table}

    def check(self, table: str, rank: int, world: int) -> None:
        """SettingError unless there may be such a learner."""
        check_whole("learner(world=…)", world)
        if not isinstance(rank, Integral) or not 0 <= rank < world:
            raise SettingError(f"learner(rank={rank}, world={world}): expected 0 ≤ rank < world")
        if (table, rank) in self._learners:
            raise SettingError(f"learner rank {rank} exists already; keep it, or give the other a rank of its own")
        for other in self.of(table).values():
            if other.world != world:
                raise SettingError(
                    f"learner(world={world}): rank {other.rank} was made with world={other.world}; expected the same"
                )

    def add(self, table: str, learner: Learner) -> None:
        self._learners[table, learner.rank] = learner

    def claim(self, table: str, rank: int, world: int, numbering: Numbering, version: int) -> tuple[Any, int]:
        """What was saved of this learner, if that was saved; and else the first of its batches."""
        first = (numbering.per_iteration or 0) * version
        saved = self._saved.get(table, {})
        if saved:
            then = next(iter(saved.values()))["world"]
            if then == world:
                state = saved.pop(rank, None)
                return (None, first) if state is None or state["index"] < first else (state, first)
            number = _after(saved, then, numbering, version)
            if number is None:
                raise SettingError(
                    f"learner(world={world}): iteration {version} was saved half delivered, to {then} learners; expected world={then}, "
                    "or a checkpoint made after store.advance()"
                )
            self.dropped_batches += sum(len(state["staged"]) for state in saved.values())
            self._begin_at[table], self._saved[table] = number, {}
        return None, max(first, -(-(self._begin_at.get(table, 0) - rank) // world))

    def state(self, to_numpy: Callable[[Any], NDArray[Any]]) -> tuple[list[list[Any]], Callable[[float], None]]:
        """In a turn: what a checkpoint keeps, [table, rank, state] each; and what makes that whole when the turn is over, by a deadline."""
        kept = [[table, rank, state] for table, states in self._saved.items() for rank, state in states.items()]
        finishes: list[Callable[[float], None]] = []
        for (table, rank), learner in list(self._learners.items()):
            state, finish = learner.state(to_numpy)
            kept.append([table, rank, state])
            finishes.append(finish)

        def finish_all(deadline_s: float) -> None:
            for finish in finishes:
                finish(deadline_s)

        return kept, finish_all

    def load(self, state: list[list[Any]]) -> None:
        for table, rank, each in state:
            self._saved.setdefault(table, {})[rank] = each


def _after(saved: Mapping[int, Any], then: int, numbering: Numbering, version: int) -> int | None:
    """The first batch for learners of another number than the `then` that were saved: the one after the last that any of those was
    handed; on-policy, None where an iteration's batches were handed over only in part."""
    handed = {rank: state["index"] for rank, state in saved.items()}
    if numbering.per_iteration is None:
        return max((rank + (count - 1) * then + 1 for rank, count in handed.items() if count), default=0)
    batches = numbering.per_iteration * numbering.world
    each = batches // then
    now = [min(max(0, count - version * each), each) for count in handed.values()]
    if not any(now):
        return version * batches
    return (version + 1) * batches if len(now) == then and min(now) == each else None
