"""`stability verdict` and `stability verify`: checks of a study that answer by their exit code.

A verdict judges a candidate by a policy; a verification proves that two runs may be compared.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.output import FAILS, HOLDS, UNDECIDED, print_json, print_line

if TYPE_CHECKING:
    from stability.analysis.pair_contract import PairProof

__all__ = ["verdict", "verify"]

_EXIT_CODES = {"PASS": HOLDS, "FAIL": FAILS, "INCONCLUSIVE": UNDECIDED}


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
    from stability.analysis.study_records import read_study  # heavy: numpy
    from stability.analysis.verdict import judge_study

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
    judged = judge_study(recorded, policy)
    if json:
        print_json(judged.to_dict())
    else:
        print_line(judged.sentence)
    return _EXIT_CODES[judged.outcome]


def verify(first: Path, second: Path | None = None, json: bool = False) -> int:
    """Prove from the records that runs may be compared, or show the first thing that says no.

    Exit code 0 if every pair holds, 1 if one does not.

    Args:
        first: a run's folder, runs/<study>/<arm>/seed-<n>, the baseline; or a study's folder
        second: the run it is paired with; none with a study, where every pair is proven
        json: print the proof as JSON
    """
    from rich.console import Console  # heavy, and so is numpy behind the rest

    from stability.analysis.pair_contract import prove_pair
    from stability.records.paths import run_at
    from stability.report.terminal.pairs import print_proof, print_proofs

    if second is not None:
        proofs = [prove_pair(run_at(first, "verify: first"), run_at(second, "verify: second"))]
    else:
        proofs = _proofs_of_study(first)
    if json:
        print_json([proof.to_dict() for proof in proofs])
    elif second is not None:
        print_proof(proofs[0], Console())
    else:
        print_proofs(proofs, Console())
    return FAILS if any(proof.breach for proof in proofs) else HOLDS


def _proofs_of_study(folder: Path) -> list["PairProof"]:
    from stability.analysis.pair_contract import prove_pair  # heavy: numpy
    from stability.analysis.study_records import read_study
    from stability.config.schema import BASELINE
    from stability.records.paths import RunPaths

    study = read_study(folder)
    pairs = [
        (RunPaths.for_run(folder, BASELINE, seed), run.paths)
        for arm in study.candidates
        for seed, run in arm.runs.items()
    ]
    begun = [(a, b) for a, b in pairs if a.manifest.is_file() and b.manifest.is_file()]
    if not begun:
        raise ValueError(f"verify: {folder} holds no pair of runs yet; `stability run` makes them")
    return [prove_pair(a, b) for a, b in begun]
