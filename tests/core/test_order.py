"""Turns: publishing, drawing and updating take place in the order in which they were asked for."""

from __future__ import annotations

import threading

import pytest

from conduit.clock import RealClock, VirtualClock
from conduit.core.halt import Halt
from conduit.core.order import Order, Turn
from conduit.errors import ClosedError, OperatorError, WaitTimeout


class Door:
    """What an action waits for."""

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


def begun(*turns: Turn) -> list[bool]:
    return [turn.begun for turn in turns]


def end(order: Order, turn: Turn) -> None:
    with order.serve(turn, None, str):
        pass


def soon(order: Order) -> float:
    return order._halt.clock.now() + 0.01


def test_turns_begin_one_at_a_time_in_the_order_they_were_entered(order):
    turns = [order.enter() for _ in range(3)]
    for number, turn in enumerate(turns):
        assert begun(*turns) == [i <= number for i in range(3)]
        end(order, turn)


def test_who_holds_the_order_takes_and_leaves_turns_in_it(order):
    with order.changed:
        first, second = order.enter_held(), order.enter_held()
        assert begun(first, second) == [True, False]
        order.leave_held(first)
        assert begun(first, second) == [True, True]
    third = order.enter()
    for turn in (first, second, second):
        order.leave(turn)
    assert third.begun
    assert not order.enter().begun, "a turn that was left twice ended no other's"


def test_an_action_runs_before_act_returns_or_on_whoever_ends_the_turn_before(order):
    ran = []

    def act(name: str) -> Turn:
        return order.act(lambda: ran.append((name, threading.current_thread().name)))

    me = threading.current_thread().name
    assert act("now").begun
    turn = order.enter()
    assert begun(act("first"), act("second")) == [False, False]
    assert ran == [("now", me)]
    other = threading.Thread(target=end, args=(order, turn), name="other")
    other.start()
    other.join()
    assert ran == [("now", me), ("first", "other"), ("second", "other")]


def test_nobody_is_in_a_turn_while_an_action_runs_but_it_alone(order):
    ran = []
    turn = order.enter()
    order.act(lambda: ran.append(begun(turn, after)))
    after = order.enter()
    end(order, turn)
    assert ran == [[True, False]]
    assert after.begun


def test_an_action_that_is_not_ready_is_passed_over_until_it_is_and_then_goes_first(order):
    door, ran = Door(), []
    draw = order.act(lambda: ran.append("draw"), door)
    rows = order.enter()
    more = order.act(lambda: ran.append("more"))
    assert begun(draw, rows, more) == [False, True, False]
    assert draw.passed_over
    door.open = True
    end(order, rows)
    assert ran == ["draw", "more"]
    assert begun(draw, more) == [True, True]
    assert draw.ready_at_s is not None
    assert draw.ready_at_s <= draw.began_at_s


def test_an_action_that_is_ready_is_not_passed_over(order):
    door = Door()
    door.open = True
    first, draw = order.enter(), order.act(lambda: None, door)
    end(order, first)
    assert (draw.begun, draw.passed_over, draw.ready_at_s) == (True, False, None)


def test_an_action_may_make_one_before_it_ready(order):
    door, ran = Door(), []
    draw = order.act(lambda: ran.append("draw"), door)
    order.act(lambda: setattr(door, "open", True))
    assert draw.begun
    assert ran == ["draw"]


def test_a_turn_that_is_not_reached_by_its_deadline_is_given_up(order):
    first, second, third = order.enter(), order.enter(), order.enter()
    with pytest.raises(WaitTimeout, match="because"), order.serve(second, soon(order), lambda: "because"):
        pytest.fail("it isn't its turn")
    end(order, first)
    assert begun(second, third) == [False, True]


def test_settle_tells_what_ran_or_was_withdrawn_from_what_was_passed_over(order):
    assert order.settle(order.act(lambda: None), None)
    draw = order.act(lambda: None, Door())
    assert not order.settle(draw, None)
    order.withdraw(draw)
    assert order.settle(draw, None)
    order.enter()
    with pytest.raises(WaitTimeout, match="rows that were pushed before are still being ingested"):
        order.settle(order.act(lambda: None), soon(order))


def test_wait_tells_what_ran_from_what_was_withdrawn_and_waits_for_what_was_passed_over(order):
    assert order.wait(order.act(lambda: None), None)
    draw = order.act(lambda: None, Door())
    with pytest.raises(WaitTimeout, match="its turn has not come"):
        order.wait(draw, soon(order))
    order.withdraw(draw)
    assert not order.wait(draw, None)


def test_an_action_can_be_withdrawn_until_it_has_run_and_then_never_runs(order):
    ran, door = [], Door()
    first = order.enter()
    behind, draw = order.act(lambda: ran.append("behind")), order.act(lambda: ran.append("draw"), door)
    last = order.act(lambda: ran.append("last"))
    assert order.withdraw(behind)
    assert order.withdraw(draw)
    door.open = True
    end(order, first)
    assert ran == ["last"]
    assert not order.withdraw(last)


def test_between_turns_looks_only_while_nobody_is_in_one(order):
    assert order.between_turns(lambda: "seen", "busy") == "seen"
    turn = order.enter()
    assert order.between_turns(lambda: pytest.fail("somebody is in a turn"), "busy") == "busy"
    end(order, turn)
    order.act(lambda: None, Door())
    assert order.between_turns(lambda: "seen", "busy") == "seen"


def test_a_block_that_raises_ends_its_turn(order):
    first, second = order.enter(), order.enter()
    with pytest.raises(KeyError), order.serve(first, None, str):
        raise KeyError
    assert second.begun


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind another's turn"])
def test_an_action_that_fails_halts_the_store_and_not_whoever_ran_it(order, halt, behind):
    failure = ZeroDivisionError("planted")

    def fail() -> None:
        raise failure

    turn = order.enter() if behind else None
    order.act(fail)
    if turn is not None:
        end(order, turn)
    with pytest.raises(OperatorError, match="ZeroDivisionError was raised inside it: planted") as caught:
        halt.check()
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_action_that_is_interrupted_halts_the_store_and_interrupts_who_ran_it(order, halt, error):
    def interrupted() -> None:
        raise error

    turn = order.enter()
    draw = order.act(interrupted)
    with pytest.raises(error):
        end(order, turn)
    with pytest.raises(OperatorError) as caught:
        order.wait(draw, soon(order))
    assert isinstance(caught.value.__cause__, error)


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
        assert task.join()
        assert caught == ["shut"]

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
