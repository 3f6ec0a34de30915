"""Charts of several studies at once: their ladders on one axis, and one arm's drift in each.

Drifts of other models or data can't be set against each other, so the ladders are in ratio to each
study's own yardstick. Leaves out tables and words around (`compare_page`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stability.analysis.ladder import INDEPENDENT_AXES, Ladder, Row
from stability.analysis.number_text import EXACT_ZERO, times
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.schema import BASELINE
from stability.report.page.chart import (
    Chart,
    Section,
    arm_lines,
    label,
    make_chart,
    make_figure,
    section_of,
)
from stability.report.page.training_charts import drift_by_seed, drift_layout
from stability.report.view.drift import DRIFT_TITLES
from stability.report.view.palette import DASHES, GREY, ArmStyle, arm_styles
from stability.report.view.whiskers import ends, what_ends_are

__all__ = ["drift_of_arm_section", "ladders_chart", "study_styles"]

OFF_SCALE = 10
"""An arm this many times beyond the largest paired ratio is named at the edge instead of drawn."""
SHOWN = "arm shown"
"""A choice of the drift chart. `arm` in a `meta` is what is switched on and off: here a study."""
LONGEST = 28
"""Letters of a name beside an axis; the table has all of it."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the chart: an arm of a study, or the study's own name above its arms."""

    study: str
    row: Row | None
    ladder: Ladder


def study_styles(names: Sequence[str]) -> dict[str, ArmStyle]:
    """Return a colour, dash and symbol for each study."""
    return {
        name: replace(style, dash=DASHES[place % len(DASHES)])
        for place, (name, style) in enumerate(arm_styles([BASELINE, *names]).items(), start=-1)
        if name in names
    }


def ladders_chart(ladders: Mapping[str, Ladder], styles: Mapping[str, ArmStyle]) -> Chart:
    """Return every arm of every study by its ratio to that study's own yardstick."""
    lines = [
        _Line(name, row, ladder)
        for name, ladder in ladders.items()
        for row in (None, *(row for row in ladder.rows if row.arm != BASELINE))
    ]
    limit = _limit(lines)
    notes = (_note(line, place, limit) for place, line in enumerate(lines))
    figure = make_figure(
        [
            mark
            for place, line in enumerate(lines)
            for mark in _marks(line, place, styles[line.study], limit)
        ],
        height=110 + 32 * len(lines),
        xaxis={"type": "log", "title": {"text": "drift / drift of the study's own yardstick"}}
        | _ticks(lines, limit),
        yaxis={
            "tickvals": list(range(len(lines))),
            "ticktext": [_tick(line) for line in lines],
            "range": [len(lines) - 0.5, -0.5],
            "showgrid": False,
        },
        shapes=[_yardstick_line()],
        annotations=[note for note in notes if note],
    )
    return Chart(
        key="ladders",
        title="How far each change moves the weights, in each study's own unit",
        caption=(
            "Hollow: the study's early step; filled: its last; whiskers: "
            f"{what_ends_are(max(len(ladder.seeds) for ladder in ladders.values()))}. Dashed: the "
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
        figure=figure,
    )


def drift_of_arm_section(
    studies: Mapping[str, RecordedStudy], styles: Mapping[str, ArmStyle]
) -> Section:
    """Return the drift of one arm at a time over the steps, a line a study."""
    chart = make_chart(
        "drift-of-arm",
        "Distance from the weights of each study's own baseline",
        [
            line
            for metric in DRIFT_TITLES
            for arm in _arms(studies)
            for name, study in studies.items()
            for line in _drift_lines(name, study.arm(arm), metric, styles[name])
        ],
        caption=(
            "One arm at a time, a colour and dash for each study. Thick: mean over the seeds; "
            "thin: each seed. A study without the arm has no line."
        ),
        good="the curves have one shape: the arm does the same to each study.",
        bad=(
            "in one study the curve starts higher or rises sooner. Look for the reason among what "
            "differs between the studies before blaming the arm."
        ),
        height=480,
        **drift_layout(),
    )
    return section_of(chart, "Drift of one arm", fixed=["arm"])


def _arms(studies: Mapping[str, RecordedStudy]) -> list[str]:
    """Return every arm, first those of the most studies, of these the candidates."""
    arms = [arm for study in studies.values() for arm in study.candidates]
    names = [arm.name for arm in arms]
    attention = {arm.name for arm in arms if arm.axis == "attention"}
    return sorted(
        dict.fromkeys(names), key=lambda name: (-names.count(name), name not in attention)
    )


def _drift_lines(
    study: str, arm: RecordedArm | None, metric: str, style: ArmStyle
) -> list[dict[str, Any]]:
    if arm is None:
        return []
    by_seed = drift_by_seed(arm, metric)
    meta = {SHOWN: arm.name, "metric": metric}
    return arm_lines(study, by_seed, style, bold=True, positive=True, hover="%{y:.5e}", meta=meta)


def _marks(line: _Line, place: int, style: ArmStyle, limit: float) -> list[dict[str, Any]]:
    if line.row is None or _is_beyond(line.row, limit):
        return []
    row, ladder = line.row, line.ladder
    return [
        _mark(spread, place, style, suffix, (line.study, row.arm, step))
        for spread, step, suffix in (
            (row.ratio.early, ladder.early_step, "-open"),
            (row.ratio.last, ladder.last_step, ""),
        )
        if _can_show(spread)
    ]


def _mark(
    spread: SeedValues, place: int, style: ArmStyle, suffix: str, of: tuple[str, str, int]
) -> dict[str, Any]:
    study, arm, step = of
    low, high = ends(spread)
    return {
        "type": "scatter",
        "mode": "markers",
        "meta": {"arm": study},
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
            "size": 12,
            "color": style.colour,
            "line": {"width": 2.5, "color": style.colour},
        },
        "hovertemplate": (
            f"{spread.mean:.6g}, whiskers {low:.4g} to {high:.4g}<br>{label(f'{arm} of {study}')}"
            f" at step {step}<extra></extra>"
        ),
        "showlegend": False,
    }


def _note(line: _Line, place: int, limit: float) -> dict[str, Any] | None:
    """Return what stands at the edge for an arm that can't be drawn, or None."""
    row = line.row
    if row is None:
        return None
    early, last = row.ratio.early, row.ratio.last
    right = _is_beyond(row, limit)
    if right:
        text = f"{times((early if early.n else last).mean)}, off the scale ▸"
    elif row.rel_l2.early.is_zero or row.rel_l2.last.is_zero:
        text = f"◂ {EXACT_ZERO}"
    elif not _can_show(early) and not _can_show(last):
        text = "no ratio: no yardstick" if row.rel_l2.last.n else f"no drift yet: {row.state}"
    else:
        return None
    return {
        "name": line.study,
        "xref": "paper",
        "x": 0.99 if right else 0.01,
        "xanchor": "right" if right else "left",
        "yref": "y",
        "y": place,
        "text": text,
        "showarrow": False,
    }


def _limit(lines: Sequence[_Line]) -> float:
    paired = [line.row for line in lines if line.row and line.row.axis not in INDEPENDENT_AXES]
    ratios = [spread for row in paired for spread in (row.ratio.early, row.ratio.last)]
    return OFF_SCALE * max((s.high for s in ratios if _can_show(s)), default=math.inf)


def _is_beyond(row: Row, limit: float) -> bool:
    return any(s.n and s.mean > limit for s in (row.ratio.early, row.ratio.last))


def _can_show(spread: SeedValues) -> bool:
    return spread.n > 0 and spread.low > 0 and math.isfinite(spread.high)


def _ticks(lines: Sequence[_Line], limit: float) -> dict[str, Any]:
    """Return ticks at 1, 2 and 5 of each decade, thinned to six, written as ratios are."""
    rows = [line.row for line in lines if line.row and not _is_beyond(line.row, limit)]
    spreads = [s for row in rows for s in (row.ratio.early, row.ratio.last) if _can_show(s)]
    if not spreads:
        return {"range": [-1, 1]}
    low = min(1.0, *(end for s in spreads for end in ends(s))) / 1.2
    high = max(1.0, *(end for s in spreads for end in ends(s))) * 1.2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        ticks = [d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high]
        if len(ticks) <= 6:
            break
    return {
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}x" for tick in ticks],
        "tickangle": 0,
    }


def _yardstick_line() -> dict[str, Any]:
    ends = {"x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper"}
    look = {"layer": "below", "line": {"color": GREY, "width": 1.5, "dash": "dash"}}
    return {"type": "line", **ends, **look}


def _tick(line: _Line) -> str:
    name = line.row.arm if line.row else line.study
    short = label(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")
    return short if line.row else f"<b>{short}</b>"
