"""The plays that `check_sampler` tries: corner cases, tiny rings exhaustively, and anything at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from conduit.core.starts import Starts
from conduit.errors import SettingError
from conduit.testing.model import NONE, Floats, Keys, Rows, Told
from conduit.testing.plays import Play, Referee
from conduit.testing.wandering import Wanderer

_TINY: dict[Told, int] = {"all": 7, "first": 5}
"""Slots of the largest ring that is tried exhaustively. Without exclusions, "step by step" is the same as "first"."""

_Step = Callable[[Play, bool], None]


def scenarios(referee: Referee, seed: int, examples: int) -> Iterator[Callable[[], None]]:
    """All that is to be played, the shortest first."""
    yield partial(_refusals, referee, seed)
    yield partial(_zero_priority, referee, seed)
    every: tuple[Told, ...] = ("all",) if "Starts" in referee.refused else ("all", "first", "step by step")
    for scenario, told in product(_SCENARIOS, every):
        yield partial(scenario, referee, seed, told)
    for example in range(examples):
        yield partial(_anything, referee, seed, example, every, scribble=example % 4 == 2)


def _refusals(referee: Referee, seed: int) -> None:
    """Finds out what the sampler doesn't take, and says so as a setting is refused."""
    sampling, refused = referee.sampling, referee.refused
    try:
        sampling.start(4, seed, Starts(4))
    except SettingError as error:
        refused["Starts"] = str(error)
    except Exception:
        return  # A play will show it.
    try:
        sampler = sampling.start(4, seed, None)
        sampler.insert(0, 4, None)
        sampler.insert(1, 1, None)
    except SettingError as error:
        refused["slots"] = str(error)
    except Exception:
        return


def _zero_priority(referee: Referee, seed: int) -> None:
    """Finds out whether priority 0 disables rows; if so, other rows aren't, and an update helps."""
    if not referee.sampling.prioritized:
        return
    for rows in (1, 2, 3):
        play = Play(referee, "all disabled", 3, seed)
        play.insert(rows, np.zeros(rows))
        referee.zero_disables = play.draw(1) is None
        play.draw(rows)
        play.update(np.array([rows - 1]), np.array([2.0]))
        for number in range(1, 12):
            play.draw(rows, number)
        play.insert(1, np.array([3.0]))
        play.draw(2, 12)
        play.update(play.rows.live, np.zeros(len(play.rows.live)))
        play.draw(1, 13)
        play.insert(3)
        play.draw(3, 14)


def _one_row(referee: Referee, seed: int, told: Told) -> None:
    for capacity in (1, 5):
        play = Play(referee, "one row", capacity, seed, told, twin=True)
        play.ask(1)
        for number in range(3 * capacity):
            if number % 3 == 1:
                play.restore()
            play.insert(1, exclude=play.rows.drawable if capacity > 1 else NONE)
            play.ask(2, number)
            play.draw(1, number)
            play.draw(1, number, stream=1)


def _tiny_rings(referee: Referee, seed: int, told: Told) -> None:
    """Three inserts of any sizes, from the first row over a full ring to several times around it."""
    for capacity in range(1, _TINY.get(told, 0) + 1):
        for sizes in product((*range(1, capacity + 1), capacity + 2), repeat=3):
            play = Play(referee, "tiny rings", capacity, seed, told)
            for number, size in enumerate(sizes):
                stop = play.rows.window.stop + size
                play.insert(size, _distinct(referee, stop, size), admit=_all_but_the_newest(play.rows, size))
                drawable = play.rows.count
                play.ask(drawable + 1, number)
                if drawable:
                    play.draw(drawable, number)
                if drawable > 1:
                    play.draw(1, number, stream=1)


def _all_disabled(referee: Referee, seed: int, told: Told) -> None:
    for capacity, rows in ((1, 1), (3, 2), (3, 3), (4, 6)):
        play = Play(referee, "all disabled", capacity, seed, told)
        play.insert(rows, admit=NONE)
        if told != "all":
            play.ask(1)
            play.admit(play.rows.waiting)
        play.draw(min(rows, capacity))
        play.exclude(play.rows.drawable)
        play.ask(1)
        if referee.sampling.prioritized:
            play.update(play.rows.live, np.full(len(play.rows.live), 2.0))
            play.ask(1)
        play.insert(1)
        play.draw(1, 1)
        play.ask(2)


def _removal_while_staged(referee: Referee, seed: int, told: Told) -> None:
    """Of a batch, some rows are excluded and some give their slots to others before its priorities come."""
    for capacity in range(1, 5):
        for excluded, inserted in product(product((False, True), repeat=capacity), range(capacity + 1)):
            play = Play(referee, "removal while staged", capacity, seed, told)
            play.insert(capacity, _distinct(referee, capacity, capacity))
            drawn = play.draw(capacity)
            assert drawn is not None, "or `ask` had failed"
            keys = np.unique(drawn.keys)
            gone = keys[np.array(excluded)[: len(keys)]]
            if len(gone):
                play.exclude(gone)
            if inserted:
                play.insert(inserted)
            if referee.sampling.prioritized:
                live = drawn.keys[drawn.keys >= play.rows.window.first]
                play.update(live, _raised(live))
            if play.rows.count:
                play.draw(play.rows.count, 1)


def _updates(referee: Referee, seed: int, told: Told) -> None:
    if not referee.sampling.prioritized:
        return
    play = Play(referee, "updates", 4, seed, told, twin=True)
    highest = play.highest_priority
    play.insert(3)
    play.update(NONE, np.zeros(0))
    for number, (keys, priority) in enumerate(
        [
            ([0, 1, 0], [9.0, 5.0, 2.0]),
            ([2, 2, 2, 2], [1.0, 50.0, 2.0, 30.0]),
            ([1, 0], [5e-324, highest]),
            ([1], [highest]),
            ([0, 1, 2], [5e-324, 5e-324, 5e-324]),
        ]
    ):
        play.update(np.array(keys), np.array(priority))
        play.draw(3, number)
    play.insert(2, np.array([np.nan, 4.0]), admit=np.array([3]))
    play.exclude(np.array([2]))
    play.update(np.array([2, 4, 1]), np.array([800.0, 700.0, 1.0]))
    play.draw(2, 7)
    play.insert(3)
    play.draw(3, 8)


def _drained(referee: Referee, seed: int, told: Told) -> None:
    """What was drawn is excluded at once, as with `max_times_sampled=1`: each row comes once, and all come."""
    for capacity, in_slots in product((1, 3, 5), (False, True)):
        if in_slots and (told == "first" or "slots" in referee.refused):
            continue
        play = Play(referee, "drained", capacity, seed, told, in_slots=in_slots)
        for number in range(4 * capacity):
            if number < capacity or not in_slots:
                play.insert(1)
            else:
                slot = 3 * number % capacity
                play.insert(1, at=slot, exclude=np.intersect1d(play.rows.drawable, [slot]))
            if number % 3 == 2:
                while (count := play.rows.count) > number % 2:
                    drawn = play.draw(1 + (count > 1), 10 * number + count)
                    assert drawn is not None, "or `ask` had failed"
                    play.exclude(np.unique(drawn.keys))
                play.ask(2)


def _restored(referee: Referee, seed: int, told: Told) -> None:
    """One play, once for each place in it at which the state is saved and loaded."""
    for capacity in (1, 2, 4):
        saved_at, places = 0, 1
        while saved_at < places:
            play = Play(referee, "restored", capacity, seed, told, twin=True)
            for places, step in enumerate(_STEPS):
                if places == saved_at:
                    play.restore()
                step(play, referee.sampling.prioritized)
                if places >= saved_at and play.rows.count:
                    play.draw(1, 2 * places)
                    play.draw(play.rows.count, 2 * places + 1, stream=1)
            saved_at += 1


def _insert(rows: int) -> _Step:
    return lambda play, prioritized: play.insert(rows, admit=_all_but_the_newest(play.rows, rows))


def _update(play: Play, prioritized: bool) -> None:
    if prioritized:
        play.update(play.rows.live, _raised(play.rows.live))


def _exclude(play: Play, prioritized: bool) -> None:
    play.exclude(play.rows.drawable[:1])


def _draw(play: Play, prioritized: bool) -> None:
    if play.rows.count:
        play.draw(play.rows.count)


_STEPS = (_insert(2), _update, _draw, _insert(2), _exclude, _draw, _insert(1), _update, _insert(4), _insert(1))


def _moved(referee: Referee, seed: int, told: Told) -> None:
    """The state of a ring goes into another one, which has room for some of the rows."""
    for capacity in range(1, 10):
        for kept in range(min(capacity, 4) + 1):
            play = Play(referee, "moved", 4, seed, told, twin=True)
            play.insert(3, _distinct(referee, 3, 3))
            play.insert(3, admit=_all_but_the_newest(play.rows, 3))
            play.draw(2)
            play.exclude(play.rows.drawable[:1])
            play.move(capacity, kept)
            for number in range(1, 4):
                drawable = play.rows.count
                play.ask(drawable + 1)
                if drawable:
                    play.draw(drawable, number)
                if number == 2 and told != "all":
                    play.admit(play.rows.waiting)
                if number == 2 and referee.sampling.prioritized:
                    play.update(play.rows.live, _raised(play.rows.live))
                play.insert(1 + (capacity > 2))


_SCENARIOS = (_one_row, _all_disabled, _updates, _removal_while_staged, _moved, _restored, _tiny_rings, _drained)


def _anything(referee: Referee, seed: int, example: int, every: tuple[Told, ...], scribble: bool) -> None:
    """A random play, longer ones later."""
    dice = np.random.default_rng([seed, example])
    told, in_slots = every[example % len(every)], example % 4 == 3 and "slots" not in referee.refused
    if in_slots and told == "first":
        told = "step by step"
    capacity = int(dice.choice([12, 33, 64, 5000]) if example % 5 == 4 else dice.integers(1, 8))
    # A table's seed has its name in it.
    own_seed = int.from_bytes(b"recent") << 64 | seed if example % 7 == 3 else seed
    scenario = "anything, scribbled on" if scribble else "anything"
    play = Play(referee, scenario, capacity, own_seed, told, in_slots=in_slots, twin=True, scribble=scribble)
    Wanderer(play, dice, referee.sampling.prioritized).wander(12 + example // 2)


def _distinct(referee: Referee, stop: int, rows: int) -> Floats | None:
    """Priorities for rows up to `stop` that tell neighbours, and generations, apart; none every other time."""
    if not referee.sampling.prioritized or stop % 2:
        return None
    return (1 + np.arange(stop - rows, stop) % 11).astype(np.float64)


def _raised(keys: Keys) -> Floats:
    return (20 + keys).astype(np.float64)


def _all_but_the_newest(rows: Rows, count: int) -> Keys:
    """After `count` rows come: that whose successor came before, and all of these but the last."""
    stop = rows.window.stop + count
    keys = np.concatenate([rows.waiting, np.arange(rows.window.stop, stop - 1)])
    return keys[keys >= stop - rows.capacity]
