"""What can only be seen on a CUDA device: pinned memory, side streams, and that the host is not kept waiting.

The contract suite itself (tests/contract) runs on the CUDA devices too, where there are any.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time

import numpy as np
import pytest

import conduit
from conduit.backends import exchange, load
from conduit.clock import REAL
from conduit.core.backend import Columns, Move, Target
from conduit.core.experience import Field, Schema
from conduit.core.placement import Placement
from conduit.core.probing import known, measure
from conduit.core.reader import Reader
from conduit.core.recipe import Gather, Selection
from conduit.core.ring import Layout
from conduit.core.shard import Shard
from conduit.testing import address, assert_rows, assert_same, assert_stored, example_rows, on_host
from conduit.topology.bandwidth import Source
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier
from conduit.topology.nvidia import gpus
from tests.store.rows import assert_intact, fill, fingerprint, step

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


# Several shards


def shards(backend, endpoints, rows=1000):
    """Rows of every shape, spread over `endpoints`; what reads them, and what they are."""
    values = example_rows(rows, seed=3)
    schema, layout = Schema.infer(values, "test"), Layout(rows, [1.0 + number for number in range(len(endpoints))])
    made = [Shard(backend, schema, count, at) for at, count in zip(endpoints, layout.shard_rows, strict=True)]
    for span in layout.spans(0, rows):
        made[span.shard].write(span.slot, on_host(values).slice(span.offset, span.offset + span.rows))
    return Reader(backend, layout, made, schema, None), values


def selected(values, keys):
    return Selection((Gather(tuple(values), tuple(values), keys, keys.shape),))


def every_device(backend):
    return [at for at in backend.endpoints() if not at.is_host]


def test_a_batch_of_several_shards_is_gathered_where_each_is_and_put_together_in_order(backend):
    reader, values = shards(backend, [PAGEABLE, PINNED, *every_device(backend)])
    torch.cuda.synchronize()
    kept = []
    for number, to in enumerate([PAGEABLE, PINNED, *every_device(backend)] * 8):
        if number % 3 == 0:
            spin(backend)
        keys = np.random.default_rng(number).integers(0, 1000, 96)
        kept.append((keys, to, reader.read(selected(values, keys), to)))
    for keys, to, batch in kept:
        assert batch.at == to
        assert_rows(backend, batch, {path: array[keys] for path, array in values.items()}, to)


def test_a_merged_batch_keeps_nobody_waiting_and_its_parts_memory_is_not_lent_too_early(backend):
    columns, values = stored_images(backend, DEVICE)
    places = [np.arange(0, 64, 2), np.arange(1, 64, 2)]

    def merged(seed):
        index = np.random.default_rng(seed).integers(0, 1024, 64)
        parts = [backend.read(columns, index[place], list(values), DEVICE) for place in places]
        return index, backend.merge(parts, places, 64, DEVICE)

    for seed in range(2):
        backend.wait(merged(seed)[1])
    spin(backend)
    issue_s, (index, batch) = host_seconds(lambda: merged(2))
    assert issue_s < 0.2
    more = [merged(seed) for seed in range(3, 40)]
    for asked, got in [(index, batch), *more]:
        assert_rows(backend, got, {path: array[asked] for path, array in values.items()}, "merged")


def test_rows_grow_on_a_busy_device_and_nobody_waits(backend):
    rows = {"h": np.arange(64 * 3 * 5, dtype=np.float32).reshape(64, 3, 5), "id": np.arange(64, dtype=np.int8)}
    schema = Schema.infer(rows, "test")
    wider = Schema({**schema.fields, "h": Field((4, 9), np.dtype(np.float32))}, schema.structure)
    columns = backend.write(backend.allocate(schema, 64, DEVICE), 0, on_host(rows))
    backend.wait(backend.widen(backend.read(columns, np.arange(64), list(rows), DEVICE), wider))
    spin(backend)
    batch = backend.read(columns, np.arange(64), list(rows), DEVICE)
    issue_s, wide = host_seconds(lambda: backend.widen(batch, wider))
    assert issue_s < 0.2
    expected = np.zeros((64, 4, 9), np.float32)
    expected[:, :3, :5] = rows["h"]
    assert_rows(backend, wide, {"h": expected, "id": rows["id"]}, "wide")


@pytest.mark.parametrize("source", [PAGEABLE, PINNED, DEVICE], ids=str)
@pytest.mark.parametrize("to", [PAGEABLE, PINNED, DEVICE], ids=str)
def test_what_is_moved_may_be_forgotten_while_it_is_on_its_way(backend, source, to):
    """As migration does: rows are gathered, moved, written elsewhere, and both copies given back."""
    columns, values = stored_images(backend, source)
    target = backend.allocate(Schema.infer(values, "test"), 1024, to)
    spin(backend)
    for start in range(0, 1024, 64):
        (copy,) = backend.transfer(
            [Move(backend.read(columns, np.arange(start, start + 64), list(values), source), to)]
        )
        target = backend.scatter(target, 1023 - np.arange(start, start + 64), copy, list(values))
        backend.release(copy)
        del copy
    backend.wait(target)
    assert_stored(backend, target, {path: array[::-1] for path, array in values.items()}, to)


# Migration


def test_a_store_migrates_to_the_device_and_back_and_gives_the_batches_of_one_that_stays(backend):
    settings = {
        "capacity": 4000,
        "batch_size": 64,
        "seed": 5,
        "derive": {"next_obs": conduit.Next("obs")},
        "timeout_s": 60.0,
    }
    places = [
        "device:0",
        "pageable",
        Placement((PAGEABLE, DEVICE, PINNED), (1.0, 3.0, 2.0)),
        "device:0",
        "pinned",
        *(Placement((at,)) for at in every_device(backend)[1:2]),
        "pageable",
    ]
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with (
        conduit.Store(backend=backend, placement="pageable", **settings) as moved,
        conduit.Store(backend="reference", placement="pageable", **settings) as stays,
    ):
        both = (moved, stays)
        actors, learners = [each.actor(lanes=8) for each in both], [each.learner(to="numpy") for each in both]
        moved._wiring.migrator.chunk_bytes = 1 << 14
        number, kept = 0, []

        def push(steps):
            nonlocal number
            for _ in range(steps):
                ended = np.arange(8) % 5 == number % 5
                rows = step(8 * number, 8, terminated=ended)
                for actor in actors:
                    actor.push(rows, final={"obs": step(10_000 + number, int(ended.sum()))["obs"]})
                number += 1

        push(600)
        moved._wiring.migrator.began = lambda phase: push(3) if phase == "gate" else None
        for place in places:
            done = moved.migrate(place)
            assert done.rows == 4000
            assert done.delta_bytes > 0
            for _ in range(3):
                push(2)
                one, other = (learner.pull() for learner in learners)
                assert fingerprint(one) == fingerprint(other), place
                kept.append((one, fingerprint(one)))
        assert set(moved.info()["bytes_by_endpoint"]) == {"pageable"}
        assert [fingerprint(batch) for batch, _ in kept] == [expected for _, expected in kept]
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_rows_move_while_a_learner_on_the_device_pulls_and_none_is_torn(backend):
    stop, failed = threading.Event(), []
    with conduit.Store(backend=backend, capacity=8000, batch_size=128, placement="pageable", timeout_s=60.0) as s:
        actor, learner = s.actor(lanes=16), s.learner(to="torch", device="cuda:0")
        fill(actor, 8000)

        def train():
            try:
                while not stop.is_set():
                    batch = learner.pull()
                    assert batch.data["id"].is_cuda
                    assert_intact(batch)
                    assert exchange.to_numpy(batch.data["id"]).tolist() == batch.info.keys.tolist()
            except BaseException as error:  # raised again below, in the test's own thread
                failed.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            first = 8000
            for place in itertools.chain.from_iterable(
                itertools.repeat(("device:0", "pinned", ["device:0", "pageable"]), 4)
            ):
                s.migrate(place)
                fill(actor, 160, first=first)
                first += 160
        finally:
            stop.set()
            thread.join(timeout=60)
        assert failed == []


def test_what_a_move_leaves_is_free_at_once_for_the_next(backend):
    """By what torch says is free, of which what it keeps for itself is a part."""
    free = backend.free_bytes(DEVICE)
    row_bytes = 1 << 16
    capacity = min(free // 4, 1 << 30) // row_bytes
    with conduit.Store(backend=backend, capacity=capacity, batch_size=8, placement="pageable", timeout_s=120.0) as s:
        s.actor(lanes=8).push({"row": np.zeros((8, row_bytes), np.uint8)})
        least = []
        for _ in range(4):
            s.migrate("device:0")
            least.append(backend.free_bytes(DEVICE))
            s.migrate("pageable")
        assert max(least) - min(least) < capacity * row_bytes // 4


# What there is, and how fast


def test_the_device_is_known_by_its_uuid_and_its_memory_is_measured(backend):
    found = known(backend)
    memory = found.memory(DEVICE)
    assert memory.source is Source.MEASURED
    assert 0 < memory.free_bytes <= memory.capacity_bytes
    if gpus().found:
        assert gpus().named(backend.hardware(DEVICE)) is not None
    for at in backend.endpoints():
        assert found.leg(DEVICE, at).bytes_per_s > 0
        assert found.leg(at, DEVICE).bytes_per_s > 0


def test_a_probe_measures_every_edge_of_the_device_in_seconds(backend):
    took_s, found = host_seconds(lambda: measure(backend, REAL, seconds=5.0))
    assert took_s < 20
    for at in backend.endpoints():
        for edge in ((DEVICE, at), (at, DEVICE)):
            assert found.leg(*edge).source is Source.MEASURED, edge
    inside, across = found.leg(DEVICE, DEVICE), found.leg(PAGEABLE, DEVICE)
    assert inside.bytes_per_s > across.bytes_per_s
    assert (torch.cuda.memory_allocated() >> 20) < 64, "scratch is given back"
