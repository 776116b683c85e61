"""Lanes: interleaved rows become whole fragments, whatever the order and the split of the pushes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core.episodes import End, Fragment, Lanes, Rows, as_fragment, concatenate, join_fragments, split_lanes
from tests.core.rows import CUT, OPEN, TERM, TRUNC, ids, rows

many = settings(max_examples=150, deadline=None)
pushed = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(End), st.booleans()), min_size=1, max_size=30)


def rows_of(steps, first: int = 0) -> Rows:
    """Rows from (lane, end, has a final and a priority)."""
    finals = {
        i: {"obs": np.float32(-first - i)} for i, (_, end, known) in enumerate(steps) if known and end in (TERM, TRUNC)
    }
    priority = [float(first + i) if known else np.nan for i, (_, _, known) in enumerate(steps)]
    return rows([lane for lane, _, _ in steps], [end for _, end, _ in steps], first, priority, finals)


def described(fragment: Fragment) -> tuple:
    priority = None if fragment.priority is None else fragment.priority.tobytes()
    final = None if fragment.final is None else float(fragment.final["obs"])
    return fragment.lane, ids(fragment.rows), fragment.end, final, fragment.version.tolist(), priority


def expected_fragments(steps) -> tuple[list[tuple], dict[int, list[int]]]:
    """Row by row: (the fragments that ended, in order of their last row; the ids that are open, by lane)."""
    ended, open_ids = [], {}
    for i, (lane, end, known) in enumerate(steps):
        mine = open_ids.setdefault(lane, [])
        mine.append(i)
        if end != OPEN:
            final = float(-i) if known and end in (TERM, TRUNC) else None
            priority = np.array([float(j) if steps[j][2] else np.nan for j in mine]).tobytes()
            ended.append((lane, mine, end, final, [j // 10 for j in mine], priority))
            del open_ids[lane]
    return ended, open_ids


@many
@given(pushed, st.lists(st.integers(1, 29), max_size=5))
def test_fragments_come_out_whole_however_the_rows_are_split_into_pushes(steps, cuts):
    bounds = sorted({0, len(steps), *(cut for cut in cuts if cut < len(steps))})
    lanes, got = Lanes(), []
    for start, stop in itertools.pairwise(bounds):
        got += lanes.add(rows_of(steps[start:stop], start))
    ended, open_ids = expected_fragments(steps)
    assert [described(fragment) for fragment in got] == ended
    assert len(lanes) == sum(map(len, open_ids.values()))
    left = lanes.take_open({lane: {"obs": np.float32(100 + lane)} for lane in (0, 2)})
    assert [(f.lane, ids(f.rows), f.end) for f in left] == [(lane, open_ids[lane], OPEN) for lane in sorted(open_ids)]
    assert [None if f.final is None else float(f.final["obs"]) for f in left] == [
        100.0 + lane if lane in (0, 2) else None for lane in sorted(open_ids)
    ]
    assert len(lanes) == 0


@many
@given(pushed)
def test_split_lanes_gives_each_row_once_in_runs_that_no_end_interrupts(steps):
    runs = split_lanes(rows_of(steps))
    assert sorted(i for _, run in runs for i in ids(run.data)) == list(range(len(steps)))
    for last, run in runs:
        assert len(set(run.lane)) == 1
        assert ids(run.data)[-1] == last
        assert ids(run.data) == sorted(ids(run.data))
        assert (run.end[:-1] == OPEN).all()
        known = steps[last][2] and steps[last][1] in (TERM, TRUNC)
        assert (run.finals or {}) == ({len(run) - 1: {"obs": np.float32(-last)}} if known else {})


@many
@given(pushed)
def test_fragments_survive_being_joined_and_split_again(steps):
    fragments = [as_fragment(run) for _, run in split_lanes(rows_of(steps))]
    joined = join_fragments(fragments)
    assert len(joined) == len(steps)
    # Two open fragments of a lane would come back as one: a lane has at most one, the last.
    again = sorted((described(as_fragment(run)) for _, run in split_lanes(joined)), key=lambda f: f[1])
    assert again == sorted(map(described, fragments), key=lambda f: f[1])


def test_a_fragment_without_rows_leaves_its_neighbours_ends_and_finals_alone():
    ended = as_fragment(rows([0, 0], [OPEN, TRUNC]))
    other = as_fragment(rows([1], [TERM], first=5))
    nothing = as_fragment(rows([2], [CUT], first=9))
    nothing = Fragment(
        {k: v[:0] for k, v in nothing.rows.items()}, End.CUT, {"obs": np.float32(9)}, 2, nothing.version[:0]
    )
    joined = join_fragments([ended, nothing, other])
    assert joined.end.tolist() == [OPEN, TRUNC, TERM]
    assert joined.finals == {1: {"obs": np.float32(-1)}}


def test_concatenate_moves_finals_and_fills_missing_priorities_with_nan():
    both = concatenate([rows([0], [TRUNC]), rows([1, 0], [OPEN, TRUNC], first=1, priority=[4.0, 5.0])])
    assert ids(both.data) == [0, 1, 2]
    assert both.lane.tolist() == [0, 1, 0]
    assert both.end.tolist() == [TRUNC, OPEN, TRUNC]
    assert both.finals == {0: {"obs": np.float32(0)}, 2: {"obs": np.float32(-2)}}
    np.testing.assert_array_equal(both.priority, [np.nan, 4.0, 5.0])
    assert concatenate([rows([0]), rows([0])]).priority is None


def test_cut_ends_only_the_open_fragments_of_the_lanes_that_left():
    lanes = Lanes()
    assert [f.end for f in lanes.add(rows([0, 1, 2, 1], [OPEN, OPEN, OPEN, TERM]))] == [TERM]
    assert [(f.lane, ids(f.rows), f.end, f.final) for f in lanes.cut([2, 1, 5])] == [(2, [2], CUT, None)]
    assert [(f.lane, f.end) for f in lanes.take_open({})] == [(0, OPEN)]


def test_a_lane_starts_anew_after_its_end():
    lanes = Lanes()
    lanes.add(rows([7, 7], [OPEN, CUT]))
    (fragment,) = lanes.add(rows([7, 7], [OPEN, TERM], first=2))
    assert ids(fragment.rows) == [2, 3]
