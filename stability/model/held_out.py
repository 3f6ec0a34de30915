"""Evaluates a model on text that it is not trained on: the log-probabilities of the true tokens.

The weights are evaluated as the training computes: with its precision and its attention, but in
evaluation mode and without gradients. Nothing of the training changes by it: the modes of the
modules are put back, and so are the random generators, from which an attention of one's own may
draw. Leaves out which text is held out (`data.datamodule`) and what its loss says of an arm
(`analysis.outcome_evidence`).

Shapes: B blocks of a batch, T tokens of a block that have a next one, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["log_probabilities", "mean_loss"]


def log_probabilities(
    model: nn.Module,
    batch: Tensor,
    precision: AbstractContextManager[None] | None = None,
) -> Tensor:
    """Return log p of each true next token of `batch`, `(B, T)`, FP32 or, from FP64 logits, FP64.

    `precision` is what the forward pass is computed in, as an autocast.
    """
    device = next(model.parameters()).device
    tokens = batch.to(device)
    with _evaluating(model, device), precision or nullcontext():
        logits_BTV = model(tokens[:, :-1])
    # widened as in training: half-precision logits would round the loss to 2**-8 of itself
    wide = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -losses.view(tokens.shape[0], -1)


def mean_loss(predicted: list[Tensor]) -> float:
    """Return the mean loss, nats a token, of batches of one size, added up in FP64."""
    # each mean on the device, one transfer for all
    return -float(torch.stack([batch.double().mean() for batch in predicted]).mean())


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
