"""Several studies side by side as one page: what each says, what differs between them, ladders.

Leaves out the charts (`compare_charts`) and whether the studies may be compared: the page shows all
that differs between them, and the reader judges.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stability.analysis.ladder import Ladder, ladder_of
from stability.analysis.number_text import MISSING
from stability.analysis.study_records import RecordedStudy
from stability.config.diff import leaves
from stability.report.live.study_summary import Summary, summary_of_study
from stability.report.page.compare_charts import drift_of_arm_section, study_styles
from stability.report.page.html import fill
from stability.report.page.ladder_chart import ladders_chart
from stability.report.page.tables import LadderLine, ladder_lines
from stability.report.view.error_bars import bars_are

__all__ = ["differences", "render_comparison"]

READING = ("seeds", "yardstick", "early_step")
"""What decides how a study's drifts are read, besides the config of its baseline."""
NUMBERS = ("ratio_early", "ratio_last", "drift_early", "drift_last")
"""The columns of the table of all ladders."""


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
    styles = study_styles(list(studies))
    chart = ladders_chart(ladders, styles)
    found = differences(studies)
    return fill(
        "compare.html.j2",
        charts=[chart],
        sections=[drift_of_arm_section(studies, styles)],
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
    plain = [
        leaves(study.base)
        | dict(zip(READING, (list(study.seeds), study.yardstick, study.early_step), strict=True))
        for study in studies.values()
    ]
    paths = dict.fromkeys(path for each in plain for path in each)
    rows = [
        (path, [_value(each[path]) if path in each else MISSING for each in plain])
        for path in paths
        if not path.startswith(("probe.", "watch."))
    ]
    return [(path, values) for path, values in rows if len(set(values)) > 1]


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


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
