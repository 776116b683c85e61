"""Delivery: buffer → training batch. The operator that draws, reads, transforms and stages batches (paper §4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from conduit.core.recipe import Selection
from conduit.core.ring import Window
from conduit.core.sampling import Draw, DrawStream, Sampler
from conduit.core.staging import Staged
from conduit.errors import HandOverError, HookError
from conduit.topology.endpoint import PAGEABLE, Endpoint

_WEIGHT, _MASK = "(weight)", "(mask)"
"""Columns that travel along with the rows to the learner's device."""
_CHOICES = 2
"""The first stream of an item's choices; draws have those before."""


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
    read: deque[Columns[Any]] | BaseException | None = None
    """The leaves of each batch once they have been read, or why they can't be."""


@dataclass(slots=True)
class Chosen:
    """One batch of a request: its draw, what its entries are made of, and the policy version of the rows that start them."""

    draw: Draw
    selection: Selection
    version: NDArray[np.int64]


@dataclass(slots=True)
class Drawn:
    """A request's batches, and the lease that keeps their rows until they have been read; None where they have been in their
    turn."""

    batches: Sequence[Chosen]
    window: Window
    lease: Lease | None


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
        choices: DrawStream,
        in_line: bool,
    ) -> None:
        """`choices`: for what an item chooses by chance; used in turns only, as the sampler is. `in_line`: whoever asks for a
        batch prepares it as well."""
        self._hooks = tuple(hooks)
        self._backend = backend
        self._buffer = buffer
        self._sampler = sampler
        self._order = order
        self._halt = halt
        self._ledger = ledger
        self._target = target
        self._choices = choices
        self._in_line = in_line
        self._landing = backend.landing(target)
        self._reads_to = PAGEABLE if self._hooks else self._landing
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
        if not self._order.withdraw(request.turn) and request.drawn is not None and request.drawn.lease is not None:
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
        if drawn.lease is not None:
            with self._ledger.operator("delivery"):
                self._buffer.redeem(drawn.lease)
        if request.read is None:
            return
        if isinstance(request.read, BaseException):
            raise request.read
        for number, lag, chosen in zip(request.numbers, request.lags, drawn.batches, strict=True):
            with self._ledger.operator("delivery"):
                staged = self._assemble(number, lag, chosen, drawn.window, request.read.popleft())
            request.stage(number, staged)

    def _draw(self, request: Request) -> None:
        """In its turn: chooses the request's rows, and takes the lease on them or, where they are few, reads them at once."""
        window = self._buffer.window
        batches = [self._choose(number, request, window) for number in request.numbers]
        if self._in_line and self._buffer.is_quick(self._reads_to, [chosen.selection for chosen in batches]):
            request.drawn = Drawn(batches, window, None)
            self._read(request)
            return
        oldest = min(chosen.selection.oldest() for chosen in batches)
        request.drawn = Drawn(batches, window, self._buffer.lease(oldest, lambda: self._read(request)))

    def _choose(self, number: int, request: Request, window: Window) -> Chosen:
        draw = self._sampler.draw(number, request.rows, window, request.stream)
        selection = self._buffer.select(draw.keys, lambda: self._choices.at(number, _CHOICES + request.stream))
        return Chosen(draw, selection, self._buffer.version_of(draw.keys))

    def _missing(self, rows: int, number: int) -> str | None:
        return self._sampler.missing(self._buffer.window, rows, number)

    def _read(self, request: Request) -> None:
        """Reads the drawn rows, to the host where hooks wait for them. It may be a writer who runs this: what goes wrong is
        the learner's."""
        assert request.drawn is not None
        try:
            request.read = deque(
                [self._buffer.read(chosen.selection, self._reads_to) for chosen in request.drawn.batches]
            )
        except BaseException as error:
            request.read = error
            if not isinstance(error, Exception):
                raise

    def order(self, staged: Staged) -> None:
        """Work that the calling thread issues on a device from here on comes after the batch is there; the host goes on."""
        for columns in staged.columns:
            self._backend.order(columns)

    def _assemble(self, number: int, lag: int, chosen: Chosen, window: Window, columns: Columns[Any]) -> Staged:
        schema, draw = self._buffer.batch_schema, chosen.draw
        if self._hooks:
            schema, columns = self._transform(schema, columns, self._landing)
        extra: dict[str, Any] = {}
        if draw.weight is not None:
            extra[_WEIGHT] = draw.weight
        if chosen.selection.mask is not None:
            extra[_MASK] = chosen.selection.mask
        on_device: list[Columns[Any]] = [] if self._landing.is_host else [columns]
        if extra and on_device:
            on_device.append(self._backend.adopt(extra, self._landing))
            extra = dict(on_device[1].arrays)
        together = columns
        if extra:
            together = Columns(columns.at, {**columns.arrays, **extra}, columns.rows, columns.note)
        arrays = self._backend.hand_over(together, self._target)
        info = SampleInfo(
            number=number,
            keys=draw.keys,
            frontier=window.frontier,
            priority_lag=lag,
            probability=draw.probability,
            priority=draw.priority,
            policy_version=chosen.version,
            weight=arrays[_WEIGHT] if _WEIGHT in extra else self._ones(len(draw.keys), np.float32),
            mask=self._mask(chosen.selection, arrays),
        )
        return Staged(Batch(schema.unflatten(arrays), info), tuple(on_device))

    def _mask(self, selection: Selection, arrays: Mapping[str, Any]) -> Any:
        if selection.shape is None:
            return None
        return self._ones(selection.shape, np.bool_) if selection.mask is None else arrays[_MASK]

    def _ones(self, shape: int | tuple[int, ...], dtype: Any) -> Callable[[], Any]:
        return partial(_ones, self._backend, self._landing, self._target, shape, dtype)

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


def _ones(backend: Backend[Any], landing: Endpoint, target: Target, shape: int | tuple[int, ...], dtype: Any) -> Any:
    """Ones where the learner's batches are. A batch that nobody asked for them holds on to this, not to the store."""
    ones = backend.adopt({_WEIGHT: np.ones(shape, dtype)}, landing)
    return backend.hand_over(ones, target)[_WEIGHT]
