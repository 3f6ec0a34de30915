"""Heat maps of the report: positive values on a log scale, and deviations by layer and step.

Leaves out the charts that hold them (`attention_charts`, `weight_charts`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stability.analysis.probe_records import LayerTable
from stability.report.page.chart import label
from stability.report.view.robust_limit import robust_limit

__all__ = ["ROW_AXIS", "layer_map", "log_map", "plotly_steps"]

ROW_AXIS = {"type": "category", "autorange": "reversed", "showgrid": False}
"""The y axis of named rows, the first on top."""
MOST_TICKS = 8
LOOK = {"type": "heatmap", "xgap": 1, "ygap": 1}


def log_map(
    rows: Mapping[str, Sequence[float | None]],
    columns: Sequence[str],
    meta: Mapping[str, str],
    *,
    column: str = "%{x}",
) -> dict[str, Any]:
    """Return the trace of a map of positive values over many decades, a row for each name.

    `column` is how hovering names a cell's column. A cell of 0, NaN or infinity is empty, and
    hovering says which it is; None counts as NaN.
    """
    values = [[math.nan if value is None else value for value in row] for row in rows.values()]
    logs = [[_log10(value) for value in row] for row in values]
    finite = [log for row in logs for log in row if log is not None]
    ticks = range(math.floor(min(finite, default=0)), math.ceil(max(finite, default=0)) + 1)
    every = math.ceil(len(ticks) / MOST_TICKS)
    return {
        **LOOK,
        "x": list(columns),
        "y": [label(name) for name in rows],
        "z": logs,
        "customdata": [[f"{value:.6g}" for value in row] for row in values],
        "hovertemplate": f"%{{y}}, {column}: %{{customdata}}<extra></extra>",
        "meta": dict(meta),
        "colorscale": "Viridis",
        "colorbar": {
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": list(ticks)[::every],
            "ticktext": [f"1e{tick}".replace("-", "\N{MINUS SIGN}") for tick in ticks][::every],
        },
    }


def _log10(value: float) -> float | None:
    return float(f"{math.log10(value):.6g}") if math.isfinite(value) and value > 0 else None


def layer_map(table: LayerTable, centre: float | None, meta: Mapping[str, str]) -> dict[str, Any]:
    """Return the trace of a map of layer by step.

    Colours are symmetric around `centre`: 0, or 1 for a ratio, whose colours are by its log2;
    with None they run from the smallest to the largest value.
    """
    heights = _heights(table.values, centre)
    finite = np.abs(heights[np.isfinite(heights)])
    trace = {
        **LOOK,
        "x": [str(step) for step in table.steps.tolist()],
        "y": [label(layer) for layer in table.layers],
        "z": _compact(heights),
        "meta": dict(meta),
        "colorscale": "Viridis" if centre is None else "PuOr_r",
        "colorbar": {"thickness": 12, "outlinewidth": 0, "exponentformat": "power"},
        **_hover(table, centre),
    }
    if centre == 0.0:
        limit = robust_limit(finite.tolist())
        trace |= {"zmin": -limit, "zmax": limit}
    if centre == 1.0:
        limit = max(1, math.ceil(finite.max(initial=1.0)))
        ticks = sorted({-limit, -(limit // 2), 0, limit // 2, limit})
        trace |= {"zmin": -limit, "zmax": limit}
        trace["colorbar"] |= {"tickvals": ticks, "ticktext": [f"{2.0**t:.3g}x" for t in ticks]}
    return trace


def plotly_steps(steps: NDArray[np.int64]) -> NDArray[np.number]:
    """Return `steps` as plotly can store them: its arrays of whole numbers end at 32 bits."""
    return steps if np.abs(steps).max(initial=0) < 2**31 else steps.astype(np.float64)


def _heights(values: NDArray[np.float64], centre: float | None) -> NDArray[np.float64]:
    """Return what the colours stand for: log2 of a ratio, else the value; NaN is an empty cell."""
    with np.errstate(divide="ignore", invalid="ignore"):
        heights = np.log2(values) if centre == 1.0 else values
    return np.where(np.isfinite(heights), heights, np.nan)


def _hover(table: LayerTable, centre: float | None) -> dict[str, Any]:
    """Return the text that hovering a cell shows.

    The chart holds each cell's position and value already; only what is missing there is stored.
    """
    step, value, stored = "%{x}", "%{z:.5g}", {}
    if not np.array_equal(table.at, np.broadcast_to(table.steps, table.at.shape)):
        step, stored["text"] = "%{text}", plotly_steps(table.at)
    if centre == 1.0:
        value, stored["customdata"] = "%{customdata:.5g}", _compact(table.values)
    return {**stored, "hovertemplate": f"%{{y}}, step {step}: {value}<extra></extra>"}


def _compact(values: NDArray[np.float64]) -> NDArray[np.floating]:
    """Return `values` in FP32, whose 7 digits are more than is shown; in FP64 if out of range."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    limits = np.finfo(np.float32)
    if sizes.size and (sizes.max() > limits.max or sizes.min() < limits.tiny):
        return values
    return values.astype(np.float32)
