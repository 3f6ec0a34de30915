"""Do errors of a vector, seen at several looks, add up or average out?

The errors e_1 .. e_N of one quantity at N looks are known by their Gram matrix G_ij = e_i . e_j.

- *coherence* C = |sum e|^2 / sum |e|^2. Independent errors have C = 1, one error seen N times has
  C = N: for a given kernel C grows with the number of looks.
- *share* f = (C - 1) / (N - 1): the mean of G_ij over pairs of different looks over the mean of
  G_ii. It estimates |E e|^2 / E |e|^2, the share of the error's energy that is the same at every
  look, and does not depend on N. Rounding noise has 0, and f may come out below it.

The standard error of f is the jackknife's over looks, corrected: f is a ratio of U-statistics of
degree two, and where the errors share nothing the pairs (i, j) are uncorrelated, so the jackknife
counts their variance twice (Efron and Stein, 1981). That part is taken off once, and what is left
is never below it. One-sided bounds at 5 % by Student's t with N - 1 degrees of freedom then miss a
share of 0 in 2.3 to 3.8 % and one of 0.01 in 3.4 to 6.4 % of 5,000 draws of 20 or 40 errors in 300
directions. Where the common error lies along a few directions in which noise is largest as well,
the upper bound misses a share of 0.05 in 10 to 15 %. Assumes that looks are independent, which
is why they are taken on different batches. Leaves out what the errors are of
(`probe.gradient_evidence`) and every decision (`analysis.gradient_evidence`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Coherence", "coherence_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coherence:
    """Coherence and share of `looks` errors; NaN where there are too few of them.

    `share` takes 2 looks, its standard error `share_se` 3. Errors that are all exactly 0 share
    nothing: their 0 / 0 counts as C = 1 and f = 0 with no error.
    """

    looks: int
    coherence: float
    share: float
    share_se: float


def coherence_of(gram: NDArray[np.float64]) -> Coherence:
    """Return what the Gram matrix of the errors `(looks, looks)` says."""
    n = len(gram)
    if n == 0:
        return Coherence(looks=0, coherence=np.nan, share=np.nan, share_se=np.nan)
    squares = gram.diagonal()
    energy = float(squares.sum())
    if energy == 0:
        return Coherence(looks=n, coherence=1.0, share=0.0, share_se=0.0)
    total = float(gram.sum())
    share = (total - energy) / ((n - 1) * energy) if n > 1 else np.nan
    return Coherence(
        looks=n,
        coherence=total / energy,
        share=share,
        share_se=_standard_error(gram, share) if n > 2 else np.nan,
    )


def _standard_error(gram: NDArray[np.float64], share: float) -> float:
    n, squares = len(gram), gram.diagonal()
    mean_square = squares.mean()
    pairs, energy = gram.sum() - squares.sum(), squares.sum()
    # the share without each look in turn; one look alone may hold all of the energy
    rest = np.maximum(energy - squares, np.finfo(np.float64).tiny)
    without = (pairs - 2 * (gram.sum(axis=1) - squares)) / ((n - 2) * rest)
    jackknife = (n - 1) / n * float(((without - without.mean()) ** 2).sum())
    # what one pair adds to f, to first order: its mean over pairs is 0
    kernel = (gram - share * (squares[:, None] + squares) / 2) / mean_square
    np.fill_diagonal(kernel, 0.0)
    of_pairs = 2 / (n * (n - 1)) * float((kernel**2).sum()) / (n * (n - 1))
    return float(np.sqrt(max(jackknife - of_pairs, of_pairs)))
