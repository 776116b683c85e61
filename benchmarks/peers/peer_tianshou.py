"""tianshou: Batches of NumPy transitions."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np
from workloads import ALPHA, BETA, GAMMA, N_STEP, Contender, Errors, Peer, Rows, Workload, chunk_rows, transitions_of


def _batch(rows: Rows) -> dict[str, np.ndarray]:
    none = np.zeros(len(rows["obs"]), np.bool_)
    return {
        "obs": rows["obs"],
        "act": rows["action"],
        "rew": rows["reward"],
        "terminated": rows["terminated"],
        "truncated": none,
        "done": rows["terminated"],
        "obs_next": rows["next_obs"],
    }


def _filled(work: Workload, buffer: Any) -> Any:
    """By `update` with a chunk that was loaded whole: `add` takes one step, and a million take a minute."""
    data = importlib.import_module("tianshou.data")
    size = chunk_rows(work)
    chunk = data.ReplayBuffer.from_data(**_batch(transitions_of(work.rows, size)))
    for _ in range(-(-work.capacity // size)):
        buffer.update(chunk)
    return buffer


def _buffer(work: Workload) -> Any:
    """One environment's buffer: the vector buffer draws from each environment's part in turn, many times slower."""
    return _filled(work, importlib.import_module("tianshou.data").ReplayBuffer(work.capacity))


def uniform(work: Workload) -> list[Contender]:
    buffer = _buffer(work)
    return [Contender("tianshou", lambda: _leaves(buffer.sample(work.count)[0]))]


def prioritized(work: Workload) -> list[Contender]:
    data = importlib.import_module("tianshou.data")
    buffer = _filled(work, data.PrioritizedReplayBuffer(work.capacity, ALPHA, BETA))
    errors = Errors(work.count)

    def draw_and_update() -> Any:
        batch, index = buffer.sample(work.count)
        buffer.update_weight(index, errors.now)
        return _leaves(batch)

    return [Contender("tianshou", draw_and_update, errors.draw, note="draws from the global RNG")]


def n_step(work: Workload) -> list[Contender]:
    torch = importlib.import_module("torch")
    reduce = importlib.import_module("tianshou.algorithm.algorithm_base").Algorithm.compute_nstep_return
    buffer = _buffer(work)
    none = torch.zeros(work.count)

    def bootstrap(stored: Any, index: np.ndarray) -> Any:
        """The network's place: takes the observations it would see, answers 0."""
        stored.get(index, "obs_next")
        return none

    def draw() -> Any:
        batch, index = buffer.sample(work.count)
        return _leaves(reduce(batch, buffer, index, bootstrap, GAMMA, N_STEP))

    return [Contender("tianshou", draw, note="copies all rows' ends each draw")]


def push(work: Workload, prioritized: bool = False) -> list[Contender]:
    data = importlib.import_module("tianshou.data")
    rows = data.Batch(**_batch(transitions_of(work.rows, work.count)))
    if prioritized:
        buffer = data.PrioritizedVectorReplayBuffer(work.capacity, work.count, alpha=ALPHA, beta=BETA)
    else:
        buffer = data.VectorReplayBuffer(work.capacity, work.count)
    buffer.add(rows)
    for name in rows.get_keys():
        buffer._meta[name][:] = 1  # touches its memory, as the others' is
    return [Contender("tianshou", partial(buffer.add, rows))]


def _leaves(batch: Any) -> Any:
    return [batch[name] for name in batch.get_keys() if hasattr(batch[name], "nbytes")]


PEER = Peer(
    "tianshou",
    ("tianshou",),
    ("tianshou", "torch"),
    {
        "uniform": uniform,
        "prioritized": prioritized,
        "n_step": n_step,
        "push": push,
        "push_prioritized": partial(push, prioritized=True),
    },
)
