"""One attention call as it was made: what the probe hands to every other implementation.

Leaves out how calls are caught (`intercept_sdpa`, `intercept_transformers`, `dual`).

A call that the probe has caught and not yet compared: its tensors, and what others made of it.

Leaves out who fills it and what is compared (`probe`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from attention_kernels import MaskArguments

__all__ = ["Attend", "AttentionCall", "Catch", "Pending", "Primary", "autocast_dtype", "valid_rows"]

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


@dataclass(kw_only=True, slots=True)
class Pending:
    """One layer's call between its forward and its backward.

    The tensors of `call` are detached, in the dtype that the primary computes in. They share memory
    with the run's own, which the run's backward keeps as well; `was_overwritten` tells if that
    changed.
    """

    call: AttentionCall
    primary: Primary
    out: Tensor
    lse: Tensor | None
    seen: bool = False
    shadows: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Results by name of the shadow, then by what they are."""
    golden: dict[str, Tensor] = field(default_factory=dict)
    _watched: list[tuple[Tensor, int]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        primary: Primary,
        qkv: Sequence[Tensor],
        out: Tensor,
        lse: Tensor | None,
    ) -> "Pending":
        """Return `call`, made on `qkv`, with its own result, to be compared later."""
        own = [x.detach() for x in (*qkv, out)]
        q, k, v = (x.to(call.dtype or x.dtype) for x in own[:3])
        return cls(
            call=replace(call, q=q, k=k, v=v),
            primary=primary,
            out=own[3],
            lse=None if lse is None else lse.detach(),
            _watched=[(x, x._version) for x in own],
        )

    @property
    def layer(self) -> str:
        """The name of the layer."""
        return self.call.layer

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs."""
        return self.call.q, self.call.k, self.call.v

    @property
    def valid(self) -> Tensor | None:
        """Which rows of one head are no padding, `(batch, 1, length)`; None if all are."""
        return None if self.call.valid is None else self.call.valid[:, None, :]

    def was_overwritten(self) -> bool:
        """Whether the run has written into one of the tensors since."""
        return any(x._version != version for x, version in self._watched)

    def forget_forward(self) -> None:
        """Drop all but the gradients of the others, which wait for the run's own."""
        nothing = self.out.new_empty(0)
        self.call = replace(self.call, q=nothing, k=nothing, v=nothing)
        self.out, self.lse = nothing, None
        self._watched.clear()
        self.forget("out")
        self.forget("lse")

    def forget(self, what: str) -> None:
        """Drop a result that has been compared."""
        for results in (*self.shadows.values(), self.golden):
            results.pop(what, None)
