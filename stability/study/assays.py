"""Which candidates of a study are assayed, and when: after its runs, each once, and anew if stale.

Known faults are planted on a candidate's run of the first seed. Leaves out how they are: on our own
trainer's candidate (`assay`) and on that of a command (`foreign_assay`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stability.analysis.assay import stale_part
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.config.schema import Role
from stability.config.study import PolicyConfig
from stability.probe.planted_faults import FEW
from stability.records.assay import (
    LISTED,
    AssayRecord,
    is_listed,
    read_assay,
    write_assay,
)
from stability.records.manifest import ENDED, read_manifest
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles, snapshot_of
from stability.records.sealed_json import file_checksum
from stability.study.measuring_cost import is_assayed

__all__ = ["Assayed", "failed_arms", "looks_at", "parents_of", "steps_of", "update"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assayed:
    """A run on which faults may be planted."""

    arm: str
    role: Role
    seed: int
    paths: RunPaths
    measure: Callable[[PolicyConfig], AssayRecord | None]
    """Plants them; None if the arm is no attention. ValueError or RuntimeError if it can't."""
    precision: str = ""
    """The run's; empty where it is not known, as of a command."""
    cost: str = ""
    """What it takes besides some seconds, as a clause."""


def update(
    study: Path,
    runs: Sequence[Assayed],
    policy: PolicyConfig,
    note: Callable[[str, int, str], None],
    tell: Callable[[str], None],
    planned: Callable[[Sequence[str]], None] = lambda arms: None,
) -> list[AssayRecord]:
    """Assay each candidate of `runs` whose record is missing, stale, or not of its run.

    Nothing is done on a candidate that fails already: an assay can only keep an arm from passing.
    `planned` is told first of which arms will be assayed, in this order; `note` of an arm, its seed
    and why it could not be; `tell` of each that begins, since it takes from some seconds to
    minutes.
    """
    due = [
        run
        for run in runs
        if is_assayed(run.arm, run.role, policy.candidates)
        and _has_ended(run.paths)
        and not _is_known(study, run)
    ]
    failed = failed_arms(study, policy) if due else set()
    due = [run for run in due if run.arm not in failed]
    planned([run.arm for run in due])
    made = []
    for run in due:
        why = "to see whether the study would find them"
        tell(f"planting known faults on {run.arm}, {why}{run.cost}")
        try:
            record = run.measure(policy)
        except (ValueError, RuntimeError) as error:
            note(run.arm, run.seed, f"no assay: {error}")
            continue
        if record is None:
            continue
        errors = (fault.error for fault in (record.own, *record.faults) if fault.error)
        for error in dict.fromkeys(errors):
            note(run.arm, run.seed, f"no assay: {error}")
        path = write_assay(study, record)
        files = RunFiles(run.paths, read_manifest(run.paths.manifest))
        files.update(hashes={**files.manifest.hashes, LISTED: file_checksum(path)})
        made.append(record)
    return made


def steps_of(paths: RunPaths) -> list[int]:
    """Return up to FEW snapshot steps, the last ones, where weights are no longer the initial.

    Of snapshots that are equal the first one counts.
    """
    first: dict[str, int] = {}
    for name, sha256 in sorted(read_manifest(paths.manifest).all_files.items()):
        if name.startswith(f"{paths.name_of(paths.snapshots_dir)}/"):
            first.setdefault(sha256, int(Path(name).stem.removeprefix("step-")))
    return [step for step in sorted(first.values()) if step > 0][-FEW:]


def looks_at(faults: int) -> str:
    """Return what is counted while so many faults are planted, for a display."""
    return f"looks, {faults} fault{'s' if faults != 1 else ''} open"


def parents_of(paths: RunPaths) -> dict[str, str]:
    """Return the SHA-256 of these snapshots by name, as the run's manifest lists them."""
    manifest = read_manifest(paths.manifest)
    files = manifest.all_files
    names = [paths.name_of(snapshot_of(paths, manifest, step)) for step in steps_of(paths)]
    return {name: files[name] for name in names if name in files}


def _has_ended(paths: RunPaths) -> bool:
    return paths.manifest.exists() and read_manifest(paths.manifest).state in ENDED


def failed_arms(study: Path, policy: PolicyConfig) -> set[str]:
    """Return the candidates that fail by what is on record; none where nothing can be judged."""
    try:
        judged = judge_arms(read_study(study), policy)
    except ValueError:  # damaged records, or no candidate: a verdict says so
        return set()
    return {arm.arm for arm in judged.candidates if arm.outcome == "FAIL"}


def _is_known(study: Path, run: Assayed) -> bool:
    """Whether the record of a run holds all that would be measured now, on its own weights."""
    try:
        known = read_assay(study, run.arm)
    except ValueError:  # damaged: it can be measured again
        return False
    if known is None or known.arm != run.arm or known.seed != run.seed:
        return False
    manifest = read_manifest(run.paths.manifest)
    return (
        dict(known.parents) == parents_of(run.paths)
        and is_listed(study, run.arm, manifest.hashes)
        and known.is_of(manifest.resolved, manifest.environment)
        and not stale_part(known, run.precision)
    )
