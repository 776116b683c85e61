"""What tables of topologies and plans say."""

from __future__ import annotations

import json
from dataclasses import replace

from conduit.core.plans import Candidate
from conduit.report import plan_record, plan_table, topology_table
from conduit.report.plan import short_name
from conduit.report.topology import alike, duration, gigabytes, name_endpoints, typical
from conduit.topology import preset
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier
from tests.report.made import GB, D, candidate, plan, text, topology


def lines_with(rendered: str, word: str) -> list[str]:
    return [line for line in rendered.splitlines() if word in line]


def pinned() -> Candidate:
    return candidate("cpu_pinned", {PINNED: 160 * GB}, 2e-3, 8e-3, room=300 * GB)


def even(*devices: Endpoint, ingestion_s: float, delivery_s: float = 1e-3) -> Candidate:
    kind = "single_gpu" if len(devices) == 1 else "shared_gpu"
    return candidate(kind, {at: 160 * GB // len(devices) for at in devices}, ingestion_s, delivery_s)


def test_a_candidate_has_its_bytes_and_its_times_a_row_and_an_iteration() -> None:
    best = even(*D[:4], ingestion_s=1e-3)
    rendered = text(plan_table(plan([best, pinned()], best)))
    assert "160,000,000 rows of 1000 B on made8" in rendered
    # 500 rows ingested, 1000 delivered; 2 ms an iteration.
    assert lines_with(rendered, "shared_gpu")[0].split()[2:] == ["4", "×", "40", "2", "1", "2", "1.00", "yes"]
    assert "→ shared_gpu(0–3)" in rendered
    assert lines_with(rendered, "cpu_pinned")[0].split() == ["cpu_pinned", "160", "4", "8", "10", "5.00", "yes"]


def test_what_lacks_is_said_and_where() -> None:
    single = even(D[0], ingestion_s=1e-3)
    mixed = candidate("mixed", {D[0]: 60 * GB, D[1]: 60 * GB, PINNED: 90 * GB}, 1e-3, 1e-3)
    rendered = text(plan_table(plan([single, mixed])), 120)
    assert lines_with(rendered, "single_gpu")[0].split()[-1] == "90"
    assert lines_with(rendered, "mixed")[0].rstrip().endswith("20 pinned")
    assert "2 × 60 + 90 pinned" in rendered
    assert "Nothing fits." in rendered


def test_candidates_that_differ_only_in_their_devices_are_one_row() -> None:
    pairs = [even(one, other, ingestion_s=1e-3) for one, other in ((D[0], D[1]), (D[0], D[2]), (D[1], D[2]))]
    slower = even(D[3], D[4], ingestion_s=3e-3)
    rows = lines_with(text(plan_table(plan([*pairs, slower], pairs[1]))), "shared_gpu")
    assert [row.split()[:3] for row in rows] == [["→", "shared_gpu(0,2)", "+2"], ["shared_gpu(3–4)", "2", "×"]]


def test_of_many_each_kind_is_shown_and_how_many_were_left_out() -> None:
    many = [even(*D[:3], ingestion_s=1e-3 + 1e-5 * number) for number in range(40)]
    rendered = text(plan_table(plan([*many, pinned(), even(D[0], ingestion_s=1e-3)], many[0])))
    assert len(lines_with(rendered, "gpu(")) + len(lines_with(rendered, "cpu_pinned")) == 12
    assert lines_with(rendered, "single_gpu")
    assert "30 more candidates are left out." in rendered


def test_a_plan_calls_itself_a_model_and_says_whose_figures_it_takes() -> None:
    best = pinned()
    rendered = " ".join(text(plan_table(plan([best], best)), 200).split())
    assert "Model: times are predicted from spec, measured and assumed bandwidths of a preset." in rendered
    assert (
        "An iteration ingests 500 rows from 1 actor at pageable and delivers 500 to each of 2 learners at device:0–1."
        in rendered
    )


def test_the_name_of_a_machine_is_no_markup() -> None:
    made = plan([pinned()])
    odd = replace(made, topology=made.topology.changed(name="[bold]mine[/it]", machine="[/host]"))
    assert "on [bold]mine[/it]" in text(plan_table(odd))
    assert "bandwidths of [/host]" in " ".join(text(plan_table(odd)).split())
    assert "[bold]mine[/it]: memories" in text(topology_table(odd.topology))


def test_a_record_is_plain_and_has_every_candidate() -> None:
    best = even(*D[:4], ingestion_s=1e-3)
    many = [
        best,
        *(even(*D[:3], ingestion_s=1e-3 + 1e-5 * number) for number in range(40)),
        even(D[0], ingestion_s=1e-3),
    ]
    record = json.loads(json.dumps(plan_record(plan(many, best))))
    assert record["kind"] == "model"
    assert record["choice"] == "shared_gpu(0,1,2,3)"
    assert [each["chosen"] for each in record["candidates"]] == [True] + [False] * 41
    assert record["candidates"][-1]["shortfall_bytes"] == {"device:0": 90 * GB}
    assert record["candidates"][0]["transfer_s"] == 2e-3


def test_a_topology_of_devices_all_alike_is_a_matrix_of_kinds() -> None:
    rendered = text(topology_table(topology(8)))
    assert "8 × A100" in rendered
    assert lines_with(rendered, "dev 0–7")[-1].split() == ["dev", "0–7", "5", "a", "20", "s", "1000", "a"]
    assert rendered.index("to another:") < rendered.index("200 m") < rendered.index("9µs")
    assert "(16) 300 s" in rendered


def test_figures_are_told_apart_by_where_they_come_from() -> None:
    assert "Figures of a preset: s spec, m measured (elsewhere), a assumed." in text(topology_table(topology()), 200)
    assert "Figures of host7: s spec, m measured, a assumed." in text(topology_table(topology(machine="host7")), 200)


def test_noise_is_said_where_there_is_much() -> None:
    quiet = text(topology_table(topology()), 200)
    assert "noisy by up to ±2%" in quiet
    noisy = topology().changed(legs={(D[0], D[1]): Leg(200e9, 9e-6, Source.MEASURED, 0.3)})
    assert "±15%" in lines_with(text(topology_table(noisy), 200), "±15%")[0]
    assert "noisy by up to ±15%" in text(topology_table(noisy), 200)


def test_eight_devices_that_differ_fit_eighty_columns() -> None:
    legs = {
        (one, other): Leg((30 + 7.3 * one.index + other.index) * 1e9, 12.5e-6, Source.MEASURED)
        for one in D
        for other in D
    }
    rendered = text(topology_table(topology(8).changed(legs=legs)))
    assert "…" not in rendered.partition("links that")[0]
    assert lines_with(rendered, "dev 7")[-1].split()[-2:] == ["88.1", "m"]


def test_an_edge_that_is_missing_is_a_dash() -> None:
    known = topology()
    legs = {edge: leg for edge, leg in known.legs.items() if edge != (D[1], D[0])}
    routes = {edge: route for edge, route in known.routes.items() if edge in legs}
    cut = type(known)("cut", known.memories, legs, known.links, routes)
    assert lines_with(text(topology_table(cut)), "dev 1")[-1].split()[-3:] == ["–", "1000", "a"]


def test_endpoints_are_alike_only_where_no_figure_tells_them_apart() -> None:
    assert alike(topology(4)) == [(PAGEABLE,), (PINNED,), tuple(D[:4])]
    faster = topology(4).changed(legs={(D[0], D[1]): Leg(250e9)})
    assert alike(faster) == [(PAGEABLE,), (PINNED,), (D[0],), (D[1],), (D[2], D[3])]


def test_of_nodes_that_are_alike_two_are_shown() -> None:
    rack = preset("gb200nvl72")
    shown, left = typical(rack)
    assert {at.node for at in shown.endpoints} == {0, 1}
    assert left == 16
    rendered = text(topology_table(rack))
    assert "16 more nodes are like those that are shown." in rendered
    slower = rack.changed(legs={(PAGEABLE, PAGEABLE): Leg(1e9)})
    assert {at.node for at in typical(slower)[0].endpoints} == {0, 1, 2}
    assert typical(preset("a100x16")) == (preset("a100x16"), 0)


def test_names_of_endpoints_are_short() -> None:
    far = [Endpoint(Tier.DEVICE, index, 1) for index in (0, 1)]
    assert name_endpoints([PAGEABLE, D[0], D[1], D[2], D[5], *far]) == "pageable, device:0–2,5, node1/device:0–1"
    assert name_endpoints([*D[:2], *far]) == "node0–1/device:0–1"
    assert name_endpoints(preset("gb200nvl72").devices) == "node0–17/device:0–3"


def test_names_of_candidates_are_short() -> None:
    rack = preset("gb200nvl72").devices
    hosts = [Endpoint(Tier.PINNED, 0, node) for node in range(4)]
    made = [
        candidate("single_gpu", {D[3]: GB}, 1, 1),
        candidate("shared_gpu", dict.fromkeys(rack, GB), 1, 1),
        candidate("shared_gpu", dict.fromkeys(rack[::3], GB), 1, 1),
        candidate("cpu_pinned", dict.fromkeys(hosts[:1], GB), 1, 1),
        candidate("cpu_pinned", dict.fromkeys(hosts, GB), 1, 1),
    ]
    assert [short_name(each) for each in made] == [
        "single_gpu(3)",
        "shared_gpu(node0–17/0–3)",
        "shared_gpu(24 devices)",
        "cpu_pinned",
        "cpu_pinned(0–3)",
    ]


def test_figures_have_three_digits() -> None:
    assert [gigabytes(size) for size in (0, 1.5e6, 24.576e9, 196.6e9, 2e12)] == ["0", "0.0015", "24.6", "197", "2,000"]
    assert [duration(seconds) for seconds in (2.0, 12.34e-3, 9e-6, 4e-7)] == ["2s", "12.3ms", "9µs", "400ns"]
