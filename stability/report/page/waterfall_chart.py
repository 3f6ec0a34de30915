"""Which rounding point makes the error of a run's attention, from the waterfalls on record.

Leaves out the measuring (`attention.waterfall`) and its page by itself (`deviation_plot`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from stability.analysis.study_records import RecordedStudy
from stability.records.paths import RunPaths
from stability.records.waterfall_record import WaterfallRecord, read_waterfalls
from stability.report.page.chart import LOG_AXIS, Chart, Section, choices_of, label, make_figure
from stability.report.view.palette import GREY, OKABE_ITO

__all__ = ["waterfall_section"]

LOWERED, RAISED = OKABE_ITO[:2]
NOISE = 1e-12
"""Below this an error is that of FP64 itself."""


def waterfall_section(study: RecordedStudy) -> Section | None:
    """Return the waterfalls of the study's runs, one at a time; None if there are none.

    A file that can't be read is named instead of drawn.
    """
    found, remarks = _read(study)
    traces = [trace for run, record in found for trace in _traces(run, record)]
    if not traces:
        return None
    chart = Chart(
        key="waterfall",
        title="Error by rounding point",
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
        figure=make_figure(
            traces,
            height=480,
            xaxis={"type": "category", "tickangle": -40},
            yaxis={**LOG_AXIS, "title": {"text": "relative error"}},
            legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        ),
        remarks=remarks,
    )
    return Section(
        key="waterfall",
        title="Which rounding makes the error",
        intro="",
        charts=(chart,),
        choices=choices_of(traces),
    )


def _read(
    study: RecordedStudy,
) -> tuple[list[tuple[RunPaths, WaterfallRecord]], tuple[str, ...]]:
    found, remarks = [], []
    for arm in study.arms:
        for run in arm.runs.values():
            try:
                found += read_waterfalls([run.paths])
            except (ValueError, OSError) as error:
                remarks.append(f"Not drawn: {error}.")
    return found, tuple(remarks)


def _traces(run: RunPaths, record: WaterfallRecord) -> Iterator[dict[str, Any]]:
    name = f"{run.arm}, seed {run.seed}: {record.name}"
    for what in record.steps[0]["errors"]:
        meta = {"waterfall": name, "result": what}
        for change, title, style in (
            ("lowered", "this point alone rounded", _bar),
            ("raised", "this point alone in FP64", _diamond),
        ):
            steps = [step for step in record.steps if step["change"] == change]
            yield {
                "name": title,
                "x": [_name(step["point"]) for step in steps],
                "y": _shown(steps, what),
                "customdata": [label(step["format"]) for step in steps],
                "hovertemplate": "%{x} in %{customdata}: %{y:.6g}<extra></extra>",
                "meta": meta,
                **style(),
            }
        names = dict.fromkeys(step["point"] for step in record.steps if step["point"])
        points = [_name(name) for name in names]
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


def _name(point: str) -> str:
    return label(point.replace("_", " "))


def _shown(steps: Sequence[dict[str, Any]], what: str) -> list[float | None]:
    """Return the errors; None where there is none but FP64's own."""
    return [step["errors"][what] if step["errors"][what] > NOISE else None for step in steps]


def _bar() -> dict[str, Any]:
    return {"type": "bar", "marker": {"color": LOWERED}}


def _diamond() -> dict[str, Any]:
    marker = {"color": RAISED, "symbol": "diamond", "size": 10}
    return {"type": "scatter", "mode": "markers", "marker": marker}
