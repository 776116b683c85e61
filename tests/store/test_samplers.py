"""Samplers at work in a store: how often each row comes, which items come in which order, and samplers of the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import conduit
from conduit.core.ring import Window
from conduit.core.sampling import Draw
from conduit.errors import PriorityError, SamplerError, SettingError, WaitTimeout
from tests.contract.planted_samplers import Planted, Right
from tests.core.frequencies import assert_fits
from tests.store.rows import no_thread_left, store
from tests.store.tables import assert_rows, content

CAPACITY, PUSHED, DRAWS = 24, 61, 4000
AT_RANDOM = [
    conduit.Uniform(),
    conduit.Uniform(replacement=False),
    conduit.Prioritized(alpha=0.7, eps=0.0),
    conduit.Recency(half_life=6.0),
    conduit.Stratified(),
]
each_random = pytest.mark.parametrize("sampler", AT_RANDOM, ids=repr)


def episode(first: int, rows: int, **leaves: Any) -> dict[str, Any]:
    return {**content(range(first, first + rows)), "reward": np.ones(rows, np.float32), **leaves}


def priority_of(keys: Any) -> np.ndarray:
    return 1.0 + np.asarray(keys) % 5


def chances(sampler: Any, keys: np.ndarray, newest: int) -> np.ndarray:
    """Of each of these drawable rows, where `newest` is the last of all."""
    if isinstance(sampler, conduit.Prioritized):
        chance = priority_of(keys) ** sampler.alpha
    elif isinstance(sampler, conduit.Recency):
        chance = 0.5 ** ((newest - keys) / sampler.half_life)
    else:
        chance = np.ones(len(keys))
    return chance / chance.sum()


def drawn_one_by_one(s: conduit.Store, draws: int = DRAWS, table: str = "main") -> np.ndarray:
    return np.array([s.sample(1, table=table).info.keys[0] for _ in range(draws)])


SETTINGS: dict[str, dict[str, Any]] = {
    "a ring that has wrapped": {},
    "n-step starts": {"item": conduit.NStep(4, 0.9, from_last=("wide",))},
    "a remover": {"remover": conduit.Uniform()},
    "counted": {"max_times_sampled": 1 << 20},
    "a second table": {"tables": {"main's": conduit.Table(conduit.Uniform(), 1 << 20)}},
}


def wrapped(sampler: Any, more: dict[str, Any], **settings: Any) -> tuple[conduit.Store, str]:
    """A store that has wrapped, and the table that draws by `sampler`."""
    name = "main"
    if "tables" in more:
        more, name = {"tables": {"second": conduit.Table(sampler)}}, "second"
    else:
        more = {**more, "sampler": sampler}
    s = store(capacity=CAPACITY, batch_size=1, seed=11, **more, **settings)
    actor = s.actor()
    for first in range(0, PUSHED, 7):
        rows = min(7, PUSHED - first)
        actor.push_trajectory(episode(first, rows))
        if sampler.prioritized:
            keys = s.read().keys
            s.update_priorities(keys, priority_of(keys), table=name)
    return s, name


@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
@each_random
def test_rows_come_as_often_as_the_sampler_says(sampler, more):
    if "remover" in more and isinstance(sampler, conduit.Recency | conduit.Stratified):
        with pytest.raises(SettingError, match="goes by age"):
            wrapped(sampler, more)
        return
    s, name = wrapped(sampler, more)
    with s:
        keys = s.read().keys
        assert len(keys) == CAPACITY
        if "item" in more:
            keys = keys[:-3]
        places = np.searchsorted(keys, drawn := drawn_one_by_one(s, table=name))
        assert set(drawn.tolist()) <= set(keys.tolist())
        assert_fits(np.bincount(places, minlength=len(keys)), chances(sampler, keys, PUSHED - 1))


@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
def test_without_replacement_every_pass_begins_anywhere_and_has_every_row_once(more):
    s, name = wrapped(conduit.WithoutReplacement(), more)
    with s:
        keys = s.read().keys
        keys = keys[:-3] if "item" in more else keys
        passes = drawn_one_by_one(s, 300 * len(keys), name).reshape(-1, len(keys))
        assert (np.sort(passes) == keys).all()
        for place in (0, len(keys) // 2):
            assert_fits(
                np.bincount(np.searchsorted(keys, passes[:, place]), minlength=len(keys)),
                np.full(len(keys), 1 / len(keys)),
            )


@pytest.mark.parametrize("sampler", [*AT_RANDOM, conduit.WithoutReplacement()], ids=repr)
def test_two_tables_draw_independently(sampler):
    with store(capacity=5, batch_size=1, sampler=sampler, tables={"other": conduit.Table(sampler)}) as s:
        s.actor().push_trajectory(content(range(5)))
        pairs = np.zeros((5, 5))
        for _ in range(2500):
            pairs[s.sample(1).info.keys[0], s.sample(1, table="other").info.keys[0]] += 1
        chance = chances(sampler, np.arange(5), 4) if isinstance(sampler, conduit.Recency) else np.full(5, 0.2)
        assert_fits(pairs.reshape(-1), np.outer(chance, chance).reshape(-1))


@pytest.mark.parametrize("sampler", [*AT_RANDOM, conduit.WithoutReplacement(), conduit.Fifo()], ids=repr)
@pytest.mark.parametrize("most", [None, 3])
def test_equal_seeds_repeat_and_other_tables_change_nothing_of_the_main_one(sampler, most):
    def draws(seed: int, **more: Any) -> list[Any]:
        with store(capacity=32, batch_size=4, sampler=sampler, max_times_sampled=most, seed=seed, **more) as s:
            actor, learner, seen = s.actor(), s.learner(), []
            others = [s.learner(table=name) for name in more.get("tables", {})]
            for first in range(0, 80, 8):
                actor.push_trajectory(content(range(first, first + 8)))
                for other in others:
                    other.pull()
                info = learner.pull().info
                seen.append([info.keys.tolist(), info.probability.tolist(), np.asarray(info.weight).tolist()])
                for name in more.get("tables", {}):
                    s.sample(3, table=name)
            return seen

    alone = draws(1)
    assert draws(1) == alone
    assert draws(1, tables={"a": conduit.Table(sampler, most), "b": conduit.Table(conduit.MaxHeap())}) == alone
    if not isinstance(sampler, conduit.Fifo):
        assert draws(2) != alone


def test_a_push_s_priority_reaches_every_table_and_an_update_its_own():
    tables = {"high": conduit.Table(conduit.MaxHeap()), "low": conduit.Table(conduit.MinHeap())}
    with store(capacity=6, batch_size=1, sampler=conduit.Prioritized(alpha=1.0, eps=0.0), tables=tables) as s:
        s.actor().push_trajectory(content(range(6)), priority=np.array([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]))

        def known(name: str) -> dict[int, float]:
            infos = [s.sample(6, table=name).info for _ in range(30)]
            return {
                key: raw for info in infos for key, raw in zip(info.keys.tolist(), info.priority.tolist(), strict=True)
            }

        pushed = {0: 3.0, 1: 1.0, 2: 2.0, 3: 6.0, 4: 5.0, 5: 4.0}
        assert known("main") == known("high") == known("low") == pushed
        s.update_priorities(np.array([1]), np.array([9.0]), table="high")
        assert (known("main"), known("high"), known("low")) == (pushed, {**pushed, 1: 9.0}, pushed)
        s.update_priorities(np.array([3]), np.array([0.5]))
        assert (known("main"), known("high"), known("low")) == ({**pushed, 3: 0.5}, {**pushed, 1: 9.0}, pushed)
        assert s.sample(1, table="high").info.keys.tolist() == [1]
        assert s.sample(1, table="low").info.keys.tolist() == [1]


# Items as a queue

LENGTHS = [3, 1, 4, 2, 6, 5, 3, 2]
ITEMS: dict[str, tuple[Any, list[int]]] = {
    "rows": (conduit.Row(), list(range(26))),
    "n steps": (conduit.NStep(2, 0.9, from_last=("wide",)), list(range(26))),
    "trajectories": (conduit.Trajectory(), [0, 3, 4, 8, 10, 16, 21, 24]),
    "sequences": (conduit.Sequence(2, period=2), [0, 4, 6, 8, 10, 12, 14, 16, 18, 21, 24]),
    "groups": (conduit.Group(4, by="prompt"), [0, 2, 8, 10, 16, 18]),
}
"""What each item begins at, in episodes of `LENGTHS`; groups of 4 of `prompt_of`."""


def prompt_of(keys: np.ndarray) -> np.ndarray:
    """Two groups of four at a time, two rows of each in turn: 0 0 1 1 0 0 1 1 2 2 3 3 …"""
    return keys // 8 * 2 + keys // 2 % 2


def push_episodes(actor: conduit.Actor) -> Any:
    first = 0
    for length in LENGTHS:
        terminated = np.arange(length) == length - 1
        keys = np.arange(first, first + length)
        leaves = {"terminated": terminated, "prompt": prompt_of(keys).astype(np.int32)}
        yield actor.push_trajectory(episode(first, length, **leaves), priority=None)
        first += length


def whole(batch: conduit.Batch, start: int) -> list[int]:
    """The ids of one entry's real rows; each follows the other as it should."""
    found = np.asarray(batch.data["id"])[0]
    if found.ndim == 0:
        return [int(found)]
    if batch.info.mask is not None:
        found = found[np.asarray(batch.info.mask)[0]]
    assert found[0] == start
    return found.tolist()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("sampler", [conduit.Fifo(), conduit.Lifo(), conduit.MaxHeap(), conduit.MinHeap()], ids=repr)
def test_as_a_queue_every_whole_item_comes_once_and_in_order(sampler, kind, overlap):
    item, starts = ITEMS[kind]
    schedule = conduit.Schedule(overlap_del=overlap)
    settings = {"sampler": sampler, "max_times_sampled": 1, "schedule": schedule, "capacity": 32, "batch_size": 1}
    with store(item=item, **settings) as s:
        list(push_episodes(s.actor()))
        if sampler.prioritized:
            s.update_priorities(np.arange(26), priority_of(np.arange(26)))
        assert s.info()["drawable_rows"] == len(starts)
        sign = {conduit.MaxHeap: -1, conduit.MinHeap: 1}.get(type(sampler), 0)
        order = sorted(starts, key=lambda key: (sign * float(priority_of(key)), key))
        if isinstance(sampler, conduit.Lifo):
            order.reverse()
        learner, rows = s.learner(), []
        for start in order:
            batch = learner.pull()
            assert batch.info.keys.tolist() == [start]
            assert batch.info.times_sampled is not None
            assert batch.info.times_sampled.tolist() == [1]
            rows += whole(batch, start)
        with pytest.raises(WaitTimeout):
            learner.pull(timeout_s=0.0)
        if kind == "trajectories":
            assert sorted(rows) == list(range(26)), "every row is in one"
        elif kind == "groups":
            assert sorted(rows) == list(range(24)), "the last group isn't whole"


@pytest.mark.parametrize("kind", ITEMS)
def test_items_that_are_pulled_as_they_come_are_all_there(kind):
    item, starts = ITEMS[kind]
    with store(item=item, sampler=conduit.Fifo(), max_times_sampled=1, capacity=12, batch_size=1) as s:
        learner, seen = s.learner(), []
        for _ in push_episodes(s.actor()):
            while s.can_sample():
                batch = learner.pull()
                seen += batch.info.keys.tolist()
                whole(batch, seen[-1])
        assert seen == starts


def test_tables_of_different_samplers_over_the_same_n_step_rows():
    tables = {
        "queue": conduit.Table(conduit.Fifo(), max_times_sampled=1),
        "newest": conduit.Table(conduit.Lifo()),
        "twice": conduit.Table(conduit.Uniform(), max_times_sampled=2),
    }
    item = conduit.NStep(3, 1.0, from_last=("wide",))
    with store(item=item, sampler=conduit.WithoutReplacement(), tables=tables, capacity=20, batch_size=2) as s:
        actor, key, queue, times = s.actor(), 0, [], dict[int, int]()
        for rows in (5, 4, 9, 3, 7, 2, 6, 8):
            actor.push_trajectory(episode(key, rows))
            key += rows
            # The last two of an open episode lack what comes after them.
            starts = range(max(0, key - 20), key - 2)
            assert s.info()["drawable_rows"] == len(starts)
            assert set(s.sample(len(starts)).info.keys.tolist()) == set(starts)
            assert s.sample(2, table="newest").info.keys.tolist() == [starts[-1], starts[-2]]
            queue += s.sample(2, table="queue").info.keys.tolist()
            assert queue[-2:] == [each for each in starts if each not in queue[:-2]][:2]
            while s.can_sample(table="twice"):
                batch = s.sample(2, table="twice")
                for each in batch.info.keys.tolist():
                    times[each] = times.get(each, 0) + 1
                    assert each in starts
                assert np.asarray(batch.data["reward"]).tolist() == [3.0, 3.0]
            assert max(times.values()) <= 2
            assert sum(2 - times.get(each, 0) for each in starts) < 4


# Samplers of the user's own

SCHEDULES = [None, conduit.Schedule(overlap_del=True), conduit.Schedule(overlap_ing=True, overlap_del=True)]


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("remover", [None, conduit.MinHeap()], ids=repr)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_sampler_of_one_s_own_draws_and_goes_on_from_a_checkpoint(schedule, remover, most, tmp_path):
    sampler = Planted(Right)
    with store(sampler=sampler, capacity=12, max_times_sampled=most, remover=remover, schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()

        def goes_on(actor: conduit.Actor, learner: conduit.Learner, first: int, rounds: int) -> list[Any]:
            seen = []
            for start in range(first, first + 4 * rounds, 4):
                actor.push_trajectory(content(range(start, start + 4)), priority=np.array([1.0, 0.0, 2.0, 3.0]))
                batch = learner.pull()
                assert_rows(batch.data, batch.info.keys)
                assert (batch.info.keys % 4 != 1).all(), "priority 0"
                seen.append([batch.info.keys.tolist(), batch.info.probability.tolist(), batch.info.priority.tolist()])
            return seen

        actor.push_trajectory(content(range(12)), priority=np.array([1.0, 0.0, 2.0, 3.0] * 3))
        goes_on(actor, learner, 12, 5)
        s.save(tmp_path / "saved")
        with pytest.raises(SettingError, match=r"Right\(\).*your own: give it again"):
            conduit.Store.restore(tmp_path / "saved")
        with conduit.Store.restore(tmp_path / "saved", sampler=sampler, lanes="continue") as restored:
            again = goes_on(restored.actor(), restored.learner(), 32, 6)
        assert again == goes_on(actor, learner, 32, 6)


def spoiled(**fields: Any) -> type[Right]:
    class Spoiled(Right):
        def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
            draw = super().draw(number, rows, window, stream)
            for name, make in fields.items():
                setattr(draw, name, make(draw.keys))
            return draw

    return Spoiled


class Raises(Right):
    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        raise ValueError("a bug of mine")


class GivesNothing(Right):
    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Any:
        return None


class Endless(Right):
    """Always says that it can."""

    def missing(self, window: Window, rows: int, number: int) -> str | None:
        return None

    def draw(self, number: int, rows: int, window: Window, stream: int = 0) -> Draw:
        return Draw(np.zeros(rows, np.int64), 1.0)


WRONG: dict[str, tuple[type[Right], str]] = {
    "dead": (spoiled(keys=lambda keys: keys - 100), r"row -\d+ isn't live; live rows are \d+ to \d+"),
    "to come": (spoiled(keys=lambda keys: keys + 8), r"row 1\d isn't live"),
    "too few": (spoiled(keys=lambda keys: keys[1:]), r"its keys are int64\[3\]; expected int64\[4\]"),
    "two axes": (spoiled(keys=lambda keys: keys[None]), r"int64\[1, 4\]; expected int64\[4\]"),
    "floats": (spoiled(keys=lambda keys: keys.astype(float)), r"its keys are float64\[4\]"),
    "small": (spoiled(keys=lambda keys: keys.astype(np.int32)), r"its keys are int32\[4\]"),
    "a list": (spoiled(keys=lambda keys: keys.tolist()), r"its keys are a list"),
    "no draw": (GivesNothing, r"it gave a NoneType; expected a Draw"),
    "NaN weights": (spoiled(weight=lambda keys: keys * np.nan), r"its weights aren't finite numbers above 0"),
    "weights of 0": (spoiled(weight=lambda keys: keys * 0.0), r"its weights aren't finite"),
    "complex weights": (spoiled(weight=lambda keys: keys * 1j + 1), r"its weights aren't finite"),
    "a list of weights": (spoiled(weight=lambda keys: [1.0] * len(keys)), r"its weights aren't finite"),
    "one weight": (spoiled(weight=lambda keys: 1.0), r"its weights aren't finite"),
    "NaN": (spoiled(probability=lambda keys: np.nan), r"its probability is neither a finite number nor an array"),
    "no probability": (spoiled(probability=lambda keys: None), r"its probability is neither"),
    "a text": (spoiled(priority=lambda keys: "high"), r"its priority is neither"),
    "a column": (spoiled(priority=lambda keys: np.ones((len(keys), 1))), r"its priority is neither"),
    "raises": (Raises, r"ValueError: a bug of mine"),
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_sampler_reaches_pull_and_push_and_the_store_can_be_closed(wrong, most, schedule):
    kind, message = WRONG[wrong]
    text = rf"{kind.__name__}\(\) of table 'main' failed to draw batch 0: .*{message}.*check_sampler"
    with no_thread_left(), store(sampler=Planted(kind), capacity=8, max_times_sampled=most, schedule=schedule) as s:
        actor, learner = s.actor(), s.learner()
        actor.push_trajectory(content(range(8)))
        actor.push_trajectory(content(range(8, 12)))
        for call in (learner.pull, lambda: actor.push_trajectory(content(range(4))), learner.pull, lambda: s.sample(2)):
            with pytest.raises(SamplerError, match=text):
                call()


def test_a_row_that_was_drawn_as_often_as_it_may_be_is_dead_to_this_table():
    with store(sampler=Planted(Endless), capacity=8, max_times_sampled=2, batch_size=2) as s:
        s.actor().push_trajectory(content(range(8)))
        learner = s.learner()
        assert learner.pull().info.keys.tolist() == [0, 0]
        with pytest.raises(SamplerError, match="row 0 can't be drawn: it is excluded"):
            learner.pull()


@pytest.mark.parametrize("said", [ValueError("a bug of mine"), "", 3, True], ids=repr)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_sampler_that_can_not_say_what_is_missing_is_named_and_nothing_hangs(said, schedule):
    class Dumb(Right):
        def missing(self, window: Window, rows: int, number: int) -> Any:
            if window.stop < 6:
                return super().missing(window, rows, number)
            if isinstance(said, Exception):
                raise said
            return said

    with no_thread_left(), store(sampler=Planted(Dumb), capacity=8, schedule=schedule, timeout_s=5.0) as s:
        actor, learner = s.actor(), s.learner()
        actor.push_trajectory(content(range(3)))
        with pytest.raises(WaitTimeout):
            learner.pull(timeout_s=0.0)

        def push_and_pull() -> None:
            """Whoever asks the sampler first hears of it."""
            actor.push_trajectory(content(range(3, 8)))
            learner.pull()

        with pytest.raises(SamplerError, match=r"Dumb\(\) of table 'main' failed to say what is missing for batch 0"):
            push_and_pull()


def test_a_sampler_s_trouble_with_rows_or_priorities_stops_the_store_and_is_named():
    class Fragile(Right):
        def update(self, keys: Any, priority: Any) -> None:
            raise KeyError("nope")

    with store(sampler=Planted(Fragile), capacity=8) as s:
        actor = s.actor()
        actor.push_trajectory(content(range(8)))
        s.update_priorities(np.array([1]), np.array([2.0]))
        with pytest.raises(
            SamplerError, match=r"Fragile\(\) of table 'main' failed to update priorities: KeyError: 'nope'"
        ):
            actor.push_trajectory(content(range(8, 9)))


class Startless:
    """Its start() gives something else."""

    prioritized = False

    def __init__(self, gives: Any) -> None:
        self.gives = gives

    def start(self, capacity: int, seed: int, starts: Any = None) -> Any:
        return self.gives

    def __repr__(self) -> str:
        return "Startless()"


@pytest.mark.parametrize(
    ("gives", "lacks"),
    [
        (object(), "highest_priority, insert, admit, exclude, missing, draw, update, state, load"),
        (None, "insert"),
        (conduit.Fifo(), "insert"),
    ],
    ids=repr,
)
def test_a_start_that_gives_no_sampler_is_refused_with_what_it_lacks(gives, lacks):
    with (
        no_thread_left(),
        pytest.raises(
            SamplerError, match=rf"Startless\(\) of table 'main': its start\(\) gave .*, which has no .*{lacks}"
        ),
    ):
        store(sampler=Startless(gives))


def test_a_table_without_priorities_takes_none():
    with store(tables={"plain": conduit.Table(conduit.Fifo())}, sampler=conduit.Prioritized()) as s:
        s.actor().push_trajectory(content(range(8)))
        with pytest.raises(PriorityError, match="the sampler of table 'plain' has no priorities"):
            s.update_priorities(np.array([1]), np.array([2.0]), table="plain")
        with pytest.raises(SettingError, match="table='other': the store's tables are 'main', 'plain'"):
            s.update_priorities(np.array([1]), np.array([2.0]), table="other")
