"""What a push must look like, and what it says: leaves checked against the store's signature, ends read, finals matched
to the lanes that ended."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from conduit.core.declared import Declared
from conduit.core.episodes import End, Rows
from conduit.core.experience import Look, Schema, Tree, leaf_paths, map_leaves, top_level
from conduit.errors import PriorityError, SchemaError

Array = NDArray[Any]
Mask = NDArray[np.bool_]
Final = Any
"""A tree whose root is a mapping by leaf name."""

TERMINATED, TRUNCATED = "terminated", "truncated"
"""Leaves of these names, bool and one a row, say how each row ends; terminated goes before truncated."""

_NO_VERSION = np.zeros(0, np.int64)
_TERMINATED, _TRUNCATED, _CUT = int(End.TERMINATED), int(End.TRUNCATED), int(End.CUT)
"""NumPy takes plain numbers three times as fast as an enum's."""


class Signature:
    """The push schema, which the first push fixes for all actors; what is declared to grow may become wider later.

    `to_numpy`: makes a host array of a leaf that isn't NumPy's. `prioritized`: whether rows may have priorities, and
    `highest_priority`: the highest. Where a step's rows needn't outlive the push, `copies` may be set to False: then the caller's
    arrays are passed on as they are (`Rows.lent`); finals, bootstraps, priorities and trajectories are always copied. `finals_of`: names at the top of a row
    that every final has to bring whole, since a next is derived from them. `declared`: what rows must be like from the
    first push on; where hooks make something else of them, only what may grow. `widen`: is told of wider rows than any before, in the
    pushing thread, before they are taken, and for how many seconds it may wait, and returns their schema when there is room for such: then
    all rows have to be so wide."""

    def __init__(
        self,
        to_numpy: Callable[[Any], Array],
        prioritized: bool,
        highest_priority: float = math.inf,
        finals_of: Sequence[str] = (),
        declared: Declared | None = None,
        has_hooks: bool = False,
        widen: Callable[[Schema, float], Schema] = lambda schema, timeout_s: schema,
    ) -> None:
        self.copies = True
        self._declared = declared
        self._has_hooks = has_hooks
        self._widen = widen
        self._finals_of = frozenset(finals_of)
        self._needed: tuple[Schema, list[str]] | None = None
        """Of a schema: the leaves that every final has to bring."""
        self._to_numpy = to_numpy
        self._prioritized = prioritized
        self._highest_priority = highest_priority
        self._schema: Schema | None = None
        self._lock = threading.Lock()
        self._undecided = 0
        self.fixed = False
        """Whether a push has been taken; before, its schema is provisional."""

    @property
    def schema(self) -> Schema | None:
        """Of what is pushed; None before the first push."""
        return self._schema if self.fixed else None

    def fix(self, schema: Schema) -> None:
        """What is pushed must be of this schema from the first push on."""
        self._schema, self.fixed = schema, True

    def check(self, rows: Tree, where: str) -> Tree:
        """`rows`, leaves (n, *shape), with NumPy leaves. SchemaError unless they could be pushed."""
        return self._leaves(rows, None, where)[1]

    def steps(self, lanes: range) -> Steps:
        """What `step` wants to know of an actor's lanes."""
        return Steps(lanes)

    def step(self, tree: Tree, final: Final, valid: Any, priority: Any, steps: Steps) -> Rows:
        """One step of all lanes, as the rows of those that are valid."""
        schema, count, look = self._schema, steps.count, steps.look
        # Nearly all steps look like the ones before.
        leaves = None if look is None or look.schema is not schema else look.leaves(tree)
        if leaves is None or schema is None:
            schema, tree, leaves = self._leaves(tree, count, "push")
            if self.fixed and schema is self._schema:
                steps.look = Look(schema, count)
        if final is not None:
            final = self._final(final, "push")
        ends = _ends(leaves, count, _CUT if final is None else _TRUNCATED)
        lane, end = steps.lane, steps.open if ends is None else ends
        chosen = None if priority is None else self._priorities(priority, count, "push")
        lent = valid is None and not self.copies
        if valid is not None:
            kept = np.flatnonzero(_valid_lanes(valid, count))
            tree = schema.unflatten({path: leaf[kept] for path, leaf in leaves.items()})
            lane, end, chosen = lane[kept], end[kept], None if chosen is None else chosen[kept]
        elif not lent:
            tree = schema.unflatten({path: leaf.copy() for path, leaf in leaves.items()})
        finals = None
        if final is not None:
            ended = np.flatnonzero(end)
            finals = self._match(schema, final, ended.tolist(), "push", (lane[ended] - steps.first).tolist())
        return Rows(tree, lane, end, _NO_VERSION, chosen, finals, schema, lent)

    def trajectory(self, tree: Tree, end: str | End | None, final: Final, priority: Any, lane: int) -> Rows:
        """Consecutive rows of one lane."""
        schema, _, leaves = self._leaves(tree, None, "push_trajectory")
        count = len(next(iter(leaves.values())))
        if count == 0:
            raise SchemaError("push_trajectory: no rows; expected at least one")
        ends = _ends(leaves, count, _TRUNCATED)
        if ends is None:
            ends = np.zeros(count, np.uint8)
        if ends[:-1].any():
            row = int(np.flatnonzero(ends[:-1])[0])
            raise SchemaError(f"push_trajectory: row {row} of {count} ended already; push one trajectory at a time")
        if end is not None:
            ends[-1] = _resolve_end(end, End(int(ends[-1])), leaves)
        final = self._final(final, "push_trajectory")
        if final is None and ends[-1] == End.TRUNCATED:
            ends[-1] = End.CUT
        finals = None
        if final is not None:
            ended = [count - 1] if ends[-1] in (End.TERMINATED, End.TRUNCATED) else []
            finals = self._match(schema, map_leaves(lambda leaf: leaf[None], final), ended, "push_trajectory")
        priority = None if priority is None else self._priorities(priority, count, "push_trajectory")
        return Rows(
            data=schema.unflatten({path: leaf.copy() for path, leaf in leaves.items()}),
            lane=np.full(count, lane, np.int64),
            end=ends,
            version=_NO_VERSION,
            priority=priority,
            finals=finals,
            schema=schema,
        )

    def bootstrap(self, tree: Final, lanes: int) -> Final:
        """What `end_unit` was told of the observations after the last rows: leaves (lanes, *shape)."""
        if tree is None:
            return None
        schema = self._schema
        if schema is None:
            raise SchemaError("end_unit: nothing has been pushed yet")
        tree = self._arrays(tree, "end_unit: bootstrap")
        self._check_known(schema, tree, lanes, "end_unit: bootstrap")
        return map_leaves(np.copy, tree)

    def knows(self, rows: Rows) -> bool:
        """Whether rows that were checked are of the push schema; else they are taken in a block of `fixed_by`."""
        return self.fixed and rows.schema is self._schema

    @contextmanager
    def fixed_by(self, rows: Rows, timeout_s: float) -> Iterator[Taking]:
        """Around the block that takes `rows`: if it does, and they are the first, their schema is the push schema, and the wider one if
        they are wider than any before. Where rows are stored as they are pushed, that is so as soon as there is room for such, whatever
        becomes of them; `timeout_s`: of each wait for that."""
        with self._lock:
            if self._schema is None:
                self._schema = rows.schema or _push_schema(rows.data, "push")
            else:
                # Two actors' first pushes at once: the later one must fit the earlier one's. So must rows that others passed.
                schema, leaves = self._wide(rows.schema), self._schema.flatten(rows.data, "push")
                if self._declared is not None:
                    leaves = self._declared.padded(leaves, schema)
                schema.check(leaves, "push")
            self._undecided += 1
        taking = Taking()
        try:
            if self.fixed:
                self._grow(rows, timeout_s)
            yield taking
        except BaseException:
            taking.is_taken = False
            raise
        finally:
            with self._lock:
                self._undecided -= 1
                if taking.is_taken:
                    self._schema, self.fixed = self._wide(rows.schema), True
                elif not self.fixed and not self._undecided:
                    self._schema = None

    def _leaves(self, tree: Tree, rows: int | None, where: str) -> tuple[Schema, Tree, Mapping[str, Array]]:
        """The schema that `tree` fits, `tree` with NumPy leaves, and these by path."""
        tree = self._arrays(tree, where)
        schema = self._schema
        if schema is None:
            schema = _push_schema(tree, where)
            if self._declared is not None and not self._has_hooks:
                self._declared.check(schema, where)
        leaves = schema.flatten(tree, where)
        if self._declared is not None:
            schema = self._declared.grown(schema, leaves, where)
        schema.check(leaves, where, rows, "a lane")
        return schema, tree, leaves

    def _grow(self, rows: Rows, timeout_s: float) -> None:
        """There is room for these rows, if they are wider than any before."""
        target = self._wide(rows.schema)
        if self._declared is not None and target is not self._schema:
            wide = self._widen(target, timeout_s)
            # What hooks make of them isn't known: there may be no room for it.
            if not self._has_hooks:
                with self._lock:
                    # Others may have made it wider meanwhile.
                    self._schema = self._declared.widest(wide, self._schema or wide)

    def _wide(self, schema: Schema | None) -> Schema:
        """The push schema, as wide as `schema` where this is wider; itself where that is nowhere."""
        assert self._schema is not None
        if self._declared is None or schema is None:
            return self._schema
        return self._declared.widest(self._schema, schema)

    def _arrays(self, tree: Tree, where: str) -> Tree:
        """`tree` with NumPy leaves."""
        if _is_plain(tree):
            return tree
        try:
            return map_leaves(self._array, tree)
        except SchemaError:
            for path, leaf in zip(optree.tree_paths(tree), optree.tree_leaves(tree), strict=True):
                try:
                    self._array(leaf)
                except SchemaError as error:
                    raise SchemaError(f"{where}: leaf {'/'.join(map(str, path))!r}: {error}") from None
            raise

    def _array(self, leaf: Any) -> Any:
        return leaf if isinstance(leaf, np.ndarray) else self._to_numpy(leaf)

    def _final(self, final: Final, where: str) -> Final | None:
        """`final` with NumPy leaves; None if it has no leaves."""
        if final is None or not optree.tree_leaves(final):
            return None
        return self._arrays(final, f"{where}: final")

    def _match(
        self, schema: Schema, final: Final, ended: Sequence[int], where: str, lanes: Sequence[int] | None = None
    ) -> dict[int, Final] | None:
        """Place of each ended row → its final. `lanes`: what the caller calls these places, if something else."""
        told = f"lanes that ended in this step: {list(ended if lanes is None else lanes)}"
        self._check_known(schema, final, len(ended), f"{where}: final", told)
        self._check_enough(schema, final, f"{where}: final")
        final = map_leaves(np.copy, final)
        return {place: map_leaves(lambda leaf, i=i: leaf[i], final) for i, place in enumerate(ended)} or None

    def _check_known(self, schema: Schema, tree: Final, rows: int, where: str, which: str = "one a lane") -> None:
        """Each leaf of `tree` is one of the pushed leaves, with `rows` rows."""
        leaves, structure = optree.tree_flatten(tree)
        for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
            field = schema.fields.get(path)
            if field is None:
                raise SchemaError(
                    f"{where}[{path!r}] is none of the pushed leaves; expected some of {', '.join(schema.fields)}"
                )
            is_array = isinstance(leaf, np.ndarray) and leaf.ndim
            if not is_array or leaf.dtype != field.dtype or leaf.shape[1:] != field.shape:
                got = f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
                raise SchemaError(
                    f"{where}[{path!r}] is {got}; expected {field} with a leading axis of {rows} ({which})"
                )
            if len(leaf) != rows:
                raise SchemaError(f"{where}[{path!r}] has {len(leaf)} rows; expected {rows} ({which})")

    def _check_enough(self, schema: Schema, final: Final, where: str) -> None:
        """The final has all that a next is derived from."""
        if not self._finals_of:
            return
        if self._needed is None or self._needed[0] is not schema:
            names = top_level(schema)
            self._needed = schema, [path for name in names if name in self._finals_of for path in names[name]]
        needed = self._needed[1]
        brings = leaf_paths(optree.tree_structure(final))
        missing = [path for path in needed if path not in brings]
        if missing:
            raise SchemaError(
                f"{where} has {', '.join(map(repr, brings))} and lacks {', '.join(map(repr, missing))}, which a next is derived from "
                "(derive=). Bring the last observation whole, or no final at all: then the lane is cut"
            )

    def _priorities(self, priority: Any, rows: int, where: str) -> NDArray[np.float64]:
        if not self._prioritized:
            raise PriorityError(
                f"{where}(priority=…): the store's sampler has no priorities; use sampler=conduit.Prioritized()"
            )
        array = self._arrays(priority, f"{where}: priority")
        if not isinstance(array, np.ndarray) or array.shape != (rows,) or array.dtype.kind not in "biuf":
            got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise PriorityError(f"{where}: priority is {got}; expected numbers of shape ({rows},), one a row")
        array = array.astype(np.float64)
        check_priorities(array, self._highest_priority, lambda row: f"{where}: row {row}")
        return array


@dataclass(slots=True)
class Taking:
    """What becomes of rows: whether they are taken is set where they aren't."""

    is_taken: bool = True


class Steps:
    """What is the same at every step of an actor's lanes. Belongs to the signature that made it."""

    __slots__ = ("count", "first", "lane", "look", "open")

    def __init__(self, lanes: range) -> None:
        self.first, self.count = lanes.start, len(lanes)
        self.lane = np.arange(lanes.start, lanes.stop)
        self.open = np.zeros(len(lanes), np.uint8)
        """The ends when all lanes go on."""
        self.look: Look | None = None
        """How the leaves look, once the signature is fixed."""


def _is_plain(tree: Tree) -> bool:
    """Whether `tree` is a dict of NumPy arrays, as most are."""
    return type(tree) is dict and all(type(leaf) is np.ndarray for leaf in tree.values())


def _push_schema(tree: Tree, where: str) -> Schema:
    schema = Schema.infer(tree, where)
    for path, field in schema.fields.items():
        # NumPy turns it around unasked where arrays are put together.
        if not field.dtype.isnative:
            native = field.dtype.newbyteorder("=")
            raise SchemaError(
                f"{where}: leaf {path!r} has dtype {field.dtype}, whose bytes are in another order than this machine's; expected {native}: "
                f"leaf.astype({str(native)!r}) makes it so"
            )
    for name in (TERMINATED, TRUNCATED):
        field = schema.fields.get(name)
        if field is not None and (field.dtype != np.bool_ or field.shape):
            raise SchemaError(f"{where}: leaf {name!r} is {field}; expected bool[], one a row: it says where lanes end")
    return schema


def check_priorities(priority: NDArray[np.float64], highest: float, name: Callable[[int], str]) -> None:
    """PriorityError naming the first that is NaN, infinite, negative or above `highest`."""
    bad = ~(np.isfinite(priority) & (priority >= 0) & (priority <= highest))
    if bad.any():
        first = int(bad.argmax())
        most = "" if not np.isfinite(priority[first]) or priority[first] <= highest else f" and ≤ {highest:.3g}"
        raise PriorityError(f"{name(first)} has priority {priority[first]}; expected a finite number ≥ 0{most}")


def _ends(leaves: Mapping[str, Array], rows: int, truncated_as: int) -> NDArray[np.uint8] | None:
    """How each row ends, as its leaves say; None when all lanes go on."""
    terminated, truncated = leaves.get(TERMINATED), leaves.get(TRUNCATED)
    # A comparison of bytes takes a tenth of the time of `any()`.
    none = bytes(rows)
    if terminated is not None and terminated.tobytes() == none:
        terminated = None
    if truncated is None or truncated.tobytes() == none:
        return None if terminated is None else terminated.astype(np.uint8)  # which is End.TERMINATED where it is True
    ends = truncated.astype(np.uint8)
    ends *= truncated_as
    if terminated is not None:
        ends[terminated] = _TERMINATED
    return ends


def _valid_lanes(valid: Any, lanes: int) -> Mask:
    mask = np.asarray(valid)
    if mask.dtype != np.bool_ or mask.shape != (lanes,):
        raise SchemaError(f"push: valid is {mask.dtype}{list(mask.shape)}; expected bool[{lanes}], one a lane")
    return mask


def _resolve_end(asked: str | End, said: End, leaves: Mapping[str, Array]) -> End:
    """The end that `push_trajectory(end=)` asks for, which leaves that say something else contradict."""
    try:
        end = End[asked.upper()] if isinstance(asked, str) else End(asked)
    except (KeyError, ValueError):
        names = ", ".join(each.name.lower() for each in End)
        raise SchemaError(f"push_trajectory: end={asked!r}; expected one of {names}") from None
    has_leaves = TERMINATED in leaves or TRUNCATED in leaves
    agrees = (
        said == end
        or (said == End.OPEN and (not has_leaves or end == End.CUT))
        or (said, end) == (End.TRUNCATED, End.CUT)
    )
    if not agrees:
        raise SchemaError(
            f"push_trajectory: end={end.name.lower()!r}, but the last row's leaves say {said.name.lower()!r}"
        )
    return end
