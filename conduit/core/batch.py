"""What a learner gets: rows, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.experience import Tree

Keys = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Padding:
    """What of a leaf is real, where rows grow. `extent`: (B,), (B, T) or what leading axes the leaf has, how long the growing axis
    was when each row came. `axis`: which axis of the row that is, of `axes`; `width`: how long it is in the batch."""

    extent: NDArray[np.int64]
    axis: int
    axes: int
    width: int

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True where the leaf is real, False where it was filled up: the leading axes, then `width` at the growing axis and 1 at the
        row's others, so that it goes with the leaf as it is."""
        real = np.arange(self.width) < self.extent[..., None]
        after, shape = self.axes - self.axis - 1, self.extent.shape
        return real.reshape(*shape, *(1,) * self.axis, self.width, *(1,) * after)


NO_PADDING: Mapping[str, Padding] = MappingProxyType({})


def _itself(array: NDArray[Any]) -> Any:
    return array


class SampleInfo:
    """What is known of a batch of B entries. Arrays are NumPy's, of shape (B,), but for `weight` and `mask`. Of an entry that
    is more than a row, what is known of the row that it was drawn by: its first, of a sequence the first trained one.

    What most learners never ask for is made when they do. Nothing here is to be changed."""

    __slots__ = (
        "_mask",
        "_masks",
        "_padding",
        "_policy_version",
        "_priority",
        "_probability",
        "_to_batch",
        "_weight",
        "frontier",
        "keys",
        "number",
        "priority_lag",
        "store_version",
        "table_size",
        "times_sampled",
    )

    def __init__(
        self,
        *,
        number: int,
        keys: Keys,
        frontier: int,
        table_size: int,
        priority_lag: int,
        probability: float | NDArray[np.float64],
        priority: float | NDArray[np.float64],
        policy_version: NDArray[np.int64],
        store_version: int,
        weight: Any,
        mask: Any = None,
        times_sampled: NDArray[np.int64] | None = None,
        padding: Mapping[str, Padding] = NO_PADDING,
        to_batch: Callable[[NDArray[Any]], Any] = _itself,
    ) -> None:
        """`weight`, `mask`: an array, or a function that makes it when it is asked for. `padding`: by path, of leaves that grow.
        `to_batch`: makes an array of the batch's own framework, where the batch is."""
        self.number = number
        """Which global batch this is; `Store.sample` counts its own."""
        self.keys = keys
        """Insertion numbers: what `update_priorities` takes."""
        self.frontier = frontier
        """The last insertion number visible to the draw. Equal seed, number and frontier give equal rows (with priorities: after
        equal updates)."""
        self.table_size = table_size
        """How many rows could be drawn."""
        self.times_sampled = times_sampled
        """How often each entry has been drawn, this time included; None where the table has no `max_times_sampled`, and doesn't
        count."""
        self.priority_lag = priority_lag
        """How many batches this learner had been handed, or was about to be, whose priority updates the draw could not know; 0
        when drawn at the pull."""
        self.store_version = store_version
        """The store's policy version at the time of the draw."""
        self._probability = probability
        self._priority = priority
        self._policy_version = policy_version
        self._weight = weight
        self._mask = mask
        self._padding = padding
        self._to_batch = to_batch
        self._masks: dict[str, Any] | None = None

    @property
    def weight(self) -> Any:
        """Importance-sampling weight, float32, at most 1: an array of the batch's own framework, where the batch is."""
        weight = self._weight
        if callable(weight):
            self._weight = weight = weight()
        return weight

    @property
    def mask(self) -> Any:
        """(B, T) bool, of the batch's own framework, where the batch is: True for rows, False for padding; None where an entry
        has no T axis."""
        mask = self._mask
        if callable(mask):
            self._mask = mask = mask()
        return mask

    @property
    def padding(self) -> Mapping[str, Padding]:
        """What `extents` and `padding_mask` are made of, by path."""
        return self._padding

    @property
    def extents(self) -> dict[str, NDArray[np.int64]]:
        """Of each leaf that `Store(fields=)` lets grow, by its path in the batch as it was drawn (before delivery hooks): how long its
        growing axis was when each row came; what is beyond are zeros. (B,), or (B, T), or what other axes the leaf has before the
        row's own; 0 for rows that are padding themselves. Empty where nothing grows."""
        return {path: padding.extent for path, padding in self._padding.items()}

    def padding_mask(self, path: str) -> Any:
        """Bool, of the batch's own framework, where the batch is: True where leaf `path` is real, False where it was filled up. It has the
        leaf's axes, with 1 for those of the row that don't grow: (B, W) for rows of shape (W,). None for a leaf that doesn't grow."""
        if path not in self._padding:
            return None
        if self._masks is None:
            self._masks = {}
        if path not in self._masks:
            self._masks[path] = self._to_batch(self._padding[path].mask)
        return self._masks[path]

    @property
    def probability(self) -> NDArray[np.float64]:
        """The chance of each draw to give this entry, at the time of the draw."""
        self._probability = probability = _for_each(self._probability, self.keys)
        return probability

    @property
    def priority(self) -> NDArray[np.float64]:
        """Raw priority at the time of the draw (1 where the sampler has none)."""
        self._priority = priority = _for_each(self._priority, self.keys)
        return priority

    @property
    def age(self) -> NDArray[np.int64]:
        """How many rows were inserted after this one and visible to the draw."""
        return self.frontier - self.keys

    @property
    def policy_version(self) -> NDArray[np.int64]:
        """The policy version that made the row."""
        return self._policy_version

    @property
    def version_lag(self) -> NDArray[np.int64]:
        """How many policy versions the row was behind the store's at the time of the draw."""
        return self.store_version - self._policy_version

    def plain(self, to_numpy: Callable[[Any], NDArray[Any]]) -> dict[str, Any]:
        """What this was made of, as numbers and NumPy arrays of its own; None, or True for a mask, what would be made when asked for."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in ("_masks", "_to_batch")}
        weight, mask = self._weight, self._mask
        values["_weight"] = None if callable(weight) else np.array(to_numpy(weight))
        values["_padding"] = {
            path: [np.array(each.extent), each.axis, each.axes, each.width] for path, each in self._padding.items()
        }
        values["_mask"] = None if mask is None else True if callable(mask) else np.array(to_numpy(mask))
        return {name.lstrip("_"): value for name, value in values.items()}

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """For pickle and copy: with all made."""
        values = {name: getattr(self, name) for name in self.__slots__}
        made = {"_weight": self.weight, "_mask": self.mask}
        masks = {path: self.padding_mask(path) for path in self._padding}
        return None, {**values, **made, "_masks": masks, "_padding": dict(self._padding), "_to_batch": _itself}

    def __repr__(self) -> str:
        return f"SampleInfo(number={self.number}, keys={self.keys}, frontier={self.frontier}, priority_lag={self.priority_lag})"


def _for_each(value: float | NDArray[np.float64], keys: Keys) -> NDArray[np.float64]:
    return np.full(len(keys), value) if isinstance(value, (int, float)) else value


@dataclass(frozen=True, slots=True)
class Batch:
    """`data` has the stored rows' structure, and what the store's item and `derive` add; each leaf (B, *field.shape), or
    (B, T, *field.shape) for items of several rows, in memory that belongs to the receiver."""

    data: Tree
    info: SampleInfo

    def __len__(self) -> int:
        return len(self.info.keys)
