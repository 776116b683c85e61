"""Figures of schedules: what they show and say, read from their own parts; how they look is looked at."""

from __future__ import annotations

import io
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import conduit
from conduit.clock import VirtualClock
from conduit.core.ledger import Ledger
from conduit.core.scheduling import ScheduleEvent
from conduit.errors import SettingError
from conduit.report.scheduling import BARS, exposed_figure, read_timeline, timeline_figure


def words(figure: Figure) -> str:
    """All that stands in a figure, after it was drawn."""
    figure.savefig(io.BytesIO(), dpi=20)
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        legend = axes.get_legend()
        labels = [*axes.get_xticklabels(), *axes.get_yticklabels(), *(legend.get_texts() if legend else [])]
        found += [axes.get_xlabel(), axes.get_ylabel(), *(each.get_text() for each in [*axes.texts, *labels])]
    return "\n".join(found)


def bars(axes: Axes, label: str) -> list[tuple[float, float, float]]:
    """Left end, foot and height of each bar of that name, none where all have no height."""
    (found,) = [each for each in axes.containers if isinstance(each, BarContainer) and each.get_label() == label]
    patches = [each for each in found.patches if isinstance(each, Rectangle)]
    return [(each.get_x(), round(each.get_y(), 6), round(each.get_height(), 6)) for each in patches]


def ledger(iterations: int, starved_s: float = 0.0) -> Ledger:
    """Iteration i has i ms of rollout, 20 ms of update, 5 of exposed ingestion and 3 of exposed delivery, which another thread worked
    10 for."""
    clock, ledgers = VirtualClock(), []

    def main() -> None:
        made = Ledger(clock)
        ledgers.append(made)
        for number in range(iterations):
            with made.mark("rollout"):
                clock.sleep(1e-3 * number)
            with made.port("push"), made.operator("ingestion"):
                clock.sleep(5e-3)

            def deliver() -> None:
                with made.operator("delivery"):
                    clock.sleep(10e-3)

            task = clock.spawn(deliver, "delivery")
            with made.mark("update"):
                clock.sleep(20e-3)
            with made.port("pull") as call:
                clock.sleep(3e-3 + starved_s)
                made.waited(3e-3 + starved_s)
                call.starved_s = starved_s
            task.join()
            made.end_iteration()

    clock.run(main)
    return ledgers[0]


def test_bars_stand_on_each_other_upwards_as_exposed_and_downwards_as_hidden() -> None:
    (axes,) = exposed_figure(ledger(3), "emulated").axes
    assert bars(axes, "rollout") == [(0, 0, 0), (1, 0, 1), (2, 0, 2)]
    assert bars(axes, "update") == [(0, 0, 20), (1, 1, 20), (2, 2, 20)]
    assert bars(axes, "ingestion") == [(0, 20, 5), (1, 21, 5), (2, 22, 5)]
    assert bars(axes, "delivery") == [(0, 25, 3), (1, 26, 3), (2, 27, 3)]
    assert bars(axes, "ingestion, hidden") == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert bars(axes, "delivery, hidden") == [(0, 0, -7), (1, 0, -7), (2, 0, -7)]


def test_many_iterations_are_bars_of_means_and_the_first_that_is_remembered_is_where_it_was() -> None:
    made = ledger(BARS + 80)
    (axes,) = exposed_figure(made, "measured").axes
    found = bars(axes, "rollout")
    assert len(found) == (BARS + 80) // 2
    assert found[:2] == [(0, 0, 0.5), (2, 0, 2.5)]
    clock, few = VirtualClock(), []

    def main() -> None:
        few.append(Ledger(clock, keep=4))
        for _ in range(10):
            clock.sleep(1.0)
            few[0].end_iteration()

    clock.run(main)
    assert [left for left, *_ in bars(exposed_figure(few[0], "measured").axes[0], "update")] == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("source", "said"),
    [("measured", "measured on this machine"), ("emulated", "emulated machine, not hardware"), ("model", "(model)")],
)
def test_a_figure_says_where_its_times_come_from(source, said) -> None:
    assert said in words(exposed_figure(ledger(2), source))


def test_waits_are_named_where_there_are_some_and_changes_where_they_were() -> None:
    said = words(exposed_figure(ledger(3), "emulated", changes={2: "rollouts get short"}, title="Re-planned"))
    assert said.startswith("Re-planned   (")
    assert "rollouts get short" in said
    assert "exposed delivery" in said
    assert "starved" not in said
    figure = exposed_figure(ledger(2, starved_s=0.25), "emulated")
    assert bars(figure.axes[0], "starved")[0] == (0, 28, 250)
    assert "learners starved" in words(figure)


def test_an_automatic_schedules_history_is_what_changes_takes_and_its_labels_neither_meet_nor_leave_the_axes() -> None:
    plain, behind = conduit.Schedule(False, 1, False, 1), conduit.Schedule(True, 1, True, 2)
    history = [
        ScheduleEvent(3, behind, "chosen", "80.0% ± 1.0% of plain in line's time"),
        ScheduleEvent(4, behind, "measures anew", "update takes 30 ms a batch, 20 before"),
        ScheduleEvent(39, plain, "chosen", "133.0% ± 2.0% of plain in line's time is what the best of the others took"),
    ]
    figure = exposed_figure(ledger(40), "emulated", history, first=2)
    figure.savefig(io.BytesIO(), dpi=80)
    (axes,) = figure.axes
    assert [each.get_text().strip() for each in axes.texts] == [
        "chosen ingestion behind, g=1 and delivery behind, g=2",
        "measures anew",
        "chosen ingestion in line, g=1 and delivery in line, g=1",
    ]
    inside = axes.get_window_extent()
    boxes = [each.get_window_extent() for each in axes.texts]
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    tallest = max(patch.get_window_extent().y1 for each in axes.containers for patch in each)  # pyright: ignore[reportAttributeAccessIssue]
    assert all(box.y0 > tallest for box in boxes), "nor do they cover bars"


def test_what_came_first_may_be_left_out() -> None:
    (axes,) = exposed_figure(ledger(5), "emulated", first=2, changes={0: "gone", 4: "here"}).axes
    assert [left for left, *_ in bars(axes, "rollout")] == [2, 3, 4]
    assert [each.get_text().strip() for each in axes.texts] == ["here"]
    with pytest.raises(SettingError, match=r"first=7 .*: 5 have"):
        exposed_figure(ledger(5), "emulated", first=7)


def test_a_source_that_isn_t_one_and_a_ledger_without_iterations_are_refused() -> None:
    with pytest.raises(SettingError, match=r"'guessed'.*'measured', 'emulated', 'model'"):
        exposed_figure(ledger(1), "guessed")  # pyright: ignore[reportArgumentType]
    with pytest.raises(SettingError, match=r"no iteration from first=0 on has ended so far: 0 have"):
        exposed_figure(ledger(0), "measured")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four pushes of 30 ms of rollout each, ingested on a thread of its own, and two pulls."""
    clock, path = VirtualClock(), tmp_path / "t.json"

    def main() -> None:
        with (
            conduit.Store(
                backend="reference",
                clock=clock,
                capacity=16,
                batch_size=2,
                placement="pageable",
                schedule=conduit.Schedule(overlap_ing=True),
            ) as store,
            store.trace(path),
        ):
            actor, learner = store.actor(), store.learner()
            for number in range(4):
                with store.rollout():
                    clock.sleep(0.030)
                actor.push({"x": np.full(1, number)})
            for _ in range(2):
                learner.pull()
                with store.update():
                    clock.sleep(0.040)

    clock.run(main)
    return path


def spans(axes: Axes, label: str) -> list[tuple[float, float, float]]:
    """Left and right end and top of each bar of a timeline."""
    found = [each for each in axes.collections if isinstance(each, PolyCollection) and each.get_label() == label]
    corners = [path.vertices for each in found for path in each.get_paths()]
    return [
        (round(float(at[:, 0].min()), 6), round(float(at[:, 0].max()), 6), round(float(at[:, 1].min()), 2))
        for at in map(np.asarray, corners)
    ]


def test_a_timeline_s_bars_are_its_slices_a_row_a_thread(trace: Path) -> None:
    figure = timeline_figure(trace, "emulated")
    (axes,) = figure.axes
    assert spans(axes, "rollout") == [(0.03 * n, round(0.03 * n + 0.03, 6), 0.06) for n in range(4)]
    assert spans(axes, "update") == [(0.12, 0.16, 0.06), (0.16, 0.2, 0.06)]
    assert {top for _, _, top in spans(axes, "push")} == {0.06}
    said = words(figure)
    assert "conduit-ingestion" in said
    assert "emulated machine, not hardware" in said
    # From a push over its ingestion to each of two pulls.
    arrows = [each for each in axes.texts if getattr(each, "arrow_patch", None) is not None]
    assert len(arrows) == len(read_timeline(trace)[2]) == 4


def test_of_a_timeline_a_part_may_be_shown(trace: Path) -> None:
    (axes,) = timeline_figure(trace, "emulated", begin_s=0.05, end_s=0.1).axes
    assert len(spans(axes, "rollout")) == 3
    assert not [each for each in axes.collections if each.get_label() == "update"]
    assert axes.get_xlim() == (0.05, 0.1)
    with pytest.raises(SettingError, match="0 slices from 7 s"):
        timeline_figure(trace, "emulated", begin_s=7.0)


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    for text in ("", "{}", json.dumps({"traceEvents": [{"ph": "E", "tid": 1}]})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(SettingError, match=r"bad\.json.*is no timeline"):
            timeline_figure(tmp_path / "bad.json", "measured")
    with pytest.raises(SettingError, match=r"none\.json.*No such file"):
        timeline_figure(tmp_path / "none.json", "measured")
