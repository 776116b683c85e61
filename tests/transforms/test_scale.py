"""Normalize and ToFloat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from conduit.core.hook import check_chain, run_hook
from conduit.errors import SchemaError
from conduit.transforms import Normalize, ToFloat


def test_normalize_makes_the_unit_mean_zero_and_deviation_one() -> None:
    rows = {"advantage": np.array([1, 2, 3, 6], np.float32), "reward": np.ones(4, np.float32)}
    got = run_hook(Normalize(), rows)
    assert got["advantage"].dtype == np.float32
    # mean 3, variance (4 + 1 + 0 + 9) / 4
    assert_allclose(got["advantage"], np.array([-2, -1, 0, 3]) / np.sqrt(3.5), rtol=1e-6)
    assert got["reward"] is rows["reward"]
    assert_array_equal(rows["advantage"], [1, 2, 3, 6])


def test_normalize_keeps_large_offsets_exact() -> None:
    got = run_hook(Normalize(), {"advantage": np.array([1e7, 1e7 + 2], np.float32)})
    assert_allclose(got["advantage"], [-1, 1], rtol=1e-6)


def test_normalize_refuses_a_unit_of_one_row_and_says_what_a_unit_is() -> None:
    with pytest.raises(SchemaError, match=r"the unit has 1 row.*Off-policy a unit is one push"):
        run_hook(Normalize("reward"), {"reward": np.array([3], np.float32)})


def test_normalize_of_equal_values_is_zero_not_nan() -> None:
    assert_array_equal(run_hook(Normalize(), {"advantage": np.full(3, 7, np.float32)})["advantage"], np.zeros(3))


def test_to_float_scales_pixels_and_leaves_the_rest() -> None:
    rows = {"obs": np.array([[0, 51, 255]], np.uint8), "next_obs": np.array([[255, 0, 0]], np.uint8)}
    got = run_hook(ToFloat(), rows)
    assert got["obs"].dtype == np.float32
    assert_allclose(got["obs"], [[0, 0.2, 1]], rtol=1e-6)
    assert got["next_obs"] is rows["next_obs"]


def test_to_float_takes_a_leaf_by_path_or_all_below_it() -> None:
    rows = {"obs": {"image": np.array([255], np.uint8), "depth": np.array([255], np.uint16)}}
    one = run_hook(ToFloat("obs/image"), rows)
    assert (one["obs"]["image"].dtype, one["obs"]["depth"].dtype) == (np.float32, np.uint16)
    both = run_hook(ToFloat("obs"), rows)
    assert (both["obs"]["image"].dtype, both["obs"]["depth"].dtype) == (np.float32, np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("came", [np.bool_, np.uint8, np.int64, np.float64])
def test_to_float_gives_the_dtype_asked_for(dtype: Any, came: Any) -> None:
    got = run_hook(ToFloat("x", scale=2.0, dtype=dtype), {"x": np.array([1], came)})
    assert (got["x"].dtype, got["x"].item()) == (dtype, 2.0)


@pytest.mark.parametrize("hook", [Normalize("obs/imag"), ToFloat("obs/imag")])
def test_a_leaf_that_isnt_there_is_named_beside_those_that_are(hook: Any) -> None:
    with pytest.raises(SchemaError, match="no leaf 'obs/imag'; the rows have 'obs/image'"):
        run_hook(hook, {"obs": {"image": np.zeros(1, np.float32)}})


def test_they_declare_their_stage_and_scope() -> None:
    (normalize, stored) = check_chain([Normalize(), ToFloat(stage="ingestion")], "ingestion")
    (drawn,) = check_chain([ToFloat("next_obs")], "delivery")
    assert (normalize.per, stored.per, drawn.per) == ("unit", "row", "row")
    assert drawn.name == "ToFloat('next_obs')"
