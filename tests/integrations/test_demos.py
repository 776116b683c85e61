"""The demos: they solve their task, repeat from their seed on every backend, and fail in words."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import conduit
from conduit import cli
from conduit.demos import dqn, ppo, show
from conduit.demos.trained import Progress, evaluate
from conduit.errors import MissingExtraError

STATES = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [dqn, ppo], ids=["dqn", "ppo"])
def test_a_demo_solves_cartpole(trainer: Any) -> None:
    assert np.mean(evaluate(trainer.train(seed=0).policy, episodes=20)) >= 400


def acts(trainer: Any, steps: int, backend: str, schedule: conduit.Schedule) -> list[int]:
    policy = trainer.train(backend=backend, seed=3, train_steps=steps, schedule=schedule).policy
    return np.asarray(policy(STATES)).tolist()


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("schedule", [dqn.IN_LINE, dqn.OVERLAPPED], ids=["in line", "overlapped"])
def test_dqn_learns_the_same_on_every_backend(backend: str, schedule: conduit.Schedule) -> None:
    got = acts(dqn, 250, backend, schedule)
    assert 0 < sum(got) < len(got)
    assert got == acts(dqn, 250, "reference", schedule)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_ppo_learns_the_same_on_every_backend_and_schedule(backend: str) -> None:
    """On-policy rows don't depend on when they are prepared."""
    got = acts(ppo, 3 * ppo.ROLLOUT, backend, ppo.OVERLAPPED)
    assert 0 < sum(got) < len(got)
    assert got == acts(ppo, 3 * ppo.ROLLOUT, "reference", ppo.IN_LINE)


def test_evaluate_counts_each_lanes_first_episode_only() -> None:
    """Pushed one way, a pole that starts upright falls after 8 to 11 steps."""
    returns = evaluate(lambda obs: np.ones(len(obs), np.int32), episodes=30)
    assert len(returns) == 30
    assert set(returns) <= {8.0, 9.0, 10.0, 11.0}


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["dqn", "ppo"])
def test_the_command_prints_return_ledger_and_comparison(trainer: str) -> None:
    steps = {"dqn": "150", "ppo": str(ppo.ROLLOUT)}[trainer]
    ran = CliRunner().invoke(cli.app, ["demo", trainer, "--steps", steps, "--compare", steps, "--evaluate", "2"])
    assert ran.exit_code in (0, 1), ran.output
    for said in ("Mean return", "Where the seconds went", "in line", "overlapped", "measured on this machine"):
        assert said in ran.output


@pytest.mark.parametrize("trainer", ["dqn", "ppo"])
@pytest.mark.parametrize("schedule", ["auto", "behind", "inline"])
def test_only_an_automatic_schedule_is_explained(trainer: str, schedule: str) -> None:
    steps = {"dqn": "150", "ppo": str(2 * ppo.ROLLOUT)}[trainer]
    args = ["demo", trainer, "--steps", steps, "--compare", "0", "--evaluate", "1", "--schedule", schedule]
    ran = CliRunner().invoke(cli.app, args)
    assert ran.exit_code in (0, 1), ran.output
    assert ("Automatic schedule: " in ran.output) == (schedule == "auto")


@pytest.mark.parametrize("trainer", [dqn, ppo], ids=["dqn", "ppo"])
def test_a_trainer_follows_the_schedule_it_is_given(trainer: Any) -> None:
    steps = {dqn: dqn.WARM_UP + 20, ppo: ppo.ROLLOUT}[trainer]
    for schedule, timing in ((trainer.IN_LINE, "in line"), (trainer.OVERLAPPED, "behind")):
        assert f"schedule: ingestion {timing}" in trainer.train(train_steps=steps, schedule=schedule).schedule


def test_an_unknown_schedule_is_refused() -> None:
    ran = CliRunner().invoke(cli.app, ["demo", "dqn", "--schedule", "fastest"])
    assert ran.exit_code == 2
    assert "'fastest' is not one of" in ran.output


def test_steps_are_rounded_up_to_whole_iterations_and_the_command_says_so() -> None:
    args = ["demo", "ppo", "--steps", "1", "--compare", "0", "--evaluate", "1"]
    said = CliRunner().invoke(cli.app, args).output
    assert "1 steps are rounded up to 128: whole iterations of 128" in said
    assert "128/128" in said
    assert "Where the seconds went (1 iterations" in said


def test_steps_that_train_nothing_are_no_silent_success() -> None:
    said = CliRunner().invoke(cli.app, ["demo", "dqn", "--steps", "7", "--compare", "0", "--evaluate", "1"]).output
    assert "7/7" in said
    assert "Nothing was trained" in said


def bar_of(every: int, until: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], str]:
    """What the bar was moved to by a trainer that reports so often and ends there, and what was printed."""
    moved: list[int] = []
    monkeypatch.setattr(show.Bar, "update", lambda bar, task, *, completed, **more: moved.append(completed))

    def train(backend: str, seed: int, steps: int, schedule: conduit.Schedule, progress: Progress) -> None:
        for done in range(every, until + 1, every):
            progress(done, [])

    monkeypatch.setattr(dqn, "train", train)
    out = StringIO()
    show._train_with_a_bar(Console(file=out), cast(Any, dqn), "torch", 0, steps, dqn.IN_LINE)
    return moved, out.getvalue()


@pytest.mark.parametrize("every", [1, 50, 128])
def test_the_bar_moves_whatever_the_trainers_step(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, said = bar_of(every, 6400, 6400, monkeypatch)
    assert moved == list(range(max(every, show.DRAW_EVERY), 6401, max(every, show.DRAW_EVERY)))
    assert "Stopped" not in said


def test_training_that_ends_early_ends_its_bar_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, said = bar_of(1, 70, 100, monkeypatch)
    assert moved == [50, 70]
    assert "Stopped after 70 of at most 100 steps: the greedy policy returns 490 or more" in said


def costs(*train_s: float, exposed_s: float) -> list[show.Cost]:
    return [show.Cost(exposed_s / 4, exposed_s * 3 / 4, seconds) for seconds in train_s]


def test_the_verdict_says_whether_overlapping_paid() -> None:
    in_line = costs(1.0, 1.0, 1.0, exposed_s=0.4)
    paid = show.verdict(in_line, costs(0.8, 0.9, 0.7, exposed_s=0.1))
    assert "waited 75% less in push and pull (exposed) and took 20% less time in all" in paid
    assert "faster in 3 of 3 rounds" in paid
    assert paid.endswith("Overlapping pays here.")
    lost = show.verdict(in_line, costs(1.1, 1.2, 1.3, exposed_s=0.2))
    assert "waited 50% less in push and pull (exposed) and took 20% more time in all" in lost
    assert "Overlapping doesn't pay here" in lost
    assert "It pays where" in lost
    mixed = show.verdict(costs(1, 1, 1, 1, 1, exposed_s=0.4), costs(0.9, 0.9, 0.9, 1.2, 1.2, exposed_s=0.4))
    assert "makes no clear difference here" in mixed


def test_the_command_fails_where_the_agent_isnt_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conduit.demos.show.evaluate", lambda policy, episodes: [399.0] * episodes)
    args = ["demo", "dqn", "--steps", "10", "--compare", "0", "--schedule", "inline", "--backend", "reference"]
    assert CliRunner().invoke(cli.app, args).exit_code == 1
    monkeypatch.setattr("conduit.demos.show.evaluate", lambda policy, episodes: [400.0] * episodes)
    assert CliRunner().invoke(cli.app, args).exit_code == 0


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "conduit.demos.ppo")
    ran = CliRunner().invoke(cli.app, ["demo", "ppo"])
    assert isinstance(ran.exception, MissingExtraError)
    assert "needs optax" in str(ran.exception)
    assert "conduit-rl[demo]" in str(ran.exception)


def test_main_tells_conduits_own_errors_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ModuleType:
        raise MissingExtraError("the demo needs optax")

    monkeypatch.setattr(cli, "_import", refuse)
    monkeypatch.setattr(sys, "argv", ["conduit", "demo", "ppo"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == "conduit: MissingExtraError: the demo needs optax"


@pytest.mark.parametrize(
    ("missing", "imported", "extra"),
    [
        ("typer", "conduit.cli", "cli"),
        ("typer", "conduit.cli", "demo"),
        ("gymnasium", "conduit.integrations.gymnasium", "demo"),
        ("rich", "conduit.report", "cli"),
        ("pytest", "conduit.testing.backends", "test"),
    ],
)
def test_without_its_library_a_module_names_the_extra(missing: str, imported: str, extra: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import {imported}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert f"conduit-rl[{extra}]" in ran.stderr


def test_importing_the_command_loads_no_framework() -> None:
    code = "import sys, conduit.cli; print([m for m in ('torch', 'jax', 'gymnasium', 'rich.progress') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
