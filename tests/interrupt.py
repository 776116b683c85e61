"""Ctrl-C, wherever it strikes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable


def until_interrupted(call: Callable[[], object]) -> None:
    """Calls again and again, and returns after a KeyboardInterrupt in the midst of it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            # Again after a while: what strikes in a weak reference's callback is ignored.
            signal.setitimer(signal.ITIMER_VIRTUAL, 1e-3, 0.1)
            while True:
                call()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
