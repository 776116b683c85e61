"""stable-baselines3: NumPy transitions, torch output."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from workloads import GAMMA, N_STEP, Contender, Peer, Workload, chunk_rows, columns_of, transitions_of


def _buffer(work: Workload, lanes: int = 1, kind: str = "ReplayBuffer", **settings: Any) -> Any:
    """Filled by writing its arrays: its `add` takes one step, and a million take minutes."""
    spaces = importlib.import_module("gymnasium.spaces")
    rows = transitions_of(work.rows, chunk_rows(work))
    obs = rows["obs"]
    image = obs.dtype == np.uint8
    space = spaces.Box(0 if image else -np.inf, 255 if image else np.inf, obs.shape[1:], obs.dtype.type)
    make = getattr(importlib.import_module("stable_baselines3.common.buffers"), kind)
    buffer = make(work.capacity, space, spaces.Discrete(2, dtype=np.int32), device="cpu", n_envs=lanes, **settings)
    columns = columns_of(work, rows)
    total = buffer.buffer_size * lanes
    for name, target in (
        ("obs", buffer.observations),
        ("next_obs", buffer.next_observations),
        ("action", buffer.actions),
        ("reward", buffer.rewards),
        ("terminated", buffer.dones),
    ):
        target[:] = columns[name][:total].reshape(target.shape)
    buffer.timeouts[:] = 0
    buffer.full = True
    return buffer


def uniform(work: Workload) -> list[Contender]:
    buffer = _buffer(work)
    return [Contender("sb3", lambda: tuple(buffer.sample(work.count)))]


def n_step(work: Workload) -> list[Contender]:
    buffer = _buffer(work, kind="NStepReplayBuffer", n_steps=N_STEP, gamma=GAMMA)
    return [Contender("sb3", lambda: tuple(buffer.sample(work.count)))]


def push(work: Workload) -> list[Contender]:
    buffer, rows = _buffer(work, lanes=work.count), transitions_of(work.rows, work.count)
    infos: list[dict[str, Any]] = [{} for _ in range(work.count)]

    def add() -> None:
        buffer.add(rows["obs"], rows["next_obs"], rows["action"], rows["reward"], rows["terminated"], infos)

    return [Contender("sb3", add)]


PEER = Peer(
    "sb3",
    ("stable_baselines3", "gymnasium"),
    ("stable-baselines3", "torch"),
    {"uniform": uniform, "n_step": n_step, "push": push},
)
