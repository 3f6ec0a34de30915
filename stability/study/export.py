"""A copy of a study for others: its records, without what is of this machine alone.

Files are linked, not copied, where the disk has links. Of the weights those stay that the pair
contract reads, at step 0, and where asked for all that the study has kept; the others are listed as
dropped, as `storage` does, and their hashes and sketches check the drifts. W&B's files, jobs, forks
and checkpoints are left out. Leaves out how the copy is packed (`records.bundle`).
"""

import os
import re
import shutil
from pathlib import Path

from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.schema import BASELINE
from stability.records import file_operations
from stability.records.atomic_files import make_folders, write_text, write_whole
from stability.records.manifest import Manifest, read_manifest
from stability.records.paths import (
    RunPaths,
    checkpoint_steps,
    list_runs,
    sketch_steps,
    snapshot_steps,
)
from stability.records.run_files import RunFiles
from stability.records.run_lock import is_held
from stability.records.study_file import studies_near

__all__ = ["copy_records"]

_OF_THIS_MACHINE = frozenset({"wandb", "jobs", "forks"})
"""Folders of a study or a run that are no records; no arm has such a name."""
_NO_RECORD = re.compile(r"\.lock|\.lease-.*|\..*\.tmp|.*\.bundle\.tar\.gz")
"""Files of those who hold a run, what was never whole, and earlier bundles."""
ENVIRONMENT = "environment.txt"
_PACKAGE = "package."


def copy_records(study: Path, to: Path, *, weights: bool) -> None:
    """Make the copy of `study` in the folder `to`, which must not be there yet.

    ValueError if a run of it is in training, or if it has none, or if it is being measured.
    """
    if to.exists():
        raise ValueError(f"{to}: must not be there yet")
    runs = list_runs(study)
    if not runs:
        near = f"; {near}" if (near := studies_near(study)) else ""
        got = "one without runs" if study.is_dir() else "a file"
        raise ValueError(f"{study}: must be the folder of a study, got {got}{near}")
    for run in (*runs, RunPaths(study)):
        if is_held(run):
            raise ValueError(f"{run.root}: must not be in training; wait for it, or stop it")
    for folder, below, files in os.walk(study):
        below[:] = sorted(
            name for name in below if not (name in _OF_THIS_MACHINE or _NO_RECORD.fullmatch(name))
        )
        place = to / Path(folder).relative_to(study)
        make_folders(place)
        for name in sorted(files):
            if not _NO_RECORD.fullmatch(name):
                _link_or_copy(Path(folder) / name, place / name)
    copies = list_runs(to)
    manifests = [(run, read_manifest(run.manifest)) for run in copies]
    larger = {run.arm for run, found in manifests if touches(found.diff, CHANGES_WEIGHTS)}
    for run, manifest in manifests:
        keeps = weights or (larger and run.arm in {*larger, BASELINE})
        _drop(run, manifest, weights=bool(keeps))
    first = next((found for run, found in manifests if run.arm == BASELINE), manifests[0][1])
    write_text(to / ENVIRONMENT, _environment_text(first))


def _link_or_copy(path: Path, to: Path) -> None:
    try:
        file_operations.link(path, to)
    except OSError:  # another disk, or one without links
        write_whole(to, lambda temporary: shutil.copyfile(path, temporary))


def _drop(run: RunPaths, manifest: Manifest, *, weights: bool) -> None:
    """Drop checkpoints, and the snapshots that a sketch speaks for."""
    gone = [run.held_checkpoint(step) for step in checkpoint_steps(run)]
    if not weights:
        sketched = set(sketch_steps(run)) - {0}
        gone += [run.held_snapshot(step) for step in snapshot_steps(run) if step in sketched]
    RunFiles(run, manifest).drop(gone)


def _environment_text(manifest: Manifest) -> str:
    """Return the versions of a run's packages as pip reads them, below what else it ran on."""
    found = manifest.environment
    said = [f"# {found.get(name, 'unknown')}" for name in ("python", "platform", "cpu", "gpu")]
    packages = sorted(
        (name.removeprefix(_PACKAGE), version)
        for name, version in found.items()
        if name.startswith(_PACKAGE)
    )
    return "\n".join([*said, *(f"{name}=={version}" for name, version in packages)]) + "\n"
