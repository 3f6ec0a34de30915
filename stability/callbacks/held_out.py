"""Evaluates a run on text that no arm trains on: the loss, and the log-probabilities of its tokens.

The weights are evaluated as the run computes: with its precision and its attention, but in
evaluation mode and without gradients, in batches of the same size in every arm. Nothing of the run
changes by it: the modes of the modules are put back, and so are the random generators, from which
an attention of one's own may draw. Leaves out which text is held out (`data.datamodule`) and what
its loss says of an arm (`analysis.outcome_evidence`).

Shapes: B blocks of a batch, T tokens of a block that have a next one, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from stability.callbacks.weight_callbacks import WeightCallback
from stability.records.metric_names import EVAL_LOSS
from stability.records.run_files import RunFiles
from stability.records.snapshots import write_snapshot

__all__ = ["LOG_PROBABILITIES", "HeldOut"]

LOG_PROBABILITIES = "log_probabilities"
"""The tensor in a file of predictions: of each true next token, natural log, (blocks, tokens)."""


class HeldOut(WeightCallback):
    """Log `eval/loss` of `model` after each number of updates in `steps`, and keep predictions.

    `eval/loss` is the mean over all tokens of `batches`, nats a token, added up in FP64. The
    predictions on the first `kept` of them go to `predictions/`, listed in `files`; a file that is
    already listed stays, since a resumed run has the same bits at that step.
    """

    def __init__(
        self,
        model: nn.Module,
        files: RunFiles,
        steps: Collection[int],
        batches: Sequence[Tensor],
        *,
        kept: int,
    ) -> None:
        super().__init__(model, steps)
        self._files = files
        self._batches = batches
        self._kept = kept

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the initial weights; a fork, which starts later, has only predictions to add.

        Its loss at that step stands in the log that it has inherited.
        """
        super().on_train_start(trainer, pl_module)
        step = trainer.global_step
        if step in self._steps and self._is_missing(step):
            self._write(step, [self._predict(trainer, b) for b in self._batches[: self._kept]])

    def at_step(self, trainer: Trainer, step: int) -> None:
        """Log the loss and write the predictions."""
        predicted = [self._predict(trainer, batch) for batch in self._batches]
        # each mean on the device, one transfer for all
        means = torch.stack([batch.double().mean() for batch in predicted])
        for logger in trainer.loggers:
            logger.log_metrics({EVAL_LOSS: -float(means.mean())}, step=step)
        if self._is_missing(step):
            self._write(step, predicted[: self._kept])

    def _is_missing(self, step: int) -> bool:
        return self._kept > 0 and self._files.paths.predictions(step) not in self._files

    def _write(self, step: int, predicted: Sequence[Tensor]) -> None:
        path = self._files.paths.predictions(step)
        write_snapshot(path, {LOG_PROBABILITIES: torch.cat(list(predicted))})
        self._files.add(path)

    def _predict(self, trainer: Trainer, batch: Tensor) -> Tensor:
        """Return log p of each true next token, `(B, T)`, FP32 or, from FP64 logits, FP64."""
        device = next(self._model.parameters()).device
        tokens = batch.to(device)
        with _evaluating(self._model, device), trainer.precision_plugin.val_step_context():
            logits_BTV = self._model(tokens[:, :-1])
        # widened as in training: half-precision logits would round the loss to 2**-8 of itself
        wide = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        losses = F.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return -losses.view(tokens.shape[0], -1)


@contextmanager
def _evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Compute without gradients and in evaluation mode; then restore each module and generator."""
    were_training = [module for module in model.modules() if module.training]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            model.eval()
            yield
    finally:
        for module in were_training:
            # not .train(), which would also set the modules below
            module.training = True
