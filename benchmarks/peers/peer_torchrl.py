"""torchrl: TensorDicts in a LazyTensorStorage."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from workloads import ALPHA, BETA, GAMMA, N_STEP, Contender, Errors, Peer, Rows, Workload, fill, rows_of


def _tensordict(rows: Rows) -> Any:
    torch, tensordict = importlib.import_module("torch"), importlib.import_module("tensordict")
    count = len(rows["obs"])
    return tensordict.TensorDict({name: torch.from_numpy(leaf.copy()) for name, leaf in rows.items()}, [count])


def _filled(work: Workload, buffer: Any) -> Any:
    fill(work, lambda rows: buffer.extend(_tensordict(rows)))
    return buffer


def _buffer(work: Workload, prioritized: bool = False) -> Any:
    data = importlib.import_module("torchrl.data")
    storage = data.LazyTensorStorage(work.capacity)
    if prioritized:
        buffer = data.TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=storage, batch_size=work.count, priority_key="td_error"
        )
    else:
        buffer = data.ReplayBuffer(storage=storage, batch_size=work.count)
    return _filled(work, buffer)


def uniform(work: Workload) -> list[Contender]:
    return [Contender("torchrl", _buffer(work).sample)]


def prioritized(work: Workload) -> list[Contender]:
    torch, data = importlib.import_module("torch"), importlib.import_module("torchrl.data")
    sampler = data.replay_buffers.samplers.PrioritizedSampler(work.capacity, alpha=ALPHA, beta=BETA)
    buffer = _filled(
        work,
        data.ReplayBuffer(storage=data.LazyTensorStorage(work.capacity), sampler=sampler, batch_size=work.count),
    )
    errors = Errors(work.count)

    def draw_and_update() -> Any:
        batch, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], torch.from_numpy(errors.now))
        return batch

    return [Contender("torchrl", draw_and_update, errors.draw, note="its C++ trees rebuilt for this torch")]


def sequence(work: Workload) -> list[Contender]:
    data = importlib.import_module("torchrl.data")
    sampler = data.replay_buffers.samplers.SliceSampler(
        slice_len=work.length, end_key="terminated", cache_values=True, strict_length=True
    )
    storage = data.LazyTensorStorage(work.capacity)
    buffer = _filled(work, data.ReplayBuffer(storage=storage, sampler=sampler, batch_size=work.drawn))
    return [Contender("torchrl", buffer.sample, note="episode starts cached: right only while nothing is pushed")]


def n_step(work: Workload) -> list[Contender]:
    torch, tensordict = importlib.import_module("torch"), importlib.import_module("tensordict")
    data = importlib.import_module("torchrl.data")
    transforms = importlib.import_module("torchrl.envs.transforms")
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(work.capacity),
        transform=transforms.MultiStepTransform(n_steps=N_STEP, gamma=GAMMA),
        batch_size=work.count,
    )

    def extend(rows: Rows) -> None:
        leaf = {name: torch.from_numpy(each.copy()) for name, each in rows.items()}
        count = [len(rows["obs"])]
        ends = leaf["terminated"].unsqueeze(-1)
        after = {
            "obs": leaf["next_obs"],
            "reward": leaf["reward"].unsqueeze(-1),
            "done": ends,
            "terminated": ends.clone(),
        }
        step = {"obs": leaf["obs"], "action": leaf["action"], "next": tensordict.TensorDict(after, count)}
        buffer.extend(tensordict.TensorDict(step, count))

    fill(work, extend)
    return [Contender("torchrl", buffer.sample, note="reduced when pushed; bootstraps past terminations")]


def push(work: Workload, prioritized: bool = False) -> list[Contender]:
    rows = _tensordict(rows_of(work.rows, work.count))
    return [Contender("torchrl", partial(_buffer(work, prioritized).extend, rows))]


PEER = Peer(
    "torchrl",
    ("torchrl", "tensordict"),
    ("torchrl", "tensordict", "torch"),
    {
        "uniform": uniform,
        "prioritized": prioritized,
        "sequence": sequence,
        "n_step": n_step,
        "push": push,
        "push_prioritized": partial(push, prioritized=True),
    },
)
