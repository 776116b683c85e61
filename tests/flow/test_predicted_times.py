"""What a plan predicts is what takes place: a whole store on an emulated machine, in virtual time, beside Eq. 1's two legs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import conduit
from conduit.backends.emulated import EmulatedBackend
from conduit.clock import VirtualClock
from conduit.core.placement import Placement
from conduit.core.transfer_time import delivery_s, ingestion_s
from conduit.core.workload import Workload
from conduit.topology.cluster import Topology
from conduit.topology.endpoint import PAGEABLE, PINNED, Endpoint, Tier
from conduit.topology.presets import preset

pytest.importorskip("torch")

D = tuple(Endpoint(Tier.DEVICE, index) for index in range(8))
CAPACITY, WIDTH = 4096, 256
BATCH_BYTES = CAPACITY * WIDTH * 4
SLOWER = 1000
"""So that small rows take as long as large ones would: latencies, of which a store has one for each run of rows that lie together, and a
plan one for each edge, don't matter."""

PLACEMENTS = {
    "pageable": Placement((PAGEABLE,)),
    "pinned": Placement((PINNED,)),
    "one device": Placement(D[:1]),
    "all devices": Placement(D, (1.0,) * 8),
    "two, uneven": Placement(D[:2], (3.0, 1.0)),
    "three, uneven": Placement((D[0], D[3], D[5]), (5.0, 2.0, 1.0)),
    "mixed with pinned": Placement((PINNED, D[0], D[1]), (1.0, 2.0, 1.0)),
    "mixed with pageable": Placement((PAGEABLE, D[0], D[1], D[2]), (1.0, 1.0, 1.0, 1.0)),
}
LEARNERS = {"on a device": D[:1], "on every device": D, "on the host": (PAGEABLE,)}


def slowed(name: str) -> Topology:
    there = preset(name)
    return there.changed(
        legs={edge: replace(leg, bytes_per_s=leg.bytes_per_s / SLOWER) for edge, leg in there.legs.items()},
        links={name: replace(link, bytes_per_s=link.bytes_per_s / SLOWER) for name, link in there.links.items()},
    )


A100 = slowed("a100x8")
MACHINES = {"a100x8": A100, "mi250x": slowed("mi250x")}


def played(topology: Topology, placement: Placement, learners: Sequence[Endpoint]) -> tuple[float, float]:
    """Emulated seconds in which as many rows as the store holds come in, and then a batch of them all goes out to every learner, each in a
    thread of its own."""
    clock = VirtualClock()
    backend = EmulatedBackend(topology, "torch", clock)
    ends_s: list[float] = []

    def main() -> tuple[float, float]:
        with conduit.Store(
            backend=backend,
            capacity=CAPACITY,
            batch_size=CAPACITY,
            sampler=conduit.WithoutReplacement(),  # every row once: as much of each endpoint as its share says
            placement=placement,
        ) as store:
            ports = [
                store.learner(
                    rank=rank,
                    world=len(learners),
                    to="numpy" if at.is_host else "torch",
                    device=None if at.is_host else str(at),
                )
                for rank, at in enumerate(learners)
            ]
            store.actor().push_trajectory({"obs": np.zeros((CAPACITY, WIDTH), np.float32)})
            backend.drain()
            came_s = clock.now()

            def learn(learner: conduit.Learner) -> None:
                learner.pull()
                ends_s.append(clock.now() - came_s)

            tasks = [clock.spawn(lambda port=port: learn(port), "learner") for port in ports]
            assert all(task.join() for task in tasks)
            return came_s, max(ends_s)

    return clock.run(main)


def predicted(topology: Topology, placement: Placement, learners: Sequence[Endpoint]) -> tuple[float, float]:
    work = Workload(WIDTH * 4, CAPACITY, CAPACITY, (PAGEABLE,), tuple(learners), replay_ratio=len(learners))
    rows = placement.rows(CAPACITY)
    return ingestion_s(topology, work, rows), delivery_s(topology, work, rows)


@pytest.mark.parametrize("learners", LEARNERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_store_takes_as_long_as_is_predicted(machine, placement, learners):
    asked = MACHINES[machine], PLACEMENTS[placement], LEARNERS[learners]
    # Latencies are the rest.
    assert played(*asked) == pytest.approx(predicted(*asked), rel=0.01)


def test_rows_come_to_eight_devices_one_after_the_other_and_a_batch_of_theirs_is_put_together():
    in_s, out_s = played(A100, PLACEMENTS["all devices"], D[:1])
    rate = 1e9 / SLOWER
    assert in_s == pytest.approx(BATCH_BYTES / (12 * rate), rel=0.01)
    # Seven eighths come by the learner's port, then all is copied within its memory.
    assert out_s == pytest.approx(7 / 8 * BATCH_BYTES / (276 * rate) + BATCH_BYTES / (2039 / 2 * rate), rel=0.01)


def test_where_fair_shares_leave_a_port_idle_it_takes_longer_than_the_bound_that_is_predicted():
    """Two learners, each of which gets ⅛, ¼, ½ and ⅛ of its batch from four devices. While all four send, each gets a quarter of the
    learner's port; so the small parts are done first, and at the end the owner of half of the rows alone sends, to both: its port is full,
    and theirs are half idle. In units of a batch over a port's rate: ½ + ¼ + ½, where each port carries 1."""
    uneven = Placement((D[6], D[5], D[4], D[0]), (1.0, 2.0, 4.0, 1.0))
    learners = (D[7], D[3])
    merged_s = BATCH_BYTES / (2039 / 2 * 1e9 / SLOWER)
    bound_s, out_s = (
        times[1] - merged_s for times in (predicted(A100, uneven, learners), played(A100, uneven, learners))
    )
    assert bound_s == pytest.approx(BATCH_BYTES / (276e9 / SLOWER), rel=0.01)
    assert out_s == pytest.approx(1.25 * bound_s, rel=0.01)
