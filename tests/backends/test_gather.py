"""Rows gathered by one thread or two are the same rows; the second thread comes and goes."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from conduit.backends import gather
from conduit.backends.gather import Choice, Gather

COLUMNS = {
    "wide": np.arange(300 * 40_000, dtype=np.int32).reshape(300, 40_000),
    "odd": np.random.default_rng(0).integers(256, size=(300, 777, 3), dtype=np.uint8),
    "narrow": np.arange(300, dtype=np.float64),
}


def taken(through: Gather, index):
    out = {path: np.full((len(index), *column.shape[1:]), 99, column.dtype) for path, column in COLUMNS.items()}
    through.take([(COLUMNS[path], rows) for path, rows in out.items()], index)
    return out


def helpers():
    return [thread for thread in threading.enumerate() if thread.name == "conduit-gather"]


def wait_until_none_left(within_s=5.0):
    until = time.perf_counter() + within_s
    while helpers():
        assert time.perf_counter() < until, "the second thread is still there"
        time.sleep(0.01)


@pytest.fixture
def helped(monkeypatch):
    """A Gather that always has help."""
    monkeypatch.setattr(Choice, "learn", lambda self, helped, cost: None)
    monkeypatch.setattr(Choice, "__init__", lambda self: setattr(self, "helped", True))
    return Gather()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, 64, 257])
def test_two_threads_take_the_same_rows_as_one(helped, monkeypatch, count):
    monkeypatch.setattr(gather, "_LEAST_BYTES", 0)
    index = np.random.default_rng(count).integers(0, 300, count)
    for path, rows in taken(helped, index).items():
        assert rows.tobytes() == COLUMNS[path][index].tobytes(), path


def test_many_threads_gather_at_once(helped):
    wrong = []

    def work(seed: int) -> None:
        for turn in range(20):
            index = np.random.default_rng((seed, turn)).integers(0, 300, 30)
            wrong.extend(path for path, rows in taken(helped, index).items() if (rows != COLUMNS[path][index]).any())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_second_thread_begins_with_a_large_batch_and_ends_by_itself(helped):
    wait_until_none_left()
    taken(helped, np.arange(3))
    assert helpers() == []
    for _ in range(2):
        taken(helped, np.arange(100))
        assert len(helpers()) == 1
        assert helpers()[0].daemon
        wait_until_none_left()


def test_a_gather_that_is_forgotten_leaves_no_thread():
    once = Gather()
    for _ in range(20):
        taken(once, np.arange(100))
    del once
    wait_until_none_left()


def test_what_goes_wrong_in_either_thread_is_raised(helped):
    column = np.zeros((8, 1 << 20), np.uint8)
    with pytest.raises(ValueError, match=r"output array"):
        helped.take([(column, np.zeros((8, (1 << 20) + 1), np.uint8))], np.arange(8))
    taken(helped, np.arange(100))


def test_when_no_thread_can_be_made_the_rows_are_taken_all_the_same(helped, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    wait_until_none_left()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    index = np.arange(100)
    for path, rows in taken(helped, index).items():
        assert (rows == COLUMNS[path][index]).all(), path


def played(costs, calls):
    """How often each way was gone, and what all calls cost together."""
    choice, total, helped = Choice(), 0.0, 0
    for number in range(calls):
        way = choice.helped
        cost = costs(number, way)
        choice.learn(way, cost)
        total, helped = total + cost, helped + way
    return helped, total


def test_help_that_pays_is_taken_nearly_always():
    helped, _ = played(lambda number, way: 0.7 if way else 1.0, 2000)
    assert helped > 1900


def test_help_that_does_not_pay_costs_next_to_nothing():
    _, total = played(lambda number, way: 1.4 if way else 1.0, 5000)
    assert total < 5000 * 1.01


def test_help_that_is_very_slow_at_times_is_not_taken():
    chance = random.Random(0)
    _, total = played(lambda number, way: (15.0 if chance.random() < 0.2 else 0.75) if way else 1.0, 5000)
    assert total < 5000 * 1.05


def test_help_is_taken_when_it_begins_to_pay_and_left_when_it_ends():
    helped = []

    def costs(number, way):
        helped.append(way)
        return (0.7 if 5000 <= number < 10000 else 1.4) if way else 1.0

    played(costs, 15000)
    assert sum(helped[:5000]) < 100
    assert sum(helped[7000:10000]) > 2800
    assert sum(helped[11000:]) < 100


def test_noise_alone_changes_little():
    chance = random.Random(0)
    _, total = played(lambda number, way: (0.7 if way else 1.0) * chance.choice([1, 1, 1, 1, 1.1, 1.3]), 4000)
    assert total < 4000 * 0.85
