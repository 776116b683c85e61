"""Schemas: what a row is, and exactly what differs when it isn't."""

from __future__ import annotations

import re
from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest

from conduit.core.experience import ROOT, Schema
from conduit.errors import SchemaError

Pair = namedtuple("Pair", ["left", "right"])

TREE = {
    "obs": {"image": np.zeros((3, 4, 4), np.uint8), "state": np.zeros((3, 2), np.float64)},
    "pair": Pair(np.zeros(3, ml_dtypes.bfloat16), [np.zeros((3, 1), np.complex64)]),
    "done": np.zeros(3, np.bool_),
}


def test_a_schema_names_every_leaf_by_its_path_and_counts_its_bytes():
    schema = Schema.infer(TREE, "here")
    assert {path: str(field) for path, field in schema.fields.items()} == {
        "done": "bool[]",
        "obs/image": "uint8[4, 4]",
        "obs/state": "float64[2]",
        "pair/0": "bfloat16[]",
        "pair/1/0": "complex64[1]",
    }
    assert schema.row_bytes == 1 + 16 + 16 + 2 + 8
    assert str(schema).startswith("done: bool[], obs/image: uint8[4, 4]")


def test_flatten_and_unflatten_are_inverse():
    schema = Schema.infer(TREE, "here")
    again = schema.unflatten(schema.flatten(TREE, "here"))
    assert again.keys() == TREE.keys()
    assert again["obs"]["image"] is TREE["obs"]["image"]
    assert isinstance(again["pair"], Pair)
    assert again["pair"].right[0] is TREE["pair"].right[0]


def test_a_tree_may_be_a_single_leaf():
    assert list(Schema.infer(np.zeros((2, 3)), "here").fields) == [ROOT]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "at least one leaf; got an empty dict"),
        ({"obs": 1.5}, "leaf 'obs' is a float; expected an array"),
        ({"obs": np.array(1.5)}, "leaf 'obs' has no axes; expected a leading row axis"),
        ({"obs": np.array(["a"])}, "leaf 'obs' has dtype <U1; expected a numeric or bool dtype"),
        ({"obs": np.array([None])}, "leaf 'obs' has dtype object"),
        ({"obs": np.zeros(2, "M8[s]")}, r"leaf 'obs' has dtype datetime64\[s\]"),
        ({"obs": np.zeros(2, [("a", "f4")])}, "leaf 'obs' has dtype .*expected a numeric"),
    ],
)
def test_what_can_be_no_row_is_refused_by_leaf(tree, message):
    with pytest.raises(SchemaError, match=rf"here: .*{message}"):
        Schema.infer(tree, "here")


def test_two_leaves_that_would_share_a_path_are_refused_by_it():
    with pytest.raises(SchemaError, match="a/b"):
        Schema.infer({"a": {"b": np.zeros(2)}, "a/b": np.zeros(2)}, "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros(3, np.float64)}, "leaf 'obs' has dtype float64; expected float32. Cast it"),
        ({"obs": np.zeros((3, 2), np.float32)}, "leaf 'obs' has shape (3, 2); expected (rows, )"),
        ({"act": np.zeros((3, 3), np.int32)}, "leaf 'act' has shape (3, 3); expected (rows, 2)"),
        ({"obs": np.float32(1)}, "leaf 'obs' is a float32; expected an array float32[]"),
        ({"obs": np.zeros(2, np.float32)}, "leaf 'obs' has a leading axis of 2; expected 3, one a row"),
    ],
)
def test_a_leaf_that_differs_is_named_with_what_came_and_what_was_expected(change, message):
    tree = {"act": np.zeros((3, 2), np.int32), "obs": np.zeros(3, np.float32)}
    schema = Schema.infer(tree, "here")
    assert schema.check(schema.flatten(tree, "here"), "here") == 3
    with pytest.raises(SchemaError, match=re.escape(f"here: {message}")):
        schema.check(schema.flatten(tree | change, "here"), "here")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": 0}, "missing 'b'; expected leaves 'a', 'b'"),
        ({"a": 0, "b": 0, "c": 0}, "unexpected 'c'; expected leaves 'a', 'b'"),
        ({"a": 0, "c": 0}, "missing 'b' and unexpected 'c'"),
        ((0, 0), "missing 'a', 'b' and unexpected '0', '1'"),
    ],
)
def test_leaves_that_are_missing_or_too_many_are_named(tree, message):
    schema = Schema.infer({"a": np.zeros(1), "b": np.zeros(1)}, "here")
    with pytest.raises(SchemaError, match=re.escape(message)):
        schema.flatten(tree, "here")


def test_equal_leaves_in_another_structure_are_refused():
    schema = Schema.infer((np.zeros(1), np.zeros(1)), "here")
    with pytest.raises(SchemaError, match="nest differently"):
        schema.flatten([np.zeros(1), np.zeros(1)], "here")
