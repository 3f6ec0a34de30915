"""What a rerun tells of a training: whether it is deterministic, said as soon as that is known.

Leaves out what it means for a study's other arms (`analysis.rerun_floor`).
"""

from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import drift_name
from stability.study.foreign_plan import ForeignRun

__all__ = ["UNSEEDED", "rerun_notes"]

UNSEEDED = "a rerun has the baseline's command: the script does not draw its batches by its seed"
"""What is added where a rerun was given other batches than the baseline."""


def rerun_notes(run: ForeignRun, final_weights: str) -> list[str]:
    """Return a note on a run that changes nothing and ends in other weights; none if it doesn't."""
    if run.diff or run.baseline is None:
        return []
    if read_manifest(run.baseline.manifest).hashes.get("final_weights") == final_weights:
        return []
    drifts = read_metrics(run.paths.metrics).get(drift_name("all", "rel_l2"))
    size = f" by {drifts.values[-1]:.1e}" if drifts else ""
    return [
        f"the script is not deterministic: its rerun drifts{size}; drifts below that mean nothing"
    ]
