"""Where an attention goes wrong: which layer, head and gradient, and since which step.

Each place is compared with its peers at the same step: a layer with all layers, a head with all
heads of all layers. No absolute tolerance would do, since the error depends on format, length and
data; the peers share all three. An error stands out if it is five times the median of the others
and, where there is a golden, also twice the baseline's own error, the factor that flash-attn's
tests allow. So numerics that are worse everywhere alike point at no place. Healthy layers differ by
less than a factor of three.

A bias stands out by itself: a mean signed error above a tenth of an ULP and six standard errors, of
one sign at most of the steps looked at. The standard error treats a layer's errors as independent.
Those of a gradient summed over queries are not, so a single look must show twenty standard errors,
and a single head three such steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from stability.records.metric_log import Series
from stability.records.metric_names import DeviationName, parse_deviation

__all__ = ["Located", "Location", "locate", "sentences"]

TIMES_PEERS = 5.0
TIMES_BASELINE = 2.0
BIAS_ULP = 0.1
BIAS_ERRORS = 6.0
"""In standard errors, as is BIAS_ERRORS_AT_ONE_STEP."""
BIAS_ERRORS_AT_ONE_STEP = 20.0
STEPS_OF_A_HEAD = 3

MADE_HERE = ("out", "lse", "dq", "dk", "dv")
"""Results that are compared on the same inputs, so that their error is the layer's own."""


class Location(NamedTuple):
    """A layer, or one of its heads."""

    layer: str
    head: int | None = None

    def __str__(self) -> str:
        return self.layer if self.head is None else f"{self.layer}, head {self.head}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A place that stands out, since which step, and its error at the step where it is worst."""

    kind: Literal["error", "bias"]
    shadow: str
    what: str
    place: Location
    since: int
    metric: str
    value: float
    peers: float
    """The median of the others at that step; of a bias its standard error."""

    @property
    def figure(self) -> str:
        """What was found, in a few words."""
        if self.kind == "bias":
            return f"{self.what} {self.value:+.3g} ULP (standard error {self.peers:.1g})"
        return f"{self.what} {self.value:.3g} (others {self.peers:.2g})"


_SAYS = {
    ("error", "error_ratio"): "error ratio stands out",
    ("error", "rel_fro"): "relative error stands out",
    ("bias", "bias_ulp"): "signed error is biased",
}


def sentences(found: Sequence[Located]) -> list[str]:
    """Return a sentence for each place: what stands out there, and since which step."""
    grouped: dict[tuple[str, str, str, Location], list[Located]] = {}
    for each in found:
        grouped.setdefault((each.kind, each.metric, each.shadow, each.place), []).append(each)
    lines = []
    for (kind, metric, shadow, place), group in grouped.items():
        who = f"{shadow}: " if shadow else ""
        figures = ", ".join(
            each.figure for each in sorted(group, key=lambda x: MADE_HERE.index(x.what))
        )
        since = min(each.since for each in group)
        lines.append(f"{who}{place}: {_SAYS[kind, metric]} since step {since}: {figures}")
    return lines


def locate(metrics: Mapping[str, Series]) -> list[Located]:
    """Return the places of a run's `metrics` that stand out, the furthest first of each kind."""
    table = _table(metrics)
    errors: list[Located] = []
    for shadow in dict.fromkeys(key[0] for key in table):
        for what in MADE_HERE:
            errors += _errors(table, shadow, what)
    biases = [
        found
        for (shadow, what, metric), places in table.items()
        if metric == "bias_ulp" and what in MADE_HERE
        for found in _biases(places, table.get((shadow, what, "bias_ulp_se"), {}), shadow, what)
    ]
    # beside peers that are exact any error comes first, and is divided by no zero
    errors.sort(key=lambda found: -found.value / (found.peers or 1e-300))
    biases.sort(key=lambda found: -abs(found.value) / (found.peers or 1e-300))
    return [*errors, *biases]


_ByStep = dict[int, float]
_Table = dict[tuple[str, str, str], dict[Location, _ByStep]]
"""(shadow, what, metric) -> place -> step -> value."""


def _table(metrics: Mapping[str, Series]) -> _Table:
    table: _Table = {}
    for name, series in metrics.items():
        parts = parse_deviation(name)
        if parts is None or parts.part.startswith("positions"):
            continue
        values = dict(zip(series.steps, series.values, strict=True))
        key = (parts.shadow, parts.what, parts.metric)
        table.setdefault(key, {})[_place(parts)] = values
    return table


def _place(parts: DeviationName) -> Location:
    return Location(parts.layer, int(parts.part.removeprefix("head_")) if parts.part else None)


def _errors(table: _Table, shadow: str, what: str) -> list[Located]:
    ratios = table.get((shadow, what, "error_ratio"), {})
    # the ratio has format, length and data divided out already; without a golden there is none
    metric = "error_ratio" if ratios else "rel_fro"
    places = ratios or table.get((shadow, what, metric), {})
    heads = {place: values for place, values in places.items() if place.head is not None}
    layers = {place: values for place, values in places.items() if place.head is None}
    least = TIMES_BASELINE if ratios else 0.0
    found = _outliers(heads, least)
    standing_out = {}
    for place, seen in found.items():
        siblings = [other for other in heads if other.layer == place.layer]
        out = [other for other in found if other.layer == place.layer]
        # where most heads of a layer stand out, it is the layer that goes wrong
        if 2 * len(out) <= len(siblings):
            standing_out[place] = seen
    covered = {place.layer for place in standing_out}
    for place, seen in _outliers(layers, least).items():
        if place.layer not in covered:
            standing_out[place] = seen
    return [
        Located(
            kind="error",
            shadow=shadow,
            what=what,
            place=place,
            since=since,
            metric=metric,
            value=value,
            peers=peers,
        )
        for place, (since, value, peers) in standing_out.items()
    ]


def _outliers(
    places: Mapping[Location, _ByStep], least: float
) -> dict[Location, tuple[int, float, float]]:
    """Return (first step, largest value, its peers' median) of each place that stands out."""
    found: dict[Location, tuple[int, float, float]] = {}
    for step in sorted({step for values in places.values() for step in values}):
        now = {place: values[step] for place, values in places.items() if step in values}
        for place, value in now.items():
            # without its own error, which would raise the median of few peers
            others = [other for at, other in now.items() if at != place]
            # "not >=" and "not >" let a NaN stand out nowhere
            if not others or not value >= least:
                continue
            peers = median(others)
            if not value > TIMES_PEERS * peers:
                continue
            since, largest, _ = found.get(place, (step, 0.0, 0.0))
            if value > largest:
                found[place] = (since, value, peers)
    return found


def _biases(
    places: Mapping[Location, _ByStep], errors: Mapping[Location, _ByStep], shadow: str, what: str
) -> list[Located]:
    """Return the layers whose signed error is biased, and heads of layers that are not."""
    found: dict[Location, Located] = {}
    # layers first: a biased layer explains its heads
    for place in sorted(places, key=lambda place: place.head is not None):
        if Location(place.layer) in found:
            continue
        series = places[place]
        sure = _sure_steps(series, errors.get(place, {}))
        if 2 * len(sure) <= len(series) or (place.head is not None and len(sure) < STEPS_OF_A_HEAD):
            continue
        step = max(sure, key=lambda at: abs(series[at]))
        found[place] = Located(
            kind="bias",
            shadow=shadow,
            what=what,
            place=place,
            since=min(sure),
            metric="bias_ulp",
            value=series[step],
            peers=errors[place][step],
        )
    return list(found.values())


def _sure_steps(series: _ByStep, errors: _ByStep) -> list[int]:
    """Return the steps at which a bias is sure, of the sign that more of them have."""
    wanted = BIAS_ERRORS if len(series) > 1 else BIAS_ERRORS_AT_ONE_STEP
    sure = [
        step
        for step, bias in series.items()
        # a bias without a standard error is never sure
        if abs(bias) > BIAS_ULP and abs(bias) > wanted * errors.get(step, float("inf"))
    ]
    positive = [step for step in sure if series[step] > 0]
    negative = [step for step in sure if series[step] < 0]
    # errors that go now up, now down cancel over the steps: only a lasting sign is a bias
    return max(positive, negative, key=len)
