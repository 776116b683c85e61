"""The torch backend: its device tiers, and what crosses to and from torch."""
