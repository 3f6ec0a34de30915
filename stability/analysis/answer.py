"""The study's answer in one sentence: the verdict of its own policy, or why there is none yet.

Leaves out how it is judged (`verdict`).
"""

from dataclasses import dataclass
from typing import Literal

from stability.analysis.study_records import RecordedStudy
from stability.analysis.verdict import Outcome, judge_study

__all__ = ["Answer", "answer_of"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the study's policy says of its candidate."""

    outcome: Outcome | Literal["OPEN"]
    """OPEN: it can't be judged yet."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence if self.outcome == "OPEN" else f"{self.outcome}: {self.sentence}"


def answer_of(study: RecordedStudy) -> Answer | None:
    """Return the answer of the study's own policy; None if it names no candidate."""
    if not study.policy.candidate:
        return None
    try:
        verdict = judge_study(study, study.policy)
    except ValueError as error:
        return Answer("OPEN", f"No verdict yet: {str(error).removeprefix('verdict: ')}.")
    return Answer(verdict.outcome, verdict.sentence.removeprefix(f"{verdict.outcome}: "))
