"""Hooks that change a leaf's scale."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from conduit.core.hook import HookInput, HookOutput, RowRule, Scope, Stage
from conduit.errors import SchemaError
from conduit.transforms.leaves import map_leaves


@dataclass(frozen=True, slots=True)
class Normalize:
    """Shifts and scales `leaf` to mean 0 and standard deviation 1 over the whole rollout unit (all lanes and steps).

    (x − mean) / (std + eps), computed in float64 over every element, kept in the leaf's dtype. `leaf` is a path such as
    "advantage"; where it names a subtree, each leaf below it is normalised by itself.

    On-policy a unit is the iteration; off-policy it is one push, so the mean is over that push's lanes only. SchemaError
    for a unit of one row, which would lose its value."""

    leaf: str = "advantage"
    eps: float = 1e-8

    stage: Stage = field(default="ingestion", init=False, repr=False)
    per: Scope = field(default="unit", init=False, repr=False)
    rows: RowRule = field(default="same", init=False, repr=False)

    @property
    def name(self) -> str:
        return f"Normalize({self.leaf!r})"

    def __call__(self, source: HookInput, sink: HookOutput, /) -> None:
        sink.write(map_leaves(source.read(), self.leaf, self._normalize, self.name))

    def _normalize(self, leaf: Any) -> NDArray[Any]:
        x = np.asarray(leaf)
        if len(x) == 1:
            raise SchemaError(
                f"{self.name}: the unit has 1 row, whose deviation is 0, and its value would be lost; expected at least 2. "
                'Off-policy a unit is one push: scale by a constant in a hook of your own (per="row"), or in the trainer'
            )
        centred = x - x.mean(dtype=np.float64)
        return (centred / (x.std(dtype=np.float64) + self.eps)).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class ToFloat:
    """Turns `leaf`, or every leaf below it, into `dtype` and multiplies it by `scale`: pixels to [0, 1] by default.

    At delivery, its default, rows are stored as they were pushed, so images take a quarter of the memory; with
    `stage="ingestion"` they are converted once and stored as floats. One hook a leaf: `next_obs` needs its own."""

    leaf: str = "obs"
    scale: float = 1 / 255
    dtype: DTypeLike = np.float32
    stage: Stage = "delivery"

    per: Scope = field(default="row", init=False, repr=False)
    rows: RowRule = field(default="same", init=False, repr=False)

    @property
    def name(self) -> str:
        return f"ToFloat({self.leaf!r})"

    def __call__(self, source: HookInput, sink: HookOutput, /) -> None:
        sink.write(map_leaves(source.read(), self.leaf, self._scale, self.name))

    def _scale(self, leaf: Any) -> NDArray[Any]:
        dtype: np.dtype[Any] = np.dtype(self.dtype)
        return np.asarray(leaf).astype(dtype) * np.asarray(self.scale, dtype)
