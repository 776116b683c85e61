"""How starts are drawn: with equal chance, at a cost that knows nothing of the capacity, and without compiling anything again."""

from __future__ import annotations

import logging
import tracemalloc
from typing import Any

import jax
import numpy as np
import pytest

import conduit
from conduit import Next, NStep, Sequence, Stack
from tests.links.rows import drawable, linked

NEXT = {"next_obs": Next("obs")}


def scattered(s: conduit.Store, rows: int, lanes: int, seed: int = 0) -> None:
    """Rows of many lanes whose episodes are some ten rows long, and end in every way."""
    chance = np.random.default_rng(seed)
    actor = s.actor(lanes=lanes)
    for first in range(0, rows, lanes):
        ended = chance.random(lanes) < 0.1
        terminated = ended & (chance.random(lanes) < 0.4)
        step = {
            "obs": np.arange(first, first + lanes, dtype=np.float32),
            "reward": np.ones(lanes, np.float32),
            "terminated": terminated,
            "truncated": ended & ~terminated,
        }
        # Every other step's truncated lanes have no final: their last rows have no next.
        with_final = bool(ended.any()) and chance.random() < 0.5
        actor.push(step, final={"obs": np.full(int(ended.sum()), -1.0, np.float32)} if with_final else None)


@pytest.mark.parametrize(
    ("item", "derive", "least"),
    [
        (conduit.Row(), NEXT, 1_000_000),
        (NStep(3, gamma=0.9), NEXT, 300_000),
        (Sequence(4, period=2), {}, 300_000),
        (conduit.Trajectory(), {}, 100_000),
        (conduit.Row(), {"frames": Stack("obs", 8)}, 300_000),
    ],
    ids=str,
)
def test_every_drawable_start_has_the_same_chance(item, derive, least):
    with linked(capacity=1500, item=item, derive=derive, seed=11) as s:
        scattered(s, 4000, 7)
        count = drawable(s)
        assert 0 < count < len(s)
        drawn = np.zeros(s.info()["inserted"], np.int64)
        draws = 0
        while draws < least:
            keys = s.sample(count, to="numpy").info.keys
            np.add.at(drawn, keys, 1)
            draws += len(keys)
        hit = drawn[drawn > 0]
        assert len(hit) == count
        expected = draws / count
        chi_square = float(((hit - expected) ** 2 / expected).sum())
        # χ² of k degrees has mean k and variance 2k, and is nearly normal for such k: five standard deviations.
        assert abs(chi_square - (count - 1)) < 5 * np.sqrt(2 * (count - 1))


@pytest.mark.parametrize("rows", [5_000, 300_000])
@pytest.mark.parametrize("sampler", [conduit.Uniform(), conduit.Prioritized()], ids=str)
def test_a_few_drawable_starts_among_many_rows_are_found_with_equal_chance(rows, sampler):
    """All rows are cut but seven, and eight that the ring has no room for any more."""
    with linked(capacity=rows - rows // 10, derive=NEXT, sampler=sampler, seed=8) as s:
        lanes = rows // 50
        actor = s.actor(lanes=lanes)
        usable = [rows // 10 * 9 // 8 + i * (rows // 9) for i in range(7)] + list(range(8))
        for first in range(0, rows, lanes):
            number = np.arange(first, first + lanes)
            terminated = np.isin(number, usable)
            actor.push({"obs": number, "terminated": terminated, "truncated": ~terminated})
        assert drawable(s) == 7
        drawn = dict.fromkeys(usable[:7], 0)
        for _ in range(1000):
            batch = s.sample(7, to="numpy")
            assert (batch.data["next_obs"] == batch.info.keys).all()
            for key in batch.info.keys.tolist():
                drawn[key] += 1
        # χ² of six degrees; p = 0.0001.
        assert sum((count - 1000) ** 2 / 1000 for count in drawn.values()) < 27.9


def test_successive_draws_are_independent():
    """Pairs of neighbours in a batch, too, are evenly spread."""
    with linked(capacity=64, derive=NEXT, seed=2) as s:
        scattered(s, 128, 4)
        count = drawable(s)
        place = {}
        pairs = np.zeros((count, count), np.int64)
        for _ in range(6000):
            keys = [place.setdefault(key, len(place)) for key in s.sample(count, to="numpy").info.keys.tolist()]
            np.add.at(pairs, (keys[:-1], keys[1:]), 1)
        expected = pairs.sum() / count**2
        degrees = count**2 - 1
        assert abs(((pairs - expected) ** 2 / expected).sum() - degrees) < 5 * np.sqrt(2 * degrees)


ITEMS: dict[str, dict[str, Any]] = {
    "row": {"derive": NEXT},
    "stack": {"derive": {"obs": Stack("obs", 4), "next_obs": Next("obs")}},
    "n-step": {"item": NStep(5, gamma=0.9), "derive": NEXT},
    "sequence": {"item": Sequence(8, burn_in=4, period=4), "derive": NEXT},
    "prioritized": {"item": NStep(5, gamma=0.9), "derive": NEXT, "sampler": conduit.Prioritized()},
}


def peak_bytes(capacity: int, settings: dict[str, Any]) -> dict[str, int]:
    """What a pull, and a pull after a push, allocate at most beyond what there was, once all is warm."""
    peaks = {"pull": 0, "push": 0}
    with linked(capacity=capacity, batch_size=64, **settings) as s:
        lanes = 1000
        scattered(s, capacity + 5 * lanes, lanes)
        actor, learner = s.actor(lanes=4), s.learner()
        row = {
            "obs": np.zeros(4, np.float32),
            "reward": np.zeros(4, np.float32),
            "terminated": np.zeros(4, bool),
            "truncated": np.zeros(4, bool),
        }
        for _ in range(3):
            actor.push(row)
            learner.pull()
        tracemalloc.start()
        try:
            for _ in range(5):
                peaks["push"] = max(peaks["push"], _peak(lambda: actor.push(row)))
                peaks["pull"] = max(peaks["pull"], _peak(learner.pull))
        finally:
            tracemalloc.stop()
    return peaks


def _peak(work: Any) -> int:
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    kept = work()
    peak = tracemalloc.get_traced_memory()[1] - before
    del kept
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("kind", ITEMS)
def test_what_a_pull_and_a_push_allocate_does_not_grow_with_the_capacity(kind):
    small, large = peak_bytes(10_000, ITEMS[kind]), peak_bytes(1_000_000, ITEMS[kind])
    for what in ("pull", "push"):
        assert large[what] < 1.5 * small[what] + 4096, f"{what}: {small[what]} bytes of 10⁴ rows, {large[what]} of 10⁶"


@pytest.mark.parametrize("placement", ["pageable", "device:0"])
@pytest.mark.parametrize("kind", ITEMS)
def test_jax_compiles_nothing_more_after_its_first_batches(kind, placement, caplog):
    settings = {"backend": "jax", "placement": placement, "capacity": 300, "batch_size": 16, **ITEMS[kind]}
    chance = np.random.default_rng(1)

    def step(number: int, dense: float) -> tuple[dict[str, Any], dict[str, Any] | None]:
        ended = chance.random(4) < dense
        terminated = ended & (chance.random(4) < 0.5)
        rows = {
            "obs": np.full(4, number, np.float32),
            "reward": np.ones(4, np.float32),
            "terminated": terminated,
            "truncated": ended & ~terminated,
        }
        return rows, {"obs": np.zeros(int(ended.sum()), np.float32)} if ended.any() and number % 3 else None

    with linked(**settings) as s:
        actor, learner = s.actor(lanes=4), s.learner()

        def live(steps: int, dense: float) -> None:
            for number in range(steps):
                rows, final = step(number, dense)
                actor.push(rows, final=final)
                if drawable(s) >= 16:
                    batch = learner.pull()
                    s.update_priorities(batch.info.keys, np.ones(16)) if "sampler" in settings else None

        live(150, 0.15)
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            # Many ends in a batch, then few, then none: what is gathered differs, and nothing is compiled for it.
            for dense in (0.3, 0.05, 0.0, 0.1):
                live(60, dense)
        compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
        assert not compiled, compiled[:3]
