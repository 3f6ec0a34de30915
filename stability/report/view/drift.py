"""The drift of a run's weights as every view shows it: by step, and as the mean over the seeds.

Leaves out the metrics and their labels (`records.metric_table`), how they are drawn (`page`,
`paper`) and the ladder (`analysis.ladder`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stability.records.metric_table import SHOWN_DRIFTS

if TYPE_CHECKING:
    from stability.analysis.study_records import RecordedRun

__all__ = ["mean_over_seeds", "shown_drift"]


def shown_drift(run: "RecordedRun", name: str) -> Mapping[int, float]:
    """Return by step what charts show under a name of `SHOWN_DRIFTS`."""
    metric = SHOWN_DRIFTS[name]
    return {step: metric.shown(value) for step, value in run.drift(metric.name).items()}


def mean_over_seeds(by_seed: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return the mean at each step that every seed has."""
    if not by_seed:
        return {}
    shared = set.intersection(*(set(values) for values in by_seed.values()))
    return {
        step: sum(values[step] for values in by_seed.values()) / len(by_seed)
        for step in sorted(shared)
    }
