"""No speed without right results: each attention is held to flash-attn's budget first.

One of ours that is wrong ends the run. A peer that is wrong, or refuses, is left out, and said so.
"""

import torch
from registry import GATE_SHAPE, draw

from attention_kernels import attention
from attention_kernels.peers.registry import PeerStatus
from attention_kernels.testing import Shape, assert_within_budget, with_gradients

__all__ = ["gate", "right_peers"]

FACTORS = {"flash:all_bf16": 8.0}
"""Over the baseline's error; 3 for all others. Sums kept in BF16 err more: that is the point."""


def gate(device: str, name: str, shape: Shape = GATE_SHAPE, *, forward_only: bool = False) -> None:
    """Raise AssertionError naming what is wrong, causal or not, forward or backward."""
    inputs = draw(shape, device)
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    wide = [x.double() for x in tensors]
    for causal in (False, True):
        exact = with_gradients(attention, *wide, implementation="golden", causal=causal)
        plain = with_gradients(attention, *tensors, implementation="baseline:plain", causal=causal)
        for what, value in _run(name, tensors, causal, forward_only).items():
            factor = FACTORS.get(name, 3.0)
            assert_within_budget(value, plain[what], exact[what], factor, f"{name} {what}")


def _run(
    name: str, tensors: list[torch.Tensor], causal: bool, forward_only: bool
) -> dict[str, torch.Tensor]:
    options = {"implementation": name, "causal": causal}
    if forward_only:
        with torch.no_grad():
            return {"out": attention(*tensors[:3], **options)}
    return with_gradients(attention, *tensors, **options)


def right_peers(device: str, found: list[PeerStatus]) -> list[PeerStatus]:
    """Return the peers that run and are right; print the others with the reason."""
    shape = GATE_SHAPE._replace(kv_heads=GATE_SHAPE.heads)  # not all peers take grouped heads
    right = []
    for peer in found:
        reason = peer.reason
        if peer.available:
            try:
                gate(device, peer.name, shape, forward_only=not peer.backward)
            except (ValueError, AssertionError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
            else:
                right.append(peer)
                continue
        print(f"  {peer.name:18}left out: {reason}")
    return right
