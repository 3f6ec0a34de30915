"""Runs that are lost: weights, a held-out loss or a training loss that are no numbers.

A run may end as `finished` and be lost nonetheless: it takes several bad losses in a row to stop
one, and the last updates leave no room for them. So every recorded step counts, and a run that
stopped because it diverged is lost from its last step on at the latest. A weight that is no number
never heals; a loss may, as where an overflow came from one batch.

A seed says something against an arm where the baseline of that seed is sound at the same step.
Where that has not been reached yet, or is lost itself, nothing is known. Leaves out what follows
from a lost seed (`outcome_evidence` and `verdict`).
"""

import math

import numpy as np

from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.schema import BASELINE
from stability.records.metric_names import EVAL_LOSS, NONFINITE_WEIGHTS, TRAIN_LOSS

__all__ = ["lost_seeds", "what_is_lost"]

LOSSES = {TRAIN_LOSS: "training", EVAL_LOSS: "held-out"}


def lost_seeds(study: RecordedStudy, arm: RecordedArm) -> dict[int, str]:
    """Return by seed what is no number in `arm` at a step at which the baseline is sound.

    Every seed on record counts, also one that no look has reached yet.
    """
    baseline = study.arm(BASELINE)
    found = {}
    for seed, run in arm.runs.items():
        other = baseline.runs.get(seed) if baseline else None
        if other is None:
            continue
        said = next((said for step, said in _bad_steps(run) if _is_sound_at(other, step)), "")
        if said:
            found[seed] = said
    return found


def what_is_lost(run: RecordedRun) -> str:
    """Return why a run has no result that another could be compared with; empty if it has one.

    One training loss that is no number is no reason, as long as the weights are sound.
    """
    if run.state == "diverged":
        return run.message or "it diverged"
    bad = [said for _, said in (*_bad_weights(run), *_bad_losses(run, EVAL_LOSS))]
    return bad[0] if bad else ""


def _bad_steps(run: RecordedRun) -> list[tuple[int, str]]:
    """Return the steps at which something is no number, in order, and what."""
    found = [*_bad_weights(run), *(bad for name in LOSSES for bad in _bad_losses(run, name))]
    if run.state == "diverged":
        # its own word is kinder to a reader than the first figure that was logged after it
        said = run.message or "it diverged"
        return sorted([(step, said) for step, _ in found] + [(_last_step(run), said)])
    return sorted(found)


def _bad_weights(run: RecordedRun) -> list[tuple[int, str]]:
    # NaN or more: a count that can't be read is none of zero
    return [
        (step, f"{count:.0f} weights are NaN or infinite at step {step}")
        for step, count in sorted(run.series(NONFINITE_WEIGHTS).items())
        if count != 0
    ]


def _bad_losses(run: RecordedRun, name: str) -> list[tuple[int, str]]:
    column = run.column(name).last_of_each_step()
    bad = ~np.isfinite(column.values)
    return [
        (int(step), f"the {LOSSES[name]} loss is {loss} at step {step}")
        for step, loss in zip(column.steps[bad], column.values[bad], strict=True)
    ]


def _is_sound_at(run: RecordedRun, step: int) -> bool:
    """Return whether a run has reached `step` and all that it recorded there is a number."""
    losses = [run.series(name) for name in LOSSES]
    if run.state == "diverged" and step >= _last_step(run):
        return False
    if any(at <= step for at, _ in _bad_weights(run)):
        return False
    if any(not math.isfinite(of.get(step, 0.0)) for of in losses):
        return False
    return run.state == "finished" or step <= _reached(losses)


def _reached(losses: list[dict[int, float]]) -> int:
    return max((step for of in losses for step, x in of.items() if math.isfinite(x)), default=-1)


def _last_step(run: RecordedRun) -> int:
    return run.manifest.step if run.manifest else 0
