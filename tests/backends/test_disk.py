"""The disk tier: the same bytes as in memory, nothing left behind, and clear words where there is no room or no folder."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

import conduit
from conduit.backends import disk as module
from conduit.backends import load
from conduit.backends.disk import Disk, _file_of, _memory_file_system
from conduit.backends.host import HostTiers
from conduit.backends.readahead import will_need
from conduit.clock import RealClock
from conduit.core.backend import Columns, Move
from conduit.core.experience import Schema
from conduit.core.ledger import Ledger
from conduit.core.placement import Placement
from conduit.errors import CapacityError, SettingError
from conduit.report import ledger_table
from conduit.testing import DTYPES, assert_same, example_rows, on_host, random_bits
from conduit.topology.endpoint import DISK, PAGEABLE, Endpoint, Tier

BACKENDS = ["reference", "torch", "jax"]
IN_MEMORY = Path("/dev/shm")
needs_tmpfs = pytest.mark.skipif(
    _memory_file_system(IN_MEMORY) is None, reason="/dev/shm is no memory file system here"
)


@pytest.fixture
def folder():
    """An empty folder on a disk, wherever this machine has one."""
    with tempfile.TemporaryDirectory(dir=Disk().folder) as made:
        yield Path(made)


def mapped(folder: Path) -> list[str]:
    """The mappings and open files of this process that lie in the folder."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return maps + [link for link in links if link.startswith(str(folder))]


def rows_of(count: int, seed: int):
    """Every dtype, a leaf of several pages a row, and one whose rows end in the middle of a page."""
    rows = example_rows(count, seed, {dtype.name: dtype for dtype in DTYPES})
    bits = np.random.default_rng(seed)
    return rows | {
        "wide": random_bits(bits, (count, 3, 4096), np.dtype(np.uint8)),
        "odd": random_bits(bits, (count, 7056), np.dtype(np.uint8)),
    }


def batches(backend, placement, capacity: int = 37):
    """What three pulls bring after the ring has gone round more than twice, in pushes of different sizes."""
    with conduit.Store(backend=backend, capacity=capacity, batch_size=16, placement=placement, seed=3) as store:
        actor = store.actor()
        for number, count in enumerate((1, 30, 5, 2, 36, 20)):
            actor.push_trajectory(rows_of(count, number))
        learner = store.learner(to="numpy")
        return [dict(learner.pull().data) for _ in range(3)]


def dropped(columns: Columns) -> bool:
    """Puts columns out of memory; False where the kernel keeps them."""
    for array in columns.arrays.values():
        file = _file_of(array)
        assert file is not None
        os.fsync(file.fd)
        file.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    before = sectors()
    for array in columns.arrays.values():
        array.reshape(-1).view(np.uint8)[-1:].copy()
    return sectors() > before


def sectors() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


class TestTheSameBytes:
    @pytest.mark.parametrize("name", BACKENDS)
    def test_as_in_memory_for_every_dtype_when_the_ring_goes_round(self, name, folder):
        mixed = Placement((PAGEABLE, DISK), (1, 3))
        for placement in ("disk", mixed):
            for got, expected in zip(batches(load(name, folder), placement), batches(name, "pageable"), strict=True):
                assert got.keys() == expected.keys()
                for path, rows in expected.items():
                    assert_same(got[path], rows, (placement, path))

    def test_after_writes_of_every_size_at_every_place(self, folder):
        tiers, bits = HostTiers(Disk(folder)), np.random.default_rng(0)
        sample = {"a": np.zeros((1, 41), np.uint8), "b": np.zeros(1, np.float32), "c": np.zeros((1, 1000), np.int64)}
        columns = tiers.allocate(Schema.infer(sample, "test"), 600, DISK)
        expected = {path: np.zeros((600, *array.shape[1:]), array.dtype) for path, array in sample.items()}
        for _ in range(60):
            count = int(bits.integers(0, 400))
            start = int(bits.integers(0, 601 - count))
            rows = {path: random_bits(bits, (count, *array.shape[1:]), array.dtype) for path, array in sample.items()}
            tiers.write(columns, start, on_host(rows))
            for path, array in rows.items():
                expected[path][start : start + count] = array
            index = bits.integers(0, 600, 50)
            batch = tiers.read(columns, index, list(sample), PAGEABLE)
            for path in sample:
                assert_same(batch.arrays[path], expected[path][index], path)
        for path, array in expected.items():
            assert_same(columns.arrays[path], array, path)

    def test_when_what_is_written_is_read_only_or_in_no_order(self, folder):
        tiers = HostTiers(Disk(folder))
        base = np.random.default_rng(0).normal(size=(2 * 64, 300)).astype(np.float32)
        fixed = base[:64].copy()
        fixed.flags.writeable = False
        for rows in (fixed, base[::2], base[64:][::-1], np.asfortranarray(base[:64]), fixed.astype(ml_dtypes.bfloat16)):
            columns = tiers.allocate(Schema.infer({"a": rows}, "test"), 64, DISK)
            tiers.write(columns, 0, on_host({"a": rows}))
            assert_same(columns.arrays["a"], np.ascontiguousarray(rows), "written")

    def test_when_the_kernel_takes_less_at_once(self, folder, monkeypatch):
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:5000], offset))
        tiers, rows = HostTiers(Disk(folder)), rows_of(40, seed=1)
        columns = tiers.write(tiers.allocate(Schema.infer(rows, "test"), 40, DISK), 0, on_host(rows))
        for path, array in rows.items():
            assert_same(columns.arrays[path], array, path)

    def test_when_the_pages_are_out_of_memory(self, folder):
        tiers, rows = HostTiers(Disk(folder)), rows_of(200, seed=1)
        columns = tiers.write(tiers.allocate(Schema.infer(rows, "test"), 200, DISK), 0, on_host(rows))
        for number in range(4):
            dropped(columns)
            index = np.random.default_rng(number).integers(0, 200, 64)
            batch = tiers.read(columns, index, list(rows), PAGEABLE)
            for path, array in rows.items():
                assert_same(batch.arrays[path], array[index], path)


class TestRowsThatAreNotInMemory:
    """Where the kernel tells nothing, or keeps all pages, there is nothing to see: said, not passed over."""

    @pytest.fixture
    def columns(self, folder):
        tiers, rows = HostTiers(Disk(folder)), {"a": np.zeros((512, 4096), np.uint8)}
        columns = tiers.write(tiers.allocate(Schema.infer(rows, "test"), 512, DISK), 0, on_host(rows))
        if not dropped(columns):
            pytest.skip("this file system keeps its pages, or doesn't count what it reads")
        return columns

    def test_are_fetched_by_asking_so_that_taking_them_fetches_nothing(self, columns):
        index = np.arange(0, 400, 2)
        before = sectors()
        if not will_need([columns.arrays["a"]], index):
            pytest.skip("this kernel has no process_madvise, or a filter forbids it")
        assert (sectors() - before) * 512 >= len(index) * 4096
        before = sectors()
        columns.arrays["a"].take(index, 0)
        assert sectors() == before

    @pytest.mark.parametrize("name", ["torch", "jax"])
    def test_are_moved_in_order_with_few_waits(self, name, folder, columns):
        backend = load(name, folder)
        for to in (PAGEABLE, DISK, Endpoint(Tier.DEVICE)):
            backend.transfer([Move(columns, to)])  # so that code which is loaded at first doesn't count
            assert dropped(columns)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            (copy,) = backend.transfer([Move(columns, to)])
            backend.wait(copy)
            # One for each page, if nobody guessed.
            assert resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before < 512 // 4

    def test_are_asked_for_from_the_second_batch_on_and_no_more_once_they_stay(self, folder, columns, monkeypatch):
        asked = []
        monkeypatch.setattr(module, "will_need", lambda columns, index: asked.append(len(index)))
        tiers = HostTiers(Disk(folder))
        read = [
            (tiers.read(columns, np.arange(start, start + 64), ["a"], PAGEABLE), len(asked))
            for start in (0, 64, 128, 0, 64, 128)
        ]
        assert [count for _, count in read] == [0, 1, 2, 3, 3, 3]


def test_where_the_kernel_neither_counts_nor_fetches_ahead_nothing_is_asked_for(folder, monkeypatch):
    tiers, rows = HostTiers(Disk(folder)), {"a": np.zeros((512, 4096), np.uint8)}
    columns = tiers.write(tiers.allocate(Schema.infer(rows, "test"), 512, DISK), 0, on_host(rows))
    dropped(columns)
    monkeypatch.delattr(resource, "RUSAGE_THREAD")
    monkeypatch.delattr(os, "pidfd_open")
    assert not will_need([columns.arrays["a"]], np.arange(64))
    monkeypatch.setattr(module, "will_need", lambda columns, index: pytest.fail("asked"))
    for start in (0, 64, 128):
        index = np.arange(start, start + 64)
        assert_same(tiers.read(columns, index, ["a"], PAGEABLE).arrays["a"], rows["a"][index], start)


class TestNothingIsLeftBehind:
    @pytest.mark.parametrize("name", BACKENDS)
    def test_a_file_has_no_name_and_goes_when_the_store_is_closed(self, name, folder):
        with conduit.Store(backend=load(name, folder), capacity=100, batch_size=4, placement="disk") as store:
            store.actor().push_trajectory(rows_of(120, seed=1))
            batch = store.learner(to="numpy").pull()
            assert mapped(folder)
            assert os.listdir(folder) == []
        assert mapped(folder) == []
        assert np.asarray(batch.data["wide"]).any()

    def test_nor_by_a_process_that_is_killed(self, folder):
        code = f"""
import numpy as np
from conduit.backends import load
from conduit.core.experience import Schema
from conduit.topology.endpoint import DISK
backend = load("reference", {str(folder)!r})
columns = backend.allocate(Schema.infer({{"a": np.zeros((1, 4096), np.uint8)}}, "t"), 256, DISK)
print("there", flush=True)
input()
"""
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert os.listdir(folder) == []

    def test_nor_by_a_file_that_could_not_be_made(self, folder, monkeypatch):
        def full(fd, offset, size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityError, match=rf"no file of .* GB for rows at disk .*{folder}.*No space.* GB free"):
            load("torch", folder).allocate(Schema.infer(rows_of(1, seed=0), "test"), 10, DISK)
        assert os.listdir(folder) == []
        assert mapped(folder) == []


class TestRoom:
    def test_is_taken_when_the_columns_are_made(self, folder):
        columns = HostTiers(Disk(folder)).allocate(Schema.infer({"a": np.zeros((1, 1 << 20), np.uint8)}, "t"), 8, DISK)
        file = _file_of(columns.arrays["a"])
        assert file is not None
        assert os.fstat(file.fd).st_blocks * 512 >= 8 << 20

    @pytest.mark.parametrize("name", BACKENDS)
    def test_that_is_not_there_is_refused_with_the_figures_and_the_folder(self, name, folder, monkeypatch):
        backend = load(name, folder)
        system = os.statvfs_result((4096, 4096, 1 << 20, 10_000, 10_000, 9, 9, 9, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda at: system)
        # 2 % of 4 GiB are more than what is free.
        assert backend.free_bytes(DISK) == 0
        monkeypatch.setattr(os, "statvfs", lambda at: os.statvfs_result((*system[:2], 1 << 10, *system[3:])))
        assert backend.free_bytes(DISK) == 10_000 * 4096 - int(0.02 * (1 << 22))
        with pytest.raises(
            CapacityError, match=rf"100 rows of 1,000,000 bytes need 0.100 GB at disk \({folder}\); 0.041 GB"
        ):
            backend.allocate(Schema.infer({"a": np.zeros((1, 1_000_000), np.uint8)}, "t"), 100, DISK)
        with pytest.raises(CapacityError, match=rf"0.100 GB .* in {folder}: too little room; 0.041 GB free"):
            backend.transfer([Move(on_host({"a": np.zeros((100, 1_000_000), np.uint8)}), DISK)])
        assert mapped(folder) == []

    def test_is_within_the_disk_s_own_budget(self, folder):
        rows = {"a": np.zeros((10, 1 << 16), np.uint8)}
        for placement in ("disk", Placement((PAGEABLE, DISK), (1, 9))):
            with (
                conduit.Store(
                    backend=load("torch", folder),
                    capacity=100,
                    batch_size=4,
                    placement=placement,
                    budgets={"disk": "1MiB"},
                ) as store,
                pytest.raises(
                    CapacityError, match=r"disk needs .* MiB for \d+ rows; its budget is 1 MiB \(16 rows would fit\)"
                ),
            ):
                store.actor().push_trajectory(rows)


class TestFolders:
    def test_that_cannot_be_are_refused_when_they_are_named(self, folder):
        (folder / "file").write_text("")
        for wrong, why in (
            (folder / "file", rf"'{folder}/file' is no folder"),
            (folder / "file" / "below", rf"'{folder}/file' is no folder"),
            ("/proc", r"no file can be made there"),
            ("/proc/below", r"no file can be made there"),
        ):
            with pytest.raises(SettingError, match=rf"disk='{wrong}'.*{why}.*CONDUIT_DISK"):
                load("reference", wrong)

    @pytest.mark.parametrize("wrong", [3, True, b"x", "", "a\0b", [], object], ids=repr)
    def test_are_named_by_strings_or_paths(self, wrong):
        with pytest.raises(SettingError, match=r"disk=.*: expected the name of a folder"):
            load("reference", wrong)

    def test_are_made_with_their_parents(self, folder):
        assert Disk(folder / "a" / "b").folder == folder / "a" / "b"
        assert (folder / "a" / "b").is_dir()
        assert Disk(folder / "a").folder == folder / "a"

    def test_of_another_system_than_linux_are_refused_when_rows_are_to_go_there(self, folder, monkeypatch):
        monkeypatch.delattr(os, "posix_fallocate")
        backend, schema = load("reference"), Schema.infer({"a": np.zeros(1)}, "test")
        assert backend.allocate(schema, 3, PAGEABLE).rows == 3
        for attempt in (lambda: backend.allocate(schema, 3, DISK), lambda: load("reference", folder / "new")):
            with pytest.raises(SettingError, match="rows on disk need Linux"):
                attempt()
        assert not (folder / "new").exists()

    def test_that_may_not_be_written_to_are_refused(self, folder, monkeypatch):
        def refuse(dir):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        with pytest.raises(SettingError, match=rf"disk='{folder}': no file can be made there .*Read-only"):
            Disk(folder)

    @needs_tmpfs
    def test_in_memory_are_refused(self):
        with pytest.raises(
            SettingError, match=r"disk='/dev/shm' lies in memory \(tmpfs\).*as pageable ones.*CONDUIT_DISK"
        ):
            load("reference", IN_MEMORY)
        with pytest.raises(SettingError, match=r"lies in memory \(tmpfs\)"):
            load("reference", IN_MEMORY / "conduit" / "below")
        assert not (IN_MEMORY / "conduit").exists()

    def test_that_the_environment_names_are_looked_at_when_rows_are_to_go_there(self, folder, monkeypatch):
        monkeypatch.setenv("CONDUIT_DISK", str(folder / "later"))
        (folder / "later").write_text("")
        backend, schema = load("torch"), Schema.infer({"a": np.zeros(1)}, "test")
        assert backend.allocate(schema, 3, PAGEABLE).rows == 3
        for attempt in (lambda: backend.allocate(schema, 3, DISK), lambda: backend.free_bytes(DISK)):
            with pytest.raises(SettingError, match=rf"CONDUIT_DISK='{folder}/later': .* is no folder"):
                attempt()
        (folder / "later").unlink()
        columns = backend.allocate(schema, 3, DISK)
        assert any(f"{folder}/later" in each for each in mapped(folder))
        del columns

    def test_for_temporary_files_are_the_default_unless_they_lie_in_memory(self, monkeypatch):
        monkeypatch.delenv("CONDUIT_DISK", raising=False)
        monkeypatch.setattr(module, "_memory_file_system", lambda folder: None)
        assert Disk().folder == Path(tempfile.gettempdir())
        monkeypatch.setattr(
            module, "_memory_file_system", lambda at: "tmpfs" if at == Path(tempfile.gettempdir()) else None
        )
        assert Disk().folder == Path("/var/tmp")
        monkeypatch.setattr(module, "_memory_file_system", lambda folder: "tmpfs")
        with pytest.raises(SettingError, match=r"the folder for temporary files, .*lies in memory"):
            assert Disk().folder

    def test_are_known_to_lie_in_memory_by_their_mount(self, folder):
        device = folder.stat().st_dev
        number, mounts = f"{os.major(device)}:{os.minor(device)}", folder / "mountinfo"
        mounts.write_text(f"22 1 254:99 / /x rw - tmpfs tmpfs rw\n23 1 {number} / /y rw shared:1 - ext4 /dev/a rw\n")
        assert _memory_file_system(folder, mounts) is None
        mounts.write_text(f"23 1 {number} / /y rw shared:1 master:2 - tmpfs none rw,size=1\n")
        assert _memory_file_system(folder, mounts) == "tmpfs"
        assert _memory_file_system(folder, folder / "nothing") is None

    def test_belong_to_a_backend_s_making(self, folder):
        backend = load("reference")
        with pytest.raises(SettingError, match="made already has its folder"):
            load(backend, folder)


class TestTheLedger:
    def test_has_what_the_disk_was_written_and_read_and_how_long_that_took(self, folder):
        rows = {"a": np.zeros((10, 1000), np.uint8), "b": np.zeros(10, np.float32)}
        with conduit.Store(backend=load("torch", folder), capacity=25, batch_size=8, placement="disk") as store:
            actor, learner = store.actor(), store.learner()
            for _ in range(3):
                actor.push_trajectory(rows)
            for _ in range(4):
                learner.pull()
            traffic = store.ledger.traffic["disk"]
            total = store.ledger.total
        # The third push goes round the ring's end.
        assert (traffic.writes, traffic.write_bytes) == (4, 30 * 1004)
        assert (traffic.reads, traffic.read_bytes) == (4, 32 * 1004)
        assert 0 < traffic.write_s < total.ingestion.busy_s
        assert 0 < traffic.read_s < total.delivery.busy_s
        assert store.ledger.traffic == {"disk": traffic}

    def test_shows_it_below_the_stages(self):
        ledger, console = Ledger(RealClock()), Console(width=120)
        with console.capture() as before:
            console.print(ledger_table(ledger))
        assert "disk" not in before.get()
        meter = ledger.meter(DISK)
        assert meter is not None
        meter.wrote(3 << 20, ledger.now() - 1.25)
        meter.read(5 << 20, ledger.now() - 2.5)
        with console.capture() as after:
            console.print(ledger_table(ledger))
        assert re.search(r"disk written, 3 MiB +│ +1.2\d\d ", after.get())
        assert re.search(r"disk read, 5 MiB +│ +2.5\d\d ", after.get())

    def test_has_nothing_of_rows_in_memory(self):
        with conduit.Store(capacity=25, batch_size=8) as store:
            store.actor().push_trajectory({"a": np.zeros((10, 1000), np.uint8)})
            store.learner().pull()
            assert store.ledger.traffic == {}


def resident_pages(array: np.ndarray) -> int:
    """Of an array's memory, as the kernel tells."""
    address, pages = array.ctypes.data, -(-array.nbytes // mmap.PAGESIZE)
    first = address - address % mmap.PAGESIZE
    there = (ctypes.c_ubyte * (pages + 1))()
    assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(first), ctypes.c_size_t(array.nbytes), there) == 0
    return sum(each & 1 for each in there[:pages])


def test_uncached_rows_are_on_the_disk_alone_until_they_are_read(folder):
    backend = load("reference", folder)
    rows = {"x": random_bits(np.random.default_rng(0), (4096, 1024), np.dtype(np.uint8))}
    columns = backend.allocate(Schema.infer(rows, "test"), 4096, DISK)
    columns = backend.write(columns, 0, on_host(rows))
    (array,) = columns.arrays.values()
    assert resident_pages(array) > 900
    backend.uncache(columns)
    assert resident_pages(array) < 100
    np.testing.assert_array_equal(array, rows["x"])
    assert resident_pages(array) > 900
