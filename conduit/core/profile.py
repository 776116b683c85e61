"""The first iterations, as measurements: which schedule to run for how long, and what came of it (paper §6.3).

First every mode in line, both operators at once, then every mode behind its stage; then the nearest to the best again. What the model chooses
has to win against the simplest schedule, turn about, by the time that iterations take. No row is lost or drawn otherwise for it: these are
schedules that the semantics allow, one after the other."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from conduit.core.feasible import Feasible
from conduit.core.figures import Crew, Figures, figures_of, typical
from conduit.core.latency import Operator
from conduit.core.runs import Runs, mode_of
from conduit.core.schedule import Mode, Schedule
from conduit.core.scheduling import BETTER, Choice, choose_schedule
from conduit.core.seconds import Seconds
from conduit.core.semantics import OnPolicy, Semantics

WORTH = 0.005
"""Where push and pull take less of the time than this, there is nothing to gain."""
AGAIN = 2
"""So many modes of each operator, the best ones, are measured once more …"""
NEAR = 1.25
"""… if their paths are at most by this factor longer than the shortest."""
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
        self.choice: Choice | None = None
        """What `schedule` was chosen from; None before it was."""
        self.schedule = self._simplest
        """What to run from now on, once there is no next window."""
        self.verdict = ""
        """How the choice did in practice."""
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
    def figures(self) -> Figures:
        """Of the schedule that it ended with, as last measured."""
        return self._runs.last(self.schedule)

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
            self.choice = self._choose()
            self.verdict = f"push and pull take {share:.2%} of the time: there is nothing to gain"
            return
        self._settle(typical(first))
        for schedule in (*self._pairs(False), *self._pairs(True)):
            if schedule != self._simplest:
                yield from self._measure(schedule)
        for schedule in self._best_again():
            yield from self._measure(schedule)
        yield from self._prove()

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
            self.doing = f"measures: ingestion {schedule.ingestion}; delivery {schedule.delivery}"
            blocks, crew = yield self._sized(schedule)
            if self._has_units and not any(block.ingestion.units for block in blocks) and self._stretch < _STRETCH:
                yield from self._rest()
                continue
            tries += 1
            if tries == _TRIES or not self._is_spoiled(blocks):
                self._runs.add(schedule, blocks, crew)
                return

    def _rest(self) -> Steps:
        """Nobody pushed: back to what is known until somebody does, and longer windows from then on. If nobody does for long, deliveries are
        worth looking at all the same."""
        self.doing = "waits for a push: there was none while it measured"
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
        return self._paired(
            [mode for mode in self._feasible.ingestion if mode.overlap is overlap],
            [mode for mode in self._feasible.delivery if mode.overlap is overlap],
        )

    def _paired(self, ingestion: Sequence[Mode], delivery: Sequence[Mode]) -> Iterator[Schedule]:
        """One after the other; where one operator has no more, its simplest."""
        for i in range(max(len(ingestion), len(delivery))):
            yield Schedule.of(
                ingestion[i] if i < len(ingestion) else self._simplest.ingestion,
                delivery[i] if i < len(delivery) else self._simplest.delivery,
            )

    def _best_again(self) -> Iterable[Schedule]:
        """The simplest schedule, and those modes that may turn out to be the best."""
        times = self._runs.times(self._feasible)

        def best(operator: Operator) -> list[Mode]:
            paths = self._runs.paths(times, operator)
            least_s, noise_s = min(paths.values())
            near = sorted((mode for mode in paths if paths[mode][0] <= NEAR * least_s + noise_s), key=paths.__getitem__)
            return [mode for mode in near if mode != mode_of(self._simplest, operator)][:AGAIN]

        return [self._simplest, *self._paired(best("ingestion"), best("delivery"))]

    def _prove(self) -> Steps:
        """What was chosen, and what might be better yet, run turn about with the simplest schedule; the best is taken if its iterations are
        shorter."""
        while True:
            self.choice = choice = self._choose()
            rivals = self._rivals(choice)
            if not rivals:
                return
            since = len(self._runs)
            for schedule in (self._simplest, *rivals, *rivals, self._simplest):
                yield from self._measure(schedule)
            shares = {rival: self._runs.share_of_simplest(rival, since) for rival in rivals}
            winner = min(rivals, key=lambda rival: shares[rival] * (1 if rival == rivals[0] else BETTER))
            wins = shares[winner] < 1
            self.verdict += (
                f"{'; ' if self.verdict else ''}in practice, ingestion {winner.ingestion} and delivery {winner.delivery} takes "
                f"{shares[winner]:.1%} of the time of the simplest schedule, turn about, and is {'taken' if wins else 'not taken'}"
            )
            if wins:
                self.schedule = winner
                if winner != choice.schedule:
                    self.choice = replace(choice, schedule=winner, kept=False)
                return
            overlaps = any(rival.overlap_ing or rival.overlap_del for rival in rivals)
            self._feasible = _in_line(self._feasible) if overlaps else _without(self._feasible, rivals)

    def _rivals(self, choice: Choice) -> list[Schedule]:
        """The schedules to try against the simplest: the chosen one, the fastest if it was passed over for noise, and halves."""
        fastest = choice.candidates[0]
        rivals = [choice.schedule]
        if fastest.iteration_s * BETTER < choice.candidate.iteration_s:
            rivals.append(fastest.schedule)
        rivals += self._halves(choice)
        return [rival for rival in dict.fromkeys(rivals) if rival != self._simplest]

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
        in_line = choose_schedule(_in_line(self._feasible), times, self._semantics).schedule
        return [
            Schedule.of(schedule.ingestion, in_line.delivery),
            Schedule.of(in_line.ingestion, schedule.delivery),
        ]

    def _choose(self) -> Choice:
        return choose_schedule(self._feasible, self._runs.times(self._feasible), self._semantics, self._current)


def _in_line(feasible: Feasible) -> Feasible:
    return replace(
        feasible,
        ingestion=tuple(mode for mode in feasible.ingestion if not mode.overlap),
        delivery=tuple(mode for mode in feasible.delivery if not mode.overlap),
    )


def _without(feasible: Feasible, schedules: Sequence[Schedule]) -> Feasible:
    """Without these schedules' modes, but for the simplest."""
    ingestion, delivery = (
        {schedule.ingestion for schedule in schedules},
        {schedule.delivery for schedule in schedules},
    )
    return replace(
        feasible,
        ingestion=tuple(mode for mode in feasible.ingestion if mode not in ingestion or mode == feasible.ingestion[0]),
        delivery=tuple(mode for mode in feasible.delivery if mode not in delivery or mode == feasible.delivery[0]),
    )
