"""Memory of large batches is lent again, and never while somebody may look at it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from conduit.backends import load
from conduit.backends.recycling import Recycler
from conduit.core.backend import Target
from conduit.core.experience import Schema
from conduit.testing import address, on_host, wide_rows
from conduit.topology.endpoint import PAGEABLE

LARGE = 16 << 20


@pytest.fixture
def recycler():
    return Recycler()


def test_what_was_dropped_is_lent_again(recycler):
    first = recycler.bytes(LARGE)
    place = address(first)
    del first
    assert address(recycler.bytes(LARGE)) == place
    assert address(recycler.bytes(LARGE - 1000)) == place, "a little less fits as well"


def test_what_is_lent_is_lent_to_one_only(recycler):
    lent = [recycler.bytes(LARGE) for _ in range(5)]
    assert len({address(block) for block in lent}) == 5
    lent[2][...] = 7
    again = [recycler.bytes(LARGE) for _ in range(5)]
    assert len({address(block) for block in lent + again}) == 10
    assert (lent[2] == 7).all()


@pytest.mark.parametrize(
    "part",
    [
        lambda array: array[1000:1001],
        lambda array: array.view(np.int32).reshape(2, -1)[:, ::3][1:],
        memoryview,
        lambda array: np.frombuffer(memoryview(array), np.uint8),
        lambda array: array.__dlpack__(),
        lambda array: array.ctypes,
        lambda array: pytest.importorskip("torch").from_numpy(array)[5:],
        lambda array: pytest.importorskip("torch").from_dlpack(array)[5:],
    ],
    ids=["slice", "view", "memoryview", "buffer", "capsule", "pointer", "tensor", "imported"],
)
def test_a_part_keeps_the_whole(recycler, part):
    array = np.ndarray((LARGE // 2,), np.uint16, recycler.bytes(LARGE))
    kept = part(array)
    place = address(array)
    del array
    other = recycler.bytes(LARGE)
    assert address(other) != place
    del kept
    gc.collect()
    assert address(recycler.bytes(LARGE)) == place
    del other


def test_a_small_block_is_a_new_one_and_so_is_one_of_another_size(recycler):
    small, large = recycler.bytes(1000), recycler.bytes(LARGE)
    place = address(large)
    del large
    assert small.base is None
    assert address(recycler.bytes(2 * LARGE)) != place
    assert address(recycler.bytes(LARGE // 2)) != place


def test_what_is_remembered_is_bounded_and_the_latest(recycler):
    lent = [recycler.bytes(100 << 20) for _ in range(20)]
    assert sum(block.memory.nbytes for block in recycler._blocks) <= 1 << 30
    places = {address(block) for block in lent[-5:]}
    del lent
    again = [recycler.bytes(100 << 20) for _ in range(5)]
    assert {address(block) for block in again} == places
    del again
    recycler.clear()
    assert recycler._blocks == []


def test_threads_never_share_a_block(recycler):
    failed = []

    def work(number: int) -> None:
        for turn in range(100):
            block = recycler.bytes(8 << 20)
            block[::4096] = number
            if turn % 10 == 0 and not (block[::4096] == number).all():
                failed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(recycler._blocks) <= 8, "two each: the new one is lent while the last is still there"


def large_batch(backend: Any):
    rows = wide_rows(4, seed=0)
    columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 4, PAGEABLE), 0, on_host(rows))
    return backend.read(columns, np.arange(64) % 4, ["image"], PAGEABLE)


@pytest.mark.parametrize("to", ["torch", "numpy"])
def test_a_batch_is_read_into_memory_that_the_learner_let_go_of(to):
    pytest.importorskip("torch")
    backend = load("torch")
    leaf = backend.hand_over(large_batch(backend), Target(to))["image"]
    place = address(leaf)
    other = large_batch(backend)
    assert address(other.arrays["image"]) != place
    del leaf
    assert address(large_batch(backend).arrays["image"]) == place


def test_what_jax_got_is_never_lent_again():
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    torchs: Any = load("torch")
    kept = large_batch(torchs)
    torchs.hand_over(large_batch(torchs), Target("jax"))
    gc.collect()
    (block,) = torchs._host._recycler._blocks
    assert block.borrower() is kept.arrays["image"].base
    jaxs: Any = load("jax")
    assert jaxs._host._recycler is None


def test_release_gives_idle_memory_back():
    pytest.importorskip("torch")
    backend: Any = load("torch")
    rows = wide_rows(4, seed=0)
    columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 4, PAGEABLE), 0, on_host(rows))
    backend.read(columns, np.arange(64) % 4, ["image"], PAGEABLE)
    recycler = backend._host._recycler
    assert len(recycler._blocks) == 1
    backend.release(columns)
    assert recycler._blocks == []
