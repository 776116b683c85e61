"""The Store: the only place where the parts are wired together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from numbers import Integral
from types import TracebackType
from typing import Any, Literal, Self

from conduit import backends
from conduit.backends import exchange
from conduit.clock import Clock, RealClock, Task
from conduit.core.backend import Backend, Target
from conduit.core.batch import Batch
from conduit.core.buffer import ExperienceBuffer
from conduit.core.chain import IngestionChain
from conduit.core.delivery import Delivery
from conduit.core.derived import Derived
from conduit.core.halt import Halt, check_timeout
from conduit.core.hook import Hook, check_chain
from conduit.core.ingestion import Ingestion
from conduit.core.items import Item, Row
from conduit.core.ledger import Ledger
from conduit.core.order import Order
from conduit.core.placement import Bytes, Placement, parse_budgets
from conduit.core.priorities import Priorities, PriorityUpdate
from conduit.core.recipe import Recipe
from conduit.core.rollout import ActorLanes, OffPolicyRollout, OnPolicyRollout, WhenFull
from conduit.core.sampling import DrawStream, Sampling
from conduit.core.semantics import Numbering, OffPolicy, OnPolicy, Schedule, Semantics, check_whole, semantics_of
from conduit.core.signature import Signature
from conduit.core.staging import Inbox, Outbox
from conduit.errors import CapacityError, ClosedError, PriorityError, SettingError, WaitTimeout
from conduit.ports import Actor, Learner, PathIn, PathOut
from conduit.topology.endpoint import Endpoint

CLOSING_S = 1.0
"""How long `close()` waits for the operators' threads."""

_ON_DEMAND = 1
"""The stream of draws that `sample` uses, apart from the learners' batches."""


class Store:
    """Holds experience between actors and learners.

    - `backend`: "torch", "jax", "reference", or a Backend of your own.
    - `mode`: "off_policy" needs `capacity`, in rows, and takes a `sampler` (`Uniform()` by default); "on_policy" needs
      `rollout_unit`, the rows of an iteration (steps × lanes, over all actors), and takes `epochs` (1). `batch_size`: rows of a
      batch, for each learner. `seed`: of all draws.
    - `item`: what one entry of a batch is: `Row()`, `NStep`, `Sequence` or `Trajectory`, started at a drawn row. `derive`: leaves
      made as batches are read, {"next_obs": Next("obs")}. Off-policy.
    - `ingestion`, `delivery`: hooks, in the order in which they run (paper Fig. 8).
    - `placement`: "auto" (pageable host), an endpoint or several with equal shares, by name ("pageable", "device:3"), or a
      `Placement` with shares. `budgets`: bytes by tier, {"pageable": "24GiB"}, a device's for each device.
    - `schedule`: None runs everything in line. `exact`: every batch is drawn at its pull, after the latest priorities.
    - `inbox_units`: how many pushes may wait for an overlapped ingestion (64, or 4 · g_ing if that is more); `when_full`:
      whether one more blocks or is dropped and counted.
    - `timeout_s`: of every wait that isn't given its own; `math.inf` waits for ever. `clock`: the real one by default.

    SettingError, ScheduleError, UnitError or CapacityError name a setting that can't be, UnknownBackendError or
    MissingExtraError a backend that isn't there. Memory is taken with the first rows that are stored: CapacityError then. Only
    the finals that a `Next` needs take more as there are more of them, one for each live row that ended with one. Memory of
    large batches that is used again, up to 1 GiB, is in no budget.

    All methods may be called from several threads. What a hook or an operator fails with stops the store for good: it is
    raised by the next call of each port. Use the store as a context manager, or close it."""

    def __init__(
        self,
        *,
        backend: str | Backend[Any] = "torch",
        mode: Literal["off_policy", "on_policy"] = "off_policy",
        batch_size: int,
        capacity: int | None = None,
        rollout_unit: int | None = None,
        epochs: int | None = None,
        sampler: Sampling | None = None,
        item: Item | None = None,
        derive: Mapping[str, Derived] | None = None,
        seed: int = 0,
        ingestion: Sequence[Hook] = (),
        delivery: Sequence[Hook] = (),
        placement: str | Endpoint | Placement | Sequence[str | Endpoint] = "auto",
        budgets: Mapping[str, Bytes] | None = None,
        schedule: Schedule | None = None,
        exact: bool = False,
        inbox_units: int | None = None,
        when_full: WhenFull = "block",
        timeout_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        _check_settings(sampler, seed, timeout_s)
        self._backend = backends.load(backend)
        recipe = Recipe(Row() if item is None else item, {} if derive is None else derive)
        self._semantics = semantics_of(mode, capacity, batch_size, rollout_unit, epochs, sampler, exact)
        if isinstance(self._semantics, OnPolicy) and not recipe.trivial:
            raise SettingError(
                "item and derive are off-policy settings: an on-policy iteration delivers each of its rows as it was pushed"
            )
        recipe.check_fits(self._semantics.capacity)
        self._schedule = self._semantics.resolve(schedule)
        self._delivery_hooks = check_chain(delivery, "delivery")
        self._timeout_s = timeout_s
        self._seed = seed
        self._clock = clock or RealClock()
        self._halt = Halt(self._clock)
        self._ledger = Ledger(self._clock)
        self._halt.tell_waited = self._ledger.waited
        self._order = Order(self._halt)
        self._placement = Placement.of(placement, self._backend.endpoints())
        self._buffer = ExperienceBuffer(
            self._backend, self._semantics.capacity, self._placement, parse_budgets(budgets), self._halt, recipe
        )
        self._sampler = self._semantics.sampling.start(self._semantics.capacity, seed, self._buffer.starts)
        self._choices = DrawStream(seed)
        chain = IngestionChain(
            check_chain(ingestion, "ingestion"), isinstance(self._semantics, OnPolicy), recipe.final_sources()
        )
        self._rollout, inbox = self._intake(chain.needs_edges or not recipe.trivial, inbox_units, when_full)
        self._ingestion = Ingestion(
            chain=chain,
            inbox=inbox,
            rollout=self._rollout,
            buffer=self._buffer,
            sampler=self._sampler,
            order=self._order,
            halt=self._halt,
            ledger=self._ledger,
            overlap=self._schedule.overlap_ing,
        )
        # Where a push is written before it returns, into memory that is written at once, its arrays need no copy before.
        written_at_once = (
            isinstance(self._semantics, OffPolicy)
            and not ingestion
            and not self._schedule.overlap_ing
            and self._schedule.g_ing == 1
            and all(endpoint.is_host for endpoint in self._placement.endpoints)
        )
        self._signature = Signature(
            exchange.to_numpy,
            self._semantics.sampling.prioritized,
            self._sampler.highest_priority,
            copies=not written_at_once,
            finals_of=recipe.final_sources(),
        )
        self._ports = self._halt.condition("ports")
        self._actor_count = self._lane_count = self._on_demand = 0
        self._free_lanes: dict[int, list[range]] = {}
        """Lanes of actors that were closed, by how many."""
        self._learners: dict[int, Learner] = {}
        self._on_demand_paths: dict[Target, PathOut] = {}
        self._priorities = Priorities(exchange, self._order, self._buffer, self._sampler)
        self._tasks: list[Task] = []
        # Operators' threads hold the parts, not the store: a store that nobody refers to any more is closed.
        self._finalizer = weakref.finalize(self, _halt_quietly, self._halt)
        self._finalizer.atexit = False
        if self._schedule.overlap_ing:
            self._tasks.append(self._clock.spawn(self._ingestion.run, "conduit-ingestion"))

    # Ports

    def actor(self, lanes: int = 1) -> Actor:
        """A new producer with `lanes` lanes."""
        check_whole("actor(lanes=…)", lanes)
        self._halt.check()
        with self._ports:
            free = self._free_lanes.get(lanes)
            numbers = free.pop() if free else range(self._lane_count, self._lane_count + lanes)
            self._lane_count = max(self._lane_count, numbers.stop)
            self._actor_count += 1
            who = ActorLanes(self._actor_count - 1, numbers)
            self._rollout.join(who)
        path = PathIn(
            self._halt, self._ledger, self._signature, self._rollout, self._ingestion, self._timeout_s, self, self._free
        )
        return Actor(path, who)

    def learner(
        self, rank: int = 0, world: int = 1, *, to: str | None = None, device: Any = None, sharding: Any = None
    ) -> Learner:
        """Learner `rank` of `world`, each made once. Batches come `to` "numpy", "torch" or "jax" (by default as the backend's
        own), on `device`, or for JAX split by `sharding` into one global array: a leaf with fewer axes by the sharding's first ones."""
        self._halt.check()
        target = Target(to or self._backend.framework, device, sharding)
        self._backend.landing(target)
        with self._ports:
            self._check_place(rank, world)
            numbering = self._semantics.numbering(rank, world, self._schedule)
            path = self._path_out(target, numbering, f"outbox of learner {rank}")
            first = (numbering.per_iteration or 0) * self._rollout.version
            learner = self._learners[rank] = Learner(path, rank, world, target, first)
            if self._schedule.overlap_del:
                self._tasks.append(self._clock.spawn(path.delivery.run, f"conduit-delivery-{rank}"))
        return learner

    def sample(
        self,
        rows: int,
        *,
        to: str | None = None,
        device: Any = None,
        sharding: Any = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """A batch of `rows` rows on demand, drawn now. It disturbs no learner's batches. Off-policy only."""
        if isinstance(self._semantics, OnPolicy):
            raise SettingError(
                "sample() draws off-policy; an on-policy store delivers each row exactly `epochs` times through learner.pull()"
            )
        check_whole("sample(rows)", rows)
        if rows > self._buffer.capacity:
            raise CapacityError(f"sample({rows}): the store holds {self._buffer.capacity} rows at most")
        target = Target(to or self._backend.framework, device, sharding)
        self._backend.landing(target)
        with self._ports:
            number, self._on_demand = self._on_demand, self._on_demand + 1
            path = self._on_demand_paths.get(target)
            if path is None:
                path = self._path_out(target, Numbering(0, 1, 1, None), "outbox on demand")
                self._on_demand_paths[target] = path
        asker = Learner(replace(path, batch_size=rows, overlap=False, stream=_ON_DEMAND), 0, 1, target, number)
        try:
            return asker.pull(timeout_s=timeout_s)
        except WaitTimeout:
            # Asked again, the same batch: unless somebody has asked for the next meanwhile.
            with self._ports:
                if self._on_demand == number + 1:
                    self._on_demand = number
            raise

    # What the trainer tells the store

    def update_priorities(self, keys: Any, priorities: Any) -> PriorityUpdate:
        """Sets the raw priorities of rows `keys` (insertion numbers from `batch.info.keys`); eps is added. Arrays of any
        framework, on any device; what is on a device is copied while the caller goes on. It is known to every draw that is
        asked for later, and to none before.

        Keys of evicted rows are stale and change nothing. PriorityError for NaN, infinite or negative priorities, naming the
        key; UnknownKeyError for keys that were never issued; neither changes anything."""
        with self._ledger.port("priorities"):
            self._halt.check()
            if not self._semantics.sampling.prioritized:
                raise PriorityError(
                    "update_priorities: the store's sampler has no priorities; use sampler=conduit.Prioritized()"
                )
            return self._priorities.update(keys, priorities)

    def advance(self) -> int:
        """On-policy: ends the iteration, drops its rows and what is staged of it, and returns the new version. UnitError
        unless its rows were all pushed. Off-policy: counts the version of rows pushed from here on."""
        with self._ledger.port("advance"):
            self._halt.check()
            if not isinstance(self._semantics, OnPolicy) or not isinstance(self._rollout, OnPolicyRollout):
                return self._rollout.advance()
            turn = self._order.enter()
            with (
                self._order.serve(turn, self._deadline(None), lambda: "rows that were pushed are still being ingested"),
                # So that a learner that is made now begins with the new iteration.
                self._ports,
            ):
                # In the turn, so that of two threads that advance at once one is refused.
                self._rollout.check_whole()
                for learner in self._learners.values():
                    learner.skip_to_iteration(self._rollout.version + 1)
                self._buffer.drop()
                version = self._rollout.advance()
        self._ledger.end_iteration()
        return version

    def rollout(self) -> AbstractContextManager[object]:
        """Marks the block as rollout in the ledger."""
        return self._ledger.mark("rollout")

    def update(self) -> AbstractContextManager[object]:
        """Marks the block as learner update in the ledger."""
        return self._ledger.mark("update")

    # What the store tells

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def version(self) -> int:
        """The policy version whose rows are being taken; 0 at first."""
        return self._rollout.version

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    def __len__(self) -> int:
        """How many rows are live: ingested and not evicted."""
        return len(self._buffer.window)

    def info(self) -> dict[str, Any]:
        """Counters and settings, as plain values."""
        window, schema, starts = self._buffer.window, self._buffer.schema, self._buffer.starts
        return {
            "backend": self._backend.name,
            "mode": "on_policy" if isinstance(self._semantics, OnPolicy) else "off_policy",
            "rows": len(window),
            "capacity": self._buffer.capacity,
            "drawable_rows": len(window) if starts is None else starts.count,
            "inserted": window.stop,
            "dropped_rows": self._rollout.dropped_rows,
            "version": self.version,
            "row_bytes": schema.row_bytes if schema else None,
            "schema": str(schema) if schema else None,
            "bytes_by_endpoint": self._buffer.bytes_by_endpoint(),
            "priorities": {"applied": self._priorities.applied, "stale": self._priorities.stale},
            "staged_batches": {rank: learner.staged for rank, learner in self._learners.items()},
            "schedule": asdict(self._schedule),
        }

    # Life

    def close(self) -> None:
        """Ends every thread and wait, and releases the rows. Batches that were handed over stay. May be called twice."""
        self._halt.now_because(ClosedError("the store is closed"))
        self._ledger.stop()
        deadline_s = self._clock.now() + CLOSING_S
        ended = [task.join(deadline_s) for task in self._tasks]
        self._tasks = []
        self._finalizer.detach()
        if all(ended):
            self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _intake(
        self, needs_edges: bool, inbox_units: int | None, when_full: WhenFull
    ) -> tuple[OffPolicyRollout | OnPolicyRollout, Inbox]:
        schedule, semantics = self._schedule, self._semantics
        if when_full not in ("block", "drop"):
            raise SettingError(f"when_full={when_full!r}: expected 'block' or 'drop'")
        if isinstance(semantics, OnPolicy):
            if when_full == "drop" or inbox_units is not None:
                raise SettingError(
                    "inbox_units and when_full are off-policy: an on-policy inbox is bounded by the iteration and drops nothing"
                )
            inbox = Inbox(self._halt, self._order, in_line=not schedule.overlap_ing, hold_back=False)
            rows = semantics.rows_per_ingestion(schedule)
            return OnPolicyRollout(self._halt, inbox, semantics.rollout_unit, rows, needs_edges), inbox
        inbox = Inbox(self._halt, self._order, in_line=not schedule.overlap_ing, hold_back=schedule.overlap_ing)
        units = semantics.units_per_ingestion(schedule)
        limit = max(64, 4 * units) if inbox_units is None else inbox_units
        return OffPolicyRollout(self._halt, inbox, units, limit, when_full, needs_edges), inbox

    def _free(self, lanes: range) -> None:
        """An actor is closed: its lanes are cut before whatever is pushed from now on, so another may have them."""
        with self._ports:
            self._free_lanes.setdefault(len(lanes), []).append(lanes)

    def _path_out(self, target: Target, numbering: Numbering, outbox: str) -> PathOut:
        delivery = Delivery(
            hooks=self._delivery_hooks,
            backend=self._backend,
            buffer=self._buffer,
            sampler=self._sampler,
            order=self._order,
            halt=self._halt,
            ledger=self._ledger,
            target=target,
            choices=self._choices,
            in_line=not self._schedule.overlap_del,
        )
        return PathOut(
            halt=self._halt,
            ledger=self._ledger,
            order=self._order,
            ingestion=self._ingestion,
            delivery=delivery,
            outbox=Outbox(self._halt, outbox),
            numbering=numbering,
            batch_size=self._semantics.batch_size,
            overlap=self._schedule.overlap_del,
            timeout_s=self._timeout_s,
            turnstile=self._halt.condition(f"{outbox}'s pulls"),
            owner=self,
            version=lambda: self._rollout.version,
            explain=lambda number: _explain(self._rollout, self._semantics, number),
        )

    def _check_place(self, rank: int, world: int) -> None:
        check_whole("learner(world=…)", world)
        if not isinstance(rank, Integral) or not 0 <= rank < world:
            raise SettingError(f"learner(rank={rank}, world={world}): expected 0 ≤ rank < world")
        if rank in self._learners:
            raise SettingError(f"learner rank {rank} exists already; keep it, or give the other a rank of its own")
        for other in self._learners.values():
            if other.world != world:
                raise SettingError(
                    f"learner(world={world}): rank {other.rank} was made with world={other.world}; expected the same"
                )

    def _deadline(self, timeout_s: float | None) -> float:
        return self._halt.deadline_s(self._timeout_s if timeout_s is None else timeout_s)


def _check_settings(sampler: object, seed: object, timeout_s: object) -> None:
    if sampler is not None and (isinstance(sampler, type) or not isinstance(sampler, Sampling)):
        raise SettingError(
            f"sampler={sampler!r}: expected a sampler such as conduit.Uniform() or conduit.Prioritized()"
        )
    if not isinstance(seed, Integral) or int(seed) < 0:
        raise SettingError(f"seed={seed!r}: expected a whole number ≥ 0")
    check_timeout(timeout_s)


def _explain(rollout: OffPolicyRollout | OnPolicyRollout, semantics: Semantics, number: int) -> str:
    """What the running iteration lacks, if it is batch `number`'s."""
    if not isinstance(rollout, OnPolicyRollout) or not isinstance(semantics, OnPolicy):
        return ""
    return rollout.why_open() if number // semantics.batches == rollout.version else ""


def _halt_quietly(halt: Halt) -> None:
    # On a thread of its own: the garbage collector may be running on one that holds a condition right now.
    reason = ClosedError("the store was dropped without close()")
    threading.Thread(target=halt.now_because, args=(reason,), name="conduit-closing", daemon=True).start()
