"""dm-reverb: a server with tables; items are chunks of steps, drawn through its data set."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from workloads import ALPHA, EPISODE, Contender, Errors, Peer, Workload, rows_of

MOST_ROWS = 20_000
"""An item costs about 6 KB and 80 µs to insert."""
IN_A_ROW = 8
"""Its threads prefetch while others are measured."""


class _Table:
    def __init__(self, work: Workload, prioritized: bool = False) -> None:
        reverb = importlib.import_module("reverb")
        self._tf = importlib.import_module("tensorflow")
        self.capacity = min(work.capacity, MOST_ROWS)
        self._rows = rows_of(work.rows, EPISODE)
        self._length = work.length
        spec = {
            name: self._tf.TensorSpec((work.length, *leaf.shape[1:]) if work.length > 1 else leaf.shape[1:], leaf.dtype)
            for name, leaf in self._rows.items()
        }
        sampler = reverb.selectors.Prioritized(ALPHA) if prioritized else reverb.selectors.Uniform()
        table = reverb.Table(
            "rows", sampler, reverb.selectors.Fifo(), self.capacity, reverb.rate_limiters.MinSize(1), signature=spec
        )
        self.server = reverb.Server([table])
        self.client = reverb.Client(f"localhost:{self.server.port}")
        self._writer = self.client.trajectory_writer(num_keep_alive_refs=work.length)
        for start in range(0, self.capacity, EPISODE):
            self.push(min(EPISODE, self.capacity - start))
        dataset = reverb.TrajectoryDataset.from_table_signature(
            f"localhost:{self.server.port}", "rows", max_in_flight_samples_per_worker=2 * work.count
        )
        # tf.data would add a queue of batches of its own.
        options = self._tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        self.batches = dataset.batch(work.count).with_options(options).as_numpy_iterator()

    def push(self, count: int) -> None:
        writer, length = self._writer, self._length
        for row in range(count):
            writer.append({name: leaf[row % EPISODE] for name, leaf in self._rows.items()})
            if row + 1 >= length:
                kept = {
                    name: writer.history[name][-length:] if length > 1 else writer.history[name][-1]
                    for name in self._rows
                }
                writer.create_item("rows", 1.0, kept)
        writer.flush()
        writer.end_episode()

    def draw(self) -> Any:
        return next(self.batches)


def uniform(work: Workload) -> list[Contender]:
    table = _Table(work)
    note = f"mean of {IN_A_ROW} in a row: its threads prefetch"
    return [Contender("reverb", lambda: table.draw().data, None, note, table.capacity, table.server.stop, IN_A_ROW)]


def prioritized(work: Workload) -> list[Contender]:
    table, errors = _Table(work, prioritized=True), Errors(work.count)

    def draw_and_update() -> Any:
        batch = table.draw()
        updates = dict(zip(batch.info.key.tolist(), errors.now.tolist(), strict=True))
        table.client.mutate_priorities("rows", updates=updates)
        return batch.data

    note = f"mean of {IN_A_ROW} in a row: drawn before the updates"
    return [Contender("reverb", draw_and_update, errors.draw, note, table.capacity, table.server.stop, IN_A_ROW)]


def push(work: Workload, prioritized: bool = False) -> list[Contender]:
    table = _Table(work, prioritized)
    note = "an item a row, flushed"
    return [Contender("reverb", partial(table.push, work.count), None, note, table.capacity, table.server.stop)]


PEER = Peer(
    "reverb",
    ("reverb", "tensorflow"),
    ("dm-reverb", "tensorflow"),
    {
        "uniform": uniform,
        "sequence": uniform,
        "prioritized": prioritized,
        "push": push,
        "push_prioritized": partial(push, prioritized=True),
    },
)
