"""Checkpoints whose content follows from their generation; processes that commit them one after another, to be killed."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conduit.core.archive import Archive, Reading
from conduit.errors import CheckpointError

OWNER = "it"

KEPT = 3
"""In so many generations a file of rows is named, of which it was new in the first."""

STEPS = ("open", "write", "fsync", "close", "replace", "unlink", "ftruncate", "mkdir")
"""What the os module is asked to do while a checkpoint is written."""


def arrays_of(kind: str, generation: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([generation, len(kind)])
    return {
        "a": rng.integers(0, 255, (50, 3), np.uint8),
        "b": rng.random(20 + generation),
        "c": np.array(generation),
    }


def commit_next(path: Path) -> int:
    """The generation after the one that is there: older rows kept, one file of rows and the state new."""
    try:
        last = Archive(path).open()
        generation, rows = last.generation, last.content["rows"]
    except CheckpointError:
        generation, rows = None, []
    with Archive(path).writing(OWNER, generation) as writer:
        rows = [*rows[1 - KEPT :], None]
        for name in rows[:-1]:
            writer.keep(name)
        rows[-1] = writer.add("rows", arrays_of("rows", writer.generation)).name
        state = writer.add("state", arrays_of("state", writer.generation)).name
        return writer.commit({"rows": rows, "state": state})


def check_whole(path: Path) -> int:
    """The generation that is there, after every byte of it was compared to what it has to be."""
    Archive(path).verify()
    return Archive(path).read(_compare)


def names_of(path: Path) -> set[str]:
    """What the folder of the checkpoint should hold."""
    return {"lock", "manifest.json", *Archive(path).open().files}


def _compare(reading: Reading) -> int:
    generation, rows = reading.generation, reading.content["rows"]
    expected = {reading.content["state"]: arrays_of("state", generation)}
    expected |= {name: arrays_of("rows", generation - age) for age, name in enumerate(reversed(rows))}
    assert len(rows) == min(generation, KEPT)
    assert reading.files.keys() == expected.keys()
    for name, arrays in expected.items():
        found = reading.arrays(name)
        assert list(found) == list(arrays)
        for key in arrays:
            np.testing.assert_array_equal(found[key], arrays[key], strict=True)
    return generation


def wrap_steps(before: Callable[[str, int], None], after: Callable[[str, int], None]) -> Callable[[], None]:
    """Has both called around every step, with the step's name and number; a write is two, half of it each. Returns what ends it."""
    count = itertools.count()

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            number = next(count)
            before(name, number)
            result = real(*args, **kwargs)
            after(name, number)
            return result

        def halves(file: int, data: Any) -> int:
            done = step(file, data[: len(data) // 2])
            return done + step(file, data[done:])

        return halves if name == "write" else step

    real = {name: getattr(os, name) for name in STEPS}

    def end() -> None:
        for name in STEPS:
            setattr(os, name, real[name])

    for name in STEPS:
        setattr(os, name, wrapped(name, real[name]))
    return end


def kill_after_each_step(folder: Path) -> None:
    """Makes `folder`/0, 1, …: in each a checkpoint of generation 4, and what was left by a process that was to commit the next one
    and was killed after so many steps."""
    base = folder / "base"
    while not base.exists() or check_whole(base) < 4:
        commit_next(base)
    for last in itertools.count():
        shutil.copytree(base, folder / str(last))
        child = os.fork()
        if not child:
            wrap_steps(lambda name, number: None, functools.partial(_die, last))
            commit_next(folder / str(last))
            os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            return


def _die(last: int, name: str, number: int) -> None:
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)


def commit_for_ever(path: Path) -> None:
    while True:
        print(commit_next(path), flush=True)


if __name__ == "__main__":
    {"steps": kill_after_each_step, "ever": commit_for_ever}[sys.argv[1]](Path(sys.argv[2]))
