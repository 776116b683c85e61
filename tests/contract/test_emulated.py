"""The emulated backend passes the suite of all, over every inner backend, on the real clock and on the virtual one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from conduit.backends.emulated import EmulatedBackend
from conduit.clock import VirtualClock
from conduit.testing import BackendContract
from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Edge, Link, Memory, Topology
from conduit.topology.endpoint import DISK, PAGEABLE, PINNED, Endpoint, Tier

ENDPOINTS = (PAGEABLE, PINNED, DISK, *(Endpoint(Tier.DEVICE, index) for index in range(2)))
EDGES: tuple[Edge, ...] = tuple(itertools.product(ENDPOINTS, ENDPOINTS))

QUICK = Topology(
    name="two quick devices",
    memories={at: Memory(1 << 30, 1 << 30, Source.ASSUMED) for at in ENDPOINTS},
    legs={edge: Leg(5e10, 2e-5) for edge in EDGES},
    links={"root": Link(8e10)},
    routes={(source, to): ("root",) for source, to in EDGES if source.is_host is not to.is_host},
)
"""Fast enough for a test on the real clock, slow enough that every transfer has to be waited for."""

NARROWED_BY_JAX = frozenset({"int64", "uint64", "float64", "complex128"})


class TestReference(BackendContract):
    @pytest.fixture
    def backend(self):
        return EmulatedBackend(QUICK, "reference")


class TestTorch(BackendContract):
    @pytest.fixture
    def backend(self):
        pytest.importorskip("torch")
        return EmulatedBackend(QUICK, "torch")


class TestJax(BackendContract):
    narrowed = NARROWED_BY_JAX

    @pytest.fixture
    def backend(self):
        pytest.importorskip("jax")
        return EmulatedBackend(QUICK, "jax")


def lived(case: Callable[..., None]) -> Callable[..., None]:
    """The same case, as the first task of its backend's virtual clock."""

    @functools.wraps(case)
    def on_the_clock(self: BackendContract, backend: EmulatedBackend, **given: Any) -> None:
        clock = backend.clock
        assert isinstance(clock, VirtualClock)
        clock.run(lambda: case(self, backend=backend, **given))

    return on_the_clock


def on_the_virtual_clock(suite: type[BackendContract]) -> type[BackendContract]:
    for name in dir(suite):
        if name.startswith("test_"):
            setattr(suite, name, lived(getattr(suite, name)))
    return suite


@on_the_virtual_clock
class TestOnTheVirtualClock(BackendContract):
    @pytest.fixture
    def clock(self):
        return VirtualClock()

    @pytest.fixture
    def backend(self, clock):
        return EmulatedBackend(QUICK.changed(legs={edge: Leg(1e8, 0.01) for edge in EDGES}), "reference", clock)


def test_no_case_is_missing_on_the_virtual_clock():
    cases = {name for name in dir(BackendContract) if name.startswith("test_")}
    assert len(cases) > 30
    assert all(vars(TestOnTheVirtualClock)[name].__wrapped__ is getattr(BackendContract, name) for name in cases)
