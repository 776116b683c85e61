"""JAX's side of `conduit.backends.exchange`: jax.Arrays to NumPy, and NumPy, DLPack or JAX arrays to jax.Arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from conduit.backends import exchange
from conduit.backends.carving import NARROW_BYTES
from conduit.backends.jax import kernels
from conduit.backends.jax.dtypes import refusal, stored_dtype
from conduit.core.backend import Target
from conduit.errors import HandOverError, SchemaError


def to_numpy(leaf: jax.Array) -> NDArray[Any]:
    """The array's values on the host: read-only, over its own memory when it is there. The host waits for them."""
    if isinstance(leaf, Tracer):
        raise SchemaError(
            "a JAX tracer has no values yet: push outside jit, or return the rows from the jitted function first"
        )
    return np.asarray(leaf)


def fetch(leaf: jax.Array) -> Callable[[], NDArray[Any]]:
    # A copy, because the caller may donate `leaf` before it is waited for.
    copy = jnp.array(leaf, copy=True)
    copy.copy_to_host_async()
    return lambda: np.asarray(copy)


def place(target: Target) -> exchange.DLPackDevice:
    """A sharded batch is assembled from the host, whichever devices it goes to."""
    if target.sharding is not None:
        _checked_sharding(target)
        return exchange.CPU
    device = _wanted(target)
    return (exchange.CUDA, device.local_hardware_id or 0) if device.platform == "gpu" else exchange.CPU


def accept(arrays: Mapping[str, Any], target: Target) -> dict[str, jax.Array]:
    """jax.Arrays on the target's device or sharding. Wide ones on CPU devices alias 64-byte aligned host memory."""
    if target.sharding is None:
        return put(arrays, _wanted(target))
    sharding = _checked_sharding(target)
    own = {path: _importable(path, array) for path, array in arrays.items()}
    split = {path: _leading(sharding, array.ndim) for path, array in own.items()}
    for path, array in own.items():
        try:
            split[path].shard_shape(array.shape)
        except (ValueError, IndexError) as error:
            raise HandOverError(f"{path!r} of shape {array.shape} can't be split as {split[path]}: {error}") from error
    return jax.device_put(own, split)


def _leading(sharding: jax.sharding.Sharding, axes: int) -> jax.sharding.Sharding:
    """What a sharding says of the leading `axes`: of a batch that is split by entries and by time, weights have no time."""
    if isinstance(sharding, jax.sharding.NamedSharding) and len(sharding.spec) > axes:
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[:axes]))
    return sharding


def put(arrays: Mapping[str, Any], device: Any) -> dict[str, jax.Array]:
    """The arrays, which nobody changes any more, on a JAX device."""
    if device.platform != "cpu" or not _undisturbed():
        return jax.device_put({path: _importable(path, array) for path, array in arrays.items()}, device)
    # device_put takes some 20 µs an array in Python, whatever its size: these are two quicker ways for the host's arrays.
    made: dict[str, jax.Array] = {}
    narrow: dict[str, NDArray[Any]] = {}
    for path, array in arrays.items():
        own = _importable(path, array)
        if not isinstance(own, np.ndarray):
            made[path] = own if own.committed and own.devices() == {device} else jax.device_put(own, device)
        elif own.nbytes < NARROW_BYTES:
            narrow[path] = own
        else:
            made[path] = jax.make_array_from_callback(own.shape, _placed(device), lambda _, whole=own: whole)
    if narrow:
        made |= zip(narrow, kernels.copier(device)(*narrow.values()), strict=True)
    return made


def concatenate(parts: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """In one call, which is compiled once for each combination of the parts' lengths."""
    joined = _concatenated([[part[path] for part in parts] for path in parts[0]])
    return dict(zip(parts[0], joined, strict=True))


def widen(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """In one call, which is compiled once for each pair of shapes."""
    return kernels.widen((leaf,), (shape,), (stored_dtype(leaf.dtype),))[0]


@jax.jit
def _concatenated(columns: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    return [jnp.concatenate(pieces) for pieces in columns]


def _undisturbed() -> bool:
    """Whether jit is an ordinary call just now: no setting stops or checks it, no mesh claims it."""
    config: Any = jax.config
    return (
        config.jax_transfer_guard_host_to_device in (None, "allow")
        and not (config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)
        and jax.sharding.get_abstract_mesh().empty
    )


@functools.cache
def _placed(device: Any) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device)


def _importable(path: str, array: Any) -> Any:
    """`array` in a form that device_put takes without changing it: NumPy's or JAX's."""
    # NumPy first: to ask whether it is JAX's takes ten times as long.
    if isinstance(array, np.ndarray):
        reason = refusal(array.dtype)
        if reason is not None:
            raise HandOverError(f"{path!r} is {reason}, or ask for to='numpy'")
        return array
    return array if isinstance(array, jax.Array) else _import_dlpack(path, array)


def _import_dlpack(path: str, array: Any) -> jax.Array:
    # JAX narrows 64-bit DLPack arrays without a word when x64 is off. Other frameworks' dtypes share but the name.
    dtype = str(array.dtype).rpartition(".")[2]
    reason = refusal(np.dtype(dtype)) if dtype in ("int64", "uint64", "float64", "complex128") else None
    if reason is not None:
        raise HandOverError(f"{path!r} is {reason}, or ask for to='numpy' or the framework that made it")
    # Aliased where it is 64-byte aligned, as all that a backend makes is; copied otherwise.
    return jax.dlpack.from_dlpack(array)


def _wanted(target: Target) -> Any:
    device = target.device
    if device is None:
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
        device = jax.local_devices()[0] if default is None else default
    if isinstance(device, jax.Device):
        return device
    if isinstance(device, str):
        platform, _, index = device.partition(":")
        try:
            return jax.local_devices(backend=platform)[int(index or 0)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise HandOverError(
                f"device={device!r} is no JAX device of this machine; there are {jax.local_devices()}"
            ) from error
    raise HandOverError(f"device={device!r} names no JAX device: pass a jax.Device, or a string such as 'cpu:0'")


def _checked_sharding(target: Target) -> jax.sharding.Sharding:
    if target.device is not None:
        raise HandOverError(
            f"a batch goes to a device or to a sharding; got device={target.device!r} and sharding={target.sharding}"
        )
    if not isinstance(target.sharding, jax.sharding.Sharding):
        raise HandOverError(f"sharding={target.sharding!r} is no jax.sharding.Sharding")
    return target.sharding
