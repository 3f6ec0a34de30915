"""Callbacks that run the attention probe while Lightning trains, and log what it measured.

`DeviationProbe` drives the probe that a study's model is built with. `ShadowCallback` does for any
LightningModule what `stability.shadow` does in a loop of one's own. A deviation logged at step s,
like the loss logged at s, comes from the forward and backward pass on the weights after s updates.
On CUDA the measurements of a step are copied to the host while training goes on. They are logged at
the next probed step, at a checkpoint or at the end, whichever comes first, so that training seldom
waits for the copy. The comparison itself is in `probe.attention_probe`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

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
    """Writes a probe's measurements to loggers, and an alert when a watched value crosses a limit.

    To see a crossing it remembers the last watched values: those with published thresholds.
    """

    def __init__(self) -> None:
        self._watched: dict[str, float] = {}

    def write(self, loggers: Sequence[Logger], step: int, measured: StepMeasurements) -> None:
        """Log `measured`, which belongs to the weights after `step` updates."""
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
        """Return the last watched values, so that a resumed run does not repeat an alert."""
        return dict(self._watched)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the last watched values from a checkpoint."""
        self._watched = dict(state)


class DeviationProbe(UpdateCallback):
    """Log `deviation/...` and `watch/<layer>/...` of `model` at the steps that `schedule` names.

    `model` must have been built with `probe`. With `inherited` the forward pass of a probed step is
    run a second time with the probe's first shadow as the attention of every layer, which tells an
    error made in a layer from one that earlier layers passed on.
    """

    def __init__(
        self, probe: AttentionProbe, schedule: Schedule, model: nn.Module, *, inherited: bool
    ) -> None:
        self._probe = probe
        self._schedule = schedule
        self._model = model
        self._inherited = inherited
        self._log = _ProbeLog()
        self._open: ExitStack | None = None
        """Removes the hooks that are on the model during a probed step; None between such steps."""
        self._transfer: tuple[int, HostTransfer] | None = None
        """The last probed step, and its measurements, if they are not logged yet."""
        self._trainer: Trainer | None = None

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Arm the probe before the first forward pass of a step, if the step is to be probed."""
        self._trainer = trainer
        if not self._schedule.is_due(step):
            return
        self._open = ExitStack()
        if self._inherited:
            self._open.enter_context(repeating_forward([self._model], self._probe))
        self._probe.arm()

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Disarm the probe and start copying its measurements to the host."""
        if self._open is None:
            return
        self._open.close()
        self._open = None
        self._probe.disarm()
        # The copy that the last probed step started; by now it has most likely arrived.
        self._write()
        transfer = self._probe.start_transfer()
        if transfer is not None:
            self._transfer = (step, transfer)
            if transfer.is_here:  # always on the CPU, where nothing has to be copied
                self._write()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the measurements of the last probed step."""
        self._write()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the model without hooks, and log the measurements of the last whole step."""
        self._trainer = trainer
        if self._open is not None:
            self._open.close()
            self._open = None
        self._probe.abandon()
        self._write()

    def _write(self) -> None:
        """Log the measurements that are not logged yet, after waiting for their copy."""
        if self._transfer is not None and self._trainer is not None:
            step, transfer = self._transfer
            self._transfer = None
            self._log.write(self._trainer.loggers, step, transfer.result())

    def state_dict(self) -> dict[str, Any]:
        """Return the probe's running sums and reported findings, and the last watched values.

        First logs the measurements that are still being copied. A resumed run cuts the metric log
        at the position in the checkpoint and does not repeat that step, so they would be lost.
        """
        self._write()
        return {"probe": self._probe.state_dict(), "watched": self._log.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from a checkpoint what `state_dict` returned."""
        self._probe.load_state_dict(state_dict["probe"])
        self._log.load_state_dict(state_dict["watched"])


class ShadowCallback(UpdateCallback):
    """Compare `candidate` with the attention of the trained module; log to the trainer's loggers.

    `options` are the keyword arguments of `stability.shadow`, without `sinks` and `first_step`.
    With `gradient_every`, `loss` is a function of the module and the batch; it is called in the
    trainer's precision, with the last micro-batch of a step. Steps are the trainer's global steps.
    `shadow` is called when training starts, and its ValueErrors are raised then.
    """

    def __init__(
        self,
        candidate: Candidate | None = None,
        *,
        loss: Callable[[LightningModule, Any], Tensor] | None = None,
        **options: Any,
    ) -> None:
        self._candidate = candidate
        self._options = options
        self._loss = loss
        self._batch: Any = None
        """The last micro-batch, until its hook has ended."""
        self._open = ExitStack()
        self._session: Shadow | None = None
        self._log = _ProbeLog()
        self._trainer: Trainer | None = None
        self._state: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the comparison."""
        self._trainer = trainer
        self._session = self._open.enter_context(
            shadow(
                pl_module,
                self._candidate,
                **self._options,
                loss=None if self._loss is None else self._loss_of_batch,
                sinks=[self._write],
                first_step=trainer.global_step,
            )
        )
        # Lightning loads callback states before training starts, when there was no probe yet.
        # Once: a second `fit` that resumes from nothing begins its sums anew.
        if self._state:
            self._session.load_state_dict(self._state)
            self._state = {}

    def _loss_of_batch(self) -> Tensor:
        assert self._trainer is not None
        assert self._loss is not None
        with self._trainer.precision_plugin.forward_context():
            return self._loss(self._trainer.lightning_module, self._batch)

    def after_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Remember the batch for `loss`."""
        self._batch = batch if self._loss is not None else None

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Tell the comparison that the weights were updated."""
        if self._session is not None:
            self._session.step()
        self._batch = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last measurements, and leave the module as it was."""
        self._open.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Log the last measurements, and leave the module as it was."""
        # with the exception: a step that it has ended is not one to complain of
        self._open.__exit__(type(exception), exception, exception.__traceback__)

    def _write(self, step: int, measured: StepMeasurements) -> None:
        """Log one step's measurements; this is the sink that `shadow` calls."""
        assert self._trainer is not None
        self._log.write(self._trainer.loggers, step, measured)

    def state_dict(self) -> dict[str, Any]:
        """Return the probe's state and the last watched values.

        First logs the measurements that are still being copied, as `DeviationProbe.state_dict`.
        """
        if self._session is None:
            return {}
        self._session.deliver()
        return {
            **self._session.state_dict(),
            "watched": self._log.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from a checkpoint what `state_dict` returned."""
        self._state = state_dict if "probe" in state_dict else {}
        self._log.load_state_dict(state_dict.get("watched", {}))
