"""Where a store's schedule is changed while it runs: each part follows when it comes to a place where it may."""

from __future__ import annotations

import weakref
from dataclasses import asdict

from conduit.clock import Condition
from conduit.core.ledger import Ledger
from conduit.core.rollout import Rollout
from conduit.core.schedule import Schedule
from conduit.core.semantics import Semantics
from conduit.core.signature import Signature
from conduit.ports import Learner

RESTS = 64
"""A learner that pulled nothing for so many iterations isn't waited for: it may never pull again."""


class Switchboard:
    """Knows the schedule that was asked for last. Ingestion follows from the next push on, on-policy from the next iteration; each learner
    from the next group of batches that nobody has asked for so far. It keeps no learner alive, and so no store."""

    def __init__(
        self,
        semantics: Semantics,
        rollout: Rollout,
        signature: Signature,
        ledger: Ledger,
        schedule: Schedule,
        lends: bool,
        guard: Condition,
    ) -> None:
        """`schedule`: what the parts were made for. `lends`: whether rows needn't be copied where one push is ingested in line at a time.
        `guard`: of all here. Who holds it may ask for those of rollout and of learners, and never the other way round."""
        self._semantics, self._rollout, self._signature, self._ledger = semantics, rollout, signature, ledger
        self._lends, self._guard = lends, guard
        self._learners: weakref.WeakKeyDictionary[Learner, tuple[int, int]] = weakref.WeakKeyDictionary()
        """The batch that each asked for next when it was last looked at, and the first iteration at which it was that."""
        self._since: int | None = 0
        self.schedule = schedule
        self._lend()

    def join(self, learner: Learner) -> None:
        """It is made for the schedule as of now."""
        with self._guard:
            self._learners[learner] = learner.number, self._ledger.iteration_count
            self._tell(learner)

    def apply(self, schedule: Schedule) -> None:
        """What runs follows this schedule as soon as it may."""
        with self._guard:
            self.schedule, self._since = schedule, None
            self._lend()
            self._rollout.switch(schedule.overlap_ing, self._semantics.units_per_ingestion(schedule))
            for learner in list(self._learners):
                self._tell(learner)
        if (recorder := self._ledger.recorder) is not None:
            recorder.instant("schedule", asdict(schedule))

    def in_force_since(self) -> int | None:
        """An iteration from which on all follow what was applied last, the first that was seen; None while some don't."""
        with self._guard:
            if self._since is None and self._all_follow():
                # The running one may have begun before.
                self._since = self._ledger.iteration_count + 1
            return self._since

    def _all_follow(self) -> bool:
        schedule, semantics = self.schedule, self._semantics
        if not self._rollout.follows(schedule.overlap_ing, semantics.units_per_ingestion(schedule)):
            return False
        # Each is looked at, so that it is known since when those rest that do.
        waited_for = [each for each in list(self._learners) if not self._rests(each)]
        return all(
            each.follows(semantics.numbering(each.rank, each.world, schedule), schedule.overlap_del)
            for each in waited_for
        )

    def _rests(self, learner: Learner) -> bool:
        """Whether a learner has pulled nothing for long."""
        number, since = self._learners[learner]
        if learner.number != number:
            number, since = learner.number, self._ledger.iteration_count
            self._learners[learner] = number, since
        return self._ledger.iteration_count - since >= RESTS

    def _tell(self, learner: Learner) -> None:
        schedule = self.schedule
        learner.switch(self._semantics.numbering(learner.rank, learner.world, schedule), schedule.overlap_del)

    def _lend(self) -> None:
        """Rows that were checked before, and are ingested otherwise now, are copied when they are taken."""
        in_line = not self.schedule.overlap_ing and self.schedule.g_ing == 1
        self._signature.copies = not (self._lends and in_line)
