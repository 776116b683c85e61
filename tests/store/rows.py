"""Stores and rows for the public API's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import conduit
from conduit.backends import exchange
from conduit.clock import VirtualClock

BACKENDS = ["reference", "torch", "jax"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)

PLACEMENTS: dict[str, list[Any]] = {
    "reference": [
        "auto",
        "pinned",
        "device:1",
        ["device:0", "device:1", "device:2"],
        conduit.Placement(
            (conduit.Endpoint(conduit.Tier.DEVICE, 0), conduit.Endpoint(conduit.Tier.PAGEABLE)), (1.0, 4.0)
        ),
    ],
    "torch": ["auto", "device:0", ["pageable", "device:0"]],
    "jax": [
        "auto",
        "device:0",
        ["device:0", "device:3", "device:7"],
        conduit.Placement(
            (conduit.Endpoint(conduit.Tier.DEVICE, 5), conduit.Endpoint(conduit.Tier.PAGEABLE)), (1.0, 2.5)
        ),
    ],
}
EVERYWHERE = [
    pytest.param(backend, placement, id=f"{backend}-{number}")
    for backend, several in PLACEMENTS.items()
    for number, placement in enumerate(several)
]


def store(**settings: Any) -> conduit.Store:
    """An off-policy store with small defaults; on-policy where `rollout_unit` is given."""
    defaults: dict[str, Any] = {"backend": "reference", "batch_size": 4, "timeout_s": 10.0}
    if "rollout_unit" in settings:
        defaults["mode"] = "on_policy"
    elif "capacity" not in settings:
        defaults["capacity"] = 32
    return conduit.Store(**(defaults | settings))


def step(first: int, lanes: int = 1, **leaves: Any) -> dict[str, Any]:
    """One row a lane, all of whose leaves follow from its number: first, first + 1, …"""
    number = np.arange(first, first + lanes, dtype=np.int32)
    image = (number[:, None, None] + np.arange(6).reshape(2, 3)).astype(np.uint8)
    return {"id": number, "obs": {"image": image, "state": number.astype(np.float32) / 7}, **leaves}


def ends(first: int, lanes: int, terminated: Sequence[int] = (), truncated: Sequence[int] = ()) -> dict[str, Any]:
    lane = np.arange(lanes)
    return step(first, lanes, terminated=np.isin(lane, terminated), truncated=np.isin(lane, truncated))


def fill(actor: conduit.Actor, rows: int, first: int = 0) -> None:
    """Pushes rows first, first + 1, …, `actor.lanes` at a time."""
    for number in range(first, first + rows, actor.lanes):
        actor.push(step(number, actor.lanes))


def host(leaf: Any) -> np.ndarray:
    return exchange.to_numpy(leaf)


def ids(batch: conduit.Batch) -> list[int]:
    return host(batch.data["id"]).tolist()


def assert_intact(batch: conduit.Batch) -> None:
    """Every leaf is what `step` made of the row's number."""
    number = host(batch.data["id"])
    expected = step(0)
    for got, made in ((batch.data["obs"]["image"], "image"), (batch.data["obs"]["state"], "state")):
        array = host(got)
        rows = np.concatenate([step(int(n))["obs"][made] for n in number])
        assert array.dtype == expected["obs"][made].dtype
        assert array.tobytes() == rows.tobytes(), made


def fingerprint(batch: conduit.Batch) -> tuple[Any, ...]:
    """All of a batch, byte for byte, whatever framework holds it."""
    info = batch.info
    arrays = [batch.data["id"], batch.data["obs"]["image"], batch.data["obs"]["state"], info.weight]
    arrays += [info.keys, info.probability, info.priority, info.age, info.policy_version]
    return (
        info.number,
        info.frontier,
        *(part for a in map(host, arrays) for part in (a.dtype.str, a.shape, a.tobytes())),
    )


@contextmanager
def no_thread_left(within_s: float = 1.0) -> Iterator[None]:
    """The block leaves no thread of Conduit's behind."""
    import threading
    import time

    before = set(threading.enumerate())
    yield
    until = time.perf_counter() + within_s
    while left := [t for t in threading.enumerate() if t not in before and t.name.startswith("conduit")]:
        assert time.perf_counter() < until, f"still running: {left}"
        time.sleep(0.005)


def in_order(events: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether `expected` is a subsequence of `events`."""
    left = iter(events)
    return all(event in left for event in expected)


def together(clock: VirtualClock, *works: Callable[[], Any]) -> list[tuple[Any, float]]:
    """What each of `works`, on a thread of its own, returned or raised, and when it was done."""
    out: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        try:
            result = works[place]()
        except Exception as error:
            result = error
        out[place] = (result, clock.now())

    tasks = [clock.spawn(lambda i=i: run(i), f"work-{i}") for i in range(len(works))]
    for task in tasks:
        assert task.join()
    return out


def played(seed: int, scene: Callable[[VirtualClock], Any]) -> Any:
    """`scene`'s result on a virtual clock of its own. A deadlock is an error."""
    clock = VirtualClock(seed)
    return clock.run(lambda: scene(clock))
