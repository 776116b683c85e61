"""The host tiers' own promises: alignment, laziness and ownership."""

from __future__ import annotations

import resource
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from conduit.backends.carving import ALIGNMENT
from conduit.backends.disk import Disk
from conduit.backends.host import HostTiers, PinnedMemory
from conduit.core.experience import Schema
from conduit.testing import address, assert_same, example_rows, on_host
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED

WIDE = {"image": np.zeros((4, 3, 64, 128), np.uint8), "reward": np.zeros(4, np.float32), "done": np.zeros(4, np.bool_)}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture
def tiers():
    return HostTiers(Disk())


def test_storage_and_wide_arrays_of_batches_begin_at_a_multiple_of_64_bytes(tiers):
    columns = tiers.allocate(Schema.infer(WIDE, "test"), 4, PAGEABLE)
    batch = tiers.read(columns, np.arange(3), list(WIDE), PAGEABLE)
    copy = tiers.copy(columns, PAGEABLE)
    for arrays in (columns.arrays, {"image": batch.arrays["image"]}, copy.arrays):
        assert all(address(array) % ALIGNMENT == 0 for array in arrays.values())
    for arrays in (columns.arrays, batch.arrays, copy.arrays):
        assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays.values())


def test_keeping_a_batch_s_rewards_does_not_keep_its_images(tiers):
    batch = tiers.read(on_host(WIDE), np.arange(4), list(WIDE), PAGEABLE)
    image = weakref.ref(batch.arrays["image"])
    memory = weakref.ref(batch.arrays["image"].base)
    reward = batch.arrays["reward"]
    del batch
    assert image() is None
    assert memory() is None
    assert reward.sum() == 0


def test_eight_gibibytes_of_columns_cost_nothing_until_they_are_written(tiers):
    before = resident_bytes()
    columns = tiers.allocate(Schema.infer({"a": np.zeros((1, 1 << 10), np.uint8)}, "test"), 1 << 23, PAGEABLE)
    assert columns.arrays["a"].nbytes == 1 << 33
    assert columns.arrays["a"][-1].sum() == 0
    assert resident_bytes() - before < 1 << 28


def test_bfloat16_rows_are_gathered_like_any_other(tiers):
    rows = {"a": np.arange(12).reshape(6, 2).astype(ml_dtypes.bfloat16)}
    batch = tiers.read(on_host(rows), np.array([5, 0, 5]), ["a"], PAGEABLE)
    assert_same(batch.arrays["a"], rows["a"][[5, 0, 5]], "batch")


def test_pinned_columns_and_batches_come_from_the_pinned_memory_given():
    asked = []

    def source(kind):
        return lambda size: asked.append((kind, size)) or np.zeros(size, np.uint8)

    tiers = HostTiers(Disk(), PinnedMemory(source("columns"), source("batch")))
    assert tiers.endpoints == (PAGEABLE, PINNED, DISK)
    assert tiers.staging == PINNED
    rows = example_rows(4, seed=1)
    columns = tiers.write(tiers.allocate(Schema.infer(rows, "test"), 4, PINNED), 0, on_host(rows))
    tiers.copy(columns, PINNED)
    assert {kind for kind, _ in asked} == {"columns"}
    asked.clear()
    tiers.read(columns, np.arange(4), list(rows), PINNED)
    assert {kind for kind, _ in asked} == {"batch"}
    asked.clear()
    tiers.read(columns, np.arange(4), list(rows), PAGEABLE)
    assert asked == []
