"""The first iterations, as measurements: which schedule to run for how long, and what came of it (paper §6.3).

First every mode in line, both operators at once, then every mode behind its stage; then the nearest to the best again. What the model chooses
has to win against plain in line, turn about, by the time that iterations take: by more than can be noise. No row is lost or drawn otherwise
for it: these are schedules that the semantics allow, one after the other."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from conduit.core.feasible import Feasible
from conduit.core.figures import Crew, Figures, figures_of, typical
from conduit.core.latency import Operator
from conduit.core.runs import Runs, mode_of
from conduit.core.schedule import Mode, Schedule
from conduit.core.scheduling import BETTER, Choice, Trial, choose_schedule
from conduit.core.seconds import Seconds
from conduit.core.semantics import OnPolicy, Semantics

WORTH = 0.005
"""Where push and pull take less of the time than this, there is nothing to gain."""
AGAIN = 2
"""So many modes of each operator, the best ones, are measured once more …"""
NEAR = 1.25
"""… if their paths are at most by this factor longer than the shortest."""
HOPELESS = 1.25
"""What is predicted to take so many times as long as the fastest isn't tried."""
SPOILED = 4.0
"""A block that took this many times as long as others is measured again: a machine slept, or someone evaluated."""
SLOWS = 0.02
"""Where overlap slows stages by this share of the iteration, either operator is tried in line."""

_BLOCK = 2
"""Iterations of a block, at least; off-policy."""
_ENOUGH = 8
"""Iterations of a window that count, at least; off-policy."""
_GATHERS = 2
"""Units that take more than so many times as many iterations as they are to come together aren't taken together."""
_SHORT_S = 2e-3
"""Blocks of iterations that take next to nothing are stretched towards this …"""
_STRETCH = 16
"""… but not further."""
_RESTS = 4
"""After so many rests without a push, deliveries are looked at alone."""
_TRIES = 3
_ROUNDS = 2
"""What is chosen with the figures of what was tried is tried, too, so often."""
_TURNS = 3
"""What may win, and may not have for noise alone, is tried so often."""

Steps = Generator["Window", tuple[list[Figures], Crew], None]


@dataclass(frozen=True, slots=True)
class Window:
    """Iterations to run under `schedule`: `warm_up` from when it comes into force, then `blocks` times `per_block` that count."""

    schedule: Schedule
    warm_up: int
    per_block: int
    blocks: int


class Profile:
    """Says which window comes next, is told what it took, and ends with a schedule.

    `concurrent`: whether actors and learners work at the same time; None: as their threads tell. `current`: a schedule that was chosen
    before, and is left only for a better one."""

    def __init__(
        self,
        feasible: Feasible,
        semantics: Semantics,
        concurrent: bool | None = None,
        current: Schedule | None = None,
    ) -> None:
        self._feasible = feasible
        self._semantics = semantics
        self._current = current
        self._simplest = feasible.simplest
        self._runs = Runs(semantics, self._simplest, concurrent)
        self._stretch = 1
        self._has_units = True
        self._coming = 1
        """Windows that are known to come."""
        self.choice: Choice | None = None
        """What `schedule` was chosen from; None before it was."""
        self.schedule = self._simplest
        """What to run from now on, once there is no next window."""
        self.why = ""
        """In short."""
        self.doing = ""
        self._steps = self._run()
        self._window: Window | None = next(self._steps)

    def next(self) -> Window | None:
        """The window to run now; None at the end."""
        return self._window

    def learn(self, spent: Sequence[Seconds], crew: Crew) -> None:
        """What the blocks of the window took, and who worked."""
        window = self._window
        assert window is not None
        blocks = [figures_of(each, window.per_block, self._semantics, crew) for each in spent]
        try:
            self._window = self._steps.send((blocks, crew))
        except StopIteration:
            self._window = None

    @property
    def known(self) -> list[Figures]:
        """All that was seen of the schedule that it ended with."""
        return self._runs.seen(self.schedule)

    def watch(self) -> Window:
        """A window in which to see whether the figures still hold."""
        window = self._sized(self.schedule)
        longer = 1 if isinstance(self._semantics, OnPolicy) else math.ceil(16 / window.per_block)
        return replace(window, per_block=window.per_block * longer, blocks=4)

    def _run(self) -> Steps:
        yield from self._measure(self._simplest)
        first = self._runs.first
        if (share := max(block.exposed_share for block in first)) < WORTH:
            self._feasible = replace(
                self._feasible, ingestion=(self._simplest.ingestion,), delivery=(self._simplest.delivery,)
            )
            self.choice = self._choose(self._feasible)
            self.why = f"push and pull take {share:.2%} of the time: there is nothing to gain"
            return
        self._settle(typical(first))
        yield from self._measure_all(
            [each for each in (*self._pairs(False), *self._pairs(True)) if each != self._simplest], 1 + AGAIN + 4
        )
        yield from self._measure_all(self._best_again(), 4)
        yield from self._prove()

    def _measure_all(self, schedules: Sequence[Schedule], then: int = 0) -> Steps:
        """One after the other. `then`: about so many windows will come after them."""
        self._coming = len(schedules) + then
        for schedule in schedules:
            yield from self._measure(schedule)

    def _settle(self, first: Figures) -> None:
        """How long windows have to be, and which modes can't be seen in any."""
        modes = self._feasible.ingestion
        if not self._has_units:
            modes = modes[:1]
        elif not isinstance(self._semantics, OnPolicy):
            # Where pushes are rare, rows would wait for long until a group is whole.
            most = _GATHERS * max(mode.g for mode in modes) * first.ingestion.units
            modes = tuple(mode for mode in modes if mode.g <= most or mode == self._simplest.ingestion)
        self._feasible = replace(self._feasible, ingestion=modes)
        if first.wall_s > 0:
            self._stretch = max(self._stretch, min(_STRETCH, math.ceil(_SHORT_S / (first.wall_s * _BLOCK))))

    def _measure(self, schedule: Schedule) -> Steps:
        tries = 0
        while True:
            done = len(self._runs)
            self.doing = f"measuring, window {done + 1} of about {done + self._coming}: ingestion {schedule.ingestion}; delivery {schedule.delivery}"
            blocks, crew = yield self._sized(schedule)
            if self._has_units and not any(block.ingestion.units for block in blocks) and self._stretch < _STRETCH:
                yield from self._rest()
                continue
            tries += 1
            if tries == _TRIES or not self._is_spoiled(blocks):
                self._runs.add(schedule, blocks, crew)
                self._coming -= 1
                return

    def _rest(self) -> Steps:
        """Nobody pushed: back to what is known until somebody does, and longer windows from then on. If nobody does for long, deliveries are
        worth looking at all the same."""
        self.doing = "waiting for a push: there was none while it measured"
        for _ in range(_RESTS):
            blocks, _crew = yield self._sized(self._current or self._simplest)
            if any(block.ingestion.units for block in blocks):
                self._stretch = min(2 * self._stretch, _STRETCH)
                return
        self._has_units = False

    def _is_spoiled(self, blocks: Sequence[Figures]) -> bool:
        """Whether a block took so much longer than others that it says nothing about the schedule."""
        walls = [block.wall_s for block in blocks]
        return max(walls) > SPOILED * (self._runs.wall_s if len(self._runs) else min(walls))

    def _sized(self, schedule: Schedule) -> Window:
        """Off-policy whole multiples of what the operators take at a time, after as much that doesn't count: behind a stage the first group
        comes late. On-policy an iteration is whole by itself."""
        is_first = not len(self._runs)
        if isinstance(self._semantics, OnPolicy):
            # The first of all is the slowest, and what a new mode allocates it allocates once.
            return Window(schedule, 1, 1, 2 if is_first or self._runs.knows(schedule) else 1)
        units, group = self._runs.units, int(schedule.delivery.g)
        gathered = math.ceil(schedule.ingestion.g / units) if units > 0 else 1
        period = group * math.ceil(gathered / group)
        per_block = period * math.ceil(_BLOCK / period)
        return Window(
            schedule,
            4 if is_first else period + (schedule.overlap_ing or schedule.overlap_del),
            per_block * self._stretch,
            max(2, math.ceil(_ENOUGH / per_block)),
        )

    def _pairs(self, overlap: bool) -> Iterator[Schedule]:
        """All modes of this kind, both operators' at once: what they cost is told apart."""
        ingestion = [mode for mode in self._feasible.ingestion if mode.overlap is overlap]
        delivery = [mode for mode in self._feasible.delivery if mode.overlap is overlap]
        return self._crossed(ingestion, delivery) if overlap else self._paired(ingestion, delivery)

    def _crossed(self, ingestion: Sequence[Mode], delivery: Sequence[Mode]) -> Iterator[Schedule]:
        """Behind their stages, one's simplest with the other's largest: an operator that can't keep up at its simplest slows the other, too, and
        that is to show where it is of no account."""
        sides = self._feasible.ingestion, self._feasible.delivery
        first, last = (sorted(each, key=side.index) for each, side in zip((ingestion, delivery), sides, strict=True))
        return self._paired(first, last[::-1])

    def _paired(self, ingestion: Sequence[Mode], delivery: Sequence[Mode]) -> Iterator[Schedule]:
        """One after the other; where one operator has no more, its simplest."""
        for i in range(max(len(ingestion), len(delivery))):
            yield Schedule.of(
                ingestion[i] if i < len(ingestion) else self._simplest.ingestion,
                delivery[i] if i < len(delivery) else self._simplest.delivery,
            )

    def _best_again(self) -> list[Schedule]:
        """The simplest schedule, and those modes that may turn out to be the best."""
        times = self._runs.times(self._feasible)

        def best(operator: Operator) -> list[Mode]:
            paths = self._runs.paths(times, operator)
            least_s, noise_s = min(paths.values())
            near = sorted((mode for mode in paths if paths[mode][0] <= NEAR * least_s + noise_s), key=paths.__getitem__)
            return [mode for mode in near if mode != mode_of(self._simplest, operator)][:AGAIN]

        return [self._simplest, *self._crossed(best("ingestion"), best("delivery"))]

    def _prove(self) -> Steps:
        """What is chosen by the figures, and what may be better yet, against plain in line; and what is chosen then, as long as that is news. If
        none wins, what is the best without overlap."""
        first = self._choose(self._feasible)
        trials: dict[Schedule, Trial] = {}
        yield from self._try(self._rivals(first), trials)
        for _ in range(_ROUNDS):
            again = self._choose(self._feasible)
            now = next(each for each in again.candidates if each.schedule == self.schedule)
            if again.candidate.iteration_s * BETTER + again.candidate.noise_s >= now.iteration_s:
                break
            yield from self._try([again.schedule], trials)
        if self.schedule == self._simplest:
            yield from self._try([self._choose(_in_line(self._feasible)).schedule], trials)
        self.choice = replace(
            first, schedule=self.schedule, kept=first.kept and not trials, trials=tuple(trials.values())
        )
        if trials:
            told = trials.get(self.schedule) or min(trials.values(), key=lambda trial: trial.share)
            self.why = str(told) if told.schedule == self.schedule else f"{told} is what the best of the others took"
        else:
            self.why = "nothing else is predicted to be shorter"

    def _try(self, asked: Sequence[Schedule], trials: dict[Schedule, Trial]) -> Steps:
        """Runs these, unless they were, turn about with the simplest schedule, and again those that only noise may have kept from winning, while
        none has."""
        rivals = [each for each in dict.fromkeys(asked) if each not in (self._simplest, *trials)]
        since = len(self._runs)
        for _ in range(_TURNS if rivals else 0):
            yield from self._measure_all([self._simplest, *rivals, *reversed(rivals), self._simplest])
            for rival in rivals:
                trials[rival] = Trial(rival, *self._runs.share_of_simplest(rival, since))
            self.schedule = self._winner([*trials.values()])
            rivals = [rival for rival in rivals if self._is_open(trials[rival], [*trials.values()])]
            if self.schedule != self._simplest or not rivals:
                return

    def _is_open(self, trial: Trial, among: Sequence[Trial]) -> bool:
        """Whether it may be better than plain in line after all; of the one in force, whether it may be as good."""
        if trial.schedule == self._current:
            return trial.share - trial.noise <= BETTER
        return trial.share * BETTER < 1 and trial.share <= min(other.share for other in among) * BETTER

    def _winner(self, trials: Sequence[Trial]) -> Schedule:
        """The one in force, unless it is slower than plain in line or another is better for sure; plain in line, unless others are better for sure;
        and of those the simplest that is as good as the fastest."""
        best = min(trials, key=lambda trial: trial.share)
        in_force = next((trial for trial in trials if trial.schedule == self._current), None)
        if in_force is not None and in_force.share <= min(BETTER, best.share * BETTER + best.noise):
            return in_force.schedule
        sure = [trial for trial in trials if trial.share * BETTER + trial.noise < 1]
        if not sure:
            return self._simplest
        least = min(trial.share for trial in sure)
        return min((trial.schedule for trial in sure if trial.share <= least * BETTER), key=self._simplicity)

    def _simplicity(self, schedule: Schedule) -> tuple[int, int, int]:
        return (
            schedule.overlap_ing + schedule.overlap_del,
            self._feasible.delivery.index(schedule.delivery),
            self._feasible.ingestion.index(schedule.ingestion),
        )

    def _rivals(self, choice: Choice) -> list[Schedule]:
        """The schedules to try against the simplest: the chosen one, the fastest if it was passed over for noise, the one in force, halves,
        and all behind."""
        fastest = choice.candidates[0]
        rivals = [choice.schedule]
        if fastest.iteration_s * BETTER < choice.candidate.iteration_s:
            rivals.append(fastest.schedule)
        rivals += [each.schedule for each in choice.candidates if each.schedule == self._current]
        return [*rivals, *self._halves(choice), *self._all_behind(choice)]

    def _halves(self, choice: Choice) -> list[Schedule]:
        """Of a schedule with both operators behind their stages, those with one. What overlap slows may be the other operator's stage, and
        the figures of each side can't tell."""
        schedule, times = choice.schedule, choice.times
        if not (schedule.overlap_ing and schedule.overlap_del):
            return []
        slows_s = (
            times.units * times.ingestion[schedule.ingestion].slowdown_s
            + times.batches * times.delivery[schedule.delivery].slowdown_s
        )
        if slows_s <= SLOWS * choice.candidate.iteration_s:
            return []
        in_line = self._choose(_in_line(self._feasible)).schedule
        return [
            Schedule.of(schedule.ingestion, in_line.delivery),
            Schedule.of(in_line.ingestion, schedule.delivery),
        ]

    def _all_behind(self, choice: Choice) -> list[Schedule]:
        """Where an operator was left in line that needn't be, the fastest schedule with all behind their stages, unless it is hopeless. Few
        iterations were measured of it, and what else a machine does in them only ever speaks against it."""
        can = [any(mode.overlap for mode in modes) for modes in (self._feasible.ingestion, self._feasible.delivery)]

        def is_all(schedule: Schedule) -> bool:
            return [schedule.overlap_ing, schedule.overlap_del] == can

        if is_all(choice.schedule):
            return []
        fastest = next((each for each in choice.candidates if is_all(each.schedule)), None)
        hopeless_s = HOPELESS * choice.candidates[0].iteration_s
        return [fastest.schedule] if fastest is not None and fastest.iteration_s < hopeless_s else []

    def _choose(self, feasible: Feasible) -> Choice:
        return choose_schedule(feasible, self._runs.times(feasible), self._semantics, self._current)


def _in_line(feasible: Feasible) -> Feasible:
    return replace(
        feasible,
        ingestion=tuple(mode for mode in feasible.ingestion if not mode.overlap),
        delivery=tuple(mode for mode in feasible.delivery if not mode.overlap),
    )
