"""Values as JSON and arrays, and back: what a checkpoint's manifest and files can hold, without pickle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.errors import CheckpointError

Arrays = dict[str, NDArray[Any]]

_ARRAY, _FLOAT, _KIND, _PAIRS, _RANGE, _TUPLE = _TAGS = ("array", "float", "kind", "pairs", "range", "tuple")


class Packer:
    """Packs numbers, strings, None, lists, tuples, ranges, dicts, NumPy arrays and instances of the dataclasses and enums `kinds`.

    A dict of strings stays a dict; what JSON hasn't becomes a dict of one entry that says what it is."""

    def __init__(self, kinds: Sequence[type]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def pack(self, value: Any, arrays: Arrays, where: str) -> Any:
        """`value` as JSON; its arrays are added to `arrays`, by where they stand. CheckpointError names what can't be packed."""
        kind = type(value)
        if issubclass(kind, Enum) and kind.__name__ in self._kinds:
            return {_KIND: [kind.__name__, value.value]}
        if kind is float and not math.isfinite(value):
            return {_FLOAT: str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.ndarray):
            name = where
            while name in arrays:
                name += "'"
            arrays[name] = value
            return {_ARRAY: name}
        if isinstance(value, np.generic):
            return self.pack(value.item(), arrays, where)
        if isinstance(value, range):
            return {_RANGE: [value.start, value.stop, value.step]}
        if kind is list or kind is tuple:
            items = [self.pack(each, arrays, f"{where}/{i}") for i, each in enumerate(value)]
            return items if kind is list else {_TUPLE: items}
        if isinstance(value, Mapping) and _is_plain_dict(value):
            packed = {key: self.pack(each, arrays, f"{where}/{key}") for key, each in value.items()}
            if all(isinstance(key, str) for key in packed) and not (len(packed) == 1 and packed.keys() <= set(_TAGS)):
                return packed
            return {_PAIRS: [[key, each] for key, each in packed.items()]}
        if kind.__name__ in self._kinds and dataclasses.is_dataclass(kind):
            told = {
                each.name: self.pack(getattr(value, each.name), arrays, f"{where}/{each.name}")
                for each in dataclasses.fields(kind)
                if each.init
            }
            return {_KIND: [kind.__name__, told]}
        raise CheckpointError(
            f"{where} is {_describe(value)}, which a checkpoint can't hold: it holds numbers, strings, arrays, dicts, lists and tuples"
        )

    def unpack(self, packed: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
        """The value again."""
        if isinstance(packed, list):
            return [self.unpack(each, arrays) for each in packed]
        if not isinstance(packed, dict):
            return packed
        tag = next(iter(packed)) if len(packed) == 1 and packed.keys() <= set(_TAGS) else None
        if tag is None:
            return {key: self.unpack(each, arrays) for key, each in packed.items()}
        told = packed[tag]
        if tag == _ARRAY:
            return arrays[told]
        if tag == _FLOAT:
            return float(told)
        if tag == _RANGE:
            return range(*told)
        if tag == _TUPLE:
            return tuple(self.unpack(each, arrays) for each in told)
        if tag == _PAIRS:
            return {key: self.unpack(each, arrays) for key, each in told}
        name, inside = told
        if name not in self._kinds:
            raise CheckpointError(f"the checkpoint holds a {name}, which this Conduit doesn't know")
        kind = self._kinds[name]
        if issubclass(kind, Enum):
            return kind(inside)
        return kind(**{key: self.unpack(each, arrays) for key, each in inside.items()})


def is_plain(tree: Any) -> bool:
    """Whether a tree of strings can be packed."""
    try:
        Packer(()).pack(tree, {}, "tree")
    except CheckpointError:
        return False
    return True


def _is_plain_dict(value: Mapping[Any, Any]) -> bool:
    return type(value) is dict and all(isinstance(key, str | int) and not isinstance(key, bool) for key in value)


def _describe(value: Any) -> str:
    return f"a {type(value).__name__}"
