"""A trace: for a block, what a store's threads do, written as a timeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, Self

from conduit.core.recorder import Recorder
from conduit.core.timeline import written
from conduit.core.whole import check_whole
from conduit.errors import SettingError, TraceError

MOST_EVENTS = 1_000_000
"""Some 450 MB while they are held, and 170 MB as a file."""


class Traced(Protocol):
    """What tells a recorder."""

    now: Callable[[], float]
    recorder: Recorder | None

    def record(self, recorder: Recorder) -> bool:
        """Whether it tells this one from here on: one at a time."""
        ...


class Trace:
    """For the block, records what happens, and writes it at the end. What it says of its errors, `Store.trace` says."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        traced: Traced,
        events: int = MOST_EVENTS,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """`about`: what the file says of the store."""
        try:
            self.path = os.fsdecode(path)
        except TypeError:
            raise SettingError(f"trace(path={path!r}): expected the path of a file to write") from None
        check_whole("trace(events)", events)
        self._traced, self._events, self._about = traced, events, about or {}
        self._recorder: Recorder | None = None
        self._beside = f"{self.path}.{os.getpid()}.tmp"

    def __enter__(self) -> Self:
        recorder = Recorder(self._traced.now, self._events, self.path)
        if not self._traced.record(recorder):
            other = self._traced.recorder
            where = "" if other is None else f" into {other.path!r}"
            raise TraceError(
                f"trace({self.path!r}): the store is being traced{where} already; expected one trace at a time"
            )
        # Whether it can be written is known now, not after a run of hours.
        try:
            if os.path.isdir(self.path):
                raise IsADirectoryError(None, "it is a folder; expected the path of a file")
            open(self._beside, "x", encoding="utf-8").close()
        except FileExistsError as error:
            self._traced.recorder = None
            why = f"{self._beside!r} is there already: another trace is being written there"
            raise TraceError(f"trace({self.path!r}): {why}") from error
        except (OSError, ValueError) as error:
            self._traced.recorder = None
            raise self._error(error) from error
        self._recorder = recorder
        return self

    def __exit__(self, kind: object, raised: BaseException | None, trace: object) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        self._traced.recorder = None
        recorder.stop()
        try:
            with open(self._beside, "w", encoding="utf-8") as file:
                for piece in written(recorder, self._about):
                    file.write(piece)
            os.replace(self._beside, self.path)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(self._beside)
            if not isinstance(error, OSError):
                raise
            if raised is None:
                raise self._error(error) from error
            raised.add_note(str(self._error(error)))

    def _error(self, error: OSError | ValueError) -> TraceError:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return TraceError(f"trace({self.path!r}): can't write the timeline: {why}")
