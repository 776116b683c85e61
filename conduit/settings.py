"""What a store was made with, as a value that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from conduit.core.backend import Backend
from conduit.core.declared import Declared
from conduit.core.derived import Derived, Next, Stack
from conduit.core.experience import Field
from conduit.core.items import Group, Item, NStep, Row, Sequence, Trajectory
from conduit.core.limiter import Limiter, MinSize, Queue, SampleToInsertRatio
from conduit.core.ordered import Fifo, Lifo, MaxHeap, MinHeap
from conduit.core.passes import WithoutReplacement
from conduit.core.placement import Bytes
from conduit.core.plain import Packer
from conduit.core.prioritized import Prioritized
from conduit.core.rollout import WhenFull
from conduit.core.sampling import Sampling, Uniform
from conduit.core.schedule import Auto, Schedule
from conduit.core.semantics import Drawing, Semantics, semantics_of
from conduit.core.spread import Recency, Stratified
from conduit.core.table import MAIN, Table
from conduit.errors import CheckpointError, SettingError

_SAMPLERS = (Uniform, Prioritized, Fifo, Lifo, MaxHeap, MinHeap, WithoutReplacement, Recency, Stratified)
_LIMITERS = (MinSize, SampleToInsertRatio, Queue)
_ITEMS = (Row, NStep, Sequence, Trajectory, Group)
_PACKER = Packer((*_SAMPLERS, *_LIMITERS, *_ITEMS, Next, Stack, Schedule, Auto))
_OWN = "own"
"""Marks what is a class or function of the user's."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of `Store`, but for those that say where and when. `backend` None: one of the user's own."""

    backend: str | None
    mode: Literal["off_policy", "on_policy", "bounded"]
    batch_size: int
    capacity: int | None
    rollout_unit: int | None
    epochs: int | None
    max_staleness: int | None
    sampler: Sampling | None
    max_times_sampled: int | None
    limiter: Limiter | None
    tables: Mapping[str, Table] | None
    remover: Sampling | None
    item: Item | None
    derive: Mapping[str, Derived] | None
    seed: int
    schedule: Schedule | Auto | None
    exact: bool
    inbox_units: int | None
    when_full: WhenFull
    timeout_s: float
    budgets: Mapping[str, Bytes] | None
    fields: Mapping[str, Field] | None = None

    @property
    def declared(self) -> Declared | None:
        """What `fields` says; None where nothing. SettingError names a declaration that can't be."""
        return None if self.fields is None else Declared(self.fields)

    def semantics(self) -> Semantics:
        """What they mean. SettingError names one that can't be, is missing, or not of the mode."""
        return semantics_of(
            self.mode,
            capacity=self.capacity,
            batch_size=self.batch_size,
            rollout_unit=self.rollout_unit,
            epochs=self.epochs,
            max_staleness=self.max_staleness,
            drawing=Drawing(self.sampler, self.max_times_sampled, self.limiter, self.tables, self.remover),
            exact=self.exact,
        )

    def pack(self) -> dict[str, Any]:
        """As JSON. What is the user's own is only named."""
        apart = ("tables", "fields")
        packed = {each.name: _packed(getattr(self, each.name)) for each in fields(self) if each.name not in apart}
        declared = self.declared
        packed["fields"] = declared and [
            [path, list(field.shape), str(field.dtype), field.grow] for path, field in declared.fields.items()
        ]
        packed["tables"] = (
            None if self.tables is None else {name: _of_table(each) for name, each in self.tables.items()}
        )
        return packed

    @classmethod
    def unpack(
        cls,
        packed: Mapping[str, Any],
        where: str,
        *,
        backend: str | Backend[Any] | None,
        sampler: Sampling | None,
        limiter: Limiter | None,
        tables: Mapping[str, Table] | None,
        declared: Mapping[str, Field] | None,
    ) -> Settings:
        """What `pack` said, with what is given instead (`declared`: of `fields`). SettingError names what must be given, or can't be."""
        given = {"sampler": sampler, "limiter": limiter}
        told = {
            name: given[name] if given.get(name) is not None else _unpacked(value, f"restore({where!r}): {name}")
            for name, value in packed.items()
            if name not in ("tables", "fields")
        }
        before = {
            path: Field(tuple(shape), np.dtype(dtype), grow) for path, shape, dtype, grow in packed.get("fields") or ()
        }
        told["fields"] = declared if declared is not None else before or None
        if packed["backend"] is None and backend is None:
            raise SettingError(f"restore({where!r}): the store that was saved had a backend of its own; give backend=")
        saved = packed["tables"] or {}
        made = tables
        if made is None:
            made = {name: _to_table(each, f"restore({where!r}): tables[{name!r}]") for name, each in saved.items()}
        settings = cls(**told, tables=None if made == {} else made)
        # First what no store can be made with, then what can't go on from what was saved.
        settings.semantics()
        _check_growing(Declared(before), settings.declared or Declared({}), where)
        if set(made) != set(saved):
            raise SettingError(
                f"restore(tables={sorted(made)}): the checkpoint's tables beside {MAIN!r} are {sorted(saved)}; expected the same names"
            )
        _check_kind("sampler", packed["sampler"], settings.sampler, where)
        for name, each in saved.items():
            _check_kind(f"tables[{name!r}].sampler", each["sampler"], made[name].sampler, where)
            _check_times(name, each["max_times_sampled"], made[name].max_times_sampled, where)
        return settings


def _check_kind(name: str, saved: Any, new: Sampling | None, where: str) -> None:
    """SettingError where a sampler is to go on from what one of another class remembered."""
    kind = "Uniform" if saved is None else saved[_OWN][0] if _OWN in saved else saved["kind"][0]
    if type(new or Uniform()).__name__ != kind:
        raise SettingError(
            f"restore({where!r}): {name} was a {kind}, and {new} can't go on from what it remembered; expected a {kind}, perhaps with "
            "other settings"
        )


def _check_growing(saved: Declared, new: Declared, where: str) -> None:
    """SettingError where a leaf whose rows may have come in several lengths could not be told from one whose rows didn't."""
    for path, axis in saved.axis.items():
        if new.axis.get(path) != axis:
            raise SettingError(
                f"restore({where!r}, fields=…): leaf {path!r} could grow along axis {axis} when it was saved ({saved.fields[path]}), so its rows "
                f"may have come in several lengths; got {new.fields.get(path, 'nothing of it')}. Expected a name for that axis, as in "
                f"conduit.Field({saved.fields[path].shape}, {str(saved.fields[path].dtype)!r}, grow='pad'), or grow='replace'"
            )


def _check_times(name: str, saved: int | None, new: int | None, where: str) -> None:
    """SettingError where a table is to give rows another number of times: those that it gave for good can't be drawn again, and how
    often it gave the others may not have been counted."""
    if new != saved:
        raise SettingError(
            f"restore({where!r}): tables[{name!r}] was saved with max_times_sampled={saved}, and {new} can't go on from what it counted; "
            f"expected conduit.Table(…, max_times_sampled={saved})"
        )


def _packed(value: Any) -> Any:
    value = dict(value) if isinstance(value, Mapping) else value
    try:
        return _PACKER.pack(value, {}, "settings")
    except CheckpointError:
        return {_OWN: [type(value).__name__, repr(value)]}


def _unpacked(packed: Any, where: str) -> Any:
    if isinstance(packed, dict) and packed.keys() == {_OWN}:
        raise SettingError(f"{where} was {packed[_OWN][1]}, which is your own: give it again")
    return _PACKER.unpack(packed, {})


def _of_table(table: Table) -> dict[str, Any]:
    return {each.name: _packed(getattr(table, each.name)) for each in fields(table)}


def _to_table(packed: Mapping[str, Any], where: str) -> Table:
    return Table(**{name: _unpacked(value, f"{where}.{name}") for name, value in packed.items()})
