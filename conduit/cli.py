"""The `conduit` command."""

from __future__ import annotations

import importlib
import sys
from enum import StrEnum
from types import ModuleType
from typing import Annotated

from conduit.core.archive import Archive
from conduit.core.placement import format_bytes
from conduit.errors import ConduitError, MissingExtraError

try:
    import typer
except ImportError as error:
    raise SystemExit(
        f"the conduit command needs {error.name}; install it with: pip install 'conduit-rl[cli]', "
        "or 'conduit-rl[demo]' for conduit demo"
    ) from error

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Trainer(StrEnum):
    dqn = "dqn"
    ppo = "ppo"


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
    inline: Annotated[
        bool, typer.Option("--inline", help="Train with both operators in line, not overlapped.")
    ] = False,
) -> None:
    """Trains an agent on CartPole-v1 through a store, and prints its return and where the seconds went.

    Exits with 1 if the mean return stays below 400."""
    show = _import("conduit.demos.show")
    module = _import(f"conduit.demos.{trainer}")
    solved = show.run(
        module, backend and str(backend), seed=seed, steps=steps, episodes=evaluate, compare=compare, inline=inline
    )
    raise typer.Exit(0 if solved else 1)


@app.command()
def verify(folder: Annotated[str, typer.Argument(help="Where Store.save wrote it.")]) -> None:
    """Reads every byte of a checkpoint, and says whether it is whole."""
    found = Archive(folder).verify()
    typer.echo(
        f"{folder} is whole: generation {found.generation}, {found.arrays} arrays in {found.files} files, {format_bytes(found.size_bytes)}"
    )


def main() -> None:
    """The entry point: Conduit's own errors are told in a line, without a traceback."""
    try:
        app()
    except ConduitError as error:
        sys.exit(f"conduit: {type(error).__name__}: {error}")


def _import(name: str) -> ModuleType:
    """A module that only some installations can import."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "conduit":
            raise
        raise MissingExtraError(
            f"the demo needs {error.name}, which isn't installed; it comes with: pip install 'conduit-rl[demo]'"
        ) from error


if __name__ == "__main__":
    main()
