"""Freezes the judged step at the first look, so that no later look can pick another.

The rule is given the seeds of the first look, however many there are by then: a record that was
deleted comes out again as it was.

Leaves out the rule (`analysis.window`) and the file (`records.window`).
"""

from pathlib import Path

from stability.analysis.sequential import LOOKS
from stability.analysis.study_distances import controls_of, reference_of, study_distances
from stability.analysis.study_records import RecordedStudy, read_study
from stability.analysis.window import pick_window, window_record
from stability.config.schema import BASELINE
from stability.records.manifest import ENDED
from stability.records.paths import StudyPaths
from stability.records.window import WindowRecord, write_window

__all__ = ["freeze_window"]


def freeze_window(folder: Path) -> WindowRecord | None:
    """Freeze the judged step of the study in `folder` if its first look is due; return the record.

    None, and nothing is written, where a window is frozen already, the policy names a step, the
    study has no reference or no control, the controls of fewer than 3 seeds have ended, or the rule
    finds no step. ValueError for records that can't be read.
    """
    if StudyPaths(folder).window.exists():
        return None
    study = read_study(folder)
    policy, reference, controls = study.policy, reference_of(study), controls_of(study)
    if policy.step or reference is None or not controls:
        return None
    if _seeds_with_controls(study) < LOOKS[0]:
        return None
    seeds = study.seeds[: LOOKS[0]]
    distances = study_distances(study, seeds)
    window = pick_window(distances, controls, reference.name, policy.window_limit)
    if not window.step:
        return None
    record = window_record(window, distances, reference.name, policy.window_limit)
    write_window(folder, record)
    return record


def _seeds_with_controls(study: RecordedStudy) -> int:
    """Return how many of the first seeds have baseline, reference and controls that have ended."""
    reference = reference_of(study)
    names = {BASELINE, *controls_of(study), *((reference.name,) if reference else ())}
    for count, seed in enumerate(study.seeds):
        if not all(arm.runs[seed].state in ENDED for arm in study.arms if arm.name in names):
            return count
    return len(study.seeds)
