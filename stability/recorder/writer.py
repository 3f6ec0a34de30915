"""Writes the record of a run from what its processes have left in a spool.

The manifest says `running` until every file is whole. A loss is that of the weights after so many
updates, as in the log of any run, so the first update's stands at step 0; the hash of batches runs
over all updates up to its step. Leaves out which runs make a study and whether they are pairs
(`study.foreign`).
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stability.recorder.spooled import Spooled, Update
from stability.records.metric_log import MetricLog
from stability.records.metric_names import (
    BATCH_HASH,
    BATCH_INPUTS,
    BATCH_LABELS,
    DRIFT_FROM,
    DRIFT_OF,
    NONFINITE_WEIGHTS,
    TRAIN_LOSS,
    WEIGHT_HISTOGRAM,
    drift_name,
)
from stability.records.paths import RunPaths, snapshot_steps
from stability.records.run_files import RunFiles, read_summed_snapshot
from stability.records.snapshots import hash_state, write_snapshot

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PATIENCE", "diverged_at", "running_hashes", "write_log", "write_states"]

PATIENCE = 5
"""Updates in a row with a loss that is not finite, which make a run a diverged one."""


def write_log(files: RunFiles, spooled: Spooled) -> None:
    """Write loss and batch hash of each update; what an earlier try has left is cut off."""
    log = MetricLog(files.paths.metrics)
    log.truncate_to(0)
    hashes = running_hashes(spooled.updates)
    try:
        for update in spooled.updates:
            if update.loss is not None:
                log.append(update.step - 1, {TRAIN_LOSS: update.loss})
            if digest := next(hashes):
                by_name = {BATCH_INPUTS: update.inputs, BATCH_LABELS: update.labels}
                parts = {key: json.dumps(hashes) for key, hashes in by_name.items() if hashes}
                log.append(update.step, {}, None, **{BATCH_HASH: digest, **parts})
        log.sync()
    finally:
        log.close()


def running_hashes(updates: Sequence[Update]) -> Iterator[str]:
    """Give the hash of all batches up to each update; empty from the first that was not seen."""
    digest = ""
    for index, update in enumerate(updates):
        is_known = bool(update.batch) and bool(digest or not index)
        digest = hashlib.sha256(f"{digest}{update.batch}".encode()).hexdigest() if is_known else ""
        yield digest


def diverged_at(updates: Sequence[Update]) -> int | None:
    """Return the first step of the last losses if these are not finite, `PATIENCE` or more."""
    bad = 0
    for update in reversed(updates):
        if update.loss is None or math.isfinite(update.loss):
            break
        bad += 1
    return len(updates) - bad if bad >= PATIENCE else None


def write_states(
    files: RunFiles,
    states: "Mapping[int, Callable[[], dict[str, Tensor]]]",
    baseline: RunPaths | None,
    check: Callable[[int], None],
) -> str:
    """Write the snapshots, and the drifts from `baseline`'s; return the hash of the last state.

    `states` has by step the call that reads the state. `check` is called with each step before its
    drift is computed, and raises if the runs are no pair up to there. ValueError if the two have
    weights of other names or shapes.
    """
    for step in snapshot_steps(files.paths):
        if step not in states:  # of an earlier try
            files.remove(files.paths.snapshot(step))
    final = ""
    shared = set(snapshot_steps(baseline)) if baseline else set()
    log = MetricLog(files.paths.metrics)
    try:
        for step in sorted(states):
            state = states[step]()
            path = files.paths.snapshot(step)
            write_snapshot(path, state)
            files.add(path)
            _log_weights(log, step, state)
            if baseline and step in shared:
                check(step)
                _log_drift(log, step, state, files, baseline)
            final = hash_state(state)
        log.sync()
    finally:
        log.close()
    files.add(files.paths.metrics)
    return final


def _log_weights(log: MetricLog, step: int, state: "dict[str, Tensor]") -> None:
    from stability.metrics.instability import count_nonfinite  # heavy: torch
    from stability.metrics.weight_counts import weight_counts

    weights = list(state.values())
    counts = {WEIGHT_HISTOGRAM: weight_counts(weights)}
    log.append(step, {NONFINITE_WEIGHTS: float(count_nonfinite(weights))}, counts)


def _log_drift(
    log: MetricLog, step: int, state: "dict[str, Tensor]", files: RunFiles, baseline: RunPaths
) -> None:
    from stability.metrics.drift import drift  # heavy: torch

    other, other_sum = read_summed_snapshot(baseline, step)
    _check_same_weights(state, other)
    distances = drift(state, other)
    metrics: dict[str, Any] = {
        drift_name(parameter, metric): value
        for parameter, values in distances.items()
        for metric, value in values.items()
    }
    own_sum = files.checksum(files.paths.snapshot(step))
    log.append(step, metrics, None, **{DRIFT_OF: own_sum, DRIFT_FROM: other_sum})


def _check_same_weights(state: "dict[str, Tensor]", other: "dict[str, Tensor]") -> None:
    for name in sorted({*state, *other}):
        if name not in state or name not in other:
            where = "the baseline" if name in state else "this run"
            raise ValueError(f"weights must be those of the baseline, {where} has no {name}")
        if state[name].shape != other[name].shape:
            raise ValueError(
                f"{name} must have the baseline's shape {tuple(other[name].shape)}, has "
                f"{tuple(state[name].shape)}"
            )
