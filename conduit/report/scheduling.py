"""Figures of what a schedule does: exposed and hidden time by iteration, and a trace's timeline as a picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from conduit.core.ledger import Ledger, Seconds
from conduit.core.scheduling import ScheduleEvent
from conduit.errors import MissingExtraError, SettingError

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
except ImportError as error:
    raise MissingExtraError("figures need matplotlib; install it with: pip install 'conduit-rl[cli]'") from error

Source = Literal["measured", "emulated", "model"]

SOURCES: dict[Source, str] = {
    "measured": "measured on this machine",
    "emulated": "emulated machine, not hardware",
    "model": "model",
}
"""Where times come from, as figures say it."""

# Okabe and Ito's colours, as in the other figures.
COLOURS = {
    "rollout": "#009E73",
    "update": "#0072B2",
    "ingestion": "#E69F00",
    "delivery": "#56B4E9",
    "starved": "#BBBBBB",
    "blocked": "#888888",
}
SLICES = {**COLOURS, "publish": "#B87800", "migration": "#D55E00", "pause": "#CC79A7"}
"""Of a timeline; other names are drawn in outline."""
INK = "#333333"

EXPOSED: dict[str, Callable[[Seconds], float]] = {
    "rollout": lambda each: each.rollout_s,
    "update": lambda each: each.update_s,
    "ingestion": lambda each: each.ingestion.exposed_s,
    "delivery": lambda each: each.delivery.exposed_s,
    "starved": lambda each: each.starved_s,
    "blocked": lambda each: each.blocked_s,
}
"""What threads spent, or waited for."""
HIDDEN: dict[str, Callable[[Seconds], float]] = {
    "ingestion": lambda each: each.ingestion.hidden_s,
    "delivery": lambda each: each.delivery.hidden_s,
}
"""What went on behind that."""

_LINE, _LINES = 0.045, 10
"""Of an axes' height, what a line of text takes; and so many at most stand below each other."""

BARS = 120
"""At most: of more iterations, as many together are one bar, and their mean."""
SHOWN = 20_000
"""Slices of a picture, at most."""


def exposed_figure(
    ledger: Ledger,
    source: Source,
    changes: Mapping[int, str] | Sequence[ScheduleEvent] = (),
    title: str = "Exposed and hidden time by iteration",
    first: int = 0,
) -> Figure:
    """A bar an iteration. Upwards, what all threads spent on rollout and update and waited for: exposed ingestion and delivery, rows
    that nobody had pushed (starved), learners (blocked). Downwards and hatched, what ingestion and delivery did meanwhile that
    nobody waited for.

    - `source`: where the times come from: "measured", "emulated" or "model"
    - `changes`: by iteration, counted from 0, what a line is to say there; or an automatic schedule's history, `store.explain().history`
    - `first`: the first iteration to show; say 1, where the one that fills the store dwarfs the others

    SettingError where no iteration from `first` on has ended."""
    said = _said(source)
    remembered = ledger.iterations
    oldest = ledger.iteration_count - len(remembered)
    iterations = remembered[max(0, first - oldest) :]
    if not iterations:
        raise SettingError(
            f"exposed_figure: no iteration from first={first} on has ended so far: {ledger.iteration_count} have; expected one at least"
        )
    first = max(first, oldest)
    together = math.ceil(len(iterations) / BARS)
    bars = [iterations[at : at + together] for at in range(0, len(iterations), together)]
    left = [first + number * together for number in range(len(bars))]
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    axes = figure.subplots()
    _stack(axes, left, bars, EXPOSED, 1e3)
    _stack(axes, left, bars, HIDDEN, -1e3)
    axes.axhline(0, color=INK, lw=1)
    axes.set_xlim(first, first + len(iterations))
    _write_changes(axes, changes)
    axes.set_xlabel("iteration" if together == 1 else f"iteration (bars: means of {together})")
    axes.set_ylabel("ms, hidden ← 0 → exposed")
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    used = [name for name, of in EXPOSED.items() if name not in ("starved", "blocked") or any(map(of, iterations))]
    handles = [Patch(color=COLOURS[name], label=_label(name)) for name in used]
    handles.append(Patch(facecolor="white", edgecolor=INK, hatch="////", label="hidden"))
    _legend(axes, handles, -0.14)
    figure.suptitle(f"{title}   ({said})", fontsize=11)
    return figure


def _write_changes(axes: Axes, changes: Mapping[int, str] | Sequence[ScheduleEvent]) -> None:
    """Each a line below the one before, over the bars, and on the side of its mark where there is more room."""
    if not isinstance(changes, Mapping):
        changes = {each.iteration: each.label for each in changes}
    low, high = axes.get_xlim()
    shown = {at: text for at, text in sorted(changes.items()) if low <= at <= high}
    room = _LINE * min(len(shown), _LINES)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top + (top - bottom) * room / (1 - room))
    for number, (at, text) in enumerate(shown.items()):
        is_left = at < (low + high) / 2
        axes.axvline(at, color=INK, lw=1, ls="--")
        axes.text(
            at, 0.995 - _LINE * (number % _LINES), f" {text} ",
            transform=axes.get_xaxis_transform(), fontsize=8, va="top", ha="left" if is_left else "right", color=INK,
        )  # fmt: skip


def _stack(
    axes: Axes,
    left: Sequence[int],
    bars: Sequence[Sequence[Seconds]],
    parts: Mapping[str, Callable[[Seconds], float]],
    scale: float,
) -> None:
    base = [0.0] * len(bars)
    for name, of in parts.items():
        heights = [scale * sum(map(of, bar)) / len(bar) for bar in bars]
        style: dict[str, Any] = {"edgecolor": "white", "hatch": "////"} if scale < 0 else {}
        label = f"{name}, hidden" if scale < 0 else name
        widths = [len(bar) for bar in bars]
        axes.bar(left, heights, widths, base, align="edge", color=COLOURS[name], lw=0, label=label, **style)
        base = [low + height for low, height in zip(base, heights, strict=True)]


def _label(name: str) -> str:
    labels = {
        "ingestion": "exposed ingestion",
        "delivery": "exposed delivery",
        "starved": "learners starved",
        "blocked": "actors blocked",
    }
    return labels.get(name, name)


def _said(source: str) -> str:
    for known, said in SOURCES.items():
        if source == known:
            return said
    raise SettingError(f"source={source!r}: expected where the times come from, one of {', '.join(map(repr, SOURCES))}")


# A trace's timeline


@dataclass(frozen=True, slots=True)
class Bar:
    """A slice of a timeline: `depth` 0 is outermost."""

    name: str
    thread: int
    depth: int
    begin_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """One step of the way from a push to a pull: instants and threads of both its ends."""

    begin_s: float
    begin: int
    end_s: float
    end: int


def timeline_figure(
    path: str | os.PathLike[str], source: Source, begin_s: float = 0.0, end_s: float = math.inf, title: str = "Timeline"
) -> Figure:
    """What `store.trace(path)` wrote, from `begin_s` to `end_s` of it, as a picture: a row of bars a thread, slices inside others below these,
    and arrows from each batch's push to its pull. For more than a page's worth, ui.perfetto.dev.

    `source`: where the times come from. SettingError where the file is no trace, or has too many slices in that time."""
    said = _said(source)
    threads, bars, arrows = read_timeline(path)
    bars = [each for each in bars if each.begin_s <= end_s and each.begin_s + each.seconds >= begin_s]
    if not bars or len(bars) > SHOWN:
        raise SettingError(
            f"timeline_figure({os.fspath(path)!r}): {len(bars)} slices from {begin_s:g} s to {end_s:g} s; expected 1 to {SHOWN}: choose begin_s and end_s"
        )
    low = max(begin_s, min(each.begin_s for each in bars))
    high = min(end_s, max(each.begin_s + each.seconds for each in bars))
    tops, height = _tops(threads, bars)
    figure = Figure(figsize=(12, 1.4 + 0.32 * height), layout="constrained")
    axes = figure.subplots()
    _draw_bars(axes, bars, tops)
    _draw_arrows(axes, [each for each in arrows if low <= each.begin_s <= high], tops)
    axes.set_yticks([top + 0.5 for top in tops.values()], [threads[number] for number in tops], fontsize=8)
    for top in tops.values():
        axes.axhline(top, color=INK, lw=0.4, alpha=0.4)
    axes.set_ylim(height, 0)
    axes.set_xlim(low, max(high, low + 1e-9))
    axes.set_xlabel("seconds from the trace's beginning")
    axes.spines[["top", "right"]].set_visible(False)
    handles: list[Any] = [
        Patch(color=SLICES[name], label=name) for name in SLICES if name in {each.name for each in bars}
    ]
    handles.append(Patch(facecolor="white", edgecolor=INK, lw=0.6, label="calls, other waits"))
    handles.append(Line2D([], [], color=INK, lw=0.8, marker=">", ms=3, label="from push to pull"))
    _legend(axes, handles, -0.5 / (0.4 + 0.32 * height))
    figure.suptitle(f"{title}   ({said})", fontsize=11)
    return figure


def _tops(threads: Mapping[int, str], bars: Sequence[Bar]) -> tuple[dict[int, int], int]:
    """The first row of each thread that has bars, and how many rows there are."""
    tops: dict[int, int] = {}
    height = 0
    for number in threads:
        depths = [each.depth for each in bars if each.thread == number]
        if depths:
            tops[number] = height
            height += 1 + max(depths)
    return tops, height


def _draw_bars(axes: Axes, bars: Sequence[Bar], tops: Mapping[int, int]) -> None:
    alike: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for each in bars:
        alike.setdefault((each.name, tops[each.thread] + each.depth), []).append((each.begin_s, each.seconds))
    for (name, row), spans in alike.items():
        inside, around = (SLICES[name], "white") if name in SLICES else ("white", INK)
        axes.broken_barh(spans, (row + 0.06, 0.88), facecolors=inside, edgecolors=around, lw=0.4, label=name)


def _draw_arrows(axes: Axes, arrows: Sequence[Arrow], tops: Mapping[int, int]) -> None:
    style = {"arrowstyle": "->", "color": INK, "lw": 0.7, "alpha": 0.7}
    for each in arrows:
        if each.begin in tops and each.end in tops:
            begin, end = (each.begin_s, tops[each.begin] + 0.5), (each.end_s, tops[each.end] + 0.5)
            axes.annotate("", end, begin, arrowprops=style, annotation_clip=True)


def _legend(axes: Axes, handles: Sequence[Any], below: float) -> None:
    style: dict[str, Any] = {"loc": "upper center", "frameon": False, "fontsize": 8.5}
    axes.legend(handles=handles, bbox_to_anchor=(0.5, below), ncols=len(handles), **style)


def read_timeline(path: str | os.PathLike[str]) -> tuple[dict[int, str], list[Bar], list[Arrow]]:
    """Names of threads by number, slices and arrows of a file that `store.trace` wrote. SettingError for another."""
    try:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        return _read(events)
    except OSError as error:
        raise SettingError(f"{os.fspath(path)!r}: can't be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SettingError(f"{os.fspath(path)!r}: is no timeline that store.trace wrote: {error!r}") from error


def _read(events: Sequence[Mapping[str, Any]]) -> tuple[dict[int, str], list[Bar], list[Arrow]]:
    threads: dict[int, str] = {}
    bars: list[Bar] = []
    arrows: list[Arrow] = []
    opened: dict[int, list[tuple[str, float]]] = {}
    way: dict[int, tuple[float, int]] = {}
    for event in events:
        phase, thread = event["ph"], event.get("tid", 0)
        at_s = 1e-6 * event.get("ts", 0.0)
        if phase == "M" and event["name"] == "thread_name":
            threads[thread] = event["args"]["name"]
        elif phase == "B":
            opened.setdefault(thread, []).append((event["name"], at_s))
        elif phase == "E":
            name, began_s = opened[thread].pop()
            bars.append(Bar(name, thread, len(opened[thread]), began_s, at_s - began_s))
        elif phase in ("s", "t", "f"):
            if phase != "s":
                begin_s, begin = way[event["id"]]
                arrows.append(Arrow(begin_s, begin, at_s, thread))
            way[event["id"]] = at_s, thread
    return threads, bars, arrows
