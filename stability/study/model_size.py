"""How large a model is that no formula describes: its weights, and what its backward keeps.

It is built on the device "meta", where tensors have shapes and no memory, and called there on a
batch. Counted are the weights, each once, and the distinct tensors that autograd saves in a forward
pass in FP32, less the weights, with q, k, v and out of each attention. A user's own builder is
imported in a process of its own; where it can't work without memory, nothing is known of its size.
Leaves out what an attention keeps beyond that, and the formula of our GPT (`memory_estimate`).
"""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stability.config.convert import from_dict, to_dict
from stability.config.model import BUILDERS, HUGGINGFACE, ModelConfig
from stability.metrics.noise_moved import vector_names
from stability.model.decoder import blocks_of, build_decoder
from stability.study.fresh_process import call_alone

__all__ = ["ModelSize", "size_of"]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model holds; all 0 where that can't be told."""

    parameters: int
    block_matrices: int
    """Weights in the linear layers of its blocks."""
    kept: int
    """Bytes that the backward of a batch needs, in FP32."""
    vectors: int = 0
    """Weights in those vectors that a sketch keeps."""


def size_of(config: ModelConfig, batch_size: int) -> ModelSize:
    """Return the size of a model, and of a batch of whole contexts in it.

    ValueError as `build_decoder` of one that is not the user's own.
    """
    return _cached(json.dumps(to_dict(config), sort_keys=True), batch_size)


@lru_cache(maxsize=64)
def _cached(config: str, batch_size: int) -> ModelSize:
    shape = from_dict(ModelConfig, json.loads(config), "model")
    is_own = shape.builder not in (*BUILDERS, HUGGINGFACE)
    return call_alone(_try, shape, batch_size) if is_own else _measured(shape, batch_size)


def _try(config: ModelConfig, batch_size: int) -> ModelSize:
    try:
        return _measured(config, batch_size)
    except Exception:  # code that needs real tensors; it is tried on those before it trains
        return ModelSize(0, 0, 0)


def _measured(config: ModelConfig, batch_size: int) -> ModelSize:
    with torch.device("meta"):
        model = build_decoder(config.drawn(), [_attend] * config.depth)
        tokens = torch.zeros(batch_size, config.context, dtype=torch.int64)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            saved[storage] = tensor  # alive, so that no storage's address is given twice
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.enable_grad():
        model(tokens)
    linear = {
        m.weight
        for block in blocks_of(model, config.depth).values()
        for m in block.modules()
        if isinstance(m, nn.Linear)
    }
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        block_matrices=sum(weight.numel() for weight in linear),
        kept=sum(tensor.untyped_storage().nbytes() for tensor in saved.values()),
        vectors=sum(math.prod(shapes[name]) for name in vector_names(shapes)),
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    return _Attention.apply(q, k, v)  # type: ignore[return-value]


class _Attention(torch.autograd.Function):
    """An attention that keeps q, k, v and out, as every one has to."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
