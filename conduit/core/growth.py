"""Rows that grow: what becomes of the rows that are there when wider ones come, and what of a batch is real then.

Wider rows that are pushed make the store wider before they are taken, in the thread that pushes them: so where there is no room for
such, whoever pushed hears of it, and the store goes on as it was. What hooks make wider is known only in its group's turn, and so
are rows that pass others at the very moment of growth: then the store becomes wider in that turn.

With grow="pad" the rows that are there are moved into the wider form, filled up with zeros. With grow="replace" the new rows are held
back until there are enough to draw from; then all that are there leave, and the held ones are published in their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.buffer import ExperienceBuffer
from conduit.core.declared import Declared
from conduit.core.episodes import Rows
from conduit.core.experience import Schema, map_leaves
from conduit.core.migration import Migrator, why_ingesting
from conduit.core.placement import Placement
from conduit.core.recipe import Selection
from conduit.core.staging import Cut
from conduit.core.table import LiveTable
from conduit.core.versions import Extents
from conduit.errors import CapacityError, SchemaError, UnitError

Keys = NDArray[np.int64]

_STORED = "stored rows"


@dataclass(frozen=True, slots=True)
class Real:
    """Of one leaf of a batch: how long the growing axis was when each row came (of a sum, the longest), and which axis of the row that is."""

    extent: NDArray[np.int64]
    axis: int
    axes: int


class Growth:
    """One store's rows that are declared. All calls but `widen` are in a turn of the store's Order."""

    def __init__(
        self,
        *,
        declared: Declared,
        buffer: ExperienceBuffer,
        migrator: Migrator,
        tables: Sequence[LiveTable],
        least: int,
        has_hooks: bool,
        why_not_now: Callable[[], str] | None,
    ) -> None:
        """`tables`: all that is told which rows leave. `least`: so many rows are held back before they replace others. `why_not_now`: on
        policy, why rows can't grow now, or empty; None where they may at any time."""
        self.declared = declared
        self._buffer = buffer
        self._migrator = migrator
        self._tables = tables
        self._least = least
        self._has_hooks = has_hooks
        self._why_not_now = why_not_now
        self._asked: Schema | None = None
        """The widest that was pushed, where rows are stored as they are pushed."""
        self._extents = Extents()
        self._held: list[Rows | Cut] = []
        self._held_form: Schema | None = None
        """Of what is held and stored together, for which there was room."""
        self.held_rows = 0
        """How many rows are held back until there are enough to replace those that are there."""
        self.refused: CapacityError | None = None
        """Why rows that were taken couldn't be stored, of which nothing has been written."""
        self._lock = threading.Lock()

    def widen(self, schema: Schema, timeout_s: float) -> Schema:
        """Rows of this schema, wider than any before, are about to be pushed by this thread: returns when there is room for such, what the
        rows' schema is by then. UnitError where an iteration must end first; CapacityError, WaitTimeout or MigrationError where it can't
        be: the store is as it was then. `timeout_s`: of each wait. On-policy, nobody else's rows are taken meanwhile."""
        why = "" if self._why_not_now is None else self._why_not_now()
        if why:
            raise UnitError(f"push: rows grew, and {why}")
        if self._has_hooks:
            return schema
        order, halt = self._migrator.order, self._migrator.halt
        # What was pushed before is there, or none of it is: it doesn't depend on how far the operator's thread is.
        with order.serve(order.enter(), halt.deadline_s(timeout_s), why_ingesting):
            stored = self._buffer.schema
        if stored is not None and self.declared.widest(stored, schema) is not stored:
            instead = self._why_not_now is not None or self._replaces(stored, schema)
            placement = self._buffer.place(schema, instead)
            if instead:
                self._buffer.check_room(schema, placement)
            else:
                self._migrator.migrate(placement, timeout_s, schema=schema)
                stored = self._buffer.schema
        with self._lock:
            self._asked = schema if self._asked is None else self.declared.widest(schema, self._asked)
        # The very same, where it is the same: rows of it are known at a glance.
        return stored if stored is not None and self.declared.widths(stored) == self.declared.widths(schema) else schema

    def fitted(self, units: Sequence[Rows | Cut]) -> Iterator[Rows | Cut]:
        """What is to be stored now of what comes, as wide as what is there, one after the other: each is to be stored before the next is
        asked for."""
        self.refused = None
        for unit in units:
            if self._held:
                self._hold(unit)
                yield from self._replaced()
            elif isinstance(unit, Cut):
                yield unit
            elif len(unit):
                yield from self._fitted(unit)

    def real(self, selection: Selection) -> dict[str, Real]:
        """Of each leaf of a batch that grows, by its path there, what of it is real."""
        found = {}
        for gather in selection.gathers:
            for stored, path in zip(gather.fields, gather.paths, strict=True):
                if stored not in self._extents:
                    continue
                extent = self._extents.of(stored, self._buffer.keys_of(gather.keys))
                if gather.blank is not None:
                    extent[gather.blank] = 0
                found[path] = self._real(stored, extent.reshape(gather.axes))
        summed = selection.returns
        if summed is not None and summed.path in self._extents:
            extent = self._extents.of(summed.path, self._buffer.keys_of(summed.keys)).reshape(summed.weight.shape)
            # The widest of the rewards that count; the first always does.
            extent[1:][summed.weight[1:] == 0.0] = 0
            found[summed.path] = self._real(summed.path, extent.max(axis=0))
        return found

    def extents_of(self, keys: Keys) -> dict[str, NDArray[np.int64]]:
        """How wide live rows came, (n,), by the path of each stored leaf that grows. `keys`: insertion numbers."""
        return {path: self._extents.of(path, keys) for path in self.declared.axis if path in self._extents}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"extents": self._extents.state(), "held": list(self._held)}

    def check(self, pushed: Schema | None, stored: Schema | None) -> None:
        """SchemaError where a checkpoint's rows aren't as they are declared by now."""
        for schema in (stored, None if self._has_hooks else pushed):
            if schema is not None:
                self.declared.check(schema, "restore: the checkpoint's rows")

    def load(self, state: Mapping[str, Any] | None, pushed: Schema | None) -> None:
        """Goes on from what was saved, None where nothing was declared then. `pushed`: the schema of what was pushed."""
        buffer = self._buffer
        first = buffer.window.first if buffer.in_order else 0
        if state is not None:
            self._extents.load(state["extents"], first)
            self._held = list(state["held"])
            held = [unit for unit in self._held if isinstance(unit, Rows)]
            self.held_rows, self._held_form = sum(map(len, held)), self._joint(held) if held else None
        if buffer.schema is not None:
            widths = self.declared.widths(buffer.schema)
            # What may grow only since is as wide in all rows.
            self._extents.append(first, {path: width for path, width in widths.items() if path not in self._extents})
        self._asked = None if self._has_hooks else pushed

    def _real(self, stored: str, extent: NDArray[np.int64]) -> Real:
        return Real(extent, self.declared.axis[stored], len(self.declared.fields[stored].shape))

    def _fitted(self, rows: Rows) -> Iterator[Rows | Cut]:
        stored, schema = self._buffer.schema, _schema_of(rows)
        target = schema
        # What was pushed meanwhile is to come: its form needn't wait for it where no row is there.
        if self._asked is not None and (stored is None or self._why_not_now is not None):
            target = self.declared.widest(schema, self._asked)
        if stored is None:
            self.declared.check(schema, _STORED)
        elif self.declared.widest(stored, target) is stored:
            target = stored
        else:
            target = self.declared.widest(target, stored)
            if self._why_not_now is not None and len(self._buffer):
                raise SchemaError(
                    f"{_STORED}: hooks made rows of {schema}, wider than those that this iteration has already: {stored}; expected "
                    "rows to grow with the first of an iteration"
                )
            if len(self._buffer) and self._replaces(stored, target):
                self._hold(rows)
                yield from self._replaced()
                return
            self._grow(target)
        yield self._told(rows, schema, target)

    def _grow(self, schema: Schema) -> None:
        instead = not len(self._buffer)
        change = self._migrator.remake if instead else self._migrator.migrate_in_turn
        try:
            change(self._buffer.place(schema, instead), schema)
        except CapacityError as error:
            self.refused = error
            raise

    def _told(self, rows: Rows, schema: Schema, target: Schema) -> Rows:
        """Rows of `schema`, filled up to `target`, which are to be stored next."""
        buffer, widths = self._buffer, self.declared.widths(schema)
        if buffer.in_order:
            self._extents.evict(buffer.window.first)
        self._extents.append(buffer.inserted, widths)
        if widths == self.declared.widths(target):
            return rows
        leaves = self.declared.padded(schema.flatten(rows.data, _STORED), target)
        finals = None
        if rows.finals is not None:
            finals = {place: self.declared.padded_final(final, schema, target) for place, final in rows.finals.items()}
        return replace(rows, data=target.unflatten(leaves), finals=finals, schema=None)

    def _replaces(self, old: Schema, new: Schema) -> bool:
        """Whether rows of `new` let those of `old` leave."""
        was, becomes = self.declared.widths(old), self.declared.widths(new)
        return any(
            self.declared.fields[path].grow == "replace" and width != was.get(path) for path, width in becomes.items()
        )

    def _hold(self, unit: Rows | Cut) -> None:
        if isinstance(unit, Rows):
            form, before = self._joint([unit], self._held_form), self._held_form
            if before is None or self.declared.widths(form) != self.declared.widths(before):
                self._roomy(form)
                self._held_form = form
            # Where rows are written at once, they are the caller's own arrays.
            unit = replace(unit, data=map_leaves(np.copy, unit.data), lent=False)
            self.held_rows += len(unit)
        self._held.append(unit)

    def _replaced(self) -> Iterator[Rows | Cut]:
        """What is held, once there is enough to take the place of all that is there."""
        target = self._held_form
        if self.held_rows < self._least or target is None:
            return
        try:
            placement = self._roomy(target)
        except CapacityError:
            # There was room when the first of them came. The others are held on.
            last = self._held.pop()
            self.held_rows -= len(last) if isinstance(last, Rows) else 0
            raise
        held, self._held, self._held_form, self.held_rows = self._held, [], None, 0
        self._dismiss()
        self._migrator.remake(placement, target)
        for unit in held:
            yield unit if isinstance(unit, Cut) else self._told(unit, _schema_of(unit), target)

    def _joint(self, rows: Sequence[Rows], form: Schema | None = None) -> Schema:
        """The form of these rows and those of `form`, by default those that are stored."""
        target = form or self._buffer.schema
        assert target is not None
        for each in rows:
            target = self.declared.widest(_schema_of(each), target)
        return target

    def _roomy(self, form: Schema) -> Placement:
        """Where rows of this form would go in place of those that are there. CapacityError where there is no room: what is being held
        is refused then."""
        try:
            placement = self._buffer.place(form, True)
            self._buffer.check_room(form, placement)
        except CapacityError as error:
            self.refused = error
            raise
        return placement

    def _dismiss(self) -> None:
        """All live rows leave."""
        buffer = self._buffer
        keys = buffer.keys_from(0, buffer.capacity)
        rows = buffer.find(keys, int(keys[0]))[0] if len(keys) else keys
        for table in self._tables:
            table.exclude(rows if buffer.starts is None else rows[buffer.starts.at(rows % buffer.capacity)])
        if buffer.in_order:
            buffer.drop()
        else:
            buffer.leave(rows)


def _schema_of(rows: Rows) -> Schema:
    return rows.schema or Schema.infer(rows.data, _STORED)
