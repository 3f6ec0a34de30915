"""PyTorch's FlexAttention: compiled on CUDA; on the CPU its eager form, which has no backward.

The eager form holds the whole score matrix. Compiled on the CPU it would have no backward either,
and would need a C++ compiler. With `fullgraph` a compilation that fails, or that is the ninth of
its kind, is an error; without it torch would silently run the eager form. A row that attends
nothing gives 0. Which arguments may be asked for is `registry`'s.

API: https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_kernels.masks import Mask

__all__ = ["attend", "status"]

Places = Callable[[Tensor, Tensor], Tensor]
"""From row and key to how far the key is ahead of where the row's query stands."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> Tensor:
    """Return out, shaped and typed as q; for gradients on the CPU PyTorch raises RuntimeError."""
    options = {
        "score_mod": _score_mod(q, k, mask),
        "block_mask": _block_mask(q, k, mask),
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if q.is_cuda:
        return _compiled()(q, k, v, **options)
    # optional dependency: flex_attention loads Triton where there is one
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.is_grad_enabled():
        # on the CPU it refuses tensors that merely could have gradients
        q, k, v = q.detach(), k.detach(), v.detach()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out = flex_attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _compiled() -> Callable[..., Any]:
    # optional dependency: flex_attention loads Triton where there is one
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _block_mask(q: Tensor, k: Tensor, mask: Mask) -> Any:
    """Return the blocks that hold something to attend, or None if nothing is hidden."""
    batch, heads, query_len, key_len = (*q.shape[:3], k.shape[2])
    left, right = mask.offsets()
    if mask.key_padding is None and mask.visible is None and mask.cu_seqlens_q is None:
        if left is None and right is None:
            return None
        return _positional_blocks(left, right, query_len, key_len, q.device)
    ahead, same = _places(q, k, mask)
    padding = mask.key_padding
    visible = mask.visible
    if visible is not None:
        visible = visible.expand(batch, heads, query_len, key_len)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = same(i, j)
        if right is not None:
            seen = seen & (ahead(i, j) <= right)
        if left is not None:
            seen = seen & (ahead(i, j) >= -left)
        if padding is not None:
            seen = seen & padding[b, j]
        if visible is not None:
            seen = seen & visible[b, h, i, j]
        return seen

    by_head = heads if visible is not None else None
    by_batch = batch if mask.cu_seqlens_q is None else None
    return _create(allowed, by_batch, by_head, query_len, key_len, q.device)


@functools.lru_cache(maxsize=8)
def _positional_blocks(
    left: int | None, right: int | None, query_len: int, key_len: int, device: torch.device
) -> Any:
    offset = key_len - query_len

    def allowed(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j >= 0
        if right is not None:
            seen = seen & (j - i - offset <= right)
        if left is not None:
            seen = seen & (j - i - offset >= -left)
        return seen

    return _create(allowed, None, None, query_len, key_len, device)


def _create(allowed: Any, *sizes: Any) -> Any:
    # optional dependency: flex_attention loads Triton where there is one
    from torch.nn.attention.flex_attention import create_block_mask

    *lengths, device = sizes
    return create_block_mask(allowed, *lengths, device=str(device))


def _score_mod(q: Tensor, k: Tensor, mask: Mask) -> Any:
    """Return what is done to a scaled score: softcap, then bias, then ALiBi; None if nothing."""
    softcap, bias, slopes = mask.softcap, mask.bias, mask.alibi_slopes
    if not softcap and bias is None and slopes is None:
        return None
    batch, heads, query_len, key_len = (*q.shape[:3], k.shape[2])
    if bias is not None:
        bias = bias.expand(batch, heads, query_len, key_len)
    ahead, _ = _places(q, k, mask)
    sequence = _sequence_of_row(q, mask)
    if slopes is not None:
        sequences = batch if mask.cu_seqlens_q is None else len(mask.cu_seqlens_q) - 1
        slopes = slopes.expand(sequences, heads)
        slopes = slopes.double() if q.dtype == torch.float64 else slopes.float()

    def modified(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[b, h, i, j]
        if slopes is not None:
            at = b if sequence is None else sequence[i]
            score = score - slopes[at, h] * ahead(i, j).abs()
        return score

    return modified


def _places(q: Tensor, k: Tensor, mask: Mask) -> tuple[Places, Places]:
    """Return how far a key is ahead of a row, and whether both are of one sequence."""
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        offset = k.shape[2] - q.shape[2]
        return (lambda i, j: j - i - offset), (lambda _i, j: j >= 0)
    starts_q, starts_k = mask.cu_seqlens_q.long(), mask.cu_seqlens_k.long()
    of_row, of_key = _sequence_of(starts_q, q.shape[2]), _sequence_of(starts_k, k.shape[2])
    # from the end of its sequence, where the last query stands at the last key
    row = torch.arange(q.shape[2], device=q.device) - starts_q[of_row + 1]
    key = torch.arange(k.shape[2], device=q.device) - starts_k[of_key + 1]
    return (lambda i, j: key[j] - row[i]), (lambda i, j: of_row[i] == of_key[j])


def _sequence_of_row(q: Tensor, mask: Mask) -> Tensor | None:
    if mask.cu_seqlens_q is None:
        return None
    return _sequence_of(mask.cu_seqlens_q.long(), q.shape[2])


def _sequence_of(starts: Tensor, tokens: int) -> Tensor:
    """Return the index of each token's sequence; empty sequences have no tokens."""
    return torch.searchsorted(starts, torch.arange(tokens, device=starts.device), right=True) - 1


def status(device: torch.device) -> tuple[str, bool, str]:
    """Return version, whether it runs on `device`, and why not or what it leaves out there."""
    if device.type == "cpu":
        return torch.__version__, True, "eager form on the CPU: forward only, not fused"
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.__version__, False, "no CUDA device"
    return torch.__version__, True, ""
