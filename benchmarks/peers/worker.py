"""One environment's contenders, timed on command. `benchmarks/peers.py` starts it with that environment's interpreter
and talks to it over its pipes, one JSON object a line each way:

    {"do": "offer"}                                   what is installed here, with versions
    {"do": "build", "workload": …, "peers": […]}      makes the contenders of one workload
    {"do": "call", "name": …}                         calls one once untimed and once timed
    {"do": "drop"}                                    forgets the workload's contenders"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from workloads import Contender, Peer, Workload, bytes_of, yardsticks

FILES = ("conduit_torch", "conduit_jax", "torchrl", "cpprb", "flashbax", "sb3", "tianshou", "rllib", "reverb")


class Worker:
    def __init__(self) -> None:
        self._contenders: dict[str, Contender] = {}

    def offer(self) -> dict[str, Any]:
        found = [peer for peer in map(_peer, FILES) if all(map(importlib.util.find_spec, peer.needs))]
        return {
            "peers": {peer.name: {name: _version(name) for name in peer.distributions} for peer in found},
            "python": platform.python_version(),
            "numpy": _version("numpy"),
        }

    def build(self, workload: dict[str, Any], peers: list[str]) -> dict[str, Any]:
        work = Workload(**workload)
        failed: dict[str, str] = {}
        built = yardsticks(work)
        for peer in map(_peer, FILES):
            if peer.name in peers and work.kind in peer.builders:
                try:
                    built += peer.builders[work.kind](work)
                except Exception as error:  # Whatever a peer raises is the answer: the comparison goes on without it.
                    traceback.print_exc()
                    failed[peer.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        told = []
        for each in built:
            try:
                quickest_s, result = _warm(each)
            except Exception as error:
                traceback.print_exc()
                failed[each.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            self._contenders[each.name] = each
            told.append(
                {
                    "name": each.name,
                    "note": each.note,
                    "capacity": each.capacity or work.capacity,
                    "bytes": bytes_of(result),
                    "call_s": quickest_s * each.calls,
                }
            )
        gc.collect()
        gc.freeze()
        return {"contenders": told, "failed": failed, "resident_bytes": _resident_bytes()}

    def call(self, name: str) -> dict[str, float]:
        """Twice: the untimed call brings back what the wait for the command has cooled (caches, clock, scheduler)."""
        contender = self._contenders[name]
        gc.disable()
        try:
            _one_call(contender)
            seconds, _ = _one_call(contender)
        finally:
            gc.enable()
        return {"seconds": seconds}

    def drop(self) -> dict[str, Any]:
        for each in self._contenders.values():
            if each.close is not None:
                each.close()
        self._contenders.clear()
        gc.unfreeze()
        gc.collect()
        return {}


def _warm(contender: Contender) -> tuple[float, Any]:
    """Three calls, which compile what has to be compiled. Returns the quickest's seconds and the last's result."""
    taken, result = [], None
    for _ in range(3):
        seconds, result = _one_call(contender)
        taken.append(seconds)
    return min(taken), result


def _one_call(contender: Contender) -> tuple[float, Any]:
    if contender.before is not None:
        contender.before()
    result = None
    began_s = time.perf_counter()
    for _ in range(contender.calls):
        result = contender.call()
    return (time.perf_counter() - began_s) / contender.calls, result


def _peer(file: str) -> Peer:
    return importlib.import_module(f"peer_{file}").PEER


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "from the checkout" if distribution == "conduit-rl" else "absent"


def _resident_bytes() -> int:
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def main() -> None:
    # Peers print; the pipe is ours alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.append(str(Path(__file__).parents[2]))
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        answer = {"offer": worker.offer, "build": worker.build, "call": worker.call, "drop": worker.drop}[what](
            **command
        )
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
