"""The ring with rows in it: what is live, what is read, and who waits for whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.backends import load
from conduit.clock import RealClock, VirtualClock
from conduit.core.buffer import ExperienceBuffer
from conduit.core.episodes import Rows
from conduit.core.experience import Schema
from conduit.core.halt import Halt
from conduit.core.ordered import Lifo
from conduit.core.placement import Placement
from conduit.core.ring import Layout, Window
from conduit.errors import CapacityError, ClosedError, SchemaError
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier

DEVICES = [Endpoint(Tier.DEVICE, index) for index in range(3)]
PLACEMENTS = [
    Placement(),
    Placement((DEVICES[0],)),
    Placement((*DEVICES[:2],), (1.0, 1.0)),
    Placement((PINNED, *DEVICES), (5.0, 1.0, 2.0, 0.5)),
]


def buffer(capacity: int, placement: Placement = PLACEMENTS[0], budgets=None, clock=None) -> ExperienceBuffer:
    halt = Halt(clock or RealClock())
    return ExperienceBuffer(load("reference"), capacity, lambda schema, instead: placement, budgets or {}, halt)


def in_memory(schema: Schema, instead: bool) -> Placement:
    return Placement()


def append(into: ExperienceBuffer, first: int, count: int):
    key = np.arange(first, first + count)
    return write(into, {"key": key, "wide": np.repeat(key[:, None], 3, 1).astype(np.float32)}, key // 3)


def write(into: ExperienceBuffer, data, version: np.ndarray):
    rows = Rows(data, np.zeros(len(version), np.int64), np.zeros(len(version), np.uint8), version)
    (written,) = into.write(rows)
    return Window(written.first, written.first + written.rows)


def read(from_: ExperienceBuffer, keys: np.ndarray):
    return from_.read([from_.select(keys, np.random.default_rng)], PAGEABLE)[0].arrays


def keys_at(from_: ExperienceBuffer, keys: np.ndarray) -> list[int]:
    arrived = []
    from_.leases.redeem(from_.leases.take(int(keys.min()), lambda: arrived.append(read(from_, keys))))
    (got,) = arrived
    assert (got["wide"] == got["key"][:, None]).all()
    return got["key"].tolist()


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 20), st.sampled_from(PLACEMENTS), st.lists(st.integers(0, 30), min_size=1, max_size=15))
def test_every_live_row_is_read_by_its_key_whatever_the_pushes_and_the_shards(capacity, placement, pushes):
    ring, stop = buffer(capacity, placement), 0
    for count in pushes:
        written = append(ring, stop, count)
        stop += count
        assert (written.first, written.stop) == (max(stop - count, stop - capacity), stop)
        window = ring.window
        assert (window.first, window.stop) == (max(0, stop - capacity), stop)
        live = np.arange(window.first, window.stop)
        if len(live):
            mixed = np.random.default_rng(stop).permutation(np.concatenate([live, live[:3]]))
            assert keys_at(ring, mixed) == mixed.tolist()
            assert (ring.version_of(live) == live // 3).all()


@pytest.mark.parametrize("remover", [None, Lifo()], ids=repr)
def test_keys_are_told_from_any_number_on_and_any_number_of_them(remover):
    sampler = None if remover is None else remover.start(4, 0)
    into = ExperienceBuffer(load("reference"), 4, in_memory, {}, Halt(RealClock()), remover=sampler)
    far = (2**62, 2**63 - 1, 2**63, 10**30)
    assert [len(into.keys_from(first, 10**30)) for first in (0, *far)] == [0] * 5
    append(into, 0, 3)
    assert [into.keys_from(1, most).tolist() for most in (1, 2, 3, *far)] == [[1]] + [[1, 2]] * 6
    assert [into.keys_from(first, 10**30).tolist() for first in (2, 3, 4, *far)] == [[2]] + [[]] * 6


def test_drop_forgets_the_rows_and_numbers_go_on():
    ring = buffer(8)
    append(ring, 0, 8)
    ring.drop()
    assert (len(ring.window), ring.window.stop) == (0, 8)
    append(ring, 8, 5)
    assert keys_at(ring, np.arange(8, 13)) == list(range(8, 13))


class Reader:
    """A lease on some rows, and what was read of them. Reading takes a while on a virtual clock."""

    def __init__(self, ring: ExperienceBuffer, keys: list[int], clock: VirtualClock | None = None) -> None:
        self.ring, self.keys, self.clock = ring, np.array(keys), clock
        self.got: list[list[int]] = []
        self.ended_at_s = -1.0
        self.lease = ring.leases.take(min(keys), self.read)

    def read(self) -> None:
        if self.clock is not None:
            self.clock.sleep(1.0)
            self.ended_at_s = self.clock.now()
        self.got.append(read(self.ring, self.keys)["key"].tolist())

    def redeem(self) -> None:
        self.ring.leases.redeem(self.lease)


def test_a_writer_reads_for_a_reader_what_it_would_replace_and_nothing_before():
    ring = buffer(4)
    append(ring, 0, 4)
    oldest, newest = Reader(ring, [3, 1]), Reader(ring, [2, 3])
    append(ring, 4, 1)
    assert (oldest.got, newest.got) == ([], [])
    append(ring, 5, 1)
    assert (oldest.got, newest.got) == ([[3, 1]], [])
    append(ring, 6, 1)
    for reader in (oldest, newest):
        reader.redeem()
    assert (oldest.got, newest.got) == ([[3, 1]], [[2, 3]]), "each once"
    assert keys_at(ring, np.arange(3, 7)) == [3, 4, 5, 6]


def test_a_lease_that_was_given_up_is_never_read():
    ring = buffer(4)
    append(ring, 0, 4)
    reader = Reader(ring, [0])
    ring.leases.give_up(reader.lease)
    append(ring, 4, 4)
    reader.redeem()
    ring.leases.give_up(reader.lease)
    assert reader.got == []


@pytest.mark.parametrize("seed", range(10))
def test_a_writer_waits_for_a_reader_that_is_reading_the_rows_it_replaces(seed):
    clock = VirtualClock(seed)

    def main() -> None:
        ring = buffer(4, clock=clock)
        append(ring, 0, 4)
        reader, other = Reader(ring, [1, 3], clock), Reader(ring, [3], clock)
        written = []

        def write() -> None:
            clock.sleep(0.5)
            append(ring, 4, 1)
            written.append(clock.now())
            append(ring, 5, 1)
            written.append(clock.now())
            ring.leases.give_up(reader.lease)

        tasks = [
            clock.spawn(reader.redeem, "reader"),
            clock.spawn(write, "writer"),
            clock.spawn(reader.redeem, "again"),
        ]
        assert all(task.join() for task in tasks)
        assert reader.got == [[1, 3]], "once, and before it was replaced"
        assert other.got == []
        assert written == [0.5, 1.0]
        assert reader.ended_at_s == 1.0

    clock.run(main)


def test_a_writer_that_waits_for_a_reader_hears_of_a_halt():
    clock = VirtualClock()

    def main() -> list[str]:
        halt = Halt(clock)
        ring = ExperienceBuffer(load("reference"), 4, in_memory, {}, halt)
        append(ring, 0, 4)
        reader, heard = Reader(ring, [0], clock), []

        def write() -> None:
            clock.sleep(0.25)
            with pytest.raises(ClosedError) as caught:
                append(ring, 4, 1)
            heard.append(f"{caught.value} at {clock.now()}")

        tasks = [clock.spawn(reader.redeem, "reader"), clock.spawn(write, "writer")]
        clock.sleep(0.5)
        halt.now_because(ClosedError("shut"))
        assert all(task.join() for task in tasks)
        return heard

    assert clock.run(main) == ["shut at 0.5"]


def test_the_window_is_never_less_than_empty_while_a_write_larger_than_the_ring_waits():
    clock = VirtualClock()

    def main() -> None:
        ring = buffer(4, clock=clock)
        append(ring, 0, 2)
        reader = Reader(ring, [0], clock)

        def write() -> None:
            append(ring, 2, 9)

        writer = clock.spawn(write, "writer")
        clock.sleep(0.5)
        assert writer.alive()
        assert (ring.window.first, ring.window.stop) == (2, 2), "as another thread sees it while the write waits"
        assert writer.join()
        assert reader.got == [[0]]
        assert (ring.window.first, ring.window.stop) == (7, 11)

    clock.run(main)


def test_rows_too_many_for_a_budget_are_refused_with_every_figure():
    placement = Placement((DEVICES[0], PAGEABLE), (1.0, 3.0))
    ring = buffer(1000, placement, {Tier.DEVICE: 1000, Tier.PAGEABLE: 1 << 30})
    with pytest.raises(CapacityError) as caught:
        append(ring, 0, 1)
    rows = Layout(1000, placement.shares).shard_rows[0]
    for part in (
        "1,000 rows of 20 bytes",
        "device:0 needs",
        f"for {rows} rows",
        "budget is 1000 B",
        "50 rows would fit",
    ):
        assert part in str(caught.value)
    assert "pageable needs" not in str(caught.value)
    assert ring.schema is None


def test_rows_too_many_for_the_memory_are_refused_with_every_figure():
    with pytest.raises(CapacityError, match=r"device:1 needs .* GiB for 100,000,000 rows; 1 GiB are free"):
        append(buffer(100_000_000, Placement((DEVICES[1],))), 0, 1)


def test_a_budget_that_just_fits_is_enough():
    append(buffer(1000, budgets={Tier.PAGEABLE: 20_000}), 0, 1)
    with pytest.raises(CapacityError):
        append(buffer(1000, budgets={Tier.PAGEABLE: 19_999}), 0, 1)


def test_later_rows_must_fit_the_stored_schema():
    ring = buffer(4)
    append(ring, 0, 1)
    with pytest.raises(SchemaError, match="stored rows: leaf 'wide' has dtype float64"):
        write(ring, {"key": np.zeros(1, int), "wide": np.zeros((1, 3))}, np.zeros(1, int))


def test_bytes_are_counted_by_endpoint():
    ring = buffer(100, PLACEMENTS[3])
    assert ring.bytes_by_endpoint() == {}
    append(ring, 0, 1)
    counted = ring.bytes_by_endpoint()
    assert list(counted) == ["pinned", "device:0", "device:1", "device:2"]
    assert sum(counted.values()) == 100 * 20


def test_a_closed_buffer_says_so():
    ring = buffer(4)
    append(ring, 0, 2)
    ring.close()
    ring.close()
    with pytest.raises(ClosedError):
        read(ring, np.array([0]))
    with pytest.raises(ClosedError):
        append(ring, 2, 1)
