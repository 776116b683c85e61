"""Conduit: an experience data plane for distributed reinforcement learning."""

from conduit import errors
from conduit.core.batch import Batch, SampleInfo
from conduit.core.derived import Next, Stack
from conduit.core.episodes import End, Fragment, Step
from conduit.core.experience import Field, Schema
from conduit.core.hook import register_delivery, register_ingestion
from conduit.core.items import NStep, Row, Sequence, Trajectory
from conduit.core.placement import Placement
from conduit.core.priorities import PriorityUpdate
from conduit.core.prioritized import Prioritized
from conduit.core.sampling import Uniform
from conduit.core.semantics import Schedule
from conduit.ports import Actor, Learner
from conduit.store import Store
from conduit.topology.endpoint import Endpoint, Tier

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "Batch",
    "End",
    "Endpoint",
    "Field",
    "Fragment",
    "Learner",
    "NStep",
    "Next",
    "Placement",
    "Prioritized",
    "PriorityUpdate",
    "Row",
    "SampleInfo",
    "Schedule",
    "Schema",
    "Sequence",
    "Stack",
    "Step",
    "Store",
    "Tier",
    "Trajectory",
    "Uniform",
    "errors",
    "register_delivery",
    "register_ingestion",
]
