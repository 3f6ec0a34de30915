"""The verdict on a study's candidates, by intersection of what four levels say of each.

A candidate passes only if every level holds, and if wrong candidates would have been seen
(`assay`). That needs no correction for being four tests: a candidate that is harmed on any level
passes only where that level's own test errs, so the chance is at most that test's (the
intersection-union test, Berger, Technometrics 24, 1982). It fails if any level is surely harmed;
that is a union, so the p-values of all candidates and levels are corrected (Holm), and no study of
right candidates fails one more often than one test would. All else is INCONCLUSIVE. Better than
the baseline is no harm on any level.

Divergence leaves nothing to chance: an arm whose weights or losses are no numbers at a step at
which the baseline of the seed is sound fails at once, in whichever seed (`lost_runs`). All else is
judged on the first seeds, as many as the look has (`sequential`). The arm `broken` carries a fault
that must be seen: where it does not fail, no other arm can pass.

Leaves out how a level is measured (`operator_evidence` and its siblings), and what is shown of it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from stability.analysis.assay import ArmAssay, arm_assay, would_have_shown
from stability.analysis.drift_notes import unproven_clause
from stability.analysis.evidence import LEVELS, Level, LevelEvidence, agreeing, listed, silent_level
from stability.analysis.gradient_evidence import gradient_evidence
from stability.analysis.lost_runs import baseline_lost, where_lost
from stability.analysis.more_looks import (
    gaining,
    likely_look,
    more_looks,
    more_seeds,
    next_look_is_at,
    outlook,
    unmeasured,
)
from stability.analysis.no_assay import to_show_harm, unseen
from stability.analysis.operator_evidence import operator_evidence
from stability.analysis.outcome_evidence import outcome_evidence
from stability.analysis.protocol_check import protocol_changes
from stability.analysis.sequential import LOOKS, holm, look_alpha, look_at, next_look
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.analysis.surely_harmed import why_it_fails
from stability.analysis.training_evidence import training_evidence
from stability.config.commands import PRECISION_QUESTION
from stability.config.convert import nearest
from stability.config.schema import BASELINE
from stability.config.study import PolicyConfig
from stability.records.sealed_json import jsonable

__all__ = [
    "ArmVerdict",
    "EvidenceOf",
    "Outcome",
    "StudyVerdict",
    "judge_arms",
    "judged_candidates",
]

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "NO ASSAY"]
WORST_FIRST: tuple[Outcome, ...] = ("FAIL", "NO ASSAY", "INCONCLUSIVE", "PASS")
_DECIDED: tuple[Outcome, ...] = ("PASS", "FAIL")

EvidenceOf = Callable[[RecordedStudy, RecordedArm, PolicyConfig], LevelEvidence]
AssayOf = Callable[[RecordedStudy, RecordedArm, PolicyConfig], ArmAssay]
ChangesOf = Callable[[RecordedStudy, PolicyConfig], list[str]]
LEVEL_EVIDENCE: Mapping[Level, EvidenceOf] = {
    "operator": operator_evidence,
    "gradient": gradient_evidence,
    "training": training_evidence,
    "outcome": outcome_evidence,
}
CONTROLS = ("baseline", "reference", "nudge", "rerun", "broken")
"""Roles whose runs of a seed must have ended before that seed counts."""
DONE = ("finished", "diverged")

_LIMITS = {
    "max_error_ratio": "an error ratio of",
    "max_gain": "a gain of",
    "max_bias_ulp": "a bias in ULP of",
    "max_gradient_ratio": "a gradient's error ratio of",
    "max_share": "a share of",
    "max_excess": "E",
    "window_limit": "a control's |log E| of",
    "margin_nats": "a margin in nats of",
    "alpha": "an error rate of",
}
"""The limits of a policy in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmVerdict:
    """The outcome of one arm, the evidence of each level, and the sentence that sums it up."""

    arm: str
    role: str
    outcome: Outcome
    levels: Mapping[Level, LevelEvidence]
    """As the levels say, but `harmed` only where it outlives the correction for many tests."""
    assay: ArmAssay
    sentence: str
    """The reason of the outcome, without arm and outcome."""
    seeds: int
    """On how many seeds it was judged: those of the look; fewer than 3 are no look."""
    confounded: bool = False
    """Whether the arm changes several axes."""
    gains: tuple[Level, ...] = ()
    """The levels that are undecided and that more seeds may decide."""

    @property
    def is_control(self) -> bool:
        """Whether the arm is broken on purpose, so that a FAIL is what is wanted."""
        return self.role == "broken"

    @property
    def answer(self) -> str:
        """The outcome, and of a control whether it is the wanted one: `FAIL, as it must`."""
        if not self.is_control or (self.seeds < LOOKS[0] and self.outcome != "FAIL"):
            return self.outcome
        return f"{self.outcome}, {'as it must' if self.outcome == 'FAIL' else 'but it must FAIL'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "answer": self.answer,
            "levels": {level: evidence.to_dict() for level, evidence in self.levels.items()},
            "assay": self.assay.to_dict(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyVerdict:
    """The outcome of a study: that of its candidates, the worst if they differ."""

    outcome: Outcome
    sentence: str
    """Each candidate with its outcome."""
    arms: tuple[ArmVerdict, ...]
    """Candidates first, then the arms that are broken on purpose."""
    look: int
    """The number of seeds of the look; 0 before the first."""
    next_look: int | None
    """The number of seeds of the next; None after the last."""
    alpha: float
    """The one-sided error rate of the look."""
    exploratory: tuple[str, ...] = ()
    """What was changed after the protocol was sealed; where it is not empty, nothing is proven."""

    @property
    def outlook(self) -> str:
        """What more seeds would do, or what is missing, a clause; often empty after the last."""
        is_decided = self.look and all(arm.outcome in _DECIDED for arm in self.candidates)
        if is_decided and not self.exploratory:
            return "decided, which ends the plan: no more seeds are needed"
        open_arms = [arm for arm in self.candidates if arm.outcome not in _DECIDED]
        if self.look and open_arms and all(arm.outcome == "NO ASSAY" for arm in open_arms):
            return to_show_harm(open_arms, self.controls, self.next_look)
        missing = [unmeasured(arm.levels) for arm in open_arms]
        if self.look and missing and all(missing):
            # a FAIL may come of more seeds all the same
            gains = self.next_look and any(arm.gains for arm in self.candidates)
            next_look = [next_look_is_at(self.next_look, self.likely_look)] if gains else []
            return "; ".join(dict.fromkeys([*missing, *next_look]))
        states = {one.state for arm in self.candidates for one in arm.levels.values()}
        if self.look and "undecided" in states and not any(arm.gains for arm in self.candidates):
            return "more seeds add nothing to what is undecided"
        return next_look_is_at(self.next_look, self.likely_look)

    @property
    def likely_look(self) -> int | None:
        """The look at which all that is open is likely to be decided; None after the last."""
        open_arms = [arm for arm in self.candidates if arm.outcome not in _DECIDED]
        found = [one for arm in open_arms for one in arm.levels.values()]
        found += [arm.levels["training"] for arm in self.controls if "training" in arm.levels]
        return likely_look(found, self.next_look)

    @property
    def candidates(self) -> tuple[ArmVerdict, ...]:
        """The verdicts on the candidates."""
        return tuple(arm for arm in self.arms if not arm.is_control)

    @property
    def controls(self) -> tuple[ArmVerdict, ...]:
        """The verdicts on the arms that are broken on purpose."""
        return tuple(arm for arm in self.arms if arm.is_control)

    def arm(self, name: str) -> ArmVerdict | None:
        """Return the verdict on the arm of that name, if it was judged."""
        return next((arm for arm in self.arms if arm.arm == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; a number that is none stands as text."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return jsonable(values | {"arms": [arm.to_dict() for arm in self.arms]})


def judge_arms(
    study: RecordedStudy,
    policy: PolicyConfig,
    *,
    levels: Mapping[Level, EvidenceOf] | None = None,
    assay: AssayOf | None = None,
    changes: ChangesOf | None = None,
) -> StudyVerdict:
    """Judge the candidates of `study` by `policy`.

    `levels`, `assay` and `changes` stand in for the project's own evidence, assay and comparison
    with the sealed protocol. ValueError if there is no candidate, or one that is no arm.
    """
    measure = levels or LEVEL_EVIDENCE
    candidates = judged_candidates(study, policy)
    broken = [arm for arm in study.arms if arm.role == "broken" and arm not in candidates]
    alpha = look_alpha(policy.alpha)
    counts = {arm.name: _complete_seeds(study, arm) for arm in (*candidates, *broken)}
    found = {
        arm.name: _evidence(study, arm, policy, measure, counts[arm.name])
        for arm in (*candidates, *broken)
    }
    judge = partial(_judge, study, found, counts, alpha)
    planted = judge(broken, {}, [])
    assays = {arm.name: (assay or arm_assay)(study, arm, policy) for arm in candidates}
    judged = [_with_reserve(arm, policy) for arm in judge(candidates, assays, unseen(planted))]
    look = min((look_at(counts[arm.name]) for arm in candidates), default=0)
    return StudyVerdict(
        outcome=next(bad for bad in WORST_FIRST if any(arm.outcome == bad for arm in judged)),
        sentence="; ".join(f"{arm.arm} {arm.outcome}" for arm in judged),
        arms=(*judged, *planted),
        look=look,
        next_look=next_look(look),
        alpha=alpha,
        exploratory=tuple((changes or protocol_changes)(study, policy)),
    )


def _with_reserve(arm: ArmVerdict, policy: PolicyConfig) -> ArmVerdict:
    """Return a PASS that says what was seen in part, and which limits are wider than usual."""
    if arm.outcome != "PASS":
        return arm
    usual = PolicyConfig()
    pairs = [(words, getattr(policy, x), getattr(usual, x)) for x, words in _LIMITS.items()]
    wider = [f"{words} {value:g}, not {least:g}" for words, value, least in pairs if value > least]
    said = [arm.sentence]
    parts: list[Level] = [level for level, evidence in arm.levels.items() if evidence.in_part]
    if parts:
        said.append(f"{listed(parts)} {agreeing(parts, 'is')} seen in part")
    if wider:
        said.append(f"at wider limits than usual: {', '.join(wider)}")
    return replace(arm, sentence="; ".join(said))


def judged_candidates(study: RecordedStudy, policy: PolicyConfig) -> list[RecordedArm]:
    """Return the arms that `policy` names, else those with the role of a candidate.

    Never the reference, which older studies may name. ValueError if there is none, or a name is no
    arm's or the baseline's.
    """
    if not policy.candidates:
        found = [arm for arm in study.candidates if arm.role == "candidate"]
        if not found:
            raise ValueError(
                f"verdict: {study.name} must have an arm of role candidate, has none; record one "
                "(`--role candidate`), or name it in the study's policy.candidates; the ladder is "
                f"`stability show {study.folder}`"
            )
        return found
    found = []
    for name in policy.candidates:
        arm = study.arm(name)
        if arm is None or name == BASELINE:
            names = [arm.name for arm in study.candidates]
            raise ValueError(
                f"verdict: candidates must be arms of the study, got {name!r}; "
                f"nearest: {nearest(name, names)}"
            )
        found.append(arm)
    judged = [arm for arm in found if arm.role != "reference"]
    if not judged:
        raise ValueError(
            f"verdict: candidates must be in question, got the reference, {found[0].name}: that it "
            "is no worse than the baseline proves nothing about the baseline; "
            f"{PRECISION_QUESTION}"
        )
    return judged


def _judge(
    study: RecordedStudy,
    found: Mapping[str, Mapping[Level, LevelEvidence]],
    counts: Mapping[str, int],
    alpha: float,
    family: Sequence[RecordedArm],
    assays: Mapping[str, ArmAssay],
    unshown: Sequence[str],
) -> tuple[ArmVerdict, ...]:
    """Judge a family of arms, whose p-values are corrected together."""
    p_harmed = {
        (arm.name, level): evidence.p_harmed
        for arm in family
        for level, evidence in found[arm.name].items()
        if not math.isnan(evidence.p_harmed)
    }
    corrected = holm(p_harmed)
    verdicts = []
    for arm in family:
        # before the first look only facts count: p-values of 0
        share = alpha if look_at(counts[arm.name]) else 0.0
        after = next_look(counts[arm.name])
        levels: dict[Level, LevelEvidence] = {
            level: _at_look(study, arm, one, corrected.get((arm.name, level), 1.0), share, after)
            for level, one in found[arm.name].items()
        }
        assay = assays.get(arm.name) or _no_assay_needed()
        outcome, sentence = _outcome(study, arm, levels, assay, unshown, counts[arm.name])
        end = levels.get("outcome")
        if arm.role == "broken" and end is not None and end.state == "holds":
            sentence += "; its outcome holds, so it does not show that a worse loss is seen"
        verdicts.append(
            ArmVerdict(
                arm=arm.name,
                role=arm.role,
                outcome=outcome,
                levels=levels,
                assay=assay,
                sentence=sentence,
                seeds=look_at(counts[arm.name]) or counts[arm.name],
                confounded=arm.axis == "many",
                gains=gaining(study, arm, levels),
            )
        )
    return tuple(verdicts)


def _at_look(
    study: RecordedStudy,
    arm: RecordedArm,
    evidence: LevelEvidence,
    p_harmed: float,
    share: float,
    after: int | None,
) -> LevelEvidence:
    """Return `evidence` with the state that it has at the error rate of this look.

    `after` is the number of seeds of the look after it.
    """
    p = {"harmed": p_harmed, "holds": evidence.p_holds}.get(evidence.state, math.nan)
    # NaN: a level that holds by something else than a test
    if not p > share:
        return evidence
    more = more_seeds(after)
    if evidence.level in ("operator", "gradient"):
        more = f"more looks, {more_looks(study, arm, evidence.level)}"
    # of an interval that is beyond its limit already
    which = ", corrected for all arms and levels," if evidence.state == "harmed" else ""
    decides = (
        f"{more}: p{which} is {p:.2g} and has to be {share:.2g}"
        if share
        else f"at least {LOOKS[0]} seeds (--seeds {LOOKS[0]})"
    )
    return replace(evidence, state="undecided", decides=decides)


def _outcome(
    study: RecordedStudy,
    arm: RecordedArm,
    levels: Mapping[Level, LevelEvidence],
    assay: ArmAssay,
    unshown: Sequence[str],
    count: int,
) -> tuple[Outcome, str]:
    """Return the outcome of one arm and the reason, which ends a sentence."""
    if lost := where_lost(study, arm):
        return "FAIL", f"it is lost where the baseline is sound, {lost}"
    by_state: dict[str, list[Level]] = {
        state: [level for level, evidence in levels.items() if evidence.state == state]
        for state in ("holds", "harmed", "undecided", "not applicable", "not measured")
    }
    if by_state["harmed"]:
        return "FAIL", why_it_fails(arm.role, levels, unshown)
    if no_baseline := baseline_lost(study, look_at(count) or count):
        return "INCONCLUSIVE", f"the baseline is lost, {no_baseline}; nothing can be compared"
    blind = [assay.sentence] if assay.state in ("blind", "not measured") else []
    # all at once: what is mended may take a whole training anew
    others = [*blind, *unshown]
    beside = f"; besides, as it stands, {', and '.join(others)}" if others else ""
    silent, needed = by_state["not applicable"], _needed(study, arm)
    rest = f"; {listed(silent)} {agreeing(silent, 'does')} not apply" if silent else ""
    if not look_at(count):
        return "INCONCLUSIVE", (
            f"it has, with its controls, {count} of the {LOOKS[0]} seeds of the first look"
            f"{_trouble(needed)}{rest}"
        )
    lacking, undecided = by_state["not measured"], by_state["undecided"]
    said = [
        f"{listed(each)} {agreeing(each, 'is')} {state}"
        for state, each in (("not measured", lacking), ("undecided", undecided))
        if each
    ]
    if said:
        gain = gaining(study, arm, levels)
        then = "" if lacking else f"; {outlook(undecided, gain, next_look(count))}"
        return "INCONCLUSIVE", f"{', and '.join(said)}{then}{beside}{rest}"
    if len(silent) == len(levels):
        return "INCONCLUSIVE", "no level applies to what it changes"
    hold = f"{listed(by_state['holds'])} {agreeing(by_state['holds'], 'holds')}"
    if refused := _refused(needed):
        return "INCONCLUSIVE", f"{hold}, but not every pair does: {refused}"
    if others:
        return "NO ASSAY", f"{hold}, but {', and '.join(others)}"
    shown = would_have_shown(levels)
    seen = f"; its intervals exclude {shown}" if shown else ""
    return "PASS", f"{hold}{rest}; {assay.sentence}{seen}{unproven_clause(needed)}"


def _evidence(
    study: RecordedStudy,
    arm: RecordedArm,
    policy: PolicyConfig,
    levels: Mapping[Level, EvidenceOf],
    count: int,
) -> dict[Level, LevelEvidence]:
    """Return what each level says of `arm` on the seeds of its look."""
    if not count:
        return {
            level: silent_level(level, "not measured", "no seed has ended yet") for level in LEVELS
        }
    judged = _with_seeds(study, study.seeds[: look_at(count) or count])
    found = {}
    for level in LEVELS:
        try:
            found[level] = levels[level](judged, judged.arm(arm.name) or arm, policy)
        except ValueError as error:
            found[level] = silent_level(level, "not measured", str(error))
    return found


def _with_seeds(study: RecordedStudy, seeds: Sequence[int]) -> RecordedStudy:
    arms = tuple(
        replace(arm, runs={seed: arm.runs[seed] for seed in seeds if seed in arm.runs})
        for arm in study.arms
    )
    return replace(study, seeds=tuple(seeds), arms=arms)


def _complete_seeds(study: RecordedStudy, arm: RecordedArm) -> int:
    """Return how many of the first seeds have ended, in the controls and in `arm`."""
    needed = _needed(study, arm)
    for count, seed in enumerate(study.seeds):
        if not all(seed in one.runs and one.runs[seed].state in DONE for one in needed):
            return count
    return len(study.seeds)


def _needed(study: RecordedStudy, arm: RecordedArm) -> list[RecordedArm]:
    """Return the arms that a verdict on `arm` rests on: the controls, and itself."""
    controls = [one for one in study.arms if one.role in CONTROLS and one.name != arm.name]
    return [*controls, arm]


def _refused(arms: Iterable[RecordedArm]) -> str:
    """Return the first run that a reader refuses, in whichever seed, and why; mostly empty."""
    return next(
        (
            f"{arm.name}, seed {seed}: {run.error or run.breach}"
            for arm in arms
            for seed, run in arm.runs.items()
            if run.error or run.breach
        ),
        "",
    )


def _trouble(arms: Sequence[RecordedArm]) -> str:
    """Return the first run that failed, of the last of `arms`, then of those before it."""
    failed = [
        (arm, seed, run.message)
        for arm in (arms[-1], *arms[:-1])
        for seed, run in arm.runs.items()
        if run.state == "failed"
    ]
    if not failed:
        return ""
    arm, seed, message = failed[0]
    name = "" if arm == arms[-1] else f"{arm.name}, "
    return f"; {name}seed {seed} failed: {message}"


def _no_assay_needed() -> ArmAssay:
    return ArmAssay(state="not applicable", sentence="it is itself a planted fault")
