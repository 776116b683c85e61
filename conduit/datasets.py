"""Rows as plain arrays: offline data into a store, and what a store holds out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import optree
from numpy.typing import NDArray

from conduit.backends import exchange
from conduit.core.episodes import End
from conduit.core.experience import Tree, leaf_paths, map_leaves
from conduit.core.links import Linked
from conduit.core.signature import TERMINATED, TRUNCATED
from conduit.core.snapshot import StoredRows
from conduit.errors import PriorityError, SchemaError, SettingError
from conduit.ports import Actor
from conduit.store import Store

PIECE_ROWS = 4096
"""An episode is pushed in pieces of at most so many rows."""
_CHUNK_BYTES = 16 << 20
"""About so much is read from a store at once: who pushes may have to wait for as long as that takes."""
_COMPARED_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Arrays:
    """Rows as plain arrays, one episode after the other.

    `data`: leaves (n, *shape), a dict by name as rows are stored. `keys` (n,). `ends` (n,): an `End` each; what follows a row
    that is OPEN is the next one. `begins` (n,): whether a row is known to be its episode's first. `final`: leaves (f, *shape), what
    was observed after rows `final_rows` (f,), positions in ascending order; None where nothing of it is stored. `linked`: whether
    the store knows which row follows which. `extents`: where rows grow, how long the growing axis of each such leaf was when each row
    came, (n,), by the leaf's path; what is beyond are zeros, in the row's final too."""

    data: Tree
    keys: NDArray[np.int64]
    ends: NDArray[np.uint8]
    begins: NDArray[np.bool_]
    final: Mapping[str, Tree] | None
    final_rows: NDArray[np.int64]
    linked: bool
    extents: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)


def push_arrays(
    actor: Actor,
    arrays: Tree | Arrays,
    *,
    final: Mapping[str, Tree] | None = None,
    after: Mapping[str, str] | None = None,
    end: Literal["cut", "open"] = "cut",
    lane: int = 0,
    priority: Any = None,
    version: int | None = None,
    timeout_s: float | None = None,
) -> int:
    """Pushes consecutive rows, episode by episode, as one lane of `actor`, and returns how many it took.

    `arrays`: leaves (n, *shape), which may be anything that slices into arrays (`numpy.memmap`, `h5py.Dataset`); or what `to_arrays`
    made. Leaves `terminated` and `truncated` say where episodes end; `end`: how the last one goes on that doesn't, "open" where more
    of it is pushed later. What was observed after the rows that ended, which a `Next` needs, is told by one of

    - `final`: leaves (ended rows, *shape), in order;
    - `after`: {"obs": "next_obs"}: leaf "next_obs" of all rows is what "obs" was after them. It isn't stored: where an episode goes
      on it is the next row's "obs", or else SchemaError names the row, for then an end is missing there.

    A truncated row without either is cut. `priority`: (n,). Other arguments and errors are those of `Actor.push_trajectory`; rows
    of episodes before the one that doesn't fit have been pushed then."""
    if not isinstance(actor, Actor):
        raise SettingError(f"push_arrays(actor={actor!r}): expected an actor of a store, such as store.actor()")
    if isinstance(arrays, Arrays):
        if final is not None or after is not None:
            raise SettingError("push_arrays: what to_arrays made brings its finals; expected neither final= nor after=")
        data, ends, final, final_rows = arrays.data, arrays.ends, arrays.final, arrays.final_rows
        count = _count(data)
    else:
        if final is not None and after is not None:
            raise SettingError(
                "push_arrays: final= and after= both tell what came after the rows; expected one of them"
            )
        data, follows = (arrays, None) if after is None else _without(arrays, after)
        count = _count(arrays)
        ends = _ends(data, count)
        final_rows = np.flatnonzero(ends)
        if follows is not None:
            _check_follows(data, follows, ends)
            final = map_leaves(lambda leaf: _rows_at(leaf, final_rows), follows)
    if end not in ("cut", "open"):
        raise SettingError(f"push_arrays(end={end!r}): expected 'cut' or 'open'")
    if priority is not None and _length(priority) != count:
        raise PriorityError(f"push_arrays: priority is {_described(priority)}; expected {count} numbers, one a row")
    finals = _finals_by_row(final, final_rows)
    taken = 0
    for start, stop, last in _pieces(ends):
        closes = int(ends[last]) if stop == last + 1 else int(End.OPEN)
        if stop == count and closes == End.OPEN:
            closes = int(End[end.upper()])
        taken += actor.push_trajectory(
            map_leaves(lambda leaf, a=start, b=stop: _slice(leaf, a, b), data),
            end=End(closes),
            final=finals.get(last) if stop == last + 1 else None,
            lane=lane,
            priority=None if priority is None else priority[start:stop],
            version=version,
            timeout_s=timeout_s,
        )
    return taken


def to_arrays(store: Store) -> Arrays:
    """The store's live rows, as they are when this is called; without those that are evicted before they are read.

    Where the store links rows (it has an `item` or `derive`, but no `Group`), episodes come by their first rows, each whole as far
    as it is there; one that goes on in the store, or whose actor left, ends as CUT. Else nobody knows which row follows which: they
    come by age, and each is cut, or terminated if it says so. Rows that grow come as wide as the widest, be it that they become wider
    while this is under way. SchemaError before the first row."""
    if not isinstance(store, Store):
        raise SettingError(f"to_arrays(store={store!r}): expected a conduit.Store")
    stop = store.info()["inserted"]
    # Those before `stop` only become fewer.
    room, filled = len(store), 0
    data: Tree = None
    parts: list[StoredRows] = []
    for part in _chunks(store, stop):
        if data is None:
            data = map_leaves(lambda leaf: np.empty((room, *leaf.shape[1:]), leaf.dtype), part.data)
        elif not len(part.keys):
            continue
        # Rows may have become wider since the chunk before.
        data = map_leaves(_as_wide, data, part.data)
        map_leaves(lambda to, leaf, at=filled: _put(to, leaf, at), data, part.data)
        filled += len(part.keys)
        # But for its rows, which are in `data`.
        parts.append(replace(part, data=None))
    data = map_leaves(lambda leaf: leaf[:filled], data)
    key = np.concatenate([part.keys for part in parts])
    extents = {path: np.concatenate([part.extents[path] for part in parts]) for path in parts[0].extents}
    linked = [part.linked for part in parts if part.linked is not None]
    if not linked:
        return replace(_apart(data, key), extents=extents)
    names = [field.name for field in fields(Linked)]
    together = Linked(*(np.concatenate([getattr(each, name) for each in linked]) for name in names))
    finals = [part.finals for part in parts if part.finals is not None]
    final = None
    if finals:
        wide = [{name: map_leaves(_as_wide, tree, data[name]) for name, tree in each.items()} for each in finals]
        final = map_leaves(lambda *leaves: np.concatenate(leaves), *wide)
    return _by_episode(data, key, together, final, extents)


def _chunks(store: Store, stop: int) -> Iterator[StoredRows]:
    """The store's rows with keys below `stop`, by age: one chunk at least."""
    first, at_once = 0, max(1, _CHUNK_BYTES // max(1, store.info()["row_bytes"] or 1))
    while True:
        part = store.read(first, at_once)
        kept = int(np.searchsorted(part.keys, stop))
        yield part if kept == len(part.keys) else _head(part, kept)
        if kept < at_once:
            return
        first = int(part.keys[-1]) + 1


def _head(part: StoredRows, rows: int) -> StoredRows:
    """The first `rows` of some rows."""
    linked, finals = part.linked, part.finals
    if linked is not None:
        linked = Linked(*(getattr(linked, field.name)[:rows] for field in fields(Linked)))
    if finals is not None and linked is not None:
        kept = np.count_nonzero(linked.final >= 0)
        finals = map_leaves(lambda leaf: leaf[:kept], finals)
    data = map_leaves(lambda leaf: leaf[:rows], part.data)
    extents = {path: extent[:rows] for path, extent in part.extents.items()}
    return StoredRows(part.keys[:rows], part.versions[:rows], data, linked, finals, extents)


def _by_episode(
    data: Tree,
    keys: NDArray[np.int64],
    linked: Linked,
    final: Mapping[str, Tree] | None,
    extents: Mapping[str, NDArray[np.int64]],
) -> Arrays:
    """Rows by age, put together by episode."""
    episode = _first_rows(keys, linked.after)
    order = np.argsort(episode, kind="stable")
    if np.count_nonzero(order != np.arange(len(order))):
        data = map_leaves(lambda leaf: leaf[order], data)
    ends = linked.end[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = episode[order][1:] != episode[order][:-1]
    ends[last & (ends == End.OPEN)] = End.CUT
    has_final = linked.final[order] >= 0
    final_rows = np.flatnonzero(has_final)
    if final is not None:
        # They were read by age of their rows.
        place = np.cumsum(linked.final >= 0) - 1
        final = map_leaves(lambda leaf: leaf[place[order][has_final]], final)
    extents = {path: extent[order] for path, extent in extents.items()}
    return Arrays(data, keys[order], ends, linked.begins[order], final, final_rows, True, extents)


def _first_rows(keys: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row, the place of the oldest one that is there of its episode. `keys` ascend; so do an episode's rows."""
    root = np.arange(len(keys))
    # A successor may have come too late, or may be evicted by now.
    there = np.minimum(np.searchsorted(keys, after), len(keys) - 1)
    here = np.flatnonzero(keys[there] == after)
    root[there[here]] = here
    # Each step takes twice as many links.
    while np.count_nonzero((further := root[root]) != root):
        root = further
    return root


def _apart(data: Tree, keys: NDArray[np.int64]) -> Arrays:
    ends = np.full(len(keys), End.CUT, np.uint8)
    terminated = data.get(TERMINATED) if isinstance(data, dict) else None
    if terminated is not None:
        ends[terminated] = End.TERMINATED
    return Arrays(data, keys, ends, np.zeros(len(keys), np.bool_), None, np.zeros(0, np.int64), False)


def _pieces(ends: NDArray[np.uint8]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, last row of the episode) of what is pushed together."""
    edges = np.flatnonzero(ends) + 1
    bounds = np.unique(np.concatenate([[0], edges, [len(ends)]])).tolist()
    for start, stop in pairwise(bounds):
        for low in range(start, stop, PIECE_ROWS):
            yield low, min(low + PIECE_ROWS, stop), stop - 1


def _finals_by_row(final: Mapping[str, Tree] | None, rows: NDArray[np.int64]) -> Mapping[int, Mapping[str, Tree]]:
    """Position of each row that has a final → its final."""
    if final is None:
        return {}
    if not isinstance(final, Mapping):
        raise SchemaError(
            f"push_arrays: final is {_described(final)}; expected a dict of leaves, one row for each row that ended"
        )
    leaves, structure = optree.tree_flatten(final)  # type: ignore[arg-type]
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        if _length(leaf) != len(rows):
            raise SchemaError(
                f"push_arrays: final[{path!r}] is {_described(leaf)}; expected {len(rows)} rows, one for each row that ended"
            )
    return {int(row): map_leaves(lambda leaf, i=i: np.asarray(leaf[i]), final) for i, row in enumerate(rows)}


def _count(data: Tree) -> int:
    """How many rows there are, the same in all leaves."""
    leaves, structure = optree.tree_flatten(data)
    counts = {}
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        if (length := _length(leaf)) is None:
            raise SchemaError(
                f"push_arrays: leaf {path!r} is {_described(leaf)}; expected an array with a leading row axis"
            )
        counts[path] = length
    if not counts:
        raise SchemaError("push_arrays: no leaves; expected a dict of arrays (rows, *shape)")
    if len(set(counts.values())) > 1:
        raise SchemaError(f"push_arrays: leaves have different numbers of rows: {counts}")
    return next(iter(counts.values()))


def _length(array: Any) -> int | None:
    """None for what has none, such as an array without axes."""
    try:
        return len(array)
    except TypeError:
        return None


def _described(array: Any) -> str:
    length = _length(array)
    return f"a {type(array).__name__}" if length is None else f"a {type(array).__name__} with {length} rows"


def _ends(data: Tree, count: int) -> NDArray[np.uint8]:
    """How each row ends, as its leaves say."""
    ends = np.zeros(count, np.uint8)
    for name, value in ((TRUNCATED, End.TRUNCATED), (TERMINATED, End.TERMINATED)):
        leaf = data.get(name) if isinstance(data, dict) else None
        if leaf is None:
            continue
        said = _host(leaf[:])
        if said.dtype != np.bool_ or said.shape != (count,):
            raise SchemaError(
                f"push_arrays: leaf {name!r} is {said.dtype}{list(said.shape[1:])}; expected bool[], one a row: it says where episodes end"
            )
        ends[said] = value
    return ends


def _without(arrays: Tree, after: Mapping[str, str]) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """(the leaves to store, by the leaf's name what it was after each row)."""
    if not isinstance(after, Mapping):
        raise SettingError(
            f"push_arrays(after={after!r}): expected a dict of leaves' names, such as {{'obs': 'next_obs'}}"
        )
    if not isinstance(arrays, dict):
        raise SchemaError(f"push_arrays(after=…): rows are a {type(arrays).__name__}; expected a dict of names")
    missing = [name for pair in after.items() for name in pair if name not in arrays]
    if missing:
        raise SchemaError(
            f"push_arrays(after={dict(after)!r}): there is no leaf {missing[0]!r}; there are {sorted(arrays)}"
        )
    kept = {name: leaf for name, leaf in arrays.items() if name not in after.values()}
    return kept, {name: arrays[follows] for name, follows in after.items()}


def _check_follows(data: Mapping[str, Tree], follows: Mapping[str, Tree], ends: NDArray[np.uint8]) -> None:
    """SchemaError unless what came after each row of an episode that goes on is the next row's."""
    for name, tree in follows.items():
        if optree.tree_structure(tree) != optree.tree_structure(data[name]):
            raise SchemaError(f"push_arrays(after=…): {name!r} and what came after it nest differently")
        for after, leaf in zip(optree.tree_leaves(tree), optree.tree_leaves(data[name]), strict=True):
            for low in range(0, len(ends) - 1, _COMPARED_ROWS):
                stop = min(low + _COMPARED_ROWS, len(ends) - 1)
                goes_on = ends[low:stop] == End.OPEN
                wrong = goes_on & ~_equal(_host(after[low:stop]), _host(leaf[low + 1 : stop + 1]))
                if np.count_nonzero(wrong):
                    row = low + int(wrong.argmax())
                    raise SchemaError(
                        f"push_arrays: row {row} goes on, but what came after it isn't row {row + 1}'s {name!r}: an end is missing there. "
                        "Mark the row as truncated, or store what came after each row as a leaf of its own"
                    )


def _equal(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each row is the same; NaN is NaN."""
    same = (one == other) | ((one != one) & (other != other))
    return same.all(axis=tuple(range(1, same.ndim)))


def _slice(leaf: Any, start: int, stop: int) -> Any:
    piece = leaf[start:stop]
    # Of a memmap too, an array.
    return np.asarray(piece) if isinstance(piece, np.ndarray) else piece


def _host(leaf: Any) -> NDArray[Any]:
    return leaf if isinstance(leaf, np.ndarray) else exchange.to_numpy(leaf)


def _rows_at(leaf: Any, rows: NDArray[np.int64]) -> NDArray[Any]:
    """Some rows, in ascending order, of what need not be an array."""
    if isinstance(leaf, np.ndarray):
        return leaf[rows]
    return np.stack([_host(leaf[row]) for row in rows.tolist()]) if len(rows) else _host(leaf[:0])


def _put(to: NDArray[Any], leaf: NDArray[Any], at: int) -> None:
    to[at : at + len(leaf)] = leaf


def _as_wide(leaf: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """`leaf`, whose rows are filled up with zeros to the form of `other`'s."""
    if leaf.shape[1:] == other.shape[1:]:
        return leaf
    wide = np.zeros((len(leaf), *other.shape[1:]), leaf.dtype)
    wide[tuple(map(slice, leaf.shape))] = leaf
    return wide
