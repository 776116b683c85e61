"""What a demo's training gives, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from conduit.core.ledger import Ledger
from conduit.integrations.gymnasium import steps
from conduit.store import Store

SOLVED = 490.0
"""A mean return at which training may stop; 500 is the most there is."""

Progress = Callable[[int, Sequence[float]], None]
"""Called now and then with the steps done and the latest episodes' returns."""


@dataclass(frozen=True, slots=True)
class Trained:
    policy: Callable[[Any], Any]
    """Greedy: observations (lanes, 4) → actions (lanes,)."""
    ledger: Ledger
    train_s: float
    schedule: str
    """What was followed in the end, and why: a text; empty where nothing was trained."""


def followed(store: Store) -> str:
    """For `Trained.schedule`."""
    return store.explain().schedule if store.ledger.iteration_count else ""


def evaluate(policy: Callable[[Any], Any], episodes: int = 20, seed: int = 10_000) -> list[float]:
    """Undiscounted returns of one episode of CartPole-v1 in each of `episodes` lanes."""
    with closing(gym.make_vec("CartPole-v1", episodes)) as envs:
        stream = steps(envs, policy, seed=seed)
        returns = np.zeros(episodes)
        running = np.ones(episodes, np.bool_)
        while running.any():
            rows = next(stream).rows
            returns += np.where(running, rows["reward"], 0.0)
            running &= ~(rows["terminated"] | rows["truncated"])
    return returns.tolist()
