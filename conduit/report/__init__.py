"""Tables of what a store did and decided; rich is imported only here."""

from conduit.report.ledger import ledger_table

__all__ = ["ledger_table"]
