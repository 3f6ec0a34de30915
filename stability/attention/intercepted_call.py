"""One attention call as it was made: what the probe hands to every other implementation.

Leaves out how calls are caught (`intercept_sdpa`, `intercept_transformers`, `dual`).
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments

__all__ = ["AttentionCall", "Attend", "Catch", "Primary"]


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

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
