"""Writes the record of a run: every line of its updates and weights, its files, how it ended.

It is told of a training as that goes on (`trainer_door`), or of one that has ended, from the spool
of its processes or from checkpoints of anybody's (`study.foreign`, `study.adopt`). The record is of
one form: a loss is that of the weights after so many updates, so the first update's stands at step
0; the hash of batches runs over all updates up to its step; the manifest says `running` until every
file is whole.

Leaves out what instruments log (`callbacks`), checkpoints (`study.checkpoints`), and which runs
make a study and whether they are pairs.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.records.manifest import PATIENCE
from stability.records.metric_log import MetricLog, read_text
from stability.records.metric_names import (
    BATCH_HASH,
    DRIFT_FROM,
    DRIFT_OF,
    EVAL_LOSS,
    NONFINITE_WEIGHTS,
    TRAIN_LOSS,
    WEIGHT_HISTOGRAM,
    drift_name,
)
from stability.records.paths import RunPaths, prediction_steps, sketch_steps, snapshot_steps
from stability.records.record_hash import record_hash
from stability.records.run_files import RunFiles, read_summed_snapshot, summed_snapshot
from stability.records.run_lease import LeaseLostError
from stability.records.sealed_json import file_checksum
from stability.records.snapshots import check_same_weights, write_snapshot
from stability.records.weight_sketches import write_weight_sketch
from stability.records.witness import Witness, write_witness

if TYPE_CHECKING:
    from torch import Tensor

    from stability.model.ranks import Ranks

__all__ = [
    "LOG_PROBABILITIES",
    "Baseline",
    "RunWriter",
    "is_sharded",
    "running_hashes",
    "stopped",
]

LOG_PROBABILITIES = "log_probabilities"
"""The tensor in a file of predictions: of each true next token, natural log, (blocks, tokens)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The run that drifts are measured from, which has been recorded before."""

    paths: RunPaths
    steps: Collection[int]
    """Those of its states that are compared."""
    check: Callable[[int], None] = lambda step: None
    """Called with a step before its drift is computed; raises if they are no pair up to there."""
    has_other_weights: bool = False
    """Whether the run's change adds weights or takes some away: drift is over those both have."""


class RunWriter:
    """Writes the record of one run into `log`, and into the files that `files` lists.

    A file that is listed already stays: a run that is gone on with has the same bits at that step.
    """

    def __init__(
        self,
        files: RunFiles,
        log: MetricLog,
        *,
        log_every: int = 1,
        baseline: Baseline | None = None,
        ranks: "Ranks | None" = None,
    ) -> None:
        self.step = 0
        """How many updates, of those that the record tells of, were made."""
        self.batches: str | None = ""
        """The running hash of all batches so far; None from the first on that was not seen."""
        self._files = files
        self.log = log
        self._log_every = log_every
        self._baseline = baseline
        self._ranks = ranks
        self._bad = self._since = 0
        """How many losses in a row are not finite, and the first one's step."""

    @property
    def diverged(self) -> int | None:
        """The step of the first of the last losses, if they are too many that are not finite."""
        return self._since if self._bad >= PATIENCE else None

    @property
    def may_diverge(self) -> bool:
        """Whether the run has diverged with the next update, if its loss is not finite too."""
        return self._bad == PATIENCE - 1

    def begin(self) -> None:
        """Cut off what an earlier try has left of the log, snapshots, predictions and sketches."""
        self.log.truncate_to(0)
        paths = self._files.paths
        found = [paths.held_snapshot(step) for step in snapshot_steps(paths)]
        found += [paths.predictions(step) for step in prediction_steps(paths)]
        found += [paths.sketch(step) for step in sketch_steps(paths)]
        for path in found:
            if path not in self._files:
                self._files.remove(path)

    def updated(
        self,
        step: int,
        loss: float | None,
        batch: str,
        parts: Mapping[str, Mapping[str, str] | str] | None = None,
    ) -> None:
        """Tell of update number `step`: its loss, None if it was not seen, and its batch's hash.

        The hash does not depend on the order of a batch's samples; it is empty if none was seen.
        `parts` are hashes of single inputs by name, under the names they have in the log.
        """
        if loss is not None and (step - 1) % self._log_every == 0:
            self.log.append(step - 1, {TRAIN_LOSS: loss})
        self.batches = _chained(self.batches, batch)
        if self.batches is not None:
            told = {key: json.dumps(each) for key, each in (parts or {}).items() if each}
            self.log.append(step, {}, None, **{BATCH_HASH: self.batches, **told})
        self.step = step
        if loss is None or math.isfinite(loss):
            self._bad = 0
            return
        if self._bad == 0:
            self._since = step - 1
        self._bad += 1

    def state(self, step: int, state: "Mapping[str, Tensor]") -> None:
        """Tell of the weights after `step` updates: snapshot, sketch, histogram, drift.

        ValueError if the baseline has weights of other names or shapes, or not those it lists.
        """
        is_due = self._baseline is not None and step in self._baseline.steps
        baseline = self._baseline if is_due else None
        if is_sharded(state):
            self._record_sharded(step, state, baseline, is_logged=False)
            return
        self.snapshot(step, state)
        self.step = max(self.step, step)
        self._log_weights(step, state)
        if baseline is not None:
            baseline.check(step)
            self._log_whole_drift(step, state, baseline)

    def snapshot(self, step: int, state: "Mapping[str, Tensor]") -> None:
        """Write the weights after `step` updates, of which the log may tell already, and sketch."""
        if is_sharded(state):
            self._record_sharded(step, state, None, is_logged=True)
            return
        self._write(self._files.paths.snapshot(step), state)
        path = self._files.paths.sketch(step)
        if path not in self._files:
            from stability.metrics.pieces import pieces_of  # heavy: torch
            from stability.recorder.sketching import stored_sketch

            write_weight_sketch(path, stored_sketch(pieces_of(state)))
            self._files.add(path)

    def held_out(self, step: int, loss: float) -> None:
        """Tell of the loss on held-out data of the weights after `step` updates, nats a token."""
        self.log.append(step, {EVAL_LOSS: loss})

    def predictions(self, step: int, log_probabilities: "Tensor") -> None:
        """Write the log-probabilities of held-out tokens, `(blocks, tokens)`."""
        path = self._files.paths.predictions(step)
        self._write(path, {LOG_PROBABILITIES: log_probabilities})

    def lacks_predictions(self, step: int) -> bool:
        """Whether the predictions of a step are yet to be written."""
        return self._files.paths.predictions(step) not in self._files

    def witnessed(self, witness: Witness) -> None:
        """Write what the run has executed."""
        write_witness(self._files.paths.witness, witness)
        self._files.add(self._files.paths.witness)

    def ended(self, final_weights: str) -> None:
        """Say in the manifest that the run has come to its end, with this hash of its weights."""
        self.log.sync()
        self.log.close()
        at, log = self.diverged, self._files.paths.metrics
        manifest = self._files.manifest
        batches = {"batches": self.batches} if self.batches else {}
        record = record_hash(self._files.paths, manifest)
        self._files.update(
            state="finished" if at is None else "diverged",
            message="" if at is None else f"the loss is not finite from step {at} on",
            step=self.step,
            hashes={**manifest.hashes, **batches, "final_weights": final_weights, "record": record},
            files={**manifest.files, self._files.paths.name_of(log): file_checksum(log)},
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs that goes on from here, once the log up to here is on disk.

        The log's hash is in it too, so that it can't be gone on with beside another one.
        """
        self.log.sync()
        position = self.log.position()
        return {
            "position": position,
            "sha256": self.log.hash_until(position),
            "step": self.step,
            "batches": self.batches,
            "bad": self._bad,
            "since": self._since,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: what was logged later is cut off."""
        self.log.truncate_to(state["position"])
        self.step, self.batches = state["step"], state["batches"]
        self._bad, self._since = state["bad"], state["since"]

    def _write(self, path: Path, tensors: "Mapping[str, Tensor]") -> None:
        if path not in self._files:
            write_snapshot(path, tensors)
            self._files.add(path)

    def _record_sharded(
        self,
        step: int,
        state: "Mapping[str, Tensor]",
        baseline: Baseline | None,
        *,
        is_logged: bool,
    ) -> None:
        """Record weights of which each rank has a part: what is due is told to all of them."""
        from stability.recorder.sharded_weights import Due, record_weights  # heavy: torch

        paths, origin, origin_sum = self._files.paths, None, ""
        if baseline is not None:
            baseline.check(step)
            origin, origin_sum = summed_snapshot(baseline.paths, step)
        folder, sketch = paths.sharded_snapshot(step), paths.sketch(step)
        due = Due(
            snapshot=None if folder in self._files else folder,
            sketch=sketch not in self._files,
            counts=not is_logged,
            baseline=origin,
            of_both=baseline is not None and baseline.has_other_weights,
        )
        found = record_weights(state, self._ranks.told(due) if self._ranks else due)
        if found.write is not None:
            self._files.add(found.write.wait())
        if found.sketch is not None:
            write_weight_sketch(sketch, found.sketch)
            self._files.add(sketch)
        if found.counts is not None:
            self.step = max(self.step, step)
            self._log_counts(step, *found.counts)
        if found.drift is not None:
            self._log_drift(step, found.drift, folder, origin_sum)

    def _log_weights(self, step: int, state: "Mapping[str, Tensor]") -> None:
        from stability.metrics.instability import count_nonfinite  # heavy: torch
        from stability.metrics.weight_counts import weight_counts

        weights = [weight for weight in state.values() if weight.is_floating_point()]
        # the histogram has no bin for NaN, and one for infinity and all large numbers
        nonfinite = float(count_nonfinite(weights)) if weights else 0.0
        self._log_counts(step, nonfinite, weight_counts(weights))

    def _log_counts(self, step: int, nonfinite: float, counts: list[int]) -> None:
        self.log.append(step, {NONFINITE_WEIGHTS: nonfinite}, {WEIGHT_HISTOGRAM: counts})

    def _log_whole_drift(
        self, step: int, state: "Mapping[str, Tensor]", baseline: Baseline
    ) -> None:
        from stability.metrics.drift import drift, weights_of_both  # heavy: torch

        own = {name: value.detach().cpu() for name, value in state.items()}
        other, other_sum = read_summed_snapshot(baseline.paths, step)
        if baseline.has_other_weights:
            own, other = weights_of_both(own, other)
        check_same_weights(_shapes(own), _shapes(other))
        self._log_drift(step, drift(own, other), self._files.paths.snapshot(step), other_sum)

    def _log_drift(
        self, step: int, found: Mapping[str, Mapping[str, float]], snapshot: Path, other_sum: str
    ) -> None:
        metrics = {
            drift_name(parameter, metric): value
            for parameter, values in found.items()
            for metric, value in values.items()
        }
        own_sum = self._files.checksum(snapshot)
        self.log.append(step, metrics, None, **{DRIFT_OF: own_sum, DRIFT_FROM: other_sum})


def is_sharded(state: "Mapping[str, Tensor]") -> bool:
    """Whether no process holds all of `state`; the same on every rank that holds a part of it."""
    # by their class's name: most processes never load DTensor
    return any(type(value).__name__ == "DTensor" for value in state.values())


def running_hashes(batches: Iterable[str]) -> Iterator[str]:
    """Give the hash of all batches up to each update; empty from the first that was not seen."""
    digest: str | None = ""
    for batch in batches:
        digest = _chained(digest, batch)
        yield digest or ""


def stopped(files: RunFiles, state: str, message: str = "") -> None:
    """Say in the manifest how a run stopped; where that can't be done, the last one stays.

    What stopped it is told anyway, and must not be hidden behind what that has led to.
    """
    step = files.manifest.step
    with contextlib.suppress(OSError, ValueError):
        step = max(step, _steps_logged(files.paths))
    with contextlib.suppress(OSError, LeaseLostError):
        files.update(state=state, message=message, step=step)


def _steps_logged(paths: RunPaths) -> int:
    """Return how many updates a run's log tells of."""
    if not paths.metrics.exists():
        return 0
    return max(read_text(paths.metrics, BATCH_HASH), default=0)


def _chained(digest: str | None, batch: str) -> str | None:
    if digest is None or not batch:
        return None
    return hashlib.sha256(f"{digest}{batch}".encode()).hexdigest()


def _shapes(state: "Mapping[str, Tensor]") -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}
