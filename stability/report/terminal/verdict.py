"""A verdict as lines of text: the answer first, then one sentence a level for each arm."""

import textwrap

from stability.analysis.evidence import LevelEvidence
from stability.analysis.verdict import ArmVerdict, StudyVerdict

__all__ = ["WIDTH", "verdict_lines"]

WIDTH = 80


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
