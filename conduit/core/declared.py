"""What is said of rows before any comes: `Store(fields=)`, and which of them may grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import optree

from conduit.core.experience import Field, Schema, Tree, differs, join, leaf_paths, quote
from conduit.errors import SchemaError, SettingError


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
                    f"{where}: there is no leaf {path!r}, which fields= declares; there are {quote(schema.fields)}"
                )
            if field.dtype != declared.dtype or not _is_like(field.shape, declared.shape):
                raise SchemaError(f"{where}: leaf {path!r} is {field}; fields= declares {declared}")

    def grown(self, schema: Schema, leaves: Mapping[str, Any], where: str) -> Schema:
        """The schema of `leaves`, by path: `schema` itself, or with fields that are wider where they may be. SchemaError where one is
        narrower. Whatever else differs is for `Schema.check` to find."""
        shapes = {}
        for path, axis in self.axis.items():
            leaf, field = leaves.get(path), schema.fields.get(path)
            if not isinstance(leaf, np.ndarray) or field is None or not differs(leaf.shape[1:], field.shape, axis):
                continue
            if leaf.shape[1 + axis] < field.shape[axis]:
                raise SchemaError(
                    f"{where}: leaf {path!r} has shape {leaf.shape}; its axis {self.fields[path].shape[axis]!r} was "
                    f"{leaf.shape[1 + axis]} long here and is {field.shape[axis]} by now, since it only grows. Rows that are filled up to "
                    f"(rows, {join(field.shape)}) would do"
                )
            shapes[path] = leaf.shape[1:]
        return schema.reshaped(shapes)

    def widest(self, one: Schema, other: Schema) -> Schema:
        """`one`, with fields as wide as `other`'s where these are wider; itself if none is."""
        shapes = {}
        for path, axis in self.axis.items():
            mine, theirs = one.fields.get(path), other.fields.get(path)
            if mine and theirs and differs(theirs.shape, mine.shape, axis) and theirs.shape[axis] > mine.shape[axis]:
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
            if leaf is None or field is None or not differs(leaf.shape[leading:], field.shape, axis):
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
