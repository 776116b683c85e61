"""Whether a sampler keeps what `conduit.core.sampling` promises: `check_sampler`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

import numpy as np

from conduit.core.sampling import Sampling
from conduit.core.whole import check_whole
from conduit.errors import SettingError
from conduit.testing.plays import Referee
from conduit.testing.scenarios import scenarios
from conduit.testing.watch import TooLongError, Watch


@dataclass(frozen=True, slots=True)
class SamplerReport:
    """What `check_sampler` did, and found to be right."""

    plays: Mapping[str, int]
    """How many, by scenario."""
    draws: int
    """Over all plays."""
    checks: Mapping[str, int]
    """How often each promise was checked; 0 where the sampler never comes near it: "priority" if it has none."""
    refused: Mapping[str, str]
    """What the sampler raised a SettingError for, and so wasn't tried with: "Starts" (stores of which not every row can be drawn, and
    `max_times_sampled`), "slots" (stores with another remover than Fifo). Its message says what would do."""


def check_sampler(sampling: Sampling, *, seed: int = 0, examples: int = 120, limit_s: float = 20.0) -> SamplerReport:
    """Plays the sampler against a naive model: tiny rings exhaustively, corner cases, and `examples` random plays, the same for the
    same `seed`. AssertionError at the first promise that is broken: which, after what calls, what came, and what was allowed.

    `limit_s`: how long one call may take; it can't be ended while it is in machine code. About two seconds for a quick sampler.
    What isn't tried is how often each row is drawn: only the author knows how often it should be. A sampler that doesn't take
    `Starts`, or keys that aren't in order of age, says so by a SettingError in `start`, or in `insert`.

        from dataclasses import dataclass

        import numpy as np

        from conduit.core.sampling import Draw
        from conduit.errors import PriorityError
        from conduit.testing import check_sampler

        @dataclass(frozen=True)
        class Latest:
            "The n-th row that became drawable has n times the chance of the first."

            prioritized = False

            def start(self, capacity, seed, starts=None):
                return LatestSampler(capacity, seed, starts)

        class LatestSampler:
            highest_priority = 0.0

            def __init__(self, capacity, seed, starts):
                self.capacity, self.seed, self.starts = capacity, seed, starts
                self.keys = {}  # of drawable rows, by slot

            def insert(self, first_key, rows, priority):
                keys = np.arange(first_key, first_key + rows)
                for slot in (keys % self.capacity).tolist():
                    self.keys.pop(slot, None)
                if self.starts is None:
                    self.admit(keys)

            def admit(self, keys):
                self.keys.update(zip((keys % self.capacity).tolist(), keys.tolist()))

            def exclude(self, keys):
                for slot in (keys % self.capacity).tolist():
                    del self.keys[slot]

            def missing(self, window, rows, number):
                lacking = rows - len(self.keys)
                return f"{lacking} more rows must become drawable" if lacking > 0 else None

            def draw(self, number, rows, window, stream=0):
                keys, places = np.array(list(self.keys.values())), np.arange(1, len(self.keys) + 1)
                random = np.random.default_rng([self.seed, number, stream])
                chosen = random.choice(len(keys), rows, p=places / places.sum())
                return Draw(keys[chosen], places[chosen] / places.sum())

            def update(self, keys, priority):
                raise PriorityError("Latest: rows have no priorities")

            def state(self, window):
                return {"keys": np.array(list(self.keys.values()), np.int64)}

            def load(self, state, window):
                self.admit(state["keys"][state["keys"] >= window.first])

        check_sampler(Latest())
    """
    if isinstance(sampling, type) or not isinstance(sampling, Sampling):
        raise SettingError(f"check_sampler({sampling!r}): expected a sampler's value, such as conduit.Uniform()")
    check_whole("seed", seed, 0, of="check_sampler")
    check_whole("examples", examples, 0, of="check_sampler")
    if not isinstance(limit_s, Real) or isinstance(limit_s, bool) or not limit_s > 0:
        raise SettingError(f"check_sampler(limit_s={limit_s!r}): expected seconds > 0")
    with Watch(limit_s) as watch:
        referee = Referee(sampling, watch)
        shared = _shared_generators()
        try:
            for play in scenarios(referee, seed, examples):
                play()
                if referee.play is not None and _shared_generators() != shared:
                    referee.play.fail(
                        "repeatable", "numpy.random or random is in another state", "generators of the sampler's own"
                    )
        except TooLongError:
            assert referee.play is not None
            referee.play.fail("answers", f"the last call took more than {limit_s:g} s", "one that ends")
    return SamplerReport(dict(referee.plays), referee.draws, dict(referee.checks), dict(referee.refused))


def _shared_generators() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return name, np.asarray(keys).tobytes(), *rest, random.getstate()
