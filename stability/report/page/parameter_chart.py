"""Which parameters have drifted: a map of parameter by step, an arm at a time.

Leaves out the drift of all weights together (`training_charts`).
"""

import math
from typing import Any

from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.metrics.drift import ALL
from stability.records.metric_names import drift_name, parse_drift
from stability.report.page.chart import Chart, Section, label, make_figure, mean_over_seeds
from stability.report.page.colour_scale import log_colours

__all__ = ["parameter_section"]

SHOWN = 30
"""So many parameters of an arm are drawn, those of the largest last drift."""
METRIC = "rel_l2"

Rows = dict[str, dict[int, float]]
"""Parameter -> step -> drift, mean over the seeds."""


def parameter_section(study: RecordedStudy) -> Section | None:
    """Return the map of each arm that has drifts of parameters; None if no arm has."""
    found = {arm.name: _drifts(arm) for arm in study.candidates}
    found = {name: rows for name, rows in found.items() if rows}
    if not found:
        return None
    most = max(len(rows) for rows in found.values())
    shown = {name: dict(list(rows.items())[:SHOWN]) for name, rows in found.items()}
    remarks = ()
    if most > SHOWN:
        remarks = (f"The {SHOWN} of {most} parameters that end furthest from the baseline's.",)
    chart = Chart(
        key="parameters",
        title="Parameter by step",
        caption="Relative L2 of each parameter alone, the most drifted at the last step on top.",
        good="neighbours alike: the drift is spread over the model.",
        bad="one parameter, or one layer's, far above the rest, or earlier than the rest.",
        figure=make_figure(
            [_map(rows, {"arm": name}) for name, rows in shown.items()],
            height=150 + 18 * max(len(rows) for rows in shown.values()),
            xaxis={"title": {"text": "step"}, "type": "category"},
            yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
        ),
        remarks=remarks,
    )
    return Section(
        key="parameters",
        title="Which parameters drift",
        intro="",
        charts=(chart,),
        choices={"arm": tuple(shown)},
    )


def _drifts(arm: RecordedArm) -> Rows:
    """Return the drifts of an arm's parameters, the largest at the last step first.

    Parameters that have never moved are left out: there is nothing to see.
    """
    names = {
        parts.parameter
        for run in arm.runs.values()
        for name in run.metrics
        if (parts := parse_drift(name)) and parts.metric == METRIC and parts.parameter != ALL
    }
    rows = {}
    for name in names:
        seeds = {seed: run.series(drift_name(name, METRIC)) for seed, run in arm.runs.items()}
        rows[name] = mean_over_seeds({seed: values for seed, values in seeds.items() if values})
    moved = {name: values for name, values in rows.items() if any(values.values())}
    return dict(sorted(moved.items(), key=lambda row: (-_last(row[1]), row[0])))


def _last(values: dict[int, float]) -> float:
    last = values[max(values)]
    return math.inf if math.isnan(last) else last


def _map(rows: Rows, meta: dict[str, str]) -> dict[str, Any]:
    # before the first update no weight has moved: an empty column
    steps = sorted({step for values in rows.values() for step, value in values.items() if value})
    drawn = [[rows[name].get(step, math.nan) for step in steps] for name in rows]
    return {
        "type": "heatmap",
        "x": [str(step) for step in steps],
        "y": [label(name) for name in rows],
        "hovertemplate": "%{y}, step %{x}: %{customdata}<extra></extra>",
        "xgap": 1,
        "ygap": 1,
        "meta": meta,
        **log_colours(drawn),
    }
