"""A verdict as Markdown, to paste into a pull request, and as annotations of a GitHub workflow.

Leaves out the judgement (`analysis.verdict`) and what a cell says (`view.evidence`).
"""

import re
from collections.abc import Iterable

from stability import __version__
from stability.analysis.evidence import LEVELS
from stability.analysis.ladder import Ladder, ladder_of
from stability.analysis.number_text import MISSING
from stability.analysis.study_records import RecordedStudy
from stability.analysis.verdict import ArmVerdict, StudyVerdict
from stability.report.view.evidence import (
    EvidenceRow,
    evidence_rows,
    headline,
    judged_at,
    legend_of,
    scope_line,
    verdict_of,
)
from stability.report.view.ladder import has_held_out, numbers
from stability.report.view.plain_text import readable

__all__ = ["annotations", "summary_text"]

_SIGNS = {"good": "✅", "bad": "❌", "open": "❔"}


def summary_text(
    study: RecordedStudy,
    verdict: StudyVerdict | None = None,
    arms: Iterable[ArmVerdict] | None = None,
) -> str:
    """Return a study's answer, evidence and drifts as Markdown; of `arms` alone, where given."""
    verdict = verdict or verdict_of(study)
    chosen = None if arms is None else {arm.arm for arm in arms}
    lines = [
        f"### {_plain(study.name)}: {_plain(headline(verdict) if verdict else 'no candidate')}"
    ]
    lines += ["", f"*{_plain(study.question)}*", ""]
    if verdict:
        for reason in verdict.exploratory:
            lines += [f"**EXPLORATORY, so nothing is proven:** {_plain(reason)}", ""]
        rows = [row for row in evidence_rows(verdict) if chosen is None or row.arm in chosen]
        lines += _table(["arm", *LEVELS, "answer"], [_cells(row) for row in rows])
        lines += [""]
        for row in rows:
            lines += [f"**{_plain(row.arm)} {_plain(row.answer)}.** {_plain(row.sentence)}", ""]
        if said := legend_of(rows):
            lines += [f"<sub>{said}</sub>", ""]
    lines += ["<details><summary>Drifts</summary>", ""]
    lines += [*_drifts(ladder_of(study)), "", "</details>", ""]
    said = [f"training-stability {__version__}."]
    if verdict and verdict.look:
        at = judged_at(verdict)
        said = [f"{at[0].upper()}{at[1:]}.", _plain(scope_line(study)), *said]
    lines += [f"<sub>{' '.join(filter(None, said))}</sub>"]
    return "\n".join(lines) + "\n"


def _cells(row: EvidenceRow) -> list[str]:
    cells = [f"{cell.word}<br>{_plain(cell.figure)}" for cell in row.cells]
    return [_plain(row.arm), *cells, f"{_SIGNS[row.tone]} {_plain(row.answer)}"]


def _drifts(ladder: Ladder) -> list[str]:
    """Return the ladder's table: means over the seeds, the drifts as relative L2."""
    heads = {"final_loss": "final loss"}
    if has_held_out(ladder):
        heads["held_out_loss"] = "held-out loss"
    steps = {"early": ladder.early_step, "last": ladder.last_step}
    heads |= {f"drift_{when}": f"drift, step {step}" for when, step in steps.items()}
    if ladder.yardstick:
        named = _plain(ladder.yardstick)
        heads |= {f"ratio_{when}": f"x {named}, step {step}" for when, step in steps.items()}
    rows = []
    for row in ladder.rows:
        found = {name: number for name, number in numbers(row).items() if name in heads}
        change = row.change if row.state == "finished" else f"{row.change} [{row.state}]"
        cells = [found[name] for name in heads]
        written = [each.write(each.values.mean) if each.values.n else MISSING for each in cells]
        rows.append([_plain(row.arm), _plain(change), *written])
    return _table(["arm", "what changed", *heads.values()], rows)


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _plain(text: str) -> str:
    """Return text in which nothing is Markdown or HTML: names and questions are the user's."""
    shown = readable(" ".join(text.split()))
    # no address is a link, and nobody is called
    return re.sub(r"[\\`*_\[\]<>|#&@~$]|://|www\.", _escaped_sign, shown)


def _escaped_sign(match: re.Match[str]) -> str:
    sign = match.group()
    # in a table's cell a backslash before a bar, or before HTML, is not heard everywhere
    if sign in ("://", "www."):
        return sign[:-1] + f"&#{ord(sign[-1])};"
    return f"&#{ord(sign)};" if sign in "<>|&@" else f"\\{sign}"


def annotations(verdict: StudyVerdict, arms: Iterable[ArmVerdict]) -> list[str]:
    """Return a workflow command for each arm: an error, a warning or a notice.

    A control that is found to be harmed, as it must, is a notice.
    """
    chosen = {arm.arm for arm in arms}
    levels = {"good": "notice", "bad": "error", "open": "warning"}
    return [
        f"::{levels[row.tone]} title={_escaped(f'{row.arm} {row.answer}', ':,')}::"
        f"{_escaped(row.sentence)}"
        for row in evidence_rows(verdict)
        if row.arm in chosen
    ]


def _escaped(text: str, more: str = "") -> str:
    """Return text as a workflow command takes it; in a property `more` signs are escaped."""
    for sign in ("%", "\r", "\n", *more):
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text
