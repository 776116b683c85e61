"""Moves rows where it pays, by itself (paper §5.3): when a learner comes that they lie badly for, and now and then while training goes on."""

from __future__ import annotations

import threading

from conduit.core.buffer import ExperienceBuffer
from conduit.core.halt import Halt
from conduit.core.migration import Migrator
from conduit.core.moves import Migrated
from conduit.core.placer import Placer
from conduit.errors import CapacityError, ConduitError, MigrationError, SettingError, TopologyError, WaitTimeout

ITERATIONS = 1000
"""In so many a move has to save what it takes."""
LEAST_S = 30.0
"""Between two looks at what memory there is."""


class Mover:
    """Weighs a placement that the store was to choose against what would be chosen by now. It holds parts, and never the store."""

    def __init__(
        self, placer: Placer, migrator: Migrator, buffer: ExperienceBuffer, halt: Halt, timeout_s: float
    ) -> None:
        self._placer, self._migrator, self._buffer, self._halt = placer, migrator, buffer, halt
        self._timeout_s = timeout_s
        self._guard = threading.Lock()
        self._is_wanted = self._is_running = False
        self._looked_s = halt.clock.now()

    def weigh(self, iterations: int, timeout_s: float) -> Migrated:
        """Moves the rows if so many iterations where they should be save more than the move takes. SettingError before the first row."""
        storage = self._buffer.storage
        if storage is None:
            raise SettingError("migrate(): there is no row yet, and the first decides where rows go")
        best = self._placer.worth_moving(storage.row_bytes, storage.placement, storage.bytes_by_endpoint(), iterations)
        return self._migrator.migrate(best, timeout_s)

    def wants_thread(self) -> bool:
        """A learner came. Whether the caller is to give `run` a thread: there are rows, the store chooses where they lie, and none is at work."""
        with self._guard:
            self._is_wanted = self._placer.chooses and self._buffer.storage is not None
            starts = self._is_wanted and not self._is_running
            self._is_running = self._is_running or starts
            return starts

    def run(self) -> None:
        """The thread's life: until nothing is to be weighed any more."""
        try:
            while self._goes_on():
                self._try()
        # As any thread of the store's: what ends it must not go unseen.
        except BaseException as error:
            self._halt.now_because(error)
            if not isinstance(error, Exception):
                raise

    def _goes_on(self) -> bool:
        with self._guard:
            self._is_running = self._is_wanted and self._halt.reason is None
            self._is_wanted = False
            return self._is_running

    def look(self) -> None:
        """Now and then: memory may have become free."""
        now_s = self._halt.clock.now()
        if now_s - self._looked_s < LEAST_S or not self._placer.chooses or self._buffer.storage is None:
            return
        self._looked_s = now_s
        self._placer.refresh(self._buffer.storage.bytes_by_endpoint())
        self._try()

    def _try(self) -> None:
        try:
            self._placer.failed = ""
            self.weigh(ITERATIONS, self._timeout_s)
        except ConduitError as error:
            if self._halt.reason is not None:
                return
            if not isinstance(error, CapacityError | MigrationError | TopologyError | WaitTimeout):
                raise
            # The rows are whole where they were, and the store goes on: `explain` says why they didn't move.
            self._placer.failed = str(error)
