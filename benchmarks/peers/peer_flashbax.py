"""flashbax: JAX arrays, every call jitted, states donated, the random key split inside."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from workloads import ALPHA, Contender, Errors, Peer, Workload, fill, rows_of


def _jax() -> Any:
    return importlib.import_module("jax")


class _Drawing:
    """A filled buffer whose draws are one jitted call each."""

    def __init__(self, work: Workload, buffer: Any, shaped: Callable[[Any], Any]) -> None:
        jax = _jax()
        first = {name: leaf[0] for name, leaf in rows_of(work.rows, 1).items()}
        add = jax.jit(buffer.add, donate_argnums=0)
        self.state = buffer.init(first)
        self.key = jax.random.PRNGKey(0)
        fill(work, lambda rows: self._put(add, jax.tree.map(shaped, rows)))
        self._add = add

        def sample(state: Any, key: Any) -> tuple[Any, Any]:
            key, mine = jax.random.split(key)
            return buffer.sample(state, mine), key

        self._sample = jax.jit(sample)

    def draw(self) -> Any:
        sample, self.key = self._sample(self.state, self.key)
        return sample

    def drawn(self) -> Any:
        return _jax().block_until_ready(self.draw().experience)

    def push(self, rows: Any) -> None:
        self._put(self._add, rows)

    def _put(self, add: Callable[[Any, Any], Any], rows: Any) -> None:
        self.state = _jax().block_until_ready(add(self.state, rows))


def _items(work: Workload, count: int) -> _Drawing:
    buffer = importlib.import_module("flashbax").make_item_buffer(
        max_length=work.capacity, min_length=1, sample_batch_size=count, add_sequences=True
    )
    return _Drawing(work, buffer, lambda leaf: leaf)


def uniform(work: Workload) -> list[Contender]:
    found = [Contender("flashbax item", _items(work, work.count).drawn, note="JAX output")]
    buffer = importlib.import_module("flashbax").make_flat_buffer(
        max_length=work.capacity, min_length=2, sample_batch_size=work.count, add_sequences=True
    )
    flat = Contender("flashbax flat", _Drawing(work, buffer, lambda leaf: leaf).drawn, note="JAX output; rows in pairs")
    return [*found, flat]


def prioritized(work: Workload) -> list[Contender]:
    jax = _jax()
    buffer = importlib.import_module("flashbax").make_prioritised_flat_buffer(
        max_length=work.capacity,
        min_length=2,
        sample_batch_size=work.count,
        add_sequences=True,
        priority_exponent=ALPHA,
    )
    drawing, errors = _Drawing(work, buffer, lambda leaf: leaf), Errors(work.count)
    update = jax.jit(buffer.set_priorities, donate_argnums=0)

    def draw_and_update() -> Any:
        sample = drawing.draw()
        drawing.state = jax.block_until_ready(update(drawing.state, sample.indices, errors.now))
        return jax.block_until_ready(sample.experience)

    return [Contender("flashbax flat", draw_and_update, errors.draw, note="JAX output; rows in pairs")]


def sequence(work: Workload) -> list[Contender]:
    buffer = importlib.import_module("flashbax").make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=work.count,
        sample_sequence_length=work.length,
        period=1,
        min_length_time_axis=work.length,
        max_length_time_axis=work.capacity,
    )
    return [Contender("flashbax", _Drawing(work, buffer, lambda leaf: leaf[None]).drawn, note="JAX; crosses episodes")]


def _pushing(name: str, work: Workload, drawing: _Drawing) -> list[Contender]:
    rows = _jax().device_put(rows_of(work.rows, work.count))
    return [Contender(name, partial(drawing.push, rows), note="given JAX arrays")]


def push(work: Workload) -> list[Contender]:
    return _pushing("flashbax item", work, _items(work, 1))


def push_prioritized(work: Workload) -> list[Contender]:
    buffer = importlib.import_module("flashbax").make_prioritised_flat_buffer(
        max_length=work.capacity, min_length=2, sample_batch_size=1, add_sequences=True, priority_exponent=ALPHA
    )
    return _pushing("flashbax flat", work, _Drawing(work, buffer, lambda leaf: leaf))


PEER = Peer(
    "flashbax",
    ("flashbax",),
    ("flashbax", "jax"),
    {
        "uniform": uniform,
        "prioritized": prioritized,
        "sequence": sequence,
        "push": push,
        "push_prioritized": push_prioritized,
    },
)
