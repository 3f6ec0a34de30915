"""The verdict on a candidate: PASS, FAIL or INCONCLUSIVE, with the ratio and interval behind it.

The candidate's drift is divided by the yardstick's, seed by seed at one step: a seed makes both
runs easy or hard alike, so pairing removes what they share. The interval of the geometric mean
(`intervals`) must lie on one side of the largest ratio that the policy allows; if it holds both
answers, the outcome is INCONCLUSIVE. So a PASS is a finding of its own, and not the absence of a
significant difference.

A FAIL asks for more, because tiny differences grow until every numeric change drifts alike. A drift
that can't be told from a rerun's, where reruns differ, or from a 1-ULP nudge's is no evidence
against the candidate. Of candidates that equal their baseline at most one in twenty then fails by
chance: that is the lower end of a 90 % interval.

Others ask less. flash-attn's tests hold the error of one operator to twice that of plain attention
and leave training out. torchtitan's `scripts/loss_compare.py` runs a baseline and a test, and can
assert that their losses are equal. The report's sentences are left to `ladder_sentences`, exit
codes to the command line.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from stability.analysis.intervals import (
    Interval,
    more_seeds,
    paired_interval,
    replicates_needed,
)
from stability.analysis.ladder import planned_early_step
from stability.analysis.number_text import times
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.convert import nearest
from stability.config.schema import BASELINE, PolicyConfig
from stability.records.sealed_json import jsonable

__all__ = [
    "Answer",
    "Drifts",
    "Outcome",
    "Verdict",
    "answer_of",
    "judge",
    "judge_study",
    "smallest_nudge",
]

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
Drifts = Mapping[int, float]
"""A drift by seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The outcome, the numbers it rests on, and the sentence that tells them."""

    outcome: Outcome
    policy: PolicyConfig
    ratio: Interval
    per_seed: Mapping[int, float]
    """Candidate over yardstick."""
    more_seeds: int | None
    """How many more seeds would decide; 0 where it is decided, None where no number would."""
    reason: str
    confounded: bool = False
    """Whether the candidate changes several axes."""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        policy, ratio = self.policy, self.ratio
        end = f"; the policy allows {times(policy.max_ratio)}"
        if not ratio.n or math.isnan(ratio.mean):
            return f"{self.outcome}: {self.reason}."
        span = ""
        if not math.isnan(ratio.low) and ratio.low < ratio.high:
            span = f" ({ratio.level:.0%} interval {times(ratio.low)} to {times(ratio.high)})"
        candidate = f"{policy.candidate}{' (confounded)' if self.confounded else ''}"
        seeds = f"{ratio.n} seed{'s' if ratio.n > 1 else ''}"
        said = (
            f"{self.outcome}: at step {policy.step} {candidate} has moved the weights "
            f"{times(ratio.mean)}{span} as far as {policy.yardstick}, over {seeds}{end}"
        )
        return f"{said}. {self.reason}." if self.reason else f"{said}."

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; a number that is none stands as text."""
        return jsonable(
            {
                "outcome": self.outcome,
                **asdict(self.policy),
                "ratio": asdict(self.ratio),
                "per_seed": {str(seed): value for seed, value in self.per_seed.items()},
                "more_seeds": self.more_seeds,
                "sentence": self.sentence,
            }
        )


def judge_study(study: RecordedStudy, policy: PolicyConfig) -> Verdict:
    """Judge the candidate that `policy` names on what `study` has recorded.

    ValueError for an arm that the study does not have, a step without a snapshot, or drifts that
    are not on record for every seed, and as `judge`: what to do instead.
    """
    policy = _completed(study, policy)
    candidate, yardstick = (
        _arm(study, what, getattr(policy, what)) for what in ("candidate", "yardstick")
    )
    _check_baseline(study, policy.step)
    drifts = _drifts(candidate, policy.step)
    scale = _drifts(yardstick, policy.step)
    for arm, found in ((candidate, drifts), (yardstick, scale)):
        missing = [str(seed) for seed in study.seeds if seed not in found]
        errors = [run.error for run in arm.runs.values() if run.error]
        if missing:
            raise ValueError(
                f"verdict: {arm.name} must have a drift on record at step {policy.step} for every "
                f"seed, has none for {', '.join(missing)}; "
                f"{errors[0] if errors else 'run the study to its end'}"
            )
    floor = [_drifts(arm, policy.step) for arm in study.candidates if arm.axis == "none"]
    nudge = smallest_nudge(study)
    found = judge(
        drifts,
        scale,
        policy,
        rerun=floor[0] if floor else {},
        nudge=_drifts(nudge, policy.step) if nudge and candidate.axis != "nudge" else {},
    )
    return replace(found, confounded=candidate.axis == "many")


def judge(
    candidate: Drifts, yardstick: Drifts, policy: PolicyConfig, *, rerun: Drifts, nudge: Drifts
) -> Verdict:
    """Judge drifts by seed at one step; `rerun` and `nudge` are empty if there is no such arm.

    A candidate whose weights are NaN or infinite fails. ValueError for fewer seeds than an interval
    needs, where one is needed.
    """
    ratios = _over(candidate, yardstick)
    lost = [seed for seed, drift in candidate.items() if not math.isfinite(drift)]
    # without the seeds that are lost: one of them would leave the sentence without a number
    ratio = paired_interval({s: r for s, r in ratios.items() if math.isfinite(r)}, policy.level)

    def verdict(outcome: Outcome, reason: str, more: int | None = 0) -> Verdict:
        return Verdict(
            outcome=outcome,
            policy=policy,
            ratio=ratio,
            per_seed=ratios,
            more_seeds=more,
            reason=reason,
        )

    if lost:
        return verdict("FAIL", f"Its weights are no numbers in {len(lost)} of {len(candidate)}")
    # before any ratio, since the yardstick may be 0 as well, and 0 / 0 says nothing
    if all(drift == 0 for drift in candidate.values()):
        return verdict("PASS", "Its weights are the baseline's, to the bit")
    if not ratios or not all(math.isfinite(r) for r in ratios.values()):
        return verdict("INCONCLUSIVE", "The yardstick has moved no weight, or is no number", None)
    # not before this: what is decided above needs no interval, so a single seed may be enough
    if math.isnan(ratio.low):
        needed = replicates_needed(policy.level)
        raise ValueError(
            f"verdict: a {policy.level:.0%} interval needs {needed} seeds, got {ratio.n}; run the "
            f"study with --seeds {needed}, or use a lower --level"
        )
    if ratio.high <= policy.max_ratio:
        return verdict("PASS", "")
    if ratio.low <= policy.max_ratio:
        more = more_seeds(ratios, policy.max_ratio, policy.level)
        return verdict("INCONCLUSIVE", f"The interval holds both answers: {_run_more(more)}", more)
    # where reruns repeat to the bit, only the nudge shows what chaos makes of a tiny change
    for drifts, name in ((rerun, "a rerun of the baseline"), (nudge, "the nudge")):
        if not _is_told_from(candidate, drifts, policy.level):
            return verdict(
                "INCONCLUSIVE",
                f"But that can't be told from {name}, so it is no evidence: read an earlier step",
                None,
            )
    return verdict("FAIL", "")


def _is_told_from(candidate: Drifts, other: Drifts, level: float) -> bool:
    """Whether the candidate's drift is surely larger than that of an arm that changes nothing."""
    # a rerun that has not moved at all can't be confused with a candidate that has
    ratios = _over(candidate, {seed: drift for seed, drift in other.items() if drift})
    if not ratios:
        return True
    low = paired_interval(ratios, level).low
    return low > 1  # NaN, too few seeds, is not


def _over(above: Drifts, below: Drifts) -> dict[int, float]:
    return {
        # NaN and not infinity: a ratio to nothing is not large, 0 / 0 least of all
        seed: drift / below[seed] if below[seed] else math.nan
        for seed, drift in above.items()
        if seed in below
    }


def _run_more(more: int | None) -> str:
    if more is None:
        return "no number of seeds up to 1000 would decide"
    return f"{more} more seed{'s' if more != 1 else ''} would decide" if more else "run one more"


def _completed(study: RecordedStudy, policy: PolicyConfig) -> PolicyConfig:
    """Return `policy` with the study's own yardstick and early step where it names none."""
    if not policy.candidate:
        arms = ", ".join(arm.name for arm in study.candidates)
        raise ValueError(f"verdict: candidate must be named, one of {arms}; use --candidate")
    if not (policy.yardstick or study.yardstick):
        raise ValueError("verdict: the study has no yardstick; use --yardstick")
    # the first is step 0, where no update has been made yet
    if policy.step and policy.step not in study.planned_snapshots[1:]:
        steps = ", ".join(str(step) for step in study.planned_snapshots[1:])
        raise ValueError(f"verdict: step must be one of {steps}, got {policy.step}")
    return PolicyConfig(
        candidate=policy.candidate,
        yardstick=policy.yardstick or study.yardstick,
        max_ratio=policy.max_ratio,
        step=policy.step or planned_early_step(study),
        level=policy.level,
    )


def _arm(study: RecordedStudy, what: str, name: str) -> RecordedArm:
    arm = study.arm(name)
    if arm is None or name == BASELINE:
        names = [arm.name for arm in study.candidates]
        raise ValueError(
            f"verdict: {what} must be an arm of the study, got {name!r}; "
            f"nearest: {nearest(name, names)}"
        )
    return arm


def smallest_nudge(study: RecordedStudy) -> RecordedArm | None:
    """Return the arm that nudges the initial weights least, if there is one."""
    nudges = [arm for arm in study.candidates if arm.axis == "nudge"]
    return min(nudges, key=lambda arm: arm.diff["nudge.ulps"][1], default=None)


def _check_baseline(study: RecordedStudy, step: int) -> None:
    """ValueError if a baseline diverged before `step`, so that nothing can be compared there."""
    baseline = study.arm(BASELINE)
    for seed, run in baseline.runs.items() if baseline else ():
        found = [
            math.isfinite(arm.runs[seed].drift("rel_l2").get(step, math.nan))
            for arm in study.candidates
        ]
        # a baseline that diverged after the step has its drifts there on record
        if run.state == "diverged" and not any(found):
            raise ValueError(
                f"verdict: the baseline diverged, seed {seed}: {run.message}; nothing can be "
                f"compared at step {step}, use an earlier --step"
            )


def _drifts(arm: RecordedArm, step: int) -> dict[int, float]:
    """Return the drift by seed; NaN for a run that diverged before the step."""
    found = {}
    for seed, run in arm.runs.items():
        # a run that is not there yet will have its drift; one that diverged never will
        value = run.drift("rel_l2").get(step, math.nan if run.state == "diverged" else None)
        if value is not None:
            found[seed] = value
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """The study's answer in one sentence: its policy's verdict, or why there is none yet."""

    outcome: Outcome | Literal["OPEN"]
    """OPEN if it can't be judged yet."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence if self.outcome == "OPEN" else f"{self.outcome}: {self.sentence}"


def answer_of(study: RecordedStudy) -> Answer | None:
    """Return the answer of the study's own policy; None if it names no candidate."""
    if not study.policy.candidate:
        return None
    try:
        verdict = judge_study(study, study.policy)
    except ValueError as error:
        return Answer("OPEN", f"No verdict yet: {str(error).removeprefix('verdict: ')}.")
    return Answer(verdict.outcome, verdict.sentence.removeprefix(f"{verdict.outcome}: "))
