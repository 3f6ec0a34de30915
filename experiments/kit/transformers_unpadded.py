"""A candidate as an attention implementation of transformers that un-pads, as FlashAttention-2's.

Valid tokens are packed, sequence after sequence, attended, and scattered back into zeros: no work
is spent on padding, and its rows of the output are 0. Attention function and mask function are
registered together: the second hands the padding on as it is, `(batch, length)`. Leaves out
decoding with a cache, dropout, and masks that are not causal (`transformers_candidate` takes them).
Source: transformers 5.23, `modeling_flash_attention_utils._flash_attention_forward`.

Shape suffixes: B batch, H heads, L length, D head_dim, T valid tokens of the batch.
"""

import itertools
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stability.probe.registry import ResolvedAttention, resolve_attention

__all__ = ["flash_attention_2", "register_unpadded"]


class _Unpadded:
    """An attention function of transformers that un-pads."""

    def __init__(self, candidate: str, packed: bool) -> None:
        self._candidate = candidate
        self._packed = packed
        # naming a candidate looks through all that is installed: milliseconds, once a device
        self._resolved: dict[torch.device, ResolvedAttention] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return (batch, length, heads, head_dim), and no weights."""
        if query.shape[2] != key.shape[2] or options.get("dropout"):
            raise ValueError(
                f"register_unpadded: attention of {type(module).__name__} must have as many queries"
                f" as keys and no dropout, got {query.shape[2]} and {key.shape[2]}, dropout "
                f"{options.get('dropout', 0.0)}; use register_transformers"
            )
        scale = options.get("scaling")
        if attention_mask is None:
            out_BHLD = self._attend(query, key, value, scale=scale)
            return out_BHLD.transpose(1, 2).contiguous(), None
        valid_T = attention_mask.flatten().nonzero().squeeze(1)
        starts = F.pad(attention_mask.sum(dim=1).cumsum(dim=0), (1, 0)).int()
        q, k, v = (x.transpose(1, 2).flatten(0, 1)[valid_T] for x in (query, key, value))
        B, H, L, D = query.shape
        out = query.new_zeros(B * L, H, D)
        out[valid_T] = self._ragged(q, k, v, starts, scale)
        return out.unflatten(0, (B, L)), None

    def _ragged(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float | None
    ) -> Tensor:
        """Attend packed sequences, (T, H, D), in one call or in one each."""
        if self._packed:
            return self._attend(q, k, v, scale=scale, cu_seqlens_q=starts, cu_seqlens_k=starts)
        outs = []
        for first, end in itertools.pairwise(starts.tolist()):
            parts = (x[first:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            outs.append(self._attend(*parts, scale=scale).squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if q.device not in self._resolved:
            self._resolved[q.device] = resolve_attention(self._candidate, q.device)
        return self._resolved[q.device](q, k, v, causal=True, **options)


def register_unpadded(candidate: str = "flash:fa2", *, packed: bool = True) -> str:
    """Register `candidate` to be called un-padded; return the name for `set_attn_implementation`.

    `candidate` is text as in `attention_from_text`. With `packed` it is called once, and must take
    `cu_seqlens`; without, once a sequence. ValueError for text that names nothing, and at the first
    forward for dropout or for queries that are not as many as keys.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # optional dependency
    from transformers.masking_utils import flash_attention_mask  # optional dependency

    resolve_attention(candidate, torch.device("cpu"))
    # a name with "flash" or "sdpa" in it would be taken for one of transformers' own
    known = re.sub(r"\W+", "_", candidate).replace("flash", "tiled").replace("sdpa", "torch")
    name = f"unpadded_{'packed' if packed else 'each'}_{known}"
    AttentionInterface.register(name, _Unpadded(candidate, packed))
    AttentionMaskInterface.register(name, flash_attention_mask)
    return name


def flash_attention_2(device: str) -> str:
    """Return transformers' name of FlashAttention-2 if it runs on `device`, else ""."""
    from transformers.utils.import_utils import is_flash_attn_2_available  # optional dependency

    on_gpu = torch.device(device).type == "cuda"
    return "flash_attention_2" if on_gpu and is_flash_attn_2_available() else ""
