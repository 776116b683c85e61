"""Placements and budgets, as users write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.core.placement import (
    KINDS,
    Placement,
    asked_kinds,
    budgets_within,
    capped_rows,
    even_rows,
    format_bytes,
    kinds_of,
    parse_budgets,
    parse_bytes,
    whole_rows,
)
from conduit.errors import CapacityError, SettingError
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier
from tests.core.placement_oracle import GB, machine

D0, D1 = Endpoint(Tier.DEVICE, 0), Endpoint(Tier.DEVICE, 1)
KNOWN = (PAGEABLE, D0, D1)
SECOND = Endpoint(Tier.PAGEABLE, 1, 3)


@pytest.mark.parametrize(
    ("asked", "endpoints"),
    [
        ("auto", (PAGEABLE,)),
        ("pageable", (PAGEABLE,)),
        ("device:1", (D1,)),
        (D0, (D0,)),
        (["device:0", D1], (D0, D1)),
        (("device:1", "pageable"), (D1, PAGEABLE)),
        (Placement((D1, D0), (2.0, 1.0)), (D1, D0)),
    ],
)
def test_a_placement_is_named_by_what_is_natural(asked, endpoints):
    placement = Placement.of(asked, KNOWN)
    assert placement.endpoints == endpoints
    assert len(placement.shares) == len(endpoints)
    assert isinstance(asked, Placement) or len(set(placement.shares)) == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("pinned", r"no endpoint pinned .*it has pageable, device:0, device:1"),
        (PINNED, r"no endpoint pinned"),
        (["device:0", "device:7"], r"no endpoint device:7"),
        ("gpu", r"placement='gpu': endpoint 'gpu': expected \[nodeN/\]TIER\[:INDEX\]"),
        ("device:x", r"'device:x'"),
        ("node1/device:0", r"no endpoint node1/device:0"),
        ("pageable:1", r"no endpoint pageable:1 for the backend; it has pageable,"),
        ([], r"at least one endpoint"),
        (["device:0", "device:0"], r"occurs twice"),
        (None, r"placement=None: expected 'auto'"),
        (3, r"placement=3: expected 'auto'"),
        (["device:0", 3], r"placement=\['device:0', 3\]: expected 'auto'"),
        ([["device:0"]], r"expected 'auto'"),
        (b"disk", r"placement=b'disk': expected 'auto'"),
        ({"device:0": 0.5}, r"placement=\{'device:0': 0.5\}: expected 'auto', a conduit.Placement"),
    ],
)
def test_a_placement_that_is_not_there_is_refused_with_what_is(asked, message):
    with pytest.raises(CapacityError, match=message):
        Placement.of(asked, KNOWN)


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf")])
def test_shares_are_finite_and_positive(share):
    with pytest.raises(CapacityError, match="finite number above 0"):
        Placement((D0, D1), (1.0, share))


def test_shares_are_one_an_endpoint():
    with pytest.raises(CapacityError, match="one share each"):
        Placement((D0, D1), (1.0,))


@pytest.mark.parametrize("endpoint", [*KNOWN, PINNED, Endpoint(Tier.DEVICE, 3, 2), Endpoint(Tier.DISK), SECOND])
def test_an_endpoint_is_parsed_from_its_own_name(endpoint):
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "gpu:0",
            "device:-1",
            "device:",
            "device:1_0",
            "device:٣",
            "device:0:0",
            "device:1e3",
            f"device:{'9' * 5000}",
        ),
        *(
            " device:0",
            "Device:0",
            "/device:0",
            "1/device:0",
            "node-1/device:0",
            "node/device:0",
            "node1/node2/device:0",
        ),
    ],
)
def test_a_name_that_is_no_endpoints_is_refused_with_what_one_is_like(name):
    with pytest.raises(
        ValueError, match=r"expected \[nodeN/\]TIER\[:INDEX\] with a tier of pageable, pinned, disk, device"
    ):
        Endpoint.parse(name)


@pytest.mark.parametrize(
    ("text", "size"),
    [(5, 5), ("5", 5), ("5B", 5), ("5 KB", 5000), ("5KiB", 5120), ("1.5GiB", 3 << 29), ("24 GiB", 24 << 30),
     ("2TB", 2 * 10**12), ("0", 0), ("1e3MB", 10**9)],
)  # fmt: skip
def test_sizes_are_read_in_binary_and_decimal_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "wrong",
    [
        *(10**400, 1 << 63, "9223372036854775808"),
        *("", "GiB", "five", "-5GiB", -1, "5 GB iB", "5gib", "5K", "inf", "nanGiB", "1e999"),
        *(None, True, float("nan"), float("inf"), b"5", [], object),
    ],
)
def test_a_budget_of_no_known_size_is_refused_by_name(wrong):
    with pytest.raises(CapacityError, match=r"budgets\['pageable'\]=.*such as '24GiB'"):
        parse_budgets({"pageable": wrong})


def test_a_budget_of_an_unknown_tier_is_refused_with_those_there_are():
    with pytest.raises(CapacityError, match=r"budgets\['gpu'\].*pageable, pinned, disk, device"):
        parse_budgets({"gpu": "1GiB"})


@pytest.mark.parametrize("wrong", ["x", 0, 3, [], ["disk"], {"disk"}, False], ids=repr)
def test_budgets_that_are_no_dict_are_refused(wrong):
    with pytest.raises(CapacityError, match=r"budgets=.*: expected a dict of tiers to sizes"):
        parse_budgets(wrong)


def test_budgets_are_by_tier():
    numbers: Any = {"disk": 8e9, "pageable": np.int64(7)}
    assert parse_budgets(numbers) == {Tier.DISK: 8 * 10**9, Tier.PAGEABLE: 7}
    assert parse_budgets({"device": "1KiB", "pageable": 7}) == {Tier.DEVICE: 1024, Tier.PAGEABLE: 7}
    assert parse_budgets(None) == {}


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")])
def test_sizes_are_printed_short(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ("auto", KINDS),
        (["auto"], KINDS),
        ("shared_gpu", ("shared_gpu",)),
        (["mixed", "cpu_pinned", "mixed"], ("cpu_pinned", "mixed")),
        ("pageable", None),
        ("gpu", None),
        (["device:0", "device:1"], None),
        (D0, None),
        (Placement((D0,)), None),
        ([], None),
    ],
    ids=str,
)
def test_kinds_are_to_choose_from_and_endpoints_are_not(asked, kinds):
    assert asked_kinds(asked) == kinds


@pytest.mark.parametrize("asked", [["shared_gpu", "device:0"], ["shared_gpu", D0], ["auto", "mixed"], ["mixed", 3]])
def test_kinds_and_endpoints_together_are_refused(asked):
    with pytest.raises(
        SettingError, match=r"placement=.*expected 'auto' or one or more of cpu_pageable.* is none of them"
    ):
        asked_kinds(asked)


@pytest.mark.parametrize("asked", [None, 3, [], "gpu", b"mixed", {"mixed": 1}])
def test_what_names_no_kind_is_refused(asked):
    with pytest.raises(SettingError, match=r"candidates=.*: expected 'auto' or one or more of"):
        kinds_of("candidates", asked)


def test_an_unknown_name_is_told_of_the_kinds_there_are():
    with pytest.raises(CapacityError, match="kinds of placement alone: cpu_pageable, cpu_pinned, single_gpu"):
        Placement.of("gpu", KNOWN)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(0, 10**9))
def test_shares_become_whole_rows_that_sum(shares, rows):
    whole = whole_rows(shares, rows)
    assert sum(whole) == rows
    assert all(abs(each - rows * share / sum(shares)) < 1 + 1e-6 for each, share in zip(whole, shares, strict=True))


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=9))
def test_rows_are_found_again_in_their_shares(rows):
    capacity = sum(rows)
    endpoints = tuple(Endpoint(Tier.DEVICE, at) for at in range(len(rows)))
    placement = Placement(endpoints, tuple(each / capacity for each in rows))
    assert list(placement.rows(capacity).values()) == rows


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(8, 6000))
def test_even_rows_are_as_even_as_there_is_room(most, capacity):
    rows = even_rows(most, capacity)
    assert sum(rows) == capacity
    assert min(rows) >= 1
    room = [max(1, each) for each in most]
    if sum(room) >= capacity:
        assert all(each <= cap for each, cap in zip(rows, room, strict=True))
        # Whoever has fewer than another has no room for more.
        assert all(each == cap or each >= max(rows) - 1 for each, cap in zip(rows, room, strict=True))


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 1000)), min_size=1, max_size=8), st.data())
def test_capped_rows_keep_to_their_caps(parts, data):
    shares, most = [share + 1e-6 for share, _ in parts], [cap for _, cap in parts]
    capacity = data.draw(st.integers(len(most), sum(most)))
    rows = capped_rows(shares, capacity, most)
    assert sum(rows) == capacity
    assert all(1 <= each <= cap for each, cap in zip(rows, most, strict=True))


def test_a_budget_above_what_there_is_is_refused_with_both_figures():
    there = machine(2, 80 * GB)
    assert budgets_within(there, {"device": "80GB"}) == {Tier.DEVICE: 80 * GB}
    assert budgets_within(there, None) == {}
    with pytest.raises(
        CapacityError, match=r"budgets\['device'\] is 89.41 GiB, more than the 74.51 GiB that device:0 has in all"
    ):
        budgets_within(there, {"device": "96GB"})
