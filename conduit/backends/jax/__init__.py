"""The JAX backend: its device tiers, and what crosses to and from JAX."""
