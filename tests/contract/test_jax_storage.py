"""What only JAX can get wrong: donation that copies, starts that clamp, dtypes that narrow, a compilation a shape."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import weakref

import ml_dtypes
import numpy as np
import pytest

from conduit.backends import load
from conduit.backends.jax import kernels
from conduit.core.backend import Columns, Move, Target
from conduit.core.experience import Schema
from conduit.errors import HandOverError
from conduit.testing import address, assert_same, example_rows, index_of, on_host, wide_rows
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

jax = pytest.importorskip("jax")

DEVICES = [Endpoint(Tier.DEVICE, index) for index in range(8)]

INSERT_INTO_ONE_GIB = """
import resource, sys
import numpy as np
from conduit.backends import load
from conduit.core.backend import Columns
from conduit.core.experience import Schema
from conduit.topology.endpoint import PAGEABLE, Endpoint

backend, at = load("jax"), Endpoint.parse("device:0")
rows = {"image": np.ones((256, 4096), np.uint8)}
columns = backend.allocate(Schema.infer(rows, "test"), 1 << 18, at)
index = np.arange(256)

def use(start):
    global columns
    columns = backend.write(columns, start, Columns(PAGEABLE, rows, 256))
    columns = backend.scatter(columns, index + start, Columns(PAGEABLE, rows, 256), ["image"])
    batch = backend.read(columns, index, ["image"], at)
    backend.hand_over(batch, Target("numpy"))
    backend.wait(columns)
    return batch

from conduit.core.backend import Target
kept = [use(0)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for turn in range(1, 20):
    kept.append(use(turn * 4096))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.fixture
def backend():
    return load("jax")


def device_columns(backend, rows=64, at=DEVICES[3]):
    values = example_rows(rows, seed=1)
    return backend.write(backend.allocate(Schema.infer(values, "test"), rows, at), 0, on_host(values)), values


def pointers(columns):
    return {path: address(array) for path, array in columns.arrays.items() if array.nbytes}


@pytest.mark.parametrize("at", DEVICES, ids=str)
def test_storage_stays_where_it_is_through_writes_scatters_and_reads(backend, at):
    columns, values = device_columns(backend, at=at)
    before = pointers(columns)
    for turn in range(5):
        columns = backend.write(columns, turn, on_host(example_rows(7, seed=turn)))
        columns = backend.scatter(columns, index_of(1, 60), on_host(example_rows(2, seed=turn)), list(values))
        kept = [backend.read(columns, np.arange(64), list(values), to) for to in (at, PAGEABLE, DEVICES[0])]
        kept = [backend.hand_over(batch, Target(name)) for batch in kept for name in ("numpy", "torch", "jax")]
    assert pointers(columns) == before


@pytest.mark.parametrize("source", [PAGEABLE, DEVICES[2], DEVICES[5]], ids=str)
def test_moved_and_handed_out_columns_are_still_written_in_place(backend, source):
    values = example_rows(64, seed=1)
    columns = backend.write(backend.allocate(Schema.infer(values, "test"), 64, source), 0, on_host(values))
    copy, beside, home = backend.transfer([Move(columns, to) for to in (DEVICES[5], DEVICES[6], PAGEABLE)])
    before = pointers(copy), pointers(beside)
    copy, beside = (backend.write(c, 3, on_host(example_rows(4, seed=2))) for c in (copy, beside))
    assert (pointers(copy), pointers(beside)) == before
    for path, array in values.items():
        assert_same(home.arrays[path], array, path)


def test_inserting_into_a_gibibyte_needs_no_second_one():
    done = subprocess.run([sys.executable, "-c", INSERT_INTO_ONE_GIB], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200, f"peak memory grew by {done.stdout} MiB"


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.float16, np.float32, np.bool_], ids=str
)
def test_a_small_write_costs_no_pass_over_the_buffer(backend, dtype):
    """XLA's CPU widens bfloat16 and float8: a write into 256 MiB of them would take over 100 ms, and of bytes 0.1."""
    values = {"a": np.ones((4, 4096), dtype)}
    columns = backend.allocate(Schema.infer(values, "test"), (256 << 20) // values["a"][0].nbytes, DEVICES[0])
    seconds = []
    for turn in range(6):
        started = time.perf_counter()
        columns = backend.write(columns, turn, on_host(values))
        columns = backend.scatter(columns, index_of(9, 5, 7, 1), on_host(values), ["a"])
        backend.wait(columns)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.01


def test_stored_columns_are_handed_over_under_their_own_dtype(backend):
    columns, values = device_columns(backend)
    for path, array in backend.hand_over(columns, Target("jax")).items():
        assert_same(array, values[path], path)


def test_the_columns_given_to_write_are_consumed(backend):
    columns, _ = device_columns(backend)
    backend.write(columns, 0, on_host(example_rows(1, seed=2)))
    assert all(array.is_deleted() for array in columns.arrays.values() if array.nbytes)


def test_release_frees_device_memory_at_once(backend):
    columns, _ = device_columns(backend)
    backend.release(columns)
    assert all(array.is_deleted() for array in columns.arrays.values())


@pytest.mark.parametrize("largest", [1, 4, 64, 1 << 20])
def test_pieces_are_powers_of_two_that_cover_every_row_once(largest):
    for rows in range(200):
        covered = [row for start, size in kernels.pieces(rows, largest) for row in range(start, start + size)]
        sizes = {size for _, size in kernels.pieces(rows, largest)}
        assert covered == list(range(rows))
        assert all(size <= largest and size & (size - 1) == 0 for size in sizes)


def test_a_hundred_write_sizes_are_seven_compilations(backend, caplog):
    columns = backend.allocate(Schema.infer(example_rows(1, seed=0), "test"), 103, DEVICES[3])
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for count in range(1, 101):
            columns = backend.write(columns, 0, on_host(example_rows(count, seed=count)))
    compiled = [record for record in caplog.records if "Compiling jit(put)" in record.getMessage()]
    assert len(compiled) == 7, "one for each of 1, 2, … 64 rows"


def test_batches_of_one_shape_are_handed_over_without_compiling_again(backend, caplog):
    columns, values = device_columns(backend, at=PAGEABLE)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for turn in range(20):
            batch = backend.read(columns, np.random.default_rng(turn).integers(0, 64, 11), list(values), PAGEABLE)
            backend.hand_over(batch, Target("jax"))
    compiled = [record for record in caplog.records if "Compiling jit(copies)" in record.getMessage()]
    assert len(compiled) <= 1


@pytest.mark.parametrize("device", [0, 6])
def test_every_array_of_a_batch_is_committed_to_its_device(backend, device):
    rows = {**example_rows(4, seed=1), **wide_rows(4, seed=1)}
    target = Target("jax", device=jax.devices()[device])
    arrays = backend.hand_over(on_host(rows), target)
    again = backend.hand_over(Columns(DEVICES[device], arrays, 4), target)
    for path, array in rows.items():
        for got in (arrays[path], again[path]):
            assert got.committed
            assert got.devices() == {jax.devices()[device]}
            assert_same(got, array, path)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.debug_nans(True),
        lambda: jax.debug_infs(True),
        jax.disable_jit,
        lambda: jax.set_mesh(jax.make_mesh((8,), ("data",))),
        lambda: jax.default_device(jax.devices()[3]),
        jax.checking_leaks,
        lambda: jax.enable_x64(True),
    ],
    ids=["guard", "nans", "infs", "no jit", "mesh", "default device", "leaks", "x64"],
)
def test_a_batch_is_handed_over_under_any_setting_of_jax(backend, setting):
    rows = {**example_rows(9, seed=1), **wide_rows(2, seed=1)}
    rows = {path: array[:2] for path, array in rows.items()} | {"nan": np.array([np.nan, np.inf], np.float32)}
    with setting():
        for target in (Target("jax"), Target("jax", device="cpu:6")):
            for path, array in backend.hand_over(on_host(rows), target).items():
                assert isinstance(array, jax.Array), path
                assert np.asarray(array).tobytes() == rows[path].tobytes(), path


def test_memory_of_dropped_batches_is_free_when_the_next_is_read(backend):
    """JAX holds on to what its dropped arrays aliased until it is called again."""
    rows = wide_rows(4, seed=1)
    columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 4, PAGEABLE), 0, on_host(rows))
    batch = backend.read(columns, np.arange(4), ["image"], PAGEABLE)
    memory = weakref.ref(batch.arrays["image"].base)
    arrays = jax.block_until_ready(backend.hand_over(batch, Target("jax")))
    del batch, arrays
    backend.read(columns, np.arange(4), ["image"], PAGEABLE)
    assert memory() is None


def test_with_x64_on_wide_dtypes_are_held_exactly():
    code = """
import numpy as np, jax
jax.config.update("jax_enable_x64", True)
from conduit.backends import load
from conduit.core.backend import Columns, Target
from conduit.core.experience import Schema
from conduit.topology.endpoint import PAGEABLE, Endpoint
backend, at = load("jax"), Endpoint.parse("device:0")
rows = {str(n): np.full((4, 2), v, n) for n, v in (("int64", 1 << 60), ("float64", 1 + 1e-15), ("uint64", 1 << 63))}
columns = backend.write(backend.allocate(Schema.infer(rows, "t"), 4, at), 0, Columns(PAGEABLE, rows, 4))
columns = backend.scatter(columns, np.array([1]), Columns(PAGEABLE, {p: a[:1] for p, a in rows.items()}, 1), list(rows))
got = backend.hand_over(backend.read(columns, np.arange(4), list(rows), at), Target("jax"))
assert all(np.array_equal(got[p], rows[p]) and got[p].dtype == rows[p].dtype for p in rows), got
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["reference", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_a_dtype_that_jax_narrows_is_not_handed_to_it(name, dtype):
    backend = load(name)
    batch = Columns(PAGEABLE, {"obs/count": np.ones((4, 2), dtype)}, 4)
    with pytest.raises(HandOverError, match=rf"'obs/count' is {dtype}.*cast it.*jax_enable_x64.*to='numpy'"):
        backend.hand_over(batch, Target("jax"))
    assert backend.hand_over(batch, Target("numpy"))["obs/count"].dtype == dtype


def test_a_wide_tensor_on_torch_s_device_is_not_handed_to_jax():
    torch, backend = pytest.importorskip("torch"), load("torch")
    batch = backend.adopt({"reward": torch.ones(4, dtype=torch.float64)}, Endpoint(Tier.DEVICE))
    with pytest.raises(HandOverError, match=r"'reward' is float64.*jax_enable_x64"):
        backend.hand_over(batch, Target("jax"))


@pytest.mark.parametrize("name", ["reference", "torch", "jax"])
class TestPlacingABatch:
    def test_on_a_device(self, name):
        backend, values = load(name), example_rows(8, seed=3)
        for device in (jax.devices()[6], "cpu:6"):
            arrays = backend.hand_over(on_host(values), Target("jax", device=device))
            for path, array in values.items():
                assert arrays[path].devices() == {jax.devices()[6]}
                assert_same(arrays[path], array, path)

    @pytest.mark.parametrize("at", [PAGEABLE, DEVICES[0]], ids=str)
    def test_split_over_devices(self, name, at):
        backend, values = load(name), example_rows(16, seed=3)
        sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec("data"))
        columns = backend.write(backend.allocate(Schema.infer(values, "test"), 16, at), 0, on_host(values))
        batch = backend.read(columns, np.arange(16), list(values), at)
        arrays = backend.hand_over(batch, Target("jax", sharding=sharding))
        for path, array in values.items():
            assert arrays[path].sharding.is_equivalent_to(sharding, array.ndim)
            assert [shard.data.shape[0] for shard in arrays[path].addressable_shards] == [2] * 8
            assert_same(arrays[path], array, path)

    def test_that_the_devices_cannot_share_evenly_is_refused(self, name):
        backend = load(name)
        sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("data",)), jax.sharding.PartitionSpec("data"))
        with pytest.raises(HandOverError, match=r"'scalar' of shape \(12,\) can't be split.*8"):
            backend.hand_over(on_host(example_rows(12, seed=0)), Target("jax", sharding=sharding))

    def test_where_there_is_no_such_place_is_refused(self, name):
        backend, batch = load(name), on_host(example_rows(8, seed=0))
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for target, reason in (
            (Target("jax", device="cpu:8"), "'cpu:8' is no JAX device"),
            (Target("jax", device="gpu:0"), "'gpu:0' is no JAX device"),
            (Target("jax", device=3), "names no JAX device"),
            (Target("jax", sharding="data"), r"no jax.sharding.Sharding"),
            (Target("jax", device="cpu:0", sharding=sharding), "a device or to a sharding"),
        ):
            with pytest.raises(HandOverError, match=reason):
                backend.hand_over(batch, target)
