"""Backends by name, each with its own framework and no other."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from conduit.backends import load
from conduit.backends.reference import ReferenceBackend
from conduit.core.backend import Backend
from conduit.errors import MissingExtraError, UnknownBackendError


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "others"), [("reference", ["torch", "jax"]), ("torch", ["jax"]), ("jax", ["torch"])])
def test_loading_a_backend_imports_no_other_framework(name, others):
    use = f"""
import sys, numpy as np
from conduit.backends import load
from conduit.core.backend import Columns, Target
from conduit.core.experience import Schema
from conduit.topology.endpoint import PAGEABLE
backend, rows = load({name!r}), {{"a": np.ones((4, 3), np.float32)}}
for at in backend.endpoints():
    columns = backend.write(backend.allocate(Schema.infer(rows, "t"), 4, at), 0, Columns(PAGEABLE, rows, 4))
    batch = backend.read(columns, np.arange(4), ["a"], at)
    backend.hand_over(batch, Target(backend.framework))
    backend.hand_over(batch, Target("numpy"))
print(*(other for other in {others!r} if other in sys.modules))
"""
    assert run(use).split() == []


def test_the_contract_suite_imports_no_framework():
    assert run("import sys, conduit.testing.backends; print(*({'torch', 'jax'} & set(sys.modules)))").split() == []


def test_a_backend_is_given_back_as_it_is():
    backend = load("reference")
    assert load(backend) is backend


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(UnknownBackendError, match=r"'tensorflow'.*reference, torch, jax"):
        load("tensorflow")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            3,
            r"backend=3: expected one of reference, torch, jax, or a Backend of your own: it has no name, framework, immediate, endpoints",
        ),
        (None, r"backend=None: expected one of reference, torch, jax"),
        (object(), "it has no name, framework"),
        (SimpleNamespace(**{name: None for name in vars(Backend) if name != "hand_over"}), "it has no hand_over$"),
        (ReferenceBackend, r"ReferenceBackend'>: expected one of .* of your own"),
    ],
)
def test_what_is_no_backend_is_refused_with_what_it_lacks(wrong, says):
    with pytest.raises(UnknownBackendError, match=says):
        load(wrong)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_framework_that_is_not_installed_is_named_with_its_extra(name):
    use = f"""
import sys
sys.modules[{name!r}] = None  # as if it weren't installed
import numpy as np
from conduit.backends import exchange, load
from conduit.core.backend import Target
from conduit.errors import MissingExtraError
for attempt in (lambda: load({name!r}), lambda: exchange.accept({{"a": np.ones(3)}}, Target({name!r}))):
    try:
        attempt()
    except MissingExtraError as error:
        print(error)
"""
    assert run(use).count(f"pip install 'conduit-rl[{name}]'") == 2
    assert issubclass(MissingExtraError, ImportError)
