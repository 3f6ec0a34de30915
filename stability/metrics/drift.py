"""Drift: how far one set of weights is from another, per parameter and over all.

`w1` is blind to position and often a hundred times smaller than `mean_abs`; it never stands alone.
Everything is accumulated in FP64. Leaves out what a drift means (`analysis`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stability.metrics.wasserstein import sorted_values, wasserstein_sorted

__all__ = ["DRIFT_METRICS", "drift"]

DRIFT_METRICS = ("w1", "w1_over_std", "mean_abs", "max_abs", "rel_l2", "cosine", "sign_flips")


def drift(
    state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor]
) -> dict[str, dict[str, float]]:
    """Return the metrics of `DRIFT_METRICS` by parameter, and for "all" of them pooled.

    `state_b` is the reference: `rel_l2` = |a - b| / |b|, `w1_over_std` = W1 / std(b). `sign_flips`
    is the share of values with a positive sign in one and a negative in the other; zero has no
    sign. Equal weights give 0 exactly, and cosine 1 exactly. ValueError lists the names or shapes
    that differ, or names a parameter that holds no floating-point values.
    """
    _check(state_a, state_b)
    result: dict[str, dict[str, float]] = {}
    pooled, sorted_a, sorted_b = _Sums(), [], []
    for name, b in state_b.items():
        a = state_a[name].detach().to(b.device)
        sums = _sums(a, b.detach())
        values_a, values_b = sorted_values(a), sorted_values(b)
        result[name] = _metrics(sums, wasserstein_sorted(values_a, values_b))
        pooled = pooled + sums
        sorted_a.append(values_a)
        sorted_b.append(values_b)
    w1 = wasserstein_sorted(sorted_values(torch.cat(sorted_a)), sorted_values(torch.cat(sorted_b)))
    return {"all": _metrics(pooled, w1), **result}


@dataclass(frozen=True, slots=True)
class _Sums:
    """What the metrics are made of; adds up over parameters."""

    count: int = 0
    abs: float = 0.0
    max: float = 0.0
    squares: float = 0.0
    dot: float = 0.0
    a_squares: float = 0.0
    b_squares: float = 0.0
    b_sum: float = 0.0
    flips: int = 0

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            count=self.count + other.count,
            abs=self.abs + other.abs,
            max=max(self.max, other.max),
            squares=self.squares + other.squares,
            dot=self.dot + other.dot,
            a_squares=self.a_squares + other.a_squares,
            b_squares=self.b_squares + other.b_squares,
            b_sum=self.b_sum + other.b_sum,
            flips=self.flips + other.flips,
        )


def _sums(a: Tensor, b: Tensor) -> _Sums:
    a64, b64 = a.double().flatten(), b.double().flatten()
    difference = a64 - b64
    flips = (a64 * b64 < 0).sum()
    return _Sums(
        count=b64.numel(),
        abs=float(difference.abs().sum()),
        max=float(difference.abs().amax()),
        squares=float(difference.dot(difference)),
        dot=float(a64.dot(b64)),
        a_squares=float(a64.dot(a64)),
        b_squares=float(b64.dot(b64)),
        b_sum=float(b64.sum()),
        flips=int(flips),
    )


def _metrics(sums: _Sums, w1: float) -> dict[str, float]:
    mean = sums.b_sum / sums.count
    std = max(sums.b_squares / sums.count - mean**2, 0.0) ** 0.5
    norms = (sums.a_squares * sums.b_squares) ** 0.5
    equal = sums.squares == 0
    return {
        "w1": w1,
        "w1_over_std": _ratio(w1, std),
        "mean_abs": sums.abs / sums.count,
        "max_abs": sums.max,
        "rel_l2": _ratio(sums.squares**0.5, sums.b_squares**0.5),
        "cosine": 1.0 if equal else _ratio(sums.dot, norms),
        "sign_flips": sums.flips / sums.count,
    }


def _ratio(numerator: float, denominator: float) -> float:
    if numerator == 0:
        return 0.0
    return numerator / denominator if denominator else float("inf")


def _check(state_a: Mapping[str, Tensor], state_b: Mapping[str, Tensor]) -> None:
    names = sorted(set(state_a).symmetric_difference(state_b))
    if names or not state_b:
        raise ValueError(
            "drift: state_a and state_b must hold the same parameters, at least one; "
            f"only one has: {', '.join(names) or 'none at all'}"
        )
    for name, b in state_b.items():
        a = state_a[name]
        if a.shape != b.shape or not b.numel():
            raise ValueError(
                f"drift: {name} must have one shape in both and hold values, got "
                f"{tuple(a.shape)} and {tuple(b.shape)}"
            )
        if not (a.is_floating_point() and b.is_floating_point()):
            raise ValueError(f"drift: {name} must be floating-point, got {a.dtype} and {b.dtype}")
