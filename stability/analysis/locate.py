"""Where an attention goes wrong: in which layer and head, in what, and since which step.

Against an FP64 golden each place has limits of its own (`OperatorLimits`): an error ratio of 2, the
factor that flash-attn's tests allow, a gain of 0.1 %, a signed error of a twentieth of an ULP. A
place is named if it is beyond one of them more surely than chance allows in a whole run (`looks`).
An error ratio ten times beyond the limit needs no statistics: a single look names it. Healthy heads
differ by less than a factor of three.

What is beyond in more than half of the layers, or heads of a layer, is said of the model or the
layer as a whole; within it, only what stands out from the others, five times their median, has a
name of its own. Without a golden there is no limit, since an error depends on format, length and
data; the peers share all three, so that a place is named if it stands out from them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stability.analysis.looks import (
    NAMING_ALPHA,
    PLAIN_TIMES,
    OperatorLimits,
    Samples,
    name_places,
    standard_error,
)
from stability.analysis.place_table import (
    JUDGED,
    Judged,
    PlaceTable,
    place_tables,
    samples_of,
)
from stability.records.metric_columns import Series
from stability.records.metric_names import in_order

__all__ = ["EVERY_LAYER", "MOST_LAYERS", "Located", "Location", "locate", "sentences", "tests_of"]

Array = NDArray[np.float64]

KINDS: tuple[Judged, ...] = ("error", "gain", "bias")
TIMES_PEERS = 5.0
BIAS_ULP = 0.1
"""The limit of a signed deviation from a baseline, which has a bias of its own."""
MANY_PLACES = 64
"""From so many on, a place moves the median of all by too little to be left out of it."""


class Location(NamedTuple):
    """A layer, one of its heads, or the whole model."""

    layer: str
    head: int | None = None

    def __str__(self) -> str:
        return self.layer if self.head is None else f"{self.layer}, head {self.head}"


EVERY_LAYER = Location("every layer")
MOST_LAYERS = Location("most layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A place that is beyond a limit, since which step, and by how much from then on."""

    kind: Judged
    shadow: str
    what: str
    place: Location
    since: int
    metric: str
    value: float
    """The mean over the looks from `since` on; of an error ratio the geometric mean."""
    error: float
    """The standard error of the value, of an error ratio that of its log; NaN of a single look."""
    peers: float
    """The median of the others over these looks; NaN where the place is the whole model."""
    times: float
    """How many times the limit the value is."""

    @property
    def figure(self) -> str:
        """What was found, in a few words."""
        if self.kind == "error":
            others = "" if math.isnan(self.peers) else f" (others {self.peers:.2g})"
            return f"{self.what} {self.value:.3g}{others}"
        if self.kind == "gain":
            error = "" if math.isnan(self.error) else f" ± {self.error:.1g}"
            return f"{self.what} is {1 + self.value:.4f}{error} times what it should be"
        error = "" if math.isnan(self.error) else f" (standard error {self.error:.1g})"
        return f"{self.what} {self.value:+.3g} ULP{error}"


_SAYS = {
    ("error", "error_ratio"): "error ratio",
    ("error", "rel_fro"): "relative error",
    ("gain", "gain"): "a wrong factor",
    ("bias", "golden_bias_ulp"): "signed error against FP64 is biased",
    ("bias", "bias_ulp"): "signed error against the baseline is biased",
}


def sentences(found: Sequence[Located]) -> list[str]:
    """Return a sentence for each place: what is wrong there, and since which step."""
    grouped: dict[tuple[str, str, str, Location], list[Located]] = {}
    for each in found:
        grouped.setdefault((each.kind, each.metric, each.shadow, each.place), []).append(each)
    lines = []
    for (kind, metric, shadow, place), group in grouped.items():
        who = f"{shadow}: " if shadow else ""
        order = in_order(each.what for each in group)
        ordered = sorted(group, key=lambda each: order.index(each.what))
        figures = ", ".join(each.figure for each in ordered)
        since = min(each.since for each in group)
        says = _SAYS[kind, metric]
        if kind == "error":
            alone = all(math.isnan(each.peers) for each in group)
            says += " is beyond its limit" if alone else " stands out"
        lines.append(f"{who}{place}: {says} since step {since}: {figures}")
    return lines


def locate(metrics: Mapping[str, Series], limits: OperatorLimits | None = None) -> list[Located]:
    """Return the places of a run's `metrics` that are beyond a limit.

    The whole model comes before its places, and of these the one that is furthest beyond.
    """
    limits = limits or OperatorLimits()
    tests = tests_of(metrics)
    found = [
        each
        for table, kind in tests
        for each in _found(table, kind, limits, NAMING_ALPHA / len(tests))
    ]
    model = (EVERY_LAYER, MOST_LAYERS)
    return sorted(found, key=lambda each: (each.place not in model, -each.times))


def tests_of(metrics: Mapping[str, Series]) -> list[tuple[PlaceTable, Judged]]:
    """Return what is tested, which shares the chance that anything is named of a right run."""
    return [(table, kind) for table in place_tables(metrics) for kind in KINDS if _has(table, kind)]


def _has(table: PlaceTable, kind: Judged) -> bool:
    if JUDGED[kind] in table.of_layer:
        return True
    fallback = {"error": "rel_fro", "bias": "bias_ulp"}.get(kind)
    return "error_ratio" not in table.of_layer and fallback in table.of_layer


class _Scores(NamedTuple):
    """What is judged of layers and of heads, and what it is compared with among themselves."""

    metric: str
    layers: Samples
    heads: Samples | None
    relative: bool
    """Whether the scores are relative to the other places, and there is no limit of their own."""


def _scores(table: PlaceTable, kind: Judged, limits: OperatorLimits) -> _Scores:
    found = samples_of(table, kind, limits)
    if found is not None:
        return _Scores(JUDGED[kind], *found, relative=False)
    if kind == "bias":
        layers, heads = (
            Samples(values=of["bias_ulp"], limit=BIAS_ULP, signed=True)
            if "bias_ulp" in of
            else None
            for of in (table.of_layer, table.of_head)
        )
        assert layers is not None
        return _Scores("bias_ulp", layers, heads, relative=False)
    layers, heads = (
        _beside_others(of["rel_fro"]) if "rel_fro" in of else None
        for of in (table.of_layer, table.of_head)
    )
    assert layers is not None
    return _Scores("rel_fro", layers, heads, relative=True)


def _beside_others(values: Array) -> Samples:
    """Return the log of each place's value over the median of the others at the same look."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(values) - np.log(_others(values))
    # beside peers that are exact any error stands out; nan_to_num keeps NaN for no look
    logs = np.nan_to_num(logs, nan=np.nan, posinf=np.log(1e30), neginf=np.log(1e-30))
    return Samples(values=logs, limit=math.log(TIMES_PEERS))


def _others(values: Array) -> Array:
    """Return, for each look and place, the median over the other places; NaN if there are none."""
    flat = values.reshape(len(values), -1)
    places = flat.shape[1]
    if places < 2:
        return np.full_like(values, np.nan)
    with np.errstate(invalid="ignore"):
        if places > MANY_PLACES:
            middle = np.broadcast_to(_median(flat)[:, None], flat.shape)
        else:
            without = [np.delete(flat, place, axis=1) for place in range(places)]
            middle = np.stack([_median(each) for each in without], axis=1)
    return middle.reshape(values.shape)


def _median(rows: Array) -> Array:
    """Return the median of what is finite in each row, NaN where nothing is."""
    there = np.isfinite(rows).any(1)
    middle = np.full(len(rows), np.nan)
    middle[there] = np.nanmedian(np.where(np.isfinite(rows[there]), rows[there], np.nan), axis=1)
    return middle


def _found(table: PlaceTable, kind: Judged, limits: OperatorLimits, alpha: float) -> list[Located]:
    scores = _scores(table, kind, limits)
    if kind != "error" or scores.relative:
        return [_located(table, kind, scores, place) for place in _named(scores, alpha)]
    # half for the limit, half for what stands out beside others that are beyond it as well
    named = _named(scores, alpha / 2)
    if any(place.layer is None for place in named):
        ratios = _Scores(
            scores.metric,
            _beside_others(table.of_layer["error_ratio"]),
            _beside_others(table.of_head["error_ratio"]) if scores.heads else None,
            relative=True,
        )
        known = {(place.layer, place.head) for place in named}
        beside = _named(ratios, alpha / 2)
        named += [place for place in beside if (place.layer, place.head) not in known]
    return [_located(table, kind, scores, place) for place in named]


class _Place(NamedTuple):
    """A place to be named, by index, and how many of the last looks say so."""

    layer: int | None
    """None for the whole model."""
    head: int | None
    looks: int
    every: bool = True
    """Of the whole model, whether each of its layers is meant."""


def _named(scores: _Scores, alpha: float) -> list[_Place]:
    """Return the places to name: the model, a layer or a head, whichever says it all."""
    sure = name_places(scores.layers, scores.heads, alpha)
    of_layer, of_head = sure.layers, sure.heads
    if not scores.layers.signed:
        of_layer = np.maximum(of_layer, _plain(scores.layers))
        if of_head is not None and scores.heads is not None:
            of_head = np.maximum(of_head, _plain(scores.heads))
    whole, single = [], []
    for layer, looks in enumerate(of_layer):
        heads = _Heads.of(scores, of_head, layer)
        if heads.named and 2 * len(heads.named) <= heads.count and not (looks and heads.most):
            single += [_Place(layer, head, at) for head, at in heads.named.items()]
        elif looks or heads.named:
            whole.append(_Place(layer, None, max(int(looks), *heads.named.values(), 0)))
    explained = {place.layer for place in single}
    model = _of_the_model(scores, whole, 0 if scores.relative else sure.model, explained)
    return [model, *single] if model else [*whole, *single]


class _Heads(NamedTuple):
    """The heads of one layer."""

    count: int
    named: dict[int, int]
    """Head -> looks."""
    most: bool
    """Whether the means of most heads are beyond the limit, each surely or not."""

    @classmethod
    def of(cls, scores: _Scores, sure: NDArray[np.int64] | None, layer: int) -> "_Heads":
        if scores.heads is None or sure is None:
            return cls(0, {}, True)
        there = np.isfinite(scores.heads.values[:, layer]).any(0)
        beyond = _mean_beyond(scores.heads)[layer]
        named = {int(head): int(sure[layer, head]) for head in np.flatnonzero(sure[layer])}
        return cls(int(there.sum()), named, bool(2 * beyond.sum() > there.sum()))


def _of_the_model(
    scores: _Scores, layers: Sequence[_Place], looks: int, explained: Collection[int | None]
) -> _Place | None:
    """Return the whole model if most of its layers are beyond: each surely, or all together.

    Layers whose error a few heads explain count not.
    """
    count = scores.layers.values.shape[1]
    if scores.relative or count < 2:
        return None
    if 2 * len(layers) > count:
        every = len(layers) == count
        return _Place(None, None, max(layer.looks for layer in layers), every)
    found = np.flatnonzero(_mean_beyond(scores.layers))
    beyond = sum(int(layer) not in explained for layer in found)
    return _Place(None, None, looks, beyond == count) if looks and 2 * beyond > count else None


def _mean_beyond(samples: Samples) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        mean = np.nansum(samples.values, 0) / np.isfinite(samples.values).sum(0)
        return (np.abs(mean) if samples.signed else mean) > samples.limit


def _plain(samples: Samples) -> NDArray[np.int64]:
    """Return how many looks ago an error was first plainly beyond its limit, 0 if it never was."""
    plain = samples.values > samples.limit + math.log(PLAIN_TIMES)
    return np.where(plain.any(0), len(plain) - plain.argmax(0), 0)


def _located(table: PlaceTable, kind: Judged, scores: _Scores, place: _Place) -> Located:
    """Return what is said of a place: the mean from the first look on that is beyond the limit."""
    values, judged = _series(table, scores, place)
    start = _onset(judged, scores.layers, place.looks)
    late, logs = values[start:], kind == "error"
    with np.errstate(divide="ignore"):
        used = np.log(late) if logs else late
    used = used[np.isfinite(used)]
    mean = float(used.mean()) if len(used) else math.nan
    own, limit = float(np.nanmean(judged[start:])), scores.layers.limit
    peers = _peers(table, scores.metric, place, start, logs)
    value = math.exp(min(mean, 700.0)) if logs else mean
    # the samples of errors are logs, and those of biases have a unit of their own
    times = math.exp(min(own - scores.layers.limit, 700.0)) if logs else abs(own) / limit
    return Located(
        kind=kind,
        shadow=table.shadow,
        what=table.what,
        place=_location(table, place),
        since=int(table.steps[start]),
        metric=scores.metric,
        value=value,
        error=float(standard_error(used)) if len(used) > 1 else math.nan,
        peers=peers,
        times=times,
    )


def _location(table: PlaceTable, place: _Place) -> Location:
    if place.layer is None:
        return EVERY_LAYER if place.every else MOST_LAYERS
    return Location(table.layers[place.layer], place.head)


def _series(table: PlaceTable, scores: _Scores, place: _Place) -> tuple[Array, Array]:
    """Return a place's values as they were measured, and as they are judged, by look."""
    if place.layer is None:
        layers = table.of_layer[scores.metric]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(layers) if scores.metric == "error_ratio" else layers
            count = np.isfinite(logs).sum(1)
            mean = np.where(np.isfinite(logs), logs, 0.0).sum(1) / count
        values = np.exp(mean) if scores.metric == "error_ratio" else mean
        return values, scores.layers.mean(axis=1).values
    if place.head is None or scores.heads is None:
        at = (slice(None), place.layer)
        return table.of_layer[scores.metric][at], scores.layers.values[at]
    at = (slice(None), place.layer, place.head)
    return table.of_head[scores.metric][at], scores.heads.values[at]


def _onset(judged: Array, samples: Samples, looks: int) -> int:
    """Return the first look that is beyond the limit, in the last looks or just before them."""
    sign = -1.0 if samples.signed and np.nanmean(judged[len(judged) - looks :]) < 0 else 1.0
    with np.errstate(invalid="ignore"):
        beyond = sign * judged > samples.limit
    start = len(judged) - looks
    while start > 0 and beyond[start - 1]:
        start -= 1
    while start < len(judged) - 1 and not beyond[start]:
        start += 1
    return start


def _peers(table: PlaceTable, metric: str, place: _Place, start: int, logs: bool) -> float:
    """Return the median of the other places, averaged over the looks from `start` on."""
    if place.layer is None:
        return math.nan
    values = (table.of_layer if place.head is None else table.of_head)[metric]
    at = (place.layer,) if place.head is None else (place.layer, place.head)
    others = _others(values[start:])[(slice(None), *at)]
    others = others[np.isfinite(others)]
    if not len(others):
        return math.nan
    if not logs:
        return float(others.mean())
    return float(np.exp(np.log(np.maximum(others, 1e-300)).mean()))
