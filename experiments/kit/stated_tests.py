"""Tests qualitative statements (larger, monotone, equal) by a confidence interval over seeds.

Each function returns a `StatedTest`, whose decision is one of three words. `ratio_within`,
`mean_within` and `monotone` take one value per seed and form the interval of `intervals`. The
statement holds only if the whole interval lies where the statement says, and is refuted only if the
whole interval lies elsewhere. In between the scatter over seeds may explain either, so it is
undecided. How the values were measured is up to the caller.

Ratios are formed seed by seed before their interval is taken, so that an effect of the seed on both
sides cancels. `equal` and `every` test rules that no single case may break. They form no interval,
because one counterexample refutes such a rule, and they are never undecided. `scatter_within` is
for statements on the scatter over seeds itself, which one outlying seed could make or break: it is
undecided if leaving a single seed out would change its decision.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from stability.analysis.intervals import FEWEST, Interval, mean_interval, paired_interval

__all__ = [
    "DECISIONS",
    "BySeed",
    "Decision",
    "StatedTest",
    "equal",
    "every",
    "mean_within",
    "monotone",
    "ratio_within",
    "scatter_within",
]

BySeed = Mapping[int, float]
"""Maps a seed to the value that was measured with it."""
Decision = Literal["holds", "refuted", "undecided"]
"""`undecided` is what the seeds that were run cannot tell; more of them may."""
DECISIONS: tuple[Decision, ...] = get_args(Decision)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedTest:
    """A qualitative statement, what was decided of it, and the numbers that decided it."""

    statement: str
    """The statement in words; it is printed and not interpreted."""
    found: str
    """The deciding numbers in words, e.g. an estimate, its interval and the number of seeds."""
    decision: Decision
    control: bool = False
    """True for a statement of ours, not of a publication: it checks the instrument, or shows where
    a disagreement with the publication comes from."""

    def __post_init__(self) -> None:
        if self.decision not in DECISIONS:
            raise ValueError(
                f"StatedTest: decision must be one of {', '.join(DECISIONS)}, got {self.decision!r}"
            )

    @property
    def holds(self) -> bool:
        """Whether the statement surely holds; False if it is refuted and if it is undecided."""
        return self.decision == "holds"


def ratio_within(
    statement: str,
    numerator: BySeed,
    denominator: BySeed | float,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    level: float = 0.9,
) -> StatedTest:
    """Test whether the interval of numerator / denominator lies strictly inside (above, below).

    An interval wholly outside refutes; one that straddles a bound, or without ends, is undecided.
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

    An interval wholly outside refutes; one that straddles a bound, or without ends, is undecided.
    `unit` is the unit of `values`, as `found` writes it. ValueError if there are too few seeds for
    an interval.
    """
    found = mean_interval(values, level)
    return _decided(statement, found, f" {unit}".rstrip(), above, below)


def scatter_within(
    statement: str,
    numerator: BySeed,
    denominator: BySeed,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    level: float = 0.9,
) -> StatedTest:
    """Test whether one quantity scatters over seeds (above, below) times as much as another.

    The scatter is the standard deviation of the natural log. Both are measured at the same seeds,
    so the interval of their ratio is Pitman's and Morgan's (Biometrika 31, 1939), which allows for
    what the seed does to both. It is exact for normal logs, but one outlying seed is enough to move
    it: of 5 seeds that scatter alike, one of which is then shifted far away, it calls the shifted
    quantity the wider one in every case. So the statement holds, or is refuted, only if it does so
    with all seeds and with any one of them left out.

    Of 20,000 draws of 5 seeds that scatter alike, "more" then holds in 1 % for normal logs, in 1.5
    % for Student's t with 3 degrees of freedom, and in 3 % for lognormal ones. With one seed
    shifted it rests on the other 4 and holds in 5 %, 9 % and 16 %. Where one quantity scatters 10
    times as much as the other it holds in 80 %, 73 % and 61 %; distances from the mean or the
    median of the other seeds, compared seed by seed, would show that in 11 to 27 % only.

    `found` names the seed without which the decision changes. ValueError as `ratio_within`, for a
    value of 0, for a denominator that does not scatter, and for fewer than 4 seeds: leaving one out
    must leave enough for an interval.
    """
    _check_scatter(numerator, denominator)
    whole, *rest = (
        _decided(statement, _scatter_ratio(numerator, denominator, kept, level), "x", above, below)
        for kept in ([*numerator], *([s for s in numerator if s != left] for left in numerator))
    )
    for left_out, without in zip(numerator, rest, strict=True):
        if whole.decision not in ("undecided", without.decision):
            found = f"{whole.found}; without seed {left_out}: {without.found}"
            return replace(whole, found=found, decision="undecided")
    return whole


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
    1 if falling), and is against the statement if the interval lies entirely on the other side, 1
    itself included. The statement holds if every step counts, is refuted if any step is against it,
    and is undecided otherwise. `found` names the weakest step: of those against it if there are
    any, one with a ratio that is not finite, else the one whose interval is least beyond 1.
    ValueError as `ratio_within`, and for fewer than two points.
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
    bounds = (1.0, math.inf) if rising else (-math.inf, 1.0)
    decided = {step: _decision(found, *bounds) for step, found in steps.items()}
    held, against = ([step for step in steps if decided[step] == word] for word in DECISIONS[:2])
    weakest = min(against or steps, key=lambda step: _past_one(steps[step], rising))
    count = f"{len(held)} of {len(steps)} steps"
    if against:
        count += f", {len(against)} the other way"
    return StatedTest(
        statement=statement,
        found=f"{count}; weakest, {weakest}: {_words(steps[weakest], 'x')}",
        decision="refuted" if against else "holds" if len(held) == len(steps) else "undecided",
    )


def equal(statement: str, differences: Iterable[float]) -> StatedTest:
    """Test whether every one of `differences` is exactly 0; a single one that is not refutes.

    A NaN refutes too, and is not undecided: the statement is on each case, this case was measured
    and gave no 0, and no further seed takes that back. ValueError if there are no differences.
    """
    values = [abs(value) for value in differences]
    if not values:
        raise ValueError("equal: differences must not be empty; nothing was compared")
    # a NaN is unequal to 0 as well, so it counts as a difference
    apart = [value for value in values if value != 0]
    worst = "a NaN" if any(map(math.isnan, apart)) else f"up to {max(apart, default=0.0):.2g}"
    found = f"0 in all {len(values)}" if not apart else f"{len(apart)} of {len(values)}: {worst}"
    return StatedTest(statement=statement, found=found, decision="refuted" if apart else "holds")


def every(
    statement: str,
    values: Iterable[float],
    *,
    unit: str = "",
    above: float = -math.inf,
    below: float = math.inf,
) -> StatedTest:
    """Test whether every one of `values`, in `unit`, lies strictly inside (above, below).

    This is for tolerances and acceptance rules, which no single case may break: one refutes. A NaN
    refutes too, as in `equal`: a case that gives no number keeps no rule. ValueError if there are
    no values.
    """
    found = list(values)
    if not found:
        raise ValueError("every: values must not be empty; nothing was measured")
    # min and max pass a NaN over, or return it, depending on where it stands
    numbers = [value for value in found if not math.isnan(value)]
    ends = f"{min(numbers):.3g} to {max(numbers):.3g} {unit}".rstrip() if numbers else "no number"
    missing = f", a NaN in {len(found) - len(numbers)}" if len(numbers) < len(found) else ""
    kept = all(above < value < below for value in found)
    return StatedTest(
        statement=statement,
        found=f"{ends} in all {len(found)}{missing}",
        decision="holds" if kept else "refuted",
    )


def _check_scatter(numerator: BySeed, denominator: BySeed) -> None:
    _paired_ratios("scatter_within", numerator, denominator)  # whose rules on values hold here too
    if 0 in numerator.values():
        raise ValueError("scatter_within: figures must be positive, got 0; it has no log")
    if len(numerator) <= FEWEST:
        raise ValueError(
            f"scatter_within: seeds must be at least {FEWEST + 1}, so that {FEWEST} are left "
            f"without any one, got {len(numerator)}"
        )
    for left_out in denominator:
        if len({value for seed, value in denominator.items() if seed != left_out}) == 1:
            raise ValueError(
                "scatter_within: denominator must scatter over the seeds, is the same at all but "
                f"seed {left_out}; a ratio to nothing decides nothing"
            )


def _scatter_ratio(
    numerator: BySeed, denominator: BySeed, seeds: Sequence[int], level: float
) -> Interval:
    """Return the ratio of the standard deviations of the logs, with Pitman's and Morgan's interval.

    The ends are the ratios c at which log numerator + c log denominator and log numerator - c log
    denominator, over seeds, are correlated just significantly; they are independent if c is the
    true ratio and the logs are normal.
    """
    from scipy.stats import t  # heavy: 1.2 s of CPU

    n = len(seeds)
    logs = np.log([[values[seed] for seed in seeds] for values in (numerator, denominator)])
    if not np.isfinite(logs).all():
        return Interval(low=math.nan, mean=math.nan, high=math.nan, n=n, level=level)
    (var_a, covariance), (_, var_b) = np.cov(logs)
    ratio = math.sqrt(var_a / var_b)
    # what the two do not share; rounding may carry a perfect correlation past 1
    alone = max(0.0, 1 - covariance**2 / (var_a * var_b)) if var_a > 0 else 0.0
    slack = 2 * alone * float(t.ppf(0.5 + level / 2, n - 2)) ** 2 / (n - 2)
    # K + sqrt(K^2 - 1) with K = 1 + slack, without the digits that K^2 - 1 would lose at 1
    factor = math.sqrt(1 + slack + math.sqrt(slack * (slack + 2)))
    return Interval(low=ratio / factor, mean=ratio, high=ratio * factor, n=n, level=level)


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
    """Test whether an interval lies inside (above, below)."""
    _check_seeds("stated test", found)
    decision = _decision(found, above, below)
    return StatedTest(statement=statement, found=_words(found, unit), decision=decision)


def _decision(found: Interval, above: float, below: float) -> Decision:
    """Return `holds` for an interval inside (above, below), `refuted` for one wholly outside.

    Every comparison with a NaN is false, so an interval without ends is undecided.
    """
    if above < found.low and found.high < below:
        return "holds"
    # the ends of (above, below) are not part of it: equal seeds on a bound leave no doubt
    return "refuted" if found.high <= above or found.low >= below else "undecided"


def _check_seeds(caller: str, found: Interval) -> None:
    # With too few seeds an Interval has a mean but no ends. Without a finite mean the seeds are not
    # to blame, and the statement is undecided.
    if math.isfinite(found.mean) and math.isnan(found.low):
        raise ValueError(f"{caller}: seeds must be enough for an interval, got {found.n}; 3 are")


def _words(found: Interval, unit: str) -> str:
    """Write an interval as e.g. `1.5x (90 % interval 1.2x to 1.9x; 5 seeds)`."""
    if not math.isfinite(found.mean):
        return f"no number, over {found.n} seeds"
    level = f"{100 * found.level:.0f} % interval"
    ends = f"{found.low:.3g}{unit} to {found.high:.3g}{unit}"
    return f"{found.mean:.3g}{unit} ({level} {ends}; {found.n} seeds)"
