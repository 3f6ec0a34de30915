"""The charts of a probe: heads, what is made here or carried in, and what was watched.

Leaves out the page (`probe_page`), layers over steps, which a study has too (`deviation_charts`),
and how errors spread over sizes and positions (`probe_spread_charts`).
"""

import math
from typing import Any

from stability.analysis.layer_tables import LayerTable
from stability.analysis.probed import Probed, shadow_label
from stability.records.names import watch_name
from stability.report.chart import Chart, Section, choices_of, label, make_figure
from stability.report.deviation_charts import (
    DEVIATION_METRICS,
    Tables,
    deviation_section,
    layer_lines,
)
from stability.report.probe_spread_charts import histogram_section, position_section

__all__ = ["probe_sections"]

INTRO = (
    "Each attention call that was looked at has been repeated on the same inputs, forward and, "
    "under the gradient that the run itself sent back, backward."
)


def probe_sections(probed: Probed) -> list[Section]:
    """Return a section for each kind of figure that the probe has recorded."""
    sections = [
        deviation_section(_tables(probed), "shadow", INTRO),
        _heads(probed),
        _streams(probed),
        histogram_section(probed),
        position_section(probed),
        _watched(probed),
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


def _heads(probed: Probed) -> Section | None:
    """Return a map of layer by head: a planted error in one head is one bright cell."""
    heads, traces = probed.parts("head"), []
    metrics = [metric for metric in DEVIATION_METRICS if metric != "bias_ulp"]
    for shadow in probed.shadows:
        for what in probed.compared:
            for metric in metrics:
                rows = [
                    [probed.worst(layer, what, metric, shadow=shadow, part=head) for head in heads]
                    for layer in probed.layers
                ]
                if any(value is not None for row in rows for value in row):
                    meta = {"shadow": shadow_label(shadow), "what": what, "metric": metric}
                    traces.append(_map(rows, probed.layers, heads, meta))
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
            height=150 + max(150, 34 * len(probed.layers)),
            xaxis={"type": "category"},
            yaxis={"autorange": "reversed", "showgrid": False},
        ),
    )
    return Section(
        key="heads", title="Which head", intro="", charts=(chart,), choices=choices_of(traces)
    )


def _map(
    rows: list[list[float | None]], layers: list[str], heads: list[str], meta: dict[str, str]
) -> dict[str, Any]:
    z = [[math.log10(value) if value else None for value in row] for row in rows]
    finite = [value for row in z for value in row if value is not None]
    ticks = range(math.floor(min(finite, default=0)), math.ceil(max(finite, default=0)) + 1)
    ticks = ticks if len(ticks) <= 8 else range(ticks.start, ticks.stop, math.ceil(len(ticks) / 8))
    return {
        "type": "heatmap",
        "x": [head.replace("_", " ") for head in heads],
        "y": [label(layer) for layer in layers],
        "z": z,
        "customdata": [["–" if v is None else f"{v:.3g}" for v in row] for row in rows],  # noqa: RUF001 a dash for nothing
        "hovertemplate": "%{y}, %{x}: %{customdata}<extra></extra>",
        "xgap": 1,
        "ygap": 1,
        "meta": meta,
        "colorscale": "Viridis",
        "colorbar": {
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": list(ticks),
            "ticktext": [f"1e{tick}" for tick in ticks],
        },
    }


def _streams(probed: Probed) -> Section | None:
    """Return bars of error made in each layer, and of error that earlier layers brought in."""
    titles = {"out": "made here", "carried": "carried in", "total": "in all"}
    colours = {"out": "#d55e00", "carried": "#0072b2", "total": "#8c8c8c"}
    traces = []
    for shadow in probed.shadows if "total" in probed.compared else ():
        for what, title in titles.items():
            values = [
                probed.worst(layer, what, "rel_fro", shadow=shadow) for layer in probed.layers
            ]
            if any(values):
                traces.append(
                    {
                        "type": "bar",
                        "x": [label(layer) for layer in probed.layers],
                        "y": values,
                        "name": title,
                        "marker": {"color": colours[what]},
                        "hovertemplate": "%{x}: %{y:.3g}",
                        "meta": {"shadow": shadow_label(shadow)},
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
            yaxis={"type": "log", "title": {"text": "relative error"}},
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


def _watched(probed: Probed) -> Section | None:
    """Return what was watched inside of attention, a line for each layer."""
    names = dict.fromkeys(
        name.split("/")[2]
        for name in probed.metrics
        if name.startswith("watch/") and name.count("/") == 2
    )
    traces = []
    for name in names:
        table = {
            layer: values
            for layer in probed.layers
            if (values := probed.by_step(watch_name(name, layer=layer)))
        }
        traces += layer_lines(LayerTable.of_steps(table), {"figure": name}) if table else []
    if not traces:
        return None
    chart = Chart(
        key="watched",
        title="Inside attention",
        caption="Dark is the first layer, bright the last.",
        good="steady values; no repeated ones; a sum of delta that wanders around zero.",
        bad="logits towards 1e4, entropy towards 0, a sum of delta that only grows.",
        figure=make_figure(
            traces, height=430, xaxis={"title": {"text": "step"}}, yaxis={"title": {"text": ""}}
        ),
    )
    return Section(
        key="watched",
        title="What failures announce themselves by",
        intro="",
        charts=(chart,),
        choices=choices_of(traces),
    )
