"""`stability verdict` and `stability verify`: checks of a study that answer by their exit code.

A verdict judges the study's candidates; a verification proves that two runs may be compared.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stability.cli.output import (
    EXPLORATORY,
    FAILS,
    HOLDS,
    UNDECIDED,
    WRONG,
    print_json,
    print_line,
)
from stability.config.convert import nearest
from stability.records.bundle import SUFFIXES, is_bundle
from stability.records.object_store import at_hand, is_url, shown_url
from stability.records.paths import StudyPaths, check_exists
from stability.records.study_file import studies_near

if TYPE_CHECKING:
    from stability.analysis.study_proof import StudyProof
    from stability.analysis.study_records import RecordedStudy
    from stability.analysis.verdict import ArmVerdict, StudyVerdict

__all__ = ["code_of", "verdict", "verify"]

_WEIGHTS = {
    "all": "all weights that the study has kept are in it",
    "none": "of the weights those are in it that no sketch stands for",
}

_EXIT_CODES = {"PASS": HOLDS, "FAIL": FAILS, "INCONCLUSIVE": UNDECIDED, "NO ASSAY": UNDECIDED}


def verdict(
    study: Path,
    arm: str = "",
    json: bool = False,
    markdown: bool = False,
    github: bool = False,
    step: int | None = None,
    max_error_ratio: float | None = None,
    max_gain: float | None = None,
    max_bias_ulp: float | None = None,
    max_gradient_ratio: float | None = None,
    max_share: float | None = None,
    max_excess: float | None = None,
    margin_nats: float | None = None,
    alpha: float | None = None,
) -> int:
    """Judge a study's candidates on four levels: PASS only if every level holds, and harm is seen.

    NO ASSAY: every level holds, but harm that was planted was not found, so that real harm might
    have been missed too.

    Exit code 0 for PASS, 1 for FAIL, 3 for INCONCLUSIVE and NO ASSAY, 4 whatever comes out if the
    protocol was changed after it was sealed, 2 if it can't be judged. Several candidates answer as
    the worst of them does.

    Args:
        study: the folder of a study, e.g. runs/quickstart
        arm: show and answer for this arm alone; the others still count in the correction
        json: print the verdict as JSON
        markdown: print a summary to paste into a pull request
        github: also annotate the workflow that this runs in, and add the summary to its job's
        step: judge training at this snapshot; like every limit below it makes the answer
            exploratory where it is not what was sealed
        max_error_ratio: operator: most of the error of plain attention
        max_gain: operator: most that the slope of a result on the golden differs from 1
        max_bias_ulp: operator: most of the mean signed error, in units of the last place
        max_gradient_ratio: gradient: most of the baseline's error in the whole model's gradient
        max_share: gradient: most of the error's power that repeats from look to look
        max_excess: training: most of the baseline's distance to the reference
        margin_nats: outcome: a held-out loss this much higher matters
        alpha: the chance of a wrong answer over all looks, in each direction
    """
    given = {
        "step": step,
        "max_error_ratio": max_error_ratio,
        "max_gain": max_gain,
        "max_bias_ulp": max_bias_ulp,
        "max_gradient_ratio": max_gradient_ratio,
        "max_share": max_share,
        "max_excess": max_excess,
        "margin_nats": margin_nats,
        "alpha": alpha,
    }
    if json and (markdown or github):
        raise ValueError(
            "verdict: json must be asked for alone, got "
            f"{'markdown' if markdown else 'github'} too: its output would be no JSON"
        )
    from stability.analysis.study_records import find_arm, read_study  # heavy: numpy

    recorded = read_study(study)
    if arm:
        find_arm(recorded, arm)  # a misspelled one is told before anything else is loaded
    from stability.analysis.verdict import judge_arms
    from stability.report.markdown import summary_text
    from stability.report.terminal.verdict import verdict_lines
    from stability.report.view.evidence import scope_line

    changed = {name: value for name, value in given.items() if value is not None}
    try:
        policy = replace(recorded.policy, **changed)
    except ValueError as error:
        raise ValueError(f"verdict: {str(error).removeprefix('policy: ')}") from error
    judged = judge_arms(recorded, policy)
    shown = _shown(judged, arm)
    outcome = shown[0].outcome if arm else judged.outcome
    if markdown:
        print_line(summary_text(recorded, judged, shown).rstrip(), whole=True)
    elif json:
        content = judged.to_dict() | {"outcome": outcome}
        print_json(content | {"arms": [one.to_dict() for one in shown]})
    else:
        for line in verdict_lines(judged, shown):
            print_line(line)
        if tried := scope_line(recorded):
            print_line(f"\n{tried}")
    if github:
        _tell_github(recorded, judged, shown)
    return EXPLORATORY if judged.exploratory else _EXIT_CODES[outcome]


def _tell_github(
    study: "RecordedStudy", judged: "StudyVerdict", shown: "tuple[ArmVerdict, ...]"
) -> None:
    """Print an annotation for each arm, and add the summary to the job's, where there is one."""
    from stability.report.markdown import annotations, summary_text

    for line in annotations(judged, shown):
        print_line(line, whole=True)
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(summary_text(study, judged, shown))


def _shown(judged: "StudyVerdict", arm: str) -> "tuple[ArmVerdict, ...]":
    """Return the verdicts to be shown; ValueError for an arm that was not judged."""
    if not arm:
        return judged.arms
    shown = tuple(one for one in judged.arms if one.arm == arm)
    if not shown:
        names = [one.arm for one in judged.arms]
        raise ValueError(
            f"verdict: arm must be one that is judged, got {arm!r}; nearest: {nearest(arm, names)}"
        )
    return shown


def verify(first: str, second: Path | None = None, all: bool = False, json: bool = False) -> int:
    """Prove from the records that runs may be compared, or show the first thing that says no.

    Of a study every pair that was planned is checked: whether both runs are there and are those of
    their place, whether their files are whole, whether they keep the pair contract, and whether
    their drifts come from the snapshots on disk; some drifts are computed anew. Exit code 0 if
    every planned pair holds, 1 if one does not, is unproven, or is not there, or the plan itself is
    not, or where seeds of one arm were trained in several environments, which are no repetitions.
    Of two runs the drifts are checked as well, where the first is the baseline that those of the
    second are from.

    Args:
        first: a study's folder, or the file that `stability export` makes of one, which may be a
            URL in an object store, such as s3://bucket/path.tar.gz; or a run's folder,
            runs/<study>/<arm>/seed-<n>, the baseline
        second: the run it is paired with; none with a study, where every pair is proven
        all: compute every drift anew, not one of each pair drawn at random
        json: print the proof as JSON
    """
    if is_url(first) and (second is not None or not shown_url(first).endswith(SUFFIXES)):
        raise ValueError(
            f"verify: a URL must be of what `stability export` writes, which ends in "
            f"{' or '.join(SUFFIXES)}, got {shown_url(first)}"
        )
    with at_hand(first, None if json else print_line) as path:
        check_exists(path)
        if path.is_file() and not is_bundle(path):
            near = f"; {near}" if (near := studies_near(path)) else ""
            raise ValueError(
                f"verify: first must be the folder of a study or a run, or what `stability export` "
                f"writes, which ends in {' or '.join(SUFFIXES)}, got the file {str(path)!r}{near}"
            )
        if second is None and (bundle := _bundle_in(path)):
            raise ValueError(
                f"verify: first must be a study or a bundle of one, got the folder {str(path)!r}, "
                f"in which bundles lie: name one, as {bundle}"
            )
        if second is None and is_bundle(path):
            return _verify_bundle(path, every_drift=all, json=json)
        if second is None:
            return _verify_study(path, every_drift=all, json=json)
        return _verify_runs(path, second, every_drift=all, json=json)


def _bundle_in(path: Path) -> str:
    """Return a bundle that lies in a folder which is no study's itself; empty if none does."""
    if StudyPaths(path).study.exists():
        return ""
    return str(next(iter(sorted(path.glob("*.bundle.tar.gz"))), ""))


def _verify_runs(first: Path, second: Path, *, every_drift: bool, json: bool) -> int:
    from rich.console import Console  # heavy, and so is numpy behind the rest

    from stability.analysis.pair_contract import prove_pair
    from stability.analysis.study_check import check_drifts_of
    from stability.records.paths import run_at
    from stability.report.terminal.pairs import print_drift_check, print_proof

    runs = run_at(first, "verify: first"), run_at(second, "verify: second")
    proof = prove_pair(*runs)
    # of two runs that are no pair, or whose files are damaged, no drift counts
    drifts = None if proof.breach else check_drifts_of(*runs, every_drift=every_drift)
    if json:
        print_json([{**proof.to_dict(), "drifts": drifts.to_dict() if drifts else None}])
    else:
        print_proof(proof, Console())
        if drifts:
            print_drift_check(drifts, Console())
    holds = drifts is not None and drifts.state in ("holds", "not looked at")
    holds &= not proof.unproven
    return HOLDS if holds else FAILS


def _verify_study(folder: Path, *, every_drift: bool, json: bool) -> int:
    from rich.console import Console  # heavy, and so is numpy behind the rest

    from stability.analysis.study_proof import prove_study
    from stability.analysis.study_records import read_study
    from stability.report.terminal.pairs import print_checks

    proof = prove_study(read_study(folder), every_drift=every_drift)
    if json:
        print_json(proof.to_dict())
    else:
        print_checks(
            list(proof.checks), Console(), [*proof.troubles, *proof.seeds_apart, *proof.assays]
        )
        for note in [*proof.left_out, *filter(None, [proof.note])]:
            print_line(note)
    return code_of(proof)


def code_of(proof: "StudyProof") -> int:
    """Return the exit code of what was proven of a study."""
    if proof.is_refuted:
        return FAILS
    if not proof.checks:  # nothing was refuted, and nothing proven
        return FAILS if proof.left_out else WRONG
    return HOLDS


def _verify_bundle(path: Path, *, every_drift: bool, json: bool) -> int:
    from stability.records.bundle import opened_bundle

    with opened_bundle(path) as (folder, bundle):
        if not json:
            print_line(
                f"{path.name}: {len(bundle.files)} files as they were listed, made by "
                f"training-stability {bundle.made_by}; "
                + _WEIGHTS.get(bundle.weights, f"of the weights {bundle.weights}")
            )
        return _verify_study(folder, every_drift=every_drift, json=json)
