"""Where rows live: one Backend a framework, found by name and imported only when asked for."""

from __future__ import annotations

import importlib
import os
from typing import Any

from conduit.clock import Clock, RealClock
from conduit.core.backend import Backend
from conduit.errors import MissingExtraError, SettingError, UnknownBackendError

_HOMES = {
    "reference": ("conduit.backends.reference", "ReferenceBackend"),
    "torch": ("conduit.backends.torch.backend", "TorchBackend"),
    "jax": ("conduit.backends.jax.backend", "JaxBackend"),
}


def load(backend: str | Backend[Any], disk: str | os.PathLike[str] | None = None) -> Backend[Any]:
    """The backend of this name, or `backend` itself if it is one already. Imports no framework but its own. `disk`: the folder of
    rows on disk (conduit.backends.disk says which one by default).

    UnknownBackendError lists the names there are; MissingExtraError names the extra that brings the framework; SettingError
    says why the folder can't be used, or that a backend which was made already has one.
    """
    if not isinstance(backend, str):
        lacks = [name for name in vars(Backend) if not name.startswith("_") and not hasattr(backend, name)]
        if isinstance(backend, type) or lacks:
            what = f": it has no {', '.join(lacks)}" if lacks else ""
            raise UnknownBackendError(
                f"backend={backend!r}: expected one of {', '.join(_HOMES)}, or a Backend of your own{what}"
            )
        if disk is not None:
            raise SettingError(
                f"disk={disk!r}: a backend that was made already has its folder; give it when you make it"
            )
        return backend
    if backend not in _HOMES:
        raise UnknownBackendError(
            f"no backend {backend!r}; there are {', '.join(_HOMES)}, or pass a Backend of your own"
        )
    module, name = _HOMES[backend]
    try:
        return getattr(importlib.import_module(module), name)(disk=disk)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in (backend, f"{backend}lib"):
            raise
        raise MissingExtraError(
            f"backend {backend!r} needs {missing.name}, which is not installed: pip install 'conduit-rl[{backend}]'"
        ) from missing


def clock_of(backend: Backend[Any], clock: Clock | None) -> Clock:
    """The clock of a store over `backend`, for which `clock` was asked (None: any). SettingError where it isn't the one by which the
    backend's transfers take their time."""
    from conduit.backends.emulated import EmulatedBackend  # it loads its inner backend by this module

    if not isinstance(backend, EmulatedBackend):
        return RealClock() if clock is None else clock
    own = backend.clock
    if clock is None or clock is own or (isinstance(clock, RealClock) and isinstance(own, RealClock)):
        return own
    raise SettingError(
        f"clock={clock!r}: the transfers of the {backend.name} backend take their time on {own!r}, and a store has one clock; expected "
        "clock=backend.clock, or none"
    )
