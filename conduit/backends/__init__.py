"""Where rows live: one Backend a framework, found by name and imported only when asked for."""

from __future__ import annotations

import importlib
from typing import Any

from conduit.core.backend import Backend
from conduit.errors import MissingExtraError, UnknownBackendError

_HOMES = {
    "reference": ("conduit.backends.reference", "ReferenceBackend"),
    "torch": ("conduit.backends.torch.backend", "TorchBackend"),
    "jax": ("conduit.backends.jax.backend", "JaxBackend"),
}


def load(backend: str | Backend[Any]) -> Backend[Any]:
    """The backend of this name, or `backend` itself if it is one already. Imports no framework but its own.

    UnknownBackendError lists the names there are; MissingExtraError names the extra that brings the framework.
    """
    if backend is None or isinstance(backend, type):
        raise UnknownBackendError(f"backend={backend!r}: expected one of {', '.join(_HOMES)}, or a Backend of your own")
    if not isinstance(backend, str):
        return backend
    if backend not in _HOMES:
        raise UnknownBackendError(
            f"no backend {backend!r}; there are {', '.join(_HOMES)}, or pass a Backend of your own"
        )
    module, name = _HOMES[backend]
    try:
        return getattr(importlib.import_module(module), name)()
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in (backend, f"{backend}lib"):
            raise
        raise MissingExtraError(
            f"backend {backend!r} needs {missing.name}, which is not installed: pip install 'conduit-rl[{backend}]'"
        ) from missing
