"""Deviation inside attention as a figure for a paper: a heat map of layers by steps.

It shows one metric of one result of one arm, as the mean over the seeds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from stability.analysis.probe_records import natural_order
from stability.analysis.study_records import RecordedArm
from stability.records.metric_names import deviation_name, parse_deviation
from stability.records.metric_table import LAYER_METRICS
from stability.report.paper.figure_options import NothingToDrawError
from stability.report.paper.files import Cell, Table
from stability.report.paper.style import new_figure, shown
from stability.report.view.drift import mean_over_seeds
from stability.report.view.robust_limit import robust_limit

__all__ = ["draw_heatmap", "has_probe", "heatmap_table"]

_TICKS = 6


@dataclass(frozen=True, slots=True)
class _Cells:
    """Layer -> seed -> step -> value, and the mean over the seeds."""

    by_seed: Mapping[str, Mapping[int, Mapping[int, float]]]
    mean: Mapping[str, Mapping[int, float]]


def has_probe(arm: RecordedArm, compared: str, metric: str) -> bool:
    """Whether the arm's records hold `metric` of `compared`, of some layer."""
    return any(_cells(arm, compared, metric).mean.values())


def draw_heatmap(arm: RecordedArm, compared: str, metric: str, width: str) -> Figure:
    """Return the figure, the first layer on top; a cell without a number is grey.

    ValueError if the arm has no such deviation on record.
    """
    mean = _cells(arm, compared, metric).mean
    steps = sorted({step for values in mean.values() for step in values})
    if not steps:
        raise NothingToDrawError(
            f"draw_heatmap: arm must have {metric} of {compared} on record, {arm.name!r} has none; "
            "run the study with a probe"
        )
    heights = [[_height(mean[layer].get(step), metric) for step in steps] for layer in mean]
    figure = new_figure(width, 1.0 + min(max(0.9, 0.16 * len(mean)), 5.0))
    axes = figure.add_subplot()
    axes.grid(False)
    axes.set_facecolor("#bbbbbb")
    norm, colours, extend = _scale([x for row in heights for x in row], metric)
    image = axes.imshow(heights, aspect="auto", norm=norm, cmap=colours, interpolation="nearest")
    _ticks(axes.set_xticks, [str(step) for step in steps], _TICKS)
    _ticks(axes.set_yticks, [shown(layer, 14) for layer in mean], 12)
    axes.set_xlabel(f"step; {shown(arm.name, 30)}, {compared}")
    bar = figure.colorbar(image, ax=axes, extend=extend, aspect=12, pad=0.02)
    bar.set_label(LAYER_METRICS[metric].short)
    if LAYER_METRICS[metric].centre == 1:
        limit = round(norm.vmax or 1)
        ticks = sorted({-limit, -(limit // 2), 0, limit // 2, limit})
        bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
        bar.ax.set_yticklabels([f"{2.0**place:.3g}x" for place in ticks])
    return figure


def heatmap_table(arm: RecordedArm, compared: str, metric: str) -> Table:
    """Return the numbers of the figure: each cell's mean, and each seed's value."""
    cells = _cells(arm, compared, metric)
    rows: list[tuple[Cell, ...]] = []
    for layer, mean in cells.mean.items():
        start = (arm.name, compared, metric, layer)
        rows += [(*start, step, "mean", value) for step, value in mean.items()]
        rows += [
            (*start, step, str(seed), value)
            for seed, values in cells.by_seed[layer].items()
            for step, value in values.items()
        ]
    return Table(("arm", "compared", "metric", "layer", "step", "seed", "value"), rows)


def _cells(arm: RecordedArm, compared: str, metric: str) -> _Cells:
    probed = {
        (parts.layer, parts.shadow)
        for run in arm.runs.values()
        for name in run.metrics
        if (parts := parse_deviation(name))
        and (parts.what, parts.metric, parts.part) == (compared, metric, "")
    }
    first = min((shadow for _, shadow in probed), default="")  # as the report: one shadow is shown
    by_seed = {}
    for layer in sorted((layer for layer, shadow in probed if shadow == first), key=natural_order):
        name = deviation_name(layer, compared, metric, shadow=first)
        seeds = {seed: run.series(name) for seed, run in arm.runs.items()}
        by_seed[layer] = {seed: values for seed, values in seeds.items() if values}
    return _Cells(by_seed, {layer: mean_over_seeds(seeds) for layer, seeds in by_seed.items()})


def _height(value: float | None, metric: str) -> float:
    """Return the number that sets the colour: log2 of a ratio, else the value; NaN for no cell."""
    if value is None or not math.isfinite(value):
        return math.nan
    if LAYER_METRICS[metric].centre != 1:
        return value
    return math.log2(value) if value > 0 else math.nan


def _scale(heights: list[float], metric: str) -> tuple[Normalize, str, str]:
    """Return the norm, the colour map, and which ends of the colour bar some value lies beyond."""
    finite = [height for height in heights if not math.isnan(height)]
    if LAYER_METRICS[metric].centre is None:
        return Normalize(min(finite, default=0.0), max(finite, default=1.0)), "viridis", "neither"
    limit = robust_limit(finite)
    if LAYER_METRICS[metric].centre == 1:
        limit = max(1, math.ceil(limit))  # whole octaves
    below, above = (any(sign * height > limit for height in finite) for sign in (-1, 1))
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}
    return TwoSlopeNorm(0.0, -limit, limit), "PuOr_r", extend.get((below, above), "neither")


def _ticks(place: Callable[..., object], names: list[str], most: int) -> None:
    least = math.ceil(len(names) / most)
    every = next(n * 10**k for k in range(len(names)) for n in (1, 2, 5) if n * 10**k >= least)
    place(range(0, len(names), every), names[::every])
