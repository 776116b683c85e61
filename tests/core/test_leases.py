"""Leases on rows, where a Ctrl-C comes between taking one and reading."""

from __future__ import annotations

from typing import Any

import pytest

from conduit.clock import REAL
from conduit.core.halt import Halt
from conduit.core.leases import Lease, Leases


class Interrupted:
    """A condition whose next block is left with a KeyboardInterrupt."""

    def __init__(self, condition: Any) -> None:
        self.condition = condition
        self.strikes = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.condition, name)

    def __enter__(self) -> Any:
        return self.condition.__enter__()

    def __exit__(self, *error: object) -> None:
        self.condition.__exit__(*error)
        if self.strikes:
            self.strikes = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("end", [Leases.redeem, Leases.give_up])
def test_a_lease_that_was_interrupted_keeps_nobody_waiting(end: Any):
    leases = Leases(Halt(REAL))
    lease: Lease = leases.take(0, lambda: None)
    leases._unleased = Interrupted(leases._unleased)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyboardInterrupt):
        end(leases, lease)
    assert leases._leases == {}
    leases.settle(None)
