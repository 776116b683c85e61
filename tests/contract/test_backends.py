"""Every backend passes the same suite."""

from __future__ import annotations

import pytest

from conduit.backends import load
from conduit.testing import BackendContract


class TestReference(BackendContract):
    @pytest.fixture
    def backend(self):
        return load("reference")


class TestTorch(BackendContract):
    @pytest.fixture
    def backend(self):
        return load("torch")


class TestJax(BackendContract):
    narrowed = frozenset({"int64", "uint64", "float64", "complex128"})  # x64 is off

    @pytest.fixture
    def backend(self):
        return load("jax")
