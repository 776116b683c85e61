"""How much room a topology's memories have left."""

from __future__ import annotations

import threading
import weakref

from conduit.backends.checks import no_room_for
from conduit.topology.cluster import Topology
from conduit.topology.endpoint import Endpoint


class Held:
    """Room that columns take at an endpoint, for as long as anything refers to this."""

    __slots__ = ("__weakref__", "at", "size")

    def __init__(self, at: Endpoint, size: int) -> None:
        self.at = at
        self.size = size


class Memories:
    """What is held of each memory: columns that were allocated or transferred, until they are released or forgotten. Batches, which
    are soon given back, don't count: whoever plans sets room aside for them."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._held: list[weakref.ref[Held]] = []
        self._lock = threading.Lock()

    def free_bytes(self, at: Endpoint) -> int:
        with self._lock:
            return self._free_bytes(at)

    def hold(self, row_bytes: int, rows: int, at: Endpoint) -> Held:
        """Room for that many rows. CapacityError where it isn't there."""
        size = row_bytes * rows
        with self._lock:
            if size > (free := self._free_bytes(at)):
                raise no_room_for(row_bytes, rows, at, free)
            held = Held(at, size)
            self._held.append(weakref.ref(held))
        return held

    def release(self, held: Held) -> None:
        with self._lock:
            held.size = 0

    def _free_bytes(self, at: Endpoint) -> int:
        live = [held for ref in self._held if (held := ref()) is not None and held.size]
        self._held = [weakref.ref(held) for held in live]
        return self._topology.memory(at).free_bytes - sum(held.size for held in live if held.at == at)
