"""Keeps the metric log without gap or overlap when a run resumes from a checkpoint."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from stability.records.metric_log import MetricLog

__all__ = ["LogPosition"]


class LogPosition(Callback):
    """Store in each checkpoint how long the metric log was, and cut it there on a resume.

    The checkpoint holds the hash of that part of the log too, so that the two can't be mismatched.
    `start` is the number of updates made before.
    """

    def __init__(self, log: MetricLog, start: int = 0) -> None:
        self._log = log
        self._start = start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """ValueError unless training goes on from the step of the checkpoint, as the log does.

        Lightning counts from 0 again where a checkpoint lacks the state of its loops.
        """
        if trainer.global_step != self._start:
            raise ValueError(
                f"training must go on from step {self._start}, what was restored is at step "
                f"{trainer.global_step}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Force the log to disk; return its length in bytes and their SHA-256.

        Lightning asks before it writes the checkpoint, which so never outlives its log.
        """
        self._log.sync()
        position = self._log.position()
        return {"position": position, "sha256": self._log.hash_until(position)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Drop what was logged after the checkpoint."""
        self._log.truncate_to(state_dict["position"])
