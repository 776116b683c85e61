"""Conduit beside other libraries: one module or package each, imported only by name, each needing its library."""
