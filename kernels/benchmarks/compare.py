"""The comparisons that both devices have: with peers, and of dials and masks with the fast path.

Each returns rows for the results file and prints them as a table. A row of an attention that did
not run says why in the column `refused`. What each device measures, and what it must reach, is in
`cpu` and `gpu`.
"""

from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from measure import Times, flops, take_turns, timed
from registry import DIAL_SHAPES, DIALS, MASKS, Inputs, draw, masked

from attention_kernels import PROFILES, attention, flash_attention
from attention_kernels.masks import Mask
from attention_kernels.peers.registry import PeerStatus
from attention_kernels.testing import Shape

__all__ = [
    "Requirement",
    "Row",
    "compare_dials",
    "compare_kernels",
    "compare_masks",
    "compare_peers",
]

QUADRATIC = ("sdpa:math", "baseline:plain")
"""These hold the whole score matrix, and are left out where it is larger than `MAX_SCORES`."""
MAX_SCORES = {"cpu": 2**28, "cuda": 2**30}


Row = dict[str, Any]


class Requirement(NamedTuple):
    """A measured number and what it has to be."""

    claim: str
    measured: float
    limit: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        """Whether the number is within the limit; NaN is not."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    def to_dict(self) -> Row:
        """Return what the results file stores."""
        return self._asdict() | {"met": self.met}


def compare_peers(
    device: str,
    shape: Shape,
    *,
    causal: bool,
    own: list[str],
    others: list[PeerStatus],
    rounds: int,
) -> tuple[list[Row], dict[str, Times]]:
    """Time our own and the peers on one problem, side by side; those that refuse it say why."""
    inputs = draw(shape, device, {"causal": causal})
    scores = shape.batch * shape.heads * shape.query_len * shape.key_len
    forward_only = tuple(peer.name for peer in others if not peer.backward)
    calls, refused = {}, {}
    # FlexAttention is compiled anew for each shape, and torch refuses the ninth.
    torch.compiler.reset()
    for name in (*own, *(peer.name for peer in others)):
        if name in QUADRATIC and scores > MAX_SCORES[device]:
            continue
        call = partial(attention, implementation=name)
        reason = _refusal(call, inputs, backward=name not in forward_only)
        if reason:
            refused[name] = reason
        else:
            calls[name] = (call, inputs)
    times = take_turns(calls, rounds=rounds, forward_only=forward_only)
    return _speed_rows("peers", shape, causal, times, refused), times


def compare_kernels(
    device: str, shape: Shape, *, causal: bool, others: list[PeerStatus], rounds: int
) -> list[Row]:
    """Time the launches of `fa2` alone, without operator and autograd, beside calls of peers."""
    from attention_kernels.triton import launch  # of an optional dependency

    inputs = draw(shape, device, {"causal": causal})
    calls = {p.name: (partial(attention, implementation=p.name), inputs) for p in others}
    times = take_turns(calls, rounds=rounds) if calls else {}
    q, k, v, dout = (x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    numerics = PROFILES["fa2"].resolve(q.dtype)
    call = {"mask": Mask(causal=causal), "scale": q.shape[3] ** -0.5, "numerics": numerics}
    forward = partial(launch.forward, q, k, v, **call)
    out, lse = forward()
    backward = partial(launch.backward, dout, q, k, v, out, lse, **call)
    turns = [[timed(x, q.is_cuda)[0] for x in (forward, backward)] for _ in range(rounds + 1)]
    times["fa2 launches"] = Times(*(median(each) for each in zip(*turns[1:], strict=True)))
    return _speed_rows("kernels", shape, causal, times, {})


def _speed_rows(
    section: str, shape: Shape, causal: bool, times: dict[str, Times], refused: dict[str, str]
) -> list[Row]:
    count = flops(shape, causal=causal)
    about = {"section": section, "case": str(shape), "causal": causal}
    rows = []
    for name, (forward, backward) in times.items():
        row = about | {"name": name, "forward_s": forward, "backward_s": backward}
        row["forward_tflops"] = count / forward / 1e12
        row["backward_tflops"] = None if backward is None else 2.5 * count / backward / 1e12
        rows.append(row)
    rows += [about | {"name": name, "refused": reason} for name, reason in refused.items()]
    _print_speeds(f"{shape}  {'causal' if causal else 'full'}  BF16", rows)
    return rows


def _refusal(call: Any, inputs: Inputs, *, backward: bool) -> str:
    """Return why the call does not run on this device, forward and backward, or ""."""
    leaves = (inputs.q, inputs.k, inputs.v)
    try:
        with torch.set_grad_enabled(backward):
            out = call(*leaves, **inputs.mask)
        if backward:
            torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype))
    except (ValueError, AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0].partition(";")[0] or type(error).__name__
    return ""


def compare_dials(device: str, rounds: int) -> list[Row]:
    """Time each dial alone against the fast path, causal."""
    shape = DIAL_SHAPES[device]
    inputs = draw(shape, device, {"causal": True})
    fast = PROFILES["fa2"]
    calls, refused = {"fast path": (flash_attention, inputs)}, {}
    for name, changes in DIALS.items():
        call = partial(flash_attention, numerics=fast.with_(**changes))
        reason = _refusal(call, inputs, backward=True)
        if reason:
            refused[name] = reason
        else:
            calls[name] = (call, inputs)
    times = take_turns(calls, rounds=rounds)
    return _cost_rows("dials", f"dials of fa2 at {shape}, causal", shape, times, refused)


def compare_masks(device: str, rounds: int) -> list[Row]:
    """Time each kind of mask against attention without one."""
    shape = DIAL_SHAPES[device]
    drawn = {kind: masked(kind, shape, device) for kind in MASKS}
    refused = {
        kind: _refusal(flash_attention, inputs, backward=True) for kind, inputs in drawn.items()
    }
    calls = {kind: (flash_attention, drawn[kind]) for kind in MASKS if not refused[kind]}
    times = take_turns(calls, rounds=rounds)
    why = {kind: reason for kind, reason in refused.items() if reason}
    return _cost_rows("masks", f"masks of fa2 at {shape}", shape, times, why)


def _cost_rows(
    section: str, title: str, shape: Shape, times: dict[str, Times], refused: dict[str, str]
) -> list[Row]:
    fast = next(iter(times.values()))
    rows = []
    for name, found in times.items():
        row: Row = {"section": section, "case": str(shape), "name": name}
        row |= {"forward_s": found.forward, "backward_s": found.backward}
        row["forward_cost"] = found.forward / fast.forward
        row["backward_cost"] = (found.both - found.forward) / (fast.both - fast.forward)
        row["cost"] = found.both / fast.both
        rows.append(row)
    for name, reason in refused.items():
        rows.append({"section": section, "case": str(shape), "name": name, "refused": reason})
    _print_costs(title, rows)
    return rows


def _print_speeds(title: str, rows: list[Row]) -> None:
    """Print one problem's attentions: milliseconds and TFLOPS, forward and backward."""
    print(f"\n{title}")
    print(f"  {'':18}{'forward ms':>12}{'TFLOPS':>9}{'backward ms':>13}{'TFLOPS':>9}")
    for row in rows:
        if "refused" in row:
            print(f"  {row['name']:18}{'not here: ':>12}{row['refused']}")
            continue
        ahead = f"{1e3 * row['forward_s']:12.3f}{row['forward_tflops']:9.3g}"
        back = f"{'forward only':>22}"
        if row["backward_s"] is not None:
            back = f"{1e3 * row['backward_s']:13.3f}{row['backward_tflops']:9.3g}"
        print(f"  {row['name']:18}{ahead}{back}")


def _print_costs(title: str, rows: list[Row]) -> None:
    """Print variants of the fast path: how many times as long each takes, or why it doesn't run."""
    print(f"\n{title}")
    print(f"  {'':26}{'forward':>9}{'backward':>10}{'both':>8}   (1.00 is the fast path)")
    for row in rows:
        if "refused" in row:
            print(f"  {row['name']:26}{'not here: ':>10}{row['refused']}")
        else:
            costs = f"{row['forward_cost']:9.2f}{row['backward_cost']:10.2f}{row['cost']:8.2f}"
            print(f"  {row['name']:26}{costs}")
