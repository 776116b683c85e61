"""Leases on rows: so a gather neither blocks the buffer's cursor nor sees a torn row, and a writer has to do with readers of the
very rows only that it is about to replace."""

from __future__ import annotations

from collections.abc import Callable

from conduit.core.halt import Halt


class Lease:
    """Rows from `oldest` on stay as they are until `read` has run. Whoever comes first runs it: the one who wants the rows,
    or a writer that would overwrite them. So a writer never waits for what else a reader has to do before."""

    __slots__ = ("oldest", "read", "taken")

    def __init__(self, oldest: int, read: Callable[[], None]) -> None:
        self.oldest = oldest
        self.read = read
        self.taken = False


class Leases:
    """The leases on one buffer's rows. `take` and `settle` are called in a turn of the store's Order, the rest by anybody."""

    def __init__(self, halt: Halt) -> None:
        self._halt = halt
        self._leases: dict[Lease, None] = {}  # in the order in which they were taken, which is the same in every run
        self._unleased = halt.condition("buffer")

    def take(self, oldest: int, read: Callable[[], None]) -> Lease:
        """A lease on rows from `oldest` on, taken in the turn that drew them, or they may be gone already. `read` must not raise."""
        lease = Lease(oldest, read)
        with self._unleased:
            self._leases[lease] = None
        return lease

    def redeem(self, lease: Lease) -> None:
        """Returns when the lease's `read` has run, here or elsewhere, or the lease was given up."""
        mine = False
        # A Ctrl-C may come anywhere: whoever took it ends it, or all who come to these rows would wait for ever.
        try:
            with self._unleased:
                if lease.taken:
                    self._halt.wait(
                        self._unleased, lambda: lease not in self._leases, None, lambda: "rows are being read"
                    )
                    return
                lease.taken = mine = True
            lease.read()
        finally:
            if mine:
                self._end(lease)

    def give_up(self, lease: Lease) -> None:
        """Nobody wants the rows any more."""
        mine = False
        try:
            with self._unleased:
                if lease.taken:
                    return
                lease.taken = mine = True
        finally:
            if mine:
                self._end(lease)

    def settle(self, first: int | None) -> None:
        """Rows before `first`, or any rows if that is None, are about to be overwritten: returns when nobody has to read them any
        more."""
        # No lease can be taken meanwhile: that needs a turn, and the caller is in one.
        while self._leases:
            blocking = next((lease for lease in list(self._leases) if first is None or lease.oldest < first), None)
            if blocking is None:
                return
            self.redeem(blocking)

    def _end(self, lease: Lease) -> None:
        with self._unleased:
            self._leases.pop(lease, None)
            self._unleased.notify_all()
