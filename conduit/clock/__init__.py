"""Time and threads, injected: the real clock, or a virtual one that repeats."""

from conduit.clock.protocol import Clock, Condition, Task
from conduit.clock.real import REAL, RealClock
from conduit.clock.virtual import VirtualClock

__all__ = ["REAL", "Clock", "Condition", "RealClock", "Task", "VirtualClock"]
