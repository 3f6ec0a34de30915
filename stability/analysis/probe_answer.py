"""What a probe says of its candidates, the worst first: that one failed, where it errs, or nothing.

A candidate that raised, that returned values which are not finite, or that was never compared has
not been found right, whatever the other figures say: that is the first thing to be told. Then come
the places beyond a limit (`locate`), how small an error would have gone unnamed (`noise`), and the
layers of which nothing was seen, or not all: of these nobody knows. Leaves out how it is shown.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stability.analysis.locate import locate, sentences
from stability.analysis.looks import FEW, OperatorLimits
from stability.analysis.noise import below_the_noise
from stability.analysis.place_table import JUDGED, Judged, PlaceTable, place_tables, samples_of
from stability.analysis.probe_records import RecordedProbe
from stability.records.events import Event, is_in_part
from stability.records.metric_columns import Series
from stability.records.metric_names import in_order, parse_deviation

__all__ = ["ProbeAnswer", "answer_of_probe", "failures_of", "worst_result"]

GOLDEN = "golden"


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The answer in sentences."""

    failures: tuple[str, ...]
    """Candidates that raised, returned what is not finite, or were never compared."""
    places: tuple[str, ...]
    """What is beyond a limit, or stands out, and where."""
    unseen: tuple[str, ...]
    """Layers of which not every call was compared, and why."""
    unsure: tuple[str, ...]
    """Of each candidate without a place that was named, how large an error would have had one."""
    calm: str
    """What is said if there is nothing else to say."""

    @property
    def holds(self) -> bool:
        """Whether no candidate failed, and nothing that was compared is beyond a limit."""
        return not self.failures and not self.places

    @property
    def said(self) -> tuple[str, ...]:
        """What was found, the worst first, or that nothing was."""
        return (*self.failures, *self.places) or (self.calm,)

    @property
    def lines(self) -> tuple[str, ...]:
        """All sentences, the worst first, and last what nobody knows."""
        return (*self.said, *self.unsure, *self.unseen)


def answer_of_probe(probed: RecordedProbe, limits: OperatorLimits | None = None) -> ProbeAnswer:
    """Return the answer of a whole probe."""
    limits = limits or OperatorLimits()
    names = list(probed.record.shadows)
    layers = list(dict.fromkeys([*probed.record.layers, *probed.layers]))
    # where the candidate computes in the model, its own attention is the shadow
    candidates = names if names != ["own"] else [_computes(probed.record.primary)]
    failures = [*failures_of(probed.metrics, probed.events, layers, names)]
    failures += _never_compared(probed, names, candidates, layers)
    found = locate(probed.metrics, limits)
    return ProbeAnswer(
        failures=tuple(failures),
        places=tuple(sentences(found)),
        unsure=below_the_noise(probed.metrics, limits, {each.shadow for each in found}),
        unseen=_unseen(probed, names),
        calm=_calm(probed, limits),
    )


def failures_of(
    metrics: Mapping[str, Series],
    events: Iterable[Event],
    layers: Sequence[str],
    names: Sequence[str],
) -> list[str]:
    """Return a sentence for each way in which one of `names`, or the golden, failed."""
    raised: dict[tuple[str, str], list[str]] = {}
    for event in events:
        for name in (*names, GOLDEN):
            reason = event.text.removeprefix(f"{name}: ")
            is_error = event.kind == "finding" and reason != event.text
            if is_error and "values of " not in reason.split(":")[0]:
                raised.setdefault((name, reason), []).append(event.layer)
    found = [
        f"{name} failed in {_which(where, layers)}: {reason}"
        for (name, reason), where in raised.items()
    ]
    return [*found, *_not_finite(metrics, layers, names)]


def _not_finite(
    metrics: Mapping[str, Series], layers: Sequence[str], names: Sequence[str]
) -> list[str]:
    """Return what is said of values that are not finite where FP64's, or the baseline's, are."""
    against = "golden_nonfinite"
    if not any(name.endswith(f"/{against}") for name in metrics):
        against = "nonfinite"
    where: dict[str, dict[str, tuple[list[str], int]]] = {}
    for name, series in metrics.items():
        parts = parse_deviation(name)
        if parts is None or parts.metric != against or parts.part:
            continue
        bad = [step for step, count in zip(series.steps, series.values, strict=True) if count > 0]
        if bad:
            by_result = where.setdefault(parts.shadow, {})
            at, since = by_result.get(parts.what, ([], bad[0]))
            by_result[parts.what] = ([*at, parts.layer], min(since, bad[0]))
    # one that is alone has no name in its metrics; where it is the model's own, the other is meant
    alone = names[0] if len(names) == 1 and names[0] != "own" else "the candidate"
    lines = []
    for shadow, results in where.items():
        found = dict.fromkeys(layer for at, _ in results.values() for layer in at)
        since = min(since for _, since in results.values())
        lines.append(
            f"{shadow or alone} returned values that are not finite in "
            f"{_which(list(found), layers)}, since step {since}: " + ", ".join(in_order(results))
        )
    return lines


def _which(where: Sequence[str], layers: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(where))
    if len(distinct) >= len(layers) > 1:
        return "every layer"
    shown = ", ".join(distinct[:3])
    if len(distinct) <= 3:
        return shown
    return f"{len(distinct)} of {len(layers)} layers ({shown}, ...)"


def _never_compared(
    probed: RecordedProbe, names: Sequence[str], candidates: Sequence[str], layers: Sequence[str]
) -> list[str]:
    """Return what is said of candidates of which there is not one number."""
    reasons = list(dict.fromkeys(event.text for event in probed.events if event.kind == "finding"))
    lines = []
    for name, candidate in zip(names, candidates, strict=True):
        known = {"", name, _metric_part(name)}
        if any(shadow in known for shadow in probed.shadows):
            continue
        if any(reason.startswith(f"{name}: ") for reason in reasons):
            continue  # it failed, and that has been said
        why = f": {reasons[0]}" if reasons else ""
        seen = f"{len(layers)} layers were caught" if layers else "no attention call was caught"
        lines.append(f"{candidate} was never compared ({seen}){why}")
    return lines


def _unseen(probed: RecordedProbe, names: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence for each reason why calls were not compared, with its layers."""
    where: dict[str, list[str]] = {}
    for event in probed.events:
        is_part = is_in_part(event.text)
        is_of_candidate = any(event.text.startswith(f"{name}: ") for name in (*names, GOLDEN))
        if event.kind != "finding" or event.layer in ("", "model") or is_of_candidate:
            continue
        if is_part or event.layer not in probed.layers:
            where.setdefault(event.text, []).append(event.layer)
    said = ("seen in part", "not seen")
    return tuple(
        f"{_which(layers, [])}: {'' if text.startswith(said) else 'not measured: '}{text}"
        for text, layers in where.items()
    )


def _metric_part(name: str) -> str:
    """Return a shadow's name as it stands in metric names (`probe.measurements`)."""
    return "".join(c if c.isalnum() else "_" for c in name)


def _computes(primary: Mapping[str, object]) -> str:
    return str(primary.get("implementation", "the candidate"))


def _calm(probed: RecordedProbe, limits: OperatorLimits) -> str:
    """Return the sentence of a probe in which nothing is beyond its limit."""
    looks = len(probed.steps())
    count = len(probed.layers)
    over = f"{count} layer{'s' if count != 1 else ''}, {looks} look{'s' if looks != 1 else ''}"
    if not any(parse_deviation(name) for name in probed.metrics):
        return "Nothing has been compared yet."
    if not any(name.endswith("/error_ratio") for name in probed.metrics):
        return f"No layer or head stands out from the others, and none is biased ({over})."
    largest = _largest_ratio(probed)
    is_doubtful = largest > limits.error_ratio
    surely = "surely " if is_doubtful else ""
    worst = f"; the largest error ratio of a look is {largest:.3g}"
    worst += ", and more looks tell whether that is chance" if is_doubtful else ""
    few = f" Gain and bias need {FEW} looks or more to be judged." if looks < FEW else ""
    return (
        f"No layer or head is {surely}beyond its limit: error ratio {limits.error_ratio:g}, gain "
        f"{limits.gain:.2%}, bias {limits.bias_ulp:g} ULP ({over}){worst}.{few}"
    )


def _largest_ratio(probed: RecordedProbe) -> float:
    ratios = (s.values for name, s in probed.metrics.items() if _is_judged_ratio(name))
    return max((x for values in ratios for x in values if math.isfinite(x)), default=math.nan)


def _is_judged_ratio(name: str) -> bool:
    parts = parse_deviation(name)
    if parts is None or parts.metric != "error_ratio":
        return False
    return not parts.part.startswith("positions")


def worst_result(
    metrics: Mapping[str, Series], limits: OperatorLimits | None = None
) -> tuple[str, str, str] | None:
    """Return (shadow, result, metric) of the value furthest beyond its limit, or nearest to it.

    What a page or a table opens on. None where nothing was measured against FP64.
    """
    limits = limits or OperatorLimits()
    worst: tuple[float, tuple[str, str, str]] | None = None
    for table in place_tables(metrics):
        for kind, metric in JUDGED.items():
            times = _times_limit(table, kind, limits)
            if times is not None and (worst is None or times > worst[0]):
                worst = times, (table.shadow, table.what, metric)
    return worst[1] if worst else None


def _times_limit(table: PlaceTable, kind: Judged, limits: OperatorLimits) -> float | None:
    """Return how many times its limit the mean over the looks is, at the worst place."""
    found = samples_of(table, kind, limits)
    if found is None:
        return None
    means = [samples.mean(axis=0).values for samples in found if samples is not None]
    sizes = [abs(x) if kind != "error" else x for mean in means for x in mean.flat]
    largest = max((x for x in sizes if math.isfinite(x)), default=None)
    if largest is None:
        return None
    limit = found[0].limit
    return math.exp(largest - limit) if kind == "error" else largest / limit
