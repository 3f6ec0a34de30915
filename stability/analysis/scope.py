"""What a verdict is of: how many weights were trained, for how long and on what.

Larger models, longer runs and other devices were not tried, and it says nothing of them.
"""

from stability.analysis.study_records import RecordedStudy
from stability.config.schema import BASELINE
from stability.records.snapshots import count_values

__all__ = ["scope_of"]


def scope_of(study: RecordedStudy) -> str:
    """Return it as a clause, as `842,000 weights, 40 updates, NVIDIA H200`, by the baseline's run.

    What is not on record is left out; empty if no run is.
    """
    baseline = study.arm(BASELINE)
    runs = list(baseline.runs.values()) if baseline else []
    run = next((run for run in runs if run.manifest is not None), None)
    if run is None or run.manifest is None:
        return ""
    environment = run.manifest.environment
    weights = count_values(run.paths.held_snapshot(0))
    device = environment.get("gpu") or environment.get("cpu") or ""
    parts = [f"{weights:,} weights"] if weights else []
    return ", ".join([*parts, f"{study.steps:,} updates", *([str(device)] if device else [])])
