"""PPO on CartPole-v1, in JAX: an on-policy trainer with Conduit."""

from __future__ import annotations

import time
from contextlib import closing
from functools import cache, partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium.vector import AutoresetMode

import conduit
from conduit.demos.trained import Progress, Trained, followed
from conduit.integrations.gymnasium import steps
from conduit.transforms import GAE, Normalize

TITLE = "PPO on CartPole-v1 in JAX, on-policy"
BACKEND = "jax"

LANES = 8
ROLLOUT = 128
"""Steps of all lanes in an iteration's rollout."""
ITERATION_STEPS = ROLLOUT
ITERATIONS = 100
STEPS = ITERATIONS * ROLLOUT
EPOCHS = 8
MINI_BATCHES = 4
GAMMA, LAM = 0.99, 0.95
CLIP = 0.2
ENTROPY = 0.01

# On-policy granularities are fractions k/M of an iteration's M mini-batches.
IN_LINE = conduit.Schedule()
OVERLAPPED = conduit.Schedule(overlap_ing=True, g_ing=1 / MINI_BATCHES, overlap_del=True)
COMPARED_STEPS = 20 * ROLLOUT

Params = Any


def train(
    backend: str = BACKEND,
    seed: int = 0,
    train_steps: int = STEPS,
    schedule: conduit.Schedule | conduit.Auto = OVERLAPPED,
    progress: Progress = lambda done, returns: None,
) -> Trained:
    """A greedy policy after `train_steps` steps of all lanes, rounded up to whole iterations, and where the seconds went."""
    params = initial(jax.random.key(seed))
    state = optimizer().init(params)
    rng = np.random.default_rng(seed)
    began_s = time.perf_counter()

    def act(obs: np.ndarray) -> dict[str, np.ndarray]:
        return sample(params, obs, rng.gumbel(size=(LANES, 2)).astype(np.float32))

    def critic(obs: np.ndarray) -> np.ndarray:
        return np.asarray(value_of(params, obs))

    # On-policy wants SAME_STEP: every step of the rollout is then a row in every lane.
    envs = gym.make_vec("CartPole-v1", LANES, "sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP})
    with (
        closing(envs),
        conduit.Store(
            backend=backend,
            mode="on_policy",
            rollout_unit=ROLLOUT * LANES,
            batch_size=ROLLOUT * LANES // MINI_BATCHES,
            epochs=EPOCHS,
            ingestion=[GAE(GAMMA, LAM), Normalize("advantage")],
            seed=seed,
            schedule=schedule,
        ) as store,
    ):
        actor, learner = store.actor(lanes=LANES), store.learner(to="jax")
        stream = steps(envs, act, seed=seed, next_obs=False, value=critic)
        for iteration in range(-(-train_steps // ROLLOUT)):
            with store.rollout():
                for _ in range(ROLLOUT):
                    actor.push(next(stream))
                actor.end_unit(bootstrap={"value": critic(stream.obs)})
            with store.update():
                for batch in learner:
                    params, state = update(params, state, batch.data)
            store.advance()
            progress((iteration + 1) * ROLLOUT, stream.returns)
        return Trained(partial(greedy, params), store.ledger, time.perf_counter() - began_s, followed(store))


def initial(key: jax.Array) -> Params:
    """Two networks of two hidden layers: the actor's 2 logits and the critic's value."""

    def layers(key: jax.Array, outputs: int, last_scale: float) -> list[dict[str, jax.Array]]:
        sizes, keys = [4, 64, 64, outputs], jax.random.split(key, 3)
        scales = [2**0.5, 2**0.5, last_scale]
        return [
            {"w": jax.nn.initializers.orthogonal(scale)(k, (i, o)), "b": jnp.zeros(o)}
            for k, scale, i, o in zip(keys, scales, sizes[:-1], sizes[1:], strict=True)
        ]

    actor, critic = jax.random.split(key)
    return {"actor": layers(actor, 2, 0.01), "critic": layers(critic, 1, 1.0)}


def network(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    *hidden, last = layers
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


@jax.jit
def sample(params: Params, obs: jax.Array, gumbel: jax.Array) -> dict[str, jax.Array]:
    """Actions drawn from the policy (by the Gumbel trick), with what PPO must know of them later."""
    log_probs = jax.nn.log_softmax(network(params["actor"], obs))
    action = jnp.argmax(log_probs + gumbel, axis=-1)
    log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=-1)[:, 0]
    return {"action": action, "log_prob": log_prob, "value": value_of(params, obs)}


@jax.jit
def value_of(params: Params, obs: jax.Array) -> jax.Array:
    return network(params["critic"], obs)[:, 0]


@jax.jit
def greedy(params: Params, obs: jax.Array) -> jax.Array:
    return jnp.argmax(network(params["actor"], obs), axis=-1)


def loss(params: Params, rows: dict[str, jax.Array]) -> jax.Array:
    """The clipped surrogate, the squared error of the value, and a bonus for entropy."""
    log_probs = jax.nn.log_softmax(network(params["actor"], rows["obs"]))
    log_prob = jnp.take_along_axis(log_probs, rows["action"][:, None], axis=-1)[:, 0]
    ratio = jnp.exp(log_prob - rows["log_prob"])
    gain = jnp.minimum(ratio * rows["advantage"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * rows["advantage"])
    error = value_of(params, rows["obs"]) - rows["value_target"]
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return -gain.mean() + 0.5 * (error**2).mean() - ENTROPY * entropy.mean()


@cache
def optimizer() -> optax.GradientTransformation:
    rate = optax.linear_schedule(2.5e-3, 0.0, ITERATIONS * EPOCHS * MINI_BATCHES)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))


@jax.jit
def update(params: Params, state: optax.OptState, rows: dict[str, jax.Array]) -> tuple[Params, optax.OptState]:
    gradient = jax.grad(loss)(params, rows)
    change, state = optimizer().update(gradient, state)
    return optax.apply_updates(params, change), state
