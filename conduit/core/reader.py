"""How a selection of stored rows becomes the leaves of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.backend import Backend, Columns
from conduit.core.experience import Schema
from conduit.core.finals import Finals
from conduit.core.recipe import Gather, Returns, Selection
from conduit.core.ring import Layout
from conduit.core.shard import Shard
from conduit.topology.endpoint import PAGEABLE, Endpoint

Keys = NDArray[np.int64]


class Reader:
    """Reads from a buffer's shards, and from its finals where a selection has some."""

    def __init__(
        self, backend: Backend[Any], layout: Layout, shards: Sequence[Shard], schema: Schema, finals: Finals | None
    ) -> None:
        self._backend = backend
        self._layout = layout
        self._shards = shards
        self._schema = schema
        self._finals = finals

    def read(self, selection: Selection, to: Endpoint) -> Columns[Any]:
        """What was selected, as leaves of a batch in memory of their own at `to`."""
        parts = [self._gathered(gather, to) for gather in selection.gathers]
        if len(parts) == 1 and selection.returns is None:
            return parts[0]
        arrays = {path: array for part in parts for path, array in part.arrays.items()}
        if selection.returns is not None:
            made = {**selection.made, selection.returns.path: self._returned(selection.returns)}
            if not to.is_host:
                parts.append(self._backend.adopt(made, to))
                made = parts[-1].arrays
            arrays |= made
        # The last part was made last: when it is there, all are.
        return Columns(parts[-1].at, arrays, parts[-1].rows, parts[-1].note)

    def _gathered(self, gather: Gather, to: Endpoint) -> Columns[Any]:
        fields = gather.fields
        columns = self._rows(gather.keys, fields, to)
        if gather.ended is not None:
            assert self._finals is not None
            places, numbers = gather.ended
            numbers = self._padded(self._padded(numbers, self._finals.at), to)
            columns = self._scatter(columns, places, self._finals.read(numbers, fields, to), fields)
        if gather.blank is not None:
            count = self._backend.padded(len(gather.blank), to)
            zeros = {
                path: np.zeros((count, *self._schema.fields[path].shape), self._schema.fields[path].dtype)
                for path in fields
            }
            columns = self._scatter(columns, gather.blank, Columns(PAGEABLE, zeros, count), fields)
        if len(gather.axes) == 1 and gather.paths is fields:
            return columns
        pairs = zip(fields, gather.paths, strict=True)
        arrays = {path: _reshaped(columns.arrays[stored], gather.axes) for stored, path in pairs}
        return Columns(columns.at, arrays, gather.axes[0], columns.note)

    def _rows(self, keys: Keys, fields: Sequence[str], to: Endpoint) -> Columns[Any]:
        """Leaves of rows `keys`, in that order."""
        shard, slots = self._layout.locate(keys)
        if shard is None:
            return self._shards[0].read(slots, fields, to)
        parts: list[Columns[Any]] = []
        places: list[Keys] = []
        for number in np.unique(shard).tolist():
            source = self._shards[number]
            (place,) = np.nonzero(shard == number)
            if len(place) == len(keys):
                return source.read(slots, fields, to)
            # Padded for where the rows are, and where they are put together: there a framework compiles.
            place = self._padded(self._padded(place, source.at), to)
            places.append(place)
            parts.append(source.read(slots[place], fields, to))
        return self._backend.merge(parts, places, len(keys), to)

    def _scatter(self, columns: Columns[Any], places: Keys, rows: Columns[Any], fields: Sequence[str]) -> Columns[Any]:
        """`columns` with `places` set to the first of `rows`, of which there are as many as `padded` says."""
        return self._backend.scatter(columns, np.pad(places, (0, rows.rows - len(places)), mode="edge"), rows, fields)

    def _returned(self, returns: Returns) -> NDArray[Any]:
        rewards = self._rows(returns.keys, (returns.path,), PAGEABLE)
        self._backend.wait(rewards)
        return returns.of(rewards.arrays[returns.path])

    def _padded(self, place: NDArray[np.int64], at: Endpoint) -> NDArray[np.int64]:
        """`place` with its last entry repeated, to a length that a backend that compiles per shape has met before."""
        return np.pad(place, (0, self._backend.padded(len(place), at) - len(place)), mode="edge")


def _reshaped(array: Any, axes: tuple[int, ...]) -> Any:
    """(rows, *shape) as (*axes, *shape)."""
    return array if len(axes) == 1 else array.reshape((*axes, *array.shape[1:]))
