"""A topology comes back from its file as it was, and a file that can't be one says why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conduit.errors import TopologyError
from conduit.topology import PRESETS, files, preset
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Link, Memory, Topology
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier
from conduit.topology.files import check_machine, encoded, load, save, this_machine

FAR = Endpoint(Tier.DEVICE, 3, node=2)
SECOND = Endpoint(Tier.PAGEABLE, 1)
MEASURED = Topology(
    "mine, übermäßig",
    {
        PAGEABLE: Memory(10**12, 7, Source.MEASURED, "DDR5"),
        SECOND: Memory(5, 0, Source.ASSUMED),
        FAR: Memory(80, 79, Source.SPEC),
    },
    {
        (PAGEABLE, FAR): Leg(1e10 / 3, 1.1e-5, Source.MEASURED, 0.0123),
        (FAR, FAR): Leg(2e12),
        (SECOND, PAGEABLE): Leg(5),
    },
    {"PCIe": Link(2.6e10, Source.SPEC), "NIC": Link(1.0)},
    {(PAGEABLE, FAR): ("PCIe", "NIC")},
    machine="box, 8 × CPU",
)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_come_back_as_they_were(name: str, tmp_path: Path):
    save(preset(name), tmp_path / "it.json")
    assert load(tmp_path / "it.json") == preset(name)


def test_every_figure_comes_back_with_its_source_its_noise_and_its_order(tmp_path: Path):
    save(MEASURED, tmp_path / "mine.json")
    again = load(tmp_path / "mine.json")
    assert again == MEASURED
    assert again.endpoints == MEASURED.endpoints
    assert list(again.legs) == list(MEASURED.legs)
    assert again.leg(PAGEABLE, FAR).noise == 0.0123


def test_a_file_says_its_format_its_version_and_its_machine(tmp_path: Path):
    save(MEASURED, tmp_path / "mine.json")
    value = json.loads((tmp_path / "mine.json").read_text())
    assert (value["format"], value["version"], value["machine"]) == ("conduit topology", 1, "box, 8 × CPU")


# Writing.


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_save_that_fails_leaves_what_was_there(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "mine.json"
    save(MEASURED, path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, failing, fail)
    with pytest.raises(TopologyError, match=r"mine.json: can't write the topology: No space left on device"):
        save(preset("laptop"), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["mine.json"]


def test_a_save_overwrites_and_leaves_nothing_beside(tmp_path: Path):
    save(MEASURED, tmp_path / "mine.json")
    save(preset("laptop"), tmp_path / "mine.json")
    assert load(tmp_path / "mine.json").name == "laptop"
    assert os.listdir(tmp_path) == ["mine.json"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(TopologyError, match=r"nowhere/it\.json: can't write the topology: No such file"):
        save(MEASURED, tmp_path / "nowhere" / "it.json")
    with pytest.raises(TopologyError, match=r"nowhere\.json: can't read the topology: No such file"):
        load(tmp_path / "nowhere.json")


# Reading what nobody wrote.


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"name = 3", b"[" * 100_000])
def test_what_is_not_json_is_said_to_be_none(text: bytes, tmp_path: Path):
    path = tmp_path / "it.json"
    path.write_bytes(text)
    with pytest.raises(TopologyError, match=r"it\.json is no topology: it isn't JSON"):
        load(path)


@pytest.mark.parametrize("value", [3, [], {}, {"format": "safetensors", "version": 1}])
def test_another_format_is_said_to_be_one(value: object, tmp_path: Path):
    path = tmp_path / "it.json"
    path.write_text(json.dumps(value))
    with pytest.raises(
        TopologyError, match=r'it\.json is no topology: expected an object with "format": "conduit topology"'
    ):
        load(path)


def refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> str:
    value = json.loads(json.dumps(encoded(MEASURED)))
    change(value)
    path = tmp_path / "it.json"
    path.write_text(json.dumps(value))
    with pytest.raises(TopologyError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_a_newer_version_is_said_to_be_one(tmp_path: Path):
    def newer(value: dict[str, Any]) -> None:
        value["version"] = 2
        del value["legs"]  # whatever else it is

    assert refused(tmp_path, newer) == ": version 2 is of a newer Conduit; this one reads up to 1"


@pytest.mark.parametrize("version", [0, -1])
def test_a_version_that_never_was_is_refused(version: int, tmp_path: Path):
    said = refused(tmp_path, lambda value: value.update(version=version))
    assert said == f": version {version} is none that there was"


def test_figures_that_numpy_made_are_saved_as_numbers(tmp_path: Path):
    half: Any = np.float32(0.5)
    ten: Any = np.int64(10)
    memory, leg = Memory(ten, ten, Source.MEASURED), Leg(half, half, noise=half)
    made = Topology(
        "NumPy's",
        {PAGEABLE: memory},
        {(PAGEABLE, PAGEABLE): leg},
        {"bus": Link(half)},
        {(PAGEABLE, PAGEABLE): ("bus",)},
    )
    save(made, tmp_path / "it.json")
    assert load(tmp_path / "it.json") == made


@pytest.mark.parametrize(("name", "path"), [("\ud800", "it.json"), ("fine", "a\0b")], ids=["a name", "a path"])
def test_what_can_not_be_written_down_is_refused_and_leaves_nothing(name: str, path: str, tmp_path: Path):
    with pytest.raises(TopologyError, match="can't write the topology: "):
        save(MEASURED.changed(name=name), tmp_path / path)
    assert not os.listdir(tmp_path)


VALUE = encoded(MEASURED)
KEYS = [
    *((key,) for key in VALUE if key != "format"),
    *((part, key) for part in ("memories", "links", "legs") for key in VALUE[part][0]),
]


@pytest.mark.parametrize("path", KEYS, ids="/".join)
def test_a_missing_key_is_named(path: tuple[str, ...], tmp_path: Path):
    def remove(value: dict[str, Any]) -> None:
        del (value if len(path) == 1 else value[path[0]][0])[path[-1]]

    where = "" if len(path) == 1 else f": {path[0]}[0]"
    assert refused(tmp_path, remove) == f"{where} has no {path[-1]!r}"


@pytest.mark.parametrize("wrong", [None, True, {}])
@pytest.mark.parametrize("path", KEYS, ids="/".join)
def test_a_value_of_the_wrong_kind_is_named(path: tuple[str, ...], wrong: object, tmp_path: Path):
    def spoil(value: dict[str, Any]) -> None:
        (value if len(path) == 1 else value[path[0]][0])[path[-1]] = wrong

    where = "" if len(path) == 1 else f": {path[0]}[0]"
    assert refused(tmp_path, spoil).startswith(f"{where}: {path[-1]}={wrong!r}: expected a ")


@pytest.mark.parametrize(
    ("part", "key", "wrong", "said"),
    [
        ("legs", "bytes_per_s", 0, "legs[0]: bytes_per_s=0: expected a finite number above 0"),
        ("legs", "bytes_per_s", 10**400, "legs[0]: bytes_per_s=1000"),
        ("memories", "capacity_bytes", 10**400, "memories[0]: free_bytes=7, capacity_bytes=1000"),
        ("legs", "latency_s", -1, "legs[0]: latency_s=-1"),
        ("legs", "noise", float("nan"), "legs[0]: noise=nan"),
        ("legs", "source", "guessed", "legs[0]: source='guessed': expected one of spec, measured, assumed"),
        ("legs", "from", "gpu:0", "legs[0]: from: endpoint 'gpu:0': expected [nodeN/]TIER[:INDEX]"),
        ("legs", "to", "device:7", "edge pageable → device:7: there is no endpoint device:7"),
        ("legs", "links", ["bus"], "route pageable → node2/device:3 uses unknown link 'bus'"),
        ("links", "bytes_per_s", -3, "links[0]: bytes_per_s=-3"),
        ("memories", "free_bytes", 10**13, "memories[0]: free_bytes=10000000000000, capacity_bytes=1000000000000"),
        ("memories", "capacity_bytes", 1.5, "memories[0]: capacity_bytes=1.5: expected a whole number"),
    ],
)
def test_a_figure_that_cannot_be_says_where_it_stands(part: str, key: str, wrong: object, said: str, tmp_path: Path):
    def spoil(value: dict[str, Any]) -> None:
        value[part][0][key] = wrong

    assert said in refused(tmp_path, spoil)


@pytest.mark.parametrize("part", ["memories", "links", "legs"])
def test_what_is_there_twice_is_refused(part: str, tmp_path: Path):
    assert refused(tmp_path, lambda value: value[part].append(value[part][0])).endswith("] is there twice")


def test_a_part_that_is_no_object_is_refused(tmp_path: Path):
    def spoil(value: dict[str, Any]) -> None:
        value["legs"][1] = "fast"

    assert refused(tmp_path, spoil) == ": legs[1]: expected an object, not 'fast'"


# Whose it is.


def test_a_topology_of_this_machine_passes():
    check_machine(MEASURED, here="box, 8 × CPU")
    check_machine(MEASURED.changed(machine=this_machine()))


def test_a_topology_of_another_machine_is_named_as_such():
    with pytest.raises(TopologyError, match=r"measured on another machine, 'box, 8 × CPU'; this is 'other'"):
        check_machine(MEASURED, here="other")
    with pytest.raises(TopologyError, match="another machine"):
        check_machine(MEASURED)


def test_a_preset_is_no_measurement_of_this_machine():
    with pytest.raises(TopologyError, match="'laptop' is a preset, and this machine is 'here'"):
        check_machine(preset("laptop"), here="here")


def test_this_machine_is_the_same_every_time_and_names_its_host():
    import socket

    assert this_machine() == this_machine()
    assert this_machine().startswith(f"{socket.gethostname()}, ")


def test_this_machine_names_its_gpus(monkeypatch: pytest.MonkeyPatch):
    from conduit.topology.nvidia import Gpu, Gpus

    found = tuple(Gpu(f"GPU-{n}", f"0000:0{n}:00.0", "NVIDIA H200", 1, 1) for n in range(2))
    monkeypatch.setattr(files, "gpus", lambda: Gpus(found))
    assert this_machine().endswith(", 2 × NVIDIA H200")
