"""What a study will take: hours, bytes on disk and memory, from its config and a few timed steps.

Time. Of each arm up to _UPDATES updates are made without probe, and up to _LOOKS with it, each in a
fresh process, as its runs; none is begun once _LONGEST_S have gone since the first one, and over
ranks, which can't be stopped alike by their clocks, the least are made. An update takes the median
of the later half of them, and what is slower as a run warms up counts once for each run. A run is
its updates, those at which the probe looks, its snapshots with the held-out loss, its checkpoints,
each as long as a snapshot, and what lay beside these in the trial: building the model, reading the
text. Arms that differ in their seed or nudge alone are timed once. Distances, planted faults and
the report are counted apart (`measuring_cost`). A run over ranks is timed over as many, on this
machine.

Disk. Snapshots with their sketches, checkpoints and predictions follow from the config
(`size_check`), and which of them stay from the study's `keep` (`storage`); what is sure to be equal
counts once. The log is that of the trial for each update and each look, and the report comes once.
W&B's own files are left out. While a study trains, the first seed and one more are there whole.

Memory. The least that the largest arm does with (`memory_estimate`).
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.convert import to_dict
from stability.config.roles import is_control
from stability.config.schema import ArmConfig, NudgeConfig, SeedConfig, WatchConfig
from stability.config.study import PolicyConfig
from stability.model.ranks import ALONE, Ranks, joined, part
from stability.probe.planted_faults import MOST
from stability.probe.schedule import Schedule
from stability.recorder.following import FollowingWitness, FollowingWriter
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import Witnessing
from stability.recorder.writer import RunWriter
from stability.records.metric_log import MetricLog
from stability.records.run_files import RunFiles
from stability.study.assay import LOOK_GRADIENTS, SEQUENCES, gradient_updates, planted_on
from stability.study.assemble import assemble, fit, load_data, make_trainer, resolve_device
from stability.study.call_over_ranks import call_over_ranks
from stability.study.distances import time_distance
from stability.study.fresh_process import call_alone
from stability.study.measuring_cost import (
    REPORT_BYTES,
    USUAL,
    MeasuringCost,
    most_gradients,
    settled,
)
from stability.study.memory_estimate import Estimate, estimate_memory
from stability.study.run import Run, snapshot_steps_of
from stability.study.size_check import planned_files
from stability.study.storage import keeps, stored_once
from stability.tracking.loggers import RecordsLogger

__all__ = ["StudyCost", "Trial", "cost_of", "time_arm"]

_UPDATES, _LOOKS = 20, 6
"""What is timed of an arm at most without the probe, and with it; the first of each warms up."""
_LEAST = 4
_LONGEST_S = 8.0
"""Updates of a trial however long they take, and seconds after which it begins no further one."""
_EARLY_SNAPSHOT = 2
"""The update after which a snapshot is taken, beside those of the start and of the first update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a few updates of an arm have taken on this machine."""

    update_seconds: float
    look_seconds: float
    """What a look at the layers adds to its update; 0 if there is none."""
    gradient_seconds: float
    """What a look at the gradient adds."""
    snapshot_seconds: float
    start_seconds: float
    """All else: process, model, text, what warms up, two snapshots."""
    distance_seconds: float
    """What it takes to measure how far two snapshots are apart."""
    update_bytes: float
    """Of the log."""
    look_bytes: float
    """What a look at the layers adds."""
    gradient_bytes: float
    fixed_bytes: int
    """Of what is written once: the log of the weights, the witness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyCost:
    """What a study will take."""

    runs: int
    seconds_by_arm: dict[str, float]
    """One run after another, of all seeds of each arm."""
    look_seconds: float
    """What of it the looks add to the updates that they are made at."""
    measuring: MeasuringCost
    """What is measured beside the runs takes."""
    keep: str
    """What stays of the snapshots."""
    disk: dict[str, int]
    """Bytes that stay, by what they are."""
    disk_of_all: dict[str, int]
    """The same, were everything kept."""
    memory: Estimate
    """Of the largest run."""
    on_gpu: bool

    @property
    def run_seconds(self) -> float:
        """What all runs take."""
        return sum(self.seconds_by_arm.values())

    @property
    def seconds(self) -> float:
        """What the study takes."""
        return self.run_seconds + self.measuring.seconds

    @property
    def bytes(self) -> int:
        """All that the study leaves on disk."""
        return sum(self.disk.values())

    @property
    def bytes_of_all(self) -> int:
        """The same, were everything kept."""
        return sum(self.disk_of_all.values())

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in JSON values."""
        return {
            "runs": self.runs,
            "hours": self.seconds / 3600,
            "hours_of_runs": self.run_seconds / 3600,
            "hours_by_arm": {name: each / 3600 for name, each in self.seconds_by_arm.items()},
            "hours_of_looks": self.look_seconds / 3600,
            "hours_of_measuring": self.measuring.hours,
            "disk_bytes": self.bytes,
            "disk": self.disk,
            "keep": self.keep,
            "disk_bytes_with_keep_all": self.bytes_of_all,
            "disk_with_keep_all": self.disk_of_all,
            "memory_bytes": self.memory.bytes,
            "memory": [asdict(part) for part in self.memory.parts],
            "device": "gpu" if self.on_gpu else "cpu",
        }


def cost_of(
    runs: Sequence[Run],
    keep: str,
    *,
    policy: PolicyConfig | None = None,
    isolated: bool = True,
    told: Callable[[str], None] = lambda _: None,
) -> StudyCost:
    """Return what `runs` take from their beginning, and leave under a policy of what to keep.

    Faults are planted on the candidates of `policy`, by default on the arms of that role.
    `isolated`, the trials are in processes of their own. `told` is given a line before each of
    them, which takes seconds. ValueError as `assemble`.
    """
    trials: dict[str, Trial] = {}
    by_arm: dict[str, float] = {}
    of_looks, records = 0.0, 0.0
    count = len({_alike(run)[0] for run in runs})
    if isolated:
        call_alone(int)  # the server that all processes are forked from begins, as before a study
    for run in runs:
        key, alike = _alike(run)
        if key not in trials:
            told(f"timing {len(trials) + 1} of {count}: {_trial_of(run)}")
            trials[key] = _timed(alike, isolated=isolated)
        known = trials[key]
        looks, at_gradient = _looks(run)
        added = looks * known.look_seconds + at_gradient * known.gradient_seconds
        seconds = known.start_seconds + run.last_step * known.update_seconds + added
        seconds += _kept_beside(run) * known.snapshot_seconds
        by_arm[run.arm.name] = by_arm.get(run.arm.name, 0.0) + seconds
        of_looks += added
        log = looks * known.look_bytes + at_gradient * known.gradient_bytes
        records += run.last_step * known.update_bytes + log + known.fixed_bytes
    estimates = {}
    for run in runs:
        found = estimate_memory(run.config, run.last_step)
        on_host = resolve_device(run.config).type != "cuda"
        estimates[run.arm.name] = found.of_all(run.config.parallel.ranks if on_host else 1)
    always = {"records": round(records), "report": REPORT_BYTES}
    largest = max(runs, key=lambda run: estimates[run.arm.name].bytes)
    return StudyCost(
        runs=len(runs),
        seconds_by_arm=by_arm,
        look_seconds=of_looks,
        measuring=_measuring(runs, keep, trials, policy),
        keep=keep,
        disk={**_stored(runs, keep), **always},
        disk_of_all={**_stored(runs, "all"), **always},
        memory=estimates[largest.arm.name],
        on_gpu=resolve_device(largest.config).type == "cuda",
    )


def _stored(runs: Sequence[Run], keep: str) -> dict[str, int]:
    """Return the bytes that stay of what is written at single steps; equal files count once."""
    larger = any(touches(run.arm.diff, CHANGES_WEIGHTS) for run in runs)
    seen: set[tuple[object, ...]] = set()
    found: dict[str, int] = {}
    for run in runs:
        for what, (steps, size) in planned_files(run).items():
            for step in steps:
                is_last = step == max(steps)
                key = (what, *stored_once(run, step))
                stays = keeps(run, keep, what, step=step, is_last=is_last, larger=larger)
                if what in ("snapshots", "sketches"):
                    stays &= key not in seen
                    seen |= {key} if stays else set()
                found[what] = found.get(what, 0) + stays * size
    return found


def _kept_beside(run: Run) -> int:
    """Return at how many steps a run keeps something, beside its first and last snapshot."""
    checkpoints = run.last_step // run.config.train.checkpoint_every
    return len(_snapshots(run)) - 2 + checkpoints


def _snapshots(run: Run) -> set[int]:
    return {step for step in snapshot_steps_of(run) if step <= run.last_step}


def _measuring(
    runs: Sequence[Run], keep: str, trials: Mapping[str, Trial], policy: PolicyConfig | None
) -> MeasuringCost:
    """Return what is measured beside `runs` takes, which are timed as `trials` say."""
    files = 0
    first = [run for run in runs if run.seed == runs[0].seed]
    for count, run in enumerate(first, start=1):
        # as each that is no control ends; where all are kept, once
        at_its_end = keep != "all" and not is_control(run.arm.role)
        files += len(_snapshots(run)) * (count * at_its_end + (keep == "all")) * (len(first) > 1)
    gradients = [
        _gradient_seconds(run.config, trials[_alike(run)[0]])
        for run in planted_on(runs, policy or PolicyConfig())
    ]
    pair = max(trials[_alike(run)[0]].distance_seconds for run in first)
    seeds = len({run.seed for run in runs})
    return MeasuringCost(
        distances=seeds * files * pair / 2,
        planted=USUAL * sum(gradients),
        planted_most=most_gradients(MOST) * sum(gradients),
    )


def _gradient_seconds(config: ArmConfig, trial: Trial) -> float:
    """Return what a gradient takes that a fault is planted in."""
    batch, probe = config.train.batch_size, config.probe
    if not probe.gradient_every:
        return gradient_updates(config) * trial.update_seconds
    sequences = min(probe.gradient_sequences or batch, batch)
    return trial.gradient_seconds / LOOK_GRADIENTS * min(SEQUENCES, batch) / sequences


def _looks(run: Run) -> tuple[int, int]:
    """Return at how many updates of a run layers are looked at, and at how many the gradient."""
    probe, steps = run.config.probe, range(run.last_step)
    of_layers = Schedule(every=probe.every, steps=probe.steps, per_decade=probe.per_decade)
    of_gradient = Schedule(every=probe.gradient_every)
    return sum(map(of_layers.is_due, steps)), sum(map(of_gradient.is_due, steps))


def _alike(run: Run) -> tuple[str, ArmConfig]:
    """Return what a run is timed as, and a key that is the same for all that are timed once."""
    alike = replace(run.config, seed=SeedConfig(), nudge=NudgeConfig())
    return json.dumps(to_dict(alike), sort_keys=True), alike


def _trial_of(run: Run) -> str:
    """Return what is made of a run to time it."""
    probe = run.config.probe
    looks = f", and {_LOOKS} with the probe" if probe.is_on or probe.gradient_every else ""
    return f"{run.arm.name}, seed {run.seed}: up to {_most(run.config)} updates{looks}"


def _most(config: ArmConfig) -> int:
    """Return the most updates of a trial without probe: no more than there are in a run."""
    return max(_LEAST, min(_UPDATES, config.train.steps))


def _timed(config: ArmConfig, *, isolated: bool) -> Trial:
    if config.parallel.ranks > 1:
        return call_over_ranks(config.parallel.ranks, time_arm, config)[0]
    began = time.perf_counter()
    trial, inside = call_alone(_time_all, config) if isolated else _time_all(config)
    outside = time.perf_counter() - began - inside
    return replace(trial, start_seconds=trial.start_seconds + outside)


def _time_all(config: ArmConfig) -> tuple[Trial, float]:
    """Return the trial of an arm, and what all of it has taken."""
    began = time.perf_counter()
    return time_arm(config), time.perf_counter() - began


def time_arm(config: ArmConfig, ranks: Ranks = ALONE) -> Trial:
    """Train a few updates of an arm in a temporary folder, and return what they have taken.

    Of several `ranks` each has to call it; the first one's answer holds.
    """
    with joined(ranks, resolve_device(config)):
        found = _time_arm(config, ranks)
        part(ranks)
    return found


def _time_arm(config: ArmConfig, ranks: Ranks) -> Trial:
    off = replace(config.probe, every=0, steps=(), per_decade=0, gradient_every=0)
    plain = _trained(replace(config, probe=off), _most(config), ranks)
    kinds = {"every": config.probe.is_on, "gradient_every": bool(config.probe.gradient_every)}
    looked = {
        kind: _trained(replace(config, probe=replace(off, **{kind: 1})), _LOOKS, ranks)
        for kind, is_on in kinds.items()
        if is_on
    }
    update = settled(plain.seconds[_EARLY_SNAPSHOT:])
    snapshot = max(0.0, plain.seconds[_EARLY_SNAPSHOT - 1] - update)
    start = plain.whole - len(plain.seconds) * update
    added, logged = {}, {}
    for kind, each in looked.items():
        look = settled(each.seconds[_EARLY_SNAPSHOT:])
        # what the probe needs before it looks, and its first look, come once too
        start = max(start, each.whole - len(each.seconds) * look)
        added[kind] = max(0.0, look - update)
        logged[kind] = max(0, each.log[-1] - plain.log[-1])
    return Trial(
        update_seconds=update,
        look_seconds=added.get("every", 0.0),
        gradient_seconds=added.get("gradient_every", 0.0),
        snapshot_seconds=snapshot,
        start_seconds=max(0.0, start - snapshot),
        distance_seconds=plain.distance,
        update_bytes=plain.log[-1],
        look_bytes=logged.get("every", 0.0),
        gradient_bytes=logged.get("gradient_every", 0.0),
        fixed_bytes=plain.fixed,
    )


@dataclass(frozen=True, slots=True)
class _Trained:
    seconds: list[float]
    """Of each update."""
    log: list[int]
    """Bytes that each update has added to the log."""
    whole: float
    """Seconds of all of it."""
    fixed: int
    """Bytes of what is written once."""
    distance: float
    """Seconds in which the distance of two snapshots is measured."""


class _Clock(Callback):
    """Notes when each update has ended, and how long the log was by then.

    Training ends with the update, from number _LEAST on, that ends more than `longest_s` after the
    first one.
    """

    def __init__(self, log: MetricLog, longest_s: float) -> None:
        self._file = log
        self._longest_s = longest_s
        self.times: list[float] = []
        self.sizes: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note when the first update begins."""
        if not self.times:
            self._note()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Note when an update has ended; a batch may be a part of one."""
        if trainer.global_step < len(self.times):
            return
        self._note()
        is_late = self.times[-1] - self.times[1] > self._longest_s
        if trainer.global_step >= _LEAST and is_late:
            trainer.should_stop = True

    def _note(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        self.sizes.append(self._file.position())


def _trained(config: ArmConfig, steps: int, ranks: Ranks) -> _Trained:
    steps = steps if ranks.count == 1 else _LEAST
    train = replace(config.train, steps=steps, checkpoint_every=10 * steps, snapshot_steps=())
    config = replace(config, train=train, watch=WatchConfig(every=min(1, config.watch.every)))
    began = time.perf_counter()
    parts, data = assemble(config), load_data(config, ranks)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        files = RunFiles.unnamed(Path(folder))
        log = MetricLog(files.paths.metrics)
        writer = RunWriter(files, log, ranks=ranks)
        witness = Witnessing(parts.model, steps, before={}, save=writer.witnessed)
        door = TrainerDoor(
            writer if ranks.is_first else FollowingWriter(ranks),
            parts.model,
            {0, 1, _EARLY_SNAPSHOT},  # which is the last one is not known
            witness if ranks.is_first else FollowingWitness(),
            held_out=data.held_out_batches,
            kept=config.held_out.prediction_batches,
            ranks=ranks,
            parallel=config.parallel,
        )
        clock = _Clock(log, _LONGEST_S if ranks.count == 1 else math.inf)
        try:
            callbacks = [*parts.callbacks, door, clock]
            trainer = make_trainer(config, files, [RecordsLogger(log)], callbacks, steps, ranks)
            fit(trainer, parts, data)
            door.end(trainer)
        finally:
            log.close()
        whole = time.perf_counter() - began
        own = (files.paths.manifest, files.paths.witness)
        once = sum(path.stat().st_size for path in own if path.exists())
        sizes = [later - sooner for sooner, later in pairwise(clock.sizes)]
        rest = files.paths.metrics.stat().st_size - sum(sizes)
        kept = [files.paths.held_snapshot(step) for step in (0, 1)]
        distance = time_distance(*kept) if ranks.is_first else 0.0
    times = [later - sooner for sooner, later in pairwise(clock.times)]
    return _Trained(times, sizes, whole, once + rest, distance)
