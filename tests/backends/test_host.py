"""The host tiers' own promises: alignment, laziness, ownership, and how much memory is left."""

from __future__ import annotations

import resource
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from conduit.backends.carving import ALIGNMENT
from conduit.backends.disk import Disk
from conduit.backends.host import HostTiers, PinnedMemory
from conduit.backends.memory import free_host_bytes
from conduit.core.experience import Schema
from conduit.testing import address, assert_same, example_rows, on_host
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED

WIDE = {"image": np.zeros((4, 3, 64, 128), np.uint8), "reward": np.zeros(4, np.float32), "done": np.zeros(4, np.bool_)}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def tiers():
    return HostTiers(Disk())


def test_storage_and_wide_arrays_of_batches_begin_at_a_multiple_of_64_bytes(tiers):
    columns = tiers.allocate(Schema.infer(WIDE, "test"), 4, PAGEABLE)
    batch = tiers.read(columns, np.arange(3), list(WIDE), PAGEABLE)
    copy = tiers.copy(columns, PAGEABLE)
    for arrays in (columns.arrays, {"image": batch.arrays["image"]}, copy.arrays):
        assert all(address(array) % ALIGNMENT == 0 for array in arrays.values())
    for arrays in (columns.arrays, batch.arrays, copy.arrays):
        assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays.values())


def test_keeping_a_batch_s_rewards_does_not_keep_its_images(tiers):
    batch = tiers.read(on_host(WIDE), np.arange(4), list(WIDE), PAGEABLE)
    image = weakref.ref(batch.arrays["image"])
    memory = weakref.ref(batch.arrays["image"].base)
    reward = batch.arrays["reward"]
    del batch
    assert image() is None
    assert memory() is None
    assert reward.sum() == 0


def test_eight_gibibytes_of_columns_cost_nothing_until_they_are_written(tiers):
    before = resident_bytes()
    columns = tiers.allocate(Schema.infer({"a": np.zeros((1, 1 << 10), np.uint8)}, "test"), 1 << 23, PAGEABLE)
    assert columns.arrays["a"].nbytes == 1 << 33
    assert columns.arrays["a"][-1].sum() == 0
    assert resident_bytes() - before < 1 << 28


def test_bfloat16_rows_are_gathered_like_any_other(tiers):
    rows = {"a": np.arange(12).reshape(6, 2).astype(ml_dtypes.bfloat16)}
    batch = tiers.read(on_host(rows), np.array([5, 0, 5]), ["a"], PAGEABLE)
    assert_same(batch.arrays["a"], rows["a"][[5, 0, 5]], "batch")


def test_pinned_columns_and_batches_come_from_the_pinned_memory_given():
    asked = []

    def source(kind):
        return lambda size: asked.append((kind, size)) or np.zeros(size, np.uint8)

    tiers = HostTiers(Disk(), PinnedMemory(source("columns"), source("batch")))
    assert tiers.endpoints == (PAGEABLE, PINNED, DISK)
    assert tiers.staging == PINNED
    rows = example_rows(4, seed=1)
    columns = tiers.write(tiers.allocate(Schema.infer(rows, "test"), 4, PINNED), 0, on_host(rows))
    tiers.copy(columns, PINNED)
    assert {kind for kind, _ in asked} == {"columns"}
    asked.clear()
    tiers.read(columns, np.arange(4), list(rows), PINNED)
    assert {kind for kind, _ in asked} == {"batch"}
    asked.clear()
    tiers.read(columns, np.arange(4), list(rows), PAGEABLE)
    assert asked == []


MEMINFO = "MemTotal: 64000 kB\nMemFree: 100 kB\nMemAvailable: 32000 kB\n"


def machine(root, files):
    for path, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_free_memory_is_what_the_kernel_says_is_available(tmp_path):
    assert free_host_bytes(machine(tmp_path, {})) == 32000 * 1024


def test_a_cgroup_v2_limit_counts_and_so_does_its_parent_s(tmp_path):
    group = "sys/fs/cgroup/pod/box"
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        f"{group}/memory.max": "9000000\n",
        f"{group}/memory.current": "5000000\n",
        f"{group}/memory.stat": "anon 1\ninactive_file 1000000\n",
    }
    assert free_host_bytes(machine(tmp_path, files)) == 5_000_000
    files |= {"sys/fs/cgroup/pod/memory.max": "7000000\n", "sys/fs/cgroup/pod/memory.current": "6000000\n"}
    assert free_host_bytes(machine(tmp_path, files)) == 1_000_000


def test_a_cgroup_v2_without_a_limit_does_not_count(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "5000000\n",
    }
    assert free_host_bytes(machine(tmp_path, files)) == 32000 * 1024


def test_a_cgroup_v1_limit_counts_where_the_container_sees_it(tmp_path):
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n",  # a path of the host's, not mounted here
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000000\n",
        "sys/fs/cgroup/memory/memory.stat": "cache 5\ntotal_inactive_file 500000\n",
    }
    assert free_host_bytes(machine(tmp_path, files)) == 1_500_000
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert free_host_bytes(machine(tmp_path, files)) == 32000 * 1024


def test_a_cgroup_past_its_limit_leaves_nothing(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "2000\n",
    }
    assert free_host_bytes(machine(tmp_path, files)) == 0


def test_without_proc_the_machine_s_memory_is_the_answer(tmp_path):
    assert free_host_bytes(tmp_path) > 1 << 20
