"""What growth is made of: declarations, padding, extents by runs, beside plain lists and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit.core.batch import Padding, SampleInfo
from conduit.core.declared import Declared
from conduit.core.experience import Field, Schema
from conduit.core.versions import Extents
from conduit.errors import SchemaError

shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3)


def schema(**shapes: tuple[int, ...]) -> Schema:
    return Schema.infer({name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}, "test")


@settings(max_examples=100, deadline=None)
@given(shapes, st.data(), st.integers(0, 3), st.integers(0, 3))
def test_leaves_are_filled_up_with_zeros_at_the_end_of_the_axis_that_grows(shape, data, rows, more):
    axis = data.draw(st.integers(0, len(shape) - 1))
    declared = Declared({"a": Field(["h" if i == axis else size for i, size in enumerate(shape)], np.float32, "pad")})
    wide = tuple(size + more * (i == axis) for i, size in enumerate(shape))
    old, new = schema(a=tuple(shape), b=(2,)), schema(a=wide, b=(2,))
    leaves = {"a": np.ones((rows, *shape), np.float32), "b": np.ones((rows, 2), np.float32)}
    made = declared.padded(leaves, new)
    assert made["a"].shape == (rows, *wide)
    assert made["a"].sum() == leaves["a"].sum()
    assert np.array_equal(made["a"][tuple(slice(size) for size in (rows, *shape))], leaves["a"])
    assert made["b"] is leaves["b"]
    assert (declared.widest(old, new) is old) == (more == 0)
    assert declared.widest(new, old) is new
    assert declared.widths(declared.widest(old, new)) == {"a": wide[axis]}
    assert declared.padded(made, new) is made


def test_several_fields_grow_apart_and_the_widest_of_two_forms_has_the_longer_of_each():
    declared = Declared({"a": Field(("h",), np.float32, "pad"), "b": Field((2, "w"), np.float32, "pad")})
    one, other = schema(a=(3,), b=(2, 4), c=(1,)), schema(a=(2,), b=(2, 6), c=(9,))
    assert {path: field.shape for path, field in declared.widest(one, other).fields.items()} == {
        "a": (3,),
        "b": (2, 6),
        "c": (1,),
    }
    grown = declared.grown(one, {"a": np.zeros((5, 3)), "b": np.zeros((5, 2, 5)), "c": np.zeros((5, 7))}, "push")
    assert {path: field.shape for path, field in grown.fields.items()} == {"a": (3,), "b": (2, 5), "c": (1,)}
    with pytest.raises(SchemaError, match=r"'a' has shape \(5, 2\); its axis 'h' was 2 long here and is 3"):
        declared.grown(one, {"a": np.zeros((5, 2)), "b": np.zeros((5, 2, 5)), "c": np.zeros((5, 1))}, "push")


def test_a_final_is_filled_up_as_its_row_and_one_of_another_width_stays_as_it_is():
    declared = Declared({"obs/image": Field(("h",), np.float32, "pad")})
    tree = {"obs": {"image": np.zeros((1, 2), np.float32)}, "value": np.zeros(1, np.float32)}
    narrow = Schema.infer(tree, "test")
    wide = narrow.reshaped({"obs/image": (4,)})
    final = {"obs": {"image": np.ones(2, np.float32)}, "value": np.float32(3)}
    made = declared.padded_final(final, narrow, wide)
    assert made["obs"]["image"].tolist() == [1, 1, 0, 0]
    assert made["value"] == 3
    odd = {"obs": {"image": np.ones(3, np.float32)}}
    assert declared.padded_final(odd, narrow, wide)["obs"]["image"].shape == (3,)


pushes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(pushes, st.integers(1, 12))
def test_every_live_row_has_the_width_that_it_came_with(pushes, capacity):
    extents, plain = Extents(), []
    for rows, one, other in pushes:
        extents.evict(max(0, len(plain) - capacity))
        extents.append(len(plain), {"a": one, "b/c": other})
        plain += [(one, other)] * rows
        live = np.arange(max(0, len(plain) - capacity), len(plain))
        assert list(zip(extents.of("a", live).tolist(), extents.of("b/c", live).tolist(), strict=True)) == [
            plain[key] for key in live
        ]
        again = Extents()
        again.load(extents.state(), int(live[0]))
        assert again.of("b/c", live).tolist() == extents.of("b/c", live).tolist()
    assert "a" in extents
    assert "c" not in extents


def info(**settings: Any) -> SampleInfo:
    keys = np.arange(2)
    return SampleInfo(
        number=0,
        keys=keys,
        frontier=2,
        table_size=3,
        priority_lag=0,
        probability=1.0,
        priority=1.0,
        policy_version=keys,
        store_version=0,
        weight=1.0,
        **settings,
    )


def test_a_mask_goes_with_its_leaf_whatever_axes_that_has():
    extent = np.array([[1, 3], [0, 2]])
    leaf = np.ones((2, 2, 5, 3, 4))
    mask = Padding(extent, axis=1, axes=3, width=3).mask
    assert mask.shape == (2, 2, 1, 3, 1)
    assert (leaf * mask).sum(axis=(2, 3, 4)).tolist() == (extent * 5 * 4).tolist()


def test_masks_are_made_once_when_asked_for_by_what_makes_arrays_of_the_batch():
    made = []

    def to_batch(array: np.ndarray) -> str:
        made.append(array)
        return "an array"

    told = info(padding={"obs": Padding(np.array([1, 2]), 0, 1, 2)}, to_batch=to_batch)
    assert told.extents["obs"].tolist() == [1, 2]
    assert not made
    assert told.padding_mask("obs") == "an array"
    assert told.padding_mask("obs") == "an array"
    assert told.padding_mask("id") is None
    assert [each.tolist() for each in made] == [[[True, False], [True, True]]]
    assert info().extents == {}
