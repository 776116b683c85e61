"""Figures: what they show and say, read from their own parts; how they look is looked at."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from conduit.core.planning import plan as make_plan
from conduit.core.plans import Plan
from conduit.errors import SettingError
from conduit.report.figures import plan_figure, regimes, sweep_figure, sweep_rows, topology_figure
from conduit.topology import PRESETS, preset
from conduit.topology.bandwidth import Leg
from conduit.topology.cluster import Topology
from conduit.topology.endpoint import PINNED
from tests.report.made import GB, D, candidate, plan, topology

KB = 1000


def words(figure: Figure) -> str:
    """All that stands in a figure, after it was drawn."""
    figure.savefig(io.BytesIO(), dpi=20)
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        legend = axes.get_legend()
        labels = [*axes.get_xticklabels(), *axes.get_yticklabels(), *(legend.get_texts() if legend else [])]
        found += [axes.get_title(), axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()]
        found += [each.get_text() for each in [*axes.texts, *labels]]
    return "\n".join(found)


def swept() -> list[Plan]:
    """One GPU while a row has less than 4 kB, then two, then pinned memory; nothing fits the largest."""

    def at(row_bytes: int, fits: int) -> Plan:
        time = 1e-6 * row_bytes
        every = [
            candidate("single_gpu", {D[0]: 20 * GB}, time, time, room=70 * GB if fits <= 0 else GB),
            candidate("shared_gpu", {D[0]: 10 * GB, D[1]: 10 * GB}, 2 * time, time, room=70 * GB if fits <= 1 else GB),
            candidate("cpu_pinned", {PINNED: 20 * GB}, 9 * time, 9 * time, room=70 * GB if fits <= 2 else GB),
        ]
        return plan(every, next((each for each in every if each.feasible), None), row_bytes=row_bytes)

    return [at(size * KB, fits) for size, fits in ((1, 0), (2, 0), (8, 1), (16, 1), (32, 2), (64, 2), (128, 3))]


def with_rows_of(made: Plan, row_bytes: int) -> Plan:
    return replace(made, workload=made.workload.with_row_bytes(row_bytes))


def line_of(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


def test_regimes_change_half_way_between_the_row_sizes_that_differ() -> None:
    found = regimes(swept()[::-1])
    assert [each.name for each in found] == ["1 GPU", "2 GPUs", "pinned", "nothing fits"]
    assert [round(each.start_bytes / KB, 1) for each in found] == [1, 4, 22.6, 90.5]
    assert [each.stop_bytes for each in found[:-1]] == [each.start_bytes for each in found[1:]]


def test_a_line_a_kind_ends_where_memory_does() -> None:
    (axes,) = sweep_figure(swept()).axes
    sizes, times = line_of(axes, "single_gpu")
    assert sizes == [1 * KB, 2 * KB]
    assert times == pytest.approx([2.0, 4.0])
    ends = [line for line in axes.get_lines() if line.get_marker() == "X"]
    assert sorted(np.asarray(line.get_xdata())[0] for line in ends) == [2 * KB, 16 * KB, 64 * KB]
    assert len({line.get_color() for line in ends}) == 3


def test_a_figure_of_times_calls_itself_a_model() -> None:
    said = words(sweep_figure(swept()))
    assert "model: predicted from figures of a preset" in said
    assert "out of memory beyond" in said
    assert all(name in said for name in ("1 GPU", "2 GPUs", "pinned", "nothing fits", "bytes of a row"))


def test_a_plan_is_drawn_with_its_topology_its_bytes_and_its_times() -> None:
    sweep = swept()
    figure = plan_figure(sweep[0], sweep)
    said = words(figure)
    assert len(figure.axes) == 3
    assert "single_gpu(0)   (model: predicted from figures of a preset)" in said
    assert "→ single_gpu(0)" in said
    assert "2 × 10 of 70 GB" in said
    assert "200 GB/s (28 pairs)" in said


def test_a_plan_that_fits_nowhere_says_what_is_out_of_memory() -> None:
    sweep = swept()
    said = words(plan_figure(sweep[-1], sweep))
    assert "nothing fits" in said
    assert "20 of 1 GB, out of memory" in said
    assert "→" not in said


def test_a_sweep_needs_two_row_sizes() -> None:
    for sweep in (swept()[:1], [swept()[0]] * 2, []):
        with pytest.raises(SettingError, match=r"sweep has plans for rows of \[.*\] bytes; expected at least two diff"):
            sweep_figure(sweep)


def test_rows_of_a_byte_that_fit_nowhere_can_be_swept() -> None:
    sweep = sweep_rows(lambda row_bytes: with_rows_of(swept()[-1], row_bytes), 1)
    assert [each.workload.row_bytes for each in sweep] == [1, 2]
    assert "nothing fits" in words(plan_figure(sweep[0], sweep))


def test_the_name_of_a_machine_is_no_formula() -> None:
    made = plan([candidate("single_gpu", {D[0]: GB}, 1e-3, 1e-3)])
    odd = replace(made, topology=made.topology.changed(name=r"a $\frac$ b$", machine="$host$"))
    sweep = [with_rows_of(odd, row_bytes) for row_bytes in (1, 2)]
    for figure in (topology_figure(odd.topology), plan_figure(odd, sweep), sweep_figure(sweep)):
        assert r"a \$\frac\$ b\$" in words(figure)


def test_a_topology_without_an_endpoint_is_an_empty_figure() -> None:
    assert "nothing" in words(topology_figure(Topology("nothing", {}, {})))


def test_boundaries_are_looked_for_between_row_sizes() -> None:
    """Of a placement that changes at 5,000 and 50,000 bytes, and fits nowhere from 500,000."""
    asked: list[int] = []

    def planned(row_bytes: int) -> Plan:
        asked.append(row_bytes)
        return swept()[sum(row_bytes >= edge for edge in (5_000, 5_000, 50_000, 50_000, 500_000, 500_000))]

    sweep = sweep_rows(lambda row_bytes: with_rows_of(planned(row_bytes), row_bytes), 10_000)
    found = regimes(sweep)
    assert [each.name for each in found] == ["1 GPU", "2 GPUs", "pinned", "nothing fits"]
    assert [each.start_bytes for each in found[1:]] == pytest.approx([5_000, 50_000, 500_000], rel=0.05)
    assert len(asked) == len(set(asked)) == len(sweep) < 35


def test_a_sweep_over_what_never_ends_ends() -> None:
    assert len(sweep_rows(lambda row_bytes: with_rows_of(swept()[0], row_bytes), 1000)) < 30


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("row_bytes", [4 << 10, 64 << 20], ids=["fits", "too large"])
def test_the_plan_of_every_preset_can_be_drawn(name: str, row_bytes: int) -> None:
    plans = [make_plan(name, row_bytes=size, capacity=10**6, batch_size=256) for size in (row_bytes // 2, row_bytes)]
    said = words(plan_figure(plans[-1], plans))
    assert f"1,000,000 rows on {name}" in said
    assert ("out of memory\n" in said and "nothing fits" in said) == (plans[-1].choice is None)
    assert (plans[-1].choice is None) == (row_bytes > 1 << 20)


def test_a_rack_is_drawn_by_two_of_its_nodes() -> None:
    said = words(topology_figure(preset("gb200nvl72")))
    assert "node 1" in said
    assert "node 2" not in said
    assert "and 16\nmore nodes\nlike these" in said


@pytest.mark.parametrize("devices", [0, 1, 2, 5, 8])
def test_a_topology_of_any_size_has_every_endpoint_in_its_figure(devices: int) -> None:
    known = topology(devices)
    said = words(topology_figure(known))
    assert f"made{devices}" in said
    assert all(f"{at}\n" in said for at in known.endpoints)


def test_a_measured_topology_says_of_which_machine() -> None:
    assert "bandwidths of host7" in words(topology_figure(topology(machine="host7")))


def test_a_line_has_the_bandwidth_of_the_slower_way() -> None:
    slower = topology().changed(legs={(D[1], D[0]): Leg(33e9)})
    assert "33 GB/s (1 pair)" in words(topology_figure(slower))


def test_a_figure_leaves_a_callers_own_figures_alone() -> None:
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    topology_figure(topology())
    sweep_figure(swept())
    assert pyplot.get_fignums() == before
    assert isinstance(topology_figure(topology()), Figure)
