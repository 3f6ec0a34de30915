"""Looks through the probe at due steps of our GPT's training and logs what it saw.

A deviation at step s was measured in the forward and backward pass on weights after s updates, like
the loss logged at s. On CUDA a step's figures are logged when the next ones are due, or at the
checkpoint in between, so that nothing waits for them. Leaves out the comparison itself
(`attention.probe`) and models that are not built with one (`shadow_callback`).
"""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from stability.callbacks.each_update import UpdateCallback
from stability.callbacks.probe_log import ProbeLog
from stability.probe.measurements import Transfer
from stability.probe.probe import AttentionProbe
from stability.probe.schedule import Schedule
from stability.probe.second_pass import repeating_forward

__all__ = ["DeviationProbe"]


class DeviationProbe(UpdateCallback):
    """Log `deviation/...` and `watch/<layer>/...` of `model` at the steps that `schedule` names."""

    def __init__(
        self, probe: AttentionProbe, schedule: Schedule, model: nn.Module, *, inherited: bool
    ) -> None:
        self._probe = probe
        self._schedule = schedule
        self._model = model
        self._inherited = inherited
        self._log = ProbeLog()
        self._looking: ExitStack | None = None
        self._underway: tuple[int, Transfer] | None = None
        self._trainer: Trainer | None = None

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Arm the probe for a step's first forward pass."""
        self._trainer = trainer
        if not self._schedule.is_due(step):
            return
        self._looking = ExitStack()
        if self._inherited:
            self._looking.enter_context(repeating_forward([self._model], self._probe))
        self._probe.arm()

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Disarm it, and send the figures off."""
        if self._looking is None:
            return
        self._looking.close()
        self._looking = None
        self._probe.disarm()
        self._write()
        transfer = self._probe.start_transfer()
        if transfer is not None:
            self._underway = (step, transfer)
            if transfer.is_here:
                self._write()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last figures."""
        self._write()

    def _write(self) -> None:
        if self._underway is not None and self._trainer is not None:
            step, transfer = self._underway
            self._underway = None
            self._log.write(self._trainer.loggers, step, transfer.result())

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums and what was reported; logs first what a checkpoint counts on."""
        self._write()
        return {"probe": self._probe.state_dict(), "watched": self._log.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._probe.load_state_dict(state_dict["probe"])
        self._log.load_state_dict(state_dict["watched"])
