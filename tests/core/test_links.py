"""Following links, by NumPy's calls and as machine code, against a plain walk from row to row."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core import links as room
from conduit.core.episodes import End
from conduit.core.links import Links

has_numba = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not has_numba, reason="numba isn't installed")
WAYS = ["numpy", "wide", *(["numba"] if has_numba else [])]
each_way = pytest.mark.parametrize("way", ["numpy", "wide", pytest.param("numba", marks=needs_numba)])


def made(capacity: int, way: str) -> Links:
    """`wide`: with the int64 links of a ring of two billion rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONDUIT_NUMBA", "0" if way == "numpy" else "1")
        if way == "wide":
            patch.setattr(room, "_FARTHEST", 1)
        links = Links(capacity)
    assert links._onward.dtype == (np.int64 if way == "wide" else np.int32)
    assert (links._kernels is not None) == (way == "numba")
    return links


@dataclass
class Ring:
    """The same rows linked in several Links, and plainly."""

    all: list[Links]
    capacity: int
    stop: int
    oldest: int = 0
    after: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    finals: int = 0

    def push(self, lanes: list[int], ends: list[End], finals: bool, in_one_lane: bool) -> None:
        """Rows of different lanes, or all of `lanes[0]`, of which only the last may end."""
        first, rows = self.stop, len(lanes)
        self.stop += rows
        self.oldest = max(self.oldest, self.stop - self.capacity)
        keys = np.arange(first, self.stop)
        if in_one_lane:
            lanes, ends = lanes[:1] * rows, [End.OPEN] * (rows - 1) + ends[-1:]
        before = np.zeros(rows, np.int64)
        for i, (key, lane, end) in enumerate(zip(range(first, self.stop), lanes, ends, strict=True)):
            before[i] = self.newest.pop(lane, -1)
            if before[i] >= 0:
                self.before[key], self.after[int(before[i])] = int(before[i]), key
            if end == End.OPEN:
                self.newest[lane] = key
        over = keys[[end in (End.TERMINATED, End.TRUNCATED) for end in ends]] if finals else keys[:0]
        numbers = np.arange(self.finals, self.finals + len(over))
        self.finals += len(over)
        for links in self.all:
            links.oldest = self.oldest
            links.put(first, np.array(ends, np.uint8))
            if in_one_lane:
                links.chain(first, rows)
            links.connect(keys[:1] if in_one_lane else keys, before[:1] if in_one_lane else before)
            links.conclude(over, numbers)

    def walked(self, keys: np.ndarray, rows: int, onward: bool) -> tuple[list[list[int]], list[int]]:
        """Plainly, from row to row."""
        linked, paths, count = self.after if onward else self.before, [], []
        for key in keys.tolist():
            path = [key]
            while len(path) < rows and linked.get(path[-1], -1) >= self.oldest:
                path.append(linked[path[-1]])
            count.append(len(path))
            paths.append(path + path[-1:] * (rows - len(path)))
        return paths, count


pushes = st.lists(
    st.tuples(
        st.integers(0, 2**32 - 1),
        st.integers(1, 12),
        st.booleans(),
        st.booleans(),
        st.sampled_from([0.0, 0.1, 0.6]),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 50),
    st.integers(1, 12),
    st.sampled_from([0, 7, 2**31 - 9, 2**40]),
    pushes,
    st.integers(1, 40),
    st.integers(1, 60),
)
def test_each_way_of_following_gives_the_rows_of_a_plain_walk(capacity, lanes, first, pushes, rows, entries):
    ring = Ring([made(capacity, way) for way in WAYS], capacity, first, first)
    for seed, most, in_one_lane, finals, ending in pushes:
        random = np.random.default_rng(seed)
        chosen = np.sort(random.permutation(lanes)[: min(most, capacity)]).tolist()
        if in_one_lane:
            chosen = [chosen[0]] * min(most, capacity)
        over = random.choice([End.TERMINATED, End.TRUNCATED, End.CUT], len(chosen))
        ends = [End(int(end)) if random.random() < ending else End.OPEN for end in over]
        ring.push(chosen, ends, finals, in_one_lane)
        live = np.arange(ring.oldest, ring.stop)
        # Each live row, and some of them twice and in any order, not side by side in memory.
        for keys in (live, random.choice(live, 2 * entries)[::2]):
            for onward in (True, False):
                paths, count = ring.walked(keys, rows, onward)
                for links in ring.all:
                    told = (links.walk if onward else links.walk_back)(keys, rows)
                    assert [array.dtype for array in told] == [np.int64, np.int64]
                    assert told[0].tolist() == paths
                    assert told[1].tolist() == count


@each_way
def test_a_walk_goes_round_the_end_of_the_ring_both_ways(way):
    ring = Ring([made(10, way)], 10, 0)
    for _ in range(8):
        ring.push([0, 1, 2], [End.OPEN] * 3, False, False)
    (links,) = ring.all
    assert links.walk(np.array([14, 17]), 4)[0].tolist() == [[14, 17, 20, 23], [17, 20, 23, 23]]
    path, count = links.walk_back(np.array([23, 21, 14]), 4)
    assert path.tolist() == [[23, 20, 17, 14], [21, 18, 15, 15], [14, 14, 14, 14]]
    assert count.tolist() == [4, 3, 1]


@each_way
@pytest.mark.parametrize("silence", [20, 2**31 + 5, 2**40])
def test_no_walk_goes_back_to_a_predecessor_that_has_left_the_ring_however_long_ago(way, silence):
    links = made(10, way)
    links.put(0, np.zeros(1, np.uint8))
    links.connect(np.array([0]), np.array([-1]))
    keys = np.arange(silence, silence + 2)
    links.oldest = silence + 2 - 10
    links.put(silence, np.zeros(2, np.uint8))
    links.connect(keys, np.array([0, -1]))
    path, count = links.walk_back(keys, 3)
    assert path.tolist() == [[key] * 3 for key in keys]
    assert count.tolist() == [1, 1]
    assert links.begins(keys).tolist() == [False, True]


def run(code: str, **environment: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "CONDUIT_NUMBA"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=110
    )
    return done.stdout.strip()


@needs_numba
def test_numba_comes_with_the_first_store_that_follows_links_and_not_before():
    code = """
import sys, conduit
conduit.Store(backend="reference", capacity=4, batch_size=1).close()
print("numba" in sys.modules, end=" ")
conduit.Store(backend="reference", capacity=4, batch_size=1, item=conduit.NStep(2, 0.9)).close()
print("numba" in sys.modules)
"""
    assert run(code) == "False True"


@needs_numba
@pytest.mark.parametrize("variable", [{"CONDUIT_NUMBA": "0"}, {"NUMBA_DISABLE_JIT": "1"}])
def test_numba_is_left_out_where_the_environment_says_so(variable):
    code = "from conduit.core.links import Links; print(Links(4)._kernels)"
    assert run(code, **variable) == "None"
