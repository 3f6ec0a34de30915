"""The ladder as a picture: each arm's drift at the early and the last step, on one log axis.

Leaves out the table beside it (`html`, `terminal`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stability.analysis.ladder import INDEPENDENT_AXES, Ladder, Row
from stability.analysis.number_text import EXACT_ZERO, scientific
from stability.analysis.seed_values import SeedValues
from stability.config.schema import BASELINE
from stability.report.page.chart import Chart, label, make_figure
from stability.report.view.palette import GREY, ArmStyle
from stability.report.view.whiskers import ends, what_ends_are

__all__ = ["ladder_chart"]

OFF_SCALE = 10
"""An arm this many times beyond the largest paired drift is named at the edge instead of drawn."""
HOLLOW = "-open"
"""Plotly's suffix for the outline of a symbol: the early step."""


def ladder_chart(ladder: Ladder, styles: Mapping[str, ArmStyle]) -> Chart:
    """Return the ladder chart: hollow is early, filled is last.

    Whiskers are the 90 % interval of the mean, with too few seeds for one the seeds' range.
    """
    rows = [row for row in ladder.rows if row.arm != BASELINE]
    limit = _scale_limit(rows)
    traces = [trace for place, row in enumerate(rows) for trace in _arm(row, place, styles, limit)]
    notes = (_note(row, place, limit) for place, row in enumerate(rows))
    figure = make_figure(
        [*traces, *_legend(ladder)],
        height=130 + 40 * len(rows),
        xaxis={
            "type": "log",
            "title": {"text": "drift from the baseline (relative L2)"},
            **_ticks(rows, limit),
            "tickangle": 0,
        },
        yaxis={
            "tickvals": list(range(len(rows))),
            "ticktext": [_tick(row) for row in rows],
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
        },
        shapes=_yardstick_lines(ladder),
        annotations=[note for note in notes if note],
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        meta={"rows": [row.arm for row in rows]},
    )
    return Chart(
        key="ladder",
        title="How far each change moves the weights",
        caption=(
            f"Hollow: step {ladder.early_step}; filled: step {ladder.last_step}; whiskers: "
            f"{what_ends_are(len(ladder.seeds))}. Dotted and dashed: the yardstick at these two "
            "steps."
        ),
        good=(
            "rerun sits at exactly 0, and a candidate's hollow mark lies left of the yardstick's "
            "dotted line, clear of the nudge's."
        ),
        bad=(
            "the candidate lies right of the yardstick early on. Filled marks that bunch together "
            "mean that chaos has caught up: read only the hollow ones."
        ),
        figure=figure,
    )


def _ticks(rows: Sequence[Row], limit: float) -> dict[str, Any]:
    """Return the ticks of the drift axis: plotly's own crowd where a scale ends beside a decade.

    At 1, 2 and 5 of each decade, and at the decades alone once there are more than five of those.
    """
    shown = [
        value
        for row in rows
        if not _beyond(row, limit)
        for spread in (row.rel_l2.early, row.rel_l2.last)
        if _can_show(spread)
        for value in ends(spread)
        if 0 < value < math.inf
    ]
    if not shown:
        return {}
    low, high = min(shown) / 1.2, max(shown) * 1.2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        ticks = [(digit, decade) for decade in decades for digit in digits]
        ticks = [(d, e) for d, e in ticks if low <= d * 10.0**e <= high]
        if len(ticks) <= 5:
            break
    every = math.ceil(len(ticks) / 5) or 1
    ticks = ticks[::every]
    return {
        "tickvals": [digit * 10.0**decade for digit, decade in ticks],
        "ticktext": [f"{digit}e{decade}".replace("-", "\N{MINUS SIGN}") for digit, decade in ticks],
    }


def _scale_limit(rows: Sequence[Row]) -> float:
    """Return the largest drift on the scale: independent initial weights are no yardstick for it.

    Such an arm lies decades away from the others, and would press them into one spot.
    """
    paired = [
        spread.high
        for row in rows
        if row.axis not in INDEPENDENT_AXES
        for spread in (row.rel_l2.early, row.rel_l2.last)
        if _can_show(spread)
    ]
    return OFF_SCALE * max(paired) if paired else math.inf


def _arm(
    row: Row, place: int, styles: Mapping[str, ArmStyle], limit: float
) -> list[dict[str, Any]]:
    style = styles[row.arm]
    early, last = row.rel_l2.early, row.rel_l2.last
    if _beyond(row, limit):
        return []
    shown = [spread.mean for spread in (early, last) if _can_show(spread)]
    link = {
        "type": "scatter",
        "mode": "lines",
        "meta": {"arm": row.arm},
        "x": shown,
        "y": [place] * len(shown),
        "line": {"color": style.colour, "width": 1.5},
        "opacity": 0.5,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    marks = [
        {**_mark(spread, place, style, suffix), "meta": {"arm": row.arm}}
        for spread, suffix in ((early, HOLLOW), (last, ""))
        if _can_show(spread)
    ]
    return [link, *marks]


def _mark(spread: SeedValues, place: int, style: ArmStyle, suffix: str) -> dict[str, Any]:
    low, high = ends(spread)
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [spread.mean],
        "y": [place],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - spread.mean],
            "arrayminus": [spread.mean - low],
            "color": style.colour,
            "thickness": 2,
            "width": 5,
        },
        "marker": {
            "symbol": style.symbol + suffix,
            "size": 13,
            "color": style.colour,
            "line": {"width": 2.5, "color": style.colour},
        },
        "hovertemplate": (
            f"{spread.mean:.6g}, whiskers {low:.4g} to {high:.4g}"
            + "".join(f"<br>seed {seed}: {value:.6g}" for seed, value in spread.per_seed.items())
            + "<extra></extra>"
        ),
        "showlegend": False,
    }


def _legend(ladder: Ladder) -> list[dict[str, Any]]:
    entries = [
        (f"step {ladder.early_step}", "markers", "circle-open"),
        (f"step {ladder.last_step}", "markers", "circle"),
    ]
    if _yardstick_lines(ladder):
        entries.append((f"{label(ladder.yardstick)}, the yardstick", "lines", "circle"))
    return [
        {
            "type": "scatter",
            "mode": mode,
            "x": [None],
            "y": [None],
            "name": name,
            "marker": {"color": GREY, "size": 11, "symbol": symbol},
            "line": {"color": GREY, "dash": "dash", "width": 1.5},
            "hoverinfo": "skip",
            "meta": {"arm": ladder.yardstick} if mode == "lines" else {},
        }
        for name, mode, symbol in entries
    ]


def _yardstick_lines(ladder: Ladder) -> list[dict[str, Any]]:
    row = ladder.row(ladder.yardstick)
    steps = ((row.rel_l2.early, "dot"), (row.rel_l2.last, "dash")) if row else ()
    return [
        {
            "type": "line",
            "name": ladder.yardstick,
            "x0": spread.mean,
            "x1": spread.mean,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "layer": "below",
            "line": {"color": GREY, "width": 1.5, "dash": dash},
        }
        for spread, dash in steps
        if _can_show(spread)
    ]


def _beyond(row: Row, limit: float) -> bool:
    return any(s.n and s.mean > limit for s in (row.rel_l2.early, row.rel_l2.last))


def _note(row: Row, place: int, limit: float) -> dict[str, Any] | None:
    early, last = row.rel_l2.early, row.rel_l2.last
    side = "left"
    if early.is_zero or last.is_zero:
        text = f"◂ {EXACT_ZERO}, off the scale"
    elif not early.n and not last.n:
        text = f"no drift on record: {row.state}"
    elif _beyond(row, limit):
        far = [scientific(spread.mean) for spread in (early, last) if spread.n]
        text, side = f"{' and '.join(far)}, off the scale ▸", "right"
    else:
        return None
    return {
        "name": row.arm,
        "xref": "paper",
        "x": 0.01 if side == "left" else 0.99,
        "xanchor": side,
        "yref": "y",
        "y": place,
        "text": text,
        "showarrow": False,
    }


def _tick(row: Row) -> str:
    return f"<b>{label(row.arm)}</b>" if row.axis == "attention" else label(row.arm)


def _can_show(spread: SeedValues) -> bool:
    return spread.n > 0 and math.isfinite(spread.mean) and spread.mean > 0
