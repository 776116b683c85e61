"""Mixture: batches with rows of several stores, such as demonstrations beside what an agent sees itself (offline to online)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from numbers import Integral
from typing import Any

import numpy as np
import optree
from numpy.typing import NDArray

from conduit.backends import exchange
from conduit.clock import Clock, RealClock
from conduit.core.backend import Target
from conduit.core.batch import Batch, Padding, SampleInfo
from conduit.core.experience import Tree, leaf_paths
from conduit.core.halt import check_timeout
from conduit.core.limiter import exact
from conduit.core.priorities import PriorityUpdate
from conduit.core.signature import check_priorities
from conduit.core.table import MAIN
from conduit.core.whole import check_whole
from conduit.errors import ConduitError, PriorityError, SchemaError, SettingError, UnknownKeyError, WaitTimeout
from conduit.store import Store

Shares = Mapping[str, float]
Array = NDArray[Any]
Keys = NDArray[np.int64]

_ROW = 10**15
"""Into how many parts a row is divided to keep account of shares: they are exact to so many."""


class MixtureInfo:
    """What is known of a mixture's batch of B entries. Rows of one store are together, stores in the order in which the mixture
    has them. Each property is what the stores' own `SampleInfo` says, one after the other: arrays of shape (B,), NumPy's but for
    `weight` and `mask`. Nothing here is to be changed."""

    def __init__(
        self,
        number: int,
        stores: Sequence[str],
        parts: Mapping[str, SampleInfo],
        target: Target,
        padding: Mapping[str, Padding],
    ) -> None:
        """`parts`: by store, of those that gave rows, in order. `padding`: of the leaves that grow in any of these, by path."""
        self.number = number
        """Which batch of the mixture this is."""
        self.stores = tuple(stores)
        """The mixture's stores, by name."""
        self.parts = parts
        """What each store that gave rows says of them."""
        self.rows: dict[str, slice] = {}
        """Which entries are of which of `parts`."""
        self._target = target
        self._padding = padding
        self._masks: dict[str, Any] = {}
        stop = 0
        for name, part in parts.items():
            start, stop = stop, stop + len(part.keys)
            self.rows[name] = slice(start, stop)

    @cached_property
    def keys(self) -> Keys:
        """Insertion numbers, each in its store."""
        return self._join(lambda part: part.keys)

    @cached_property
    def source(self) -> Keys:
        """The store of each entry, as its place in `stores`."""
        places = [self.stores.index(name) for name in self.parts]
        return np.repeat(places, [len(part.keys) for part in self.parts.values()]).astype(np.int64)

    @cached_property
    def probability(self) -> NDArray[np.float64]:
        """Of the draw from the store, whatever its share is."""
        return self._join(lambda part: part.probability)

    @cached_property
    def priority(self) -> NDArray[np.float64]:
        return self._join(lambda part: part.priority)

    @cached_property
    def age(self) -> Keys:
        return self._join(lambda part: part.age)

    @cached_property
    def policy_version(self) -> Keys:
        return self._join(lambda part: part.policy_version)

    @cached_property
    def version_lag(self) -> Keys:
        return self._join(lambda part: part.version_lag)

    @cached_property
    def frontier(self) -> Keys:
        return self._join(lambda part: np.full(len(part.keys), part.frontier))

    @cached_property
    def table_size(self) -> Keys:
        return self._join(lambda part: np.full(len(part.keys), part.table_size))

    @cached_property
    def times_sampled(self) -> Keys | None:
        """0 for rows of stores that don't count; None if none does."""
        counts = [part.times_sampled for part in self.parts.values()]
        if all(count is None for count in counts):
            return None
        return self._join(
            lambda part: np.zeros(len(part.keys), np.int64) if part.times_sampled is None else part.times_sampled
        )

    @cached_property
    def weight(self) -> Any:
        """Importance-sampling weights as drawn: the highest of each store's is 1. As the batch's leaves, where they are."""
        return _one_after_the_other([part.weight for part in self.parts.values()], self._target)

    @cached_property
    def mask(self) -> Any:
        """(B, T) bool, where the batch is; None where an entry has no T axis."""
        masks = [part.mask for part in self.parts.values()]
        return None if masks[0] is None else _one_after_the_other(masks, self._target)

    @property
    def extents(self) -> dict[str, NDArray[np.int64]]:
        """As `SampleInfo.extents`, of each leaf that a store that gave rows lets grow: what is beyond are zeros. A row of a store in which
        the leaf doesn't grow is as long as all are there."""
        return {path: padding.extent for path, padding in self._padding.items()}

    def padding_mask(self, path: str) -> Any:
        """As `SampleInfo.padding_mask`: where leaf `path` is real, as the batch's leaves, where they are; None for one that grows in no
        store that gave rows."""
        if path not in self._padding:
            return None
        if path not in self._masks:
            self._masks[path] = exchange.accept({"": self._padding[path].mask}, self._target)[""]
        return self._masks[path]

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: with what is on a device made, since a device can't be pickled."""
        masks = {path: self.padding_mask(path) for path in self._padding}
        made = {"weight": self.weight, "mask": self.mask, "_masks": masks, "_padding": dict(self._padding)}
        return {**self.__dict__, **made, "_target": None}

    def __repr__(self) -> str:
        return f"MixtureInfo(number={self.number}, rows={self.rows}, keys={self.keys})"

    def _join(self, told: Callable[[SampleInfo], Array]) -> Array:
        return np.concatenate([told(part) for part in self.parts.values()])


@dataclass(frozen=True, slots=True)
class MixtureBatch:
    """As a `Batch`: `data` has the stores' structure, each leaf (B, …), in memory that belongs to the receiver."""

    data: Tree
    info: MixtureInfo

    def __len__(self) -> int:
        return sum(len(part.keys) for part in self.info.parts.values())


@dataclass(slots=True)
class _Begun:
    """A batch that is being put together: how many rows each store gives, and what has been drawn of it. `before`: the account
    without it."""

    number: int
    counts: Sequence[int]
    before: Sequence[int]
    drawn: dict[str, Batch] = field(default_factory=dict)


class Mixture:
    """Batches of `batch_size` rows, drawn on demand from several stores in given shares.

    - `stores`: by name. Their rows have the same leaves; where one lets a leaf grow (`Store(fields=)`), the others' rows may be shorter or
      longer along that axis, and are filled up with zeros to the longest. They stay the caller's: a mixture closes none.
    - `shares`: by store, numbers ≥ 0 in proportion, {"offline": 0.5, "online": 0.5}; or a function of the batch's number that
      returns them. A store whose share is 0 isn't asked.
    - `tables`: which table of a store is drawn from, where that isn't its main one.
    - `to`, `device`, `sharding`: where batches come, as for `Store.sample`. `timeout_s`: of each pull that isn't given its own.

    A batch whose shares are whole rows has exactly these. Where they aren't, each store gives the rows below or above, by what it is
    owed from the batches before: with fixed shares, two stores are never more than half a row off altogether, and several hardly more
    than one. Which store gives how many depends on the shares alone. With JAX, each split of a batch that occurs is compiled once:
    for two stores in fixed shares there are at most two; on a schedule at most batch_size + 1."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        shares: Shares | Callable[[int], Shares],
        batch_size: int,
        *,
        tables: Mapping[str, str] | None = None,
        to: str | None = None,
        device: Any = None,
        sharding: Any = None,
        timeout_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        check_whole("batch_size", batch_size)
        for name, given in (("stores", stores), ("tables", {} if tables is None else tables)):
            if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
                raise SettingError(f"Mixture({name}={given!r}): expected a dict by the stores' names")
        self._stores = dict(stores)
        self._names = tuple(self._stores)
        self._tables = dict.fromkeys(self._names, MAIN) | dict(tables or {})
        _check_stores(self._stores, self._tables)
        self._shares = shares
        self._fixed = None if callable(shares) else _parts_of(shares, self._names, "Mixture(shares=…)")
        self._batch_size = batch_size
        self._to, self._device, self._sharding = to, device, sharding
        self._timeout_s = check_timeout(timeout_s)
        self._clock = clock or RealClock()
        self._lock = threading.Lock()
        """Held for a moment, and never while a store is asked."""
        self._number = 0
        self._owed: Sequence[int] = (0,) * len(self._names)
        self._unfinished: list[_Begun] = []
        """Batches that somebody pulled and didn't get."""
        self._takes_priorities = {
            name: store.info()["tables"][self._tables[name]]["prioritized"] for name, store in self._stores.items()
        }

    @property
    def stores(self) -> tuple[str, ...]:
        """Their names, in order: what `MixtureInfo.source` counts."""
        return self._names

    def pull(self, *, timeout_s: float | None = None) -> MixtureBatch:
        """The next batch. Raises what the stores' `sample` raises, naming the store; WaitTimeout where a store lacks rows. The next
        pull goes on with the same batch."""
        deadline_s = self._clock.now() + (self._timeout_s if timeout_s is None else check_timeout(timeout_s))
        begun = self._begin()
        try:
            for name, rows in zip(self._names, begun.counts, strict=True):
                if rows and name not in begun.drawn:
                    begun.drawn[name] = self._draw(name, rows, begun.number, deadline_s)
            return self._put_together(begun)
        except BaseException:
            with self._lock:
                self._unfinished.append(begun)
                self._unfinished.sort(key=lambda batch: batch.number)
            raise

    def __iter__(self) -> Iterator[MixtureBatch]:
        """Batches for ever."""
        while True:
            yield self.pull()

    def update_priorities(self, keys: Any, source: Any, priorities: Any) -> dict[str, PriorityUpdate]:
        """Tells each store the raw priorities of its rows: `keys` and `source` as in `MixtureInfo`, of all entries or of some;
        `priorities` of any framework, on any device. Returns what became of them, by store. Stores whose sampler has no priorities
        aren't told; PriorityError where none has. Errors as `Store.update_priorities`; those that can be seen on the host
        change nothing in any store."""
        keys, source = _on_host("keys", keys), _on_host("source", source)
        if exchange.framework_of(priorities) is None:
            priorities = _on_host("priorities", priorities)
        self._check_update(keys, source, priorities)
        told: dict[str, PriorityUpdate] = {}
        for place, name in enumerate(self._names):
            if len(which := np.flatnonzero(source == place)) and self._takes_priorities[name]:
                # As a rule a store's are together, and a slice is cheap wherever they are.
                together = which[-1] - which[0] + 1 == len(which)
                part = slice(int(which[0]), int(which[-1]) + 1) if together else which
                told[name] = self._stores[name].update_priorities(
                    keys[part], priorities[part], table=self._tables[name]
                )
        if len(source) and not any(self._takes_priorities.values()):
            raise PriorityError(
                f"update_priorities: no sampler of {', '.join(self._names)} has priorities; use sampler=conduit.Prioritized()"
            )
        return told

    def state(self) -> dict[str, Any]:
        """The next batch's number, and what each store is owed, for a checkpoint beside the stores' own."""
        with self._lock:
            number, owed = self._number, self._owed
            if self._unfinished:
                number, owed = self._unfinished[0].number, self._unfinished[0].before
        return {"number": number, "owed": dict(zip(self._names, owed, strict=True))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`, in a mixture of stores with the same names."""
        told: Any = state if isinstance(state, Mapping) else {}
        number, owed = told.get("number"), told.get("owed")
        if not isinstance(owed, Mapping) or not all(isinstance(each, Integral) for each in (number, *owed.values())):
            raise SettingError(f"Mixture.load(state={state!r}): expected what Mixture.state() returned")
        if set(owed) != set(self._names):
            raise SettingError(
                f"the state is of a mixture of {', '.join(owed)}; this one is of {', '.join(self._names)}"
            )
        with self._lock:
            self._number, self._owed = int(number), tuple(int(owed[name]) for name in self._names)
            self._unfinished = []

    def _begin(self) -> _Begun:
        with self._lock:
            if self._unfinished:
                return self._unfinished.pop(0)
            parts = self._fixed
            if parts is None:
                assert callable(self._shares)
                where = f"Mixture: the shares of batch {self._number}"
                parts = _parts_of(self._shares(self._number), self._names, where)
            counts, owed = split(parts, self._owed, self._batch_size)
            begun = _Begun(self._number, counts, self._owed)
            self._number, self._owed = self._number + 1, owed
            return begun

    def _draw(self, name: str, rows: int, number: int, deadline_s: float) -> Batch:
        # What is split over devices is so once it is whole: parts of it needn't be divisible.
        to = "jax" if self._sharding is not None else self._to
        left_s = max(0.0, deadline_s - self._clock.now())
        try:
            return self._stores[name].sample(
                rows, table=self._tables[name], to=to, device=self._device, timeout_s=left_s
            )
        except WaitTimeout as error:
            raise WaitTimeout(f"pull of batch {number} of a mixture: {rows} rows of store {name!r}: {error}") from None
        except ConduitError as error:
            error.add_note(f"This was store {name!r} of a mixture, asked for {rows} rows of batch {number}.")
            raise

    def _put_together(self, begun: _Begun) -> MixtureBatch:
        drawn = {name: begun.drawn[name] for name in self._names if name in begun.drawn}
        infos = {name: batch.info for name, batch in drawn.items()}
        structure, parts, padding = _flattened({name: batch.data for name, batch in drawn.items()}, infos)
        target = Target(exchange.framework_of(next(iter(parts[0].values()))) or "", self._device, self._sharding)
        leaves = exchange.concatenate(parts)
        if self._sharding is not None:
            leaves = exchange.accept(leaves, target)
        info = MixtureInfo(begun.number, self._names, infos, target, padding)
        return MixtureBatch(optree.tree_unflatten(structure, list(leaves.values())), info)

    def _check_update(self, keys: Array, source: Array, priorities: Any) -> None:
        where = "update_priorities"
        if keys.ndim != 1 or source.shape != keys.shape or source.dtype.kind not in "iu":
            raise UnknownKeyError(
                f"{where}: keys {list(keys.shape)} and source {source.dtype}{list(source.shape)}; expected a key and the number "
                "of its store for each entry, as in batch.info"
            )
        unknown = (source < 0) | (source >= len(self._names))
        if unknown.any():
            raise UnknownKeyError(
                f"{where}: there is no store {source[unknown][0]}; {', '.join(self._names)} are 0 to {len(self._names) - 1}"
            )
        if tuple(priorities.shape) != keys.shape:
            raise PriorityError(
                f"{where}: {list(priorities.shape)} priorities for {list(keys.shape)} keys; expected one a key"
            )
        if exchange.on_host(priorities):
            values = exchange.to_numpy(priorities)
            if values.dtype.kind not in "cOSUMm":
                name = lambda i: f"{where}: key {keys[i]} of store {self._names[source[i]]!r}"  # noqa: E731
                check_priorities(values.astype(np.float64), np.inf, name)


def split(parts: Sequence[int], owed: Sequence[int], batch_size: int) -> tuple[Sequence[int], Sequence[int]]:
    """How many rows each store gives, and what each is owed then. `parts`: of a row, in 1 / `_ROW`, as is `owed`."""
    wanted = [owes + part * batch_size for owes, part in zip(owed, parts, strict=True)]
    asked = [place for place, part in enumerate(parts) if part]
    counts = [max(0, want // _ROW) if part else 0 for want, part in zip(wanted, parts, strict=True)]
    while (rest := batch_size - sum(counts)) > 0:
        counts[max(asked, key=lambda place: (wanted[place] - counts[place] * _ROW, -place))] += 1
    for _ in range(-rest):
        giving = [place for place in asked if counts[place]]
        counts[min(giving, key=lambda place: (wanted[place] - counts[place] * _ROW, -place))] -= 1
    return counts, [want - count * _ROW for want, count in zip(wanted, counts, strict=True)]


def _parts_of(shares: object, names: Sequence[str], where: str) -> Sequence[int]:
    """Each store's part of a row, in 1 / `_ROW`: whole numbers whose sum is `_ROW`. SettingError for shares that mean nothing."""
    if not isinstance(shares, Mapping):
        raise SettingError(f"{where} are {shares!r}; expected a mapping from {', '.join(names)} to numbers ≥ 0")
    if set(shares) != set(names):
        odd = ", ".join(map(repr, sorted(set(shares) ^ set(names), key=str)))
        raise SettingError(f"{where} are {dict(shares)!r}: {odd} differs; expected one for each of {', '.join(names)}")
    for name in names:
        share = shares[name]
        if not isinstance(share, int | float | np.number) or isinstance(share, bool) or not 0 <= share < np.inf:
            raise SettingError(f"{where}: {name!r} has {share!r}; expected a finite number ≥ 0")
    # As they are written: 0.1 is a tenth.
    written = [exact(shares[name]) for name in names]
    if not (total := sum(written)):
        raise SettingError(f"{where} are all 0; expected a share above 0 for a store at least")
    wanted = [share * _ROW / total for share in written]
    parts = [int(want) for want in wanted]
    for place in sorted(range(len(parts)), key=lambda place: parts[place] - wanted[place])[: _ROW - sum(parts)]:
        parts[place] += 1
    return parts


def _check_stores(stores: Mapping[str, object], tables: Mapping[str, str]) -> None:
    if not stores:
        raise SettingError("Mixture(stores=…) has no stores; expected one at least, by name")
    for name, store in stores.items():
        if not isinstance(store, Store):
            raise SettingError(f"Mixture: store {name!r} is a {type(store).__name__}; expected a conduit.Store")
        info = store.info()
        if info["mode"] == "on_policy":
            raise SettingError(f"Mixture: store {name!r} is on-policy; expected stores that draw on demand")
        if tables[name] not in info["tables"]:
            raise SettingError(
                f"Mixture: store {name!r} has no table {tables[name]!r}; it has {', '.join(info['tables'])}"
            )
    if unknown := set(tables) - set(stores):
        raise SettingError(f"Mixture(tables=…) names {', '.join(map(repr, sorted(unknown)))}, which is no store of it")


def _on_host(name: str, array: Any) -> Array:
    try:
        return exchange.to_numpy(array)
    except SchemaError as error:
        raise SchemaError(f"update_priorities: {name}: {error}") from None


def _flattened(
    trees: Mapping[str, Tree], infos: Mapping[str, SampleInfo]
) -> tuple[optree.PyTreeSpec, list[dict[str, Any]], Mapping[str, Padding]]:
    """The trees' structure, each tree's leaves by path, those that grow as long as the longest, and what of these is real. SchemaError names
    the leaf and the stores that differ in it."""
    first, *others = trees
    leaves, structure = optree.tree_flatten(trees[first])
    paths = _paths(structure)
    parts = [dict(zip(paths, leaves, strict=True))]
    for name in others:
        leaves, other = optree.tree_flatten(trees[name])
        if other != structure:
            odd = sorted(set(leaf_paths(other)) ^ set(paths))
            what = f"only one of them has leaf {', '.join(map(repr, odd))}" if odd else "their leaves nest differently"
            raise SchemaError(f"rows of stores {first!r} and {name!r} can't be mixed: {what}")
        parts.append(dict(zip(paths, leaves, strict=True)))
    padding = _filled_up(parts, list(infos.values()))
    for name, part in zip(others, parts[1:], strict=True):
        for path, leaf in parts[0].items():
            its = part[path]
            if type(its) is not type(leaf) or its.dtype != leaf.dtype or its.shape[1:] != leaf.shape[1:]:
                do = "" if type(its) is type(leaf) else "; name one framework with to="
                raise SchemaError(
                    f"rows of stores {first!r} and {name!r} can't be mixed: leaf {path!r} is {_told(leaf)} in one and "
                    f"{_told(its)} in the other{do}"
                )
    return structure, parts, padding


def _filled_up(parts: Sequence[dict[str, Any]], infos: Sequence[SampleInfo]) -> Mapping[str, Padding]:
    """Makes the leaves that grow in some store as long as the longest of them, and returns what of each is real, by path."""
    padding: dict[str, Padding] = {}
    for path in dict.fromkeys(path for info in infos for path in info.padding):
        told = [info.padding.get(path) for info in infos]
        if len({(each.axis, each.axes) for each in told if each is not None}) > 1:
            raise SchemaError(f"rows can't be mixed: leaf {path!r} grows along different axes in their stores")
        one = next(each for each in told if each is not None)
        leading, leaves = one.extent.ndim, [part[path] for part in parts if path in part]
        if len(leaves) < len(parts) or any(
            leaf.ndim != leading + one.axes or leaf.shape[1:leading] != one.extent.shape[1:] for leaf in leaves
        ):
            # Delivery hooks made something else of it, or the entries are of different lengths.
            continue
        axis = leading + one.axis
        widths = [leaf.shape[axis] for leaf in leaves]
        for part, leaf in zip(parts, leaves, strict=True):
            part[path] = exchange.widen(leaf, (*leaf.shape[:axis], max(widths), *leaf.shape[axis + 1 :]))
        extents = [
            np.full(leaf.shape[:leading], width) if each is None else each.extent
            for each, leaf, width in zip(told, leaves, widths, strict=True)
        ]
        padding[path] = Padding(np.concatenate(extents), one.axis, one.axes, max(widths))
    return padding


@lru_cache(maxsize=16)
def _paths(structure: optree.PyTreeSpec) -> tuple[str, ...]:
    return leaf_paths(structure)


def _told(leaf: Any) -> str:
    return f"{exchange.framework_of(leaf)}'s {str(leaf.dtype).rpartition('.')[2]}{list(leaf.shape[1:])}"


def _one_after_the_other(arrays: Sequence[Any], target: Target) -> Any:
    joined = exchange.concatenate([{"": array} for array in arrays])
    return (joined if target.sharding is None else exchange.accept(joined, target))[""]
