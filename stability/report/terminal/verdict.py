"""A verdict in the terminal: the answer first, then the evidence.

`print_answer` shows the table of four levels by arms, which fits 80 columns; `verdict_lines` are
one sentence a level for each arm, with figure, interval and limit.
"""

import textwrap

from rich.console import Console
from rich.text import Text

from stability.analysis.evidence import LEVELS
from stability.analysis.verdict import ArmVerdict, StudyVerdict
from stability.report.terminal.tables import (
    ALARM,
    BAD_BADGE,
    FINE,
    FINE_BADGE,
    OPEN,
    OPEN_BADGE,
    add_row,
    ruled_table,
)
from stability.report.view.evidence import (
    EvidenceCell,
    EvidenceRow,
    Tone,
    evidence_rows,
    headline,
    judged_at,
    legend,
    legend_of,
)
from stability.report.view.plain_text import as_text

__all__ = ["WIDTH", "print_answer", "verdict_lines"]

WIDTH = 80
TONE_STYLE: dict[Tone, str] = {"good": FINE_BADGE, "bad": BAD_BADGE, "open": OPEN_BADGE}
STATE_STYLE = {"holds": FINE, "harmed": ALARM, "undecided": OPEN}


def print_answer(
    question: str, verdict: StudyVerdict | None, console: Console, scope: str = ""
) -> None:
    """Print a study's question, the answer, the evidence of four levels by arms, and its `scope`.

    Without a verdict, since no arm is a candidate, the question stands alone.
    """
    console.print()
    console.print(as_text(question, style="bold"))
    if verdict is None:
        return
    console.print()
    console.print(as_text(headline(verdict), style="bold"))
    for reason in verdict.exploratory:
        console.print(as_text(f"exploratory: {reason}", style=OPEN))
    console.print()
    table = ruled_table(["arm"], LEVELS)
    rows = evidence_rows(verdict)
    for row in rows:
        add_row(table, _arm(row), *(_cell(cell, row) for cell in row.cells))
    console.print(table)
    console.print()
    for row in rows:
        console.print(as_text(f"{row.arm} {row.answer}. {row.sentence}"))
    if said := legend_of(rows):
        console.print(as_text(said, style="dim"))
    again = f"; {verdict.outlook}" if verdict.outlook else ""
    if verdict.look and scope:
        console.print(as_text(scope, style="dim"))
    said = f"{judged_at(verdict)}{again}. `stability verdict` has a sentence for each cell."
    console.print(as_text(said, style="dim"))


def _arm(row: EvidenceRow) -> Text:
    return Text.assemble(as_text(row.arm), "\n", (row.answer, TONE_STYLE[row.tone]))


def _cell(cell: EvidenceCell, row: EvidenceRow) -> Text:
    figure = as_text(cell.figure, style="dim")
    # harm to what is broken on purpose is no alarm
    style = "bold" if row.is_control else STATE_STYLE.get(cell.state, "dim")
    return Text.assemble((cell.word, style), "\n", figure)


def verdict_lines(verdict: StudyVerdict, arms: tuple[ArmVerdict, ...]) -> list[str]:
    """Return the lines of the verdict on `arms`, none longer than WIDTH."""
    lines = _wrapped(f"{headline(verdict)}.") if len(arms) == len(verdict.arms) else []
    if verdict.exploratory:
        lines += _wrapped(f"EXPLORATORY, so nothing is proven: {'; '.join(verdict.exploratory)}.")
    for arm in arms:
        lines += _arm_lines(arm)
    lines += ["", *said.splitlines()] if (said := legend(" ".join(lines))) else []
    more = f"; {verdict.outlook}" if verdict.outlook else ""
    at = f"Look at {verdict.look} seeds" if verdict.look else "No look yet"
    return [*lines, "", *_wrapped(f"{at}, one-sided error rate {verdict.alpha:.3g}{more}.")]


def _arm_lines(arm: ArmVerdict) -> list[str]:
    said = f"{arm.sentence[:1].upper()}{arm.sentence[1:]}."
    lines = ["", *_wrapped(f"{arm.arm} {arm.answer}. {said}")]
    for evidence in arm.levels.values():
        lines += _wrapped(f"{evidence.level} {evidence.state}: {evidence.reason}", "  ")
    if not arm.is_control:
        found = arm.assay.sentence
        lines += _wrapped(f"assay {arm.assay.state}: {found[:1].upper()}{found[1:]}.", "  ")
    return lines


def _wrapped(text: str, indent: str = "") -> list[str]:
    # a path or a name longer than a line stays whole: it is there to be copied
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
