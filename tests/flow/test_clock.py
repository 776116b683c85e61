"""The clocks: the real one keeps time, the virtual one repeats, jumps and finds what real runs rarely show."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable

import pytest

from conduit.clock import REAL, Clock, Condition, RealClock, VirtualClock
from conduit.errors import DeadlockError
from tests.interrupt import until_interrupted

Trace = list[tuple[float, str, str]]


@pytest.fixture(autouse=True)
def no_thread_outlives_a_test():
    before = threading.active_count()
    yield
    assert threading.active_count() <= before


class Flag:
    """A flag with its condition."""

    def __init__(self, clock: Clock, name: str = "flag") -> None:
        self.up = False
        self.changed: Condition = clock.condition(name)

    def raise_it(self) -> None:
        with self.changed:
            self.up = True
            self.changed.notify_all()

    def wait(self, deadline_s: float | None = None) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.up, deadline_s)

    def pass_when_up(self) -> None:
        self.wait()


def failing_seeds(scenario: Callable[[VirtualClock], object], seeds: int) -> list[int]:
    failed = []
    for seed in range(seeds):
        clock = VirtualClock(seed)
        try:
            clock.run(lambda clock=clock: scenario(clock))
        except DeadlockError:
            failed.append(seed)
    return failed


# Both clocks ----------------------------------------------------------------------------------------------------------


def in_real_time(main: Callable[[Clock], None]) -> None:
    main(RealClock())


def in_virtual_time(main: Callable[[Clock], None]) -> None:
    clock = VirtualClock()
    clock.run(lambda: main(clock))


both_clocks = pytest.mark.parametrize("live", [in_real_time, in_virtual_time])


@both_clocks
def test_sleep_moves_time_on(live):
    def main(clock: Clock) -> None:
        start = clock.now()
        clock.sleep(0.01)
        clock.sleep_until(start + 0.03)
        clock.sleep_until(start)
        clock.sleep(-1.0)
        assert clock.now() >= start + 0.03

    live(main)


@both_clocks
def test_a_waiter_sees_what_a_task_did(live):
    def main(clock: Clock) -> None:
        flag = Flag(clock)
        task = clock.spawn(flag.raise_it, "raiser")
        assert flag.wait()
        assert flag.wait(math.inf)
        assert task.name == "raiser"
        assert task.join()
        assert task.join(clock.now())
        assert not task.alive()

    live(main)


@both_clocks
def test_waits_and_joins_end_at_their_deadlines(live):
    def main(clock: Clock) -> None:
        flag, start = Flag(clock), clock.now()
        task = clock.spawn(lambda: clock.sleep(0.2), "sleeper")
        assert not flag.wait(start + 0.01)
        assert clock.now() >= start + 0.01
        assert not task.join(start + 0.02)
        assert task.alive()
        assert task.join(math.inf)

    live(main)


@both_clocks
def test_a_deadline_in_the_past_still_looks_once(live):
    def main(clock: Clock) -> None:
        flag = Flag(clock)
        assert not flag.wait(clock.now() - 1.0)
        flag.raise_it()
        assert flag.wait(clock.now() - 1.0)

    live(main)


@both_clocks
def test_notify_and_wait_need_the_condition_held(live):
    def main(clock: Clock) -> None:
        condition = clock.condition("inbox")
        with pytest.raises(RuntimeError):
            condition.notify_all()
        with pytest.raises(RuntimeError):
            condition.wait_for(lambda: False)

    live(main)


@both_clocks
def test_whoever_waits_can_be_roused_by_one_who_does_not_hold_the_condition(live):
    def main(clock: Clock) -> None:
        condition, lock, said = clock.condition("inbox"), threading.Lock(), []

        def wait() -> None:
            with condition:
                assert condition.wait_for(lambda: bool(said), clock.now() + 60.0)
            said.append(clock.now())

        tasks = [clock.spawn(wait, f"waiter {number}") for number in range(3)]
        clock.sleep(0.01)
        with lock:
            said.append(clock.now())
            condition.rouse()
        assert all(task.join(clock.now() + 5.0) for task in tasks)
        assert len(said) == 4
        condition.rouse()

    live(main)


def test_the_real_clock_runs_at_the_walls_pace():
    start = time.perf_counter()
    REAL.sleep(0.02)
    assert start + 0.02 <= REAL.now() <= time.perf_counter()


def test_an_exception_in_a_real_task_reaches_the_excepthook(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    error = ValueError("planted")

    def fail() -> None:
        raise error

    assert REAL.spawn(fail, "failing").join(REAL.now() + 5.0)
    assert seen == [error]


# Virtual time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_rousing_gives_way_to_nobody(seed):
    clock = VirtualClock(seed)

    def main() -> None:
        condition, woken = clock.condition("inbox"), []

        def wait() -> None:
            with condition:
                condition.wait_for(lambda: bool(woken))

        clock.spawn(wait, "waiter")
        clock.sleep(1.0)
        woken.append(True)
        events = len(clock.trace)
        condition.rouse()
        assert len(clock.trace) == events

    clock.run(main)
    with pytest.raises(RuntimeError, match="isn't a task"):
        clock.condition("inbox").rouse()


@pytest.mark.parametrize("seed", range(20))
def test_sleepers_wake_in_the_order_of_their_instants(seed):
    clock, woken = VirtualClock(seed), []

    def sleeper(seconds: float) -> Callable[[], None]:
        def sleep() -> None:
            clock.sleep(seconds)
            woken.append((seconds, clock.now()))

        return sleep

    def main() -> str:
        for seconds in (3.0, 1.0, 2.0, 1e6):
            clock.spawn(sleeper(seconds), f"sleeps {seconds}")
        return "main's result"

    start = time.perf_counter()
    assert clock.run(main) == "main's result"
    assert woken == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (1e6, 1e6)]
    assert clock.now() == 1e6
    assert time.perf_counter() - start < 5.0


@pytest.mark.parametrize("seed", range(20))
def test_timeouts_fire_at_their_exact_instant(seed):
    clock = VirtualClock(seed)

    def main() -> None:
        flag = Flag(clock)
        clock.spawn(lambda: clock.sleep(10.0), "unconcerned")
        late = clock.spawn(lambda: clock.sleep_until(7.25), "late")
        assert not flag.wait(0.1 + 0.2)
        assert clock.now() == 0.1 + 0.2
        assert not late.join(5.5)
        assert clock.now() == 5.5
        assert late.join(8.0)
        assert clock.now() == 7.25

    clock.run(main)


def test_time_stands_still_while_anyone_can_run():
    def main() -> None:
        flag = Flag(clock)
        clock.spawn(flag.raise_it, "raiser")
        assert flag.wait(1e-9)
        assert clock.now() == 0.0

    for seed in range(50):
        clock = VirtualClock(seed)
        clock.run(main)


def bounded_queue(clock: VirtualClock, items: int = 10, bound: int = 2) -> list[int]:
    """Two producers, two consumers; what was consumed."""
    queue: deque[int] = deque()
    taken: list[int] = []
    changed = clock.condition("queue")
    closed = False

    def produce(first: int) -> None:
        for item in range(first, first + items):
            with changed:
                assert changed.wait_for(lambda: len(queue) < bound, clock.now() + 60.0)
                queue.append(item)
                changed.notify_all()

    def consume() -> None:
        while True:
            with changed:
                changed.wait_for(lambda: bool(queue) or closed)
                if not queue:
                    return
                assert len(queue) <= bound
                taken.append(queue.popleft())
                changed.notify_all()
            clock.sleep(0.001)

    producers = [clock.spawn(lambda first=first: produce(first), f"producer {first}") for first in (0, 100)]
    consumers = [clock.spawn(consume, f"consumer {number}") for number in (0, 1)]
    assert all(task.join() for task in producers)
    with changed:
        closed = True
        changed.notify_all()
    assert all(task.join() for task in consumers)
    return taken


def run_bounded_queue(seed: int) -> tuple[list[int], Trace]:
    clock = VirtualClock(seed)
    return clock.run(lambda: bounded_queue(clock)), clock.trace


def test_a_bounded_queue_loses_and_doubles_nothing_in_a_thousand_interleavings():
    traces = set()
    for seed in range(1000):
        taken, trace = run_bounded_queue(seed)
        assert sorted(taken) == [*range(10), *range(100, 110)]
        assert [item for item in taken if item < 100] == list(range(10))
        traces.add(tuple(trace))
    assert len(traces) > 990


def test_a_seed_repeats_its_interleaving_exactly():
    for seed in range(20):
        first, again = run_bounded_queue(seed), run_bounded_queue(seed)
        assert first == again
        assert len(first[1]) > 100


def test_seeds_explore_both_orders_of_two_writers():
    def race(seed: int) -> str:
        clock, order = VirtualClock(seed), []

        def main() -> None:
            clock.spawn(lambda: order.append("a"), "a")
            clock.spawn(lambda: order.append("b"), "b")
            clock.sleep(0.0)
            order.append("m")

        clock.run(main)
        return "".join(order)

    assert {race(seed) for seed in range(200)} == {"abm", "bam", "amb", "bma", "mab", "mba"}


# Faults that are planted, and found -----------------------------------------------------------------------------------


def opposite_orders(clock: VirtualClock) -> None:
    left, right = clock.condition("left"), clock.condition("right")

    def take(first: Condition, second: Condition) -> None:
        with first, second:
            pass

    clock.spawn(lambda: take(left, right), "lefty")
    clock.spawn(lambda: take(right, left), "righty")


def test_two_locks_in_opposite_order_deadlock_for_some_seeds_and_the_report_names_all():
    found = failing_seeds(opposite_orders, 100)
    assert 5 < len(found) < 100
    clock = VirtualClock(found[0])
    with pytest.raises(DeadlockError) as caught:
        clock.run(lambda: opposite_orders(clock))
    report = str(caught.value)
    assert "'lefty' waits to enter 'right', held by 'righty', since 0 s at test_clock.py:" in report
    assert "'righty' waits to enter 'left', held by 'lefty', since 0 s at test_clock.py:" in report
    assert f"seed {found[0]}" in report


def test_locks_in_one_order_never_deadlock():
    def one_order(clock: VirtualClock) -> None:
        left, right = clock.condition("left"), clock.condition("right")

        def take() -> None:
            with left, right:
                pass

        clock.spawn(take, "one")
        clock.spawn(take, "two")

    assert failing_seeds(one_order, 200) == []


def test_a_wait_that_nobody_ends_is_a_deadlock_and_names_what_is_waited_on():
    clock = VirtualClock()

    def main() -> None:
        outbox = Flag(clock, "outbox")
        clock.sleep(2.5)
        learner = clock.spawn(outbox.pass_when_up, "learner")
        learner.join()

    with pytest.raises(DeadlockError) as caught:
        clock.run(main)
    assert "'learner' waits on 'outbox' since 2.5 s" in str(caught.value)
    assert "'main' waits for the end of 'learner' since 2.5 s" in str(caught.value)


def test_tasks_left_waiting_when_main_returns_are_a_deadlock():
    clock = VirtualClock()
    flag = Flag(clock)
    with pytest.raises(DeadlockError, match="'forgotten' waits on 'flag'"):
        clock.run(lambda: clock.spawn(flag.pass_when_up, "forgotten"))


def test_every_blocked_task_gets_the_deadlock_and_may_clean_up():
    clock, told = VirtualClock(), []

    def wait_for_ever(name: str) -> None:
        try:
            Flag(clock, name).wait(math.inf)
        except DeadlockError as error:
            told.append(name)
            raise error
        finally:
            told.append(f"{name} cleaned up")

    def main() -> None:
        clock.spawn(lambda: wait_for_ever("one"), "one")
        clock.spawn(lambda: wait_for_ever("two"), "two")

    with pytest.raises(DeadlockError):
        clock.run(main)
    assert sorted(told) == ["one", "one cleaned up", "two", "two cleaned up"]


def test_a_task_that_swallows_the_deadlock_cannot_carry_on_and_the_run_still_fails():
    clock = VirtualClock()

    def stubborn() -> None:
        while True:
            try:
                Flag(clock).wait()
            except Exception:
                continue

    with pytest.raises(DeadlockError):
        clock.run(stubborn)


def notify_before_the_change(clock: VirtualClock) -> None:
    flag = Flag(clock)

    def raiser() -> None:
        with flag.changed:
            flag.changed.notify_all()
        flag.up = True

    clock.spawn(raiser, "raiser")
    flag.wait()


def check_outside_the_lock(clock: VirtualClock) -> None:
    """The waiter looks at the flag, then starts to wait for the next change: one that came in between is lost."""
    flag, changes = Flag(clock), [0]

    def raiser() -> None:
        with flag.changed:
            flag.up = True
            changes[0] += 1
            flag.changed.notify_all()

    clock.spawn(raiser, "raiser")
    if not flag.up:
        with flag.changed:
            seen = changes[0]
            flag.changed.wait_for(lambda: changes[0] > seen)


@pytest.mark.parametrize("scenario", [notify_before_the_change, check_outside_the_lock])
def test_a_lost_wake_up_is_found_by_some_seed_in_200(scenario):
    assert 0 < len(failing_seeds(scenario, 200)) < 200


def test_the_correct_hand_shake_loses_no_wake_up():
    def correct(clock: VirtualClock) -> None:
        flag = Flag(clock)
        clock.spawn(flag.raise_it, "raiser")
        flag.wait()

    assert failing_seeds(correct, 200) == []


def test_a_livelock_ends_with_an_error():
    clock = VirtualClock(max_events=1000)

    def spin() -> None:
        while True:
            clock.sleep(0.0)

    with pytest.raises(DeadlockError, match=r"no end after 1,000 events(.|\n)*'spinner' runs"):
        clock.run(lambda: clock.spawn(spin, "spinner"))


# Ownership and misuse -------------------------------------------------------------------------------------------------


def test_a_task_that_sleeps_while_it_holds_a_condition_keeps_others_out():
    def main() -> None:
        lock, entered = clock.condition("lock"), []

        def enter() -> None:
            with lock:
                entered.append(clock.now())

        with lock:
            task = clock.spawn(enter, "outsider")
            clock.sleep(5.0)
            assert not entered
        task.join()
        assert entered == [5.0]

    for seed in range(20):
        clock = VirtualClock(seed)
        clock.run(main)


def test_a_section_is_never_entered_twice_at_a_time():
    def main() -> None:
        lock, inside = clock.condition("lock"), [0]

        def work() -> None:
            for _ in range(3):
                with lock:
                    inside[0] += 1
                    clock.sleep(0.0)
                    assert inside[0] == 1
                    inside[0] -= 1

        for name in "abc":
            clock.spawn(work, name)

    for seed in range(100):
        clock = VirtualClock(seed)
        clock.run(main)


def test_waiting_gives_the_condition_away_and_takes_it_back():
    def main() -> None:
        lock, held = clock.condition("lock"), []

        def holder() -> None:
            with lock:
                clock.sleep(9.0)
                held.append(clock.now())

        with lock:
            clock.spawn(holder, "holder")
            assert not lock.wait_for(lambda: False, 3.0)
            # The deadline was 3; the condition was free again at 9.
            assert clock.now() == 9.0
            assert held == [9.0]

    clock = VirtualClock()
    clock.run(main)


def test_entering_a_held_condition_again_is_an_error():
    clock = VirtualClock()

    def main() -> None:
        lock = clock.condition("lock")
        with lock, lock:
            pass

    with pytest.raises(RuntimeError, match="'main' already holds condition 'lock'"):
        clock.run(main)


def test_a_thread_from_outside_is_refused():
    clock, errors = VirtualClock(), []

    def outside() -> None:
        for call in (
            lambda: clock.sleep(1.0),
            lambda: clock.condition("x").__enter__(),
            lambda: clock.spawn(print, "x"),
        ):
            with pytest.raises(RuntimeError, match="isn't a task of this virtual clock") as caught:
                call()
            errors.append(caught.value)

    outside()  # before the run

    def main() -> None:
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()

    clock.run(main)
    assert len(errors) == 6


def test_a_task_that_joins_itself_is_told_at_once_that_it_goes_on():
    clock, tasks, joined = VirtualClock(), [], []

    def own_tail() -> None:
        clock.sleep(1.0)
        joined.append(tasks[0].join())

    clock.run(lambda: tasks.append(clock.spawn(own_tail, "own tail")))
    assert joined == [False]


def test_a_clock_runs_one_main_at_a_time():
    clock = VirtualClock()
    with pytest.raises(RuntimeError, match="already running"):
        clock.run(lambda: clock.run(lambda: None))
    assert clock.run(lambda: 7) == 7


@pytest.mark.parametrize("seed", range(20))
def test_an_exception_that_escapes_a_task_ends_the_run_and_is_raised_from_it(seed):
    clock = VirtualClock(seed)
    error = ValueError("planted")

    def fail() -> None:
        clock.sleep(1.0)
        raise error

    def main() -> None:
        flag = Flag(clock)
        clock.spawn(flag.pass_when_up, "waiter")
        clock.spawn(fail, "failing")
        flag.wait()

    with pytest.raises(ValueError, match="planted") as caught:
        clock.run(main)
    assert caught.value is error


def test_an_exception_in_main_unwinds_the_other_tasks():
    clock, cleaned = VirtualClock(), []

    def periodic() -> None:
        try:
            while True:
                clock.sleep(1.0)
        finally:
            cleaned.append(clock.now())

    def main() -> None:
        clock.spawn(periodic, "periodic")
        clock.sleep(10.5)
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        clock.run(main)
    assert cleaned == [10.5]


def test_an_interrupt_of_the_calling_thread_ends_the_run():
    clock, caller = VirtualClock(), threading.get_ident()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def busy() -> None:
        time.sleep(0.05)  # of real time, in which the caller gets to its wait
        signal.pthread_kill(caller, signal.SIGUSR1)
        while True:
            clock.sleep(1.0)

    def main() -> None:
        clock.spawn(busy, "busy")
        Flag(clock).wait()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            clock.run(main)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_leaves_no_condition_held():
    condition, entered = RealClock().condition("a lock"), []

    def enter() -> None:
        with condition:
            entered.append(1)

    for number in range(50):
        until_interrupted(enter)
        thread = threading.Thread(target=enter, daemon=True)
        entered.clear()
        thread.start()
        thread.join(5.0)
        assert entered == [1], number
