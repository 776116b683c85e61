"""What 5 GB take from each die of an MI250X node to each other (paper Fig. 4b), on the emulated fabric. Emulated, on the virtual clock.

    python benchmarks/fabric.py [--quick]

Two ways, each through the backend's own reads, in emulated seconds:

- one transfer a pair, everything else idle, rows drawn at random. This machine hasn't the memory for 5 GB at eight dies: the rows are one
  in a thousand, and every link is a thousand times as slow, latencies as they are
- the probe, at full speed with batches of 64 KiB to 512 KiB: its α + β·bytes at 5 GB

The preset takes each pair's bandwidth from that very table, so agreement says that the fabric and the probe do what they are told; it
predicts nothing about hardware. Whole milliseconds are all that the table has: 3 ms on its diagonal stands for anything from 2.5 to 3.5.
`--quick`: nothing is saved."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from measure import RESULTS, save
from numpy.typing import NDArray

from conduit.backends.emulated import EmulatedBackend
from conduit.clock import VirtualClock
from conduit.core.probing import timings_of
from conduit.topology import Topology, preset, probe
from conduit.topology.presets import MI250X_5GB_MS

SIZE_BYTES = 5_000_000_000
SCALE = 1000
WITHIN = 0.05
PROBED_SIZES = (1 << 16, 1 << 19)
TOLD = "emulated: the mi250x preset on the virtual clock; no hardware was measured"

Matrix = NDArray[np.float64]
"""(from, to), in milliseconds."""


def slowed(topology: Topology, scale: float) -> Topology:
    """The same with every bandwidth `scale` times as slow."""
    return topology.changed(
        legs={edge: replace(leg, bytes_per_s=leg.bytes_per_s / scale) for edge, leg in topology.legs.items()},
        links={name: replace(link, bytes_per_s=link.bytes_per_s / scale) for name, link in topology.links.items()},
    )


def moved(topology: Topology) -> Matrix:
    """One transfer of each pair."""
    clock, dies = VirtualClock(), topology.devices
    backend = EmulatedBackend(slowed(topology, SCALE), clock=clock)

    def main() -> Matrix:
        with timings_of(backend, clock, row_bytes=5000) as timings:
            taken_s = [[timings.one(source, to, SIZE_BYTES // SCALE) for to in dies] for source in dies]
        return np.array(taken_s) * 1e3

    return clock.run(main)


def probed(topology: Topology) -> tuple[Matrix, Topology]:
    """What the probe's legs say of each pair, and all that it found."""
    clock, dies = VirtualClock(), topology.devices
    backend = EmulatedBackend(topology, clock=clock)
    blank = replace(topology.only(dies), legs={}, links={}, routes={})

    def main() -> Topology:
        with timings_of(backend, clock) as timings:
            return probe(blank, timings, sizes=PROBED_SIZES, repeats=3)

    found = clock.run(main)
    legs_s = [[found.leg(source, to).seconds(SIZE_BYTES) for to in dies] for source in dies]
    return np.array(legs_s) * 1e3, found


def draw(shown_ms: Matrix, table_ms: Matrix) -> str:
    """Writes the figure; where to."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    heat = left.imshow(shown_ms, cmap="viridis_r")
    figure.colorbar(heat, ax=left, label="ms, emulated", shrink=0.85)
    for (source, to), each in np.ndenumerate(shown_ms):
        left.text(to, source, f"{each:.0f}", ha="center", va="center", color="w" if each > 80 else "k", fontsize=9)
    left.set_title("5 GB from die to die, milliseconds, emulated")
    off = 100 * (shown_ms / table_ms - 1)
    most = max(5.0, float(np.abs(off).max()))
    heat = right.imshow(off, cmap="RdBu", vmin=-most, vmax=most)
    figure.colorbar(heat, ax=right, label="% off the paper's table (Fig. 4b)", shrink=0.85)
    for (source, to), each in np.ndenumerate(table_ms):
        right.text(to, source, f"{each:.0f}", ha="center", va="center", color="k", fontsize=9)
    right.set_title("the paper's table, and how far the left is off")
    for axes in (left, right):
        axes.set_xlabel("to die")
        axes.set_ylabel("from die")
        axes.set_xticks(range(len(shown_ms)))
        axes.set_yticks(range(len(shown_ms)))
    figure.suptitle("MI250X node, emulated fabric on the virtual clock: no hardware was measured", fontsize=11)
    path = RESULTS / "fabric.png"
    figure.savefig(path, dpi=130)
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    topology, table_ms = preset("mi250x"), np.array(MI250X_5GB_MS, np.float64)
    moved_ms = moved(topology)
    probed_ms, found = probed(topology)
    off = {
        name: float(np.abs(each / table_ms - 1).max()) for name, each in (("moved", moved_ms), ("probed", probed_ms))
    }
    print(f"5 GB from die (row) to die (column), ms; {TOLD}")
    for row in moved_ms:
        print("  " + "".join(f"{each:7.1f}" for each in row))
    for name, each in off.items():
        print(f"  {name}: at most {100 * each:.2g} % off the paper's table")
    wrong = [name for name, each in off.items() if not each <= WITHIN]
    if not asked.quick:
        figures = {
            "figures": TOLD,
            "size_bytes": SIZE_BYTES,
            "rows_scaled_by": SCALE,
            "within": WITHIN,
            "largest_deviation": off,
            "moved_ms": np.round(moved_ms, 3).tolist(),
            "probed_ms": np.round(probed_ms, 3).tolist(),
            "paper_ms": table_ms.tolist(),
            "shared_links_found_bytes_per_s": {name: round(link.bytes_per_s) for name, link in found.links.items()},
        }
        print(save("fabric", figures))
        print(draw(moved_ms, table_ms))
    for name in wrong:
        print(f"{name}: more than {100 * WITHIN:g} % off the table")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
