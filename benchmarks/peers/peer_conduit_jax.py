"""Conduit's JAX backend."""

from peer_conduit import peer

PEER = peer("jax")
