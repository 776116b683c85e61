"""What discovery makes of pretend machines: with A100s, without NVLink, without a driver, without anything."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from conduit.errors import SettingError, TopologyError
from conduit.topology import nvidia
from conduit.topology.bandwidth import Source
from conduit.topology.discover import HOST, discover
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier
from tests.topology.fake_nvml import Card, FakeNvml, card_bus

GB = 10**9
NVLINK3 = 4  # NVML_NVLINK_VERSION_3_0


def device(index):
    return Endpoint(Tier.DEVICE, index)


D = [device(index) for index in range(8)]


def a100s():
    """Eight, each with twelve NVLinks to switches, two and two below one PCIe switch."""
    cards = [
        Card(f"GPU-{index:04x}", card_bus(index), node=index // 4, links=[(NVLINK3, None)] * 12) for index in range(8)
    ]
    return FakeNvml(cards, {frozenset((index, index + 1)): FakeNvml.NVML_TOPOLOGY_SINGLE for index in (0, 2, 4, 6)})


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CONDUIT_DISK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nvml(monkeypatch):
    def put(fake):
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return put


@pytest.fixture
def host(tmp_path):
    """64 GB, of which a cgroup allows 8."""
    files = {
        "proc/meminfo": "MemTotal: 62500000 kB\nMemAvailable: 40000000 kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{8 * GB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GB}\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def rate(topology, source, to):
    return topology.leg(source, to).bytes_per_s


def test_eight_a100s_and_their_host_as_they_are(nvml, host):
    fake = nvml(a100s())
    found = discover(root=host, disk=host)
    assert found.endpoints == (PAGEABLE, PINNED, DISK, *D)
    assert fake.open == 0
    assert (found.memory(D[3]).capacity_bytes, found.memory(D[3]).free_bytes) == (80 << 30, 79 << 30)
    assert found.memory(D[5]).what == "NVIDIA A100-SXM4-80GB, NUMA node 1"
    assert found.memory(PAGEABLE).capacity_bytes == 8 * GB
    assert found.memory(PAGEABLE).free_bytes == 5 * GB
    assert found.memory(PAGEABLE).what == "host memory, 2 NUMA nodes"
    assert "may lock" in found.memory(PINNED).what
    assert found.memory(DISK).what == str(host)
    assert {memory.source for memory in found.memories.values()} == {Source.MEASURED}
    # All edges there can be, so that a probe finds out about each.
    assert set(found.legs) == {(a, b) for a in found.endpoints for b in found.endpoints}


def test_the_maker_s_figures_are_spec_and_the_others_assumed(nvml, host):
    nvml(a100s())
    found = discover(root=host, disk=host)
    spec = {edge: leg.bytes_per_s for edge, leg in found.legs.items() if leg.source is Source.SPEC}
    nvlink = {(a, b): 300 * GB for a in D for b in D if a != b}
    pcie = {edge: pytest.approx(31.5 * GB, rel=0.01) for d in D for edge in ((PINNED, d), (d, PINNED))}
    # 2,039 GB/s of memory, read and written.
    within = {(d, d): pytest.approx(2039 * GB / 2, rel=0.001) for d in D}
    assert spec == nvlink | pcie | within
    assert {leg.source for edge, leg in found.legs.items() if edge not in spec} == {Source.ASSUMED}
    # Pageable rows are copied within the host as well.
    assert rate(found, PAGEABLE, D[0]) < min(rate(found, PINNED, D[0]), rate(found, PAGEABLE, PAGEABLE))


def test_what_gpus_share_is_known_from_nvml(nvml, host):
    nvml(a100s())
    found = discover(root=host, disk=host)
    assert found.route(D[0], D[1]) == ("device:0 out", "device:1 in")
    assert (found.links["device:0 out"].bytes_per_s, found.links["device:0 out"].source) == (300 * GB, Source.SPEC)
    assert found.route(PINNED, D[2]) == found.route(PAGEABLE, D[2]) == ("device:2 PCIe in", "PCIe root 1 in")
    assert found.route(PINNED, D[3]) == ("device:3 PCIe in", "PCIe root 1 in")
    assert found.route(D[3], PAGEABLE) == ("device:3 PCIe out", "PCIe root 1 out")
    assert found.links["PCIe root 1 in"].source is Source.ASSUMED
    assert found.links["device:3 PCIe in"].source is Source.SPEC
    assert found.route(PAGEABLE, PINNED) == found.route(PINNED, PINNED) == ("host memory",)
    assert found.route(PAGEABLE, DISK) == found.route(D[0], D[0]) == ()


def test_without_nvlink_gpus_reach_each_other_over_pcie(nvml, host):
    cards = [Card(f"GPU-{index}", card_bus(index), "NVIDIA GeForce RTX 4090", generation=4) for index in range(3)]
    nvml(FakeNvml(cards, {frozenset((0, 1)): FakeNvml.NVML_TOPOLOGY_MULTIPLE}))
    found = discover(root=host, disk=host)
    assert found.leg(D[0], D[1]).source is Source.SPEC
    assert rate(found, D[0], D[1]) == rate(found, PINNED, D[0])
    # Below one bridge they don't go up to it.
    assert found.route(D[0], D[1]) == ("device:0 PCIe out", "device:1 PCIe in")
    assert found.route(D[1], D[2]) == ("device:1 PCIe out", "PCIe root 0 out", "device:2 PCIe in")


def test_without_peer_access_either_it_takes_two_legs_by_way_of_the_host(nvml, host):
    nvml(FakeNvml([Card(f"GPU-{index}", card_bus(index)) for index in range(2)], peers=False))
    found = discover(root=host, disk=host)
    assert found.leg(D[0], D[1]).source is Source.ASSUMED
    assert rate(found, D[0], D[1]) == pytest.approx(rate(found, PINNED, D[0]) / 2)


def test_a_bridge_between_two_gpus_counts_its_links(nvml, host):
    ends = [card_bus(0), card_bus(1), card_bus(2)]
    links = [[(NVLINK3, ends[1])] * 4, [(NVLINK3, ends[0])] * 4, []]
    nvml(FakeNvml([Card(f"GPU-{index}", ends[index], links=links[index]) for index in range(3)]))
    found = discover(root=host, disk=host)
    assert rate(found, D[0], D[1]) == 100 * GB
    assert found.route(D[0], D[1]) == ()
    assert rate(found, D[0], D[2]) < 40 * GB


@pytest.mark.parametrize(("version", "each"), [(1, 20), (2, 25), (4, 25), (6, 25), (7, 50), (8, 50)])
def test_an_nvlink_s_speed_follows_from_its_version(nvml, version, each):
    nvml(FakeNvml([Card("GPU-0", card_bus(0), links=[(version, None)] * 18)]))
    assert nvidia.gpus().found[0].nvlinks == {nvidia.SWITCH: 18 * each * GB}


@pytest.mark.parametrize(
    "fails", [lambda call: call % 2 == 0, lambda call: call % 2 == 1, lambda call: call % 3 == 0, lambda call: True]
)
def test_calls_that_fail_only_make_for_fewer_figures(nvml, host, fails):
    fake = nvml(a100s())
    fake.fails = fails
    found = discover(root=host, disk=host)
    assert fake.open == 0
    assert {PAGEABLE, DISK} <= set(found.endpoints)
    assert set(found.legs) == {(a, b) for a in found.endpoints for b in found.endpoints}


@pytest.mark.parametrize("failing", range(1, 60))
def test_any_one_call_may_fail(nvml, host, failing):
    fake = nvml(a100s())
    fake.fails = lambda call: call == failing
    found = discover(root=host, disk=host)
    assert len(found.devices) >= 7 or failing == 1


def test_without_a_driver_or_the_package_there_are_no_gpus(nvml, host):
    nvml(FakeNvml([], no_driver=True))
    assert discover(root=host, disk=host).endpoints == (PAGEABLE, DISK)
    nvml(None)  # an import of it fails
    assert discover(root=host, disk=host).endpoints == (PAGEABLE, DISK)


def test_without_proc_sys_psutil_or_a_folder_the_host_s_memory_is_left(monkeypatch, nvml, tmp_path):
    nvml(None)
    monkeypatch.setitem(sys.modules, "psutil", None)
    found = discover(root=tmp_path, disk=tmp_path / "none")
    assert found.endpoints == (PAGEABLE,)
    assert found.memory(PAGEABLE).free_bytes > 1 << 20


def test_a_gpu_that_is_split_is_left_to_its_framework(nvml, host):
    nvml(FakeNvml([Card("GPU-0", card_bus(0), mig=True), Card("GPU-1", card_bus(1))]))
    assert [gpu.uuid for gpu in nvidia.gpus().found] == ["GPU-1"]


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("2,0", [2, 0]),
        ("GPU-0007,GPU-0001", [7, 1]),
        (" 1 , GPU-0004", [1, 4]),
        ("", []),
        ("-1", []),
        ("3,-1,4", [3]),
        ("0,99,1", [0]),
        ("GPU-00", []),  # of all of them
        ("MIG-1", []),
    ],
)
def test_only_gpus_that_cuda_shows_are_there_in_its_order(monkeypatch, nvml, host, asked, left):
    fake = nvml(a100s())
    for index, card in enumerate(fake.cards):
        card.free = 1000 + index
    if asked is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    found = discover(root=host, disk=host)
    assert [found.memory(at).free_bytes - 1000 for at in found.devices] == left


BACKEND = (PAGEABLE, PINNED, DISK, D[0], D[1])


def free(at):
    return {PAGEABLE: 5 * GB, PINNED: 5 * GB, DISK: 50 * GB}.get(at, 70 * GB)


def test_a_backend_s_devices_are_the_gpus_that_their_uuid_or_pci_id_names(nvml, host):
    fake = nvml(a100s())
    fake.cards[6].name = "NVIDIA A100-SXM4-40GB"
    found = discover(BACKEND, free, hardware={D[0]: "GPU-0006", D[1]: "0000:03:00.0"}, root=host)
    assert found.endpoints == BACKEND
    assert found.memory(D[0]).what.startswith("NVIDIA A100-SXM4-40GB")
    assert "NUMA node 0" in found.memory(D[1]).what
    # The backend knows what its allocator holds back.
    assert found.memory(D[0]).free_bytes == 70 * GB
    assert found.memory(D[0]).capacity_bytes == 80 << 30
    assert rate(found, D[0], D[1]) == 300 * GB


@pytest.mark.parametrize("name", ["GPU-0006", "0006", "00000000:06:00.0", "0000:06:00.0"])
def test_a_gpu_is_known_by_every_form_of_its_names(nvml, name):
    nvml(a100s())
    named = nvidia.gpus().named(name)
    assert named is not None
    assert named.uuid == "GPU-0006"


def test_a_number_alone_names_no_gpu(nvml, host):
    nvml(a100s())
    found = discover(BACKEND, free, root=host)
    assert {leg.source for leg in found.legs.values()} == {Source.ASSUMED}
    assert found.memory(D[0]).what == ""
    assert found.memory(D[0]).free_bytes == found.memory(D[0]).capacity_bytes == 70 * GB


def test_devices_that_are_the_host_share_its_memory_and_its_bus(nvml, host):
    nvml(None)
    endpoints = (PAGEABLE, DISK, *D)
    found = discover(endpoints, lambda at: 4 * GB, hardware=dict.fromkeys(D, HOST), root=host)
    assert [found.memory(at).free_bytes for at in D] == [4 * GB // 8] * 8
    assert found.memory(PAGEABLE).free_bytes == 4 * GB
    assert found.route(PAGEABLE, D[0]) == found.route(D[0], D[1]) == found.route(D[3], D[3]) == ("host memory",)


def test_jax_s_cpu_devices_appear(host):
    pytest.importorskip("jax")
    from conduit.backends import load

    backend = load("jax")
    found = discover(backend.endpoints(), backend.free_bytes)
    assert found.endpoints == tuple(backend.endpoints())
    assert len(found.devices) == 8


def test_an_endpoint_that_the_backend_cannot_use_is_not_there(host):
    def no_disk(at):
        if at == DISK:
            raise SettingError("no folder")
        return GB

    assert discover((PAGEABLE, DISK), no_disk, root=host).endpoints == (PAGEABLE,)


def test_more_free_than_there_is_counts_as_all_of_it(host):
    """An emulated machine has more than this one."""
    assert discover((PAGEABLE,), lambda at: 1 << 40, root=host).memory(PAGEABLE).capacity_bytes == 1 << 40


def test_hardware_of_an_endpoint_that_is_not_there_is_refused(host):
    with pytest.raises(
        TopologyError, match=r"hardware of device:5: there is no such device; expected of device:0, device:1"
    ):
        discover(BACKEND, free, hardware={D[5]: HOST}, root=host)
    with pytest.raises(TopologyError, match=r"hardware of pageable: .* expected of none"):
        discover((PAGEABLE,), free, hardware={PAGEABLE: HOST}, root=host)


def test_the_disk_is_the_folder_that_was_named(monkeypatch, nvml, host):
    nvml(None)
    monkeypatch.setenv("CONDUIT_DISK", str(host))
    asked = []
    sizes = SimpleNamespace(f_blocks=100, f_frsize=4096, f_bavail=30)
    monkeypatch.setattr(os, "statvfs", lambda folder: asked.append(str(folder)) or sizes)
    found = discover(root=host)
    assert asked == [str(host)]
    assert (found.memory(DISK).capacity_bytes, found.memory(DISK).free_bytes) == (409600, 122880)


def test_it_is_named_after_this_machine(nvml, host):
    nvml(None)
    found = discover(root=host, disk=host)
    assert found.machine
    assert found.machine != "preset"
