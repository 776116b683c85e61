"""Every sampler keeps the promises that `check_sampler` tries, and `check_sampler` catches those that don't."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import conduit.testing
from conduit.core.ordered import Fifo, Lifo, MaxHeap, MinHeap
from conduit.core.passes import WithoutReplacement
from conduit.core.prioritized import Prioritized
from conduit.core.ring import Window
from conduit.core.sampling import Sampler, Sampling, Shuffled, Uniform
from conduit.core.spread import Recency, Stratified
from conduit.core.starts import Starts
from conduit.errors import SettingError
from conduit.testing import check_sampler
from conduit.testing.plays import PROMISES
from tests.contract import planted_samplers
from tests.contract.planted_samplers import Planted, Right

SAMPLERS = [
    Uniform(),
    Uniform(replacement=False),
    Prioritized(),
    Prioritized(alpha=2.0, eps=0.0, new=3.0),
    Fifo(),
    Lifo(),
    MaxHeap(),
    MinHeap(),
    WithoutReplacement(),
    Recency(half_life=5.0),
    Stratified(),
]

BUGS = Right.__subclasses__()


@pytest.mark.parametrize("sampling", SAMPLERS, ids=repr)
def test_a_sampler_of_conduit_keeps_every_promise(sampling: Sampling):
    report = check_sampler(sampling, examples=40)
    assert "Starts" not in report.refused
    assert set(report.refused) == ({"slots"} if isinstance(sampling, Recency | Stratified) else set())


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught_as_what_it_is(bug: type[Right]):
    with pytest.raises(AssertionError, match=rf"{bug.__name__}\(\) breaks '{bug.promise}': ") as caught:
        check_sampler(Planted(bug), limit_s=0.3)
    for line in ("\nthe play, of '", "\n    sampler = sampling.start(", "\ngot: ", "\nallowed: "):
        assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) < 20


def test_every_promise_is_broken_by_a_planted_bug():
    assert {bug.promise for bug in BUGS} == PROMISES.keys()


def test_the_report_counts_every_promise_and_is_the_same_again():
    report = check_sampler(Planted(Right), examples=8)
    assert report.checks.keys() == PROMISES.keys()
    assert min(report.checks.values()) > 100
    assert report.draws > 10_000
    assert report.plays["tiny rings"] == sum((slots + 1) ** 3 for most in (7, 5) for slots in range(1, most + 1))
    assert report.plays["anything"] + report.plays["anything, scribbled on"] == 8
    assert report == check_sampler(Planted(Right), examples=8)


def test_the_play_that_a_message_shows_breaks_the_promise_when_it_is_played_again():
    sampling = Planted(planted_samplers.PastTheFrontier)
    with pytest.raises(AssertionError) as caught:
        check_sampler(sampling)
    calls = [line.strip() for line in str(caught.value).splitlines() if line.startswith("    ")]
    names: dict[str, Any] = {"sampling": sampling, "Window": Window, "np": np}
    for call in calls[:-1]:
        exec(call, names)
    drawn = eval(calls[-1], names)
    assert f"got: keys {drawn.keys.tolist()}" in str(caught.value)


@dataclass(frozen=True)
class Picky:
    """Uniform that takes no Starts."""

    prioritized = False

    def start(self, capacity: int, seed: int, starts: Starts | None = None) -> Sampler:
        if starts is not None:
            raise SettingError("every row must be drawable: leave max_times_sampled out")
        return Uniform().start(capacity, seed)


def test_what_a_sampler_refuses_is_told_and_the_rest_is_tried():
    report = check_sampler(Picky(), examples=8)
    assert report.refused == {"Starts": "every row must be drawable: leave max_times_sampled out"}
    assert report.plays["drained"] == 6


def test_what_is_no_sampler_is_refused():
    for wrong in (Uniform, object(), None, Uniform().start(4, 0)):
        with pytest.raises(SettingError, match=r"expected a sampler's value, such as conduit\.Uniform\(\)"):
            check_sampler(wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("seed", each) for each in ("x", None, -1, 1.5, True)]
    + [("examples", each) for each in ("x", None, -1, 0.5)]
    + [("limit_s", each) for each in (0, -1, "x", None, float("nan"), True)],
)
def test_a_setting_that_can_not_be_is_named_and_not_taken_for_the_samplers_fault(name, wrong):
    with pytest.raises(SettingError, match=rf"check_sampler\({name}={re.escape(repr(wrong))}\): expected "):
        check_sampler(Uniform(), **{name: wrong})


def test_a_sampler_that_waits_for_more_than_rows_is_not_for_the_check():
    with pytest.raises(AssertionError, match=r"breaks 'missing'.*\n(.*\n)+got: gave 'iteration 0 has 1 of its 2 rows"):
        check_sampler(Shuffled(2, 1, 1))


def test_the_example_of_the_documentation_passes():
    text = inspect.getdoc(check_sampler) or ""
    code = dedent(text[text.index("    from dataclasses") :])
    assert code.startswith("from dataclasses import dataclass\n")
    exec(code, {})
    assert code.endswith("\ncheck_sampler(Latest())")


def test_it_needs_no_pytest_which_the_suite_for_backends_asks_for_by_its_extra():
    code = """
import sys
sys.modules["pytest"] = None  # as if it weren't installed
from conduit.core.sampling import Uniform
from conduit.testing import check_sampler
print(check_sampler(Uniform(), examples=4).draws > 0)
try:
    from conduit.testing import BackendContract
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "True"
    assert "pip install 'conduit-rl[test]'" in done.stdout


def test_all_public_names_are_there_and_no_others():
    for name in conduit.testing.__all__:
        assert getattr(conduit.testing, name) is not None
    with pytest.raises(AttributeError, match=r"'conduit\.testing' has no attribute 'nothing'"):
        conduit.testing.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
