"""What a model's attention really computed, recorded and recomputed apart from the project.

The calls are recorded in an unwatched run, by putting a function of our own in place of
transformers' own attention functions and of SDPA. The reference is the textbook formula in FP64,
with autograd's gradients: nothing of `attention_kernels` or `stability` is imported here.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

__all__ = ["Recorded", "recording"]

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


@dataclass(slots=True)
class Recorded:
    """One call of attention, as the model made it."""

    layer: str
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    """What is added to the scores; -inf, or the lowest number, hides a key."""
    trained: Tensor | None
    """What of it is trained, as the model gave it."""
    scale: float
    softcap: float | None
    sinks: Tensor | None
    results: dict[str, Tensor] = field(default_factory=dict)
    """out, and the gradients once a backward pass has been made."""
    dout: Tensor | None = None

    def relative_errors(self) -> dict[str, float]:
        """Return |x - FP64's x| / |FP64's x| of out, and of each gradient that arrived."""
        given = (self.q, self.k, self.v, self.trained, self.sinks)
        leaves = [None if x is None else x.detach().double().requires_grad_() for x in given]
        out = self._attend(*leaves)
        right = {"out": out.detach()}
        if self.dout is not None:
            leaves = {n: x for n, x in zip(GRADIENTS, leaves, strict=True) if x is not None}
            grads = torch.autograd.grad(out, list(leaves.values()), self.dout.double())
            right |= dict(zip(leaves, grads, strict=True))
        return {
            what: float((x.double() - right[what]).norm() / right[what].norm())
            for what, x in self.results.items()
        }

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, trained: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias
        if trained is not None:
            scores = scores + trained
        if sinks is not None:
            sinks = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1)[..., : k.shape[2]]
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@contextmanager
def recording(model: nn.Module) -> Iterator[list[Recorded]]:
    """Inside, each attention call of `model` in training is recorded, in the order of the calls."""
    calls: list[Recorded] = []
    recorder = _Recorder(model, calls)
    with ExitStack() as stack:
        for module in {sys.modules[type(m).__module__] for m in model.modules()}:
            if hasattr(module, "eager_attention_forward"):
                own = module.eager_attention_forward
                put = recorder.of_transformers(own)
                stack.enter_context(mock.patch.object(module, "eager_attention_forward", put))
        functions = AttentionInterface._global_mapping
        put = recorder.of_transformers(functions["sdpa"])
        stack.enter_context(mock.patch.dict(functions, {"sdpa": put}))
        put = recorder.of_sdpa(F.scaled_dot_product_attention)
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", put))
        yield calls


class _Recorder:
    def __init__(self, model: nn.Module, calls: list[Recorded]) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._calls = calls
        self._is_inside = False
        self._running: list[nn.Module] = []
        for module in model.modules():
            module.register_forward_pre_hook(lambda m, _: self._running.append(m))
            module.register_forward_hook(lambda *_: self._running.pop() and None)

    def of_transformers(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an attention function of transformers that is recorded."""

        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            **options: Any,
        ) -> Any:
            attention_mask, trained = _alias(attention_mask)
            if options.get("position_bias") is not None:
                options["position_bias"], trained = _alias(options["position_bias"])
            self._is_inside = True
            try:
                out, weights = function(module, query, key, value, attention_mask, **options)
            finally:
                self._is_inside = False
            is_sdpa = "sdpa" in function.__name__
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            if not is_sdpa or attention_mask is not None or query.shape[2] == 1:
                causal = False
            position_bias = options.get("position_bias")
            is_mask_trained = trained is not None and trained is attention_mask
            bias = None if is_mask_trained else _bias(attention_mask, causal, query, key)
            if position_bias is not None and trained is None:
                bias = position_bias.detach().double() + (0 if bias is None else bias)
            call = Recorded(
                layer=self._names[module],
                q=query,
                k=key,
                v=value,
                bias=bias,
                trained=trained,
                scale=options.get("scaling") or query.shape[-1] ** -0.5,
                softcap=options.get("softcap"),
                sinks=getattr(module, "sinks", None),
            )
            self._keep(call, out, turned=True)
            return out, weights

        return attend

    def of_sdpa(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return SDPA, which is recorded where no function of transformers calls it."""

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            **options: Any,
        ) -> Tensor:
            given = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, **options}
            out = function(q, k, v, attn_mask, **given)
            if not self._is_inside:
                call = Recorded(
                    layer=self._names[self._running[-1]],
                    q=q,
                    k=k,
                    v=v,
                    bias=_bias(attn_mask, is_causal, q, k),
                    trained=None,
                    scale=scale or q.shape[-1] ** -0.5,
                    softcap=None,
                    sinks=None,
                )
                self._keep(call, out)
            return out

        return attend

    def _keep(self, call: Recorded, out: Tensor, *, turned: bool = False) -> None:
        earlier = sum(one.layer.partition("#")[0] == call.layer for one in self._calls)
        call.layer += f"#{earlier}" if earlier else ""
        call.results["out"] = out.detach().transpose(1, 2 if turned else 1).clone()
        self._calls.append(call)
        if not out.requires_grad:
            return

        def keep_dout(grad: Tensor) -> None:
            call.dout = grad.transpose(1, 2 if turned else 1).clone()

        out.register_hook(keep_dout)
        given = (call.q, call.k, call.v, call.trained, call.sinks)
        for name, x in zip(GRADIENTS, given, strict=True):
            if x is None or not x.requires_grad:
                continue

            def keep(grad: Tensor, name: str = name) -> None:
                call.results[name] = grad.clone()

            x.register_hook(keep)


def _alias(x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return a view of a tensor, twice if it is trained: the layers of a model may share it."""
    if x is None or not x.requires_grad:
        return x, None
    alias = x.view_as(x)
    return alias, alias


def _bias(mask: Tensor | None, causal: bool, q: Tensor, k: Tensor) -> Tensor | None:
    if mask is not None and mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    if mask is not None:
        return mask.detach().double()
    if not causal:
        return None
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)
