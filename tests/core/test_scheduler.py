"""The scheduler's thread, over a real ledger on the virtual clock, beside a loop that takes as long as a pretend machine says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from conduit.clock import Task, VirtualClock
from conduit.core.halt import Halt
from conduit.core.ledger import Ledger
from conduit.core.schedule import Auto, Schedule
from conduit.core.scheduler import Scheduler
from conduit.core.seconds import BUSY, Port, Stage
from conduit.errors import ClosedError, OperatorError
from tests.core.machine import ON, Machine, Path

IN_LINE = Schedule(False, 1, False, 1)
BEHIND = Schedule(True, 1, True, 1)


class FakeSwitch:
    """What is applied comes into force with the iteration after the next."""

    def __init__(self, ledger: Ledger, schedule: Schedule) -> None:
        self.schedule = schedule
        self.applied: list[Schedule] = []
        self._ledger = ledger
        self._since: int | None = 0
        self._wanted, self._at = schedule, 0.0

    def apply(self, schedule: Schedule) -> None:
        self.applied.append(schedule)
        self._wanted, self._at, self._since = schedule, self._ledger.iteration_count + 1, None

    def begin_iteration(self) -> Schedule:
        if self._ledger.iteration_count >= self._at:
            self.schedule, self._at = self._wanted, math.inf
        return self.schedule

    def in_force_since(self) -> int | None:
        if self._since is None and self.schedule == self._wanted and self._at == math.inf:
            self._since = self._ledger.iteration_count + 1
        return self._since


class Scene:
    """A loop of a machine's iterations, and a scheduler. `marks`: whether the loop marks its stages."""

    halt: Halt
    ledger: Ledger
    switch: FakeSwitch
    scheduler: Scheduler
    in_force: list[Schedule]

    def __init__(self, machine: Machine, marks: bool = False, auto: Auto | None = None) -> None:
        self.machine, self.marks = machine, marks
        self.clock = VirtualClock(0)
        self.auto = auto or Auto()
        self.row_bytes = 100.0

    def run(self, iterations: int, at: Callable[[int], object] = lambda iteration: None, close: bool = True) -> Scene:
        """Plays so many iterations; `at` is called before each."""

        def main() -> None:
            task = self._begin()
            for iteration in range(iterations):
                at(iteration)
                self._iterate()
            if close:
                self.halt.now_because(ClosedError("the store is closed"))
            task.join()

        self.clock.run(main)
        return self

    def run_apart(self, seconds: float) -> Scene:
        """An actor and a learner of the machine's, each on its own thread, for so long."""
        paths = {"push": self.machine.ingestion, "pull": self.machine.delivery}

        def side(port: Port) -> None:
            path = paths[port]
            while self.clock.now() < seconds:
                schedule = self.switch.begin_iteration()
                mode = schedule.ingestion if port == "push" else schedule.delivery
                stage_s, _, waited_s = path.spent(mode, 1.0 if mode.overlap else 0.0)
                self.clock.sleep(stage_s)
                with self.ledger.port(port) as call:
                    self.clock.sleep(waited_s)
                    call.took = 1
                if port == "pull":
                    self.in_force.append(schedule)
                    self.ledger.end_iteration()

        def main() -> None:
            tasks = [self._begin(), self.clock.spawn(lambda: side("push"), "actor")]
            side("pull")
            self.halt.now_because(ClosedError("the store is closed"))
            for task in tasks:
                task.join()

        self.clock.run(main)
        return self

    def _begin(self) -> Task:
        self.halt = Halt(self.clock)
        self.ledger = ledger = Ledger(self.clock)
        self.switch = FakeSwitch(ledger, self.machine.feasible.simplest)
        self.scheduler = Scheduler(
                self.halt, ledger, self.machine.semantics, self.auto, lambda: self.machine.feasible, self.switch,
                lambda: self.row_bytes,
            )  # fmt: skip
        self.in_force = []
        return self.clock.spawn(self.scheduler.run, "conduit-scheduler")

    def _iterate(self) -> None:
        ledger, schedule = self.ledger, self.switch.begin_iteration()
        self.in_force.append(schedule)
        spent = self.machine.iteration(schedule)
        self._stage("rollout", spent.rollout_s)
        for push in range(spent.units):
            with ledger.port("push") as call:
                self.clock.sleep(spent.ingestion.exposed_s if push == 0 else 0.0)
                call.took = 1
        with ledger.port("pull") as call:
            self.clock.sleep(spent.delivery.exposed_s)
            call.took = spent.batches
        self._stage("update", spent.update_s)
        if self.marks:
            self.clock.sleep(1e-3)
        with ledger.port("priorities"):
            pass
        cells = ledger.account().cells
        cells[BUSY["ingestion"]] += spent.ingestion.hidden_s
        cells[BUSY["delivery"]] += spent.delivery.hidden_s
        ledger.end_iteration()

    def _stage(self, stage: Stage, seconds: float) -> None:
        if self.marks:
            with self.ledger.mark(stage):
                self.clock.sleep(seconds)
        else:
            self.clock.sleep(seconds)


def hiding() -> Machine:
    """Overlap hides all of both operators."""
    return Machine(Path(10e-3, unit_s=2e-3), Path(10e-3, unit_s=3e-3), noise=0.02)


@pytest.mark.parametrize("marks", [False, True])
def test_it_profiles_and_puts_the_best_schedule_into_force(marks):
    scene = Scene(hiding(), marks).run(300)
    assert scene.scheduler.schedule == scene.in_force[-1] == BEHIND
    assert scene.scheduler.profiles == 1
    assert scene.scheduler.choice is not None
    assert scene.scheduler.choice.times.rollout_s == pytest.approx(10e-3, rel=0.05)
    assert scene.scheduler.choice.times.update_s == pytest.approx(10e-3, rel=0.05)
    # Once chosen, it stays.
    assert scene.in_force[260:] == [BEHIND] * 40


def test_on_policy_too():
    machine = Machine(Path(100e-3, unit_s=20e-3), Path(20e-3, unit_s=3e-3), 4, ON)
    scene = Scene(machine).run(80)
    assert machine.expected_s(scene.in_force[-1]) == pytest.approx(machine.best_s())


def test_equal_runs_choose_at_the_same_iterations():
    first, second = (Scene(hiding()).run(300) for _ in range(2))
    assert first.in_force == second.in_force


def test_a_machine_on_which_overlap_does_not_pay_stays_in_line():
    path = Path(10e-3, unit_s=1e-3, slows=0.3)
    scene = Scene(Machine(path, path, noise=0.02)).run(400)
    assert scene.in_force[-1] == IN_LINE


def test_the_schedule_follows_an_optimum_that_changes():
    """Half-way overlap begins to slow both stages, by more than it hides; a while later it doesn't any more, and operators take longer."""
    machine = hiding()

    def change(iteration: int) -> None:
        if iteration == 400:
            machine.ingestion.slows = machine.delivery.slows = 0.6
        if iteration == 1400:
            machine.ingestion = Path(10e-3, unit_s=8e-3)
            machine.delivery = Path(10e-3, unit_s=8e-3)

    scene = Scene(machine).run(3200, change)
    assert scene.in_force[399] == BEHIND
    assert scene.in_force[1000] == IN_LINE
    assert scene.in_force[-1] == BEHIND
    explained = scene.scheduler.explain()
    events = [(each.event, each.schedule) for each in scene.scheduler.history]
    assert events == [
        ("chosen", BEHIND), ("measures anew", BEHIND), ("chosen", IN_LINE), ("measures anew", IN_LINE), ("chosen", BEHIND)
    ]  # fmt: skip
    drifted = [each for each in scene.scheduler.history if each.event == "measures anew"]
    assert all("takes 16" in drifted[0].why and name in drifted[0].why for name in ("rollout", "update"))
    assert [each.iteration // 100 for each in drifted] == [5, 16]
    for each in scene.scheduler.history:
        assert str(each) in explained
        assert scene.in_force[each.iteration - 1] == each.schedule or each.event == "chosen"


def test_actors_and_learners_on_threads_of_their_own_are_noticed():
    machine = Machine(Path(10e-3, unit_s=2e-3), Path(10e-3, unit_s=2e-3))
    scene = Scene(machine).run_apart(5.0)
    assert scene.scheduler.choice is not None
    assert scene.scheduler.choice.times.concurrent
    assert scene.in_force[-1] == BEHIND


def test_rows_that_grow_are_a_reason_to_measure_anew():
    scene = Scene(hiding())

    def grow(iteration: int) -> None:
        scene.row_bytes = 100.0 if iteration < 400 else 200.0

    scene.run(900, grow)
    assert scene.scheduler.profiles == 2
    assert "a row has 200 bytes, 100 before" in scene.scheduler.explain()


def test_measuring_anew_for_nothing_is_done_ever_less_often():
    """The update takes twice as long, half as long, and so on: the best schedule is the same all the while."""
    machine = hiding()
    profiles: list[int] = []
    scene = Scene(machine)

    def swing(iteration: int) -> None:
        machine.delivery.stage_s = 10e-3 if iteration // 500 % 2 else 20e-3
        if iteration in (3000, 6000):
            profiles.append(scene.scheduler.profiles)

    scene.run(6000, swing)
    # With no pause it would be a dozen; and what it has seen both ways is no news.
    assert scene.scheduler.profiles == 2
    assert [each.event for each in scene.scheduler.history] == ["chosen", "measures anew", "kept"]
    assert scene.in_force[-1] == BEHIND


def test_where_all_that_changes_leaves_the_best_as_it_is_it_is_measured_ever_less_often():
    """Everything takes longer and longer, and overlap hides it all the while."""
    machine = hiding()

    def slow_down(iteration: int) -> None:
        if iteration % 300 == 299:
            for path in (machine.ingestion, machine.delivery):
                path.stage_s, path.unit_s = 1.35 * path.stage_s, 1.35 * path.unit_s

    scheduler = Scene(machine).run(14_000, slow_down).scheduler
    at = [each.iteration for each in scheduler.history if each.event == "measures anew"]
    assert len(at) == 4
    first, *others = (b - a for a, b in pairwise(at))
    assert all(later > 1.6 * before for before, later in pairwise([first, *others]))
    assert {each.event for each in scheduler.history[1:]} == {"measures anew", "kept"}


@pytest.mark.parametrize("at", [5, 60, 150, 230, 400])
def test_a_clock_that_jumps_changes_no_choice_and_is_no_drift(at):
    machine = replace(hiding(), jumps=frozenset({at}))
    scene = Scene(machine).run(900)
    assert machine.expected_s(scene.in_force[-1]) == machine.best_s()
    assert scene.scheduler.profiles == 1


def test_actors_that_stop_are_waited_for_and_it_says_so():
    machine, said = hiding(), []
    scene = Scene(machine)

    def pause(iteration: int) -> None:
        machine.units = 0.0 if 60 <= iteration < 110 else 1.0
        if iteration == 109:
            said.append(scene.scheduler.status)

    scene.run(600, pause)
    assert "waiting for a push" in said[0]
    assert machine.expected_s(scene.in_force[-1]) == machine.best_s()


def test_learners_that_stop_leave_it_waiting_and_it_says_for_what():
    scene = Scene(hiding()).run(30)
    assert scene.scheduler.status == (
        "measuring, window 3 of about 15: ingestion in line, g=4; delivery in line, g=4; next look at iteration 41 (now 30)"
    )
    assert scene.scheduler.choice is None
    assert scene.scheduler.history == ()
    assert "Automatic schedule: measuring" in scene.scheduler.explain()


def test_a_store_that_is_closed_before_its_first_iteration_ends_the_thread():
    scene = Scene(hiding()).run(0)
    assert scene.switch.applied == []
    assert scene.scheduler.status == "waiting for the first iteration; next look at iteration 1 (now 0)"


def test_what_goes_wrong_on_its_thread_reaches_the_callers():
    scene = Scene(hiding())

    def fail(schedule: Schedule) -> None:
        raise RuntimeError("no such mode")

    def break_it(iteration: int) -> None:
        if iteration == 0:
            scene.switch.apply = fail

    scene.run(20, break_it, close=False)
    assert isinstance(scene.halt.reason, OperatorError)
    assert "no such mode" in str(scene.halt.reason)


def test_it_wakes_only_where_a_window_ends():
    """Nothing else happens while iterations pass: between two of its windows the thread isn't run."""
    scene = Scene(hiding()).run(600)
    woken = [
        time for time, task, event in scene.clock.trace if task == "conduit-scheduler" and event.startswith("waits on")
    ]
    windows = 2 * len(scene.switch.applied) + 600 / 60
    assert len(woken) <= 2 * windows


def test_the_explanation_has_the_choice_its_inputs_and_how_it_did():
    explained = Scene(hiding()).run(300).scheduler.explain()
    for part in (
        "Automatic schedule: watching; next look at iteration",
        "T_rollout",
        "Why: it takes 8",
        "chosen ingestion behind, g=1 and delivery behind, g=1: 8",
        "turn about",
        "in practice",
    ):
        assert part in explained, explained
    assert max(map(len, explained.splitlines())) <= 260


def test_no_two_lines_are_of_one_iteration_and_none_is_long():
    """Overlap that is promising by the figures and loses in practice."""

    class Crossed(Machine):
        def _paths(self, schedule):
            ingestion, (update_s, del_s, pull_s) = super()._paths(schedule)
            both = schedule.overlap_ing and schedule.overlap_del and (schedule.g_ing, schedule.g_del) == (1, 1)
            return ingestion, (update_s * (2.0 if both else 1.0), del_s, pull_s)

    scheduler = Scene(Crossed(Path(10e-3, unit_s=2e-3), Path(10e-3, unit_s=2e-3))).run(500).scheduler
    assert scheduler.history
    assert len({each.iteration for each in scheduler.history}) == len(scheduler.history)
    assert all(len(str(each)) <= 160 for each in scheduler.history)


@pytest.mark.parametrize("seed", range(3))
def test_short_iterations_on_a_restless_machine_are_not_measured_again_and_again(seed):
    """What updates take goes up and down by half, by itself: no choice is better for it."""
    machine = replace(hiding(), noise=0.1)
    for path in (machine.ingestion, machine.delivery):
        path.stage_s, path.unit_s = 0.2 * path.stage_s, 0.05 * path.unit_s

    def swing(iteration: int) -> None:
        machine.delivery.stage_s = 2e-3 * (1.5 if random.Random(f"{seed} {iteration // 150}").random() < 0.5 else 1.0)

    scene = Scene(machine).run(5000, swing)
    changes = [a for a, b in pairwise(scene.scheduler.history) if b.event == "chosen"]
    assert scene.scheduler.profiles <= 4
    assert len(changes) <= 1
