"""RLlib: episodes as Python objects."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np
from workloads import ALPHA, BETA, EPISODE, GAMMA, N_STEP, Contender, Errors, Peer, Workload, transitions_of

MOST_ROWS = 100_000
"""Every row is a tuple in a list, and every insertion that evicts walks it."""


def _episode(rows: dict[str, np.ndarray], start: int, stop: int) -> Any:
    episode = importlib.import_module("ray.rllib.env.single_agent_episode").SingleAgentEpisode
    return episode(
        observations=[*rows["obs"][start:stop], rows["next_obs"][stop - 1]],
        actions=list(rows["action"][start:stop]),
        rewards=list(rows["reward"][start:stop]),
        terminated=bool(rows["terminated"][stop - 1]),
        len_lookback_buffer=0,
    )


def _buffer(work: Workload, prioritized: bool = False) -> tuple[Any, int]:
    module = importlib.import_module("ray.rllib.utils.replay_buffers")
    capacity = min(work.capacity, MOST_ROWS)
    if prioritized:
        buffer = module.PrioritizedEpisodeReplayBuffer(capacity, alpha=ALPHA)
    else:
        buffer = module.EpisodeReplayBuffer(capacity)
    rows = transitions_of(work.rows, EPISODE)
    for _ in range(capacity // EPISODE):
        buffer.add(_episode(rows, 0, EPISODE).to_numpy())
    return buffer, capacity


def uniform(work: Workload, n_step: int = 1) -> list[Contender]:
    buffer, capacity = _buffer(work)
    call = partial(buffer.sample, num_items=work.count, n_step=n_step, gamma=GAMMA, sample_episodes=True)
    return [Contender("rllib", call, note="a list of episode objects, not arrays", capacity=capacity)]


def prioritized(work: Workload) -> list[Contender]:
    buffer, capacity = _buffer(work, prioritized=True)
    errors = Errors(work.count)

    def draw_and_update() -> Any:
        episodes = buffer.sample(num_items=work.count, n_step=1, beta=BETA)
        buffer.update_priorities(errors.now)
        return episodes

    note = "a list of episode objects, not arrays"
    return [Contender("rllib", draw_and_update, errors.draw, note, capacity)]


def sequence(work: Workload) -> list[Contender]:
    buffer, capacity = _buffer(work)
    sizes = {"batch_size_B": work.count, "batch_length_T": work.length}
    views = partial(buffer.sample, **sizes, n_step=1, sample_episodes=True)
    arrays = partial(buffer.sample, **sizes)
    return [
        Contender("rllib episodes", views, note="objects with views, nothing gathered", capacity=capacity),
        Contender("rllib arrays", arrays, note="crosses episodes, marks where", capacity=capacity),
    ]


def push(work: Workload, prioritized: bool = False) -> list[Contender]:
    """A step of each of `count` environments: episodes of one row."""
    buffer, capacity = _buffer(work, prioritized)
    rows = transitions_of(work.rows, work.count)
    made: list[Any] = []

    def step() -> None:
        made[:] = [_episode(rows, row, row + 1) for row in range(work.count)]

    note = "episodes of one row, made beforehand"
    return [Contender("rllib", lambda: buffer.add(made), step, note, capacity)]


PEER = Peer(
    "rllib",
    ("ray", "gymnasium"),
    ("ray", "torch"),
    {
        "uniform": uniform,
        "n_step": partial(uniform, n_step=N_STEP),
        "prioritized": prioritized,
        "sequence": sequence,
        "push": push,
        "push_prioritized": partial(push, prioritized=True),
    },
)
