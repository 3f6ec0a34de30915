"""What a rerun tells of a training: whether it is deterministic, said as soon as that is known.

Leaves out what it means for a study's other arms (`analysis.rerun_floor`).
"""

from stability.analysis.alike_records import ranks_apart
from stability.analysis.batch_inputs import first_other_labels, first_other_order
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import TRAIN_LOSS, drift_name
from stability.records.paths import RunPaths
from stability.study.foreign_plan import ForeignRun

__all__ = ["UNSEEDED", "rerun_notes"]

UNSEEDED = "a rerun has the baseline's command: the script does not draw its batches by its seed"
"""What is added where a rerun was given other batches than the baseline."""

_UNSTEADY = "the script is not deterministic"


def rerun_notes(run: ForeignRun, final_weights: str) -> list[str]:
    """Return a note on a run that changes nothing and ends in other weights; none if it doesn't."""
    if run.diff or run.baseline is None:
        return []
    baseline = read_manifest(run.baseline.manifest)
    if baseline.hashes.get("final_weights") == final_weights:
        apart = [rank for rank, *_ in ranks_apart(baseline, read_manifest(run.paths.manifest))]
        where = f"rank{'s' if len(apart) > 1 else ''} {', '.join(apart)}"
        return [f"{_UNSTEADY}: its rerun ends in other bits on {where} alone"] if apart else []
    drifts = read_metrics(run.paths.metrics).get(drift_name("all", "rel_l2"))
    size = f" by {drifts.values[-1]:.1e}" if drifts else ""
    return [
        f"{_UNSTEADY}: its rerun drifts{size}"
        f"{first_difference(run.baseline, run.paths)}; drifts below that mean nothing"
    ]


def first_difference(baseline: RunPaths, rerun: RunPaths) -> str:
    """Return a clause on the first update that both logs tell apart, and by what; mostly a loss.

    Their batches are the same, or the rerun would have been refused, but for what `verify` leaves
    unproven. Empty if the logs tell nothing apart.
    """
    logs = [read_metrics(paths.metrics).get(TRAIN_LOSS) for paths in (baseline, rerun)]
    one, other = (dict(zip(x.steps, x.values, strict=True)) if x else {} for x in logs)
    shared = sorted(one.keys() & other.keys())
    # the loss at step 0 is the one that the first update is made from; two NaN are alike
    loss = next((step + 1 for step in shared if repr(one[step]) != repr(other[step])), None)
    turned = first_other_order(baseline, rerun)
    made = first_other_labels(baseline, rerun, may_be_made=True)
    found = [
        *([(turned, "the order of its batch's rows")] if turned else []),
        *([(made[0], f"its targets{made[1]}")] if made else []),
    ]
    if loss:
        found.append((loss, f"its loss, {one[loss - 1]!r} and {other[loss - 1]!r}"))
    if not found:
        return ""
    at, what = min(found, key=lambda each: each[0])
    return f"; the first update that differs is {at}, in {what}"
