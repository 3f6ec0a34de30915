"""How the weights' values are spread, one line an arm: the histograms taken at each snapshot.

Leaves out how far weights have moved (`training_charts`); two histograms alike say nothing of that.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.metrics.weight_counts import WEIGHT_EDGES
from stability.records.metric_names import WEIGHT_HISTOGRAM
from stability.report.page.chart import Chart, Section, choices_of, label, make_figure
from stability.report.view.palette import ArmStyle

__all__ = ["weight_section"]

STEPS = 12
"""A reader can choose among so many snapshots at most: the first, the last, and others between."""
TICKS = (-1.0, -(2.0**-4), -(2.0**-8), -(2.0**-14), 2.0**-14, 2.0**-8, 2.0**-4, 1.0)
BINS = (
    f"below {WEIGHT_EDGES[0]:.3g}",
    *(f"{low:.3g} to {high:.3g}" for low, high in pairwise(WEIGHT_EDGES)),
    f"above {WEIGHT_EDGES[-1]:.3g}",
)


def weight_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section | None:
    """Return the histograms of all weights, the last snapshot first; None if none was taken."""
    steps = _steps(study)
    traces = [
        trace
        for step in reversed(steps)
        for arm in study.arms
        for trace in _line(arm, step, styles)
    ]
    if not traces:
        return None
    chart = Chart(
        key="weights",
        title="All weights by value",
        caption=(
            "Share of the weights in each bin, over all seeds; bins are half an octave wide, so "
            "that zero lies in the middle and both tails show."
        ),
        good="the arms lie on top of one another, both sides alike.",
        bad="an arm with a longer tail, or more weights near zero, than the baseline.",
        figure=make_figure(
            traces,
            height=430,
            xaxis={
                "title": {"text": "weight"},
                "tickvals": [_place(edge) for edge in TICKS],
                "ticktext": [f"{edge:.2g}".replace("-", "\N{MINUS SIGN}") for edge in TICKS],
            },
            yaxis={"title": {"text": "share of weights"}, "tickformat": ".1~%"},
        ),
    )
    return Section(
        key="weights",
        title="The weights themselves",
        intro="",
        charts=(chart,),
        choices={"step": choices_of(traces)["step"]},
    )


def _steps(study: RecordedStudy) -> list[int]:
    found = sorted(
        {
            step
            for arm in study.arms
            for run in arm.runs.values()
            for step in run.counts.get(WEIGHT_HISTOGRAM, {})
        }
    )
    every = -(-len(found) // STEPS) or 1
    return sorted({*found[::every], *found[-1:]})


def _line(arm: RecordedArm, step: int, styles: Mapping[str, ArmStyle]) -> Iterator[dict[str, Any]]:
    seeds = [run.counts.get(WEIGHT_HISTOGRAM, {}).get(step) for run in arm.runs.values()]
    bins = [counts for counts in seeds if counts and len(counts) == len(WEIGHT_EDGES) + 1]
    if not bins:
        return
    total = sum(map(sum, bins))
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


def _place(edge: float) -> float:
    """Return where a bound lies: between the bin it ends and the bin it begins."""
    return WEIGHT_EDGES.index(edge) + 0.5
