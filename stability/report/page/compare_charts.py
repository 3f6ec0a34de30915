"""How several studies are drawn on one page: a colour for each, and one arm's drift in each.

Leaves out their ladders (`ladder_chart`), and the tables and words around (`compare_page`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.config.schema import BASELINE
from stability.report.page.chart import Section, arm_lines, make_chart, section_of
from stability.report.page.training_charts import drift_by_seed, drift_layout
from stability.report.view.drift import DRIFT_TITLES
from stability.report.view.ladder import is_candidate
from stability.report.view.palette import DASHES, ArmStyle, arm_styles

__all__ = ["drift_of_arm_section", "study_styles"]

SHOWN = "arm shown"
"""A choice of the drift chart. `arm` in a `meta` is what is switched on and off: here a study."""


def study_styles(names: Sequence[str]) -> dict[str, ArmStyle]:
    """Return a colour, dash and symbol for each study."""
    return {
        name: replace(style, dash=DASHES[place % len(DASHES)])
        for place, (name, style) in enumerate(arm_styles([BASELINE, *names]).items(), start=-1)
        if name in names
    }


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
    attention = {arm.name for arm in arms if is_candidate(arm)}
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
