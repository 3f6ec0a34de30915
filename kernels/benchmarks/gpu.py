"""What is measured on an NVIDIA GPU, and what it must reach.

Required of `fa2` in BF16, at head_dim 64, 128 and 256, causal and not: forward and backward at
least as fast as `sdpa:flash`, and forward within 15 % of `sdpa:cudnn`, each as the geometric mean
over lengths 512 to 16k; memory linear in length. The published marks of `published.json` are
printed beside ours.
"""

import json
import math
from functools import partial
from pathlib import Path

import torch
from compare import (
    Requirement,
    Row,
    compare_dials,
    compare_kernels,
    compare_masks,
    compare_peers,
)
from measure import Times
from registry import GPU_SHAPES, draw, square
from torch._functorch import config as functorch_config

from attention_kernels import attention
from attention_kernels.peers.registry import PeerStatus
from attention_kernels.testing import with_gradients

__all__ = ["OWN", "print_published", "sections", "speed_requirements"]

OWN = ["flash:fa2", "flash:all_bf16", "baseline:plain"]
PUBLISHED = Path(__file__).with_name("published.json")
GOALS = (("sdpa:flash", "forward", 1.0), ("sdpa:flash", "backward", 1.0))
GOALS += (("sdpa:cudnn", "forward", 0.85),)
MAX_GROWTH = 2.5

Result = tuple[list[Row], list[Requirement]]
Measured = dict[tuple[int, int, bool], dict[str, Times]]
"""By head_dim, length and whether causal."""


def sections(others: list[PeerStatus]) -> dict[str, object]:
    """Return what can be run, by name, in that order."""
    return {
        "kernels": partial(_kernels, others),
        "memory": _memory,
        "peers": partial(_peers, others),
        "dials": lambda: (compare_dials("cuda", rounds=5), []),
        "masks": lambda: (compare_masks("cuda", rounds=5), []),
    }


def _kernels(others: list[PeerStatus]) -> Result:
    """Time launches alone at length 8192, where no host is waited for."""
    named = [peer for peer in others if peer.name in ("sdpa:flash", "sdpa:cudnn")]
    rows: list[Row] = []
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            shape = square(1, 16, 8192, head_dim)
            rows += compare_kernels("cuda", shape, causal=causal, others=named, rounds=8)
    return rows, []


def _peers(others: list[PeerStatus]) -> Result:
    # a backward is timed several times over one graph, which Inductor forbids unless told
    functorch_config.donated_buffer = False
    rows: list[Row] = []
    measured: Measured = {}
    for shape in GPU_SHAPES:
        for causal in (False, True):
            found, times = compare_peers(
                "cuda", shape, causal=causal, own=OWN, others=others, rounds=5
            )
            rows += found
            measured[shape.head_dim, shape.query_len, causal] = times
    print_published(rows)
    return rows, speed_requirements(measured)


def speed_requirements(measured: Measured) -> list[Requirement]:
    """Return how many times as fast as its goal `fa2` is, one for each head_dim and causal."""
    found = []
    for head_dim, causal in sorted({(key[0], key[2]) for key in measured}):
        cases = [t for (d, _, c), t in measured.items() if (d, c) == (head_dim, causal)]
        for peer, direction, limit in GOALS:
            both = [times for times in cases if peer in times]
            if not both:
                continue
            speedups = [_speedup(times, peer, direction) for times in both]
            mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
            kind = "causal" if causal else "full"
            claim = f"fa2's speed over {peer}'s, {direction}, head_dim {head_dim} {kind}"
            claim += f" (worst length {min(speedups):.2f})"
            found.append(Requirement(claim, mean, limit, at_most=False))
    return found


def _speedup(times: dict[str, Times], peer: str, direction: str) -> float:
    """Return how many times as fast as `peer` we are; next to nothing where we did not run."""
    if "flash:fa2" not in times:
        return 1e-9
    return getattr(times[peer], direction) / getattr(times["flash:fa2"], direction)


def print_published(rows: list[Row]) -> None:
    """Print the published marks beside our best at their head_dim."""
    marks = json.loads(PUBLISHED.read_text())
    print(f"\npublished: {marks['source']}; ours: the fastest length at head_dim 256, this GPU")
    for mark in marks["tflops"]:
        ours = [
            row[f"{mark['direction']}_tflops"]
            for row in rows
            if row["name"] == "flash:fa2"
            and "refused" not in row
            and row["causal"] == mark["causal"]
            and row["case"].endswith(f"-d{marks['head_dim']}")
        ]
        kind = "causal" if mark["causal"] else "full"
        shown = f"{max(ours):7.1f}" if ours else "      -"
        print(f"  {mark['direction']:9} {kind:7} {mark['tflops']:7.1f} TFLOPS   ours {shown}")


def _memory() -> Result:
    growth = {length: _growth(length) for length in (8192, 16384)}
    rows: list[Row] = [
        {"section": "memory", "name": "flash:fa2", "case": f"length {length}", "bytes": count}
        for length, count in growth.items()
    ]
    ratio = growth[16384] / growth[8192]
    print(f"\nmemory at length 16384 over 8192: {ratio:.2f}x")
    return rows, [Requirement("memory at length 16384 over 8192", ratio, MAX_GROWTH)]


def _growth(length: int) -> int:
    inputs = draw(square(1, 16, length, 128), "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    with_gradients(attention, *tensors, implementation="flash:fa2", causal=True)
    return torch.cuda.max_memory_allocated() - before
