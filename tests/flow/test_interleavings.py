"""The store under a thousand interleavings, with failures among them, and proof that the simulation would notice."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from conduit.core.buffer import ExperienceBuffer
from conduit.core.leases import Leases
from conduit.core.order import Order
from conduit.core.staging import Inbox, Outbox
from conduit.errors import DeadlockError
from tests.flow.simulation import Plan, Simulation, simulate

SEEDS = 1000


@pytest.mark.parametrize("block", range(10))
def test_no_interleaving_deadlocks_or_loses_or_doubles_a_row(block: int) -> None:
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        try:
            simulate(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: {Plan.of(seed)}")
            raise


def test_the_seeds_cover_every_kind_of_trouble() -> None:
    plans = [Plan.of(seed) for seed in range(SEEDS)]
    for kind in (
        lambda p: p.failing_hook == "ingestion",
        lambda p: p.failing_hook == "delivery",
        lambda p: p.stopping_learner,
        lambda p: p.closes_at_s is not None,
        lambda p: p.schedule.overlap_ing and p.schedule.overlap_del,
        lambda p: p.ingestion_scope == "trajectory" and not p.on_policy,
    ):
        assert sum(map(kind, plans)) > 20


def test_a_seed_repeats_its_interleaving() -> None:
    first, second = Simulation(11), Simulation(11)
    first.run()
    second.run()
    assert first.clock.trace == second.clock.trace
    batches = [[batch.info.keys.tolist() for batch in each.seen.batches] for each in (first, second)]
    assert batches[0] == batches[1] != []


def test_no_thread_outlives_a_simulation() -> None:
    before = threading.active_count()
    for seed in range(20):
        simulate(seed)
    assert threading.active_count() == before


def _without_notifying(method):
    """`method` with its condition's notify_all left out: a lost wake-up."""

    def lost(self, *args):
        condition = self._changed if hasattr(self, "_changed") else self._unleased
        condition.notify_all = lambda: None
        return method(self, *args)

    return lost


def _never_served_again(self, turn):
    """`Order.leave_held` that forgets whose turn is next: a deadlock for whoever waits behind."""
    if turn in self._turns:
        self._turns.remove(turn)
    if self._serving is turn:
        self._serving = None


def _held_back_for_ever(self):
    """`Inbox.release_last` that keeps the last group from its place, whoever waits for it."""


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (Order, "leave_held", _never_served_again),
        (Inbox, "release_last", _held_back_for_ever),
        (Outbox, "put", _without_notifying(Outbox.put)),
        (Leases, "_end", _without_notifying(Leases._end)),
    ],
    ids=["deadlock in the order", "deadlock in the inbox", "lost wake-up in the outbox", "lost wake-up of a writer"],
)
def test_a_planted_fault_is_found(owner, name, planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, planted)
    for seed in range(SEEDS):
        try:
            simulate(seed)
        except DeadlockError:
            return
    pytest.fail("no seed found it")


def test_a_planted_torn_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without leases a writer overwrites rows that are being gathered."""
    monkeypatch.setattr(ExperienceBuffer, "_evict", lambda self, first: np.zeros(0, np.int64))
    original = ExperienceBuffer.read

    def slow(self, selection, to):
        self.leases._halt.clock.sleep(0.005)
        return original(self, selection, to)

    monkeypatch.setattr(ExperienceBuffer, "read", slow)
    found = 0
    for seed in range(200):
        try:
            simulate(seed)
        except AssertionError:
            found += 1
            break
    assert found
