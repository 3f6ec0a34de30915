"""Charts of the weights by themselves: which parameters drift, and how the values are spread.

Leaves out the drift of all weights together (`training_charts`).
"""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.metrics.weight_counts import WEIGHT_EDGES
from stability.records.metric_names import ALL_WEIGHTS, WEIGHT_HISTOGRAM, drift_name, parse_drift
from stability.report.page.chart import STEP_AXIS, Section, label, make_chart, section_of
from stability.report.page.heat_map import ROW_AXIS, log_map
from stability.report.view.drift import mean_over_seeds
from stability.report.view.palette import ArmStyle

__all__ = ["parameter_section", "weight_section"]

SHOWN = 30
"""The most parameters of an arm that are drawn: those of the largest drift at the last step."""
METRIC = "rel_l2"

SNAPSHOTS = 12
"""The most snapshots whose histograms a reader can choose: the first, the last, some between."""
TICKS = (-1.0, -(2.0**-4), -(2.0**-8), -(2.0**-14), 2.0**-14, 2.0**-8, 2.0**-4, 1.0)
BINS = (
    f"below {WEIGHT_EDGES[0]:.3g}",
    *(f"{low:.3g} to {high:.3g}" for low, high in pairwise(WEIGHT_EDGES)),
    f"above {WEIGHT_EDGES[-1]:.3g}",
)


def parameter_section(study: RecordedStudy) -> Section | None:
    """Return the map of parameter by step of each arm; None if no arm recorded such drifts."""
    drifts = {arm.name: _drifts(arm) for arm in study.candidates}
    drifts = {name: rows for name, rows in drifts.items() if rows}
    if not drifts:
        return None
    most = max(len(rows) for rows in drifts.values())
    remarks = (f"The {SHOWN} of {most} parameters that end furthest from the baseline's.",)
    chart = make_chart(
        "parameters",
        "Parameter by step",
        [_parameter_map(name, rows) for name, rows in drifts.items()],
        caption="Relative L2 of each parameter alone, the most drifted at the last step on top.",
        good="neighbours alike: the drift is spread over the model.",
        bad="one parameter, or one layer's, far above the rest, or earlier than the rest.",
        height=150 + 18 * min(most, SHOWN),
        xaxis={**STEP_AXIS, "type": "category"},
        yaxis=ROW_AXIS,
        remarks=remarks if most > SHOWN else (),
    )
    return section_of(chart, "Which parameters drift")


def _drifts(arm: RecordedArm) -> dict[str, dict[int, float]]:
    """Return parameter -> step -> drift, mean over the seeds, the largest last drift first.

    Parameters that have never moved are left out: there is nothing to see.
    """
    names = {
        parts.parameter
        for run in arm.runs.values()
        for name in run.metrics
        if (parts := parse_drift(name))
        and parts.metric == METRIC
        and parts.parameter != ALL_WEIGHTS
    }
    rows = {}
    for name in names:
        seeds = {seed: run.series(drift_name(name, METRIC)) for seed, run in arm.runs.items()}
        rows[name] = mean_over_seeds({seed: values for seed, values in seeds.items() if values})
    moved = {name: values for name, values in rows.items() if any(values.values())}
    return dict(sorted(moved.items(), key=lambda row: (-_last(row[1]), row[0])))


def _last(values: Mapping[int, float]) -> float:
    last = values[max(values)]
    return math.inf if math.isnan(last) else last


def _parameter_map(arm: str, drifts: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    shown = dict(list(drifts.items())[:SHOWN])
    # before the first update no weight has moved: an empty column
    steps = sorted({step for values in shown.values() for step, value in values.items() if value})
    rows = {name: [values.get(step) for step in steps] for name, values in shown.items()}
    return log_map(rows, [str(step) for step in steps], {"arm": arm}, column="step %{x}")


def weight_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section | None:
    """Return the histograms of all weights, the last snapshot first; None if none was taken."""
    traces = [
        trace
        for step in reversed(_snapshot_steps(study))
        for arm in study.arms
        for trace in _histogram(arm, step, styles)
    ]
    if not traces:
        return None
    chart = make_chart(
        "weights",
        "All weights by value",
        traces,
        caption=(
            "Share of the weights in each bin, over all seeds; bins are half an octave wide, so "
            "that zero lies in the middle and both tails show."
        ),
        good="the arms lie on top of one another, both sides alike.",
        bad="an arm with a longer tail, or more weights near zero, than the baseline.",
        height=430,
        xaxis={
            "title": {"text": "weight"},
            # a bound lies between the bin that it ends and the bin that it begins
            "tickvals": [WEIGHT_EDGES.index(edge) + 0.5 for edge in TICKS],
            "ticktext": [f"{edge:.2g}".replace("-", "\N{MINUS SIGN}") for edge in TICKS],
        },
        yaxis={"title": {"text": "share of weights"}, "tickformat": ".1~%"},
    )
    return section_of(chart, "The weights themselves", fixed=["arm"])


def _snapshot_steps(study: RecordedStudy) -> list[int]:
    taken = sorted(
        {
            step
            for arm in study.arms
            for run in arm.runs.values()
            for step in run.counts.get(WEIGHT_HISTOGRAM, {})
        }
    )
    every = math.ceil(len(taken) / SNAPSHOTS) or 1
    return sorted({*taken[::every], *taken[-1:]})


def _histogram(
    arm: RecordedArm, step: int, styles: Mapping[str, ArmStyle]
) -> Iterator[dict[str, Any]]:
    seeds = [run.counts.get(WEIGHT_HISTOGRAM, {}).get(step) for run in arm.runs.values()]
    bins = [counts for counts in seeds if counts and len(counts) == len(WEIGHT_EDGES) + 1]
    total = sum(map(sum, bins))
    if not total:
        return  # no histogram, or weights that are all NaN, which lie in no bin
    shares = [sum(counts) / total for counts in zip(*bins, strict=True)]
    filled = [place for place, share in enumerate(shares) if share]
    shown = range(filled[0], filled[-1] + 1) if filled else range(0)
    style = styles[arm.name]
    yield {
        "type": "scatter",
        "mode": "lines",
        "name": label(arm.name),
        "legendgroup": f"arm {arm.name}",
        "meta": {"arm": arm.name, "step": str(step)},
        "x": list(shown),
        "y": [shares[place] for place in shown],
        "customdata": [BINS[place] for place in shown],
        "hovertemplate": "%{customdata}: %{y:.4%}",
        "line": {"color": style.colour, "dash": style.dash, "width": 2, "shape": "hvh"},
    }
