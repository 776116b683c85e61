"""Where a store's schedule is changed while it runs: each part follows when it comes to a place where it may."""

from __future__ import annotations

import weakref
from dataclasses import asdict

from conduit.core.ledger import Ledger
from conduit.core.rollout import Rollout
from conduit.core.schedule import Schedule
from conduit.core.semantics import Semantics
from conduit.core.signature import Signature
from conduit.ports import Learner


class Switchboard:
    """Knows the schedule that was asked for last. Ingestion follows from the next push on, on-policy from the next iteration; each learner
    from the next group of batches that nobody has asked for so far. It holds no learner, and so no store."""

    def __init__(
        self,
        semantics: Semantics,
        rollout: Rollout,
        signature: Signature,
        ledger: Ledger,
        schedule: Schedule,
        lends: bool,
    ) -> None:
        """`schedule`: what the parts were made for. `lends`: whether rows needn't be copied where one push is ingested in line at a time."""
        self._semantics, self._rollout, self._signature, self._ledger = semantics, rollout, signature, ledger
        self._lends = lends
        self._learners: weakref.WeakSet[Learner] = weakref.WeakSet()
        self._since: int | None = 0
        self.schedule = schedule
        self._lend()

    def join(self, learner: Learner) -> None:
        """It is made for the schedule as of now."""
        self._learners.add(learner)
        self._tell(learner)

    def apply(self, schedule: Schedule) -> None:
        """What runs follows this schedule as soon as it may."""
        self.schedule, self._since = schedule, None
        self._lend()
        self._rollout.switch(schedule.overlap_ing, self._semantics.units_per_ingestion(schedule))
        for learner in list(self._learners):
            self._tell(learner)
        if self._ledger.recorder is not None:
            self._ledger.recorder.instant("schedule", asdict(schedule))

    def in_force_since(self) -> int | None:
        """An iteration from which on all follow what was applied last, the first that was seen; None while some don't."""
        if self._since is None and self._all_follow():
            # The running one may have begun before.
            self._since = self._ledger.iteration_count + 1
        return self._since

    def _all_follow(self) -> bool:
        schedule, semantics = self.schedule, self._semantics
        return self._rollout.follows(schedule.overlap_ing, semantics.units_per_ingestion(schedule)) and all(
            each.follows(semantics.numbering(each.rank, each.world, schedule), schedule.overlap_del)
            for each in list(self._learners)
        )

    def _tell(self, learner: Learner) -> None:
        schedule = self.schedule
        learner.switch(self._semantics.numbering(learner.rank, learner.world, schedule), schedule.overlap_del)

    def _lend(self) -> None:
        """Rows that were checked before, and are ingested otherwise now, are copied when they are taken."""
        in_line = not self.schedule.overlap_ing and self.schedule.g_ing == 1
        self._signature.copies = not (self._lends and in_line)
