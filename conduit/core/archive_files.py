"""What is done to a checkpoint's folder and files: each function one duty, and the operating system's errors in plain words."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.archive_format import FileEntry, Part, decode_header, header_length
from conduit.errors import CheckpointError

MANIFEST = "manifest.json"

CHUNK_BYTES = 1 << 20
"""Summed and written, or read and summed, at a time: what still lies in a cache for the second of the two."""

Arrays = dict[str, NDArray[Any]]


@contextmanager
def os_says(doing: str, path: str, wanted_bytes: int | None = None) -> Iterator[None]:
    """Makes the operating system's errors CheckpointErrors that say what was being done, in its words, and how much room there is."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        room = ""
        if wanted_bytes is not None:
            with suppress(OSError):
                disk = os.statvfs(os.path.dirname(path))
                room = f" ({wanted_bytes:,} bytes wanted, {disk.f_bavail * disk.f_frsize:,} free)"
        raise CheckpointError(f"{path}: can't {doing}: {error.strerror or error}{room}") from error


def manifest_text(path: str) -> bytes | None:
    """None if there is no manifest, or no folder."""
    path = os.path.join(path, MANIFEST)
    with os_says("read it", path), suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read()
    return None


def read_data(path: str, entry: FileEntry, wanted: Callable[[Part], bool]) -> tuple[Arrays, list[Part]]:
    """(the wanted arrays, where all of them lie) of a file that was checked whole."""
    path = os.path.join(path, entry.name)
    with os_says(f"read what {MANIFEST} names", path), open(path, "rb", buffering=0) as file:
        check_size(path, entry, file.fileno())
        start = file.read(8)
        header = file.read(header_length(start, entry.size_bytes, path))
        parts = decode_header(header, entry.size_bytes - 8 - len(header), path)
        sum_ = zlib.crc32(header, zlib.crc32(start))
        arrays: Arrays = {part.key: np.empty(part.shape, part.dtype) for part in parts if wanted(part)}
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for part in sorted(parts, key=lambda part: part.start):
            if part.key in arrays:
                sum_ = _fill(file, bytes_of(arrays[part.key]), sum_)
            else:
                for at in range(part.start, part.stop, CHUNK_BYTES):
                    sum_ = _fill(file, scratch[: part.stop - at], sum_)
    if sum_ != entry.crc32:
        raise CheckpointError(f"{path} is damaged: its crc32 is {sum_:#010x}, and {MANIFEST} says {entry.crc32:#010x}")
    return arrays, parts


def _fill(file: FileIO, into: memoryview, sum_: int) -> int:
    """Reads all of `into`, and the sum of everything so far. OSError where the file ends too early."""
    at = 0
    while at < len(into):
        got = file.readinto(into[at : at + CHUNK_BYTES])
        if not got:
            raise OSError(errno.EIO, "it became shorter while it was read")
        sum_ = zlib.crc32(into[at : at + got], sum_)
        at += got
    return sum_


def write_file(path: str, flags: int, buffers: Iterable[bytes | memoryview]) -> int:
    """The sum of what was written, which is on the disk. What was begun stays when that fails."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
    sum_ = 0
    try:
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                done = os.write(file, rest[:CHUNK_BYTES])
                sum_ = zlib.crc32(rest[:done], sum_)
                rest = rest[done:]
        os.fsync(file)
    finally:
        os.close(file)
    return sum_


def bytes_of(array: NDArray[Any]) -> memoryview:
    """A contiguous array's bytes; those of a copy of any other."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def check_size(path: str, entry: FileEntry, file: int | None = None) -> None:
    size_bytes = os.stat(path if file is None else file).st_size
    if size_bytes != entry.size_bytes:
        raise CheckpointError(f"{path} has {size_bytes:,} bytes; {MANIFEST} says {entry.size_bytes:,}")


def names_in(path: str) -> list[str]:
    """The names in a folder; none if it isn't there."""
    with os_says("look into the folder", path):
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []


def make_folder(path: str) -> None:
    """It and its parents are there, and on the disk."""
    made = []
    folder = path
    while not os.path.isdir(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    if made:
        os.makedirs(path, exist_ok=True)
    for folder in reversed(made):
        sync_folder(os.path.dirname(folder))


def sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
