"""torch's side of `conduit.backends.exchange`: tensors to NumPy, and NumPy, DLPack or torch arrays to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conduit.backends import exchange
from conduit.backends.torch.dtypes import NUMPY_DTYPES, TORCH_DTYPES, from_host, to_host
from conduit.core.backend import Target
from conduit.errors import HandOverError, SchemaError

CPU = torch.device("cpu")


def device_of(device: object) -> torch.device:
    """`device` with the index that tensors on it report: "cpu:0" is "cpu", "cuda" the current CUDA device."""
    named = torch.device(device) if isinstance(device, (str, int)) else device
    if not isinstance(named, torch.device):
        raise TypeError(f"a {type(device).__name__} names no torch device")
    if named.type == "cpu":
        return CPU
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values without its gradient graph or pending conjugation. SchemaError when it is no dense array."""
    if tensor.layout is not torch.strided or tensor.dtype not in NUMPY_DTYPES:
        raise SchemaError(
            f"a {tensor.dtype} tensor of layout {tensor.layout} has no NumPy form: make it dense and cast it"
        )
    return tensor.detach().resolve_conj().resolve_neg()


def to_numpy(leaf: torch.Tensor) -> NDArray[Any]:
    """The tensor's values on the host, over its own memory when it is there; the host waits for a device's."""
    return to_host(plain(leaf).cpu())


def fetch(leaf: torch.Tensor) -> Callable[[], NDArray[Any]]:
    tensor = plain(leaf)
    if not tensor.is_cuda:
        copy = np.array(to_numpy(tensor))
        return lambda: copy
    landed = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # The copy follows in the caller's stream whatever made the tensor, and precedes whatever changes it later.
    with torch.cuda.device(tensor.device):
        landed.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

    def wait() -> NDArray[Any]:
        event.synchronize()
        return to_host(landed)

    return wait


def place(target: Target) -> exchange.DLPackDevice:
    device = _wanted(target)
    return (exchange.CUDA, device.index) if device.type == "cuda" else exchange.CPU


def accept(arrays: Mapping[str, Any], target: Target) -> dict[str, torch.Tensor]:
    """Tensors over the same memory where it is on the target's device already; else copied, in the current stream."""
    device = _wanted(target)
    tensors = {path: _tensor(path, array) for path, array in arrays.items()}
    if device is CPU:
        return {path: tensor if tensor.is_cpu else tensor.cpu() for path, tensor in tensors.items()}
    return {path: tensor.to(device, non_blocking=True) for path, tensor in tensors.items()}


def concatenate(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """On a CUDA device in the current stream."""
    return {path: torch.cat([part[path] for part in parts]) for path in parts[0]}


def widen(leaf: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """On a CUDA device in the current stream."""
    wide = leaf.new_zeros(shape)
    wide[tuple(map(slice, leaf.shape))] = leaf
    return wide


def _tensor(path: str, array: Any) -> torch.Tensor:
    # NumPy first: to ask whether it is a tensor takes longer than all the rest.
    if isinstance(array, np.ndarray):
        if array.dtype not in TORCH_DTYPES:
            raise HandOverError(
                f"{path!r} is {array.dtype}, which torch can't hold: ask for to='numpy', or cast it before it is stored"
            )
        return from_host(array)
    return array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)


def _wanted(target: Target) -> torch.device:
    """The target's device; CPU itself where that is meant."""
    if target.device is None:
        return CPU
    try:
        device = device_of(target.device)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise HandOverError(f"device={target.device!r} is no torch device of this machine: {error}") from error
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise HandOverError(f"device={target.device!r}: torch sees {torch.cuda.device_count()} CUDA devices here")
    if device.type not in ("cpu", "cuda"):
        raise HandOverError(f"device={target.device!r}: batches go to torch's cpu and cuda devices only")
    return device
