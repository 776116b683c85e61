"""`conduit topology` and `conduit plan`: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from conduit.backends.reference import ReferenceBackend
from conduit.cli import app
from conduit.topology import PRESETS, load, preset, save, this_machine

PLAN = ("plan", "--row-bytes", "192KiB", "--rows", "1e6", "--batch-size", "512")
A100 = (*PLAN, "--preset", "a100x8")


def run(*arguments: str | Path) -> Result:
    """In a terminal wide enough that no line is broken."""
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def said(result: Result) -> str:
    """In one line: what stands below a table is as wide as the table."""
    return " ".join(result.stdout.split())


def line_with(result: Result, word: str) -> list[str]:
    (line,) = [line for line in result.stdout.splitlines() if word in line]
    return line.split()


def refused(*arguments: str | Path) -> str:
    """The one line that says why, with exit code 2 and nothing on standard output."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line.removeprefix("conduit: ")


def test_without_options_a_topology_is_this_machines_and_says_what_is_assumed() -> None:
    result = run("topology")
    assert result.exit_code == 0
    assert "pageable" in result.stdout
    assert f"Figures of {this_machine()}" in result.stdout
    assert "a assumed" in result.stdout


def test_a_backend_shows_its_own_devices() -> None:
    assert "dev 0" in run("topology", "--backend", "reference").stdout


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_shown_saved_and_drawn(name: str, tmp_path: Path) -> None:
    result = run("topology", "--preset", name, "--save", tmp_path / "it.json", "--figure", tmp_path / "it.png")
    assert result.exit_code == 0
    assert f"{name}: bandwidth from (rows) to (columns), GB/s" in result.stdout
    assert "Figures of a preset" in result.stdout
    assert load(tmp_path / "it.json") == preset(name)
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_a_machine_is_measured_saved_and_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "conduit.backends.load", lambda name: ReferenceBackend(0)
    )  # host memory alone: quickly measured
    saved = tmp_path / "here.json"
    measured = run("topology", "--measure", "--backend", "reference", "--seconds", "0.2", "--save", saved)
    assert measured.exit_code == 0
    assert "m measured" in measured.stdout
    assert "assumed" not in measured.stdout
    planned = run("plan", "--row-bytes", "1KB", "--rows", "1000", "--file", saved)
    assert planned.exit_code == 0
    assert f"predicted from measured bandwidths of {this_machine()}" in said(planned)
    assert "another machine" not in planned.stdout


def test_a_topology_of_another_machine_is_named_as_such(tmp_path: Path) -> None:
    saved = tmp_path / "theirs.json"
    save(preset("laptop"), saved)
    saved.write_text(saved.read_text().replace('"machine": "preset"', '"machine": "theirs, 4 × CPU"'))
    for arguments in (("topology",), ("plan", "--row-bytes", "1KB", "--rows", "1000")):
        result = run(*arguments, "--file", saved)
        assert result.exit_code == 0
        assert f"Measured on another machine (theirs, 4 × CPU); this is {this_machine()}." in result.stdout


def test_a_plan_is_a_table_with_its_choice_marked() -> None:
    result = run(*A100)
    assert result.exit_code == 0
    assert "1,000,000 rows of 192 KiB on a100x8" in result.stdout
    # Three hold the rows, and eight would be faster by too little to matter.
    assert line_with(result, "→")[:6] == ["→", "shared_gpu(0–2)", "+20", "3", "×", "65.5"]
    assert line_with(result, "cpu_pinned")[-1] == "yes"
    assert "Model: times are predicted" in result.stdout


def test_counts_may_be_written_as_people_write_them() -> None:
    assert run(*A100).stdout == run(*A100[:4], "1_000_000", *A100[5:]).stdout


def test_a_plan_knows_who_acts_and_who_learns() -> None:
    counted = run(*A100, "--actors", "2", "--learners", "8", "--replay-ratio", "4")
    who = "rows from 2 actors at pageable and delivers 512 to each of 8 learners at device:0–7"
    assert f"ingests 1,024 {who}" in said(counted)
    placed = run(*A100, "--actors", "device:1", "--learners", "device:2, device:3")
    who = "rows from 1 actor at device:1 and delivers 512 to each of 2 learners at device:2–3"
    assert f"ingests 1,024 {who}" in said(placed)


def test_budgets_and_kinds_bound_a_plan() -> None:
    single = run(*A100, "--candidates", "single_gpu,cpu_pinned")
    assert line_with(single, "→")[1] == "cpu_pinned"
    assert "shared_gpu" not in single.stdout
    tight = run(*A100, "--budget", "device=20GB", "--candidates", "shared_gpu")
    assert tight.exit_code == 1
    assert line_with(tight, "shared_gpu(0–7)")[-3:] != ["yes"]


def test_what_fits_nowhere_exits_with_1_and_says_what_lacks() -> None:
    result = run("plan", "--preset", "laptop", "--row-bytes", "1MB", "--rows", "1e6")
    assert result.exit_code == 1
    assert line_with(result, "cpu_pageable")[-1] == "992"
    assert "Nothing fits." in result.stdout


def test_a_plan_is_written_and_drawn(tmp_path: Path) -> None:
    options = ("--json", tmp_path / "it.json", "--figure", tmp_path / "it.png")
    result = run("plan", "--preset", "pcie_gen4", "--row-bytes", "8KiB", "--rows", "1e6", *options)
    assert result.exit_code == 0
    record = json.loads((tmp_path / "it.json").read_text())
    assert record["kind"] == "model"
    assert [each["name"] for each in record["candidates"] if each["chosen"]] == [record["choice"]]
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_what_fits_nowhere_can_be_drawn(tmp_path: Path) -> None:
    figure = tmp_path / "it.png"
    assert run("plan", "--preset", "laptop", "--row-bytes", "1MB", "--rows", "1e6", "--figure", figure).exit_code == 1
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["topology", "plan"])
def test_help_names_the_presets_and_the_exit_codes(command: str) -> None:
    words = " ".join(run(command, "--help").stdout.replace("│", " ").split())
    assert "pcie_gen5" in words
    assert ("Exits with 1 where the rows fit nowhere" in words) == (command == "plan")


def test_an_unknown_preset_lists_those_there_are() -> None:
    why = refused("topology", "--preset", "a100")
    assert "no preset 'a100'" in why
    assert all(name in why for name in PRESETS)
    assert refused(*PLAN, "--preset", "a100") == why


@pytest.mark.parametrize("command", [("topology",), PLAN])
def test_one_topology_is_asked_for_at_most(command: tuple[str, ...], tmp_path: Path) -> None:
    saved = tmp_path / "it.json"
    save(preset("laptop"), saved)
    assert "--preset and --file exclude each other" in refused(*command, "--preset", "laptop", "--file", saved)
    assert "--file and --measure exclude each other" in refused(*command, "--file", saved, "--measure")
    assert "--backend says whose memories of this machine" in refused(*command, "--file", saved, "--backend", "torch")


def test_a_topology_that_can_not_be_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is a folder: expected a file to write" in refused("topology", "--preset", "laptop", "--save", tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = run("topology", "--preset", "laptop", "--save", tmp_path / "it.json")
    assert (result.exit_code, "can't write the topology: No space left" in result.stderr) == (2, True)


def test_a_file_that_is_no_topology_is_refused(tmp_path: Path) -> None:
    assert "can't read the topology" in refused("topology", "--file", tmp_path / "missing.json")
    (tmp_path / "it.json").write_text("[]")
    assert "is no topology" in refused(*PLAN, "--file", tmp_path / "it.json")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--rows", "1.5"), "--rows '1.5': expected a whole number ≥ 1"),
        (("--rows", "many"), "--rows 'many': expected a whole number ≥ 1"),
        (("--rows", "inf"), "--rows 'inf': expected a whole number ≥ 1"),
        (("--batch-size", "0"), "--batch-size '0': expected a whole number ≥ 1"),
        (("--row-bytes", "3 apples"), "row_bytes='3 apples'"),
        (("--row-bytes", "infGB"), "row_bytes='infGB': not a number of bytes"),
        (("--actors", "device:99"), "device:99"),
        (("--actors", "²"), "endpoint '²'"),
        (("--actors", "9" * 5000), "--actors '999"),
        (("--learners", "0"), "--learners '0': expected a whole number ≥ 1"),
        (("--replay-ratio", "0"), "replay_ratio=0.0"),
        (("--budget", "40GiB"), "--budget '40GiB': expected TIER=SIZE"),
        (("--budget", "gpu=40GiB"), "expected a tier of pageable"),
        (("--budget", "device=4GiB", "--budget", "device=8GiB"), "device has a budget already, 4GiB"),
        (("--budget", "device=1TB"), "more than the"),
        (("--candidates", "single_gpu,cpu"), "'cpu'"),
        (("--figure", "it.txt"), "expected a file that ends with .png, .svg or .pdf"),
        (("--json", "nowhere/it.json"), "there is no folder nowhere"),
        (("--json", "."), ". is a folder: expected a file to write"),
    ],
)
def test_bad_input_is_refused_in_a_line(options: tuple[str, ...], why: str) -> None:
    assert why in refused(*A100, *options)
