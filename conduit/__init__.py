"""Conduit: an experience data plane for distributed reinforcement learning."""

from conduit import datasets, errors, topology
from conduit.core.archive import Archive
from conduit.core.batch import Batch, SampleInfo
from conduit.core.checkpoint import Saved
from conduit.core.derived import Next, Stack
from conduit.core.episodes import End, Fragment, Step
from conduit.core.experience import Field, Schema
from conduit.core.hook import register_delivery, register_ingestion
from conduit.core.items import Group, NStep, Row, Sequence, Trajectory
from conduit.core.limiter import Counters, Limiter, MinSize, Queue, SampleToInsertRatio
from conduit.core.moves import Migrated
from conduit.core.ordered import Fifo, Lifo, MaxHeap, MinHeap
from conduit.core.passes import WithoutReplacement
from conduit.core.placement import Placement
from conduit.core.placer import Explanation
from conduit.core.planning import plan
from conduit.core.plans import Plan
from conduit.core.priorities import PriorityUpdate
from conduit.core.prioritized import Prioritized
from conduit.core.sampling import Draw, Sampler, Sampling, Uniform
from conduit.core.schedule import Auto, Schedule
from conduit.core.spread import Recency, Stratified
from conduit.core.table import Table
from conduit.measuring import measure
from conduit.mixture import Mixture, MixtureBatch, MixtureInfo
from conduit.ports import Actor, Learner
from conduit.store import Store
from conduit.topology.endpoint import Endpoint, Tier

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "Archive",
    "Auto",
    "Batch",
    "Counters",
    "Draw",
    "End",
    "Endpoint",
    "Explanation",
    "Field",
    "Fifo",
    "Fragment",
    "Group",
    "Learner",
    "Lifo",
    "Limiter",
    "MaxHeap",
    "Migrated",
    "MinHeap",
    "MinSize",
    "Mixture",
    "MixtureBatch",
    "MixtureInfo",
    "NStep",
    "Next",
    "Placement",
    "Plan",
    "Prioritized",
    "PriorityUpdate",
    "Queue",
    "Recency",
    "Row",
    "SampleInfo",
    "SampleToInsertRatio",
    "Sampler",
    "Sampling",
    "Saved",
    "Schedule",
    "Schema",
    "Sequence",
    "Stack",
    "Step",
    "Store",
    "Stratified",
    "Table",
    "Tier",
    "Trajectory",
    "Uniform",
    "WithoutReplacement",
    "datasets",
    "errors",
    "measure",
    "plan",
    "register_delivery",
    "register_ingestion",
    "topology",
]
