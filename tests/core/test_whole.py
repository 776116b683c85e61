"""Whole numbers among settings."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from conduit.core.whole import check_whole
from conduit.errors import SettingError


@pytest.mark.parametrize(
    ("got", "limits"),
    [
        (1, {}),
        (10**30, {}),
        (np.int8(1), {}),
        (0, {"least": 0}),
        (7, {"least": 7, "most": 7}),
        (np.uint64(7), {"most": 7}),
    ],
)
def test_a_whole_number_within_its_limits_is_taken(got, limits):
    check_whole("rows", got, **limits)


@pytest.mark.parametrize(
    ("got", "limits", "said"),
    [
        (0, {}, "rows=0: expected a whole number of at least 1"),
        (-1, {"least": 0}, "rows=-1: expected a whole number of at least 0"),
        (10**30, {"most": 2**31}, f"rows={10**30}: expected a whole number of at least 1, and at most 2147483648"),
        (True, {}, "rows=True: expected"),
        (1.0, {}, "rows=1.0: expected"),
        (float("nan"), {}, "rows=nan: expected"),
        ("1", {}, "rows='1': expected"),
        (None, {}, "rows=None: expected"),
        ([1], {}, "rows=[1]: expected"),
        (np.ones(1, int), {}, "rows=array([1]): expected"),
        (0, {"of": "Sequence"}, "Sequence(rows=0): expected"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_by_name(got: Any, limits: Any, said: str):
    with pytest.raises(SettingError, match=re.escape(said)):
        check_whole("rows", got, **limits)
