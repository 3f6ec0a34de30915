"""The study as one HTML file that works from disk: no network, no server, nothing beside it.

The page is a view of the records: the same records give the same bytes. Leaves out the numbers
(`analysis`), the charts (`figures`) and the tables' cells (`page_tables`).
"""

import json
import math
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from stability.analysis.arm_growth import study_growth
from stability.analysis.ladder import Ladder, ladder_of
from stability.analysis.pair_contract import HASHES
from stability.analysis.sentences import candidate_sentences, notes
from stability.analysis.study_records import RecordedStudy, read_study
from stability.analysis.verdict import answer_of
from stability.config.schema import BASELINE
from stability.records.atomic_files import write_text
from stability.records.paths import StudyPaths
from stability.report.page.chart import Chart, Section
from stability.report.page.event_chart import marks_of
from stability.report.page.study_charts import study_charts
from stability.report.page.tables import (
    changes,
    environment_lines,
    ladder_lines,
    numerics_text,
    proof_lines,
)
from stability.report.terminal.growth import growth_cells
from stability.report.view.palette import arm_styles
from stability.report.view.whiskers import what_ends_are

__all__ = ["fill", "render", "write_page", "write_report"]

PAGE = Path(__file__).parent / "assets"
"""Holds the templates, report.css and report.js."""


def write_report(study_dir: Path) -> Path:
    """Write `report.html`, and `ladder.json` beside it, from the study's records.

    Returns the path of the report. ValueError as `read_study`. Also works while the study runs.
    """
    return write_page(read_study(study_dir), study_dir)


def write_page(study: RecordedStudy, study_dir: Path, *, reload_s: int = 0) -> Path:
    """Write the report and the ladder of a study that has been read, and return the report's path.

    With `reload_s` the page loads itself anew every so many seconds.
    """
    ladder = ladder_of(study)
    paths = StudyPaths(study_dir)
    write_text(paths.ladder, ladder.to_json())
    write_text(paths.report, render(study, ladder, reload_s=reload_s))
    return paths.report


def render(study: RecordedStudy, ladder: Ladder, *, stamp: str = "", reload_s: int = 0) -> str:
    """Return the whole page; every name and message in it is shown as text, whatever it holds.

    `stamp` is as in `fill`; with `reload_s` the page loads itself anew so often.
    """
    chart, sections = study_charts(study, ladder)
    styles = arm_styles([arm.name for arm in study.arms])
    return fill(
        "report.html.j2",
        charts=[chart],
        sections=sections,
        stamp=stamp,
        study=study,
        ladder=ladder,
        reload_s=reload_s,
        baseline=BASELINE,
        styles=styles,
        answer=answer_of(study),
        verdicts=candidate_sentences(ladder),
        notes=notes(ladder),
        lines=ladder_lines(ladder),
        small_print=what_ends_are(len(ladder.seeds)),
        chart=chart,
        growth=[growth_cells(row) for row in study_growth(study) if not math.isnan(row.rate.mean)],
        changes=changes(study),
        numerics=[(arm.name, numerics_text(arm)) for arm in study.arms],
        hash_names=HASHES,
        proofs=proof_lines(study),
        environment=environment_lines(study),
        events=marks_of(study),
    )


def fill(
    template: str, *, charts: list[Chart], sections: list[Section], stamp: str = "", **values: Any
) -> str:
    """Return a page with the figures of `charts` and `sections`, and all it needs to draw them.

    With a `stamp`, that of the records shown, the page is one of `server`: it gets its scripts from
    there, and asks for a newer stamp.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = {
        shown.key: shown.figure.to_plotly_json()
        for shown in [*charts, *(chart for section in sections for chart in section.charts)]
    }
    page = environment.get_template(template).render(
        sections=sections,
        figures=_script_json({"figures": figures}),
        stamp=stamp,
        style=_verbatim("report.css"),
        script=_verbatim("report.js"),
        plotly=Markup("" if stamp else get_plotlyjs()),
        **values,
    )
    # a file system may hold names that are no text: half a surrogate pair, which no page can hold
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def _script_json(content: Any) -> Any:
    """Return JSON that can't end or open a tag, whatever strings it holds, safe in a script."""
    text = json.dumps(content, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _verbatim(name: str) -> Any:
    return Markup((PAGE / name).read_text(encoding="utf-8"))
