"""Trains a decoder in Lightning: next-token loss, the optimizer, and the learning-rate schedule.

Leaves out which optimizer a name stands for (`optimizers`), and everything that is recorded
meanwhile: callbacks do that.
"""

import copy
import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stability.config.schema import OptimizerConfig
from stability.model.gradient_clipping import clip_by_norm
from stability.model.optimizers import build_optimizer, with_settings_of

__all__ = ["LanguageModel", "learning_rate_factor", "next_token_loss"]

_FINAL_FACTOR = 0.1


def learning_rate_factor(step: int, warmup_steps: int, steps: int) -> float:
    """Return the share of the peak learning rate at update `step`, counted from 0.

    Linear to 1 at the `warmup_steps`-th update, then a cosine to a tenth at `steps`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return _FINAL_FACTOR + (1 - _FINAL_FACTOR) * 0.5 * (1 + math.cos(math.pi * progress))


def next_token_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of each next token of `batch`, in nats, FP32 or FP64.

    `batch` is int64 `(batch, context + 1)`, `logits` are the model's for all but the last token.
    """
    # half-precision logits would put their own rounding, 2**-8 at most, into the loss
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), batch[:, 1:].flatten())


class LanguageModel(LightningModule):
    """Trains `model` on blocks of tokens `(batch, context + 1)`, int64, for `steps` updates."""

    def __init__(self, model: nn.Module, optimizer: OptimizerConfig, steps: int) -> None:
        super().__init__()
        self.model = model
        self._optimizer = optimizer
        self._steps = steps
        self._taken_over: dict[str, Any] | None = None

    def call_through(self, called: Any) -> None:
        """Call `called` for the model, which a wrapper may hold that adds up gradients over ranks.

        It is no part of this module, whose names stay as they are.
        """
        vars(self)["_called"] = called

    def take_over(self, optimizer_state: dict[str, Any] | None) -> None:
        """Begin with this state of an optimizer, if it is one of this module's own kind."""
        self._taken_over = optimizer_state

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of each next token, in nats, FP32 or FP64."""
        called = vars(self).get("_called", self.model)
        loss = next_token_loss(called(batch[:, :-1]), batch)
        # the loggers get it from recorder.trainer_door, in time for the step's checkpoint
        self.log("train/loss", loss, prog_bar=True, logger=False)
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by a norm that no order of the gradients, and so no layout, changes."""
        if not gradient_clip_val or gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        groups = optimizer.param_groups
        clip_by_norm((p for group in groups for p in group["params"]), gradient_clip_val)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer, and its schedule a step at a time."""
        chosen = self._optimizer
        optimizer = build_optimizer(self.model, chosen)
        self._fill(optimizer)
        schedule = LambdaLR(optimizer, self._factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def _fill(self, optimizer: Optimizer) -> None:
        """Give `optimizer` the state that was taken over; none, if that is of another kind."""
        if self._taken_over is None:
            return
        saved = copy.deepcopy(
            self._taken_over
        )  # the optimizer steps in the tensors that it is given
        try:
            state = with_settings_of(saved, optimizer, self._factor(0))
        except ValueError:
            return
        optimizer.load_state_dict(state)

    def settle(self, checkpoint: dict[str, Any]) -> None:
        """Put this module's own optimizer settings and schedule into another run's checkpoint.

        A restored optimizer takes its settings from the checkpoint and not from its constructor: a
        fork with another learning rate would go on with the old one. ValueError if the checkpoint
        holds the state of another optimizer.
        """
        configured = self.configure_optimizers()
        optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        for saved in checkpoint["lr_schedulers"]:
            factor = self._factor(saved["last_epoch"])
            saved["base_lrs"] = list(schedule.base_lrs)
            saved["_last_lr"] = [base * factor for base in schedule.base_lrs]
            checkpoint["optimizer_states"] = [
                with_settings_of(state, optimizer, factor)
                for state in checkpoint["optimizer_states"]
            ]

    def _factor(self, step: int) -> float:
        return learning_rate_factor(step, self._optimizer.warmup_steps, self._steps)
