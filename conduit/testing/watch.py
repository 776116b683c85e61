"""An end for calls that have none."""

from __future__ import annotations

import ctypes
import threading
import time
from types import TracebackType
from typing import Self


class TooLongError(BaseException):
    """A call took longer than it may. Not an Exception, so that what is called doesn't take it for one of its own."""


class Watch:
    """Within the context, raises TooLongError in the thread that entered it when a call takes longer than `limit_s`: between two
    steps of Python, so that it can't end machine code."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._caller = threading.get_ident()
        self._began_s: float | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._look, name="conduit-check-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._caller = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()

    def begin(self) -> None:
        """A call begins."""
        self._began_s = time.monotonic()

    def end(self) -> None:
        """It is over."""
        self._began_s = None

    def _look(self) -> None:
        while not self._left.wait(min(self.limit_s / 4, 0.25)):
            began_s = self._began_s
            if began_s is not None and time.monotonic() - began_s > self.limit_s:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._caller), ctypes.py_object(TooLongError))
                return
