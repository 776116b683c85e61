"""Loops as machine code, where numba is there to make it (the extra `fast`); NumPy's calls where it isn't. The same results either way."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any


def load(name: str) -> ModuleType | None:
    """`conduit.core.<name>` where numba is there, and the environment doesn't say CONDUIT_NUMBA=0."""
    if os.environ.get("CONDUIT_NUMBA") == "0":
        return None
    try:
        return import_module(f"conduit.core.{name}")
    except ImportError:
        return None


def compiled(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a loop at once, for one signature: no call waits for it later. ImportError where numba is switched off: as plain
    Python a loop is slow beyond use."""
    import numba

    def made(loop: Callable[..., Any]) -> Callable[..., Any]:
        try:
            kernel = numba.njit(signature, cache=True)(loop)
        except (RuntimeError, OSError):
            # No folder that numba may write its cache to, as in a read-only installation.
            kernel = numba.njit(signature)(loop)
        if isinstance(kernel, FunctionType):
            raise ImportError("numba is switched off: NUMBA_DISABLE_JIT")
        return kernel

    return made
