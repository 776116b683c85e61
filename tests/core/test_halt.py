"""Halts: one reason ends every wait, now and later."""

from __future__ import annotations

import threading

import pytest

from conduit.clock import RealClock, VirtualClock
from conduit.core.halt import Halt
from conduit.errors import ClosedError, OperatorError, SchemaError, WaitTimeout


class TwoArgumentsError(Exception):
    """Can be made only with both: copying it calls its class with one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} since {why}")


def raised(halt: Halt) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        halt.check()
    return caught.value


def test_the_first_reason_stays_and_each_call_raises_its_own_copy():
    halt = Halt(RealClock())
    halt.check()
    reason = SchemaError("the first")
    halt.now_because(reason)
    halt.now_because(ClosedError("the second"))
    first, second = raised(halt), raised(halt)
    assert type(first) is type(second) is SchemaError
    assert str(first) == str(second) == "the first"
    assert len({id(first), id(second), id(reason)}) == 3
    assert first.__cause__ is reason


def test_an_errors_own_cause_is_what_callers_see():
    halt, cause = Halt(RealClock()), KeyError("deep")
    reason = SchemaError("shallow")
    reason.__cause__ = cause
    halt.now_because(reason)
    assert raised(halt).__cause__ is cause


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (TwoArgumentsError("it stopped", "it could"), "TwoArgumentsError was raised inside it: it stopped since it could"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit was raised inside it: 3"),
    ],
)  # fmt: skip
def test_what_is_no_error_of_conduits_becomes_one_with_it_as_the_cause(reason, said):
    halt = Halt(RealClock())
    halt.now_because(reason)
    for _ in range(2):
        error = raised(halt)
        assert isinstance(error, OperatorError)
        assert said in str(error)
        assert error.__cause__ is reason


def test_a_wait_ends_when_it_holds_at_its_deadline_or_at_the_halt():
    clock = VirtualClock()

    def main() -> list[tuple[str, float]]:
        halt, ended = Halt(clock), []
        condition = halt.condition("something")
        held = []

        def wait(until, deadline_s) -> None:
            try:
                with condition:
                    halt.wait(condition, until, deadline_s, lambda: "too late")
                ended.append(("it held", clock.now()))
            except (WaitTimeout, ClosedError) as error:
                ended.append((str(error), clock.now()))

        tasks = [
            clock.spawn(lambda: wait(lambda: bool(held), None), "holds"),
            clock.spawn(lambda: wait(lambda: False, 2.0), "in time"),
            clock.spawn(lambda: wait(lambda: False, None), "for ever"),
        ]
        clock.sleep(1.0)
        with condition:
            held.append(1)
            condition.notify_all()
        clock.sleep(2.0)
        halt.now_because(ClosedError("shut"))
        assert all(task.join() for task in tasks)
        wait(lambda: False, None)
        return ended

    assert clock.run(main) == [("it held", 1.0), ("too late", 2.0), ("shut", 3.0), ("shut", 3.0)]


def test_a_thread_that_waited_tells_how_long():
    halt = Halt(RealClock())
    condition = halt.condition("nothing")
    told = []
    halt.tell_waited = lambda seconds: told.append((threading.current_thread().name, seconds))

    def wait() -> None:
        with condition:
            halt.wait(condition, lambda: True, None, str)
            with pytest.raises(WaitTimeout):
                halt.wait(condition, lambda: False, halt.clock.now() + 0.02, str)

    thread = threading.Thread(target=wait, name="waiter")
    thread.start()
    thread.join()
    ((name, seconds),) = told
    assert name == "waiter"
    assert seconds >= 0.02
