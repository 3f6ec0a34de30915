"""Can a candidate be told from a nudge of the baseline? A permutation test of energy distances.

The baseline and its 1-ULP nudges, and reruns where they differ from it, are draws of one law: the
same numerics under other draws of chaos. If the candidate's rounding is no other than theirs, it is
one draw more. The statistic of one seed is the energy distance (Szekely and Rizzo, Journal of
Statistical Planning and Inference 143, 2013) between the candidate, a sample of one, and the m
draws,

    T = 2 mean |candidate - draw| - mean |draw - draw'|,

over all draws and all pairs of draws, a draw with itself included. To repeat it under the null, the
label "candidate" goes to each of the m + 1 arms in turn, within each seed and for each seed on its
own. Seeds are combined by the sum of T over the mean distance in the seed, which no relabelling
changes. With (m + 1)^n labellings of n seeds no p is smaller than one over that number; they are
all enumerated up to 200,000, else 9,999 are drawn and p counts the one that was observed.

The test is a description and no judgement. Early on it tells exact FP64 attention from a nudge too:
any other rounding is another law. And what can't be told from a nudge may be a candidate whose harm
is small, or a design too small to tell anything, which `smallest_p` says. Before the
first update the baseline lies in the middle of its nudges and is no draw like them: in a GPT of 2
layers and width 64 they are 1.35 times as far from one another as from it. From the first update
on Adam's signs have moved all alike, and that ratio is 0.98 to 1.07 (3 seeds, steps 1 to 40). There
a further nudge had p from 0.09 to 0.83, fa2 and golden 0.008 up to step 30, 0.016 and 0.024 at 40.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from stability.config.schema import BASELINE
from stability.records.distances import DistanceMatrix

__all__ = ["TOLD", "EnergyTest", "energy_test"]

MOST_ENUMERATED = 200_000
PERMUTATIONS = 9_999
RANDOM_SEED = 0
"""Every call draws the same labellings, so that one set of distances has one p."""
TOLD = 0.05
"""A p up to this is called telling; a word for readers, since nothing is judged by it."""
_TIE = 1e-12
"""Sums of the same terms in another order differ by some 1e-16 of themselves."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergyTest:
    """The test of one candidate at one step; p is NaN where there is nothing to test."""

    p: float
    smallest_p: float
    """The smallest p that so many draws and seeds can give."""
    draws: int
    """Draws of the baseline in each seed, itself included; the fewest, where seeds differ."""
    seeds: int

    @property
    def sentence(self) -> str:
        """What it says, a clause: "can't be told from a nudge (p 0.31)"."""
        if math.isnan(self.p):
            return "can't be compared with nudges: there is none that has moved, or no number"
        if self.smallest_p > TOLD:
            return (
                f"can't be told from a nudge, and could not have been: no p below "
                f"{self.smallest_p:.2g} is possible with {self.draws} draws of the baseline in "
                f"{self.seeds} seed{'s' if self.seeds > 1 else ''}; add nudges or seeds"
            )
        word = "can" if self.p <= TOLD else "can't"
        # so small a number of seeds knows no stronger word
        least = ", the least possible here" if self.p <= self.smallest_p else ""
        return f"{word} be told from a nudge (p {self.p:.2g}{least})"


def energy_test(
    matrices: Mapping[int, DistanceMatrix], candidate: str, controls: Sequence[str]
) -> EnergyTest:
    """Test `candidate` against the baseline and `controls`, on each seed's distances at one step.

    A control that is the baseline, or another control, to the bit is no draw of its own and is left
    out. Seeds without the candidate, or with no control left, are left out; distances that are no
    numbers make p NaN.
    """
    statistics = []
    for _, matrix in sorted(matrices.items()):
        draws = _distinct_draws(matrix, candidate, controls)
        if candidate in matrix.parents and BASELINE in matrix.parents and len(draws) > 1:
            statistics.append(_statistics(matrix, candidate, draws))
    sizes = [len(found) for found in statistics]
    finite = all(np.isfinite(found).all() for found in statistics)
    smallest = (
        1 / math.prod(sizes) if math.prod(sizes) <= MOST_ENUMERATED else 1 / (PERMUTATIONS + 1)
    )
    return EnergyTest(
        p=_p_value(statistics) if statistics and finite else math.nan,
        smallest_p=smallest if statistics else math.nan,
        draws=min(sizes, default=1) - 1,
        seeds=len(statistics),
    )


def _distinct_draws(matrix: DistanceMatrix, candidate: str, controls: Sequence[str]) -> list[str]:
    draws: list[str] = []
    for arm in (BASELINE, *controls):
        known = arm in matrix.parents and arm != candidate and arm not in draws
        if known and all(matrix.kept_between(arm, draw) != 0 for draw in draws):
            draws.append(arm)
    return draws


def _statistics(matrix: DistanceMatrix, candidate: str, draws: Sequence[str]) -> Array:
    """Return T with the label on each arm in turn, the true one first, over the mean distance."""
    places = [matrix.arms.index(arm) for arm in (candidate, *draws)]
    distances = np.array(matrix.judged_rows)[np.ix_(places, places)]
    size = len(places)
    to_others = distances.sum(axis=1)
    # |draw - draw'| of all ordered pairs without the labelled arm, zeros with itself included
    among_others = distances.sum() - 2 * to_others
    statistic = 2 * to_others / (size - 1) - among_others / (size - 1) ** 2
    # the draws are distinct, so the mean is not 0
    return statistic / (distances.sum() / (size * (size - 1)))


def _p_value(statistics: Sequence[Array]) -> float:
    """Return the share of labellings whose sum is at least that of the true one."""
    observed = sum(float(found[0]) for found in statistics)
    least = observed - _TIE * max(1.0, abs(observed))
    if math.prod(len(found) for found in statistics) <= MOST_ENUMERATED:
        sums = reduce(lambda sums, found: np.add.outer(sums, found).ravel(), statistics)
        return float((sums >= least).mean())
    dice = np.random.default_rng(RANDOM_SEED)
    sums = sum(found[dice.integers(len(found), size=PERMUTATIONS)] for found in statistics)
    return (1 + int((np.asarray(sums) >= least).sum())) / (PERMUTATIONS + 1)
