"""What the files of two runs must have alike: the start weights, and the losses of an A/A pair.

Both are compared in the files themselves, not by what a manifest says of them. Leaves out the
hashes, the batches and what was executed (`pair_contract`, `witness_contract`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from stability.analysis.drift_parents import listed_snapshot
from stability.analysis.pair_proof import ProofLine, compared
from stability.config.axes import touches
from stability.records.manifest import Manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import EVAL_LOSS, TRAIN_LOSS
from stability.records.paths import RunPaths
from stability.records.run_files import read_run_snapshot
from stability.records.snapshots import hash_state

__all__ = ["loss_line", "start_line"]


def start_line(
    runs: tuple[RunPaths, RunPaths],
    manifests: tuple[Manifest, Manifest],
    *,
    is_free: bool,
    differences: Mapping[str, Any],
) -> Iterator[ProofLine]:
    """Compare the snapshots of step 0, where both have one; `is_free` where the start may differ.

    A nudge moves the start, and another precision may keep it in other bits.
    """
    files = [listed_snapshot(*each, 0) for each in zip(runs, manifests, strict=True)]
    if not all(files):
        return
    is_meant = is_free or touches(differences, ("nudge", "precision"))
    field = "the weights at step 0"
    if files[0] == files[1] or is_meant:
        yield compared(field, *files, is_free=is_meant)
        return
    # a file of another version of the library may say the same in other bytes
    yield compared(field, *(hash_state(read_run_snapshot(paths, 0)) for paths in runs))


def loss_line(
    runs: tuple[RunPaths, RunPaths],
    manifests: tuple[Manifest, Manifest],
    differences: Mapping[str, Any],
) -> Iterator[ProofLine]:
    """Compare the losses of two runs that differ in nothing and end in the same bits.

    Those of other pairs are each run's own word.
    """
    ends = [manifest.hashes.get("final_weights") for manifest in manifests]
    if differences or not ends[0] or ends[0] != ends[1]:
        return
    logs = [_losses(paths) for paths in runs]
    for name in (TRAIN_LOSS, EVAL_LOSS):
        one, other = (log.get(name, {}) for log in logs)
        for step in sorted({*one, *other}):
            values = one.get(step), other.get(step)
            if repr(values[0]) != repr(values[1]):  # two NaN are alike
                yield compared(f"{name} at step {step}", *values)
                return
    count = sum(map(len, logs[0].values()))
    yield compared("losses", f"{count} alike", f"{count} alike")


def _losses(paths: RunPaths) -> dict[str, dict[int, float]]:
    if not paths.metrics.exists():
        return {}
    found = read_metrics(paths.metrics)
    return {
        name: dict(zip(series.steps, series.values, strict=True))
        for name in (TRAIN_LOSS, EVAL_LOSS)
        if (series := found.get(name))
    }
