"""Charts of what was measured inside attention: by layer, step, result, head, position and size.

For the arms of a study or the shadows of a probe, forward and backward. Leaves out single rounding
points (`operator_charts`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from plotly.colors import sample_colorscale

from stability.analysis.probe_answer import worst_result
from stability.analysis.probe_records import (
    LayerTable,
    RecordedProbe,
    ShadowMetrics,
    layer_table,
    metrics_of_probe,
    shadow_label,
    thinned,
)
from stability.analysis.study_records import RecordedStudy
from stability.metrics.ulp import ULP_EDGES
from stability.records.metric_names import COMPARED, ULP_HISTOGRAM, deviation_name, watch_name
from stability.records.metric_table import LAYER_METRICS
from stability.report.page.chart import (
    LOG_AXIS,
    STEP_AXIS,
    Chart,
    Section,
    label,
    make_chart,
    section_of,
)
from stability.report.page.heat_map import ROW_AXIS, layer_map, log_map, plotly_steps
from stability.report.view.ladder import is_candidate

__all__ = ["deviation_section", "inside_sections", "probe_sections", "study_deviation"]

CELLS = 150_000
"""All tables of a page share this many cells, at some 25 bytes each."""
COLUMNS = range(24, 400)
"""The fewest and the most columns that a table is thinned to."""
MOST_NAMED = 16
"""The most layers that a legend has room for."""
HEIGHT = 430
LARGEST = "The largest over the steps that were looked at"


Tables = Mapping[tuple[str, str, str], LayerTable]
"""(arm or shadow, what was compared, metric) -> table."""


def study_deviation(study: RecordedStudy) -> Section | None:
    """Return map and curves of the deviation by layer and step; None if nothing was probed.

    Arms that change the attention come first: they are what one looks for.
    """
    arms = sorted(study.arms, key=lambda arm: not is_candidate(arm))
    tables = {
        (arm.name, what, metric): table
        for arm in arms
        for what in COMPARED
        for metric in LAYER_METRICS
        if (table := layer_table(arm, what, metric))
    }
    intro = (
        "At probed steps each attention call is repeated on the same inputs, forward and backward: "
        "candidate against baseline attention, and both against an FP64 golden. In arms that do "
        "not change the attention, the study's first shadow is the candidate. Mean over the seeds."
    )
    shown = next((arm for arm in arms if any(key[0] == arm.name for key in tables)), None)
    for run in shown.runs.values() if shown else ():
        worst = worst_result(run.metrics)
        if shown and worst is not None:
            tables = _opening_on(tables, (shown.name, *worst[1:]))
            break
    return deviation_section(tables, "arm", intro)


def probe_sections(probed: RecordedProbe) -> list[Section]:
    """Return a section for each kind of measurement that the probe has recorded."""
    tables = {}
    for shadow in probed.shadows:
        for what in probed.compared:
            for metric in LAYER_METRICS:
                table = {
                    layer: values
                    for layer in probed.layers
                    if (values := probed.series(layer, what, metric, shadow=shadow))
                }
                if table:
                    tables[shadow_label(shadow), what, metric] = LayerTable.of_steps(table)
    intro = (
        "Each call that was looked at has been repeated on the same inputs, forward and, "
        "under the gradient that the run itself sent back, backward."
    )
    worst = worst_result(probed.metrics)
    if worst is not None:
        tables = _opening_on(tables, (shadow_label(worst[0]), *worst[1:]))
    deviation = deviation_section(tables, "shadow", intro)
    inside = inside_sections(metrics_of_probe(probed))
    return [deviation, *inside] if deviation else inside


def _opening_on(tables: Tables, worst: tuple[str, str, str]) -> Tables:
    """Return the tables in such an order that a reader is shown the worst of them first."""
    if worst not in tables:
        return tables
    # by shadow, then result, then metric: each choice opens on the first that it meets
    alike = [[key for key in tables if key[:place] == worst[:place]] for place in (3, 2, 1, 0)]
    order = dict.fromkeys([worst, *(key for keys in alike for key in keys)])
    return {key: tables[key] for key in order}


def inside_sections(observed: Sequence[ShadowMetrics]) -> list[Section]:
    """Return a section for each kind of measurement on record but deviation by layer and step."""
    makers = (_heads, _streams, _histogram, _positions, _watched)
    return [section for make in makers if (section := make(observed))]


def deviation_section(tables: Tables, group: str, intro: str) -> Section | None:
    """Return the section of `tables`, whose first key is a choice called `group`, or None."""
    if not tables:
        return None
    groups, results, metrics = (
        list(dict.fromkeys(key[place] for key in tables)) for place in range(3)
    )
    shown, remarks = _thinned(tables)
    is_attention = all(what in COMPARED for what in results)
    names = (group, "what", "metric")
    traced = [(dict(zip(names, key, strict=True)), table) for key, table in shown.items()]
    return Section(
        key="deviation",
        title="Deviation inside attention" if is_attention else "Deviation layer by layer",
        intro=intro,
        charts=(_layer_by_step(traced, remarks), _layer_curves(traced, remarks)),
        # the first of each is what the page opens on: the worst comes first
        choices={group: groups, "what": results, "metric": metrics},
    )


def _thinned(tables: Tables) -> tuple[Tables, tuple[str, ...]]:
    """Return what of `tables` is shown, and what a reader has to know about it."""
    rows = sum(len(table.layers) for table in tables.values())
    columns = min(max(CELLS // rows, COLUMNS.start), COLUMNS.stop)
    shown = {
        key: thinned(table, columns, ratio=LAYER_METRICS[key[2]].centre == 1.0)
        for key, table in tables.items()
    }
    most = max(len(table.steps) for table in tables.values())
    if most <= columns:
        return shown, ()
    remark = (
        f"{most:,} steps in {columns} columns: each shows, layer by layer, the value of its "
        "stretch that is furthest from 0 (an error ratio: from 1x), at that value's own step."
    )
    return shown, (remark,)


_Traced = Sequence[tuple[dict[str, str], LayerTable]]
"""Tables, each with what a reader chooses to see it."""


def _layer_by_step(traced: _Traced, remarks: tuple[str, ...]) -> Chart:
    layers = max(len(table.layers) for _, table in traced)
    return make_chart(
        "deviation-map",
        "Layer by step",
        [layer_map(table, LAYER_METRICS[meta["metric"]].centre, meta) for meta, table in traced],
        caption=(
            "The first layer on top. A bias's colours reach to 4 times its median size: one of an "
            "attention that fails is any number of ULPs."
        ),
        good="even colour; error ratios near or below 1x; bias near 0.",
        bad="a layer that stands out, or a colour that deepens from left to right.",
        height=150 + max(150, min(34 * layers, 900)),
        xaxis={**STEP_AXIS, "type": "category"},
        yaxis=ROW_AXIS,
        remarks=remarks,
    )


def _layer_curves(traced: _Traced, remarks: tuple[str, ...]) -> Chart:
    axes = {name: (_wrapped(metric.label), metric.scale) for name, metric in LAYER_METRICS.items()}
    title, scale = axes[traced[0][0]["metric"]]
    layouts = {
        name: {"yaxis.title.text": title, "yaxis.type": scale}
        for name, (title, scale) in axes.items()
    }
    return make_chart(
        "deviation-curves",
        "Each layer over the steps",
        [trace for meta, table in traced for trace in _layer_lines(table, meta)],
        caption="Dark is the first layer, bright the last; hovering names them.",
        good="flat lines: attention is as exact late in training as at the start.",
        bad=(
            "a steady climb, or a bias that keeps one sign: errors of one sign add up over the "
            "steps, which no absolute measure shows."
        ),
        height=HEIGHT,
        showlegend=all(len(table.layers) <= MOST_NAMED for _, table in traced),
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": title}, "type": scale},
        meta={"metric": layouts},
        remarks=remarks,
    )


def _wrapped(title: str) -> str:
    """Break an axis title in two so that it fits beside a chart of 430 px."""
    words = title.split()
    half = len(words) // 2 + 1
    return " ".join(words[:half]) + "<br>" + " ".join(words[half:])


def _layer_lines(table: LayerTable, meta: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a line for each layer, from dark to bright, shown where `meta` is chosen."""
    # the ends of Viridis vanish on a dark and on a white page
    count = len(table.layers)
    places = [0.15 + 0.7 * index / max(1, count - 1) for index in range(count)]
    colours = sample_colorscale("Viridis", places)
    return [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(at) <= 40 else "lines",
            "x": plotly_steps(at),
            "y": np.where(np.isfinite(values), values, np.nan),
            "name": label(layer),
            "line": {"color": colour, "width": 2},
            "meta": dict(meta),
            "hovertemplate": "%{y:.6g} at step %{x}",
        }
        for layer, at, values, colour in zip(
            table.layers, table.at, table.values, colours, strict=True
        )
    ]


def _lines_of(
    layers: Iterable[str], values: Callable[[str], Mapping[int, float]], meta: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a line for each layer that has `values`."""
    table = {layer: found for layer in layers if (found := values(layer))}
    return _layer_lines(LayerTable.of_steps(table), meta) if table else []


def _heads(observed: Sequence[ShadowMetrics]) -> Section | None:
    """Return a map of layer by head: a planted error in one head is one bright cell."""
    traces = []
    for one in observed:
        heads = one.parts("head")
        columns = [head.replace("_", " ") for head in heads]
        for what in one.compared:
            for metric in (name for name, each in LAYER_METRICS.items() if each.scale == "log"):
                rows = {
                    layer: [one.worst(layer, what, metric, head) for head in heads]
                    for layer in one.layers
                }
                if any(value is not None for row in rows.values() for value in row):
                    meta = {**one.choice, "what": what, "metric": metric}
                    traces.append(log_map(rows, columns, meta))
    if not traces:
        return None
    chart = make_chart(
        "heads",
        "Layer by head",
        traces,
        caption=f"{LARGEST}; colours are logarithmic.",
        good="even colour.",
        bad="a single cell, or a single row, that stands out.",
        height=150 + max(150, 34 * max(len(one.layers) for one in observed)),
        xaxis={"type": "category"},
        yaxis=ROW_AXIS,
    )
    return section_of(chart, "Which head")


def _streams(observed: Sequence[ShadowMetrics]) -> Section | None:
    """Return bars of error made in each layer, and of error that earlier layers brought in."""
    looks = {
        "out": ("made here", "#d55e00"),
        "carried": ("carried in", "#0072b2"),
        "total": ("in all", "#8c8c8c"),
    }
    traces = []
    for one in observed:
        for what, (title, colour) in looks.items() if "total" in one.compared else ():
            values = [one.worst(layer, what, "rel_fro") for layer in one.layers]
            if any(values):
                traces.append(
                    {
                        "type": "bar",
                        "x": [label(layer) for layer in one.layers],
                        "y": values,
                        "name": title,
                        "marker": {"color": colour},
                        "hovertemplate": "%{x}: %{y:.6g}",
                        "meta": dict(one.choice),
                    }
                )
    if not traces:
        return None
    chart = make_chart(
        "streams",
        "Made here or carried in",
        traces,
        caption="Relative Frobenius error of out, the largest over the steps looked at.",
        good="what is carried in grows slowly from layer to layer.",
        bad="a layer whose own bar is the highest: the error is made there.",
        height=400,
        xaxis={"type": "category"},
        yaxis={**LOG_AXIS, "title": {"text": "relative error"}},
        barmode="group",
    )
    intro = (
        "The forward pass was run a second time in the candidate's own stream. Made here: the "
        "layer on the baseline's inputs. Carried in: what its own inputs add to that."
    )
    return section_of(chart, "Local or inherited", intro=intro)


def _histogram(observed: Sequence[ShadowMetrics]) -> Section | None:
    """Return the shares of errors by size in ULPs, a line for each layer."""
    edges = [f"{edge:g}" for edge in ULP_EDGES]
    inner = [f"{low} to {high}" for low, high in pairwise(edges)]
    bins = [f"below {edges[0]}", *inner, f"above {edges[-1]}"]

    def shares(one: ShadowMetrics, what: str, layer: str) -> dict[int, float]:
        counts = one.counts(deviation_name(layer, what, ULP_HISTOGRAM, shadow=one.shadow))
        total = sum(counts)
        usual = total and len(counts) == len(bins)
        return {place: count / total for place, count in enumerate(counts)} if usual else {}

    traces = []
    for one in observed:
        for what in one.compared:
            lines = _lines_of(one.layers, partial(shares, one, what), {**one.choice, "what": what})
            for line in lines:
                drawn = [float(f"{y:.7g}") or None for y in line["y"].tolist()]
                traces.append({**line, "x": bins, "y": drawn, "hovertemplate": "%{x}: %{y:.4%}"})
    if not traces:
        return None
    least = min(y for trace in traces for y in trace["y"] if y)
    chart = make_chart(
        "histogram",
        "Errors in units of the last place",
        traces,
        caption=(
            "Share of all values of all steps that were looked at. Two results of one format "
            "differ by whole ULPs, so between 0.5 and 1 there is next to nothing."
        ),
        good="a narrow peak that is the same on both sides of zero.",
        bad="one side higher than the other: a bias; long tails: cancellation or a wrong mask.",
        height=HEIGHT,
        xaxis={"type": "category", "title": {"text": "error in ULPs"}},
        yaxis={
            "type": "log",
            "title": {"text": "share of values"},
            "dtick": 1,
            "range": [math.floor(math.log10(least)) - 0.1, 0.1],
        },
    )
    return section_of(chart, "How large, in which direction")


def _positions(observed: Sequence[ShadowMetrics]) -> Section | None:
    """Return the error along the sequence, a line for each layer."""

    def largest(one: ShadowMetrics, what: str, metric: str, layer: str) -> dict[int, float]:
        values = [one.worst(layer, what, metric, part) for part in one.parts("positions")]
        is_measured = any(value is not None for value in values)
        return {place: v or math.nan for place, v in enumerate(values)} if is_measured else {}

    traces = []
    for one in observed:
        parts = [part.removeprefix("positions_") for part in one.parts("positions")]
        ranges = [part.replace("_", " to ") for part in parts]
        for what in one.compared:
            for metric in LAYER_METRICS:
                meta = {**one.choice, "what": what, "metric": metric}
                for line in _lines_of(one.layers, partial(largest, one, what, metric), meta):
                    hover = "%{y:.6g} at positions %{x}"
                    traces.append({**line, "x": ranges, "hovertemplate": hover})
    if not traces:
        return None
    chart = make_chart(
        "positions",
        "Along the sequence",
        traces,
        caption=f"{LARGEST}.",
        good="flat, or falling where a longer softmax averages more.",
        bad="a jump at one range: a block's edge, a mask, a window.",
        height=HEIGHT,
        xaxis={"type": "category", "title": {"text": "positions"}},
        yaxis={"title": {"text": "deviation"}},
    )
    return section_of(chart, "Which positions")


def _watched(observed: Sequence[ShadowMetrics]) -> Section | None:
    """Return what was watched inside of attention, a line for each layer."""
    traces = [
        trace
        for one in observed
        for name in one.watched
        for trace in _lines_of(
            one.layers,
            lambda layer, one=one, name=name: one.series(watch_name(name, layer=layer)),
            {**one.choice, "figure": name},
        )
    ]
    if not traces:
        return None
    names = dict.fromkeys(trace["meta"]["figure"] for trace in traces)
    chart = make_chart(
        "watched",
        "Inside attention",
        traces,
        caption="Dark is the first layer, bright the last.",
        good="steady values; no repeated ones; a sum of delta that wanders around zero.",
        bad="logits towards 1e4, entropy towards 0, a sum of delta that only grows.",
        height=HEIGHT,
        xaxis=STEP_AXIS,
        yaxis={"title": {"text": label(next(iter(names)))}},
        meta={"figure": {name: {"yaxis.title.text": label(name)} for name in names}},
    )
    return section_of(chart, "What failures announce themselves by")
