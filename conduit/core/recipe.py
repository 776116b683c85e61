"""What a batch is made of: from an item and derived leaves to the rows that have to be gathered, and where they go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.derived import Derived, Next, Stack
from conduit.core.experience import Field, Schema, map_leaves, top_level
from conduit.core.items import Chance, Entries, Followed, Group, Item, NStep, Row
from conduit.core.lineage import Following
from conduit.core.links import Links
from conduit.core.signature import TERMINATED, TRUNCATED
from conduit.errors import SchemaError, SettingError

Keys = NDArray[np.int64]

DISCOUNT, STEPS = "discount", "n_step"
"""What NStep adds to an entry."""


# Of what follows some are made for every batch, so they aren't frozen, which would cost microseconds.


@dataclass(slots=True)
class Gather:
    """Rows `keys` of some stored leaves, as leaves of a batch.

    `fields`: the stored leaves' paths, `paths`: what they are called in the batch. `axes`: the batch's leading axes,
    whose product is the number of keys. `ended`: positions among the keys whose row is a final's, and which final's. `blank`: positions that are zeros."""

    fields: tuple[str, ...]
    paths: tuple[str, ...]
    keys: Keys
    axes: tuple[int, ...]
    ended: tuple[Keys, Keys] | None = None
    blank: Keys | None = None


@dataclass(slots=True)
class Returns:
    """sum over n of `weight` (n, B) times the rewards of rows `keys` (n · B,), as leaf `path`."""

    path: str
    keys: Keys
    weight: NDArray[np.float64]

    def of(self, rewards: NDArray[Any]) -> NDArray[Any]:
        """The sums of the rewards (n · B, *shape): (B, *shape)."""
        n, entries = self.weight.shape
        each = rewards.reshape(n, entries, -1)
        if each.dtype.kind not in "biuf":
            each = each.astype(np.float64)
        summed = np.einsum("nb,nbs->bs", self.weight, each)
        if np.count_nonzero(np.isfinite(summed)) < summed.size:
            # Nothing times infinity isn't nothing: of rewards that don't count, no trace must be left.
            counted = np.where(self.weight[:, :, None] != 0.0, each, 0.0)
            summed = np.einsum("nb,nbs->bs", self.weight, counted)
        return summed.reshape(entries, *rewards.shape[1:]).astype(return_dtype(rewards.dtype))


@dataclass(slots=True)
class Selection:
    """All that one batch is made of. `made`: leaves that are known already. `shape`: (B, T), where entries have a time axis, and
    `mask`: which of their rows are real, None for all."""

    gathers: tuple[Gather, ...]
    returns: Returns | None = None
    made: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    mask: NDArray[np.bool_] | None = None
    shape: tuple[int, int] | None = None

    def rows(self) -> int:
        """How many rows are read, each of some leaves."""
        rows = sum(len(gather.keys) for gather in self.gathers)
        return rows if self.returns is None else rows + len(self.returns.keys)

    def oldest(self) -> int:
        """The oldest row that is read."""
        keys = [gather.keys for gather in self.gathers]
        if self.returns is not None:
            keys.append(self.returns.keys)
        return min(int(np.minimum.reduce(each)) for each in keys)


def together(selections: Sequence[Selection]) -> Selection | None:
    """All that several batches are made of, one behind the other, to be read as if they were one batch; None where they differ in more than
    which rows they are of."""
    first = selections[0]
    if any(_form(each) != _form(first) for each in selections[1:]):
        return None
    gathers = tuple(_joined(each) for each in zip(*(each.gathers for each in selections), strict=True))
    made = {path: np.concatenate([each.made[path] for each in selections]) for path in first.made}
    all_returns = [each.returns for each in selections if each.returns is not None]
    if not all_returns:
        return Selection(gathers, None, made)
    steps = all_returns[0].weight.shape[0]
    keys = np.concatenate([each.keys.reshape(steps, -1) for each in all_returns], axis=1).reshape(-1)
    weight = np.concatenate([each.weight for each in all_returns], axis=1)
    return Selection(gathers, Returns(all_returns[0].path, keys, weight), made)


def _form(selection: Selection) -> object:
    """The same for batches that can be read as one."""
    gathers = [(gather.fields, gather.paths, gather.axes) for gather in selection.gathers]
    return gathers, selection.returns and selection.returns.weight.shape


def _joined(gathers: Sequence[Gather]) -> Gather:
    first, each = gathers[0], len(gathers[0].keys)
    if len(gathers) * each == 0:
        return first
    offsets = range(0, len(gathers) * each, each)
    ended = [(at + of.ended[0], of.ended[1]) for at, of in zip(offsets, gathers, strict=True) if of.ended is not None]
    blank = [at + of.blank for at, of in zip(offsets, gathers, strict=True) if of.blank is not None]
    return Gather(
        first.fields,
        first.paths,
        np.concatenate([gather.keys for gather in gathers]),
        (len(gathers) * first.axes[0], *first.axes[1:]),
        (np.concatenate([places for places, _ in ended]), np.concatenate([numbers for _, numbers in ended]))
        if ended
        else None,
        np.concatenate(blank) if blank else None,
    )


@dataclass(frozen=True, slots=True)
class Recipe:
    """A store's item and derived leaves, as the user gave them."""

    item: Item = field(default_factory=Row)
    derive: Mapping[str, Derived] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.derive, Mapping):
            object.__setattr__(self, "derive", dict(self.derive))
        if isinstance(self.item, type) or not isinstance(self.item, Item):
            raise SettingError(
                f"item={self.item!r}: expected conduit.NStep(…), conduit.Sequence(…), conduit.Trajectory(), conduit.Group(…) or conduit.Row()"
            )
        if not isinstance(self.derive, Mapping):
            raise SettingError(
                f"derive={self.derive!r}: expected a dict of leaf names to conduit.Next(…) or conduit.Stack(…)"
            )
        for name, derived in self.derive.items():
            if not isinstance(name, str) or not name or not isinstance(derived, Next | Stack):
                raise SettingError(
                    f"derive={{{name!r}: {derived!r}}}: expected a leaf's name and conduit.Next(…) or conduit.Stack(…)"
                )
        if isinstance(self.item, Group) and self.derive:
            raise SettingError(
                f"derive={{{', '.join(map(repr, self.derive))}: …}} with {self.item}: derived leaves follow a lane from row to row, and a group's "
                "rows are linked to each other instead. Push what the rows need as leaves of their own"
            )

    @property
    def trivial(self) -> bool:
        """Whether entries are rows as they are stored: no link is needed."""
        return isinstance(self.item, Row) and not self.derive

    def check_fits(self, capacity: int) -> None:
        """SettingError where no entry could ever be drawn from a ring of `capacity` rows."""
        needs = self.item.needs
        if needs.partial or needs.ahead <= capacity:
            return
        if isinstance(self.item, Group):
            raise SettingError(
                f"{self.item}: an entry takes {needs.ahead:,} rows, and capacity={capacity:,} rows are kept, of all groups: it could never be "
                f"drawn. A capacity of {needs.ahead:,} or more would do"
            )
        raise SettingError(
            f"{self.item}: an entry takes {needs.ahead:,} rows of an episode, and capacity={capacity:,} rows are kept, over all lanes: "
            f"it could never be drawn. A capacity of {needs.ahead:,} or more, or pad=, would do"
        )

    @property
    def following(self) -> Following:
        stacks = [each.depth for each in self.derive.values() if isinstance(each, Stack)]
        return Following(
            self.item.needs,
            any(isinstance(each, Next) for each in self.derive.values()),
            max(stacks, default=1),
            self.item.by if isinstance(self.item, Group) else None,
        )

    def final_sources(self) -> tuple[str, ...]:
        """The top-level names of stored leaves that finals must bring."""
        nexts = [each.source for each in self.derive.values() if isinstance(each, Next)]
        stacks = {name: each.source for name, each in self.derive.items() if isinstance(each, Stack)}
        return tuple(dict.fromkeys(stacks.get(name, name) for name in nexts))


class Composition:
    """A recipe for rows of a given schema. `schema`: of the batch, its fields without the leading axes."""

    def __init__(self, recipe: Recipe, stored: Schema) -> None:
        self._recipe, self._item = recipe, recipe.item
        self._following = recipe.following
        self._names = top_level(stored) if not recipe.trivial else {}
        tree = stored.unflatten({path: path for path in stored.fields})
        for name in recipe.derive:
            if "/" in name:
                raise SchemaError(f"derive: {name!r} contains '/'; expected a top-level name")
        self.final_fields = {
            path: stored.fields[path] for name in recipe.final_sources() for path in self._names.get(name, ())
        }
        fields = dict(stored.fields)
        hidden = {path for name in recipe.derive for path in self._names.get(name, ())}
        self._plain = tuple(path for path in stored.fields if path not in hidden)
        self._from_last: tuple[str, ...] = ()
        if isinstance(self._item, Group):
            _check_group(self._item, stored)
        if isinstance(self._item, NStep):
            fields |= self._n_step(self._item, stored)
            tree = {**tree, DISCOUNT: DISCOUNT, STEPS: STEPS}
        self._derived: list[tuple[Derived, tuple[str, ...], tuple[str, ...]]] = []
        for name, derived in recipe.derive.items():
            source = self._stack_of(derived).source
            if source not in self._names:
                raise SchemaError(
                    f"derive={{{name!r}: {derived}}}: rows have no leaf {source!r} at the top; there are {', '.join(map(repr, self._names))}"
                )
            leaves = self._names[source]
            renamed = {path: name + path[len(source) :] for path in leaves}
            self._derived.append((derived, tuple(renamed), tuple(renamed.values())))
            for path in self._names.get(name, ()):
                fields.pop(path, None)
            fields |= {renamed[path]: stored.fields[path] for path in leaves}
            original = stored.unflatten({path: path for path in stored.fields})[source]
            tree = {**tree, name: map_leaves(lambda path, new=renamed: new[path], original)}
        self.schema = Schema.named(fields, tree) if not recipe.trivial else stored

    def select(self, keys: Keys, links: Links, finals_stop: int, chance: Chance) -> Selection:
        """What the entries that start at `keys` are made of; in the turn of their draw."""
        followed = Followed(links, self._following.needs_next, self._following.depth)
        entries = self._item.entries(keys, followed, chance)
        blank = None
        if entries.real is not None and entries.blank:
            blank = _positions(~entries.real)
        gathers = [Gather(self._plain, self._plain, entries.rows.reshape(-1), entries.rows.shape, blank=blank)]
        if self._from_last:
            gathers.append(Gather(self._from_last, self._from_last, entries.last, entries.last.shape))
        nexts = entries.last if entries.rows.ndim == 1 else entries.rows
        stacks: dict[tuple[int, int], tuple[Keys, NDArray[np.bool_]]] = {}
        for derived, fields, paths in self._derived:
            of = nexts if isinstance(derived, Next) else entries.rows
            made = self._gather(derived, of, links, finals_stop, blank, stacks)
            gathers.append(Gather(fields, paths, *made))
        gathers = [gather for gather in gathers if gather.fields]
        if not isinstance(self._item, NStep):
            shape = entries.rows.shape if entries.rows.ndim == 2 else None
            return Selection(tuple(gathers), mask=entries.real, shape=shape)
        made, returns = self._returns(self._item, entries, links)
        return Selection(tuple(gathers), returns, made)

    def select_rows(self, keys: Keys) -> Selection:
        """The same for a trivial recipe."""
        return Selection((Gather(self._plain, self._plain, keys, keys.shape),))

    def _gather(
        self,
        derived: Derived,
        of: Keys,
        links: Links,
        finals_stop: int,
        blank: Keys | None,
        stacks: dict[tuple[int, int], tuple[Keys, NDArray[np.bool_]]],
    ) -> tuple[Keys, tuple[int, ...], tuple[Keys, Keys] | None, Keys | None]:
        """What a derived leaf of rows `of`, (B,) or (B, T), is read from: a gather's keys, axes, ended and blank."""
        rows = of.reshape(-1)
        stack = self._stack_of(derived)
        if isinstance(stack, Stack):
            known = (stack.depth, id(of))
            if known not in stacks:
                path, count = links.walk_back(rows, stack.depth)
                stacks[known] = path[:, ::-1], np.arange(stack.depth, 0, -1) > count[:, None]
            frames, missing = stacks[known]
            depth, axes = stack.depth, (*of.shape, stack.depth)
        else:
            frames, missing, depth, axes = rows[:, None], None, 1, of.shape
        ended = None
        if isinstance(derived, Next):
            onward = links.onward(rows)
            over = onward == 0
            after = rows + np.maximum(onward, 0)
            shifted = np.concatenate([frames[:, 1:], after[:, None]], axis=1)
            # Nothing came after a row that terminated without a final: its own stack stays.
            frames = np.where(over[:, None], frames, shifted) if depth > 1 and np.count_nonzero(over) else shifted
            if missing is not None:
                moved = np.concatenate([missing[:, 1:], np.zeros((len(rows), 1), np.bool_)], axis=1)
                missing = np.where(over[:, None], missing, moved)
            (where,) = np.nonzero(onward < 0)
            if len(where):
                ended = (where * depth + depth - 1, links.final_numbers(onward[where], finals_stop))
        zeros = None if blank is None else (blank[:, None] * depth + np.arange(depth)).reshape(-1)
        if missing is not None and isinstance(stack, Stack) and stack.pad == "zero":
            unmade = np.flatnonzero(missing)
            zeros = unmade if zeros is None else np.union1d(zeros, unmade)
        return frames.reshape(-1), axes, ended, zeros if zeros is not None and len(zeros) else None

    def _returns(self, item: NStep, entries: Entries, links: Links) -> tuple[dict[str, NDArray[Any]], Returns]:
        assert entries.chain is not None
        assert entries.steps is not None
        discount = self._discounts.take(entries.steps)
        discount[links.terminated(entries.last)] = 0.0
        made = {DISCOUNT: discount, STEPS: entries.steps.astype(np.int32)}
        weight = np.where(np.arange(item.most)[:, None] < entries.steps, self._powers[:-1, None], 0.0)
        return made, Returns(item.reward, entries.chain.T.reshape(-1), weight)

    def _n_step(self, item: NStep, stored: Schema) -> dict[str, Field]:
        """Sorts the leaves by the row that they come from. Returns the fields that an entry has beside the stored ones."""
        reward = stored.fields.get(item.reward)
        if reward is None or (reward.dtype.kind not in "biuf" and reward.dtype.name != "bfloat16"):
            got = f"none of the stored leaves ({', '.join(stored.fields)})" if reward is None else str(reward)
            raise SchemaError(
                f"NStep(reward={item.reward!r}): it is {got}; expected a leaf of real numbers, at the top level"
            )
        taken = [name for name in (DISCOUNT, STEPS) if name in self._names]
        taken += [name for name in (item.reward, DISCOUNT, STEPS) if name in self._recipe.derive]
        if taken:
            raise SchemaError(
                f"NStep makes leaves {item.reward!r}, {DISCOUNT!r} and {STEPS!r}, and there is another {taken[0]!r}: rename that one"
            )
        last = [name for name in item.from_last if name in self._names and name not in self._recipe.derive]
        bootstraps = [name for name in last if name not in (TERMINATED, TRUNCATED)]
        if not bootstraps and not self._following.needs_next:
            raise SchemaError(
                "NStep needs to know what to bootstrap from: push 'next_obs' with every row, name other leaves in from_last=, or derive it: "
                "derive={'next_obs': conduit.Next('obs')}"
            )
        self._powers = item.gamma ** np.arange(item.most + 1.0)
        self._discounts = self._powers.astype(np.float32)
        own = [path for path in self._plain if path != item.reward]
        from_last = {path for name in last for path in self._names[name]}
        self._from_last = tuple(path for path in own if path in from_last)
        self._plain = tuple(path for path in own if path not in from_last)
        return {
            item.reward: Field(reward.shape, return_dtype(reward.dtype)),
            DISCOUNT: Field((), np.dtype(np.float32)),
            STEPS: Field((), np.dtype(np.int32)),
        }

    def _stack_of(self, derived: Derived) -> Derived:
        """The stack that a next is of; else the derived leaf itself."""
        stack = self._recipe.derive.get(derived.source) if isinstance(derived, Next) else None
        return stack if isinstance(stack, Stack) else derived


def return_dtype(reward: np.dtype[Any]) -> np.dtype[Any]:
    """Of sums of rewards: the reward's own if it is a float, else float32."""
    return np.dtype(np.float32) if reward.kind in "biu" else reward


def _check_group(item: Group, stored: Schema) -> None:
    """SchemaError unless rows say which group they are of."""
    field = stored.fields.get(item.by)
    if field is None or field.shape or field.dtype.kind not in "iu":
        got = f"none of the stored leaves ({', '.join(stored.fields)})" if field is None else str(field)
        raise SchemaError(
            f"Group(by={item.by!r}): it is {got}; expected a leaf of whole numbers, one a row, such as int64[]"
        )


def _positions(mask: NDArray[np.bool_]) -> Keys | None:
    """Where the flattened mask is set; None where it isn't at all."""
    found = np.flatnonzero(mask)
    return found if len(found) else None
