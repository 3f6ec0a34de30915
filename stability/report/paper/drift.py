"""Drift over the steps as a figure for a paper: thin seeds, their mean on top, both axes log.

An arm without a place on the axes stands in the legend with the reason.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stability.analysis.study_records import RecordedArm, RecordedStudy, find_arm
from stability.config.convert import nearest
from stability.records.metric_table import SHOWN_DRIFTS
from stability.report.paper.figure_options import NothingToDrawError
from stability.report.paper.files import Cell, Table
from stability.report.paper.style import (
    PrintStyle,
    log_axis,
    new_figure,
    print_styles,
    shown,
)
from stability.report.view.drift import drift_by_seed, mean_over_seeds
from stability.report.view.ladder import is_unpaired

__all__ = ["draw_drift", "drift_table"]


@dataclass(frozen=True, slots=True)
class _ArmDrift:
    """One arm's drifts by seed and step, and how the figure shows them."""

    arm: str
    by_seed: Mapping[int, Mapping[int, float]]
    mean: Mapping[int, float]
    shown_as: str
    """`line`, `off the scale`, `0 (exact)`, or why there is none."""


def draw_drift(study: RecordedStudy, arm: str, metric: str, width: str) -> Figure:
    """Return the figure of every arm, or of `arm` if it is not empty.

    ValueError for an unknown arm or metric, and if there is no drift on record.
    """
    found = _drifts(study, arm, metric)
    if not any(drift.by_seed for drift in found):
        raise NothingToDrawError(
            "draw_drift: study must have a drift on record, has none; `stability run` goes on "
            "with it"
        )
    styles = print_styles([each.name for each in study.arms])
    figure = new_figure(width, 2.6 + 0.14 * math.ceil(len(found) / 2))
    axes = figure.add_subplot()
    axes.grid(True, axis="both")
    for drift in found:
        if drift.shown_as == "line":
            _draw(axes, drift, styles[drift.arm])
    log_axis(axes, "x")
    log_axis(axes, "y")
    axes.set_xlabel(f"step{_seeds(found)}")
    axes.set_ylabel(SHOWN_DRIFTS[metric].label.replace(": ", "\n"))
    handles = [_handle(drift, styles[drift.arm], width) for drift in found]
    columns = 2 if width == "column" else 4
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=3)
    return figure


def drift_table(study: RecordedStudy, arm: str, metric: str) -> Table:
    """Return the numbers of the figure: each arm's mean and its seeds, by step."""
    rows: list[tuple[Cell, ...]] = []
    for drift in _drifts(study, arm, metric):
        start = (drift.arm, drift.shown_as, metric)
        rows += [(*start, "mean", step, value) for step, value in drift.mean.items()]
        rows += [
            (*start, str(seed), step, value)
            for seed, values in drift.by_seed.items()
            for step, value in values.items()
        ]
    return Table(("arm", "shown_as", "metric", "seed", "step", "drift"), rows)


def _drifts(study: RecordedStudy, arm: str, metric: str) -> list[_ArmDrift]:
    if metric not in SHOWN_DRIFTS:
        raise ValueError(
            f"draw_drift: metric must be a drift metric, got {metric!r}; nearest: "
            f"{nearest(metric, SHOWN_DRIFTS)}"
        )
    arms = [find_arm(study, arm)] if arm else study.candidates
    paired = any(not is_unpaired(each) for each in arms)
    return [_drift_of(each, metric, paired) for each in arms]


def _drift_of(arm: RecordedArm, metric: str, paired: bool) -> _ArmDrift:
    by_seed = {seed: found for seed, found in drift_by_seed(arm, metric).items() if found}
    values = [value for values in by_seed.values() for value in values.values()]
    shown_as = "line"
    if not values:
        states = {run.state for run in arm.runs.values()}
        shown_as = f"no drift on record ({', '.join(sorted(states))})"
    elif not any(values):
        shown_as = "0 (exact)"
    elif is_unpaired(arm) and paired:
        shown_as = "off the scale"
    return _ArmDrift(arm.name, by_seed, mean_over_seeds(by_seed), shown_as)


def _draw(axes: Axes, drift: _ArmDrift, style: PrintStyle) -> None:
    line = {"color": style.colour, "linestyle": style.dash}
    if len(drift.by_seed) > 1:
        for values in drift.by_seed.values():
            axes.plot(*_drawn(values), **line, linewidth=0.5, alpha=0.4)
    # marks on a handful of places only: they tell arms apart, not points
    every = max(1, len(drift.mean) // 10)
    axes.plot(*_drawn(drift.mean), **line, marker=style.marker, markersize=3.5, markevery=every)


def _drawn(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Return steps and values, with a gap for each value that a log axis can't show."""
    drawn = (value if 0 < value < math.inf else math.nan for value in values.values())
    return list(values), list(drawn)


def _handle(drift: _ArmDrift, style: PrintStyle, width: str) -> Line2D:
    name = shown(drift.arm, 20 if width == "column" else 30)
    if drift.shown_as == "line":
        line = {"color": style.colour, "linestyle": style.dash, "marker": style.marker}
        return Line2D([], [], **line, markersize=3.5, label=name)
    values = [value for values in drift.by_seed.values() for value in values.values()]
    said = drift.shown_as
    if said == "off the scale":
        said = f"{min(values):.1e} to {max(values):.1e}"
    elif not values:
        said = "no drift"
    return Line2D([], [], linestyle="", label=f"{name}: {said}")


def _seeds(found: list[_ArmDrift]) -> str:
    most = max(len(drift.by_seed) for drift in found)
    return f"; thin: {most} seeds, thick: their mean" if most > 1 else "; one seed"
