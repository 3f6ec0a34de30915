"""`stability verdict` and `stability verify`: checks of a study that answer by their exit code.

A verdict judges the study's candidates; a verification proves that two runs may be compared.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.output import (
    EXPLORATORY,
    FAILS,
    HOLDS,
    UNDECIDED,
    print_json,
    print_line,
)

if TYPE_CHECKING:
    from stability.analysis.pair_contract import PairProof

__all__ = ["verdict", "verify"]

_EXIT_CODES = {"PASS": HOLDS, "FAIL": FAILS, "INCONCLUSIVE": UNDECIDED, "NO ASSAY": UNDECIDED}


def verdict(study: Path, arm: str = "", json: bool = False) -> int:
    """Judge a study's candidates on four levels: PASS only if every level holds.

    Exit code 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE and NO ASSAY, 4 whatever comes out if the
    protocol was changed after it was sealed, 2 if it can't be judged. Several candidates answer as
    the worst of them does.

    Args:
        study: the folder of a study, e.g. runs/quickstart
        arm: show and answer for this arm alone; the others still count in the correction
        json: print the verdict as JSON
    """
    from stability.analysis.study_records import read_study  # heavy: numpy
    from stability.analysis.verdict import judge_arms
    from stability.config.convert import nearest
    from stability.report.terminal.verdict import verdict_lines

    recorded = read_study(study)
    judged = judge_arms(recorded, recorded.policy)
    shown = judged.arms
    outcome = judged.outcome
    if arm:
        shown = tuple(one for one in judged.arms if one.arm == arm)
        if not shown:
            names = [one.arm for one in judged.arms]
            raise ValueError(
                f"verdict: arm must be one that is judged, got {arm!r}; "
                f"nearest: {nearest(arm, names)}"
            )
        outcome = shown[0].outcome
    if json:
        names = {one.arm for one in shown}
        content = judged.to_dict()
        content["arms"] = [one for one in content["arms"] if one["arm"] in names]
        print_json(content | {"outcome": outcome})
    else:
        for line in verdict_lines(judged, shown):
            print_line(line)
    return EXPLORATORY if judged.exploratory else _EXIT_CODES[outcome]


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
