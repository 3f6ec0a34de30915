"""The attention calls that users make: check the arguments, resolve names, call.

Leaves out every computation (`golden`, `baseline`, `autograd`).
"""

import importlib.util
import math
from typing import Literal, overload

import torch
from torch import Tensor

from attention_kernels import baseline, golden
from attention_kernels.autograd import FlashAttention
from attention_kernels.interface import AttentionOutput
from attention_kernels.numerics import BaselineNumerics, FlashNumerics
from attention_kernels.profiles import BASELINE_PROFILES, PROFILES
from attention_kernels.validation import check_engine, check_scale, check_tensors

__all__ = ["baseline_attention", "flash_attention", "golden_attention", "resolve_engine"]

Engine = Literal["auto", "twin", "triton"]


def resolve_engine(engine: Engine, device: torch.device | str) -> Literal["twin", "triton"]:
    """Return the engine that `engine` means on `device`: auto is Triton on CUDA, else the twin.

    ValueError for an unknown name, and when Triton is meant but not installed: another engine is
    never taken instead.
    """
    check_engine("resolve_engine", engine)
    if engine == "twin" or (engine == "auto" and torch.device(device).type != "cuda"):
        return "twin"
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"resolve_engine: engine must be one that is installed, got {engine!r} on {device} "
            "without Triton; install triton or pass engine='twin'"
        )
    return "triton"


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    numerics: FlashNumerics = ...,
    engine: Engine = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    numerics: FlashNumerics = ...,
    engine: Engine = ...,
    return_lse: Literal[True],
) -> AttentionOutput: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    numerics: FlashNumerics = PROFILES["fa2"],
    engine: Engine = "auto",
    return_lse: bool = False,
) -> Tensor | AttentionOutput:
    """Attend by the flash recurrence at the given numerics; differentiable once in q, k and v.

    q is `(batch, heads, query_len, head_dim)`, k and v `(batch, kv_heads, key_len, head_dim)`;
    heads is a multiple of kv_heads, head_dim is 16 to 256, the dtype is FP64, FP32, BF16 or FP16,
    any strides. Returns out, shaped and typed as q; with `return_lse` also the natural-log
    log-sum-exp of the scaled scores, `(batch, heads, query_len)`, FP32 or FP64, which carries no
    gradient.

    `causal` lets query i attend keys up to i + key_len - query_len (bottom-right); a row that
    attends nothing gives 0, lse -inf and zero gradients. `scale=None` is 1/sqrt(head_dim).
    `numerics` says all that decides the bits; the caller's autocast and matmul precision do not.
    `engine` is resolved by `resolve_engine`. ValueError for anything that doesn't fit.
    """
    check_tensors("flash_attention", q, k, v)
    out, lse = FlashAttention.apply(
        q,
        k,
        v,
        causal,
        _resolved_scale("flash_attention", scale, q),
        numerics.resolve(q.dtype),
        resolve_engine(engine, q.device),
    )
    return AttentionOutput(out, lse) if return_lse else out


def baseline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    numerics: BaselineNumerics = BASELINE_PROFILES["plain"],
) -> Tensor:
    """Attend with the whole score matrix in memory; arguments and result as `flash_attention`."""
    check_tensors("baseline_attention", q, k, v)
    scale = _resolved_scale("baseline_attention", scale, q)
    resolved = numerics.resolve(q.dtype)
    return baseline.attend(q, k, v, causal=causal, scale=scale, numerics=resolved)


def golden_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attend in FP64 and return out in FP64; arguments as `flash_attention`.

    Differentiable; autograd hands the gradients over in the dtype of q, k and v, so pass FP64
    copies to keep them whole. Memory grows with length, not with its square.
    """
    check_tensors("golden_attention", q, k, v)
    return golden.attend(
        q, k, v, causal=causal, scale=_resolved_scale("golden_attention", scale, q)
    )


def _resolved_scale(function: str, scale: float | None, q: Tensor) -> float:
    if scale is None:
        return 1.0 / math.sqrt(q.shape[-1])
    check_scale(function, scale)
    return float(scale)
