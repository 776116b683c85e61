"""Conduit's PyTorch backend."""

from peer_conduit import peer

PEER = peer("torch")
