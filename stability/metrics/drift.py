"""Drift: how far one set of weights is from another, per parameter and over all.

What is measured. `rel_l2`, `mean_abs` and `max_abs` compare each weight with its own counterpart;
`w1` compares only the two distributions of values. It never exceeds `mean_abs`, is often a hundred
times smaller, and is 0 for a permutation, so it never stands alone. `sign_flips` counts the weights
that are positive in one state and negative in the other.

How it is summed. Everything is FP64, chunk by chunk, so that memory does not grow with the model.
Chunks make a parameter and parameters make "all" by the pairwise update of Chan, Golub and LeVeque
(1979). The sum of squares less the square of the sum would not do: in the weights of a LayerNorm
the spread is far smaller than the mean, and the subtraction would leave none of its digits.

Leaves out what a drift means (`analysis`), and the Wasserstein distance itself (`wasserstein`).
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import reduce
from operator import add

import torch
from torch import Tensor

from stability.metrics.wasserstein import (
    HELD,
    pool,
    pooled_wasserstein,
    sort_values_,
    wasserstein_sorted,
)

__all__ = ["ALL", "drift", "weights_of_both"]

ALL = "all"
"""Stands for every parameter pooled, where a metric's name has a parameter."""

# Torch's own grain: a dozen FP64 passes stay in the cache and on one thread, so the sums depend on
# no thread count, and a busy machine does not wait for threads to join. `dot` would: MKL's threads
# make it 7 to 14 times slower at this size (2 cores, torch 2.13).
_CHUNK = 2**15


def drift(
    state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    """Return the metrics of each parameter by name, and those of all parameters pooled as "all".

    a is the candidate and b the reference: `rel_l2` = |a - b| / |b|, `w1_over_std` = W1 / std(b),
    infinite where only the divisor is 0. `sign_flips` is the share of values that are positive in
    one and negative in the other; zero has no sign. A cosine with a zero vector is NaN.

    The same bits give 0 exactly and cosine 1 exactly, even where they are no finite values; in
    other states a NaN or infinity is carried into what depends on it. Tensors are asked for one
    pair at a time, several times, and copies are of one pair or, for "all", of `HELD` values: a
    mapping that loads what it is asked for may be larger than the memory.

    ValueError lists the names or shapes that differ, or a parameter that is empty or holds no
    floating-point values.
    """
    _check_names(state_a, state_b)
    _check_parameters(state_a, state_b)
    same = {name for name in state_b if _same_bits(state_a[name], state_b[name])}
    # an arm that repeats its baseline to the bit costs no FP64 pass and no sort
    if len(same) == len(state_b):
        return {name: _no_drift() for name in (ALL, *state_b)}

    result, moments = {ALL: {}}, []
    for name in state_b:
        found, result[name] = _measure(state_a[name], state_b[name], same=name in same)
        moments.append(found)
    w1 = pooled_wasserstein(state_a.values(), state_b.values(), held=HELD)
    result[ALL] = _metrics(reduce(add, moments), w1)
    return result


def weights_of_both(
    state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return both states less the weights whose names only one of them has, in the order of b.

    For a pair whose change adds weights to a model: `drift` asks for the same names.
    """
    both = [name for name in state_b if name in state_a]
    return {name: state_a[name] for name in both}, {name: state_b[name] for name in both}


def _measure(a: Tensor, b: Tensor, *, same: bool) -> tuple["_Moments", dict[str, float]]:
    a, b = pool([a.to(b.device)]), pool([b])
    moments = _moments(a, b)  # needs positions, so before a and b are sorted in place
    if same:
        return moments, _no_drift()
    return moments, _metrics(moments, wasserstein_sorted(sort_values_(a), sort_values_(b)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Moments:
    """What the metrics of some values are made of; `+` joins those of two sets of values."""

    count: int
    sum_abs: float
    max_abs: float
    sum_square: float
    dot: float
    a_square: float
    b_square: float
    b_mean: float
    b_spread: float
    """Sum of (b - mean of b)^2."""
    flips: float

    def __add__(self, other: "_Moments") -> "_Moments":
        count = self.count + other.count
        step = other.b_mean - self.b_mean
        return _Moments(
            count=count,
            sum_abs=self.sum_abs + other.sum_abs,
            max_abs=_largest(self.max_abs, other.max_abs),
            sum_square=self.sum_square + other.sum_square,
            dot=self.dot + other.dot,
            a_square=self.a_square + other.a_square,
            b_square=self.b_square + other.b_square,
            b_mean=self.b_mean + step * other.count / count,
            b_spread=self.b_spread
            + other.b_spread
            + step * step * self.count * other.count / count,
            flips=self.flips + other.flips,
        )


def _largest(x: float, y: float) -> float:
    """Return the larger number, NaN if either is NaN."""
    # max alone keeps or drops a NaN by its place
    return math.nan if math.isnan(x) or math.isnan(y) else max(x, y)


def _moments(a: Tensor, b: Tensor) -> _Moments:
    chunks = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    return reduce(add, (_chunk_moments(first, second) for first, second in chunks))


def _chunk_moments(a: Tensor, b: Tensor) -> _Moments:
    flips = (a.sign() * b.sign() < 0).sum()  # a * b could underflow
    a, b = a.double(), b.double()
    error = a - b
    size = error.abs()
    # around the first value, a constant has the mean and the spread it should have
    shifted = b - b[0]
    mean = shifted.mean()
    values = torch.stack(
        [
            size.sum(),
            size.amax(),
            error.square().sum(),
            (a * b).sum(),
            a.square().sum(),
            b.square().sum(),
            b[0] + mean,
            (shifted - mean).square().sum(),
            flips,
        ]
    )
    # stacked above, so that a chunk costs one transfer from its device
    names = [field.name for field in fields(_Moments)][1:]
    return _Moments(count=a.numel(), **dict(zip(names, values.tolist(), strict=True)))


def _metrics(moments: _Moments, w1: float) -> dict[str, float]:
    std = math.sqrt(moments.b_spread / moments.count)
    return {
        "w1": w1,
        "w1_over_std": _ratio(w1, std),
        "mean_abs": moments.sum_abs / moments.count,
        "max_abs": moments.max_abs,
        "rel_l2": _ratio(math.sqrt(moments.sum_square), math.sqrt(moments.b_square)),
        # equal values: their quotient may miss 1 by rounding, and is 0 / 0 for zeros
        "cosine": 1.0 if moments.max_abs == 0 else _cosine(moments),
        "sign_flips": moments.flips / moments.count,
    }


def _no_drift() -> dict[str, float]:
    """Return the metrics of equal bits, also where the values are NaN and can't be computed with.

    They are those of a single weight that is 0 in both states.
    """
    zero = torch.zeros(1)
    return _metrics(_moments(zero, zero), w1=0.0)


def _ratio(numerator: float, denominator: float) -> float:
    if denominator == 0:
        return numerator * math.inf if numerator else 0.0  # a NaN stays one
    return numerator / denominator


def _cosine(moments: _Moments) -> float:
    # roots first: the product of the squares may overflow where that of the norms does not
    norms = math.sqrt(moments.a_square) * math.sqrt(moments.b_square)
    if norms == 0 or math.isnan(norms):
        return math.nan
    # rounding can take a cosine just beyond 1
    return max(-1.0, min(1.0, moments.dot / norms))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether a and b are the same bits, NaN payloads included."""
    if a.dtype != b.dtype:
        return False
    first, second = (x.detach().to(b.device).contiguous().view(-1) for x in (a, b))
    # bytes: as floats a NaN is unequal to itself, and -0 equal to +0
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _check_names(state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor]) -> None:
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
