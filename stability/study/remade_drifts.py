"""Computes drifts anew from snapshots where those on record are not the weights' own.

Only what the records can't say themselves is computed: drifts whose parents are no longer the two
runs' snapshots, and such as name none. Leaves out which those are (`analysis.drift_parents`), the
arithmetic (`metrics.drift`) and the file (`records.remade_drifts`).
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from stability.analysis.drift_parents import (
    check_drifts,
    is_kept,
    listed_snapshot,
    parents_by_line,
)
from stability.analysis.pair_contract import start_breach
from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.schema import BASELINE
from stability.metrics.drift import drift, weights_of_both
from stability.records.events import read_log_and_events
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths
from stability.records.remade_drifts import RemadeDrifts, read_remade, write_remade
from stability.records.run_files import read_run_snapshot

__all__ = ["remake_drifts"]

_Ended = tuple[RunPaths, Manifest]


def remake_drifts(
    study: Path, seed: int, runs: Mapping[str, RunPaths], note: Callable[[str, str], None]
) -> list[RemadeDrifts]:
    """Compute what is wanted of the drifts of `runs`, by arm, from the baseline, and write it.

    Runs that have not ended, or are no pair with the baseline, are left out. `note` is told of an
    arm and why its drifts can't be computed, or that they were.
    """
    ended = {arm: (paths, manifest) for arm, paths in runs.items() if (manifest := _ended(paths))}
    baseline = ended.pop(BASELINE, None)
    try:
        known = read_remade(study, seed)
    except ValueError:  # damaged: all of it can be computed again
        known = []
    found: list[RemadeDrifts] = []
    for arm, run in ended.items() if baseline else ():
        assert baseline is not None
        if start_breach(baseline[1], run[1], run[1].diff):
            continue
        try:
            found += _wanted(arm, run, baseline, [row for row in known if row.arm == arm], note)
        except (ValueError, OSError) as error:
            note(arm, str(error))
    if found != known:
        write_remade(study, seed, found)
    return found


def _ended(paths: RunPaths) -> Manifest | None:
    if not paths.manifest.is_file():
        return None
    manifest = read_manifest(paths.manifest)
    return manifest if manifest.state in ENDED else None


def _wanted(
    arm: str,
    run: _Ended,
    baseline: _Ended,
    known: Iterable[RemadeDrifts],
    note: Callable[[str, str], None],
) -> list[RemadeDrifts]:
    """Return the drifts of an arm that its log can't prove, known ones as well."""
    content, _ = read_log_and_events(run[0].metrics)
    checked = check_drifts(content.metrics, parents_by_line(content.kept), run, baseline)
    before = {(row.step, row.parents): row for row in known}
    rows, computed = [], []
    for step in sorted({*checked.stale, *checked.unproven}):
        parents = listed_snapshot(*run, step), listed_snapshot(*baseline, step)
        if not all(parents):
            note(arm, f"drift at step {step} is left out: {checked.stale.get(step, 'unproven')}")
            continue
        if (step, parents) not in before and not (is_kept(*run, step) and is_kept(*baseline, step)):
            why = checked.stale.get(step, "it names no parents")
            note(arm, f"drift at step {step} is left out: {why}, and a snapshot there was dropped")
            continue
        if (step, parents) not in before:
            computed.append(step)
        rows.append(before.get((step, parents)) or _compute(arm, run, baseline[0], step, parents))
    if computed:
        steps = ", ".join(map(str, computed))
        note(
            arm,
            f"drifts at step {steps} were computed anew: those in the log name other snapshots, "
            "or none",
        )
    return rows


def _compute(
    arm: str, run: _Ended, baseline: RunPaths, step: int, parents: tuple[str, str]
) -> RemadeDrifts:
    paths, manifest = run
    own, other = read_run_snapshot(paths, step), read_run_snapshot(baseline, step)
    if touches(manifest.diff, CHANGES_WEIGHTS):
        own, other = weights_of_both(own, other)
    found = drift(own, other)
    drifts = {
        drift_name(parameter, metric): value
        for parameter, values in found.items()
        for metric, value in values.items()
    }
    return RemadeDrifts(arm=arm, step=step, parents=parents, drifts=drifts)
