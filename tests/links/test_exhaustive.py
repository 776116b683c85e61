"""Tiny rings, tried exhaustively: every draw of every store is what the reference says, after every push.

A scene is a capacity, a number of lanes and two episodes (length and how it ends) that come again and again until the ring has
wrapped. Each test takes one kind of entry through one in 180 of the scenes; the environment's CONDUIT_SWEEP may be a smaller
number: 20 takes minutes, 1, which is every scene for every kind, hours."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from conduit.errors import SettingError
from tests.links.reference import (
    CUT,
    OPEN,
    TERMINATED,
    TRUNCATED,
    Derive,
    Item,
    Next,
    NStep,
    Row,
    Sequence,
    Stack,
    Trajectory,
)
from tests.links.twin import FINAL, Twin

LEFT = "left"
"""Not ended by a row: the actor is closed after it, and another goes on."""
KINDS = (TERMINATED, TERMINATED + FINAL, TRUNCATED, TRUNCATED + FINAL, LEFT)

ITEMS: dict[str, Item] = {
    "row": Row(),
    "1-step": NStep(1),
    "2-step": NStep(2),
    "3-step": NStep(3),
    "1..3-step": NStep(range(1, 4)),
    "2,4-step": NStep(range(2, 5, 2)),
    "sequence 1": Sequence(1),
    "sequence 2": Sequence(2),
    "sequence 3, period 2": Sequence(3, period=2),
    "sequence 2, burn-in 1": Sequence(2, burn_in=1),
    "sequence 2, burn-in 3, repeated": Sequence(2, burn_in=3, pad="repeat"),
    "sequence 3, padded": Sequence(3, pad="zero"),
    "sequence 2, stride 2": Sequence(2, stride=2),
    "sequence 3, all of it": Sequence(3, period=3, burn_in=2, stride=2, pad="repeat"),
    "sequence 2, burn-in 2, stride 2, padded": Sequence(2, burn_in=2, stride=2, pad="zero"),
    "trajectory": Trajectory(),
    "trajectory, threes": Trajectory(3),
}
DERIVES: dict[str, Derive] = {
    "nothing": {},
    "next": {"next_obs": Next("obs")},
    "stack": {"obs": Stack("obs", 3)},
    "next of stack": {"obs": Stack("obs", 3), "next_obs": Next("obs")},
    "much": {
        "frames": Stack("obs", 2, "zero"),
        "after": Next("frames"),
        "next_obs": Next("obs"),
        "rewards": Stack("reward", 3, "zero"),
    },
}
EPISODES = tuple(itertools.product((1, 2, 3, 5), KINDS))


@dataclass(frozen=True)
class Scene:
    capacity: int
    lanes: int
    episodes: tuple[tuple[int, str], ...]


SCENES = [
    Scene(capacity, lanes, (one, other))
    for capacity, lanes, one, other in itertools.product((2, 3, 4, 5, 7), (1, 2, 3), EPISODES, EPISODES)
]
CONFIGURATIONS = [(item, derive) for item in ITEMS for derive in DERIVES]
SHARE = int(os.environ.get("CONDUIT_SWEEP", "180"))


def configured(item: str, derive: str, capacity: int) -> Twin:
    """NStep has to have some observation of its last row, derived or stored."""
    chosen = ITEMS[item]
    if isinstance(chosen, NStep) and derive in ("nothing", "stack"):
        chosen = NStep(chosen.n, from_last=("after", "terminated", "truncated"))
    return Twin(chosen, DERIVES[derive], capacity)


def is_too_long(item: str, capacity: int) -> bool:
    chosen = ITEMS[item]
    return isinstance(chosen, Sequence) and chosen.pad is None and (chosen.length - 1) * chosen.stride + 1 > capacity


def endings(scene: Scene) -> Iterator[list[str]]:
    """By step, how each lane's row ends. Lane i starts with the episode i % 2."""
    lanes = []
    for lane in range(scene.lanes):
        episodes = scene.episodes if lane % 2 == 0 else scene.episodes[::-1]
        whole = [kind if i == length - 1 else OPEN for length, kind in episodes for i in range(length)]
        lanes.append(itertools.cycle(whole))
    return ([next(lane) for lane in lanes] for _ in itertools.count())


def play(twin: Twin, scene: Scene) -> None:
    actor = twin.open(scene.lanes)
    at_least = sum(length for length, _ in scene.episodes) + 2
    for number, kinds in enumerate(endings(scene)):
        ends = [OPEN if kind == LEFT else kind.removesuffix(FINAL) for kind in kinds]
        twin.push(actor, ends, with_final=any(kind.endswith(FINAL) for kind in kinds))
        twin.check()
        if LEFT in kinds:
            twin.close(actor)
            twin.check()
            actor = twin.open(scene.lanes)
        if number >= at_least and len(twin.model.rows) > 2 * scene.capacity + scene.lanes:
            break
    twin.close(actor)
    twin.check()


def share(item: str, derive: str, of: int) -> list[Scene]:
    """One in `of` of the scenes, others for each configuration."""
    chosen = list(SCENES)
    random.Random(f"{item}/{derive}").shuffle(chosen)
    return chosen[::of]


@pytest.mark.timeout(120 if SHARE >= 180 else 0)
@pytest.mark.parametrize(("item", "derive"), CONFIGURATIONS)
def test_every_entry_is_what_the_reference_says(item, derive):
    for scene in share(item, derive, SHARE):
        if is_too_long(item, scene.capacity):
            with pytest.raises(SettingError, match="could never be drawn"):
                configured(item, derive, scene.capacity)
            continue
        with configured(item, derive, scene.capacity) as twin:
            play(twin, scene)


def test_there_are_thousands_of_scenes_and_each_capacity_lanes_length_and_end_is_among_those_tried():
    assert (len(SCENES), len(CONFIGURATIONS)) == (6000, 85)
    tried = [scene for each in CONFIGURATIONS for scene in share(*each, SHARE)]
    assert len(tried) >= 2800
    for configuration in CONFIGURATIONS:
        few = share(*configuration, SHARE)
        assert {scene.capacity for scene in few} == {2, 3, 4, 5, 7}
        assert {scene.lanes for scene in few} == {1, 2, 3}
        assert {kind for scene in few for _, kind in scene.episodes} == set(KINDS)
        assert {length for scene in few for length, _ in scene.episodes} == {1, 2, 3, 5}
    assert len({(scene.capacity, scene.lanes, *pair) for scene in tried for pair in scene.episodes}) == 15 * 20


# Pushes of all sorts


def random_play(twin: Twin, seed: int, pushes: int = 24) -> None:
    """Steps with invalid lanes, trajectories, several actors that come and go, interleaved."""
    chance = random.Random(seed)
    actors = [twin.open(lanes) for lanes in (1, 3)]
    for _ in range(pushes):
        actor = chance.choice(actors)
        lanes = twin.actors[actor].lanes
        what = chance.random()
        if what < 0.12:
            twin.close(actor)
            actors[actors.index(actor)] = twin.open(chance.choice((1, 2, 3)))
        elif what < 0.4:
            length = chance.choice((1, 2, 3, 4, twin.model.capacity + 2))
            end = chance.choice((OPEN, OPEN, TERMINATED, TRUNCATED, CUT))
            with_final = chance.random() < 0.5
            version = chance.randrange(5)
            twin.push_trajectory(actor, chance.randrange(lanes), length, end, with_final, version=version)
        else:
            ends = chance.choices((OPEN, TERMINATED, TRUNCATED, None), (10, 2, 3, 3), k=lanes)
            twin.push(actor, ends, with_final=chance.random() < 0.5)
        twin.check()


PLAYS = 8


@pytest.mark.parametrize(("item", "derive"), CONFIGURATIONS)
def test_steps_trajectories_and_actors_that_come_and_go_mix(item, derive):
    for number in range(PLAYS):
        with configured(item, derive, (3, 4, 6, 9, 13)[number % 5]) as twin:
            random_play(twin, hash_of(item, derive, number))


def hash_of(*parts: object) -> int:
    """The same in every run, unlike `hash`."""
    return random.Random("/".join(map(str, parts))).getrandbits(32)
