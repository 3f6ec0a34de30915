"""Records a running hash of every batch's token ids: the proof that two runs saw the same data.

The hash at step s covers the batches of the first s updates. Leaves out the hashing itself
(`data.fingerprint`) and the comparison of two runs.
"""

from typing import Any

from lightning.pytorch import Trainer

from stability.callbacks.each_update import UpdateCallback
from stability.data.fingerprint import BatchFingerprint
from stability.records.metric_log import MetricLog
from stability.records.metric_names import BATCH_HASH

__all__ = ["BatchHash"]


class BatchHash(UpdateCallback):
    """Write `batch_hash` into the metric log after every update; survives a resume."""

    def __init__(self, log: MetricLog) -> None:
        self.fingerprint = BatchFingerprint()
        self._log = log

    def after_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Add this batch to the hash."""
        self.fingerprint.update(batch)

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Record the hash."""
        digest = self.fingerprint.hexdigest()
        self._log.append(trainer.global_step, {}, None, **{BATCH_HASH: digest})

    def state_dict(self) -> dict[str, Any]:
        """Return the hash so far."""
        return {"digest": self.fingerprint.hexdigest()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the hash of a checkpoint."""
        self.fingerprint = BatchFingerprint(state_dict["digest"])
