"""Rows taken from columns into a batch: by the calling thread, or by a second one beside it where that is quicker.

NumPy gives the GIL back while it takes, so two threads do copy at once. From about 2 MB on that pays when a core is idle;
when none is, the second thread is only in the way. So both are timed, and the slower one tried again now and then.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue

from conduit.backends.carving import Array
from conduit.core.backend import RowIndex

Pair = tuple[Array, Array]
"""A column, and where rows of it go."""
Piece = tuple[Array, RowIndex, Array]
"""A column, row numbers in it, and where these rows go."""

_LEAST_BYTES = 2 << 20
"""Waking a thread costs more than it can save below this size."""
_PIECES = 4
"""Of each array: whoever is quicker takes more of them. Each costs one wait for the GIL."""
_IDLE_S = 0.5
"""How long the second thread waits for work before it ends."""


class Gather:
    """Safe for several threads. Its own thread begins with the first large batch, and ends when none comes for a while."""

    def __init__(self) -> None:
        self._helper = _Helper()
        self._choices: dict[int, Choice] = {}

    def take(self, pairs: Sequence[Pair], index: RowIndex) -> None:
        """For each column and its rows: row i becomes row `index[i]` of the column. The index was checked."""
        size = sum(rows.nbytes for _, rows in pairs)
        if size < _LEAST_BYTES:
            _take_alone(pairs, index)
            return
        # A byte costs about the same in all batches of about this size.
        choice = self._choices.setdefault(size.bit_length(), Choice())
        helped = choice.helped
        began_s = time.perf_counter()
        if helped:
            self._helper.share(deque(_pieces(pairs, index)))
        else:
            _take_alone(pairs, index)
        choice.learn(helped, (time.perf_counter() - began_s) / size)


class Choice:
    """Whether to have help, from what the last calls cost with it and without.

    Calls go without help for a while, then with it for as long as that pays. Help on a busy machine is quick at most times
    and very slow at some, so it is judged by its mean, and what it has to beat is the median without."""

    _ALONE, _MOST_ALONE = 8, 1024
    """Calls before help is tried; more each time that it didn't pay."""
    _TRIAL, _PROVEN, _HELPED = 4, 64, 1024
    """Calls with help before it is judged, before it is believed in, and before calls without it are timed anew."""
    _PAYS = 0.97

    def __init__(self) -> None:
        self.helped = False
        self._calls = 0
        self._wait = self._ALONE
        self._alone = deque[float](maxlen=7)
        self._mean = 0.0

    def learn(self, helped: bool, cost: float) -> None:
        """A call with or without help has cost this much."""
        if helped is not self.helped:
            return
        self._calls += 1
        if not helped:
            self._alone.append(cost)
            if self._calls >= self._wait:
                self.helped, self._calls = True, 0
            return
        # The first call may have had to wake a new thread.
        self._mean = cost if self._calls <= 2 else self._mean + (cost - self._mean) / min(self._calls - 1, 8)
        pays = self._calls < self._TRIAL or self._mean < self._PAYS * statistics.median(self._alone)
        if not pays or self._calls >= self._HELPED:
            self._wait = self._ALONE if self._calls >= self._PROVEN else min(2 * self._wait, self._MOST_ALONE)
            self.helped, self._calls = False, 0


class _Helper:
    """A thread that takes pieces beside whoever calls `share`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._jobs = SimpleQueue[_Job]()

    def share(self, pieces: deque[Piece]) -> None:
        """Takes all pieces, of which the helper takes what it comes to. A helper that is late, or gone, takes none."""
        job = _Job(pieces)
        # Also dead in a forked child.
        if self._thread is None or not self._thread.is_alive():
            self._begin()
        self._jobs.put(job)
        job.finish()

    def _begin(self) -> None:
        """A new thread, if there may be one more. It doesn't know this object, which may go before it."""
        self._jobs = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="conduit-gather", daemon=True)
        with contextlib.suppress(RuntimeError):
            self._thread.start()


class _Job:
    def __init__(self, pieces: deque[Piece]) -> None:
        self._pieces = pieces
        self._helped = threading.Lock()
        self._error: BaseException | None = None

    def help(self) -> None:
        with self._helped:
            try:
                _take_all(self._pieces)
            except BaseException as error:  # raised again by `finish`, in the thread that wants the rows
                self._error = error

    def finish(self) -> None:
        """Returns when all pieces are taken, or raises when nobody takes any more."""
        try:
            _take_all(self._pieces)
        finally:
            self._pieces.clear()
            with self._helped:
                pass
        if self._error is not None:
            raise self._error


def _serve(jobs: SimpleQueue[_Job]) -> None:
    while True:
        try:
            job = jobs.get(timeout=_IDLE_S)
        except Empty:
            return
        job.help()
        del job


def _take_alone(pairs: Iterable[Pair], index: RowIndex) -> None:
    for column, rows in pairs:
        # `clip` is the mode that gathers without a buffer.
        column.take(index, 0, rows, "clip")


def _pieces(pairs: Iterable[Pair], index: RowIndex) -> Iterator[Piece]:
    step = -(-len(index) // _PIECES)
    for column, rows in pairs:
        for start in range(0, len(index), step):
            yield column, index[start : start + step], rows[start : start + step]


def _take_all(pieces: deque[Piece]) -> None:
    while True:
        try:
            column, index, rows = pieces.popleft()
        except IndexError:
            return
        column.take(index, 0, rows, "clip")
