"""A store's schedule, chosen while it runs and chosen anew when it no longer fits (paper §6.3), on a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from conduit.core.feasible import Feasible
from conduit.core.figures import Crew, Drift, Figures, crew_of, figures_of
from conduit.core.halt import Halt
from conduit.core.ledger import Ledger
from conduit.core.profile import Profile, Window
from conduit.core.schedule import Auto, Schedule
from conduit.core.scheduling import Choice, ScheduleEvent
from conduit.core.seconds import Seconds
from conduit.core.semantics import Semantics

PAUSE = 4
"""After it was measured anew, that isn't done again for so many times as long as it took; where it changed nothing, for twice as long each
time."""
_REMEMBERED, _SAID = 64, 8
"""Of what happened, so much is kept, and so much said."""


class Switch(Protocol):
    """Carries a schedule out."""

    def apply(self, schedule: Schedule) -> None:
        """What runs follows it as soon as it may: from the next push, group of batches or iteration on."""
        ...

    def in_force_since(self) -> int | None:
        """An iteration, counted from 0 as the ledger does, from whose beginning on all follow what was applied last; None while some
        don't."""
        ...


class Scheduler:
    """Profiles the first iterations, chooses, and watches. It looks only when the ledger says that a window has ended, and only at
    iterations that have: those who push and pull never wait for it."""

    def __init__(
        self,
        halt: Halt,
        ledger: Ledger,
        semantics: Semantics,
        auto: Auto,
        feasible: Callable[[], Feasible],
        switch: Switch,
        row_bytes: Callable[[], float] = lambda: 0.0,
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        """`feasible`: what there is to choose from; asked at the start of each profile, when rows have come. `row_bytes`: of a row as of
        now; a change is a reason to choose anew. `beside`: is done between two looks, when the schedule is settled."""
        self._halt, self._ledger, self._semantics, self._auto = halt, ledger, semantics, auto
        self._feasible, self._switch, self._row_bytes = feasible, switch, row_bytes
        self._beside = beside
        self._rung = halt.condition("schedule")
        self._applied: Schedule | None = None
        self._waits_for = 1
        self._doing = "waiting for the first iteration"
        self._history: deque[ScheduleEvent] = deque(maxlen=_REMEMBERED)
        self.choice: Choice | None = None
        """What was chosen last, and from what; None as long as nothing was."""
        self.schedule: Schedule | None = None
        """What was chosen last, after it had proved itself; None as long as nothing was."""
        self.profiles = 0
        """How often it has measured and chosen."""

    def run(self) -> None:
        """The thread's life: until the store halts."""
        try:
            self._live()
        # A schedule that isn't what it seems must not go unseen: it ends the store, as an operator that fails does.
        except BaseException as error:
            if not isinstance(error, _Halted):
                self._halt.now_because(error)
            if not isinstance(error, Exception):
                raise

    @property
    def status(self) -> str:
        """What it is doing now, and the iteration at whose end it looks again."""
        now = self._ledger.iteration_count
        return f"{self._doing}; next look at iteration {self._waits_for:,} (now {now:,})"

    @property
    def history(self) -> tuple[ScheduleEvent, ...]:
        """What was chosen and why, and why it was measured anew: the last that happened, oldest first."""
        return tuple(self._history)

    def explain(self) -> str:
        """The choice with all that it was made from, how it did in practice, and what happened since."""
        lines = [f"Automatic schedule: {self.status}"]
        if self.choice is not None:
            lines.append(str(self.choice))
        return "\n".join([*lines, *(f"  {each}" for each in self.history[-_SAID:])])

    def _live(self) -> None:
        self._wait(1)
        pause = resumes_at = 0
        known: list[Figures] = []
        while True:
            began, before = self._ledger.iteration_count, self.schedule
            profile = self._measure()
            now = self._ledger.iteration_count
            # What was chosen first has nothing to be compared with.
            if before is not None:
                pause = max(PAUSE * (now - began), 2 * pause if self.schedule == before else 0)
                resumes_at = now + pause
            # What the same schedule was the best for, before and now, is no reason to measure.
            known = [*(known if self.schedule == before else ()), *profile.known]
            self._watch(profile, known, resumes_at)

    def _measure(self) -> Profile:
        """Profiles, chooses, and puts the choice into force."""
        profile = Profile(self._feasible(), self._semantics, self._auto.concurrent, self.schedule)
        while (window := profile.next()) is not None:
            self._doing = profile.doing
            spent, crew = self._play(window)
            profile.learn(spent, crew)
        event = "chosen" if profile.schedule != self.schedule else "kept"
        self.choice, self.schedule = profile.choice, profile.schedule
        self.profiles += 1
        self._note(event, profile.why)
        return profile

    def _watch(self, profile: Profile, known: Sequence[Figures], resumes_at: int) -> None:
        """Returns when what was measured no longer holds, from iteration `resumes_at` on."""
        drift = Drift(known, self._row_bytes())
        window = profile.watch()
        while True:
            self._doing = "watching"
            self._beside()
            spent, crew = self._play(window)
            blocks = [figures_of(each, window.per_block, self._semantics, crew) for each in spent]
            drifted = drift.look(blocks, self._row_bytes())
            if drifted is not None and self._ledger.iteration_count >= resumes_at:
                self._note("measures anew", drifted)
                return

    def _play(self, window: Window) -> tuple[list[Seconds], Crew]:
        """Lets the window pass, and returns what its blocks took and who worked."""
        begins = self._enter(window)
        before = self._ledger.threads()
        while True:
            edges = [begins + block * window.per_block for block in range(window.blocks + 1)]
            self._wait(edges[-1])
            spent = self._spent(edges)
            if spent is not None:
                return spent, crew_of(before, self._ledger.threads())
            # So late that the ledger has forgotten them: the next will do as well.
            begins = self._ledger.iteration_count

    def _spent(self, edges: Sequence[int]) -> list[Seconds] | None:
        blocks = [self._ledger.between(first, stop) for first, stop in pairwise(edges)]
        known = [block for block in blocks if block is not None]
        return known if len(known) == len(blocks) else None

    def _enter(self, window: Window) -> int:
        """Puts the window's schedule into force, and returns the first iteration that counts."""
        ledger, changes = self._ledger, window.schedule != self._applied
        if changes:
            self._switch.apply(window.schedule)
            self._applied = window.schedule
        while (since := self._switch.in_force_since()) is None:
            self._wait(ledger.iteration_count + 1)
        return since + window.warm_up if changes else max(since, ledger.iteration_count)

    def _wait(self, count: int) -> None:
        """Until so many iterations have ended. _Halted when the store halts."""
        ledger, halt = self._ledger, self._halt
        self._waits_for = count
        ledger.alarm(count, self._rung.rouse)
        with self._rung:
            self._rung.wait_for(lambda: halt.reason is not None or ledger.iteration_count >= count)
        if halt.reason is not None:
            raise _Halted

    def _note(self, event: str, why: str) -> None:
        assert self.schedule is not None
        self._history.append(ScheduleEvent(self._ledger.iteration_count, self.schedule, event, why))


class _Halted(Exception):
    """The store has stopped."""
