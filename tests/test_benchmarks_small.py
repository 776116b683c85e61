"""The figures of placement and migration, of a small machine: what they show of the large one holds here as well."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from conduit.topology.presets import preset

pytest.importorskip("torch")

CAPACITY = 20_000
SMALL = preset("a100x8").only(at for at in preset("a100x8").endpoints if at.index < 4)
"""Four of the eight devices."""


@pytest.fixture(scope="module")
def figures():
    """(placement, migration, what the probe found of the small machine)"""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        placement: Any = import_module("placement")
        migration: Any = import_module("migration")
        yield placement, migration, placement.measured(SMALL)
    finally:
        sys.path.pop(0)


def test_conduit_is_on_the_lower_envelope_and_leaves_one_device_where_it_is_full(figures):
    placement, _, found = figures
    cases = [placement.Case(d, count, 8.0) for count in (1, 4) for d in (1000, 12_000)]
    points = placement.sweep(SMALL, found, cases, 2, CAPACITY)
    for case in cases:
        each = points[case]
        assert isinstance(each["single GPU"], str) == (case.dimension > 9868)
        assert isinstance(each["pageable"], placement.Point)
        over_s, part = placement.over_envelope(each, lambda point: point.exposed_s)
        assert part <= placement.WITHIN or over_s <= placement.NOISE_S
    one, several = (points[placement.Case(d, 1, 8.0)][placement.CONDUIT] for d in (1000, 12_000))
    assert list(one.rows) == ["device:0"]
    assert len(several.rows) > 1
    assert sum(several.rows.values()) == CAPACITY
    # Bytes over bandwidths, and one latency for each half: 64 rows by the host's thread, 512 within the device.
    assert one.ingestion_s == pytest.approx(64 * 8008 / 12e9 + 2e-6, rel=1e-3)
    assert one.delivery_s == pytest.approx(512 * 8008 / (2039e9 / 2) + 5e-6, rel=1e-3)


def test_growing_rows_move_where_greedy_has_no_room_and_cost_no_more_than_spreading_them_from_the_start(figures):
    placement, migration, found = figures
    dimensions = (1000, 5000, 10_000)
    runs = {
        migration.NAMES[name]: migration.run(SMALL, found, asked, dimensions, 3, CAPACITY)
        for name, asked in placement.contenders(SMALL).items()
        if name in migration.NAMES
    }
    assert migration.complaints(SMALL, runs, dimensions) == []
    mine, greedy = runs["Conduit"], runs["Greedy"]
    assert (len(mine.iterations), len(greedy.iterations)) == (9, 6)
    assert "device:0 needs" in greedy.out_of_memory
    stayed, left = (each.migrated for each in mine.growths)
    assert list(map(str, stayed.after.endpoints)) == ["device:0"]
    assert stayed.moved_bytes == 0
    assert len(left.after.endpoints) > 1
    assert left.moved_bytes >= left.least_bytes > 0
    for each in mine.growths:
        assert each.migrated.rows == CAPACITY
        assert each.migrated.pause_s < 0.1 * each.migrated.seconds <= each.waited_s
        assert max(each.pulls_s) < each.waited_s
