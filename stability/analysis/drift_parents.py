"""Which drifts on record are those of the weights on record.

A drift names the two snapshots that it was computed from, by their checksums. It is taken only
where the one is the run's own snapshot of that step and the other the baseline's, as their
manifests list them now: a baseline that was trained anew has other ones. Such drifts are stale, and
left out; the ones that name no parents, from before they did, are unproven, and told of. Leaves out
whether the two runs are a pair at all (`pair_contract`) and whether the files are those that the
manifests list (`records.run_files`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stability.records.manifest import Manifest
from stability.records.metric_columns import MetricColumns, Series
from stability.records.metric_names import DRIFT_FROM, DRIFT_OF, DRIFTS
from stability.records.paths import RunPaths
from stability.records.remade_drifts import RemadeDrifts
from stability.records.run_files import snapshot_of

__all__ = [
    "CheckedDrifts",
    "Parents",
    "check_drifts",
    "is_kept",
    "listed_snapshot",
    "parents_by_line",
]

Parents = tuple[str, str]
"""SHA-256 of the run's own snapshot and of the baseline's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedDrifts:
    """The metrics of a run with the drifts that may be taken, and what is to be said of others."""

    metrics: Mapping[str, Series]
    stale: Mapping[int, str] = field(default_factory=dict)
    """By step why the drifts there are left out."""
    remade: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By step the drifts, by name, that are in the metrics in the place of those in the log."""
    unproven: tuple[int, ...] = ()
    """The steps whose drifts are in the metrics, though they name no parents."""


def parents_by_line(kept: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[int, Parents]:
    """Return what the lines of a log, as `read_log` keeps them, say of drifts, by their numbers."""
    return {
        number: (str(line.get(DRIFT_OF, "")), str(line[DRIFT_FROM]))
        for number, line in kept
        if DRIFT_FROM in line
    }


def listed_snapshot(paths: RunPaths, manifest: Manifest | None, step: int) -> str:
    """Return the checksum that a manifest lists of the run's snapshot; empty if it lists none.

    One that was dropped is listed as well: what was computed from it is still the run's.
    """
    if manifest is None or step < 0:
        return ""
    return str(manifest.all_files.get(paths.name_of(snapshot_of(paths, manifest, step)), ""))


def is_kept(paths: RunPaths, manifest: Manifest | None, step: int) -> bool:
    """Whether the run's snapshot is listed, and was not dropped."""
    return bool(listed_snapshot(paths, manifest, step)) and (
        manifest is not None and paths.name_of(snapshot_of(paths, manifest, step)) in manifest.files
    )


def check_drifts(
    log: MetricColumns,
    parents: Mapping[int, Parents],
    run: tuple[RunPaths, Manifest | None],
    baseline: tuple[RunPaths, Manifest | None],
    remade: Iterable[RemadeDrifts] = (),
) -> CheckedDrifts:
    """Return the metrics of a run's log with the drifts from `baseline` that may be taken.

    `parents` are those that the log names, by the number of the line. `remade` are drifts that were
    computed anew: they take the place of those that are stale or name no parents.
    """
    lines = log.steps_of(DRIFTS)
    wrong = {
        line: said
        for line, step in lines.items()
        if (said := _wrong(step, parents.get(line), run, baseline))
    }
    taken = {step: line for line, step in lines.items() if line not in wrong}
    proven = {step for step, line in taken.items() if line in parents}
    anew = {
        row.step: row.drifts
        for row in remade
        if row.step not in proven and not _wrong(row.step, row.parents, run, baseline)
    }
    dropped = {line for line, step in lines.items() if line in wrong or step in anew}
    return CheckedDrifts(
        metrics=log.less(DRIFTS, dropped, anew) if dropped else log,
        stale={
            lines[line]: said
            for line, said in wrong.items()
            if lines[line] not in taken and lines[line] not in anew
        },
        remade={lines[line]: anew[lines[line]] for line in dropped if lines[line] in anew},
        unproven=tuple(sorted(taken.keys() - proven - anew.keys())),
    )


def _wrong(
    step: int,
    parents: Parents | None,
    run: tuple[RunPaths, Manifest | None],
    baseline: tuple[RunPaths, Manifest | None],
) -> str:
    """Return why the drifts of a line may not be taken; empty if they may."""
    for whose, (_, manifest) in (("the run", run), ("its baseline", baseline)):
        if manifest is None:
            return f"{whose} has no manifest that can be read"
    if parents is None:
        return ""
    for whose, parent, of in zip(
        ("the run", "its baseline"), parents, (run, baseline), strict=True
    ):
        listed = listed_snapshot(*of, step)
        if parent != listed:
            now = f"{whose} has {listed[:12]} there now" if listed else f"{whose} lists none there"
            return f"computed from a snapshot {parent[:12]}, {now}"
    return ""
