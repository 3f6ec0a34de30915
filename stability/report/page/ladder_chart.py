"""The ladder as a chart: each arm at the early and at the last step, on one log axis.

One study is drawn by its drifts. Drifts of other models or data can't be set against each other, so
several studies are drawn by the ratio to each one's own yardstick. Leaves out which arms have a
place on the axis (`view.ladder`) and the table beside the chart (`tables`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stability.analysis.ladder import Ladder, Row
from stability.analysis.number_text import EXACT_ZERO, scientific, times
from stability.report.page.chart import (
    Chart,
    arm_axis,
    error_bar,
    label,
    log_ticks,
    make_chart,
    vertical_line,
)
from stability.report.view.error_bars import bar_ends, bars_are
from stability.report.view.ladder import (
    AxisValue,
    Rung,
    is_candidate,
    on_log_axis,
    rungs,
    rungs_of_each,
)
from stability.report.view.palette import GREY, ArmStyle

__all__ = ["ladder_chart", "ladders_chart"]

LONGEST = 28
"""Letters of a name beside the axis of several studies; the table has all of it."""


def ladder_chart(ladder: Ladder, styles: Mapping[str, ArmStyle]) -> Chart:
    """Return the chart of one study: drifts, hollow at the early step and filled at the last.

    The error bars, `whiskers` to the reader, are as `view.error_bars` says.
    """
    shown = rungs(ladder)
    styled = [(place, rung, styles[rung.row.arm]) for place, rung in enumerate(shown)]
    notes = [_drift_note(rung, place) for place, rung, _ in styled]
    lines = _yardstick_lines(ladder)
    least = "the yardstick's dotted line" if lines else "the marks of changes that you accept"
    roles = {row.arm: row.role for row in ladder.rows}
    good = f"a candidate's hollow mark lies left of {least}, clear of the nudge's."
    bad = f"the candidate lies right of {least} early on."
    if roles.get(ladder.yardstick) == "reference":
        good = (
            "a candidate lies at about 1.4 times the reference's dotted line or left of it, as "
            "another rounding as good as the baseline's does; E is judged, not this distance."
        )
        bad = "a candidate lies far right of that early on."
    return make_chart(
        "ladder",
        "How far each change moves the weights",
        [*(mark for each in styled for mark in _drifts(*each)), *_legend(ladder)],
        caption=(
            f"Hollow: step {ladder.early_step}; filled: step {ladder.last_step}; whiskers: "
            f"{bars_are(len(ladder.seeds))}."
            f"{' Dotted and dashed: the yardstick at these two steps.' if lines else ''}"
        ),
        good=f"rerun sits at exactly 0, and {good}",
        bad=(
            f"{bad} Filled marks that bunch together mean that chaos has caught up: read only the "
            "hollow ones."
        ),
        height=130 + 40 * len(shown),
        xaxis={
            "type": "log",
            "title": {"text": "drift from the baseline (relative L2)"},
            **_drift_ticks(shown),
            "tickangle": 0,
        },
        yaxis=arm_axis([_name(rung.row) for rung in shown]),
        shapes=lines,
        annotations=[note for note in notes if note],
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        meta={"rows": [rung.row.arm for rung in shown]},
    )


def ladders_chart(ladders: Mapping[str, Ladder], styles: Mapping[str, ArmStyle]) -> Chart:
    """Return the chart of several studies: a line with a study's name, then a line an arm."""
    of_each = rungs_of_each(ladders.values(), lambda row: row.ratio)
    names, marks, notes = [], [], []
    for (study, ladder), shown in zip(ladders.items(), of_each, strict=True):
        names.append(f"<b>{_short(study)}</b>")
        for rung in shown:
            marks += _ratios(rung, len(names), study, ladder, styles[study])
            notes.append(_ratio_note(rung, len(names), study))
            names.append(_short(rung.row.arm))
    return make_chart(
        "ladders",
        "How far each change moves the weights, in each study's own unit",
        marks,
        caption=(
            "Hollow: the study's early step; filled: its last; whiskers: "
            f"{bars_are(max(len(ladder.seeds) for ladder in ladders.values()))}. Dashed: the "
            "yardstick, 1 by definition."
        ),
        good=(
            "an arm that the studies share lies at the same place in each: what was found holds "
            "beyond one setting. A candidate's hollow marks lie left of the dashed line."
        ),
        bad=(
            "the same arm lies left of the line in one study and right of it in another: the "
            "answer depends on what differs between them."
        ),
        height=110 + 32 * len(names),
        xaxis={"type": "log", "title": {"text": "drift / drift of the study's own yardstick"}}
        | _ratio_ticks([rung for shown in of_each for rung in shown]),
        yaxis=arm_axis(names),
        shapes=[vertical_line(1, "dash")],
        annotations=[note for note in notes if note],
    )


def _drifts(place: int, rung: Rung, style: ArmStyle) -> list[dict[str, Any]]:
    """Return an arm's two marks and the line that joins them; nothing for an arm off the scale."""
    if rung.off_axis == "beyond":
        return []
    means = [values.mean for values, _ in rung.marks]
    link = {
        "type": "scatter",
        "mode": "lines",
        "meta": {"arm": rung.row.arm},
        "x": means,
        "y": [place] * len(means),
        "line": {"color": style.colour, "width": 1.5},
        "opacity": 0.5,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    marks = []
    for mark in rung.marks:
        seeds = mark.values.per_seed.items()
        told = "".join(f"<br>seed {seed}: {value:.6g}" for seed, value in seeds)
        marks.append(_mark(mark, place, style, size=13, arm=rung.row.arm, told=told))
    return [link, *marks]


def _ratios(
    rung: Rung, place: int, study: str, ladder: Ladder, style: ArmStyle
) -> list[dict[str, Any]]:
    """Return an arm's marks among several studies, which are switched on and off as arms are."""
    return [
        _mark(mark, place, style, size=12, arm=study, told=f"<br>{arm} at step {step}")
        for mark in rung.marks
        for arm in [label(f"{rung.row.arm} of {study}")]
        for step in [ladder.early_step if mark.is_early else ladder.last_step]
    ]


def _mark(
    mark: AxisValue, place: int, style: ArmStyle, *, size: int, arm: str, told: str
) -> dict[str, Any]:
    mean, (low, high) = mark.values.mean, bar_ends(mark.values)
    return {
        "type": "scatter",
        "mode": "markers",
        "meta": {"arm": arm},
        "x": [mean],
        "y": [place],
        "error_x": error_bar(mean, low, high, style.colour),
        "marker": {
            "symbol": style.symbol + ("-open" if mark.is_early else ""),
            "size": size,
            "color": style.colour,
            "line": {"width": 2.5, "color": style.colour},
        },
        "hovertemplate": f"{mean:.6g}, whiskers {low:.4g} to {high:.4g}{told}<extra></extra>",
        "showlegend": False,
    }


def _drift_note(rung: Rung, place: int) -> dict[str, Any] | None:
    text = {
        "": "",
        "beyond": f"{' and '.join(map(scientific, rung.means))}, off the scale ▸",
        "zero": f"◂ {EXACT_ZERO}, off the scale",
        "missing": f"no drift on record: {rung.row.state}",
    }[rung.off_axis]
    return _note(rung, place, rung.row.arm, text)


def _ratio_note(rung: Rung, place: int, study: str) -> dict[str, Any] | None:
    has_drift = rung.row.rel_l2.last.n > 0
    text = {
        "": "",
        "beyond": f"{''.join(map(times, rung.means[:1]))}, off the scale ▸",
        "zero": f"◂ {EXACT_ZERO}",
        "missing": "no ratio: no yardstick" if has_drift else f"no drift yet: {rung.row.state}",
    }[rung.off_axis]
    return _note(rung, place, study, text)


def _note(rung: Rung, place: int, switch: str, text: str) -> dict[str, Any] | None:
    """Return what stands at the edge for an arm that is not drawn; `switch` turns it on and off."""
    if not text:
        return None
    is_right = rung.off_axis == "beyond"
    return {
        "name": switch,
        "xref": "paper",
        "x": 0.99 if is_right else 0.01,
        "xanchor": "right" if is_right else "left",
        "yref": "y",
        "y": place,
        "text": text,
        "showarrow": False,
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
    return [
        {"name": ladder.yardstick, **vertical_line(values.mean, "dot" if is_early else "dash")}
        for values, is_early in (on_log_axis(row.rel_l2) if row else ())
    ]


def _drift_ticks(shown: Sequence[Rung]) -> dict[str, Any]:
    """Return the ticks of drifts: plotly's own crowd where a scale ends beside a decade."""
    values = _drawn_values(shown)
    if not values:
        return {}
    ticks = log_ticks(min(values) / 1.2, max(values) * 1.2, 5)
    return {
        "tickvals": [digit * 10.0**decade for digit, decade in ticks],
        "ticktext": [f"{digit}e{decade}".replace("-", "\N{MINUS SIGN}") for digit, decade in ticks],
    }


def _ratio_ticks(shown: Sequence[Rung]) -> dict[str, Any]:
    """Return range and ticks of ratios, `2x`; the yardstick's 1 is always in range."""
    values = _drawn_values(shown)
    if not values:
        return {"range": [-1, 1]}
    low, high = min(1.0, *values) / 1.2, max(1.0, *values) * 1.2
    ticks = [digit * 10.0**decade for digit, decade in log_ticks(low, high, 6)]
    return {
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}x" for tick in ticks],
        "tickangle": 0,
    }


def _drawn_values(shown: Iterable[Rung]) -> list[float]:
    """Return both ends of each drawn mark that a log axis can show."""
    ends = [end for rung in shown for values, _ in rung.marks for end in bar_ends(values)]
    return [end for end in ends if 0 < end < math.inf]


def _name(row: Row) -> str:
    return f"<b>{label(row.arm)}</b>" if is_candidate(row) else label(row.arm)


def _short(name: str) -> str:
    return label(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")
