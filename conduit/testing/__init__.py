"""For who extends Conduit: `check_sampler` tries a sampler, `BackendContract` a backend.

The suite for backends needs pytest, and is imported when it is asked for; `check_sampler` does without."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from conduit.testing.samplers import SamplerReport, check_sampler

if TYPE_CHECKING:
    from conduit.testing.backends import (
        DTYPES,
        FRAMEWORKS,
        SHAPES,
        BackendContract,
        Rows,
        address,
        assert_rows,
        assert_same,
        assert_stored,
        example_rows,
        index_of,
        on_host,
        overlap,
        random_bits,
        span,
        stored,
        wide_rows,
    )

__all__ = [
    "DTYPES",
    "FRAMEWORKS",
    "SHAPES",
    "BackendContract",
    "Rows",
    "SamplerReport",
    "address",
    "assert_rows",
    "assert_same",
    "assert_stored",
    "check_sampler",
    "example_rows",
    "index_of",
    "on_host",
    "overlap",
    "random_bits",
    "span",
    "stored",
    "wide_rows",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.backends"), name)
