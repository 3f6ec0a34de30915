"""Weights and states that a study's `keep` has dropped, had again by training their run anew.

What of a run is dropped, and the training, is left to `study.retrain`; this is its progress on the
terminal, for every verb that needs real weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stability.records.paths import RunPaths, is_run

if TYPE_CHECKING:
    from stability.callbacks.study_observer import StudyObserver

__all__ = ["with_checkpoint", "with_snapshot"]


def with_checkpoint(run: RunPaths, at: int) -> RunPaths:
    """Return the run, or where its checkpoint of step `at` was dropped, the same one trained anew.

    Errors as `study.retrain.retrain`.
    """
    from stability.records.manifest import read_manifest  # heavy: numpy
    from stability.records.run_files import checkpoint_of

    manifest = read_manifest(run.manifest)
    if run.name_of(checkpoint_of(run, manifest, at)) not in manifest.dropped:
        return run
    from stability.study.retrain import retrain  # heavy: torch and Lightning

    with _display() as display:
        return retrain(run, f"its checkpoint of step {at}", display)


def with_snapshot(folder: Path, step: int | None) -> Path:
    """Return a run's folder, or where its snapshot was dropped, that of the run trained anew.

    `step` is the snapshot's; None for the last that the run had. Another folder is returned as it
    is. Errors as `study.retrain.retrain`.
    """
    if not is_run(folder):
        return folder
    from stability.records.manifest import read_manifest  # heavy: numpy
    from stability.records.run_files import recorded_steps, snapshot_of

    run = RunPaths(folder.resolve())
    step = max(recorded_steps(run), default=None) if step is None else step
    manifest = read_manifest(run.manifest)
    if step is None or step < 0:
        return folder
    if run.name_of(snapshot_of(run, manifest, step)) not in manifest.dropped:
        return folder
    from stability.study.retrain import retrain  # heavy: torch and Lightning

    with _display() as display:
        return retrain(run, f"its snapshot of step {step}", display).root


@contextmanager
def _display() -> Iterator["StudyObserver"]:
    from rich.console import Console  # heavy, and the rest needs torch and Lightning

    from stability.report.terminal.progress import StudyDisplay
    from stability.study.assemble import quieten_lightning

    quieten_lightning()
    with StudyDisplay(Console(stderr=True), 1) as display:
        yield display
