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
from collections.abc import Callable

import numpy as np

from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.schema import BASELINE
from stability.records.metric_names import EVAL_LOSS, NONFINITE_WEIGHTS, TRAIN_LOSS

__all__ = ["baseline_lost", "lost_seeds", "what_is_lost", "where_lost"]

LOSSES = {TRAIN_LOSS: "training", EVAL_LOSS: "held-out"}


def lost_seeds(study: RecordedStudy, arm: RecordedArm) -> dict[int, str]:
    """Return by seed what is no number in `arm` at a step at which the baseline is sound.

    Every seed on record counts, also one that no look has reached yet.
    """
    baseline = study.arm(BASELINE)
    found = {}
    for seed, run in arm.runs.items():
        other, bad = baseline.runs.get(seed) if baseline else None, _bad_steps(run)
        if other is None or not bad:
            continue
        is_sound = _soundness(other)
        said = next((said for step, said in bad if is_sound(step)), "")
        if said:
            found[seed] = said
    return found


def what_is_lost(run: RecordedRun) -> str:
    """Return why a run has no result that another could be compared with; empty if it has one.

    A training loss that is no number is a reason only where none follows that is one: an overflow
    may come from one batch, and the weights stay sound.
    """
    if run.state == "diverged":
        return run.message or "it diverged"
    bad = [said for _, said in (*_bad_weights(run), *_bad_losses(run, EVAL_LOSS))]
    losses = run.column(TRAIN_LOSS).last_of_each_step().values
    if len(losses) and not np.isfinite(losses[-1]):
        bad.append(_bad_losses(run, TRAIN_LOSS)[-1][1])
    return bad[0] if bad else ""


def where_lost(study: RecordedStudy, arm: RecordedArm) -> str:
    """Return where an arm is lost though the baseline of the seed is sound; mostly empty."""
    found = lost_seeds(study, arm)
    if not found:
        return ""
    seeds = "seed" if len(found) == 1 else "seeds"
    return f"{seeds} {', '.join(map(str, found))}: {next(iter(found.values()))}"


def baseline_lost(study: RecordedStudy, count: int) -> str:
    """Return where the baseline is lost in the first `count` seeds; mostly empty."""
    baseline = study.arm(BASELINE)
    runs = [(seed, baseline.runs[seed]) for seed in study.seeds[:count]] if baseline else []
    lost = [f"seed {seed}: {said}" for seed, run in runs if (said := what_is_lost(run))]
    return lost[0] if lost else ""


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


def _soundness(run: RecordedRun) -> Callable[[int], bool]:
    """Return a test whether a run has reached a step and all that it recorded there is a number.

    It looks at the records once: a run that goes on for long after it was lost has many bad steps.
    """
    columns = {name: run.column(name).last_of_each_step() for name in LOSSES}
    finite = [of.steps[np.isfinite(of.values)] for of in columns.values()]
    reached = max((int(steps[-1]) for steps in finite if len(steps)), default=-1)
    bad = {step for name in LOSSES for step, _ in _bad_losses(run, name)}
    ends = [step for step, _ in _bad_weights(run)[:1]]
    if run.state == "diverged":
        ends.append(_last_step(run))
    if run.state != "finished":
        ends.append(reached + 1)
    end = min(ends, default=math.inf)
    return lambda step: step < end and step not in bad


def _last_step(run: RecordedRun) -> int:
    return run.manifest.step if run.manifest else 0
