"""Times a few updates of an arm of our own trainer, those that its probe looks at and others.

Leaves out what a study is taken to cost by that (`cost_estimate`).
"""

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from stability.config.schema import ArmConfig, WatchConfig
from stability.model.ranks import ALONE, Ranks, joined, part
from stability.recorder.following import FollowingWitness, FollowingWriter
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import Witnessing
from stability.recorder.writer import RunWriter
from stability.records.metric_log import MetricLog
from stability.records.run_files import RunFiles
from stability.study.assemble import assemble, fit, load_data, make_trainer, resolve_device
from stability.study.distances import time_distance
from stability.study.measuring_cost import settled
from stability.tracking.loggers import RecordsLogger

__all__ = ["Trial", "kinds_of_looks", "most_updates", "time_arm"]

_UPDATES = 12
"""Updates of a trial at most: the first ones warm up."""
_LEAST, _LEAST_LOOKED = 4, 7
"""Updates of one without a probe, and with one, however long they take."""
_LONGEST_S = 5.0
"""Seconds after which it begins no further one."""
_DUE = {"every": 3, "gradient_every": 5}
"""How often a probe looks in a trial: after the first update no other has both looks."""
_KINDS = ("plain", *_DUE)
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


def most_updates(config: ArmConfig) -> int:
    """Return the most updates of a trial: no more than there are in a run, if those are enough."""
    return max(_least(config), min(_UPDATES, config.train.steps))


def _least(config: ArmConfig) -> int:
    return _LEAST_LOOKED if kinds_of_looks(config) else _LEAST


def kinds_of_looks(config: ArmConfig) -> list[str]:
    """Return by which keys of its probe an arm is looked at."""
    kinds = {"every": config.probe.is_on, "gradient_every": bool(config.probe.gradient_every)}
    return [kind for kind, is_on in kinds.items() if is_on]


def time_arm(config: ArmConfig, ranks: Ranks = ALONE) -> Trial:
    """Train a few updates of an arm in a temporary folder, and return what they have taken.

    Of several `ranks` each has to call it; the first one's answer holds.
    """
    with joined(ranks, resolve_device(config)):
        found = _time_arm(config, ranks)
        part(ranks)
    return found


def _time_arm(config: ArmConfig, ranks: Ranks) -> Trial:
    kinds = kinds_of_looks(config)
    due = {kind: every * (kind in kinds) for kind, every in _DUE.items()}
    probe = replace(config.probe, steps=(), per_decade=0, **due)
    steps = most_updates(config) if ranks.count == 1 else _least(config)
    made = _trained(replace(config, probe=probe), steps, ranks)
    # the first update warms up, and the next one has a snapshot
    of: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    for place in range(_EARLY_SNAPSHOT, len(made.seconds)):
        of[_kind(place, kinds)].append(place)
    took = {kind: settled([made.seconds[i] for i in of[kind]]) for kind in _KINDS}
    log = {kind: made.log[of[kind][-1]] if of[kind] else 0 for kind in _KINDS}
    update = took["plain"]
    added = {kind: max(0.0, took[kind] - update) for kind in kinds}
    # the first look of each kind is in the first update
    of_looks = sum(added[kind] * (1 + len(of[kind])) for kind in kinds)
    snapshot = max(0.0, made.seconds[_EARLY_SNAPSHOT - 1] - update)
    start = made.whole - len(made.seconds) * update - of_looks - snapshot
    return Trial(
        update_seconds=update,
        look_seconds=added.get("every", 0.0),
        gradient_seconds=added.get("gradient_every", 0.0),
        snapshot_seconds=snapshot,
        start_seconds=max(0.0, start),
        distance_seconds=made.distance,
        update_bytes=log["plain"],
        look_bytes=max(0, log["every"] - log["plain"]),
        gradient_bytes=max(0, log["gradient_every"] - log["plain"]),
        fixed_bytes=made.fixed,
    )


def _kind(update: int, kinds: Sequence[str]) -> str:
    """Return what an update of a trial, from 0, has beside itself: a look, by its key, or none."""
    return next((kind for kind in kinds if update % _DUE[kind] == 0), "plain")


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

    Training ends with the update, from number `least` on, that ends more than `longest_s` after the
    first one.
    """

    def __init__(self, log: MetricLog, least: int, longest_s: float) -> None:
        self._file = log
        self._least = least
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
        if trainer.global_step >= self._least and is_late:
            trainer.should_stop = True

    def _note(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
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
            {0, 1, _EARLY_SNAPSHOT},  # which is the last one is not known
            witness if ranks.is_first else FollowingWitness(),
            held_out=data.held_out_batches,
            kept=config.held_out.prediction_batches,
            ranks=ranks,
            parallel=config.parallel,
        )
        clock = _Clock(log, _least(config), _LONGEST_S if ranks.count == 1 else math.inf)
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
