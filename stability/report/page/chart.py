"""What a chart is to the report, and what all charts share: names as text, seeds thin, mean thick.

A chart's colours for text and grid are left to the page, which knows whether it is light or dark.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from stability.report.view.palette import ArmStyle

__all__ = [
    "ALL_AT_ONCE",
    "LOG_AXIS",
    "Chart",
    "Section",
    "arm_lines",
    "choices_of",
    "label",
    "make_figure",
    "mean_over_seeds",
    "thinning_remarks",
]

POINTS, SEED_POINTS = 600, 150
"""A mean, and the thin line of one seed, with more points than this is thinned; each stretch keeps
its lowest and highest point."""


LOG_AXIS = {"type": "log", "tickformat": ".2~e", "nticks": 6}
"""By itself plotly writes the digits between powers of ten too small to be read."""
ALL_AT_ONCE = {"hovermode": "x unified"}
"""Layout of a chart whose lines lie on one another: hovering tells the value of each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A figure with the words that belong under it.

    A trace whose `meta` holds choices, e.g. {"metric": "w1"}, shows while its section has these
    chosen, and one with {"arm": ...} while that arm is switched on; so do a shape and an annotation
    whose `name` is an arm's. `figure.layout.meta` may hold a layout patch for a choice:
    {"metric": {"w1": {"yaxis.type": "log"}}}.
    """

    key: str
    title: str
    caption: str
    good: str
    bad: str
    figure: go.Figure
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Charts on one subject, and what a reader can choose for all of them: name -> options."""

    key: str
    title: str
    intro: str
    charts: tuple[Chart, ...]
    choices: Mapping[str, Sequence[str]]


def label(name: str) -> str:
    """Return `name` so that plotly, which reads tags in its texts, shows it as it is."""
    return html.escape(name, quote=False)


def make_figure(traces: Iterable[Mapping[str, Any]], *, height: int, **layout: Any) -> go.Figure:
    """Return a figure of `traces` with the report's layout; `layout` adds to it."""
    base = {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.18, "x": 0},
        "hoverlabel": {"namelength": -1},
        "template": "none",
    }
    axis = {
        "automargin": True,
        "zeroline": False,
        "exponentformat": "power",
        "tickfont": {"size": 12},
    }
    for name in ("xaxis", "yaxis"):
        layout[name] = {**axis, **layout.get(name, {})}
        layout[name]["title"] = {**layout[name].get("title", {}), "font": {"size": 13}}
    return go.Figure({"data": list(traces), "layout": {**base, **layout}})


def choices_of(traces: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return what a section of `traces` lets choose: each name in a `meta`, its options.

    That includes "arm", which is no choice of a section that shows all arms at once.
    """
    found: dict[str, dict[str, None]] = {}
    for trace in traces:
        for name, option in trace["meta"].items():
            found.setdefault(name, {})[option] = None
    return {name: tuple(options) for name, options in found.items()}


def mean_over_seeds(by_seed: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return the mean at each step that every seed has."""
    if not by_seed:
        return {}
    shared = set.intersection(*(set(values) for values in by_seed.values()))
    return {
        step: sum(values[step] for values in by_seed.values()) / len(by_seed)
        for step in sorted(shared)
    }


def arm_lines(
    arm: str,
    by_seed: Mapping[int, Mapping[int, float]],
    style: ArmStyle,
    *,
    bold: bool,
    hover: str = "%{y:.6g}",
    positive: bool = False,
    hidden: bool = False,
    meta: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Return an arm's traces: its seeds thin, their mean on top with the arm's name.

    `hidden` shows the arm only once its name in the legend is clicked; `positive` leaves out values
    that a log axis can't show. An arm that has nothing left, because all of it is exactly zero,
    keeps its place in the legend and says so there. `meta` adds choices to the arm's own.
    """
    by_seed = {seed: values for seed, values in by_seed.items() if values}
    all_zero = positive and all(v == 0 for values in by_seed.values() for v in values.values())
    x, y = _points(mean_over_seeds(by_seed), positive, POINTS)
    shared = {
        "type": "scatter",
        "legendgroup": f"arm {arm}",  # plotly breaks on names like __proto__
        "meta": {"arm": arm, **(meta or {})},
        "visible": "legendonly" if hidden else True,
    }
    mean = {
        **shared,
        "x": x or [None],
        "y": y or [None],
        "name": f"{label(arm)}: 0 (exact)" if all_zero else label(arm),
        "mode": "lines+markers" if len(x) <= 40 else "lines",
        "marker": {"symbol": style.symbol, "size": 7, "color": style.colour},
        "line": {"color": style.colour, "width": 3 if bold else 1.6, "dash": style.dash},
        "hovertemplate": hover,
    }
    if len(by_seed) < 2 or all_zero:
        return [mean]
    return [*(_seed_line(shared, seed, v, style, positive) for seed, v in by_seed.items()), mean]


def thinning_remarks(longest: int, seeds: int) -> tuple[str, ...]:
    """Return what a chart says whose longest line has so many points; empty if none is thinned.

    With one seed there are no thin lines.
    """
    said = [
        f"{kind} lines of {longest:,} steps are drawn with {points} points, a stretch of "
        f"{_stretch(longest, points)} steps with its lowest and its highest value"
        for kind, points in (("thin", SEED_POINTS), ("thick", POINTS))
        if longest > points and (kind == "thick" or seeds > 1)
    ]
    text = "; ".join(said)
    return (f"{text[0].upper()}{text[1:]}: no spike is lost.",) if said else ()


def _stretch(length: int, points: int) -> int:
    return math.ceil(2 * length / points)


def _seed_line(
    shared: Mapping[str, Any],
    seed: int,
    values: Mapping[int, float],
    style: ArmStyle,
    positive: bool,
) -> dict[str, Any]:
    x, y = _points(values, positive, SEED_POINTS)
    return {
        **shared,
        "x": x,
        "y": y,
        "mode": "lines",
        "opacity": 0.4,
        "showlegend": False,
        "hoverinfo": "skip",
        "name": f"{label(shared['meta']['arm'])}, seed {seed}",
        "line": {"color": style.colour, "width": 1, "dash": style.dash},
    }


def _points(
    values: Mapping[int, float], positive: bool, most: int
) -> tuple[list[int], list[float | None]]:
    kept = [
        (step, value)
        for step, value in sorted(values.items())
        if not positive or value > 0 or math.isnan(value)
    ]
    kept = _thinned(kept, most)
    return [step for step, _ in kept], [_rounded(value) for _, value in kept]


def _thinned(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    if len(points) <= most:
        return points
    width = _stretch(len(points), most)
    kept = set()
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if finite:
            kept |= {min(finite, key=_value), max(finite, key=_value)}
        if len(finite) < len(stretch):  # a gap stays a gap
            kept.add(next(point for point in stretch if not math.isfinite(point[1])))
    return sorted(kept, key=_step)


def _step(point: tuple[int, float]) -> int:
    return point[0]


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _rounded(value: float) -> float | None:
    """Round to what a hover shows, and a digit more; a gap where the number is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
