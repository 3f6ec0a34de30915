"""Drift: how far one set of weights is from another, per parameter and over all.

What is measured. `rel_l2`, `mean_abs` and `max_abs` compare each weight with its own counterpart;
`w1` compares only the two distributions of values. It never exceeds `mean_abs`, is often a hundred
times smaller, and is 0 for a permutation, so it never stands alone. `sign_flips` counts the weights
that are positive in one state and negative in the other.

How it is summed. Exactly (`exact_sums`), so that no order of the weights, no threads and no shards
change a bit: "all" is the sum of the parameters' sums, and only sums that are whole are rounded.

Leaves out what a drift means (`analysis`), and the Wasserstein distance itself (`wasserstein`).
"""

import difflib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stability.metrics.exact_sums import PairSums, pair_sums
from stability.metrics.sorted_runs import runs_gap_sum
from stability.metrics.wasserstein import (
    HELD,
    Counts,
    count_codes,
    counted_wasserstein,
    pool,
    pooled_wasserstein,
    sort_values_,
    wasserstein_sorted,
)

__all__ = [
    "ALL",
    "check_names",
    "drift",
    "metrics_of",
    "no_drift",
    "same_bits",
    "weights_of_both",
]

ALL = "all"
"""Stands for every parameter pooled, where a metric's name has a parameter."""

State = Mapping[str, Tensor]
Drifts = dict[str, dict[str, float]]


def drift(
    state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    """Return the metrics of each parameter by name, and those of all parameters pooled as "all".

    a is the candidate and b the reference: `rel_l2` = |a - b| / |b|, `w1_over_std` = W1 / std(b),
    infinite where only the divisor is 0. `sign_flips` is the share of values that are positive in
    one and negative in the other; zero has no sign. A cosine with a zero vector is NaN.

    The same bits give 0 exactly and cosine 1 exactly, even where they are no finite values; in
    other states a NaN or infinity is carried into what depends on it. Tensors are asked for one
    pair at a time, several times, and copies are of one pair or, for "all", of `HELD` values and
    an eighth more: a mapping that loads what it is asked for may be larger than the memory. On a
    CPU torch's number of threads share the work.

    ValueError lists the names or shapes that differ, or a parameter that is empty or holds no
    floating-point values.
    """
    check_names(state_a, state_b)
    _check_parameters(state_a, state_b)
    same, devices = set(), set()
    for name in state_b:
        a, b = state_a[name], state_b[name]
        devices |= {a.device.type, b.device.type}
        same |= {name} if same_bits(a, b) else set()
        del a, b  # before the next pair is loaded
    # an arm that repeats its baseline to the bit costs no FP64 pass and no sort
    if len(same) == len(state_b):
        return {name: no_drift() for name in (ALL, *state_b)}

    formats = [{t.to("meta").dtype for t in state.values()} for state in (state_a, state_b)]
    if all(format.itemsize <= 2 for side in formats for format in side):
        return _by_counting(state_a, state_b, same)
    count = sum(tensor.to("meta").numel() for tensor in state_b.values())
    if 2 * count <= HELD and devices == {"cpu"}:
        wide = torch.float64 if torch.float64 in formats[0] | formats[1] else torch.float32
        return _in_memory(state_a, state_b, same, wide, count)
    result, total = {ALL: {}}, PairSums()
    for name in state_b:
        found, result[name] = _measure(state_a[name], state_b[name], same=name in same)
        total += found
    w1 = pooled_wasserstein(state_a.values(), state_b.values(), held=HELD)
    result[ALL] = metrics_of(total, w1)
    return result


def _by_counting(state_a: State, state_b: State, same: set[str]) -> Drifts:
    """Measure formats of at most 16 bits: values are counted, in one pass, and never sorted."""
    result, total = {ALL: {}}, PairSums()
    pooled: tuple[Counts, Counts] = ({}, {})
    for name in state_b:
        a, b = state_a[name], state_b[name]
        counts = count_codes([a]), count_codes([b])
        for into, found in zip(pooled, counts, strict=True):
            for format, codes in found.items():
                into[format] = into.get(format, 0) + codes
        sums = pair_sums(pool([a.to(b.device)]), pool([b]))
        del a, b  # before the next pair is loaded
        result[name] = (
            no_drift() if name in same else metrics_of(sums, counted_wasserstein(*counts))
        )
        total += sums
    result[ALL] = metrics_of(total, counted_wasserstein(*pooled))
    return result


def _in_memory(
    state_a: State, state_b: State, same: set[str], wide: torch.dtype, count: int
) -> Drifts:
    """Measure what fits in memory: each parameter is sorted once, in its place among all."""
    a, b = torch.empty(count, dtype=wide), torch.empty(count, dtype=wide)
    starts, threads = [0], torch.get_num_threads()
    with ThreadPoolExecutor(threads) as workers:
        waiting = {}
        for name in state_b:
            place = slice(starts[-1], starts[-1] + state_b[name].numel())
            for into, state in ((a, state_a), (b, state_b)):
                into[place].view(state[name].shape).copy_(state[name].detach())
            waiting[name] = workers.submit(_measure_sorting_, a[place], b[place], name in same)
            starts.append(place.stop)
        found = {name: each.result() for name, each in waiting.items()}
    total = sum((sums for sums, _ in found.values()), PairSums())
    result = {ALL: {}, **{name: metrics for name, (_, metrics) in found.items()}}
    if len(found) == 1:
        w1 = next(iter(found.values()))[1]["w1"]
    elif all(math.isfinite(float(each)) for each in (total.a_square, total.b_square)):
        runs = a.numpy(), b.numpy(), np.array(starts)
        w1 = runs_gap_sum(*runs, threads).mean(count)
    else:
        w1 = wasserstein_sorted(sort_values_(a), sort_values_(b))
    result[ALL] = metrics_of(total, w1)
    return result


def weights_of_both(
    state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return both states less the weights whose names only one of them has, in the order of b.

    For a pair whose change adds weights to a model: `drift` asks for the same names.
    """
    both = [name for name in state_b if name in state_a]
    return {name: state_a[name] for name in both}, {name: state_b[name] for name in both}


def _measure(a: Tensor, b: Tensor, *, same: bool) -> tuple[PairSums, dict[str, float]]:
    return _measure_sorting_(pool([a.to(b.device)]), pool([b]), same)


def _measure_sorting_(a: Tensor, b: Tensor, same: bool) -> tuple[PairSums, dict[str, float]]:
    """Return what a pair adds to "all", and its metrics; a and b, flat, are sorted in place."""
    sums = pair_sums(a, b)  # needs positions
    a, b = sort_values_(a), sort_values_(b)
    return sums, no_drift() if same else metrics_of(sums, wasserstein_sorted(a, b))


def metrics_of(sums: PairSums, w1: float) -> dict[str, float]:
    """Return the metrics that the sums over all pairs and W1 make."""
    norm_b = math.sqrt(float(sums.b_square))
    return {
        "w1": w1,
        "w1_over_std": _ratio(w1, math.sqrt(sums.b_variance)),
        "mean_abs": float(sums.abs_error) / sums.count,
        "max_abs": sums.max_abs,
        "rel_l2": _ratio(math.sqrt(float(sums.error_square)), norm_b),
        # equal values: their quotient may miss 1 by rounding, and is 0 / 0 for zeros
        "cosine": 1.0 if sums.max_abs == 0 else _cosine(sums),
        "sign_flips": sums.flips / sums.count,
    }


def no_drift() -> dict[str, float]:
    """Return the metrics of equal bits, also where the values are NaN and can't be computed with.

    They are those of a single weight that is 0 in both states.
    """
    return metrics_of(PairSums(count=1), w1=0.0)


def _ratio(numerator: float, denominator: float) -> float:
    if denominator == 0:
        return numerator * math.inf if numerator else 0.0  # a NaN stays one
    return numerator / denominator


def _cosine(sums: PairSums) -> float:
    # roots first: the product of the squares may overflow where that of the norms does not
    norms = math.sqrt(float(sums.a_square)) * math.sqrt(float(sums.b_square))
    if norms == 0 or math.isnan(norms):
        return math.nan
    # rounding can take a cosine just beyond 1
    return max(-1.0, min(1.0, sums.dot / norms))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether a and b are the same bits, NaN payloads included."""
    if a.dtype != b.dtype:
        return False
    first, second = (x.detach().to(b.device).contiguous().view(-1) for x in (a, b))
    # bytes: as floats a NaN is unequal to itself, and -0 equal to +0
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def check_names(state_a: Mapping[str, Any], state_b: Mapping[str, Any]) -> None:
    """Raise ValueError with the names that only one state has, if there are any, or no names."""
    if not state_b or ALL in state_b:
        raise ValueError(
            f'drift: state_b must hold parameters, none of them called "{ALL}", got '
            f"{', '.join(state_b) or 'none'}; pass a state_dict"
        )
    lone = {
        owner: sorted(set(mine) - set(others))
        for owner, mine, others in (("a", state_a, state_b), ("b", state_b, state_a))
    }
    if lone["a"] or lone["b"]:
        named = "; ".join(f"only in state_{s}: {', '.join(n)}" for s, n in lone.items() if n)
        first, others = (lone["a"], state_b) if lone["a"] else (lone["b"], state_a)
        near = difflib.get_close_matches(first[0], others, n=3, cutoff=0.4) or list(others)[:3]
        raise ValueError(
            f"drift: state_a and state_b must hold the same parameters, got {named}; "
            f"nearest to {first[0]}: {', '.join(near)}"
        )


def _check_parameters(state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor]) -> None:
    # without values: all parameters of both states would not fit in memory
    pairs = {name: (state_a[name].to("meta"), state_b[name].to("meta")) for name in state_b}
    shapes = [
        f"{name} {tuple(a.shape)} and {tuple(b.shape)}"
        for name, (a, b) in pairs.items()
        if a.shape != b.shape or b.numel() == 0
    ]
    if shapes:
        raise ValueError(
            "drift: each parameter must have one shape in both states and hold values, got "
            f"{'; '.join(shapes)}; compare runs of one model"
        )
    for name, (a, b) in pairs.items():
        if not (a.is_floating_point() and b.is_floating_point()):
            raise ValueError(
                f"drift: {name} must be floating-point, got {a.dtype} and {b.dtype}; "
                "leave counters and masks out"
            )
