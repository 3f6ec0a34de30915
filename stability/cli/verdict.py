"""`stability verdict`: whether a study's candidate passes its policy, for people and for CI."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_study
from stability.cli.output import print_json

__all__ = ["verdict"]

EXIT_CODES = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


def verdict(
    study: Path,
    candidate: str = "",
    yardstick: str = "",
    max_ratio: float | None = None,
    step: int | None = None,
    level: float | None = None,
    json: bool = False,
) -> int:
    """Say whether the candidate drifts less than the policy allows. What is not given is as in the
    study's own `policy`.

    Exit code 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE, 2 if it can't be judged.

    Args:
        study: the folder of a study, e.g. runs/quickstart
        candidate: the arm that is judged
        yardstick: the arm that it is held against
        max_ratio: PASS if the candidate drifts at most so many times as far
        step: the step at which, one with a snapshot; 0 is the study's early step
        level: of the interval that has to lie on one side, e.g. 0.9
        json: print the verdict as JSON
    """
    recorded = read_study(study)
    given = {
        "candidate": candidate or None,
        "yardstick": yardstick or None,
        "max_ratio": max_ratio,
        "step": step,
        "level": level,
    }
    policy = replace(
        recorded.policy, **{name: value for name, value in given.items() if value is not None}
    )
    found = judge_study(recorded, policy)
    if json:
        print_json(found.to_dict())
    else:
        Console().print(found.sentence, highlight=False, markup=False, soft_wrap=True)
    return EXIT_CODES[found.outcome]
