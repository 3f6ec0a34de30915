"""Several studies side by side as one page: what each says, what differs between them, their drift.

Whether the studies may be compared is left to the reader, who is shown all that differs between
them. Leaves out the chart of their ladders (`page.ladder_chart`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stability.analysis.ladder import Ladder, early_step_of, ladder_of, yardstick_of
from stability.analysis.number_text import MISSING
from stability.analysis.study_records import RecordedStudy
from stability.config.diff import leaves
from stability.config.schema import BASELINE
from stability.records.metric_table import SHOWN_DRIFTS
from stability.report.live.study_summary import Summary, summary_of_study
from stability.report.page.chart import Section, arm_lines, make_chart, section_of
from stability.report.page.html import fill
from stability.report.page.ladder_chart import ladders_chart
from stability.report.page.tables import LadderLine, ladder_lines, value_text
from stability.report.page.training_charts import drift_layout
from stability.report.view.drift import drift_by_seed
from stability.report.view.error_bars import bars_are
from stability.report.view.ladder import is_candidate
from stability.report.view.palette import DASHES, ArmStyle, arm_styles

__all__ = ["differences", "render_comparison"]

READING = ("seeds", "yardstick", "early_step")
"""What decides how a study's drifts are read, besides the config of its baseline."""
NUMBERS = ("ratio_early", "ratio_last", "drift_early", "drift_last")
"""The columns of the table of all ladders."""
SHOWN = "arm shown"
"""A choice of the drift chart. `arm` in a trace's `meta` is what is switched on and off: here a
study."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compared:
    """One of the studies."""

    name: str
    address: str
    colour: str
    summary: Summary
    ladder: Ladder
    lines: list[LadderLine]


def render_comparison(
    studies: Mapping[str, RecordedStudy], addresses: Mapping[str, str], stamp: str
) -> str:
    """Return the page on `studies` by name; `addresses` of their own pages; `stamp` as in `fill`.

    Every name and message is shown as text, whatever it holds.
    """
    ladders = {name: ladder_of(study) for name, study in studies.items()}
    styles = _study_styles(list(studies))
    chart = ladders_chart(ladders, styles)
    found = differences(studies)
    return fill(
        "compare.html.j2",
        charts=[chart],
        sections=[_drift_section(studies, styles)],
        stamp=stamp,
        chart=chart,
        styles=styles,
        small_print=bars_are(max(len(study.seeds) for study in studies.values())),
        differences=found,
        remarks=_remarks(ladders, [path for path, _ in found]),
        studies=[
            _Compared(
                name=name,
                address=addresses[name],
                colour=styles[name].colour,
                summary=summary_of_study(study),
                ladder=ladders[name],
                lines=ladder_lines(ladders[name], NUMBERS),
            )
            for name, study in studies.items()
        ],
    )


def differences(studies: Mapping[str, RecordedStudy]) -> list[tuple[str, list[str]]]:
    """Return each path in which the studies' baselines or seeds differ, with each one's value.

    A path that a study does not have is a dash. As in `config.diff`, looking changes nothing:
    `probe` and `watch` are left out.
    """
    plain = [leaves(study.base) | _reading(study) for study in studies.values()]
    paths = dict.fromkeys(path for each in plain for path in each)
    rows = [
        (path, [value_text(each[path]) if path in each else MISSING for each in plain])
        for path in paths
        if not path.startswith(("probe.", "watch."))
    ]
    return [(path, values) for path, values in rows if len(set(values)) > 1]


def _reading(study: RecordedStudy) -> dict[str, object]:
    values = (list(study.seeds), yardstick_of(study), early_step_of(study))
    return dict(zip(READING, values, strict=True))


def _remarks(ladders: Mapping[str, Ladder], differing: Sequence[str]) -> list[str]:
    found = []
    if not set(differing) <= set(READING):
        found.append(
            "The baselines differ, so a drift here can't be set against a drift there; a ratio to "
            "each study's own yardstick can."
        )
    yardsticks = {name: ladder.yardstick or "none" for name, ladder in ladders.items()}
    if len(set(yardsticks.values())) > 1:
        listed = ", ".join(f"{name}: {yardstick}" for name, yardstick in yardsticks.items())
        found.append(f"The yardsticks differ ({listed}), so 1x is not the same in each.")
    return found


def _study_styles(names: Sequence[str]) -> dict[str, ArmStyle]:
    """Return a colour, dash and symbol for each study."""
    return {
        name: replace(style, dash=DASHES[place % len(DASHES)])
        for place, (name, style) in enumerate(arm_styles([BASELINE, *names]).items(), start=-1)
        if name in names
    }


def _drift_section(studies: Mapping[str, RecordedStudy], styles: Mapping[str, ArmStyle]) -> Section:
    """Return the drift of one arm at a time over the steps, a line a study."""
    lines = [
        line
        for metric in SHOWN_DRIFTS
        for name in _arms(studies)
        for study_name, study in studies.items()
        if (arm := study.arm(name))
        for line in arm_lines(
            study_name,
            drift_by_seed(arm, metric),
            styles[study_name],
            bold=True,
            positive=True,
            hover="%{y:.5e}",
            meta={SHOWN: name, "metric": metric},
        )
    ]
    chart = make_chart(
        "drift-of-arm",
        "Distance from the weights of each study's own baseline",
        lines,
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
        **drift_layout({step for study in studies.values() for step in study.drift_steps}),
    )
    return section_of(chart, "Drift of one arm", fixed=["arm"])


def _arms(studies: Mapping[str, RecordedStudy]) -> list[str]:
    """Return every arm, first those of the most studies, of these the candidates."""
    arms = [arm for study in studies.values() for arm in study.candidates]
    names = [arm.name for arm in arms]
    attention = {arm.name for arm in arms if is_candidate(arm)}
    return sorted(
        dict.fromkeys(names), key=lambda name: (-names.count(name), name not in attention)
    )
