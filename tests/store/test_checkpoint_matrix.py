"""A store that is saved and restored goes on as the one that wasn't, over samplers, limiters, modes, backends and all else."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import conduit
from conduit.clock import VirtualClock
from conduit.core.limiter import Limiter
from conduit.core.sampling import Sampling
from conduit.errors import SettingError
from tests.store.plays import HOOKS, Found, goes_on_alike, off_policy_events, on_policy_events
from tests.store.rows import BACKENDS, played

SAMPLERS: Mapping[str, Sampling] = {
    "uniform": conduit.Uniform(),
    "prioritized": conduit.Prioritized(alpha=0.7, beta=0.5),
    "fifo": conduit.Fifo(),
    "lifo": conduit.Lifo(),
    "max heap": conduit.MaxHeap(),
    "min heap": conduit.MinHeap(),
    "without replacement": conduit.WithoutReplacement(),
    "recency": conduit.Recency(half_life=5.0),
    "stratified": conduit.Stratified(),
}
LIMITERS: Mapping[str, Limiter | None] = {
    "none": None,
    "min size": conduit.MinSize(3),
    "ratio": conduit.SampleToInsertRatio(1.0, 3, 9.0),
    "balance": conduit.SampleToInsertRatio(1.0, 1, (0, 10)),
}
SCHEDULES: Mapping[str, conduit.Schedule | None] = {
    "in line": None,
    "ingestion behind": conduit.Schedule(overlap_ing=True),
    "delivery ahead": conduit.Schedule(overlap_del=True),
    "both": conduit.Schedule(overlap_ing=True, overlap_del=True),
    "3 pushes": conduit.Schedule(g_ing=3),
    "2 batches": conduit.Schedule(g_del=2),
    "2 batches ahead": conduit.Schedule(g_ing=2, overlap_del=True, g_del=2),
}
_NEXT = {"next_obs": conduit.Next("obs")}
CONTENTS: Mapping[str, dict[str, Any]] = {
    "rows": {},
    "nexts": {"derive": _NEXT},
    "stacks": {"derive": {"stack": conduit.Stack("obs", 3)}},
    "n steps": {"item": conduit.NStep(2, 0.9), "derive": _NEXT},
    "padded sequences": {"item": conduit.Sequence(3, burn_in=1, pad="zero")},
    "sequences": {"item": conduit.Sequence(2, period=2), "derive": _NEXT},
    "trajectories": {"item": conduit.Trajectory()},
    "groups": {"item": conduit.Group(2, by="prompt")},
}
REMOVERS: Mapping[str, Sampling | None] = {
    "oldest": None,
    "lifo": conduit.Lifo(),
    "uniform": conduit.Uniform(),
    "max heap": conduit.MaxHeap(),
    "min heap": conduit.MinHeap(),
}
TABLES: Mapping[str, dict[str, conduit.Table]] = {
    "one": {},
    "two": {"more": conduit.Table(conduit.Prioritized(), max_times_sampled=3)},
    "queue": {"more": conduit.Table.queue(10)},
}
TIMES = {"ever": None, "twice": 2}
PAIRS = [f"{one} to {other}" for one in BACKENDS for other in BACKENDS]
FACTORS: dict[str, Sequence[str]] = {
    "sampler": list(SAMPLERS),
    "limiter": list(LIMITERS),
    "pair": PAIRS,
    "schedule": list(SCHEDULES),
    "content": list(CONTENTS),
    "hooks": list(HOOKS),
    "remover": list(REMOVERS),
    "tables": list(TABLES),
    "times": list(TIMES),
}
Case = dict[str, str]
EVENTS = 50


def why_refused(case: Case) -> str:
    """What a message says where the descriptions say that there is no such store; empty where there is."""
    removed = case["remover"] != "oldest"
    if removed and case["content"] != "rows":
        return "rows that stand alone"
    if removed and case["sampler"] in ("recency", "stratified"):
        return "goes by age"
    if removed and case["tables"] == "queue":
        return "rows that other tables keep"
    return ""


def pairs_of(case: Case) -> set[tuple[str, str, str, str]]:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(FACTORS, 2)}


def all_cases() -> list[Case]:
    """Every sampler with every limiter on every pair of backends; the rest chosen so that every pair of any two comes."""
    chance = random.Random(0)
    wanted = {
        (a, one, b, other)
        for a, b in itertools.combinations(FACTORS, 2)
        for one, other in itertools.product(FACTORS[a], FACTORS[b])
    }
    cases: list[Case] = []
    rest = [name for name in FACTORS if name not in ("sampler", "limiter", "pair")]
    for sampler, limiter, pair in itertools.product(SAMPLERS, LIMITERS, PAIRS):
        tried = []
        for _ in range(24):
            case = {"sampler": sampler, "limiter": limiter, "pair": pair}
            case |= {name: chance.choice(FACTORS[name]) for name in rest}
            if chance.random() < 0.7:
                # What leaves in another order goes with little else.
                case["remover"] = "oldest"
            if not why_refused(case):
                tried.append(case)
        best = max(tried, key=lambda case: len(pairs_of(case) & wanted))
        wanted -= pairs_of(best)
        cases.append(best)
    left = [dict(zip((a, b), (one, other), strict=True)) for a, one, b, other in wanted]
    # What is left can't be, at least not in any way that was tried: each is told by name below.
    return [*cases, *({**_PLAIN, **each} for each in left)]


_PLAIN: Case = {name: levels[0] for name, levels in FACTORS.items()}
CASES = all_cases()


def settings_of(case: Case) -> dict[str, Any]:
    return {
        "mode": "off_policy",
        "capacity": 14,
        "batch_size": 2,
        "timeout_s": 5.0,
        "seed": 3,
        "sampler": SAMPLERS[case["sampler"]],
        "limiter": LIMITERS[case["limiter"]],
        "schedule": SCHEDULES[case["schedule"]],
        "remover": REMOVERS[case["remover"]],
        "tables": TABLES[case["tables"]] or None,
        "max_times_sampled": TIMES[case["times"]],
        **CONTENTS[case["content"]],
        **HOOKS[case["hooks"]],
    }


def compared(path: Any, number: int, case: Case, settings: dict[str, Any], events: Any, tables: Sequence[str]) -> Found:
    one, _, other = case["pair"].partition(" to ")
    chance = random.Random(number)
    saves = sorted(chance.sample(range(len(events) // 2), 2))

    def make(clock: VirtualClock) -> conduit.Store:
        return conduit.Store(backend=one, clock=clock, **settings)

    def again(clock: VirtualClock, at: str) -> conduit.Store:
        return conduit.Store.restore(at, backend=other, lanes="continue", clock=clock, **HOOKS[case["hooks"]])

    return played(number, goes_on_alike(str(path), make, again, events, saves, tables))


def assert_all_go_on(
    path: Any, cases: Sequence[tuple[int, Case]], play: Callable[[Any, int, Case], Found]
) -> Counter[str]:
    """Each case is played, and says which it was where it fails."""
    found: Counter[str] = Counter()
    for number, case in cases:
        try:
            seen = play(path / str(number), number, case)
        except BaseException as error:
            error.add_note(f"case {number}: {case}")
            raise
        found += Counter(plays=1, batches=seen.batches, waits=seen.refused, staged=seen.staged)
    print(dict(found))
    return found


def off_policy_play(path: Any, number: int, case: Case) -> Found:
    tables = ["main", *TABLES[case["tables"]]]
    events = off_policy_events(random.Random(number), EVENTS, tables)
    return compared(path, number, case, settings_of(case), events, tables)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_restored_store_goes_on_as_the_one_that_was_saved(sampler, tmp_path):
    cases = [
        (number, case) for number, case in enumerate(CASES) if case["sampler"] == sampler and not why_refused(case)
    ]
    found = assert_all_go_on(tmp_path, cases, off_policy_play)
    assert found["batches"] > 2 * found["plays"]
    assert found["staged"]


def test_what_can_not_be_is_refused_when_it_is_made():
    refused = [case for case in CASES if why_refused(case)]
    for case in refused:
        with pytest.raises(SettingError, match=why_refused(case)):
            conduit.Store(backend="reference", **settings_of(case))
    print(len(refused), "of", len(CASES))
    modes: dict[Any, dict[str, Any]] = {
        "on_policy": {"rollout_unit": 8},
        "bounded": {"capacity": 14, "max_staleness": 2},
    }
    bad: list[tuple[str, Any]] = [
        *(("sampler", sampler) for sampler in SAMPLERS.values()),
        *(("limiter", limiter) for limiter in LIMITERS.values() if limiter is not None),
        *(("remover", remover) for remover in REMOVERS.values() if remover is not None),
        ("tables", TABLES["two"]),
        ("max_times_sampled", 2),
    ]
    for (mode, needed), (name, value) in itertools.product(modes.items(), bad):
        settings: dict[str, Any] = {**needed, name: value}
        with pytest.raises(SettingError, match=name):
            conduit.Store(backend="reference", mode=mode, batch_size=2, **settings)


def test_every_two_settings_that_can_be_together_were_played_together():
    played_together = set().union(*(pairs_of(case) for case in CASES if not why_refused(case)))
    for a, b in itertools.combinations(FACTORS, 2):
        for one, other in itertools.product(FACTORS[a], FACTORS[b]):
            together = (a, one, b, other) in played_together
            assert together != bool(why_refused({**_PLAIN, a: one, b: other})), (a, one, b, other)


ON_POLICY_SCHEDULES = {
    "in line": None,
    "ingestion behind": conduit.Schedule(overlap_ing=True, g_ing=0.25),
    "delivery ahead": conduit.Schedule(overlap_del=True),
    "both": conduit.Schedule(overlap_ing=True, overlap_del=True),
    "half": conduit.Schedule(g_ing=0.5, g_del=0.5),
    "half ahead": conduit.Schedule(g_ing=0.5, overlap_del=True, g_del=0.5),
}


def on_policy_play(path: Any, number: int, case: Case) -> Found:
    settings = {"mode": "on_policy", "rollout_unit": 8, "batch_size": 2, "epochs": 2, "timeout_s": 5.0, "seed": 3}
    settings |= {"schedule": ON_POLICY_SCHEDULES[case["schedule"]], **HOOKS[case["hooks"]]}
    events = on_policy_events(random.Random(number), 4, 8, 4, case["hooks"] == "trajectory")
    return compared(path, number, case, settings, events, ["main"])


def test_on_policy_iterations_half_filled_and_half_delivered_go_on(tmp_path):
    each = itertools.product(PAIRS, ON_POLICY_SCHEDULES)
    hooks = itertools.cycle(HOOKS)
    cases = [{"pair": pair, "schedule": schedule, "hooks": next(hooks)} for pair, schedule in each]
    found = assert_all_go_on(tmp_path, list(enumerate(cases)), on_policy_play)
    assert found["staged"] > 50


def bounded_play(path: Any, number: int, case: Case) -> Found:
    settings = {"mode": "bounded", "capacity": 14, "batch_size": 2, "max_staleness": 1, "timeout_s": 5.0, "seed": 3}
    settings |= {"schedule": SCHEDULES[case["schedule"]], **CONTENTS[case["content"]], **HOOKS[case["hooks"]]}
    return compared(path, number, case, settings, off_policy_events(random.Random(number), EVENTS, ["main"]), ["main"])


def test_bounded_stores_go_on(tmp_path):
    hooks, contents = itertools.cycle(HOOKS), itertools.cycle(CONTENTS)
    cases = [
        {"pair": pair, "schedule": schedule, "hooks": next(hooks), "content": next(contents)}
        for pair, schedule in itertools.product(PAIRS, ("in line", "ingestion behind", "3 pushes"))
    ]
    assert_all_go_on(tmp_path, list(enumerate(cases)), bounded_play)
