"""The ledger as a table."""

from __future__ import annotations

from conduit.core.ledger import Ledger, OperatorSeconds, Seconds
from conduit.core.placement import format_bytes
from conduit.errors import MissingExtraError

try:
    from rich.table import Table
except ImportError as error:
    raise MissingExtraError("conduit.report needs rich; install it with: pip install 'conduit-rl[cli]'") from error


def ledger_table(ledger: Ledger, title: str = "Where the seconds went") -> Table:
    """One row a stage, with seconds of the whole run and milliseconds an iteration; all of it measured. Below them, what of the
    busy seconds went to the disk."""
    total, iterations = ledger.total, max(ledger.iteration_count, 1)
    table = Table(title=f"{title} ({ledger.iteration_count:,} iterations, {total.wall_s:.2f} s)")
    for heading in ("stage", "busy s", "hidden s", "exposed s", "exposed ms / iteration"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage, seconds in _stages(total):
        per_iteration = f"{1e3 * seconds.exposed_s / iterations:.3f}"
        table.add_row(
            stage, f"{seconds.busy_s:.3f}", f"{seconds.hidden_s:.3f}", f"{seconds.exposed_s:.3f}", per_iteration
        )
    for label, waited_s in (("learners starved", total.starved_s), ("actors blocked", total.blocked_s)):
        if waited_s > 0:
            table.add_row(label, "", "", f"{waited_s:.3f}", f"{1e3 * waited_s / iterations:.3f}")
    for at, traffic in ledger.traffic.items():
        table.add_section()
        table.add_row(f"{at} written, {format_bytes(traffic.write_bytes)}", f"{traffic.write_s:.3f}", "", "", "")
        table.add_row(f"{at} read, {format_bytes(traffic.read_bytes)}", f"{traffic.read_s:.3f}", "", "", "")
    return table


def _stages(total: Seconds) -> list[tuple[str, OperatorSeconds]]:
    return [
        ("rollout", OperatorSeconds(total.rollout_s, total.rollout_s)),
        ("update", OperatorSeconds(total.update_s, total.update_s)),
        ("ingestion", total.ingestion),
        ("delivery", total.delivery),
    ]
