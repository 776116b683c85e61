"""Arrays between frameworks: who made an array, its NumPy form, and batches handed over.

Each framework has an exchange module that knows only itself and NumPy or DLPack; this one finds the right module
from an array's type or a target's name, so no framework is imported that isn't in use already or asked for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from conduit.core.backend import Target
from conduit.errors import HandOverError, MissingExtraError, SchemaError

Array = NDArray[Any]

_MODULES = {
    "numpy": "conduit.backends.numpy_exchange",
    "torch": "conduit.backends.torch.exchange",
    "jax": "conduit.backends.jax.exchange",
}
_PACKAGES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}

DLPackDevice = tuple[int, int]
"""DLPack's (device type, device number)."""
CPU: DLPackDevice = (1, 0)
CUDA = 2
"""DLPack's device type of CUDA devices."""


class Exchange(Protocol):
    """What a framework's exchange module offers."""

    def to_numpy(self, leaf: Any) -> Array:
        """`leaf`, which is this framework's, as NumPy: on the host, perhaps sharing memory with it."""
        ...

    def fetch(self, leaf: Any) -> Callable[[], Array]:
        """Starts a copy of `leaf` to the host; the function returned waits for it."""
        ...

    def place(self, target: Target) -> DLPackDevice:
        """Where the target's device is. HandOverError when there is no such device."""
        ...

    def accept(self, arrays: Mapping[str, Any], target: Target) -> dict[str, Any]:
        """The arrays as this framework's own, where `target` wants them."""
        ...

    def concatenate(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This framework's arrays, by path one after the other along the first axis."""
        ...

    def widen(self, leaf: Any, shape: tuple[int, ...]) -> Any:
        """`leaf`, which is this framework's, in an array of this shape, no axis of which is shorter: zero beyond what it had."""
        ...


@runtime_checkable
class SupportsDLPack(Protocol):
    """Arrays of frameworks that we have no module for."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, int]: ...


def framework_of(leaf: object) -> str | None:
    """ "numpy", "torch" or "jax", by where the leaf's class comes from; None for anything else. Imports nothing."""
    for kind in type(leaf).__mro__:
        framework = _PACKAGES.get(kind.__module__.partition(".")[0])
        if framework is not None:
            return framework
    return None


def to_numpy(leaf: Any) -> Array:
    """`leaf` as a NumPy array on the host, dtype unchanged (bfloat16 as ml_dtypes'), gradients left behind.

    It may share memory with `leaf`, and be read-only: copy what must be kept or changed. Device arrays are copied, and
    the host waits. SchemaError for what is no array.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    framework = framework_of(leaf)
    if framework is not None:
        return exchange_of(framework).to_numpy(leaf)
    if not isinstance(leaf, SupportsDLPack):
        raise SchemaError(
            f"got {type(leaf).__name__}, which is no array: expected a NumPy, torch or JAX array (np.asarray makes one)"
        )
    try:
        return np.from_dlpack(cast(Any, leaf))
    except (BufferError, RuntimeError) as error:
        raise SchemaError(
            f"a {type(leaf).__name__} can't be read by DLPack on the host ({error}): copy it to the host first"
        ) from error


def fetch(leaf: Any) -> Callable[[], Array]:
    """Starts a copy of `leaf` to the host and returns a function that waits for it and gives it, as `to_numpy` would.

    Whatever happens to `leaf` afterwards, its values at this call are what arrives. Host arrays are copied at once.
    """
    framework = framework_of(leaf)
    if framework is not None:
        return exchange_of(framework).fetch(leaf)
    copy = np.array(to_numpy(leaf))
    return lambda: copy


def place(target: Target) -> DLPackDevice:
    """Where `target` wants its arrays. HandOverError when it can't be met on this machine."""
    return _for(target).place(target)


def accept(arrays: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """NumPy, torch or JAX arrays as `target` wants them, copied only where they lie on another device."""
    return _for(target).accept(arrays, target)


def concatenate(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arrays of one framework, by path one after the other along the first axis, in memory of their own and where they were. Of one
    part alone, its arrays themselves. All have the same paths, dtypes and further axes, and for each path lie on one device."""
    if len(parts) == 1:
        return dict(parts[0])
    framework = framework_of(next(iter(parts[0].values())))
    assert framework is not None
    return exchange_of(framework).concatenate(parts)


def widen(leaf: Any, shape: tuple[int, ...]) -> Any:
    """A framework's array in one of this shape, no axis of which is shorter, where it was: zero beyond what it had. Itself if none is
    longer."""
    if tuple(leaf.shape) == shape:
        return leaf
    framework = framework_of(leaf)
    assert framework is not None
    return exchange_of(framework).widen(leaf, shape)


@functools.cache
def exchange_of(framework: str) -> Exchange:
    """The framework's exchange module; imports the framework."""
    return cast(Exchange, importlib.import_module(_MODULES[framework]))


def _for(target: Target) -> Exchange:
    if target.framework not in _MODULES:
        raise HandOverError(f"no framework {target.framework!r} to hand over to; there are {', '.join(_MODULES)}")
    if target.sharding is not None and target.framework != "jax":
        raise HandOverError(
            f"a sharding is JAX's, and can't split a batch for {target.framework}: leave it out, or to='jax'"
        )
    try:
        return exchange_of(target.framework)
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"handing over to {target.framework} needs {missing.name}: pip install 'conduit-rl[{target.framework}]'"
        ) from missing


def on_host(leaf: Any) -> bool:
    """Whether `leaf`'s values can be read without waiting for a device."""
    framework = framework_of(leaf)
    if framework is None:
        return not isinstance(leaf, SupportsDLPack) or next(iter(leaf.__dlpack_device__())) == CPU[0]
    return framework == "numpy" or next(iter(leaf.__dlpack_device__())) == CPU[0]
