"""The chart of what happened in the runs: findings, alerts and bad ends over steps, a row an arm.

Leaves out the list of them with their words (`html`).
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from stability.analysis.study_records import RecordedStudy
from stability.report.page.chart import STEP_AXIS, Section, label, make_chart, section_of
from stability.report.view.palette import ArmStyle

__all__ = ["EventMark", "event_section", "marks_of"]

SYMBOLS = {"finding": "x", "alert": "triangle-up", "diverged": "star", "failed": "star-square"}
"""What is marked, with its symbol: events by kind, and the last step of a run that ended badly."""
SHOWN = 2000
"""The most marks that are drawn; beyond, each kind of mark of an arm keeps its first ones."""


class EventMark(NamedTuple):
    """One thing that happened: an event, or a run's bad end."""

    arm: str
    seed: int
    step: int
    kind: str
    layer: str
    text: str


def event_section(study: RecordedStudy, styles: Mapping[str, ArmStyle]) -> Section | None:
    """Return the time line of what happened in the runs; None if nothing did."""
    marks = marks_of(study)
    if not marks:
        return None
    arms = [arm.name for arm in study.arms if any(mark.arm == arm.name for mark in marks)]
    shown = _first_of_each(marks)
    remarks = ()
    if len(shown) < len(marks):
        remarks = (f"{len(marks):,} marks; the first {len(shown):,}, arm by arm, are drawn.",)
    chart = make_chart(
        "timeline",
        "On the time line",
        _traces(shown, arms, styles),
        caption=(
            "Triangle: an alert. Cross: a finding. Star: the step at which a run diverged (six "
            "points) or failed (square). Hover for the words."
        ),
        good="the same marks in the baseline and in the candidates, or none.",
        bad="marks that only a candidate has, or has earlier.",
        height=150 + 34 * len(arms),
        xaxis={**STEP_AXIS, "range": [0, study.steps]},
        yaxis={
            "tickvals": list(range(len(arms))),
            "ticktext": [label(arm) for arm in arms],
            "range": [len(arms) - 0.5, -0.5],
        },
        meta={"rows": arms},
        showlegend=False,
        remarks=remarks,
    )
    intro = (
        "A finding is a fact about an implementation: a wrong shape or dtype, an error, a "
        "value that is no number. An alert is a figure past a threshold that somebody has "
        "published; a sound run may cross one."
    )
    return section_of(chart, "Findings and alerts", key="events", intro=intro, fixed=["arm"])


def marks_of(study: RecordedStudy) -> list[EventMark]:
    """Return the events of all runs, and the last step of each that diverged or failed."""
    marks = []
    for arm in study.arms:
        for seed, run in arm.runs.items():
            marks += [
                EventMark(arm.name, seed, e.step, e.kind, e.layer, e.text) for e in run.events
            ]
            if run.state in SYMBOLS:
                step = run.manifest.step if run.manifest else 0
                marks.append(EventMark(arm.name, seed, step, run.state, "", run.message))
    return marks


def _first_of_each(marks: list[EventMark]) -> list[EventMark]:
    if len(marks) <= SHOWN:
        return marks
    groups: dict[tuple[str, str], list[EventMark]] = {}
    for mark in marks:
        groups.setdefault((mark.arm, mark.kind), []).append(mark)
    each = SHOWN // len(groups)
    return [m for group in groups.values() for m in sorted(group, key=attrgetter("step"))[:each]]


def _traces(
    marks: list[EventMark], arms: list[str], styles: Mapping[str, ArmStyle]
) -> Iterator[dict[str, Any]]:
    for place, arm in enumerate(arms):
        for kind, symbol in SYMBOLS.items():
            mine = [mark for mark in marks if mark.arm == arm and mark.kind == kind]
            if not mine:
                continue
            yield {
                "type": "scatter",
                "mode": "markers",
                "name": f"{label(arm)}: {kind}",
                "meta": {"arm": arm},
                "x": [mark.step for mark in mine],
                "y": [place] * len(mine),
                "text": [_folded(f"seed {m.seed}, {m.layer or 'run'}: {m.text}") for m in mine],
                "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
                "marker": {"symbol": symbol, "size": 11, "color": styles[arm].colour},
            }


def _folded(text: str, width: int = 60, most: int = 6) -> str:
    """Return a text in lines that a hover has room for; the page's list of events has all of it."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()[:width]
    shown = lines[:most] + (["..."] if len(lines) > most else [])
    return "<br>".join(label(line) for line in shown)
