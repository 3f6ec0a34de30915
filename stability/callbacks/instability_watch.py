"""Watches a run for signs of instability: gradients, second moments, output logits, loss spikes.

Logs `watch/...` at due steps, on weights after as many updates as the step says, like the loss. A
value that crosses a published threshold also becomes an event of kind alert, once for each
crossing. The watch reads gradients, optimizer state and logits, writes to none of them, hooks no
backward pass, and fetches all of a step's values from the device at once. Leaves out the arithmetic
and the thresholds (`metrics.instability`) and what happens inside attention (`probe`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stability.callbacks.each_update import UpdateCallback
from stability.metrics.instability import (
    LOSS_SPIKE_DEVIATIONS,
    LossSpikes,
    count_nonfinite,
    crossings,
    gradient_norm,
    log_z,
    rms_ratio,
)
from stability.model.layouts import whole
from stability.probe.executed import unwitnessed
from stability.records.metric_names import watch_name
from stability.tracking.loggers import alert_event, emit

__all__ = ["InstabilityWatch"]


class InstabilityWatch(UpdateCallback):
    """Log the values below at every `every`-th step, and alerts as they arise.

    `watch/grad_norm` and `watch/nonfinite_gradients`: of the whole step's gradients, before
    clipping. `watch/rms/<parameter>` and `watch/rms_max`: RMS_t after the update, with the
    gradients as they were clipped; absent for optimizers without Adam's `exp_avg_sq`.
    `watch/log_z`: of the logits that `model` returns, as a tensor or as `.logits`, in the step's
    last micro-batch. `watch/loss_spike`: 1 if the loss of any step since the last due one stood
    out, else 0; every step's loss counts, the mean over its micro-batches.

    `model` is the module that returns the logits, by default `pl_module.model` if there is one and
    else the LightningModule itself. Sparse gradients are left out. ValueError for `every` below 1,
    and at the start of training for more than one optimizer.
    """

    def __init__(self, every: int, model: nn.Module | None = None) -> None:
        if every < 1:
            raise ValueError(
                f"InstabilityWatch: every must be >= 1, got {every}; leave the watch out"
            )
        self._every = every
        self._model = model
        self._spikes = LossSpikes(LOSS_SPIKE_DEVIATIONS)
        self._previous: dict[str, float] = {}
        self._losses: list[Tensor] = []  # one a step, 0-d, until the next due step
        self._loss: Tensor | None = None
        self._log_z: list[Tensor] = []  # one a micro-batch of a due step
        self._measured: dict[str, Tensor] = {}
        self._hook: RemovableHandle | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a run with several optimizers: one set of names could not tell them apart."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                "InstabilityWatch: the module must have one optimizer, got "
                f"{len(trainer.optimizers)}; leave the watch out"
            )

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Reset the step's loss; hook the model's output if the step is due."""
        self._loss, self._log_z = None, []
        if self._is_due(step):
            watched = self._watched_module(trainer.lightning_module)
            self._hook = watched.register_forward_hook(self._measure_logits)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Measure the step's gradients: all micro-batches are in, nothing is clipped."""
        if not self._is_due(trainer.global_step):
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        dense = [g for g in gradients if g is not None and g.layout == torch.strided]
        if dense:
            # one at a time: of a gradient over ranks each needs the whole for a moment
            parts = [(gradient_norm([x]), count_nonfinite([x])) for x in map(whole, dense)]
            norms, counts = zip(*parts, strict=True)
            self._measured[watch_name("grad_norm")] = gradient_norm(norms)
            self._measured[watch_name("nonfinite_gradients")] = torch.stack(counts).sum()

    def after_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Add a micro-batch's loss, which Lightning has divided by their number."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if isinstance(loss, Tensor):
            loss64 = loss.detach().double()
            self._loss = loss64 if self._loss is None else self._loss + loss64

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Remember the step's loss; at a due step, log everything."""
        self._remove_hook()
        if self._loss is not None:
            self._losses.append(_over_ranks(trainer, self._loss))
        if self._is_due(step):
            self._measure_second_moments(trainer.lightning_module, trainer.optimizers[0])
            self._log(trainer, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the hook where training stops between micro-batches."""
        self._remove_hook()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove the hook."""
        self._remove_hook()

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered from step to step."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        return {
            "losses": losses,
            "previous": dict(self._previous),
            "spikes": self._spikes.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue as the run that wrote the checkpoint would have."""
        self._losses = [torch.tensor(loss, dtype=torch.float64) for loss in state_dict["losses"]]
        self._previous = dict(state_dict["previous"])
        self._spikes.load_state_dict(state_dict["spikes"])

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0

    def _watched_module(self, pl_module: LightningModule) -> nn.Module:
        inner = getattr(pl_module, "model", None) if self._model is None else self._model
        return inner if isinstance(inner, nn.Module) else pl_module

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @torch.no_grad()
    def _measure_logits(self, module: nn.Module, inputs: Any, output: Any) -> None:
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.dim() >= 2 and logits.is_floating_point():
            with unwitnessed():
                self._log_z.append(log_z(logits).double())

    def _measure_second_moments(self, pl_module: LightningModule, optimizer: Optimizer) -> None:
        names = _parameter_names(pl_module, self._watched_module(pl_module))
        ratios = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                ratio = _rms_ratio(parameter, optimizer.state.get(parameter, {}), group)
                if ratio is not None:
                    ratios[watch_name(names[parameter], layer="rms")] = ratio
        if ratios:
            self._measured.update(ratios)
            self._measured[watch_name("rms_max")] = torch.stack(list(ratios.values())).amax()

    def _log(self, trainer: Trainer, step: int) -> None:
        if self._log_z:
            of_batch = torch.stack(self._log_z).mean()
            self._measured[watch_name("log_z")] = _over_ranks(trainer, of_batch)
        names, gathered = list(self._measured), [*self._measured.values(), *self._losses]
        watched_losses = len(self._losses)
        self._measured, self._losses = {}, []
        if not gathered:
            return
        device = gathered[0].device
        values = torch.stack([value.to(device) for value in gathered]).tolist()
        metrics = dict(zip(names, values[: len(names)], strict=True))
        if watched_losses:
            spikes = [self._spikes.update(loss) for loss in values[len(names) :]]
            metrics[watch_name("loss_spike")] = float(any(spikes))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
        for crossing in crossings(metrics, self._previous):
            emit(trainer.loggers, alert_event(crossing, step))
        self._previous = {**self._previous, **metrics}


def _over_ranks(trainer: Trainer, of_samples: Tensor) -> Tensor:
    """Return the mean of what each rank has found on its own samples."""
    return trainer.strategy.reduce(of_samples, reduce_op="mean")


def _rms_ratio(
    parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> Tensor | None:
    """Return RMS_t of a parameter, None without a dense gradient or Adam's second moment."""
    grad, second_moment = parameter.grad, state.get("exp_avg_sq")
    if grad is None or grad.layout != torch.strided or second_moment is None:
        return None
    if not {"betas", "eps"} <= group.keys() or "step" not in state:
        return None
    return rms_ratio(
        whole(grad),
        whole(second_moment),
        step=state["step"],
        beta2=group["betas"][1],
        eps=group["eps"],
    )


def _parameter_names(pl_module: LightningModule, model: nn.Module) -> dict[nn.Parameter, str]:
    """Return each parameter's name in `model`, as snapshots have it, if they are all in there."""
    whole, inner = (
        # torch.compile puts its own prefix before the names of a module that it wraps
        {parameter: name.replace("_orig_mod.", "") for name, parameter in module.named_parameters()}
        for module in (pl_module, model)
    )
    return inner if inner.keys() >= whole.keys() else whole
