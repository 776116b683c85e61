"""Checkpoints that can't be written, or can't be read: what is said, and that nothing is touched."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import conduit
from conduit.core.archive import Archive
from conduit.errors import CheckpointError, ClosedError, HandOverError, SchemaError, SettingError, WaitTimeout
from tests.store.plays import doubles, printed
from tests.store.rows import each_backend, fill, no_thread_left, step, store

ROOT = Path(__file__).parent.parent.parent
restore = conduit.Store.restore


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.name != "lock"}


def live_ids(path: Path, **settings: Any) -> list[int]:
    Archive(path).verify()
    with restore(path, **settings) as s:
        return s.read().data["id"].tolist()


def raised_by(call: Callable[[], object]) -> CheckpointError | None:
    try:
        call()
    except CheckpointError as error:
        return error
    return None


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, call: str, nth: int, error: int) -> Iterator[list[int]]:
    """The `nth` of this thread's os.`call` in the block fails; how many there were."""
    real, calls, me = getattr(os, call), [0], threading.get_ident()

    def fails(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == me and call == "open" and not args[1] & (os.O_CREAT | os.O_DIRECTORY):
            return real(*args, **kwargs)
        if threading.get_ident() == me:
            calls[0] += 1
            if calls[0] == nth + 1:
                raise OSError(error, os.strerror(error))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        yield calls


# What can't be written


@pytest.mark.parametrize("call", ["write", "fsync", "open", "replace"])
@pytest.mark.parametrize("known", [False, True], ids=["first", "again"])
def test_a_full_disk_at_any_step_leaves_the_old_checkpoint_and_the_store(tmp_path, monkeypatch, call, known):
    with store(capacity=64, derive={"next_obs": conduit.Next("obs")}) as one:
        actor, came, failures = one.actor(), 10, 0
        fill(actor, 10)
        if known:
            one.save(tmp_path / "c")
        for nth in itertools.count():
            fill(actor, 1, first=came)
            came += 1
            before = contents(tmp_path / "c") if (tmp_path / "c").exists() else {}
            with failing(monkeypatch, call, nth, errno.ENOSPC) as calls:
                error = raised_by(lambda: one.save(tmp_path / "c"))
            if error is not None:
                failures += 1
                assert "No space left" in str(error)
                after = contents(tmp_path / "c") if (tmp_path / "c").exists() else {}
                if "both checkpoints are kept" in str(error):
                    # In place, and only that isn't known to be on the disk.
                    assert live_ids(tmp_path / "c") == list(range(came))
                else:
                    assert after == before
                assert len(one.sample(4, timeout_s=0)) == 4
                continue
            if calls[0] <= nth:
                break
        assert failures >= (1 if call == "replace" else 3)
        fill(actor, 1, first=came)
        saved = one.save(tmp_path / "c")
        # What did get there isn't written again.
        assert (saved.rows, saved.written_rows) == (came + 1, 1)
    assert live_ids(tmp_path / "c") == list(range(came + 1))


def test_a_read_only_folder_is_told_and_left_alone(tmp_path, monkeypatch):
    with store() as one:
        fill(one.actor(), 10)
        one.save(tmp_path / "c")
        before = contents(tmp_path / "c")
        for nth in range(3):
            with (
                failing(monkeypatch, "open", nth, errno.EROFS),
                pytest.raises(CheckpointError, match="Read-only file system"),
            ):
                one.save(tmp_path / "c")
            assert contents(tmp_path / "c") == before
        one.save(tmp_path / "c")
    assert live_ids(tmp_path / "c") == list(range(10))


def test_a_file_or_something_else_is_no_folder_for_a_checkpoint(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "diary.txt").write_text("mine")
    with store() as one:
        fill(one.actor(), 10)
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match="file"):
                one.save(tmp_path / "file", overwrite=overwrite)
            with pytest.raises(CheckpointError, match="file"):
                one.save(tmp_path / "file" / "below", overwrite=overwrite)
            with pytest.raises(CheckpointError, match=r"no checkpoint: it holds 'diary.txt'"):
                one.save(tmp_path / "folder", overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"
    assert [entry.name for entry in (tmp_path / "folder").iterdir()] == ["diary.txt"]


def test_another_stores_checkpoint_is_replaced_only_when_told_so(tmp_path):
    with store() as one, store() as other:
        fill(one.actor(), 10)
        fill(other.actor(), 5, first=100)
        one.save(tmp_path / "c")
        before = contents(tmp_path / "c")
        with pytest.raises(CheckpointError, match=r"holds another store's checkpoint.*overwrite=True"):
            other.save(tmp_path / "c")
        assert contents(tmp_path / "c") == before
        assert other.save(tmp_path / "c", overwrite=True).written_rows == 5
        assert live_ids(tmp_path / "c") == list(range(100, 105))
        with pytest.raises(CheckpointError, match="holds another store's checkpoint"):
            one.save(tmp_path / "c")
        assert live_ids(tmp_path / "c") == list(range(100, 105))
        # All of it anew: what it once had there is gone.
        assert one.save(tmp_path / "c", overwrite=True).written_rows == 10
        assert live_ids(tmp_path / "c") == list(range(10))
        fill(one.actor(), 1, first=10)
        assert one.save(tmp_path / "c").written_rows == 1


def test_through_a_link_it_is_the_same_folder(tmp_path):
    (tmp_path / "run7").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "run7")
    with store() as one:
        fill(one.actor(), 10)
        assert one.save(tmp_path / "latest").path == str(tmp_path / "run7")
        for generation, name in ((2, "run7"), (3, "latest")):
            saved = one.save(tmp_path / name)
            assert (saved.generation, saved.written_rows) == (generation, 0)
    with restore(tmp_path / "latest") as other:
        assert other.save(tmp_path / "run7").generation == 4


@pytest.mark.parametrize("path", [None, 3, True, "", b"", "a\0b", "\ud800\0"], ids=repr)
def test_what_names_no_folder_is_refused_by_its_argument(path):
    with store() as one, pytest.raises(CheckpointError, match=r"path=.*: expected the name of a folder"):
        one.save(path)
    with pytest.raises(CheckpointError, match=r"path=.*: expected the name of a folder"):
        restore(path)


def test_while_one_store_saves_another_is_refused(tmp_path, monkeypatch):
    at_work, go_on, real = threading.Event(), threading.Event(), os.fsync
    with store() as one, store() as other:
        fill(one.actor(), 10)
        fill(other.actor(), 5, first=100)
        one.save(tmp_path / "c")

        def waits(file: int) -> None:
            if threading.current_thread().name == "saver":
                at_work.set()
                go_on.wait(10)
            real(file)

        monkeypatch.setattr(os, "fsync", waits)
        thread = threading.Thread(target=lambda: one.save(tmp_path / "c"), name="saver")
        thread.start()
        try:
            assert at_work.wait(10)
            with pytest.raises(CheckpointError, match=rf"being written by process {os.getpid()}"):
                other.save(tmp_path / "c", overwrite=True)
            with pytest.raises(WaitTimeout, match="another save is under way"):
                one.save(tmp_path / "c", timeout_s=0.05)
            # Nobody else waits.
            fill(one.actor(), 5, first=200)
            one.sample(4)
        finally:
            go_on.set()
            thread.join()
        assert live_ids(tmp_path / "c")[:10] == list(range(10))
        assert one.save(tmp_path / "c").generation == 3


def test_of_two_stores_that_go_on_from_one_checkpoint_the_first_to_save_has_it(tmp_path):
    with store() as one:
        fill(one.actor(), 10)
        one.save(tmp_path / "c")
        code = f"""
import conduit, numpy as np
with conduit.Store.restore({str(tmp_path / "c")!r}) as s:
    assert s.save({str(tmp_path / "c")!r}).generation == 2
"""
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        with pytest.raises(
            CheckpointError,
            match=r"holds generation 2 of this store's checkpoint, and not generation 1: somebody restored from it and has saved since",
        ):
            one.save(tmp_path / "c")
        one.save(tmp_path / "d")
    assert live_ids(tmp_path / "c") == live_ids(tmp_path / "d") == list(range(10))


def test_a_closed_store_saves_nothing(tmp_path):
    one = store()
    fill(one.actor(), 10)
    one.close()
    with pytest.raises(ClosedError):
        one.save(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_store_that_is_closed_meanwhile_ends_its_save(tmp_path):
    with store() as one:
        fill(one.actor(), 10)
        one.save(tmp_path / "c")
        before = contents(tmp_path / "c")
        fill(one.actor(), 5, first=10)
        turn = one._order.enter()
        said: list[Any] = []

        def saves() -> None:
            try:
                said.append(one.save(tmp_path / "c"))
            except ClosedError as error:
                said.append(error)

        thread = threading.Thread(target=saves)
        thread.start()
        while len(one._order._turns) == 0:
            pass
        one.close()
        thread.join(5)
        one._order.leave(turn)
    assert isinstance(said[0], ClosedError)
    assert contents(tmp_path / "c") == before


def test_a_save_that_does_not_get_its_turn_gives_up_in_time(tmp_path):
    with store() as one:
        fill(one.actor(), 10)
        one.save(tmp_path / "c")
        before = contents(tmp_path / "c")
        turn = one._order.enter()
        with pytest.raises(WaitTimeout, match="still being ingested"):
            one.save(tmp_path / "c", timeout_s=0.05)
        one._order.leave(turn)
        assert contents(tmp_path / "c") == before
        fill(one.actor(), 5, first=10)
        assert one.save(tmp_path / "c", timeout_s=5).written_rows == 5


def test_a_batch_that_can_not_be_handed_over_is_in_no_checkpoint_s_way(tmp_path):
    with store(backend="jax", schedule=conduit.Schedule(overlap_del=True)) as one:
        actor = one.actor()
        for number in range(10):
            actor.push({"id": np.array([number])})
        learner = one.learner()
        with pytest.raises(HandOverError, match="int64"):
            learner.pull()
        one.save(tmp_path / "c")
        with restore(tmp_path / "c", backend="reference") as other:
            assert len(other.learner().pull()) == 4


# What can't be read


def damaged(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways to damage the checkpoint in `path`."""
    for entry in sorted(path.iterdir()):
        if entry.name == "lock":
            continue
        whole = entry.read_bytes()
        for keep in (0, 1, len(whole) // 2, len(whole) - 3):
            yield f"{entry.name} cut to {keep}", lambda e=entry, w=whole, k=keep: e.write_bytes(w[:k])
        for at in (0, 8, 9, len(whole) // 3, len(whole) // 2, len(whole) - 2):
            flipped = bytearray(whole)
            flipped[at] ^= 0x20
            yield f"{entry.name} flipped at {at}", lambda e=entry, w=bytes(flipped): e.write_bytes(w)
        yield f"{entry.name} gone", entry.unlink
        yield f"{entry.name} longer", lambda e=entry, w=whole: e.write_bytes(w + b"\0")


def test_what_is_torn_truncated_or_flipped_is_no_checkpoint(tmp_path):
    path = tmp_path / "c"
    with store(derive={"next_obs": conduit.Next("obs")}, sampler=conduit.Prioritized()) as one:
        actor = one.actor()
        for number in range(20):
            actor.push(
                step(number, truncated=np.array([number % 4 == 3])), final=step(900) if number % 4 == 3 else None
            )
        one.learner().pull()
        one.save(path)
    whole = contents(path)
    tried = 0
    for what, damage in list(damaged(path)):
        damage()
        broken = contents(path)
        with no_thread_left():
            assert raised_by(lambda: restore(path).close()) is not None, f"{what}: was restored"
        assert contents(path) == broken, what
        for name, content in whole.items():
            (path / name).write_bytes(content)
        tried += 1
    assert tried >= 40
    assert live_ids(path) == list(range(20))


def test_what_is_no_stores_checkpoint_or_a_newer_ones_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        restore(tmp_path / "nowhere")
    (tmp_path / "file").write_text("{}")
    with pytest.raises(CheckpointError, match="file"):
        restore(tmp_path / "file")
    with Archive(tmp_path / "foreign").writing("me", None) as writer:
        writer.commit({"something": "else"})
    with no_thread_left(), pytest.raises(CheckpointError, match="foreign"):
        restore(tmp_path / "foreign")
    with Archive(tmp_path / "newer").writing("me", None) as writer:
        writer.commit({"content_version": 99})
    with (
        no_thread_left(),
        pytest.raises(CheckpointError, match=r"version 99; this Conduit reads version 1.*newer Conduit"),
    ):
        restore(tmp_path / "newer")


def test_a_kind_of_a_newer_conduit_is_named(tmp_path):
    with store(sampler=conduit.Recency(3.0)) as one:
        fill(one.actor(), 5)
        one.save(tmp_path / "c")
    archive = Archive(tmp_path / "c")
    reading = archive.open()
    content = dict(reading.content)
    content["settings"] = {**content["settings"], "sampler": {"kind": ["Telepathic", {}]}}
    with archive.writing(reading.owner, reading.generation) as writer:
        for name in reading.files:
            writer.keep(name)
        writer.commit(content)
    with no_thread_left(), pytest.raises(CheckpointError, match="Telepathic, which this Conduit doesn't know"):
        restore(tmp_path / "c")


# What must be given again, and what can't be another


@dataclass(frozen=True)
class Own:
    """A sampler of the user's."""

    shift: int = 0
    prioritized = False

    def start(self, capacity: int, seed: int, starts: Any = None) -> Any:
        return conduit.Uniform().start(capacity, seed + self.shift, starts)


def test_what_is_the_users_own_must_be_given_again(tmp_path):
    half = lambda number: 0.5  # noqa: E731
    for place, sampler in enumerate((Own(3), conduit.Prioritized(beta=half))):
        path = tmp_path / str(place)
        with store(sampler=sampler, tables={"more": conduit.Table(sampler)}) as one:
            fill(one.actor(), 20)
            one.sample(4)
            one.save(path)
            with (
                no_thread_left(),
                pytest.raises(SettingError, match=r"sampler was .*(Own|Prioritized).*your own: give it again"),
            ):
                restore(path)
            with no_thread_left(), pytest.raises(SettingError, match=r"tables\['more'\].sampler was .*give it again"):
                restore(path, sampler=sampler)
            with no_thread_left(), pytest.raises(SettingError, match="can't go on from what it remembered"):
                restore(path, sampler=conduit.Lifo(), tables={"more": conduit.Table(sampler)})
            with restore(path, sampler=sampler, tables={"more": conduit.Table(sampler)}) as other:
                for table in ("main", "more"):
                    assert printed(one.sample(4, table=table)) == printed(other.sample(4, table=table))


def test_settings_that_can_not_be_others_are_refused_and_nothing_is_left(tmp_path):
    more = {"more": conduit.Table(conduit.Lifo())}
    with store(sampler=conduit.Prioritized(), tables=more, ingestion=[doubles]) as one:
        fill(one.actor(), 20)
        one.save(tmp_path / "c")
    before = contents(tmp_path / "c")
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, SettingError, r"had the hooks \['doubles'\]; got \[\]"),
        ({"ingestion": [doubles, doubles]}, SettingError, "Give the same"),
        ({"sampler": conduit.Uniform()}, SettingError, "sampler was a Prioritized, and Uniform"),
        ({"tables": {}}, SettingError, r"restore\(tables=\[\]\).*are \['more'\]"),
        ({"tables": {"less": conduit.Table()}}, SettingError, r"tables=\['less'\]"),
        ({"tables": {"more": conduit.Lifo()}}, SettingError, r"tables\['more'\] is Lifo\(\): expected a conduit.Table"),
        ({"tables": {"more": None}}, SettingError, r"tables\['more'\] is None: expected a conduit.Table"),
        ({"tables": ["more"]}, SettingError, r"tables=\['more'\]: expected a dict of names"),
        ({"tables": 3}, SettingError, r"tables=3: expected a dict of names"),
        ({"tables": 0}, SettingError, r"tables=0: expected a dict of names"),
        ({"sampler": 3}, SettingError, r"sampler=3: expected a sampler"),
        ({"tables": {"more": conduit.Table(conduit.Fifo())}}, SettingError, r"tables\['more'\].sampler was a Lifo"),
        ({"lanes": "perhaps"}, SettingError, "'cut' or 'continue'"),
        ({"capacity": 3}, conduit.errors.CapacityError, "batch_size=4"),
        ({"capacity": 0}, SettingError, "capacity"),
        ({"backend": "abacus"}, conduit.errors.UnknownBackendError, "abacus"),
        ({"limiter": conduit.MinSize(1000)}, SettingError, "capacity=32"),
        ({"schedule": conduit.Schedule(g_del=0)}, conduit.errors.ScheduleError, "g_del"),
        ({"timeout_s": -1}, SettingError, "timeout"),
        ({"budgets": {"pageable": "64B"}, "ingestion": [doubles]}, conduit.errors.CapacityError, "pageable"),
    ]
    for settings, error, says in bad:
        with no_thread_left(), pytest.raises(error, match=says):
            restore(tmp_path / "c", **settings).close()
    assert contents(tmp_path / "c") == before
    with restore(tmp_path / "c", ingestion=[doubles], sampler=conduit.Prioritized(alpha=0.1)) as other:
        assert "alpha=0.1" in other.info()["tables"]["main"]["sampler"]


@pytest.mark.parametrize("sampler", [conduit.Uniform(), conduit.Fifo()], ids=repr)
@pytest.mark.parametrize("given", [None, 1, 2, 3])
@pytest.mark.parametrize("saved", [None, 1, 2])
def test_a_table_gives_rows_as_often_as_it_did_when_it_was_saved(tmp_path, sampler, saved, given):
    with store(tables={"p": conduit.Table(sampler, max_times_sampled=saved)}) as one:
        fill(one.actor(), 12)
        one.sample(8, table="p")
        one.save(tmp_path / "c")
        tables = {"p": conduit.Table(sampler, max_times_sampled=given)}
        if given == saved:
            with restore(tmp_path / "c", tables=tables) as other:
                assert printed(one.sample(4, table="p")) == printed(other.sample(4, table="p"))
            return
    with (
        no_thread_left(),
        pytest.raises(
            SettingError, match=rf"tables\['p'\] was saved with max_times_sampled={saved}, and {given} can't go on"
        ),
    ):
        restore(tmp_path / "c", tables=tables)


def test_a_limiter_can_be_lifted_when_it_is_restored(tmp_path):
    # reverb#103: hangs because a loaded checkpoint brought back a blocking limiter.
    with store(limiter=conduit.SampleToInsertRatio(1.0, 4, 8.0), batch_size=2) as one:
        fill(one.actor(), 12)
        one.save(tmp_path / "c")
    with (
        restore(tmp_path / "c", timeout_s=0.05) as other,
        pytest.raises(WaitTimeout, match=r"SampleToInsertRatio.*12 inserted"),
    ):
        fill(other.actor(), 1, first=12)
    with restore(tmp_path / "c", limiter=conduit.MinSize(1)) as other:
        fill(other.actor(), 30, first=12)


@pytest.mark.parametrize("own_nodes", [False, True])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"id": np.zeros(1)}, "leaf 'id' has dtype float64; expected int32"),
        ({"id": np.zeros((1, 2), np.int32)}, r"leaf 'id' has shape \(1, 2\); expected \(rows, \)"),
        ({"id": np.int32(3)}, "leaf 'id'.* no axes|leaf 'id' has shape"),
        ({"id": None}, "missing 'id'|has the leaves state;"),
        ({"more": np.zeros(1)}, "unexpected 'more'|has the leaves id, state, more;"),
    ],
)
def test_an_example_of_another_form_than_the_rows_names_the_leaf(tmp_path, own_nodes, wrong, says):
    def rows(**changed: Any) -> Any:
        leaves = {"id": np.zeros(1, np.int32), "state": np.zeros(1, np.float32)} | changed
        leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
        return OrderedDict(leaves) if own_nodes else leaves

    with store() as one:
        one.actor().push(rows())
        one.save(tmp_path / "c")
    for example, words in (
        (rows(**wrong), says),
        (3, "got int"),
        (float("nan"), "got float"),
        ({}, "at least one leaf|missing"),
    ):
        with no_thread_left(), pytest.raises(SchemaError, match=rf"^restore\(example=…\).*({words})"):
            restore(tmp_path / "c", example=example)
    restore(tmp_path / "c", example=rows()).close()


def test_an_example_is_looked_at_even_where_no_row_says_what_it_should_be(tmp_path):
    with store() as one:
        one.save(tmp_path / "c")
    with no_thread_left(), pytest.raises(SchemaError, match=r"restore\(example=…\): leaf .*got int, which is no array"):
        restore(tmp_path / "c", example=3)
    restore(tmp_path / "c", example=torch.zeros(2)).close()


@each_backend
def test_a_push_of_another_schema_names_the_leaf(tmp_path, backend):
    with store(backend=backend) as one:
        fill(one.actor(), 5)
        one.save(tmp_path / "c")
    with restore(tmp_path / "c") as other:
        actor = other.actor()
        with pytest.raises(SchemaError, match=r"obs/state.*float64.*float32"):
            actor.push({**step(5), "obs": {**step(5)["obs"], "state": np.zeros(1)}})
        with pytest.raises(SchemaError, match="extra"):
            actor.push(step(5, extra=np.zeros(1)))
        fill(actor, 1, first=5)
        assert len(other) == 6


def test_rows_that_a_device_can_not_hold_name_their_leaf(tmp_path):
    with store(backend="torch") as one:
        one.actor().push({"big": np.arange(1), "fine": np.zeros(1, np.float32)})
        one.save(tmp_path / "c")
    before = contents(tmp_path / "c")
    with no_thread_left(), pytest.raises(SchemaError, match="'big' is int64, which JAX narrows"):
        restore(tmp_path / "c", backend="jax", placement="device:0")
    assert contents(tmp_path / "c") == before
    with restore(tmp_path / "c", backend="jax") as other:
        assert other.read().data["big"].tolist() == [0]
