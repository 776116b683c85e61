"""What a backend must do, as tests. Needs pytest; imports no framework until a test asks for one.

    class TestMine(BackendContract):
        narrowed = frozenset({"int64"})          # what its devices can't hold, if anything

        @pytest.fixture
        def backend(self):
            return MyBackend()

Every case visits every endpoint of the backend. None may be skipped or overridden.
"""

from __future__ import annotations

import gc
import importlib.util
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from conduit.backends import exchange
from conduit.clock import REAL, Clock
from conduit.core.backend import Backend, Columns, Move, RowIndex, Target
from conduit.core.experience import Schema
from conduit.errors import CapacityError, HandOverError, MissingExtraError, SchemaError
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

try:
    import pytest
except ImportError as error:
    raise MissingExtraError(
        "conduit.testing.backends needs pytest; install it with: pip install 'conduit-rl[test]'"
    ) from error

Rows = dict[str, NDArray[Any]]

DTYPES = tuple(
    np.dtype(kind)
    for kind in (
        *(np.bool_, np.uint8, np.int32, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64),
        *(np.int8, np.uint16, np.uint32, np.uint64, np.complex128, ml_dtypes.float8_e5m2),
    )
)
"""Dtypes that every host tier holds, and every device tier holds or refuses."""

SHAPES = {"scalar": (), "odd": (3,), "image": (2, 3, 4), "wide": (64,), "nothing": (0,)}

FRAMEWORKS = tuple(name for name in ("numpy", "torch", "jax") if importlib.util.find_spec(name) is not None)


def example_rows(rows: int, seed: int, dtypes: Mapping[str, np.dtype[Any]] | None = None) -> Rows:
    """Rows of random bits (so NaNs and negative zeros too), one field for each shape, or one for each of `dtypes`."""
    bits = np.random.default_rng(seed)
    kinds = (np.float32, np.uint8, ml_dtypes.bfloat16, np.int32, np.float16)
    layout = {name: (shape, np.dtype(kind)) for (name, shape), kind in zip(SHAPES.items(), kinds, strict=True)}
    if dtypes is not None:
        layout = {name: ((3,), dtype) for name, dtype in dtypes.items()}
    return {name: random_bits(bits, (rows, *shape), dtype) for name, (shape, dtype) in layout.items()}


def random_bits(bits: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype == np.bool_:
        return bits.integers(0, 2, shape).astype(np.bool_)
    count = int(np.prod(shape))
    return np.frombuffer(bits.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()


def wide_rows(rows: int, seed: int) -> Rows:
    """Rows of one wide field and one narrow one; 16 of them are a large batch."""
    bits = np.random.default_rng(seed)
    return {
        "image": random_bits(bits, (rows, 1024, 1024), np.dtype(np.uint8)),
        "reward": random_bits(bits, (rows,), np.dtype(np.float32)),
    }


def on_host(rows: Mapping[str, NDArray[Any]]) -> Columns[Any]:
    return Columns(PAGEABLE, dict(rows), len(next(iter(rows.values()))))


def address(array: Any) -> int:
    """Where the array's first byte is."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.data_ptr() if exchange.framework_of(array) == "torch" else array.unsafe_buffer_pointer()


def span(array: Any) -> range:
    return range(address(array), address(array) + array.nbytes)


def overlap(one: Any, other: Any) -> bool:
    """Whether two arrays share memory."""
    a, b = span(one), span(other)
    return max(a.start, b.start) < min(a.stop, b.stop)


def index_of(*rows: int) -> RowIndex:
    return np.array(rows, np.int64)


def assert_same(got: Any, expected: NDArray[Any], where: object) -> None:
    """The same dtype, shape and bits, NaNs included."""
    array = exchange.to_numpy(got)
    assert array.dtype == expected.dtype, f"{where}: {array.dtype} for {expected.dtype}"
    assert array.shape == expected.shape, f"{where}: {array.shape} for {expected.shape}"
    assert array.tobytes() == expected.tobytes(), f"{where}: other bits"


def assert_rows(
    backend: Backend[Any], columns: Columns[Any], expected: Mapping[str, NDArray[Any]], where: object
) -> None:
    """`columns`, a batch, holds exactly `expected`."""
    backend.wait(columns)
    assert columns.arrays.keys() == expected.keys(), where
    for path, rows in expected.items():
        assert_same(columns.arrays[path], rows, (where, path))


def stored(backend: Backend[Any], columns: Columns[Any]) -> Rows:
    """A copy of all that `columns` holds, taken through `read`, as a batch would be."""
    everything = backend.read(columns, np.arange(columns.rows), list(columns.arrays), PAGEABLE)
    backend.wait(everything)
    return {path: np.array(array) for path, array in everything.arrays.items()}


def assert_stored(
    backend: Backend[Any], columns: Columns[Any], expected: Mapping[str, NDArray[Any]], where: object
) -> None:
    assert_rows(backend, on_host(stored(backend, columns)), expected, where)


class BackendContract:
    """The promises of `conduit.core.backend.Backend`. Subclass it and give a `backend` fixture."""

    narrowed: ClassVar[frozenset[str]] = frozenset()
    """Names of the DTYPES that the device tiers can't hold exactly, and so must refuse."""

    @pytest.fixture
    def backend(self) -> Backend[Any]:
        raise NotImplementedError("a subclass of BackendContract gives the backend to test")

    @pytest.fixture
    def clock(self) -> Clock:
        """The clock of the cases' threads: the one that the backend's waits go through, if it isn't the wall's."""
        return REAL

    def filled(self, backend: Backend[Any], at: Endpoint, rows: int = 16, seed: int = 1) -> tuple[Columns[Any], Rows]:
        """Columns at `at` full of random rows, and those rows."""
        values = example_rows(rows, seed)
        return backend.write(backend.allocate(Schema.infer(values, "test"), rows, at), 0, on_host(values)), values

    # Endpoints

    def test_endpoints_are_distinct_and_pageable_host_is_first(self, backend: Backend[Any]):
        endpoints = backend.endpoints()
        assert endpoints[0] == PAGEABLE
        assert len(set(endpoints)) == len(endpoints)
        assert all(0 < backend.free_bytes(at) < 1 << 60 for at in endpoints)

    def test_an_endpoint_that_is_not_there_is_refused_by_name(self, backend: Backend[Any]):
        nowhere, rows = Endpoint(Tier.DEVICE, 99), example_rows(2, seed=0)
        columns = on_host(rows)
        for attempt in (
            lambda: backend.free_bytes(nowhere),
            lambda: backend.allocate(Schema.infer(rows, "test"), 2, nowhere),
            lambda: backend.read(columns, index_of(0), list(rows), nowhere),
            lambda: backend.transfer([Move(columns, nowhere)]),
            lambda: backend.adopt(rows, nowhere),
        ):
            with pytest.raises(ValueError, match=r"device:99.*pageable"):
                attempt()

    def test_columns_larger_than_memory_are_refused_with_the_figures(self, backend: Backend[Any]):
        schema = Schema.infer({"image": np.zeros((1, 1 << 20), np.float32)}, "test")
        for at in backend.endpoints():
            with pytest.raises(CapacityError, match=r"1,073,741,824 rows of 4,194,304 bytes.* GB free"):
                backend.allocate(schema, 1 << 30, at)

    # What goes in comes out

    def test_fresh_columns_are_zero(self, backend: Backend[Any]):
        rows = example_rows(5, seed=0)
        for at in backend.endpoints():
            columns = backend.allocate(Schema.infer(rows, "test"), 5, at)
            assert columns.at == at
            assert columns.rows == 5
            assert_stored(backend, columns, {path: np.zeros_like(array) for path, array in rows.items()}, at)

    def test_a_row_of_every_shape_comes_back_bit_for_bit(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            assert_stored(backend, columns, rows, at)

    def test_every_dtype_comes_back_bit_for_bit_or_is_refused(self, backend: Backend[Any]):
        for at in backend.endpoints():
            held = {dtype.name: dtype for dtype in DTYPES if at.is_host or dtype.name not in self.narrowed}
            rows = example_rows(8, seed=2, dtypes=held)
            columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 8, at), 0, on_host(rows))
            assert_stored(backend, columns, rows, at)
            index = index_of(7, 0, 3)
            columns = backend.scatter(
                columns, index, on_host({path: array[:3] for path, array in rows.items()}), list(rows)
            )
            for path in rows:
                rows[path][index] = rows[path][:3].copy()
            assert_stored(backend, columns, rows, at)

    def test_a_dtype_that_a_device_would_change_is_refused_by_field_and_with_a_remedy(self, backend: Backend[Any]):
        for at in backend.endpoints():
            for name in () if at.is_host else sorted(self.narrowed):
                rows = example_rows(4, seed=0, dtypes={"count": np.dtype(name)})
                columns = on_host(rows)
                for attempt in (
                    partial(backend.allocate, Schema.infer(rows, "test"), 4, at),
                    partial(backend.read, columns, index_of(1), ["count"], at),
                    partial(backend.transfer, [Move(columns, at)]),
                    partial(backend.adopt, rows, at),
                ):
                    with pytest.raises(SchemaError, match=rf"^'count' is {name}.*cast it.*host"):
                        attempt()

    def test_writes_of_every_size_land_where_they_were_aimed(self, backend: Backend[Any]):
        for at in {at.tier: at for at in reversed(backend.endpoints())}.values():
            columns, expected = self.filled(backend, at, rows=37)
            for count in range(12):
                rows = example_rows(count, seed=10 + count)
                columns = backend.write(columns, 37 - 11 - count, on_host(rows))
                for path, array in rows.items():
                    expected[path][37 - 11 - count : 37 - 11] = array
            assert_stored(backend, columns, expected, at)

    def test_rows_at_the_same_endpoint_can_be_written_and_scattered(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, expected = self.filled(backend, at)
            source, rows = self.filled(backend, at, seed=5)
            batch = backend.read(source, index_of(3, 9, 4), list(rows), at)
            columns = backend.write(columns, 13, batch)
            columns = backend.scatter(columns, index_of(2, 0, 7), batch, list(rows))
            for path, array in rows.items():
                expected[path][13:16] = expected[path][[2, 0, 7]] = array[[3, 9, 4]]
            assert_stored(backend, columns, expected, at)

    def test_a_scatter_changes_the_named_rows_of_the_named_fields_only(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, expected = self.filled(backend, at)
            rows = example_rows(3, seed=6)
            columns = backend.scatter(columns, index_of(15, 0, 8), on_host(rows), ["image", "scalar"])
            for path in ("image", "scalar"):
                expected[path][[15, 0, 8]] = rows[path]
            assert_stored(backend, columns, expected, at)

    def test_a_row_scattered_twice_is_there_once(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, expected = self.filled(backend, at)
            rows = {path: array[[0, 1, 0, 0]] for path, array in example_rows(2, seed=7).items()}
            columns = backend.scatter(columns, index_of(4, 11, 4, 4), on_host(rows), list(rows))
            for path, array in rows.items():
                expected[path][[4, 11]] = array[:2]
            assert_stored(backend, columns, expected, at)

    def test_no_rows_are_written_scattered_read_and_moved_without_ado(self, backend: Backend[Any]):
        nothing, none = example_rows(0, seed=0), index_of()
        for at in backend.endpoints():
            columns, expected = self.filled(backend, at)
            for start in (0, 16):
                columns = backend.write(columns, start, on_host(nothing))
            columns = backend.scatter(columns, none, on_host(nothing), list(nothing))
            assert_rows(backend, backend.read(columns, none, list(nothing), at), nothing, at)
            assert_stored(backend, columns, expected, at)
            empty = backend.allocate(Schema.infer(nothing, "test"), 0, at)
            (copy,) = backend.transfer([Move(empty, at)])
            assert_stored(backend, copy, nothing, at)

    def test_a_padded_index_is_at_least_as_long_and_reads_alike(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            sizes = [backend.padded(count, at) for count in range(70)]
            assert all(size >= count for count, size in enumerate(sizes)), at
            assert [backend.padded(size, at) for size in sizes] == sizes, at
            index = np.resize(index_of(3, 1, 9, 12, 5), backend.padded(5, at))
            assert_rows(
                backend, backend.read(columns, index, list(rows), at), {p: a[index] for p, a in rows.items()}, at
            )

    def test_batches_are_merged_row_by_row_where_they_are(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            for counts in ((4, 3, 1), (8,), (0, 8), (5, 3)):
                order = np.random.default_rng(len(counts)).permutation(8)
                places = np.split(order, np.cumsum(counts)[:-1])
                wanted = np.array([3, 15, 3, 0, 8, 2, 9, 9])
                parts = []
                for k, place in enumerate(places):
                    # Some of them longer than they need be: the last row again.
                    longer = max(len(place), 1 if k == 0 else backend.padded(len(place), at))
                    places[k] = np.pad(place, (0, longer - len(place)), mode="edge") if len(place) else place
                    parts.append(backend.read(columns, wanted[places[k]], list(rows), at))
                merged = backend.merge(parts, places, 8, at)
                assert (merged.at, merged.rows) == (at, 8)
                assert_rows(backend, merged, {path: array[wanted] for path, array in rows.items()}, (at, counts))
                columns = backend.write(columns, 0, on_host({path: array[:1] for path, array in rows.items()}))

    def test_a_merged_batch_lies_in_memory_of_its_own_and_survives_what_it_was_made_of(self, backend: Backend[Any]):
        rows = wide_rows(8, seed=1)
        for at in {at.tier: at for at in reversed(backend.endpoints())}.values():
            columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 8, at), 0, on_host(rows))
            halves = [backend.read(columns, half, list(rows), at) for half in (index_of(6, 4), index_of(1, 3))]
            merged = backend.merge(halves, [index_of(0, 3), index_of(2, 1)], 4, at)
            backend.wait(merged)
            assert not any(overlap(merged.arrays[path], columns.arrays[path]) for path in rows), at
            columns = backend.write(columns, 0, on_host(wide_rows(8, seed=2)))
            del halves
            backend.release(columns)
            assert all(at.tier is Tier.DEVICE or address(array) % 64 == 0 for array in merged.arrays.values()), at
            assert_rows(backend, merged, {path: array[[6, 3, 1, 4]] for path, array in rows.items()}, at)

    def test_every_dtype_is_merged_bit_for_bit(self, backend: Backend[Any]):
        for at in backend.endpoints():
            held = {dtype.name: dtype for dtype in DTYPES if at.is_host or dtype.name not in self.narrowed}
            rows = example_rows(8, seed=2, dtypes=held)
            columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 8, at), 0, on_host(rows))
            parts = [backend.read(columns, half, list(rows), at) for half in (index_of(7, 0), index_of(3, 3, 5))]
            merged = backend.merge(parts, [index_of(4, 1), index_of(0, 2, 3)], 5, at)
            assert_rows(backend, merged, {path: array[[3, 0, 3, 5, 7]] for path, array in rows.items()}, at)

    def test_a_merge_that_cannot_be_is_refused(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            part = backend.read(columns, index_of(0, 1), list(rows), at)
            for wrong in (index_of(0, 2), index_of(-1, 0), index_of(0, 1 << 32)):
                with pytest.raises(IndexError, match=r"outside \[0, 2\)"):
                    backend.merge([part], [wrong], 2, at)
            with pytest.raises(IndexError, match="1 places for 2 rows"):
                backend.merge([part], [index_of(0)], 2, at)

    def test_rows_grow_with_zeros_at_the_end_of_their_axes(self, backend: Backend[Any]):
        kinds = {"scalar": (), "odd": (5,), "image": (2, 6, 4), "wide": (64,), "nothing": (2,)}
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            index = index_of(3, 9, 9, 0)
            wide = {path: np.zeros((4, *shape), rows[path].dtype) for path, shape in kinds.items()}
            for path, array in wide.items():
                array[tuple(map(slice, (4, *rows[path].shape[1:])))] = rows[path][index]
            schema = Schema.infer(wide, "test")
            grown = backend.widen(backend.read(columns, index, list(rows), at), schema)
            assert (grown.at, grown.rows) == (at, 4)
            assert_rows(backend, grown, wide, at)
            stored = backend.write(backend.allocate(schema, 4, at), 0, grown)
            assert_stored(backend, stored, wide, at)
            with pytest.raises(SchemaError, match=r"'odd' has rows of shape \[5\]"):
                backend.widen(grown, Schema.infer(rows, "test"))

    # Out of range

    def test_a_range_outside_the_columns_is_refused_and_nothing_changes(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, expected = self.filled(backend, at)
            rows = on_host(example_rows(3, seed=3))
            for start in (-1, -3, -16, 14, 16, 17, 1 << 40):
                with pytest.raises(IndexError, match=r"\[0, 16\)"):
                    backend.write(columns, start, rows)
            assert_stored(backend, columns, expected, at)

    def test_an_index_outside_the_columns_is_refused_and_nothing_changes(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, expected = self.filled(backend, at)
            rows = on_host(example_rows(3, seed=3))
            for wrong in (-1, -16, 16, 1 << 32, (1 << 32) + 1, -(1 << 63)):
                with pytest.raises(IndexError, match=r"outside \[0, 16\)"):
                    backend.scatter(columns, index_of(0, wrong, 1), rows, list(expected))
                with pytest.raises(IndexError, match=r"outside \[0, 16\)"):
                    backend.read(columns, index_of(0, wrong, 1), list(expected), at)
            assert_stored(backend, columns, expected, at)

    def test_an_index_of_another_kind_or_length_is_refused(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, expected = self.filled(backend, at)
            rows = on_host(example_rows(3, seed=3))
            for wrong in (np.array([0.0, 1.0, 2.0]), np.array([[0, 1, 2]]), np.array([True, False, True])):
                with pytest.raises(IndexError, match="one-dimensional int64"):
                    backend.read(columns, wrong, list(expected), at)
            with pytest.raises(IndexError, match="2 row numbers for 3 rows"):
                backend.scatter(columns, index_of(0, 1), rows, list(expected))
            assert_stored(backend, columns, expected, at)

    # Who owns what

    def test_a_read_survives_later_writes(self, backend: Backend[Any]):
        for at in backend.endpoints():
            for to in {at, PAGEABLE}:
                columns, rows = self.filled(backend, at)
                everything, some = np.arange(16), index_of(5, 5, 0)
                batches = [(index, backend.read(columns, index, list(rows), to)) for index in (everything, some)]
                columns = backend.write(columns, 0, on_host(example_rows(16, seed=9)))
                columns = backend.scatter(columns, some[:2], on_host(example_rows(2, seed=8)), ["scalar"])
                backend.release(columns)
                for index, batch in batches:
                    assert_rows(backend, batch, {path: array[index] for path, array in rows.items()}, (at, to))

    def test_rows_are_read_from_any_endpoint_to_any_other(self, backend: Backend[Any]):
        index = index_of(15, 2, 2, 0)
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            for to in backend.endpoints():
                batch = backend.read(columns, index, ["image", "scalar"], to)
                assert batch.at == to
                assert_rows(backend, batch, {path: rows[path][index] for path in ("image", "scalar")}, (at, to))

    def test_a_transfer_is_a_copy_in_memory_of_its_own(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            copies = backend.transfer([Move(columns, to) for to in backend.endpoints()])
            assert [copy.at for copy in copies] == list(backend.endpoints())
            for copy in copies:
                backend.wait(copy)
                assert not any(overlap(copy.arrays[path], columns.arrays[path]) for path in rows), (at, copy.at)
            columns = backend.write(columns, 0, on_host(example_rows(16, seed=9)))
            for number, copy in enumerate(copies):
                assert_stored(backend, copy, rows, (at, copy.at))
                # The copy is storage like any other: it can be written, and nothing else changes.
                copies[number] = backend.write(copy, 4, on_host({path: array[:2] for path, array in rows.items()}))
            assert_stored(backend, columns, example_rows(16, seed=9), at)
            changed = {path: np.concatenate([array[:4], array[:2], array[6:]]) for path, array in rows.items()}
            for copy in copies:
                assert_stored(backend, copy, changed, (at, copy.at))

    def test_rows_that_no_page_in_memory_has_are_the_same_and_go_on_being_written(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            backend.uncache(columns)
            assert_stored(backend, columns, rows, at)
            fresh = example_rows(4, seed=7)
            columns = backend.write(columns, 3, on_host(fresh))
            backend.uncache(columns)
            expected = {path: np.concatenate([array[:3], fresh[path], array[7:]]) for path, array in rows.items()}
            assert_stored(backend, columns, expected, at)

    def test_nothing_handed_out_shares_memory_with_storage(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            for to in backend.endpoints():
                batch = backend.read(columns, np.arange(16), list(rows), to)
                backend.wait(batch)
                given = [batch.arrays, *(backend.hand_over(batch, Target(name)) for name in FRAMEWORKS)]
                for arrays in given:
                    for path in rows:
                        assert not overlap(arrays[path], columns.arrays[path]), (at, to, path)

    def test_writing_to_a_batch_changes_no_stored_row(self, backend: Backend[Any]):
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            batch = backend.read(columns, np.arange(16), list(rows), PAGEABLE)
            backend.wait(batch)
            for array in batch.arrays.values():
                if array.flags.writeable:
                    array.view(np.uint8)[...] = 0x55
            assert_stored(backend, columns, rows, at)

    @pytest.mark.parametrize("framework", FRAMEWORKS)
    def test_a_hundred_kept_batches_stay_intact(self, backend: Backend[Any], framework: str):
        for at in (backend.endpoints()[0], backend.endpoints()[-1]):
            columns, rows = self.filled(backend, at, rows=32)
            kept = []
            for number in range(100):
                index = np.random.default_rng(number).integers(0, 32, 8)
                batch = backend.read(columns, index, list(rows), backend.landing(Target(framework)))
                backend.order(batch)
                kept.append(
                    (backend.hand_over(batch, Target(framework)), {path: array[index] for path, array in rows.items()})
                )
                del batch
                fresh = example_rows(4, seed=1000 + number)
                columns = backend.write(columns, number % 29, on_host(fresh))
                rows = {path: array.copy() for path, array in rows.items()}
                for path, array in fresh.items():
                    rows[path][number % 29 : number % 29 + 4] = array
                if number % 25 == 0:
                    gc.collect()
            backend.release(columns)
            del columns
            gc.collect()
            for number, (arrays, expected) in enumerate(kept):
                for path, array in expected.items():
                    assert_same(arrays[path], array, (at, number, path))

    def test_released_columns_take_no_others_with_them(self, backend: Backend[Any]):
        for at in backend.endpoints():
            first, _ = self.filled(backend, at, seed=1)
            second, rows = self.filled(backend, at, seed=2)
            backend.release(first)
            del first
            gc.collect()
            third, _ = self.filled(backend, at, seed=3)
            assert_stored(backend, second, rows, at)
            backend.release(third)

    @pytest.mark.parametrize("where", ["the same rows", "other rows"])
    def test_readers_beside_a_writer_see_whole_rows(self, backend: Backend[Any], clock: Clock, where: str):
        """One lock serialises the calls, as a Shard's does; the results are used outside it."""
        at = backend.endpoints()[-1]
        values = {"head": np.zeros(64, np.int32), "body": np.zeros((64, 256), np.int32)}
        shared = {"columns": backend.allocate(Schema.infer(values, "test"), 64, at)}
        lock, torn = threading.Lock(), list[str]()
        mine = index_of(*range(32)) if where == "the same rows" else index_of(*range(32, 64))

        def write() -> None:
            for number in range(1, 61):
                rows = {"head": np.full(32, number, np.int32), "body": np.full((32, 256), number, np.int32)}
                with lock:
                    shared["columns"] = backend.write(shared["columns"], 0, on_host(rows))

        def read() -> None:
            for _ in range(60):
                with lock:
                    batch = backend.read(shared["columns"], mine, ["head", "body"], at)
                backend.wait(batch)
                head, body = (exchange.to_numpy(batch.arrays[path]) for path in ("head", "body"))
                if (
                    not (body == head[:, None]).all()
                    or len(np.unique(head)) != 1
                    or (where == "other rows" and head.any())
                ):
                    torn.append(f"heads {np.unique(head)}, bodies {np.unique(body)}")

        _in_threads(clock, write, read, read)
        assert torn == []

    # Between frameworks

    @pytest.mark.parametrize("framework", FRAMEWORKS)
    def test_arrays_of_any_framework_are_adopted_as_copies(self, backend: Backend[Any], framework: str):
        rows = example_rows(6, seed=4)
        for at in backend.endpoints():
            source = exchange.accept({path: array.copy() for path, array in rows.items()}, Target(framework))
            copy = backend.adopt(source, at)
            backend.wait(copy)
            assert copy.at == at
            assert copy.rows == 6
            assert not any(overlap(copy.arrays[path], source[path]) for path in rows), at
            assert_rows(backend, copy, rows, (framework, at))

    def test_a_copy_that_was_adopted_keeps_its_values(self, backend: Backend[Any]):
        for at in backend.endpoints():
            rows = example_rows(600, seed=4)
            source = {path: array.copy() for path, array in rows.items()}
            copy = backend.adopt(source, at)
            for array in source.values():
                array.view(np.uint8)[...] = 0xAA
            assert_rows(backend, copy, rows, at)

    def test_awkward_numpy_arrays_are_adopted_by_value(self, backend: Backend[Any]):
        base = np.arange(48, dtype=np.float32).reshape(8, 6)
        readonly = base.copy()
        readonly.flags.writeable = False
        awkward = {
            "reversed": base[::-1],
            "mirrored": base[:, ::-1],
            "every other": np.arange(96, dtype=np.float32).reshape(16, 6)[::2],
            "transposed": np.arange(48, dtype=np.float32).reshape(6, 8).T,
            "repeated": np.broadcast_to(base[:1], (8, 6)),
            "read-only": readonly,
            "brain": base.astype(ml_dtypes.bfloat16)[::-1],
        }
        for at in backend.endpoints():
            assert_rows(
                backend, backend.adopt(awkward, at), {p: np.ascontiguousarray(a) for p, a in awkward.items()}, at
            )

    def test_what_has_no_rows_or_is_no_array_is_refused(self, backend: Backend[Any]):
        for at in backend.endpoints():
            with pytest.raises(SchemaError, match=r"'reward' has no axes"):
                backend.adopt({"reward": np.array(1.0, np.float32)}, at)
            with pytest.raises(SchemaError, match="different numbers of rows"):
                backend.adopt({"a": np.zeros(3, np.float32), "b": np.zeros(4, np.float32)}, at)
            with pytest.raises(SchemaError, match="got list, which is no array"):
                backend.adopt({"reward": [1.0, 2.0]}, at)

    @pytest.mark.parametrize("framework", FRAMEWORKS)
    def test_a_batch_is_handed_over_bit_for_bit_from_any_endpoint(self, backend: Backend[Any], framework: str):
        for at in backend.endpoints():
            columns, rows = self.filled(backend, at)
            batch = backend.read(columns, index_of(9, 1, 1, 14), list(rows), at)
            arrays = backend.hand_over(batch, Target(framework))
            backend.order(batch)
            for path, array in rows.items():
                assert exchange.framework_of(arrays[path]) == framework
                assert_same(arrays[path], array[[9, 1, 1, 14]], (at, path))

    @pytest.mark.parametrize("framework", FRAMEWORKS)
    def test_wide_arrays_at_their_landing_are_handed_over_without_a_copy(self, backend: Backend[Any], framework: str):
        landing, rows = backend.landing(Target(framework)), wide_rows(8, seed=1)
        assert landing in backend.endpoints()
        for at in backend.endpoints():
            columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 8, at), 0, on_host(rows))
            batch = backend.read(columns, index_of(5, 1, 1, 7), list(rows), landing)
            backend.wait(batch)
            before = {path: address(array) for path, array in batch.arrays.items()}
            arrays = backend.hand_over(batch, Target(framework))
            backend.order(batch)
            for path, array in rows.items():
                assert_same(arrays[path], array[[5, 1, 1, 7]], (at, path))
                assert path != "image" or address(arrays[path]) == before[path], at

    @pytest.mark.parametrize("framework", FRAMEWORKS)
    def test_what_is_kept_of_large_batches_stays_intact(self, backend: Backend[Any], framework: str):
        """A batch, or a view of one leaf. What is dropped meanwhile may be used for others."""
        rows, landing = wide_rows(8, seed=1), backend.landing(Target(framework))
        columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 8, PAGEABLE), 0, on_host(rows))
        kept: list[tuple[Any, NDArray[Any]]] = []
        for number in range(24):
            batch = backend.read(columns, np.arange(number, number + 16) % 8, ["image"], landing)
            backend.order(batch)
            image = backend.hand_over(batch, Target(framework))["image"]
            if number % 4 == 0:
                kept.append((image, rows["image"][np.arange(number, number + 16) % 8]))
            if number % 4 == 1:
                kept.append((image[3:5], rows["image"][[(number + 3) % 8, (number + 4) % 8]]))
            del batch, image
            del kept[:-5]
        for part, expected in kept:
            assert_same(part, expected, framework)

    def test_a_target_that_cannot_be_is_refused(self, backend: Backend[Any]):
        batch = on_host(example_rows(4, seed=0))
        for target, reason in (
            (Target("tensorflow"), "no framework 'tensorflow'.*numpy, torch, jax"),
            (Target("numpy", device="cuda:0"), "NumPy arrays live on the host"),
            (Target("numpy", sharding=object()), "sharding is JAX's"),
        ):
            with pytest.raises(HandOverError, match=reason):
                backend.hand_over(batch, target)
            with pytest.raises(HandOverError, match=reason):
                backend.landing(target)


def _in_threads(clock: Clock, *bodies: Callable[[], None]) -> None:
    """Runs them at once; the first error in any is raised here."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # it is raised again below, in the test's own thread
            errors.append(error)

    tasks = [clock.spawn(partial(run, body), f"body {number}") for number, body in enumerate(bodies)]
    deadline_s = clock.now() + 60
    assert all(task.join(deadline_s) for task in tasks), "a thread hangs"
    for error in errors:
        raise error
