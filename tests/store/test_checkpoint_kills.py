"""Stores whose process is killed at random moments of a save under load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_after_ten_kills_the_old_checkpoint_or_the_new_one_is_whole_and_right(tmp_path):
    command = [
        sys.executable,
        "benchmarks/faults.py",
        "--kills",
        "10",
        "--seed",
        "1",
        "--quick",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["whole"] == 10
    assert figures["with_files_of_the_killed_left"] > 0
