"""The drift of an arm's weights over the steps, as every view shows it.

Leaves out the metrics and their labels (`records.metric_table`), how they are drawn (`page`,
`paper`) and the ladder (`view.ladder`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stability.records.metric_table import SHOWN_DRIFTS

if TYPE_CHECKING:
    from stability.analysis.study_records import RecordedArm

__all__ = ["drift_by_seed", "mean_over_seeds"]


def drift_by_seed(arm: "RecordedArm", name: str) -> dict[int, dict[int, float]]:
    """Return by seed and step what charts show under a name of `SHOWN_DRIFTS`.

    Step 0 is left out, because an axis of log steps can't show it.
    """
    metric = SHOWN_DRIFTS[name]
    return {
        seed: {
            step: metric.shown(value)
            for step, value in sorted(run.drift(metric.name).items())
            if step > 0
        }
        for seed, run in arm.runs.items()
    }


def mean_over_seeds(by_seed: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return the mean at each step that every seed has."""
    if not by_seed:
        return {}
    shared = set.intersection(*(set(values) for values in by_seed.values()))
    return {
        step: sum(values[step] for values in by_seed.values()) / len(by_seed)
        for step in sorted(shared)
    }
