"""Trains a rank's part of a run whose record the first rank keeps.

Every step here has its counterpart in `train_run`, in the same order: where one rank waits for the
others, all do. Leaves out what the first rank writes.
"""

from stability.model.layouts import hash_whole
from stability.model.ranks import Ranks, joined, part
from stability.recorder.following import FollowingWitness, FollowingWriter
from stability.recorder.trainer_door import TrainerDoor
from stability.records.identity import environment
from stability.records.run_files import RunFiles
from stability.study.assemble import assemble, fit, load_data, make_trainer, resolve_device
from stability.study.observer_gate import check_observer
from stability.study.process_switches import switched
from stability.study.run import Run, snapshot_steps_of

__all__ = ["follow"]


def follow(run: Run, ranks: Ranks, *, checks_observer: bool) -> None:
    """Train this rank's part of `run` from the step that the first rank tells, to the run's end.

    Errors as of training; the first rank tells of them in the manifest.
    """
    with switched(run.config.train), joined(ranks, resolve_device(run.config)):
        parts, data = assemble(run.config), load_data(run.config, ranks)
        ranks.gathered(environment())
        start = ranks.told()
        if checks_observer:
            check_observer(run.config, ranks=ranks)
        door = TrainerDoor(
            FollowingWriter(ranks),
            parts.model,
            snapshot_steps_of(run),
            FollowingWitness(),
            start=start,
            held_out=data.held_out_batches,
            kept=run.config.held_out.prediction_batches,
            ranks=ranks,
            parallel=run.config.parallel,
        )
        files = RunFiles.unnamed(run.paths.root)
        callbacks = [*parts.callbacks, door]
        trainer = make_trainer(run.config, files, [], callbacks, run.last_step, ranks)
        fit(trainer, parts, data, run.paths.held_checkpoint(start) if start else None)
        door.end(trainer)
        hash_whole(parts.model)
        part(ranks)
