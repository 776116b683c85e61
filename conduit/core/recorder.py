"""Who is told what a store's threads do while a trace is taken: as little as will do is kept of each event, and nothing worked out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import optree

STAGE, PORT, OPERATOR, MOVE, PHASE, PAUSED, WAIT = range(7)
"""Kinds of slices. Where two begin and end at the same instant, the later of these is inside the earlier."""
_MOVES = {"migration": MOVE, "drain": PAUSED, "delta": PAUSED, "rebind": PAUSED}
"""Of a migration: the whole, and what is part of its pause."""


class Track:
    """What one thread does. Only that thread writes it."""

    __slots__ = ("name", "number", "open", "told")

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = threading.current_thread().name
        self.open: list[Slice] = []
        """The slices that have begun and not ended, the outermost first."""
        self.told: dict[str, Mapping[str, Any]] = {}
        """What is known of the slice of that name that is recorded next."""


class Slice:
    """What a thread did from `began_s` to `ended_s`. `opened`, `closed`: the places of both among all that happened; `opened` is None of one
    that was only told of when it was over."""

    __slots__ = ("args", "began_s", "closed", "ended_s", "kind", "name", "opened", "port", "track", "waited")

    def __init__(self, track: Track, name: str, kind: int, began_s: float, opened: int | None) -> None:
        self.track, self.name, self.kind = track, name, kind
        self.began_s = self.ended_s = began_s
        self.opened, self.closed = opened, -1
        self.args: dict[str, Any] = {}
        self.port: Slice | None = None
        """Of a wait: the call that waits."""
        self.waited: Sequence[float] = ()
        """Of a call: how long it waited for rows that nobody had pushed, for their ingestion, and for learners."""

    def holds(self, other: Slice) -> bool:
        """Whether `other`, which ended before this on the same thread, is inside."""
        if self.opened is not None:
            return other.closed > self.opened
        return other.began_s >= self.began_s and (other.ended_s > self.began_s or other.kind > self.kind)

    def surrounds(self, other: Slice) -> bool:
        """Whether any `other` is inside."""
        return other.track is self.track and other.closed < self.closed and self.holds(other)


class Instant(NamedTuple):
    """Something changed for the whole store."""

    at_s: float
    place: int
    track: Track
    name: str
    args: Mapping[str, Any]


class Count(NamedTuple):
    """There are so many batches."""

    at_s: float
    place: int
    name: str
    value: int


class Recorder:
    """Is told what happens, by the threads that do it, until it is stopped. It keeps the last `events`."""

    def __init__(self, now: Callable[[], float], events: int, path: str) -> None:
        self.now, self.path = now, path
        self.began_s = self.ended_s = now()
        self.is_on = True
        self.events: deque[Slice | Instant | Count] = deque(maxlen=events)
        self.tracks: list[Track] = []
        self._happened = 0
        # Who reads the file takes a thread of its process's number, which is 1, for the main one.
        self._numbers = count(2)
        self._places = count()
        self._lock = threading.Lock()
        """Guards the events, and whether there are to be more."""
        self._local = threading.local()

    @property
    def dropped(self) -> int:
        """How many events were too many: the oldest."""
        return self._happened - len(self.events)

    def begin(self, name: str, began_s: float, kind: int) -> Slice:
        """The calling thread is at work on that from here on, until `end`."""
        track = self._track()
        begun = Slice(track, name, kind, began_s, next(self._places))
        track.open.append(begun)
        return begun

    def end(
        self,
        begun: Slice | None,
        name: str,
        began_s: float,
        ended_s: float,
        kind: int,
        waited: Sequence[float] = (),
        took: int = 0,
    ) -> None:
        """What began as `begun`, on the calling thread, is over; of what had begun before the recorder, the rest is recorded. `waited`: see `Slice`;
        `took`: of a push, 0 where its rows were not taken."""
        track = self._track()
        if begun is None or begun not in track.open:
            self.passed(name, began_s, ended_s, kind)
            return
        # An interrupt may have come before what is inside was ended.
        del track.open[track.open.index(begun) :]
        begun.waited = waited
        self._keep(begun, ended_s, {"taken": took > 0} if name == "push" and begun.args else {})

    def passed(
        self, name: str, began_s: float, ended_s: float, kind: int | None = None, told: Mapping[str, Any] | None = None
    ) -> None:
        """The calling thread has been at work on that; by default, on a migration or a phase of one."""
        track = self._track()
        kind = _MOVES.get(name, PHASE) if kind is None else kind
        over = Slice(track, name, kind, began_s, None)
        self._keep(over, ended_s, track.told.pop(name, {}) if told is None else told)

    def inferred(self, stage: str, began_s: float, ended_s: float) -> None:
        """What the calling thread did between two calls, as far as they tell."""
        if ended_s > max(began_s, self.began_s):
            self.passed(stage, began_s, ended_s, STAGE, {"inferred": True})

    def waited(self, ended_s: float, seconds: float) -> None:
        """The calling thread has waited; shown where it is in a call."""
        track = self._track()
        port = next((each for each in track.open if each.kind == PORT), None)
        if port is not None and seconds > 0.0:
            wait = Slice(track, "waiting", WAIT, max(ended_s - seconds, port.began_s), None)
            wait.port = port
            self._keep(wait, ended_s, {})

    def pushed(self, data: Any, rows: int) -> Slice | None:
        """The push that the calling thread is in brings these rows; its slice."""
        push = self._open("push")
        if push is not None:
            push.args = {"rows": rows, "bytes": _size(data)}
        return push

    def ingested(self, units: Sequence[tuple[Slice | None, int]], first: int, stop: int) -> None:
        """The ingestion that the calling thread is in has made rows of keys `first` to `stop` - 1 of these units: the push and the rows
        of each. Behind rollout, where the hooks' work is a slice before, the one in which the rows appear is "publish"."""
        args = {"rows": stop - first, "units": list(units), "first": first}
        begun, track = self._open("ingestion"), self._track()
        if begun is None:
            track.told["ingestion"] = args
        else:
            begun.args, begun.name = args, "publish"

    def prepared(self, number: int, rows: int) -> Slice | None:
        """The delivery that the calling thread is in has prepared a batch; its slice."""
        begun = self._open("delivery")
        if begun is not None:
            begun.args.setdefault("batches", []).append(number)
            begun.args["rows"] = begun.args.get("rows", 0) + rows
        return begun

    def pulled(self, batch: Any, prepared: Slice | None) -> None:
        """The pull that the calling thread is in gives this batch, which was `prepared` there."""
        pull, info = self._open("pull"), batch.info
        if pull is not None:
            pull.args = {
                "batch": info.number,
                "frontier": int(info.frontier),
                "oldest key": int(info.keys.min()),
                "newest key": int(info.keys.max()),
                "rows": len(info.keys),
                "priority_lag": info.priority_lag,
                "bytes": _size(batch.data),
                "prepared": prepared,
            }

    def instant(self, name: str, args: Mapping[str, Any]) -> None:
        """Something changed for the whole store."""
        self._append(Instant(self.now(), next(self._places), self._track(), name, args))

    def count(self, name: str, value: int) -> None:
        """So many batches are where `name` says."""
        self._append(Count(self.now(), next(self._places), name, value))

    def stop(self) -> None:
        """From here on nothing is recorded; what hasn't ended is cut here."""
        self.ended_s = self.now()
        for begun in [each for track in list(self.tracks) for each in reversed(list(track.open))]:
            self._keep(begun, self.ended_s, {"unfinished": True})
        with self._lock:
            self.is_on = False

    def _keep(self, over: Slice, ended_s: float, told: Mapping[str, Any]) -> None:
        with self._lock:
            if self.is_on and over.closed < 0:
                over.ended_s, over.closed = ended_s, next(self._places)
                over.args |= told
                self._happened += 1
                self.events.append(over)

    def _append(self, event: Instant | Count) -> None:
        with self._lock:
            if self.is_on:
                self._happened += 1
                self.events.append(event)

    def _open(self, name: str) -> Slice | None:
        """The innermost slice that the calling thread is in, if it is of that name, and is to be told of."""
        opened = self._track().open if self.is_on else []
        return opened[-1] if opened and opened[-1].name == name else None

    def _track(self) -> Track:
        try:
            return self._local.track
        except AttributeError:
            track = self._local.track = Track(next(self._numbers))
            self.tracks.append(track)
            return track


def _size(tree: Any) -> int:
    return sum(int(leaf.nbytes) for leaf in optree.tree_leaves(tree))
