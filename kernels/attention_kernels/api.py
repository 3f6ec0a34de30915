"""The attention calls that users make: check the arguments, resolve names, call an operator.

Every call takes q, k and v shaped as in `scaled_dot_product_attention` and the same mask arguments
(`masks.MaskArguments`), whoever computes. Nothing is computed here: `operators` runs the engines
and makes them differentiable, `golden` and `baseline` define what is right.
"""

import importlib.util
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, Unpack, overload

import torch
from torch import Tensor

from attention_kernels.checks import (
    Engine,
    check_dropout,
    check_engine,
    check_mask,
    check_numerics,
    check_packable,
    check_rounding,
    check_tensors,
    check_transforms,
    require,
    scale_of,
)
from attention_kernels.masks import Mask, MaskArguments, mask_fields
from attention_kernels.numerics import BaselineNumerics, FlashNumerics
from attention_kernels.operators import (
    Call,
    attend_by_definition,
    constant_to_the_compiler,
    flash,
    plan_to_text,
    reference_forward,
)
from attention_kernels.profiles import BASELINE_PROFILES, PROFILES

__all__ = [
    "AttentionFn",
    "AttentionOutput",
    "Engine",
    "baseline_attention",
    "dropout_keep_mask",
    "flash_attention",
    "golden_attention",
    "resolve_engine",
]


class AttentionOutput(NamedTuple):
    """What attention returns when the log-sum-exp is asked for.

    `out` is `(batch, heads, query_len, head_dim of v)` in q's dtype; `lse` is
    `(batch, heads, query_len)`, natural log, FP32 or FP64.
    """

    out: Tensor
    lse: Tensor


class AttentionFn(Protocol):
    """A differentiable attention: q `(batch, heads, query_len, head_dim)`, k and v
    `(batch, kv_heads, key_len, head_dim)`, out like q, but of v's head_dim where that is another.
    `scale=None` means 1/sqrt(head_dim of q).
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        """Attend and return `out`, typed as q and shaped as q but for v's head_dim."""
        ...


# torch.compile takes the result as a constant; else it would trace the search for Triton.
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
    rounding_key: tuple[int, int, int, int] | None = ...,
    rounding_place: tuple[int, int, int] | None = ...,
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
    rounding_key: tuple[int, int, int, int] | None = ...,
    rounding_place: tuple[int, int, int] | None = ...,
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
    rounding_key: tuple[int, int, int, int] | None = None,
    rounding_place: tuple[int, int, int] | None = None,
    return_lse: bool = False,
    **mask: Unpack[MaskArguments],
) -> Tensor | AttentionOutput:
    """Attend by the flash recurrence at the given numerics; differentiable once in q, k and v.

    q is `(batch, heads, query_len, head_dim)`, k and v `(batch, kv_heads, key_len, head_dim)`;
    heads is a multiple of kv_heads, head_dim is 16 to 256, in v perhaps another one (multi-head
    latent attention), the dtype is FP64, FP32, BF16 or FP16, any strides. Returns out, typed as q
    and shaped as q but for v's head_dim; with `return_lse` also the natural-log log-sum-exp of the
    scores, `(batch, heads, query_len)` (packed: `(heads, total_tokens)`), FP32
    or FP64, which carries no gradient.

    `mask` is `MaskArguments`: causal, scale, window, softcap, key_padding, attn_mask, mask_mod,
    alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, dropout_p, dropout_seed, dropout_offset. A row
    that attends nothing gives 0, zero gradients, and for lse the sink, or -inf without one. The
    sinks get a gradient too. Under torch.vmap each slice is a call of its own, so all drop alike.
    `numerics` says all that decides the bits; the caller's autocast and matmul precision do not.
    `engine` is resolved by `resolve_engine`.

    `rounding_key`, (seed, step, layer, call), is what numerics that round stochastically draw by,
    beside their own seed and the place of each value: pass another one at each step, layer and call
    of a training, and the same where a call is made again. Without a key every call of the same
    numerics draws the same bits, whose error no mean over steps takes away. `rounding_place`,
    (first_batch, first_head, heads), says where q lies in the batch and the heads of a call that
    several ranks share, and how many query heads that has; their values then draw what they draw
    on one rank (`rounding_key`). ValueError for anything that doesn't fit.
    """
    where = "flash_attention"
    check_tensors(where, q, k, v)
    check_transforms(where, {"q": q, "k": k, "v": v, **mask}, tangents=False, batches=True)
    check_mask(where, q, k, mask)
    check_numerics(where, numerics, FlashNumerics, "PROFILES")
    packed = q.dim() == 3
    if packed:
        check_packable(where, numerics)
    plan = plan_to_text(resolve_engine(engine, q.device), numerics.text, q.dtype)
    rounding = check_rounding(where, rounding_key, rounding_place)
    call = _call(where, q, mask, plan, rounding)
    out, lse, _ = flash(*_operands(q, k, v), call)
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


def dropout_keep_mask(
    batch: int,
    heads: int,
    query_len: int,
    key_len: int,
    *,
    dropout_p: float,
    dropout_seed: int,
    dropout_offset: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return which weights an attention call keeps: bool `(batch, heads, query_len, key_len)`.

    It is what each of `flash_attention`, `baseline_attention` and `golden_attention` drops by with
    the same arguments. Of packed sequences number i has `[i, :, :its query_len, :its key_len]`.
    ValueError for sizes below 1, and for what those calls refuse.
    """
    function = "dropout_keep_mask"
    dropout: MaskArguments = {
        "dropout_p": dropout_p,
        "dropout_seed": dropout_seed,
        "dropout_offset": dropout_offset,
    }
    check_dropout(function, dropout)
    sizes = {"batch": batch, "heads": heads, "query_len": query_len, "key_len": key_len}
    for name, size in sizes.items():
        where = f"{function}: {name}"
        require(size >= 1, where, "at least 1", size, "give the sizes of the attention call")
    rows, keys, device = range(query_len), range(key_len), torch.device(device)
    kept = Mask(**mask_fields(dropout)).kept(rows, keys, batch, heads, device)
    full = (batch, heads, query_len, key_len)
    return torch.ones(full, dtype=torch.bool, device=device) if kept is None else kept


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
    tangents = engine == "golden" and not torch.compiler.is_compiling()
    given = {"q": q, "k": k, "v": v, **mask}
    check_transforms(function, given, tangents=tangents, batches=False)
    check_mask(function, q, k, mask)
    text = None if numerics is None else numerics.text
    call = _call(function, q, mask, plan_to_text(engine, text, q.dtype))
    lse = None
    # Outside of a compiled model autograd differentiates golden and baseline as they stand, so that
    # they need no backward of their own that could be wrong. Inside of one they are operators, so
    # that no compiler fuses or reorders their arithmetic.
    if torch.compiler.is_compiling():
        if return_lse:
            raise ValueError(f"{function}: return_lse must be False inside of torch.compile")
        out = reference_forward(*_operands(q, k, v), *call.for_operator())
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


def _call(
    function: str, q: Tensor, arguments: MaskArguments, plan: str, rounding: Sequence[int] = ()
) -> Call:
    """Return what an operator takes beside q, k and v, given arguments that are checked."""
    fields = mask_fields(arguments, q.shape[0], q.shape[1], function)
    left, right = fields.pop("window")
    fields |= {"left": left, "right": right, "rounding": rounding}
    return Call(**fields, scale=scale_of(q, arguments), plan=plan)
