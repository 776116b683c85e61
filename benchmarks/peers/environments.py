"""The peers' environments, with the releases that were compared. They clash, so each group has its own."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"  # first and alone: the others would bring another
ENVIRONMENTS: dict[str, list[list[str]]] = {
    "flock": [
        [TORCH],
        [
            TORCH,
            "torchrl==0.14.1",
            "cpprb==11.0.0",
            "stable-baselines3==2.9.2",
            "numba==0.68.1",
            "numpy==2.4.6",
            "jax==0.10.2",
            "flashbax==0.1.3",
            "tianshou==2.0.1",
        ],
    ],
    "rllib": [[TORCH], [TORCH, "ray[rllib]==2.60.0"]],
    "reverb": [["dm-reverb[tensorflow]==0.14.0"]],
}
_PATHS = (
    "import importlib.util as u, sysconfig; s = lambda name: u.find_spec(name).submodule_search_locations[0];"
    "print(s('torch'), s('torchrl'), sysconfig.get_path('include'), sep='\\n')"
)


def make(folder: Path) -> list[str]:
    """Makes all environments under `folder` and returns the options that name those that could be made."""
    options = []
    for name, steps in ENVIRONMENTS.items():
        python = folder / name / "bin" / "python"
        print("making", python.parent.parent, flush=True)
        venv.create(python.parent.parent, with_pip=True)
        try:
            for packages in steps:
                subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
            if name == "flock":
                _rebuild_trees(python)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        options.append(f"--env {name}={python}")
    return options


def _rebuild_trees(python: Path) -> None:
    """torchrl's wheel was compiled against a newer torch; without its trees its prioritized sampler does not run. Their
    C++ sources are in the wheel: about a minute with g++."""
    found = subprocess.run([python, "-c", _PATHS], check=True, capture_output=True, text=True).stdout.split("\n")
    torch, torchrl, include = map(Path, found[:3])
    sources = torchrl / "csrc"
    (old,) = torchrl.glob("_torchrl*.so")
    built = old.with_suffix(".new")
    headers = (torchrl.parent, torch / "include", torch / "include/torch/csrc/api/include", include)
    libraries = ("torch", "torch_cpu", "torch_python", "c10")
    subprocess.run(
        [
            "g++",
            *("-O3", "-std=c++20", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=_torchrl"),
            *(f"-I{path}" for path in headers),
            *(sources / "pybind.cpp", sources / "utils.cpp"),
            *(f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"),
            *(f"-l{name}" for name in libraries),
            *("-o", built),
        ],
        check=True,
    )
    built.replace(old)
