"""What a chart of the report is, and what all charts share: builders, names as text, thinned lines.

A line an arm is drawn with its seeds thin and their mean thick. The colours of text and grid are
left to the page's script, which knows whether the page is light or dark.
"""

import html
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import plotly.graph_objects as go

from stability.report.view.drift import mean_over_seeds
from stability.report.view.palette import GREY, ArmStyle

__all__ = [
    "ALL_AT_ONCE",
    "LOG_AXIS",
    "STEP_AXIS",
    "Chart",
    "Section",
    "arm_axis",
    "arm_lines",
    "beyond_limit",
    "error_bar",
    "label",
    "log_ticks",
    "make_chart",
    "make_figure",
    "range_around",
    "section_of",
    "thinning_remarks",
    "vertical_line",
]

POINTS, SEED_POINTS = 600, 150
"""The most points of a mean's line and of a seed's. A longer line is thinned: each stretch of steps
keeps its lowest and its highest point."""
HARM = "#d55e00"
"""The colour of what is beyond a limit."""
STEP_AXIS = {"title": {"text": "step"}}
LOG_AXIS = {"type": "log", "tickformat": ".2~e", "nticks": 6}
"""A log axis of numbers in scientific notation. By default plotly writes the digits between the
powers of ten in letters too small to read."""
ALL_AT_ONCE = {"hovermode": "x unified"}
"""Layout of a chart whose lines lie on one another: hovering tells the value of each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A plotly figure with the words that belong under it.

    The `meta` of a trace says when it shows: {"metric": "w1"} while its section has that chosen,
    {"arm": ...} while that arm is switched on. A shape or an annotation whose `name` is an arm's
    shows while that arm does. `figure.layout.meta` may hold changes of the layout for a choice:
    {"metric": {"w1": {"yaxis.type": "log"}}}.
    """

    key: str
    """The id of its place in the page."""
    title: str
    caption: str
    good: str
    """What the chart looks like if all is well; `bad`, if it is not."""
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


def make_chart(
    key: str,
    title: str,
    traces: Iterable[Mapping[str, Any]],
    *,
    caption: str,
    good: str,
    bad: str,
    height: int,
    remarks: tuple[str, ...] = (),
    **layout: Any,
) -> Chart:
    """Return a chart of `traces`; `height` and `layout` are as in `make_figure`."""
    figure = make_figure(traces, height=height, **layout)
    return Chart(
        key=key, title=title, caption=caption, good=good, bad=bad, figure=figure, remarks=remarks
    )


def make_figure(traces: Iterable[Mapping[str, Any]], *, height: int, **layout: Any) -> go.Figure:
    """Return a plotly figure of `traces` with the report's layout; `layout` adds to it."""
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


def section_of(
    chart: Chart, title: str, *, intro: str = "", key: str = "", fixed: Collection[str] = ()
) -> Section:
    """Return the section of one chart; its key is the chart's own unless `key` is given.

    A reader chooses among the options of each name in the traces' `meta`, in the order in which
    they come. Names in `fixed` are no choice: a chart that shows all arms at once has "arm" there.
    """
    options: dict[str, dict[str, None]] = {}
    traces: Any = chart.figure.data  # of a type that plotly makes at run time
    for trace in traces:
        for name, option in trace.meta.items():
            if name not in fixed:
                options.setdefault(name, {})[option] = None
    choices = {name: tuple(found) for name, found in options.items()}
    key = key or chart.key
    return Section(key=key, title=title, intro=intro, charts=(chart,), choices=choices)


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
    """Return an arm's traces: a thin line for each seed, and their mean on top, named as the arm.

    `hidden` shows the arm only once its name in the legend is clicked; `positive` leaves out values
    that a log axis can't show. An arm with nothing left to draw, because all its values are exactly
    0, stays in the legend and says so there. `meta` adds choices to the arm's own.
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


def arm_axis(names: Sequence[str]) -> dict[str, Any]:
    """Return a vertical axis with a name beside each line, the first on top."""
    return {
        "tickvals": list(range(len(names))),
        "ticktext": names,
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
    }


def error_bar(mean: float, low: float, high: float, colour: str) -> dict[str, Any]:
    """Return the bar of one mark from `low` to `high`, as plotly's `error_x`."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - mean],
        "arrayminus": [mean - low],
        "color": colour,
        "thickness": 2,
        "width": 5,
    }


def vertical_line(x: float, dash: str) -> dict[str, Any]:
    """Return a grey line across the whole chart at `x`."""
    ends = {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
    return {
        "type": "line",
        **ends,
        "layer": "below",
        "line": {"color": GREY, "width": 1.5, "dash": dash},
    }


def log_ticks(low: float, high: float, most: int) -> list[tuple[int, int]]:
    """Return about `most` ticks as (digit, decade): at 1, 2 and 5 of each decade, else at 1 alone.

    Of more decades than `most`, every second, third, ... has a tick.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = []
    for digits in ((1, 2, 5), (1,)):
        every = [(digit, decade) for decade in decades for digit in digits]
        ticks = [(d, e) for d, e in every if low <= d * 10.0**e <= high]
        if len(ticks) <= most:
            break
    return ticks[:: math.ceil(len(ticks) / most) or 1]


def beyond_limit(limit: float, end: float, axis: str) -> list[dict[str, Any]]:
    """Return the shade from `limit` to `end` on "x" or "y", and its dashed edge."""
    across = "y" if axis == "x" else "x"
    whole = {f"{across}ref": "paper", f"{across}0": 0, f"{across}1": 1, "layer": "below"}
    edge = {f"{axis}0": limit, f"{axis}1": limit}
    return [
        {
            **whole,
            "type": "rect",
            f"{axis}0": limit,
            f"{axis}1": end,
            "fillcolor": HARM,
            "opacity": 0.15,
            "line": {"width": 0},
        },
        {**whole, **edge, "type": "line", "line": {"color": HARM, "width": 1.5, "dash": "dash"}},
    ]


def range_around(values: Iterable[float]) -> list[float]:
    """Return a range around `values`, a tenth wider at both ends."""
    values = list(values)
    room = 0.1 * (max(values) - min(values)) or 1e-6
    return [min(values) - room, max(values) + room]


def thinning_remarks(longest: int, seeds: int) -> tuple[str, ...]:
    """Return what a chart says if its longest line, of `longest` points, is thinned; else ().

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
    drawn = [
        (step, value)
        for step, value in sorted(values.items())
        if not positive or value > 0 or math.isnan(value)
    ]
    drawn = _thinned(drawn, most)
    return [step for step, _ in drawn], [_rounded(value) for _, value in drawn]


def _thinned(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    if len(points) <= most:
        return points
    width = _stretch(len(points), most)
    drawn = set()
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if finite:
            drawn |= {min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))}
        if len(finite) < len(stretch):  # a gap in the line stays a gap
            drawn.add(next(point for point in stretch if not math.isfinite(point[1])))
    return sorted(drawn, key=itemgetter(0))


def _rounded(value: float) -> float | None:
    """Round to one digit more than a hover shows; None, a gap, where the number is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
