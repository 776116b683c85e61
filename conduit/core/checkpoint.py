"""Checkpoints: what of a store is kept, how it is read while the store goes on, and how a new store takes it up.

Rows never change, and are known by their keys: so they are written once, in segments of ascending keys, and a later checkpoint
in the same folder keeps the segments that still have a live row. Finals are kept the same way, by their numbers. All else is
written anew each time, as it is in one turn of the store's order: what was pushed, drawn and updated before that turn is in
the checkpoint, and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from conduit.core.archive import Archive, Reading
from conduit.core.backend import Backend
from conduit.core.buffer import ExperienceBuffer
from conduit.core.episodes import End, Rows
from conduit.core.experience import Field, Schema, Tree, leaf_paths, map_leaves
from conduit.core.growth import Growth
from conduit.core.halt import Halt
from conduit.core.ingestion import Ingestion
from conduit.core.journal import Copying
from conduit.core.order import Order
from conduit.core.plain import Arrays, Packer, is_plain
from conduit.core.rollout import Rollout
from conduit.core.segments import FinalSource, RowSource, Segment, Series, read_segments
from conduit.core.signature import Signature
from conduit.core.staging import Cut
from conduit.core.table import LiveTable
from conduit.errors import CheckpointError, SchemaError

Keys = NDArray[np.int64]

VERSION = 1
"""Of what `content` holds; raised when an older Conduit couldn't read it."""


@dataclass(frozen=True, slots=True)
class Leaves:
    """A tree of nodes that JSON hasn't: its leaves by path."""

    arrays: Mapping[str, Any]


_EXAMPLE = "restore(example=…)"

_STATE = Packer((Rows, Cut, End, Leaves))


@dataclass(frozen=True, slots=True)
class Saved:
    """What `Store.save` did."""

    path: str
    generation: int
    rows: int
    """In the checkpoint."""
    written_rows: int
    """Written this time; the others were there already."""
    written_bytes: int
    files: int
    paused_s: float
    """For how long pushes and draws had to wait at the end: while rows were copied that had come meanwhile."""


@dataclass(slots=True)
class Known:
    """What this store has in a folder."""

    generation: int
    rows: list[Segment]
    finals: list[Segment]


@dataclass(frozen=True, slots=True)
class Parts:
    """A store's parts that are kept."""

    halt: Halt
    order: Order
    backend: Backend[Any]
    buffer: ExperienceBuffer
    signature: Signature
    rollout: Rollout
    ingestion: Ingestion
    tables: Mapping[str, LiveTable]
    growth: Growth | None = None


class Saver:
    """Saves one store, again and again. For one thread at a time."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.owner = uuid.uuid4().hex
        """The store's name in its checkpoints, which outlives it."""
        self._known: dict[str, Known] = {}

    def knows(self, archive: Archive, known: Known) -> None:
        """The store was restored from there."""
        self._known[archive.path] = known

    def save(
        self,
        archive: Archive,
        content: Mapping[str, Any],
        ports: Callable[[], tuple[Mapping[str, Any], Callable[[float], None]]],
        overwrite: bool,
        deadline_s: float,
    ) -> Saved:
        """`content`: what else the manifest says, as JSON. `ports`: called in the turn; the state of what is above the core,
        and what makes it whole when the turn is over."""
        known = self._known.get(archive.path)
        generation = None if known is None else known.generation
        parts, writer = self.parts, None
        segments: dict[str, list[Segment]] = {}
        try:
            with archive.writing(self.owner, generation, overwrite) as writer:
                usable = known is not None and all(each.file in writer.present for each in (*known.rows, *known.finals))
                series = partial(Series, parts.order, parts.backend, parts.buffer, writer)
                rows = series(RowSource(parts.buffer, parts.order, deadline_s), known.rows if known and usable else [])
                finals = series(FinalSource(parts.buffer), known.finals if known and usable else [])
                for each in (rows, finals):
                    each.catch_up(deadline_s)
                state, live, paused_s = self._freeze(rows, finals, ports, deadline_s)
                arrays: Arrays = {}
                packed = _STATE.pack(state, arrays, "state")
                extra = [writer.add("state", arrays)] if arrays else []
                segments = {"rows": rows.finish(), "finals": finals.finish()}
                committed = writer.commit(
                    {
                        **content,
                        "content_version": VERSION,
                        "state": packed,
                        "state_files": [each.name for each in extra],
                        "segments": {name: [asdict(each) for each in found] for name, found in segments.items()},
                    }
                )
        finally:
            # It may be in place though something, such as Ctrl-C, struck afterwards.
            if writer is not None and segments and writer.committed is not None:
                self._known[archive.path] = Known(writer.committed, segments["rows"], segments["finals"])
        return Saved(
            path=archive.path,
            generation=committed,
            rows=live,
            written_rows=rows.written_rows,
            written_bytes=sum(each.size_bytes for each in extra) + rows.written_bytes + finals.written_bytes,
            files=len(extra) + sum(map(len, segments.values())),
            paused_s=paused_s,
        )

    def _freeze(
        self,
        rows: Series,
        finals: Series,
        ports: Callable[[], tuple[Mapping[str, Any], Callable[[float], None]]],
        deadline_s: float,
    ) -> tuple[dict[str, Any], int, float]:
        """As all is in one turn: copies of what isn't written yet; how many rows there are, and how long the turn took. In it are copied
        only rows that came since the last pass, and what is few; arrays by slot afterwards, as they were."""
        parts = self.parts
        with parts.order.changed:
            rollout = dict(parts.rollout.state())
            turn = parts.order.enter_held()
        with Copying() as copying:
            with parts.order.serve(turn, deadline_s, lambda: "rows that were pushed before are still being ingested"):
                began_s = parts.halt.clock.now()
                buffer = parts.buffer
                rows.rest()
                finals.rest()
                ports_state, finish = ports()
                state = {
                    "rollout": _kept(rollout),
                    "chain": _kept(parts.ingestion.held()),
                    "tables": {name: table.state(buffer.window, copying.later) for name, table in parts.tables.items()},
                    "buffer": buffer.state(copying.later),
                    "growth": None if parts.growth is None else _kept(parts.growth.state()),
                    "push_schema": _schema_state(parts.signature.schema),
                    "stored_schema": _schema_state(buffer.schema),
                    "ports": ports_state,
                }
                live, paused_s = len(buffer), parts.halt.clock.now() - began_s
            state = copying.settled(state)
        finish(deadline_s)
        return state, live, paused_s


class Loader:
    """What a checkpoint holds, on its way into a store that was just made."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        content = reading.content
        if content.get("content_version") != VERSION:
            raise CheckpointError(
                f"{reading.path}: what it holds is of version {content.get('content_version')!r}; this Conduit reads version {VERSION}. "
                "A newer Conduit may open it"
            )
        self.content: Mapping[str, Any] = content
        self.owner = reading.owner
        arrays: Arrays = {}
        for name in content["state_files"]:
            arrays |= self._reading.arrays(name)
        self.state: dict[str, Any] = _STATE.unpack(content["state"], arrays)

    @property
    def known(self) -> Known:
        found = {name: [Segment(**each) for each in segments] for name, segments in self.content["segments"].items()}
        return Known(self._reading.generation, found["rows"], found["finals"])

    def load(self, parts: Parts, left: Sequence[int] | None, example: Tree) -> int:
        """Brings everything into `parts`, and returns how many rows had no room. `left`: lanes whose actors have left since; None:
        they go on."""
        state = self.state
        if example is not None:
            example = parts.signature.check(example, _EXAMPLE)
        pushed = _schema(state["push_schema"], example, "pushed rows")
        if pushed is not None:
            parts.signature.fix(pushed)
            if example is not None:
                parts.signature.check(example, _EXAMPLE)
        stored = _schema(state["stored_schema"], example, "stored rows")
        if parts.growth is not None:
            parts.growth.check(pushed, stored)
        dropped = 0
        if stored is not None:
            buffer = parts.buffer
            buffer.prepare(stored)
            saved, window = buffer.load(state["buffer"])
            dropped = window.first - saved.first
            self._fill(buffer, parts.growth)
            for name, table in parts.tables.items():
                if name in state["tables"]:
                    table.load(state["tables"][name], saved, window)
        schemas = [schema for schema in (pushed, stored) if schema is not None]
        if parts.growth is not None:
            grown = state.get("growth")
            parts.growth.load(None if grown is None else _taken_up(grown, schemas), pushed)
        parts.ingestion.load(_taken_up(state["chain"], schemas))
        parts.rollout.load(_taken_up(state["rollout"], schemas), left)
        parts.ingestion.catch_up()
        return dropped

    def _fill(self, buffer: ExperienceBuffer, growth: Growth | None) -> None:
        put, stored = 0, buffer.schema
        assert stored is not None

        def filled(arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
            # They may have been written before rows grew.
            return arrays if growth is None else growth.declared.padded(arrays, stored)

        for keys, arrays in read_segments(self._reading, self.known.rows):
            put += buffer.put(keys, filled(arrays))
        if put != len(buffer):
            raise CheckpointError(
                f"{self._reading.path}: it should hold {len(buffer)} rows, and {put} of them are there; it was not written whole"
            )
        finals = buffer.finals
        if finals is None:
            return
        for numbers, arrays in read_segments(self._reading, self.known.finals):
            live = numbers >= finals.first
            if np.count_nonzero(live):
                finals.put(int(numbers[live][0]), {path: each[live] for path, each in filled(arrays).items()})


def _kept(held: Mapping[str, Any]) -> dict[str, Any]:
    """What the rollout or the hooks' chain hold, as it can be packed."""
    kept = {name: _with_rows(_kept_rows, each) for name, each in held.items()}
    if "bootstrap" in kept:
        kept["bootstrap"] = {lane: _kept_tree(tree) for lane, tree in held["bootstrap"].items()}
    return kept


def _taken_up(kept: Mapping[str, Any], schemas: Sequence[Schema]) -> dict[str, Any]:
    """The same again. `schemas`: what rows may be like."""
    held = {name: _with_rows(partial(_rows, schemas), each) for name, each in kept.items()}
    if "bootstrap" in held:
        held["bootstrap"] = {lane: _tree(tree, schemas) for lane, tree in kept["bootstrap"].items()}
    return held


def _with_rows(function: Callable[[Rows], Rows], held: Any) -> Any:
    """`held` with what `function` makes of the rows in its lists."""
    if isinstance(held, Rows):
        return function(held)
    if isinstance(held, dict):
        return {name: _with_rows(function, each) for name, each in held.items()}
    return [_with_rows(function, each) for each in held] if isinstance(held, list) else held


def _kept_rows(rows: Rows) -> Rows:
    finals = None if rows.finals is None else {row: _kept_tree(final) for row, final in rows.finals.items()}
    return replace(rows, data=_kept_tree(rows.data), finals=finals, schema=None)


def _rows(schemas: Sequence[Schema], kept: Rows) -> Rows:
    finals = None if kept.finals is None else {row: _tree(final, schemas) for row, final in kept.finals.items()}
    return replace(kept, data=_tree(kept.data, schemas), finals=finals)


def _kept_tree(tree: Tree) -> Tree:
    # One row's leaves may be NumPy's scalars.
    tree = map_leaves(np.asarray, dict(tree) if isinstance(tree, Mapping) else tree)
    leaves, structure = optree.tree_flatten(tree)
    paths = leaf_paths(structure)
    return tree if is_plain(optree.tree_unflatten(structure, paths)) else Leaves(dict(zip(paths, leaves, strict=True)))


def _tree(kept: Tree, schemas: Sequence[Schema]) -> Tree:
    """SchemaError where none of `schemas` says what tree it was."""
    if not isinstance(kept, Leaves):
        return kept
    for schema in schemas:
        if set(kept.arrays) == set(schema.fields):
            return schema.unflatten(kept.arrays)
        tree = schema.unflatten({path: path for path in schema.fields})
        parts = tree if isinstance(tree, dict) else {}
        # A final is some of what is at the top of a row.
        some = {name: part for name, part in parts.items() if set(optree.tree_leaves(part)) <= set(kept.arrays)}
        if sum(len(optree.tree_leaves(part)) for part in some.values()) == len(kept.arrays):
            return map_leaves(lambda path: kept.arrays[path], some)
    raise SchemaError(
        f"the checkpoint has rows that hooks hold, whose leaves {', '.join(kept.arrays)} nest in nodes of your own, other than pushed "
        "and stored rows: what tree they made isn't known"
    )


def _schema_state(schema: Schema | None) -> dict[str, Any] | None:
    """The fields, and the tree of their paths; None for a tree of nodes that JSON hasn't."""
    if schema is None:
        return None
    tree: Any = schema.unflatten({path: path for path in schema.fields})
    fields = [[path, str(field.dtype), list(field.shape)] for path, field in schema.fields.items()]
    return {"fields": fields, "tree": [tree] if is_plain(tree) else []}


def _schema(state: Mapping[str, Any] | None, example: Tree, what: str) -> Schema | None:
    if state is None:
        return None
    fields = {path: Field(tuple(shape), np.dtype(name)) for path, name, shape in state["fields"]}
    if state["tree"]:
        return Schema.named(fields, state["tree"][0])
    if example is None:
        raise SchemaError(
            f"the checkpoint's {what} nest in nodes of your own (leaves {', '.join(fields)}): give restore(example=) rows of that form, "
            "leaves (n, *shape)"
        )
    given = Schema.infer(example, _EXAMPLE)
    if set(given.fields) != set(fields):
        raise SchemaError(
            f"{_EXAMPLE} has the leaves {', '.join(given.fields)}; the checkpoint's {what} have {', '.join(fields)}"
        )
    return Schema({path: fields[path] for path in given.fields}, given.structure)
