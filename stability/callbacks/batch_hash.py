"""Keeps a running hash of the token ids of every batch: the proof that two arms saw the same data.

The hash at step s covers the batches of the first s updates. Leaves out the hashing itself
(`data.fingerprint`) and the comparison (`study.contract`).
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from stability.data.fingerprint import BatchFingerprint
from stability.records.metric_log import MetricLog
from stability.records.names import BATCH_HASH

__all__ = ["BatchHash"]


class BatchHash(Callback):
    """Write `batch_hash` into the metric log after every update; survives a resume."""

    def __init__(self, log: MetricLog) -> None:
        self.fingerprint = BatchFingerprint()
        self._log = log
        self._step = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Take in this batch."""
        self._step = trainer.global_step
        self.fingerprint.update(batch)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record the hash when the update has been made."""
        if trainer.global_step > self._step:
            digest = self.fingerprint.hexdigest()
            self._log.append(trainer.global_step, {}, None, **{BATCH_HASH: digest})

    def state_dict(self) -> dict[str, Any]:
        """Return the hash so far."""
        return {"digest": self.fingerprint.hexdigest()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the hash of a checkpoint."""
        self.fingerprint = BatchFingerprint(state_dict["digest"])
