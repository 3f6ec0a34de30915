"""Attention of other libraries, behind the same call as ours."""

from attention_kernels.checks import PeerRefusalError
from attention_kernels.peers.registry import PEERS, Peer, PeerStatus, attention, peers

__all__ = ["PEERS", "Peer", "PeerRefusalError", "PeerStatus", "attention", "peers"]
