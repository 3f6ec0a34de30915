"""Tests qualitative statements (larger, monotone, equal) by a confidence interval over seeds.

Each function returns a `StatedTest`. `ratio_within`, `mean_within` and `monotone` take one value
per seed and form the interval of `intervals`. The statement holds only if the whole interval lies
where the statement says, so a difference that the scatter over seeds may explain does not count.
How the values were measured is up to the caller.

Ratios are formed seed by seed before their interval is taken, so that an effect of the seed on both
sides cancels. `equal` and `every` test rules that no single case may break. They form no interval,
because one counterexample refutes such a rule.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stability.analysis.intervals import Interval, mean_interval, paired_interval

__all__ = ["BySeed", "StatedTest", "equal", "every", "mean_within", "monotone", "ratio_within"]

BySeed = Mapping[int, float]
"""Maps a seed to the value that was measured with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedTest:
    """A qualitative statement, whether it holds, and the numbers that decided it."""

    statement: str
    """The statement in words; it is printed and not interpreted."""
    found: str
    """The deciding numbers in words, e.g. an estimate, its interval and the number of seeds."""
    holds: bool
    control: bool = False
    """True for a statement of ours, not of a publication: it checks the instrument, or shows where
    a disagreement with the publication comes from."""


def ratio_within(
    statement: str,
    numerator: BySeed,
    denominator: BySeed | float,
    *,
    above: float = 0.0,
    below: float = math.inf,
    level: float = 0.9,
) -> StatedTest:
    """Test whether the interval of numerator / denominator lies strictly inside (above, below).

    The ratio is formed seed by seed; a denominator that is a single number serves every seed. The
    interval is that of the geometric mean at `level` (0.9: 90 %). ValueError if the two have
    different seeds, if there are too few seeds for an interval, for a negative value, and for a
    zero in the denominator.
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
    """Test whether the interval of the arithmetic mean lies strictly inside (above, below).

    `unit` is the unit of `values`, as `found` writes it. ValueError if there are too few seeds for
    an interval.
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
    """Test whether values rise (or fall, with `rising` false) from each point to the next.

    `by_point` maps the names of the points, in order, to values by seed. A step from one point to
    the next counts if the interval of the ratio, formed seed by seed, lies entirely above 1 (below
    1 if falling). The statement holds if every step counts. `found` names the weakest step: one
    with a ratio that is not finite, else the one whose interval is least beyond 1. ValueError as
    `ratio_within`, and for fewer than two points.
    """
    names = list(by_point)
    if len(names) < 2:
        raise ValueError(f"monotone: by_point must have at least two points, got {len(names)}")
    steps = {}
    # `level` is not corrected for the number of steps: all of them must hold, and that becomes less
    # likely by chance the more there are
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
    """Test whether every one of `differences` is exactly 0; a NaN is not.

    ValueError if there are no differences.
    """
    values = [abs(value) for value in differences]
    if not values:
        raise ValueError("equal: differences must not be empty; nothing was compared")
    # a NaN is unequal to 0 as well, so it counts as a difference
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
    """Test whether every one of `values`, in `unit`, lies strictly inside (above, below).

    This is for tolerances and acceptance rules, which no single case may break. ValueError if there
    are no values.
    """
    found = list(values)
    if not found:
        raise ValueError("every: values must not be empty; nothing was measured")
    ends = f"{min(found):.3g} to {max(found):.3g} {unit}".rstrip()
    return StatedTest(
        statement=statement,
        found=f"{ends} in all {len(found)}",
        # false for a NaN: what is no number keeps no rule
        holds=all(above < value < below for value in found),
    )


def _paired_ratios(caller: str, numerator: BySeed, denominator: BySeed) -> dict[int, float]:
    """Return numerator / denominator by seed; ValueError, in the name of `caller`, if unusable."""
    if set(numerator) != set(denominator):
        raise ValueError(
            f"{caller}: seeds must be the same on both sides, got {sorted(numerator)} "
            f"and {sorted(denominator)}"
        )
    # the interval is the geometric mean's, which negative ratios do not have
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
    """Return by how much the whole interval of a ratio lies beyond 1, as a natural log.

    It is positive if the interval lies above 1 (below 1 if not `rising`), and -inf if there is no
    interval.
    """
    if math.isnan(found.low):
        return -math.inf
    # The end of the interval that is nearer to 1 decides. It may be 0, which has no log.
    return math.log(max(found.low, 1e-300)) if rising else -math.log(max(found.high, 1e-300))


def _decided(statement: str, found: Interval, unit: str, above: float, below: float) -> StatedTest:
    """Test whether an interval lies inside (above, below); one with NaN ends never does."""
    _check_seeds("stated test", found)
    return StatedTest(
        statement=statement,
        found=_words(found, unit),
        # false where the ends are NaN: a statement never holds by default
        holds=above < found.low and found.high < below,
    )


def _check_seeds(caller: str, found: Interval) -> None:
    # With too few seeds an Interval has a mean but no ends. Without a finite mean the seeds are not
    # to blame, and the statement just does not hold.
    if math.isfinite(found.mean) and math.isnan(found.low):
        raise ValueError(f"{caller}: seeds must be enough for an interval, got {found.n}; 3 are")


def _words(found: Interval, unit: str) -> str:
    """Write an interval as e.g. `1.5x (90 % interval 1.2x to 1.9x; 5 seeds)`."""
    if not math.isfinite(found.mean):
        return f"no number, over {found.n} seeds"
    level = f"{100 * found.level:.0f} % interval"
    ends = f"{found.low:.3g}{unit} to {found.high:.3g}{unit}"
    return f"{found.mean:.3g}{unit} ({level} {ends}; {found.n} seeds)"
