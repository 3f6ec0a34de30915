"""The drift of a run's weights as every view shows it: which metrics, by which names, over seeds.

Leaves out how it is drawn (`page`, `paper`) and the ladder (`analysis.ladder`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stability.analysis.study_records import RecordedRun

__all__ = ["DRIFT_TITLES", "mean_over_seeds", "shown_drift"]

DRIFT_TITLES = {
    "rel_l2": "drift of all weights: relative L2",
    "w1": "W1 of all weights (units of the weights)",
    "w1_over_std": "W1 of all weights / their standard deviation",
    "mean_abs": "mean |difference| of all weights",
    "max_abs": "largest |difference| of all weights",
    "1-cosine": "1 - cosine of the angle between all weights",
    "sign_flips": "share of weights with another sign",
}
"""A metric -> the title of its axis. The cosine itself is so near to 1 that only its distance from
1 says anything."""


def shown_drift(run: "RecordedRun", metric: str) -> Mapping[int, float]:
    """Return one of DRIFT_TITLES by step."""
    if metric == "1-cosine":
        return {step: 1 - cosine for step, cosine in run.drift("cosine").items()}
    return run.drift(metric)


def mean_over_seeds(by_seed: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return the mean at each step that every seed has."""
    if not by_seed:
        return {}
    shared = set.intersection(*(set(values) for values in by_seed.values()))
    return {
        step: sum(values[step] for values in by_seed.values()) / len(by_seed)
        for step in sorted(shared)
    }
