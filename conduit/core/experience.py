"""What a row is: its fields, their dtypes and shapes, and how they nest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import optree
from numpy import ndarray
from numpy.typing import DTypeLike

from conduit.errors import SchemaError, SettingError

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
    longer ones to draw from. Fields of stored rows have numbers only, and no `grow`."""

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
                f"{where}: several leaves would be called {_quote(twice)}; rename the keys that contain '/'"
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
                f"{where}: leaf {path!r} has shape {leaf.shape}; expected (rows, {_join(field.shape)}){grown}"
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
        parts = [f"missing {_quote(missing)}"] * bool(missing) + [f"unexpected {_quote(extra)}"] * bool(extra)
        return f"{' and '.join(parts)}; expected leaves {_quote(self.fields)}"

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


class Declared:
    """What `Store(fields=)` says of leaves by path. `axis`: of those that may grow, which axis of the field does."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        """SettingError names a declaration that can't be."""
        if not isinstance(fields, Mapping):
            raise SettingError(
                f"fields={fields!r}: expected a dict of leaves' paths to conduit.Field(…), such as {_EXAMPLE}"
            )
        self.fields = {path: _checked(path, field) for path, field in fields.items()}
        self.axis = {
            path: next(i for i, size in enumerate(field.shape) if isinstance(size, str))
            for path, field in self.fields.items()
            if field.grow is not None
        }

    @property
    def replaces(self) -> bool:
        """Whether rows of the old form ever leave for those of a new one."""
        return any(field.grow == "replace" for field in self.fields.values())

    def check(self, schema: Schema, where: str) -> None:
        """SchemaError unless rows have all that is declared, as it is declared."""
        for path, declared in self.fields.items():
            field = schema.fields.get(path)
            if field is None:
                raise SchemaError(
                    f"{where}: there is no leaf {path!r}, which fields= declares; there are {_quote(schema.fields)}"
                )
            if field.dtype != declared.dtype or not _is_like(field.shape, declared.shape):
                raise SchemaError(f"{where}: leaf {path!r} is {field}; fields= declares {declared}")

    def grown(self, schema: Schema, leaves: Mapping[str, Any], where: str) -> Schema:
        """The schema of `leaves`, by path: `schema` itself, or with fields that are wider where they may be. SchemaError where one is
        narrower. Whatever else differs is for `Schema.check` to find."""
        shapes = {}
        for path, axis in self.axis.items():
            leaf, field = leaves.get(path), schema.fields.get(path)
            if not isinstance(leaf, np.ndarray) or field is None or not _differs(leaf.shape[1:], field.shape, axis):
                continue
            if leaf.shape[1 + axis] < field.shape[axis]:
                raise SchemaError(
                    f"{where}: leaf {path!r} has shape {leaf.shape}; its axis {self.fields[path].shape[axis]!r} was "
                    f"{leaf.shape[1 + axis]} long here and is {field.shape[axis]} by now, since it only grows. Rows that are filled up to "
                    f"(rows, {_join(field.shape)}) would do"
                )
            shapes[path] = leaf.shape[1:]
        return schema.reshaped(shapes)

    def widest(self, one: Schema, other: Schema) -> Schema:
        """`one`, with fields as wide as `other`'s where these are wider; itself if none is."""
        shapes = {}
        for path, axis in self.axis.items():
            mine, theirs = one.fields.get(path), other.fields.get(path)
            if mine and theirs and _differs(theirs.shape, mine.shape, axis) and theirs.shape[axis] > mine.shape[axis]:
                shapes[path] = theirs.shape
        return one.reshaped(shapes)

    def widths(self, schema: Schema) -> dict[str, int]:
        """How long the growing axis of each field is that may grow."""
        return {path: schema.fields[path].shape[axis] for path, axis in self.axis.items() if path in schema.fields}

    def padded(self, leaves: Mapping[str, Any], schema: Schema, leading: int = 1) -> Mapping[str, Any]:
        """`leaves`, by path, with `leading` axes before the fields' own: filled up with zeros to `schema`'s widths where they are
        narrower and may be; themselves where none is."""
        made = {}
        for path, axis in self.axis.items():
            leaf, field = leaves.get(path), schema.fields.get(path)
            if leaf is None or field is None or not _differs(leaf.shape[leading:], field.shape, axis):
                continue
            lacks = field.shape[axis] - leaf.shape[leading + axis]
            if lacks > 0:
                made[path] = np.pad(leaf, [(0, lacks if i == leading + axis else 0) for i in range(leaf.ndim)])
        return {**leaves, **made} if made else leaves

    def padded_final(self, final: Mapping[str, Tree], schema: Schema, to: Schema) -> Mapping[str, Tree]:
        """The final, leaves (*shape), of a row of `schema`, filled up to `to` as the row is. A leaf that isn't as wide as the row's stays as
        it is, and doesn't fit."""
        found, structure = optree.tree_flatten(cast(Any, final))
        leaves = dict(zip(leaf_paths(structure), found, strict=True))
        alike = {
            path: leaf
            for path, leaf in leaves.items()
            if path in schema.fields and leaf.shape == schema.fields[path].shape
        }
        filled = {**leaves, **self.padded(alike, to, leading=0)}
        return cast(Any, optree.tree_unflatten(structure, [filled[path] for path in leaves]))


_EXAMPLE = '{"obs": conduit.Field(("h",), np.float32, grow="pad")}'


def _checked(path: object, field: Any) -> Field:
    """A declaration, with a NumPy dtype."""
    where = f"fields[{path!r}]"
    if not isinstance(path, str) or not path:
        raise SettingError(f"{where}: expected a leaf's path as a key, such as 'obs' or 'obs/image'")
    if not isinstance(field, Field):
        raise SettingError(f"{where}={field!r}: expected a conduit.Field(…), such as {_EXAMPLE}")
    if not isinstance(field.shape, Sequence) or isinstance(field.shape, str):
        raise SettingError(
            f"{where}: shape={field.shape!r}; expected a tuple of whole numbers and names, such as ('h', 3)"
        )
    shape = tuple(field.shape)
    named = [size for size in shape if isinstance(size, str)]
    for size in shape:
        if not isinstance(size, str) and (not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 0):
            raise SettingError(
                f"{where}: shape={shape} has {size!r}; expected whole numbers ≥ 0, and a name where it may grow"
            )
    if len(named) > 1:
        raise SettingError(f"{where}: shape={shape} names {len(named)} axes; one axis of a field may grow")
    if named and field.grow not in ("pad", "replace"):
        raise SettingError(
            f"{where}: shape={shape} names an axis that may grow, with grow={field.grow!r}; expected grow='pad', which fills older rows up "
            "with zeros, or grow='replace', which lets them leave"
        )
    if not named and field.grow is not None:
        raise SettingError(
            f"{where}: grow={field.grow!r}, and shape={shape} names no axis; expected one, such as ('h',)"
        )
    try:
        dtype = np.dtype(field.dtype)
    except TypeError as error:
        raise SettingError(f"{where}: dtype={field.dtype!r}: {error}") from None
    return Field(tuple(size if isinstance(size, str) else int(size) for size in shape), dtype, field.grow)


def _is_like(shape: tuple[int, ...], declared: tuple[Any, ...]) -> bool:
    return len(shape) == len(declared) and all(
        isinstance(asked, str) or size == asked for size, asked in zip(shape, declared, strict=True)
    )


def _differs(shape: tuple[int, ...], other: tuple[int, ...], axis: int) -> bool:
    """Whether two shapes differ in the length of this axis, and in nothing else."""
    if len(shape) != len(other) or axis >= len(shape) or shape[axis] == other[axis]:
        return False
    return all(i == axis or size == other[i] for i, size in enumerate(shape))


def _how_to_declare(path: str, field: Field, leaf: Any) -> str:
    """What an error says of a leaf whose only fault is that it is longer than the ones before, along one axis."""
    shape = leaf.shape[1:]
    longer = [i for i, size in enumerate(field.shape) if _differs(shape, field.shape, i) and shape[i] > size]
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


def _join(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _quote(paths: Any) -> str:
    return ", ".join(repr(path) for path in paths)
