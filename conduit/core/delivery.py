"""Delivery: buffer → training batch. The operator that draws, reads, transforms and stages batches (paper §4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.backend import Backend, Columns, Target
from conduit.core.batch import Batch, SampleInfo
from conduit.core.buffer import ExperienceBuffer, Lease
from conduit.core.experience import Schema
from conduit.core.halt import Halt
from conduit.core.hook import Hook, count_rows, run_hook
from conduit.core.ledger import Ledger
from conduit.core.order import Order, Turn
from conduit.core.ring import Window
from conduit.core.sampling import Draw, Sampler
from conduit.core.staging import Staged
from conduit.errors import HandOverError, HookError
from conduit.topology.endpoint import PAGEABLE, Endpoint

_WEIGHT = "(weight)"
"""The column that carries the weights along with the rows to the learner's device."""


@dataclass(slots=True)
class Request:
    """Batches to draw in one turn and stage one after the other.

    `lags`: the priority lag of each. `stage`: where each goes as soon as it is ready. `turn` and `drawn` are set once the
    request has its place in the order, and once it has been its turn."""

    numbers: Sequence[int]
    lags: Sequence[int]
    rows: int
    stream: int
    stage: Callable[[int, Staged], None]
    turn: Turn = field(init=False)
    drawn: Drawn | None = None
    read: deque[_Read] | BaseException | None = None
    """The rows of each draw once they have been read, or why they can't be."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A request's draws, and the lease that keeps their rows until they have been read."""

    draws: Sequence[Draw]
    window: Window
    lease: Lease


_Read = tuple[Columns[Any], NDArray[np.int64]]
"""Rows, and the policy version of each."""


class Delivery:
    def __init__(
        self,
        *,
        hooks: Sequence[Hook],
        backend: Backend[Any],
        buffer: ExperienceBuffer,
        sampler: Sampler,
        order: Order,
        halt: Halt,
        ledger: Ledger,
        target: Target,
    ) -> None:
        self._hooks = tuple(hooks)
        self._backend = backend
        self._buffer = buffer
        self._sampler = sampler
        self._order = order
        self._halt = halt
        self._ledger = ledger
        self._target = target
        self._landing = backend.landing(target)
        self._requests: deque[Request] = deque()
        self._changed = halt.condition("delivery requests")

    def request(
        self,
        numbers: Sequence[int],
        lags: Sequence[int],
        rows: int,
        stage: Callable[[int, Staged], None],
        stream: int = 0,
    ) -> Request:
        """Takes a place in the order for batches `numbers` of `rows` rows each: what was asked of the store before is
        visible to their draws, what comes later is not, unless rows are missing."""
        request = Request(numbers, lags, rows, stream, stage)
        request.turn = self._order.act(
            lambda: self._draw(request), ready=lambda: self._missing(rows, numbers[0]) is None
        )
        return request

    def give_up(self, request: Request) -> None:
        """Nobody will read the request's rows."""
        if not self._order.withdraw(request.turn) and request.drawn is not None:
            self._buffer.give_up(request.drawn.lease)

    def missing(self, rows: int, number: int) -> str | None:
        """What is missing for a draw now."""
        return self._order.between_turns(lambda: self._missing(rows, number), "rows are being ingested")

    def submit(self, request: Request) -> None:
        """Leaves a request to the operator's thread."""
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()

    def run(self) -> None:
        """The thread's life: a step for every request, until the store halts."""
        try:
            while True:
                with self._changed:
                    self._halt.wait(self._changed, lambda: bool(self._requests), None, lambda: "no requests")
                    request = self._requests.popleft()
                try:
                    self.step(request, None)
                except HandOverError as error:
                    # The rows are fine, and so is the store: this learner asked for what can't be.
                    for number in request.numbers:
                        request.stage(number, Staged(error))
        # Whatever ends the operator must reach the callers of push and pull, which would wait for it otherwise.
        except BaseException as error:
            self._halt.now_because(error)
            if not isinstance(error, Exception):
                raise

    def step(self, request: Request, deadline_s: float | None) -> None:
        """Waits for the request's draws, then reads, transforms and stages its batches. Nothing if it was withdrawn."""
        if not self._order.wait(request.turn, deadline_s):
            return
        drawn = request.drawn
        assert drawn is not None
        with self._ledger.operator("delivery"):
            self._buffer.redeem(drawn.lease)
        if request.read is None:
            return
        if isinstance(request.read, BaseException):
            raise request.read
        for number, lag, draw in zip(request.numbers, request.lags, drawn.draws, strict=True):
            with self._ledger.operator("delivery"):
                staged = self._assemble(number, lag, draw, drawn.window, *request.read.popleft())
            request.stage(number, staged)

    def _draw(self, request: Request) -> None:
        """In its turn: chooses the request's rows, and takes the lease on them."""
        window = self._buffer.window
        draws = [self._sampler.draw(number, request.rows, window, request.stream) for number in request.numbers]
        oldest = min(int(draw.keys.min()) for draw in draws)
        request.drawn = Drawn(draws, window, self._buffer.lease(oldest, lambda: self._read(request)))

    def _missing(self, rows: int, number: int) -> str | None:
        return self._sampler.missing(self._buffer.window, rows, number)

    def _read(self, request: Request) -> None:
        """Reads the drawn rows, to the host where hooks wait for them. It may be a writer who runs this: what goes wrong is
        the learner's."""
        assert request.drawn is not None
        to = PAGEABLE if self._hooks else self._landing
        try:
            request.read = deque(
                (self._buffer.read(draw.keys, to), self._buffer.version_of(draw.keys)) for draw in request.drawn.draws
            )
        except BaseException as error:
            request.read = error
            if not isinstance(error, Exception):
                raise

    def order(self, staged: Staged) -> None:
        """Work that the calling thread issues on a device from here on comes after the batch is there; the host goes on."""
        for columns in staged.columns:
            self._backend.order(columns)

    def _assemble(
        self, number: int, lag: int, draw: Draw, window: Window, columns: Columns[Any], version: NDArray[np.int64]
    ) -> Staged:
        schema = self._buffer.schema
        assert schema is not None
        if self._hooks:
            schema, columns = self._transform(schema, columns, self._landing)
        on_device = (
            [] if self._landing.is_host else [columns, self._backend.adopt({_WEIGHT: draw.weight}, self._landing)]
        )
        weight = on_device[1].arrays[_WEIGHT] if on_device else draw.weight
        together = replace(columns, arrays={**columns.arrays, _WEIGHT: weight})
        arrays = self._backend.hand_over(together, self._target)
        info = SampleInfo(
            number=number,
            keys=draw.keys,
            probability=draw.probability,
            weight=arrays[_WEIGHT],
            priority=draw.priority,
            age=window.frontier - draw.keys,
            policy_version=version,
            frontier=window.frontier,
            priority_lag=lag,
        )
        return Staged(Batch(schema.unflatten(arrays), info), tuple(on_device))

    def _transform(self, schema: Schema, columns: Columns[Any], landing: Endpoint) -> tuple[Schema, Columns[Any]]:
        """What the hooks make of a batch on the host, at `landing`."""
        self._backend.wait(columns)
        data = schema.unflatten(columns.arrays)
        for hook in self._hooks:
            data = run_hook(hook, data)
            if (count := count_rows(data, hook)) != columns.rows:
                raise HookError(
                    f"delivery hook {hook.name!r} got {columns.rows} rows and wrote {count}; a delivery hook keeps the batch's rows"
                )
        written = Schema.infer(data, "delivery hooks")
        arrays = written.flatten(data, "delivery hooks")
        # What a hook made may be its own scratch array, which the next batch overwrites.
        mine = {id(array) for array in columns.arrays.values()}
        made = {path: array for path, array in arrays.items() if id(array) not in mine or not landing.is_host}
        copied = self._backend.adopt(made, landing).arrays if made else {}
        return written, Columns(landing, {**arrays, **copied}, columns.rows)
