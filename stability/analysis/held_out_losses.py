"""The held-out loss of an arm by seed, and its difference from the baseline's.

A difference counts where both runs were evaluated on the same. That is part of the contract of our
own runs; of a recorded one it is what its evaluations were given, if that was seen.
Leaves out what a difference says (`outcome_evidence`).
"""

import math
from collections.abc import Iterator

from stability.analysis.intervals import mean_interval
from stability.analysis.number_text import bounds, nats
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.commands import is_command
from stability.config.schema import BASELINE
from stability.records.metric_names import EVAL_LOSS

__all__ = [
    "held_out_differences",
    "held_out_losses",
    "judged_step",
    "of_other_data",
    "of_unseen_data",
    "reference_loss_note",
]

_HASH = "held_out"
"""The entry in a manifest's hashes."""


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
        losses = other.series(EVAL_LOSS) if other and not _differ(run, other) else {}
        for step, loss in run.series(EVAL_LOSS).items():
            if step in losses:
                by_step.setdefault(step, {})[seed] = loss - losses[step]
    return {step: SeedValues(by_step[step]) for step in sorted(by_step)}


def judged_step(study: RecordedStudy, arm: RecordedArm) -> int:
    """Return the step at which the loss of `arm` is judged: its last one.

    A script evaluates when it likes: of a recorded training it is where the baseline last does.
    """
    end = min(arm.until or study.steps, study.steps)
    baseline = study.arm(BASELINE)
    if not is_command(study.base) or baseline is None:
        return end
    evaluated = {step for run in baseline.runs.values() for step in run.series(EVAL_LOSS)}
    return max((step for step in evaluated if step <= end), default=end)


def reference_loss_note(study: RecordedStudy) -> str:
    """Return how far the references' losses are from the baseline's where nothing is in question.

    Empty where an arm is, since the verdict then says more.
    """
    if study.policy.candidates or any(arm.role == "candidate" for arm in study.arms):
        return ""
    said = [_loss_text(study, arm) for arm in study.arms if arm.role == "reference"]
    return f"No arm is in question, so nothing is judged. {' '.join(said)}" if said else ""


def _loss_text(study: RecordedStudy, arm: RecordedArm) -> str:
    step = judged_step(study, arm)
    found = held_out_differences(study, arm).get(step, SeedValues())
    if not found.n:
        return f"The held-out loss of {arm.name} can't be compared with the baseline's."
    wild = [str(seed) for seed, value in found.per_seed.items() if not math.isfinite(value)]
    if wild:
        return f"The held-out loss of {arm.name} is no number in seed {', '.join(wild)}."
    mean = mean_interval(found.per_seed)
    ends = bounds(mean.low, mean.high, nats)
    level = f", {100 * mean.level:.0f} % interval" if ends else ""
    return (
        f"At step {step} the held-out loss of {arm.name} is {nats(mean.mean)}{ends} nats a token "
        f"from the baseline's (mean of {found.n} seed{'s' if found.n > 1 else ''}{level})."
    )


def of_other_data(study: RecordedStudy, arm: RecordedArm) -> list[int]:
    """Return the seeds whose held-out losses are of other data than the baseline's."""
    return [seed for seed, run, other in _pairs(study, arm) if _differ(run, other)]


def of_unseen_data(study: RecordedStudy, arm: RecordedArm) -> list[int]:
    """Return the seeds of which nobody can check that both losses are of the same data."""
    return [
        seed
        for seed, run, other in _pairs(study, arm)
        if run.series(EVAL_LOSS) and not (_hash(run) and _hash(other))
    ]


def _pairs(
    study: RecordedStudy, arm: RecordedArm
) -> Iterator[tuple[int, RecordedRun, RecordedRun]]:
    baseline = study.arm(BASELINE)
    for seed, run in arm.runs.items():
        if baseline and seed in baseline.runs:
            yield seed, run, baseline.runs[seed]


def _differ(run: RecordedRun, other: RecordedRun) -> bool:
    return bool(_hash(run) and _hash(other)) and _hash(run) != _hash(other)


def _hash(run: RecordedRun) -> str:
    return run.manifest.hashes.get(_HASH, "") if run.manifest else ""
