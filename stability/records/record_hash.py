"""The hash of what a run has measured: losses, checksums of snapshots, and what is noted of it.

It is taken when the run ends, and kept in its manifest. A line of the log, or a snapshot, that is
changed later under right checksums of its own no longer fits. Leaves out drifts, which are computed
anew where a baseline is trained anew, and batches, which have a hash of their own.
"""

import hashlib
import json

from stability.records.manifest import Manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import EVAL_LOSS, TRAIN_LOSS
from stability.records.paths import RunPaths

__all__ = ["record_hash"]


def record_hash(paths: RunPaths, manifest: Manifest) -> str:
    """Return the SHA-256 over the losses in a run's log, its snapshots, its role and what it notes.

    Of the snapshots it has the checksums that `manifest` lists. ValueError if the log is damaged.
    """
    metrics = read_metrics(paths.metrics) if paths.metrics.exists() else {}
    folder = f"{paths.name_of(paths.snapshot(0).parent)}/"
    content = {
        # as text: a NaN has no JSON
        name: [[step, repr(value)] for step, value in zip(found.steps, found.values, strict=True)]
        for name in (TRAIN_LOSS, EVAL_LOSS)
        if (found := metrics.get(name))
    }
    files = sorted(manifest.all_files.items())
    told = {
        "snapshots": [list(each) for each in files if each[0].startswith(folder)],
        "role": manifest.role,
        "resolved": manifest.resolved,
    }
    return hashlib.sha256(json.dumps({**content, **told}, sort_keys=True).encode()).hexdigest()
