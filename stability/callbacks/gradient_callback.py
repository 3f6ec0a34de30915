"""Takes gradient evidence of a run at due steps, and logs `gradient/...`.

A look at step s is at the weights after s updates and at the batch that they are trained on next
(its first micro-batch, where gradients are accumulated), before that training step begins. Of a run
over ranks the first one looks, at its own samples, with all weights; the others do no more than
send their parts. Leaves out how a gradient is computed, which is the caller's, and what is measured
of it (`probe.gradient_evidence`).
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from stability.callbacks.each_update import UpdateCallback
from stability.model.layouts import whole
from stability.probe.gradient_evidence import AttentionRole, GradientMeter
from stability.records.events import Event
from stability.tracking.loggers import emit

__all__ = ["GradientProbe", "GradientsOf"]

AS_TRAINED_EVERY = 4
"""What is judged is the isolated gradient; the one as trained describes, and costs as much."""


class GradientsOf(Protocol):
    """Computes the gradient of a batch's loss; `study.model_gradients` has a study's."""

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        batch: Tensor,
        role: AttentionRole,
        is_isolated: bool,
        scale: float = 1.0,
    ) -> Mapping[str, Tensor]:
        """Return the gradient by parameter, divided by `scale`, by which the loss is multiplied."""
        ...


class GradientProbe(UpdateCallback):
    """Log the gradient evidence of `model` at every `every`-th step, from step 0 on.

    Of a batch it takes the first `sequences`, or all if that is 0. Each `AS_TRAINED_EVERY`-th look
    also has the gradients as trained.
    """

    def __init__(
        self, model: nn.Module, gradients: GradientsOf, every: int, *, sequences: int = 0
    ) -> None:
        self._model = model
        self._gradients = gradients
        self._every = every
        self._sequences = sequences
        self._meter = GradientMeter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look, if this micro-batch is the first of a due step."""
        begins = trainer.global_step != self._step
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if begins and trainer.global_step % self._every == 0:
            self._look(trainer, batch)

    def _look(self, trainer: Trainer, batch: Tensor) -> None:
        weights = {}
        for name, value in self._model.named_parameters():
            gathered = whole(value.detach())
            if trainer.is_global_zero:
                weights[name] = gathered
        if not trainer.is_global_zero:
            return
        looked_at = batch[: self._sequences or None]
        share = len(looked_at) / len(batch) / trainer.accumulate_grad_batches
        take = partial(
            self._gradients,
            weights,
            looked_at,
            scale=_loss_scale(trainer) * _power_of_two(share),
        )
        look = trainer.global_step // self._every
        measured = self._meter.look(take, as_trained=look % AS_TRAINED_EVERY == 0)
        if measured.metrics:
            for logger in trainer.loggers:
                logger.log_metrics(measured.metrics, step=trainer.global_step)
        for layer, text in measured.findings:
            emit(trainer.loggers, Event(trainer.global_step, "finding", layer, text))

    def state_dict(self) -> dict[str, Any]:
        """Return the sketches of the errors so far: shares go on over all looks."""
        return self._meter.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue as the run that wrote the checkpoint would have."""
        self._meter.load_state_dict(state_dict)


def _power_of_two(share: float) -> float:
    """Return the largest power of two that is not above `share`.

    The loss is multiplied by it, so that gradients are no larger on their way than in the training,
    whose formats may have scales for that. It rounds nothing.
    """
    return 2.0 ** (math.frexp(share)[1] - 1)


def _loss_scale(trainer: Trainer) -> float:
    """Return what the trainer multiplies a loss by, to keep FP16's gradients from underflow."""
    plugin = trainer.precision_plugin
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return float(scaler.get_scale()) if scaler is not None else 1.0
