"""What only torch can get wrong: devices under two names, read-only memory, gradients, dtypes it lacks."""

from __future__ import annotations

import numpy as np
import pytest

from conduit.backends import load
from conduit.core.backend import Columns, Target
from conduit.core.experience import Schema
from conduit.errors import HandOverError, SchemaError
from conduit.testing import address, assert_rows, example_rows, index_of, on_host
from conduit.topology.endpoint import PAGEABLE, Endpoint, Tier

torch = pytest.importorskip("torch")
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the devices are CUDA's")

DEVICE = Endpoint(Tier.DEVICE)


@pytest.fixture
def backend():
    return load("torch")


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=str)
def test_every_name_of_the_cpu_is_the_same_device(backend, device):
    target = Target("torch", device=device)
    assert backend.landing(target) == PAGEABLE
    batch = on_host(example_rows(4, seed=0))
    arrays = backend.hand_over(batch, target)
    assert all(arrays[path].device == torch.device("cpu") for path in arrays)
    assert address(arrays["image"]) == address(batch.arrays["image"])


@no_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", "meta", "gpu", 1.5])
def test_a_device_that_is_not_there_is_refused(backend, device):
    with pytest.raises(HandOverError, match=f"device={device!r}"):
        backend.hand_over(on_host(example_rows(4, seed=0)), Target("torch", device=device))


@no_cuda
def test_pinned_memory_is_offered_only_with_cuda(backend):
    assert [str(at) for at in backend.endpoints()] == ["pageable", "disk", "device:0"]


def test_read_only_rows_are_written_and_handed_over_without_a_warning(backend):
    rows = example_rows(4, seed=1)
    for array in rows.values():
        array.flags.writeable = False
    columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 4, DEVICE), 0, on_host(rows))
    assert_rows(backend, backend.read(columns, np.arange(4), list(rows), DEVICE), rows, "device")
    assert_rows(backend, Columns(PAGEABLE, backend.hand_over(on_host(rows), Target("torch")), 4), rows, "handed over")


@pytest.mark.parametrize("at", [PAGEABLE, DEVICE], ids=str)
def test_tensors_are_adopted_without_gradients_or_odd_strides(backend, at):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    leaf = base.clone().requires_grad_()
    odd = {
        "requires grad": leaf,
        "has a graph": leaf * 2,
        "transposed": base.reshape(6, 4).T,
        "every other": torch.arange(48.0).reshape(8, 6)[::2],
        "expanded": base[:1].expand(4, 6),
        "conjugated": torch.complex(base, base).conj(),
        "bfloat16": base.bfloat16()[:, ::2],
    }
    copy = backend.adopt(odd, at)
    for path, tensor in odd.items():
        expected = tensor.detach().resolve_conj()
        got = torch.from_numpy(copy.arrays[path]) if path not in ("bfloat16",) and at == PAGEABLE else copy.arrays[path]
        if isinstance(got, torch.Tensor):
            assert not got.requires_grad
            assert torch.equal(got, expected), path
        else:
            assert np.array_equal(got.astype(np.float32), expected.float().numpy()), path


def test_a_sparse_tensor_is_refused(backend):
    for at in (PAGEABLE, DEVICE):
        with pytest.raises(SchemaError, match="sparse"):
            backend.adopt({"reward": torch.eye(3).to_sparse()}, at)


def test_a_dtype_that_torch_lacks_stays_on_the_host(backend):
    rows = {"wide": np.ones((4, 2), np.longdouble), "swapped": np.ones((4, 2), ">f4")}
    columns = backend.write(backend.allocate(Schema.infer(rows, "test"), 4, PAGEABLE), 0, on_host(rows))
    assert_rows(
        backend,
        backend.read(columns, index_of(0, 3), list(rows), PAGEABLE),
        {p: a[:2] for p, a in rows.items()},
        "host",
    )
    for path, array in rows.items():
        with pytest.raises(SchemaError, match=f"'{path}' is .*torch can't hold.*cast it"):
            backend.read(columns, index_of(0), [path], DEVICE)
        with pytest.raises(HandOverError, match=f"'{path}' is .*to='numpy'"):
            backend.hand_over(Columns(PAGEABLE, {path: array}, 4), Target("torch"))
