"""Runs a demo in a terminal: a progress bar, the return, the ledger, and the same trainer in line beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

import conduit
from conduit.demos.trained import SOLVED, Progress, Trained, evaluate
from conduit.report import ledger_table

GOOD = 400.0
"""The mean return a demo has to reach."""
DRAW_EVERY = 50
"""Steps from one drawing of the bar to the next: drawing costs more than a step."""
ROUNDS = 5
"""Of the comparison: short runs are noisy, so each schedule is run so often, and the medians count."""


class Trainer(Protocol):
    """What a demo's module has."""

    TITLE: str
    BACKEND: str
    STEPS: int
    ITERATION_STEPS: int
    """Training takes whole multiples of it."""
    COMPARED_STEPS: int
    OVERLAPPED: conduit.Schedule
    IN_LINE: conduit.Schedule

    def train(
        self,
        backend: str,
        seed: int,
        train_steps: int,
        schedule: conduit.Schedule | conduit.Auto,
        progress: Progress = ...,
    ) -> Trained: ...


def run(
    trainer: Trainer,
    backend: str | None,
    *,
    seed: int,
    steps: int | None,
    episodes: int,
    compare: int | None,
    schedule: str,
) -> bool:
    """Trains, evaluates and compares; whether the mean return is `GOOD`. `schedule`: "inline", "behind" or "auto"."""
    console = Console()
    backend = backend or trainer.BACKEND
    console.print(f"{trainer.TITLE}, store on {backend}, seed {seed}", soft_wrap=True)
    steps = _whole(console, trainer, trainer.STEPS if steps is None else steps)
    asked = {"inline": trainer.IN_LINE, "behind": trainer.OVERLAPPED, "auto": conduit.Auto()}[schedule]
    trained = _train_with_a_bar(console, trainer, backend, seed, steps, asked)
    if not trained.ledger.iteration_count:
        console.print(f"Nothing was trained: the first {steps:,} steps only fill the store", soft_wrap=True)
    returns = evaluate(trained.policy, episodes)
    mean = float(np.mean(returns))
    console.print(
        f"Mean return {mean:.1f} (worst {min(returns):.0f}) over {episodes} greedy episodes, "
        f"after {trained.train_s:.1f} s of training; solved from {GOOD:.0f}",
        soft_wrap=True,
    )
    console.print(ledger_table(trained.ledger))
    if schedule == "auto":
        console.print(trained.schedule, markup=False, highlight=False, soft_wrap=True)
    compared = trainer.COMPARED_STEPS if compare is None else compare
    if compared:
        _compare(console, trainer, backend, seed, _whole(console, trainer, compared))
    return mean >= GOOD


def _whole(console: Console, trainer: Trainer, steps: int) -> int:
    """`steps` rounded up to whole iterations, which is said if it changes them."""
    each = trainer.ITERATION_STEPS
    whole = -(-steps // each) * each
    if whole != steps:
        console.print(f"{steps:,} steps are rounded up to {whole:,}: whole iterations of {each}", soft_wrap=True)
    return whole


def _train_with_a_bar(
    console: Console,
    trainer: Trainer,
    backend: str,
    seed: int,
    steps: int,
    schedule: conduit.Schedule | conduit.Auto,
) -> Trained:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("last returns, exploring: {task.fields[mean]}"),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, mean="…")
        drawn = last = 0

        def progress(done: int, returns: Sequence[float]) -> None:
            nonlocal drawn, last
            last = done
            if done - drawn < DRAW_EVERY and done < steps:
                return
            drawn = done
            mean = f"{np.mean(list(returns)[-20:]):.0f}" if returns else "…"
            bar.update(task, completed=done, mean=mean)

        trained = trainer.train(backend, seed, steps, schedule, progress)
        if last < steps:
            bar.update(task, completed=last, total=last)
    if last < steps:
        console.print(
            f"Stopped after {last:,} of at most {steps:,} steps: the greedy policy returns {SOLVED:.0f} or more",
            soft_wrap=True,
        )
    return trained


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run took, and what its loop waited for in push (ingestion) and pull (delivery)."""

    ingestion_s: float
    delivery_s: float
    train_s: float

    @property
    def exposed_s(self) -> float:
        return self.ingestion_s + self.delivery_s


def _compare(console: Console, trainer: Trainer, backend: str, seed: int, steps: int) -> None:
    """The same short training in line and overlapped, by turns: what each left on the critical path."""
    table = Table(
        title=f"{steps:,} steps on each schedule, measured on this machine",
        caption=f"each the median of {ROUNDS} rounds, after one to warm up",
    )
    for heading in ("schedule", "ingestion", "delivery", "exposed s", "of s"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    with console.status("comparing the schedules"):
        in_line, overlapped = _by_turns(trainer, backend, seed, steps)
    for label, costs in (("in line", in_line), ("overlapped", overlapped)):
        cells = (
            median(cost.ingestion_s for cost in costs),
            median(cost.delivery_s for cost in costs),
            median(cost.exposed_s for cost in costs),
            median(cost.train_s for cost in costs),
        )
        table.add_row(label, *(f"{seconds:.3f}" for seconds in cells))
    console.print(table)
    console.print(verdict(in_line, overlapped), soft_wrap=True)


def _by_turns(trainer: Trainer, backend: str, seed: int, steps: int) -> tuple[list[Cost], list[Cost]]:
    """The costs of each round, in line and overlapped; what slows the machine for a while slows both."""
    schedules = (trainer.IN_LINE, trainer.OVERLAPPED)
    costs: tuple[list[Cost], list[Cost]] = ([], [])
    for number in range(1 + ROUNDS):
        for which in (0, 1) if number % 2 else (1, 0):
            trained = trainer.train(backend, seed, steps, schedules[which])
            total = trained.ledger.total
            if number:  # the first one compiled, and touched its memory for the first time
                costs[which].append(Cost(total.ingestion.exposed_s, total.delivery.exposed_s, trained.train_s))
    return costs


def verdict(in_line: Sequence[Cost], overlapped: Sequence[Cost]) -> str:
    """Whether overlapping paid in these rounds: it did if nearly all of them and the medians say so."""
    rounds = len(in_line)
    won = sum(after.train_s < before.train_s for before, after in zip(in_line, overlapped, strict=True))
    waited = _ratio([cost.exposed_s for cost in in_line], [cost.exposed_s for cost in overlapped])
    took = _ratio([cost.train_s for cost in in_line], [cost.train_s for cost in overlapped])
    found = (
        f"Overlapped, the loop waited {_change(waited)} in push and pull (exposed) and took {_change(took)} time in all; "
        f"it was the faster in {won} of {rounds} rounds."
    )
    if won >= rounds - 1 and took < 1:
        return f"{found} Overlapping pays here."
    judged = "doesn't pay here" if won <= 1 and took > 1 else "makes no clear difference here"
    return (
        f"{found} Overlapping {judged}, on {os.cpu_count()} cores: CartPole's rows are tiny, and handing them to another "
        "thread costs as much as it hides, or more. It pays where rows are large, hooks are slow or cores are idle."
    )


def _ratio(before: Sequence[float], after: Sequence[float]) -> float:
    return median(after) / median(before)


def _change(ratio: float) -> str:
    return f"{abs(1 - ratio):.0%} {'less' if ratio < 1 else 'more'}"
