"""Does an arm's attention harm the gradient of the whole model? Judged by its isolated looks.

Two figures are judged, and both must hold: the ratio of errors, by its geometric mean over looks
and a t-interval of the logs, against `max_gradient_ratio`; and the share of the error's energy that
is the same at every look, by its jackknife error and Student's t, against `max_share`. The share is
judged from LOOKS_NEEDED looks on, and cannot matter where the whole error's energy is surely below
that share of the baseline's: to be more exact is never harm. A single look whose ratio is plainly
beyond (`looks.plain_looks`) keeps the level from holding. A candidate that fails to compute, or
whose gradient is not finite where the golden's is, is harmed for sure; one that the machine let
down, for want of memory, is not measured. What was measured as trained is in the sentence and
decides nothing: the rounding of all other layers covers most of it.

Looks belong to one seed, and the intervals are over looks: on other weights the figures may be
others. Leaves out measuring (`probe.gradient_evidence`) and what is made of the level (`verdict`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from stability.analysis.advice import advice, attention_is_not_its
from stability.analysis.evidence import LevelEvidence, LevelState, silent_level
from stability.analysis.looks import Samples, plain_looks
from stability.analysis.more_looks import more_looks
from stability.analysis.number_text import bounds, three_figures
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.study import PolicyConfig
from stability.records.events import is_in_part
from stability.records.metric_names import ALL_WEIGHTS, gradient_name, parse_gradient

__all__ = ["LOOKS_NEEDED", "gradient_evidence"]

LOOKS_NEEDED = 20
"""Below, a bias of 0.1 ULP is not told from none: the share's error is then 0.006 and more on a
GPT of 3 layers, and its law is skewed."""

EXACT_SHARE = 0.01
"""Of the level, what is spent on the second way to hold: to err so little that no share matters."""

_ATTENTION = "attention."
_OF_THE_MACHINE = re.compile(
    r"(OutOfMemoryError|MemoryError|OSError|TimeoutError|ConnectionError)\b"
    r"|out of memory|can't allocate memory|cannot allocate memory|ALLOC_FAILED",
    re.IGNORECASE,
)
"""What an exception says that is no fault of the attention which was being computed."""

_WILD_DECIDES = "what the attention does at that step: more looks can't excuse that one"
_NO_ROUNDING_DECIDES = "a baseline with rounding of its own"


def gradient_evidence(
    study: RecordedStudy, arm: RecordedArm, policy: PolicyConfig
) -> LevelEvidence:
    """Return what the gradient level says of `arm`, from the first of its runs that was looked at.

    A state of `holds` or `harmed`, and each bound, is at the share of `policy.alpha` that one look
    of a study has, one-sided, for this level of this arm alone; the p-values are there to be judged
    by stricter rules.
    """
    if not any(path.startswith(_ATTENTION) for path in arm.diff):
        return silent_level("gradient", "not applicable", attention_is_not_its(study, arm))
    if study.base.get("precision") == "64-true":
        return silent_level(
            "gradient", "not applicable", "at 64-true the golden is no finer than the run"
        )
    looked = [run for run in arm.runs.values() if run.series(gradient_name(ALL_WEIGHTS, "ratio"))]
    if not looked:
        decides = advice(study, "gradient")
        return silent_level(
            "gradient", "not measured", "no look at the model's gradient is on record", decides
        )
    run = min(looked, key=lambda one: list(study.seeds).index(one.seed))
    found = _judged(run, policy)
    if unmade := _unmade(run):
        mended = f"mend that first; {found.decides}" if found.decides else ""
        found = replace(found, sentence=f"{found.sentence} {unmade}", decides=mended)
    if in_part := _seen_in_part(run):
        # the share gives room: it is in the sentence
        marked = f"{found.cell.partition(' f ')[0]}, in part"
        found = replace(
            found,
            sentence=f"{found.sentence} {in_part}",
            cell=marked if len(marked) <= 16 else found.cell,
            in_part=in_part,
        )
    if found.state != "undecided" or found.decides in (_WILD_DECIDES, _NO_ROUNDING_DECIDES):
        return found
    return replace(found, decides=f"{found.decides}, {more_looks(study, arm, 'gradient')}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figure:
    """One judged figure: its estimate and bounds, and how surely it is beyond its limit."""

    value: float
    low: float
    high: float
    p_harmed: float
    p_holds: float


def _judged(run: RecordedRun, policy: PolicyConfig) -> LevelEvidence:
    ratios = run.series(gradient_name(ALL_WEIGHTS, "ratio"))
    failed = [step for step, value in sorted(ratios.items()) if math.isnan(value)]
    if failed:
        return _failed(run, failed, len(ratios), policy)
    return _of_looks(run, ratios, policy)


def _of_looks(run: RecordedRun, ratios: Mapping[int, float], policy: PolicyConfig) -> LevelEvidence:
    values = np.array([ratios[step] for step in sorted(ratios)])
    if not values.any():
        return _exact(len(values))
    if np.isinf(values).any():
        return _no_yardstick()
    alpha = look_alpha(policy.alpha)
    ratio = _of_logs(values, policy.max_gradient_ratio, alpha)
    share = _share(run, policy, values, alpha)
    looks = int(_last(run, "looks"))
    found = _evidence(run, policy, ratio, share, looks)
    return _without_wild_looks(found, ratios, policy)


def _without_wild_looks(
    found: LevelEvidence, ratios: Mapping[int, float], policy: PolicyConfig
) -> LevelEvidence:
    """Return `found`, or that it does not hold because of single looks plainly beyond the limit."""
    steps = [step for step in sorted(ratios) if ratios[step] > 0]
    logs = np.log([ratios[step] for step in steps])
    plain = plain_looks(Samples(values=logs, limit=math.log(policy.max_gradient_ratio)))
    if found.state == "harmed" or not plain.any():
        return found
    worst = steps[int(logs.argmax())]
    return replace(
        found,
        state="undecided",
        sentence=f"Plainly beyond in {int(plain.sum())} of {len(ratios)} looks: the gradient errs "
        f"{three_figures(ratios[worst])} times as far as the baseline's at step {worst}. "
        f"{found.sentence}",
        decides=_WILD_DECIDES,
        p_holds=1.0,
    )


def _failed(run: RecordedRun, failed: list[int], looks: int, policy: PolicyConfig) -> LevelEvidence:
    """Return the evidence of a candidate that gave no gradient at some looks."""
    texts = [event.text for event in run.events if event.layer == "gradient"]
    said = [
        text.removeprefix("candidate: ") for text in texts if text.startswith("candidate: ")
    ] or ["its gradient is not finite"]
    own = [text for text in said if not _OF_THE_MACHINE.search(text)]
    if not own:
        return _let_down(run, failed, looks, said[0].rstrip(": "), policy)
    reason = own[0]
    return LevelEvidence(
        level="gradient",
        state="harmed",
        sentence=f"The candidate gave no gradient at {len(failed)} of {looks} looks, first at step "
        f"{failed[0]}: {reason}.",
        cell="no gradient",
        p_harmed=0.0,
        p_holds=1.0,
        figures={"failed_looks": float(len(failed)), "looks": float(looks)},
    )


def _let_down(
    run: RecordedRun, failed: list[int], looks: int, reason: str, policy: PolicyConfig
) -> LevelEvidence:
    """Return that the level is not measured, unless the other looks show harm."""
    ratios = run.series(gradient_name(ALL_WEIGHTS, "ratio"))
    rest = {step: ratio for step, ratio in ratios.items() if not math.isnan(ratio)}
    found = _of_looks(run, rest, policy) if rest else None
    if found and found.state == "harmed":
        return found
    return LevelEvidence(
        level="gradient",
        state="not measured",
        sentence=f"No gradient was computed at {len(failed)} of {looks} looks, first at step "
        f"{failed[0]}: {reason}. That is no finding about the candidate.",
        cell="not all seen",
        decides="the same looks on a machine that can make them, or fewer "
        "`probe.gradient_sequences`",
        p_harmed=found.p_harmed if found else math.nan,
        p_holds=1.0,
        figures={"failed_looks": float(len(failed)), "looks": float(looks)},
    )


def _exact(looks: int) -> LevelEvidence:
    return LevelEvidence(
        level="gradient",
        state="holds",
        sentence=f"The candidate's gradient is the golden's to the bit at all {looks} looks.",
        cell="exact",
        p_harmed=1.0,
        p_holds=0.0,
        figures={"ratio": 0.0, "share": 0.0, "looks": float(looks)},
    )


def _no_yardstick() -> LevelEvidence:
    return LevelEvidence(
        level="gradient",
        state="undecided",
        sentence="The baseline's gradient is the golden's to the bit, so that any error is "
        "infinitely larger.",
        cell="baseline exact",
        decides=_NO_ROUNDING_DECIDES,
    )


def _of_logs(values: np.ndarray, limit: float, alpha: float) -> _Figure:
    """Return the geometric mean of ratios; one that is 0 counts as the least of the others."""
    logs = np.log(np.where(values > 0, values, values[values > 0].min()))
    error = logs.std(ddof=1) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    found = _by_t(float(logs.mean()), error, len(logs) - 1, math.log(limit), alpha)
    value, low, high = (math.exp(x) for x in (found.value, found.low, found.high))
    return replace(found, value=value, low=low, high=high)


def _by_t(value: float, error: float, freedom: int, limit: float, alpha: float) -> _Figure:
    """Return one-sided bounds at `alpha` each, and p-values of lying above and below `limit`."""
    if not (freedom > 0 and math.isfinite(error) and math.isfinite(value)):
        nothing = {"low": math.nan, "high": math.nan, "p_harmed": math.nan, "p_holds": math.nan}
        return _Figure(value=value, **nothing)
    if error == 0:
        return _Figure(
            value=value,
            low=value,
            high=value,
            p_harmed=0.0 if value > limit else 1.0,
            p_holds=0.0 if value <= limit else 1.0,
        )
    from scipy.stats import t  # heavy: 1.2 s of CPU

    width = float(t.ppf(1 - alpha, freedom)) * error
    distance = (value - limit) / error
    return _Figure(
        value=value,
        low=value - width,
        high=value + width,
        p_harmed=float(t.sf(distance, freedom)),
        p_holds=float(t.cdf(distance, freedom)),
    )


def _last(run: RecordedRun, metric: str) -> float:
    series = run.series(gradient_name(ALL_WEIGHTS, metric))
    return series[max(series)] if series else math.nan


def _share(run: RecordedRun, policy: PolicyConfig, ratios: np.ndarray, alpha: float) -> _Figure:
    looks = _last(run, "looks")
    freedom = int(looks) - 1 if looks >= LOOKS_NEEDED else 0
    found = _by_t(_last(run, "share"), _last(run, "share_se"), freedom, policy.max_share, alpha)
    if not freedom:
        return found
    # |e|^2 <= max_share |b|^2: if all of e were common, it would still be that little
    small = _of_logs(ratios, math.sqrt(policy.max_share), alpha)
    # two ways to hold would spend the level twice: each has its part of it. Harm has to be both
    return replace(
        found,
        p_harmed=max(found.p_harmed, small.p_harmed),
        p_holds=min(1.0, found.p_holds / (1 - EXACT_SHARE), small.p_holds / EXACT_SHARE),
    )


def _evidence(
    run: RecordedRun, policy: PolicyConfig, ratio: _Figure, share: _Figure, looks: int
) -> LevelEvidence:
    # harmed if either is: the smaller p-value, doubled for having had two chances (Bonferroni)
    known = [p for p in (ratio.p_harmed, share.p_harmed) if not math.isnan(p)]
    p_harmed = min(1.0, len(known) * min(known)) if known else math.nan
    # holds only if both do: the larger one, at no price (intersection-union)
    p_holds = max(ratio.p_holds, share.p_holds) if len(known) == 2 else math.nan
    state: LevelState = "undecided"
    alpha = look_alpha(policy.alpha)
    if p_harmed <= alpha:
        state = "harmed"
    elif p_holds <= alpha:
        state = "holds"
    return LevelEvidence(
        level="gradient",
        state=state,
        sentence=_sentence(run, policy, ratio, share, looks),
        cell=_cell(ratio.value, share.value),
        decides=_decides(ratio, share, looks, policy) if state == "undecided" else "",
        p_harmed=p_harmed,
        p_holds=p_holds,
        figures=_figures(run, ratio, share, looks),
    )


def _figures(run: RecordedRun, ratio: _Figure, share: _Figure, looks: int) -> Mapping[str, float]:
    found = {
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "share": share.value,
        "share_low": share.low,
        "share_high": share.high,
        "coherence": _last(run, "coherence"),
        "looks": float(looks),
        "ratio_as_trained": _as_trained(run),
        "share_as_trained": _last(run, "share_as_trained"),
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _unmade(run: RecordedRun) -> str:
    """Return in a sentence why looks could not be made, whatever the candidate; empty if all were.

    Golden and baseline are the model's own: what stops them is no fault of a candidate's.
    """
    found = (
        re.match(r"(?:golden|baseline): (?:\w+: )?(.+)", event.text)
        for event in run.events
        if event.layer == "gradient"
    )
    reasons = list(dict.fromkeys(each[1] for each in found if each))
    return f"Not every look could be made: {', and '.join(reasons)}." if reasons else ""


def _seen_in_part(run: RecordedRun) -> str:
    """Return in sentences what the looks leave out, as where the model returns no loss."""
    texts = [event.text for event in run.events if event.layer == "gradient"]
    parts = [text for text in dict.fromkeys(texts) if is_in_part(text)]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in parts)


def _as_trained(run: RecordedRun) -> float:
    return _mean_ratio(run.series(gradient_name(ALL_WEIGHTS, "ratio", as_trained=True)))


def _mean_ratio(by_step: Mapping[int, float]) -> float:
    """Return the geometric mean of the ratios that have one; NaN if none has."""
    values = by_step.values()
    logs = [math.log(value) for value in values if value > 0 and math.isfinite(value)]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _sentence(
    run: RecordedRun, policy: PolicyConfig, ratio: _Figure, share: _Figure, looks: int
) -> str:
    said = (
        f"The error of the whole model's gradient is {three_figures(ratio.value)}"
        f"{bounds(ratio.low, ratio.high, three_figures)} times the baseline's (limit "
        f"{policy.max_gradient_ratio:g}){_worst_group(run)}"
    )
    if looks >= LOOKS_NEEDED:
        said += (
            f", and a share of {share.value:z.3f}"
            f"{bounds(share.low, share.high, '{:z.3f}'.format)} of it is the same at all {looks} "
            f"looks (limit {policy.max_share:g})."
        )
    else:
        said += f"; {looks} looks are too few to tell whether it adds up."
    as_trained = _as_trained(run)
    if not math.isnan(as_trained):
        said += (
            " As trained, with the rounding of all other layers, the error is "
            f"{three_figures(as_trained)} times the baseline's, which decides nothing."
        )
    return said


def _worst_group(run: RecordedRun) -> str:
    """Return the parameters with the largest ratio of errors; empty if none are on record."""
    named = [parts for name in run.metrics if (parts := parse_gradient(name))]
    groups = [parts.group for parts in named if parts.metric == "ratio"]
    ratios = {
        group: ratio
        for group in groups
        if group != ALL_WEIGHTS
        and not math.isnan(ratio := _mean_ratio(run.series(gradient_name(group, "ratio"))))
    }
    if not ratios:
        return ""
    worst = max(ratios, key=lambda group: ratios[group])
    # of `metrics.parameter_groups` this one's name alone says nothing; its labels would need torch
    meaning = " (those in no named group)" if worst == "other" else ""
    times = three_figures(ratios[worst])
    return f", {times} times in the worst group of parameters, {worst}{meaning}"


def _decides(ratio: _Figure, share: _Figure, looks: int, policy: PolicyConfig) -> str:
    if looks < LOOKS_NEEDED:
        return f"{LOOKS_NEEDED - looks} more looks"
    # bounds shrink at least with the root of the number of looks
    undecided = [
        (abs(one.value - limit), (one.high - one.low) / 2)
        for one, limit in (
            (share, policy.max_share),
            (_logs(ratio), math.log(policy.max_gradient_ratio)),
        )
        if one.low <= limit < one.high
    ]
    needed = max((width / distance for distance, width in undecided if distance > 0), default=1.0)
    more = math.ceil(looks * (needed**2 - 1))
    return f"about {more} more looks" if 0 < more <= 10 * looks else "more looks"


def _logs(figure: _Figure) -> _Figure:
    value, low, high = (math.log(x) for x in (figure.value, figure.low, figure.high))
    return replace(figure, value=value, low=low, high=high)


def _cell(ratio: float, share: float) -> str:
    shown = f"{ratio:.2f}x" if ratio < 10 else f"{min(ratio, 99999):.0f}x"
    return shown if math.isnan(share) else f"{shown} f {share:z.3f}"
