"""The verdict as every view shows it: a line for each arm, four cells of evidence, an outcome.

Each cell has a state and a figure of at most 16 characters; the sentence behind it says the same
with interval and limit. Leaves out the judgement (`analysis.verdict`) and how a cell is drawn.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stability.analysis.evidence import LEVELS, LevelState
from stability.analysis.scope import scope_of
from stability.analysis.sequential import LOOKS
from stability.analysis.study_records import RecordedStudy
from stability.analysis.verdict import ArmVerdict, StudyVerdict, judge_arms

__all__ = [
    "STATE_WORDS",
    "EvidenceCell",
    "EvidenceRow",
    "Tone",
    "evidence_rows",
    "headline",
    "judged_at",
    "legend",
    "legend_of",
    "scope_line",
    "verdict_of",
]

Tone = Literal["good", "bad", "open"]
"""How an arm's answer is coloured. A control that fails is good: it was planted to be found."""

STATE_WORDS: dict[LevelState, str] = {
    "holds": "holds",
    "harmed": "HARMED",
    "undecided": "undecided",
    "not applicable": "n/a",
    "not measured": "not measured",
}
"""A state in a table's cell."""

_NUMBER = r"(?:\d[\d.]*(?:e[+-]?\d+)?|inf|nan)"
_ENDS = r"(?=[\s,.;)]|$)"
# not within a name: an arm may be called lr-10x, or wd-5%
_LEGENDS = {
    rf"(?<![\w.-]){_NUMBER}x{_ENDS}": (
        "x: an error, as a multiple of plain attention's or the baseline's."
    ),
    rf"(?<![^\s(])[+-]{_NUMBER}%": (
        "%: by how much a result of the attention is too large, its gain."
    ),
    r"\bE \d": "E: an arm's distance from the reference's weights, over the baseline's distance.",
    r"\bf -?\d": "f: the share of a gradient's squared error that is the same at all looks.",
}
"""What a figure is, by what it looks like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceCell:
    """What one level says of one arm."""

    state: LevelState
    figure: str
    """At most 16 characters; empty where there is no figure."""
    sentence: str
    """The finding with its limit, and what would decide it; read after the state, which it does not
    repeat."""

    @property
    def word(self) -> str:
        """The state in a table."""
        return STATE_WORDS[self.state]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceRow:
    """One arm: its outcome, why, and a cell for each of `LEVELS`."""

    arm: str
    outcome: str
    answer: str
    """The outcome, with a note where the arm is broken on purpose, and so has to fail."""
    tone: Tone
    is_control: bool
    sentence: str
    """The reason, with a full stop."""
    cells: tuple[EvidenceCell, ...]


def verdict_of(study: RecordedStudy) -> StudyVerdict | None:
    """Return the verdict by the study's own policy; None if it has no candidate."""
    try:
        return judge_arms(study, study.policy)
    except ValueError:
        return None


def headline(verdict: StudyVerdict) -> str:
    """Return the answer in one line: each candidate with its outcome, then the controls."""
    said = ", ".join(f"{arm.arm} {arm.answer}" for arm in verdict.candidates)
    if not verdict.look:
        return f"{said}: no verdict before the first look, at {LOOKS[0]} seeds"
    said = "; ".join([said, *(f"{arm.arm} {arm.answer}" for arm in verdict.controls)])
    return f"EXPLORATORY: {said}" if verdict.exploratory else said


def legend(text: str) -> str:
    """Return what x, %, E and f are, each on a line, where `text` has a figure of it."""
    return "\n".join(said for figure, said in _LEGENDS.items() if re.search(figure, text))


def judged_at(verdict: StudyVerdict) -> str:
    """Return at which look and step a study is judged."""
    if not verdict.look:
        return "no look yet"
    said = f"judged at the look at {verdict.look} seeds"
    figures = [arm.levels["training"].figures for arm in verdict.arms]
    if step := int(max((each.get("step", 0) for each in figures), default=0)):
        said += f", training at step {step}"
    if warm_up := int(max((each.get("warm_up", 0) for each in figures), default=0)):
        said += f", in the warm-up of {warm_up} updates"
    return said


def legend_of(rows: Iterable[EvidenceRow]) -> str:
    """Return the legend of what the rows show: their sentences and the figures of their cells."""
    return legend(
        " ".join(x for row in rows for x in (row.sentence, *(c.figure for c in row.cells)))
    )


def scope_line(study: RecordedStudy) -> str:
    """Return the sentence that says what was tried, and that nothing else was."""
    scope = scope_of(study)
    return f"Tried: {scope}; nothing else." if scope else ""


def evidence_rows(verdict: StudyVerdict) -> list[EvidenceRow]:
    """Return the lines of the table: candidates first, then what is broken on purpose."""
    return [_row(arm) for arm in verdict.arms]


def _row(arm: ArmVerdict) -> EvidenceRow:
    return EvidenceRow(
        arm=arm.arm,
        outcome=arm.outcome,
        answer=arm.answer,
        tone=_tone(arm),
        is_control=arm.is_control,
        sentence=f"{arm.sentence[:1].upper()}{arm.sentence[1:]}.",
        cells=tuple(
            EvidenceCell(
                state=arm.levels[level].state,
                # a silent level has its state for a figure, and once is enough
                figure="" if arm.levels[level].cell in STATE_WORDS else arm.levels[level].cell,
                sentence=arm.levels[level].reason,
            )
            for level in LEVELS
            if level in arm.levels
        ),
    )


def _tone(arm: ArmVerdict) -> Tone:
    if not arm.is_control:
        return "good" if arm.outcome == "PASS" else "bad" if arm.outcome == "FAIL" else "open"
    return "good" if arm.outcome == "FAIL" else "open" if arm.answer == arm.outcome else "bad"
