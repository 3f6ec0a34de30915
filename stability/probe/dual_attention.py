"""The attention of one layer of our GPT, which shows its calls to the probe.

Leaves out what the probe does with them (`probe`), and models that are not given their attention
(`intercept_sdpa`, `intercept_transformers`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from torch import Tensor

from attention_kernels import MaskArguments
from stability.probe.captured_call import AttentionCall, Primary
from stability.probe.probe import AttentionProbe, BindMask, WithLse
from stability.probe.registry import MaskedAttention, ResolvedAttention

__all__ = ["DualAttention", "as_shadows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DualAttention:
    """An `AttentionFn` that computes with the primary and lets the probe look."""

    layer: str
    primary: ResolvedAttention
    probe: AttentionProbe

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
        """Return the primary's result, untouched."""
        call = AttentionCall(layer=self.layer, q=q, k=k, v=v, mask=mask)
        return self.probe.attend(call, MaskedAttention(self.primary, mask))


def as_shadows(attentions: Sequence[ResolvedAttention]) -> dict[str, BindMask]:
    """Return attentions as a probe takes them, by name."""
    return {attention.name: partial(_bind, attention) for attention in attentions}


def _bind(attention: ResolvedAttention, call: AttentionCall, primary: Primary) -> WithLse:
    return MaskedAttention(attention, call.mask).with_lse
