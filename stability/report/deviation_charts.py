"""Deviation inside attention: layer by layer, step by step, one result and metric at a time.

Forward and backward, for the arms of a study or the shadows of a probe. Leaves out single heads and
ranges of positions (`probe_charts`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plotly.colors import sample_colorscale

from stability.analysis.probed import natural
from stability.analysis.recorded import RecordedArm, RecordedStudy
from stability.records.names import COMPARED, deviation_name, parse_deviation
from stability.report.chart import Chart, Section, label, make_figure, mean_over_seeds

__all__ = [
    "DEVIATION_METRICS",
    "Table",
    "Tables",
    "deviation_section",
    "layer_lines",
    "study_deviation",
]


@dataclass(frozen=True, slots=True)
class _Metric:
    title: str
    axis: str
    centre: float | None


DEVIATION_METRICS = {
    "rel_fro": _Metric("relative Frobenius deviation from the baseline attention", "log", None),
    "error_ratio": _Metric("error against FP64, candidate over baseline attention", "log", 1.0),
    "bias_ulp": _Metric("mean signed deviation (ULP of the output format)", "linear", 0.0),
}

Table = dict[str, dict[int, float]]
"""Layer -> step -> value."""

Tables = Mapping[tuple[str, str, str], Table]
"""(arm or shadow, what was compared, metric) -> table."""


def study_deviation(study: RecordedStudy) -> Section | None:
    """Return heat map and curves of the deviation per layer; None if nothing was probed.

    Arms that change the attention come first: they are what one looks for.
    """
    arms = sorted(study.arms, key=lambda arm: arm.axis != "attention")
    tables = {
        (arm.name, what, metric): table
        for arm in arms
        for what in COMPARED
        for metric in DEVIATION_METRICS
        if (table := _mean_table(arm, what, metric))
    }
    intro = (
        "At probed steps each attention call is repeated on the same inputs, forward and backward: "
        "candidate against baseline attention, and both against an FP64 golden. In arms that do "
        "not change the attention, the study's first shadow is the candidate. Mean over the seeds."
    )
    return deviation_section(tables, "arm", intro)


def deviation_section(tables: Tables, group: str, intro: str) -> Section | None:
    """Return the section of `tables`, whose first key is a choice called `group`, or None."""
    if not tables:
        return None
    groups = tuple(dict.fromkeys(key[0] for key in tables))
    found = [
        tuple(name for name in known if any(key[place] == name for key in tables))
        for place, known in ((1, COMPARED), (2, DEVIATION_METRICS))
    ]
    meta = {key: dict(zip((group, "what", "metric"), key, strict=True)) for key in tables}
    return Section(
        key="deviation",
        title="Deviation inside attention",
        intro=intro,
        charts=(_heat_map(tables, meta), _curves(tables, meta)),
        choices={group: groups, "what": found[0], "metric": found[1]},
    )


def _mean_table(arm: RecordedArm, what: str, metric: str) -> Table:
    layers = {
        (parts.layer, parts.shadow)
        for run in arm.runs.values()
        for name in run.metrics
        if (parts := parse_deviation(name)) and parts[1:3] == (what, metric) and not parts.part
    }
    first = min((shadow for _, shadow in layers), default="")
    table = {}
    for layer in sorted((layer for layer, shadow in layers if shadow == first), key=natural):
        name = deviation_name(layer, what, metric, shadow=first)
        seeds = {seed: run.series(name) for seed, run in arm.runs.items()}
        table[layer] = mean_over_seeds({seed: values for seed, values in seeds.items() if values})
    return table


_Meta = Mapping[tuple[str, str, str], dict[str, str]]


def _heat_map(tables: Tables, meta: _Meta) -> Chart:
    layers = max(len(table) for table in tables.values())
    figure = make_figure(
        [_heat(table, key[2], meta[key]) for key, table in tables.items()],
        height=150 + max(150, 34 * layers),
        xaxis={"title": {"text": "step"}, "type": "category"},
        yaxis={"autorange": "reversed", "showgrid": False},
    )
    return Chart(
        key="deviation-map",
        title="Layer by step",
        caption="The first layer on top.",
        good="even colour; error ratios near or below 1x; bias near 0.",
        bad="a layer that stands out, or a colour that deepens from left to right.",
        figure=figure,
    )


def _heat(table: Table, metric: str, meta: Mapping[str, str]) -> dict[str, Any]:
    steps = sorted({step for values in table.values() for step in values})
    values = [[table[layer].get(step, math.nan) for step in steps] for layer in table]
    kind = DEVIATION_METRICS[metric]
    z = [[_height(value, kind) for value in row] for row in values]
    finite = [value for row in z for value in row if value is not None]
    trace = {
        "type": "heatmap",
        "x": [str(step) for step in steps],
        "y": [label(layer) for layer in table],
        "z": z,
        "customdata": [[f"{value:.6g}" for value in row] for row in values],
        "hovertemplate": "%{y}, step %{x}: %{customdata}<extra></extra>",
        "xgap": 1,
        "ygap": 1,
        "meta": dict(meta),
        "colorscale": "Viridis" if kind.centre is None else "PuOr_r",
        "colorbar": {"thickness": 12, "outlinewidth": 0, "exponentformat": "power"},
    }
    if kind.centre is not None:
        reach = max((abs(value) for value in finite), default=0.0) or 1.0
        trace |= {"zmin": -reach, "zmax": reach}
    if kind.centre == 1.0:
        reach = max(1, math.ceil(max((abs(value) for value in finite), default=1.0)))
        ticks = sorted({-reach, -(reach // 2), 0, reach // 2, reach})
        trace |= {"zmin": -reach, "zmax": reach}
        trace["colorbar"] |= {"tickvals": ticks, "ticktext": [f"{2.0**t:.3g}x" for t in ticks]}
    return trace


def _height(value: float, kind: _Metric) -> float | None:
    """Return what the colour stands for: log2 of a ratio, else the value; None for no cell."""
    if not math.isfinite(value) or (kind.centre == 1.0 and value <= 0):
        return None
    return float(f"{math.log2(value) if kind.centre == 1.0 else value:.6g}")


def _curves(tables: Tables, meta: _Meta) -> Chart:
    first = next(iter(tables))[2]
    patches = {
        "metric": {
            key: {"yaxis.title.text": _wrapped(kind.title), "yaxis.type": kind.axis}
            for key, kind in DEVIATION_METRICS.items()
        }
    }
    figure = make_figure(
        [trace for key, table in tables.items() for trace in layer_lines(table, meta[key])],
        height=430,
        xaxis={"title": {"text": "step"}},
        yaxis={
            "title": {"text": _wrapped(DEVIATION_METRICS[first].title)},
            "type": DEVIATION_METRICS[first].axis,
        },
        meta=patches,
    )
    return Chart(
        key="deviation-curves",
        title="Each layer over the steps",
        caption="Dark is the first layer, bright the last.",
        good="flat lines: attention is as exact late in training as at the start.",
        bad=(
            "a steady climb, or a bias that keeps one sign: errors of one sign add up over the "
            "steps, which no absolute measure shows."
        ),
        figure=figure,
    )


def _wrapped(title: str) -> str:
    """Break an axis title in two so that it fits beside a chart of 430 px."""
    words = title.split()
    half = len(words) // 2 + 1
    return " ".join(words[:half]) + "<br>" + " ".join(words[half:])


def layer_lines(table: Table, meta: Mapping[str, str]) -> Sequence[dict[str, Any]]:
    """Return a line for each layer, from dark to bright, shown where `meta` is chosen."""
    # the ends of Viridis vanish on a dark and on a white page
    places = [0.15 + 0.7 * index / max(1, len(table) - 1) for index in range(len(table))]
    colours = sample_colorscale("Viridis", places)
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": list(values),
            "y": [value if math.isfinite(value) else None for value in values.values()],
            "name": label(layer),
            "line": {"color": colour, "width": 2},
            "meta": dict(meta),
            "hovertemplate": "%{y:.6g} at step %{x}",
        }
        for (layer, values), colour in zip(table.items(), colours, strict=True)
    ]
