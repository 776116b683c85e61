"""Profiles of pretend machines, whose best schedule is known: what is chosen is as good, and how long that takes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from conduit.core.figures import Crew, Drift, Figures, Side, crew_of, figures_of, typical
from conduit.core.profile import Profile, Window
from conduit.core.schedule import Mode, Schedule
from conduit.core.seconds import OperatorSeconds, Seconds
from conduit.core.semantics import OffPolicy, OnPolicy
from tests.core.machine import OFF, ON, Machine, Path

IN_LINE = Schedule(False, 1, False, 1)


def any_path(chance: random.Random) -> Path:
    """A stage of 1 to 100 ms, and an operator of a thousandth of it up to twice as much."""
    stage_s = 10 ** chance.uniform(-3, -1)
    return Path(
        stage_s,
        fixed_s=stage_s * 10 ** chance.uniform(-2.5, 0),
        unit_s=stage_s * 10 ** chance.uniform(-2.5, 0.2),
        slows=chance.choice((0, 0, chance.uniform(0, 0.5))),
        hand_off_s=stage_s * chance.choice((0, chance.uniform(0, 0.05))),
    )


def any_machine(seed: int, semantics, noise: float = 0.0) -> Machine:
    chance = random.Random(seed)
    units = chance.choice((0.5, 1, 1, 1, 4, 2.7)) if semantics is OFF else 4
    return Machine(any_path(chance), any_path(chance), units, semantics, noise, seed)


def profiled(machine: Machine, **given) -> Profile:
    return machine.profiled(Profile(machine.feasible, machine.semantics, **given))


def step(machine: Machine, profile: Profile) -> Schedule:
    """Plays the next window, and returns what it ran under."""
    window = profile.next()
    assert window is not None
    profile.learn(machine.play(window), Crew())
    return window.schedule


def regret(machine: Machine, profile: Profile) -> float:
    return machine.expected_s(profile.schedule) / machine.best_s() - 1


@pytest.mark.parametrize("semantics", [OFF, ON], ids=lambda each: each.name)
@pytest.mark.parametrize(("noise", "usually", "always"), [(0.0, 0.01, 0.02), (0.02, 0.021, 0.05), (0.05, 0.035, 0.11)])
def test_on_any_machine_the_choice_is_as_good_as_the_best(semantics, noise, usually, always):
    machines = [any_machine(seed, semantics, noise) for seed in range(60)]
    regrets = sorted(regret(machine, profiled(machine)) for machine in machines)
    assert regrets[54] <= usually
    assert regrets[-1] <= always


@pytest.mark.parametrize("semantics", [OFF, ON], ids=lambda each: each.name)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_on_no_machine_the_choice_is_slower_than_plain_in_line(semantics, noise):
    for seed in range(60):
        machine = any_machine(seed, semantics, noise)
        chosen_s, plain_s = (
            machine.expected_s(profiled(machine).schedule),
            machine.expected_s(machine.feasible.simplest),
        )
        assert chosen_s <= plain_s, seed


def test_a_profile_is_short():
    off_policy, on_policy = ([any_machine(seed, semantics) for seed in range(60)] for semantics in (OFF, ON))
    for machine in (*off_policy, *on_policy):
        profiled(machine)
    assert sorted(machine.iterations for machine in off_policy)[30] <= 250
    # Four granularities in line, three or four behind the stage.
    assert max(machine.iterations for machine in on_policy) <= 60


def test_where_overlap_slows_a_stage_by_more_than_it_hides_everything_stays_in_line():
    path = Path(10e-3, unit_s=2e-3, slows=0.4)
    profile = profiled(Machine(path, path, noise=0.02))
    assert not profile.schedule.overlap_ing
    assert not profile.schedule.overlap_del


def test_sleepy_stages_that_are_longer_than_their_operators_hide_them():
    path = Path(10e-3, unit_s=2e-3)
    profile = profiled(Machine(path, path, noise=0.02))
    assert profile.schedule.overlap_ing
    assert profile.schedule.overlap_del
    assert profile.choice is not None
    (trial,) = profile.choice.trials
    assert trial.schedule == profile.schedule
    assert trial.share == pytest.approx(20 / 24, abs=0.015)
    assert 0 < trial.noise < 0.02
    assert str(trial) == profile.why


def test_what_overlap_slows_of_the_other_operators_stage_is_found_in_practice():
    """Ingestion behind rollout slows the update, which the figures of delivery are charged with; delivery alone behind its stage is best."""

    class Crossed(Machine):
        def _paths(self, schedule):
            ingestion, (update_s, del_s, pull_s) = super()._paths(schedule)
            return ingestion, (update_s * (1.3 if schedule.overlap_ing else 1.0), del_s, pull_s)

    machine = Crossed(Path(10e-3, unit_s=1e-3), Path(10e-3, unit_s=6e-3))
    profile = profiled(machine)
    assert profile.schedule == replace(IN_LINE, overlap_del=True)
    assert machine.expected_s(profile.schedule) == machine.best_s()


def test_a_choice_that_loses_in_practice_is_not_taken():
    class Crossed(Machine):
        def _paths(self, schedule):
            ingestion, (update_s, del_s, pull_s) = super()._paths(schedule)
            both = schedule.overlap_ing and not schedule.overlap_del
            return ingestion, (update_s * (2.0 if both else 1.0), del_s, pull_s)

    # Delivery has one mode, so that what slows it is on no candidate's account.
    semantics = OffPolicy(1000, 10, exact=True)
    machine = Crossed(Path(10e-3, unit_s=1e-3), Path(10e-3, unit_s=1e-3), semantics=semantics)
    profile = profiled(machine)
    assert profile.schedule == IN_LINE
    choice = profile.choice
    assert choice is not None
    assert choice.schedule == IN_LINE
    # All that was known of it is still there to be seen.
    assert [trial.share for trial in choice.trials] == [pytest.approx(31 / 22)]
    assert len(choice.candidates) == len(machine.feasible.schedules)
    assert "took 140.9% ± 0.0% of plain in line's time" in str(choice)
    assert "140.9% ± 0.0% of plain in line's time is what the best of the others took" in profile.why


class Restless(Machine):
    """Turns of fortune that have nothing to do with the schedule: iterations take `factor` times as long, for some fifty at a time."""

    factor: float = 1.5

    def iteration(self, schedule):
        spent = super().iteration(schedule)
        if random.Random(f"{self.seed} {self.iterations // 50}").random() < 0.5:
            for part, names in (
                (spent, ("rollout_s", "update_s", "wall_s")),
                (spent.ingestion, ("busy_s", "exposed_s")),
                (spent.delivery, ("busy_s", "exposed_s")),
            ):
                for name in names:
                    setattr(part, name, self.factor * getattr(part, name))
        return spent


@pytest.mark.parametrize(("slows", "most"), [(0.1, 3), (0.2, 1)])
def test_overlap_that_does_not_pay_is_not_taken_for_what_the_machine_does_besides(slows, most):
    """Overlap hides 10 % of the iteration and costs as much or more: turns differ by half all the same."""
    path = Path(10e-3, unit_s=1.1e-3, slows=slows)
    taken = [profiled(Restless(path, path, noise=0.1, seed=seed)).schedule for seed in range(40)]
    assert sum(schedule.overlap_ing or schedule.overlap_del for schedule in taken) <= most


def test_overlap_that_pays_is_taken_all_the_same():
    path = Path(10e-3, unit_s=8e-3)
    taken = [profiled(Restless(path, path, noise=0.1, seed=seed)).schedule for seed in range(20)]
    assert sum(schedule.overlap_ing and schedule.overlap_del for schedule in taken) >= 18


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "always"])
def test_a_win_that_noise_makes_doubtful_is_tried_again_three_times_at_most(lasts):
    path = Path(10e-3, unit_s=2e-3)
    calm = Machine(path, path)
    chosen, windows = profiled(calm).schedule, len(played(Machine(path, path)))
    assert chosen == Schedule(True, 1, True, 1)

    class Hiccup(Machine):
        """From the first turn's end on plain iterations are short now and then, as if it were for luck."""

        windows = 0

        def play(self, window):
            self.windows += 1
            blocks, lucky = super().play(window), self.windows >= windows if lasts else self.windows == windows
            if lucky and window.schedule == IN_LINE and self.windows % 4 == windows % 4:
                for block in blocks:
                    for name in ("rollout_s", "update_s", "wall_s"):
                        setattr(block, name, (0.75 if lasts else 0.9) * getattr(block, name))
            return blocks

    machine = Hiccup(path, path)
    seen = played(machine)
    assert len(seen) == windows + (8 if lasts else 4)
    assert [each.schedule for each in seen[windows:]] == [IN_LINE, chosen, chosen, IN_LINE] * (2 if lasts else 1)


def played(machine: Machine) -> list[Window]:
    """The windows of a whole profile."""
    profile = Profile(machine.feasible, machine.semantics)
    seen = []
    while (window := profile.next()) is not None:
        seen.append(window)
        profile.learn(machine.play(window), Crew())
    return seen


def test_an_operator_that_cannot_keep_up_does_not_spoil_the_figures_of_the_other():
    """Ingestion a push at a time is always late, and while it is delivery waits for it; with two at a time nothing is in the way."""

    class Late(Machine):
        def _paths(self, schedule):
            ingestion, (update_s, del_s, pull_s) = super()._paths(schedule)
            late = schedule.overlap_ing and schedule.overlap_del and schedule.g_ing == 1
            return ingestion, (update_s, del_s, pull_s + (0.05e-3 / schedule.delivery.g if late else 0.0))

    machine = Late(Path(0.5e-3, fixed_s=1e-3), Path(1e-3, unit_s=0.5e-3))
    profile = profiled(machine)
    assert profile.schedule == Schedule(True, 2, True, 1)


def test_what_is_refuted_in_practice_is_chosen_anew_with_what_was_learnt():
    """Ingestion a push at a time can't keep up, which shows only when there is no more room for what waits."""

    class Filling(Machine):
        waiting = 0

        def iteration(self, schedule):
            self.waiting += schedule == Schedule(True, 1, True, 1)
            return super().iteration(schedule)

        def _paths(self, schedule):
            (roll_s, ing_s, push_s), delivery = super()._paths(schedule)
            late = schedule.overlap_ing and schedule.g_ing == 1
            return (roll_s, ing_s, (1.5e-3 if self.waiting > 5 else 0.0) if late else push_s), delivery

    machine = Filling(Path(0.5e-3, fixed_s=1.9e-3, unit_s=0.1e-3), Path(1e-3, unit_s=0.5e-3))
    profile = profiled(machine)
    assert profile.choice is not None
    assert profile.choice.trials[0].schedule == Schedule(True, 1, True, 1)
    assert profile.schedule.overlap_ing
    assert profile.schedule.ingestion.g > 1
    assert machine.expected_s(profile.schedule) <= 1.01 * machine.best_s()


def test_in_doubt_the_schedule_in_force_stays():
    """It was the best by far; now it is as good as plain in line, and the machine is noisy."""
    path = Path(10e-3, unit_s=1e-3, slows=0.1)
    for current in (IN_LINE, Schedule(True, 1, True, 1)):
        kept = [
            profiled(Machine(path, path, noise=0.1, seed=seed), current=current).schedule == current
            for seed in range(20)
        ]
        assert sum(kept) >= 12


def test_where_the_experience_path_takes_next_to_nothing_one_window_is_enough():
    path = Path(10e-3, unit_s=10e-6)
    machine = Machine(path, path, noise=0.02)
    profile = profiled(machine)
    assert profile.schedule == IN_LINE
    assert machine.iterations <= 12
    assert "nothing to gain" in profile.why


def test_a_machine_that_takes_no_time_stays_in_line():
    assert profiled(Machine(Path(0.0), Path(0.0))).schedule == IN_LINE


def test_operators_that_take_time_and_stages_that_do_not_are_fine():
    machine = Machine(Path(0.0, unit_s=1e-3), Path(0.0, fixed_s=1e-3))
    assert regret(machine, profiled(machine)) == 0


@pytest.mark.parametrize("semantics", [OFF, ON], ids=lambda each: each.name)
def test_a_clock_that_jumps_changes_no_choice(semantics):
    """Every place of the profile in turn; also where a window of a single iteration has nothing to compare with."""
    path = Path(10e-3, fixed_s=1e-3, unit_s=2e-3)
    units = 1 if semantics is OFF else 4
    calm = Machine(path, path, units, semantics)
    chosen = profiled(calm).schedule
    for jump in range(0, calm.iterations, 1 if semantics is ON else 3):
        machine = Machine(path, path, units, semantics, jumps=frozenset({jump}))
        assert profiled(machine).schedule == chosen, jump


def test_predictions_are_what_was_measured():
    machine = Machine(
        Path(10e-3, fixed_s=1e-3, unit_s=2e-3, slows=0.1, hand_off_s=1e-4), Path(20e-3, fixed_s=3e-3, unit_s=30e-3)
    )
    choice = profiled(machine).choice
    assert choice is not None
    for candidate in choice.candidates:
        assert candidate.iteration_s == pytest.approx(machine.expected_s(candidate.schedule), rel=1e-6)
    behind = choice.times.ingestion[Mode(True, 1)]
    assert behind.slowdown_s == pytest.approx(1e-3)
    assert behind.blocking_s == pytest.approx(1e-4)


def test_on_policy_predictions_are_what_was_measured():
    machine = Machine(Path(100e-3, fixed_s=1e-3, unit_s=50e-3), Path(20e-3, fixed_s=3e-3, unit_s=30e-3), 4, ON)
    choice = profiled(machine).choice
    assert choice is not None
    for candidate in choice.candidates:
        assert candidate.iteration_s == pytest.approx(machine.expected_s(candidate.schedule), rel=1e-6)
    assert (choice.times.units, choice.times.batches) == (1, 4)


def test_a_schedule_in_force_stays_unless_another_is_better_by_more_than_noise():
    machine = Machine(Path(10e-3, fixed_s=1e-3), Path(10e-3, fixed_s=1e-3))
    current = Schedule(True, 4, True, 4)
    profile = profiled(machine, current=current)
    assert machine.expected_s(current) == machine.best_s()
    assert profile.schedule == current


def test_pushes_that_come_in_bursts_are_measured_all_the_same():
    class Bursts(Machine):
        def iteration(self, schedule):
            self.units = 4.0 if self.iterations % 4 == 0 else 0.0
            return super().iteration(schedule)

    machine = Bursts(Path(10e-3, unit_s=2e-3), Path(10e-3, unit_s=2e-3))
    profile = profiled(machine)
    machine.units = 1.0
    assert machine.expected_s(profile.schedule) == machine.best_s()


def test_while_nobody_pushes_it_waits_and_says_so_and_then_goes_on():
    machine = Machine(Path(10e-3, unit_s=2e-3), Path(10e-3, unit_s=2e-3))
    profile = Profile(machine.feasible, OFF)
    for _ in range(3):
        step(machine, profile)
    machine.units = 0.0
    step(machine, profile)
    assert "waiting for a push" in profile.doing
    assert step(machine, profile) == IN_LINE
    machine.units = 1.0
    machine.profiled(profile)
    assert profile.schedule == Schedule(True, 1, True, 1)


def test_where_nobody_pushes_any_more_deliveries_are_scheduled_alone():
    """Learning from rows that are all there already."""
    machine = Machine(Path(0.0), Path(10e-3, unit_s=2e-3), units=0.0)
    profile = profiled(machine)
    assert profile.schedule == replace(IN_LINE, overlap_del=True)
    assert machine.iterations <= 400


@pytest.mark.parametrize("concurrent", [None, True, False])
def test_threads_that_work_at_the_same_time_are_noticed_or_declared(concurrent):
    path = Path(10e-3, unit_s=2e-3)
    machine = Machine(path, path)
    profile = Profile(machine.feasible, OFF, concurrent)
    while (window := profile.next()) is not None:
        blocks = machine.play(window)
        for block in blocks:
            block.wall_s /= 2
        profile.learn(blocks, Crew(apart=True))
    assert profile.choice is not None
    assert profile.choice.times.concurrent is (concurrent is not False)


def test_threads_that_take_turns_are_not_concurrent():
    machine = Machine(Path(10e-3, unit_s=2e-3), Path(10e-3, unit_s=2e-3))
    profile = Profile(machine.feasible, OFF)
    while (window := profile.next()) is not None:
        profile.learn(machine.play(window), Crew(apart=True))
    assert profile.choice is not None
    assert not profile.choice.times.concurrent


@pytest.mark.parametrize("g", [2, 4, 8])
def test_a_window_is_a_whole_multiple_of_what_is_taken_at_a_time(g):
    machine = Machine(Path(10e-3, unit_s=2e-3), Path(10e-3, unit_s=2e-3))
    profile = Profile(machine.feasible, OFF)
    seen: list[Window] = []
    while (window := profile.next()) is not None:
        seen.append(window)
        profile.learn(machine.play(window), Crew())
    windows = [window for window in seen if window.schedule.g_del == g]
    assert windows
    assert all(window.per_block % g == 0 and window.warm_up >= g for window in windows)


# Figures

SPENT = Seconds(8.0, 6.0, OperatorSeconds(4.0, 2.0), OperatorSeconds(3.0, 1.0), wall_s=20.0, units=4, batches=2)


def test_figures_are_per_unit_and_share_the_time_of_threads_that_work_beside_each_other():
    figures = figures_of(SPENT, 2, OFF, Crew())
    assert figures == Figures(Side(2.0, 2.0, 1.0, 0.5), Side(1.0, 3.0, 1.5, 0.5), 10.0)
    assert figures.exposed_share == pytest.approx(0.15)
    beside = figures_of(SPENT, 2, OFF, Crew(actors=4, learners=2))
    assert beside.ingestion == Side(2.0, 0.5, 1.0, 0.125)
    assert beside.delivery == Side(0.5, 3.0, 1.5, 0.5)


def test_a_hair_below_zero_is_nothing():
    assert figures_of(replace(SPENT, rollout_s=-1e-18), 2, OFF, Crew()).ingestion.stage_s == 0.0


def test_on_policy_an_iterations_rows_are_one_unit_and_a_pass_is_what_a_batch_is():
    figures = figures_of(replace(SPENT, batches=16), 1, OnPolicy(80, 10, 4), Crew())
    assert figures.ingestion == Side(1.0, 8.0, 4.0, 2.0)
    assert figures.delivery == Side(2.0, 3.0, 1.5, 0.5)


def test_who_worked_is_told_by_calls_and_how_many_at_a_time_by_seconds():
    before: dict[object, Seconds] = {"a": Seconds(units=5), "idle": Seconds(units=1, batches=1)}
    after: dict[object, Seconds] = {
        "a": Seconds(rollout_s=3.0, units=9),
        "b": Seconds(rollout_s=3.0, units=1),
        "now and then": Seconds(rollout_s=0.3, units=1),
        "l": Seconds(update_s=1.0, batches=1),
        "idle": Seconds(units=1, batches=1),
    }
    crew = crew_of(before, after)
    assert (crew.actors, crew.learners, crew.apart) == (pytest.approx(2.1), 1.0, True)
    both = crew_of({}, {"loop": Seconds(1.0, 1.0, units=1, batches=1)})
    assert both == Crew(1.0, 1.0, False)
    assert crew_of({}, {}) == Crew()


def drifts(*each: Figures, row_bytes: float = 100.0) -> list[str | None]:
    drift = Drift([figures_of(SPENT, 2, OFF, Crew())], 100.0)
    return [drift.look([figures], row_bytes) for figures in each]


def of(**spent) -> Figures:
    return figures_of(replace(SPENT, **spent), 2, OFF, Crew())


def test_what_has_drifted_is_said_when_it_lasts():
    assert drifts(of(), of(update_s=7.0), of(update_s=7.0)) == [None, None, None]
    assert drifts(of(update_s=9.0), of(), of(update_s=9.0)) == [None, None, None]
    assert drifts(of(update_s=9.0), of(rollout_s=16.0)) == [None, None]
    assert drifts(of(update_s=9.0), of(update_s=9.0)) == [None, "update takes 4500 ms a batch, 3000 before"]
    assert drifts(of(units=8, rollout_s=16.0), of(units=8, rollout_s=16.0))[1] is not None
    assert drifts(of(), of(), row_bytes=130)[1] == "a row has 130 bytes, 100 before"


def test_how_long_an_operator_works_that_nobody_waits_for_is_no_drift():
    assert drifts(*[of(delivery=OperatorSeconds(9.0, 1.0))] * 2) == [None, None]
    assert drifts(*[of(delivery=OperatorSeconds(9.0, 7.0))] * 2)[1] == (
        "waiting for delivery takes 3500 ms a batch, 500 before"
    )


def test_what_only_some_blocks_show_is_no_drift():
    drift = Drift([of()], 0.0)
    blocks = [of(update_s=30.0), of(update_s=30.0), of(), of(update_s=6.5)]
    assert [drift.look(blocks, 0.0) for _ in range(3)] == [None] * 3


def test_what_was_seen_before_is_no_drift_nor_what_is_between():
    """Of a schedule that was the best with updates of 3 s and of 1.7."""
    drift = Drift([of(), of(update_s=3.4)], 0.0)
    for update_s in (4.7, 6.0, 2.7, 7.4):
        assert [drift.look([of(update_s=update_s)], 0.0) for _ in range(2)] == [None, None]
    for update_s, before_s in ((2.0, 1.7), (8.0, 3.0)):
        drift.look([of(update_s=update_s)], 0.0)
        said = drift.look([of(update_s=update_s)], 0.0)
        assert said == f"update takes {500 * update_s:.0f} ms a batch, {1000 * before_s:.0f} before"


def test_of_many_figures_that_drift_those_that_weigh_most_are_told():
    slower = of(rollout_s=12.0, update_s=19.0, ingestion=OperatorSeconds(12.0, 10.0))
    assert drifts(slower, slower)[1] == (
        "update takes 9500 ms a batch, 3000 before; waiting for ingestion takes 2500 ms a unit, 500 before; and 1 more"
    )


def test_what_has_drifted_and_does_not_matter_is_nothing():
    tiny = replace(SPENT, delivery=OperatorSeconds(0.01, 0.01))
    drift = Drift([figures_of(tiny, 2, OFF, Crew())], 0.0)
    now = figures_of(replace(tiny, delivery=OperatorSeconds(0.05, 0.05)), 2, OFF, Crew())
    assert [drift.look([now], 0.0) for _ in range(2)] == [None, None]


def test_actors_that_pause_are_no_drift_and_actors_that_begin_are():
    paused = of(units=0, rollout_s=0.0)
    assert drifts(paused, paused) == [None, None]
    drift = Drift([paused], 0.0)
    assert drift.look([of()], 0.0) is None
    assert "an iteration has 2 units, 0 before" in (drift.look([of()], 0.0) or "")


def test_the_typical_block_is_not_changed_by_one_that_took_hours():
    usual = of()
    assert typical([usual, usual, of(update_s=3600.0, wall_s=3614.0)]) == usual
