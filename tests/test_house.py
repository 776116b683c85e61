"""The house rules that no linter knows. Which module may import which is `lint-imports`' business (pyproject.toml)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

HEAVY = [
    "torch",
    "jax",
    "jaxlib",
    "mpi4py",
    "ray",
    "scipy",
    "pynvml",
    "matplotlib",
    "rich",
    "typer",
    "gymnasium",
    "optax",
    "numba",
]


def test_importing_conduit_imports_nothing_heavy():
    code = f"import sys, conduit; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


@pytest.mark.parametrize("path", sorted((ROOT / "conduit" / "core").rglob("*.py")), ids=lambda path: path.name)
def test_a_core_module_stays_under_400_lines(path: Path):
    assert len(path.read_text().splitlines()) < 400


def test_integrations_is_a_link_to_the_top_level_folder():
    link = ROOT / "conduit" / "integrations"
    assert link.is_symlink()
    assert link.resolve() == (ROOT / "integrations").resolve()
