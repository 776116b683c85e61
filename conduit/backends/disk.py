"""The disk tier's memory: mapped files without names, for more rows than the host's memory holds.

The kernel keeps as many of their pages in memory as it has room for, and takes them back when others need it. Measured, on
an SSD with the pages out of memory: reads that it guesses ahead of cost 30 times what the rows do, so it guesses nothing; 256
rows are there 4 to 20 times sooner when all are asked for at once; and a write through the mapping reads every page that it
is about to replace, some 20 times as slow as one to the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from conduit.backends.carving import Array
from conduit.backends.readahead import will_need
from conduit.core.backend import RowIndex
from conduit.errors import CapacityError, SettingError

VARIABLE = "CONDUIT_DISK"
"""The environment's name for the folder."""
_LASTING = "/var/tmp"
"""Where temporary files lie that may be large, also on machines that keep /tmp in memory."""
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_RESERVE_BYTES, _RESERVE_SHARE = 1 << 30, 0.02
"""So much of a file system is left to others, whichever is less: one without a free byte stops every program that writes there."""
_WORTH_ASKING = 64
"""Asking for a row costs less than a µs, to wait for a page that wasn't asked for some 50."""
_SECTOR_BYTES = 512


class Disk:
    """Files in one folder, which is looked at when it is first needed, or at once when it is named. Safe for several threads.

    A file has no name: it goes with the last array over it, however the process ends. Its room is taken when it is made, so
    no write fails later for want of it (but on file systems that copy on write, such as Btrfs, which take more for every
    write)."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """`folder`: by default $CONDUIT_DISK, or else the folder for temporary files, but /var/tmp where that lies in memory.
        SettingError for one that is named here and can't be used."""
        self._named = folder
        self._absent = False
        """Whether rows of the last batch weren't in memory."""
        if folder is not None:
            _ = self.folder

    @functools.cached_property
    def folder(self) -> Path:
        """It and its parents are made if need be. SettingError unless files can be made in it, on something that isn't memory."""
        folder, named = _chosen(self._named)
        would_do = f"Name a folder on a disk that can be written to, by Store(disk=…) or {VARIABLE}"
        if not hasattr(os, "posix_fallocate"):
            raise SettingError(f"{named}: rows on disk need Linux, since a file's room can't be taken beforehand here")
        there = next((at for at in (folder, *folder.parents) if os.path.exists(at)), folder)
        if not os.path.isdir(there):
            raise SettingError(f"{named}: {str(there)!r} is no folder. {would_do}")
        if kind := _memory_file_system(there):
            raise SettingError(
                f"{named} lies in memory ({kind}), so that rows there would take as much of it as pageable ones. {would_do}"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise SettingError(f"{named}: no file can be made there ({error}). {would_do}") from error
        return folder.absolute()

    def free_bytes(self) -> int:
        """What this user may still write in the folder, less a reserve: 1 GiB or 2 % of the file system, whichever is less."""
        system = os.statvfs(self.folder)
        reserve = min(_RESERVE_BYTES, int(_RESERVE_SHARE * system.f_blocks * system.f_frsize))
        return max(0, system.f_bavail * system.f_frsize - reserve)

    def bytes(self, size: int) -> NDArray[np.uint8]:
        """Zeroed bytes in a file of their own. CapacityError where there is no room for it."""
        free = self.free_bytes()
        # Asked first: a file that doesn't fit would fill the disk before that is noticed.
        if size > free:
            raise self._no_room(size, free, "too little room")
        try:
            return np.frombuffer(cast(Any, _File.made(self.folder, size)), np.uint8)
        except OSError as error:
            raise self._no_room(size, free, str(error)) from error

    def write(self, into: Array, rows: Array) -> None:
        """`into`, which is part of a column, becomes `rows`."""
        file = None if into.nbytes < mmap.PAGESIZE else _file_of(into)
        if file is None:
            into[...] = rows
            return
        file.write_at(_address(into) - file.address, np.ascontiguousarray(rows).reshape(-1).view(np.uint8))

    @contextlib.contextmanager
    def in_order(self, arrays: Iterable[Array]) -> Iterator[None]:
        """Within it the arrays are read from the first row to the last: the kernel guesses ahead."""
        files = {file for array in arrays if (file := _file_of(array)) is not None}
        for file in files:
            file.madvise(mmap.MADV_SEQUENTIAL)
        try:
            yield
        finally:
            for file in files:
                file.madvise(mmap.MADV_RANDOM)

    def uncache(self, arrays: Iterable[Array]) -> None:
        """Of the files that these arrays lie in, no page stays in memory."""
        for file in {file for array in arrays if (file := _file_of(array)) is not None}:
            # Pages that have to be written first, or that the mapping refers to, would stay.
            os.fsync(file.fd)
            file.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        # The next batch's rows are asked for at once.
        self._absent = True

    def ask(self, columns: Sequence[Array], index: RowIndex) -> int:
        """To be called before rows `index` are taken: asks for all of them, when those of the last batch weren't in memory.
        The answer is for `learn`."""
        before = _sectors_read()
        if self._absent:
            will_need([column for column in columns if column.nbytes], index)
        return before

    def learn(self, before: int, rows: int) -> None:
        """The rows have been taken, `rows` of all columns together."""
        pages = (_sectors_read() - before) * _SECTOR_BYTES // mmap.PAGESIZE
        self._absent = pages * _WORTH_ASKING > rows

    def _no_room(self, size: int, free: int, why: str) -> CapacityError:
        return CapacityError(
            f"no file of {size / 1e9:.3f} GB for rows at disk could be made in {self.folder}: {why}; {free / 1e9:.3f} GB free. "
            f"Fewer rows, another endpoint, or a folder with more room, by Store(disk=…) or {VARIABLE}"
        )


class _File(mmap.mmap):
    """All of a file, mapped; it is closed with the mapping."""

    fd = -1
    address = 0

    @classmethod
    def made(cls, folder: Path, size: int) -> _File:
        with tempfile.TemporaryFile(dir=folder, prefix="conduit-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            made = cls(file.fileno(), size)
            # The mapping keeps one of its own, which it shows nobody.
            made.fd = os.dup(file.fileno())
        made.address = ctypes.addressof(ctypes.c_char.from_buffer(made))
        made.madvise(mmap.MADV_RANDOM)
        return made

    def write_at(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Seen by the mapping at once: both are the kernel's same pages."""
        while data.size:
            written = os.pwrite(self.fd, cast(Any, data), offset)
            data, offset = data[written:], offset + written

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _file_of(array: Array) -> _File | None:
    """The file that an array lies in; None for one in memory: batches do, wherever they were read to."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    file = base.obj if isinstance(base, memoryview) else None
    return file if isinstance(file, _File) else None


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0]


def _sectors_read() -> int:
    """How many the calling thread had to fetch so far, asked for or waited for; 0 where the kernel doesn't count by thread."""
    try:
        import resource
    except ImportError:
        return 0
    if not hasattr(resource, "RUSAGE_THREAD"):
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


def _chosen(named: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """The folder, and what to call it in an error. SettingError for what can't be a folder's name."""
    if named is not None:
        name = named if isinstance(named, str) else os.fspath(named) if isinstance(named, os.PathLike) else None
        if not isinstance(name, str) or not name or "\0" in name:
            raise SettingError(f"disk={named!r}: expected the name of a folder")
        return Path(name), f"disk={name!r}"
    if folder := os.environ.get(VARIABLE):
        return Path(folder), f"{VARIABLE}={folder!r}"
    folder = Path(tempfile.gettempdir())
    if _memory_file_system(folder) and Path(_LASTING).is_dir():
        folder = Path(_LASTING)
    return folder, f"the folder for temporary files, {str(folder)!r},"


def _memory_file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The kind of file system that a folder lies on, if that keeps its files in memory. None where the kernel doesn't tell."""
    try:
        device, lines = folder.stat().st_dev, mounts.read_text().splitlines()
    except OSError:
        return None
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number and (kind := source.split()[0]) in _IN_MEMORY:
            return kind
    return None
