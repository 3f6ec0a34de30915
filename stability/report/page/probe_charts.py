"""The charts of what was found inside attention: heads, made here or carried in, what was watched.

For the arms of a study or the shadows of a probe. Leaves out layers over steps
(`deviation_charts`), and how errors spread over sizes and positions (`probe_spread_charts`).
"""

import math
from collections.abc import Sequence
from typing import Any

from stability.analysis.layer_tables import LayerTable
from stability.analysis.probe_records import Observed, Probed, observed_shadows, shadow_label
from stability.records.metric_names import watch_name
from stability.report.page.chart import LOG_AXIS, Chart, Section, choices_of, label, make_figure
from stability.report.page.colour_scale import log_colours
from stability.report.page.deviation_charts import (
    DEVIATION_METRICS,
    Tables,
    deviation_section,
    layer_lines,
)
from stability.report.page.probe_spread_charts import histogram_section, position_section

__all__ = ["inside_sections", "probe_sections"]

INTRO = (
    "Each attention call that was looked at has been repeated on the same inputs, forward and, "
    "under the gradient that the run itself sent back, backward."
)


def probe_sections(probed: Probed) -> list[Section]:
    """Return a section for each kind of figure that the probe has recorded."""
    deviation = deviation_section(_tables(probed), "shadow", INTRO)
    found = inside_sections(observed_shadows(probed))
    return [deviation, *found] if deviation else found


def inside_sections(observed: Sequence[Observed]) -> list[Section]:
    """Return a section for each kind of figure that is on record."""
    sections = [
        _heads(observed),
        _streams(observed),
        histogram_section(observed),
        position_section(observed),
        _watched(observed),
    ]
    return [section for section in sections if section is not None]


def _tables(probed: Probed) -> Tables:
    tables = {}
    for shadow in probed.shadows:
        for what in probed.compared:
            for metric in DEVIATION_METRICS:
                table = {
                    layer: values
                    for layer in probed.layers
                    if (values := probed.series(layer, what, metric, shadow=shadow))
                }
                if table:
                    tables[shadow_label(shadow), what, metric] = LayerTable.of_steps(table)
    return tables


def _heads(observed: Sequence[Observed]) -> Section | None:
    """Return a map of layer by head: a planted error in one head is one bright cell."""
    metrics = [metric for metric in DEVIATION_METRICS if metric != "bias_ulp"]
    traces = []
    for one in observed:
        heads = one.parts("head")
        for what in one.compared:
            for metric in metrics:
                rows = [
                    [one.worst(layer, what, metric, head) for head in heads] for layer in one.layers
                ]
                if any(value is not None for row in rows for value in row):
                    meta = {**one.choice, "what": what, "metric": metric}
                    traces.append(_map(rows, one.layers, heads, meta))
    if not traces:
        return None
    chart = Chart(
        key="heads",
        title="Layer by head",
        caption="The largest over the steps that were looked at; colours are logarithmic.",
        good="even colour.",
        bad="a single cell, or a single row, that stands out.",
        figure=make_figure(
            traces,
            height=150 + max(150, 34 * max(len(one.layers) for one in observed)),
            xaxis={"type": "category"},
            yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
        ),
    )
    return Section(
        key="heads", title="Which head", intro="", charts=(chart,), choices=choices_of(traces)
    )


def _map(
    rows: list[list[float | None]],
    layers: Sequence[str],
    heads: Sequence[str],
    meta: dict[str, str],
) -> dict[str, Any]:
    return {
        "type": "heatmap",
        "x": [head.replace("_", " ") for head in heads],
        "y": [label(layer) for layer in layers],
        "hovertemplate": "%{y}, %{x}: %{customdata}<extra></extra>",
        "xgap": 1,
        "ygap": 1,
        "meta": meta,
        **log_colours([[math.nan if value is None else value for value in row] for row in rows]),
    }


def _streams(observed: Sequence[Observed]) -> Section | None:
    """Return bars of error made in each layer, and of error that earlier layers brought in."""
    titles = {"out": "made here", "carried": "carried in", "total": "in all"}
    colours = {"out": "#d55e00", "carried": "#0072b2", "total": "#8c8c8c"}
    traces = []
    for one in observed:
        for what, title in titles.items() if "total" in one.compared else ():
            values = [one.worst(layer, what, "rel_fro") for layer in one.layers]
            if any(values):
                traces.append(
                    {
                        "type": "bar",
                        "x": [label(layer) for layer in one.layers],
                        "y": values,
                        "name": title,
                        "marker": {"color": colours[what]},
                        "hovertemplate": "%{x}: %{y:.6g}",
                        "meta": dict(one.choice),
                    }
                )
    if not traces:
        return None
    chart = Chart(
        key="streams",
        title="Made here or carried in",
        caption="Relative Frobenius error of out, the largest over the steps looked at.",
        good="what is carried in grows slowly from layer to layer.",
        bad="a layer whose own bar is the highest: the error is made there.",
        figure=make_figure(
            traces,
            height=400,
            xaxis={"type": "category"},
            yaxis={**LOG_AXIS, "title": {"text": "relative error"}},
            barmode="group",
        ),
    )
    intro = (
        "The forward pass was run a second time in the candidate's own stream. Made here: the "
        "layer on the baseline's inputs. Carried in: what its own inputs add to that."
    )
    return Section(
        key="streams",
        title="Local or inherited",
        intro=intro,
        charts=(chart,),
        choices=choices_of(traces),
    )


def _watched(observed: Sequence[Observed]) -> Section | None:
    """Return what was watched inside of attention, a line for each layer."""
    traces = []
    for one in observed:
        for name in one.watched:
            table = {
                layer: values
                for layer in one.layers
                if (values := one.series(watch_name(name, layer=layer)))
            }
            traces += (
                layer_lines(LayerTable.of_steps(table), {**one.choice, "figure": name})
                if table
                else []
            )
    if not traces:
        return None
    choices = choices_of(traces)
    names = choices["figure"]
    chart = Chart(
        key="watched",
        title="Inside attention",
        caption="Dark is the first layer, bright the last.",
        good="steady values; no repeated ones; a sum of delta that wanders around zero.",
        bad="logits towards 1e4, entropy towards 0, a sum of delta that only grows.",
        figure=make_figure(
            traces,
            height=430,
            xaxis={"title": {"text": "step"}},
            yaxis={"title": {"text": label(names[0])}},
            meta={"figure": {name: {"yaxis.title.text": label(name)} for name in names}},
        ),
    )
    return Section(
        key="watched",
        title="What failures announce themselves by",
        intro="",
        charts=(chart,),
        choices=choices,
    )
