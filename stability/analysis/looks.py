"""Statistics over looks: what is surely beyond a limit, and which places may be named for it.

A look is one probed step. The errors of one look are not independent: elements of a layer share
their inputs, and a standard error that takes them as independent is up to 3.6 times too small. So a
look gives one number a place, and the standard error is that of these numbers: Student's t with
looks - 1 degrees of freedom. With fewer than `FEW` looks, layers stand in for looks in statements
about the whole model. Heads of one layer never do: they share its inputs.

Naming has a budget: over a whole run of any length, however often somebody looks, a clean run names
any place with probability `NAMING_ALPHA`. It is spent over doublings of the number of looks: the
k-th doubling has 1 / ((k + 1) (k + 2)) of it, shared by the looks in it and by the stretches of
late looks that are tested for an error that began later. The gate from model to layer to head
shares it further: a place has half of what its parent has, and its parts share the other half. At
such small levels a share costs little: a thousandth of it is 1.3 standard errors of 6.

Harm is what exceeds a limit, and not merely zero. Where the baseline itself has a gain or bias for
sure, harm is what exceeds that by the limit: better than the baseline is never harm. Leaves out
reading the values (`place_table`) and saying what was found (`locate`, `operator_evidence`).
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from stability.config.study import PolicyConfig

__all__ = [
    "FEW",
    "NAMING_ALPHA",
    "PLAIN_TIMES",
    "Naming",
    "OperatorLimits",
    "Samples",
    "least_named",
    "level_at",
    "name_places",
    "p_above",
    "p_harmed",
    "p_holds",
    "plain_looks",
    "standard_error",
    "windows",
]

Array = NDArray[np.float64]

NAMING_ALPHA = 0.01
FEW = 4
PLAIN_TIMES = 10.0
"""An error so many times beyond its limit is plain in a single look. Of right attentions single
looks were at most 3.2 times beyond the limit of 2, and 2.7 times beyond 0.1 % of gain."""
SURELY_BIASED = 4.0
"""A baseline's own gain or bias counts from so many standard errors on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorLimits:
    """What an attention may not exceed against FP64; the defaults are those of the policy."""

    error_ratio: float = 2.0
    gain: float = 1e-3
    bias_ulp: float = 0.05
    """In ULPs of the output format; where the baseline's own error is k times that of rounding
    once, in k ULPs."""

    @classmethod
    def of(cls, policy: PolicyConfig) -> Self:
        """Return the limits of a policy."""
        return cls(
            error_ratio=policy.max_error_ratio,
            gain=policy.max_gain,
            bias_ulp=policy.max_bias_ulp,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """One number for each look and place, `(looks, ...)`, NaN where a place was not looked at."""

    values: Array
    limit: float
    signed: bool = False
    """Whether values below -limit are harm too."""
    baseline: Array | None = None
    """The baseline's own values, of signed ones."""

    def over(self, looks: int) -> Self:
        """Return the samples of the last `looks` looks."""
        cut = slice(len(self.values) - looks, None)
        own = None if self.baseline is None else self.baseline[cut]
        return replace(self, values=self.values[cut], baseline=own)

    def mean(self, axis: int) -> Self:
        """Return the samples of the mean over an axis."""
        own = None if self.baseline is None else _mean(self.baseline, axis)
        return replace(self, values=_mean(self.values, axis), baseline=own)


def standard_error(values: Array) -> Array:
    """Return that of the mean over looks; NaN with fewer than two."""
    return _moments(values)[1]


def p_above(values: Array, limit: float = 0.0, *, equal_is_sure: bool = False) -> Array:
    """Return, for each place, p of a one-sided t-test over looks that the mean exceeds the limit.

    NaN values are no looks. 1 with fewer than two looks, and where all are equal: values that
    repeat to the last bit are one look at one input, however often it was made. With
    `equal_is_sure` they are taken at their word, as the error ratio of an attention that has the
    baseline's own bits: 1 at every look.
    """
    from scipy.special import stdtr  # heavy: a quarter of a second

    mean, error, count = _moments(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (mean - limit) / error
        # of the lower tail: 1 - stdtr would lose what is below 1e-16
        p = stdtr(count - 1, -t)
        sure = equal_is_sure & (mean > limit)
    repeated = np.where(sure, 0.0, 1.0)
    return np.where(count < 2, 1.0, np.where(error > 0, p, repeated))


def p_harmed(samples: Samples) -> Array:
    """Return, for each place, how likely such values are if the harm stays within its limit."""
    if not samples.signed:
        return p_above(samples.values, samples.limit)
    sign = np.where(_mean(samples.values, 0) < 0, -1.0, 1.0)
    p = p_above(sign * samples.values - _allowance(samples), samples.limit)
    return np.minimum(1.0, 2 * p)


def p_holds(samples: Samples) -> Array:
    """Return, for each place, how likely such values are if the harm exceeds its limit."""
    if not samples.signed:
        return p_above(-samples.values, -samples.limit, equal_is_sure=True)
    allowance = _allowance(samples)
    above = p_above(allowance - samples.values, -samples.limit, equal_is_sure=True)
    below = p_above(allowance + samples.values, -samples.limit, equal_is_sure=True)
    return np.maximum(above, below)


def plain_looks(samples: Samples) -> NDArray[np.bool_]:
    """Return which looks are plainly beyond the limit by themselves, `(looks, ...)`.

    A mean over looks hides a single one, of logs the better the wilder it is: the one look that
    moves the mean widens the interval as well, and 1,000 times at 1 of 20 looks is 1.4 times in
    their geometric mean. So no statistics here. Plain is what is PLAIN_TIMES beyond the limit; of
    error ratios also what is beyond it and PLAIN_TIMES the place's own median. The baseline's own
    gain at that look is no harm.
    """
    with np.errstate(invalid="ignore"):
        if samples.signed:
            own = 0.0 if samples.baseline is None else np.nan_to_num(np.abs(samples.baseline))
            return np.abs(samples.values) - own > PLAIN_TIMES * samples.limit
        times = math.log(PLAIN_TIMES)
        beyond = samples.values - samples.limit
        outlying = samples.values - _median(samples.values) > times
        return (beyond > times) | ((beyond > 0) & outlying)


def _median(values: Array) -> Array:
    """Return the median over looks of what is no NaN; NaN where nothing else is."""
    there = np.isfinite(values).any(0)
    middle = np.full(values.shape[1:], np.nan)
    middle[there] = np.nanmedian(np.where(np.isfinite(values), values, np.nan)[:, there], axis=0)
    return middle


def _allowance(samples: Samples) -> Array | float:
    """Return the baseline's own size, look by look, where it is surely not 0."""
    if samples.baseline is None:
        return 0.0
    mean, error, _ = _moments(samples.baseline)
    with np.errstate(invalid="ignore"):
        sure = np.abs(mean) > SURELY_BIASED * error
    own = np.where(sure, np.sign(mean) * samples.baseline, 0.0)
    return np.where(np.isfinite(own), own, 0.0)


def windows(looks: int) -> list[int]:
    """Return the lengths of the stretches of last looks that are tested: all, half, a quarter."""
    return [looks >> k for k in range(max(1, int(math.log2(looks))))]


def level_at(looks: int, alpha: float = NAMING_ALPHA) -> float:
    """Return the level of one test of one stretch at this number of looks."""
    doubling = int(math.log2(looks))
    share = 1 / ((doubling + 1) * (doubling + 2))
    return alpha * share / 2**doubling / len(windows(looks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """Which places are surely beyond the limit, and over which stretch of last looks; 0: none."""

    model: int
    layers: NDArray[np.int64]
    """`(layers,)`: of the layer as a whole."""
    heads: NDArray[np.int64] | None
    """`(layers, heads)`"""


def name_places(layers: Samples, heads: Samples | None, alpha: float = NAMING_ALPHA) -> Naming:
    """Return the places that may be named, of `(looks, layers)` and `(looks, layers, heads)`.

    `alpha` is the chance that anything is named in a clean run of any length.
    """
    of_model, of_layer, of_head = _levels(layers, heads, alpha)
    model = _longest_sure(layers.mean(axis=1), of_model, layers.mean(axis=0))
    if heads is None:
        return Naming(model=int(model), layers=_longest_sure(layers, of_layer), heads=None)
    return Naming(
        model=int(model),
        layers=_longest_sure(layers, of_layer),
        heads=_longest_sure(heads, of_head),
    )


def least_named(layers: Samples, heads: Samples | None, alpha: float = NAMING_ALPHA) -> Array:
    """Return, for each head, or layer without heads, the size from which it would be named.

    The size is that of a mean over all looks whose spread is the one that was found, in the unit of
    the samples; smaller harm would have stayed unsaid. NaN with fewer than two looks.
    """
    from scipy.special import stdtrit  # heavy: a quarter of a second

    _, of_layer, of_head = _levels(layers, heads, alpha)
    samples, level = (layers, of_layer) if heads is None else (heads, of_head)
    level /= 2 if samples.signed else 1  # two sides
    _, error, count = _moments(samples.values)
    with np.errstate(invalid="ignore"):
        return np.where(count < 2, np.nan, samples.limit - stdtrit(count - 1, level) * error)


def _levels(layers: Samples, heads: Samples | None, alpha: float) -> tuple[float, float, float]:
    """Return the levels of a test of the model, of one of its layers, and of one head."""
    looks, count = layers.values.shape
    level = level_at(looks, alpha)
    # half is the model's own, half its layers'; half of a layer's share is its heads'
    of_layer = level / 2 / count / (1 if heads is None else 2)
    of_head = of_layer / (1 if heads is None else heads.values.shape[2])
    return level / 2, of_layer, of_head


def _longest_sure(
    samples: Samples, level: float, parts: Samples | None = None
) -> NDArray[np.int64]:
    """Return the longest stretch of last looks in which each place is surely beyond, 0 for none.

    `parts` hold a number for each layer in place of looks, for where looks are few: the rounding
    errors of two layers are independent.
    """
    looks = len(samples.values)
    if parts is not None and looks < FEW <= len(parts.values):
        return np.where(p_harmed(parts) <= level, looks, 0)
    found = np.zeros(samples.values.shape[1:], np.int64)
    for length in reversed(windows(looks)):
        found = np.where(p_harmed(samples.over(length)) <= level, length, found)
    return found


def _mean(values: Array, axis: int) -> Array:
    """Return the mean of what is no NaN; NaN where nothing else is."""
    count = np.isfinite(values).sum(axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isfinite(values), values, 0.0).sum(axis) / count


def _moments(values: Array) -> tuple[Array, Array, NDArray[np.int64]]:
    """Return mean, its standard error and the number of looks of each place."""
    there = np.isfinite(values)
    count = there.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(there, values, 0.0).sum(0) / count
        spread = np.where(there, values - mean, 0.0)
        error = np.sqrt((spread * spread).sum(0) / (count - 1) / count)
    # equal values may miss their mean by an ULP
    return mean, np.where(error > 1e-14 * np.abs(mean), error, 0.0), count
