"""Turns: publishing, drawing and updating take place in the order in which they were asked for."""

from __future__ import annotations

import pytest

from conduit.clock import RealClock, VirtualClock
from conduit.core.halt import Halt
from conduit.core.order import Order
from conduit.errors import ClosedError, WaitTimeout


class Door:
    """What a patient turn waits for."""

    def __init__(self) -> None:
        self.open = False

    def __call__(self) -> bool:
        return self.open


@pytest.fixture
def halt():
    return Halt(RealClock())


@pytest.fixture
def order(halt):
    return Order(halt)


def begun(*turns) -> list[bool]:
    return [turn.begun for turn in turns]


def test_turns_begin_one_at_a_time_in_the_order_they_were_entered(order):
    turns = [order.enter() for _ in range(3)]
    for number, turn in enumerate(turns):
        assert begun(*turns) == [i <= number for i in range(3)]
        with order.serve(turn, None, str) as served:
            assert served


def test_a_patient_turn_is_passed_over_until_it_is_ready_and_then_goes_first(order):
    door = Door()
    draw, rows, more = order.enter(door), order.enter(), order.enter()
    assert begun(draw, rows, more) == [False, True, False]
    assert draw.passed_over
    door.open = True
    order.leave(rows)
    assert begun(draw, rows, more) == [True, True, False]
    assert draw.ready_at_s is not None
    order.leave(draw)
    assert more.begun


def test_a_patient_turn_that_is_ready_is_not_passed_over(order):
    door = Door()
    door.open = True
    first, draw = order.enter(), order.enter(door)
    order.leave(first)
    assert (draw.begun, draw.passed_over, draw.ready_at_s) == (True, False, None)


def test_a_strict_turn_is_waited_for(order):
    first, second = order.enter(), order.enter()
    with (
        pytest.raises(WaitTimeout, match="because"),
        order.serve(second, order._halt.clock.now() + 0.01, lambda: "because"),
    ):
        pytest.fail("it isn't its turn")
    third = order.enter()
    order.leave(first)
    assert third.begun, "a turn that timed out is given up"


def test_settle_tells_begun_from_passed_over(order):
    assert order.settle(order.enter(), None)
    door = Door()
    patient = order.enter(door)
    order.leave(order._turns[0])
    assert not order.settle(patient, None)
    order.withdraw(patient)
    assert order.settle(patient, None)


def test_an_action_runs_in_its_turn_and_says_whether_that_was_at_once(order):
    done = []
    assert order.run_in_turn(lambda: done.append("now"))
    turn = order.enter()
    assert not order.run_in_turn(lambda: done.append("first"))
    assert not order.run_in_turn(lambda: done.append("second"))
    assert done == ["now"]
    order.leave(turn)
    assert done == ["now", "first", "second"]


def test_an_action_may_make_a_patient_turn_before_it_ready(order):
    door = Door()
    draw = order.enter(door)
    order.run_in_turn(lambda: setattr(door, "open", True))
    assert draw.begun


def test_a_withdrawn_turn_lets_the_next_begin_and_is_not_served(order):
    first, second, third = order.enter(), order.enter(), order.enter()
    order.withdraw(second)
    order.leave(first)
    assert third.begun
    with order.serve(second, None, str) as served:
        assert not served


def test_a_turn_that_has_begun_can_not_be_withdrawn(order):
    first, second = order.enter(), order.enter()
    order.withdraw(first)
    assert not second.begun
    with order.serve(first, None, str) as served:
        assert served
    assert second.begun


def test_a_block_that_raises_ends_its_turn(order):
    first, second = order.enter(), order.enter()
    with pytest.raises(KeyError), order.serve(first, None, str):
        raise KeyError
    assert second.begun


def test_an_action_that_fails_halts_the_store_with_its_error(order, halt):
    failure = ZeroDivisionError("planted")

    def fail() -> None:
        raise failure

    order.run_in_turn(fail)
    assert halt.reason is failure
    with pytest.raises(ZeroDivisionError, match="planted") as caught:
        halt.check()
    assert caught.value is not failure
    assert caught.value.__cause__ is failure


def test_a_halt_ends_waits_for_a_turn_with_its_reason():
    clock = VirtualClock(3)

    def main() -> None:
        halt = Halt(clock)
        order = Order(halt)
        order.enter()
        caught = []

        def wait() -> None:
            try:
                with order.serve(order.enter(), None, str):
                    caught.append("served")
            except ClosedError as error:
                caught.append(str(error))

        task = clock.spawn(wait, "waiter")
        clock.sleep(1.0)
        halt.now_because(ClosedError("shut"))
        halt.now_because(ClosedError("again"))
        assert task.join()
        assert caught == ["shut"], "the first reason stays"

    clock.run(main)


@pytest.mark.parametrize("seed", range(20))
def test_threads_are_served_in_the_order_they_entered_whatever_their_interleaving(seed):
    clock = VirtualClock(seed)

    def main() -> list[int]:
        order, served = Order(Halt(clock)), []
        turns = [order.enter() for _ in range(6)]

        def work(number: int) -> None:
            with order.serve(turns[number], None, str):
                clock.sleep(0.1)
                served.append(number)

        tasks = [clock.spawn(lambda n=n: work(n), f"worker-{n}") for n in (3, 0, 5, 1, 4, 2)]
        assert all(task.join() for task in tasks)
        return served

    assert clock.run(main) == list(range(6))
