"""A study's answer by its own policy, in sentences: arm by arm, or why there is none yet.

Leaves out how it is judged (`verdict`).
"""

from dataclasses import dataclass
from typing import Literal

from stability.analysis.sequential import LOOKS
from stability.analysis.study_records import RecordedStudy
from stability.analysis.verdict import Outcome, judge_arms

__all__ = ["Answer", "answer_of"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The study's answer, arm by arm: its policy's verdict, or why there is none yet."""

    outcome: Outcome | Literal["OPEN"]
    """The worst of the candidates'; OPEN if none can be judged yet."""
    sentences: tuple[str, ...]
    """`exploratory` if there is such, one for each candidate, then one for each arm that is broken
    on purpose."""
    exploratory: str = ""
    """What was changed after the protocol was sealed; mostly empty."""

    def __str__(self) -> str:
        return " ".join(self.sentences)


def answer_of(study: RecordedStudy) -> Answer | None:
    """Return the answer of the study's own policy; None if it has no candidate."""
    try:
        verdict = judge_arms(study, study.policy)
    except ValueError:
        return None
    changes, outcome = "", verdict.outcome
    if verdict.exploratory:
        changes = f"EXPLORATORY, so nothing is proven: {'; '.join(verdict.exploratory)}."
    if all(arm.seeds < LOOKS[0] and arm.outcome != "FAIL" for arm in verdict.candidates):
        # the same for every candidate, so said once
        outcome, said = "OPEN", [f"No verdict yet: the first look is at {LOOKS[0]} seeds."]
    else:
        said = [f"{arm.arm} {arm.answer}: {arm.sentence}." for arm in verdict.candidates]
        said += [f"{arm.arm} {arm.answer}." for arm in verdict.controls]
    return Answer(outcome, (changes, *said) if changes else tuple(said), changes)
