"""The page of a study, and of a probe: one HTML file that works from disk, without any network.

A page is a view of the records: the same records give the same bytes. Leaves out the measurements
(`analysis`), the charts (a file each subject) and the tables' cells (`tables`).
"""

import json
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from stability.analysis.arm_growth import study_growth
from stability.analysis.evidence import LEVELS
from stability.analysis.ladder import Ladder, ladder_of
from stability.analysis.ladder_sentences import candidate_sentences, notes
from stability.analysis.probe_answer import answer_of_probe
from stability.analysis.probe_records import RecordedProbe, metrics_of_study, read_probe
from stability.analysis.study_hashes import shown_hashes
from stability.analysis.study_records import RecordedStudy
from stability.config.schema import BASELINE
from stability.records.atomic_files import write_text
from stability.records.paths import StudyPaths
from stability.report.page.attention_charts import inside_sections, probe_sections, study_deviation
from stability.report.page.chart import Chart, Section
from stability.report.page.event_chart import event_section, marks_of
from stability.report.page.gradient_charts import gradient_section
from stability.report.page.ladder_chart import ladder_chart
from stability.report.page.operator_charts import waterfall_section
from stability.report.page.tables import (
    changes,
    environment_lines,
    hash_lines,
    ladder_lines,
    numerics_text,
    proof_legend,
)
from stability.report.page.training_charts import (
    drift_section,
    held_out_section,
    loss_section,
    watch_section,
)
from stability.report.page.weight_charts import parameter_section, weight_section
from stability.report.terminal.probe import shown_lines
from stability.report.view.error_bars import bars_are, growth_cells, growth_sentence
from stability.report.view.evidence import (
    evidence_rows,
    headline,
    legend_of,
    scope_line,
    verdict_of,
)
from stability.report.view.ladder import has_held_out
from stability.report.view.palette import arm_styles
from stability.report.view.unlisted import unlisted_runs

__all__ = ["fill", "render", "render_probe", "write_page", "write_probe_page"]

ASSETS = Path(__file__).parent / "assets"
"""Holds the templates, styles and scripts."""
PROBE_PAGE = "probe.html"


def write_page(study: RecordedStudy, study_dir: Path, *, reload_s: int = 0) -> Path:
    """Write `report.html`, and `ladder.json` beside it, from the records of a study as it was read.

    Returns the path of the report. Also works while the study runs.
    With `reload_s` the page loads itself anew every so many seconds.
    """
    ladder = ladder_of(study)
    paths = StudyPaths(study_dir)
    write_text(paths.ladder, ladder.to_json())
    write_text(paths.report, render(study, ladder, reload_s=reload_s))
    return paths.report


def write_probe_page(folder: Path) -> Path:
    """Write `probe.html` from the records of the probe in `folder`, and return its path.

    ValueError as `read_probe`. Also works while the probe runs.
    """
    path = folder / PROBE_PAGE
    write_text(path, render_probe(read_probe(folder)))
    return path


def render(study: RecordedStudy, ladder: Ladder, *, stamp: str = "", reload_s: int = 0) -> str:
    """Return a study's whole page; every name and message in it is shown as text.

    `stamp` is as in `fill`; with `reload_s` the page loads itself anew so often.
    """
    styles = arm_styles([arm.name for arm in study.arms])
    chart = ladder_chart(ladder, styles)
    verdict = verdict_of(study)
    sections = [
        loss_section(study, styles),
        held_out_section(study, styles),
        gradient_section(verdict, study.policy, styles),
        event_section(study, styles),
        drift_section(study, styles),
        parameter_section(study),
        study_deviation(study),
        waterfall_section(study),
        *inside_sections(metrics_of_study(study)),
        watch_section(study, styles),
        weight_section(study, styles),
    ]
    evidence = evidence_rows(verdict) if verdict else []
    growth = [row for row in study_growth(study) if row.slope.n and row.slope.mean != 0]
    return fill(
        "report.html.j2",
        charts=[chart],
        sections=[section for section in sections if section],
        stamp=stamp,
        study=study,
        ladder=ladder,
        unlisted=unlisted_runs(study),
        reload_s=reload_s,
        baseline=BASELINE,
        styles=styles,
        verdict=verdict,
        answer=headline(verdict) if verdict else "",
        evidence=evidence,
        legend=legend_of(evidence),
        scope=scope_line(study) if verdict and verdict.look else "",
        levels=LEVELS,
        drift_sentences=candidate_sentences(ladder),
        notes=notes(ladder),
        lines=ladder_lines(ladder),
        held_out=has_held_out(ladder),
        small_print=bars_are(len(ladder.seeds)),
        chart=chart,
        growth=[growth_cells(row) for row in growth],
        growth_sentence=growth_sentence(growth[0].dynamics) if growth else "",
        changes=changes(study),
        numerics=[(arm.name, numerics_text(arm)) for arm in study.arms],
        hash_names=shown_hashes(study),
        proofs=hash_lines(study),
        proof_legend=proof_legend(study),
        environment=environment_lines(study),
        events=marks_of(study),
    )


def render_probe(probed: RecordedProbe, stamp: str = "") -> str:
    """Return a probe's whole page; every name and message in it is shown as text.

    `stamp` is as in `fill`.
    """
    steps = [str(step) for step in probed.steps()]
    answer = answer_of_probe(probed)
    described = {"the model's": probed.record.primary, **probed.record.shadows}
    return fill(
        "probe.html.j2",
        charts=[],
        sections=probe_sections(probed),
        stamp=stamp,
        probed=probed,
        steps=", ".join(steps if len(steps) <= 8 else [*steps[:4], "...", *steps[-3:]]),
        answer=answer,
        located=shown_lines(answer),
        descriptions=[(name, json.dumps(text, indent=1)) for name, text in described.items()],
    )


def prose(text: str) -> Markup:
    """Return a sentence as a page shows it: a key or command in backticks is code.

    What a name of the user's may hold besides, such as a template literal, stays as it is.
    """

    def shown(part: re.Match[str]) -> str:
        is_ours = re.fullmatch(r"[\w .,:{}/=-]+", part[1])
        return f"<code>{part[1]}</code>" if is_ours else part[0]

    return Markup(re.sub(r"`([^`]+)`", shown, str(escape(text))))


def fill(
    template: str, *, charts: list[Chart], sections: list[Section], stamp: str = "", **values: Any
) -> str:
    """Return a page with `charts` and those of `sections`, and all that it needs to draw them.

    A page with a `stamp`, that of the records it shows, is one of the live server: it gets its
    scripts from there, and asks whether the stamp has changed. `values` are the template's.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
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
    # a name of a file may hold half a surrogate pair, which is no text that a page can hold
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def _script_json(content: Any) -> Any:
    """Return JSON that is safe inside a script: no string in it can open or close a tag."""
    text = json.dumps(content, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _verbatim(name: str) -> Any:
    return Markup((ASSETS / name).read_text(encoding="utf-8"))
