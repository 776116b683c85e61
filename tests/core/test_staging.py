"""The Inbox: who takes what is sealed, and when."""

from __future__ import annotations

import threading

import pytest

from conduit.clock import RealClock, VirtualClock
from conduit.core.halt import Halt
from conduit.core.order import Order
from conduit.core.staging import Group, Inbox
from conduit.errors import WaitTimeout


def inbox_of(clock, behind: bool = False, holds_back: bool = False) -> tuple[Inbox, Order]:
    halt = Halt(clock)
    order = Order(halt)
    return Inbox(halt, order, behind, holds_back), order


def seal(inbox: Inbox, deadline_s: float = 100.0) -> Group:
    group = Group([])
    with inbox.changed:
        inbox.wait_unclaimed(deadline_s)
        inbox.seal(group)
    return group


def test_in_line_a_group_is_its_sealers_and_its_turn_ends_with_the_claim():
    inbox, order = inbox_of(RealClock())
    group = seal(inbox)
    ran: list[int] = []
    order.act(lambda: ran.append(1))
    assert inbox.claimed() is group
    others: list[Group | None] = []
    thread = threading.Thread(target=lambda: others.append(inbox.claimed()))
    thread.start()
    thread.join()
    assert others == [None]
    assert (group.turn.begun if group.turn else None, ran) == (True, [])
    inbox.finish(group)
    assert inbox.claimed() is None
    assert ran == [1]


@pytest.mark.parametrize("seed", range(20))
def test_in_line_groups_are_sealed_one_at_a_time_first_come_first_served(seed):
    clock = VirtualClock(seed)

    def main() -> list[int]:
        inbox, _ = inbox_of(clock)
        served: list[int] = []

        def work(number: int) -> None:
            clock.sleep(0.25 * number)
            group = seal(inbox)
            clock.sleep(1.0)
            served.append(number)
            inbox.finish(group)

        tasks = [clock.spawn(lambda n=n: work(n), f"worker-{n}") for n in (3, 0, 2, 1)]
        assert all(task.join() for task in tasks)
        assert clock.now() == 4.0
        return served

    assert clock.run(main) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_what_could_not_be_sealed_in_time_takes_no_place_and_holds_nobody_up(seed):
    clock = VirtualClock(seed)

    def main() -> list[str]:
        inbox, order = inbox_of(clock)
        seen: list[str] = []
        group = seal(inbox)

        def late() -> None:
            with pytest.raises(WaitTimeout, match="this was not taken"):
                seal(inbox, 1.0)
            seen.append("timed out")

        def patient() -> None:
            clock.sleep(0.5)
            inbox.finish(seal(inbox))
            seen.append("sealed")

        tasks = [clock.spawn(late, "late"), clock.spawn(patient, "patient")]
        clock.sleep(2.0)
        inbox.finish(group)
        assert all(task.join() for task in tasks)
        assert order.enter().begun
        return seen

    assert clock.run(main) == ["timed out", "sealed"]


def test_behind_rollout_a_group_gets_its_place_when_the_next_is_sealed_or_a_learner_starves():
    inbox, _ = inbox_of(RealClock(), behind=True, holds_back=True)
    first, second = seal(inbox), seal(inbox)
    assert (first.turn is not None, second.turn) == (True, None)
    inbox.starving = 1
    third = seal(inbox)
    assert None not in (second.turn, third.turn)
    assert inbox.claimed() is None
    assert [inbox.wait_take() for _ in range(3)] == [first, second, third]


def test_units_are_pending_until_the_operator_takes_them():
    inbox, _ = inbox_of(RealClock(), behind=True)
    counts = []
    for units in (2, 3):
        with inbox.changed:
            inbox.seal(Group([None] * units))  # type: ignore[list-item]
        counts.append(inbox.pending_units)
    for _ in range(2):
        inbox.wait_take()
        counts.append(inbox.pending_units)
    assert counts == [2, 5, 3, 0]


@pytest.mark.parametrize("seed", range(20))
def test_who_ingests_serves_those_who_came_meanwhile_in_their_order_and_no_more(seed):
    clock = VirtualClock(seed)
    ingested: list[tuple[int, str]] = []
    returned: list[int] = []

    def main() -> None:
        inbox, _ = inbox_of(clock)

        def push(number: int, at_s: float) -> None:
            clock.sleep(at_s)
            mine = Group([])
            with inbox.changed:
                if not inbox.serves(lambda: inbox.seal(mine), 100.0):
                    inbox.seal(mine)
            while (group := inbox.claimed()) is not None:
                clock.sleep(1.0)
                ingested.append((group is mine, threading.current_thread().name))
                inbox.finish(group)
            returned.append(number)

        # 1, 2 and 3 come while 0 ingests its own group; 4 comes while 0 serves them, and is nobody's guest.
        tasks = [clock.spawn(lambda n=n, s=s: push(n, s), str(n)) for n, s in enumerate((0, 0.25, 0.5, 0.75, 2.5))]
        for task in tasks:
            task.join()
        assert inbox.claimed() is None

    clock.run(main)
    assert [name for _, name in ingested] == ["0", "0", "0", "0", "4"]
    assert [own for own, _ in ingested] == [True, False, False, False, True]
    assert sorted(returned) == [0, 1, 2, 3, 4]


def test_a_guest_whose_time_is_up_before_it_is_served_was_not_taken():
    clock = VirtualClock(0)

    def main() -> tuple[bool, list[str]]:
        inbox, _ = inbox_of(clock)
        said: list[str] = []
        taken: list[bool] = []

        def guest(deadline_s: float) -> None:
            with inbox.changed:
                try:
                    inbox.serves(lambda: taken.append(True), deadline_s)
                except WaitTimeout as error:
                    said.append(str(error))

        group = seal(inbox)
        task = clock.spawn(lambda: guest(1.0), "guest")
        clock.sleep(2.0)
        inbox.finish(group)
        task.join()
        return bool(taken), said

    taken, said = clock.run(main)
    assert not taken
    assert "not taken" in said[0]


def test_a_guest_whose_group_fails_hears_of_it_and_the_others_are_served():
    clock = VirtualClock(0)

    def main() -> list[object]:
        inbox, _ = inbox_of(clock)
        heard: list[object] = [None, None]

        def guest(number: int) -> None:
            clock.sleep(0.25 * (number + 1))
            with inbox.changed:
                try:
                    heard[number] = inbox.serves(lambda: inbox.seal(Group([])), 100.0)
                except ValueError as error:
                    heard[number] = str(error)

        group = seal(inbox)
        tasks = [clock.spawn(lambda n=n: guest(n), str(n)) for n in range(2)]
        clock.sleep(1.0)
        inbox.finish(group)
        for error in (ValueError("no such row"), None):
            group = inbox.claimed()
            assert group is not None
            assert inbox.is_guests(group)
            inbox.finish(group, error)
        for task in tasks:
            task.join()
        return heard

    assert clock.run(main) == ["no such row", True]
