"""One attention call as it was made: what the probe hands to every other implementation.

Leaves out how calls are caught (`intercept_sdpa`, `intercept_transformers`, `dual`).
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments

__all__ = ["Attend", "AttentionCall", "Catch", "Primary", "autocast_dtype", "valid_rows"]

_LOWEST = -1e4
"""Scores below cannot be attended beside any other: models hide keys by the lowest of a dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """The inputs of one call; q `(batch, heads, query_len, head_dim)`, k and v with kv_heads.

    `mask` is what `flash_attention` takes beside q, k and v, `valid`, bool `(batch, query_len)`,
    says which query rows are no padding (None: all). `dtype` is the one that the model's attention
    computes in where autocast makes it another than q's. `unsupported` names what the golden and
    the shadows cannot do, e.g. "dropout_p 0.1"; such a call is left alone and becomes a finding.
    """

    layer: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: MaskArguments = field(default_factory=MaskArguments)
    valid: Tensor | None = None
    dtype: torch.dtype | None = None
    unsupported: str = ""


class Primary(Protocol):
    """The model's own attention, with the call's mask and options."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        """Attend on q, k and v, shaped as the call's, and return out shaped as q."""
        ...


class Attend(Protocol):
    """What a caught call is handed to."""

    def __call__(self, call: AttentionCall, primary: Primary) -> Tensor:
        """Return the result of `call`, `(batch, heads, query_len, head_dim)`.

        Left alone, that is `primary(call.q, call.k, call.v)`.
        """
        ...


class Catch(Protocol):
    """A way to catch the attention calls of a model."""

    def __call__(self, model: nn.Module, attend: Attend) -> AbstractContextManager[None]:
        """Return a context in which each attention call of `model` goes through `attend`."""
        ...


def autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """Return the dtype that the caller's autocast makes attention compute in, None for their own.

    Autocast leaves FP64 alone.
    """
    kind, own = q.device.type, {q.dtype, k.dtype, v.dtype}
    if not torch.is_autocast_enabled(kind) or torch.float64 in own:
        return None
    dtype = torch.get_autocast_dtype(kind)
    return None if own == {dtype} else dtype


def valid_rows(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return which query rows are no padding, bool `(batch, query_len)`; None if all may be.

    Padding is told from the mask of a self-attention: a key that no query of its sequence may
    attend. `attn_mask` is bool, true where a key may be attended, or added to the scores, and
    broadcasts to `(batch, heads, query_len, key_len)`. Waits for nothing.
    """
    if attn_mask is None or q.shape[2] != k.shape[2] or attn_mask.dim() < 2:
        return None
    visible = attn_mask if attn_mask.dtype == torch.bool else attn_mask > _LOWEST
    attended = visible.reshape((1,) * (4 - visible.dim()) + tuple(visible.shape))
    attended = attended.any(dim=2).any(dim=1)  # (batch or 1, key_len or 1)
    return attended.expand(q.shape[0], q.shape[2])
