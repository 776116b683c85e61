"""The Experience Buffer: a ring of rows, the cursor that says which are live, and how they are linked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.backend import Backend, Columns
from conduit.core.episodes import End, Rows
from conduit.core.experience import Schema
from conduit.core.finals import Finals
from conduit.core.halt import Halt
from conduit.core.items import Chance
from conduit.core.journal import Copy, at_once
from conduit.core.leases import Leases
from conduit.core.lineage import Lineage
from conduit.core.placement import Placement
from conduit.core.places import Places
from conduit.core.recipe import Gather, Recipe, Selection
from conduit.core.ring import Layout, Window
from conduit.core.room import Room
from conduit.core.sampling import Sampler
from conduit.core.shard import Meter
from conduit.core.starts import Starts
from conduit.core.storage import Storage, check_instead, take_memory
from conduit.core.versions import Versions
from conduit.errors import CapacityError, ClosedError
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

Keys = NDArray[np.int64]

_NONE: Keys = np.zeros(0, np.int64)


@dataclass(slots=True)
class Written:
    """Rows [first, first + rows) came, the last ones of what was written; `admitted` rows can be drawn since, and `excluded` ones
    can't any more."""

    first: int
    rows: int
    admitted: Keys
    excluded: Keys


class ExperienceBuffer:
    """`write`, `cut`, `drop` and `select` are called in a turn of the store's Order; `read` by anybody who holds a lease on what
    was selected.

    Inside, a row is known by its key, from which its slot follows; or, where a `remover` chooses which rows leave, by its slot:
    `keys_of` and `find` translate.

    A lease protects drawn rows from being overwritten before they are read."""

    def __init__(
        self,
        backend: Backend[Any],
        capacity: int,
        place: Callable[[Schema, bool], Placement],
        budgets: Mapping[Tier, int],
        halt: Halt,
        recipe: Recipe | None = None,
        remover: Sampler | None = None,
        meter: Callable[[Endpoint], Meter | None] = lambda at: None,
    ) -> None:
        """`place`: says where rows of a form go, and whether in place of those that are there. `remover`: chooses the rows that leave
        when there is no room; None: the oldest do. It needs a trivial recipe. `meter`: is told of the traffic at an endpoint."""
        self.capacity = capacity
        self.place = place
        self._remover = remover
        self.places = None if remover is None else Places(capacity)
        """The slots, where a remover chooses who leaves."""
        self._inserted = 0
        self._room = Room(backend, budgets, meter)
        self._recipe = recipe or Recipe()
        self._storage: Storage | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._schema: Schema | None = None
        self.lineage = None if self._recipe.trivial else Lineage(capacity, self._recipe.following)
        self._versions = Versions()
        self._window = Window(0, 0)
        self.leases = Leases(halt)
        """What protects rows that are to be read: taken in the turn that selected them."""

    @property
    def storage(self) -> Storage | None:
        """Where the rows are; None before the first."""
        return self._storage

    @property
    def finals(self) -> Finals | None:
        """Of the storage that is there."""
        return None if self._storage is None else self._storage.finals

    @property
    def window(self) -> Window:
        """The live rows; where a remover chooses who leaves, the slots that have been in use."""
        return self._window

    @property
    def in_order(self) -> bool:
        """Whether the oldest rows leave first."""
        return self.places is None

    @property
    def inserted(self) -> int:
        """How many rows have come: the key of the next."""
        return self._window.stop if self.places is None else self._inserted

    def __len__(self) -> int:
        """How many rows are live."""
        return len(self._window) if self.places is None else len(self.places)

    @property
    def starts(self) -> Starts | None:
        """Which live rows can be drawn; None: all."""
        return None if self.lineage is None else self.lineage.starts

    @property
    def schema(self) -> Schema | None:
        """Of the stored rows; None before the first."""
        return self._schema

    @property
    def batch_schema(self) -> Schema:
        """The leaves of a batch, without its leading axes. There must be rows."""
        assert self._storage is not None
        return self._storage.composition.schema

    def keys_of(self, rows: Keys) -> Keys:
        """The insertion number of each of `rows`."""
        return rows if self.places is None else self.places.keys_at(rows)

    def find(self, keys: Keys, oldest: int) -> tuple[Keys, NDArray[np.bool_] | None]:
        """What the rows with these insertion numbers, the lowest of which is `oldest`, are known by, and which of them are live
        (None: all): as many as those."""
        if self.places is not None:
            slots = self.places.slots_of(keys)
            live = slots >= 0
            return slots[live], live
        first = self._window.first
        if oldest >= first:
            return keys, None
        live = keys >= first
        return keys[live], live

    def write(self, rows: Rows) -> list[Written]:
        """Appends rows. Where there is no room, as many others leave: the oldest, or those that the remover chooses among the rows
        that were there before. Their arrays, which nobody changes until this has returned, fix the stored schema if they are the first."""
        columns = self._columns(rows)
        if self.places is not None:
            return self._replace(self.places, columns, rows.version)
        count, first, stop = columns.rows, self._window.first, self._window.stop
        lost, excluded = 0, _NONE
        oldest = stop + count - self.capacity
        if oldest > first:
            # Of more rows than the ring has, the first are gone as soon as they are counted: they aren't written at all.
            first, lost = oldest, max(0, oldest - stop)
            excluded = self._evict(min(first, stop))
        assert self._storage is not None
        self._storage.write(stop + lost, columns.slice(lost, count) if lost else columns)
        self._versions.append(stop, rows.version)
        admitted = _NONE if self.lineage is None else self._link(self.lineage, rows, columns, stop, lost)
        self._window = Window(first, stop + count)
        return [Written(stop + lost, count - lost, admitted, excluded)]

    def oldest_waiting(self) -> int | None:
        """The oldest live row that may become drawable when others come; None if there is none."""
        return None if self.lineage is None else self.lineage.oldest_waiting()

    def cut(self, lanes: Sequence[int]) -> Keys:
        """What comes in these lanes doesn't follow what came. Returns rows that can be drawn since."""
        return _NONE if self.lineage is None else self.lineage.cut(lanes)

    def select(self, keys: Keys, chance: Chance) -> Selection:
        """What the entries of a batch that start at `keys` are made of. `chance`: for what an item leaves to it."""
        assert self._storage is not None
        if self.lineage is None:
            return self._storage.composition.select_rows(keys)
        finals_stop = 0 if self.finals is None else self.finals.stop
        return self._storage.composition.select(keys, self.lineage.links, finals_stop, chance)

    def drop(self) -> None:
        """No row is live any more; numbers go on counting."""
        self._evict(self._window.stop)

    def read(self, selections: Sequence[Selection], to: Endpoint) -> list[Columns[Any]]:
        """What was selected for each of some batches, as leaves of a batch in memory of their own at `to`. The caller holds a lease from
        the oldest of `Selection.oldest()` on."""
        assert self._storage is not None
        return self._storage.read_all(selections, to)

    def is_quick(self, to: Endpoint, selections: Sequence[Selection]) -> bool:
        """Whether what was selected is read to `to` in less time than a lease on it takes."""
        return self._storage is not None and self._storage.is_quick(to, selections)

    def version_of(self, keys: Keys) -> NDArray[np.int64]:
        """The policy version of live rows; in a turn."""
        return self._versions.of(keys) if self.places is None else self.places.versions_at(keys)

    def keys_from(self, first: int, most: int) -> Keys:
        """The keys of the next `most` live rows from `first` on, however large these numbers are."""
        first, most = min(first, self.inserted), min(most, self.capacity)
        if self.places is not None:
            return self.places.keys_from(first, most)
        low = max(first, self._window.first)
        return np.arange(low, min(low + most, self._window.stop))

    def live_between(self, first: int, stop: int) -> int:
        """How many rows with keys [first, stop) are live, where the oldest leave first."""
        return max(0, min(stop, self._window.stop) - max(first, self._window.first))

    def stored(self, keys: Keys) -> Selection:
        """All stored leaves of live rows; in a turn."""
        assert self._schema is not None
        paths = tuple(self._schema.fields)
        return Selection((Gather(paths, paths, self.find(keys, int(keys[0]))[0], keys.shape),))

    def state(self, copy: Copy = at_once) -> dict[str, Any]:
        """What a checkpoint keeps, but for the rows and finals themselves; in a turn."""
        window = self._window
        state: dict[str, Any] = {"window": [window.first, window.stop], "inserted": self.inserted}
        if self.places is not None:
            return {**state, "places": self.places.state(copy)}
        state["versions"] = self._versions.state()
        if self.lineage is not None:
            state["lineage"] = self.lineage.state(window, copy)
        if self.finals is not None:
            state["finals"] = [self.finals.first, self.finals.stop]
        return state

    def prepare(self, schema: Schema) -> None:
        """Takes the memory for rows of this schema, which the first push does else."""
        placement = self.place(schema, False)
        self.rebind(self.other_storage(schema, placement, Layout(self.capacity, placement.shares), beside=False))

    def other_storage(self, schema: Schema, placement: Placement, layout: Layout, *, beside: bool = True) -> Storage:
        """An empty storage for as many rows: `beside` the one that there is, or as if there were none. CapacityError where there is no room;
        nothing is taken then."""
        return take_memory(self._room, self._recipe, schema, placement, layout, self._storage if beside else None)

    def check_room(self, schema: Schema, placement: Placement) -> None:
        """CapacityError unless rows of this schema would have room there in place of those that are there."""
        check_instead(
            self._room, self._recipe, schema, placement, Layout(self.capacity, placement.shares), self._storage
        )

    def rebind(self, storage: Storage) -> None:
        """In a turn, when nobody has a lease: all rows are in this one from here on, and whoever holds the other may close it.
        ClosedError where it came too late for `close`; it is closed then."""
        with self._closing:
            if not self._closed:
                self._storage, self._schema = storage, storage.schema
                return
        storage.close()
        raise ClosedError("the store is closed")

    def load(self, state: Mapping[str, Any]) -> tuple[Window, Window]:
        """Goes on from what was saved, in a buffer that was just made and prepared: where it is smaller, without the oldest rows.
        Returns the rows that there were, and those that there are; `put` brings these, and `finals.put` their finals."""
        saved = Window(*state["window"])
        if self.places is not None:
            if len(state["places"]["keys"]) > self.capacity:
                raise CapacityError(
                    f"capacity={self.capacity}: the checkpoint's rows take {len(state['places']['keys'])} slots, and where a remover chooses "
                    "who leaves none of them can be left out here; expected at least as many"
                )
            self.places.load(state["places"])
            self._inserted, self._window = state["inserted"], saved
            return saved, saved
        first = max(saved.first, saved.stop - self.capacity)
        self._window = window = Window(first, saved.stop)
        self._versions.load(state["versions"], first)
        if self.lineage is not None:
            self.lineage.load(state["lineage"], window)
            if self.finals is not None:
                low, stop = state["finals"]
                gone = state["lineage"]["onward"][: first - saved.first]
                self.finals.load(low + int(np.count_nonzero(gone < 0)), stop)
        return saved, window

    def put(self, keys: Keys, columns: Mapping[str, NDArray[Any]]) -> int:
        """Rows with these keys, ascending, as they were read from another buffer: those that are live are put where they belong.
        Returns how many."""
        assert self._storage is not None
        self._storage.schema.check(columns, "a checkpoint's rows", len(keys))
        places, live = self.find(keys, int(keys[0]))
        rows = Columns(
            PAGEABLE, columns if live is None else {path: each[live] for path, each in columns.items()}, len(places)
        )
        for low, high in _runs(places):
            self._storage.write(int(places[low]), rows.slice(low, high))
        return len(places)

    def older_than(self, version: int) -> Keys:
        """The live rows of policy versions below this one; in a turn."""
        return self._versions.below(version, self._window)

    def leave(self, rows: Keys) -> None:
        """Nobody will draw these rows again: where a remover chooses who leaves, others may have their places."""
        if self.places is not None:
            self.places.leave(rows)

    def bytes_by_endpoint(self) -> dict[str, int]:
        """Bytes that rows and finals occupy; empty before the first row."""
        occupied = {} if self._storage is None else self._storage.bytes_by_endpoint()
        return {str(at): size for at, size in occupied.items()}

    def close(self) -> None:
        with self._closing:
            self._closed = True
        if self._storage is not None:
            self._storage.close()

    def _replace(self, places: Places, columns: Columns[Any], version: int | NDArray[np.int64]) -> list[Written]:
        """`write` where a remover chooses who leaves."""
        assert self._remover is not None
        assert self._storage is not None
        count = columns.rows
        # Of more rows than there are slots, the first are gone as soon as they are counted.
        lost = max(0, count - self.capacity)
        count -= lost
        removed = _NONE
        if count > places.room:
            wanted = count - places.room
            removed = self._remover.draw(self._inserted, wanted, Window(0, places.occupied)).keys
            places.leave(removed)
        # Whoever wants what is in a slot that another row gets reads it now.
        self.leases.settle(None)
        keys = np.arange(self._inserted + lost, self._inserted + lost + count)
        slots = places.take(keys, version if isinstance(version, int) else version[lost:])
        written = []
        for low, high in _runs(slots):
            first = int(slots[low])
            self._storage.write(first, columns.slice(lost + low, lost + high))
            written.append(Written(first, high - low, _NONE, removed if not written else _NONE))
        self._inserted += lost + count
        self._window = Window(0, places.occupied)
        return written

    def _link(self, lineage: Lineage, rows: Rows, columns: Columns[Any], first: int, lost: int) -> Keys:
        """Links rows that came as `first` and following, the first `lost` of which are gone already."""
        by = None if lineage.by is None else columns.arrays[lineage.by]
        admitted = lineage.append(first, rows.lane, rows.end, lost, by)
        if self.finals is not None and rows.finals:
            places = [place for place in sorted(rows.finals) if place >= lost and rows.end[place] != End.OPEN]
            if places:
                numbers = self.finals.append([rows.finals[place] for place in places])
                lineage.links.conclude(first + np.array(places), numbers)
        return admitted

    def _columns(self, rows: Rows) -> Columns[Any]:
        schema, count = self._schema, len(rows)
        if schema is None:
            schema = rows.schema or Schema.infer(rows.data, "stored rows")
            schema.check(schema.flatten(rows.data, "stored rows"), "stored rows", count)
            self.prepare(schema)
        if rows.schema is schema and schema.flat:
            leaves = rows.data
        else:
            leaves = schema.flatten(rows.data, "stored rows")
            if rows.schema is not schema:
                schema.check(leaves, "stored rows", count)
        if rows.lent and self._storage is not None and not self._storage.on_host:
            # A device may go on reading after the push has returned.
            leaves = {path: np.array(leaf) for path, leaf in leaves.items()}
        return Columns(PAGEABLE, leaves, count)

    def _evict(self, first: int) -> Keys:
        """Rows before `first` are live no more; returns others that can't be drawn any more, when nobody has to read one of the
        evicted. No deadline: what it waits for, or does itself, are gathers, in which nothing of the user's runs; so rows that
        were taken can't be lost to one."""
        before = self._window.first
        if first <= before:
            return _NONE
        self._window = Window(first, self._window.stop)
        self.leases.settle(first)
        self._versions.evict(first)
        if self.lineage is None:
            return _NONE
        if self.finals is not None:
            self.finals.evict(self.lineage.links.finals_among(before, first - before))
        return self.lineage.evict(before, first - before)


def _runs(slots: Keys) -> list[tuple[int, int]]:
    """`slots` as runs of consecutive ones: (start, stop) of each among them."""
    edges = np.flatnonzero(np.diff(slots) != 1) + 1
    return list(pairwise([0, *edges.tolist(), len(slots)])) if len(slots) else []
