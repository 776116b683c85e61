"""What can only be seen on a CUDA device: pinned memory, side streams, and that the host is not kept waiting.

The contract suite itself (tests/contract) runs on the CUDA devices too, where there are any.
"""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from conduit.backends import exchange, load
from conduit.core.backend import Columns, Move, Target
from conduit.core.experience import Schema
from conduit.testing import address, assert_rows, assert_same, assert_stored, example_rows, on_host
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = Endpoint(Tier.DEVICE)
IMAGES = {"image": np.zeros((256, 3, 128, 128), np.uint8), "reward": np.zeros(256, np.float32)}
SPIN_CYCLES = 2_000_000_000
"""Keeps a stream busy for about a second."""


@pytest.fixture
def backend():
    return load("torch")


def stored_images(backend, at, rows=1024):
    values = {
        path: np.resize(np.arange(rows * array[0].size), (rows, *array.shape[1:])) for path, array in IMAGES.items()
    }
    values = {path: array.astype(IMAGES[path].dtype) for path, array in values.items()}
    columns = backend.write(backend.allocate(Schema.infer(values, "test"), rows, at), 0, on_host(values))
    backend.wait(columns)
    return columns, values


def spin(backend, at=DEVICE):
    """Keeps the queue of `at` busy, so that whoever waits for it is seen to wait."""
    with backend._devices[at.index].queue.use():
        torch.cuda._sleep(SPIN_CYCLES)


def host_seconds(call):
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def test_pinned_storage_is_page_locked_and_rounded_to_nothing(backend):
    assert PINNED in backend.endpoints()
    columns = backend.allocate(Schema.infer(IMAGES, "test"), 3000, PINNED)
    assert all(torch.from_numpy(array).is_pinned() for array in columns.arrays.values())
    batch = backend.read(columns, np.arange(64), list(IMAGES), PINNED)
    assert all(torch.from_numpy(array).is_pinned() for array in batch.arrays.values())


def test_pinned_storage_is_unlocked_when_it_is_forgotten(backend):
    for _ in range(20):  # 20 × 1 GiB would not fit a small machine if it stayed locked
        columns = backend.allocate(Schema.infer({"a": np.zeros((1, 1 << 20), np.uint8)}, "test"), 1024, PINNED)
        backend.release(columns)
        del columns
        gc.collect()


@pytest.mark.parametrize("source", [PAGEABLE, PINNED, DEVICE], ids=str)
def test_nothing_but_wait_keeps_the_host(backend, source):
    columns, values = stored_images(backend, source)
    index = np.random.default_rng(0).integers(0, 1024, 64)
    for _ in range(2):  # the first takes new memory, which may wait for the device
        backend.wait(backend.read(columns, index, list(values), DEVICE))
        backend.write(columns, 0, on_host({path: array[:64] for path, array in values.items()}))
        torch.cuda.synchronize()
    spin(backend)
    issue_s, batch = host_seconds(lambda: backend.read(columns, index, list(values), DEVICE))
    write_s, columns = host_seconds(lambda: backend.write(columns, 0, on_host({p: a[:64] for p, a in values.items()})))
    order_s, _ = host_seconds(lambda: backend.order(batch))
    wait_s, _ = host_seconds(lambda: backend.wait(batch))
    assert max(issue_s, write_s, order_s) < 0.2
    assert wait_s > 0.3
    assert_rows(backend, batch, {path: array[index] for path, array in values.items()}, source)


def test_what_the_learner_s_stream_computes_follows_the_batch(backend):
    columns, values = stored_images(backend, DEVICE)
    index = np.arange(64)
    learner = torch.cuda.Stream()
    spin(backend)
    batch = backend.read(columns, index, list(values), DEVICE)
    with torch.cuda.stream(learner):
        backend.order(batch)
        total = batch.arrays["image"].long().sum()
    assert not learner.query()
    assert int(total.cpu()) == int(values["image"][index].astype(np.int64).sum())


def test_a_batch_s_memory_is_not_lent_again_while_the_learner_uses_it(backend):
    columns, values = stored_images(backend, DEVICE)
    learner = torch.cuda.Stream()
    expected, totals = [], []
    for number in range(50):
        index = np.random.default_rng(number).integers(0, 1024, 64)
        batch = backend.read(columns, index, list(values), DEVICE)
        with torch.cuda.stream(learner):
            backend.order(batch)
            torch.cuda._sleep(1_000_000)
            totals.append(batch.arrays["image"].long().sum())
        del batch
        expected.append(int(values["image"][index].astype(np.int64).sum()))
    assert [int(total.cpu()) for total in totals] == expected


def test_a_pinned_slot_is_not_overwritten_under_its_copy(backend):
    columns, values = stored_images(backend, PAGEABLE)
    spin(backend)
    indices = [np.random.default_rng(number).integers(0, 1024, 64) for number in range(50)]
    batches = [backend.read(columns, index, list(values), DEVICE) for index in indices]
    for index, batch in zip(indices, batches, strict=True):
        assert_rows(backend, batch, {path: array[index] for path, array in values.items()}, "device")


def test_rows_written_while_the_device_is_busy_are_the_rows_given(backend):
    columns, values = stored_images(backend, DEVICE)
    spin(backend)
    for number in range(16):
        rows = {path: np.ascontiguousarray(array[::-1][:64]) for path, array in values.items()}
        columns = backend.write(columns, 64 * number, on_host(rows))
    assert_stored(backend, columns, {p: np.concatenate([a[::-1][:64]] * 16) for p, a in values.items()}, DEVICE)


def test_a_read_to_the_host_is_there_after_wait(backend):
    columns, values = stored_images(backend, DEVICE)
    spin(backend)
    issue_s, batch = host_seconds(lambda: backend.read(columns, np.arange(64), list(values), PINNED))
    assert issue_s < 0.2
    assert_rows(backend, batch, {path: array[:64] for path, array in values.items()}, "pinned")


def test_moves_in_both_directions_keep_every_row(backend):
    columns, values = stored_images(backend, PAGEABLE)
    endpoints = backend.endpoints()
    there = backend.transfer([Move(columns, to) for to in endpoints])
    back = backend.transfer([Move(copy, to) for copy in there for to in endpoints])
    for copy in (*there, *back):
        assert_stored(backend, copy, values, copy.at)


def test_release_gives_device_memory_back_at_once(backend):
    columns, _ = stored_images(backend, DEVICE)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    backend.release(columns)
    assert held - torch.cuda.memory_allocated() >= 1024 * 3 * 128 * 128


def test_fetch_does_not_wait_and_gives_what_was_there(backend):
    errors = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    exchange.fetch(errors)()
    torch.cuda._sleep(SPIN_CYCLES)
    issue_s, wait = host_seconds(lambda: exchange.fetch(errors))
    errors.zero_()
    assert issue_s < 0.2
    assert_same(wait(), np.arange(1 << 20, dtype=np.float32), "fetched")


def test_batches_cross_between_torch_and_jax_on_the_device_without_a_copy(backend):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    rows = example_rows(64, seed=1)
    for name, other in (("torch", "jax"), ("jax", "torch")):
        here = load(name)
        target = Target(other, device="gpu:0" if other == "jax" else "cuda:0")
        assert here.landing(target) == DEVICE
        columns = here.write(here.allocate(Schema.infer(rows, "test"), 64, DEVICE), 0, on_host(rows))
        batch = here.read(columns, np.arange(64), list(rows), DEVICE)
        arrays = here.hand_over(batch, target)
        for path, array in rows.items():
            assert exchange.framework_of(arrays[path]) == other
            if array.nbytes:
                assert address(arrays[path]) == address(batch.arrays[path])
            assert_same(arrays[path], array, (name, path))


def test_a_host_batch_goes_to_a_cuda_target_by_value(backend):
    rows = example_rows(64, seed=1)
    arrays = backend.hand_over(Columns(PAGEABLE, rows, 64), Target("torch", device="cuda"))
    for path, array in rows.items():
        assert arrays[path].is_cuda
        assert_same(arrays[path], array, path)
