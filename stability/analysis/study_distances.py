"""The distances between a study's arms, checked against the manifests, and the judged step.

One place reads them for all that use them: the training evidence, the page, and the command that
freezes the window. Leaves out the rule for the step (`window`) and what is made of the distances
(`excess`, `energy_test`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from stability.analysis.left_out import judges_all
from stability.analysis.number_text import three_figures
from stability.analysis.sequential import LOOKS
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.analysis.window import (
    Window,
    nearness_of,
    pick_window,
    window_changes,
    window_of,
)
from stability.config.diff import are_same
from stability.config.study import PolicyConfig
from stability.records.distances import SeedDistances, read_distances, with_parents
from stability.records.paths import StudyPaths
from stability.records.window import read_window

__all__ = [
    "controls_of",
    "judged_window",
    "known_step",
    "left_out_note",
    "reference_of",
    "study_distances",
    "why_itself",
    "why_no_step",
    "window_problems",
]


def reference_of(study: RecordedStudy) -> RecordedArm | None:
    """Return the arm that errors are measured from, if the study has one."""
    return next((arm for arm in study.arms if arm.role == "reference"), None)


def why_itself(study: RecordedStudy, arm: RecordedArm) -> tuple[str, str] | tuple[()]:
    """Return that an arm changes what the reference changes, and what to do; empty if it doesn't.

    Its distance from the reference would be 0 whatever the change does.
    """
    reference = reference_of(study)
    if reference is None or arm.name == reference.name or not _is_same(arm.diff, reference.diff):
        return ()
    return (
        f"{arm.name} changes what {reference.name}, the reference, changes, and would be measured "
        "from itself",
        "put another change in question; how far the baseline is from the reference, the ladder "
        "and the report tell",
    )


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(are_same(one[path], other[path]) for path in one)


def controls_of(study: RecordedStudy) -> tuple[str, ...]:
    """Return the arms that differ from the baseline by chaos alone: nudges, then reruns."""
    arms = sorted(study.arms, key=lambda arm: arm.role)
    return tuple(arm.name for arm in arms if arm.role in ("nudge", "rerun"))


def study_distances(study: RecordedStudy, seeds: Sequence[int]) -> dict[int, SeedDistances]:
    """Return the distances of each seed; of those on record the ones whose parents are there.

    ValueError, naming the file, for a record that is damaged.
    """
    folder = study.folder
    found = {}
    for seed in seeds:
        runs = {arm.name: arm.runs[seed] for arm in study.arms}
        known = {
            name: (run.paths, run.manifest)
            for name, run in runs.items()
            if run.manifest is not None and not run.error and not run.breach
        }
        found[seed] = with_parents(_read(folder, seed, _stamp(folder, seed)), known)
    return found


def left_out_note(study: RecordedStudy, step: int) -> str:
    """Return that drift is of values too that E leaves out where it is judged, or empty.

    `step` takes the place of the judged one before that is known. Such values, as a key's bias,
    may be nearly all of a drift, so that arms look alike in it whose E differs. A damaged record
    says nothing here; the verdict names it.
    """
    seeds = [seed for seed in study.seeds if all(seed in arm.runs for arm in study.arms)]
    try:
        by_seed = study_distances(study, seeds)
    except ValueError:
        return ""
    step = known_step(study) or step
    weights = {s: found.weights[step] for s, found in by_seed.items() if step in found.weights}
    count = max((x.left_out.count for x in weights.values() if x.left_out), default=0)
    if not count or reference_of(study) is None or judges_all(study.folder, weights, seeds):
        return ""
    return (
        f"Drift is over all weights. E leaves out values that noise alone moves, {count:,} at step "
        f"{step}: arms that drift alike may differ in E, and where chaos hides a drift E may tell."
    )


def judged_window(study: RecordedStudy, policy: PolicyConfig, seeds: Sequence[int]) -> Window:
    """Return the window that candidates are judged in: named, frozen, or picked from `seeds`.

    A step that the policy names takes the place of the rule's. The rule sees the seeds of the first
    look alone, so that it picks the same step again where its record was deleted; what controls do
    at that step is of all `seeds`. ValueError as `study_distances`, and for a frozen window that is
    damaged.
    """
    reference = reference_of(study)
    name, controls = reference.name if reference else "", controls_of(study)
    distances = study_distances(study, seeds)
    # without a limit: a named step is judged whatever the controls do there, and the table says it
    seen = pick_window(distances, controls, name, math.inf)
    if policy.step:
        return replace(seen, step=policy.step, reason="named in the policy")
    frozen = read_window(study.folder)
    if frozen is None:
        first = {seed: distances[seed] for seed in seeds[: LOOKS[0]]}
        window = pick_window(first, controls, name, policy.window_limit)
    else:
        window = window_of(frozen)
        said = f"frozen at the look at {len(window.seeds)} seeds, among which {window.reason}"
        window = replace(window, reason=said)
    return replace(window, log_excess={**window.log_excess, **seen.log_excess})


def why_no_step(
    study: RecordedStudy,
    window: Window,
    distances: Mapping[int, SeedDistances],
    reference: str,
) -> tuple[str, str]:
    """Return why no step can be judged, and what to do."""
    said = f"there is no step to judge at: {window.reason}"
    nudges = [arm.name for arm in study.arms if arm.role == "nudge"]
    near = nearness_of(window, distances, nudges, reference)
    if near is None:
        return said, (
            "let controls and reference run to their ends; where a nudge leaves the limit at once, "
            "add earlier snapshots"
        )
    step, times = near
    return (
        f"{said}; {reference} is no farther from the baseline than a nudge is, "
        f"{three_figures(times)} times as far at step {step}, so that chaos hides the baseline's "
        "own error",
        "make the low precision the baseline and the higher one the reference; where they are so "
        "already, add earlier snapshots",
    )


def known_step(study: RecordedStudy) -> int:
    """Return the step that candidates are judged at, named or frozen; 0 before either is known."""
    if study.policy.step:
        return study.policy.step
    try:
        frozen = read_window(study.folder)
    except ValueError:  # a damaged record is told of by `window_problems`
        return 0
    return frozen.step if frozen else 0


def window_problems(study: RecordedStudy, policy: PolicyConfig) -> list[str]:
    """Return why the frozen window is not what the rule picked at its look; empty if it is.

    What follows from a window with problems is exploratory. A damaged record is a problem too.
    """
    if policy.step:
        return []
    try:
        frozen = read_window(study.folder)
        if frozen is None:
            return []
        seeds = [seed for seed in study.seeds if seed in frozen.seeds]
        reference = reference_of(study)
        return window_changes(
            frozen,
            study_distances(study, seeds),
            controls_of(study),
            reference.name if reference else "",
            policy.window_limit,
        )
    except ValueError as error:
        return [str(error)]


def _stamp(folder: Path, seed: int) -> tuple[int, int]:
    try:
        found = StudyPaths(folder).distances(seed).stat()
    except OSError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=64)
def _read(folder: Path, seed: int, stamp: tuple[int, int]) -> SeedDistances:
    """Return a record; of one that has not changed since, the one that was read before."""
    # every arm of a study asks for the same files
    return read_distances(folder, seed)
