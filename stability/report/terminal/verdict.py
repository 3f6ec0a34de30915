"""A verdict in the terminal: the answer first, then the evidence.

`print_answer` shows the table of four levels by arms, which fits 80 columns; `verdict_lines` are
one sentence a level for each arm, with figure, interval and limit.
"""

import textwrap

from rich.console import Console
from rich.text import Text

from stability.analysis.evidence import LEVELS, LevelEvidence
from stability.analysis.verdict import ArmVerdict, StudyVerdict
from stability.report.terminal.tables import add_row, ruled_table
from stability.report.view.evidence import EvidenceCell, EvidenceRow, evidence_rows, headline
from stability.report.view.plain_text import as_text

__all__ = ["WIDTH", "print_answer", "verdict_lines"]

WIDTH = 80
OUTCOME_STYLE = {"PASS": "bold green", "FAIL": "bold red"}
STATE_STYLE = {"holds": "green", "harmed": "bold red", "undecided": "yellow"}


def print_answer(question: str, verdict: StudyVerdict | None, console: Console) -> None:
    """Print a study's question, the answer, and the evidence of four levels by arms.

    Without a verdict, since no arm is a candidate, the question stands alone.
    """
    console.print()
    console.print(as_text(question, style="bold"))
    if verdict is None:
        return
    console.print()
    console.print(as_text(headline(verdict), style="bold"))
    for reason in verdict.exploratory:
        console.print(as_text(f"exploratory: {reason}", style="yellow"))
    console.print()
    table = ruled_table(["arm"], LEVELS)
    rows = evidence_rows(verdict)
    for row in rows:
        add_row(table, _arm(row), *(_cell(cell) for cell in row.cells))
    console.print(table)
    console.print()
    for row in rows:
        must = " (broken on purpose, so it must fail)" if row.is_control else ""
        console.print(as_text(f"{row.arm} {row.outcome}{must}: {row.sentence}."))
    again = f"; the next look is at {verdict.next_look}" if verdict.next_look else ""
    at = f"judged at the look at {verdict.look} seeds" if verdict.look else "no look yet"
    said = f"{at}{again}. `stability verdict` has a sentence for each cell."
    console.print(as_text(said, style="dim"))


def _arm(row: EvidenceRow) -> Text:
    style = OUTCOME_STYLE.get(row.outcome, "bold yellow")
    return Text.assemble(as_text(row.arm), "\n", (row.outcome, style))


def _cell(cell: EvidenceCell) -> Text:
    figure = as_text(cell.figure, style="dim")
    return Text.assemble((cell.word, STATE_STYLE.get(cell.state, "dim")), "\n", figure)


def verdict_lines(verdict: StudyVerdict, arms: tuple[ArmVerdict, ...]) -> list[str]:
    """Return the lines of the verdict on `arms`, none longer than WIDTH."""
    lines = []
    if verdict.exploratory:
        lines += _wrapped(f"EXPLORATORY, so nothing is proven: {'; '.join(verdict.exploratory)}.")
    for arm in arms:
        lines += _arm_lines(arm)
    more = f"; the next look is at {verdict.next_look}" if verdict.next_look else ""
    at = f"look at {verdict.look} seeds" if verdict.look else "no look yet"
    return [*lines, *_wrapped(f"{at}, one-sided error rate {verdict.alpha:.3g}{more}.")]


def _arm_lines(arm: ArmVerdict) -> list[str]:
    is_control = " (broken on purpose)" if arm.role == "broken" else ""
    lines = _wrapped(f"{arm.outcome}: {arm.arm}{is_control}: {arm.sentence}.")
    for evidence in arm.levels.values():
        lines += _wrapped(_level_text(evidence), "  ")
    if arm.role != "broken":
        lines += _wrapped(f"assay {arm.assay.state}: {arm.assay.sentence}", "  ")
    return lines


def _level_text(evidence: LevelEvidence) -> str:
    decides = f" To decide it: {evidence.decides}" if evidence.decides else ""
    return f"{evidence.level} {evidence.state}: {evidence.sentence}{decides}"


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
