"""How much host memory there is, and how much this process may still take: what the machine has, within what its cgroup allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 62
"""cgroup v1 writes "no limit" as a number near 2⁶³."""
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Limit:
    """One cgroup's: of `allowed` bytes, `left` can still be taken."""

    allowed: int
    left: int


def free_host_bytes(root: Path = _ROOT) -> int:
    """Bytes that can be allocated before the kernel reclaims or kills: /proc/meminfo's MemAvailable, or less where a
    cgroup (v1 or v2) limits us. Without /proc: what psutil says, or the machine's memory. `root` stands in for / in tests."""
    return max(0, min([_machine_bytes(root, "MemAvailable", "available"), *(limit.left for limit in _limits(root))]))


def host_bytes(root: Path = _ROOT) -> int:
    """All that this process could ever have: the machine's memory, or the smallest limit of its cgroups."""
    return min([_machine_bytes(root, "MemTotal", "total"), *(limit.allowed for limit in _limits(root))])


def _machine_bytes(root: Path, line_of_meminfo: str, of_psutil: str) -> int:
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        try:
            import psutil
        except ImportError:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(getattr(psutil.virtual_memory(), of_psutil))
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == line_of_meminfo:
            return int(value.split()[0]) * 1024
    return 0


def _limits(root: Path) -> Iterator[_Limit]:
    """Every limit that applies: a cgroup's own and its ancestors'."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, cache = root / "sys/fs/cgroup/memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may name a group that only the host sees; its own root is then the one that counts.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            folder = base / str(group).lstrip("/")
            allowed, used = _number(folder / limit), _number(folder / usage)
            if allowed is not None and used is not None and allowed < _NO_LIMIT:
                yield _Limit(allowed, allowed - used + _statistic(folder / "memory.stat", cache))


def _number(file: Path) -> int | None:
    """The number in `file`; None where there is no such file, or it says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
