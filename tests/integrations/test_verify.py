"""`conduit verify`: a checkpoint is whole, or what is wrong with it is said in a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import conduit


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conduit.cli", "verify", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_checkpoint_is_whole_until_a_byte_of_it_changes(tmp_path: Path) -> None:
    with conduit.Store(backend="reference", capacity=8, batch_size=2) as store:
        store.actor(lanes=4).push({"id": np.arange(4)})
        store.save(tmp_path / "saved")
    whole = verify(tmp_path / "saved")
    assert whole.returncode == 0
    assert f"{tmp_path / 'saved'} is whole: generation 1" in whole.stdout
    (rows,) = (tmp_path / "saved").glob("rows*")
    data = bytearray(rows.read_bytes())
    data[-1] ^= 1
    rows.write_bytes(data)
    torn = verify(tmp_path / "saved")
    assert torn.returncode != 0
    assert "CheckpointError" in torn.stderr
    assert rows.name in torn.stderr
    assert "Traceback" not in torn.stderr
