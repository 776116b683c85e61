"""Conduit, through its public API only, in line: no prefetch hides anything."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from workloads import (
    ALPHA,
    BETA,
    EPISODE,
    GAMMA,
    N_STEP,
    Builder,
    Contender,
    Errors,
    Peer,
    Rows,
    Workload,
    chunk_rows,
    episodes,
    fill,
    rows_of,
)

if TYPE_CHECKING:
    from conduit import Batch, Store


@dataclass(frozen=True)
class Home:
    """A backend, where its rows lie, and whether priorities may use numba where it is installed."""

    backend: str
    placement: str = "auto"
    numba: bool = True

    def named(self, call: str = "") -> str:
        """A contender's name."""
        rows = "" if self.placement == "auto" else f", rows on {self.placement}"
        return f"conduit {self.backend} {call}".rstrip() + rows + ("" if self.numba else ", without numba")

    def there(self, batch: Batch) -> Any:
        """The batch's leaves when they are there: JAX gathers asynchronously."""
        data: Any = batch.data
        if self.backend == "jax":
            for leaf in data.values():
                leaf.block_until_ready()
        return data


# Rows on placement="device:0" were tried for JAX: on a CPU the compiled gather took 1.6 to 4 times as long as pageable rows do.


def _store(work: Workload, home: Home) -> Store:
    conduit = importlib.import_module("conduit")
    item = None
    if work.kind == "sequence":
        item = conduit.Sequence(work.length)
    elif work.kind in ("n_step", "push_linked"):
        item = conduit.NStep(N_STEP, GAMMA)
    prioritized = work.kind in ("prioritized", "push_prioritized")
    os.environ["CONDUIT_NUMBA"] = str(int(home.numba))  # Read when the store is made.
    store = conduit.Store(
        backend=home.backend,
        placement=home.placement,
        capacity=work.capacity,
        batch_size=work.count,
        sampler=conduit.Prioritized(alpha=ALPHA, beta=BETA) if prioritized else conduit.Uniform(),
        item=item,
    )
    actor = store.actor()
    fill(work, lambda rows: [actor.push_trajectory(each) for each in episodes(rows)])
    return store


def _draws(work: Workload, home: Home) -> list[Contender]:
    store = _store(work, home)
    learner = store.learner()
    _check(work, learner.pull())
    found = [Contender(home.named("pull"), lambda: home.there(learner.pull()), close=store.close)]
    if work.kind == "uniform":
        found.append(Contender(home.named("sample"), lambda: home.there(store.sample(work.count))))
    return found


def _prioritized(work: Workload, home: Home) -> list[Contender]:
    store, errors = _store(work, home), Errors(work.count)
    learner = store.learner()
    _check(work, learner.pull())

    def draw_and_update() -> object:
        batch = learner.pull()
        store.update_priorities(batch.info.keys, errors.now)
        return home.there(batch)

    return [Contender(home.named(), draw_and_update, errors.draw, close=store.close)]


def _push(work: Workload, home: Home) -> list[Contender]:
    store = _store(work, home)
    call = partial(store.actor(lanes=work.count).push, rows_of(work.rows, work.count))
    return [Contender(home.named(), call, close=store.close)]


def _push_linked(work: Workload, home: Home) -> list[Contender]:
    """As lanes come in life: every one ends once in an episode's length, each in a step of its own."""
    store, rows, lane = _store(work, home), rows_of(work.rows, work.count), np.arange(work.count)
    steps = [rows | {"terminated": (number + 3 * lane) % EPISODE == EPISODE - 1} for number in range(EPISODE)]
    actor, at = store.actor(lanes=work.count), 0

    def move() -> None:
        nonlocal at
        at = (at + 1) % EPISODE

    note = f"links kept; in every third step a lane ends (after {EPISODE} rows)"
    return [Contender(home.named(), lambda: actor.push(steps[at]), move, note, close=store.close)]


def _check(work: Workload, batch: Batch) -> None:
    """AssertionError unless the batch is what a plain loop makes of the pushed rows: what is wrong isn't timed."""
    rows = rows_of(work.rows, chunk_rows(work))
    made = [_plainly(work, rows, int(key) % len(rows["obs"])) for key in batch.info.keys]
    data: Any = batch.data
    assert set(data) == set(made[0]), f"{sorted(data)} were drawn, {sorted(made[0])} expected"
    for name, leaf in data.items():
        np.testing.assert_allclose(np.asarray(leaf), np.stack([each[name] for each in made]), rtol=1e-6, err_msg=name)
    assert batch.info.mask is None or np.asarray(batch.info.mask).all()


def _plainly(work: Workload, rows: Rows, start: int) -> dict[str, Any]:
    """The entry that starts at row `start`."""
    left = EPISODE - start % EPISODE
    if work.kind == "sequence":
        assert left >= work.length, f"row {start}'s episode has only {left} more"
        return {name: leaf[start : start + work.length] for name, leaf in rows.items()}
    first = {name: leaf[start] for name, leaf in rows.items()}
    if work.kind != "n_step":
        return first
    steps = min(N_STEP, left)
    last = start + steps - 1
    return first | {
        "reward": sum(GAMMA**i * float(rows["reward"][start + i]) for i in range(steps)),
        "next_obs": rows["next_obs"][last],
        "terminated": rows["terminated"][last],
        "discount": 0.0 if rows["terminated"][last] else GAMMA**steps,
        "n_step": steps,
    }


def peer(backend: str) -> Peer:
    """Conduit with one backend, for a process in which the other isn't even imported."""
    plain = (Home(backend),)
    both = (*plain, Home(backend, numba=False)) if importlib.util.find_spec("numba") else plain
    builders: dict[str, Builder] = {
        "uniform": _at_each(plain, _draws),
        "sequence": _at_each(both, _draws),
        "n_step": _at_each(both, _draws),
        "prioritized": _at_each(both, _prioritized),
        "push": _at_each(plain, _push),
        "push_prioritized": _at_each(both, _push),
        "push_linked": _at_each(both, _push_linked),
    }
    name = f"conduit-{backend}"
    return Peer(name, (backend, "optree", "conduit"), ("conduit-rl", backend, "numba"), builders)


def _at_each(homes: tuple[Home, ...], build: Callable[[Workload, Home], list[Contender]]) -> Builder:
    return lambda work: [contender for home in homes for contender in build(work, home)]
