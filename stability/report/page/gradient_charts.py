"""Charts of the gradient evidence, a line an arm: how large its error is, and how much repeats.

The figures are those of the verdict, with its intervals and limits. Leaves out what they mean for
the verdict (`analysis.gradient_evidence`) and the other levels, which have charts of their own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stability.analysis.number_text import bounds, three_figures
from stability.analysis.verdict import ArmVerdict, StudyVerdict
from stability.config.study import PolicyConfig
from stability.report.page.chart import (
    Chart,
    Section,
    arm_axis,
    beyond_limit,
    error_bar,
    label,
    log_ticks,
    make_chart,
    range_around,
    vertical_line,
)
from stability.report.view.palette import ArmStyle

__all__ = ["gradient_section"]

NEAR = "about the limits"
"""The choice that shows arms near the limits apart, where one lies far beyond."""


def gradient_section(
    verdict: StudyVerdict | None, policy: PolicyConfig, styles: Mapping[str, ArmStyle]
) -> Section | None:
    """Return both figures of each arm that was looked at; None if none was."""
    arms = [arm for arm in verdict.arms if _figure(arm, "ratio")] if verdict else []
    if not arms:
        return None
    looks = max(int(_figure(arm, "looks")) for arm in arms)
    return Section(
        key="gradient",
        title="Gradient of the whole model",
        intro=(
            f"At up to {looks} looks on the run's own weights and batches (probe.gradient_every, "
            "in the first seed) the gradient is taken with the arm's attention, the baseline's and "
            "FP64's."
        ),
        charts=(_ratio_chart(arms, policy, styles), _share_chart(arms, policy, styles)),
        choices={"scale": ("all arms", NEAR)},
    )


def _ratio_chart(
    arms: Sequence[ArmVerdict], policy: PolicyConfig, styles: Mapping[str, ArmStyle]
) -> Chart:
    limit = policy.max_gradient_ratio
    drawn = [value for arm in arms for value in _numbers(arm, "ratio") if value > 0]
    low, high = min(1.0, *drawn) / 1.3, max(limit, *drawn) * 1.3
    ticks = [digit * 10.0**decade for digit, decade in log_ticks(low, high, 6)]
    return make_chart(
        "gradient-ratio",
        "Its error, over that of the baseline",
        [
            mark
            for place, arm in enumerate(arms)
            for mark in (
                _mark(arm, place, "ratio", styles[arm.arm]),
                _as_trained(arm, place, styles[arm.arm]),
            )
            if mark
        ],
        caption=(
            "Both against FP64, everything but attention one precision wider; geometric mean over "
            "looks, whiskers: one-sided bounds at the error rate of a look. Hollow: as trained, "
            "where the rounding of other layers covers most of it. Shaded: beyond the limit, "
            f"{limit:g}."
        ),
        good="the whisker ends left of the shade.",
        bad="the whole whisker lies in it.",
        height=_height(arms),
        xaxis={
            "type": "log",
            "title": {"text": "error of the gradient / baseline's"},
            "range": [math.log10(low), math.log10(high)],
            "tickvals": ticks,
            "ticktext": [f"{tick:g}" for tick in ticks],
            "tickangle": 0,
        },
        yaxis=arm_axis([label(arm.arm) for arm in arms]),
        shapes=[*beyond_limit(limit, 10 * high, "x"), vertical_line(1, "dot")],
        meta={
            "rows": [arm.arm for arm in arms],
            "scale": {NEAR: {"xaxis.range": [math.log10(0.4), math.log10(2 * limit)]}},
        },
    )


def _share_chart(
    arms: Sequence[ArmVerdict], policy: PolicyConfig, styles: Mapping[str, ArmStyle]
) -> Chart:
    limit = policy.max_share
    marks = [_mark(arm, place, "share", styles[arm.arm]) for place, arm in enumerate(arms)]
    drawn = [value for arm in arms for value in _numbers(arm, "share")]
    return make_chart(
        "gradient-share",
        "The share f of its error that every look repeats",
        [mark for mark in marks if mark],
        caption=(
            "0: errors are independent and average out over steps; 1: the same error at every "
            "look, which adds up. Whiskers: one-sided bounds at the error rate of a look, from 20 "
            f"looks on. Shaded: beyond the limit, {limit:g}."
        ),
        good="the whisker ends left of the shade, about 0.",
        bad="the whole whisker lies in it: the error is a bias, however small it is.",
        height=_height(arms),
        xaxis={
            "title": {"text": "share f"},
            "tickformat": "~g",
            "nticks": 6,
            "range": range_around([*drawn, 0.0, 1.5 * limit]),
        },
        yaxis=arm_axis([label(arm.arm) for arm in arms]),
        shapes=[*beyond_limit(limit, 10.0, "x"), vertical_line(0, "dot")],
        meta={
            "rows": [arm.arm for arm in arms],
            "scale": {NEAR: {"xaxis.range": [-2 * limit, 3 * limit]}},
        },
    )


def _height(arms: Sequence[ArmVerdict]) -> int:
    return 110 + 48 * len(arms)


def _figure(arm: ArmVerdict, name: str) -> float:
    """Return a figure of the gradient level; 0, which no log axis shows, where there is none."""
    evidence = arm.levels.get("gradient")
    return evidence.figures.get(name, 0.0) if evidence else 0.0


def _numbers(arm: ArmVerdict, name: str) -> list[float]:
    """Return the ends and the mean of a figure, as far as there are."""
    figures = arm.levels["gradient"].figures
    names = (name, f"{name}_low", f"{name}_high", f"{name}_as_trained")
    return [figures[each] for each in names if each in figures]


def _mark(arm: ArmVerdict, place: int, name: str, style: ArmStyle) -> dict[str, Any] | None:
    figures = arm.levels["gradient"].figures
    if name not in figures:
        return None
    mean = figures[name]
    low, high = (figures.get(f"{name}_{end}", math.nan) for end in ("low", "high"))
    mark = _point(arm, mean, place, style, style.symbol)
    mark["hovertemplate"] = (
        f"{three_figures(mean)}{bounds(low, high, three_figures)} over "
        f"{_figure(arm, 'looks'):.0f} looks<extra>{label(arm.arm)}</extra>"
    )
    if not math.isnan(low):
        mark["error_x"] = error_bar(mean, low, high, style.colour)
    return mark


def _as_trained(arm: ArmVerdict, place: int, style: ArmStyle) -> dict[str, Any] | None:
    value = _figure(arm, "ratio_as_trained")
    if not value:
        return None
    mark = _point(arm, value, place, style, f"{style.symbol}-open")
    mark["hovertemplate"] = f"as trained: {three_figures(value)}<extra>{label(arm.arm)}</extra>"
    return mark


def _point(arm: ArmVerdict, x: float, place: int, style: ArmStyle, symbol: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "meta": {"arm": arm.arm},
        "x": [x],
        "y": [place],
        "marker": {
            "symbol": symbol,
            "size": 12,
            "color": style.colour,
            "line": {"width": 2, "color": style.colour},
        },
        "showlegend": False,
    }
