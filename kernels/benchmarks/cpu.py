"""What is measured on a CPU, and what it must reach: an honest subset that takes minutes.

Required: the twin, `fa2`, forward plus backward, takes at most 1.0x the time of
`baseline_attention` at length 512 and 0.6x at 4096; the twin's memory is linear in length; golden
takes at most 5 minutes at (4, 8, 8192, 128); a call of (1, 2, 128, 16) takes at most 1.3x the twin
alone; a dial of the twin, forward plus backward, costs at most 1.3x its fast path, but for those
that compute more by nature (`DEARER`).
"""

from functools import partial
from statistics import median

import torch
from compare import Requirement, Row, compare_dials, compare_masks, compare_peers
from measure import golden_peak, seconds, take_turns, twin_growth
from registry import CPU_SHAPES, LONG_SHAPE, SHORT_SHAPE, draw, square

from attention_kernels import PROFILES, flash_attention, golden_attention
from attention_kernels.masks import Mask
from attention_kernels.peers.registry import PeerStatus
from attention_kernels.twin.forward import forward

__all__ = ["OWN", "run_golden", "sections"]

OWN = ["flash:fa2", "flash:all_bf16", "baseline:plain"]
LIMITS = {SHORT_SHAPE: 1.0, LONG_SHAPE: 0.6}
ROUNDS = {SHORT_SHAPE: 7, LONG_SHAPE: 3}
DIAL_ROUNDS = 9
MAX_GROWTH = 2.5
"""Of memory where length doubles: linear is 2, quadratic 4."""
MAX_GOLDEN_BYTES = 2e9
MAX_GOLDEN_SECONDS = 300.0
MIN_INTERPRETER_OVER_TWIN = 20.0
MAX_CALL_OVER_TWIN = 1.3
MAX_DIAL_COST = 1.3
DEARER = {
    "each operation bf16": "every step of the recurrence is rounded, one by one",
    "all points fp64": "numbers of twice the width",
    "rounding stochastic": "a hash of 11 steps for each value that is rounded",
    "published beta 7": "blocks that are hidden from all rows move maxima, so none is skipped",
    "e4m3 per_tensor": "factors are searched, divided by and multiplied; query blocks one by one",
    "e4m3 per_block": "the same",
}
"""Dials that compute more than the fast path by nature, and what."""

Result = tuple[list[Row], list[Requirement]]


def sections(others: list[PeerStatus]) -> dict[str, object]:
    """Return what can be run, by name."""
    return {
        "peers": partial(_peers, others),
        "dials": _dials,
        "masks": lambda: (compare_masks("cpu", rounds=3), []),
        "memory": _memory,
        "interpreter": _interpreter,
        "small call": _small_call,
    }


def _peers(others: list[PeerStatus]) -> Result:
    rows, requirements = [], []
    for shape in (*CPU_SHAPES, LONG_SHAPE):
        for causal in (False, True):
            only_required = shape == LONG_SHAPE
            found, times = compare_peers(
                "cpu",
                shape,
                causal=causal,
                own=["flash:fa2", "baseline:plain"] if only_required else OWN,
                others=_fused(others) if only_required else others,
                rounds=ROUNDS.get(shape, 3),
            )
            rows += found
            if shape in LIMITS:
                ratio = times["flash:fa2"].both / times["baseline:plain"].both
                claim = f"twin over baseline, forward + backward, {shape}"
                claim += " causal" if causal else ""
                requirements.append(Requirement(claim, ratio, LIMITS[shape]))
    return rows, requirements


def _fused(others: list[PeerStatus]) -> list[PeerStatus]:
    return [peer for peer in others if peer.name not in ("sdpa:math", "flex")]


def _dials() -> Result:
    rows = compare_dials("cpu", rounds=DIAL_ROUNDS)
    costs = {row["name"]: row["cost"] for row in rows[1:] if "cost" in row}
    dearer = {name: why for name, why in DEARER.items() if name in costs}
    print("\ncompute more by nature", *(f"  {n:26}{why}" for n, why in dearer.items()), sep="\n")
    dearest = max(costs.keys() - dearer.keys(), key=costs.__getitem__)
    claim = f"the dearest other dial over the fast path, forward + backward ({dearest})"
    return rows, [Requirement(claim, costs[dearest], MAX_DIAL_COST)]


def _memory() -> Result:
    growth = {length: twin_growth(length) for length in (4096, 8192)}
    rows: list[Row] = [
        {"section": "memory", "name": "flash:fa2", "case": f"length {length}", "bytes": count}
        for length, count in growth.items()
    ]
    peak = golden_peak(8192)
    rows.append({"section": "memory", "name": "golden", "case": "b1-h8-q8192-d128", "bytes": peak})
    print("\nmemory, forward + backward")
    for row in rows:
        print(f"  {row['name']:12}{row['case']:20}{row['bytes'] / 1e6:9.0f} MB")
    ratio = growth[8192] / growth[4096]
    return rows, [
        Requirement("the twin's memory at length 8192 over 4096", ratio, MAX_GROWTH),
        Requirement("bytes at golden's peak, length 8192", peak, MAX_GOLDEN_BYTES),
    ]


def _interpreter() -> Result:
    inputs = draw(square(1, 4, 256, 64), "cpu")
    engines = {name: partial(flash_attention, engine=name) for name in ("twin", "triton")}
    times = take_turns({name: (call, inputs) for name, call in engines.items()}, rounds=1)
    ratio = times["triton"].both / times["twin"].both
    print(
        f"\ninterpreted Triton at length 256: {times['triton'].both:.2f} s, {ratio:.0f}x the twin"
    )
    row: Row = {"section": "interpreter", "case": str(square(1, 4, 256, 64)), "over_twin": ratio}
    claim = "interpreted Triton over the twin"
    return [row], [Requirement(claim, ratio, MIN_INTERPRETER_OVER_TWIN, at_most=False)]


def _small_call() -> Result:
    """Time what a call does around its engine, at a size where that shows."""
    inputs = draw(square(1, 2, 128, 16), "cpu")
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    numerics = PROFILES["fa2"].resolve(q.dtype)
    alone = partial(forward, q, k, v, mask=Mask(), scale=0.25, numerics=numerics)
    calls = {"alone": alone, "called": partial(flash_attention, q, k, v, engine="twin")}
    # each a few hundred microseconds: hundreds in turns
    turns = [{name: seconds(call) for name, call in calls.items()} for _ in range(500)]
    times = {name: median(turn[name] for turn in turns) for name in calls}
    ratio = times["called"] / times["alone"]
    print(
        f"\na call at (1, 2, 128, 16): {1e6 * times['called']:.0f} us, {ratio:.2f}x the twin alone"
    )
    row: Row = {"section": "small call", "case": str(square(1, 2, 128, 16)), "over_twin": ratio}
    return [row], [Requirement("a small call over the twin alone", ratio, MAX_CALL_OVER_TWIN)]


def run_golden() -> Result:
    """Time the golden's forward at (4, 8, 8192, 128); minutes."""
    inputs = draw(square(4, 8, 8192, 128), "cpu")
    with torch.no_grad():
        took = seconds(lambda: golden_attention(inputs.q, inputs.k, inputs.v))
    print(f"\ngolden forward at (4, 8, 8192, 128): {took:.0f} s")
    row: Row = {"section": "golden", "case": str(square(4, 8, 8192, 128)), "forward_s": took}
    claim = "seconds of golden's forward at (4, 8, 8192, 128)"
    return [row], [Requirement(claim, took, MAX_GOLDEN_SECONDS)]
