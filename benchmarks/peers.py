"""Conduit and its peers side by side in one run. Measured on this CPU.

    python benchmarks/peers.py --make-envs DIR        installs the peers, prints the --env options (minutes, about 5 GB)
    python benchmarks/peers.py --env flock=DIR/flock/bin/python --env rllib=… --env reverb=…
                               [--only TEXT …] [--rounds 300] [--quick] [--threads N]

The peers' releases clash, and what one leaves behind in a process (threads that go on spinning, caches) costs another, so
each peer has a worker process of its own (`peers/worker.py`) in its environment, which holds its contenders, a limit and a
naive ring, and times one call on command. A round calls every contender of every worker once, in an order
that changes each round: what slows the machine down for a while slows all of them. Contenders that take more than 20 ms
join every tenth round. Ratios are to the limit of the same worker in the same round.

The limit of a draw is `np.take(out=preallocated, mode="clip")` of each field with the indices drawn beforehand; of a
push, slice assignment of the same rows. A peer that no environment has is skipped. `--threads`: how many OpenMP gives
torch; all cores by default, which is slow beyond measure when others use the machine. `--quick` caps stores at 100,000
rows and takes 20 rounds. `--only` takes the workloads whose names contain the text. Without peers or with `--only`
nothing is saved."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from measure import machine, save
from peers.environments import make
from peers.workloads import LIMIT, RING, WORKLOADS, Workload

PEERS = ("conduit-torch", "conduit-jax", "torchrl", "cpprb", "flashbax", "sb3", "tianshou", "rllib", "reverb")
SLOW_S, SLOW_EVERY = 0.02, 10
QUICK_ROUNDS, QUICK_ROWS = 20, 100_000


class WorkerGoneError(Exception):
    """A worker's process ended; the message has the end of what it printed."""


class Worker:
    """One environment's process."""

    def __init__(self, name: str, python: str, threads: int | None) -> None:
        self.name, self._python = name, python
        self._environ = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        self.peers: list[str] = []
        self.start()

    def start(self) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [self._python, str(Path(__file__).parent / "peers" / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            env=self._environ,
        )

    def tell(self, do: str, **what: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerGoneError(self._last_words()) from None

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerGoneError(self._last_words())
        return json.loads(line)

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        self.tell(do, **what)
        return self.hear()

    def printed(self) -> str:
        self._printed.seek(0)
        return self._printed.read().decode(errors="replace")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        return f"{self.name}: exit {self._process.wait()}: {self.printed()[-1500:]}"


@dataclass
class Running:
    """A contender of one workload while it is measured."""

    worker: Worker
    name: str
    note: str
    capacity: int
    bytes: int
    every: int
    seconds: dict[int, float] = field(default_factory=dict)
    """By round."""


def compare(work: Workload, workers: list[Worker], rounds: int) -> dict[str, Any]:
    running, failed, resident = build(work, workers)
    shuffle = random.Random(work.name)
    for number in range(rounds):
        turn = [each for each in running if number % each.every == 0]
        shuffle.shuffle(turn)
        for each in turn:
            if each.worker.name in failed:
                continue
            try:
                each.seconds[number] = each.worker.ask("call", name=each.name)["seconds"]
            except WorkerGoneError as error:
                failed[each.worker.name] = str(error)
    for worker in workers:
        try:
            worker.ask("drop")
        except WorkerGoneError:
            worker.start()
    figures = {}
    for each in running:
        (limit,) = (other for other in running if other.worker is each.worker and other.name == LIMIT)
        if each.seconds:
            shared = each.name in (LIMIT, RING)
            figures[f"{each.name} [{each.worker.name}]" if shared else each.name] = summarise(work, each, limit)
    ordered = dict(sorted(figures.items(), key=lambda item: item[1]["ratio"]))
    return {"rows": work.capacity, "resident_bytes": resident, "contenders": ordered, "failed": failed}


def build(work: Workload, workers: list[Worker]) -> tuple[list[Running], dict[str, str], dict[str, int]]:
    """All workers at once. Returns the contenders, why others are missing, and each worker's memory."""
    running: list[Running] = []
    failed: dict[str, str] = {}
    resident: dict[str, int] = {}
    for worker in workers:
        try:
            worker.tell("build", workload=asdict(work), peers=worker.peers)
        except WorkerGoneError as error:
            failed[worker.name] = str(error)
    for worker in workers:
        if worker.name in failed:
            continue
        try:
            built = worker.hear()
        except WorkerGoneError as error:
            failed[worker.name] = str(error)
            continue
        failed |= built["failed"]
        resident[worker.name] = built["resident_bytes"]
        for each in built["contenders"]:
            every = SLOW_EVERY if each.pop("call_s") > SLOW_S else 1
            running.append(Running(worker=worker, every=every, **each))
    return running, failed, resident


def summarise(work: Workload, each: Running, limit: Running) -> dict[str, Any]:
    taken = list(each.seconds.values())
    ratios = [seconds / limit.seconds[number] for number, seconds in each.seconds.items() if number in limit.seconds]
    p99_s = statistics.quantiles(taken, n=100, method="inclusive")[98] if len(taken) > 1 else taken[0]
    notes = [each.note] if each.note else []
    if each.capacity != work.capacity:
        notes.append(f"{each.capacity:,} rows")
    drawn = not work.kind.startswith("push")
    if drawn and each.bytes and abs(each.bytes / limit.bytes - 1) > 0.02:
        notes.append(f"returns {each.bytes / limit.bytes:.2f} × the bytes")
    return {
        "environment": each.worker.name,
        "median_us": round(1e6 * statistics.median(taken), 2),
        "p99_us": round(1e6 * p99_s, 2),
        "ratio": round(statistics.median(ratios), 2),
        "calls": len(taken),
        "note": "; ".join(notes),
    }


def show(work: Workload, figures: Mapping[str, Any]) -> None:
    most = max(figures["resident_bytes"].values(), default=0)
    print(f"\n{work.name}   ({work.capacity:,} rows; largest worker {most / 2**30:.1f} GiB)")
    width = max(map(len, figures["contenders"]), default=0)
    for name, each in figures["contenders"].items():
        times = f"{each['median_us']:12.1f} µs  p99 {each['p99_us']:12.1f}  × {each['ratio']:<8.2f}"
        print(f"  {name:{width}} {times} {each['note']}".rstrip())
    for name, why in figures["failed"].items():
        print(f"  {name:{width}} failed: {why}")
    sys.stdout.flush()


def hire(environments: Mapping[str, str], threads: int | None) -> tuple[list[Worker], dict[str, Any], list[str]]:
    """Starts the workers. A peer that several environments have belongs to the first. Returns the workers, what each
    offers, and the peers that nobody has."""
    asked = [Worker(name, python, threads) for name, python in environments.items()]
    workers: list[Worker] = []
    offers: dict[str, Any] = {}
    missing: list[str] = list(PEERS)
    for each in asked:
        each.tell("offer")
    for each in asked:
        offer = each.hear()
        each.stop()
        own = [peer for peer in missing if peer in offer["peers"]]
        missing = [peer for peer in missing if peer not in own]
        offers[each.name] = {**offer, "peers": {peer: offer["peers"][peer] for peer in own}}
        for peer in own:
            worker = Worker(peer, environments[each.name], threads)
            worker.peers = [peer]
            workers.append(worker)
    return workers, offers, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make-envs", metavar="DIR", type=Path)
    parser.add_argument("--env", metavar="NAME=PYTHON", action="append", default=[])
    parser.add_argument("--only", metavar="TEXT", action="append", default=[])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    if asked.make_envs:
        print(*make(asked.make_envs.resolve()), sep=" \\\n")
        return
    rounds = asked.rounds or (QUICK_ROUNDS if asked.quick else 300)
    selected = [work for work in WORKLOADS if not asked.only or any(text in work.name for text in asked.only)]
    if asked.quick:
        selected = [replace(work, capacity=min(work.capacity, QUICK_ROWS)) for work in selected]
    if not selected:
        parser.error(f"--only {asked.only}: the workloads are {[work.name for work in WORKLOADS]}")
    # Conduit runs where this runs.
    environments = {"here": sys.executable, **dict(each.split("=", 1) for each in asked.env)}
    workers, offers, missing = hire(environments, asked.threads)
    for name, offer in offers.items():
        print(f"{name}: python {offer['python']}, numpy {offer['numpy']}, {offer['peers']}")
    for peer in missing:
        print(f"{peer}: skipped, no environment has it (see --make-envs)")
    before = machine()
    figures: dict[str, Any] = {}
    try:
        for work in selected:
            figures[work.name] = compare(work, workers, rounds)
            show(work, figures[work.name])
    finally:
        for worker in workers:
            worker.stop()
    if asked.env and not asked.only:
        told = "measured on this CPU; ratios to the limit of the same worker in the same round"
        run = {
            "figures": told,
            "rounds": rounds,
            "quick": asked.quick,
            "threads": asked.threads,
            "load_before": before["load"],
        }
        print(save("peers", {**run, "environments": offers, "skipped": missing, "workloads": figures}))


if __name__ == "__main__":
    main()
