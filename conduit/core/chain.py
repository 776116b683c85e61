"""The ingestion hooks in their order, and what they make of what was pushed (paper §4.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import optree

from conduit.core.declared import Declared
from conduit.core.episodes import (
    End,
    Fragment,
    Lanes,
    Rows,
    as_fragment,
    concatenate,
    join_fragments,
    split_lanes,
)
from conduit.core.experience import Schema, Tree, map_leaves
from conduit.core.hook import Hook, count_rows, run_hook
from conduit.core.staging import Cut, Group
from conduit.errors import HookError, SchemaError

_TOGETHER_BYTES = 1 << 17
"""To copy more than that takes longer than the writes that it saves."""


class IngestionChain:
    """The ingestion hooks, in three parts: the row-scope prefix, which runs on rows as they come; from the first barrier
    on, what runs once on a whole unit; and from the first trajectory-scope hook on, what runs on whole fragments.

    `finals_of`: the top-level leaves whose finals are stored: the row-scope prefix works on those as well. `declared`: what may grow.
    Rows of different widths are never put together for a row-scope hook: a group is split where they grow. A trajectory that goes on
    while rows grow comes filled up with zeros to its widest row, and counts as that wide from then on; so does an on-policy unit, of
    which actors that grow at once may bring some rows that are narrower."""

    def __init__(
        self,
        hooks: Sequence[Hook],
        on_policy: bool,
        finals_of: Sequence[str] = (),
        declared: Declared | None = None,
    ) -> None:
        self._declared = declared
        self._form: Schema | None = None
        """Of the rows that are held, where rows may grow."""
        barrier = _first(hooks, lambda hook: hook.per != "row")
        trajectory = _first(hooks, lambda hook: hook.per == "trajectory")
        self._prefix = tuple(hooks[:barrier])
        self._unit = tuple(hooks[barrier:trajectory])
        self._trajectory = tuple(hooks[trajectory:])
        self._finals_of = tuple(finals_of)
        self.on_policy = on_policy
        self._lanes = Lanes()
        self._held: list[Rows] = []
        _check_trajectories_survive(hooks)
        if on_policy:
            _check_rows_survive(hooks)

    @property
    def has_hooks(self) -> bool:
        return bool(self._prefix) or self.has_barrier

    @property
    def has_barrier(self) -> bool:
        """Whether some hook sees more than single rows."""
        return bool(self._unit or self._trajectory)

    @property
    def needs_edges(self) -> bool:
        """Whether some hook must know how each lane goes on."""
        return bool(self._trajectory)

    def state(self) -> dict[str, Any]:
        """What is held of rows that came, for a checkpoint. It refers to rows, which nobody changes."""
        return {"lanes": self._lanes.state(), "held": list(self._held)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._lanes.load(state["lanes"])
        self._held = list(state["held"])
        held = [*self._held, *(piece for pieces in self._lanes.state().values() for piece in pieces)]
        if held and self._declared is not None:
            self._form = Schema.infer(held[0].data, "a checkpoint's rows")

    @property
    def held_rows(self) -> int:
        """How many rows that came are held until others do."""
        return len(self._lanes) + sum(len(rows) for rows in self._held)

    def process(self, group: Group, apart: bool = False) -> list[Rows | Cut]:
        """What is to be stored of a group, and which lanes are cut, in order. Groups must come in the order in which they
        were sealed. `apart`: one write costs little, so wide rows that no hook sees aren't copied to be together."""
        if not self.has_hooks and (len(group.units) == 1 or (apart and _size(group.units) > _TOGETHER_BYTES)):
            return group.units
        for unit in group.units if self._finals_of else ():
            if isinstance(unit, Rows) and type(unit.data) is not dict:
                raise SchemaError(
                    f"derived leaves need rows that are a dict of names at the top; got {type(unit.data).__name__}"
                )
        if not self.has_barrier:
            return [unit if isinstance(unit, Cut) else self._run_prefix(unit) for unit in self._joined(group.units)]
        if self.on_policy:
            return [*self._process_fraction(group)]
        return [stored for unit in group.units for stored in self._process_unit(unit)]

    def _process_unit(self, unit: Rows | Cut) -> list[Rows | Cut]:
        if isinstance(unit, Cut):
            # Where whole fragments are stored, they bring their ends.
            return [*self._finish(self._lanes.cut(unit.lanes))] if self._trajectory else [unit]
        before = self._run_prefix(unit)
        rows = _run_on_rows(self._unit, before)
        self._check_finals(before, rows)
        return [*self._finish(self._lanes.add(self._formed(rows)))] if self._trajectory else [rows]

    def _run_prefix(self, rows: Rows) -> Rows:
        """The row-scope prefix on rows, and on the finals that are stored with them: rows like those they end, but for what the
        final says."""
        processed = _run_on_rows(self._prefix, rows)
        if not self._prefix or not self._finals_of or not rows.finals or processed.finals is None:
            return processed
        places = sorted(rows.finals)
        finals = [rows.finals[place] for place in places]
        ended = map_leaves(lambda leaf: leaf[places], rows.data)
        # Whole leaves or subtrees that every final has; a hook may make of them what a next is derived from.
        told = {
            name: map_leaves(lambda *leaves: np.stack(leaves), *(final[name] for final in finals))
            for name, leaf in ended.items()
            if all(name in final and _alike(final[name], leaf) for final in finals)
        }
        data = _run_on_rows(
            self._prefix, replace(rows, data={**ended, **told}, lane=rows.lane[places], schema=None)
        ).data
        # A leaf that was pushed and that the final lacks isn't known of it, whatever the hooks made of the row's.
        made = {name: data[name] for name in self._finals_of if name in data and (name in told or name not in ended)}
        return replace(
            processed,
            finals={
                place: {**final, **map_leaves(lambda leaf, i=i: leaf[i], made)}
                for i, (place, final) in enumerate(zip(places, finals, strict=True))
            },
        )

    def _joined(self, units: Sequence[Rows | Cut]) -> list[Rows | Cut]:
        """The units with neighbouring rows put together, but for rows of different widths."""
        runs = [list(run) for _, run in groupby(units, lambda unit: self._kind(unit))]
        return [
            unit
            for run in runs
            for unit in (
                run if isinstance(run[0], Cut) else [concatenate([unit for unit in run if isinstance(unit, Rows)])]
            )
        ]

    def _kind(self, unit: Rows | Cut) -> object:
        """The same for units that go together."""
        if isinstance(unit, Cut) or self._declared is None:
            return type(unit)
        return [leaf.shape[1:] for leaf in optree.tree_leaves(unit.data)]

    def _formed(self, rows: Rows) -> Rows:
        """`rows`, which are about to be held with others, as wide as these: or these become as wide as `rows`."""
        if self._declared is None:
            return rows
        schema = rows.schema or Schema.infer(rows.data, "ingestion hooks")
        form = schema if self._form is None or not self.held_rows else self._declared.widest(schema, self._form)
        if self._form is not None and self._declared.widest(self._form, form) is not self._form:
            self._held = [self._filled(each, form) for each in self._held]
            lanes = self._lanes.state().items()
            self._lanes.load({lane: [self._filled(each, form) for each in pieces] for lane, pieces in lanes})
        self._form = form
        return rows if form is schema else self._filled(rows, form)

    def _filled(self, rows: Rows, form: Schema) -> Rows:
        assert self._declared is not None
        schema = rows.schema or Schema.infer(rows.data, "ingestion hooks")
        data = schema.unflatten(self._declared.padded(schema.flatten(rows.data, "ingestion hooks"), form))
        finals = rows.finals and {
            place: self._declared.padded_final(final, schema, form) for place, final in rows.finals.items()
        }
        return replace(rows, data=data, finals=finals, schema=None)

    def _check_finals(self, before: Rows, after: Rows) -> None:
        """A unit-scope hook can't be run on finals, which are no part of the unit."""
        for name in self._finals_of if after is not before else ():
            old, new = (optree.tree_leaves(rows.data.get(name)) for rows in (before, after))
            if [id(leaf) for leaf in old] != [id(leaf) for leaf in new]:
                raise HookError(
                    f"an ingestion hook with per='unit' rewrites {name!r}, of which a next is derived: what it would make of a final "
                    "isn't known. Declare it per='row' if it may be run on any rows, or rewrite the leaf in a delivery hook"
                )

    def _process_fraction(self, group: Group) -> list[Rows]:
        for each in self._joined(group.units):
            if isinstance(each, Cut):
                self._cut_held(each.lanes)
            else:
                # First, since it may make other rows of those that are held.
                rows = self._formed(_run_on_rows(self._prefix, each))
                self._held.append(rows)
        if not group.closes:
            return []
        held, self._held = self._held, []
        unit = _run_on_rows(self._unit, concatenate(held))
        if not self._trajectory:
            return [unit]
        return self._finish(self._lanes.add(unit) + self._lanes.take_open(group.bootstrap))

    def _cut_held(self, lanes: Sequence[int]) -> None:
        """The last rows held of these lanes, where they are open, end here: what comes in the lanes from now on is another actor's."""
        for lane in lanes:
            for place in reversed(range(len(self._held))):
                rows = self._held[place]
                mine = np.flatnonzero(rows.lane == lane)
                if len(mine):
                    if rows.end[mine[-1]] == End.OPEN:
                        self._held[place] = replace(rows, end=rows.end.copy())
                        self._held[place].end[mine[-1]] = End.CUT
                    break

    def _check_fragments(self, hook: Hook, given: list[Fragment], made: list[Fragment]) -> None:
        """A hook that makes something else of a leaf that a next is derived from must do so with the final as well."""
        before = {(fragment.lane, len(fragment)): fragment for fragment in given if fragment.final is not None}
        for fragment in made if self._finals_of else ():
            old = before.get((fragment.lane, len(fragment)))
            if old is None or old.final is not fragment.final:
                continue
            for name in self._finals_of:
                leaves = zip(*(optree.tree_leaves(each.rows.get(name)) for each in (old, fragment)), strict=False)
                if any(a is not b and not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc") for a, b in leaves):
                    raise HookError(
                        f"ingestion hook {hook.name!r} rewrites {name!r}, of which a next is derived, and hands on the final that it "
                        "was given: change `Fragment.final` as well"
                    )

    def _finish(self, fragments: list[Fragment]) -> list[Rows]:
        if not fragments:
            return []
        unit: Rows | list[Fragment] = fragments
        before = fragments
        for hook in self._trajectory:
            if hook.per == "trajectory":
                given = _as_fragments(unit)
                unit = _run_on_fragments(hook, given)
                self._check_fragments(hook, given, unit)
                if not unit:
                    return []
            else:
                unit = _run_on_rows((hook,), _as_rows(unit))
        return [_owned(_as_rows(unit), [fragment.rows for fragment in before])]


def _size(units: Sequence[Rows | Cut]) -> int:
    """In bytes."""
    return sum(leaf.nbytes for unit in units if isinstance(unit, Rows) for leaf in optree.tree_leaves(unit.data))


def _alike(one: Tree, other: Tree) -> bool:
    return optree.tree_structure(one) == optree.tree_structure(other)


def _as_rows(unit: Rows | list[Fragment]) -> Rows:
    return unit if isinstance(unit, Rows) else join_fragments(unit)


def _as_fragments(unit: Rows | list[Fragment]) -> list[Fragment]:
    if isinstance(unit, Rows):
        return [as_fragment(run) for _, run in split_lanes(unit)]
    return unit


def _first(hooks: Sequence[Hook], of: Callable[[Hook], bool]) -> int:
    return next((i for i, hook in enumerate(hooks) if of(hook)), len(hooks))


def _run_on_rows(hooks: Sequence[Hook], rows: Rows) -> Rows:
    if not hooks:
        return rows
    before = rows
    for hook in hooks:
        rows = _run_one(hook, rows)
    return _owned(rows, before.data)


def _owned(rows: Rows, ours: Tree) -> Rows:
    """`rows` with copies of all leaves but `ours`: what a hook made may be its own scratch array, which it fills again."""
    known = {id(leaf) for leaf in optree.tree_leaves(ours)}
    if all(id(leaf) in known for leaf in optree.tree_leaves(rows.data)):
        return rows
    return replace(rows, data=map_leaves(lambda leaf: leaf if id(leaf) in known else np.array(leaf), rows.data))


def _run_one(hook: Hook, rows: Rows) -> Rows:
    data = run_hook(hook, rows.data)
    count = count_rows(data, hook)
    if hook.rows == "same":
        if count != len(rows):
            raise HookError(
                f"{hook.stage} hook {hook.name!r} got {len(rows)} rows and wrote {count}; it declares rows='same'. "
                "Declare rows='any' if it may drop or add rows"
            )
        return replace(rows, data=data, schema=None)
    # Which row is which is lost, even if there are as many: what all rows had in common is kept.
    return Rows(
        data=data,
        lane=np.full(count, -1, np.int64),
        end=np.zeros(count, np.uint8),
        version=np.full(count, rows.versions.max(initial=0), np.int64),
    )


def _run_on_fragments(hook: Hook, fragments: list[Fragment]) -> list[Fragment]:
    written = run_hook(hook, fragments)
    if not isinstance(written, list | tuple) or not all(isinstance(each, Fragment) for each in written):
        raise HookError(
            f"ingestion hook {hook.name!r} wrote {type(written).__name__}; expected a list of Fragment, as read() gave"
        )
    got, wrote = sum(map(len, fragments)), 0
    checked = []
    for fragment in written:
        count = count_rows(fragment.rows, hook)
        wrote += count
        if count != len(fragment):
            fragment = replace(fragment, version=np.full(count, fragment.version.max(initial=0)), priority=None)
        checked.append(fragment)
    if hook.rows == "same" and ([len(f) for f in checked] != [len(f) for f in fragments]):
        raise HookError(
            f"ingestion hook {hook.name!r} got {len(fragments)} fragments with {got} rows and wrote {len(checked)} with {wrote}; "
            "it declares rows='same', which keeps the fragments and their lengths. Declare rows='any' if it may change them"
        )
    return [fragment for fragment in checked if len(fragment)]


def _check_rows_survive(hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        if hook.rows != "same":
            raise HookError(
                f"ingestion hook {hook.name!r} declares rows={hook.rows!r}: an on-policy iteration delivers exactly its "
                "rollout_unit rows, so its ingestion hooks must keep them (rows='same')"
            )


def _check_trajectories_survive(hooks: Sequence[Hook]) -> None:
    loses: Hook | None = None
    for hook in hooks:
        if hook.per == "trajectory" and loses is not None:
            raise HookError(
                f"ingestion hook {hook.name!r} looks at trajectories, but {loses.name!r} before it may change which rows there "
                "are (rows='any'): put it first"
            )
        if hook.rows == "any" and hook.per != "trajectory":
            loses = hook
