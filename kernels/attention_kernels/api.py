"""What every attention implementation is: a callable on q, k, v.

Leaves out how any of them computes. Shapes follow `scaled_dot_product_attention`.

The attention calls that users make: check the arguments, resolve names, call.

Leaves out every computation (`golden`, `baseline`, `operators`) and what a mask means (`masks`).
"""

import importlib.util
import math
from typing import Literal, NamedTuple, Protocol, TypedDict, Unpack, overload

import torch
from torch import Tensor

from attention_kernels.checks import (
    check_engine,
    check_mask,
    check_numerics,
    check_packable,
    check_tensors,
)
from attention_kernels.masks import Mask
from attention_kernels.numerics import BaselineNumerics, FlashNumerics
from attention_kernels.operators import (
    Call,
    attend_by_definition,
    constant_to_the_compiler,
    flash_forward,
    plan_to_text,
    reference_forward,
)
from attention_kernels.profiles import BASELINE_PROFILES, PROFILES

__all__ = [
    "MaskArguments",
    "baseline_attention",
    "flash_attention",
    "golden_attention",
    "read_mask",
    "resolve_engine",
]


class AttentionOutput(NamedTuple):
    """What attention returns when the log-sum-exp is asked for.

    `out` is `(batch, heads, query_len, head_dim)` in q's dtype; `lse` is
    `(batch, heads, query_len)`, natural log, FP32 or FP64.
    """

    out: Tensor
    lse: Tensor


class AttentionFn(Protocol):
    """A differentiable attention: q `(batch, heads, query_len, head_dim)`, k and v
    `(batch, kv_heads, key_len, head_dim)`, out like q. `scale=None` means 1/sqrt(head_dim).
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        """Attend and return `out`, shaped and typed as q."""
        ...


Engine = Literal["auto", "twin", "triton"]


class MaskArguments(TypedDict, total=False):
    """What every attention takes beside q, k and v; all of it is optional.

    A query stands at the key that is as far from the last key as it is from the last query
    (bottom-right). `causal`: it attends keys up to there. `scale`: of q k^T, None is
    1/sqrt(head_dim). `window` (left, right): so many keys before and after, None is no bound.
    `softcap`: scores become softcap * tanh(score / softcap). `key_padding`, bool
    `(batch, key_len)`: true where a key may be attended. `attn_mask`, broadcastable to
    `(batch, heads, query_len, key_len)`: bool, true where it may be attended, or floating, added to
    the scores; it gets no gradient. `alibi_slopes`, `(heads,)` or `(batch, heads)`: subtract
    slope * distance. `cu_seqlens_q`, `cu_seqlens_k`, int32: where each packed sequence starts and,
    last, how many tokens there are; then q is `(total_tokens, heads, head_dim)`, k and v likewise.
    `dropout_p` must be 0.
    """

    causal: bool
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float
    key_padding: Tensor | None
    attn_mask: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    dropout_p: float


# A constant to torch.compile, which would otherwise trace the search for Triton.
@constant_to_the_compiler
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
    numerics: FlashNumerics = ...,
    engine: Engine = ...,
    return_lse: Literal[False] = ...,
    **mask: Unpack[MaskArguments],
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numerics: FlashNumerics = ...,
    engine: Engine = ...,
    return_lse: Literal[True],
    **mask: Unpack[MaskArguments],
) -> AttentionOutput: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numerics: FlashNumerics = PROFILES["fa2"],
    engine: Engine = "auto",
    return_lse: bool = False,
    **mask: Unpack[MaskArguments],
) -> Tensor | AttentionOutput:
    """Attend by the flash recurrence at the given numerics; differentiable once in q, k and v.

    q is `(batch, heads, query_len, head_dim)`, k and v `(batch, kv_heads, key_len, head_dim)`;
    heads is a multiple of kv_heads, head_dim is 16 to 256, the dtype is FP64, FP32, BF16 or FP16,
    any strides. Returns out, shaped and typed as q; with `return_lse` also the natural-log
    log-sum-exp of the scores, `(batch, heads, query_len)` (packed: `(heads, total_tokens)`), FP32
    or FP64, which carries no gradient.

    `mask` is `MaskArguments`: causal, scale, window, softcap, key_padding, attn_mask, alibi_slopes,
    cu_seqlens_q, cu_seqlens_k. A row that attends nothing gives 0, lse -inf and zero gradients.
    `numerics` says all that decides the bits; the caller's autocast and matmul precision do not.
    `engine` is resolved by `resolve_engine`. ValueError for anything that doesn't fit.
    """
    where = "flash_attention"
    check_tensors(where, q, k, v)
    check_mask(where, q, k, mask)
    check_numerics(where, numerics, FlashNumerics, "PROFILES")
    packed = q.dim() == 3
    if packed:
        check_packable(where, numerics)
    plan = plan_to_text(resolve_engine(engine, q.device), numerics.text, q.dtype)
    out, lse, _ = flash_forward(*_operands(q, k, v), *_call(q, mask, plan))
    if packed:
        out, lse = _unpacked(out), lse.squeeze(0)
    return AttentionOutput(out, lse.detach()) if return_lse else out


@overload
def baseline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numerics: BaselineNumerics = ...,
    return_lse: Literal[False] = ...,
    **mask: Unpack[MaskArguments],
) -> Tensor: ...


@overload
def baseline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numerics: BaselineNumerics = ...,
    return_lse: Literal[True],
    **mask: Unpack[MaskArguments],
) -> AttentionOutput: ...


def baseline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numerics: BaselineNumerics = BASELINE_PROFILES["plain"],
    return_lse: bool = False,
    **mask: Unpack[MaskArguments],
) -> Tensor | AttentionOutput:
    """Attend with the whole score matrix in memory; arguments and result as `flash_attention`."""
    check_numerics("baseline_attention", numerics, BaselineNumerics, "BASELINE_PROFILES")
    return _by_definition("baseline_attention", q, k, v, mask, "baseline", numerics, return_lse)


@overload
def golden_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **mask: Unpack[MaskArguments],
) -> Tensor: ...


@overload
def golden_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **mask: Unpack[MaskArguments],
) -> AttentionOutput: ...


def golden_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    **mask: Unpack[MaskArguments],
) -> Tensor | AttentionOutput:
    """Attend in FP64 and return out, and the LSE, in FP64; arguments as `flash_attention`.

    Differentiable; autograd hands the gradients over in the dtype of q, k and v, so pass FP64
    copies to keep them whole. Memory grows with length, not with its square.
    """
    return _by_definition("golden_attention", q, k, v, mask, "golden", None, return_lse)


def _by_definition(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskArguments,
    engine: str,
    numerics: BaselineNumerics | None,
    return_lse: bool,
) -> Tensor | AttentionOutput:
    check_tensors(function, q, k, v)
    check_mask(function, q, k, mask)
    call = _call(
        q, mask, plan_to_text(engine, None if numerics is None else numerics.text, q.dtype)
    )
    lse = None
    if torch.compiler.is_compiling():
        if return_lse:
            raise ValueError(f"{function}: return_lse must be False inside of torch.compile")
        out = reference_forward(*_operands(q, k, v), *call)
    else:
        out, lse = attend_by_definition(*_operands(q, k, v), call, return_lse)
    if q.dim() == 3:
        out, lse = _unpacked(out), None if lse is None else lse.squeeze(0)
    return out if lse is None else AttentionOutput(out, lse)


def _operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with a batch axis; packed sequences are a batch of one."""
    if q.dim() == 4:
        return q, k, v
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return q, k, v


def _unpacked(out: Tensor) -> Tensor:
    return out.squeeze(0).transpose(0, 1)


def read_mask(q: Tensor, k: Tensor, arguments: MaskArguments) -> tuple[Mask, float]:
    """Return the mask and the scale that `arguments` mean for q and k, `(batch, heads, ...)`.

    For measures that form the scores by themselves. ValueError as `flash_attention`.
    """
    check_mask("read_mask", q, k, arguments)
    call = _call(q, arguments, "")
    return call.mask(), call.scale


def _call(q: Tensor, mask: MaskArguments, plan: str) -> Call:
    """Return what an operator takes beside q, k and v, given arguments that are checked."""
    scale = mask.get("scale")
    attn_mask, slopes = mask.get("attn_mask"), mask.get("alibi_slopes")
    if attn_mask is not None:
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    is_bias = attn_mask is not None and attn_mask.is_floating_point()
    if slopes is not None:
        slopes = slopes.detach().float().reshape(-1, slopes.shape[-1])
    left, right = mask.get("window") or (None, None)
    return Call(
        key_padding=mask.get("key_padding"),
        visible=None if is_bias else attn_mask,
        bias=attn_mask if is_bias else None,
        alibi_slopes=slopes,
        cu_seqlens_q=mask.get("cu_seqlens_q"),
        cu_seqlens_k=mask.get("cu_seqlens_k"),
        causal=bool(mask.get("causal", False)),
        left=left,
        right=right,
        softcap=float(mask.get("softcap", 0.0)),
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        plan=plan,
    )
