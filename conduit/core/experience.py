"""What a row is: its fields, their dtypes and shapes, and how they nest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import optree
from numpy import ndarray
from numpy.typing import DTypeLike

from conduit.errors import SchemaError

Tree: TypeAlias = Any
"""A pytree: nested dicts, lists, tuples, namedtuples or registered nodes (optree) whose leaves are arrays."""

ROOT = "(root)"
"""The path of a tree that is a single leaf."""


def map_leaves(function: Callable[..., Any], tree: Tree, *more: Tree) -> Tree:
    """`tree` with each leaf, and those in the same place of `more`, replaced by what `function` makes of them."""
    return optree.tree_map(function, tree, *more)


def leaf_paths(structure: optree.PyTreeSpec) -> tuple[str, ...]:
    """The leaves' paths in flattening order, `"obs/image"` for `{"obs": {"image": …}}`."""
    return tuple("/".join(map(str, path)) or ROOT for path in structure.paths())


Grow = Literal["pad", "replace"]


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of a row: `shape` without the row axis, `dtype` exact (NumPy's, or ml_dtypes' for bfloat16).

    In `Store(fields=)`, a declaration: an axis that has a name, `("h",)`, may become longer as rows come, and `grow` says what then
    becomes of the rows that are there: "pad" fills them up with zeros, "replace" lets them leave as soon as there are enough
    longer ones to draw from. Fields of stored rows have numbers only, and no `grow`.

    Growing rows. A store whose observations get longer, as more objects are seen or a curriculum goes on, says so beforehand; rows
    that become longer without are refused. All rows of a batch are then as long as the longest that the store took, and the batch
    says what of each is real:

    >>> import numpy as np, conduit
    >>> fields = {"obs": conduit.Field(("objects",), np.float32, grow="pad")}
    >>> store = conduit.Store(backend="reference", capacity=8, batch_size=4, fields=fields)
    >>> actor = store.actor(lanes=2)
    >>> actor.push({"obs": np.ones((2, 2), np.float32)})
    2
    >>> actor.push({"obs": np.ones((2, 3), np.float32)})
    2
    >>> batch = store.learner().pull()
    >>> batch.data["obs"].shape
    (4, 3)
    >>> mask = batch.info.padding_mask("obs")
    >>> bool((batch.data["obs"] == mask).all())
    True
    >>> bool((batch.info.extents["obs"] == np.where(batch.info.keys < 2, 2, 3)).all())
    True

    They only grow: from then on rows have to be as long, from every actor, and whoever has shorter ones fills them up.

    >>> actor.push({"obs": np.ones((2, 2), np.float32)})
    Traceback (most recent call last):
    conduit.errors.SchemaError: push: leaf 'obs' has shape (2, 2); its axis 'objects' was 2 long here and is 3 by now, since it only \
grows. Rows that are filled up to (rows, 3) would do
    >>> store.close()

    With "pad" the rows that are there are copied into the longer form, which takes memory for both until it is done, perhaps
    elsewhere: CapacityError reaches whoever pushed where there is none, and the store goes on as it was. With "replace" the old rows
    go on being drawn until there are as many new ones as the limiter asks for, else a batch, and never after."""

    shape: tuple[Any, ...]
    dtype: np.dtype[Any]
    grow: Grow | None = None

    if TYPE_CHECKING:
        # Whoever declares may write np.float32 for its dtype.
        def __init__(self, shape: Sequence[int | str], dtype: DTypeLike, grow: Grow | None = None) -> None: ...

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a row by leaf path, and the tree they sit in."""

    fields: Mapping[str, Field]
    structure: optree.PyTreeSpec
    flat: bool = dataclasses.field(init=False, compare=False)
    """Whether rows are plain dicts of leaves, as most are: such a tree is its own mapping of leaves by path."""

    def __post_init__(self) -> None:
        structure = self.structure
        plain = structure.type is dict and structure.num_nodes == structure.num_leaves + 1
        object.__setattr__(self, "flat", plain and all(isinstance(key, str) for key in structure.entries()))

    @classmethod
    def infer(cls, tree: Tree, where: str) -> Schema:
        """The schema of `tree`, whose leaves are NumPy arrays of shape (rows, *field.shape)."""
        leaves, structure = optree.tree_flatten(tree)
        paths = leaf_paths(structure)
        if not leaves:
            raise SchemaError(f"{where}: a row needs at least one leaf; got an empty {type(tree).__name__}")
        if len(set(paths)) < len(paths):
            twice = sorted({path for path in paths if paths.count(path) > 1})
            raise SchemaError(
                f"{where}: several leaves would be called {quote(twice)}; rename the keys that contain '/'"
            )
        fields = {}
        for path, leaf in zip(paths, leaves, strict=True):
            if not isinstance(leaf, np.ndarray):
                raise SchemaError(
                    f"{where}: leaf {path!r} is {_describe(leaf)}; expected an array with a leading row axis"
                )
            if leaf.ndim == 0:
                raise SchemaError(
                    f"{where}: leaf {path!r} has no axes; expected a leading row axis (leaf[None] for one row)"
                )
            if leaf.dtype.kind in "OSUMm" or (leaf.dtype.kind == "V" and leaf.dtype.names is not None):
                raise SchemaError(f"{where}: leaf {path!r} has dtype {leaf.dtype}; expected a numeric or bool dtype")
            fields[path] = Field(leaf.shape[1:], leaf.dtype)
        return cls(fields, structure)

    @classmethod
    def named(cls, fields: Mapping[str, Field], paths: Tree) -> Schema:
        """The schema of a tree that has each leaf's path in the leaf's place."""
        leaves, structure = optree.tree_flatten(paths)
        return cls({path: fields[path] for path in leaves}, structure)

    @property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields.values())

    def flatten(self, tree: Tree, where: str) -> dict[str, Any]:
        """`tree`'s leaves by path; perhaps `tree` itself. SchemaError names missing and unexpected leaves."""
        if self.flat and _is_dict_of(tree, self.fields):
            return tree
        leaves, structure = optree.tree_flatten(tree)
        if structure != self.structure:
            raise SchemaError(f"{where}: {self._difference(structure)}")
        return dict(zip(self.fields, leaves, strict=True))

    def unflatten(self, leaves: Mapping[str, Any]) -> Tree:
        if self.flat:
            return {path: leaves[path] for path in self.fields}
        return optree.tree_unflatten(self.structure, [leaves[path] for path in self.fields])

    def reshaped(self, shapes: Mapping[str, tuple[int, ...]]) -> Schema:
        """This schema with other shapes of some fields; itself if there are none."""
        changed = {path: replace(self.fields[path], shape=shape) for path, shape in shapes.items()}
        return Schema({**self.fields, **changed}, self.structure) if changed else self

    def check(self, leaves: Mapping[str, Any], where: str, rows: int | None = None, each: str = "a row") -> int:
        """How many rows `leaves` holds, after checking each against its field. SchemaError names the first that differs."""
        if rows is None:
            first = leaves[next(iter(self.fields))]
            rows = first.shape[0] if isinstance(first, np.ndarray) and first.ndim else 0
        for path, field in self.fields.items():
            leaf = leaves[path]
            if type(leaf) is not np.ndarray or leaf.dtype != field.dtype or leaf.shape != (rows, *field.shape):
                self._check_leaf(path, field, leaf, where, rows, each)
        return rows

    def _check_leaf(self, path: str, field: Field, leaf: Any, where: str, rows: int, each: str) -> None:
        if not isinstance(leaf, np.ndarray):
            raise SchemaError(
                f"{where}: leaf {path!r} is {_describe(leaf)}; expected an array {field} with a leading row axis"
            )
        if leaf.dtype != field.dtype:
            raise SchemaError(
                f"{where}: leaf {path!r} has dtype {leaf.dtype}; expected {field.dtype}. Cast it: dtypes are never changed silently"
            )
        if leaf.shape[1:] != field.shape or leaf.ndim == 0:
            grown = _how_to_declare(path, field, leaf)
            raise SchemaError(
                f"{where}: leaf {path!r} has shape {leaf.shape}; expected (rows, {join(field.shape)}){grown}"
            )
        if leaf.shape[0] != rows:
            raise SchemaError(
                f"{where}: leaf {path!r} has a leading axis of {leaf.shape[0]}; expected {rows}, one {each}"
            )

    def _difference(self, structure: optree.PyTreeSpec) -> str:
        got = set(leaf_paths(structure))
        missing = [path for path in self.fields if path not in got]
        extra = sorted(got - set(self.fields))
        if not missing and not extra:
            return f"the leaves nest differently: got {structure}, expected {self.structure}"
        parts = [f"missing {quote(missing)}"] * bool(missing) + [f"unexpected {quote(extra)}"] * bool(extra)
        return f"{' and '.join(parts)}; expected leaves {quote(self.fields)}"

    def __str__(self) -> str:
        return ", ".join(f"{path}: {field}" for path, field in self.fields.items())


class Look:
    """What trees of `schema` with so many rows look like: for those that come again and again."""

    __slots__ = ("_leaves", "schema")

    def __init__(self, schema: Schema, rows: int) -> None:
        self.schema = schema
        self._leaves = [(path, field.dtype, (rows, *field.shape)) for path, field in schema.fields.items()]

    def leaves(self, tree: Tree) -> Mapping[str, Any] | None:
        """The leaves of `tree` by path if they look just so. None says nothing of why not, nor that they don't fit the schema."""
        schema = self.schema
        if schema.flat:
            leaves: Any = tree
            if type(tree) is not dict or len(leaves) != len(self._leaves):
                return None
        else:
            found, structure = optree.tree_flatten(tree)
            if structure != schema.structure:
                return None
            leaves = dict(zip(schema.fields, found, strict=True))
        try:
            for path, dtype, shape in self._leaves:
                leaf = leaves[path]
                if type(leaf) is not ndarray or leaf.dtype is not dtype or leaf.shape != shape:
                    return None
        except KeyError:
            return None
        return leaves


def top_level(schema: Schema) -> dict[str, tuple[str, ...]]:
    """The leaves' paths by the name that they have, or that their subtree has, at the top of a row. SchemaError unless that
    is a dict of names."""
    tree = schema.unflatten({path: path for path in schema.fields})
    if type(tree) is not dict or not all(isinstance(name, str) for name in tree):
        raise SchemaError(
            f"items and derived leaves need rows that are a dict of names at the top; got {schema.structure}"
        )
    return {name: tuple(optree.tree_leaves(subtree)) for name, subtree in tree.items()}


def differs(shape: tuple[int, ...], other: tuple[int, ...], axis: int) -> bool:
    """Whether two shapes differ in the length of this axis, and in nothing else."""
    if len(shape) != len(other) or axis >= len(shape) or shape[axis] == other[axis]:
        return False
    return all(i == axis or size == other[i] for i, size in enumerate(shape))


def _how_to_declare(path: str, field: Field, leaf: Any) -> str:
    """What an error says of a leaf whose only fault is that it is longer than the ones before, along one axis."""
    shape = leaf.shape[1:]
    longer = [i for i, size in enumerate(field.shape) if differs(shape, field.shape, i) and shape[i] > size]
    if not longer:
        return ""
    declared = tuple("h" if i == longer[0] else size for i, size in enumerate(shape))
    return (
        f". Growth has to be declared: Store(fields={{{path!r}: conduit.Field({declared}, {str(field.dtype)!r}, grow='pad')}}), or "
        "grow='replace'"
    )


def _is_dict_of(tree: Tree, fields: Mapping[str, Field]) -> bool:
    return type(tree) is dict and tree.keys() == fields.keys()


def _describe(leaf: object) -> str:
    return f"a {type(leaf).__name__}"


def join(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def quote(paths: Any) -> str:
    return ", ".join(repr(path) for path in paths)
