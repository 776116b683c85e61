"""The sums behind prioritized sampling, against plain sums in the order of the leaves: in NumPy, and compiled."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core import priority_tree
from conduit.core.priority_tree import MOST_ROOTS, PriorityTree, compiled

CORE = Path(priority_tree.__file__).parent
SIZES = [1, 2, 3, MOST_ROOTS - 1, MOST_ROOTS, MOST_ROOTS + 1, 3 * MOST_ROOTS + 5, 16 * MOST_ROOTS + 5]
few = settings(max_examples=60, deadline=None)
leaf = st.one_of(st.just(0.0), st.floats(0.0, 10.0), st.floats(1e-300, 1e300))
has_numba = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not has_numba, reason="numba isn't installed")
each_path = pytest.mark.parametrize("path", ["numpy", pytest.param("numba", marks=needs_numba)])


def empty(size: int, path: str) -> PriorityTree:
    return PriorityTree(size, compiled() if path == "numba" else None)


def deep(size: int, path: str) -> PriorityTree:
    """With a few hundred leaves it has the levels that others have with 10^8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priority_tree, "MOST_ROOTS", 3)
        return empty(size, path)


def filled(values: np.ndarray, path: str, make=empty) -> PriorityTree:
    tree = make(len(values), path)
    tree.set(np.arange(len(values)), values)
    return tree


def found(tree: PriorityTree, mass: np.ndarray) -> np.ndarray:
    index, values = tree.find(mass)
    assert values.tobytes() == tree.get(index).tobytes()
    return index


def masses(total: float, seed: int, count: int = 500) -> np.ndarray:
    inside = np.random.default_rng(seed).random(count) * total
    return np.concatenate([inside, [0.0, total, np.nextafter(total, 0.0)]])


@each_path
@pytest.mark.parametrize("size", SIZES)
def test_whole_numbers_are_found_exactly_where_a_cumulative_sum_finds_them(size, path):
    values = np.random.default_rng(size).integers(0, 4, size).astype(float)
    values[size // 2] = 3.0
    tree, sums = filled(values, path), np.cumsum(values)
    assert tree.total == sums[-1]
    mass = np.arange(sums[-1])
    expected = np.searchsorted(sums, mass, side="right")
    np.testing.assert_array_equal(found(tree, mass), expected)
    order = np.random.default_rng(0).permutation(len(mass))
    np.testing.assert_array_equal(found(tree, mass[order]), expected[order])


@each_path
@few
@given(st.data(), st.sampled_from([1, 2, 7, 100, MOST_ROOTS + 3]), st.integers(0, 99))
def test_no_mass_finds_a_leaf_of_value_zero_whatever_the_magnitudes(path, data, size, seed):
    values = np.zeros(size)
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=40))
    values[index] = data.draw(st.lists(leaf, min_size=len(index), max_size=len(index)))
    values[data.draw(st.integers(0, size - 1))] = data.draw(st.floats(1e-300, 1e300))
    tree = filled(values, path)
    index = found(tree, masses(tree.total, seed))
    assert ((index >= 0) & (index < size)).all()
    assert (tree.get(index) > 0).all()
    assert math.isclose(tree.total, math.fsum(values), rel_tol=1e-12)


@each_path
@few
@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=300), st.integers(0, 99))
def test_a_mass_is_found_within_rounding_of_where_a_cumulative_sum_has_it(path, values, seed):
    values = np.array([*values, 1.0])
    tree = filled(values, path, deep)
    mass = masses(tree.total, seed)
    index = found(tree, mass)
    upper = np.cumsum(values)
    slack = 1e-12 * tree.total
    assert (upper[index] + slack >= mass).all()
    assert (upper[index] - values[index] - slack <= mass).all()


@each_path
@pytest.mark.parametrize("size", SIZES)
def test_mass_zero_finds_the_first_positive_leaf_and_the_total_the_last(size, path):
    """pytorch/rl#2230: a scan that ran past the last leaf gave an index that no row had."""
    for first, last in {(0, size - 1), (size // 3, size // 2)}:
        values = np.zeros(size)
        values[[first, last]] = 1.0, 2.0 if first != last else 1.0
        tree = filled(values, path)
        assert found(tree, np.array([0.0, tree.total])).tolist() == [first, last]


@each_path
def test_a_mass_that_rounding_puts_past_the_last_leaf_of_its_group_finds_that_leaf(path, monkeypatch):
    """Sparse leaves of uneven size, and masses at the edges between them: some do go past."""
    random, past = np.random.default_rng(0), []
    descend = PriorityTree._descend

    def spied(tree, mass, careful=False):
        past.extend(mass if careful else [])
        return descend(tree, mass, careful)

    monkeypatch.setattr(PriorityTree, "_descend", spied)
    for size in (5, 40, 500, 3000):
        for _ in range(20):
            values = np.zeros(size)
            some = random.integers(0, size, 20)
            values[some] = random.random(20) * 10.0 ** random.integers(-3, 3, 20)
            tree, edges = filled(values, path, deep), np.cumsum(values)
            mass = np.minimum([*edges, *np.nextafter(edges, 0.0), *np.nextafter(edges, np.inf)], tree.total)
            index = found(tree, mass)
            assert (tree.get(index) > 0).all()
            assert (np.abs(edges[index] - mass) <= values[index] + 1e-12 * tree.total).all()
    assert len(past) > 100


@each_path
def test_of_an_index_set_twice_the_last_value_stays(path):
    tree = empty(MOST_ROOTS * 2, path)
    tree.set(np.array([5, 4, 5, 5]), np.array([1.0, 7.0, 2.0, 3.0]))
    assert tree.get(np.array([4, 5])).tolist() == [7.0, 3.0]
    assert tree.total == 10.0


@each_path
@few
@given(st.sampled_from([1, 5, MOST_ROOTS + 7]), st.data())
def test_a_range_is_set_as_if_leaf_by_leaf(path, size, data):
    tree, plain = empty(size, path), np.zeros(size)
    for _ in range(5):
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        value = float(data.draw(st.integers(0, 9)))
        tree.set_range(start, value if stop % 2 else np.full(stop - start, value), stop)
        plain[start:stop] = value
        assert tree.total == plain.sum()
    np.testing.assert_array_equal(tree.get(np.arange(size)), plain)


steps = st.lists(
    st.tuples(
        st.sampled_from(["set", "range", "range after it", "find", "total"]), st.floats(0, 1), st.integers(1, 70)
    ),
    min_size=1,
    max_size=25,
)


def follow(tree: PriorityTree, size: int, steps: list, plain: np.ndarray) -> list[bytes]:
    """Takes the steps; what they tell, and all sums afterwards, as bytes."""
    told, random, stop = [], np.random.default_rng(size), 0
    for kind, where, count in steps:
        values = random.choice([0.0, 1.0, 1e-3, 1e12], count) * random.random(count)
        if kind == "set":
            index = random.integers(0, size, count)
            tree.set(index, values)
            plain[index] = values
        elif kind.startswith("range"):
            start = stop if kind == "range after it" and stop < size else int(where * (size - 1))
            stop = min(start + count, size)
            tree.set_range(start, values[: stop - start], stop)
            plain[start:stop] = values[: stop - start]
        elif kind == "find" and tree.total > 0.0:
            mass = np.sort(random.random(count)) * tree.total
            told += [array.tobytes() for array in tree.find(mass)]
        told.append(tree.get(random.integers(0, size, 5)).tobytes())
        if kind == "total":
            told.append(np.float64(tree.total).tobytes())
    return [*told, np.float64(tree.total).tobytes(), tree._nodes.tobytes(), tree._sums.tobytes()]


@needs_numba
@few
@given(st.integers(1, 3000), steps)
def test_compiled_sums_are_numpys_to_the_last_bit(size, steps):
    plain = np.zeros(size)
    assert follow(deep(size, "numba"), size, steps, plain) == follow(deep(size, "numpy"), size, steps, plain)


@each_path
@few
@given(st.integers(1, 3000), steps)
def test_sums_depend_on_the_leaves_alone_whatever_happened_before(path, size, steps):
    plain, tree = np.zeros(size), deep(size, path)
    follow(tree, size, steps, plain)
    fresh = filled(plain, path, deep)
    assert (tree.total, tree._nodes.tobytes()) == (fresh.total, fresh._nodes.tobytes())


@each_path
def test_a_long_range_is_not_left_for_later_and_equals_short_ones(path):
    size = 5 * priority_tree._MOST_PENDING
    values = np.random.default_rng(0).random(size)
    whole, pieces = empty(size, path), empty(size, path)
    whole.set_range(0, values, size)
    for start in range(0, size, 1000):
        stop = min(start + 1000, size)
        pieces.set_range(start, values[start:stop], stop)
    assert whole.total == pieces.total == filled(values, path).total
    assert math.isclose(whole.total, math.fsum(values), rel_tol=1e-12)


@each_path
def test_sums_do_not_drift_over_a_hundred_thousand_updates(path):
    """flashbax#52: sums kept by float32 differences drifted, until draws found rows that nobody had stored."""
    size = 2 * MOST_ROOTS + 1
    tree, random = empty(size, path), np.random.default_rng(0)
    for _ in range(1000):
        index = random.integers(0, size, 100)
        tree.set(index, 10.0 ** random.uniform(-12, 12, 100))
        start = int(random.integers(0, size - 10))
        tree.set_range(start, random.random(10), start + 10)
    fresh = filled(tree.get(np.arange(size)), path)
    assert tree.total == fresh.total
    tree.set_range(0, 0.0, size)
    assert tree.total == 0.0


@each_path
def test_no_sum_gets_negative(path):
    """flashbax#51: a difference taken off a sum that rounding had made too small."""
    size = 40 * MOST_ROOTS
    tree, random = empty(size, path), np.random.default_rng(1)
    for _ in range(200):
        index = random.integers(0, size, 50)
        tree.set(index, 10.0 ** random.uniform(-18, 18, 50))
        tree.set(index, np.zeros(50))
        assert tree.total == 0.0
        assert (tree._nodes >= 0.0).all()


@each_path
def test_a_huge_leaf_that_shrinks_leaves_no_trace(path):
    tree = filled(np.full(MOST_ROOTS * 4, 1e-3), path)
    before = tree.total
    tree.set(np.array([77]), np.array([1e300]))
    tree.set(np.array([77]), np.array([1e-3]))
    assert tree.total == before


@each_path
def test_frequencies_follow_the_leaves_over_thirty_orders_of_magnitude(path):
    values = 10.0 ** np.arange(-15.0, 16.0)
    index = found(filled(values, path), np.linspace(0.0, values.sum(), 1_000_001)[:-1])
    share = np.bincount(index, minlength=31) / 1_000_000
    np.testing.assert_allclose(share, values / values.sum(), atol=2e-6)


@pytest.mark.parametrize("leaves", [10**6, 3 * 10**6])
def test_leaves_and_their_sums_take_8_6_bytes_a_leaf(leaves):
    tree = PriorityTree(leaves)
    assert (tree._nodes.nbytes + tree._sums.nbytes) / leaves < 8.6


def test_numba_is_left_out_where_the_environment_says_so(monkeypatch):
    monkeypatch.setenv("CONDUIT_NUMBA", "0")
    assert compiled() is None


def test_without_numba_there_are_no_compiled_sums(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "conduit.core.compiled_sums", raising=False)
    monkeypatch.delattr("conduit.core.compiled_sums", raising=False)
    assert compiled() is None


def run(code: str, **environment: object) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "CONDUIT_NUMBA"}
    environ |= {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=110
    )
    return done.stdout.strip()


@needs_numba
def test_numba_switched_off_by_its_own_variable_is_not_run_as_python():
    code = "from conduit.core.priority_tree import compiled; print(compiled())"
    assert run(code, NUMBA_DISABLE_JIT=1) == "None"


@needs_numba
def test_numba_comes_with_the_first_prioritized_store_and_not_before():
    code = """
import sys, conduit
conduit.Store(backend="reference", capacity=4, batch_size=1).close()
print("numba" in sys.modules, end=" ")
conduit.Store(backend="reference", capacity=4, batch_size=1, sampler=conduit.Prioritized()).close()
print("numba" in sys.modules)
"""
    assert run(code) == "False True"


@needs_numba
def test_where_nothing_can_be_cached_sums_are_compiled_all_the_same(tmp_path):
    shutil.copy(CORE / "compiled_sums.py", tmp_path / "sums_elsewhere.py")
    blocked = tmp_path / "__pycache__"
    blocked.write_text("a file, so no folder of this name can be made")
    code = """
import numpy as np, sums_elsewhere
sums = np.zeros(4)
sums_elsewhere.accumulate(np.array([1.0, 2.0, 3.0]), sums)
print(*sums, sums_elsewhere.descend.stats.cache_path)
"""
    elsewhere = {"HOME": blocked, "XDG_CACHE_HOME": blocked / "cache", "NUMBA_CACHE_DIR": ""}
    assert run(code, PYTHONPATH=tmp_path, **elsewhere) == "0.0 1.0 3.0 6.0 None"
