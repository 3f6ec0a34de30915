"""What a study will take: hours, bytes on disk and memory, from its config and a few timed steps.

Time. Of each arm three updates are made without probe, and two with it; the first of each warms up
and does not count. A run is its updates, those at which the probe looks, and what lay beside the
updates in the trial: building the model, reading the text, the first and last snapshot. Arms that
differ in their seed or nudge alone are timed once. Evaluations between the first and last snapshot,
distances, planted faults and the report are left out: a study takes somewhat longer. A run over
ranks is timed over as many, on this machine.

Disk. Snapshots with their sketches, checkpoints and predictions follow from the config
(`size_check`), and which of them stay from the study's `keep` (`storage`); what is sure to be equal
counts once. The log is that of the trial for each update and each look, and the report comes once.
W&B's own files are left out. While a study trains, the first seed and one more are there whole.

Memory. The least that the largest arm does with (`memory_estimate`).
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.convert import to_dict
from stability.config.schema import ArmConfig, NudgeConfig, SeedConfig, WatchConfig
from stability.model.ranks import ALONE, Ranks, joined, part
from stability.probe.schedule import Schedule
from stability.recorder.following import FollowingWitness, FollowingWriter
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import Witnessing
from stability.recorder.writer import RunWriter
from stability.records.metric_log import MetricLog
from stability.records.run_files import RunFiles
from stability.study.assemble import assemble, fit, load_data, make_trainer, resolve_device
from stability.study.call_over_ranks import call_over_ranks
from stability.study.fresh_process import call_for
from stability.study.memory_estimate import Estimate, estimate_memory
from stability.study.run import Run
from stability.study.size_check import planned_files
from stability.study.storage import keeps, stored_once
from stability.tracking.loggers import RecordsLogger

__all__ = ["REPORT_BYTES", "StudyCost", "Trial", "cost_of", "time_arm"]

REPORT_BYTES = 5_500_000
"""The page of a small study; most of it is what draws its charts."""

_UPDATES, _LOOKS = 3, 2
"""What is timed of an arm without the probe, and with it; the first of each warms up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a few updates of an arm have taken on this machine."""

    update_seconds: float
    look_seconds: float
    """Of an update at which the probe looks; 0 if it never does."""
    start_seconds: float
    """All else: model, text, the first and last snapshot."""
    update_bytes: float
    """Of the log."""
    look_bytes: float
    fixed_bytes: int
    """Of what is written once: the log of the weights, the witness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyCost:
    """What a study will take."""

    runs: int
    seconds: float
    """One run after another."""
    seconds_by_arm: dict[str, float]
    """The same, of all seeds of each arm."""
    look_seconds: float
    """What of it the looks add to the updates that they are made at."""
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
            "hours_by_arm": {name: each / 3600 for name, each in self.seconds_by_arm.items()},
            "hours_of_looks": self.look_seconds / 3600,
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
    isolated: bool = True,
    told: Callable[[str], None] = lambda _: None,
) -> StudyCost:
    """Return what `runs` take from their beginning, and leave under a policy of what to keep.

    `isolated`, the trials are in processes of their own. `told` is given a line before each of
    them, which takes seconds. ValueError as `assemble`.
    """
    trials: dict[str, Trial] = {}
    by_arm: dict[str, float] = {}
    of_looks, records = 0.0, 0.0
    count = len({_alike(run)[0] for run in runs})
    for run in runs:
        key, alike = _alike(run)
        if key not in trials:
            told(f"timing {len(trials) + 1} of {count}: {_trial_of(run)}")
            trials[key] = _timed(alike, isolated=isolated)
        known = trials[key]
        looks = _looks(run)
        seconds = known.start_seconds + (run.last_step - looks) * known.update_seconds
        seconds += looks * known.look_seconds
        by_arm[run.arm.name] = by_arm.get(run.arm.name, 0.0) + seconds
        of_looks += looks * max(0.0, known.look_seconds - known.update_seconds)
        log = (run.last_step - looks) * known.update_bytes + looks * known.look_bytes
        records += log + known.fixed_bytes
    estimates = {}
    for run in runs:
        found = estimate_memory(run.config, run.last_step)
        on_host = resolve_device(run.config).type != "cuda"
        estimates[run.arm.name] = found.of_all(run.config.parallel.ranks if on_host else 1)
    always = {"records": round(records), "report": REPORT_BYTES}
    largest = max(runs, key=lambda run: estimates[run.arm.name].bytes)
    return StudyCost(
        runs=len(runs),
        seconds=sum(by_arm.values()),
        seconds_by_arm=by_arm,
        look_seconds=of_looks,
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


def _looks(run: Run) -> int:
    """Return at how many updates of a run the probe looks, or gradients are looked at."""
    probe = run.config.probe
    of_layers = Schedule(every=probe.every, steps=probe.steps, per_decade=probe.per_decade)
    of_gradient = Schedule(every=probe.gradient_every)
    return sum(of_layers.is_due(step) or of_gradient.is_due(step) for step in range(run.last_step))


def _alike(run: Run) -> tuple[str, ArmConfig]:
    """Return what a run is timed as, and a key that is the same for all that are timed once."""
    alike = replace(run.config, seed=SeedConfig(), nudge=NudgeConfig())
    return json.dumps(to_dict(alike), sort_keys=True), alike


def _trial_of(run: Run) -> str:
    """Return what is made of a run to time it."""
    probe = run.config.probe
    looks = f", and {_LOOKS} with the probe" if probe.is_on or probe.gradient_every else ""
    return f"{run.arm.name}, seed {run.seed}: {_UPDATES} updates{looks}"


def _timed(config: ArmConfig, *, isolated: bool) -> Trial:
    if config.parallel.ranks > 1:
        return call_over_ranks(config.parallel.ranks, time_arm, config)[0]
    return call_for(config, time_arm, config) if isolated else time_arm(config)


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
    plain = _trained(replace(config, probe=off), _UPDATES, ranks)
    looked = None
    if config.probe.is_on or config.probe.gradient_every:
        gradient = min(1, config.probe.gradient_every)
        layers = min(1, int(config.probe.is_on))
        on = replace(config.probe, every=layers, steps=(), per_decade=0, gradient_every=gradient)
        looked = _trained(replace(config, probe=on), _LOOKS, ranks)
    return Trial(
        update_seconds=min(plain.seconds[1:]),
        look_seconds=looked.seconds[-1] if looked else 0.0,
        start_seconds=plain.whole - sum(plain.seconds[1:]),
        update_bytes=plain.log[-1],
        look_bytes=looked.log[-1] if looked else 0.0,
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


class _Clock(Callback):
    """Notes when each update has ended, and how long the log was by then."""

    def __init__(self, log: MetricLog) -> None:
        self._file = log
        self.times: list[float] = []
        self.sizes: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note when the first update begins."""
        if not self.times:
            self._note()

    def on_train_batch_end(self, *_: Any) -> None:
        """Note when an update has ended."""
        self._note()

    def _note(self) -> None:
        self.times.append(time.perf_counter())
        self.sizes.append(self._file.position())


def _trained(config: ArmConfig, steps: int, ranks: Ranks) -> _Trained:
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
            {0, steps},
            witness if ranks.is_first else FollowingWitness(),
            held_out=data.held_out_batches,
            kept=config.held_out.prediction_batches,
            ranks=ranks,
            parallel=config.parallel,
        )
        clock = _Clock(log)
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
    times = [later - sooner for sooner, later in pairwise(clock.times)]
    return _Trained(times, sizes, whole, once + rest)
