"""How a store's parts are put together: made from its settings, each given the others that it works with, and nothing started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from os import PathLike
from typing import Any

from conduit import backends
from conduit.backends import exchange
from conduit.clock import Clock
from conduit.core.admission import Admission
from conduit.core.backend import Backend, Target
from conduit.core.buffer import ExperienceBuffer
from conduit.core.chain import IngestionChain
from conduit.core.checkpoint import Parts
from conduit.core.declared import Declared
from conduit.core.delivery import Delivery
from conduit.core.experience import Schema
from conduit.core.feasible import Feasible, feasible, staged_batches
from conduit.core.growth import Growth
from conduit.core.halt import Halt, check_timeout
from conduit.core.hook import Hook, check_chain
from conduit.core.ingestion import Ingestion
from conduit.core.items import Row
from conduit.core.iteration import OnPolicyRollout
from conduit.core.ledger import Ledger
from conduit.core.limiter import MinSize, SampleToInsertRatio
from conduit.core.migration import Migrator
from conduit.core.order import Order
from conduit.core.placement import Asked, Bytes, Placement, budgets_within, parse_budgets
from conduit.core.placer import Demand, Placer
from conduit.core.priorities import Priorities
from conduit.core.probing import known, measure
from conduit.core.recipe import Recipe
from conduit.core.rollout import OffPolicyRollout
from conduit.core.sampling import DrawStream
from conduit.core.schedule import Auto, Schedule, asked_schedule
from conduit.core.scheduler import Scheduler
from conduit.core.semantics import OnPolicy, Semantics
from conduit.core.signature import Signature
from conduit.core.staging import Inbox, Outbox
from conduit.core.table import MAIN, REMOVER, LiveTable, Table
from conduit.errors import SettingError, TopologyError
from conduit.mover import Mover
from conduit.ports import PathOut
from conduit.settings import Settings
from conduit.switchboard import Switchboard
from conduit.topology.cluster import Topology
from conduit.topology.endpoint import Tier
from conduit.topology.files import check_machine, named
from conduit.topology.presets import PRESETS


@dataclass(frozen=True, slots=True)
class Wiring:
    """A store's parts. Threads hold these, and never the store: so a store that nobody refers to any more can be closed."""

    clock: Clock
    halt: Halt
    ledger: Ledger
    order: Order
    backend: Backend[Any]
    semantics: Semantics
    feasible: Feasible
    """The schedules that may be; one, where it was given."""
    switchboard: Switchboard
    scheduler: Scheduler | None
    """What chooses one of them; None where there is one."""
    buffer: ExperienceBuffer
    placer: Placer
    migrator: Migrator
    mover: Mover
    tables: Mapping[str, LiveTable]
    remover: LiveTable | None
    """What says which rows leave; None: the oldest do."""
    admission: Admission
    priorities: Mapping[str, Priorities | None]
    """By table; None where nothing goes by priorities."""
    choices: DrawStream
    rollout: OffPolicyRollout | OnPolicyRollout
    ingestion: Ingestion
    delivery_hooks: Sequence[Hook]
    signature: Signature
    hook_names: Sequence[str]
    timeout_s: float
    growth: Growth | None
    """What fits rows that grow to those that are there; None where nothing was declared."""

    @property
    def told(self) -> tuple[LiveTable, ...]:
        """All that is told which rows come and go."""
        return (*self.tables.values(), *(() if self.remover is None else (self.remover,)))

    @property
    def kept(self) -> Parts:
        """What a checkpoint is made of."""
        tables = {table.name: table for table in self.told}
        return Parts(
            self.halt,
            self.order,
            self.backend,
            self.buffer,
            self.signature,
            self.rollout,
            self.ingestion,
            tables,
            self.growth,
        )

    def path_out(self, table: LiveTable, target: Target, outbox: str, owner: object) -> PathOut:
        """A way out of the store, through `table`, to `target`."""
        delivery = Delivery(
            hooks=self.delivery_hooks,
            backend=self.backend,
            buffer=self.buffer,
            table=table,
            admission=self.admission,
            order=self.order,
            halt=self.halt,
            ledger=self.ledger,
            target=target,
            choices=self.choices,
            tables=tuple(self.tables.values()),
            remover=self.remover,
            growth=self.growth,
        )
        rollout, semantics = self.rollout, self.semantics
        return PathOut(
            halt=self.halt,
            ledger=self.ledger,
            order=self.order,
            ingestion=self.ingestion,
            delivery=delivery,
            outbox=Outbox(self.halt, outbox, self.ledger),
            batch_size=semantics.batch_size,
            timeout_s=self.timeout_s,
            turnstile=self.halt.condition(f"{outbox}'s pulls"),
            owner=owner,
            version=lambda: rollout.version_of_draws,
            explain=lambda number: _explain(rollout, semantics, number),
        )


def wire(
    settings: Settings,
    backend: str | Backend[Any],
    ingestion: Sequence[Hook],
    delivery: Sequence[Hook],
    placement: Asked,
    disk: str | PathLike[str] | None,
    clock: Clock | None,
    topology: Topology | str | PathLike[str] | None,
) -> Wiring:
    """The parts of a store with these settings. See `Store` for what they mean and for the errors."""
    if not isinstance(settings.seed, Integral) or int(settings.seed) < 0:
        raise SettingError(f"seed={settings.seed!r}: expected a whole number ≥ 0")
    check_timeout(settings.timeout_s)
    made = backends.load(backend, disk)
    recipe = Recipe(settings.item or Row(), {} if settings.derive is None else settings.derive)
    semantics = settings.semantics()
    _check_recipe(recipe, semantics)
    hooks = {"ingestion": check_chain(ingestion, "ingestion"), "delivery": check_chain(delivery, "delivery")}
    asked = asked_schedule(settings.schedule)
    schedules = _schedules(asked, settings, semantics, hooks["ingestion"])
    schedule = schedules.simplest
    clock = backends.clock_of(made, clock)
    halt, ledger = Halt(clock), Ledger(clock)
    halt.tell_waited = ledger.waited
    order = Order(halt)
    there = _topology(topology)
    budgets = _budgets(settings.budgets, made, there)
    placer = Placer(made, placement, budgets, _demand(settings, semantics, schedules), there, _here(made, clock))
    seed, in_order = int(settings.seed), semantics.remover is None
    remover = None
    if semantics.remover is not None:
        table = Table(semantics.remover)
        remover = LiveTable(REMOVER, table, semantics.capacity, semantics.batch_size, seed, None, in_order)
    buffer = ExperienceBuffer(
        made,
        semantics.capacity,
        lambda schema, instead: _placed(placer, buffer, schema, instead),
        budgets,
        halt,
        recipe,
        None if remover is None else remover.sampler,
        ledger.meter,
    )
    # What one invocation of delivery prepares is drawn at once.
    together = 1 if isinstance(semantics, OnPolicy) else int(max(mode.g for mode in schedules.delivery))
    tables = {
        name: LiveTable(
            name,
            table,
            semantics.capacity,
            semantics.batch_size,
            seed,
            buffer.starts,
            in_order,
            together,
            buffer.oldest_waiting,
        )
        for name, table in semantics.tables.items()
    }
    told = [*tables.values(), *(() if remover is None else (remover,))]
    admission = Admission(halt, order, told, lambda: buffer.window)
    declared = settings.declared
    chain = IngestionChain(hooks["ingestion"], isinstance(semantics, OnPolicy), recipe.final_sources(), declared)
    inbox = Inbox(
        halt,
        order,
        behind=schedule.overlap_ing,
        holds_back=not isinstance(semantics, OnPolicy),
    )
    needs_edges = chain.needs_edges or not recipe.trivial
    rollout = _rollout(settings, semantics, schedules, schedule, halt, inbox, admission, needs_edges)
    migrator = Migrator(made, buffer, order, halt, plan_of=placer.transfer_plan, passed=ledger.passed)
    mover = Mover(placer, migrator, buffer, halt, settings.timeout_s)
    growth = None
    if declared is not None:
        _check_growth(declared, told)
        growth = Growth(
            declared=declared,
            buffer=buffer,
            migrator=migrator,
            tables=told,
            least=_least(semantics, told, together),
            has_hooks=chain.has_hooks,
            why_not_now=_edge(rollout, semantics),
        )
    signature = Signature(
        exchange.to_numpy,
        any(table.prioritized for table in told),
        min((table.sampler.highest_priority for table in told if table.prioritized), default=0.0),
        finals_of=recipe.final_sources(),
        declared=declared,
        has_hooks=chain.has_hooks,
        widen=growth.widen if growth else lambda schema, timeout_s: schema,
    )
    # Where a push is written before it returns, its arrays need no copy before.
    lends = not (isinstance(semantics, OnPolicy) or ingestion)
    switchboard = Switchboard(semantics, rollout, signature, ledger, schedule, lends, halt.condition("switchboard"))
    scheduler = None
    if isinstance(asked, Auto) and len(schedules.schedules) > 1:
        scheduler = Scheduler(
            halt,
            ledger,
            semantics,
            asked,
            lambda: schedules.staging(placer.staged_batches),
            switchboard,
            lambda: 0 if buffer.storage is None else buffer.storage.row_bytes,
            mover.look,
        )
    return Wiring(
        clock=clock,
        halt=halt,
        ledger=ledger,
        order=order,
        backend=made,
        semantics=semantics,
        feasible=schedules,
        switchboard=switchboard,
        scheduler=scheduler,
        buffer=buffer,
        placer=placer,
        migrator=migrator,
        mover=mover,
        tables=tables,
        remover=remover,
        admission=admission,
        priorities={name: _priorities(table, remover, order, buffer) for name, table in tables.items()},
        choices=DrawStream(seed),
        rollout=rollout,
        ingestion=Ingestion(
            chain=chain,
            inbox=inbox,
            rollout=rollout,
            buffer=buffer,
            tables=told,
            admission=admission,
            order=order,
            halt=halt,
            ledger=ledger,
            growth=growth,
        ),
        delivery_hooks=hooks["delivery"],
        signature=signature,
        growth=growth,
        hook_names=[hook.name for hook in (*hooks["ingestion"], *hooks["delivery"])],
        timeout_s=settings.timeout_s,
    )


def _schedules(asked: Schedule | Auto, settings: Settings, semantics: Semantics, hooks: Sequence[Hook]) -> Feasible:
    """Those that may be: the one that was given, or what the mode, the hooks' scopes and the caps of an automatic one allow."""
    if isinstance(asked, Schedule):
        schedule = semantics.resolve(asked)
        return Feasible((schedule.ingestion,), (schedule.delivery,), _minibatches(semantics))
    found = feasible(
        semantics,
        asked,
        pipelines=not hooks or hooks[0].per == "row",
        counted=any(
            each.limiter is not None or each.max_times_sampled is not None for each in semantics.tables.values()
        ),
    )
    if settings.inbox_units is None or isinstance(semantics, OnPolicy):
        return found
    fit = tuple(mode for mode in found.ingestion if mode.g <= settings.inbox_units)
    return replace(found, ingestion=fit or found.ingestion[:1])


def _minibatches(semantics: Semantics) -> int:
    return semantics.minibatches if isinstance(semantics, OnPolicy) else 1


def _demand(settings: Settings, semantics: Semantics, schedules: Feasible) -> Demand:
    """What the store will ask of its placement, as far as its settings say."""
    limiter = semantics.tables[MAIN].limiter
    if isinstance(semantics, OnPolicy):
        ratio: float = semantics.epochs
    else:
        ratio = limiter.samples_per_insert if isinstance(limiter, SampleToInsertRatio) else 1.0
    declared = settings.declared
    staging = sorted({staged_batches(mode, schedules.minibatches) for mode in schedules.delivery}, reverse=True)
    grows = declared is not None and bool(declared.axis)
    return Demand(semantics.capacity, semantics.batch_size, ratio, tuple(staging), grows)


def _topology(given: Topology | str | PathLike[str] | None) -> Topology | None:
    """A topology as it is, or by a preset's name, or from a file of this machine. TopologyError for anything else."""
    if given is None or isinstance(given, Topology):
        return given
    found = named(given)
    if os.fspath(given) in PRESETS:
        return found
    try:
        check_machine(found)
    except TopologyError as error:
        # Who emulates that machine, or takes its figures for this one's, has to say so.
        raise TopologyError(
            f"topology={given!r}: {error}; or give its value, conduit.topology.load({os.fspath(given)!r}), to go by it all the same"
        ) from error
    return found


def _budgets(asked: Mapping[str, Bytes] | None, backend: Backend[Any], topology: Topology | None) -> Mapping[Tier, int]:
    """By tier. CapacityError for one that is larger than a memory of its tier."""
    if not asked:
        return parse_budgets(asked)
    there = known(backend) if topology is None else topology
    # Of a disk a backend tells what is free, not how large it is.
    return budgets_within(there.only(at for at in there.endpoints if at.tier is not Tier.DISK), asked)


def _here(backend: Backend[Any], clock: Clock) -> Callable[[bool], Topology]:
    """What is known of this machine as the backend sees it; or, asked so, what it takes a few seconds to measure."""

    def here(measured: bool) -> Topology:
        return measure(backend, clock) if measured else known(backend)

    return here


def _placed(placer: Placer, buffer: ExperienceBuffer, schema: Schema, instead: bool) -> Placement:
    """Where rows of this schema go: beside those that are there, or `instead` of them."""
    storage = buffer.storage
    if storage is None:
        return placer.place(schema.row_bytes)
    return placer.place(schema.row_bytes, storage.placement, {} if instead else storage.bytes_by_endpoint())


def _check_growth(declared: Declared, tables: Sequence[LiveTable]) -> None:
    """SettingError where rows that grow would break a table's promise."""
    queue = next((table for table in tables if table.settings.is_queue), None)
    if declared.replaces and queue is not None:
        raise SettingError(
            f"fields=: grow='replace' lets rows leave that have not been drawn, and table {queue.name!r} loses none ({queue.limiter}); "
            "expected grow='pad'"
        )


def _least(semantics: Semantics, tables: Sequence[LiveTable], together: int) -> int:
    """How many rows of a new form must be there before they replace those of the old one."""
    limiters = [table.settings.limiter for table in tables]
    least = [each.min_size_to_sample for each in limiters if isinstance(each, MinSize | SampleToInsertRatio)]
    return min(max(least, default=semantics.batch_size * together), semantics.capacity)


def _edge(rollout: OffPolicyRollout | OnPolicyRollout, semantics: Semantics) -> Callable[[], str] | None:
    """On-policy: what says why rows can't grow now; empty where the iteration has none so far."""
    if not isinstance(rollout, OnPolicyRollout) or not isinstance(semantics, OnPolicy):
        return None
    unit = semantics.rollout_unit

    def why_not_now() -> str:
        if rollout.has_room(unit):
            return ""
        return (
            f"iteration {rollout.version} has rows already: all of its {unit} (rollout_unit) are of one form. Call store.advance() "
            f"when it is whole, and push wider rows from then on, or push with version={rollout.version + 1}, which waits for it"
        )

    return why_not_now


def _check_recipe(recipe: Recipe, semantics: Semantics) -> None:
    """SettingError for an item or derived leaves that don't go with the mode or the remover."""
    if isinstance(semantics, OnPolicy) and not recipe.trivial:
        raise SettingError(
            "item and derive are off-policy settings: an on-policy iteration delivers each of its rows as it was pushed"
        )
    recipe.check_fits(semantics.capacity)
    if semantics.remover is not None and not recipe.trivial:
        raise SettingError(
            f"remover={semantics.remover}: a row that is linked to others can only leave when it is the oldest; expected "
            "remover=conduit.Fifo(), or rows that stand alone: no item but Row(), no derive"
        )


def _rollout(
    settings: Settings,
    semantics: Semantics,
    schedules: Feasible,
    schedule: Schedule,
    halt: Halt,
    inbox: Inbox,
    admission: Admission,
    needs_edges: bool,
) -> OffPolicyRollout | OnPolicyRollout:
    units, when_full = settings.inbox_units, settings.when_full
    if when_full not in ("block", "drop"):
        raise SettingError(f"when_full={when_full!r}: expected 'block' or 'drop'")
    if isinstance(semantics, OnPolicy):
        if when_full == "drop" or units is not None:
            raise SettingError(
                "inbox_units and when_full are off-policy: an on-policy inbox is bounded by the iteration and drops nothing"
            )
        rows = semantics.units_per_ingestion(schedule)
        return OnPolicyRollout(halt, inbox, semantics.rollout_unit, rows, needs_edges)
    group = semantics.units_per_ingestion(schedule)
    most = int(max(mode.g for mode in schedules.ingestion))
    return OffPolicyRollout(
        halt=halt,
        inbox=inbox,
        admission=admission,
        units_per_group=group,
        limit=max(64, 4 * most) if units is None else units,
        when_full=when_full,
        cuts_matter=needs_edges,
        max_staleness=semantics.max_staleness,
    )


def _priorities(
    table: LiveTable, remover: LiveTable | None, order: Order, buffer: ExperienceBuffer
) -> Priorities | None:
    told = [each.sampler for each in (table, remover) if each is not None and each.prioritized]
    return Priorities(exchange, order, buffer, told) if told else None


def _explain(rollout: OffPolicyRollout | OnPolicyRollout, semantics: Semantics, number: int) -> str:
    """What the running iteration lacks, if it is batch `number`'s."""
    if not isinstance(rollout, OnPolicyRollout) or not isinstance(semantics, OnPolicy):
        return ""
    return rollout.why_open() if number // semantics.batches == rollout.version else ""
