"""The ledger, on a virtual clock: every second is counted once, in the right cell."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from conduit.clock import VirtualClock
from conduit.core.ledger import Ledger, Seconds, Traffic
from conduit.topology.endpoint import DISK, PAGEABLE

Scene = Callable[[VirtualClock, Ledger], object]


def played(scene: Scene) -> Ledger:
    clock = VirtualClock(0)
    ledgers = []

    def main() -> None:
        ledgers.append(Ledger(clock))
        scene(clock, ledgers[0])

    clock.run(main)
    return ledgers[0]


def call(clock, ledger, port: str, seconds: float, **waited_s: float) -> None:
    """A call that waits for so long, for what `waited_s` says."""
    with ledger.port(port) as wait:
        clock.sleep(seconds)
        ledger.waited(seconds)
        for name, spent_s in waited_s.items():
            setattr(wait, name, spent_s)


def test_marked_stages_count_less_what_they_spend_in_ports():
    def scene(clock, ledger):
        with ledger.mark("rollout"):
            clock.sleep(1.0)
            call(clock, ledger, "push", 0.25)
            clock.sleep(2.0)
        with ledger.mark("update"):
            call(clock, ledger, "pull", 0.5)
            clock.sleep(4.0)

    total = played(scene).total
    assert (total.rollout_s, total.update_s) == pytest.approx((3.0, 4.0))
    assert (total.ingestion.exposed_s, total.delivery.exposed_s) == pytest.approx((0.25, 0.5))
    assert total.wall_s == pytest.approx(7.75)
    assert total.exposed_s == 0.75


def test_a_stage_inside_another_counts_once_for_the_inner():
    def scene(clock, ledger):
        with ledger.mark("rollout"):
            clock.sleep(1.0)
            with ledger.mark("update"):
                clock.sleep(2.0)
                call(clock, ledger, "pull", 8.0)
            clock.sleep(4.0)

    total = played(scene).total
    assert (total.rollout_s, total.update_s) == pytest.approx((5.0, 2.0))


def test_an_operator_in_a_port_is_exposed_and_one_behind_it_is_hidden():
    def scene(clock, ledger):
        with ledger.port("push"), ledger.operator("ingestion"):
            clock.sleep(1.0)

        def behind() -> None:
            with ledger.operator("delivery"):
                clock.sleep(3.0)

        task = clock.spawn(behind, "operator")
        call(clock, ledger, "pull", 0.5)
        task.join()

    ledger = played(scene)
    ingestion, delivery = ledger.total.ingestion, ledger.total.delivery
    assert (ingestion.busy_s, ingestion.exposed_s, ingestion.hidden_s) == pytest.approx((1.0, 1.0, 0.0))
    assert (delivery.busy_s, delivery.exposed_s, delivery.hidden_s) == pytest.approx((3.0, 0.5, 2.5))
    assert ledger.by_thread["operator"].delivery.busy_s == pytest.approx(3.0)


def test_a_ports_own_work_is_busy_and_exposed_and_its_waits_are_only_exposed():
    def scene(clock, ledger):
        with ledger.port("push"):
            clock.sleep(0.25)
            with ledger.operator("ingestion"):
                clock.sleep(1.0)
        with ledger.port("pull"):
            clock.sleep(0.5)
            ledger.waited(0.5)
            clock.sleep(0.125)

    ingestion, delivery = (getattr(played(scene).total, name) for name in ("ingestion", "delivery"))
    assert (ingestion.busy_s, ingestion.exposed_s) == pytest.approx((1.25, 1.25))
    assert (delivery.busy_s, delivery.exposed_s) == pytest.approx((0.125, 0.625))


def test_what_a_port_waited_for_others_is_not_exposed():
    def scene(clock, ledger):
        call(clock, ledger, "pull", 3.0, starved_s=2.5)
        call(clock, ledger, "push", 4.0, blocked_s=4.0)

    total = played(scene).total
    assert (total.starved_s, total.blocked_s) == pytest.approx((2.5, 4.0))
    assert (total.delivery.exposed_s, total.ingestion.exposed_s) == pytest.approx((0.5, 0.0))


def test_what_a_pull_waited_for_ingestion_is_ingestions():
    def scene(clock, ledger):
        call(clock, ledger, "pull", 4.0, starved_s=1.0, ingesting_s=2.5)

    total = played(scene).total
    assert (total.starved_s, total.ingestion.exposed_s, total.delivery.exposed_s) == pytest.approx((1.0, 2.5, 0.5))


@pytest.mark.parametrize(
    ("ports", "rollout_s", "update_s"),
    [
        (["push", "push"], 1.0, 0.0),
        (["push", "pull"], 1.0, 0.0),
        (["pull", "priorities"], 0.0, 1.0),
        (["pull", "pull"], 0.0, 1.0),
        (["priorities", "push"], 1.0, 0.0),
        (["pull", "advance"], 0.0, 1.0),
        (["push", "pull", "priorities", "push"], 2.0, 1.0),
        (["push", "push", "pull", "pull", "advance", "push"], 3.0, 2.0),
    ],
)
def test_unmarked_time_between_calls_is_inferred_from_them(ports, rollout_s, update_s):
    def scene(clock, ledger):
        for port in ports:
            call(clock, ledger, port, 0.125)
            clock.sleep(1.0)

    total = played(scene).total
    assert (total.rollout_s, total.update_s) == pytest.approx((rollout_s, update_s))


@pytest.mark.parametrize("before", ["push", "pull"])
@pytest.mark.parametrize("stage", ["rollout", "update"])
def test_of_a_thread_that_marks_its_stages_only_what_it_marks_counts(before, stage):
    def scene(clock, ledger):
        call(clock, ledger, before, 0.125)
        clock.sleep(1.0)
        with ledger.mark(stage):
            clock.sleep(2.0)
        clock.sleep(4.0)
        call(clock, ledger, "pull", 0.125)
        clock.sleep(8.0)
        call(clock, ledger, "push", 0.125)

    total = played(scene).total
    assert (total.rollout_s, total.update_s) == pytest.approx((2.0, 0.0) if stage == "rollout" else (0.0, 2.0))


def test_threads_do_not_infer_from_each_others_calls():
    def scene(clock, ledger):
        call(clock, ledger, "pull", 0.0)
        task = clock.spawn(lambda: (clock.sleep(5.0), call(clock, ledger, "push", 0.0)), "actor")
        task.join()

    total = played(scene).total
    assert (total.rollout_s, total.update_s) == (0.0, 0.0)


def test_iterations_sum_to_the_total_and_each_has_its_wall_time():
    def scene(clock, ledger):
        for seconds in (1.0, 2.0, 4.0):
            with ledger.mark("update"):
                clock.sleep(seconds)
            ledger.end_iteration()
        clock.sleep(8.0)

    ledger = played(scene)
    assert [each.wall_s for each in ledger.iterations] == pytest.approx([1.0, 2.0, 4.0])
    assert [each.update_s for each in ledger.iterations] == pytest.approx([1.0, 2.0, 4.0])
    assert ledger.total.update_s == pytest.approx(7.0)
    assert ledger.iteration_count == 3


def test_old_iterations_are_forgotten_but_counted():
    ledger = Ledger(VirtualClock(0), keep=2)
    for _ in range(5):
        ledger.end_iteration()
    assert (len(ledger.iterations), ledger.iteration_count) == (2, 5)


def test_units_and_batches_are_counted_by_iteration_by_thread_and_in_total():
    def scene(clock, ledger):
        for pushes in (2, 0, 1):
            for _ in range(pushes):
                with ledger.port("push") as push:
                    push.took = 1
            with ledger.port("push"):
                pass  # took nothing: it was dropped
            with ledger.port("pull") as pull:
                pull.took = 1
            ledger.end_iteration()

        def other() -> None:
            with ledger.port("push") as push:
                push.took = 1
            counts.append([(each.units, each.batches) for each in ledger.threads().values()])

        clock.spawn(other, "actor").join()

    counts = []
    ledger = played(scene)
    assert [(each.units, each.batches) for each in ledger.iterations] == [(2, 1), (0, 1), (1, 1)]
    assert (ledger.total.units, ledger.total.batches) == (4, 3)
    assert ledger.by_thread["actor"].units == 1
    assert counts == [[(3, 3), (1, 0)]]


def test_what_iterations_took_together_can_be_asked_as_long_as_they_are_remembered():
    def scene(clock, ledger):
        for seconds in (1.0, 2.0, 4.0, 8.0):
            with ledger.mark("update"):
                clock.sleep(seconds)
            ledger.end_iteration()
        clock.sleep(16.0)

    ledger = played(scene)
    together = [ledger.between(*each) or Seconds(-1.0, -1.0) for each in ((0, 1), (1, 3), (0, 4), (2, 2))]
    assert [each.update_s for each in together] == pytest.approx([1, 6, 15, 0])
    assert [each.wall_s for each in together] == pytest.approx([1, 6, 15, 0])
    assert ledger.between(3, 5) is None
    short = Ledger(VirtualClock(0), keep=2)
    for _ in range(5):
        short.end_iteration()
    assert [short.between(first, 5) is None for first in range(5)] == [True, True, True, False, False]


def test_an_alarm_rings_once_by_the_end_of_its_iteration_and_only_the_last_one_set():
    ledger, rung = Ledger(VirtualClock(0)), []
    ledger.alarm(2, lambda: rung.append(("first", ledger.iteration_count)))
    for _ in range(4):
        ledger.end_iteration()
    ledger.alarm(9, lambda: rung.append(("replaced", ledger.iteration_count)))
    ledger.alarm(3, lambda: rung.append(("late", ledger.iteration_count)))
    for _ in range(9):
        ledger.end_iteration()
    assert rung == [("first", 2), ("late", 5)]


def test_time_spent_in_a_port_that_raises_is_counted():
    def fail(clock, ledger):
        with ledger.port("pull"):
            clock.sleep(2.0)
            raise KeyError

    def scene(clock, ledger):
        with pytest.raises(KeyError):
            fail(clock, ledger)

    assert played(scene).total.delivery.exposed_s == pytest.approx(2.0)


def test_what_was_read_stays_as_it_was():
    def scene(clock, ledger):
        call(clock, ledger, "pull", 1.0)
        ledger.end_iteration()
        read.extend([ledger.total, ledger.by_thread[threading.current_thread().name], ledger.iterations[0]])
        call(clock, ledger, "pull", 2.0)
        ledger.end_iteration()

    read = []
    total = played(scene).total
    assert [each.delivery.exposed_s for each in read] == pytest.approx([1.0, 1.0, 1.0])
    assert total.delivery.exposed_s == pytest.approx(3.0)


def test_what_the_disk_costs_is_counted_for_all_who_tell_and_of_memory_nothing():
    def scene(clock, ledger):
        read.append(ledger.traffic)
        for size, seconds in ((100, 0.5), (20, 0.25)):
            meter, began_s = ledger.meter(DISK), clock.now()
            clock.sleep(seconds)
            meter.read(size, began_s)
            clock.sleep(1.0)
        read.append(ledger.traffic)
        began_s = clock.now()
        clock.sleep(2.0)
        ledger.meter(DISK).wrote(7, began_s)
        assert ledger.meter(PAGEABLE) is None

    read = []
    ledger = played(scene)
    assert read == [{}, {"disk": Traffic(reads=2, read_bytes=120, read_s=0.75)}]
    assert ledger.traffic["disk"] == Traffic(2, 120, 0.75, 1, 7, 2.0)


def test_wall_time_ends_when_the_ledger_is_stopped():
    def scene(clock, ledger):
        clock.sleep(1.0)
        ledger.stop()
        clock.sleep(5.0)

    assert played(scene).total.wall_s == pytest.approx(1.0)


def test_threads_that_have_ended_are_remembered_by_name_and_take_no_room():
    ledger = Ledger(VirtualClock(0))

    def work() -> None:
        ledger.account().cells[0] += 1.0

    for number in range(500):
        thread = threading.Thread(target=work, name=f"actor-{number % 2}")
        thread.start()
        thread.join()
    assert ledger.total.rollout_s == 500.0
    assert {name: spent.rollout_s for name, spent in ledger.by_thread.items()} == {"actor-0": 250.0, "actor-1": 250.0}
    assert len(ledger._accounts) < 100
