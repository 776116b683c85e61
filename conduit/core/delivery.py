"""Delivery: buffer → training batch. The operator that draws, reads, transforms and stages batches (paper §4.2)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.core.admission import Admission
from conduit.core.backend import Backend, Columns, Target
from conduit.core.batch import NO_PADDING, Batch, Padding, SampleInfo
from conduit.core.buffer import ExperienceBuffer
from conduit.core.experience import Schema, Tree, map_leaves
from conduit.core.growth import Growth, Real
from conduit.core.halt import Halt
from conduit.core.hook import Hook, count_rows, run_hook
from conduit.core.leases import Lease
from conduit.core.ledger import Ledger
from conduit.core.order import Order, Turn
from conduit.core.recipe import Selection
from conduit.core.ring import Window
from conduit.core.sampling import Draw, DrawStream
from conduit.core.staging import Staged
from conduit.core.table import LiveTable
from conduit.errors import HandOverError, HookError
from conduit.topology.endpoint import PAGEABLE, Endpoint

Keys = NDArray[np.int64]

_WEIGHT, _MASK = "(weight)", "(mask)"
"""Columns that travel along with the rows to the learner's device."""
_CHOICES = 2
"""The first stream of an item's choices; draws have those before."""


@dataclass(slots=True)
class Request:
    """Batches to draw in one turn and stage one after the other.

    `lags`: the priority lag of each. `stage`: where each goes as soon as it is ready. `version`: tells the policy version whose rows
    are being taken. `behind`: the operator's thread prepares them, not whoever asks. `turn` and `drawn` are set once the
    request has its place in the order, and once it has been its turn."""

    numbers: Sequence[int]
    lags: Sequence[int]
    rows: int
    stream: int
    stage: Callable[[int, Staged], None]
    version: Callable[[], int]
    behind: bool
    turn: Turn = field(init=False)
    drawn: Drawn | None = None
    read: deque[Columns[Any]] | BaseException | None = None
    """The leaves of each batch once they have been read, or why they can't be."""


@dataclass(slots=True)
class Chosen:
    """One batch of a request: its draw, what its entries are made of, and what is known of the rows that start them. `real`: of
    leaves that grow, what of them is."""

    draw: Draw
    keys: Keys
    selection: Selection
    version: NDArray[np.int64]
    times_sampled: NDArray[np.int64] | None
    real: Mapping[str, Real]


@dataclass(slots=True)
class Drawn:
    """A request's batches, and the lease that keeps their rows until they have been read; None where they have been in their
    turn. `version`: the store's policy version then."""

    batches: Sequence[Chosen]
    frontier: int
    table_size: int
    version: int
    lease: Lease | None


class Delivery:
    def __init__(
        self,
        *,
        hooks: Sequence[Hook],
        backend: Backend[Any],
        buffer: ExperienceBuffer,
        table: LiveTable,
        admission: Admission,
        order: Order,
        halt: Halt,
        ledger: Ledger,
        target: Target,
        choices: DrawStream,
        tables: Sequence[LiveTable],
        remover: LiveTable | None,
        growth: Growth | None = None,
    ) -> None:
        """`choices`: for what an item chooses by chance; used in turns only, as the table is. `tables`: all over these
        rows; `remover`: says which of these leave, if not the oldest do."""
        self._hooks = tuple(hooks)
        self._backend = backend
        self._buffer = buffer
        self._table = table
        self._admission = admission
        self._order = order
        self._halt = halt
        self._ledger = ledger
        self._target = target
        self._choices = choices
        self._tables = tables
        self._remover = remover
        self._growth = growth
        self._landing = backend.landing(target)
        self._reads_to = PAGEABLE if self._hooks else self._landing
        self._handed = partial(_handed, backend, self._landing, target)
        self._requests: deque[Request] = deque()
        self._changed = halt.condition("delivery requests")

    def request(
        self,
        numbers: Sequence[int],
        lags: Sequence[int],
        rows: int,
        stage: Callable[[int, Staged], None],
        version: Callable[[], int],
        stream: int = 0,
        place: float = math.inf,
        behind: bool = False,
    ) -> Request:
        """Takes a place in the order for batches `numbers` of `rows` rows each: what was asked of the store before is
        visible to their draws, what comes later is not, unless rows are missing. `place`: see `Order.act`. `behind`: the operator's thread
        prepares them, and draws them as well unless somebody comes first who has the next place."""
        request = Request(numbers, lags, rows, stream, stage, version, behind)
        request.turn = self._order.act(
            lambda: self._draw(request),
            ready=lambda: self._missing(rows, numbers[0], len(numbers)) is None,
            place=place,
            later=behind,
        )
        if behind:
            with self._changed:
                self._requests.append(request)
                self._changed.notify_all()
        return request

    def give_up(self, request: Request) -> None:
        """Nobody will read the request's rows."""
        if not self._order.withdraw(request.turn) and request.drawn is not None and request.drawn.lease is not None:
            self._buffer.leases.give_up(request.drawn.lease)

    def missing(self, rows: int, number: int, batches: int = 1) -> str | None:
        """What is missing for a draw now, of so many batches together."""
        return self._order.between_turns(lambda: self._why_missing(rows, number, batches), "rows are being ingested")

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
                self._buffer.leases.redeem(drawn.lease)
        if request.read is None:
            return
        if isinstance(request.read, BaseException):
            raise request.read
        for number, lag, chosen in zip(request.numbers, request.lags, drawn.batches, strict=True):
            with self._ledger.operator("delivery"):
                staged = self._assemble(number, lag, chosen, drawn, request.read.popleft())
            request.stage(number, staged)

    def _draw(self, request: Request) -> None:
        """In its turn: chooses the request's rows, and takes the lease on them or, where they are few, reads them at once."""
        buffer, table = self._buffer, self._table
        window = buffer.window
        frontier, size, version = buffer.inserted - 1, table.size(window), request.version()
        batches = [self._choose(number, request, window) for number in request.numbers]
        if self._admission.limits:
            self._admission.changed()
        if not request.behind and buffer.is_quick(self._reads_to, [chosen.selection for chosen in batches]):
            request.drawn = Drawn(batches, frontier, size, version, None)
            self._read(request)
            return
        oldest = min(chosen.selection.oldest() for chosen in batches)
        lease = buffer.leases.take(oldest, lambda: self._read(request))
        request.drawn = Drawn(batches, frontier, size, version, lease)

    def _choose(self, number: int, request: Request, window: Window) -> Chosen:
        buffer = self._buffer
        draw, times = self._table.draw(number, request.rows, window, request.stream)
        selection = buffer.select(draw.keys, lambda: self._choices.at(number, _CHOICES + request.stream))
        real = {} if self._growth is None else self._growth.real(selection)
        chosen = Chosen(draw, buffer.keys_of(draw.keys), selection, buffer.version_of(draw.keys), times, real)
        if self._table.freed is not None and self._remover is not None:
            self._let_go(self._table.freed, self._remover)
        return chosen

    def _let_go(self, rows: Keys, remover: LiveTable) -> None:
        """This table will give these rows no more: those that no other will give either leave."""
        for table in self._tables:
            assert table.starts is not None
            rows = rows[~table.starts.at(rows)]
        if len(rows):
            remover.exclude(rows)
            self._buffer.leave(rows)

    def _missing(self, rows: int, number: int, batches: int) -> str | None:
        return self._table.missing(self._buffer.window, rows, number, batches)

    def _why_missing(self, rows: int, number: int, batches: int) -> str | None:
        """What `_missing` says, and why rows that are there won't do: this takes a look at each."""
        lacks, buffer = self._missing(rows, number, batches), self._buffer
        if lacks is None:
            return None
        groups = None if buffer.lineage is None else buffer.lineage.unfinished_groups
        return lacks + self._table.why_few(buffer.window, rows, batches, groups)

    def _read(self, request: Request) -> None:
        """Reads the drawn rows, to the host where hooks wait for them. It may be a writer who runs this: what goes wrong is
        the learner's."""
        assert request.drawn is not None
        try:
            request.read = deque(self._buffer.read([each.selection for each in request.drawn.batches], self._reads_to))
        except BaseException as error:
            request.read = error
            if not isinstance(error, Exception):
                raise

    def order(self, staged: Staged) -> None:
        """Work that the calling thread issues on a device from here on comes after the batch is there; the host goes on."""
        for columns in staged.columns:
            self._backend.order(columns)

    def restage(self, leaves: Mapping[str, NDArray[Any]], tree: Tree, info: Mapping[str, Any]) -> Staged:
        """A batch that was staged when a checkpoint was made: its leaves by name, `tree` with these names in their places, and what
        `SampleInfo.plain` said of it."""
        keys, mask = info["keys"], info["mask"]
        shape = mask.shape if isinstance(mask, np.ndarray) else next(iter(leaves.values())).shape[:2]
        told = {_WEIGHT: info["weight"], _MASK: mask}
        extra = {name: array for name, array in told.items() if isinstance(array, np.ndarray)}
        columns = self._backend.adopt({**leaves, **extra}, self._landing)
        arrays = self._backend.hand_over(columns, self._target)
        weight = arrays[_WEIGHT] if _WEIGHT in extra else self._ones(len(keys), np.float32)
        whole = arrays[_MASK] if _MASK in extra else self._ones(tuple(shape), np.bool_) if mask else None
        padding = {path: Padding(*told) for path, told in info.get("padding", {}).items()}
        given = {**info, "weight": weight, "mask": whole, "padding": padding, "to_batch": self._handed}
        batch = Batch(map_leaves(lambda name: arrays[name], tree), SampleInfo(**given))
        return Staged(batch, () if self._landing.is_host else (columns,))

    def _assemble(self, number: int, lag: int, chosen: Chosen, drawn: Drawn, columns: Columns[Any]) -> Staged:
        schema, draw = self._buffer.batch_schema, chosen.draw
        padding = NO_PADDING
        if chosen.real:
            padding = {path: _padding(real, columns.arrays[path]) for path, real in chosen.real.items()}
        if self._hooks:
            schema, columns = self._transform(schema, columns, self._landing)
        extra: dict[str, Any] = {}
        if draw.weight is not None:
            extra[_WEIGHT] = (draw.weight / np.maximum.reduce(draw.weight)).astype(np.float32)
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
            keys=chosen.keys,
            frontier=drawn.frontier,
            table_size=drawn.table_size,
            times_sampled=chosen.times_sampled,
            priority_lag=lag,
            probability=draw.probability,
            priority=draw.priority,
            policy_version=chosen.version,
            store_version=drawn.version,
            weight=arrays[_WEIGHT] if _WEIGHT in extra else self._ones(len(draw.keys), np.float32),
            mask=self._mask(chosen.selection, arrays),
            padding=padding,
            to_batch=self._handed,
        )
        recorder = self._ledger.recorder
        prepared = None if recorder is None else recorder.prepared(number, len(draw.keys))
        return Staged(Batch(schema.unflatten(arrays), info), tuple(on_device), prepared)

    def _mask(self, selection: Selection, arrays: Mapping[str, Any]) -> Any:
        if selection.shape is None:
            return None
        return self._ones(selection.shape, np.bool_) if selection.mask is None else arrays[_MASK]

    def _ones(self, shape: int | tuple[int, ...], dtype: Any) -> Callable[[], Any]:
        return lambda handed=self._handed: handed(np.ones(shape, dtype))

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


def _handed(backend: Backend[Any], landing: Endpoint, target: Target, array: NDArray[Any]) -> Any:
    """`array` where the learner's batches are. A batch that nobody asked for it holds on to this, not to the store."""
    return backend.hand_over(backend.adopt({_WEIGHT: array}, landing), target)[_WEIGHT]


def _padding(real: Real, leaf: Any) -> Padding:
    return Padding(real.extent, real.axis, real.axes, leaf.shape[real.extent.ndim + real.axis])
