"""Callbacks that run the attention probe while Lightning trains, and log what it measured.

`DeviationProbe` drives the probe that our GPT is built with, `ShadowCallback` is `stability.shadow`
for any LightningModule. A deviation at step s was measured in the forward and backward pass on
weights after s updates, like the loss logged at s. On CUDA a step's measurements are logged when
the next ones are due, or at the checkpoint in between, so that nothing waits for the transfer.
Leaves out the comparison itself (`probe.attention_probe`).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import nn

from stability.callbacks.each_update import UpdateCallback
from stability.intercept.session import Candidate, Shadow, shadow
from stability.metrics.instability import crossings
from stability.probe.attention_probe import AttentionProbe
from stability.probe.measurements import HostTransfer, StepMeasurements
from stability.probe.schedule import Schedule
from stability.probe.second_forward import repeating_forward
from stability.records.events import Event
from stability.tracking.loggers import alert_event, emit, log_counts

__all__ = ["DeviationProbe", "ShadowCallback"]


class _ProbeLog:
    """Writes a probe's measurements to loggers; remembers the last watched values for alerts."""

    def __init__(self) -> None:
        self._watched: dict[str, float] = {}

    def write(self, loggers: Sequence[Logger], step: int, measured: StepMeasurements) -> None:
        """Log what was measured on the weights after `step` updates."""
        if measured.metrics:
            for logger in loggers:
                logger.log_metrics(measured.metrics, step=step)
        if measured.counts:
            log_counts(loggers, measured.counts, step)
        for layer, text in measured.findings:
            emit(loggers, Event(step, "finding", layer, text))
        watched = measured.watched()
        for crossing in crossings(watched, self._watched):
            emit(loggers, alert_event(crossing, step))
        self._watched |= watched

    def state_dict(self) -> dict[str, float]:
        """Return the last watched values."""
        return dict(self._watched)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self._watched = dict(state)


class DeviationProbe(UpdateCallback):
    """Log `deviation/...` and `watch/<layer>/...` of `model` at the steps that `schedule` names."""

    def __init__(
        self, probe: AttentionProbe, schedule: Schedule, model: nn.Module, *, inherited: bool
    ) -> None:
        self._probe = probe
        self._schedule = schedule
        self._model = model
        self._inherited = inherited
        self._log = _ProbeLog()
        self._open: ExitStack | None = None
        """What is installed in the model while a due step runs."""
        self._transfer: tuple[int, HostTransfer] | None = None
        self._trainer: Trainer | None = None

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Arm the probe for a due step's first forward pass."""
        self._trainer = trainer
        if not self._schedule.is_due(step):
            return
        self._open = ExitStack()
        if self._inherited:
            self._open.enter_context(repeating_forward([self._model], self._probe))
        self._probe.arm()

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Disarm the probe, and start the transfer of what it measured."""
        if self._open is None:
            return
        self._open.close()
        self._open = None
        self._probe.disarm()
        self._write()
        transfer = self._probe.start_transfer()
        if transfer is not None:
            self._transfer = (step, transfer)
            if transfer.is_here:
                self._write()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last measurements."""
        self._write()

    def _write(self) -> None:
        if self._transfer is not None and self._trainer is not None:
            step, transfer = self._transfer
            self._transfer = None
            self._log.write(self._trainer.loggers, step, transfer.result())

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums and what was reported.

        Logs first what is still on its way: the checkpoint's log position must include it.
        """
        self._write()
        return {"probe": self._probe.state_dict(), "watched": self._log.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._probe.load_state_dict(state_dict["probe"])
        self._log.load_state_dict(state_dict["watched"])


class ShadowCallback(UpdateCallback):
    """Shadow the attention of the module that is trained, and log to the trainer's loggers.

    Takes `candidate` and the options of `stability.shadow`; steps are the trainer's global steps.
    ValueError when training starts, as `shadow`.
    """

    def __init__(self, candidate: Candidate = "flash:fa2", **options: Any) -> None:
        self._candidate = candidate
        self._options = options
        self._open = ExitStack()
        self._session: Shadow | None = None
        self._log = _ProbeLog()
        self._trainer: Trainer | None = None
        self._state: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module."""
        self._trainer = trainer
        self._session = self._open.enter_context(
            shadow(
                pl_module,
                self._candidate,
                **self._options,
                sinks=[self._write],
                first_step=trainer.global_step,
            )
        )
        if self._state:
            self._session.probe.load_state_dict(self._state)

    def after_update(self, trainer: Trainer, step: int) -> None:
        """End the step."""
        if self._session is not None:
            self._session.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach from the module."""
        self._open.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Detach from the module."""
        self._open.close()

    def _write(self, step: int, measured: StepMeasurements) -> None:
        assert self._trainer is not None
        self._log.write(self._trainer.loggers, step, measured)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs; logs first what is still on its way."""
        if self._session is None:
            return {}
        self._session.deliver()
        return {"probe": self._session.probe.state_dict(), "watched": self._log.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._state = state_dict.get("probe", {})
        self._log.load_state_dict(state_dict.get("watched", {}))
