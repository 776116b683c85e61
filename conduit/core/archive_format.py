"""The bytes of a checkpoint's files: the manifest, and arrays as safetensors. Nothing here opens a file.

Files are written and read here, not by the safetensors library, since it neither sums while it writes nor says which of its
errors was a full disk, and its NumPy side knows no 8-bit floats. What is written is plain safetensors all the same."""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from conduit.errors import CheckpointError

FORMAT = "conduit-archive"
VERSION = 1

LONGEST_HEADER = 100_000_000
"""Bytes; the most that the safetensors library reads."""

_LENGTH = struct.Struct("<Q")
_METADATA, _DTYPES = "__metadata__", "conduit.dtypes"

_OWN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.g\d+(-\d+)?\.safetensors", re.ASCII)
_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)

_NATIVE: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}") for kind in "UI" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_CODES = {dtype: code for code, dtype in _NATIVE.items()}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A data file as its manifest knows it: never changed once written."""

    name: str
    size_bytes: int
    crc32: int
    """Of the whole file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of: whose it is, how many came before it, its files by name, and whatever its writer says."""

    owner: str
    generation: int
    files: Mapping[str, FileEntry]
    content: Any


@dataclass(frozen=True, slots=True)
class Part:
    """Where one array lies: bytes [start, stop) after the header."""

    key: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def file_name(stem: str, generation: int, attempt: int) -> str:
    """What a data file is called; `attempt` tells it from others of the same stem and generation. A later generation never uses a
    name again, so that whoever reads an older one finds a file as it was, or none. CheckpointError for a stem that can't be one."""
    if not _STEM.fullmatch(stem):
        raise CheckpointError(f"a file can't be called {stem!r}: expected up to 100 letters, digits, '_', '-' and '.'")
    return f"{stem}.g{generation}{f'-{attempt}' if attempt else ''}.safetensors"


def is_data_file(name: str) -> bool:
    """Whether `file_name` makes such names."""
    return _OWN_NAME.fullmatch(name) is not None


def encode_manifest(manifest: Manifest) -> bytes:
    """CheckpointError unless the content is JSON: dicts with string keys, lists, strings, whole and finite numbers, bools and None."""
    rest = {
        "format": FORMAT,
        "version": VERSION,
        "made_by": _own_version(),
        "owner": manifest.owner,
        "generation": manifest.generation,
        "files": {entry.name: {"bytes": entry.size_bytes, "crc32": entry.crc32} for entry in manifest.files.values()},
        "content": manifest.content,
    }
    try:
        whole = {**rest, "checksum": _checksum(rest)}
        return json.dumps(whole, indent=1, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the content of a manifest has to be JSON: {error}") from error


def decode_manifest(text: bytes, where: str) -> Manifest:
    """CheckpointError, which calls the file `where`, unless it is a manifest that this Conduit reads, as it was written."""
    try:
        whole = _parse(text)
    except (ValueError, RecursionError) as error:  # the former also of bytes that are no UTF-8
        raise CheckpointError(f"{where} is damaged, or no manifest of Conduit's: {error}") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(f"{where} is no manifest of Conduit's: it doesn't say \"format\": {FORMAT!r}")
    version = whole.get("version")
    if not _is_count(version):
        raise CheckpointError(f"{where} is damaged: its format has version {version!r}")
    if version > VERSION:
        raise CheckpointError(
            f"{where} was made by a newer Conduit ({whole.get('made_by') or 'release unknown'}): its format has version {version}, "
            f"and this Conduit ({_own_version() or 'release unknown'}) reads version {VERSION}. Open it with that one"
        )
    if version < VERSION:
        raise CheckpointError(f"{where} has format version {version}, and this Conduit reads version {VERSION} only")
    said = whole.pop("checksum", None)
    if said != (found := _checksum(whole)):
        raise CheckpointError(f"{where} is damaged: its checksum is {found}, and it says {said}")
    try:
        files = {name: FileEntry(name, entry["bytes"], entry["crc32"]) for name, entry in whole["files"].items()}
        manifest = Manifest(whole["owner"], whole["generation"], files, whole["content"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} lacks what a manifest of version {VERSION} has: {error!r}") from error
    for entry in files.values():
        if not is_data_file(entry.name) or not _is_count(entry.size_bytes) or not _is_count(entry.crc32):
            raise CheckpointError(f"{where} names a file that can't be one of a checkpoint: {entry}")
    if not isinstance(manifest.owner, str) or not _is_count(manifest.generation):
        raise CheckpointError(f"{where} has owner {manifest.owner!r}, generation {manifest.generation!r}")
    return manifest


def might_be_manifest(text: bytes) -> bool:
    """Whether Conduit may have written this, however torn it is now, or however much newer."""
    return FORMAT.encode() in text[:200]


def encode_header(arrays: Mapping[str, NDArray[Any]]) -> tuple[bytes, list[str]]:
    """(the start of a safetensors file with `arrays`, in which order their bytes follow it: C order, little-endian or with a note).

    A dtype that safetensors lacks is stored as unsigned integers of its size, or as bytes along one more axis if there are none,
    and noted in the metadata. CheckpointError for arrays that aren't numbers."""
    # The widest items first, as the library does it: then every array is aligned.
    order = sorted(arrays, key=lambda key: -_stored_as(arrays[key].dtype, key)[0].itemsize)
    place, end = {}, 0
    for key in order:
        place[key] = [end, end := end + arrays[key].nbytes]
    header: dict[str, Any] = {}
    noted = {}
    for key, array in arrays.items():
        stored, more = _stored_as(array.dtype, key)
        if stored != array.dtype:
            noted[key] = _dtype_name(array.dtype)
        header[key] = {"dtype": _CODES[stored], "shape": [*array.shape, *more], "data_offsets": place[key]}
    if noted:
        header[_METADATA] = {_DTYPES: json.dumps(noted)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"{len(arrays)} arrays in one file need a header of {len(text):,} bytes; {LONGEST_HEADER:,} at most"
        )
    return _LENGTH.pack(len(text)) + text, order


def header_length(start: bytes, size_bytes: int, where: str) -> int:
    """How many bytes of header follow `start`, the file's first eight."""
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else -1
    if not 2 <= length <= min(LONGEST_HEADER, size_bytes - _LENGTH.size):
        raise CheckpointError(f"{where} is no safetensors file: its first 8 bytes are no header length")
    return length


def decode_header(text: bytes, data_bytes: int, where: str) -> list[Part]:
    """The arrays of a safetensors file, in the order in which they were given when it was written by `encode_header`. Their bytes
    cover [0, data_bytes) without gap or overlap. CheckpointError, which calls the file `where`, otherwise."""
    try:
        header = _parse(text)
        noted = _parse(header.pop(_METADATA, {}).get(_DTYPES, "{}"))
        parts = [_part(key, entry, noted.get(key)) for key, entry in header.items()]
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} has a header that isn't safetensors': {error!r}") from error
    end = 0
    for part in sorted(parts, key=lambda part: (part.start, part.stop)):
        if part.start != end:
            raise CheckpointError(f"{where}: array {part.key!r} starts at byte {part.start}; expected {end}")
        end = part.stop
    if end != data_bytes:
        raise CheckpointError(f"{where}: its arrays end at byte {end}; expected {data_bytes}")
    return parts


def _part(key: str, entry: dict[str, Any], noted: str | None) -> Part:
    dtype, shape, (start, stop) = _NATIVE[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if not all(map(_is_count, (*shape, start, stop))) or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"array {key!r} has {entry}")
    if noted is None:
        return Part(key, dtype, shape, start, stop)
    true = np.dtype(noted)
    stored, more = _stored_as(true, key)
    if stored != dtype or shape[len(shape) - len(more) :] != more:
        raise ValueError(f"array {key!r} of {noted} has {entry}")
    return Part(key, true, shape[: len(shape) - len(more)], start, stop)


def _stored_as(dtype: np.dtype[Any], key: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """(the dtype that safetensors has for it, the axis that its items then need)."""
    if not isinstance(key, str) or key == _METADATA:
        raise CheckpointError(f"an array can't be called {key!r}")
    if dtype in _CODES:
        return dtype, ()
    known = dtype.kind in "biufcVW" and dtype.names is None and dtype.itemsize > 0
    if not known or np.dtype(_dtype_name(dtype)) != dtype:
        raise CheckpointError(f"array {key!r} has dtype {dtype}; expected numbers or bools")
    if dtype.itemsize in (1, 2, 4, 8):
        return np.dtype(f"<u{dtype.itemsize}"), ()
    return np.dtype(np.uint8), (dtype.itemsize,)


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """What np.dtype makes it of again; ml_dtypes' have a name only, as `str` says "V1" of many of them."""
    return dtype.name if dtype.type.__module__ == ml_dtypes.__name__ else dtype.str


def _parse(text: bytes | str) -> Any:
    """JSON proper: Python's own would take NaN and Infinity too. ValueError or RecursionError."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _checksum(rest: Mapping[str, Any]) -> int:
    """Of the members, however they are laid out in the file."""
    return zlib.crc32(json.dumps(rest, separators=(",", ":"), allow_nan=False).encode())


def _own_version() -> str:
    # Takes 20 ms to import, of which only checkpoints have any use.
    import importlib.metadata

    try:
        return importlib.metadata.version("conduit-rl")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0
