"""What one entry of a batch is: a row, n steps, a sequence, a whole trajectory, a group. Each starts at a drawn row and follows links."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Names
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from conduit.core.derived import PADS, Pad
from conduit.core.links import Links
from conduit.core.whole import check_whole
from conduit.errors import SettingError

Keys = NDArray[np.int64]
Mask = NDArray[np.bool_]

Chance = Callable[[], np.random.Generator]
"""Makes the generator for what an item leaves to chance: the same for the same batch."""

WHOLE = 1 << 40
"""More rows than any episode has."""


@dataclass(frozen=True, slots=True)
class Needs:
    """When a row can start an item: it is every `period`-th of its episode, and `ahead` rows from it on are there; where the
    episode ended for good, fewer will do if `partial`."""

    ahead: int = 1
    period: int = 1
    partial: bool = False


# Both are made for every batch: frozen ones would cost microseconds.


@dataclass(slots=True)
class Entries:
    """The rows of a batch's entries. `rows`: (B,) or (B, T) keys; `real`: (B, T), False where a row only fills a place (None:
    all are real). `last`: (B,) the row after which an entry goes on. `chain`: (B, n) keys whose rewards are summed, of which
    the first `steps` (B,) count."""

    rows: Keys
    last: Keys
    real: Mask | None = None
    chain: Keys | None = None
    steps: NDArray[np.int64] | None = None
    blank: bool = False
    """Whether what only fills a place becomes zeros; else it stays the row that stands there."""


@dataclass(slots=True)
class Followed:
    """What following links has to respect. `needs_next`: a row of which nothing is known to come after it can't be used.
    `depth`: how many rows, itself included, a row's stack reaches back."""

    links: Links
    needs_next: bool
    depth: int

    def chain(self, keys: Keys, rows: int) -> tuple[Keys, NDArray[np.int64]]:
        """Each key and its successors, usable rows only: (B, rows), and how many there are (B,)."""
        chain, count = self.links.walk(keys, rows)
        if self.needs_next:
            last = chain[:, -1]
            # Only an episode's last row can lack a next.
            usable = self.links.has_next(last)
            if np.count_nonzero(usable) < len(keys):
                count = count - ~usable
                chain = np.where(np.arange(rows) < count[:, None], chain, chain[_each(keys), count - 1][:, None])
        return chain, count

    def before(self, keys: Keys, rows: int, stride: int) -> tuple[Keys, NDArray[np.int64]]:
        """The rows before each key, `stride` apart, up to `rows` of them, nearest first: (B, rows), and how many there are. Those
        whose stacks are gone don't count."""
        reach = rows * stride + 1
        path, count = self.links.walk_back(keys, reach + self.depth - 1)
        oldest = path[_each(keys), count - 1]
        # Up to its first row an episode has whole stacks; where older rows are gone, the oldest left have none.
        whole = np.where(self.links.begins(oldest), count, np.maximum(count - (self.depth - 1), 1))
        return path[:, stride:reach:stride], (np.minimum(whole, reach) - 1) // stride


@runtime_checkable
class Item(Protocol):
    """What one entry of a batch is: a value."""

    @property
    def needs(self) -> Needs: ...

    def entries(self, keys: Keys, followed: Followed, chance: Chance) -> Entries:
        """The entries that start at `keys` (B,), which are drawable; in the turn of their draw."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One row."""

    @property
    def needs(self) -> Needs:
        return Needs()

    def entries(self, keys: Keys, followed: Followed, chance: Chance) -> Entries:
        return Entries(keys, keys)


@dataclass(frozen=True, slots=True)
class NStep:
    """n consecutive steps of an episode as one transition; fewer where the episode ends, m in all.

    `n`: a whole number, or a range, of which each entry gets one with equal chance. An entry has the leaves of its first row,
    but `reward` is sum gamma^i reward_i over i < m (in the reward's float dtype, float32 for whole numbers), the leaves called
    `from_last` come from its last row, and so does what is derived by `Next`. Added leaves: `discount` (float32), gamma^m or 0 where the
    last row terminated, and `n_step` (int32), m. So the target is `reward + discount * value(next_obs)`, at a truncation
    too. Rows whose n steps aren't there yet are not drawn.

    (Sutton 1988; in the form of Hessel et al. 2018, "Rainbow".)"""

    n: int | range
    gamma: float
    reward: str = "reward"
    from_last: Names[str] = ("next_obs", "terminated", "truncated")

    def __post_init__(self) -> None:
        if isinstance(self.n, range):
            if not len(self.n) or self.n[0] < 1 or self.n.step < 1:
                raise SettingError(f"NStep(n={self.n!r}): expected a range of whole numbers ≥ 1, such as range(1, 6)")
        else:
            check_whole("n", self.n, of="NStep")
        if not isinstance(self.gamma, Real) or isinstance(self.gamma, bool) or not 0 <= self.gamma <= 1:
            raise SettingError(f"NStep(gamma={self.gamma!r}): expected a number in [0, 1]")
        if not isinstance(self.reward, str):
            raise SettingError(f"NStep(reward={self.reward!r}): expected the name of the reward leaf")
        names = self.from_last
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise SettingError(f"NStep(from_last={names!r}): expected names of leaves, such as ('next_obs',)")
        object.__setattr__(self, "from_last", tuple(names))

    @property
    def most(self) -> int:
        """The largest n."""
        return self.n[-1] if isinstance(self.n, range) else int(self.n)

    @property
    def needs(self) -> Needs:
        return Needs(ahead=self.most, partial=True)

    def entries(self, keys: Keys, followed: Followed, chance: Chance) -> Entries:
        chain, steps = followed.chain(keys, self.most)
        if isinstance(self.n, range):
            steps = np.minimum(steps, np.asarray(self.n)[chance().integers(0, len(self.n), len(keys))])
        return Entries(keys, chain[_each(keys), steps - 1], chain=chain, steps=steps)


@dataclass(frozen=True, slots=True)
class Sequence:
    """`burn_in + length` rows of one episode, `stride` apart, as leaves (B, T, *shape) (Kapturowski et al. 2019, "R2D2").

    The trained part starts at every `period`-th row of an episode, counted from its first; `info.keys` names that row. The burn-in
    comes before it; its rows that don't exist, before an episode's start or evicted by now, are padding. `pad`: None to draw
    whole trained parts only; "zero" or "repeat" for those too that the episode's end cuts short, filled up with zeros or with
    the last row. `info.mask` (B, T) tells rows from padding."""

    length: int
    period: int = 1
    burn_in: int = 0
    stride: int = 1
    pad: Pad | None = None

    def __post_init__(self) -> None:
        check_whole("length", self.length, of="Sequence")
        check_whole("period", self.period, of="Sequence")
        check_whole("burn_in", self.burn_in, 0, of="Sequence")
        check_whole("stride", self.stride, of="Sequence")
        if self.pad is not None and self.pad not in PADS:
            raise SettingError(
                f"Sequence(pad={self.pad!r}): expected None for whole sequences only, or one of {', '.join(map(repr, PADS))}"
            )

    @property
    def needs(self) -> Needs:
        return Needs((self.length - 1) * self.stride + 1, self.period, self.pad is not None)

    def entries(self, keys: Keys, followed: Followed, chance: Chance) -> Entries:
        chain, count = followed.chain(keys, self.needs.ahead)
        rows = chain if self.stride == 1 else chain[:, :: self.stride]
        whole = int(np.minimum.reduce(count)) == self.needs.ahead
        if not whole:
            count = (count - 1) // self.stride + 1
        if not whole and self.stride > 1:
            # Of a chain cut short, the last row may lie between two strides.
            rows = _filled(rows, count)
        real = None if whole else np.arange(self.length) < count[:, None]
        if self.burn_in:
            before, there = followed.before(keys, self.burn_in, self.stride)
            behind = np.arange(self.burn_in, 0, -1)
            # A row that isn't there is filled with the oldest that is, which is the key itself where none is.
            path = np.concatenate([keys[:, None], before], axis=1)
            filled = path[_each(keys)[:, None], np.minimum(behind, there[:, None])]
            rows = np.concatenate([filled, rows], axis=1)
            trained = np.ones((len(keys), self.length), np.bool_) if real is None else real
            real = np.concatenate([behind <= there[:, None], trained], axis=1)
        return Entries(rows, rows[:, -1], real, blank=self.pad != "repeat")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A whole episode, from its first row to its end, as leaves (B, T, *shape). T is the longest episode of the batch, rounded
    up to a `multiple` (a framework that compiles once per shape wants few); what is behind an episode's end is zeros, and
    False in `info.mask`."""

    multiple: int = 1

    def __post_init__(self) -> None:
        check_whole("multiple", self.multiple, of="Trajectory")

    @property
    def needs(self) -> Needs:
        return Needs(ahead=WHOLE, period=WHOLE, partial=True)

    def entries(self, keys: Keys, followed: Followed, chance: Chance) -> Entries:
        # How long the longest is isn't known before: twice as far until all have ended.
        rows = 64
        while True:
            chain, count = followed.chain(keys, rows)
            longest = int(count.max())
            if longest < rows - 1:
                break
            rows *= 2
        longest = -(-longest // self.multiple) * self.multiple
        chain = chain[:, :longest] if longest <= rows else np.pad(chain, ((0, 0), (0, longest - rows)), mode="edge")
        return Entries(chain, chain[:, -1], np.arange(longest) < count[:, None], blank=True)


@dataclass(frozen=True, slots=True)
class Group:
    """`size` rows that share a value of leaf `by`, in the order in which they came, as leaves (B, size, *shape): one prompt's
    responses, whose advantages are taken relative to each other (Shao et al. 2024, "GRPO").

    `by`: the path of a leaf of whole numbers, one a row, as it is stored. Use an id that is new for each prompt and iteration: a group
    that lacks rows because a rollout failed stays unfinished (`info()["unfinished_groups"]`), and would take them from the next of its
    id. A group's rows may come from any actor, lane and push, between those of others; ends and cuts mean nothing to it. It can be
    drawn once its last row is there, and is gone when its first row is evicted, which `info.keys` names it by. A value that comes again
    after `size` rows begins another group.

    A group that loses its first row before its last one comes is never drawn, and the rows that it still gets are taken for no
    other group's; while more than 65,536 groups are unfinished, such ones are forgotten, oldest first."""

    size: int
    by: str

    def __post_init__(self) -> None:
        check_whole("size", self.size, of="Group")
        if not isinstance(self.by, str) or not self.by:
            raise SettingError(f"Group(by={self.by!r}): expected the name of a leaf of whole numbers, such as 'prompt'")

    @property
    def needs(self) -> Needs:
        return Needs(ahead=self.size, period=WHOLE)

    def entries(self, keys: Keys, followed: Followed, chance: Chance) -> Entries:
        rows, _ = followed.links.walk(keys, self.size)
        return Entries(rows, rows[:, -1])


def _filled(rows: Keys, count: NDArray[np.int64]) -> Keys:
    """`rows` (B, T) with all behind the first `count` of a row set to the last of those."""
    last = rows[_each(count), count - 1]
    return np.where(np.arange(rows.shape[1]) < count[:, None], rows, last[:, None])


def _each(of: NDArray[Any]) -> NDArray[np.int64]:
    return np.arange(len(of))
