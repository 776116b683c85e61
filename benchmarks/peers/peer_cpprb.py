"""cpprb: C++ and Cython ring of arrays."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from workloads import ALPHA, BETA, GAMMA, N_STEP, Contender, Errors, Peer, Rows, Workload, episodes, fill, rows_of


def _columns(rows: Rows) -> dict[str, Any]:
    return {name: {"shape": leaf.shape[1:] or 1, "dtype": leaf.dtype} for name, leaf in rows.items()}


def _buffer(work: Workload, prioritized: bool = False) -> Any:
    cpprb = importlib.import_module("cpprb")
    columns = _columns(rows_of(work.rows, 1))
    if prioritized:
        buffer = cpprb.PrioritizedReplayBuffer(work.capacity, columns, alpha=ALPHA)
    else:
        buffer = cpprb.ReplayBuffer(work.capacity, columns)
    fill(work, lambda rows: buffer.add(**rows))
    return buffer


def uniform(work: Workload) -> list[Contender]:
    return [Contender("cpprb", partial(_buffer(work).sample, work.count))]


def _done(rows: Rows) -> Rows:
    """The end under the name that its n-step knows."""
    return {"done" if name == "terminated" else name: leaf for name, leaf in rows.items()}


def n_step(work: Workload) -> list[Contender]:
    cpprb = importlib.import_module("cpprb")
    settings = {"size": N_STEP, "gamma": GAMMA, "rew": "reward", "next": "next_obs"}
    buffer = cpprb.ReplayBuffer(work.capacity, _columns(_done(rows_of(work.rows, 1))), Nstep=settings)

    def push(rows: Rows) -> None:
        for each in episodes(rows):
            buffer.add(**_done(each))
            buffer.on_episode_end()

    fill(work, push)
    return [
        Contender("cpprb", partial(buffer.sample, work.count), note="reduced when pushed; wrong near an episode's end")
    ]


def prioritized(work: Workload) -> list[Contender]:
    buffer, errors = _buffer(work, prioritized=True), Errors(work.count)

    def draw_and_update() -> Any:
        batch = buffer.sample(work.count, beta=BETA)
        buffer.update_priorities(batch["indexes"], errors.now)
        return batch

    return [Contender("cpprb", draw_and_update, errors.draw)]


def push(work: Workload, prioritized: bool = False) -> list[Contender]:
    return [Contender("cpprb", partial(_buffer(work, prioritized).add, **rows_of(work.rows, work.count)))]


PEER = Peer(
    "cpprb",
    ("cpprb",),
    ("cpprb",),
    {
        "uniform": uniform,
        "n_step": n_step,
        "prioritized": prioritized,
        "push": push,
        "push_prioritized": partial(push, prioritized=True),
    },
)
