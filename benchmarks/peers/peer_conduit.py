"""Conduit, through its public API only, in line: no prefetch hides anything."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from workloads import ALPHA, BETA, Builder, Contender, Errors, Peer, Workload, episodes, fill, rows_of

if TYPE_CHECKING:
    from conduit import Store

BACKENDS = ("torch", "jax")


def _store(work: Workload, backend: str, prioritized: bool = False) -> Store:
    conduit = importlib.import_module("conduit")
    sampler = conduit.Prioritized(alpha=ALPHA, beta=BETA) if prioritized else conduit.Uniform()
    store = conduit.Store(backend=backend, capacity=work.capacity, batch_size=work.count, sampler=sampler)
    actor = store.actor()
    fill(work, lambda rows: [actor.push_trajectory(each) for each in episodes(rows)])
    return store


def _there(data: dict[str, Any], backend: str) -> dict[str, Any]:
    """A batch counts when it is there: JAX gathers asynchronously."""
    if backend == "jax":
        for leaf in data.values():
            leaf.block_until_ready()
    return data


def _uniform(work: Workload, backend: str) -> list[Contender]:
    store = _store(work, backend)
    learner = store.learner()
    return [
        Contender(f"conduit {backend} pull", lambda: _there(learner.pull().data, backend), close=store.close),
        Contender(f"conduit {backend} sample", lambda: _there(store.sample(work.count).data, backend)),
    ]


def _prioritized(work: Workload, backend: str) -> list[Contender]:
    store, errors = _store(work, backend, prioritized=True), Errors(work.count)
    learner = store.learner()

    def draw_and_update() -> object:
        batch = learner.pull()
        store.update_priorities(batch.info.keys, errors.now)
        return _there(batch.data, backend)

    return [Contender(f"conduit {backend}", draw_and_update, errors.draw, close=store.close)]


def _push(work: Workload, backend: str, prioritized: bool = False) -> list[Contender]:
    store = _store(work, backend, prioritized)
    call = partial(store.actor(lanes=work.count).push, rows_of(work.rows, work.count))
    return [Contender(f"conduit {backend}", call, close=store.close)]


def _each_backend(build: Callable[[Workload, str], list[Contender]]) -> Builder:
    return lambda work: [contender for backend in BACKENDS for contender in build(work, backend)]


# Sequences and n-step join here, as "sequence" and "n_step", once the store follows links.
BUILDERS: dict[str, Builder] = {
    "uniform": _each_backend(_uniform),
    "prioritized": _each_backend(_prioritized),
    "push": _each_backend(_push),
    "push_prioritized": _each_backend(partial(_push, prioritized=True)),
}
PEER = Peer("conduit", ("torch", "jax", "optree", "conduit"), ("conduit-rl", "torch", "jax", "numba"), BUILDERS)
