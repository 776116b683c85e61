"""Appendix C, invariant 1: rows come out byte for byte as they went in, under every schedule, on every placement and backend."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit
from conduit import Endpoint, Placement, Schedule, Tier
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import REAL, Clock, VirtualClock
from tests.flow.programs import (
    CONTENTS,
    SCOPES,
    Bounded,
    OffPolicy,
    OnPolicy,
    off_policy,
    off_policy_schedules,
    off_policy_settings,
)
from tests.flow.test_emulated_stores import MACHINE, UNEVEN
from tests.store.rows import PLACEMENTS, no_thread_left, played

PLACES = [(backend, number) for backend, several in PLACEMENTS.items() for number in range(len(several))]
PLACES += [(f"emulated({inner})", number) for inner in ("torch", "jax") for number in range(3)]
ON_EMULATED: list[Any] = [
    "pageable",
    UNEVEN,
    Placement((Endpoint(Tier.DEVICE, 1), Endpoint(Tier.DEVICE, 0)), (2.0, 1.0)),
]


def stored_at(place: tuple[str, int], clock: Clock) -> dict[str, Any]:
    """A store's settings for it."""
    name, number = place
    if not name.startswith("emulated"):
        return {"backend": name, "placement": PLACEMENTS[name][number]}
    inner = name.removeprefix("emulated(").removesuffix(")")
    return {"backend": EmulatedBackend(MACHINE, inner, clock), "placement": ON_EMULATED[number]}


M = 4
schedules = st.builds(Schedule, st.booleans(), st.integers(1, 5), st.booleans(), st.integers(1, 5))
fractions = st.integers(1, M).map(lambda k: k / M)
on_policy_ones = st.builds(Schedule, st.booleans(), fractions, st.booleans(), fractions)
seeds = st.integers(0, 1000)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(schedules, st.sampled_from(PLACES), st.sampled_from(list(CONTENTS)), st.booleans(), seeds, seeds)
def test_rows_come_out_as_they_went_in_off_policy(schedule, place, content, prioritized, seed, interleaving):
    played(
        interleaving,
        lambda clock: off_policy(
            clock, schedule, seed, 16, content=content, prioritized=prioritized, **stored_at(place, clock)
        ),
    )


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(on_policy_ones, st.sampled_from(PLACES), st.sampled_from(SCOPES), st.integers(1, 2), seeds, seeds)
def test_rows_come_out_as_they_went_in_on_policy(schedule, place, scope, actors, seed, interleaving):
    def scene(clock: VirtualClock) -> OnPolicy:
        return OnPolicy(clock, schedule, scope, actors, seed=seed, settings=stored_at(place, clock)).run()

    played(interleaving, scene)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.booleans(), st.integers(1, 4), st.sampled_from(PLACES), st.integers(0, 3), seeds, seeds)
def test_rows_come_out_as_they_went_in_bounded(overlap, g, place, most, seed, interleaving):
    def scene(clock: VirtualClock) -> Bounded:
        return Bounded(clock, Schedule(overlap, g), most, seed=seed, settings=stored_at(place, clock)).run()

    played(interleaving, scene)


@pytest.mark.parametrize("place", PLACES, ids=[f"{name}-{number}" for name, number in PLACES])
def test_rows_come_out_as_they_went_in_in_real_time(place):
    """What a virtual clock can't show: threads that run at once."""
    number = PLACES.index(place)
    content = list(CONTENTS)[number % 3]
    schedule = Schedule(overlap_ing=True, g_ing=2, overlap_del=True, g_del=2)
    with no_thread_left():
        off_policy(REAL, schedule, number, 20, content=content, prioritized=True, **stored_at(place, REAL))


SCRIPTS = list(product(["push", "pull"], repeat=5))


@pytest.mark.parametrize("schedule", off_policy_schedules((1, 2), (1, 2)), ids=repr)
def test_no_short_program_gets_other_rows_or_staler_ones_than_it_may(schedule):
    """All programs of five calls, and so of fewer, over a store of four rows."""
    for number, script in enumerate(SCRIPTS):

        def scene(clock: VirtualClock, script=script) -> None:
            made = off_policy_settings("nexts", True, capacity=4, batch_size=2)
            with conduit.Store(clock=clock, schedule=schedule, **made) as store:
                program = OffPolicy(store, 0, lanes=1, content="nexts", prioritized=True)
                program.run(0, first=4)
                for call in script:
                    getattr(program, call)()
                program.check_stored()

        played(number, scene)
