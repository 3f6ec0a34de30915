"""Decides qualitative statements (larger, monotone, equal) by an interval over seeds, not by eye.

Each function takes one figure per seed, forms the interval of `intervals`, and returns a
`StatedTest`. Its statement holds only if the whole interval lies where the statement says, so a
difference that another seed could reverse never counts. How the figures were measured is the
caller's matter.

A ratio is formed within each seed before its interval is taken, so what the seed does to both sides
cancels. Rules that no single case may break (`equal`, `every`) take no interval: one counterexample
refutes them.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stability.analysis.intervals import Interval, mean_interval, paired_interval

__all__ = ["BySeed", "StatedTest", "equal", "every", "mean_within", "monotone", "ratio_within"]

BySeed = Mapping[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedTest:
    """One qualitative statement, whether it holds, and the figures that decided it."""

    statement: str
    found: str
    """The deciding figures in words: an estimate, its interval, the number of seeds."""
    holds: bool
    control: bool = False
    """True for a statement that nobody published: it checks the instrument, or shows where a
    disagreement comes from."""


def ratio_within(
    statement: str,
    numerator: BySeed,
    denominator: BySeed | float,
    *,
    above: float = 0.0,
    below: float = math.inf,
    level: float = 0.9,
) -> StatedTest:
    """Hold `statement` if the ratio's interval, paired by seed, lies inside (above, below).

    A denominator that is one number is the same at every seed. ValueError if the seeds of the two
    differ, if there are too few of them for an interval, for a negative figure or a zero
    denominator.
    """
    if isinstance(denominator, int | float):
        denominator = dict.fromkeys(numerator, denominator)
    ratios = _paired_ratios("ratio_within", numerator, denominator)
    found = paired_interval(ratios, level)
    return _decided(statement, found, "x", above, below)


def mean_within(
    statement: str,
    values: BySeed,
    *,
    unit: str,
    above: float = -math.inf,
    below: float = math.inf,
    level: float = 0.9,
) -> StatedTest:
    """Hold `statement` if the interval of the mean, in `unit`, lies inside (above, below).

    ValueError if there are too few seeds for an interval.
    """
    found = mean_interval(values, level)
    return _decided(statement, found, f" {unit}".rstrip(), above, below)


def monotone(
    statement: str,
    by_point: Mapping[str, BySeed],
    *,
    rising: bool,
    level: float = 0.9,
) -> StatedTest:
    """Hold `statement` if from each point to the next the paired ratio's interval is past 1.

    Points are in order. `found` names the weakest step: one without a number, else the one that
    lies least past 1. ValueError as `ratio_within`, and for fewer than two points.
    """
    names = list(by_point)
    if len(names) < 2:
        raise ValueError(f"monotone: by_point must have at least two points, got {len(names)}")
    steps = {}
    for first, second in itertools.pairwise(names):
        ratios = _paired_ratios("monotone", by_point[second], by_point[first])
        found = paired_interval(ratios, level)
        _check_seeds("monotone", found)
        steps[f"{first} to {second}"] = found
    margin = {step: _past_one(found, rising) for step, found in steps.items()}
    weakest = min(margin, key=lambda step: margin[step])
    held = sum(value > 0 for value in margin.values())
    return StatedTest(
        statement=statement,
        found=f"{held} of {len(steps)} steps; weakest, {weakest}: {_words(steps[weakest], 'x')}",
        holds=held == len(steps),
    )


def equal(statement: str, differences: Iterable[float]) -> StatedTest:
    """Hold `statement` if every one of `differences` is exactly 0.

    ValueError if there is none.
    """
    values = [abs(value) for value in differences]
    if not values:
        raise ValueError("equal: differences must not be empty; nothing was compared")
    apart = [value for value in values if value != 0]
    worst = "a NaN" if any(map(math.isnan, apart)) else f"up to {max(apart, default=0.0):.2g}"
    found = f"0 in all {len(values)}" if not apart else f"{len(apart)} of {len(values)}: {worst}"
    return StatedTest(statement=statement, found=found, holds=not apart)


def every(
    statement: str,
    values: Iterable[float],
    *,
    unit: str = "",
    above: float = -math.inf,
    below: float = math.inf,
) -> StatedTest:
    """Hold `statement` if every one of `values`, in `unit`, lies inside (above, below).

    For tolerances and acceptance rules, which no single case may break. ValueError if there is
    none.
    """
    found = list(values)
    if not found:
        raise ValueError("every: values must not be empty; nothing was measured")
    ends = f"{min(found):.3g} to {max(found):.3g} {unit}".rstrip()
    return StatedTest(
        statement=statement,
        found=f"{ends} in all {len(found)}",
        holds=all(above < value < below for value in found),
    )


def _paired_ratios(caller: str, numerator: BySeed, denominator: BySeed) -> dict[int, float]:
    """Return numerator over denominator by seed; ValueError as `ratio_within` says."""
    if set(numerator) != set(denominator):
        raise ValueError(
            f"{caller}: seeds must be the same on both sides, got {sorted(numerator)} "
            f"and {sorted(denominator)}"
        )
    if any(value < 0 for value in (*numerator.values(), *denominator.values())):
        raise ValueError(
            f"{caller}: figures must not be negative; use mean_within for figures of either sign"
        )
    for seed, value in denominator.items():
        if value == 0:
            raise ValueError(
                f"{caller}: denominator must not be 0, is 0 at seed {seed}; "
                "a ratio to nothing decides nothing"
            )
    return {seed: numerator[seed] / denominator[seed] for seed in numerator}


def _past_one(found: Interval, rising: bool) -> float:
    """Return the log of how far the near end of a ratio's interval lies past 1, the way stated."""
    if math.isnan(found.low):
        return -math.inf
    return math.log(max(found.low, 1e-300)) if rising else -math.log(max(found.high, 1e-300))


def _decided(statement: str, found: Interval, unit: str, above: float, below: float) -> StatedTest:
    _check_seeds("stated test", found)
    return StatedTest(
        statement=statement,
        found=_words(found, unit),
        holds=above < found.low and found.high < below,
    )


def _check_seeds(caller: str, found: Interval) -> None:
    if math.isfinite(found.mean) and math.isnan(found.low):
        raise ValueError(
            f"{caller}: seeds must be enough for an interval, got {found.n}; 5 are for 90 %"
        )


def _words(found: Interval, unit: str) -> str:
    if not math.isfinite(found.mean):
        return f"no number, over {found.n} seeds"
    level = f"{100 * found.level:.0f} % interval"
    ends = f"{found.low:.3g}{unit} to {found.high:.3g}{unit}"
    return f"{found.mean:.3g}{unit} ({level} {ends}; {found.n} seeds)"
