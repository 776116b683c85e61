"""Checkpoints whose writer dies, at any moment, with or without the machine: the old one or the new one is whole."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conduit.errors import CheckpointError
from tests.core.generations import check_whole, commit_next, names_of

ROOT = Path(__file__).parent.parent.parent


def child(what: str, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.core.generations", what, str(path)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_a_kill_after_any_single_step_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path):
    with child("steps", tmp_path) as driver:
        assert driver.wait(60) == 0
    steps = len(list(tmp_path.iterdir())) - 1
    assert steps > 30
    found, left = [], 0
    for step in range(steps):
        path = tmp_path / str(step)
        found.append(check_whole(path))
        left += {entry.name for entry in path.iterdir()} != names_of(path)
        assert commit_next(path) == found[-1] + 1  # the lock died with its holder
        assert check_whole(path) == found[-1] + 1
        assert {entry.name for entry in path.iterdir()} == names_of(path)
    assert set(found) == {4, 5}
    assert found == sorted(found)
    assert left > steps / 2


def test_ten_kills_at_random_moments_leave_a_whole_checkpoint(tmp_path):
    path, last, moments = tmp_path / "checkpoint", 0, random.Random(0)
    for _ in range(10):
        with child("ever", path) as writer:
            assert writer.stdout is not None
            begun = int(writer.stdout.readline())
            time.sleep(moments.uniform(0, 0.05))
            writer.kill()
        found = check_whole(path)
        assert found >= begun > last
        last = found
    assert commit_next(path) == last + 1
    assert {entry.name for entry in path.iterdir()} == names_of(path)


def test_whoever_reads_while_others_write_sees_one_checkpoint_whole(tmp_path):
    with child("ever", tmp_path / "checkpoint") as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen = [check_whole(tmp_path / "checkpoint") for _ in range(60)]
        writer.kill()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


@dataclass
class Inode:
    content: bytes = b""
    durable: bytes = b""


@dataclass
class Disk:
    """What a folder may look like after a power loss: bytes are there if their file was synced since, names if the folder was.
    Of what changed in the folder since it was synced, any kind may be there and any other not."""

    names: dict[str, Inode] = field(default_factory=dict)
    pending: list[tuple[str, str, Inode | None]] = field(default_factory=list)
    open_files: dict[int, Inode | None] = field(default_factory=dict)
    states: dict[tuple[tuple[str, bytes], ...], None] = field(default_factory=dict)
    forgets: str = ""

    def note(self) -> None:
        for kinds in itertools.product([True, False], repeat=3):
            lost = [kind for kind, is_lost in zip(("create", "replace", "unlink"), kinds, strict=True) if is_lost]
            names = self.after([change for change in self.pending if change[0] not in lost])
            self.states[tuple(sorted((name, inode.durable) for name, inode in names.items()))] = None

    def after(self, changes: list[tuple[str, str, Inode | None]]) -> dict[str, Inode]:
        names = dict(self.names)
        for _, name, inode in changes:
            if inode is None:
                names.pop(name, None)
            else:
                names = {known: other for known, other in names.items() if other is not inode}
                names[name] = inode
        return names

    def watch(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        for entry in folder.iterdir():
            self.names[entry.name] = Inode(entry.read_bytes(), entry.read_bytes())
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "unlink")}

        def opened(path: Any, flags: int, *mode: int) -> int:
            file = real["open"](path, flags, *mode)
            known = self.after(self.pending).get(Path(path).name)
            if flags & os.O_DIRECTORY:
                known = None
            elif known is None:
                known = Inode()
                self.pending.append(("create", Path(path).name, known))
            self.open_files[file] = known
            self.note()
            return file

        def written(file: int, data: Any) -> int:
            done = real["write"](file, data)
            inode = self.open_files[file]
            assert inode is not None
            inode.content += bytes(data[:done])
            self.note()
            return done

        def synced(file: int) -> None:
            inode = self.open_files[file]
            if inode is None and self.forgets != "folder":
                self.names, self.pending = self.after(self.pending), []
            if inode is not None and self.forgets != "file":
                inode.durable = inode.content
            self.note()

        def replaced(old: str, new: str) -> None:
            real["replace"](old, new)
            self.pending.append(("replace", Path(new).name, self.after(self.pending)[Path(old).name]))
            self.note()

        def unlinked(path: str) -> None:
            real["unlink"](path)
            self.pending.append(("unlink", Path(path).name, None))
            self.note()

        for name, step in zip(real, (opened, written, synced, replaced, unlinked), strict=True):
            patch.setattr(os, name, step)


def broken_after_a_power_loss(tmp_path: Path, forgets: str = "") -> tuple[int, set[int]]:
    """(in how many of all states that a power loss during the fifth commit can leave nothing whole is found, the generations found)."""
    path = tmp_path / "checkpoint"
    for _ in range(4):
        commit_next(path)
    disk = Disk(forgets=forgets)
    with pytest.MonkeyPatch.context() as patch:
        disk.watch(path, patch)
        commit_next(path)
    broken, found = 0, set()
    for number, state in enumerate(disk.states):
        after = tmp_path / f"after-{number}"
        after.mkdir()
        for name, content in state:
            (after / name).write_bytes(content)
        try:
            found.add(check_whole(after))
        except CheckpointError:
            broken += 1
    return broken, found


def test_a_power_loss_at_any_moment_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path):
    assert broken_after_a_power_loss(tmp_path) == (0, {4, 5})


@pytest.mark.parametrize("forgets", ["file", "folder"])
def test_without_syncing_a_power_loss_would_leave_nothing_whole(tmp_path, forgets):
    broken, _ = broken_after_a_power_loss(tmp_path, forgets)
    assert broken > 0
