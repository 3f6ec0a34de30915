"""The picture of `stability deviate`: one metric against one swept field, a line each of the rest.

One self-contained HTML file. Leaves out the table (`deviation_table`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.io

from stability.records.atomic_files import write_text
from stability.report.page.chart import label, make_figure
from stability.report.terminal.deviation import metric_of

__all__ = ["write_plot", "write_waterfall_plot"]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, which colour-blind readers tell apart."""


def write_plot(
    path: Path, rows: Sequence[Mapping[str, Any]], varied: Sequence[str], metric: str
) -> None:
    """Write `metric` against the last varied field; other fields and results make the lines."""
    along = varied[-1] if varied else "length"
    lines: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        names = [f"{name}={row['point'][name]}" for name in varied[:-1]]
        lines.setdefault(" ".join([*names, row["what"]]), []).append(
            (row["point"][along], metric_of(row, metric))
        )
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": label(name),
            "x": [x for x, _ in points],
            "y": [y for _, y in points],
            "line": {"color": _COLOURS[index % len(_COLOURS)]},
        }
        for index, (name, points) in enumerate(lines.items())
    ]
    places = sorted({x for points in lines.values() for x, _ in points}, key=str)
    numeric = all(isinstance(x, int | float) for x in places)
    _write(
        path,
        traces,
        xaxis={
            "title": {"text": along},
            "type": "log" if numeric else "category",
            "tickvals": places,
            "ticktext": [str(place) for place in places],
        },
        yaxis={"title": {"text": f"{metric}, against the FP64 golden"}, "type": _scale(metric)},
    )


def write_waterfall_plot(path: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    """Write the error of each point alone lowered, a group of bars a point."""
    lowered = [step for step in steps if step["change"] == "lowered"]
    traces = [
        {
            "type": "bar",
            "name": what,
            "x": [step["point"] for step in lowered],
            "y": [step["errors"][what] for step in lowered],
            "marker": {"color": colour},
        }
        for what, colour in zip(lowered[0]["errors"], _COLOURS, strict=False)
    ]
    _write(
        path,
        traces,
        xaxis={"title": {"text": "rounding point, alone lowered"}, "tickangle": -40},
        yaxis={"title": {"text": "relative error against the FP64 golden"}, "type": "log"},
    )


def _scale(metric: str) -> str:
    signed = metric.rpartition("/")[2] in ("bias", "bias_ulp", "cosine", "sqnr_db")
    return "linear" if signed else "log"


def _write(path: Path, traces: Sequence[Mapping[str, Any]], **axes: Any) -> None:
    figure = make_figure(traces, height=520, **axes)
    figure.update_layout(paper_bgcolor="white", plot_bgcolor="white", margin={"t": 30, "r": 30})
    figure.update_layout(legend={"y": 1.02, "yanchor": "bottom"})
    write_text(path, plotly.io.to_html(figure, include_plotlyjs=True, full_html=True))
