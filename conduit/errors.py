"""Every error Conduit raises: one class a cause, each also the builtin that code outside would expect."""


class ConduitError(Exception):
    """Root of all errors that Conduit raises on purpose."""


class SchemaError(ConduitError, ValueError):
    """Rows don't have the fields, dtypes, shapes or row count that the store was promised."""


class CapacityError(ConduitError, MemoryError):
    """Rows don't fit where they should live; the message has the figures."""


class TopologyError(ConduitError, ValueError):
    """A topology that can't be: a missing edge or endpoint, a bandwidth of 0, or a file of another machine where that matters."""


class MigrationError(ConduitError, RuntimeError):
    """Rows couldn't be moved; they are whole where they were. `__cause__` is why."""


class FreshnessError(ConduitError, ValueError):
    """Rows carry a policy version that the current iteration can't accept or, in mode "bounded", that is too old or yet to come."""


class UnitError(ConduitError, ValueError):
    """An on-policy iteration has too few or too many rows."""


class PriorityError(ConduitError, ValueError):
    """A priority is NaN, infinite or negative; the message names the key."""


class SamplerError(ConduitError, RuntimeError):
    """A sampler of the user's own broke a promise; `conduit.testing.check_sampler` finds such."""


class UnknownKeyError(ConduitError, LookupError):
    """A key that this store never issued."""


class SettingError(ConduitError, ValueError):
    """A setting of the store, a port or a sampler is out of its range, or not of this mode."""


class ScheduleError(ConduitError, ValueError):
    """A schedule that the mode's semantics don't allow."""


class WaitTimeout(ConduitError, TimeoutError):
    """A wait ran past its deadline; the message says what was missing and what would end the wait."""


class CancelledError(ConduitError, RuntimeError):
    """A push or pull was cancelled while it waited; nothing was taken, and the next asks for the same batch."""


class CheckpointError(ConduitError, OSError):
    """A checkpoint can't be written or opened; nothing was changed. `__cause__` is the operating system's error if it raised one.

    Always made of one message: an OSError made of two arguments takes the first for its errno."""


class TraceError(ConduitError, OSError):
    """A timeline can't be written, or one is being recorded already. Made of one message, as a CheckpointError is."""


class ClosedError(ConduitError, RuntimeError):
    """The store, or this port of it, is closed."""


class HookError(ConduitError, RuntimeError):
    """A registered hook failed or broke its declaration; `__cause__` is the hook's own exception if it raised one."""


class OperatorError(ConduitError, RuntimeError):
    """Something that is no error of Conduit's ended an operator; `__cause__` is what."""


class UnknownBackendError(ConduitError, ValueError):
    """No backend has this name."""


class MissingExtraError(ConduitError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class HandOverError(ConduitError, TypeError):
    """A batch can't be handed to the requested framework, device or sharding without changing its values."""


class DeadlockError(ConduitError, RuntimeError):
    """Every thread on a virtual clock waits, and none for a deadline."""


class CheckpointWarning(UserWarning):
    """A checkpoint was opened in a way that leaves something of it out; the message says what."""
