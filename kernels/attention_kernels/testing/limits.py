"""Which measured errors are too large: each limit with the certainty that it takes to say so.

Every right attention passes these at BF16, FP16 and FP32 and every wrong one of `tests/zoo` fails
one of them. A check looks at hundreds of values, so an excess must be certain: gain and bias by a
t-test over independent draws, with one chance in a thousand (`CHANCE`) divided over all tests of
the check; error ratios, and the gain of a single call, by `SURE` standard errors over rows, which
are clusters. A kernel has paths of its own for a scale, strides, GQA or long rows: a gain is
therefore judged in every call by itself too, never only as the mean over calls.

Where plain attention itself has a gain or a bias (few distinct probabilities, all rounded the same
way), an attention may have twice that.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.testing.measured import RANGE, Measured
from attention_kernels.testing.statistics import Estimate, over_looks, t_quantile

__all__ = [
    "CHANCE",
    "LOOK_ROWS",
    "MAX_BIAS",
    "MAX_GAIN",
    "MAX_RATIO",
    "MAX_ROW",
    "SURE",
    "Excess",
    "biases_as_judged",
    "excesses",
    "excesses_in_a_cell",
    "excesses_over_draws",
]

MAX_RATIO = 2.0
MAX_GAIN = 1e-3
MAX_BIAS = 0.05
"""In ULPs; twice that under tied maxima, where a P rounded to FP16 is biased in PyTorch's SDPA."""
MAX_ROW = {"bf16": 10.0, "fp16": 10.0, "fp32": 40.0}
"""How large the error ratio of a single row may be: right ones have up to 5.2, and 14 in FP32."""
CHANCE = 1e-3
SURE = 5.0
_SHIFTED = ("large logits", "far below zero")
"""Laws with few probabilities that are not next to nothing, all rounded alike."""
LOOK_ROWS = 32
"""Rows that a look must have to count in a gain or a bias: fewer hold too few values."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """One statistic of one result beyond its limit, and where."""

    statistic: str
    """error ratio, row, range, gain or bias."""
    result: str
    law: str
    value: float
    error: float
    """The standard error of the value; 0 for a single row's."""
    limit: float
    heads: tuple[int, ...]
    of_heads: int
    rows: tuple[int, ...] = ()
    evidence: tuple[Measured, ...] = ()

    def excess(self) -> float:
        """Return how many limits the value has."""
        return abs(self.value) / self.limit


def excesses(measured: Sequence[Measured], format: str) -> list[Excess]:
    """Return what is too large in one dtype, whose format is named, the worst first."""
    found = [excess for one in measured for excess in excesses_in_a_cell(one, format)]
    found += excesses_over_draws(measured, format)
    return sorted(found, key=Excess.excess, reverse=True)


def excesses_in_a_cell(measured: Measured, format: str) -> Iterator[Excess]:
    """Yield what is too large of one result in one cell, by that cell alone."""
    max_row = MAX_ROW[format]
    yield from _gain_in_a_cell(measured)
    at = {"result": measured.result, "law": measured.where.cell.law, "evidence": (measured,)}
    of_heads = measured.squared_errors.shape[1]
    log, error = measured.log_ratio()
    beyond = log - SURE * error > math.log(MAX_RATIO)
    if beyond.any():
        index = int(torch.where(beyond, log, -math.inf).argmax())
        value = log.flatten()[index].exp().item()
        yield Excess(
            statistic="error ratio",
            value=value,
            error=value * error.flatten()[index].item(),
            limit=MAX_RATIO,
            heads=_heads(beyond),
            of_heads=of_heads,
            **at,
        )
    log, error = measured.log_ratio_of_ranges()
    beyond = log - SURE * error > math.log(MAX_RATIO)
    if beyond.any():
        index = int(torch.where(beyond, log, -math.inf).argmax())
        yield Excess(
            statistic="range",
            value=log[index].exp().item(),
            error=(log[index].exp() * error[index]).item(),
            limit=MAX_RATIO,
            heads=tuple(range(of_heads)),
            of_heads=of_heads,
            rows=tuple(i * RANGE for i in beyond.nonzero().flatten().tolist()),
            **at,
        )
    rows = measured.row_ratio()
    if (rows > max_row).any():
        beyond = rows > max_row
        yield Excess(
            statistic="row",
            value=rows.max().item(),
            error=0.0,
            limit=max_row,
            heads=_heads(beyond.any(-1)),
            of_heads=of_heads,
            rows=tuple(beyond.flatten(0, 1).any(0).nonzero().flatten().tolist()),
            **at,
        )


def _gain_in_a_cell(measured: Measured) -> Iterator[Excess]:
    """Yield a gain that this very call has, of single heads or of all: its path may be its own."""
    rows_of_head = measured.power.shape[0] * measured.power.shape[2]
    of_heads = measured.power.shape[1]
    value, error, baseline = measured.gain_of_heads()
    limit = torch.clamp(2 * baseline.abs(), min=MAX_GAIN)
    rows = torch.tensor([rows_of_head] * of_heads + [rows_of_head * of_heads])
    beyond = (value.abs() - SURE * error > limit) & (rows >= LOOK_ROWS)
    if not beyond.any():
        return
    index = int(torch.where(beyond, value.abs() / limit, -math.inf).argmax())
    heads = tuple(beyond[:-1].nonzero().flatten().tolist())
    yield Excess(
        statistic="gain",
        result=measured.result,
        law=measured.where.cell.law,
        value=value[index].item(),
        error=error[index].item(),
        limit=limit[index].item(),
        heads=heads or tuple(range(of_heads)),
        of_heads=of_heads,
        evidence=(measured,),
    )


def _heads(beyond: Tensor) -> tuple[int, ...]:
    """Return the heads that are beyond in any batch entry."""
    return tuple(beyond.any(0).nonzero().flatten().tolist())


@dataclass(frozen=True, kw_only=True)
class _Series:
    """A statistic of one head under one law, a value a look, and plain attention's own."""

    statistic: str
    result: str
    law: str
    head: int
    """-1 for the mean of all heads."""
    values: tuple[float, ...]
    baseline: tuple[float, ...]
    limit: float

    def judged(self, chance: float) -> tuple[Estimate, float, bool]:
        """Return the mean, its limit, and whether it is surely beyond."""
        mean = over_looks(self.values)
        limit = max(self.limit, 2 * abs(over_looks(self.baseline).value))
        return mean, limit, mean.surely_beyond(limit, chance)


def excesses_over_draws(measured: Sequence[Measured], format: str) -> list[Excess]:
    """Return the gains and biases that are too large as means over all cells of a law."""
    series = [one for one in _all_series(measured, format) if len(one.values) > 3]
    found: dict[tuple[str, str, str], list[tuple[_Series, Estimate, float]]] = {}
    for one in series:
        mean, limit, beyond = one.judged(CHANCE / len(series))
        if beyond:
            found.setdefault((one.statistic, one.result, one.law), []).append((one, mean, limit))
    return [_joined(cases, measured) for cases in found.values()]


def biases_as_judged(
    measured: Sequence[Measured], format: str
) -> dict[str, tuple[Estimate, float]]:
    """Return each result's bias over the draws of N(0, 1), and its limit, as they are judged.

    Of the head, or the mean of all, that is nearest to failing. A single cell's own bias, which is
    not judged, scatters by more than an ULP in FP32, where sums err by several.
    """
    series = [one for one in _all_series(measured, format) if len(one.values) > 3]
    nearest: dict[str, tuple[float, Estimate, float]] = {}
    for one in series:
        if one.statistic != "bias" or one.law != "normal":
            continue
        mean, limit, _ = one.judged(CHANCE / len(series))
        least = abs(mean.value) - t_quantile(CHANCE / len(series), mean.looks - 1) * mean.error
        if one.result not in nearest or least / limit > nearest[one.result][0]:
            nearest[one.result] = least / limit, mean, limit
    return {result: (mean, limit) for result, (_, mean, limit) in nearest.items()}


def _joined(cases: list[tuple[_Series, Estimate, float]], measured: Sequence[Measured]) -> Excess:
    """Return one excess of all heads that have it."""
    one, mean, limit = max(cases, key=lambda case: abs(case[1].value) / case[2])
    evidence = tuple(x for x in measured if x.result == one.result and x.where.cell.law == one.law)
    of_heads = max(x.squared_errors.shape[1] for x in evidence)
    heads = tuple(sorted(case[0].head for case in cases if case[0].head >= 0))
    return Excess(
        statistic=one.statistic,
        result=one.result,
        law=one.law,
        value=mean.value,
        error=mean.error,
        limit=limit,
        heads=heads or tuple(range(of_heads)),
        of_heads=of_heads,
        evidence=evidence,
    )


def _all_series(measured: Sequence[Measured], format: str) -> Iterator[_Series]:
    groups: dict[tuple[str, str], list[Measured]] = {}
    for one in measured:
        if one.squared_errors.shape[-1] >= LOOK_ROWS:
            groups.setdefault((one.where.cell.law, one.result), []).append(one)
    for (law, result), ones in groups.items():
        gains = [(x.gains, x.baseline_gains) for x in ones]
        yield from _by_head("gain", law, result, MAX_GAIN, gains)
        if _bias_is_judged(law, result, format):
            biases = [(x.biases, x.baseline_biases) for x in ones]
            limit = 2 * MAX_BIAS if law == "tied maxima" else MAX_BIAS
            yield from _by_head("bias", law, result, limit, biases)
        if result == "out" and format != "fp32" and law not in _SHIFTED:
            outward = [(x.outward, x.baseline_outward) for x in ones]
            limit = 2 * MAX_BIAS if law == "tied maxima" else MAX_BIAS
            yield from _by_head("bias away from zero", law, result, limit, outward)


def _bias_is_judged(law: str, result: str, format: str) -> bool:
    """Whether a right attention has no bias there.

    Under a symmetric law nothing prefers a sign. Elsewhere only out in a short format, whose last
    rounding is nearly all of its error: sums of one sign in FP32 err to one side.
    """
    if result == "lse":
        return False
    if law in ("normal", "outliers", "long rows", "rare rows"):
        return True
    return result == "out" and format != "fp32" and law not in _SHIFTED


def _by_head(
    statistic: str, law: str, result: str, limit: float, pairs: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[_Series]:
    """Yield the series of each head, and of the mean of all; a look is a batch entry of a cell."""
    values: dict[int, list[float]] = {}
    baseline: dict[int, list[float]] = {}
    for ours, theirs in pairs:
        for to, x_BH in ((values, ours), (baseline, theirs)):
            for head, column in [(-1, x_BH.mean(1)), *enumerate(x_BH.mT)]:
                to.setdefault(head, []).extend(column.tolist())
    for head in values:
        yield _Series(
            statistic=statistic,
            result=result,
            law=law,
            head=head,
            values=tuple(values[head]),
            baseline=tuple(baseline[head]),
            limit=limit,
        )
