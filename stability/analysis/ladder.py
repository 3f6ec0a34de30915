"""The ladder: every arm's drift from the baseline at an early and at the last step, in order.

A drift alone says nothing: what matters is which accepted change moves the weights as far. So the
arms are ordered by drift at the early step, since late in a run every numeric change drifts alike,
and every drift is also divided by the yardstick's. A study that names no early step is read at the
step that its candidates are judged at, one that names no yardstick by its reference. A number is
always read at a step that all arms share, and keeps its value for each seed.

The W1 distance ignores positions, so between arms whose initial weights were drawn independently it
compares two samples, and two samples of one law differ anyway; a W1 below this sampling floor says
nothing. The floor is measured: W1 at step 0 between the baseline and an arm with other initial
weights of the same scheme. The textbook's 1.8 * sigma / sqrt(n) holds for samples of one normal
law, and the weights of a model are many, some of them constants: with the pooled sigma it came out
3 to 4 times too high. Sentences are left to `ladder_sentences`, confidence intervals to
`intervals`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from stability.analysis.drift_notes import drift_notes
from stability.analysis.held_out_losses import held_out_losses, judged_step, reference_loss_note
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_distances import known_step, left_out_note, reference_of
from stability.analysis.study_records import (
    RecordedArm,
    RecordedStudy,
    RunState,
)
from stability.config.arms import INDEPENDENT_AXES, INIT_SEED, describe_change
from stability.config.schema import BASELINE, Role

__all__ = [
    "INDEPENDENT_AXES",
    "EarlyLast",
    "Ladder",
    "Row",
    "early_step_of",
    "is_reference",
    "ladder_of",
    "w1_floor",
    "yardstick_of",
]


LOSS_TAIL = 10
"""The final loss is the mean over the last 1/LOSS_TAIL of the steps."""

WORST_FIRST: tuple[RunState, ...] = (
    "failed",
    "diverged",
    "interrupted",
    "stopped",
    "missing",
    "running",
    "finished",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyLast:
    """One quantity at the ladder's two steps."""

    early: SeedValues
    last: SeedValues

    def over(self, other: "EarlyLast") -> "EarlyLast":
        """Return this divided by `other`, seed by seed at each step."""
        return EarlyLast(early=self.early.over(other.early), last=self.last.over(other.last))

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {"early": self.early.to_dict(), "last": self.last.to_dict()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One arm on the ladder. `state` is that of its worst seed."""

    arm: str
    """Its name."""
    axis: str
    """What it changes of the baseline: a path of the config, a flag, a commit."""
    role: Role
    """What it is there for."""
    until: int
    """The last step that it trains to."""
    change: str
    """The change in words."""
    state: RunState
    """That of its worst seed."""
    message: str
    """Of a seed that did not finish: how it ended."""
    final_loss: SeedValues
    """Mean training loss of the last tenth of the steps (nats a token)."""
    held_out_loss: SeedValues
    """At the last step, on text that no arm trains on; empty where none was held out."""
    rel_l2: EarlyLast
    """Drift of all weights from the baseline's: relative L2."""
    w1: EarlyLast
    """W1 between all weights and the baseline's (units of the weights)."""
    ratio: EarlyLast
    """rel_l2 divided by the yardstick's, seed by seed."""
    w1_floor: EarlyLast
    """Below this W1 says nothing; only for arms on an axis with independent initial weights.

    Measured at step 0, so the same at both steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """A study's arms by drift: the baseline, then from the least to the most moved."""

    name: str
    question: str
    yardstick: str
    """The arm whose drift the ratios are to; empty where the study has none."""
    seeds: tuple[int, ...]
    steps: int
    early_step: int
    last_step: int
    rows: tuple[Row, ...]
    drift_notes: tuple[str, ...] = ()
    """Which drifts are left out, which prove nothing, and what stands in place of an answer."""

    def row(self, arm: str) -> Row | None:
        """Return the row of `arm`, if the study has it."""
        return next((row for row in self.rows if row.arm == arm), None)

    def rows_on(self, axis: str) -> tuple[Row, ...]:
        """Return the rows of the arms that change `axis`, without the baseline."""
        return tuple(row for row in self.rows if row.axis == axis and row.arm != BASELINE)

    def to_json(self) -> str:
        """Return the ladder as JSON text, every seed's value included."""
        content = {
            **{name: getattr(self, name) for name in self.__slots__ if name != "rows"},
            "rows": [_row_dict(row) for row in self.rows],
        }
        # NaN and infinity are no JSON; `SeedValues.to_dict` has made text of them
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def ladder_of(study: RecordedStudy) -> Ladder:
    """Return the ladder of a study that has been read."""
    early = early_step_of(study)
    # arms may all end before the baseline; a study that is still running is read at the last step
    # that has a drift
    planned = max((arm.until for arm in study.candidates), default=study.steps)
    last = planned if planned in study.drift_steps else max(study.drift_steps, default=planned)
    name = yardstick_of(study)
    yardstick = study.arm(name)
    scale = _drift(yardstick, "rel_l2", early, last) if yardstick else _read({}, early, last)
    rows = [_row(study, arm, early, last, scale) for arm in study.arms]
    return Ladder(
        name=study.name,
        question=study.question,
        yardstick=name,
        seeds=study.seeds,
        steps=study.steps,
        early_step=early,
        last_step=last,
        rows=tuple(sorted(rows, key=_rung)),
        drift_notes=tuple(
            x
            for x in (*drift_notes(study), left_out_note(study, early), reference_loss_note(study))
            if x
        ),
    )


def yardstick_of(study: RecordedStudy) -> str:
    """Return the arm that drifts are put in ratio to: the one named, else the reference, or ""."""
    reference = reference_of(study)
    return study.yardstick or (reference.name if reference else "")


def is_reference(study: RecordedStudy, name: str) -> bool:
    """Whether that arm is the reference: as good a rounding as the baseline's lies farther off."""
    arm = study.arm(name)
    return arm is not None and arm.role == "reference"


def early_step_of(study: RecordedStudy) -> int:
    """Return the planned snapshot nearest below the early step asked for, but after step 0.

    Where none is asked for it is the step that candidates are judged at, and the first snapshot
    before that is known. The last step is early only in a study that has no snapshot in between.
    """
    asked = study.early_step or _judged_step(study)
    # before the first update a drift is that of the initial weights alone
    planned = [step for step in study.planned_snapshots if 0 < step < study.steps] or [study.steps]
    return max((step for step in planned if step <= asked), default=planned[0])


def _judged_step(study: RecordedStudy) -> int:
    """Return the judged step, or the last one before it that reruns and the yardstick reach."""
    name = yardstick_of(study)
    ends = (arm.until for arm in study.arms if arm.role == "rerun" or arm.name == name)
    return min([known_step(study), *ends])


def w1_floor(study: RecordedStudy, seed: int) -> float | None:
    """Return the sampling floor of a seed's pooled W1, in units of the weights.

    That is W1 at step 0 of the arm with another seed for its weights: the scheme is the
    baseline's, the draw another. None without such an arm, or without its drift at step 0.
    """
    arm = next((arm for arm in study.arms if arm.axis == INIT_SEED), None)
    run = arm.runs.get(seed) if arm else None
    return (run.drift("w1").get(0) if run else None) or None


def _rung(row: Row) -> tuple[bool, bool, float]:
    """Sort by early drift, where chaos has had the least time; arms without any drift come last."""
    # an arm without the early step is ranked by its last rather than among those without a drift
    drift = row.rel_l2.early if row.rel_l2.early.n else row.rel_l2.last
    return row.arm != BASELINE, drift.n == 0 and row.arm != BASELINE, drift.mean if drift.n else 0.0


def _row(study: RecordedStudy, arm: RecordedArm, early: int, last: int, scale: EarlyLast) -> Row:
    rel_l2 = _drift(arm, "rel_l2", early, last)
    state, message = _state(arm)
    return Row(
        arm=arm.name,
        axis=arm.axis,
        role=arm.role,
        until=arm.until,
        change=describe_change(arm.name, arm.axis, arm.diff, study.base, arm.role),
        state=state,
        message=message,
        final_loss=_final_loss(arm, study.steps),
        held_out_loss=_held_out_loss(study, arm),
        rel_l2=rel_l2,
        w1=_drift(arm, "w1", early, last),
        ratio=rel_l2.over(scale),
        w1_floor=_floor(study, arm),
    )


def _state(arm: RecordedArm) -> tuple[RunState, str]:
    worst = min(arm.runs.values(), key=lambda run: WORST_FIRST.index(run.state))
    if worst.state == "finished":
        return worst.state, ""
    finished = sum(run.state == "finished" for run in arm.runs.values())
    said = f": {worst.message}" if worst.message else ""
    done = f" ({finished} of {len(arm.runs)} seeds finished)" if finished else ""
    return worst.state, f"seed {worst.seed} {worst.state}{said}{done}"


def _held_out_loss(study: RecordedStudy, arm: RecordedArm) -> SeedValues:
    """Return each seed's loss on held-out text; as there, none of an arm that ends early."""
    if arm.until < study.steps:
        return SeedValues()
    return held_out_losses(arm, judged_step(study, arm))


def _final_loss(arm: RecordedArm, steps: int) -> SeedValues:
    """Return each finished seed's mean loss over the last tenth of the steps.

    An arm that ends before the others has none: its losses are those of fewer updates.
    """
    if arm.until < steps:
        return SeedValues()
    first = steps - max(1, round(steps / LOSS_TAIL))
    found = {}
    for seed, run in arm.runs.items():
        # a run that stopped early has had fewer updates: its last losses are no final ones
        losses = run.loss() if run.state == "finished" else {}
        # a tail, as the loss of a single step is that of a single batch
        tail = [loss for step, loss in losses.items() if step >= first]
        # a run that logs less often than that has its last logged loss taken
        tail = tail or list(losses.values())[-1:]
        if tail:
            found[seed] = sum(tail) / len(tail)
    return SeedValues(found)


def _drift(arm: RecordedArm, metric: str, early: int, last: int) -> EarlyLast:
    return _read({seed: run.drift(metric) for seed, run in arm.runs.items()}, early, last)


def _read(by_seed: Mapping[int, Mapping[int, float]], early: int, last: int) -> EarlyLast:
    def at(step: int) -> SeedValues:
        return SeedValues(
            {seed: values[step] for seed, values in by_seed.items() if step in values}
        )

    return EarlyLast(early=at(early), last=at(last))


def _floor(study: RecordedStudy, arm: RecordedArm) -> EarlyLast:
    # runs that start from the same bits start at W1 = 0: no sampling lies between them
    seeds = arm.runs if arm.axis in INDEPENDENT_AXES else {}
    found = {seed: w1_floor(study, seed) for seed in seeds}
    floor = SeedValues({seed: value for seed, value in found.items() if value is not None})
    return EarlyLast(early=floor, last=floor)


def _row_dict(row: Row) -> dict[str, object]:
    values = {name: getattr(row, name) for name in row.__slots__}
    return {
        name: value.to_dict() if isinstance(value, SeedValues | EarlyLast) else value
        for name, value in values.items()
    }
