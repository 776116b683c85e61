"""What a row is: its fields, their dtypes and shapes, and how they nest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import optree

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


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of a row: `shape` without the row axis, `dtype` exact (NumPy's, or ml_dtypes' for bfloat16)."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

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
            raise SchemaError(f"{where}: leaf {path!r} has shape {leaf.shape}; expected (rows, {_join(field.shape)})")
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


def _is_dict_of(tree: Tree, fields: Mapping[str, Field]) -> bool:
    return type(tree) is dict and tree.keys() == fields.keys()


def _describe(leaf: object) -> str:
    return f"a {type(leaf).__name__}"


def _join(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _quote(paths: Any) -> str:
    return ", ".join(repr(path) for path in paths)
