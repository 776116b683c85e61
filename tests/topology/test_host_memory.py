"""How much host memory there is, with /proc and the cgroups of pretend machines."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

from conduit.topology.host_memory import free_host_bytes, host_bytes

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


def test_what_there_is_in_all_is_the_machine_s_or_the_smallest_limit(tmp_path):
    assert host_bytes(machine(tmp_path, {})) == 64000 * 1024
    files = {
        "proc/self/cgroup": "4:memory:/box\n0::/pod\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "7000000\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1\n",
        "sys/fs/cgroup/memory.max": "8000000\n",
        "sys/fs/cgroup/memory.current": "2\n",
    }
    assert host_bytes(machine(tmp_path, files)) == 7_000_000


def test_without_proc_psutil_is_asked(tmp_path, monkeypatch):
    pretend = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=9_000, available=4_000))
    monkeypatch.setitem(sys.modules, "psutil", pretend)
    assert (host_bytes(tmp_path), free_host_bytes(tmp_path)) == (9_000, 4_000)


def test_without_psutil_either_the_machine_s_memory_is_the_answer(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_bytes(tmp_path) == free_host_bytes(tmp_path) == pages
