"""Runs a demo in a terminal: a progress bar, the return, the ledger, and the same trainer in line beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

import conduit
from conduit.demos.trained import Progress, Trained, evaluate
from conduit.report import ledger_table

GOOD = 400.0
"""The mean return a demo has to reach."""


class Trainer(Protocol):
    """What a demo's module has."""

    TITLE: str
    BACKEND: str
    STEPS: int
    COMPARED_STEPS: int
    OVERLAPPED: conduit.Schedule
    IN_LINE: conduit.Schedule

    def train(
        self, backend: str, seed: int, train_steps: int, schedule: conduit.Schedule, progress: Progress = ...
    ) -> Trained: ...


def run(
    trainer: Trainer,
    backend: str | None,
    *,
    seed: int,
    steps: int | None,
    episodes: int,
    compare: int | None,
    inline: bool,
) -> bool:
    """Trains, evaluates and compares; whether the mean return is `GOOD`."""
    console = Console()
    backend = backend or trainer.BACKEND
    steps = trainer.STEPS if steps is None else steps
    console.print(f"{trainer.TITLE}, store on {backend}, seed {seed}", soft_wrap=True)
    schedule = trainer.IN_LINE if inline else trainer.OVERLAPPED
    trained = _train_with_a_bar(console, trainer, backend, seed, steps, schedule)
    returns = evaluate(trained.policy, episodes)
    mean = float(np.mean(returns))
    console.print(
        f"Mean return {mean:.1f} (worst {min(returns):.0f}) over {episodes} greedy episodes, "
        f"after {trained.train_s:.1f} s of training; solved from {GOOD:.0f}",
        soft_wrap=True,
    )
    console.print(ledger_table(trained.ledger))
    compared = trainer.COMPARED_STEPS if compare is None else compare
    if compared:
        console.print(_comparison(trainer, backend, seed, compared))
    return mean >= GOOD


def _train_with_a_bar(
    console: Console, trainer: Trainer, backend: str, seed: int, steps: int, schedule: conduit.Schedule
) -> Trained:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("return of the last 20 episodes: {task.fields[mean]}"),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, mean="…")

        def progress(done: int, returns: Sequence[float]) -> None:
            if done % 50:
                return  # drawing costs more than a step
            mean = f"{np.mean(list(returns)[-20:]):.0f}" if returns else "…"
            bar.update(task, completed=done, mean=mean)

        return trainer.train(backend, seed, steps, schedule, progress)


def _comparison(trainer: Trainer, backend: str, seed: int, steps: int) -> Table:
    """The same short training twice, in line and overlapped: what each left on the critical path."""
    table = Table(
        title=f"The same trainer for {steps:,} steps, measured on this machine",
        caption="exposed: what the loop waited for in push and pull",
    )
    for heading in ("schedule", "ingestion", "delivery", "exposed s", "of s"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for label, schedule in (("in line", trainer.IN_LINE), ("overlapped", trainer.OVERLAPPED)):
        trained = trainer.train(backend, seed, steps, schedule)
        total = trained.ledger.total
        cells = (total.ingestion.exposed_s, total.delivery.exposed_s, total.exposed_s, trained.train_s)
        table.add_row(label, *(f"{seconds:.3f}" for seconds in cells))
    return table
