"""The growth law of a drift: how fast two runs part while their difference is still small.

Small differences between two trainings grow exponentially and then saturate, so late in a run every
numeric change drifts alike; the early rate tells them apart. It is estimated as the largest
Lyapunov exponent of a time series is: the slope of the log distance over its straight early part
(Rosenstein, Collins and De Luca 1993, Physica D 65). Where that part ends is chosen by data:

1. Two regimes in a row, x = 1 / (1/x_early + 1/x_late) with both log-linear in the step, are held
   against one straight line. That is the smooth transition between two lines of Bacon and Watts
   (1971, Biometrika 58); with a flat late regime it is Verhulst's logistic curve. Both are fitted
   by least absolute deviations, so that an outlier can't bend them, and chosen between by Schwarz's
   criterion (BIC, 1978) with the Laplace likelihood that belongs to that fit.
2. If there is a bend, the fit says by how much saturation lowers each log drift. The phase ends
   where a longer window would add more of that bias than it takes away of the variance.
3. The rate is the Theil-Sen slope in the window (Theil 1950; Sen 1968).
4. A power law of the step has no such phase: it bends everywhere, shrinks the window to its first
   points and would be given whatever rate these happen to have, so that a straight line doubled in
   2 to 76 steps by the schedule of its snapshots. So a power law, which has two parameters like the
   exponential, is fitted to the same points, and `exponential_over_power` says which fits better.

A second bend, a slow start before the exponential phase and the correlation of neighbouring points
are not modelled. Leaves out whether a rate may be stated, which takes several seeds (`arm_growth`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIN_POINTS", "Growth", "drift_slope", "fit_growth"]

MIN_POINTS = 4
"""The fewest points in a window, and the fewest positive drifts that have a growth law."""
RESOLUTION = 0.01
"""Log drifts that differ by less, one per cent, count as equal when looking for the bend."""
BIAS_WEIGHT = 25
"""Against one window's variance: the mean over so many seeds keeps its bias, not its variance."""
MOST_POINTS = 1000
"""Theil-Sen compares all pairs of points; a longer series is thinned evenly to so many."""
ITERATIONS = 10
"""Of reweighting, for the least absolute deviations."""
REFINEMENTS = 2
"""Of the grid on which the bend is looked for."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """An exponential phase: drift = const * exp(rate * step) from `first_step` to `last_step`."""

    rate: float
    """Natural log per step."""
    low: float
    high: float
    """The 95 % interval of the Theil-Sen slope; with 4 points it can't hold more than 92 %.

    Right for independent errors only. Those of neighbouring drifts of one run are alike, so what is
    known of the rate is its spread over seeds (`stability.analysis.intervals`).
    """
    first_step: int
    last_step: int
    points: int
    """How many drifts the phase holds."""
    exponential_over_power: float
    """Log likelihood of the exponential less that of a power law of the step, on these points.

    Negative where the power law fits better, and the rate then means nothing. Both are fitted by
    least absolute deviations, with the Laplace likelihood that belongs to that.
    """

    @property
    def doubling_time(self) -> float:
        """Steps in which the drift doubles; infinite if it does not grow."""
        return math.log(2) / self.rate if self.rate > 0 else math.inf


class _Bend(NamedTuple):
    """Two regimes: how much each log drift is below the early one's line, and the fit's errors."""

    deficits: Array
    residuals: Array
    loss: float


def fit_growth(steps: Sequence[int], drifts: Sequence[float]) -> Growth | None:
    """Return the growth law of the early phase, or None if fewer than 4 drifts can be used.

    `drifts` are distances of any unit, one a step, in any order. The phase starts at the first
    positive drift after step 0. Drifts that are exactly zero (not parted yet), NaN or infinite are
    left out. Fewer than 6 points are too few to see a bend: all are taken; and a phase that ends
    before its fourth point is overrun, so its rate comes out too low. ValueError if a step comes
    twice, or if there are more steps than drifts or fewer.
    """
    x, y = _in_order("fit_growth", steps, drifts)
    # step 0 is before any update, and a drift of 0 has no logarithm
    usable = (x > 0) & (y > 0)
    if usable.sum() < MIN_POINTS:
        return None
    x, logs = x[usable], np.log(y[usable])
    # on 0 to 1, so that one grid of slopes in `_find_bend` serves schedules of any length
    points = _phase_points((x - x[0]) / (x[-1] - x[0]), logs)
    rate, low, high = _theil_sen(x[:points], logs[:points])
    return Growth(
        rate=rate,
        low=low,
        high=high,
        first_step=int(x[0]),
        last_step=int(x[points - 1]),
        points=points,
        exponential_over_power=_exponential_over_power(x[:points], logs[:points]),
    )


def _exponential_over_power(x: Array, logs: Array) -> float:
    """Compare lines over the step and over its logarithm; both on 0 to 1, for the reweighting."""
    power, exponential = (
        _mean_error(_line_residuals((place - place[0]) / (place[-1] - place[0]), logs[None]))[0]
        for place in (np.log(x), x)
    )
    return len(x) * math.log(power / exponential)


def drift_slope(steps: Sequence[int], drifts: Sequence[float]) -> float:
    """Return the Theil-Sen slope of the drift over the whole run, in its unit per step.

    Zeros and step 0 count; NaN and infinite drifts are left out; NaN if fewer than 2 are left.
    ValueError as `fit_growth`.
    """
    x, y = _in_order("drift_slope", steps, drifts)
    return _theil_sen(x, y)[0] if len(x) > 1 else math.nan


def _in_order(caller: str, steps: Sequence[int], drifts: Sequence[float]) -> tuple[Array, Array]:
    """Return the steps whose drift is finite, sorted, and their drifts."""
    if len(steps) != len(drifts):
        raise ValueError(
            f"{caller}: steps and drifts must be of one length, got {len(steps)} and "
            f"{len(drifts)}; give one drift for each step"
        )
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(drifts, dtype=np.float64)
    values, counts = np.unique(x, return_counts=True)
    if (counts > 1).any():
        twice = ", ".join(f"{step:.0f}" for step in values[counts > 1])
        raise ValueError(
            f"{caller}: steps must be distinct, got {twice} more than once; keep one drift a step"
        )
    order = np.argsort(x)
    order = order[np.isfinite(y[order])]
    return x[order], y[order]


def _theil_sen(x: Array, y: Array) -> tuple[float, float, float]:
    """Return the slope and its 95 % interval."""
    from scipy.stats import theilslopes  # heavy: 1.2 s of CPU

    if len(x) > MOST_POINTS:
        kept = np.linspace(0, len(x) - 1, MOST_POINTS).round().astype(int)
        x, y = x[kept], y[kept]
    fit: Any = theilslopes(y, x, alpha=0.95)  # scipy has no type hints
    return float(fit.slope), float(fit.low_slope), float(fit.high_slope)


def _phase_points(x: Array, logs: Array) -> int:
    """Return how many points the exponential phase holds. `x` runs from 0 to 1."""
    n = len(x)
    # a bend has MIN_POINTS before it and one point after it, and a place to move in between
    if n < MIN_POINTS + 2:
        return n
    line = _mean_error(_line_residuals(x, logs[None]))[0]
    bend = _find_bend(x, logs)
    # the bend must pay for its two parameters; at a tie the simpler law stays
    if _bic(n, bend.loss, parameters=4) >= _bic(n, line, parameters=2):
        return n
    # least absolute deviations meet as many points exactly as there are parameters
    errors = np.sort(np.abs(bend.residuals))[4:]
    # 1.4826 times the median of |errors| is a normal law's standard deviation, and no outlier moves
    # it; without a floor a smooth series has no variance, and its shortest window wins
    noise = max(1.4826 * float(np.median(errors)), RESOLUTION)
    sizes = range(MIN_POINTS, n + 1)
    return min(sizes, key=lambda size: _slope_error(x[:size], bend.deficits[:size], noise))


def _slope_error(x: Array, deficits: Array, noise: float) -> float:
    """Return the squared error of a slope over `x`: what `deficits` add, and what `noise` adds."""
    centred = x - x.mean()
    squares = float(centred @ centred)
    # of the least-squares slope: it is linear in the errors, as Theil-Sen's is not
    bias = float(centred @ deficits) / squares
    return BIAS_WEIGHT * bias**2 + noise**2 / squares


def _bic(points: int, loss: float, *, parameters: int) -> float:
    """Return Schwarz's criterion for errors of a Laplace law with mean absolute value `loss`.

    The scale is corrected for the fitted parameters: a schedule may hold as few as 8 points.
    """
    scale = loss * points / (points - parameters)
    return 2 * points * math.log(scale) + parameters * math.log(points)


def _find_bend(x: Array, logs: Array) -> _Bend:
    """Fit two regimes: a grid over the place of the bend and the slope lost there, then finer.

    The place is a fractional index, so that evenly and logarithmically spaced steps are searched
    alike; at least MIN_POINTS lie before it and one after.
    """
    last = len(x) - 2.0
    first = MIN_POINTS - 1.0
    steepest = 2 * np.ptp(logs) / (x[MIN_POINTS - 1] - x[0])
    places = np.linspace(first, last, 16)
    drops = np.geomspace(0.5, max(steepest, 1.0), 12)
    place_step, drop_step = places[1] - places[0], drops[1] / drops[0]
    place, drop, bend = _best_bend(x, logs, places, drops)
    for _ in range(REFINEMENTS):
        places = np.clip(place + place_step * np.linspace(-1, 1, 5), first, last)
        drops = drop * drop_step ** np.linspace(-1, 1, 5)
        place, drop, bend = _best_bend(x, logs, places, drops)
        place_step, drop_step = place_step / 2.5, drop_step**0.4
    return bend


def _best_bend(x: Array, logs: Array, places: Array, drops: Array) -> tuple[float, float, _Bend]:
    """Return the place and the slope drop that fit best, and the fit."""
    place, drop = (grid.ravel() for grid in np.meshgrid(places, drops))
    at = np.interp(place, np.arange(len(x)), x)
    # log of 1 + x_early / x_late: 0 long before the bend, drop * (x - at) long after it
    # logaddexp, because exp overflows beyond 709
    deficits = np.logaddexp(0, drop[:, None] * (x - at[:, None]))
    residuals = _line_residuals(x, logs + deficits)
    losses = _mean_error(residuals)
    best = int(losses.argmin())
    return place[best], drop[best], _Bend(deficits[best], residuals[best], float(losses[best]))


def _line_residuals(x: Array, rows: Array) -> Array:
    """Return each row's residuals from its line of least absolute deviations, by reweighting."""
    weights = np.ones_like(rows)
    residuals = rows
    for _ in range(ITERATIONS):
        total = weights.sum(1, keepdims=True)
        centred = x - (weights @ x)[:, None] / total
        lever = weights * centred
        slopes = (lever * rows).sum(1) / (lever * centred).sum(1)
        middle = (weights * rows).sum(1, keepdims=True) / total
        residuals = rows - middle - slopes[:, None] * centred
        # a point that the line meets exactly would weigh infinitely
        weights = 1 / np.maximum(np.abs(residuals), RESOLUTION)
    return residuals


def _mean_error(residuals: Array) -> Array:
    """Return each row's mean absolute residual, none counted as less than RESOLUTION."""
    return np.maximum(np.abs(residuals), RESOLUTION).mean(1)
