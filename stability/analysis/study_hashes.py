"""The hashes of a study's runs beside their baseline's, and the environments that it ran in.

Leaves out what a hash covers and when two may differ (`pair_contract`).
"""

from typing import Any

from stability.analysis.pair_contract import HASHES, may_differ
from stability.analysis.pair_proof import ProofLine, sameness_of
from stability.analysis.study_records import RecordedArm, RecordedRun, RecordedStudy
from stability.config.commands import is_command
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH

__all__ = ["compare_hashes", "environments_of", "shown_hashes"]


def shown_hashes(study: RecordedStudy) -> tuple[str, ...]:
    """Return the hashes of which a study's runs can have any, in the order of a run.

    What text a command reads nobody sees: its batches are what is known of it. What it was
    evaluated on is known where it was seen.
    """
    runs = [run for arm in study.arms for run in arm.runs.values()]
    lacking = {"text"} if is_command(study.base) else set()
    if lacking and not any(run.manifest and run.manifest.hashes.get("held_out") for run in runs):
        lacking.add("held_out")
    return tuple(name for name in HASHES if name not in lacking)


def compare_hashes(
    arm: RecordedArm, baseline: RecordedArm | None
) -> dict[str, dict[int, ProofLine]]:
    """Return each hash of `arm` beside its baseline's, by name and seed; "" is not on record yet.

    `first` is the baseline's. Where one of the two has made fewer updates, by plan or because it
    diverged, its batches are held against the other's of that many, and its final weights are
    other ones by design.
    """

    def hash_of(run: RecordedRun | None, name: str) -> str:
        return run.manifest.hashes.get(name, "") if run and run.manifest else ""

    lines: dict[str, dict[int, ProofLine]] = {name: {} for name in HASHES}
    for name in HASHES:
        is_free = may_differ(name, arm.diff)
        for seed, run in arm.runs.items():
            paired = baseline.runs.get(seed) if baseline else None
            first, second = hash_of(paired, name), hash_of(run, name)
            is_short = bool(first and second) and _steps_of(paired) != _steps_of(run)
            if is_short and name == "batches":
                first, second = _batches_of_both(paired, run)
            may_be_other = is_free or (is_short and name == "final_weights")
            sameness = sameness_of(first, second, may_be_other) if first and second else "unknown"
            lines[name][seed] = ProofLine(field=name, first=first, second=second, sameness=sameness)
    return lines


def _steps_of(run: RecordedRun | None) -> int:
    return run.manifest.step if run and run.manifest else 0


def _batches_of_both(first: RecordedRun | None, second: RecordedRun) -> tuple[str, str]:
    """Return the running hashes of two runs' batches after the updates that both have made."""
    shared = min(_steps_of(first), _steps_of(second))
    assert first is not None  # it has a hash
    found = []
    for run in (first, second):
        try:
            found.append(read_text(run.paths.metrics, BATCH_HASH).get(shared, ""))
        except (ValueError, OSError):  # a damaged log is told of elsewhere, and proves nothing
            found.append("")
    return found[0], found[1]


def environments_of(study: RecordedStudy) -> dict[str, list[Any]]:
    """Return the values found for each entry of the environment; there should be one of each."""
    found: dict[str, list[Any]] = {}
    for arm in study.arms:
        for run in arm.runs.values():
            for key, value in (run.manifest.environment if run.manifest else {}).items():
                if value not in found.setdefault(key, []):
                    found[key].append(value)
    return found
