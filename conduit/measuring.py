"""This machine's bandwidths, through the backend that will move the rows."""

from __future__ import annotations

from typing import Any

from conduit import backends
from conduit.clock import Clock
from conduit.core import probing
from conduit.core.backend import Backend
from conduit.topology.cluster import Topology
from conduit.topology.probe import Progress


def measure(
    backend: str | Backend[Any] = "torch",
    *,
    seconds: float = 5.0,
    row_bytes: int = probing.ROW_BYTES,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Topology:
    """The topology of this machine as the backend sees it, every bandwidth measured by batch-sized transfers (paper §5.1), for `Store(topology=)`,
    `conduit.plan` or `conduit.topology.save`.

    `seconds`: about how long it takes, once frameworks have compiled. `row_bytes`: of the rows that are moved. `progress(done, of, what)` is told
    how far it is. `clock`: by default the backend's, or the real one. Best on a machine that has nothing else to do: each figure says how
    noisy it was."""
    made = backends.load(backend)
    return probing.measure(
        made, backends.clock_of(made, clock), seconds=seconds, row_bytes=row_bytes, progress=progress
    )
