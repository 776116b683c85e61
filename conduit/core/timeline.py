"""A recording as a timeline: Chrome's trace-event JSON, which ui.perfetto.dev opens."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from conduit.core.recorder import WAIT, Count, Instant, Recorder, Slice, Track

WAITING = "waiting for ingestion"
"""A counter's name."""

_CATEGORIES = ("stage", "port", "operator", "migration", "migration", "migration", "wait")
"""By kind."""
_PROCESS = 1

When = tuple[int, int]
"""An instant in ns, and its place among all that happened."""
Event = dict[str, Any]


def written(recorder: Recorder, about: Mapping[str, Any]) -> Iterator[str]:
    """The file, piece by piece: an event a line, by time. Equal recordings give equal files."""
    told = {**about, "events": len(recorder.events), "dropped_events": recorder.dropped, "drops": "the oldest"}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(told, ensure_ascii=False)},"traceEvents":[\n'
    encode, before = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode, ""
    for event in _Timeline(recorder).events():
        yield before + encode(event)
        before = ",\n"
    yield "\n]}\n"


class _Timeline:
    """A recording's events in the format's words."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._slices = [each for each in recorder.events if isinstance(each, Slice)]
        self._others = [each for each in recorder.events if not isinstance(each, Slice)]
        self._kept = set(map(id, self._slices))
        self._flows: dict[tuple[int, bool], list[Event]] = {}
        """By slice, and whether at its end: what stands there of arrows."""
        self._blocked_s: dict[int, float] = {}
        """By call: of its blocked seconds, those that its waits so far have been."""
        ingestions = [each for each in self._slices if "first" in each.args and each.args["rows"]]
        self._ingestions = sorted(ingestions, key=lambda each: each.args["first"])

    def events(self) -> Iterator[Event]:
        yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "conduit store"}}
        for track in self._recorder.tracks:
            for name, value in (
                ("thread_name", {"name": track.name}),
                ("thread_sort_index", {"sort_index": track.number}),
            ):
                yield {"ph": "M", "pid": _PROCESS, "tid": track.number, "name": name, "args": value}
        self._draw_arrows()
        marked = [*self._counted(), *(self._other(each) for each in self._others)]
        by_track: dict[Track, list[Slice]] = {track: [] for track in self._recorder.tracks}
        for each in self._slices:
            by_track[each.track].append(each)
        for slices in by_track.values():
            marked += self._on_track(slices)
        marked.sort(key=lambda each: each[0])
        for (at_ns, _), event in marked:
            yield {**event, "pid": _PROCESS, "ts": at_ns / 1000}

    def _ns(self, at_s: float) -> int:
        return round(1e9 * (at_s - self._recorder.began_s))

    def _other(self, each: Instant | Count) -> tuple[When, Event]:
        mark = (self._ns(each.at_s), each.place)
        if isinstance(each, Count):
            return mark, {"ph": "C", "name": each.name, "args": {"batches": each.value}}
        return mark, {"ph": "i", "s": "g", "tid": each.track.number, "name": each.name, "args": dict(each.args)}

    # Slices, each inside those that it is part of

    def _on_track(self, slices: Sequence[Slice]) -> Iterator[tuple[When, Event]]:
        roots: list[_Node] = []
        for each in slices:
            at = len(roots)
            while at and each.holds(roots[at - 1].slice):
                at -= 1
            roots[at:] = [_Node(each, roots[at:])]
        # What had begun before is cut at the beginning; and a clock that jumped back must not tear slices apart.
        latest = 0
        for (at_ns, place), event in self._nested(roots):
            latest = max(latest, at_ns)
            yield (latest, place), event

    def _nested(self, nodes: Iterable[_Node]) -> Iterator[tuple[When, Event]]:
        for node in nodes:
            each = node.slice
            if each.kind == WAIT:
                yield from self._wait(each)
                continue
            begin, end = self._begin(node), (self._ns(each.ended_s), each.closed)
            tid = each.track.number
            about = {"tid": tid, "name": each.name, "cat": _CATEGORIES[each.kind]}
            yield begin, {"ph": "B", **about, "args": _plain(each)}
            yield from ((begin, {**flow, "tid": tid}) for flow in self._flows.get((id(each), False), ()))
            yield from self._nested(node.inside)
            yield from ((end, {**flow, "tid": tid}) for flow in self._flows.get((id(each), True), ()))
            yield end, {"ph": "E", "tid": tid}

    def _begin(self, node: _Node) -> When:
        """One that was told of only at its end began no later than what is inside."""
        each = node.slice
        place = each.opened
        if place is None:
            place = min([each.closed, *(self._begin(inside)[1] for inside in node.inside)])
        return self._ns(each.began_s), place

    def _wait(self, wait: Slice) -> Iterator[tuple[When, Event]]:
        """In pieces, by what the call says that it waited for."""
        begin, stop = self._ns(wait.began_s), self._ns(wait.ended_s)
        for name, until in self._reasons(wait, stop):
            until = min(until, stop)
            if until > begin:
                about = {"tid": wait.track.number, "name": name, "cat": _CATEGORIES[WAIT]}
                yield (begin, wait.closed), {"ph": "B", **about, "args": {}}
                yield (until, wait.closed), {"ph": "E", "tid": wait.track.number}
                begin = until

    def _reasons(self, wait: Slice, stop: int) -> list[tuple[str, int]]:
        """What the wait was for, and until when. A pull's rows are pushed, then ingested, then its batch is prepared; a push waits for learners
        first, then for room, or until others' rows are ingested."""
        port = wait.port
        if port is None or not port.waited:
            return [("waiting", stop)]
        starved_s, ingesting_s, blocked_s = port.waited
        if port.name == "pull":
            pushed_s = port.began_s + starved_s
            return [
                ("starved", self._ns(pushed_s)),
                ("ingesting", self._ns(pushed_s + ingesting_s)),
                ("preparing", stop),
            ]
        before_s = self._blocked_s.get(id(port), 0.0)
        self._blocked_s[id(port)] = before_s + wait.ended_s - wait.began_s
        return [("blocked", self._ns(wait.began_s + max(0.0, blocked_s - before_s))), ("waiting", stop)]

    # Arrows

    def _draw_arrows(self) -> None:
        """From the push that brought the newest row of a batch to the pull that got it, by way of its ingestion and delivery where these
        weren't part of the two."""
        number = count(1)
        for pull in self._slices:
            if pull.name != "pull" or "newest key" not in pull.args:
                continue
            newest = pull.args["newest key"]
            ingestion = self._ingestion_of(newest)
            push = None if ingestion is None else _push_of(ingestion, newest)
            if push is None or ingestion is None or id(push) not in self._kept:
                continue
            prepared = pull.args["prepared"]
            way = [] if push.surrounds(ingestion) else [ingestion]
            if prepared is not None and id(prepared) in self._kept and not pull.surrounds(prepared):
                way.append(prepared)
            self._draw(next(number), [push, *way, pull])

    def _draw(self, number: int, way: Sequence[Slice]) -> None:
        flow = {"cat": "rows", "name": "push to pull", "id": number}
        latest: When = (0, -1)
        for each in way:
            begin = (self._ns(each.began_s), each.closed if each.opened is None else each.opened)
            is_first, is_last = each is way[0], each is way[-1]
            at_end = is_last or begin < latest
            latest = (self._ns(each.ended_s), each.closed) if at_end else begin
            phase = {"ph": "s"} if is_first else {"ph": "f", "bp": "e"} if is_last else {"ph": "t"}
            self._flows.setdefault((id(each), at_end), []).append({**flow, **phase})

    def _ingestion_of(self, key: int) -> Slice | None:
        at = bisect_right(self._ingestions, key, key=lambda each: each.args["first"]) - 1
        found = self._ingestions[at] if at >= 0 else None
        return found if found is not None and key < found.args["first"] + found.args["rows"] else None

    # Counters

    def _counted(self) -> Iterator[tuple[When, Event]]:
        """Rows that pushes have brought, from their ends to the ends of their ingestions, where these are later."""
        units = [(push, each) for each in self._slices for push, _ in each.args.get("units", ())]
        ingestions = {id(push): each for push, each in units if push is not None}
        pushes = [each for each in self._slices if each.name == "push" and each.args.get("taken")]
        # What came before others that were ingested doesn't wait any more: the event that says so was dropped.
        last = max((push.closed for push in pushes if id(push) in ingestions), default=-1)
        changes: list[tuple[When, int]] = []
        for push in pushes:
            rows, ingestion = push.args["rows"], ingestions.get(id(push))
            came = (self._ns(push.ended_s), push.closed)
            if ingestion is None:
                changes += [(came, rows)] if push.closed > last or not self._recorder.dropped else []
            elif not push.surrounds(ingestion):
                gone = (self._ns(ingestion.ended_s), ingestion.closed)
                changes += [(min(came, gone), rows), (gone, -rows)]
        waiting = 0
        for mark, change in sorted(changes, key=lambda each: each[0]):
            waiting += change
            yield mark, {"ph": "C", "name": WAITING, "args": {"rows": waiting}}


class _Node(NamedTuple):
    slice: Slice
    inside: Sequence[_Node]


def _push_of(ingestion: Slice, key: int) -> Slice | None:
    """The push that brought a row. Where hooks made more or fewer rows of what was pushed, or held some: the last that came for them."""
    units, before = ingestion.args["units"], key - ingestion.args["first"]
    if sum(rows for _, rows in units) == ingestion.args["rows"]:
        for push, rows in units:
            if before < rows:
                return push
            before -= rows
    return units[-1][0] if units else None


def _plain(each: Slice) -> dict[str, Any]:
    """What is known of a slice, for the file."""
    args = {name: value for name, value in each.args.items() if name not in ("prepared", "units", "first")}
    if "units" in each.args:
        args["pushes"] = len(each.args["units"])
    if "units" in each.args and args["rows"]:
        args |= {"first key": each.args["first"], "last key": each.args["first"] + args["rows"] - 1}
    return args
