"""Archives: what is written comes back exactly or is refused, and what stands there is never harmed by an attempt."""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from conduit.core import archive, archive_files
from conduit.core.archive import Archive, Writer
from conduit.core.archive_files import CHUNK_BYTES, MANIFEST
from conduit.core.archive_format import (
    FileEntry,
    Manifest,
    decode_header,
    decode_manifest,
    encode_header,
    encode_manifest,
)
from conduit.errors import CheckpointError, ConduitError
from tests.core.generations import OWNER, STEPS, check_whole, commit_next, names_of, wrap_steps

NUMPY_DTYPES = [*"?bBhHiIqQefdgFDG", ">f4", ">i8", "V5", "V8"]
ML_DTYPES = [
    *(
        "bfloat16",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
    ),
    *(
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "complex32",
        "bcomplex32",
    ),
    *("int2", "uint2", "int4", "uint4"),
]
DTYPES = [np.dtype(name) for name in NUMPY_DTYPES] + [np.dtype(getattr(ml_dtypes, name)) for name in ML_DTYPES]


def noise(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Any bytes at all, NaNs among them; but bools are 0 or 1."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(size).integers(0, 2 if dtype.kind == "b" else 256, size, np.uint8)
    return data.view(dtype).reshape(shape)


def save(path: Path, arrays: Mapping[str, Any], content: Any = None, generation: int | None = None) -> FileEntry:
    with Archive(path).writing(OWNER, generation) as writer:
        entry = writer.add("data", arrays)
        writer.commit(content if content is not None else {})
    return entry


def snapshot(path: Path) -> dict[str, Any]:
    """Everything under it, with bytes and times."""
    found = {}
    for entry in sorted(path.rglob("*")) if path.is_dir() else []:
        found[str(entry)] = (entry.stat().st_mtime_ns, entry.read_bytes() if entry.is_file() else None)
    return found


def rewrite(path: Path, **changes: Any) -> None:
    """The manifest says something else, and its checksum is right."""
    whole = json.loads((path / MANIFEST).read_text())
    whole.pop("checksum")
    whole.update(changes)
    whole["checksum"] = zlib.crc32(json.dumps(whole, separators=(",", ":")).encode())
    (path / MANIFEST).write_text(json.dumps(whole))


def said(path: Path, owner: str = OWNER, generation: int | None = None, overwrite: bool = False) -> str:
    """What a writer that isn't let in is told; nothing was changed."""
    before = snapshot(path)
    with pytest.raises(CheckpointError) as caught, Archive(path).writing(owner, generation, overwrite):
        raise AssertionError("let in")
    assert snapshot(path) == before
    return str(caught.value)


@contextmanager
def steps_failing(at: int, error: BaseException, after: bool = False) -> Iterator[list[str]]:
    """The step of this number raises, before or after it was done. Gives the names of all steps so far."""
    done: list[str] = []

    def before_it(name: str, number: int) -> None:
        done.append(name)
        if number == at and not after:
            raise error

    def after_it(name: str, number: int) -> None:
        if number == at and after:
            raise error

    end = wrap_steps(before_it, after_it)
    try:
        yield done
    finally:
        end()


# What is written comes back


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit_in_every_shape(tmp_path, dtype):
    wide = noise(dtype, (4, 6))
    arrays = {
        **{str(shape): noise(dtype, shape) for shape in [(), (0,), (5,), (0, 4), (4, 0), (3, 2, 2), (1,)]},
        "columns": wide[:, ::2],
        "backwards": wide[::-1],
        "fortran": np.asfortranarray(wide),
        "turned": wide.T,
        "same": np.broadcast_to(wide[0], (3, 6)),
    }
    entry = save(tmp_path / "it", arrays)
    found = Archive(tmp_path / "it").open().arrays(entry.name)
    assert list(found) == list(arrays)
    for key, array in arrays.items():
        assert found[key].dtype == dtype
        assert found[key].shape == array.shape
        assert found[key].tobytes() == array.tobytes()
        assert found[key].flags.c_contiguous
        assert found[key].flags.writeable
        assert found[key].flags.owndata
        assert Archive(tmp_path / "it").open().array(entry.name, key).tobytes() == array.tobytes()


def test_the_safetensors_library_reads_what_it_has_dtypes_for(tmp_path):
    native = [*"?bBhHiIqQefdF", ml_dtypes.bfloat16]
    arrays = {str(np.dtype(dtype)): noise(np.dtype(dtype), (3, 4)) for dtype in native}
    entry = save(tmp_path, arrays)
    found = safetensors.numpy.load_file(tmp_path / entry.name)
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        assert found[key].dtype == array.dtype
        assert found[key].tobytes() == array.tobytes()


def test_what_safetensors_lacks_is_unsigned_integers_or_bytes_to_others(tmp_path):
    dtypes = {
        "float8_e4m3fn": ("F8_E4M3", [3]),
        "float8_e5m2": ("F8_E5M2", [3]),
        "float8_e3m4": ("U8", [3]),
        "int4": ("U8", [3]),
    }
    dtypes |= {"complex32": ("U32", [3]), "complex128": ("U8", [3, 16]), ">f4": ("U32", [3])}
    arrays = {name: noise(np.dtype(name), (3,)) for name in dtypes}
    entry = save(tmp_path, arrays)
    found = dict(safetensors.deserialize((tmp_path / entry.name).read_bytes()))
    assert {name: (view["dtype"], view["shape"]) for name, view in found.items()} == dtypes
    for name, view in found.items():
        assert bytes(view["data"]) == arrays[name].tobytes()


def test_every_array_is_aligned_in_its_file():
    arrays = {str(dtype): noise(dtype, (3,)) for dtype in DTYPES}
    header, _ = encode_header(arrays)
    assert len(header) % 8 == 0
    data_bytes = sum(array.nbytes for array in arrays.values())
    for part in decode_header(header[8:], data_bytes, "it"):
        assert part.start % min(8, part.dtype.itemsize & -part.dtype.itemsize) == 0 or part.dtype.itemsize > 8


def test_arrays_of_many_chunks_come_back(tmp_path):
    arrays = {
        "wide": noise(np.dtype(np.int64), (CHUNK_BYTES // 3,)),
        "odd": noise(np.dtype(np.uint8), (3 * CHUNK_BYTES + 7,)),
    }
    entry = save(tmp_path, arrays)
    found = Archive(tmp_path).open().arrays(entry.name)
    assert all(found[key].tobytes() == arrays[key].tobytes() for key in arrays)
    assert Archive(tmp_path).open().array(entry.name, "wide").tobytes() == arrays["wide"].tobytes()
    data = (tmp_path / entry.name).read_bytes()
    assert (entry.size_bytes, entry.crc32) == (len(data), zlib.crc32(data))
    found = Archive(tmp_path).verify()
    assert (found.owner, found.generation, found.files, found.arrays) == (OWNER, 1, 1, 2)
    assert found.size_bytes == len(data)


def test_a_contiguous_array_is_written_and_read_without_a_second_copy(tmp_path):
    code = f"""
import resource, numpy as np
from conduit.core.archive import Archive
one, name = np.ones(1 << 25), None
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
base = peak()
with Archive({str(tmp_path / "it")!r}).writing("it", None) as writer:
    name = writer.add("data", {{"one": one, "few": np.ones(3)}}).name
    writer.commit({{}})
Archive({str(tmp_path / "it")!r}).open().array(name, "few")
Archive({str(tmp_path / "it")!r}).verify()
written = peak()
del one
Archive({str(tmp_path / "it")!r}).open().arrays(name)
print(written - base, peak() - written)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert all(int(more) < 1 << 25 for more in done.stdout.split())  # of an array of 2^28 bytes


def test_a_file_may_have_no_arrays_and_a_checkpoint_no_files(tmp_path):
    entry = save(tmp_path / "it", {})
    assert Archive(tmp_path / "it").open().arrays(entry.name) == {}
    assert Archive(tmp_path / "it").verify().arrays == 0
    with Archive(tmp_path / "none").writing(OWNER, None) as writer:
        assert writer.commit({"rows": 0}) == 1
    assert Archive(tmp_path / "none").verify().files == 0


def test_the_content_comes_back(tmp_path):
    content = {
        "seed": 2**127 + 1,
        "share": 0.1 + 0.2,
        "tiny": 5e-324,
        "deep": [[None, True, "ä€\ud800"], {}],
        "": {"z": 1, "a": 2},
    }
    save(tmp_path, {}, content)
    found = Archive(tmp_path).open()
    assert found.content == content
    assert list(found.content[""]) == ["z", "a"]
    assert (found.owner, found.generation, list(found.files)) == (OWNER, 1, ["data.g1.safetensors"])


@pytest.mark.parametrize(
    "content", [{"a": float("nan")}, {"a": float("inf")}, {"a": {1}}, {"a": np.int64(1)}, {"a": b""}], ids=repr
)
def test_content_that_is_no_json_is_refused(tmp_path, content):
    commit_next(tmp_path)
    with pytest.raises(CheckpointError, match="has to be JSON"):
        save(tmp_path, {}, content, 1)
    assert check_whole(tmp_path) == 1


NO_NUMBERS = [np.array([None]), np.array(["text"]), np.array(["text"], np.dtypes.StringDType())]
NO_NUMBERS += [np.zeros(2, dtype) for dtype in ("i4,f4", "M8[s]", "V0", np.dtype(ml_dtypes.bfloat16).newbyteorder(">"))]


@pytest.mark.parametrize("arrays", [*({"a": array} for array in NO_NUMBERS), {"__metadata__": np.zeros(2)}], ids=repr)
def test_arrays_that_are_no_numbers_are_refused(tmp_path, arrays):
    commit_next(tmp_path)
    with pytest.raises(CheckpointError, match=r"array '(a|__metadata__)'|called '__metadata__'"):
        save(tmp_path, arrays, generation=1)
    assert check_whole(tmp_path) == 1
    assert {entry.name for entry in tmp_path.iterdir()} == names_of(tmp_path)


@pytest.mark.parametrize("stem", ["", "a/b", "..", ".hidden", "a b", "ä", "x" * 101, "a\n"])
def test_a_stem_that_is_no_file_name_is_refused(tmp_path, stem):
    with (
        Archive(tmp_path / "it").writing(OWNER, None) as writer,
        pytest.raises(CheckpointError, match="can't be called"),
    ):
        writer.add(stem, {})


def test_two_files_of_one_stem_are_two(tmp_path):
    with Archive(tmp_path).writing(OWNER, None) as writer:
        names = [writer.add("rows", {"a": np.array(number)}).name for number in range(3)]
        writer.commit({})
    assert len(set(names)) == 3
    assert [int(Archive(tmp_path).open().array(name, "a")) for name in names] == [0, 1, 2]


# Generations


def test_each_commit_is_a_generation_with_what_it_adds_and_keeps(tmp_path):
    for generation in range(1, 8):
        assert commit_next(tmp_path) == generation
        assert check_whole(tmp_path) == generation
        assert {entry.name for entry in tmp_path.iterdir()} == names_of(tmp_path)


def test_what_stays_is_never_written_again(tmp_path):
    commit_next(tmp_path)
    (rows,) = Archive(tmp_path).open().content["rows"]
    before = (tmp_path / rows).stat()
    commit_next(tmp_path)
    assert (tmp_path / rows).stat() == before


def test_only_files_of_the_owners_last_checkpoint_that_are_whole_can_be_kept(tmp_path):
    commit_next(tmp_path)
    rows, state = Archive(tmp_path).open().content["rows"][0], Archive(tmp_path).open().content["state"]
    with (
        Archive(tmp_path).writing("other", None, overwrite=True) as writer,
        pytest.raises(CheckpointError, match="no file"),
    ):
        writer.keep(rows)
    (tmp_path / rows).unlink()
    os.truncate(tmp_path / state, 10)
    with Archive(tmp_path).writing(OWNER, 1) as writer:
        assert writer.present.keys() == {rows, state}
        with pytest.raises(CheckpointError, match=f"{rows}.*No such file"):
            writer.keep(rows)
        with pytest.raises(CheckpointError, match=f"{state} has 10 bytes"):
            writer.keep(state)
        with pytest.raises(CheckpointError, match="no file 'strange'"):
            writer.keep("strange")


def test_a_block_left_without_a_commit_changes_nothing(tmp_path):
    commit_next(tmp_path)
    before = snapshot(tmp_path).keys()
    with pytest.raises(CheckpointError, match="JSON"), Archive(tmp_path).writing(OWNER, 1) as writer:
        _fail_at_the_end(writer)
    assert writer.committed is None
    with Archive(tmp_path).writing(OWNER, 1) as writer:
        writer.add("rows", {"a": np.zeros(3)})
    assert snapshot(tmp_path).keys() == before
    assert check_whole(tmp_path) == 1


def _fail_at_the_end(writer: Writer) -> None:
    writer.add("rows", {"a": np.zeros(3)})
    writer.commit({"a": {1}})


def test_a_writer_is_done_after_its_commit_and_after_its_block(tmp_path):
    with Archive(tmp_path).writing(OWNER, None) as writer:
        writer.commit({})
        _refuses_all(writer)
    with Archive(tmp_path).writing(OWNER, 1) as writer:
        pass
    _refuses_all(writer)
    assert {entry.name for entry in tmp_path.iterdir()} == {MANIFEST, "lock"}


def _refuses_all(writer: Writer) -> None:
    for call in (lambda: writer.add("a", {}), lambda: writer.keep("a"), lambda: writer.commit({})):
        with pytest.raises(CheckpointError, match="is done"):
            call()


def test_what_a_killed_writer_left_stays_until_the_next_commit_and_what_is_not_ours_always(tmp_path):
    commit_next(tmp_path)
    left = [tmp_path / name for name in ("rows.g2.safetensors", "state.g9-1.safetensors", "manifest.json.new")]
    foreign = [tmp_path / name for name in ("model.safetensors", "notes.txt", "rows.g.safetensors", "folder")]
    for path in left + foreign[:-1]:
        path.write_bytes(b"torn")
    foreign[-1].mkdir()
    with Archive(tmp_path).writing(OWNER, 1) as writer:
        writer.add("rows", {})
        assert all(path.exists() for path in left)
    assert check_whole(tmp_path) == 1
    assert all(path.exists() for path in left[:-1])
    assert commit_next(tmp_path) == check_whole(tmp_path) == 2
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in foreign)


# Who may write


def test_a_folder_and_its_parents_are_made(tmp_path):
    assert commit_next(tmp_path / "a" / "b" / "c") == 1
    assert check_whole(tmp_path / "a" / "b" / "c") == 1


def test_a_relative_path_stays_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    it = Archive("it")
    monkeypatch.chdir("/")
    with it.writing(OWNER, None) as writer:
        writer.commit({})
    assert Archive(tmp_path / "it").verify().generation == 1


@pytest.mark.parametrize(
    ("owner", "generation"), [("other", 2), ("other", None), (OWNER, 1), (OWNER, 3), (OWNER, None)]
)
def test_anothers_checkpoint_or_another_generation_is_replaced_only_if_told_so(tmp_path, owner, generation):
    commit_next(tmp_path)
    commit_next(tmp_path)
    words = said(tmp_path, owner, generation)
    expected = {
        1: "and not generation 1: somebody restored from it and has saved since",
        3: "and not generation 3: somebody put an older one in its place",
        None: "and not one that this store saved: somebody restored from it and has saved since",
    }
    whose = "another store's checkpoint, of generation 2" if owner == "other" else f"checkpoint, {expected[generation]}"
    assert f"{whose}. Nothing was written. Save to" in words
    assert "another folder, replace it with overwrite=True, or restore from it first" in words
    with Archive(tmp_path).writing(owner, generation, overwrite=True) as writer:
        assert not writer.present
        assert writer.commit({"by": owner}) == 3
    assert Archive(tmp_path).open().owner == owner
    assert {entry.name for entry in tmp_path.iterdir()} == {MANIFEST, "lock"}


def test_overwriting_ones_own_last_checkpoint_can_keep_its_files(tmp_path):
    commit_next(tmp_path)
    with Archive(tmp_path).writing(OWNER, 1, overwrite=True) as writer:
        assert len(writer.present) == 2


def test_a_checkpoint_that_is_gone_is_said_to_be(tmp_path):
    for path in (tmp_path / "never", tmp_path):
        words = said(path, generation=3)
        assert "holds no checkpoint" in words
        assert "its generation 3 was saved there" in words
    assert not (tmp_path / "never").exists()
    with Archive(tmp_path / "never").writing(OWNER, 3, overwrite=True) as writer:
        assert writer.commit({}) == 1


def test_a_folder_of_other_things_is_never_written_to(tmp_path):
    (tmp_path / "thesis.tex").write_text("long")
    (tmp_path / "data.csv").write_text("longer")
    for overwrite in (False, True):
        words = said(tmp_path, overwrite=overwrite)
        assert "holds 'data.csv' and 1 more, and no manifest.json" in words
        assert "another folder" in words


@pytest.mark.parametrize("text", ["", "{}", '{"format": "chrome"}', "\0" * 100, "[" * 100_000, '"conduit"', "\xff"])
def test_a_foreign_manifest_is_never_replaced(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text, "latin-1")
    for overwrite in (False, True):
        words = said(tmp_path, overwrite=overwrite)
        assert MANIFEST in words
        assert "overwrite" not in words


def test_a_damaged_checkpoint_is_replaced_only_if_told_so(tmp_path):
    commit_next(tmp_path)
    text = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).write_bytes(text[:-20])
    assert "overwrite=True" in said(tmp_path, generation=1)
    before = snapshot(tmp_path).keys()
    with Archive(tmp_path).writing(OWNER, None, overwrite=True) as writer:
        assert writer.add("rows", {}).name not in before
    assert snapshot(tmp_path).keys() == before
    with Archive(tmp_path).writing(OWNER, None, overwrite=True) as writer:
        assert writer.commit({}) == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {MANIFEST, "lock"}


def test_links_are_followed(tmp_path, monkeypatch):
    (tmp_path / "it").symlink_to(tmp_path / "run" / "7")
    assert commit_next(tmp_path / "it") == 1
    assert Archive(tmp_path / "it").path == str(tmp_path / "run" / "7")
    assert commit_next(tmp_path / "run" / "7") == 2
    (tmp_path / "round").symlink_to(tmp_path / "round")
    assert "Too many levels" in said(tmp_path / "round")


def test_where_folders_can_not_be_locked_nothing_is_written_and_all_is_read(tmp_path, monkeypatch):
    commit_next(tmp_path / "it")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert "can be locked, on Linux and macOS" in said(tmp_path / "it", generation=1)
    assert "Nothing was written" in said(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert check_whole(tmp_path / "it") == 1
    code = "import sys; sys.modules['fcntl'] = None; import conduit"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("here")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / MANIFEST).mkdir()
    assert "Not a directory" in said(tmp_path / "file")
    assert "Not a directory" in said(tmp_path / "file" / "below")
    assert "Is a directory" in said(tmp_path / "odd", overwrite=True)
    assert "expected a name" in said(tmp_path / "new", owner="")
    with pytest.raises(CheckpointError, match="Not a directory"):
        Archive(tmp_path / "file").open()


def test_only_one_writes_at_a_time_and_the_other_hears_who(tmp_path):
    commit_next(tmp_path)
    heard: list[str] = []
    with Archive(tmp_path).writing(OWNER, 1):
        other = threading.Thread(target=lambda: heard.append(said(tmp_path, generation=1)))
        other.start()
        other.join()
        code = f"from conduit.core.archive import Archive\nwith Archive({str(tmp_path)!r}).writing({OWNER!r}, 1): pass"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        heard.append(done.stderr)
        assert done.returncode == 1
        assert check_whole(tmp_path) == 1  # readers don't mind
    for words in heard:
        assert re.search(
            rf"is being written by process {os.getpid()} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", words
        )
    assert commit_next(tmp_path) == 2


def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path, monkeypatch):
    shared, real = [], fcntl.flock

    def lock(file: int, how: int) -> None:
        shared.append(os.dup(file))  # as a fork would
        real(file, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lock)
        commit_next(tmp_path)
    assert commit_next(tmp_path) == 2
    for file in shared:
        os.close(file)


@pytest.mark.skipif(os.geteuid() != 0 and os.access("/", os.W_OK), reason="nothing is read-only here")
def test_a_folder_without_permission_is_refused_in_the_systems_words():
    with tempfile.TemporaryDirectory() as name:
        path, root = Path(name), os.geteuid() == 0
        commit_next(path / "it")
        path.chmod(0o555)
        (path / "it").chmod(0o555)
        if root:
            os.seteuid(65534)  # root may write anywhere
        try:
            with pytest.raises(CheckpointError, match="lock: can't lock the folder: Permission denied"):
                commit_next(path / "it")
            with pytest.raises(CheckpointError, match="can't make the folder: Permission denied"):
                commit_next(path / "new")
            assert check_whole(path / "it") == 1
        finally:
            if root:
                os.seteuid(0)
            path.chmod(0o755)
            (path / "it").chmod(0o755)
        assert commit_next(path / "it") == 2


# Disks and interrupts


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fails_at_any_step_leaves_the_old_checkpoint_and_nothing_else(tmp_path, number):
    for _ in range(4):
        commit_next(tmp_path)
    last, failed = 4, []
    for at in range(200):
        before = names_of(tmp_path)
        error = None
        with steps_failing(at, OSError(number, os.strerror(number))) as steps:
            try:
                commit_next(tmp_path)
            except CheckpointError as caught:
                error = caught
        if error is None:
            assert check_whole(tmp_path) == (last := last + 1)
            if len(steps) <= at:
                break
            assert (
                at < 4 or steps[at] == "unlink" or at == len(steps) - 1
            )  # who has the lock, what is left over, letting go
            continue
        failed.append(steps[at])
        words = str(error)
        assert os.strerror(number) in words
        assert error.__cause__ is not None
        assert words.startswith(str(tmp_path))
        if "outlives a power loss" in words:
            assert check_whole(tmp_path) == (last := last + 1)
            assert before <= {entry.name for entry in tmp_path.iterdir()}
            continue
        assert check_whole(tmp_path) == last
        assert {entry.name for entry in tmp_path.iterdir()} == before
        if steps[at] in ("write", "fsync", "replace"):
            assert re.search(r"\([\d,]+ bytes wanted, [\d,]+ free\)", words)
    assert set(failed) == set(STEPS) - {"unlink", "ftruncate", "mkdir"}


def test_a_file_that_the_system_refuses_to_grow_leaves_the_old_checkpoint(tmp_path):
    commit_next(tmp_path)
    before = snapshot(tmp_path).keys()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        refused = r"big: can't write it: File too large \(400,\d\d\d bytes wanted, [\d,]+ free\)"
        with pytest.raises(CheckpointError, match=refused), Archive(tmp_path).writing(OWNER, 1) as writer:
            writer.add("big", {"a": np.ones(50_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot(tmp_path).keys() == before
    assert check_whole(tmp_path) == 1


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_at_any_step_leaves_one_checkpoint_whole_and_the_writer_knows_which(tmp_path, monkeypatch, after):
    writers: list[Writer] = []

    class Seen(Writer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            writers.append(self)

    monkeypatch.setattr(archive, "Writer", Seen)
    for _ in range(4):
        commit_next(tmp_path)
    last, old, new = 4, 0, 0
    for at in range(200):
        writers.clear()
        try:
            with steps_failing(at, KeyboardInterrupt(), after):
                commit_next(tmp_path)
        except KeyboardInterrupt:
            pass
        else:
            break
        found = check_whole(tmp_path)
        assert [writer.committed for writer in writers] in ([found if found > last else None], [])
        old, new = old + (found == last), new + (found > last)
        if found == last:
            assert {entry.name for entry in tmp_path.iterdir()} == names_of(tmp_path)
        last = found
    assert old > 20
    assert new >= 5
    commit_next(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == names_of(tmp_path)


# Reading what isn't whole


def test_no_checkpoint_is_said_to_be_none(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        for call in (Archive(path).open, Archive(path).verify):
            with pytest.raises(CheckpointError, match=r"holds no checkpoint: there is no manifest\.json"):
                call()
    assert list(tmp_path.iterdir()) == []


def _trouble(path: Path) -> str | None:
    try:
        Archive(path).verify()
    except CheckpointError as error:
        return str(error)
    return None


def test_any_flipped_byte_of_any_file_is_found_and_nothing_is_written(tmp_path):
    arrays = {"a": np.arange(5), "b": noise(np.dtype(np.complex128), (2,)), "c": np.array(True)}
    entry = save(tmp_path, arrays, {"rows": [1.5, "two"]})
    whole = Archive(tmp_path).open()
    harmless = 0
    for name in (entry.name, MANIFEST):
        data = (tmp_path / name).read_bytes()
        for at in range(len(data)):
            for flip in (0x01, 0x20, 0xFF):
                (tmp_path / name).write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
                words = _trouble(tmp_path)
                if words is None:  # a space between members became another, or the like
                    found = Archive(tmp_path).open()
                    assert (name, found.content, found.files) == (MANIFEST, whole.content, whole.files)
                    assert (found.owner, found.generation) == (whole.owner, whole.generation)
                    harmless += 1
                else:
                    assert f"{tmp_path}/{name}" in words
        (tmp_path / name).write_bytes(data)
    assert harmless < 50
    assert Archive(tmp_path).verify().arrays == 3


def test_any_shortened_or_lengthened_file_is_found(tmp_path):
    entry = save(tmp_path, {"a": np.arange(5)}, {"rows": 5})
    for name in (entry.name, MANIFEST):
        data = (tmp_path / name).read_bytes()
        for text in (*(data[:at] for at in range(len(data) - 1)), data + b"x"):
            (tmp_path / name).write_bytes(text)
            for call in (Archive(tmp_path).open, Archive(tmp_path).verify):
                with pytest.raises(CheckpointError, match=f"^{tmp_path}/{name} "):
                    call()
        (tmp_path / name).write_bytes(data)


def test_a_reader_names_the_file_that_is_missing_and_writes_nothing(tmp_path):
    commit_next(tmp_path)
    reading = Archive(tmp_path).open()
    name = reading.content["state"]
    (tmp_path / name).unlink()
    before = snapshot(tmp_path)
    for call in (Archive(tmp_path).open, Archive(tmp_path).verify, lambda: reading.arrays(name)):
        with pytest.raises(CheckpointError, match=rf"{name}: can't (open|read) what manifest.json names: No such file"):
            call()
    assert snapshot(tmp_path) == before


def test_what_is_asked_by_a_name_that_is_not_there_is_refused(tmp_path):
    entry = save(tmp_path, {"a": np.zeros(3), "b": np.zeros(3)})
    reading = Archive(tmp_path).open()
    with pytest.raises(CheckpointError, match="names no file 'strange'"):
        reading.arrays("strange")
    with pytest.raises(CheckpointError, match="has no array 'c'; it has 'a', 'b'"):
        reading.array(entry.name, "c")


def test_a_file_that_changes_after_the_open_is_found_when_it_is_read(tmp_path):
    entry = save(tmp_path, {"a": np.arange(50)})
    reading = Archive(tmp_path).open()
    path = tmp_path / entry.name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=r"is damaged: its crc32 is 0x[0-9a-f]{8}, and manifest.json says 0x"):
        reading.arrays(entry.name)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"has .* bytes; manifest\.json says"):
        reading.array(entry.name, "a")


def test_a_file_that_shrinks_while_it_is_read_is_found(tmp_path, monkeypatch):
    entry = save(tmp_path, {"a": np.arange(50)})

    def shrink(*args: Any) -> Any:
        os.truncate(tmp_path / entry.name, entry.size_bytes - 1)
        return decode_header(*args)

    monkeypatch.setattr(archive_files, "decode_header", shrink)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        Archive(tmp_path).verify()


def test_a_reader_overtaken_by_a_writer_starts_again_with_the_next_checkpoint(tmp_path):
    commit_next(tmp_path)
    begun = []

    def whole(reading: Any) -> int:
        begun.append(reading.generation)
        if len(begun) < 3:
            commit_next(tmp_path)  # removes the state of the one before
        reading.arrays(reading.content["state"])
        return reading.generation

    assert Archive(tmp_path).read(whole) == 3
    assert begun == [1, 2, 3]


def test_a_newer_conduits_checkpoint_says_so_and_an_unknown_older_one_too(tmp_path):
    commit_next(tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(json.dumps({**json.loads(text), "version": 7, "made_by": "9.8.7"}))
    for words in (_trouble(tmp_path), said(tmp_path, generation=1)):
        assert f"{MANIFEST} was made by a newer Conduit (9.8.7): its format has version 7" in str(words)
    rewrite(tmp_path, version=0)
    with pytest.raises(CheckpointError, match="has format version 0, and this Conduit reads version 1 only"):
        Archive(tmp_path).open()
    rewrite(tmp_path, version="1")
    with pytest.raises(CheckpointError, match="its format has version '1'"):
        Archive(tmp_path).open()


FILE = "rows.g1.safetensors"


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../secret.g1.safetensors": {"bytes": 1, "crc32": 1}}},
        {"files": {"/etc/passwd": {"bytes": 1, "crc32": 1}}},
        {"files": {FILE: {"bytes": -1, "crc32": 1}}},
        {"files": {FILE: {"bytes": 1.0, "crc32": 1}}},
        {"files": {FILE: {"bytes": True, "crc32": 1}}},
        {"files": {FILE: {"bytes": 1, "crc32": "1"}}},
        {"files": {FILE: {"bytes": 1}}},
        {"files": {FILE: 3}},
        {"files": []},
        {"owner": 3},
        {"generation": "1"},
        {"generation": -1},
        {"generation": True},
    ],
    ids=repr,
)
def test_a_manifest_with_a_right_sum_and_wrong_members_is_refused(tmp_path, changes):
    save(tmp_path, {})
    rewrite(tmp_path)
    Archive(tmp_path).open()
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=MANIFEST):
        Archive(tmp_path).open()


def test_a_manifest_can_be_laid_out_anew(tmp_path):
    text = encode_manifest(Manifest("me", 3, {}, {"a": 1}))
    assert decode_manifest(json.dumps(json.loads(text)).encode(), "it") == Manifest("me", 3, {}, {"a": 1})


def entry_of(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


NO_JSON = ["", "[]", "3", '"text"', "{", '{"a": NaN}', "[" * 100_000, '{"a": 3}', '{"a": {}}']
NO_ENTRY = [entry_of(shape=shape) for shape in ([-4], [2.0, 2], [5], 4, [True, 4])] + [
    entry_of(dtype) for dtype in ("U9", "U16", ["U8"])
]
NO_ENTRY += [entry_of(offsets=offsets) for offsets in ([0], [4, 0], [1, 5])]
NO_COVER = [
    {},
    {"a": entry_of(), "b": entry_of()},
    {"a": entry_of(shape=[3], offsets=[0, 3])},
    {"a": entry_of(shape=[5], offsets=[0, 5])},
    {"a": entry_of(shape=[2], offsets=[0, 2]), "b": entry_of(shape=[1], offsets=[3, 4])},
]
NO_NOTES = ["x", "[]", '{"a": 3}', 5] + [
    json.dumps({"a": name}) for name in ("object", "<f4", "<c16", "S4", "x", "i4,i4")
]


@pytest.mark.parametrize(
    "header",
    [
        *(NO_JSON + NO_COVER),
        *({"a": entry} for entry in NO_ENTRY),
        *({"a": entry_of(), "__metadata__": {"conduit.dtypes": text}} for text in NO_NOTES),
        {"a": entry_of(), "__metadata__": [1]},
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_header_that_is_not_safetensors_is_refused(header):
    text = header if isinstance(header, str) else json.dumps(header)
    with pytest.raises(CheckpointError, match=r"^file.g1.safetensors"):
        decode_header(text.encode(), 4, "file.g1.safetensors")


def test_a_header_with_notes_of_others_is_read():
    header = {"__metadata__": {"format": "pt"}, "b": entry_of("F32", [], [0, 4])}
    (part,) = decode_header(json.dumps(header).encode(), 4, "it")
    assert (part.key, part.dtype, part.shape) == ("b", np.dtype(np.float32), ())


def test_the_error_is_the_systems_kind_too_and_can_be_copied():
    error = CheckpointError("/a/b: can't write it")
    for other in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(other, ConduitError)
        assert isinstance(other, OSError)
        assert type(other) is CheckpointError
        assert str(other) == "/a/b: can't write it"
        assert other.args == ("/a/b: can't write it",)
