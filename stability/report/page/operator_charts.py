"""Charts of one attention operator's error against the FP64 golden: by rounding point, by sweep.

A study's report shows the waterfalls on record; `stability deviate` writes pages of its own.
Leaves out the measuring (`probe.microbenchmark`) and the printed tables (`terminal.deviation`).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.io

from stability.analysis.study_records import RecordedStudy
from stability.records.atomic_files import write_text
from stability.records.metric_table import DEVIATION_METRICS
from stability.records.paths import RunPaths
from stability.records.waterfall_record import WaterfallRecord, read_waterfalls
from stability.report.page.chart import (
    LOG_AXIS,
    Section,
    label,
    make_chart,
    make_figure,
    section_of,
)
from stability.report.terminal.deviation import metric_of
from stability.report.view.palette import GREY, OKABE_ITO

__all__ = ["waterfall_section", "write_sweep_page", "write_waterfall_page"]

LOWERED, RAISED = OKABE_ITO[:2]
NOISE = 1e-12
"""An error below this is FP64's own."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""The lines of a sweep: Okabe and Ito's palette with black for its yellow, which fades on white."""


def waterfall_section(study: RecordedStudy) -> Section | None:
    """Return the waterfalls of the study's runs, one at a time; None if there are none.

    A file that can't be read is named instead of drawn.
    """
    found, remarks = [], []
    for arm in study.arms:
        for run in arm.runs.values():
            try:
                found += read_waterfalls([run.paths])
            except (ValueError, OSError) as error:
                remarks.append(f"Not drawn: {error}.")
    traces = [trace for run, record in found for trace in _waterfall(run, record)]
    if not traces:
        return None
    chart = make_chart(
        "waterfall",
        "Error by rounding point",
        traces,
        caption=(
            "Relative error (Frobenius) against the FP64 golden, on the run's own q, k and v. Bar: "
            "with that point alone rounded, everything else in FP64. Diamond: with that point "
            "alone in FP64, all else as the profile says. Line: the profile as it is. In the order "
            "of the computation; a point without a bar leaves this result alone (below 1e-12)."
        ),
        good="no bar near the line: no single rounding makes the error.",
        bad=(
            "a bar that reaches the line, and a diamond far below it at the same point: that "
            "rounding makes the error, and widening it alone would mend it."
        ),
        height=480,
        xaxis={"type": "category", "tickangle": -40},
        yaxis={**LOG_AXIS, "title": {"text": "relative error"}},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        remarks=tuple(remarks),
    )
    return section_of(chart, "Which rounding makes the error")


def _waterfall(run: RunPaths, record: WaterfallRecord) -> Iterator[dict[str, Any]]:
    name = f"{run.arm}, seed {run.seed}: {record.name}"
    diamond = {"color": RAISED, "symbol": "diamond", "size": 10}
    bar = {"type": "bar", "marker": {"color": LOWERED}}
    markers = {"type": "scatter", "mode": "markers", "marker": diamond}
    points = [_spaced(p) for p in dict.fromkeys(step["point"] for step in record.steps) if p]
    for what in record.steps[0]["errors"]:
        meta = {"waterfall": name, "result": what}
        for change, title, look in (
            ("lowered", "this point alone rounded", bar),
            ("raised", "this point alone in FP64", markers),
        ):
            steps = [step for step in record.steps if step["change"] == change]
            errors = [step["errors"][what] for step in steps]
            yield {
                "name": title,
                "x": [_spaced(step["point"]) for step in steps],
                "y": [error if error > NOISE else None for error in errors],
                "customdata": [label(step["format"]) for step in steps],
                "hovertemplate": "%{x} in %{customdata}: %{y:.6g}<extra></extra>",
                "meta": meta,
                **look,
            }
        for whole in (step for step in record.steps if step["change"] == "none"):
            yield {
                "type": "scatter",
                "mode": "lines",
                "name": "the profile as it is",
                "x": points,
                "y": [whole["errors"][what] or None] * len(points),
                "hovertemplate": "%{y:.6g}<extra></extra>",
                "line": {"color": GREY, "width": 1.5, "dash": "dash"},
                "meta": meta,
            }


def _spaced(point: str) -> str:
    return label(point.replace("_", " "))


def write_sweep_page(
    path: Path, rows: Sequence[Mapping[str, Any]], varied: Sequence[str], metric: str
) -> None:
    """Write a page of `metric` against the last varied field, a line for each of the rest.

    The page is one HTML file that holds plotly too.
    """
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
            "line": {"color": COLOURS[index % len(COLOURS)]},
        }
        for index, (name, points) in enumerate(lines.items())
    ]
    places = sorted({x for points in lines.values() for x, _ in points}, key=str)
    numeric = all(isinstance(x, int | float) for x in places)
    scale = DEVIATION_METRICS[metric.rpartition("/")[2]].scale
    _write(
        path,
        traces,
        xaxis={
            "title": {"text": along},
            "type": "log" if numeric else "category",
            "tickvals": places,
            "ticktext": [str(place) for place in places],
        },
        yaxis={"title": {"text": f"{metric}, against the FP64 golden"}, "type": scale},
    )


def write_waterfall_page(path: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    """Write a page of the error with each rounding point alone lowered, a group of bars a point."""
    lowered = [step for step in steps if step["change"] == "lowered"]
    traces = [
        {
            "type": "bar",
            "name": what,
            "x": [step["point"] for step in lowered],
            "y": [step["errors"][what] for step in lowered],
            "marker": {"color": colour},
        }
        for what, colour in zip(lowered[0]["errors"], COLOURS, strict=False)
    ]
    _write(
        path,
        traces,
        xaxis={"title": {"text": "rounding point, alone lowered"}, "tickangle": -40},
        yaxis={"title": {"text": "relative error against the FP64 golden"}, "type": "log"},
    )


def _write(path: Path, traces: Sequence[Mapping[str, Any]], **axes: Any) -> None:
    figure = make_figure(traces, height=520, **axes)
    figure.update_layout(paper_bgcolor="white", plot_bgcolor="white", margin={"t": 30, "r": 30})
    figure.update_layout(legend={"y": 1.02, "yanchor": "bottom"})
    write_text(path, plotly.io.to_html(figure, include_plotlyjs=True, full_html=True))
