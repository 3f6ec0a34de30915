"""The held-out loss of an arm by seed, and its difference from the baseline's.

Leaves out what a difference says (`outcome_evidence`).
"""

from stability.analysis.seed_values import SeedValues
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.schema import BASELINE
from stability.records.metric_names import EVAL_LOSS

__all__ = ["held_out_differences", "held_out_losses"]


def held_out_losses(arm: RecordedArm, step: int) -> SeedValues:
    """Return the held-out loss of each seed of `arm` that has one on record at `step`."""
    found = {seed: run.series(EVAL_LOSS) for seed, run in arm.runs.items()}
    return SeedValues({seed: losses[step] for seed, losses in found.items() if step in losses})


def held_out_differences(study: RecordedStudy, arm: RecordedArm) -> dict[int, SeedValues]:
    """Return the held-out loss of `arm` less the baseline's of the same seed, by step."""
    baseline = study.arm(BASELINE)
    by_step: dict[int, dict[int, float]] = {}
    for seed, run in arm.runs.items():
        other = baseline.runs.get(seed) if baseline else None
        losses = other.series(EVAL_LOSS) if other else {}
        for step, loss in run.series(EVAL_LOSS).items():
            if step in losses:
                by_step.setdefault(step, {})[seed] = loss - losses[step]
    return {step: SeedValues(by_step[step]) for step in sorted(by_step)}
