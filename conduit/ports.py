"""The store's two ports: actors push into one, learners pull from the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from conduit.clock import Condition
from conduit.core.backend import Target
from conduit.core.batch import Batch
from conduit.core.delivery import Delivery, Request
from conduit.core.episodes import End, Rows, Step
from conduit.core.experience import Schema, Tree, map_leaves
from conduit.core.halt import Halt, Waiters, check_timeout
from conduit.core.ingestion import Ingestion
from conduit.core.ledger import Ledger, PortCall
from conduit.core.order import Order, Turn
from conduit.core.plain import is_plain
from conduit.core.rollout import ActorLanes, Rollout
from conduit.core.schedule import Numbering
from conduit.core.signature import Signature
from conduit.core.staging import Outbox, Staged
from conduit.errors import CancelledError, ClosedError, HandOverError, SchemaError, WaitTimeout


@dataclass(frozen=True, slots=True)
class PathIn:
    """What actors push into."""

    halt: Halt
    ledger: Ledger
    signature: Signature
    rollout: Rollout
    ingestion: Ingestion
    timeout_s: float
    owner: object
    """The store, which stays open while one of its ports is in use."""
    free: Callable[[range], None]
    """Is told the lanes of an actor that left."""


class Actor:
    """One producer with `lanes` lanes, each a stream of consecutive rows of one environment (or environment × agent)."""

    def __init__(self, path: PathIn, lanes: ActorLanes) -> None:
        self._path = path
        self._lanes = lanes
        self._steps = path.signature.steps(lanes.lanes)
        self._closed = self._left = False

    @property
    def lanes(self) -> int:
        return len(self._lanes.lanes)

    def push(
        self,
        step: Step | Tree,
        *,
        final: Mapping[str, Tree] | None = None,
        valid: NDArray[np.bool_] | None = None,
        priority: Any = None,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Takes one step of all lanes and returns how many rows it took; the arrays may be reused at once.

        `step`: leaves (lanes, *shape), observations from *before* the action; or a `Step`, which brings `final` and `valid`
        along. Leaves `terminated` and `truncated` say which lanes ended. `final`: the last observation (and value) of the
        lanes that ended, leaves (ended lanes, *shape) in lane order; a truncated lane without one is cut: nothing is ever
        bootstrapped from it. Lanes with `valid` False write nothing. `priority`: (lanes,) raw priorities, 0 disables a row.
        `version`: the policy version that acted; by default the store's as of the call, however long that waits.

        In mode "bounded", rows that go stale while they wait for room are left out, and counted in `info()["stale_rows"]`: 0 is
        returned, and the actor goes on. Where that happens often, more rows wait than the staleness allows: as a rule of thumb,
        capacity ≲ (max_staleness + 1) × rows per version. FreshnessError is for those that are stale, or of a version to come, already
        at the call.

        Raises SchemaError, PriorityError, FreshnessError or UnitError for rows that don't fit, WaitTimeout when the store
        couldn't take them in `timeout_s` (by default the store's), and what stopped the store if it has stopped."""
        if isinstance(step, Step):
            if final is not None or valid is not None:
                raise SchemaError(
                    "push: a Step brings its own final and valid; expected them there, not as arguments as well"
                )
            step, final, valid = step.rows, step.final, step.valid
        path = self._path
        # Not a with block: it would take longer than much of what it counts.
        call = path.ledger.port("push")
        try:
            self._check_open()
            rows = path.signature.step(step, final, valid, priority, self._steps)
            return self._put(rows, version, timeout_s, call)
        finally:
            call.end()

    def push_trajectory(
        self,
        rows: Tree,
        *,
        end: str | End | None = None,
        final: Mapping[str, Tree] | None = None,
        lane: int = 0,
        priority: Any = None,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Takes consecutive rows of one lane, leaves (length, *shape), and returns how many it took: all, or none as `push` does.

        `end`: how the last one ends: "open", "terminated", "truncated" or "cut"; by default as its leaves `terminated` and
        `truncated` say, "open" without such leaves. `final`: the observation (and value) after the last row, leaves (*shape)."""
        with self._path.ledger.port("push") as call:
            self._check_open()
            if not isinstance(lane, Integral) or isinstance(lane, bool) or not 0 <= lane < self.lanes:
                raise SchemaError(f"push_trajectory: lane {lane!r}; this actor has lanes 0 to {self.lanes - 1}")
            taken = self._path.signature.trajectory(rows, end, final, priority, self._lanes.lanes[int(lane)])
            return self._put(taken, version, timeout_s, call)

    def end_unit(self, *, bootstrap: Mapping[str, Tree] | None = None) -> None:
        """On-policy: this actor's rows of the iteration are all pushed. `bootstrap`: what is known of the observations after
        the last rows, leaves (lanes, *shape), such as {"value": critic(obs)}; used for lanes that are still open.
        UnitError when the iteration is short."""
        with self._path.ledger.port("push"):
            self._check_open()
            known = self._path.signature.bootstrap(bootstrap, self.lanes)
            self._path.rollout.end_unit(self._lanes, known, self._deadline())
            self._path.ingestion.catch_up()

    def cancel(self) -> int:
        """Ends the pushes of this actor that wait for room, or for a limiter, with CancelledError: nothing of them was taken. Returns
        how many. Called from another thread."""
        return self._lanes.waiters.cancel()

    def close(self) -> None:
        """The actor leaves: its open lanes are cut. Pushed rows stay."""
        self._closed = True
        if not self._left and self._path.halt.reason is None:
            self._path.rollout.leave(self._lanes, self._deadline())
            self._left = True
            self._path.ingestion.catch_up()
            self._path.free(self._lanes.lanes)

    def _put(self, rows: Rows, version: int | None, timeout_s: float | None, call: PortCall) -> int:
        count, path = len(rows), self._path
        if not count:
            return 0
        if (recorder := path.ledger.recorder) is not None:
            rows.push = recorder.pushed(rows.data, count)
        deadline_s = call.began_s + (path.timeout_s if timeout_s is None else check_timeout(timeout_s))
        if path.signature.knows(rows):
            return count if self._take(rows, version, deadline_s, call) else 0
        with path.rollout.widening(self._lanes, version, deadline_s, call):
            left_s = max(0.0, deadline_s - path.halt.clock.now())
            with path.signature.fixed_by(rows, left_s) as taking:
                taking.is_taken = self._take(rows, version, deadline_s, call)
        return count if taking.is_taken else 0

    def _take(self, rows: Rows, version: int | None, deadline_s: float, call: PortCall) -> bool:
        path = self._path
        try:
            taken = path.rollout.put(self._lanes, rows, version, deadline_s, call)
            call.took = int(taken)
            path.ingestion.catch_up()
        except BaseException as error:
            path.ingestion.interrupted(error)
            raise
        return taken

    def _check_open(self) -> None:
        if self._path.halt.reason is not None:
            self._path.halt.check()
        if self._closed:
            raise ClosedError("this actor is closed; open another with store.actor()")

    def _deadline(self) -> float:
        return self._path.halt.deadline_s(self._path.timeout_s)


@dataclass(frozen=True, slots=True)
class PathOut:
    """What a learner pulls from."""

    halt: Halt
    ledger: Ledger
    order: Order
    ingestion: Ingestion
    delivery: Delivery
    outbox: Outbox
    batch_size: int
    timeout_s: float
    turnstile: Condition
    """Guards what the learners of this path remember."""
    owner: object
    version: Callable[[], int]
    explain: Callable[[int], str]
    """What the rollout side lacks for a batch, for a timeout's message."""
    stream: int = 0
    """0: the learners' numbered batches. Other streams are drawn on demand and end no iteration."""


class Learner:
    """One consumer: global batches `rank`, `rank + world`, … by number, whenever it asks for them. Threads that pull from one
    learner get successive batches, one after the other."""

    def __init__(
        self, path: PathOut, numbering: Numbering, behind: bool, rank: int, world: int, target: Target, index: int = 0
    ) -> None:
        """`numbering`: which batches are its, and which are prepared together; `behind`: by the operator's thread, ahead of its pulls."""
        self.rank, self.world, self.target = rank, world, target
        self._path = path
        self._numbering, self._behind = numbering, behind
        self._wanted: tuple[Numbering, bool] | None = None
        self._since = index
        """The first batch that is prepared so."""
        self._index = index
        self._requests: dict[int, Request] = {}
        self._puller: PortCall | None = None
        self._waiters = Waiters(path.halt)

    def pull(self, *, timeout_s: float | None = None) -> Batch:
        """The learner's next batch, in memory that belongs to the caller.

        Raises WaitTimeout, saying what is missing, when it can't be served in `timeout_s` (by default the store's); the next
        pull asks for the same batch. Raises what stopped the store if it has stopped."""
        path = self._path
        call = path.ledger.port("pull")
        try:
            path.halt.check()
            deadline_s = call.began_s + (path.timeout_s if timeout_s is None else check_timeout(timeout_s))
            staged = self._next(call, deadline_s)
            call.took = int(path.stream == 0)
            path.delivery.order(staged)
            if (recorder := path.ledger.recorder) is not None:
                recorder.pulled(staged.batch, staged.prepared)
        finally:
            call.end()
        if self.rank == 0 and path.stream == 0 and self._numbering.per_iteration is None:
            path.ledger.end_iteration()
        assert isinstance(staged.batch, Batch)
        return staged.batch

    def __iter__(self) -> Iterator[Batch]:
        """Off-policy: batches for ever. On-policy: what is left of this iteration's."""
        per_iteration = self._numbering.per_iteration
        end = None if per_iteration is None else per_iteration * (self._path.version() + 1)
        while end is None or self._index < end:
            yield self.pull()

    @property
    def staged(self) -> int:
        """Batches that are ready and not pulled."""
        return len(self._path.outbox)

    @property
    def number(self) -> int:
        """The number of the batch that the next pull asks for."""
        return self._numbering.number(self._index)

    def switch(self, numbering: Numbering, behind: bool) -> None:
        """Batches that nobody has asked for so far are prepared so, from the first on that begins a group of `numbering`'s."""
        with self._path.turnstile:
            self._wanted = numbering, behind
            self._adopt()

    def follows(self, numbering: Numbering, behind: bool) -> bool:
        """Whether that is so of the next batch."""
        return self._numbering == numbering and self._behind is behind and self._index >= self._since

    def _adopt(self) -> None:
        if self._wanted is None:
            return
        first = max(self._requests, default=self._index - 1) + 1
        numbering, behind = self._wanted
        if numbering.group(first).start == first:
            self._numbering, self._behind, self._wanted, self._since = numbering, behind, None, first

    def cancel(self) -> int:
        """Ends the pulls of this learner that wait, with CancelledError; the next pull asks for the same batch. One that prepares its
        batch itself goes on. Returns how many. Called from another thread."""
        return self._waiters.cancel()

    def why_waiting(self, now_s: float) -> list[str]:
        """Who waits in a pull, how long, and what for; a line each."""
        waiting, number = self._waiters.now(), self.number
        behind = f"{self._what(number)}: {_why_not_mine()}"
        return [
            f"{each.who} has waited {now_s - each.since_s:.1f} s for {behind if each.why is _why_not_mine else self._why(number)}"
            for each in waiting
        ]

    def state(self, to_numpy: Callable[[Any], NDArray[Any]]) -> tuple[dict[str, Any], Callable[[float], None]]:
        """For a checkpoint, in a turn of the order: which batch comes next, what is staged, and what was asked for and isn't drawn.
        What is drawn and being prepared is put in by the function, called with a deadline when the turn is over."""
        path, numbering = self._path, self._numbering
        with path.turnstile:
            index = self._index
            requests = {i: request for i, request in self._requests.items() if i >= index}
            drawn = {numbering.number(i): i for i, request in sorted(requests.items()) if request.turn.begun}
            copies = path.outbox.copy(list(drawn), lambda each: _plain_batch(each.batch, to_numpy))
        # What somebody has taken by now, though the pull hasn't returned, isn't the next any more.
        handed = [i for number, i in drawn.items() if number not in copies.awaited and number not in copies.made]
        # Of each request that is to be made again, its first batch, the lag that this was asked with, and its place in the order.
        firsts = {
            id(request): (i, request.lags[0], path.order.place_of(request.turn))
            for i, request in sorted(requests.items(), reverse=True)
            if request.behind and not request.turn.begun
        }
        state = {
            "world": self.world,
            "index": max([index, *(i + 1 for i in handed)]),
            "staged": {},
            "asked": sorted(firsts.values()),
        }

        def finish(deadline_s: float) -> None:
            why = f"save: learner {self.rank}'s batches were drawn, and are still being prepared"
            made = path.outbox.wait_copies(copies, deadline_s, lambda: why)
            state["staged"] = {i: made[number] for number, i in drawn.items() if made.get(number) is not None}

        return state, finish

    def load(self, state: Mapping[str, Any], schema: Schema | None) -> None:
        """Goes on from what was saved, in a learner that was just made. `schema`: of batches, for those whose trees couldn't be told."""
        self._index = state["index"]
        for index, told in state["staged"].items():
            number = self._numbering.number(index)
            leaves = {str(i): leaf for i, leaf in enumerate(told["leaves"])}
            request = Request(
                [number],
                [told["info"]["priority_lag"]],
                self._path.batch_size,
                self._path.stream,
                self._path.outbox.put,
                self._path.version,
                self._behind,
            )
            request.turn = Turn()
            request.turn.begun = True
            self._requests[index] = request
            tree = told["tree"]
            if tree is None:
                assert schema is not None
                tree = optree.tree_unflatten(schema.structure, list(leaves))
            try:
                staged = self._path.delivery.restage(leaves, tree, told["info"])
            except HandOverError as error:
                staged = Staged(error)
            self._path.outbox.put(number, staged)
        with self._path.turnstile:
            # In line, whoever pulls asks.
            for index, lag, place in state["asked"] if self._behind else ():
                if index not in self._requests:
                    self._ask(index, lag, place)

    def skip_to_iteration(self, iteration: int) -> None:
        """What `Store.advance` does to its learners: batches of earlier iterations are wanted no more; their requests are
        withdrawn, and what is staged of them is dropped."""
        numbering = self._numbering
        assert numbering.per_iteration is not None
        first = iteration * numbering.per_iteration
        with self._path.turnstile:
            self._index = max(self._index, first)
            dropped = {id(request): request for index, request in self._requests.items() if index < first}
            self._requests = {index: request for index, request in self._requests.items() if index >= first}
            self._adopt()
        self._path.outbox.discard_before(numbering.number(first))
        for request in dropped.values():
            self._path.delivery.give_up(request)
            self._path.outbox.forgo(request.numbers)

    def _next(self, call: PortCall, deadline_s: float) -> Staged:
        """The next batch, for this `call` alone: others wait."""
        path = self._path
        turnstile, staged, index = path.turnstile, None, self._index
        try:
            with turnstile:
                if self._puller is not None:
                    with self._waiters as mine:
                        path.halt.wait(turnstile, lambda: self._puller is None, deadline_s, _why_not_mine)
                        # It may be its turn because the one before was cancelled with it.
                        if mine.cancelled:
                            raise CancelledError(f"{self._what(self.number)} was cancelled: {_why_not_mine()}")
                self._puller = call
                index = self._index
                request = self._request(index)
            while (staged := self._take(index, request, deadline_s, call)) is None:
                # advance() dropped what was asked for: the next iteration's first batch is asked for instead.
                with turnstile:
                    index = self._index
                    request = self._request(index)
            return staged
        finally:
            with turnstile:
                if staged is not None:
                    self._requests.pop(index, None)
                    self._index = max(self._index, index + 1)
                if self._puller is call:
                    self._puller = None
                    turnstile.notify_all()

    def _request(self, index: int) -> Request:
        """The request that the learner's next batch `index` is part of, made now if there is none. When that is the first of its
        group and batches are prepared ahead, the next group is asked for as well, within the iteration. The turnstile is held."""
        self._adopt()
        request = self._requests.get(index) or self._ask(index)
        if self._behind:
            numbering = self._numbering
            group = numbering.group(index)
            ahead = group.stop
            # Where what a checkpoint had of the group is less than all, the rest comes first.
            whole = index == group.start and all(i in self._requests for i in group)
            if whole and ahead != numbering.next_iteration(index) and ahead not in self._requests:
                self._ask(ahead)
        return request

    def _ask(self, index: int, lag: int | None = None, place: float = math.inf) -> Request:
        """Asks for the batches of `index`'s group, from `index` on, up to one that has been asked for. `lag`, `place`: of that one, if a
        checkpoint brings it back. The turnstile is held."""
        path, numbering, behind = self._path, self._numbering, self._behind
        stop = numbering.group(index).stop
        if stop - index > 1:
            stop = next((i for i in range(index + 1, stop) if i in self._requests), stop)
        numbers = range(numbering.number(index), numbering.number(stop), numbering.world)
        first = index - self._index if lag is None else lag
        lags = range(first, first + stop - index)
        request = path.delivery.request(
            numbers, lags, path.batch_size, path.outbox.put, path.version, path.stream, place, behind
        )
        for i in range(index, stop):
            self._requests[i] = request
        return request

    def _take(self, index: int, request: Request, deadline_s: float, call: PortCall) -> Staged | None:
        path, number = self._path, self._numbering.number(index)
        waits = not request.turn.begun
        try:
            staged = path.outbox.take(number) if len(path.outbox) else None
            if staged is None and not waits and not request.behind:
                staged = self._await(request, deadline_s, number)
            elif staged is None:
                with self._waiters:
                    staged = self._wait_for(request, deadline_s, number)
            if staged is not None and isinstance(staged.batch, HandOverError):
                raise staged.batch
        # In line nobody else would serve the request, and nobody at all serves one that failed: the next pull makes it anew.
        except BaseException as error:
            if not request.behind or isinstance(error, HandOverError):
                self._give_up(index)
            if isinstance(error, WaitTimeout):
                raise WaitTimeout(f"{self._what(number)} timed out: {self._missing(number)}") from None
            if isinstance(error, CancelledError):
                raise CancelledError(f"{self._what(number)} was cancelled: {self._missing(number)}") from None
            raise
        finally:
            if waits:
                _attribute(call, request, path.ingestion.rows_came_s, path.halt.clock.now())
        return staged

    def _wait_for(self, request: Request, deadline_s: float, number: int) -> Staged | None:
        """`_await` for a request whose turn hasn't come: where rows are missing, those that are on their way are hurried."""
        path = self._path
        try:
            if path.order.settle(request.turn, deadline_s):
                return self._await(request, deadline_s, number)
            with path.ingestion.hurried(deadline_s):
                return self._await(request, deadline_s, number)
        except (WaitTimeout, CancelledError):
            if request.behind or path.order.withdraw(request.turn):
                raise
        # It was drawn at the last moment: what comes only once would be lost.
        return self._await(request, deadline_s, number)

    def _await(self, request: Request, deadline_s: float, number: int) -> Staged | None:
        """Batch `number` as soon as it is staged, which in line is done here; None if it is not wanted any more."""
        path = self._path
        if request.behind:
            return path.outbox.wait_take(number, deadline_s)
        try:
            path.delivery.step(request, deadline_s)
        except (WaitTimeout, CancelledError, HandOverError):
            raise
        # A draw that was begun can't be repeated with the same priorities: the store must not go on as if nothing had happened. But
        # Ctrl-C while rows are waited for loses nothing.
        except BaseException as error:
            if not path.order.withdraw(request.turn):
                path.halt.now_because(error)
            raise
        return path.outbox.take(number)

    def _give_up(self, index: int) -> None:
        """Forgets the request of batch `index`."""
        with self._path.turnstile:
            request = self._requests.get(index)
            self._requests = {i: other for i, other in self._requests.items() if other is not request}
        if request is not None:
            self._path.delivery.give_up(request)
            self._path.outbox.forgo(request.numbers)

    def _why(self, number: int) -> str:
        return f"{self._what(number)}: {self._missing(number)}"

    def _what(self, number: int) -> str:
        if self._path.stream != 0:
            return "sample()"
        return f"pull of batch {number} (learner {self.rank} of {self.world})"

    def _missing(self, number: int) -> str:
        path = self._path
        together = self._numbering.group(self._index).stop - self._index
        missing = path.delivery.missing(path.batch_size, number, together)
        more = path.explain(number) if missing else ""
        return f"{missing or 'it is being prepared'}{f'; {more}' if more else ''}"


def _plain_batch(batch: Batch | HandOverError, to_numpy: Callable[[Any], NDArray[Any]]) -> dict[str, Any] | None:
    """A staged batch as NumPy arrays of its own, and the tree they are in with their places in it. None where it can't be handed
    over: it will be asked for anew."""
    if isinstance(batch, HandOverError):
        return None
    leaves = optree.tree_leaves(batch.data)
    places = iter(range(len(leaves)))
    tree = map_leaves(lambda leaf: str(next(places)), batch.data)
    return {
        "leaves": [np.array(to_numpy(leaf)) for leaf in leaves],
        "tree": tree if is_plain(tree) else None,
        "info": batch.info.plain(to_numpy),
    }


def _why_not_mine() -> str:
    return "another thread is pulling from this learner"


def _attribute(call: PortCall, request: Request, rows_came_s: Callable[[float], float], ended_s: float) -> None:
    """Says what a pull's seconds went to before its draw: rows that nobody had pushed, or that were being ingested."""
    turn, began_s = request.turn, call.began_s
    before_s = max(0.0, min(turn.began_at_s, ended_s) - began_s)
    if turn.passed_over:
        until_s = ended_s if turn.ready_at_s is None else rows_came_s(turn.ready_at_s)
        call.starved_s = min(max(0.0, until_s - began_s), before_s)
    call.ingesting_s = before_s - call.starved_s
