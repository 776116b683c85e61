"""Reading, replacing and adding leaves of a row tree by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from conduit.core.experience import Tree, leaf_paths
from conduit.errors import SchemaError


def get_leaf(tree: Tree, path: str, where: str) -> NDArray[Any]:
    """The leaf at `path` as a NumPy array. SchemaError lists the leaves there are."""
    leaves, structure = optree.tree_flatten(tree)
    paths = leaf_paths(structure)
    if path not in paths:
        raise SchemaError(f"{where}: there is no leaf {path!r}; the rows have {_quote(paths)}")
    return np.asarray(leaves[paths.index(path)])


def map_leaves(tree: Tree, path: str, function: Callable[[Any], Any], where: str) -> Tree:
    """`tree` with `function` applied to the leaf at `path`, or to every leaf below it. The other leaves are shared."""
    leaves, structure = optree.tree_flatten(tree)
    paths = leaf_paths(structure)
    chosen = [p == path or p.startswith(f"{path}/") for p in paths]
    if not any(chosen):
        raise SchemaError(f"{where}: there is no leaf {path!r}; the rows have {_quote(paths)}")
    mapped = [function(leaf) if hit else leaf for leaf, hit in zip(leaves, chosen, strict=True)]
    return optree.tree_unflatten(structure, mapped)


def add_leaves(rows: Tree, added: Mapping[str, NDArray[Any]], where: str) -> dict[str, Any]:
    """The dict `rows` with new leaves beside its own, which are shared."""
    if not isinstance(rows, Mapping):
        raise SchemaError(
            f"{where}: adds the leaves {_quote(added)}, so rows must be a dict; got {type(rows).__name__}"
        )
    if taken := [name for name in added if name in rows]:
        raise SchemaError(f"{where}: adds {_quote(taken)}, which the rows already have; push them under another name")
    return {**rows, **added}


def _quote(paths: Any) -> str:
    return ", ".join(repr(path) for path in paths)
