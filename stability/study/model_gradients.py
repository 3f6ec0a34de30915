"""The gradient of a study's model on given weights and batch, under any attention.

It is isolated or as trained. A second model without weights of its own is called on detached
weights of the run's model. So neither the run's model nor its gradients, hooks, compiled forward or
attention is touched: there is nothing to put back. Leaves out what is measured of the gradients
(`probe.gradient_evidence`) and when (`callbacks.gradient_callback`).
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attention_kernels import Format
from attention_kernels.delayed_scaling import DelayedScales, OperandScales
from stability.config.precision import emulated_format, parse_precision
from stability.config.schema import ArmConfig, AttentionConfig, ModelConfig
from stability.intercept.replacement import Replacement
from stability.model.decoder import attentions_of, build_decoder
from stability.model.lightning_module import next_token_loss
from stability.model.module_precision import attention_in_default, in_module_precision
from stability.model.precision import EmulatedLinear, operand_dtype
from stability.probe.attention_registry import ResolvedAttention, resolve_attention
from stability.probe.double_precision import computing_in_double
from stability.probe.gradient_evidence import (
    Attention,
    AttentionRole,
    isolated_attention,
    isolated_golden,
    surrounding_dtype,
)
from stability.probe.isolation import isolated
from stability.probe.rounding_keys import RoundingKeys, keyed

__all__ = ["ModelGradients", "attention_rounding", "attentions_of_arm", "gradients_of_arm"]


def attention_rounding(precision: str) -> torch.dtype | Format:
    """Return what q, k and v are rounded to where they reach the attention of a run.

    By the default's precision, whatever single modules compute in.
    """
    return emulated_format(precision) or operand_dtype(parse_precision(precision).default)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGradients:
    """Gradients of a decoder of `config` that trains in `precision`.

    `candidate` and `baseline` hold an attention for each layer. In the layers that are `changed`
    the golden takes their place; the others attend as the baseline's in all three roles.
    """

    config: ModelConfig
    precision: str
    candidate: Sequence[Attention]
    baseline: Sequence[Attention]
    changed: Sequence[bool]
    keys: RoundingKeys | None = None
    """Those that linear layers draw by, where a recipe rounds them stochastically."""
    scales: DelayedScales | None = None
    """The run's, where a recipe has delayed ones: they are looked at, and see nothing. Without them
    a scale is that of the values at hand."""
    _shells: list[nn.Module] = field(default_factory=list)
    """The model of others without weights, once it is built: that draws them all."""

    def of(
        self,
        weights: Mapping[str, Tensor],
        batch: Tensor,
        role: AttentionRole,
        is_isolated: bool,
        scale: float = 1.0,
    ) -> dict[str, Tensor]:
        """Return the gradient of the loss by parameter, in the dtype that it is computed in.

        `weights` are the model's by name, `batch` is int64 `(batch, context + 1)`. `scale` is that
        of a loss scaler, which keeps FP16 from underflow; the result is divided by it. Weights,
        random state and autocast are left as they are found.
        """
        rounding = attention_rounding(self.precision)
        attentions = self._attentions(role, rounding if is_isolated else None, batch.device)
        trained_in = parse_precision(self.precision).over(self.config.layer_names)
        if not is_isolated:
            attentions = [
                attention_in_default(each, trained_in, batch.device) for each in attentions
            ]
        model = self._shell(attentions, batch.device)
        if is_isolated:
            dtype, rest, modules = surrounding_dtype(rounding), nullcontext(), nullcontext()
        else:
            dtype, rest = _weights_dtype(self.precision), _rest(self.precision, batch.device)
            key_of = (lambda number: ()) if self.keys is None else self.keys.of_module
            modules = in_module_precision(model, trained_in, batch.device, key_of, self._scales_of)
        leaves = {
            name: value.detach().to(dtype).requires_grad_() for name, value in weights.items()
        }
        is_others = dtype == torch.float64 and not self.config.is_ours
        # others' code may cast to FP32 where it computes in FP64
        in_double = computing_in_double(attentions_of(model)) if is_others else nullcontext()
        with isolated(batch.device), torch.enable_grad(), in_double:
            with rest, modules:
                logits = functional_call(model, leaves, (batch[:, :-1],))
                loss = next_token_loss(logits, batch) * scale
            found = torch.autograd.grad(loss, list(leaves.values()))
        return {name: x / scale for name, x in zip(leaves, found, strict=True)}

    def _scales_of(self, module: str) -> OperandScales | None:
        return self.scales.of(module, records=False) if self.scales is not None else None

    def _shell(self, attentions: Sequence[Attention], device: torch.device) -> nn.Module:
        """Return a model that attends so and has no weights of its own."""
        if self.config.is_ours:
            with torch.device("meta"):
                return build_decoder(self.config, attentions)
        if not self._shells:
            # its buffers are wanted, and no code of others' need know the device "meta"
            model = build_decoder(self.config.drawn(), attentions, may_ignore_attention=True)
            _drop_weights(model.to(device))
            self._shells.append(model)
        (model,) = self._shells
        for slot, attention in zip(attentions_of(model), attentions, strict=True):
            slot.function = attention
        return model

    def _attentions(
        self, role: AttentionRole, rounding: torch.dtype | Format | None, device: torch.device
    ) -> list[Attention]:
        chosen = self.candidate if role == "candidate" else self.baseline
        # by its config: to tell what a text names reads the metadata of every package, 5 ms
        golden = resolve_attention(AttentionConfig(implementation="golden"), device).function
        attentions = []
        for attention, changed in zip(chosen, self.changed, strict=True):
            exact = role == "golden" and changed
            if rounding is None:
                attentions.append(golden if exact else attention)
            elif exact:
                attentions.append(isolated_golden(rounding))
            else:
                attentions.append(isolated_attention(attention, rounding))
        return attentions


def gradients_of_arm(
    config: ArmConfig,
    device: torch.device,
    keys: RoundingKeys | None = None,
    scales: DelayedScales | None = None,
) -> ModelGradients | None:
    """Return the gradients of an arm that changes the attention, None of any other.

    The candidate is the arm's own attention and the baseline its first shadow, which in such an arm
    is the study's. None as well at 64-true, where the golden is no finer than what it would judge.
    Attentions that round stochastically draw by `keys`, as the run's own do, and without them the
    same at each call. `scales` are the run's delayed ones. ValueError as `resolve_attention`.
    """
    if config.precision == "64-true":
        return None
    return attentions_of_arm(config, device, keys, scales)


def attentions_of_arm(
    config: ArmConfig,
    device: torch.device,
    keys: RoundingKeys | None = None,
    scales: DelayedScales | None = None,
) -> ModelGradients | None:
    """Return what `gradients_of_arm` does, at any precision.

    At 64-true it gives the calls of each layer as the run makes them, but judges no gradient.
    """
    if config.probe.shadows_are != "baseline":
        return None
    changed = config.attention
    own = resolve_attention(config.probe.shadows[0], device)
    replacement = Replacement(
        candidate=resolve_attention(changed, device),
        layers=changed.layers,
        direction=changed.direction,
    )
    covered = [replacement.covers(name) for name in config.model.layer_names]
    candidate = replacement.mixed(own)

    def at(attention: ResolvedAttention, layer: int) -> Attention:
        return (keyed(attention, layer, keys) if keys else attention).function

    return ModelGradients(
        config=config.model,
        precision=config.precision,
        candidate=[at(candidate if covers else own, i) for i, covers in enumerate(covered)],
        baseline=[at(own, i) for i in range(len(covered))],
        changed=covered,
        keys=keys,
        scales=scales,
    )


def _drop_weights(model: nn.Module) -> None:
    """Put each parameter of `model` on the device "meta"; those that are shared stay so."""
    dropped = {id(p): nn.Parameter(p.detach().to("meta")) for p in model.parameters()}
    known = list(model.parameters())  # alive, so that no id is given twice
    for module in list(model.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = dropped[id(parameter)]
    del known


def _weights_dtype(precision: str) -> torch.dtype:
    if precision.endswith("-true"):  # which no module's own follows
        return operand_dtype(precision)
    return torch.float32


def _rest(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a run of `precision` calls its model."""
    format = emulated_format(precision)
    if format is not None:
        return EmulatedLinear(format)
    default = parse_precision(precision).default
    if default.endswith("-mixed"):
        return torch.autocast(device.type, dtype=operand_dtype(default))
    return nullcontext()
