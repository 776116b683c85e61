"""What a store did and decided, as tables (rich) and, in `conduit.report.figures`, as figures (matplotlib); imported only when asked."""

from conduit.report.ledger import ledger_table
from conduit.report.plan import plan_record, plan_table
from conduit.report.topology import topology_table

__all__ = ["ledger_table", "plan_record", "plan_table", "topology_table"]
