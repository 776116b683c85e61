"""What memory there is and how it is connected.

- `preset`: a machine that you may not have, by name; `PRESETS` are the names
- `discover`: what this machine has; `probe`: how fast its edges are
- `save`, `load`: a `Topology` as a file; `check_machine`, `this_machine`: whose it is

All of it is light: NVML and psutil are asked for only when a machine is looked at. `discover` and `probe` here are the functions, as
they would be hidden by their modules if these were imported later than this."""

from conduit.topology.bandwidth import Leg, Source
from conduit.topology.cluster import Edge, Link, Memory, Topology
from conduit.topology.discover import discover
from conduit.topology.endpoint import Endpoint, Tier
from conduit.topology.files import check_machine, load, save, this_machine
from conduit.topology.presets import PRESETS, preset
from conduit.topology.probe import probe

__all__ = [
    "PRESETS",
    "Edge",
    "Endpoint",
    "Leg",
    "Link",
    "Memory",
    "Source",
    "Tier",
    "Topology",
    "check_machine",
    "discover",
    "load",
    "preset",
    "probe",
    "save",
    "this_machine",
]
