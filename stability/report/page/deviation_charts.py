"""Deviation inside attention: layer by layer, step by step, one result and metric at a time.

Forward and backward, for the arms of a study or the shadows of a probe. Leaves out single heads and
ranges of positions (`probe_charts`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plotly.colors import sample_colorscale

from stability.analysis.layer_tables import LayerTable, layer_table, thinned
from stability.analysis.study_records import RecordedStudy
from stability.records.metric_names import COMPARED
from stability.report.page.chart import Chart, Section, label, make_figure
from stability.report.view.robust_limit import robust_limit

__all__ = [
    "DEVIATION_METRICS",
    "Tables",
    "deviation_section",
    "layer_lines",
    "study_deviation",
]

CELLS = 150_000
"""All tables of a page share this many cells, at some 25 bytes each."""
COLUMNS = range(24, 400)
"""The fewest and the most columns that a table is thinned to."""
NAMED = 16
"""The most layers that a legend has room for."""


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

Tables = Mapping[tuple[str, str, str], LayerTable]
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
        if (table := layer_table(arm, what, metric))
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
    shown, remarks = _thinned(tables)
    return Section(
        key="deviation",
        title="Deviation inside attention",
        intro=intro,
        charts=(_heat_map(shown, meta, remarks), _curves(shown, meta, remarks)),
        choices={group: groups, "what": found[0], "metric": found[1]},
    )


def _thinned(tables: Tables) -> tuple[Tables, tuple[str, ...]]:
    """Return what of `tables` is shown, and what a reader has to know about it."""
    rows = sum(len(table.layers) for table in tables.values())
    columns = min(max(CELLS // rows, COLUMNS.start), COLUMNS.stop)
    shown = {
        key: thinned(table, columns, ratio=DEVIATION_METRICS[key[2]].centre == 1.0)
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


_Meta = Mapping[tuple[str, str, str], dict[str, str]]


def _heat_map(tables: Tables, meta: _Meta, remarks: tuple[str, ...]) -> Chart:
    layers = max(len(table.layers) for table in tables.values())
    figure = make_figure(
        [_heat(table, key[2], meta[key]) for key, table in tables.items()],
        height=150 + max(150, min(34 * layers, 900)),
        xaxis={"title": {"text": "step"}, "type": "category"},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )
    return Chart(
        key="deviation-map",
        title="Layer by step",
        caption=(
            "The first layer on top. A bias's colours reach to 4 times its median size: one of an "
            "attention that fails is any number of ULPs."
        ),
        good="even colour; error ratios near or below 1x; bias near 0.",
        bad="a layer that stands out, or a colour that deepens from left to right.",
        figure=figure,
        remarks=remarks,
    )


def _heat(table: LayerTable, metric: str, meta: Mapping[str, str]) -> dict[str, Any]:
    kind = DEVIATION_METRICS[metric]
    heights = _heights(table.values, kind)
    finite = np.abs(heights[np.isfinite(heights)])
    trace = {
        "type": "heatmap",
        "x": [str(step) for step in table.steps.tolist()],
        "y": [label(layer) for layer in table.layers],
        "z": _compact(heights),
        "xgap": 1,
        "ygap": 1,
        "meta": dict(meta),
        "colorscale": "Viridis" if kind.centre is None else "PuOr_r",
        "colorbar": {"thickness": 12, "outlinewidth": 0, "exponentformat": "power"},
        **_hover(table, kind),
    }
    if kind.centre is not None:
        reach = robust_limit(finite.tolist())
        trace |= {"zmin": -reach, "zmax": reach}
    if kind.centre == 1.0:
        reach = max(1, math.ceil(finite.max(initial=1.0)))
        ticks = sorted({-reach, -(reach // 2), 0, reach // 2, reach})
        trace |= {"zmin": -reach, "zmax": reach}
        trace["colorbar"] |= {"tickvals": ticks, "ticktext": [f"{2.0**t:.3g}x" for t in ticks]}
    return trace


def _hover(table: LayerTable, kind: _Metric) -> dict[str, Any]:
    """Return what a cell says; only what neither its place nor its colour says is stored."""
    step, value, stored = "%{x}", "%{z:.5g}", {}
    if not np.array_equal(table.at, np.broadcast_to(table.steps, table.at.shape)):
        step, stored["text"] = "%{text}", _steps(table.at)
    if kind.centre == 1.0:
        value, stored["customdata"] = "%{customdata:.5g}", _compact(table.values)
    return {**stored, "hovertemplate": f"%{{y}}, step {step}: {value}<extra></extra>"}


def _heights(values: NDArray[np.float64], kind: _Metric) -> NDArray[np.float64]:
    """Return what the colours stand for: log2 of a ratio, else the value; NaN for no cell."""
    with np.errstate(divide="ignore", invalid="ignore"):
        heights = np.log2(values) if kind.centre == 1.0 else values
    return np.where(np.isfinite(heights), heights, np.nan)


def _compact(values: NDArray[np.float64]) -> NDArray[np.floating]:
    """Return `values` in FP32, whose 7 digits are more than is shown; FP64 if out of its range."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    limits = np.finfo(np.float32)
    if sizes.size and (sizes.max() > limits.max or sizes.min() < limits.tiny):
        return values
    return values.astype(np.float32)


def _steps(steps: NDArray[np.int64]) -> NDArray[np.number]:
    """Return `steps` so that plotly can store them: it has no whole numbers beyond 32 bits."""
    return steps if np.abs(steps).max(initial=0) < 2**31 else steps.astype(np.float64)


def _curves(tables: Tables, meta: _Meta, remarks: tuple[str, ...]) -> Chart:
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
        showlegend=all(len(table.layers) <= NAMED for table in tables.values()),
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
        caption="Dark is the first layer, bright the last; hovering names them.",
        good="flat lines: attention is as exact late in training as at the start.",
        bad=(
            "a steady climb, or a bias that keeps one sign: errors of one sign add up over the "
            "steps, which no absolute measure shows."
        ),
        figure=figure,
        remarks=remarks,
    )


def _wrapped(title: str) -> str:
    """Break an axis title in two so that it fits beside a chart of 430 px."""
    words = title.split()
    half = len(words) // 2 + 1
    return " ".join(words[:half]) + "<br>" + " ".join(words[half:])


def layer_lines(table: LayerTable, meta: Mapping[str, str]) -> Sequence[dict[str, Any]]:
    """Return a line for each layer, from dark to bright, shown where `meta` is chosen."""
    # the ends of Viridis vanish on a dark and on a white page
    count = len(table.layers)
    places = [0.15 + 0.7 * index / max(1, count - 1) for index in range(count)]
    colours = sample_colorscale("Viridis", places)
    return [
        {
            "type": "scatter",
            "mode": "lines+markers" if len(at) <= 40 else "lines",
            "x": _steps(at),
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
