"""Training evidence: does a candidate carry training further from the truth than its baseline does?

Judged is the excess E of the weights (`excess`) at one early step (`window`), with an interval over
seeds, against the largest that the policy allows; values that noise alone moves are left out
(`left_out`). Beside it stand, as description, E of the
predictions on a fixed held-out batch and two energy tests, whether weights and predictions can be
told from a nudge's.

What it can't see: a small gain on the scores' side, 2 % on the scale or 1 % on dq, has E 1.02 as
right kernels have, and only the operator's own evidence shows it. A harm after the judged
step is the outcome's matter. Leaves out how levels are combined (`verdict`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stability.analysis.advice import advice
from stability.analysis.energy_test import TOLD, EnergyTest, energy_test
from stability.analysis.evidence import LevelEvidence, LevelState, silent_level
from stability.analysis.excess import Excess, excess_at, excess_over_seeds, seeds_that_decide
from stability.analysis.left_out import (
    excess_of_left_out,
    judges_all,
    limit_of_left_out,
    sentence_of_left_out,
    why_unasked,
)
from stability.analysis.number_text import bounds, three_figures
from stability.analysis.sequential import LOOKS, look_alpha, look_at
from stability.analysis.study_distances import (
    controls_of,
    judged_window,
    reference_of,
    study_distances,
    why_itself,
    why_no_step,
)
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.analysis.unseen_harm import what_may_show
from stability.analysis.window import Window
from stability.config.axes import CHANGES_WEIGHTS, axes_of, touches
from stability.config.commands import is_command
from stability.config.roles import REFERENCE_AXES
from stability.config.schema import BASELINE
from stability.config.study import PolicyConfig
from stability.records.distances import DistanceMatrix, SeedDistances

__all__ = ["missing_controls", "training_evidence", "why_inapplicable"]

_OTHER_START = ("seed.init_offset", "model.init")
"""Changes after which a run starts from other weights than its baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """What is asked of one arm: where it is judged, by which seeds, against what."""

    study: RecordedStudy
    arm: RecordedArm
    policy: PolicyConfig
    reference: str
    window: Window
    distances: Mapping[int, SeedDistances]
    """All that is on record, by seed."""
    weights: Mapping[int, DistanceMatrix]
    """The distances at the judged step, by seed."""
    predictions: Mapping[int, DistanceMatrix]
    """The same in function space; seeds without predictions are left out."""
    seeds: Sequence[int]
    of_all: bool
    """Whether nothing is left out, since it is not known of all seeds, or is in few of them."""
    is_look: bool
    """Whether there are seeds enough for the first look."""


def training_evidence(
    study: RecordedStudy, arm: RecordedArm, policy: PolicyConfig
) -> LevelEvidence:
    """Return what the weights of `arm` at the judged step say of it; it never raises."""
    reason = why_inapplicable(study, arm)
    if reason:
        return _silent("not applicable", reason)
    reference = reference_of(study)
    missing = missing_controls(study)
    missing = missing or why_itself(study, arm)
    if reference is None or missing:
        return _silent("not measured", *missing)
    look = look_at(len(study.seeds))
    seeds = study.seeds[: look or None]
    try:
        window = judged_window(study, policy, seeds)
        distances = study_distances(study, seeds)
    except ValueError as error:
        return _silent("not measured", str(error), advice(study, "distances"))
    if not window.step:
        why = why_no_step(study, window, distances, reference.name)
        return replace(_silent("not measured", *why), cell="no step to judge")
    weights = {s: x.weights[window.step] for s, x in distances.items() if window.step in x.weights}
    return _judge(
        _Question(
            study=study,
            arm=arm,
            policy=policy,
            reference=reference.name,
            window=window,
            distances=distances,
            weights=weights,
            predictions={
                s: x.predictions[window.step]
                for s, x in distances.items()
                if window.step in x.predictions
            },
            seeds=seeds,
            of_all=judges_all(study.folder, weights, seeds),
            is_look=look > 0,
        )
    )


def why_inapplicable(study: RecordedStudy, arm: RecordedArm) -> str:
    """Return why the excess of `arm` means nothing, whatever was measured; empty if it does."""
    if study.base.get("precision") == "64-true":
        return "the baseline is 64-true already, and no precision is higher to measure it from"
    if arm.role in ("baseline", "reference"):
        return f"it is the {arm.role} itself"
    changed = [path for path in arm.diff if path in _OTHER_START]
    if changed:
        return f"it starts from other weights ({', '.join(changed)}), so that all of it is distance"
    return ""


def missing_controls(study: RecordedStudy) -> tuple[str, str] | tuple[()]:
    """Return what the study lacks to measure an excess and what to add; empty if nothing."""
    if reference_of(study) is None:
        what = "the baseline" if is_command(study.base) else "plain attention"
        return (
            f"there is no reference, {what} one precision higher, to measure errors from",
            advice(study, "reference"),
        )
    references = [arm for arm in study.arms if arm.role == "reference"]
    if len(references) > 1:
        named = " and ".join(arm.name for arm in references)
        return f"{named} are both references, and which was meant is not on record", (
            "give one arm of the study that role"
        )
    if moved := {*_OTHER_START, "changes.init"} & references[0].diff.keys():
        return f"{references[0].name} starts from other weights ({', '.join(moved)})", (
            "let the reference start as the baseline does"
        )
    if not any(arm.role == "nudge" for arm in study.arms):
        return (
            "there is no nudge to show what chaos alone does",
            advice(study, "nudge"),
        )
    return ()


def _judge(question: _Question) -> LevelEvidence:
    arm, step = question.arm, question.window.step
    lost = [seed for seed in question.seeds if _is_lost(question, seed)]
    if lost:
        return LevelEvidence(
            level="training",
            state="harmed",
            sentence=(
                f"At step {step} the weights of {arm.name} are not finite in {len(lost)} of "
                f"{len(question.seeds)} seeds, first in seed {lost[0]}, where the baseline's are "
                "(limit 0 seeds)."
            ),
            cell="no number",
            p_harmed=0.0,
            p_holds=1.0,
            figures={"step": step, "seeds": len(question.seeds), "lost": len(lost)},
        )
    unasked = why_unasked(question.study.folder, question.window.step, question.weights)
    if unasked:
        return _silent("not measured", *unasked)
    found: dict[int, float] = {}
    for seed in question.seeds:
        matrix = question.weights.get(seed)
        value = (
            excess_at(matrix, arm.name, question.reference, of_all=question.of_all)
            if matrix
            else None
        )
        if value is None or math.isnan(value):
            return _silent("not measured", *_why_no_excess(question, seed))
        found[seed] = value
    return _evidence(question, found)


def _is_lost(question: _Question, seed: int) -> bool:
    """Whether the arm's weights are no numbers at the judged step, or were not before it."""
    matrix, arm = question.weights.get(seed), question.arm
    if matrix is None or not math.isfinite(matrix.between(BASELINE, question.reference) or 0.0):
        return False  # nothing to be compared with: that is no fault of the arm's
    if arm.name in matrix.norms:
        return not math.isfinite(matrix.norms[arm.name])
    run = arm.runs[seed]
    stopped = run.manifest.step if run.manifest else question.window.step
    return run.state == "diverged" and stopped < question.window.step


def _why_no_excess(question: _Question, seed: int) -> tuple[str, str]:
    """Return why a seed has no excess at the judged step, and what to do."""
    study, arm, step = question.study, question.arm, question.window.step
    matrix = question.weights.get(seed)
    for name in (BASELINE, question.reference, arm.name):
        if matrix is None or name not in matrix.parents:
            recorded = study.arm(name)
            if recorded is not None and recorded.until < step:
                return f"{name} ends at step {recorded.until}, before step {step}", "move its until"
            run = recorded.runs[seed] if recorded else None
            is_other = recorded is not None and touches(recorded.diff, CHANGES_WEIGHTS)
            if run and run.state == "finished" and is_other:
                return f"{name} lacks weights that the {BASELINE} has", (
                    "make the model with fewer weights the base"
                )
            said = f": {run.message}" if run and run.message else ""
            return (
                f"{name} has no weights on record at step {step} with seed {seed} "
                f"({run.state if run else 'missing'}{said})",
                "let the study run to its end",
            )
        if not math.isfinite(matrix.norms[name]):
            return f"the weights of {name} are no numbers at step {step} with seed {seed}", (
                "name an earlier step"
            )
    if matrix is not None and matrix.kept_between(arm.name, question.reference) is None:
        return (
            f"{arm.name} is known by its sketch alone at step {step} with seed {seed}, one without "
            "the vectors of which values are left out",
            "a study of another name",
        )
    return (
        f"at step {step} the {BASELINE} is the reference to the bit with seed {seed}, so there is "
        "no error of its own to compare with",
        "check that the reference is of a higher precision",
    )


def _evidence(question: _Question, per_seed: Mapping[int, float]) -> LevelEvidence:
    policy, arm = question.policy, question.arm
    alpha = look_alpha(policy.alpha)
    if not any(per_seed.values()):
        exact = "its weights are the reference's to the bit"
        found = Excess(per_seed=per_seed, mean=0, low=0, high=0, p_harmed=1.0, p_holds=0.0)
    else:
        exact = ""
        # a seed that is the reference to the bit has no log: it counts as the next best one
        least = min(value for value in per_seed.values() if value)
        positive = {seed: value or least for seed, value in per_seed.items()}
        found = excess_over_seeds(positive, policy.max_excess, alpha)
        if _is_baseline(question):
            exact = "its weights are the baseline's to the bit"
            found = replace(found, low=1.0, high=1.0, p_harmed=1.0, p_holds=0.0)
    apart = None
    if not question.of_all:
        limit = limit_of_left_out(policy)
        apart = excess_of_left_out(question.weights, arm.name, question.reference, limit, alpha)
    state, decides = _state(question, found, apart, alpha, bool(exact))
    tests = {
        "weights": energy_test(question.weights, arm.name, controls_of(question.study)),
        "predictions": energy_test(question.predictions, arm.name, controls_of(question.study)),
    }
    # harmed if either is, and so twice as easily by chance; to hold both have to
    harmed, holds = found.p_harmed, found.p_holds
    if apart is not None and not _is_baseline(question) and question.is_look:
        harmed, holds = min(1.0, 2 * min(harmed, apart.p_harmed)), max(holds, apart.p_holds)
    return LevelEvidence(
        level="training",
        state=state,
        sentence=_sentence(question, found, apart, exact, tests),
        cell=f"E {found.mean:.2f}" if found.mean < 1e6 else f"E {found.mean:.0e}",
        decides=decides,
        seeds_decide=not decides or decides != _where_hidden(question),
        p_harmed=harmed,
        p_holds=holds,
        figures=_figures(question, found, apart, tests),
    )


def _is_baseline(question: _Question) -> bool:
    matrices = [question.weights[seed] for seed in question.seeds]
    return all(matrix.between(question.arm.name, BASELINE) == 0 for matrix in matrices)


def _state(
    question: _Question, found: Excess, apart: Excess | None, alpha: float, exact: bool
) -> tuple[LevelState, str]:
    """Return the state, and what would decide it; `apart` is what is left out."""
    limit, apart_limit = question.policy.max_excess, limit_of_left_out(question.policy)
    hidden = _where_hidden(question)
    if _is_baseline(question) or (exact and apart is None):
        return "holds", ""
    if not question.is_look:
        return "undecided", f"at least {LOOKS[0]} seeds (--seeds {LOOKS[0]})"
    if found.low > limit or (apart is not None and apart.low > apart_limit):
        return "harmed", ""
    if found.high < limit:
        if hidden:
            return "undecided", hidden
        if apart is not None and not apart.high < apart_limit:
            return "undecided", f"of what is left out {_seeds_for(apart, apart_limit, alpha)}"
        return "holds", ""
    if question.arm.role == "broken" and found.mean <= limit:
        return "undecided", what_may_show(
            question.arm.name,
            question.reference,
            limit,
            question.window,
            question.policy.window_limit,
            question.distances,
        )
    then = f", which may show harm alone; to hold, {hidden}" if hidden else ""
    return "undecided", f"{_seeds_for(found, limit, alpha)}{then}"


def _where_hidden(question: _Question) -> str:
    """Return what to do where chaos has made all arms alike, so that none can pass; else empty."""
    step, limit = question.window.step, question.policy.window_limit
    noise = question.window.largest_at(step)
    if noise <= limit:
        return ""
    which = "an earlier"
    said = f"a control has |log E| {noise:.3g}, above {limit:g}, which more seeds do not lower"
    if math.isnan(noise):
        which, said = "another", "no control tells how far chaos has come"
    return (
        f"{which} step (policy: {{step: N}}, in a study of another name), since at step {step} "
        f"{said}"
    )


def _seeds_for(found: Excess, limit: float, alpha: float) -> str:
    needed = seeds_that_decide(found.per_seed, limit, alpha)
    look = next((look for look in LOOKS if needed is not None and look >= needed), None)
    if look is None:
        return f"more than {LOOKS[-1]} seeds, at this scatter"
    return f"{look} seeds, at this scatter (--seeds {look})"


def _sentence(
    question: _Question,
    found: Excess,
    apart: Excess | None,
    exact: str,
    tests: Mapping[str, EnergyTest],
) -> str:
    window, policy = question.window, question.policy
    count = len(question.seeds)
    worst = max(found.per_seed, key=lambda seed: found.per_seed[seed])
    bracket = bounds(found.low, found.high, three_figures)
    said = (
        f"At step {window.step} ({window.reason}) the weights of {question.arm.name} are "
        f"{three_figures(found.mean)}{bracket} times as far from {question.reference}'s as "
        f"the baseline's are (limit {policy.max_excess:.3g}), over {count} seed"
        f"{'s' if count > 1 else ''}"
    )
    if exact:
        said += f": {exact}"
    elif count > 1:
        said += f", {three_figures(found.per_seed[worst])} times in the worst, seed {worst}"
    said += "."
    if warm_up := _warm_up(question):
        said += f" Step {window.step} lies in the warm-up of {warm_up} updates."
    spread = window.largest_at(window.step)
    if not math.isnan(spread):
        said += (
            f" Nudges stay within {math.expm1(spread):.1%} of 1 there (limit "
            f"{math.expm1(policy.window_limit):.1%})."
        )
    if not question.of_all:
        said += sentence_of_left_out(question.weights, apart, limit_of_left_out(policy))
    said += _of_reruns(question) + _of_repetitions(question)
    in_predictions = _excess_of_predictions(question)
    if not math.isnan(in_predictions):
        said += f" Its predictions are {three_figures(in_predictions)} times as far."
    for what, test in tests.items():
        if what == "weights" or question.predictions:
            no_harm = ", which is no harm by itself" if test.p <= TOLD else ""
            said += f" By its {what} it {test.sentence}{no_harm}."
    return said + _of_declared(question)


def _warm_up(question: _Question) -> int:
    """Return how many updates the warm-up has that the judged step lies in; 0 outside of one.

    That of a command is not known.
    """
    updates = question.study.base.get("optimizer", {}).get("warmup_steps", 0)
    return int(updates) if question.window.step < updates else 0


def _of_declared(question: _Question) -> str:
    """Return a sentence where nothing but its name says that the reference is more exact."""
    arm = question.study.arm(question.reference)
    if arm is None or all(axis in REFERENCE_AXES for axis in axes_of(arm.diff)):
        return ""
    changed = ", ".join(arm.diff)
    return f" {arm.name} changes {changed}: that this is more exact is declared, not checked."


def _of_reruns(question: _Question) -> str:
    """Return a sentence where a rerun has moved, and whether the arm has moved any further."""
    names = [arm.name for arm in question.study.arms if arm.role == "rerun"]
    drifts, furthest = [], []
    for matrix in question.weights.values():
        moved = [matrix.between(name, BASELINE) or 0.0 for name in names]
        drifts += moved
        own = matrix.between(question.arm.name, BASELINE) or 0.0
        furthest.append(own > max(moved, default=0.0))
    if not any(drifts):
        return ""
    said = f" The training is not deterministic: {names[0]}, which changes nothing, drifts too"
    return f"{said}." if any(furthest) else f"{said}, and as far as {question.arm.name} does."


def _repetitions(question: _Question) -> list[str]:
    """Return the other arms of the very same change: what they are apart is this one's A/A."""
    arm = question.arm
    return [x.name for x in question.study.arms if x.diff == arm.diff and x.name != arm.name]


def _own_distances(question: _Question) -> list[float]:
    """Return the distances, relative to the weights, of the arm to its repetitions in all seeds."""
    arm, found = question.arm.name, []
    for matrix in question.weights.values():
        apart = [matrix.between(arm, name) for name in _repetitions(question)]
        found += [x / matrix.norms[arm] for x in apart if x is not None]
    return found


def _of_repetitions(question: _Question) -> str:
    """Return a sentence on what the arm differs by from itself, where it was trained twice."""
    found = _own_distances(question)
    if not found:
        return ""
    names, most = " and ".join(_repetitions(question)), max(found)
    if most == 0:
        return f" Its own A/A, with {names}, is exactly 0."
    to_baseline = [
        (matrix.between(question.arm.name, BASELINE) or 0.0) / matrix.norms[question.arm.name]
        for matrix in question.weights.values()
    ]
    further = "nearer" if most >= min(to_baseline) else "further"
    return (
        f" Its own A/A, with {names}, is not zero but up to {most:.1e} of the weights: that is its "
        f"floor, and the baseline is {further} than that."
    )


def _excess_of_predictions(question: _Question) -> float:
    """Return the geometric mean over seeds of E in function space; NaN without predictions."""
    values = [
        excess_at(matrix, question.arm.name, question.reference)
        for matrix in question.predictions.values()
    ]
    logs = [math.log(value) for value in values if value and math.isfinite(value)]
    if not logs or len(logs) < len(question.seeds):
        return math.nan
    return math.exp(math.fsum(logs) / len(logs))


def _figures(
    question: _Question, found: Excess, apart: Excess | None, tests: Mapping[str, EnergyTest]
) -> dict[str, float]:
    return {
        "excess": found.mean,
        "excess_low": found.low,
        "excess_high": found.high,
        "limit": question.policy.max_excess,
        "step": question.window.step,
        **({"warm_up": warm_up} if (warm_up := _warm_up(question)) else {}),
        "seeds": len(question.seeds),
        "control_log_excess": question.window.largest_at(question.window.step),
        "excess_predictions": _excess_of_predictions(question),
        **({"excess_left_out": apart.mean, "excess_left_out_high": apart.high} if apart else {}),
        **({"own_distance": max(own)} if (own := _own_distances(question)) else {}),
        **{f"energy_p_{what}": test.p for what, test in tests.items()},
        **{f"energy_smallest_p_{what}": test.smallest_p for what, test in tests.items()},
        **{f"excess_seed_{seed}": value for seed, value in found.per_seed.items()},
    }


def _silent(state: LevelState, reason: str = "", decides: str = "") -> LevelEvidence:
    return silent_level("training", state, reason, decides, cell=state if len(state) <= 16 else "")
