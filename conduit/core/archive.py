"""A folder that holds one checkpoint: a manifest, and the data files that it names. Knows nothing of stores.

Data files are written once and never changed. The manifest is replaced in one step by one that names other files, so that
whoever opens the folder, at any time and after any crash, finds the old checkpoint or the new one whole. Files that no
manifest names are what a killed writer left; the next one to succeed removes them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from numpy.typing import NDArray

from conduit.core.archive_files import (
    MANIFEST,
    Arrays,
    bytes_of,
    check_size,
    make_folder,
    manifest_text,
    names_in,
    os_says,
    read_data,
    sync_folder,
    write_file,
)
from conduit.core.archive_format import (
    FileEntry,
    Manifest,
    Part,
    decode_manifest,
    encode_header,
    encode_manifest,
    file_name,
    is_data_file,
    might_be_manifest,
)
from conduit.errors import CheckpointError

NEW_MANIFEST, LOCK = f"{MANIFEST}.new", "lock"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verified:
    """What a check of every byte found whole."""

    owner: str
    generation: int
    files: int
    arrays: int
    size_bytes: int


class Archive:
    """The checkpoint in the folder `path`, which need not be there yet. A value: opens and holds nothing itself."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """CheckpointError for what can't be the name of a folder. Links in it are followed, once: here."""
        try:
            name = os.fsdecode(path)
            self.path = os.path.realpath(name)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"path={path!r}: expected the name of a folder ({error})") from None
        if not name or "\0" in name:
            raise CheckpointError(f"path={path!r}: expected the name of a folder")

    def open(self) -> Reading:
        """The present checkpoint, its manifest checked and all its files there with their sizes; no data is read yet.
        CheckpointError says what is missing or wrong, and in which file."""
        return self.read(_check_sizes)

    def verify(self) -> Verified:
        """Reads everything, and checks each file's header and sum. CheckpointError names the first bad file and what is wrong."""
        return self.read(_check_all)

    def read(self, whole: Callable[[Reading], T]) -> T:
        """What `whole` makes of the checkpoint: from the start again, with the next one, whenever a file that it asked for was gone
        since a writer had replaced the checkpoint meanwhile."""
        while True:
            reading = Reading(self.path, _read_manifest(self.path))
            try:
                return whole(reading)
            except CheckpointError as error:
                gone = isinstance(error.__cause__, FileNotFoundError)
                if not gone or _read_manifest(self.path).generation == reading.generation:
                    raise

    @contextmanager
    def writing(self, owner: str, generation: int | None, overwrite: bool = False) -> Iterator[Writer]:
        """A writer of the next checkpoint; the folder, made if need be, is its own until the end of the block. Left without a
        commit, the block leaves the present checkpoint as it was.

        `generation`: the one that `owner` saved here last; None if it saved none. Anything else there is replaced only with
        `overwrite`, and never what isn't a checkpoint. CheckpointError otherwise, or while someone else writes: then nothing was written."""
        if not isinstance(owner, str) or not owner:
            raise CheckpointError(f"owner={owner!r}: expected a name")
        fcntl = _fcntl(self.path)
        self._admit(owner, generation, overwrite)
        with os_says("make the folder", self.path):
            make_folder(self.path)
        with self._locked(fcntl):
            present = self._admit(owner, generation, overwrite)
            next_generation = 1 if present is None else present.generation + 1
            mine = present is not None and (present.owner, present.generation) == (owner, generation)
            writer = Writer(self.path, owner, next_generation, present.files if present is not None and mine else {})
            try:
                yield writer
            finally:
                writer._leave()

    def _admit(self, owner: str, generation: int | None, overwrite: bool) -> Manifest | None:
        """The manifest that this writer may replace, None if there is none that can be read. CheckpointError if it may not."""
        nothing = "Nothing was written. Save to another folder"
        names, text = names_in(self.path), manifest_text(self.path)
        if text is None:
            foreign = sorted(name for name in names if name not in (NEW_MANIFEST, LOCK) and not is_data_file(name))
            if foreign:
                more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
                raise CheckpointError(
                    f"{self.path} is no checkpoint: it holds {foreign[0]!r}{more}, and no {MANIFEST}. {nothing}"
                )
            if generation is not None and not overwrite:
                raise CheckpointError(
                    f"{self.path} holds no checkpoint any more; its generation {generation} was saved there. {nothing}, or all of it anew with "
                    "overwrite=True"
                )
            return None
        try:
            present = decode_manifest(text, os.path.join(self.path, MANIFEST))
        except CheckpointError as error:
            ours = might_be_manifest(text)
            if ours and overwrite:
                return None
            raise CheckpointError(
                f"{error}. {nothing}{', or replace it with overwrite=True' if ours else ''}"
            ) from error
        if not overwrite and (present.owner, present.generation) != (owner, generation):
            raise CheckpointError(
                f"{self.path} holds {_not_yours(present, owner, generation)}. {nothing}, replace it with overwrite=True, or restore from it "
                "first and go on from there"
            )
        return present

    @contextmanager
    def _locked(self, fcntl: Any) -> Iterator[None]:
        path = os.path.join(self.path, LOCK)
        with os_says("lock the folder", path):
            lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with os_says("lock the folder", path):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise CheckpointError(
                        f"{self.path} is being written by {_holder(path)}. Nothing was written"
                    ) from error
            with suppress(OSError):  # who holds it is for others' messages; a full disk is told of later
                os.ftruncate(lock, 0)
                os.write(lock, f"process {os.getpid()} on {os.uname().nodename}".encode())
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone wouldn't, while a process forked meanwhile lives
            with suppress(OSError):
                os.close(lock)


class Reading:
    """One checkpoint, as its manifest says. Never writes. Holds no file open: once a writer has replaced it and removed its
    files, what is still asked of it is a CheckpointError, and opening the folder anew gives the next one."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        self.path = path
        self.owner, self.generation = manifest.owner, manifest.generation
        self.files, self.content = manifest.files, manifest.content

    def arrays(self, name: str) -> Arrays:
        """All arrays of a file, in the order in which they were added: own memory, as written. CheckpointError if the file isn't
        what it was, or isn't there."""
        return self._read(name, lambda part: True)[0]

    def array(self, name: str, key: str) -> NDArray[Any]:
        """One of them. The whole file is read and checked all the same; but no memory is taken for the others."""
        arrays, parts = self._read(name, lambda part: part.key == key)
        if key not in arrays:
            known = ", ".join(repr(part.key) for part in parts) or "none"
            raise CheckpointError(f"{os.path.join(self.path, name)} has no array {key!r}; it has {known}")
        return arrays[key]

    def _read(self, name: str, wanted: Callable[[Part], bool]) -> tuple[Arrays, list[Part]]:
        if name not in self.files:
            raise CheckpointError(f"{os.path.join(self.path, MANIFEST)} names no file {name!r}")
        return read_data(self.path, self.files[name], wanted)


class Writer:
    """Writes the next checkpoint of a locked folder. For one thread."""

    def __init__(self, path: str, owner: str, generation: int, present: Mapping[str, FileEntry]) -> None:
        self.path, self.owner = path, owner
        self.generation = generation
        """What the checkpoint will be called."""
        self.present = present
        """The files that can be kept: those of the owner's last checkpoint."""
        self.committed: int | None = None
        """The generation, once it is in place. Says so after the block too, also if what ended it struck within the commit."""
        self._left = False
        self._files: dict[str, FileEntry] = {}
        self._made: list[str] = []
        self._manifest: bytes | None = None

    def add(self, stem: str, arrays: Mapping[str, NDArray[Any]]) -> FileEntry:
        """A new file of the checkpoint, written and on the disk; its name begins with `stem`. Contiguous arrays aren't copied.
        CheckpointError if the disk doesn't take it."""
        self._check_unfinished()
        header, order = encode_header(arrays)
        size_bytes = len(header) + sum(array.nbytes for array in arrays.values())
        # One at a time, for where one has to be copied.
        buffers = itertools.chain((header,), (bytes_of(arrays[key]) for key in order))
        with os_says("write it", os.path.join(self.path, stem), size_bytes):
            attempts = (file_name(stem, self.generation, attempt) for attempt in itertools.count())
            # Taken ones are a killed writer's, or have the same stem.
            name = next(name for name in attempts if not os.path.lexists(os.path.join(self.path, name)))
            self._made.append(name)
            crc32 = write_file(os.path.join(self.path, name), os.O_EXCL, buffers)
        entry = self._files[name] = FileEntry(name, size_bytes, crc32)
        return entry

    def keep(self, name: str) -> FileEntry:
        """A file of the owner's last checkpoint is part of this one too. CheckpointError if it isn't there."""
        self._check_unfinished()
        if name not in self.present:
            raise CheckpointError(f"{self.path}: the last checkpoint has no file {name!r} to keep")
        entry = self.present[name]
        path = os.path.join(self.path, name)
        with os_says("keep it", path):
            check_size(path, entry)
        self._files[name] = entry
        return entry

    def commit(self, content: Mapping[str, Any]) -> int:
        """Puts the checkpoint in place, then removes every data file that isn't part of it. Its generation. `content`: JSON.
        CheckpointError if that isn't possible; then the present one stays."""
        self._check_unfinished()
        self._manifest = text = encode_manifest(Manifest(self.owner, self.generation, self._files, content))
        new = os.path.join(self.path, NEW_MANIFEST)
        with os_says("write it", new, len(text)):
            write_file(new, os.O_TRUNC, (text,))
            sync_folder(self.path)  # the files are there before the manifest that names them
            os.replace(new, os.path.join(self.path, MANIFEST))
        self.committed = self.generation
        with os_says("be sure that the new manifest outlives a power loss; both checkpoints are kept", self.path):
            sync_folder(self.path)  # the manifest is there before the files that only the old one names are gone
        with suppress(CheckpointError):
            self._remove(name for name in names_in(self.path) if is_data_file(name) and name not in self._files)
        return self.generation

    def _leave(self) -> None:
        """Removes what was written in vain. An interrupt may have struck on either side of the replacement: what the manifest says
        decides, and where it can't be read nothing is removed."""
        self._left = True
        if self.committed is not None:
            return
        try:
            present = manifest_text(self.path)
        except CheckpointError:
            return
        if present is not None and present == self._manifest:
            self.committed = self.generation
        else:
            self._remove((*self._made, NEW_MANIFEST))

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):  # no harm if it stays: the next commit tries again
                os.unlink(os.path.join(self.path, name))

    def _check_unfinished(self) -> None:
        if self._left or self.committed is not None:
            raise CheckpointError(
                f"{self.path}: this writer of generation {self.generation} is done; the next one needs a new writer"
            )


def _fcntl(path: str) -> Any:
    """The module that locks folders. Windows has none."""
    try:
        import fcntl
    except ImportError as error:
        raise CheckpointError(
            f"{path}: checkpoints are written only where a folder can be locked, on Linux and macOS; they can be read anywhere. "
            "Nothing was written"
        ) from error
    return fcntl


def _not_yours(present: Manifest, owner: str, generation: int | None) -> str:
    """Whose checkpoint it is instead of `owner`'s of this generation."""
    if present.owner != owner:
        return f"another store's checkpoint, of generation {present.generation}"
    expected = "one that this store saved" if generation is None else f"generation {generation}"
    since = generation is None or present.generation > generation
    what = "somebody restored from it and has saved since" if since else "somebody put an older one in its place"
    return f"generation {present.generation} of this store's checkpoint, and not {expected}: {what}"


def _check_sizes(reading: Reading) -> Reading:
    for entry in reading.files.values():
        path = os.path.join(reading.path, entry.name)
        with os_says(f"open what {MANIFEST} names", path):
            check_size(path, entry)
    return reading


def _check_all(reading: Reading) -> Verified:
    arrays = 0
    for entry in reading.files.values():
        arrays += len(read_data(reading.path, entry, lambda part: False)[1])
    size_bytes = sum(entry.size_bytes for entry in reading.files.values())
    return Verified(reading.owner, reading.generation, len(reading.files), arrays, size_bytes)


def _read_manifest(path: str) -> Manifest:
    text = manifest_text(path)
    if text is None:
        raise CheckpointError(f"{path} holds no checkpoint: there is no {MANIFEST}")
    return decode_manifest(text, os.path.join(path, MANIFEST))


def _holder(lock: str) -> str:
    """Who has locked it, and since when: it wrote that down then."""
    try:
        with open(lock, "rb") as file:
            who = file.read(300).decode(errors="replace")
            since = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime)
    except OSError:
        return "someone else"
    return f"{who or 'someone else'} since {since:%Y-%m-%d %H:%M:%S}"
