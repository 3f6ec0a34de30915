"""Keeps the metric log without gap or overlap when a run resumes from a checkpoint."""

from typing import Any

from lightning.pytorch import Callback

from stability.records.metric_log import MetricLog

__all__ = ["LogPosition"]


class LogPosition(Callback):
    """Store in each checkpoint how long the metric log was, and cut it there on a resume."""

    def __init__(self, log: MetricLog) -> None:
        self._log = log

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the log in bytes."""
        return {"position": self._log.position()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Drop what was logged after the checkpoint."""
        self._log.truncate_to(state_dict["position"])
