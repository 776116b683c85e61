"""Double DQN with prioritized replay on CartPole-v1, in PyTorch: an off-policy trainer with Conduit."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import closing

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import conduit
from conduit.demos.trained import SOLVED, Progress, Trained, evaluate, followed
from conduit.integrations.gymnasium import steps

TITLE = "Double DQN on CartPole-v1 in PyTorch, off-policy with priorities"
BACKEND = "torch"
IN_LINE = conduit.Schedule()
OVERLAPPED = conduit.Schedule(overlap_ing=True, overlap_del=True)

LANES = 8
STEPS = 16_000
"""Of all lanes, at most: one batch is trained on after each."""
BATCH = 256
CAPACITY = 50_000
WARM_UP = 125
"""Steps that act at random and train nothing."""
ITERATION_STEPS = 1
CHECK_EVERY = 500
"""Steps after which the greedy policy is tried, and training ends if it is good."""
COMPARED_STEPS = 400
EXPLORE = 3_000
"""Steps over which the chance of a random action falls from 1 to 0.05."""
GAMMA = 0.99
TAU = 0.05
"""How far the target network moves towards the trained one after each update."""


def q_network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def train(
    backend: str = BACKEND,
    seed: int = 0,
    train_steps: int = STEPS,
    schedule: conduit.Schedule | conduit.Auto = OVERLAPPED,
    progress: Progress = lambda done, returns: None,
) -> Trained:
    """A greedy policy after `train_steps` steps of all lanes, and where the seconds went."""
    torch.set_num_threads(1)  # the network is too small to split
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    online = q_network()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=STEPS)
    began_s = time.perf_counter()

    with (
        closing(gym.make_vec("CartPole-v1", LANES)) as envs,
        conduit.Store(
            backend=backend,
            capacity=CAPACITY,
            batch_size=BATCH,
            sampler=conduit.Prioritized(),
            seed=seed,
            schedule=schedule,
        ) as store,
    ):
        actor, learner = store.actor(lanes=LANES), store.learner(to="torch")
        stream = steps(envs, explorer(online, rng), seed=seed, action_dtype=np.int32)
        for done in range(train_steps):
            with store.rollout():
                actor.push(next(stream))
            progress(done + 1, stream.returns)
            if done < WARM_UP:
                continue
            batch = learner.pull()
            with store.update():
                td_error = update(online, target, optimizer, batch)
                decay.step()
            store.update_priorities(batch.info.keys, td_error.abs())
            if (done + 1) % CHECK_EVERY == 0 and np.mean(evaluate(greedy(target), seed=seed)) >= SOLVED:
                break
        return Trained(greedy(target), store.ledger, time.perf_counter() - began_s, followed(store))


def update(
    online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, batch: conduit.Batch
) -> torch.Tensor:
    """One step of double DQN on `batch`; the temporal-difference errors (B,) before it."""
    rows = batch.data
    with torch.no_grad():
        best = online(rows["next_obs"]).argmax(1, keepdim=True)
        following = target(rows["next_obs"]).gather(1, best)[:, 0]
        # A truncated episode would have gone on: only termination ends the sum. next_obs is the true last one.
        wanted = rows["reward"] + GAMMA * following * ~rows["terminated"]
    q = online(rows["obs"]).gather(1, rows["action"].long()[:, None])[:, 0]
    loss = (batch.info.weight * F.smooth_l1_loss(q, wanted, reduction="none")).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(online.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.lerp_(fast, TAU)
    return (wanted - q).detach()


def greedy(network: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        return network(torch.from_numpy(obs)).argmax(1).numpy()

    return act


def explorer(network: nn.Module, rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
    """Acts at random with a chance that falls from 1 to 0.05, else greedily."""
    act, calls = greedy(network), 0

    def explore(obs: np.ndarray) -> np.ndarray:
        nonlocal calls
        epsilon = max(0.05, 1.0 - calls / EXPLORE)
        calls += 1
        random = rng.integers(0, 2, LANES)
        return np.where(rng.random(LANES) < epsilon, random, act(obs))

    return explore
