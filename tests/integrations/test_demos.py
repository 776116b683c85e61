"""The demos: they solve their task, repeat from their seed on every backend, and fail in words."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import conduit
from conduit import cli
from conduit.demos import dqn, ppo
from conduit.demos.trained import evaluate
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


def test_the_command_fails_where_the_agent_isnt_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conduit.demos.show.evaluate", lambda policy, episodes: [399.0] * episodes)
    args = ["demo", "dqn", "--steps", "10", "--compare", "0", "--inline", "--backend", "reference"]
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
    [("typer", "conduit.cli", "cli"), ("gymnasium", "conduit.integrations.gymnasium", "demo")],
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
