"""`stability verify`: prove that two runs, or all runs of a study, keep the pair contract."""

from pathlib import Path

from rich.console import Console

from stability.analysis.pair_contract import PairProof, prove_pair
from stability.analysis.study_records import read_study
from stability.cli.output import print_json
from stability.config.schema import BASELINE
from stability.records.paths import RunPaths, run_at
from stability.report.terminal.proof import print_proof, print_proofs

__all__ = ["verify"]


def verify(first: Path, second: Path | None = None, json: bool = False) -> int:
    """Prove from the records that runs may be compared, or show the first thing that says no.

    Exit code 0 if every pair holds, 1 if one does not.

    Args:
        first: a run's folder, runs/<study>/<arm>/seed-<n>, the baseline; or a study's folder
        second: the run it is paired with; none with a study, where every pair is proven
        json: print the proof as JSON
    """
    if second is not None:
        proofs = [prove_pair(run_at(first, "verify: first"), run_at(second, "verify: second"))]
    else:
        proofs = _pairs_of_study(first)
    if json:
        print_json([proof.to_dict() for proof in proofs])
    elif second is not None:
        print_proof(proofs[0], Console())
    else:
        print_proofs(proofs, Console())
    return int(any(proof.break_ for proof in proofs))


def _pairs_of_study(folder: Path) -> list[PairProof]:
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
