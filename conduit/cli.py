"""The `conduit` command."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, NoReturn

from conduit.core.archive import Archive
from conduit.core.placement import KINDS, format_bytes
from conduit.core.planning import plan as make_plan
from conduit.core.plans import Plan
from conduit.errors import ConduitError, MissingExtraError
from conduit.topology import PRESETS, Tier, Topology, discover, load, this_machine
from conduit.topology import preset as preset_of
from conduit.topology import save as save_topology

try:
    import typer
    from rich.console import Console  # typer has it too
except ImportError as error:
    raise SystemExit(
        f"the conduit command needs {error.name}; install it with: pip install 'conduit-rl[cli]', "
        "or 'conduit-rl[demo]' for conduit demo"
    ) from error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Trainer(StrEnum):
    dqn = "dqn"
    ppo = "ppo"


class ScheduleName(StrEnum):
    auto = "auto"
    behind = "behind"
    inline = "inline"


class BackendName(StrEnum):
    torch = "torch"
    jax = "jax"
    reference = "reference"


@app.callback()
def conduit() -> None:
    """Conduit: an experience data plane for distributed reinforcement learning."""


@app.command()
def demo(
    trainer: Annotated[
        Trainer, typer.Argument(help="dqn: PyTorch, off-policy, prioritized. ppo: JAX, on-policy.")
    ] = Trainer.dqn,
    backend: Annotated[
        BackendName | None, typer.Option(help="Of the store; by default the trainer's own framework.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the environments, the networks and the draws.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train so many steps of all lanes at most, in whole iterations.")
    ] = None,
    evaluate: Annotated[int, typer.Option(min=1, help="Greedy episodes to judge the result by.")] = 20,
    compare: Annotated[
        int | None, typer.Option(min=0, help="Steps of the in-line and overlapped runs compared after; 0 skips them.")
    ] = None,
    schedule: Annotated[
        ScheduleName,
        typer.Option(
            help="When ingestion and delivery run: behind rollout and update, inline with them, or auto: as measured to be fastest."
        ),
    ] = ScheduleName.behind,
) -> None:
    """Trains an agent on CartPole-v1 through a store, and prints its return and where the seconds went.

    Exits with 1 if the mean return stays below 400."""
    show = _import("conduit.demos.show")
    module = _import(f"conduit.demos.{trainer}")
    solved = show.run(
        module,
        backend and str(backend),
        seed=seed,
        steps=steps,
        episodes=evaluate,
        compare=compare,
        schedule=str(schedule),
    )
    raise typer.Exit(0 if solved else 1)


@app.command()
def verify(folder: Annotated[str, typer.Argument(help="Where Store.save wrote it.")]) -> None:
    """Reads every byte of a checkpoint, and says whether it is whole."""
    found = Archive(folder).verify()
    typer.echo(
        f"{folder} is whole: generation {found.generation}, {found.arrays} arrays in {found.files} files, {format_bytes(found.size_bytes)}"
    )


PresetOption = Annotated[
    str | None, typer.Option("--preset", metavar="NAME", help=f"A machine that you may not have: {', '.join(PRESETS)}.")
]
FileOption = Annotated[Path | None, typer.Option("--file", metavar="F", help="What --save wrote, here or elsewhere.")]
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Measure this machine's bandwidths with transfers of batches; takes seconds.")
]
SecondsOption = Annotated[float, typer.Option("--seconds", min=0.1, help="How long --measure should take.")]
BackendOption = Annotated[
    BackendName | None,
    typer.Option(
        help="Whose memories of this machine. By default what the system says; to measure, the first of these that is installed."
    ),
]
FigureOption = Annotated[
    Path | None, typer.Option("--figure", metavar="F", help="Draw it into this file: .png, .svg or .pdf.")
]


@app.command()
def topology(
    preset: PresetOption = None,
    file: FileOption = None,
    measure: MeasureOption = False,
    backend: BackendOption = None,
    seconds: SecondsOption = 5.0,
    save_to: Annotated[
        Path | None, typer.Option("--save", metavar="F", help="Write it as JSON, for --file and Store(topology=…).")
    ] = None,
    figure: FigureOption = None,
) -> None:
    """Shows which memories there are and how fast each reaches each: this machine's, or a preset's or a saved one's.

    Every figure is marked spec (a data sheet's), measured or assumed.

    Without options nothing is measured: what is known of this machine is its makers', the rest assumed."""
    _check_outputs(figure, save_to)
    found = _topology(preset, file, measure, backend, seconds)
    report = _import("conduit.report")
    Console().print(report.topology_table(found))
    _say_whose(found)
    if save_to is not None:
        with _told_as_bad_input():
            save_topology(found, save_to)
        typer.echo(f"Saved as {save_to}")
    if figure is not None:
        _draw(_import("conduit.report.figures").topology_figure(found), figure)


@app.command()
def plan(
    row_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Of one row: 192KiB, 1.5MB, 4096.")],
    rows: Annotated[str, typer.Option(metavar="N", help="Of the buffer: 1e6, 1_000_000.")],
    batch_size: Annotated[str, typer.Option(metavar="N", help="Rows that each learner gets an iteration.")] = "256",
    preset: PresetOption = None,
    file: FileOption = None,
    measure: MeasureOption = False,
    backend: BackendOption = None,
    seconds: SecondsOption = 5.0,
    actors: Annotated[
        str, typer.Option(metavar="N|WHERE", help="How many, on the host; or where: pageable,device:0.")
    ] = "1",
    learners: Annotated[
        str, typer.Option(metavar="N|WHERE", help="How many, on the devices in turn; or where: device:0,device:1.")
    ] = "1",
    replay_ratio: Annotated[float, typer.Option(help="Rows delivered for each row ingested.")] = 1.0,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIER=SIZE",
            help=f"At most so much of each memory of a tier ({', '.join(tier.value for tier in Tier)}): device=40GiB.",
        ),
    ] = None,
    candidates: Annotated[
        str, typer.Option(metavar="KINDS", help=f"auto, or those to choose from: {', '.join(KINDS)}.")
    ] = "auto",
    figure: FigureOption = None,
    json_to: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write every candidate into this file.")
    ] = None,
) -> None:
    """Says where a buffer's rows should live, why, and what everything else would cost, without a store: a prediction.

    Of this machine (unmeasured, or with --measure), of a preset, or of a saved topology.

    Exits with 1 where the rows fit nowhere, and with 2 for input that can't be."""
    _check_outputs(figure, json_to)
    count, batch = _whole("--rows", rows), _whole("--batch-size", batch_size)
    limits = _budgets(budget or [])
    where = _topology(preset, file, measure, backend, seconds)

    def planned(size: int | str) -> Plan:
        return make_plan(
            where,
            row_bytes=size,
            capacity=count,
            batch_size=batch,
            actors=_ports("--actors", actors),
            learners=_ports("--learners", learners),
            replay_ratio=replay_ratio,
            candidates=candidates if candidates == "auto" else [each.strip() for each in candidates.split(",")],
            budgets=limits,
        )

    with _told_as_bad_input():
        made = planned(row_bytes)
    report = _import("conduit.report")
    Console().print(report.plan_table(made))
    _say_whose(where)
    if json_to is not None:
        with _told_as_bad_input():
            json_to.write_text(json.dumps(report.plan_record(made), indent=1) + "\n")
        typer.echo(f"Written to {json_to}")
    if figure is not None:
        figures = _import("conduit.report.figures")
        with Console().status("planning for other row sizes"):
            sweep = figures.sweep_rows(planned, made.workload.row_bytes)
        _draw(figures.plan_figure(made, sweep), figure)
    raise typer.Exit(0 if made.choice else 1)


def main() -> None:
    """The entry point: Conduit's own errors are told in a line, without a traceback."""
    try:
        app()
    except ConduitError as error:
        sys.exit(f"conduit: {type(error).__name__}: {error}")


def _topology(
    name: str | None, file: Path | None, measure: bool, backend: BackendName | None, seconds: float
) -> Topology:
    """Whichever was asked for; of this machine where nothing was."""
    asked = [
        option
        for option, there in (("--preset", name is not None), ("--file", file is not None), ("--measure", measure))
        if there
    ]
    if len(asked) > 1:
        _refuse(f"{' and '.join(asked)} exclude each other: expected one of them, or none for this machine, unmeasured")
    if backend is not None and asked and not measure:
        _refuse(f"--backend says whose memories of this machine to look at; {asked[0]} is of another: leave one out")
    with _told_as_bad_input():
        if name is not None:
            return preset_of(name)
        if file is not None:
            return load(file)
        if measure:
            return _measured(backend or _installed(), seconds)
        if backend is None:
            return discover()
        from conduit.core.probing import known

        return known(importlib.import_module("conduit.backends").load(str(backend)))


def _installed() -> BackendName:
    return next(each for each in BackendName if importlib.util.find_spec(str(each)) or each is BackendName.reference)


def _measured(backend: BackendName, seconds: float) -> Topology:
    """With a progress bar. It goes away: what was measured is in the table."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from conduit.measuring import measure

    columns = (TextColumn("measuring"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, of: int, what: str) -> None:
            bar.update(task, completed=done, total=of, description=what)

        return measure(str(backend), seconds=seconds, progress=progress)


def _say_whose(found: Topology) -> None:
    here = this_machine()
    if found.machine not in ("preset", here):
        typer.echo(f"Measured on another machine ({found.machine}); this is {here}.")


def _whole(option: str, text: str) -> int:
    """`1e6`, `1_000_000`."""
    try:
        value = float(text)
        if value >= 1 and value == int(value):
            # Digits alone are exact however many there are.
            return int(text) if text.replace("_", "").isdigit() else int(value)
    except (ValueError, OverflowError):
        pass
    return _refuse(f"{option} {text!r}: expected a whole number ≥ 1, such as 1e6 or 1_000_000")


def _ports(option: str, text: str) -> int | list[str]:
    return _whole(option, text) if text.isdecimal() else [each.strip() for each in text.split(",")]


def _budgets(texts: list[str]) -> dict[str, str]:
    limits: dict[str, str] = {}
    for text in texts:
        tier, equals, size = text.partition("=")
        if not equals:
            _refuse(f"--budget {text!r}: expected TIER=SIZE, such as device=40GiB")
        if tier in limits:
            _refuse(f"--budget {text!r}: {tier} has a budget already, {limits[tier]}; give each tier one")
        limits[tier] = size
    return limits


def _check_outputs(figure: Path | None, other: Path | None) -> None:
    """Before anything is measured for seconds."""
    if figure is not None and figure.suffix not in (".png", ".svg", ".pdf"):
        _refuse(f"--figure {figure}: expected a file that ends with .png, .svg or .pdf")
    for path in (figure, other):
        if path is not None and not path.parent.is_dir():
            _refuse(f"{path}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            _refuse(f"{path} is a folder: expected a file to write")


@contextmanager
def _told_as_bad_input() -> Iterator[None]:
    """What the library says of values that can't be, as a line and exit code 2."""
    try:
        yield
    except MissingExtraError:
        raise
    except (ConduitError, OSError) as error:
        _refuse(str(error))


def _refuse(why: str) -> NoReturn:
    typer.echo(f"conduit: {why}", err=True)
    raise typer.Exit(2)


def _draw(figure: Figure, path: Path) -> None:
    with _told_as_bad_input():
        figure.savefig(path, dpi=130)
    typer.echo(f"Drawn into {path}")


def _import(name: str) -> ModuleType:
    """A module that only some installations can import."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "conduit":
            raise
        raise MissingExtraError(
            f"this command needs {error.name}, which isn't installed; it comes with: pip install 'conduit-rl[demo]'"
        ) from error


if __name__ == "__main__":
    main()
