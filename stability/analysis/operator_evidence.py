"""Operator evidence: is the attention of an arm computed right, on the inputs of its own runs?

The probe has compared each call with plain attention and with an FP64 golden. Judged are, of every
result, the error ratio, the gain and the signed error against the golden (`looks`); distance to the
baseline is description. The level is harmed if one of them is surely beyond its limit anywhere: in
the whole model, a layer or a head (Bonferroni, a third of the level for each of these). It holds if
they are surely within: the error ratio and the gain in every layer, and in every head where heads
are on record, and the signed error in the mean of the whole model, since a head's scatters by 0.1
ULP from look to look and would take hundreds of looks. As an intersection of tests that needs no
correction. A single look that is plainly beyond (`looks.plain_looks`) keeps it from holding, and so
does a result or layer that no look has seen (`operator_coverage`). A candidate that returns values
that are not finite where the golden's are is harmed whatever else it does.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stability.analysis.advice import advice, attention_is_not_its
from stability.analysis.evidence import LevelEvidence, silent_level
from stability.analysis.looks import OperatorLimits
from stability.analysis.more_looks import more_looks
from stability.analysis.number_text import bounds, three_figures
from stability.analysis.operator_coverage import unseen
from stability.analysis.operator_places import (
    KINDS,
    OperatorPlace,
    decides_holding,
    families_of,
    tables_of,
)
from stability.analysis.place_table import JUDGED, Judged, PlaceTable
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.axes import touches
from stability.config.study import PolicyConfig
from stability.records.metric_columns import Series

__all__ = ["changes_attention", "judge_operator", "operator_evidence"]

MOST_LOOKS = 10_000
"""No more looks are ever asked for."""


def operator_evidence(
    study: RecordedStudy, arm: RecordedArm, policy: PolicyConfig
) -> LevelEvidence:
    """Return what the probes of the arm's runs say of its attention."""
    if not changes_attention(arm):
        return silent_level(
            "operator",
            "not applicable",
            f"{attention_is_not_its(study, arm)}, and no other operator is measured yet",
            cell="-",
        )
    tables = tables_of(arm)
    bad = sum(_nonfinite(run.metrics) for run in arm.runs.values())
    found = judge_operator(tables, policy, nonfinite=bad)
    if found.state == "not measured":
        found = replace(found, decides=advice(study, "operator"))
    elif found.decides == _WILD_DECIDES:
        found = replace(found, decides=f"{_WILD_DECIDES}; {advice(study, 'wild_look')}")
    elif found.decides:
        more = more_looks(study, arm, "operator")
        found = replace(found, decides=f"{found.decides}, {more}{_under_autocast(study, arm)}")
    missing = unseen(study, arm, tables)
    if not missing or found.state == "harmed":
        return found
    if found.state == "not measured":
        return replace(found, sentence=f"{found.sentence} {missing}")
    return replace(
        found,
        state="not measured",
        sentence=f"{missing} Of the rest: {found.sentence}",
        cell="not all seen",
        decides=advice(study, "all_looks"),
        p_holds=1.0,
    )


def _under_autocast(study: RecordedStudy, arm: RecordedArm) -> str:
    """Return where to look first for a user's own attention under autocast, which may change it."""
    name = str(arm.diff.get("attention.implementation", ("", ""))[-1])
    is_own = ":" in name and name.partition(":")[0] not in ("flash", "sdpa", "emulated")
    if not is_own or not str(study.base.get("precision", "")).endswith("-mixed"):
        return ""
    return f"; but first see whether `stability check {name}` says that autocast changes its bits"


def changes_attention(arm: RecordedArm) -> bool:
    """Whether the arm changes the attention, alone or with other things."""
    return touches(arm.diff, ("attention",))


def _nonfinite(metrics: Mapping[str, Series]) -> float:
    """Return how many values were not finite where the golden's were, over looks and results."""
    counts = [series for name, series in metrics.items() if name.endswith("/golden_nonfinite")]
    return sum(value for series in counts for value in series.values if math.isfinite(value))


def judge_operator(
    tables: Sequence[PlaceTable], policy: PolicyConfig, *, nonfinite: float = 0.0
) -> LevelEvidence:
    """Return the evidence in tables of looks; `nonfinite` counts values that are NaN or infinite
    where the golden's are not.
    """
    limits = OperatorLimits.of(policy)
    families = families_of(tables, limits)
    places = [place for family in families for place in family]
    deciding = [place for place in places if decides_holding(place, bool(families[0]))]
    looks = max((int(np.isfinite(one.samples.values).sum()) for one in places), default=0)
    if nonfinite:
        return LevelEvidence(
            level="operator",
            state="harmed",
            sentence=f"{nonfinite:g} values are not finite where FP64's are, over {looks} looks "
            "(limit 0).",
            cell="not finite",
            p_harmed=0.0,
            p_holds=1.0,
            figures={"nonfinite": nonfinite, "looks": looks},
        )
    if not places:
        return silent_level(
            "operator",
            "not measured",
            "no look of a probe with a golden is on record",
            cell="no look",
        )
    least = [3 * len(family) * min(one.p_harmed for one in family) for family in families if family]
    wild = [one for one in deciding if one.plain]
    harmed = min(1.0, *least)
    holds = 1.0 if wild else max(one.p_holds for one in deciding)
    # one look of the study has a share of the policy's error rate
    alpha = look_alpha(policy.alpha)
    state = "harmed" if harmed <= alpha else "holds" if holds <= alpha else "undecided"
    shown = places if state == "harmed" else deciding
    worst: dict[Judged, OperatorPlace | None] = {kind: _worst(shown, kind) for kind in KINDS}
    if state == "harmed":
        sentence = _harm_sentence(families, looks, alpha) + _by_design(families, alpha)
    else:
        sentence = _wild_sentence(wild) + _worst_sentence(deciding, worst, looks, alpha)
        if state == "undecided":
            sentence += _not_together(deciding, harmed, alpha)
    return LevelEvidence(
        level="operator",
        state=state,
        sentence=sentence,
        cell=_cell(worst),
        decides=_decides(families, deciding, looks, alpha) if state == "undecided" else "",
        p_harmed=harmed,
        p_holds=holds,
        figures=_figures(deciding, worst, looks, alpha),
    )


def _worst(places: Sequence[OperatorPlace], kind: Judged) -> OperatorPlace | None:
    return max((one for one in places if one.kind == kind), key=lambda x: abs(x.mean), default=None)


def _harm_sentence(families: Sequence[Sequence[OperatorPlace]], looks: int, alpha: float) -> str:
    """Return where harm is surest, how much it is, and the limit."""
    # of the families' smallest p, each times its size, the least
    family = min((f for f in families if f), key=lambda f: len(f) * min(x.p_harmed for x in f))
    one = min(family, key=lambda x: (x.p_harmed, -abs(x.mean) / x.limit))
    value, limit = _written(one, alpha), _limit(one)
    said = {
        "error": f"has {value} times the error of plain attention ({limit})",
        "gain": f"is {value} times what it should be ({limit})",
        "bias": f"errs by {value} ULP on average ({limit})",
    }[one.kind]
    return f"In {one.where}, {one.what} {said}, over {looks} looks."


def _by_design(families: Sequence[Sequence[OperatorPlace]], alpha: float) -> str:
    """Return what is known to err so by its design, where that alone is the harm; else empty."""
    sure = [one for family in families for one in family if 3 * len(family) * one.p_harmed <= alpha]
    if any(x.kind != "error" or x.what not in ("dq", "dk") or x.mean > 4 for x in sure):
        return ""
    if all(one.what != "dq" for one in sure) or any(one.limit >= 4 for one in sure):
        return ""
    return (
        " A kernel that takes delta from the rounded output, as FlashAttention-2 does, errs some 3 "
        "times as far in dq by design: `policy: {max_error_ratio: 4.0}`, in a study of another "
        "name, may allow it."
    )


def _not_together(deciding: Sequence[OperatorPlace], harmed: float, alpha: float) -> str:
    """Return why a figure whose interval is beyond its limit is no harm yet; empty if none is."""
    # an interval alone says nothing where the baseline errs the same
    if not any(one.is_beyond(alpha) and one.p_harmed <= alpha for one in deciding):
        return ""
    return (
        f" An interval beyond its limit is no FAIL yet: each is of one figure, and of all figures "
        f"together such a one may be chance (p {harmed:.2g}, a FAIL needs {alpha:.2g})."
    )


_WILD_DECIDES = "what the attention does there, which more looks can't excuse"


def _wild_sentence(wild: Sequence[OperatorPlace]) -> str:
    """Return where a single look is plainly beyond its limit, the worst first; empty if none is."""
    if not wild:
        return ""
    one = max(wild, key=lambda x: math.log(x.wildest) if x.kind == "error" else abs(x.wildest))
    said = (
        f"errs {three_figures(one.wildest)} times as far as plain attention"
        if one.kind == "error"
        else f"is {1 + one.wildest:.4f} times what it should be"
    )
    count = int(np.isfinite(one.samples.values).sum())
    also = f", as {len(wild) - 1} other figures are in some look" if len(wild) > 1 else ""
    return (
        f"Plainly beyond in {one.plain} of {count} looks: {one.what} in {one.where} {said} at step "
        f"{one.wildest_at}{also}. "
    )


def _worst_sentence(
    deciding: Sequence[OperatorPlace],
    worst: Mapping[Judged, OperatorPlace | None],
    looks: int,
    alpha: float,
) -> str:
    """Return the largest figure of each kind with its place, and how many are within limits."""
    verbs = {
        "error": "has {} times the error of plain attention",
        "gain": "is {} times what it should be",
        "bias": "errs by {} ULP on average",
    }
    found = [
        f"{one.what} in {one.where} {verbs[one.kind].format(_written(one, alpha))} ({_limit(one)})"
        for one in worst.values()
        if one
    ]
    unsure = [one for one in deciding if one.p_holds > alpha]
    sure = f"all {len(deciding)} figures are surely within their limits"
    sure += ", if averaged" if any(one.plain for one in deciding) else ""
    if unsure:
        last = max(unsure, key=lambda one: one.p_holds)
        metric = JUDGED[last.kind].replace("_", " ").replace("golden bias ulp", "signed bias")
        sure = (
            f"{len(unsure)} of {len(deciding)} figures are not surely within their limits, least "
            f"of all the {metric} of {last.what} in {last.where}"
        )
    return f"At worst, {'; '.join(found)}. Over {looks} looks {sure}."


def _written(one: OperatorPlace, alpha: float) -> str:
    """Return a figure with its interval; of a gain the factor, with as many decimals as count."""
    low, high = one.interval(alpha)
    if one.kind == "error":
        return f"{three_figures(one.mean)}{bounds(low, high, three_figures)}"
    if one.kind == "bias":
        return f"{one.mean:+.2g}{bounds(low, high, '{:+.2g}'.format)}"
    width = high - low
    places = min(6, max(4, 1 - math.floor(math.log10(width)))) if width > 0 else 4
    write = f"{{:.{places}f}}".format
    return f"{write(1 + one.mean)}{bounds(1 + low, 1 + high, write)}"


def _limit(one: OperatorPlace) -> str:
    return f"limit {one.limit:.2%} from 1" if one.kind == "gain" else f"limit {one.limit:g}"


def _cell(worst: dict[Judged, OperatorPlace | None]) -> str:
    error, gain = worst["error"], worst["gain"]
    parts = [f"{error.mean:.2g}x" if error else "", _percent(gain.mean) if gain else ""]
    text = " ".join(part for part in parts if part)
    return text if len(text) <= 16 else parts[0]


def _percent(gain: float) -> str:
    # two decimals would make a zero of a small one, and keep its sign
    return f"{gain:+.2%}" if abs(gain) >= 1e-4 or not gain else f"{100 * gain:+.1g}%"


def _decides(
    families: Sequence[Sequence[OperatorPlace]],
    deciding: Sequence[OperatorPlace],
    looks: int,
    alpha: float,
) -> str:
    """Return how many looks would do if means and spreads stay as they are."""
    if any(one.plain for one in deciding):
        return _WILD_DECIDES
    if any(abs(one.mean) > one.limit for one in deciding):
        # it can't come to hold: a place that is surely beyond decides, at its share of the level
        needed = min(
            _looks_needed(one, alpha / (3 * len(family) * (2 if one.samples.signed else 1)))
            for family in families
            for one in family
            if abs(one.mean) > one.limit
        )
    else:
        needed = max(_looks_needed(one, alpha) for one in deciding if one.p_holds > alpha)
    if needed >= MOST_LOOKS:
        return f"more than {MOST_LOOKS} looks, since a figure lies at its limit"
    return f"about {max(needed, looks + 1)} looks (there are {looks})"


def _looks_needed(one: OperatorPlace, alpha: float) -> int:
    values = one.samples.values[np.isfinite(one.samples.values)]
    if len(values) < 2:
        return 3
    spread = float(values.std(ddof=1))
    mean = float(values.mean())
    room = abs(one.samples.limit - (abs(mean) if one.samples.signed else mean))
    counts = np.unique(np.geomspace(2, MOST_LOOKS, 200).astype(int))
    from scipy.special import stdtrit  # heavy: a quarter of a second

    enough = stdtrit(counts - 1, 1 - alpha) * spread / np.sqrt(counts) < room
    return int(counts[enough.argmax()]) if enough.any() else MOST_LOOKS


def _figures(
    places: Sequence[OperatorPlace],
    worst: dict[Judged, OperatorPlace | None],
    looks: int,
    alpha: float,
) -> dict[str, float]:
    """Return the worst of each kind, and what larger value would have been seen at any place."""
    figures: dict[str, float] = {"looks": looks, "figures": len(places)}
    for kind, one in worst.items():
        if one is None:
            continue
        name = JUDGED[kind]
        figures[name] = one.mean
        # a gain of one head is as much smaller in its layer as there are heads
        same = [each for each in places if each.kind == kind]
        heads = [each for each in same if kind == "gain" and each.head is not None]
        others = [each for each in same if kind != "gain" or each.head is None]
        for prefix, group in (("", others), ("head_", heads)):
            if group:
                figures[f"{prefix}{name}_excluded"] = max(_bound(each, alpha) for each in group)
    return figures


def _bound(one: OperatorPlace, alpha: float) -> float:
    """Return the size that a one-sided t-bound excludes: larger ones would have been seen."""
    low, high = one.interval(alpha)
    if math.isnan(high):
        return math.inf
    return high if one.kind == "error" else max(-low, high)
