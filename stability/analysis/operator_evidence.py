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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stability.analysis.advice import advice, attention_is_not_its
from stability.analysis.evidence import LevelEvidence, silent_level
from stability.analysis.looks import (
    OperatorLimits,
    Samples,
    p_harmed,
    p_holds,
    plain_looks,
    standard_error,
)
from stability.analysis.more_looks import more_looks
from stability.analysis.number_text import bounds, three_figures
from stability.analysis.operator_coverage import unseen
from stability.analysis.place_table import (
    JUDGED,
    Judged,
    PlaceTable,
    joined,
    place_tables,
    samples_of,
)
from stability.analysis.sequential import look_alpha
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.axes import touches
from stability.config.study import PolicyConfig
from stability.records.metric_columns import Series

__all__ = ["changes_attention", "judge_operator", "operator_evidence"]

Array = NDArray[np.float64]

KINDS: tuple[Judged, ...] = ("error", "gain", "bias")
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
    runs = [run for run in arm.runs.values() if run.metrics]
    tables = joined([place_tables(run.metrics) for run in runs])
    bad = sum(_nonfinite(run.metrics) for run in runs)
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


class _Place(NamedTuple):
    """One judged number at one place, over looks."""

    kind: Judged
    what: str
    layer: str
    """Empty for the whole model."""
    head: int | None
    mean: float
    """A factor for an error ratio, else the value in its own unit."""
    error: float
    """The standard error, of an error ratio that of its log."""
    limit: float
    p_harmed: float
    p_holds: float
    samples: Samples
    plain: int = 0
    """How many looks are plainly beyond the limit by themselves."""
    wildest: float = math.nan
    """The value that is furthest from nothing in a single look, in the unit of `mean`."""
    wildest_at: int = 0
    """The step of that look."""

    @property
    def where(self) -> str:
        """The layer, and the head in it; or the whole model."""
        if not self.layer:
            return "the mean of all layers"
        return self.layer if self.head is None else f"head {self.head} of {self.layer}"

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return one-sided t-bounds of the mean at `alpha` each; NaN with fewer than two looks."""
        reach = _reach(self, alpha)
        if self.kind == "error":
            return self.mean * math.exp(-min(reach, 700.0)), self.mean * math.exp(min(reach, 700.0))
        return self.mean - reach, self.mean + reach

    def is_beyond(self, alpha: float) -> bool:
        """Whether the whole interval lies beyond the limit."""
        low, high = self.interval(alpha)
        return low > self.limit or (self.kind != "error" and high < -self.limit)


def judge_operator(
    tables: Sequence[PlaceTable], policy: PolicyConfig, *, nonfinite: float = 0.0
) -> LevelEvidence:
    """Return the evidence in tables of looks; `nonfinite` counts values that are NaN or infinite
    where the golden's are not.
    """
    limits = OperatorLimits.of(policy)
    families = [list(_places(tables, limits, family)) for family in ("model", "layer", "head")]
    places = [place for family in families for place in family]
    deciding = [place for place in places if _decides_holding(place, bool(families[0]))]
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
    worst: dict[Judged, _Place | None] = {kind: _worst(shown, kind) for kind in KINDS}
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


def _decides_holding(place: _Place, several_layers: bool) -> bool:
    """Whether a place must surely be within its limit for the level to hold."""
    if place.kind != "bias":
        return bool(place.layer)
    return place.head is None and bool(place.layer) != several_layers


def _places(tables: Sequence[PlaceTable], limits: OperatorLimits, family: str) -> Iterator[_Place]:
    for table in tables:
        for kind in KINDS:
            found = samples_of(table, kind, limits)
            if found is None:
                continue
            layers, heads = found
            if family == "model" and len(table.layers) > 1:
                yield from _of(table, kind, layers.mean(axis=1), family)
            elif family == "layer":
                yield from _of(table, kind, layers, family)
            elif family == "head" and heads is not None:
                yield from _of(table, kind, heads, family)


def _of(table: PlaceTable, kind: Judged, samples: Samples, family: str) -> Iterator[_Place]:
    harmed, holds, error = p_harmed(samples), p_holds(samples), standard_error(samples.values)
    with np.errstate(invalid="ignore"):
        mean = np.nansum(samples.values, 0) / np.isfinite(samples.values).sum(0)
    # a signed error scatters: single looks of right attentions are up to 29 times beyond its limit
    plain = plain_looks(samples) if kind != "bias" else np.zeros(samples.values.shape, bool)
    size = samples.values if kind == "error" else np.abs(samples.values)
    for at in np.ndindex(harmed.shape):
        if not math.isfinite(mean[at]):
            continue
        one = (slice(None), *at)
        value = float(mean[at])
        wildest = int(np.nanargmax(size[one]))
        extreme = float(samples.values[one][wildest])
        yield _Place(
            kind=kind,
            what=table.what,
            layer="" if family == "model" else table.layers[at[0]],
            head=at[1] if family == "head" else None,
            mean=math.exp(value) if kind == "error" else value,
            error=float(error[at]),
            limit=math.exp(samples.limit) if kind == "error" else samples.limit,
            p_harmed=float(harmed[at]),
            p_holds=float(holds[at]),
            samples=Samples(
                values=samples.values[one],
                limit=samples.limit,
                signed=samples.signed,
                baseline=None if samples.baseline is None else samples.baseline[one],
            ),
            plain=int(plain[one].sum()),
            wildest=math.exp(extreme) if kind == "error" else extreme,
            wildest_at=int(table.steps[wildest]),
        )


def _worst(places: Sequence[_Place], kind: Judged) -> _Place | None:
    return max((one for one in places if one.kind == kind), key=lambda x: abs(x.mean), default=None)


def _harm_sentence(families: Sequence[Sequence[_Place]], looks: int, alpha: float) -> str:
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


def _by_design(families: Sequence[Sequence[_Place]], alpha: float) -> str:
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


def _not_together(deciding: Sequence[_Place], harmed: float, alpha: float) -> str:
    """Return why a figure whose interval is beyond its limit is no harm yet; empty if none is."""
    # an interval alone says nothing where the baseline errs the same
    if not any(one.is_beyond(alpha) and one.p_harmed <= alpha for one in deciding):
        return ""
    return (
        f" An interval beyond its limit is no FAIL yet: each is of one figure, and of all figures "
        f"together such a one may be chance (p {harmed:.2g}, a FAIL needs {alpha:.2g})."
    )


_WILD_DECIDES = "what the attention does there, which more looks can't excuse"


def _wild_sentence(wild: Sequence[_Place]) -> str:
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
    deciding: Sequence[_Place], worst: Mapping[Judged, _Place | None], looks: int, alpha: float
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


def _written(one: _Place, alpha: float) -> str:
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


def _limit(one: _Place) -> str:
    return f"limit {one.limit:.2%} from 1" if one.kind == "gain" else f"limit {one.limit:g}"


def _cell(worst: dict[Judged, _Place | None]) -> str:
    error, gain = worst["error"], worst["gain"]
    parts = [f"{error.mean:.2g}x" if error else "", _percent(gain.mean) if gain else ""]
    text = " ".join(part for part in parts if part)
    return text if len(text) <= 16 else parts[0]


def _percent(gain: float) -> str:
    # two decimals would make a zero of a small one, and keep its sign
    return f"{gain:+.2%}" if abs(gain) >= 1e-4 or not gain else f"{100 * gain:+.1g}%"


def _decides(
    families: Sequence[Sequence[_Place]], deciding: Sequence[_Place], looks: int, alpha: float
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


def _looks_needed(one: _Place, alpha: float) -> int:
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
    places: Sequence[_Place], worst: dict[Judged, _Place | None], looks: int, alpha: float
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


def _bound(one: _Place, alpha: float) -> float:
    """Return the size that a one-sided t-bound excludes: larger ones would have been seen."""
    low, high = one.interval(alpha)
    if math.isnan(high):
        return math.inf
    return high if one.kind == "error" else max(-low, high)


def _reach(one: _Place, alpha: float) -> float:
    """Return how far a one-sided t-bound lies from the mean; NaN with fewer than two looks."""
    count = int(np.isfinite(one.samples.values).sum())
    if count < 2:
        return math.nan
    from scipy.special import stdtrit  # heavy: a quarter of a second

    return float(stdtrit(count - 1, 1 - alpha)) * one.error
