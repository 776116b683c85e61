"""The ingestion chain: what each hook sees, by scope, and that granularity changes none of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conduit
from conduit.core.chain import IngestionChain
from conduit.core.episodes import End, Rows, concatenate
from conduit.core.hook import RowRule, Scope
from conduit.core.staging import Cut, Group
from conduit.errors import HookError
from tests.core.rows import CUT, OPEN, TERM, TRUNC, ids, priorities, rows


def spy(seen: list, per: Scope = "row", change=lambda data: data, rows: RowRule = "same", name: str = "spy"):
    def function(source, sink):
        data = source.read()
        seen.append([(f.lane, ids(f.rows), f.end) for f in data] if per == "trajectory" else ids(data))
        sink.write(change(data))

    function.__name__ = name
    return conduit.register_ingestion(per=per, rows=rows)(function)


def plus(amount: int, per: Scope):
    def function(source, sink):
        data = source.read()
        if per == "trajectory":
            sink.write([f.with_rows(f.rows | {"obs": f.rows["obs"] + amount * len(f)}) for f in data])
        else:
            sink.write(data | {"obs": data["obs"] * amount + (data["obs"].sum() if per == "unit" else 0)})

    return conduit.register_ingestion(per=per)(function)


def stored(chain: IngestionChain, *groups: Group) -> Rows:
    return concatenate([each for group in groups for each in rows_of(chain, group)])


def rows_of(chain: IngestionChain, group: Group) -> list[Rows]:
    """What the chain makes of a group, where it has nothing but rows."""
    out = chain.process(group)
    rows = [each for each in out if isinstance(each, Rows)]
    assert len(rows) == len(out)
    return rows


LANES = [0, 1, 0, 1, 0, 1, 0, 1]
ENDS = [OPEN, OPEN, OPEN, TERM, TRUNC, OPEN, OPEN, OPEN]


def unit() -> list[Rows | Cut]:
    """Four steps of two lanes."""
    return [rows(LANES[i : i + 2], ENDS[i : i + 2], first=i, priority=[i, i + 1]) for i in range(0, 8, 2)]


WHOLE = [(1, [1, 3], TERM), (0, [0, 2, 4], TRUNC), (0, [6], OPEN), (1, [5, 7], OPEN)]


def test_without_hooks_rows_pass_in_order_with_all_that_is_known_of_them():
    out = stored(IngestionChain([], on_policy=False), Group(unit()[:3]), Group(unit()[3:]))
    assert ids(out.data) == list(range(8))
    assert out.end.tolist() == ENDS
    assert priorities(out) == list(range(8))
    assert list(out.finals or ()) == [4]


def test_cuts_stay_between_the_rows_that_they_came_between():
    out = IngestionChain([], on_policy=False).process(Group([*unit()[:2], Cut(range(2)), unit()[2], unit()[3]]))
    assert [ids(each.data) if isinstance(each, Rows) else each for each in out] == [
        [0, 1, 2, 3],
        Cut(range(2)),
        [4, 5, 6, 7],
    ]


def test_row_hooks_see_a_group_at_once():
    seen = []
    stored(IngestionChain([spy(seen)], on_policy=True), Group(unit()[:3]), Group(unit()[3:], closes=True))
    assert seen == [[0, 1, 2, 3, 4, 5], [6, 7]]


def test_on_policy_unit_and_trajectory_hooks_run_once_on_the_whole_iteration():
    row, whole, trajectory, after = [], [], [], []
    chain = IngestionChain(
        [spy(row), spy(whole, "unit"), spy(trajectory, "trajectory"), spy(after, "unit")], on_policy=True
    )
    assert chain.process(Group(unit()[:1])) == []
    assert chain.process(Group(unit()[1:3])) == []
    (out,) = rows_of(chain, Group(unit()[3:], closes=True))
    order = [1, 3, 0, 2, 4, 6, 5, 7]
    assert row == [[0, 1], [2, 3, 4, 5], [6, 7]]
    assert whole == [list(range(8))]
    assert trajectory == [WHOLE]
    assert after == [order]
    assert ids(out.data) == order
    assert priorities(out) == order, "priorities follow their rows"
    assert out.versions.tolist() == [0] * 8


def test_a_bootstrap_reaches_open_fragments_as_their_final():
    finals = []

    @conduit.register_ingestion(per="trajectory")
    def hook(source, sink):
        finals.extend((f.lane, f.end, f.final) for f in source.read())
        sink.write(source.read())

    chain = IngestionChain([hook], on_policy=True)
    chain.process(Group(unit(), closes=True, bootstrap={0: {"obs": np.float32(50)}}))
    known = {(lane, end): None if final is None else float(final["obs"]) for lane, end, final in finals}
    assert known == {(1, TERM): None, (0, TRUNC): -4.0, (0, OPEN): 50.0, (1, OPEN): None}


def test_iterations_do_not_leak_into_each_other():
    seen = []
    chain = IngestionChain([spy(seen, "trajectory")], on_policy=True)
    chain.process(Group(unit(), closes=True))
    chain.process(Group(unit(), closes=True))
    assert seen == [WHOLE, WHOLE]


def test_off_policy_a_push_is_the_unit_and_open_fragments_wait_for_their_ends():
    units, trajectories = [], []
    chain = IngestionChain([spy(units, "unit"), spy(trajectories, "trajectory")], on_policy=False)
    out = rows_of(chain, Group([*unit(), Cut(range(1, 2))]))
    assert units == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert trajectories == [[(1, [1, 3], TERM)], [(0, [0, 2, 4], TRUNC)], [(1, [5, 7], CUT)]]
    assert [ids(each.data) for each in out] == [[1, 3], [0, 2, 4], [5, 7]]
    assert [ids(each.data) for each in rows_of(chain, Group([rows([0], [TERM], first=8)]))] == [[6, 8]]


def test_on_policy_cuts_end_their_lanes_when_the_iteration_closes():
    seen = []
    chain = IngestionChain([spy(seen, "trajectory")], on_policy=True)
    chain.process(Group([*unit()[:2], Cut(range(1))]))
    chain.process(Group([rows([1, 1], first=4)], closes=True))
    assert seen == [[(0, [0, 2], CUT), (1, [1, 3], TERM), (1, [4, 5], OPEN)]]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(End)), min_size=4, max_size=12), st.sets(st.integers(1, 11)),
       st.permutations(["row", "row", "unit", "trajectory"]))  # fmt: skip
def test_fractions_of_an_iteration_give_what_the_whole_gives(steps, cuts, scopes):
    hooks = [plus(3 + i, scope) for i, scope in enumerate(scopes)]
    bounds = sorted({0, len(steps), *(cut for cut in cuts if cut < len(steps))})
    pushes = [
        rows([lane for lane, _ in steps[a:b]], [end for _, end in steps[a:b]], first=a, priority=range(a, b))
        for a, b in itertools.pairwise(bounds)
    ]
    whole = stored(IngestionChain(hooks, True), Group([*pushes], closes=True))
    chain = IngestionChain(hooks, True)
    fractions = stored(chain, *(Group([push], closes=push is pushes[-1]) for push in pushes))
    assert ids(whole.data) == ids(fractions.data)
    assert whole.data["obs"].tobytes() == fractions.data["obs"].tobytes()
    assert whole.end.tolist() == fractions.end.tolist()
    assert priorities(whole) == priorities(fractions)


def test_a_hook_that_keeps_its_rows_may_not_change_their_number():
    halve = spy([], change=lambda data: {k: v[::2] for k, v in data.items()}, name="halve")
    with pytest.raises(HookError, match=r"ingestion hook 'halve' got 2 rows and wrote 1; it declares rows='same'"):
        IngestionChain([halve], False).process(Group(unit()[:1]))
    drop = spy([], "trajectory", change=lambda fragments: fragments[:1], name="drop")
    with pytest.raises(HookError, match=r"'drop' got 4 fragments with 8 rows and wrote 1 with 2"):
        IngestionChain([drop], True).process(Group(unit(), closes=True))


@pytest.mark.parametrize("per", ["row", "unit"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_hook_with_any_rows_may_drop_and_add_some(per, count):
    some = spy([], per, change=lambda data: {k: np.repeat(v[:1], count, 0) for k, v in data.items()}, rows="any")
    out = stored(IngestionChain([some], False), Group(unit()[3:]))
    assert ids(out.data) == [6] * count
    assert out.versions.tolist() == [0] * count
    assert len(out.lane) == len(out.end) == count


LEFT = Cut(range(2))


@pytest.mark.parametrize(("keep", "kept"), [(0, []), (1, [1, 3, 0, 2, 4, 6]), (2, [1, 3, 0, 2, 4, 6, 5, 7])])
def test_a_trajectory_hook_with_any_rows_may_drop_fragments_and_all_of_them(keep, kept):
    some = spy([], "trajectory", change=lambda fragments: fragments[:keep], rows="any")
    out = rows_of(IngestionChain([some], False), Group([*unit(), LEFT]))
    assert [i for each in out for i in ids(each.data)] == kept


def test_a_trajectory_hook_with_any_rows_may_shorten_fragments():
    def last(fragments):
        return [f.with_rows({k: v[-1:] for k, v in f.rows.items()}) for f in fragments]

    out = stored(IngestionChain([spy([], "trajectory", last, "any")], False), Group([*unit(), LEFT]))
    assert ids(out.data) == [3, 4, 6, 7]
    assert out.end.tolist() == [TERM, TRUNC, CUT, CUT]


@pytest.mark.parametrize("per", ["row", "trajectory", "unit"])
def test_an_on_policy_iteration_keeps_its_rows(per):
    with pytest.raises(HookError, match=r"'filter' declares rows='any': an on-policy iteration delivers exactly"):
        IngestionChain([spy([], per, rows="any", name="filter")], True)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            {"id": np.zeros(2), "obs": np.zeros(3)},
            r"ndarray\[2\], ndarray\[3\]; expected NumPy arrays that all have as many",
        ),
        ({"id": 4.0}, r"float\[\]; expected NumPy arrays"),
        ({}, "none"),
        ({"id": np.array(1.0)}, r"ndarray\[\]; expected NumPy arrays"),
    ],
)
def test_what_a_hook_writes_is_rows(written, message):
    with pytest.raises(HookError, match=rf"hook 'wrong' wrote leaves {message}"):
        IngestionChain([spy([], change=lambda _: written, name="wrong")], False).process(Group(unit()))


@pytest.mark.parametrize("written", [{"id": np.zeros(1)}, [np.zeros(1)], None])
def test_a_trajectory_hook_writes_fragments(written):
    with pytest.raises(HookError, match=r"'wrong' wrote .*expected a list of Fragment"):
        IngestionChain([spy([], "trajectory", lambda _: written, name="wrong")], True).process(
            Group(unit(), closes=True)
        )


@pytest.mark.parametrize("per", ["row", "unit"])
def test_trajectories_can_not_be_looked_at_after_rows_were_dropped(per):
    chain = [spy([], per, rows="any", name="filter"), spy([], "trajectory", name="returns")]
    with pytest.raises(HookError, match=r"'returns' looks at trajectories, but 'filter' before it"):
        IngestionChain(chain, False)
    IngestionChain(chain[::-1], False)
