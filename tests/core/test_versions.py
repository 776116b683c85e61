"""The version of every live row, kept by runs, beside a plain list."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core.versions import Versions

pushes = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.integers(1, 4)),
        st.lists(st.integers(0, 3), max_size=5),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(pushes, st.integers(1, 12))
def test_every_live_row_has_the_version_that_it_came_with(pushes, capacity):
    versions, plain = Versions(), []
    for push in pushes:
        first = len(plain)
        if isinstance(push, tuple):
            version, rows = push
            versions.append(first, version)
            plain += [version] * rows
        else:
            versions.append(first, np.array(push, np.int64))
            plain += push
        oldest = max(0, len(plain) - capacity)
        versions.evict(oldest)
        live = np.arange(oldest, len(plain))
        if len(live):
            assert versions.of(live).tolist() == plain[oldest:]
            assert versions.of(live[::-1]).tolist() == plain[oldest:][::-1]


def test_runs_take_memory_for_live_rows_only():
    versions = Versions()
    for first in range(100_000):
        versions.append(first, first % 7)
        versions.evict(max(0, first - 50))
    assert versions._runs.nbytes < 8_000
