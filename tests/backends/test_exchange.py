"""Arrays that come from anywhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from conduit.backends import exchange
from conduit.errors import SchemaError
from conduit.testing import FRAMEWORKS, address, assert_same, example_rows

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")


class Foreign:
    """An array of a framework that we know nothing of but DLPack."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if self.device != (1, 0):
            raise BufferError("not on the host")
        return self.array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        return self.device


class OwnTensor(torch.Tensor):
    """A user's subclass, defined outside torch."""


class OwnArray(np.ndarray):
    """A user's subclass, defined outside NumPy."""


def test_an_array_s_framework_is_seen_from_its_class():
    assert exchange.framework_of(np.zeros(1)) == "numpy"
    assert exchange.framework_of(np.float32(1)) == "numpy"
    assert exchange.framework_of(np.zeros(1).view(OwnArray)) == "numpy"
    assert exchange.framework_of(torch.zeros(1)) == "torch"
    assert exchange.framework_of(torch.nn.Parameter(torch.zeros(1))) == "torch"
    assert exchange.framework_of(torch.zeros(1).as_subclass(OwnTensor)) == "torch"
    assert exchange.framework_of(jnp.zeros(1)) == "jax"
    assert exchange.framework_of([1.0]) is None
    assert exchange.framework_of(Foreign(np.zeros(1))) is None


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_leaf_has_a_numpy_form_with_the_same_bits(framework):
    rows = example_rows(4, seed=1)
    for path, leaf in exchange.accept(rows, exchange.Target(framework)).items():
        assert_same(exchange.to_numpy(leaf), rows[path], path)
        assert_same(exchange.fetch(leaf)(), rows[path], path)


def test_a_numpy_array_and_a_cpu_tensor_are_not_copied():
    array, tensor = np.arange(4.0), torch.arange(4.0)
    assert exchange.to_numpy(array) is array
    assert address(exchange.to_numpy(tensor)) == tensor.data_ptr()


def test_foreign_arrays_come_by_dlpack():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert_same(exchange.to_numpy(Foreign(array)), array, "foreign")
    assert_same(exchange.fetch(Foreign(array))(), array, "foreign")
    assert_same(exchange.to_numpy(Foreign(array[::-1])), np.ascontiguousarray(array[::-1]), "reversed")


@pytest.mark.parametrize("convert", [exchange.to_numpy, exchange.fetch])
def test_what_is_no_array_is_refused_by_its_type(convert):
    for leaf, name in (([1.0], "list"), (1.0, "float"), ("reward", "str"), (None, "NoneType"), (object(), "object")):
        with pytest.raises(SchemaError, match=f"got {name}, which is no array"):
            convert(leaf)
    with pytest.raises(SchemaError, match="copy it to the host first"):
        convert(Foreign(np.zeros(3), device=(2, 0)))
    with pytest.raises(SchemaError, match="sparse"):
        convert(torch.eye(3).to_sparse())


def test_a_tracer_is_refused():
    with pytest.raises(SchemaError, match="tracer"):
        jax.jit(exchange.to_numpy)(jnp.zeros(3))


def test_what_was_fetched_is_what_was_there_at_the_call():
    array, tensor = np.arange(4.0), torch.arange(4.0)
    waits = [exchange.fetch(array), exchange.fetch(tensor), exchange.fetch(Foreign(array))]
    array[:] = tensor[:] = -1.0
    for wait in waits:
        assert list(wait()) == [0, 1, 2, 3]


def test_a_jax_array_may_be_donated_after_fetch():
    array = jnp.arange(4.0)
    wait = exchange.fetch(array)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()
    assert list(wait()) == [0, 1, 2, 3]


def test_bfloat16_crosses_between_all_frameworks():
    rows = {"a": np.arange(8).reshape(4, 2).astype(ml_dtypes.bfloat16)}
    for source in FRAMEWORKS:
        for target in FRAMEWORKS:
            arrays = exchange.accept(exchange.accept(rows, exchange.Target(source)), exchange.Target(target))
            assert_same(arrays["a"], rows["a"], (source, target))
