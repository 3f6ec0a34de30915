"""Refuses a study that this machine can't hold, before anything is written: its memory, its disk.

Both are lower estimates, so a study that fits is never refused: memory as `memory_estimate` says,
on disk snapshots with their sketches, checkpoints and predictions, and neither logs nor W&B's
files. Runs that train side by side count together: the one that needs most, and beside it those
that need least. Leaves out mistakes in the study's values (`config.load`).
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.roles import is_control
from stability.records.paths import (
    checkpoint_steps,
    prediction_steps,
    sketch_steps,
    snapshot_steps,
)
from stability.records.weight_sketches import SKETCH_BYTES
from stability.study.assemble import resolve_device
from stability.study.machine_memory import Memory, gpu_memory, host_memory
from stability.study.memory_estimate import Estimate, Part, estimate_memory, weight_bytes
from stability.study.model_size import size_of
from stability.study.run import Run
from stability.study.storage import keeps

__all__ = [
    "check_disk",
    "check_memory",
    "files_to_write",
    "in_units",
    "most_at_once",
    "planned_files",
]

LESS = "make train.batch_size, model.context or the model smaller"


def check_memory(runs: Sequence[Run], jobs: int = 1, here: int = 0) -> None:
    """ValueError if one of `runs`, which are to be trained, or `jobs` at once can't be in memory.

    It names the arm, what it needs at least and for what, and what there is. A GPU holds one rank;
    this machine's memory holds `here` ranks of a run, 0 for all.
    """
    on_gpu = [run for run in runs if resolve_device(run.config).type == "cuda"]
    on_host = [run for run in runs if run not in on_gpu]
    if on_gpu:
        _check_together(on_gpu, jobs, gpu_memory(), torch.cuda.device_count(), 1)
    host = host_memory()
    if on_host and host is not None:
        _check_together(on_host, jobs, host, 1, here)


def _check_together(
    runs: Sequence[Run], jobs: int, memory: Memory, devices: int, ranks: int
) -> None:
    """ValueError if `memory`, of each of as many `devices`, can't hold the runs that share it.

    It holds as many `ranks` of each, 0 for all of them.
    """
    of_rank = ((estimate_memory(run.config, run.last_step), run) for run in runs)
    needs = sorted(
        ((each.of_all(ranks or run.config.parallel.ranks), run) for each, run in of_rank),
        key=lambda pair: pair[0].bytes,
        reverse=True,
    )
    most, run = needs[0]  # of equals the first: the baseline, whose size is everybody's
    if most.bytes > memory.bytes:
        raise ValueError(
            f"arm {run.arm.name}: a run must fit the {in_units(memory.bytes)} of {memory.owner}, "
            f"got at least {in_units(most.bytes)}, {_mostly(most)}; {LESS}"
        )
    sums = [most.bytes]
    for other, _ in reversed(needs[1:]):
        sums.append(sums[-1] + other.bytes)
    together = math.ceil(most_at_once(runs, jobs) / devices)
    if sums[together - 1] > memory.bytes:
        fit = devices * sum(size <= memory.bytes for size in sums[:together])
        raise ValueError(
            f"--jobs: {together} runs at once must fit the {in_units(memory.bytes)} of "
            f"{memory.owner}, got at least {in_units(sums[together - 1])}; arm {run.arm.name} "
            f"alone needs {in_units(most.bytes)}, {_mostly(most)}; use --jobs {fit}"
        )


def most_at_once(runs: Sequence[Run], jobs: int) -> int:
    """Return how many of `runs` at most are in training at once, all taking the same time.

    A run whose baseline is to be trained has to wait for it.
    """
    waiting, most = list(runs), 0
    while waiting:
        to_come = {run.paths for run in waiting}
        started = [run for run in waiting if run.baseline not in to_come][:jobs]
        waiting = [run for run in waiting if run not in started]
        most = max(most, len(started))
    return most


def check_disk(runs: Sequence[Run], out: Path, keep: str = "all") -> None:
    """ValueError if the disk of the folder `out` has no room for what `runs` have yet to write.

    What `keep` drops goes when a run has ended, of a seed's controls when all its runs have, before
    the next ones need its room.
    """
    needs = [(files_to_write(run), run) for run in runs]
    needed = sum(estimate.bytes for estimate, _ in needs) - _room_used_again(runs, keep)
    there = next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize  # what is left to those who are not root
    if needed <= free:
        return
    most, run = max(needs, key=lambda pair: pair[0].bytes)
    raise ValueError(
        f"{out}: must have room for the study, got {in_units(free)} free and at least "
        f"{in_units(needed)} to be written by {len(runs)} runs; one of arm {run.arm.name} writes "
        f"{in_units(most.bytes)}, {_mostly(most)}; ask for fewer train.snapshot_steps or "
        "train.keep_checkpoints, keep less (--keep), or use --out for another disk"
    )


def _room_used_again(runs: Sequence[Run], keep: str) -> int:
    """Return the bytes of what is dropped that are not needed at once with the rest.

    Of each seed its controls are there together, and of its other runs one at a time; of the seeds
    that one counts which needs least so.
    """
    larger = any(touches(run.arm.diff, CHANGES_WEIGHTS) for run in runs)
    dropped, controls, other = 0, dict[int, int](), dict[int, int]()
    for run in runs:
        gone = 0
        for what, (steps, size) in _yet_to_write(run).items():
            gone += size * sum(
                not keeps(run, keep, what, step=step, is_last=step == run.last_step, larger=larger)
                for step in steps
            )
        dropped += gone
        stays = is_control(run.arm.role)
        controls[run.seed] = controls.get(run.seed, 0) + gone * stays
        other[run.seed] = max(other.get(run.seed, 0), gone * (not stays))
    return dropped - min((controls[seed] + other[seed] for seed in controls), default=0)


def files_to_write(run: Run) -> Estimate:
    """Return what the run's files will take when it ends, less those that are there."""
    return Estimate(
        tuple(
            Part(f"{len(steps)} {what} of {in_units(size)}", len(steps) * size)
            for what, (steps, size) in _yet_to_write(run).items()
        )
    )


def _yet_to_write(run: Run) -> dict[str, tuple[set[int], int]]:
    """Return `planned_files` less the steps whose files are there."""
    planned, paths = planned_files(run), run.paths
    # what an earlier start left is counted by its steps, whatever is in the files
    there = {
        "snapshots": {*snapshot_steps(paths)},
        "sketches": {*sketch_steps(paths)},
        "predictions": {*prediction_steps(paths)},
    }
    found = {
        what: (steps - there.get(what, set()), size) for what, (steps, size) in planned.items()
    }
    # of checkpoints only the last are kept: those of any steps make room for these
    saved, size = planned["checkpoints"]
    found["checkpoints"] = {*sorted(saved)[len(checkpoint_steps(paths)) :]}, size
    return found


def planned_files(run: Run) -> dict[str, tuple[set[int], int]]:
    """Return by kind of file the steps of those that stay when the run ends, and one's bytes.

    Whatever of them is there already.
    """
    train, held_out = run.config.train, run.config.held_out
    weights = weight_bytes(run.config)
    steps = {step for step in train.planned_snapshots() if step <= run.last_step} | {run.last_step}
    saved = list(range(train.checkpoint_every, run.last_step + 1, train.checkpoint_every))
    saved = saved[-train.keep_checkpoints :] if train.keep_checkpoints else saved
    tokens = held_out.prediction_batches * train.batch_size * run.config.model.context
    return {
        "snapshots": (steps, weights),
        "sketches": (steps, SKETCH_BYTES + 4 * size_of(run.config.model, 1).vectors),
        "checkpoints": ({*saved}, 3 * weights),
        "predictions": (steps, 4 * tokens if held_out.share else 0),
    }


def _mostly(estimate: Estimate) -> str:
    largest = estimate.largest
    return f"{in_units(largest.bytes)} of it {largest.name}"


def in_units(count: int) -> str:
    """Return bytes in words, e.g. "23.5 GiB"."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" else f"{size:,.1f} {units[0]}"
