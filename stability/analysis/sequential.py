"""Looks at a growing number of seeds, and tests of several at once, at an error rate that is kept.

A study may be judged when it has 3, 5, 8, 12 and 20 seeds, and more seeds may be added after each
look. Whoever looks five times at 5 % is wrong more often than in 5 %: "add seeds until it is
decided" makes 17 to 27 % of it. So each look has a smaller share, the same at each (after Pocock,
"Group sequential methods in the design and analysis of clinical trials", Biometrika 64, 1977).
With t statistics a look at 3 seeds is nearly independent of the later ones, so the share is smaller
than Pocock's for known variances: `docs/verdict.md` has the rates that were simulated.

Between two looks the first seeds, in the study's order, as many as the look has, are judged: seeds
that happen to be there already decide nothing before their look. Leaves out the statistic that is
looked at (`intervals`) and what is done with it (`verdict`).
"""

from collections.abc import Hashable, Mapping
from typing import TypeVar

__all__ = ["LOOKS", "holm", "look_alpha", "look_at", "looks_done", "next_look"]

LOOKS = (3, 5, 8, 12, 20)
"""Numbers of seeds at which a study may be judged."""
SHARE = 0.014 / 0.05
"""Of the error rate for all looks, what one look has: one-sided 0.014 of 0.05."""

Key = TypeVar("Key", bound=Hashable)


def look_alpha(alpha: float) -> float:
    """Return the one-sided error rate of one look, of `alpha` for all of them.

    ValueError for an `alpha` outside (0, 0.5).
    """
    if not 0 < alpha < 0.5:
        raise ValueError(f"look_alpha: alpha must be between 0 and 0.5, got {alpha}; 0.05 is usual")
    return SHARE * alpha


def look_at(seeds: int) -> int:
    """Return the number of seeds that a study with `seeds` of them is judged on; 0: none yet."""
    return max((look for look in LOOKS if look <= seeds), default=0)


def next_look(seeds: int) -> int | None:
    """Return the number of seeds at the next look; None after the last."""
    return next((look for look in LOOKS if look > seeds), None)


def looks_done(seeds: int) -> int:
    """Return how many looks a study with `seeds` of them has had."""
    return sum(look <= seeds for look in LOOKS)


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Return the p-values corrected for being several, after Holm; all must be numbers.

    One that is at most alpha is a finding, and the chance of any false one is then at most alpha,
    however the tests depend on one another (Scandinavian Journal of Statistics 6, 1979).
    """
    corrected: dict[Key, float] = {}
    least = 0.0
    for place, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        # never smaller than the one before: a weaker test can't become the stronger finding
        least = max(least, min(1.0, (len(p_values) - place) * p_values[key]))
        corrected[key] = least
    return corrected
