"""What of a study stays on disk once its runs have ended: equal files once, snapshots by policy.

Equal files, as the snapshots of a rerun or of a common start, become hard links of one another: a
file of a run is never written in place, so that nothing written to one can reach the other, and a
copy of the folder holds them twice or as links, as its tool likes.

The study's `keep` says which snapshots stay: `all`; those of the baseline and of arms of role
`reference`, against which arms can be added later; each run's `last`; or `none`. Those of step 0
stay, since the pair contract reads them, and so do those of an arm whose change adds weights, with
its baseline's: their sketches can't be compared. Checkpoints stay with `all` alone.

Nothing is dropped before all that reads it is on record: each drift, each distance, each assay. The
controls of a seed, from which its other arms are measured, stay until every run of it has ended.
Any other run is dropped as soon as it has ended and was measured from them (`settle`): what is
between two such arms is then known by sketch, unless both ended before the last of the controls. A
manifest lists what it drops before the file goes, so that after a kill at any point the same call
goes on. Leaves out the
sketches, by which what was dropped is checked (`analysis.sketch_check`).
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from stability.analysis.drift_parents import listed_snapshot
from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.schema import BASELINE
from stability.records.atomic_files import remove, temporary_name
from stability.records.distances import read_distances
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths, checkpoint_steps, snapshot_steps
from stability.records.run_files import RunFiles, content_checksum
from stability.study.run import Run, has_ended, locked

__all__ = [
    "baselines_to_restore",
    "drop_by_policy",
    "keeps",
    "link_equal_files",
    "stored_once",
]


def link_equal_files(runs: Sequence[Run]) -> int:
    """Make equal snapshots and sketches of `runs`, of one seed, one file; return how many went.

    Equal are files whose manifests list the same SHA-256. Nothing is done where the file system
    has no hard links.
    """
    first: dict[str, Path] = {}
    linked = 0
    for run in runs:
        if not has_ended(run.paths):
            continue
        for name, checksum in read_manifest(run.paths.manifest).files.items():
            path = run.paths.root / name
            if not name.startswith(("snapshots/", "sketches/")) or not path.exists():
                continue
            like = first.setdefault(checksum, path)
            pairs = [two for two in _files_of(like, path) if not os.path.samefile(*two)]
            # the one may have rotted: what is linked to is read, not believed
            if pairs and content_checksum(like) == checksum:
                linked += sum(_link(*two) for two in pairs)
    return linked


def _files_of(like: Path, path: Path) -> list[tuple[Path, Path]]:
    """Return both files, or those of two folders of one content, of which each lists its files."""
    if not path.is_dir():
        return [(like, path)]
    names = sorted(file.name for file in path.iterdir())
    return [(like / name, path / name) for name in names if (like / name).is_file()]


def _link(like: Path, path: Path) -> bool:
    # beside a folder of DCP's: what is in it counts
    is_part = path.parent.suffix == ".dcp"
    temporary = temporary_name(path.parent if is_part else path)
    try:
        temporary.hardlink_to(like)
        temporary.replace(path)
    except OSError:  # no links here, or too many of one file
        with contextlib.suppress(OSError):
            remove(temporary)
        return False
    return True


def drop_by_policy(
    study: Path, runs: Sequence[Run], keep: str, *, spared: Collection[str] = ()
) -> int:
    """Drop what `keep` does not keep of `runs`, of one seed; return how many files went.

    Nothing is dropped while a run has not ended, or a distance is not on record; nor of arms that
    are `spared`, whose weights something else is to be measured of.
    """
    if keep == "all" or not all(has_ended(run.paths) for run in runs):
        return 0
    if not _has_distances(study, runs):
        return 0
    larger = any(touches(run.arm.diff, CHANGES_WEIGHTS) for run in runs)
    dropped = 0
    for run in runs:
        if run.arm.name in spared:
            continue
        gone = list(_not_kept(run, keep, larger=larger))
        if gone:
            with locked(run.paths):
                RunFiles(run.paths, read_manifest(run.paths.manifest)).drop(gone)
        dropped += len(gone)
    return dropped


def _not_kept(run: Run, keep: str, *, larger: bool) -> Iterable[Path]:
    paths = run.paths
    yield from (paths.held_checkpoint(step) for step in checkpoint_steps(paths))
    steps = snapshot_steps(paths)
    for step in steps:
        if not _keeps_snapshot(run, keep, is_last=step == steps[-1], step=step, larger=larger):
            yield paths.held_snapshot(step)


def _keeps_snapshot(run: Run, keep: str, *, step: int, is_last: bool, larger: bool) -> bool:
    """Whether `keep` keeps a run's snapshot of a step; `larger`: whether an arm adds weights."""
    is_baseline = run.arm.name == BASELINE
    if keep == "all" or step == 0 or (keep == "last" and is_last):
        return True
    if keep == "reference" and (is_baseline or run.arm.role == "reference"):
        return True
    return larger and (is_baseline or touches(run.arm.diff, CHANGES_WEIGHTS))


def keeps(run: Run, keep: str, what: str, *, step: int, is_last: bool, larger: bool) -> bool:
    """Whether `keep` keeps a run's file of a step, of a kind as `planned_files` names them."""
    if what == "snapshots":
        return _keeps_snapshot(run, keep, step=step, is_last=is_last, larger=larger)
    return keep == "all" or what != "checkpoints"


def stored_once(run: Run, step: int) -> tuple[object, ...]:
    """Return what is the same for two runs whose snapshots of a step are sure to be equal.

    A rerun's are its baseline's, and at step 0 those of all that draw the same weights.
    """
    whose = BASELINE if run.arm.role == "rerun" else run.arm.name
    if step:
        return run.seed, whose, step
    config = run.config
    drawn = (config.seed.base + config.seed.init_offset, config.nudge, config.start)
    return run.seed, 0, str(drawn), str(config.model), config.precision == "64-true"


def _has_distances(study: Path, runs: Sequence[Run]) -> bool:
    """Whether the distance between every two runs is on record at each step that both have."""
    try:
        known = read_distances(study, runs[0].seed)
    except ValueError:
        return False
    for step in {step for run in runs for step in snapshot_steps(run.paths)}:
        there = [run for run in runs if step in snapshot_steps(run.paths)]
        matrix = known.weights.get(step)
        listed = {
            run.arm.name: listed_snapshot(run.paths, read_manifest(run.paths.manifest), step)
            for run in there
        }
        if len(there) > 1 and (
            matrix is None or any(matrix.parents.get(arm) != sha for arm, sha in listed.items())
        ):
            return False
    return True


def baselines_to_restore(runs: Sequence[Run], to_train: Iterable[RunPaths]) -> dict[RunPaths, str]:
    """Return the baselines whose dropped snapshots a run of `to_train` needs, and why, by folder.

    They are trained anew, to the same bits.
    """
    wanted = set(to_train)
    found = {}
    for run in runs:
        if run.paths not in wanted or run.baseline is None or run.baseline in wanted:
            continue
        if has_ended(run.baseline) and _has_dropped_snapshots(run.baseline):
            found[run.baseline] = (
                f"its snapshots were dropped (keep), and {run.arm.name} is to be measured from "
                "them: it is trained anew"
            )
    return found


def _has_dropped_snapshots(paths: RunPaths) -> bool:
    folder = f"{paths.name_of(paths.snapshots_dir)}/"
    return any(name.startswith(folder) for name in read_manifest(paths.manifest).dropped)
